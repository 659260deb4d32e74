//! What all ranks of a job write to a checkpoint: its manifest, but for what a run comes to.

use super::grid::Class;
use super::manifest::{CheckpointManifest, PieceEntry, ShardEntry, TensorEntry};
use super::piece::Owners;
use super::shard::Shard;
use crate::executor::PersistentId;
use crate::host::sizes;
use std::collections::{BTreeMap, HashMap};

/// **Invariant:** each element of each parameter and optimizer state is written once ([`CheckpointManifest::check`]).
pub struct Catalog {
    tensors: Vec<TensorEntry>,
    /// Shards of the ranks that write something; their hashes are not known yet.
    shards: Vec<(u64, ShardEntry)>,
}

impl Catalog {
    /// # Errors
    /// An element that would be written twice or by nobody.
    pub fn new(owners: &Owners) -> Result<Catalog, String> {
        let job = owners.job();
        let mut tensors: BTreeMap<PersistentId, TensorEntry> = BTreeMap::new();
        // Classes are numbered within a tensor and dim, and known by their spans of indices.
        let mut classes: HashMap<(PersistentId, usize, Class), u32> = HashMap::new();
        let mut shards = vec![];
        for rank in 0..job.mesh.world() {
            let Some(shard) = Shard::new(rank, owners.pieces(rank)) else { continue };
            for (piece, dtype, byte) in shard.pieces() {
                let (PersistentId::Param(p) | PersistentId::State(p, _) | PersistentId::Table(p)) = piece.held;
                let shape = sizes(&job.params[p as usize].dims);
                let tensor = tensors.entry(piece.held).or_insert_with(|| TensorEntry {
                    name: piece.name.clone(),
                    cuts: vec![vec![]; shape.len()],
                    shape,
                    dtype: dtype.clone(),
                    pieces: vec![],
                });
                let class = |(dim, spans): (usize, &Vec<(u64, u64)>)| {
                    let cuts = &mut tensor.cuts[dim];
                    *classes.entry((piece.held, dim, spans.clone())).or_insert_with(|| {
                        cuts.push(spans.clone());
                        cuts.len() as u32 - 1
                    })
                };
                let classes = piece.spans.iter().enumerate().map(class).collect();
                let elements = (piece.elements.start, piece.elements.end);
                tensor.pieces.push(PieceEntry { shard: shards.len() as u32, classes, elements, byte });
            }
            shards.push((rank, shard.entry()));
        }
        let catalog = Catalog { tensors: tensors.into_values().collect(), shards };
        let trial = catalog.fill(CheckpointManifest::of(job, Default::default(), None, String::new()), &BTreeMap::new());
        trial.check().map(|()| catalog)
    }

    /// Bytes of all shards together.
    pub fn bytes(&self) -> u64 {
        self.shards.iter().filter_map(|s| s.1.bytes()).sum()
    }

    /// The files that ranks write, with their sizes.
    pub fn files(&self) -> impl Iterator<Item = (u64, &str, u64)> {
        self.shards.iter().map(|(rank, s)| (*rank, s.file.as_str(), s.bytes().expect("invariant: the catalog was checked")))
    }

    /// The manifest, with the hashes that ranks have given.
    pub fn fill(&self, manifest: CheckpointManifest, hashes: &BTreeMap<u64, [u8; 32]>) -> CheckpointManifest {
        let hash = |rank| hashes.get(rank).map(|h| blake3::Hash::from_bytes(*h).to_hex().to_string()).unwrap_or_default();
        let shards = self.shards.iter().map(|(rank, s)| ShardEntry { hash: hash(rank), ..s.clone() }).collect();
        CheckpointManifest { tensors: self.tensors.clone(), shards, ..manifest }
    }
}
