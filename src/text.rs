//! Model texts: reading, checking, formatting, and showing what is wrong.

use crate::Failure;
use crate::cli::{CheckArgs, FmtArgs};
use crate::print::{note, out};
use anyhow::Context;
use frontend::{Options, Style};
use ir::diag::{Diagnostic, Severity, Sources};
use ir::model::Model;
use std::io::IsTerminal;
use std::path::Path;

/// A model text on its way: diagnostics refer to `sources`.
pub struct Text {
    pub sources: Sources,
    name: String,
    text: String,
    dir: std::path::PathBuf,
}

impl Text {
    pub fn read(path: &Path) -> Result<Text, Failure> {
        let name = path.display().to_string();
        let bytes = std::fs::read(path).with_context(|| format!("cannot read `{name}`"))?;
        let sources = Sources::default();
        match frontend::decode(&name, bytes) {
            Ok(text) => Ok(Text { sources, name, text, dir: path.parent().unwrap_or(Path::new(".")).to_path_buf() }),
            Err(e) => {
                show(&[*e], &sources);
                Err(Failure::Reported)
            }
        }
    }

    /// Elaborates it, or shows all its errors. Warnings are shown at most once.
    pub fn elaborate(&mut self, options: &Options) -> Result<Model, Failure> {
        let quiet = !self.sources.files.is_empty();
        self.sources = Sources::default();
        let dir = self.dir.clone();
        let mut load = |name: &str| std::fs::read_to_string(dir.join(name)).map_err(|e| e.to_string());
        match frontend::compile(&mut self.sources, &self.name, &self.text, options, &mut load) {
            Ok(done) => {
                if !quiet {
                    show(&done.warnings, &self.sources);
                }
                Ok(done.model)
            }
            Err(errors) => {
                show(&errors, &self.sources);
                Err(Failure::Reported)
            }
        }
    }
}

/// Shows diagnostics on standard error, and how many errors there were.
pub fn show(diagnostics: &[Diagnostic], sources: &Sources) {
    let style = if std::io::stderr().is_terminal() { Style::Coloured } else { Style::Plain };
    for d in diagnostics {
        note!("{}", frontend::render(d, sources, style));
    }
    let errors = diagnostics.iter().filter(|d| d.severity == Severity::Error).count();
    if errors > 1 {
        note!("{errors} errors");
    }
}

pub fn check(args: &CheckArgs) -> Result<(), Failure> {
    let mut text = Text::read(&args.model)?;
    let model = text.elaborate(&Options { defines: args.define.clone(), ..Options::default() })?;
    let graph = &model.graph;
    let numbers: u64 = graph.params.iter().map(|p| graph.body.dims.elements(&p.ty.dims)).sum();
    out!("{}: {} parameters in {} tensors, {} layers; no errors\n", graph.name, crate::report::count(numbers), graph.params.len(), graph.layers)?;
    Ok(())
}

pub fn format(args: &FmtArgs) -> Result<(), Failure> {
    let mut failed = false;
    for path in &args.models {
        let text = Text::read(path)?;
        match frontend::format(&text.name, &text.text) {
            Ok(formatted) if formatted == text.text => {}
            Ok(_) if args.check => {
                note!("{} is not formatted", path.display());
                failed = true;
            }
            Ok(formatted) => {
                // Through a temporary file: a text is never half written.
                let temporary = path.with_extension("mdl.tmp");
                std::fs::write(&temporary, formatted).with_context(|| format!("cannot write `{}`", temporary.display()))?;
                std::fs::rename(&temporary, path).with_context(|| format!("cannot write `{}`", path.display()))?;
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
