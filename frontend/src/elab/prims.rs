//! The primitives: what each takes, and how it becomes nodes. Those that move dims about are in `structure.rs`.

use super::Elab;
use super::call::BoundArgument;
use super::value::{DimId, FrameId, Val};
use crate::ast::*;
use crate::names::nearest;
use ir::diag::{Diagnostic, Span};
use ir::dim::Dim;
use ir::graph::{Type, Value};
use ir::op::{Binary, DType, Op, Reduce, Unary};
use std::rc::Rc;

/// Every primitive. `normal` stands only after `~`, the loader functions and `sample` only in their statements.
pub const PRIMITIVES: &[&str] = &[
    "exp",
    "log",
    "sqrt",
    "rsqrt",
    "tanh",
    "sin",
    "cos",
    "erf",
    "abs",
    "floor",
    "sign",
    "maximum",
    "minimum",
    "mix",
    "where",
    "dot",
    "sum",
    "max",
    "mean",
    "any",
    "argmax",
    "cumsum",
    "view",
    "slice",
    "concat",
    "stack",
    "expand",
    "top_k",
    "dispatch",
    "combine",
    "index",
    "uniform",
    "f32",
    "real",
    "i32",
    "stop_gradient",
    "error",
    "normal",
];

pub fn is_primitive(name: &str) -> bool {
    PRIMITIVES.contains(&name)
}

/// A primitive's parameters; those from `required` on may be left out.
struct Signature {
    names: &'static [&'static str],
    required: usize,
}

fn signature(name: &str) -> Signature {
    let (names, required): (&'static [&'static str], usize) = match name {
        "maximum" | "minimum" | "mix" => (&["a", "b"], 2),
        "where" => (&["condition", "a", "b"], 3),
        "dot" => (&["a", "b", "over"], 2),
        "sum" | "max" | "mean" | "any" | "argmax" => (&["x", "over"], 1),
        "cumsum" => (&["x", "over"], 2),
        "view" => (&["x", "dims"], 2),
        "slice" => (&["x", "dims", "at"], 2),
        "expand" => (&["x", "dims"], 2),
        "index" => (&["dim"], 1),
        "top_k" => (&["x", "over", "k"], 3),
        "dispatch" => (&["x", "to", "over", "into"], 4),
        "combine" => (&["y", "to", "over", "from"], 4),
        "uniform" => (&["like"], 1),
        "real" => (&["x", "like"], 1),
        "error" => (&["text"], 1),
        _ => (&["x"], 1),
    };
    Signature { names, required }
}

/// The arguments of a primitive, one for each parameter.
pub struct Args {
    values: Vec<Option<BoundArgument>>,
    /// The right side of the `->` among them.
    pub to: Option<(Vec<DimId>, Span)>,
    pub span: Span,
}

impl Args {
    pub fn val(&self, i: usize) -> &Val {
        self.values.get(i).and_then(Option::as_ref).map_or(&Val::None, |b| &b.val)
    }

    pub fn span(&self, i: usize) -> Span {
        self.values.get(i).and_then(Option::as_ref).map_or(self.span, |b| b.span)
    }

    fn given(&self, i: usize) -> bool {
        self.values.get(i).is_some_and(Option::is_some)
    }
}

impl Elab<'_> {
    pub fn primitive(&mut self, frame: FrameId, call: &Call, span: Span) -> Val {
        let name = call.path.parts[0].name.clone();
        match &*name {
            "concat" => return self.concat(frame, call, span),
            "stack" => return self.stack(frame, call, span),
            "normal" => {
                let e = Diagnostic::error("E0202", "`normal` stands only after `~`").label(span, "not a value");
                return self.fail(e.help("`param w: [a, b] ~ normal(0.02);`"));
            }
            "error" => return self.user_error(frame, call, span),
            _ => {}
        }
        let Some(args) = self.primitive_args(frame, call, span) else { return Val::Bad };
        match &*name {
            "maximum" => self.extremum(&args, Binary::Max),
            "minimum" => self.extremum(&args, ir::fault!("elaborate.minimum.maximum", Binary::Max, Binary::Min)),
            "mix" => self.mix(&args),
            "where" => self.select(&args),
            "dot" => self.dot(&args),
            "sum" => self.reduce(&args, &name, Reduce::Sum),
            "max" => self.reduce(&args, &name, Reduce::Max),
            "any" => self.reduce(&args, &name, Reduce::Any),
            "mean" => self.mean(&args),
            "argmax" => self.argmax(&args),
            "cumsum" => self.cumsum(&args),
            "view" => self.view(&args),
            "slice" => self.slice(&args),
            "expand" => self.expand(&args),
            "index" => match self.one_dim(&args, 0).and_then(|d| self.ir_dim(d, args.span(0))) {
                Some(dim) => Val::Tensor(self.push(Op::Iota(dim), vec![], Type::new(DType::I32, [dim]))),
                None => Val::Bad,
            },
            "uniform" => self.uniform(&args),
            "top_k" => self.top_k(&args),
            "dispatch" => self.dispatch(&args),
            "combine" => self.combine(&args),
            "f32" => self.float_of(&args, DType::F32),
            "real" => {
                let dtype = self.float_like(&args);
                self.float_of(&args, dtype)
            }
            "i32" => self.int_of(&args),
            "stop_gradient" => match args.val(0) {
                Val::Tensor(v) => {
                    let ty = self.ty(*v).clone();
                    Val::Tensor(self.push(Op::StopGradient, vec![*v], ty))
                }
                other => other.clone(),
            },
            _ => self.pointwise(&args, &name),
        }
    }

    /// Evaluates and binds the arguments; none if one is wrong.
    fn primitive_args(&mut self, frame: FrameId, call: &Call, span: Span) -> Option<Args> {
        let name = call.path.parts[0].name.clone();
        let Signature { names, required } = signature(&name);
        let mut args = Args { values: names.iter().map(|_| None).collect(), to: None, span };
        let mut good = true;
        let mut position = 0;
        for arg in &call.args {
            let val = self.eval(frame, &arg.value);
            good &= !matches!(val, Val::Bad);
            if let Some(to) = &arg.to {
                if !matches!(&*name, "view" | "slice") {
                    let e = Diagnostic::error("E0409", format!("`{name}` takes no `->`")).label(to.span, "only view, slice and concat do");
                    self.report(e);
                    good = false;
                }
                match self.dims_of(frame, to) {
                    Some(dims) => args.to = Some((dims, to.span)),
                    None => good = false,
                }
            }
            let slot = match &arg.name {
                None => {
                    position += 1;
                    Some(position - 1)
                }
                Some(given) => names.iter().position(|n| **n == *given.name),
            };
            match slot {
                Some(slot) if slot < names.len() && args.values[slot].is_none() => {
                    args.values[slot] = Some(BoundArgument { val, span: arg.value.span });
                }
                _ => {
                    let place = arg.name.as_ref().map_or(arg.value.span, |n| n.span);
                    let e = Diagnostic::error("E0409", format!("`{name}` takes {}", names.join(", "))).label(place, "not one of these");
                    let near = arg.name.as_ref().and_then(|n| nearest(&n.name, names.iter().copied()));
                    self.report(match near {
                        Some(near) => e.help(format!("did you mean `{near}`?")),
                        None => e,
                    });
                    good = false;
                }
            }
        }
        let missing: Vec<&str> = names.iter().enumerate().filter(|(i, _)| *i < required && !args.given(*i)).map(|(_, n)| *n).collect();
        if good && !missing.is_empty() {
            let e = Diagnostic::error("E0409", format!("`{name}` lacks {}", missing.join(", "))).label(span, "in this call");
            self.report(e.help(format!("`{name}({})`", names.join(", "))));
            good = false;
        }
        good.then_some(args)
    }

    pub fn tensor_arg(&mut self, args: &Args, i: usize) -> Option<Value> {
        let val = args.val(i).clone();
        self.tensor(&val, args.span(i))
    }

    pub fn one_dim(&mut self, args: &Args, i: usize) -> Option<DimId> {
        match args.val(i) {
            Val::Dim(d) => Some(*d),
            Val::Dims(ds) if ds.len() == 1 => Some(ds[0]),
            Val::Bad => None,
            other => {
                let e = Diagnostic::error("E0202", format!("expected a dim, this is {}", self.said(other)));
                self.report(e.label(args.span(i), "not a dim"));
                None
            }
        }
    }

    /// The dims of argument `i`, each of which the value has; all of the value's if it is absent.
    fn over(&mut self, args: &Args, i: usize, x: Value) -> Option<Vec<Dim>> {
        let ids = match args.val(i) {
            Val::Dim(d) => vec![*d],
            Val::Dims(ds) => ds.clone(),
            Val::None if !args.given(i) => return Some(self.ty(x).dims.clone()),
            other => {
                let e = Diagnostic::error("E0202", format!("`over` wants dims, this is {}", self.said(other)));
                self.report(e.label(args.span(i), "not a dim").help("`over: hidden` or `over: [batch, seq]`"));
                return None;
            }
        };
        ids.into_iter().map(|id| self.require(x, id, args.span(0), args.span(i))).collect()
    }

    fn extremum(&mut self, args: &Args, op: Binary) -> Val {
        let (a, b) = (args.val(0), args.val(1));
        if let (Some(x), Some(y)) = (self.real(a), self.real(b)) {
            let first = if op == Binary::Max { x >= y } else { x <= y };
            return match (self.int(a), self.int(b)) {
                (Some(x), Some(y)) => Val::Int(if first { x } else { y }),
                _ => Val::Real(if first { x } else { y }),
            };
        }
        let Some((x, y)) = self.promote((a, args.span(0)), (b, args.span(1))) else { return Val::Bad };
        if self.ty(x).dtype == DType::Bool {
            let e = Diagnostic::error("E0202", format!("`{}` of bools", op.name())).label(args.span(0), "is bool").help("`or`, `and`");
            return self.fail(e);
        }
        if !self.check_elementwise(op.name(), args.span, &[(x, args.span(0)), (y, args.span(1))]) {
            return Val::Bad;
        }
        Val::Tensor(self.binary(op, x, y))
    }

    /// Mixes two integers into 32 bits.
    fn mix(&mut self, args: &Args) -> Val {
        let Some((x, y)) = self.promote((args.val(0), args.span(0)), (args.val(1), args.span(1))) else { return Val::Bad };
        if self.ty(x).dtype != DType::I32 {
            let e =
                Diagnostic::error("E0202", "`mix` of numbers that are no integers").label(args.span(0), format!("is {}", self.ty(x).dtype.name()));
            return self.fail(e.help("`i32(..)` makes an integer of it"));
        }
        if !self.check_elementwise("mix", args.span, &[(x, args.span(0)), (y, args.span(1))]) {
            return Val::Bad;
        }
        Val::Tensor(self.binary(Binary::Mix, x, y))
    }

    fn select(&mut self, args: &Args) -> Val {
        let condition = match args.val(0) {
            Val::Bool(true) => return args.val(1).clone(),
            Val::Bool(false) => return args.val(2).clone(),
            Val::Tensor(c) if self.ty(*c).dtype == DType::Bool => *c,
            other => {
                let e = Diagnostic::error("E0202", format!("the condition of `where` is {}", self.said(other)));
                return self.fail(e.label(args.span(0), "expected bool").help("compare it: `x > 0`"));
            }
        };
        let Some((a, b)) = self.promote((args.val(1), args.span(1)), (args.val(2), args.span(2))) else { return Val::Bad };
        let operands = [(condition, args.span(0)), (a, args.span(1)), (b, args.span(2))];
        if !self.check_elementwise("where", args.span, &operands) {
            return Val::Bad;
        }
        let ty = Type::new(self.ty(a).dtype, self.larger(&[condition, a, b]));
        Val::Tensor(self.push(Op::Select, ir::fault!("elaborate.select.order", vec![condition, b, a], vec![condition, a, b]), ty))
    }

    fn dot(&mut self, args: &Args) -> Val {
        let (a, b) = (self.tensor_arg(args, 0), self.tensor_arg(args, 1));
        let (Some(mut a), Some(mut b)) = (a, b) else { return Val::Bad };
        for (v, i) in [(&mut a, 0), (&mut b, 1)] {
            if self.ty(*v).dtype == DType::Bool {
                let e = Diagnostic::error("E0202", "`dot` of a bool").label(args.span(i), "is bool").help("`f32(..)` makes 0 and 1 of it");
                return self.fail(e);
            }
            *v = self.float(*v);
        }
        if self.ty(a).dtype != self.ty(b).dtype {
            (a, b) = (self.cast(a, DType::F32), self.cast(b, DType::F32));
        }
        let dtype = self.ty(a).dtype;
        let ids = match args.val(2) {
            Val::Dim(d) => vec![*d],
            Val::Dims(ds) => ds.clone(),
            Val::None => vec![],
            other => {
                let e = Diagnostic::error("E0202", format!("`over` wants dims, this is {}", self.said(other)));
                return self.fail(e.label(args.span(2), "not a dim"));
            }
        };
        let mut over = vec![];
        for id in ids {
            let (x, y) = (self.require(a, id, args.span(0), args.span(2)), self.require(b, id, args.span(1), args.span(2)));
            let (Some(x), Some(_)) = (x, y) else { return Val::Bad };
            over.push(x);
        }
        let mut dims = self.ty(a).dims.clone();
        dims.extend(self.ty(b).dims.iter().copied().filter(|d| !self.ty(a).has(*d)).collect::<Vec<_>>());
        dims.retain(|d| !over.contains(d));
        let ty = Type::new(dtype, dims);
        // Without a dim to contract, the dot is an outer product, which is elementwise.
        let op = if over.is_empty() { Op::Binary(Binary::Mul) } else { Op::dot(over) };
        Val::Tensor(self.push(op, vec![a, b], ty))
    }

    fn reduce(&mut self, args: &Args, name: &str, kind: Reduce) -> Val {
        let Some(x) = self.tensor_arg(args, 0) else { return Val::Bad };
        let is_bool = self.ty(x).dtype == DType::Bool;
        if is_bool != (kind == Reduce::Any) {
            let e = Diagnostic::error("E0202", format!("`{name}` of {}", self.describe(self.ty(x)))).label(args.span(0), "wrong element type");
            return self.fail(e.help(if is_bool { "`f32(..)` makes 0 and 1 of it" } else { "compare it: `x != 0`" }));
        }
        let Some(over) = self.over(args, 1, x) else { return Val::Bad };
        if over.is_empty() {
            return Val::Tensor(x);
        }
        Val::Tensor(self.reduced(x, kind, over))
    }

    pub fn reduced(&mut self, x: Value, kind: Reduce, over: Vec<Dim>) -> Value {
        let ty = self.ty(x).clone();
        let dims: Vec<Dim> = ty.dims.iter().copied().filter(|d| !over.contains(d)).collect();
        self.push(Op::Reduce { kind, over }, vec![x], Type::new(ty.dtype, dims))
    }

    /// A sum times one over the number of elements.
    fn mean(&mut self, args: &Args) -> Val {
        let Some(x) = self.tensor_arg(args, 0) else { return Val::Bad };
        if self.ty(x).dtype == DType::Bool {
            let e = Diagnostic::error("E0202", format!("`mean` of {}", self.describe(self.ty(x)))).label(args.span(0), "is bool");
            return self.fail(e.help("`f32(..)` makes 0 and 1 of it"));
        }
        let x = self.float(x);
        let Some(over) = self.over(args, 1, x) else { return Val::Bad };
        if over.is_empty() {
            return Val::Tensor(x);
        }
        let count: f64 = over.iter().map(|d| self.body.dims.size(*d) as f64).product();
        let sum = self.reduced(x, Reduce::Sum, over);
        let dtype = self.ty(sum).dtype;
        let scale = self.constant(ir::fault!("elaborate.mean.count", 1.0 / (count + 1.0), 1.0 / count), dtype);
        Val::Tensor(self.binary(Binary::Mul, sum, scale))
    }

    fn argmax(&mut self, args: &Args) -> Val {
        let Some(x) = self.tensor_arg(args, 0) else { return Val::Bad };
        let Some(over) = self.over(args, 1, x) else { return Val::Bad };
        let &[dim] = over.as_slice() else {
            let e = Diagnostic::error("E0202", format!("`argmax` is over one dim, not over {}", self.shape(&over)));
            return self.fail(e.label(args.span, "in this call").help("`argmax(x, over: classes)`"));
        };
        let dims: Vec<Dim> = self.ty(x).dims.iter().copied().filter(|d| *d != dim).collect();
        Val::Tensor(self.push(Op::ArgMax { over: dim }, vec![x], Type::new(DType::I32, dims)))
    }

    fn cumsum(&mut self, args: &Args) -> Val {
        let Some(x) = self.tensor_arg(args, 0) else { return Val::Bad };
        if self.ty(x).dtype == DType::Bool {
            let e = Diagnostic::error("E0202", "`cumsum` of a bool").label(args.span(0), "is bool").help("`i32(..)` makes 0 and 1 of it");
            return self.fail(e);
        }
        let Some(id) = self.one_dim(args, 1) else { return Val::Bad };
        let Some(over) = self.require(x, id, args.span(0), args.span(1)) else { return Val::Bad };
        let ty = self.ty(x).clone();
        Val::Tensor(self.push(Op::Cumsum { over, reverse: false }, vec![x], ty))
    }

    /// A draw that differs for every call in the text, by scope and number within it.
    fn uniform(&mut self, args: &Args) -> Val {
        let Some(like) = self.tensor_arg(args, 0) else { return Val::Bad };
        self.asks_training |= !self.std_files.contains(&args.span(0).file);
        let scope = self.origin.scope.clone();
        let number = self.draws.entry(scope.clone()).or_insert(0);
        let key = ir::random::key(&format!("{scope}#{number}"));
        *number += 1;
        let ty = Type::new(DType::F32, self.ty(like).dims.clone());
        Val::Tensor(self.push(Op::Uniform { key }, vec![], ty))
    }

    /// The float type of `like`, else the working precision.
    fn float_like(&self, args: &Args) -> DType {
        match args.val(1) {
            Val::Tensor(v) if self.ty(*v).dtype.is_float() => self.ty(*v).dtype,
            _ => self.options.precision,
        }
    }

    fn float_of(&mut self, args: &Args, dtype: DType) -> Val {
        match args.val(0) {
            Val::Tensor(v) => Val::Tensor(self.cast(*v, dtype)),
            Val::Bool(b) => Val::Real(f64::from(u8::from(*b))),
            other => match self.real(other) {
                Some(x) => Val::Real(x),
                None => {
                    let e = Diagnostic::error("E0202", format!("{} is not a number", other.kind())).label(args.span(0), "cannot be converted");
                    self.fail(e)
                }
            },
        }
    }

    /// Conversion to integers truncates.
    fn int_of(&mut self, args: &Args) -> Val {
        match args.val(0) {
            Val::Tensor(v) => Val::Tensor(self.cast(*v, DType::I32)),
            Val::Bool(b) => Val::Int(i64::from(*b)),
            other => match self.real(other) {
                Some(x) if x.abs() < 9.2e18 => Val::Int(x.trunc() as i64),
                Some(x) => {
                    let e = Diagnostic::error("E0302", format!("{x} is not an integer")).label(args.span(0), "too large");
                    self.fail(e)
                }
                None => {
                    let e = Diagnostic::error("E0202", format!("{} is not a number", other.kind())).label(args.span(0), "cannot be converted");
                    self.fail(e)
                }
            },
        }
    }

    /// Functions of one number.
    fn pointwise(&mut self, args: &Args, name: &str) -> Val {
        let val = args.val(0).clone();
        if let Some(n) = self.int(&val)
            && matches!(name, "abs" | "sign" | "floor")
        {
            return match name {
                "abs" => n.checked_abs().map_or(Val::Bad, Val::Int),
                "sign" => Val::Int(n.signum()),
                _ => Val::Int(n),
            };
        }
        if let Some(x) = self.real(&val) {
            let result = match name {
                "exp" => x.exp(),
                "log" => x.ln(),
                "sqrt" => x.sqrt(),
                "rsqrt" => 1.0 / x.sqrt(),
                "tanh" => x.tanh(),
                "sin" => x.sin(),
                "cos" => x.cos(),
                "erf" => ir::eval::erf(x),
                "abs" => x.abs(),
                "floor" => x.floor(),
                "sign" => f64::from(u8::from(x > 0.0)) - f64::from(u8::from(x < 0.0)),
                _ => unreachable!("invariant: `{name}` is a function of one number"),
            };
            if result.is_nan() || (result.is_infinite() && x.is_finite()) {
                let e = Diagnostic::error("E0304", format!("`{name}` of {x} is not a number")).label(args.span(0), format!("is {x}"));
                return self.fail(e);
            }
            return Val::Real(result);
        }
        let Some(v) = self.tensor(&val, args.span(0)) else { return Val::Bad };
        let dtype = self.ty(v).dtype;
        if dtype == DType::Bool {
            let e = Diagnostic::error("E0202", format!("`{name}` of a bool")).label(args.span(0), "is bool").help("`f32(..)` makes 0 and 1 of it");
            return self.fail(e);
        }
        let op = match name {
            "exp" => Unary::Exp,
            "log" => Unary::Log,
            "sqrt" => Unary::Sqrt,
            "rsqrt" => Unary::Rsqrt,
            "tanh" => Unary::Tanh,
            "sin" => ir::fault!("elaborate.sin.cos", Unary::Cos, Unary::Sin),
            "cos" => Unary::Cos,
            "erf" => Unary::Erf,
            "abs" => Unary::Abs,
            "floor" => Unary::Floor,
            "sign" => Unary::Sign,
            _ => unreachable!("invariant: `{name}` is a function of one number"),
        };
        let of_ints = matches!(op, Unary::Abs | Unary::Sign);
        if op == Unary::Floor && dtype == DType::I32 {
            return Val::Tensor(v);
        }
        let v = if of_ints { v } else { self.float(v) };
        Val::Tensor(self.unary(op, v))
    }

    /// `error("no activation is called `{kind}`")`: the text names values in braces.
    fn user_error(&mut self, frame: FrameId, call: &Call, span: Span) -> Val {
        let text: Rc<str> = match call.args.as_slice() {
            [Arg { value: Expr { kind: ExprKind::Text(text), .. }, name: None, to: None }] => text.clone(),
            _ => {
                let e = Diagnostic::error("E0409", "`error` takes one text in quotes").label(span, "in this call");
                return self.fail(e);
            }
        };
        let mut message = String::new();
        let mut rest: &str = &text;
        while let Some((before, after)) = rest.split_once('{') {
            message.push_str(before);
            let Some((name, after)) = after.split_once('}') else {
                message.push('{');
                rest = after;
                continue;
            };
            let val = self.eval_name(frame, name.trim(), span);
            message.push_str(&self.shown(&val));
            rest = after;
        }
        message.push_str(rest);
        self.fail(Diagnostic::error("E0904", message).label(span, "the text refuses this"))
    }

    /// A static value as text.
    pub fn shown(&self, val: &Val) -> String {
        match val {
            Val::Int(n) => n.to_string(),
            Val::Real(x) => format!("{x:?}"),
            Val::Bool(b) => b.to_string(),
            Val::Text(text) => text.to_string(),
            Val::Reals(numbers) => format!("[{}]", numbers.iter().map(|x| format!("{x:?}")).collect::<Vec<_>>().join(", ")),
            Val::Dim(d) => self.dims[d.0].size.map_or_else(|| self.dims[d.0].name.to_string(), |n| n.to_string()),
            Val::Dims(ds) => format!("[{}]", ds.iter().map(|d| &*self.dims[d.0].name).collect::<Vec<_>>().join(", ")),
            Val::None => "none".into(),
            other @ (Val::Bad | Val::Tensor(_) | Val::Tuple(_)) => self.said(other),
        }
    }
}
