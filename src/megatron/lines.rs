//! The script that is written: two commands, with what was decided above them and what is left out below.

use super::plan::{CommandFlag, Plan};
use super::shell::Origin;
use super::text::{JOINED, ScriptPiece, Text};
use std::collections::BTreeSet;
use std::fmt::Write;

/// How wide comments are.
const WIDTH: usize = 112;

/// Flags that take several words.
const LISTS: [&str; 4] = ["--data-path", "--train-data-path", "--valid-data-path", "--test-data-path"];

/// The names of what is written and read.
pub struct Names<'a> {
    /// The script that was read.
    pub script: &'a str,
    /// The directory of model texts.
    pub models: &'a str,
    pub artifact: &'a str,
}

impl Plan<'_> {
    /// The whole script.
    pub fn lines(&self, names: &Names<'_>) -> String {
        let mut out = String::from("#!/bin/sh\n");
        comment(
            &mut out,
            "",
            &format!("Made by `mcc import megatron-args` of {}, {}. Nothing of it was run.", names.script, self.shell.place(self.launch.line)),
        );
        for (title, list) in [
            ("What is trained otherwise than by the script:", &self.differs),
            ("Computed:", &self.computed),
            ("From Megatron-LM's defaults, as the script says nothing of them:", &self.defaults),
        ] {
            if !list.is_empty() {
                out.push_str("#\n");
                comment(&mut out, "", title);
                list.iter().for_each(|line| comment(&mut out, "  ", line));
            }
        }
        out.push_str("\nset -eu\n\n");
        self.parameters(&mut out);
        let mut compile = vec![format!("mcc compile {}", quoted_name(&format!("{}/{}", names.models, self.text.file)))];
        compile.extend(self.compile.iter().map(|p| self.flag_text(p)));
        compile.extend([format!("--target {}", quoted_name(self.choices.target)), format!("-o {}", quoted_name(names.artifact))]);
        if !self.choices.target.starts_with("sm_") {
            comment(&mut out, "", "For GPUs: `--target sm_90a` (H100) or `sm_80` (A100), and `mcc run --exchanges nccl`.");
        }
        command(&mut out, &compile);
        out.push('\n');
        self.run_lines(&mut out, names);
        self.left_out(&mut out);
        out
    }

    /// Variables that have to be given, as only the user knows them.
    fn parameters(&self, out: &mut String) {
        let used: BTreeSet<usize> =
            self.command_flags().flat_map(|p| &p.values).chain(&self.starts).flat_map(|t| t.unknowns().collect::<Vec<_>>()).collect();
        for which in &used {
            let unknown = &self.shell.unknowns[*which];
            let (name, place) = (&unknown.name, self.shell.place_of_script(unknown.line));
            let _ = match &unknown.origin {
                Origin::Argument(k) => writeln!(out, "{name}=${{{k}:?'argument {k}, as of {place}'}}"),
                Origin::Environment => writeln!(out, ": \"${{{name}:?of the environment, as in {place}}}\""),
                Origin::Command(command) => {
                    comment(out, "", &format!("{}{} has {}, which was not run.", place[..1].to_uppercase(), &place[1..], one_line(command)));
                    writeln!(out, ": \"${{{name}:?the value of {place}}}\"")
                }
                Origin::Needed(what) => {
                    comment(out, "", &format!("{name}: {what}."));
                    writeln!(out, ": \"${{{name}:?a value is needed}}\"")
                }
            };
        }
        if !used.is_empty() {
            out.push('\n');
        }
    }

    fn command_flags(&self) -> impl Iterator<Item = &CommandFlag> {
        self.compile.iter().chain(&self.run).chain(&self.held_out)
    }

    fn run_lines(&self, out: &mut String, names: &Names<'_>) {
        let mut run = vec![];
        let start: Vec<String> = self.starts.iter().map(|w| self.quoted(w)).collect();
        if start.is_empty() {
            run.push(format!("mcc run {}", quoted_name(names.artifact)));
        } else {
            comment(
                out,
                "",
                "On several machines the artifact is the same file for all, and ranks know each other by a secret: MCC_SECRET in the environment, or `--secret-file FILE` (`docs/security.md`).",
            );
            run.push(format!("{} mcc run {}", start.join(" "), quoted_name(names.artifact)));
        }
        run.extend(self.run.iter().map(|p| self.flag_text(p)));
        if !self.held_out.is_empty() {
            let held_out: Vec<String> = self.held_out.iter().map(|p| self.flag_text(p)).collect();
            comment(out, "", "VALID_DATA=FILE in the environment adds held-out losses.");
            run.push(format!("${{VALID_DATA:+--valid-data \"$VALID_DATA\" {}}}", held_out.join(" ")));
        }
        command(out, &run);
    }

    fn left_out(&self, out: &mut String) {
        for (title, list) in [
            ("Flags of the script that are in no line above:", &self.left),
            ("Lines of the script that say more than was followed:", &self.shell.notes),
        ] {
            if !list.is_empty() {
                out.push('\n');
                comment(out, "", title);
                list.iter().for_each(|note| comment(out, "  ", &format!("{}: {}", self.shell.place(note.line), one_line(&note.text))));
            }
        }
    }

    /// `--tp 2`, `-D layers=4`.
    fn flag_text(&self, flag: &CommandFlag) -> String {
        let quoted = |value: &Text| if LISTS.contains(&flag.flag.as_str()) { self.word_or_list(value) } else { self.quoted(value) };
        let values: Vec<String> = flag.values.iter().map(quoted).collect();
        match values.as_slice() {
            [] => flag.flag.clone(),
            values => format!("{}{}{}", flag.flag, if flag.flag.starts_with("-D ") { "=" } else { " " }, values.join(" ")),
        }
    }

    /// A text that may stand for several words, as in the script: what is unknown has no quotes.
    fn word_or_list(&self, text: &Text) -> String {
        let piece = |piece: &ScriptPiece| match piece {
            ScriptPiece::Known(known) => quoted_name(&known.replace(JOINED, "")),
            ScriptPiece::Unknown(which) => format!("${{{}}}", self.shell.unknowns[*which].name),
        };
        text.pieces().iter().map(piece).collect()
    }

    /// A text as a word of a shell.
    fn quoted(&self, text: &Text) -> String {
        match text.whole() {
            Some(known) => quoted_name(&known.replace(JOINED, "")),
            None => {
                let mut out = String::from("\"");
                for piece in text.pieces() {
                    match piece {
                        ScriptPiece::Known(known) => out
                            .extend(known.chars().filter(|c| *c != JOINED).flat_map(|c| "\\\"$`".contains(c).then_some('\\').into_iter().chain([c]))),
                        ScriptPiece::Unknown(which) => {
                            let _ = write!(out, "${{{}}}", self.shell.unknowns[*which].name);
                        }
                    }
                }
                out + "\""
            }
        }
    }
}

/// A known text as a word of a shell.
fn quoted_name(text: &str) -> String {
    let is_plain = !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || "_-./,:=+@%".contains(c));
    if is_plain { text.into() } else { format!("'{}'", text.replace('\'', "'\\''")) }
}

/// A command, one flag a line.
fn command(out: &mut String, parts: &[String]) {
    out.push_str(&parts.join(" \\\n  "));
    out.push('\n');
}

/// A comment, in lines of some width.
fn comment(out: &mut String, indent: &str, text: &str) {
    let mut line = format!("# {indent}");
    let start = line.len();
    for word in text.split_whitespace() {
        if line.len() > start && line.chars().count() + 1 + word.chars().count() > WIDTH {
            out.push_str(line.trim_end());
            out.push('\n');
            line = format!("# {indent}  ");
        } else if line.len() > start {
            line.push(' ');
        }
        line.push_str(word);
    }
    out.push_str(line.trim_end());
    out.push('\n');
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
