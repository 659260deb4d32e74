//! What can be typed.

mod checkpoint;
mod compile;
mod data;
mod foreign;
mod limits;
mod passes;
mod plan;
mod planner;
mod report;
mod run;
mod simulate;
mod spelling;
mod training;
mod values;

pub use checkpoint::{Checkpoint, ConvertArgs, DiffArgs, Format, WhichArgs};
pub use compile::{CompileArgs, Level, OutputArgs, VerifyKernels};
pub use data::{Data, DataInspectArgs, TokenizeArgs, TrainTokenizerArgs};
pub use foreign::{Export, ExportArgs, Import, ImportArgs, MegatronArgs};
pub use limits::LimitArgs;
pub use passes::{InspectArgs, OptArgs, OptWorkArgs, PrintArgs, ReduceArgs};
pub use plan::{MemoryOrder, OptimizerOffload, Overlap, ParamOffload, PlanArgs, Recompute, RecomputeMethod, TpCommOverlap};
pub use planner::{PlannerArgs, Scaling};
pub use report::ReportArgs;
pub use run::{Changed, DataDtype, DeviceKind, Exchanges, OnNonfinite, OnSpike, Packing, RunArgs};
pub use simulate::{CalibrateArgs, MachineCommand, SimulateArgs};
pub use spelling::{SCHEDULES, avoided_by, changes, help};
pub use training::{DecayStyle, MuonScaleMode, Optimizer, Precision, PrecisionArgs, Switch, WsdDecayStyle};
pub use values::Devices;

use clap::{Args, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;
use values::whole;

#[derive(Parser)]
#[command(name = "mcc", version, about = "Compiles a model text ahead of time into one program per rank, and runs it")]
#[command(
    after_help = "A first model:\n  mcc compile models/gpt2.mdl --tp 2 --pp 2 -D layers=4 -D hidden=128 -D heads=4 -D seq=64 -D vocab=256 --lr 2e-3 --lr-warmup-iters 5 -o gpt2.mcc\n  mcc run gpt2.mcc --data README.md --steps 20\n\nExit codes:\n  0   done\n  1   an error, which is said on standard error\n  2   wrong use of the command line\n  75  `mcc run` was ended early by SIGTERM, SIGINT, SIGHUP, SIGUSR1, --exit-interval or --exit-duration-in-mins, and everything asked for is saved\n  130 a second SIGINT ended `mcc run` at once; nothing is saved"
)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand)]
pub enum Command {
    /// Says everything that is wrong with a model text and its plan, as `compile` would, without making kernels
    Check(Box<CheckArgs>),
    /// Formats model texts in place
    Fmt(FmtArgs),
    /// Compiles a model text into an artifact
    Compile(Box<CompileArgs>),
    /// Says what a line of a model text costs, what a job communicates and why, or what the code of a message means
    Explain(Box<ExplainArgs>),
    /// Says how long a step takes on a machine, and why, from the programs of all ranks; nothing runs
    Simulate(Box<SimulateArgs>),
    /// Searches the plan with which a step takes the least time: how to split so many devices, and what else to choose
    Plan(Box<PlannerArgs>),
    /// Lists, prints and checks machine files
    #[command(subcommand)]
    Machine(MachineCommand),
    /// Times kernels and exchanges here, and makes a machine file of what it finds
    Calibrate(CalibrateArgs),
    /// Starts the ranks of an artifact and trains
    Run(Box<RunArgs>),
    /// Makes a page, one HTML file, of what a run has logged: curves, plan, memory, checkpoints, restarts,
    /// where the time goes
    Report(ReportArgs),
    /// Prints a level of an artifact
    Dump(DumpArgs),
    /// Reads a foreign checkpoint into a model text and weights, or a launch script into commands of mcc
    #[command(subcommand)]
    Import(Import),
    /// Writes weights as a foreign checkpoint
    #[command(subcommand)]
    Export(Export),
    /// Lists, verifies, compares and converts what runs have saved
    #[command(subcommand)]
    Checkpoint(Checkpoint),
    /// Makes data sets of tokens of texts, and tokenizers, and says what data sets hold
    #[command(subcommand)]
    Data(Data),
    /// Lists the passes of a compile, in order
    Passes,
    /// Runs passes, or verifiers, on the text of a module
    Opt(OptArgs),
    /// Makes a module on which a pass or a verifier fails smaller, as long as it fails in the same way
    ///
    /// Passes that it does not need for that are left out too. A graph, sharded or not, comes down to few lines. The
    /// parts of a later module have to agree, so that hardly any can go: begin at a graph, with `--passes` up to the
    /// one that fails.
    Reduce(ReduceArgs),
    /// Checks kernels, steps and exchanges on a GPU, and times them
    GpuCheck(GpuCheckArgs),
    /// Compiles kernels that come on standard input
    #[command(hide = true)]
    CodegenWorker,
}

impl Command {
    /// The plan of a command that takes one.
    pub fn plan(&self) -> Option<&PlanArgs> {
        match self {
            Command::Check(args) => Some(&args.plan),
            Command::Compile(args) => Some(&args.plan),
            Command::Explain(args) => Some(&args.plan),
            Command::Simulate(args) => Some(&args.plan),
            Command::Plan(args) => Some(&args.plan),
            _ => None,
        }
    }
}

#[derive(Args)]
pub struct CheckArgs {
    /// The model text; `-` is standard input
    pub model: PathBuf,
    /// What is wrong as JSON on standard output, one object a line
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub plan: PlanArgs,
}

#[derive(Args)]
pub struct FmtArgs {
    /// The model texts; `-` is standard input, whose text is printed
    #[arg(required = true)]
    pub models: Vec<PathBuf>,
    /// Change nothing; fail if a text is not formatted
    #[arg(long)]
    pub check: bool,
}

#[derive(Args)]
pub struct ExplainArgs {
    /// Every collective with its line, reason, group and bytes, and what would do without it (of an artifact always)
    #[arg(long)]
    pub collectives: bool,
    /// How long it takes on a machine, as `mcc simulate` predicts it, and what the step would take without it; a
    /// machine file, or a name of `mcc machine ls`
    #[arg(long, value_name = "FILE|NAME")]
    pub time: Option<String>,
    /// A picture of why the collectives of a line are there, as SVG: a row for each change of sharding
    #[arg(long, conflicts_with_all = ["json", "collectives", "time"])]
    pub svg: bool,
    /// For tools
    #[arg(long)]
    pub json: bool,
    /// The model text and a line of it, `MODEL.mdl:LINE`, or an artifact; `-- -:LINE` is of standard input. Or the
    /// code of a message, as E0637, W0801 or V213
    #[arg(value_name = "MODEL.mdl:LINE|ARTIFACT|CODE")]
    pub what: PathBuf,
    #[command(flatten)]
    pub plan: PlanArgs,
}

/// What `mcc gpu-check` does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum GpuPart {
    /// Every launch of a step against its definition
    Kernels,
    /// Whole steps against the CPU's
    Steps,
    /// The same with NCCL
    Nccl,
    /// How fast kernels and a step are
    Times,
}

#[derive(Args)]
pub struct GpuCheckArgs {
    /// Where the checks run; the emulator measures no times
    #[arg(long, value_enum, default_value = "cuda")]
    pub device: DeviceKind,
    /// sm_80 or sm_90a [default: what the GPU has]
    #[arg(long, value_name = "TARGET")]
    pub target: Option<String>,
    /// Of weights and data [default: the time]
    #[arg(long, value_name = "S", value_parser = whole::<u64>)]
    pub seed: Option<u64>,
    /// One case of each kind
    #[arg(long)]
    pub quick: bool,
    /// No times, only what is checked; where the driver is a stand-in
    #[arg(long)]
    pub no_times: bool,
    /// Only these parts of it, separated by commas
    #[arg(long, value_enum, value_name = "PARTS", value_delimiter = ',')]
    pub only: Vec<GpuPart>,
    /// One case of a part, `kernels:0`, as JSON: what the command starts for each
    #[arg(long, hide = true, value_name = "CASE")]
    pub case: Option<String>,
    /// Where gpu-check.json and gpu-check.md go
    #[arg(short, long, value_name = "DIR", default_value = "gpu-check")]
    pub output: PathBuf,
}

#[derive(Args)]
pub struct DumpArgs {
    /// What `mcc compile` wrote
    pub artifact: PathBuf,
    /// What to print
    #[arg(long, value_enum, default_value = "program")]
    pub level: Level,
    /// Only this program class
    #[arg(long, value_name = "K", value_parser = whole::<usize>)]
    pub class: Option<usize>,
    /// Only this kernel, as a program numbers it (`launch kernel 3`)
    #[arg(long, value_name = "N", value_parser = whole::<usize>)]
    pub kernel: Option<usize>,
    /// With --level schedule: a picture of it, as SVG, in place of the text
    #[arg(long)]
    pub svg: bool,
    /// With --level ptx: how long a card would take for each kernel of a training step, and why, in place of the PTX;
    /// blocks of each run in the emulator and are counted
    #[arg(long)]
    pub costs: bool,
    /// With --costs: a100, h100 or h200 [default: the one that the code is for]
    #[arg(long, value_name = "CARD")]
    pub card: Option<String>,
    /// With --costs: for tools
    #[arg(long)]
    pub json: bool,
}
