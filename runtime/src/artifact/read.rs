//! Reads and checks artifacts.

use super::manifest::{self, FileEntry, MANIFEST, Manifest};
use super::{
    Artifact, ArtifactError, DUMPS, JOB, KERNELS, KernelEntry, LIBRARY, MOST_SCRATCH, SIGNATURE, assembled, contents, is_cubin, module, packed,
};
use crate::check;
use crate::signature::{self, PublicKey};
use crate::target::Target;
use ir::program::{Job, Space};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path};
use std::sync::Arc;

/// Which artifacts are taken.
#[derive(Clone, Copy, Debug)]
pub enum AcceptedArtifacts<'a> {
    /// Artifacts of anyone.
    Anyones,
    /// Those that one of these keys has signed.
    SignedBy(&'a [PublicKey]),
    /// The one with this id, which the launcher has read and verified. Its bytes are held against the id here too, so
    /// the job need not be verified by every rank again; dumps are not looked at.
    Verified(&'a str),
}

/// Reads and checks an artifact. Loads no code.
///
/// # Errors
/// What is wrong, with the file it is wrong in.
pub fn read(dir: &Path, accept: &AcceptedArtifacts) -> Result<Artifact, ArtifactError> {
    let (manifest, bytes) = manifest::read(dir)?;
    let id = manifest::hash(&bytes);
    match accept {
        AcceptedArtifacts::Anyones => {}
        AcceptedArtifacts::SignedBy(keys) => signed(dir, &bytes, keys)?,
        AcceptedArtifacts::Verified(wanted) if id != **wanted => {
            return Err(ArtifactError::Another { dir: dir.to_path_buf(), found: id, wanted: (*wanted).to_owned() });
        }
        AcceptedArtifacts::Verified(_) => {}
    }
    let of_manifest = |what: String| ArtifactError::Damaged { file: dir.join(MANIFEST), what };
    manifest.target.check().map_err(|cause| ArtifactError::Target { dir: dir.to_path_buf(), cause })?;
    let required: &[&str] = match manifest.target {
        Target::Reference => &[JOB],
        Target::Cpu(_) | Target::Gpu { host: Some(_), .. } => &[JOB, LIBRARY, KERNELS],
        Target::Gpu { host: None, .. } => &[JOB, KERNELS],
    };
    if let Some(name) = required.iter().find(|n| !manifest.files.contains_key(**n)) {
        return Err(of_manifest(format!("it does not list {name}")));
    }
    let (mut kept, mut modules, mut cubins, mut library) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new(), None);
    for (name, file) in &manifest.files {
        let path = dir.join(name);
        if !Path::new(name).components().all(|c| matches!(c, Component::Normal(_))) {
            return Err(of_manifest(format!("it names a file `{name}` elsewhere")));
        }
        match (name.as_str(), accept) {
            (LIBRARY, _) => library = Some(contents::sealed(&path, file)?),
            (JOB | KERNELS, _) => drop(kept.insert(name.as_str(), contents::bytes(&path, file)?)),
            (name, AcceptedArtifacts::Verified(_)) if name.starts_with(DUMPS) => {}
            (name, _) if name.starts_with(DUMPS) => contents::check(&path, file)?,
            (name, _) if name.starts_with("ptx/") => drop(modules.insert(name.to_owned(), text(&path, file)?)),
            (name, _) if name.starts_with("cubin/") => drop(cubins.insert(name.to_owned(), code(&path, file)?)),
            (name, _) => return Err(of_manifest(format!("it lists `{name}`, which is no file of an artifact"))),
        }
    }
    let damaged = |file: &str, what: String| ArtifactError::Damaged { file: dir.join(file), what };
    let job = packed::unpack(&kept[JOB]).map_err(|what| damaged(JOB, what))?;
    check::check(&job).map_err(|cause| ArtifactError::Check { file: dir.join(JOB), cause })?;
    match accept {
        AcceptedArtifacts::Verified(_) => {}
        AcceptedArtifacts::Anyones | AcceptedArtifacts::SignedBy(_) => {
            verify::job::verify(&job).map_err(|cause| ArtifactError::Unsound { file: dir.join(JOB), cause })?
        }
    }
    if !manifest.describes(&job) {
        return Err(of_manifest("it describes another job".into()));
    }
    let kernels = match kept.get(KERNELS) {
        Some(bytes) => entries(bytes, &job).map_err(|what| damaged(KERNELS, what))?,
        None => vec![],
    };
    runnable(&job, &kernels, &manifest.target).map_err(|what| damaged(KERNELS, what))?;
    own_files(&manifest, &kernels).map_err(of_manifest)?;
    Ok(Artifact { dir: dir.to_path_buf(), manifest, id, job, kernels, library, modules, cubins })
}

fn signed(dir: &Path, manifest: &[u8], keys: &[PublicKey]) -> Result<(), ArtifactError> {
    match signature::read(&dir.join(SIGNATURE))? {
        None => Err(ArtifactError::Unsigned(dir.to_path_buf())),
        Some(signature) if keys.iter().any(|key| key.has_signed(manifest, &signature)) => Ok(()),
        Some(_) => Err(ArtifactError::Stranger(dir.to_path_buf())),
    }
}

fn text(path: &Path, file: &FileEntry) -> Result<Arc<str>, ArtifactError> {
    let text = String::from_utf8(contents::bytes(path, file)?);
    text.map(Arc::from).map_err(|e| ArtifactError::Damaged { file: path.to_path_buf(), what: e.to_string() })
}

fn code(path: &Path, file: &FileEntry) -> Result<Arc<[u8]>, ArtifactError> {
    let bytes = contents::bytes(path, file)?;
    if is_cubin(&bytes) {
        return Ok(bytes.into());
    }
    Err(ArtifactError::Damaged { file: path.to_path_buf(), what: "it is no cubin".into() })
}

/// The kernels' list, one for each of the job's.
fn entries(bytes: &[u8], job: &Job) -> Result<Vec<KernelEntry>, String> {
    let entries: Vec<KernelEntry> = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
    if entries.len() != job.kernels.len() {
        return Err(format!("it has {} kernels, the job {}", entries.len(), job.kernels.len()));
    }
    let mut names = BTreeSet::new();
    for e in &entries {
        let symbol = !e.name.is_empty() && e.name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        if !symbol || e.tiles == 0 || e.scratch_bytes > MOST_SCRATCH {
            return Err(format!("kernel `{}` has {} tiles and {} bytes of scratch", e.name, e.tiles, e.scratch_bytes));
        }
        if !names.insert(&e.name) {
            return Err(format!("two kernels are called `{}`", e.name));
        }
    }
    Ok(entries)
}

/// Every kernel has code for where it runs: one for a GPU says how it is launched, and a GPU of the kind can do that.
pub(super) fn runnable(job: &Job, entries: &[KernelEntry], target: &Target) -> Result<(), String> {
    for (entry, kernel) in entries.iter().zip(&job.kernels) {
        let sound = match (target, kernel.on, &entry.launch) {
            (Target::Gpu { arch, .. }, Space::Device, Some(launch)) => launch.check(kernel, arch),
            (Target::Gpu { .. }, Space::Device, None) => Err("nothing about its launch".into()),
            (Target::Gpu { host: None, .. }, Space::Host, None) => Err("no CPU to run on".into()),
            (Target::Cpu(_), _, Some(_)) | (Target::Gpu { .. }, Space::Host, Some(_)) => Err("a launch, though a CPU runs it".into()),
            (Target::Cpu(_), _, None) | (Target::Gpu { host: Some(_), .. }, Space::Host, None) | (Target::Reference, _, _) => Ok(()),
        };
        sound.map_err(|e| format!("kernel `{}` has {e}", entry.name))?;
    }
    Ok(())
}

/// The manifest lists a module for each kernel that a GPU launches, assembled code for all of them or none, and code
/// for nothing else.
fn own_files(manifest: &Manifest, kernels: &[KernelEntry]) -> Result<(), String> {
    let launched = || kernels.iter().filter(|e| e.launch.is_some());
    let mut wanted: BTreeSet<String> = launched().map(|e| module(&e.name)).collect();
    let of_code = |name: &&String| name.starts_with("ptx/") || name.starts_with("cubin/");
    if manifest.files.keys().any(|name| name.starts_with("cubin/")) {
        wanted.extend(launched().map(|e| assembled(&e.name)));
    }
    if let Some(name) = wanted.iter().find(|name| !manifest.files.contains_key(*name)) {
        return Err(format!("it does not list {name}"));
    }
    match manifest.files.keys().filter(of_code).find(|name| !wanted.contains(*name)) {
        Some(name) => Err(format!("it lists {name}, of which the job has no kernel")),
        None => Ok(()),
    }
}
