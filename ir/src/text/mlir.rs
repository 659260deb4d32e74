//! The MLIR export of the graph levels: generic operations of an unregistered dialect `mcc`, which
//! `mlir-opt --allow-unregistered-dialect` accepts. An export only: it is not read back.
//!
//! A node is `%2 = "mcc.dot"(%0, %1) {over = ["hidden"], dims = ["batch", "out"]} : (...) -> tensor<4x8xf32>
//! loc(...)`: the fields of the op by the words of the text form, and what the level says of the node: `dims`,
//! `sharding`, `chunk`, `reason`, `avoided_by`. The location is the scope around `file:line:column` of the model
//! text, files by their number as in the text forms.

use super::body::avoided_by;
use super::labels::Labels;
use super::op::{attributes, op_name};
use super::words::mlir_quote;
use super::{graph::feed, graph::init, io, sharded::sharding};
use crate::dim::Dim;
use crate::graph::{Body, Graph, Node, Origin, Report, Type, Value};
use crate::local::Local;
use crate::mesh::Mesh;
use crate::op::{DType, Op};
use crate::reason::Reason;
use crate::sharded::{Sharded, Sharding};
use std::rc::Rc;

/// A module being written.
struct ModuleWriter<'a> {
    out: String,
    body: &'a Body,
    dims: Rc<Labels>,
    mesh: &'a Mesh,
}

impl<'a> ModuleWriter<'a> {
    fn new(body: &'a Body, mesh: &'a Mesh) -> ModuleWriter<'a> {
        ModuleWriter { out: String::new(), body, dims: Rc::new(Labels::of(body.dims.list.iter().map(|d| d.name.as_str()))), mesh }
    }

    fn ty(&self, ty: &Type) -> String {
        let mut out = String::from("tensor<");
        for d in &ty.dims {
            match self.body.dims.list.get(d.0 as usize) {
                Some(info) => out.push_str(&format!("{}x", info.size)),
                None => out.push_str("?x"),
            }
        }
        out.push_str(match ty.dtype {
            DType::F32 => "f32",
            DType::Bf16 => "bf16",
            DType::F16 => "f16",
            DType::I32 => "i32",
            DType::Bool => "i1",
        });
        out.push('>');
        out
    }

    fn type_of(&self, v: Value) -> String {
        self.body.nodes.get(v.index()).map_or("tensor<f32>".into(), |n| self.ty(&n.ty))
    }

    fn labels(&self, dims: &[Dim]) -> String {
        let labels: Vec<String> = dims.iter().map(|d| mlir_quote(&self.dims.text(d.0))).collect();
        format!("[{}]", labels.join(", "))
    }

    fn sharding(&self, s: &Sharding) -> String {
        io::attributes(s, &self.dims, self.mesh, |io, s| io.as_text(s, |io, s| sharding(io, s, super::op::dim)))
    }

    /// One operation with operands; `result` is its type, of an operation that has one.
    fn operation(&mut self, result: Option<(Value, &Type)>, name: &str, args: &[Value], attributes: &[String], location: &str) {
        let names: Vec<String> = args.iter().map(Value::to_string).collect();
        let types: Vec<String> = args.iter().map(|a| self.type_of(*a)).collect();
        let attributes: Vec<&str> = attributes.iter().map(String::as_str).filter(|a| !a.is_empty()).collect();
        let left = result.map_or(String::new(), |(v, _)| format!("{v} = "));
        let right = result.map_or("()".into(), |(_, ty)| self.ty(ty));
        let line = format!(
            "    {left}\"mcc.{name}\"({}) {{{}}} : ({}) -> {right} loc({location})\n",
            names.join(", "),
            attributes.join(", "),
            types.join(", ")
        );
        self.out.push_str(&line);
    }

    /// All nodes; `beside` adds the attributes of a level.
    fn nodes(&mut self, beside: impl Fn(&ModuleWriter, Value, &Node) -> Vec<String>) {
        let body = self.body;
        for v in body.values() {
            let node = &body[v];
            let mut all = vec![attributes(&node.op, &self.dims, self.mesh), format!("dims = {}", self.labels(&node.ty.dims))];
            all.push(format!("phase = {}", mlir_quote(node.origin.phase.name())));
            all.extend(node.origin.layer.map(|l| format!("layer = {l} : i64")));
            all.extend(node.origin.recomputed.then(|| "recomputed".to_string()));
            all.extend(beside(self, v, node));
            self.operation(Some((v, &node.ty)), &op_name(&node.op), &node.args, &all, &location(&node.origin));
        }
    }

    /// What a graph says beside its body.
    fn ends(&mut self, g: &Graph) {
        let named = |kind: &'static str, list: &[Report]| list.iter().map(|r| (kind, r.name.clone(), r.value)).collect::<Vec<_>>();
        let single = |kind: &'static str, v: Option<Value>| v.map(|v| (kind, kind.to_string(), v));
        let reports = [named("loss", &g.losses), named("metric", &g.metrics), named("output", &g.outputs)];
        let reports = reports.into_iter().flatten().chain(single("total_loss", g.loss)).chain(single("grad_norm", g.grad_norm));
        for (kind, name, v) in reports {
            self.operation(None, "report", &[v], &[format!("kind = {}", mlir_quote(kind)), format!("name = {}", mlir_quote(&name))], "unknown");
        }
        for (p, v) in &g.grads {
            self.operation(None, "grad", &[*v], &[format!("param = {p} : i64")], "unknown");
        }
        for u in &g.updates {
            let args: Vec<Value> = u.grad.into_iter().chain([u.new]).chain(u.states.iter().copied()).collect();
            self.operation(None, "update", &args, &[format!("param = {} : i64", u.param)], "unknown");
        }
    }

    /// The module: one operation with the nodes as its region.
    fn finish(self, name: &str, attributes: &[String]) -> String {
        let attributes: Vec<&str> = attributes.iter().map(String::as_str).filter(|a| !a.is_empty()).collect();
        format!(
            "\"builtin.module\"() ({{\n  \"mcc.{name}\"() ({{\n{}    \"mcc.end\"() : () -> () loc(unknown)\n  }}) {{{}}} : () -> () loc(unknown)\n}}) : () -> () loc(unknown)\n",
            self.out,
            attributes.join(", ")
        )
    }
}

fn location(o: &Origin) -> String {
    let place = o.span.map(|s| format!("{}:{}:{}", mlir_quote(&s.file.to_string()), s.line, s.col));
    match (place, &*o.scope) {
        (None, "") => "unknown".into(),
        (None, scope) => mlir_quote(scope),
        (Some(place), "") => place,
        (Some(place), scope) => format!("{}({place})", mlir_quote(scope)),
    }
}

/// What a source of the logical graph is called and holds.
fn source(g: &Graph, op: &Op) -> Vec<String> {
    let none = Rc::default();
    let no_mesh = Mesh { subs: vec![] };
    let found = match op {
        Op::Param(i) | Op::State(i, _) => g.params.get(*i as usize).map(|p| {
            let text = io::attributes(&p.init, &none, &no_mesh, |io, x| io.as_text(x, init));
            (&p.name, Some(("init", text)))
        }),
        Op::Input(i) => g.inputs.get(*i as usize).map(|x| {
            let text = x.default.as_ref().map(|f| io::attributes(f, &none, &no_mesh, |io, x| io.as_text(x, feed)));
            (&x.name, text.map(|t| ("default", t)))
        }),
        Op::Table(i) => g.tables.get(*i as usize).map(|t| (&t.name, None)),
        // The attributes of all other ops are complete without the graph.
        _ => None,
    };
    let Some((name, more)) = found else { return vec![] };
    let mut out = vec![format!("name = {}", mlir_quote(name))];
    out.extend(more.map(|(key, text)| format!("{key} = {text}")));
    out
}

fn mesh_attributes(mesh: &Mesh) -> [String; 2] {
    let names: Vec<String> = mesh.subs.iter().map(|s| mlir_quote(&format!("{}.{}", s.axis, s.factor))).collect();
    let sizes: Vec<String> = mesh.subs.iter().map(|s| format!("{} : i64", s.size)).collect();
    [format!("mesh_axes = [{}]", names.join(", ")), format!("mesh_sizes = [{}]", sizes.join(", "))]
}

/// The logical graph.
pub fn export_graph(g: &Graph) -> String {
    let mesh = Mesh { subs: vec![] };
    let mut m = ModuleWriter::new(&g.body, &mesh);
    m.nodes(|_, _, node| source(g, &node.op));
    m.ends(g);
    m.finish("graph", &[format!("name = {}", mlir_quote(&g.name)), format!("layers = {} : i64", g.layers)])
}

/// The sharded graph: `sharding` per value, `reason` and `avoided_by` per reshard.
pub fn export_sharded(s: &Sharded) -> String {
    let mut m = ModuleWriter::new(&s.graph.body, &s.mesh);
    m.nodes(|m, v, node| {
        let mut all = source(&s.graph, &node.op);
        all.extend(s.shardings.get(v.index()).map(|x| format!("sharding = {}", m.sharding(x))));
        all.extend(reason(&s.reasons, v));
        all
    });
    m.ends(&s.graph);
    let [axes, sizes] = mesh_attributes(&s.mesh);
    m.finish("sharded", &[format!("name = {}", mlir_quote(&s.graph.name)), axes, sizes])
}

/// A rank's graph: `chunk`, `accumulate`, `reason` and `avoided_by` per node.
pub fn export_local(l: &Local) -> String {
    let mut m = ModuleWriter::new(&l.body, &l.mesh);
    m.nodes(|_, v, _| {
        let mut all = vec![];
        all.extend(l.chunks.get(v.index()).map(|c| format!("chunk = {}", mlir_quote(c.name()))));
        all.extend(l.accumulate.get(v.index()).filter(|a| **a).map(|_| "accumulate".into()));
        all.extend(l.source.get(v.index()).and_then(Option::as_ref).map(|(v, _)| format!("holds = {} : i64", v.0)));
        all.extend(reason(&l.reasons, v));
        all
    });
    for (r, v) in &l.reports {
        m.operation(None, "report", &[*v], &[format!("report = {r} : i64")], "unknown");
    }
    for u in &l.updates {
        let args: Vec<Value> = std::iter::once(u.new).chain(u.states.iter().copied()).collect();
        m.operation(None, "update", &args, &[format!("slot = {} : i64", u.slot)], "unknown");
    }
    let stages: Vec<String> = l.stages.iter().map(|s| format!("{} : i64", s.0)).collect();
    let [axes, sizes] = mesh_attributes(&l.mesh);
    m.finish("local", &[format!("stages = [{}]", stages.join(", ")), axes, sizes])
}

fn reason(reasons: &[Option<Reason>], v: Value) -> Vec<String> {
    let Some(reason) = reasons.get(v.index()).and_then(Option::as_ref) else { return vec![] };
    let avoided = reason.avoided_by.as_ref().map(|a| format!("avoided_by = {}", mlir_quote(io::print(a, avoided_by).trim_end())));
    [format!("reason = {}", mlir_quote(&reason.why))].into_iter().chain(avoided).collect()
}
