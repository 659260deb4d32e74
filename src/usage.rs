//! What is said of a command line that mcc cannot read: what is wrong, and what to type instead.
//!
//! clap finds the mistake. Its message stays where it names what is missing; of unknown flags and commands there is
//! more to say than which names are spelled alike, and all unknown flags of a line come at once.

use crate::cli::Cli;
use crate::foreign_flags::{COMMANDS, FlagReplacement, normal, replacement};
use crate::print::note;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, Command, CommandFactory};
use frontend::names::nearest;
use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

/// The exit code of a command line that cannot be read, as clap has it.
pub const WRONG_USAGE: u8 = 2;

/// Shows what clap found in these words, of which the first is the program. Helps and versions come as such errors
/// too.
pub fn refuse(error: &clap::Error, words: &[OsString]) -> ExitCode {
    let words: Vec<String> = words.iter().map(|w| w.to_string_lossy().into_owned()).collect();
    let mut command = Cli::command();
    // Building adds the help flags that the command has when it parses a line.
    command.build();
    let line = CommandWords::new(&command, &words);
    let said = match error.kind() {
        ErrorKind::UnknownArgument => line.unknown(&invalid(error, ContextKind::InvalidArg)),
        ErrorKind::InvalidSubcommand => vec![line.no_command(&invalid(error, ContextKind::InvalidSubcommand))],
        _ => vec![],
    };
    if said.is_empty() {
        // If the error cannot be printed, there is nobody to tell.
        let _ = error.print();
        return if error.use_stderr() { ExitCode::from(WRONG_USAGE) } else { ExitCode::SUCCESS };
    }
    say(&said, &line.name())
}

/// Shows what is wrong with these words, which clap could read, and where their command's flags are listed.
pub fn complain(errors: &[String], words: &[OsString]) -> ExitCode {
    let words: Vec<String> = words.iter().map(|w| w.to_string_lossy().into_owned()).collect();
    say(errors, &CommandWords::new(&Cli::command(), &words).name())
}

fn say(errors: &[String], command: &str) -> ExitCode {
    errors.iter().for_each(|e| note!("error: {e}"));
    note!("\n`{command} --help` lists what it takes");
    ExitCode::from(WRONG_USAGE)
}

/// The text of an error's context.
fn invalid(error: &clap::Error, kind: ContextKind) -> String {
    match error.get(kind) {
        Some(ContextValue::String(text)) => text.clone(),
        _ => String::new(),
    }
}

/// A command line, as far as it can be understood.
struct CommandWords<'a> {
    root: &'a Command,
    /// The command that its words name, with those that it is under.
    path: Vec<&'a Command>,
    /// The words before the command's name, and those after it.
    before: &'a [String],
    after: &'a [String],
}

impl<'a> CommandWords<'a> {
    fn new(root: &'a Command, words: &'a [String]) -> CommandWords<'a> {
        let words = words.get(1..).unwrap_or_default();
        let named = |at: &Command, word: &str| at.get_subcommands().any(|c| c.get_name() == word);
        let first = words.iter().position(|w| named(root, w)).unwrap_or(words.len());
        let (before, mut after) = words.split_at(first);
        let mut path = vec![root];
        while let [word, rest @ ..] = after {
            let Some(next) = path[path.len() - 1].find_subcommand(word) else { break };
            path.push(next);
            after = rest;
        }
        CommandWords { root, path, before, after }
    }

    fn command(&self) -> &'a Command {
        self.path[self.path.len() - 1]
    }

    /// `mcc import hf`.
    fn name(&self) -> String {
        self.path.iter().map(|c| c.get_name()).collect::<Vec<_>>().join(" ")
    }

    /// All flags that the command does not have, each with what there is instead; or, if it has all, the word that
    /// clap found.
    fn unknown(&self, found: &str) -> Vec<String> {
        if self.path.len() == 1 || self.before.iter().any(|w| w == found) {
            return vec![self.flag_before_command(found)];
        }
        let flags = self.flags();
        let said: Vec<String> =
            flags.iter().map(|(flag, value)| format!("`{}` has no `{flag}`: {}", self.name(), self.tip(flag, value.as_deref()))).collect();
        if said.is_empty() { vec![self.word(found)] } else { said }
    }

    fn flag_before_command(&self, flag: &str) -> String {
        let commands = having(self.root, flag);
        match commands.as_slice() {
            [] => format!("`{flag}` is no flag of mcc, and the command comes first: `mcc COMMAND ..`, one of {}", names(self.root)),
            [first, ..] => format!("`{flag}` comes after its command: `{first} .. {flag}`"),
        }
    }

    /// The unknown flags among the words, each with the number that comes after it, if one does. A known flag's value
    /// is no flag.
    fn flags(&self) -> Vec<(String, Option<String>)> {
        let mut out: Vec<(String, Option<String>)> = vec![];
        let mut words = self.after.iter().take_while(|w| *w != "--").peekable();
        while let Some(word) = words.next() {
            if !word.starts_with("--") {
                continue;
            }
            let (flag, own) = word.split_once('=').map_or((word.as_str(), None), |(f, v)| (f, Some(v)));
            match find(self.command(), flag) {
                Some(arg) if own.is_none() && arg.get_action().takes_values() => {
                    words.next_if(|w| !w.starts_with("--"));
                }
                Some(_) => {}
                None => {
                    let value = own.map(str::to_string).or_else(|| words.peek().filter(|w| w.parse::<f64>().is_ok()).map(|w| (*w).clone()));
                    if !out.iter().any(|(f, _)| f == flag) {
                        out.push((flag.to_string(), value));
                    }
                }
            }
        }
        out
    }

    /// What to type instead of a flag that the command does not have.
    fn tip(&self, flag: &str, value: Option<&str>) -> String {
        let dashed = format!("--{}", normal(flag));
        if find(self.command(), &dashed).is_some() {
            return format!("write `{dashed}`");
        }
        if let Some(positional) = self.command().get_positionals().find(|a| a.get_id().as_str() == normal(flag)) {
            return format!("its {} comes without a flag", label(positional));
        }
        if let Some((.., why)) = NEEDLESS.iter().find(|(command, flag, _)| (*command, *flag) == (self.command().get_name(), dashed.as_str())) {
            return format!("it is not needed: {why}");
        }
        if let [first, ..] = having(self.root, &dashed).as_slice() {
            return format!("it is a flag of `{first}`{}", if first == "mcc compile" { ", and part of the artifact" } else { "" });
        }
        match replacement(flag) {
            Some(FlagReplacement::Flag(of, own)) if self.command().get_name() == of || find(self.command(), own).is_some() => {
                format!("mcc has `{own}`{}", self.about(of, own))
            }
            Some(FlagReplacement::Flag(of, own)) => format!("mcc has `mcc {of} {own}`{}", self.about(of, own)),
            Some(FlagReplacement::Setting(name)) => self.setting(name, value),
            Some(FlagReplacement::Text(way)) => format!("the model text says it: {way}"),
            Some(FlagReplacement::Always(why)) => format!("it is not needed: {why}"),
            Some(FlagReplacement::Nothing(why)) => format!("mcc has none: {why}"),
            None => match nearest(flag.trim_start_matches('-'), longs(self.command())) {
                Some(near) => format!("did you mean `--{near}`?"),
                None => "nor has any other command of mcc".into(),
            },
        }
    }

    /// What a flag's help says, in brackets.
    fn about(&self, command: &str, flag: &str) -> String {
        let help = self.root.find_subcommand(command).and_then(|c| find(c, flag)).and_then(Arg::get_help);
        help.map_or_else(String::new, |h| format!(" ({})", h.to_string().split([':', ';', '[']).next().unwrap_or("").trim()))
    }

    /// A setting of the model text; if a text is among the words that has no such setting, those that it has.
    fn setting(&self, name: &str, value: Option<&str>) -> String {
        let takes_settings = self.command().get_arguments().any(|a| a.get_short() == Some('D'));
        let shown = format!("`{}-D {name}={}`", if takes_settings { "" } else { "mcc compile .. " }, value.unwrap_or("N"));
        let text = self.after.iter().find(|w| w.ends_with(".mdl")).and_then(|w| Some((w, settings(Path::new(w))?)));
        match text {
            Some((file, own)) if !own.iter().any(|s| s == name) => {
                format!("sizes are settings of the model text, in most texts {shown}; those of `{file}` are {}", own.join(", "))
            }
            Some(_) | None => format!("it is a setting of the model text: {shown}"),
        }
    }

    /// A word that is no flag, and one too many.
    fn word(&self, found: &str) -> String {
        let name = self.name();
        let before = self.after.iter().position(|w| w == found).and_then(|k| k.checked_sub(1)).map(|k| self.after[k].as_str());
        let takes: Vec<String> = self.command().get_positionals().map(label).collect();
        if found.starts_with(['\u{2013}', '\u{2014}', '\u{2212}']) {
            return format!(
                "`{found}` begins with a dash that is not `-`: write `--{}`",
                found.trim_start_matches(|c: char| !c.is_ascii_alphanumeric())
            );
        }
        if found.parse::<f64>().is_ok() && found.starts_with('-') {
            return format!("`{found}` looks like a flag, and no value here may be below 0");
        }
        if let Some(short) = found.strip_prefix('-') {
            // clap names the first letter alone.
            let word = self.after.iter().find(|w| w.starts_with(found)).map_or(found, String::as_str);
            if !short.starts_with(char::is_alphanumeric) {
                return format!("`{word}` begins as flags do; behind `--` nothing is a flag: `{name} .. -- {word}`");
            }
            let whole = word.trim_start_matches('-');
            return match find(self.command(), &format!("--{whole}")) {
                Some(_) => format!("`{name}` has no `-{short}`: write `--{whole}`"),
                None => format!("`{name}` has no `-{short}`: flags of several letters begin with `--`"),
            };
        }
        if let Some(FlagReplacement::Setting(setting)) = found.split_once('=').and_then(|(flag, _)| replacement(flag)) {
            return format!("`{found}` is no flag: {}", self.setting(setting, found.split_once('=').map(|(_, v)| v)));
        }
        if let Some((flag, _)) = found.split_once('=')
            && replacement(flag).is_some()
        {
            return format!("`{found}` is no flag: {}", self.tip(flag, None));
        }
        if found.contains('=') {
            return format!("`{found}` stands alone: settings of the model text are `-D {found}`");
        }
        match before {
            Some(setting) if self.after.iter().any(|w| w == "-D") && !setting.contains(['=', '.', '-']) => {
                format!("`{found}` stands alone: a setting is `-D {setting}={found}`")
            }
            _ => format!("`{found}` is one too many: `{name}` takes {}", if takes.is_empty() { "nothing but flags".into() } else { takes.join(" ") }),
        }
    }

    /// A word that is no command.
    fn no_command(&self, found: &str) -> String {
        let (name, known) = (self.name(), names(self.command()));
        let path = Path::new(found);
        if self.path.len() > 1 && self.path[1].get_name() != "help" {
            let is_script = path.extension().is_some_and(|e| e == "sh");
            let fits = |c: &&Command| !is_script || c.get_name() == "megatron-args";
            let all = || self.command().get_subcommands();
            let only = all().find(fits).or_else(|| all().next()).map_or("", Command::get_name);
            return format!("`{name}` does not know the format `{found}`: it has {known}, as in `{name} {only} {found} -o OUT`");
        }
        if path.is_dir() || path.extension().is_some_and(|e| e == "mcc") {
            return format!("which command? `mcc run {found}`, `mcc dump {found}`, `mcc explain {found}`");
        }
        if path.exists() || path.extension().is_some_and(|e| e == "mdl") {
            return format!("which command? `mcc check {found}`, `mcc compile {found}`");
        }
        let lower = found.to_ascii_lowercase();
        let near = COMMANDS.iter().find(|(word, _)| *word == lower).map(|(_, c)| *c);
        match near.or_else(|| nearest(&lower, self.root.get_subcommands().map(Command::get_name))) {
            Some(near) => format!("mcc has no command `{found}`: did you mean `mcc {near}`?"),
            None => format!("mcc has no command `{found}`; it has {known}"),
        }
    }
}

/// Flags of other commands that a command has no need of: the command, the flag, why.
const NEEDLESS: [(&str, &str, &str); 1] = [("compile", "--force", "an artifact that is there is replaced, and never another directory")];

/// The flag of a command with this name or alias, with leading dashes.
fn find<'a>(command: &'a Command, flag: &str) -> Option<&'a Arg> {
    let name = flag.strip_prefix("--")?;
    command.get_arguments().find(|a| a.get_long() == Some(name) || a.get_all_aliases().is_some_and(|all| all.contains(&name)))
}

/// The commands that have a flag: `mcc run`.
fn having(root: &Command, flag: &str) -> Vec<String> {
    let mut out = vec![];
    for command in root.get_subcommands().filter(|c| !c.is_hide_set()) {
        let name = format!("{} {}", root.get_name(), command.get_name());
        if flag != "--help" && find(command, flag).is_some() {
            out.push(name.clone());
        }
        out.extend(command.get_subcommands().filter(|c| find(c, flag).is_some()).map(|c| format!("{name} {}", c.get_name())));
    }
    // Most flags that several commands have belong to plans, so `mcc compile` comes first.
    out.sort_by_key(|name| name != "mcc compile");
    out
}

/// The long names of a command's flags.
fn longs(command: &Command) -> impl Iterator<Item = &str> {
    command.get_arguments().flat_map(|a| a.get_long().into_iter().chain(a.get_all_aliases().unwrap_or_default()))
}

/// The names of a command's own commands.
fn names(command: &Command) -> String {
    let all: Vec<&str> = command.get_subcommands().filter(|c| !c.is_hide_set() && c.get_name() != "help").map(Command::get_name).collect();
    all.join(", ")
}

/// `<MODEL>`.
fn label(positional: &Arg) -> String {
    let names =
        positional.get_value_names().and_then(|n| n.first()).map_or_else(|| positional.get_id().to_string().to_uppercase(), ToString::to_string);
    format!("<{names}>")
}

/// The settings of a model text, if it can be read and has no errors.
fn settings(file: &Path) -> Option<Vec<String>> {
    let text = std::fs::read_to_string(file).ok()?;
    let dir = file.parent().unwrap_or(Path::new(".")).to_path_buf();
    let mut load = |name: &str| std::fs::read_to_string(dir.join(name)).map_err(|e| e.to_string());
    let done = frontend::compile(&mut ir::diag::Sources::default(), "", &text, &frontend::Options::default(), &mut load).ok()?;
    Some(done.model.settings.into_iter().map(|(name, _)| name).collect())
}
