//! Dims: named directions of tensors, and where a rank's part of one lies.

use crate::mesh::SubAxis;
use serde::{Deserialize, Serialize};
use std::fmt;

/// A dim of a [`Dims`] table. Identity is declaration, not size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Dim(pub u32);

/// A linear form over the coordinates of a rank (and the current microbatch), in elements.
pub type Linear = Vec<(SubAxis, u64)>;

/// Where an index map begins.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Base {
    /// At index 0, on every rank.
    Zero,
    /// The sum of `coordinate * stride`, per rank.
    Coords(Linear),
    /// In a kernel: the scalar argument of this number.
    Slot(u32),
}

/// Local index to global index (or to an index of a coarser part). The local index is read as a mixed-radix number
/// with the extents of `parts`, outermost first; digit k counts `stride` k elements; `base` is added.
/// One part of stride 1 is a contiguous block, by far the usual case.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct IndexMap {
    /// `(extent, stride)`.
    pub parts: Vec<(u64, u64)>,
    /// What is added to the index of every local element.
    pub base: Base,
}

impl IndexMap {
    /// The whole of a dim.
    pub fn whole(size: u64) -> IndexMap {
        IndexMap { parts: vec![(size, 1)], base: Base::Zero }
    }

    /// The number of local elements.
    pub fn len(&self) -> u64 {
        self.parts.iter().map(|p| p.0).product()
    }

    /// Whether there are no local elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The index of local element `i`, without the base.
    pub fn offset(&self, mut i: u64) -> u64 {
        let mut sum = 0;
        for k in 0..self.parts.len() {
            let (extent, stride) = self.parts[crate::fault!("dim.offset.order", k, self.parts.len() - 1 - k)];
            sum += i % extent * stride;
            i /= extent;
        }
        sum
    }

    /// The local element whose offset (without base) is `x`, if this map reaches it. Strides decrease outwards in.
    pub fn find(&self, mut x: u64) -> Option<u64> {
        let mut i = 0;
        for &(extent, stride) in &self.parts {
            let q = x / stride;
            if crate::fault!("dim.find.extent", q > extent, q >= extent) {
                return None;
            }
            x -= q * stride;
            i = i * extent + q;
        }
        (x == 0).then_some(i)
    }

    /// Whether local elements are consecutive.
    pub fn is_contiguous(&self) -> bool {
        self.parts.iter().filter(|p| p.0 != 1).count() <= 1 && self.parts.iter().all(|p| p.0 == 1 || p.1 == 1)
    }
}

/// In which order the elements of a dim are stored. Everything between the borders of a program counts them as they are stored; indices,
/// random numbers, data, parameters and tables count them as the model does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Order {
    /// As the model counts them.
    #[default]
    Plain,
    /// The dim is cut into `2 * pairs` chunks of `chunk` elements; stored are the first and the last, then the second and the last but one, and
    /// so on. So in causal attention equal parts of the dim have equal work.
    ZigZag {
        /// Half the number of chunks.
        pairs: u64,
        /// Elements of a chunk.
        chunk: u64,
    },
}

impl Order {
    /// The model's index of the element at a stored index.
    pub fn index(self, stored: u64) -> u64 {
        match self {
            Order::Plain => stored,
            Order::ZigZag { pairs, chunk } => {
                let (pair, last, i) = (stored / (2 * chunk), stored / chunk % 2 == 1, stored % chunk);
                if last { crate::fault!("dim.zigzag.last", pair * chunk + i, (2 * pairs - 1 - pair) * chunk + i) } else { pair * chunk + i }
            }
        }
    }

    /// Where the element of a model's index is stored: the inverse of [`Order::index`].
    pub fn stored(self, index: u64) -> u64 {
        match self {
            Order::Plain => index,
            Order::ZigZag { pairs, chunk } => {
                let (k, i) = (index / chunk, index % chunk);
                let place = if k < pairs { 2 * k } else { 2 * (2 * pairs - 1 - k) + crate::fault!("dim.zigzag.stored", 0, 1) };
                place * chunk + i
            }
        }
    }

    /// Whether it is an order of this many elements.
    pub fn fits(self, size: u64) -> bool {
        match self {
            Order::Plain => true,
            Order::ZigZag { pairs, chunk } => pairs > 0 && chunk > 0 && pairs.checked_mul(2).and_then(|n| n.checked_mul(chunk)) == Some(size),
        }
    }
}

/// What is known of a dim.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DimInfo {
    /// `hidden`. Not unique: every call of a function declares its own. A rank's part prints as `seq/tp`.
    pub name: String,
    /// Elements: of the whole dim in a logical graph, of the local part in a rank's.
    pub size: u64,
    /// Elements that count, if `size` was padded; the rest is zero or masked. Global.
    pub logical: u64,
    /// The dim this one is a copy of (`dim keys = seq;`): same size, same digits, another identity.
    pub copy_of: Option<Dim>,
    /// Whether no axis splits it, whatever a plan says: what a router picks from.
    pub whole: bool,
    /// Local to global index.
    pub index: IndexMap,
    /// The global extent of the dim (equal to `size` in a logical graph).
    pub global: u64,
    /// The order of the whole dim, of which `index` finds a part.
    pub order: Order,
}

impl DimInfo {
    /// A whole dim without padding, in plain order, that is no copy.
    pub fn new(name: impl Into<String>, size: u64) -> DimInfo {
        DimInfo {
            name: name.into(),
            size,
            logical: size,
            copy_of: None,
            whole: false,
            index: IndexMap::whole(size),
            global: size,
            order: Order::Plain,
        }
    }
}

/// The dims of a graph.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Dims {
    /// Indexed by [`Dim`].
    pub list: Vec<DimInfo>,
}

impl Dims {
    /// Appends a dim.
    pub fn add(&mut self, info: DimInfo) -> Dim {
        self.list.push(info);
        Dim(u32::try_from(self.list.len() - 1).expect("invariant: fewer than 2^32 dims"))
    }

    /// Elements of a dim: of the whole in a logical graph, of the local part in a rank's.
    pub fn size(&self, dim: Dim) -> u64 {
        self[dim].size
    }

    /// The name that a dim was declared by, which others may have too.
    pub fn name(&self, dim: Dim) -> &str {
        &self[dim].name
    }

    /// The name as texts write it: `keys`, and `keys#1` for the second dim of that name.
    pub fn label(&self, dim: Dim) -> String {
        let name = self.name(dim);
        match self.list[..dim.0 as usize].iter().filter(|d| d.name == name).count() {
            0 => name.into(),
            k => format!("{name}#{k}"),
        }
    }

    /// The dim that this one is, directly or not, a copy of; itself if of none.
    pub fn original(&self, mut dim: Dim) -> Dim {
        while let Some(d) = self[dim].copy_of {
            dim = d;
        }
        dim
    }

    /// All dims, in the order of the table.
    pub fn ids(&self) -> impl Iterator<Item = Dim> + use<> {
        (0..self.list.len() as u32).map(Dim)
    }

    /// Strides of a dense tensor in this storage order, in elements.
    pub fn strides(&self, order: &[Dim]) -> Vec<u64> {
        let mut strides = vec![1; order.len()];
        for k in (1..order.len()).rev() {
            strides[k - 1] = strides[k] * self.size(order[crate::fault!("dim.strides.outer", k - 1, k)]);
        }
        strides
    }

    /// The number of elements of a tensor with these dims.
    pub fn elements(&self, dims: &[Dim]) -> u64 {
        dims.iter().map(|&d| self.size(d)).product()
    }
}

impl std::ops::Index<Dim> for Dims {
    type Output = DimInfo;
    fn index(&self, dim: Dim) -> &DimInfo {
        &self.list[dim.0 as usize]
    }
}

impl std::ops::IndexMut<Dim> for Dims {
    fn index_mut(&mut self, dim: Dim) -> &mut DimInfo {
        &mut self.list[dim.0 as usize]
    }
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "d{}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_zig_zag_stores_first_and_last_chunks_together() {
        let order = Order::ZigZag { pairs: 3, chunk: 2 };
        let stored: Vec<u64> = (0..12).map(|p| order.index(p)).collect();
        assert_eq!(stored, [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]);
        assert!((0..12).all(|i| order.index(order.stored(i)) == i && order.fits(12) && !order.fits(10)));
    }
}
