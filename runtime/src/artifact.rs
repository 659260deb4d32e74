//! The artifact directory: what `compile` writes and `run` reads.
//!
//! ```text
//! OUT.mcc/
//!   manifest.json   format, mcc's version, model, mesh, target; sizes and hashes (BLAKE3) of all other files
//!   job.bin         the job: postcard, zstd
//!   kernels.so      the code of the kernels that CPUs run: all, or in artifacts for GPUs those on the host
//!   ptx/NAME.ptx    a module for each kernel that GPUs run
//!   kernels.json    per kernel of the job: symbol, tiles, bytes of scratch per thread, on a GPU how it is launched
//!   dumps/          texts, as the compiler gave them
//! ```
//! Reading checks everything before any code is loaded: sizes, hashes, that every place lies within its arena
//! ([`crate::check`]), that this CPU has the target's features.

use crate::check::{self, CheckError};
use crate::target::{Target, TargetError};
use ir::launch::Launch;
use ir::program::{Job, KernelId, Space};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Changes whenever an artifact of before cannot be read any more.
pub const FORMAT: u32 = 4;

const MANIFEST: &str = "manifest.json";
const JOB: &str = "job.bin";
const LIBRARY: &str = "kernels.so";
const KERNELS: &str = "kernels.json";

/// Most bytes of the job once unpacked: a damaged length cannot exhaust memory.
const MOST_JOB: usize = 4 << 30;

/// How a kernel of the job is called.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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

/// All kernels.
pub struct Kernels<'a> {
    /// In the order of [`Job::kernels`].
    pub entries: &'a [KernelEntry],
    /// The shared library of those that CPUs run, if there are any.
    pub library: Option<&'a [u8]>,
    /// The modules of the others, in order.
    pub ptx: &'a [&'a [u8]],
}

/// The file of a kernel's module.
fn module(name: &str) -> String {
    format!("ptx/{name}.ptx")
}

/// What an artifact is made of.
pub struct Parts<'a> {
    pub job: &'a Job,
    pub target: &'a Target,
    /// None for the reference target alone.
    pub kernels: Option<Kernels<'a>>,
    /// File names under `dumps/` and texts.
    pub dumps: &'a [(String, String)],
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    pub format: u32,
    /// Version of mcc that wrote it.
    pub mcc: String,
    pub model: String,
    /// Axes with their sizes, outermost first.
    pub mesh: Vec<(String, u64)>,
    pub ranks: u64,
    /// Program classes.
    pub classes: u64,
    pub kernels: u64,
    pub target: Target,
    pub files: BTreeMap<String, File>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct File {
    pub bytes: u64,
    /// BLAKE3, hexadecimal.
    pub hash: String,
}

/// A directory that was read and checked.
#[derive(Clone, Debug)]
pub struct Artifact {
    pub dir: PathBuf,
    pub manifest: Manifest,
    /// Hash of the manifest, hence of everything; all ranks of a run must have the same.
    pub id: String,
    pub job: Job,
    /// As many as the job's kernels; empty for the reference target.
    pub kernels: Vec<KernelEntry>,
}

impl Artifact {
    /// The shared library with the kernels.
    pub fn library(&self) -> PathBuf {
        self.dir.join(LIBRARY)
    }

    /// The kernels that a GPU launches.
    pub fn launched(&self) -> impl Iterator<Item = (KernelId, &KernelEntry)> {
        (0..).map(KernelId).zip(&self.kernels).filter(|(_, entry)| entry.launch.is_some())
    }

    /// The PTX text of a kernel.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn ptx(&self, kernel: &KernelEntry) -> Result<String, ArtifactError> {
        let path = self.dir.join(module(&kernel.name));
        fs::read_to_string(&path).map_err(io(&path))
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ArtifactError {
    #[error("`{}` is not an artifact: it has no {MANIFEST}", .0.display())]
    NotAnArtifact(PathBuf),
    #[error("`{}` exists and is not an artifact; it was left alone", .0.display())]
    Foreign(PathBuf),
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
    #[error("the job has {job} kernels, {given} were given, and not all with code for where they run")]
    Kernels { job: usize, given: usize },
}

fn io(file: &Path) -> impl FnOnce(io::Error) -> ArtifactError {
    let file = file.to_path_buf();
    move |cause| ArtifactError::Io { file, cause }
}

/// Writes an artifact, or nothing: a temporary directory beside it takes its name at the end. An artifact of that name is replaced.
///
/// # Errors
/// If the job is unsound, something other than an artifact has that name, or the file system says so.
pub fn write(dir: &Path, parts: &Parts) -> Result<Manifest, ArtifactError> {
    check::check(parts.job).map_err(|cause| ArtifactError::Check { file: dir.join(JOB), cause })?;
    if dir.symlink_metadata().is_ok() && !dir.join(MANIFEST).is_file() && fs::read_dir(dir).map_or(true, |mut d| d.next().is_some()) {
        return Err(ArtifactError::Foreign(dir.to_path_buf()));
    }
    let parent = dir.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name = dir.file_name().map_or_else(|| "artifact".into(), |n| n.to_string_lossy().into_owned());
    fs::create_dir_all(parent).map_err(io(parent))?;
    let temporary = Temporary(parent.join(format!(".{name}.{}.tmp", std::process::id())));
    let _ = fs::remove_dir_all(&temporary.0);
    fs::create_dir(&temporary.0).map_err(io(&temporary.0))?;
    let manifest = fill(&temporary.0, parts)?;
    if dir.symlink_metadata().is_ok() {
        // The old one steps aside first, so that there is a whole artifact of one kind or the other at every moment but one.
        let old = Temporary(parent.join(format!(".{name}.{}.old", std::process::id())));
        let _ = fs::remove_dir_all(&old.0);
        fs::rename(dir, &old.0).map_err(io(dir))?;
        fs::rename(&temporary.0, dir).map_err(io(dir))?;
    } else {
        fs::rename(&temporary.0, dir).map_err(io(dir))?;
    }
    Ok(manifest)
}

/// A directory that is removed in the end, if it is still there.
struct Temporary(PathBuf);

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn fill(dir: &Path, parts: &Parts) -> Result<Manifest, ArtifactError> {
    let mut files = BTreeMap::new();
    let mut put = |name: &str, bytes: &[u8]| -> Result<(), ArtifactError> {
        let path = dir.join(name);
        fs::write(&path, bytes).map_err(io(&path))?;
        files.insert(name.to_owned(), File { bytes: bytes.len() as u64, hash: blake3::hash(bytes).to_hex().to_string() });
        Ok(())
    };
    let packed = postcard::to_stdvec(parts.job).expect("invariant: a job is plain data");
    put(JOB, &zstd::encode_all(packed.as_slice(), 3).map_err(io(&dir.join(JOB)))?)?;
    let wrong = |given| ArtifactError::Kernels { job: parts.job.kernels.len(), given };
    match (&parts.kernels, parts.target) {
        (None, Target::Reference) => {}
        (Some(Kernels { entries, library, ptx }), Target::Cpu(_) | Target::Gpu { .. }) => {
            let launched: Vec<&KernelEntry> = entries.iter().filter(|e| e.launch.is_some()).collect();
            let native = launched.len() < entries.len() || matches!(parts.target, Target::Cpu(_));
            if entries.len() != parts.job.kernels.len() || launched.len() != ptx.len() || library.is_some() != native {
                return Err(wrong(entries.len()));
            }
            if let Some(library) = library {
                put(LIBRARY, library)?;
            }
            if !launched.is_empty() {
                fs::create_dir(dir.join("ptx")).map_err(io(dir))?;
            }
            for (entry, text) in launched.iter().zip(*ptx) {
                put(&module(&entry.name), text)?;
            }
            put(KERNELS, &pretty(entries))?;
        }
        (given, _) => return Err(wrong(given.as_ref().map_or(0, |k| k.entries.len()))),
    }
    fs::create_dir(dir.join("dumps")).map_err(io(dir))?;
    for (name, text) in parts.dumps {
        put(&format!("dumps/{name}"), text.as_bytes())?;
    }
    let manifest = describe(parts.job, parts.target, files);
    let path = dir.join(MANIFEST);
    fs::write(&path, pretty(&manifest)).map_err(io(&path))?;
    Ok(manifest)
}

/// What the manifest says of a job.
fn describe(job: &Job, target: &Target, files: BTreeMap<String, File>) -> Manifest {
    Manifest {
        format: FORMAT,
        mcc: env!("CARGO_PKG_VERSION").into(),
        model: job.model.clone(),
        mesh: ir::mesh::Axis::ALL.into_iter().map(|a| (a.name().to_owned(), job.mesh.size(a))).collect(),
        ranks: job.mesh.world(),
        classes: job.programs.len() as u64,
        kernels: job.kernels.len() as u64,
        target: target.clone(),
        files,
    }
}

fn pretty(value: &impl Serialize) -> Vec<u8> {
    let mut text = serde_json::to_vec_pretty(value).expect("invariant: plain data with text keys");
    text.push(b'\n');
    text
}

/// Reads and checks an artifact. Loads no code.
///
/// # Errors
/// What is wrong, with the file it is wrong in.
pub fn read(dir: &Path) -> Result<Artifact, ArtifactError> {
    let (manifest, id) = manifest(dir)?;
    for (name, file) in &manifest.files {
        let path = dir.join(name);
        let damaged = |what: String| ArtifactError::Damaged { file: path.clone(), what };
        let plain = Path::new(name).components().all(|c| matches!(c, std::path::Component::Normal(_)));
        if !plain {
            return Err(ArtifactError::Damaged { file: dir.join(MANIFEST), what: format!("it names a file `{name}` elsewhere") });
        }
        let found = fs::metadata(&path).map_err(io(&path))?.len();
        if found != file.bytes {
            return Err(damaged(format!("it has {found} bytes, the manifest says {}", file.bytes)));
        }
        let mut hasher = blake3::Hasher::new();
        io::copy(&mut fs::File::open(&path).map_err(io(&path))?, &mut hasher).map_err(io(&path))?;
        let hash = hasher.finalize().to_hex();
        if hash.as_str() != file.hash {
            return Err(damaged(format!("its hash is {}..., the manifest says {}...", &hash[..16], file.hash.get(..16).unwrap_or(&file.hash))));
        }
    }
    let required: &[&str] = match manifest.target {
        Target::Reference => &[JOB],
        Target::Cpu(_) | Target::Gpu { host: Some(_), .. } => &[JOB, LIBRARY, KERNELS],
        Target::Gpu { host: None, .. } => &[JOB, KERNELS],
    };
    if let Some(name) = required.iter().find(|n| !manifest.files.contains_key(**n)) {
        return Err(ArtifactError::Damaged { file: dir.join(MANIFEST), what: format!("it does not list {name}") });
    }
    manifest.target.check().map_err(|cause| ArtifactError::Target { dir: dir.to_path_buf(), cause })?;
    let job = job(&dir.join(JOB))?;
    check::check(&job).map_err(|cause| ArtifactError::Check { file: dir.join(JOB), cause })?;
    if job.mesh.world() != manifest.ranks {
        let what = format!("it says {} ranks, the job has {}", manifest.ranks, job.mesh.world());
        return Err(ArtifactError::Damaged { file: dir.join(MANIFEST), what });
    }
    let described = Manifest { mcc: manifest.mcc.clone(), ..describe(&job, &manifest.target, manifest.files.clone()) };
    if described != manifest {
        return Err(ArtifactError::Damaged { file: dir.join(MANIFEST), what: "it describes another job".into() });
    }
    let kernels = match manifest.target {
        Target::Reference => vec![],
        Target::Cpu(_) | Target::Gpu { .. } => entries(&dir.join(KERNELS), &job)?,
    };
    runnable(&dir.join(KERNELS), &job, &kernels, &manifest.target)?;
    if let Some(entry) = kernels.iter().find(|e| e.launch.is_some() && !manifest.files.contains_key(&module(&e.name))) {
        return Err(ArtifactError::Damaged { file: dir.join(MANIFEST), what: format!("it does not list {}", module(&entry.name)) });
    }
    Ok(Artifact { dir: dir.to_path_buf(), manifest, id, job, kernels })
}

/// Reads the manifest alone, with its hash.
///
/// # Errors
/// If there is none, it is not one, or of another format.
pub fn manifest(dir: &Path) -> Result<(Manifest, String), ArtifactError> {
    #[derive(Deserialize)]
    struct Version {
        format: u32,
        mcc: String,
    }
    let path = dir.join(MANIFEST);
    let text = match fs::read(&path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound && dir.exists() => return Err(ArtifactError::NotAnArtifact(dir.to_path_buf())),
        other => other.map_err(io(if dir.exists() { &path } else { dir }))?,
    };
    let damaged = |e: serde_json::Error| ArtifactError::Damaged { file: path.clone(), what: e.to_string() };
    let version: Version = serde_json::from_slice(&text).map_err(damaged)?;
    if version.format != FORMAT {
        return Err(ArtifactError::Format { dir: dir.to_path_buf(), found: version.format, mcc: version.mcc });
    }
    let manifest = serde_json::from_slice(&text).map_err(damaged)?;
    Ok((manifest, blake3::hash(&text).to_hex().to_string()))
}

fn job(path: &Path) -> Result<Job, ArtifactError> {
    let packed = fs::read(path).map_err(io(path))?;
    let damaged = |what: String| ArtifactError::Damaged { file: path.to_path_buf(), what };
    let mut plain = vec![];
    let decoder = zstd::Decoder::new(packed.as_slice()).map_err(|e| damaged(e.to_string()))?;
    io::Read::read_to_end(&mut io::Read::take(decoder, MOST_JOB as u64), &mut plain).map_err(|e| damaged(e.to_string()))?;
    postcard::from_bytes(&plain).map_err(|e| damaged(e.to_string()))
}

fn entries(path: &Path, job: &Job) -> Result<Vec<KernelEntry>, ArtifactError> {
    let damaged = |what: String| ArtifactError::Damaged { file: path.to_path_buf(), what };
    let entries: Vec<KernelEntry> = serde_json::from_slice(&fs::read(path).map_err(io(path))?).map_err(|e| damaged(e.to_string()))?;
    if entries.len() != job.kernels.len() {
        return Err(damaged(format!("it has {} kernels, the job {}", entries.len(), job.kernels.len())));
    }
    match entries.iter().find(|e| e.tiles == 0 || e.scratch_bytes > 1 << 32 || e.name.contains('\0')) {
        Some(e) => Err(damaged(format!("kernel `{}` has {} tiles and {} bytes of scratch", e.name, e.tiles, e.scratch_bytes))),
        None => Ok(entries),
    }
}

/// Every kernel has code for where it runs: one for a GPU says how it is launched, and a GPU of the kind can do that.
fn runnable(path: &Path, job: &Job, entries: &[KernelEntry], target: &Target) -> Result<(), ArtifactError> {
    for (entry, kernel) in entries.iter().zip(&job.kernels) {
        let sound = match (target, kernel.on, &entry.launch) {
            (Target::Gpu { arch, .. }, Space::Device, Some(launch)) => launch.check(kernel, arch),
            (Target::Gpu { .. }, Space::Device, None) => Err("nothing about its launch".into()),
            (Target::Gpu { host: None, .. }, Space::Host, None) => Err("no CPU to run on".into()),
            (Target::Cpu(_), _, Some(_)) | (Target::Gpu { .. }, Space::Host, Some(_)) => Err("a launch, though a CPU runs it".into()),
            (Target::Cpu(_), _, None) | (Target::Gpu { host: Some(_), .. }, Space::Host, None) | (Target::Reference, _, _) => Ok(()),
        };
        sound.map_err(|e| ArtifactError::Damaged { file: path.to_path_buf(), what: format!("kernel `{}` has {e}", entry.name) })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
