//! The trace of all ranks and streams, for Perfetto and `chrome://tracing`: the JSON of Chrome's Trace Event Format.
//!
//! A rank is a process there, a stream a thread, a command a slice; an arrow leads from each send to its receive.

use super::Profile;
use super::named::{NamedCommand, NamedCommands};
use crate::executor::peer;
use ir::program::{Action, Call, Job, Stream};
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::{self, Write};

#[derive(Serialize)]
struct Trace<'a> {
    #[serde(rename = "displayTimeUnit")]
    unit: &'static str,
    #[serde(rename = "traceEvents")]
    events: Vec<TraceEvent<'a>>,
}

/// Names of fields are the format's. Times are in microseconds.
#[derive(Serialize)]
struct TraceEvent<'a> {
    name: &'a str,
    cat: &'static str,
    ph: &'static str,
    pid: u64,
    tid: u64,
    ts: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<usize>,
    /// That an arrow ends at the slice around it.
    #[serde(skip_serializing_if = "Option::is_none")]
    bp: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    args: Option<Args>,
}

#[derive(Default, Serialize)]
struct Args {
    /// Name of a process or thread.
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sort_index: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    body: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    microbatch: Option<u32>,
    /// Where in the model's text it comes from.
    #[serde(skip_serializing_if = "Option::is_none")]
    place: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    scope: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kernel: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    flops: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<u64>,
}

/// Waits that are shorter held nothing up: nanoseconds.
const HELD: u64 = 1000;

/// Writes the trace.
///
/// # Errors
/// Those of the file.
pub fn write(job: &Job, profile: &Profile, out: impl Write) -> io::Result<()> {
    let names = NamedCommands::new(job);
    let origin = profile.ranks.iter().flat_map(|r| &r.steps).map(|s| s.start).min().unwrap_or(0);
    let at = |time: u64| time.wrapping_sub(origin).cast_signed() as f64 / 1e3;
    let plain = |name, ph, pid, tid| TraceEvent { name, cat: "mcc", ph, pid, tid, ts: 0.0, dur: None, id: None, bp: None, args: None };
    let symbols: Vec<String> = job.kernels.iter().map(|k| k.name()).collect();
    let numbers: BTreeMap<u64, String> = profile.ranks.iter().flat_map(|r| &r.steps).map(|s| (s.step, format!("step {}", s.step))).collect();
    let mut events = vec![];
    let mut messages: BTreeMap<_, [Vec<(Stream, f64)>; 2]> = BTreeMap::new();
    // A predicted step has only one rank of each stage.
    for (rank, recorded) in (0..).zip(&profile.ranks).filter(|(_, r)| !r.steps.is_empty() || !r.ran.is_empty()) {
        let is_there = |s: &Stream| recorded.ran.iter().any(|r| names.at(rank, r.at).is_some_and(|(_, command, _)| command.stream == *s));
        let streams = Stream::ALL.into_iter().filter(is_there).map(|s| (track(s), s.name()));
        let said = |name, tid, args| TraceEvent { args: Some(args), ..plain(name, "M", rank, tid) };
        let stage = job.mesh.stage(rank);
        events.push(said("process_name", 0, Args { name: Some(format!("rank {rank} (stage {stage})")), ..Args::default() }));
        events.push(said("process_sort_index", 0, Args { sort_index: Some(rank), ..Args::default() }));
        for (tid, name) in [(0, "steps")].into_iter().chain(streams) {
            events.push(said("thread_name", tid, Args { name: Some(name.into()), ..Args::default() }));
            events.push(said("thread_sort_index", tid, Args { sort_index: Some(tid), ..Args::default() }));
        }
        for s in &recorded.steps {
            let (ts, dur) = (at(s.start), (s.end - s.start) as f64 / 1e3);
            events.push(TraceEvent { ts, dur: Some(dur), ..plain(&numbers[&s.step], "X", rank, 0) });
        }
        for ran in &recorded.ran {
            let Some((call, command, named)) = names.at(rank, ran.at) else { continue };
            let cat = match command.action {
                Action::Record { .. } => continue,
                Action::Wait { .. } if ran.time < HELD => continue,
                Action::Wait { .. } => "wait",
                Action::Launch { .. } => "kernel",
                Action::Collective { .. } | Action::Send { .. } | Action::Recv { .. } | Action::Copy { .. } => "communication",
                Action::Fill { .. } | Action::Load { .. } | Action::Report { .. } | Action::Limit { .. } => "mcc",
            };
            let (ts, dur) = (at(ran.start), ran.time as f64 / 1e3);
            match command.action {
                Action::Send { hops, channel, .. } => {
                    messages.entry((rank, peer(job, rank, hops), channel)).or_default()[0].push((command.stream, ts));
                }
                // The arrow ends within the slice, hence before the slice's end.
                Action::Recv { hops, channel, .. } => {
                    messages.entry((peer(job, rank, hops), rank, channel)).or_default()[1].push((command.stream, ts + dur - dur.min(0.001)));
                }
                _ => {}
            }
            let args = Args { scope: Some(command.origin.scope.to_string()).filter(|s| !s.is_empty()), ..args(&names, call, named, &symbols) };
            events.push(TraceEvent { cat, ts, dur: Some(dur), args: Some(args), ..plain(&named.name, "X", rank, track(command.stream)) });
        }
    }
    // Messages of a channel arrive as they were sent, and none is under way where profiles begin.
    let pairs = messages.into_iter().flat_map(|((from, to, _), [sent, received])| {
        sent.into_iter().zip(received).map(move |(s, r)| [(from, "s", None, s), (to, "f", Some("e"), r)])
    });
    for (id, ends) in pairs.enumerate() {
        for (rank, ph, bp, (stream, ts)) in ends {
            events.push(TraceEvent { ts, cat: "message", id: Some(id), bp, ..plain("message", ph, rank, track(stream)) });
        }
    }
    let mut out = io::BufWriter::new(out);
    serde_json::to_writer(&mut out, &Trace { unit: "ms", events })?;
    out.flush()
}

/// The number of a stream's track; 0 is the steps'.
fn track(stream: Stream) -> u64 {
    1 + stream as u64
}

fn args(names: &NamedCommands, call: &Call, named: &NamedCommand, symbols: &[String]) -> Args {
    let some = |n: u64| Some(n).filter(|n| *n > 0);
    Args {
        body: Some(named.body.name()),
        microbatch: Some(call.microbatch),
        place: Some(names.places(&named.lines)).filter(|p| !p.is_empty()),
        kernel: named.kernel.map(|k| symbols[k.index()].clone()),
        flops: some(named.work.flops),
        bytes: some(named.work.bytes),
        ..Args::default()
    }
}
