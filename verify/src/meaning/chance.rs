//! How likely a condition on random draws is.

use ir::graph::{Body, Value};
use ir::op::{Binary, Compare, DType, Op, Real, Scoring};
use std::collections::HashSet;

/// The numbers that a draw may be, each as likely as any other: from the first up to, but without, the second.
type Range = [f64; 2];

/// A body in which draws are looked for. `input` says whether an input is a draw, or made of one.
#[derive(Clone, Copy)]
pub struct DrawAnalysis<'a> {
    pub body: &'a Body,
    pub input: &'a dyn Fn(u32) -> bool,
}

impl DrawAnalysis<'_> {
    /// The chance of a condition that compares a draw with a constant.
    pub fn of(self, condition: Value) -> Option<f64> {
        let node = &self.body[condition];
        let (Op::Compare(how), [x, y]) = (&node.op, node.args.as_slice()) else { return None };
        let number = |v: Value| match self.body[v].op {
            Op::Const(Real(c)) => Some(c),
            _ => None,
        };
        let below = match how {
            Compare::Lt | Compare::Le => true,
            Compare::Gt | Compare::Ge => false,
            Compare::Eq | Compare::Ne => return None,
        };
        let (below, [low, high], limit) = match (self.range(*x), self.range(*y)) {
            (Some(range), _) => (below, range, number(*y)?),
            (None, Some(range)) => (!below, range, number(*x)?),
            (None, None) => return None,
        };
        let share = ((limit - low) / (high - low)).clamp(0.0, 1.0);
        Some(if below { share } else { 1.0 - share })
    }

    /// The range of a value that is a draw: a uniform number, or the bits that are mixed for one.
    fn range(self, v: Value) -> Option<Range> {
        match self.body[v].op {
            Op::Uniform { .. } => Some([0.0, 1.0]),
            Op::Binary(Binary::Mix) if self.is_drawn(v) => Some([-(2f64.powi(31)), 2f64.powi(31)]),
            _ => None,
        }
    }

    /// Whether a value is made of a draw.
    pub fn is_drawn(self, v: Value) -> bool {
        let (mut open, mut met) = (vec![v], HashSet::from([v]));
        while let Some(v) = open.pop() {
            match self.body[v].op {
                Op::Uniform { .. } => return true,
                Op::Input(n) if (self.input)(n) => return true,
                _ => open.extend(self.body[v].args.iter().copied().filter(|a| met.insert(*a))),
            }
        }
        false
    }
}

/// A program of scores in which each choice between two numbers by a draw becomes their mean. `input` says which
/// operands are draws, or made of one.
pub fn at_mean(program: &Scoring, input: &dyn Fn(u32) -> bool) -> Scoring {
    let body = program.body();
    let chances = DrawAnalysis { body: &body, input };
    let mut out = Scoring::PLAIN;
    let mut at: Vec<u32> = vec![];
    for (v, step) in body.values().zip(&program.steps) {
        let args: Vec<u32> = step.args.iter().map(|a| at[*a as usize]).collect();
        // Steps whose results are no longer used stay, so that the program keeps its operands.
        let same = out.step(step.op.clone(), step.dtype, &args);
        let chance = (step.op == Op::Select && step.dtype == DType::F32).then(|| chances.of(body[v].args[0])).flatten();
        at.push(match chance {
            None => same,
            Some(p) => {
                let terms = [(p, args[1]), (1.0 - p, args[2])].map(|(p, value)| {
                    let p = out.step(Op::Const(Real(p)), DType::F32, &[]);
                    out.step(Op::Binary(Binary::Mul), DType::F32, &[p, value])
                });
                out.step(Op::Add, DType::F32, &terms)
            }
        });
    }
    let of = |step: Option<u32>| step.map(|s| at[s as usize]);
    (out.score, out.seen, out.weight) = (of(program.score), of(program.seen), of(program.weight));
    out
}
