//! Checkpoints of jobs that no run has trained: every element of every tensor is another number, so that each
//! that is read shows where it comes from.

use ir::op::DType;
use ir::program::Job;
use ir::random::{key, mix};
use runtime::checkpoint::{Catalog, CheckpointManifest, MANIFEST, Owners, Shard, resume};
use runtime::conditions::Conditions;
use runtime::executor::{CommandOrder, PersistentId, Rank, arena_bytes};
use runtime::host::{Whole, sizes};
use runtime::reference::{Plans, Reference};
use runtime::weights::{Mark, Resumed, name};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// Another number for every element of every tensor, as far as 32 bits hold one.
struct Numbered(u64);

impl Numbered {
    fn of(job: &Job, held: PersistentId) -> Numbered {
        Numbered(key(&name(job, held).expect("no table")))
    }

    fn at(&self, i: u64) -> f64 {
        (mix(self.0 ^ i) % (1 << 24)) as f64 / 4096.0 - 2048.0
    }
}

impl Whole for Numbered {
    fn read(&self, at: u64, out: &mut [f64]) {
        out.iter_mut().zip(at..).for_each(|(x, i)| *x = self.at(i));
    }
}

/// Parameters and states, those too that a job does not keep.
fn tensors(job: &Job) -> impl Iterator<Item = PersistentId> {
    (0..job.params.len() as u32).flat_map(|p| [PersistentId::Param(p)].into_iter().chain((0..4).map(move |k| PersistentId::State(p, k))))
}

const MARK: Mark = Mark { step: 3, seed: 5, scaling: None, sequences: Some(24) };

/// Writes a checkpoint with all ranks of a job.
///
/// # Errors
/// What cannot be written.
pub fn write(job: &Job, dir: &Path) -> Result<CheckpointManifest, String> {
    let plans = Plans::new(job);
    // Tensors here are small, so the limit is low enough to shard them.
    let owners = Owners::sharing(job, 2);
    let (catalog, mut hashes) = (Catalog::new(&owners)?, BTreeMap::new());
    let all: BTreeMap<PersistentId, Numbered> = tensors(job).map(|held| (held, Numbered::of(job, held))).collect();
    for rank in 0..job.mesh.world() {
        let program = &job.programs[job.stages[job.mesh.stage(rank) as usize].program as usize];
        let mut rank = Rank::new(job, rank, Reference::new(job, &plans, program, arena_bytes(job, rank)), CommandOrder::List);
        rank.initialise(|held| all.get(&held).map(|n| n as &dyn Whole));
        if let Some(shard) = Shard::new(rank.rank(), owners.pieces(rank.rank())) {
            let file = File::create(dir.join(shard.file())).map_err(|e| e.to_string())?;
            hashes.insert(rank.rank(), shard.write(&rank.device, &file, &AtomicBool::new(true)).map_err(|e| format!("{e:?}"))?);
        }
    }
    let manifest = catalog.fill(CheckpointManifest::of(job, MARK, Some(Conditions::new(job, vec![], 9)), String::new()), &hashes);
    fs::write(dir.join(MANIFEST), manifest.text()).map_err(|e| e.to_string())?;
    Ok(manifest)
}

/// Reads all tensors as wholes; gives how many there are.
///
/// # Errors
/// What is damaged, or not as it was written.
pub fn read(job: &Job, dir: &Path, manifest: &CheckpointManifest) -> Result<usize, String> {
    let Resumed { weights, mark: found, conditions, .. } = resume(dir, job).map_err(|e| e.to_string())?;
    if found != MARK || conditions != manifest.conditions {
        return Err(format!("{found:?}"));
    }
    let mut count = 0;
    for held in tensors(job) {
        let (Some(tensor), Some(name)) = (weights.get(held), name(job, held)) else { continue };
        let dtype = match manifest.tensors.iter().find(|t| t.name == name).map(|t| t.dtype.as_str()) {
            Some("F16") => DType::F16,
            Some("BF16") => DType::Bf16,
            Some("I32") => DType::I32,
            _ => DType::F32,
        };
        let (PersistentId::Param(p) | PersistentId::State(p, _) | PersistentId::Table(p)) = held;
        let mut values = vec![0.0; sizes(&job.params[p as usize].dims).iter().product::<u64>() as usize];
        tensor.read(0, &mut values);
        weights.check().map_err(|e| e.to_string())?;
        let wanted = Numbered::of(job, held);
        if let Some((i, x)) = (0..).zip(&values).find(|(i, x)| dtype.round(wanted.at(*i)) != **x) {
            return Err(format!("checkpoint: element {i} of {name} is {x}, not {}", wanted.at(i)));
        }
        count += 1;
    }
    Ok(count)
}
