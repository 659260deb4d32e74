//! What ranks exchange: each is a thread with a GPU of its own.

use crate::gpu::{GOOD as DONE, Gpu};
use cudarc::driver::sys::CUresult;
use cudarc::nccl::sys::{ncclComm_t, ncclConfig_t, ncclResult_t, ncclUniqueId};
use emulated_driver::driver::*;
use emulated_driver::last_words;
use emulated_driver::nccl::*;
use std::ptr::null_mut;
use std::thread::ScopedJoinHandle;
use std::time::Duration;

const GOOD: ncclResult_t = ncclResult_t::ncclSuccess;
const BEGUN: ncclResult_t = ncclResult_t::ncclInProgress;
const F32: u32 = 7;

fn config(blocking: i32) -> ncclConfig_t {
    let undefined = i32::MIN;
    ncclConfig_t {
        size: size_of::<ncclConfig_t>(),
        magic: 0xcafe_beef,
        version: 21_800,
        blocking,
        cgaClusterSize: undefined,
        minCTAs: undefined,
        maxCTAs: undefined,
        netName: null_mut(),
        splitShare: undefined,
    }
}

struct Rank {
    gpu: Gpu,
    me: usize,
    comm: ncclComm_t,
    stream: u64,
}

fn state(comm: ncclComm_t) -> ncclResult_t {
    let mut state = GOOD;
    let looked = unsafe { ncclCommGetAsyncError(comm, &mut state) };
    if looked == GOOD { state } else { looked }
}

/// The result of what was begun.
fn settled(comm: ncclComm_t) -> ncclResult_t {
    loop {
        match state(comm) {
            BEGUN => std::thread::sleep(Duration::from_millis(1)),
            other => return other,
        }
    }
}

/// An error that comes later, from others.
fn fails(comm: ncclComm_t) -> ncclResult_t {
    loop {
        match settled(comm) {
            GOOD => std::thread::sleep(Duration::from_millis(1)),
            other => return other,
        }
    }
}

fn unique() -> ncclUniqueId {
    let mut id = ncclUniqueId { internal: [0; 128] };
    assert_eq!(unsafe { ncclGetUniqueId(&mut id) }, GOOD);
    id
}

impl Rank {
    fn meet(id: ncclUniqueId, count: i32, me: usize) -> Rank {
        let gpu = Gpu::new();
        let (mut comm, stream) = (null_mut(), gpu.stream());
        assert_eq!(unsafe { ncclCommInitRankConfig(&mut comm, count, id, me as i32, &mut config(0)) }, BEGUN);
        assert_eq!(settled(comm), GOOD);
        Rank { gpu, me, comm, stream }
    }

    /// Memory with numbers.
    fn numbers(&self, numbers: &[f32]) -> u64 {
        let at = self.gpu.allocate(4 * numbers.len());
        for (k, x) in numbers.iter().enumerate() {
            assert_eq!(unsafe { cuMemsetD32Async(at + 4 * k as u64, x.to_bits(), 1, self.stream as _) }, DONE);
        }
        at
    }

    fn got(&self, at: u64, count: usize) -> Vec<f32> {
        let bytes = self.gpu.read(at, 4 * count, self.stream);
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
    }

    fn sum(&self, at: u64, count: usize) -> ncclResult_t {
        let asked = unsafe { ncclAllReduce(at as _, at as _, count, F32, 0, self.comm, self.stream as _) };
        if asked == BEGUN { settled(self.comm) } else { asked }
    }

    fn send(&self, at: u64, count: usize, to: i32) -> ncclResult_t {
        let asked = unsafe { ncclSend(at as _, count, F32, to, self.comm, self.stream as _) };
        if asked == BEGUN { settled(self.comm) } else { asked }
    }

    fn receive(&self, at: u64, count: usize, from: i32) -> ncclResult_t {
        let asked = unsafe { ncclRecv(at as _, count, F32, from, self.comm, self.stream as _) };
        if asked == BEGUN { settled(self.comm) } else { asked }
    }

    /// Lets the GPU begin, without waiting for it.
    fn begin(&self) {
        assert!([DONE, CUresult::CUDA_ERROR_NOT_READY].contains(&unsafe { cuStreamQuery(self.stream as _) }));
    }

    fn finish(self) {
        unsafe {
            assert_eq!(ncclCommFinalize(self.comm), BEGUN);
            assert_eq!(settled(self.comm), GOOD);
            assert_eq!(ncclCommDestroy(self.comm), GOOD);
        }
    }
}

/// What ranks return, each in a thread.
fn ranks<T: Send>(count: usize, run: impl Fn(Rank) -> T + Sync) -> Vec<T> {
    let id = unique();
    let run = &run;
    std::thread::scope(|s| {
        let threads: Vec<ScopedJoinHandle<T>> = (0..count).map(|me| s.spawn(move || run(Rank::meet(id, count as i32, me)))).collect();
        threads.into_iter().map(|t| t.join().expect("no panic")).collect()
    })
}

#[test]
fn collectives_and_messages_are_what_they_are_called() {
    let got = ranks(3, |rank| {
        let k = rank.me as f32;
        let (own, all) = (rank.numbers(&[k, 10.0 * k, 100.0 * k]), rank.numbers(&[0.0; 9]));
        unsafe {
            assert_eq!(ncclAllGather(own as _, all as _, 3, F32, rank.comm, rank.stream as _), BEGUN);
            assert_eq!(settled(rank.comm), GOOD);
            assert_eq!(ncclReduceScatter(all as _, own as _, 3, F32, 0, rank.comm, rank.stream as _), BEGUN);
            assert_eq!(settled(rank.comm), GOOD);
        }
        assert_eq!(rank.sum(own, 1), GOOD);
        let (next, before) = ((rank.me as i32 + 1) % 3, (rank.me as i32 + 2) % 3);
        unsafe {
            assert_eq!(ncclGroupStart(), GOOD);
            assert_eq!(ncclSend(own as _, 3, F32, next, rank.comm, rank.stream as _), GOOD);
            assert_eq!(ncclRecv(all as _, 3, F32, before, rank.comm, rank.stream as _), GOOD);
            assert_eq!(ncclGroupEnd(), BEGUN);
            assert_eq!(settled(rank.comm), GOOD);
        }
        let got = rank.got(all, 9);
        rank.finish();
        got
    });
    // In terms of the rank before: the sum of 3 x (0, 1, 2), then thrice its own numbers. The rest is what was
    // gathered.
    let want = |before: f32| vec![9.0, 30.0 * before, 300.0 * before, 1.0, 10.0, 100.0, 2.0, 20.0, 200.0];
    assert_eq!(got, [want(2.0), want(0.0), want(1.0)]);
}

#[test]
fn members_agree_on_what_they_exchange() {
    let said = ranks(2, |rank| {
        let at = rank.numbers(&[1.0; 4]);
        // The two ranks give different lengths.
        assert_eq!(rank.sum(at, 2 + rank.me), GOOD);
        rank.begin();
        let state = fails(rank.comm);
        let again = rank.sum(at, 2);
        assert_eq!(unsafe { ncclCommAbort(rank.comm) }, GOOD);
        (state, again, last_words())
    });
    assert!(said.iter().any(|(state, again, words)| {
        (*state, *again) == (ncclResult_t::ncclInvalidUsage, ncclResult_t::ncclInvalidUsage) && words.contains("the communicator has failed")
    }));
}

#[test]
fn members_come_to_the_same_things_in_the_same_order() {
    let states = ranks(2, |rank| {
        let (at, other) = (rank.numbers(&[1.0; 4]), rank.numbers(&[1.0; 4]));
        // A first call connects the ranks, so that the next ones begin at once.
        assert_eq!(rank.sum(at, 1), GOOD);
        match rank.me {
            0 => assert_eq!([rank.send(at, 1, 1), rank.sum(at, 2)], [GOOD; 2]),
            _ => assert_eq!([rank.receive(other, 1, 0), rank.sum(at, 2)], [GOOD; 2]),
        }
        assert_eq!(rank.got(at, 1), [4.0]);
        // A rank's second call may come after the first one has failed.
        let asked = match rank.me {
            0 => [rank.send(at, 1, 1), rank.sum(at, 2)],
            _ => [rank.sum(at, 2), rank.receive(other, 1, 0)],
        };
        if asked != [GOOD; 2] {
            assert_eq!(unsafe { ncclCommAbort(rank.comm) }, GOOD);
            return asked[1];
        }
        rank.begin();
        let state = fails(rank.comm);
        assert_eq!(unsafe { ncclCommAbort(rank.comm) }, GOOD);
        state
    });
    assert!(states.contains(&ncclResult_t::ncclInvalidUsage), "{states:?}");
}

#[test]
fn sends_are_not_buffered() {
    let states = ranks(2, |rank| {
        let (from, to) = (rank.numbers(&[1.0]), rank.numbers(&[0.0]));
        let other = 1 - rank.me as i32;
        // In this order the ranks connect, and messages pass.
        match rank.me {
            0 => assert_eq!([rank.send(from, 1, 1), rank.receive(to, 1, 1)], [GOOD; 2]),
            _ => assert_eq!([rank.receive(to, 1, 0), rank.send(from, 1, 0)], [GOOD; 2]),
        }
        assert_eq!(rank.got(to, 1), [1.0]);
        // Here both ranks send before they receive.
        assert_eq!([rank.send(from, 1, other), rank.receive(to, 1, other)], [GOOD; 2]);
        rank.begin();
        let state = fails(rank.comm);
        assert_eq!(unsafe { ncclCommAbort(rank.comm) }, GOOD);
        state
    });
    assert!(states.contains(&ncclResult_t::ncclSystemError), "{states:?}");
}

#[test]
fn the_first_use_of_a_way_needs_both_ends() {
    let states = ranks(2, |rank| {
        let at = rank.numbers(&[1.0]);
        let state = rank.send(at, 1, 1 - rank.me as i32);
        let words = last_words();
        assert_eq!(unsafe { ncclCommAbort(rank.comm) }, GOOD);
        (state, words)
    });
    assert!(states.iter().any(|(s, words)| *s == ncclResult_t::ncclSystemError && words.contains("connecting for Sending")), "{states:?}");
}

#[test]
fn a_member_that_is_gone_is_noticed() {
    ranks(2, |rank| {
        let at = rank.numbers(&[1.0]);
        assert_eq!(rank.sum(at, 1), GOOD);
        assert_eq!(rank.got(at, 1), [2.0]);
        if rank.me == 0 {
            assert_eq!(unsafe { ncclCommAbort(rank.comm) }, GOOD);
            return;
        }
        assert_eq!(rank.sum(at, 1), GOOD);
        rank.begin();
        assert_eq!(fails(rank.comm), ncclResult_t::ncclRemoteError);
        // Work that is under way ends with the communicator.
        assert_eq!(unsafe { cuStreamQuery(rank.stream as _) }, CUresult::CUDA_ERROR_NOT_READY);
        assert_eq!(unsafe { ncclCommAbort(rank.comm) }, GOOD);
        assert_eq!(unsafe { cuStreamSynchronize(rank.stream as _) }, DONE);
    });
}

#[test]
fn what_is_under_way_is_looked_at_before_more_is_asked_for() {
    ranks(1, |rank| {
        let at = rank.numbers(&[1.0]);
        let ask = || unsafe { ncclAllReduce(at as _, at as _, 1, F32, 0, rank.comm, rank.stream as _) };
        assert_eq!([ask(), ask()], [BEGUN, ncclResult_t::ncclInvalidArgument]);
        assert!(last_words().contains("is not through"), "{}", last_words());
        assert_eq!(settled(rank.comm), GOOD);
        rank.finish();
    });
}

#[test]
fn a_split_has_the_members_of_a_colour_in_the_order_of_their_keys() {
    let sums = ranks(3, |rank| {
        let (mut child, at) = (null_mut(), rank.numbers(&[rank.me as f32, 0.0]));
        let color = if rank.me == 1 { -1 } else { 5 };
        unsafe {
            assert_eq!(ncclCommSplit(rank.comm, color, -(rank.me as i32), &mut child, &mut config(0)), BEGUN);
            assert_eq!(settled(rank.comm), GOOD);
            if color < 0 {
                assert!(child.is_null());
            } else {
                let from = rank.numbers(&[rank.me as f32]);
                assert_eq!(ncclAllGather(from as _, at as _, 1, F32, child, rank.stream as _), BEGUN);
                assert_eq!(settled(child), GOOD);
            }
        }
        let got = rank.got(at, 2);
        if !child.is_null() {
            assert_eq!(unsafe { ncclCommAbort(child) }, GOOD);
        }
        rank.finish();
        got
    });
    assert_eq!(sums, [[2.0, 0.0], [1.0, 0.0], [2.0, 0.0]]);
}

/// A rank's second communicator of the same ranks, and a stream.
fn second(rank: &Rank) -> (ncclComm_t, u64) {
    let mut child = null_mut();
    assert_eq!(unsafe { ncclCommSplit(rank.comm, 1, rank.me as i32, &mut child, &mut config(0)) }, BEGUN);
    assert_eq!(settled(rank.comm), GOOD);
    (child, rank.gpu.stream())
}

fn sum_of(comm: ncclComm_t, at: u64, stream: u64) -> ncclResult_t {
    let asked = unsafe { ncclAllReduce(at as _, at as _, 1, F32, 0, comm, stream as _) };
    if asked == BEGUN { settled(comm) } else { asked }
}

/// The results of sums on two communicators and two streams. The second stream may wait for the first, and both may
/// be captured.
fn two_communicators(captured: bool, waits: bool) -> Vec<ncclResult_t> {
    ranks(2, |rank| {
        let (own, at) = (rank.numbers(&[1.0]), rank.numbers(&[2.0]));
        let (child, stream) = second(&rank);
        let event = rank.gpu.event();
        let hold = |from: u64, on: u64| unsafe {
            assert_eq!([cuEventRecord(event as _, from as _), cuStreamWaitEvent(on as _, event as _, 0)], [DONE, DONE]);
        };
        if captured {
            // Both communicators are used once before the capture.
            assert_eq!([rank.sum(own, 1), settled(rank.comm)], [GOOD, GOOD]);
            hold(rank.stream, stream);
            assert_eq!(sum_of(child, at, stream), GOOD);
            hold(stream, rank.stream);
            rank.gpu.begin(rank.stream);
        }
        hold(rank.stream, stream);
        assert_eq!(rank.sum(own, 1), GOOD);
        if waits {
            hold(rank.stream, stream);
        }
        let outcome = sum_of(child, at, stream);
        if captured {
            hold(stream, rank.stream);
            assert_eq!(rank.gpu.end(rank.stream).map(|graph| unsafe { cuGraphDestroy(graph as _) }), Ok(DONE));
        }
        unsafe {
            assert_eq!(ncclCommAbort(child), GOOD);
            assert_eq!(ncclCommAbort(rank.comm), GOOD);
        }
        outcome
    })
}

#[test]
fn kernels_of_two_communicators_never_run_at_once_on_a_gpu() {
    assert_eq!(two_communicators(false, true), [GOOD; 2]);
    assert_eq!(two_communicators(false, false), [ncclResult_t::ncclUnhandledCudaError; 2]);
}

#[test]
fn nor_do_they_in_a_graph() {
    assert_eq!(two_communicators(true, false), [ncclResult_t::ncclUnhandledCudaError; 2]);
}

#[test]
fn what_is_captured_was_made_before() {
    let outcomes = ranks(2, |rank| {
        let at = rank.numbers(&[1.0, 2.0]);
        assert_eq!(rank.sum(at, 1), GOOD);
        rank.gpu.begin(rank.stream);
        let outcomes = [rank.sum(at, 1), rank.sum(at, 2)];
        assert_eq!(rank.gpu.end(rank.stream).map(|graph| unsafe { cuGraphDestroy(graph as _) }), Ok(DONE));
        outcomes
    });
    assert_eq!(outcomes, [[GOOD, ncclResult_t::ncclInvalidUsage]; 2]);
}

#[test]
fn a_communicator_ends_after_the_graphs_that_have_calls_of_it() {
    ranks(1, |rank| {
        let at = rank.numbers(&[1.0]);
        assert_eq!(rank.sum(at, 1), GOOD);
        assert_eq!(unsafe { cuStreamSynchronize(rank.stream as _) }, DONE);
        rank.gpu.begin(rank.stream);
        assert_eq!(rank.sum(at, 1), GOOD);
        let graph = rank.gpu.end(rank.stream).expect("captured");
        let exec = rank.gpu.instantiate(graph);
        unsafe {
            assert_eq!(cuGraphLaunch(exec as _, rank.stream as _), DONE);
            assert_eq!(cuStreamSynchronize(rank.stream as _), DONE);
            assert_eq!(ncclCommAbort(rank.comm), ncclResult_t::ncclInvalidUsage);
            assert!(last_words().contains("waits for ever for a graph"), "{}", last_words());
            assert_eq!(cuGraphExecDestroy(exec as _), DONE);
            assert_eq!(ncclCommFinalize(rank.comm), BEGUN);
            assert_eq!(settled(rank.comm), ncclResult_t::ncclInvalidUsage);
            assert!(last_words().contains("waits for ever for a graph"), "{}", last_words());
            assert_eq!([cuGraphDestroy(graph as _)], [DONE]);
            assert_eq!(ncclCommAbort(rank.comm), GOOD);
        }
    });
    ranks(1, |rank| {
        assert_eq!(unsafe { ncclCommDestroy(rank.comm) }, ncclResult_t::ncclInvalidUsage);
        assert!(last_words().contains("before it has been finalized"), "{}", last_words());
        rank.finish();
    });
}

#[test]
fn what_an_exchange_reads_stays_as_it_is() {
    let states = ranks(2, |rank| {
        let (from, to) = (rank.numbers(&[1.0]), rank.numbers(&[0.0, 0.0]));
        let gather = || unsafe { ncclAllGather(from as _, to as _, 1, F32, rank.comm, rank.stream as _) };
        assert_eq!([gather(), settled(rank.comm)], [BEGUN, GOOD]);
        assert_eq!(rank.got(to, 2), [1.0, 1.0]);
        if rank.me == 1 {
            // The other rank is in the exchange before this one comes.
            std::thread::sleep(Duration::from_millis(300));
        }
        assert_eq!([gather(), settled(rank.comm)], [BEGUN, GOOD]);
        rank.begin();
        if rank.me == 0 {
            std::thread::sleep(Duration::from_millis(100));
            let other = rank.gpu.stream();
            assert_eq!(unsafe { cuMemsetD32Async(from, 0, 1, other as _) }, DONE);
            // Nothing orders the fill and the gather.
            assert_eq!(unsafe { cuStreamSynchronize(other as _) }, CUresult::CUDA_ERROR_LAUNCH_FAILED);
        } else {
            unsafe { cuStreamSynchronize(rank.stream as _) };
        }
        assert_eq!(unsafe { ncclCommAbort(rank.comm) }, GOOD);
    });
    assert_eq!(states.len(), 2);
}

#[test]
fn ranks_are_on_gpus_of_their_own_and_have_other_numbers() {
    let id = unique();
    let _gpu = Gpu::new();
    let join = |me: i32, count: i32| {
        let mut comm = null_mut();
        assert_eq!(unsafe { ncclCommInitRankConfig(&mut comm, count, id, me, &mut config(0)) }, BEGUN);
        comm
    };
    let both = [join(0, 2), join(1, 2)];
    assert_eq!(both.map(settled), [ncclResult_t::ncclInvalidUsage; 2]);
    assert_eq!(both.map(|comm| unsafe { ncclCommAbort(comm) }), [GOOD; 2]);
    let mut comm = null_mut();
    let asked = unsafe { ncclCommInitRankConfig(&mut comm, 2, id, 2, &mut config(0)) };
    assert_eq!((asked, last_words().contains("rank 2 of 2")), (ncclResult_t::ncclInvalidArgument, true));
    let blocking = unsafe { ncclCommInitRankConfig(&mut comm, 2, id, 0, &mut config(1)) };
    assert_eq!((blocking, last_words().contains("that block are not modelled")), (ncclResult_t::ncclInvalidArgument, true));
}

#[test]
fn who_waits_for_ranks_that_do_not_come_can_give_up() {
    let (id, _gpu) = (unique(), Gpu::new());
    let mut comm = null_mut();
    assert_eq!(unsafe { ncclCommInitRankConfig(&mut comm, 2, id, 0, &mut config(0)) }, BEGUN);
    assert_eq!(state(comm), BEGUN);
    assert_eq!(unsafe { ncclCommAbort(comm) }, GOOD);
    assert_eq!(state(comm), ncclResult_t::ncclInvalidArgument);
    assert!(last_words().contains("there is no communicator"), "{}", last_words());
}

#[test]
fn ranges_of_exchanges_lie_in_memory_and_overlap_only_in_place() {
    ranks(1, |rank| {
        let at = rank.numbers(&[1.0; 4]);
        assert_eq!(rank.sum(at + 8, 3), ncclResult_t::ncclUnhandledCudaError);
        assert!(last_words().contains("do not lie within an allocation"), "{}", last_words());
        let asked = unsafe { ncclAllReduce(at as _, (at + 4) as _, 2, F32, 0, rank.comm, rank.stream as _) };
        assert_eq!((asked, last_words().contains("overlap")), (ncclResult_t::ncclInvalidArgument, true));
        assert_eq!(rank.send(at, 1, 1), ncclResult_t::ncclInvalidArgument);
        rank.finish();
    });
}
