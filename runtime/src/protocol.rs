//! What a launcher and its ranks say to each other: orders in the shared memory, events over a pipe per rank.

use crate::comm::Position;
use crate::conditions::Conditions;
use crate::cpu::{Threads, allowed_cores};
use crate::data::{DataSets, Spec};
use crate::executor::{CommandOrder, Sum};
use crate::profile::{ProfileChunk, ProfileWindow};
use crate::rendezvous::Key;
use crate::shm::Segment;
use crate::target::{DeviceKind, Exchanges};
use crate::weights::Mark;
use ir::diag::Help;
use ir::op::Real;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::io::{self, Read, Write};
use std::net::IpAddr;
use std::path::PathBuf;

/// What happens when loss or gradient norm is not finite, and a dynamic loss scale that may still fall does not
/// explain it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum OnNonfinite {
    /// The step runs again with every kernel checked, and the run ends naming the first that is to blame.
    #[default]
    Stop,
    /// The step's update is left out; the run ends with the last of so many such steps in a row.
    Skip {
        /// Skipped steps in a row with which the run ends.
        most: u64,
    },
}

/// What every rank is to do. A rank of another build is told what it does not know, and refuses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Orders {
    /// Absolute path of the artifact's directory.
    pub artifact: PathBuf,
    /// [`crate::artifact::Artifact::id`].
    pub id: String,
    /// Files of training data, by absolute paths.
    pub data: Vec<Spec>,
    /// Files of held-out data, by absolute paths.
    pub valid_data: Vec<Spec>,
    /// Data sets in place of both.
    pub sets: Option<DataSets>,
    /// How many samples of these make up training, validation and test.
    pub samples: [u64; 3],
    /// What the user is told of them.
    pub remarks: Vec<String>,
    /// Steps between held-out losses; 0 is never.
    pub eval_interval: u64,
    /// Most global batches of a held-out loss.
    pub eval_batches: u64,
    /// The last step, counted from the first of all runs that this one goes on with.
    pub steps: u64,
    /// Said of what is saved.
    pub conditions: Conditions,
    /// The run ends early after a step that is a multiple of it; 0 is never.
    pub exit_interval: u64,
    /// Ranks say what they hold after each step that is a multiple of it, and after the last; 0 is never.
    pub check_replicas: u64,
    /// What ranks hold their passes against before the first step.
    pub first_step: Option<FirstStep>,
    /// Files of initial weights, by absolute paths; if there are none, weights are drawn or those of `resume`.
    pub init: Vec<PathBuf>,
    /// Parameters that are in none of these, and are drawn.
    pub drawn: Vec<String>,
    /// What these have that is no tensor.
    pub left_out: Vec<String>,
    /// The run that this one goes on with, and where it stood.
    pub resume: Option<(PathBuf, Mark)>,
    /// Sequences that are left out beyond those that were read before.
    pub skip: u64,
    /// Where the ranks write what is to be saved, which has its own name only when it is complete.
    pub save_weights: Option<SaveFile>,
    /// The file for parameters, optimizer states and the step.
    pub save_state: Option<SaveFile>,
    /// Checkpoints that ranks write.
    pub saves: Option<Saves>,
    /// Threads of each rank; by default, the cores that it may run on, shared with others that may run on the same.
    pub threads: Option<usize>,
    /// The seed of weights, of random numbers in steps and of the order of samples; that of `resume` if there is one.
    pub seed: u64,
    /// What happens when loss or gradient norm is not finite.
    pub on_nonfinite: OnNonfinite,
    /// Whether communication runs beside compute.
    pub order: CommandOrder,
    /// The steps that are timed.
    pub profile: Option<ProfileWindow>,
    /// What runs the kernels of all ranks.
    pub device: DeviceKind,
    /// How ranks exchange: by the host, MPI or NCCL.
    pub exchanges: Exchanges,
    /// The id by which GPUs that exchange by themselves find each other.
    pub nccl: Option<Vec<u8>>,
    /// Most blocks of a kernel of NCCL's.
    pub nccl_max_ctas: u32,
    /// Where ranks keep what rests on a disk.
    pub offload_to: Option<PathBuf>,
    /// Where ranks are, if another launcher started them.
    pub spread: Option<Spread>,
}

/// What passes over a few sequences of the first batch should come to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FirstStep {
    /// The first ones, of which copies make a batch.
    pub sequences: u64,
    /// Loss and gradient norm, as they should be on `sequences` sequences.
    pub expected: Vec<Expected>,
}

/// What a report should be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Expected {
    /// The report's name in the job: `loss` or `grad_norm`.
    pub report: String,
    /// What it is where the model is interpreted, in f64.
    pub value: Real,
    /// The greatest distance that is rounding.
    pub allowed: Real,
}

/// A file that ranks write their parts of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SaveFile {
    /// Where it is while it is written.
    pub at: PathBuf,
    /// What the user called it.
    pub name: PathBuf,
}

/// The checkpoints of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Saves {
    /// Their directory.
    pub dir: PathBuf,
    /// What the user called it.
    pub name: PathBuf,
    /// There is one after each step that is a multiple of it, and after the last one; 0 is then only.
    pub interval: u64,
    /// Tells apart what runs write in one directory.
    pub tag: String,
}

impl Saves {
    /// What directories of this run begin with that are not complete.
    pub fn prefix(&self) -> String {
        format!(".unfinished-{}-", self.tag)
    }

    /// Where the checkpoint of a number is until it is complete.
    pub fn unfinished(&self, number: u64) -> PathBuf {
        self.dir.join(format!("{}{number}", self.prefix()))
    }
}

/// Ranks on several machines.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spread {
    /// A number of this run alone, which is no secret.
    pub run: [u8; 16],
    /// Key by which ranks of this run know each other; each process makes it of the secret and `run`.
    pub key: Key,
    /// Of each rank.
    pub places: Vec<RankPlacement>,
}

/// Where a rank is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankPlacement {
    /// Machines count from 0. Ranks of one share memory.
    pub machine: u32,
    /// Name of the machine, as its system has it.
    pub host: String,
    /// Where its launcher takes what ranks of other machines write.
    pub address: IpAddr,
    /// TCP port of `address`.
    pub port: u16,
    /// The same for ranks that may run on the same cores of a machine.
    pub cores: u64,
}

impl Spread {
    /// The ranks of a rank's machine, in order.
    pub fn neighbours(&self, rank: u64) -> Vec<u64> {
        let machine = self.places[rank as usize].machine;
        self.on(machine)
    }

    /// The ranks of a machine, in order.
    pub fn on(&self, machine: u32) -> Vec<u64> {
        (0..).zip(&self.places).filter(|(_, p)| p.machine == machine).map(|(r, _)| r).collect()
    }

    /// Tells apart what runs write beside each other: the run's number, in hexadecimal.
    pub fn tag(&self) -> String {
        self.run.iter().map(|b| format!("{b:02x}")).collect()
    }

    /// The rank whose launcher takes what a rank writes to another machine: the ranks of one machine share the
    /// receivers of another one out among themselves.
    pub fn receiver(&self, sender: u64, machine: u32) -> u64 {
        let (there, seat) = (self.on(machine), self.neighbours(sender).iter().take_while(|r| **r < sender).count());
        there[seat % there.len()]
    }

    /// The ranks of other machines that write to this one through a rank's launcher.
    pub fn senders(&self, receiver: u64) -> BTreeSet<u64> {
        let machine = self.places[receiver as usize].machine;
        let elsewhere = (0..).zip(&self.places).filter(|(_, p)| p.machine != machine).map(|(r, _)| r);
        elsewhere.filter(|r| self.receiver(*r, machine) == receiver).collect()
    }

    fn seats(&self, rank: u64) -> [LocalRank; 2] {
        let near = self.neighbours(rank);
        let cores = |rank: u64| self.places[rank as usize].cores;
        let sharing = near.iter().copied().filter(|r| cores(*r) == cores(rank)).collect::<Vec<_>>();
        [near, sharing].map(|list| LocalRank { index: list.iter().take_while(|r| **r < rank).count() as u64, of: list.len() as u64 })
    }
}

/// A rank's place among those that share something with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalRank {
    /// Index of the rank, from 0, in rank order.
    pub index: u64,
    /// How many ranks share it, this one included.
    pub of: u64,
}

impl Orders {
    /// The step after which the run began, and how many sequences were read then, of `batch` a step.
    pub fn start(&self, batch: u64) -> (u64, u64) {
        let mark = self.resume.as_ref().map(|r| r.1).unwrap_or_default();
        (mark.step, mark.read(batch).saturating_add(self.skip))
    }

    /// Whether ranks say what they hold after this step.
    pub fn is_compared(&self, step: u64) -> bool {
        self.check_replicas > 0 && (step.is_multiple_of(self.check_replicas) || step == self.steps)
    }

    /// Whether there is to be a checkpoint after this step, unless it is the last one.
    pub fn is_save_due(&self, step: u64) -> bool {
        self.saves.as_ref().is_some_and(|s| s.interval > 0 && step.is_multiple_of(s.interval))
    }

    /// Among the ranks of its machine, and among those of them that may run on the same cores.
    pub fn seats(&self, rank: u64, world: u64) -> [LocalRank; 2] {
        self.spread.as_ref().map_or([LocalRank { index: rank, of: world }; 2], |s| s.seats(rank))
    }

    /// How a rank uses this machine, which is its own.
    pub fn threads(&self, rank: u64, world: u64) -> Threads {
        let [_, sharing] = self.seats(rank, world);
        let count = self.threads.unwrap_or_else(|| allowed_cores().len() / sharing.of as usize);
        Threads::of_rank(sharing.index, sharing.of, count.max(1))
    }
}

/// What a rank says, in order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Event {
    /// A step is done.
    Step(StepEvent),
    /// A step's loss or gradient norm is not finite and the rank ends; what it found when it looked.
    NonFinite {
        /// The step, from 1, which is not done.
        step: u64,
        /// Per report of the job; `None` for those that this rank does not make.
        reports: Vec<Option<f64>>,
        /// What first was not finite on this rank; `None` if no kernel made that of finite numbers.
        blame: Option<Blamed>,
    },
    /// So many steps in a row were skipped as may be, the last of them `step`, or all of the run (`most` is none),
    /// and the rank ends.
    Skipped {
        /// The last step that was done, from 1.
        step: u64,
        /// Skipped steps in a row, without those that a dynamic loss scale explains.
        skips: u64,
        /// The limit of skipped steps in a row, if reaching it ends the run.
        most: Option<u64>,
    },
    /// A part of what the rank did in the steps that were timed.
    Profile(ProfileChunk),
    /// The rank's part of a checkpoint is on the disk. Checkpoints count from 0, those too that came to nothing.
    Saved {
        /// Number of the checkpoint in this run.
        number: u64,
        /// The step that it holds, the seed, the loss scale and the sequences read.
        mark: Mark,
        /// Hash of its shard, if it has one.
        hash: Option<[u8; 32]>,
        /// Until it was on the disk.
        milliseconds: f64,
        /// Milliseconds of these in which the rank did nothing else.
        stalled: f64,
        /// How long it waited before, for the checkpoint before to be on the disk.
        waited: f64,
    },
    /// It is not, and the run goes on.
    Unsaved {
        /// Number of the checkpoint in this run, from 0.
        number: u64,
        /// The step that it would have held.
        step: u64,
        /// Why this rank's part is not on the disk.
        why: String,
    },
    /// The rank gives up, and what may keep that from happening again; `aborted` if only because the run had ended.
    Failed {
        /// What went wrong on this rank, in words for the user.
        message: String,
        /// A way out, where one is known.
        help: Option<Help>,
        /// Whether the rank stopped only because the run had ended elsewhere.
        aborted: bool,
    },
    /// All steps are done, or those after which the run was asked to stop; its part of what is saved is written.
    Finished {
        /// The last one.
        step: u64,
    },
    /// The rank holds what it begins with, after so many milliseconds of reading or drawing.
    Holds {
        /// Wall time until weights and states were in the rank's arenas.
        milliseconds: f64,
    },
    /// Before its first step, the rank says the reports of the passes that were compared with what is expected.
    First {
        /// Per report of the job; `None` for those that this rank does not make.
        reports: Vec<Option<f64>>,
    },
    /// After the last step, the rank says the means of the reports over data that is not trained on.
    Evaluated {
        /// The data that was evaluated.
        part: HeldOut,
        /// Means over the held-out batches, per report of the job; `None` for those that this rank does not make.
        reports: Vec<Option<f64>>,
    },
    /// What the rank holds after a step, to be compared with what others hold.
    Sums {
        /// The step after which checksums were taken.
        step: u64,
        /// A checksum of each part of a parameter, of its copies and of optimizer states.
        sums: Vec<Sum>,
    },
}

/// Data that is not trained on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum HeldOut {
    /// Validation data, by number where each data set has a loss of its own; else the number is 0.
    Valid(u32),
    /// Test data, evaluated after the last step alone.
    Test,
}

/// A step, as one rank has done it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepEvent {
    /// From 1.
    pub step: u64,
    /// Of the schedule, before a parameter's own factor.
    pub learning_rate: f64,
    /// Wall time of the step, its data included, an evaluation excluded.
    pub milliseconds: f64,
    /// Milliseconds of the passes, and of the update, in which kernels did not stand still for other ranks.
    pub busy: [f64; 2],
    /// Bytes that the rank read of its data.
    pub read: u64,
    /// Milliseconds in which it waited for these.
    pub waited: f64,
    /// Of the passes after the first that there is room for rows of experts in: how many ran, and how many there
    /// were.
    pub further_passes: [u64; 2],
    /// Per report of the job.
    pub reports: Vec<Option<f64>>,
    /// Means over the held-out batches, of each evaluation of this step.
    pub valid: Vec<Vec<Option<f64>>>,
    /// Loss scale of the step, if the loss is scaled.
    pub loss_scale: Option<f64>,
    /// The update was left out.
    pub skipped: bool,
}

/// The first place that made a number that is not finite.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Blamed {
    /// Call and command, to find the earliest of all ranks.
    pub order: (u32, u32),
    /// In words, the op and command that made the number, or the parameter that had it before the step.
    pub what: String,
}

impl Blamed {
    /// Blames the command at a position, with what is said of it.
    pub fn at(position: Position, what: String) -> Blamed {
        Blamed { order: (position.call, position.command), what }
    }
}

/// Most bytes of anything that is said.
const MOST: usize = 16 << 20;

/// The orders as bytes for the start of the segment: how many they have room in, their length, JSON. The room is at
/// least `room`.
pub fn pack(orders: &Orders, room: u64) -> Vec<u8> {
    let text = serde_json::to_vec(orders).expect("invariant: plain data with text keys");
    let room = room.max(16 + text.len() as u64);
    let mut out = [room, text.len() as u64].iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<u8>>();
    out.extend(text);
    out.resize(room as usize, 0);
    out
}

/// Reads the orders at the start of a segment; also gives the bytes that they have room in.
///
/// # Errors
/// If there are none.
pub fn unpack(segment: &Segment) -> io::Result<(Orders, u64)> {
    let wrong = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
    if segment.bytes() < 16 {
        return Err(wrong("no orders".into()));
    }
    let number = |at| u64::from_le_bytes(segment.slice(at, 8).try_into().expect("invariant: eight bytes"));
    let (room, length) = (number(0), number(8));
    if room > segment.bytes() || length > room.saturating_sub(16) || length > MOST as u64 {
        return Err(wrong("no orders".into()));
    }
    let orders = serde_json::from_slice(segment.slice(16, length as usize)).map_err(|e| wrong(e.to_string()))?;
    Ok((orders, room))
}

/// Writes an event: its length in four bytes, then postcard.
///
/// # Errors
/// If nobody listens any more.
pub fn say(out: &mut impl Write, event: &Event) -> io::Result<()> {
    let bytes = postcard::to_stdvec(event).expect("invariant: plain data");
    out.write_all(&(bytes.len() as u32).to_le_bytes())?;
    out.write_all(&bytes)?;
    out.flush()
}

/// Reads the next event; none at the end.
///
/// # Errors
/// If what comes is no event.
pub fn hear(from: &mut impl Read) -> io::Result<Option<Event>> {
    let mut length = [0; 4];
    match from.read_exact(&mut length) {
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        other => other?,
    }
    let length = u32::from_le_bytes(length) as usize;
    if length > MOST {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "not an event"));
    }
    let mut bytes = vec![0; length];
    from.read_exact(&mut bytes)?;
    postcard::from_bytes(&bytes).map(Some).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::Trust;
    use std::net::Ipv4Addr;

    #[test]
    fn ranks_share_cores_with_those_of_their_machine_that_have_the_same() {
        let place = |(machine, cores)| RankPlacement { machine, host: "a".into(), address: Ipv4Addr::LOCALHOST.into(), port: 1, cores };
        let spread = Spread { run: [0; 16], key: Trust::Loopback.key(), places: [(0, 5), (1, 5), (0, 5), (0, 6), (1, 5)].map(place).to_vec() };
        let machines: Vec<Vec<u64>> = (0..5).map(|r| spread.neighbours(r)).collect();
        assert_eq!(machines, [vec![0, 2, 3], vec![1, 4], vec![0, 2, 3], vec![0, 2, 3], vec![1, 4]]);
        let seats: Vec<_> = (0..5).map(|r| spread.seats(r).map(|s| (s.index, s.of))).collect();
        let senders: Vec<_> = (0..5).map(|r| spread.senders(r).into_iter().collect::<Vec<_>>()).collect();
        assert_eq!(senders, [vec![1], vec![0, 3], vec![4], vec![], vec![2]]);
        assert_eq!(seats, [[(0, 3), (0, 2)], [(0, 2), (0, 2)], [(1, 3), (1, 2)], [(2, 3), (0, 1)], [(1, 2), (1, 2)]]);
    }
}
