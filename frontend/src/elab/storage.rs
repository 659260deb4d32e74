//! Inputs with their defaults, and parameters with their initial values.

use super::Elab;
use super::value::{FrameId, Val};
use crate::ast::*;
use crate::scope::LOADERS;
use ir::diag::{Diagnostic, Span};
use ir::graph::{Input, InputDefault, Phase, Type, Update};
use ir::op::{DType, Op, Real};

/// The kind of a tensor that lives over steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StorageKind {
    Trained,
    State,
}

impl StorageKind {
    fn name(self) -> &'static str {
        match self {
            StorageKind::Trained => "parameter",
            StorageKind::State => "state",
        }
    }
}

impl Elab<'_> {
    pub fn input(&mut self, frame: FrameId, names: &[Ident], ty: &TypeExpr, value: Option<&Expr>, attributes: &[Ident]) {
        let ty = self.declared_type(frame, ty);
        let any = self.any(attributes, ty.as_ref());
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
            self.inputs.push(Input { name: name.name.to_string(), ty: ty.clone(), default, any, span: Some(name.span) });
            let value = self.push(Op::Input(number), vec![], ty);
            self.declare(frame, name, Val::Tensor(value));
        }
    }

    /// Whether the attributes of an input allow any value.
    fn any(&mut self, attributes: &[Ident], ty: Option<&Type>) -> bool {
        let mut any = false;
        for attribute in attributes {
            let e = match (&*attribute.name, ty.map(|t| t.dtype)) {
                ("any", Some(DType::I32) | None) => {
                    any = true;
                    continue;
                }
                ("any", Some(other)) => {
                    let e = Diagnostic::error("E0202", format!("`@any` is for inputs that become indices, and this one is {}", other.name()));
                    e.label(attribute.span, "of i32 alone").help("leave `@any` out: nothing checks it against a table")
                }
                (other, _) => {
                    let e = Diagnostic::error("E0401", format!("no attribute is called `@{other}`")).label(attribute.span, "unknown");
                    e.help("an input can be `@any`: no value of it is refused")
                }
            };
            self.report(e);
        }
        any
    }

    /// The default of an input: a number, or a loader function of another input.
    fn feed(&mut self, frame: FrameId, expr: &Expr, ty: &Type) -> Option<InputDefault> {
        let ExprKind::Call(call) = &expr.kind else {
            let val = self.eval(frame, expr);
            return match val {
                Val::Bool(b) => Some(InputDefault::Const(Real(f64::from(u8::from(b))))),
                Val::Bad => None,
                other => match self.real(&other) {
                    Some(x) => self.held(x, ty.dtype, expr.span).map(InputDefault::Const),
                    None => {
                        let e = Diagnostic::error("E0202", format!("the default of an input is {}", other.kind()));
                        self.report(
                            e.label(expr.span, "expected a number")
                                .help("a number, `next(x)`, `prev(x, first)`, `documents(x, separator)`, `positions(x, separator)` or `ahead(x)`"),
                        );
                        None
                    }
                },
            };
        };
        let name = call.path.to_string();
        if !LOADERS.contains(&name.as_str()) {
            let e = Diagnostic::error("E0401", format!("no loader function is called `{name}`")).label(call.path.span(), "unknown");
            let near = crate::names::nearest(&name, LOADERS).map(|n| format!("did you mean `{n}`?"));
            self.report(e.help(near.unwrap_or_else(|| {
                "an input can default to next(x), prev(x, first), documents(x, separator), positions(x, separator) or ahead(x)".into()
            })));
            return None;
        }
        let wanted = if ["next", "ahead"].contains(&name.as_str()) { 1 } else { 2 };
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
        let mut own = ty.clone();
        if name == "ahead" && own.dims.len() > 1 {
            own.dims.remove(own.dims.len() - 2);
        }
        if given != own {
            let (a, b) = (self.describe(&given), self.describe(ty));
            let e = Diagnostic::error("E0202", format!("`{name}` of {a} is not {b}"));
            self.report(e.label(expr.span, format!("is {a}")).help(match &*name {
                "ahead" => "what looks ahead has the other input's dims, and its depth before the last one: `[batch, depth, seq]`",
                _ => "an input that derives from another one has its dims and dtype",
            }));
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
            "next" => InputDefault::Next(from),
            "prev" => InputDefault::Prev(from, number),
            "documents" => InputDefault::Documents(from, number),
            "ahead" => InputDefault::Ahead(from),
            _ => InputDefault::Positions(from, number),
        })
    }

    /// A `param` or a `state`.
    pub fn stored(&mut self, frame: FrameId, storage: &Storage, lives: StorageKind) {
        let what = lives.name();
        let ty = self.declared_type(frame, &storage.ty);
        let init = self.init(frame, &storage.init);
        let mut decays = true;
        for attribute in &storage.attributes {
            if &*attribute.name == "no_decay" {
                decays = ir::fault!("elaborate.decay.attribute", true, false);
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
                let e = Diagnostic::error("E0202", format!("{what} `{}` is {}", name.name, ty.dtype.name()));
                self.report(e.label(storage.ty.span, "expected floats").help("leave the dtype out"));
                self.declare(frame, name, Val::Bad);
                continue;
            }
            // The stored tensor is f32. The model computes with a copy of the declared type.
            let dtype = ty.dtype;
            let ty = Type::new(DType::F32, ty.dims);
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
                decay: decays && lives == StorageKind::Trained && ty.dims.len() >= ir::fault!("elaborate.decay.dims", 1, 2),
                lr_scale: Real(1.0),
                frozen: false,
                adam: false,
                state: lives == StorageKind::State,
                layer: self.origin.layer,
                span: Some(place),
            });
            self.param_elements = self.param_elements.saturating_add(self.elements(&ty.dims).unwrap_or(0));
            if self.param_elements > super::MAX_PARAMETERS {
                let e = Diagnostic::error("E0302", format!("the parameters have more than {} elements", super::MAX_PARAMETERS));
                self.stop(e.label(place, "too many with this one").help("use smaller sizes, or fewer layers"));
            }
            let stored = self.push(Op::Param(number), vec![], ty);
            let value = if lives == StorageKind::Trained { self.cast(stored, dtype) } else { stored };
            self.declare(frame, name, Val::Tensor(value));
        }
    }

    /// `update s = e;`: the state has this value from the next step on.
    pub fn update(&mut self, frame: FrameId, name: &Ident, value: &Expr) {
        let (old, new) = (self.eval_name(frame, &name.name, name.span), self.eval(frame, value));
        if matches!(old, Val::Bad) || matches!(new, Val::Bad) {
            return;
        }
        let state = match old {
            Val::Tensor(v) => match self.body[v].op {
                Op::Param(p) if self.params[p as usize].state => Some(p),
                _ => None,
            },
            _ => None,
        };
        let Some(param) = state else {
            let e = Diagnostic::error("E0417", format!("`{}` is no state", name.name)).label(name.span, "cannot be updated");
            self.report(e.help(format!("`state {}: [..] = 0;` lives from step to step; `{} = ..` changes a value", name.name, name.name)));
            return;
        };
        if self.updates.iter().any(|u| u.param == param) {
            let e = Diagnostic::error("E0417", format!("state `{}` is updated twice", self.params[param as usize].name));
            self.report(e.label(name.span, "second time").help("once per step: join the updates into one"));
            return;
        }
        let Some(new) = self.tensor(&new, value.span) else { return };
        let (ty, has) = (self.params[param as usize].ty.clone(), self.ty(new).clone());
        if has.dtype == DType::Bool || has.dims.len() != ty.dims.len() || has.dims.iter().any(|d| !ty.has(*d)) {
            let e = Diagnostic::error("E0211", format!("state `{}` has {}, its update {}", name.name, self.describe(&ty), self.describe(&has)));
            self.report(e.label(value.span, "other dims or another element type").help("an update has the dims of the state"));
            return;
        }
        let new = self.cast(new, ty.dtype);
        // This `add` of one operand is an identity in the update phase, which runs once per step after all
        // microbatches.
        let new = self.push(Op::Add, vec![new], ty);
        self.body[new].origin.phase = Phase::Update;
        self.updates.push(Update { param, grad: None, new, states: vec![] });
    }

    /// A number as a tensor of this type holds it. One that would be infinite there is an error.
    fn held(&mut self, x: f64, dtype: DType, span: Span) -> Option<Real> {
        if dtype.is_finite(x) {
            return Some(Real(x));
        }
        let e = Diagnostic::error("E0304", format!("{x:e} is out of range")).label(span, format!("expected a number that {} holds", dtype.name()));
        self.report(e);
        None
    }

    fn init(&mut self, frame: FrameId, init: &Init) -> Option<ir::graph::Init> {
        let (expr, drawn) = match init {
            Init::Drawn(expr) => (expr, true),
            Init::Value(expr) => (expr, false),
        };
        let arg = match &expr.kind {
            ExprKind::Call(call) if drawn && call.path.to_string() == "normal" && call.args.len() == 1 => &call.args[0].value,
            ExprKind::Bad => return None,
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
            Some(x) => self.held(x, DType::F32, arg.span).map(if drawn { ir::graph::Init::Normal } else { ir::graph::Init::Const }),
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
