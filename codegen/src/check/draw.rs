//! What operands of a kernel are filled with, so that its results say something: no root of a negative number,
//! indices within their tables, positions that ascend.

use ir::dim::{Base, Dim, Dims};
use ir::graph::{Body, Type, Value};
use ir::kernel::Kernel;
use ir::op::{Binary, DType, Op, Real, Reduce, Unary};
use ir::random::mix;

/// The elements of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Draw {
    /// Between -1 and 1: one of 32 is 0, and no other is close to it.
    Signed,
    /// Between 0 and 1, and not close to 0.
    Positive,
    /// Few numbers below zero: of some that are alike, one is the greatest.
    Low,
    /// As `Signed`, but some stretches are [`STEEP`] times as large.
    Uneven,
    Bool,
    /// Ints `first..end`; of those from 0 on, one of 16 is -1, which is no index, and so is the last.
    Below {
        first: u64,
        end: u64,
    },
    /// Ints of either sign, small ones; perhaps without 0.
    Ints {
        zero: bool,
    },
    /// The index along the only dim, or this if that is less.
    Positions {
        least: u64,
    },
    /// Along the last dim numbers that do not fall, each for some in a row.
    Documents,
    /// Bools that are the same along the last dim for some in a row.
    There,
    /// Ends of experts' rows along this dim, of so many rows.
    Ends {
        experts: Dim,
        rows: u64,
    },
}

/// What the uses of a value require of it.
#[derive(Clone, Copy, Default)]
struct Requirement {
    positive: bool,
    /// Its maximum is taken.
    low: bool,
    /// It is an int by which others are divided.
    divides: bool,
    /// It is an index below this.
    below: Option<u64>,
    whole: Option<Draw>,
}

/// Bound of ints whose range nothing limits.
const INTS: u64 = 16;
/// Number of indices from which on one of them may be invalid.
const SOME: u64 = 8;

impl Draw {
    pub const INTS: Draw = Draw::Ints { zero: true };
}

fn is_whole_number(op: &Op) -> bool {
    matches!(op, Op::Const(Real(x)) if x.fract() == 0.0)
}

/// The dim of which a value is the index, if it is one.
fn indexed(body: &Body, v: Value) -> Option<Dim> {
    match &body[v].op {
        Op::Iota(d) => Some(*d),
        Op::Expand | Op::Cast => indexed(body, body[v].args[0]),
        _ => None,
    }
}

/// What each operand is filled with.
pub fn draws(kernel: &Kernel) -> Vec<Draw> {
    let body = &kernel.body;
    let mut required = vec![Requirement::default(); body.nodes.len()];
    let mut out = vec![None; kernel.inputs.len()];
    for v in body.values().rev() {
        let (node, of) = (&body[v], required[v.index()]);
        let divides =
            matches!(node.op, Op::Binary(Binary::Div | Binary::Rem)) && node.ty.dtype == DType::I32 && matches!(body[node.args[1]].op, Op::Input(_));
        if divides {
            required[node.args[1].index()].divides = true;
        }
        let mut positive = |slot: usize| required[node.args[slot].index()].positive = true;
        match &node.op {
            Op::Unary(Unary::Sqrt | Unary::Rsqrt | Unary::Log | Unary::Recip) => positive(0),
            Op::Binary(Binary::Div | Binary::Rem) if divides => {}
            Op::Binary(Binary::Div | Binary::Rem) => positive(1),
            Op::Binary(Binary::Pow) if node.ty.dtype == DType::I32 => (0..2).for_each(&mut positive),
            Op::Binary(Binary::Pow) if !is_whole_number(&body[node.args[1]].op) => positive(0),
            _ => {}
        }
        if of.positive {
            match &node.op {
                // A square is never negative, so its factor may have either sign.
                Op::Binary(Binary::Mul) | Op::Dot { .. } if node.args[0] == node.args[1] => {}
                Op::Binary(Binary::Mul | Binary::Div | Binary::Max | Binary::Min) | Op::Dot { .. } => [0, 1].map(positive).into_iter().collect(),
                Op::Binary(Binary::Sub | Binary::Pow) => positive(0),
                Op::Select => [1, 2].map(positive).into_iter().collect(),
                Op::Add | Op::Concat { .. } => (0..node.args.len()).for_each(positive),
                Op::Cast | Op::Expand | Op::StopGradient | Op::Reduce { .. } | Op::Cumsum { .. } | Op::Pad { .. } => positive(0),
                Op::Gather { .. } | Op::Scatter { .. } => positive(0),
                _ => {}
            }
        }
        match &node.op {
            Op::Reduce { kind: Reduce::Max, .. } | Op::ArgMax { .. } => required[node.args[0].index()].low = true,
            Op::Cast | Op::Expand | Op::StopGradient if of.low => required[node.args[0].index()].low = true,
            Op::Select if of.low => [1, 2].map(|slot: usize| required[node.args[slot].index()].low = true).into_iter().collect(),
            _ => {}
        }
        let below = |slot: usize, end: u64, required: &mut Vec<Requirement>| {
            let old = &mut required[node.args[slot].index()].below;
            *old = Some(old.map_or(end, |b| b.min(end)));
        };
        match &node.op {
            Op::Gather { dim } | Op::Scatter { dim } => below(1, body.dims[*dim].global, &mut required),
            Op::Compare(_) => {
                for slot in 0..2 {
                    if let Some(d) = indexed(body, node.args[1 - slot]) {
                        below(slot, body.dims[d].global, &mut required);
                    }
                }
            }
            Op::GroupedDot { rows, experts, .. } => {
                required[node.args[2].index()].whole = Some(Draw::Ends { experts: *experts, rows: body.dims.size(*rows) });
            }
            Op::Attention(a) | Op::AttentionLse(a) | Op::AttentionGrad(a, _) => {
                // The forward pass computes nothing but a softmax of scores, so these may lie far apart.
                if !matches!(node.op, Op::AttentionGrad(..)) {
                    required[node.args[0].index()].whole = Some(Draw::Uneven);
                }
                // Keys begin at position 1, so the first query sees no key.
                let further = a.further(&node.args);
                for (least, k) in (0..).zip(a.scoring.ordered().into_iter().flatten()) {
                    required[further[k].index()].whole = Some(Draw::Positions { least });
                }
                for k in a.scoring.compared().into_iter().flatten() {
                    required[further[k].index()].whole.get_or_insert(Draw::Documents);
                }
                // Long runs of equal bools make some blocks fully hidden and some fully visible.
                let of_one_side = |ty: &Type| ty.has(a.at) != ty.has(a.keys);
                for v in further.iter().filter(|v| body[**v].ty.dtype == DType::Bool && of_one_side(&body[**v].ty)) {
                    required[v.index()].whole.get_or_insert(Draw::There);
                }
            }
            Op::Binary(_) | Op::Add | Op::Select | Op::Cast | Op::Expand | Op::StopGradient => {
                if let Some(end) = of.below {
                    (0..node.args.len()).for_each(|slot| below(slot, end, &mut required));
                }
            }
            Op::Input(i) => {
                let draw = of.whole.unwrap_or(match node.ty.dtype {
                    DType::Bool => Draw::Bool,
                    DType::I32 if of.below.is_none() && !of.positive => Draw::Ints { zero: !of.divides },
                    DType::I32 => {
                        let first = u64::from(of.positive || of.divides);
                        Draw::Below { first, end: of.below.unwrap_or(INTS).max(first + 1) }
                    }
                    DType::F32 | DType::Bf16 | DType::F16 if of.positive => Draw::Positive,
                    DType::F32 | DType::Bf16 | DType::F16 if of.low => Draw::Low,
                    DType::F32 | DType::Bf16 | DType::F16 => Draw::Signed,
                });
                // An operand with several uses gets the draw of the most demanding one.
                let old = out[*i as usize].get_or_insert(draw);
                if matches!(old, Draw::Signed | Draw::Low | Draw::Below { .. } | Draw::Ints { .. }) && !matches!(draw, Draw::Signed | Draw::INTS) {
                    *old = draw;
                }
            }
            _ => {}
        }
    }
    out.into_iter().map(|draw| draw.unwrap_or(Draw::Signed)).collect()
}

/// One unit of a fraction of 24 bits.
const UNIT: f64 = 1.0 / (1 << 24) as f64;
/// Least magnitude of a float other than 0.
const LEAST: f64 = 1.0 / 32.0;

/// How much larger the elements of some stretches are: so much that of a softmax's greatest scores some are greater
/// by 32 powers of 2 than those before.
const STEEP: f64 = 48.0;
/// Positions of a document.
const RUN: u64 = 40;
/// Bools in a row that are the same: more than a block of keys has.
const THERE: u64 = 135;
/// Bytes of a stretch.
const STRETCH: u64 = 512;

/// A float from 64 random bits. `byte` is its offset from where its operand begins, or from some point before.
pub fn float(draw: Draw, byte: u64, bits: u64) -> f64 {
    let size = LEAST + (1.0 - LEAST) * (bits >> 40) as f64 * UNIT;
    let signed = if bits >> 1 & 31 == 0 {
        0.0
    } else if bits & 1 == 0 {
        size
    } else {
        -size
    };
    match draw {
        Draw::Positive => size,
        Draw::Low => ((bits >> 40) % 16) as f64 / 16.0 - 1.0,
        Draw::Uneven if mix(byte / STRETCH) & 7 == 0 => STEEP * signed,
        _ => signed,
    }
}

/// An int from 64 random bits, whatever its position.
pub fn one_int(draw: Draw, bits: u64) -> i64 {
    match draw {
        Draw::Below { first: 0, .. } if bits & 15 == 0 => -1,
        Draw::Below { first, end } => (first + (bits >> 20) % (end - first).max(1)) as i64,
        Draw::Ints { zero } => {
            let x = ((bits >> 20) % (2 * INTS)) as i64 - INTS as i64;
            if x == 0 && !zero { INTS as i64 } else { x }
        }
        _ => (bits >> 63) as i64,
    }
}

/// An int from 64 random bits, at the index that an element has along each of its dims.
pub fn int(draw: Draw, dims: &Dims, of: &[Dim], at: &[u64], bits: u64) -> i64 {
    match draw {
        Draw::Positions { least } => at.iter().sum::<u64>().max(least) as i64,
        Draw::Documents => at.last().map_or(0, |i| i / RUN) as i64,
        Draw::There => i64::from((at.iter().sum::<u64>() / THERE).is_multiple_of(2)),
        // The last of several indices is invalid.
        Draw::Below { first: 0, .. } if dims.elements(of) >= SOME && at.iter().zip(of).all(|(i, d)| i + 1 == dims.size(*d)) => -1,
        Draw::Ends { experts, rows } => {
            let place = of.iter().position(|d| *d == experts).unwrap_or(0);
            let part = at.iter().enumerate().filter(|(k, _)| *k != place).fold(0, |part, (_, i)| mix(part ^ i));
            // An eighth of the rows belongs to no expert, and some experts have no rows.
            let (share, mut end) = (rows - rows / 8, 0);
            for e in 0..=at[place] {
                let bits = mix(part ^ e << 8 ^ 1);
                let ideal = share * (e + 1) / dims.size(experts);
                end = if bits & 3 == 0 { end } else { end.max(ideal - (bits >> 2) % (share / dims.size(experts) / 2 + 1).min(ideal + 1)) };
            }
            end as i64
        }
        _ => one_int(draw, bits),
    }
}

/// Scalar arguments. Floats are rates, scales and corrections; ints the seed and the step, or where a rank's part
/// of a dim begins.
pub fn scalars(kernel: &Kernel) -> Vec<f64> {
    let dims = &kernel.body.dims;
    let scalar = |(k, dtype): (usize, &DType)| {
        let begins = dims.list.iter().filter(|d| d.index.base == Base::Slot(k as u32));
        // The offset is that of the last rank.
        let last = begins.map(|d| (d.global.max(1) - 1).saturating_sub(d.index.offset(d.size.max(1) - 1))).min();
        match (dtype.is_float(), last) {
            (true, _) => (k + 1) as f64 / (k + 2) as f64,
            (false, Some(last)) => last as f64,
            (false, None) => (3 + 2 * k) as f64,
        }
    };
    kernel.scalars.iter().enumerate().map(scalar).collect()
}
