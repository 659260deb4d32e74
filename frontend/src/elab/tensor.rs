//! Building nodes: dims, casts, elementwise operations.

use super::value::{DimEntry, DimId, Val};
use super::{Elab, MAX_DIM, MAX_ELEMENTS, MAX_OPS};
use ir::diag::{Diagnostic, Span};
use ir::dim::{Dim, DimInfo};
use ir::graph::{Type, Value};
use ir::op::{Binary, Compare, DType, Op, Real, Unary};

impl Elab<'_> {
    pub fn new_dim(&mut self, entry: DimEntry) -> DimId {
        self.dims.push(entry);
        DimId(self.dims.len() - 1)
    }

    /// The dim of the graph for a declared one; an error if it has no usable size.
    pub fn ir_dim(&mut self, id: DimId, span: Span) -> Option<Dim> {
        if let Some(dim) = self.dims[id.0].ir {
            return Some(dim);
        }
        let entry = self.dims[id.0].clone();
        let size = match entry.size {
            Some(size) if size > 0 && size <= MAX_DIM => size.unsigned_abs(),
            Some(size) if size > 0 => {
                let e = Diagnostic::error("E0302", format!("{} = {size} is too large for a dim", entry.name)).label(span, "used as a dim");
                self.report(e.label(entry.span, format!("is {size}")).help(format!("at most {MAX_DIM}")));
                return None;
            }
            Some(size) => {
                let e = Diagnostic::error("E0206", format!("{} = {size} cannot be the size of a dim", entry.name));
                self.report(e.label(span, "used as a dim").label(entry.span, format!("is {size}")).help("a size is at least 1"));
                return None;
            }
            None => {
                let e = Diagnostic::error("E0206", format!("dim `{}` has no size", entry.name)).label(span, "used as a dim of a value");
                let e = e.label(entry.span, "declared here").help(format!("`dim {} = size;`", entry.name));
                self.report(e.note("a dim without size is for the rows of `dispatch` and `combine`: as many as come"));
                return None;
            }
        };
        let copy_of = match entry.copy_of {
            Some(original) => Some(self.ir_dim(original, span)?),
            None => None,
        };
        let dim = self.body.dims.add(DimInfo { copy_of, ..DimInfo::new(&*entry.name, size) });
        self.declared.push(id);
        self.dims[id.0].ir = Some(dim);
        Some(dim)
    }

    pub fn ir_dims(&mut self, ids: &[DimId], span: Span) -> Option<Vec<Dim>> {
        ids.iter().map(|d| self.ir_dim(*d, span)).collect()
    }

    /// `[batch, seq, hidden]`.
    pub fn shape(&self, dims: &[Dim]) -> String {
        let names: Vec<&str> = dims.iter().map(|d| self.body.dims.name(*d)).collect();
        format!("[{}]", names.join(", "))
    }

    /// `[batch, seq]`, with the dtype before it unless it is the working precision.
    pub fn describe(&self, ty: &Type) -> String {
        let shape = self.shape(&ty.dims);
        if ty.dtype == self.options.precision { shape } else { format!("{}{shape}", ty.dtype.name()) }
    }

    /// The properties of a value that `repeat` must not change, as text.
    pub fn signature(&self, val: &Val) -> String {
        match val {
            Val::Tensor(v) => {
                let ty = &self.body[*v].ty;
                let mut dims = ty.dims.clone();
                dims.sort();
                let mut names: Vec<(Dim, &str)> = dims.iter().map(|d| (*d, self.body.dims.name(*d))).collect();
                names.sort_by_key(|(d, _)| *d);
                let names: Vec<&str> = names.into_iter().map(|(_, n)| n).collect();
                format!("{}[{}]", if ty.dtype == self.options.precision { "" } else { ty.dtype.name() }, names.join(", "))
            }
            other => other.kind().to_string(),
        }
    }

    /// Adds a node; its result has the dims of `declared` if they are the ones that the op gives, else the op's.
    pub fn push(&mut self, op: Op, args: Vec<Value>, declared: Type) -> Value {
        if self.body.nodes.len() >= MAX_OPS && !self.stopped {
            let e = Diagnostic::error("E0902", format!("the graph has more than {MAX_OPS} operations"));
            let e = e.help("look for a `repeat` with a very large count, or a function that calls itself twice");
            self.stop(match self.user_span {
                Some(span) => e.label(span, "stopped here"),
                None => e,
            });
        }
        let types: Vec<&Type> = args.iter().map(|a| &self.body[*a].ty).collect();
        let ty = match ir::infer::infer(&self.body, &op, &types, &declared) {
            Ok(ty) => {
                let same = ty.dims.len() == declared.dims.len() && ty.dims.iter().all(|d| declared.has(*d));
                if same { Type::new(ty.dtype, declared.dims) } else { ty }
            }
            Err(error) => {
                // An earlier check should have reported this in the user's words.
                let e = Diagnostic::error("E0202", format!("operands do not fit: {error}"));
                self.report(match self.user_span {
                    Some(span) => e.label(span, "here"),
                    None => e,
                });
                declared
            }
        };
        if self.elements(&ty.dims).is_none() && !self.stopped {
            let e = Diagnostic::error("E0302", format!("a tensor {} has more than {MAX_ELEMENTS} elements", self.shape(&ty.dims)));
            let e = e.help("use smaller sizes");
            self.stop(match self.user_span {
                Some(span) => e.label(span, "computed here"),
                None => e,
            });
        }
        let origin = self.origin.clone();
        self.body.push(op, args, ty, origin)
    }

    /// The number of elements, if it is within bounds.
    pub fn elements(&self, dims: &[Dim]) -> Option<u64> {
        let product = dims.iter().try_fold(1u64, |n, d| n.checked_mul(self.body.dims.size(*d)))?;
        (product <= MAX_ELEMENTS).then_some(product)
    }

    pub fn ty(&self, v: Value) -> &Type {
        &self.body[v].ty
    }

    pub fn constant(&mut self, x: f64, dtype: DType) -> Value {
        self.push(Op::Const(Real(x)), vec![], Type::scalar(dtype))
    }

    pub fn cast(&mut self, v: Value, dtype: DType) -> Value {
        let ty = self.ty(v).clone();
        if ty.dtype == dtype { v } else { self.push(Op::Cast, vec![v], Type::new(dtype, ty.dims)) }
    }

    /// The value as a float tensor.
    pub fn float(&mut self, v: Value) -> Value {
        if self.ty(v).dtype.is_float() { v } else { self.convert(v, DType::F32) }
    }

    pub fn unary(&mut self, op: Unary, v: Value) -> Value {
        let ty = self.ty(v).clone();
        self.push(Op::Unary(op), vec![v], ty)
    }

    /// A pointwise op of two operands of equal dtype; the order of dims is that of the larger one.
    pub fn binary(&mut self, op: Binary, a: Value, b: Value) -> Value {
        let ty = Type::new(self.ty(a).dtype, self.larger(&[a, b]));
        self.push(Op::Binary(op), vec![a, b], ty)
    }

    pub fn add(&mut self, a: Value, b: Value) -> Value {
        let ty = Type::new(self.ty(a).dtype, self.larger(&[a, b]));
        self.push(Op::Add, vec![a, b], ty)
    }

    pub fn compare(&mut self, op: Compare, a: Value, b: Value) -> Value {
        let ty = Type::new(DType::Bool, self.larger(&[a, b]));
        self.push(Op::Compare(op), vec![a, b], ty)
    }

    /// The dims of the operand that has the most.
    pub fn larger(&self, values: &[Value]) -> Vec<Dim> {
        let mut best: &[Dim] = &[];
        for v in values {
            let dims = &self.ty(*v).dims;
            if dims.len() > best.len() {
                best = dims;
            }
        }
        best.to_vec()
    }

    /// A value as a tensor; static numbers become constants. Reports what cannot be one.
    pub fn tensor(&mut self, val: &Val, span: Span) -> Option<Value> {
        match val {
            Val::Tensor(v) => Some(*v),
            Val::Int(n) => Some(self.int_constant(*n)),
            Val::Dim(d) => {
                let size = self.dims[d.0].size.unwrap_or(0);
                Some(self.int_constant(size))
            }
            Val::Real(x) => Some(self.constant(*x, DType::F32)),
            Val::Bool(b) => Some(self.constant(f64::from(u8::from(*b)), DType::Bool)),
            Val::Bad => None,
            other @ (Val::None | Val::Text(_) | Val::Reals(_) | Val::Dims(_) | Val::Tuple(_)) => {
                let e = Diagnostic::error("E0202", format!("expected a tensor or a number, this is {}", other.kind()));
                self.report(e.label(span, format!("is {}", other.kind())));
                None
            }
        }
    }

    /// An integer that does not fit i32 is a float constant: it only ever meets floats or is out of range.
    fn int_constant(&mut self, n: i64) -> Value {
        let dtype = if i32::try_from(n).is_ok() { DType::I32 } else { DType::F32 };
        self.constant(n as f64, dtype)
    }

    /// Brings two operands to one dtype: a static number takes the other's, ints meet floats as floats.
    pub fn promote(&mut self, a: (&Val, Span), b: (&Val, Span)) -> Option<(Value, Value)> {
        let (x, y) = (self.tensor(a.0, a.1), self.tensor(b.0, b.1));
        let (x, y) = (x?, y?);
        let (s, t) = (self.ty(x).dtype, self.ty(y).dtype);
        if s == t {
            return Some((x, y));
        }
        if s == DType::Bool || t == DType::Bool {
            let span = if s == DType::Bool { a.1 } else { b.1 };
            let e = Diagnostic::error("E0202", format!("a bool meets {}", if s == DType::Bool { t.name() } else { s.name() }));
            self.report(e.label(span, "is bool").help("`f32(..)` makes 0 and 1 of it"));
            return None;
        }
        let common = match (s, t) {
            (DType::I32, float) | (float, DType::I32) => float,
            _ if matches!(a.0, Val::Tensor(_)) && !matches!(b.0, Val::Tensor(_)) => s,
            _ if matches!(b.0, Val::Tensor(_)) && !matches!(a.0, Val::Tensor(_)) => t,
            _ => DType::F32,
        };
        Some((self.convert(x, common), self.convert(y, common)))
    }

    /// Casts; a constant is written in the new dtype at once.
    fn convert(&mut self, v: Value, dtype: DType) -> Value {
        match self.body[v].op {
            Op::Const(Real(x)) if self.ty(v).dims.is_empty() && self.ty(v).dtype != dtype => self.constant(x, dtype),
            _ => self.cast(v, dtype),
        }
    }

    /// Checks that one operand has all dims of the others.
    pub fn check_elementwise(&mut self, what: &str, span: Span, values: &[(Value, Span)]) -> bool {
        let all = self.larger(&values.iter().map(|v| v.0).collect::<Vec<_>>());
        let Some((small, _)) = values.iter().find(|(v, _)| self.ty(*v).dims.iter().any(|d| !all.contains(d))).copied() else {
            return true;
        };
        let shapes: Vec<String> = values.iter().map(|(v, _)| self.shape(&self.ty(*v).dims)).collect();
        let neither = if values.len() == 2 { "neither side" } else { "no operand" };
        let mut e = Diagnostic::error("E0205", format!("{neither} of `{what}` has all dims: {}", shapes.join(" and ")));
        e = e.label(span, "of this operation");
        for (v, at) in values.iter().copied().take(3) {
            e = e.label(at, format!("has {}", self.shape(&self.ty(v).dims)));
        }
        let missing: Vec<Dim> = self.ty(small).dims.iter().copied().filter(|d| !all.contains(d)).collect();
        let names = self.shape(&missing);
        let missing_here: Vec<Dim> = all.iter().copied().filter(|d| !self.ty(small).has(*d)).collect();
        let twin = missing.iter().find_map(|m| all.iter().find(|d| self.body.dims.size(**d) == self.body.dims.size(*m)).map(|d| (*m, *d)));
        if let Some((m, d)) = twin {
            let (m, d) = (self.body.dims.name(m), self.body.dims.name(d));
            e = e.help(format!("did you mean a `{d}` instead of `{m}`? they have one size; `view(.., {m} -> {d})` renames"));
        }
        let wide = self.shape(&missing_here);
        if let (&[_], Some(last)) = (self.ty(small).dims.as_slice(), all.last()) {
            e = e.help(format!("a bias has the last dim of what it is added to: `[{}]`", self.body.dims.name(*last)));
        }
        e = e.help(format!("an outer sum or product is written: `expand(.., {wide})` where {names} is, or `dot(a, b)`"));
        self.report(e);
        false
    }
}
