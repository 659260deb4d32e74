//! The flags of a plan as options of the passes.

use crate::cli::{
    self, DecayStyle, MemoryOrder, MuonScaleMode, Optimizer, OptimizerOffload, Overlap, ParamOffload, PlanArgs, Precision, PrecisionArgs,
    RecomputeMethod, TpCommOverlap, WsdDecayStyle,
};
use crate::failure::Failure;
use crate::misuse::misuse;
use anyhow::Context;
use ir::diag::Diagnostic;
use ir::model::{self, LossScale, Model, Muon, MuonScale, Train};
use ir::op::{DType, Real};
use ir::options::{
    ActivationOffload, Counts, Cuts, MOE_PASSES, MoeBuffer, Offload, Options, Recompute, RowChoice, SequenceParallel, SplitK, TpOverlap, Zero,
};
use ir::pipeline::{PassOrder, Schedule};

fn recompute(args: &PlanArgs) -> Recompute {
    let layers = args.recompute_num_layers.unwrap_or(1);
    match (args.recompute, args.recompute_method) {
        (cli::Recompute::Full, None | Some(RecomputeMethod::Uniform)) => Recompute::Uniform(layers),
        (cli::Recompute::Full, Some(RecomputeMethod::Block)) => Recompute::Block(layers),
        (cli::Recompute::None, _) => Recompute::None,
        (cli::Recompute::Selective, _) => Recompute::Selective,
    }
}

/// The functions and calls of which activations are to be offloaded; none: whatever layers keep.
pub fn offloaded(args: &PlanArgs) -> Vec<String> {
    args.activation_offload.iter().filter(|names| **names != ["all"]).flatten().cloned().collect()
}

fn activation_offload(args: &PlanArgs) -> ActivationOffload {
    let layers = args.activation_offload_layers;
    match (&args.activation_offload, layers) {
        (None, None) => ActivationOffload::Off,
        _ if offloaded(args).is_empty() => ActivationOffload::Layers(layers),
        _ => ActivationOffload::Marked(layers),
    }
}

/// A schedule by its name, or from a file.
fn schedule(name: &str) -> Result<Schedule, Failure> {
    if let Some((_, schedule)) = cli::SCHEDULES.iter().find(|(known, _)| *known == name) {
        return Ok(schedule.clone());
    }
    let text = std::fs::read_to_string(name)
        .map_err(|e| misuse!("--pipeline-schedule `{name}` is neither 1f1b, gpipe, zb-h1, zb-v or dualpipev nor a file that can be read: {e}"))?;
    Ok(Schedule::Given(PassOrder::parse(&text).with_context(|| format!("the schedule {name}"))?))
}

/// How layers are cut; the flags exclude one another.
fn cuts(args: &PlanArgs) -> Cuts {
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

pub fn options(args: &PlanArgs) -> Result<Options, Failure> {
    let micro_batch = args.micro_batch_size.unwrap_or(1);
    Ok(Options {
        dp: args.dp,
        cp: args.cp,
        tp: args.tp,
        pp: args.pp,
        ep: args.ep,
        etp: args.etp,
        cp_comm: args.cp_comm_type.into(),
        sp: if args.sp { SequenceParallel::On } else { SequenceParallel::Off },
        zero: Zero::ALL[usize::from(args.zero.unwrap_or(u8::from(args.use_distributed_optimizer)))],
        replicas: args.dp_replicate,
        offload: match args.optimizer_offload {
            OptimizerOffload::Off => Offload::Off,
            OptimizerOffload::Host => Offload::Optimizer,
            OptimizerOffload::Disk => Offload::Disk,
        },
        param_offload: match args.param_offload {
            ParamOffload::Off => ir::options::ParamOffload::Off,
            ParamOffload::Host => ir::options::ParamOffload::Host,
            ParamOffload::Disk => ir::options::ParamOffload::Disk,
        },
        activation_offload: activation_offload(args),
        tf32: args.precision.tf32,
        micro_batch,
        global_batch: args.global_batch_size.unwrap_or(micro_batch.saturating_mul(args.dp).saturating_mul(args.pp)),
        schedule: schedule(&args.pipeline_schedule)?,
        vpp: args.vpp,
        group: args.microbatch_group_size_per_virtual_pipeline_stage,
        layout: cuts(args),
        pad_vocab_to: args.pad_vocab_to,
        overlap: match args.overlap {
            Overlap::On => ir::options::Overlap::On,
            Overlap::Off => ir::options::Overlap::Off,
        },
        pass_pairs: args.overlap_moe_expert_parallel_comm,
        memory_order: match args.memory_order {
            MemoryOrder::Time => ir::options::MemoryOrder::Time,
            MemoryOrder::Memory => ir::options::MemoryOrder::Memory,
        },
        // These two follow from the target.
        serial_exchanges: false,
        split_k: SplitK::Off,
        tp_overlap: match args.tp_comm_overlap {
            TpCommOverlap::Off => TpOverlap::Off,
            TpCommOverlap::Pipeline => TpOverlap::Pipeline { chunks: args.tp_comm_overlap_chunks },
        },
        logits_chunks: args.logits_chunks,
        recompute: recompute(args),
        rows: RowChoice::Rules,
        bucket_size: args.bucket_size,
        moe_buffer: args.moe_buffer_factor.map_or(MoeBuffer::Whole, MoeBuffer::Factor),
        moe_passes: args.moe_passes.unwrap_or(MOE_PASSES),
    })
}

pub fn precision(args: &PrecisionArgs) -> DType {
    match args.dtype {
        _ if args.bf16 => DType::Bf16,
        _ if args.fp16 => DType::F16,
        Precision::Fp32 => DType::F32,
        Precision::Bf16 => DType::Bf16,
        Precision::Fp16 => DType::F16,
    }
}

/// A constant scale, or one that adapts: for fp16, and wherever one of its flags is given.
fn loss_scale(args: &PrecisionArgs) -> Option<LossScale> {
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

pub fn override_train(train: &mut Train, args: &PlanArgs) {
    train.loss_scale = loss_scale(&args.precision);
    let args = &args.training;
    if let Some(kind) = args.optimizer {
        train.optimizer = match (kind, train.optimizer) {
            (Optimizer::Adamw, old @ model::Optimizer::AdamW { .. })
            | (Optimizer::Sgd, old @ model::Optimizer::Sgd { .. })
            | (Optimizer::Lion, old @ model::Optimizer::Lion { .. })
            | (Optimizer::Muon, old @ model::Optimizer::Muon { .. }) => old,
            (Optimizer::Adamw, _) => Train::default().optimizer,
            (Optimizer::Sgd, _) => model::Optimizer::Sgd { momentum: Real(0.0) },
            (Optimizer::Lion, _) => model::Optimizer::Lion { beta1: Real(0.9), beta2: Real(0.99) },
            // Muon trains parameters that are no matrices as AdamW does, with the text's constants.
            (Optimizer::Muon, model::Optimizer::AdamW { beta1, beta2, eps }) => model::Optimizer::Muon { muon: Muon::default(), beta1, beta2, eps },
            (Optimizer::Muon, _) => model::Optimizer::Muon { muon: Muon::default(), beta1: Real(0.9), beta2: Real(0.95), eps: Real(1e-8) },
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
        model::Optimizer::Lion { beta1, beta2 } => {
            set(beta1, args.lion_beta1);
            set(beta2, args.lion_beta2);
        }
        model::Optimizer::Muon { muon, beta1, beta2, eps } => {
            set(beta1, args.adam_beta1);
            set(beta2, args.adam_beta2);
            set(eps, args.adam_eps);
            set(&mut muon.momentum, args.muon_momentum);
            set(&mut muon.factor, args.muon_extra_scale_factor);
            muon.iterations = args.muon_num_ns_steps.unwrap_or(muon.iterations);
            muon.nesterov = args.muon_nesterov.map_or(muon.nesterov, |s| s == cli::Switch::On);
            muon.scale = args.muon_scale_mode.map_or(muon.scale, |mode| match mode {
                MuonScaleMode::Spectral => MuonScale::Spectral,
                MuonScaleMode::ShapeScaling => MuonScale::ShapeScaling,
                MuonScaleMode::UnitRmsNorm => MuonScale::UnitRmsNorm,
            });
        }
    }
    let s = &mut train.schedule;
    set(&mut s.peak, args.lr);
    set(&mut s.min, args.min_lr);
    if let Some(style) = args.lr_decay_style {
        let curve = match style {
            DecayStyle::Constant => Some(model::Decay::Constant),
            DecayStyle::Linear => Some(model::Decay::Linear),
            DecayStyle::Cosine => Some(model::Decay::Cosine),
            DecayStyle::Exponential => Some(model::Decay::Exponential),
            DecayStyle::MinusSqrt => Some(model::Decay::MinusSqrt),
            DecayStyle::InverseSquareRoot => Some(model::Decay::InverseSquareRoot),
            DecayStyle::Wsd => None,
        };
        (s.decay, s.falling) = match (curve, s.falling) {
            (Some(curve), _) => (curve, None),
            (None, Some(falling)) => (s.decay, Some(falling)),
            (None, None) => (model::Decay::Exponential, args.lr_wsd_decay_iters),
        };
    }
    if s.falling.is_some() {
        s.falling = args.lr_wsd_decay_iters.or(s.falling);
        s.decay = args.lr_wsd_decay_style.map_or(s.decay, |style| match style {
            WsdDecayStyle::Linear => model::Decay::Linear,
            WsdDecayStyle::Cosine => model::Decay::Cosine,
            WsdDecayStyle::Exponential => model::Decay::Exponential,
            WsdDecayStyle::MinusSqrt => model::Decay::MinusSqrt,
        });
    }
    s.warmup = args.lr_warmup_iters.unwrap_or(s.warmup);
    s.steps = args.lr_decay_iters.unwrap_or(s.steps);
    s.constant = args.lr_constant_iters.unwrap_or(s.constant);
    set(&mut train.weight_decay, args.weight_decay);
    if let Some(clip) = args.clip_grad {
        train.clip = (clip > 0.0).then_some(Real(clip));
    }
}

/// W0706: a constant rate is asked for, and the text's warms up first.
pub fn still_warms_up(train: &Train, args: &PlanArgs) -> Option<Diagnostic> {
    let (flags, steps) = (&args.training, train.schedule.warmup);
    let silent = flags.lr_decay_style == Some(DecayStyle::Constant) && flags.lr_warmup_iters.is_none() && steps > 0;
    silent.then(|| {
        let d = Diagnostic::warning("W0706", format!("with `--lr-decay-style constant` the rate still warms up for the text's {steps} steps"));
        d.help(format!("`--lr-warmup-iters 0` for the same rate in all steps, `--lr-warmup-iters {steps}` to say so"))
    })
}

/// What the flags contradict in the text's settings and its `train` section, once they are in it.
pub fn contradictions(model: &Model, args: &PlanArgs, options: &Options) -> Vec<Diagnostic> {
    let (train, flags) = (&model.train, &args.training);
    let mut out = vec![];
    let own = match train.optimizer {
        model::Optimizer::AdamW { .. } => "adamw",
        model::Optimizer::Sgd { .. } => "sgd",
        model::Optimizer::Lion { .. } => "lion",
        model::Optimizer::Muon { .. } => "muon",
    };
    let given = [
        ("adamw", "--adam-beta1", flags.adam_beta1.is_some()),
        ("adamw", "--adam-beta2", flags.adam_beta2.is_some()),
        ("adamw", "--adam-eps", flags.adam_eps.is_some()),
        ("sgd", "--sgd-momentum", flags.sgd_momentum.is_some()),
        ("lion", "--lion-beta1", flags.lion_beta1.is_some()),
        ("lion", "--lion-beta2", flags.lion_beta2.is_some()),
        ("muon", "--muon-momentum", flags.muon_momentum.is_some()),
        ("muon", "--muon-nesterov", flags.muon_nesterov.is_some()),
        ("muon", "--muon-scale-mode", flags.muon_scale_mode.is_some()),
        ("muon", "--muon-extra-scale-factor", flags.muon_extra_scale_factor.is_some()),
        ("muon", "--muon-num-ns-steps", flags.muon_num_ns_steps.is_some()),
    ];
    // Muon takes AdamW's flags, for parameters that are no matrices.
    let foreign = |of: &str| of != own && !(of == "adamw" && own == "muon");
    for (other, flag, _) in given.iter().filter(|g| g.2 && foreign(g.0)) {
        let e = Diagnostic::error("E0702", format!("`{flag}` is not of the optimizer that the text trains with"));
        out.push(e.help(format!("`--optimizer {other}`, or leave it out")));
    }
    let s = &train.schedule;
    if s.decay != model::Decay::Constant && s.min.0 > s.peak.0 {
        let e = Diagnostic::error("E0703", format!("the learning rate would rise from its peak, {:e}, to its final value, {:e}", s.peak.0, s.min.0));
        out.push(e.help(format!("`--min-lr {:.0e}`, a tenth of the peak, or a greater --lr", s.peak.0 / 10.0)));
    }
    let end = s.steps.saturating_sub(s.constant);
    if s.decay != model::Decay::Constant && s.steps > 0 && end <= s.warmup {
        let text = format!("the learning rate warms up for {} steps and is to have fallen at step {end}", s.warmup);
        let ways = match s.constant {
            0 => format!("`--lr-warmup-iters {}`, or a greater --lr-decay-iters", s.steps / 10),
            stays => format!("a greater --lr-decay-iters than {}, or a smaller --lr-constant-iters than {stays}", s.steps),
        };
        out.push(Diagnostic::error("E0703", text).help(ways));
    } else if let Some(falling) = s.falling.filter(|falling| s.steps > 0 && *falling > end - s.warmup) {
        let text = format!("the learning rate is to fall in the last {falling} of {end} steps, and warms up for {}", s.warmup);
        out.push(Diagnostic::error("E0703", text).help(format!("`--lr-wsd-decay-iters {}` or less, or a greater --lr-decay-iters", end - s.warmup)));
    }
    if flags.lr_decay_style == Some(DecayStyle::Wsd) && s.falling.is_none() {
        let e = Diagnostic::error("E0703", "nothing says in how many steps the learning rate falls at the end");
        out.push(e.help("`--lr-wsd-decay-iters N`, or another --lr-decay-style"));
    }
    if let Some(asked) = args.global_batch_size.filter(|asked| *asked != options.global_batch) {
        let text = format!("--global-batch-size is {asked}, and `-D batch` says {}", options.global_batch);
        out.push(Diagnostic::error("E0704", text).help("leave one of them out: both are the sequences of a step"));
    }
    out
}
