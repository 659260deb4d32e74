//! The artifact directory: what `compile` writes and `run` reads.
//!
//! ```text
//! OUT.mcc/
//!   manifest.json   format, mcc's version, model, mesh, target; sizes and hashes (BLAKE3) of all other files, and its own
//!   manifest.sig    if it was signed: the Ed25519 signature of the manifest's bytes, 64 bytes
//!   job.bin         the job: postcard, zstd
//!   kernels.so      the code of the kernels that CPUs run: all, or in artifacts for GPUs those on the host
//!   ptx/NAME.ptx    a module for each kernel that GPUs run
//!   cubin/NAME.cubin  if they were assembled, the same as code of the target's own architecture, of all of them
//!   kernels.json    per kernel of the job: symbol, tiles, bytes of scratch per thread, on a GPU how it is launched
//!   dumps/          texts, as the compiler gave them
//! ```
//! Reading checks everything before any code is loaded: signature (if one is asked for), sizes, hashes, that this CPU
//! has the target's features, that every place lies within its arena ([`crate::check`]), that the programs are sound
//! ([`verify::job`]). Each file is read once; what is used are the bytes that were hashed.
//!
//! A hash says that bytes are those which the manifest was written for. Who wrote the manifest, and so whether its
//! code does what its job says, only a signature can tell ([`AcceptedArtifacts`]).

mod contents;
mod manifest;
mod packed;
mod read;
mod unfinished;
mod write;

pub use contents::SealedFile;
pub use manifest::{FileEntry, Manifest};
pub use read::{AcceptedArtifacts, read};
pub use write::{ArtifactParts, Kernels, write, write_unless};

use crate::check::CheckError;
use crate::signature::KeyError;
use crate::target::TargetError;
use ir::launch::{COUNTER_BYTES, Launch};
use ir::program::{Job, KernelId};
use manifest::MANIFEST;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use verify::Violation;

/// Changes whenever an artifact of before cannot be read any more.
pub const FORMAT: u32 = 19;

const SIGNATURE: &str = "manifest.sig";
const JOB: &str = "job.bin";
const LIBRARY: &str = "kernels.so";
const KERNELS: &str = "kernels.json";
const PTX: &str = "ptx";
const CUBIN: &str = "cubin";
const DUMPS: &str = "dumps/";

/// Most bytes of a kernel's scratch for a thread, of what is compiled and of what is read.
pub const MOST_SCRATCH: u64 = 1 << 32;

/// How a kernel of the job is called.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelEntry {
    /// The symbol in the library.
    pub name: String,
    /// Tiles that can run at the same time, each exactly once per launch.
    pub tiles: u64,
    /// Bytes of scratch for each thread that runs tiles.
    pub scratch_bytes: u64,
    /// How a GPU launches it, and what with; none of a kernel that a CPU runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub launch: Option<Launch>,
}

/// Bytes of a card's memory that launches have beside arenas: scratch, one after the other, and each kernel's
/// counter.
pub fn launch_bytes(kernels: &[KernelEntry]) -> [u64; 2] {
    let launches = || kernels.iter().filter_map(|k| k.launch.as_ref());
    let counters = if launches().any(Launch::counts) { COUNTER_BYTES * kernels.len() as u64 } else { 0 };
    [launches().map(|l| l.scratch_bytes).max().unwrap_or(0), counters]
}

/// The file of a kernel's module.
fn module(name: &str) -> String {
    format!("{PTX}/{name}.ptx")
}

/// The file of its assembled code.
fn assembled(name: &str) -> String {
    format!("{CUBIN}/{name}.cubin")
}

/// Whether bytes begin as a cubin does: an ELF file of 64 bits, little-endian, for NVIDIA's GPUs.
fn is_cubin(bytes: &[u8]) -> bool {
    const GPUS: [u8; 2] = 190u16.to_le_bytes();
    bytes.starts_with(b"\x7fELF\x02\x01") && bytes.get(18..20) == Some(&GPUS)
}

/// A directory that was read and checked.
#[derive(Clone, Debug)]
pub struct Artifact {
    /// The directory that it was read from.
    pub dir: PathBuf,
    /// What `manifest.json` says, which its own hash was held against.
    pub manifest: Manifest,
    /// Hash of the manifest, hence of everything; all ranks of a run must have the same.
    pub id: String,
    /// What the ranks run, checked and verified.
    pub job: Job,
    /// As many as the job's kernels; empty for the reference target.
    pub kernels: Vec<KernelEntry>,
    library: Option<SealedFile>,
    /// Text of each PTX module, by file.
    modules: BTreeMap<String, Arc<str>>,
    cubins: BTreeMap<String, Arc<[u8]>>,
}

impl Artifact {
    /// The shared library with the kernels that CPUs run, if there are some.
    pub fn library(&self) -> Option<&SealedFile> {
        self.library.as_ref()
    }

    /// What messages call the library.
    pub fn library_path(&self) -> PathBuf {
        self.dir.join(LIBRARY)
    }

    /// The kernels that a GPU launches.
    pub fn launched(&self) -> impl Iterator<Item = (KernelId, &KernelEntry)> {
        (0..).map(KernelId).zip(&self.kernels).filter(|(_, entry)| entry.launch.is_some())
    }

    /// The PTX text of a kernel that a GPU launches; nothing of others.
    pub fn ptx(&self, kernel: &KernelEntry) -> &str {
        self.modules.get(&module(&kernel.name)).map_or("", |text| text)
    }

    /// The code of such a kernel for the target's architecture alone, if the artifact was compiled with it.
    pub fn cubin(&self, kernel: &KernelEntry) -> Option<&[u8]> {
        self.cubins.get(&assembled(&kernel.name)).map(|bytes| &**bytes)
    }

    /// The names of the dumps, in order.
    pub fn dumps(&self) -> impl Iterator<Item = &str> {
        self.manifest.files.keys().filter_map(|name| name.strip_prefix(DUMPS))
    }

    /// A dump by its name; none if there is no such.
    ///
    /// # Errors
    /// If it is not what was written.
    pub fn dump(&self, name: &str) -> Result<Option<String>, ArtifactError> {
        let name = format!("{DUMPS}{name}");
        let Some(file) = self.manifest.files.get(&name) else { return Ok(None) };
        let path = self.dir.join(name);
        let bytes = contents::bytes(&path, file)?;
        String::from_utf8(bytes).map(Some).map_err(|e| ArtifactError::Damaged { file: path, what: e.to_string() })
    }
}

/// Why an artifact could not be written, read or used.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum ArtifactError {
    #[error("`{}` is not an artifact: it has no {MANIFEST}", .0.display())]
    NotAnArtifact(PathBuf),
    #[error("`{}` exists and is not an artifact; it was left alone", .0.display())]
    Foreign(PathBuf),
    #[error("the artifact was not written: it was given up")]
    GivenUp,
    #[error("`{}`: {cause}", .file.display())]
    Io { file: PathBuf, cause: io::Error },
    #[error("`{}` is damaged: {what}", .file.display())]
    Damaged { file: PathBuf, what: String },
    #[error("`{}` has format {found}, written by mcc {mcc}; this is mcc {}, which reads format {FORMAT}: compile the model again", .dir.display(), env!("CARGO_PKG_VERSION"))]
    Format { dir: PathBuf, found: u32, mcc: String },
    #[error("`{}` cannot run on this machine: {cause}; compile the model again", .dir.display())]
    Target { dir: PathBuf, cause: TargetError },
    #[error("`{}` is inconsistent: {cause}", .file.display())]
    Check { file: PathBuf, cause: CheckError },
    #[error("`{}` is not sound, so it is not what `mcc compile` writes: {cause}", .file.display())]
    Unsound { file: PathBuf, cause: Violation },
    #[error("the job has {job} kernels, {given} were given, and not all with code for where they run")]
    Kernels { job: usize, given: usize },
    #[error(transparent)]
    Key(#[from] KeyError),
    #[error("`{}` is not signed, and --trust takes what is signed alone: its maker adds a signature with `mcc compile --sign KEY`", .0.display())]
    Unsigned(PathBuf),
    #[error("`{}` is signed with a key that --trust does not name; nothing of it was used", .0.display())]
    Stranger(PathBuf),
    #[error("`{}` is another artifact than the launcher has: its id is {found}, the launcher's is {wanted}", .dir.display())]
    Another { dir: PathBuf, found: String, wanted: String },
}

fn io(file: &Path) -> impl FnOnce(io::Error) -> ArtifactError {
    let file = file.to_path_buf();
    move |cause| ArtifactError::Io { file, cause }
}

#[cfg(test)]
mod tests;
