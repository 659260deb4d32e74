//! A step from its beginning to its end: what the ranks of each stage do when, and which links carry it.
//!
//! What lies closer together than a picture shows is joined, so that its size does not grow with a step's commands.

use crate::machine::Machine;
use crate::play::{Slice, record};
use crate::step::{Step, exchange_name};
use crate::tape::{BY_ITSELF, Costs, Meetings, StageTape, WorkKind};
use crate::{Deadlock, Options};
use ir::program::{Action, Call, Job, ProgramPhase, Stage};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// Pauses are joined so that all stages together have at most about so many of them, calls apart.
const SPANS: f64 = 200_000.0;
/// Parts of a step in which links are counted.
pub const BINS: usize = 400;

/// Something that a stage's rank does without a pause that could be seen.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct TimeSpan {
    /// Of [`StageLine::calls`], the call that is computed; of [`Timeline::exchanges`], what is exchanged.
    pub what: u32,
    /// In seconds from the step's beginning; a stage may be ahead of it.
    pub start: f64,
    /// Seconds from the step's beginning at which it ends.
    pub end: f64,
}

/// A call of a body, or of a part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct CallLine {
    /// The body's, by its name.
    pub kind: &'static str,
    /// The microbatch that the call is for.
    pub microbatch: u32,
    /// Of the rank's virtual stages, the one that is computed.
    pub chunk: u32,
}

/// What a rank of a stage does.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct StageLine {
    /// Those of the passes, then those of the update.
    pub calls: Vec<CallLine>,
    /// Kernels, by the calls that they are of, in the order of their beginnings.
    pub computes: Vec<TimeSpan>,
    /// What is exchanged or copied, and what the host computes.
    pub exchanges: Vec<TimeSpan>,
}

/// What goes over a link.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct LinkLine {
    /// The link's name in the machine file, `host and device`, or `disks`.
    pub name: String,
    /// In each part of the step, in which part of the time a rank uses it: mean of the stages. Streams that use it at
    /// once, as where it copies both ways, count each.
    pub busy: Vec<f64>,
}

/// What ranks of all stages do in a step.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Timeline {
    /// Pauses up to so many seconds are not shown.
    pub joined: f64,
    /// One for each pipeline stage, in order.
    pub stages: Vec<StageLine>,
    /// Names of what is exchanged, copied, or computed by the host.
    pub exchanges: Vec<String>,
    /// Those that something goes over, from the innermost, then `host and device`, then `disks`.
    pub links: Vec<LinkLine>,
}

impl Timeline {
    /// Of the step that was predicted. Each slice of what stages do is told, as [`record`] tells it.
    ///
    /// # Errors
    /// As [`play`](crate::play::play).
    pub fn of(job: &Job, machine: &Machine, options: Options, step: &Step, each: &mut dyn FnMut(&Slice)) -> Result<Timeline, Deadlock> {
        let mut gather = Gather::new(job, machine, options, step);
        record(job, machine, options, step.number, &mut |slice| {
            gather.add(&slice);
            each(&slice);
        })?;
        Ok(gather.done())
    }
}

/// Names of what bytes pass besides the links.
const BUS: &str = "host and device";
const DISK: &str = "disks";

/// The name of what is exchanged or copied, and the link that carries it.
type Carried = (u32, Option<usize>);

struct Gather<'a> {
    job: &'a Job,
    costs: Costs<'a>,
    begin: f64,
    seconds: f64,
    out: Timeline,
    /// For each stage, body and command: what is exchanged, and over which link.
    exchanges: Vec<BTreeMap<(u32, u32), Carried>>,
    /// Copies to and from the host, those of disks, and what the host computes.
    others: [Carried; 3],
    /// For each stage, the spans that may go on: of the compute stream, and of each kind of exchange.
    computing: Vec<Option<TimeSpan>>,
    exchanging: Vec<BTreeMap<u32, TimeSpan>>,
    /// For each stage, where the calls of the update begin.
    updates: Vec<u32>,
}

impl<'a> Gather<'a> {
    fn new(job: &'a Job, machine: &'a Machine, options: Options, step: &Step) -> Gather<'a> {
        let mut costs = Costs::new(job, machine, &options);
        let mut names: Vec<String> = vec![];
        let mut number = |name: String| match names.iter().position(|n| *n == name) {
            Some(known) => known as u32,
            None => {
                names.push(name);
                names.len() as u32 - 1
            }
        };
        let (mut meetings, mut exchanges) = (Meetings::default(), vec![]);
        for (s, stage) in job.stages.iter().enumerate() {
            let program = &job.programs[stage.program as usize];
            let tape = StageTape::new(&mut costs, s, &mut meetings, BY_ITSELF);
            let of = tape.exchanges.iter().map(|e| {
                let action = &program.bodies[e.body as usize].commands[e.command as usize].action;
                ((e.body, e.command), (number(exchange_name(job, program, action)), Some(e.cost.level())))
            });
            exchanges.push(of.collect());
        }
        let mut links: Vec<LinkLine> = machine.links.iter().map(|l| LinkLine { name: l.name.clone(), busy: vec![0.0; BINS] }).collect();
        let others = [(BUS, "copies between host and device"), (DISK, "copies of disks")].map(|(link, name)| {
            links.push(LinkLine { name: link.into(), busy: vec![0.0; BINS] });
            (number(name.into()), Some(links.len() - 1))
        });
        let others = [others[0], others[1], (number("kernels of the host".into()), None)];
        let stage = |stage: &Stage| {
            let program = &job.programs[stage.program as usize];
            let calls = stage.schedule.train.iter().chain(&stage.schedule.update);
            let line = |call: &Call| {
                let kind = program.bodies[call.body.index()].kind;
                CallLine { kind: kind.name(), microbatch: call.microbatch, chunk: kind.virtual_stage().unwrap_or(0) }
            };
            StageLine { calls: calls.map(line).collect(), ..StageLine::default() }
        };
        let stages: Vec<StageLine> = job.stages.iter().map(stage).collect();
        Gather {
            job,
            costs,
            begin: step.begin,
            seconds: step.seconds,
            exchanges,
            others,
            computing: vec![None; stages.len()],
            exchanging: vec![BTreeMap::new(); stages.len()],
            updates: job.stages.iter().map(|s| s.schedule.train.len() as u32).collect(),
            out: Timeline { joined: step.seconds * stages.len() as f64 / SPANS, stages, exchanges: names, links },
        }
    }

    fn add(&mut self, slice: &Slice) {
        let (s, job) = (slice.stage, self.job);
        let call = call(job, slice);
        let action = &job.programs[job.stages[s].program as usize].bodies[call.body.index()].commands[slice.last as usize].action;
        let (start, end) = (slice.start - self.begin, slice.end - self.begin);
        let exchange = match action {
            Action::Collective { .. } | Action::Recv { .. } => self.exchanges[s].get(&(call.body.index() as u32, slice.last)).copied(),
            // A message is shown for its receiver.
            Action::Send { .. } => return,
            _ => match self.costs.work(s, action).0 {
                WorkKind::Copy => Some(self.others[0]),
                WorkKind::Disk => Some(self.others[1]),
                WorkKind::Device => None,
                WorkKind::Host => Some(self.others[2]),
                WorkKind::Exchange | WorkKind::Gap | WorkKind::Wake => return,
            },
        };
        let Some((what, link)) = exchange else {
            let what = slice.call + if slice.phase == ProgramPhase::Update { self.updates[s] } else { 0 };
            join(&mut self.computing[s], TimeSpan { what, start, end }, self.out.joined, &mut self.out.stages[s].computes);
            return;
        };
        if let Some(link) = link {
            self.count(link, start, end);
        }
        let (open, spans) = (&mut self.exchanging[s], &mut self.out.stages[s].exchanges);
        let mut before = open.remove(&what);
        join(&mut before, TimeSpan { what, start, end }, self.out.joined, spans);
        open.extend(before.map(|span| (what, span)));
    }

    /// Counts the use of a link by a rank of a stage.
    fn count(&mut self, link: usize, start: f64, end: f64) {
        let (width, ranks) = (self.seconds / BINS as f64, self.out.stages.len() as f64);
        // What begins before the step or goes on behind it does so once in each step, so it wraps around.
        let bin = |at: f64| (at / width).floor() as i64;
        for k in bin(start)..=bin(end) {
            let within = (end.min((k + 1) as f64 * width) - start.max(k as f64 * width)).max(0.0);
            self.out.links[link].busy[k.rem_euclid(BINS as i64) as usize] += within / width / ranks;
        }
    }

    fn done(mut self) -> Timeline {
        for (s, stage) in self.out.stages.iter_mut().enumerate() {
            stage.computes.extend(self.computing[s]);
            stage.exchanges.extend(self.exchanging[s].values());
            for spans in [&mut stage.computes, &mut stage.exchanges] {
                spans.sort_by(|a, b| a.start.total_cmp(&b.start));
            }
        }
        self.out.links.retain(|l| l.busy.iter().any(|b| *b > 0.0));
        // Only exchanges that occur keep their names.
        let used: BTreeSet<u32> = self.out.stages.iter().flat_map(|s| &s.exchanges).map(|span| span.what).collect();
        let numbers: BTreeMap<u32, u32> = used.iter().copied().zip(0..).collect();
        self.out.stages.iter_mut().flat_map(|s| &mut s.exchanges).for_each(|span| span.what = numbers[&span.what]);
        self.out.exchanges = used.iter().map(|k| std::mem::take(&mut self.out.exchanges[*k as usize])).collect();
        self.out
    }
}

/// Goes on with a span, or ends it and begins another one.
fn join(open: &mut Option<TimeSpan>, new: TimeSpan, joined: f64, ended: &mut Vec<TimeSpan>) {
    match open {
        // Spans come in the order of their ends.
        Some(span) if span.what == new.what && new.start - span.end <= joined => {
            (span.start, span.end) = (span.start.min(new.start), span.end.max(new.end));
        }
        _ => ended.extend(open.replace(new)),
    }
}

/// The call that a slice is of.
pub fn call<'a>(job: &'a Job, slice: &Slice) -> &'a Call {
    &job.stages[slice.stage].schedule.calls(slice.phase)[slice.call as usize]
}

/// The commands of a slice, each with its part of the slice's time.
pub fn shares(job: &Job, costs: &Costs<'_>, slice: &Slice) -> Vec<(u32, f64)> {
    let stage = &job.stages[slice.stage];
    let body = &job.programs[stage.program as usize].bodies[call(job, slice).body.index()];
    let own: Vec<(u32, f64)> = (slice.first..=slice.last)
        .map(|at| (at, &body.commands[at as usize]))
        .filter(|(_, c)| c.stream == slice.stream && c.predicate.is_none())
        .map(|(at, c)| (at, if slice.first == slice.last { 1.0 } else { costs.work(slice.stage, &c.action).1.seconds() }))
        .filter(|c| c.1 > 0.0)
        .collect();
    let all: f64 = own.iter().map(|c| c.1).sum();
    own.into_iter().map(|(at, seconds)| (at, seconds / all)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_near_is_one_whatever_ends_first() {
        let span = |what, start, end| TimeSpan { what, start, end };
        let (mut open, mut ended) = (None, vec![]);
        for new in [span(0, 5.0, 6.0), span(0, 2.0, 7.0), span(0, 7.5, 8.0), span(0, 10.0, 11.0), span(1, 11.0, 12.0)] {
            join(&mut open, new, 1.0, &mut ended);
        }
        assert_eq!((ended, open), (vec![span(0, 2.0, 8.0), span(0, 10.0, 11.0)], Some(span(1, 11.0, 12.0))));
    }
}
