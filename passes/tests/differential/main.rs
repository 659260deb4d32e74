//! Compiled programs, all ranks of them, against the reference interpreter on the logical graph.

mod generate;
mod harness;
mod random;

use harness::{Case, check};

const GPT2: &str = include_str!("../../../models/gpt2.mdl");

fn gpt2(case: Case) {
    let defines = [("vocab", "24"), ("hidden", "8"), ("heads", "4"), ("ffn", "16"), ("layers", "4"), ("seq", "4")];
    check(GPT2, &defines, &case);
}

#[test]
fn gpt2_on_one_rank() {
    gpt2(Case { global_batch: 2, micro_batch: 2, ..Case::default() });
}

#[test]
fn gpt2_with_microbatches() {
    gpt2(Case { global_batch: 4, micro_batch: 1, ..Case::default() });
}

#[test]
fn gpt2_on_dp2() {
    gpt2(Case { dp: 2, global_batch: 4, ..Case::default() });
}

#[test]
fn gpt2_on_tp2() {
    gpt2(Case { tp: 2, global_batch: 2, ..Case::default() });
}

#[test]
fn gpt2_on_tp4_with_sequence_parallelism() {
    gpt2(Case { tp: 4, sp: true, global_batch: 2, ..Case::default() });
}

#[test]
fn gpt2_on_pp2() {
    gpt2(Case { pp: 2, global_batch: 4, ..Case::default() });
}

#[test]
fn gpt2_on_dp2_tp2_pp2_with_sequence_parallelism() {
    gpt2(Case { dp: 2, tp: 2, pp: 2, sp: true, global_batch: 8, micro_batch: 2, ..Case::default() });
}
