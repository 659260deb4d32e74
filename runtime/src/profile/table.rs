//! Time by kernel and communication, against what the machine can do.

use super::named::Names;
use super::{Ceilings, Profile};
use crate::executor::Order;
use ir::program::Phase;
use ir::program::{Action, Job, Stream};
use ir::work::Work;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// Equal commands of a stream.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    pub stream: Stream,
    pub name: String,
    /// The kernel's symbol.
    pub symbol: Option<String>,
    /// Which bodies they are part of: `forward`, `backward`.
    pub bodies: BTreeSet<&'static str>,
    /// Of the model's text.
    pub places: String,
    /// Of one call.
    pub work: Work,
    /// Of each call on each rank, in nanoseconds; ascending.
    pub times: Vec<u64>,
}

impl Row {
    pub fn total(&self) -> u64 {
        self.times.iter().sum()
    }

    /// Of an even number of calls, the later of the two in the middle.
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
fn is_own(profile: &Profile, stream: Stream) -> bool {
    stream == Stream::Compute || profile.order == Order::List
}

impl Table {
    pub fn new(job: &Job, profile: &Profile) -> Table {
        let names = Names::new(job);
        let mut rows: BTreeMap<_, (Row, BTreeSet<(u16, u32)>)> = BTreeMap::new();
        let mut ranks = vec![];
        for (rank, recorded) in (0..).zip(&profile.ranks) {
            let mut waited = 0;
            for ran in recorded.ran.iter().filter(|r| r.at.phase != Phase::Eval) {
                let Some((_, command, named)) = names.at(rank, ran.at) else { continue };
                match command.action {
                    Action::Record { .. } => continue,
                    Action::Wait { .. } => {
                        waited += if is_own(profile, command.stream) { ran.time } else { 0 };
                        continue;
                    }
                    _ => {}
                }
                // Other commands that are called the same are told apart by what they move, and for which line.
                let wanted = named.kernel.is_none().then_some((named.work.bytes, &named.lines));
                let (row, lines) = rows.entry((command.stream, named.kernel, &named.name, wanted)).or_insert_with(|| {
                    let symbol = named.kernel.map(|k| job.kernels[k.index()].name());
                    let (stream, name, work) = (command.stream, named.name.clone(), named.work);
                    (Row { stream, name, symbol, bodies: BTreeSet::new(), places: String::new(), work, times: vec![] }, BTreeSet::new())
                });
                lines.extend(&named.lines);
                row.bodies.insert(named.body.name());
                row.times.push(ran.time);
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    Compute,
    Memory,
}

impl Row {
    /// Of a kernel: with all arithmetic at the one ceiling and all bytes at the other, which takes longer.
    pub fn bound(&self, ceilings: &Ceilings) -> Option<Bound> {
        self.symbol.as_ref()?;
        let compute = self.work.flops as f64 / ceilings.flops > self.work.bytes as f64 / ceilings.bytes;
        Some(if compute { Bound::Compute } else { Bound::Memory })
    }
}

/// The table for people. Shares are of all ranks' steps; those of what a rank's own threads do and wait for add up to the whole.
pub fn text(job: &Job, profile: &Profile) -> String {
    let table = Table::new(job, profile);
    let ranks = table.ranks.len().max(1) as f64;
    let steps = profile.ranks.iter().map(|r| r.steps.len()).max().unwrap_or(0).max(1) as f64;
    let whole: u64 = table.ranks.iter().map(|r| r.0).sum();
    let share = |time: u64| format!("{:>5.1} %", 100.0 * time as f64 / whole.max(1) as f64);
    let mean = |time: u64| format!("{:>9.3}", time as f64 / 1e6 / ranks / steps);
    let (first, last) = table.steps;
    let mut out = format!("profile of steps {first} to {last}, {} ranks\n", table.ranks.len());
    if let Some(c) = profile.ceilings {
        let _ = writeln!(out, "ceilings of a rank's threads: {:.1} GFLOP/s in f32, {:.1} GB/s", c.flops / 1e9, c.bytes / 1e9);
    }
    let _ = writeln!(out, "{HEAD}");
    let (own, beside): (Vec<&Row>, Vec<&Row>) = table.rows.iter().partition(|r| is_own(profile, r.stream));
    let line = |out: &mut String, row: &Row| {
        let of = |amount: u64, ceiling: Option<f64>| {
            let rate = amount as f64 / row.median().max(1) as f64;
            match (amount, ceiling) {
                (0, _) => format!("{:>8} {:>5}", "", ""),
                (_, Some(ceiling)) => format!("{rate:>8.1} {:>3.0} %", 100.0 * rate * 1e9 / ceiling),
                (_, None) => format!("{rate:>8.1} {:>5}", ""),
            }
        };
        // Of communication, the bytes sent are not those that memory sees.
        let memory = profile.ceilings.filter(|_| row.symbol.is_some()).map(|c| c.bytes);
        let bound = match profile.ceilings.and_then(|c| row.bound(&c)) {
            Some(Bound::Compute) => "compute",
            Some(Bound::Memory) => "memory",
            None => "",
        };
        let bodies = row.bodies.iter().copied().collect::<Vec<_>>().join(", ");
        let rest = [row.places.as_str(), bodies.as_str(), row.symbol.as_deref().unwrap_or("")].into_iter().filter(|t| !t.is_empty());
        let what = std::iter::once(row.name.as_str()).chain(rest).collect::<Vec<_>>().join("; ");
        let calls = format!("{:.1}", row.times.len() as f64 / steps);
        let calls = calls.trim_end_matches(".0");
        let (median, flops) = (row.median() as f64 / 1e6, of(row.work.flops, profile.ceilings.map(|c| c.flops)));
        let _ = writeln!(
            out,
            "{} {} {calls:>7} {median:>9.4} {flops} {} {bound:<7}  {what}",
            share(row.total()),
            mean(row.total()),
            of(row.work.bytes, memory)
        );
    };
    own.iter().for_each(|row| line(&mut out, row));
    let waited: u64 = table.ranks.iter().map(|r| r.1).sum();
    let rest = whole.saturating_sub(waited + own.iter().map(|r| r.total()).sum::<u64>());
    let mut sum = |time: u64, what: &str| {
        let _ = writeln!(out, "{} {} {:>55}  {what}", share(time), mean(time), "");
    };
    let part = |(whole, waited): &(u64, u64)| 100.0 * *waited as f64 / (*whole).max(1) as f64;
    let of_rank = || table.ranks.iter().map(part).enumerate();
    let ends = [of_rank().min_by(|a, b| a.1.total_cmp(&b.1)), of_rank().max_by(|a, b| a.1.total_cmp(&b.1))];
    let ends = ends.into_iter().flatten().map(|(rank, part)| format!("{part:.1} % on rank {rank}")).collect::<Vec<_>>().join(" to ");
    sum(waited, &format!("waiting for communication, other streams and ranks: {ends}"));
    sum(rest, "between commands: data, threads that start, the phases' ends");
    sum(whole, "the whole step");
    for (bound, what) in [(Bound::Compute, "in kernels bound by arithmetic"), (Bound::Memory, "in kernels bound by memory")] {
        let kernels = own.iter().filter(|r| profile.ceilings.and_then(|c| r.bound(&c)) == Some(bound));
        if profile.ceilings.is_some() {
            sum(kernels.map(|r| r.total()).sum(), what);
        }
    }
    if !beside.is_empty() {
        out += "beside it, waiting for other ranks included\n";
        beside.iter().for_each(|row| line(&mut out, row));
    }
    out
}

const HEAD: &str = "  share   ms/step   calls median ms  GFLOP/s  peak     GB/s  peak bound    what";
