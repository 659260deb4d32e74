//! Attention without a matrix of scores in memory (Dao et al. 2022), forward and backward.
//!
//! Queries and keys go in blocks. A block of scores lives in scratch, small enough for the first-level cache; the softmax over keys is kept as a
//! running maximum and a running sum per query. With a causal mask or a window, the bounds of positions in a block of queries and one of keys tell at run time
//! whether it hides all of their scores, which are then skipped, or none, or has to be applied.
//! CPUs copy operands into padded scratch of f32: a block at a time, and what gradients read once for each block of keys a head at a time.
//! All inner sums are f32; results are rounded once.

mod backward;
mod cores;
mod forward;
mod lanes;
mod panels;
#[cfg(test)]
mod tests;
mod tiles;

pub use backward::emit as emit_backward;
pub use forward::emit as emit_forward;

use crate::abi::{Entry, launch_of_warps};
use crate::build::llvm::{Index, Llvm, Pointer, Vector};
use crate::build::simt::Simt;
use crate::build::{Builder, Compare, IntBinary, Lane};
use crate::layout::{self, div_ceil, tensors};
use crate::pointwise;
use crate::target::Target;
use crate::{CompileError, Shape};
use inkwell::values::FunctionValue;
use ir::dim::Dim;
use ir::graph::Value;
use ir::kernel::Kernel;
use ir::launch::Launch;
use ir::op::{Attention, Op};

/// Writes the kernel `name` for a GPU, on tensor cores where they can do it, and reports what it needs.
///
/// # Errors
/// The kernel is not attention of inputs, or its gradients.
pub fn emit_for_gpu(b: &Simt, kernel: &Kernel, target: &Target, name: &str) -> Result<(Shape, Launch), CompileError> {
    let plan = Plan::new(kernel, target)?;
    match (cores::half(&plan), cores::roles::Form::new(&plan, target)) {
        (Some(half), Some(form)) => cores::roles::emit(b, &plan, half, &form, name),
        (Some(half), None) => cores::emit(b, &plan, half, name),
        (None, _) => lanes::emit(b, &plan, name).map(|shape| (shape, launch_of_warps(kernel, &shape))),
    }
}

/// Queries and keys of a block, where there are as many.
const BLOCK: i64 = 64;

/// Sizes and operands of one attention.
pub struct Plan<'a> {
    pub kernel: &'a Kernel,
    pub attention: Attention,
    /// The tensors of positions of queries and of keys, if a causal mask compares them.
    pub positions: Option<[usize; 2]>,
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
    pub lane: Lane,
}

impl Rows {
    /// Bytes of elements.
    pub fn bytes(&self, elements: i64) -> i64 {
        self.lane.bytes() * elements
    }
}

/// Operands of attention's gradients as rows, and the two numbers per query.
#[derive(Clone, Copy)]
pub struct GradientOperands {
    pub q: Rows,
    pub k: Rows,
    pub v: Rows,
    pub dout: Rows,
    pub lse: usize,
    pub delta: usize,
}

impl<'a> Plan<'a> {
    /// The attention that the kernel's outputs are results of.
    ///
    /// # Errors
    /// An output is something else.
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
        }
        let (q, k) = (body.dims_of(first.args[0]), body.dims_of(first.args[1]));
        let others = q.iter().copied().filter(|d| *d != attention.at && *d != attention.d);
        let (shared, group) = others.partition(|d| k.contains(d));
        let size = |dim: Dim| body.dims.size(dim) as i64;
        let lanes = target.lanes() as i64;
        let whole_vectors = |n: i64| div_ceil(n, lanes) * lanes;
        let (queries, keys, d) = (size(attention.at), size(attention.keys), size(attention.d));
        let mut plan = Plan {
            kernel,
            positions: None,
            queries,
            keys,
            d,
            width: whole_vectors(d),
            query_block: queries.min(BLOCK),
            key_block: whole_vectors(keys).min(BLOCK),
            shared,
            group,
            attention,
        };
        if let Some([queries, keys]) = plan.attention.positions(&first.args) {
            plan.positions = Some([plan.operand(queries)?, plan.operand(keys)?]);
        }
        Ok(plan)
    }

    /// # Errors
    /// One is no input of the kernel.
    pub fn gradient_operands(&self) -> Result<GradientOperands, CompileError> {
        let args = &self.kernel.body[self.kernel.outputs[0].value].args;
        let operand = |slot: usize| self.operand(args[slot]);
        Ok(GradientOperands {
            q: self.query_rows(operand(0)?),
            k: self.key_rows(operand(1)?),
            v: self.key_rows(operand(2)?),
            lse: operand(3)?,
            delta: operand(4)?,
            dout: self.query_rows(operand(5)?),
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
        let lane = pointwise::stored(tensors(self.kernel)[tensor].0.dtype);
        Rows { tensor, row_stride: self.stride(tensor, dim), column_stride: self.stride(tensor, self.attention.d), rows, block, lane }
    }

    /// The dims that number heads of queries.
    fn heads(&self) -> Vec<Dim> {
        self.shared.iter().chain(&self.group).copied().collect()
    }

    fn sizes(&self, dims: &[Dim]) -> i64 {
        dims.iter().map(|d| self.kernel.body.dims.size(*d) as i64).product()
    }
}

/// Arguments of a kernel under construction.
pub struct Arguments<P> {
    pub tensors: Vec<P>,
    pub scratch: P,
}

impl<P: Copy> Arguments<P> {
    /// `load` reads the pointer at so many bytes from the first argument.
    pub fn new<I>(kernel: &Kernel, entry: &Entry<I, P>, load: impl Fn(P, i64) -> P) -> Self {
        let count = kernel.inputs.len() + kernel.outputs.len();
        Arguments { tensors: (0..count).map(|i| load(entry.arguments, 8 * i as i64)).collect(), scratch: entry.scratch }
    }

    /// The arguments at the point that `number` counts in `dims`, the last fastest.
    pub fn at<B: Builder<Pointer = P>>(&self, b: &B, plan: &Plan, dims: &[Dim], number: B::Index) -> Arguments<P> {
        let (mut tensors, mut rest) = (self.tensors.clone(), number);
        for &dim in dims.iter().rev() {
            let size = b.index(plan.kernel.body.dims.size(dim) as i64);
            let index = b.index_rem(rest, size);
            rest = ir::fault!("attention.heads.digit", rest, b.index_div(rest, size));
            for (tensor, pointer) in tensors.iter_mut().enumerate() {
                let stride = plan.stride(tensor, dim);
                if stride != 0 {
                    let lane = pointwise::stored(layout::tensors(plan.kernel)[tensor].0.dtype);
                    *pointer = b.at(*pointer, b.index_mul(index, b.index(lane.bytes() * stride)));
                }
            }
        }
        Arguments { tensors, scratch: self.scratch }
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

/// What the mask leaves of a block of scores.
pub enum Visible {
    /// Every score of every block.
    All,
    /// To be found block by block.
    Some,
}

impl Plan<'_> {
    /// Of blocks of so many keys.
    pub fn visible(&self, block: i64) -> Visible {
        if self.positions.is_some() || self.keys % block != 0 { Visible::Some } else { Visible::All }
    }

    fn window(&self) -> Option<i64> {
        self.attention.window.map(i64::from)
    }

    /// Whether any of the queries may see any of the keys, by the bounds of their positions. Without a causal mask: always.
    pub fn any_visible<'c>(&self, b: &Llvm<'c>, queries: Run<'c>, keys: Run<'c>) -> Option<inkwell::values::IntValue<'c>> {
        self.positions.map(|_| {
            let before = b.signed_less_equal(ir::fault!("attention.visible.any", keys.greatest(b), keys.least(b)), queries.greatest(b));
            let near = self.window().map(|w| b.signed_less_equal(b.index_sub(queries.least(b), keys.greatest(b)), b.index(w - 1)));
            near.map_or(before, |near| b.both(before, near))
        })
    }

    /// Whether these are all keys of a block of so many, and seen by all of the queries.
    pub fn all_visible<'c>(&self, b: &Llvm<'c>, queries: Run<'c>, keys: Run<'c>, block: i64) -> inkwell::values::IntValue<'c> {
        let whole = b.index_equal(keys.span.count, ir::fault!("attention.visible.whole", keys.span.count, b.index(block)));
        match self.positions {
            None => whole,
            Some(_) => {
                let before =
                    b.both(whole, b.signed_less_equal(keys.greatest(b), ir::fault!("attention.visible.all", queries.greatest(b), queries.least(b))));
                let near = self.window().map(|w| {
                    b.signed_less_equal(
                        b.index_sub(ir::fault!("attention.visible.near", queries.least(b), queries.greatest(b)), keys.least(b)),
                        b.index(w - 1),
                    )
                });
                near.map_or(before, |near| b.both(before, near))
            }
        }
    }

    /// The lanes of a row of scores that are seen: keys `key ..`, of which the block holds fewer than `end`. `positions` are those of
    /// the row's query and of all keys.
    pub fn row_mask<'c>(&self, b: &Llvm<'c>, positions: Option<[Pointer<'c>; 2]>, key: Index<'c>, end: Index<'c>) -> Vector<'c> {
        let present = b.mask_below(b.index_sub(end, key));
        let (Some([query, keys]), Some(tensors)) = (positions, self.positions) else { return present };
        let stride = self.stride(tensors[1], self.attention.keys);
        let keys = tiles::load_strided(b, b.at(keys, b.index_mul(key, b.index(4 * stride))), stride, Lane::I32, Some(present));
        let query = b.load_splat(query, Lane::I32);
        let seen = b.int2(IntBinary::And, present, b.compare_int(ir::fault!("attention.mask.causal", Compare::Lt, Compare::Le), keys, query));
        let Some(window) = self.attention.window else { return seen };
        // Positions are not negative, so that their differences are numbers too.
        let back = b.int2(IntBinary::Sub, query, keys);
        b.int2(
            IntBinary::And,
            seen,
            b.compare_int(ir::fault!("attention.mask.window", Compare::Le, Compare::Lt), back, b.i32(i32::try_from(window).unwrap_or(i32::MAX))),
        )
    }

    /// Where the position of this query and those of all keys lie. Rows that only fill a block have the last query's.
    pub fn row_positions<'c>(&self, b: &Llvm<'c>, [queries, keys]: [Pointer<'c>; 2], query: Index<'c>) -> Option<[Pointer<'c>; 2]> {
        let stride = self.stride(self.positions?[0], self.attention.at);
        let query = b.index_min(query, b.index(self.queries - 1));
        Some([b.at(queries, b.index_mul(query, b.index(4 * stride))), keys])
    }

    /// The tensors of positions, of queries and of keys; without a causal mask, two pointers that nothing reads.
    pub fn position_tensors<'c>(&self, at: &Arguments<Pointer<'c>>) -> [Pointer<'c>; 2] {
        self.positions.map_or([at.scratch; 2], |tensors| tensors.map(|t| at.tensors[t]))
    }

    /// The functions that find the bounds of positions, of queries and of keys.
    pub fn bounds<'c>(&self, b: &Llvm<'c>) -> Option<[FunctionValue<'c>; 2]> {
        let [queries, keys] = self.positions?;
        let of = |name: &str, tensor: usize, dim: Dim| tiles::bounds(b, name, self.stride(tensor, dim));
        Some([of("query_bounds", queries, self.attention.at), of("key_bounds", keys, self.attention.keys)])
    }

    /// A run of queries (0) or keys (1), whose bounds are written to `place` first.
    pub fn measured<'c>(
        &self,
        b: &Llvm<'c>,
        functions: Option<[FunctionValue<'c>; 2]>,
        at: &Arguments<Pointer<'c>>,
        which: usize,
        span: Span<'c>,
        place: Pointer<'c>,
    ) -> Run<'c> {
        if let (Some(functions), Some(tensors)) = (functions, self.positions) {
            let stride = self.stride(tensors[which], [self.attention.at, self.attention.keys][which]);
            let first = b.at(at.tensors[tensors[which]], b.index_mul(span.first, b.index(4 * stride)));
            b.call(functions[which], &[first, place], &[span.count]);
        }
        Run { span, bounds: place }
    }
}

/// A run of queries or keys and where the least and greatest of their positions lie.
#[derive(Clone, Copy)]
pub struct Run<'c> {
    pub span: Span<'c>,
    pub bounds: Pointer<'c>,
}

impl<'c> Run<'c> {
    fn least(&self, b: &Llvm<'c>) -> Index<'c> {
        b.load_integer(self.bounds, Lane::I32)
    }

    fn greatest(&self, b: &Llvm<'c>) -> Index<'c> {
        b.load_integer(b.at_const(self.bounds, 4), Lane::I32)
    }
}
