//! Many kernels at once: known ones from the cache, the others by workers in parallel.

use crate::cache::Cache;
use crate::object::{self, Compiled, Emit};
use crate::target::Target;
use crate::worker::{Worker, WorkerCommand, WorkerError};
use ir::kernel::Kernel;
use ir::progress::Progress;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Mutex;

/// Who compiles.
#[derive(Clone, Debug)]
pub enum Workers {
    /// This process, one kernel after the other. Where LLVM gives up, the process ends.
    InProcess,
    Processes {
        command: WorkerCommand,
        count: usize,
    },
}

/// Why a batch failed, with the kernel that did.
#[derive(Debug, thiserror::Error)]
#[error("kernel {kernel}: {error}")]
pub struct BatchError {
    pub kernel: String,
    pub error: WorkerError,
}

/// Compiles kernels for one target, in the order given; of kernels of equal name only the first appears. `cache` names the directory of compiled
/// kernels, if any. `progress` is told how many are done, and which processes work.
///
/// # Errors
/// The first kernel, in the order given, that does not compile.
pub fn compile(
    kernels: &[Kernel],
    target: &Target,
    emit: Emit,
    cache: Option<&Path>,
    workers: &Workers,
    progress: &Progress,
) -> Result<Vec<Compiled>, BatchError> {
    let cache = cache.map(|directory| Cache::new(directory, crate::cache::DEFAULT_LIMIT));
    let mut seen = BTreeSet::new();
    let jobs: Vec<(String, &Kernel)> = kernels.iter().map(|k| (k.name(), k)).filter(|(name, _)| seen.insert(name.clone())).collect();
    let mut results: Vec<Option<Result<Compiled, WorkerError>>> =
        jobs.iter().map(|(name, _)| cache.as_ref().and_then(|c| c.get(name, target, emit)).map(Ok)).collect();
    let missing: Vec<usize> = (0..jobs.len()).filter(|i| results[*i].is_none()).collect();
    let compiled = match workers {
        Workers::InProcess => {
            missing.iter().map(|&i| (i, object::compile(jobs[i].1, target, emit).map_err(|e| WorkerError::Refused(e.to_string())))).collect()
        }
        Workers::Processes { command, count } => in_processes(&jobs, &missing, target, emit, (command, *count), progress),
    };
    for (i, result) in compiled {
        if let (Some(cache), Ok(compiled)) = (&cache, &result) {
            cache.put(compiled, target, emit);
        }
        results[i] = Some(result);
    }
    if let Some(cache) = cache.filter(|_| !missing.is_empty()) {
        cache.trim();
    }
    let named = jobs.into_iter().zip(results);
    named.map(|((kernel, _), result)| result.expect("invariant: every job has a result").map_err(|error| BatchError { kernel, error })).collect()
}

fn in_processes(
    jobs: &[(String, &Kernel)],
    missing: &[usize],
    target: &Target,
    emit: Emit,
    (command, count): (&WorkerCommand, usize),
    progress: &Progress,
) -> Vec<(usize, Result<Compiled, WorkerError>)> {
    let queue = Mutex::new(missing.iter().copied());
    let done = Mutex::new(Vec::new());
    let next = || queue.lock().expect("invariant: no holder panics").next();
    std::thread::scope(|scope| {
        for _ in 0..count.clamp(1, missing.len().max(1)) {
            scope.spawn(|| {
                let mut worker: Option<Worker> = None;
                while let Some(i) = next() {
                    let started = match worker.take() {
                        Some(running) => Ok(running),
                        None => Worker::start(command).inspect(|worker| progress.begins(worker.id())),
                    };
                    let result = started.and_then(|mut running| {
                        let id = running.id();
                        let result = running.compile(jobs[i].1, target, emit);
                        // A worker that crashed is replaced for the next kernel.
                        match result {
                            Ok(_) | Err(WorkerError::Refused(_)) => worker = Some(running),
                            Err(WorkerError::Start { .. } | WorkerError::Crashed { .. } | WorkerError::Protocol(_)) => progress.ends(id),
                        }
                        result
                    });
                    let mut done = done.lock().expect("invariant: no holder panics");
                    done.push((i, result));
                    progress.size("kernels compiled", done.len());
                }
                worker.iter().for_each(|worker| progress.ends(worker.id()));
            });
        }
    });
    done.into_inner().expect("invariant: no holder panics")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Make;
    use ir::kernel::Family;
    use ir::op::{DType, Op, Unary};

    fn kernel(size: u64) -> Kernel {
        let mut make = Make::default();
        let d = make.dim("d", size);
        let x = make.input(DType::F32, &[d]);
        let y = make.op(Op::Unary(Unary::Exp), &[x]);
        make.kernel(Family::Loops { grid: vec![d] }, &[y])
    }

    #[test]
    fn equal_kernels_are_compiled_once_and_found_in_the_cache() {
        let directory = tempfile::tempdir().expect("a directory");
        let kernels = [kernel(3), kernel(4), kernel(3)];
        let target = Target::x86_64_v3();
        let run = |workers: &Workers| compile(&kernels, &target, Emit::default(), Some(directory.path()), workers, &Progress::default());
        let first = run(&Workers::InProcess).expect("compiled");
        assert_eq!(first.iter().map(|c| c.name.clone()).collect::<Vec<_>>(), [kernels[0].name(), kernels[1].name()]);
        // No worker is needed any more: this command would fail.
        let command = WorkerCommand { program: "/nonexistent".into(), arguments: vec![] };
        assert_eq!(run(&Workers::Processes { command, count: 2 }).expect("cached"), first);
    }

    #[test]
    fn a_crash_names_the_kernel() {
        let kernels = [kernel(3), kernel(4)];
        let command = WorkerCommand { program: "/bin/sh".into(), arguments: vec!["-c".into(), "kill -SEGV $$".into()] };
        let workers = Workers::Processes { command, count: 2 };
        let error = compile(&kernels, &Target::x86_64_v3(), Emit::default(), None, &workers, &Progress::default()).expect_err("a crash");
        assert_eq!(error.kernel, kernels[0].name());
        assert!(matches!(error.error, WorkerError::Crashed { .. }));
    }
}
