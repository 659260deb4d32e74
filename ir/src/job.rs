//! The verifier of programs, over all ranks together.

use crate::program::Job;

/// A job that could go wrong at run time: a bug in mcc.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct JobError(pub String);

/// Checks every kernel's invariants.
///
/// # Errors
/// The first that does not hold.
pub fn verify(job: &Job) -> Result<(), JobError> {
    for (k, kernel) in job.kernels.iter().enumerate() {
        kernel.verify().map_err(|e| JobError(format!("kernel {k}: {e}")))?;
    }
    Ok(())
}
