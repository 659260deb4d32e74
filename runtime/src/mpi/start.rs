//! How a rank comes to MPI, and whether its program can.

use super::PointToPoint;
use std::path::Path;
use std::process::{Command, Stdio};

/// How to build a program for ranks that can.
const WAY: &str = "`cargo build --release -p runtime --features mpi` builds one, against the MPI of the `mpicc` that is found or that MPICC names";

/// What ranks are connected by.
pub type Connected = Box<dyn PointToPoint>;

/// The MPI library that this program is linked with: its name and version. None if it was built without.
pub fn version() -> Option<String> {
    #[cfg(feature = "mpi")]
    {
        Some(super::library::version())
    }
    #[cfg(not(feature = "mpi"))]
    {
        None
    }
}

/// The MPI library of the program for ranks, which says so when it is asked (`mcc-rank --mpi`).
///
/// # Errors
/// If it has none, and how to get it.
pub fn library_of(binary: &Path) -> Result<String, String> {
    let asked = Command::new(binary).arg("--mpi").stdin(Stdio::null()).output();
    let out = asked.map_err(|e| format!("`{}` could not be started: {e}", binary.display()))?;
    let line = |text: &[u8]| String::from_utf8_lossy(text).lines().next().unwrap_or_default().trim().to_owned();
    if out.status.success() {
        return Ok(line(&out.stdout));
    }
    let why = line(&out.stderr);
    // The system says what it does not find; a program without MPI names itself.
    let why = if why.starts_with("mcc-rank") { "was built without it".into() } else { format!("does not run: {why}") };
    Err(format!("`{}` {why}; {WAY}", binary.display()))
}

/// Meets the other ranks. Comes back when all have come.
///
/// # Errors
/// If the library was not started as this rank of this world, or is not there.
pub fn connect(rank: u64, world: u64) -> Result<Connected, String> {
    #[cfg(feature = "mpi")]
    {
        super::library::connect(rank, world)
    }
    #[cfg(not(feature = "mpi"))]
    {
        let _ = (rank, world);
        Err(format!("the program of ranks was built without it; {WAY}"))
    }
}
