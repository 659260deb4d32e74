//! What kernels and collectives have to do, from their definitions: arithmetic and bytes.

use crate::graph::{Type, Value};
use crate::kernel::Kernel;
use crate::mesh::Mesh;
use crate::op::{Attention, DType, Op};
use crate::program::{Action, Job, Program, ProgramBody, Stage};
use serde::{Deserialize, Serialize};

/// What a launch of a kernel does: operations of matrix products and attention (two per multiply-add), and bytes of its operands. Both saturate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Work {
    /// Operations: two per multiply-add of matrix products and attention.
    pub flops: u64,
    /// Bytes of what is read and written.
    pub bytes: u64,
}

impl Work {
    /// Of all of it: keys that a mask hides count, and tables of which only rows are read.
    pub fn of(kernel: &Kernel) -> Work {
        let body = &kernel.body;
        let read = kernel.inputs.iter().map(|i| bytes(kernel, &i.ty)).fold(0, u64::saturating_add);
        let written = kernel.outputs.iter().map(|o| bytes(kernel, &body[o.value].ty)).fold(0, u64::saturating_add);
        let all = |keys: u64, _: &Attention| keys.saturating_mul(keys);
        Work { flops: body.values().map(|v| flops(kernel, v, all)).fold(0, u64::saturating_add), bytes: read.saturating_add(written) }
    }

    /// Of what no kernel with this definition can do without. Under a causal mask a query sees as many keys as if queries were evenly spread over
    /// the positions of their keys. Every element that lies in memory counts once, of a table only as many rows as are asked for,
    /// and what is added to is read as well.
    pub fn needed(kernel: &Kernel) -> Work {
        let body = &kernel.body;
        let users = body.users();
        let read = body.values().map(|v| match &body[v].op {
            Op::Input(i) => {
                let operand = &kernel.inputs[*i as usize];
                let dims: Vec<_> = operand.ty.dims.iter().zip(&operand.strides).filter(|(_, stride)| **stride > 0).map(|(d, _)| *d).collect();
                let held = body.dims.elements(&dims) * operand.ty.dtype.bytes();
                let is_table = |(user, place): &(Value, usize)| *place == 0 && matches!(body[*user].op, Op::Gather { .. });
                let users = &users[v.index()];
                match !users.is_empty() && users.iter().all(is_table) {
                    true => held.min(users.iter().map(|(user, _)| bytes(kernel, &body[*user].ty)).sum()),
                    false => held,
                }
            }
            _ => 0,
        });
        let written = kernel.outputs.iter().map(|o| {
            let held = bytes(kernel, &body[o.value].ty);
            let touched = match &body[o.value].op {
                Op::Scatter { .. } => held.min(bytes(kernel, &body[body[o.value].args[0]].ty)),
                _ => held,
            };
            if o.accumulate { 2 * touched } else { held }
        });
        let seen = |keys: u64, a: &Attention| a.pairs(keys);
        Work { flops: body.values().map(|v| flops(kernel, v, seen)).sum(), bytes: read.sum::<u64>() + written.sum::<u64>() }
    }
}

/// Tokens of a step: elements of the first input of whole numbers; without one, rows.
pub fn tokens(job: &Job) -> u64 {
    job.inputs.iter().find(|i| i.dtype == DType::I32).map_or(job.global_batch, |i| i.dims.iter().map(|d| d.size).product())
}

/// Bytes that a rank sends (or receives) by a communication, or copies: (n-1)/n of the whole in gathers and scatters,
/// twice that in all-reduces.
pub fn sent(mesh: &Mesh, program: &Program, action: &Action) -> u64 {
    match action {
        Action::Collective { kind, group, dtype, count, .. } => kind.sent(count * dtype.bytes(), program.groups[group.index()].size(mesh)),
        Action::Send { dtype, count, .. } | Action::Recv { dtype, count, .. } | Action::Copy { dtype, count, .. } => count * dtype.bytes(),
        Action::Launch { .. }
        | Action::Fill { .. }
        | Action::Load { .. }
        | Action::Report { .. }
        | Action::Limit { .. }
        | Action::Record { .. }
        | Action::Wait { .. } => 0,
    }
}

/// What a training step of all ranks does in matrix products and attention, as the field counts it: a forward
/// pass, and twice as much for its gradients. What is computed again does not count, nor do keys that a mask
/// hides, nor what a bool may leave out, as further passes of experts' rows. A step of a large job has more than a
/// `u64` holds.
pub fn model_flops(job: &Job) -> f64 {
    let of_kernel: Vec<u64> = job.kernels.iter().map(|k| Work::needed(k).flops).collect();
    let of_body = |body: &ProgramBody| {
        let launched = body.commands.iter().filter(|c| c.predicate.is_none()).filter_map(|c| match &c.action {
            Action::Launch { kernel, .. } => Some(of_kernel[kernel.index()]),
            _ => None,
        });
        launched.fold(0, u64::saturating_add)
    };
    let of_stage = |stage: &Stage| {
        let bodies: Vec<u64> = job.programs[stage.program as usize].bodies.iter().map(of_body).collect();
        stage.schedule.eval.iter().filter(|call| call.part == 0).map(|call| bodies[call.body.index()] as f64).sum::<f64>()
    };
    let ranks = job.mesh.world() / job.stages.len().max(1) as u64;
    job.stages.iter().map(of_stage).sum::<f64>() * (3 * ranks) as f64
}

fn bytes(kernel: &Kernel, ty: &Type) -> u64 {
    kernel.body.dims.elements(&ty.dims) * ty.dtype.bytes()
}

/// Two per multiply-add of matrix products and attention. `seen` says how many keys as many queries see together.
fn flops(kernel: &Kernel, v: Value, seen: impl Fn(u64, &Attention) -> u64) -> u64 {
    let body = &kernel.body;
    let node = &body[v];
    let of_attention = |a: &Attention| {
        let [d, values] = [a.d, a.values].map(|d| body.dims.size(d));
        let rows = body.elements(node.args[0]) / d.max(1);
        let (each, keys) = (2 * node.op.products_of_pairs(d, values) * rows, body.dims.size(a.keys));
        u64::try_from(u128::from(each) * u128::from(seen(keys, a)) / u128::from(keys.max(1))).unwrap_or(u64::MAX)
    };
    match &node.op {
        Op::Dot { over, .. } => over.iter().fold(2 * body.elements(v), |n, d| n.saturating_mul(body.dims.size(*d))),
        // Each row is multiplied by one expert's matrix only.
        Op::GroupedDot { rows, experts, over, .. } => {
            let summed = over.iter().filter(|d| *d != experts);
            let each = summed.fold(2 * body.elements(v), |n, d| n.saturating_mul(body.dims.size(*d)));
            if over.contains(rows) { each / body.dims.size(*experts) } else { each }
        }
        Op::Attention(a) | Op::AttentionGrad(a, _) => of_attention(a),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dim::{Dim, DimInfo};
    use crate::graph::{Body, Origin, Phase};
    use crate::kernel::{Family, Operand, Output, dense};
    use crate::op::{Real, Scoring};
    use crate::program::Space;

    /// A kernel of one op over operands of these dims, which is added to what is there.
    fn kernel(body: Body, op: Op, operands: &[(DType, Vec<Dim>)], result: Vec<Dim>) -> Kernel {
        let mut body = body;
        let types = operands.iter().map(|(dtype, dims)| Type::new(*dtype, dims.clone()));
        let inputs: Vec<Operand> = types.map(|ty| Operand { strides: dense(&body.dims, &ty), ty, unaligned: false }).collect();
        let origin = || Origin::new(Phase::Forward);
        let args: Vec<Value> = (0..).zip(&inputs).map(|(i, o)| body.push(Op::Input(i), [], o.ty.clone(), origin())).collect();
        let value = body.push(op, args, Type::new(DType::F32, result), origin());
        let outputs = vec![Output { value, strides: dense(&body.dims, &body[value].ty), accumulate: true }];
        Kernel { on: Space::Device, family: Family::Gemm, body, inputs, scalars: vec![], outputs }
    }

    fn dims<const N: usize>(sizes: [u64; N]) -> (Body, [Dim; N]) {
        let mut body = Body::default();
        let dims = sizes.map(|size| body.dims.add(DimInfo::new("d", size)));
        (body, dims)
    }

    #[test]
    fn keys_that_a_mask_hides_need_no_work() {
        let flops = |causal, window| {
            let (body, [at, keys, d]) = dims([8, 8, 4]);
            let scoring = if causal { Scoring::causal(window) } else { Scoring::PLAIN };
            let op = Op::Attention(Attention { at, keys, d, values: d, scale: Real(1.0), scoring });
            let mut operands = vec![(DType::F32, vec![at, d]), (DType::F32, vec![keys, d]), (DType::F32, vec![keys, d])];
            operands.extend([(DType::I32, vec![at]), (DType::I32, vec![keys])].into_iter().filter(|_| causal));
            let kernel = kernel(body, op, &operands, vec![at, d]);
            (Work::of(&kernel).flops, Work::needed(&kernel).flops)
        };
        let each = 2 * 2 * 4;
        assert_eq!(flops(false, None), (each * 64, each * 64));
        assert_eq!(flops(true, None), (each * 64, each * 36));
        assert_eq!(flops(true, Some(2)), (each * 64, each * 15));
    }

    #[test]
    fn rows_of_a_table_that_nobody_asks_for_need_not_be_read() {
        let (body, [rows, at, d]) = dims([1000, 8, 4]);
        let kernel = kernel(body, Op::Gather { dim: rows }, &[(DType::F32, vec![rows, d]), (DType::I32, vec![at])], vec![at, d]);
        let (result, index) = (8 * 4 * 4, 8 * 4);
        assert_eq!(Work::of(&kernel).bytes, 1000 * 4 * 4 + index + result);
        assert_eq!(Work::needed(&kernel).bytes, result + index + 2 * result);
    }
}
