//! Forward and backward passes side by side: the same bits, and exchanges beside compute.

use crate::harness::compiled;
use crate::models::{DEEPSEEK, GPT2, LLAMA, MIXTRAL, T5, case, on};
use ir::program::{BodyKind, Job, Stream};
use passes::commands::cost_model::traffic;

/// Each case runs in random interleavings of its streams, beside one whose passes come one after the other.
#[test]
fn passes_side_by_side_compute_the_same() {
    on(GPT2, &[], &["paired tp2 sp m3", "paired pp2 tp2 m5", "paired pp2 v2 tp2 m5 group3", "paired pp2 m5 dualpipev", "paired dp2 zero3 m3"]);
    on(
        LLAMA,
        &[],
        &["paired tp2 sp pp2 m4 dualpipev", "paired cp2 pp2 m4", "f16 paired tp2 m3 full1", "paired spill pp2 tp2 m4", "paired disk tp2 m3"],
    );
    on(MIXTRAL, &[], &["paired dp2 ep2 m3", "paired passes3 dp2 ep2 zero1 m3", "paired frugal dp2 ep2 pp2 m4"]);
    on(DEEPSEEK, &[], &["paired bf16 dp2 ep2 zero1 m3", "paired tp2 sp ep2 etp1 dp2 pp2 m4 selective"]);
}

#[test]
fn stages_that_share_a_program_pair_other_passes() {
    on(LLAMA, &[("layers", "8")], &["paired pp4 m9 tp2", "paired pp4 m9 tp2 dualpipev", "paired pp2 v4 tp2 m4"]);
    on(MIXTRAL, &[("layers", "4")], &["bf16 paired dp2 ep2 pp2 m4 dualpipev", "paired tp2 sp ep2 etp1 dp2 pp2 v2 m4"]);
    on(T5, &[("encoder_layers", "2"), ("decoder_layers", "2")], &["paired pp2 tp2 m5", "paired pp2 tp2 m4 dualpipev"]);
}

fn parts(job: &Job) -> usize {
    job.programs.iter().flat_map(|p| &p.bodies).map(|b| b.cuts.len()).sum()
}

/// Exchanges of experts hide behind the passes of another microbatch.
#[test]
fn exchanges_hide_behind_another_microbatch() {
    for words in ["dp2 ep2 m8", "dp2 ep2 pp2 m8", "tp2 sp m8"] {
        let [apart, paired] = ["", "paired "].map(|more| compiled(MIXTRAL.0, MIXTRAL.1, &case(&format!("{more}{words}"))).job);
        let hidden = |job: &Job| traffic(job)[&Stream::Tensor];
        assert_eq!(hidden(&apart).bytes, hidden(&paired).bytes, "{words}");
        assert!(hidden(&paired).hidden > hidden(&apart).hidden, "{words}: {:?} and {:?}", hidden(&apart), hidden(&paired));
        assert!(parts(&apart) == 0 && parts(&paired) > 0, "{words}");
    }
}

/// Of calls that are under way together, two are a forward pass and a backward pass; all others are of one pass.
#[test]
fn a_pass_is_interrupted_by_that_of_its_pair_alone() {
    let job = compiled(LLAMA.0, LLAMA.1, &case("paired pp2 v2 tp2 m6")).job;
    for stage in &job.stages {
        let program = &job.programs[stage.program as usize];
        let runs = program.runs(&stage.schedule.train);
        let mut pairs = 0;
        for run in runs {
            let mut kinds: Vec<BodyKind> = stage.schedule.train[run].iter().map(|c| program.bodies[c.body.index()].kind).collect();
            kinds.sort_unstable();
            kinds.dedup();
            let is_pair = matches!(kinds[..], [BodyKind::Forward(_), BodyKind::Backward(_)]);
            assert!(is_pair || kinds.len() == 1, "{kinds:?}");
            pairs += u32::from(is_pair);
        }
        assert!(pairs > 0);
    }
}

/// What has nothing to hide is not cut.
#[test]
fn passes_without_exchanges_stay_one_after_the_other() {
    assert_eq!(parts(&compiled(GPT2.0, GPT2.1, &case("paired m4")).job), 0);
}
