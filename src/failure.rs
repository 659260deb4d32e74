//! How a command fails.

/// Why a command failed. What it has to say is already printed for `Reported` and `Misused`.
pub enum Failure {
    Reported,
    /// The command line was wrong, which is printed too.
    Misused,
    /// A signal ended a run early, with everything saved.
    Early,
    Other(anyhow::Error),
}

impl<E: Into<anyhow::Error>> From<E> for Failure {
    fn from(e: E) -> Failure {
        Failure::Other(e.into())
    }
}
