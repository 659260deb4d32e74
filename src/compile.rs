//! `mcc compile`.

use crate::cli::{self, CompileArgs, CpComm, DecayStyle, Level, Optimizer, Overlap, Precision, RecomputeMethod, TpCommOverlap};
use crate::print::out;
use crate::targets::Targets;
use crate::text::{Text, show};
use crate::{Failure, dump, report};
use anyhow::{Context, anyhow};
use codegen::Emit;
use codegen::target::Arch;
use frontend::Options as TextOptions;
use ir::diag::{Diagnostic, Sources};
use ir::model::{self, LossScale, Model, Train};
use ir::op::{DType, Real};
use ir::program::Job;
use passes::bubbles::{UNIT, timeline};
use passes::compile::{CompileError, Compiled, Options};
use passes::footprint::{self, Footprint, Footprints, Kind};
use passes::layout::{Counts, Cuts};
use passes::offload::Offload;
use passes::partition::Buffer;
use passes::plan::{SequenceParallel, Zero};
use passes::propagate::Rows;
use passes::rematerialize::Recompute;
use passes::remedy;
use passes::schedule::{Order, Schedule};
use passes::tp_overlap::TpOverlap;
use runtime::artifact::{self, KernelEntry, Kernels, Parts};
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
pub fn levels(args: &CompileArgs) -> Result<Levels, Failure> {
    let start = Instant::now();
    let targets = targets(args)?;
    if args.tf32 && targets.device.arch == Arch::X86_64 {
        show(&[tf32_on_cpu(&args.target)], &Sources::default());
        return Err(Failure::Reported);
    }
    let options = options(args)?;
    let mut text = Text::read(&args.model)?;
    let frontend = |training| TextOptions {
        defines: args.define.clone(),
        batch: i64::try_from(options.global_batch).unwrap_or(i64::MAX),
        training,
        precision: precision(args),
        ..TextOptions::default()
    };
    let mut training = text.elaborate(&frontend(true))?;
    let evaluation = text.elaborate(&frontend(false))?;
    let options = Options { global_batch: batch(&training, options.global_batch), ..options };
    override_train(&mut training.train, args);
    let elaborated = start.elapsed();
    let budget = args.memory.map(|bytes| Budget { bytes, training: training.clone(), evaluation: evaluation.clone(), options: options.clone() });
    let mut compiled = match passes::compile::compile(training, evaluation, &options) {
        Ok(c) => c,
        Err(CompileError::User(errors)) => {
            show(&errors, &text.sources);
            return Err(Failure::Reported);
        }
        Err(e @ CompileError::Broken { .. }) => return Err(anyhow!(e).context("please report this with the model text and the command line").into()),
    };
    show(&compiled.warnings, &text.sources);
    compiled.job.sources = text.sources.files.iter().map(|f| f.name.clone()).collect();
    let levels = Levels { compiled, text, elaborated, budget };
    // How much scratch kernels need is known once they are compiled.
    within(&levels, &targets, 0)?;
    Ok(levels)
}

/// E0642: CPUs have no tf32.
fn tf32_on_cpu(target: &str) -> Diagnostic {
    let d = Diagnostic::error("E0642", format!("--tf32 is for tensor cores, and --target {target} is a CPU, which has none"));
    d.help("without it f32 is multiplied with all its bits; `--target sm_80` or `--target sm_90a` for GPUs")
}

fn targets(args: &CompileArgs) -> Result<Targets, Failure> {
    Targets::named(&args.target, args.host_target.as_deref())
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
    let targets = targets(args)?;
    let levels = levels(args)?;
    let Levels { compiled, elaborated, .. } = &levels;
    let generating = Instant::now();
    let kernels = targets.generate(&compiled.job.kernels, Emit::default(), !args.no_cache)?;
    let entry = |k: &codegen::Compiled| KernelEntry {
        name: k.name.clone(),
        tiles: k.shape.tiles,
        scratch_bytes: k.shape.scratch_bytes,
        launch: k.launch.clone(),
    };
    let entries: Vec<KernelEntry> = kernels.iter().map(entry).collect();
    let scratch = scratch(&entries, &targets);
    within(&levels, &targets, scratch)?;
    let out = args.output.clone().unwrap_or_else(|| PathBuf::from(format!("{}.mcc", compiled.job.model)));
    let code = |launched: bool| kernels.iter().filter(move |k| k.launch.is_some() == launched).map(|k| k.object.as_slice());
    let (ptx, native): (Vec<&[u8]>, Vec<&[u8]>) = (code(true).collect(), code(false).collect());
    let library = match targets.device.arch {
        Arch::Nvptx if native.is_empty() => None,
        Arch::X86_64 | Arch::Nvptx => Some(link(&native, &out)?),
    };
    let generated = generating.elapsed();
    let dumps = dumps(compiled, args, &targets)?;
    let kernels = Some(Kernels { entries: &entries, library: library.as_deref(), ptx: &ptx });
    let parts = Parts { job: &compiled.job, target: &targets.to_artifact(&compiled.job.kernels), kernels, dumps: &dumps };
    artifact::write(&out, &parts)?;
    let mut times = vec![("parse", *elaborated)];
    times.extend(compiled.times.iter().copied());
    times.push(("kernels", generated));
    out!("{}", report::table(&compiled.job, &Footprints::new(&compiled.job, &|job, stage| footprint(job, stage, &targets, scratch)), &times))?;
    out!("wrote {} in {:.2} s\n", out.display(), start.elapsed().as_secs_f64())?;
    Ok(())
}

/// E0640, with the change that would fit, if a rank needs more than the budget.
fn within(levels: &Levels, targets: &Targets, scratch: u64) -> Result<(), Failure> {
    let Levels { compiled, text, budget: Some(budget), .. } = levels else { return Ok(()) };
    let of = |job: &Job, stage: usize| footprint(job, stage, targets, scratch);
    let all = Footprints::new(&compiled.job, &of);
    if all.most().1.total() <= budget.bytes {
        return Ok(());
    }
    let remedy = remedy::find(&budget.training, &budget.evaluation, &budget.options, budget.bytes, &of);
    show(&[footprint::over_budget(&compiled.job, &all, &text.sources, budget.bytes, remedy.as_ref())], &text.sources);
    Err(Failure::Reported)
}

fn recompute(args: &CompileArgs) -> Result<Recompute, Failure> {
    let layers = args.recompute_num_layers.unwrap_or(1);
    match (args.recompute, args.recompute_method) {
        (cli::Recompute::Full, None | Some(RecomputeMethod::Uniform)) => Ok(Recompute::Uniform(layers)),
        (cli::Recompute::Full, Some(RecomputeMethod::Block)) => Ok(Recompute::Block(layers)),
        (cli::Recompute::None | cli::Recompute::Selective, Some(_)) => {
            Err(anyhow!("--recompute-method says which layers `--recompute full` is about").into())
        }
        (cli::Recompute::None | cli::Recompute::Selective, None) if args.recompute_num_layers.is_some() => {
            Err(anyhow!("--recompute-num-layers says which layers `--recompute full` is about").into())
        }
        (cli::Recompute::None, None) => Ok(Recompute::None),
        (cli::Recompute::Selective, None) => Ok(Recompute::Selective),
    }
}

/// A schedule by its name, or from a file.
fn schedule(name: &str) -> Result<Schedule, Failure> {
    match name {
        "1f1b" => Ok(Schedule::OneFOneB),
        "gpipe" => Ok(Schedule::GPipe),
        "zb-h1" => Ok(Schedule::ZbH1),
        "zb-v" => Ok(Schedule::ZbV),
        file => {
            let text = std::fs::read_to_string(file)
                .with_context(|| format!("--pipeline-schedule `{file}` is neither 1f1b, gpipe, zb-h1 or zb-v nor a file that can be read"))?;
            Ok(Schedule::Given(Order::parse(&text).with_context(|| format!("the schedule {file}"))?))
        }
    }
}

/// How layers are cut; the flags exclude one another.
fn cuts(args: &CompileArgs) -> Cuts {
    let counts = |flag: bool| if flag { Counts::AsLayer } else { Counts::AsNothing };
    match (&args.pipeline_layers, args.pipeline_layout.as_deref()) {
        (Some(sizes), _) => Cuts::Sizes(sizes.clone()),
        (None, Some("auto")) => Cuts::Balanced,
        (None, Some(text)) => Cuts::Text(text.to_string()),
        (None, None) => {
            Cuts::Even { embedding: counts(args.account_for_embedding_in_pipeline_split), loss: counts(args.account_for_loss_in_pipeline_split) }
        }
    }
}

fn options(args: &CompileArgs) -> Result<Options, Failure> {
    let micro_batch = args.micro_batch_size.unwrap_or(1);
    Ok(Options {
        dp: args.dp,
        cp: args.cp,
        tp: args.tp,
        pp: args.pp,
        ep: args.ep,
        etp: args.etp,
        cp_comm: match args.cp_comm_type {
            CpComm::P2p => passes::plan::CpComm::Ring,
            CpComm::A2aP2p => passes::plan::CpComm::AllToAllAndRing,
            CpComm::AllGather => passes::plan::CpComm::AllGather,
            CpComm::A2a => passes::plan::CpComm::AllToAll,
        },
        sp: if args.sp { SequenceParallel::On } else { SequenceParallel::Off },
        zero: Zero::ALL[usize::from(args.zero.unwrap_or(u8::from(args.use_distributed_optimizer)))],
        offload: if args.optimizer_offload { Offload::Optimizer } else { Offload::Off },
        tf32: args.tf32,
        micro_batch,
        global_batch: args.global_batch_size.unwrap_or(micro_batch.saturating_mul(args.dp).saturating_mul(args.pp)),
        schedule: schedule(&args.pipeline_schedule)?,
        vpp: args.vpp,
        group: args.microbatch_group_size_per_virtual_pipeline_stage,
        layout: cuts(args),
        pad_vocab_to: args.pad_vocab_to,
        overlap: match args.overlap {
            Overlap::On => passes::overlap::Overlap::On,
            Overlap::Off => passes::overlap::Overlap::Off,
        },
        tp_overlap: match args.tp_comm_overlap {
            TpCommOverlap::Off => TpOverlap::Off,
            TpCommOverlap::Pipeline => TpOverlap::Pipeline { chunks: args.tp_comm_overlap_chunks },
        },
        recompute: recompute(args)?,
        rows: Rows::Rules,
        bucket_size: args.bucket_size,
        moe_buffer: args.moe_buffer_factor.map_or(Buffer::Whole, Buffer::Factor),
    })
}

/// `-D batch` is the same as `--global-batch-size`.
fn batch(model: &model::Model, default: u64) -> u64 {
    model.graph.batch.map_or(default, |d| model.graph.body.dims.size(d))
}

fn precision(args: &CompileArgs) -> DType {
    match args.dtype {
        _ if args.bf16 => DType::Bf16,
        _ if args.fp16 => DType::F16,
        Precision::Fp32 => DType::F32,
        Precision::Bf16 => DType::Bf16,
        Precision::Fp16 => DType::F16,
    }
}

/// A constant scale, or one that adapts: for fp16, and wherever one of its flags is given.
fn loss_scale(args: &CompileArgs) -> Option<LossScale> {
    if let Some(x) = args.loss_scale {
        return Some(LossScale::Constant(Real(x)));
    }
    let given = [args.initial_loss_scale.is_some(), args.min_loss_scale.is_some(), args.loss_scale_window.is_some(), args.hysteresis.is_some()];
    if precision(args) != DType::F16 && !given.contains(&true) {
        return None;
    }
    let mut rule = LossScale::FP16;
    if let LossScale::Dynamic { initial, least, window, hysteresis } = &mut rule {
        *least = args.min_loss_scale.map_or(*least, Real);
        *initial = args.initial_loss_scale.map_or(Real(initial.0.max(least.0)), Real);
        *window = args.loss_scale_window.unwrap_or(*window);
        *hysteresis = args.hysteresis.unwrap_or(*hysteresis);
    }
    Some(rule)
}

fn override_train(train: &mut Train, args: &CompileArgs) {
    train.loss_scale = loss_scale(args);
    if let Some(kind) = args.optimizer {
        train.optimizer = match (kind, train.optimizer) {
            (Optimizer::Adamw, old @ model::Optimizer::AdamW { .. }) | (Optimizer::Sgd, old @ model::Optimizer::Sgd { .. }) => old,
            (Optimizer::Adamw, model::Optimizer::Sgd { .. }) => Train::default().optimizer,
            (Optimizer::Sgd, model::Optimizer::AdamW { .. }) => model::Optimizer::Sgd { momentum: Real(0.0) },
        };
    }
    let set = |to: &mut Real, from: Option<f64>| {
        if let Some(x) = from {
            *to = Real(x);
        }
    };
    match &mut train.optimizer {
        model::Optimizer::AdamW { beta1, beta2, eps } => {
            set(beta1, args.adam_beta1);
            set(beta2, args.adam_beta2);
            set(eps, args.adam_eps);
        }
        model::Optimizer::Sgd { momentum } => set(momentum, args.sgd_momentum),
    }
    let s = &mut train.schedule;
    set(&mut s.peak, args.lr);
    set(&mut s.min, args.min_lr);
    if let Some(style) = args.lr_decay_style {
        s.decay = match style {
            DecayStyle::Constant => model::Decay::Constant,
            DecayStyle::Linear => model::Decay::Linear,
            DecayStyle::Cosine => model::Decay::Cosine,
        };
    }
    s.warmup = args.lr_warmup_iters.unwrap_or(s.warmup);
    s.steps = args.lr_decay_iters.unwrap_or(s.steps);
    set(&mut train.weight_decay, args.weight_decay);
    if let Some(clip) = args.clip_grad {
        train.clip = (clip > 0.0).then_some(Real(clip));
    }
}

/// `$MCC_CACHE`, or `mcc` in the user's cache directory.
pub fn cache_dir() -> Option<PathBuf> {
    let of = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    of("MCC_CACHE").or_else(|| of("XDG_CACHE_HOME").map(|d| d.join("mcc"))).or_else(|| of("HOME").map(|d| d.join(".cache/mcc")))
}

/// The shared library with native kernels, as bytes.
fn link(kernels: &[&[u8]], out: &Path) -> Result<Vec<u8>, Failure> {
    let parent = out.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::create_dir_all(parent).with_context(|| format!("cannot create `{}`", parent.display()))?;
    let path = parent.join(format!(".mcc-link-{}.so", std::process::id()));
    let linked = codegen::link_shared(kernels.iter().copied(), &path).map_err(anyhow::Error::from);
    let bytes = linked.and_then(|()| std::fs::read(&path).context("cannot read the linked kernels"));
    let _ = std::fs::remove_file(&path);
    Ok(bytes?)
}

/// The texts of the levels asked for, by file name.
fn dumps(c: &Compiled, args: &CompileArgs, targets: &Targets) -> Result<Vec<(String, String)>, Failure> {
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
                out.extend(dump::kernel_texts(&c.job, &all, level, targets)?);
            }
            Level::Program => {
                let print = |k, p| dump::program_text(&c.job, k as u32, p);
                out.extend(c.job.programs.iter().enumerate().map(|(k, p)| (format!("program.{k}.txt"), print(k, p))));
            }
            Level::Kernel | Level::Llvm | Level::Asm | Level::Ptx => out.extend(dump::kernel_texts(&c.job, &all, level, targets)?),
        }
    }
    Ok(out)
}
