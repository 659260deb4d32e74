//! The mesh: an ordered list of prime sub-axes over which tensors are split.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The axes a user names. `Microbatch` is time, not place: a step's microbatches split `batch` exactly as ranks do,
/// so what must be summed over them follows from the same algebra.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Axis {
    Microbatch,
    Pp,
    Dp,
    Cp,
    Tp,
}

impl Axis {
    pub const ALL: [Axis; 5] = [Axis::Microbatch, Axis::Pp, Axis::Dp, Axis::Cp, Axis::Tp];

    pub fn name(self) -> &'static str {
        match self {
            Axis::Microbatch => "mb",
            Axis::Pp => "pp",
            Axis::Dp => "dp",
            Axis::Cp => "cp",
            Axis::Tp => "tp",
        }
    }

    pub fn parse(name: &str) -> Option<Axis> {
        Axis::ALL.into_iter().find(|a| a.name() == name)
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

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SubAxisInfo {
    pub axis: Axis,
    /// Which factor of its axis, outermost first.
    pub factor: u8,
    pub size: u64,
}

/// Sizes of the axes and their sub-axes, outermost first: mb, pp, dp, cp, tp. Ranks count with tp fastest
/// (Megatron's order `tp-cp-ep-dp-pp`). `Microbatch` and `Pp` are one sub-axis each, whatever their size.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Mesh {
    pub subs: Vec<SubAxisInfo>,
}

/// A position in the mesh: one coordinate per sub-axis (the microbatch's is 0 for a rank at rest).
pub type Coords = Vec<u64>;

impl Mesh {
    pub fn new(microbatches: u64, pp: u64, dp: u64, cp: u64, tp: u64) -> Mesh {
        let mut subs = vec![];
        for (axis, size) in [(Axis::Microbatch, microbatches), (Axis::Pp, pp)] {
            if size > 1 {
                subs.push(SubAxisInfo { axis, factor: 0, size });
            }
        }
        for (axis, size) in [(Axis::Dp, dp), (Axis::Cp, cp), (Axis::Tp, tp)] {
            for (k, p) in prime_factors(size).into_iter().enumerate() {
                subs.push(SubAxisInfo { axis, factor: k as u8, size: p });
            }
        }
        Mesh { subs }
    }

    pub fn ids(&self) -> impl Iterator<Item = SubAxis> + use<> {
        (0..self.subs.len() as u8).map(SubAxis)
    }

    pub fn of(&self, axis: Axis) -> impl Iterator<Item = SubAxis> + '_ {
        self.ids().filter(move |&u| self[u].axis == axis)
    }

    /// The size of an axis: the product of its sub-axes.
    pub fn size(&self, axis: Axis) -> u64 {
        self.of(axis).map(|u| self[u].size).product()
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
                rest /= s.size;
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
        ranks.sort_unstable();
        ranks
    }

    /// The pipeline stage of a rank.
    pub fn stage(&self, rank: u64) -> u64 {
        let c = self.coords(rank);
        self.of(Axis::Pp).map(|u| c[u.0 as usize]).next().unwrap_or(0)
    }

    /// The text of a set of sub-axes: `dp`, `tp`, or `tp.0` where only one factor of several is meant.
    pub fn describe(&self, subs: &[SubAxis]) -> String {
        let mut out: Vec<String> = vec![];
        for axis in Axis::ALL {
            let here: Vec<SubAxis> = subs.iter().copied().filter(|&u| self[u].axis == axis).collect();
            if !here.is_empty() && here.len() == self.of(axis).count() {
                out.push(axis.to_string());
            } else {
                out.extend(here.iter().map(|&u| format!("{axis}.{}", self[u].factor)));
            }
        }
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

    #[test]
    fn ranks_and_coordinates_are_inverse() {
        let mesh = Mesh::new(3, 2, 6, 1, 4);
        for rank in 0..mesh.world() {
            assert_eq!(mesh.rank(&mesh.coords(rank)), rank);
        }
    }

    #[test]
    fn sets_of_sub_axes_read_back() {
        let mesh = Mesh::new(2, 2, 6, 1, 4);
        let all: Vec<SubAxis> = mesh.ids().collect();
        for bits in 0..1u32 << all.len() {
            let set: Vec<SubAxis> = all.iter().copied().filter(|u| bits >> u.0 & 1 == 1).collect();
            assert_eq!(mesh.parse_subs(&mesh.describe(&set)), Some(set));
        }
    }
}
