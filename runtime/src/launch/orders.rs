//! What ranks are told to do: the options of a run, checked, and settled where they leave something open.

use super::error::RunError;
use super::options::RunOptions;
use crate::artifact::Artifact;
use crate::checkpoint;
use crate::conditions::{Conditions, model_changes};
use crate::data::{self, Data, DataError, DataSets, RunSamples, Samples, Spec};
use crate::data_loader;
use crate::disk;
use crate::executor::arena_bytes;
use crate::gpu::{cuda, nccl};
use crate::mpi;
use crate::profile::{ProfileWindow, WARM_UP};
use crate::protocol::{Orders, SaveFile, Saves};
use crate::target::{DeviceKind, Exchanges};
use crate::weights::Resumed;
use crate::world::Launcher;
use ir::pattern;
use ir::program::{Action, Arena, Job};
use ir::provenance::few;
use std::path::PathBuf;

/// The device that was asked for, if it runs what was compiled, or the usual one.
fn device(artifact: &Artifact, asked: Option<DeviceKind>) -> Result<DeviceKind, RunError> {
    let target = &artifact.manifest.target;
    let can = target.devices();
    match asked.unwrap_or(can[0]) {
        DeviceKind::Cuda if can.contains(&DeviceKind::Cuda) => match cuda::probe() {
            Ok(_) => Ok(DeviceKind::Cuda),
            Err(cause) => Err(RunError::NoGpu { dir: artifact.dir.clone(), target: target.to_string(), cause }),
        },
        device if can.contains(&device) => Ok(device),
        device => {
            let can = can.iter().map(|d| d.name()).collect::<Vec<_>>().join(" or ");
            Err(RunError::Device { dir: artifact.dir.clone(), target: target.to_string(), device: device.name(), can })
        }
    }
}

/// Whether ranks can exchange as they are to.
fn check_exchanges(artifact: &Artifact, device: DeviceKind, options: &RunOptions) -> Result<(), RunError> {
    match options.exchanges {
        Exchanges::Host => Ok(()),
        Exchanges::Mpi => check_mpi(artifact, device, options),
        Exchanges::Nccl => check_nccl(artifact, device, options),
    }
}

/// Whether ranks were started by what speaks MPI, and their program does.
fn check_mpi(artifact: &Artifact, device: DeviceKind, options: &RunOptions) -> Result<(), RunError> {
    let ranks = artifact.manifest.ranks;
    let refused = |why: String| Err(RunError::Mpi(why));
    if ranks == 1 {
        // A single rank has nothing to exchange.
        return Ok(());
    }
    if device == DeviceKind::Cuda {
        return refused("the host's processors do, and GPUs by --exchanges nccl".into());
    }
    match options.world.as_ref().map(|world| world.launcher) {
        Some(Launcher::Mpirun | Launcher::Mpiexec | Launcher::Srun) => mpi::library_of(&options.rank_binary).map(drop).map_err(RunError::Mpi),
        Some(Launcher::Torchrun) => refused(format!("torchrun started them, which knows nothing of it; `mpirun -n {ranks} mcc run ..` does")),
        None => refused(format!("an MPI launcher has to start each of them: `mpirun -n {ranks} mcc run ..`, or `srun --mpi=pmix --ntasks {ranks}`")),
    }
}

/// Whether GPUs can exchange by themselves.
fn check_nccl(artifact: &Artifact, device: DeviceKind, options: &RunOptions) -> Result<(), RunError> {
    let ranks = artifact.manifest.ranks;
    if device != DeviceKind::Cuda {
        return Err(RunError::Exchanges(format!("GPUs do, the device `{}` does not", device.name())));
    }
    if options.profile.is_some() {
        return Err(RunError::Exchanges("what GPUs exchange by themselves has no times that a profile could show".into()));
    }
    let mut commands = artifact.job.programs.iter().flat_map(|p| &p.bodies).flat_map(|b| &b.commands);
    if !artifact.job.is_serial() && commands.any(|c| matches!(c.action, Action::Send { .. })) {
        return Err(RunError::Exchanges("NCCL buffers no message, and the artifact does not say when they go out: compile it for a GPU".into()));
    }
    match cuda::probe() {
        // Only some ranks of a world are on this machine.
        Ok(count) if count < ranks && options.world.is_none() => {
            Err(RunError::Exchanges(format!("each of {ranks} ranks needs a GPU of its own, there are {count}")))
        }
        Ok(_) => nccl::probe().map_err(RunError::Exchanges),
        Err(e) => Err(RunError::Exchanges(e.to_string())),
    }
}

/// The id by which GPUs find each other, made by the process that leads.
pub(super) fn nccl_id(orders: &Orders, options: &RunOptions) -> Result<Option<Vec<u8>>, RunError> {
    exchange_by_nccl(orders, options).then(|| nccl::unique_id().map_err(RunError::Exchanges)).transpose()
}

/// Whether GPUs exchange by themselves.
pub(super) fn exchange_by_nccl(orders: &Orders, options: &RunOptions) -> bool {
    match options.exchanges {
        Exchanges::Nccl => orders.device == DeviceKind::Cuda,
        Exchanges::Host | Exchanges::Mpi => false,
    }
}

/// How many samples a run takes of training, validation and test; with what it goes on from behind it.
fn wanted(job: &Job, options: &RunOptions, sets: &DataSets, (done, read): (u64, u64)) -> Result<[u64; 3], DataError> {
    let scheduled = Some(job.train.schedule.steps).filter(|s| *s > 0);
    let steps = options.steps.or(scheduled).ok_or(DataError::Unsized)?;
    let mut samples = data_loader::samples(steps, job.global_batch, options.eval_interval, options.eval_batches);
    // Earlier steps may have left out sequences, or had another number of them.
    samples[0] = samples[0].max(read.saturating_add(steps.saturating_sub(done).saturating_mul(job.global_batch)));
    for part in [1, 2] {
        samples[part] = if sets.has(part)? { samples[part] } else { 0 };
    }
    Ok(samples)
}

/// Checks the options and settles what they leave open.
pub(super) fn orders(artifact: &Artifact, options: &RunOptions) -> Result<Orders, RunError> {
    let job = &artifact.job;
    let device = device(artifact, options.device)?;
    check_exchanges(artifact, device, options)?;
    if options.seed >= 1 << 53 {
        return Err(RunError::Seed(options.seed));
    }
    let on_disk = (0..job.mesh.world()).map(|rank| arena_bytes(job, rank)[Arena::Disk as usize]).max().unwrap_or(0);
    // The reference device has everything in memory.
    if on_disk > 0 && options.offload_to.is_none() && device != DeviceKind::Reference {
        return Err(RunError::NoDisk { dir: artifact.dir.clone(), bytes: on_disk });
    }
    // Ranks run in the same directory, but a path that is seen here and not there would be hard to explain.
    let absolute = |file: &PathBuf| std::path::absolute(file).map_err(|cause| RunError::Io { file: file.clone(), cause });
    let saved = |file: &Option<PathBuf>| file.as_ref().map(|name| absolute(name).map(|at| SaveFile { at, name: name.clone() })).transpose();
    // The tag is known when ranks have met.
    let saves = |name: &PathBuf| absolute(name).map(|dir| Saves { dir, name: name.clone(), interval: options.save_interval, tag: String::new() });
    let specs = |list: &[Spec]| -> Result<Vec<Spec>, RunError> { list.iter().map(|s| Ok(Spec { file: absolute(&s.file)?, ..s.clone() })).collect() };
    let resume = options.resume.as_ref().map(|file| Ok::<_, RunError>((file, checkpoint::resume(file, job)?))).transpose()?;
    let mark = resume.as_ref().map(|(_, r)| r.mark).unwrap_or_default();
    let seed = if resume.is_some() { mark.seed } else { options.seed };
    let read = mark.read(job.global_batch).saturating_add(options.skip);
    let trains = options.steps != Some(0);
    let sets = options.sets.as_ref().filter(|_| trains).map(DataSets::settled).transpose()?;
    let sets = match sets {
        Some(sets) => Some(DataSets { cache: sets.cache.as_ref().map(absolute).transpose()?, ..sets }),
        None => None,
    };
    let (mut samples, mut remarks) = ([0; 3], vec![]);
    if let Some(dir) = options.offload_to.as_ref().filter(|_| on_disk > 0) {
        remarks.extend(disk::memory_taken(dir).map_err(|cause| RunError::Io { file: dir.clone(), cause })?);
    }
    let (data, held_out) = match &sets {
        Some(sets) => {
            samples = wanted(job, options, sets, (mark.step, read))?;
            let RunSamples { training, valid, test } = sets.open(job, seed, samples)?;
            remarks.extend(training.iter().chain(&valid).chain(&test).filter_map(Samples::packing));
            let masks: Vec<String> = sets.unused_masks().iter().map(|p| format!("`{}`", p.display())).collect();
            if !masks.is_empty() {
                remarks.push(format!(
                    "there are loss masks beside {}, and all tokens count as labels: --loss-mask has the masks say which do",
                    few(&masks).join(", ")
                ));
            }
            let of = |samples| Data::of_samples(job, samples);
            let held_out = valid.into_iter().chain(test).map(of).collect::<Result<Vec<Data>, DataError>>()?;
            (training.map(of).transpose()?, held_out)
        }
        None => {
            let training = trains.then_some(&options.data[..]);
            let valid = (!options.valid_data.is_empty()).then_some(&options.valid_data[..]);
            let [data, valid] = data::open_checked(job, training, valid)?;
            (data, Vec::from_iter(valid))
        }
    };
    let data = data.map(|data| data.after((mark.step, read))).transpose()?;
    let steps = match (options.steps, &data) {
        (_, None) => 0,
        (given, Some(data)) => {
            let scheduled = Some(job.train.schedule.steps).filter(|s| *s > 0);
            let steps = given.or(data.end()).or(scheduled).unwrap_or_else(|| data.batches());
            if let Some(end) = data.end().filter(|end| *end < steps) {
                // The error of this read names the file.
                data.batch(end)?;
            }
            steps
        }
    };
    if let Some(pattern) = options.allow_missing.iter().find(|p| !job.params.iter().any(|param| pattern::matches(p, &param.name))) {
        return Err(RunError::Pattern { pattern: pattern.clone() });
    }
    let (drawn, left_out) = if options.init.is_empty() {
        (vec![], vec![])
    } else {
        let (_, drawn, left_out) = checkpoint::initial(&options.init, job, &options.allow_missing, options.seed)?;
        (drawn, left_out)
    };
    let conditions = Conditions::new(job, data.as_ref().map_or(vec![], Data::marks), steps);
    let resume = match resume {
        None => None,
        Some((file, Resumed { mark, model, conditions: was, .. })) => {
            // A run that is at its last step may still have files to write.
            let writes = options.save_weights.is_some() || options.save_state.is_some();
            if mark.step > steps || mark.step == steps && !writes {
                return Err(RunError::Done { file: file.clone(), done: mark.step, steps });
            }
            let mut changes: Vec<_> = model.iter().filter_map(|was| model_changes(was, job)).collect();
            changes.extend(was.iter().flat_map(|was| conditions.changes(was, mark.step)));
            changes.retain(|(change, _)| !options.allowed.contains(change));
            if !changes.is_empty() {
                return Err(RunError::Changed { file: file.clone(), changes });
            }
            Some((absolute(file)?, mark))
        }
    };
    let done = resume.as_ref().map_or(0, |r| r.1.step);
    let steps = match options.profile {
        Some(timed) if options.steps.is_none() => steps.min(done + WARM_UP + timed),
        Some(_) | None => steps,
    };
    if let Some(data) = &data {
        data.check_steps(done..steps)?;
    }
    for valid in &held_out {
        valid.check_steps(0..valid.batches().min(options.eval_batches).max(1))?;
    }
    Ok(Orders {
        artifact: absolute(&artifact.dir)?,
        id: artifact.id.clone(),
        data: specs(&options.data)?,
        valid_data: specs(&options.valid_data)?,
        sets,
        samples,
        remarks,
        eval_interval: options.eval_interval,
        eval_batches: options.eval_batches,
        steps,
        conditions,
        exit_interval: options.exit_interval,
        check_replicas: options.check_replicas,
        first_step: options.first_step.clone(),
        init: options.init.iter().map(absolute).collect::<Result<_, _>>()?,
        drawn,
        left_out,
        save_weights: saved(&options.save_weights)?,
        save_state: saved(&options.save_state)?,
        saves: options.save.as_ref().map(saves).transpose()?,
        threads: options.threads_per_rank,
        seed,
        resume,
        skip: options.skip,
        on_nonfinite: options.on_nonfinite,
        order: options.order,
        profile: options.profile.and_then(|n| ProfileWindow::new(done, steps, n)),
        device,
        exchanges: options.exchanges,
        nccl: None,
        nccl_max_ctas: options.nccl_max_ctas,
        offload_to: options.offload_to.as_ref().map(absolute).transpose()?,
        spread: None,
    })
}
