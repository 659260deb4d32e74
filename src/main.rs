//! The command line of mcc: the only code of the workspace, beside `mcc-rank`'s, that prints or reads the
//! environment.

#![deny(clippy::print_stdout, clippy::print_stderr, reason = "these panic where nobody reads: `print.rs` has what does not")]

mod calibrate;
mod changed;
mod check;
mod checkpoint;
mod cli;
mod codes;
mod compare;
mod compile;
mod costs;
mod damaged;
mod data;
mod dump;
mod explain;
mod explain_svg;
mod failure;
mod files;
mod first_step;
mod foreign;
mod foreign_flags;
mod gpu_check;
mod idle;
mod itself;
mod limits;
mod machines;
mod megatron;
mod misuse;
mod opt;
mod options;
mod pages;
mod plan;
mod plan_file;
mod print;
#[cfg(test)]
mod reference;
mod report;
mod reproducer;
mod run;
mod schedule_svg;
mod sets;
mod shown;
mod signals;
mod simulate;
mod text;
mod tokenizer;
mod usage;
mod watch;

use clap::{CommandFactory, FromArgMatches};
use cli::{Cli, Command};
use failure::Failure;
use ir::diag::Sources;
use print::{PrintError, note};
use std::ffi::OsString;
use std::process::ExitCode;
use text::DiagnosticFormat;

/// The exit code of a run that a signal ended early with everything saved: EX_TEMPFAIL of sysexits(3), by which batch
/// systems know what to start again.
const EARLY: u8 = 75;

fn main() -> ExitCode {
    if let Err(Failure::Other(e)) = signals::outlive_limits() {
        return fail(e);
    }
    let words: Vec<OsString> = std::env::args_os().collect();
    let (words, read) = match with_plan(words) {
        Ok(words) => words,
        Err(Failure::Other(e)) => return fail(e),
        Err(_) => return ExitCode::FAILURE,
    };
    let (mut cli, given) = match read {
        Ok(read) => read,
        Err(e) => return usage::refuse(&e, &words),
    };
    let typed: Vec<String> = given.iter().map(|g| g.0.clone()).collect();
    let machine = match simulate::aim(&mut cli.command, &typed) {
        Ok(machine) => machine,
        Err(Failure::Other(e)) => return fail(e),
        Err(_) => return ExitCode::FAILURE,
    };
    let found = idle::look(&cli.command, &typed);
    if !found.errors.is_empty() {
        return usage::complain(&found.errors, &words);
    }
    let shown = if let Command::Check(args) = &cli.command { args.shown() } else { DiagnosticFormat::Text };
    if let Err(e) = shown.show(&found.warnings, &Sources::default()) {
        return fail(e.into());
    }
    let result = match cli.command {
        Command::Check(args) => check::run(&args),
        Command::Fmt(args) => text::format(&args),
        Command::Compile(args) => compile::run(&args),
        Command::Explain(args) => explain::run(&args, &typed, machine.as_ref()),
        Command::Simulate(args) => simulate::run(&args, &typed, &machine.expect("invariant: it has been read")),
        Command::Plan(args) => plan::run(&args, &given, &machine.expect("invariant: it has been read")),
        Command::Machine(command) => machines::run(&command),
        Command::Calibrate(args) => calibrate::run(&args),
        Command::Run(args) => run::run(&args, &typed),
        Command::Report(args) => watch::report::run(&args),
        Command::Dump(args) => dump::run(&args),
        Command::Import(cli::Import::Hf(args)) => foreign::import(&args),
        Command::Import(cli::Import::MegatronArgs(args)) => megatron::import(&args),
        Command::Export(cli::Export::Hf(args)) => foreign::export(&args),
        Command::Checkpoint(command) => checkpoint::run(&command),
        Command::Data(command) => data::run(&command),
        Command::Passes => opt::list(),
        Command::Opt(args) => opt::run(&args),
        Command::Reduce(args) => opt::reduce(&args),
        Command::GpuCheck(args) => gpu_check::run(&args),
        Command::CodegenWorker => codegen::worker::main().map_err(Failure::from),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::Reported) => ExitCode::FAILURE,
        Err(Failure::Misused) => ExitCode::from(usage::WRONG_USAGE),
        Err(Failure::Early) => ExitCode::from(EARLY),
        Err(Failure::Other(e)) => fail(e),
    }
}

/// Says why a command failed.
fn fail(e: anyhow::Error) -> ExitCode {
    if let Some(PrintError::ReaderGone) = e.downcast_ref() {
        return ExitCode::SUCCESS;
    }
    note!("error: {e:#}");
    if misuse::is(&e) { ExitCode::from(usage::WRONG_USAGE) } else { ExitCode::FAILURE }
}

/// The flags that were typed, each with a word that says all of it.
type TypedFlags = Vec<(String, String)>;

/// The command line, or what is wrong with it.
type ParsedLine = Result<(Cli, TypedFlags), clap::Error>;

fn read(words: &[OsString]) -> ParsedLine {
    let matches = Cli::command().try_get_matches_from(words)?;
    let cli = Cli::from_arg_matches(&matches)?;
    let mut command = Cli::command();
    command.build();
    let given = matches.subcommand().and_then(|(name, m)| Some(plan_file::words(m, command.find_subcommand(name)?)));
    Ok((cli, given.unwrap_or_default()))
}

/// The command line with the flags of its plan, and what that says.
///
/// # Errors
/// A plan that cannot be read, or that is none.
fn with_plan(mut words: Vec<OsString>) -> Result<(Vec<OsString>, ParsedLine), Failure> {
    let first = read(&words);
    if let Ok((cli, given)) = &first
        && let Some(path) = cli.command.plan().and_then(|p| p.plan_file.as_ref())
    {
        let (kept, left): (Vec<_>, Vec<_>) = plan_file::PlanFile::read(path)?.flags.into_iter().partition(|word| !plan_file::is_said(word, given));
        // A flag that repeats the plan's value contradicts nothing.
        let others: Vec<_> = left.iter().filter(|word| given.iter().all(|g| g.1 != **word)).map(String::as_str).collect();
        if !others.is_empty() {
            print::note!("note: the command line says otherwise than the plan's `{}`, and is followed", others.join(" "));
        }
        words.extend(kept.into_iter().map(OsString::from));
        let second = read(&words);
        return Ok((words, second));
    }
    Ok((words, first))
}
