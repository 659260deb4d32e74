use super::*;
use crate::comm::{Exchange, Message};
use crate::cpu::{Cpu, KernelLibrary, Threads};
use crate::device::{Location, Memory};
use crate::shm::tests::steps_agree;
use crate::shm::{SegmentLayout, Shm};
use ir::op::{DType, Reduce};
use ir::program::{Arena, Collective, Job};
use ir::random::mix;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Sender, receiver and tag of messages.
type Route = (u64, u64, u32);

/// The bytes of a message, and whether it is taken.
type SentBytes = (Arc<Vec<u8>>, Arc<AtomicBool>);

/// Messages of ranks in one process, which arrive some looks after both sides have begun them, as drawn: a sender's
/// bytes are needed until then, as those of long messages are.
#[derive(Default)]
struct MessageQueue {
    sent: BTreeMap<Route, VecDeque<SentBytes>>,
    /// Receives that were begun, and those that are done.
    asked: BTreeMap<Route, (u64, u64)>,
    seed: u64,
}

struct QueueEndpoint {
    rank: u64,
    queue: Arc<Mutex<MessageQueue>>,
    /// Messages that are not taken yet.
    open: Arc<AtomicUsize>,
}

struct QueuedSend(Arc<AtomicBool>);

struct QueuedReceive {
    queue: Arc<Mutex<MessageQueue>>,
    open: Arc<AtomicUsize>,
    route: Route,
    number: u64,
    most: usize,
}

impl PointToPoint for QueueEndpoint {
    fn send(&mut self, to: u64, tag: u32, bytes: Arc<Vec<u8>>) -> Result<Box<dyn Sending>, String> {
        let taken = Arc::new(AtomicBool::new(false));
        self.queue.lock().unwrap().sent.entry((self.rank, to, tag)).or_default().push_back((bytes, taken.clone()));
        self.open.fetch_add(1, Ordering::Relaxed);
        Ok(Box::new(QueuedSend(taken)))
    }

    fn recv(&mut self, from: u64, tag: u32, most: usize) -> Result<Box<dyn Receiving>, String> {
        let route = (from, self.rank, tag);
        let mut queue = self.queue.lock().unwrap();
        let asked = queue.asked.entry(route).or_default();
        asked.0 += 1;
        Ok(Box::new(QueuedReceive { queue: self.queue.clone(), open: self.open.clone(), route, number: asked.0 - 1, most }))
    }

    fn tags(&self) -> u32 {
        32_767
    }

    fn leave(self: Box<Self>) {
        assert!(self.queue.lock().unwrap().sent.iter().all(|(route, sent)| route.0 != self.rank || sent.is_empty()));
    }
}

impl Sending for QueuedSend {
    fn is_done(&mut self) -> Result<bool, String> {
        Ok(self.0.load(Ordering::Acquire))
    }
}

impl Receiving for QueuedReceive {
    fn received(&mut self) -> Result<Option<Vec<u8>>, String> {
        let mut queue = self.queue.lock().unwrap();
        queue.seed = mix(queue.seed);
        let late = queue.seed.is_multiple_of(3);
        let asked = queue.asked.get_mut(&self.route).unwrap();
        if asked.1 != self.number || late {
            return Ok(None);
        }
        let Some((bytes, taken)) = queue.sent.get_mut(&self.route).and_then(VecDeque::pop_front) else { return Ok(None) };
        queue.asked.get_mut(&self.route).unwrap().1 += 1;
        taken.store(true, Ordering::Release);
        self.open.fetch_sub(1, Ordering::Relaxed);
        if bytes.len() > self.most { Err("message truncated".into()) } else { Ok(Some(bytes.to_vec())) }
    }
}

/// All ranks of a world whose only group has all of them, with channel 0.
fn world(n: u64, in_flight: u32, seed: u64) -> (Vec<Mpi>, Arc<AtomicUsize>) {
    let (queue, open) = (Arc::new(Mutex::new(MessageQueue { seed, ..MessageQueue::default() })), Arc::default());
    let tags = Tags::new([(0..n).collect()].iter(), [Channel(0)].into_iter());
    let endpoint = |rank| Box::new(QueueEndpoint { rank, queue: queue.clone(), open: Arc::clone(&open) });
    ((0..n).map(|rank| Mpi::new(rank, in_flight, tags.clone(), endpoint(rank)).unwrap()).collect(), open)
}

fn device() -> Cpu {
    // SAFETY: there are no kernels.
    let library = unsafe { KernelLibrary::linked(vec![]) };
    Cpu::new(&[], library, Arena::ALL.map(|arena| if arena == Arena::Disk { 0 } else { 32 << 20 }), None, &Threads::one()).unwrap()
}

fn at(arena: Arena) -> Location {
    Location { arena, byte: 0 }
}

/// Polls all ranks in a drawn order until each is done; gives the most messages that were open.
fn all_done(ranks: &mut [Mpi], devices: &mut [Cpu], transfers: &[Transfer], open: &AtomicUsize, seed: &mut u64) -> Result<usize, CommError> {
    let (mut done, mut most) = (vec![false; ranks.len()], 0);
    while done.contains(&false) {
        *seed = mix(*seed);
        let k = (*seed % ranks.len() as u64) as usize;
        if !done[k] {
            done[k] = ranks[k].poll(&mut devices[k], &transfers[k])?.done;
        }
        most = most.max(open.load(Ordering::Relaxed));
    }
    Ok(most)
}

/// What member `me` has after a collective, element by element, where member `k` gives `given(k, i)`.
fn defined(exchange: &Exchange, n: u64, me: u64, given: impl Fn(u64, u64) -> f64) -> Vec<f64> {
    let count = exchange.count;
    let folded = |i: u64| {
        let terms = (0..n).map(|k| given(k, i) as f32);
        f64::from(match exchange.kind.reduction().unwrap() {
            Reduce::Sum => terms.reduce(|a, b| a + b).unwrap(),
            _ => terms.reduce(f32::max).unwrap(),
        })
    };
    let (_, get) = exchange.elements(n);
    (0..get)
        .map(|i| match exchange.kind {
            Collective::AllReduce(_) => folded(i),
            Collective::ReduceScatter(_) => folded(me * count + i),
            Collective::AllGather => given(i / count, i % count),
            Collective::AllToAll => given(i / count, me * count + i % count),
            Collective::Shift => given((me + n - 1) % n, i),
        })
        .collect()
}

#[test]
fn collectives_give_what_they_mean_with_sums_in_rank_order() {
    let number = |k: u64, i: u64| f64::from((mix(k << 32 | i) as f32 / u64::MAX as f32 - 0.5) * 3.0f32.powi((i % 9) as i32 - 4));
    let kinds = [
        Collective::AllReduce(Reduce::Sum),
        Collective::AllReduce(Reduce::Max),
        Collective::ReduceScatter(Reduce::Sum),
        Collective::AllGather,
        Collective::AllToAll,
        Collective::Shift,
    ];
    // The counts include fewer elements than members, short chunks, and several chunks of odd sizes.
    for (n, counts) in [(1, [1, 9, 300_001]), (2, [1, 70_001, 800_003]), (3, [2, 70_001, 900_001]), (5, [3, 4_001, 500_007])] {
        let (mut ranks, open) = world(n, 1, n);
        let mut devices: Vec<Cpu> = (0..n).map(|_| device()).collect();
        let (members, mut seed): (Vec<u64>, u64) = ((0..n).collect(), 7);
        // The collectives follow each other without a pause.
        for (kind, count) in kinds.iter().flat_map(|kind| counts.map(|count| (*kind, count))) {
            let exchange = Exchange { kind, dtype: DType::F32, count, src: at(Arena::Persistent), dst: at(Arena::Temporary) };
            let (give, get) = exchange.elements(n);
            for (k, device) in (0..).zip(&mut devices) {
                device.write(exchange.src, DType::F32, &(0..give).map(|i| number(k, i)).collect::<Vec<_>>());
            }
            let transfers = vec![Transfer::Collective(&members, exchange); n as usize];
            let most = all_done(&mut ranks, &mut devices, &transfers, &open, &mut seed).unwrap();
            // Each member has two chunks, each with a message of numbers and one of sums for every other member.
            assert!(most as u64 <= 4 * n * (n - 1), "{most} messages of {n} ranks");
            for (me, device) in (0..).zip(&devices) {
                let mut out = vec![0.0; get as usize];
                device.read(exchange.dst, DType::F32, &mut out);
                assert!(out == defined(&exchange, n, me, number), "{kind:?} of {count} on rank {me} of {n}");
            }
        }
        ranks.iter_mut().for_each(|rank| assert!(!rank.is_busy()));
        ranks.into_iter().for_each(|rank| rank.leave(|| None).unwrap());
    }
}

#[test]
fn sums_of_bf16_are_rounded_once_and_may_lie_where_their_terms_do() {
    let (mut ranks, open) = world(3, 1, 2);
    let mut devices: Vec<Cpu> = (0..3).map(|_| device()).collect();
    let exchange = Exchange {
        kind: Collective::AllReduce(Reduce::Sum),
        dtype: DType::Bf16,
        count: 1_000_001,
        src: at(Arena::Persistent),
        dst: at(Arena::Persistent),
    };
    for (device, value) in devices.iter_mut().zip([256.0, 1.0, 1.0]) {
        device.write(exchange.src, DType::Bf16, &vec![value; exchange.count as usize]);
    }
    all_done(&mut ranks, &mut devices, &[Transfer::Collective(&[0, 1, 2], exchange); 3], &open, &mut 3).unwrap();
    for device in &devices {
        let mut out = vec![0.0; exchange.count as usize];
        device.read(exchange.dst, DType::Bf16, &mut out);
        assert!(out.iter().all(|x| *x == 258.0));
    }
}

#[test]
fn a_channel_takes_the_guaranteed_messages_and_keeps_their_order() {
    // The last message is sent in several pieces.
    for count in [0, 5, 800_001] {
        let (mut ranks, _) = world(2, 3, 1);
        let [mut here, mut there] = [device(), device()];
        let message = Message { channel: Channel(0), dtype: DType::F32, count, at: at(Arena::Persistent) };
        let values = |round: u64| (0..count).map(|i| (round * 1000 + i) as f64).collect::<Vec<_>>();
        let mut sent = 0;
        for received in 0..10 {
            loop {
                here.write(message.at, DType::F32, &values(sent));
                if !ranks[0].poll(&mut here, &Transfer::Send(1, message)).unwrap().done {
                    break;
                }
                sent += 1;
            }
            // One more than the guaranteed messages is sent, so that sending goes on while the first is being
            // received.
            assert_eq!(sent, received + 4);
            assert_eq!(ranks[0].waits_for(&Transfer::Send(1, message)), [1]);
            while !ranks[1].poll(&mut there, &Transfer::Recv(0, message)).unwrap().done {}
            let mut out = vec![0.0; count as usize];
            there.read(message.at, DType::F32, &mut out);
            assert!(out == values(received), "message {received} of {count}");
        }
        assert!(ranks[0].nap().is_some());
        let ended = ranks.remove(0).leave(|| Some("rank 1 is gone".into())).unwrap_err().to_string();
        assert_eq!(ended, "the run was ended: rank 1 is gone");
    }
}

#[test]
fn ranks_that_disagree_are_named() {
    let exchange =
        Exchange { kind: Collective::AllReduce(Reduce::Sum), dtype: DType::F32, count: 8, src: at(Arena::Persistent), dst: at(Arena::Temporary) };
    let fails = |first: Transfer, second: Transfer| {
        let (mut ranks, open) = world(2, 1, 1);
        let mut devices = [device(), device()];
        all_done(&mut ranks, &mut devices, &[first, second], &open, &mut 4).unwrap_err().to_string()
    };
    let shorter = Exchange { count: 7, ..exchange };
    let error = fails(Transfer::Collective(&[0, 1], exchange), Transfer::Collective(&[0, 1], shorter));
    // A rank that gets too long a message knows no more than that.
    let known =
        ["rank 0 issues all_reduce sum of 8 f32, rank 1 issues all_reduce of 7 f32", "MPI: of what rank 0 gives in a collective, message truncated"];
    assert!(known.contains(&error.as_str()), "{error}");
    let gather = Exchange { kind: Collective::AllGather, ..exchange };
    let error = fails(Transfer::Collective(&[0, 1], exchange), Transfer::Collective(&[0, 1], gather));
    assert!(error.contains("issues all_reduce") && error.contains("issues all_gather"), "{error}");
    let message = Message { channel: Channel(0), dtype: DType::F32, count: 8, at: at(Arena::Persistent) };
    let error = fails(Transfer::Send(1, Message { count: 7, ..message }), Transfer::Recv(0, message));
    assert_eq!(error, "rank 1 receives 8 f32 from rank 0, which sent 7 f32");
}

#[test]
fn ranks_take_the_same_step_as_the_reference() {
    let begin = |job: &Job, layout: &SegmentLayout| {
        let (queue, in_flight) = (Arc::<Mutex<MessageQueue>>::default(), job.in_flight);
        let tags = Tags::new(layout.groups(), layout.channels());
        move |rank: u64, shm: &mut Shm| {
            let endpoint = QueueEndpoint { rank, queue: queue.clone(), open: Arc::default() };
            shm.exchange_by(Mpi::new(rank, in_flight, tags.clone(), Box::new(endpoint)).unwrap());
        }
    };
    steps_agree(begin, |shm| shm.leave(Duration::from_secs(60)).unwrap());
}
