//! How options are spelled that the rest of mcc speaks of: nowhere else.

use super::plan::CpComm;
use clap::ValueEnum;
use ir::diag::{Help, HelpPiece};
use ir::mesh::Axis;
use ir::options::{
    self, ActivationOffload, Cuts, MemoryOrder, MoeBuffer, Offload, OptionName, Options, ParamOffload, Recompute, SequenceParallel, TpOverlap, Zero,
};
use ir::pipeline::Schedule;
use ir::reason::AvoidedBy;

/// The flag of an option.
fn flag(option: OptionName) -> &'static str {
    match option {
        OptionName::Dp => "--dp",
        OptionName::Cp => "--cp",
        OptionName::Tp => "--tp",
        OptionName::Pp => "--pp",
        OptionName::Ep => "--ep",
        OptionName::Etp => "--etp",
        OptionName::Replicas => "--dp-replicate",
        OptionName::LogitsChunks => "--logits-chunks",
        OptionName::CpComm => "--cp-comm-type",
        OptionName::MicroBatch => "--micro-batch-size",
        OptionName::GlobalBatch => "--global-batch-size",
        OptionName::Vpp => "--vpp",
        OptionName::Group => "--microbatch-group-size-per-virtual-pipeline-stage",
        OptionName::PadVocabTo => "--pad-vocab-to",
        OptionName::MoeBuffer => "--moe-buffer-factor",
        OptionName::MoePasses => "--moe-passes",
        OptionName::Clip => "--clip-grad",
        OptionName::PassPairs => "--overlap-moe-expert-parallel-comm",
    }
}

/// A way out with the flags of its options.
pub fn help(help: &Help) -> String {
    help.spelled(|piece| match piece {
        HelpPiece::Words(words) => words.clone(),
        HelpPiece::Option(option) => flag(*option).into(),
        HelpPiece::CpComm(value) => of_keys(*value),
    })
}

/// How ranks get at keys, as it is typed.
fn of_keys(value: options::CpComm) -> String {
    let typed = CpComm::value_variants().iter().find(|typed| options::CpComm::from(**typed) == value);
    typed.and_then(ValueEnum::to_possible_value).map_or(String::new(), |typed| typed.get_name().into())
}

/// Orders of passes by their names.
pub const SCHEDULES: [(&str, Schedule); 5] = [
    ("1f1b", Schedule::OneFOneB),
    ("gpipe", Schedule::GPipe),
    ("zb-h1", Schedule::ZbH1),
    ("zb-v", Schedule::ZbV),
    ("dualpipev", Schedule::DualPipeV),
];

/// What would do without an exchange, after "not needed": `without --sp`.
pub fn avoided_by(change: &AvoidedBy) -> String {
    match change {
        AvoidedBy::NoSequenceParallelism => "without --sp".into(),
        AvoidedBy::NoZero => "without --zero".into(),
        AvoidedBy::NoRecomputation => "without recomputation".into(),
        AvoidedBy::GreaterMoeBuffer => format!("with a greater {}", flag(OptionName::MoeBuffer)),
        AvoidedBy::OneRank(axis) => format!("with {} 1", of_axis(*axis)),
        AvoidedBy::SameData(axis) => format!("with {} 1: its ranks see other data", of_axis(*axis)),
        AvoidedBy::OneStage => format!("with {} 1, or if one stage had all of it", flag(OptionName::Pp)),
        AvoidedBy::Unlisted { axis, dim } => format!("with {} 1, or if the plan's `{axis}` did not list `{dim}`", of_axis(*axis)),
        AvoidedBy::Unsplit(axis) => format!("with {} 1, or if the plan's `{axis}` listed no dim that is summed over here", of_axis(*axis)),
    }
}

/// The flag that says how many ranks, or microbatches, an axis has.
fn of_axis(axis: Axis) -> &'static str {
    flag(match axis {
        Axis::Microbatch => OptionName::GlobalBatch,
        Axis::Pp => OptionName::Pp,
        Axis::Dp | Axis::Edp => OptionName::Dp,
        Axis::Cp => OptionName::Cp,
        Axis::Tp => OptionName::Tp,
        Axis::Ep => OptionName::Ep,
        Axis::Etp => OptionName::Etp,
    })
}

/// The flags that turn options into others, of those in which plans that mcc proposes differ from what was asked for:
/// the mesh first.
pub fn changes(from: &Options, to: &Options) -> Vec<String> {
    let mut out = vec![];
    let set = |option: OptionName, value: u64| format!("{} {value}", flag(option));
    let moved = [from.dp, from.tp, from.pp] != [to.dp, to.tp, to.pp];
    if moved {
        out.extend([(OptionName::Dp, to.dp), (OptionName::Tp, to.tp), (OptionName::Pp, to.pp)].map(|(option, value)| set(option, value)));
    }
    let others = [(OptionName::Cp, from.cp, to.cp), (OptionName::Ep, from.ep, to.ep), (OptionName::Replicas, from.replicas, to.replicas)];
    out.extend(others.into_iter().filter(|(_, from, to)| from != to).map(|(option, _, to)| set(option, to)));
    out.extend(
        [(OptionName::Etp, from.etp, to.etp), (OptionName::Vpp, from.vpp, to.vpp)]
            .into_iter()
            .filter(|(_, from, to)| from != to)
            .filter_map(|(option, _, to)| Some(set(option, to?))),
    );
    if from.micro_batch != to.micro_batch {
        out.push(set(OptionName::MicroBatch, to.micro_batch));
    }
    // The default of the global batch follows from the mesh and the microbatch.
    if moved || [from.micro_batch, from.global_batch] != [to.micro_batch, to.global_batch] {
        out.push(set(OptionName::GlobalBatch, to.global_batch));
    }
    if from.schedule != to.schedule
        && let Some((name, _)) = SCHEDULES.iter().find(|(_, schedule)| *schedule == to.schedule)
    {
        out.push(format!("--pipeline-schedule {name}"));
    }
    if from.layout != to.layout && to.layout == Cuts::Balanced {
        out.push("--pipeline-layout auto".into());
    }
    if from.sp != to.sp && to.sp == SequenceParallel::On {
        out.push("--sp".into());
    }
    if from.recompute != to.recompute {
        out.push(match to.recompute {
            Recompute::None => "--recompute none".into(),
            Recompute::Selective => "--recompute selective".into(),
            // `--recompute full` stands there already; the method and the number of layers may have other values.
            Recompute::Uniform(layers) if matches!(from.recompute, Recompute::Block(_)) => {
                format!("--recompute-method uniform --recompute-num-layers {layers}")
            }
            Recompute::Uniform(1) => "--recompute full".into(),
            Recompute::Uniform(layers) => format!("--recompute full --recompute-num-layers {layers}"),
            Recompute::Block(layers) => format!("--recompute full --recompute-method block --recompute-num-layers {layers}"),
        });
    }
    if from.memory_order != to.memory_order && to.memory_order == MemoryOrder::Memory {
        out.push("--memory-order memory".into());
    }
    if let Some(chunks) = to.logits_chunks.filter(|_| from.logits_chunks != to.logits_chunks) {
        out.push(format!("{} {chunks}", flag(OptionName::LogitsChunks)));
    }
    if let MoeBuffer::Factor(factor) = to.moe_buffer
        && from.moe_buffer != to.moe_buffer
    {
        out.push(format!("{} {factor}", flag(OptionName::MoeBuffer)));
    }
    if from.moe_passes != to.moe_passes {
        out.push(format!("{} {}", flag(OptionName::MoePasses), to.moe_passes));
    }
    if from.zero != to.zero {
        let level = Zero::ALL.iter().position(|z| *z == to.zero).expect("invariant: all levels are listed");
        out.push(format!("--zero {level}"));
    }
    if from.offload != to.offload {
        match to.offload {
            Offload::Off => {}
            Offload::Optimizer => out.push("--optimizer-offload".into()),
            Offload::Disk => out.push("--optimizer-offload=disk".into()),
        }
    }
    if from.param_offload != to.param_offload {
        match to.param_offload {
            ParamOffload::Off => {}
            ParamOffload::Host => out.push("--param-offload".into()),
            ParamOffload::Disk => out.push("--param-offload=disk".into()),
        }
    }
    if from.activation_offload != to.activation_offload && to.activation_offload == ActivationOffload::Layers(None) {
        out.push("--activation-offload all".into());
    }
    if from.cp_comm != to.cp_comm {
        out.push(format!("{} {}", flag(OptionName::CpComm), of_keys(to.cp_comm)));
    }
    if from.pass_pairs != to.pass_pairs && to.pass_pairs {
        out.push(flag(OptionName::PassPairs).into());
    }
    if let TpOverlap::Pipeline { chunks } = to.tp_overlap
        && from.tp_overlap != to.tp_overlap
    {
        out.push(format!("--tp-comm-overlap --tp-comm-overlap-chunks {chunks}"));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use crate::options::options;
    use clap::{CommandFactory, Parser};

    #[test]
    fn options_have_flags_that_there_are() {
        let root = Cli::command();
        let known = root.find_subcommand("compile").expect("a command");
        for option in OptionName::ALL {
            assert!(known.get_arguments().any(|a| a.get_long() == flag(option).strip_prefix("--")), "{option:?}");
        }
    }

    #[test]
    fn ways_to_the_keys_are_called_as_they_are_typed() {
        let said = options::CpComm::ALL.map(|way| help(&Help::from("").option(OptionName::CpComm).and(" ").cp_comm(way)));
        assert_eq!(said, ["p2p", "all_gather", "a2a", "a2a+p2p"].map(|way| format!("--cp-comm-type {way}")));
    }

    fn typed(flags: &str) -> Options {
        let words = ["mcc", "compile", "model.mdl"].into_iter().chain(flags.split_whitespace());
        let Command::Compile(args) = Cli::parse_from(words).command else { panic!("it is a compile") };
        options(&args.plan).unwrap_or_else(|_| panic!("options"))
    }

    #[test]
    fn flags_make_the_changes_that_they_are_said_to_make() {
        let asked = "--micro-batch-size 4";
        let from = Options { dp: 8, micro_batch: 4, global_batch: 32, ..Options::default() };
        assert_eq!(typed("--dp 8 --micro-batch-size 4"), from);
        let all = Options {
            dp: 2,
            tp: 2,
            pp: 2,
            sp: SequenceParallel::On,
            recompute: Recompute::Uniform(1),
            zero: Zero::Params,
            replicas: 2,
            memory_order: MemoryOrder::Memory,
            logits_chunks: Some(4),
            moe_buffer: MoeBuffer::Factor(0.5),
            moe_passes: 4,
            offload: Offload::Optimizer,
            param_offload: ParamOffload::Disk,
            activation_offload: ActivationOffload::Layers(None),
            ..from.clone()
        };
        let searched = Options {
            dp: 4,
            cp: 2,
            pp: 2,
            ep: 4,
            etp: Some(2),
            vpp: Some(3),
            layout: Cuts::Balanced,
            cp_comm: options::CpComm::AllToAllAndRing,
            pass_pairs: true,
            tp_overlap: TpOverlap::Pipeline { chunks: 8 },
            ..from.clone()
        };
        for (name, schedule) in SCHEDULES {
            let to = Options { schedule, ..searched.clone() };
            let flags = changes(&from, &to).join(" ");
            assert_eq!(typed(&format!("{asked} {flags}")), to, "{name}: {flags}");
        }
        let disk = Options { offload: Offload::Disk, param_offload: ParamOffload::Host, ..from.clone() };
        for to in [Options { recompute: Recompute::Selective, ..from.clone() }, Options { recompute: Recompute::Block(3), ..from.clone() }, disk, all]
        {
            let flags = changes(&from, &to).join(" ");
            let ranks = if to.dp == from.dp { "--dp 8" } else { "" };
            assert_eq!(typed(&format!("{asked} {ranks} {flags}")), to, "{flags}");
        }
        let smaller = Options { micro_batch: 1, ..from.clone() };
        assert_eq!(changes(&from, &smaller), ["--micro-batch-size 1", "--global-batch-size 32"]);
        assert!(changes(&from, &from).is_empty());
    }
}
