//! Plans as files: what `mcc plan` writes and `--plan` reads.

use crate::cli::PlanArgs;
use crate::failure::Failure;
use crate::misuse::misuse;
use crate::print::note;
use clap::parser::ValueSource;
use clap::{ArgMatches, Args};
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::Path;

/// Flags of `mcc plan` that do not say what is compiled.
pub const OWN: [&str; 16] = [
    "--gpus",
    "--scaling",
    "--machine",
    "--top",
    "--whole",
    "--search-seconds",
    "--threads-per-rank",
    "--output",
    "--html",
    "--no-cache",
    "--json",
    "--memory",
    "--host-memory",
    "--plan",
    "--limit-memory",
    "--limit-seconds",
];

/// A plan as a file: the flags with which a model is compiled so, and what they are from.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlanFile {
    /// The version of mcc that searched.
    pub mcc: String,
    /// The text's file name, and BLAKE3 of what is in it.
    pub model: String,
    pub text: String,
    pub machine: String,
    pub ranks: u64,
    /// Predicted seconds of a step.
    pub seconds: f64,
    pub give_or_take: f64,
    /// Words of the command line, after the model.
    pub flags: Vec<String>,
}

impl PlanFile {
    /// # Errors
    /// A file that cannot be read, or that is no plan.
    pub fn read(path: &Path) -> Result<PlanFile, Failure> {
        let text = fs::read_to_string(path).map_err(|e| misuse!("`--plan {}` cannot be read: {e}", path.display()))?;
        let hint = "`mcc plan -o PLAN.json` writes one";
        let file: PlanFile = serde_json::from_str(&text).map_err(|e| misuse!("`--plan {}` is no plan: {e}; {hint}", path.display()))?;
        // The flags become a part of the command line, so only those of a plan are accepted.
        match file.flags.iter().find(|word| !is_of_plan(word)) {
            Some(word) => Err(misuse!("`--plan {}` is no plan: `{word}` is no flag of one; {hint}", path.display()).into()),
            None => Ok(file),
        }
    }

    /// Says so if a plan is of another text.
    pub fn compare(path: &Path, text: &str) -> Result<(), Failure> {
        if PlanFile::read(path)?.text != hash(text) {
            note!("warning: the plan in {} was searched for another text: another one may be better", path.display());
        }
        Ok(())
    }
}

/// Whether a word is a flag that says what is compiled.
fn is_of_plan(word: &str) -> bool {
    let flag = word.split('=').next().unwrap_or_default();
    let known = PlanArgs::augment_args(clap::Command::new("plan"));
    let is_known = known.get_arguments().filter_map(|a| a.get_long()).any(|long| flag.strip_prefix("--") == Some(long));
    word.starts_with("-D") || (is_known && !OWN.contains(&flag))
}

/// The hash of a text.
pub fn hash(text: &str) -> String {
    blake3::hash(text.as_bytes()).to_hex().to_string()
}

/// What a word of a plan sets: its flag, or the setting of `-D`.
fn sets(word: &str) -> &str {
    word.split('=').next().unwrap_or_default()
}

/// Whether flags that were typed set what a word of a plan sets.
pub fn is_said(word: &str, given: &[(String, String)]) -> bool {
    given.iter().any(|(_, typed)| sets(typed) == sets(word))
}

/// The flags that were typed, each with its value as one word, as `--tp=2`.
pub fn words(matches: &ArgMatches, command: &clap::Command) -> Vec<(String, String)> {
    let mut out = vec![];
    for argument in command.get_arguments().filter(|a| !a.is_positional()) {
        let id = argument.get_id().as_str();
        if matches.value_source(id) != Some(ValueSource::CommandLine) {
            continue;
        }
        let flag = argument.get_long().map(|l| format!("--{l}")).or_else(|| argument.get_short().map(|s| format!("-{s}")));
        let Some(flag) = flag else { continue };
        let values: Vec<String> = match argument.get_action().takes_values() {
            true => matches.get_raw(id).into_iter().flatten().map(|v| v.to_string_lossy().into_owned()).collect(),
            false => vec![],
        };
        let word = |value: &str| if flag.starts_with("--") { format!("{flag}={value}") } else { format!("{flag}{value}") };
        match argument.get_action() {
            clap::ArgAction::Append if argument.get_value_delimiter().is_none() => {
                out.extend(values.iter().map(|v| (flag.clone(), word(v))));
            }
            _ if values.is_empty() => out.push((flag.clone(), flag.clone())),
            _ => out.push((flag.clone(), word(&values.join(",")))),
        }
    }
    out
}
