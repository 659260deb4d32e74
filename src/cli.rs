//! What can be typed.

use clap::{Args, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;

#[derive(Parser)]
#[command(name = "mcc", version, about = "Compiles a model text ahead of time into one program per rank, and runs it")]
#[command(
    after_help = "A first model:\n  mcc compile models/gpt2.mdl --tp 2 --pp 2 -D layers=4 -D hidden=128 -D heads=4 -D seq=64 -D vocab=256 -o gpt2.mcc\n  mcc run gpt2.mcc --data README.md --steps 20"
)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand)]
pub enum Command {
    /// Reads a model text and says everything that is wrong with it
    Check(CheckArgs),
    /// Formats model texts in place
    Fmt(FmtArgs),
    /// Compiles a model text into an artifact
    Compile(Box<CompileArgs>),
    /// Says what a line of a model text costs, or what a job communicates and why
    Explain(Box<ExplainArgs>),
    /// Starts the ranks of an artifact and trains
    Run(Box<RunArgs>),
    /// Prints a level of an artifact
    Dump(DumpArgs),
    /// Reads a foreign checkpoint into a model text and weights
    #[command(subcommand)]
    Import(Import),
    /// Writes weights as a foreign checkpoint
    #[command(subcommand)]
    Export(Export),
    /// Checks kernels, steps and exchanges on a GPU, and times them
    GpuCheck(GpuCheckArgs),
    /// Compiles kernels that come on standard input
    #[command(hide = true)]
    CodegenWorker,
}

#[derive(Args)]
pub struct CheckArgs {
    /// The model text
    pub model: PathBuf,
    /// Sets a setting of the model text
    #[arg(short = 'D', value_name = "NAME=VALUE", value_parser = define)]
    pub define: Vec<(String, String)>,
}

#[derive(Args)]
pub struct FmtArgs {
    /// The model texts
    #[arg(required = true)]
    pub models: Vec<PathBuf>,
    /// Change nothing; fail if a text is not formatted
    #[arg(long)]
    pub check: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Overlap {
    On,
    Off,
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

/// The working precision: what unmarked floats of a model text are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Precision {
    Fp32,
    /// Weights, their gradients and the optimizer in f32; a bf16 copy of the weights is made once a step
    Bf16,
    /// As bf16, and the loss is scaled so that small gradients survive
    Fp16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Recompute {
    None,
    /// What the functions compute that the plan's `recompute` names [default: the attention core]
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

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Optimizer {
    Adamw,
    Sgd,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DecayStyle {
    Constant,
    Linear,
    Cosine,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Level {
    /// The logical graph: forward, backward, update
    Graph,
    /// With a sharding per value and the reshards between them
    Sharded,
    /// Per program class: local shapes and collectives
    Local,
    /// The passes of every pipeline stage in order, as `--pipeline-schedule` reads them
    Schedule,
    /// Per program class: buffers, commands, schedule
    Program,
    /// Kernels as mcc defines them
    Kernel,
    /// The graph levels as MLIR (generic form, unregistered dialect `mcc`), and the loop kernels
    Mlir,
    /// Kernels as LLVM IR
    Llvm,
    /// Kernels as assembly
    Asm,
    /// Kernels for GPUs, as the artifact has them, with the lines of the model text
    Ptx,
}

impl Level {
    pub fn name(self) -> &'static str {
        match self {
            Level::Graph => "graph",
            Level::Sharded => "sharded",
            Level::Local => "local",
            Level::Schedule => "schedule",
            Level::Program => "program",
            Level::Kernel => "kernel",
            Level::Mlir => "mlir",
            Level::Llvm => "llvm",
            Level::Asm => "asm",
            Level::Ptx => "ptx",
        }
    }
}

#[derive(Args)]
pub struct ExplainArgs {
    /// Every collective with its line, reason, group and bytes, and what would do without it (of an artifact always)
    #[arg(long)]
    pub collectives: bool,
    /// For tools
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub compile: CompileArgs,
}

#[derive(Args, Clone)]
pub struct CompileArgs {
    /// The model text (`explain`: MODEL.mdl:LINE, or an artifact)
    pub model: PathBuf,
    /// Sets a setting of the model text
    #[arg(short = 'D', value_name = "NAME=VALUE", value_parser = define)]
    pub define: Vec<(String, String)>,

    /// Data-parallel ranks
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), help_heading = "Mesh")]
    pub dp: u64,
    /// Context-parallel ranks: they split the sequence
    #[arg(long, visible_alias = "context-parallel-size", default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), help_heading = "Mesh")]
    pub cp: u64,
    /// How attention gets at the keys of other context-parallel ranks
    #[arg(long, value_enum, default_value = "p2p", help_heading = "Mesh")]
    pub cp_comm_type: CpComm,
    /// Ranks over which experts are split; they are among the data-, context- and tensor-parallel ones
    #[arg(long, visible_alias = "expert-model-parallel-size", default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), help_heading = "Mesh")]
    pub ep: u64,
    /// Ranks over which each expert is split [default: tp]
    #[arg(long, visible_alias = "expert-tensor-parallel-size", value_name = "N", value_parser = clap::value_parser!(u64).range(1..), help_heading = "Mesh")]
    pub etp: Option<u64>,
    /// Tensor-parallel ranks
    #[arg(long, visible_alias = "tensor-model-parallel-size", default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), help_heading = "Mesh")]
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
    /// Optimizer states, the weights that the optimizer works on, and the optimizer itself are on the host, also beside GPUs; devices keep what passes read; the same numbers either way
    #[arg(long, visible_alias = "optimizer-cpu-offload")]
    pub optimizer_offload: bool,
    /// Gradients and new parameters travel together until there are as many of their elements [default: 40M, or 1M per data-parallel rank if that is more]
    #[arg(long, value_name = "N")]
    pub bucket_size: Option<u64>,
    /// Room for the rows of experts: F times a rank's share if all experts get equally many; a step that needs more stops with an error [default: room for all there can be]
    #[arg(long, value_name = "F", value_parser = factor)]
    pub moe_buffer_factor: Option<f64>,
    /// Pipeline stages
    #[arg(long, visible_alias = "pipeline-model-parallel-size", default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), help_heading = "Mesh")]
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
    /// The order of passes: `1f1b`, `gpipe`, `zb-h1`, `zb-v`, or a file with a line `0: F0.0 F0.1 B0.0 ...` per stage
    #[arg(long, default_value = "1f1b", value_name = "NAME|FILE", help_heading = "Mesh")]
    pub pipeline_schedule: String,
    /// Virtual stages of each pipeline stage: more than one interleaves `1f1b` [default: as many as the schedule needs]
    #[arg(long, visible_alias = "num-virtual-stages-per-pipeline-rank", value_name = "V", value_parser = clap::value_parser!(u64).range(1..), help_heading = "Mesh")]
    pub vpp: Option<u64>,
    /// Microbatches that go through a virtual stage before the stage's next one has its turn [default: pp]
    #[arg(long, value_name = "G", value_parser = clap::value_parser!(u64).range(1..), help_heading = "Mesh")]
    pub microbatch_group_size_per_virtual_pipeline_stage: Option<u64>,
    /// Communication on streams of its own, beside compute; the same numbers either way
    #[arg(long, value_enum, default_value = "on", help_heading = "Mesh")]
    pub overlap: Overlap,
    /// Tensor-parallel gathers and reductions beside the matrix products that they feed or complete; the same numbers either way
    #[arg(long, value_enum, num_args = 0..=1, default_value = "off", default_missing_value = "pipeline", value_name = "HOW", help_heading = "Mesh")]
    pub tp_comm_overlap: TpCommOverlap,
    /// Most chunks of a product beside tensor-parallel communication
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u64).range(2..=1024), help_heading = "Mesh")]
    pub tp_comm_overlap_chunks: u64,
    /// Sequences per microbatch and data-parallel rank [default: 1]
    #[arg(long, visible_alias = "micro_batch_size", value_name = "B", value_parser = clap::value_parser!(u64).range(1..), help_heading = "Batch")]
    pub micro_batch_size: Option<u64>,
    /// Sequences per step, over all ranks and microbatches [default: micro-batch-size x dp x pp]
    #[arg(long, visible_alias = "global_batch_size", value_name = "G", value_parser = clap::value_parser!(u64).range(1..), help_heading = "Batch")]
    pub global_batch_size: Option<u64>,
    /// Pads vocabularies to a multiple of this times tp (Megatron-LM: 128); by default to what tp divides
    #[arg(long, visible_alias = "make-vocab-size-divisible-by", default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 20), help_heading = "Mesh")]
    pub pad_vocab_to: u64,

    /// Most bytes of a rank in its device's memory, for example `80GiB`, `512MB` or plain bytes: more is an error that says who needs it and what would fit
    #[arg(long, value_name = "BYTES", value_parser = bytes, help_heading = "Memory")]
    pub memory: Option<u64>,
    /// What the backward pass computes again instead of keeping it
    #[arg(long, visible_alias = "recompute-granularity", value_enum, default_value = "none", help_heading = "Memory")]
    pub recompute: Recompute,
    /// Which layers `full` recomputes [default: uniform]
    #[arg(long, value_enum, help_heading = "Memory")]
    pub recompute_method: Option<RecomputeMethod>,
    /// Layers of a unit (uniform), or of each stage (block) [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), help_heading = "Memory")]
    pub recompute_num_layers: Option<u32>,
    /// Working precision: what floats without a type are in the text
    #[arg(long, value_enum, default_value = "fp32", help_heading = "Precision")]
    pub dtype: Precision,
    /// The same as --dtype bf16
    #[arg(long, conflicts_with_all = ["dtype", "fp16"], help_heading = "Precision")]
    pub bf16: bool,
    /// The same as --dtype fp16
    #[arg(long, conflicts_with_all = ["dtype", "bf16"], help_heading = "Precision")]
    pub fp16: bool,
    /// Matrix products of f32 factors on tensor cores: each factor is rounded to tf32, which has 10 bits of mantissa, sums stay f32. For GPUs
    #[arg(long, help_heading = "Precision")]
    pub tf32: bool,
    /// Multiplies the loss by a constant for the backward pass, and divides gradients by it [fp16 without it: a scale that adapts]
    #[arg(long, value_name = "X", value_parser = scale, conflicts_with_all = ["initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"], help_heading = "Precision")]
    pub loss_scale: Option<f64>,
    /// First scale of one that adapts [default: 4294967296]
    #[arg(long, value_name = "X", value_parser = scale, help_heading = "Precision")]
    pub initial_loss_scale: Option<f64>,
    /// Least scale of one that adapts [default: 1]
    #[arg(long, value_name = "X", value_parser = scale, help_heading = "Precision")]
    pub min_loss_scale: Option<f64>,
    /// Steps without overflow after which the scale doubles [default: 1000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), help_heading = "Precision")]
    pub loss_scale_window: Option<u64>,
    /// Steps with overflow, since the scale last doubled, from which on each halves it [default: 2]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), help_heading = "Precision")]
    pub hysteresis: Option<u64>,

    /// What updates parameters
    #[arg(long, value_enum, help_heading = "Training (each overrides its own field of the text's `train` section)")]
    pub optimizer: Option<Optimizer>,
    /// Peak learning rate
    #[arg(long, value_name = "X", help_heading = "Training (each overrides its own field of the text's `train` section)")]
    pub lr: Option<f64>,
    /// Final learning rate
    #[arg(long, value_name = "X", help_heading = "Training (each overrides its own field of the text's `train` section)")]
    pub min_lr: Option<f64>,
    /// How the rate falls after the warm-up
    #[arg(long, value_enum, help_heading = "Training (each overrides its own field of the text's `train` section)")]
    pub lr_decay_style: Option<DecayStyle>,
    /// Steps of linear warm-up
    #[arg(long, value_name = "N", help_heading = "Training (each overrides its own field of the text's `train` section)")]
    pub lr_warmup_iters: Option<u64>,
    /// Step at which the final rate is reached
    #[arg(long, value_name = "N", help_heading = "Training (each overrides its own field of the text's `train` section)")]
    pub lr_decay_iters: Option<u64>,
    /// Of parameters with two or more dims that are not marked `@no_decay`
    #[arg(long, value_name = "X", help_heading = "Training (each overrides its own field of the text's `train` section)")]
    pub weight_decay: Option<f64>,
    /// Share that the mean of the gradients keeps in a step
    #[arg(long, value_name = "X", help_heading = "Training (each overrides its own field of the text's `train` section)")]
    pub adam_beta1: Option<f64>,
    /// Share that the mean of their squares keeps in a step
    #[arg(long, value_name = "X", help_heading = "Training (each overrides its own field of the text's `train` section)")]
    pub adam_beta2: Option<f64>,
    /// Added to the root of the mean of squares
    #[arg(long, value_name = "X", help_heading = "Training (each overrides its own field of the text's `train` section)")]
    pub adam_eps: Option<f64>,
    /// Share that the velocity keeps in a step
    #[arg(long, value_name = "X", help_heading = "Training (each overrides its own field of the text's `train` section)")]
    pub sgd_momentum: Option<f64>,
    /// Greatest global gradient norm; 0 for none
    #[arg(long, value_name = "X", help_heading = "Training (each overrides its own field of the text's `train` section)")]
    pub clip_grad: Option<f64>,

    /// `cpu` is this machine's, `x86-64-v3` any with AVX2; `sm_80` and `sm_90a` are GPUs
    #[arg(long, default_value = "cpu", help_heading = "Output")]
    pub target: String,
    /// CPU of the kernels that run on the host beside GPUs: `x86-64-v3` any with AVX2, `cpu` this machine's [default: x86-64-v3]
    #[arg(long, value_name = "TARGET", help_heading = "Output")]
    pub host_target: Option<String>,
    /// Dumps to write into the artifact; `mcc dump` shows them, and makes the others when asked
    #[arg(long, value_enum, value_delimiter = ',', value_name = "LEVEL,..", default_values = ["graph", "sharded", "local", "schedule"], help_heading = "Output")]
    pub emit: Vec<Level>,
    /// The artifact, a directory [default: the model's name with .mcc]
    #[arg(short, long, value_name = "OUT.mcc", help_heading = "Output")]
    pub output: Option<PathBuf>,
    /// Compile every kernel anew
    #[arg(long, help_heading = "Output")]
    pub no_cache: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OnNonfinite {
    /// End the run, naming step, rank and the op that made it
    Stop,
    /// Leave the step's update out, and count it
    Skip,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DeviceKind {
    /// This machine's CPU
    Cpu,
    /// NVIDIA GPUs of this machine; ranks share them if they are more
    Cuda,
    /// The emulator: kernels for GPUs, run and checked on this machine's CPU. Slow
    Emulated,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Exchanges {
    /// Through memory that ranks share
    Host,
    /// GPUs by themselves, by NCCL: each rank has one of its own
    Nccl,
}

#[derive(Args)]
pub struct RunArgs {
    /// What `mcc compile` wrote
    pub artifact: PathBuf,
    /// A text file (bytes are tokens), an llm.c .bin, a .npy of tokens [steps, batch, seq+1], or one .npy per input
    #[arg(long, value_name = "[INPUT=]FILE")]
    pub data: Vec<String>,
    /// Held-out data, of the same kinds
    #[arg(long, value_name = "[INPUT=]FILE")]
    pub valid_data: Vec<String>,
    /// Steps between held-out losses; 0 is never
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub eval_interval: u64,
    /// Most global batches of a held-out loss
    #[arg(long, default_value_t = 8, value_name = "N")]
    pub eval_iters: u64,
    /// Default: all of a .npy, else the schedule's, else once through the data
    #[arg(long, visible_alias = "train-iters", value_name = "N")]
    pub steps: Option<u64>,
    /// Initial weights, whole tensors under mcc's names; by default drawn by name and seed
    #[arg(long, value_name = "WEIGHTS.safetensors")]
    pub init: Option<PathBuf>,
    /// Go on after the step at which `--save-state` wrote this, on any mesh, with that run's seed
    #[arg(long, value_name = "STATE.safetensors", conflicts_with_all = ["init", "seed"])]
    pub resume: Option<PathBuf>,
    /// Where to write the trained weights
    #[arg(long, value_name = "WEIGHTS.safetensors")]
    pub save: Option<PathBuf>,
    /// Where to write what `--resume` needs: weights, optimizer states and the step
    #[arg(long, value_name = "STATE.safetensors")]
    pub save_state: Option<PathBuf>,
    /// One JSON object per step
    #[arg(long, value_name = "FILE.jsonl")]
    pub metrics: Option<PathBuf>,
    /// Print the time per kernel and communication against what this machine can do at most, and write a trace of all ranks and streams for
    /// ui.perfetto.dev. Without --steps, the run ends with the steps that are timed
    #[arg(long)]
    pub profile: bool,
    /// Steps to time, after two of warm-up
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..), requires = "profile")]
    pub profile_steps: u64,
    /// Where the trace goes [default: the artifact's name with .trace.json]
    #[arg(long, value_name = "FILE.json", requires = "profile")]
    pub trace: Option<PathBuf>,
    /// Default: the cores of this machine over the ranks
    #[arg(long, value_name = "T")]
    pub threads_per_rank: Option<usize>,
    /// Of weights that are drawn, and of dropout
    #[arg(long, default_value_t = 0, value_name = "S")]
    pub seed: u64,
    /// When loss or gradient norm is not finite
    #[arg(long, value_enum, default_value = "stop")]
    pub on_nonfinite: OnNonfinite,
    /// What runs the kernels [default: what the artifact was compiled for]
    #[arg(long, value_enum)]
    pub device: Option<DeviceKind>,
    /// How ranks exchange
    #[arg(long, value_enum, default_value = "host")]
    pub exchanges: Exchanges,
    /// Run commands one after the other, communication too; for comparison
    #[arg(long)]
    pub in_order: bool,
    /// Where ranks meet that torchrun, mpirun or srun started: rank 0's machine and a free port of it [default: as these say]
    #[arg(long, value_name = "HOST:PORT")]
    pub rendezvous: Option<String>,
    /// How long such ranks may take to come together
    #[arg(long, default_value_t = 300, value_name = "SECONDS")]
    pub rendezvous_timeout: u64,
}

#[derive(Args)]
pub struct GpuCheckArgs {
    /// Where the checks run; in the emulator, without times
    #[arg(long, value_enum, default_value = "cuda")]
    pub device: DeviceKind,
    /// sm_80 or sm_90a [default: what the GPU has]
    #[arg(long, value_name = "TARGET")]
    pub target: Option<String>,
    /// Of weights and data [default: the time]
    #[arg(long, value_name = "S")]
    pub seed: Option<u64>,
    /// One case of each kind
    #[arg(long)]
    pub quick: bool,
    /// No times, only what is checked; where the driver is a stand-in
    #[arg(long)]
    pub no_times: bool,
    /// Where gpu-check.json and gpu-check.md go
    #[arg(short, long, value_name = "DIR", default_value = "gpu-check")]
    pub output: PathBuf,
}

#[derive(Args)]
pub struct DumpArgs {
    /// What `mcc compile` wrote
    pub artifact: PathBuf,
    #[arg(long, value_enum, default_value = "program")]
    pub level: Level,
    /// Only this program class
    #[arg(long, value_name = "K")]
    pub class: Option<usize>,
}

#[derive(Subcommand)]
pub enum Import {
    /// A Hugging Face directory: config.json and model.safetensors, or its shards
    Hf(ImportArgs),
}

#[derive(Args)]
pub struct ImportArgs {
    pub directory: PathBuf,
    /// Where model.mdl, weights.safetensors and config.json go
    #[arg(short, long, value_name = "OUT")]
    pub output: PathBuf,
    /// A model text of your own with a section `weights hf`, instead of one for the config: only weights.safetensors is written
    #[arg(long, value_name = "MODEL.mdl")]
    pub model: Option<PathBuf>,
    /// Sets a setting of that model text
    #[arg(short = 'D', value_name = "NAME=VALUE", value_parser = define, requires = "model")]
    pub define: Vec<(String, String)>,
}

#[derive(Subcommand)]
pub enum Export {
    /// To a Hugging Face directory
    Hf(ExportArgs),
}

#[derive(Args)]
pub struct ExportArgs {
    /// Weights under mcc's names, as `mcc run --save` writes them
    pub weights: PathBuf,
    /// The model text that they belong to
    #[arg(long, value_name = "MODEL.mdl")]
    pub model: PathBuf,
    /// Sets a setting of the model text
    #[arg(short = 'D', value_name = "NAME=VALUE", value_parser = define)]
    pub define: Vec<(String, String)>,
    #[arg(short, long, value_name = "DIR")]
    pub output: PathBuf,
}

/// `80GiB`, `1.5 GB`, `4096`.
fn bytes(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len()));
    let scale: u64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kib" => 1 << 10,
        "mib" => 1 << 20,
        "gib" => 1 << 30,
        "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => return Err(format!("`{}` is no unit: KiB, MiB, GiB, TiB, KB, MB, GB, TB", unit.trim())),
    };
    let whole = number.parse::<u64>().ok().and_then(|n| n.checked_mul(scale));
    let part = || number.parse::<f64>().ok().map(|x| x * scale as f64).filter(|x| *x < 2f64.powi(63)).map(|x| x as u64);
    whole.or_else(part).filter(|n| *n > 0).ok_or_else(|| "it should be a number of bytes, for example `80GiB`".into())
}

/// A loss scale: a finite number above 0.
fn scale(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|x: &f64| x.is_finite() && *x > 0.0).ok_or_else(|| "a number above 0, such as 65536".into())
}

/// Room for rows: a finite number above 0.
fn factor(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|x: &f64| x.is_finite() && *x > 0.0).ok_or_else(|| "a number above 0, such as 1.25".into())
}

fn define(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.trim().to_string(), value.trim().to_string())),
        _ => Err("it should be NAME=VALUE, for example `layers=4`".into()),
    }
}
