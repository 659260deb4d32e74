//! What a rank keeps: activation bytes per layer, counted from programs.

use crate::harness::{compiled, interleaved, models, options};
use crate::models::{GPT2, case};
use frontend::Models;
use ir::options::{MemoryOrder, Options, Recompute, SequenceParallel, Zero};
use ir::program::{Arena, Buffer, Call, CallSchedule, Content, Job, Space, Stage};
use passes::commands::best_fit::{ALIGN, most_alive};
use passes::commands::liveness::ArenaLiveness;
use passes::remedy::{self, Remedy};
use passes::report::footprint::{Budget, Footprint, MemoryCategory, owners};
use runtime::executor::arena_bytes;
use runtime::shm::{SegmentLayout, bytes_of_rank};
use runtime::target::{Processor, Target};

/// Bytes of one stash slot of the first stage, per layer: of four layers more, less what is outside of layers.
fn stash(defines: &[(&str, &str)], words: &str) -> u64 {
    let bytes = |layers: &str| {
        let defines: Vec<(&str, &str)> = GPT2.1.iter().chain(defines).copied().filter(|d| d.0 != "layers").chain([("layers", layers)]).collect();
        compiled(GPT2.0, &defines, &case(words)).job.programs[0].arena_bytes[Arena::Stash as usize]
    };
    (bytes("8") - bytes("4")) / 4
}

const WIDE: &[(&str, &str)] = &[("hidden", "64"), ("heads", "4"), ("ffn", "256"), ("seq", "128")];
/// `seq * hidden` in f32.
const SBH: u64 = 4 * 128 * 64;

#[test]
fn recomputation_keeps_less_the_more_it_repeats() {
    let kept = ["m2", "m2 selective", "m2 block1", "m2 full1", "m2 full2", "m2 full4"].map(|words| stash(WIDE, words));
    assert!(kept[0] > kept[1] && kept[1] > kept[3], "{kept:?}");
}

/// SEMANTICS: full recomputation keeps one `[batch, seq, hidden]` per layer.
#[test]
fn full_recomputation_keeps_the_input_of_each_unit() {
    assert_eq!(stash(WIDE, "m2 full1"), SBH);
    assert_eq!(stash(WIDE, "m2 full4"), SBH / 4);
    assert_eq!(stash(WIDE, "tp2 sp m2 full1"), SBH / 2);
}

#[test]
fn selective_recomputation_drops_the_result_and_the_statistics_of_attention() {
    let (none, selective) = (stash(WIDE, "m2"), stash(WIDE, "m2 selective"));
    assert_eq!(none - selective, SBH + 4 * 128 * 4);
}

/// sbh (10 + 24/t) on tp: what is outside of the tp regions is whole on every rank; with sp everything is split.
#[test]
fn tensor_parallelism_splits_what_is_inside_of_its_regions_and_sp_the_rest() {
    let (one, tp2, tp4) = (stash(WIDE, "m2"), stash(WIDE, "tp2 m2"), stash(WIDE, "tp4 m2"));
    let (outside, inside) = (2 * tp2 - one, 2 * (one - tp2));
    assert_eq!(tp4, outside + inside / 4);
    assert!(outside > 0 && inside > outside);
    assert_eq!(stash(WIDE, "tp4 sp m2"), one / 4);
}

fn job(words: &str) -> Job {
    compiled(GPT2.0, &[GPT2.1, &[("hidden", "64"), ("ffn", "256"), ("vocab", "128"), ("seq", "32")]].concat(), &case(words)).job
}

/// Buffers of training that have both dims, on the last stage.
fn buffers(words: &str, dims: [&str; 2]) -> usize {
    let job = job(words);
    let stage = job.stages.last().expect("a stage");
    let has = |b: &&Buffer| dims.iter().all(|d| b.dims.iter().any(|(name, _)| name.starts_with(d)));
    job.programs[stage.program as usize].buffers.iter().filter(has).filter(|b| !b.name.starts_with("eval_")).count()
}

#[test]
fn the_gradient_of_the_logits_comes_where_they_were() {
    for words in ["", "m2", "tp2 m2", "pp2 m4", "pp2 m4 zbh1", "zbv m2", "b2 full1", "cp2"] {
        assert_eq!(buffers(words, ["seq", "vocab"]), 1, "{words}");
    }
}

/// Of tied embeddings, the gradient of the head is added to that of the look-up where it is: parameter, gradient, two states.
#[test]
fn the_gradients_of_tied_embeddings_share_a_place() {
    assert_eq!(buffers("", ["vocab", "hidden"]), 4);
}

const MESHES: &[&str] = &["b2 m2", "tp2 m2", "tp4 sp m2 full1", "pp4 m8", "pp2 m4 gpipe selective", "dp2 tp2 pp2 sp m4 b2", "cp2 m2 full2"];

#[test]
fn the_plan_is_what_a_rank_allocates() {
    for words in MESHES.iter().chain(&["offload pp2 dp2 m2", "bf16 offload dp2 zero1 m2", "spill pp2 m4", "spill offload zbv m4"]) {
        let job = job(words);
        for rank in 0..job.mesh.world() {
            let planned = Footprint::of(&job, job.mesh.stage(rank) as usize);
            let planned = planned.total() + planned.on_host();
            assert_eq!(planned, arena_bytes(&job, rank).iter().sum::<u64>(), "rank {rank} of {words}");
        }
    }
}

/// The ranks of a stage have equal shares of the segment in which all meet.
#[test]
fn the_shares_of_shared_memory_add_up_to_what_a_run_maps() {
    let target = Target::Cpu(Processor { cpu: String::new(), features: String::new() });
    for words in MESHES.iter().chain(&["dp2 cp2 zero3", "dp2 tp2 zero1 m2", "pp2 v2 m4"]) {
        let job = job(words);
        let layout = SegmentLayout::new(&job, &target, 0);
        let shares: Vec<u64> = (0..job.mesh.world()).map(|rank| bytes_of_rank(&job, &target, rank)).collect();
        assert_eq!(shares.iter().sum::<u64>(), layout.bytes - layout.status(0).progress(), "{words}");
        for rank in 0..job.mesh.world() {
            let first = (0..rank).find(|r| job.mesh.stage(*r) == job.mesh.stage(rank)).unwrap_or(rank);
            assert_eq!(shares[rank as usize], shares[first as usize], "rank {rank} of {words}");
        }
    }
}

/// Where logits are what an evaluation needs most, which a step has in its stash: the memory is that of a step.
#[test]
fn an_evaluation_needs_no_memory_beside_that_of_steps() {
    for words in ["", "m2", "tp2", "pp2 m4", "zbv m4", "dp2 zero3", "offload m2", "bf16 dp2 zero1 m2"] {
        let job = compiled(GPT2.0, &[GPT2.1, &[("hidden", "64"), ("ffn", "256"), ("vocab", "4096"), ("seq", "32")]].concat(), &case(words)).job;
        let Stage { program, schedule, .. } = job.stages.last().expect("a stage");
        let program = &job.programs[*program as usize];
        let temporary = |calls: &[Call]| {
            let used = calls.iter().flat_map(|c| program.commands(c)).flat_map(|(_, c)| c.buffers());
            let buffers = used.map(|id| &program.buffers[id.index()]).filter(|b| b.arena == Arena::Temporary);
            buffers.map(|b| b.offset + b.bytes()).max().unwrap_or(0)
        };
        let [step, evaluation] = [[&schedule.train[..], &schedule.update].concat(), schedule.eval.clone()].map(|calls| temporary(&calls));
        let of_steps = CallSchedule { eval: vec![], ..schedule.clone() };
        let stashes = ArenaLiveness::of_stage(program, &of_steps, Space::Device).stashes;
        let stashed: u64 = stashes.iter().filter(|s| !s.spans.is_empty()).map(|s| s.bytes).sum();
        let all = schedule.arena_bytes(program)[Arena::Temporary as usize];
        assert!(
            evaluation > 0 && all <= step.next_multiple_of(64) + stashed,
            "{words}: {evaluation} for an evaluation, {step} and {stashed} for a step, {all} in all"
        );
        // An evaluation, mostly its logits, takes more than a quarter of the memory.
        assert!(evaluation * 4 > all, "{words}: {evaluation} for an evaluation, {all} in all");
    }
}

/// Runs in list order and on streams, on one rank and on stages.
#[test]
fn evaluations_between_steps_change_no_bit_of_them() {
    for words in [
        "",
        "m2",
        "pp2 m4",
        "pp2 v2 m4",
        "zbv m2",
        "dp2 zero2 m2",
        "dp2 zero3",
        "tp2 sp pp2 m2",
        "cp2 m2",
        "offload pp2 dp2 zero1 m2",
        "spill pp2 v2 m4",
        "spill zbv m2",
    ] {
        let case = case(words);
        let c = compiled(GPT2.0, GPT2.1, &case);
        interleaved(&c, &c.job, &case, 6).unwrap_or_else(|e| panic!("{words}: {e}"));
    }
}

#[test]
fn owners_by_line_add_up_to_the_plan() {
    for words in MESHES {
        let job = job(words);
        for stage in 0..job.stages.len() {
            let f = Footprint::of(&job, stage);
            for kind in MemoryCategory::ALL {
                let owned: u64 = owners(&job, stage).iter().filter(|o| o.kind == kind).map(|o| o.bytes).sum();
                let planned = f.bytes.get(&kind).copied().unwrap_or(0);
                // Temporary buffers may have gaps between them.
                assert!(
                    if kind == MemoryCategory::Temporary { owned <= planned } else { owned == planned },
                    "{} of {words}: {owned} {planned}",
                    kind.name()
                );
            }
        }
    }
}

/// SEMANTICS: 16 bytes per parameter in f32 with AdamW, of which tp and pp split what they split.
#[test]
fn parameters_gradients_and_optimizer_are_sixteen_bytes_per_parameter() {
    let held = |job: &Job, stage: usize| {
        let f = Footprint::of(job, stage);
        [MemoryCategory::Parameters, MemoryCategory::Gradients, MemoryCategory::Optimizer].map(|k| f.bytes[&k])
    };
    for words in ["m2", "dp2 m2", "dp2 m2 full1"] {
        let job = job(words);
        let count: u64 = job.params.iter().map(|p| p.dims.iter().map(|d| d.size).product::<u64>()).sum();
        let [parameters, gradients, optimizer] = held(&job, 0);
        assert_eq!((parameters, optimizer), (4 * count, 8 * count), "{words}");
        // Beside gradients there are only the scalars that a step reports.
        assert!((4 * count..4 * count + 1024).contains(&gradients), "{words}: {gradients} for {count} parameters");
    }
    let job = job("pp2 m2");
    let stage_count =
        |k: usize| -> u64 { job.stages[k].params.iter().map(|p| job.params[*p as usize].dims.iter().map(|d| d.size).product::<u64>()).sum() };
    for stage in 0..2 {
        let [parameters, _, optimizer] = held(&job, stage);
        assert_eq!((parameters, optimizer), (4 * stage_count(stage), 8 * stage_count(stage)));
    }
}

/// The gradient norm squares them, and so does AdamW: neither keeps squares for the other.
#[test]
fn gradients_that_nothing_clips_take_no_more_memory() {
    let unclipped = GPT2.0.replace("clip: 1.0;", "clip: 0.0;");
    assert_ne!(unclipped, GPT2.0);
    for words in ["m2", "dp2 m2", "dp2 zero1 m2", "pp2 m2", "bf16 m2", "f16 m2"] {
        let held = |text: &str| Footprint::of(&compiled(text, GPT2.1, &case(words)).job, 0).bytes[&MemoryCategory::Gradients];
        let (clipped, unclipped) = (held(GPT2.0), held(&unclipped));
        // The norm takes memory only if it clips.
        assert!(unclipped <= clipped, "{words}: {unclipped} and {clipped}");
    }
}

/// 4 + 2 for the parameter and its copy, which training and evaluation share; 4 for the gradient, 8 for AdamW's states.
#[test]
fn sixteen_bits_are_eighteen_bytes_per_parameter() {
    for words in ["bf16 m2", "f16 m2", "bf16 dp2 m2 full1", "bf16 tp2 m2", "bf16 pp2 m2"] {
        let job = job(words);
        for (stage, Stage { params, program, .. }) in job.stages.iter().enumerate() {
            let f = Footprint::of(&job, stage);
            let own = &job.programs[*program as usize].buffers;
            let count: u64 = own.iter().filter(|b| matches!(b.content, Content::Param { .. })).map(Buffer::elements).sum();
            let held: u64 = [MemoryCategory::Parameters, MemoryCategory::Gradients, MemoryCategory::Optimizer].map(|k| f.bytes[&k]).iter().sum();
            // Beside them there are only reported scalars, and padding behind buffers.
            let slack = 1024 + 2 * ALIGN * params.len() as u64;
            assert!((18 * count..18 * count + slack).contains(&held), "{words}: {held} for {count} parameters");
        }
    }
}

/// SEMANTICS: min(m, p - stage) microbatches are in flight on a stage of 1F1B, all of them in GPipe.
#[test]
fn activations_are_held_once_per_microbatch_in_flight() {
    let slots = |words: &str| -> Vec<u64> { (0..4).map(|k| Footprint::of(&job(words), k).slots).collect() };
    assert_eq!(slots("pp4 m8"), [4, 3, 2, 1]);
    assert_eq!(slots("pp4 m2"), [2, 2, 2, 1]);
    assert_eq!(slots("pp4 m8 gpipe"), [8, 8, 8, 8]);
}

/// No plan needs less than the bytes that live at once. What a backward pass has read gives its memory to what comes
/// then.
#[test]
fn stashes_and_temporary_buffers_are_within_a_twentieth_of_the_least_that_is_possible() {
    for words in MESHES.iter().copied().chain(["dp2 zero2", "dp2 zero3 m4", "zbv m4", "frugal dp2 zero2", "spill pp2 m4", "spill offload m2"]) {
        let job = job(words);
        for (s, Stage { program, schedule, .. }) in job.stages.iter().enumerate() {
            let program = &job.programs[*program as usize];
            for space in Space::ALL {
                let lives = ArenaLiveness::of_stage(program, schedule, space);
                let least = most_alive(lives.temporary.values().chain(&lives.stashes));
                let planned = schedule.arena_bytes(program)[space.temporary() as usize];
                assert!(planned >= least && planned * 20 <= least * 21, "stage {s} of {words}: {planned} of at least {least}");
            }
        }
    }
}

fn remedies(sizes: &[(&str, &str)], words: &str, share: f64) -> Vec<Remedy> {
    let case = case(words);
    let defines = [GPT2.1, sizes].concat();
    let defines: Vec<(&str, &str)> = defines.iter().rev().fold(vec![], |mut out: Vec<(&str, &str)>, d| {
        if out.iter().all(|o| o.0 != d.0) {
            out.push(*d);
        }
        out
    });
    let Models { training, evaluation, .. } = models(GPT2.0, &defines, &case).expect("a model");
    let now = Footprint::of(&compiled(GPT2.0, &defines, &case).job, 0).total();
    let budget = Budget([(now as f64 * share) as u64, u64::MAX]);
    let found = remedy::find(&training, &evaluation, &options(&case), budget, &Footprint::of);
    assert!(found.iter().all(|r| r.peaks[0] <= budget.of(Space::Device)));
    found
}

#[test]
fn changes_that_fit_are_found_by_compiling_the_fastest_first() {
    let found = |words, share| {
        let found = remedies(WIDE, words, share);
        assert!(found.is_sorted_by_key(|r| r.time), "{words}: {found:?}");
        found.into_iter().map(|r| r.options).collect::<Vec<_>>()
    };
    let asked = |words| options(&case(words));
    // The order is recomputed attention, then more and more recomputed layers, then the optimizer on the host.
    let block = |layers| Options { recompute: Recompute::Block(layers), ..asked("m2 b4") };
    let selective = Options { recompute: Recompute::Selective, ..asked("m2 b4") };
    assert_eq!(found("m2 b4", 0.97)[..4], [selective, block(1), block(2), block(4)]);
    assert_eq!(found("m2 b4", 0.8)[..2], [block(2), block(4)]);
    let split = Options { sp: SequenceParallel::On, memory_order: MemoryOrder::Memory, ..asked("tp2 m2 b4") };
    assert!(found("tp2 m2 b4", 0.9).contains(&split));
    // A small budget needs most options together.
    let all = Options { recompute: Recompute::Uniform(1), zero: Zero::Params, memory_order: MemoryOrder::Memory, ..asked("dp2 m2 b4") };
    assert_eq!(found("dp2 m2 b4", 0.5)[0], Options { logits_chunks: Some(4), ..all });
    assert_eq!(found("m2 b4", 0.01), []);
}
