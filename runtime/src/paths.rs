//! Paths that a command line names: which of them every process can open, and which are of one file.

use rustix::fs::{CWD, RenameFlags};
use rustix::io::Errno;
use std::fs::{self, File, Metadata, Permissions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Links that are followed, as the system does.
const MOST_LINKS: usize = 40;

/// Why not every process can read a file by its path, with a way out.
///
/// # Errors
/// What the file system says of the path.
pub fn unshared(path: &Path) -> io::Result<Option<String>> {
    let about = fs::metadata(path)?;
    let way_out =
        |is: &str| Some(format!("it is {is}, and every rank reads the file by itself: write it to a file first (`cat {} > FILE`)", path.display()));
    Ok(match kind(&about) {
        None if is_own(path) => way_out("a link to what this process alone has open"),
        None => None,
        Some(is @ "a directory") => Some(format!("it is {is}, not a file")),
        Some(is) => way_out(is),
    })
}

/// What stands in the place of a regular file.
pub fn kind(about: &Metadata) -> Option<&'static str> {
    let of = about.file_type();
    match () {
        () if of.is_file() => None,
        () if of.is_dir() => Some("a directory"),
        () if of.is_fifo() => Some("a pipe"),
        () if of.is_socket() => Some("a socket"),
        () => Some("a device"),
    }
}

/// Whether a path leads through a process's own list of open files, as `/dev/stdin` does: whoever else opens it gets
/// something else.
pub fn is_own(path: &Path) -> bool {
    let mut at = path.to_path_buf();
    for _ in 0..MOST_LINKS {
        if parent(&at).canonicalize().is_ok_and(|dir| dir.starts_with("/proc")) {
            return true;
        }
        match fs::read_link(&at) {
            Ok(to) => at = parent(&at).join(to),
            Err(_) => return false,
        }
    }
    false
}

/// Whether two paths are those of one file, whatever its names; of files that are not there yet, of one directory and
/// name. Devices and pipes are nobody's own.
pub fn same(a: &Path, b: &Path) -> bool {
    match (fs::metadata(a), fs::metadata(b)) {
        (Ok(x), Ok(y)) => (x.is_file() || x.is_dir()) && (x.dev(), x.ino()) == (y.dev(), y.ino()),
        (Err(_), Err(_)) => {
            let whole = |p: &Path| Some((parent(p).canonicalize().ok()?, p.file_name()?.to_owned()));
            whole(a).is_some_and(|a| Some(a) == whole(b))
        }
        _ => false,
    }
}

/// Opens a file to be written from its start; a pipe only if somebody reads it already, so that nobody is waited for.
///
/// # Errors
/// What the file system says.
pub fn create(path: &Path) -> io::Result<File> {
    let file = File::options().write(true).create(true).truncate(true).custom_flags(libc::O_NONBLOCK).open(path);
    blocking(file)
}

/// Writes a file that is whole or not there: a temporary one beside it takes its name at the end. What is no file is
/// written as it is.
///
/// # Errors
/// What the file system says; then what was there stays.
pub fn write_whole(path: &Path, write: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<()> {
    // An existing file is written through links and keeps its permissions.
    let path = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    let permissions = match fs::metadata(&path) {
        Ok(about) if !about.is_file() => return write(&mut create(&path)?),
        Ok(about) => about.permissions(),
        // The umask takes bits from these.
        Err(_) => Permissions::from_mode(0o666),
    };
    let file = tempfile::Builder::new().prefix(".mcc-").permissions(permissions).tempfile_in(parent(&path));
    // The error must not name the temporary file.
    let mut file = file.map_err(|e| io::Error::from(e.kind()))?;
    write(file.as_file_mut())?;
    file.persist(&path).map(drop).map_err(|e| e.error)
}

/// Gives a directory the name of another, which takes its name in return: there is never none. Without another it is
/// renamed.
///
/// # Errors
/// What the file system says; then nothing has changed.
pub fn exchange(from: &Path, to: &Path) -> io::Result<()> {
    if to.symlink_metadata().is_err() {
        return fs::rename(from, to);
    }
    match rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::EXCHANGE) {
        // File systems such as NFS have no exchange, so that for a moment nothing has the name.
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
            let aside = tempfile::Builder::new().prefix(".mcc-").tempdir_in(parent(to))?;
            fs::rename(to, aside.path())?;
            // Whatever goes wrong, the old directory gets its name back.
            fs::rename(from, to).inspect_err(|_| drop(fs::rename(aside.path(), to)))?;
            fs::rename(aside.path(), from)
        }
        other => Ok(other?),
    }
}

/// What was opened without waiting for anybody, made to wait for room from now on.
///
/// # Errors
/// That of opening; of a pipe that nobody reads with a way out.
pub fn blocking(opened: io::Result<File>) -> io::Result<File> {
    let file = opened.map_err(|e| match e.raw_os_error() {
        Some(libc::ENXIO) => io::Error::new(e.kind(), "it is a pipe that nobody reads: start its reader first, or name a file"),
        _ => e,
    })?;
    let flags = rustix::fs::fcntl_getfl(&file)?;
    rustix::fs::fcntl_setfl(&file, flags - rustix::fs::OFlags::NONBLOCK)?;
    Ok(file)
}

fn parent(path: &Path) -> PathBuf {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new(".")).to_path_buf()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    #[test]
    fn what_one_process_has_open_and_what_is_no_file_is_not_shared() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("plain"), "x").unwrap();
        let open = File::open(at("plain")).unwrap();
        std::os::unix::fs::symlink(at("plain"), at("link")).unwrap();
        std::os::unix::fs::symlink(format!("/dev/fd/{}", open.as_raw_fd()), at("own")).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, at("pipe"), rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        let cases = [
            ("plain", ""),
            ("link", ""),
            ("own", "it is a link to what this process alone has open"),
            ("pipe", "it is a pipe, and"),
            (".", "it is a directory, not a file"),
        ];
        for (name, says) in cases {
            let why = unshared(&at(name)).unwrap();
            assert!(why.as_deref().unwrap_or_default().starts_with(says) && why.is_none() == says.is_empty(), "{name}: {why:?}");
        }
        assert!(create(&at("pipe")).unwrap_err().to_string().contains("nobody reads"));
    }

    #[test]
    fn one_file_has_many_names() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("a"), "x").unwrap();
        fs::write(at("b"), "x").unwrap();
        fs::hard_link(at("a"), at("hard")).unwrap();
        std::os::unix::fs::symlink(at("a"), at("soft")).unwrap();
        for (a, b, wanted) in
            [("a", "a", true), ("a", "hard", true), ("a", "soft", true), ("a", "b", false), ("new", "./new", true), ("new", "a", false)]
        {
            assert_eq!(same(&at(a), &at(b)), wanted, "{a} {b}");
        }
        assert!(!same(Path::new("/dev/null"), Path::new("/dev/null")));
    }
}
