//! Which thread computes which tiles of a launch.
//!
//! Each thread goes through a range of its own from the front, some tiles at a time: what a kernel copied for one
//! tile often serves the next. A thread that has none left takes the rear half of what is left to the thread with
//! most (work stealing, after Blumofe and Leiserson, 1999).

use std::sync::atomic::{AtomicU64, Ordering};

/// In how many calls a thread goes through its range, so that others can take what it does not get to. Tiles of one
/// call are computed together where they share copies, so more calls cost some of that (1 % of a step of llama-mini
/// with 4).
const CALLS: u64 = 2;

/// The tiles that are left to each thread.
pub struct Ranges {
    left: Vec<Left>,
}

/// The end of a range in the upper 32 bits, where it begins in the lower: the word is all there is to a range, so
/// whoever exchanges one that he has read takes tiles that are there.
#[repr(align(64))]
struct Left(AtomicU64);

/// Tiles of one call of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TileRange {
    pub first: u64,
    pub end: u64,
    /// The first tile of the range. Unless it is `first`, the call before this one of the same thread ended at
    /// `first`.
    pub begin: u64,
    /// Where the range ends, unless other threads take some of it.
    pub until: u64,
}

impl Left {
    fn get(&self) -> [u64; 2] {
        unpacked(self.0.load(Ordering::Relaxed))
    }

    fn set(&self, range: [u64; 2]) {
        self.0.store(packed(range), Ordering::Relaxed);
    }

    /// Cuts the range at the place that `cut` finds in it, if it is not empty: it keeps one part, as `keep` chooses
    /// of the two. Returns range and cut.
    fn cut(&self, cut: impl Fn([u64; 2]) -> u64, keep: impl Fn([u64; 2], u64) -> [u64; 2]) -> Option<([u64; 2], u64)> {
        let kept = |old: u64| {
            let range = unpacked(old);
            (range[0] < range[1]).then(|| packed(keep(range, cut(range))))
        };
        let old = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, kept).ok()?;
        let range = unpacked(old);
        Some((range, cut(range)))
    }
}

fn packed([begin, end]: [u64; 2]) -> u64 {
    end << 32 | begin
}

fn unpacked(word: u64) -> [u64; 2] {
    [word & u64::from(u32::MAX), word >> 32]
}

impl Ranges {
    /// Ranges of this many threads, with nothing left to any.
    pub fn new(threads: usize) -> Ranges {
        Ranges { left: (0..threads).map(|_| Left(AtomicU64::new(0))).collect() }
    }

    /// Shares out tiles, less than 2^32, while no thread looks.
    pub fn fill(&self, tiles: u64) {
        let threads = self.left.len() as u64;
        for (thread, left) in (0..).zip(&self.left) {
            left.set([thread * tiles / threads, (thread + 1) * tiles / threads]);
        }
    }

    /// The calls of a thread: its own range's, then those of what it takes from others, until nothing is left.
    pub fn calls(&self, thread: usize) -> impl Iterator<Item = TileRange> + '_ {
        let own = &self.left[thread];
        let calls = if self.left.len() == 1 { 1 } else { CALLS };
        let mut range = own.get();
        std::iter::from_fn(move || {
            loop {
                let some = (range[1] - range[0]).div_ceil(calls);
                if let Some((left, end)) = own.cut(|[begin, end]| (begin + some).min(end), |[_, end], cut| [cut, end]) {
                    return Some(TileRange { first: left[0], end, begin: range[0], until: left[1] });
                }
                range = self.take()?;
                own.set(range);
            }
        })
    }

    /// The rear half of what is left to the thread with most.
    fn take(&self) -> Option<[u64; 2]> {
        loop {
            let length = |left: &Left| left.get()[1].saturating_sub(left.get()[0]);
            let (length, most) = self.left.iter().map(|left| (length(left), left)).max_by_key(|(length, _)| *length)?;
            if length == 0 {
                return None;
            }
            if let Some((range, middle)) = most.cut(|[begin, end]| begin + (end - begin) / 2, |[begin, _], cut| [begin, cut]) {
                return Some([middle, range[1]]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_gone_through_from_the_front_and_its_rear_half_is_taken() {
        let ranges = Ranges::new(2);
        ranges.fill(16);
        let mut first = ranges.calls(0);
        assert_eq!(first.next(), Some(TileRange { first: 0, end: 4, begin: 0, until: 8 }));
        let all: Vec<TileRange> = ranges.calls(1).collect();
        assert_eq!(all[..2].iter().map(|c| c.first).collect::<Vec<_>>(), [8, 12]);
        assert_eq!(all[2], TileRange { first: 6, end: 7, begin: 6, until: 8 }, "of 4..8 the rear half");
        assert_eq!(all.last().map(|c| (c.first, c.end)), Some((4, 5)), "the half of one is that one");
        assert_eq!(first.next(), None);
    }

    #[test]
    fn threads_compute_each_tile_once() {
        for (threads, tiles) in [(1, 7), (2, 1), (3, 2), (4, 1000)] {
            let ranges = Ranges::new(threads);
            for _ in 0..200 {
                ranges.fill(tiles);
                let done: Vec<AtomicU64> = (0..tiles).map(|_| AtomicU64::new(0)).collect();
                std::thread::scope(|scope| {
                    for thread in 0..threads {
                        let (ranges, done) = (&ranges, &done);
                        scope.spawn(move || {
                            let mut before = None;
                            for call in ranges.calls(thread) {
                                assert!(call.begin <= call.first && call.first < call.end && call.end <= call.until);
                                assert!(call.first == call.begin || before == Some((call.begin, call.first)));
                                before = Some((call.begin, call.end));
                                done[call.first as usize..call.end as usize].iter().for_each(|count| {
                                    count.fetch_add(1, Ordering::Relaxed);
                                });
                            }
                        });
                    }
                });
                assert!(done.iter().all(|count| count.load(Ordering::Relaxed) == 1));
            }
        }
    }
}
