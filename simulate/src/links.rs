//! How long an exchange takes by itself.
//!
//! Ranks that follow each other are joined by levels of links. A ring through all members of a group leaves each
//! block of a level by the links of all its members there, as NCCL's rings do, one for each adapter; so the slowest
//! level that it passes says how fast its bytes go. Beside its bytes an exchange takes a latency, and one for each
//! step from rank to rank: of rings, or, for sums, of trees where these are shorter.

use crate::cost::{Cause, Cost};
use crate::machine::Machine;
use ir::op::Collective;

/// How a group's members lie on a machine's levels of links.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Reach {
    /// For each level, the most members of a block that it joins.
    within: Vec<u64>,
    members: u64,
}

impl Reach {
    /// Of ranks in ascending order.
    pub fn of(machine: &Machine, ranks: &[u64]) -> Reach {
        let of_level = |size: Option<u64>| {
            let Some(size) = size else { return ranks.len() as u64 };
            ranks.chunk_by(|a, b| a / size == b / size).map(|block| block.len() as u64).max().unwrap_or(0)
        };
        Reach { within: machine.links.iter().map(|l| of_level(l.members)).collect(), members: ranks.len() as u64 }
    }

    /// The level that joins all members.
    pub fn top(&self) -> usize {
        self.within.iter().position(|n| *n == self.members).unwrap_or(self.within.len() - 1)
    }

    /// Members that are joined below a level, of one block.
    fn below(&self, level: usize) -> u64 {
        level.checked_sub(1).map_or(1, |k| self.within[k])
    }

    /// Levels that its rings pass.
    fn passed(&self) -> impl Iterator<Item = usize> + '_ {
        (0..=self.top()).filter(|k| self.within[*k] > self.below(*k))
    }
}

fn rate(machine: &Machine, level: usize) -> f64 {
    let link = &machine.links[level];
    link.bytes_per_second.value * link.efficiency.value
}

/// A collective, of which a rank sends so many bytes.
pub fn collective(machine: &Machine, kind: Collective, reach: &Reach, sent: u64) -> Cost {
    if reach.members < 2 {
        return Cost::default();
    }
    let (top, bytes) = (reach.top(), sent as f64);
    let slowest = match kind {
        Collective::AllReduce(_) | Collective::AllGather | Collective::ReduceScatter(_) => {
            let each = |k: usize| match &machine.links[k].switched_sums {
                Some(sums) if matches!(kind, Collective::AllReduce(_)) && machine.links[k].members == Some(reach.within[k]) => {
                    (bytes / (machine.links[k].bytes_per_second.value * sums.value), Cause::Switched(k as u8))
                }
                _ => (bytes / (rate(machine, k) * reach.below(k) as f64), Cause::Bytes(k as u8)),
            };
            reach.passed().map(each).max_by(|a, b| a.0.total_cmp(&b.0))
        }
        // A rank sends to each member by itself.
        Collective::AllToAll => {
            let to = |k: usize| bytes * (reach.within[k] - reach.below(k)) as f64 / (reach.members - 1) as f64;
            reach.passed().map(|k| (to(k) / rate(machine, k), Cause::Bytes(k as u8))).max_by(|a, b| a.0.total_cmp(&b.0))
        }
        Collective::Shift => Some((bytes / rate(machine, top), Cause::Bytes(top as u8))),
    };
    let (seconds, cause) = slowest.unwrap_or((0.0, Cause::Bytes(top as u8)));
    let steps = |of: &dyn Fn(usize) -> f64| {
        let each = reach.passed().map(|k| (Cause::Hop(k as u8), of(k) * machine.links[k].hop.value));
        each.fold(Cost::default(), |sum, (cause, seconds)| sum.and(cause, seconds))
    };
    let blocks = |k: usize| reach.members.div_ceil(reach.below(k)) - reach.members.div_ceil(reach.within[k]);
    let ring = steps(&|k| blocks(k) as f64);
    let tree = steps(&|k| (reach.within[k] as f64 / reach.below(k) as f64).log2().ceil());
    let hops = match kind {
        Collective::AllReduce(_) => if tree.seconds() < ring.seconds() { tree } else { ring }.times(2.0),
        Collective::AllGather | Collective::ReduceScatter(_) => ring,
        Collective::AllToAll | Collective::Shift => Cost::new(Cause::Hop(top as u8), machine.links[top].hop.value),
    };
    Cost::new(cause, seconds).and(Cause::Latency(top as u8), machine.links[top].latency.value) + hops
}

/// A message from rank to rank.
pub fn message(machine: &Machine, from: u64, to: u64, bytes: u64) -> Cost {
    let level = Reach::of(machine, &[from.min(to), from.max(to)]).top();
    let link = &machine.links[level];
    let sent = Cost::new(Cause::Bytes(level as u8), bytes as f64 / rate(machine, level));
    sent.and(Cause::Latency(level as u8), link.latency.value).and(Cause::Hop(level as u8), link.hop.value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ir::op::Reduce;

    /// 300 GB/s among 8 ranks, 25 GB/s of each beyond, all of it reached.
    fn machine() -> Machine {
        let mut machine = Machine::named("a100-80g-dgx").expect("a machine");
        for (link, rate) in machine.links.iter_mut().zip([300e9, 25e9]) {
            (link.bytes_per_second.value, link.efficiency.value, link.latency.value, link.hop.value) = (rate, 1.0, 0.0, 0.0);
        }
        machine
    }

    fn seconds(kind: Collective, ranks: &[u64], sent: u64) -> f64 {
        let machine = machine();
        collective(&machine, kind, &Reach::of(&machine, ranks), sent).seconds()
    }

    #[test]
    fn a_ring_is_as_fast_as_the_slowest_level_that_it_passes() {
        let sum = Collective::AllReduce(Reduce::Sum);
        let all = |n: u64, step: usize| (0..n).step_by(step).collect::<Vec<u64>>();
        assert_eq!(seconds(sum, &all(8, 1), 300_000_000_000), 1.0);
        // One rank of each machine, and all of two: eight adapters each, which give 200 GB/s.
        assert_eq!(seconds(sum, &all(64, 8), 25_000_000_000), 1.0);
        assert_eq!(seconds(Collective::AllGather, &all(16, 1), 200_000_000_000), 1.0);
        assert_eq!(seconds(sum, &[3], 1 << 40), 0.0);
    }

    #[test]
    fn what_goes_to_each_member_takes_the_links_between_the_two() {
        let ranks: Vec<u64> = (0..16).collect();
        // 8 of 15 parts leave the machine, 25 GB/s each rank.
        assert_eq!(seconds(Collective::AllToAll, &ranks, 15 * 25_000_000_000), 8.0);
        assert_eq!(seconds(Collective::Shift, &ranks, 25_000_000_000), 1.0);
        let machine = machine();
        assert_eq!(message(&machine, 7, 8, 25_000_000_000).seconds(), 1.0);
        assert_eq!(message(&machine, 6, 7, 300_000_000_000).seconds(), 1.0);
    }

    #[test]
    fn steps_are_a_rings_or_a_trees() {
        let mut machine = machine();
        machine.links.iter_mut().for_each(|l| l.hop.value = 1.0);
        let ranks: Vec<u64> = (0..16).collect();
        let reach = Reach::of(&machine, &ranks);
        let hops = |kind| collective(&machine, kind, &reach, 0).seconds();
        assert_eq!(hops(Collective::AllGather), 15.0);
        assert_eq!(hops(Collective::AllReduce(Reduce::Sum)), 2.0 * 4.0);
    }
}
