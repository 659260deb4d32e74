//! The kernels that faults are tried on: some of each family, for CPUs and GPUs.

use crate::target::Target;
use crate::testing::KernelDraft;
use ir::dim::{Base, Dim, DimInfo, IndexMap, Order};
use ir::graph::{Type, Value};
use ir::kernel::{Family, Kernel};
use ir::op::{Attention, AttentionGrad, Binary, Compare, DType, Op, Real, Reduce, Scoring, Unary};

/// A kernel, and what it is compiled for.
pub struct FaultCase {
    pub name: String,
    pub kernel: Kernel,
    /// The name of a GPU; without one, the target is this machine.
    gpu: Option<&'static str>,
}

impl FaultCase {
    pub fn target(&self) -> Target {
        self.gpu.map_or_else(|| Target::host().expect("a supported machine"), Target::gpu)
    }
}

const SUM: fn(Vec<Dim>) -> Op = |over| Op::Reduce { kind: Reduce::Sum, over };
const MAX: fn(Vec<Dim>) -> Op = |over| Op::Reduce { kind: Reduce::Max, over };
const F32: DType = DType::F32;
const BF16: DType = DType::Bf16;

impl KernelDraft {
    fn dims<const N: usize>(&mut self, sizes: [(&str, u64); N]) -> [Dim; N] {
        sizes.map(|(name, size)| self.dim(name, size))
    }

    fn unary(&mut self, op: Unary, x: Value) -> Value {
        self.op(Op::Unary(op), &[x])
    }

    fn binary(&mut self, op: Binary, x: Value, y: Value) -> Value {
        self.op(Op::Binary(op), &[x, y])
    }

    fn cast(&mut self, x: Value, dtype: DType) -> Value {
        let dims = self.body.dims_of(x).to_vec();
        self.op_as(Op::Cast, &[x], Type::new(dtype, dims))
    }

    /// A dim whose elements are parts of a longer one, in strides.
    fn strided_dim(&mut self, name: &str, global: u64, parts: Vec<(u64, u64)>, order: Order) -> Dim {
        let index = IndexMap { parts, base: Base::Zero };
        self.body.dims.add(DimInfo { order, size: index.len(), index, ..DimInfo::new(name, global) })
    }
}

/// A softmax of rows of which a mask hides some, and its sum.
fn softmax(dtype: DType, [rows, columns]: [u64; 2]) -> Kernel {
    let mut m = KernelDraft::default();
    let [s, h] = m.dims([("s", rows), ("h", columns)]);
    let (x, mask) = (m.input(dtype, &[s, h]), m.input(DType::Bool, &[s, h]));
    let x = m.cast(x, F32);
    let hidden = m.number(-1e5);
    let x = m.op_as(Op::Select, &[mask, x, hidden], Type::new(F32, [s, h]));
    let most = m.op(MAX(vec![h]), &[x]);
    let x = m.binary(Binary::Sub, x, most);
    let x = m.unary(Unary::Exp, x);
    let sum = m.op(SUM(vec![h]), &[x]);
    let y = m.binary(Binary::Div, x, sum);
    let y = m.cast(y, dtype);
    m.kernel(Family::Loops { grid: vec![s] }, &[y, most])
}

/// Pairs of numbers turned by the same angles: the first halves, then the second ones.
fn rotation(dtype: DType, [rows, size]: [u64; 2]) -> Kernel {
    let mut m = KernelDraft::default();
    let [s, two, h] = m.dims([("s", rows), ("two", 2), ("h", size)]);
    let [a, b, cos, sin] = [0, 1, 2, 3].map(|_| m.input(dtype, &[s, h]));
    let [ac, bs, bc, a_s] = [(a, cos), (b, sin), (b, cos), (a, sin)].map(|(x, y)| m.binary(Binary::Mul, x, y));
    let (first, second) = (m.binary(Binary::Sub, ac, bs), m.op(Op::Add, &[bc, a_s]));
    let halves = [(first, 0), (second, 1)].map(|(half, at)| m.op(Op::Pad { from: None, to: two, at }, &[half]));
    let both = m.op(Op::Add, &halves);
    let both = m.ordered(both, &[s, two, h]);
    m.kernel(Family::Loops { grid: vec![s, two, h] }, &[both])
}

/// The greatest element of each row, and its index.
fn greatest(dtype: DType, [rows, columns]: [u64; 2]) -> Kernel {
    let mut m = KernelDraft::default();
    let [s, h] = m.dims([("s", rows), ("h", columns)]);
    let x = m.input(dtype, &[s, h]);
    let most = m.op(MAX(vec![h]), &[x]);
    let place = m.op_as(Op::ArgMax { over: h }, &[x], Type::new(DType::I32, [s]));
    m.kernel(Family::Loops { grid: vec![s] }, &[most, place])
}

fn columns(sizes: [u64; 2], with_most: bool) -> Kernel {
    let mut m = KernelDraft::default();
    let [s, h] = m.dims([("s", sizes[0]), ("h", sizes[1])]);
    let x = m.input(F32, &[s, h]);
    let sum = m.op(SUM(vec![s]), &[x]);
    let most = with_most.then(|| m.op(MAX(vec![s]), &[x]));
    let both = most.map_or(sum, |most| m.binary(Binary::Mul, sum, most));
    m.kernel(Family::Loops { grid: vec![h] }, &[both])
}

/// Functions of numbers of either sign, or of positive ones.
fn functions(positive: bool, dtype: DType) -> Kernel {
    use Unary::{Cos, Erf, Exp, Floor, Log, Recip, Rsqrt, Sign, Sin, Sqrt, Tanh};
    let mut m = KernelDraft::default();
    let [a, b] = m.dims([("a", 3), ("b", 37)]);
    let (x, y) = (m.input(dtype, &[a, b]), m.input(dtype, &[a, b]));
    let of: &[Unary] = if positive { &[Log, Sqrt, Rsqrt, Recip] } else { &[Exp, Tanh, Sin, Cos, Erf, Floor, Sign] };
    let mut outputs: Vec<Value> = of.iter().map(|op| m.unary(*op, x)).collect();
    if positive {
        outputs.push(m.binary(Binary::Pow, x, y));
    } else {
        let three = m.source(Op::Const(Real(3.0)), dtype, &[]);
        let cube = m.op_as(Op::Binary(Binary::Pow), &[x, three], Type::new(dtype, [a, b]));
        outputs.extend([cube, m.binary(Binary::Max, x, y), m.binary(Binary::Min, x, y), m.binary(Binary::Rem, x, y)]);
        // The exponential within `tanh` overflows to infinity.
        let hundred = m.source(Op::Const(Real(100.0)), dtype, &[]);
        let far = m.op_as(Op::Binary(Binary::Mul), &[x, hundred], Type::new(dtype, [a, b]));
        outputs.push(m.unary(Tanh, far));
    }
    m.kernel(Family::Loops { grid: vec![a, b] }, &outputs)
}

fn ints() -> Kernel {
    let mut m = KernelDraft::default();
    let [d] = m.dims([("d", 77)]);
    let (x, y) = (m.input(DType::I32, &[d]), m.input(DType::I32, &[d]));
    let ops = [Binary::Div, Binary::Rem, Binary::Sub, Binary::Max, Binary::Mix];
    let mut outputs: Vec<Value> = ops.iter().map(|op| m.binary(*op, x, y)).collect();
    outputs.push(m.unary(Unary::Abs, x));
    let less = m.op_as(Op::Compare(Compare::Le), &[x, y], Type::new(DType::Bool, [d]));
    outputs.extend([less, m.cast(less, DType::I32), m.cast(less, F32)]);
    m.kernel(Family::Loops { grid: vec![d] }, &outputs)
}

/// Running sums in both directions.
fn running(dtype: DType) -> Kernel {
    let mut m = KernelDraft::default();
    let [s, h] = m.dims([("s", 5), ("h", 70)]);
    let x = m.input(dtype, &[s, h]);
    let sums = [false, true].map(|reverse| m.op(Op::Cumsum { over: h, reverse }, &[x]));
    m.kernel(Family::Loops { grid: vec![s] }, &sums)
}

/// Three operands one after the other, and a border around them.
fn windows(along_lanes: bool) -> Kernel {
    let mut m = KernelDraft::default();
    let [s, a, b, c, all, wide] = m.dims([("s", 21), ("a", 5), ("b", 20), ("c", 9), ("all", 34), ("wide", 40)]);
    let dims = |d: Dim| if along_lanes { [s, d] } else { [d, s] };
    let parts = [a, b, c].map(|d| m.input(F32, &dims(d)));
    let joined = m.op_as(Op::Concat { from: vec![a, b, c], to: all }, &parts, Type::new(F32, dims(all)));
    let padded = m.op_as(Op::Pad { from: Some(all), to: wide, at: 3 }, &[joined], Type::new(F32, dims(wide)));
    m.kernel(Family::Loops { grid: dims(wide).to_vec() }, &[padded])
}

/// Rows of a table, of which this rank has all or a part.
fn gather(sharded: bool) -> Kernel {
    let mut m = KernelDraft::default();
    let base = sharded.then(|| m.scalar(DType::I32));
    let v = if base.is_some() { m.sharded_dim("v", 30, 60, 0) } else { m.dim("v", 30) };
    let [s, h] = m.dims([("s", 40), ("h", 35)]);
    let (table, index) = (m.input(F32, &[v, h]), m.input(DType::I32, &[s]));
    let rows = m.op_as(Op::Gather { dim: v }, &[table, index], Type::new(F32, [s, h]));
    m.kernel(Family::Loops { grid: vec![s, h] }, &[rows])
}

/// Picks each element from its column of a table, by an index of its own.
fn gather_each() -> Kernel {
    let mut m = KernelDraft::default();
    let [v, s, h] = m.dims([("v", 30), ("s", 7), ("h", 35)]);
    let (table, index) = (m.input(F32, &[v, h]), m.input(DType::I32, &[s, h]));
    let rows = m.op_as(Op::Gather { dim: v }, &[table, index], Type::new(F32, [s, h]));
    m.kernel(Family::Loops { grid: vec![s, h] }, &[rows])
}

/// Random numbers and indices along dims of which this rank has parts, in a zig-zag or in strides.
fn random(order: Order) -> Kernel {
    let mut m = KernelDraft::default();
    let h = m.strided_dim("h", 96, vec![(3, 32), (8, 1)], Order::Plain);
    let s = m.strided_dim("s", 24, vec![(24, 1)], order);
    // The scalars are the seed and the step.
    m.scalar(DType::I32);
    m.scalar(DType::I32);
    let x = m.source(Op::Uniform { key: 77 }, F32, &[s, h]);
    let [i, j] = [s, h].map(|d| m.source(Op::Iota(d), DType::I32, &[d]));
    let causal = m.op_as(Op::Compare(Compare::Ge), &[i, j], Type::new(DType::Bool, [s, h]));
    let zero = m.number(0.0);
    let y = m.op_as(Op::Select, &[causal, x, zero], Type::new(F32, [s, h]));
    m.kernel(Family::Loops { grid: vec![s, h] }, &[y, x])
}

/// A part of an update of weights, rounded to bf16 too.
fn update(size: u64, accumulate: bool) -> Kernel {
    let mut m = KernelDraft::default();
    let n = m.dim("n", size);
    let (rate, decay) = (m.scalar(F32), m.scalar(F32));
    let [w, g, v] = [0; 3].map(|_| m.input(F32, &[n]));
    let square = m.binary(Binary::Mul, g, g);
    let part = m.binary(Binary::Mul, v, decay);
    let v = m.op(Op::Add, &[part, square]);
    let root = m.unary(Unary::Sqrt, v);
    let small = m.number(1e-3);
    let root = m.op(Op::Add, &[root, small]);
    let step = m.binary(Binary::Div, g, root);
    let step = m.binary(Binary::Mul, step, rate);
    let w = m.binary(Binary::Sub, w, step);
    let half = m.cast(w, BF16);
    let mut kernel = m.kernel(Family::Loops { grid: vec![n] }, &[w, v, half]);
    kernel.outputs[1].accumulate = accumulate;
    kernel
}

/// A norm of 16-bit rows, of four dims, of which the results lie apart.
fn norm(dtype: DType, columns: u64) -> Kernel {
    let mut m = KernelDraft::default();
    let [a, b, h] = m.dims([("a", 3), ("b", 6), ("h", columns)]);
    let (x, w) = (m.input(dtype, &[a, b, h]), m.input(F32, &[h]));
    let x = m.cast(x, F32);
    let squares = m.binary(Binary::Mul, x, x);
    let sum = m.op(SUM(vec![h]), &[squares]);
    let root = m.unary(Unary::Rsqrt, sum);
    let y = m.binary(Binary::Mul, x, root);
    let y = m.binary(Binary::Mul, y, w);
    let y = m.cast(y, dtype);
    let mut kernel = m.kernel(Family::Loops { grid: vec![a, b] }, &[y]);
    let row = columns.div_ceil(8) * 8 + 8;
    kernel.outputs[0].strides = vec![6 * row, row, 1];
    kernel
}

/// Sums of rows by index, of which some rows are here.
fn scatter(dtype: DType, sharded: bool, accumulate: bool, columns: u64) -> Kernel {
    let mut m = KernelDraft::default();
    let base = sharded.then(|| m.scalar(DType::I32));
    let v = if base.is_some() { m.sharded_dim("v", 37, 74, 0) } else { m.dim("v", 37) };
    let [s, h] = m.dims([("s", 60), ("h", columns)]);
    let (values, index) = (m.input(dtype, &[s, h]), m.input(DType::I32, &[s]));
    let table = m.op_as(Op::Scatter { dim: v }, &[values, index], Type::new(dtype, [v, h]));
    let mut kernel = m.kernel(Family::Scatter, &[table]);
    kernel.outputs[0].accumulate = accumulate;
    kernel
}

/// How factors are stored.
#[derive(Clone, Copy)]
enum FactorLayout {
    Plain,
    FirstTurned,
    SecondTurned,
    Collected,
}

/// A product with a function after it.
fn gemm(dtype: DType, sizes: [u64; 3], stored: FactorLayout, function: Option<Unary>) -> Kernel {
    let mut make = KernelDraft::default();
    let [m, n, k] = make.dims([("m", sizes[0]), ("n", sizes[1]), ("k", sizes[2])]);
    let a = make.input(dtype, &if matches!(stored, FactorLayout::FirstTurned) { [k, m] } else { [m, k] });
    let b = match stored {
        FactorLayout::SecondTurned => make.input(dtype, &[n, k]),
        FactorLayout::Collected => make.strided_input(dtype, &[n, k], &[2 * sizes[2], 2]),
        _ => make.input(dtype, &[k, n]),
    };
    let c = make.op_as(Op::dot(vec![k]), &[a, b], Type::new(dtype, [m, n]));
    let c = function.map_or(c, |f| make.unary(f, c));
    let mut kernel = make.kernel(Family::Gemm, &[c]);
    if matches!(stored, FactorLayout::Collected) {
        kernel.outputs[0].strides = vec![2 * sizes[1], 2];
    }
    kernel
}

/// Products of heads of a batch, two directions at once, which are added to what is there, with a residue and a
/// mask of random numbers.
fn batched(dtype: DType) -> Kernel {
    let mut make = KernelDraft::default();
    let [b, h, m, n, k] = make.dims([("b", 3), ("h", 2), ("m", 19), ("n", 50), ("k", 27)]);
    make.scalar(DType::I32);
    make.scalar(DType::I32);
    let (x, y) = (make.input(dtype, &[b, m, h, k]), make.input(dtype, &[h, b, k, n]));
    let (bias, residue) = (make.input(dtype, &[n]), make.input(dtype, &[b, h, m, n]));
    let c = make.op_as(Op::dot(vec![k]), &[x, y], Type::new(dtype, [b, h, m, n]));
    let c = make.op(Op::Add, &[c, bias]);
    let drawn = make.source(Op::Uniform { key: 5 }, F32, &[b, h, m, n]);
    let rate = make.number(0.25);
    let kept = make.op_as(Op::Compare(Compare::Ge), &[drawn, rate], Type::new(DType::Bool, [b, h, m, n]));
    let zero = make.source(Op::Const(Real(0.0)), dtype, &[]);
    let c = make.op_as(Op::Select, &[kept, c, zero], Type::new(dtype, [b, h, m, n]));
    let c = make.op(Op::Add, &[c, residue]);
    let mut kernel = make.kernel(Family::Gemm, &[c]);
    kernel.outputs[0].accumulate = true;
    kernel
}

/// Rows of experts times their matrices, or the sums over each expert's rows.
fn experts(dtype: DType, sums_rows: bool, [rows, h, f]: [u64; 3]) -> Kernel {
    let mut m = KernelDraft::default();
    let [rows, e, h, f] = m.dims([("rows", rows), ("e", 5), ("h", h), ("f", f)]);
    let a = m.input(dtype, &[rows, h]);
    let b = m.input(dtype, &if sums_rows { vec![rows, f] } else { vec![e, h, f] });
    let ends = m.input(DType::I32, &[e]);
    let over = if sums_rows { vec![rows] } else { vec![h, e] };
    let result = if sums_rows { vec![e, h, f] } else { vec![rows, f] };
    let c = m.op_as(Op::grouped_dot(rows, e, over), &[a, b, ends], Type::new(dtype, result));
    m.kernel(Family::Gemm, &[c])
}

/// An attention: heads whose queries share keys, sizes, a mask.
#[derive(Clone, Copy)]
struct AttentionVariant {
    dtype: DType,
    group: u64,
    queries: u64,
    keys: u64,
    d: u64,
    /// Elements of a head of values, if they are others.
    values: Option<u64>,
    causal: bool,
    window: Option<u32>,
    /// Whether keys of other documents are hidden, and whether scores get a soft cap and a bias of their key.
    documents: bool,
    changed: bool,
    /// Whether a bool of each key says that it is there.
    padded: bool,
    /// Whether the bias is one of each pair instead, whose gradient is asked for.
    trained: bool,
    /// Whether some probabilities are dropped.
    drops: bool,
}

const HEADS: AttentionVariant = AttentionVariant {
    dtype: F32,
    group: 1,
    queries: 50,
    keys: 50,
    d: 16,
    values: None,
    causal: true,
    window: None,
    documents: false,
    changed: false,
    padded: false,
    trained: false,
    drops: false,
};

/// The program of scores, and the operands that it has beside the positions.
fn scoring(heads: AttentionVariant, [b, kv, at, keys]: [Dim; 4]) -> (Scoring, Vec<(DType, Vec<Dim>)>) {
    let mut s = if heads.causal { Scoring::causal(heads.window) } else { Scoring::PLAIN };
    let mut operands = if heads.causal { [at, keys].map(|d| (DType::I32, vec![d])).to_vec() } else { vec![] };
    let operand = |s: &mut Scoring, operands: &mut Vec<_>, dtype: DType, dims: &[Dim]| {
        operands.push((dtype, dims.to_vec()));
        s.step(Op::Input(operands.len() as u32), dtype, &[])
    };
    if heads.documents {
        let [q, k] = [at, keys].map(|d| operand(&mut s, &mut operands, DType::I32, &[b, d]));
        let same = s.step(Op::Compare(Compare::Eq), DType::Bool, &[q, k]);
        s.seen = Some(s.seen.map_or(same, |seen| s.step(Op::Binary(Binary::And), DType::Bool, &[seen, same])));
    }
    if heads.padded {
        let there = operand(&mut s, &mut operands, DType::Bool, &[b, keys]);
        s.seen = Some(s.seen.map_or(there, |seen| s.step(Op::Binary(Binary::And), DType::Bool, &[seen, there])));
    }
    if heads.changed {
        let score = s.step(Op::Input(0), F32, &[]);
        let cap = s.step(Op::Const(Real(0.5)), F32, &[]);
        let part = s.step(Op::Binary(Binary::Div), F32, &[score, cap]);
        let bent = s.step(Op::Unary(Unary::Tanh), F32, &[part]);
        let dims = if heads.trained { vec![kv, at, keys] } else { vec![b, keys] };
        let bias = operand(&mut s, &mut operands, F32, &dims);
        s.score = Some(s.step(Op::Add, F32, &[bent, bias]));
    }
    if heads.drops {
        let [row, key] = [at, keys].map(|d| operand(&mut s, &mut operands, DType::I32, &[b, d]));
        let bits = s.step(Op::Binary(Binary::Mix), DType::I32, &[row, key]);
        let limit = s.step(Op::Const(Real(0.0)), DType::I32, &[]);
        let kept = s.step(Op::Compare(Compare::Ge), DType::Bool, &[bits, limit]);
        let [twice, none] = [2.0, 0.0].map(|x| s.step(Op::Const(Real(x)), F32, &[]));
        s.weight = Some(s.step(Op::Select, F32, &[kept, twice, none]));
    }
    (s, operands)
}

fn attention(heads: AttentionVariant, backward: bool) -> Kernel {
    let mut m = KernelDraft::default();
    let [b, kv, group, d, at, keys] =
        m.dims([("b", 2), ("kv", 2), ("group", heads.group), ("d", heads.d), ("at", heads.queries), ("keys", heads.keys)]);
    let values = heads.values.map_or(d, |size| m.dim("values", size));
    let (scoring, operands) = scoring(heads, [b, kv, at, keys]);
    let a = Attention { at, keys, d, values, scale: Real(0.3), scoring };
    let (of_q, of_k) = ([b, at, kv, group, d], [b, keys, kv, d]);
    let (of_out, of_v) = ([b, at, kv, group, values], [b, keys, kv, values]);
    let (q, k, v) = (m.input(heads.dtype, &of_q), m.input(heads.dtype, &of_k), m.input(heads.dtype, &of_v));
    let rows = backward.then(|| ([(); 2].map(|()| m.input(F32, &of_q[..4])), m.input(heads.dtype, &of_out)));
    let further: Vec<Value> = operands.iter().map(|(dtype, dims)| m.input(*dtype, dims)).collect();
    let Some(([lse, delta], dout)) = rows else {
        let out = m.op(Op::Attention(a.clone()), &[&[q, k, v], &further[..]].concat());
        let lse = m.op(Op::AttentionLse(a.without_values()), &[&[q, k], &further[..]].concat());
        return m.kernel(Family::Attention, &[out, lse]);
    };
    let args = [&[q, k, v, lse, delta, dout], &further[..]].concat();
    let bias = a.scoring.bias().filter(|_| heads.trained).map(|k| (AttentionGrad::Bias, further[k]));
    let wanted = bias.map_or(vec![(AttentionGrad::Q, q), (AttentionGrad::K, k), (AttentionGrad::V, v)], |bias| vec![bias]);
    let gradient = |m: &mut KernelDraft, (which, of): (AttentionGrad, Value)| {
        let ty = m.body[of].ty.clone();
        m.op_as(Op::AttentionGrad(a.clone(), which), &args, ty)
    };
    let outputs: Vec<Value> = wanted.into_iter().map(|one| gradient(&mut m, one)).collect();
    m.kernel(Family::AttentionGrad, &outputs)
}

/// All of them; those for GPUs last.
pub fn cases() -> Vec<FaultCase> {
    let zigzag = Order::ZigZag { pairs: 3, chunk: 4 };
    let group = AttentionVariant { group: 2, ..HEADS };
    let long = AttentionVariant { queries: 150, keys: 300, d: 20, causal: false, ..HEADS };
    let near = AttentionVariant { queries: 200, keys: 200, window: Some(40), ..HEADS };
    let packed = AttentionVariant { queries: 150, keys: 150, documents: true, ..HEADS };
    let changed = AttentionVariant { changed: true, values: Some(20), ..HEADS };
    let trained = AttentionVariant { trained: true, documents: true, queries: 150, keys: 140, ..changed };
    let padded = AttentionVariant { padded: true, causal: false, queries: 70, keys: 300, ..HEADS };
    let dropping = AttentionVariant { drops: true, ..HEADS };
    let half = AttentionVariant { dtype: BF16, queries: 150, keys: 150, d: 64, ..HEADS };
    let cpu = [
        ("softmax", softmax(F32, [9, 70])),
        ("softmax in bf16", softmax(BF16, [9, 70])),
        ("softmax of some tiles", softmax(F32, [2000, 3000])),
        ("rotation", rotation(F32, [9, 70])),
        ("greatest", greatest(F32, [9, 70])),
        ("greatest in bf16", greatest(BF16, [9, 70])),
        ("columns", columns([40, 300], true)),
        ("long columns", columns([700, 140], false)),
        ("functions", functions(false, F32)),
        ("functions of positive numbers", functions(true, F32)),
        ("functions in bf16", functions(false, BF16)),
        ("functions in f16", functions(false, DType::F16)),
        ("ints", ints()),
        ("running sums", running(F32)),
        ("running sums in bf16", running(BF16)),
        ("windows along lanes", windows(true)),
        ("windows across lanes", windows(false)),
        ("gather", gather(false)),
        ("gather of a part", gather(true)),
        ("gather for each element", gather_each()),
        ("random in a zig-zag", random(zigzag)),
        ("random", random(Order::Plain)),
        ("update", update(1003, false)),
        ("update that adds", update(40_001, true)),
        ("norm", norm(F32, 100)),
        ("norm in bf16", norm(BF16, 100)),
        ("scatter", scatter(F32, false, false, 35)),
        ("scatter of a part that adds", scatter(F32, true, true, 35)),
        ("scatter in bf16", scatter(BF16, false, false, 35)),
        ("product", gemm(F32, [30, 70, 40], FactorLayout::Plain, None)),
        ("product of a turned factor", gemm(F32, [45, 70, 41], FactorLayout::FirstTurned, Some(Unary::Tanh))),
        ("product with a turned factor", gemm(F32, [61, 75, 43], FactorLayout::SecondTurned, None)),
        ("product with a collected factor", gemm(F32, [61, 75, 43], FactorLayout::Collected, None)),
        ("product in passes", gemm(F32, [50, 70, 2500], FactorLayout::Plain, Some(Unary::Abs))),
        ("product in bf16", gemm(BF16, [77, 90, 66], FactorLayout::Plain, None)),
        ("product of many tiles", gemm(F32, [700, 900, 300], FactorLayout::FirstTurned, None)),
        ("product of some tiles", gemm(F32, [900, 3000, 800], FactorLayout::Plain, None)),
        ("product in passes of some columns", gemm(F32, [40, 3000, 1100], FactorLayout::Plain, None)),
        ("products of heads", batched(F32)),
        ("products of heads in bf16", batched(BF16)),
        ("vector", gemm(F32, [1, 90, 66], FactorLayout::Plain, None)),
        ("experts", experts(F32, false, [200, 24, 40])),
        ("experts in bf16", experts(BF16, false, [200, 24, 40])),
        ("experts' gradients", experts(F32, true, [600, 24, 40])),
        ("attention", attention(HEADS, false)),
        ("attention of groups", attention(group, false)),
        ("attention without a mask", attention(long, false)),
        ("attention in a window", attention(near, false)),
        ("attention in bf16", attention(half, false)),
        ("attention in documents", attention(packed, false)),
        ("attention with changed scores", attention(changed, false)),
        ("gradients in documents", attention(packed, true)),
        ("gradients with changed scores", attention(changed, true)),
        ("attention with padding", attention(padded, false)),
        ("gradients with padding", attention(padded, true)),
        ("attention that drops", attention(dropping, false)),
        ("gradients that drop", attention(dropping, true)),
        ("gradients of attention", attention(HEADS, true)),
        ("gradients of groups", attention(group, true)),
        ("gradients without a mask", attention(long, true)),
        ("gradients in a window", attention(near, true)),
        ("gradients in bf16", attention(half, true)),
        ("gradient of a bias", attention(trained, true)),
    ];
    let gpu = [
        ("sm_80", "softmax", softmax(F32, [5, 70])),
        ("sm_80", "softmax in runs", softmax(BF16, [5, 512])),
        ("sm_80", "columns", columns([64, 40], false)),
        ("sm_80", "windows", windows(true)),
        ("sm_80", "gather of a part", gather(true)),
        ("sm_80", "scatter", scatter(F32, true, true, 35)),
        ("sm_80", "norm", norm(BF16, 512)),
        ("sm_80", "product", gemm(F32, [70, 75, 43], FactorLayout::Plain, None)),
        ("sm_80", "product in bf16", gemm(BF16, [72, 80, 48], FactorLayout::Plain, None)),
        ("sm_80", "product of a turned factor in bf16", gemm(BF16, [72, 80, 48], FactorLayout::FirstTurned, None)),
        ("sm_80", "experts in bf16", experts(BF16, false, [150, 32, 40])),
        ("sm_80", "experts' gradients in bf16", experts(BF16, true, [150, 32, 40])),
        ("sm_80", "attention", attention(AttentionVariant { queries: 40, keys: 40, ..group }, false)),
        ("sm_80", "attention without a mask", attention(AttentionVariant { queries: 40, keys: 40, causal: false, ..HEADS }, false)),
        ("sm_80", "gradients", attention(AttentionVariant { queries: 40, keys: 40, ..group }, true)),
        ("sm_80", "attention in bf16", attention(AttentionVariant { queries: 150, keys: 150, window: Some(80), ..half }, false)),
        ("sm_80", "gradients in bf16", attention(AttentionVariant { queries: 90, keys: 90, ..half }, true)),
        ("sm_80", "attention in documents in bf16", attention(AttentionVariant { documents: true, ..half }, false)),
        ("sm_80", "gradients of heads of 72 in bf16", attention(AttentionVariant { queries: 90, keys: 90, d: 72, values: Some(104), ..half }, true)),
        ("sm_80", "attention with changed scores in bf16", attention(AttentionVariant { changed: true, d: 80, ..half }, false)),
        ("sm_80", "gradients with changed scores in bf16", attention(AttentionVariant { changed: true, queries: 90, keys: 90, ..half }, true)),
        (
            "sm_80",
            "gradients with padding in bf16",
            attention(AttentionVariant { padded: true, causal: false, queries: 70, keys: 200, ..half }, true),
        ),
        ("sm_80", "attention that drops", attention(AttentionVariant { queries: 40, keys: 40, ..dropping }, false)),
        ("sm_80", "gradients that drop", attention(AttentionVariant { queries: 40, keys: 40, ..dropping }, true)),
        ("sm_80", "attention that drops in bf16", attention(AttentionVariant { drops: true, ..half }, false)),
        ("sm_80", "gradients that drop in bf16", attention(AttentionVariant { drops: true, queries: 90, keys: 90, ..half }, true)),
        ("sm_80", "gradient of a bias", attention(AttentionVariant { queries: 40, keys: 70, ..trained }, true)),
        ("sm_80", "gradient of a bias in bf16", attention(AttentionVariant { trained: true, changed: true, queries: 90, keys: 90, ..half }, true)),
        ("sm_90a", "product in bf16", gemm(BF16, [200, 136, 136], FactorLayout::Plain, None)),
        ("sm_90a", "attention in bf16", attention(AttentionVariant { queries: 150, keys: 150, ..half }, false)),
        ("sm_90a", "gradients in bf16", attention(AttentionVariant { queries: 150, keys: 150, ..half }, true)),
    ];
    let cpu = cpu.into_iter().map(|(name, kernel)| FaultCase { name: name.into(), kernel, gpu: None });
    cpu.chain(gpu.into_iter().map(|(gpu, name, kernel)| FaultCase { name: format!("{name} on {gpu}"), kernel, gpu: Some(gpu) })).collect()
}
