//! Makes a module smaller as long as something holds of it: delta debugging (Zeller & Hildebrandt 2002) over what a module can do without.
//!
//! A candidate need not make sense. Whoever asks has to refuse modules that fail in another way, so that what is left fails in the same one.

use ir::dim::{Dim, DimInfo};
use ir::graph::{Body, Graph, Input, InputDefault, Origin, Value};
use ir::local::Local;
use ir::model::Train;
use ir::module::{GlobalGraph, Graphs, Module};
use ir::op::Op;
use ir::options::Options;
use std::collections::HashSet;

/// Something that a module may do without. The first number says which graphs: 0 of the step, 1 of the evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum RemovableItem {
    /// What the texts of both graphs say: a module without them claims less.
    Texts,
    Train,
    Options,
    Takes,
    Graphs(usize),
    /// Of those as they were partitioned.
    Stages(usize),
    Classes(usize),
    Setting(usize),
    Plan(usize),
    /// What a graph gives: losses, metrics, outputs, gradients, the whole loss, the norm and updates, counted through.
    Root(usize, usize),
    /// How a value is computed: it becomes an input.
    Cut(usize, Value),
    /// A value that its users can take from an operand of its type.
    Forward(usize, Value),
    /// Where a value comes from in the model text.
    Origin(usize, Value),
    /// The size of all dims of this size.
    Size(usize, u64),
    Layers(usize),
    LocalRoot(usize, bool, usize, usize),
    /// A node of a local graph that nobody uses.
    Node(usize, bool, usize, Value),
    Command(usize, usize, usize),
    /// A call of a stage's schedule: to train, to update, to evaluate.
    Call(usize, usize, usize),
    Source(usize),
}

/// The smallest module that leaving out what can be left out leads to, of which `fails` holds as it does of the given one. `smaller` is shown
/// each module on the way.
pub fn shrink(mut m: Module, fails: &mut dyn FnMut(&Module) -> bool, smaller: &mut dyn FnMut(&Module)) -> Module {
    const CLASSES: &[fn(&Module) -> Vec<RemovableItem>] = &[parts, roots, values, local_roots, commands, sizes];
    loop {
        let before = m.clone();
        for class in CLASSES {
            let mut chunk = class(&m).len();
            while chunk > 0 {
                let (mut at, mut items) = (0, class(&m));
                while at < items.len() {
                    let gone = items[at..items.len().min(at + chunk)].iter().copied().collect();
                    match without(&m, &gone) {
                        Some(candidate) if fails(&candidate) => {
                            m = candidate;
                            smaller(&m);
                            items = class(&m);
                        }
                        _ => at += chunk,
                    }
                }
                chunk /= 2;
            }
        }
        if m == before {
            return m;
        }
    }
}

fn both(m: &Module) -> impl Iterator<Item = (usize, &Graphs)> {
    m.both().into_iter().enumerate()
}

fn parts(m: &Module) -> Vec<RemovableItem> {
    let whole = [RemovableItem::Texts, RemovableItem::Train, RemovableItem::Options, RemovableItem::Takes].into_iter();
    let graphs = (0..2).flat_map(|k| [RemovableItem::Graphs(k), RemovableItem::Stages(k), RemovableItem::Classes(k)]);
    let settings = (0..m.settings.len()).map(RemovableItem::Setting).chain((0..m.plan.entries.len()).map(RemovableItem::Plan));
    whole.chain(graphs).chain(settings).chain(m.job.iter().flat_map(|j| (0..j.sources.len()).map(RemovableItem::Source))).collect()
}

/// The graph, where no local graph says of which of its values it holds parts.
fn alone(g: &Graphs) -> Option<&Graph> {
    (g.stages.is_empty() && g.locals.is_empty()).then(|| g.whole.graph())
}

fn roots(m: &Module) -> Vec<RemovableItem> {
    let of = |g: &Graph| {
        let options = usize::from(g.loss.is_some()) + usize::from(g.grad_norm.is_some());
        g.losses.len() + g.metrics.len() + g.outputs.len() + g.grads.len() + options + g.updates.len()
    };
    both(m).flat_map(|(k, g)| (0..alone(g).map_or(0, of)).map(move |i| RemovableItem::Root(k, i))).collect()
}

fn values(m: &Module) -> Vec<RemovableItem> {
    let of = |(k, g): (usize, &Graphs)| {
        let Some(graph) = alone(g) else { return vec![] };
        let body = &graph.body;
        let same = |v: &Value| body[*v].args.iter().any(|a| body[*a].ty == body[*v].ty);
        let computed: Vec<Value> = body.values().rev().filter(|v| !body[*v].op.is_source()).collect();
        let placed = body.values().filter(|v| body[*v].origin != Origin::new(body[*v].origin.phase));
        let cuts =
            computed.iter().map(|v| RemovableItem::Cut(k, *v)).chain(computed.iter().filter(|v| same(v)).map(|v| RemovableItem::Forward(k, *v)));
        cuts.chain(placed.map(|v| RemovableItem::Origin(k, v))).chain([RemovableItem::Layers(k)]).collect()
    };
    both(m).flat_map(of).collect()
}

fn sizes(m: &Module) -> Vec<RemovableItem> {
    let of = |g: &Graph| g.body.dims.list.iter().map(|d| d.size).filter(|n| *n > 1).collect::<HashSet<u64>>();
    let mut all: Vec<RemovableItem> =
        both(m).flat_map(|(k, g)| alone(g).map(of).unwrap_or_default().into_iter().map(move |n| RemovableItem::Size(k, n))).collect();
    all.sort_by_key(|item| if let RemovableItem::Size(k, n) = item { (*k, *n) } else { (0, 0) });
    all
}

/// The local graphs as they were partitioned, or those of classes.
fn lists(g: &Graphs) -> [(bool, &Vec<Local>); 2] {
    [(false, &g.stages), (true, &g.locals)]
}

fn local_roots(m: &Module) -> Vec<RemovableItem> {
    let of = |k: usize, classes: bool, i: usize, l: &Local| {
        let used = l.body.users();
        let held: HashSet<Value> =
            l.updates.iter().flat_map(|u| [u.new].into_iter().chain(u.states.clone())).chain(l.reports.iter().map(|r| r.1)).collect();
        let roots = (0..l.updates.len() + l.reports.len()).map(move |r| RemovableItem::LocalRoot(k, classes, i, r));
        let unused = l.body.values().rev().filter(|v| used[v.index()].is_empty() && !held.contains(v));
        roots.chain(unused.map(|v| RemovableItem::Node(k, classes, i, v))).collect::<Vec<_>>()
    };
    let all = both(m).flat_map(|(k, g)| lists(g).map(|(classes, list)| (k, classes, list)));
    all.flat_map(|(k, classes, list)| list.iter().enumerate().flat_map(move |(i, l)| of(k, classes, i, l))).collect()
}

fn commands(m: &Module) -> Vec<RemovableItem> {
    let Some(job) = &m.job else { return vec![] };
    let bodies = job.programs.iter().enumerate().flat_map(|(p, program)| program.bodies.iter().enumerate().map(move |(b, body)| (p, b, body)));
    let calls = job.stages.iter().enumerate().flat_map(|(s, stage)| {
        let lists = [&stage.schedule.train, &stage.schedule.update, &stage.schedule.eval];
        lists.into_iter().enumerate().flat_map(move |(k, list)| (0..list.len()).map(move |i| RemovableItem::Call(s, k, i)))
    });
    bodies.flat_map(|(p, b, body)| (0..body.commands.len()).map(move |i| RemovableItem::Command(p, b, i))).chain(calls).collect()
}

/// The module without these; none if that is the same one.
fn without(m: &Module, gone: &HashSet<RemovableItem>) -> Option<Module> {
    let mut out = m.clone();
    let has = |item: RemovableItem| gone.contains(&item);
    if has(RemovableItem::Texts) {
        (out.training.model, out.evaluation.model) = (None, None);
    }
    if has(RemovableItem::Train) {
        out.train = Train::default();
    }
    if has(RemovableItem::Options) {
        out.options = Options::default();
    }
    if has(RemovableItem::Takes) {
        out.takes.clear();
    }
    drop_from(&mut out.settings, |i| has(RemovableItem::Setting(i)));
    drop_from(&mut out.plan.entries, |i| has(RemovableItem::Plan(i)));
    for (k, graphs) in [&mut out.training, &mut out.evaluation].into_iter().enumerate() {
        if has(RemovableItem::Graphs(k)) {
            *graphs = Graphs { whole: GlobalGraph::Logical(Graph::default()), ..graphs.clone() };
        }
        if has(RemovableItem::Stages(k)) {
            graphs.stages.clear();
        }
        if has(RemovableItem::Classes(k)) {
            graphs.locals.clear();
        }
        if alone(graphs).is_some() {
            logical(graphs, k, &has);
        }
        for (classes, list) in [(false, &mut graphs.stages), (true, &mut graphs.locals)] {
            for (i, local) in list.iter_mut().enumerate() {
                let updates = local.updates.len();
                drop_from(&mut local.updates, |r| has(RemovableItem::LocalRoot(k, classes, i, r)));
                drop_from(&mut local.reports, |r| has(RemovableItem::LocalRoot(k, classes, i, updates + r)));
                let keep: Vec<bool> = local.body.values().map(|v| !has(RemovableItem::Node(k, classes, i, v))).collect();
                drop_local(local, &keep);
            }
        }
    }
    if let Some(job) = &mut out.job {
        drop_from(&mut job.sources, |i| has(RemovableItem::Source(i)));
        for (p, program) in job.programs.iter_mut().enumerate() {
            for (b, body) in program.bodies.iter_mut().enumerate() {
                let gone = |cut: u32| (0..body.commands.len().min(cut as usize)).filter(|i| has(RemovableItem::Command(p, b, *i))).count() as u32;
                let cuts: Vec<u32> = body.cuts.iter().map(|cut| cut - gone(*cut)).collect();
                body.cuts = cuts;
                drop_from(&mut body.commands, |i| has(RemovableItem::Command(p, b, i)));
            }
        }
        for (s, stage) in job.stages.iter_mut().enumerate() {
            let schedule = &mut stage.schedule;
            for (k, list) in [&mut schedule.train, &mut schedule.update, &mut schedule.eval].into_iter().enumerate() {
                drop_from(list, |i| has(RemovableItem::Call(s, k, i)));
            }
        }
    }
    (out != *m).then_some(out)
}

/// A graph, sharded or not, without some of what it gives or computes, and without what only that needed.
fn logical(graphs: &mut Graphs, k: usize, has: &dyn Fn(RemovableItem) -> bool) {
    let graph = match &mut graphs.whole {
        GlobalGraph::Logical(graph) => graph,
        GlobalGraph::Sharded(sharded) => &mut sharded.graph,
    };
    let mut at = 0;
    let mut next = |_: usize| {
        at += 1;
        has(RemovableItem::Root(k, at - 1))
    };
    for list in [&mut graph.losses, &mut graph.metrics, &mut graph.outputs] {
        drop_from(list, &mut next);
    }
    drop_from(&mut graph.grads, &mut next);
    for slot in [&mut graph.loss, &mut graph.grad_norm] {
        *slot = slot.take_if(|_| !next(0));
    }
    drop_from(&mut graph.updates, &mut next);
    for v in graph.body.values() {
        if has(RemovableItem::Forward(k, v)) {
            forward(graph, v);
        }
        if has(RemovableItem::Cut(k, v)) && !graph.body[v].op.is_source() {
            let input = Input { name: format!("cut{}", v.0), ty: graph.body[v].ty.clone(), default: None, any: false, span: None };
            graph.inputs.push(input);
            let node = &mut graph.body[v];
            (node.op, node.args) = (Op::Input(graph.inputs.len() as u32 - 1), vec![]);
        }
        if has(RemovableItem::Origin(k, v)) {
            graph.body[v].origin = Origin::new(graph.body[v].origin.phase);
        }
    }
    if has(RemovableItem::Layers(k)) {
        graph.layers = 0;
        graph.params.iter_mut().for_each(|p| (p.layer, p.span) = (None, None));
        graph.inputs.iter_mut().for_each(|x| x.span = None);
    }
    for d in &mut graph.body.dims.list {
        if has(RemovableItem::Size(k, d.size)) {
            *d = DimInfo { copy_of: d.copy_of, whole: d.whole, ..DimInfo::new(d.name.clone(), if d.size > 2 { 2 } else { 1 }) };
        }
    }
    let keep = live(graph);
    drop_nodes(&mut graph.body, &keep);
    let new = renumbered(&keep);
    graph.map_roots(|v| new[v.index()]);
    if let GlobalGraph::Sharded(sharded) = &mut graphs.whole {
        drop_from(&mut sharded.shardings, |i| keep.get(i) == Some(&false));
        drop_from(&mut sharded.reasons, |i| keep.get(i) == Some(&false));
        drop_entries(&mut sharded.graph);
    } else if let GlobalGraph::Logical(graph) = &mut graphs.whole {
        drop_entries(graph);
        drop_dims(graph);
    }
}

/// Users of a value take an operand of its type.
fn forward(graph: &mut Graph, v: Value) {
    let body = &mut graph.body;
    let Some(same) = body[v].args.iter().copied().find(|a| body[*a].ty == body[v].ty) else { return };
    let instead = |x: Value| if x == v { same } else { x };
    body.nodes.iter_mut().flat_map(|n| &mut n.args).for_each(|a| *a = instead(*a));
    graph.map_roots(instead);
}

fn drop_from<T>(list: &mut Vec<T>, mut gone: impl FnMut(usize) -> bool) {
    let mut at = 0;
    list.retain(|_| {
        at += 1;
        !gone(at - 1)
    });
}

/// Which values something that a graph gives needs.
fn live(graph: &Graph) -> Vec<bool> {
    let mut keep = vec![false; graph.body.nodes.len()];
    let mut next = graph.roots();
    while let Some(v) = next.pop() {
        if keep.get(v.index()) == Some(&false) {
            keep[v.index()] = true;
            next.extend(&graph.body[v].args);
        }
    }
    keep
}

/// By value, its number among those that are kept; what is not kept has the number of the next one.
fn renumbered(keep: &[bool]) -> Vec<Value> {
    let counts = keep.iter().scan(0, |count, k| {
        *count += u32::from(*k);
        Some(*count - u32::from(*k))
    });
    counts.map(Value).collect()
}

fn drop_nodes(body: &mut Body, keep: &[bool]) {
    let new = renumbered(keep);
    drop_from(&mut body.nodes, |i| !keep[i]);
    body.nodes.iter_mut().flat_map(|n| &mut n.args).for_each(|a| *a = new.get(a.index()).copied().unwrap_or(*a));
}

fn drop_local(local: &mut Local, keep: &[bool]) {
    let new = renumbered(keep);
    let of = |v: &mut Value| *v = new.get(v.index()).copied().unwrap_or(*v);
    drop_nodes(&mut local.body, keep);
    drop_from(&mut local.chunks, |i| keep.get(i) == Some(&false));
    drop_from(&mut local.accumulate, |i| keep.get(i) == Some(&false));
    drop_from(&mut local.source, |i| keep.get(i) == Some(&false));
    drop_from(&mut local.reasons, |i| keep.get(i) == Some(&false));
    local.host = local.host.iter().filter(|v| keep.get(v.index()) == Some(&true)).map(|v| new[v.index()]).collect();
    local.reports.iter_mut().for_each(|r| of(&mut r.1));
    local.updates.iter_mut().for_each(|u| [&mut u.new].into_iter().chain(&mut u.states).for_each(of));
}

/// Drops parameters, inputs and tables that nothing names.
fn drop_entries(graph: &mut Graph) {
    let (mut params, mut inputs, mut tables) = (HashSet::new(), HashSet::new(), HashSet::new());
    for node in &graph.body.nodes {
        match node.op {
            Op::Param(p) | Op::State(p, _) => drop(params.insert(p)),
            Op::Input(i) => drop(inputs.insert(i)),
            Op::Table(t) => drop(tables.insert(t)),
            _ => {}
        }
    }
    params.extend(graph.grads.iter().map(|g| g.0).chain(graph.updates.iter().map(|u| u.param)));
    let fed: Vec<u32> = graph.inputs.iter().filter_map(|x| x.default.as_ref().and_then(InputDefault::source)).collect();
    inputs.extend(fed);
    let new = |used: &HashSet<u32>, x: u32| (0..x).filter(|y| used.contains(y)).count() as u32;
    for node in &mut graph.body.nodes {
        match &mut node.op {
            Op::Param(p) | Op::State(p, _) => *p = new(&params, *p),
            Op::Input(i) => *i = new(&inputs, *i),
            Op::Table(t) => *t = new(&tables, *t),
            _ => {}
        }
    }
    graph.grads.iter_mut().for_each(|g| g.0 = new(&params, g.0));
    graph.updates.iter_mut().for_each(|u| u.param = new(&params, u.param));
    for x in &mut graph.inputs {
        x.default = x.default.take().map(|feed| feed.derived_from(|i| new(&inputs, i)));
    }
    drop_from(&mut graph.params, |i| !params.contains(&(i as u32)));
    drop_from(&mut graph.inputs, |i| !inputs.contains(&(i as u32)));
    drop_from(&mut graph.tables, |i| !tables.contains(&(i as u32)));
}

/// Drops dims that nothing has.
fn drop_dims(graph: &mut Graph) {
    let mut used: HashSet<Dim> = graph.batch.into_iter().collect();
    let types = graph.params.iter().map(|p| &p.ty).chain(graph.inputs.iter().map(|x| &x.ty)).chain(graph.tables.iter().map(|t| &t.ty));
    used.extend(types.chain(graph.body.nodes.iter().map(|n| &n.ty)).flat_map(|ty| &ty.dims));
    for node in &graph.body.nodes {
        node.op.map_dims(&mut |d| {
            used.insert(d);
            d
        });
    }
    // A copy of a dim needs its original, which may be a copy itself.
    for _ in 0..graph.body.dims.list.len() {
        let originals: Vec<Dim> = used.iter().filter_map(|d| graph.body.dims.list.get(d.0 as usize)?.copy_of).collect();
        used.extend(originals);
    }
    let new = |d: Dim| Dim((0..d.0).filter(|x| used.contains(&Dim(*x))).count() as u32);
    let types = graph.params.iter_mut().map(|p| &mut p.ty).chain(graph.inputs.iter_mut().map(|x| &mut x.ty));
    let types = types.chain(graph.tables.iter_mut().map(|t| &mut t.ty));
    types.chain(graph.body.nodes.iter_mut().map(|n| &mut n.ty)).for_each(|ty| ty.dims.iter_mut().for_each(|d| *d = new(*d)));
    for node in &mut graph.body.nodes {
        node.op = node.op.map_dims(&mut |d| new(d));
    }
    graph.batch = graph.batch.map(new);
    drop_from(&mut graph.body.dims.list, |i| !used.contains(&Dim(i as u32)));
    graph.body.dims.list.iter_mut().for_each(|d| d.copy_of = d.copy_of.map(new));
}
