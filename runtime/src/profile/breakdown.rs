//! Where the time of the steps went that were timed, in figures: what the table of a profile prints, and a
//! report draws.

use super::table::{Bound, Row, Table, is_own};
use super::{Ceilings, Profile};
use ir::program::Job;
use serde::{Deserialize, Serialize};

/// Shares are of all ranks' steps. Those of what a rank's own threads do, wait for and do between commands add
/// up to the whole.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Breakdown {
    /// Numbers of the first step and of the last.
    pub steps: (u64, u64),
    /// How many ranks the job has.
    pub ranks: u64,
    /// Of a rank's threads; of CPUs alone.
    pub ceilings: Option<Ceilings>,
    /// What a rank's own threads do, the most time first.
    pub own: Vec<ProfileRow>,
    /// Time in which ranks' own threads wait for communication, other streams and other ranks.
    pub waiting: TimeShare,
    /// The ranks that wait least and most, each with the share of its own steps.
    pub waits: Option<((u64, f64), (u64, f64))>,
    /// Time between commands: data, threads that start, the phases' ends.
    pub between: TimeShare,
    /// Time of whole steps, of which shares are parts.
    pub whole: TimeShare,
    /// Of a rank's own threads, in kernels bound by arithmetic and in those bound by memory, where the ceilings
    /// are known.
    pub bound: Option<(TimeShare, TimeShare)>,
    /// What other streams do meanwhile.
    pub beside: Vec<ProfileRow>,
}

/// A part of the time of all ranks' steps.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TimeShare {
    /// From 0 to 1.
    pub share: f64,
    /// Milliseconds of a step, mean over steps and ranks.
    pub ms: f64,
}

/// Equal commands of a stream.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProfileRow {
    /// What the command does, with sizes: `dot 1024x3072x768, add, tanh`.
    pub name: String,
    /// Of the model's text.
    pub places: String,
    /// Which bodies they are part of.
    pub bodies: Vec<String>,
    /// The kernel's symbol.
    pub symbol: Option<String>,
    /// Time of all its calls.
    pub part: TimeShare,
    /// Calls of a step, of all ranks together.
    pub calls: f64,
    /// Median time of a call, in milliseconds.
    pub median_ms: f64,
    /// Operations of products and attention; none if it has none.
    pub arithmetic: Option<Rate>,
    /// Bytes of its operands, or bytes that are sent; none if there are none.
    pub memory: Option<Rate>,
    /// The ceiling that limits a kernel; none of other commands, or where ceilings are not known.
    pub bound: Option<Bound>,
    /// Of the ranks that have it, those that take least and most, each with milliseconds of a step.
    pub ranks: Option<((u64, f64), (u64, f64))>,
}

/// What a call does, over its median time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rate {
    /// GFLOP or GB a second.
    pub per_second: f64,
    /// Of the ceiling, where that is known.
    pub of_peak: Option<f64>,
}

impl Rate {
    fn new(amount: u64, nanoseconds: u64, ceiling: Option<f64>) -> Option<Rate> {
        let per_second = amount as f64 / nanoseconds.max(1) as f64;
        (amount > 0).then(|| Rate { per_second, of_peak: ceiling.map(|c| per_second * 1e9 / c) })
    }
}

impl Breakdown {
    /// The figures of a profile of this job.
    pub fn new(job: &Job, profile: &Profile) -> Breakdown {
        let table = Table::new(job, profile);
        let steps = profile.ranks.iter().map(|r| r.steps.len()).max().unwrap_or(0).max(1) as f64;
        let whole: u64 = table.ranks.iter().map(|r| r.0).sum();
        let waited: u64 = table.ranks.iter().map(|r| r.1).sum();
        let ranks = table.ranks.len().max(1) as f64;
        let part = |time: u64| TimeShare { share: time as f64 / whole.max(1) as f64, ms: time as f64 / 1e6 / ranks / steps };
        let line = |row: &&Row| {
            // Bytes of communication are those that are sent, not those that memory moves.
            let memory = profile.ceilings.filter(|_| row.symbol.is_some()).map(|c| c.bytes);
            ProfileRow {
                name: row.name.clone(),
                places: row.places.clone(),
                bodies: row.bodies.iter().map(|b| b.to_string()).collect(),
                symbol: row.symbol.clone(),
                part: part(row.total()),
                calls: row.times.len() as f64 / steps,
                median_ms: row.median() as f64 / 1e6,
                arithmetic: Rate::new(row.work.flops, row.median(), profile.ceilings.map(|c| c.flops)),
                memory: Rate::new(row.work.bytes, row.median(), memory),
                bound: profile.ceilings.and_then(|c| row.bound(&c)),
                ranks: ends(row.ranks.iter().map(|(rank, time)| (*rank, *time as f64 / 1e6 / steps))),
            }
        };
        let (own, beside): (Vec<&Row>, Vec<&Row>) = table.rows.iter().partition(|r| is_own(profile, r.stream));
        let bound = |bound: Bound| {
            let kernels = own.iter().filter(|r| profile.ceilings.and_then(|c| r.bound(&c)) == Some(bound));
            part(kernels.map(|r| r.total()).sum())
        };
        let busy: u64 = own.iter().map(|r| r.total()).sum();
        Breakdown {
            steps: table.steps,
            ranks: table.ranks.len() as u64,
            ceilings: profile.ceilings,
            waiting: part(waited),
            waits: ends((0..).zip(&table.ranks).map(|(rank, (whole, waited))| (rank, *waited as f64 / (*whole).max(1) as f64))),
            between: part(whole.saturating_sub(waited + busy)),
            whole: part(whole),
            bound: profile.ceilings.map(|_| (bound(Bound::Compute), bound(Bound::Memory))),
            own: own.iter().map(line).collect(),
            beside: beside.iter().map(line).collect(),
        }
    }
}

/// The least and the most, each with its rank.
fn ends(of_ranks: impl Iterator<Item = (u64, f64)> + Clone) -> Option<((u64, f64), (u64, f64))> {
    let least = of_ranks.clone().min_by(|a, b| a.1.total_cmp(&b.1))?;
    Some((least, of_ranks.max_by(|a, b| a.1.total_cmp(&b.1))?))
}
