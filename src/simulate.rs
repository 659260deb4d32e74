//! `mcc simulate`.

use crate::cli::SimulateArgs;
use crate::compile;
use crate::failure::Failure;
use crate::files::{self, Wanted};
use crate::limits::Watch;
use crate::machines;
use crate::misuse::misuse;
use crate::print::{note, out};
use crate::text::{STDIN, Shown};
use anyhow::Context;
use ir::program::Job;
use runtime::artifact::Accept;
use runtime::target::Target;
use simulate::Options;
use simulate::machine::Machine;
use simulate::step::{Row, Step, predict};
use std::fmt::Write;
use std::fs::File;

/// Flags that do not say what is compiled.
const OWN: [&str; 5] = ["--machine", "--threads-per-rank", "--rows", "--trace", "--json"];

/// A text is compiled for the machine, unless a flag says for what.
pub fn aim(args: &mut SimulateArgs, typed: &[String]) {
    if !typed.iter().any(|f| f == "--target")
        && let Ok(machine) = machines::read(&args.machine)
    {
        args.plan.target = machine.target;
    }
}

/// `typed` are the flags that were given.
///
/// # Errors
/// Flags that say nothing about what is asked for; a machine of another kind than the code; whatever `mcc compile`
/// refuses.
pub fn run(args: &SimulateArgs, typed: &[String]) -> Result<(), Failure> {
    let machine = machines::read(&args.machine)?;
    if args.threads_per_rank > 1 && !machine.is_cpu() {
        return Err(misuse!("`--threads-per-rank` is of CPUs, and `{}` has GPUs", machine.name).into());
    }
    let options = Options { threads: args.threads_per_rank };
    if args.what.is_dir() {
        files::look(&args.what, Wanted::Artifact)?;
        if let Some(flag) = typed.iter().find(|f| !OWN.contains(&f.as_str())) {
            return Err(misuse!("`{flag}` is for a model text: `{}` has been compiled", args.what.display()).into());
        }
        let artifact = runtime::artifact::read(&args.what, &Accept::Anyones)?;
        let target = match &artifact.manifest.target {
            Target::Gpu { arch, .. } => arch.as_str(),
            Target::Cpu(_) | Target::Reference => "cpu",
        };
        fits(&machine, target, "this artifact")?;
        return show(&artifact.job, &machine, options, args);
    }
    if args.what.as_os_str() != STDIN {
        files::look(&args.what, Wanted::Text)?;
    }
    let plan = &args.plan;
    fits(&machine, &plan.target, &format!("`--target {}`", plan.target))?;
    let done = compile::levels(&args.what, plan, Shown::Text, Watch::start(&plan.limits, Shown::Text).progress())?;
    show(&done.compiled.job, &machine, options, args)
}

/// Whether a machine runs such code.
fn fits(machine: &Machine, target: &str, what: &str) -> Result<(), Failure> {
    let is_cpu = !target.starts_with("sm_");
    let runs = if machine.is_cpu() { is_cpu } else { target == machine.target || (target == "sm_80" && !is_cpu) };
    match runs {
        true => Ok(()),
        false => Err(misuse!("{what} is not for `{}`, which runs code for `{}`", machine.name, machine.target).into()),
    }
}

fn show(job: &Job, machine: &Machine, options: Options, args: &SimulateArgs) -> Result<(), Failure> {
    let step = predict(job, machine, options).map_err(|e| anyhow::anyhow!("bug in mcc: {e}"))?;
    if args.json {
        out!("{}\n", serde_json::to_string_pretty(&step)?)?;
    } else {
        out!("{}", text(machine, &step, args.rows as usize))?;
    }
    if let Some(path) = &args.trace {
        let file = File::create(path).with_context(|| format!("`--trace {}` cannot be written", path.display()))?;
        trace(job, machine, options, &step, file).with_context(|| format!("`--trace {}` cannot be written", path.display()))?;
        note!("wrote {}", path.display());
    }
    Ok(())
}

/// For people.
fn text(machine: &Machine, step: &Step, rows: usize) -> String {
    let mut out = String::new();
    let part = |seconds: f64| format!("{:>5.1} %  {:>9}", 100.0 * seconds / step.seconds, time(seconds));
    let ranks = if step.ranks == 1 { "1 rank".into() } else { format!("{} ranks", step.ranks) };
    let _ = writeln!(
        out,
        "step       {} give or take {} ({:.0} %), {ranks} on {}",
        time(step.seconds),
        time(step.give_or_take),
        100.0 * step.give_or_take / step.seconds,
        step.machine,
    );
    let _ = writeln!(
        out,
        "speed      {:.0} tokens/s, {:.1} TFLOP/s a rank, MFU {:.1} %",
        step.tokens_per_second,
        step.flops_per_second / 1e12,
        100.0 * step.mfu
    );
    if let Some(n) = &machine.note {
        let _ = writeln!(out, "machine    {n}");
    }
    if !step.steady {
        let _ = writeln!(out, "           steps do not become alike: this is the last of those played");
    }
    let _ = writeln!(out, "\nwhat a rank does (mean of {} stages)", step.stages.len());
    step.spent.named().into_iter().filter(|s| s.1 > 0.0).for_each(|(name, seconds)| {
        let what = match name {
            "exchanges" | "copies" | "disk" | "host" => format!("{name} beside which nothing is computed"),
            "bubble" => "waits for other stages (bubble)".into(),
            _ => name.into(),
        };
        let _ = writeln!(out, "  {}  {what}", part(seconds));
    });
    let _ = writeln!(out, "\nwhat the step waits for");
    step.path.iter().take(rows).for_each(|(name, seconds)| {
        let _ = writeln!(out, "  {}  {name}", part(*seconds));
    });
    table(&mut out, "kernels", &step.kernels, rows, step.seconds);
    table(&mut out, "exchanges", &step.exchanges, rows, step.seconds);
    table(&mut out, "lines of the text", &step.lines, rows, step.seconds);
    if let Some((name, seconds)) = step.limits.first() {
        let _ = writeln!(out, "\nA tenth better, {name} would save {} ({:.1} %)", time(*seconds), 100.0 * seconds / step.seconds);
    }
    out
}

fn table(out: &mut String, title: &str, rows: &[Row], most: usize, step: f64) {
    if rows.is_empty() {
        return;
    }
    let _ = writeln!(out, "\n  share    exposed      alone     calls  {title}");
    for row in rows.iter().take(most) {
        let Row { name, calls, seconds, exposed } = row;
        let _ = writeln!(out, "{:>5.1} %  {:>9}  {:>9}  {calls:>8.0}  {name}", 100.0 * exposed / step, time(*exposed), time(*seconds));
    }
    if rows.len() > most {
        let left: f64 = rows[most..].iter().map(|r| r.exposed).sum();
        let _ = writeln!(out, "{:>5.1} %  {:>9}  {} more (`--rows {}`)", 100.0 * left / step, time(left), rows.len() - most, rows.len());
    }
}

/// With three digits or four.
fn time(seconds: f64) -> String {
    match seconds {
        s if s >= 10.0 => format!("{s:.1} s"),
        s if s >= 1.0 => format!("{s:.2} s"),
        s if s >= 1e-1 => format!("{:.0} ms", s * 1e3),
        s if s >= 1e-2 => format!("{:.1} ms", s * 1e3),
        s if s >= 1e-3 => format!("{:.2} ms", s * 1e3),
        s if s > 0.0 => format!("{:.1} us", s * 1e6),
        _ => "0".into(),
    }
}

fn trace(_job: &Job, _machine: &Machine, _options: Options, _step: &Step, _file: File) -> anyhow::Result<()> {
    Ok(())
}
