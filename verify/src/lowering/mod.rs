//! Proves that a program computes its local graph, whoever made it.
//!
//! Both are run on *terms* instead of numbers: a term says what a value is, down to parameters, inputs and messages,
//! and is the same number for the same op of the same operands. Views, slices, shards, strides and copies make no new
//! terms: they are mixed-radix maps into one ([`crate::terms::digits`]). A buffer holds terms at strided places
//! ([`crate::terms::memory`]); a kernel is read as its body.
//!
//! **Invariants** (each program and schedule, for the calls of the first, the second and the last microbatch,
//! once-per-step calls included):
//! - Every operand of every command reads one value, whole: nothing overwritten, misplaced, missing or in part.
//! - Reports, new parameters and states, and what is held to limits, are the local graph's; what is sent on each
//!   channel, and what collectives across stages exchange, is the local graph's, in its order.
//!
//! With the proof that no two accesses race and that messages and collectives meet ([`crate::job`]), and that both
//! ends of them mean the same value ([`crate::partition::exchanges`]), the program's results are the local graph's.

pub mod described;
mod graph;
mod program;

use crate::terms::Terms;
use crate::{Invariant, LocationPart, Violation, references};
use graph::StepOutcome;
use ir::local::Local;
use ir::module::{Graphs, JobLevel};
use ir::program::{CallSchedule, Job, Program};

/// A local graph and how its numbers lead to the job's.
#[derive(Clone, Copy)]
struct GraphBinding<'a> {
    local: &'a Local,
    /// For each parameter slot of the graph, the slot in the program.
    slots: &'a [u32],
    /// For each table of the graph, the table of the job.
    tables: &'a [u32],
}

/// Checks that every program, with every schedule it has, computes its graphs, one class after the other. Which slot
/// and table of a program stands for which of a graph follows from what the job says of its stages and tables. Of a
/// job whose memory is not `settled`, arenas are not looked at.
///
/// # Errors
/// The first command that reads no value, or the first result that differs.
pub fn verify(job: &Job, settled: JobLevel, locals: &[Local], evaluation: &Graphs) -> Result<(), Violation> {
    crate::job::operands(job, settled)?;
    references::locals(locals.iter().chain(&evaluation.locals), None)?;
    let classes = [locals.len(), evaluation.locals.len()];
    if classes != [job.programs.len(); 2] {
        let found = format!("{} programs of {} classes, {} in an evaluation", job.programs.len(), classes[0], classes[1]);
        return Err(Invariant::ClassesCover.breach(found).at(LocationPart::Job));
    }
    let own_tables: Vec<u32> = (0..job.tables.len() as u32).collect();
    let other_tables = described::numbers(job, evaluation.whole.graph()).map_err(|e| e.at(LocationPart::Job))?;
    for (class, (local, other)) in locals.iter().zip(&evaluation.locals).enumerate() {
        let schedules: Vec<&CallSchedule> = job.stages.iter().filter(|s| s.program as usize == class).map(|s| &s.schedule).collect();
        let slots: Vec<u32> = (0..(local.params.len() + local.buckets.len()) as u32).collect();
        let training = GraphBinding { local, slots: &slots, tables: &own_tables };
        let evaluation = GraphBinding { local: other, slots: &evaluated(job, local, other)?, tables: &other_tables };
        check(job, &job.programs[class], &schedules, &training, &evaluation)?;
    }
    Ok(())
}

/// The slot of a program for each parameter, and then each bucket, of an evaluation: that in which the job says that
/// each stage has it.
fn evaluated(job: &Job, local: &Local, evaluation: &Local) -> Result<Vec<u32>, Violation> {
    let unlike = |s: u64, found: String| Invariant::EvaluatedParameters.breach(found).at(LocationPart::Stage(s));
    let mut slots: Option<Vec<u32>> = None;
    for (s, _) in &local.stages {
        let has = job.stages.get(*s as usize).map_or(&[][..], |stage| &stage.params);
        let used = evaluation.stages.iter().find(|(other, _)| other == s).map_or(&[][..], |(_, params)| params);
        let slot = |p: &u32| has.iter().position(|q| q == p).map(|k| k as u32).ok_or(*p);
        let own: Result<Vec<u32>, u32> = used.iter().map(slot).collect();
        let own = own.map_err(|p| unlike(*s, format!("it evaluates with parameter {p}, which it does not train")))?;
        if slots.as_ref().is_some_and(|known| *known != own) {
            return Err(unlike(*s, "it evaluates with parameters in other slots than the stages of its class".into()));
        }
        slots = Some(own);
    }
    let buckets = local.params.len() as u32..(local.params.len() + local.buckets.len()) as u32;
    Ok(slots.unwrap_or_default().into_iter().chain(buckets).collect())
}

/// Checks that the calls of a program's schedules compute what the graphs of training and evaluation say. What
/// commands and graphs name exists ([`crate::job::operands`], [`crate::references`]).
///
/// # Errors
/// The first command that reads no value, or the first result that differs.
fn check(job: &Job, program: &Program, schedules: &[&CallSchedule], training: &GraphBinding, evaluation: &GraphBinding) -> Result<(), Violation> {
    let mut terms = Terms::default();
    let at = |segment: LocationPart| move |e: Violation| e.within(segment);
    let steps = schedules.iter().map(|s| [s.train.as_slice(), &s.update].concat());
    let want = StepOutcome::of(&mut terms, training).map_err(at(LocationPart::Training))?;
    program::all(job, program, steps, &mut terms, &want).map_err(at(LocationPart::Training))?;
    let want = StepOutcome::of(&mut terms, evaluation).map_err(at(LocationPart::Evaluation))?;
    program::all(job, program, schedules.iter().map(|s| s.eval.clone()), &mut terms, &want).map_err(at(LocationPart::Evaluation))
}
