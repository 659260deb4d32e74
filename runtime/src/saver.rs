//! How a rank writes its part of a checkpoint: beside the next passes, as what is saved changes in updates alone.
//!
//! A thread copies the shard from the rank's arenas into the file, through one block of memory, at the disk's pace
//! and past the page cache, as that takes least of the processors that train. The next update waits until all is
//! copied; from then on the page cache takes the rest, and flushing it to the disk goes on after that. Where a
//! device's memory cannot be shared, or passes would change what is saved, the rank writes it itself, and waits.

use crate::checkpoint::{Owners, Shard, ShardError};
use crate::device::{Device, DeviceHandle, Memory};
use crate::protocol::{Event, Saves};
use crate::weights::Mark;
use ir::program::{Action, BufferId, Job, Program, Stage};
use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::thread::Scope;
use std::time::Instant;

/// What a rank writes from time to time.
pub struct Saver<'scope, 'env> {
    scope: &'scope Scope<'scope, 'env>,
    saves: &'env Saves,
    /// The rank's shard; none if it owns nothing.
    shard: Option<Arc<Shard<'env>>>,
    /// Whether only updates change what is saved.
    is_apart: bool,
    /// Number of the next checkpoint.
    number: u64,
    /// The next file, its space reserved.
    reserved: Option<File>,
    under_way: Option<UnderWay>,
}

/// A number that nothing could go on from.
pub struct NotFinite {
    pub tensor: String,
    pub element: u64,
    pub value: f64,
    /// The step after which the number was not finite.
    pub step: u64,
}

/// A checkpoint that is being written.
struct UnderWay {
    number: u64,
    mark: Mark,
    goes_on: bool,
    /// First that all is copied, then that it is on the disk.
    said: Receiver<SaveEvent>,
    /// Whether the rank waits until all is copied.
    is_urgent: Arc<AtomicBool>,
    copied: Option<[u8; 32]>,
    /// Milliseconds that this rank did nothing else.
    stalled: f64,
    waited: f64,
}

enum SaveEvent {
    Copied(Result<[u8; 32], ShardError>),
    /// The shard is on the disk, with the milliseconds since it was begun.
    Flushed(io::Result<()>, f64),
}

impl<'scope, 'env> Saver<'scope, 'env> {
    /// Reserves the space for the first checkpoint.
    ///
    /// # Errors
    /// What the file system says, with the bytes that were to be reserved.
    pub fn new(scope: &'scope Scope<'scope, 'env>, job: &'env Job, rank: u64, saves: &'env Saves) -> Result<Self, (u64, io::Error)> {
        let shard = Shard::new(rank, Owners::new(job).pieces(rank)).map(Arc::new);
        let stage = &job.stages[job.mesh.stage(rank) as usize];
        let is_apart = shard.as_ref().is_none_or(|shard| !is_changed(job, stage, &shard.buffers()));
        let mut saver = Saver { scope, saves, shard, is_apart, number: 0, reserved: None, under_way: None };
        let bytes = saver.shard.as_ref().map_or(0, |s| s.bytes());
        // The launcher has made the first directory, which is seen where all machines share it.
        fs::metadata(saves.unfinished(0)).map_err(|e| (bytes, e))?;
        saver.reserved = saver.reserve().map_err(|e| (bytes, e))?;
        Ok(saver)
    }

    fn path(&self) -> Option<PathBuf> {
        Some(self.saves.unfinished(self.number).join(self.shard.as_ref()?.file()))
    }

    fn reserve(&self) -> io::Result<Option<File>> {
        let (Some(shard), Some(path)) = (&self.shard, self.path()) else { return Ok(None) };
        if self.number > 0 {
            // The first rank that comes makes the directory.
            fs::create_dir(self.saves.unfinished(self.number)).or_else(|e| if e.kind() == io::ErrorKind::AlreadyExists { Ok(()) } else { Err(e) })?;
        }
        let file = File::options().write(true).create_new(true).open(&path)?;
        let reserved = match rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, shard.bytes()) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
            other => other,
        };
        match reserved {
            Ok(()) => Ok(Some(file)),
            Err(e) => {
                // Others can use the room that it has taken so far.
                let _ = fs::remove_file(&path);
                Err(e.into())
            }
        }
    }

    /// Begins to write this rank's part of the state after a step. `goes_on`: there may be another checkpoint.
    /// The rank is settled. Gives what became of the checkpoint before, if that was still under way: it is
    /// waited for.
    ///
    /// # Errors
    /// A number that is not finite: the run has nothing to go on from. Files that cannot be written are said in
    /// events.
    pub fn begin(&mut self, device: &impl Device, mark: &Mark, goes_on: bool) -> Result<Option<Event>, NotFinite> {
        let begun = Instant::now();
        let before = self.finish()?;
        let waited = if before.is_some() { milliseconds(begun) } else { 0.0 };
        let (say, said) = channel();
        let begun = Instant::now();
        let file = self.reserved.take().map_or_else(|| self.reserve(), |file| Ok(Some(file)));
        let handle = device.second_handle().filter(|_| self.is_apart);
        let is_urgent = Arc::new(AtomicBool::new(handle.is_none()));
        let mut under_way =
            UnderWay { number: self.number, mark: *mark, goes_on, said, is_urgent: is_urgent.clone(), copied: None, stalled: 0.0, waited };
        self.number += 1;
        match (file, &self.shard) {
            (Err(e), _) => drop(say.send(SaveEvent::Copied(Err(e.into())))),
            (Ok(Some(file)), Some(shard)) => {
                let shard = shard.clone();
                let write = move |memory: &dyn Memory| {
                    let copied = shard.write(memory, &file, &is_urgent);
                    let copied = copied.and_then(|hash| memory.outcome().map(|()| hash).map_err(|e| ShardError::Io(io::Error::other(e))));
                    let is_copied = copied.is_ok();
                    // Nobody listens if the run has ended meanwhile.
                    let _ = say.send(SaveEvent::Copied(copied));
                    if is_copied {
                        let flushed = file.sync_all();
                        let _ = say.send(SaveEvent::Flushed(flushed, milliseconds(begun)));
                    }
                };
                match handle {
                    Some(DeviceHandle { memory, begin }) => drop(self.scope.spawn(move || {
                        begin();
                        write(&*memory);
                    })),
                    None => {
                        write(device);
                        under_way.stalled = milliseconds(begun);
                    }
                }
            }
            // This rank has nothing of its own to write.
            (Ok(_), _) => drop(say.send(SaveEvent::Flushed(Ok(()), 0.0))),
        }
        self.under_way = Some(under_way);
        Ok(before)
    }

    /// To be called before states change: waits until they are copied.
    ///
    /// # Errors
    /// As [`Saver::begin`].
    pub fn copied(&mut self) -> Result<(), NotFinite> {
        let Some(under_way) = &mut self.under_way else { return Ok(()) };
        if under_way.copied.is_some() || self.shard.is_none() {
            return Ok(());
        }
        let begun = Instant::now();
        under_way.is_urgent.store(true, Ordering::Relaxed);
        match under_way.said.recv() {
            Ok(SaveEvent::Copied(Ok(hash))) => under_way.copied = Some(hash),
            Ok(SaveEvent::Copied(Err(ShardError::NotFinite { tensor, element, value }))) => {
                return Err(NotFinite { tensor, element, value, step: under_way.mark.step });
            }
            Ok(SaveEvent::Copied(Err(ShardError::Io(e)))) => self.failed(e.to_string()),
            Ok(SaveEvent::Flushed(..)) | Err(_) => self.failed("its thread is gone".into()),
        }
        if let Some(under_way) = &mut self.under_way {
            under_way.stalled += milliseconds(begun);
        }
        Ok(())
    }

    /// What could not be written is said with what it was for.
    fn failed(&mut self, why: String) {
        let (say, said) = channel();
        if let Some(under_way) = &mut self.under_way {
            let _ = say.send(SaveEvent::Flushed(Err(io::Error::other(why)), 0.0));
            under_way.said = said;
            under_way.copied = Some([0; 32]);
        }
    }

    /// What became of the checkpoint that is under way, if that is known.
    pub fn poll(&mut self) -> Option<Event> {
        let under_way = self.under_way.as_ref()?;
        if self.shard.is_some() && under_way.copied.is_none() {
            return None;
        }
        let flushed = match under_way.said.try_recv() {
            Ok(SaveEvent::Flushed(flushed, took)) => (flushed, took),
            Ok(SaveEvent::Copied(_)) | Err(TryRecvError::Empty) => return None,
            Err(e) => (Err(io::Error::other(e)), 0.0),
        };
        self.ended(flushed)
    }

    /// Waits until it is known.
    ///
    /// # Errors
    /// As [`Saver::begin`].
    pub fn finish(&mut self) -> Result<Option<Event>, NotFinite> {
        self.copied()?;
        let Some(under_way) = &self.under_way else { return Ok(None) };
        let flushed = match under_way.said.recv() {
            Ok(SaveEvent::Flushed(flushed, took)) => (flushed, took),
            Ok(SaveEvent::Copied(_)) => (Err(io::Error::other("it was copied twice")), 0.0),
            Err(e) => (Err(io::Error::other(e)), 0.0),
        };
        Ok(self.ended(flushed))
    }

    fn ended(&mut self, (flushed, milliseconds): (io::Result<()>, f64)) -> Option<Event> {
        let UnderWay { number, mark, goes_on, copied, stalled, waited, .. } = self.under_way.take()?;
        if goes_on {
            // If there is no room now, there may be some when it is needed.
            self.reserved = self.reserve().unwrap_or(None);
        }
        Some(match flushed {
            Ok(()) => Event::Saved { number, mark, hash: copied, milliseconds, stalled, waited },
            Err(e) => Event::Unsaved { number, step: mark.step, why: e.to_string() },
        })
    }
}

fn milliseconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

/// Whether a pass writes to one of these buffers.
fn is_changed(job: &Job, stage: &Stage, saved: &BTreeSet<BufferId>) -> bool {
    let program: &Program = &job.programs[stage.program as usize];
    let bodies: BTreeSet<usize> = stage.schedule.train.iter().chain(&stage.schedule.eval).map(|call| call.body.index()).collect();
    let written = |action: &Action| match action {
        Action::Launch { kernel, args, .. } => args[job.kernels[kernel.index()].inputs.len()..].iter().map(|p| p.buffer).collect(),
        Action::Collective { dst, .. } | Action::Recv { dst, .. } | Action::Copy { dst, .. } => vec![dst.buffer],
        Action::Fill { buffer, .. } => vec![*buffer],
        Action::Load { dst, .. } => vec![*dst],
        Action::Send { .. } | Action::Report { .. } | Action::Limit { .. } | Action::Record { .. } | Action::Wait { .. } => vec![],
    };
    let mut commands = bodies.iter().flat_map(|body| &program.bodies[*body].commands);
    commands.any(|command| written(&command.action).iter().any(|buffer| saved.contains(buffer)))
}
