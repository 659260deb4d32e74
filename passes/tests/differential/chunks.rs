//! Products in chunks: what runs beside what, and that nothing else changes.

use crate::counts::GPT2;
use crate::harness::compiled;
use crate::models::case;
use ir::kernel::Family;
use ir::program::{Action, BodyKind, BufferId, Command, Job, Stream};
use passes::report::explain::{exchanges, totals};

const CHUNKS: usize = 4;

/// The forward pass of a GPT with products in four chunks.
fn forward(words: &str) -> (Job, Vec<Command>) {
    let job = compiled(GPT2.0, GPT2.1, &case(&format!("{words} chunks4"))).job;
    let commands = job.programs[0].bodies.iter().find(|b| b.kind == BodyKind::Forward(0)).expect("a forward pass").commands.clone();
    (job, commands)
}

/// The index at which the compute stream first waits for a command.
fn awaited(commands: &[Command], k: usize) -> Option<usize> {
    let record = (k + 1..commands.len()).find(|j| commands[*j].stream == commands[k].stream)?;
    let Action::Record { event } = commands[record].action else { return None };
    (record..commands.len()).find(|j| commands[*j].stream == Stream::Compute && commands[*j].action == Action::Wait { event })
}

fn of_kind(commands: &[Command], name: &str) -> Vec<usize> {
    let is = |c: &Command| matches!(&c.action, Action::Collective { kind, .. } if kind.name() == name);
    (0..commands.len()).filter(|k| is(&commands[*k]) && commands[*k].reason.as_ref().is_some_and(|r| r.why.contains("in 4 chunks"))).collect()
}

/// The matrix products, with the places that they read and write.
fn products<'a>(job: &'a Job, commands: &'a [Command]) -> impl Iterator<Item = (usize, Vec<BufferId>)> + 'a {
    commands.iter().enumerate().filter_map(|(k, c)| match &c.action {
        Action::Launch { kernel, args, .. } if job.kernels[kernel.index()].family == Family::Gemm => {
            Some((k, args.iter().map(|p| p.buffer).collect()))
        }
        _ => None,
    })
}

fn ends(c: &Command) -> (BufferId, BufferId) {
    match &c.action {
        Action::Collective { src, dst, .. } => (src.buffer, dst.buffer),
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_next_chunk_is_gathered_under_the_product_of_the_one_before() {
    let (job, commands) = forward("tp2 sp");
    let gathers = of_kind(&commands, "all_gather");
    // Attention and the MLP gather in three layers each, and the head once.
    assert_eq!(gathers.len(), 7 * CHUNKS);
    for chunks in gathers.chunks(CHUNKS) {
        for pair in chunks.windows(2) {
            let wait = awaited(&commands, pair[1]).expect("it is waited for");
            let before = ends(&commands[pair[0]]).1;
            assert!(products(&job, &commands).any(|(k, places)| pair[1] < k && k < wait && places.contains(&before)), "{:?}", commands[pair[1]]);
        }
    }
}

#[test]
fn a_chunk_is_reduced_under_the_product_of_the_next_one() {
    for (words, name) in [("tp2 sp", "reduce_scatter"), ("tp2", "all_reduce")] {
        let (job, commands) = forward(words);
        let reductions = of_kind(&commands, name);
        assert_eq!(reductions.len(), 6 * CHUNKS, "{words}");
        for chunks in reductions.chunks(CHUNKS) {
            for pair in chunks.windows(2) {
                let wait = awaited(&commands, pair[0]).unwrap_or(commands.len());
                let next = ends(&commands[pair[1]]).0;
                assert!(products(&job, &commands).any(|(k, places)| pair[0] < k && k < wait && places.contains(&next)), "{:?}", commands[pair[0]]);
            }
        }
    }
}

/// Collectives beside products become four messages of a fourth each; others stay as they were.
#[test]
fn chunks_send_no_byte_more() {
    for words in ["tp2 sp m2", "tp2 m2", "tp4 sp full1"] {
        let of = |more: &str| totals(&exchanges(&compiled(GPT2.0, GPT2.1, &case(&format!("{words}{more}"))).job), false);
        let (whole, chunks) = (of(""), of(" chunks4"));
        assert_eq!(whole.keys().collect::<Vec<_>>(), chunks.keys().collect::<Vec<_>>());
        assert!(whole.iter().all(|(key, (calls, bytes))| chunks[key].1 == *bytes && chunks[key].0 >= *calls), "{words}: {whole:?} {chunks:?}");
        assert!(chunks.values().map(|c| c.0).sum::<u64>() > whole.values().map(|c| c.0).sum::<u64>() * 2, "{words}: {whole:?} {chunks:?}");
    }
}

/// Dots of equal sizes share one kernel for their parts.
#[test]
fn chunks_of_one_product_are_one_kernel() {
    let kernels = |words: &str| {
        let job = compiled(GPT2.0, GPT2.1, &case(words)).job;
        job.kernels.iter().filter(|k| k.family == Family::Gemm).count()
    };
    assert!(kernels("tp2 sp chunks4") <= kernels("tp2 sp") + 4);
}
