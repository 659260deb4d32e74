//! A job that is right, and what each mutation of it breaks.

mod lemma;
mod sample;
mod streams;

use super::{least_in_flight, verify};
use ir::dim::Base;
use ir::mesh::SubAxis;
use ir::op::{Channel, Collective, DType, Real, Reduce, Scalar};
use ir::program::{Action, Arena, BodyId, Buffer, Call, Command, Content, GroupId, Job, KernelId, Place, Slots};
use sample::{MUL, UPDATE, job};

#[test]
fn a_sound_job_is_accepted() {
    assert_eq!(verify(&job()), Ok(()));
}

/// The mutated job is refused, with this in the error's text.
#[track_caller]
fn refused(mutate: impl FnOnce(&mut Job), expected: &str) {
    let mut mutant = job();
    mutate(&mut mutant);
    assert_ne!(mutant, job(), "nothing was mutated");
    match verify(&mutant) {
        Ok(()) => panic!("accepted"),
        Err(e) => assert!(e.to_string().contains(expected), "{e}"),
    }
}

fn commands<'a>(job: &'a mut Job, stage: usize, body: &str) -> &'a mut Vec<Command> {
    let body = job.programs[stage].bodies.iter_mut().find(|b| b.name == body).expect("a body");
    &mut body.commands
}

fn buffer<'a>(job: &'a mut Job, stage: usize, name: &str) -> &'a mut Buffer {
    job.programs[stage].buffers.iter_mut().find(|b| b.name == name).expect("a buffer")
}

fn drop_command(stage: usize, body: &'static str, k: usize) -> impl FnOnce(&mut Job) {
    move |job| drop(commands(job, stage, body).remove(k))
}

fn swap_commands(stage: usize, body: &'static str, k: usize) -> impl FnOnce(&mut Job) {
    move |job| commands(job, stage, body).swap(k, k + 1)
}

fn set_count(stage: usize, body: &'static str, k: usize, to: u64) -> impl FnOnce(&mut Job) {
    move |job| match &mut commands(job, stage, body)[k].action {
        Action::Collective { count, .. } | Action::Send { count, .. } | Action::Recv { count, .. } => *count = to,
        other => panic!("{other:?}"),
    }
}

fn set_group(stage: usize, body: &'static str, k: usize, to: u32) -> impl FnOnce(&mut Job) {
    move |job| match &mut commands(job, stage, body)[k].action {
        Action::Collective { group, .. } => *group = GroupId(to),
        other => panic!("{other:?}"),
    }
}

fn edit_launch(
    stage: usize,
    body: &'static str,
    k: usize,
    edit: impl FnOnce(&mut KernelId, &mut Vec<Place>, &mut Vec<Scalar>),
) -> impl FnOnce(&mut Job) {
    move |job| match &mut commands(job, stage, body)[k].action {
        Action::Launch { kernel, args, scalars } => edit(kernel, args, scalars),
        other => panic!("{other:?}"),
    }
}

// Operands.

#[test]
fn a_launch_passes_as_many_places_as_its_kernel_has_operands() {
    refused(
        edit_launch(0, "forward", 1, |_, args, _| drop(args.pop())),
        "stage 0, forward, command 1 (launch of kernel 0): 2 places for the kernel's 3 operands",
    );
}

#[test]
fn a_launch_passes_the_kernels_scalars() {
    refused(edit_launch(0, "update", 0, |_, _, scalars| scalars.clear()), "0 scalars, the kernel has 1");
    refused(edit_launch(0, "update", 0, |_, _, scalars| scalars[0] = Scalar::Step), "scalar 0 is not f32");
    refused(edit_launch(0, "update", 0, |_, _, scalars| scalars[0] = Scalar::Slot(0)), "scalar 0 is not f32");
}

#[test]
fn an_operand_stays_in_its_buffer_at_all_coordinates() {
    refused(edit_launch(0, "forward", 1, |_, args, _| args[1].offset = 1), "it reaches element 4 of buffer `w`, which has 4");
    refused(edit_launch(0, "forward", 1, |_, args, _| args[1].coords = vec![(SubAxis(2), 1)]), "it reaches element 4 of buffer `w`, which has 4");
    refused(edit_launch(0, "forward", 1, |_, args, _| args[1].coords = vec![(SubAxis(9), 1)]), "names no axis");
}

#[test]
fn operands_have_the_kernels_dtypes() {
    refused(|job| buffer(job, 0, "dy").dtype = DType::I32, "buffer `dy` is i32, not f32");
}

#[test]
fn a_shrunk_buffer_is_too_small() {
    refused(|job| buffer(job, 0, "y").dims[0].1 = 2, "it reaches element 3 of buffer `y`, which has 2");
}

#[test]
fn another_kernel_does_not_fit() {
    refused(edit_launch(1, "forward", 1, |kernel, _, _| *kernel = UPDATE), "3 places for the kernel's 5 operands");
    refused(edit_launch(1, "forward", 1, |kernel, _, _| *kernel = KernelId(99)), "there is no kernel 99");
}

#[test]
fn outputs_lie_apart_from_each_other() {
    refused(edit_launch(0, "update", 0, |_, args, _| args[4] = args[3].clone()), "output 1 overlaps operand 3 in buffer `w`");
}

#[test]
fn only_a_pointwise_result_takes_the_place_of_its_operand() {
    let by_sum = |job: &mut Job| {
        job.kernels[MUL.index()] = sample::product_with_sum();
        edit_launch(0, "forward", 1, |_, args, _| args[2] = args[1].clone())(job);
    };
    refused(by_sum, "output 0 overlaps operand 1 in buffer `w`");
}

#[test]
fn where_a_command_writes_does_not_depend_on_coordinates() {
    let split = |job: &mut Job| {
        buffer(job, 0, "y").dims[0].1 = 8;
        edit_launch(0, "forward", 1, |_, args, _| args[2].coords = vec![(SubAxis(2), 4)])(job);
    };
    refused(split, "where it writes in buffer `y` depends on coordinates");
}

#[test]
fn parts_of_an_input_make_it_up() {
    let shift = |job: &mut Job| match &mut commands(job, 0, "forward")[0].action {
        Action::Load { index, .. } => index[0].base = Base::Coords(vec![(SubAxis(0), 8), (SubAxis(2), 8)]),
        other => panic!("{other:?}"),
    };
    refused(shift, "the parts of dim `n` do not make up its 16 elements");
}

#[test]
fn parts_of_a_parameter_make_it_up() {
    let at = |base: Base| {
        move |job: &mut Job| match &mut buffer(job, 0, "w").content {
            Content::Param { index, .. } => index[0].base = base,
            other => panic!("{other:?}"),
        }
    };
    refused(at(Base::Coords(vec![(SubAxis(2), 4)])), "stage 0: buffer `w`: the parts of dim `n` do not make up its 4 elements");
    refused(at(Base::Coords(vec![(SubAxis(0), 4)])), "dim `n` cannot be split over `mb` here");
    refused(at(Base::Slot(0)), "begins at a kernel's scalar");
}

#[test]
fn every_parameter_slot_is_filled_and_held() {
    refused(|job| job.stages[1].params.clear(), "nothing fills parameter slot 0");
    refused(|job| job.stages[1].params.push(0), "no buffer holds parameter slot 1");
    refused(|job| job.stages[1].params[0] = 7, "there is no parameter 7");
    refused(|job| job.stages[1].params[0] = 0, "job: no stage has parameter `w1`");
}

// Memory.

#[test]
fn buffers_lie_in_their_arena() {
    refused(|job| job.programs[1].arena_bytes[2] = 64, "stage 1: buffer `dy`: it does not lie within the temporary arena's 64 bytes");
    refused(|job| buffer(job, 0, "dw").offset = 130, "its offset 130 is not a multiple of 64");
}

#[test]
fn persistent_buffers_lie_apart() {
    refused(|job| buffer(job, 0, "g").offset = 0, "buffer `g`: it overlaps buffer `w`");
}

#[test]
fn temporary_buffers_in_use_lie_apart() {
    refused(
        |job| buffer(job, 0, "norm").offset = buffer(job, 0, "n").offset,
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
    refused(|job| job.stages[0].schedule.slots[0].count = 1, lost);
    refused(|job| job.stages[0].schedule.slots[0].count = 0, "a stash has no slot");
    refused(|job| job.stages[0].schedule.slots[0].count = 3, "3 slots for 2 microbatches");
    refused(|job| job.stages[0].schedule.slots.push(Slots { count: 1, at: 0 }), "numbers of slots for 2 of 1 stashes");
}

#[test]
fn an_evaluation_has_its_temporary_buffers_where_steps_have_their_stash() {
    let sound = job();
    assert_eq!(buffer(&mut job(), 0, "ex").offset, sound.stages[0].schedule.slots[0].at);
    let during =
        |job: &mut Job| job.stages[0].schedule.train.splice(3..3, [0, 1].map(|microbatch| Call { body: BodyId(6), microbatch })).for_each(drop);
    refused(during, "stage 0, train, eval_forward: its temporary buffers end at 400, stash 0, which is in use, begins at 384");
}

#[test]
fn nothing_lies_on_a_stash_in_use() {
    refused(
        |job| job.stages[0].schedule.slots[0].at = 0,
        "stage 0, train, forward: its temporary buffers end at 16, stash 0, which is in use, begins at 0",
    );
    refused(|job| job.stages[0].schedule.slots[0].at += 4, "a stash begins at 388, not a multiple of 64");
    refused(|job| job.stages[0].schedule.slots[0].at = 1 << 60, "temporary memory has");
    // What stage 0 sends, in a stash of its own: from forward to forward.
    let sent = |at: u64| {
        move |job: &mut Job| {
            let y = buffer(job, 0, "y");
            (y.arena, y.offset) = (Arena::Stash, 64);
            job.programs[0].arena_bytes[1] += 64;
            job.programs[0].stashes.push(64);
            job.stages[0].schedule.slots.push(Slots { count: 1, at });
        }
    };
    refused(sent(448), "stage 0, train: stashes 0 and 1, both in use, overlap");
    refused(sent(320), "stage 0, eval, eval_forward: its temporary buffers end at 400, stash 1, which is in use, begins at 320");
    let mut apart = job();
    sent(512)(&mut apart);
    assert_eq!(verify(&apart), Ok(()));
}

#[test]
fn what_lives_over_steps_is_persistent() {
    let stashed = |job: &mut Job| {
        let w = buffer(job, 0, "w");
        (w.arena, w.offset) = (Arena::Stash, 64);
        job.programs[0].arena_bytes[1] += 64;
        job.programs[0].stashes[0] += 64;
    };
    refused(stashed, "buffer `w`: it lives over steps outside of an arena that does");
}

#[test]
fn temporary_buffers_are_written_before_they_are_read() {
    refused(
        drop_command(0, "forward", 1),
        "stage 0, forward, command 1 (send of 4 f32 to 1 stages on, channel 0): it reads buffer `y` before that is written",
    );
    refused(swap_commands(0, "reduce", 3), "command 3 (report 1): it reads buffer `norm` before that is written");
}

#[test]
fn what_is_written_in_part_is_not_read_as_a_whole() {
    refused(set_count(0, "reduce", 1, 1), "it reads buffer `g`, of which only a part is written");
    refused(set_count(0, "reduce", 0, 1), "(all_gather of 2 f32 in group 0): it reads buffer `gs` before that is written");
}

#[test]
fn nothing_is_written_twice_in_a_call() {
    let twice = |job: &mut Job| {
        let load = commands(job, 0, "forward")[0].clone();
        commands(job, 0, "forward").insert(1, load);
    };
    refused(twice, "command 1 (load of input 0): it writes what was already written of buffer `x`");
}

#[test]
fn a_sum_is_set_to_zero_by_one_call_before_additions() {
    refused(drop_command(0, "zero", 0), "stage 0, step, backward, command 1 (launch of kernel 1): it adds to `dw` before that is set to zero");
    refused(|job| job.stages[0].schedule.train[..4].rotate_left(1), "it adds to `dw` before that is set to zero");
    let one = |job: &mut Job| match &mut commands(job, 0, "zero")[0].action {
        Action::Fill { value, .. } => *value = Real(1.0),
        other => panic!("{other:?}"),
    };
    refused(one, "the sum `dw` begins at 1.0");
}

#[test]
fn a_sum_is_zeroed_once_per_step() {
    let again = |job: &mut Job| {
        let zero = commands(job, 0, "zero")[0].clone();
        commands(job, 0, "forward").push(zero);
    };
    refused(again, "more than one call writes `dw`, which does not belong to a microbatch");
}

#[test]
fn a_sum_is_read_after_its_last_addition() {
    refused(|job| job.stages[0].schedule.train.swap(4, 5), "it reads the sum `dw` before its last addition");
}

#[test]
fn a_sum_has_additions_once_per_call() {
    refused(drop_command(1, "backward", 2), "it reads the sum `dw`, to which nothing is added");
    let twice = |job: &mut Job| {
        let add = commands(job, 1, "backward")[2].clone();
        commands(job, 1, "backward").push(add);
    };
    refused(twice, "it adds to buffer `dw` a second time");
}

#[test]
fn parameters_and_states_change_in_an_update_once() {
    refused(|job| job.stages[0].schedule.train.push(Call { body: BodyId(4), microbatch: 0 }), "`update` is not of this phase");
    refused(|job| job.stages[0].schedule.update.push(Call { body: BodyId(4), microbatch: 0 }), "`update` is called for microbatch 0 again");
    refused(|job| job.stages[0].schedule.update.clear(), "body `update` is never called");
    refused(drop_command(0, "update", 0), "no call updates `w`");
    let early = |job: &mut Job| {
        let product = commands(job, 0, "forward")[1].clone();
        commands(job, 0, "forward").push(product);
        edit_launch(0, "forward", 3, |_, args, _| args[2] = args[1].clone())(job);
    };
    refused(early, "it writes `w` outside of an update");
}

// Calls.

#[test]
fn every_microbatch_has_its_passes() {
    refused(|job| _ = job.stages[0].schedule.train.remove(2), "comes before the forward pass of microbatch 1");
    refused(|job| _ = job.stages[0].schedule.train.remove(3), "stage 0, train: `backward` is called for 1 of 2 microbatches");
    refused(|job| job.stages[0].schedule.train[2].microbatch = 0, "call 2: `forward` is called for microbatch 0 again");
    refused(|job| job.stages[0].schedule.train[2].microbatch = 9, "there is no microbatch 9");
    refused(|job| job.stages[0].schedule.train[2].body = BodyId(9), "there is no body 9");
    refused(|job| job.stages[1].schedule.train.swap(1, 2), "call 1: `backward` comes before the forward pass of microbatch 0");
}

#[test]
fn reports_are_issued_once() {
    refused(drop_command(1, "reduce", 6), "stage 1, train: `loss` is not reported");
    refused(drop_command(1, "eval_reduce", 1), "stage 1, eval: `loss` is not reported");
    let again = |job: &mut Job| {
        let report = commands(job, 1, "reduce")[6].clone();
        commands(job, 1, "reduce").push(report);
    };
    refused(again, "`loss` is reported again");
    let unlike = |job: &mut Job| {
        let mut norm = commands(job, 1, "eval_reduce")[1].clone();
        match &mut norm.action {
            Action::Report { report, .. } => *report = 1,
            other => panic!("{other:?}"),
        }
        commands(job, 1, "eval_reduce").push(norm);
    };
    refused(unlike, "stage 1: its evaluation reports other numbers than stage 0's");
}

#[test]
fn a_wait_for_what_was_never_recorded_does_not_hold() {
    let mut ordered = job();
    let wait = Command { action: Action::Wait { event: 3 }, ..commands(&mut ordered, 0, "forward")[0].clone() };
    commands(&mut ordered, 0, "forward").insert(1, wait);
    assert_eq!(verify(&ordered), Ok(()));
}

// Communication.

#[test]
fn groups_name_ranks_that_exist_once() {
    refused(|job| job.programs[0].groups[0].subs.push(SubAxis(2)), "stage 0: group 0: axis 2 occurs twice");
    refused(|job| job.programs[0].groups[0].subs[0] = SubAxis(1), "axis 1 does not tell ranks of a stage apart");
    refused(|job| job.programs[0].groups[0].subs[0] = SubAxis(9), "axis 9 does not tell ranks of a stage apart");
    refused(|job| job.programs[0].groups[1].stages = Some(vec![1]), "stages [1] do not include this one");
    refused(|job| job.programs[0].groups[1].stages = Some(vec![0, 1, 2]), "stages [0, 1, 2] do not all exist");
}

#[test]
fn members_of_a_group_agree_on_its_members() {
    refused(
        set_group(1, "reduce", 3, 2),
        "stage 0, train, reduce microbatch 0, command 3 (all_reduce of 1 f32 in group 1): it waits forever, for stage 1, train, reduce microbatch 0, command 3 (all_reduce of 1 f32 in group 2)",
    );
    refused(|job| job.programs[1].groups[2].subs.clear(), "it waits forever");
}

#[test]
fn a_group_of_another_size_does_not_fit_the_buffers() {
    refused(set_group(0, "reduce", 1, 2), "it reaches element 7 of buffer `g`, which has 4");
    refused(set_group(0, "reduce", 0, 2), "it reaches element 7 of buffer `dw`, which has 4");
}

#[test]
fn members_of_a_group_agree_on_what_they_exchange() {
    let most = |job: &mut Job| match &mut commands(job, 1, "reduce")[3].action {
        Action::Collective { kind, .. } => *kind = Collective::AllReduce(Reduce::Max),
        other => panic!("{other:?}"),
    };
    refused(most, "stage 0, train, reduce microbatch 0, command 3 (all_reduce of 1 f32 in group 1): another member of the group has come to stage 1");
    let any = |job: &mut Job| match &mut commands(job, 1, "reduce")[3].action {
        Action::Collective { kind, .. } => *kind = Collective::AllReduce(Reduce::Any),
        other => panic!("{other:?}"),
    };
    refused(any, "a reduction `any` of f32");
}

#[test]
fn members_of_a_group_issue_collectives_in_one_order() {
    let early = |job: &mut Job| {
        let loss: Vec<Command> = commands(job, 1, "reduce").drain(5..).collect();
        commands(job, 1, "reduce").splice(3..3, loss);
    };
    refused(early, "it waits forever");
    refused(drop_command(1, "eval_reduce", 0), "before that is written");
}

#[test]
fn every_send_meets_its_receive() {
    refused(
        drop_command(1, "backward", 1),
        "stage 0, train, backward microbatch 0, command 0 (recv of 4 f32 from 1 stages on, channel 0): it waits forever, for stage 1, train",
    );
    refused(drop_command(0, "backward", 0), "before that is written");
    refused(
        set_count(0, "forward", 2, 2),
        "stage 1, train, forward microbatch 0, command 0 (recv of 4 f32 from -1 stages on, channel 0): stage 0 sends 2 f32",
    );
    let hops = |to: i64| {
        move |job: &mut Job| match &mut commands(job, 1, "backward")[1].action {
            Action::Send { hops, .. } => *hops = to,
            other => panic!("{other:?}"),
        }
    };
    refused(hops(1), "stage 1, train, backward microbatch 0, command 1 (send of 4 f32 to 1 stages on, channel 0): there is no stage 1 further on");
    refused(hops(0), "there is no stage 0 further on");
    refused(|job| job.stages[0].schedule.train[1..3].reverse(), "stage 0 sends what it has of microbatch 1");
}

#[test]
fn every_message_is_received() {
    let again = |job: &mut Job| {
        let send = commands(job, 1, "backward")[1].clone();
        commands(job, 1, "backward").push(send);
    };
    refused(again, "stage 1 sends what it has of microbatch 0");
    let last = |job: &mut Job| {
        let send = commands(job, 1, "backward")[1].clone();
        let mut update = send.clone();
        if let Action::Send { src, .. } = &mut update.action {
            src.buffer.0 = 0;
        }
        commands(job, 1, "update").push(update);
    };
    refused(last, "stage 0, update: it never receives the last message of stage 1 on channel 0");
}

#[test]
fn two_stages_do_not_wait_for_each_other() {
    refused(|job| job.stages[0].schedule.train[1..].rotate_left(1), "comes before");
    let expected = "stage 0, train, backward microbatch 0, command 0 (recv of 4 f32 from 1 stages on, channel 0): it waits forever, for stage 1, train, forward microbatch 1, command 0 (recv of 4 f32 from -1 stages on, channel 0), which waits for stage 0";
    let impatient = |job: &mut Job| {
        job.stages[0].schedule.train.swap(2, 3);
        job.stages[1].schedule.train.swap(2, 3);
        job.stages[1].schedule.slots[0].count = 2;
    };
    refused(impatient, expected);
}

#[test]
fn more_messages_than_fit_under_way_are_a_deadlock() {
    let eager = |job: &mut Job| {
        // Stage 0 sends twice before it receives; so does stage 1.
        for (stage, body, k) in [(0, "forward", 2), (1, "backward", 1)] {
            let send = commands(job, stage, body)[k].clone();
            commands(job, stage, body).insert(k, send);
        }
        for (stage, body, other) in [(1, "forward", "dy"), (0, "backward", "y")] {
            let mut recv = commands(job, stage, body)[0].clone();
            let id = job.programs[stage].buffers.iter().position(|b| b.name == other).expect("a buffer") as u32;
            match &mut recv.action {
                Action::Recv { dst, .. } => dst.buffer.0 = id,
                other => panic!("{other:?}"),
            }
            commands(job, stage, body).insert(1, recv);
        }
    };
    refused(eager, "it waits forever");
    let mut mutant = job();
    eager(&mut mutant);
    assert_eq!((least_in_flight(&job()), least_in_flight(&mutant)), (1, 2));
}

#[test]
fn messages_of_different_channels_do_not_wait_for_each_other() {
    // Stage 0 sends two messages, which stage 1 receives in the other order.
    let crossed = |channel: u32| {
        move |job: &mut Job| {
            let mut send = commands(job, 0, "forward")[2].clone();
            match &mut send.action {
                Action::Send { channel: c, count, .. } => (*c, *count) = (Channel(channel), 2),
                other => panic!("{other:?}"),
            }
            commands(job, 0, "forward").push(send);
            let dy = job.programs[1].buffers.iter().position(|b| b.name == "dy").expect("a buffer") as u32;
            let mut recv = commands(job, 1, "forward")[0].clone();
            match &mut recv.action {
                Action::Recv { channel: c, count, dst, .. } => (*c, *count, dst.buffer.0) = (Channel(channel), 2, dy),
                other => panic!("{other:?}"),
            }
            commands(job, 1, "forward").insert(0, recv);
        }
    };
    refused(crossed(0), "stage 0 sends 4 f32");
    let mut job = job();
    crossed(1)(&mut job);
    assert_eq!(verify(&job), Ok(()));
}

// Replicas.

#[test]
fn copies_of_a_parameter_stay_equal() {
    let own = |job: &mut Job| match &mut commands(job, 0, "update")[0].action {
        Action::Launch { args, .. } => args[2].buffer.0 = 2,
        other => panic!("{other:?}"),
    };
    refused(own, "stage 0, update, command 0 (launch of kernel 4): copies of `w` may come to differ along dp");
}

#[test]
fn all_ranks_report_the_same() {
    let apart = |job: &mut Job| job.programs.iter_mut().for_each(|p| p.groups[2].subs.clear());
    refused(apart, "`loss` may differ along dp");
}

#[test]
fn what_is_reduced_is_not_reduced_again() {
    let again = |job: &mut Job| {
        for stage in 0..2 {
            let mut second = commands(job, stage, "reduce")[5].clone();
            match &mut second.action {
                Action::Collective { src, dst, .. } => *src = dst.clone(),
                other => panic!("{other:?}"),
            }
            commands(job, stage, "reduce").insert(6, second);
        }
    };
    refused(again, "it reduces what is already joined along pp*dp");
}

// The whole.

#[test]
fn the_mesh_has_the_jobs_stages_and_microbatches() {
    refused(|job| drop(job.stages.pop()), "job: 1 stages, 2 in its mesh");
    refused(|job| job.microbatches = 3, "job: 3 microbatches, 2 in its mesh");
    refused(|job| job.mesh.subs[2].size = 0, "job: its mesh has an empty axis");
    refused(|job| job.stages[0].program = 5, "stage 0: there is no program 5");
    refused(|job| job.programs.push(job.programs[0].clone()), "job: no stage runs program 2");
}

#[test]
fn kernels_keep_their_invariants() {
    refused(|job| job.kernels[0].outputs.clear(), "kernel 0: %0: no output");
}

/// Applies a mutation to each command of each body.
fn everywhere(mutate: impl Fn(&mut Vec<Command>, usize)) -> Vec<String> {
    let mut accepted = vec![];
    for stage in 0..2 {
        for (b, body) in job().programs[stage].bodies.iter().enumerate() {
            for k in 0..body.commands.len() {
                let mut mutant = job();
                mutate(&mut mutant.programs[stage].bodies[b].commands, k);
                if verify(&mutant).is_ok() {
                    accepted.push(format!("stage {stage}, {}, command {k}", body.name));
                }
            }
        }
    }
    accepted
}

#[test]
fn every_dropped_command_shows() {
    assert_eq!(everywhere(|commands, k| drop(commands.remove(k))), Vec::<String>::new());
}

#[test]
fn every_repeated_command_shows() {
    assert_eq!(everywhere(|commands, k| commands.insert(k, commands[k].clone())), Vec::<String>::new());
}

#[test]
fn every_changed_count_shows() {
    let change = |commands: &mut Vec<Command>, k: usize| match &mut commands[k].action {
        Action::Collective { count, .. } | Action::Send { count, .. } | Action::Recv { count, .. } => *count -= 1,
        _ => drop(commands.remove(k)),
    };
    assert_eq!(everywhere(change), Vec::<String>::new());
}

#[test]
fn every_moved_buffer_shows_or_shares_memory_at_other_times() {
    let sound = job();
    for stage in 0..2 {
        let buffers = &sound.programs[stage].buffers;
        for (k, b) in buffers.iter().enumerate() {
            for other in buffers.iter().filter(|o| o.arena == b.arena && o.name != b.name && b.arena != Arena::Temporary) {
                let mut mutant = job();
                mutant.programs[stage].buffers[k].offset = other.offset;
                assert!(verify(&mutant).is_err(), "`{}` lies on `{}`", b.name, other.name);
            }
        }
    }
}
