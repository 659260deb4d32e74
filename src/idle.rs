//! Flags that do nothing, or that contradict each other: each says so.
//!
//! What lacks another flag, or cannot be meant, is refused. What is merely of no use here, as `--sp` on one
//! tensor-parallel rank is in a script over many meshes, is a warning.

use crate::cli::{
    Command, DecayStyle, DeviceKind, DumpArgs, Exchanges, GpuCheckArgs, Level, OnNonfinite, OnSpike, Optimizer, OptimizerOffload, Overlap,
    ParamOffload, PlanArgs, Recompute, RunArgs, TpCommOverlap,
};
use crate::files::AUTO;
use ir::diag::Diagnostic;
use ir::graph::Init;
use ir::model::{Decay, Plan};
use ir::op::{Op, Scalar};
use ir::program::{Action, Arena, Job, Space};
use passes::compile::Compiled;
use std::thread::available_parallelism;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Refused,
    Warned,
}

use Verdict::{Refused, Warned};

/// Flags, any of which is wrong where `when` holds for all that was typed.
struct Rule<A> {
    flags: &'static [&'static str],
    when: fn(&A) -> bool,
    verdict: Verdict,
    /// Why, after the flag's name; then a way out.
    says: &'static str,
    way_out: &'static str,
}

const fn rule<A>(flags: &'static [&'static str], when: fn(&A) -> bool, verdict: Verdict, says: &'static str, way_out: &'static str) -> Rule<A> {
    Rule { flags, when, verdict, says, way_out }
}

const PLAN: &[Rule<PlanArgs>] = &[
    rule(
        &["--tp-comm-overlap-chunks"],
        |a| a.tp_comm_overlap == TpCommOverlap::Off,
        Refused,
        "says how finely `--tp-comm-overlap` cuts products, which is off",
        "add `--tp-comm-overlap`",
    ),
    rule(
        &["--recompute-method", "--recompute-num-layers"],
        |a| a.recompute != Recompute::Full,
        Refused,
        "says which layers `--recompute full` is about",
        "add `--recompute full`",
    ),
    rule(
        &["--recompute-modules"],
        |a| a.recompute != Recompute::Selective,
        Refused,
        "says what `--recompute selective` computes again",
        "add `--recompute selective`",
    ),
    rule(
        &["--param-offload"],
        |a| a.param_offload != ParamOffload::Off && a.optimizer_offload == OptimizerOffload::Off,
        Refused,
        "moves what passes read of parameters, and the optimizer's states, which are more, stay on the device",
        "add `--optimizer-offload`",
    ),
    rule(
        &["--adam-beta1", "--adam-beta2", "--adam-eps"],
        |a| a.training.optimizer.is_some_and(|o| !matches!(o, Optimizer::Adamw | Optimizer::Muon)),
        Refused,
        "is AdamW's, and the optimizer is another",
        "`--optimizer adamw`, or leave it out",
    ),
    rule(
        &["--sgd-momentum"],
        |a| a.training.optimizer.is_some_and(|o| o != Optimizer::Sgd),
        Refused,
        "is SGD's, and the optimizer is another",
        "`--optimizer sgd`, or leave it out",
    ),
    rule(
        &["--lion-beta1", "--lion-beta2"],
        |a| a.training.optimizer.is_some_and(|o| o != Optimizer::Lion),
        Refused,
        "is Lion's, and the optimizer is another",
        "`--optimizer lion`, or leave it out",
    ),
    rule(
        &["--muon-momentum", "--muon-nesterov", "--muon-scale-mode", "--muon-extra-scale-factor", "--muon-num-ns-steps"],
        |a| a.training.optimizer.is_some_and(|o| o != Optimizer::Muon),
        Refused,
        "is Muon's, and the optimizer is another",
        "`--optimizer muon`, or leave it out",
    ),
    rule(
        &["--microbatch-group-size-per-virtual-pipeline-stage"],
        |a| a.vpp.is_none_or(|v| v < 2),
        Refused,
        "is about virtual stages that take turns, and there is one per pipeline stage",
        "add `--vpp 2`",
    ),
    rule(
        &["--lr-decay-iters"],
        |a| a.training.lr_warmup_iters.zip(a.training.lr_decay_iters).is_some_and(|(warmup, decay)| decay <= warmup),
        Refused,
        "is the step at which the rate has fallen, and `--lr-warmup-iters` still raises it then",
        "a greater `--lr-decay-iters`, or a smaller `--lr-warmup-iters`",
    ),
    rule(
        &["--min-lr"],
        |a| a.training.min_lr.zip(a.training.lr).is_some_and(|(min, peak)| min > peak),
        Refused,
        "is the final learning rate, and above `--lr`, the highest one",
        "a smaller `--min-lr`, or a greater `--lr`",
    ),
    rule(
        &["--min-loss-scale"],
        |a| a.precision.min_loss_scale.zip(a.precision.initial_loss_scale).is_some_and(|(least, first)| least > first),
        Refused,
        "is the least loss scale, and above `--initial-loss-scale`, the first one",
        "a smaller `--min-loss-scale`, or a greater `--initial-loss-scale`",
    ),
    rule(
        &["--min-lr", "--lr-decay-iters", "--lr-constant-iters"],
        |a| a.training.lr_decay_style == Some(DecayStyle::Constant),
        Warned,
        "does nothing with `--lr-decay-style constant`",
        "`--lr-decay-style cosine` or `linear`, or leave it out",
    ),
    rule(
        &["--lr-wsd-decay-style", "--lr-wsd-decay-iters"],
        |a| a.training.lr_decay_style.is_some_and(|style| style != DecayStyle::Wsd),
        Warned,
        "counts with `--lr-decay-style WSD` alone",
        "`--lr-decay-style WSD`, or leave it out",
    ),
    rule(&["--sp"], |a| a.tp == 1, Warned, "does nothing on one tensor-parallel rank", "`--tp 2` or more, or leave it out"),
    rule(
        &["--overlap-moe-expert-parallel-comm"],
        |a| a.overlap == Overlap::Off,
        Refused,
        "is about communication beside compute, which `--overlap off` puts in order",
        "leave one of the two out",
    ),
    rule(&["--tp-comm-overlap"], |a| a.tp == 1, Warned, "does nothing on one tensor-parallel rank", "`--tp 2` or more, or leave it out"),
    rule(&["--cp-comm-type"], |a| a.cp == 1, Warned, "does nothing on one context-parallel rank", "`--cp 2` or more, or leave it out"),
    rule(
        &["--zero", "--use-distributed-optimizer"],
        |a| a.zero != Some(0) && a.dp.saturating_mul(a.cp) == 1,
        Warned,
        "does nothing on one data-parallel rank",
        "`--dp 2` or more, or leave it out",
    ),
    rule(
        &["--bucket-size"],
        |a| a.dp.saturating_mul(a.cp) == 1 && a.optimizer_offload == OptimizerOffload::Off,
        Warned,
        "does nothing on one data-parallel rank whose optimizer is on the device",
        "`--dp 2` or more, `--optimizer-offload`, or leave it out",
    ),
    rule(
        &["--dp-replicate"],
        |a| a.zero.unwrap_or(u8::from(a.use_distributed_optimizer)) == 0,
        Warned,
        "counts with `--zero` alone: without it every data-parallel rank has all",
        "`--zero 1`, `2` or `3`, or leave it out",
    ),
    rule(
        &[
            "--pipeline-schedule",
            "--pipeline-layers",
            "--pipeline-layout",
            "--account-for-embedding-in-pipeline-split",
            "--account-for-loss-in-pipeline-split",
        ],
        |a| a.pp == 1,
        Warned,
        "does nothing in one pipeline stage",
        "`--pp 2` or more, or leave it out",
    ),
    rule(
        &["--overlap"],
        |a| {
            a.overlap == Overlap::Off
                && a.optimizer_offload == OptimizerOffload::Off
                && !offloads_activations(a)
                && [a.dp, a.cp, a.tp, a.pp] == [1; 4]
        },
        Warned,
        "does nothing on one rank, which communicates with nobody",
        "leave it out",
    ),
    rule(
        &["-D"],
        |a| a.define.iter().enumerate().any(|(k, (name, _))| a.define[..k].iter().any(|(n, _)| n == name)),
        Warned,
        "sets a setting twice, of which the last counts",
        "leave the others out",
    ),
];

const RUN: &[Rule<RunArgs>] = &[
    rule(
        &["--nccl-max-ctas"],
        |a| a.exchanges != Exchanges::Nccl,
        Refused,
        "is about NCCL, by which these ranks do not exchange",
        "add `--exchanges nccl`",
    ),
    rule(
        &["--eval-interval"],
        |a| a.eval_interval > 0 && a.valid_data.is_empty() && !a.has_sets(),
        Refused,
        "says when to take a held-out loss, and there is no held-out data",
        "add `--valid-data FILE`",
    ),
    rule(
        &["--eval-iters"],
        |a| a.valid_data.is_empty() && !a.has_sets(),
        Refused,
        "is about held-out losses, and there is no held-out data",
        "add `--valid-data FILE`",
    ),
    rule(
        &["--eval-iters"],
        |a| a.has_sets() && a.eval_interval == 0,
        Refused,
        "is about held-out losses, and none is asked for",
        "add `--eval-interval N`, steps between them",
    ),
    rule(
        &["--valid-data", "--valid-data-path", "--test-data-path"],
        |a| a.eval_interval == 0,
        Refused,
        "is read for held-out losses, and none is asked for",
        "add `--eval-interval N`, steps between them",
    ),
    rule(
        &["--eval-interval"],
        |a| !a.has_sets() && a.steps.is_some_and(|steps| a.eval_interval > steps),
        Warned,
        "is more than `--steps`: no held-out loss is taken",
        "a smaller `--eval-interval`",
    ),
    rule(
        &["--multiple-validation-sets", "--full-validation"],
        |a| !a.has_sets() || a.eval_interval == 0,
        Refused,
        "is about held-out losses of data sets, and there are none",
        "add `--data-path PREFIX --eval-interval N`",
    ),
    rule(
        &["--multiple-validation-sets", "--full-validation"],
        |a| a.eval_interval > 0 && !a.train_data_path.is_empty() && a.valid_data_path.is_empty(),
        Refused,
        "is about validation data sets, and there are none",
        "add `--valid-data-path PREFIX`",
    ),
    rule(
        &["--split"],
        |a| a.data_path.is_empty() && a.data_args_path.is_none(),
        Refused,
        "says how data sets are shared out, and none are named",
        "add `--data-path PREFIX`",
    ),
    rule(
        &["--data-cache-path"],
        |a| !a.has_sets(),
        Refused,
        "is where orders of data sets' samples are kept, and none are named",
        "add `--data-path PREFIX`",
    ),
    rule(
        &["--packing", "--loss-mask"],
        |a| !a.has_sets(),
        Refused,
        "is about documents of data sets, and none are named",
        "add `--data-path PREFIX`, which `mcc data tokenize` makes of texts",
    ),
    rule(
        &["--save-interval", "--save-seconds", "--keep"],
        |a| a.save.is_none(),
        Refused,
        "is about checkpoints, and none are written",
        "add `--save DIR`",
    ),
    rule(
        &["--allow-changed"],
        |a| a.load.is_none() && a.resume.is_none(),
        Warned,
        "is about a run that goes on, and this one begins",
        "add `--load` or `--resume`, or leave it out",
    ),
    rule(
        &["--save-interval"],
        |a| a.steps.is_some_and(|steps| a.save_interval >= steps),
        Warned,
        "is no less than `--steps`: the only checkpoint is that after the last step",
        "a smaller `--save-interval`, or leave it out",
    ),
    rule(
        &["--restarts"],
        |a| a.restarts > 0 && (a.save.is_none() || a.save_interval == 0 && a.save_seconds.is_none()),
        Refused,
        "starts a run again from its last checkpoint, and none are written on the way",
        "add `--save DIR --save-interval N`",
    ),
    rule(
        &["--on-spike"],
        |a| a.on_spike == OnSpike::Back && a.restarts == 0,
        Refused,
        "goes back by starting again, which --restarts allows",
        "add `--restarts R --save DIR --save-interval N`",
    ),
    rule(
        &["--spike-factor"],
        |a| a.on_spike == OnSpike::Ignore,
        Refused,
        "says when a loss jumps, and nothing happens then",
        "add `--on-spike back`",
    ),
    rule(
        &["--resume"],
        |a| a.save.is_none() && a.resume.as_ref().is_some_and(|r| r.as_os_str() == AUTO),
        Refused,
        "`auto` goes on from the newest checkpoint in the directory of `--save`, and there is none",
        "add `--save DIR`, or name what to resume from",
    ),
    rule(
        &["--seed"],
        |a| a.resume.as_ref().is_some_and(|r| r.as_os_str() != AUTO),
        Refused,
        "is that of the run from which `--resume` goes on",
        "leave it out",
    ),
    rule(
        &["--save-state"],
        |a| a.save_weights.is_some() && a.save_weights == a.save_state,
        Refused,
        "names the file of `--save-weights`, and one would replace the other",
        "two names; `--init` reads weights from either",
    ),
    rule(
        &["--metrics"],
        |a| a.metrics.is_some() && [&a.save_weights, &a.save_state, &a.trace].contains(&&a.metrics),
        Refused,
        "names a file that something else is written to",
        "a name of its own, such as `--metrics metrics.jsonl`",
    ),
    rule(
        &["--max-skips"],
        |a| a.on_nonfinite == OnNonfinite::Stop,
        Refused,
        "says how many steps in a row may be skipped, and none is",
        "add `--on-nonfinite skip`",
    ),
    rule(
        &["--threads-per-rank"],
        |a| a.threads_per_rank.is_some_and(|t| available_parallelism().is_ok_and(|cores| t > cores.get())),
        Warned,
        "is more than this machine has cores: threads wait for each other, and steps take longer",
        "leave it out: ranks share out the cores",
    ),
];

const DUMP: &[Rule<DumpArgs>] = &[rule(
    &["--class"],
    |a| matches!(a.level, Level::Graph | Level::Sharded | Level::Schedule),
    Refused,
    "chooses a program class, and this level is above them",
    "`--level local` and those below have classes",
)];

const GPU_CHECK: &[Rule<GpuCheckArgs>] = &[
    rule(
        &["--device"],
        |a| a.device == DeviceKind::Cpu,
        Refused,
        "names the CPU, and the checks are of GPUs",
        "`--device cuda`, or `--device emulated` without one",
    ),
    rule(&["--no-times"], |a| a.device == DeviceKind::Emulated, Warned, "does nothing in the emulator, where no times are taken", "leave it out"),
];

/// What is wrong with the flags that were typed (`--sp`), and what is merely of no use.
#[derive(Default)]
pub struct FlagFindings {
    pub errors: Vec<String>,
    pub warnings: Vec<Diagnostic>,
}

/// Looks a command's flags through, by themselves.
pub fn look(command: &Command, typed: &[String]) -> FlagFindings {
    let mut found = FlagFindings::default();
    match command {
        Command::Check(a) => found.apply(PLAN, &a.plan, typed),
        Command::Compile(a) => found.apply(PLAN, &a.plan, typed),
        Command::Explain(a) => found.apply(PLAN, &a.plan, typed),
        Command::Simulate(a) => found.apply(PLAN, &a.plan, typed),
        Command::Run(a) => found.apply(RUN, a, typed),
        Command::Dump(a) => found.apply(DUMP, a, typed),
        Command::GpuCheck(a) => found.apply(GPU_CHECK, a, typed),
        Command::Report(_)
        | Command::Passes
        | Command::Opt(_)
        | Command::Reduce(_)
        | Command::Fmt(_)
        | Command::Import(_)
        | Command::Export(_)
        | Command::Checkpoint(_)
        | Command::Data(_)
        | Command::Machine(_)
        // `mcc plan` has yet to find the mesh; `mcc compile` says which flags are idle on it.
        | Command::Plan(_)
        | Command::Calibrate(_)
        | Command::CodegenWorker => {}
    }
    found
}

impl FlagFindings {
    fn apply<A>(&mut self, rules: &[Rule<A>], args: &A, typed: &[String]) {
        for r in rules.iter().filter(|r| (r.when)(args)) {
            for flag in r.flags.iter().filter(|f| typed.iter().any(|t| t == *f)) {
                match r.verdict {
                    Refused => self.errors.push(format!("`{flag}` {}: {}", r.says, r.way_out)),
                    Warned => self.warnings.push(idle(flag, r.says).help(r.way_out)),
                }
            }
        }
    }
}

/// W0701: a flag does nothing.
fn idle(flag: &str, says: &str) -> Diagnostic {
    Diagnostic::warning("W0701", format!("`{flag}` {says}"))
}

/// Axes of the mesh over which the text's plan splits nothing.
pub fn in_plan(args: &PlanArgs, plan: &Plan) -> Vec<Diagnostic> {
    let repeats = "ranks repeat each other's work";
    let sp = args.sp && args.tp > 1;
    let axes = [("dp", args.dp > 1, repeats), ("cp", args.cp > 1, repeats), ("tp", args.tp > 1, repeats), ("sp", sp, "activations stay whole")];
    let splits = |axis: &str| plan.entries.iter().any(|e| e.axis == axis || e.axis.ends_with(&format!(".{axis}")));
    let idle_axes = axes.into_iter().filter(|(axis, several, _)| *several && !splits(axis));
    let says = |(axis, _, so): (&str, bool, &str)| {
        let d = idle(&format!("--{axis}"), &format!("splits nothing: the text's plan has no `{axis}`, so that {so}"));
        d.help(format!("a line `{axis}: DIM;` in the plan of the text, or leave it out"))
    };
    idle_axes.map(says).collect()
}

fn offloads_activations(args: &PlanArgs) -> bool {
    args.activation_offload.is_some() || args.activation_offload_layers.is_some()
}

/// What the flags of a plan do not change in this model.
pub fn in_model(args: &PlanArgs, compiled: &Compiled) -> Vec<Diagnostic> {
    let job = &compiled.job;
    let mut out = vec![];
    if !compiled.graph.body.nodes.iter().any(|n| matches!(n.op, Op::Dispatch(_))) {
        let typed = [
            ("--ep", args.ep > 1),
            ("--etp", args.etp.is_some()),
            ("--moe-buffer-factor", args.moe_buffer_factor.is_some()),
            ("--moe-passes", args.moe_passes.is_some()),
        ];
        let says = format!("does nothing: `{}` has no experts", job.model);
        out.extend(
            typed.iter().filter(|t| t.1).map(|(flag, _)| idle(flag, &says).help("leave it out, or write `dispatch` and `combine` into the model")),
        );
    }
    if !job.kernels.iter().any(|k| k.on == Space::Host) {
        if args.optimizer_offload != OptimizerOffload::Off {
            let d = idle("--optimizer-offload", "does nothing: the optimizer has no states that could be on the host");
            out.push(d.help("leave it out, or `--optimizer adamw`"));
        }
        if args.param_offload != ParamOffload::Off {
            out.push(idle("--param-offload", "does nothing: no parameter is updated on the host").help("leave it out"));
        }
        if args.host_target.is_some() {
            let d = idle("--host-target", "does nothing: no kernel runs on the host");
            out.push(d.help("leave it out; with `--optimizer-offload` some do"));
        }
    }
    let stashes = job.programs.iter().flat_map(|p| &p.stashes);
    if !stashes.clone().any(|s| s.space == Space::Host) {
        let typed =
            [("--activation-offload", args.activation_offload.is_some()), ("--activation-offload-layers", args.activation_offload_layers.is_some())];
        let says = "does nothing: no layer keeps for its backward pass what could wait on the host";
        out.extend(typed.iter().filter(|t| t.1).map(|(flag, _)| idle(flag, says).help("leave it out")));
    }
    if args.overlap_moe_expert_parallel_comm && !job.programs.iter().flat_map(|p| &p.bodies).any(|b| b.parts() > 1) {
        let d = idle("--overlap-moe-expert-parallel-comm", "hides nothing: no pass has an exchange that the pass of another microbatch would hide");
        out.push(d.help("leave it out, as pipelines keep more microbatches in flight with it; or several microbatches, and `--tp` or `--ep`"));
    }
    if args.training.lr_decay_style.is_none() && job.train.schedule.decay == Decay::Constant {
        let flags = &args.training;
        let typed = [
            ("--min-lr", flags.min_lr.is_some()),
            ("--lr-decay-iters", flags.lr_decay_iters.is_some()),
            ("--lr-constant-iters", flags.lr_constant_iters.is_some()),
        ];
        let says = "does nothing: the text's learning rate is constant";
        out.extend(typed.iter().filter(|t| t.1).map(|(flag, _)| idle(flag, says).help("add `--lr-decay-style cosine` or `linear`")));
    }
    if args.training.lr_decay_style.is_none() && job.train.schedule.falling.is_none() {
        let (style, iters) = (args.training.lr_wsd_decay_style.is_some(), args.training.lr_wsd_decay_iters.is_some());
        let typed = [("--lr-wsd-decay-style", style), ("--lr-wsd-decay-iters", iters)];
        let says = "does nothing: the text's learning rate is not one that stays and falls at the end";
        out.extend(typed.iter().filter(|t| t.1).map(|(flag, _)| idle(flag, says).help("add `--lr-decay-style WSD`")));
    }
    out
}

/// What the flags of a run do not change in this job.
pub fn in_job(args: &RunArgs, typed: &[String], job: &Job) -> Vec<Diagnostic> {
    let draws = (args.init.is_empty() || !args.allow_missing.is_empty()) && job.params.iter().any(|p| matches!(p.init, Init::Normal(_)));
    let mut commands = job.programs.iter().flat_map(|p| &p.bodies).flat_map(|b| &b.commands);
    let drops = commands.any(|c| matches!(&c.action, Action::Launch { scalars, .. } if scalars.contains(&Scalar::Seed)));
    let is_idle = typed.iter().any(|t| t == "--seed") && !draws && !drops && !args.has_sets();
    let says = match args.init[..] {
        [_, ..] => "does nothing: all weights are read, and there is no dropout",
        [] => "does nothing: no weights are drawn, and there is no dropout",
    };
    let mut out: Vec<Diagnostic> = is_idle.then(|| idle("--seed", says).help("leave it out")).into_iter().collect();
    let buffers = || job.programs.iter().flat_map(|p| &p.buffers);
    if args.offload_to.is_some() && !buffers().any(|b| b.arena == Arena::Disk) {
        let d = idle("--offload-to", "does nothing: this artifact keeps nothing on a disk");
        out.push(d.help("leave it out; `mcc compile --optimizer-offload=disk` makes one that does, and `--param-offload=disk`"));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;
    use clap::CommandFactory;

    /// The flags of rules that a command of mcc does not have.
    fn strangers<A>(command: &str, rules: &[Rule<A>]) -> Vec<&'static str> {
        let root = Cli::command();
        let known = root.find_subcommand(command).expect("a command");
        let has = |flag: &str| match flag.strip_prefix("--") {
            Some(long) => known.get_arguments().any(|a| a.get_long() == Some(long)),
            None => known.get_arguments().any(|a| a.get_short() == flag.chars().nth(1)),
        };
        rules.iter().flat_map(|r| r.flags).copied().filter(|f| !has(f)).collect()
    }

    #[test]
    fn rules_are_about_flags_that_there_are() {
        let none: [&str; 0] = [];
        for command in ["check", "compile", "explain"] {
            assert_eq!(strangers(command, PLAN), none, "{command}");
        }
        assert_eq!(strangers("run", RUN), none);
        assert_eq!(strangers("dump", DUMP), none);
        assert_eq!(strangers("gpu-check", GPU_CHECK), none);
    }
}
