//! What `mcc compile` takes beside a plan, and the levels that it can write.

use super::passes::InspectArgs;
use super::plan::PlanArgs;
use clap::{Args, ValueEnum};
use std::path::PathBuf;

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
pub struct CompileArgs {
    /// The model text; `-` is standard input
    pub model: PathBuf,
    #[command(flatten)]
    pub plan: PlanArgs,
    #[command(flatten)]
    pub output: OutputArgs,
    #[command(flatten)]
    pub inspect: InspectArgs,
}

/// Which kernels' code is held to what it is to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum VerifyKernels {
    /// None
    Off,
    /// Those that are not in the cache, or that nobody has looked at
    New,
    /// Code for GPUs as well, in the emulator: for minutes
    All,
}

#[derive(Args)]
#[command(next_help_heading = "Output")]
pub struct OutputArgs {
    /// Dumps to write into the artifact; `mcc dump` shows them, and makes the others when asked
    #[arg(long, value_enum, value_delimiter = ',', value_name = "LEVEL,..", default_values = ["graph", "sharded", "local", "schedule"])]
    pub emit: Vec<Level>,
    /// The artifact, a directory [default: the model's name with .mcc]
    #[arg(short, long, value_name = "OUT.mcc")]
    pub output: Option<PathBuf>,
    /// Compile every kernel anew
    #[arg(long)]
    pub no_cache: bool,
    /// Run kernels once on random operands, and interpret some 256 places of each result: code that computes
    /// something else is a bug in mcc (V950)
    #[arg(long, value_enum, default_value = "new")]
    pub verify_kernels: VerifyKernels,
    /// Assemble kernels for GPUs with NVIDIA's `ptxas` (of $PATH, $CUDA_HOME/bin or /usr/local/cuda/bin), so that on
    /// GPUs of just this architecture the driver need not compile them; others get the PTX as without
    #[arg(long)]
    pub cubin: bool,
    /// Sign the artifact, for people who run it with `--trust`: a PEM file of an Ed25519 key (`openssl genpkey -algorithm ed25519 -out secret.pem`)
    #[arg(long, value_name = "SECRET.pem")]
    pub sign: Option<PathBuf>,
}
