//! What ranks write to a checkpoint is all of it, once, and what any rank reads of it is what was written.

use ir::op::DType;
use ir::program::Job;
use ir::random::{key, mix};
use runtime::checkpoint::{Catalog, Checkpoint, MANIFEST, Manifest, Owners, Shard, resume};
use runtime::executor::{Held, Order, Rank, arena_bytes};
use runtime::host::{Whole, sizes};
use runtime::reference::{Plans, Reference};
use runtime::weights::{Mark, name};
use std::collections::BTreeMap;
use std::fs::{self, File};

/// Another number for every element of every tensor, as far as 32 bits hold one.
struct Numbered(u64);

impl Numbered {
    fn of(job: &Job, held: Held) -> Numbered {
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

/// Writes a checkpoint of numbered elements with all ranks of a job, and reads every tensor as a whole.
///
/// # Errors
/// What is not as it was.
pub fn round_trip(job: &Job) -> Result<(), String> {
    let dir = tempfile::tempdir().map_err(|e| e.to_string())?;
    let plans = Plans::new(job);
    let (catalog, owners, mut hashes) = (Catalog::new(job)?, Owners::new(job), BTreeMap::new());
    for rank in 0..job.mesh.world() {
        let program = &job.programs[job.stages[job.mesh.stage(rank) as usize].program as usize];
        let mut all: BTreeMap<Held, Numbered> = BTreeMap::new();
        for p in 0..job.params.len() as u32 {
            let helds = [Held::Param(p)].into_iter().chain((0..4).map(|k| Held::State(p, k)));
            all.extend(helds.map(|held| (held, Numbered::of(job, held))));
        }
        let mut rank = Rank::new(job, rank, Reference::new(job, &plans, program, arena_bytes(job, rank)), Order::List);
        rank.initialise(|held| all.get(&held).map(|n| n as &dyn Whole));
        if let Some(shard) = Shard::new(rank.rank(), owners.pieces(rank.rank())) {
            let file = File::create_new(dir.path().join(shard.file())).map_err(|e| e.to_string())?;
            hashes.insert(rank.rank(), shard.write(&rank.device, &file).map_err(|e| format!("{e:?}"))?);
        }
    }
    let mark = Mark { step: 3, seed: 5, scaling: None };
    let manifest = catalog.fill(Manifest::of(job, mark, 9, String::new()), &hashes);
    fs::write(dir.path().join(MANIFEST), manifest.text()).map_err(|e| e.to_string())?;
    Checkpoint::open(dir.path()).map_err(|e| e.to_string())?.verify().map_err(|e| e.join("; "))?;
    let (weights, found) = resume(dir.path(), job).map_err(|e| e.to_string())?;
    if found != mark {
        return Err(format!("{found:?}"));
    }
    let mut tensors = 0;
    for p in 0..job.params.len() as u32 {
        for held in [Held::Param(p)].into_iter().chain((0..4).map(|k| Held::State(p, k))) {
            let Some(tensor) = weights.get(held) else { continue };
            let name = name(job, held).expect("no table");
            let dtype = match manifest.tensors.iter().find(|t| t.name == name).map(|t| t.dtype.as_str()) {
                Some("F16") => DType::F16,
                Some("BF16") => DType::Bf16,
                Some("I32") => DType::I32,
                _ => DType::F32,
            };
            let mut values = vec![0.0; sizes(&job.params[p as usize].dims).iter().product::<u64>() as usize];
            tensor.read(0, &mut values);
            let wanted = Numbered::of(job, held);
            let wrong = (0..).zip(&values).find(|(i, x)| dtype.round(wanted.at(*i)) != **x);
            if let Some((i, x)) = wrong {
                return Err(format!("checkpoint: element {i} of {name} is {x}, not {}", wanted.at(i)));
            }
            tensors += 1;
        }
    }
    weights.check().map_err(|e| e.to_string())?;
    if tensors == manifest.tensors.len() { Ok(()) } else { Err(format!("{tensors} of {} tensors were read", manifest.tensors.len())) }
}
