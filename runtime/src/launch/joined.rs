//! Runs in a world that another launcher started. Each process starts one rank, as its own child, so that it has the
//! cores and GPUs which the launcher gave the process. Ranks of one machine share memory, which the first of them
//! makes; between machines they write to each other's memory over TCP ([`Wires`](crate::shm::Wires)).
//!
//! Rank 0's process leads the run, as the one launcher does elsewhere. The others pass on to it what their ranks say
//! and how they are, and hear from it that the run goes on, is done, or has failed and why.

use super::control::{BEAT, Down, TAKES, Up, from_bytes, to_bytes};
use super::error::{RunError, RunFailure};
use super::lead::{Limits, RunOutputs, TICK, conduct};
use super::options::RunOptions;
use super::orders::nccl_id;
use super::plan::{self, Hello, LaunchPlan, MachineMemory, MemoryPlace, host};
use super::process::{self, LauncherEvent, Process, RankHealth, leave};
use super::progress::{Note, RunEvent, Summary};
use super::ranks::{Ranks, waits};
use super::stop::{RendezvousState, RunEnd};
use crate::artifact::Artifact;
use crate::protocol::{Event, Orders};
use crate::rendezvous::{Link, Member, StarLinks, meet};
use crate::shm::{Receiver, SegmentLayout, StatusBoard};
use crate::world::World;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// Processes that have met and go on in rounds, each of which all pass or none.
struct Rendezvous {
    star: StarLinks,
    here: String,
    deadline: Instant,
}

impl Rendezvous {
    /// A round; gives the own word and rank 0's answer to all, which it makes of everyone's words. What goes wrong
    /// here is said everywhere.
    fn round<T>(
        &mut self,
        word: Result<T, RunError>,
        pack: impl Fn(&T) -> Vec<u8>,
        make: impl FnOnce(&T, &[Link], Vec<Vec<u8>>) -> Result<Vec<u8>, RunError>,
    ) -> Result<(T, Vec<u8>), RunError> {
        let said = match &word {
            Ok(word) => Ok(pack(word)),
            Err(e) => Err(format!("{}: {e}", self.here)),
        };
        let mut failed = None;
        let answer = self.star.round(said, self.deadline, |links, words| match &word {
            Ok(own) => make(own, links, words).map_err(|e| {
                let text = e.to_string();
                failed = Some(e);
                text
            }),
            Err(e) => Err(e.to_string()),
        });
        let word = word?;
        Ok((word, answer.map_err(|e| failed.unwrap_or_else(|| RunError::Meeting(e.to_string())))?))
    }
}

/// Runs one rank of an artifact; `observe` is told of steps by rank 0's process.
pub fn run(
    artifact: &Artifact,
    options: &RunOptions,
    world: &World,
    own: Result<Orders, RunError>,
    observe: &mut dyn FnMut(RunEvent),
) -> Result<Summary, RunError> {
    let deadline = Instant::now() + options.meeting_limit;
    let member = Member { rank: world.rank, world: world.size, id: artifact.id.clone() };
    options.stop.set_meeting(RendezvousState::Begun);
    let mut note = |text| observe(RunEvent::Note(Note::Remark(text)));
    let star = meet(&world.meeting, &member, &options.trust, deadline, &mut note).map_err(|e| RunError::Meeting(e.to_string()))?;
    options.stop.set_meeting(RendezvousState::Over);
    let mut rendezvous = Rendezvous { star, here: format!("rank {} on {}", world.rank, host()), deadline };

    let own = own.and_then(|orders| {
        let (listener, port) = Receiver::listen(rendezvous.star.own_address(&world.meeting, &options.trust)).map_err(RunError::Network)?;
        Ok((Hello::new(world, port, &orders), orders, listener))
    });
    // Rank 0 says only where all ranks are; each has its orders from its own user.
    let mut lead = None;
    let ((hello, orders, listener), answer) = rendezvous.round(
        own,
        |(hello, ..)| to_bytes(hello),
        |(_, orders, _), links, words| {
            let plan = LaunchPlan::new(links, orders, &words, nccl_id(orders, options)?)?;
            let (spread, nccl) = (Some(plan.spread(&options.trust)), plan.nccl.clone());
            lead = Some(RunOutputs::new(artifact, options, Orders { spread, nccl, ..orders.clone() })?);
            Ok(to_bytes(&plan))
        },
    )?;
    let (orders, mut lead) = match (&rendezvous.star, lead) {
        (StarLinks::Spoke(link), _) => (plan::followed(&answer, &hello, orders, world, options, link.peer())?, None),
        (StarLinks::Hub(_), lead) => (lead.as_ref().map_or(orders, |l| l.orders.clone()), lead),
    };
    let spread = orders.spread.as_ref().expect("invariant: those that met are spread");

    let first = spread.neighbours(world.rank)[0];
    let room = plan::room(world.size);
    let layout = Arc::new(SegmentLayout::new(&artifact.job, &artifact.manifest.target, room));
    let made = if first == world.rank { MachineMemory::make(&orders, room, &layout).map(Some) } else { Ok(None) };
    let (made, memories) = rendezvous.round(
        made,
        |made| to_bytes(&made.as_ref().map(MachineMemory::place)),
        |_, _, words| {
            let memories = (0u64..).zip(words).map(|(rank, word)| Ok(from_bytes::<Option<MemoryPlace>>(&word)?.map(|m| (rank, m))));
            Ok(to_bytes(&memories.filter_map(Result::transpose).collect::<Result<Vec<_>, RunError>>()?))
        },
    )?;
    let opened = match made {
        Some(made) => Ok(made),
        None => MachineMemory::open(&memories, first, &orders, &layout),
    };
    // No rank begins unless all can.
    let (MachineMemory { file: memory, segment }, _) = rendezvous.round(opened, |_| vec![], |_, _, _| Ok(vec![]))?;

    // All ranks measure at the same time, as they will run at the same time.
    let limits = Limits::new(&orders, world.size, world.rank..world.rank + 1);
    let segment = Arc::new(segment);
    let board = StatusBoard { segment: &segment, layout: &layout };
    let (say, said) = mpsc::channel();
    let report = {
        let (rank, say) = (world.rank, say.clone());
        move |message| {
            drop(say.send(LauncherEvent::Event(rank, Event::Failed { message: format!("rank {rank}: {message}"), help: None, aborted: false })))
        }
    };
    let senders = spread.senders(world.rank);
    let receiver = Receiver::start(listener, (segment.clone(), layout.clone()), spread.key.clone(), senders, report).map_err(RunError::Network)?;
    let outcome = match rendezvous.star {
        StarLinks::Hub(links) => {
            let started = |cause| RunError::Start { binary: options.rank_binary.clone(), cause };
            let mut ranks = Ranks::new(&artifact.job, board, (say, said));
            let hosts = spread.places.iter().skip(1).map(|p| p.host.clone());
            ranks.start(&options.rank_binary, &memory).map_err(started)?;
            links.into_iter().zip(hosts).try_for_each(|(link, host)| ranks.link(link, host)).map_err(started)?;
            conduct(artifact, options, lead.take().expect("invariant: rank 0 leads"), ranks, limits, observe)
        }
        StarLinks::Spoke(link) => {
            follow(artifact, options, world, link, board, &memory, (say, said)).map(|ended| Summary { ended, ..Summary::default() })
        }
    };
    drop(receiver);
    outcome
}

/// Passes on what the own rank says, until rank 0 says that the run has ended.
fn follow(
    artifact: &Artifact,
    options: &RunOptions,
    world: &World,
    link: Link,
    board: StatusBoard,
    memory: &OwnedFd,
    (say, said): (mpsc::Sender<LauncherEvent>, mpsc::Receiver<LauncherEvent>),
) -> Result<RunEnd, RunError> {
    let rank = world.rank;
    let (hears, heard) = mpsc::channel();
    let (mut ear, mut link) = link.split();
    std::thread::Builder::new()
        .name("rank-0".into())
        .spawn(move || {
            loop {
                let word: io::Result<Down> = ear.hear(None);
                let last = word.is_err();
                if hears.send(word).is_err() || last {
                    return;
                }
            }
        })
        .map_err(RunError::Network)?;
    let started = Process::start(&options.rank_binary, rank, memory, say);
    let mut process = match started {
        Ok(process) => process,
        Err(cause) => {
            let ended = process::ProcessExit { how: format!("could not be started ({cause})"), wrote: String::new(), status: Default::default() };
            let _ = link.say(&Up::Ended(ended), TAKES);
            return Err(RunError::Start { binary: options.rank_binary.clone(), cause });
        }
    };
    let silence = options.patience.max(BEAT) * 4;
    let (mut last, mut beat, mut looked) = (Instant::now(), Instant::now(), Instant::now());
    let mut pulse = RankHealth::default();
    let (mut is_open, mut has_asked) = (true, false);
    let outcome = loop {
        if options.stop.is_asked() && !has_asked {
            has_asked = true;
            let _ = link.say(&Up::Stop, TAKES);
        }
        // An error of `say` is ignored: rank 0 has then said why it ends, or is gone, which is heard next.
        match said.recv_timeout(TICK) {
            Ok(LauncherEvent::Event(_, event)) => drop(link.say(&Up::Event(event), TAKES)),
            Ok(LauncherEvent::Closed(..)) if is_open => {
                is_open = false;
                let _ = link.say(&Up::Ended(process.ended(&board)), TAKES);
            }
            Ok(_) => {}
            Err(mpsc::RecvTimeoutError::Timeout) => {}
            // The process has ended and says nothing more, but rank 0 may.
            Err(mpsc::RecvTimeoutError::Disconnected) => std::thread::sleep(TICK),
        }
        // Looks are counted in ticks, as rank 0's launcher counts those at its own process; it hears of them once a beat.
        if looked.elapsed() >= TICK {
            looked = Instant::now();
            pulse = if is_open { process.pulse(&board) } else { RankHealth::default() };
        }
        if beat.elapsed() >= BEAT {
            beat = Instant::now();
            let _ = link.say(&Up::Health(pulse.clone()), TAKES);
        }
        let own = || waits(&artifact.job, rank, &board.status(rank)).into_iter().collect();
        match heard.try_recv() {
            Ok(Ok(Down::Alive)) => last = Instant::now(),
            Ok(Ok(Down::Request(ask))) => {
                board.ask(ask);
                let _ = link.say(&Up::Begun(ask, board.begun(rank)), TAKES);
            }
            Ok(Ok(Down::After(ask, step))) => board.settle(ask, step),
            Ok(Ok(Down::Done(ended))) => break Ok(ended),
            Ok(Ok(Down::End(failure))) => break Err(RunError::Ranks(failure)),
            Ok(Err(e)) if e.kind() == io::ErrorKind::InvalidData => {
                let reason = format!("rank {rank}: of what rank 0's `mcc run` on {} said, {e}", world.meeting.host);
                break Err(RunError::Ranks(RunFailure { waiting: own(), ..RunFailure::new(reason) }));
            }
            Ok(Err(_)) | Err(mpsc::TryRecvError::Disconnected) => {
                let reason = format!("rank 0's `mcc run` on {} is gone", world.meeting.host);
                break Err(RunError::Ranks(RunFailure { waiting: own(), ..RunFailure::new(reason) }));
            }
            Err(mpsc::TryRecvError::Empty) if last.elapsed() > silence => {
                let reason = format!("rank 0's `mcc run` on {} has not been heard of for {} s", world.meeting.host, last.elapsed().as_secs());
                break Err(RunError::Ranks(RunFailure { waiting: own(), ..RunFailure::new(reason) }));
            }
            Err(mpsc::TryRecvError::Empty) => {}
        }
    };
    board.end(&match &outcome {
        Ok(_) => "the run is done".to_owned(),
        Err(e) => e.to_string(),
    });
    leave(&mut process, Instant::now() + Duration::from_millis(300));
    outcome
}
