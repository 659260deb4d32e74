//! Activations that wait on the host: the same bits, what is left on the device, and what goes on at the same time.

use crate::harness::{Case, compiled, models, options};
use crate::models::{DEEPSEEK, GPT2, LLAMA, MIXTRAL, case, on};
use frontend::Models;
use ir::options::{ActivationOffload, Options, Overlap};
use ir::program::{Action, Arena, BodyKind, BufferId, Job, Space, Stream};
use passes::commands::cost_model::traffic;
use passes::commands::streams::messages;
use passes::compile::compile;
use passes::report::footprint::{Footprint, MemoryCategory};

/// Each case runs in random interleavings of its streams, beside one that offloads nothing.
#[test]
fn offloaded_activations_compute_the_same() {
    on(GPT2, &[], &["spill", "spill m2", "spilled1 m2", "spill pp2 m4", "spill pp2 v2 m4", "spill gpipe pp2 m3", "spill zbv m4"]);
    on(GPT2, &[], &["spill zbh pp2 m4", "spill full1 m2", "spill selective m2", "bf16 spill offload dp2 zero2 m2", "frugal spill pp2 m2"]);
    on(LLAMA, &[], &["spill tp2 sp m2", "spill cp2 m2", "f16 spill dp2 zero3 m2", "spill tp2 chunks2", "spill logits2 m2"]);
    on(MIXTRAL, &[], &["spill dp2 ep2 b2", "spill passes3 dp2 ep2 m2"]);
    on(DEEPSEEK, &[], &["bf16 spill dp2 ep2 zero1 m2"]);
}

fn of_a_slot(job: &Job, arena: Arena) -> u64 {
    job.programs.iter().map(|p| p.arena_bytes[arena as usize]).sum()
}

/// What a rank keeps of a microbatch is what it kept before; of that, in layers whose backward pass does not come at
/// once, the device keeps small things alone.
#[test]
fn what_was_stashed_on_the_device_is_stashed_on_the_host() {
    for words in ["m2", "pp2 m4", "pp2 v2 m4", "dp2 tp2 sp m2", "zbv m4", "full1 m2"] {
        let [without, with] = ["", "spill "].map(|more| compiled(LLAMA.0, LLAMA.1, &case(&format!("{more}{words}"))).job);
        let (device, host, before) = (of_a_slot(&with, Arena::Stash), of_a_slot(&with, Arena::HostStash), of_a_slot(&without, Arena::Stash));
        // With pipelines, a backward pass's copy of a message is on the host in addition.
        let alike = if words.contains("pp") || words.contains("zb") { device < before } else { device + host == before };
        assert!(host > 0 && alike, "{words}: {device} and {host} of {before}");
        for (stage, s) in with.stages.iter().enumerate() {
            let program = &with.programs[s.program as usize];
            let layer = |b: &ir::program::Buffer| b.origin.as_ref().and_then(|o| o.layer);
            let of_host = || program.buffers.iter().filter(|b| b.arena == Arena::HostStash);
            let largest = of_host().map(|b| b.bytes()).max().unwrap_or(0);
            let layers: Vec<u32> = program.buffers.iter().filter(|b| b.arena.is_stash()).filter_map(layer).collect();
            let last = layers.iter().max().copied();
            let messages = messages(program);
            for (id, buffer) in program.buffers.iter().enumerate().filter(|(_, b)| b.arena == Arena::Stash && layer(b).is_some()) {
                // Messages from other stages arrive on the device.
                if messages.contains(&BufferId(id as u32)) {
                    continue;
                }
                let small = buffer.bytes() * 64 < largest;
                // `turns` marks the inputs and values of the last layer.
                let turns = layer(buffer).map(|l| l + 1) >= last;
                // In zero-bubble schedules, weight passes read buffers that a backward pass has overwritten.
                assert!(small || turns || words.contains("zb"), "{words}: stage {stage} keeps {buffer:?}");
            }
        }
    }
}

/// With layers named by number, those of every stage from the first one on.
#[test]
fn the_first_layers_of_every_stage_are_offloaded() {
    let layers = |words: &str| {
        let job = compiled(LLAMA.0, &[LLAMA.1, &[("layers", "4")]].concat(), &case(words)).job;
        let of = |p: &ir::program::Program| {
            let on_host = p.buffers.iter().filter(|b| b.arena == Arena::HostStash);
            on_host.filter_map(|b| b.origin.as_ref()?.layer).collect::<std::collections::BTreeSet<u32>>()
        };
        job.stages.iter().map(|s| of(&job.programs[s.program as usize]).into_iter().collect::<Vec<_>>()).collect::<Vec<_>>()
    };
    assert_eq!(layers("spill m2"), [vec![0, 1, 2]]);
    assert_eq!(layers("spilled2 m2"), [vec![0, 1]]);
    // The second stage counts the value that it receives from layer 1, too.
    assert_eq!(layers("spill pp2 m4"), [vec![0, 1], vec![1, 2]]);
    assert_eq!(layers("spilled1 pp2 m4"), [vec![0], vec![1, 2]]);
}

/// A copy goes to the host once, in the pass that makes it, and comes back once to each pass that reads it.
#[test]
fn copies_go_once_and_come_back_once() {
    let job = compiled(GPT2.0, GPT2.1, &case("spill zbh pp2 m4")).job;
    for program in &job.programs {
        let of = |stream: Stream| {
            let bodies = program.bodies.iter().flat_map(|b| b.commands.iter().map(move |c| (b.kind, c)));
            let copies = bodies.filter(move |(_, c)| c.stream == stream && matches!(c.action, Action::Copy { .. }));
            copies.collect::<Vec<_>>()
        };
        let (out, back) = (of(Stream::ToHost), of(Stream::ToDevice));
        assert!(!out.is_empty() && out.iter().all(|(kind, _)| matches!(kind, BodyKind::Forward(_))));
        assert!(back.len() >= out.len() && back.iter().all(|(kind, _)| matches!(kind, BodyKind::Backward(_) | BodyKind::Weight(_))));
        let hosts = program.buffers.iter().filter(|b| b.arena == Arena::HostStash).count();
        assert_eq!(out.len(), hosts);
    }
}

const SIZES: &[(&str, &str)] = &[("vocab", "8192"), ("hidden", "2048"), ("heads", "16"), ("layers", "12"), ("seq", "1024")];

fn job(words: &str, activation_offload: ActivationOffload, overlap: Overlap) -> Job {
    let case: Case = case(words);
    let Models { training, evaluation, .. } = models(GPT2.0, SIZES, &case).unwrap_or_else(|e| panic!("{e}"));
    let options = Options { overlap, activation_offload, ..options(&case) };
    compile(training, evaluation, &options).unwrap_or_else(|e| panic!("{words}: {e:?}")).job
}

/// Where layers are recomputed, what enters them goes and comes while others are computed. What all of them keep on
/// the device does not grow with their number.
#[test]
fn activations_stream_to_the_host_and_back() {
    for words in ["bf16 full1 m2", "bf16 full1 dp2 zero2 m2", "bf16 full1 pp2 m4"] {
        let (off, on) = (job(words, ActivationOffload::Off, Overlap::On), job(words, ActivationOffload::Layers(None), Overlap::On));
        let all = traffic(&on);
        let hidden = [Stream::ToHost, Stream::ToDevice].map(|s| 100 * all[&s].hidden / all[&s].bytes);
        let [before, after] = [&off, &on].map(|job| Footprint::of(job, 0).bytes[&MemoryCategory::Activations]);
        let [host, temporary, more] = [
            Footprint::of(&on, 0).on_host(),
            Footprint::of(&off, 0).bytes[&MemoryCategory::Temporary],
            Footprint::of(&on, 0).bytes[&MemoryCategory::Temporary],
        ];
        println!("{words}: {hidden:?} % hidden, activations {before} and {after}, {host} on the host, temporary {temporary} and {more}");
        assert!(hidden[0] >= 90 && hidden[1] >= 90, "{words}: {hidden:?} %");
        assert!(after * 3 < before && host >= before - after, "{words}: {before} and {after}, {host} on the host");
        // With messages, a new order of commands may take more memory.
        assert!(more <= temporary + temporary / if words.contains("pp") { 3 } else { 10 }, "{words}: {temporary} and {more}");
    }
}

/// Without streams copies are commands of the one that there is.
#[test]
fn without_overlap_copies_are_in_order() {
    let job = job("m2", ActivationOffload::Layers(None), Overlap::Off);
    let commands = || job.programs[0].bodies.iter().flat_map(|b| &b.commands);
    assert!(commands().any(|c| matches!(c.action, Action::Copy { .. })) && commands().all(|c| c.stream == Stream::Compute));
    assert!(job.programs[0].stashes.iter().any(|s| s.space == Space::Host));
}
