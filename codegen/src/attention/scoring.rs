//! The program of scores in code: on vectors of scores, and on the bounds of a block's operands, which tell
//! whether it hides all of a block or nothing.

use super::{Arguments, AttentionPlan, operand, stride};
use crate::build::{Builder, Compare, Convert, IntBinary, Lane};
use crate::{CompileError, math, pointwise};
use ir::dim::Dim;
use ir::graph::{Body, Value};
use ir::kernel::{Kernel, Output};
use ir::op::{self, Attention, AttentionGrad, Binary, DType, Op, Scoring, Unary};

/// A program as it is compiled: with the slope of scores, where gradients ask for it.
pub struct Program {
    pub scoring: Scoring,
    pub slope: Option<u32>,
    /// Body of the program's steps, from which their code is written.
    body: Body,
    /// The further operands, in order.
    pub operands: Vec<Operand>,
    /// Whether an operand differs among queries that share keys.
    pub grouped: bool,
}

/// A further operand: a tensor with a value for each query, each key, each pair, or one for all.
#[derive(Clone, Copy)]
pub struct Operand {
    pub tensor: usize,
    pub dtype: DType,
    /// Strides along queries and along keys, in elements; `None` where the operand lacks the dim.
    pub strides: [Option<i64>; 2],
    /// Whether bounds, the least and the greatest value of a block, are found for the operand. They are for integers
    /// and bools (0 and 1) that are not per pair and are the same for all queries that share keys.
    pub bounded: bool,
}

impl Operand {
    pub fn lane(&self) -> Lane {
        pointwise::stored(self.dtype)
    }

    /// Bytes between the values of neighbours along a side (queries 0, keys 1).
    pub fn step(&self, side: usize) -> i64 {
        self.lane().bytes() * self.strides[side].unwrap_or(0)
    }

    /// Whether it has values for queries only (0), for keys only (1), for pairs (2), or one for all (3).
    pub fn side(&self) -> usize {
        match self.strides {
            [Some(_), None] => 0,
            [None, Some(_)] => 1,
            [Some(_), Some(_)] => 2,
            [None, None] => 3,
        }
    }

    /// The side with whose blocks its bounds are found: keys if it has one value for all.
    pub fn bounded_with(&self) -> usize {
        self.side().min(1)
    }

    /// A value of the operand as an integer, for bounds: bools become 0 or 1.
    pub fn counted<B: Builder>(&self, b: &B, value: B::Vector) -> B::Vector {
        match self.lane() {
            Lane::Mask => b.convert(Convert::Unsigned(Lane::I32), value),
            _ => value,
        }
    }
}

impl Program {
    /// The program of a kernel's attention; `group` are the dims of queries that share keys.
    ///
    /// # Errors
    /// An operand is no input of the kernel.
    pub fn new(kernel: &Kernel, attention: &Attention, group: &[Dim], args: &[Value]) -> Result<Program, CompileError> {
        // The gradient of a bias needs no slope: the bias is added to the score that the program has already changed.
        let of_products = |o: &Output| matches!(kernel.body[o.value].op, Op::AttentionGrad(_, AttentionGrad::Q | AttentionGrad::K));
        let (scoring, slope) =
            if kernel.outputs.iter().any(of_products) { attention.scoring.with_slope() } else { (attention.scoring.clone(), None) };
        let further = |v: &Value| {
            let ty = &kernel.body[*v].ty;
            let tensor = operand(kernel, *v)?;
            let strides = [attention.at, attention.keys].map(|d| ty.has(d).then(|| stride(kernel, tensor, d)));
            let of_pairs = strides[0].is_some() && strides[1].is_some();
            let bounded = matches!(ty.dtype, DType::I32 | DType::Bool) && !of_pairs && !group.iter().any(|d| ty.has(*d));
            Ok(Operand { tensor, dtype: ty.dtype, strides, bounded })
        };
        let operands = attention.further(args).iter().map(further).collect::<Result<_, CompileError>>()?;
        let grouped = attention.further(args).iter().any(|v| group.iter().any(|d| kernel.body[*v].ty.has(*d)));
        Ok(Program { body: scoring.body(), scoring, slope, operands, grouped })
    }

    /// Whether scores are changed.
    pub fn changes(&self) -> bool {
        self.scoring.score.is_some()
    }

    /// Whether keys are hidden.
    pub fn hides(&self) -> bool {
        self.scoring.seen.is_some()
    }

    /// Whether probabilities have weights.
    pub fn weighs(&self) -> bool {
        self.scoring.weight.is_some()
    }

    /// Whether an operand has a number for each pair of a query and a key.
    pub fn reads_pairs(&self) -> bool {
        self.operands.iter().any(|o| o.side() == 2)
    }

    /// The operands whose bounds are found with blocks of a side (queries 0, keys 1).
    pub fn bounded(&self, side: usize) -> impl Iterator<Item = (usize, &Operand)> {
        self.operands.iter().enumerate().filter(move |(_, o)| o.bounded && o.bounded_with() == side)
    }

    /// The operands that a step depends on.
    pub fn reads(&self, step: Option<u32>) -> Vec<usize> {
        let read = |at: &u32| match self.scoring.steps[*at as usize].op {
            Op::Input(n) if n > 0 => Some(n as usize - 1),
            _ => None,
        };
        step.map_or(vec![], |step| self.scoring.needs(step).iter().filter_map(read).collect())
    }

    /// Whether the bounds of a block may tell that all or none of it is hidden.
    pub fn tells(&self) -> bool {
        self.hides() && self.operands.iter().any(|o| o.bounded)
    }
}

/// The program on a vector of scores. Steps are written as they are asked for.
pub struct Applied<'r, B: Builder> {
    pub b: &'r B,
    program: &'r Program,
    product: B::Vector,
    number: &'r dyn Fn(usize) -> B::Vector,
    known: Vec<Option<B::Vector>>,
}

impl<'r, B: Builder> Applied<'r, B> {
    /// `product` is the scaled product of queries and keys; `number` gives the values of an operand.
    pub fn new(b: &'r B, program: &'r Program, product: B::Vector, number: &'r dyn Fn(usize) -> B::Vector) -> Self {
        Applied { b, program, product, number, known: vec![None; program.scoring.steps.len()] }
    }

    /// The changed score.
    pub fn score(&mut self) -> B::Vector {
        self.program.scoring.score.map_or(self.product, |at| self.value(at))
    }

    /// Whether the key is seen.
    pub fn seen(&mut self) -> Option<B::Vector> {
        self.program.scoring.seen.map(|at| self.value(at))
    }

    /// The slope of the score, unless it is 1.
    pub fn slope(&mut self) -> Option<B::Vector> {
        self.program.slope.map(|at| self.value(at))
    }

    /// The weight of the probability, unless it is 1.
    pub fn weight(&mut self) -> Option<B::Vector> {
        self.program.scoring.weight.map(|at| self.value(at))
    }

    /// The value of a constant divisor, if its inverse neither overflows nor vanishes.
    fn divisor(&self, v: Value) -> Option<f64> {
        match self.program.body[v].op {
            Op::Const(x) => Some(x.0).filter(|x| (1e-30..1e30).contains(&x.abs())),
            _ => None,
        }
    }

    fn value(&mut self, at: u32) -> B::Vector {
        if let Some(value) = self.known[at as usize] {
            return value;
        }
        let node = &self.program.body[Value(at)];
        let args: Vec<B::Vector> = node.args.iter().map(|a| self.value(a.0)).collect();
        let value = match node.op {
            Op::Input(0) => self.product,
            Op::Input(n) => (self.number)(n as usize - 1),
            Op::Const(x) => pointwise::constant(self.b, node.ty.dtype, x.0),
            // A division by a constant becomes a product with its inverse, which spares a soft cap a division.
            Op::Binary(Binary::Div) if node.ty.dtype == DType::F32 && self.divisor(node.args[1]).is_some() => {
                let inverse = self.divisor(node.args[1]).map_or(1.0, |x| 1.0 / x);
                self.b.mul(args[0], self.b.f32(ir::fault!("attention.program.inverse", 1.0, inverse)))
            }
            Op::Unary(Unary::Tanh) if node.ty.dtype == DType::F32 => math::tanh_of_score(self.b, args[0]),
            _ => pointwise::of_one(self.b, &self.program.body, Value(at), &args).expect("invariant: programs of scores are pointwise"),
        };
        self.known[at as usize] = Some(value);
        value
    }
}

/// What the bounds of a block tell of a step: the least and the greatest value of a number; of a condition, whether
/// any pair may satisfy it and whether all do. `None` stands for unknown.
#[derive(Clone, Copy)]
enum ValueBounds<V> {
    Numbers([V; 2]),
    Truth([Option<V>; 2]),
    Nothing,
}

/// Whether any pair of a block may be visible, and whether all are; `None` where that is unknown.
pub struct BlockVisibility<V> {
    pub any: Option<V>,
    pub all: Option<V>,
}

impl Program {
    /// Visibility of a block, from the bounds of its operands.
    pub fn block_visibility<B: Builder>(&self, b: &B, bounds: &dyn Fn(usize) -> [B::Vector; 2]) -> BlockVisibility<B::Vector> {
        let Some(seen) = self.scoring.seen.filter(|_| self.tells()) else { return BlockVisibility { any: None, all: None } };
        let mut known: Vec<ValueBounds<B::Vector>> = vec![];
        for step in &self.scoring.steps[..=seen as usize] {
            let args: Vec<ValueBounds<B::Vector>> = step.args.iter().map(|a| known[*a as usize]).collect();
            known.push(match step.op {
                Op::Input(n) if n > 0 && self.operands[n as usize - 1].bounded => {
                    let [least, greatest] = bounds(n as usize - 1);
                    match step.dtype {
                        DType::Bool => {
                            let holds = |x| Some(b.compare_int(Compare::Ne, x, b.i32(0)));
                            ValueBounds::Truth([holds(ir::fault!("attention.sight.bools", least, greatest)), holds(least)])
                        }
                        _ => ValueBounds::Numbers([least, greatest]),
                    }
                }
                Op::Const(x) if step.dtype == DType::I32 => ValueBounds::Numbers([b.i32(x.0 as i32); 2]),
                ref op => known_of(b, op, &args),
            });
        }
        match known[seen as usize] {
            ValueBounds::Truth([any, all]) => BlockVisibility { any, all },
            ValueBounds::Numbers(_) | ValueBounds::Nothing => BlockVisibility { any: None, all: None },
        }
    }
}

fn known_of<B: Builder>(b: &B, op: &Op, args: &[ValueBounds<B::Vector>]) -> ValueBounds<B::Vector> {
    let both = |x, y| b.int2(IntBinary::And, x, y);
    let either = |x, y| b.int2(IntBinary::Or, x, y);
    let not = |x| b.int2(IntBinary::Xor, x, b.mask_first(b.lanes()));
    let sub = |x, y| b.int2(IntBinary::Sub, x, y);
    let lesser = |x, y| b.select(b.compare_int(Compare::Lt, x, y), x, y);
    let greater = |x, y| b.select(b.compare_int(Compare::Gt, x, y), x, y);
    // If one side is unknown, `joined` takes the other, which is weaker but valid; `sure` is then unknown.
    let joined = |x: Option<B::Vector>, y: Option<B::Vector>, f: &dyn Fn(B::Vector, B::Vector) -> B::Vector| match (x, y) {
        (Some(x), Some(y)) => Some(f(x, y)),
        (x, y) => x.or(y),
    };
    let sure = |x: Option<B::Vector>, y: Option<B::Vector>, f: &dyn Fn(B::Vector, B::Vector) -> B::Vector| Some(f(x?, y?));
    let truth = |known: &ValueBounds<B::Vector>| match known {
        ValueBounds::Truth(t) => *t,
        ValueBounds::Numbers(_) | ValueBounds::Nothing => [None, None],
    };
    match (op, args) {
        (Op::Unary(Unary::Neg), [ValueBounds::Numbers([low, high])]) => ValueBounds::Numbers([sub(b.i32(0), *high), sub(b.i32(0), *low)]),
        (Op::Add, [ValueBounds::Numbers(x), ValueBounds::Numbers(y)]) => ValueBounds::Numbers([0, 1].map(|k| b.int2(IntBinary::Add, x[k], y[k]))),
        (Op::Binary(Binary::Sub), [ValueBounds::Numbers(x), ValueBounds::Numbers(y)]) => {
            ValueBounds::Numbers([sub(x[0], ir::fault!("attention.sight.difference", y[0], y[1])), sub(x[1], y[0])])
        }
        (Op::Binary(Binary::Max), [ValueBounds::Numbers(x), ValueBounds::Numbers(y)]) => ValueBounds::Numbers([0, 1].map(|k| greater(x[k], y[k]))),
        (Op::Binary(Binary::Min), [ValueBounds::Numbers(x), ValueBounds::Numbers(y)]) => ValueBounds::Numbers([0, 1].map(|k| lesser(x[k], y[k]))),
        (Op::Compare(c), [ValueBounds::Numbers(x), ValueBounds::Numbers(y)]) => {
            let below = |c, [x, y]: [&[B::Vector; 2]; 2]| {
                [
                    Some(b.compare_int(c, x[0], ir::fault!("attention.visible.any", y[0], y[1]))),
                    Some(b.compare_int(c, ir::fault!("attention.visible.all", x[0], x[1]), y[0])),
                ]
            };
            let equal = || {
                let meet = both(b.compare_int(Compare::Le, x[0], y[1]), b.compare_int(Compare::Le, y[0], x[1]));
                let one = both(
                    b.compare_int(Compare::Eq, x[0], y[1]),
                    ir::fault!("attention.sight.equal", b.compare_int(Compare::Eq, x[0], y[1]), b.compare_int(Compare::Eq, y[0], x[1])),
                );
                [meet, one]
            };
            ValueBounds::Truth(match c {
                op::Compare::Le => below(Compare::Le, [x, y]),
                op::Compare::Lt => below(Compare::Lt, [x, y]),
                op::Compare::Ge => below(Compare::Le, [y, x]),
                op::Compare::Gt => below(Compare::Lt, [y, x]),
                op::Compare::Eq => equal().map(Some),
                op::Compare::Ne => {
                    let [meet, one] = equal();
                    [Some(not(one)), Some(not(meet))]
                }
            })
        }
        (Op::Binary(Binary::And), [x, y]) => {
            let ([any, all], [other_any, other_all]) = (truth(x), truth(y));
            ValueBounds::Truth([
                joined(any, other_any, &both),
                sure(all, other_all, ir::fault!("attention.sight.all", &either as &dyn Fn(_, _) -> _, &both)),
            ])
        }
        (Op::Binary(Binary::Or), [x, y]) => {
            let ([any, all], [other_any, other_all]) = (truth(x), truth(y));
            ValueBounds::Truth([sure(any, other_any, &either), joined(all, other_all, &either)])
        }
        (Op::Unary(Unary::Not), [x]) => {
            let [any, all] = truth(x);
            ValueBounds::Truth([all.map(not), any.map(not)])
        }
        _ => ValueBounds::Nothing,
    }
}

impl<P: Copy> Arguments<P> {
    /// Starts of the program's operands.
    pub fn further(&self, plan: &AttentionPlan) -> Vec<P> {
        plan.program.operands.iter().map(|o| self.tensors[o.tensor]).collect()
    }
}
