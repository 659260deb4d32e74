//! Compiled kernels on disk, so that the same kernel is compiled once.
//!
//! An entry's name is the hash of the kernel's name (itself a hash of its content), the target, what is kept beside
//! the object, and the version of the code generator. Entries appear by renaming, so a reader never sees half of one;
//! an entry that does not match its own hash counts as absent. The least recently used entries go when the directory
//! outgrows its limit.

use crate::object::{Compiled, Emit};
use crate::target::Target;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::SystemTime;
use tempfile::NamedTempFile;

/// Changes whenever the sources of the code generator do.
const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "-", env!("CODEGEN_SOURCES"), "-llvm22");

/// Bytes that the cache keeps, unless told otherwise.
pub const DEFAULT_LIMIT: u64 = 512 << 20;

const SUFFIX: &str = "kernel";

/// A directory of compiled kernels. It may be shared by processes.
#[derive(Clone, Debug)]
pub struct Cache {
    directory: PathBuf,
    limit: u64,
}

impl Cache {
    /// A cache in `directory`, which is created when the first entry is written, of at most `limit` bytes.
    pub fn new(directory: impl Into<PathBuf>, limit: u64) -> Cache {
        Cache { directory: directory.into(), limit }
    }

    fn path(&self, kernel: &str, target: &Target, emit: Emit) -> PathBuf {
        let key = serde_json::to_vec(&(kernel, target, emit, VERSION)).expect("invariant: a key is plain data");
        self.directory.join(format!("{}.{SUFFIX}", &blake3::hash(&key).to_hex()[..32]))
    }

    /// The compiled kernel of that name, if an intact entry exists.
    pub fn get(&self, kernel: &str, target: &Target, emit: Emit) -> Option<Compiled> {
        let path = self.path(kernel, target, emit);
        let bytes = std::fs::read(&path).ok()?;
        let (hash, content) = bytes.split_at_checked(blake3::OUT_LEN)?;
        if blake3::hash(content).as_bytes() != hash {
            return None;
        }
        // A failure to note the use only makes the entry look older.
        let _ = File::options().append(true).open(&path).and_then(|f| f.set_modified(SystemTime::now()));
        Compiled::decode(content)
    }

    /// Keeps a compiled kernel. A cache that cannot be written is no error: it only does not help.
    pub fn put(&self, compiled: &Compiled, target: &Target, emit: Emit) {
        let _ = self.write(&self.path(&compiled.name, target, emit), &compiled.encode());
    }

    fn write(&self, path: &Path, content: &[u8]) -> std::io::Result<()> {
        std::fs::create_dir_all(&self.directory)?;
        let mut file = self.unfinished()?;
        file.write_all(blake3::hash(content).as_bytes())?;
        file.write_all(content)?;
        file.persist(path)?;
        Ok(())
    }

    /// The file of an entry to be. If its process is killed it stays, and is one more entry that goes when nobody
    /// uses it.
    fn unfinished(&self) -> std::io::Result<NamedTempFile> {
        tempfile::Builder::new().suffix(&format!(".{SUFFIX}")).tempfile_in(&self.directory)
    }

    /// Removes the least recently used entries beyond the limit.
    pub fn trim(&self) {
        let Ok(directory) = std::fs::read_dir(&self.directory) else { return };
        let mut entries: Vec<(SystemTime, u64, PathBuf)> = directory
            .filter_map(|entry| {
                let entry = entry.ok()?;
                let meta = entry.metadata().ok()?;
                let path = entry.path();
                (path.extension()? == SUFFIX).then_some((meta.modified().ok()?, meta.len(), path))
            })
            .collect();
        entries.sort();
        let mut total: u64 = entries.iter().map(|e| e.1).sum();
        for (_, size, path) in entries {
            if total <= self.limit {
                break;
            }
            if std::fs::remove_file(path).is_ok() {
                total -= size;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Shape;

    fn compiled(name: &str) -> Compiled {
        let shape = Shape { tiles: 3, line: 1, scratch_bytes: 64 };
        Compiled {
            name: name.into(),
            shape,
            verification: Default::default(),
            launch: None,
            object: vec![1, 2, 3],
            mlir: None,
            llvm: Some("text".into()),
            asm: None,
        }
    }

    #[test]
    fn an_entry_is_found_again_only_for_its_own_target() {
        let directory = tempfile::tempdir().expect("a directory");
        let cache = Cache::new(directory.path(), 1000);
        let target = Target::x86_64_v3();
        assert_eq!(cache.get("k", &target, Emit::default()), None);
        cache.put(&compiled("k"), &target, Emit::default());
        assert_eq!(cache.get("k", &target, Emit::default()), Some(compiled("k")));
        let other = Target { cpu: "znver4".into(), ..target };
        assert_eq!(cache.get("k", &other, Emit::default()), None);
    }

    #[test]
    fn a_damaged_entry_counts_as_absent_and_is_rewritten() {
        let directory = tempfile::tempdir().expect("a directory");
        let cache = Cache::new(directory.path(), 1000);
        let target = Target::x86_64_v3();
        cache.put(&compiled("k"), &target, Emit::default());
        let path = cache.path("k", &target, Emit::default());
        let whole = std::fs::read(&path).expect("an entry");
        for damaged in [&whole[..20], &whole[..whole.len() - 1], &[], &[7; 100]] {
            std::fs::write(&path, damaged).expect("written");
            assert_eq!(cache.get("k", &target, Emit::default()), None);
        }
        cache.put(&compiled("k"), &target, Emit::default());
        assert!(cache.get("k", &target, Emit::default()).is_some());
    }

    #[test]
    fn what_a_killed_process_left_counts_and_goes() {
        let directory = tempfile::tempdir().expect("a directory");
        let cache = Cache::new(directory.path(), 1000);
        let mut left = cache.unfinished().expect("a file").keep().expect("kept").0;
        left.write_all(&[7; 900]).expect("written");
        left.set_modified(SystemTime::now() - std::time::Duration::from_secs(10)).expect("a time");
        cache.put(&compiled("k"), &Target::x86_64_v3(), Emit::default());
        assert_eq!(std::fs::read_dir(directory.path()).expect("entries").count(), 2);
        Cache::new(directory.path(), 800).trim();
        assert!(cache.get("k", &Target::x86_64_v3(), Emit::default()).is_some());
        assert_eq!(std::fs::read_dir(directory.path()).expect("entries").count(), 1);
    }

    #[test]
    fn the_least_recently_used_entries_go_first() {
        let directory = tempfile::tempdir().expect("a directory");
        let target = Target::x86_64_v3();
        let one = compiled("a").encode().len() as u64 + blake3::OUT_LEN as u64;
        let cache = Cache::new(directory.path(), 2 * one);
        for (age, name) in [(30, "a"), (20, "b"), (10, "c")] {
            cache.put(&compiled(name), &target, Emit::default());
            let file = File::options().append(true).open(cache.path(name, &target, Emit::default())).expect("an entry");
            file.set_modified(SystemTime::now() - std::time::Duration::from_secs(age)).expect("a time");
        }
        assert!(cache.get("a", &target, Emit::default()).is_some(), "which makes it the latest");
        cache.trim();
        assert!(cache.get("a", &target, Emit::default()).is_some());
        assert!(cache.get("b", &target, Emit::default()).is_none());
        assert!(cache.get("c", &target, Emit::default()).is_some());
    }
}
