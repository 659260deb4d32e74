//! What Muon does with hidden matrices, in plain lines: matrices are rows of numbers, products are loops.

use super::optimizer::StepScalars;
use ir::graph::{Body, Graph, Param, Phase, Value};
use ir::model::{Muon, MuonScale, Train};
use ir::op::Op;

/// The meaning of the index along a dim of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Which matrix of several it is.
    Batch,
    Input,
    Output,
}

type Rows = Vec<Vec<f64>>;

/// The sides of a parameter's dims, in its order, if it is a hidden matrix. The first product that it is in decides.
/// A parameter whose rows are looked up is none, nor is one after which no other parameter is multiplied.
pub fn sides(text: &Graph, p: u32) -> Option<Vec<Side>> {
    let (body, info) = (&text.body, &text.params[p as usize]);
    if info.adam || info.frozen || info.state {
        return None;
    }
    let (mut sides, mut holds, mut after) = (None, vec![false; body.nodes.len()], vec![false; body.nodes.len()]);
    // Each product of this parameter, and whether a product with another parameter follows from it.
    let mut products: Vec<(Value, bool)> = vec![];
    for v in body.values().filter(|v| body[*v].origin.phase == Phase::Forward) {
        let node = &body[v];
        let held = |k: usize| node.args.get(k).is_some_and(|a| holds[a.index()]);
        match &node.op {
            Op::Param(q) => holds[v.index()] = *q == p,
            Op::Cast | Op::View { .. } => holds[v.index()] = held(0),
            Op::Gather { .. } if held(0) => return None,
            Op::Dot { over, .. } => {
                if let Some(k) = (0..2).find(|k| weight(body, node.args[*k]) == Some(p)) {
                    let other = &body[node.args[1 - k]].ty;
                    let side = |d| match (over.contains(d), other.has(*d)) {
                        (true, _) => Side::Input,
                        (false, true) => Side::Batch,
                        (false, false) => Side::Output,
                    };
                    sides.get_or_insert_with(|| body.dims_of(node.args[k]).iter().map(side).collect::<Vec<_>>());
                    products.push((v, false));
                }
            }
            _ => {}
        }
    }
    for (from, followed) in &mut products {
        after.fill(false);
        after[from.index()] = true;
        for v in body.values().filter(|v| body[*v].origin.phase == Phase::Forward && v > from) {
            let node = &body[v];
            after[v.index()] = node.args.iter().any(|a| after[a.index()]);
            if let (Op::Dot { .. }, [a, b]) = (&node.op, node.args.as_slice()) {
                *followed |= [(a, b), (b, a)].into_iter().any(|(x, w)| after[x.index()] && weight(body, *w).is_some());
            }
        }
    }
    let sides = sides?;
    let elements = |side: Side| -> u64 {
        let along = info.ty.dims.iter().zip(&sides).filter(|(_, s)| **s == side);
        along.map(|(d, _)| body.dims.size(*d)).product()
    };
    (products.iter().all(|p| p.1) && elements(Side::Input) > 1 && elements(Side::Output) > 1).then_some(sides)
}

/// The parameter that a value is, in whatever precision.
fn weight(body: &Body, v: Value) -> Option<u32> {
    match (&body[v].op, body[v].args.as_slice()) {
        (Op::Param(p), _) => Some(*p),
        (Op::Cast, [a]) => weight(body, *a).filter(|_| matches!(body[*a].op, Op::Param(_))),
        _ => None,
    }
}

/// A tensor's numbers, how many there are of each dim that is looked at, and how many there are in all.
pub struct MuonTensor<'a> {
    pub param: &'a Param,
    pub sides: &'a [Side],
    pub looked_at: &'a [usize],
    pub sizes: &'a [u64],
}

impl MuonTensor<'_> {
    /// For each number, in order: its matrix, its input and its output.
    fn places(&self) -> Vec<[usize; 3]> {
        let mut out = vec![[0; 3]];
        for (side, n) in self.sides.iter().zip(self.looked_at) {
            let next = |at: &[usize; 3], i: usize| {
                let mut at = *at;
                at[*side as usize] = at[*side as usize] * n + i;
                at
            };
            out = out.iter().flat_map(|at| (0..*n).map(move |i| next(at, i)).collect::<Vec<_>>()).collect();
        }
        out
    }

    fn count(&self, side: Side) -> usize {
        self.sides.iter().zip(self.looked_at).filter(|(s, _)| **s == side).map(|(_, n)| n).product()
    }

    fn size(&self, side: Side) -> f64 {
        self.sides.iter().zip(self.sizes).filter(|(s, _)| **s == side).map(|(_, n)| *n as f64).product()
    }

    /// The new values of a parameter and of its momentum.
    pub fn update(&self, train: &Train, muon: &Muon, step: &StepScalars, [p, g, m]: [&[f64]; 3]) -> (Vec<f64>, Vec<f64>) {
        let beta = muon.momentum.0;
        let new: Vec<f64> = m.iter().zip(g).map(|(m, g)| beta * m + g * step.factor).collect();
        let ahead = |(m, g): (&f64, &f64)| if muon.nesterov { g * step.factor + beta * m } else { *m };
        let along: Vec<f64> = new.iter().zip(g).map(ahead).collect();
        let places = self.places();
        let mut matrices: Vec<Rows> = vec![vec![vec![0.0; self.count(Side::Output)]; self.count(Side::Input)]; self.count(Side::Batch)];
        for ([b, i, o], x) in places.iter().zip(along) {
            matrices[*b][*i][*o] = x;
        }
        matrices.iter_mut().for_each(|x| orthogonal(x, muon.iterations));
        let [inputs, outputs] = [self.size(Side::Input), self.size(Side::Output)];
        let scale = match muon.scale {
            MuonScale::Spectral => inputs.max(outputs),
            MuonScale::ShapeScaling => f64::max(1.0, outputs / inputs),
            MuonScale::UnitRmsNorm => outputs / inputs,
        };
        let far = muon.factor.0 * scale.sqrt();
        let rate = step.rate * self.param.lr_scale.0;
        let decay = if self.param.decay { train.weight_decay.0 } else { 0.0 };
        let moved = p.iter().zip(&places).map(|(p, [b, i, o])| p - rate * decay * p - rate * far * matrices[*b][*i][*o]);
        (moved.collect(), new)
    }
}

/// Five times, or as often as asked: `x = 3.4445 x - 4.7750 (x x^T) x + 2.0315 (x x^T)^2 x` (Jordan et al. 2024).
fn orthogonal(x: &mut Rows, iterations: u32) {
    let norm = x.iter().flatten().map(|x| x * x).sum::<f64>().sqrt();
    x.iter_mut().flatten().for_each(|x| *x /= norm + 1e-7);
    for _ in 0..iterations {
        let gram: Rows = x.iter().map(|a| x.iter().map(|b| a.iter().zip(b).map(|(a, b)| a * b).sum()).collect()).collect();
        let once = product(&gram, x);
        let twice = product(&gram, &once);
        for (row, (once, twice)) in x.iter_mut().zip(once.iter().zip(&twice)) {
            for (x, (y, z)) in row.iter_mut().zip(once.iter().zip(twice)) {
                *x = 3.4445 * *x - 4.7750 * y + 2.0315 * z;
            }
        }
    }
}

fn product(a: &Rows, b: &Rows) -> Rows {
    let row = |a: &Vec<f64>| (0..b[0].len()).map(|j| a.iter().zip(b).map(|(a, b)| a * b[j]).sum()).collect();
    a.iter().map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ir::graph::{Init, Type};
    use ir::op::{DType, Real};

    fn numbers(count: usize, first: i64) -> Vec<f64> {
        (0..count as i64).map(|i| ((7 * i * i + 3 * i + first) % 23 - 11) as f64 / 8.0).collect()
    }

    /// The expected numbers come from numpy: `passes/tests/autograd/muon.py` prints them.
    #[test]
    fn a_step_is_that_of_numpy() {
        use Side::{Batch, Input, Output};
        let two = [-1.21707033812611, -0.013260721488077, 0.105707833358108, -0.856259951209239, -0.134709084986439, -0.494835961160396];
        let of_two = [0.870553214303878, 1.11888776795314, 0.229700541745197, 1.10632723981724, 0.857717638106607, -0.493574565874611];
        let four = [-1.21283716745618, -0.0173616541501647, 0.10216268865659, -0.853801628946221];
        let of_four = [-0.136693763623902, -0.495638636616223, 0.850601190517241, 1.12668806846989];
        let cases = [
            (
                [1, 2, 3],
                (true, MuonScale::Spectral, 5),
                vec![-1.2127514587539, -0.00742006066975292, 0.10215387098959, -0.860354817192727, -0.14567505756139, -0.484749590461938],
            ),
            ([2, 3, 2], (false, MuonScale::ShapeScaling, 5), [two, of_two].concat()),
            ([1, 2, 4], (true, MuonScale::UnitRmsNorm, 3), [four, of_four].concat()),
        ];
        let momentum = [-0.6, 1.15, 1.325, -0.075, 0.975, 0.45, -0.2125, -1.3, 1.5, -1.3, -0.2125, 0.45];
        for (shape, (nesterov, scale, iterations), want) in cases {
            let param = Param {
                name: "w".into(),
                ty: Type::new(DType::F32, []),
                init: Init::Const(Real(0.0)),
                decay: true,
                lr_scale: Real(0.5),
                frozen: false,
                adam: false,
                state: false,
                layer: None,
                span: None,
            };
            let muon = Muon { momentum: Real(0.9), nesterov, scale, factor: Real(0.2), iterations };
            let train = Train { weight_decay: Real(0.2), ..Train::default() };
            let sizes = shape.map(|n| n as u64);
            let tensor = MuonTensor { param: &param, sides: &[Batch, Input, Output], looked_at: &shape, sizes: &sizes };
            let [p, g, m] = [1, 5, 9].map(|first| numbers(want.len(), first));
            let (new, m) = tensor.update(&train, &muon, &StepScalars { rate: 0.2, number: 1.0, factor: 0.5 }, [&p, &g, &m]);
            let alike = |a: &f64, b: &f64| (a - b).abs() < 1e-13;
            assert!(new.len() == want.len() && new.iter().zip(&want).all(|(a, b)| alike(a, b)), "{shape:?}: {new:?}");
            assert!(m.iter().zip(&momentum).all(|(a, b)| alike(a, b)), "{shape:?}: {m:?}");
        }
    }
}
