//! `mcc import megatron-args`: a launch script of Megatron-LM, as commands of mcc.
//!
//! `grammar` parses, and `script` follows the script to the training that it starts, without running anything:
//! `words` and `expansion` expand, `arithmetic` computes, `conditions` and `branches` decide, `shell` holds what is
//! known, `sources` reads what it sources, and `paths` takes texts apart. `launch` and `flags` take the training
//! apart. `plan` holds what comes of it; `texts` and `traits` choose a model text, and `model`, `attention`,
//! `experts`, `mesh`, `schedule`, `data` and `rest` each take the flags that they know; `lines` writes.

mod arithmetic;
mod attention;
mod branches;
mod conditions;
mod data;
mod expansion;
mod experts;
mod flags;
mod grammar;
mod launch;
mod lines;
mod mesh;
mod model;
mod paths;
mod plan;
mod rest;
mod schedule;
mod script;
mod shell;
mod sources;
#[cfg(test)]
mod tests;
mod text;
mod texts;
mod traits;
mod words;

use crate::cli::MegatronArgs;
use crate::failure::Failure;
use crate::files::{self, ExpectedInput};
use crate::print::{note, out, report};
use anyhow::{Context, anyhow};
use flags::Flags;
use lines::Names;
use plan::{Choices, CommandFlag, Plan};
use shell::Shell;
use sources::Unreadable;
use std::ffi::OsString;
use std::fs;
use std::path::Path;
use texts::ModelText;

/// The script that is written, with warnings and a summary for the user.
struct ImportedScript {
    lines: String,
    warnings: Vec<String>,
    summary: String,
}

pub fn import(args: &MegatronArgs) -> Result<(), Failure> {
    let source = read(&args.script)?;
    if let Some(output) = args.output.as_ref().filter(|o| !args.force && o.symlink_metadata().is_ok()) {
        return Err(anyhow!("`{}` exists: --force replaces it, another -o keeps it", output.display()).into());
    }
    let made = make(&source, args)?;
    made.warnings.iter().for_each(|w| note!("warning: {w}"));
    match &args.output {
        None => out!("{}", made.lines)?,
        Some(output) => {
            write(output, &made.lines).with_context(|| format!("cannot write `{}`", output.display()))?;
            report!("wrote {}: {}\n", output.display(), made.summary);
        }
    }
    Ok(())
}

/// Makes commands of a script. Nothing is read but its text, and files beside it that it sources.
fn make(source: &str, args: &MegatronArgs) -> Result<ImportedScript, anyhow::Error> {
    let shown = args.script.display().to_string();
    let mut shell = Shell::new(&args.set);
    shell.script = Some(args.script.clone());
    script::follow(source, &mut shell).map_err(|e| anyhow!("`{shown}` cannot be followed: {e}"))?;
    let launches = std::mem::take(&mut shell.launches);
    let Some((launch, others)) = launches.split_first() else { return Err(no_training(&shown, &shell)) };
    for other in others {
        shell.note(
            other.line,
            format!("a second training with `{}` is not imported: the first one is, of {}", other.file(), shell.place(launch.line)),
        );
    }
    let flags = Flags::new(&launch.flags);
    let text = ModelText::nearest(&launch.file(), &traits::of(&flags));
    let foreign = model::FOREIGN_MODELS.iter().find_map(|name| flags.get(name));
    let (Some(text), None) = (text, foreign) else {
        let what = foreign.map_or_else(|| launch.file(), |flag| flag.typed.clone());
        return Err(anyhow!(
            "{}: no text of models/ computes the model of `{what}`: docs/language.md says how to write one",
            shell.place(launch.line)
        ));
    };
    let batch = launch::batch_options(source);
    let mut plan = Plan::new(&mut shell, flags, launch, &batch, Choices { target: &args.target }, text);
    plan.make();
    look(&mut plan);
    for (name, near) in plan.shell.unused() {
        let near = near.map_or(String::new(), |n| format!(", did you mean `{n}`?"));
        plan.errors.push(format!("`--set {name}=..`: the script asks for no `{name}`{near}"));
    }
    if !plan.errors.is_empty() {
        return Err(anyhow!("`{shown}` cannot be imported:\n  {}", plan.errors.join("\n  ")));
    }
    let stem = args.script.file_stem().map_or_else(|| "model".into(), |s| s.to_string_lossy().into_owned());
    let models = args.models.display().to_string();
    let lines = plan.lines(&Names { script: &shown, models: &models, artifact: &format!("{stem}.mcc") });
    let (in_lines, left) = (plan.compile.len() + plan.run.len() + plan.held_out.len(), plan.left.len() + plan.shell.notes.len());
    let summary = format!("{}, {in_lines} flags of mcc; {left} notes at its end say what is left out, and why", text.file);
    let mut warnings = plan.differs;
    if !plan.strangers.is_empty() {
        warnings.push(format!("not known to mcc, and in no line: {}", plan.strangers.join(", ")));
    }
    Ok(ImportedScript { lines, warnings, summary })
}

/// The script's text.
fn read(path: &Path) -> Result<String, Failure> {
    files::look(path, ExpectedInput::Script)?;
    sources::read(path).map_err(|e| match e {
        Unreadable::Io(e) => anyhow::Error::from(e).context(format!("cannot read `{}`", path.display())).into(),
        e => anyhow!("`{}`: {e}", path.display()).into(),
    })
}

fn no_training(shown: &str, shell: &Shell) -> anyhow::Error {
    let mut message = format!("`{shown}` starts no training that can be seen: a command with a program such as `pretrain_gpt.py` and its flags");
    for note in &shell.notes {
        message.push_str(&format!("\n  {}: {}", shell.place(note.line), note.text));
    }
    anyhow!(message)
}

/// Has the command line's own rules look at what was made: a value that mcc does not take is an error here, and
/// not when the lines are run.
fn look(plan: &mut Plan<'_>) {
    let data = CommandFlag { flag: "--valid-data".into(), values: vec![text::Text::known("DATA", 0)] };
    let held_out = plan.held_out.iter().chain((!plan.held_out.is_empty()).then_some(&data));
    let compile: Vec<&CommandFlag> = plan.compile.iter().collect();
    let run: Vec<&CommandFlag> = plan.run.iter().chain(held_out).collect();
    for (command, file, flags) in [("compile", "model.mdl", compile), ("run", "model.mcc", run)] {
        let mut words = vec!["mcc".to_string(), command.into(), file.into()];
        for flag in flags {
            // For an unknown value stands a number or a name, whichever the flag takes.
            let values = flag.values.iter().map(|v| v.whole().map_or_else(|| stand_in(&flag.flag).to_string(), str::to_string));
            match flag.flag.strip_prefix("-D ") {
                Some(name) => words.extend(["-D".into(), format!("{name}={}", values.collect::<String>())]),
                None => words.extend(std::iter::once(flag.flag.clone()).chain(values)),
            }
        }
        match crate::read(&words.iter().map(OsString::from).collect::<Vec<_>>()) {
            Ok((cli, given)) => {
                let typed: Vec<String> = given.into_iter().map(|g| g.0).collect();
                plan.errors.extend(crate::idle::look(&cli.command, &typed).errors);
            }
            Err(e) => {
                let text = e.to_string();
                let first = text.lines().take_while(|l| !l.trim().is_empty()).map(|l| l.trim().trim_start_matches("error: ")).collect::<Vec<_>>();
                plan.errors.push(first.join(" "));
            }
        }
    }
}

/// A value that stands for an unknown one.
fn stand_in(flag: &str) -> &'static str {
    match flag {
        "--dtype" => "bf16",
        "--rendezvous" => "host:1",
        _ => "1",
    }
}

/// Writes a script that can be started.
fn write(path: &Path, text: &str) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::write(path, text)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))
}
