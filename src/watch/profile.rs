//! The profile of a run, in its log.

use super::clock::now;
use runtime::paths::write_whole;
use runtime::profile::breakdown::Breakdown;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, BufReader, Read, Write};
use std::path::Path;

/// The file of where the time went.
pub const PROFILE: &str = "profile.json";

/// Bytes that are read at most: some ten thousand kernels.
const MOST: u64 = 16 << 20;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Profiled {
    /// Seconds since 1970, at the end of the run.
    pub time: f64,
    /// The id of what ran.
    pub artifact: String,
    #[serde(flatten)]
    pub breakdown: Breakdown,
}

/// Writes the file, in place of an earlier one.
///
/// # Errors
/// What the file system says.
pub fn write(dir: &Path, artifact: &str, breakdown: &Breakdown) -> io::Result<()> {
    let profiled = Profiled { time: now(), artifact: artifact.to_owned(), breakdown: breakdown.clone() };
    let text = serde_json::to_string_pretty(&profiled)? + "\n";
    write_whole(&dir.join(PROFILE), |file| file.write_all(text.as_bytes()))
}

/// # Errors
/// What the file system says, or that it is no such file.
pub fn read(file: &Path) -> io::Result<Profiled> {
    Ok(serde_json::from_reader(BufReader::new(File::open(file)?.take(MOST)))?)
}
