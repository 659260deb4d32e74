//! How long an exchange takes by itself.
//!
//! Ranks that follow each other are joined by levels of links. A ring through all members of a group leaves each
//! block of a level by the links of all its members there, as NCCL's rings do, one for each adapter; so the slowest
//! level that it passes says how fast its bytes go. Beside its bytes an exchange takes a latency, and one for each
//! step from rank to rank: of rings, or, for sums, of trees where these are shorter.
//!
//! Ranks on CPUs exchange through memory that they share, as `runtime/src/shm` does it: each copies in what it gives,
//! chunk by chunk, and adds up or copies out what is there of the others. So it is the bytes that a rank's core goes
//! through that take the time, and each chunk that they wait for each other.

use crate::cost::{Cause, Cost};
use crate::machine::Machine;
use ir::op::Collective;

/// How a group's members lie on a machine's levels of links.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Reach {
    /// For each level, the most members of a block that the level joins.
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

    /// The members of one block that are joined below a level.
    fn below(&self, level: usize) -> u64 {
        level.checked_sub(1).map_or(1, |k| self.within[k])
    }

    /// The levels that the group's rings pass.
    fn passed(&self) -> impl Iterator<Item = usize> + '_ {
        (0..=self.top()).filter(|k| self.within[*k] > self.below(*k))
    }
}

fn rate(machine: &Machine, level: usize) -> f64 {
    let link = &machine.links[level];
    link.bytes_per_second.value * link.efficiency.value
}

/// A collective whose parts are of so many bytes ([`Collective::parts`]).
pub fn collective(machine: &Machine, kind: Collective, reach: &Reach, part: u64) -> Cost {
    if reach.members < 2 {
        return Cost::default();
    }
    if machine.is_cpu() {
        return in_shared_memory(machine, kind, reach.members, part);
    }
    let (top, bytes) = (reach.top(), kind.sent(part, reach.members) as f64);
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
        // A rank sends to each member separately.
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

/// Bytes that a member stages at a time, and those of a chunk from which on more than two members sum a part each: a
/// test holds these, and [`PIECE`], to `runtime/src/shm`.
pub const CHUNK: u64 = 256 << 10;
/// Least bytes of a chunk of which more than two members sum a part each.
pub const APART: u64 = 64 << 10;
/// Bytes of a message that are copied before the other end is told.
pub const PIECE: u64 = 64 << 10;

/// Chunks of a collective among ranks on CPUs.
pub fn chunks(kind: Collective, members: u64, part: u64) -> u64 {
    (part * kind.parts(members).0).div_ceil(CHUNK).max(1)
}

fn in_shared_memory(machine: &Machine, kind: Collective, members: u64, part: u64) -> Cost {
    let (gives, gets) = kind.parts(members);
    let (given, got) = (part * gives, part * gets);
    let summed = match kind {
        Collective::AllReduce(_) if members > 2 && part.min(CHUNK) >= APART => part + part / members,
        Collective::AllReduce(_) | Collective::ReduceScatter(_) => members * part,
        Collective::AllGather | Collective::AllToAll | Collective::Shift => 0,
    };
    let link = &machine.links[0];
    let copied = Cost::new(Cause::Bytes(0), (given + summed + got) as f64 / rate(machine, 0));
    copied.and(Cause::Latency(0), link.latency.value).and(Cause::Hop(0), chunks(kind, members, part) as f64 * link.hop.value)
}

/// A message from rank to rank: of CPUs, what each end of it copies.
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

    /// A machine with 300 GB/s among 8 ranks, and 25 GB/s of each rank beyond, all of which is reached.
    fn machine() -> Machine {
        let mut machine = Machine::named("a100-80g-dgx").expect("a machine");
        for (link, rate) in machine.links.iter_mut().zip([300e9, 25e9]) {
            (link.bytes_per_second.value, link.efficiency.value, link.latency.value, link.hop.value) = (rate, 1.0, 0.0, 0.0);
        }
        machine
    }

    /// Of which a rank sends so many bytes, or some less, as parts are whole: to the microsecond.
    fn seconds(kind: Collective, ranks: &[u64], sent: u64) -> f64 {
        let machine = machine();
        let one = kind.sent(1 << 20, ranks.len() as u64).max(1);
        let part = (u128::from(sent) * (1 << 20) / u128::from(one)) as u64;
        (collective(&machine, kind, &Reach::of(&machine, ranks), part).seconds() * 1e6).round() / 1e6
    }

    #[test]
    fn a_ring_is_as_fast_as_the_slowest_level_that_it_passes() {
        let sum = Collective::AllReduce(Reduce::Sum);
        let all = |n: u64, step: usize| (0..n).step_by(step).collect::<Vec<u64>>();
        assert_eq!(seconds(sum, &all(8, 1), 300_000_000_000), 1.0);
        // One group has one rank of each machine. The other has all ranks of two machines, whose eight adapters give
        // 200 GB/s.
        assert_eq!(seconds(sum, &all(64, 8), 25_000_000_000), 1.0);
        assert_eq!(seconds(Collective::AllGather, &all(16, 1), 200_000_000_000), 1.0);
        assert_eq!(seconds(sum, &[3], 1 << 40), 0.0);
    }

    #[test]
    fn what_goes_to_each_member_takes_the_links_between_the_two() {
        let ranks: Vec<u64> = (0..16).collect();
        // 8 of 15 parts leave the machine, at 25 GB/s for each rank.
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

    #[test]
    fn ranks_on_cpus_take_the_bytes_that_each_copies_and_adds_up() {
        let mut machine = Machine::named("cpu").expect("a machine");
        let link = &mut machine.links[0];
        (link.bytes_per_second.value, link.efficiency.value, link.latency.value, link.hop.value) = (1e6, 1.0, 0.0, 0.0);
        let copied = |machine: &Machine, kind, members: u64, part| {
            let ranks: Vec<u64> = (0..members).collect();
            (collective(machine, kind, &Reach::of(machine, &ranks), part).seconds() * 1e6).round() as u64
        };
        let sum = Collective::AllReduce(Reduce::Sum);
        // Two ranks copy in, add up both and copy out. Three or more each add up a part, which is copied in once
        // more.
        assert_eq!([copied(&machine, sum, 2, 1 << 20), copied(&machine, sum, 4, 1 << 20)], [4 << 20, (3 << 20) + (1 << 18)]);
        assert_eq!(copied(&machine, sum, 4, 1 << 10), 6 << 10, "small ones are added up by all");
        assert_eq!(copied(&machine, Collective::AllGather, 4, 1 << 20), 5 << 20);
        assert_eq!(copied(&machine, Collective::ReduceScatter(Reduce::Sum), 4, 1 << 20), 9 << 20);
        assert_eq!(copied(&machine, Collective::AllToAll, 4, 1 << 20), 8 << 20);
        assert_eq!(copied(&machine, Collective::Shift, 4, 1 << 20), 2 << 20);
        machine.links[0].bytes_per_second.value = 1e20;
        (machine.links[0].latency.value, machine.links[0].hop.value) = (100.0, 1.0);
        assert_eq!(copied(&machine, sum, 2, 1 << 20), 104_000_000, "a start, and four chunks");
    }
}
