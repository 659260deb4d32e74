//! From the kernels of a job to code.

use crate::targets::Targets;
use codegen::ptxas::{Ptxas, PtxasError};
use codegen::target::Arch;
use codegen::{Batch, BatchError, Compiled, Emit, LinkError, Verify, Workers};
use ir::diag::Diagnostic;
use ir::kernel::Kernel;
use ir::program::{Job, Space};
use ir::progress::Progress;
use passes::report::footprint;
use runtime::artifact::{self, KernelEntry, Kernels};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::available_parallelism;

/// Compiles kernels, each for where it runs; in their order. `cache` names the directory of compiled kernels, if any.
///
/// # Errors
/// The first kernel that does not compile, or whose code is not what its body says.
pub fn generate(
    kernels: &[Kernel],
    targets: &Targets,
    emit: Emit,
    verify: Verify,
    cache: Option<&Path>,
    workers: &Workers,
    progress: &Progress,
) -> Result<Batch, BatchError> {
    progress.enter("kernels");
    let mut all = Batch::default();
    let mut out: Vec<Option<Compiled>> = kernels.iter().map(|_| None).collect();
    for space in Space::ALL {
        let (places, here): (Vec<usize>, Vec<Kernel>) = kernels.iter().cloned().enumerate().filter(|(_, k)| k.on == space).unzip();
        let Some(first) = here.first() else { continue };
        let Batch { kernels, cached, verified, verify_time } = codegen::compile(&here, targets.of(first), emit, verify, cache, workers, progress)?;
        places.into_iter().zip(kernels).for_each(|(k, c)| out[k] = Some(c));
        (all.cached, all.verified, all.verify_time) = (all.cached + cached, all.verified + verified, all.verify_time + verify_time);
    }
    all.kernels = out.into_iter().map(|c| c.expect("invariant: kernels of a job differ, and each runs in one place")).collect();
    Ok(all)
}

/// The code of all kernels of a job, as an artifact has it.
#[derive(Clone, Debug, PartialEq)]
pub struct Machine {
    /// In the order of the job.
    pub entries: Vec<KernelEntry>,
    /// The shared library of those that CPUs run, if there are any.
    pub library: Option<Vec<u8>>,
    /// The modules of the others, in order.
    pub ptx: Vec<Vec<u8>>,
    /// What was assembled of these, in order, if anything.
    pub cubins: Vec<Vec<u8>>,
}

/// What an artifact says of compiled kernels.
pub fn entries(kernels: &[Compiled]) -> Vec<KernelEntry> {
    let entry =
        |k: &Compiled| KernelEntry { name: k.name.clone(), tiles: k.shape.tiles, scratch_bytes: k.shape.scratch_bytes, launch: k.launch.clone() };
    kernels.iter().map(entry).collect()
}

/// E0645: a kernel wants more scratch than what runs it gives.
pub fn beyond_scratch(entries: &[KernelEntry], job: &Job, targets: &Targets) -> Option<Diagnostic> {
    let wants = |e: &KernelEntry| match &e.launch {
        Some(launch) => (launch.scratch_bytes, ir::launch::MOST_SCRATCH, "a launch"),
        None => (e.scratch_bytes, artifact::MOST_SCRATCH, "a thread"),
    };
    let (entry, kernel) = entries.iter().zip(&job.kernels).filter(|(e, _)| wants(e).0 > wants(e).1).max_by_key(|(e, _)| wants(e).0)?;
    let (bytes, most, whose) = wants(entry);
    let (bytes, most, target) = (footprint::size(bytes), footprint::size(most), targets.of(kernel));
    let text = format!("a kernel wants {bytes} of scratch for {whose} of {}, more than the {most} that one can have", target.cpu);
    let d = Diagnostic::error("E0645", text).help("smaller sizes, or more ranks to split them over, such as `--cp` for long sequences");
    let span = kernel.body.nodes.iter().find_map(|n| n.origin.span);
    Some(match span {
        Some(span) => d.label(span, "it computes this"),
        None => d,
    })
}

impl Machine {
    /// Links compiled kernels of a job.
    ///
    /// # Errors
    /// The linker's.
    pub fn new(kernels: Vec<Compiled>, targets: &Targets, progress: &Progress) -> Result<Machine, LinkError> {
        let entries = entries(&kernels);
        let (ptx, native): (Vec<Compiled>, Vec<Compiled>) = kernels.into_iter().partition(|k| k.launch.is_some());
        let library = match targets.device.arch {
            Arch::Nvptx if native.is_empty() => None,
            Arch::X86_64 | Arch::Nvptx => {
                progress.enter("link");
                Some(codegen::link_shared(native.iter().map(|k| k.object.as_slice()))?)
            }
        };
        Ok(Machine { entries, library, ptx: ptx.into_iter().map(|k| k.object).collect(), cubins: vec![] })
    }

    /// Assembles what GPUs run for an architecture, on all cores.
    ///
    /// # Errors
    /// What the assembler says of the first one that it refuses.
    pub fn assemble(&mut self, ptxas: &Ptxas, arch: &str, progress: &Progress) -> Result<(), PtxasError> {
        progress.enter("assemble");
        let next = AtomicUsize::new(0);
        let (ptx, next) = (&self.ptx, &next);
        let work = || {
            let mut done = vec![];
            loop {
                let place = next.fetch_add(1, Ordering::Relaxed);
                let Some(text) = ptx.get(place) else { return done };
                done.push((place, ptxas.assemble(&String::from_utf8_lossy(text), arch)));
            }
        };
        let mut all: Vec<_> = std::thread::scope(|s| {
            let threads: Vec<_> = (0..available_parallelism().map_or(1, usize::from)).map(|_| s.spawn(work)).collect();
            threads.into_iter().flat_map(|t| t.join().expect("invariant: no thread panics")).collect()
        });
        all.sort_by_key(|(place, _)| *place);
        self.cubins = all.into_iter().map(|(_, assembled)| assembled.map(|a| a.cubin)).collect::<Result<_, _>>()?;
        Ok(())
    }

    /// Gives `write` what it writes.
    pub fn kernels<T>(&self, write: impl FnOnce(Kernels<'_>) -> T) -> T {
        let ptx: Vec<&[u8]> = self.ptx.iter().map(Vec::as_slice).collect();
        let cubins: Vec<&[u8]> = self.cubins.iter().map(Vec::as_slice).collect();
        write(Kernels { entries: &self.entries, library: self.library.as_deref(), ptx: &ptx, cubins: &cubins })
    }
}
