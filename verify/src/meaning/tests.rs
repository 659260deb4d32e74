//! Forward derivatives against differences, and which elements are looked at.

use super::chosen::{ChosenElements, choose};
use super::sample::Sample;
use super::small::{DrawMode, SmallGraph};
use super::tangent;
use ir::build::Builder;
use ir::dim::{Dim, DimInfo, Order};
use ir::graph::{Graph, Init, Origin, Param, Phase, Type, Value};
use ir::op::{Attention, Binary, DType, Op, Real, Reduce, Routing, Scoring, Unary};
use std::collections::HashMap;

/// A graph with the dims `i`, `j` and `k`, and with parameters over these.
struct TestGraph {
    graph: Graph,
    params: Vec<Value>,
}

const I: Dim = Dim(0);
const J: Dim = Dim(1);
const K: Dim = Dim(2);

impl TestGraph {
    fn new(shapes: &[&[Dim]]) -> TestGraph {
        let mut graph = Graph::default();
        for (name, size) in [("i", 3), ("j", 2), ("k", 3)] {
            graph.body.dims.add(DimInfo::new(name, size));
        }
        let params = shapes.iter().enumerate().map(|(n, dims)| {
            let ty = Type::new(DType::F32, dims.to_vec());
            let (name, init) = (format!("p{n}"), Init::Normal(Real(1.0)));
            graph.params.push(Param {
                name,
                ty: ty.clone(),
                init,
                decay: false,
                lr_scale: Real(1.0),
                frozen: false,
                adam: false,
                state: false,
                layer: None,
                span: None,
            });
            graph.body.push(Op::Param(n as u32), [], ty, Origin::new(Phase::Forward))
        });
        let params = params.collect();
        TestGraph { graph, params }
    }

    fn builder(&mut self) -> Builder<'_> {
        Builder { body: &mut self.graph.body, origin: Origin::new(Phase::Forward) }
    }

    /// Checks a value's tangent against central differences, to second order.
    fn check(&self, v: Value, what: &str) {
        let chosen: ChosenElements = choose(&[&self.graph], &[]).expect("small dims").remove(0);
        let sample = Sample::new(&self.graph, &chosen, 0, 1.0);
        let small = SmallGraph::new(&self.graph, &chosen, &sample, DrawMode::Keyed);
        let values = small.run();
        let direction = |p: u32| {
            let param = &self.graph.params[p as usize];
            small.fill(&param.ty.dims, &param.ty.dims, sample.direction(param))
        };
        let found = tangent::run(&small, &values, |p, _| Some(direction(p))).unwrap_or_else(|op| panic!("{what}: {op}"));
        let moved = |by: f64| {
            let near = |(p, v): (usize, &Value)| {
                let moved = values[v.index()].iter().zip(direction(p as u32)).map(|(x, d)| x + by * d);
                (*v, moved.collect())
            };
            let others: HashMap<Value, Vec<f64>> = self.params.iter().enumerate().map(near).collect();
            small.with(&values, others).remove(&v).unwrap_or_else(|| values[v.index()].clone())
        };
        let (above, below) = (moved(1e-5), moved(-1e-5));
        for (k, (a, b)) in above.iter().zip(below).enumerate() {
            let (want, found) = ((a - b) / 2e-5, found[v.index()].as_ref().map_or(0.0, |t| t[k]));
            assert!((want - found).abs() <= 1e-6 * want.abs().max(1.0), "{what}, element {k}: {found} is not {want}");
        }
    }
}

#[test]
fn forward_derivatives_are_differences() {
    for u in Unary::ALL.iter().filter(|u| **u != Unary::Not) {
        let mut case = TestGraph::new(&[&[I, J]]);
        let x = case.params[0];
        let mut b = case.builder();
        // Logarithms and roots need positive numbers, which squares are.
        let square = b.mul(x, x);
        let v = b.unary(*u, square);
        case.check(v, u.name());
    }
    for o in Binary::ALL.iter().filter(|o| o.takes(DType::F32)) {
        let mut case = TestGraph::new(&[&[I, J], &[J, K]]);
        let [x, y] = [case.params[0], case.params[1]];
        let mut b = case.builder();
        let square = b.mul(x, x);
        let v = b.binary(*o, square, y);
        case.check(v, o.name());
    }
}

#[test]
fn forward_derivatives_of_ops_that_sum_and_move_are_differences() {
    let ops: Vec<(Op, &[&[Dim]])> = vec![
        (Op::Add, &[&[I, J], &[J]]),
        (Op::dot(vec![J]), &[&[I, J], &[J, K]]),
        (Op::Reduce { kind: Reduce::Sum, over: vec![I] }, &[&[I, J]]),
        (Op::Reduce { kind: Reduce::Max, over: vec![I] }, &[&[I, J]]),
        (Op::Cumsum { over: I, reverse: true }, &[&[I, J]]),
        (Op::View { from: vec![I], to: vec![K] }, &[&[I, J]]),
        (Op::Slice { from: I, to: Some(J), at: 1 }, &[&[I]]),
        (Op::Pad { from: Some(J), to: I, at: 1 }, &[&[J]]),
        (Op::Cut, &[&[I]]),
        (Op::StopGradient, &[&[]]),
    ];
    for (op, shapes) in ops {
        let mut case = TestGraph::new(shapes);
        let args = case.params.clone();
        let v = case.builder().op(op.clone(), &args);
        let stopped = op == Op::StopGradient;
        // A `stop_gradient` has no tangent although its value moves, so it is not compared with differences.
        if !stopped {
            case.check(v, op.name());
        }
    }
}

#[test]
fn forward_derivatives_of_lookups_and_attention_are_differences() {
    let index = |b: &mut Builder<'_>| b.op(Op::Iota(J), &[]);
    for (op, shape) in [
        (Op::Gather { dim: I }, &[I, K] as &[Dim]),
        (Op::Combine(Routing { experts: I, choice: J }), &[I, K]),
        (Op::Dispatch(Routing { experts: I, choice: J }), &[J, K]),
    ] {
        let mut case = TestGraph::new(&[shape]);
        let x = case.params[0];
        let mut b = case.builder();
        let at = index(&mut b);
        let v = b.op(op.clone(), &[x, at]);
        case.check(v, op.name());
    }
    for (causal, window, weighs) in [(false, None, false), (true, None, false), (true, Some(1), false), (true, None, true)] {
        let mut case = TestGraph::new(&[&[I, J], &[K, J], &[K, J]]);
        let args = case.params.clone();
        let mut b = case.builder();
        let positions = [b.op(Op::Iota(I), &[]), b.op(Op::Iota(K), &[])];
        let mut scoring = if causal { Scoring::causal(window) } else { Scoring::PLAIN };
        if weighs {
            let key = scoring.step(Op::Input(2), DType::I32, &[]);
            scoring.weight = Some(scoring.step(Op::Cast, DType::F32, &[key]));
        }
        let attention = Attention { at: I, keys: K, d: J, values: J, scale: Real(0.7), scoring };
        let args = if causal { [&args[..], &positions].concat() } else { args };
        let v = b.op(Op::Attention(attention), &args);
        case.check(v, "attention");
    }
}

#[test]
fn what_is_looked_at_goes_through_views_and_slices() {
    let mut graph = Graph::default();
    let dims = &mut graph.body.dims;
    let [hidden, heads, width, half] = [("hidden", 24), ("heads", 4), ("width", 6), ("half", 3)].map(|(n, s)| dims.add(DimInfo::new(n, s)));
    let mut b = Builder { body: &mut graph.body, origin: Origin::new(Phase::Forward) };
    let x = b.typed(Op::Param(0), &[], Type::new(DType::F32, vec![hidden]));
    let rows = b.op(Op::View { from: vec![hidden], to: vec![heads, width] }, &[x]);
    b.op(Op::Slice { from: width, to: Some(half), at: 3 }, &[rows]);
    let chosen = choose(&[&graph], &[]).expect("small dims").remove(0);
    let [h, n, w, f] = [hidden, heads, width, half].map(|d| chosen.places(d));
    let product: Vec<u64> = n.iter().flat_map(|a| w.iter().map(move |b| a * 6 + b)).collect();
    assert_eq!(h, product);
    let second: Vec<u64> = w.iter().filter(|p| **p >= 3).map(|p| p - 3).collect();
    assert_eq!(f, second);
}

#[test]
fn two_graphs_are_looked_at_at_the_same_indices() {
    let graph = |size, order| {
        let mut graph = Graph::default();
        graph.body.dims.add(DimInfo { logical: 7, order, ..DimInfo::new("d", size) });
        graph
    };
    let (text, padded) = (graph(7, Order::Plain), graph(8, Order::Plain));
    let chosen = choose(&[&text, &padded], &[((0, I), (1, I))]).expect("small dims");
    assert_eq!([chosen[0].places(I), chosen[1].places(I)], [vec![0, 3, 6], vec![0, 3, 6, 7]]);
    let zigzag = |graph: Graph| {
        let mut graph = graph;
        let info = &mut graph.body.dims[I];
        (info.size, info.logical, info.order) = (8, 8, Order::ZigZag { pairs: 2, chunk: 2 });
        graph
    };
    let mut plain = graph(8, Order::Plain);
    plain.body.dims[I].logical = 8;
    let chosen = choose(&[&plain, &zigzag(graph(8, Order::Plain))], &[((0, I), (1, I))]).expect("small dims");
    let indices: Vec<u64> = chosen[1].places(I).into_iter().map(|p| Order::ZigZag { pairs: 2, chunk: 2 }.index(p)).collect();
    assert_eq!(chosen[0].places(I), [0, 4, 7]);
    assert!([0, 4, 7].iter().all(|i| indices.contains(i)), "{indices:?}");
}
