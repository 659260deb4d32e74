//! Time by kernel and communication, against what the machine can do.

use super::breakdown::{Breakdown, ProfileRow, Rate, TimeShare};
use super::named::NamedCommands;
use super::{Ceilings, Profile};
use crate::executor::CommandOrder;
use ir::program::ProgramPhase;
use ir::program::{Action, Job, Stream};
use ir::work::Work;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// Equal commands of a stream.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// The stream that runs them.
    pub stream: Stream,
    /// What they do, with sizes: `dot 1024x3072x768, add, tanh`.
    pub name: String,
    /// The kernel's symbol.
    pub symbol: Option<String>,
    /// Which bodies they are part of: `forward`, `backward`.
    pub bodies: BTreeSet<&'static str>,
    /// Places in the model's text.
    pub places: String,
    /// Of one call.
    pub work: Work,
    /// Time of each call on each rank, in nanoseconds, ascending.
    pub times: Vec<u64>,
    /// Nanoseconds of each rank that has it.
    pub ranks: BTreeMap<u64, u64>,
}

impl Row {
    /// Nanoseconds of all calls on all ranks.
    pub fn total(&self) -> u64 {
        self.times.iter().sum()
    }

    /// Median time of the calls; for an even number of them, the later of the two in the middle.
    pub fn median(&self) -> u64 {
        self.times.get(self.times.len() / 2).copied().unwrap_or(0)
    }
}

/// Where the time of the steps went that were timed.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    /// The most time first.
    pub rows: Vec<Row>,
    /// Per rank: nanoseconds of all its steps, and of these, those in which its own threads waited.
    pub ranks: Vec<(u64, u64)>,
    /// Numbers of the first step and of the last.
    pub steps: (u64, u64),
}

/// Whether a rank's own threads do it, and not others beside them.
pub fn is_own(profile: &Profile, stream: Stream) -> bool {
    stream == Stream::Compute || profile.order == CommandOrder::List
}

impl Table {
    /// Adds up the commands of all timed steps; evaluations, records and waits have no rows.
    pub fn new(job: &Job, profile: &Profile) -> Table {
        let names = NamedCommands::new(job);
        let mut rows: BTreeMap<_, (Row, BTreeSet<(u16, u32)>)> = BTreeMap::new();
        let mut ranks = vec![];
        for (rank, recorded) in (0..).zip(&profile.ranks) {
            let mut waited = 0;
            for ran in recorded.ran.iter().filter(|r| r.at.phase != ProgramPhase::Eval) {
                let Some((_, command, named)) = names.at(rank, ran.at) else { continue };
                match command.action {
                    Action::Record { .. } => continue,
                    Action::Wait { .. } => {
                        waited += if is_own(profile, command.stream) { ran.time } else { 0 };
                        continue;
                    }
                    _ => {}
                }
                // Other commands of the same name are told apart by the bytes that they move and the lines that they
                // are for.
                let wanted = named.kernel.is_none().then_some((named.work.bytes, &named.lines));
                let (row, lines) = rows.entry((command.stream, named.kernel, &named.name, wanted)).or_insert_with(|| {
                    let symbol = named.kernel.map(|k| job.kernels[k.index()].name());
                    let (stream, name, work) = (command.stream, named.name.clone(), named.work);
                    let (bodies, places, ranks) = (BTreeSet::new(), String::new(), BTreeMap::new());
                    (Row { stream, name, symbol, bodies, places, work, times: vec![], ranks }, BTreeSet::new())
                });
                lines.extend(&named.lines);
                row.bodies.insert(named.body.name());
                row.times.push(ran.time);
                *row.ranks.entry(rank).or_default() += ran.time;
            }
            ranks.push((recorded.steps.iter().map(|s| s.end - s.start).sum(), waited));
        }
        let mut rows: Vec<Row> = rows.into_values().map(|(row, lines)| Row { places: names.places(&lines), ..row }).collect();
        rows.iter_mut().for_each(|r| r.times.sort_unstable());
        rows.sort_by_key(|r| std::cmp::Reverse(r.total()));
        let numbers = || profile.ranks.iter().flat_map(|r| &r.steps).map(|s| s.step);
        Table { rows, ranks, steps: (numbers().min().unwrap_or(0), numbers().max().unwrap_or(0)) }
    }
}

/// Which ceiling is nearer to what a kernel has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Bound {
    /// The ceiling of arithmetic.
    Compute,
    /// The ceiling of memory.
    Memory,
}

impl Bound {
    /// The word for it in tables: `compute` or `memory`.
    pub fn name(self) -> &'static str {
        match self {
            Bound::Compute => "compute",
            Bound::Memory => "memory",
        }
    }
}

impl Row {
    /// Of a kernel: with all arithmetic at the one ceiling and all bytes at the other, which takes longer.
    pub fn bound(&self, ceilings: &Ceilings) -> Option<Bound> {
        self.symbol.as_ref()?;
        let compute = self.work.flops as f64 / ceilings.flops > self.work.bytes as f64 / ceilings.bytes;
        Some(if compute { Bound::Compute } else { Bound::Memory })
    }
}

/// The table for people.
pub fn text(breakdown: &Breakdown) -> String {
    let share = |p: &TimeShare| format!("{:>5.1} %", 100.0 * p.share);
    let (first, last) = breakdown.steps;
    let mut out = format!("profile of steps {first} to {last}, {} ranks\n", breakdown.ranks);
    if let Some(c) = breakdown.ceilings {
        let _ = writeln!(out, "ceilings of a rank's threads: {:.1} GFLOP/s in f32, {:.1} GB/s", c.flops / 1e9, c.bytes / 1e9);
    }
    let _ = writeln!(out, "{HEAD}");
    let line = |out: &mut String, row: &ProfileRow| {
        let of = |rate: &Option<Rate>| match rate {
            None => format!("{:>8} {:>5}", "", ""),
            Some(Rate { per_second, of_peak: Some(part) }) => format!("{per_second:>8.1} {:>3.0} %", 100.0 * part),
            Some(Rate { per_second, of_peak: None }) => format!("{per_second:>8.1} {:>5}", ""),
        };
        let bound = row.bound.map_or("", Bound::name);
        let bodies = row.bodies.join(", ");
        let rest = [row.places.as_str(), bodies.as_str(), row.symbol.as_deref().unwrap_or("")].into_iter().filter(|t| !t.is_empty());
        let what = std::iter::once(row.name.as_str()).chain(rest).collect::<Vec<_>>().join("; ");
        let calls = format!("{:.1}", row.calls);
        let (calls, median) = (calls.trim_end_matches(".0"), row.median_ms);
        let (flops, bytes) = (of(&row.arithmetic), of(&row.memory));
        let _ = writeln!(out, "{} {:>9.3} {calls:>7} {median:>9.4} {flops} {bytes} {bound:<7}  {what}", share(&row.part), row.part.ms);
    };
    breakdown.own.iter().for_each(|row| line(&mut out, row));
    let mut sum = |part: &TimeShare, what: &str| {
        let _ = writeln!(out, "{} {:>9.3} {:>55}  {what}", share(part), part.ms, "");
    };
    let end = |(rank, part): (u64, f64)| format!("{:.1} % on rank {rank}", 100.0 * part);
    let ends = breakdown.waits.map_or(String::new(), |(least, most)| format!("{} to {}", end(least), end(most)));
    sum(&breakdown.waiting, &format!("waiting for communication, other streams and ranks: {ends}"));
    sum(&breakdown.between, "between commands: data, threads that start, the phases' ends");
    sum(&breakdown.whole, "the whole step");
    if let Some((arithmetic, memory)) = &breakdown.bound {
        sum(arithmetic, "in kernels bound by arithmetic");
        sum(memory, "in kernels bound by memory");
    }
    if !breakdown.beside.is_empty() {
        out += "beside it, waiting for other ranks included\n";
        breakdown.beside.iter().for_each(|row| line(&mut out, row));
    }
    out
}

const HEAD: &str = "  share   ms/step   calls median ms  GFLOP/s  peak     GB/s  peak bound    what";
