//! Parameters on the host, or on a disk of it: the same bits, and what is left on the device.

use crate::harness::compiled;
use crate::models::{DEEPSEEK, GPT2, LLAMA, MIXTRAL, T5, case, on};
use ir::program::{Action, Arena, BodyKind, Buffer, Content, Job, Stream};
use passes::commands::cost_model::traffic;
use passes::report::footprint::Footprint;

/// Each case runs in random interleavings of its streams, beside one that offloads nothing.
#[test]
fn offloaded_parameters_compute_the_same() {
    on(
        GPT2,
        &[],
        &["offload params", "bf16 offload params m2", "offload params pp2 m4", "offload params dp2 zero1", "params bf16 disk dp2 zero2 m2"],
    );
    on(GPT2, &[], &["params_disk disk m2", "bf16 params_disk disk m2", "frugal params_disk offload m2", "disk params spill pp2 m4 zbv"]);
    on(LLAMA, &[], &["offload params tp2 sp m2", "f16 disk params_disk dp2 zero3 m2", "bf16 disk params_disk tp2 pp2 m2", "offload params full1"]);
    on(LLAMA, &[], &["offload params_disk dp4 zero1 replicas2 m2", "bf16 offload params_disk dp2 zero1 m2", "disk params_disk dp2 zero1 m2"]);
    on(MIXTRAL, &[], &["offload params dp2 ep2 b2", "disk params_disk passes3 dp2 ep2 zero1 m2"]);
    on(DEEPSEEK, &[], &["bf16 offload params dp2 ep2 zero1 m2"]);
    on(T5, &[], &["bf16 offload params m2"]);
}

/// Updates are in pieces of a few rows, wherever states and parameters rest.
#[test]
fn updates_in_pieces_compute_the_same() {
    let large = [("vocab", "512"), ("hidden", "16")];
    let memory = ["bucket500 offload m2", "bucket100 bf16 offload m2", "bucket100 offload params m2", "bucket500 bf16 offload params dp2 zero1 m2"];
    let disk = ["bucket3000 disk m2", "bucket3000 bf16 disk params_disk m2", "bucket3000 disk params_disk dp2 zero3", "bucket3000 disk dp2 zero1"];
    let meshes = [
        "bucket100 bf16 offload dp2 zero3",
        "bucket100 offload tp2 pp2 m4",
        "bucket3000 f16 disk params dp2 zero2 m2",
        "bucket100 offload dp2 zero1",
    ];
    on(GPT2, &large, &[memory, disk, meshes].concat());
    // Here the first dim has one element, so pieces are along the next one.
    on(LLAMA, &[("kv_heads", "1")], &["bucket16 offload m2", "bucket16 bf16 offload params m2"]);
    on(DEEPSEEK, &[], &["bucket40 bf16 offload params dp2 ep2 zero1 m2", "bucket40 offload m2"]);
}

fn params(job: &Job, arena: Arena) -> u64 {
    let all = job.programs.iter().flat_map(|p| &p.buffers);
    all.filter(|b| b.arena == arena && matches!(b.content, Content::Param { .. })).map(Buffer::bytes).sum()
}

/// What was on the device is where it is asked for, but for small ones. Each pass copies no more than there is, once.
#[test]
fn parameters_rest_where_they_are_asked_for() {
    for words in ["m2", "bf16 m2", "dp2 zero1 m2", "bf16 dp2 zero3 m2", "tp2 pp2 m2"] {
        let [device, host, disk] =
            ["", "params ", "params_disk "].map(|more| compiled(LLAMA.0, LLAMA.1, &case(&format!("offload {more}{words}"))).job);
        let all = params(&device, Arena::Persistent);
        assert_eq!(params(&host, Arena::Persistent) + params(&host, Arena::Host), all, "{words}");
        assert_eq!([Arena::Persistent, Arena::Host, Arena::Disk].map(|arena| params(&disk, arena)).iter().sum::<u64>(), all, "{words}");
        assert!(params(&host, Arena::Persistent) * 64 <= all && params(&disk, Arena::Disk) * 2 > all, "{words}");
        for program in &host.programs {
            let resting = program.buffers.iter().filter(|b| b.arena == Arena::Host && matches!(b.content, Content::Param { .. }));
            let most = resting.map(Buffer::bytes).sum::<u64>();
            for body in program.bodies.iter().filter(|b| !matches!(b.kind, BodyKind::Reduce | BodyKind::Update)) {
                let copied = body.commands.iter().filter(|c| c.stream == Stream::ToDevice).map(|c| match &c.action {
                    Action::Copy { dtype, count, .. } => dtype.bytes() * count,
                    _ => 0,
                });
                assert!(copied.sum::<u64>() <= most, "{words}: {}", body.name);
            }
        }
        for stage in 0..device.stages.len() {
            let [before, after] = [&device, &host].map(|job| Footprint::of(job, stage).total());
            assert!(after < before, "{words}: {before} bytes of a device, then {after}");
        }
    }
}

/// Copies of layers are under way beside kernels, with few of them on the device at a time.
#[test]
fn parameters_come_beside_compute() {
    let sizes = [("hidden", "512"), ("heads", "8"), ("ffn", "2048"), ("layers", "8"), ("seq", "2048")];
    let job = |words: &str| compiled(GPT2.0, &[GPT2.1, &sizes].concat(), &case(words)).job;
    let (device, host) = (job("bf16 offload b32 m2"), job("bf16 offload params b32 m2"));
    let copied = &traffic(&host)[&Stream::ToDevice];
    println!("{} of {} bytes hidden", copied.hidden, copied.bytes);
    assert!(copied.hidden * 10 >= copied.bytes * 8, "{copied:?}");
    let temporary = |job: &Job| job.programs[0].arena_bytes[Arena::Temporary as usize];
    assert!(temporary(&host) - temporary(&device) <= params(&host, Arena::Host) / 3, "{} and {}", temporary(&host), temporary(&device));
}

/// The host has room for a few pieces, however large a parameter is.
#[test]
fn the_host_has_room_for_a_few_pieces_however_large_a_parameter_is() {
    let job = |vocab: &str| compiled(GPT2.0, &[GPT2.1, &[("vocab", vocab), ("hidden", "64")]].concat(), &case("bucket8192 bf16 disk")).job;
    let staged = |job: &Job| job.programs[0].arena_bytes[Arena::Staging as usize];
    let [small, large] = ["512", "16384"].map(job);
    println!("{} and {} bytes of the host", staged(&small), staged(&large));
    assert!(staged(&large) <= staged(&small) * 5 / 4, "{} and {}", staged(&small), staged(&large));
}
