//! What commands are called, what they have to do, and where they come from.

use crate::comm::Position;
use ir::diag::Span;
use ir::dim::Dim;
use ir::graph::Value;
use ir::kernel::{Family, Kernel};
use ir::op::Op;
use ir::program::{Action, Arena, BodyKind, BufferId, Call, Command, Job, KernelId, Program, ProgramBody};
use ir::work::Work;
use std::collections::{BTreeMap, BTreeSet};

/// A command, for people.
#[derive(Clone, Debug, PartialEq)]
pub struct NamedCommand {
    /// What it does, with sizes: `dot 1024x3072x768, add, tanh`.
    pub name: String,
    /// The kernel that it launches, if it is a launch.
    pub kernel: Option<KernelId>,
    /// Work of one call. For communication, it has the bytes that this rank sends, or receives.
    pub work: Work,
    /// The kind of body that the command is in.
    pub body: BodyKind,
    /// Lines of the model.
    pub lines: BTreeSet<(u16, u32)>,
}

/// The commands of a job.
pub struct NamedCommands<'a> {
    job: &'a Job,
    kernels: Vec<OfKernel>,
    /// Commands of each body of each program.
    commands: Vec<Vec<Vec<NamedCommand>>>,
}

impl<'a> NamedCommands<'a> {
    /// Names all commands of all programs of a job.
    pub fn new(job: &'a Job) -> NamedCommands<'a> {
        let lines = |k: &Kernel| k.body.nodes.iter().filter(|n| !n.op.is_source()).filter_map(|n| line(n.origin.span)).collect();
        let kernels: Vec<OfKernel> = job.kernels.iter().map(|k| OfKernel { name: name(k), work: Work::needed(k), lines: lines(k) }).collect();
        let of_body = |p: &Program, b: &ProgramBody| b.commands.iter().map(|c| named(job, &kernels, p, b, c)).collect();
        let commands = job.programs.iter().map(|p| p.bodies.iter().map(|b| of_body(p, b)).collect()).collect();
        NamedCommands { job, kernels, commands }
    }

    /// What a kernel is called, and which lines it is of.
    pub fn kernel(&self, kernel: KernelId) -> (&str, String) {
        let of = &self.kernels[kernel.index()];
        (&of.name, self.places(&of.lines))
    }

    /// The command that a rank was at, with its call; none at the end of a phase.
    pub fn at(&self, rank: u64, at: Position) -> Option<(&'a Call, &'a Command, &NamedCommand)> {
        let stage = &self.job.stages[self.job.mesh.stage(rank) as usize];
        let call = stage.schedule.calls(at.phase).get(at.call as usize)?;
        let body = &self.job.programs[stage.program as usize].bodies[call.body.index()];
        let named = self.commands[stage.program as usize][call.body.index()].get(at.command as usize)?;
        Some((call, &body.commands[at.command as usize], named))
    }

    /// `models/gpt2.mdl:12,14-16`, of the library's texts only where there is nothing else.
    pub fn places(&self, lines: &BTreeSet<(u16, u32)>) -> String {
        let source = |file: u16| self.job.sources.get(usize::from(file)).map_or("", |s| s.name.as_str());
        let mut files: BTreeMap<u16, Vec<(u32, u32)>> = BTreeMap::new();
        let own: BTreeSet<_> = lines.iter().filter(|l| !source(l.0).starts_with("std/")).collect();
        for (file, line) in if own.is_empty() { lines.iter().collect() } else { own } {
            let runs = files.entry(*file).or_default();
            match runs.last_mut() {
                Some(run) if run.1 + 1 == *line => run.1 = *line,
                _ => runs.push((*line, *line)),
            }
        }
        let run = |(a, b): &(u32, u32)| if a == b { a.to_string() } else { format!("{a}-{b}") };
        let of_file = |(file, runs): (&u16, &Vec<(u32, u32)>)| format!("{}:{}", source(*file), runs.iter().map(run).collect::<Vec<_>>().join(","));
        files.iter().map(of_file).collect::<Vec<_>>().join(" ")
    }
}

/// What all launches of a kernel share.
struct OfKernel {
    name: String,
    work: Work,
    lines: BTreeSet<(u16, u32)>,
}

fn named(job: &Job, kernels: &[OfKernel], program: &Program, body: &ProgramBody, command: &Command) -> NamedCommand {
    let bytes = |bytes| Work { flops: 0, bytes };
    let of_buffer = |b: &BufferId| bytes(program.buffers[b.index()].bytes());
    let mut kernel = None;
    let mut lines: BTreeSet<(u16, u32)> = line(command.origin.span).into_iter().collect();
    let (name, work) = match &command.action {
        Action::Launch { kernel: k, .. } => {
            kernel = Some(*k);
            let of = &kernels[k.index()];
            lines.extend(&of.lines);
            (of.name.clone(), of.work)
        }
        Action::Collective { kind, group, dtype, count, .. } => {
            let group = &program.groups[group.index()];
            let work = bytes(kind.sent(count * dtype.bytes(), group.size(&job.mesh)));
            (format!("{} over {}, {count} {}", kind.name(), group.describe(&job.mesh), dtype.name()), work)
        }
        Action::Send { hops, dtype, count, .. } => (format!("send {}, {count} {}", stages(*hops), dtype.name()), bytes(count * dtype.bytes())),
        Action::Recv { hops, dtype, count, .. } => (format!("recv {}, {count} {}", stages(*hops), dtype.name()), bytes(count * dtype.bytes())),
        Action::Copy { dtype, count, src, dst } => {
            let [from, to] = [src, dst].map(|p| program.buffers[p.buffer.index()].arena);
            let way = if from == Arena::Disk { "from disk".into() } else { format!("to {}", to.whereabouts()) };
            (format!("copy {way}, {count} {}", dtype.name()), bytes(count * dtype.bytes()))
        }
        Action::Fill { buffer, .. } => ("fill".into(), of_buffer(buffer)),
        Action::Load { input, dst, .. } => (format!("load of input {}", job.inputs[*input as usize].name), of_buffer(dst)),
        Action::Report { report, .. } => (format!("report of {}", job.reports[*report as usize]), bytes(0)),
        Action::Limit { most, .. } => (format!("limit of {most}"), bytes(0)),
        Action::Record { event } => (format!("record of event {event}"), bytes(0)),
        Action::Wait { event } => (format!("wait for {}", done(job, kernels, program, *event)), bytes(0)),
    };
    NamedCommand { name, kernel, work, body: body.kind, lines }
}

/// What is done when an event is recorded.
fn done(job: &Job, kernels: &[OfKernel], program: &Program, event: u32) -> String {
    let record = Action::Record { event };
    let Some((body, at)) = program.bodies.iter().find_map(|b| Some((b, b.commands.iter().position(|c| c.action == record)?))) else {
        return format!("event {event}");
    };
    let stream = body.commands[at].stream;
    let before = body.commands[..at].iter().rev().filter(|c| c.stream == stream);
    match before.into_iter().find(|c| !matches!(c.action, Action::Record { .. } | Action::Wait { .. })) {
        Some(command) => named(job, kernels, program, body, command).name,
        None => format!("the {} stream", stream.name()),
    }
}

fn stages(hops: i64) -> String {
    match hops {
        1 => "by 1 stage".into(),
        hops => format!("by {hops} stages"),
    }
}

fn line(span: Option<Span>) -> Option<(u16, u32)> {
    span.map(|s| (s.file, s.line))
}

/// Ops that are named, beside the one that makes the kernel's family.
const OPS: usize = 4;

/// `dot 1024x3072x768, add, tanh`: rows, columns and summed elements of a product; else sizes of the first operand or
/// of the greatest result.
fn name(kernel: &Kernel) -> String {
    let body = &kernel.body;
    let size = |dims: &[Dim]| dims.iter().map(|d| body.dims.size(*d).to_string()).collect::<Vec<_>>().join("x");
    let anchor = |v: &Value| match kernel.family {
        Family::Loops { .. } => false,
        Family::Gemm => matches!(body[*v].op, Op::Dot { .. } | Op::GroupedDot { .. }),
        Family::Scatter => matches!(body[*v].op, Op::Scatter { .. }),
        Family::Attention | Family::AttentionGrad => matches!(body[*v].op, Op::Attention(_) | Op::AttentionLse(_) | Op::AttentionGrad(..)),
    };
    let anchors: Vec<Value> = body.values().filter(anchor).collect();
    let mut ops: Vec<&str> = vec![];
    for v in body.values().filter(|v| !anchors.contains(v) && !body[*v].op.is_source()) {
        if !ops.contains(&body[v].op.name()) {
            ops.push(body[v].op.name());
        }
    }
    let more = ops.len().saturating_sub(OPS);
    ops.truncate(OPS);
    if more > 0 {
        ops.push("..");
    }
    let Some(first) = anchors.first() else {
        let largest = kernel.outputs.iter().map(|o| o.value).max_by_key(|v| body.elements(*v));
        return format!("{} {}", ops.join(", "), largest.map_or(String::new(), |v| size(body.dims_of(v)))).trim_end().to_string();
    };
    let node = &body[*first];
    let shape = match &node.op {
        Op::Dot { over, .. } | Op::GroupedDot { over, .. } => {
            let [a, b] = [node.args[0], node.args[1]].map(|v| body.dims_of(v));
            let elements = |keep: &dyn Fn(&Dim) -> bool| node.ty.dims.iter().filter(|d| keep(d)).map(|d| body.dims.size(*d)).product::<u64>();
            let both = elements(&|d| a.contains(d) == b.contains(d));
            let [rows, columns] = [(a, b), (b, a)].map(|(of, other)| elements(&|d| of.contains(d) && !other.contains(d)));
            let each = over.iter().filter(|d| a.contains(d)).map(|d| body.dims.size(*d)).product::<u64>();
            let times = if both == 1 { String::new() } else { format!("{both} of ") };
            format!("{times}{rows}x{columns}x{each}")
        }
        Op::Scatter { .. } => size(body.dims_of(*first)),
        _ => size(body.dims_of(node.args[0])),
    };
    let mut names: Vec<&str> = anchors.iter().map(|v| body[*v].op.name()).collect();
    names.dedup();
    let called = format!("{} {shape}", names.join(", "));
    std::iter::once(called.as_str()).chain(ops).collect::<Vec<_>>().join(", ")
}
