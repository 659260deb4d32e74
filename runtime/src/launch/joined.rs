//! Runs in a world that another launcher started. Each process starts one rank, as its own child, so that it has the cores and GPUs which the launcher gave the process.
//! Ranks of one machine share memory, which the first of them makes; between machines they write to each other's memory over TCP ([`Wires`](crate::shm::Wires)).
//!
//! Rank 0's process leads the run, as the one launcher does elsewhere. The others pass on to it what their ranks say and how they are, and hear from
//! it that the run goes on, is done, or has failed and why.

use super::orders::nccl_id;
use super::process::{Ended, Process, Pulse, Said, leave};
use super::ranks::{BEAT, Ranks, TAKES, waits};
use super::{Lead, Progress, RunError, RunOptions, Summary, TICK, ceilings, conduct};
use crate::artifact::Artifact;
use crate::cpu;
use crate::protocol::{self, Event, Orders, Place, Spread};
use crate::rendezvous::{Link, Member, Star, meet};
use crate::shm::{Board, Layout, Receiver, Segment};
use crate::world::World;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, Read};
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// What a rank's process says to rank 0's.
#[derive(Serialize, Deserialize)]
pub enum Up {
    Event(Event),
    Pulse(Pulse),
    Ended(Ended),
}

/// What rank 0's process says to the others'.
#[derive(Clone, Serialize, Deserialize)]
pub enum Down {
    Alive,
    /// All ranks are done.
    Done,
    End {
        reason: String,
        waiting: Vec<String>,
    },
}

/// What each process brings to the meeting.
#[derive(Serialize, Deserialize)]
struct Hello {
    host: String,
    /// The same for processes that can share memory.
    machine: String,
    port: u16,
    cores: u64,
    /// As it would run alone; JSON.
    orders: Vec<u8>,
}

/// Where the memory of a machine is, as its first rank's process says.
#[derive(Serialize, Deserialize)]
struct Memory {
    process: u32,
    file: i32,
}

/// Processes that have met and go on in rounds, each of which all pass or none.
struct Met {
    star: Star,
    here: String,
    deadline: Instant,
}

impl Met {
    /// A round; gives the own word and rank 0's answer to all, which it makes of everyone's words. What goes wrong here is said everywhere.
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

fn plain<T: Serialize>(word: &T) -> Vec<u8> {
    postcard::to_stdvec(word).expect("invariant: plain data")
}

fn json<T: Serialize>(word: &T) -> Vec<u8> {
    serde_json::to_vec(word).expect("invariant: plain data with text keys")
}

/// Runs one rank of an artifact; `progress` is called by rank 0's process.
pub fn run(
    artifact: &Artifact,
    options: &RunOptions,
    world: &World,
    own: Result<Orders, RunError>,
    progress: &mut dyn FnMut(&Progress),
) -> Result<Summary, RunError> {
    let deadline = Instant::now() + options.meeting_limit;
    let member = Member { rank: world.rank, world: world.size, id: artifact.id.clone() };
    let star = meet(&world.meeting, &member, deadline).map_err(|e| RunError::Meeting(e.to_string()))?;
    let mut met = Met { star, here: format!("rank {} on {}", world.rank, host()), deadline };

    let own = own.and_then(|orders| {
        let (listener, port) = Receiver::listen().map_err(RunError::Network)?;
        let hello = Hello { host: host(), machine: machine(world), port, cores: cores(), orders: json(&orders) };
        Ok((hello, orders, listener))
    });
    // Rank 0 says what is to be done.
    let mut lead = None;
    let ((_, _, listener), answer) = met.round(
        own,
        |(hello, ..)| plain(hello),
        |(_, orders, _), links, words| {
            let (spread, nccl) = (Some(spread(links, orders, &words)?), nccl_id(orders, options)?);
            let orders = Orders { spread, nccl, ..orders.clone() };
            Ok(json(&lead.insert(Lead::new(artifact, options, orders)?).orders))
        },
    )?;
    // With room for addresses, which are others for other machines.
    let room = 64 + answer.len() as u64 + 64 * world.size;
    let mut orders: Orders = serde_json::from_slice(&answer).map_err(|e| RunError::Meeting(e.to_string()))?;
    if let (Star::Spoke(link), Some(spread)) = (&met.star, &mut orders.spread) {
        name_hub(spread, link.peer());
    }
    let spread = orders.spread.clone().ok_or_else(|| RunError::Meeting("rank 0 said not where ranks are".into()))?;

    let first = spread.neighbours(world.rank)[0];
    let packed = protocol::pack(&orders, room);
    let layout = Arc::new(Layout::new(&artifact.job, &artifact.manifest.target, room));
    let made = if first == world.rank { make(&layout, &packed).map(Some) } else { Ok(None) };
    let place = |(file, _): &(OwnedFd, Segment)| Memory { process: std::process::id(), file: file.as_raw_fd() };
    let (made, memories) = met.round(
        made,
        |made| plain(&made.as_ref().map(place)),
        |_, _, words| {
            let memories = (0u64..).zip(words).map(|(rank, word)| Ok(read::<Option<Memory>>(&word)?.map(|m| (rank, m))));
            Ok(plain(&memories.filter_map(Result::transpose).collect::<Result<Vec<_>, RunError>>()?))
        },
    )?;
    let opened = match made {
        Some(made) => Ok(made),
        None => open(&memories, first),
    };
    // Nobody begins unless all can.
    let ((memory, segment), _) = met.round(opened, |_| vec![], |_, _, _| Ok(vec![]))?;

    // All at the same time, as they will run.
    let ceilings = ceilings(&orders, world.size, world.rank..world.rank + 1);
    let segment = Arc::new(segment);
    let receiver = Receiver::start(listener, segment.clone(), layout.clone(), spread.token).map_err(RunError::Network)?;
    let board = Board { segment: &segment, layout: &layout };
    let outcome = match met.star {
        Star::Hub(links) => {
            let started = |cause| RunError::Start { binary: options.rank_binary.clone(), cause };
            let mut ranks = Ranks::new(&artifact.job, board);
            let hosts = spread.places.iter().skip(1).map(|p| p.host.clone());
            ranks.start(&options.rank_binary, &memory).map_err(started)?;
            links.into_iter().zip(hosts).try_for_each(|(link, host)| ranks.link(link, host)).map_err(started)?;
            conduct(artifact, options, lead.expect("invariant: rank 0 leads"), ranks, ceilings, progress)
        }
        Star::Spoke(link) => follow(artifact, options, world, link, board, &memory).map(|()| Summary::default()),
    };
    drop(receiver);
    outcome
}

/// Where all ranks are, if they agree on what to do.
fn spread(links: &[Link], orders: &Orders, words: &[Vec<u8>]) -> Result<Spread, RunError> {
    let wrong = |e: String| RunError::Meeting(e);
    let hellos: Vec<Hello> = words.iter().map(|w| read(w)).collect::<Result<_, _>>()?;
    let own = serde_json::to_value(orders).map_err(|e| wrong(e.to_string()))?;
    let mut machines: Vec<&str> = vec![];
    let mut places = vec![];
    for (rank, hello) in hellos.iter().enumerate() {
        let theirs: serde_json::Value = serde_json::from_slice(&hello.orders).map_err(|e| wrong(e.to_string()))?;
        let differs = own.as_object().into_iter().flatten().find(|(key, value)| theirs.get(key.as_str()) != Some(value));
        if let Some((key, value)) = differs {
            let there = theirs.get(key.as_str()).cloned().unwrap_or_default();
            return Err(wrong(format!("rank {rank} on {} was started with another `{key}` than rank 0: {there}, not {value}", hello.host)));
        }
        let machine = machines.iter().position(|m| *m == hello.machine).unwrap_or_else(|| {
            machines.push(&hello.machine);
            machines.len() - 1
        });
        // Others know rank 0's machine by the address at which they reach it.
        let seen = if machine == 0 { None } else { links[rank - 1].peer() };
        let address = seen.unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
        places.push(Place { machine: machine as u32, host: hello.host.clone(), address, port: hello.port, cores: hello.cores });
    }
    let mut token = [0; 8];
    File::open("/dev/urandom").and_then(|mut f| f.read_exact(&mut token)).map_err(RunError::Network)?;
    Ok(Spread { token: u64::from_le_bytes(token), places })
}

fn name_hub(spread: &mut Spread, hub: Option<IpAddr>) {
    if let Some(hub) = hub {
        spread.places.iter_mut().filter(|p| p.machine == 0).for_each(|p| p.address = hub);
    }
}

fn make(layout: &Layout, packed: &[u8]) -> Result<(OwnedFd, Segment), RunError> {
    let (memory, segment) = Segment::create(layout.bytes).map_err(|cause| RunError::Memory { bytes: layout.bytes, cause })?;
    segment.slice_mut(0, packed.len()).copy_from_slice(packed);
    Ok((memory, segment))
}

fn read<T: for<'de> Deserialize<'de>>(word: &[u8]) -> Result<T, RunError> {
    postcard::from_bytes(word).map_err(|e| RunError::Meeting(format!("a rank said something unreadable: {e}")))
}

/// Opens the memory that the first rank of this machine has made.
fn open(memories: &[u8], first: u64) -> Result<(OwnedFd, Segment), RunError> {
    let memories: Vec<(u64, Memory)> = read(memories)?;
    let made = memories.into_iter().find(|m| m.0 == first);
    let (_, Memory { process, file }) = made.ok_or_else(|| RunError::Meeting(format!("rank {first} made no memory")))?;
    let path = format!("/proc/{process}/fd/{file}");
    let opened = File::options().read(true).write(true).open(&path).map(OwnedFd::from);
    let mapped = opened.and_then(|file| Ok((Segment::map(&file)?, file)));
    mapped.map(|(segment, file)| (file, segment)).map_err(|cause| RunError::Io { file: path.into(), cause })
}

/// Passes on what the own rank says, until rank 0 says that the run has ended.
fn follow(artifact: &Artifact, options: &RunOptions, world: &World, mut link: Link, board: Board, memory: &OwnedFd) -> Result<(), RunError> {
    let rank = world.rank;
    let (say, said) = mpsc::channel();
    let (hears, heard) = mpsc::channel();
    let mut ear = link.twin().map_err(RunError::Network)?;
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
            let ended = Ended { how: format!("could not be started ({cause})"), wrote: String::new(), status: Default::default() };
            let _ = link.say(&Up::Ended(ended), TAKES);
            return Err(RunError::Start { binary: options.rank_binary.clone(), cause });
        }
    };
    let silence = options.patience.max(BEAT) * 4;
    let (mut last, mut beat) = (Instant::now(), Instant::now());
    let mut is_open = true;
    let outcome = loop {
        // What rank 0 is told it may have no ears for any more: then it has said why, or is gone, and that is heard next.
        match said.recv_timeout(TICK) {
            Ok(Said::Event(_, event)) => drop(link.say(&Up::Event(event), TAKES)),
            Ok(Said::Closed(..)) if is_open => {
                is_open = false;
                let _ = link.say(&Up::Ended(process.ended(&board)), TAKES);
            }
            Ok(_) => {}
            Err(mpsc::RecvTimeoutError::Timeout) => {}
            // The process has ended and nothing more will be said: what is left is to hear from rank 0.
            Err(mpsc::RecvTimeoutError::Disconnected) => std::thread::sleep(TICK),
        }
        if beat.elapsed() >= BEAT {
            beat = Instant::now();
            let pulse = if is_open { process.pulse(&board) } else { Pulse::default() };
            let _ = link.say(&Up::Pulse(pulse), TAKES);
        }
        let own = || waits(&artifact.job, rank, &board.status(rank)).into_iter().collect();
        match heard.try_recv() {
            Ok(Ok(Down::Alive)) => last = Instant::now(),
            Ok(Ok(Down::Done)) => break Ok(()),
            Ok(Ok(Down::End { reason, waiting })) => break Err(RunError::Ranks { reason, waiting }),
            Ok(Err(_)) | Err(mpsc::TryRecvError::Disconnected) => {
                let reason = format!("rank 0's `mcc run` on {} is gone", world.meeting.host);
                break Err(RunError::Ranks { reason, waiting: own() });
            }
            Err(mpsc::TryRecvError::Empty) if last.elapsed() > silence => {
                let reason = format!("rank 0's `mcc run` on {} has not been heard of for {} s", world.meeting.host, last.elapsed().as_secs());
                break Err(RunError::Ranks { reason, waiting: own() });
            }
            Err(mpsc::TryRecvError::Empty) => {}
        }
    };
    board.end(&match &outcome {
        Ok(()) => "the run is done".to_owned(),
        Err(e) => e.to_string(),
    });
    leave(&mut process, Instant::now() + Duration::from_millis(300));
    outcome
}

fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Processes that say the same here see each other's files and memory: one boot of one machine, one space of process numbers, one node of the launcher.
fn machine(world: &World) -> String {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let numbers = fs::read_link("/proc/self/ns/pid").map(|p| p.display().to_string()).unwrap_or_default();
    let node = world.node.map(|n| n.to_string()).unwrap_or_default();
    format!("{}/{}/{numbers}/{node}", host(), boot.trim())
}

/// A number for the cores that this process may run on.
fn cores() -> u64 {
    let list: Vec<u8> = cpu::allowed_cores().iter().flat_map(|c| c.to_le_bytes()).collect();
    let hash = blake3::hash(&list);
    u64::from_le_bytes(hash.as_bytes()[..8].try_into().expect("invariant: eight bytes"))
}
