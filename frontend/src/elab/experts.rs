//! Mixtures of experts: choosing, dispatching rows to experts and combining what comes back, and the dims of it all.

use super::Elab;
use super::prims::Args;
use super::value::{DimEntry, DimId, Val};
use ir::diag::Diagnostic;
use ir::dim::{Dim, DimInfo};
use ir::graph::{Body, Graph, Type, Value};
use ir::op::{Binary, Compare, DType, Op, Real, Reduce, Routing};
use std::collections::HashMap;

impl Elab<'_> {
    /// `top_k(x, over: d, k: n)`: the n greatest elements along d, greatest first, and their indices (i32). Among
    /// equals the lowest index comes first.
    ///
    /// By ranks: an element's rank is how many come before it, and element j of the result is the one of rank j.
    /// Ranks have no gradient; the values' goes to the elements picked.
    pub fn top_k(&mut self, args: &Args) -> Val {
        let (Some(x), Some(over_id), Some(k_id)) = (self.tensor_arg(args, 0), self.one_dim(args, 1), self.one_dim(args, 2)) else { return Val::Bad };
        let Some(over) = self.require(x, over_id, args.span(0), args.span(1)) else { return Val::Bad };
        let Some(k) = self.ir_dim(k_id, args.span(2)) else { return Val::Bad };
        let ty = self.ty(x).clone();
        if ty.dtype == DType::Bool {
            let e = Diagnostic::error("E0202", "`top_k` of a bool").label(args.span(0), "is bool").help("`f32(..)` makes 0 and 1 of it");
            return self.fail(e);
        }
        if ty.has(k) {
            let name = self.body.dims.name(k).to_string();
            let e = Diagnostic::error("E0209", format!("the value has a dim `{name}` already")).label(args.span(2), "would be there twice");
            return self.fail(e.label(args.span(0), format!("has {}", self.shape(&ty.dims))).help(format!("`dim picked = {name};` is another dim")));
        }
        let (size, wanted) = (self.body.dims.size(over), self.body.dims.size(k));
        if wanted > size {
            let e = Diagnostic::error("E0210", format!("the {wanted} greatest of {} = {size} elements", self.body.dims.name(over)));
            return self.fail(e.label(args.span(2), format!("{size} at most")));
        }
        let rank = self.ranks(x, over_id, over);
        let place = self.push(Op::Iota(k), vec![], Type::new(DType::I32, [k]));
        let with_k: Vec<Dim> = ty.dims.iter().copied().filter(|d| *d != over).chain([k, over]).collect();
        let here = self.push(Op::Compare(Compare::Eq), vec![rank, place], Type::new(DType::Bool, with_k.clone()));
        let index = self.push(Op::Iota(over), vec![], Type::new(DType::I32, [over]));
        let mut pick = |from: Value, kind: Reduce| {
            let dtype = self.ty(from).dtype;
            let zero = self.constant(0.0, dtype);
            let alone = self.push(Op::Select, vec![here, from, zero], Type::new(dtype, with_k.clone()));
            Val::Tensor(self.reduced(alone, kind, vec![over]))
        };
        // Among NaN elements, several may have one rank. The greatest of their indices is still an index.
        Val::Tuple(vec![pick(x, Reduce::Sum), pick(index, Reduce::Max)])
    }

    /// For each element, how many come before it along `over`: greater ones, and equal ones of lower index.
    fn ranks(&mut self, x: Value, over_id: DimId, over: Dim) -> Value {
        let ty = self.ty(x).clone();
        let info = self.dims[over_id.0].clone();
        let copy = self.new_dim(DimEntry { name: "rival".into(), copy_of: Some(over_id), ir: None, ..info });
        let rival = self.body.dims.add(DimInfo { copy_of: Some(over), ..DimInfo::new("rival", self.body.dims.size(over)) });
        self.declared.push(copy);
        self.dims[copy.0].ir = Some(rival);
        let other = self.push(Op::View { from: vec![over], to: vec![rival] }, vec![x], Type::new(ty.dtype, vec![]));
        let both: Vec<Dim> = ty.dims.iter().copied().chain([rival]).collect();
        let wide = Type::new(DType::Bool, both.clone());
        let mut compare = |op: Compare, a: Value, b: Value, ty: Type| self.push(Op::Compare(op), vec![a, b], ty);
        let greater = compare(ir::fault!("elaborate.top_k.order", Compare::Lt, Compare::Gt), other, x, wide.clone());
        let equal = compare(Compare::Eq, other, x, wide.clone());
        let (a, b) =
            (self.push(Op::Iota(rival), vec![], Type::new(DType::I32, [rival])), self.push(Op::Iota(over), vec![], Type::new(DType::I32, [over])));
        let lower =
            self.push(Op::Compare(ir::fault!("elaborate.top_k.ties", Compare::Gt, Compare::Lt)), vec![a, b], Type::new(DType::Bool, [over, rival]));
        let tie = self.push(Op::Binary(Binary::And), vec![equal, lower], wide.clone());
        let before = self.push(Op::Binary(Binary::Or), vec![greater, tie], wide);
        let count = self.cast(before, DType::I32);
        self.reduced(count, Reduce::Sum, vec![rival])
    }

    /// `dispatch(x, to, over: [tokens.., k], into: [experts, slot])`: rows of x to the experts that `to` names along
    /// k.
    pub fn dispatch(&mut self, args: &Args) -> Val {
        let Some((x, chosen, routing)) = self.routed(args, "dispatch") else { return Val::Bad };
        if self.ty(x).has(routing.experts) {
            let name = self.body.dims.name(routing.experts).to_string();
            let e = Diagnostic::error("E0209", format!("the value has a dim `{name}` already")).label(args.span(3), "would be there twice");
            return self.fail(e.label(args.span(0), format!("has {}", self.shape(&self.ty(x).dims))));
        }
        Val::Tensor(self.push(Op::Dispatch(routing), vec![x, chosen], Type::new(self.ty(x).dtype, vec![])))
    }

    /// `combine(y, to, over: [tokens.., k], from: [experts, slot])`: rows of y back from the experts that `to` names
    /// along k.
    pub fn combine(&mut self, args: &Args) -> Val {
        let Some((y, chosen, routing)) = self.routed(args, "combine") else { return Val::Bad };
        let Some(id) = self.experts(args).map(|e| e.0) else { return Val::Bad };
        if self.require(y, id, args.span(0), args.span(3)).is_none() {
            return Val::Bad;
        }
        Val::Tensor(self.push(Op::Combine(routing), vec![y, chosen], Type::new(self.ty(y).dtype, vec![])))
    }

    /// The two dims of `[experts, slot]`.
    fn experts(&mut self, args: &Args) -> Option<(DimId, DimId)> {
        match args.val(3) {
            Val::Dims(ds) if ds.len() == 2 => Some((ds[0], ds[1])),
            Val::Bad => None,
            other => {
                let e = Diagnostic::error("E0202", format!("expected two dims, this is {}", self.said(other)));
                self.report(e.label(args.span(3), "not `[experts, slot]`").help("`dim slot;` has as many rows per expert as come"));
                None
            }
        }
    }

    /// The value, the choices (without those that a full expert drops) and the dims of a routing.
    fn routed(&mut self, args: &Args, what: &str) -> Option<(Value, Value, Routing)> {
        let (x, chosen) = (self.tensor_arg(args, 0), self.tensor_arg(args, 1));
        let (x, chosen) = (x?, chosen?);
        if self.ty(chosen).dtype != DType::I32 {
            let e = Diagnostic::error("E0202", format!("choices are i32, this is {}", self.describe(self.ty(chosen))));
            self.report(e.label(args.span(1), "expected the indices of `top_k`"));
            return None;
        }
        let (experts, slot) = self.experts(args)?;
        let over = match args.val(2) {
            Val::Dim(d) => vec![*d],
            Val::Dims(ds) => ds.clone(),
            other => {
                let e = Diagnostic::error("E0202", format!("`over` wants dims, this is {}", self.said(other)));
                self.report(e.label(args.span(2), "not dims").help("`over: [batch, seq, k]`"));
                return None;
            }
        };
        let mut rows = vec![];
        for id in over {
            rows.push(self.require(chosen, id, args.span(1), args.span(2))?);
        }
        let own = self.ty(x).dims.clone();
        let lacking: Vec<Dim> = rows.iter().copied().filter(|d| !own.contains(d)).collect();
        let &[choice] = lacking.as_slice() else {
            let e = Diagnostic::error("E0213", format!("`{what}` finds {} dims of choices in `over`", lacking.len()));
            let e = e.label(args.span(2), "one of these dims tells a token's choices apart");
            let e = e.label(args.span(0), format!("has {}, so the choices are {}", self.shape(&own), self.shape(&lacking)));
            self.report(e.help("`over` has the dims of tokens, which the value has too, and the dim of choices, which it lacks"));
            return None;
        };
        if let Some(d) = self.ty(chosen).dims.iter().find(|d| **d != choice && !own.contains(d)) {
            let name = self.body.dims.name(*d).to_string();
            let e = Diagnostic::error("E0201", format!("dim `{name}` of the choices is not in this value")).label(args.span(0), "lacks it");
            self.report(e.label(args.span(1), format!("has {}", self.shape(&self.ty(chosen).dims))));
            return None;
        }
        let routing = Routing { experts: self.ir_dim(experts, args.span(3))?, choice };
        if self.ty(chosen).has(routing.experts) {
            let name = self.body.dims.name(routing.experts).to_string();
            let e = Diagnostic::error("E0209", format!("the choices have a dim `{name}` themselves"))
                .label(args.span(1), "numbers of experts have no such dim");
            self.report(e);
            return None;
        }
        let chosen = match self.dims[slot.0].size {
            None => chosen,
            Some(capacity) => {
                rows.retain(|d| *d != choice);
                self.limited(chosen, &rows, routing, capacity)
            }
        };
        Some((x, chosen, routing))
    }

    /// The choices, with -1 for those beyond an expert's first `capacity` rows, in order of their tokens' indices
    /// along `tokens`.
    fn limited(&mut self, chosen: Value, tokens: &[Dim], r: Routing, capacity: i64) -> Value {
        let ty = self.ty(chosen).clone();
        let number = self.push(Op::Iota(r.experts), vec![], Type::new(DType::I32, [r.experts]));
        let wide: Vec<Dim> = ty.dims.iter().copied().chain([r.experts]).collect();
        let named = self.push(Op::Compare(Compare::Eq), vec![chosen, number], Type::new(DType::Bool, wide));
        let ones = self.cast(named, DType::I32);
        let mut count = self.reduced(ones, Reduce::Sum, vec![r.choice]);
        // Rows before a token's own are those of tokens before it along the innermost dim, plus all rows of earlier
        // indices along outer dims.
        let mut before: Option<Value> = None;
        for d in tokens.iter().rev() {
            let ty = self.ty(count).clone();
            let up_to = self.push(Op::Cumsum { over: *d, reverse: false }, vec![count], ty);
            let earlier = ir::fault!("elaborate.capacity.own", up_to, self.binary(Binary::Sub, up_to, count));
            before = Some(match before {
                None => earlier,
                Some(inner) => self.add(inner, earlier),
            });
            count = self.reduced(count, Reduce::Sum, vec![*d]);
        }
        let Some(before) = before else { return chosen };
        let at = self.push(Op::Gather { dim: r.experts }, vec![before, chosen], Type::new(DType::I32, vec![]));
        let limit = self.constant(capacity as f64, DType::I32);
        let fits = self.compare(Compare::Lt, at, limit);
        let none = self.push(Op::Const(Real(-1.0)), vec![], Type::scalar(DType::I32));
        self.push(Op::Select, vec![fits, chosen, none], ty)
    }
}

/// Gives what routers do with the experts a dim of its own, which no axis splits: a plan's `experts` are those that
/// rows go to.
///
/// Values that have the dim of a routing, or a copy of it, fall into classes that ops connect. Classes with a
/// dispatched or combined value keep the dim; the others get another one of the same name.
pub fn separate_routers(graph: &mut Graph) {
    let body = &graph.body;
    let mut routed: Vec<Dim> = body
        .nodes
        .iter()
        .filter_map(|n| match n.op {
            Op::Dispatch(r) | Op::Combine(r) => Some(body.dims.original(r.experts)),
            _ => None,
        })
        .collect();
    routed.sort_unstable();
    routed.dedup();
    for experts in routed {
        separate(graph, experts);
    }
}

fn separate(graph: &mut Graph, experts: Dim) {
    let body = &graph.body;
    let family: Vec<Dim> = body.dims.ids().filter(|d| body.dims.original(*d) == experts).collect();
    let has = |v: Value| body.dims_of(v).iter().any(|d| family.contains(d));
    let mut class = Classes((0..body.nodes.len()).collect());
    let mut of_param: HashMap<u32, Value> = HashMap::new();
    for v in body.values().filter(|v| has(*v)) {
        if let Op::Param(p) = body[v].op {
            class.join(v, *of_param.entry(p).or_insert(v));
        }
    }
    for v in body.values() {
        let mut related: Vec<Value> = body[v].args.iter().copied().filter(|a| has(*a)).collect();
        related.extend(has(v).then_some(v));
        related.windows(2).for_each(|w| class.join(w[0], w[1]));
    }
    let mut stays = vec![false; body.nodes.len()];
    for v in body.values() {
        match body[v].op {
            Op::Dispatch(_) => stays[class.of(v)] = true,
            Op::Combine(_) => stays[class.of(body[v].args[0])] = true,
            _ => {}
        }
    }
    let leaves: Vec<bool> = body.values().map(|v| has(v) && !stays[class.of(v)]).collect();
    if !leaves.contains(&true) {
        return;
    }
    let mut new: HashMap<Dim, Dim> = HashMap::new();
    for d in &family {
        let info = &graph.body.dims[*d];
        let copy_of = info.copy_of.map(|o| *new.get(&o).unwrap_or(&o));
        let info = DimInfo { whole: ir::fault!("elaborate.routers.split", false, true), copy_of, ..info.clone() };
        new.insert(*d, graph.body.dims.add(info));
    }
    let mut renamed = |d: Dim| *new.get(&d).unwrap_or(&d);
    let Graph { body: Body { nodes, .. }, params, inputs, .. } = graph;
    for i in 0..nodes.len() {
        // An op that removes a dim names it as its operand does.
        let names = leaves[i] || nodes[i].args.iter().any(|a| leaves[a.index()]) && !matches!(nodes[i].op, Op::Dispatch(_) | Op::Combine(_));
        if names {
            nodes[i].op = nodes[i].op.map_dims(&mut renamed);
        }
        if leaves[i] {
            nodes[i].ty.dims.iter_mut().for_each(|d| *d = renamed(*d));
            match nodes[i].op {
                Op::Param(p) => params[p as usize].ty = nodes[i].ty.clone(),
                Op::Input(n) => inputs[n as usize].ty = nodes[i].ty.clone(),
                _ => {}
            }
        }
    }
}

/// Disjoint sets of values.
struct Classes(Vec<usize>);

impl Classes {
    fn of(&mut self, v: Value) -> usize {
        let mut at = v.index();
        while self.0[at] != at {
            self.0[at] = self.0[self.0[at]];
            at = self.0[at];
        }
        at
    }

    fn join(&mut self, a: Value, b: Value) {
        let (a, b) = (self.of(a), self.of(b));
        self.0[a.max(b)] = a.min(b);
    }
}
