//! A step, and how it is taken or fails.

use crate::comm::CommError;
use crate::device::DeviceError;
use crate::host::{Tensor, Whole};
use ir::diag::Help;
use ir::options::OptionName;
use ir::reason::{AvoidedBy, Reason};
use serde::{Deserialize, Serialize};

/// What a step is fed: per input of the job, one whole global batch, or as much of it as a rank loads.
pub trait StepInputs: Sync {
    /// The tensor for the input with this index into the job's inputs.
    fn input(&self, number: u32) -> &dyn Whole;
}

impl StepInputs for &[Tensor] {
    fn input(&self, number: u32) -> &dyn Whole {
        &self[number as usize]
    }
}

impl StepInputs for Vec<Tensor> {
    fn input(&self, number: u32) -> &dyn Whole {
        &self[number as usize]
    }
}

/// The inputs of a step that loads nothing.
struct NoInputs;

impl StepInputs for NoInputs {
    fn input(&self, _: u32) -> &dyn Whole {
        unreachable!("invariant: an idle step loads nothing")
    }
}

/// What is the same for all ranks in a step.
#[derive(Clone, Copy)]
pub struct Step<'a> {
    /// From 1.
    pub number: u64,
    /// Learning rate of the step, before a parameter's own factor.
    pub learning_rate: f64,
    /// 1 where there is none.
    pub loss_scale: f64,
    /// Below 2^53, as kernels of the reference device get it as f64.
    pub seed: u64,
    /// What inputs are loaded from.
    pub batch: &'a dyn StepInputs,
}

impl Step<'_> {
    /// A step in which nothing is trained: it ends what a step before has begun.
    pub fn idle(number: u64, seed: u64) -> Step<'static> {
        Step { number, learning_rate: 0.0, loss_scale: 1.0, seed, batch: &NoInputs }
    }
}

/// Why a command failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum Fault {
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Comm(#[from] CommError),
    /// A number is more than the program has room for.
    #[error("{found} is more than {most}: {}", .reason.as_ref().map_or("", |r| &r.why))]
    Limit { found: i64, most: u64, reason: Option<Reason> },
}

impl Fault {
    /// What may keep it from happening again.
    pub fn help(&self) -> Option<Help> {
        match self {
            Fault::Limit { reason: Some(Reason { avoided_by: Some(AvoidedBy::GreaterMoeBuffer), .. }), .. } => {
                Some(Help::from("a greater ").option(OptionName::MoeBuffer).and(" makes room for more"))
            }
            Fault::Limit { .. } | Fault::Device(_) | Fault::Comm(_) => None,
        }
    }
}

/// What stopped a rank, and where.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("rank {rank}, step {step}, {command}: {fault}")]
pub struct ExecError {
    /// The rank's number in the world, from 0.
    pub rank: u64,
    /// Number of the step, from 1.
    pub step: u64,
    /// [`super::describe`]d.
    pub command: String,
    /// Why the command failed.
    pub fault: Fault,
}

/// How a rank takes its commands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum CommandOrder {
    /// Commands run in the order in which they are issued.
    List,
    /// Each stream by itself.
    #[default]
    Streams,
}
