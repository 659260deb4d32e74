//! What a rank reads while it trains, in the order in which it takes it, by a thread of its own that is a batch ahead.

use crate::data::{Batch, Data, DataError, Wanted};
use crate::protocol::{HeldOut, Orders};
use ir::program::Job;
use std::io;
use std::ops::Range;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::{Builder, Scope};

/// All that a run reads.
pub struct Reading {
    pub training: Data,
    valid: Option<Data>,
    test: Option<Data>,
    pub course: Course,
}

/// Which batches a run takes, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Course {
    /// The step after which it begins, and its last.
    first: u64,
    steps: u64,
    /// Steps between evaluations; 0 is never.
    interval: u64,
    valid: Option<Evaluations>,
    test: Option<Evaluations>,
}

/// Of how many batches an evaluation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Evaluations {
    batches: u64,
    place: Place,
}

/// Where an evaluation begins to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// As all do.
    Start,
    /// Where the one before ended, as Megatron-LM's do, which also has one after the last step.
    Onwards,
}

/// A batch of a part of a run's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    Training(u64),
    HeldOut(HeldOut, u64),
}

/// How many samples a run takes of training, validation and test data, as Megatron-LM counts them.
pub fn samples(steps: u64, batch: u64, interval: u64, batches: u64) -> [u64; 3] {
    let evaluation = batches.saturating_mul(batch);
    let evaluations = steps.checked_div(interval).map_or(0, |n| n + 1);
    [steps.saturating_mul(batch), evaluations.saturating_mul(evaluation), if interval > 0 { evaluation } else { 0 }]
}

impl Reading {
    /// Opens what a run reads, if it trains.
    ///
    /// # Errors
    /// Data that cannot be read or does not fit.
    pub fn open(job: &Job, orders: &Orders) -> Result<Option<Reading>, DataError> {
        if orders.steps == 0 {
            return Ok(None);
        }
        let (first, read) = orders.start(job.global_batch);
        let [training, valid, test] = match &orders.sets {
            Some(sets) => {
                let of = |samples| Data::of_samples(job, samples);
                let [training, valid, test] = sets.open(job, orders.seed, orders.samples)?;
                [training.map(of).transpose()?, valid.map(of).transpose()?, test.map(of).transpose()?]
            }
            None => {
                let valid = (!orders.valid_data.is_empty()).then(|| Data::open(job, &orders.valid_data)).transpose()?;
                [Some(Data::open(job, &orders.data)?), valid, None]
            }
        };
        let Some(training) = training else { return Ok(None) };
        let training = training.after((first, read))?;
        let evaluations = |data: &Data| match &orders.sets {
            Some(_) => Evaluations { batches: orders.eval_batches, place: Place::Onwards },
            None => Evaluations { batches: data.batches().min(orders.eval_batches).max(1), place: Place::Start },
        };
        let (steps, interval) = (orders.steps, orders.eval_interval);
        let course = Course { first, steps, interval, valid: valid.as_ref().map(evaluations), test: test.as_ref().map(evaluations) };
        Ok(Some(Reading { training, valid, test, course }))
    }

    fn read<'a>(&self, turn: Turn, wanted: &'a Wanted) -> Result<Batch<'a>, DataError> {
        let (data, batch) = match turn {
            Turn::Training(batch) => (Some(&self.training), batch),
            Turn::HeldOut(HeldOut::Valid, batch) => (self.valid.as_ref(), batch),
            Turn::HeldOut(HeldOut::Test, batch) => (self.test.as_ref(), batch),
        };
        data.expect("invariant: what is not there has no turn").read(batch, wanted)
    }
}

impl Course {
    /// Batches of the evaluation after a step, if there is one: of validation data, each `interval` steps.
    pub fn after(&self, step: u64) -> Option<u64> {
        let is_due = self.interval > 0 && step.is_multiple_of(self.interval);
        self.valid.filter(|_| is_due).map(|valid| valid.batches)
    }

    /// Evaluations behind the last step, and of how many batches each is.
    pub fn at_end(&self) -> impl Iterator<Item = (HeldOut, u64)> + use<> {
        let all = [(HeldOut::Valid, self.valid), (HeldOut::Test, self.test)];
        let trains = self.first < self.steps;
        all.into_iter().filter_map(move |(part, e)| e.filter(|e| trains && e.place == Place::Onwards).map(|e| (part, e.batches)))
    }

    fn turns(self) -> impl Iterator<Item = Turn> {
        let held_out = |part, evaluations: Option<Evaluations>, number: u64| {
            let batches = evaluations.map_or(0..0, |e| e.of(number));
            batches.map(move |batch| Turn::HeldOut(part, batch))
        };
        let number = move |step: u64| step.checked_div(self.interval).unwrap_or(0);
        let of_step = move |step: u64| {
            let valid = self.after(step).and(self.valid);
            std::iter::once(Turn::Training(step - 1)).chain(held_out(HeldOut::Valid, valid, number(step).saturating_sub(1)))
        };
        let at_end = self.at_end().flat_map(move |(part, _)| match part {
            HeldOut::Valid => held_out(part, self.valid, number(self.steps)),
            HeldOut::Test => held_out(part, self.test, 0),
        });
        (self.first + 1..=self.steps).flat_map(of_step).chain(at_end)
    }
}

impl Evaluations {
    /// The batches of an evaluation, counted from 0.
    fn of(self, evaluation: u64) -> Range<u64> {
        let first = match self.place {
            Place::Start => 0,
            Place::Onwards => evaluation.saturating_mul(self.batches),
        };
        first..first.saturating_add(self.batches)
    }
}

/// The batches of a run, one after the other.
pub struct Feeding<'a> {
    ready: Receiver<Result<Batch<'a>, DataError>>,
}

impl<'a> Feeding<'a> {
    /// Begins to read.
    ///
    /// # Errors
    /// If there can be no thread.
    pub fn start<'scope>(scope: &'scope Scope<'scope, '_>, reading: Reading, wanted: &'a Wanted) -> io::Result<Feeding<'a>>
    where
        'a: 'scope,
    {
        // The next batch waits, read, until it is taken.
        let (send, ready) = sync_channel(0);
        Builder::new().name("reader".into()).spawn_scoped(scope, move || {
            for turn in reading.course.turns() {
                let batch = reading.read(turn, wanted);
                let is_last = batch.is_err();
                if send.send(batch).is_err() || is_last {
                    return;
                }
            }
        })?;
        Ok(Feeding { ready })
    }

    /// The next batch, in the order of the run's course.
    ///
    /// # Errors
    /// Data that has ended, or has what its input does not take.
    pub fn take(&mut self) -> Result<Batch<'a>, DataError> {
        self.ready.recv().expect("invariant: a run takes the batches of its course")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn course(first: u64, steps: u64, interval: u64, place: Place) -> Course {
        let evaluations = Some(Evaluations { batches: 2, place });
        Course { first, steps, interval, valid: evaluations, test: evaluations.filter(|_| place == Place::Onwards) }
    }

    #[test]
    fn a_run_takes_what_megatron_does() {
        let turns = |first| course(first, 3, 2, Place::Onwards).turns().collect::<Vec<_>>();
        let valid = |from: u64| (from..from + 2).map(|n| Turn::HeldOut(HeldOut::Valid, n));
        let test = (0..2).map(|n| Turn::HeldOut(HeldOut::Test, n));
        let end: Vec<Turn> = valid(2).chain(test).collect();
        let whole: Vec<Turn> =
            [Turn::Training(0), Turn::Training(1)].into_iter().chain(valid(0)).chain([Turn::Training(2)]).chain(end.clone()).collect();
        assert_eq!(turns(0), whole);
        // A run that goes on takes the rest of it.
        assert_eq!(turns(1), whole[1..]);
        assert_eq!(turns(2), whole[4..]);
        assert_eq!(turns(3), []);
        assert_eq!(samples(3, 8, 2, 2), [24, 32, 16]);
        assert_eq!(samples(3, 8, 0, 2), [24, 0, 0]);
    }

    #[test]
    fn files_are_evaluated_from_their_start() {
        let turns: Vec<Turn> = course(0, 2, 1, Place::Start).turns().collect();
        let valid = [Turn::HeldOut(HeldOut::Valid, 0), Turn::HeldOut(HeldOut::Valid, 1)];
        assert_eq!(turns, [&[Turn::Training(0)][..], &valid, &[Turn::Training(1)], &valid].concat());
    }
}
