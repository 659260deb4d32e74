//! Output files that appear together, once all of them are complete.

use crate::ConvertError;
use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// Files under temporary names in their directory; dropped unless committed, with the directories made for them.
pub struct StagedFiles {
    dir: PathBuf,
    /// Directories that were not there before, innermost first.
    made: Vec<PathBuf>,
    files: Vec<(NamedTempFile, PathBuf)>,
}

impl StagedFiles {
    /// # Errors
    /// The directory is not there and cannot be made.
    pub fn new(dir: &Path) -> Result<StagedFiles, ConvertError> {
        let absent = |d: &&Path| !d.as_os_str().is_empty() && !d.exists();
        let made = dir.ancestors().take_while(absent).map(Path::to_path_buf).collect();
        let staging = StagedFiles { dir: dir.into(), made, files: vec![] };
        std::fs::create_dir_all(dir).map_err(ConvertError::io(dir))?;
        Ok(staging)
    }

    /// Writes a file of this name, and returns what the writing returns.
    ///
    /// # Errors
    /// What the file system says.
    pub fn file<T>(&mut self, name: &str, write: impl FnOnce(&mut File) -> std::io::Result<T>) -> Result<T, ConvertError> {
        let path = self.dir.join(name);
        if path.is_dir() {
            return Err(ConvertError::Io { path, cause: std::io::ErrorKind::IsADirectory.into() });
        }
        // Files get the permissions of any new file: the umask applies to this mode, and temporary files would have
        // 0o600.
        let permissions = Permissions::from_mode(0o666);
        let mut file = tempfile::Builder::new().prefix(".mcc-").permissions(permissions).tempfile_in(&self.dir).map_err(ConvertError::io(&path))?;
        let done = write(file.as_file_mut()).map_err(ConvertError::io(&path))?;
        self.files.push((file, path));
        Ok(done)
    }

    /// Gives every file its name; returns the paths in the order of writing.
    ///
    /// # Errors
    /// What the file system says.
    pub fn commit(mut self) -> Result<Vec<PathBuf>, ConvertError> {
        let mut paths = vec![];
        for (file, path) in std::mem::take(&mut self.files) {
            file.persist(&path).map_err(|e| ConvertError::Io { path: path.clone(), cause: e.error })?;
            self.made.clear();
            paths.push(path);
        }
        Ok(paths)
    }
}

impl Drop for StagedFiles {
    fn drop(&mut self) {
        self.files.clear();
        for dir in &self.made {
            // Only an empty directory is removed, so nobody else's file is lost.
            let _ = std::fs::remove_dir(dir);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn committed_files_have_their_names_and_nothing_else_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("a/b");
        let mut staging = StagedFiles::new(&out).unwrap();
        staging.file("x", |f| f.write_all(b"1")).unwrap();
        assert!(!out.join("x").exists());
        staging.commit().unwrap();
        let names: Vec<_> = std::fs::read_dir(&out).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names, ["x"]);
    }

    #[test]
    fn what_is_not_committed_leaves_no_trace() {
        let dir = tempfile::tempdir().unwrap();
        let mut staging = StagedFiles::new(&dir.path().join("a/b")).unwrap();
        staging.file("x", |f| f.write_all(b"1")).unwrap();
        drop(staging);
        assert!(std::fs::read_dir(dir.path()).unwrap().next().is_none());
    }

    #[test]
    fn a_directory_in_the_way_is_found_before_any_file_has_its_name() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("x")).unwrap();
        assert!(StagedFiles::new(dir.path()).unwrap().file("x", |_| Ok(())).is_err());
    }

    #[test]
    fn a_failing_write_is_an_error_that_names_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let mut staging = StagedFiles::new(dir.path()).unwrap();
        let error = staging.file("x", |_| Err::<(), _>(std::io::Error::other("disk full"))).unwrap_err();
        assert!(error.to_string().ends_with("x`: disk full"), "{error}");
    }
}
