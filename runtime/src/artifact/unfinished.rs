//! Directories that become artifacts once all of their files are there.
//!
//! A directory must have a name from the beginning: `.NAME.RANDOM.tmp` beside the artifact. Its process holds a
//! lock on it, which ends with the process however that ends. So whoever gets the lock knows that nobody needs
//! the directory any more. A file system without locks on directories, as NFS, keeps what was left.

use super::manifest::MANIFEST;
use super::{DUMPS, JOB, KERNELS, LIBRARY, PTX, SIGNATURE};
use crate::paths;
use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use tempfile::TempDir;

const SUFFIX: &str = ".tmp";

/// Goes with all that is in it unless it is finished.
pub struct Unfinished {
    dir: TempDir,
    _lock: File,
}

impl Unfinished {
    /// A new directory beside the one that it is to become.
    ///
    /// # Errors
    /// If there can be none.
    pub fn create(artifact: &Path) -> io::Result<Unfinished> {
        let (parent, prefix) = (parent(artifact), prefix(artifact));
        fs::create_dir_all(parent)?;
        loop {
            // The umask decides who may read it, as for any directory.
            let mut builder = tempfile::Builder::new();
            let dir = builder.prefix(&prefix).suffix(SUFFIX).permissions(Permissions::from_mode(0o777)).tempdir_in(parent)?;
            let lock = match File::open(dir.path()) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                other => other?,
            };
            let _ = lock.lock();
            // Another process that cleans up may have had the lock first and removed the directory.
            if is_at(&lock, dir.path()) {
                return Ok(Unfinished { dir, _lock: lock });
            }
        }
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Gives it its name. What had that name goes.
    ///
    /// # Errors
    /// What the file system says; then nothing has changed.
    pub fn finish(&self, artifact: &Path) -> io::Result<()> {
        paths::exchange(self.path(), artifact)
    }
}

/// Removes what killed processes have left of artifacts of this name. What cannot be removed stays.
pub fn clean(artifact: &Path) {
    let prefix = prefix(artifact);
    for entry in fs::read_dir(parent(artifact)).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let named = name.to_str().is_some_and(|n| n.starts_with(&prefix) && n.ends_with(SUFFIX));
        if !named || !entry.file_type().is_ok_and(|t| t.is_dir()) || !is_ours(&entry.path()) {
            continue;
        }
        let Ok(lock) = File::open(entry.path()) else { continue };
        if lock.try_lock().is_ok() && is_at(&lock, &entry.path()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Whether nothing but files of artifacts is in a directory.
fn is_ours(dir: &Path) -> bool {
    let of_artifacts = [JOB, LIBRARY, KERNELS, PTX, DUMPS.trim_end_matches('/'), MANIFEST, SIGNATURE];
    fs::read_dir(dir).is_ok_and(|mut entries| entries.all(|e| e.is_ok_and(|e| of_artifacts.iter().any(|name| e.file_name() == *name))))
}

fn is_at(file: &File, path: &Path) -> bool {
    let same = |a: fs::Metadata, b: fs::Metadata| (a.dev(), a.ino()) == (b.dev(), b.ino());
    file.metadata().is_ok_and(|a| path.symlink_metadata().is_ok_and(|b| same(a, b)))
}

fn parent(artifact: &Path) -> &Path {
    artifact.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn prefix(artifact: &Path) -> String {
    format!(".{}.", artifact.file_name().map_or_else(|| "artifact".into(), |n| n.to_string_lossy()))
}
