//! Optimizer states on a disk: the same bits, and what is left in the host's memory.

use crate::harness::compiled;
use crate::models::{DEEPSEEK, GPT2, LLAMA, MIXTRAL, case, on};
use ir::program::{Action, Arena, Buffer, Content, Job, Stream};
use passes::commands::cost_model::traffic;
use passes::report::footprint::Footprint;
use verify::Invariant;
use verify::job::verify;

/// Each case runs in random interleavings of its streams, beside one that offloads nothing.
#[test]
fn states_on_a_disk_compute_the_same() {
    on(GPT2, &[], &["disk", "disk m2", "disk pp2 m4", "disk dp2 zero1", "bf16 disk dp2 zero2 m2", "frugal disk m2", "disk spill pp2 m4 zbv"]);
    on(LLAMA, &[], &["disk tp2 sp m2", "f16 disk dp2 zero3 m2", "bf16 disk tp2 pp2 m2", "disk dp4 zero1 replicas2 m2", "disk full1"]);
    on(MIXTRAL, &[], &["disk dp2 ep2 b2", "disk passes3 dp2 ep2 zero1 m2"]);
    on(DEEPSEEK, &[], &["bf16 disk dp2 ep2 zero1 m2"]);
}

fn states(job: &Job, arena: Arena) -> impl Iterator<Item = &Buffer> {
    let all = job.programs.iter().flat_map(|p| &p.buffers);
    all.filter(move |b| b.arena == arena && matches!(b.content, Content::State { .. }))
}

/// What was in the host's memory is on its disk, but for small states; each is read once and written once.
#[test]
fn states_of_the_host_rest_on_its_disk() {
    for words in ["m2", "bf16 m2", "dp2 zero1 m2", "bf16 dp2 zero3", "tp2 pp2 m2"] {
        let [memory, disk] = ["offload ", "disk "].map(|more| compiled(LLAMA.0, LLAMA.1, &case(&format!("{more}{words}"))).job);
        let bytes = |job: &Job, arena| states(job, arena).map(Buffer::bytes).sum::<u64>();
        assert_eq!(bytes(&disk, Arena::Disk) + bytes(&disk, Arena::Host), bytes(&memory, Arena::Host), "{words}");
        assert!(bytes(&disk, Arena::Host) * 64 <= bytes(&memory, Arena::Host), "{words}");
        let count = states(&disk, Arena::Disk).count();
        let copies = |stream: Stream| {
            let commands = disk.programs.iter().flat_map(|p| &p.bodies).flat_map(|b| &b.commands);
            commands.filter(|c| c.stream == stream && matches!(c.action, Action::Copy { .. })).count()
        };
        assert!(count > 0 && [Stream::FromDisk, Stream::ToDisk].map(copies) == [count; 2], "{words}");
        for stage in 0..disk.stages.len() {
            let [before, after] = [&memory, &disk].map(|job| Footprint::of(job, stage));
            assert!(after.on_disk() > 0 && before.on_disk() == 0 && after.total() == before.total(), "{words}");
        }
    }
}

/// While one parameter is updated, the next states come and the last ones go: the host has room for about three,
/// however many there are.
#[test]
fn the_host_has_room_for_a_few_states_however_many_there_are() {
    let job = |layers: &str| compiled(GPT2.0, &[GPT2.1, &[("layers", layers)]].concat(), &case("bf16 disk")).job;
    let staged = |job: &Job| job.programs[0].arena_bytes[Arena::Staging as usize];
    let [few, many] = ["2", "12"].map(job);
    assert!(staged(&many) <= staged(&few) * 5 / 4, "{} and {}", staged(&few), staged(&many));
    let hidden = traffic(&many);
    for stream in [Stream::FromDisk, Stream::ToDisk] {
        assert!(hidden[&stream].hidden > 0, "{hidden:?}");
    }
}

/// A rank copies one thing at a time each way, whatever else it does.
#[test]
fn one_stream_reads_a_disk_and_one_writes() {
    let job = compiled(GPT2.0, GPT2.1, &case("disk m2")).job;
    assert_eq!(verify(&job), Ok(()));
    for stream in [Stream::FromDisk, Stream::ToDisk] {
        let mut mutant = job.clone();
        let mut commands = mutant.programs.iter_mut().flat_map(|p| &mut p.bodies).flat_map(|b| &mut b.commands);
        let copy = commands.find(|c| c.stream == stream && matches!(c.action, Action::Copy { .. })).expect("a copy");
        copy.stream = Stream::Compute;
        assert_eq!(verify(&mutant).map_err(|e| e.invariant), Err(Invariant::OneStream));
    }
}
