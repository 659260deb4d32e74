//! The checkpoints of a run, as the process that leads it has them: ranks write their shards into a directory
//! that is not called anything yet; when all have, the manifest follows, and the directory gets its name.

use super::error::RunError;
use super::options::RunOptions;
use super::progress::{Note, RunEvent, Saved};
use super::save::Existing;
use crate::artifact::Artifact;
use crate::checkpoint::{Catalog, CheckpointManifest, MANIFEST, Owners, step_name, steps};
use crate::paths;
use crate::protocol::{Event, Orders, Saves};
use crate::weights::Mark;
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Milliseconds of training that whoever watches wants to know of.
const WORTH_SAYING: f64 = 100.0;

/// Dropped when all ranks have ended: what is not complete goes.
pub struct Checkpoints {
    saves: Arc<Saves>,
    world: u64,
    /// Most that stay.
    keep: Option<u64>,
    /// Longest time from one checkpoint to the next.
    every: Option<Duration>,
    /// When the last was complete, or the run's first step, if there is one to be saved.
    since: Option<Instant>,
    catalog: Arc<Catalog>,
    manifest: Arc<CheckpointManifest>,
    /// Steps of checkpoints that are not of this run: they go when this one has its first.
    others: Vec<u64>,
    /// Checkpoints that not all ranks have written yet, by number, with what ranks have said of them.
    open: BTreeMap<u64, PendingCheckpoint>,
    /// Gives a directory its name.
    naming: Option<JoinHandle<FinalizeOutcome>>,
    /// Why the last checkpoint that all ranks were through with was not saved.
    unsaved: Option<RunError>,
    /// While it is held, no other run saves here.
    _lock: Option<File>,
}

/// A checkpoint that not all ranks have written yet.
#[derive(Default)]
struct PendingCheckpoint {
    mark: Option<Mark>,
    step: u64,
    ranks: BTreeSet<u64>,
    hashes: BTreeMap<u64, [u8; 32]>,
    why: Option<String>,
    milliseconds: f64,
    stalled: f64,
    waited: f64,
}

/// What came of giving a complete checkpoint its manifest and its name.
struct FinalizeOutcome {
    step: u64,
    result: Result<Saved, String>,
    /// Checkpoints of others that are still there.
    others: Vec<u64>,
    /// What could not be removed.
    left: Option<String>,
}

impl Checkpoints {
    /// Makes the directory and in it that of the first checkpoint. Those that are there stay, if this run goes
    /// on from one of them and no later one is there, or are replaced.
    ///
    /// # Errors
    /// Checkpoints that would be lost, another run that saves there, or what the file system says.
    pub fn new(artifact: &Artifact, orders: &Orders, saves: &Saves, options: &RunOptions) -> Result<Checkpoints, RunError> {
        let dir = &saves.dir;
        let failed = |cause| RunError::Io { file: saves.name.clone(), cause };
        if fs::metadata(dir).is_ok_and(|m| !m.is_dir()) {
            return Err(RunError::NoDirectory { file: saves.name.clone() });
        }
        let own = orders.resume.as_ref().filter(|(path, _)| path.parent().is_some_and(|parent| paths::same(parent, dir))).map(|r| r.1.step);
        let others: Vec<u64> = steps(dir).map_err(failed)?.into_iter().filter(|step| own.is_none_or(|own| *step > own)).collect();
        if let (Some(last), Existing::Refuse) = (others.first(), options.existing) {
            return Err(RunError::Later { dir: saves.name.clone(), last: *last, own });
        }
        let catalog = Catalog::new(&Owners::new(&artifact.job)).map_err(RunError::Catalog)?;
        fs::create_dir_all(dir).map_err(failed)?;
        let lock = lock(dir).map_err(|e| if e == Errno::WOULDBLOCK { RunError::Busy { dir: saves.name.clone() } } else { failed(e.into()) })?;
        if lock.is_some() {
            // Killed runs may have left unfinished checkpoints.
            forget(dir, ".unfinished-").map_err(failed)?;
        }
        fs::create_dir(saves.unfinished(0)).map_err(failed)?;
        Ok(Checkpoints {
            saves: Arc::new(saves.clone()),
            world: artifact.job.mesh.world(),
            keep: options.keep,
            every: options.save_seconds,
            since: None,
            catalog: Arc::new(catalog),
            manifest: Arc::new(CheckpointManifest::of(&artifact.job, Mark::default(), Some(orders.conditions.clone()), artifact.id.clone())),
            others,
            open: BTreeMap::new(),
            naming: None,
            unsaved: None,
            _lock: lock,
        })
    }

    /// All ranks have done a step.
    pub fn trained(&mut self) {
        self.since.get_or_insert_with(Instant::now);
    }

    /// Whether it is time for the next.
    pub fn is_due(&self) -> bool {
        self.every.zip(self.since).is_some_and(|(every, since)| since.elapsed() >= every)
    }

    /// What a rank has said of a checkpoint; gives the step of one that all ranks are through with.
    pub fn said(&mut self, rank: u64, event: Event, observe: &mut dyn FnMut(RunEvent)) -> Option<u64> {
        let number = match event {
            Event::Saved { number, mark, hash, milliseconds, stalled, waited } => {
                let open = self.open.entry(number).or_default();
                open.hashes.extend(hash.map(|h| (rank, h)));
                open.milliseconds = open.milliseconds.max(milliseconds);
                open.stalled = open.stalled.max(stalled);
                open.waited = open.waited.max(waited);
                open.step = mark.step;
                // All ranks have the same mark.
                open.mark = Some(mark);
                open.ranks.insert(rank);
                number
            }
            Event::Unsaved { number, step, why } => {
                let open = self.open.entry(number).or_default();
                open.step = step;
                open.why.get_or_insert(format!("rank {rank}: {why}"));
                open.ranks.insert(rank);
                number
            }
            _ => return None,
        };
        if (self.open[&number].ranks.len() as u64) < self.world {
            return None;
        }
        let open = self.open.remove(&number)?;
        let step = open.step;
        self.complete(number, open, observe);
        // The interval begins at the end of a checkpoint, even of a slow or failed one.
        self.since = self.since.map(|_| Instant::now());
        Some(step)
    }

    fn complete(&mut self, number: u64, open: PendingCheckpoint, observe: &mut dyn FnMut(RunEvent)) {
        self.settle(observe);
        let at = self.saves.unfinished(number);
        let PendingCheckpoint { mark: Some(mark), why: None, hashes, milliseconds, stalled, waited, step, .. } = open else {
            let _ = fs::remove_dir_all(at);
            return self.unsaved(open.step, open.why.unwrap_or_default(), observe);
        };
        if waited > WORTH_SAYING {
            let text = format!(
                "training waited {waited:.0} ms before the checkpoint of step {step}, as the one before was not on the disk yet: saves further apart (--save-interval) take no time"
            );
            observe(RunEvent::Note(Note::Remark(text)));
        }
        let (saves, catalog, template, keep) = (self.saves.clone(), self.catalog.clone(), self.manifest.clone(), self.keep);
        let others = std::mem::take(&mut self.others);
        let name = move || {
            let begun = Instant::now();
            let manifest = catalog.fill(CheckpointManifest { run: mark, ..CheckpointManifest::clone(&template) }, &hashes);
            let named = finish(&saves, &at, &catalog, &manifest);
            let dir = saves.name.join(step_name(step));
            let (left, others) = match named {
                Ok(()) => (tidy(&saves.dir, step, &others, keep).err(), vec![]),
                Err(_) => {
                    let _ = fs::remove_dir_all(&at);
                    (None, others)
                }
            };
            let milliseconds = milliseconds + begun.elapsed().as_secs_f64() * 1e3;
            let result = named.map(|()| Saved { dir, step, bytes: catalog.bytes(), milliseconds, stalled });
            FinalizeOutcome { step, result, others, left: left.map(|e| e.to_string()) }
        };
        match std::thread::Builder::new().name("checkpoint".into()).spawn(name) {
            Ok(thread) => self.naming = Some(thread),
            Err(e) => self.unsaved(step, e.to_string(), observe),
        }
    }

    /// Tells what has become of the last that all ranks had written, if that is known.
    pub fn poll(&mut self, observe: &mut dyn FnMut(RunEvent)) {
        if self.naming.as_ref().is_some_and(JoinHandle::is_finished) {
            self.settle(observe);
        }
    }

    /// Waits until that is known.
    pub fn settle(&mut self, observe: &mut dyn FnMut(RunEvent)) {
        if let Some(Ok(named)) = self.naming.take().map(JoinHandle::join) {
            self.ended(named, observe);
        }
    }

    fn ended(&mut self, named: FinalizeOutcome, observe: &mut dyn FnMut(RunEvent)) {
        let FinalizeOutcome { step, result, others, left } = named;
        self.others = others;
        match result {
            Ok(saved) => {
                self.unsaved = None;
                observe(RunEvent::Saved(&saved));
            }
            Err(why) => self.unsaved(step, why, observe),
        }
        if let Some(why) = left {
            let dir = self.saves.name.display();
            observe(RunEvent::Note(Note::Warning(format!("earlier checkpoints in `{dir}` cannot be removed: {why}"))));
        }
    }

    fn unsaved(&mut self, step: u64, why: String, observe: &mut dyn FnMut(RunEvent)) {
        let dir = self.saves.name.join(step_name(step));
        observe(RunEvent::Note(Note::Warning(format!("the checkpoint `{}` is not written: {why}", dir.display()))));
        self.unsaved = Some(RunError::Uncheckpointed { dir, why });
    }

    /// When all ranks are through: the last checkpoint is complete.
    ///
    /// # Errors
    /// It is not.
    pub fn end(mut self, observe: &mut dyn FnMut(RunEvent)) -> Result<(), RunError> {
        self.settle(observe);
        self.unsaved.take().map_or(Ok(()), Err)
    }
}

impl Drop for Checkpoints {
    fn drop(&mut self) {
        let _ = self.naming.take().map(JoinHandle::join);
        let _ = forget(&self.saves.dir, &self.saves.prefix());
    }
}

/// Takes the directory for this process, as long as the file is open; none where the file system cannot do that.
fn lock(dir: &Path) -> Result<Option<File>, Errno> {
    let file = File::open(dir).map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(file)),
        Err(Errno::WOULDBLOCK) => Err(Errno::WOULDBLOCK),
        Err(_) => Ok(None),
    }
}

/// Removes what begins so.
fn forget(dir: &Path, prefix: &str) -> io::Result<()> {
    for entry in dir.read_dir()? {
        let entry = entry?;
        if entry.file_name().to_str().is_some_and(|n| n.starts_with(prefix)) {
            fs::remove_dir_all(entry.path())?;
        }
    }
    Ok(())
}

/// Writes the manifest beside the shards, and gives their directory its name when all is on the disk.
fn finish(saves: &Saves, at: &Path, catalog: &Catalog, manifest: &CheckpointManifest) -> Result<(), String> {
    for (rank, file, bytes) in catalog.files() {
        match fs::metadata(at.join(file)) {
            Ok(about) if about.len() == bytes => {}
            Ok(about) => return Err(format!("{file} of rank {rank} has {} bytes and should have {bytes}", about.len())),
            Err(e) => return Err(format!("{file} of rank {rank} is not here: {e}; all machines must share the directory")),
        }
    }
    let said = |e: io::Error| e.to_string();
    let mut file = File::create_new(at.join(MANIFEST)).map_err(said)?;
    file.write_all(manifest.text().as_bytes()).map_err(said)?;
    file.sync_all().map_err(said)?;
    File::open(at).and_then(|dir| dir.sync_all()).map_err(said)?;
    name(at, &saves.dir.join(step_name(manifest.run.step))).map_err(said)?;
    File::open(&saves.dir).and_then(|dir| dir.sync_all()).map_err(said)
}

/// Gives a directory its name. What had that name goes.
fn name(from: &Path, to: &Path) -> io::Result<()> {
    paths::exchange(from, to)?;
    if from.exists() { fs::remove_dir_all(from) } else { Ok(()) }
}

/// Removes other checkpoints, and of this run those that are too many.
fn tidy(dir: &Path, last: u64, others: &[u64], keep: Option<u64>) -> io::Result<()> {
    let old: Vec<u64> = steps(dir)?;
    let kept = old.iter().filter(|step| !others.contains(step) || **step == last).take(keep.map_or(usize::MAX, |n| n as usize));
    let kept: BTreeSet<u64> = kept.copied().collect();
    let gone = old.iter().filter(|step| !kept.contains(step)).map(|step| dir.join(step_name(*step)));
    gone.map(|path| discard(&path)).collect::<Vec<_>>().into_iter().collect()
}

/// Removes a checkpoint, which is none from the first instant on.
fn discard(path: &Path) -> io::Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let hidden: PathBuf = path.with_file_name(format!(".unfinished-{name}"));
    fs::rename(path, &hidden)?;
    fs::remove_dir_all(&hidden)
}
