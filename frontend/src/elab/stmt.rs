//! Statements.

use super::value::{Closure, DimEntry, Flow, FrameId, Val};
use super::{Elab, MORE_STACK, RED_ZONE};
use crate::ast::*;
use ir::diag::{Diagnostic, Span};
use ir::graph::{Feed, Input, Report, Type};
use ir::op::{DType, Op, Real};
use std::rc::Rc;

impl Elab<'_> {
    /// Runs statements in order until one returns.
    pub fn exec_block(&mut self, frame: FrameId, stmts: &[Stmt]) -> Flow {
        stacker::maybe_grow(RED_ZONE, MORE_STACK, || {
            for stmt in stmts {
                if !self.step(stmt.span) {
                    return Flow::Stop;
                }
                match self.exec(frame, stmt) {
                    Flow::Next => {}
                    flow => return flow,
                }
            }
            Flow::Next
        })
    }

    fn exec(&mut self, frame: FrameId, stmt: &Stmt) -> Flow {
        let before = (self.origin.span, self.user_span);
        if !self.in_library(stmt.span) {
            self.origin.span = Some(stmt.span);
            self.user_span = Some(stmt.span);
        }
        let flow = self.exec_kind(frame, stmt);
        (self.origin.span, self.user_span) = before;
        flow
    }

    fn exec_kind(&mut self, frame: FrameId, stmt: &Stmt) -> Flow {
        match &stmt.kind {
            StmtKind::Dim(items) => {
                for (name, size) in items {
                    self.declare_dim(frame, name, size.as_ref());
                }
            }
            StmtKind::Let { names, value } => {
                let val = self.eval(frame, value);
                for (name, val) in self.spread(names, val, value.span) {
                    self.declare(frame, name, val);
                }
            }
            StmtKind::Assign { names, value } => {
                let val = self.eval(frame, value);
                for (name, val) in self.spread(names, val, value.span) {
                    self.assign(frame, name, val, value.span);
                }
            }
            StmtKind::Fn(function) => {
                let closure = Closure { function: function.clone(), env: frame };
                self.frames[frame.0].fns.insert(function.name.name.clone(), closure);
            }
            StmtKind::Input { names, ty, value } => self.input(frame, names, ty, value.as_ref()),
            StmtKind::Param(storage) => self.param(frame, storage),
            StmtKind::State(storage) => {
                let e = Diagnostic::error("E0903", "`state` is not supported yet").label(stmt.span, "kept between steps");
                self.report(e.help("parameters that train are `param`"));
                for name in &storage.names {
                    self.declare(frame, name, Val::Bad);
                }
            }
            StmtKind::Update { .. } => {
                self.report(Diagnostic::error("E0903", "`update` is not supported yet").label(stmt.span, "changes a state"));
            }
            StmtKind::If(branch) => return self.branch(frame, branch),
            StmtKind::Repeat(repeat) => return self.repeat(frame, repeat),
            StmtKind::Return(values) => {
                let vals = values.iter().map(|v| self.eval(frame, v)).collect();
                return Flow::Return(vals, stmt.span);
            }
            StmtKind::Call(call) => {
                let val = self.eval(frame, call);
                let empty = matches!(&val, Val::Bad) || matches!(&val, Val::Tuple(items) if items.is_empty());
                if !empty && !self.in_library(call.span) {
                    let e = Diagnostic::warning("W0402", "the result of this call is not used").label(call.span, "computes a value");
                    self.report(e.help("did you forget `let y =` or `x =` before it?"));
                }
            }
            StmtKind::Loss { name, value } => {
                let name = name.as_ref().map_or("loss", |n| &n.name).to_string();
                if let Some(value) = self.scalar(frame, value, Scalar::Loss) {
                    self.losses.push(Report { name, value });
                }
            }
            StmtKind::Metric { name, value } => {
                if let Some(value) = self.scalar(frame, value, Scalar::Metric) {
                    self.metrics.push(Report { name: name.name.to_string(), value });
                }
            }
            StmtKind::Output(names) => {
                for name in names {
                    let val = self.eval_name(frame, &name.name, name.span);
                    if let Some(value) = self.tensor(&val, name.span) {
                        self.outputs.push(Report { name: name.name.to_string(), value });
                    }
                }
            }
            // Accepted: its names are resolved, its meaning comes with generation.
            StmtKind::Generate { .. } => {}
            StmtKind::Bad(names) => {
                for name in names {
                    self.declare(frame, name, Val::Bad);
                }
            }
            StmtKind::Import { .. }
            | StmtKind::Model(_)
            | StmtKind::Train(_)
            | StmtKind::Plan(_)
            | StmtKind::Weights { .. }
            | StmtKind::Setting { .. }
            | StmtKind::Group { .. }
            | StmtKind::Weight { .. } => {}
        }
        if self.stopped { Flow::Stop } else { Flow::Next }
    }

    /// Pairs names with the values of an expression.
    fn spread<'n>(&mut self, names: &'n [Ident], val: Val, span: Span) -> Vec<(&'n Ident, Val)> {
        let vals = match (names.len(), val) {
            (n, Val::Bad) => vec![Val::Bad; n],
            (n, Val::Tuple(items)) if items.len() == n => items,
            (1, val @ (Val::None | Val::Int(_) | Val::Real(_) | Val::Bool(_) | Val::Text(_) | Val::Dim(_) | Val::Dims(_) | Val::Tensor(_))) => {
                vec![val]
            }
            (n, val) => {
                let count = if let Val::Tuple(items) = &val { items.len() } else { 1 };
                let values = if count == 1 { "1 value".to_string() } else { format!("{count} values") };
                let names = if n == 1 { "1 name".to_string() } else { format!("{n} names") };
                let e = Diagnostic::error("E0416", format!("{names} for {values}")).label(span, values);
                self.report(e.help("write one name per value; `_` takes one that is not needed"));
                vec![Val::Bad; n]
            }
        };
        names.iter().zip(vals).collect()
    }

    fn assign(&mut self, frame: FrameId, name: &Ident, val: Val, span: Span) {
        let changed = match self.frames[frame.0].vars.get(&name.name) {
            Some(var) => (self.signature(&var.val) != self.signature(&val)).then_some(span),
            None => {
                let e = match self.lookup(frame, &name.name) {
                    Some(var) => {
                        let e = Diagnostic::error("E0403", format!("`{}` belongs to the text around this function", name.name));
                        e.label(name.span, "cannot be changed here").label(var.span, "declared here").help("return the new value instead")
                    }
                    None => {
                        let e = Diagnostic::error("E0401", format!("`{}` is not declared", name.name)).label(name.span, "changed here");
                        match crate::names::nearest(&name.name, self.frames[frame.0].declared.iter().map(|n| &**n)) {
                            Some(near) => e.help(format!("did you mean `{near}`?")),
                            None => e.help(format!("declare it with `let {} = ..`", name.name)),
                        }
                    }
                };
                self.report(e);
                self.declare(frame, name, Val::Bad);
                return;
            }
        };
        if let Some(var) = self.frames[frame.0].vars.get_mut(&name.name) {
            var.val = val;
            var.changed = changed.or(var.changed);
        }
    }

    fn declare_dim(&mut self, frame: FrameId, name: &Ident, size: Option<&Expr>) {
        let (size, copy_of) = match size.map(|e| (self.eval(frame, e), e.span)) {
            None => (None, None),
            Some((Val::Int(n), _)) => (Some(n), None),
            Some((Val::Dim(d), _)) => (self.dims[d.0].size, Some(d)),
            Some((Val::Bad, _)) => {
                self.declare(frame, name, Val::Bad);
                return;
            }
            Some((other, span)) => {
                let e = Diagnostic::error("E0202", format!("the size of dim `{}` is {}", name.name, other.kind()));
                self.report(e.label(span, "expected an int or a dim"));
                self.declare(frame, name, Val::Bad);
                return;
            }
        };
        if let Some(n) = size.filter(|n| *n <= 0) {
            let e = Diagnostic::error("E0206", format!("dim `{}` has size {n}", name.name)).label(name.span, "a size is at least 1");
            self.report(e);
            self.declare(frame, name, Val::Bad);
            return;
        }
        let dim = self.new_dim(DimEntry { name: name.name.clone(), size, copy_of, span: name.span, ir: None });
        self.declare(frame, name, Val::Dim(dim));
    }

    fn branch(&mut self, frame: FrameId, branch: &If) -> Flow {
        for (i, (cond, then)) in branch.branches.iter().enumerate() {
            match self.eval(frame, cond) {
                Val::Bool(true) => {
                    let others = branch.branches[i + 1..].iter().map(|(_, b)| b).chain(&branch.otherwise);
                    others.for_each(|block| self.skip(frame, block, cond.span));
                    return self.exec_block(frame, &then.stmts);
                }
                Val::Bool(false) => self.skip(frame, then, cond.span),
                Val::Bad => {
                    // Unknown which way: declare what any branch declares, so that nothing follows from this error.
                    let blocks = branch.branches.iter().map(|(_, b)| b).chain(&branch.otherwise);
                    let names: Vec<Ident> = blocks.flat_map(|b| crate::resolve::declared(&b.stmts)).collect();
                    for name in names {
                        self.declare(frame, &name, Val::Bad);
                    }
                    return Flow::Next;
                }
                other => {
                    let e = Diagnostic::error("E0202", format!("this condition is {}", other.kind())).label(cond.span, "expected a static bool");
                    self.report(match other {
                        Val::Tensor(_) => e.help("`where(condition, a, b)` chooses per element"),
                        _ => e.help("compare it: `== 0`, `> 0`, `== none`"),
                    });
                    return Flow::Next;
                }
            }
        }
        match &branch.otherwise {
            Some(block) => self.exec_block(frame, &block.stmts),
            None => Flow::Next,
        }
    }

    /// Remembers what a branch that is not taken would have declared.
    fn skip(&mut self, frame: FrameId, block: &Block, cond: Span) {
        for name in crate::resolve::declared(&block.stmts) {
            self.frames[frame.0].absent.insert(name.name, cond);
        }
    }

    fn repeat(&mut self, frame: FrameId, repeat: &Repeat) -> Flow {
        let count = match self.eval_name(frame, &repeat.count.name, repeat.count.span) {
            Val::Int(n) => n,
            Val::Dim(d) => self.dims[d.0].size.unwrap_or(0),
            Val::Bad => return Flow::Next,
            other => {
                let e = Diagnostic::error("E0202", format!("`{}` is {}", repeat.count.name, other.kind()));
                self.report(e.label(repeat.count.span, "expected an int: how often to repeat"));
                return Flow::Next;
            }
        };
        if count < 0 {
            let e = Diagnostic::error("E0206", format!("`{}` = {count} repetitions", repeat.count.name));
            self.report(e.label(repeat.count.span, "at least 0"));
            return Flow::Next;
        }
        let segment = repeat.alias.as_ref().unwrap_or(&repeat.count).name.clone();
        let outer_layer = self.origin.layer;
        let base = self.layers;
        let mut carried = crate::resolve::assigned(&repeat.body.stmts);
        carried.retain(|name| self.frames[frame.0].vars.contains_key(name));
        let before: Vec<Val> = carried.iter().map(|n| self.frames[frame.0].vars[n].val.clone()).collect();
        let mut flow = Flow::Next;
        for i in 0..count {
            if !self.step(repeat.count.span) {
                return Flow::Stop;
            }
            if outer_layer.is_none() {
                let layer = base.saturating_add(u32::try_from(i).unwrap_or(u32::MAX));
                self.origin.layer = Some(layer);
                self.layers = layer.saturating_add(1);
            }
            let declared = self.frames[frame.0].declared.len();
            let index: Rc<str> = i.to_string().into();
            flow = self.in_segment(&[segment.clone(), index], |elab| {
                if outer_layer.is_none() {
                    elab.cut(frame, &carried);
                }
                if let Some(counter) = &repeat.counter {
                    elab.declare(frame, counter, Val::Int(i));
                }
                elab.exec_block(frame, &repeat.body.stmts)
            });
            let own = self.frames[frame.0].declared.split_off(declared);
            for name in own {
                self.frames[frame.0].vars.remove(&name);
            }
            if !matches!(flow, Flow::Next) {
                break;
            }
            let mut same = true;
            for (name, first) in carried.iter().zip(&before) {
                same &= self.check_carried(frame, name, first, repeat);
            }
            if !same {
                break;
            }
        }
        self.origin.layer = outer_layer;
        if outer_layer.is_none() && count > 0 && matches!(flow, Flow::Next) {
            self.cut(frame, &carried);
        }
        flow
    }

    /// Puts an identity on each carried tensor: the border between two iterations.
    fn cut(&mut self, frame: FrameId, carried: &[Rc<str>]) {
        for name in carried {
            if let Some(Val::Tensor(v)) = self.frames[frame.0].vars.get(name).map(|v| v.val.clone()) {
                let ty = self.body[v].ty.clone();
                let cut = self.push(Op::Cut, vec![v], ty);
                if let Some(var) = self.frames[frame.0].vars.get_mut(name) {
                    var.val = Val::Tensor(cut);
                }
            }
        }
    }

    fn check_carried(&mut self, frame: FrameId, name: &str, first: &Val, repeat: &Repeat) -> bool {
        let Some(var) = self.frames[frame.0].vars.get(name).cloned() else { return true };
        let (now, then) = (self.signature(&var.val), self.signature(first));
        if now == then || matches!(var.val, Val::Bad) || matches!(first, Val::Bad) {
            return true;
        }
        let e = Diagnostic::error("E0415", format!("`{name}` changes from one iteration to the next: {then} at the start, {now} at the end"));
        let e = e.label(var.changed.unwrap_or(repeat.count.span), format!("becomes {now} here"));
        let e = e.label(repeat.count.span, format!("every iteration of `{}` begins with the `{name}` of the one before", repeat.count.name));
        self.report(e.help(format!("what `repeat` carries keeps its dims and dtype; give the result its own name, or bring it back to {then}")));
        if let Some(var) = self.frames[frame.0].vars.get_mut(name) {
            var.val = Val::Bad;
        }
        false
    }

    /// A scalar tensor to be reported.
    fn scalar(&mut self, frame: FrameId, expr: &Expr, what: Scalar) -> Option<ir::graph::Value> {
        let val = self.eval(frame, expr);
        let value = self.tensor(&val, expr.span)?;
        let ty = self.body[value].ty.clone();
        if !ty.dims.is_empty() {
            let (what, help) = match what {
                Scalar::Loss => ("a loss", "`mean(..)`, or `token_loss(..)` if some labels do not count"),
                Scalar::Metric => ("a metric", "`mean(..)`, `sum(..)` or `max(..)`"),
            };
            let shape = self.shape(&ty.dims);
            let e = Diagnostic::error("E0501", format!("{what} is one number, this has {shape}")).label(expr.span, format!("has {shape}"));
            self.report(e.help(help));
            return None;
        }
        Some(self.cast(value, DType::F32))
    }

    fn input(&mut self, frame: FrameId, names: &[Ident], ty: &TypeExpr, value: Option<&Expr>) {
        let ty = self.declared_type(frame, ty);
        for name in names {
            let Some(ty) = ty.clone() else {
                self.declare(frame, name, Val::Bad);
                continue;
            };
            if self.inputs.iter().any(|i| i.name == *name.name) {
                let e = Diagnostic::error("E0411", format!("input `{}` is declared twice", name.name)).label(name.span, "again");
                self.report(e.help("an input has one name in the whole model; rename one of them"));
                self.declare(frame, name, Val::Bad);
                continue;
            }
            let default = value.and_then(|v| self.feed(frame, v, &ty));
            let number = self.inputs.len() as u32;
            self.inputs.push(Input { name: name.name.to_string(), ty: ty.clone(), default, span: Some(name.span) });
            let value = self.push(Op::Input(number), vec![], ty);
            self.declare(frame, name, Val::Tensor(value));
        }
    }

    /// The default of an input: a number, or a loader function of another input.
    fn feed(&mut self, frame: FrameId, expr: &Expr, ty: &Type) -> Option<Feed> {
        const LOADERS: [&str; 4] = ["next", "prev", "documents", "positions"];
        let ExprKind::Call(call) = &expr.kind else {
            let val = self.eval(frame, expr);
            return match val {
                Val::Bool(b) => Some(Feed::Const(Real(f64::from(u8::from(b))))),
                Val::Bad => None,
                other => match self.real(&other) {
                    Some(x) => Some(Feed::Const(Real(x))),
                    None => {
                        let e = Diagnostic::error("E0202", format!("the default of an input is {}", other.kind()));
                        self.report(e.label(expr.span, "expected a number").help("a number, `next(x)`, `prev(x, first)`, `documents(x, separator)` or `positions(x, separator)`"));
                        None
                    }
                },
            };
        };
        let name = call.path.to_string();
        if !LOADERS.contains(&name.as_str()) {
            let e = Diagnostic::error("E0401", format!("no loader function is called `{name}`")).label(call.path.span(), "unknown");
            let near = crate::names::nearest(&name, LOADERS).map(|n| format!("did you mean `{n}`?"));
            self.report(e.help(near.unwrap_or_else(|| "an input can default to next(x), prev(x, first), documents(x, separator) or positions(x, separator)".into())));
            return None;
        }
        let wanted = if name == "next" { 1 } else { 2 };
        if call.args.len() != wanted || call.args.iter().any(|a| a.to.is_some()) {
            let e = Diagnostic::error("E0409", format!("`{name}` takes {wanted} arguments, has {}", call.args.len()));
            self.report(e.label(expr.span, "in this call"));
            return None;
        }
        let source = self.eval(frame, &call.args[0].value);
        let Val::Tensor(source) = source else {
            if !matches!(source, Val::Bad) {
                let e = Diagnostic::error("E0202", format!("`{name}` reads another input, this is {}", source.kind()));
                self.report(e.label(call.args[0].value.span, "expected an input"));
            }
            return None;
        };
        let Op::Input(from) = self.body[source].op else {
            let e = Diagnostic::error("E0202", format!("`{name}` reads another input, this is computed"));
            self.report(e.label(call.args[0].value.span, "expected an input"));
            return None;
        };
        let given = self.inputs[from as usize].ty.clone();
        if given != *ty {
            let (a, b) = (self.describe(&given), self.describe(ty));
            let e = Diagnostic::error("E0202", format!("`{name}` of {a} is not {b}"));
            self.report(e.label(expr.span, format!("is {a}")).help("an input that derives from another one has its dims and dtype"));
            return None;
        }
        let number = match call.args.get(1) {
            None => 0,
            Some(arg) => match self.eval(frame, &arg.value) {
                Val::Int(n) => n,
                Val::Dim(d) => self.dims[d.0].size.unwrap_or(0),
                Val::Bad => return None,
                other => {
                    let e = Diagnostic::error("E0202", format!("`{name}` wants an int, this is {}", other.kind()));
                    self.report(e.label(arg.value.span, "expected an int"));
                    return None;
                }
            },
        };
        Some(match name.as_str() {
            "next" => Feed::Next(from),
            "prev" => Feed::Prev(from, number),
            "documents" => Feed::Documents(from, number),
            _ => Feed::Positions(from, number),
        })
    }

    fn param(&mut self, frame: FrameId, storage: &Storage) {
        let ty = self.declared_type(frame, &storage.ty);
        let init = self.init(frame, &storage.init);
        let mut decays = true;
        for attribute in &storage.attributes {
            if &*attribute.name == "no_decay" {
                decays = false;
            } else {
                let e = Diagnostic::error("E0401", format!("no attribute is called `@{}`", attribute.name));
                self.report(e.label(attribute.span, "unknown").help("a param can be `@no_decay`"));
            }
        }
        for name in &storage.names {
            let (Some(ty), Some(init)) = (ty.clone(), init) else {
                self.declare(frame, name, Val::Bad);
                continue;
            };
            if !ty.dtype.is_float() {
                let e = Diagnostic::error("E0202", format!("parameter `{}` is {}", name.name, ty.dtype.name()));
                self.report(e.label(storage.ty.span, "only floats train").help("leave the dtype out"));
                self.declare(frame, name, Val::Bad);
                continue;
            }
            let scope = self.scope();
            let full = if scope.is_empty() { name.name.to_string() } else { format!("{scope}.{}", name.name) };
            let place = self.user_span.filter(|_| self.in_library(name.span)).unwrap_or(name.span);
            if let Some(first) = self.param_spans.insert(full.clone(), place) {
                let e = Diagnostic::error("E0411", format!("parameter `{full}` is declared twice")).label(place, "second time");
                let e = if first == place { e } else { e.label(first, "first time") };
                self.report(e.help("give each call a name of its own: `linear(..) as up`; to share a parameter, declare it once and use it twice"));
                self.declare(frame, name, Val::Bad);
                continue;
            }
            let number = self.params.len() as u32;
            self.params.push(ir::graph::Param {
                name: full,
                ty: ty.clone(),
                init,
                decay: decays && ty.dims.len() >= 2,
                lr_scale: Real(1.0),
                frozen: false,
                layer: self.origin.layer,
                span: Some(place),
            });
            let value = self.push(Op::Param(number), vec![], ty);
            self.declare(frame, name, Val::Tensor(value));
        }
    }

    fn init(&mut self, frame: FrameId, init: &Init) -> Option<ir::graph::Init> {
        let (expr, drawn) = match init {
            Init::Drawn(expr) => (expr, true),
            Init::Value(expr) => (expr, false),
        };
        let arg = match &expr.kind {
            ExprKind::Call(call) if drawn && call.path.to_string() == "normal" && call.args.len() == 1 => &call.args[0].value,
            _ if drawn => {
                let e = Diagnostic::error("E0202", "a parameter is drawn from `normal(deviation)`").label(expr.span, "not a distribution");
                self.report(e.help("`~ normal(0.02)`, or `= 0` for a constant"));
                return None;
            }
            ExprKind::Call(call) if call.path.to_string() == "normal" => {
                let e = Diagnostic::error("E0202", "`normal` is a distribution, not a value").label(expr.span, "after `=`");
                self.report(e.help("write `~` instead of `=`"));
                return None;
            }
            _ => expr,
        };
        let val = self.eval(frame, arg);
        match self.real(&val) {
            Some(x) if drawn && x < 0.0 => {
                let e = Diagnostic::error("E0304", format!("a deviation of {x}")).label(arg.span, "at least 0");
                self.report(e);
                None
            }
            Some(x) if drawn => Some(ir::graph::Init::Normal(Real(x))),
            Some(x) => Some(ir::graph::Init::Const(Real(x))),
            None => {
                if !matches!(val, Val::Bad) {
                    let e = Diagnostic::error("E0202", format!("a parameter starts as a number, this is {}", val.kind()));
                    self.report(e.label(arg.span, "expected a static number"));
                }
                None
            }
        }
    }
}

#[derive(Clone, Copy)]
enum Scalar {
    Loss,
    Metric,
}
