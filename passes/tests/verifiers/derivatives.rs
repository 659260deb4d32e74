//! The two derivatives of each op, over dims of random sizes: what `differentiate` makes going backwards, and what the verifier makes
//! going forwards, know nothing of each other and have to agree. And where the one is spoilt, the other says so.

use ir::build::Builder;
use ir::dim::{Dim, DimInfo};
use ir::graph::{Graph, Init, Origin, Param, Phase, Report, Type, Value};
use ir::model::{Model, Plan, Train};
use ir::module::{GlobalGraph, Module};
use ir::op::{Attention, Binary, DType, Op, Real, Reduce, Routing, Scoring, Unary};
use ir::options::Options;
use ir::progress::Progress;
use ir::random::mix;
use passes::compile::{BugEvidence, Compile, holds};
use passes::table::{MEANING, PASSES};
use verify::Invariant;

/// Dims of a case: `I` is at least as large as `J`, and `K` as large as `I`.
const I: Dim = Dim(0);
const J: Dim = Dim(1);
const K: Dim = Dim(2);

/// An op, the dims of its operands that are parameters, and which of those have to be positive.
struct Case {
    op: Op,
    operands: Vec<Vec<Dim>>,
    positive: bool,
    /// Numbers along these dims follow as further operands.
    indices: Vec<Dim>,
}

fn cases() -> Vec<Case> {
    let case = |op: Op, operands: &[&[Dim]]| Case { op, operands: operands.iter().map(|d| d.to_vec()).collect(), positive: false, indices: vec![] };
    let mut out = vec![
        case(Op::Add, &[&[I, J], &[J], &[I, J]]),
        case(Op::dot(vec![J]), &[&[I, J], &[J, K]]),
        case(Op::dot(vec![J]), &[&[I, J], &[I, J]]),
        case(Op::dot(vec![]), &[&[I], &[I, J]]),
        case(Op::Reduce { kind: Reduce::Sum, over: vec![I] }, &[&[I, J]]),
        case(Op::Reduce { kind: Reduce::Max, over: vec![J] }, &[&[I, J]]),
        case(Op::Cumsum { over: I, reverse: false }, &[&[I, J]]),
        case(Op::Cumsum { over: J, reverse: true }, &[&[I, J]]),
        case(Op::View { from: vec![I], to: vec![K] }, &[&[J, I]]),
        case(Op::Slice { from: I, to: Some(J), at: 0 }, &[&[I]]),
        case(Op::Slice { from: I, to: None, at: 1 }, &[&[I, J]]),
        case(Op::Pad { from: Some(J), to: I, at: 0 }, &[&[J]]),
        case(Op::Cut, &[&[I, J]]),
        case(Op::Select, &[&[I, J], &[I, J], &[J]]),
    ];
    out.extend(Unary::ALL.iter().filter(|u| **u != Unary::Not).map(|u| Case { positive: true, ..case(Op::Unary(*u), &[&[I, J]]) }));
    let binary = Binary::ALL.iter().filter(|b| b.takes(DType::F32) && **b != Binary::Rem);
    out.extend(binary.map(|b| Case { positive: true, ..case(Op::Binary(*b), &[&[I, J], &[J, K]]) }));
    let routing = Routing { experts: I, choice: J };
    for (op, shape) in [
        (Op::Gather { dim: I }, &[I, K] as &[Dim]),
        (Op::Gather { dim: I }, &[I, J]),
        (Op::Scatter { dim: I }, &[J, K]),
        (Op::Combine(routing), &[I, K]),
        (Op::Dispatch(routing), &[J, K]),
    ] {
        out.push(Case { indices: vec![J], ..case(op, &[shape]) });
    }
    for (causal, window) in [(false, None), (true, None), (true, Some(1)), (true, Some(2))] {
        let op = Op::Attention(Attention {
            at: I,
            keys: K,
            d: J,
            values: J,
            scale: Real(0.7),
            scoring: if causal { Scoring::causal(window) } else { Scoring::PLAIN },
        });
        let indices = if causal { vec![I, K] } else { vec![] };
        out.push(Case { indices, ..case(op, &[&[I, J], &[K, J], &[K, J]]) });
    }
    out
}

/// A loss: the sum of the sines of an op's result on parameters.
fn model(case: &Case, [i, j]: [u64; 2]) -> Model {
    let mut graph = Graph { name: case.op.name().into(), ..Graph::default() };
    for (name, size) in [("i", i), ("j", j), ("k", i)] {
        graph.body.dims.add(DimInfo::new(name, size));
    }
    for (n, dims) in case.operands.iter().enumerate() {
        let ty = Type::new(DType::F32, dims.clone());
        graph.params.push(Param {
            name: format!("p{n}"),
            ty,
            init: Init::Normal(Real(1.0)),
            decay: false,
            lr_scale: Real(1.0),
            frozen: false,
            adam: false,
            state: false,
            layer: None,
            span: None,
        });
    }
    let types: Vec<Type> = graph.params.iter().map(|p| p.ty.clone()).collect();
    let mut b = Builder { body: &mut graph.body, origin: Origin::new(Phase::Forward) };
    let params: Vec<Value> = types.into_iter().zip(0..).map(|(ty, n)| b.typed(Op::Param(n), &[], ty)).collect();
    let mut args: Vec<Value> = params.iter().map(|p| if case.positive { b.mul(*p, *p) } else { *p }).collect();
    if case.op == Op::Select {
        let zero = b.constant(0.0);
        args[0] = b.compare(ir::op::Compare::Gt, args[0], zero);
        // The sum gives the condition's parameter a gradient.
        let sum = b.add(&[args[1], params[0]]);
        args[1] = sum;
    }
    args.extend(case.indices.iter().map(|d| b.op(Op::Iota(*d), &[])).collect::<Vec<_>>());
    let declared = match &case.op {
        Op::Scatter { .. } => Type::new(DType::F32, vec![I, K]),
        _ => Type::scalar(DType::F32),
    };
    let v = b.typed(case.op.clone(), &args, declared);
    // A parameter also reaches the loss directly, in case the op has slope 0.
    let dims = b.dims(v);
    let sine = b.unary(Unary::Sin, v);
    let loss = b.sum(sine, &dims);
    let all: Vec<Value> = params
        .iter()
        .map(|p| {
            let dims = b.dims(*p);
            b.sum(*p, &dims)
        })
        .collect();
    let loss = b.add(&[vec![loss], all].concat());
    graph.losses.push(Report { name: "loss".into(), value: loss });
    Model { graph, settings: vec![], asks_training: false, train: Train::default(), plan: Plan::default(), weights: vec![] }
}

/// The module after `differentiate`.
fn differentiated(model: Model) -> Module {
    let progress = Progress::default();
    let mut compile = Compile::by(PASSES, model.clone(), model, &Options::default(), &progress).expect("a module");
    while compile.step().expect("a gradient").is_some_and(|pass| pass.name != "differentiate") {}
    compile.module().clone()
}

#[test]
fn both_derivatives_of_each_op_agree() {
    let mut random = 1u64;
    let mut below = |n: u64| {
        random = mix(random);
        random % n
    };
    let mut spoilt = 0;
    for case in cases() {
        for _ in 0..6 {
            let j = 1 + below(4);
            let i = (j + below(4)).max(2);
            let module = differentiated(model(&case, [i, j]));
            let what = format!("{:?} with i = {i}, j = {j}", case.op);
            match holds(&MEANING, &module) {
                Ok(warnings) => assert!(warnings.is_empty(), "{what}: {warnings:?}"),
                Err(e) => panic!("{what}: {e}"),
            }
            // A doubled gradient must be refused.
            let mut twice = module.clone();
            let GlobalGraph::Logical(graph) = &mut twice.training.whole else { panic!("a logical graph") };
            let (_, grad) = graph.grads[0];
            let mut b = Builder { body: &mut graph.body, origin: Origin::new(Phase::Backward) };
            let double = b.scale(grad, 2.0);
            graph.grads[0].1 = double;
            match holds(&MEANING, &twice) {
                Err(BugEvidence::Violation(v)) if v.invariant == Invariant::Gradient => spoilt += 1,
                other => panic!("{what}: twice the gradient is {other:?}"),
            }
        }
    }
    assert_eq!(spoilt, cases().len() * 6);
}
