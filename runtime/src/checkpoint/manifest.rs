//! What a checkpoint says of itself.

use super::grid::{Class, Grid};
use super::shard::{BLOCK, HASH};
use crate::conditions::Conditions;
use crate::weights::Mark;
use ir::mesh::Axis;
use ir::program::Job;
use ir::provenance::Provenance;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use std::collections::BTreeSet;
use std::io;
use std::path::Path;

/// Its file, which is written last.
pub const MANIFEST: &str = "checkpoint.json";

/// Version of the format that is written and read here.
const FORMAT: u32 = 1;

/// All that `checkpoint.json` holds behind its own hash.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CheckpointManifest {
    /// Version of the format; a manifest of another one than this mcc's is refused.
    pub format: u32,
    /// Where the run stood.
    pub run: Mark,
    /// The model that is trained, with its texts and settings.
    pub model: Provenance,
    /// Conditions of the run; none if the checkpoint was made of a file without them.
    #[serde(default)]
    pub conditions: Option<Conditions>,
    /// Of the artifact that was run.
    pub artifact: String,
    /// Axes that are more than one.
    pub mesh: Vec<(String, u64)>,
    /// All parameters and optimizer states, each with where its elements lie.
    pub tensors: Vec<TensorEntry>,
    /// The files of elements, into which [`PieceEntry::shard`] is an index.
    pub shards: Vec<ShardEntry>,
}

/// A parameter or optimizer state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorEntry {
    /// The parameter's name in the job; of an optimizer state, that behind `state0/` and so on.
    pub name: String,
    /// Sizes of the whole tensor, without padding.
    pub shape: Vec<u64>,
    /// Dtype as safetensors calls it: F32, F16, BF16 or I32.
    pub dtype: String,
    /// Of each dim its classes of indices ([`Grid`]).
    pub cuts: Vec<Vec<Class>>,
    /// Where its elements lie; each element is in exactly one piece.
    pub pieces: Vec<PieceEntry>,
}

/// Elements of a tensor in a shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PieceEntry {
    /// Index into [`CheckpointManifest::shards`].
    pub shard: u32,
    /// Class of each dim.
    pub classes: Vec<u32>,
    /// First element, and the one after the last.
    pub elements: (u64, u64),
    /// Offset of the first element in the shard's data, in bytes.
    pub byte: u64,
}

/// A file of elements, such as one rank writes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardEntry {
    /// Its name in the checkpoint's directory, such as `rank-0.safetensors`.
    pub file: String,
    /// Bytes of the header before the data.
    pub header: u64,
    /// Bytes of the elements, without header and hashes.
    pub data: u64,
    /// BLAKE3 of the header and of the hashes of the data's blocks, in hexadecimal.
    pub hash: String,
}

impl ShardEntry {
    /// Bytes of the file; none if they are too many.
    pub fn bytes(&self) -> Option<u64> {
        self.header.checked_add(self.data)?.checked_add(self.data.div_ceil(BLOCK) * HASH)
    }
}

impl TensorEntry {
    /// Bytes of an element, of a dtype that is known.
    pub fn width(&self) -> Option<u64> {
        match self.dtype.as_str() {
            "F32" | "I32" => Some(4),
            "F16" | "BF16" => Some(2),
            _ => None,
        }
    }

    /// # Errors
    /// Elements that are in no piece, or in several.
    pub fn grid(&self) -> Result<Grid, String> {
        Grid::new(&self.shape, &self.cuts, self.pieces.iter().map(|p| (&p.classes[..], p.elements.0..p.elements.1)))
    }
}

/// The manifest, behind its hash.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SealedManifest<'a> {
    blake3: String,
    #[serde(borrow)]
    checkpoint: &'a RawValue,
}

impl CheckpointManifest {
    /// A manifest with only a model and where its run stood.
    pub fn new(run: Mark, model: Provenance) -> CheckpointManifest {
        CheckpointManifest { format: FORMAT, run, model, conditions: None, artifact: String::new(), mesh: vec![], tensors: vec![], shards: vec![] }
    }

    /// The manifest of a job, without tensors and shards.
    pub fn of(job: &Job, run: Mark, conditions: Option<Conditions>, artifact: String) -> CheckpointManifest {
        let size = |axis: &Axis| Some((axis.name().to_owned(), job.mesh.size(*axis))).filter(|a| a.1 > 1);
        let mesh = [Axis::Pp, Axis::Dp, Axis::Cp, Axis::Tp, Axis::Ep].iter().filter_map(size).collect();
        CheckpointManifest { conditions, artifact, mesh, ..CheckpointManifest::new(run, Provenance::of(job)) }
    }

    /// The text of the manifest's file: JSON, behind its own hash.
    pub fn text(&self) -> String {
        let own = serde_json::value::to_raw_value(self).expect("invariant: plain data with text keys");
        let sealed = SealedManifest { blake3: blake3::hash(own.get().as_bytes()).to_hex().to_string(), checkpoint: &own };
        serde_json::to_string(&sealed).expect("invariant: plain data with text keys")
    }

    /// # Errors
    /// It is not as it was written, or cannot be.
    pub fn parse(text: &str) -> Result<CheckpointManifest, String> {
        let sealed: SealedManifest = serde_json::from_str(text).map_err(|e| format!("{MANIFEST}: {e}"))?;
        let own = sealed.checkpoint.get();
        if blake3::hash(own.as_bytes()).to_hex().as_str() != sealed.blake3 {
            return Err(format!("{MANIFEST} is not as it was written: its hash differs"));
        }
        #[derive(Deserialize)]
        struct ManifestVersion {
            format: u32,
        }
        let ManifestVersion { format } = serde_json::from_str(own).map_err(|e| format!("{MANIFEST}: {e}"))?;
        if format != FORMAT {
            return Err(format!("it is of format {format}; this mcc reads {FORMAT}"));
        }
        let manifest: CheckpointManifest = serde_json::from_str(own).map_err(|e| format!("{MANIFEST}: {e}"))?;
        manifest.check()?;
        Ok(manifest)
    }

    /// # Errors
    /// The file cannot be read, or is no manifest.
    pub fn read(dir: &Path) -> io::Result<Result<CheckpointManifest, String>> {
        std::fs::read_to_string(dir.join(MANIFEST)).map(|text| CheckpointManifest::parse(&text))
    }

    /// Each element of each tensor is in one piece, and the pieces of a shard are its data.
    ///
    /// # Errors
    /// What is not so.
    pub fn check(&self) -> Result<(), String> {
        let mut names = BTreeSet::new();
        let mut data: Vec<Vec<(u64, u64)>> = vec![vec![]; self.shards.len()];
        for tensor in &self.tensors {
            let wrong = |what: String| format!("`{}`: {what}", tensor.name);
            if !names.insert(&tensor.name) {
                return Err(wrong("it is there twice".into()));
            }
            let width = tensor.width().ok_or_else(|| wrong(format!("its elements are {}", tensor.dtype)))?;
            tensor.grid().map_err(wrong)?;
            for piece in &tensor.pieces {
                let shard = data.get_mut(piece.shard as usize).ok_or_else(|| wrong(format!("it is in shard {}, which there is not", piece.shard)))?;
                let bytes = (piece.elements.1 - piece.elements.0).checked_mul(width).ok_or_else(|| wrong("it is too large".into()))?;
                shard.push((piece.byte, bytes));
            }
        }
        let mut files = BTreeSet::new();
        for (shard, mut pieces) in self.shards.iter().zip(data) {
            let wrong = |what: &str| Err(format!("{}: {what}", shard.file));
            let is_name = !shard.file.is_empty()
                && shard.file.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
                && !shard.file.starts_with('.');
            if !is_name || !files.insert(&shard.file) {
                return wrong("this is no name of a shard");
            }
            pieces.sort_unstable();
            let end = pieces.iter().try_fold(0, |end: u64, (byte, bytes)| end.checked_add(*bytes).filter(|_| *byte == end));
            if end != Some(shard.data) || shard.bytes().is_none() {
                return wrong("its pieces do not follow each other");
            }
        }
        Ok(())
    }
}
