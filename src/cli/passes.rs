//! What `mcc opt` and `mcc reduce` take, and what `mcc compile` prints of its passes.

use clap::builder::PossibleValuesParser;
use clap::{Args, Command, FromArgMatches};
use passes::table::PASSES;
use std::path::PathBuf;

/// Reads the name of a pass.
pub fn pass() -> PossibleValuesParser {
    PossibleValuesParser::new(PASSES.iter().map(|p| p.name))
}

/// Reads the name of a pass, or `all`.
fn any_pass() -> PossibleValuesParser {
    PossibleValuesParser::new(PASSES.iter().map(|p| p.name).chain(["all"]))
}

/// Which modules are printed on the way.
#[derive(Args, Default)]
pub struct PrintArgs {
    /// Print the module before these passes, each under a line `; before PASS`; what else is said goes to standard error
    #[arg(long, value_delimiter = ',', value_name = "PASS,..|all", value_parser = any_pass())]
    pub print_before: Vec<String>,
    /// Print what these passes change, each under a line `; changed by PASS`: a diff of the module before and after
    #[arg(long, value_delimiter = ',', value_name = "PASS,..|all", value_parser = any_pass())]
    pub print_changed: Vec<String>,
    /// Print the module after these passes, each under a line `; after PASS`; what else is said goes to standard error
    #[arg(long, value_delimiter = ',', value_name = "PASS,..|all", value_parser = any_pass())]
    pub print_after: Vec<String>,
}

impl PrintArgs {
    /// Whether modules, or what passes change of them, are printed.
    pub fn is_printing(&self) -> bool {
        !(self.print_before.is_empty() && self.print_after.is_empty() && self.print_changed.is_empty())
    }
}

#[derive(Args, Default)]
#[command(next_help_heading = "Passes")]
pub struct InspectArgs {
    #[command(flatten)]
    pub print: PrintArgs,
    /// End after this pass, and print its module unless one of these flags says what to print; no artifact is written
    #[arg(long, value_name = "PASS", value_parser = pass())]
    pub stop_after: Option<String>,
    /// Damage the module after this pass, to see what verifiers say
    #[arg(long, value_name = "PASS", value_parser = pass(), hide = true)]
    pub damage_after: Option<String>,
}

#[derive(Args)]
pub struct OptArgs {
    #[command(flatten)]
    pub work: OptWorkArgs,
    #[command(flatten)]
    pub print: PrintArgs,
}

/// What is to be done with a module.
#[derive(Args)]
pub struct OptWorkArgs {
    /// A module, as `mcc compile --print-after` prints it; `-` is standard input
    pub module: PathBuf,
    /// Passes to run, in this order, each followed by its verifier [default: those of the module's line `; RUN: mcc opt ..`]
    #[arg(long, value_delimiter = ',', value_name = "PASS,..", value_parser = pass())]
    pub passes: Vec<String>,
    /// Run all verifiers of the level that the module is at, and say which hold
    #[arg(long, conflicts_with = "passes")]
    pub verify: bool,
    /// Damage the module after this pass, to see what verifiers say
    #[arg(long, value_name = "PASS", value_parser = pass(), hide = true)]
    pub damage_after: Option<String>,
}

impl OptWorkArgs {
    /// What the text of a module says that `mcc opt` is to do with it: its line `; RUN: mcc opt ..`.
    pub fn recorded(text: &str) -> Option<OptWorkArgs> {
        let words = text.lines().find_map(|l| l.strip_prefix("; RUN: mcc opt "))?.split_whitespace();
        let command = OptWorkArgs::augment_args(Command::new("opt").no_binary_name(true));
        OptWorkArgs::from_arg_matches(&command.try_get_matches_from(words).ok()?).ok()
    }
}

#[derive(Args)]
pub struct ReduceArgs {
    #[command(flatten)]
    pub work: OptWorkArgs,
    /// Where the smaller module goes [default: the module's name with .reduced before its ending]
    #[arg(short, long, value_name = "OUT.mir")]
    pub output: Option<PathBuf>,
}
