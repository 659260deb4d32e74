//! How much communication is hidden behind compute, on the nominal machine, at sizes that are not too small for it.

use crate::harness::{Case, compiled, models, options};
use crate::models::{DEEPSEEK, GPT2, LLAMA, case};
use frontend::Models;
use ir::options::{Options, Overlap};
use ir::program::{Action, Arena, BodyKind, Collective, Job, Program, ProgramBody, Stream};
use passes::commands::cost_model::{traffic, traffic_of};
use passes::compile::compile;
use passes::report::footprint::Footprint;

type Model = (&'static str, &'static [(&'static str, &'static str)]);

const GPT: Model = (GPT2.0, &[("vocab", "8192"), ("hidden", "1024"), ("heads", "16"), ("ffn", "4096"), ("layers", "4"), ("seq", "512")]);
const LLAMA_1K: Model = (
    LLAMA.0,
    &[
        ("vocab", "8192"),
        ("hidden", "1024"),
        ("heads", "16"),
        ("kv_heads", "8"),
        ("head_dim", "64"),
        ("ffn", "2816"),
        ("layers", "4"),
        ("seq", "512"),
    ],
);

fn job(model: Model, words: &str, overlap: Overlap) -> Job {
    job_of(model, words, overlap, 4_000_000)
}

/// With buckets of `size` elements.
fn job_of(model: (&str, &[(&str, &str)]), words: &str, overlap: Overlap, size: u64) -> Job {
    let case = Case { bucket_size: Some(size), ..case(words) };
    let Models { training, evaluation, .. } = models(model.0, model.1, &case).unwrap_or_else(|e| panic!("{e}"));
    compile(training, evaluation, &Options { overlap, ..options(&case) }).unwrap_or_else(|e| panic!("{words}: {e:?}")).job
}

/// Percent of a stream's bytes that go while a kernel runs.
fn hidden(job: &Job, stream: Stream) -> u64 {
    let all = traffic(job);
    let found = all.get(&stream).unwrap_or_else(|| panic!("nothing on stream {}", stream.name()));
    100 * found.hidden / found.bytes
}

/// What can be hidden is: backward sums of tensor parallelism behind gradients of weights (nothing is left to do during those of the forward pass), buckets
/// of gradients behind the last backward pass (but for the embedding, which comes last), messages behind anything.
#[test]
fn communication_is_hidden_behind_compute() {
    for (words, stream, least) in [
        ("bf16 tp2 m2", Stream::Tensor, 43),
        ("bf16 tp2 sp m2", Stream::Tensor, 55),
        ("bf16 tp2 sp m2 chunks4", Stream::Tensor, 70),
        ("bf16 dp2 m1", Stream::Data, 57),
        ("bf16 dp2 m4", Stream::Data, 57),
        ("bf16 dp2 m2 zero1", Stream::Data, 60),
        ("bf16 dp4 m2 zero3", Stream::Data, 50),
        ("bf16 pp2 m4", Stream::Send, 90),
        ("bf16 pp2 v2 m4", Stream::Receive, 90),
        ("bf16 tp2 pp4 zbh1 m8", Stream::Send, 85),
    ] {
        for model in [GPT, LLAMA_1K] {
            assert_eq!(hidden(&job(model, words, Overlap::Off), stream), 0);
            let found = hidden(&job(model, words, Overlap::On), stream);
            assert!(found >= least, "{words}: {found} % on stream {}", stream.name());
        }
    }
}

/// Gathers begin as soon as the first parameters are updated, and the next forward pass when the first ones are there. Where compute is too short for what links
/// have to bring (here in f32, for one short sequence), layers wait for their own parameters alone.
#[test]
fn new_parameters_are_gathered_under_the_next_forward_pass() {
    let gathers = |b: &ProgramBody, a: &Action| b.kind == BodyKind::Update && matches!(a, Action::Collective { kind: Collective::AllGather, .. });
    let deep = (GPT.0, &[GPT.1, &[("layers", "8")]].concat()[..]);
    for (words, size, least) in [
        ("bf16 dp4 m1 zero1", 4_000_000, 95),
        ("bf16 dp4 m1 zero1", 40_000_000, 85),
        ("bf16 dp4 m2 zero2", 40_000_000, 95),
        ("bf16 dp8 m2 zero1", 40_000_000, 85),
        ("dp4 m2 zero1", 4_000_000, 85),
        ("dp4 m2 zero2", 4_000_000, 70),
    ] {
        let of = |overlap| traffic_of(&job_of(deep, words, overlap, size), &gathers)[&Stream::Data];
        let (off, on) = (of(Overlap::Off), of(Overlap::On));
        assert_eq!((on.bytes, off.hidden), (off.bytes, 0));
        let found = 100 * on.hidden / on.bytes;
        assert!(found >= least, "{words}, buckets of {size}: {found} %");
    }
}

#[test]
fn overlap_costs_little_memory() {
    for words in ["bf16 tp2 m2", "bf16 dp2 m2 zero3", "bf16 dp2 tp2 pp2 sp m4", "bf16 pp2 v2 m4"] {
        let most = |overlap| {
            let job = job(GPT, words, overlap);
            (0..job.stages.len()).map(|k| Footprint::of(&job, k).total()).max().expect("a stage")
        };
        let (off, on) = (most(Overlap::Off), most(Overlap::On));
        assert!(on <= off + off / 20, "{words}: {off} bytes, {on} with overlap");
    }
}

/// What the compute stream launches between the time when a communication of a body can begin and its first wait for that.
fn meanwhile(program: &Program, body: usize, at: usize) -> Vec<&str> {
    let commands = &program.bodies[body].commands;
    let event = commands[at + 1..].iter().find(|c| c.stream == commands[at].stream).and_then(|c| match c.action {
        Action::Record { event } => Some(event),
        _ => None,
    });
    let waits = |a: &Action| matches!(a, Action::Wait { event: e } if Some(*e) == event);
    let compute = commands[at + 1..].iter().filter(|c| c.stream == Stream::Compute);
    compute.take_while(|c| !waits(&c.action)).filter(|c| matches!(c.action, Action::Launch { .. })).map(|c| &*c.origin.scope).collect()
}

#[test]
fn shared_experts_compute_while_rows_go_to_experts_and_back() {
    for words in ["dp2 ep2 m2", "tp2 ep2 etp1 sp m2", "dp2 tp2 ep4 etp1 sp m2"] {
        let job = compiled(DEEPSEEK.0, DEEPSEEK.1, &case(words)).job;
        let program = &job.programs[0];
        let body = program.bodies.iter().position(|b| b.name == "forward").expect("a forward pass");
        let exchanges: Vec<usize> = (0..program.bodies[body].commands.len())
            .filter(|k| matches!(program.bodies[body].commands[*k].action, Action::Collective { kind: Collective::AllToAll, .. }))
            .collect();
        let meanwhile: Vec<Vec<&str>> = exchanges.iter().map(|k| meanwhile(program, body, *k)).collect();
        assert!(meanwhile.iter().any(|m| m.iter().any(|scope| scope.contains(".shared"))), "{words}: {meanwhile:?}");
    }
}

#[test]
fn a_message_has_a_slot_while_the_last_one_is_in_use() {
    for words in ["pp2 m4", "pp2 v2 m4", "tp2 pp3 zbv m4"] {
        let defines: Vec<(&str, &str)> = GPT2.1.iter().map(|d| if d.0 == "layers" { ("layers", "6") } else { *d }).collect();
        let job = compiled(GPT2.0, &defines, &case(words)).job;
        let mut messages = 0;
        for stage in &job.stages {
            let program = &job.programs[stage.program as usize];
            for command in program.bodies.iter().flat_map(|b| &b.commands) {
                let (Action::Recv { dst: place, .. } | Action::Send { src: place, .. }) = &command.action else { continue };
                let buffer = &program.buffers[place.buffer.index()];
                assert_eq!(buffer.arena, Arena::Stash);
                let (stash, _) = program.stash(buffer).expect("in a stash");
                assert!(stage.schedule.slots[stash].count > 1, "{words}: {}", buffer.name);
                messages += 1;
            }
        }
        assert!(messages > 0);
    }
}
