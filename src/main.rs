//! The command line of mcc: the only code of the workspace, beside `mcc-rank`'s, that prints or reads the environment.

mod checkpoint;
mod cli;
mod compile;
mod dump;
mod explain;
mod report;
mod run;
mod text;

use clap::Parser;
use cli::{Cli, Command};
use std::process::ExitCode;

/// Why a command failed. What it has to say is already printed for `Reported`.
pub enum Failure {
    Reported,
    Other(anyhow::Error),
}

impl<E: Into<anyhow::Error>> From<E> for Failure {
    fn from(e: E) -> Failure {
        Failure::Other(e.into())
    }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = match cli.command {
        Command::Check(args) => text::check(&args),
        Command::Fmt(args) => text::format(&args),
        Command::Compile(args) => compile::run(&args),
        Command::Explain(args) => explain::run(&args),
        Command::Run(args) => run::run(&args),
        Command::Dump(args) => dump::run(&args),
        Command::Import(cli::Import::Hf(args)) => checkpoint::import(&args),
        Command::Export(cli::Export::Hf(args)) => checkpoint::export(&args),
        Command::CodegenWorker => codegen::worker::serve(std::io::stdin().lock(), std::io::stdout().lock()).map_err(Failure::from),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::Reported) => ExitCode::FAILURE,
        Err(Failure::Other(e)) => {
            // A reader that went away (`mcc dump .. | head`) is no error.
            if e.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe) {
                return ExitCode::SUCCESS;
            }
            eprintln!("error: {e:#}");
            ExitCode::FAILURE
        }
    }
}
