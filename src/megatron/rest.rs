//! Flags that mcc takes under the same name, and those that are in no line, with what the table of foreign
//! flags has instead.

use super::flags::Flag;
use super::plan::Plan;
use super::shell::LineNote;
use crate::cli::Cli;
use crate::foreign_flags::{FOREIGN, FlagReplacement, replacement};
use clap::{Arg, Command, CommandFactory};
use frontend::names::nearest;
use std::collections::BTreeSet;

/// Most unknown flags whose nearest name is sought.
const MOST_STRANGERS: usize = 100;

/// Variables that NCCL reads.
const NCCL: &str = "NCCL_";

impl Plan<'_> {
    /// Answers every flag that nothing has taken so far.
    pub fn rest(&mut self) {
        let root = Cli::command();
        for flag in self.flags.rest() {
            self.one(&root, flag);
        }
        for flag in std::mem::take(&mut self.flags.repeated) {
            self.leave(&flag, "a later one counts");
        }
        for stray in std::mem::take(&mut self.flags.strays) {
            let why = if stray.whole().is_none() { "the script does not say what it stands for" } else { "it belongs to no flag" };
            self.unseen.extend(stray.unknowns());
            let shown = self.shell.shown(&stray);
            self.left.push(LineNote { line: stray.line, text: format!("{shown}: {why}") });
            self.strangers.push(shown);
        }
        self.environment();
    }

    fn one(&mut self, root: &Command, mut flag: Flag) {
        let long = format!("--{}", flag.name);
        for (command, parts) in [("compile", &mut self.compile), ("run", &mut self.run)] {
            let Some(arg) = find(root, command, &flag.name) else { continue };
            let takes = arg.get_action().takes_values();
            if takes == flag.values.is_empty() && takes {
                self.errors.push(format!("{}: `{}` has no value", self.shell.place(flag.line), flag.typed));
                return;
            }
            let more = flag.values.split_off(usize::from(takes));
            let canonical = arg.get_long().map_or(long, |l| format!("--{l}"));
            parts.push(super::plan::CommandFlag { flag: canonical, values: flag.values });
            for stray in more {
                let text = format!("{}: it belongs to no flag", self.shell.shown(&stray));
                self.left.push(LineNote { line: stray.line, text });
            }
            return;
        }
        match replacement(&flag.name) {
            Some(FlagReplacement::Setting(name)) => match flag.values.as_slice() {
                [value] if self.text.has(name) && !self.compile.iter().any(|p| p.flag == format!("-D {name}")) => {
                    let value = value.clone();
                    self.set(name, value, &flag);
                }
                _ => self.leave(&flag, format!("models/{} has no such setting (elsewhere it is `{name}`)", self.text.file)),
            },
            Some(FlagReplacement::Flag(command, own)) => {
                let about = find(root, command, own.trim_start_matches('-')).and_then(Arg::get_help).map(ToString::to_string).unwrap_or_default();
                let about = about.split([':', ';', '[']).next().unwrap_or("").trim().to_string();
                self.leave(&flag, format!("mcc has `mcc {command} {own}` ({about})"));
            }
            Some(FlagReplacement::Text(way)) => {
                self.leave(&flag, format!("the model text says it: {way}"));
                let shown = self.shown(&flag);
                self.differs.push(format!("`{shown}` is in the script's model, not in models/{}", self.text.file));
            }
            Some(FlagReplacement::Always(why)) => self.leave(&flag, format!("it is not needed: {why}")),
            Some(FlagReplacement::Nothing(why)) => self.leave(&flag, format!("mcc has none: {why}")),
            None => {
                let known = FOREIGN.iter().flat_map(|(names, _)| names.iter().copied());
                let own = root.get_subcommands().flat_map(|c| c.get_arguments().filter_map(|a| a.get_long()));
                // So many unknown flags are not all misspelled.
                let near = if self.strangers.len() < MOST_STRANGERS { nearest(&flag.name, known.chain(own)) } else { None };
                let near = near.map_or(String::new(), |near| format!(" (`--{near}` is known)"));
                self.leave(&flag, format!("it is not known to mcc{near}"));
                self.strangers.push(flag.typed);
            }
        }
    }

    /// Variables of the environment that the script sets.
    fn environment(&mut self) {
        let is_gpu = self.choices.target.starts_with("sm_");
        let mut seen = BTreeSet::new();
        for (name, line) in std::mem::take(&mut self.shell.exported) {
            if !seen.insert(name.clone()) {
                continue;
            }
            let why = match name.as_str() {
                _ if name.starts_with(NCCL) && is_gpu => "NCCL reads it: export it as before",
                _ if name.starts_with(NCCL) => "NCCL reads it, and ranks on CPUs do without NCCL",
                "CUDA_VISIBLE_DEVICES" => "it says which GPUs `mcc run` sees: export it as before",
                _ => "no variable of the environment counts for mcc",
            };
            self.left.push(LineNote { line, text: format!("{name}: {why}") });
        }
    }
}

/// The flag of a command with this name or alias.
fn find<'a>(root: &'a Command, command: &str, name: &str) -> Option<&'a Arg> {
    let known = root.find_subcommand(command)?;
    known.get_arguments().find(|a| a.get_long() == Some(name) || a.get_all_aliases().is_some_and(|all| all.contains(&name)))
}
