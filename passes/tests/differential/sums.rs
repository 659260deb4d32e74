//! Large sums in two steps, and kernels of no more operands than they may have.

use crate::harness::{check, compiled};
use crate::models::case;
use ir::kernel::{Family, Kernel};
use ir::program::{Action, BodyKind, Job};
use passes::local::role::MAX_OPERANDS;

/// A matrix of 131,072 elements, and a vector.
const LARGE: &str = "
model large(batch, rows = 256, columns = 512) {
  input x: f32[batch, rows];
  param w: [rows, columns] ~ normal(0.02);
  param v: [columns] ~ normal(0.02);
  let y = dot(x, w, over: rows) * v;
  loss mean(y * y);
}
train { optimizer: adamw(betas: [0.9, 0.95], eps: 1e-8); clip: CLIP; }
plan { dp: batch; tp: columns; }
";

fn text(clip: &str) -> String {
    LARGE.replace("CLIP", clip)
}

/// The kernels of reduce and update.
fn kernels(job: &Job) -> Vec<&Kernel> {
    let bodies = job.programs[0].bodies.iter().filter(|b| matches!(b.kind, BodyKind::Reduce | BodyKind::Update));
    let launched = bodies.flat_map(|b| &b.commands).filter_map(|c| match &c.action {
        Action::Launch { kernel, .. } => Some(&job.kernels[kernel.index()]),
        _ => None,
    });
    launched.collect()
}

#[test]
fn norms_in_two_steps_are_the_same() {
    for clip in ["0.0", "0.5"] {
        for words in ["b2", "m2", "tp2 m2", "dp2 m2", "dp2 tp2 zero1", "dp2 zero2 m2", "offload m2", "bf16 dp2 m2", "f16 m2", "f16 offload"] {
            check(&text(clip), &[], &case(words));
        }
        // Here ranks' parts of buckets are large enough to be cut.
        for words in ["dp2 zero1 m2", "dp2 zero2 m2", "dp2 tp2 zero1", "bf16 dp2 zero1"] {
            check(&text(clip), &[("rows", "512")], &case(words));
        }
    }
}

#[test]
fn many_threads_sum_a_large_gradient() {
    for (words, rows) in [("m2", "256"), ("tp2 m2", "256"), ("offload", "256"), ("dp2 zero1", "256"), ("dp2 tp2 zero2 m2", "512")] {
        let c = compiled(&text("0.5"), &[("rows", rows)], &case(words));
        for kernel in kernels(&c.job) {
            let results: u64 = match &kernel.family {
                Family::Loops { grid } => grid.iter().map(|d| kernel.body.dims.size(*d)).product(),
                _ => 1,
            };
            let most = kernel.inputs.iter().map(|x| kernel.body.dims.elements(&x.ty.dims)).max().unwrap_or(0);
            assert!(results >= 64 || most < 1 << 16, "{words}: {kernel:?}");
        }
    }
}

/// A parameter per layer.
const MANY: &str = "
model many(batch, width = 2, layers = 300) {
  input x: f32[batch, width];
  let y = x;
  repeat layers {
    param w: [width] ~ normal(0.02);
    y = y + 0.01 * tanh(w + y);
  }
  loss mean(y * y);
}
train { optimizer: adamw(betas: [0.9, 0.95], eps: 1e-8); clip: 0.5; }
plan { dp: batch; pp: layers; }
";

#[test]
fn sums_of_many_values_are_the_same_in_steps() {
    for words in ["b2", "dp2 zero1 m2", "pp2 m2"] {
        check(MANY, &[], &case(words));
    }
}

#[test]
fn kernels_of_many_layers_have_no_more_operands_than_they_may() {
    for words in ["m2", "dp2 m2", "offload"] {
        let job = compiled(MANY, &[], &case(words)).job;
        let most = job.kernels.iter().map(|k| k.inputs.len() + k.outputs.len()).max().unwrap_or(0);
        assert!((MAX_OPERANDS / 2..=MAX_OPERANDS + 8).contains(&most), "{words}: {most}");
    }
}
