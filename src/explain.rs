//! `mcc explain`.

use crate::cli::{self, ExplainArgs};
use crate::codes;
use crate::compile;
use crate::failure::Failure;
use crate::files::{self, Wanted};
use crate::limits::Watch;
use crate::misuse::misuse;
use crate::print::out;
use crate::text::{STDIN, Shown};
use ir::program::Job;
use passes::commands::cost_model::{Traffic, traffic};
use passes::report::explain::{Exchange, Line, Tensor, exchanges, line, totals};
use passes::report::footprint::size;
use runtime::artifact::Accept;
use serde::Serialize;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// An exchange with its reason in words.
#[derive(Serialize)]
struct Said {
    #[serde(flatten)]
    exchange: Exchange,
    reason: String,
    /// What would do without it.
    without: Option<String>,
}

impl From<Exchange> for Said {
    fn from(exchange: Exchange) -> Said {
        let reason = exchange.reason.as_ref().map_or(String::new(), |r| r.why.clone());
        let without = exchange.reason.as_ref().and_then(|r| r.avoided_by.as_ref()).map(cli::avoided_by);
        Said { exchange, reason, without }
    }
}

/// A line of the model text with what it communicates.
#[derive(Serialize)]
struct LineSaid {
    #[serde(flatten)]
    line: Line,
    exchanges: Vec<Said>,
}

/// A job's communication: every exchange, and sums per axis.
#[derive(Serialize)]
struct Communication {
    exchanges: Vec<Said>,
    totals: Vec<Total>,
    streams: Vec<OnStream>,
}

/// The most that a rank sends in a step.
#[derive(Serialize)]
struct Total {
    axis: String,
    kind: &'static str,
    /// Only some steps need it, and none more.
    optional: bool,
    calls: u64,
    bytes: u64,
}

/// What one rank of each stage sends and receives on a stream in a step, and how much of it while a kernel runs.
#[derive(Serialize)]
struct OnStream {
    stream: &'static str,
    #[serde(flatten)]
    traffic: Traffic,
}

/// `typed` are the flags that were given.
///
/// # Errors
/// Flags that say nothing about what is asked for; whatever `mcc compile` refuses.
pub fn run(args: &ExplainArgs, typed: &[String]) -> Result<(), Failure> {
    let target = &args.what;
    if let Some(code) = target.to_str().filter(|word| codes::is_code(word) && !target.exists()) {
        if let Some(flag) = typed.first() {
            return Err(misuse!("`{flag}` says nothing about a code").into());
        }
        let known = codes::meaning(code).ok_or_else(|| misuse!("mcc has no code `{code}`: docs/errors.md and docs/verifier.md list them"))?;
        out!("{known}")?;
        return Ok(());
    }
    let (model, number) = split(target);
    let from_stdin = model.as_os_str() == STDIN;
    if target.is_dir() {
        files::look(target, Wanted::Artifact)?;
        if let Some(flag) = typed.iter().find(|f| !["--json", "--collectives"].contains(&f.as_str())) {
            return Err(misuse!("`{flag}` is for a model text: `{}` has been compiled", target.display()).into());
        }
        let job = runtime::artifact::read(target, &Accept::Anyones)?.job;
        return show(args, &communication(&job), communication_text);
    }
    if number.is_some() && model.is_dir() {
        return Err(misuse!(
            "`{}` is an artifact: ask for a line of its model text, `MODEL.mdl:LINE`, with the flags it was compiled with",
            model.display()
        )
        .into());
    }
    if number.is_some() && args.collectives {
        return Err(misuse!("`--collectives` is of a whole job; what a line communicates is said with it").into());
    }
    if !from_stdin {
        files::look(&model, Wanted::Text)?;
    }
    if number.is_none() && !args.collectives {
        // Behind `--`, what begins with `-` is no flag.
        let line = format!("{}{}:12", if from_stdin { "-- " } else { "" }, target.display());
        return Err(misuse!("which line? `mcc explain {line}`, or --collectives for all communication").into());
    }
    let done = compile::levels(&model, &args.plan, Shown::Text, Watch::start(&args.plan.limits, Shown::Text).progress())?;
    let Some(number) = number else {
        return show(args, &communication(&done.compiled.job), communication_text);
    };
    let name = model.display().to_string();
    let file = done.sources.files.iter().position(|f| f.name == name).unwrap_or(0);
    match line(&done.compiled.sharded, &done.compiled.job, file as u16, number) {
        Some(mut found) => {
            let exchanges = std::mem::take(&mut found.exchanges).into_iter().map(Said::from).collect();
            show(args, &LineSaid { line: found, exchanges }, line_text)
        }
        None => {
            let lines = done.sources.files.get(file).map_or(0, |f| f.text.lines().count());
            Err(misuse!("nothing is computed on line {number} of `{name}`, which has {lines} lines").into())
        }
    }
}

/// `model.mdl:12`.
fn split(target: &Path) -> (PathBuf, Option<u32>) {
    let text = target.to_string_lossy();
    match text.rsplit_once(':').and_then(|(path, line)| Some((path, line.parse::<u32>().ok()?))) {
        Some((path, line)) => (PathBuf::from(path), Some(line)),
        None => (target.to_path_buf(), None),
    }
}

fn show<T: Serialize>(args: &ExplainArgs, found: &T, text: fn(&T) -> String) -> Result<(), Failure> {
    if args.json {
        out!("{}\n", serde_json::to_string_pretty(found)?)?;
    } else {
        out!("{}", text(found))?;
    }
    Ok(())
}

fn communication(job: &Job) -> Communication {
    let exchanges = exchanges(job);
    let streams = traffic(job).into_iter().map(|(stream, traffic)| OnStream { stream: stream.name(), traffic }).collect();
    let of =
        |optional| totals(&exchanges, optional).into_iter().map(move |((axis, kind), (calls, bytes))| Total { axis, kind, optional, calls, bytes });
    let totals = [false, true].into_iter().flat_map(of).collect();
    Communication { exchanges: exchanges.into_iter().map(Said::from).collect(), totals, streams }
}

/// What is said of exchanges that are left out of most steps.
const FURTHER: &str = ", if all further passes of rows of experts run";

fn communication_text(c: &Communication) -> String {
    let mut out = exchanges_text(&c.exchanges);
    for t in &c.totals {
        let more = if t.optional { FURTHER } else { "" };
        let _ = writeln!(out, "{:<10} {:<15} {:>6} calls, {} sent by a rank in a step{more}", t.axis, t.kind, t.calls, size(t.bytes));
    }
    for OnStream { stream, traffic: Traffic { bytes, hidden } } in &c.streams {
        let share = 100 * hidden / (*bytes).max(1);
        let _ = writeln!(
            out,
            "stream {stream:<8} {} in a step by a rank of each stage: {} ({share} %) overlapped, {} exposed",
            size(*bytes),
            size(*hidden),
            size(bytes - hidden)
        );
    }
    if c.exchanges.is_empty() {
        out.push_str("nothing is communicated\n");
    }
    out
}

fn exchanges_text(exchanges: &[Said]) -> String {
    let mut out = String::new();
    for Said { exchange: e, reason, without } in exchanges {
        let _ = writeln!(
            out,
            "{} over {}, {} {}of {} on {}",
            e.kind,
            e.axis,
            e.body,
            if e.recomputed { "(recomputed) " } else { "" },
            if e.place.is_empty() { "the step" } else { &e.place },
            stages(&e.stages)
        );
        let each = if e.kind == "send" { "from and to ranks" } else { "for example ranks" };
        let _ = writeln!(
            out,
            "  {} a call, {} calls and {} sent by a rank in a step{}; {each} {:?}",
            size(e.bytes),
            e.calls_per_step,
            size(e.sent_per_step),
            if e.optional { FURTHER } else { "" },
            e.members
        );
        let _ = writeln!(out, "  because {reason}");
        if let Some(without) = without {
            let _ = writeln!(out, "  not needed {without}");
        }
    }
    out
}

/// `stage 0`, `stages 0 to 2 and 7`.
fn stages(list: &[u64]) -> String {
    let mut runs: Vec<(u64, u64)> = vec![];
    for k in list {
        match runs.last_mut() {
            Some(run) if run.1 + 1 == *k => run.1 = *k,
            _ => runs.push((*k, *k)),
        }
    }
    let named: Vec<String> = runs.iter().map(|(a, b)| if a == b { a.to_string() } else { format!("{a} to {b}") }).collect();
    format!("stage{} {}", if list.len() == 1 { "" } else { "s" }, named.join(", "))
}

fn line_text(LineSaid { line: l, exchanges }: &LineSaid) -> String {
    let mut out = format!("{} on {}\n", l.place, stages(&l.stages));
    let tensors = |out: &mut String, what: &str, list: &[Tensor]| {
        for t in list {
            let partial = if t.partial.is_empty() { String::new() } else { format!(", a sum over {} not yet taken", t.partial) };
            let _ = writeln!(out, "{what:<12} {} {}, {} a rank{partial}", t.name, t.dims, size(t.bytes));
        }
    };
    tensors(&mut out, "parameter", &l.parameters);
    tensors(&mut out, "value", &l.values);
    for (stage, kind, bytes) in &l.memory {
        let _ = writeln!(out, "{:<12} {} of {kind} on a rank of stage {stage}", "memory", size(*bytes));
    }
    let flops = [("forward", l.forward_flops), ("recomputed", l.recomputed_flops), ("backward", l.backward_flops)];
    let flops: Vec<String> = flops.iter().filter(|f| f.1 > 0).map(|(n, f)| format!("{n} {:.3e}", *f as f64)).collect();
    if !flops.is_empty() {
        let _ = writeln!(out, "{:<12} {}, of all ranks in a step", "flops", flops.join(", "));
    }
    out + &exchanges_text(exchanges)
}
