//! Objects to one shared library.

use std::io::{self, Write};
use std::process::{Command, Output, Stdio};

/// Names under which the linker is installed, first choice first.
const LINKERS: [&str; 3] = ["ld.lld-22", "/usr/lib/llvm-22/bin/ld.lld", "ld.lld"];

/// Why the shared library could not be made.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum LinkError {
    #[error("no linker found: {} (Debian: package lld-22)", LINKERS.join(", "))]
    NoLinker,
    #[error("the linker cannot run: {0}")]
    Io(io::Error),
    #[error("the linker failed: {0}")]
    Failed(String),
}

/// Links relocatable objects into a shared library, by one run of lld. Objects go to it and the library comes from it
/// through pipes, so that nothing has a name that could stay behind.
///
/// # Errors
/// No linker, a process that cannot run, or what the linker says.
pub fn link_shared<'a>(objects: impl IntoIterator<Item = &'a [u8]>) -> Result<Vec<u8>, LinkError> {
    let archive = archive(objects);
    for linker in LINKERS {
        match link(linker, &archive) {
            Ok(done) if done.status.success() => return Ok(done.stdout),
            Ok(done) => return Err(LinkError::Failed(String::from_utf8_lossy(&done.stderr).into_owned())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(LinkError::Io(error)),
        }
    }
    Err(LinkError::NoLinker)
}

fn link(linker: &str, archive: &[u8]) -> io::Result<Output> {
    let mut command = Command::new(linker);
    command.args(["-shared", "--build-id=none", "--whole-archive", "-o", "-", "/dev/stdin"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let mut input = child.stdin.take().expect("invariant: standard input is piped");
    std::thread::scope(|scope| {
        // A linker that ends before reading everything says why itself, so a failed write is ignored.
        scope.spawn(move || drop(input.write_all(archive)));
        child.wait_with_output()
    })
}

/// The objects as the members of one archive (ar(5)), without a table of symbols, which nobody reads of an archive
/// that is linked as a whole.
fn archive<'a>(objects: impl IntoIterator<Item = &'a [u8]>) -> Vec<u8> {
    let mut archive = b"!<arch>\n".to_vec();
    for (number, object) in objects.into_iter().enumerate() {
        let (name, time, user, group, mode) = (format!("{number}.o/"), 0, 0, 0, 644);
        let header = format!("{name:<16}{time:<12}{user:<6}{group:<6}{mode:<8}{:<10}`\n", object.len());
        archive.extend_from_slice(header.as_bytes());
        archive.extend_from_slice(object);
        // Members of an archive begin at even offsets.
        archive.resize(archive.len().next_multiple_of(2), b'\n');
    }
    archive
}
