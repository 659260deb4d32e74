//! Communication: groups, collectives and messages.

use super::*;

#[test]
fn groups_name_ranks_that_exist_once() {
    refused(|job| job.programs[0].groups[0].subs.push(SubAxis(2)), Invariant::GroupAxes, "stage 0, group 0: axis 2 occurs twice");
    refused(|job| job.programs[0].groups[0].subs[0] = SubAxis(1), Invariant::GroupAxes, "axis 1 does not tell ranks of a stage apart");
    refused(|job| job.programs[0].groups[0].subs[0] = SubAxis(9), Invariant::GroupAxes, "axis 9 does not tell ranks of a stage apart");
    refused(|job| job.programs[0].groups[1].stages = Some(vec![1]), Invariant::GroupStages, "stages [1] do not include this one");
    refused(|job| job.programs[0].groups[1].stages = Some(vec![0, 1, 2]), Invariant::GroupStages, "stages [0, 1, 2] do not all exist");
}

#[test]
fn members_of_a_group_agree_on_its_members() {
    refused(
        set_group(1, "reduce", 3, 2),
        Invariant::NoDeadlock,
        "stage 0, train, reduce microbatch 0, command 3 (all_reduce of 1 f32 in group 1): it waits forever, for stage 1, train, reduce microbatch 0, command 3 (all_reduce of 1 f32 in group 2)",
    );
    refused(|job| job.programs[1].groups[2].subs.clear(), Invariant::NoDeadlock, "it waits forever");
}

#[test]
fn a_group_of_another_size_does_not_fit_the_buffers() {
    refused(set_group(0, "reduce", 1, 2), Invariant::OperandRange, "it reaches element 7 of buffer `g`, which has 4");
    refused(set_group(0, "reduce", 0, 2), Invariant::OperandRange, "it reaches element 7 of buffer `dw`, which has 4");
}

#[test]
fn members_of_a_group_agree_on_what_they_exchange() {
    let most = |job: &mut Job| match &mut commands(job, 1, "reduce")[3].action {
        Action::Collective { kind, .. } => *kind = Collective::AllReduce(Reduce::Max),
        other => panic!("{other:?}"),
    };
    refused(
        most,
        Invariant::MembersAgree,
        "stage 0, train, reduce microbatch 0, command 3 (all_reduce of 1 f32 in group 1): another member of the group has come to stage 1",
    );
    let any = |job: &mut Job| match &mut commands(job, 1, "reduce")[3].action {
        Action::Collective { kind, .. } => *kind = Collective::AllReduce(Reduce::Any),
        other => panic!("{other:?}"),
    };
    refused(any, Invariant::ReductionType, "a reduction `any` of f32");
}

#[test]
fn members_of_a_group_issue_collectives_in_one_order() {
    let early = |job: &mut Job| {
        let loss: Vec<Command> = commands(job, 1, "reduce").drain(5..).collect();
        commands(job, 1, "reduce").splice(3..3, loss);
    };
    refused(early, Invariant::NoDeadlock, "it waits forever");
    refused(drop_command(1, "eval_reduce", 0), Invariant::ReadBeforeWrite, "before that is written");
}

#[test]
fn every_send_meets_its_receive() {
    refused(
        drop_command(1, "backward", 1),
        Invariant::NoDeadlock,
        "stage 0, train, backward microbatch 0, command 0 (recv of 4 f32 from 1 stages on, channel 0): it waits forever, for stage 1, train",
    );
    refused(drop_command(0, "backward", 0), Invariant::ReadBeforeWrite, "before that is written");
    refused(
        set_count(0, "forward", 2, 2),
        Invariant::MessageType,
        "stage 1, train, forward microbatch 0, command 0 (recv of 4 f32 from -1 stages on, channel 0): stage 0 sends 2 f32",
    );
    let hops = |to: i64| {
        move |job: &mut Job| match &mut commands(job, 1, "backward")[1].action {
            Action::Send { hops, .. } => *hops = to,
            other => panic!("{other:?}"),
        }
    };
    refused(
        hops(1),
        Invariant::MessagePeer,
        "stage 1, train, backward microbatch 0, command 1 (send of 4 f32 to 1 stages on, channel 0): there is no stage 1 further on",
    );
    refused(hops(0), Invariant::MessagePeer, "there is no stage 0 further on");
    refused(|job| job.stages[0].schedule.train[1..3].reverse(), Invariant::MessageMicrobatch, "stage 0 sends what it has of microbatch 1");
}

#[test]
fn every_message_is_received() {
    let again = |job: &mut Job| {
        let send = commands(job, 1, "backward")[1].clone();
        commands(job, 1, "backward").push(send);
    };
    refused(again, Invariant::MessageMicrobatch, "stage 1 sends what it has of microbatch 0");
    let last = |job: &mut Job| {
        let send = commands(job, 1, "backward")[1].clone();
        let mut update = send.clone();
        if let Action::Send { src, .. } = &mut update.action {
            src.buffer.0 = 0;
        }
        commands(job, 1, "update").push(update);
    };
    refused(last, Invariant::MessageReceived, "stage 0, update: it never receives the last message of stage 1 on channel 0");
}

#[test]
fn two_stages_do_not_wait_for_each_other() {
    refused(|job| job.stages[0].schedule.train[1..].rotate_left(1), Invariant::PassOrder, "comes before");
    let expected = "stage 0, train, backward microbatch 0, command 0 (recv of 4 f32 from 1 stages on, channel 0): it waits forever, for stage 1, train, forward microbatch 1, command 0 (recv of 4 f32 from -1 stages on, channel 0), which waits for stage 0";
    let impatient = |job: &mut Job| {
        job.stages[0].schedule.train.swap(2, 3);
        job.stages[1].schedule.train.swap(2, 3);
        job.stages[1].schedule.slots[0].count = 2;
    };
    refused(impatient, Invariant::NoDeadlock, expected);
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
    refused(eager, Invariant::NoDeadlock, "it waits forever");
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
    refused(crossed(0), Invariant::MessageType, "stage 0 sends 4 f32");
    let mut job = job();
    crossed(1)(&mut job);
    assert_eq!(verify(&job), Ok(()));
}
