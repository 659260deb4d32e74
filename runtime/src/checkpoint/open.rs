//! Reading a checkpoint: whole tensors, of which each rank reads what it needs.

use super::CheckpointError;
use super::dcp::{Distributed, is_distributed};
use super::grid::Grid;
use super::manifest::{CheckpointManifest, TensorEntry};
use super::shard::{BLOCK, HASH};
use crate::device::{decode, not_finite};
use crate::host::Whole;
use crate::weights::{Content, FileTensor, Resumed, Weights, WeightsError, WeightsFault, WeightsSource, stored};
use ir::op::DType;
use ir::program::Job;
use memmap2::Mmap;
use std::cell::{Cell, OnceCell};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// Bytes that are looked at and copied at a time.
const NEAR: u64 = 1 << 18;

/// A directory with a manifest that can be right, and shards of the right sizes.
pub struct Checkpoint {
    /// What `checkpoint.json` says, which its own hash was held against.
    pub manifest: CheckpointManifest,
    shards: Rc<Vec<MappedShard>>,
}

/// A shard, read where it is needed.
struct MappedShard {
    file: PathBuf,
    map: Mmap,
    header: u64,
    data: u64,
    hash: String,
    /// Whether header and hashes have been found to be as they were written.
    is_sealed: OnceCell<Result<(), String>>,
    /// Blocks of which the hash has been found right.
    sound: Vec<Cell<bool>>,
}

impl Checkpoint {
    /// # Errors
    /// There is none, or its manifest or the sizes of its files are not as they were written.
    pub fn open(dir: &Path) -> Result<Checkpoint, CheckpointError> {
        let malformed = |what: String| CheckpointError::Malformed { dir: dir.to_path_buf(), what };
        let manifest = match CheckpointManifest::read(dir) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Err(CheckpointError::None { dir: dir.to_path_buf(), damaged: vec![] }),
            Err(cause) => return Err(malformed(cause.to_string())),
            Ok(manifest) => manifest.map_err(malformed)?,
        };
        let mut shards = vec![];
        for shard in &manifest.shards {
            let file = dir.join(&shard.file);
            let handle = File::open(&file).map_err(|e| malformed(format!("{}: {e}", shard.file)))?;
            let (bytes, about) = (shard.bytes(), handle.metadata().map_err(|e| malformed(format!("{}: {e}", shard.file)))?);
            if !about.is_file() || Some(about.len()) != bytes {
                return Err(malformed(format!("{} has {} bytes and should have {}", shard.file, about.len(), bytes.unwrap_or(0))));
            }
            // SAFETY: the file is only read; if another process shortens it meanwhile, this one ends.
            let map = unsafe { Mmap::map(&handle) }.map_err(|e| malformed(format!("{}: {e}", shard.file)))?;
            let sound = vec![Cell::new(false); shard.data.div_ceil(BLOCK) as usize];
            shards.push(MappedShard {
                file,
                map,
                header: shard.header,
                data: shard.data,
                hash: shard.hash.clone(),
                is_sealed: OnceCell::new(),
                sound,
            });
        }
        Ok(Checkpoint { manifest, shards: Rc::new(shards) })
    }

    /// All that it holds; what is wrong with that is told when it is read.
    pub(super) fn content(&self, wrong: &Rc<OnceCell<WeightsFault>>) -> Content {
        let offer = |tensor: &TensorEntry| {
            let grid = tensor.grid().expect("invariant: the manifest was checked");
            let pieces = tensor.pieces.iter().map(|p| (p.shard as usize, p.byte)).collect();
            let dtype = match tensor.dtype.as_str() {
                "F16" => DType::F16,
                "BF16" => DType::Bf16,
                "I32" => DType::I32,
                _ => DType::F32,
            };
            let cut = ShardedTensor { shards: self.shards.clone(), grid, pieces, dtype, name: tensor.name.clone(), wrong: wrong.clone() };
            FileTensor { name: tensor.name.clone(), shape: tensor.shape.clone(), values: Ok(Box::new(cut)) }
        };
        let tensors = self.manifest.tensors.iter().map(offer).collect();
        Content {
            tensors,
            run: Some(self.manifest.run),
            model: Some(self.manifest.model.clone()),
            conditions: self.manifest.conditions.clone(),
            others: vec![],
        }
    }

    /// Whether all of it is as it was written.
    ///
    /// # Errors
    /// The first damage of each shard.
    pub fn verify(&self) -> Result<(), Vec<String>> {
        let damage = self.shards.iter().filter_map(|shard| shard.read(0, shard.data).err()).collect::<Vec<_>>();
        if damage.is_empty() { Ok(()) } else { Err(damage) }
    }
}

/// Parameters for a job from files and directories of checkpoints, which have each of them once; those that are
/// in none and fit a pattern of `drawn` are drawn with a seed. Also gives the names of these, and of
/// what is no tensor, which is left out.
///
/// # Errors
/// As [`Weights::open`]; a parameter that two have, or a checkpoint that is damaged.
pub fn initial(paths: &[PathBuf], job: &Job, drawn: &[String], seed: u64) -> Result<(Weights, Vec<String>, Vec<String>), WeightsError> {
    let sources = paths.iter().map(|path| source(path)).collect::<Result<_, _>>()?;
    Weights::together(sources, job, drawn, seed)
}

/// What a run goes on from, of a checkpoint's directory or a file ([`Weights::resume`]).
///
/// # Errors
/// As there; or the checkpoint is damaged.
pub fn resume(path: &Path, job: &Job) -> Result<Resumed, WeightsError> {
    let WeightsSource { file, content, wrong } = source(path)?;
    Weights::resumed(&file, content, wrong, job)
}

fn source(path: &Path) -> Result<WeightsSource, WeightsError> {
    let wrong = Rc::default();
    let content = if path.is_dir() { content(path, &wrong).map_err(|e| WeightsError::Checkpoint(e.to_string()))? } else { stored(path, &wrong)? };
    Ok(WeightsSource { file: path.to_path_buf(), content, wrong })
}

/// All that a checkpoint holds, a run's or PyTorch's.
fn content(dir: &Path, wrong: &Rc<OnceCell<WeightsFault>>) -> Result<Content, CheckpointError> {
    if is_distributed(dir) { Ok(Distributed::open(dir)?.content(wrong)) } else { Ok(Checkpoint::open(dir)?.content(wrong)) }
}

impl MappedShard {
    /// Bytes of the data, found to be as they were written.
    fn read(&self, byte: u64, bytes: u64) -> Result<&[u8], String> {
        let (header, data) = (self.header as usize, self.data as usize);
        let hashes = &self.map[header + data..];
        let named = |what: &str| format!("`{}` {what}", self.file.display());
        self.is_sealed
            .get_or_init(|| {
                let found = blake3::Hasher::new().update(&self.map[..header]).update(hashes).finalize();
                if found.to_hex().as_str() == self.hash { Ok(()) } else { Err(named("is not as it was written: the hash of its hashes differs")) }
            })
            .clone()?;
        for k in byte / BLOCK..(byte + bytes).div_ceil(BLOCK) {
            if self.sound[k as usize].get() {
                continue;
            }
            let (from, to) = (k * BLOCK, ((k + 1) * BLOCK).min(self.data));
            let block = &self.map[header + from as usize..header + to as usize];
            if blake3::hash(block).as_bytes()[..] != hashes[(k * HASH) as usize..][..HASH as usize] {
                return Err(named(&format!("is not as it was written: the hash of bytes {from} to {to} of its data differs")));
            }
            self.sound[k as usize].set(true);
        }
        Ok(&self.map[header + byte as usize..][..bytes as usize])
    }
}

/// A tensor in pieces.
struct ShardedTensor {
    shards: Rc<Vec<MappedShard>>,
    grid: Grid,
    /// Shard, and the byte of its data.
    pieces: Vec<(usize, u64)>,
    dtype: DType,
    name: String,
    wrong: Rc<OnceCell<WeightsFault>>,
}

impl Whole for ShardedTensor {
    fn read(&self, at: u64, out: &mut [f64]) {
        let (width, mut done) = (self.dtype.bytes(), 0);
        self.grid.visit(at, out.len() as u64, |piece, element, len| {
            let (shard, byte) = self.pieces[piece];
            let here = &mut out[done..][..len as usize];
            match self.shards[shard].read(byte + element * width, len * width) {
                Ok(bytes) => here.iter_mut().zip(bytes.chunks_exact(width as usize)).for_each(|(x, b)| *x = decode(self.dtype, b)),
                // Reading goes on; the rank ends before its first step.
                Err(what) => drop(self.wrong.set(WeightsFault::Damaged(what))),
            }
            if let Some(k) = here.iter().position(|x| !x.is_finite()) {
                let _ = self.wrong.set(WeightsFault::NotFinite { tensor: self.name.clone(), element: at + (done + k) as u64, value: here[k] });
            }
            done += len as usize;
        });
    }

    fn pieces(&self, at: u64, len: u64, dtype: DType, visit: &mut dyn FnMut(u64, &[u8])) -> bool {
        if dtype != self.dtype {
            return false;
        }
        let (width, mut done) = (self.dtype.bytes(), 0);
        self.grid.visit(at, len, |piece, element, len| {
            let (shard, byte) = self.pieces[piece];
            let (mut from, end) = (byte + element * width, byte + (element + len) * width);
            while from < end {
                // A read stays within one block, as each has a hash, and is small enough for a core's caches.
                let to = end.min(from + ((BLOCK - from % BLOCK).min(NEAR) / width).max(1) * width);
                match self.shards[shard].read(from, to - from) {
                    Ok(bytes) => {
                        if let Some(k) = not_finite(dtype, bytes) {
                            let value = decode(dtype, &bytes[k * width as usize..][..width as usize]);
                            let _ = self.wrong.set(WeightsFault::NotFinite { tensor: self.name.clone(), element: at + done + k as u64, value });
                        }
                        visit(done, bytes);
                    }
                    // Reading goes on; the rank ends before its first step.
                    Err(what) => drop(self.wrong.set(WeightsFault::Damaged(what))),
                }
                done += (to - from) / width;
                from = to;
            }
        });
        true
    }
}
