//! Calls of functions: binding arguments, checking types, inlining the body.

use super::value::{Closure, DimId, Flow, FrameId, Val, Var, is_reals};
use super::{Elab, MAX_CALLS};
use crate::ast::*;
use crate::names::nearest;
use ir::diag::{Diagnostic, Span};
use ir::dim::Dim;
use ir::graph::{Type, Value};
use ir::op::DType;
use std::rc::Rc;
use std::sync::Arc;

/// An argument, evaluated where it was written.
pub struct BoundArgument {
    pub val: Val,
    pub span: Span,
}

/// A function call with its arguments bound, before its body runs.
pub struct BoundCall {
    pub closure: Closure,
    pub frame: FrameId,
}

impl Elab<'_> {
    pub fn call(&mut self, frame: FrameId, call: &Call, span: Span) -> Val {
        let before = self.user_span;
        if !self.in_library(span) {
            self.user_span = Some(span);
        }
        // If an argument did not parse, it is unknown what it was and what the call would lack without it.
        let unread = call.args.iter().any(|a| matches!(a.value.kind, ExprKind::Bad));
        let val = match self.callee(frame, &call.path).filter(|_| !unread) {
            Some(Callee::Function(closure)) => self.call_function(frame, call, closure, span),
            Some(Callee::Primitive) => {
                if let Some(alias) = &call.alias {
                    let e = Diagnostic::error("E0409", format!("`{}` owns no parameters that `as` could name", call.path));
                    self.report(e.label(alias.span, "not needed").help("remove the `as`"));
                }
                self.primitive(frame, call, span)
            }
            None => {
                // The arguments are evaluated to report their own errors.
                for arg in &call.args {
                    self.eval(frame, &arg.value);
                }
                Val::Bad
            }
        };
        self.user_span = before;
        val
    }

    fn callee(&mut self, frame: FrameId, path: &Path) -> Option<Callee> {
        let name = &path.parts[path.parts.len() - 1];
        let start = match path.parts.as_slice() {
            [_] => Some(frame),
            [module, _] => self.module(frame, &module.name),
            _ => None,
        };
        let mut at = start;
        while let Some(id) = at {
            if let Some(closure) = self.frames[id.0].fns.get(&name.name) {
                return Some(Callee::Function(closure.clone()));
            }
            // A module gives access to its functions only, not to what its file can see.
            at = if path.parts.len() == 1 { self.frames[id.0].parent } else { None };
        }
        if path.parts.len() == 1 && super::prims::is_primitive(&name.name) {
            return Some(Callee::Primitive);
        }
        if path.parts.len() == 1 && matches!(self.lookup(frame, &name.name), Some(var) if matches!(var.val, Val::Bad)) {
            return None;
        }
        let mut names: Vec<Rc<str>> = vec![];
        let mut at = start;
        while let Some(id) = at {
            names.extend(self.frames[id.0].fns.keys().cloned());
            at = self.frames[id.0].parent;
        }
        names.sort();
        let near = nearest(&name.name, names.iter().map(|n| &**n).chain(super::prims::PRIMITIVES.iter().copied()));
        let e = Diagnostic::error("E0401", format!("no function is called `{path}`")).label(path.span(), "unknown function");
        let e = match near {
            Some(near) => e.help(format!("did you mean `{near}`?")),
            None if start.is_none() => e.help(format!("`import \"file.mdl\" as {};` makes a file's functions known", path.parts[0].name)),
            None => {
                e.help("define it above with `fn`, or look for it in docs/library.md; functions of a file imported with `as m` are called `m.name`")
            }
        };
        self.report(e);
        None
    }

    fn module(&self, frame: FrameId, name: &str) -> Option<FrameId> {
        let mut at = Some(frame);
        while let Some(id) = at {
            if let Some(module) = self.frames[id.0].modules.get(name) {
                return Some(*module);
            }
            at = self.frames[id.0].parent;
        }
        None
    }

    fn call_function(&mut self, frame: FrameId, call: &Call, closure: Closure, span: Span) -> Val {
        // Functions are no values, so nothing refers to a call's scope after its end.
        let frames = self.frames.len();
        let val = self.enter_and_run(frame, call, closure, span);
        self.frames.truncate(frames);
        val
    }

    fn enter_and_run(&mut self, frame: FrameId, call: &Call, closure: Closure, span: Span) -> Val {
        // Arguments belong to the caller's segment; only the body is inside of `as`.
        let Some(entered) = self.enter(frame, call, closure, span) else { return Val::Bad };
        if self.calls.len() >= MAX_CALLS {
            let mut chain: Vec<String> = self.calls.iter().rev().take(4).map(|n| n.to_string()).collect();
            chain.reverse();
            let name = &entered.closure.function.name;
            let e = Diagnostic::error("E0901", format!("calls are nested more than {MAX_CALLS} deep: .. {} -> {}", chain.join(" -> "), name.name));
            let e = e.label(span, "one call too many").label(name.span, "this function");
            self.stop(e.help("a function that calls itself needs a static condition that ends it: `if levels == 0 { return x; }`"));
            return Val::Bad;
        }
        let name = entered.closure.function.name.name.clone();
        let (within, offloaded) = (self.origin.within.clone(), self.origin.offloaded);
        let names = std::iter::once(&name).chain(call.alias.iter().map(|a| &a.name));
        for name in names {
            if self.recomputed.contains(name) {
                self.origin.within.get_or_insert_with(|| Arc::from(&**name));
            }
            self.origin.offloaded |= self.options.offload.iter().any(|n| **n == **name);
            if !self.called.contains(name) {
                self.called.insert(name.clone());
            }
        }
        self.calls.push(name);
        let segments: Vec<Rc<str>> = call.alias.iter().map(|a| a.name.clone()).collect();
        let outside = self.enter_user_call(call, &entered.closure, span);
        let val = self.in_segment(&segments, |elab| match elab.as_op(&entered) {
            Some(val) => val,
            None => elab.run(&entered),
        });
        self.user_call = outside;
        self.calls.pop();
        (self.origin.within, self.origin.offloaded) = (within, offloaded);
        val
    }

    /// Runs the body of a function whose arguments are bound.
    pub fn run(&mut self, entered: &BoundCall) -> Val {
        let function = entered.closure.function.clone();
        let failures = self.failures;
        let (vals, span) = match &function.body {
            Body::Short(expr) => (vec![self.eval(entered.frame, expr)], expr.span),
            Body::Block(block) => match self.exec_block(entered.frame, &block.stmts) {
                Flow::Return(vals, span) => (vals, span),
                Flow::Next if self.failures > failures => return Val::Bad,
                Flow::Next => (vec![], block.end),
                Flow::Stop => return Val::Bad,
            },
        };
        let failed = vals.iter().any(|v| matches!(v, Val::Bad));
        if !function.results.is_empty() && !failed {
            if function.results.len() != vals.len() {
                if !matches!(vals.as_slice(), [Val::Tuple(_)]) {
                    let (n, m) = (function.results.len(), vals.len());
                    let e = Diagnostic::error("E0416", format!("`{}` promises {n} results, returns {m}", function.name.name));
                    return self.fail(e.label(span, format!("{m} results")).label(function.name.span, format!("promises {n}")));
                }
            } else {
                let results: Vec<Val> = function
                    .results
                    .iter()
                    .zip(&vals)
                    .map(|(ty, val)| self.fit_type(entered.frame, ty, val, span, &format!("the result of `{}`", function.name.name)))
                    .collect();
                return one(results);
            }
        }
        if failed && vals.len() == 1 { Val::Bad } else { one(vals) }
    }

    /// Binds arguments to parameters in a new frame; none if any does not fit. An argument that no parameter takes
    /// does not keep the call from showing what else is wrong.
    fn enter(&mut self, frame: FrameId, call: &Call, closure: Closure, span: Span) -> Option<BoundCall> {
        let function = closure.function.clone();
        let params = &function.params;
        let mut bound: Vec<Option<BoundArgument>> = params.iter().map(|_| None).collect();
        let (mut good, mut spare) = (true, false);
        let mut position = 0;
        for arg in &call.args {
            let val = self.eval(frame, &arg.value);
            if arg.to.is_some() {
                let e = Diagnostic::error("E0409", format!("`{}` takes no `->`", call.path)).label(arg.value.span, "only view, slice and concat do");
                self.report(e);
                good = false;
            }
            let slot = match &arg.name {
                Some(name) => match params.iter().position(|p| p.name.name == name.name) {
                    Some(slot) => slot,
                    None => {
                        let e = Diagnostic::error("E0409", format!("`{}` has no parameter `{}`", call.path, name.name)).label(name.span, "unknown");
                        let names: Vec<&str> = params.iter().map(|p| &*p.name.name).collect();
                        let e = match nearest(&name.name, names.iter().copied()) {
                            Some(near) => e.help(format!("did you mean `{near}`?")),
                            None => e.help(format!("it has {}", names.join(", "))),
                        };
                        self.report(e);
                        spare = true;
                        continue;
                    }
                },
                None => {
                    position += 1;
                    position - 1
                }
            };
            if slot >= params.len() {
                let e = Diagnostic::error("E0409", format!("`{}` takes {} arguments, has {}", call.path, params.len(), call.args.len()));
                self.report(e.label(arg.value.span, "one too many").label(function.name.span, "declared here"));
                spare = true;
            } else if bound[slot].is_some() {
                let e = Diagnostic::error("E0409", format!("`{}` is given twice", params[slot].name.name));
                self.report(e.label(arg.value.span, "second value"));
                good = false;
            } else {
                bound[slot] = Some(BoundArgument { val, span: arg.value.span });
            }
        }
        let missing: Vec<&str> = params.iter().zip(&bound).filter(|(p, b)| b.is_none() && p.default.is_none()).map(|(p, _)| &*p.name.name).collect();
        if spare && !missing.is_empty() {
            // The argument that no parameter takes was probably meant for one of these.
            return None;
        }
        if good && !missing.is_empty() {
            let e = Diagnostic::error("E0409", format!("`{}` lacks {}", call.path, missing.join(", "))).label(span, "in this call");
            let e = e.label(function.name.span, "declared here");
            self.report(e.help(format!("give it by position or by name: `{}: ..`", missing[0])));
            good = false;
        }
        if !good {
            return None;
        }
        let inner = self.frame(Some(closure.env));
        let outside = self.enter_user_call(call, &closure, span);
        let fits = self.bind(inner, params, bound, span);
        self.user_call = outside;
        fits.then_some(BoundCall { closure, frame: inner })
    }

    /// Notes a call whose arguments may be in another order than the library takes them, and returns what was noted.
    fn enter_user_call(&mut self, call: &Call, closure: &Closure, span: Span) -> Option<Rc<Function>> {
        let outside = self.user_call.clone();
        if !self.in_library(span) {
            let by_position = call.args.iter().filter(|a| a.name.is_none()).count();
            self.user_call = Some(closure.function.clone()).filter(|f| by_position > 1 && self.in_library(f.name.span));
        }
        outside
    }

    fn bind(&mut self, inner: FrameId, params: &[Header], bound: Vec<Option<BoundArgument>>, span: Span) -> bool {
        let mut good = true;
        let mut places = vec![];
        // Static parameters are bound first, since types and defaults use them.
        let given: Vec<bool> = bound.iter().map(Option::is_some).collect();
        for (param, arg) in params.iter().zip(bound) {
            let place = arg.as_ref().map_or(span, |a| a.span);
            places.push(place);
            if let Some(arg) = arg {
                let val = self.coerce(param, arg.val, place);
                self.set_param(inner, param, val, place);
            }
        }
        for (param, given) in params.iter().zip(given) {
            if let (false, Some(default)) = (given, &param.default) {
                let val = self.eval(inner, default);
                let val = self.coerce(param, val, default.span);
                self.set_param(inner, param, val, param.name.span);
            }
        }
        for (param, place) in params.iter().zip(places) {
            let val = self.frames[inner.0].vars.get(&param.name.name).map_or(Val::Bad, |v| v.val.clone());
            let optional = matches!(param.default.as_ref().map(|d| &d.kind), Some(ExprKind::None));
            let val = match (&param.kind, val) {
                (_, Val::Bad) => Val::Bad,
                (Some(ParamKind::Type(_)), Val::None) if optional => Val::None,
                (Some(ParamKind::Type(ty)), val) => self.fit_type(inner, ty, &val, place, &format!("`{}`", param.name.name)),
                (
                    Some(ParamKind::Int | ParamKind::Real | ParamKind::Bool | ParamKind::Text | ParamKind::Reals | ParamKind::Dim | ParamKind::Dims)
                    | None,
                    val,
                ) => val,
            };
            good &= !matches!(val, Val::Bad);
            self.set_param(inner, param, val, place);
        }
        good
    }

    /// Sets a parameter. `place` is where its argument stands, for messages about dims that were passed.
    fn set_param(&mut self, frame: FrameId, param: &Header, val: Val, place: Span) {
        self.frames[frame.0].vars.insert(param.name.name.clone(), Var { val, span: place, changed: None });
    }

    /// A static argument as its parameter's kind; tensors and untyped ones as they are.
    fn coerce(&mut self, param: &Header, val: Val, span: Span) -> Val {
        let optional = matches!(param.default.as_ref().map(|d| &d.kind), Some(ExprKind::None));
        if matches!(val, Val::Bad) || (optional && matches!(val, Val::None)) {
            return val;
        }
        let (wanted, fitted) = match &param.kind {
            None | Some(ParamKind::Type(_)) => return val,
            Some(ParamKind::Int) => ("an int", self.int(&val).map(Val::Int)),
            Some(ParamKind::Real) => ("a real", self.real(&val).map(Val::Real)),
            Some(ParamKind::Bool) => ("a bool", matches!(val, Val::Bool(_)).then(|| val.clone())),
            Some(ParamKind::Text) => ("a text", matches!(val, Val::Text(_)).then(|| val.clone())),
            Some(ParamKind::Reals) => ("a list of numbers", is_reals(&val).then(|| val.clone())),
            Some(ParamKind::Dim) => (
                "a dim",
                match &val {
                    Val::Dim(d) => Some(Val::Dim(*d)),
                    Val::Dims(ds) if ds.len() == 1 => Some(Val::Dim(ds[0])),
                    _ => None,
                },
            ),
            Some(ParamKind::Dims) => (
                "dims",
                match &val {
                    Val::Dim(d) => Some(Val::Dims(vec![*d])),
                    Val::Dims(ds) => Some(Val::Dims(ds.clone())),
                    _ => None,
                },
            ),
        };
        fitted.unwrap_or_else(|| {
            let said = self.said(&val);
            let e = Diagnostic::error("E0202", format!("`{}` wants {wanted}, this is {said}", param.name.name)).label(span, format!("is {said}"));
            let e = match (&param.kind, &val) {
                (Some(ParamKind::Dim | ParamKind::Dims), Val::Int(n)) => e.help(format!("declare a dim of this size: `dim name = {n};`")),
                (Some(ParamKind::Dim | ParamKind::Dims), _) => {
                    e.help(format!("the first arguments may be in another order; name it: `{}: ..`", param.name.name))
                }
                _ => e,
            };
            self.fail(e)
        })
    }

    /// The dims that a type names (without its `..`), each checked to occur once.
    fn type_dims(&mut self, frame: FrameId, ty: &TypeExpr) -> Option<Vec<(DimId, Span)>> {
        let mut out: Vec<(DimId, Span)> = vec![];
        let mut good = true;
        for dim in &ty.dims {
            let TypeDim::Element(element) = dim else { continue };
            let Some(ids) = self.dims_of(frame, &element.expr) else {
                good = false;
                continue;
            };
            for id in ids {
                if let Some((_, first)) = out.iter().find(|(d, _)| *d == id) {
                    let name = self.dims[id.0].name.clone();
                    let e = Diagnostic::error("E0207", format!("dim `{name}` is named twice")).label(element.expr.span, "second time");
                    let e = e.label(*first, "first time");
                    self.report(e.help(format!("a second dim of its size: `dim other = {name};`, then use `other`")));
                    good = false;
                }
                out.push((id, element.expr.span));
            }
        }
        good.then_some(out)
    }

    fn dtype(&mut self, ty: &TypeExpr) -> Option<DType> {
        let Some(name) = &ty.dtype else { return Some(self.options.precision) };
        let dtype = DType::parse(&name.name);
        if dtype.is_none() {
            let e = Diagnostic::error("E0401", format!("no element type is called `{}`", name.name)).label(name.span, "unknown");
            let near = nearest(&name.name, ["f32", "bf16", "f16", "i32", "bool"]).map(|n| format!("did you mean `{n}`?"));
            self.report(e.help(near.unwrap_or_else(|| "f32, bf16, f16, i32, bool; none for the working precision".into())));
        }
        dtype
    }

    /// The type of a declared tensor: all its dims are written.
    pub fn declared_type(&mut self, frame: FrameId, ty: &TypeExpr) -> Option<Type> {
        let dtype = self.dtype(ty);
        let dims = self.type_dims(frame, ty);
        if ty.dims.iter().any(|d| matches!(d, TypeDim::Rest)) {
            let e = Diagnostic::error("E0211", "a declared tensor names all its dims").label(ty.span, "has `..`");
            self.report(e.help("`..` stands for other dims in the types of function parameters"));
            return None;
        }
        let mut out = vec![];
        for (id, span) in dims? {
            out.push(self.ir_dim(id, span)?);
        }
        Some(Type::new(dtype?, out))
    }

    /// Checks a value against a written type; a static number fits a float scalar.
    fn fit_type(&mut self, frame: FrameId, ty: &TypeExpr, val: &Val, span: Span, what: &str) -> Val {
        let (Some(dtype), Some(wanted)) = (self.dtype(ty), self.type_dims(frame, ty)) else { return Val::Bad };
        if matches!(val, Val::Bad) {
            return Val::Bad;
        }
        let value = match val {
            Val::Tensor(v) => *v,
            Val::Int(_) | Val::Real(_) | Val::Dim(_) | Val::Bool(_) => {
                let Some(v) = self.tensor(val, span) else { return Val::Bad };
                match self.real(val) {
                    Some(x) if dtype.is_float() && self.ty(v).dtype != dtype => self.constant(x, dtype),
                    _ => v,
                }
            }
            Val::None | Val::Text(_) | Val::Reals(_) | Val::Dims(_) | Val::Tuple(_) | Val::Bad => {
                let e = Diagnostic::error("E0202", format!("{what} wants a tensor, this is {}", val.kind()));
                return self.fail(e.label(span, format!("is {}", val.kind())));
            }
        };
        let found = self.ty(value).clone();
        let fits = match &ty.dtype {
            Some(_) => found.dtype == dtype,
            None => found.dtype.is_float(),
        };
        if !fits {
            let want = if ty.dtype.is_some() { dtype.name() } else { "float" };
            let e = Diagnostic::error("E0202", format!("{what} wants {want}, this is {}", found.dtype.name()));
            let e = e.label(span, format!("is {}", self.describe(&found)));
            let help = match &ty.dtype {
                Some(_) if dtype == DType::Bool => "a comparison gives a bool, as `x > 0`".to_string(),
                Some(_) => format!("`{}(..)` converts", dtype.name()),
                None => "`real(..)` converts".to_string(),
            };
            return self.fail(e.help(help));
        }
        for (id, passed) in self.passed(frame, ty, &wanted) {
            if self.require(value, id, span, passed.unwrap_or(span)).is_none() {
                return Val::Bad;
            }
        }
        let open = ty.dims.iter().any(|d| matches!(d, TypeDim::Rest));
        if !open && found.dims.len() > wanted.len() {
            let names: Vec<Dim> = wanted.iter().filter_map(|(d, _)| self.dims[d.0].ir).collect();
            let extra: Vec<Dim> = found.dims.iter().copied().filter(|d| !names.contains(d)).collect();
            let e = Diagnostic::error("E0211", format!("{what} wants {}, this is {}", self.shape(&names), self.describe(&found)));
            let e = e.label(span, format!("also has {}", self.shape(&extra)));
            return self.fail(e.help(format!("sum or index {} away, or allow more dims with `..`", self.shape(&extra))));
        }
        Val::Tensor(value)
    }

    /// The dims of a type, each with the argument that passed it, if there was one.
    fn passed(&self, frame: FrameId, ty: &TypeExpr, wanted: &[(DimId, Span)]) -> Vec<(DimId, Option<Span>)> {
        let place = |element: Span| {
            let element = ty.dims.iter().find_map(|d| match d {
                TypeDim::Element(e) if e.expr.span == element => Some(&e.expr),
                TypeDim::Element(_) | TypeDim::Rest => None,
            })?;
            match &element.kind {
                ExprKind::Name(name) => self.frames[frame.0].vars.get(name).map(|v| v.span),
                _ => None,
            }
        };
        wanted.iter().map(|(id, at)| (*id, place(*at))).collect()
    }

    /// The graph's dim for a declared one, which a tensor must have.
    pub fn require(&mut self, value: Value, id: DimId, value_span: Span, dim_span: Span) -> Option<Dim> {
        let dims = self.ty(value).dims.clone();
        if let Some(dim) = self.dims[id.0].ir
            && dims.contains(&dim)
        {
            return Some(dim);
        }
        let entry = self.dims[id.0].clone();
        let name = &entry.name;
        let shape = self.shape(&dims);
        let of = |d: &Dim| self.dims[self.declared[d.0 as usize].0].clone();
        // The value has a copy of this dim, or the dim that this one copies.
        let twin = dims.iter().find(|d| Some(self.declared[d.0 as usize]) == entry.copy_of || of(d).copy_of == Some(id));
        if let Some(twin) = twin {
            let twin = self.body.dims.name(*twin);
            let e = Diagnostic::error("E0203", format!("this value has no dim `{name}`, but `{twin}`")).label(value_span, format!("has {shape}"));
            let e = e.label(entry.span, format!("`{name}` and `{twin}` have one size, but are two dims"));
            self.report(e.help(format!("`view(.., {twin} -> {name})`")));
            return None;
        }
        let e = Diagnostic::error("E0201", format!("dim `{name}` is not in this value, which has {shape}")).label(value_span, format!("has {shape}"));
        let e = if dim_span == value_span { e } else { e.label(dim_span, "asked for here") };
        let by_name = nearest(name, dims.iter().map(|d| self.body.dims.name(*d)));
        let by_size = dims.iter().find(|d| i64::try_from(self.body.dims.size(**d)).ok() == entry.size).map(|d| self.body.dims.name(*d));
        let e = match by_name.or(by_size) {
            Some(near) if *near == **name => {
                let e = e.note(format!("its `{near}` is another dim of that name, declared elsewhere"));
                e.help("every call declares its own dims; pass the dim itself as an argument")
            }
            Some(near) => e.help(format!("did you mean `{near}`?")),
            None => e.help(format!("give one of its dims, or look for the step that lost `{name}`")),
        };
        self.report(e);
        None
    }
}

enum Callee {
    Function(Closure),
    Primitive,
}

fn one(mut vals: Vec<Val>) -> Val {
    match vals.len() {
        1 => vals.remove(0),
        _ => Val::Tuple(vals),
    }
}
