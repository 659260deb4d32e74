//! Normal form, after differentiation: no `sub`, no nested sums, no repeated or dead nodes; all forward nodes first, then backward, then update.

use ir::graph::{Body, Graph, Node, Phase, Type, Value};
use ir::op::{Binary, Op, Unary};
use std::collections::HashMap;

/// Rewrites the graph into normal form. The values it computes are the same, bit for bit, but for the order of sums.
///
/// `a - b` becomes `a + (-b)`, so that one op holds all sums; a sum used once, by a sum of the same dims, is merged into it, so
/// that partial terms can be reduced together; casts to the same type and expansions to the same dims vanish; equal nodes
/// of one phase and layer become one.
pub fn simplify(graph: Graph) -> Graph {
    let graph = rebuild(graph, &|body, node, _| rewrite(body, node));
    let users = graph.body.users();
    let roots = graph.roots();
    let single = |v: Value| users[v.index()].len() == 1 && !roots.contains(&v);
    let flat = flatten(graph.clone(), &single);
    // A second round merges what flattening made equal, and drops what it made dead.
    clean(flat)
}

/// Drops what nothing needs and makes equal nodes one; sums stay as they are.
pub fn clean(graph: Graph) -> Graph {
    rebuild(graph, &|_, node, _| Step::Keep(node))
}

enum Step {
    Keep(Node),
    Is(Value),
}

fn rewrite(body: &mut Body, node: Node) -> Step {
    match node.op {
        Op::Binary(Binary::Sub) => {
            let ty = body[node.args[1]].ty.clone();
            let minus = body.push(Op::Unary(Unary::Neg), [node.args[1]], ty, node.origin.clone());
            Step::Keep(Node { op: Op::Add, args: vec![node.args[0], minus], ..node })
        }
        Op::Cast | Op::Expand if body[node.args[0]].ty == node.ty => Step::Is(node.args[0]),
        // It has done its work in differentiation.
        Op::StopGradient => Step::Is(node.args[0]),
        _ => Step::Keep(node),
    }
}

/// What makes two nodes the same: op, operands, type, phase and layer.
type Known = (Op, Vec<Value>, Type, Phase, Option<u32>);

/// Copies the live nodes, phase by phase, through `f`; equal ones once.
fn rebuild(mut graph: Graph, f: &dyn Fn(&mut Body, Node, Value) -> Step) -> Graph {
    let live = live(&graph);
    let old = std::mem::take(&mut graph.body);
    let mut body = Body { dims: old.dims.clone(), nodes: vec![] };
    let mut map: Vec<Option<Value>> = vec![None; old.nodes.len()];
    let mut known: HashMap<Known, Value> = HashMap::new();
    for phase in [Phase::Forward, Phase::Backward, Phase::Update] {
        for v in old.values().filter(|v| old[*v].origin.phase == phase && live[v.index()]) {
            let mut node = old[v].clone();
            for a in &mut node.args {
                *a = map[a.index()].expect("invariant: an operand belongs to the same or an earlier phase");
            }
            let new = match f(&mut body, node, v) {
                Step::Is(v) => v,
                Step::Keep(node) => {
                    // Parameters, their copies and states are the same in every phase; other nodes are shared within a phase and layer only,
                    // for a pipeline to cut between layers.
                    let copy = node.op == Op::Cast && matches!(body[node.args[0]].op, Op::Param(_));
                    let source = copy || matches!(node.op, Op::Param(_) | Op::State(..) | Op::Input(_) | Op::Table(_));
                    let key = (
                        node.op.clone(),
                        node.args.clone(),
                        node.ty.clone(),
                        if source { Phase::Forward } else { node.origin.phase },
                        if source || node.origin.phase == Phase::Update { None } else { node.origin.layer },
                    );
                    *known.entry(key).or_insert_with(|| {
                        body.nodes.push(node);
                        Value(body.nodes.len() as u32 - 1)
                    })
                }
            };
            map[v.index()] = Some(new);
        }
    }
    graph.body = body;
    graph.map_roots(|v| map[v.index()].expect("invariant: roots are live"));
    graph
}

/// Merges sums that only sums use.
fn flatten(mut graph: Graph, single: &dyn Fn(Value) -> bool) -> Graph {
    for v in graph.body.values() {
        if graph.body[v].op != Op::Add {
            continue;
        }
        let mut args = vec![];
        for a in graph.body[v].args.clone() {
            let inner = &graph.body[a];
            let same = inner.op == Op::Add && inner.ty.dims.len() == graph.body[v].ty.dims.len() && inner.origin.phase == graph.body[v].origin.phase;
            if same && single(a) {
                args.extend(inner.args.clone());
            } else {
                args.push(a);
            }
        }
        graph.body[v].args = args;
    }
    graph
}

/// What the graph's results need.
fn live(graph: &Graph) -> Vec<bool> {
    let mut live = vec![false; graph.body.nodes.len()];
    for root in graph.roots() {
        live[root.index()] = true;
    }
    for v in graph.body.values().rev() {
        if live[v.index()] {
            for a in &graph.body[v].args {
                live[a.index()] = true;
            }
        }
    }
    live
}
