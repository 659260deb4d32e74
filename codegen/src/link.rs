//! Objects to one shared library.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Names under which the linker is installed, first choice first.
const LINKERS: [&str; 3] = ["ld.lld-22", "/usr/lib/llvm-22/bin/ld.lld", "ld.lld"];

/// Why the shared library could not be made.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    #[error("cannot write {path}: {error}")]
    Write { path: PathBuf, error: io::Error },
    #[error("no linker found: {} (Debian: package lld-22)", LINKERS.join(", "))]
    NoLinker,
    #[error("the linker failed: {0}")]
    Failed(String),
}

/// Links relocatable objects into the shared library `out`, by one run of lld. Temporary files stand beside `out` and are removed.
///
/// # Errors
/// No linker, a file that cannot be written, or what the linker says.
pub fn link_shared<'a>(objects: impl IntoIterator<Item = &'a [u8]>, out: &Path) -> Result<(), LinkError> {
    let directory = tempfile::Builder::new()
        .prefix(".link")
        .tempdir_in(out.parent().unwrap_or(Path::new(".")))
        .map_err(|error| LinkError::Write { path: out.into(), error })?;
    let mut paths = Vec::new();
    for (number, object) in objects.into_iter().enumerate() {
        let path = directory.path().join(format!("{number}.o"));
        std::fs::write(&path, object).map_err(|error| LinkError::Write { path: path.clone(), error })?;
        paths.push(path);
    }
    // Names of objects in a file: a command line has a limit.
    let list = directory.path().join("objects");
    let quoted: String = paths.iter().map(|p| format!("\"{}\"\n", p.display())).collect();
    std::fs::write(&list, quoted).map_err(|error| LinkError::Write { path: list.clone(), error })?;
    for linker in LINKERS {
        let run = Command::new(linker).args(["-shared", "--build-id=none", "-o"]).arg(out).arg(format!("@{}", list.display())).output();
        match run {
            Ok(done) if done.status.success() => return Ok(()),
            Ok(done) => return Err(LinkError::Failed(String::from_utf8_lossy(&done.stderr).into_owned())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(LinkError::Failed(error.to_string())),
        }
    }
    Err(LinkError::NoLinker)
}
