//! The type rules: which operands an op takes and what its result is.

use crate::dim::Dim;
use crate::graph::{Body, Type, Value};
use crate::op::{Attention, Collective, DType, Op, Reduce, Routing, Scalar, Scoring, Unary};

/// A node that breaks a type rule. For a user's program the front end says so first, in the user's words; anywhere
/// else it is a bug of the pass that built the node.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{op}: {text}")]
pub struct TypeError {
    /// The name of the node's op in the text form.
    pub op: String,
    /// Which rule is broken, and how.
    pub text: String,
}

/// Checks node `v` of a body: operands exist and come before it, dims are distinct and known, the type rule holds.
///
/// # Errors
/// The first rule that does not hold.
pub fn check(body: &Body, v: Value) -> Result<(), TypeError> {
    let node = &body[v];
    let fail = |text: String| Err(TypeError { op: node.op.name().into(), text });
    if let Some(a) = node.args.iter().find(|a| a.0 >= v.0) {
        return fail(format!("operand {a} does not come before {v}"));
    }
    for (k, d) in node.ty.dims.iter().enumerate() {
        if d.0 as usize >= body.dims.list.len() {
            return fail(format!("dim {d} is unknown"));
        }
        if node.ty.dims[..k].contains(d) {
            return fail(format!("dim `{}` twice", body.dims.name(*d)));
        }
    }
    let args: Vec<&Type> = node.args.iter().map(|a| &body[*a].ty).collect();
    let want = infer(body, &node.op, &args, &node.ty)?;
    if want.dtype != node.ty.dtype {
        return fail(format!("the result is {}, not {}", want.dtype.name(), node.ty.dtype.name()));
    }
    let names = |dims: &[Dim]| dims.iter().map(|d| body.dims.label(*d)).collect::<Vec<_>>().join(", ");
    if want.dims.len() != node.ty.dims.len() || want.dims.iter().any(|d| !node.ty.has(*d)) {
        return fail(format!("the result has [{}], not [{}]", names(&want.dims), names(&node.ty.dims)));
    }
    Ok(())
}

/// The union of the operands' dims, in order of first appearance.
pub fn union(args: &[&Type]) -> Vec<Dim> {
    let mut out = vec![];
    for d in args.iter().flat_map(|t| &t.dims) {
        if !out.contains(d) {
            out.push(*d);
        }
    }
    out
}

/// The type of an op's result; dims in a natural storage order (checks compare them as sets). `declared` supplies what
/// operands do not determine: a source's type, the dtype of a cast or of a sum (that of the operands or f32), the added dims of
/// an expansion.
///
/// # Errors
/// The operands do not fit the op.
pub fn infer(body: &Body, op: &Op, args: &[&Type], declared: &Type) -> Result<Type, TypeError> {
    let dims = &body.dims;
    let fail = |text: &str| Err(TypeError { op: op.name().into(), text: text.into() });
    if let Some(why) = op.arity().refuses(args.len()) {
        return fail(&why);
    }
    let same = |types: &[&Type]| types.windows(2).all(|w| w[0].dtype == w[1].dtype);
    // Sums are taken in f32; a sum of 16-bit values need not be rounded to them.
    let sum = |t: DType| if t.is_half() && declared.dtype == DType::F32 { DType::F32 } else { t };
    let without = |ty: &Type, over: &[Dim]| -> Option<Vec<Dim>> {
        over.iter().all(|d| ty.has(*d)).then(|| ty.dims.iter().copied().filter(|d| !over.contains(d)).collect())
    };
    let replaced = |ty: &Type, from: &[Dim], to: &[Dim]| -> Option<Vec<Dim>> {
        let rest = without(ty, from)?;
        let at = ty.dims.iter().position(|d| from.contains(d)).unwrap_or(ty.dims.len());
        let at = ty.dims[..at].iter().filter(|d| rest.contains(d)).count();
        let mut out = rest;
        out.splice(at..at, to.iter().copied());
        Some(out)
    };
    let ty = match op {
        Op::Input(_) | Op::Param(_) | Op::Table(_) | Op::Const(_) | Op::Recv { .. } => declared.clone(),
        Op::Reshard { .. } | Op::Send { .. } => args[0].clone(),
        Op::Limit { .. } if *args[0] == Type::scalar(DType::I32) => args[0].clone(),
        Op::Limit { .. } => return fail("wants an i32 scalar"),
        Op::Collective { kind, part, .. } => {
            return collective(*kind, *part, args[0])
                .ok_or_else(|| TypeError { op: kind.name().into(), text: "the operand lacks the dim of its parts".into() });
        }
        Op::State(..) => Type::new(DType::F32, declared.dims.clone()),
        Op::Uniform { .. } => Type::new(DType::F32, declared.dims.clone()),
        Op::Iota(d) => Type::new(DType::I32, [*d]),
        Op::Scalar(s) => Type::scalar(match s {
            Scalar::LearningRate | Scalar::LossScale | Scalar::BiasCorrection(_) => DType::F32,
            Scalar::Step | Scalar::Seed | Scalar::Linear(_) => DType::I32,
            Scalar::Slot(_) => declared.dtype,
        }),
        Op::Unary(u) => match (u, args[0].dtype) {
            (Unary::Not, DType::Bool) => args[0].clone(),
            (Unary::Neg | Unary::Abs | Unary::Sign, DType::I32) => args[0].clone(),
            (_, t) if t.is_float() && *u != Unary::Not => args[0].clone(),
            (_, t) => return fail(&format!("not defined for {}", t.name())),
        },
        Op::Binary(b) => {
            if !same(args) {
                return fail("operands of different dtypes");
            }
            if !b.takes(args[0].dtype) {
                return fail(&format!("not defined for {}", args[0].dtype.name()));
            }
            Type::new(args[0].dtype, union(args))
        }
        Op::Compare(_) => {
            if !same(args) {
                return fail("operands of different dtypes");
            }
            Type::new(DType::Bool, union(args))
        }
        Op::Select => {
            if args[0].dtype != DType::Bool || !same(&args[1..]) {
                return fail("wants a bool and two operands of one dtype");
            }
            Type::new(args[1].dtype, union(args))
        }
        Op::Add => {
            if args.is_empty() || !same(args) || args[0].dtype == DType::Bool {
                return fail("wants operands of one number type");
            }
            Type::new(args[0].dtype, union(args))
        }
        Op::Cast => Type::new(declared.dtype, args[0].dims.clone()),
        Op::StopGradient | Op::Cut => args[0].clone(),
        Op::Expand => {
            if args[0].dims.iter().any(|d| !declared.has(*d)) {
                return fail("drops a dim");
            }
            Type::new(args[0].dtype, declared.dims.clone())
        }
        Op::View { from, to } => {
            if dims.elements(from) != dims.elements(to) {
                return fail("the two sides have different numbers of elements");
            }
            match replaced(args[0], from, to) {
                Some(d) => Type::new(args[0].dtype, d),
                None => return fail("the operand lacks a dim"),
            }
        }
        Op::Slice { from, to, at } => {
            let len = to.map_or(1, |d| dims.size(d));
            match replaced(args[0], &[*from], to.as_slice()) {
                Some(d) if at.saturating_add(len) <= dims.size(*from) => Type::new(args[0].dtype, d),
                Some(_) => return fail("reaches past the end"),
                None => return fail("the operand lacks the dim"),
            }
        }
        Op::Pad { from, to, at } => {
            let len = from.map_or(1, |d| dims.size(d));
            match replaced(args[0], from.as_slice(), &[*to]) {
                Some(d) if at.saturating_add(len) <= dims.size(*to) => Type::new(args[0].dtype, d),
                Some(_) => return fail("reaches past the end"),
                None => return fail("the operand lacks the dim"),
            }
        }
        Op::Concat { from, to } => {
            if from.len() != args.len() || !same(args) {
                return fail("wants one dim per operand and one dtype");
            }
            if from.iter().map(|d| dims.size(*d)).sum::<u64>() != dims.size(*to) {
                return fail("the parts do not add up");
            }
            match replaced(args[0], &from[..1], &[*to]) {
                Some(d) => Type::new(args[0].dtype, d),
                None => return fail("an operand lacks its dim"),
            }
        }
        Op::Shard { from, to, index } => match replaced(args[0], &[*from], &[*to]) {
            Some(d) if index.len() == dims.size(*to) => Type::new(args[0].dtype, d),
            _ => return fail("the part does not fit its dim"),
        },
        Op::Dot { tf32: true, .. } | Op::GroupedDot { tf32: true, .. } if args[0].dtype != DType::F32 => {
            return fail("rounds f32 factors to tf32, and has others");
        }
        Op::Dot { over, .. } => {
            if !same(args) || !args[0].dtype.is_float() || over.iter().any(|d| !args[0].has(*d) || !args[1].has(*d)) {
                return fail("wants floats that both have the contracted dims");
            }
            let mut out = union(args);
            out.retain(|d| !over.contains(d));
            Type::new(sum(args[0].dtype), out)
        }
        Op::GroupedDot { rows, experts, over, .. } => {
            if !same(&args[..2]) || !args[0].dtype.is_float() || !grouped(*rows, *experts, over, args) {
                return fail("wants floats and i32 ends, rows in the first operand, rows or experts in the second, and a sum that fits them");
            }
            let mut out = union(&args[..2]);
            out.retain(|d| !over.contains(d));
            if !args[1].has(*experts) {
                out.insert(0, *experts);
            }
            Type::new(sum(args[0].dtype), out)
        }
        Op::Reduce { kind, over } => match without(args[0], over) {
            Some(d) if (*kind == Reduce::Any) == (args[0].dtype == DType::Bool) => {
                let dtype = args[0].dtype;
                Type::new(if *kind == Reduce::Sum { sum(dtype) } else { dtype }, d)
            }
            _ => return fail("the operand lacks a dim, or has the wrong dtype"),
        },
        Op::ArgMax { over } => match without(args[0], &[*over]) {
            Some(d) => Type::new(DType::I32, d),
            None => return fail("the operand lacks the dim"),
        },
        Op::Cumsum { over, .. } => match without(args[0], &[*over]) {
            Some(_) => args[0].clone(),
            None => return fail("the operand lacks the dim"),
        },
        Op::Gather { dim } => {
            if !args[0].has(*dim) || args[1].has(*dim) || args[1].dtype != DType::I32 {
                return fail("wants a table with the dim and i32 indices without it");
            }
            let mut out = args[1].dims.clone();
            out.extend(args[0].dims.iter().copied().filter(|d| d != dim && !args[1].has(*d)));
            Type::new(args[0].dtype, out)
        }
        Op::Scatter { dim } => {
            if args[0].has(*dim) || args[1].has(*dim) || args[1].dtype != DType::I32 || !declared.has(*dim) {
                return fail("wants values and i32 indices without the dim, and a result with it");
            }
            if declared.dims.iter().any(|d| d != dim && !args[0].has(*d)) || args[0].dims.iter().any(|d| !args[1].has(*d) && !declared.has(*d)) {
                return fail("the result's dims are the values' without those summed by the index");
            }
            Type::new(sum(args[0].dtype), declared.dims.clone())
        }
        Op::Dispatch(r) => {
            let (x, chosen) = (args[0], args[1]);
            if x.has(r.experts) || !routes(r, chosen) {
                return fail("wants i32 choices and a value without the experts");
            }
            let mut out: Vec<Dim> = chosen.dims.iter().copied().filter(|d| *d != r.choice).collect();
            out.push(r.experts);
            out.extend(x.dims.iter().copied().filter(|d| *d != r.choice && !chosen.has(*d)));
            Type::new(x.dtype, out)
        }
        Op::Combine(r) => {
            let (y, chosen) = (args[0], args[1]);
            if !y.has(r.experts) || y.has(r.choice) || !routes(r, chosen) {
                return fail("wants i32 choices and a value with the experts");
            }
            let mut out = chosen.dims.clone();
            out.extend(y.dims.iter().copied().filter(|d| *d != r.experts && !chosen.has(*d)));
            Type::new(y.dtype, out)
        }
        Op::Attention(a) => {
            let (q, v) = (args[0], args[2]);
            if !attention_fits(a, args) || !same(&args[..3]) || !v.has(a.keys) || !v.has(a.values) || v.has(a.at) {
                return fail("operands do not fit");
            }
            Type::new(sum(q.dtype), a.result_dims(&q.dims))
        }
        Op::AttentionLse(a) => {
            if !attention_fits(a, args) || a.values != a.d {
                return fail("operands do not fit");
            }
            Type::new(DType::F32, args[0].dims.iter().copied().filter(|d| *d != a.d).collect::<Vec<_>>())
        }
        Op::AttentionGrad(a, which) => {
            if !attention_fits(a, args) || args[3].has(a.values) || args[4].has(a.values) || !args[5].has(a.values) {
                return fail("operands do not fit");
            }
            if !same(&[args[0], args[1], args[2], args[5]]) || [args[3], args[4]].iter().any(|t| t.dtype != DType::F32) {
                return fail("wants q, k, v and the gradient of one dtype, and statistics of f32");
            }
            let of = args[match which {
                crate::op::AttentionGrad::Q => 0,
                crate::op::AttentionGrad::K => 1,
                crate::op::AttentionGrad::V => 2,
                crate::op::AttentionGrad::Bias => {
                    let of_pairs = |k: &usize| [a.at, a.keys].iter().all(|d| args[6 + k].has(*d));
                    let Some(bias) = a.scoring.bias().filter(of_pairs) else { return fail("its program adds no operand of pairs last") };
                    6 + bias
                }
            }];
            Type::new(sum(of.dtype), of.dims.clone())
        }
    };
    Ok(ty)
}

fn collective(kind: Collective, part: Option<Dim>, arg: &Type) -> Option<Type> {
    let mut ty = arg.clone();
    match (kind, part) {
        (Collective::AllReduce(_) | Collective::Shift, None) => {}
        (Collective::AllGather, Some(p)) if !arg.has(p) => ty.dims.insert(0, p),
        (Collective::ReduceScatter(_), Some(p)) if arg.has(p) => ty.dims.retain(|d| *d != p),
        (Collective::AllToAll, Some(p)) if arg.has(p) => {}
        (Collective::AllReduce(_) | Collective::AllGather | Collective::ReduceScatter(_) | Collective::AllToAll | Collective::Shift, _) => {
            return None;
        }
    }
    Some(ty)
}

/// Whether the operands of a `GroupedDot` are what it says of them.
fn grouped(rows: Dim, experts: Dim, over: &[Dim], args: &[&Type]) -> bool {
    let (a, b, ends) = (args[0], args[1], args[2]);
    let part = |d: Dim| d != experts && ends.has(d);
    let summed = match (b.has(rows), b.has(experts)) {
        (true, false) => rows,
        (false, true) => experts,
        (true, true) | (false, false) => return false,
    };
    let others = |d: Dim| a.has(d) && b.has(d) && d != rows && (summed == rows || !part(d));
    ends.dtype == DType::I32
        && ends.has(experts)
        && !ends.has(rows)
        && ends.dims.iter().all(|d| *d == experts || a.has(*d))
        && a.has(rows)
        && !a.has(experts)
        && over.contains(&summed)
        && over.iter().all(|d| *d == summed || others(*d))
}

fn routes(r: &Routing, chosen: &Type) -> bool {
    chosen.dtype == DType::I32 && chosen.has(r.choice) && !chosen.has(r.experts)
}

/// Whether a program is one of pointwise ops, by the type rules, whose results are a float of 32 bits and a bool.
fn is_scoring(s: &Scoring) -> bool {
    let body = s.body();
    let source = |v: Value| match body[v].op {
        Op::Input(0) => body[v].ty.dtype == DType::F32,
        Op::Input(_) | Op::Const(_) => true,
        Op::Cut => false,
        _ => body[v].op.is_pointwise(),
    };
    let is = |at: Option<u32>, dtype| at.is_none_or(|at| s.steps.get(at as usize).is_some_and(|s| s.dtype == dtype));
    body.values().all(|v| source(v) && check(&body, v).is_ok())
        && is(s.score, DType::F32)
        && is(s.seen, DType::Bool)
        && is(s.weight, DType::F32)
        && !s.weight.is_some_and(|w| s.reads_score(w))
}

fn attention_fits(a: &Attention, args: &[&Type]) -> bool {
    let (q, k) = (args[0], args[1]);
    let of_pairs = |ty: &Type| ty.dims.iter().all(|d| *d == a.keys || *d != a.d && q.has(*d));
    let further = a.further(args);
    let types = a.scoring.operand_types();
    further.len() == types.len()
        && further.iter().zip(types).all(|(ty, read)| read == Some(ty.dtype) && of_pairs(ty))
        && is_scoring(&a.scoring)
        && q.dtype == k.dtype
        && q.dtype.is_float()
        && q.has(a.at)
        && q.has(a.d)
        && k.has(a.keys)
        && k.has(a.d)
        && !q.has(a.keys)
        && (a.values == a.d || !q.has(a.values) && !k.has(a.values))
        && k.dims.iter().all(|d| *d == a.keys || q.has(*d))
        && !k.has(a.at)
}
