//! Functions marked `@op` that become one operation.

use super::Elab;
use super::call::BoundCall;
use super::value::{FrameId, Val};
use ir::diag::Diagnostic;
use ir::dim::Dim;
use ir::graph::{Type, Value};
use ir::op::{self, Binary, DType, Op, Real, Scoring, Unary};
use std::collections::{HashMap, HashSet};

/// Why an attention is computed by its body. `None` if its arguments are wrong, which the body then reports.
type InlineReason = Option<&'static str>;

/// The most steps of a program of scores, and operands that it reads.
const MOST_STEPS: usize = 64;
const MOST_OPERANDS: usize = 8;

/// A program of scores in the making.
struct Program {
    /// The dim of a score's query, and that of its key.
    pair: [Dim; 2],
    scoring: Scoring,
    operands: Vec<Value>,
    /// An operand that is read as a whole, whatever computes it.
    whole: Option<Value>,
    /// The step of each value that has one.
    steps: HashMap<Value, u32>,
    /// How many more steps may be asked for.
    left: usize,
}

impl Elab<'_> {
    /// The operation for an `@op` function of the library, if its arguments fit. `None` runs its body.
    pub fn as_op(&mut self, entered: &BoundCall) -> Option<Val> {
        let function = &entered.closure.function;
        let library = self.in_library(function.name.span);
        if self.options.inline_ops || !function.op || !library || &*function.name.name != "weighed_attention" {
            return None;
        }
        match self.attention(entered.frame) {
            Ok(value) => Some(value),
            Err(why) => {
                why.into_iter().for_each(|why| self.stores_scores(entered.frame, why));
                None
            }
        }
    }

    /// Warns that an attention is computed by its body, and says how much that stores.
    fn stores_scores(&mut self, frame: FrameId, why: &str) {
        let (Some(q), Some(d), Some(keys), Some(span)) =
            (self.tensor_argument(frame, "q"), self.dim_argument(frame, "d"), self.dim_argument(frame, "keys"), self.user_span)
        else {
            return;
        };
        let scores: Vec<Dim> = self.ty(q).dims.iter().copied().filter(|x| *x != d).chain([keys]).collect();
        let bytes = scores.iter().fold(4u64, |n, d| n.saturating_mul(self.body.dims.size(*d)));
        let e = Diagnostic::warning("W0404", format!("this attention stores a score for each query and key: {why}"));
        let e = e.label(span, format!("{} of f32, {:.1} MiB of all ranks together", self.shape(&scores), bytes as f64 / f64::from(1 << 20)));
        self.report(e.help("with other operands, or fewer steps, it is one kernel that stores none"));
    }

    fn argument(&self, frame: FrameId, name: &str) -> Option<Val> {
        self.frames[frame.0].vars.get(name).map(|v| v.val.clone())
    }

    fn tensor_argument(&self, frame: FrameId, name: &str) -> Option<Value> {
        match self.argument(frame, name)? {
            Val::Tensor(v) => Some(v),
            _ => None,
        }
    }

    fn dim_argument(&self, frame: FrameId, name: &str) -> Option<Dim> {
        match self.argument(frame, name)? {
            Val::Dim(d) => self.dims[d.0].ir,
            _ => None,
        }
    }

    /// Builds [`Op::Attention`] if the shapes are those that the op describes.
    fn attention(&mut self, frame: FrameId) -> Result<Val, InlineReason> {
        let tensors = ["q", "k", "v"].map(|name| self.tensor_argument(frame, name));
        let dims = ["d", "keys"].map(|name| self.dim_argument(frame, name));
        let ([Some(q), Some(k), Some(v)], [Some(d), Some(keys)], Some(Val::Real(scale))) = (tensors, dims, self.argument(frame, "scale")) else {
            return Err(None);
        };
        let [mask, bias, sink, weight] = ["mask", "bias", "sink", "weight"].map(|name| match self.argument(frame, name) {
            Some(Val::None) => Ok(None),
            Some(Val::Tensor(v)) => Ok(Some(v)),
            _ => Err(None),
        });
        let cap = match self.argument(frame, "cap") {
            Some(Val::None) => None,
            Some(Val::Real(cap)) => Some(cap),
            _ => return Err(None),
        };
        let (mask, bias, sink, weight) = (mask?, bias?, sink?, weight?);
        let (tq, tk, tv) = (self.ty(q).clone(), self.ty(k).clone(), self.ty(v).clone());
        let same_dtype = tq.dtype.is_float() && tk.dtype == tq.dtype && tv.dtype == tq.dtype;
        let shared = |t: &Type| t.dims.iter().all(|x| *x == keys || tq.has(*x));
        let fits = same_dtype
            && tq.has(d)
            && !tq.has(keys)
            && tk.has(keys)
            && tk.has(d)
            && shared(&tk)
            && tv.dims.len() == tk.dims.len()
            && tk.dims.iter().all(|x| *x == d || tv.has(*x));
        // Values have the keys' dim of elements, or a dim of their own in its place.
        let values = if tv.has(d) { Some(d) } else { tv.dims.iter().copied().find(|x| !tk.has(*x) && !tq.has(*x)) };
        let Some(values) = values.filter(|_| fits) else {
            if !shared(&tk) {
                return Err(Some(
                    "its keys have a dim that its queries lack; grouped queries have the dim of the keys' heads and one of the group, as in [kv_heads, group, head_dim]",
                ));
            }
            return Err(Some("its operands have other dims or types than one kernel takes"));
        };
        let at = self.position([mask, bias], &tq, &tk, keys).ok_or(Some("no dim of its queries is theirs alone"))?;
        if [mask, bias, weight].into_iter().flatten().any(|v| self.ty(v).dims.iter().any(|x| *x == d || *x != keys && !tq.has(*x))) {
            return Err(Some("its mask, its bias or its weight has a dim that its scores lack"));
        }
        if weight.is_some_and(|w| self.trains(w)) {
            return Err(Some("its weight trains"));
        }
        if sink.is_some_and(|s| !self.ty(s).dtype.is_float() || self.ty(s).dims.iter().any(|x| *x == d || !tq.has(*x))) {
            return Err(Some("its sink is no float of its queries"));
        }
        let mut program =
            Program { pair: [at, keys], scoring: Scoring::PLAIN, operands: vec![], whole: None, steps: HashMap::new(), left: 4 * MOST_STEPS };
        let bias = bias.map(|b| if self.trains(b) { self.of_pairs(b, program.pair, &mut program) } else { b });
        self.score(&mut program, cap, bias)?;
        program.scoring.seen = ir::fault!("elaborate.attention.causal", None, mask.map(|m| self.steps(&mut program, m)).transpose()?);
        program.scoring.weight = weight.map(|w| self.steps(&mut program, w)).transpose()?;
        let op = op::Attention { at, keys, d, values, scale: Real(ir::fault!("elaborate.attention.scale", 1.0, scale)), scoring: program.scoring };
        let further = program.operands[..op.scoring.operands()].to_vec();
        let ty = Type::new(tq.dtype, op.result_dims(&tq.dims));
        let log = (Op::AttentionLse(op.without_values()), [q, k].into_iter().chain(further.iter().copied()).collect());
        let whole = self.push(Op::Attention(op), [q, k, v].into_iter().chain(further).collect(), ty);
        Ok(Val::Tensor(sink.map_or(whole, |sink| self.with_sink(whole, log, sink, d))))
    }

    /// Attention beside a sink: with the log-sum-exp of its scores, each result counts `1 / (1 + exp(sink -
    /// log))`, which is the logistic function.
    fn with_sink(&mut self, whole: Value, (log, args): (Op, Vec<Value>), sink: Value, d: Dim) -> Value {
        let ty = self.ty(whole).clone();
        let rows = |q: &Type| Type::new(DType::F32, q.dims.iter().copied().filter(|x| *x != d).collect::<Vec<_>>());
        let rows = rows(&self.ty(args[0]).clone());
        let log = self.push(log, args, rows.clone());
        let sink = match self.ty(sink).dtype {
            DType::F32 => sink,
            _ => self.push(Op::Cast, vec![sink], Type::new(DType::F32, self.ty(sink).dims.clone())),
        };
        // This goes by tanh, which has a slope even where a query sees no key and the logarithm is infinite.
        let above = self.push(Op::Binary(Binary::Sub), vec![log, sink], rows.clone());
        let [half, one] = [0.5, 1.0].map(|x| self.constant(x, DType::F32));
        let near = self.push(Op::Binary(Binary::Mul), vec![above, half], rows.clone());
        let bent = self.push(Op::Unary(Unary::Tanh), vec![near], rows.clone());
        let twice = self.push(Op::Add, vec![bent, one], rows.clone());
        let share = self.push(Op::Binary(Binary::Mul), vec![twice, half], rows);
        let wide = Type::new(DType::F32, ty.dims.clone());
        let exact = if ty.dtype == DType::F32 { whole } else { self.push(Op::Cast, vec![whole], wide.clone()) };
        let shared = self.push(Op::Binary(Binary::Mul), vec![exact, share], wide);
        if ty.dtype == DType::F32 { shared } else { self.push(Op::Cast, vec![shared], ty) }
    }

    /// The dim of queries that is their position: one that keys lack, that a mask or a bias names, and of which
    /// `keys` is a copy, if there is one.
    fn position(&self, by: [Option<Value>; 2], q: &Type, k: &Type, keys: Dim) -> Option<Dim> {
        let own: Vec<Dim> = q.dims.iter().copied().filter(|x| !k.has(*x)).collect();
        let named: Vec<Dim> = own.iter().copied().filter(|x| by.iter().flatten().any(|v| self.ty(*v).has(*x))).collect();
        let among = if named.is_empty() { own } else { named };
        let original = self.body.dims.original(keys);
        among.iter().copied().find(|x| self.body.dims.original(*x) == original).or(among.first().copied())
    }

    /// Whether a value depends on a parameter.
    fn trains(&self, v: Value) -> bool {
        let (mut stack, mut met) = (vec![v], HashSet::from([v]));
        while let Some(v) = stack.pop() {
            match self.body[v].op {
                Op::Param(_) => return true,
                Op::StopGradient => {}
                _ => stack.extend(self.body[v].args.iter().copied().filter(|a| met.insert(*a))),
            }
        }
        false
    }

    /// A bias that trains, as an f32 operand with a number for each query and key, so that its gradient is one too.
    fn of_pairs(&mut self, bias: Value, pair: [Dim; 2], program: &mut Program) -> Value {
        let mut dims = self.ty(bias).dims.clone();
        let lacking: Vec<Dim> = pair.into_iter().filter(|d| !dims.contains(d)).collect();
        let exact = match self.ty(bias).dtype {
            DType::F32 => bias,
            _ => self.push(Op::Cast, vec![bias], Type::new(DType::F32, dims.clone())),
        };
        dims.extend(&lacking);
        let wide = if lacking.is_empty() { exact } else { self.push(Op::Expand, vec![exact], Type::new(DType::F32, dims)) };
        program.whole = Some(wide);
        wide
    }

    /// The steps of the changed score: a soft cap, then a bias.
    fn score(&self, program: &mut Program, cap: Option<f64>, bias: Option<Value>) -> Result<(), InlineReason> {
        if cap.is_none() && bias.is_none() {
            return Ok(());
        }
        let mut score = program.scoring.step(Op::Input(0), DType::F32, &[]);
        if let Some(cap) = cap {
            let cap = program.scoring.step(Op::Const(Real(cap)), DType::F32, &[]);
            let part = program.scoring.step(Op::Binary(Binary::Div), DType::F32, &[score, cap]);
            let bent = program.scoring.step(Op::Unary(Unary::Tanh), DType::F32, &[part]);
            score = program.scoring.step(Op::Binary(Binary::Mul), DType::F32, &[bent, cap]);
        }
        if let Some(bias) = bias {
            let dtype = self.ty(bias).dtype;
            let mut term = self.steps(program, bias)?;
            if dtype != DType::F32 {
                term = program.scoring.step(Op::Cast, DType::F32, &[term]);
            }
            score = program.scoring.step(Op::Add, DType::F32, &[score, term]);
        }
        program.scoring.score = Some(score);
        Ok(())
    }

    /// The step of a value: its op, if that takes single numbers of a query and a key, or else an operand.
    fn steps(&self, program: &mut Program, v: Value) -> Result<u32, InlineReason> {
        let whole = program.whole == Some(v);
        let v = if whole { v } else { self.unexpanded(v) };
        program.left = program.left.saturating_sub(1);
        if program.left == 0 || program.scoring.steps.len() == MOST_STEPS || program.operands.len() > MOST_OPERANDS {
            return Err(Some("its mask and bias take more steps or operands than one kernel takes"));
        }
        if let Some(step) = program.steps.get(&v) {
            return Ok(*step);
        }
        let node = &self.body[v];
        let of_pairs = !whole && program.pair.iter().all(|d| node.ty.has(*d)) && node.op.is_pointwise() && node.op != Op::Cut;
        let step = match &node.op {
            Op::Const(Real(x)) => {
                let x = ir::fault!("elaborate.attention.window", *x + 1.0, *x);
                program.scoring.step(Op::Const(Real(x)), node.ty.dtype, &[])
            }
            op if of_pairs => {
                let args = node.args.iter().map(|a| self.steps(program, *a)).collect::<Result<Vec<u32>, InlineReason>>()?;
                program.scoring.step(op.clone(), node.ty.dtype, &args)
            }
            _ => {
                // Equal operands, such as indices, are read once.
                let alike = |w: &Value| {
                    let other = &self.body[*w];
                    (&other.op, &other.args, &other.ty) == (&node.op, &node.args, &node.ty)
                };
                let number = program.operands.iter().position(alike).unwrap_or_else(|| {
                    program.operands.push(v);
                    program.operands.len() - 1
                });
                program.scoring.step(Op::Input(number as u32 + 1), node.ty.dtype, &[])
            }
        };
        program.steps.insert(v, step);
        Ok(step)
    }

    fn unexpanded(&self, mut v: Value) -> Value {
        while let Op::Expand = self.body[v].op {
            v = self.body[v].args[0];
        }
        v
    }
}
