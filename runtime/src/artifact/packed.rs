//! The job as the bytes of its file.

use ir::program::Job;
use std::io::{self, Read};

/// A job unpacks to at most so many times its file's bytes, which keeps memory in proportion to the file. Jobs of
/// models are some 6 times as large.
const MOST_RATIO: u64 = 256;

/// Bytes that any job may unpack to: constant tables compress more than anything. T5's of 2,048 positions are 64 MiB.
const FREE: u64 = 80 << 20;

/// The greatest distance (log2 of bytes) back to which the compression may refer, and hence the decoder's memory:
/// what the level's encoder uses.
const WINDOW: u32 = 21;
const LEVEL: i32 = 3;

fn most(packed: usize) -> u64 {
    (packed as u64).saturating_mul(MOST_RATIO).saturating_add(FREE)
}

/// Packs a job.
///
/// # Errors
/// If it could not be read again: it is that much smaller packed.
pub fn pack(job: &Job) -> io::Result<Vec<u8>> {
    let plain = postcard::to_stdvec(job).expect("invariant: a job is plain data");
    let packed = zstd::encode_all(plain.as_slice(), LEVEL)?;
    if plain.len() as u64 > most(packed.len()) {
        return Err(io::Error::other(format!("the job has {} bytes, too many for {} of its file", plain.len(), packed.len())));
    }
    Ok(packed)
}

/// Reads a job, all of the bytes being its own.
///
/// # Errors
/// What is wrong with the bytes.
pub fn unpack(packed: &[u8]) -> Result<Job, String> {
    let (mut plain, most) = (vec![], most(packed.len()));
    let mut decoder = zstd::Decoder::new(packed).map_err(|e| e.to_string())?;
    decoder.window_log_max(WINDOW).map_err(|e| e.to_string())?;
    decoder.take(most + 1).read_to_end(&mut plain).map_err(|e| e.to_string())?;
    if plain.len() as u64 > most {
        return Err(format!("it unpacks to more than {most} bytes"));
    }
    match postcard::take_from_bytes(&plain).map_err(|e| e.to_string())? {
        (job, []) => Ok(job),
        (_, rest) => Err(format!("{} bytes follow the job", rest.len())),
    }
}
