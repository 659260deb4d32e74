//! The file that a run saves: without a name until all ranks have written their parts, with its space reserved before
//! the run begins.

use super::error::RunError;
use crate::protocol::SaveFile;
use crate::weights::SafetensorsLayout;
use rustix::fs::{AtFlags, CWD, FallocateFlags, Mode, OFlags};
use rustix::io::Errno;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

/// A file that a run saves to.
pub struct SaveTarget {
    file: File,
    /// What it shall be called.
    path: PathBuf,
    /// Of names beside that one.
    tag: String,
    /// Its name so far, on file systems where a file must have one.
    temporary: Option<TemporaryFile>,
    /// Bytes that its file system may yet give to others, as it reserves none.
    unreserved: u64,
}

/// How ranks get at a file before it has its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileAccess {
    /// Through this process's list of open files.
    ByProcess,
    /// On other machines too, in a directory that they share: it has a name of its own, which ranks make of its path
    /// and the run's tag ([`beside`]), and which stays if this process is killed.
    ByName { tag: String },
}

/// What happens to a file that a run would write and that exists.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Existing {
    /// The run is refused before it begins.
    #[default]
    Refuse,
    /// What the run writes takes its place.
    Replace,
}

/// A file that goes unless it is renamed.
struct TemporaryFile(PathBuf);

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Whether a run may write a file: there is none, nothing is in it, it is a device or a pipe, or it may be replaced.
///
/// # Errors
/// A file that would be lost.
pub fn replaceable(file: &Path, existing: Existing) -> Result<(), RunError> {
    match (existing, fs::metadata(file)) {
        (Existing::Refuse, Ok(about)) if about.is_file() && about.len() > 0 => Err(RunError::Exists { file: file.to_path_buf() }),
        (Existing::Refuse | Existing::Replace, _) => Ok(()),
    }
}

impl SaveTarget {
    /// A file of the right size, its space reserved, in the directory of `path`, which may exist and is left as it is
    /// for now. `others` are files of the same run.
    ///
    /// # Errors
    /// If there is no such directory, or no room for so much.
    pub fn create(path: &Path, layout: &SafetensorsLayout, reached: &FileAccess, others: &[&SaveTarget]) -> Result<SaveTarget, RunError> {
        let failed = |cause| RunError::Io { file: path.to_path_buf(), cause };
        let dir = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let is_other = fs::metadata(path).is_ok_and(|m| !m.is_file());
        if is_other || path.file_name().is_none() {
            return Err(failed(io::Error::new(io::ErrorKind::InvalidInput, "it is a directory or a device; a run saves to a file")));
        }
        let mode = Mode::from_raw_mode(0o644);
        let tag = match reached {
            FileAccess::ByProcess => std::process::id().to_string(),
            FileAccess::ByName { tag } => tag.clone(),
        };
        let nameless = match reached {
            FileAccess::ByProcess => rustix::fs::open(dir, OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC, mode),
            FileAccess::ByName { .. } => Err(Errno::OPNOTSUPP),
        };
        let (file, temporary) = match nameless {
            Ok(file) => (File::from(file), None),
            Err(Errno::OPNOTSUPP | Errno::ISDIR) => {
                let named = beside(path, &tag);
                let file = File::options().read(true).write(true).create_new(true).open(&named).map_err(failed)?;
                (file, Some(TemporaryFile(named)))
            }
            Err(e) => return Err(failed(e.into())),
        };
        let unreserved = reserve(&file, layout.bytes, others).map_err(|cause| RunError::Space {
            file: path.to_path_buf(),
            bytes: layout.bytes,
            free: free(&file).map_or("an unknown number of".into(), |n| n.to_string()),
            cause,
        })?;
        layout.start(&file).map_err(failed)?;
        Ok(SaveTarget { file, path: path.to_path_buf(), tag, temporary, unreserved })
    }

    /// Where ranks find it, and what it is called.
    pub fn file(&self) -> SaveFile {
        let at = match &self.temporary {
            Some(named) => std::path::absolute(&named.0).unwrap_or_else(|_| named.0.clone()),
            None => PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd())),
        };
        SaveFile { at, name: self.path.clone() }
    }

    /// Gives the complete file its name.
    pub fn finish(self) -> Result<(), RunError> {
        let path = self.path.clone();
        self.name().map_err(|cause| RunError::Unsaved { file: path, cause })
    }

    fn name(self) -> io::Result<()> {
        self.file.sync_all()?;
        let named = match self.temporary {
            Some(named) => named,
            None => {
                let named = TemporaryFile(beside(&self.path, &self.tag));
                let from = format!("/proc/self/fd/{}", self.file.as_raw_fd());
                rustix::fs::linkat(CWD, from, CWD, &named.0, AtFlags::SYMLINK_FOLLOW)?;
                named
            }
        };
        fs::rename(&named.0, &self.path)
    }
}

/// Bytes that whoever runs this may still write to a file's file system.
fn free(file: &File) -> io::Result<u64> {
    let about = rustix::fs::fstatvfs(file)?;
    Ok(about.f_bavail.saturating_mul(about.f_frsize))
}

/// Takes the space for a file, or where the file system cannot do that, looks whether there is enough beside what
/// others of the run will take. Gives the bytes that are not reserved.
fn reserve(file: &File, bytes: u64, others: &[&SaveTarget]) -> io::Result<u64> {
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes) {
        Ok(()) => Ok(0),
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
            let system = rustix::fs::fstat(file)?.st_dev;
            let is_beside = |other: &&&SaveTarget| rustix::fs::fstat(&other.file).is_ok_and(|s| s.st_dev == system);
            let taken: u64 = others.iter().filter(is_beside).map(|o| o.unreserved).sum();
            if free(file)? < bytes.saturating_add(taken) {
                return Err(Errno::NOSPC.into());
            }
            Ok(bytes)
        }
        Err(e) => Err(e.into()),
    }
}

/// The name of a file until it is complete.
pub fn beside(path: &Path, tag: &str) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.{tag}.tmp"))
}
