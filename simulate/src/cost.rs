//! Seconds by what they are due to.

use serde::Serialize;
use std::ops::{Add, AddAssign, Sub};

/// Levels of links that a machine file may have: within a machine, between machines, beyond a switch.
pub const LEVELS: usize = 3;

/// What takes time: each is governed by a few numbers of a machine file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// Arithmetic of matrix products.
    Product,
    /// What their tiles begin and end with.
    Depth,
    /// Waves of their tiles that are not full: of their arithmetic, and of what tiles begin and end with.
    Tail,
    /// What tiles begin and end with, in waves that are not full.
    DepthOfTail,
    /// Arithmetic of attention, and of its gradients.
    AttentionForward,
    /// Arithmetic of attention's gradients.
    AttentionBackward,
    /// Bytes of the device's memory.
    Memory,
    /// Starts of kernels.
    Launch,
    /// Kernels of the host.
    Host,
    /// Bytes between the memories of host and device.
    Bus,
    /// Bytes to and from disks.
    Disk,
    /// What kernels take longer beside exchanges, and exchanges beside kernels.
    HeldKernels,
    /// What exchanges take longer beside kernels.
    HeldExchanges,
    /// The host, between the phases of a step.
    Gap,
    /// Threads of a rank on CPUs that go on after they have waited for another: with a core for each, and without.
    Wake,
    /// Threads of a rank on CPUs that wait for a core before they go on.
    CrowdedWake,
    /// Bytes of exchanges over links of this level.
    Bytes(u8),
    /// Bytes of sums that a switch of this level adds up.
    Switched(u8),
    /// Starts of exchanges among ranks that links of this level join.
    Latency(u8),
    /// Steps from rank to rank over links of this level.
    Hop(u8),
}

impl Cause {
    /// Every cause, links' once for each level.
    pub const ALL: [Cause; 16 + 4 * LEVELS] = [
        Cause::Product,
        Cause::Depth,
        Cause::Tail,
        Cause::DepthOfTail,
        Cause::AttentionForward,
        Cause::AttentionBackward,
        Cause::Memory,
        Cause::Launch,
        Cause::Host,
        Cause::Bus,
        Cause::Disk,
        Cause::HeldKernels,
        Cause::HeldExchanges,
        Cause::Gap,
        Cause::Wake,
        Cause::CrowdedWake,
        Cause::Bytes(0),
        Cause::Bytes(1),
        Cause::Bytes(2),
        Cause::Switched(0),
        Cause::Switched(1),
        Cause::Switched(2),
        Cause::Latency(0),
        Cause::Latency(1),
        Cause::Latency(2),
        Cause::Hop(0),
        Cause::Hop(1),
        Cause::Hop(2),
    ];

    fn index(self) -> usize {
        match self {
            Cause::Product => 0,
            Cause::Depth => 1,
            Cause::Tail => 2,
            Cause::DepthOfTail => 3,
            Cause::AttentionForward => 4,
            Cause::AttentionBackward => 5,
            Cause::Memory => 6,
            Cause::Launch => 7,
            Cause::Host => 8,
            Cause::Bus => 9,
            Cause::Disk => 10,
            Cause::HeldKernels => 11,
            Cause::HeldExchanges => 12,
            Cause::Gap => 13,
            Cause::Wake => 14,
            Cause::CrowdedWake => 15,
            Cause::Bytes(level) => 16 + usize::from(level),
            Cause::Switched(level) => 16 + LEVELS + usize::from(level),
            Cause::Latency(level) => 16 + 2 * LEVELS + usize::from(level),
            Cause::Hop(level) => 16 + 3 * LEVELS + usize::from(level),
        }
    }
}

/// Seconds by [`Cause`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost([f64; Cause::ALL.len()]);

impl Cost {
    /// So many seconds of one cause.
    pub fn new(cause: Cause, seconds: f64) -> Cost {
        Cost::default().and(cause, seconds)
    }

    /// With so many seconds of a cause more.
    #[must_use]
    pub fn and(mut self, cause: Cause, seconds: f64) -> Cost {
        self.0[cause.index()] += seconds;
        self
    }

    /// Seconds of a cause.
    pub fn of(&self, cause: Cause) -> f64 {
        self.0[cause.index()]
    }

    /// Seconds of exchanges over links of a level.
    pub fn of_level(&self, level: u8) -> f64 {
        [Cause::Bytes(level), Cause::Switched(level), Cause::Latency(level), Cause::Hop(level)].into_iter().map(|c| self.of(c)).sum()
    }

    /// The level of links that takes most of it; 0 of what takes none.
    pub fn level(&self) -> usize {
        (0..LEVELS).max_by(|a, b| self.of_level(*a as u8).total_cmp(&self.of_level(*b as u8)).then(b.cmp(a))).unwrap_or(0)
    }

    /// All of it so many times.
    #[must_use]
    pub fn times(mut self, factor: f64) -> Cost {
        self.0.iter_mut().for_each(|x| *x *= factor);
        self
    }

    /// Seconds of all causes.
    pub fn seconds(&self) -> f64 {
        self.0.iter().sum()
    }
}

impl Add for Cost {
    type Output = Cost;

    fn add(mut self, other: Cost) -> Cost {
        self += other;
        self
    }
}

impl AddAssign for Cost {
    fn add_assign(&mut self, other: Cost) {
        self.0.iter_mut().zip(other.0).for_each(|(a, b)| *a += b);
    }
}

impl Sub for Cost {
    type Output = Cost;

    fn sub(mut self, other: Cost) -> Cost {
        self.0.iter_mut().zip(other.0).for_each(|(a, b)| *a -= b);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_cause_has_a_place_of_its_own() {
        for (k, cause) in Cause::ALL.into_iter().enumerate() {
            assert_eq!(cause.index(), k);
        }
    }
}
