//! A step as it is predicted: how long it takes, and what that is due to.

use crate::cost::{Cause, Cost};
use crate::machine::Machine;
use crate::play::{Played, Times, play};
use crate::tape::{Costs, Kind};
use crate::{Options, Stuck};
use ir::diag::Span;
use ir::op::{DType, Op};
use ir::program::{Action, Body, Job, Phase, Program, Space};
use ir::work::{Work, model_flops};
use serde::Serialize;
use std::collections::BTreeMap;

/// A training step on a machine, once steps are alike.
#[derive(Clone, Debug, Serialize)]
pub struct Step {
    pub machine: String,
    pub ranks: u64,
    /// Its number among those that are played, from 0, and when it begins there.
    #[serde(skip)]
    pub number: usize,
    #[serde(skip)]
    pub begin: f64,
    pub seconds: f64,
    /// How far that may be off, as the spreads of the machine's numbers have it: the root of the sum of the squares
    /// of what each changes, as if they were independent.
    pub give_or_take: f64,
    /// Whether steps had become alike, or this is but the last one that was played.
    pub steady: bool,
    pub tokens_per_second: f64,
    /// Operations a second of a rank, as the field counts them ([`model_flops`]), and the part of the peak.
    pub flops_per_second: f64,
    pub mfu: f64,
    /// What the compute streams do, mean of the stages: seconds of a rank and step, which add up to the step.
    pub spent: Spent,
    pub stages: Vec<Spent>,
    /// Along what the step waits for: seconds by cause, which add up to the step.
    pub path: Vec<(String, f64)>,
    /// What the step would gain if a number of the machine were a tenth better, in seconds; the most first.
    pub limits: Vec<(String, f64)>,
    pub kernels: Vec<Row>,
    pub exchanges: Vec<Row>,
    pub lines: Vec<Row>,
}

/// Seconds of a step of a rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Spent {
    pub kernels: f64,
    /// While nothing is computed.
    pub exchanges: f64,
    pub copies: f64,
    pub disk: f64,
    pub host: f64,
    pub gaps: f64,
    pub bubble: f64,
}

impl Spent {
    fn of(t: &Times) -> Spent {
        Spent { kernels: t.kernels, exchanges: t.exchanges, copies: t.copies, disk: t.disk, host: t.host, gaps: t.gaps, bubble: t.bubble }
    }

    pub fn named(&self) -> [(&'static str, f64); 7] {
        [
            ("kernels", self.kernels),
            ("exchanges", self.exchanges),
            ("copies", self.copies),
            ("disk", self.disk),
            ("host", self.host),
            ("between phases", self.gaps),
            ("bubble", self.bubble),
        ]
    }

    fn add(&mut self, other: &Spent, part: f64) {
        let all = [&mut self.kernels, &mut self.exchanges, &mut self.copies, &mut self.disk, &mut self.host, &mut self.gaps, &mut self.bubble];
        all.into_iter().zip(other.named()).for_each(|(to, (_, x))| *to += part * x);
    }
}

/// Something that a step does many times; means of the stages.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Row {
    pub name: String,
    /// Of a rank in a step.
    pub calls: f64,
    /// Seconds of these, each by itself.
    pub seconds: f64,
    /// Seconds in which nothing is computed meanwhile: of kernels all of them.
    pub exposed: f64,
}

/// Rows by their names.
#[derive(Default)]
struct Rows(BTreeMap<String, Row>);

impl Rows {
    fn add(&mut self, name: &str, calls: f64, seconds: f64, exposed: f64) {
        let row = self.0.entry(name.into()).or_default();
        (row.calls, row.seconds, row.exposed) = (row.calls + calls, row.seconds + seconds, row.exposed + exposed);
    }

    /// Those that take most first.
    fn sorted(self) -> Vec<Row> {
        let mut rows: Vec<Row> = self.0.into_iter().map(|(name, row)| Row { name, ..row }).collect();
        rows.sort_by(|a, b| (b.exposed, b.seconds).partial_cmp(&(a.exposed, a.seconds)).unwrap_or(std::cmp::Ordering::Equal));
        rows
    }
}

/// Predicts a step.
///
/// # Errors
/// A job whose streams wait for ever, as none does that is verified.
pub fn predict(job: &Job, machine: &Machine, options: Options) -> Result<Step, Stuck> {
    let played = play(job, machine, options, &|_, _, _| true)?;
    let seconds = played.end - played.begin;
    let stages: Vec<Spent> = played.times.iter().map(Spent::of).collect();
    let mut spent = Spent::default();
    stages.iter().for_each(|s| spent.add(s, 1.0 / stages.len() as f64));
    let tokens = job.inputs.iter().find(|i| i.dtype == DType::I32).map_or(job.global_batch, |i| i.dims.iter().map(|d| d.size).product());
    let world = job.mesh.world() as f64;
    let flops_per_second = model_flops(job) / seconds / world;
    let factors = factors(job);
    let (kernels, exchanges, lines) = rows(job, machine, &options, &played);
    Ok(Step {
        machine: machine.name.clone(),
        ranks: job.mesh.world(),
        number: played.step,
        begin: played.begin,
        seconds,
        give_or_take: spread(machine, factors, &played.path),
        steady: played.steady,
        tokens_per_second: tokens as f64 / seconds,
        flops_per_second,
        mfu: flops_per_second / (machine.peak(factors.0, factors.1) * if machine.is_cpu() { options.threads as f64 } else { 1.0 }),
        spent,
        stages,
        path: path(machine, &played.path),
        limits: limits(machine, factors, &played.path),
        kernels,
        exchanges,
        lines,
    })
}

/// The type of the factors of most operations, and whether they are of tf32.
fn factors(job: &Job) -> (DType, bool) {
    let mut by_type: BTreeMap<(u64, bool), (DType, u64)> = BTreeMap::new();
    for kernel in &job.kernels {
        for node in kernel.body.nodes.iter().filter(|n| matches!(n.op, Op::Dot { .. } | Op::GroupedDot { .. })) {
            let (factors, tf32) = (kernel.body[node.args[0]].ty.dtype, matches!(node.op, Op::Dot { tf32: true, .. }));
            by_type.entry((factors.bytes(), tf32)).or_insert((factors, 0)).1 += Work::needed(kernel).flops;
        }
    }
    by_type.into_iter().max_by_key(|(_, (_, flops))| *flops).map_or((DType::F32, false), |((_, tf32), (factors, _))| (factors, tf32))
}

/// What the spreads of a machine's numbers make of a path.
fn spread(machine: &Machine, factors: (DType, bool), path: &Cost) -> f64 {
    let each = machine.governed(factors).into_iter().map(|g| g.figure.spread * g.causes.iter().map(|c| path.of(*c)).sum::<f64>());
    each.map(|x| x * x).sum::<f64>().sqrt()
}

fn limits(machine: &Machine, factors: (DType, bool), path: &Cost) -> Vec<(String, f64)> {
    let gain = |causes: &[Cause]| 0.1 * causes.iter().map(|c| path.of(*c)).sum::<f64>();
    let mut all: Vec<(String, f64)> = machine.governed(factors).into_iter().map(|g| (g.name, gain(&g.causes))).filter(|g| g.1 > 0.0).collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1));
    all
}

/// What a cause is called on a machine.
pub fn name(machine: &Machine, cause: Cause) -> String {
    let link = |level: u8| machine.links.get(usize::from(level)).map_or("no link", |l| l.name.as_str());
    match cause {
        Cause::Product => "arithmetic of products".into(),
        Cause::Attention => "arithmetic of attention".into(),
        Cause::Memory => "bytes of the device's memory".into(),
        Cause::Launch => "launches".into(),
        Cause::Host => "kernels of the host".into(),
        Cause::Bus => "bytes between host and device".into(),
        Cause::Disk => "bytes of disks".into(),
        Cause::Bytes(level) => format!("bytes over {}", link(level)),
        Cause::Latency(level) => format!("latency of {}", link(level)),
        Cause::Contention => "kernels and exchanges that hold each other up".into(),
        Cause::Gap => "the host between phases".into(),
    }
}

fn path(machine: &Machine, path: &Cost) -> Vec<(String, f64)> {
    let mut all: Vec<(String, f64)> = Cause::ALL.into_iter().map(|c| (name(machine, c), path.of(c))).filter(|c| c.1 > 0.0).collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1));
    all
}

/// Kernels by family, exchanges by kind and axes, and both by the line of the model.
fn rows(job: &Job, machine: &Machine, options: &Options, played: &Played) -> (Vec<Row>, Vec<Row>, Vec<Row>) {
    let (mut kernels, mut exchanges, mut lines) = (Rows::default(), Rows::default(), Rows::default());
    let mut costs = Costs::new(job, machine, options);
    let part = 1.0 / job.stages.len() as f64;
    for (s, stage) in job.stages.iter().enumerate() {
        let program = &job.programs[stage.program as usize];
        let mut calls = vec![0u64; program.bodies.len()];
        for call in [Phase::Train, Phase::Update].iter().flat_map(|p| stage.schedule.calls(*p)).filter(|c| c.part == 0) {
            calls[call.body.index()] += 1;
        }
        // As a stage's tape numbers its exchanges: body by body, command by command.
        let mut exchange = 0;
        for (body, times) in program.bodies.iter().zip(calls) {
            for command in body.commands.iter().filter(|c| c.predicate.is_none()) {
                let times = times as f64 * part;
                let (rows, name, seconds, exposed) = match costs.exchange(s, &command.action) {
                    Some(cost) => {
                        let exposed = played.times[s].exposed[exchange] * part;
                        exchange += 1;
                        (&mut exchanges, exchange_name(job, program, &command.action), cost.seconds() * times, exposed)
                    }
                    None => {
                        let (kind, cost) = costs.work(s, &command.action);
                        let seconds = cost.seconds() * times;
                        if seconds == 0.0 {
                            continue;
                        }
                        let exposed = if kind == Kind::Device { seconds } else { 0.0 };
                        (&mut kernels, work_name(job, &command.action).to_string(), seconds, exposed)
                    }
                };
                rows.add(&name, times, seconds, exposed);
                let line = command.origin.span.map_or_else(|| "no line of the text".into(), |span| line(job, span));
                lines.add(&line, times, seconds, exposed);
            }
        }
    }
    (kernels.sorted(), exchanges.sorted(), lines.sorted())
}

fn line(job: &Job, span: Span) -> String {
    let source = job.sources.get(usize::from(span.file)).map_or("?", |s| s.name.as_str());
    format!("{source}:{}", span.line)
}

/// What rows call an exchange.
pub fn exchange_name(job: &Job, program: &Program, action: &Action) -> String {
    match action {
        Action::Collective { kind, group, .. } => format!("{} over {}", kind.name(), program.groups[group.index()].describe(&job.mesh)),
        Action::Send { .. } => "send to another stage".into(),
        _ => "receive from another stage".into(),
    }
}

fn work_name(job: &Job, action: &Action) -> &'static str {
    match action {
        Action::Launch { kernel, .. } => {
            let kernel = &job.kernels[kernel.index()];
            if kernel.on == Space::Host { "kernels of the host" } else { kernel.family.describe() }
        }
        Action::Copy { .. } => "copies between memories",
        Action::Load { .. } => "the batch",
        _ => "fills",
    }
}

/// Seconds that a step would take if what `keep` says no to took none, by stage, body and command.
///
/// # Errors
/// As [`predict`].
pub fn without(job: &Job, machine: &Machine, options: Options, keep: &dyn Fn(usize, &Body, usize) -> bool) -> Result<f64, Stuck> {
    play(job, machine, options, keep).map(|p| p.end - p.begin)
}
