//! Work shared out over all cores.

use std::num::NonZero;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::thread;

/// Fewer items than this are not worth a thread.
const LEAST: usize = 1 << 16;

/// How many threads are worth starting.
pub fn count() -> usize {
    thread::available_parallelism().map_or(1, NonZero::get)
}

/// `0..n` in order, cut into as many ranges as there is work for cores. There is at least one.
pub fn ranges(n: usize) -> Vec<Range<usize>> {
    let pieces = count().min(n / LEAST).max(1);
    (0..pieces).map(|k| at(n, k, pieces)..at(n, k + 1, pieces)).collect()
}

fn at(n: usize, k: usize, pieces: usize) -> usize {
    (n as u128 * k as u128 / pieces as u128) as usize
}

/// What `work` makes of each item, in the order of items, a thread each.
pub fn map<I: Send, T: Send>(items: Vec<I>, work: impl Fn(I) -> T + Sync) -> Vec<T> {
    if items.len() == 1 {
        return items.into_iter().map(work).collect();
    }
    thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = items.into_iter().map(|item| scope.spawn(move || work(item))).collect();
        threads.into_iter().map(|t| t.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

/// Does what [`map`] does for more items than there are cores: each core that is free takes the next one.
pub fn queue<I: Send, T: Send>(items: Vec<I>, work: impl Fn(I) -> T + Sync) -> Vec<T> {
    let threads = count().min(items.len()).max(1);
    let items = Mutex::new(items.into_iter().enumerate());
    let next = || items.lock().unwrap_or_else(PoisonError::into_inner).next();
    let mut made: Vec<(usize, T)> = map((0..threads).collect(), |_| {
        let mut own = vec![];
        while let Some((n, item)) = next() {
            own.push((n, work(item)));
        }
        own
    })
    .into_iter()
    .flatten()
    .collect();
    made.sort_by_key(|(n, _)| *n);
    made.into_iter().map(|(_, made)| made).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_keeps_the_order_of_its_items() {
        assert_eq!(queue((0..1000).collect(), |n: u32| n * 2), (0..1000).map(|n| n * 2).collect::<Vec<_>>());
        assert!(queue(vec![], |n: u32| n).is_empty());
    }

    #[test]
    fn ranges_cover_all_once_and_in_order() {
        for n in [0, 1, LEAST - 1, 5 * LEAST + 3] {
            let ranges = ranges(n);
            assert_eq!((ranges[0].start, ranges[ranges.len() - 1].end), (0, n));
            assert!(ranges.windows(2).all(|w| w[0].end == w[1].start));
        }
    }
}
