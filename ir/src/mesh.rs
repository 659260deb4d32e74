//! The mesh: an ordered list of prime sub-axes over which tensors are split.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The axes a user names. `Microbatch` is time, not place: a step's microbatches split `batch` exactly as ranks do,
/// so what must be summed over them follows from the same algebra.
///
/// The ranks of a stage form two grids: `dp x cp x tp` for dense ops, `edp x ep x etp` for experts. Both are groupings of the
/// same sub-axes, so experts do not multiply the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Axis {
    /// The microbatches of a step: time, not place.
    Microbatch,
    /// Pipeline stages.
    Pp,
    /// Data parallelism of dense ops.
    Dp,
    /// Context parallelism: parts of sequences.
    Cp,
    /// Tensor parallelism of dense ops.
    Tp,
    /// Data parallelism of experts: what `ep` and `etp` leave of a stage's ranks.
    Edp,
    /// Expert parallelism: different experts on different ranks.
    Ep,
    /// Tensor parallelism within each expert.
    Etp,
}

impl Axis {
    /// Every axis: time, stages, the dense grid, the experts' grid.
    pub const ALL: [Axis; 8] = [Axis::Microbatch, Axis::Pp, Axis::Dp, Axis::Cp, Axis::Tp, Axis::Edp, Axis::Ep, Axis::Etp];

    /// As in plans and text forms; `mb` for microbatches.
    pub fn name(self) -> &'static str {
        match self {
            Axis::Microbatch => "mb",
            Axis::Pp => "pp",
            Axis::Dp => "dp",
            Axis::Cp => "cp",
            Axis::Tp => "tp",
            Axis::Edp => "edp",
            Axis::Ep => "ep",
            Axis::Etp => "etp",
        }
    }

    /// The axis of this name, if there is one.
    pub fn parse(name: &str) -> Option<Axis> {
        Axis::ALL.into_iter().find(|a| a.name() == name)
    }

    /// Whether it tells ranks of one pipeline stage apart.
    pub fn within_stage(self) -> bool {
        match self {
            Axis::Dp | Axis::Cp | Axis::Tp | Axis::Edp | Axis::Ep | Axis::Etp => true,
            Axis::Microbatch | Axis::Pp => false,
        }
    }

    /// What its sub-axes are to experts, unless a mesh says otherwise.
    pub fn usual_role(self) -> Axis {
        match self {
            Axis::Dp | Axis::Cp => Axis::Edp,
            Axis::Tp => Axis::Etp,
            Axis::Microbatch | Axis::Pp | Axis::Edp | Axis::Ep | Axis::Etp => self,
        }
    }
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A prime factor of an axis: an index into [`Mesh::subs`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SubAxis(pub u8);

/// What a sub-axis is part of, in both grids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SubAxisInfo {
    /// In the dense grid.
    pub axis: Axis,
    /// Which factor of its axis, outermost first.
    pub factor: u8,
    /// The number of its coordinates: a prime, but for microbatches and stages.
    pub size: u64,
    /// Its axis in the grid of experts; `axis` itself for microbatches and stages.
    pub role: Axis,
}

impl SubAxisInfo {
    /// A sub-axis with the usual role of its axis.
    pub fn new(axis: Axis, factor: u8, size: u64) -> SubAxisInfo {
        SubAxisInfo { axis, factor, size, role: axis.usual_role() }
    }
}

/// Sizes of the axes and their sub-axes, outermost first: mb, pp, dp, cp, tp. Ranks count with tp fastest
/// (Megatron's order `tp-cp-ep-dp-pp`). `Microbatch` and `Pp` are one sub-axis each, whatever their size.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Mesh {
    /// Indexed by [`SubAxis`], outermost first; an axis of size 1 has none.
    pub subs: Vec<SubAxisInfo>,
}

/// Sizes of axes. `edp` is what remains: `dp * cp * tp / (ep * etp)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Microbatches of a step.
    pub microbatches: u64,
    /// Pipeline stages.
    pub pp: u64,
    /// Ranks of data parallelism.
    pub dp: u64,
    /// Ranks of context parallelism.
    pub cp: u64,
    /// Ranks of tensor parallelism.
    pub tp: u64,
    /// Ranks over which experts are split.
    pub ep: u64,
    /// None: as `tp`.
    pub etp: Option<u64>,
    /// Groups of neighbouring ranks of dp that are told apart by its outermost sub-axes ([`Mesh::replicas`]).
    pub replicas: u64,
}

impl Default for Sizes {
    fn default() -> Self {
        Sizes { microbatches: 1, pp: 1, dp: 1, cp: 1, tp: 1, ep: 1, etp: None, replicas: 1 }
    }
}

/// A position in the mesh: one coordinate per sub-axis (the microbatch's is 0 for a rank at rest).
pub type Coords = Vec<u64>;

impl Mesh {
    /// A mesh whose experts are split as dense layers are: `etp` is `tp`, `ep` is 1.
    pub fn new(microbatches: u64, pp: u64, dp: u64, cp: u64, tp: u64) -> Mesh {
        let sizes = Sizes { microbatches, pp, dp, cp, tp, ..Sizes::default() };
        Mesh::of_sizes(&sizes).expect("invariant: etp = tp always fits")
    }

    /// The mesh of these sizes. The grid of experts takes factors from the innermost axes first, `etp` before `ep`: so `etp` is
    /// part of `tp` and `ep` folds over `cp`, then `dp`, as in Megatron's `parallel_state`. None if they do not divide.
    pub fn of_sizes(sizes: &Sizes) -> Option<Mesh> {
        let mut subs = vec![];
        for (axis, size) in [(Axis::Microbatch, sizes.microbatches), (Axis::Pp, sizes.pp)] {
            if size > 1 {
                subs.push(SubAxisInfo::new(axis, 0, size));
            }
        }
        let mut wanted = [(Axis::Etp, prime_factors(sizes.etp.unwrap_or(sizes.tp))), (Axis::Ep, prime_factors(sizes.ep))];
        let mut axes = vec![];
        for (axis, size) in [(Axis::Tp, sizes.tp), (Axis::Cp, sizes.cp), (Axis::Dp, sizes.dp)] {
            let mut factors: Vec<(Axis, u64)> = vec![];
            for p in prime_factors(size) {
                let role = wanted.iter_mut().find_map(|(role, primes)| {
                    let k = primes.iter().position(|q| *q == p)?;
                    primes.remove(k);
                    Some(*role)
                });
                factors.push((role.unwrap_or(Axis::Edp), p));
            }
            // The factors are in the order edp, ep, etp, the outermost first.
            factors.sort_by_key(|f| f.0);
            // Factors that separate groups of ranks (`replicas`) come before them.
            let mut outer = if axis == Axis::Dp { prime_factors(sizes.replicas) } else { vec![] };
            factors.sort_by_cached_key(|f| outer.iter().position(|p| *p == f.1).map(|k| outer.remove(k)).is_none());
            axes.push((axis, factors));
        }
        if wanted.iter().any(|w| !w.1.is_empty()) {
            return None;
        }
        for (axis, factors) in axes.into_iter().rev() {
            subs.extend(factors.into_iter().enumerate().map(|(k, (role, size))| SubAxisInfo { axis, factor: k as u8, size, role }));
        }
        Some(Mesh { subs })
    }

    /// All sub-axes, outermost first.
    pub fn ids(&self) -> impl Iterator<Item = SubAxis> + use<> {
        (0..self.subs.len() as u8).map(SubAxis)
    }

    /// The sub-axes of an axis of either grid.
    pub fn of(&self, axis: Axis) -> impl Iterator<Item = SubAxis> + '_ {
        self.ids().filter(move |&u| self[u].axis == axis || self[u].role == axis)
    }

    /// The size of an axis: the product of its sub-axes.
    pub fn size(&self, axis: Axis) -> u64 {
        self.of(axis).map(|u| self[u].size).product()
    }

    /// The sub-axes of dp that tell so many groups of neighbouring ranks apart, the outermost. None if the mesh was not
    /// made for as many.
    pub fn replicas(&self, count: u64) -> Option<Vec<SubAxis>> {
        let mut left = count;
        let outer: Vec<SubAxis> = self
            .ids()
            .filter(|u| self[*u].axis == Axis::Dp)
            .take_while(|u| {
                let more = left > 1 && left.is_multiple_of(self[*u].size);
                left /= if more { self[*u].size } else { 1 };
                more
            })
            .collect();
        (left == 1).then_some(outer)
    }

    /// The number of ranks.
    pub fn world(&self) -> u64 {
        self.subs.iter().filter(|s| s.axis != Axis::Microbatch).map(|s| s.size).product()
    }

    /// The coordinates of a rank; the microbatch's is 0.
    pub fn coords(&self, rank: u64) -> Coords {
        let mut rest = rank;
        let mut out = vec![0; self.subs.len()];
        for (k, s) in self.subs.iter().enumerate().rev() {
            if s.axis != Axis::Microbatch {
                out[k] = rest % s.size;
                rest /= crate::fault!("mesh.coords.outermost", self.subs[0].size, s.size);
            }
        }
        out
    }

    /// The rank at coordinates; the microbatch's is ignored.
    pub fn rank(&self, coords: &[u64]) -> u64 {
        self.subs.iter().zip(coords).filter(|(s, _)| s.axis != Axis::Microbatch).fold(0, |r, (s, c)| r * s.size + c)
    }

    /// The ranks that differ from `rank` in the coordinates of `subs` alone, in rank order.
    pub fn group(&self, rank: u64, subs: &[SubAxis]) -> Vec<u64> {
        let mut out = vec![self.coords(rank)];
        for &u in subs {
            out = out
                .into_iter()
                .flat_map(|c| {
                    (0..self[u].size).map(move |k| {
                        let mut c = c.clone();
                        c[u.0 as usize] = k;
                        c
                    })
                })
                .collect();
        }
        let mut ranks: Vec<u64> = out.iter().map(|c| self.rank(c)).collect();
        ranks.sort_unstable_by_key(|r| crate::fault!("mesh.group.reversed", u64::MAX - r, *r));
        ranks
    }

    /// The first rank of a pipeline stage.
    pub fn first_of_stage(&self, stage: u64) -> u64 {
        let mut coords = vec![0; self.subs.len()];
        self.of(Axis::Pp).take(1).for_each(|u| coords[u.0 as usize] = stage);
        self.rank(&coords)
    }

    /// The pipeline stage of a rank.
    pub fn stage(&self, rank: u64) -> u64 {
        let c = self.coords(rank);
        self.of(Axis::Pp).map(|u| crate::fault!("mesh.stage.reversed", self[u].size - 1 - c[u.0 as usize], c[u.0 as usize])).next().unwrap_or(0)
    }

    /// The text of a set of sub-axes: `dp`, `tp`, `ep`, or `tp.0` where only one factor of several is meant. Axes of the dense grid
    /// are named first.
    pub fn describe(&self, subs: &[SubAxis]) -> String {
        let mut out: Vec<String> = vec![];
        let mut left: Vec<SubAxis> = self.ids().filter(|u| subs.contains(u)).collect();
        for axis in Axis::ALL {
            let all: Vec<SubAxis> = self.of(axis).collect();
            if !all.is_empty() && all.iter().all(|u| left.contains(u)) {
                out.push(axis.to_string());
                left.retain(|u| !all.contains(u));
            }
        }
        out.extend(left.iter().map(|&u| format!("{}.{}", self[u].axis, self[u].factor)));
        out.join("*")
    }

    /// The inverse of [`Mesh::describe`].
    pub fn parse_subs(&self, text: &str) -> Option<Vec<SubAxis>> {
        let mut out = vec![];
        for part in text.split('*').filter(|p| !p.is_empty()) {
            match part.split_once('.') {
                None => out.extend(self.of(Axis::parse(part)?)),
                Some((axis, factor)) => {
                    let (axis, factor) = (Axis::parse(axis)?, factor.parse::<u8>().ok()?);
                    out.push(self.of(axis).find(|&u| self[u].factor == factor)?);
                }
            }
        }
        out.sort_unstable();
        out.dedup();
        Some(out)
    }
}

impl std::ops::Index<SubAxis> for Mesh {
    type Output = SubAxisInfo;
    fn index(&self, u: SubAxis) -> &SubAxisInfo {
        &self.subs[u.0 as usize]
    }
}

fn prime_factors(mut n: u64) -> Vec<u64> {
    let mut out = vec![];
    let mut p = 2;
    while n > 1 {
        while n.is_multiple_of(p) {
            out.push(p);
            n /= p;
        }
        p += 1;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// SEMANTICS: world 16, tp = cp = dp = pp = 2, as Megatron's `parallel_state` builds it.
    #[test]
    fn groups_of_the_golden_case_are_megatrons() {
        let mesh = Mesh::new(1, 2, 2, 2, 2);
        let group = |rank, axes: &[Axis]| {
            let subs: Vec<SubAxis> = axes.iter().flat_map(|&a| mesh.of(a)).collect();
            mesh.group(rank, &subs)
        };
        assert_eq!(mesh.world(), 16);
        assert_eq!(group(0, &[Axis::Tp]), [0, 1]);
        assert_eq!(group(2, &[Axis::Tp]), [2, 3]);
        assert_eq!(group(0, &[Axis::Cp]), [0, 2]);
        assert_eq!(group(1, &[Axis::Cp]), [1, 3]);
        assert_eq!(group(0, &[Axis::Dp]), [0, 4]);
        assert_eq!(group(0, &[Axis::Dp, Axis::Cp]), [0, 2, 4, 6]);
        assert_eq!(group(0, &[Axis::Pp]), [0, 8]);
    }

    /// SEMANTICS: the same world with etp = ep = 2: EP folds over CP.
    #[test]
    fn groups_of_experts_are_megatrons() {
        let mesh = Mesh::of_sizes(&Sizes { pp: 2, dp: 2, cp: 2, tp: 2, ep: 2, etp: Some(2), ..Sizes::default() }).expect("fits");
        let group = |rank, axis: Axis| mesh.group(rank, &mesh.of(axis).collect::<Vec<_>>());
        assert_eq!(mesh.world(), 16);
        assert_eq!(group(0, Axis::Etp), [0, 1]);
        assert_eq!(group(0, Axis::Ep), [0, 2]);
        assert_eq!(group(1, Axis::Ep), [1, 3]);
        assert_eq!(group(4, Axis::Ep), [4, 6]);
        assert_eq!(group(0, Axis::Edp), [0, 4]);
    }

    #[test]
    fn experts_take_what_tensor_parallelism_leaves_then_cp_then_dp() {
        let mesh = Mesh::of_sizes(&Sizes { dp: 4, tp: 4, ep: 4, etp: Some(2), ..Sizes::default() }).expect("fits");
        let group = |axis: Axis| mesh.group(0, &mesh.of(axis).collect::<Vec<_>>());
        assert_eq!(group(Axis::Etp), [0, 1]);
        assert_eq!(group(Axis::Ep), [0, 2, 4, 6]);
        assert_eq!(group(Axis::Edp), [0, 8]);
        assert_eq!(Mesh::of_sizes(&Sizes { dp: 2, tp: 2, ep: 3, ..Sizes::default() }), None);
    }

    #[test]
    fn ranks_and_coordinates_are_inverse() {
        let mesh = Mesh::new(3, 2, 6, 1, 4);
        for rank in 0..mesh.world() {
            assert_eq!(mesh.rank(&mesh.coords(rank)), rank);
            let first = mesh.first_of_stage(mesh.stage(rank));
            assert!(first <= rank && mesh.stage(first) == mesh.stage(rank) && (first == 0 || mesh.stage(first - 1) != mesh.stage(rank)));
        }
    }

    #[test]
    fn sets_of_sub_axes_read_back() {
        let mesh = Mesh::of_sizes(&Sizes { microbatches: 2, pp: 2, dp: 6, tp: 4, ep: 6, etp: Some(2), ..Sizes::default() }).expect("fits");
        let all: Vec<SubAxis> = mesh.ids().collect();
        for bits in 0..1u32 << all.len() {
            let set: Vec<SubAxis> = all.iter().copied().filter(|u| bits >> u.0 & 1 == 1).collect();
            assert_eq!(mesh.parse_subs(&mesh.describe(&set)), Some(set));
        }
    }
}
