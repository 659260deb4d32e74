//! What `mcc report` takes.

use clap::Args;
use std::path::PathBuf;

#[derive(Args)]
pub struct ReportArgs {
    /// The directory of `mcc run --log-dir`, or a file of `mcc run --metrics`; of a run that trains still, too.
    /// Several are drawn in the same charts
    #[arg(required = true, value_name = "RUN")]
    pub runs: Vec<PathBuf>,
    /// Where the run's metrics are, if they are not in its log's directory
    #[arg(long, value_name = "FILE.jsonl")]
    pub metrics: Option<PathBuf>,
    /// Where the report goes [default: of one run, report.html in the directory, or beside the file of metrics,
    /// under its name]
    #[arg(short, long, value_name = "FILE.html")]
    pub output: Option<PathBuf>,
    /// Replace a file that exists; without it the report is refused
    #[arg(long)]
    pub force: bool,
}
