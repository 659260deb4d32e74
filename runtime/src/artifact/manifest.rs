//! The manifest: what an artifact is for, and the sizes and hashes of all its files.

use super::{ArtifactError, FORMAT, io};
use crate::target::Target;
use ir::program::Job;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::io as system;
use std::path::Path;

/// The manifest's file.
pub const MANIFEST: &str = "manifest.json";

/// What an artifact says of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// [`FORMAT`] of the mcc that wrote it.
    pub format: u32,
    /// Version of mcc that wrote it.
    pub mcc: String,
    /// Name of the job's model.
    pub model: String,
    /// Axes with their sizes, outermost first.
    pub mesh: Vec<(String, u64)>,
    /// Ranks that run the job.
    pub ranks: u64,
    /// Program classes.
    pub classes: u64,
    /// How many kernels the job has, on all devices together.
    pub kernels: u64,
    /// What the kernels' code was made for.
    pub target: Target,
    /// All files but the manifest and its signature, by their paths in the artifact.
    pub files: BTreeMap<String, FileEntry>,
    /// BLAKE3 of the manifest as it is written with nothing here, hexadecimal: damage to the manifest itself shows.
    pub hash: String,
}

/// A file of an artifact.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Size of the file in bytes.
    pub bytes: u64,
    /// BLAKE3, hexadecimal.
    pub hash: String,
}

impl FileEntry {
    /// Size and hash of a file with this content.
    pub fn of(bytes: &[u8]) -> FileEntry {
        FileEntry { bytes: bytes.len() as u64, hash: hash(bytes) }
    }
}

/// BLAKE3, hexadecimal.
pub fn hash(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex().to_string()
}

/// JSON as mcc writes it.
pub fn pretty(value: &impl Serialize) -> Vec<u8> {
    let mut text = serde_json::to_vec_pretty(value).expect("invariant: plain data with text keys");
    text.push(b'\n');
    text
}

impl Manifest {
    /// What is to be said of a job.
    pub fn new(job: &Job, target: &Target, files: BTreeMap<String, FileEntry>) -> Manifest {
        let manifest = Manifest {
            format: FORMAT,
            mcc: env!("CARGO_PKG_VERSION").into(),
            model: job.model.clone(),
            mesh: ir::mesh::Axis::ALL.into_iter().map(|a| (a.name().to_owned(), job.mesh.size(a))).collect(),
            ranks: job.mesh.world(),
            classes: job.programs.len() as u64,
            kernels: job.kernels.len() as u64,
            target: target.clone(),
            files,
            hash: String::new(),
        };
        manifest.sealed()
    }

    /// The same with the hash that belongs to it.
    pub fn sealed(self) -> Manifest {
        let open = Manifest { hash: String::new(), ..self };
        Manifest { hash: hash(&pretty(&open)), ..open }
    }

    /// The bytes of its file. There is one way to write a manifest.
    pub fn bytes(&self) -> Vec<u8> {
        pretty(self)
    }

    /// The id of the artifact.
    pub fn id(&self) -> String {
        hash(&self.bytes())
    }

    /// Whether it says of a job what [`Manifest::new`] would, by whatever version of mcc.
    pub fn describes(&self, job: &Job) -> bool {
        let own = Manifest { mcc: self.mcc.clone(), ..Manifest::new(job, &self.target, self.files.clone()) };
        own.sealed() == *self
    }
}

/// Reads a manifest; also gives its bytes, of which the hash is the artifact's id.
///
/// # Errors
/// If there is none, it is not one, of another format, or not as it was written.
pub fn read(dir: &Path) -> Result<(Manifest, Vec<u8>), ArtifactError> {
    // All formats have these two fields, whatever else they have.
    #[derive(Deserialize)]
    struct FormatVersion {
        format: u32,
        mcc: String,
    }
    let path = dir.join(MANIFEST);
    let bytes = match regular(&path).and_then(|()| fs::read(&path)) {
        Err(e) if matches!(e.kind(), system::ErrorKind::NotFound | system::ErrorKind::NotADirectory) && dir.exists() => {
            return Err(ArtifactError::NotAnArtifact(dir.to_path_buf()));
        }
        other => other.map_err(io(if dir.exists() { &path } else { dir }))?,
    };
    let damaged = |what: String| ArtifactError::Damaged { file: path.clone(), what };
    let version: FormatVersion = serde_json::from_slice(&bytes).map_err(|e| damaged(e.to_string()))?;
    if version.format != FORMAT {
        return Err(ArtifactError::Format { dir: dir.to_path_buf(), found: version.format, mcc: version.mcc });
    }
    let manifest: Manifest = serde_json::from_slice(&bytes).map_err(|e| damaged(e.to_string()))?;
    if manifest.bytes() != bytes {
        return Err(damaged("it is not written as mcc writes it".into()));
    }
    let found = manifest.clone().sealed().hash;
    if found != manifest.hash {
        return Err(damaged(format!("its own hash is {}, it says {}", brief(&found), brief(&manifest.hash))));
    }
    Ok((manifest, bytes))
}

/// The begin of a hash, for people.
pub fn brief(hash: &str) -> String {
    format!("{}...", hash.chars().take(16).collect::<String>())
}

/// A pipe or device in the place of a file would be read for ever.
///
/// # Errors
/// If it is something else than a file, or not there.
pub fn regular(path: &Path) -> system::Result<()> {
    if fs::metadata(path)?.is_file() { Ok(()) } else { Err(system::Error::new(system::ErrorKind::InvalidData, "it is not a file")) }
}
