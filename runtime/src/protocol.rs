//! What a launcher and its ranks say to each other: orders in the shared memory, events over a pipe per rank.

use crate::comm::Position;
use crate::data::Spec;
use crate::executor::Order;
use crate::shm::Segment;
use crate::target::DeviceKind;
use crate::weights::Mark;
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::path::PathBuf;

/// What happens when loss or gradient norm is not finite, and a dynamic loss scale that may still fall does not explain it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum OnNonfinite {
    /// The step runs again with every kernel checked, and the run ends naming the first that is to blame.
    #[default]
    Stop,
    /// The step's update is left out.
    Skip,
}

/// What every rank is to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Orders {
    pub artifact: PathBuf,
    /// [`crate::artifact::Artifact::id`].
    pub id: String,
    pub data: Vec<Spec>,
    pub valid_data: Vec<Spec>,
    /// Steps between held-out losses; 0 is never.
    pub eval_interval: u64,
    /// Most global batches of a held-out loss.
    pub eval_batches: u64,
    pub steps: u64,
    pub init: Option<PathBuf>,
    /// The run that this one goes on with, and where it stood.
    pub resume: Option<(PathBuf, Mark)>,
    pub save: Option<PathBuf>,
    pub save_state: Option<PathBuf>,
    pub threads: usize,
    pub seed: u64,
    pub on_nonfinite: OnNonfinite,
    pub order: Order,
    pub device: DeviceKind,
    /// Where GPUs that exchange by themselves meet.
    pub meeting: Option<SocketAddr>,
}

/// What a rank says, in order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Event {
    /// A step is done.
    Step(StepEvent),
    /// A step's loss or gradient norm is not finite and the rank ends; what it found when it looked.
    NonFinite { step: u64, reports: Vec<Option<f64>>, blame: Option<Blamed> },
    /// The rank gives up; `aborted` if only because the run had ended.
    Failed { message: String, aborted: bool },
    /// All steps are done and its part of the parameters is saved.
    Finished,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepEvent {
    /// From 1.
    pub step: u64,
    pub learning_rate: f64,
    /// Wall time of the step, its data included, an evaluation excluded.
    pub milliseconds: f64,
    /// Per report of the job.
    pub reports: Vec<Option<f64>>,
    /// Means over the held-out batches, if this step evaluated.
    pub valid: Option<Vec<Option<f64>>>,
    /// Of the step, if the loss is scaled.
    pub loss_scale: Option<f64>,
    /// The update was left out.
    pub skipped: bool,
}

/// The first place that made a number that is not finite.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Blamed {
    /// Call and command, to find the earliest of all ranks.
    pub order: (u32, u32),
    pub what: String,
}

impl Blamed {
    pub fn at(position: Position, what: String) -> Blamed {
        Blamed { order: (position.call, position.command), what }
    }
}

/// Most bytes of anything that is said.
const MOST: usize = 16 << 20;

/// The orders as bytes for the start of the segment: their length, then JSON.
pub fn pack(orders: &Orders) -> Vec<u8> {
    let text = serde_json::to_vec(orders).expect("invariant: plain data with text keys");
    let mut out = (text.len() as u64).to_le_bytes().to_vec();
    out.extend(text);
    out
}

/// Reads the orders at the start of a segment; also gives their length in bytes.
///
/// # Errors
/// If there are none.
pub fn unpack(segment: &Segment) -> io::Result<(Orders, u64)> {
    let wrong = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
    if segment.bytes() < 8 {
        return Err(wrong("no orders".into()));
    }
    let length = u64::from_le_bytes(segment.slice(0, 8).try_into().expect("invariant: eight bytes"));
    if length > segment.bytes() - 8 || length > MOST as u64 {
        return Err(wrong("no orders".into()));
    }
    let orders = serde_json::from_slice(segment.slice(8, length as usize)).map_err(|e| wrong(e.to_string()))?;
    Ok((orders, 8 + length))
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
