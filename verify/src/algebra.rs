//! Rows of the sharding algebra, shown on numbers.
//!
//! Partitioning and its verifier read one table ([`ir::algebra`]): which loops of an op may be split, and in which
//! operands it is linear. What both believe alike, both can be wrong in alike. So each row that a sharded graph uses
//! is evaluated once, on dims of a few elements: the op of the operands' parts, joined as the row says, is the op of
//! the operands. Rows are the same if op, types and dims are up to names: the models of `models/` have 110 to 290.
//!
//! Parts are two: a row that holds for two contiguous parts holds for as many as there are, as each part may be cut
//! in two again. A ring is no op of parts: [`crate::partition`] shows its steps, on the lemma of `ir::algebra`.

use ir::algebra::{Loop, LoopKind};
use ir::dim::{Base, Dim, DimInfo, IndexMap};
use ir::eval::{Env, eval};
use ir::graph::{Body, Origin, Phase, Type, Value};
use ir::infer;
use ir::op::{DType, Op, Real, Routing, Scalar};
use ir::random::mix;
use smallvec::SmallVec;
use std::collections::BTreeSet;
use std::hash::{Hash, Hasher};
use std::sync::{Mutex, PoisonError};

/// How one sub-axis goes through an op.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Row<'a> {
    /// Operands in these slots are partial sums, and so is the result.
    Linear(&'a [usize]),
    /// A loop is split, in the operands and in the result that have it.
    Split(&'a Loop),
}

/// Rows that this process has shown to hold. A row that holds in one graph holds in every graph.
static KNOWN: Mutex<BTreeSet<Box<[u8]>>> = Mutex::new(BTreeSet::new());

/// Checks that a row holds of an op and its operands.
///
/// # Errors
/// What the op of the parts comes to.
pub fn holds(body: &Body, v: Value, row: Row) -> Result<(), String> {
    if matches!(row, Row::Split(Loop { kind: LoopKind::Ring, .. })) {
        return Ok(());
    }
    let key = case_key(body, v, row);
    let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if !known().contains(&*key.0) {
        OpCase::new(body, v, row).holds()?;
        known().insert(key.0.to_vec().into());
    }
    Ok(())
}

/// Everything that a case depends on, in bytes: the op, its types and the row, with dims numbered by first
/// appearance.
struct CaseKey(SmallVec<[u8; 256]>);

impl Hasher for CaseKey {
    fn write(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    fn finish(&self) -> u64 {
        unreachable!("invariant: a key is compared, not hashed")
    }
}

/// Dims numbered in the order in which they come.
#[derive(Default)]
struct Numbers(SmallVec<[Dim; 16]>);

impl Numbers {
    fn of(&mut self, d: Dim) -> Dim {
        let known = self.0.iter().position(|o| *o == d);
        Dim(known.unwrap_or_else(|| {
            self.0.push(d);
            self.0.len() - 1
        }) as u32)
    }
}

/// The type in which a value is evaluated: floats are f32 whatever their precision.
fn real(t: DType) -> DType {
    if t.is_float() { DType::F32 } else { t }
}

fn is_zero(op: &Op) -> bool {
    matches!(op, Op::Const(Real(0.0)))
}

fn case_key(body: &Body, v: Value, row: Row) -> CaseKey {
    let (mut key, mut numbers) = (CaseKey(SmallVec::new()), Numbers::default());
    let node = &body[v];
    node.args.len().hash(&mut key);
    for node in node.args.iter().map(|a| &body[*a]).chain([node]) {
        (real(node.ty.dtype), is_zero(&node.op), node.ty.dims.len()).hash(&mut key);
        node.ty.dims.iter().for_each(|d| numbers.of(*d).hash(&mut key));
    }
    node.op.map_dims(&mut |d| numbers.of(d)).hash(&mut key);
    match row {
        Row::Linear(slots) => (0u8, slots).hash(&mut key),
        Row::Split(l) => {
            (1u8, l.kind).hash(&mut key);
            l.args.iter().chain([&l.out]).for_each(|d| d.map(|d| numbers.of(d)).hash(&mut key));
        }
    }
    key
}

/// An op and a row of its table, on dims of its own.
struct OpCase {
    op: Op,
    args: Vec<Operand>,
    out: (DType, Vec<Dim>),
    row: CaseRow,
    dims: usize,
}

enum CaseRow {
    Linear(Vec<usize>),
    Split(Loop),
}

struct Operand {
    dtype: DType,
    dims: Vec<Dim>,
    /// Whether the operand is zero everywhere, which is all that a table asks of an operand's value.
    zero: bool,
}

/// Elements of a dim that a row splits, in all and in each part, and elements of other dims.
const SPLIT: u64 = 4;
const PART: u64 = 2;
const OTHER: u64 = 2;

/// Operands of fewer elements are drawn several times, since a wrong row may hold by chance for a few values.
const POINTS: u64 = 12;

/// The greatest allowed difference: far above rounding in f64, and far below what a wrong row makes of numbers about
/// 1.
const PRECISION: f64 = 1e-9;

impl OpCase {
    fn new(body: &Body, v: Value, row: Row) -> OpCase {
        let (node, mut numbers) = (&body[v], Numbers::default());
        let mut operand = |a: &Value| Operand {
            dtype: real(body[*a].ty.dtype),
            dims: body.dims_of(*a).iter().map(|d| numbers.of(*d)).collect(),
            zero: is_zero(&body[*a].op),
        };
        let args = node.args.iter().map(&mut operand).collect();
        let out = (real(node.ty.dtype), node.ty.dims.iter().map(|d| numbers.of(*d)).collect());
        let mut op = node.op.map_dims(&mut |d| numbers.of(d));
        match &mut op {
            Op::Dot { tf32, .. } | Op::GroupedDot { tf32, .. } => *tf32 = false,
            Op::Slice { at, .. } | Op::Pad { at, .. } => *at = 1,
            _ => {}
        }
        let row = match row {
            Row::Linear(slots) => CaseRow::Linear(slots.to_vec()),
            Row::Split(l) => {
                let mut number = |d: &Option<Dim>| d.map(|d| numbers.of(d));
                CaseRow::Split(Loop { kind: l.kind, args: l.args.iter().map(&mut number).collect(), out: number(&l.out) })
            }
        };
        OpCase { op, args, out, row, dims: numbers.0.len() }
    }

    /// The size of each dim, so that the op is valid and the dims that the row splits have two parts.
    fn sizes(&self) -> Vec<u64> {
        let mut sizes = vec![OTHER; self.dims];
        if let CaseRow::Split(l) = &self.row {
            l.dims().for_each(|d| sizes[d.0 as usize] = SPLIT);
        }
        let mut set = |d: &Dim, n: u64| sizes[d.0 as usize] = n;
        match &self.op {
            Op::View { from, to } => {
                let mut left = SPLIT.pow(from.len() as u32);
                from.iter().for_each(|d| set(d, SPLIT));
                to.iter().for_each(|d| set(d, std::mem::replace(&mut left, 1)));
            }
            Op::Slice { from, to, .. } => {
                set(from, SPLIT);
                to.iter().for_each(|d| set(d, PART));
            }
            Op::Pad { from, to, .. } => {
                from.iter().for_each(|d| set(d, PART));
                set(to, SPLIT);
            }
            Op::Concat { from, to } => {
                from.iter().for_each(|d| set(d, PART));
                set(to, PART * from.len() as u64);
            }
            _ => {}
        }
        sizes
    }

    fn holds(&self) -> Result<(), String> {
        let sizes = self.sizes();
        let (whole, part) = (self.body(&sizes, None)?, self.body(&sizes, Some(&self.row))?);
        let elements = |a: &Operand| a.dims.iter().map(|d| sizes[d.0 as usize]).product::<u64>().max(1);
        let fewest = self.args.iter().filter(|a| !a.zero).map(elements).min().unwrap_or(POINTS);
        (0..POINTS.div_ceil(fewest)).try_for_each(|sample| self.holds_on(&whole, &part, &sizes, sample))
    }

    fn holds_on(&self, whole: &(Body, Value), part: &(Body, Value), sizes: &[u64], sample: u64) -> Result<(), String> {
        let values: Vec<Vec<f64>> = (0..self.args.len()).map(|k| self.operand(k, sizes, sample)).collect();
        let want = evaluate(whole, &values, 0);
        let halves = values.iter().enumerate().map(|(k, x)| self.halves(k, x, sizes, sample));
        let (first, second): (Vec<_>, Vec<_>) = halves.map(|[a, b]| (a, b)).unzip();
        let got = self.joined(&[evaluate(part, &first, 0), evaluate(part, &second, 1)], sizes);
        let alike = |a: f64, b: f64| a == b || (a - b).abs() <= PRECISION * (1.0 + a.abs().max(b.abs())) || a.is_nan() && b.is_nan();
        match want.iter().zip(&got).find(|(a, b)| !alike(**a, **b)) {
            None if want.len() == got.len() => Ok(()),
            None => Err(format!("of two parts, joined, there are {} elements of {}", got.len(), want.len())),
            Some((a, b)) => Err(format!("of two parts, joined, it is {b:.9}, and {a:.9} of the whole")),
        }
    }

    /// A body with this op alone, whose operands are inputs. With a row, dims that it splits have the size of a part.
    fn body(&self, sizes: &[u64], row: Option<&CaseRow>) -> Result<(Body, Value), String> {
        let mut body = Body::default();
        for size in sizes {
            body.dims.add(DimInfo::new("d", *size));
        }
        if let Some(CaseRow::Split(l)) = row {
            for d in l.dims() {
                let half = sizes[d.0 as usize] / 2;
                let info = &mut body.dims[d];
                (info.size, info.index) = (half, IndexMap { base: Base::Slot(half as u32), ..IndexMap::whole(half) });
            }
        }
        let origin = Origin::new(Phase::Forward);
        let mut source = |(a, k): (&Operand, u32)| body.push(Op::Input(k), vec![], Type { dtype: a.dtype, dims: a.dims.clone() }, origin.clone());
        let args: Vec<Value> = self.args.iter().zip(0..).map(&mut source).collect();
        let (dtype, dims) = self.out.clone();
        let v = body.push(self.op.clone(), args, Type { dtype, dims }, origin);
        infer::check(&body, v).map_err(|e| format!("{} it is none: {e}", if row.is_some() { "of a part" } else { "of a few elements" }))?;
        Ok((body, v))
    }

    /// Numbers for an operand. Indices may or may not exist in the dim that they look up.
    fn operand(&self, k: usize, sizes: &[u64], sample: u64) -> Vec<f64> {
        let Operand { dtype, dims, zero } = &self.args[k];
        let size = |d: &Dim| sizes[d.0 as usize];
        let n: u64 = dims.iter().map(size).product();
        let draw = |i: u64| mix(mix(i) ^ (k as u64) << 32 ^ sample << 48) >> 16;
        // There are only six values, so that some elements are equal.
        let float = |i: u64| [-1.5, -1.0, -0.5, 0.5, 1.0, 1.5][(draw(i) % 6) as usize];
        let of = |i: u64| match (dtype, &self.op, k) {
            _ if *zero => 0.0,
            (DType::F32 | DType::Bf16 | DType::F16, ..) => float(i),
            (DType::Bool, ..) => (draw(i) & 1) as f64,
            (DType::I32, Op::Gather { dim } | Op::Scatter { dim } | Op::Dispatch(Routing { experts: dim, .. }), 1)
            | (DType::I32, Op::Combine(Routing { experts: dim, .. }), 1) => (draw(i) % (size(dim) + 1)) as f64 - 1.0,
            (DType::I32, ..) => (draw(i) % 7) as f64 - 3.0,
        };
        (0..n).map(of).collect()
    }

    /// An operand's value on each of two ranks.
    fn halves(&self, k: usize, x: &[f64], sizes: &[u64], sample: u64) -> [Vec<f64>; 2] {
        match &self.row {
            CaseRow::Linear(slots) if slots.contains(&k) => {
                let term = |i: u64| (mix(mix(i) ^ sample) % 5) as f64 - 2.0;
                let first: Vec<f64> = (0..x.len() as u64).map(term).collect();
                let second = x.iter().zip(&first).map(|(x, t)| x - t).collect();
                [first, second]
            }
            CaseRow::Split(l) => match l.args[k] {
                Some(d) => {
                    let (n, inner) = extent(&self.args[k].dims, d, sizes);
                    let half = |part: usize| (0..x.len()).filter(|i| i / inner % n / (n / 2) == part).map(|i| x[i]).collect();
                    [half(0), half(1)]
                }
                None => [x.to_vec(), x.to_vec()],
            },
            CaseRow::Linear(_) => [x.to_vec(), x.to_vec()],
        }
    }

    /// The whole result, joined from the results of two ranks.
    fn joined(&self, made: &[Vec<f64>], sizes: &[u64]) -> Vec<f64> {
        let both = |f: fn(f64, f64) -> f64| made[0].iter().zip(&made[1]).map(|(a, b)| f(*a, *b)).collect();
        match &self.row {
            CaseRow::Linear(_) | CaseRow::Split(Loop { kind: LoopKind::Sum, .. }) => both(|a, b| a + b),
            CaseRow::Split(Loop { kind: LoopKind::Max, .. }) => both(f64::max),
            CaseRow::Split(Loop { out: Some(d), .. }) => {
                let (n, inner) = extent(&self.out.1, *d, sizes);
                let run = n / 2 * inner;
                made[0].chunks(run).zip(made[1].chunks(run)).flat_map(|(a, b)| a.iter().chain(b)).copied().collect()
            }
            CaseRow::Split(Loop { out: None, .. }) => made[0].clone(),
        }
    }
}

/// A dim's number of elements in a tensor, and its stride.
fn extent(dims: &[Dim], d: Dim, sizes: &[u64]) -> (usize, usize) {
    let inner: u64 = dims.iter().rev().take_while(|e| **e != d).map(|e| sizes[e.0 as usize]).product();
    (sizes[d.0 as usize] as usize, inner as usize)
}

/// An op of operands, as the first or the second rank computes it.
fn evaluate((body, v): &(Body, Value), args: &[Vec<f64>], rank: u64) -> Vec<f64> {
    let args: Vec<&[f64]> = args.iter().map(Vec::as_slice).collect();
    eval(body, *v, &args, &mut Bases(rank))
}

/// Bases of index maps: where a rank's parts begin.
struct Bases(u64);

impl Env for Bases {
    fn source(&mut self, op: &Op, _: &Type) -> Vec<f64> {
        unreachable!("invariant: operands are given, not `{}`", op.name())
    }

    fn scalar(&self, _: &Scalar) -> f64 {
        1.0
    }

    fn base(&self, base: &Base) -> u64 {
        match base {
            Base::Slot(part) => self.0 * u64::from(*part),
            Base::Zero | Base::Coords(_) => 0,
        }
    }
}
