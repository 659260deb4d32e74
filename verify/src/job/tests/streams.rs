//! Streams and events: what is ordered by them, and what is not.

use super::{Job, commands, job};
use crate::Invariant;
use crate::job::verify;
use ir::program::{Action, Command, Stream};

/// The sample job with communication on streams of its own: each waits for what was computed before, and is waited
/// for.
fn streamed() -> Job {
    let mut job = job();
    for program in &mut job.programs {
        let mut next = 0;
        for body in &mut program.bodies {
            let mut list = vec![];
            for command in std::mem::take(&mut body.commands) {
                let stream = match command.action {
                    Action::Collective { .. } => Stream::Data,
                    Action::Send { .. } => Stream::Send,
                    Action::Recv { .. } => Stream::Receive,
                    _ => {
                        list.push(command);
                        continue;
                    }
                };
                let on = |stream, action| Command { stream, action, ..command.clone() };
                let (before, after) = (next, next + 1);
                next += 2;
                list.push(on(Stream::Compute, Action::Record { event: before }));
                list.push(on(stream, Action::Wait { event: before }));
                list.push(on(stream, command.action.clone()));
                list.push(on(stream, Action::Record { event: after }));
                list.push(on(Stream::Compute, Action::Wait { event: after }));
            }
            body.commands = list;
        }
    }
    job
}

#[track_caller]
fn refused(mutate: impl FnOnce(&mut Job), invariant: Invariant, expected: &str) {
    let mut mutant = streamed();
    mutate(&mut mutant);
    match verify(&mutant) {
        Ok(()) => panic!("accepted"),
        Err(e) => assert!(e.invariant == invariant && e.to_string().contains(expected), "{e}"),
    }
}

#[test]
fn communication_on_streams_of_its_own_is_accepted() {
    assert_eq!(verify(&streamed()), Ok(()));
}

#[test]
fn every_dropped_event_shows() {
    let mut accepted = vec![];
    for stage in 0..2 {
        for (b, body) in streamed().programs[stage].bodies.iter().enumerate() {
            for k in (0..body.commands.len()).filter(|k| matches!(body.commands[*k].action, Action::Record { .. } | Action::Wait { .. })) {
                let mut mutant = streamed();
                mutant.programs[stage].bodies[b].commands.remove(k);
                if verify(&mutant).is_ok() {
                    accepted.push(format!("stage {stage}, {}, command {k}", body.name));
                }
            }
        }
    }
    // These commands order what is ordered anyway: the halves of the gradients' sum follow each other on one stream,
    // and the loss is complete once the gradients are.
    let implied = |stage: usize| [3, 4, 5, 6, 17, 18].map(|k| format!("stage {stage}, reduce, command {k}"));
    assert_eq!(accepted, [implied(0), implied(1)].concat());
}

#[test]
fn a_race_names_both_commands() {
    // Without this wait, stage 1's backward pass sends a gradient that may not be computed yet.
    let hasty = |job: &mut Job| {
        let list = commands(job, 1, "backward");
        let k = list.iter().position(|c| c.stream == Stream::Send && matches!(c.action, Action::Wait { .. })).expect("a wait");
        list.remove(k);
    };
    refused(
        hasty,
        Invariant::NoRace,
        "stage 1, train, backward microbatch 0, command 2 (send of 4 f32 to -1 stages on, channel 0): \
         nothing orders it after backward, command 0 (launch of kernel 0) on stream compute, which writes the same memory",
    );
}

#[test]
fn a_race_may_be_with_an_earlier_call() {
    // Without the wait, the next forward pass may overwrite what stage 0 is still sending.
    let careless = |job: &mut Job| commands(job, 0, "forward").retain(|c| c.stream != Stream::Compute || !matches!(c.action, Action::Wait { .. }));
    refused(
        careless,
        Invariant::NoRace,
        "stage 0, train, forward microbatch 1, command 1 (launch of kernel 0): nothing orders it after forward, command 4 (send of 4 f32",
    );
}

#[test]
fn an_evaluation_may_race_with_a_step_whose_stash_it_overwrites() {
    // The receive of stage 1's evaluation then waits only for earlier evaluations, not for what the compute stream
    // did since.
    let own = |job: &mut Job| {
        let list = commands(job, 1, "eval_forward");
        let receive = list.iter().position(|c| matches!(c.action, Action::Recv { .. })).expect("a receive");
        let read = Command { stream: Stream::Compute, action: Action::Record { event: 1000 }, ..list[receive].clone() };
        list[receive - 1].action = Action::Wait { event: 1000 };
        list.push(read);
    };
    refused(
        own,
        Invariant::NoRace,
        "stage 1, eval, eval_forward microbatch 0, command 2 (recv of 4 f32 from -1 stages on, channel 0): \
         nothing orders it after what stream compute does in an earlier phase, which reads the same memory",
    );
    let mut apart = streamed();
    own(&mut apart);
    apart.stages[1].schedule.slots[0].at += 64;
    assert_eq!(verify(&apart), Ok(()));
}

#[test]
fn kernels_run_on_the_compute_stream() {
    let astray = |job: &mut Job| commands(job, 0, "update")[0].stream = Stream::Data;
    refused(astray, Invariant::OwnStream, "stage 0, update, command 0 (launch of kernel 4): it is on stream data");
}

#[test]
fn a_group_has_one_stream() {
    let split = |job: &mut Job| {
        let list = commands(job, 0, "eval_reduce");
        list.iter_mut().filter(|c| c.stream == Stream::Data).for_each(|c| c.stream = Stream::Tensor);
    };
    refused(split, Invariant::OneStream, "it is on stream tensor, others like it on data");
}

#[test]
fn an_event_has_one_stream() {
    let twice = |job: &mut Job| {
        let mut record = commands(job, 0, "forward").iter().find(|c| matches!(c.action, Action::Record { .. })).expect("a record").clone();
        record.stream = Stream::Data;
        commands(job, 0, "forward").push(record);
    };
    refused(twice, Invariant::OneStream, "it is on stream data, others like it on compute");
}

#[test]
fn a_long_schedule_costs_what_its_first_rounds_do() {
    let mut job = streamed();
    let (m, calls) = (100_000u32, |body: u32, microbatch: u32| ir::program::Call::whole(ir::program::BodyId(body), microbatch));
    let schedule = &mut job.stages[1].schedule;
    schedule.train = [calls(0, 0)].into_iter().chain((0..m).flat_map(|k| [calls(1, k), calls(2, k)])).chain([calls(3, 0)]).collect();
    schedule.eval = [calls(5, 0)].into_iter().chain((0..m).map(|k| calls(6, k))).chain([calls(7, 0)]).collect();
    let distinct = crate::job::races::distinct_calls(&job, 1);
    assert!(distinct < 1000, "{distinct} calls were looked at");
}
