//! Writes artifacts.

use super::manifest::{FileEntry, MANIFEST, Manifest, pretty};
use super::unfinished::{self, Unfinished};
use super::{ArtifactError, CUBIN, DUMPS, JOB, KERNELS, KernelEntry, LIBRARY, PTX, SIGNATURE, assembled, io, module, packed};
use crate::check;
use crate::signature::SecretKey;
use crate::target::Target;
use ir::program::Job;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// All kernels.
pub struct Kernels<'a> {
    /// In the order of [`Job::kernels`].
    pub entries: &'a [KernelEntry],
    /// The shared library of those that CPUs run, if there are any.
    pub library: Option<&'a [u8]>,
    /// The modules of the others, in order.
    pub ptx: &'a [&'a [u8]],
    /// What was assembled of each of these, in order; nothing, or all.
    pub cubins: &'a [&'a [u8]],
}

/// What an artifact is made of.
pub struct ArtifactParts<'a> {
    /// What the ranks run; it is checked before anything is written.
    pub job: &'a Job,
    /// What the kernels' code was made for.
    pub target: &'a Target,
    /// None for the reference target alone.
    pub kernels: Option<Kernels<'a>>,
    /// File names under `dumps/` and texts.
    pub dumps: &'a [(String, String)],
    /// Key that signs the artifact, if somebody does.
    pub sign: Option<&'a SecretKey>,
}

/// Writes an artifact, or nothing: a directory beside it takes its name at the end. An artifact of that name is
/// replaced, and at every moment there is one or the other. What was left by processes that were killed as they wrote
/// one of that name is removed.
///
/// # Errors
/// If the job is unsound, something other than an artifact has that name, or the file system says so.
pub fn write(dir: &Path, parts: &ArtifactParts) -> Result<Manifest, ArtifactError> {
    write_unless(dir, parts, &|| false)
}

/// The same, unless it is to be given up, which is asked before each file.
///
/// # Errors
/// As for [`write`], and [`ArtifactError::GivenUp`].
pub fn write_unless(dir: &Path, parts: &ArtifactParts, given_up: &dyn Fn() -> bool) -> Result<Manifest, ArtifactError> {
    check::check(parts.job).map_err(|cause| ArtifactError::Check { file: dir.join(JOB), cause })?;
    if dir.symlink_metadata().is_ok() && !dir.join(MANIFEST).is_file() && fs::read_dir(dir).map_or(true, |mut d| d.next().is_some()) {
        return Err(ArtifactError::Foreign(dir.to_path_buf()));
    }
    let unfinished = Unfinished::create(dir).map_err(io(dir))?;
    let manifest = fill(unfinished.path(), parts, given_up).map_err(|e| match e {
        // The error names the file by its final path, which the user knows.
        ArtifactError::Io { file, cause } => {
            ArtifactError::Io { file: file.strip_prefix(unfinished.path()).map_or_else(|_| file.clone(), |name| dir.join(name)), cause }
        }
        other => other,
    })?;
    unfinished.finish(dir).map_err(io(dir))?;
    unfinished::clean(dir);
    Ok(manifest)
}

fn fill(dir: &Path, parts: &ArtifactParts, given_up: &dyn Fn() -> bool) -> Result<Manifest, ArtifactError> {
    let mut files = BTreeMap::new();
    let mut put = |name: &str, bytes: &[u8]| -> Result<(), ArtifactError> {
        let path = dir.join(name);
        if given_up() {
            return Err(ArtifactError::GivenUp);
        }
        fs::write(&path, bytes).map_err(io(&path))?;
        files.insert(name.to_owned(), FileEntry::of(bytes));
        Ok(())
    };
    put(JOB, &packed::pack(parts.job).map_err(io(&dir.join(JOB)))?)?;
    let wrong = |given| ArtifactError::Kernels { job: parts.job.kernels.len(), given };
    match (&parts.kernels, parts.target) {
        (None, Target::Reference) => {}
        (Some(Kernels { entries, library, ptx, cubins }), Target::Cpu(_) | Target::Gpu { .. }) => {
            let launched: Vec<&KernelEntry> = entries.iter().filter(|e| e.launch.is_some()).collect();
            let native = launched.len() < entries.len() || matches!(parts.target, Target::Cpu(_));
            if entries.len() != parts.job.kernels.len()
                || launched.len() != ptx.len()
                || !cubins.is_empty() && cubins.len() != ptx.len()
                || library.is_some() != native
            {
                return Err(wrong(entries.len()));
            }
            if let Some(library) = library {
                put(LIBRARY, library)?;
            }
            if !launched.is_empty() {
                fs::create_dir(dir.join(PTX)).map_err(io(dir))?;
            }
            for (entry, text) in launched.iter().zip(*ptx) {
                put(&module(&entry.name), text)?;
            }
            if !cubins.is_empty() {
                fs::create_dir(dir.join(CUBIN)).map_err(io(dir))?;
            }
            for (entry, code) in launched.iter().zip(*cubins) {
                put(&assembled(&entry.name), code)?;
            }
            put(KERNELS, &pretty(entries))?;
        }
        (given, _) => return Err(wrong(given.as_ref().map_or(0, |k| k.entries.len()))),
    }
    fs::create_dir(dir.join(DUMPS)).map_err(io(dir))?;
    for (name, text) in parts.dumps {
        put(&format!("{DUMPS}{name}"), text.as_bytes())?;
    }
    let manifest = Manifest::new(parts.job, parts.target, files);
    let (path, bytes) = (dir.join(MANIFEST), manifest.bytes());
    fs::write(&path, &bytes).map_err(io(&path))?;
    if let Some(key) = parts.sign {
        let path = dir.join(SIGNATURE);
        fs::write(&path, key.sign(&bytes)).map_err(io(&path))?;
    }
    Ok(manifest)
}
