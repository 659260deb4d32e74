//! Many kernels at once: known ones from the cache, the others by workers in parallel.

use crate::cache::Cache;
use crate::check::{self, Checker, Verification, Verify};
use crate::object::{self, Compiled, Emit};
use crate::target::Target;
use crate::worker::{Worker, WorkerCommand, WorkerError};
use ir::kernel::Kernel;
use ir::progress::Progress;
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Who compiles.
#[derive(Clone, Debug)]
pub enum Workers {
    /// This process, one kernel after the other. Where LLVM gives up, the process ends.
    InProcess,
    /// Worker processes. This process goes on where LLVM ends one of them.
    Processes {
        /// How each of them is started.
        command: WorkerCommand,
        /// How many work at a time, at most; 0 counts as 1.
        count: usize,
    },
}

/// Why a batch failed, with the kernel that did.
#[derive(Debug, thiserror::Error)]
#[error("kernel {kernel}: {error}")]
pub struct BatchError {
    /// Name of the first kernel, in the order given, that failed.
    pub kernel: String,
    /// Why it was not compiled, or what is wrong with its code.
    pub error: WorkerError,
}

/// Compiled kernels, and what was done for them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    /// One of each name, in the order given.
    pub kernels: Vec<Compiled>,
    /// How many were found in the cache.
    pub cached: usize,
    /// How many this call compared with their bodies.
    pub verified: usize,
    /// Time that these comparisons took, summed over kernels.
    pub verify_time: Duration,
}

/// One kernel to work at.
struct Job<'a> {
    name: String,
    kernel: &'a Kernel,
    /// The compiled kernel, if the cache has it.
    known: Option<Compiled>,
}

/// A kernel, and how long its check took, if it was checked.
type CheckedKernel = (Compiled, Option<Duration>);

/// Compiles kernels for one target, in the order given; of kernels of equal name only the first appears. `cache`
/// names the directory of compiled kernels, if any. `progress` is told how many are done, and which processes work.
///
/// # Errors
/// The first kernel, in the order given, that does not compile, or whose code is not what its body says.
pub fn compile(
    kernels: &[Kernel],
    target: &Target,
    emit: Emit,
    verify: Verify,
    cache: Option<&Path>,
    workers: &Workers,
    progress: &Progress,
) -> Result<Batch, BatchError> {
    let cache = cache.map(|directory| Cache::new(directory, crate::cache::DEFAULT_LIMIT));
    let mut seen = BTreeSet::new();
    let named = kernels.iter().map(|k| (k.name(), k)).filter(|(name, _)| seen.insert(name.clone()));
    let jobs: Vec<Job> = named.map(|(name, kernel)| Job { known: cache.as_ref().and_then(|c| c.get(&name, target, emit)), name, kernel }).collect();
    // A cached kernel is checked now if it can be, and if it was never checked or could not run where it was.
    let runs = check::runs(target, verify);
    let is_done = |known: &Compiled| match known.verification {
        _ if verify == Verify::Off => true,
        Verification::Passed { .. } | Verification::NotChecked(_) => true,
        Verification::Foreign(_) => !runs,
        Verification::None => false,
    };
    let open: Vec<usize> = (0..jobs.len()).filter(|i| !jobs[*i].known.as_ref().is_some_and(is_done)).collect();
    let settings = CompileSettings { target, emit, verify };
    let worked = match workers {
        Workers::InProcess => {
            let mut checker = Checker::default().emulates(verify == Verify::All);
            open.iter().map(|&i| (i, settings.in_process(&jobs[i], &mut checker))).collect()
        }
        Workers::Processes { command, count } => settings.in_processes(&jobs, &open, (command, *count), progress),
    };
    let mut out = Batch { cached: jobs.iter().filter(|j| j.known.is_some()).count(), ..Batch::default() };
    let mut results: Vec<Option<Result<CheckedKernel, WorkerError>>> = jobs.iter().map(|_| None).collect();
    for (i, result) in worked {
        if let (Some(cache), Ok((compiled, _))) = (&cache, &result) {
            cache.put(compiled, target, emit);
        }
        results[i] = Some(result);
    }
    if let Some(cache) = cache.filter(|_| !open.is_empty()) {
        cache.trim();
    }
    for (job, result) in jobs.into_iter().zip(results) {
        let known = || (job.known.expect("invariant: every job has a result"), None);
        let (compiled, time) = result.unwrap_or_else(|| Ok(known())).map_err(|error| BatchError { kernel: job.name, error })?;
        out.kernels.push(compiled);
        out.verified += usize::from(time.is_some());
        out.verify_time += time.unwrap_or_default();
    }
    Ok(out)
}

/// How each kernel is compiled and checked.
#[derive(Clone, Copy)]
struct CompileSettings<'a> {
    target: &'a Target,
    emit: Emit,
    verify: Verify,
}

impl CompileSettings<'_> {
    /// Compiles a kernel if need be, and holds it to its body if that is asked for.
    fn work(
        &self,
        job: &Job,
        compile: impl FnOnce() -> Result<Compiled, WorkerError>,
        check: impl FnOnce(&Compiled) -> Result<Verification, WorkerError>,
    ) -> Result<CheckedKernel, WorkerError> {
        let mut compiled = job.known.clone().map_or_else(compile, Ok)?;
        if self.verify == Verify::Off {
            return Ok((compiled, None));
        }
        let begun = Instant::now();
        compiled.verification = check(&compiled)?;
        let passed = matches!(compiled.verification, Verification::Passed { .. });
        Ok((compiled, passed.then(|| begun.elapsed())))
    }

    fn in_process(&self, job: &Job, checker: &mut Checker) -> Result<CheckedKernel, WorkerError> {
        let compile = || object::compile(job.kernel, self.target, self.emit).map_err(|e| WorkerError::Refused(e.to_string()));
        self.work(job, compile, |compiled| Ok(checker.check(job.kernel, compiled, self.target)?))
    }

    fn in_processes(
        &self,
        jobs: &[Job],
        open: &[usize],
        (command, count): (&WorkerCommand, usize),
        progress: &Progress,
    ) -> Vec<(usize, Result<CheckedKernel, WorkerError>)> {
        let queue = Mutex::new(open.iter().copied());
        let done = Mutex::new(Vec::new());
        let next = || queue.lock().expect("invariant: no holder panics").next();
        std::thread::scope(|scope| {
            for _ in 0..count.clamp(1, open.len().max(1)) {
                scope.spawn(|| {
                    let mut worker: Option<Worker> = None;
                    while let Some(i) = next() {
                        let started = match worker.take() {
                            Some(running) => Ok(running),
                            None => Worker::start(command).inspect(|worker| progress.begins(worker.id())),
                        };
                        let result = started.and_then(|running| {
                            let (id, running) = (running.id(), RefCell::new(running));
                            let compile = || running.borrow_mut().compile(jobs[i].kernel, self.target, self.emit);
                            let result = self
                                .work(&jobs[i], compile, |c| running.borrow_mut().check(jobs[i].kernel, self.target, c, self.verify == Verify::All));
                            // A worker that crashed is replaced for the next kernel.
                            match result {
                                Ok(_) | Err(WorkerError::Refused(_) | WorkerError::Wrong(_)) => worker = Some(running.into_inner()),
                                Err(
                                    WorkerError::Start { .. } | WorkerError::Crashed { .. } | WorkerError::CodeCrashed(_) | WorkerError::Protocol(_),
                                ) => progress.ends(id),
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::KernelDraft;
    use ir::kernel::Family;
    use ir::op::{DType, Op, Unary};

    fn kernel(size: u64) -> Kernel {
        let mut make = KernelDraft::default();
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
        let run = |workers: &Workers| compile(&kernels, &target, Emit::default(), Verify::New, Some(directory.path()), workers, &Progress::default());
        let first = run(&Workers::InProcess).expect("compiled");
        assert_eq!(first.kernels.iter().map(|c| c.name.clone()).collect::<Vec<_>>(), [kernels[0].name(), kernels[1].name()]);
        // All kernels are cached now, so no worker starts: this command would fail.
        let command = WorkerCommand { program: "/nonexistent".into(), arguments: vec![] };
        assert_eq!(run(&Workers::Processes { command, count: 2 }).expect("cached").kernels, first.kernels);
    }

    #[test]
    fn what_nobody_has_looked_at_is_looked_at_once_it_can_be() {
        let directory = tempfile::tempdir().expect("a directory");
        let (host, gpu) = (Target::host().expect("a supported machine"), Target::gpu("sm_80"));
        let said = |target: &Target, verify| {
            let of = [kernel(5)];
            let batch = compile(&of, target, Emit::default(), verify, Some(directory.path()), &Workers::InProcess, &Progress::default());
            let batch = batch.expect("compiled");
            (batch.cached, batch.verified, batch.kernels[0].verification.clone())
        };
        assert_eq!(said(&host, Verify::Off), (0, 0, Verification::None));
        let passed = Verification::Passed { places: 5 };
        assert_eq!(said(&host, Verify::New), (1, 1, passed.clone()));
        assert_eq!(said(&host, Verify::New), (1, 0, passed.clone()));
        let foreign = Verification::Foreign("code for a GPU".into());
        assert_eq!(said(&gpu, Verify::Off), (0, 0, Verification::None));
        assert_eq!(said(&gpu, Verify::New), (1, 0, foreign.clone()));
        assert_eq!(said(&gpu, Verify::New), (1, 0, foreign));
        assert_eq!(said(&gpu, Verify::All), (1, 1, passed));
    }

    #[test]
    fn a_crash_names_the_kernel() {
        let kernels = [kernel(3), kernel(4)];
        let command = WorkerCommand { program: "/bin/sh".into(), arguments: vec!["-c".into(), "kill -SEGV $$".into()] };
        let workers = Workers::Processes { command, count: 2 };
        let error = compile(&kernels, &Target::x86_64_v3(), Emit::default(), Verify::New, None, &workers, &Progress::default()).expect_err("a crash");
        assert_eq!(error.kernel, kernels[0].name());
        assert!(matches!(error.error, WorkerError::Crashed { .. }));
    }
}
