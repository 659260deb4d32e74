//! What ranks that have met tell each other before a run: each says to rank 0 where it is and what it would do, and
//! rank 0 to all where everybody is.
//!
//! **Invariant:** a rank does what its own user told it. From rank 0 it takes the places of ranks, a number of the
//! run and NCCL's id, and checks them; nothing that it takes is a path, a program, or an option.

use super::control::from_bytes;
use super::error::RunError;
use super::options::RunOptions;
use super::orders::exchange_by_nccl;
use super::save;
use crate::cpu;
use crate::gpu::nccl;
use crate::protocol::{self, Orders, RankPlacement, SaveFile, Saves, Spread};
use crate::rendezvous::{Link, Trust, random};
use crate::shm::{Segment, SegmentLayout};
use crate::world::World;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fs::{self, File};
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

/// Most bytes of a machine's name. Linux has 64.
const NAME: usize = 255;

/// What each process brings to the meeting.
#[derive(Serialize, Deserialize)]
pub struct Hello {
    pub(super) host: String,
    /// The same for processes that can share memory.
    pub(super) machine: String,
    pub(super) port: u16,
    pub(super) cores: u64,
    /// The orders of this process's own user, as JSON, to be compared with rank 0's.
    pub(super) orders: Vec<u8>,
}

impl Hello {
    /// The hello of this process, whose rank takes what others write at `port`.
    pub fn new(world: &World, port: u16, orders: &Orders) -> Hello {
        let orders = serde_json::to_vec(orders).expect("invariant: plain data with text keys");
        Hello { host: host(), machine: machine(world), port, cores: cores(), orders }
    }
}

/// The first option that a rank has in another way than rank 0: `conditions.batch is 8, not 4`.
fn first_difference(own: &Value, theirs: &Value) -> Option<String> {
    let step = |key: &str, own: Option<&Value>, theirs: Option<&Value>| {
        let rest = first_difference(own.unwrap_or(&Value::Null), theirs.unwrap_or(&Value::Null))?;
        let dot = if rest.starts_with(" is ") { "" } else { "." };
        Some(format!("{key}{dot}{rest}"))
    };
    match (own, theirs) {
        (own, theirs) if own == theirs => None,
        (Value::Object(a), Value::Object(b)) => a.keys().chain(b.keys()).find_map(|key| step(key, a.get(key), b.get(key))),
        (Value::Array(a), Value::Array(b)) => (0..a.len().max(b.len())).find_map(|k| step(&k.to_string(), a.get(k), b.get(k))),
        _ => Some(format!(" is {}, not {}", shown(theirs), shown(own))),
    }
}

/// An option's value for a message, cut off where it is long.
fn shown(value: &Value) -> String {
    let text = match value {
        Value::Null => return "not given".into(),
        Value::String(text) => format!("`{text}`"),
        other => other.to_string(),
    };
    match text.char_indices().nth(100) {
        Some((end, _)) => format!("{}..", &text[..end]),
        None => text,
    }
}

/// What rank 0 tells all.
#[derive(Serialize, Deserialize)]
pub struct LaunchPlan {
    run: [u8; 16],
    /// Placement of each rank. Rank 0's machine has no address: others know it by the one at which they reach it.
    places: Vec<RankPlacement>,
    /// By which GPUs that exchange by themselves find each other.
    pub nccl: Option<Vec<u8>>,
}

impl LaunchPlan {
    /// Where all ranks are, if they agree on what to do. `words` are their [`Hello`]s.
    pub fn new(links: &[Link], orders: &Orders, words: &[Vec<u8>], nccl: Option<Vec<u8>>) -> Result<LaunchPlan, RunError> {
        let wrong = |e: String| RunError::Meeting(e);
        let hellos: Vec<Hello> = words.iter().map(|w| from_bytes(w)).collect::<Result<_, _>>()?;
        let own = serde_json::to_value(orders).map_err(|e| wrong(e.to_string()))?;
        let mut machines: Vec<&str> = vec![];
        let mut places = vec![];
        for (rank, hello) in hellos.iter().enumerate() {
            let theirs: Value = serde_json::from_slice(&hello.orders).map_err(|e| wrong(e.to_string()))?;
            if let Some(difference) = first_difference(&own, &theirs) {
                let host = &hello.host;
                return Err(wrong(format!(
                    "rank {rank} on {host} was started with other options than rank 0: {difference}; all ranks need the same flags, and files at the same \
                     absolute paths"
                )));
            }
            let machine = machines.iter().position(|m| *m == hello.machine).unwrap_or_else(|| {
                machines.push(&hello.machine);
                machines.len() - 1
            });
            let seen = if machine == 0 { None } else { links[rank - 1].peer() };
            let address = seen.unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
            places.push(RankPlacement { machine: machine as u32, host: hello.host.clone(), address, port: hello.port, cores: hello.cores });
        }
        Ok(LaunchPlan { run: random().map_err(RunError::Network)?, places, nccl })
    }

    /// The same with the key that follows from the own secret.
    pub fn spread(&self, trust: &Trust) -> Spread {
        Spread { run: self.run, key: trust.key().of_run(&self.run), places: self.places.clone() }
    }

    /// What is wrong with it, for the rank that said `hello`.
    fn wrong(&self, hello: &Hello, orders: &Orders, world: &World, options: &RunOptions) -> Option<String> {
        let count = self.places.len();
        if count as u64 != world.size {
            return Some(format!("{count} places for {} ranks", world.size));
        }
        let own = &self.places[world.rank as usize];
        if (&own.host, own.port, own.cores) != (&hello.host, hello.port, hello.cores) {
            return Some(format!("another place for rank {} than its own", world.rank));
        }
        let mut machines = 0;
        for (rank, place) in self.places.iter().enumerate() {
            // Machines are numbered in the order in which they first occur.
            if place.machine > machines || rank == 0 && place.machine != 0 {
                return Some(format!("rank {rank} on machine {} of {machines}", place.machine));
            }
            machines = machines.max(place.machine + 1);
            if place.host.len() > NAME || place.host.chars().any(char::is_control) {
                return Some(format!("a machine of rank {rank} whose name is none"));
            }
            if options.trust == Trust::Loopback && place.machine > 0 && !place.address.is_loopback() {
                return Some(format!("rank {rank} at {}, though ranks without a secret are all on one machine", place.address));
            }
        }
        let bytes = self.nccl.as_ref().map(Vec::len);
        if bytes != exchange_by_nccl(orders, options).then_some(nccl::ID) {
            return Some(format!("{} bytes of an id of NCCL's", bytes.unwrap_or(0)));
        }
        None
    }
}

/// What this rank is to do, which is not rank 0, given rank 0's plan: its own `orders`, on the places of the plan.
/// `hub` is the address at which it reaches rank 0.
pub fn followed(answer: &[u8], hello: &Hello, orders: Orders, world: &World, options: &RunOptions, hub: Option<IpAddr>) -> Result<Orders, RunError> {
    let plan: LaunchPlan = from_bytes(answer)?;
    if let Some(what) = plan.wrong(hello, &orders, world, options) {
        return Err(RunError::Meeting(format!("rank {}: what rank 0 says of the ranks cannot be: {what}", world.rank)));
    }
    let mut spread = plan.spread(&options.trust);
    if let Some(hub) = hub {
        spread.places.iter_mut().filter(|p| p.machine == 0).for_each(|p| p.address = hub);
    }
    let saved = |file: &Option<SaveFile>| file.as_ref().map(|f| SaveFile { at: save::beside(&f.at, &spread.tag()), name: f.name.clone() });
    let (save_weights, save_state) = (saved(&orders.save_weights), saved(&orders.save_state));
    let saves = orders.saves.clone().map(|saves| Saves { tag: spread.tag(), ..saves });
    Ok(Orders { save_weights, save_state, saves, nccl: plan.nccl, spread: Some(spread), ..orders })
}

/// Bytes for orders at the start of a machine's memory. All machines have the same, though orders differ in
/// addresses.
pub fn room(world: u64) -> u64 {
    (64 << 10) + world * 1024
}

/// The memory of one machine.
pub struct MachineMemory {
    pub file: OwnedFd,
    pub segment: Segment,
}

/// Where it is, as the process of the first rank there says.
#[derive(Serialize, Deserialize)]
pub struct MemoryPlace {
    process: u32,
    file: i32,
}

impl MachineMemory {
    /// New memory with orders.
    pub fn make(orders: &Orders, room: u64, layout: &SegmentLayout) -> Result<MachineMemory, RunError> {
        let packed = protocol::pack(orders, room);
        if packed.len() as u64 > room {
            return Err(RunError::Meeting(format!("the options of a run, its paths foremost, take {} bytes, more than {room}", packed.len())));
        }
        let (file, segment) = Segment::create(layout.bytes).map_err(|cause| RunError::Memory { bytes: layout.bytes, cause })?;
        segment.slice_mut(0, packed.len()).copy_from_slice(&packed);
        Ok(MachineMemory { file, segment })
    }

    pub fn place(&self) -> MemoryPlace {
        MemoryPlace { process: std::process::id(), file: self.file.as_raw_fd() }
    }

    /// Opens the memory that the first rank of this machine has made, if it is for the same orders as this rank's.
    pub fn open(memories: &[u8], first: u64, own: &Orders, layout: &SegmentLayout) -> Result<MachineMemory, RunError> {
        let memories: Vec<(u64, MemoryPlace)> = from_bytes(memories)?;
        let made = memories.into_iter().find(|m| m.0 == first);
        let (_, MemoryPlace { process, file }) = made.ok_or_else(|| RunError::Meeting(format!("rank {first} made no memory")))?;
        let path = format!("/proc/{process}/fd/{file}");
        let failed = |cause| RunError::Io { file: path.clone().into(), cause };
        // Only the memory of a run is opened, whatever numbers were given.
        let name = fs::read_link(&path).map_err(failed)?;
        if !name.as_os_str().as_encoded_bytes().starts_with(Segment::NAME) {
            return Err(RunError::Meeting(format!("`{path}` is no memory of a run, but `{}`", name.display())));
        }
        let file = File::options().read(true).write(true).open(&path).map(OwnedFd::from).map_err(failed)?;
        let segment = Segment::map(&file).map_err(failed)?;
        let (found, room) = protocol::unpack(&segment).map_err(failed)?;
        if room != self::room(layout.world) || segment.bytes() != layout.bytes || !are_own(&found, own, process) {
            return Err(RunError::Meeting(format!("`{path}` is the memory of another run")));
        }
        Ok(MachineMemory { file, segment })
    }
}

/// Whether orders in the memory that a process of this machine has made are those of this rank. They may differ in
/// the address of rank 0's machine, and in where files are written that shall have their names later: rank 0's
/// process can hold them open, if all ranks are on its machine.
fn are_own(found: &Orders, own: &Orders, maker: u32) -> bool {
    let held = format!("/proc/{maker}/fd");
    let fits = |(found, own): (&Option<SaveFile>, &Option<SaveFile>)| match (found, own) {
        (Some(found), Some(own)) => found.name == own.name && (found.at == own.at || found.at.parent() == Some(Path::new(&held))),
        (found, own) => found == own,
    };
    let rest = |orders: &Orders| {
        let mut spread = orders.spread.clone();
        let places = spread.iter_mut().flat_map(|s| &mut s.places);
        places.filter(|p| p.machine == 0).for_each(|p| p.address = Ipv4Addr::UNSPECIFIED.into());
        Orders { spread, save_weights: None, save_state: None, ..orders.clone() }
    };
    [(&found.save_weights, &own.save_weights), (&found.save_state, &own.save_state)].into_iter().all(fits) && rest(found) == rest(own)
}

/// Processes that say the same here see each other's files and memory: one boot of one machine, one space of process
/// numbers, one node of the launcher.
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

/// The name of this machine.
pub fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}
