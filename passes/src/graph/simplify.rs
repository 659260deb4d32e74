//! Normal form, after differentiation: no `sub`, no nested sums, no repeated or dead nodes; all forward nodes first, then backward, then update.

use hashbrown::{DefaultHashBuilder, HashTable};
use ir::dim::Dim;
use ir::graph::{Body, Graph, Node, Phase, Value};
use ir::op::{Binary, Compare, Op, Reduce, Unary};
use std::hash::BuildHasher;

/// Rewrites the graph into normal form. The values it computes are the same, bit for bit, but for the order of sums.
///
/// `a - b` becomes `a + (-b)`, so that one op holds all sums; a sum used once, by a sum of the same dims, is merged into
/// it, so that partial terms can be reduced together; a dot that sums over nothing is a product of elements, which loops
/// compute beside others; a slice of a widened value is a widened slice; casts to the same type and expansions to the
/// same dims vanish; equal nodes of one phase and layer become one.
pub fn simplify(graph: Graph) -> Graph {
    let graph = rebuild(graph, &rewrite);
    let users = graph.body.users();
    let mut single: Vec<bool> = graph.body.values().map(|v| users[v.index()].len() == 1).collect();
    graph.roots().into_iter().for_each(|v| single[v.index()] = false);
    // A second round merges nodes that flattening made equal, and drops those it made dead.
    clean(flatten(graph, &single))
}

/// Drops what nothing needs and makes equal nodes one; sums stay as they are.
pub fn clean(graph: Graph) -> Graph {
    rebuild(graph, &|_, node| Rewrite::Keep(node))
}

enum Rewrite {
    Keep(Node),
    Is(Value),
}

fn rewrite(body: &mut Body, node: Node) -> Rewrite {
    match node.op {
        Op::Binary(Binary::Sub) => {
            let ty = body[node.args[1]].ty.clone();
            let minus = body.push(Op::Unary(Unary::Neg), [node.args[1]], ty, node.origin.clone());
            Rewrite::Keep(Node { op: Op::Add, args: vec![node.args[0], ir::fault!("simplify.sub.sign", node.args[1], minus)], ..node })
        }
        Op::Dot { ref over, .. } if over.is_empty() && node.args.iter().all(|a| body[*a].ty.dtype == node.ty.dtype) => {
            let [a, b] = [node.args[0], node.args[1]];
            Rewrite::Keep(Node { op: Op::Binary(Binary::Mul), args: vec![a, ir::fault!("simplify.product.factor", a, b)], ..node })
        }
        Op::Cast | Op::Expand
            if ir::fault!("simplify.cast.dropped", body[node.args[0]].ty.dims == node.ty.dims, body[node.args[0]].ty == node.ty) =>
        {
            Rewrite::Is(node.args[0])
        }
        Op::Reduce { kind: Reduce::Sum, ref over } => match one_index(body, node.args[0], over) {
            Some((x, d, at)) if body[x].ty.dtype == node.ty.dtype => {
                let mut ty = body[x].ty.clone();
                ty.dims.retain(|e| *e != d);
                let slice = Op::Slice { from: d, to: None, at };
                if over.len() == 1 {
                    return Rewrite::Keep(Node { op: slice, args: vec![x], ty, ..node });
                }
                let rest = over.iter().copied().filter(|e| *e != d).collect();
                let part = body.push(slice, [x], ty, node.origin.clone());
                Rewrite::Keep(Node { op: Op::Reduce { kind: Reduce::Sum, over: rest }, args: vec![part], ..node })
            }
            Some(_) | None => Rewrite::Keep(node),
        },
        // What is sliced is in memory, so it had better be the narrower value.
        Op::Slice { .. } if widens(body, node.args[0]) => {
            let narrow = body[node.args[0]].args[0];
            let mut ty = node.ty.clone();
            ty.dtype = body[narrow].ty.dtype;
            let part = body.push(node.op, [narrow], ty, node.origin.clone());
            Rewrite::Keep(Node { op: Op::Cast, args: vec![part], ..node })
        }
        // Differentiation is over, so the op is an identity.
        Op::StopGradient => Rewrite::Is(node.args[0]),
        _ => Rewrite::Keep(node),
    }
}

/// Whether a value is another one in more bytes.
fn widens(body: &Body, v: Value) -> bool {
    body[v].op == Op::Cast && body[body[v].args[0]].ty.dtype.bytes() < body[v].ty.dtype.bytes()
}

/// The summed value, the dim and the index, if the sum has only elements at one index of a summed dim: `select(iota d
/// == at, x, 0)`. For a dim of two elements, `!=` one index selects the other.
fn one_index(body: &Body, v: Value, over: &[Dim]) -> Option<(Value, Dim, u64)> {
    let number = |v: Value| if let Op::Const(c) = body[v].op { Some(c.0) } else { None };
    let [hit, x, other] = body[v].args[..] else { return None };
    if body[v].op != Op::Select || number(other) != Some(0.0) {
        return None;
    }
    let (equal, not) = if body[hit].op == Op::Unary(Unary::Not) { (body[hit].args[0], true) } else { (hit, false) };
    let Op::Compare(Compare::Eq) = body[equal].op else { return None };
    let [a, b] = body[equal].args[..] else { return None };
    let (d, at) = match (&body[a].op, &body[b].op) {
        (Op::Iota(d), Op::Const(at)) | (Op::Const(at), Op::Iota(d)) => (*d, at.0),
        _ => return None,
    };
    let size = body.dims.size(d);
    let at = (0..size).find(|i| *i as f64 == at)?;
    let at = match not {
        false => at,
        true if size == 2 => ir::fault!("simplify.index.other", at, 1 - at),
        true => return None,
    };
    (over.contains(&d) && body[x].ty.has(d)).then_some((x, d, at))
}

/// The phase and layer within which a node can be shared. Parameters, their copies and states are the same in every
/// phase; other nodes are shared within a phase and layer only, so that a pipeline can cut between layers.
fn shared_in(body: &Body, node: &Node) -> (Phase, Option<u32>) {
    let copy = node.op == Op::Cast && matches!(body[node.args[0]].op, Op::Param(_));
    match (node.origin.phase, &node.op) {
        _ if copy => (Phase::Forward, None),
        (_, Op::Param(_) | Op::State(..) | Op::Input(_) | Op::Table(_)) => (Phase::Forward, None),
        (Phase::Update, _) => (Phase::Update, None),
        (phase, _) => (phase, node.origin.layer),
    }
}

/// Copies the live nodes, phase by phase, through `f`; those of equal op, operands, type, phase and layer once.
fn rebuild(mut graph: Graph, f: &dyn Fn(&mut Body, Node) -> Rewrite) -> Graph {
    let live = live(&graph);
    let old = std::mem::take(&mut graph.body);
    let mut body = Body { dims: old.dims, nodes: Vec::with_capacity(old.nodes.len()) };
    let mut nodes: Vec<Option<Node>> = old.nodes.into_iter().zip(live).map(|(node, live)| live.then_some(node)).collect();
    let mut map: Vec<Option<Value>> = vec![None; nodes.len()];
    // `known` holds the emitted nodes with their hashes.
    let mut known: HashTable<(u64, Value)> = HashTable::with_capacity(nodes.len());
    let hasher = DefaultHashBuilder::default();
    for phase in [Phase::Forward, Phase::Backward, Phase::Update] {
        for (slot, to) in nodes.iter_mut().zip(0..) {
            let Some(mut node) = slot.take_if(|n| n.origin.phase == phase) else { continue };
            for a in &mut node.args {
                *a = map[a.index()].expect("invariant: an operand belongs to the same or an earlier phase");
            }
            let new = match f(&mut body, node) {
                Rewrite::Is(v) => v,
                Rewrite::Keep(node) => {
                    let shared = shared_in(&body, &node);
                    let hash = hasher.hash_one((&node.op, &node.args, &node.ty, shared));
                    let same = |k: &(u64, Value)| {
                        let other = &body[k.1];
                        (&other.op, &other.args, &other.ty) == (&node.op, &node.args, &node.ty) && shared_in(&body, other) == shared
                    };
                    match known.find(hash, same) {
                        Some((_, v)) => *v,
                        None => {
                            body.nodes.push(node);
                            let v = Value(body.nodes.len() as u32 - 1);
                            known.insert_unique(hash, (hash, v), |k| k.0);
                            v
                        }
                    }
                }
            };
            map[to] = Some(new);
        }
    }
    graph.body = body;
    graph.map_roots(|v| map[v.index()].expect("invariant: roots are live"));
    graph
}

/// Merges sums that only sums use.
fn flatten(mut graph: Graph, single: &[bool]) -> Graph {
    for v in graph.body.values() {
        if graph.body[v].op != Op::Add {
            continue;
        }
        let mut args = vec![];
        for a in graph.body[v].args.clone() {
            let inner = &graph.body[a];
            let same = inner.op == Op::Add && inner.ty.dims.len() == graph.body[v].ty.dims.len() && inner.origin.phase == graph.body[v].origin.phase;
            if same && single[a.index()] {
                args.extend(ir::fault!("simplify.flatten.term", inner.args[1..].to_vec(), inner.args.clone()));
            } else {
                args.push(a);
            }
        }
        graph.body[v].args = args;
    }
    graph
}

/// Which values the graph's results need.
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
