//! Which tag tells what apart.

use ir::program::Channel;
use std::collections::{BTreeMap, BTreeSet};

/// Of each group two tags, for the numbers of its members and for their sums; of each channel one. Groups that have
/// no member in common may have the same, so that their number does not grow with the world.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tags {
    groups: BTreeMap<Vec<u64>, u32>,
    channels: BTreeMap<Channel, u32>,
    most: u32,
}

impl Tags {
    /// Tags of all groups and channels of a job, in the same order on every rank.
    pub fn new<'g>(groups: impl Iterator<Item = &'g Vec<u64>>, channels: impl Iterator<Item = Channel>) -> Tags {
        let mut taken: BTreeMap<u64, BTreeSet<u32>> = BTreeMap::new();
        let number = |members: &'g Vec<u64>| {
            let is_free = |n: &u32| members.iter().all(|rank| !taken.get(rank).is_some_and(|t| t.contains(n)));
            let number = (0..).find(is_free).expect("invariant: a rank is in few groups");
            for rank in members {
                taken.entry(*rank).or_default().insert(number);
            }
            (members.clone(), 2 * number)
        };
        let groups: BTreeMap<Vec<u64>, u32> = groups.map(number).collect();
        let first = groups.values().max().map_or(0, |n| n + 2);
        let channels: BTreeSet<Channel> = channels.collect();
        let channels: BTreeMap<Channel, u32> = channels.into_iter().zip(first..).collect();
        let most = (first + channels.len() as u32).saturating_sub(1);
        Tags { groups, channels, most }
    }

    /// The first of a group's two.
    pub fn of_group(&self, members: &[u64]) -> u32 {
        *self.groups.get(members).expect("invariant: every group of the job has tags")
    }

    /// The tag of a channel's messages, whatever their sender and receiver.
    pub fn of_channel(&self, channel: Channel) -> u32 {
        *self.channels.get(&channel).expect("invariant: every channel of the job has a tag")
    }

    /// The greatest.
    pub fn most(&self) -> u32 {
        self.most
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_two_ranks_exchange_is_told_apart_and_a_greater_world_needs_no_more_tags() {
        for side in [2, 30] {
            let rows = (0..side).map(|k| (0..side).map(|i| k * side + i).collect::<Vec<u64>>());
            let columns = (0..side).map(|k| (0..side).map(|i| i * side + k).collect());
            let all: Vec<Vec<u64>> = rows.chain(columns).chain([(0..side * side).collect()]).collect();
            let tags = Tags::new(all.iter(), [Channel(7), Channel(0), Channel(7)].into_iter());
            let mut pairs: BTreeSet<(u64, u64, u32)> = BTreeSet::new();
            for group in &all {
                for (a, b) in group.iter().flat_map(|a| group.iter().map(move |b| (*a, *b))).filter(|(a, b)| a < b) {
                    assert!(pairs.insert((a, b, tags.of_group(group))));
                }
            }
            assert_eq!((tags.of_channel(Channel(0)), tags.of_channel(Channel(7)), tags.most()), (6, 7, 7));
        }
    }
}
