use super::*;
use crate::cpu::{Cpu, KernelLibrary, Threads};
use crate::device::Location;
use crate::executor::{Advance, CommandOrder, PersistentId, Rank, Step, arena_bytes};
use crate::fixture::{self, Split};
use crate::host::{Tensor, Whole};
use crate::protocol::{RankPlacement, Spread};
use crate::reference::{Plans, Reference};
use crate::rendezvous::{Purpose, Trust, knock};
use crate::target::{Processor, Target};
use ir::graph::Origin;
use ir::op::{DType, Reduce};
use ir::program::{Action, Arena, BufferAddress, BufferId, Channel, Collective, Command, GroupId, Job, Stream};
use std::net::Ipv4Addr;
use std::sync::mpsc;

const NATIVE: Target = Target::Cpu(Processor { cpu: String::new(), features: String::new() });

/// The fixture's job with one more body that does only this.
fn job(split: &Split, actions: Vec<Action>) -> Job {
    let mut job = fixture::job(split);
    let command = |action| Command { stream: Stream::Compute, action, predicate: None, origin: Origin::new(ir::graph::Phase::Forward), reason: None };
    for program in &mut job.programs {
        program.bodies[0].commands = actions.iter().cloned().map(command).collect();
    }
    job
}

fn all_ranks(dp: u64, kind: Collective, dtype: DType, count: u64) -> (Job, Exchange) {
    let place = BufferAddress::start(BufferId(0));
    let action = Action::Collective { kind, group: GroupId(1), dtype, count, src: place.clone(), dst: place };
    let at = |arena| Location { arena, byte: 0 };
    let exchange = Exchange { kind, dtype, count, src: at(Arena::Persistent), dst: at(Arena::Temporary) };
    (job(&Split { microbatches: 1, pp: 1, dp, tp: 1 }, vec![action]), exchange)
}

/// Ranks that were asked to stop, at a time that differs from case to case, have all done the same steps; without a
/// request all of them.
#[test]
fn ranks_that_are_asked_to_stop_stop_after_the_same_step() {
    let job = fixture::job(&Split { microbatches: 1, pp: 1, dp: 4, tp: 1 });
    let layout = SegmentLayout::new(&job, &NATIVE, 0);
    for (case, steps) in (0..200).map(|k| (k, 40)).chain([(0, 0), (1, 1)]) {
        let (_, segment) = Segment::create(layout.bytes).unwrap();
        let board = StatusBoard { segment: &segment, layout: &layout };
        let asks = case % 10 != 9;
        let (done, last) = std::thread::scope(|scope| {
            let train = |rank: u64| {
                move || {
                    let shm = Shm::new(board, rank, 0, None);
                    let runs = |step: &u64| {
                        (0..(rank * 7 + step * 3 + case) % 5).for_each(|_| std::thread::yield_now());
                        shm.begin(*step).unwrap() == Begin::Run
                    };
                    (1..=steps).take_while(runs).count() as u64
                }
            };
            let ranks: Vec<_> = (0..layout.world).map(|rank| scope.spawn(train(rank))).collect();
            let last = asks.then(|| {
                (0..case).for_each(|_| std::thread::yield_now());
                board.ask(RunRequest::Stop);
                let last = (0..layout.world).map(|rank| board.begun(rank)).max().unwrap();
                board.settle(RunRequest::Stop, last);
                last
            });
            (ranks.into_iter().map(|r| r.join().unwrap()).collect::<Vec<u64>>(), last)
        });
        assert_eq!(done, [last.unwrap_or(steps); 4], "case {case}");
    }
}

/// Again and again, each time when all have done what was asked for before.
#[test]
fn ranks_that_are_asked_to_save_save_after_the_same_steps() {
    const STEPS: u64 = 60;
    let job = fixture::job(&Split { microbatches: 1, pp: 1, dp: 4, tp: 1 });
    let layout = SegmentLayout::new(&job, &NATIVE, 0);
    for case in 0..100 {
        let (_, segment) = Segment::create(layout.bytes).unwrap();
        let board = StatusBoard { segment: &segment, layout: &layout };
        let (saved, asked) = std::thread::scope(|scope| {
            let (say, said) = mpsc::channel();
            let train = |rank: u64| {
                let say = say.clone();
                move || {
                    let shm = Shm::new(board, rank, 0, None);
                    let mut saved = vec![];
                    for step in 1..=STEPS {
                        (0..(rank * 7 + step * 3 + case) % 5).for_each(|_| std::thread::yield_now());
                        if shm.begin(step).unwrap() == Begin::Save {
                            saved.push(step - 1);
                            say.send(()).unwrap();
                        }
                    }
                    saved
                }
            };
            let ranks: Vec<_> = (0..layout.world).map(|rank| scope.spawn(train(rank))).collect();
            drop(say);
            let mut asked = vec![];
            loop {
                (0..case % 7).for_each(|_| std::thread::yield_now());
                board.ask(RunRequest::Save);
                let last = (0..layout.world).map(|rank| board.begun(rank)).max().unwrap();
                board.settle(RunRequest::Save, last);
                if last == STEPS || (0..layout.world).any(|_| said.recv().is_err()) {
                    break;
                }
                asked.push(last);
            }
            (ranks.into_iter().map(|r| r.join().unwrap()).collect::<Vec<_>>(), asked)
        });
        assert!(saved.iter().all(|s| *s == asked), "case {case}: {saved:?} instead of {asked:?}");
    }
}

#[test]
fn a_rank_that_waits_for_the_last_step_hears_that_the_run_has_ended() {
    let job = fixture::job(&Split { microbatches: 1, pp: 1, dp: 2, tp: 1 });
    let layout = SegmentLayout::new(&job, &NATIVE, 0);
    let (_, segment) = Segment::create(layout.bytes).unwrap();
    let board = StatusBoard { segment: &segment, layout: &layout };
    board.ask(RunRequest::Stop);
    board.end("rank 1 is gone");
    let error = Shm::new(board, 0, 0, None).begin(1).unwrap_err();
    assert!(matches!(&error, CommError::Aborted(reason) if reason == "rank 1 is gone"), "{error}");
}

/// Runs one closure per rank, each on its own thread with its own end and a device of 4 MiB arenas.
fn on_ranks<T: Send>(job: &Job, f: impl Fn(&mut Shm, &mut Cpu, u64) -> T + Sync) -> Vec<T> {
    on_machines(job, &vec![0; job.mesh.world() as usize], f)
}

/// Does what [`on_ranks`] does, with the memory of rank `k` that of machine `machines[k]`.
fn on_machines<T: Send>(job: &Job, machines: &[u32], f: impl Fn(&mut Shm, &mut Cpu, u64) -> T + Sync) -> Vec<T> {
    let layout = Arc::new(SegmentLayout::new(job, &NATIVE, 0));
    let count = machines.iter().max().unwrap() + 1;
    let segments: Vec<Arc<Segment>> = (0..count).map(|_| Arc::new(Segment::create(layout.bytes).unwrap().1)).collect();
    let (key, address) = (Trust::Loopback.key(), Ipv4Addr::LOCALHOST.into());
    let elsewhere = |here: u32| (0..).zip(machines).filter(|(_, m)| **m != here).map(|(r, _)| r).collect();
    let (ports, _receivers): (Vec<u16>, Vec<Receiver>) = segments
        .iter()
        .zip(0..)
        .map(|(segment, machine)| {
            let (listener, port) = Receiver::listen(address).unwrap();
            let report = |why: String| panic!("{why}");
            (port, Receiver::start(listener, (segment.clone(), layout.clone()), key.clone(), elsewhere(machine), report).unwrap())
        })
        .unzip();
    let place = |machine: &u32| RankPlacement { machine: *machine, host: "here".into(), address, port: ports[*machine as usize], cores: 0 };
    let spread = Spread { run: [0; 16], key: key.clone(), places: machines.iter().map(place).collect() };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..layout.world)
            .map(|rank| {
                let (f, spread) = (&f, &spread);
                let board = StatusBoard { segment: &segments[machines[rank as usize] as usize], layout: &layout };
                scope.spawn(move || {
                    // SAFETY: there are no kernels.
                    let library = unsafe { KernelLibrary::linked(vec![]) };
                    let mut device =
                        Cpu::new(&[], library, Arena::ALL.map(|arena| if arena == Arena::Disk { 0 } else { 4 << 20 }), None, &Threads::one())
                            .unwrap();
                    f(&mut Shm::new(board, rank, 100, Wires::new(rank, spread)), &mut device, rank)
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

/// What every rank holds after a collective of `give` elements of `number(rank, index)`: the same on one machine and
/// on several.
fn exchanged(dp: u64, kind: Collective, dtype: DType, count: u64, number: impl Fn(u64, u64) -> f64 + Sync) -> Vec<Vec<f64>> {
    let (job, exchange) = all_ranks(dp, kind, dtype, count);
    let members: Vec<u64> = (0..dp).collect();
    let (give, get) = exchange.elements(dp);
    let run = |shm: &mut Shm, device: &mut Cpu, rank: u64| {
        let data: Vec<f64> = (0..give).map(|i| number(rank, i)).collect();
        device.write(exchange.src, dtype, &data);
        assert_eq!(shm.collective(device, &members, &exchange).unwrap(), Progress::Done);
        let mut out = vec![0.0; get as usize];
        device.read(exchange.dst, dtype, &mut out);
        out
    };
    let here = on_ranks(&job, run);
    for machines in [[0, 1, 0], [0, 1, 2]] {
        assert_eq!(on_machines(&job, &machines[..dp as usize], run), here);
    }
    here
}

/// More than a chunk of 256 KiB, and not a multiple of anything.
const MANY: u64 = 70_001;

#[test]
fn sums_of_f32_are_in_rank_order_on_every_rank() {
    // From left to right, (1 + 2^24) + -2^24 is 0 in f32; any other order gives 1.
    let number = |rank: u64, _| [1.0, 16_777_216.0, -16_777_216.0][rank as usize];
    for rank in exchanged(3, Collective::AllReduce(Reduce::Sum), DType::F32, MANY, number) {
        assert_eq!(rank, vec![0.0; MANY as usize]);
    }
}

/// In bf16 256 + 1 is 256 again, and in fp16 2048 + 1 is 2048.
#[test]
fn sums_of_16_bit_floats_are_rounded_once() {
    for (dtype, great, sum) in [(DType::Bf16, 256.0, 258.0), (DType::F16, 2048.0, 2050.0)] {
        for kind in [Collective::AllReduce(Reduce::Sum), Collective::ReduceScatter(Reduce::Sum)] {
            for rank in exchanged(3, kind, dtype, MANY, |rank, _| if rank == 0 { great } else { 1.0 }) {
                assert_eq!(rank, vec![sum; MANY as usize]);
            }
        }
    }
}

#[test]
fn all_gather_concatenates_in_rank_order() {
    for rank in exchanged(2, Collective::AllGather, DType::F32, MANY, |rank, i| (rank * MANY + i) as f64) {
        assert!(rank.iter().enumerate().all(|(i, x)| *x == i as f64));
    }
}

#[test]
fn reduce_scatter_gives_each_rank_its_part() {
    let ranks = exchanged(2, Collective::ReduceScatter(Reduce::Max), DType::I32, MANY, |rank, i| (i * 3 + rank) as f64);
    for (k, rank) in ranks.iter().enumerate() {
        assert!(rank.iter().enumerate().all(|(i, x)| *x == ((k as u64 * MANY + i as u64) * 3 + 1) as f64));
    }
}

#[test]
fn all_to_all_sends_part_k_to_member_k() {
    let ranks = exchanged(3, Collective::AllToAll, DType::F32, 1001, |rank, i| (rank * 10_000 + i) as f64);
    for (me, rank) in ranks.iter().enumerate() {
        assert!(rank.iter().enumerate().all(|(i, x)| *x == (i / 1001 * 10_000 + me * 1001 + i % 1001) as f64));
    }
}

#[test]
fn shift_passes_on_to_the_next_member_and_around() {
    let ranks = exchanged(3, Collective::Shift, DType::F32, MANY, |rank, i| (rank * MANY + i) as f64);
    for (me, rank) in ranks.iter().enumerate() {
        let from = (me as u64 + 2) % 3;
        assert!(rank.iter().enumerate().all(|(i, x)| *x == (from * MANY + i as u64) as f64));
    }
}

#[test]
fn any_of_bools() {
    let ranks = exchanged(2, Collective::AllReduce(Reduce::Any), DType::Bool, 4, |rank, i| f64::from(i >> rank & 1 == 1));
    assert_eq!(ranks, vec![vec![0.0, 1.0, 1.0, 1.0]; 2]);
}

#[test]
fn members_that_disagree_are_named() {
    let (job, exchange) = all_ranks(2, Collective::AllReduce(Reduce::Sum), DType::F32, 8);
    let errors = on_ranks(&job, |shm, device, rank| {
        let mine = Exchange { count: 8 - rank, ..exchange };
        let error = shm.collective(device, &[0, 1], &mine).unwrap_err().to_string();
        shm.abort("disagreement");
        error
    });
    assert!(errors.contains(&"rank 0 issues all_reduce sum of 8 f32, rank 1 issues all_reduce of 7 f32".to_owned()), "{errors:?}");
}

/// A stage sends `count` elements to the next one.
fn pipe(count: u64) -> Job {
    let place = BufferAddress::start(BufferId(0));
    let mut job = job(&Split { microbatches: 1, pp: 2, dp: 1, tp: 1 }, vec![]);
    for program in &mut job.programs {
        for command in program.bodies.iter_mut().flat_map(|b| &mut b.commands) {
            if let Action::Send { hops: 1, count: n, src, .. } = &mut command.action {
                (*n, *src) = (count, place.clone());
            }
        }
    }
    job
}

#[test]
fn messages_longer_than_a_piece_arrive_in_order() {
    let job = pipe(MANY);
    let run = |shm: &mut Shm, device: &mut Cpu, rank: u64| {
        let message = Message { channel: Channel(0), dtype: DType::F32, count: MANY, at: Location { arena: Arena::Persistent, byte: 0 } };
        let number = |round: u64, i: u64| (round * 100_000 + i) as f64;
        for round in 0..5 {
            let mut data: Vec<f64> = (0..MANY).map(|i| number(round, i)).collect();
            if rank == 0 {
                device.write(message.at, DType::F32, &data);
                shm.send(device, 1, &message).unwrap();
            } else {
                shm.recv(device, 0, &message).unwrap();
                device.read(message.at, DType::F32, &mut data);
                assert!(data.iter().enumerate().all(|(i, x)| *x == number(round, i as u64)));
            }
        }
    };
    on_ranks(&job, run);
    on_machines(&job, &[0, 1], run);
}

#[test]
fn the_guaranteed_messages_are_sent_without_a_receiver() {
    let job = Job { in_flight: 3, ..pipe(MANY) };
    on_ranks(&job, |shm, device, rank| {
        let message = Message { channel: Channel(0), dtype: DType::F32, count: MANY, at: Location { arena: Arena::Persistent, byte: 0 } };
        for _ in 0..=job.in_flight {
            if rank == 0 {
                shm.send(device, 1, &message).unwrap();
            }
        }
    });
}

#[test]
fn a_rank_that_waits_says_for_whom_and_stops_when_the_run_ends() {
    let (job, exchange) = all_ranks(2, Collective::AllReduce(Reduce::Sum), DType::F32, 8);
    let results = on_ranks(&job, |shm, device, rank| {
        if rank == 0 {
            return shm.collective(device, &[0, 1], &exchange).map_err(|e| e.to_string());
        }
        while shm.board.status(0).waits != Some(vec![1]) {
            std::thread::yield_now();
        }
        shm.abort("rank 1 has had enough");
        Ok(Progress::Done)
    });
    assert_eq!(results[0], Err("the run was ended: rank 1 has had enough".to_owned()));
}

/// That ranks on threads take the step of the reference, each with what it attaches to what they share before, and
/// does with it after.
pub(crate) fn steps_agree<A: Fn(u64, &mut Shm) + Sync>(begin: impl Fn(&Job, &SegmentLayout) -> A, end: impl Fn(&mut Shm) + Sync) {
    let (params, inputs) = (fixture::params(), fixture::inputs());
    for split in [Split { microbatches: 2, pp: 1, dp: 2, tp: 2 }, Split { microbatches: 4, pp: 2, dp: 1, tp: 2 }] {
        let job = fixture::job(&split);
        let layout = SegmentLayout::new(&job, &Target::Reference, 100);
        let (_, segment) = Segment::create(layout.bytes).unwrap();
        let board = StatusBoard { segment: &segment, layout: &layout };
        let batch: Vec<Tensor> = job.inputs.iter().map(|i| inputs[&i.name].clone()).collect();
        let plans = Plans::new(&job);
        let (loss, norm, w, _) = fixture::expected(0.25);
        let (attach, end) = (&begin(&job, &layout), &end);
        std::thread::scope(|scope| {
            for rank in 0..layout.world {
                let (job, plans, batch, params, w) = (&job, &plans, &batch, &params, &w);
                scope.spawn(move || {
                    let program = &job.programs[job.stages[job.mesh.stage(rank) as usize].program as usize];
                    let mut rank = Rank::new(job, rank, Reference::new(job, plans, program, arena_bytes(job, rank)), CommandOrder::List);
                    rank.initialise(|held| match held {
                        PersistentId::Param(p) => Some(&params[&job.params[p as usize].name] as &dyn Whole),
                        PersistentId::State(..) | PersistentId::Table(_) => None,
                    });
                    let mut shm = Shm::new(board, rank.rank(), 100, None);
                    attach(rank.rank(), &mut shm);
                    let step = Step { number: 1, learning_rate: 0.25, loss_scale: 1.0, seed: 0, batch };
                    rank.begin(ProgramPhase::Train);
                    assert_eq!(rank.advance(&step, &mut shm).unwrap(), Advance::Finished);
                    assert_eq!(rank.reports(), [Some(loss), Some(norm)]);
                    rank.begin(ProgramPhase::Update);
                    assert_eq!(rank.advance(&step, &mut shm).unwrap(), Advance::Finished);
                    rank.collect(|held, at, values| {
                        if let PersistentId::Param(_) = held {
                            assert_eq!(values, &w[at as usize..][..values.len()]);
                        }
                    });
                    end(&mut shm);
                });
            }
        });
    }
}

#[test]
fn ranks_over_shared_memory_take_the_same_step_as_the_reference() {
    steps_agree(|_, _| |_: u64, _: &mut Shm| {}, |_| {});
}

/// What a receiver of another machine does with these bytes of rank 1's: what it reports, and what the counter at 64
/// is then.
fn received(frame: impl Fn(&mut blake3::Hasher) -> Vec<u8>) -> (Option<String>, u32) {
    let job = fixture::job(&Split { microbatches: 1, pp: 1, dp: 2, tp: 1 });
    let layout = Arc::new(SegmentLayout::new(&job, &NATIVE, 4096));
    let segment = Arc::new(Segment::create(layout.bytes).unwrap().1);
    let (listener, port) = Receiver::listen(Ipv4Addr::LOCALHOST.into()).unwrap();
    let (key, (say, said)) = (Trust::Loopback.key(), std::sync::mpsc::channel());
    let report = move |why| drop(say.send(why));
    let receiver = Receiver::start(listener, (segment.clone(), layout), key.clone(), [1].into(), report).unwrap();
    let stream = std::net::TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
    let hello = postcard::to_stdvec(&1u64).unwrap();
    let until = std::time::Instant::now() + std::time::Duration::from_secs(30);
    let (_, writer) = knock(stream, &key, Purpose::Wire, &hello, until).unwrap().split();
    let (mut stream, mut seal) = {
        let (stream, seal) = writer.into_parts();
        (stream.try_clone().unwrap(), seal)
    };
    std::io::Write::write_all(&mut stream, &frame(&mut seal.begin())).unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    // The receiver hangs up when it has taken all, or will take no more.
    let _ = std::io::Read::read(&mut stream, &mut [0]);
    drop(receiver);
    (said.try_iter().next(), segment.u32(64).load(Ordering::Relaxed))
}

#[test]
fn frames_between_machines_count_only_as_they_were_sent() {
    let sent = |counter: u64, range: u64| {
        move |hasher: &mut blake3::Hasher| {
            let mut frame: Vec<u8> = [1, counter, 5, range, 16].iter().flat_map(|n: &u64| n.to_le_bytes()).collect();
            frame.extend(hasher.update(&frame).finalize().as_bytes());
            frame.extend([7; 16]);
            frame.extend(hasher.update(&[7; 16]).finalize().as_bytes());
            frame
        }
    };
    let whole = sent(64, 128);
    assert_eq!(received(whole), (None, 5));
    let tampered = "of what rank 1 wrote to this machine, data in flight was tampered with: its keyed hash is wrong";
    let length = whole(&mut blake3::Hasher::new()).len();
    // These bytes lie in the numbers, the ranges, the first hash, the data and the last hash.
    for k in [8, 16, 24, 45, 80, length - 1] {
        let changed = |hasher: &mut blake3::Hasher| {
            let mut frame = whole(hasher);
            frame[k] ^= 1;
            frame
        };
        assert_eq!(received(changed), (Some(tampered.into()), 0), "byte {k}");
    }
    // A frame that is cut off does not count, and its sender knows that.
    assert_eq!(received(|hasher| whole(hasher)[..length - 1].to_vec()), (None, 0));
    let (error, counter) = received(sent(64, u64::MAX - 8));
    assert!(error.unwrap().contains("does not fit this machine's memory") && counter == 0);
}
