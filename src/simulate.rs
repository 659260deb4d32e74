//! `mcc simulate`.

mod memory;
pub mod page;

use crate::cli::{Command, SimulateArgs};
use crate::compile;
use crate::failure::Failure;
use crate::files::{self, ExpectedInput};
use crate::limits::LimitWatch;
use crate::machines;
use crate::misuse::misuse;
use crate::pages::command_line;
use crate::print::{note, out};
use crate::text::{DiagnosticFormat, STDIN};
use anyhow::Context;
use ir::program::{Job, Stage};
use passes::report::footprint::size;
use runtime::artifact::AcceptedArtifacts;
use runtime::comm::Position;
use runtime::executor::CommandOrder;
use runtime::profile::{Profile, Ran, TimedStep};
use runtime::target::Target;
use simulate::Options;
use simulate::machine::Machine;
use simulate::play::{Slice, record};
use simulate::step::{Row, Step, predict};
use simulate::tape::Costs;
use simulate::timeline::shares;
use std::fmt::Write;
use std::fs::File;
use std::path::Path;

/// Flags that do not say what is compiled.
const OWN: [&str; 7] = ["--machine", "--threads-per-rank", "--slow-stage", "--rows", "--trace", "--html", "--json"];

/// The machine of a command that has one. A text is compiled for it, unless a flag says for what.
///
/// # Errors
/// No such file, or one that is no machine's.
pub fn aim(command: &mut Command, typed: &[String]) -> Result<Option<Machine>, Failure> {
    let (plan, machine) = match command {
        Command::Simulate(args) => (&mut args.plan, &args.machine),
        Command::Plan(args) => (&mut args.plan, &args.machine),
        Command::Explain(args) => match &args.time {
            Some(machine) => (&mut args.plan, machine),
            None => return Ok(None),
        },
        _ => return Ok(None),
    };
    let machine = machines::read(machine)?;
    if !typed.iter().any(|f| f == "--target") {
        plan.target.clone_from(&machine.target);
    }
    Ok(Some(machine))
}

/// `typed` are the flags that were given.
///
/// # Errors
/// Flags that say nothing about what is asked for; a machine of another kind than the code; whatever `mcc compile`
/// refuses.
pub fn run(args: &SimulateArgs, typed: &[String], machine: &Machine) -> Result<(), Failure> {
    let threads = args.threads_per_rank;
    if threads > 1 && !machine.is_cpu() {
        return Err(misuse!("`--threads-per-rank` is of CPUs, and `{}` has GPUs", machine.name).into());
    }
    if threads > machine.devices && machine.is_cpu() {
        return Err(misuse!("`--threads-per-rank {threads}`: `{}` has {} cores", machine.name, machine.devices).into());
    }
    let options = Options { threads, slow: args.slow_stage };
    if args.what.is_dir() {
        files::look(&args.what, ExpectedInput::Artifact)?;
        if let Some(flag) = typed.iter().find(|f| !OWN.contains(&f.as_str())) {
            return Err(misuse!("`{flag}` is for a model text: `{}` has been compiled", args.what.display()).into());
        }
        let artifact = runtime::artifact::read(&args.what, &AcceptedArtifacts::Anyones)?;
        fits_artifact(machine, &artifact.manifest.target)?;
        return show(&artifact.job, machine, options, args);
    }
    if args.what.as_os_str() != STDIN {
        files::look(&args.what, ExpectedInput::Text)?;
    }
    let plan = &args.plan;
    fits(machine, &plan.target, &format!("`--target {}`", plan.target))?;
    let done = compile::levels(&args.what, plan, DiagnosticFormat::Text, LimitWatch::start(&plan.limits, DiagnosticFormat::Text).progress())?;
    show(&done.compiled.job, machine, options, args)
}

/// Whether a machine runs an artifact.
pub fn fits_artifact(machine: &Machine, target: &Target) -> Result<(), Failure> {
    let target = match target {
        Target::Gpu { arch, .. } => arch.as_str(),
        Target::Cpu(_) | Target::Reference => "cpu",
    };
    fits(machine, target, "this artifact")
}

/// Whether a machine runs such code.
pub fn fits(machine: &Machine, target: &str, what: &str) -> Result<(), Failure> {
    let runs = if machine.is_cpu() { !target.starts_with("sm_") } else { target == machine.target };
    match runs {
        true => Ok(()),
        false => Err(misuse!("{what} is not for `{}`, which runs code for `{}`", machine.name, machine.target).into()),
    }
}

fn show(job: &Job, machine: &Machine, options: Options, args: &SimulateArgs) -> Result<(), Failure> {
    if let Some((stage, _)) = options.slow.filter(|(stage, _)| *stage >= job.stages.len()) {
        return Err(misuse!("`--slow-stage {stage}`: there are {} stages, from 0", job.stages.len()).into());
    }
    let step = predict(job, machine, options).map_err(anyhow::Error::from)?;
    if step.memory > step.device_memory {
        let [needs, has] = [step.memory, step.device_memory].map(size);
        note!("warning: a rank needs {needs}, and the device has {has}: `mcc compile --memory {}` says what would fit", step.device_memory);
    }
    if args.json {
        out!("{}\n", serde_json::to_string_pretty(&step)?)?;
    } else {
        out!("{}", text(machine, &step, args.rows as usize))?;
    }
    if let Some(path) = &args.trace {
        trace(job, machine, options, &step, path)?;
        note!("wrote {}", path.display());
    }
    if let Some(path) = &args.html {
        page::Predicted { job, machine, options, step: &step, commands: vec![("Command", command_line())], plans: None }.write(path)?;
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
    let _ = writeln!(out, "memory     {} of a device's {}, exchanges and the driver apart", size(step.memory), size(step.device_memory));
    if machine.measured.is_some() {
        let _ = writeln!(out, "measured   {} of the job's {} kernels, by the machine file", step.measured, step.all_kernels);
    }
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
    if step.path.len() > rows {
        let left = step.path[rows..].iter().map(|p| p.1).sum();
        let _ = writeln!(out, "  {}  {} more", part(left), step.path.len() - rows);
    }
    table(&mut out, "kernels", &step.kernels, rows, step.seconds);
    table(&mut out, "exchanges", &step.exchanges, rows, step.seconds);
    table(&mut out, "exchanges by their links", &step.links, rows, step.seconds);
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
        let Row { name, calls, seconds, exposed, .. } = row;
        let _ = writeln!(out, "{:>5.1} %  {:>9}  {:>9}  {calls:>8.0}  {name}", 100.0 * exposed / step, time(*exposed), time(*seconds));
    }
    if rows.len() > most {
        let left: f64 = rows[most..].iter().map(|r| r.exposed).sum();
        let _ = writeln!(out, "{:>5.1} %  {:>9}  {} more (`--rows {}`)", 100.0 * left / step, time(left), rows.len() - most, rows.len());
    }
}

/// With three digits or four.
pub fn time(seconds: f64) -> String {
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

/// Slices of a trace at most: Perfetto takes some seconds to read so many.
const SLICES: u64 = 3_000_000;

/// Writes the step as the profiler would have recorded it, of the first rank of each stage.
fn trace(job: &Job, machine: &Machine, options: Options, step: &Step, path: &Path) -> Result<(), Failure> {
    let commands = |stage: &Stage| {
        let calls = stage.schedule.train.iter().chain(&stage.schedule.update);
        calls.map(|c| job.programs[stage.program as usize].commands(c).count() as u64).sum::<u64>()
    };
    let slices: u64 = job.stages.iter().map(commands).sum();
    if slices > SLICES {
        return Err(
            misuse!("`--trace` would have {slices} slices, more than {SLICES}: compile for a smaller --global-batch-size or fewer layers").into()
        );
    }
    let costs = Costs::new(job, machine, &options);
    let first = |stage: usize| job.mesh.first_of_stage(stage as u64);
    let mut profile = Profile::new(job.mesh.world(), CommandOrder::Streams, None);
    let nanoseconds = |seconds: f64| (seconds * 1e9) as u64;
    record(job, machine, options, step.number, &mut |slice: Slice| {
        let ran = &mut profile.ranks[first(slice.stage) as usize].ran;
        // Commands without an event between them are one slice, of which each command has its share.
        let mut begin = slice.start;
        for (command, share) in shares(job, &costs, &slice) {
            let end = begin + (slice.end - slice.start) * share;
            let at = Position { phase: slice.phase, call: slice.call, command };
            ran.push(Ran { at, start: nanoseconds(begin), time: nanoseconds(end) - nanoseconds(begin) });
            begin = end;
        }
    })
    .map_err(anyhow::Error::from)?;
    let timed = TimedStep { step: 1, start: nanoseconds(step.begin), end: nanoseconds(step.begin + step.seconds) };
    (0..job.stages.len()).for_each(|s| profile.ranks[first(s) as usize].steps = vec![timed]);
    let written = || runtime::profile::trace::write(job, &profile, File::create(path)?);
    written().with_context(|| format!("`--trace {}` cannot be written", path.display()))?;
    Ok(())
}
