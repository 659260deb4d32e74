//! Exchanges one by one: turns of sends.

use super::*;
use ir::program::SendTurn;

fn after(send: u32, after: u32) -> SendTurn {
    SendTurn { send, after, grouped: false }
}

fn with(send: u32, after: u32) -> SendTurn {
    SendTurn { send, after, grouped: true }
}

/// Stage 0 sends two microbatches on before it receives the first gradient; an evaluation sends two on.
fn serial(job: &mut Job) {
    let evaluation = vec![after(0, 0), after(1, 0)];
    job.stages[0].schedule.sends = [vec![after(0, 0), after(1, 1)], vec![], evaluation];
    job.stages[1].schedule.sends[0] = vec![after(0, 1), after(1, 2)];
}

/// Turns of training, refused.
#[track_caller]
fn refused_turns(stage: usize, turns: &[SendTurn], invariant: Invariant, expected: &str) {
    refused(
        |job| {
            serial(job);
            job.stages[stage].schedule.sends[0] = turns.to_vec();
        },
        invariant,
        expected,
    );
}

#[track_caller]
fn accepted(stages: [&[SendTurn]; 2]) {
    let mut job = job();
    serial(&mut job);
    job.in_flight = 2;
    (0..2).for_each(|s| job.stages[s].schedule.sends[0] = stages[s].to_vec());
    assert_eq!(verify(&job), Ok(()));
}

#[test]
fn sends_go_out_when_the_other_end_comes_to_them() {
    accepted([&[after(0, 0), after(1, 1)], &[after(0, 1), after(1, 2)]]);
    // The second send goes out while the first gradient comes back.
    accepted([&[after(0, 0), with(1, 0)], &[with(0, 1), after(1, 2)]]);
    accepted([&[after(0, 0), with(1, 0)], &[after(0, 1), after(1, 2)]]);
}

#[test]
fn who_sends_first_on_both_ends_waits_forever() {
    let mut job = job();
    serial(&mut job);
    job.in_flight = 2;
    job.stages[0].schedule.sends[0] = vec![after(0, 0), after(1, 0)];
    let said = verify(&job).unwrap_err();
    assert_eq!(said.invariant, Invariant::NoSerialDeadlock);
    assert!(said.to_string().contains("stage 0, train: one by one it waits forever"), "{said}");
}

#[test]
fn a_send_that_waits_for_what_follows_from_it_is_a_deadlock() {
    refused_turns(0, &[after(0, 1), after(1, 1)], Invariant::NoSerialDeadlock, "it waits forever");
    refused_turns(1, &[after(0, 2), after(1, 2)], Invariant::NoSerialDeadlock, "it waits forever");
}

#[test]
fn each_send_has_one_turn() {
    refused_turns(0, &[after(0, 0)], Invariant::SendTurns, "stage 0, train: send 1 of 2 has no turn");
    refused_turns(0, &[after(0, 0), after(0, 1)], Invariant::SendTurns, "send 0 of 2 has a turn");
    refused_turns(0, &[after(0, 0), after(1, 1), after(2, 1)], Invariant::SendTurns, "send 2 of 2 has a turn");
    refused_turns(0, &[after(1, 0), after(0, 1)], Invariant::SendTurns, "send 0 goes out after send 1 on its way");
    refused(
        |job| {
            serial(job);
            job.stages[0].schedule.sends[2].clear();
        },
        Invariant::SendTurns,
        "stage 0, eval: send 0 of 2 has no turn",
    );
}

#[test]
fn what_goes_out_was_issued() {
    refused_turns(1, &[after(0, 0), after(1, 2)], Invariant::SendIssued, "send 0 goes out after 0 other exchanges, when it has not been issued");
    refused_turns(1, &[with(0, 0), after(1, 2)], Invariant::SendIssued, "send 0 goes out after 0 other exchanges");
    refused_turns(0, &[after(0, 0), after(1, 9)], Invariant::NoSerialDeadlock, "it waits forever");
}

#[test]
fn what_a_send_is_at_once_with_is_a_receive() {
    let evaluated = |job: &mut Job| {
        serial(job);
        job.stages[0].schedule.sends[2][1].grouped = true;
    };
    refused(evaluated, Invariant::SendGroup, "stage 0, eval: send 1 is at once with no receive");
    refused_turns(1, &[after(0, 1), with(1, 2)], Invariant::SendGroup, "send 1 is at once with no receive");
}

#[test]
fn a_copy_waits_for_a_slot() {
    // With room for one message, stage 0 does not come to its receive before the first message went out.
    let mut job = job();
    serial(&mut job);
    job.stages[0].schedule.sends[0] = vec![after(0, 0), with(1, 0)];
    job.stages[1].schedule.sends[0] = vec![with(0, 1), after(1, 2)];
    assert_eq!(verify(&job), Ok(()));
    job.stages[0].schedule.sends[0] = vec![with(0, 0), with(1, 0)];
    assert_eq!(verify(&job).map_err(|e| e.invariant), Err(Invariant::NoSerialDeadlock));
}
