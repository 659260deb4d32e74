//! How long a training step takes on a machine, from the very programs that its ranks will run.
//!
//! A [`machine::Machine`] says what devices, links and hosts do a second. From it every kernel ([`kernels`]) and
//! every exchange ([`links`]) has a time of its own; [`tape`] writes down what a rank of each stage issues, stream by
//! stream, [`play`] plays all stages together until steps are alike, [`step`] says what came of it, and [`timeline`]
//! what each stage does when.

pub mod cost;
pub mod fit;
pub mod goodput;
pub mod kernels;
pub mod links;
pub mod machine;
pub mod play;
pub mod step;
pub mod tape;
pub mod timeline;

/// What a machine file leaves open.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// Of a rank, on CPUs.
    pub threads: u64,
    /// A stage whose kernels take so many times as long, as where one of its ranks is slow.
    pub slow: Option<(usize, f64)>,
}

impl Default for Options {
    fn default() -> Options {
        Options { threads: 1, slow: None }
    }
}

/// Streams that wait for ever.
#[derive(Clone, Debug, thiserror::Error)]
#[error("after {seconds:.6} s nothing goes on: {}", said(.streams))]
pub struct Deadlock {
    /// Seconds from the beginning of the play to when the last stream stopped.
    pub seconds: f64,
    /// Stages, and what their streams are called.
    pub streams: Vec<(usize, &'static str)>,
}

/// Why a step has no prediction.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Unpredicted {
    /// Streams of its programs wait for ever.
    #[error(transparent)]
    Deadlock(#[from] Deadlock),
    /// Seconds of a step that are not positive, or not finite.
    #[error("the numbers of the machine file give a step of {0} s")]
    NoTime(f64),
}

fn said(streams: &[(usize, &'static str)]) -> String {
    streams.iter().map(|(stage, stream)| format!("{stream} of stage {stage}")).collect::<Vec<_>>().join(", ")
}
