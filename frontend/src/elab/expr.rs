//! Expressions.

use super::number::OperandSpans;
use super::value::{FrameId, Val};
use super::{Elab, MORE_STACK, RED_ZONE};
use crate::ast::*;
use ir::diag::{Diagnostic, Span};
use ir::graph::{Type, Value};
use ir::op::{self, Binary, Compare, DType, Op, Unary};

impl Elab<'_> {
    pub fn eval(&mut self, frame: FrameId, expr: &Expr) -> Val {
        stacker::maybe_grow(RED_ZONE, MORE_STACK, || {
            if !self.step(expr.span) {
                return Val::Bad;
            }
            self.eval_kind(frame, expr)
        })
    }

    fn eval_kind(&mut self, frame: FrameId, expr: &Expr) -> Val {
        match &expr.kind {
            ExprKind::Int(n, _) => Val::Int(*n),
            ExprKind::Real(x, _) => Val::Real(*x),
            ExprKind::Text(text) => Val::Text(text.clone()),
            ExprKind::Bool(b) => Val::Bool(*b),
            ExprKind::None => Val::None,
            ExprKind::Bad => Val::Bad,
            ExprKind::Name(name) => self.eval_name(frame, name, expr.span),
            ExprKind::Paren(inner) => self.eval(frame, inner),
            ExprKind::List(elements) => self.list(frame, elements),
            ExprKind::Call(call) => self.call(frame, call, expr.span),
            ExprKind::Index { base, items } => self.index(frame, base, items),
            ExprKind::Unary { op, arg } => self.prefix(frame, *op, arg, expr.span),
            ExprKind::Binary { op, op_span, left, right } => self.infix(frame, *op, *op_span, left, right),
        }
    }

    pub fn eval_name(&mut self, frame: FrameId, name: &str, span: Span) -> Val {
        if let Some(var) = self.lookup(frame, name) {
            let val = var.val.clone();
            self.asks_training |= name == "training" && !self.std_files.contains(&span.file);
            return val;
        }
        let mut at = Some(frame);
        while let Some(id) = at {
            if let Some(cond) = self.frames[id.0].absent.get(name).copied() {
                let e = Diagnostic::error("E0410", format!("`{name}` exists only if a condition holds (line {})", cond.line));
                let e = e.label(span, "not declared in this configuration").label(cond, "by this condition");
                return self.fail(e.help("use it under the same condition, or declare it in an `else` branch too"));
            }
            at = self.frames[id.0].parent;
        }
        let visible = self.visible(frame);
        let e = Diagnostic::error("E0401", format!("nothing is called `{name}` here")).label(span, "unknown name");
        let e = match crate::names::nearest(name, visible.iter().map(|n| &**n)) {
            Some(near) => e.help(format!("did you mean `{near}`?")),
            None => e.help("declare it above: `let`, `dim`, `input` or `param`"),
        };
        self.fail(e)
    }

    /// A list of dims, or of numbers if its first element is one.
    fn list(&mut self, frame: FrameId, elements: &[Element]) -> Val {
        let mut dims = vec![];
        let mut good = true;
        for (i, element) in elements.iter().enumerate() {
            let val = self.eval(frame, &element.expr);
            if let (0, Val::Int(_) | Val::Real(_)) = (i, &val) {
                return self.reals(frame, val, &elements[1..]);
            }
            match self.as_dims(val, element.expr.span) {
                Some(ids) => {
                    for id in ids {
                        if dims.contains(&id) {
                            let name = self.dims[id.0].name.clone();
                            self.twice(&name, element.expr.span);
                            good = false;
                        }
                        dims.push(id);
                    }
                }
                None => good = false,
            }
        }
        if good { Val::Dims(dims) } else { Val::Bad }
    }

    /// A list of numbers, the first of which is known.
    fn reals(&mut self, frame: FrameId, first: Val, rest: &[Element]) -> Val {
        let mut numbers: Vec<f64> = self.real(&first).into_iter().collect();
        let mut good = true;
        for element in rest {
            let val = self.eval(frame, &element.expr);
            match self.real(&val) {
                Some(x) => numbers.push(x),
                None => {
                    good = false;
                    if !matches!(val, Val::Bad) {
                        let e = Diagnostic::error("E0202", format!("{} in a list of numbers", self.said(&val)));
                        self.report(e.label(element.expr.span, "expected a number"));
                    }
                }
            }
        }
        if good { Val::Reals(numbers.into()) } else { Val::Bad }
    }

    fn twice(&mut self, name: &str, span: Span) {
        let e = Diagnostic::error("E0207", format!("dim `{name}` is named twice")).label(span, "second time");
        self.report(e.help(format!("a second dim of its size: `dim other = {name};`, then use `other`")));
    }

    /// The dims of an expression that must be a dim or a list of dims.
    pub fn dims_of(&mut self, frame: FrameId, expr: &Expr) -> Option<Vec<super::value::DimId>> {
        let val = self.eval(frame, expr);
        self.as_dims(val, expr.span)
    }

    fn as_dims(&mut self, val: Val, span: Span) -> Option<Vec<super::value::DimId>> {
        match val {
            Val::Dim(d) => Some(vec![d]),
            Val::Dims(ds) => Some(ds),
            Val::Bad => None,
            other => {
                let e = Diagnostic::error("E0202", format!("expected a dim, this is {}", other.kind())).label(span, "not a dim");
                self.report(match other {
                    Val::Int(n) => e.help(format!("declare a dim of this size: `dim name = {n};`")),
                    _ => e,
                });
                None
            }
        }
    }

    fn prefix(&mut self, frame: FrameId, op: UnaryOp, arg: &Expr, span: Span) -> Val {
        let val = self.eval(frame, arg);
        match (op, &val) {
            (_, Val::Bad) => Val::Bad,
            (UnaryOp::Not, Val::Bool(b)) => Val::Bool(!b),
            (UnaryOp::Not, Val::Tensor(v)) if self.ty(*v).dtype == DType::Bool => Val::Tensor(self.unary(Unary::Not, *v)),
            (UnaryOp::Not, other) => {
                let e = Diagnostic::error("E0202", format!("`not` of {}", self.said(other))).label(arg.span, "expected a bool");
                self.fail(e)
            }
            (UnaryOp::Neg, Val::Tensor(v)) => {
                if self.ty(*v).dtype == DType::Bool {
                    let e = Diagnostic::error("E0202", "`-` of a bool").label(arg.span, "is bool").help("`f32(..)` makes 0 and 1 of it");
                    return self.fail(e);
                }
                Val::Tensor(self.unary(Unary::Neg, *v))
            }
            (UnaryOp::Neg, Val::Real(x)) => Val::Real(-x),
            (UnaryOp::Neg, other) => match self.int(other) {
                Some(n) => match n.checked_neg() {
                    Some(n) => Val::Int(n),
                    None => self.fail(Diagnostic::error("E0302", "the negative is too large").label(span, "overflows")),
                },
                None => {
                    let e = Diagnostic::error("E0202", format!("`-` of {}", self.said(other))).label(arg.span, "expected a number");
                    self.fail(e)
                }
            },
        }
    }

    /// Describes a value in messages.
    pub fn said(&self, val: &Val) -> String {
        match val {
            Val::Tensor(v) => self.describe(self.ty(*v)),
            other => other.kind().to_string(),
        }
    }

    fn infix(&mut self, frame: FrameId, op: BinaryOp, op_span: Span, left: &Expr, right: &Expr) -> Val {
        let a = self.eval(frame, left);
        if matches!((op, &a), (BinaryOp::And, Val::Bool(false)) | (BinaryOp::Or, Val::Bool(true))) {
            return a;
        }
        let b = self.eval(frame, right);
        if matches!(a, Val::Bad) || matches!(b, Val::Bad) {
            return Val::Bad;
        }
        let at = OperandSpans { op: op_span, left: left.span, right: right.span, left_text: brief(left), right_text: brief(right) };
        match op {
            BinaryOp::And | BinaryOp::Or => self.logic(op, (a, left.span), (b, right.span), op_span),
            BinaryOp::Eq | BinaryOp::Ne | BinaryOp::Lt | BinaryOp::Le | BinaryOp::Gt | BinaryOp::Ge => {
                if let Some(val) = self.static_compare(op, &a, &b, &at) {
                    return val;
                }
                let Some((x, y)) = self.promote((&a, left.span), (&b, right.span)) else { return Val::Bad };
                if !self.check_elementwise(op.symbol(), op_span, &[(x, left.span), (y, right.span)]) {
                    return Val::Bad;
                }
                let compare = match op {
                    BinaryOp::Eq => Compare::Eq,
                    BinaryOp::Ne => Compare::Ne,
                    BinaryOp::Lt => Compare::Lt,
                    BinaryOp::Le => Compare::Le,
                    BinaryOp::Gt => Compare::Gt,
                    _ => Compare::Ge,
                };
                Val::Tensor(self.compare(compare, x, y))
            }
            BinaryOp::Add | BinaryOp::Sub | BinaryOp::Mul | BinaryOp::Div | BinaryOp::Rem | BinaryOp::Pow => {
                if let Some(val) = self.static_arithmetic(op, &a, &b, &at) {
                    return val;
                }
                self.arithmetic(op, &a, &b, &at)
            }
        }
    }

    fn logic(&mut self, op: BinaryOp, a: (Val, Span), b: (Val, Span), op_span: Span) -> Val {
        match (&a.0, &b.0) {
            // If a static operand does not decide, the result is the other one.
            (Val::Bool(_), Val::Bool(_)) => b.0,
            (Val::Bool(_), Val::Tensor(v)) if self.ty(*v).dtype == DType::Bool => b.0,
            (Val::Tensor(v), Val::Bool(s)) if self.ty(*v).dtype == DType::Bool => {
                if *s == (op == BinaryOp::And) {
                    a.0
                } else {
                    b.0
                }
            }
            (Val::Tensor(x), Val::Tensor(y)) if self.ty(*x).dtype == DType::Bool && self.ty(*y).dtype == DType::Bool => {
                if !self.check_elementwise(op.symbol(), op_span, &[(*x, a.1), (*y, b.1)]) {
                    return Val::Bad;
                }
                Val::Tensor(self.binary(if op == BinaryOp::And { Binary::And } else { Binary::Or }, *x, *y))
            }
            (x, y) => {
                let is_bool = matches!(x, Val::Bool(_)) || matches!(x, Val::Tensor(v) if self.ty(*v).dtype == DType::Bool);
                let (said, span) = if is_bool { (self.said(y), b.1) } else { (self.said(x), a.1) };
                let e = Diagnostic::error("E0202", format!("`{}` of {said}", op.symbol())).label(span, "expected a bool");
                self.fail(e)
            }
        }
    }

    /// Arithmetic with at least one tensor.
    fn arithmetic(&mut self, op: BinaryOp, a: &Val, b: &Val, at: &OperandSpans) -> Val {
        if let (BinaryOp::Pow, Val::Tensor(x)) = (op, a)
            && let Some(exponent) = self.real(b)
        {
            return self.power(*x, exponent, at);
        }
        let Some((mut x, mut y)) = self.promote((a, at.left), (b, at.right)) else { return Val::Bad };
        let dtype = self.ty(x).dtype;
        if dtype == DType::Bool {
            let e = Diagnostic::error("E0202", format!("`{}` of bools", op.symbol())).label(at.op, "numbers only");
            return self.fail(e.help("`and`, `or`; or `f32(..)` to make 0 and 1 of them"));
        }
        if !self.check_elementwise(op.symbol(), at.op, &[(x, at.left), (y, at.right)]) {
            return Val::Bad;
        }
        if matches!(op, BinaryOp::Div | BinaryOp::Pow) {
            (x, y) = (self.float(x), self.float(y));
        }
        Val::Tensor(match op {
            BinaryOp::Add => self.add(x, y),
            BinaryOp::Sub => self.binary(Binary::Sub, x, y),
            BinaryOp::Mul => self.binary(Binary::Mul, x, y),
            BinaryOp::Div => self.binary(Binary::Div, x, y),
            BinaryOp::Rem => self.binary(Binary::Rem, x, y),
            _ => self.binary(Binary::Pow, x, y),
        })
    }

    /// A static power: products and roots where they are exact.
    fn power(&mut self, x: Value, exponent: f64, at: &OperandSpans) -> Val {
        if self.ty(x).dtype == DType::Bool {
            let e = Diagnostic::error("E0202", "`^` of a bool").label(at.left, "is bool").help("`f32(..)` makes 0 and 1 of it");
            return self.fail(e);
        }
        let x = self.float(x);
        Val::Tensor(if exponent == 1.0 {
            x
        } else if exponent == 2.0 {
            self.binary(Binary::Mul, x, x)
        } else if exponent == 3.0 {
            let square = self.binary(Binary::Mul, x, x);
            self.binary(Binary::Mul, square, x)
        } else if exponent == 0.5 {
            self.unary(Unary::Sqrt, x)
        } else if exponent == -0.5 {
            self.unary(Unary::Rsqrt, x)
        } else if exponent == -1.0 {
            self.unary(Unary::Recip, x)
        } else {
            let dtype = self.ty(x).dtype;
            let e = self.constant(exponent, dtype);
            self.binary(Binary::Pow, x, e)
        })
    }

    /// Evaluates `table[dim: index]`.
    fn index(&mut self, frame: FrameId, base: &Expr, items: &[(Ident, Expr)]) -> Val {
        let mut val = self.eval(frame, base);
        for (name, index) in items {
            let dim = self.eval_name(frame, &name.name, name.span);
            let at = self.eval(frame, index);
            if matches!(val, Val::Bad) || matches!(dim, Val::Bad) || matches!(at, Val::Bad) {
                return Val::Bad;
            }
            let Val::Tensor(table) = val else {
                let e = Diagnostic::error("E0202", format!("{} has no dims to index", self.said(&val)));
                return self.fail(e.label(base.span, "expected a tensor"));
            };
            let dim = match dim {
                Val::Dim(d) => d,
                Val::Dims(ds) if ds.len() == 1 => ds[0],
                other => {
                    let e = Diagnostic::error("E0202", format!("`{}` is {}", name.name, other.kind())).label(name.span, "expected a dim");
                    return self.fail(e);
                }
            };
            let Some(d) = self.require(table, dim, base.span, name.span) else { return Val::Bad };
            if let Some(n) = self.int(&at) {
                let size = self.body.dims.size(d);
                let Some(offset) = u64::try_from(n).ok().filter(|n| *n < size) else {
                    let e = Diagnostic::error("E0210", format!("index {n} of `{}`, which has {size} elements", name.name));
                    return self.fail(e.label(index.span, format!("from 0 to {}", size - 1)));
                };
                let ty = self.ty(table).clone();
                val = Val::Tensor(self.push(Op::Slice { from: d, to: None, at: offset }, vec![table], ty));
                continue;
            }
            let Val::Tensor(indices) = at else {
                let e = Diagnostic::error("E0202", format!("an index is i32, this is {}", self.said(&at)));
                return self.fail(e.label(index.span, "expected an int or an i32 tensor"));
            };
            if self.ty(indices).dtype != DType::I32 {
                let e = Diagnostic::error("E0202", format!("an index is i32, this is {}", self.describe(self.ty(indices))));
                return self.fail(e.label(index.span, "expected i32").help("`i32(..)` converts"));
            }
            if self.ty(indices).has(d) {
                let e = Diagnostic::error("E0209", format!("the index has `{}` itself", name.name));
                return self.fail(e.label(index.span, self.describe(self.ty(indices))).help("view it to a copy of the dim first"));
            }
            let ty = Type::new(self.ty(table).dtype, vec![]);
            val = Val::Tensor(self.push(op::Op::Gather { dim: d }, vec![table, indices], ty));
        }
        val
    }
}

/// An operand's text if it is a name or a number, else what stands for it in a message.
fn brief(expr: &Expr) -> String {
    match &expr.kind {
        ExprKind::Name(name) => name.to_string(),
        ExprKind::Int(_, text) | ExprKind::Real(_, text) => text.to_string(),
        ExprKind::Paren(inner) => format!("({})", brief(inner)),
        ExprKind::Binary { op, left, right, .. } => format!("{} {} {}", brief(left), op.symbol(), brief(right)),
        ExprKind::Unary { op: UnaryOp::Neg, arg } => format!("-{}", brief(arg)),
        ExprKind::Call(call) => format!("{}(..)", call.path),
        ExprKind::Text(_)
        | ExprKind::Bool(_)
        | ExprKind::None
        | ExprKind::Bad
        | ExprKind::List(_)
        | ExprKind::Index { .. }
        | ExprKind::Unary { op: UnaryOp::Not, .. } => "..".to_string(),
    }
}
