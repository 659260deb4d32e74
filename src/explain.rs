//! `mcc explain`.

use crate::cli::{self, ExplainArgs};
use crate::codes;
use crate::compile;
use crate::explain_svg;
use crate::failure::Failure;
use crate::files::{self, ExpectedInput};
use crate::limits::LimitWatch;
use crate::misuse::misuse;
use crate::print::{out, runs};
use crate::simulate;
use crate::text::{DiagnosticFormat, STDIN};
use ::simulate::Options;
use ::simulate::machine::Machine;
use ::simulate::step::{Row, Step, exchange_name, predict, without};
use anyhow::anyhow;
use ir::program::{Action, Job, ProgramBody};
use passes::commands::cost_model::{Traffic, traffic};
use passes::report::explain::{Exchange, Line, Tensor, exchanges, line, totals};
use passes::report::footprint::size;
use passes::report::reshards::changes;
use runtime::artifact::AcceptedArtifacts;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// An exchange with its reason in words.
#[derive(Serialize)]
struct ExplainedExchange {
    #[serde(flatten)]
    exchange: Exchange,
    reason: String,
    /// What would do without it.
    without: Option<String>,
}

impl From<Exchange> for ExplainedExchange {
    fn from(exchange: Exchange) -> ExplainedExchange {
        let reason = exchange.reason.as_ref().map_or(String::new(), |r| r.why.clone());
        let without = exchange.reason.as_ref().and_then(|r| r.avoided_by.as_ref()).map(cli::avoided_by);
        ExplainedExchange { exchange, reason, without }
    }
}

/// A line of the model text with what it communicates.
#[derive(Serialize)]
struct ExplainedLine {
    #[serde(flatten)]
    line: Line,
    exchanges: Vec<ExplainedExchange>,
    #[serde(skip_serializing_if = "Option::is_none")]
    time: Option<Time>,
}

/// How long something takes on a machine, mean of the stages: seconds of a rank and step.
#[derive(Serialize)]
struct Time {
    machine: String,
    /// Kernels, and exchanges beside which nothing is computed.
    exposed: f64,
    /// Sum of the times of kernels and exchanges, each by itself.
    alone: f64,
    step: f64,
    /// The step, if it took no time.
    without: f64,
}

/// A job's communication: every exchange, and sums per axis.
#[derive(Serialize)]
struct Communication {
    exchanges: Vec<ExplainedExchange>,
    totals: Vec<Total>,
    streams: Vec<StreamTraffic>,
    /// Times of exchanges that are alike.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    times: Vec<(String, Time)>,
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
struct StreamTraffic {
    stream: &'static str,
    #[serde(flatten)]
    traffic: Traffic,
}

/// `typed` are the flags that were given.
///
/// # Errors
/// Flags that say nothing about what is asked for; whatever `mcc compile` refuses.
pub fn run(args: &ExplainArgs, typed: &[String], machine: Option<&Machine>) -> Result<(), Failure> {
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
        files::look(target, ExpectedInput::Artifact)?;
        if let Some(flag) = typed.iter().find(|f| !["--json", "--collectives", "--time"].contains(&f.as_str())) {
            return Err(misuse!("`{flag}` is for a model text: `{}` has been compiled", target.display()).into());
        }
        let artifact = runtime::artifact::read(target, &AcceptedArtifacts::Anyones)?;
        machine.iter().try_for_each(|m| simulate::fits_artifact(m, &artifact.manifest.target))?;
        return show(args, &communication(&artifact.job, machine)?, communication_text);
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
        files::look(&model, ExpectedInput::Text)?;
    }
    if args.svg && number.is_none() {
        return Err(misuse!("--svg draws the collectives of a line of a model text: `MODEL.mdl:LINE`").into());
    }
    if number.is_none() && !args.collectives {
        // A word after `--` is no flag, even if it begins with `-`.
        let line = format!("{}{}:12", if from_stdin { "-- " } else { "" }, target.display());
        return Err(misuse!("which line? `mcc explain {line}`, or --collectives for all communication").into());
    }
    machine.iter().try_for_each(|m| simulate::fits(m, &args.plan.target, &format!("`--target {}`", args.plan.target)))?;
    let done = compile::levels(&model, &args.plan, DiagnosticFormat::Text, LimitWatch::start(&args.plan.limits, DiagnosticFormat::Text).progress())?;
    let Some(number) = number else {
        return show(args, &communication(&done.compiled.job, machine)?, communication_text);
    };
    let name = model.display().to_string();
    let file = done.sources.files.iter().position(|f| f.name == name).unwrap_or(0);
    if args.svg {
        let changes = changes(&done.compiled.sharded, file as u16, number);
        return match changes.is_empty() {
            true => Err(anyhow!("line {number} of `{name}` needs no collective with these flags: there is nothing to draw").into()),
            false => Ok(out!("{}", explain_svg::picture(&changes))?),
        };
    }
    match line(&done.compiled.sharded, &done.compiled.job, file as u16, number) {
        Some(mut found) => {
            let exchanges = std::mem::take(&mut found.exchanges).into_iter().map(ExplainedExchange::from).collect();
            let time = machine.map(|m| time_of_line(&done.compiled.job, m, &found.place, (file as u16, number))).transpose()?;
            show(args, &ExplainedLine { line: found, exchanges, time }, line_text)
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

/// What a prediction says of a row, and what the step is without the commands of which `keep` says no.
fn time_of(job: &Job, machine: &Machine, step: &Step, row: Option<&Row>, keep: &dyn Fn(usize, &ProgramBody, usize) -> bool) -> Result<Time, Failure> {
    let without = without(job, machine, Options::default(), keep).map_err(anyhow::Error::from)?;
    let (exposed, alone) = row.map_or((0.0, 0.0), |r| (r.exposed, r.seconds));
    Ok(Time { machine: machine.name.clone(), exposed, alone, step: step.seconds, without })
}

fn time_of_line(job: &Job, machine: &Machine, place: &str, line: (u16, u32)) -> Result<Time, Failure> {
    let step = predict(job, machine, Options::default()).map_err(anyhow::Error::from)?;
    let row = step.lines.iter().find(|r| r.name == place);
    let is_other = |_: usize, body: &ProgramBody, at: usize| body.commands[at].origin.span.is_none_or(|s| (s.file, s.line) != line);
    time_of(job, machine, &step, row, &is_other)
}

fn times_of_exchanges(job: &Job, machine: &Machine) -> Result<Vec<(String, Time)>, Failure> {
    let step = predict(job, machine, Options::default()).map_err(anyhow::Error::from)?;
    let of_row = |row: &Row| {
        let is_other = |stage: usize, body: &ProgramBody, at: usize| {
            let program = &job.programs[job.stages[stage].program as usize];
            let action = &body.commands[at].action;
            let is_exchange = matches!(action, Action::Collective { .. } | Action::Send { .. } | Action::Recv { .. });
            !is_exchange || exchange_name(job, program, action) != row.name
        };
        Ok((row.name.clone(), time_of(job, machine, &step, Some(row), &is_other)?))
    };
    step.exchanges.iter().map(of_row).collect()
}

fn communication(job: &Job, machine: Option<&Machine>) -> Result<Communication, Failure> {
    let times = machine.map_or(Ok(vec![]), |m| times_of_exchanges(job, m))?;
    let exchanges = exchanges(job);
    let streams = traffic(job).into_iter().map(|(stream, traffic)| StreamTraffic { stream: stream.name(), traffic }).collect();
    let of =
        |optional| totals(&exchanges, optional).into_iter().map(move |((axis, kind), (calls, bytes))| Total { axis, kind, optional, calls, bytes });
    let totals = [false, true].into_iter().flat_map(of).collect();
    Ok(Communication { exchanges: exchanges.into_iter().map(ExplainedExchange::from).collect(), totals, streams, times })
}

fn time_text(what: &str, t: &Time) -> String {
    let share = 100.0 * t.exposed / t.step;
    let [exposed, alone, step, without] = [t.exposed, t.alone, t.step, t.without].map(simulate::time);
    let of = format!("a step of {step} on {}, mean of the stages; without it {without}", t.machine);
    format!("{what:<12} {exposed} ({share:.1} %, {alone} by itself) of {of}\n")
}

/// What is said of exchanges that are left out of most steps.
const FURTHER: &str = ", if all further passes of rows of experts run";

fn communication_text(c: &Communication) -> String {
    let mut out = exchanges_text(&c.exchanges);
    for t in &c.totals {
        let more = if t.optional { FURTHER } else { "" };
        let _ = writeln!(out, "{:<10} {:<15} {:>6} calls, {} sent by a rank in a step{more}", t.axis, t.kind, t.calls, size(t.bytes));
    }
    for StreamTraffic { stream, traffic: Traffic { bytes, hidden } } in &c.streams {
        let share = 100 * hidden / (*bytes).max(1);
        let _ = writeln!(
            out,
            "stream {stream:<8} {} in a step, by one rank of each stage together: {} ({share} %) overlapped, {} exposed",
            size(*bytes),
            size(*hidden),
            size(bytes - hidden)
        );
    }
    c.times.iter().for_each(|(name, t)| out.push_str(&time_text(&format!("time of {name}:"), t)));
    if c.exchanges.is_empty() {
        out.push_str("nothing is communicated\n");
    }
    out
}

/// Exchanges that a reader takes for one: alike but for the stages and virtual stages that issue them.
struct Alike<'a> {
    first: &'a ExplainedExchange,
    body: &'a str,
    /// Of a rank of each stage in a step: calls, and bytes sent.
    stages: BTreeMap<u64, (u64, u64)>,
}

/// In the order in which each appears first. Virtual stages number their bodies: `forward`, `forward1`.
fn alike(exchanges: &[ExplainedExchange]) -> Vec<Alike<'_>> {
    fn pass(body: &str) -> &str {
        body.trim_end_matches(|c: char| c.is_ascii_digit())
    }
    let mut found: Vec<Alike> = vec![];
    for one in exchanges {
        let of = |e: &ExplainedExchange| {
            let x = &e.exchange;
            let what = (x.kind, x.axis.clone(), pass(&x.body).to_string(), x.place.clone());
            (what, x.recomputed, x.optional, x.bytes, e.reason.clone(), e.without.clone())
        };
        let at = found.iter().position(|a| of(a.first) == of(one)).unwrap_or_else(|| {
            found.push(Alike { first: one, body: pass(&one.exchange.body), stages: BTreeMap::new() });
            found.len() - 1
        });
        for stage in &one.exchange.stages {
            let (calls, sent) = found[at].stages.entry(*stage).or_default();
            *calls += one.exchange.calls_per_step;
            *sent += one.exchange.sent_per_step;
        }
    }
    found
}

/// `128`, or `128 to 256` where stages differ.
fn range<T: Ord + Copy>(of: impl Iterator<Item = T> + Clone, text: impl Fn(T) -> String) -> String {
    let (least, most) = (of.clone().min(), of.max());
    match (least, most) {
        (Some(least), Some(most)) if least < most => format!("{} to {}", text(least), text(most)),
        (least, _) => least.map_or(String::new(), text),
    }
}

/// Columns in which a reason and what would do without it share a line.
const REASON_COLUMNS: usize = 118;

fn exchanges_text(exchanges: &[ExplainedExchange]) -> String {
    let mut out = String::new();
    for Alike { first, body, stages: of_stages } in alike(exchanges) {
        let ExplainedExchange { exchange: e, reason, without } = first;
        let _ = writeln!(
            out,
            "{} over {}, {body} {}of {} on {}",
            e.kind,
            e.axis,
            if e.recomputed { "(recomputed) " } else { "" },
            if e.place.is_empty() { "the step" } else { &e.place },
            stages(&of_stages.keys().copied().collect::<Vec<_>>())
        );
        let each = if e.kind == "send" { "from and to ranks" } else { "for example ranks" };
        let calls = range(of_stages.values().map(|v| v.0), |n| n.to_string());
        let _ = writeln!(
            out,
            "  {} a call, {calls} call{} and {} sent by a rank in a step{}; {each} {}",
            size(e.bytes),
            if calls == "1" { "" } else { "s" },
            range(of_stages.values().map(|v| v.1), size),
            if e.optional { FURTHER } else { "" },
            if e.kind == "send" { listed(&e.members) } else { runs(&e.members) }
        );
        let because = format!("  because {reason}");
        let _ = match without {
            None => writeln!(out, "{because}"),
            Some(w) if because.len() + w.len() + 13 <= REASON_COLUMNS => writeln!(out, "{because}; not needed {w}"),
            Some(w) => writeln!(out, "{because}\n  not needed {w}"),
        };
    }
    out
}

/// `stage 0`, `stages 0 to 2 and 7`.
fn listed(list: &[u64]) -> String {
    list.iter().map(u64::to_string).collect::<Vec<_>>().join(", ")
}

fn stages(list: &[u64]) -> String {
    format!("stage{} {}", if list.len() == 1 { "" } else { "s" }, runs(list))
}

fn line_text(ExplainedLine { line: l, exchanges, time }: &ExplainedLine) -> String {
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
    out.extend(time.iter().map(|t| time_text("time", t)));
    out + &exchanges_text(exchanges)
}
