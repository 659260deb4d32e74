//! The table that `mcc compile` ends with.

use crate::cli::SCHEDULES;
use crate::print::runs;
use ir::diag::{Sources, Span};
use ir::kernel::Family;
use ir::mesh::{Axis, Mesh};
use ir::options::{Options, Recompute};
use ir::program::{Action, Job, ProgramPhase};
use mcc::{KernelChecks, NotChecked};
use passes::report::explain::{exchanges, totals};
use passes::report::footprint::{Footprint, Footprints, MemoryCategory, instant, owners, size};
use passes::report::matrices::Matrices;
use passes::report::pipeline_timeline::{UNIT, timeline};
use std::collections::BTreeSet;
use std::fmt::Write;
use std::time::Duration;

/// Ranks, classes, kernels; dims that are padded; communication per axis; warm-up, activations and bubble of a
/// pipeline; memory per rank by kind, of the device and of the host, when most of it is in use and by whom; what
/// ranks have to do with Muon's matrices; seconds per pass and per verifier.
pub fn table(
    job: &Job,
    options: &Options,
    (memory, matrices): (&Footprints, Option<Matrices>),
    times: &[(&str, Duration)],
    verified: &[(&str, Duration)],
    checked: (&KernelChecks, &Sources),
) -> String {
    let mut out = String::new();
    let mesh = &job.mesh;
    let parameters = job.parameters();
    let _ = writeln!(
        out,
        "model      {}, {} parameters, {} sequences a step in {} microbatch{}",
        job.model,
        count(parameters),
        job.global_batch,
        job.microbatches,
        if job.microbatches == 1 { "" } else { "es" },
    );
    let _ = writeln!(
        out,
        "ranks      {} ({}), {} program class{}, {} kernels ({} matrix products)",
        mesh.world(),
        if mesh.world() == 1 { "one".to_string() } else { axes(mesh) },
        job.programs.len(),
        if job.programs.len() == 1 { "" } else { "es" },
        count(job.kernels.len() as u64),
        job.kernels.iter().filter(|k| k.family == Family::Gemm).count(),
    );
    let dims = job.params.iter().flat_map(|p| &p.dims).filter(|d| d.padded > d.size);
    let padded: BTreeSet<String> = dims.map(|d| format!("{} from {} to {}", d.name, d.size, d.padded)).collect();
    if !padded.is_empty() {
        let _ = writeln!(out, "padding    {}", padded.into_iter().collect::<Vec<_>>().join(", "));
    }
    for ((axis, kind), (calls, bytes)) in totals(&exchanges(job), false) {
        let _ = writeln!(out, "{:<10} {kind:<15} {calls:>6} calls, {} sent by a rank in a step", axis, size(bytes));
    }
    out += &recomputed(job, options.recompute, checked.1);
    if job.stages.len() > 1 {
        out += &listed("stages", &ranks_of_stages(mesh), ", ");
        let name = SCHEDULES.iter().find(|(_, s)| *s == options.schedule).map_or("of a file", |(name, _)| name);
        out += &listed("pipeline", &format!("schedule {name}: {}", timeline(job, UNIT)), "; ");
    }
    let (most, least) = (memory.most(), memory.least());
    out += &listed("memory", &footprint(job, most, "most"), " + ");
    if least.1 != most.1 {
        out += &listed("", &footprint(job, least, "least"), " + ");
    }
    out += &peak(job, most.0, checked.1);
    let ((stage, host), (disk_stage, disk)) = (memory.most_by(Footprint::on_host), memory.most_by(Footprint::on_disk));
    for (name, stage, bytes) in [("host", stage, &host.host), ("disk", disk_stage, &disk.disk)] {
        let all: u64 = bytes.values().sum();
        if all > 0 {
            let whose = if job.stages.len() > 1 { format!("a rank of stage {stage} (most)") } else { "a rank".into() };
            let parts: Vec<String> = bytes.iter().filter(|p| *p.1 > 0).map(|(k, b)| format!("{} {}", k.name(), size(*b))).collect();
            out += &listed(name, &format!("{whose}: {} = {}", size(all), parts.join(" + ")), " + ");
        }
    }
    if let Some(m) = matrices {
        let _ = writeln!(out, "muon       {}", muon(job, &m));
    }
    out += &listed("seconds", &seconds(times), ", ");
    out += &listed("verifying", &seconds(verified), ", ");
    let _ = writeln!(out, "code       {}", code(checked));
    out
}

/// Columns of a list in the table.
const LIST_WIDTH: usize = 118;

/// A line of the table with a list behind its name, broken after separators where it is too wide.
fn listed(name: &str, list: &str, separator: &str) -> String {
    let mut out = format!("{name:<10}");
    let mut width = out.len();
    let items: Vec<&str> = list.split(separator).collect();
    for (k, item) in items.iter().enumerate() {
        let item = if k + 1 < items.len() { format!("{item}{}", separator.trim_end()) } else { item.to_string() };
        if k > 0 && width + 1 + item.len() > LIST_WIDTH {
            out += "\n          ";
            width = 10;
        }
        out += &format!(" {item}");
        width += 1 + item.len();
    }
    out + "\n"
}

/// `ranks 0 to 3 are stage 0, 4 to 7 stage 1`; of many stages, the first two and the last.
fn ranks_of_stages(mesh: &Mesh) -> String {
    let count = mesh.size(Axis::Pp);
    let ranks = |stage: u64| runs(&(0..mesh.world()).filter(|r| mesh.stage(*r) == stage).collect::<Vec<_>>());
    let named: Vec<u64> = if count > 4 { vec![0, 1, count - 1] } else { (0..count).collect() };
    let mut parts: Vec<String> = named.iter().map(|s| format!("{} stage {s}", ranks(*s))).collect();
    let (noun, verb) = if mesh.world() == count { ("rank", "is") } else { ("ranks", "are") };
    parts[0] = format!("{noun} {} {verb} stage 0", ranks(0));
    if count > 4 {
        parts.insert(2, "..".into());
    }
    parts.join(", ")
}

/// Lines of the model text that are named of those computed again.
const AGAIN: usize = 12;

/// What backward passes compute again: how it was asked for, and the lines of the text.
fn recomputed(job: &Job, asked: Recompute, sources: &Sources) -> String {
    let commands = job.programs.iter().flat_map(|p| &p.bodies).flat_map(|b| &b.commands);
    let kernels = commands.filter(|c| matches!(c.action, Action::Launch { .. }) && c.origin.recomputed);
    let lines: BTreeSet<(u16, u32)> = kernels.filter_map(|c| c.origin.span).map(|s| (s.file, s.line)).collect();
    if lines.is_empty() {
        return String::new();
    }
    let asked = match asked {
        Recompute::None => "what is cheap".into(),
        Recompute::Selective => "selective".into(),
        Recompute::Uniform(n) => format!("full, in units of {n} layer{}", plural(n)),
        Recompute::Block(n) => format!("full, the first {n} layer{} of a stage", plural(n)),
    };
    let mut file = None;
    let mut named: Vec<String> = vec![];
    for (of, line) in lines.iter().take(AGAIN) {
        // A file is named once, before the first of its lines.
        named.push(match file.replace(*of) == Some(*of) {
            true => line.to_string(),
            false => format!("{}:{line}", sources.files.get(usize::from(*of)).map_or("?", |f| &f.name)),
        });
    }
    if lines.len() > AGAIN {
        named.push(format!("{} more", lines.len() - AGAIN));
    }
    listed("recompute", &format!("{asked}: {}", named.join(", ")), ", ")
}

fn plural(n: u32) -> &'static str {
    if n == 1 { "" } else { "s" }
}

/// What each rank iterates of matrices, and keeps of them.
fn muon(job: &Job, m: &Matrices) -> String {
    let whose = if job.stages.len() > 1 { format!("each rank of stage {} (most)", m.stage) } else { "each rank".into() };
    let empty = if m.places > m.count { format!(" (of {} places {} are empty)", count(m.places), count(m.places - m.count)) } else { String::new() };
    let [[own, all], [kept, whole]] = [m.operations, m.bytes];
    format!(
        "{whose} iterates {} of {} matrices{empty}, {} of {} operations; states {} of {}",
        count(m.of_rank),
        count(m.count),
        count(own),
        count(all),
        size(kept),
        size(whole)
    )
}

/// Most kernels that are named of those not checked.
const NAMED: usize = 3;

/// `30 kernels from the cache, 12 held to their bodies in 0.31 s`.
fn code((checked, sources): (&KernelChecks, &Sources)) -> String {
    let KernelChecks { cached, held, now, time, unseen, foreign, not_checked } = checked;
    let mut parts = vec![format!("{} from the cache", count(*cached as u64))];
    parts.push(match (*now, *held) {
        (0, 0) => "none compared with the interpreter".into(),
        (0, before) => format!("{before} compared with the interpreter before"),
        (now, all) if now == all => format!("{now} compared with the interpreter in {:.2} s", time.as_secs_f64()),
        (now, all) => format!("{all} compared with the interpreter, {now} of them now in {:.2} s", time.as_secs_f64()),
    });
    parts.extend((*held > 0 && *unseen > 0).then(|| format!("{unseen} not, as nobody asked for it")));
    parts.extend(foreign.iter().map(|(why, n)| format!("{n} not checked: {why}")));
    if !not_checked.is_empty() {
        let named = not_checked.iter().take(NAMED).map(|NotChecked { kernel, span, why }| match span.and_then(|s| sources.line(s)) {
            Some(line) => format!("{kernel} of {line} ({why})"),
            None => format!("{kernel} ({why})"),
        });
        let more = (not_checked.len() > NAMED).then(|| format!("{} more", not_checked.len() - NAMED));
        parts.push(format!("{} not checked: {}", not_checked.len(), named.chain(more).collect::<Vec<_>>().join("; ")));
    }
    parts.join(", ")
}

/// `lower 0.03, overlap 0.02`: what has one name is one sum, where it was first.
fn seconds(times: &[(&str, Duration)]) -> String {
    let mut sums: Vec<(&str, Duration)> = vec![];
    for (name, took) in times {
        match sums.iter_mut().find(|s| s.0 == *name) {
            Some(sum) => sum.1 += *took,
            None => sums.push((name, *took)),
        }
    }
    sums.iter().map(|(name, took)| format!("{name} {:.2}", took.as_secs_f64())).collect::<Vec<_>>().join(", ")
}

/// The axes of a mesh that have several ranks: `pp 2, tp 4`.
pub fn axes(mesh: &Mesh) -> String {
    let mut named = vec![Axis::Pp, Axis::Dp, Axis::Cp, Axis::Tp];
    if mesh.subs.iter().any(|s| s.role != s.axis.usual_role()) {
        named.extend([Axis::Ep, Axis::Etp]);
    }
    named.into_iter().filter(|a| mesh.size(*a) > 1).map(|a| format!("{a} {}", mesh.size(a))).collect::<Vec<_>>().join(", ")
}

/// What a rank of a stage holds, by kind.
fn footprint(job: &Job, (stage, f): (usize, &Footprint), which: &str) -> String {
    let parts = f.bytes.iter().filter(|p| *p.1 > 0).map(|(k, b)| match k {
        MemoryCategory::Activations if f.slots > 1 => format!("{} {} x {}", k.name(), f.slots, size(b / f.slots)),
        _ => format!("{} {}", k.name(), size(*b)),
    });
    let whose = if job.stages.len() > 1 { format!("a rank of stage {stage} ({which})") } else { "a rank".into() };
    format!("{whose}: {} = {}", size(f.total()), parts.collect::<Vec<_>>().join(" + "))
}

/// Holders of the peak that are named.
const HOLDERS: usize = 10;

/// When the ranks of a stage hold most, and the lines of the text that hold most of it then.
fn peak(job: &Job, stage: usize, sources: &Sources) -> String {
    let line = |span: Option<Span>| span.and_then(|s| sources.line(s));
    let (phase, body, command) = instant(job, stage);
    let body = &job.programs[job.stages[stage].program as usize].bodies[body];
    let phase = if phase == ProgramPhase::Eval { "evaluation, " } else { "" };
    let at = body.commands.get(command).map(|c| &c.origin);
    let scope = at.filter(|o| !o.scope.is_empty()).map(|o| format!(", in {}", o.scope));
    let place = at.and_then(|o| line(o.span)).map(|l| format!(", at {l}"));
    let mut out = format!("peak       {phase}{}{}{}\n", body.name, scope.unwrap_or_default(), place.unwrap_or_default());
    let mut holders = owners(job, stage);
    holders.retain(|o| o.bytes > 0);
    let rest: u64 = holders.iter().skip(HOLDERS).map(|o| o.bytes).sum();
    for o in holders.iter().take(HOLDERS) {
        let place = line(o.span).unwrap_or_else(|| "several lines".into());
        let _ = writeln!(out, "           {:>11} {} of {place}", size(o.bytes), o.kind.name());
    }
    if rest > 0 {
        let _ = writeln!(out, "           {:>11} {} more", size(rest), holders.len() - HOLDERS);
    }
    out
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

#[cfg(test)]
mod tests {
    use super::*;
    use ir::diag::{Source, Span};

    /// What is too large to be held to its body is named, and what is said of kernels adds up.
    #[test]
    fn kernels_that_are_not_checked_are_named() {
        let sources = Sources { files: vec![Source { name: "m.mdl".into(), text: String::new() }] };
        let not = |kernel: &str, span| NotChecked { kernel: kernel.into(), span, why: "it is large".into() };
        let mut checks = KernelChecks { cached: 5, held: 4, unseen: 1, ..KernelChecks::default() };
        checks.not_checked.push(not("k_1", Some(Span { file: 0, line: 7, col: 1, len: 1 })));
        assert_eq!(
            code((&checks, &sources)),
            "5 from the cache, 4 compared with the interpreter before, 1 not, as nobody asked for it, 1 not checked: k_1 of m.mdl:7 (it is large)"
        );
        (2..6).for_each(|k| checks.not_checked.push(not(&format!("k_{k}"), None)));
        checks.foreign.insert("code for a GPU".into(), 3);
        let said = code((&checks, &sources));
        let expected = "3 not checked: code for a GPU, 5 not checked: k_1 of m.mdl:7 (it is large); k_2 (it is large); k_3 (it is large); 2 more";
        assert!(said.ends_with(expected), "{said}");
    }
}
