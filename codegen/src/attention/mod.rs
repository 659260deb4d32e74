//! Attention without a matrix of scores in memory (Dao et al. 2022), forward and backward.
//!
//! Queries and keys go in blocks. A block of scores lives in scratch, small enough for the first-level cache; the softmax over keys is kept as a
//! running maximum and a running sum per query. Blocks that the causal mask hides are skipped, blocks that it cuts are masked.
//! Operands whose rows are not whole vectors, or whose last block is not full, are copied block by block into padded scratch.

mod backward;
mod forward;
#[cfg(test)]
mod tests;
mod tiles;

pub use backward::emit as emit_backward;
pub use forward::emit as emit_forward;

use crate::CompileError;
use crate::abi::Entry;
use crate::build::Builder;
use crate::build::llvm::{Index, Llvm, Pointer, Vector};
use crate::layout::{self, div_ceil, tensors};
use crate::pointwise;
use crate::target::Target;
use ir::dim::{Base, Dim, IndexMap};
use ir::graph::Value;
use ir::kernel::Kernel;
use ir::op::{Attention, DType, Op};

/// Queries and keys of a block, where there are as many.
const BLOCK: i64 = 64;

/// Sizes and operands of one attention.
pub struct Plan<'a> {
    pub kernel: &'a Kernel,
    pub attention: Attention,
    pub queries: i64,
    pub keys: i64,
    /// Elements of a head, and the same rounded up to whole vectors.
    pub d: i64,
    pub width: i64,
    pub query_block: i64,
    pub key_block: i64,
    /// Dims of q beside `at` and `d`: those that k has too, and those whose queries share keys.
    pub shared: Vec<Dim>,
    pub group: Vec<Dim>,
}

/// A matrix operand: rows along `at` or `keys`, columns along `d`; strides in elements.
#[derive(Clone, Copy)]
pub struct Rows {
    pub tensor: usize,
    pub row_stride: i64,
    pub column_stride: i64,
    pub rows: i64,
    pub block: i64,
}

impl<'a> Plan<'a> {
    /// The attention that the kernel's outputs are results of.
    ///
    /// # Errors
    /// An output is something else, or not f32.
    pub fn new(kernel: &'a Kernel, target: &Target) -> Result<Plan<'a>, CompileError> {
        let body = &kernel.body;
        let first = &body[kernel.outputs[0].value];
        let attention = match &first.op {
            Op::Attention(a) | Op::AttentionLse(a) | Op::AttentionGrad(a, _) => a.clone(),
            other => return Err(CompileError::unsupported(format!("`{}` as a result of an attention kernel", other.name()))),
        };
        for output in &kernel.outputs {
            let node = &body[output.value];
            if !matches!(node.op, Op::Attention(_) | Op::AttentionLse(_) | Op::AttentionGrad(..)) {
                return Err(CompileError::unsupported(format!("`{}` after attention", node.op.name())));
            }
            if let Some(other) = node.args.iter().map(|a| body[*a].ty.dtype).find(|t| *t != DType::F32) {
                return Err(CompileError::unsupported(format!("attention of {}", other.name())));
            }
        }
        let (q, k) = (body.dims_of(first.args[0]), body.dims_of(first.args[1]));
        let others = q.iter().copied().filter(|d| *d != attention.at && *d != attention.d);
        let (shared, group) = others.partition(|d| k.contains(d));
        let size = |dim: Dim| body.dims.size(dim) as i64;
        let lanes = target.lanes() as i64;
        let whole_vectors = |n: i64| div_ceil(n, lanes) * lanes;
        let (queries, keys, d) = (size(attention.at), size(attention.keys), size(attention.d));
        Ok(Plan {
            kernel,
            queries,
            keys,
            d,
            width: whole_vectors(d),
            query_block: queries.min(BLOCK),
            key_block: whole_vectors(keys).min(BLOCK),
            shared,
            group,
            attention,
        })
    }

    pub fn query_blocks(&self) -> i64 {
        div_ceil(self.queries, self.query_block)
    }

    pub fn key_blocks(&self) -> i64 {
        div_ceil(self.keys, self.key_block)
    }

    /// The tensor that an operand of the attention is.
    ///
    /// # Errors
    /// It is not an input of the kernel.
    pub fn operand(&self, v: Value) -> Result<usize, CompileError> {
        match self.kernel.body[v].op {
            Op::Input(i) => Ok(i as usize),
            _ => Err(CompileError::unsupported("an operand of attention that is not an input")),
        }
    }

    pub fn stride(&self, tensor: usize, dim: Dim) -> i64 {
        let (ty, strides) = tensors(self.kernel)[tensor];
        layout::stride(ty, strides, dim)
    }

    /// A tensor as rows along `at`.
    pub fn query_rows(&self, tensor: usize) -> Rows {
        self.rows(tensor, self.attention.at, self.queries, self.query_block)
    }

    /// A tensor as rows along `keys`.
    pub fn key_rows(&self, tensor: usize) -> Rows {
        self.rows(tensor, self.attention.keys, self.keys, self.key_block)
    }

    fn rows(&self, tensor: usize, dim: Dim, rows: i64, block: i64) -> Rows {
        Rows { tensor, row_stride: self.stride(tensor, dim), column_stride: self.stride(tensor, self.attention.d), rows, block }
    }

    /// Whether blocks of these rows can be read where they are: whole vectors, whole blocks.
    pub fn in_place(&self, rows: &Rows) -> bool {
        rows.column_stride == 1 && self.d == self.width && rows.rows % rows.block == 0
    }

    /// Elements between rows of a block as it is read.
    pub fn row_length(&self, rows: &Rows) -> i64 {
        if self.in_place(rows) { rows.row_stride } else { self.width }
    }

    fn sizes(&self, dims: &[Dim]) -> i64 {
        dims.iter().map(|d| self.kernel.body.dims.size(*d) as i64).product()
    }
}

/// Arguments of a kernel under construction.
pub struct Arguments<'c> {
    pub tensors: Vec<Pointer<'c>>,
    pub scalars: Pointer<'c>,
    pub scratch: Pointer<'c>,
}

impl<'c> Arguments<'c> {
    pub fn new(b: &Llvm<'c>, kernel: &Kernel, entry: &Entry<Index<'c>, Pointer<'c>>) -> Self {
        let count = kernel.inputs.len() + kernel.outputs.len();
        let tensors = (0..count).map(|i| b.load_pointer(b.at_const(entry.arguments, 8 * i as i64))).collect();
        Arguments { tensors, scalars: entry.scalars, scratch: entry.scratch }
    }

    /// The arguments at the point that `number` counts in `dims`, the last fastest.
    pub fn at(&self, b: &Llvm<'c>, plan: &Plan, dims: &[Dim], number: Index<'c>) -> Arguments<'c> {
        let (mut tensors, mut rest) = (self.tensors.clone(), number);
        for &dim in dims.iter().rev() {
            let size = b.index(plan.kernel.body.dims.size(dim) as i64);
            let index = b.index_rem(rest, size);
            rest = b.index_div(rest, size);
            for (tensor, pointer) in tensors.iter_mut().enumerate() {
                let stride = plan.stride(tensor, dim);
                if stride != 0 {
                    *pointer = b.at(*pointer, b.index_mul(index, b.index(4 * stride)));
                }
            }
        }
        Arguments { tensors, scalars: self.scalars, scratch: self.scratch }
    }
}

/// A run of queries or keys by their numbers in this rank's part.
#[derive(Clone, Copy)]
pub struct Span<'c> {
    pub first: Index<'c>,
    pub count: Index<'c>,
}

/// Block `number` of `rows` rows in blocks.
pub fn span<'c>(b: &Llvm<'c>, number: Index<'c>, block: i64, rows: i64) -> Span<'c> {
    let first = b.index_mul(number, b.index(block));
    Span { first, count: b.index_min(b.index(block), b.index_sub(b.index(rows), first)) }
}

/// The global position of a local index. Positions grow with the index.
pub fn position<'c>(b: &Llvm<'c>, scalars: Pointer<'c>, map: &IndexMap, index: Index<'c>) -> Index<'c> {
    let mut sum = index;
    if !map.is_contiguous() {
        let mut rest = index;
        sum = b.index(0);
        for &(extent, stride) in map.parts.iter().rev() {
            let digit = b.index_rem(rest, b.index(extent as i64));
            rest = b.index_div(rest, b.index(extent as i64));
            sum = b.index_add(sum, b.index_mul(digit, b.index(stride as i64)));
        }
    }
    match &map.base {
        Base::Zero => sum,
        Base::Slot(slot) => b.index_add(sum, b.load_index(b.at_const(scalars, 8 * i64::from(*slot)))),
        Base::Coords(_) => unreachable!("invariant: a verified kernel has slots only"),
    }
}

/// What the mask leaves of a block of scores.
pub enum Visible {
    /// Every score of every block.
    All,
    /// To be found block by block.
    Some,
}

impl Plan<'_> {
    pub fn visible(&self) -> Visible {
        if self.attention.causal || self.keys % self.key_block != 0 { Visible::Some } else { Visible::All }
    }

    fn maps(&self) -> (&IndexMap, &IndexMap) {
        let dims = &self.kernel.body.dims;
        (&dims[self.attention.at].index, &dims[self.attention.keys].index)
    }

    /// Whether any of the queries sees the first of the keys. Without a causal mask: always.
    pub fn any_visible<'c>(&self, b: &Llvm<'c>, scalars: Pointer<'c>, queries: Span<'c>, keys: Span<'c>) -> Option<inkwell::values::IntValue<'c>> {
        let (at, of) = self.maps();
        self.attention.causal.then(|| {
            let last = b.index_sub(b.index_add(queries.first, queries.count), b.index(1));
            b.index_less_equal(position(b, scalars, of, keys.first), position(b, scalars, at, last))
        })
    }

    /// Whether all of a whole block of keys are seen by all of the queries.
    pub fn all_visible<'c>(&self, b: &Llvm<'c>, scalars: Pointer<'c>, queries: Span<'c>, keys: Span<'c>) -> inkwell::values::IntValue<'c> {
        let (at, of) = self.maps();
        let whole = b.index_equal(keys.count, b.index(self.key_block));
        if !self.attention.causal {
            return whole;
        }
        let last = b.index_sub(b.index_add(keys.first, keys.count), b.index(1));
        b.both(whole, b.index_less_equal(position(b, scalars, of, last), position(b, scalars, at, queries.first)))
    }

    /// The lanes of a row of scores that are seen: query `row`, keys `key ..`, of which the block holds fewer than `end`.
    pub fn row_mask<'c>(&self, b: &Llvm<'c>, scalars: Pointer<'c>, row: Index<'c>, key: Index<'c>, end: Index<'c>) -> Vector<'c> {
        let (at, of) = self.maps();
        let present = b.mask_below(b.index_sub(end, key));
        if !self.attention.causal {
            return present;
        }
        use crate::build::{Compare, IntBinary};
        let local = b.int2(IntBinary::Add, b.splat(key), b.lane_numbers());
        let keys = pointwise::global_index(b, scalars, of, local);
        let seen = b.compare_int(Compare::Le, keys, b.splat(position(b, scalars, at, row)));
        b.int2(IntBinary::And, present, seen)
    }
}
