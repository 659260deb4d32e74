//! Calls: which bodies run for which microbatches, and what they report.

use super::*;

#[test]
fn every_microbatch_has_its_passes() {
    refused(|job| _ = job.stages[0].schedule.train.remove(2), Invariant::PassOrder, "comes before the forward pass of microbatch 1");
    refused(|job| _ = job.stages[0].schedule.train.remove(3), Invariant::CallCount, "stage 0, train: `backward` is called for 1 of 2 microbatches");
    refused(|job| job.stages[0].schedule.train[2].microbatch = 0, Invariant::CalledOnce, "call 2: `forward` is called for microbatch 0 again");
    refused(|job| job.stages[0].schedule.train[2].microbatch = 9, Invariant::CallExists, "there is no microbatch 9");
    refused(|job| job.stages[0].schedule.train[2].body = BodyId(9), Invariant::CallExists, "there is no body 9");
    refused(|job| job.stages[1].schedule.train.swap(1, 2), Invariant::PassOrder, "call 1: `backward` comes before the forward pass of microbatch 0");
}

/// Cuts the forward pass of stage 0, and calls its parts: `train` has these calls for those of passes.
fn cut(train: &'static [(u32, u32, u32)]) -> impl Fn(&mut Job) {
    move |job| {
        job.programs[0].bodies[1].cuts = vec![1];
        let calls = train.iter().map(|(body, microbatch, part)| Call { body: BodyId(*body), microbatch: *microbatch, part: *part });
        job.stages[0].schedule.train.splice(1..5, calls);
    }
}

#[test]
fn a_microbatch_goes_through_a_pass_part_by_part() {
    for train in
        [&[(1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1), (2, 0, 0), (2, 1, 0)][..], &[(1, 0, 0), (1, 0, 1), (1, 1, 0), (2, 0, 0), (1, 1, 1), (2, 1, 0)]]
    {
        let mut sound = job();
        cut(train)(&mut sound);
        assert_eq!(verify(&sound), Ok(()));
    }
    let order = Invariant::PartsInOrder;
    for (train, invariant, says) in [
        (&[(1, 0, 1), (1, 0, 0), (1, 1, 0), (1, 1, 1), (2, 0, 0), (2, 1, 0)][..], order, "part 1 of `forward` comes before part 0"),
        (&[(1, 0, 0), (1, 1, 0), (1, 0, 1), (1, 1, 1), (2, 0, 0), (2, 1, 0)], order, "between parts of `forward` of microbatch 0"),
        (&[(1, 0, 0), (1, 0, 1), (1, 1, 0), (2, 1, 0), (1, 1, 1), (2, 0, 0)], order, "`backward` of microbatch 1 comes between parts"),
        (&[(1, 0, 0), (1, 0, 1), (2, 0, 0), (1, 1, 0)], order, "parts of `forward` are not called for microbatch 1"),
        (&[(1, 0, 0), (1, 0, 1), (1, 0, 1), (1, 1, 0), (1, 1, 1)], Invariant::CalledOnce, "`forward` is called for microbatch 0 again"),
        (&[(1, 0, 0), (1, 0, 2)], Invariant::CallExists, "there is no part 2 of 2"),
    ] {
        refused(cut(train), invariant, says);
    }
}

#[test]
fn passes_alone_are_cut_between_their_commands() {
    let cuts = |body: usize, cuts: &'static [u32]| move |job: &mut Job| job.programs[0].bodies[body].cuts = cuts.to_vec();
    for wrong in [&[0][..], &[2, 2], &[2, 1], &[99]] {
        refused(cuts(1, wrong), Invariant::BodyCut, "commands are cut at");
    }
    refused(cuts(3, &[1]), Invariant::BodyCut, "reduce is cut");
}

#[test]
fn reports_are_issued_once() {
    refused(drop_command(1, "reduce", 6), Invariant::ReportDue, "stage 1, train: `loss` is not reported");
    refused(drop_command(1, "eval_reduce", 1), Invariant::ReportDue, "stage 1, eval: `loss` is not reported");
    let again = |job: &mut Job| {
        let report = commands(job, 1, "reduce")[6].clone();
        commands(job, 1, "reduce").push(report);
    };
    refused(again, Invariant::ReportedOnce, "`loss` is reported again");
    let unlike = |job: &mut Job| {
        let mut norm = commands(job, 1, "eval_reduce")[1].clone();
        match &mut norm.action {
            Action::Report { report, .. } => *report = 1,
            other => panic!("{other:?}"),
        }
        commands(job, 1, "eval_reduce").push(norm);
    };
    refused(unlike, Invariant::ReportsAgree, "stage 1: its evaluation reports other numbers than stage 0's");
}

#[test]
fn a_wait_for_what_was_never_recorded_does_not_hold() {
    let mut ordered = job();
    let wait = Command { action: Action::Wait { event: 3 }, ..commands(&mut ordered, 0, "forward")[0].clone() };
    commands(&mut ordered, 0, "forward").insert(1, wait);
    assert_eq!(verify(&ordered), Ok(()));
}
