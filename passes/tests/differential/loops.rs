//! What kernels of loops read and write: no pass over memory that fusion can avoid.

use crate::harness::compiled;
use crate::models::{LLAMA, case};
use ir::graph::Phase;
use ir::kernel::{Family, Kernel, dense};
use ir::program::{Action, Job};

/// The kernels that the first rank launches in its backward pass for ops of a scope, in order, and the names of their ops.
fn backward<'j>(job: &'j Job, scope: &str) -> Vec<(&'j Kernel, Vec<&'static str>)> {
    let launched = job.programs[0].bodies.iter().flat_map(|b| &b.commands).filter_map(|c| match &c.action {
        Action::Launch { kernel, .. } if &*c.origin.scope == scope && c.origin.phase == Phase::Backward => Some(&job.kernels[kernel.index()]),
        _ => None,
    });
    let named = |kernel: &'j Kernel| {
        let mut names: Vec<&str> = vec![];
        for node in kernel.body.nodes.iter().filter(|n| !n.op.is_source()) {
            if !names.contains(&node.op.name()) {
                names.push(node.op.name());
            }
        }
        (kernel, names)
    };
    launched.map(named).collect()
}

fn loops<'j>(job: &'j Job, scope: &str) -> Vec<(&'j Kernel, Vec<&'static str>)> {
    backward(job, scope).into_iter().filter(|k| matches!(k.0.family, Family::Loops { .. })).collect()
}

#[test]
fn gradients_of_rotated_pairs_take_one_pass() {
    let c = compiled(LLAMA.0, LLAMA.1, &case("m2"));
    let all = loops(&c.job, "layers.3.attn");
    // Queries and keys have one kernel each, and none copies to another order.
    let rotations: Vec<_> = all.iter().filter(|k| k.1.contains(&"pad")).collect();
    assert_eq!(rotations.len(), 2, "{all:?}");
    assert!(all.iter().all(|k| k.1 != ["expand"]), "{all:?}");
    for (kernel, ops) in rotations {
        assert_eq!(*ops, ["mul", "neg", "add", "pad"]);
        let [output] = &kernel.outputs[..] else { panic!("{kernel:?}") };
        assert_eq!(output.strides, dense(&kernel.body.dims, &kernel.body[output.value].ty));
    }
}

/// The product stores the gradient of the result. One kernel reads that and the operand for the gradient of the weights; one, row by row, for the
/// gradient of the operand, with what else it is a sum of. What products read is made once more, and stores nothing else.
#[test]
fn gradients_of_norms_take_one_pass_over_rows_and_one_over_columns() {
    let defines = [LLAMA.1, &[("hidden", "64"), ("seq", "16")]].concat();
    for words in ["m2", "tp2 sp m2"] {
        let c = compiled(LLAMA.0, &defines, &case(words));
        let norm = loops(&c.job, "layers.3.norm2");
        assert!(norm.iter().any(|k| k.1.ends_with(&["mul", "dot"])), "{words}: {norm:?}");
        assert!(norm.iter().all(|(kernel, ops)| kernel.outputs.len() == 1 || ops.contains(&"rsqrt")), "{words}: {norm:?}");
        let rows = loops(&c.job, "layers.3");
        assert!(rows.iter().any(|k| ["mul", "dot", "expand", "add"].iter().all(|op| k.1.contains(op))), "{words}: {rows:?}");
        let products = backward(&c.job, "layers.3.norm2").into_iter().filter(|k| k.0.family == Family::Gemm);
        assert!(products.into_iter().all(|(kernel, _)| kernel.outputs.len() == 1), "{words}");
    }
}
