//! What the verifier accepts, run in the reference executor.

use crate::{Rng, memory};
use ir::op::DType;
use ir::program::{Extent, Job};
use runtime::host::Tensor;
use runtime::reference::{Error, Interleaving, Settings, States, run_step_with};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

/// Jobs with more of these bytes are not run: the plan says what they take.
const MOST: u64 = 1 << 26;

/// Far more than any of them takes.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(PartialEq, Eq)]
pub enum RunOutcome {
    ToItsEnd,
    /// It is larger than this machine runs in a test.
    TooLarge,
    /// A kernel or a limit refused the data.
    Refused,
    /// An error that no valid job causes.
    Wrong(String),
}

/// Runs two steps of all ranks, each after an evaluation, in list order or one that events allow, in a thread of their own.
pub fn execute(job: &Job, dice: &mut Rng) -> RunOutcome {
    let elements = |dims: &[Extent]| dims.iter().try_fold(1u64, |n, d| n.checked_mul(d.size.max(d.padded)));
    let whole: Option<u64> = job.params.iter().map(|p| &p.dims).chain(job.inputs.iter().map(|i| &i.dims)).map(|d| elements(d)).sum();
    let arenas = job.stages.iter().map(|s| s.schedule.arena_bytes(&job.programs[s.program as usize]).iter().fold(0u64, |n, b| n.saturating_add(*b)));
    let arenas = arenas.fold(0u64, u64::saturating_add).saturating_mul(job.mesh.world() / job.stages.len() as u64);
    let plan = whole.unwrap_or(u64::MAX).saturating_mul(8).saturating_add(arenas);
    if plan > MOST {
        return RunOutcome::TooLarge;
    }
    let sizes = |dims: &[Extent]| dims.iter().map(|d| d.size).collect::<Vec<u64>>();
    let params = job.params.iter().map(|p| (p.name.clone(), random(dice, sizes(&p.dims), &mut |d| d.below(1000) as f64 / 1000.0 - 0.5)));
    let params: BTreeMap<String, Tensor> = params.collect();
    let inputs = job.inputs.iter().map(|input| {
        let mut one = |d: &mut Rng| match (&input.takes, input.dtype) {
            (Some(takes), DType::I32) if !takes.is_empty() => {
                let among = takes[d.below(takes.len())];
                let span = (i64::from(among.most) - i64::from(among.least)).unsigned_abs();
                (i64::from(among.least) + d.below(span as usize + 1) as i64) as f64
            }
            _ => d.below(2) as f64,
        };
        (input.name.clone(), random(dice, sizes(&input.dims), &mut one))
    });
    let inputs: BTreeMap<String, Tensor> = inputs.collect();
    let interleaving = if dice.below(2) == 0 { Interleaving::List } else { Interleaving::Random(dice.below(usize::MAX) as u64) };
    let (say, said) = channel();
    let job = job.clone();
    std::thread::spawn(move || {
        let act = || {
            let settings = Settings { step: 1, steps: 2, evaluations: 1, learning_rate: 1e-3, seed: 7, interleaving };
            run_step_with(&job, &params, &States::new(), &inputs, &settings).map(|_| ())
        };
        let result = catch_unwind(AssertUnwindSafe(|| memory::most(act)));
        let _ = say.send(match result {
            Ok((_, most)) if most as u64 > (64 << 20) + 64 * plan => RunOutcome::Wrong(format!("{most} bytes of memory for a plan of {plan}")),
            Ok((Ok(()), _)) => RunOutcome::ToItsEnd,
            Ok((Err(Error::Turn(runtime::loopback::TurnError::Exec(_))), _)) => RunOutcome::Refused,
            Ok((Err(e), _)) => RunOutcome::Wrong(e.to_string()),
            Err(_) => RunOutcome::Wrong("a panic, which is above".into()),
        });
    });
    match said.recv_timeout(PATIENCE) {
        Ok(ran) => ran,
        Err(RecvTimeoutError::Timeout) => RunOutcome::Wrong("it does not end".into()),
        Err(RecvTimeoutError::Disconnected) => RunOutcome::Wrong("its thread is gone".into()),
    }
}

fn random(dice: &mut Rng, sizes: Vec<u64>, one: &mut dyn FnMut(&mut Rng) -> f64) -> Tensor {
    let mut tensor = Tensor::zeros(sizes);
    tensor.data.iter_mut().for_each(|x| *x = one(dice));
    tensor
}
