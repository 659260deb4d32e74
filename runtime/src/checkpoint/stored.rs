//! What is saved, whatever its form: a checkpoint's directory, ours or PyTorch's, or one file of weights or of a
//! run's state; compared, and turned into each other.

use super::CheckpointError;
use super::dcp::{self, Distributed, RunMetadata, is_distributed};
use super::manifest::{CheckpointManifest, MANIFEST, PieceEntry, TensorEntry};
use super::open::Checkpoint;
use super::shard::{ShardError, ShardLayout, shard_file};
use crate::conditions::Conditions;
use crate::host::Whole;
use crate::weights::{self, Content, FileTensor, Mark, WeightsError, WeightsFault};
use ir::op::DType;
use ir::provenance::{KEY, Provenance};
use safetensors::Dtype;
use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::rc::Rc;
use std::sync::atomic::AtomicBool;

/// Elements that are read at a time.
const CHUNK: u64 = 1 << 16;

/// Whole tensors, read piece by piece.
pub struct Stored {
    tensors: BTreeMap<String, (Vec<u64>, Box<dyn Whole>)>,
    /// Where its run stood; none if no run can go on from it.
    pub run: Option<Mark>,
    /// The model that it belongs to; none if it does not say.
    pub model: Option<Provenance>,
    /// What its run depended on beside the model; none if it does not say.
    pub conditions: Option<Conditions>,
    /// Of the run.
    artifact: String,
    mesh: Vec<(String, u64)>,
    /// Names of what is no tensor, and in no other form.
    pub others: Vec<String>,
    path: std::path::PathBuf,
    wrong: Rc<OnceCell<WeightsFault>>,
}

/// How two tensors of one name differ.
#[derive(Clone, Debug, PartialEq)]
pub enum Difference {
    /// Only one of the two has a tensor of that name.
    Missing {
        /// Name of the tensor that is missing.
        name: String,
        /// The side that lacks it.
        from: ComparedSide,
    },
    /// Both have the tensor, but with other sizes.
    Shape {
        /// Name of the tensor.
        name: String,
        /// Elements of each dim in the first.
        first: Vec<u64>,
        /// Elements of each dim in the second.
        second: Vec<u64>,
    },
    /// How many elements differ of how many, and by how much at most, which of them that is.
    Values {
        /// Name of the tensor whose elements differ.
        name: String,
        /// Elements that differ by more than the tolerance.
        count: u64,
        /// Elements that the tensor has.
        of: u64,
        /// Greatest absolute difference between the two values of an element.
        most: f64,
        /// Row-major index of the element that differs most; of several, the first.
        at: u64,
    },
}

/// A side of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ComparedSide {
    /// The one that [`Stored::differences`] is called on.
    First,
    /// The one that [`Stored::differences`] is given.
    Second,
}

impl Stored {
    /// # Errors
    /// It is none of these, or damaged.
    pub fn open(path: &Path) -> Result<Stored, WeightsError> {
        let wrong = Rc::<OnceCell<WeightsFault>>::default();
        let is_dir = path.is_dir();
        let said = |e: CheckpointError| WeightsError::Checkpoint(e.to_string());
        let (content, (artifact, mesh)) = if is_dir && is_distributed(path) {
            let distributed = Distributed::open(path).map_err(said)?;
            (distributed.content(&wrong), distributed.about.map_or_else(Default::default, |a| (a.artifact, a.mesh)))
        } else if is_dir {
            let checkpoint = Checkpoint::open(path).map_err(said)?;
            let content = checkpoint.content(&wrong);
            (content, (checkpoint.manifest.artifact, checkpoint.manifest.mesh))
        } else {
            (weights::stored(path, &wrong)?, Default::default())
        };
        let Content { tensors: offered, run, model, conditions, others } = content;
        let mut tensors = BTreeMap::new();
        for FileTensor { name, shape, values } in offered {
            let malformed = |dtype| match is_dir {
                true => said(CheckpointError::Malformed { dir: path.to_path_buf(), what: format!("`{name}` is {dtype}, which is not read") }),
                false => WeightsError::Malformed { file: path.to_path_buf(), what: format!("`{name}` is {dtype}") },
            };
            let values = values.map_err(malformed)?;
            tensors.insert(name, (shape, values));
        }
        Ok(Stored { tensors, run, model, conditions, artifact, mesh, others, path: path.to_path_buf(), wrong })
    }

    /// Whether optimizer states are among its tensors.
    pub fn has_states(&self) -> bool {
        self.tensors.keys().any(|name| is_state(name))
    }

    /// Leaves optimizer states out, and where the run stood.
    pub fn weights_alone(mut self) -> Stored {
        self.tensors.retain(|name, _| !is_state(name));
        Stored { run: None, conditions: None, ..self }
    }

    fn check(&self) -> Result<(), WeightsError> {
        weights::sound(&self.path, &self.wrong)
    }

    /// What differs by more than a tolerance; `seen` is told of the elements that were compared.
    ///
    /// # Errors
    /// Damage.
    pub fn differences(&self, other: &Stored, tolerance: f64, mut seen: impl FnMut(u64)) -> Result<Vec<Difference>, WeightsError> {
        let names: BTreeSet<&String> = self.tensors.keys().chain(other.tensors.keys()).collect();
        let mut out = vec![];
        for name in names {
            let ((shape, first), (there, second)) = match (self.tensors.get(name), other.tensors.get(name)) {
                (Some(first), Some(second)) => (first, second),
                (first, _) => {
                    let from = if first.is_none() { ComparedSide::First } else { ComparedSide::Second };
                    out.push(Difference::Missing { name: name.clone(), from });
                    continue;
                }
            };
            if shape != there {
                out.push(Difference::Shape { name: name.clone(), first: shape.clone(), second: there.clone() });
                continue;
            }
            let of = shape.iter().product();
            let (mut count, mut most, mut at) = (0, 0.0, 0);
            chunks(of, |from, len| {
                let [mut a, mut b] = [(); 2].map(|()| vec![0.0; len as usize]);
                first.read(from, &mut a);
                second.read(from, &mut b);
                for (k, (x, y)) in (from..).zip(a.iter().zip(&b)) {
                    let apart = (x - y).abs();
                    if apart > tolerance {
                        count += 1;
                        if apart > most {
                            (most, at) = (apart, k);
                        }
                    }
                }
                seen(len);
            });
            self.check()?;
            other.check()?;
            if count > 0 {
                out.push(Difference::Values { name: name.clone(), count, of, most, at });
            }
        }
        Ok(out)
    }

    /// Elements of all tensors.
    pub fn elements(&self) -> u64 {
        self.tensors.values().map(|(shape, _)| shape.iter().product::<u64>()).sum()
    }

    /// Writes one file of whole tensors in f32.
    ///
    /// # Errors
    /// Damage, or what the file system says.
    pub fn write_file(&self, file: &mut File) -> Result<(), WeightsError> {
        let tensors = self.tensors.iter().map(|(name, (shape, values))| (name.as_str(), shape.as_slice(), values.as_ref()));
        weights::write_stored(file, tensors, self.model.as_ref(), self.run, self.conditions.as_ref()).map_err(|cause| self.io(cause))?;
        self.check()
    }

    /// Writes a checkpoint of one shard, in f32, into a directory that is empty.
    ///
    /// # Errors
    /// Damage, what the file system says, or what is stored is no state of a run.
    pub fn write_checkpoint(&self, dir: &Path) -> Result<(), WeightsError> {
        let (Some(run), Some(model)) = (self.run, &self.model) else { return Err(WeightsError::Unmarked { file: self.path.clone() }) };
        let layout =
            ShardLayout::new(self.tensors.iter().map(|(name, (shape, _))| (name.clone(), Dtype::F32, shape.iter().map(|n| *n as usize).collect())));
        let path = dir.join(shard_file(0));
        let file = File::create_new(&path).map_err(|cause| self.io(cause))?;
        let written = layout.write(&file, &AtomicBool::new(true), |out| {
            for (name, (shape, values)) in &self.tensors {
                let mut numbers = vec![];
                out.put(name, 0, DType::F32, shape.iter().product(), |from, bytes| {
                    numbers.resize(bytes.len() / 4, 0.0);
                    values.read(from, &mut numbers);
                    bytes.chunks_exact_mut(4).zip(&numbers).for_each(|(b, x)| b.copy_from_slice(&(*x as f32).to_le_bytes()));
                })?;
            }
            Ok(())
        });
        self.check()?;
        let hash = written.map_err(|e| match e {
            ShardError::Io(cause) => self.io(cause),
            ShardError::NotFinite { tensor, element, value } => WeightsError::NotFinite { file: self.path.clone(), tensor, element, value },
        })?;
        let mut shard = layout.entry(shard_file(0));
        shard.hash = blake3::Hash::from_bytes(hash).to_hex().to_string();
        let mut byte = 0;
        let tensor = |(name, (shape, _)): (&String, &(Vec<u64>, Box<dyn Whole>))| {
            let elements = shape.iter().product::<u64>();
            let piece = PieceEntry { shard: 0, classes: vec![0; shape.len()], elements: (0, elements), byte };
            byte += elements * 4;
            let cuts = shape.iter().map(|n| vec![vec![(0, *n)]]).collect();
            TensorEntry { name: name.clone(), shape: shape.clone(), dtype: "F32".into(), cuts, pieces: vec![piece] }
        };
        let tensors = self.tensors.iter().map(tensor).collect();
        let manifest = CheckpointManifest {
            tensors,
            shards: vec![shard],
            conditions: self.conditions.clone(),
            artifact: self.artifact.clone(),
            mesh: self.mesh.clone(),
            ..CheckpointManifest::new(run, model.clone())
        };
        manifest.check().map_err(|what| WeightsError::Malformed { file: self.path.clone(), what })?;
        file.sync_all().map_err(|cause| self.io(cause))?;
        let write = || {
            let mut file = File::create_new(dir.join(MANIFEST))?;
            file.write_all(manifest.text().as_bytes())?;
            file.sync_all()?;
            fs::File::open(dir)?.sync_all()
        };
        write().map_err(|cause| self.io(cause))
    }

    /// Writes a checkpoint of PyTorch's of one file of items, in f32, into a directory that is empty.
    ///
    /// # Errors
    /// Damage, or what the file system says.
    pub fn write_distributed(&self, dir: &Path) -> Result<(), WeightsError> {
        if self.tensors.contains_key(KEY) {
            return Err(WeightsError::Checkpoint(format!(
                "`{}` has a tensor `{KEY}`, where mcc writes what it says of the run",
                self.path.display()
            )));
        }
        let tensors = self.tensors.iter().map(|(name, (shape, values))| (name.as_str(), shape.as_slice(), values.as_ref()));
        let about = self.model.clone().map(|model| RunMetadata {
            model,
            run: self.run,
            conditions: self.conditions.clone(),
            artifact: self.artifact.clone(),
            mesh: self.mesh.clone(),
        });
        let written = dcp::write(dir, tensors, about.as_ref());
        // A fault in the values that were read says more than a failed write.
        self.check()?;
        written.map_err(|cause| self.io(cause))
    }

    fn io(&self, cause: io::Error) -> WeightsError {
        WeightsError::Io { file: self.path.clone(), cause }
    }
}

fn is_state(name: &str) -> bool {
    name.strip_prefix("state").and_then(|rest| rest.split_once('/')).is_some_and(|(k, _)| k.parse::<u32>().is_ok())
}

/// Ranges of so many elements, in order.
fn chunks(elements: u64, mut visit: impl FnMut(u64, u64)) {
    (0..elements).step_by(CHUNK as usize).for_each(|from| visit(from, CHUNK.min(elements - from)));
}
