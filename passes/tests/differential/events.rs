//! Streams without an event, or with a command on another one: what can come to another result or wait forever is refused.

use crate::generate::triple;
use crate::harness::{Case, Data, compiled, interleaved, models, options};
use crate::models::{GPT2, LLAMA, case};
use crate::random::number;
use frontend::Models;
use ir::program::{Action, Job, Stream};
use passes::compile::{Compiled, compile};
use std::collections::BTreeMap;
use std::sync::LazyLock;
use verify::Invariant;
use verify::job::verify;

static SAMPLES: LazyLock<Vec<(Compiled, Case)>> = LazyLock::new(samples);

fn samples() -> Vec<(Compiled, Case)> {
    let named = [(GPT2, "dp2 tp2 pp2 sp m3"), (LLAMA, "tp2 pp2 m3 gpipe"), (GPT2, "dp2 m2 zero3")];
    let mut out: Vec<(Compiled, Case)> = vec![];
    for (model, words) in named {
        let case = Case { data: Data::Exact, ..case(words) };
        out.push((compiled(model.0, model.1, &case), case));
    }
    for seed in 0..6 {
        let random = triple(seed);
        let Models { training, evaluation, .. } = models(&random.text, &[], &random.case).unwrap_or_else(|e| panic!("{e}"));
        out.extend(compile(training, evaluation, &options(&random.case)).ok().map(|c| (c, random.case)));
    }
    out
}

/// Mutants of every sample by `mutate`, which changes one command if it applies; each is refused, or gives the same results in every
/// interleaving that is tried.
fn all_are_refused_or_harmless(reasons: &[Invariant], mutate: impl Fn(&mut Job, usize, usize, usize) -> bool) {
    let (mut refused, mut harmless) = (BTreeMap::<Invariant, u32>::new(), 0);
    // Only some mutants of each sample are tried; with `MUTANTS` (`make test-long-mutants`) more.
    let most = if number("MUTANTS", 0) > 0 { 40 } else { 10 };
    for (compiled, case) in &*SAMPLES {
        let job = &compiled.job;
        let mut sites = vec![];
        for (p, program) in job.programs.iter().enumerate() {
            sites.extend(program.bodies.iter().enumerate().flat_map(|(b, body)| (0..body.commands.len()).map(move |k| (p, b, k))));
        }
        let mutants = sites.into_iter().filter_map(|(p, b, k)| {
            let mut mutant = job.clone();
            mutate(&mut mutant, p, b, k).then_some(((p, b, k), mutant))
        });
        let mutants: Vec<_> = mutants.collect();
        for ((p, b, k), mutant) in mutants.iter().step_by(mutants.len() / most + 1) {
            if let Err(violation) = verify(mutant) {
                *refused.entry(violation.invariant).or_default() += 1;
                continue;
            }
            harmless += 1;
            if let Err(e) = interleaved(compiled, mutant, case, 6) {
                let body = &job.programs[*p].bodies[*b];
                panic!("accepted, but {e}: program {p}, {}, command {k} of {case:?}: {:?}", body.name, body.commands[*k]);
            }
        }
    }
    let all: u32 = refused.values().sum();
    println!("{refused:?} refused, {harmless} harmless");
    assert!(all > most as u32, "{all} refused, {harmless} harmless");
    // Only the given invariants may refuse mutants.
    assert_eq!(refused.keys().copied().collect::<Vec<_>>(), reasons);
}

#[test]
fn a_dropped_event_is_refused_or_harmless() {
    all_are_refused_or_harmless(&[Invariant::NoRace], |job, p, b, k| {
        let commands = &mut job.programs[p].bodies[b].commands;
        let event = matches!(commands[k].action, Action::Record { .. } | Action::Wait { .. });
        commands.remove(k);
        event
    });
}

#[test]
fn a_command_on_another_stream_is_refused_or_harmless() {
    all_are_refused_or_harmless(&[Invariant::OwnStream, Invariant::OneStream, Invariant::NoRace], |job, p, b, k| {
        let command = &mut job.programs[p].bodies[b].commands[k];
        let next = (command.stream as usize + 1) % Stream::ALL.len();
        let moved = command.stream != Stream::Compute;
        command.stream = Stream::ALL[next];
        moved
    });
}

#[test]
fn a_record_before_its_command_is_refused_or_harmless() {
    all_are_refused_or_harmless(&[Invariant::NoRace], |job, p, b, k| {
        let commands = &mut job.programs[p].bodies[b].commands;
        let late = k > 0 && matches!(commands[k].action, Action::Record { .. }) && commands[k - 1].stream == commands[k].stream;
        if late {
            commands.swap(k - 1, k);
        }
        late
    });
}
