//! `mcc passes`, `mcc opt` and `mcc reduce`: passes by themselves, on texts of modules.

use crate::cli::{OptArgs, OptWorkArgs, PrintArgs, ReduceArgs};
use crate::failure::Failure;
use crate::misuse::misuse;
use crate::print::{note, out};
use crate::reproducer;
use crate::text::{DiagnosticFormat, STDIN};
use anyhow::{Context, anyhow};
use ir::diag::{Diagnostic, Source, Sources, Span};
use ir::module::Module;
use ir::options::Options;
use ir::progress::Progress;
use ir::text::{ParseError, parse_module, print_module};
use passes::compile::{BugEvidence, CompileError, damage, holds, run as run_pass, verify, verify_rest};
use passes::shrink::shrink;
use passes::table::{PASSES, Pass, find, verifiers};
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

/// `mcc passes`.
pub fn list() -> Result<(), Failure> {
    let width = PASSES.iter().map(|p| p.name.len()).max().unwrap_or(0);
    let mut level = None;
    for pass in PASSES {
        if level.replace(pass.levels) != Some(pass.levels) {
            out!("{} -> {}\n", pass.levels.0, pass.levels.1)?;
        }
        let when = if (pass.wanted)(&Options::default()) { "" } else { " When asked for." };
        out!("  {:<width$}  {}{when}\n", pass.name, pass.summary)?;
    }
    Ok(())
}

/// What `mcc opt` is to do with a module.
struct OptWork {
    passes: Vec<&'static Pass>,
    /// After which the module is damaged.
    damaged: Option<String>,
}

/// How a module fails.
struct ModuleFailure {
    /// The pass, or the verifier.
    at: &'static str,
    says: BugEvidence,
}

impl ModuleFailure {
    /// Whether another module fails so too: at the same place, where the same invariant is violated in the same way. Violations
    /// and panics of one way say the same but for names and numbers.
    fn is_like(&self, other: &ModuleFailure) -> bool {
        let alike = match (&self.says, &other.says) {
            (BugEvidence::Violation(a), BugEvidence::Violation(b)) => a.invariant == b.invariant && kind(&a.to_string()) == kind(&b.to_string()),
            (BugEvidence::Panic(a), BugEvidence::Panic(b)) => kind(a) == kind(b),
            (BugEvidence::Violation(_) | BugEvidence::Panic(_), _) => false,
        };
        self.at == other.at && alike
    }
}

impl OptWork {
    /// What is asked for, or else what the module's text says.
    fn new(args: &OptWorkArgs, text: &str) -> Result<OptWork, Failure> {
        let of = |a: &OptWorkArgs| OptWork { passes: a.passes.iter().filter_map(|name| find(name)).collect(), damaged: a.damage_after.clone() };
        if args.verify || !args.passes.is_empty() {
            return Ok(of(args));
        }
        let recorded = OptWorkArgs::recorded(text).filter(|a| a.verify || !a.passes.is_empty());
        let none = || misuse!("what is to run? `--passes PASS,..`, or `--verify`; the module has no line `; RUN: mcc opt ..` that says so");
        Ok(of(&recorded.ok_or_else(none)?))
    }

    /// The flags of `mcc opt` that do this.
    fn flags(&self) -> String {
        let names: Vec<&str> = self.passes.iter().map(|p| p.name).collect();
        reproducer::flags(&names, self.damaged.as_deref())
    }

    /// Without the passes that a module does not need to fail so: each is tried.
    fn fewer(mut self, m: &Module, failed: &ModuleFailure) -> OptWork {
        for k in (0..self.passes.len()).rev() {
            let passes = self.passes.iter().enumerate().filter(|(i, _)| *i != k).map(|(_, p)| *p).collect();
            let without = OptWork { passes, damaged: self.damaged.clone() };
            if !without.passes.is_empty() && without.fails_like(m, failed) {
                self = without;
            }
        }
        self
    }

    /// Refuses a module that is at another level than the passes take, or whose options do not ask for them.
    fn fits(&self, m: &Module) -> anyhow::Result<()> {
        let mut level = m.level();
        for pass in &self.passes {
            if pass.levels.0 != level {
                let after = if level == m.level() { "the module is" } else { "the passes before it leave it" };
                return Err(misuse!("`{}` takes a module at level `{}`, and {after} at level `{level}`", pass.name, pass.levels.0));
            }
            if !(pass.wanted)(&m.options) {
                return Err(misuse!("`{}` does nothing with the module's options", pass.name));
            }
            level = pass.levels.1;
        }
        Ok(())
    }

    /// Runs the passes, and all verifiers of a level after each. What is given has to hold up to the verifiers of its
    /// level.
    fn run(&self, m: &mut Module, warnings: &mut Vec<Diagnostic>) -> Result<(), CompileError> {
        self.passes.iter().try_for_each(|pass| self.step(pass, m, warnings))
    }

    /// Runs one of the passes.
    fn step(&self, pass: &'static Pass, m: &mut Module, warnings: &mut Vec<Diagnostic>) -> Result<(), CompileError> {
        run_pass(m, pass, warnings, &Progress::default())?;
        warnings.extend(verify_rest(m, pass)?);
        if self.damaged.as_deref() == Some(pass.name) {
            damage(m);
            verify(m, pass)?;
        }
        Ok(())
    }

    /// Refuses to print around passes that do not run.
    fn prints(&self, print: &PrintArgs) -> Result<(), Failure> {
        match print.named().find(|name| *name != "all" && self.passes.iter().all(|p| p.name != **name)) {
            Some(name) => Err(misuse!("`{name}` is none of the passes that run").into()),
            None if self.passes.is_empty() && print.is_printing() => Err(misuse!("no pass runs that anything could be printed of").into()),
            None => Ok(()),
        }
    }

    /// How it fails, if it does: of what holds up to the verifiers, where there are passes.
    fn fails(&self, m: &Module) -> Option<ModuleFailure> {
        let input = verifiers(m).find_map(|v| Some(ModuleFailure { at: v.name, says: holds(v, m).err()? }));
        if self.passes.is_empty() || input.is_some() || self.fits(m).is_err() {
            return input.filter(|_| self.passes.is_empty());
        }
        match self.run(&mut m.clone(), &mut vec![]) {
            Err(CompileError::Broken(b)) => Some(ModuleFailure { at: b.pass, says: b.complaint }),
            Ok(()) | Err(CompileError::User(_)) => None,
        }
    }

    fn fails_like(&self, m: &Module, failed: &ModuleFailure) -> bool {
        self.fails(m).is_some_and(|f| f.is_like(failed))
    }
}

/// What a message says of any module: its words without quoted names, numbers and what is in brackets.
fn kind(text: &str) -> String {
    let (mut open, mut quoted) = (0, false);
    let mut plain = |c: char| {
        open += i32::from(c == '(') - i32::from(c == ')');
        quoted ^= c == '`';
        open == 0 && c != ')' && !quoted && !c.is_ascii_digit()
    };
    text.chars().filter(|c| plain(*c)).collect()
}

/// `mcc opt`.
///
/// # Errors
/// A text that is no module, or one that a verifier refuses; passes that are not for its level; what passes say is
/// wrong.
pub fn run(args: &OptArgs) -> Result<(), Failure> {
    let (name, text) = text(&args.work.module)?;
    let work = OptWork::new(&args.work, &text)?;
    work.prints(&args.print)?;
    let (mut module, sources) = read(name, text)?;
    let verify_alone = work.passes.is_empty();
    let mut refused = false;
    for verifier in verifiers(&module) {
        match holds(verifier, &module) {
            Ok(warnings) => {
                DiagnosticFormat::Text.show(&warnings, &sources)?;
                if verify_alone && warnings.is_empty() {
                    out!("{}: holds. {}\n", verifier.name, verifier.summary)?;
                }
            }
            Err(complaint) => {
                note!("error: {}: verifier `{}`: {complaint}", args.work.module.display(), verifier.name);
                if let Some(invariant) = complaint.invariant() {
                    note!("  = {invariant}: {}", invariant.holds());
                }
                refused = true;
            }
        }
    }
    if refused {
        return Err(Failure::Reported);
    }
    if verify_alone {
        return Ok(());
    }
    work.fits(&module)?;
    let show = |text: &str| Ok(out!("{text}")?);
    for pass in &work.passes {
        let before = args.print.before(pass, &module, &show)?;
        let mut warnings = vec![];
        let ran = work.step(pass, &mut module, &mut warnings);
        DiagnosticFormat::Text.show(&warnings, &sources)?;
        match ran {
            Ok(()) => args.print.after(pass, before, &module, &show)?,
            Err(CompileError::User(errors)) => {
                DiagnosticFormat::Text.show(&errors, &sources)?;
                return Err(Failure::Reported);
            }
            Err(e @ CompileError::Broken(_)) => return Err(e.into()),
        }
    }
    if !args.print.is_printing() {
        out!("{}", print_module(&module))?;
    }
    Ok(())
}

/// `mcc reduce`.
///
/// # Errors
/// A module that does not fail.
pub fn reduce(args: &ReduceArgs) -> Result<(), Failure> {
    let (name, text) = text(&args.work.module)?;
    let work = OptWork::new(&args.work, &text)?;
    let (module, _) = read(name, text)?;
    // Without this, each try that panics would print a message.
    std::panic::set_hook(Box::new(|_| {}));
    let Some(failed) = work.fails(&module) else {
        return Err(anyhow!("{} does not fail so: there is nothing to keep", args.work.module.display()).into());
    };
    note!("`{}`: {}", failed.at, failed.says);
    if work.passes.is_empty() && failed.at == "meaning" {
        // With passes this cannot be: what they are given has to agree with the text.
        note!(
            "warning: what is left out makes the module differ from its text too, so the smaller one may have another mistake of this kind; \
             `--passes` from the module before the pass that is wrong keeps the mistake"
        );
    }
    let size = |m: &Module| print_module(m).lines().count();
    // Passes are left out first, as each try of a module runs all of them.
    let work = work.fewer(&module, &failed);
    let small = shrink(module.clone(), &mut |m| work.fails_like(m, &failed), &mut |m| note!("{} lines", size(m)));
    let work = work.fewer(&small, &failed);
    let says = work.fails(&small).map_or(failed.says, |f| f.says);
    let path = args.output.clone().unwrap_or_else(|| match args.work.module.as_os_str() == STDIN {
        true => PathBuf::from("reduced.mir"),
        false => args.work.module.with_extension("reduced.mir"),
    });
    fs::write(&path, reproducer::text(&format!("`{}`: {says}", failed.at), &small, &work.flags()))
        .with_context(|| format!("cannot write {}", path.display()))?;
    out!("{} of {} lines, {}: {}\n", size(&small), size(&module), work.flags(), path.display())?;
    Ok(())
}

/// The name and the text of a file, or of standard input.
fn text(path: &Path) -> anyhow::Result<(String, String)> {
    if path.as_os_str() == STDIN {
        let mut text = String::new();
        std::io::stdin().lock().read_to_string(&mut text).context("cannot read standard input")?;
        return Ok(("<stdin>".to_string(), text));
    }
    Ok((path.display().to_string(), fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?))
}

/// The module of a text, and the texts for what is said of it.
fn read(name: String, text: String) -> Result<(Module, Sources), Failure> {
    match parse_module(&text) {
        Ok(module) => {
            let sources = module.job.as_ref().map_or(vec![], |j| j.sources.clone());
            Ok((module, Sources { files: sources }))
        }
        Err(e) => {
            DiagnosticFormat::Text.show(&[no_module(&e, &text)], &Sources { files: vec![Source { name, text }] })?;
            Err(Failure::Reported)
        }
    }
}

/// E0113: a text that is no module's.
fn no_module(e: &ParseError, text: &str) -> Diagnostic {
    // Columns of spans count bytes, those of parse errors characters.
    let line = text.lines().nth(e.line - 1).unwrap_or("");
    let col = line.chars().take(e.column - 1).map(char::len_utf8).sum::<usize>() as u32 + 1;
    let span = Span { file: 0, line: e.line as u32, col, len: 1 };
    let modules = text.lines().filter(|l| *l == "module").count();
    let what = if modules == 1 { "a line of this module cannot be read" } else { "this is no text of a module" };
    let d = Diagnostic::error("E0113", what.to_string()).label(span, e.text.clone());
    if modules == 1 {
        return d.help("docs/ir.md explains what a module says");
    }
    let d = match text.split_whitespace().next() {
        _ if modules > 1 => {
            d.help(format!("it has {modules} modules: keep the lines of one, from `module` to the next; passes begin at any of them"))
        }
        Some("graph" | "sharded" | "local" | "program" | "kernel" | "#" | "//") => d.help(
            "a dump of one level leaves out what verifiers and passes compare it with (the text, the options, other levels): \
             `mcc compile MODEL.mdl --print-after PASS` prints all of it",
        ),
        _ => d,
    };
    d.help("`mcc compile MODEL.mdl --stop-after PASS` prints one; docs/ir.md explains what it says")
}
