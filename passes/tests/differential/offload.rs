//! Optimizers on the host: the same bits, what is left on the device, and what goes on at the same time.

use crate::counts::WIDE_LLAMA;
use crate::harness::{Case, compiled, models, options};
use crate::models::{DEEPSEEK, GPT2, LLAMA, case, on};
use frontend::Models;
use ir::options::{Options, Overlap};
use ir::program::{Action, BodyKind, Content, Job, Space, Stream};
use passes::commands::cost_model::traffic;
use passes::compile::compile;
use passes::report::footprint::Footprint;

#[test]
fn offloaded_optimizers_compute_the_same() {
    on(GPT2, &[], &["offload m2", "offload dp2 m2", "offload dp2 zero1 m2", "offload dp2 zero2 m2", "offload dp2 zero3 m2"]);
    on(GPT2, &[], &["bf16 offload m2", "bf16 offload dp2 m2", "bf16 offload dp2 zero1 m2", "f16 offload dp2 zero2 m2", "bf16 offload dp2 zero3 m2"]);
    on(GPT2, &[], &["offload tp2 sp m2", "offload pp2 dp2 zero1 m2", "f16 offload pp2 v2 m2", "offload cp2 dp2 zero2 m2"]);
    on(DEEPSEEK, &[], &["bf16 offload dp2 ep2 zero1 m2"]);
}

/// Bytes per parameter that a rank keeps in a memory over steps, the numbers of other dims than parameters' left out.
fn bytes_per_parameter(words: &str, space: Space) -> f64 {
    let job = compiled(LLAMA.0, WIDE_LLAMA, &case(words)).job;
    let program = &job.programs[0];
    let buckets: u64 = program.buckets.iter().map(|b| b.size).sum();
    let pieces: u64 = program.buckets.iter().flat_map(|b| &b.pieces).map(|p| p.elements()).sum();
    let elements: u64 = job.params.iter().map(|p| p.dims.iter().map(|d| d.size).product::<u64>()).sum();
    let kept = program.buffers.iter().filter(|b| b.arena == space.lasting() && !b.dims.is_empty());
    let kept = kept.filter(|b| !matches!(b.content, Content::Table { .. }));
    kept.map(|b| b.bytes()).sum::<u64>() as f64 / (elements - pieces + buckets) as f64
}

/// On the device the parameter as passes read it, and its gradient; on the host the weights and AdamW's two states, a rank's part of them.
#[test]
fn the_device_keeps_parameters_and_gradients_the_host_the_rest() {
    for (words, device, host) in [
        ("offload dp4 m2", 4.0 + 4.0, 12.0),
        ("offload dp4 zero1 m2", 4.0 + 4.0, 12.0 / 4.0),
        ("offload dp4 zero2 m2", 4.0 + 4.0 / 4.0, 12.0 / 4.0),
        ("offload dp4 zero3 m2", 8.0 / 4.0, 12.0 / 4.0),
        ("bf16 offload dp4 m2", 2.0 + 4.0, 12.0),
        ("bf16 offload dp4 zero1 m2", 2.0 + 4.0, 12.0 / 4.0),
        ("bf16 offload dp4 zero2 m2", 2.0 + 4.0 / 4.0, 12.0 / 4.0),
        ("bf16 offload dp4 zero3 m2", 6.0 / 4.0, 12.0 / 4.0),
        ("f16 offload m2", 2.0 + 4.0, 12.0),
    ] {
        assert_eq!((bytes_per_parameter(words, Space::Device), bytes_per_parameter(words, Space::Host)), (device, host), "{words}");
    }
}

const SIZES: &[(&str, &str)] = &[("vocab", "8192"), ("hidden", "1024"), ("heads", "16"), ("ffn", "4096"), ("layers", "4"), ("seq", "512")];

fn job(words: &str, overlap: Overlap) -> Job {
    let case = Case { bucket_size: Some(4_000_000), ..case(words) };
    let Models { training, evaluation, .. } = models(GPT2.0, SIZES, &case).unwrap_or_else(|e| panic!("{e}"));
    compile(training, evaluation, &Options { overlap, ..options(&case) }).unwrap_or_else(|e| panic!("{words}: {e:?}")).job
}

/// Kernels of the host are those of the optimizer, and nothing else of the program touches its memory.
#[test]
fn what_the_host_runs_is_in_the_program() {
    for words in ["offload m2", "bf16 offload dp2 zero1 m2"] {
        let job = job(words, Overlap::On);
        for body in &job.programs[0].bodies {
            let of_host =
                body.commands.iter().filter(|c| matches!(&c.action, Action::Launch { kernel, .. } if job.kernels[kernel.index()].on == Space::Host));
            let count = of_host.inspect(|c| assert_eq!(c.stream, Stream::Host)).count();
            assert_eq!(count > 0, body.kind == BodyKind::Update, "{words}: {}", body.name);
        }
    }
}

/// While one update runs, gradients of the next come and new parameters of the last go; the last of these while the next step begins. The host needs little memory for
/// that.
#[test]
fn updates_stream_through_the_host() {
    for words in ["bf16 offload m2", "offload dp2 m2", "bf16 offload dp2 zero1 m2", "bf16 offload dp2 zero3 m2"] {
        let (off, on) = (job(words, Overlap::Off), job(words, Overlap::On));
        let all = traffic(&on);
        let hidden = [Stream::ToHost, Stream::ToDevice].map(|s| 100 * all[&s].hidden / all[&s].bytes);
        let host = |job: &Job| Footprint::of(job, 0).on_host();
        println!("{words}: {hidden:?} % hidden, {} bytes of the host, {} with overlap", host(&off), host(&on));
        assert!(hidden[0] >= 70 && hidden[1] >= 70, "{words}: {hidden:?} %");
        assert!(host(&on) <= host(&off) + host(&off) / 4, "{words}: {} bytes of the host, {} with overlap", host(&off), host(&on));
    }
}
