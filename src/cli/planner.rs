//! What `mcc plan` takes.

use super::plan::PlanArgs;
use super::values::{Devices, from_one};
use clap::{Args, ValueEnum};
use std::path::PathBuf;
use std::time::{Duration, Instant};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Scaling {
    Strong,
    Weak,
    Both,
}

#[derive(Args)]
pub struct PlannerArgs {
    /// The model text, with the flags of `mcc compile`: what one of them says of the plan is held, all else is chosen
    pub model: PathBuf,
    /// Ranks, one for each device; from A to B, each number twice the one before, it prints how time and efficiency
    /// change
    #[arg(long, visible_alias = "ranks", value_name = "N|A..B")]
    pub gpus: Devices,
    /// What grows with a range of devices: nothing (strong), the batch (weak; --global-batch-size is that of the
    /// fewest), or first the one, then the other
    #[arg(long, value_name = "HOW", default_value = "both")]
    pub scaling: Scaling,
    /// A machine file, or a name of `mcc machine ls`; --target is the machine's
    #[arg(long, value_name = "FILE|NAME")]
    pub machine: String,
    /// Plans that are shown
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = from_one::<u64>)]
    pub top: u64,
    /// Plans that are compiled whole at most, changes to the best apart
    #[arg(long, default_value_t = 16, value_name = "N", value_parser = from_one::<u64>)]
    pub whole: u64,
    /// Seconds after which nothing more is tried, for each number of devices: the best plan found until then is
    /// shown, once what is under way is done. Without it a search finds the same plans each time
    #[arg(long, value_name = "S", value_parser = from_one::<u64>)]
    pub search_seconds: Option<u64>,
    /// Of a rank, on CPUs
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = from_one::<u64>)]
    pub threads_per_rank: u64,
    /// Writes the best plan, for `mcc compile --plan`
    #[arg(short, long, value_name = "PLAN.json")]
    pub output: Option<PathBuf>,
    /// Writes a page, one HTML file: the plans beside each other, and of the best when stages do what, memory by line
    /// of the text, links, and where time goes
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Measure all layers anew: what was found of them before is kept in the cache
    #[arg(long)]
    pub no_cache: bool,
    /// For tools
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub plan: PlanArgs,
}

impl PlannerArgs {
    /// When a search that begins now has to end.
    pub fn until(&self) -> Option<Instant> {
        self.search_seconds.and_then(|s| Instant::now().checked_add(Duration::from_secs(s)))
    }
}
