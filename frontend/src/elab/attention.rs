//! Functions marked `@op` that become one operation.

use super::Elab;
use super::call::Entered;
use super::value::{FrameId, Val};
use ir::diag::Diagnostic;
use ir::dim::Dim;
use ir::graph::{Type, Value};
use ir::op::{self, Binary, Compare, Op, Real};

/// Why an attention is computed by its body; nothing if its arguments are wrong, which the body says.
type Unfit = Option<&'static str>;

/// Dims and indices of queries and keys, and the window, if there is one.
type Mask = ([(Dim, Value); 2], Option<u32>);

impl Elab<'_> {
    /// The operation that an `@op` function of the library is, if its arguments fit; none runs its body.
    pub fn as_op(&mut self, entered: &Entered) -> Option<Val> {
        let function = &entered.closure.function;
        let library = self.in_library(function.name.span);
        if self.options.inline_ops || !function.op || !library || &*function.name.name != "attention" {
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

    /// Says of an attention that its body is computed, and how much that stores.
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
        self.report(e.help("without a bias, and with no mask or `causal`, alone or with `within`, it is one kernel that stores none"));
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

    /// [`Op::Attention`] where there is no bias, the mask is none or causal, with a window or without, and the shapes are what the op describes.
    fn attention(&mut self, frame: FrameId) -> Result<Val, Unfit> {
        let tensors = ["q", "k", "v"].map(|name| self.tensor_argument(frame, name));
        let dims = ["d", "keys"].map(|name| self.dim_argument(frame, name));
        let ([Some(q), Some(k), Some(v)], [Some(d), Some(keys)], Some(Val::Real(scale))) = (tensors, dims, self.argument(frame, "scale")) else {
            return Err(None);
        };
        match self.argument(frame, "bias") {
            Some(Val::None) => {}
            Some(Val::Tensor(_)) => return Err(Some("it has a bias")),
            _ => return Err(None),
        }
        let (causal, window) = match self.argument(frame, "mask") {
            Some(Val::None) => (None, None),
            Some(Val::Tensor(mask)) => {
                let (sides, window) = self.mask(mask).ok_or(Some("its mask is another than `causal`, alone or with `within`"))?;
                (Some(sides), window)
            }
            _ => return Err(None),
        };
        let (tq, tk, tv) = (self.ty(q).clone(), self.ty(k).clone(), self.ty(v).clone());
        let same_dtype = tq.dtype.is_float() && tk.dtype == tq.dtype && tv.dtype == tq.dtype;
        let queries: Vec<Dim> = tq.dims.iter().copied().filter(|x| !tk.has(*x)).collect();
        let at = match causal {
            Some([(at, _), (masked, _)]) if masked == keys && queries.contains(&at) => at,
            Some(_) => return Err(Some("its mask is of other dims than its queries and keys")),
            // Without a mask any dim that only queries have can be the position; the original of `keys` usually is.
            None => {
                let original = self.body.dims.original(keys);
                let at = queries.iter().copied().find(|x| self.body.dims.original(*x) == original).or(queries.first().copied());
                at.ok_or(Some("no dim of its queries is theirs alone"))?
            }
        };
        let shared = |t: &Type| t.dims.iter().all(|x| *x == keys || tq.has(*x));
        let fits = same_dtype
            && tq.has(d)
            && !tq.has(keys)
            && tk.has(keys)
            && tk.has(d)
            && shared(&tk)
            && tv.dims.len() == tk.dims.len()
            && tv.dims.iter().all(|x| tk.has(*x));
        if !fits {
            return Err(Some("its values have other dims than its keys, or its operands other dims or types than one kernel takes"));
        }
        let op = Op::Attention(op::Attention {
            at,
            keys,
            d,
            scale: Real(ir::fault!("elaborate.attention.scale", 1.0, scale)),
            causal: ir::fault!("elaborate.attention.causal", false, causal.is_some()),
            window,
        });
        let positions = causal.into_iter().flatten().map(|(_, position)| position);
        Ok(Val::Tensor(self.push(op, [q, k, v].into_iter().chain(positions).collect(), tq)))
    }

    /// Dims and indices of queries and keys, and the window, of a mask that is causal, within a window or not.
    fn mask(&self, mask: Value) -> Option<Mask> {
        let Op::Binary(Binary::And) = self.body[mask].op else { return Some((self.causal(mask)?, None)) };
        let [a, b] = [self.unexpanded(self.body[mask].args[0]), self.unexpanded(self.body[mask].args[1])];
        let (sides, (dims, window)) = match (self.causal(a), self.causal(b)) {
            (Some(sides), None) => (sides, self.within(b)?),
            (None, Some(sides)) => (sides, self.within(a)?),
            _ => return None,
        };
        (sides.map(|s| s.0) == dims).then_some((sides, Some(window)))
    }

    /// Dims of queries and keys, and the window, of a mask that is `index(at) - index(keys) < window` and nothing else.
    fn within(&self, mask: Value) -> Option<([Dim; 2], u32)> {
        let node = &self.body[mask];
        let Op::Compare(Compare::Lt) = node.op else { return None };
        let (back, window) = (&self.body[self.unexpanded(node.args[0])], &self.body[self.unexpanded(node.args[1])]);
        let (Op::Binary(Binary::Sub), Op::Const(Real(window))) = (&back.op, &window.op) else { return None };
        let dims = [self.iota(back.args[0])?.0, self.iota(back.args[1])?.0];
        let is_size = window.fract() == 0.0 && (1.0..=f64::from(i32::MAX)).contains(window);
        is_size.then_some((dims, ir::fault!("elaborate.attention.window", *window as u32 + 1, *window as u32)))
    }

    /// Dims and indices of queries and keys, of a mask that is `index(at) >= index(keys)` and nothing else.
    fn causal(&self, mask: Value) -> Option<[(Dim, Value); 2]> {
        let node = &self.body[mask];
        let (first, second) = (*node.args.first()?, *node.args.get(1)?);
        match node.op {
            Op::Compare(Compare::Ge) => Some([self.iota(first)?, self.iota(second)?]),
            Op::Compare(Compare::Le) => Some([self.iota(second)?, self.iota(first)?]),
            _ => None,
        }
    }

    /// An index, expanded or not, and its dim.
    fn iota(&self, v: Value) -> Option<(Dim, Value)> {
        let v = self.unexpanded(v);
        match self.body[v].op {
            Op::Iota(dim) => Some((dim, v)),
            _ => None,
        }
    }

    fn unexpanded(&self, mut v: Value) -> Value {
        while let Op::Expand = self.body[v].op {
            v = self.body[v].args[0];
        }
        v
    }
}
