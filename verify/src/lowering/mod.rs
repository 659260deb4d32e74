//! Proves that a program computes its local graph, whoever made it.
//!
//! Both are run on *terms* instead of numbers: a term says what a value is, down to parameters, inputs and messages, and is
//! the same number for the same op of the same operands. Views, slices, shards, strides and copies make no new terms: they
//! are mixed-radix maps into one ([`digits`]). A buffer holds terms at strided places ([`memory`]); a kernel is read as its body.
//!
//! **Invariants** (each program and schedule, for the calls of the first, the second and the last microbatch, once-per-step calls included):
//! - Every operand of every command reads one value, whole: nothing overwritten, misplaced, missing or in part.
//! - Reports, new parameters and states, and what is held to limits, are the local graph's; what is sent on each channel, and what collectives across stages
//!   exchange, is the local graph's, in its order.
//!
//! With the proof that no two accesses race and that messages and collectives meet ([`crate::job`]), and that both ends of them mean
//! the same value ([`crate::partition::exchanges`]), the program's results are the local graph's.

mod graph;
mod program;

use crate::terms::Terms;
use crate::{LocusPart, Violation};
use graph::Outcome;
use ir::local::Local;
use ir::program::{CallSchedule, Job, Program};

/// A local graph and how its numbers lead to the job's.
#[derive(Clone, Copy)]
pub struct Meaning<'a> {
    pub local: &'a Local,
    /// Parameter slot of the program, per slot of the graph.
    pub slots: &'a [u32],
    /// Table of the job, per table of the graph.
    pub tables: &'a [u32],
}

/// Checks that the calls of a program's schedules compute what the graphs of training and evaluation say. What commands and graphs
/// name exists ([`crate::job::operands`], [`crate::references`]).
///
/// # Errors
/// The first command that reads no value, or the first result that differs.
pub fn check(job: &Job, program: &Program, schedules: &[&CallSchedule], training: &Meaning, evaluation: &Meaning) -> Result<(), Violation> {
    let mut terms = Terms::default();
    let at = |segment: LocusPart| move |e: Violation| e.within(segment);
    let steps = schedules.iter().map(|s| [s.train.as_slice(), &s.update].concat());
    let want = Outcome::of(&mut terms, training).map_err(at(LocusPart::Training))?;
    program::all(job, program, steps, &mut terms, &want).map_err(at(LocusPart::Training))?;
    let want = Outcome::of(&mut terms, evaluation).map_err(at(LocusPart::Evaluation))?;
    program::all(job, program, schedules.iter().map(|s| s.eval.clone()), &mut terms, &want).map_err(at(LocusPart::Evaluation))
}
