//! When steps were done: the times of steps, and between them what a log says of the time of day.

use super::elapsed::Elapsed;

/// Most events that are kept of steps that were done.
const MOST: usize = 1 << 16;

/// An event of a log, with its time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TimedEvent {
    pub step: u64,
    /// Seconds of all runs of the log so far, without the time between runs.
    pub seconds: f64,
    pub what: TimelineEvent,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum TimelineEvent {
    /// This step, the first of a run, is done. How long ago the run before ended counts for nothing.
    Began,
    /// This step is done, and training waited so many seconds before it went on.
    Done { waited: f64 },
    /// All ranks start again behind this step.
    Restarted,
}

/// Events of a log, in order of steps. Those of steps that were done again are left out.
#[derive(Debug, Default)]
pub struct TimedEvents {
    all: Vec<TimedEvent>,
}

impl TimedEvents {
    pub fn push(&mut self, event: TimedEvent) {
        let kept = match event.what {
            TimelineEvent::Began => self.all.partition_point(|m| m.step < event.step),
            TimelineEvent::Restarted => self.all.partition_point(|m| m.step <= event.step),
            TimelineEvent::Done { waited } => return self.done(event, waited),
        };
        self.all.truncate(kept);
        self.all.push(event);
    }

    /// A checkpoint may be complete when later steps are done, and a step be named twice.
    fn done(&mut self, event: TimedEvent, waited: f64) {
        let at = self.all.partition_point(|m| m.step < event.step);
        if self.all[at..].iter().any(|m| m.what == TimelineEvent::Restarted) {
            return;
        }
        match self.all.get_mut(at) {
            Some(TimedEvent { step, what, .. }) if *step == event.step => match what {
                TimelineEvent::Done { waited: known } => *known = known.max(waited),
                TimelineEvent::Began | TimelineEvent::Restarted => self.all.insert(at + 1, event),
            },
            _ => self.all.insert(at, event),
        }
        if self.all.len() > MOST {
            let mut at = 0;
            self.all.retain(|m| {
                at += 1;
                at % 2 == 1 || !matches!(m.what, TimelineEvent::Done { .. })
            });
        }
    }
}

/// What had passed on the clock, from sums of the times of steps, or from a time of the log.
#[derive(Debug, Default)]
pub struct Timeline {
    /// Sums of the times of steps, and the clock. It leaps where two sums are equal, and runs evenly between others.
    knots: Vec<(f64, f64)>,
    /// From when on in the log, and how much longer the clock has run than its runs: first steps begin before the
    /// log does.
    ahead: Vec<(f64, f64)>,
}

impl Timeline {
    /// `sums` has the times of steps alone.
    pub fn new(events: &TimedEvents, sums: &Elapsed) -> Timeline {
        let mut line = Timeline::default();
        let (mut sum, mut clock, mut ahead, mut starts) = (0.0, 0.0, 0.0, false);
        for m in &events.all {
            let until = sums.seconds_at(m.step).max(sum);
            // `even` is the clock if nothing else took time, `said` is the clock by the log.
            let (even, said) = (clock + until - sum, (m.seconds + ahead).max(clock));
            match m.what {
                TimelineEvent::Began => {
                    clock = even;
                    ahead = clock - m.seconds;
                    line.ahead.push((m.seconds, ahead));
                    line.knots.push((until, clock));
                    starts = false;
                }
                TimelineEvent::Done { waited } => {
                    if std::mem::take(&mut starts) {
                        // Ranks load their checkpoint before the first step.
                        line.knots.push((sum, (said - (until - sum)).max(clock)));
                    }
                    line.knots.push((until, said));
                    clock = said;
                    if waited > 0.0 {
                        clock += waited;
                        line.knots.push((until, clock));
                    }
                }
                TimelineEvent::Restarted => {
                    line.knots.push((until, even.min(said)));
                    clock = said;
                    line.knots.push((until, clock));
                    starts = true;
                }
            }
            sum = until;
        }
        line
    }

    /// When a step was done, by the times of all steps until then.
    pub fn of_sum(&self, sum: f64) -> f64 {
        let at = self.knots.partition_point(|(known, _)| *known < sum);
        match (at.checked_sub(1).map(|before| self.knots[before]), self.knots.get(at)) {
            (Some((a, from)), Some((b, until))) => from + (until - from) * (sum - a) / (b - a),
            (Some((a, from)), None) => from + sum - a,
            (None, Some((b, until))) => (until - (b - sum)).max(0.0),
            (None, None) => sum,
        }
    }

    /// What a time of the log is, in seconds of all its runs.
    pub fn of_log(&self, seconds: f64) -> f64 {
        let at = self.ahead.partition_point(|(from, _)| *from <= seconds);
        seconds + at.checked_sub(1).map_or(0.0, |k| self.ahead[k].1)
    }
}

#[cfg(test)]
mod tests {
    use super::TimelineEvent::*;
    use super::*;

    /// When each of ten steps was done, which take a second each.
    fn clock(events: &[(u64, f64, TimelineEvent)]) -> (Vec<f64>, Timeline) {
        let mut all = TimedEvents::default();
        events.iter().for_each(|(step, seconds, what)| all.push(TimedEvent { step: *step, seconds: *seconds, what: *what }));
        let mut elapsed = Elapsed { step: (1..=10).collect(), tokens: vec![0.0; 10], seconds: (1..=10).map(f64::from).collect() };
        let timeline = Timeline::new(&all, &elapsed);
        elapsed.follow(&timeline);
        (elapsed.seconds, timeline)
    }

    const DONE: TimelineEvent = Done { waited: 0.0 };

    #[test]
    fn without_a_log_it_is_the_sum_of_steps() {
        assert_eq!(clock(&[]).0, (1..=10).map(f64::from).collect::<Vec<_>>());
        assert_eq!(clock(&[(1, 0.0, Began)]).0, (1..=10).map(f64::from).collect::<Vec<_>>());
    }

    #[test]
    fn a_restart_and_ranks_that_load_come_before_the_next_step() {
        // The first step is done when the log begins. Step 4 is saved; ranks fail at 5 s, go on from there, and end
        // step 6 at 20 s.
        let (seconds, line) = clock(&[(1, 0.0, Began), (4, 3.0, DONE), (6, 5.0, DONE), (4, 5.5, Restarted), (6, 20.0, DONE)]);
        assert_eq!(seconds, [1.0, 2.0, 3.0, 4.0, 20.0, 21.0, 22.0, 23.0, 24.0, 25.0]);
        assert_eq!(line.of_log(5.5), 6.5);
        // The log has no time after this restart, so steps follow at once.
        assert_eq!(clock(&[(1, 0.0, Began), (4, 3.0, DONE), (4, 5.5, Restarted)]).0[3..6], [4.0, 7.5, 8.5]);
        // This run restarts from the beginning.
        assert_eq!(clock(&[(1, 0.0, Began), (0, 5.5, Restarted), (10, 19.5, DONE)]).0[..2], [10.5, 11.5]);
    }

    #[test]
    fn training_waits_behind_the_step_that_is_saved() {
        let (seconds, _) = clock(&[(1, 0.0, Began), (4, 3.0, Done { waited: 2.0 }), (6, 7.0, DONE)]);
        assert_eq!(seconds[2..8], [3.0, 4.0, 7.0, 8.0, 9.0, 10.0]);
        // The checkpoint of step 4 is complete only after step 6, and the log names step 4 twice.
        let (late, _) = clock(&[(1, 0.0, Began), (6, 7.0, DONE), (4, 3.0, DONE), (4, 3.1, Done { waited: 2.0 })]);
        assert_eq!(late, seconds);
    }

    #[test]
    fn what_is_not_said_of_is_shared_by_the_steps_between() {
        let (seconds, _) = clock(&[(1, 0.0, Began), (5, 8.0, DONE)]);
        assert_eq!(seconds[..6], [1.0, 3.0, 5.0, 7.0, 9.0, 10.0]);
    }

    #[test]
    fn a_run_that_goes_on_follows_the_one_before_at_once() {
        let (seconds, line) = clock(&[(1, 0.0, Began), (4, 3.0, DONE), (5, 3.5, Began), (10, 9.0, DONE)]);
        // Half a second passed after the fourth step; the fifth takes one, of which the log has none.
        assert_eq!(seconds[..5], [1.0, 2.0, 3.0, 4.0, 5.0]);
        assert_eq!((seconds[9], line.of_log(9.0)), (10.5, 10.5));
    }

    #[test]
    fn a_clock_that_goes_back_takes_no_time_off() {
        let (seconds, _) = clock(&[(1, 0.0, Began), (4, 3.0, Done { waited: 5.0 }), (8, 4.0, DONE)]);
        assert!(seconds.is_sorted() && seconds[9] == 11.0, "{seconds:?}");
    }

    #[test]
    fn of_many_moments_some_are_kept_and_all_restarts() {
        let mut events = TimedEvents::default();
        for step in 1..1_000_000 {
            let what = if step % 100_000 == 0 { Restarted } else { DONE };
            events.push(TimedEvent { step, seconds: step as f64, what });
        }
        let restarts = events.all.iter().filter(|m| m.what == Restarted).count();
        assert!(events.all.len() <= MOST && events.all.is_sorted_by(|a, b| a.step < b.step) && restarts == 9, "{}", events.all.len());
    }
}
