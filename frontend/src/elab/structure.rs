//! Primitives that rename, split, merge, cut, join and add dims.

use super::Elab;
use super::prims::Args;
use super::value::{DimId, FrameId, Val};
use crate::ast::*;
use ir::diag::{Diagnostic, Span};
use ir::dim::Dim;
use ir::graph::{Type, Value};
use ir::op::{Compare, DType, Op, Real};

/// A call of `concat` or `stack`, taken apart.
struct Joined {
    values: Vec<(Value, Span)>,
    /// The dims left of `->` in `[a, b] -> c`; empty for `over: d`.
    from: Vec<DimId>,
    to: DimId,
    to_span: Span,
}

impl Elab<'_> {
    fn tensor_of(&mut self, args: &Args) -> Option<Value> {
        match args.val(0) {
            Val::Tensor(v) => Some(*v),
            other => {
                let e = Diagnostic::error("E0202", format!("expected a tensor, this is {}", self.said(other)));
                self.report(e.label(args.span(0), "has no dims"));
                None
            }
        }
    }

    /// The dims on both sides of `a -> b`.
    fn arrow(&mut self, args: &Args, what: &str) -> Option<(Vec<DimId>, Vec<DimId>, Span)> {
        let from = match args.val(1) {
            Val::Dim(d) => vec![*d],
            Val::Dims(ds) => ds.clone(),
            other => {
                let e = Diagnostic::error("E0202", format!("expected dims, this is {}", self.said(other)));
                self.report(e.label(args.span(1), "not a dim"));
                return None;
            }
        };
        match &args.to {
            Some((to, span)) => Some((from, to.clone(), *span)),
            None => {
                let e = Diagnostic::error("E0409", format!("`{what}` says what becomes what")).label(args.span(1), "expected `a -> b`");
                self.report(e.help(format!("`{what}(x, a -> b)`")));
                None
            }
        }
    }

    /// Refuses dims that a value has already.
    fn absent(&mut self, dims: &[Dim], kept: &[Dim], span: Span, value_span: Span) -> bool {
        match dims.iter().find(|d| kept.contains(d)) {
            None => true,
            Some(d) => {
                let name = self.body.dims.name(*d).to_string();
                let shape = self.shape(kept);
                let e = Diagnostic::error("E0209", format!("the value has a dim `{name}` already")).label(span, "would be there twice");
                let e = e.label(value_span, format!("has {shape}"));
                self.report(e.help(format!("a copy of it is another dim: `dim other = {name};`")));
                false
            }
        }
    }

    pub fn view(&mut self, args: &Args) -> Val {
        let (Some(x), Some((from, to, to_span))) = (self.tensor_of(args), self.arrow(args, "view")) else { return Val::Bad };
        let mut from_dims = vec![];
        for id in &from {
            let Some(d) = self.require(x, *id, args.span(0), args.span(1)) else { return Val::Bad };
            from_dims.push(d);
        }
        let Some(to_dims) = self.ir_dims(&to, to_span) else { return Val::Bad };
        let kept: Vec<Dim> = self.ty(x).dims.iter().copied().filter(|d| !from_dims.contains(d)).collect();
        if !self.absent(&to_dims, &kept, to_span, args.span(0)) {
            return Val::Bad;
        }
        let (before, after) = (self.sizes(&from_dims), self.sizes(&to_dims));
        if self.elements(&from_dims) != self.elements(&to_dims) {
            let e = Diagnostic::error("E0212", format!("`view` keeps the number of elements: {before} is not {after}"));
            let e = e.label(args.span(1), before).label(to_span, after);
            return self.fail(e.help("the sizes on both sides of `->` must have one product"));
        }
        if from_dims == to_dims {
            return Val::Tensor(x);
        }
        let ty = self.ty(x).clone();
        Val::Tensor(self.push(Op::View { from: from_dims, to: to_dims }, vec![x], Type::new(ty.dtype, vec![])))
    }

    /// `heads * head_dim = 768`.
    fn sizes(&self, dims: &[Dim]) -> String {
        let names: Vec<&str> = dims.iter().map(|d| self.body.dims.name(*d)).collect();
        match self.elements(dims) {
            Some(product) => format!("{} = {product}", names.join(" * ")),
            None => format!("{} (too many to count)", names.join(" * ")),
        }
    }

    pub fn slice(&mut self, args: &Args) -> Val {
        let (Some(x), Some((from, to, to_span))) = (self.tensor_of(args), self.arrow(args, "slice")) else { return Val::Bad };
        let (&[from], &[to]) = (from.as_slice(), to.as_slice()) else {
            let e = Diagnostic::error("E0409", "`slice` cuts one dim").label(args.span(1), "one dim on each side of `->`");
            return self.fail(e);
        };
        let Some(from) = self.require(x, from, args.span(0), args.span(1)) else { return Val::Bad };
        let Some(to) = self.ir_dim(to, to_span) else { return Val::Bad };
        let kept: Vec<Dim> = self.ty(x).dims.iter().copied().filter(|d| *d != from).collect();
        if !self.absent(&[to], &kept, to_span, args.span(0)) {
            return Val::Bad;
        }
        let at = match args.val(2) {
            Val::None => 0,
            other => match self.int(other) {
                Some(n) => n,
                None => {
                    let e = Diagnostic::error("E0202", format!("`at` wants an int, this is {}", self.said(other)));
                    return self.fail(e.label(args.span(2), "expected a static int"));
                }
            },
        };
        let (length, size) = (self.body.dims.size(to), self.body.dims.size(from));
        let offset = u64::try_from(at).ok().filter(|at| at.checked_add(length).is_some_and(|end| end <= size));
        let Some(offset) = offset else {
            let e = Diagnostic::error(
                "E0210",
                format!("{} = {length} elements from {at} on reach past the end of {}", self.body.dims.name(to), self.body.dims.name(from)),
            );
            return self.fail(e.label(to_span, format!("{size} elements are there")));
        };
        let dtype = self.ty(x).dtype;
        Val::Tensor(self.push(Op::Slice { from, to: Some(to), at: offset }, vec![x], Type::new(dtype, vec![])))
    }

    pub fn expand(&mut self, args: &Args) -> Val {
        let val = args.val(0).clone();
        // A static number counts as a float, as in `expand(0.0, experts)`.
        let x = match self.real(&val) {
            Some(x) if !matches!(val, Val::Tensor(_)) => Some(self.constant(x, DType::F32)),
            _ => self.tensor(&val, args.span(0)),
        };
        let ids = match args.val(1) {
            Val::Dim(d) => vec![*d],
            Val::Dims(ds) => ds.clone(),
            other => {
                let e = Diagnostic::error("E0202", format!("expected dims, this is {}", self.said(other)));
                return self.fail(e.label(args.span(1), "not a dim"));
            }
        };
        let (Some(x), Some(dims)) = (x, self.ir_dims(&ids, args.span(1))) else { return Val::Bad };
        let ty = self.ty(x).clone();
        if !self.absent(&dims, &ty.dims, args.span(1), args.span(0)) {
            return Val::Bad;
        }
        let all = ty.dims.iter().copied().chain(dims).collect::<Vec<_>>();
        Val::Tensor(self.push(Op::Expand, vec![x], Type::new(ty.dtype, all)))
    }

    /// The arguments of `concat(x.., [d, e] -> f)` and `stack(x.., over: d)`.
    fn joined(&mut self, frame: FrameId, call: &Call, span: Span) -> Option<Joined> {
        let what = call.path.to_string();
        let is_stack = what == "stack";
        let usage = if is_stack { "`stack(a, b, over: dim)`" } else { "`concat(a, b, [d, e] -> f)`" };
        let wrong = |elab: &mut Self, span: Span, label: &str| {
            let e = Diagnostic::error("E0409", format!("`{what}` does not take this")).label(span, label);
            elab.report(e.help(usage));
        };
        let Some((last, parts)) = call.args.split_last() else {
            wrong(self, span, "has no arguments");
            return None;
        };
        let mut good = true;
        let mut vals = vec![];
        for arg in parts {
            if arg.name.is_some() || arg.to.is_some() {
                wrong(self, arg.value.span, "expected a tensor");
                good = false;
                continue;
            }
            let val = self.eval(frame, &arg.value);
            if let (true, Val::Reals(numbers)) = (is_stack, &val) {
                vals.extend(numbers.iter().map(|x| (self.constant(*x, DType::F32), arg.value.span)));
                continue;
            }
            match self.tensor(&val, arg.value.span) {
                Some(v) => vals.push((v, arg.value.span)),
                None => good = false,
            }
        }
        let named_over = last.name.as_ref().is_some_and(|n| &*n.name == "over");
        let (from, to) = match (&last.to, is_stack && named_over) {
            (Some(to), false) if !is_stack && last.name.is_none() => (self.dims_of(frame, &last.value)?, to),
            (None, true) => (vec![], &last.value),
            _ => {
                wrong(self, last.value.span, if is_stack { "expected `over: dim`" } else { "expected `[d, e] -> f`" });
                return None;
            }
        };
        let to_span = to.span;
        let &[to] = self.dims_of(frame, to)?.as_slice() else {
            wrong(self, to_span, "expected one dim");
            return None;
        };
        if !good || vals.is_empty() {
            if good {
                wrong(self, span, "has nothing to join");
            }
            return None;
        }
        // All parts must have one element type.
        let dtypes: Vec<DType> = vals.iter().map(|(v, _)| self.ty(*v).dtype).collect();
        if dtypes.iter().any(|t| *t != dtypes[0]) {
            let e = Diagnostic::error("E0202", format!("`{what}` of different element types")).label(vals[0].1, dtypes[0].name());
            let other = dtypes.iter().position(|t| *t != dtypes[0]).unwrap_or(0);
            self.report(e.label(vals[other].1, dtypes[other].name()).help("`f32(..)` or `i32(..)` converts"));
            return None;
        }
        Some(Joined { values: vals, from, to, to_span })
    }

    /// Checks that all parts have the same dims beside the joined one.
    fn same_rest(&mut self, what: &str, parts: &[(Value, Span, Option<Dim>)]) -> bool {
        let rest = |elab: &Self, i: usize| -> Vec<Dim> { elab.ty(parts[i].0).dims.iter().copied().filter(|d| Some(*d) != parts[i].2).collect() };
        let first = rest(self, 0);
        for i in 1..parts.len() {
            let other = rest(self, i);
            if other.len() != first.len() || other.iter().any(|d| !first.contains(d)) {
                let e = Diagnostic::error("E0205", format!("the parts of `{what}` differ: {} and {}", self.shape(&first), self.shape(&other)));
                let e = e.label(parts[0].1, format!("has {} beside it", self.shape(&first)));
                let e = e.label(parts[i].1, format!("has {} beside it", self.shape(&other)));
                self.report(e.help("`expand(.., dims)` adds what one of them lacks"));
                return false;
            }
        }
        true
    }

    pub fn concat(&mut self, frame: FrameId, call: &Call, span: Span) -> Val {
        let Some(Joined { values, from, to, to_span }) = self.joined(frame, call, span) else { return Val::Bad };
        if values.len() != from.len() {
            let e = Diagnostic::error("E0409", format!("{} values are joined along {} dims", values.len(), from.len()));
            return self.fail(e.label(span, "one dim per value").help("`concat(a, b, [d, e] -> f)`: d of a, then e of b"));
        }
        let mut parts = vec![];
        for ((v, at), id) in values.iter().zip(&from) {
            let Some(d) = self.require(*v, *id, *at, to_span) else { return Val::Bad };
            parts.push((*v, *at, Some(d)));
        }
        let Some(to) = self.ir_dim(to, to_span) else { return Val::Bad };
        if !self.same_rest("concat", &parts) {
            return Val::Bad;
        }
        let dims: Vec<Dim> = parts.iter().filter_map(|p| p.2).collect();
        let (sum, size) = (dims.iter().map(|d| self.body.dims.size(*d)).sum::<u64>(), self.body.dims.size(to));
        if sum != size {
            let names: Vec<String> = dims.iter().map(|d| format!("{} = {}", self.body.dims.name(*d), self.body.dims.size(*d))).collect();
            let e = Diagnostic::error("E0212", format!("{} make {sum}, not {} = {size}", names.join(" and "), self.body.dims.name(to)));
            return self.fail(e.label(to_span, format!("has {size} elements")));
        }
        // The result is stored like its largest part.
        let largest = parts.iter().copied().reduce(|a, b| if self.elements(&self.ty(b.0).dims) > self.elements(&self.ty(a.0).dims) { b } else { a });
        let order: Vec<Dim> = match largest {
            Some((v, _, own)) => self.ty(v).dims.iter().map(|d| if Some(*d) == own { to } else { *d }).collect(),
            None => vec![],
        };
        let dtype = self.ty(parts[0].0).dtype;
        if !self.distinct(&order, to_span) {
            return Val::Bad;
        }
        Val::Tensor(self.push(Op::Concat { from: dims, to }, parts.iter().map(|p| p.0).collect(), Type::new(dtype, order)))
    }

    fn distinct(&mut self, dims: &[Dim], span: Span) -> bool {
        match dims.iter().enumerate().find(|(i, d)| dims[..*i].contains(d)) {
            None => true,
            Some((_, d)) => {
                let name = self.body.dims.name(*d).to_string();
                let e = Diagnostic::error("E0209", format!("the value has a dim `{name}` already")).label(span, "would be there twice");
                self.report(e.help(format!("a copy of it is another dim: `dim other = {name};`")));
                false
            }
        }
    }

    /// `stack(a, b, over: d)`: element i of d is the i-th value, or number of a list; a choice by the index along d.
    pub fn stack(&mut self, frame: FrameId, call: &Call, span: Span) -> Val {
        let Some(Joined { values, to, to_span, .. }) = self.joined(frame, call, span) else { return Val::Bad };
        let Some(over) = self.ir_dim(to, to_span) else { return Val::Bad };
        let size = self.body.dims.size(over);
        if size != values.len() as u64 {
            let e = Diagnostic::error("E0212", format!("{} values are stacked over {} = {size}", values.len(), self.body.dims.name(over)));
            return self.fail(e.label(to_span, format!("has {size} elements")).help("one value per element"));
        }
        let parts: Vec<_> = values.iter().map(|(v, at)| (*v, *at, None)).collect();
        if !self.same_rest("stack", &parts) {
            return Val::Bad;
        }
        let ty = self.ty(values[0].0).clone();
        if !self.absent(&[over], &ty.dims, to_span, values[0].1) {
            return Val::Bad;
        }
        // The new dim stands before the last one, where a merge into one dim usually needs it.
        let mut dims = ty.dims.clone();
        dims.insert(dims.len().saturating_sub(1), over);
        let index = self.push(Op::Iota(over), vec![], Type::new(DType::I32, [over]));
        let mut rest = values.iter().map(|v| v.0).enumerate().rev();
        let Some((_, mut result)) = rest.next() else { return Val::Bad };
        if values.len() == 1 {
            return Val::Tensor(self.push(Op::Expand, vec![result], Type::new(ty.dtype, dims)));
        }
        for (i, v) in rest {
            let number = self.push(Op::Const(Real(i as f64)), vec![], Type::scalar(DType::I32));
            let here = self.compare(Compare::Eq, index, number);
            result = self.push(Op::Select, vec![here, v, result], Type::new(ty.dtype, dims.clone()));
        }
        Val::Tensor(result)
    }
}
