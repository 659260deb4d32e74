//! What a rank reads while it trains, in the order in which it takes it, by a thread of its own that is a batch
//! ahead.

use crate::data::{Batch, Data, DataError, LoadRegions, RunSamples, Samples};
use crate::protocol::{HeldOut, Orders};
use ir::program::Job;
use std::io;
use std::ops::Range;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::{Builder, Scope};

/// All that a run reads.
pub struct RunData {
    pub training: Data,
    /// One, or one for each data set.
    valid: Vec<Data>,
    test: Option<Data>,
    pub schedule: BatchSchedule,
}

/// Which batches a run takes, and when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchSchedule {
    /// The step after which it begins, and its last.
    first: u64,
    steps: u64,
    /// Steps between evaluations; 0 is never.
    interval: u64,
    valid: Vec<Evaluations>,
    test: Option<Evaluations>,
}

/// The batches of an evaluation, and where they begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Evaluations {
    batches: u64,
    place: EvaluationStart,
}

/// Where an evaluation begins to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EvaluationStart {
    /// Every evaluation reads from the start.
    Start,
    /// Where the one before ended, as Megatron-LM's do, which also has one after the last step.
    Onwards,
    /// Every evaluation takes all samples, from the first on, as in Megatron-LM.
    Whole,
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

impl RunData {
    /// Opens what a run reads, if it trains.
    ///
    /// # Errors
    /// Data that cannot be read or does not fit.
    pub fn open(job: &Job, orders: &Orders) -> Result<Option<RunData>, DataError> {
        if orders.steps == 0 {
            return Ok(None);
        }
        let (first, read) = orders.start(job.global_batch);
        let (training, valid, test, evaluations) = match &orders.sets {
            Some(sets) => {
                let RunSamples { training, valid, test } = sets.open(job, orders.seed, orders.samples)?;
                let (is_full, batch) = (sets.validation.is_full, job.global_batch.max(1));
                let evaluations = |samples: &Samples| match is_full {
                    true => Evaluations { batches: samples.count() / batch, place: EvaluationStart::Whole },
                    false => Evaluations { batches: orders.eval_batches, place: EvaluationStart::Onwards },
                };
                let evaluations: Vec<Evaluations> = valid.iter().map(evaluations).collect();
                let of = |samples| Data::of_samples(job, samples);
                let valid = valid.into_iter().map(of).collect::<Result<Vec<Data>, DataError>>()?;
                (training.map(of).transpose()?, valid, test.map(of).transpose()?, evaluations)
            }
            None => {
                let valid = (!orders.valid_data.is_empty()).then(|| Data::open(job, &orders.valid_data)).transpose()?;
                let of = |data: &Data| Evaluations { batches: data.batches().min(orders.eval_batches).max(1), place: EvaluationStart::Start };
                let evaluations = valid.iter().map(of).collect();
                (Some(Data::open(job, &orders.data)?), Vec::from_iter(valid), None, evaluations)
            }
        };
        let Some(training) = training else { return Ok(None) };
        let training = training.after((first, read))?;
        let (steps, interval) = (orders.steps, orders.eval_interval);
        let of_test = test.as_ref().map(|_| Evaluations { batches: orders.eval_batches, place: EvaluationStart::Onwards });
        let schedule = BatchSchedule { first, steps, interval, valid: evaluations, test: of_test };
        Ok(Some(RunData { training, valid, test, schedule }))
    }

    fn read<'a>(&self, turn: Turn, wanted: &'a LoadRegions) -> Result<Batch<'a>, DataError> {
        let (data, batch) = match turn {
            Turn::Training(batch) => (Some(&self.training), batch),
            Turn::HeldOut(HeldOut::Valid(set), batch) => (self.valid.get(set as usize), batch),
            Turn::HeldOut(HeldOut::Test, batch) => (self.test.as_ref(), batch),
        };
        data.expect("invariant: what is not there has no turn").read(batch, wanted)
    }
}

impl BatchSchedule {
    /// Evaluations after a step, if there are any, and of how many batches each is: of validation data, each
    /// `interval` steps.
    pub fn after(&self, step: u64) -> impl Iterator<Item = (HeldOut, u64)> {
        let is_due = self.interval > 0 && step.is_multiple_of(self.interval);
        self.held_out().filter(move |(part, _)| is_due && matches!(part, HeldOut::Valid(_))).map(|(part, e)| (part, e.batches))
    }

    /// Evaluations behind the last step, and of how many batches each is.
    pub fn at_end(&self) -> impl Iterator<Item = (HeldOut, u64)> {
        let trains = self.first < self.steps;
        self.held_out().filter(move |(_, e)| trains && e.place != EvaluationStart::Start).map(|(part, e)| (part, e.batches))
    }

    fn held_out(&self) -> impl Iterator<Item = (HeldOut, Evaluations)> {
        (0..).map(HeldOut::Valid).zip(self.valid.iter().copied()).chain(self.test.map(|e| (HeldOut::Test, e)))
    }

    fn turns(&self) -> impl Iterator<Item = Turn> {
        let before = |step: u64| step.checked_div(self.interval).unwrap_or(0);
        let of_step = move |step: u64| {
            let evaluated = self.after(step).flat_map(move |(part, _)| self.batches(part, before(step).saturating_sub(1)));
            std::iter::once(Turn::Training(step - 1)).chain(evaluated)
        };
        let at_end = self.at_end().flat_map(move |(part, _)| self.batches(part, before(self.steps)));
        (self.first + 1..=self.steps).flat_map(of_step).chain(at_end)
    }

    /// The batches of an evaluation of a part, with so many before it. Test data have one.
    fn batches(&self, part: HeldOut, before: u64) -> impl Iterator<Item = Turn> + use<> {
        let (evaluations, before) = match part {
            HeldOut::Valid(set) => (self.valid.get(set as usize), before),
            HeldOut::Test => (self.test.as_ref(), 0),
        };
        evaluations.map_or(0..0, |e| e.of(before)).map(move |batch| Turn::HeldOut(part, batch))
    }
}

impl Evaluations {
    /// The batches of an evaluation, counted from 0.
    fn of(self, evaluation: u64) -> Range<u64> {
        let first = match self.place {
            EvaluationStart::Start | EvaluationStart::Whole => 0,
            EvaluationStart::Onwards => evaluation.saturating_mul(self.batches),
        };
        first..first.saturating_add(self.batches)
    }
}

/// The batches of a run, one after the other.
pub struct DataLoader<'a> {
    ready: Receiver<Result<Batch<'a>, DataError>>,
}

impl<'a> DataLoader<'a> {
    /// Begins to read.
    ///
    /// # Errors
    /// If there can be no thread.
    pub fn start<'scope>(scope: &'scope Scope<'scope, '_>, run_data: RunData, wanted: &'a LoadRegions) -> io::Result<DataLoader<'a>>
    where
        'a: 'scope,
    {
        // The reader keeps the next batch until it is taken.
        let (send, ready) = sync_channel(0);
        Builder::new().name("reader".into()).spawn_scoped(scope, move || {
            for turn in run_data.schedule.turns() {
                let batch = run_data.read(turn, wanted);
                let is_last = batch.is_err();
                if send.send(batch).is_err() || is_last {
                    return;
                }
            }
        })?;
        Ok(DataLoader { ready })
    }

    /// The next batch, in the order of the run's schedule.
    ///
    /// # Errors
    /// Data that has ended, or has what its input does not take.
    pub fn take(&mut self) -> Result<Batch<'a>, DataError> {
        self.ready.recv().expect("invariant: a run takes the batches of its schedule")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(first: u64, steps: u64, interval: u64, place: EvaluationStart) -> BatchSchedule {
        let evaluations = Evaluations { batches: 2, place };
        BatchSchedule { first, steps, interval, valid: vec![evaluations], test: (place == EvaluationStart::Onwards).then_some(evaluations) }
    }

    #[test]
    fn a_run_takes_what_megatron_does() {
        let turns = |first| schedule(first, 3, 2, EvaluationStart::Onwards).turns().collect::<Vec<_>>();
        let valid = |from: u64| (from..from + 2).map(|n| Turn::HeldOut(HeldOut::Valid(0), n));
        let test = (0..2).map(|n| Turn::HeldOut(HeldOut::Test, n));
        let end: Vec<Turn> = valid(2).chain(test).collect();
        let whole: Vec<Turn> =
            [Turn::Training(0), Turn::Training(1)].into_iter().chain(valid(0)).chain([Turn::Training(2)]).chain(end.clone()).collect();
        assert_eq!(turns(0), whole);
        // A resumed run takes the rest of these turns.
        assert_eq!(turns(1), whole[1..]);
        assert_eq!(turns(2), whole[4..]);
        assert_eq!(turns(3), []);
        assert_eq!(samples(3, 8, 2, 2), [24, 32, 16]);
        assert_eq!(samples(3, 8, 0, 2), [24, 0, 0]);
    }

    #[test]
    fn files_are_evaluated_from_their_start() {
        let turns: Vec<Turn> = schedule(0, 2, 1, EvaluationStart::Start).turns().collect();
        let valid = [Turn::HeldOut(HeldOut::Valid(0), 0), Turn::HeldOut(HeldOut::Valid(0), 1)];
        assert_eq!(turns, [&[Turn::Training(0)][..], &valid, &[Turn::Training(1)], &valid].concat());
    }

    #[test]
    fn each_validation_data_set_has_its_turns() {
        let mut schedule = schedule(0, 2, 2, EvaluationStart::Onwards);
        schedule.valid.push(Evaluations { batches: 1, place: EvaluationStart::Whole });
        let valid = |set: u32, batches: Range<u64>| batches.map(move |n| Turn::HeldOut(HeldOut::Valid(set), n));
        let trained = [Turn::Training(0), Turn::Training(1)].into_iter();
        let end = valid(0, 2..4).chain(valid(1, 0..1)).chain((0..2).map(|n| Turn::HeldOut(HeldOut::Test, n)));
        let turns: Vec<Turn> = trained.chain(valid(0, 0..2)).chain(valid(1, 0..1)).chain(end).collect();
        assert_eq!(schedule.turns().collect::<Vec<_>>(), turns);
    }
}
