//! Kernels: one device function each, with static shapes, that is its own definition.
//!
//! A kernel carries the body it computes. The code generator compiles that body, the reference device interprets
//! it ([`Kernel::run`]), so the two can be compared, and nothing else has to say what a kernel means.
//!
//! **Invariants** ([`Kernel::verify`]): no `View`, `Slice`, `Shard`, `Param`, `State`, `Table` or `Cut` inside: operands are
//! strided views of buffers, so these are aliases outside. `Input(i)` is operand i, `Scalar(Slot(i))` scalar argument i;
//! index bases of sharded dims are `Base::Slot`. Every input and output has a stride per dim.

pub mod distance;
pub mod part;

use crate::dim::{Base, Dim, Dims};
use crate::graph::{Body, Type, Value};
use crate::op::{DType, Op, OpKind, Scalar};
use crate::program::Space;
use crate::{eval, infer};
use serde::{Deserialize, Serialize};

/// What the code generator makes of a kernel. Chosen by the `fuse` pass, checked by [`Kernel::verify`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Family {
    /// Pointwise ops, reductions, gathers. Every output has all dims of `grid`, no reduction (`Reduce`, `ArgMax`, `Cumsum`, and a `Dot`
    /// of factors with the same dims) is over a dim of `grid`; so grid points are independent of each other. Dims outside of `grid` are loops within a point.
    Loops {
        /// Dims that every output has; each of their points is computed by itself.
        grid: Vec<Dim>,
    },
    /// One `Dot` or `GroupedDot`, then pointwise ops on its result.
    Gemm,
    /// `Attention` and `AttentionLse` of the same operands (the latter optional).
    Attention,
    /// One to three `AttentionGrad` of the same operands, or that of a bias alone.
    AttentionGrad,
    /// One `Scatter`, then pointwise ops on its result.
    Scatter,
}

impl Family {
    /// For people.
    pub fn describe(&self) -> &'static str {
        match self {
            Family::Loops { .. } => "loops",
            Family::Gemm => "product",
            Family::Attention => "attention",
            Family::AttentionGrad => "gradients of attention",
            Family::Scatter => "sums by index",
        }
    }
}

/// An operand: element `(i0, i1, ..)` lies at `sum(i_k * strides[k])` elements from the argument's pointer.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Operand {
    /// Element type and dims, in the order of `strides`.
    pub ty: Type,
    /// Elements from one index to the next, per dim; 0 where it is broadcast.
    pub strides: Vec<u64>,
    /// Whether it may begin elsewhere than at a multiple of [`ALIGN`] bytes.
    pub unaligned: bool,
}

/// Bytes of which the first element of most operands is a multiple: GPUs' tensor maps, and their copies, work on no
/// others.
pub const ALIGN: u64 = 16;

/// A result that is stored. With `accumulate` it is added to what is there.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Output {
    /// The node whose result it is.
    pub value: Value,
    /// Elements from one index to the next, per dim of the value.
    pub strides: Vec<u64>,
    /// Whether the value is added to what is there, in place of overwriting it.
    pub accumulate: bool,
}

/// Arguments of the device function, in order: inputs, then outputs (pointers); scalars apart.
/// A kernel that draws random numbers takes the seed and the step as its last two scalars (i64).
/// An output may be the same memory as an input of the same type and strides (in place); otherwise they do not overlap.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Kernel {
    /// Whose processor runs it, on whose memory.
    pub on: Space,
    /// Which kind of code is generated for it.
    pub family: Family,
    /// What it computes, and so its definition.
    pub body: Body,
    /// Indexed by the number of [`Op::Input`].
    pub inputs: Vec<Operand>,
    /// Dtypes of the scalar arguments: floats are passed as f64, the others as i64.
    pub scalars: Vec<DType>,
    /// In the order of their arguments, which follow those of inputs.
    pub outputs: Vec<Output>,
}

/// Strides of a dense tensor in storage order, in elements.
pub fn dense(dims: &Dims, ty: &Type) -> Vec<u64> {
    dims.strides(&ty.dims)
}

impl Kernel {
    /// `k_` and 16 hexadecimal digits of the hash of the whole content, origins excepted: equal kernels have equal names.
    pub fn name(&self) -> String {
        format!("k_{}", &blake3::hash(crate::text::print_kernel(&self.plain()).as_bytes()).to_hex()[..16])
    }

    /// The same without what does not change what it computes: where its ops come from, names and extents of
    /// whole dims.
    pub fn plain(&self) -> Kernel {
        let mut plain = self.clone();
        for node in &mut plain.body.nodes {
            node.origin = crate::graph::Origin::new(crate::graph::Phase::Forward);
        }
        // Only random numbers depend on the unpadded sizes of whole dims.
        let random = plain.body.nodes.iter().any(|n| matches!(n.op, Op::Uniform { .. }));
        for dim in &mut plain.body.dims.list {
            dim.name.clear();
            dim.global = 0;
            dim.copy_of = None;
            if !random {
                dim.logical = 0;
            }
        }
        plain
    }

    /// Checks the invariants of the module's documentation.
    ///
    /// # Errors
    /// The first invariant that does not hold, with the value concerned.
    pub fn verify(&self) -> Result<(), KernelError> {
        let fail = |v: Value, text: String| Err(KernelError { value: v, text });
        for d in self.body.dims.ids() {
            let name = self.body.dims.name(d);
            match self.body.dims[d].index.base {
                Base::Zero => {}
                Base::Slot(i) if self.scalars.get(i as usize) == Some(&DType::I32) => {}
                Base::Slot(i) => return fail(Value(0), format!("dim `{name}` begins at scalar {i}, which is no argument of i32")),
                Base::Coords(_) => return fail(Value(0), format!("dim `{name}` begins at coordinates, not at a scalar")),
            }
        }
        let mut anchors = 0;
        let mut last_anchor = None;
        for v in self.body.values() {
            let node = &self.body[v];
            infer::check(&self.body, v).map_err(|e| KernelError { value: v, text: e.to_string() })?;
            match &node.op {
                Op::Input(i) => match self.inputs.get(*i as usize) {
                    Some(input) if input.ty == node.ty => {}
                    _ => return fail(v, format!("input {i} is not an operand of that type")),
                },
                Op::Scalar(Scalar::Slot(i)) if self.scalars.get(*i as usize) == Some(&node.ty.dtype) => {}
                Op::Scalar(_) => return fail(v, "a scalar is not an argument of that dtype".into()),
                Op::Dot { over, tf32: false } if matches!(self.family, Family::Loops { .. }) && self.body.is_elementwise_dot(v) => {
                    self.inside(v, over)?
                }
                op => match op.kind() {
                    OpKind::Contraction => {
                        anchors += 1;
                        last_anchor = Some(v);
                    }
                    OpKind::Reduction => self.inside(v, op.over())?,
                    OpKind::Generated | OpKind::Pointwise | OpKind::Mark | OpKind::Move | OpKind::Lookup => {}
                    OpKind::Stored | OpKind::View | OpKind::Routing | OpKind::Reshard | OpKind::Exchange => {
                        return fail(v, format!("`{}` cannot stand in a kernel", op.name()));
                    }
                },
            }
        }
        let at = last_anchor.unwrap_or(Value(0));
        match &self.family {
            Family::Loops { .. } if anchors != 0 => return fail(at, "a loop kernel has a contraction".into()),
            Family::Gemm | Family::Scatter if anchors != 1 => return fail(at, "not exactly one contraction".into()),
            Family::Attention if !(1..=2).contains(&anchors) => return fail(at, "not one attention".into()),
            Family::AttentionGrad if !(1..=3).contains(&anchors) => return fail(at, "not one attention gradient".into()),
            Family::Loops { .. } | Family::Gemm | Family::Scatter | Family::Attention | Family::AttentionGrad => {}
        }
        for input in &self.inputs {
            if input.strides.len() != input.ty.dims.len() {
                return fail(Value(0), "an operand lacks strides".into());
            }
        }
        if self.outputs.is_empty() {
            return fail(Value(0), "no output".into());
        }
        for output in &self.outputs {
            let dims = &self.body[output.value].ty.dims;
            if output.strides.len() != dims.len() {
                return fail(output.value, "an output lacks strides".into());
            }
            if let Family::Loops { grid } = &self.family
                && let Some(d) = grid.iter().find(|d| !dims.contains(d))
            {
                return fail(output.value, format!("the output lacks dim `{}` of the grid", self.body.dims.name(*d)));
            }
        }
        Ok(())
    }

    fn inside(&self, v: Value, over: &[Dim]) -> Result<(), KernelError> {
        match &self.family {
            Family::Loops { grid } => match over.iter().find(|d| grid.contains(d)) {
                None => Ok(()),
                Some(d) => Err(KernelError { value: v, text: format!("a reduction over `{}` of the grid", self.body.dims.name(*d)) }),
            },
            Family::Gemm | Family::Attention | Family::AttentionGrad | Family::Scatter => {
                Err(KernelError { value: v, text: "a reduction beside a contraction".into() })
            }
        }
    }

    /// The kernel that makes one of its results alone. Operands keep their numbers, those that the result does not
    /// need as well.
    pub fn of_output(&self, number: usize) -> Kernel {
        let mut needed = vec![false; self.body.nodes.len()];
        needed[self.outputs[number].value.index()] = true;
        for v in self.body.values().rev() {
            if needed[v.index()] {
                self.body[v].args.iter().for_each(|a| needed[a.index()] = true);
            }
        }
        let mut body = Body { dims: self.body.dims.clone(), nodes: vec![] };
        let mut now = vec![Value(0); needed.len()];
        for v in self.body.values().filter(|v| needed[v.index()]) {
            let node = self.body[v].clone();
            let args: Vec<Value> = node.args.iter().map(|a| now[a.index()]).collect();
            now[v.index()] = body.push(node.op, args, node.ty, node.origin);
        }
        let output = &self.outputs[number];
        let outputs = vec![Output { value: now[output.value.index()], ..output.clone() }];
        Kernel { body, outputs, family: self.family.clone(), inputs: self.inputs.clone(), scalars: self.scalars.clone(), on: self.on }
    }

    /// Per result and operand, whether a launch may put the result in the operand's place: both lie alike, and a result at a point depends on the
    /// operand at that point alone.
    pub fn in_place(&self) -> Vec<Vec<bool>> {
        let body = &self.body;
        let mut at_own_point = vec![true; self.inputs.len()];
        // `leads` marks the values on which an op that is not pointwise depends.
        let mut leads = vec![false; body.nodes.len()];
        for v in body.values().rev() {
            let node = &body[v];
            if leads[v.index()] || !node.op.is_source() && !node.op.is_pointwise() {
                node.args.iter().for_each(|a| leads[a.index()] = true);
            }
            if let Op::Input(i) = node.op {
                at_own_point[i as usize] &= !leads[v.index()];
            }
        }
        let may =
            |o: &Output, i: usize| !o.accumulate && at_own_point[i] && self.inputs[i].ty == body[o.value].ty && self.inputs[i].strides == o.strides;
        self.outputs.iter().map(|o| (0..self.inputs.len()).map(|i| may(o, i)).collect()).collect()
    }

    /// The reference device: interprets the body in f64.
    ///
    /// `inputs` are dense, in each operand's storage order; the result holds the outputs alike (not yet accumulated).
    pub fn run(&self, inputs: &[Vec<f64>], scalars: &[f64]) -> Vec<Vec<f64>> {
        self.run_changed(inputs, scalars, &mut |_, _, _, _| {})
    }

    /// As [`Kernel::run`], of values that are changed.
    pub fn run_changed(&self, inputs: &[Vec<f64>], scalars: &[f64], change: &mut eval::Change<'_>) -> Vec<Vec<f64>> {
        let mut env = KernelEnv { kernel: self, inputs, scalars };
        let values = eval::run_changed(&self.body, &mut env, change);
        self.outputs.iter().map(|o| values[o.value.index()].clone()).collect()
    }
}

/// What a kernel's body reads.
struct KernelEnv<'a> {
    kernel: &'a Kernel,
    inputs: &'a [Vec<f64>],
    scalars: &'a [f64],
}

impl eval::Env for KernelEnv<'_> {
    fn source(&mut self, op: &Op, _: &Type) -> Vec<f64> {
        match op {
            Op::Input(i) => self.inputs[*i as usize].clone(),
            other => unreachable!("invariant: a verified kernel has no `{}`", other.name()),
        }
    }

    fn scalar(&self, scalar: &Scalar) -> f64 {
        match scalar {
            Scalar::Slot(i) => self.scalars[*i as usize],
            // Random numbers need these two, by convention the last two scalar arguments of a kernel that draws them.
            Scalar::Seed => self.scalars[self.kernel.scalars.len() - 2],
            Scalar::Step => self.scalars[self.kernel.scalars.len() - 1],
            Scalar::LearningRate | Scalar::LossScale | Scalar::BiasCorrection(_) | Scalar::Linear(_) => {
                unreachable!("invariant: a verified kernel has slots only")
            }
        }
    }

    fn base(&self, base: &Base) -> u64 {
        match base {
            Base::Zero => 0,
            Base::Slot(i) => self.scalars[*i as usize] as u64,
            Base::Coords(_) => unreachable!("invariant: a verified kernel has slots only"),
        }
    }
}

/// A broken invariant of a kernel: a bug of the pass that built it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{value}: {text}")]
pub struct KernelError {
    /// The node concerned; the first one if it is about none.
    pub value: Value,
    /// Which invariant is broken, and how.
    pub text: String,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Origin, Phase};
    use crate::op::Real;

    /// A kernel that writes one number.
    fn constant(x: f64, scope: &str) -> Kernel {
        let mut body = Body::default();
        let origin = Origin { scope: scope.into(), ..Origin::new(Phase::Forward) };
        let value = body.push(Op::Const(Real(x)), [], Type::scalar(DType::F32), origin);
        Kernel {
            on: Space::Device,
            family: Family::Loops { grid: vec![] },
            body,
            inputs: vec![],
            scalars: vec![],
            outputs: vec![Output { value, strides: vec![], accumulate: false }],
        }
    }

    #[test]
    fn kernels_that_differ_in_an_infinity_have_other_names() {
        let names: Vec<String> = [f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 0.0, -0.0].map(|x| constant(x, "").name()).to_vec();
        for (k, name) in names.iter().enumerate() {
            assert!(!names[..k].contains(name), "{names:?}");
        }
    }

    #[test]
    fn where_a_kernel_comes_from_is_not_in_its_name() {
        assert_eq!(constant(1.0, "layers.0").name(), constant(1.0, "layers.1").name());
    }
}
