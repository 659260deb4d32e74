//! Forward-mode differentiation (Griewank & Walther 2008, section 3.1): how values move when parameters move in
//! a direction.
//!
//! Written apart from `differentiate`, which goes backwards through ops: the one is held against the other by
//! `<gradient, direction> = derivative of the loss in the direction`, which holds for every direction if it
//! does for a random one.

use super::small::SmallGraph;
use ir::dim::Dim;
use ir::graph::{Node, Value};
use ir::op::{Attention, Binary, Op, Reduce, Scoring, Unary};

/// The tangent of each value. `None` is zero.
pub type Tangents = Vec<Option<Vec<f64>>>;

/// Computes the tangents of all values of a graph, if parameters move as `direction` says.
///
/// # Errors
/// The name of an op without a rule.
pub fn run(small: &SmallGraph<'_>, values: &[Vec<f64>], direction: impl Fn(u32, &Node) -> Option<Vec<f64>>) -> Result<Tangents, &'static str> {
    let body = &small.body;
    let mut out: Tangents = Vec::with_capacity(body.nodes.len());
    for v in body.values() {
        let node = &body[v];
        let tangent = match node.op {
            Op::Param(p) => direction(p, node),
            _ if !node.ty.dtype.is_float() || node.args.iter().all(|a| out[a.index()].is_none()) => None,
            _ => {
                let moves: Vec<Option<&[f64]>> = node.args.iter().map(|a| out[a.index()].as_deref()).collect();
                let args: Vec<&[f64]> = node.args.iter().map(|a| values[a.index()].as_slice()).collect();
                Rule { small, v, node, args, moves, value: &values[v.index()] }.tangent()?
            }
        };
        out.push(tangent);
    }
    Ok(out)
}

/// An op with its operands, their tangents and its value.
struct Rule<'s> {
    small: &'s SmallGraph<'s>,
    v: Value,
    node: &'s Node,
    args: Vec<&'s [f64]>,
    moves: Vec<Option<&'s [f64]>>,
    value: &'s [f64],
}

impl Rule<'_> {
    fn tangent(&self) -> Result<Option<Vec<f64>>, &'static str> {
        Ok(Some(match &self.node.op {
            Op::StopGradient | Op::Reduce { kind: Reduce::Any, .. } => return Ok(None),
            Op::Unary(u) => {
                let Some(dx) = self.moves[0] else { return Ok(None) };
                self.args[0].iter().zip(dx).map(|(x, dx)| slope(*u, *x) * dx).collect()
            }
            Op::Binary(b) => self.binary(*b),
            Op::Select => {
                let along = |x: &[f64], k: usize| self.along(x, k);
                let chosen = along(self.args[0], 0);
                let [yes, no] = [1, 2].map(|k| along(&self.movement(k), k));
                chosen.iter().zip(yes.iter().zip(no)).map(|(c, (a, b))| if *c != 0.0 { *a } else { b }).collect()
            }
            // These ops are linear in all operands.
            Op::Add | Op::Concat { .. } => {
                let moves: Vec<Vec<f64>> = (0..self.args.len()).map(|k| self.movement(k)).collect();
                self.small.node(self.v, &moves.iter().map(Vec::as_slice).collect::<Vec<_>>())
            }
            // These ops are linear in the first operand, and an index beside it does not move.
            Op::Cast
            | Op::Cut
            | Op::Expand
            | Op::View { .. }
            | Op::Slice { .. }
            | Op::Pad { .. }
            | Op::Cumsum { .. }
            | Op::Reduce { kind: Reduce::Sum, .. }
            | Op::Gather { .. }
            | Op::Scatter { .. }
            | Op::Dispatch(_)
            | Op::Combine(_)
            | Op::Reshard { .. } => {
                let moved = self.movement(0);
                let mut args = self.args.clone();
                args[0] = &moved;
                self.small.node(self.v, &args)
            }
            Op::Dot { .. } => {
                let [first, second] = [0, 1].map(|k| {
                    let moved = self.movement(k);
                    let mut args = self.args.clone();
                    args[k] = &moved;
                    self.small.node(self.v, &args)
                });
                first.iter().zip(second).map(|(a, b)| a + b).collect()
            }
            Op::Reduce { kind: Reduce::Max, .. } => {
                let source = &self.small.body[self.node.args[0]].ty.dims;
                let (moved, mut out) = (self.movement(0), vec![0.0; self.value.len()]);
                let places: Vec<f64> = (0..out.len()).map(|k| k as f64).collect();
                let place = self.small.spread(self.v, &places, source);
                for ((x, dx), place) in self.args[0].iter().zip(moved).zip(place) {
                    if *x == self.value[place as usize] {
                        out[place as usize] += dx;
                    }
                }
                out
            }
            Op::Attention(a) => self.attention(a, false),
            Op::AttentionLse(a) => self.attention(a, true),
            op => return Err(op.name()),
        }))
    }

    /// The tangent of an operand.
    fn movement(&self, k: usize) -> Vec<f64> {
        self.moves[k].map_or_else(|| vec![0.0; self.args[k].len()], <[f64]>::to_vec)
    }

    /// Numbers of an operand's shape, repeated along the result's dims.
    fn along(&self, x: &[f64], k: usize) -> Vec<f64> {
        self.small.spread(self.node.args[k], x, &self.node.ty.dims)
    }

    fn binary(&self, op: Binary) -> Vec<f64> {
        let [x, y] = [0, 1].map(|k| self.along(self.args[k], k));
        let [dx, dy] = [0, 1].map(|k| self.along(&self.movement(k), k));
        let of = |i: usize| slope_of_two(op, [x[i], y[i]], [dx[i], dy[i]]);
        (0..x.len()).map(of).collect()
    }

    /// `d w softmax(s) v = w p (ds - sum(p ds)) v + w p dv`, a row of scores at a time; of the logarithm of its sums
    /// `sum(p ds)`. What probabilities count, `w`, does not move.
    fn attention(&self, a: &Attention, logarithm: bool) -> Vec<f64> {
        let body = &self.small.body;
        let rows: Vec<Dim> = body.dims_of(self.node.args[0]).iter().copied().filter(|d| *d != a.d).collect();
        let of = |k: usize, last: &[Dim]| {
            let dims = [&rows[..], last].concat();
            [self.args[k].to_vec(), self.movement(k)].map(|x| self.small.spread(self.node.args[k], &x, &dims))
        };
        let [q, dq] = of(0, &[a.d]);
        let [k, dk] = of(1, &[a.keys, a.d]);
        let [v, dv] = if logarithm { [vec![], vec![]] } else { of(2, &[a.keys, a.values]) };
        let further: Vec<[Vec<f64>; 2]> = (self.args.len() - a.scoring.operands()..self.args.len()).map(|k| of(k, &[a.keys])).collect();
        let [n, d, width] = [a.keys, a.d, a.values].map(|d| body.dims.size(d) as usize);
        let count = rows.iter().map(|d| body.dims.size(*d) as usize).product::<usize>();
        let mut out = Vec::with_capacity(count * width);
        let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(a, b)| a * b).sum::<f64>();
        for r in 0..count {
            let (q, dq) = (&q[r * d..][..d], &dq[r * d..][..d]);
            let mut p = vec![f64::NEG_INFINITY; n];
            let (mut ds, mut weights) = (vec![0.0; n], vec![1.0; n]);
            for j in 0..n {
                let (k, dk) = (&k[(r * n + j) * d..][..d], &dk[(r * n + j) * d..][..d]);
                let score = [a.scale.0 * dot(q, k), a.scale.0 * (dot(dq, k) + dot(q, dk))];
                let numbers: Vec<[f64; 2]> = further.iter().map(|x| [0, 1].map(|m: usize| x[m][r * n + j])).collect();
                weights[j] = a.scoring.weight(&numbers.iter().map(|x| x[0]).collect::<Vec<f64>>());
                if let Some([s, moved]) = scored(&a.scoring, score, &numbers) {
                    (p[j], ds[j]) = (s, moved);
                }
            }
            let top = p.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            p.iter_mut().for_each(|s| *s = if top.is_finite() { (*s - top).exp() } else { 0.0 });
            let sum: f64 = p.iter().sum();
            p.iter_mut().for_each(|x| *x = if sum > 0.0 { *x / sum } else { 0.0 });
            let mean = dot(&p, &ds);
            if logarithm {
                out.push(mean);
                continue;
            }
            p.iter_mut().zip(&weights).for_each(|(p, w)| *p *= w);
            for e in 0..width {
                out.push((0..n).map(|j| p[j] * (ds[j] - mean) * v[(r * n + j) * width + e] + p[j] * dv[(r * n + j) * width + e]).sum());
            }
        }
        let dims = if logarithm { rows } else { [&rows[..], &[a.values]].concat() };
        super::small::spread(body, &dims, &out, &self.node.ty.dims)
    }
}

/// The score that a program computes from one and its tangent, given those of the score and of the operands' numbers.
/// `None` where the key is not seen.
fn scored(program: &Scoring, score: [f64; 2], numbers: &[[f64; 2]]) -> Option<[f64; 2]> {
    let mut values: Vec<[f64; 2]> = vec![];
    for step in &program.steps {
        let args: Vec<[f64; 2]> = step.args.iter().map(|a| values[*a as usize]).collect();
        let from = step.args.first().map_or(step.dtype, |a| program.steps[*a as usize].dtype);
        let x = || ir::eval::number(&step.op, step.dtype, from, &args.iter().map(|a| a[0]).collect::<Vec<_>>());
        values.push(match &step.op {
            Op::Input(0) => score,
            Op::Input(n) => numbers[*n as usize - 1],
            Op::Unary(u) if step.dtype.is_float() => [x(), if args[0][1] == 0.0 { 0.0 } else { slope(*u, args[0][0]) * args[0][1] }],
            Op::Binary(b) if step.dtype.is_float() => [x(), slope_of_two(*b, [args[0][0], args[1][0]], [args[0][1], args[1][1]])],
            Op::Add => [x(), args.iter().map(|a| a[1]).sum()],
            Op::Select => args[if args[0][0] == 0.0 { 2 } else { 1 }],
            Op::Cast if step.dtype.is_float() => [x(), args[0][1]],
            _ => [x(), 0.0],
        });
    }
    let at = |k: u32| values[k as usize];
    program.seen.is_none_or(|s| at(s)[0] != 0.0).then(|| program.score.map_or(score, at))
}

/// The tangent of a function of two numbers.
fn slope_of_two(op: Binary, [x, y]: [f64; 2], [dx, dy]: [f64; 2]) -> f64 {
    match op {
        Binary::Sub => dx - dy,
        Binary::Mul => dx * y + x * dy,
        Binary::Div => dx / y - if dy == 0.0 { 0.0 } else { x / y * (dy / y) },
        Binary::Rem => dx - if dy == 0.0 { 0.0 } else { (x / y).floor() * dy },
        Binary::Pow => {
            let base = if dx == 0.0 { 0.0 } else { y * x.powf(y - 1.0) * dx };
            base + if dy == 0.0 { 0.0 } else { x.powf(y) * x.ln() * dy }
        }
        // On a tie the result is the second operand.
        Binary::Max => {
            if x > y {
                dx
            } else {
                dy
            }
        }
        Binary::Min => {
            if x < y {
                dx
            } else {
                dy
            }
        }
        Binary::And | Binary::Or | Binary::Mix => 0.0,
    }
}

/// The slope of a function of one number.
fn slope(u: Unary, x: f64) -> f64 {
    match u {
        Unary::Neg => -1.0,
        Unary::Exp => x.exp(),
        Unary::Log => 1.0 / x,
        Unary::Sqrt => 0.5 / x.sqrt(),
        Unary::Rsqrt => -0.5 / (x * x.sqrt()),
        Unary::Recip => -1.0 / (x * x),
        Unary::Tanh => x.cosh().powi(-2),
        Unary::Sin => x.cos(),
        Unary::Cos => -x.sin(),
        Unary::Erf => std::f64::consts::FRAC_2_SQRT_PI * (-x * x).exp(),
        Unary::Abs => {
            if x > 0.0 {
                1.0
            } else if x < 0.0 {
                -1.0
            } else {
                0.0
            }
        }
        Unary::Floor | Unary::Sign | Unary::Not => 0.0,
    }
}
