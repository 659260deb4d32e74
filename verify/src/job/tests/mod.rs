//! A job that is right, and what each mutation of it breaks.

mod calls;
mod communication;
mod lemma;
mod memory;
mod operands;
mod sample;
mod serial;
mod streams;

use super::{least_in_flight, verify};
use crate::Invariant;
use ir::dim::Base;
use ir::mesh::SubAxis;
use ir::op::{Channel, Collective, DType, Real, Reduce, Scalar};
use ir::program::{Action, Arena, BodyId, Buffer, BufferAddress, Call, Command, Content, GroupId, Job, KernelId, Slots, Stash};
use sample::{MUL, UPDATE, job};

#[test]
fn a_sound_job_is_accepted() {
    assert_eq!(verify(&job()), Ok(()));
}

/// The mutated job is refused, with this in the error's text.
#[track_caller]
fn refused(mutate: impl FnOnce(&mut Job), invariant: Invariant, expected: &str) {
    let mut mutant = job();
    mutate(&mut mutant);
    assert_ne!(mutant, job(), "nothing was mutated");
    match verify(&mutant) {
        Ok(()) => panic!("accepted"),
        Err(e) => assert!(e.invariant == invariant && e.to_string().contains(expected), "{e}"),
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
    edit: impl FnOnce(&mut KernelId, &mut Vec<BufferAddress>, &mut Vec<Scalar>),
) -> impl FnOnce(&mut Job) {
    move |job| match &mut commands(job, stage, body)[k].action {
        Action::Launch { kernel, args, scalars } => edit(kernel, args, scalars),
        other => panic!("{other:?}"),
    }
}

#[test]
fn copies_of_a_parameter_stay_equal() {
    let own = |job: &mut Job| match &mut commands(job, 0, "update")[0].action {
        Action::Launch { args, .. } => args[2].buffer.0 = 2,
        other => panic!("{other:?}"),
    };
    refused(own, Invariant::CopiesAlike, "stage 0, update, command 0 (launch of kernel 4): copies of `w` may come to differ along dp");
}

#[test]
fn all_ranks_report_the_same() {
    let apart = |job: &mut Job| job.programs.iter_mut().for_each(|p| p.groups[2].subs.clear());
    refused(apart, Invariant::ReportAlike, "`loss` may differ along dp");
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
    refused(again, Invariant::JoinedOnce, "it reduces what is already joined along pp*dp");
}

#[test]
fn the_mesh_has_the_jobs_stages_and_microbatches() {
    refused(|job| drop(job.stages.pop()), Invariant::MeshFits, "job: 1 stages, 2 in its mesh");
    refused(|job| job.microbatches = 3, Invariant::MeshFits, "job: 3 microbatches, 2 in its mesh");
    refused(|job| job.mesh.subs[2].size = 0, Invariant::MeshSize, "job: its mesh has an empty axis");
    refused(|job| job.stages[0].program = 5, Invariant::StageProgram, "stage 0: there is no program 5");
    refused(|job| job.programs.push(job.programs[0].clone()), Invariant::ProgramRuns, "job: no stage runs program 2");
}

#[test]
fn kernels_keep_their_invariants() {
    refused(|job| job.kernels[0].outputs.clear(), Invariant::KernelSound, "kernel 0: %0: no output");
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
fn every_moved_buffer_that_lasts_shows() {
    let sound = job();
    for stage in 0..2 {
        let buffers = &sound.programs[stage].buffers;
        for (k, b) in buffers.iter().enumerate() {
            for other in buffers.iter().filter(|o| o.arena == b.arena && o.name != b.name && b.arena != Arena::Temporary) {
                let mut mutant = job();
                mutant.programs[stage].buffers[k].offset = other.offset;
                let said = verify(&mutant).map_err(|e| e.invariant);
                assert_eq!(said, Err(Invariant::LastingApart), "`{}` lies on `{}`", b.name, other.name);
            }
        }
    }
}
