//! `mcc compile`.

use crate::changed::changed;
use crate::cli::{self, CompileArgs, InspectArgs, Level, OutputArgs, PlanArgs, PrintArgs, VerifyKernels};
use crate::failure::Failure;
use crate::limits::LimitWatch;
use crate::misuse::{self, misuse};
use crate::options::{contradictions, options, override_train, precision, still_warms_up};
use crate::plan_file::PlanFile;
use crate::print::{self, note, out, progress};
use crate::text::{DiagnosticFormat, ModelFile};
use crate::{dump, idle, report, reproducer, signals};
use anyhow::{Context, anyhow};
use codegen::ptxas::Ptxas;
use codegen::target::Arch;
use codegen::worker::WorkerError;
use codegen::{BatchError, Emit, Verify, WorkerCommand, Workers};
use ir::diag::{Diagnostic, Sources};
use ir::kernel::Kernel;
use ir::model::Model;
use ir::module::Module;
use ir::options::Options;
use ir::program::Job;
use ir::progress::Progress;
use ir::text::print_module;
use mcc::targets::Targets;
use mcc::{Elaborated, Error, Request, machine};
use passes::compile::Compiled;
use passes::remedy;
use passes::report::footprint::{self, Budget, Footprint, Footprints, MemoryCategory};
use passes::report::matrices::matrices;
use passes::report::pipeline_timeline::{UNIT, timeline};
use passes::table::{Pass, find};
use runtime::artifact::{self, KernelEntry, launch_bytes};
use runtime::gpu::{self, nccl};
use runtime::signature::SecretKey;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// A model text through all passes, before code generation.
pub struct TimedLevels {
    pub levels: mcc::Levels,
    elaborated: Duration,
    limited: Option<MemoryLimit>,
}

/// The memory budget of a rank, and what is needed to compile again for a change that fits.
struct MemoryLimit {
    budget: Budget,
    training: Model,
    evaluation: Model,
    options: Options,
}

/// Compiles to programs and shows what is wrong; within the memory budget, if there is one.
pub fn levels(model: &Path, args: &PlanArgs, shown: DiagnosticFormat, progress: &Progress) -> Result<mcc::Levels, Failure> {
    let text = ModelFile::read(model, shown)?;
    let request = request(&text, args, None, Verify::Off)?;
    let levels = inspected(&text, &request, args, progress, &InspectArgs::default())?;
    Ok(levels.expect("invariant: nothing stops it").levels)
}

/// What the command line asks for: kernels are compiled in processes of this program, as many as there are cores.
pub fn request(text: &ModelFile, args: &PlanArgs, cache: Option<PathBuf>, verify: Verify) -> Result<Request, Failure> {
    let elaboration = frontend::Options {
        defines: args.define.clone(),
        recompute: args.recompute_modules.clone(),
        offload: crate::options::offloaded(args),
        precision: precision(&args.precision),
        ..Default::default()
    };
    Ok(Request {
        name: text.name.clone(),
        text: text.text.clone(),
        elaboration,
        options: options(args)?,
        targets: Targets::named(&args.target, args.host_target.as_deref())?,
        workers: workers()?,
        cache,
        verify,
    })
}

/// The text as models, with what flags say of training; shows what is wrong with it, or with them.
pub fn elaborated(text: &ModelFile, request: &Request, args: &PlanArgs, progress: &Progress) -> Result<Elaborated, Failure> {
    let shown = text.shown;
    let mut models = request.elaborate(&mut text.imports(), progress).or_else(|e| failed(e, shown, &InspectArgs::default()))?;
    shown.show(&std::mem::take(&mut models.warnings), &models.sources)?;
    override_train(&mut models.training.train, args);
    let contradictions = contradictions(&models.training, args, &models.options);
    if !contradictions.is_empty() {
        shown.show(&contradictions, &models.sources)?;
        return Err(misuse::shown(&contradictions));
    }
    shown.show(still_warms_up(&models.training.train, args).as_slice(), &models.sources)?;
    Ok(models)
}

/// Why a plan does not compile, which is shown; none if it does.
pub fn refused(text: &ModelFile, request: &Request, args: &PlanArgs) -> Option<Failure> {
    inspected(text, request, args, &Progress::default(), &InspectArgs::default()).err()
}

/// As [`levels`]; prints modules on the way, and stops where that is asked for.
fn inspected(
    text: &ModelFile,
    request: &Request,
    args: &PlanArgs,
    progress: &Progress,
    inspect: &InspectArgs,
) -> Result<Option<TimedLevels>, Failure> {
    let start = Instant::now();
    let shown = text.shown;
    if let Some(plan) = &args.plan_file {
        PlanFile::compare(plan, &text.text)?;
    }
    let models = elaborated(text, request, args, progress)?;
    shown.show(&idle::in_plan(args, &models.training.plan), &models.sources)?;
    let elaborated = start.elapsed();
    let limited = (args.memory.is_some() || args.host_memory.is_some()).then(|| MemoryLimit {
        budget: Budget([args.memory, args.host_memory].map(|most| most.unwrap_or(u64::MAX))),
        training: models.training.clone(),
        evaluation: models.evaluation.clone(),
        options: models.options.clone(),
    });
    let mut passes = models.passes(progress).or_else(|e| failed(e, shown, inspect))?;
    inspect.check(&passes.module().options)?;
    while let Some(next) = passes.next_pass() {
        let before = inspect.print.before(next, passes.module(), &|text| inspect.show(text))?;
        let Some(pass) = passes.step().or_else(|e| failed(e, shown, inspect))? else { break };
        if inspect.damage_after.as_deref() == Some(pass.name) {
            passes.damage().or_else(|e| failed(e, shown, inspect))?;
        }
        inspect.print.after(pass, before, passes.module(), &|text| inspect.show(text))?;
        if inspect.stop_after.as_deref() == Some(pass.name) {
            if !inspect.print.is_printing() {
                out!("{}", print_module(passes.module()))?;
            }
            return Ok(None);
        }
    }
    let levels = passes.finish();
    shown.show(&levels.compiled.warnings, &levels.sources)?;
    shown.show(&idle::in_model(args, &levels.compiled), &levels.sources)?;
    // The scratch memory of kernels is known only once they are compiled; it counts as 0 here.
    within(limited.as_ref(), &levels, &request.targets, 0, shown, progress)?;
    Ok(Some(TimedLevels { levels, elaborated, limited }))
}

/// Prints one text.
pub type Show<'a> = &'a dyn Fn(&str) -> Result<(), Failure>;

impl PrintArgs {
    /// Shows what is asked for before a pass runs; returns the module's text if [`PrintArgs::after`] compares with it.
    pub fn before(&self, pass: &Pass, module: &Module, show: Show<'_>) -> Result<Option<String>, Failure> {
        if is_named(&self.print_before, pass) {
            show(&format!("; before {}\n{}", pass.name, print_module(module)))?;
        }
        Ok(is_named(&self.print_changed, pass).then(|| print_module(module)))
    }

    /// Shows what is asked for after a pass has run.
    pub fn after(&self, pass: &Pass, before: Option<String>, module: &Module, show: Show<'_>) -> Result<(), Failure> {
        if let Some(before) = before {
            show(&format!("; changed by {}\n{}", pass.name, changed(&before, &print_module(module))))?;
        }
        if is_named(&self.print_after, pass) {
            show(&format!("; after {}\n{}", pass.name, print_module(module)))?;
        }
        Ok(())
    }

    /// The passes that are named.
    pub fn named(&self) -> impl Iterator<Item = &String> {
        [&self.print_before, &self.print_changed, &self.print_after].into_iter().flatten()
    }
}

/// Whether a list of passes, or `all`, names this one.
fn is_named(list: &[String], pass: &Pass) -> bool {
    list.iter().any(|name| name == pass.name || name == "all")
}

impl InspectArgs {
    /// Prints a module, or a part of one.
    fn show(&self, text: &str) -> Result<(), Failure> {
        // Where an artifact is to be written, that is what the command is for.
        if self.stop_after.is_some() {
            out!("{text}")?
        } else {
            progress!("{}", text.trim_end())
        }
        Ok(())
    }

    /// Refuses passes that do not run with these options: nothing would be printed.
    fn check(&self, options: &Options) -> Result<(), Failure> {
        let named = self.print.named().chain(&self.stop_after).chain(&self.damage_after);
        match named.filter_map(|name| find(name)).find(|p| !(p.wanted)(options)) {
            Some(pass) => Err(misuse!("`{}` does not run with these options: `mcc passes` lists what does when", pass.name).into()),
            None => Ok(()),
        }
    }
}

/// What the user can mend, shown; or a bug in mcc.
fn failed<T>(error: Error, shown: DiagnosticFormat, inspect: &InspectArgs) -> Result<T, Failure> {
    match error {
        Error::User(errors, sources) => {
            shown.show(&errors, &sources)?;
            Err(misuse::shown(&errors))
        }
        Error::Bug(broken) => {
            note!("error: {broken}");
            if let Some(invariant) = broken.complaint.invariant() {
                note!("  = {invariant}: {}", invariant.holds());
            }
            match reproducer::leave(&broken, inspect.damage_after.as_deref()) {
                Ok(Some(left)) => note!("{left}"),
                Ok(None) => {}
                Err(e) => note!("warning: what repeats this could not be written: {e}"),
            }
            note!("please report this with the model text and the command line");
            Err(Failure::Reported)
        }
        Error::Kernel(e) => Err(e.into()),
        Error::Link(e) => Err(e.into()),
    }
}

/// Kernels and sources, which say what part of a text a kernel computes.
struct KernelSources {
    kernels: Vec<Kernel>,
    sources: Sources,
}

impl KernelSources {
    /// A kernel that does not compile; or a bug in mcc, if its code is not what its body says.
    fn show<T>(&self, error: BatchError, shown: DiagnosticFormat) -> Result<T, Failure> {
        let result = match &error.error {
            WorkerError::Wrong(wrong) => wrong.output(),
            WorkerError::CodeCrashed(_) => None,
            WorkerError::Start { .. } | WorkerError::Refused(_) | WorkerError::Crashed { .. } | WorkerError::Protocol(_) => return Err(error.into()),
        };
        let (number, holds) = codegen::INVARIANT;
        let mut d = Diagnostic::error(number, format!("bug in mcc: {error}")).note(holds);
        let kernel = self.kernels.iter().find(|k| k.name() == error.kernel);
        let span = kernel.and_then(|k| {
            let of = |node: &ir::graph::Node| node.origin.span;
            result.and_then(|o| of(&k.body[k.outputs[o].value])).or_else(|| k.body.nodes.iter().find_map(of))
        });
        if let Some(span) = span {
            d = d.label(span, "the kernel computes this");
        }
        let d = d.help("please report this with the model text and the command line; `--verify-kernels off` compiles the kernel as it is");
        shown.show(&[d], &self.sources)?;
        Err(Failure::Reported)
    }
}

/// What a rank of a stage takes: its arenas, scratch, on a CPU, for one thread, its share of the memory through which
/// ranks exchange, and on a GPU what NCCL and the driver take.
pub fn footprint(job: &Job, stage: usize, targets: &Targets, scratch: u64) -> Footprint {
    let rank = job.mesh.first_of_stage(stage as u64);
    let mut own = Footprint::of(job, stage).and(MemoryCategory::Scratch, scratch);
    if own.on_disk() > 0 {
        *own.host.entry(MemoryCategory::Exchanges).or_default() += runtime::disk::PIECES_BYTES;
    }
    match targets.device.arch {
        Arch::X86_64 => {
            let exchanges = runtime::shm::bytes_of_rank(job, &targets.to_artifact(&job.kernels), rank);
            Footprint { is_on_cpu: true, ..own.and(MemoryCategory::Exchanges, exchanges) }
        }
        Arch::Nvptx => {
            let own = own.and(MemoryCategory::Context, gpu::CONTEXT_BYTES);
            if job.mesh.world() == 1 { own } else { own.and(MemoryCategory::Exchanges, nccl::bytes_of_rank(job, rank, nccl::MAX_CTAS)) }
        }
    }
}

/// Scratch of a rank in the device's memory: for one thread, or for the blocks of a launch, and what its kernels
/// count in.
fn scratch(kernels: &[KernelEntry], targets: &Targets) -> u64 {
    match targets.device.arch {
        Arch::X86_64 => kernels.iter().map(|k| k.scratch_bytes).max().unwrap_or(0),
        Arch::Nvptx => launch_bytes(kernels).iter().sum(),
    }
}

pub fn run(args: &CompileArgs) -> Result<(), Failure> {
    let start = Instant::now();
    // The key is read first, so that a wrong one does not waste the compile.
    let sign = args.output.sign.as_deref().map(SecretKey::read).transpose()?;
    let ptxas = args.output.cubin.then(|| assembler(&args.plan.target)).transpose()?;
    let watch = LimitWatch::start(&args.plan.limits, DiagnosticFormat::Text);
    let progress = watch.progress();
    let text = ModelFile::read(&args.model, DiagnosticFormat::Text)?;
    let verify = match args.output.verify_kernels {
        VerifyKernels::Off => Verify::Off,
        VerifyKernels::New => Verify::New,
        VerifyKernels::All => Verify::All,
    };
    let request = request(&text, &args.plan, cache_dir().filter(|_| !args.output.no_cache), verify)?;
    let Some(TimedLevels { levels, elaborated, limited }) = inspected(&text, &request, &args.plan, progress, &args.inspect)? else { return Ok(()) };
    let generating = Instant::now();
    let kernel_sources = KernelSources { kernels: levels.compiled.job.kernels.clone(), sources: levels.sources.clone() };
    let mut artifact = request.generate(levels, progress).or_else(|e| match e {
        Error::Kernel(e) => kernel_sources.show(e, text.shown),
        e => failed(e, text.shown, &args.inspect),
    })?;
    if let Some(ptxas) = &ptxas {
        artifact.machine.assemble(ptxas, &request.targets.device.cpu, progress)?;
    }
    let generated = generating.elapsed();
    let (compiled, targets) = (&artifact.levels.compiled, &request.targets);
    let scratch = scratch(&artifact.machine.entries, targets);
    within(limited.as_ref(), &artifact.levels, targets, scratch, text.shown, progress)?;
    progress.enter("dumps");
    let dumps = dumps(compiled, &args.output, targets, progress)?;
    // The watch may end the process, which must not happen while files are written.
    drop(watch);
    let out = args.output.output.clone().unwrap_or_else(|| PathBuf::from(format!("{}.mcc", compiled.job.model)));
    artifact.parts(&dumps, sign.as_ref(), |parts| signals::tidily(|given_up| artifact::write_unless(&out, parts, given_up)))??;
    let mut times = vec![("parse", elaborated)];
    times.extend(compiled.times.iter().map(|t| (t.pass, t.run)));
    times.push(("kernels", generated));
    let verified: Vec<(&str, Duration)> = compiled.times.iter().flat_map(|t| t.verified.iter().copied()).collect();
    let footprints = Footprints::new(&compiled.job, &|job, stage| footprint(job, stage, targets, scratch));
    let table = report::table(
        &compiled.job,
        &request.options,
        (&footprints, matrices(&compiled.graph, &compiled.locals)),
        &times,
        &verified,
        (&artifact.checked, &artifact.levels.sources),
    );
    let wrote = format!("wrote {} in {:.2} s", out.display(), start.elapsed().as_secs_f64());
    // Standard output is kept for modules if any were asked for.
    match args.inspect.print.is_printing() {
        false => print::report!("{table}{wrote}\n"),
        true => note!("{table}{wrote}"),
    }
    Ok(())
}

/// NVIDIA's assembler, for a target that it is of use for.
fn assembler(target: &str) -> Result<Ptxas, Failure> {
    if !target.starts_with("sm_") {
        let why = format!("--cubin assembles kernels for GPUs, and `--target {target}` is none: leave it out, or compile for `sm_80` or `sm_90a`");
        return Err(anyhow!(why).into());
    }
    let directories = |name: &str| std::env::var_os(name).map(|v| std::env::split_paths(&v).collect::<Vec<_>>()).unwrap_or_default();
    let toolkit = directories("CUDA_HOME").into_iter().map(|d| d.join("bin")).chain([PathBuf::from("/usr/local/cuda/bin")]);
    directories("PATH").into_iter().chain(toolkit).find_map(|d| Ptxas::assembler(&d)).ok_or_else(|| {
        anyhow!(
            "--cubin needs NVIDIA's `ptxas`, which is in no directory of $PATH, nor in $CUDA_HOME/bin or /usr/local/cuda/bin: install the CUDA \
             toolkit, or leave --cubin out, and the driver compiles the kernels when a run begins"
        )
        .into()
    })
}

/// Ways out of too little memory that are named, the fastest first.
const WAYS: usize = 3;

/// E0640, with changes that would fit, if a rank needs more than the budget.
fn within(
    limited: Option<&MemoryLimit>,
    levels: &mcc::Levels,
    targets: &Targets,
    scratch: u64,
    shown: DiagnosticFormat,
    progress: &Progress,
) -> Result<(), Failure> {
    let (job, Some(MemoryLimit { budget, training, evaluation, options })) = (&levels.compiled.job, limited) else { return Ok(()) };
    let of = |job: &Job, stage: usize| footprint(job, stage, targets, scratch);
    let all = Footprints::new(job, &of);
    let Some(space) = budget.exceeded(&all) else { return Ok(()) };
    progress.enter("remedy");
    let found = remedy::find(training, evaluation, options, *budget, &of);
    let now = remedy::nominal(job).max(1);
    let mut d = footprint::over_budget(job, &all, &levels.sources, space, *budget);
    for r in found.iter().take(WAYS) {
        let flags = cli::changes(options, &r.options).join(" ");
        let longer = (r.time as f64 / now as f64 - 1.0) * 100.0;
        let time = match longer.abs() < 0.5 {
            true => "a step takes about as long".to_string(),
            false => format!("a step takes {:.0} % {}", longer.abs(), if longer > 0.0 { "longer" } else { "less" }),
        };
        d = d.help(format!("`{flags}` needs {} at most; {time}, on a nominal machine", footprint::size(r.peaks[space as usize])));
    }
    if found.is_empty() {
        d = d.help("nothing that was tried fits on this number of ranks: use more of them, or a smaller model");
    }
    shown.show(&[d], &levels.sources)?;
    Err(Failure::Reported)
}

/// Compiles kernels in processes of this program, and through the cache, if that is asked for.
pub fn generate(kernels: &[Kernel], targets: &Targets, emit: Emit, cached: bool, progress: &Progress) -> Result<Vec<codegen::Compiled>, Failure> {
    let cache = cached.then(cache_dir).flatten();
    Ok(machine::generate(kernels, targets, emit, Verify::Off, cache.as_deref(), &workers()?, progress)?.kernels)
}

/// Processes of this program, as many as there are cores.
fn workers() -> Result<Workers, Failure> {
    let program = std::env::current_exe().context("cannot find mcc's own executable")?;
    let count = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    Ok(Workers::Processes { command: WorkerCommand { program, arguments: vec!["codegen-worker".into()] }, count })
}

/// `$MCC_CACHE`, or `mcc` in the user's cache directory.
pub fn cache_dir() -> Option<PathBuf> {
    let of = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    of("MCC_CACHE").or_else(|| of("XDG_CACHE_HOME").map(|d| d.join("mcc"))).or_else(|| of("HOME").map(|d| d.join(".cache/mcc")))
}

/// The texts of the levels asked for, by file name.
fn dumps(c: &Compiled, args: &OutputArgs, targets: &Targets, progress: &Progress) -> Result<Vec<(String, String)>, Failure> {
    let mut out = vec![];
    let all: Vec<usize> = (0..c.job.kernels.len()).collect();
    let mut levels = args.emit.clone();
    levels.sort_unstable();
    levels.dedup();
    for level in levels {
        match level {
            Level::Graph => out.push(("graph.txt".to_string(), ir::text::print_graph(&c.graph))),
            Level::Sharded => out.push(("sharded.txt".to_string(), ir::text::print_sharded(&c.sharded))),
            Level::Local => out.extend(c.locals.iter().enumerate().map(|(k, l)| (format!("local.{k}.txt"), ir::text::print_local(l)))),
            Level::Schedule => out.push(("schedule.txt".into(), timeline(&c.job, UNIT).text(&c.order))),
            Level::Mlir => {
                out.push(("graph.mlir".into(), ir::text::mlir::export_graph(&c.graph)));
                out.push(("sharded.mlir".into(), ir::text::mlir::export_sharded(&c.sharded)));
                out.extend(c.locals.iter().enumerate().map(|(k, l)| (format!("local.{k}.mlir"), ir::text::mlir::export_local(l))));
                out.extend(dump::kernel_texts(&c.job, &all, level, targets, progress)?);
            }
            Level::Program => {
                let print = |k, p| dump::program_text(&c.job, k as u32, p);
                out.extend(c.job.programs.iter().enumerate().map(|(k, p)| (format!("program.{k}.txt"), print(k, p))));
            }
            Level::Kernel | Level::Llvm | Level::Asm | Level::Ptx => out.extend(dump::kernel_texts(&c.job, &all, level, targets, progress)?),
        }
    }
    Ok(out)
}
