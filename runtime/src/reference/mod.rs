//! All ranks of a job in one process, with interpreted kernels, in f64: what a compiled program computes, without its
//! rounding (but to 16-bit types, which is part of what an op means).
//!
//! Ranks take turns ([`crate::loopback`]). Memory that was never written is NaN, and temporary memory is so again at
//! every call.

mod device;
mod noise;

pub use device::{Plans, Reference};
pub use noise::{DIGIT, Numbers};

use crate::check;
use crate::executor::{CommandOrder, PersistentId, Rank, Step, arena_bytes, named};
use crate::host::{Tensor, Whole, sizes};
use crate::loopback::{Hub, TurnError, TurnOrder, run_phase, settle};
use crate::scale::Scaler;
use crate::weights::Weights;
use ir::kernel::Kernel;
use ir::kernel::part::points;
use ir::op::OpKind;
use ir::program::{Action, Job, ProgramPhase};
use ir::work::Work;
use std::collections::BTreeMap;

/// Optimizer states by parameter name and number.
pub type States = BTreeMap<(String, u32), Tensor>;

/// What the last of some steps leaves behind.
#[derive(Clone, Debug)]
pub struct StepResult {
    /// By name; ranks that report the same name report the same number.
    pub reports: BTreeMap<String, f64>,
    /// Whole parameters by name.
    pub params: BTreeMap<String, Tensor>,
    /// Whole optimizer states, as far as some rank holds them.
    pub states: States,
    /// Persistent accumulators (gradients, losses) of each rank, by buffer name, with local dims.
    pub accumulators: Vec<BTreeMap<String, Tensor>>,
    /// False if loss or gradient norm was not finite: the parameters are as they were.
    pub updated: bool,
}

/// Why the reference could not run a job.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum Error {
    #[error(transparent)]
    Check(#[from] check::CheckError),
    #[error("the job has no tensor `{0}`")]
    Unknown(String),
    #[error("`{0}` is missing")]
    Missing(String),
    #[error("`{name}` has sizes {found:?}, the job says {expected:?}")]
    Sizes { name: String, found: Vec<u64>, expected: Vec<u64> },
    #[error(transparent)]
    Turn(#[from] TurnError),
    #[error("element {index} of `{name}` is {first:e} on rank {first_rank} and {second:e} on rank {second_rank}")]
    Replicas { name: String, index: u64, first_rank: u64, first: f64, second_rank: u64, second: f64 },
    #[error("no rank holds element {index} of `{name}`")]
    Hole { name: String, index: u64 },
    #[error("report `{name}` is {first:e} on rank {first_rank} and {second:e} on rank {second_rank}")]
    Reports { name: String, first_rank: u64, first: f64, second_rank: u64, second: f64 },
}

/// How the ranks of a reference run take turns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Interleaving {
    /// Commands in list order, ranks in long turns.
    #[default]
    List,
    /// Streams by themselves, in one of the orders that events allow: drawn from a seed.
    Random(u64),
}

impl Interleaving {
    fn order(self) -> CommandOrder {
        match self {
            Interleaving::List => CommandOrder::List,
            Interleaving::Random(_) => CommandOrder::Streams,
        }
    }

    fn turns(self) -> TurnOrder {
        match self {
            Interleaving::List => TurnOrder::Long,
            Interleaving::Random(seed) => TurnOrder::Random(seed),
        }
    }
}

/// What a step is run with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// The number of the first step, from 1.
    pub step: u64,
    /// Steps one after the other, on the same batch.
    pub steps: u64,
    /// Evaluations before each step, on the same batch.
    pub evaluations: u64,
    /// Learning rate of every step, before a parameter's own factor.
    pub learning_rate: f64,
    /// Seed of the run, which random numbers in kernels depend on.
    pub seed: u64,
    /// The order in which commands run.
    pub interleaving: Interleaving,
}

/// Runs one training step of all ranks in list order, at the loss scale that training begins with. `params` and
/// `inputs` are whole tensors under the job's names; a state that is not given is zero, as is the initial state of
/// every optimizer.
///
/// # Errors
/// If a tensor is missing, unknown or mis-shaped; what stopped a rank; a deadlock; replicas that differ in a bit.
pub fn run_step(
    job: &Job,
    params: &BTreeMap<String, Tensor>,
    states: &States,
    inputs: &BTreeMap<String, Tensor>,
    step: u64,
    learning_rate: f64,
    seed: u64,
) -> Result<StepResult, Error> {
    run_step_with(job, params, states, inputs, &Settings { step, steps: 1, evaluations: 0, learning_rate, seed, interleaving: Interleaving::List })
}

/// As [`run_step`], with every setting.
///
/// # Errors
/// As for [`run_step`].
pub fn run_step_with(
    job: &Job,
    params: &BTreeMap<String, Tensor>,
    states: &States,
    inputs: &BTreeMap<String, Tensor>,
    settings: &Settings,
) -> Result<StepResult, Error> {
    let Settings { step: first, steps, evaluations, learning_rate, seed, interleaving } = *settings;
    check::check(job)?;
    let batch = batch(job, inputs)?;
    let loss_scale = Scaler::new(job.train.loss_scale).scale();
    let plans = Plans::new(job);
    let mut ranks = start(job, &plans, params, states, interleaving.order())?;
    let mut turns = interleaving.turns();
    let mut hub = Hub::new(job);
    let (mut reports, mut updated) = (BTreeMap::new(), false);
    for number in first..first + steps {
        let step = Step { number, learning_rate, loss_scale, seed, batch: &batch };
        for _ in 0..evaluations {
            run_phase(job, &mut ranks, &mut hub, ProgramPhase::Eval, &step, &mut turns)?;
        }
        run_phase(job, &mut ranks, &mut hub, ProgramPhase::Train, &step, &mut turns)?;
        reports = self::reports(job, &ranks)?;
        updated = ranks.iter().all(Rank::is_finite);
        if updated {
            run_phase(job, &mut ranks, &mut hub, ProgramPhase::Update, &step, &mut turns)?;
            reports.extend(self::reports(job, &ranks)?);
        }
        if number + 1 == first + steps {
            settle(job, &mut ranks, &mut hub, &step, &mut turns)?;
        }
    }
    let (params, states) = assemble(job, &ranks)?;
    let accumulators = ranks.iter().map(|r| r.accumulators().into_iter().collect()).collect();
    Ok(StepResult { reports, params, states, accumulators, updated })
}

/// Runs the passes of a training step, without its update, of a job of one rank; gives what it reports.
///
/// # Errors
/// As for [`run_step`].
pub fn passes(job: &Job, weights: &Weights, batch: &[Tensor], number: u64, seed: u64, numbers: Numbers) -> Result<BTreeMap<String, f64>, Error> {
    check::check(job)?;
    let plans = Plans::new(job);
    let step = Step { number, learning_rate: 0.0, loss_scale: 1.0, seed, batch: &batch };
    let mut ranks = ranks(job, &plans, (CommandOrder::List, numbers), |held| weights.get(held));
    run_phase(job, &mut ranks, &mut Hub::new(job), ProgramPhase::Train, &step, &mut TurnOrder::Long)?;
    reports(job, &ranks)
}

/// What [`passes`] has to do: multiplications in products and attention, and points of the loops of all else.
pub fn work(job: &Job) -> [u64; 2] {
    let of_kernel = |kernel: &Kernel| {
        let others = kernel.body.values().filter(|v| kernel.body[*v].op.kind() != OpKind::Contraction);
        [Work::of(kernel).flops / 2, others.map(|v| points(kernel, v)).fold(0, u64::saturating_add)]
    };
    let of_kernels: Vec<[u64; 2]> = job.kernels.iter().map(of_kernel).collect();
    let stage = &job.stages[0];
    let commands = stage.schedule.train.iter().flat_map(|call| job.programs[stage.program as usize].commands(call));
    let launched = commands.filter_map(|(_, c)| match &c.action {
        Action::Launch { kernel, .. } => Some(of_kernels[kernel.index()]),
        _ => None,
    });
    launched.fold([0; 2], |sums, own| [0, 1].map(|i: usize| sums[i].saturating_add(own[i])))
}

/// Bytes of memory that all ranks of a job take here.
pub fn bytes(job: &Job) -> u64 {
    let of = |rank| {
        let program = &job.programs[job.stages[job.mesh.stage(rank) as usize].program as usize];
        arena_bytes(job, rank).iter().map(|b| b.div_ceil(device::unit(program)) * 8).sum::<u64>()
    };
    (0..job.mesh.world()).map(of).sum()
}

/// Runs the forward pass alone (the `eval` calls) of all ranks.
///
/// # Errors
/// As for [`run_step`].
pub fn run_eval(job: &Job, params: &BTreeMap<String, Tensor>, inputs: &BTreeMap<String, Tensor>, seed: u64) -> Result<BTreeMap<String, f64>, Error> {
    check::check(job)?;
    let batch = batch(job, inputs)?;
    let step = Step { number: 1, learning_rate: 0.0, loss_scale: 1.0, seed, batch: &batch };
    let plans = Plans::new(job);
    let mut ranks = start(job, &plans, params, &States::new(), CommandOrder::List)?;
    run_phase(job, &mut ranks, &mut Hub::new(job), ProgramPhase::Eval, &step, &mut TurnOrder::Long)?;
    reports(job, &ranks)
}

fn batch(job: &Job, inputs: &BTreeMap<String, Tensor>) -> Result<Vec<Tensor>, Error> {
    known(inputs, job.inputs.iter().map(|i| i.name.as_str()))?;
    job.inputs.iter().map(|entry| tensor(inputs, &entry.name, &sizes(&entry.dims)).cloned()).collect()
}

fn known<'a>(given: &BTreeMap<String, Tensor>, names: impl Iterator<Item = &'a str> + Clone) -> Result<(), Error> {
    match given.keys().find(|k| !names.clone().any(|n| n == *k)) {
        None => Ok(()),
        Some(k) => Err(Error::Unknown(k.clone())),
    }
}

fn tensor<'a>(given: &'a BTreeMap<String, Tensor>, name: &str, expected: &[u64]) -> Result<&'a Tensor, Error> {
    let found = given.get(name).ok_or_else(|| Error::Missing(name.into()))?;
    shaped(name, found, expected)
}

fn shaped<'a>(name: &str, found: &'a Tensor, expected: &[u64]) -> Result<&'a Tensor, Error> {
    if found.sizes != expected || found.data.len() as u64 != expected.iter().product::<u64>() {
        return Err(Error::Sizes { name: name.into(), found: found.sizes.clone(), expected: expected.to_vec() });
    }
    Ok(found)
}

fn start<'a>(
    job: &'a Job,
    plans: &'a Plans,
    params: &BTreeMap<String, Tensor>,
    states: &States,
    order: CommandOrder,
) -> Result<Vec<Rank<'a, Reference<'a>>>, Error> {
    known(params, job.params.iter().map(|p| p.name.as_str()))?;
    let whole: Vec<&Tensor> = job.params.iter().map(|p| tensor(params, &p.name, &sizes(&p.dims))).collect::<Result<_, _>>()?;
    let mut given = BTreeMap::new();
    for ((name, number), state) in states {
        let param = job.params.iter().position(|p| p.name == *name).ok_or_else(|| Error::Unknown(name.clone()))?;
        given.insert((param as u32, *number), shaped(name, state, &sizes(&job.params[param].dims))?);
    }
    Ok(ranks(job, plans, (order, Numbers::Exact), |held| {
        Some(match held {
            PersistentId::Param(p) => whole[p as usize] as &dyn Whole,
            PersistentId::State(p, s) => *given.get(&(p, s))?,
            PersistentId::Table(_) => return None,
        })
    }))
}

/// All ranks of a job, that hold these parameters and states.
fn ranks<'a, 'w>(
    job: &'a Job,
    plans: &'a Plans,
    (order, numbers): (CommandOrder, Numbers),
    whole: impl Fn(PersistentId) -> Option<&'w dyn Whole>,
) -> Vec<Rank<'a, Reference<'a>>> {
    let tables: Vec<Tensor> = job.tables.iter().map(|t| Tensor { sizes: sizes(&t.dims), data: t.data.clone() }).collect();
    (0..job.mesh.world())
        .map(|rank| {
            let program = &job.programs[job.stages[job.mesh.stage(rank) as usize].program as usize];
            let mut rank = Rank::new(job, rank, Reference::new(job, plans, program, arena_bytes(job, rank)).of(numbers), order);
            rank.initialise(|held| match held {
                PersistentId::Table(t) => Some(&tables[t as usize] as &dyn Whole),
                held => whole(held),
            });
            rank
        })
        .collect()
}

fn reports(job: &Job, all: &[Rank<Reference>]) -> Result<BTreeMap<String, f64>, Error> {
    let mut out: BTreeMap<String, (u64, f64)> = BTreeMap::new();
    for rank in all {
        for (name, value) in named(job, rank.reports()) {
            let (first_rank, first) = *out.entry(name.clone()).or_insert((rank.rank(), value));
            if first.to_bits() != value.to_bits() && !(first.is_nan() && value.is_nan()) {
                return Err(Error::Reports { name, first_rank, first, second_rank: rank.rank(), second: value });
            }
        }
    }
    Ok(out.into_iter().map(|(name, (_, value))| (name, value)).collect())
}

/// Whole parameters and states from the parts of all ranks.
fn assemble(job: &Job, all: &[Rank<Reference>]) -> Result<(BTreeMap<String, Tensor>, States), Error> {
    /// The elements, and which rank gave each (from 1; 0 is none).
    type Whole = (Tensor, Vec<u32>);
    let mut parts: BTreeMap<PersistentId, Whole> = BTreeMap::new();
    let mut wrong = None;
    let name = |held: PersistentId| match held {
        PersistentId::Param(p) => job.params[p as usize].name.clone(),
        PersistentId::State(p, s) => format!("{} state {s}", job.params[p as usize].name),
        PersistentId::Table(t) => job.tables[t as usize].name.clone(),
    };
    for rank in all {
        rank.collect(|held, at, values| {
            let (tensor, owners) = parts.entry(held).or_insert_with(|| {
                let param = match held {
                    PersistentId::Param(p) | PersistentId::State(p, _) => p,
                    PersistentId::Table(_) => unreachable!("invariant: tables are not collected"),
                };
                let tensor = Tensor::zeros(sizes(&job.params[param as usize].dims));
                let owners = vec![0; tensor.data.len()];
                (tensor, owners)
            });
            for (i, value) in (at as usize..).zip(values) {
                if owners[i] == 0 {
                    (owners[i], tensor.data[i]) = (rank.rank() as u32 + 1, *value);
                } else if tensor.data[i].to_bits() != value.to_bits() && wrong.is_none() {
                    let (first_rank, first) = (u64::from(owners[i]) - 1, tensor.data[i]);
                    wrong = Some(Error::Replicas { name: name(held), index: i as u64, first_rank, first, second_rank: rank.rank(), second: *value });
                }
            }
        });
    }
    if let Some(error) = wrong {
        return Err(error);
    }
    let (mut params, mut states) = (BTreeMap::new(), States::new());
    for (held, (tensor, owners)) in parts {
        if let Some(index) = owners.iter().position(|o| *o == 0) {
            return Err(Error::Hole { name: name(held), index: index as u64 });
        }
        match held {
            PersistentId::Param(p) => drop(params.insert(job.params[p as usize].name.clone(), tensor)),
            PersistentId::State(p, s) => drop(states.insert((job.params[p as usize].name.clone(), s), tensor)),
            PersistentId::Table(_) => unreachable!("invariant: tables are not collected"),
        }
    }
    if let Some(missing) = job.params.iter().find(|p| !params.contains_key(&p.name)) {
        return Err(Error::Hole { name: missing.name.clone(), index: 0 });
    }
    Ok((params, states))
}

#[cfg(test)]
mod tests;
