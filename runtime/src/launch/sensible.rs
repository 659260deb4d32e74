//! What ranks say, checked before it is believed. Whoever says it has proved that it belongs to the run, but its
//! memory may be damaged or its build another one, and what it says becomes the numbers that people read: what cannot
//! be ends the run with the rank's name.

use super::process::{LauncherEvent, RankHealth};
use crate::comm::{Position, ranks};
use crate::profile::{ProfileChunk, ProfileWindow};
use crate::protocol::{Event, OnNonfinite, Orders, StepEvent};
use crate::schedule::learning_rate;
use crate::shm::Status;
use crate::weights::{self, Mark};
use ir::program::Job;

/// How much machines with other mathematical libraries may differ in a learning rate.
const ROUNDING: f64 = 1e-9;

/// Checks what ranks say against how far each says that it is.
pub(super) struct EventChecker<'a> {
    job: &'a Job,
    /// The step after which the run begins, and the last that is asked for.
    first: u64,
    steps: u64,
    eval_interval: u64,
    on_nonfinite: OnNonfinite,
    has_saves: bool,
    profile: Option<ProfileWindow>,
    /// Nanoseconds of all that was timed.
    timed: u64,
    /// Progress of each rank.
    ranks: Vec<RankProgress>,
    /// Of each rank: checkpoints that it is through with.
    saved: Vec<u64>,
    check_replicas: u64,
    compares_first: bool,
    /// Last step after which each rank said what it holds.
    compared: Vec<u64>,
}

/// How far a rank says that it is.
#[derive(Clone, Copy)]
enum RankProgress {
    /// All after this step is to come.
    Step(u64),
    /// It has said how its steps ended early, after this one: only that it is done can follow.
    Ending(u64),
    Done,
}

impl<'a> EventChecker<'a> {
    /// The checker of a run that has not begun.
    pub(super) fn new(job: &'a Job, orders: &Orders) -> EventChecker<'a> {
        let done = orders.resume.as_ref().map_or(0, |r| r.1.step);
        EventChecker {
            job,
            first: done,
            steps: orders.steps,
            eval_interval: orders.eval_interval,
            on_nonfinite: orders.on_nonfinite,
            has_saves: orders.saves.is_some(),
            profile: orders.profile,
            timed: 0,
            ranks: vec![RankProgress::Step(done); job.mesh.world() as usize],
            saved: vec![0; job.mesh.world() as usize],
            check_replicas: orders.check_replicas,
            compares_first: orders.first_step.is_some(),
            compared: vec![0; job.mesh.world() as usize],
        }
    }

    /// What was said, if it can be; else that its rank has failed.
    pub(super) fn believed(&mut self, said: LauncherEvent) -> LauncherEvent {
        let (rank, checked) = match &said {
            LauncherEvent::Event(rank, event) => (*rank, self.event(*rank, event)),
            LauncherEvent::Health(rank, RankHealth { status, .. }) => (*rank, self.status(status)),
            LauncherEvent::Closed(rank, Some(ended)) => (*rank, self.status(&ended.status)),
            LauncherEvent::Begun(rank, _, step) if *step > self.steps => (*rank, Err(format!("it has begun step {step} of {}", self.steps))),
            LauncherEvent::Begun(..) | LauncherEvent::Closed(_, None) | LauncherEvent::Lost(_) | LauncherEvent::Stop => return said,
        };
        match checked {
            Ok(()) => said,
            Err(what) => LauncherEvent::Event(
                rank,
                Event::Failed { message: format!("what rank {rank} says of itself cannot be: {what}"), help: None, aborted: false },
            ),
        }
    }

    fn event(&mut self, rank: u64, event: &Event) -> Result<(), String> {
        let reached = self.ranks[rank as usize];
        let now = match (event, reached) {
            // A launcher may still report that what its finished rank said came damaged.
            (Event::Failed { .. }, _) => RankProgress::Done,
            (_, RankProgress::Done) => return Err("it goes on after its end".into()),
            (Event::Holds { milliseconds }, RankProgress::Step(done)) if done == self.first && milliseconds.is_finite() && *milliseconds >= 0.0 => {
                reached
            }
            (Event::Holds { .. }, _) => return Err("it begins again".into()),
            (Event::First { reports }, RankProgress::Step(done)) if done == self.first && self.compares_first => {
                self.reports(reports)?;
                reached
            }
            (Event::First { .. }, _) => return Err("it compares its first step".into()),
            (Event::Step(event), RankProgress::Step(done)) => RankProgress::Step(self.step(done, event)?),
            (Event::NonFinite { step, reports, .. }, RankProgress::Step(done)) => {
                self.follows(*step, done)?;
                self.reports(reports)?;
                RankProgress::Ending(done)
            }
            (Event::Skipped { step, skips, most }, RankProgress::Step(done)) => {
                let allowed = match self.on_nonfinite {
                    OnNonfinite::Skip { most } => Some(most),
                    OnNonfinite::Stop => None,
                };
                if *step != done || *skips > done || most.is_some() && *most != allowed {
                    return Err(format!("it skipped {skips} steps by step {step}, after step {done}"));
                }
                RankProgress::Ending(done)
            }
            (Event::Profile(part), RankProgress::Step(_)) => {
                self.part(rank, part)?;
                reached
            }
            (Event::Saved { number, mark: Mark { step, .. }, .. } | Event::Unsaved { number, step, .. }, RankProgress::Step(done)) => {
                let next = &mut self.saved[rank as usize];
                if !self.has_saves || *step > done || *number != *next {
                    return Err(format!("it saved checkpoint {number}, of step {step}, after {next} of them and step {done}"));
                }
                *next += 1;
                reached
            }
            (Event::Sums { step, sums }, RankProgress::Step(done)) => {
                let compared = &mut self.compared[rank as usize];
                let is_due = self.check_replicas > 0 && (step.is_multiple_of(self.check_replicas) || *step == self.steps);
                if !is_due || *step != done || std::mem::replace(compared, done) == done {
                    return Err(format!("it compares what it holds after step {step}, at step {done}"));
                }
                if let Some(sum) = sums.iter().find(|sum| weights::name(self.job, sum.held).is_none()) {
                    return Err(format!("it holds {:?}", sum.held));
                }
                reached
            }
            (Event::Evaluated { reports, .. }, RankProgress::Step(done)) if self.eval_interval > 0 && done == self.steps => {
                self.reports(reports)?;
                reached
            }
            (Event::Evaluated { .. }, _) => return Err("it evaluates what it came to".into()),
            (Event::Finished { step }, RankProgress::Step(done) | RankProgress::Ending(done)) if *step == done => RankProgress::Done,
            (Event::Finished { step }, RankProgress::Step(done) | RankProgress::Ending(done)) => {
                return Err(format!("it is done with step {step} after step {done}"));
            }
            (
                Event::Step(_)
                | Event::NonFinite { .. }
                | Event::Skipped { .. }
                | Event::Profile(_)
                | Event::Saved { .. }
                | Event::Unsaved { .. }
                | Event::Sums { .. },
                RankProgress::Ending(_),
            ) => {
                return Err("it goes on after steps that ended early".into());
            }
        };
        self.ranks[rank as usize] = now;
        Ok(())
    }

    /// The step that is done.
    fn step(&self, done: u64, event: &StepEvent) -> Result<u64, String> {
        self.follows(event.step, done)?;
        self.reports(&event.reports)?;
        event.valid.iter().try_for_each(|valid| self.reports(valid))?;
        let is_due = self.eval_interval > 0 && event.step.is_multiple_of(self.eval_interval);
        let rate = learning_rate(&self.job.train.schedule, event.step, self.steps);
        let numbers = [event.milliseconds, event.waited].into_iter().chain(event.busy).chain(event.loss_scale);
        let is_sound = numbers.into_iter().all(|x| x.is_finite() && x >= 0.0)
            && (event.learning_rate == rate || (event.learning_rate - rate).abs() <= rate.abs() * ROUNDING)
            && event.further_passes.is_sorted()
            && (is_due || event.valid.is_empty());
        if is_sound { Ok(event.step) } else { Err(format!("of step {}, {event:?}", event.step)) }
    }

    fn follows(&self, step: u64, done: u64) -> Result<(), String> {
        if Some(step) == done.checked_add(1) && step <= self.steps { Ok(()) } else { Err(format!("step {step} of {} after step {done}", self.steps)) }
    }

    fn reports(&self, values: &[Option<f64>]) -> Result<(), String> {
        let (count, of) = (values.len(), self.job.reports.len());
        if count == of { Ok(()) } else { Err(format!("{count} values of {of} reports")) }
    }

    fn status(&self, status: &Status) -> Result<(), String> {
        if status.step > self.steps {
            return Err(format!("it is at step {} of {}", status.step, self.steps));
        }
        let waits = status.waits.as_deref().unwrap_or_default();
        if waits.iter().any(|r| *r >= self.job.mesh.world()) {
            return Err(format!("it waits for {}", ranks(waits)));
        }
        Ok(())
    }

    fn part(&mut self, rank: u64, part: &ProfileChunk) -> Result<(), String> {
        let Some(window) = self.profile else { return Err("it was timed".into()) };
        if part.steps().any(|s| !window.has(s.step) || s.end < s.start) {
            return Err(format!("it was timed in other steps than {} to {}", window.first, window.last));
        }
        let stage = &self.job.stages[self.job.mesh.stage(rank) as usize];
        let program = &self.job.programs[stage.program as usize];
        let is_there = |at: Position| {
            let call = stage.schedule.calls(at.phase).get(at.call as usize);
            call.is_some_and(|c| program.bodies[c.body.index()].part(c.part).contains(&(at.command as usize)))
        };
        if let Some(ran) = part.ran.iter().find(|ran| !is_there(ran.at)) {
            return Err(format!("it ran command {} of call {} of {}", ran.at.command, ran.at.call, ran.at.phase.name()));
        }
        // Times are added up, and their sum must not overflow.
        let times = part.steps().map(|s| s.end - s.start).chain(part.ran.iter().map(|ran| ran.time));
        self.timed = times.into_iter().try_fold(self.timed, u64::checked_add).ok_or("its commands took more than five centuries")?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::executor::{PersistentId, Sum};
    use crate::fixture::{self, Split};
    use crate::profile::Ran;
    use crate::shm::RunRequest;
    use ir::program::ProgramPhase;

    #[test]
    fn what_launchers_say_of_their_ranks_is_within_the_run() {
        let job = fixture::job(&Split { microbatches: 1, pp: 1, dp: 2, tp: 1 });
        let window = ProfileWindow { first: 1, last: 2 };
        let checker = || EventChecker {
            first: 0,
            job: &job,
            steps: 4,
            eval_interval: 0,
            on_nonfinite: OnNonfinite::Stop,
            has_saves: true,
            profile: Some(window),
            timed: 0,
            ranks: vec![RankProgress::Step(0); 2],
            saved: vec![0; 2],
            compares_first: true,
            check_replicas: 2,
            compared: vec![0; 2],
        };
        let fault = |said: Vec<LauncherEvent>| {
            let mut checker = checker();
            let wrong = said.into_iter().find_map(|said| match checker.believed(said) {
                LauncherEvent::Event(1, Event::Failed { message, help: None, aborted: false }) => Some(message),
                _ => None,
            });
            wrong.unwrap_or_default().replace("what rank 1 says of itself cannot be: ", "")
        };
        let pulse =
            |step, waits| LauncherEvent::Health(1, RankHealth { status: Status { step, waits, ..Status::default() }, ..RankHealth::default() });
        let part = |steps: &[(u64, u64, u64)], ran: &[Ran]| {
            ProfileChunk::of(steps.to_vec(), ran.to_vec()).into_iter().map(|p| LauncherEvent::Event(1, Event::Profile(p))).collect()
        };
        let ran = |call, time| Ran { at: Position { phase: ProgramPhase::Train, call, command: 0 }, start: 5, time };
        assert_eq!(fault(vec![pulse(4, Some(vec![0, 1])), LauncherEvent::Begun(1, RunRequest::Stop, 4)]), "");
        assert_eq!(fault(vec![pulse(5, None)]), "it is at step 5 of 4");
        assert_eq!(fault(vec![pulse(1, Some(vec![0, 7]))]), "it waits for ranks 0, 7");
        assert_eq!(fault(vec![LauncherEvent::Begun(1, RunRequest::Save, u64::MAX)]), "it has begun step 18446744073709551615 of 4");
        let unsaved = |number, step| LauncherEvent::Event(1, Event::Unsaved { number, step, why: String::new() });
        assert_eq!(fault(vec![unsaved(0, 0), unsaved(1, 0)]), "");
        assert_eq!(fault(vec![unsaved(1, 0)]), "it saved checkpoint 1, of step 0, after 0 of them and step 0");
        assert_eq!(fault(vec![unsaved(0, 1)]), "it saved checkpoint 0, of step 1, after 0 of them and step 0");
        let sums = |step, held| LauncherEvent::Event(1, Event::Sums { step, sums: vec![Sum { held, is_copy: false, region: 1, sum: 1 }] });
        assert_eq!(fault(vec![sums(2, PersistentId::Param(0))]), "it compares what it holds after step 2, at step 0");
        assert_eq!(fault(part(&[(1, 3, 4), (2, 4, 4)], &[ran(0, 1)])), "");
        assert_eq!(fault(part(&[(3, 3, 4)], &[])), "it was timed in other steps than 1 to 2");
        assert_eq!(fault(part(&[(1, 4, 3)], &[])), "it was timed in other steps than 1 to 2");
        assert_eq!(fault(part(&[], &[ran(1000, 1)])), "it ran command 0 of call 1000 of train");
        assert_eq!(fault(part(&[], &[ran(0, u64::MAX), ran(0, 1)])), "its commands took more than five centuries");
        assert_eq!(fault(part(&[(1, 0, u64::MAX), (2, 0, 1)], &[])), "its commands took more than five centuries");
    }
}
