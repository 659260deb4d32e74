//! Memory: buffers at rest, and what calls leave in them.

use super::*;

#[test]
fn buffers_lie_in_their_arena() {
    refused(
        |job| job.programs[1].arena_bytes[2] = 64,
        Invariant::BufferInArena,
        "stage 1, buffer `dy`: it does not lie within the temporary arena's 64 bytes",
    );
    refused(|job| buffer(job, 0, "dw").offset = 130, Invariant::BufferAligned, "its offset 130 is not a multiple of 64");
}

#[test]
fn persistent_buffers_lie_apart() {
    refused(|job| buffer(job, 0, "g").offset = 0, Invariant::LastingApart, "buffer `g`: it overlaps buffer `w`");
}

#[test]
fn temporary_buffers_in_use_lie_apart() {
    refused(
        |job| buffer(job, 0, "norm").offset = buffer(job, 0, "n").offset,
        Invariant::TemporaryApart,
        "stage 0, reduce, command 3: buffers `n` and `norm`, both in use, overlap",
    );
}

#[test]
fn temporary_buffers_share_memory_one_after_the_other() {
    let mut shared = job();
    buffer(&mut shared, 0, "total").offset = buffer(&mut shared, 0, "n").offset;
    assert_eq!(verify(&shared), Ok(()));
}

#[test]
fn the_stash_has_a_slot_for_each_microbatch_in_flight() {
    let lost =
        "stage 0, train, backward microbatch 0, command 1 (launch of kernel 1): the stash's slot holds microbatch 1, not buffer `x` of this one";
    refused(|job| job.stages[0].schedule.slots[0].count = 1, Invariant::StashOwner, lost);
    refused(|job| job.stages[0].schedule.slots[0].count = 0, Invariant::StashSlots, "a stash has no slot");
    refused(|job| job.stages[0].schedule.slots[0].count = 3, Invariant::StashSlots, "3 slots for 2 microbatches");
    refused(|job| job.stages[0].schedule.slots.push(Slots { count: 1, at: 0 }), Invariant::StashSlots, "numbers of slots for 2 of 1 stashes");
}

#[test]
fn an_evaluation_has_its_temporary_buffers_where_steps_have_their_stash() {
    let sound = job();
    assert_eq!(buffer(&mut job(), 0, "ex").offset, sound.stages[0].schedule.slots[0].at);
    let during =
        |job: &mut Job| job.stages[0].schedule.train.splice(3..3, [0, 1].map(|microbatch| Call::whole(BodyId(6), microbatch))).for_each(drop);
    refused(during, Invariant::StashFromTemporary, "stage 0, train, eval_forward, command 0: buffer `ex` lies in stash 0, both in use");
}

#[test]
fn nothing_lies_on_a_stash_in_use() {
    refused(
        |job| job.stages[0].schedule.slots[0].at = 0,
        Invariant::StashFromTemporary,
        "stage 0, train, forward, command 1: buffer `y` lies in stash 0, both in use",
    );
    refused(|job| job.stages[0].schedule.slots[0].at += 4, Invariant::StashAligned, "a stash begins at 388, not a multiple of 64");
    refused(|job| job.stages[0].schedule.slots[0].at = 1 << 60, Invariant::TemporarySize, "temporary memory has");
    // `y`, which stage 0 sends, gets a stash of its own. It is in use only within forward bodies.
    let sent = |at: u64| {
        move |job: &mut Job| {
            let y = buffer(job, 0, "y");
            (y.arena, y.offset) = (Arena::Stash, 64);
            job.programs[0].arena_bytes[1] += 64;
            job.programs[0].stashes.push(Stash { bytes: 64, ..Stash::default() });
            job.stages[0].schedule.slots.push(Slots { count: 1, at });
        }
    };
    refused(sent(448), Invariant::StashesApart, "stage 0, train, forward, command 1: stashes 0 and 1, both in use, overlap");
    // At 320 lies `total`, which no forward body uses, and at 512 lies nothing.
    for at in [320, 512] {
        let mut apart = job();
        sent(at)(&mut apart);
        assert_eq!(verify(&apart), Ok(()));
    }
}

#[test]
fn what_lives_over_steps_is_persistent() {
    let stashed = |job: &mut Job| {
        let w = buffer(job, 0, "w");
        (w.arena, w.offset) = (Arena::Stash, 64);
        job.programs[0].arena_bytes[1] += 64;
        job.programs[0].stashes[0].bytes += 64;
    };
    refused(stashed, Invariant::HeldLasts, "buffer `w`: it lives over steps outside of an arena that does");
}

#[test]
fn temporary_buffers_are_written_before_they_are_read() {
    refused(
        drop_command(0, "forward", 1),
        Invariant::ReadBeforeWrite,
        "stage 0, forward, command 1 (send of 4 f32 to 1 stages on, channel 0): it reads buffer `y` before that is written",
    );
    refused(swap_commands(0, "reduce", 3), Invariant::ReadBeforeWrite, "command 3 (report 1): it reads buffer `norm` before that is written");
}

#[test]
fn what_is_written_in_part_is_not_read_as_a_whole() {
    refused(set_count(0, "reduce", 1, 1), Invariant::ReadWhole, "it reads buffer `g`, of which only a part is written");
    refused(
        set_count(0, "reduce", 0, 1),
        Invariant::ReadBeforeWrite,
        "(all_gather of 2 f32 in group 0): it reads buffer `gs` before that is written",
    );
}

#[test]
fn nothing_is_written_twice_in_a_call() {
    let twice = |job: &mut Job| {
        let load = commands(job, 0, "forward")[0].clone();
        commands(job, 0, "forward").insert(1, load);
    };
    refused(twice, Invariant::WrittenOnce, "command 1 (load of input 0): it writes what was already written of buffer `x`");
}

#[test]
fn a_sum_is_set_to_zero_by_one_call_before_additions() {
    refused(
        drop_command(0, "zero", 0),
        Invariant::SumFilled,
        "stage 0, step, backward, command 1 (launch of kernel 1): it adds to `dw` before that is set to zero",
    );
    refused(|job| job.stages[0].schedule.train[..4].rotate_left(1), Invariant::SumFilled, "it adds to `dw` before that is set to zero");
    let one = |job: &mut Job| match &mut commands(job, 0, "zero")[0].action {
        Action::Fill { value, .. } => *value = Real(1.0),
        other => panic!("{other:?}"),
    };
    refused(one, Invariant::SumFromZero, "the sum `dw` begins at 1.0");
}

#[test]
fn a_sum_is_zeroed_once_per_step() {
    let again = |job: &mut Job| {
        let zero = commands(job, 0, "zero")[0].clone();
        commands(job, 0, "forward").push(zero);
    };
    refused(again, Invariant::MadeOnce, "more than one call writes `dw`, which does not belong to a microbatch");
}

#[test]
fn a_sum_is_read_after_its_last_addition() {
    refused(|job| job.stages[0].schedule.train.swap(4, 5), Invariant::SumComplete, "it reads the sum `dw` before its last addition");
}

#[test]
fn a_sum_has_additions_once_per_call() {
    refused(drop_command(1, "backward", 2), Invariant::SumOfSomething, "it reads the sum `dw`, to which nothing is added");
    let twice = |job: &mut Job| {
        let add = commands(job, 1, "backward")[2].clone();
        commands(job, 1, "backward").push(add);
    };
    refused(twice, Invariant::AddedOnce, "it adds to buffer `dw` a second time");
}

#[test]
fn parameters_and_states_change_in_an_update_once() {
    refused(|job| job.stages[0].schedule.train.push(Call::whole(BodyId(4), 0)), Invariant::CallPhase, "`update` is not of this phase");
    refused(|job| job.stages[0].schedule.update.push(Call::whole(BodyId(4), 0)), Invariant::CalledOnce, "`update` is called for microbatch 0 again");
    refused(|job| job.stages[0].schedule.update.clear(), Invariant::BodyCalled, "body `update` is never called");
    refused(drop_command(0, "update", 0), Invariant::StatesRenewed, "no call updates `w`");
    let early = |job: &mut Job| {
        let product = commands(job, 0, "forward")[1].clone();
        commands(job, 0, "forward").push(product);
        edit_launch(0, "forward", 3, |_, args, _| args[2] = args[1].clone())(job);
    };
    refused(early, Invariant::HeldInUpdate, "it writes `w` outside of an update");
}
