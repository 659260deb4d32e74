//! Finds the first op that made a number that is not finite.
//!
//! The kernel is the first with such an output though its operands were finite. If it is small, its body is
//! interpreted to find the op within it.

use crate::device::{Device, Location};
use crate::strides::{offsets, reach};
use ir::dim::{Base, Dim};
use ir::eval;
use ir::graph::{Origin, Type};
use ir::kernel::Kernel;
use ir::op::{DType, Op, Scalar};
use std::collections::BTreeSet;

/// Most multiplications or so that interpreting a kernel may take.
const MOST_WORK: u64 = 20_000_000;

type OperandView<'a> = (&'a Type, &'a [u64], Location);

fn inputs<'a>(kernel: &'a Kernel, places: &'a [Location]) -> impl Iterator<Item = OperandView<'a>> {
    kernel.inputs.iter().zip(places).map(|(i, at)| (&i.ty, i.strides.as_slice(), *at))
}

fn outputs<'a>(kernel: &'a Kernel, places: &'a [Location]) -> impl Iterator<Item = OperandView<'a>> {
    let places = &places[kernel.inputs.len()..];
    kernel.outputs.iter().zip(places).map(|(o, at)| (&kernel.body[o.value].ty, o.strides.as_slice(), *at))
}

/// A kernel about to be launched, all of whose operands are finite.
pub struct WatchedLaunch<'a> {
    kernel: &'a Kernel,
    places: &'a [Location],
    /// The operands, kept because outputs may take their place, and the scalars; of small kernels.
    evidence: Option<(Vec<Vec<f64>>, Vec<f64>)>,
}

impl<'a> WatchedLaunch<'a> {
    /// Looks at the operands before the launch; none if one is not finite, as then another kernel is to blame.
    pub fn before(device: &dyn Device, kernel: &'a Kernel, places: &'a [Location], scalars: &[f64]) -> Option<WatchedLaunch<'a>> {
        if !inputs(kernel, places).all(|operand| is_finite(device, kernel, operand)) {
            return None;
        }
        let evidence =
            (work(kernel) <= MOST_WORK).then(|| (inputs(kernel, places).map(|operand| gather(device, kernel, operand)).collect(), scalars.to_vec()));
        Some(WatchedLaunch { kernel, places, evidence })
    }

    /// Looks at the outputs after the launch: none if all are finite, else the op, as far as it is known. `place` says
    /// where in the model's text an op of the kernel stands, if the launch is that of the text.
    pub fn after(self, device: &dyn Device, place: &dyn Fn(&Origin) -> Option<String>) -> Option<Option<String>> {
        if outputs(self.kernel, self.places).all(|operand| is_finite(device, self.kernel, operand)) {
            return None;
        }
        Some(self.evidence.and_then(|(inputs, scalars)| first_op(self.kernel, inputs, &scalars, place)))
    }
}

/// Reads whole ranges where an operand is dense, element by element elsewhere.
fn gather(device: &dyn Device, kernel: &Kernel, (ty, strides, at): OperandView) -> Vec<f64> {
    let sizes: Vec<u64> = ty.dims.iter().map(|d| kernel.body.dims.size(*d)).collect();
    let elements = sizes.iter().product::<u64>();
    let mut out = vec![0.0; elements as usize];
    if reach(&sizes, strides) == elements && strides == ir::kernel::dense(&kernel.body.dims, ty) {
        device.read(at, ty.dtype, &mut out);
    } else {
        let mut slots = out.iter_mut();
        offsets(&sizes, strides, |offset| {
            let place = Location { byte: at.byte + offset * ty.dtype.bytes(), ..at };
            if let Some(slot) = slots.next() {
                device.read(place, ty.dtype, std::slice::from_mut(slot));
            }
        });
    }
    out
}

fn is_finite(device: &dyn Device, kernel: &Kernel, (ty, strides, at): OperandView) -> bool {
    const PIECE: u64 = 1 << 16;
    if !ty.dtype.is_float() {
        return true;
    }
    let sizes: Vec<u64> = ty.dims.iter().map(|d| kernel.body.dims.size(*d)).collect();
    let elements = sizes.iter().product::<u64>();
    if reach(&sizes, strides) != elements {
        return gather(device, kernel, (ty, strides, at)).iter().all(|x| x.is_finite());
    }
    // The tensor has no gaps, and the order of its elements does not matter.
    let mut piece = vec![0.0; PIECE.min(elements) as usize];
    (0..elements).step_by(PIECE as usize).all(|first| {
        let piece = &mut piece[..PIECE.min(elements - first) as usize];
        device.read(Location { byte: at.byte + first * ty.dtype.bytes(), ..at }, ty.dtype, piece);
        piece.iter().all(|x| x.is_finite())
    })
}

fn work(kernel: &Kernel) -> u64 {
    let body = &kernel.body;
    let each = body.values().map(|v| {
        let summed = match &body[v].op {
            Op::Dot { over, .. } => body.dims.elements(over),
            // All experts together multiply each row at most once.
            Op::GroupedDot { rows, experts, over, .. } => {
                let all: BTreeSet<Dim> = over.iter().chain([rows]).chain(&body[v].ty.dims).copied().filter(|d| d != experts).collect();
                return all.into_iter().map(|d| body.dims.size(d)).product();
            }
            Op::Attention(a) | Op::AttentionLse(a) | Op::AttentionGrad(a, _) => {
                body.dims.elements(&[a.keys, a.d]).saturating_add(body.dims.elements(&[a.keys, a.values]))
            }
            _ => 1,
        };
        body.elements(v).saturating_mul(summed)
    });
    each.fold(0, u64::saturating_add)
}

struct Env<'a> {
    kernel: &'a Kernel,
    inputs: Vec<Vec<f64>>,
    scalars: &'a [f64],
}

impl eval::Env for Env<'_> {
    fn source(&mut self, op: &Op, ty: &Type) -> Vec<f64> {
        match op {
            Op::Input(i) => self.inputs[*i as usize].clone(),
            _ => vec![0.0; self.kernel.body.dims.elements(&ty.dims) as usize],
        }
    }

    fn scalar(&self, scalar: &Scalar) -> f64 {
        match scalar {
            Scalar::Slot(i) => self.scalars[*i as usize],
            // By convention, a kernel that draws random numbers has these as its last two scalars.
            Scalar::Seed => self.scalars[self.scalars.len() - 2],
            Scalar::Step => self.scalars[self.scalars.len() - 1],
            Scalar::LearningRate | Scalar::LossScale | Scalar::BiasCorrection(_) | Scalar::Linear(_) => 0.0,
        }
    }

    fn base(&self, base: &Base) -> u64 {
        match base {
            Base::Slot(i) => self.scalars[*i as usize] as u64,
            Base::Zero | Base::Coords(_) => 0,
        }
    }
}

/// The first op of a body with a result that is not finite, or beyond its dtype, from operands that are.
fn first_op(kernel: &Kernel, inputs: Vec<Vec<f64>>, scalars: &[f64], place: &dyn Fn(&Origin) -> Option<String>) -> Option<String> {
    let body = &kernel.body;
    let values = eval::run(body, &mut Env { kernel, inputs, scalars });
    let fits = |v: ir::graph::Value| {
        let most = match body[v].ty.dtype {
            DType::F32 | DType::Bf16 => f64::from(f32::MAX),
            DType::F16 => 65504.0,
            DType::I32 | DType::Bool => return true,
        };
        values[v.index()].iter().all(|x| x.abs() <= most)
    };
    let v = body.values().find(|v| !body[*v].op.is_source() && !fits(*v) && body[*v].args.iter().all(|a| fits(*a)))?;
    let operands: Vec<String> = body[v].args.iter().filter(|a| body[**a].ty.dtype.is_float()).map(|a| range(&values[a.index()])).collect();
    let of = if operands.is_empty() { String::new() } else { format!(" of {}", operands.join(" and ")) };
    let place = place(&body[v].origin).map_or(String::new(), |place| format!(" at {place}"));
    Some(format!("op {}{place}{of}", body[v].op.name()))
}

/// `numbers from -3.1 to 88.9`, of finite numbers.
fn range(numbers: &[f64]) -> String {
    let least = numbers.iter().copied().fold(f64::INFINITY, f64::min);
    let most = numbers.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if least == most { format!("{least:.4e}") } else { format!("numbers from {least:.4e} to {most:.4e}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{self, Split};

    #[test]
    fn the_op_that_overflows_f32_is_named() {
        let job = fixture::job(&Split { microbatches: 1, pp: 1, dp: 1, tp: 1 });
        // This is the loss: y - t is finite, and its square is beyond f32.
        let y = vec![1e30; fixture::BATCH as usize];
        let t = vec![0.0; fixture::BATCH as usize];
        let named = |place: &dyn Fn(&Origin) -> Option<String>| first_op(&job.kernels[1], vec![y.clone(), t.clone()], &[], place);
        assert_eq!(named(&|_| None), Some("op mul of 1.0000e30 and 1.0000e30".into()));
        assert_eq!(named(&|_| Some("m.mdl:3:1".into())), Some("op mul at m.mdl:3:1 of 1.0000e30 and 1.0000e30".into()));
        assert_eq!(first_op(&job.kernels[1], vec![t.clone(), t.clone()], &[], &|_| None), None);
    }
}
