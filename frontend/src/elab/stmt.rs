//! Statements.

use super::storage::StorageKind;
use super::value::{Closure, DimEntry, Flow, FrameId, Val};
use super::{Elab, MORE_STACK, RED_ZONE};
use crate::ast::*;
use ir::diag::{Diagnostic, Span};
use ir::graph::{OF_EVERY_STEP, Report};
use ir::op::{DType, Op};
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
            StmtKind::Input { names, ty, value, attributes } => self.input(frame, names, ty, value.as_ref(), attributes),
            StmtKind::Param(storage) => self.stored(frame, storage, StorageKind::Trained),
            StmtKind::State(storage) => self.stored(frame, storage, StorageKind::State),
            StmtKind::Update { name, value } => self.update(frame, name, value),
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
                let free = name.as_ref().is_none_or(|n| self.names_report(n, Scalar::Loss));
                let name = name.as_ref().map_or("loss", |n| &n.name).to_string();
                if let (true, Some(value)) = (free, self.scalar(frame, value, Scalar::Loss)) {
                    self.losses.push(Report { name, value });
                }
            }
            StmtKind::Metric { name, value } => {
                if let (true, Some(value)) = (self.names_report(name, Scalar::Metric), self.scalar(frame, value, Scalar::Metric)) {
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
            // `generate` is accepted and its names are resolved, but it has no effect yet.
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
            (1, val) if !matches!(val, Val::Tuple(_)) => vec![val],
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
                    // It is unknown which branch is taken, so all names that any branch declares are declared. No
                    // further errors follow then.
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
            self.report(e.label(repeat.count.span, "at least 0").help("0 leaves the block out"));
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
            let (declared, failures) = (self.frames[frame.0].declared.len(), self.failures);
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
            // An error in one iteration would be the same in all others.
            if !matches!(flow, Flow::Next) || self.failures > failures {
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
        let begins = match (first, &var.val) {
            (Val::Int(_) | Val::Real(_), Val::Tensor(v)) => Some(self.shape(&self.body[*v].ty.dims)),
            _ => None,
        };
        self.report(e.help(match begins {
            Some(dims) => format!("what `repeat` carries keeps its dims; let `{name}` begin as a tensor: `expand(0.0, {dims})`"),
            None => format!("what `repeat` carries keeps its dims and dtype; give the result its own name, or bring it back to {then}"),
        }));
        if let Some(var) = self.frames[frame.0].vars.get_mut(name) {
            var.val = Val::Bad;
        }
        false
    }

    /// Whether a loss or metric may have a name: it is none that a run has of itself, and no other report's;
    /// losses of equal name add up.
    fn names_report(&mut self, name: &Ident, what: Scalar) -> bool {
        let kind = if what == Scalar::Loss { "loss" } else { "metric" };
        let e = |text: String| Diagnostic::error("E0411", text);
        if OF_EVERY_STEP.contains(&&*name.name) {
            let e =
                e(format!("`{}` is what a run reports of every step by itself", name.name)).label(name.span, format!("a {kind} needs another name"));
            self.report(e);
            return false;
        }
        let adds = what == Scalar::Loss && self.losses.iter().any(|r| *r.name == *name.name);
        let first = *self.report_spans.entry(name.name.to_string()).or_insert(name.span);
        let taken = [&self.losses, &self.metrics].into_iter().flatten().any(|r| *r.name == *name.name);
        if !taken || adds {
            return true;
        }
        let e = e(format!("two reports are called `{}`", name.name)).label(name.span, "second time");
        self.report(if first == name.span {
            e.help("what is repeated reports once: carry a sum through it (`total = total + ..`), and report that behind it")
        } else {
            e.label(first, "first time").help("give each a name of its own; losses of one name add up")
        });
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
}

#[derive(Clone, Copy, PartialEq)]
enum Scalar {
    Loss,
    Metric,
}
