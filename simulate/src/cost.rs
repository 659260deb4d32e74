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
    /// Arithmetic of attention and its gradients.
    Attention,
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
    /// Bytes of exchanges over links of this level.
    Bytes(u8),
    /// Starts of exchanges, and hops of their rings, over links of this level at most.
    Latency(u8),
    /// What kernels and exchanges that run at once take from each other.
    Contention,
    /// The host, between the phases of a step.
    Gap,
}

impl Cause {
    pub const ALL: [Cause; 9 + 2 * LEVELS] = [
        Cause::Product,
        Cause::Attention,
        Cause::Memory,
        Cause::Launch,
        Cause::Host,
        Cause::Bus,
        Cause::Disk,
        Cause::Contention,
        Cause::Gap,
        Cause::Bytes(0),
        Cause::Bytes(1),
        Cause::Bytes(2),
        Cause::Latency(0),
        Cause::Latency(1),
        Cause::Latency(2),
    ];

    fn index(self) -> usize {
        match self {
            Cause::Product => 0,
            Cause::Attention => 1,
            Cause::Memory => 2,
            Cause::Launch => 3,
            Cause::Host => 4,
            Cause::Bus => 5,
            Cause::Disk => 6,
            Cause::Contention => 7,
            Cause::Gap => 8,
            Cause::Bytes(level) => 9 + usize::from(level),
            Cause::Latency(level) => 9 + LEVELS + usize::from(level),
        }
    }
}

/// Seconds by [`Cause`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost([f64; Cause::ALL.len()]);

impl Cost {
    pub fn new(cause: Cause, seconds: f64) -> Cost {
        Cost::default().and(cause, seconds)
    }

    #[must_use]
    pub fn and(mut self, cause: Cause, seconds: f64) -> Cost {
        self.0[cause.index()] += seconds;
        self
    }

    pub fn of(&self, cause: Cause) -> f64 {
        self.0[cause.index()]
    }

    /// All of it so many times.
    #[must_use]
    pub fn times(mut self, factor: f64) -> Cost {
        self.0.iter_mut().for_each(|x| *x *= factor);
        self
    }

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
