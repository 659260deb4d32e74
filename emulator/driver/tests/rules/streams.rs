//! Work on several streams that touches the same memory is ordered by events, streams or waits of the host: each test
//! has the order once, and once without what gives it.

use crate::gpu::{GOOD, Gpu, TWICE};
use cudarc::driver::sys::CUresult;
use emulated_driver::driver::*;

const RACE: CUresult = CUresult::CUDA_ERROR_LAUNCH_FAILED;

struct TwoStreams {
    gpu: Gpu,
    twice: u64,
    at: u64,
    streams: [u64; 2],
}

impl TwoStreams {
    /// 256 numbers, all 1.
    fn new() -> TwoStreams {
        let gpu = Gpu::new();
        let (twice, at, streams) = (gpu.function(TWICE, "twice"), gpu.allocate(1024), [gpu.stream(), gpu.stream()]);
        unsafe {
            assert_eq!(cuMemsetD32Async(at, 1, 256, streams[0] as _), GOOD);
            assert_eq!(cuStreamSynchronize(streams[0] as _), GOOD);
        }
        TwoStreams { gpu, twice, at, streams }
    }

    /// Doubles 32 numbers from the `first` on.
    fn twice(&self, first: u64, stream: usize) {
        let place = (self.at + 4 * first).to_le_bytes();
        assert_eq!(self.gpu.launch(self.twice, 32, 0, &place, self.streams[stream]), GOOD);
    }

    /// Makes the next work on one stream wait for what is on another.
    fn order(&self, before: usize, after: usize) {
        let event = self.gpu.event();
        unsafe {
            assert_eq!(cuEventRecord(event as _, self.streams[before] as _), GOOD);
            assert_eq!(cuStreamWaitEvent(self.streams[after] as _, event as _, 0), GOOD);
        }
    }

    /// Waits for all.
    fn wait(&self) -> CUresult {
        let both = self.streams.map(|s| unsafe { cuStreamSynchronize(s as _) });
        both.into_iter().find(|r| *r != GOOD).unwrap_or(GOOD)
    }

    fn numbers(&self, first: u64) -> u8 {
        self.gpu.read(self.at + 4 * first, 1, self.streams[0])[0]
    }
}

#[test]
fn kernels_that_share_memory_are_ordered() {
    for ordered in [true, false] {
        let two = TwoStreams::new();
        two.twice(0, 0);
        if ordered {
            two.order(0, 1);
        }
        two.twice(16, 1);
        assert_eq!(two.wait(), if ordered { GOOD } else { RACE });
        if ordered {
            assert_eq!([two.numbers(0), two.numbers(20), two.numbers(40)], [2, 4, 2]);
        }
    }
    let two = TwoStreams::new();
    two.twice(0, 0);
    two.twice(32, 1);
    assert_eq!(two.wait(), GOOD, "what is apart needs no order");
}

/// This holds also for an event that was over before anybody waited for it.
#[test]
fn work_that_happens_to_be_done_is_not_ordered_by_that() {
    for ordered in [true, false] {
        let two = TwoStreams::new();
        let event = two.gpu.event();
        two.twice(0, 0);
        unsafe {
            assert_eq!(cuEventRecord(event as _, two.streams[0] as _), GOOD);
            two.twice(64, 0);
            // More work follows the event on the first stream.
            assert_eq!(cuMemsetD8Async(two.at + 1000, 0, 4, two.streams[0] as _), GOOD);
            if ordered {
                assert_eq!(cuStreamWaitEvent(two.streams[1] as _, event as _, 0), GOOD);
            }
        }
        two.twice(0, 1);
        assert_eq!(two.wait(), if ordered { GOOD } else { RACE });
    }
}

#[test]
fn the_host_orders_what_it_waits_for() {
    for ordered in [true, false] {
        let two = TwoStreams::new();
        two.twice(0, 0);
        if ordered {
            assert_eq!(unsafe { cuStreamSynchronize(two.streams[0] as _) }, GOOD);
        }
        two.twice(0, 1);
        assert_eq!(two.wait(), if ordered { GOOD } else { RACE });
    }
}

#[test]
fn copies_from_and_to_the_same_memory_of_the_host_are_ordered() {
    for ordered in [true, false] {
        let two = TwoStreams::new();
        let host = two.gpu.pinned(64);
        unsafe {
            assert_eq!(cuMemcpyDtoHAsync_v2(host.cast(), two.at, 64, two.streams[0] as _), GOOD);
            if ordered {
                two.order(0, 1);
            }
            assert_eq!(cuMemcpyHtoDAsync_v2(two.at + 512, host.cast(), 64, two.streams[1] as _), GOOD);
        }
        assert_eq!(two.wait(), if ordered { GOOD } else { RACE });
    }
}

/// A fork and a join in a graph, which is launched twice; without either event it is no capture or a race.
#[test]
fn nodes_of_graphs_are_ordered_by_their_events() {
    for (middle, expected) in [(true, GOOD), (false, RACE)] {
        let two = TwoStreams::new();
        let one = two.streams[0];
        two.gpu.begin(one);
        two.order(0, 1);
        two.twice(0, 0);
        if middle {
            two.order(0, 1);
        }
        two.twice(0, 1);
        two.order(1, 0);
        two.twice(0, 0);
        let exec = two.gpu.instantiate(two.gpu.end(one).expect("both are joined"));
        for _ in 0..2 {
            assert_eq!(unsafe { cuGraphLaunch(exec as _, one as _) }, GOOD);
        }
        assert_eq!(unsafe { cuStreamSynchronize(one as _) }, expected);
        if middle {
            assert_eq!(two.numbers(0), 64);
            // Nothing orders the second stream's work with the second launch of the graph.
            assert_eq!(unsafe { cuGraphLaunch(exec as _, one as _) }, GOOD);
            two.twice(0, 1);
            assert_eq!(two.wait(), RACE);
        }
    }
}

#[test]
fn all_may_read() {
    let two = TwoStreams::new();
    unsafe {
        for (k, stream) in two.streams.into_iter().enumerate() {
            assert_eq!(cuMemcpyDtoDAsync_v2(two.at + 512 + 64 * k as u64, two.at, 64, stream as _), GOOD);
        }
    }
    assert_eq!(two.wait(), GOOD);
    two.twice(0, 0);
    unsafe { assert_eq!(cuMemcpyDtoDAsync_v2(two.at + 768, two.at + 64, 64, two.streams[1] as _), GOOD) };
    assert_eq!(two.wait(), RACE, "what is read is written");
}
