//! What `mcc simulate` and `mcc machine` take.

use super::plan::PlanArgs;
use super::values::from_one;
use clap::{Args, Subcommand};
use std::path::PathBuf;

#[derive(Args)]
pub struct SimulateArgs {
    /// The model text, with the flags of `mcc compile`, or an artifact; `-` is standard input
    #[arg(value_name = "MODEL.mdl|ARTIFACT")]
    pub what: PathBuf,
    /// A machine file, or a name of `mcc machine ls`; of a text its --target is the machine's
    #[arg(long, value_name = "FILE|NAME")]
    pub machine: String,
    /// Of a rank, on CPUs
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = from_one::<u64>)]
    pub threads_per_rank: u64,
    /// Kernels of this pipeline stage take so many times as long, as where one of its ranks is slow
    #[arg(long, value_name = "STAGE=TIMES", value_parser = slow)]
    pub slow_stage: Option<(usize, f64)>,
    /// Rows of each table at most
    #[arg(long, default_value_t = 10, value_name = "N", value_parser = from_one::<u64>)]
    pub rows: u64,
    /// Writes the step for Perfetto, as `mcc run --trace` does: a rank of each stage
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Writes a page, one HTML file: when stages do what, memory by line of the text, links, and where time goes
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// For tools
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub plan: PlanArgs,
}

/// `3=1.2`.
fn slow(text: &str) -> Result<(usize, f64), String> {
    let wrong = || format!("`{text}` is no stage with how many times as long it takes, 0.001 to 1000, as 3=1.2");
    let (stage, times) = text.split_once('=').ok_or_else(wrong)?;
    let times: f64 = times.parse().map_err(|_| wrong())?;
    let stage = stage.parse().map_err(|_| wrong())?;
    if (1e-3..=1e3).contains(&times) { Ok((stage, times)) } else { Err(wrong()) }
}

#[derive(Subcommand)]
pub enum MachineCommand {
    /// Lists the machines that are known by name
    Ls,
    /// Prints the file of a machine that is known by name, to begin one's own with
    Show {
        /// A name of `mcc machine ls`
        name: String,
    },
    /// Checks machine files, and says where their numbers are from
    Check {
        /// Files, or names
        #[arg(required = true, value_name = "FILE|NAME")]
        machines: Vec<String>,
    },
}

#[derive(Args)]
pub struct CalibrateArgs {
    /// Whose kernels' times go into the file, of one rank of each stage by itself. Without any, all that a machine of
    /// CPUs has is timed, in small models: cores, kernels, exchanges, waits
    #[arg(value_name = "ARTIFACT")]
    pub artifacts: Vec<PathBuf>,
    /// A machine file, or a name of `mcc machine ls`: whatever is not measured stays as it is there, kernels that it
    /// has times of too
    #[arg(long, value_name = "FILE|NAME", default_value = "cpu")]
    pub machine: String,
    /// Where the machine file goes
    #[arg(short, long, value_name = "FILE.json")]
    pub output: PathBuf,
    /// Replace it
    #[arg(long)]
    pub force: bool,
    /// Of a rank, on CPUs
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = from_one::<u64>)]
    pub threads_per_rank: u64,
    /// Steps of a rank that are timed, behind one that is not
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = from_one::<u64>)]
    pub profile_steps: u64,
}
