//! What attention makes of a score: a small program of pointwise ops on single numbers.
//!
//! It says what a score is changed to, which keys a query sees, and what a probability counts. So masks that are
//! causal, windows, documents, padding, biases, soft caps and dropout are one path, as in FlexAttention (Dong et al.
//! 2024), whose `score_mod` and `mask_mod` are the first two.

use super::{Attention, Binary, Compare, DType, Op, Real, Unary};
use crate::dim::{Dim, Dims};
use crate::eval::number;
use crate::graph::{Body, Origin, Phase, Type, Value};
use serde::{Deserialize, Serialize};

/// A program over the score of a query and a key (`scale * q . k`, f32) and the numbers that the further operands
/// of attention hold for the two.
///
/// Steps are in the order in which results first need them, and none stands twice, so that programs which are
/// written alike are equal. [`Op::Input`] 0 is the score, `Op::Input(n)` the n-th further operand, from 1.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Scoring {
    /// Operands before their users; a step's number is its index.
    pub steps: Vec<Step>,
    /// The changed score, f32; without, the score itself.
    pub score: Option<u32>,
    /// Whether the query sees the key, bool; without, it does.
    pub seen: Option<u32>,
    /// What the key's probability counts, f32, whatever the score: 0 for one that is dropped. Without, 1. It is in
    /// no sum of exponentials.
    pub weight: Option<u32>,
}

/// A step of a program: an op, the type of its result, the steps that its operands are.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Step {
    /// A pointwise op, a constant, or an [`Op::Input`] of the program.
    pub op: Op,
    /// The type of its result.
    pub dtype: DType,
    /// The numbers of earlier steps.
    pub args: Vec<u32>,
}

impl Scoring {
    /// The score as it is, every key seen.
    pub const PLAIN: Scoring = Scoring { steps: vec![], score: None, seen: None, weight: None };

    /// Whether it leaves scores as they are, lets every key be seen, and drops none.
    pub fn is_plain(&self) -> bool {
        self.score.is_none() && self.seen.is_none() && self.weight.is_none()
    }

    /// A mask by positions, operand 1 of queries and 2 of keys: a query sees a key iff the key's is not after its
    /// own, and with a window less than that many before.
    pub fn causal(window: Option<u32>) -> Scoring {
        let mut s = Scoring::PLAIN;
        let [query, key] = [1, 2].map(|n| s.step(Op::Input(n), DType::I32, &[]));
        let mut seen = s.step(Op::Compare(Compare::Ge), DType::Bool, &[query, key]);
        if let Some(window) = window {
            let back = s.step(Op::Binary(Binary::Sub), DType::I32, &[query, key]);
            let window = s.step(Op::Const(Real(window.into())), DType::I32, &[]);
            let near = s.step(Op::Compare(Compare::Lt), DType::Bool, &[back, window]);
            seen = s.step(Op::Binary(Binary::And), DType::Bool, &[seen, near]);
        }
        s.seen = Some(seen);
        s
    }

    /// The step that does this: one that is there, or a new one.
    pub fn step(&mut self, op: Op, dtype: DType, args: &[u32]) -> u32 {
        let alike = |s: &Step| s.op == op && s.dtype == dtype && s.args == args;
        let at = self.steps.iter().position(alike).unwrap_or_else(|| {
            self.steps.push(Step { op, dtype, args: args.to_vec() });
            self.steps.len() - 1
        });
        at as u32
    }

    /// Further operands of attention: those that steps read.
    pub fn operands(&self) -> usize {
        let named = self.steps.iter().filter_map(|s| match s.op {
            Op::Input(n) => Some(n as usize),
            _ => None,
        });
        named.max().unwrap_or(0)
    }

    /// The type of each further operand.
    pub fn operand_types(&self) -> Vec<Option<DType>> {
        let of = |n: usize| self.steps.iter().find(|s| s.op == Op::Input(n as u32)).map(|s| s.dtype);
        (1..=self.operands()).map(of).collect()
    }

    /// The program as a body of scalars, whose values are numbered as the steps.
    pub fn body(&self) -> Body {
        let mut body = Body { dims: Dims::default(), nodes: vec![] };
        for s in &self.steps {
            body.push(s.op.clone(), s.args.iter().map(|a| Value(*a)).collect::<Vec<_>>(), Type::scalar(s.dtype), Origin::new(Phase::Forward));
        }
        body
    }

    /// What each step makes of a score and the operands' numbers.
    pub fn run(&self, score: f64, operands: &[f64]) -> Vec<f64> {
        let mut out: Vec<f64> = Vec::with_capacity(self.steps.len());
        for s in &self.steps {
            let args: Vec<f64> = s.args.iter().map(|a| out[*a as usize]).collect();
            out.push(match s.op {
                Op::Input(0) => score,
                Op::Input(n) => operands[n as usize - 1],
                _ => number(&s.op, s.dtype, s.args.first().map_or(s.dtype, |a| self.steps[*a as usize].dtype), &args),
            });
        }
        out
    }

    /// The score that the softmax takes; minus infinity where the key is not seen.
    pub fn apply(&self, score: f64, operands: &[f64]) -> f64 {
        if self.is_plain() {
            return score;
        }
        let values = self.run(score, operands);
        match self.seen {
            Some(seen) if values[seen as usize] == 0.0 => f64::NEG_INFINITY,
            _ => self.score.map_or(score, |s| values[s as usize]),
        }
    }

    /// What the probability of a key counts.
    pub fn weight(&self, operands: &[f64]) -> f64 {
        self.weight.map_or(1.0, |w| self.run(0.0, operands)[w as usize])
    }

    /// Whether a step depends on the score.
    pub fn reads_score(&self, step: u32) -> bool {
        self.needs(step).iter().any(|at| self.steps[*at as usize].op == Op::Input(0))
    }

    /// A step and all that it is computed from, each once.
    pub fn needs(&self, step: u32) -> Vec<u32> {
        let mut out = vec![step];
        let mut next = 0;
        while let Some(at) = out.get(next) {
            let new: Vec<u32> = self.steps[*at as usize].args.iter().copied().filter(|a| !out.contains(a)).collect();
            out.extend(new);
            next += 1;
        }
        out
    }

    /// The same program with the slope of the changed score by the score as one more result: a step, or nothing
    /// where it is 1 whatever the score.
    pub fn with_slope(&self) -> (Scoring, Option<u32>) {
        let mut out = self.clone();
        let Some(score) = self.score else { return (out, None) };
        // `slopes` holds each step's derivative by the score; `None` stands for zero.
        let mut slopes: Vec<Option<u32>> = vec![];
        for (at, step) in self.steps.iter().enumerate() {
            let slope = out.slope(at as u32, step, &slopes);
            slopes.push(slope);
        }
        let slope = slopes[score as usize].unwrap_or_else(|| out.number(0.0));
        let is_one = out.steps[slope as usize].op == Op::Const(Real(1.0));
        (out, (!is_one).then_some(slope))
    }

    fn number(&mut self, x: f64) -> u32 {
        self.step(Op::Const(Real(x)), DType::F32, &[])
    }

    fn f32(&mut self, op: Op, args: &[u32]) -> u32 {
        self.step(op, DType::F32, args)
    }

    /// A product, of which one is left out.
    fn times(&mut self, x: u32, y: u32) -> u32 {
        let one = Op::Const(Real(1.0));
        if self.steps[x as usize].op == one {
            return y;
        }
        if self.steps[y as usize].op == one { x } else { self.f32(Op::Binary(Binary::Mul), &[x, y]) }
    }

    /// The slope of a step by the score, from those of its operands. Slopes are f32.
    fn slope(&mut self, at: u32, step: &Step, slopes: &[Option<u32>]) -> Option<u32> {
        let of = |k: usize| slopes[step.args[k] as usize];
        let arg = |k: usize| step.args[k];
        match &step.op {
            Op::Input(0) => Some(self.number(1.0)),
            Op::Cast if step.dtype.is_float() && self.steps[arg(0) as usize].dtype.is_float() => of(0),
            Op::Add => {
                let terms: Vec<u32> = (0..step.args.len()).filter_map(of).collect();
                match terms.as_slice() {
                    [] => None,
                    [one] => Some(*one),
                    all => Some(self.f32(Op::Add, all)),
                }
            }
            Op::Select => {
                if of(1).is_none() && of(2).is_none() {
                    return None;
                }
                let [a, b] = [1, 2].map(|k| of(k).unwrap_or_else(|| self.number(0.0)));
                Some(self.f32(Op::Select, &[arg(0), a, b]))
            }
            Op::Unary(u) => {
                let d = of(0)?;
                let (x, y) = (arg(0), at);
                let factor = match u {
                    Unary::Neg => return Some(self.f32(Op::Unary(Unary::Neg), &[d])),
                    Unary::Exp => y,
                    Unary::Log => self.f32(Op::Unary(Unary::Recip), &[x]),
                    Unary::Sqrt => {
                        let half = self.number(0.5);
                        self.f32(Op::Binary(Binary::Div), &[half, y])
                    }
                    Unary::Rsqrt => {
                        let (cube, half) = (self.power(y, 3), self.number(-0.5));
                        self.times(half, cube)
                    }
                    Unary::Recip => {
                        let square = self.power(y, 2);
                        self.f32(Op::Unary(Unary::Neg), &[square])
                    }
                    Unary::Tanh => {
                        let (one, square) = (self.number(1.0), self.power(y, crate::fault!("scoring.slope.tanh", 1, 2)));
                        self.f32(Op::Binary(Binary::Sub), &[one, square])
                    }
                    Unary::Sin => self.f32(Op::Unary(Unary::Cos), &[x]),
                    Unary::Cos => {
                        let sin = self.f32(Op::Unary(Unary::Sin), &[x]);
                        self.f32(Op::Unary(Unary::Neg), &[sin])
                    }
                    Unary::Erf => {
                        let square = self.power(x, 2);
                        let minus = self.f32(Op::Unary(Unary::Neg), &[square]);
                        let (bell, most) = (self.f32(Op::Unary(Unary::Exp), &[minus]), self.number(std::f64::consts::FRAC_2_SQRT_PI));
                        self.times(most, bell)
                    }
                    Unary::Abs => self.f32(Op::Unary(Unary::Sign), &[x]),
                    Unary::Floor | Unary::Sign | Unary::Not => return None,
                };
                Some(self.times(d, factor))
            }
            Op::Binary(b) => self.slope_of_two(*b, [arg(0), arg(1)], [of(0), of(1)]),
            _ => None,
        }
    }

    fn power(&mut self, x: u32, n: u32) -> u32 {
        (1..n).fold(x, |y, _| self.f32(Op::Binary(Binary::Mul), &[y, x]))
    }

    /// The same of a function of two.
    fn slope_of_two(&mut self, op: Binary, [x, y]: [u32; 2], slopes: [Option<u32>; 2]) -> Option<u32> {
        let sum = |s: &mut Scoring, parts: [Option<u32>; 2]| match parts {
            [Some(a), Some(b)] => Some(s.f32(Op::Add, &[a, b])),
            [a, b] => a.or(b),
        };
        if slopes == [None, None] {
            return None;
        }
        let [dx, dy] = slopes;
        match op {
            Binary::Sub => {
                let minus = dy.map(|d| self.f32(Op::Unary(Unary::Neg), &[d]));
                sum(self, [dx, minus])
            }
            Binary::Mul => {
                let parts = [dx.map(|d| self.times(d, crate::fault!("scoring.slope.product", x, y))), dy.map(|d| self.times(d, x))];
                sum(self, parts)
            }
            Binary::Div => {
                let first = dx.map(|d| self.f32(Op::Binary(Binary::Div), &[d, y]));
                let second = dy.map(|d| {
                    let quotient = self.f32(Op::Binary(Binary::Div), &[x, y]);
                    let each = self.f32(Op::Binary(Binary::Div), &[d, y]);
                    let product = self.times(quotient, each);
                    self.f32(Op::Unary(Unary::Neg), &[product])
                });
                sum(self, [first, second])
            }
            Binary::Rem => {
                let second = dy.map(|d| {
                    let quotient = self.f32(Op::Binary(Binary::Div), &[x, y]);
                    let whole = self.f32(Op::Unary(Unary::Floor), &[quotient]);
                    let product = self.times(whole, d);
                    self.f32(Op::Unary(Unary::Neg), &[product])
                });
                sum(self, [dx, second])
            }
            Binary::Pow => {
                let first = dx.map(|d| {
                    let one = self.number(1.0);
                    let less = self.f32(Op::Binary(Binary::Sub), &[y, one]);
                    let power = self.f32(Op::Binary(Binary::Pow), &[x, less]);
                    let factor = self.times(y, power);
                    self.times(d, factor)
                });
                let second = dy.map(|d| {
                    let power = self.f32(Op::Binary(Binary::Pow), &[x, y]);
                    let log = self.f32(Op::Unary(Unary::Log), &[x]);
                    let factor = self.times(power, log);
                    self.times(d, factor)
                });
                sum(self, [first, second])
            }
            // On a tie the result is the second operand.
            Binary::Max | Binary::Min => {
                let which = if op == Binary::Max { Compare::Gt } else { Compare::Lt };
                let first = self.step(Op::Compare(which), DType::Bool, &[x, y]);
                let [a, b] = [dx, dy].map(|d| d.unwrap_or_else(|| self.number(0.0)));
                Some(self.f32(Op::Select, &[first, a, b]))
            }
            Binary::And | Binary::Or | Binary::Mix => None,
        }
    }

    /// What must hold, all together, for a key to be seen: steps.
    pub fn conditions(&self) -> Vec<u32> {
        let mut out = vec![];
        let mut stack: Vec<u32> = self.seen.into_iter().collect();
        while let Some(at) = stack.pop() {
            match self.steps[at as usize].op {
                Op::Binary(Binary::And) => stack.extend(self.steps[at as usize].args.iter().rev()),
                _ => out.push(at),
            }
        }
        out
    }

    fn operand(&self, at: u32) -> Option<usize> {
        match self.steps[at as usize].op {
            Op::Input(n) if n > 0 => Some(n as usize - 1),
            _ => None,
        }
    }

    /// The operands, by their numbers from 0, of which a condition says that the first is not less than the second.
    pub fn ordered(&self) -> Option<[usize; 2]> {
        self.conditions().into_iter().find_map(|at| {
            let step = &self.steps[at as usize];
            let [x, y] = [0, 1].map(|k| step.args.get(k).and_then(|a| self.operand(*a)));
            match step.op {
                Op::Compare(Compare::Ge) => Some([x?, y?]),
                Op::Compare(Compare::Le) => Some([y?, x?]),
                _ => None,
            }
        })
    }

    /// The operand, by its number from 0, that is added to the score last and read for nothing else: its gradient
    /// is that of the changed score, [`super::AttentionGrad::Bias`].
    pub fn bias(&self) -> Option<usize> {
        let score = &self.steps[self.score? as usize];
        let added = *score.args.last().filter(|_| score.op == Op::Add)?;
        let reads = self.steps.iter().flat_map(|s| &s.args).filter(|a| **a == added).count();
        self.operand(added).filter(|_| reads == 1 && ![self.seen, self.weight].contains(&Some(added)))
    }

    /// Pairs of operands, by their numbers from 0, of integers of which a condition says that they are equal.
    pub fn compared(&self) -> Vec<[usize; 2]> {
        let equal = |at: u32| {
            let step = &self.steps[at as usize];
            let (Op::Compare(Compare::Eq), [x, y]) = (&step.op, step.args.as_slice()) else { return None };
            let ints = step.args.iter().all(|a| self.steps[*a as usize].dtype == DType::I32);
            Some([self.operand(*x)?, self.operand(*y)?]).filter(|_| ints)
        };
        self.conditions().into_iter().filter_map(equal).collect()
    }

    /// The number that the difference of these two operands has to stay below, by a condition.
    pub fn window(&self, [first, second]: [usize; 2]) -> Option<u64> {
        self.conditions().into_iter().find_map(|at| {
            let step = &self.steps[at as usize];
            let (Op::Compare(Compare::Lt), [back, limit]) = (&step.op, step.args.as_slice()) else { return None };
            let (back, Op::Const(Real(limit))) = (&self.steps[*back as usize], &self.steps[*limit as usize].op) else { return None };
            let of_both = back.op == Op::Binary(Binary::Sub) && back.args.iter().map(|a| self.operand(*a)).eq([Some(first), Some(second)]);
            (of_both && *limit >= 1.0).then_some(*limit as u64)
        })
    }
}

impl Attention {
    /// The operands that its program reads: the last ones.
    pub fn further<'x, T>(&self, args: &'x [T]) -> &'x [T] {
        &args[args.len() - self.scoring.operands().min(args.len())..]
    }

    /// The attention whose logarithm of sums is this one's: it has no values.
    pub fn without_values(&self) -> Attention {
        Attention { values: self.d, ..self.clone() }
    }

    /// The dims of the result of queries with these: `values` in place of `d`.
    pub fn result_dims(&self, queries: &[Dim]) -> Vec<Dim> {
        queries.iter().map(|d| if *d == self.d { self.values } else { *d }).collect()
    }

    /// Keys that as many queries see together, as far as its program says: of a causal mask as if queries were
    /// evenly spread over the positions of their keys; what depends on data, such as documents, is not known.
    pub fn pairs(&self, keys: u64) -> u64 {
        let Some(ordered) = self.scoring.ordered() else { return keys.saturating_mul(keys) };
        let most = self.scoring.window(ordered).map_or(keys, |w| keys.min(w));
        // Query i sees i + 1 keys, at most as many as the window has.
        most * (most + 1) / 2 + (keys - most) * most
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `cap * tanh(score / cap) + operand 1`, of keys that operand 2 names.
    fn capped() -> Scoring {
        let mut s = Scoring::PLAIN;
        let score = s.step(Op::Input(0), DType::F32, &[]);
        let cap = s.step(Op::Const(Real(2.0)), DType::F32, &[]);
        let part = s.step(Op::Binary(Binary::Div), DType::F32, &[score, cap]);
        let bent = s.step(Op::Unary(Unary::Tanh), DType::F32, &[part]);
        let whole = s.step(Op::Binary(Binary::Mul), DType::F32, &[bent, cap]);
        let bias = s.step(Op::Input(1), DType::F32, &[]);
        s.score = Some(s.step(Op::Add, DType::F32, &[whole, bias]));
        s.seen = Some(s.step(Op::Input(2), DType::Bool, &[]));
        s
    }

    #[test]
    fn a_step_stands_once() {
        let mut s = capped();
        let steps = s.steps.len();
        s.step(Op::Const(Real(2.0)), DType::F32, &[]);
        assert_eq!((s.steps.len(), s.operands()), (steps, 2));
    }

    #[test]
    fn a_condition_that_is_an_operand_compares_nothing() {
        let mut s = Scoring::PLAIN;
        s.seen = Some(s.step(Op::Input(1), DType::Bool, &[]));
        assert_eq!((s.compared(), s.ordered(), s.conditions()), (vec![], None, vec![0]));
    }

    #[test]
    fn slopes_are_differences() {
        let unary = [
            Unary::Neg,
            Unary::Exp,
            Unary::Log,
            Unary::Sqrt,
            Unary::Rsqrt,
            Unary::Recip,
            Unary::Tanh,
            Unary::Sin,
            Unary::Cos,
            Unary::Erf,
            Unary::Abs,
        ];
        let mut programs = vec![capped()];
        for u in unary {
            let mut s = Scoring::PLAIN;
            let score = s.step(Op::Input(0), DType::F32, &[]);
            s.score = Some(s.step(Op::Unary(u), DType::F32, &[score]));
            programs.push(s);
        }
        for b in [Binary::Sub, Binary::Mul, Binary::Div, Binary::Pow, Binary::Max, Binary::Min, Binary::Rem] {
            for swapped in [false, true] {
                let mut s = Scoring::PLAIN;
                let score = s.step(Op::Input(0), DType::F32, &[]);
                let other = s.step(Op::Input(1), DType::F32, &[]);
                let square = s.step(Op::Binary(Binary::Mul), DType::F32, &[score, score]);
                s.score = Some(s.step(Op::Binary(b), DType::F32, &if swapped { [other, square] } else { [square, other] }));
                programs.push(s);
            }
        }
        for program in programs {
            let (all, slope) = program.with_slope();
            for score in [0.3, 0.7, 1.9] {
                let at = |x: f64| program.apply(x, &[0.8, 1.0]);
                let wanted = (at(score + 1e-6) - at(score - 1e-6)) / 2e-6;
                let found = slope.map_or(1.0, |s| all.run(score, &[0.8, 1.0])[s as usize]);
                assert!((found - wanted).abs() < 1e-5 * wanted.abs().max(1.0), "{program:?} at {score}: {found}, by differences {wanted}");
            }
        }
    }

    #[test]
    fn a_causal_mask_with_a_window_is_known_by_its_conditions() {
        let s = Scoring::causal(Some(3));
        assert_eq!((s.ordered(), s.window([0, 1])), (Some([0, 1]), Some(3)));
        let seen: Vec<bool> = (0..6).map(|key| s.apply(0.0, &[4.0, f64::from(key)]) == 0.0).collect();
        assert_eq!(seen, [false, false, true, true, true, false]);
    }
}
