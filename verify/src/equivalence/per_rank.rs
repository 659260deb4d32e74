//! What ranks have where they have different values: a node is done once for each of them.
//!
//! A rank's own part of a bucket may be some whole parameters. Where ops take one of these, as where a matrix is
//! multiplied by itself, ranks do the same op of different values. What they gather in the end is known of each.

use super::pieces::{Joined, JoinedPiece, SymbolicValue};
use super::rules::{Rules, bits, of_coords};
use crate::Invariant;
use crate::terms::{TermKind, TermView};
use crate::violation::Checked;
use ir::mesh::{Mesh, SubAxis};
use ir::op::DType;
use std::rc::Rc;

/// The value that each rank of these sub-axes has, in rank order.
#[derive(Clone, Debug, PartialEq)]
pub struct Each {
    pub own: Vec<SubAxis>,
    pub of: Rc<[SymbolicValue]>,
}

impl Each {
    /// The value of each rank, from ranks' own parts of a value in one dim. An unknown part becomes a value of its
    /// own.
    pub fn of_parts(rules: &mut Rules, j: &Joined, dtype: DType) -> Checked<Each> {
        let ranks: u64 = j.own.iter().map(|u| rules.mesh[*u].size).product();
        let count = j.count() / ranks;
        let mut of = vec![];
        for rank in 0..ranks {
            let pieces = j.cut(rules.mesh, rank * count, count)?.into_iter().map(|p| match p.of {
                Some(_) => p,
                None => JoinedPiece { count: p.count, of: Some(unknown(rules, p.count, dtype)) },
            });
            let part = Joined { own: vec![], pieces: pieces.collect(), ..j.clone() };
            of.push(part.held(rules.mesh, &[count]));
        }
        Ok(Each { own: j.own.clone(), of: of.into() })
    }

    /// The ranks' values as parts of one value, along one dim.
    pub fn joined(&self) -> Checked<Joined> {
        let mut pieces: Vec<JoinedPiece> = vec![];
        for x in self.of.iter() {
            match x {
                SymbolicValue::One(x) => {
                    let x = x.flat();
                    pieces.push(JoinedPiece { count: x.dims[0].extent(), of: Some(x) });
                }
                SymbolicValue::Joined(j) if (j.lead, j.trail) == (0, 0) && j.own.is_empty() => pieces.extend(j.pieces.iter().cloned()),
                SymbolicValue::Joined(_) | SymbolicValue::Each(_) | SymbolicValue::Sums(_) => {
                    return Err(Invariant::OpOnPieces.breach("ranks' values in pieces, in several dims"));
                }
            }
        }
        Ok(Joined { lead: 0, trail: 0, own: self.own.clone(), pieces: pieces.into() })
    }

    /// The ranks' values, gathered on all ranks.
    pub fn gathered(&self, rules: &mut Rules) -> Checked<SymbolicValue> {
        let joined = self.joined()?;
        for x in joined.pieces.iter().filter_map(|p| p.of.as_ref()) {
            if (rules.varies(x.term) | of_coords(x)) & bits(&self.own) != 0 {
                return Err(Invariant::OpOnPieces.breach("ranks take what a rank has for different values"));
            }
        }
        Ok(SymbolicValue::Joined(Joined { own: vec![], ..joined }))
    }

    /// The value that rank number `rank` has of a value.
    pub fn on(&self, mesh: &Mesh, rank: usize, x: &SymbolicValue) -> Checked<SymbolicValue> {
        match x {
            SymbolicValue::Each(e) if e.own == self.own => Ok(e.of[rank].clone()),
            SymbolicValue::One(x) => Ok(SymbolicValue::One(self.placed(mesh, rank, x))),
            SymbolicValue::Joined(j) if bits(&j.own) & bits(&self.own) == 0 => Ok(x.clone()),
            SymbolicValue::Each(_) | SymbolicValue::Joined(_) | SymbolicValue::Sums(_) => {
                Err(Invariant::BucketAligned.breach("its operands are parts of different ranks"))
            }
        }
    }

    /// A value with the coordinates of a rank filled in.
    fn placed(&self, mesh: &Mesh, rank: usize, x: &TermView) -> TermView {
        let (mut rest, mut out) = (rank as u64, x.clone());
        for u in self.own.iter().rev() {
            let mut at = rest % mesh[*u].size;
            rest /= mesh[*u].size;
            if let Some(k) = out.coords.iter().position(|c| c.0 == *u) {
                let (_, digits) = out.coords.remove(k);
                for (n, stride) in digits.iter().rev() {
                    out.offset += at % n * stride;
                    at /= n;
                }
            }
        }
        out
    }
}

/// A new value of which nothing is known, different from all others.
fn unknown(rules: &mut Rules, count: u64, dtype: DType) -> TermView {
    let number = rules.terms.count();
    TermView::whole(rules.terms.plain(TermKind::Unknown(number), vec![], vec![count], dtype), &[count])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::terms::digits::Digits;
    use ir::mesh::{Axis, Sizes};
    use ir::op::{Collective, Op, Reduce};

    fn input(rules: &mut Rules, k: u32, size: u64) -> TermView {
        let kind = TermKind::Held(Op::Param(k), vec![]);
        TermView::whole(rules.terms.plain(kind, vec![], vec![size], DType::F32), &[size])
    }

    #[test]
    fn ranks_own_parts_are_what_each_has_and_all_of_them_once_gathered() {
        let mesh = Mesh::of_sizes(&Sizes { dp: 4, ..Sizes::default() }).expect("a mesh");
        let own: Vec<SubAxis> = mesh.of(Axis::Dp).collect();
        let mut rules = Rules::new(&mesh);
        // Three of the four ranks have known values of six elements each.
        let all: Vec<TermView> = (0..3).map(|k| input(&mut rules, k, 6)).collect();
        let runs = all.iter().cloned().map(Some).chain([None]).map(|of| JoinedPiece { count: 6, of });
        let parts = Joined { lead: 0, trail: 0, own: own.clone(), pieces: runs.collect() };
        let each = Each::of_parts(&mut rules, &parts, DType::F32).expect("parts");
        assert_eq!(each.of[..3], all.iter().cloned().map(SymbolicValue::One).collect::<Vec<_>>()[..]);
        assert!(each.of[3] != each.of[2] && matches!(&each.of[3], SymbolicValue::One(_)));
        let again = Each::of_parts(&mut rules, &parts, DType::F32).expect("parts");
        assert!(again.of[3] != each.of[3], "nothing is known of either");
        let gathered = each.gathered(&mut rules).expect("all ranks have the same of each");
        let SymbolicValue::Joined(gathered) = gathered else { panic!("{gathered:?}") };
        assert!(gathered.own.is_empty());
        assert!(Joined { own: vec![], ..parts }.agrees(&mut rules, &SymbolicValue::Joined(gathered.clone())).expect("parts"));
        let swapped: Vec<JoinedPiece> = [1, 0, 2, 3].map(|k| gathered.pieces[k].clone()).to_vec();
        let swapped = SymbolicValue::Joined(Joined { pieces: swapped.into(), ..gathered.clone() });
        assert!(!Joined { own: vec![], ..gathered }.agrees(&mut rules, &swapped).expect("parts"));
    }

    #[test]
    fn what_ranks_take_for_different_values_is_not_gathered_and_a_part_is_that_of_the_rank() {
        let mesh = Mesh::of_sizes(&Sizes { dp: 4, ..Sizes::default() }).expect("a mesh");
        let own: Vec<SubAxis> = mesh.of(Axis::Dp).collect();
        let mut rules = Rules::new(&mesh);
        let x = input(&mut rules, 0, 8);
        let digits: Vec<_> = own.iter().copied().zip([Digits::new([(2, 4)]), Digits::new([(2, 2)])]).collect();
        let part = SymbolicValue::One(TermView { coords: digits, dims: vec![Digits::new([(2, 1)])], ..x.clone() });
        let of_rank = |rank: u64| SymbolicValue::One(TermView { offset: 2 * rank, dims: vec![Digits::new([(2, 1)])], ..x.clone() });
        let each = Each { own: own.clone(), of: (0..4).map(of_rank).collect() };
        for rank in 0..4 {
            assert_eq!(each.on(&mesh, rank, &part), Ok(of_rank(rank as u64)), "{rank}");
        }
        // The term of a reduce-scatter is another value on each rank, so nothing is known of all ranks' values.
        let kind = TermKind::Exchange { kind: Collective::ReduceScatter(Reduce::Sum), subs: own.clone(), stages: None };
        let varies = rules.terms.plain(kind, vec![x], vec![2], DType::F32);
        let of = (0..4).map(|_| SymbolicValue::One(TermView::whole(varies, &[2]))).collect();
        assert_eq!(Each { own, of }.gathered(&mut rules).map_err(|e| e.invariant), Err(Invariant::OpOnPieces));
    }
}
