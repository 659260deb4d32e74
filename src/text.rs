//! Model texts: reading, checking, formatting, and showing what is wrong.

use crate::cli::{self, FmtArgs};
use crate::failure::Failure;
use crate::files::{self, ExpectedInput};
use crate::print::{PrintError, note, out};
use crate::shown::escapes;
use anyhow::Context;
use frontend::Style;
use ir::diag::{Diagnostic, Label, Severity, Sources, Span};
use serde::Serialize;
use std::io::{IsTerminal, Read, Write};
use std::path::{Path, PathBuf};

/// The name of standard input among files.
pub const STDIN: &str = "-";

/// How diagnostics are shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiagnosticFormat {
    /// With their lines, on standard error.
    Text,
    /// One JSON object a line, on standard output.
    Json,
}

/// A diagnostic for tools.
#[derive(Serialize)]
struct JsonDiagnostic<'a> {
    severity: &'static str,
    /// None where a text has none, such as a file that cannot be read.
    code: Option<&'a str>,
    message: &'a str,
    /// The first is the primary one.
    labels: Vec<JsonLabel<'a>>,
    notes: &'a [String],
    help: Vec<String>,
}

/// Line and column count from 1, columns and length in bytes.
#[derive(Serialize)]
struct JsonLabel<'a> {
    file: &'a str,
    line: u32,
    column: u32,
    length: u32,
    text: &'a str,
}

impl DiagnosticFormat {
    /// Shows diagnostics; as text, how many errors there were too.
    ///
    /// # Errors
    /// JSON that cannot be printed.
    pub fn show(self, diagnostics: &[Diagnostic], sources: &Sources) -> Result<(), PrintError> {
        match self {
            DiagnosticFormat::Text => show(diagnostics, sources),
            DiagnosticFormat::Json => {
                for d in diagnostics {
                    let labels = d.labels.iter().map(|l| place(l, sources)).collect();
                    line(&JsonDiagnostic {
                        severity: name(d.severity),
                        code: Some(&d.code),
                        message: &d.message,
                        labels,
                        notes: &d.notes,
                        help: d.help.iter().map(cli::help).collect(),
                    })?;
                }
            }
        }
        Ok(())
    }

    /// Shows an error that has no place in a text.
    ///
    /// # Errors
    /// JSON that cannot be printed.
    pub fn message(self, message: &str) -> Result<(), PrintError> {
        match self {
            DiagnosticFormat::Text => note!("error: {message}"),
            DiagnosticFormat::Json => {
                line(&JsonDiagnostic { severity: name(Severity::Error), code: None, message, labels: vec![], notes: &[], help: vec![] })?
            }
        }
        Ok(())
    }
}

fn place<'a>(label: &'a Label, sources: &'a Sources) -> JsonLabel<'a> {
    let Span { file, line, col, len } = label.span;
    let file = sources.files.get(usize::from(file)).map_or("", |f| &f.name);
    JsonLabel { file, line, column: col, length: len, text: &label.text }
}

fn name(severity: Severity) -> &'static str {
    match severity {
        Severity::Error => "error",
        Severity::Warning => "warning",
    }
}

fn line(line: &JsonDiagnostic<'_>) -> Result<(), PrintError> {
    out!("{}\n", serde_json::to_string(line).expect("invariant: plain data with text keys"))
}

/// A model text.
pub struct ModelFile {
    pub shown: DiagnosticFormat,
    /// What diagnostics call it.
    pub name: String,
    pub text: String,
    dir: PathBuf,
}

impl ModelFile {
    /// Reads a file, or standard input if its name is [`STDIN`]; what a text on standard input imports is in the
    /// working directory.
    ///
    /// # Errors
    /// A file that cannot be read; bytes that are no text, which are shown.
    pub fn read(path: &Path, shown: DiagnosticFormat) -> Result<ModelFile, Failure> {
        let from_stdin = path.as_os_str() == STDIN;
        let name = if from_stdin { "<stdin>".to_string() } else { path.display().to_string() };
        let bytes = if from_stdin {
            let mut bytes = vec![];
            std::io::stdin().lock().read_to_end(&mut bytes).context("cannot read standard input")?;
            bytes
        } else {
            files::look(path, ExpectedInput::Text)?;
            std::fs::read(path).with_context(|| format!("cannot read `{name}`"))?
        };
        match frontend::decode(&name, bytes) {
            Ok(text) => Ok(ModelFile { shown, name, text, dir: path.parent().unwrap_or(Path::new(".")).to_path_buf() }),
            Err(e) => {
                shown.show(&[*e], &Sources::default())?;
                Err(Failure::Reported)
            }
        }
    }

    /// What reads the texts that it imports.
    pub fn imports(&self) -> impl FnMut(&str) -> Result<String, String> {
        |name| std::fs::read_to_string(self.dir.join(name)).map_err(|e| e.to_string())
    }
}

/// Shows diagnostics on standard error, and how many errors there were.
pub fn show(diagnostics: &[Diagnostic], sources: &Sources) {
    let style = if std::io::stderr().is_terminal() && escapes() { Style::Coloured } else { Style::Plain };
    for d in diagnostics {
        let spelled = Diagnostic { help: d.help.iter().map(|h| cli::help(h).into()).collect(), ..d.clone() };
        note!("{}", frontend::render(&spelled, sources, style));
    }
    let errors = diagnostics.iter().filter(|d| d.severity == Severity::Error).count();
    if errors > 1 {
        note!("{errors} errors");
    }
}

pub fn format(args: &FmtArgs) -> Result<(), Failure> {
    let mut failed = false;
    for path in &args.models {
        let from_stdin = path.as_os_str() == STDIN;
        let text = ModelFile::read(path, DiagnosticFormat::Text)?;
        match frontend::format(&text.name, &text.text) {
            Ok(formatted) if from_stdin && !args.check => out!("{formatted}")?,
            Ok(formatted) if formatted == text.text => {}
            Ok(_) if args.check => {
                note!("{} is not formatted", if from_stdin { "standard input".into() } else { path.display().to_string() });
                failed = true;
            }
            Ok(formatted) => {
                // The text goes through a temporary file, so that it is never half written.
                let written = runtime::paths::write_whole(path, |file| file.write_all(formatted.as_bytes()));
                written.with_context(|| format!("cannot write `{}`", path.display()))?;
            }
            Err(errors) => {
                let sources = Sources { files: vec![ir::diag::Source { name: text.name.clone(), text: text.text.clone() }] };
                show(&errors, &sources);
                failed = true;
            }
        }
    }
    if failed { Err(Failure::Reported) } else { Ok(()) }
}
