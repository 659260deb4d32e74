//! The table that `mcc compile` ends with.

use ir::mesh::Axis;
use ir::op::{Collective, Op};
use ir::program::{Action, Call, Group, Job, Program};
use passes::footprint::{Footprint, Kind, size};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

/// Ranks, classes, kernels; communication per axis; memory per rank by kind; seconds per pass.
pub fn table(job: &Job, times: &[(&str, Duration)]) -> String {
    let mut out = String::new();
    let mesh = &job.mesh;
    let mut named = vec![Axis::Pp, Axis::Dp, Axis::Cp, Axis::Tp];
    if mesh.subs.iter().any(|s| s.role != s.axis.usual_role()) {
        named.extend([Axis::Ep, Axis::Etp]);
    }
    let axes: Vec<String> = named.into_iter().filter(|a| mesh.size(*a) > 1).map(|a| format!("{a} {}", mesh.size(a))).collect();
    let parameters: u64 = job.params.iter().map(|p| p.dims.iter().map(|d| d.size).product::<u64>()).sum();
    let _ = writeln!(
        out,
        "model      {}, {} parameters, {} sequences a step in {} microbatches",
        job.model,
        count(parameters),
        job.global_batch,
        job.microbatches
    );
    let _ = writeln!(
        out,
        "ranks      {} ({}), {} program class{}, {} kernels ({} matrix products)",
        mesh.world(),
        if axes.is_empty() { "one".to_string() } else { axes.join(", ") },
        job.programs.len(),
        if job.programs.len() == 1 { "" } else { "es" },
        count(job.kernels.len() as u64),
        job.kernels.iter().filter(|k| k.body.nodes.iter().any(|n| matches!(n.op, Op::Dot { .. }))).count(),
    );
    let mut traffic: BTreeMap<(String, &'static str), (u64, u64)> = BTreeMap::new();
    for stage in &job.stages {
        let program = &job.programs[stage.program as usize];
        for (key, (calls, bytes)) in sent(job, program, stage.schedule.train.iter().chain(&stage.schedule.update)) {
            let most = traffic.entry(key).or_default();
            *most = (most.0.max(calls), most.1.max(bytes));
        }
    }
    for ((axis, kind), (calls, bytes)) in traffic {
        let _ = writeln!(out, "{:<10} {kind:<15} {calls:>6} calls, {} sent by a rank in a step", axis, size(bytes));
    }
    let (most, least) = Footprint::extremes(job);
    let _ = writeln!(out, "memory     {}", footprint(job, most, "most"));
    if Footprint::of(job, least) != Footprint::of(job, most) {
        let _ = writeln!(out, "           {}", footprint(job, least, "least"));
    }
    let times: Vec<String> = times.iter().map(|(n, t)| format!("{n} {:.2}", t.as_secs_f64())).collect();
    let _ = writeln!(out, "seconds    {}", times.join(", "));
    out
}

/// Calls and bytes that one rank sends in the given calls (rings: (n-1)/n of the whole for gathers and scatters, twice that for
/// all-reduces), by axes and kind.
fn sent<'a>(job: &Job, program: &Program, calls: impl Iterator<Item = &'a Call>) -> BTreeMap<(String, &'static str), (u64, u64)> {
    let mut out: BTreeMap<(String, &'static str), (u64, u64)> = BTreeMap::new();
    for call in calls {
        for c in &program.bodies[call.body.index()].commands {
            let (key, bytes) = match &c.action {
                Action::Collective { kind, group, dtype, count, .. } => {
                    let group = &program.groups[group.index()];
                    let n = members(job, group);
                    let bytes = count * dtype.bytes();
                    let sent = match kind {
                        Collective::AllReduce(_) => 2 * bytes * (n - 1) / n,
                        Collective::Shift => bytes,
                        Collective::AllGather | Collective::ReduceScatter(_) | Collective::AllToAll => bytes * (n - 1),
                    };
                    ((name(job, group), kind.name()), sent)
                }
                Action::Send { dtype, count, .. } => (("pp".into(), "send"), count * dtype.bytes()),
                _ => continue,
            };
            let entry = out.entry(key).or_default();
            *entry = (entry.0 + 1, entry.1 + bytes);
        }
    }
    out
}

fn members(job: &Job, group: &Group) -> u64 {
    group.subs.iter().map(|u| job.mesh[*u].size).product::<u64>() * group.stages.as_ref().map_or(1, |s| s.len() as u64)
}

fn name(job: &Job, group: &Group) -> String {
    let subs = job.mesh.describe(&group.subs);
    match (&group.stages, subs.is_empty()) {
        (None, _) => subs,
        (Some(_), true) => "pp".into(),
        (Some(_), false) => format!("pp*{subs}"),
    }
}

/// What a rank of a stage holds, by kind.
fn footprint(job: &Job, stage: usize, which: &str) -> String {
    let f = Footprint::of(job, stage);
    let parts = f.bytes.iter().filter(|p| *p.1 > 0).map(|(k, b)| match k {
        Kind::Activations if f.slots > 1 => format!("{} {} x {}", k.name(), f.slots, size(b / f.slots)),
        _ => format!("{} {}", k.name(), size(*b)),
    });
    let whose = if job.stages.len() > 1 { format!("a rank of stage {stage} ({which})") } else { "a rank".into() };
    format!("{whose}: {} = {}", size(f.total()), parts.collect::<Vec<_>>().join(" + "))
}

/// `124.4 M`, or the number itself below ten thousand.
pub fn count(n: u64) -> String {
    let x = n as f64;
    match n {
        0..10_000 => n.to_string(),
        10_000..1_000_000 => format!("{:.1} K", x / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} M", x / 1e6),
        _ => format!("{:.1} B", x / 1e9),
    }
}
