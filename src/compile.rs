//! `mcc compile`.

use crate::cli::{self, CompileArgs, InspectArgs, Level, OutputArgs, PlanArgs};
use crate::failure::Failure;
use crate::limits::Watch;
use crate::misuse::{self, misuse};
use crate::options::{contradictions, options, override_train, precision};
use crate::print::{self, note, out, progress};
use crate::text::{Shown, Text};
use crate::{dump, idle, report, reproducer, signals};
use anyhow::Context;
use codegen::target::Arch;
use codegen::{Emit, WorkerCommand, Workers};
use frontend::{Models, Options as TextOptions};
use ir::diag::{Diagnostic, Sources};
use ir::kernel::Kernel;
use ir::model::Model;
use ir::options::Options;
use ir::program::Job;
use ir::progress::Progress;
use ir::text::print_module;
use mcc::machine::{self, Machine};
use mcc::targets::Targets;
use passes::compile::{Compile, CompileError, Compiled};
use passes::remedy;
use passes::report::footprint::{self, Footprint, Footprints, Kind};
use passes::report::pipeline_timeline::{UNIT, timeline};
use passes::table::find;
use runtime::artifact::{self, KernelEntry, Parts};
use runtime::signature::SecretKey;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// A model text through all passes, before code generation.
pub struct Levels {
    pub compiled: Compiled,
    pub text: Text,
    elaborated: Duration,
    budget: Option<Budget>,
}

/// Most bytes that a rank may take, and what to compile again for a change that fits.
struct Budget {
    bytes: u64,
    training: Model,
    evaluation: Model,
    options: Options,
}

/// Compiles to programs and shows what is wrong; within the memory budget, if there is one.
pub fn levels(model: &Path, args: &PlanArgs, shown: Shown, progress: &Progress) -> Result<Levels, Failure> {
    let levels = inspected(model, args, shown, progress, &InspectArgs::default())?;
    Ok(levels.expect("invariant: nothing stops it"))
}

/// As [`levels`]; prints modules on the way, and stops where that is asked for.
fn inspected(model: &Path, args: &PlanArgs, shown: Shown, progress: &Progress, inspect: &InspectArgs) -> Result<Option<Levels>, Failure> {
    let start = Instant::now();
    let targets = targets(args)?;
    if args.precision.tf32 && targets.device.arch == Arch::X86_64 {
        let errors = [tf32_on_cpu(&args.target)];
        shown.show(&errors, &Sources::default())?;
        return Err(misuse::shown(&errors));
    }
    let options = options(args)?;
    passes::start::ranks(&options).or_else(|e| failed(CompileError::User(e), &Sources::default(), shown, inspect))?;
    progress.enter("parse");
    let mut text = Text::read(model, shown)?;
    let elaboration =
        TextOptions { defines: args.define.clone(), batch: options.global_batch, precision: precision(&args.precision), ..TextOptions::default() };
    let Models { mut training, evaluation, .. } = text.elaborate(&elaboration)?;
    let options = Options { global_batch: mcc::global_batch(&training, options.global_batch), ..options };
    override_train(&mut training.train, args);
    let contradictions = contradictions(&training, args, &options);
    if !contradictions.is_empty() {
        text.show(&contradictions)?;
        return Err(misuse::shown(&contradictions));
    }
    text.show(&idle::in_plan(args, &training.plan))?;
    let elaborated = start.elapsed();
    let budget = args.memory.map(|bytes| Budget { bytes, training: training.clone(), evaluation: evaluation.clone(), options: options.clone() });
    let sources = &text.sources;
    let mut compile = Compile::new(training, evaluation, &options, progress).or_else(|e| failed(e, sources, shown, inspect))?;
    inspect.check(&options)?;
    while let Some(pass) = compile.step().or_else(|e| failed(e, sources, shown, inspect))? {
        if inspect.damage_after.as_deref() == Some(pass.name) {
            compile.damage().or_else(|e| failed(e, sources, shown, inspect))?;
        }
        let stops = inspect.stop_after.as_deref() == Some(pass.name);
        if inspect.prints(pass.name) {
            let text = format!("; after {}\n{}", pass.name, print_module(compile.module()));
            // Where an artifact is to be written, that is what the command is for.
            if inspect.stop_after.is_some() { out!("{text}")? } else { progress!("{}", text.trim_end()) }
        } else if stops && inspect.print_after.is_empty() {
            out!("{}", print_module(compile.module()))?;
        }
        if stops {
            return Ok(None);
        }
    }
    let mut compiled = compile.finish();
    text.show(&compiled.warnings)?;
    text.show(&idle::in_model(args, &compiled))?;
    compiled.job.sources = frontend::without_library(&text.sources);
    let levels = Levels { compiled, text, elaborated, budget };
    // How much scratch kernels need is known once they are compiled.
    within(&levels, &targets, 0, progress)?;
    Ok(Some(levels))
}

impl InspectArgs {
    /// Whether the module after this pass is to be printed.
    fn prints(&self, pass: &str) -> bool {
        self.print_after.iter().any(|p| p == pass || p == "all")
    }

    /// Refuses passes that do not run with these options: nothing would be printed.
    fn check(&self, options: &Options) -> Result<(), Failure> {
        let named = self.print_after.iter().chain(&self.stop_after).chain(&self.damage_after);
        match named.filter_map(|name| find(name)).find(|p| !(p.wanted)(options)) {
            Some(pass) => Err(misuse!("`{}` does not run with these options: `mcc passes` lists what does when", pass.name).into()),
            None => Ok(()),
        }
    }
}

/// What the user can mend, shown; or a bug in mcc.
fn failed<T>(error: CompileError, sources: &Sources, shown: Shown, inspect: &InspectArgs) -> Result<T, Failure> {
    match error {
        CompileError::User(errors) => {
            shown.show(&errors, sources)?;
            Err(misuse::shown(&errors))
        }
        CompileError::Broken(broken) => {
            note!("error: {broken}");
            if let Some(invariant) = broken.complaint.invariant() {
                note!("  = {invariant}: {}", invariant.holds());
            }
            match reproducer::leave(&broken, inspect.damage_after.is_some()) {
                Ok(Some(left)) => note!("{left}"),
                Ok(None) => {}
                Err(e) => note!("warning: the module before that pass could not be written: {e}"),
            }
            note!("please report this with the model text and the command line");
            Err(Failure::Reported)
        }
    }
}

/// E0642: CPUs have no tf32.
fn tf32_on_cpu(target: &str) -> Diagnostic {
    let d = Diagnostic::error("E0642", format!("--tf32 is for tensor cores, and --target {target} is a CPU, which has none"));
    d.help("without it f32 is multiplied with all its bits; `--target sm_80` or `--target sm_90a` for GPUs")
}

fn targets(args: &PlanArgs) -> Result<Targets, Failure> {
    Ok(Targets::named(&args.target, args.host_target.as_deref())?)
}

/// What a rank of a stage takes: its arenas, scratch, and on a CPU, for one thread, its share of the memory through which ranks exchange.
fn footprint(job: &Job, stage: usize, targets: &Targets, scratch: u64) -> Footprint {
    let rank = job.mesh.first_of_stage(stage as u64);
    let own = Footprint::of(job, stage).and(Kind::Scratch, scratch);
    match targets.device.arch {
        Arch::X86_64 => own.and(Kind::Exchanges, runtime::shm::bytes_of_rank(job, &targets.to_artifact(&job.kernels), rank)),
        // It is the GPU's memory that is planned; exchanges go through the host's.
        Arch::Nvptx => own,
    }
}

/// Scratch of a rank in the device's memory: for one thread, or for the blocks of a launch.
fn scratch(kernels: &[KernelEntry], targets: &Targets) -> u64 {
    let of_one = |kernel: &KernelEntry| match (targets.device.arch, &kernel.launch) {
        (_, Some(launch)) => launch.scratch_bytes,
        (Arch::X86_64, None) => kernel.scratch_bytes,
        (Arch::Nvptx, None) => 0,
    };
    kernels.iter().map(of_one).max().unwrap_or(0)
}

pub fn run(args: &CompileArgs) -> Result<(), Failure> {
    let start = Instant::now();
    // A key that is none would be a pity after the work.
    let sign = args.output.sign.as_deref().map(SecretKey::read).transpose()?;
    let targets = targets(&args.plan)?;
    let watch = Watch::start(&args.plan.limits, Shown::Text);
    let Some(levels) = inspected(&args.model, &args.plan, Shown::Text, watch.progress(), &args.inspect)? else { return Ok(()) };
    let Levels { compiled, elaborated, .. } = &levels;
    let generating = Instant::now();
    let kernels = generate(&compiled.job.kernels, &targets, Emit::default(), !args.output.no_cache, watch.progress())?;
    let generated = generating.elapsed();
    let entries = machine::entries(&kernels);
    let beyond = beyond_scratch(&entries, &compiled.job, &targets);
    if !beyond.is_empty() {
        levels.text.show(&beyond)?;
        return Err(Failure::Reported);
    }
    let scratch = scratch(&entries, &targets);
    within(&levels, &targets, scratch, watch.progress())?;
    watch.progress().enter("dumps");
    let dumps = dumps(compiled, &args.output, &targets, watch.progress())?;
    let linking = Instant::now();
    let out = args.output.output.clone().unwrap_or_else(|| PathBuf::from(format!("{}.mcc", compiled.job.model)));
    let machine = Machine::new(kernels, &targets, watch.progress())?;
    // What follows writes.
    drop(watch);
    let generated = generated + linking.elapsed();
    let target = targets.to_artifact(&compiled.job.kernels);
    machine.parts(|kernels| {
        let parts = Parts { job: &compiled.job, target: &target, kernels: Some(kernels), dumps: &dumps, sign: sign.as_ref() };
        signals::tidily(|given_up| artifact::write_unless(&out, &parts, given_up))
    })??;
    let mut times = vec![("parse", *elaborated)];
    times.extend(compiled.times.iter().map(|t| (t.pass, t.run)));
    times.push(("kernels", generated));
    let verified: Vec<(&str, Duration)> = compiled.times.iter().flat_map(|t| t.verified.iter().copied()).collect();
    let footprints = Footprints::new(&compiled.job, &|job, stage| footprint(job, stage, &targets, scratch));
    let table = report::table(&compiled.job, &footprints, &times, &verified);
    let wrote = format!("wrote {} in {:.2} s", out.display(), start.elapsed().as_secs_f64());
    // Standard output is for modules where these were asked for.
    match args.inspect.print_after.is_empty() {
        true => print::report!("{table}{wrote}\n"),
        false => note!("{table}{wrote}"),
    }
    Ok(())
}

/// E0645: a kernel wants more scratch than what runs it gives.
fn beyond_scratch(entries: &[KernelEntry], job: &Job, targets: &Targets) -> Vec<Diagnostic> {
    let wants = |e: &KernelEntry| match &e.launch {
        Some(launch) => (launch.scratch_bytes, ir::launch::MOST_SCRATCH, "a launch"),
        None => (e.scratch_bytes, artifact::MOST_SCRATCH, "a thread"),
    };
    let largest = entries.iter().zip(&job.kernels).filter(|(e, _)| wants(e).0 > wants(e).1).max_by_key(|(e, _)| wants(e).0);
    let Some((entry, kernel)) = largest else { return vec![] };
    let (bytes, most, whose) = wants(entry);
    let (bytes, most, target) = (footprint::size(bytes), footprint::size(most), targets.of(kernel));
    let text = format!("a kernel wants {bytes} of scratch for {whose} of {}, more than the {most} that one can have", target.cpu);
    let d = Diagnostic::error("E0645", text).help("smaller sizes, or more ranks to split them over, such as `--cp` for long sequences");
    let span = kernel.body.nodes.iter().find_map(|n| n.origin.span);
    vec![match span {
        Some(span) => d.label(span, "it computes this"),
        None => d,
    }]
}

/// E0640, with the change that would fit, if a rank needs more than the budget.
fn within(levels: &Levels, targets: &Targets, scratch: u64, progress: &Progress) -> Result<(), Failure> {
    let Levels { compiled, text, budget: Some(budget), .. } = levels else { return Ok(()) };
    let of = |job: &Job, stage: usize| footprint(job, stage, targets, scratch);
    let all = Footprints::new(&compiled.job, &of);
    if all.most().1.total() <= budget.bytes {
        return Ok(());
    }
    progress.enter("remedy");
    let remedy = remedy::find(&budget.training, &budget.evaluation, &budget.options, budget.bytes, &of);
    let help = match remedy {
        Some(r) => format!("`{}` needs {} at most", cli::changes(&budget.options, &r.options).join(" "), footprint::size(r.peak)),
        None => "nothing that was tried fits on this number of ranks: use more of them, or a smaller model".into(),
    };
    text.show(&[footprint::over_budget(&compiled.job, &all, &text.sources, budget.bytes).help(help)])?;
    Err(Failure::Reported)
}

/// Compiles kernels in processes of this program, as many as there are cores, and through the cache, if that is asked for.
pub fn generate(kernels: &[Kernel], targets: &Targets, emit: Emit, cached: bool, progress: &Progress) -> Result<Vec<codegen::Compiled>, Failure> {
    let program = std::env::current_exe().context("cannot find mcc's own executable")?;
    let count = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let workers = Workers::Processes { command: WorkerCommand { program, arguments: vec!["codegen-worker".into()] }, count };
    Ok(machine::generate(kernels, targets, emit, cached.then(cache_dir).flatten().as_deref(), &workers, progress)?)
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
