//! Attention without a matrix of scores in memory (Dao et al. 2022), forward and backward.
//!
//! Queries and keys go in blocks. The softmax over keys is kept as a running reference (a maximum, or close to one)
//! and a running sum per query. With a causal mask or a window, the bounds of positions in a block of queries and one
//! of keys tell at run time whether it hides all of their scores, which are then skipped, or none, or has to be
//! applied. CPUs copy operands into padded scratch of f32: a block at a time, and what gradients read once for each
//! block of keys a head at a time. All inner sums are f32; results are rounded once.

mod backward;
mod forward;
mod mma;
mod panels;
#[cfg(test)]
#[path = "programs/tests.rs"]
mod programs;
mod scoring;
mod simt;
#[cfg(test)]
mod tests;
mod tiles;

pub use backward::emit as emit_backward;
pub use forward::emit as emit_forward;

use crate::abi::{Entry, launch_of_warps};
use crate::build::llvm::{Index, Llvm, Pointer, Vector};
use crate::build::simt::Simt;
use crate::build::{Builder, IntBinary, Lane};
use crate::layout::{self, div_ceil, tensors};
use crate::pointwise;
use crate::target::Target;
use crate::{CompileError, Shape};
use inkwell::values::{FunctionValue, IntValue};
use ir::dim::Dim;
use ir::graph::Value;
use ir::kernel::{Kernel, Output};
use ir::launch::Launch;
use ir::op::{Attention, AttentionGrad, Op};
use scoring::{Applied, BlockVisibility, Program};

/// Writes the kernel `name` for a GPU, on tensor cores where they can do it, and reports what it needs.
///
/// # Errors
/// The kernel is not attention of inputs, or its gradients.
pub fn emit_for_gpu(b: &Simt, kernel: &Kernel, target: &Target, name: &str) -> Result<(Shape, Launch), CompileError> {
    let plan = AttentionPlan::new(kernel, target)?;
    match (mma::half(&plan), mma::warp_specialized::WarpSpecializedConfig::new(&plan, target)) {
        (Some(half), Some(config)) => mma::warp_specialized::emit(b, &plan, half, &config, name),
        (Some(half), None) => mma::emit(b, &plan, half, name),
        (None, _) => simt::emit(b, &plan, name).map(|shape| (shape, launch_of_warps(kernel, &shape))),
    }
}

/// Least logarithm that gradients subtract from scores. Where a program makes all scores of a query minus infinity,
/// their difference from the logarithm would be NaN otherwise.
const LOWEST: f64 = -1e30;

/// Most queries, and most keys, of a block.
const BLOCK: i64 = 64;

/// Sizes and operands of one attention.
pub struct AttentionPlan<'a> {
    pub kernel: &'a Kernel,
    pub attention: Attention,
    /// The program that changes, hides and weighs scores.
    pub program: Program,
    pub queries: i64,
    pub keys: i64,
    /// Elements of a head of queries and keys, and of one of values and results.
    pub d: HeadSize,
    pub values: HeadSize,
    pub query_block: i64,
    pub key_block: i64,
    /// Dims of q beside `at` and `d`: those that k has too, and those whose queries share keys.
    pub shared: Vec<Dim>,
    pub group: Vec<Dim>,
}

/// Elements of a head, and the same rounded up to whole vectors.
#[derive(Clone, Copy, PartialEq)]
pub struct HeadSize {
    pub d: i64,
    pub width: i64,
}

impl HeadSize {
    /// Elements of a row as tensor cores take them: whole instructions.
    pub fn padded(self) -> i64 {
        div_ceil(self.d, 16) * 16
    }
}

/// A matrix operand: rows along `at` or `keys`, columns along `d`; strides in elements.
#[derive(Clone, Copy)]
pub struct OperandRows {
    pub tensor: usize,
    pub row_stride: i64,
    pub column_stride: i64,
    pub rows: i64,
    pub block: i64,
    /// Elements of a row.
    pub size: HeadSize,
    pub lane: Lane,
}

impl OperandRows {
    /// Bytes of elements.
    pub fn bytes(&self, elements: i64) -> i64 {
        self.lane.bytes() * elements
    }
}

/// Operands of attention's gradients: four matrices as rows, and the logarithm and the delta of each query.
#[derive(Clone, Copy)]
pub struct GradientOperands {
    pub q: OperandRows,
    pub k: OperandRows,
    pub v: OperandRows,
    pub dout: OperandRows,
    pub lse: usize,
    pub delta: usize,
}

impl<'a> AttentionPlan<'a> {
    /// The attention that the kernel's outputs are results of.
    ///
    /// # Errors
    /// An output is something else.
    pub fn new(kernel: &'a Kernel, target: &Target) -> Result<AttentionPlan<'a>, CompileError> {
        let body = &kernel.body;
        // An `AttentionLse` does not know the dim of values, so another output is preferred.
        let of_values = kernel.outputs.iter().find(|o| !matches!(body[o.value].op, Op::AttentionLse(_)));
        let first = &body[of_values.unwrap_or(&kernel.outputs[0]).value];
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
        let (shared, group): (Vec<Dim>, Vec<Dim>) = others.partition(|d| k.contains(d));
        let size = |dim: Dim| body.dims.size(dim) as i64;
        let lanes = target.lanes() as i64;
        let whole_vectors = |n: i64| div_ceil(n, lanes) * lanes;
        let (queries, keys) = (size(attention.at), size(attention.keys));
        let [d, values] = [attention.d, attention.values].map(|dim| HeadSize { d: size(dim), width: whole_vectors(size(dim)) });
        Ok(AttentionPlan {
            kernel,
            program: Program::new(kernel, &attention, &group, &first.args)?,
            queries,
            keys,
            d,
            values,
            query_block: queries.min(BLOCK),
            key_block: whole_vectors(keys).min(BLOCK),
            shared,
            group,
            attention,
        })
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
        operand(self.kernel, v)
    }

    pub fn stride(&self, tensor: usize, dim: Dim) -> i64 {
        stride(self.kernel, tensor, dim)
    }

    /// A tensor as rows along `at`.
    pub fn query_rows(&self, tensor: usize) -> OperandRows {
        self.rows(tensor, self.attention.at, self.queries, self.query_block)
    }

    /// A tensor as rows along `keys`.
    pub fn key_rows(&self, tensor: usize) -> OperandRows {
        self.rows(tensor, self.attention.keys, self.keys, self.key_block)
    }

    fn rows(&self, tensor: usize, dim: Dim, rows: i64, block: i64) -> OperandRows {
        let lane = pointwise::stored(tensors(self.kernel)[tensor].0.dtype);
        let (columns, size) = self.columns_of(tensor);
        OperandRows { tensor, row_stride: self.stride(tensor, dim), column_stride: self.stride(tensor, columns), rows, block, size, lane }
    }

    /// The dim of a row's elements in a tensor, and how many there are.
    pub fn columns_of(&self, tensor: usize) -> (Dim, HeadSize) {
        let has_values = tensors(self.kernel)[tensor].0.has(self.attention.values);
        if has_values { (self.attention.values, self.values) } else { (self.attention.d, self.d) }
    }

    /// The dims that number heads of queries.
    fn heads(&self) -> Vec<Dim> {
        self.shared.iter().chain(&self.group).copied().collect()
    }

    /// The output that is the gradient of a bias. A kernel that computes it has no other output.
    pub fn bias(&self) -> Option<&'a Output> {
        let is_bias = |o: &&Output| matches!(self.kernel.body[o.value].op, Op::AttentionGrad(_, AttentionGrad::Bias));
        self.kernel.outputs.first().filter(is_bias)
    }

    /// The dims of heads of queries that a bias has, and those along which its gradient is a sum.
    pub fn heads_of_bias(&self, bias: &Output) -> [Vec<Dim>; 2] {
        let ty = &self.kernel.body[bias.value].ty;
        let (own, summed) = self.heads().into_iter().partition(|d| ty.has(*d));
        [own, summed]
    }

    fn sizes(&self, dims: &[Dim]) -> i64 {
        dims.iter().map(|d| self.kernel.body.dims.size(*d) as i64).product()
    }
}

fn operand(kernel: &Kernel, v: Value) -> Result<usize, CompileError> {
    match kernel.body[v].op {
        Op::Input(i) => Ok(i as usize),
        _ => Err(CompileError::unsupported("an operand of attention that is not an input")),
    }
}

fn stride(kernel: &Kernel, tensor: usize, dim: Dim) -> i64 {
    let (ty, strides) = tensors(kernel)[tensor];
    layout::stride(ty, strides, dim)
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

    /// The arguments at the head with this number, which counts through `dims` with the last one fastest.
    pub fn at<B: Builder<Pointer = P>>(&self, b: &B, plan: &AttentionPlan, dims: &[Dim], number: B::Index) -> Arguments<P> {
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

/// Arguments of a kernel for a GPU: as it is given them, or at a head.
type GpuArguments<'c> = Arguments<Pointer<'c>>;

/// Which side of the scores a row is of.
#[derive(Clone, Copy, PartialEq)]
pub enum ScoreSide {
    Queries,
    Keys,
}

impl ScoreSide {
    pub fn other(self) -> ScoreSide {
        match self {
            ScoreSide::Queries => ScoreSide::Keys,
            ScoreSide::Keys => ScoreSide::Queries,
        }
    }

    /// Index of the side: 0 for queries, 1 for keys.
    pub fn index(self) -> usize {
        match self {
            ScoreSide::Queries => 0,
            ScoreSide::Keys => 1,
        }
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
    /// It differs from block to block and is found at run time.
    Some,
}

impl AttentionPlan<'_> {
    /// What the mask leaves of blocks of `block` keys.
    pub fn visible(&self, block: i64) -> Visible {
        if self.program.hides() || self.keys % block != 0 { Visible::Some } else { Visible::All }
    }

    fn block_visibility<'c>(&self, b: &Llvm<'c>, queries: Run<'c>, keys: Run<'c>) -> BlockVisibility<Vector<'c>> {
        self.program.block_visibility(b, &|k| {
            let side = self.program.operands[k].bounded_with();
            let slot = self.program.bounded(side).position(|(n, _)| n == k).expect("invariant: its bounds are found");
            [queries, keys][side].bounds_of(b, slot)
        })
    }

    /// Whether any of the queries may see any of the keys, by the bounds of operands; `None` if these do not tell.
    pub fn any_visible<'c>(&self, b: &Llvm<'c>, queries: Run<'c>, keys: Run<'c>) -> Option<IntValue<'c>> {
        self.block_visibility(b, queries, keys).any.map(|any| b.any(any))
    }

    /// Whether the keys fill a block of `block`, and all of the queries see all of them.
    pub fn all_visible<'c>(&self, b: &Llvm<'c>, queries: Run<'c>, keys: Run<'c>, block: i64) -> IntValue<'c> {
        let whole = b.index_equal(keys.span.count, ir::fault!("attention.visible.whole", keys.span.count, b.index(block)));
        match self.block_visibility(b, queries, keys).all {
            _ if !self.program.hides() => whole,
            Some(all) => b.both(whole, b.any(all)),
            None => b.index_equal(b.index(0), b.index(1)),
        }
    }

    /// Applies the program to a vector of a row's products. `bases` are the starts of the program's operands.
    pub fn scored<'c>(&self, b: &Llvm<'c>, bases: &[Pointer<'c>], position: ScorePosition<'c>, product: Vector<'c>) -> MaskedScores<'c> {
        let present = position.present(b);
        let mask_of = |applied: &mut Applied<Llvm<'c>>| {
            present.map(|present| match applied.seen() {
                Some(seen) => ir::fault!("attention.mask.seen", present, b.int2(IntBinary::And, present, seen)),
                None => present,
            })
        };
        self.applied(b, bases, position, product, |mut applied| {
            let (score, slope) = (applied.score(), applied.slope());
            MaskedScores { score, slope, mask: mask_of(&mut applied) }
        })
    }

    /// Weights of the probabilities of a vector of keys; `None` where all are 1.
    pub fn weight<'c>(&self, b: &Llvm<'c>, bases: &[Pointer<'c>], position: ScorePosition<'c>) -> Option<Vector<'c>> {
        self.program.scoring.weight?;
        self.applied(b, bases, position, b.f32(0.0), |mut applied| applied.weight())
    }

    /// Calls `ask` with the program at a position.
    fn applied<'c, R>(
        &self,
        b: &Llvm<'c>,
        bases: &[Pointer<'c>],
        position: ScorePosition<'c>,
        product: Vector<'c>,
        ask: impl FnOnce(Applied<Llvm<'c>>) -> R,
    ) -> R {
        let (ScorePosition { query, key, .. }, present) = (position, position.present(b));
        // Padding rows of a block read the operands of the last query.
        let query = b.index_min(query, b.index(self.queries - 1));
        let number = |k: usize| {
            let operand = &self.program.operands[k];
            let row = b.at(bases[k], b.index_mul(query, b.index(operand.step(0))));
            match operand.strides[1] {
                Some(stride) => tiles::load_strided(b, b.at(row, b.index_mul(key, b.index(operand.step(1)))), stride, operand.lane(), present),
                None => b.load_splat(row, operand.lane()),
            }
        };
        ask(Applied::new(b, &self.program, product, &number))
    }

    /// The functions that find the bounds of operands, of queries and of keys.
    pub fn bounds<'c>(&self, b: &Llvm<'c>) -> [Vec<FunctionValue<'c>>; 2] {
        let name = |side: usize, k: usize| format!("{}_bounds_{k}", ["query", "key"][side]);
        [0, 1].map(|side| self.program.bounded(side).map(|(k, o)| tiles::bounds(b, &name(side, k), o, side)).collect())
    }

    /// Elements of scratch for the bounds of a run of queries (0) or keys (1).
    pub fn bounds_size(&self, side: usize) -> i64 {
        2 * self.program.bounded(side).count() as i64
    }

    /// A run of queries (0) or keys (1), whose bounds are written to `bounds` first.
    pub fn measured<'c>(
        &self,
        b: &Llvm<'c>,
        functions: &[Vec<FunctionValue<'c>>; 2],
        at: &Arguments<Pointer<'c>>,
        side: usize,
        span: Span<'c>,
        bounds: Pointer<'c>,
    ) -> Run<'c> {
        for (slot, ((_, operand), function)) in (0..).zip(self.program.bounded(side).zip(&functions[side])) {
            let first = b.at(at.tensors[operand.tensor], b.index_mul(span.first, b.index(operand.step(side))));
            b.call(*function, &[first, b.at_const(bounds, 8 * slot)], &[span.count]);
        }
        Run { span, bounds }
    }
}

/// Position of a vector of scores: its query, its first key, and, where the mask applies or lanes may lie past the
/// end, the end of the keys.
#[derive(Clone, Copy)]
pub struct ScorePosition<'c> {
    pub query: Index<'c>,
    pub key: Index<'c>,
    pub end: Option<Index<'c>>,
}

impl<'c> ScorePosition<'c> {
    /// Mask of the lanes that have a key; `None` if all have one.
    fn present(&self, b: &Llvm<'c>) -> Option<Vector<'c>> {
        self.end.map(|end| b.mask_below(b.index_sub(end, self.key)))
    }
}

/// Scores before the mask, their slopes unless these are 1, and the mask of visible keys if the position has an end.
pub struct MaskedScores<'c> {
    pub score: Vector<'c>,
    pub slope: Option<Vector<'c>>,
    pub mask: Option<Vector<'c>>,
}

/// A run of queries or keys, and the address of the operands' bounds in it: the least and greatest values.
#[derive(Clone, Copy)]
pub struct Run<'c> {
    pub span: Span<'c>,
    pub bounds: Pointer<'c>,
}

impl<'c> Run<'c> {
    fn bounds_of(&self, b: &Llvm<'c>, slot: usize) -> [Vector<'c>; 2] {
        [0, 4].map(|byte| b.load_splat(b.at_const(self.bounds, 8 * slot as i64 + byte), Lane::I32))
    }
}
