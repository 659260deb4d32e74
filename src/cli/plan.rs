//! The plan of a job: what `mcc compile`, `mcc check`, `mcc explain`, `mcc simulate` and `mcc plan` share.

use super::limits::LimitArgs;
use super::training::{PrecisionArgs, TrainingArgs};
use super::values::{bytes, define, factor, from_one};
use clap::{Args, ValueEnum};
use ir::options;
use std::path::PathBuf;

/// Where optimizers run, and keep their states.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OptimizerOffload {
    /// On the device
    Off,
    /// On the host, in its memory
    Host,
    /// On the host, which reads its states from a disk and writes them back, piece by piece, while it computes; `mcc
    /// run --offload-to DIR` says where
    Disk,
}

/// Where what passes read of parameters rests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ParamOffload {
    /// On the device
    Off,
    /// In the host's memory
    Host,
    /// On a disk of the host; `mcc run --offload-to DIR` says where
    Disk,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Overlap {
    On,
    Off,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MemoryOrder {
    /// Communication under way beside compute
    Time,
    /// Few bytes in use at a time
    Memory,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TpCommOverlap {
    Off,
    /// In chunks of rows
    Pipeline,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CpComm {
    /// Pass keys and values round the ranks (ring attention)
    P2p,
    /// Gather keys and values
    #[value(name = "all_gather")]
    AllGather,
    /// Exchange positions for heads (Ulysses)
    A2a,
    /// Exchange positions for heads as far as they go, pass keys and values round for the rest
    #[value(name = "a2a+p2p")]
    A2aP2p,
}

impl From<CpComm> for options::CpComm {
    fn from(typed: CpComm) -> options::CpComm {
        match typed {
            CpComm::P2p => options::CpComm::Ring,
            CpComm::A2aP2p => options::CpComm::AllToAllAndRing,
            CpComm::AllGather => options::CpComm::AllGather,
            CpComm::A2a => options::CpComm::AllToAll,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Recompute {
    None,
    /// What `--recompute-modules` or the plan's `recompute` names [default: the attention core]
    Selective,
    /// Layers, but for what enters them
    Full,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RecomputeMethod {
    /// All layers of a stage, in units
    Uniform,
    /// The first layers of each stage, one by one
    Block,
}

#[derive(Args, Clone)]
pub struct PlanArgs {
    /// Sets a setting of the model text
    #[arg(short = 'D', value_name = "NAME=VALUE", value_parser = define)]
    pub define: Vec<(String, String)>,

    /// All that a plan says that `mcc plan` has written: the flags there, with those given here
    #[arg(long = "plan", value_name = "PLAN.json", help_heading = "Mesh")]
    pub plan_file: Option<PathBuf>,
    /// Data-parallel ranks
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = from_one::<u64>, help_heading = "Mesh")]
    pub dp: u64,
    /// Context-parallel ranks: they split the sequence
    #[arg(long, visible_alias = "context-parallel-size", default_value_t = 1, value_name = "N", value_parser = from_one::<u64>, help_heading = "Mesh")]
    pub cp: u64,
    /// How attention gets at the keys of other context-parallel ranks
    #[arg(long, value_enum, default_value = "p2p", help_heading = "Mesh")]
    pub cp_comm_type: CpComm,
    /// Ranks over which experts are split; they are among the data-, context- and tensor-parallel ones
    #[arg(long, visible_alias = "expert-model-parallel-size", default_value_t = 1, value_name = "N", value_parser = from_one::<u64>, help_heading = "Mesh")]
    pub ep: u64,
    /// Ranks over which each expert is split [default: tp]
    #[arg(long, visible_alias = "expert-tensor-parallel-size", value_name = "N", value_parser = from_one::<u64>, help_heading = "Mesh")]
    pub etp: Option<u64>,
    /// Tensor-parallel ranks
    #[arg(long, visible_alias = "tensor-model-parallel-size", default_value_t = 1, value_name = "N", value_parser = from_one::<u64>, help_heading = "Mesh")]
    pub tp: u64,
    /// Sequence parallelism: between the tensor-parallel regions activations are split along the sequence
    #[arg(long, visible_alias = "sequence-parallel", help_heading = "Mesh")]
    pub sp: bool,
    /// What data-parallel ranks share out: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too (FSDP).
    #[arg(long, value_name = "LEVEL", value_parser = clap::value_parser!(u8).range(0..=3), conflicts_with = "use_distributed_optimizer")]
    pub zero: Option<u8>,
    /// The same as `--zero 1`.
    #[arg(long)]
    pub use_distributed_optimizer: bool,
    /// Groups of neighbouring data-parallel ranks, each of which has all of what `--zero` shares out (hybrid sharding, HSDP)
    #[arg(long, visible_aliases = ["num-distributed-optimizer-instances", "data-parallel-replicate-degree"], default_value_t = 1, value_name = "N", value_parser = from_one::<u64>)]
    pub dp_replicate: u64,
    /// Where the optimizer is, with its states and the weights that it works on, also beside GPUs (alone: `host`);
    /// devices keep what passes read, unless `--param-offload` says otherwise; the same numbers either way
    #[arg(long, visible_alias = "optimizer-cpu-offload", value_enum, num_args = 0..=1, require_equals = true, default_value = "off", default_missing_value = "host", value_name = "WHERE")]
    pub optimizer_offload: OptimizerOffload,
    /// Where the parameters rest that passes read (alone: `host`): each pass copies them to the device, layer by
    /// layer, ahead of their use; the same numbers either way
    #[arg(long, value_enum, num_args = 0..=1, require_equals = true, default_value = "off", default_missing_value = "host", value_name = "WHERE")]
    pub param_offload: ParamOffload,
    /// Gradients and new parameters travel together until there are as many of their elements [default: 40M, or 1M per
    /// data-parallel rank if that is more]; updates on the host go by pieces of about as many [default: 8M]
    #[arg(long, value_name = "N", value_parser = from_one::<u64>)]
    pub bucket_size: Option<u64>,
    /// Room for rows (a token and an expert that it chose): F times a rank's share if all experts get equally many; rows beyond it are computed afterwards in the same room, none is dropped, and a step with more than all passes have room for stops with an error [default: 1.25, or more where all passes would not have room for all there can be]
    #[arg(long, value_name = "F", value_parser = factor)]
    pub moe_buffer_factor: Option<f64>,
    /// Computes rows of experts in up to N passes, one after the other in the same room; those after the first run only in steps that need them; 1 has room for all rows there can be [default: 32]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=options::MOST_MOE_PASSES))]
    pub moe_passes: Option<u64>,
    /// Pipeline stages
    #[arg(long, visible_alias = "pipeline-model-parallel-size", default_value_t = 1, value_name = "N", value_parser = from_one::<u64>, help_heading = "Mesh")]
    pub pp: u64,
    /// Layers on each virtual stage, for example `3,3,2`; as even as possible by default
    #[arg(long, value_name = "N,N,..", value_delimiter = ',', help_heading = "Mesh")]
    pub pipeline_layers: Option<Vec<u32>>,
    /// What each virtual stage holds, for example `Et*3|t*4|t*3L` (E the embedding, t a layer, L the loss), or `auto`: balanced by arithmetic
    #[arg(long, value_name = "TEXT|auto", conflicts_with = "pipeline_layers", help_heading = "Mesh")]
    pub pipeline_layout: Option<String>,
    /// The embedding counts as a layer where layers are cut evenly: the first virtual stage has one less
    #[arg(long, conflicts_with_all = ["pipeline_layers", "pipeline_layout"], help_heading = "Mesh")]
    pub account_for_embedding_in_pipeline_split: bool,
    /// The loss counts as a layer where layers are cut evenly: the last virtual stage has one less
    #[arg(long, conflicts_with_all = ["pipeline_layers", "pipeline_layout"], help_heading = "Mesh")]
    pub account_for_loss_in_pipeline_split: bool,
    /// The order of passes: `1f1b`, `gpipe`, `zb-h1`, `zb-v`, `dualpipev`, or a file with a line `0: F0.0 F0.1 B0.0
    /// ...` per stage
    #[arg(long, default_value = "1f1b", value_name = "NAME|FILE", help_heading = "Mesh")]
    pub pipeline_schedule: String,
    /// Virtual stages of each pipeline stage: more than one interleaves `1f1b` [default: as many as the schedule needs]
    #[arg(long, visible_alias = "num-virtual-stages-per-pipeline-rank", value_name = "V", value_parser = from_one::<u64>, help_heading = "Mesh")]
    pub vpp: Option<u64>,
    /// Microbatches that go through a virtual stage before the stage's next one has its turn [default: pp]
    #[arg(long, value_name = "G", value_parser = from_one::<u64>, help_heading = "Mesh")]
    pub microbatch_group_size_per_virtual_pipeline_stage: Option<u64>,
    /// Communication on streams of its own, beside compute; the same numbers either way
    #[arg(long, value_enum, default_value = "on", help_heading = "Mesh")]
    pub overlap: Overlap,
    /// Communication of one microbatch beside compute of another, as a forward pass and the backward pass after it
    /// run side by side: exchanges of experts and those of tensor parallelism; the same numbers either way
    #[arg(long, help_heading = "Mesh")]
    pub overlap_moe_expert_parallel_comm: bool,
    /// Tensor-parallel gathers and reductions beside the matrix products that they feed or complete; the same numbers either way
    #[arg(long, value_enum, num_args = 0..=1, default_value = "off", default_missing_value = "pipeline", value_name = "HOW", help_heading = "Mesh")]
    pub tp_comm_overlap: TpCommOverlap,
    /// Most chunks of a product beside tensor-parallel communication
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u64).range(2..=1024), help_heading = "Mesh")]
    pub tp_comm_overlap_chunks: u64,
    /// Sequences per microbatch and data-parallel rank [default: 1]
    #[arg(long, visible_alias = "micro_batch_size", value_name = "B", value_parser = from_one::<u64>, help_heading = "Batch")]
    pub micro_batch_size: Option<u64>,
    /// Sequences per step, over all ranks and microbatches [default: micro-batch-size x dp x pp]
    #[arg(long, visible_alias = "global_batch_size", value_name = "G", value_parser = from_one::<u64>, help_heading = "Batch")]
    pub global_batch_size: Option<u64>,
    /// Pads vocabularies to a multiple of this times tp (Megatron-LM: 128); by default to what tp divides
    #[arg(long, visible_alias = "make-vocab-size-divisible-by", default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 20), help_heading = "Mesh")]
    pub pad_vocab_to: u64,

    /// Most bytes of a rank in its device's memory, for example `80GiB`, `512MB` or plain bytes: more is an error that says who needs it and what would fit
    #[arg(long, value_name = "BYTES", value_parser = bytes, help_heading = "Memory")]
    pub memory: Option<u64>,
    /// The same of what is offloaded to the host's memory, optimizer states and activations; on CPUs of all that a
    /// rank takes
    #[arg(long, value_name = "BYTES", value_parser = bytes, help_heading = "Memory")]
    pub host_memory: Option<u64>,
    /// Chunks of tokens in which logits, loss and their gradients are computed, so that no buffer has all tokens times
    /// all words; 1 for none [default: of 256 MiB and 1,024 tokens at least]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1024), help_heading = "Memory")]
    pub logits_chunks: Option<u64>,
    /// What the order of a rank's commands saves; `memory` hides less communication
    #[arg(long, value_enum, default_value = "time", help_heading = "Memory")]
    pub memory_order: MemoryOrder,
    /// What the backward pass computes again instead of keeping it
    #[arg(long, visible_alias = "recompute-granularity", value_enum, default_value = "none", help_heading = "Memory")]
    pub recompute: Recompute,
    /// What `selective` recomputes, in the place of what the plan names: functions of the text, or names of
    /// calls (`.. as mlp`)
    #[arg(long, value_name = "NAME,..", value_delimiter = ',', help_heading = "Memory")]
    pub recompute_modules: Option<Vec<String>>,
    /// Which layers `full` recomputes [default: uniform]
    #[arg(long, value_enum, help_heading = "Memory")]
    pub recompute_method: Option<RecomputeMethod>,
    /// Layers of a unit (uniform), or of each stage (block) [default: 1]
    #[arg(long, value_name = "N", value_parser = from_one::<u32>, help_heading = "Memory")]
    pub recompute_num_layers: Option<u32>,
    /// Has activations wait in the host's memory for the backward pass, copied beside compute: `all` that layers
    /// keep, or what these functions and calls (`.. as mlp`) compute
    #[arg(long, value_name = "all|NAME,..", value_delimiter = ',', help_heading = "Memory")]
    pub activation_offload: Option<Vec<String>>,
    /// Offloads activations of the first so many layers of every stage [default: all]
    #[arg(long, visible_alias = "cpu-offloading-num-layers", value_name = "N", value_parser = from_one::<u32>, help_heading = "Memory")]
    pub activation_offload_layers: Option<u32>,

    #[command(flatten)]
    pub precision: PrecisionArgs,
    #[command(flatten)]
    pub training: TrainingArgs,
    #[command(flatten)]
    pub limits: LimitArgs,

    /// `cpu` is this machine's, `x86-64-v3` any with AVX2; `sm_80` and `sm_90a` are GPUs
    #[arg(long, default_value = "cpu", help_heading = "Output")]
    pub target: String,
    /// CPU of the kernels that run on the host beside GPUs: `x86-64-v3` any with AVX2, `cpu` this machine's [default: x86-64-v3]
    #[arg(long, value_name = "TARGET", help_heading = "Output")]
    pub host_target: Option<String>,
}
