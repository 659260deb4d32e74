//! Where a value lies in memory: a strided view of a buffer. Views, slices and shards only change the view.

use ir::dim::{Base, Dim, Dims};
use ir::op::Op;
use ir::program::BufferAddress;

/// Element `(i0, i1, ..)` lies `sum(i_k * strides[k])` elements after `place`.
#[derive(Clone, Debug, PartialEq)]
pub struct View {
    /// Where element `(0, 0, ..)` lies.
    pub place: BufferAddress,
    /// The dims along which `i0`, `i1` and so on count.
    pub dims: Vec<Dim>,
    /// Elements between neighbours, for each of `dims`.
    pub strides: Vec<u64>,
}

impl View {
    /// Whether its elements are consecutive in the order `order`.
    pub fn is_dense(&self, dims: &Dims, order: &[Dim]) -> bool {
        let want = dims.strides(order);
        order.len() == self.dims.len() && order.iter().zip(want).all(|(d, s)| dims.size(*d) == 1 || self.stride(*d) == Some(s))
    }

    /// Elements between neighbours along `d`; `None` if the view lacks it.
    pub fn stride(&self, d: Dim) -> Option<u64> {
        self.dims.iter().position(|e| *e == d).map(|k| self.strides[k])
    }

    /// The view of a node's result, given that of its operand, if it needs no copy. `order` is the result's storage order.
    pub fn through(&self, dims: &Dims, op: &Op, order: &[Dim]) -> Option<View> {
        let mut place = self.place.clone();
        let mut pairs: Vec<(Dim, u64)> = self.dims.iter().copied().zip(self.strides.iter().copied()).collect();
        match op {
            Op::Cut | Op::StopGradient | Op::Expand | Op::Send { .. } | Op::Limit { .. } => {}
            Op::Slice { from, to, at } => {
                let k = pairs.iter().position(|p| p.0 == *from)?;
                place.offset += at * ir::fault!("lower.view.slice", 1, pairs[k].1);
                match to {
                    Some(d) => pairs[k].0 = *d,
                    None => {
                        pairs.remove(k);
                    }
                }
            }
            Op::Shard { from, to, index } => {
                let k = pairs.iter().position(|p| p.0 == *from)?;
                if !index.is_contiguous() {
                    return None;
                }
                if let Base::Coords(form) = &index.base {
                    place.coords.extend(form.iter().map(|(u, s)| (*u, s * ir::fault!("lower.view.shard", 1, pairs[k].1))));
                }
                pairs[k].0 = *to;
            }
            Op::View { from, to } => {
                let old: Vec<(u64, u64)> = from.iter().map(|d| Some((dims.size(*d), self.stride(*d)?))).collect::<Option<_>>()?;
                let new: Vec<u64> = to.iter().map(|d| dims.size(*d)).collect();
                let strides = reshape(&old, &new)?;
                pairs.retain(|p| !from.contains(&p.0));
                pairs.extend(to.iter().copied().zip(strides));
            }
            _ => return None,
        }
        let strides = order.iter().map(|d| pairs.iter().find(|p| p.0 == *d).map(|p| p.1)).collect::<Option<Vec<u64>>>()?;
        Some(View { place, dims: order.to_vec(), strides })
    }
}

/// The strides of the same elements in row-major order with other sizes, if strides can say it.
fn reshape(old: &[(u64, u64)], new: &[u64]) -> Option<Vec<u64>> {
    // Adjacent old dims that are dense among themselves count as one.
    let mut runs: Vec<(u64, u64)> = vec![];
    for &(n, s) in old.iter().filter(|d| d.0 != 1) {
        match runs.last_mut() {
            Some(last) if last.1 == n * s => *last = (last.0 * n, s),
            _ => runs.push((n, s)),
        }
    }
    let mut strides = vec![1; new.len()];
    let mut at = 0;
    let mut left = runs.first().copied();
    for (k, &n) in new.iter().enumerate() {
        if n == 1 {
            continue;
        }
        let (size, stride) = left?;
        if size % n != 0 {
            return None;
        }
        strides[k] = size / n * stride;
        left = if size == n {
            at += 1;
            runs.get(at).copied()
        } else {
            Some((size / n, stride))
        };
    }
    Some(strides)
}

#[cfg(test)]
mod tests {
    use super::reshape;

    #[test]
    fn merging_and_splitting_dense_dims_needs_no_copy() {
        assert_eq!(reshape(&[(4, 6), (6, 1)], &[24]), Some(vec![1]));
        assert_eq!(reshape(&[(24, 1)], &[2, 3, 4]), Some(vec![12, 4, 1]));
        assert_eq!(reshape(&[(4, 100), (6, 1)], &[2, 2, 6]), Some(vec![200, 100, 1]));
    }

    #[test]
    fn merging_dims_apart_needs_one() {
        assert_eq!(reshape(&[(4, 1), (6, 4)], &[24]), None);
        assert_eq!(reshape(&[(4, 100), (6, 1)], &[24]), None);
    }
}
