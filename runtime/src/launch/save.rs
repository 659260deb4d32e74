//! The file that a run saves: without a name until all ranks have written their parts.

use crate::weights::Layout;
use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

pub struct Target {
    file: File,
    /// What it shall be called.
    path: PathBuf,
    /// Of names beside that one.
    tag: String,
    /// Its name so far, on file systems where a file must have one.
    temporary: Option<Named>,
}

/// How ranks get at a file before it has its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reached {
    /// Through this process's list of open files.
    ByProcess,
    /// On other machines too, in a directory that they share: it has a name of its own, which ranks make of its path and the run's tag ([`beside`]), and which stays if this
    /// process is killed.
    ByName { tag: String },
}

/// A file that goes unless it is renamed.
struct Named(PathBuf);

impl Drop for Named {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

impl Target {
    /// A file of the right size in the directory of `path`, which may exist and is left as it is for now.
    pub fn create(path: &Path, layout: &Layout, reached: &Reached) -> io::Result<Target> {
        let dir = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        if path.is_dir() || path.file_name().is_none() {
            return Err(io::Error::new(io::ErrorKind::IsADirectory, "it is a directory"));
        }
        let mode = Mode::from_raw_mode(0o644);
        let tag = match reached {
            Reached::ByProcess => std::process::id().to_string(),
            Reached::ByName { tag } => tag.clone(),
        };
        let nameless = match reached {
            Reached::ByProcess => rustix::fs::open(dir, OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC, mode),
            Reached::ByName { .. } => Err(rustix::io::Errno::OPNOTSUPP),
        };
        let (file, temporary) = match nameless {
            Ok(file) => (File::from(file), None),
            Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::ISDIR) => {
                let named = beside(path, &tag);
                let file = File::options().read(true).write(true).create_new(true).open(&named)?;
                (file, Some(Named(named)))
            }
            Err(e) => return Err(e.into()),
        };
        layout.start(&file)?;
        Ok(Target { file, path: path.to_path_buf(), tag, temporary })
    }

    /// Where ranks find it.
    pub fn path(&self) -> PathBuf {
        match &self.temporary {
            Some(named) => std::path::absolute(&named.0).unwrap_or_else(|_| named.0.clone()),
            None => PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd())),
        }
    }

    /// Gives the complete file its name.
    pub fn finish(self) -> io::Result<()> {
        self.file.sync_all()?;
        let named = match self.temporary {
            Some(named) => named,
            None => {
                let named = Named(beside(&self.path, &self.tag));
                let from = format!("/proc/self/fd/{}", self.file.as_raw_fd());
                rustix::fs::linkat(CWD, from, CWD, &named.0, AtFlags::SYMLINK_FOLLOW)?;
                named
            }
        };
        fs::rename(&named.0, &self.path)
    }
}

/// The name of a file until it is complete.
pub fn beside(path: &Path, tag: &str) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.{tag}.tmp"))
}
