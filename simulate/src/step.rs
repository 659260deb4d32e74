//! A step as it is predicted: how long it takes, and what that is due to.

use crate::cost::{Cause, Cost};
use crate::machine::{Governed, Machine};
use crate::play::{SimulationResult, TimeBreakdown, play};
use crate::tape::{BY_ITSELF, Costs, WorkKind};
use crate::{Deadlock, Options, Unpredicted};
use ir::diag::Span;
use ir::op::{DType, Op};
use ir::program::{Action, Arena, Job, Program, ProgramBody, ProgramPhase, Space, Stage};
use ir::work::{Work, model_flops, sent, tokens};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// A training step on a machine, once steps are alike.
#[derive(Clone, Debug, Serialize)]
pub struct Step {
    /// Name of the machine, from its file.
    pub machine: String,
    /// Ranks of the job, all stages' together.
    pub ranks: u64,
    /// Its number among those that are played, from 0, and when it begins there.
    #[serde(skip)]
    pub number: usize,
    /// When it begins, in seconds from the beginning of the play.
    #[serde(skip)]
    pub begin: f64,
    /// How long the step takes.
    pub seconds: f64,
    /// How far that may be off, as the spreads of the machine's numbers have it, to first order: the root of the sum
    /// of the squares of what each changes, as if they were independent.
    pub give_or_take: f64,
    /// Whether steps had become alike, or this is but the last one that was played.
    pub steady: bool,
    /// Tokens that all ranks together train on in a second.
    pub tokens_per_second: f64,
    /// Operations a second of a rank, as the field counts them ([`model_flops`]), and the part of the peak.
    pub flops_per_second: f64,
    /// Model FLOPs utilization: the rate of a rank's operations over its peak.
    pub mfu: f64,
    /// Bytes that a rank of the largest stage plans of its device, exchanges and the driver apart, and those that
    /// there are.
    pub memory: u64,
    /// Bytes that the machine file gives a device's memory.
    pub device_memory: u64,
    /// Kernels of a step for which the machine file has measured seconds, and all.
    pub measured: usize,
    /// Kernels that a step launches, each counted once.
    pub all_kernels: usize,
    /// What the compute streams do, mean of the stages: seconds of a rank and step, which add up to the step.
    pub spent: TimeBreakdown,
    /// Seconds of a rank of each stage, by what its compute stream does.
    pub stages: Vec<TimeBreakdown>,
    /// Along what the step waits for: seconds by cause, which add up to the step.
    pub path: Vec<(String, f64)>,
    /// What the step would gain if a number of the machine were a tenth better, in seconds and to first order: the
    /// path that it waits for may be another one then. The most first.
    pub limits: Vec<(String, f64)>,
    /// All that is no exchange: kernels by family, copies, fills and reports; the most exposed first.
    pub kernels: Vec<Row>,
    /// Collectives by kind and axes, and messages between stages; the most exposed first.
    pub exchanges: Vec<Row>,
    /// Exchanges by the links that take most of their time.
    pub links: Vec<Row>,
    /// Kernels and exchanges by line of the model text; the most exposed first.
    pub lines: Vec<Row>,
}

/// Something that a step does many times; means of the stages.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Row {
    /// What is summed up: a family, a collective with its axes, a link, or a line `model.mdl:25`.
    pub name: String,
    /// Of a rank in a step.
    pub calls: f64,
    /// Seconds of these, each by itself.
    pub seconds: f64,
    /// Seconds in which nothing is computed meanwhile: of kernels all of them.
    pub exposed: f64,
    /// That a rank sends in exchanges, or receives in messages, in a step: mean of the stages, 0 of kernels.
    pub bytes: f64,
}

/// Rows by their names.
#[derive(Default)]
struct Rows(BTreeMap<String, Row>);

impl Rows {
    fn add(&mut self, name: &str, more: &Row) {
        let row = self.0.entry(name.into()).or_default();
        (row.calls, row.seconds) = (row.calls + more.calls, row.seconds + more.seconds);
        (row.exposed, row.bytes) = (row.exposed + more.exposed, row.bytes + more.bytes);
    }

    /// The rows, those that take most first.
    fn sorted(self) -> Vec<Row> {
        let mut rows: Vec<Row> = self.0.into_iter().map(|(name, row)| Row { name, ..row }).collect();
        rows.sort_by(|a, b| (b.exposed, b.seconds).partial_cmp(&(a.exposed, a.seconds)).unwrap_or(std::cmp::Ordering::Equal));
        rows
    }
}

/// Predicts a step.
///
/// # Errors
/// A job whose streams wait for ever, as none does that is verified; numbers that give a step no time, or no end.
pub fn predict(job: &Job, machine: &Machine, options: Options) -> Result<Step, Unpredicted> {
    let played = play(job, machine, options, BY_ITSELF)?;
    let seconds = played.end - played.begin;
    let stages: Vec<TimeBreakdown> = played.times.iter().map(|t| t.spent).collect();
    let mut spent = TimeBreakdown::default();
    stages.iter().for_each(|s| spent.add(s, 1.0 / stages.len() as f64));
    if !(seconds.is_finite() && seconds > 0.0) {
        return Err(Unpredicted::NoTime(seconds));
    }
    let world = job.mesh.world() as f64;
    let flops_per_second = model_flops(job) / seconds / world;
    let factors = factors(job);
    let launched = launched(job);
    let ByName { kernels, exchanges, links, lines } = ByName::of(job, machine, &options, &played);
    Ok(Step {
        machine: machine.name.clone(),
        ranks: job.mesh.world(),
        number: played.step,
        begin: played.begin,
        seconds,
        give_or_take: spread(machine, factors, &played.path),
        steady: played.steady,
        tokens_per_second: tokens(job) as f64 / seconds,
        flops_per_second,
        mfu: flops_per_second / (machine.peak(factors.0, factors.1) * if machine.is_cpu() { options.threads as f64 } else { 1.0 }),
        memory: job.stages.iter().map(|s| on_device(job, s)).max().unwrap_or(0),
        device_memory: machine.device.memory.bytes.value as u64,
        measured: launched.iter().filter(|k| machine.measured(&job.kernels[**k].name(), options.threads).is_some()).count(),
        all_kernels: launched.len(),
        spent,
        stages,
        path: path(machine, &played.path),
        limits: limits(machine, factors, &played.path),
        kernels: kernels.sorted(),
        exchanges: exchanges.sorted(),
        links: links.sorted(),
        lines: lines.sorted(),
    })
}

/// Bytes of a stage's arenas in its device's memory.
pub fn on_device(job: &Job, stage: &Stage) -> u64 {
    let bytes = stage.schedule.arena_bytes(&job.programs[stage.program as usize]);
    Arena::ALL.into_iter().zip(bytes).filter(|(a, _)| a.space() == Some(Space::Device)).map(|(_, b)| b).sum()
}

/// The kernels of a step, without those that a bool may leave out.
fn launched(job: &Job) -> BTreeSet<usize> {
    let of_stage = |stage: &Stage| {
        let program = &job.programs[stage.program as usize];
        let calls = stage.schedule.train.iter().chain(&stage.schedule.update);
        let bodies: BTreeSet<usize> = calls.map(|call| call.body.index()).collect();
        let commands = bodies.into_iter().flat_map(|b| &program.bodies[b].commands).filter(|c| c.predicate.is_none());
        let kernels = commands.filter_map(|c| if let Action::Launch { kernel, .. } = &c.action { Some(kernel.index()) } else { None });
        kernels.collect::<BTreeSet<usize>>()
    };
    job.stages.iter().flat_map(of_stage).collect()
}

/// The type of the factors of most operations, and whether they are of tf32.
fn factors(job: &Job) -> (DType, bool) {
    let mut launches = vec![0u64; job.kernels.len()];
    for command in job.programs.iter().flat_map(|p| &p.bodies).flat_map(|b| &b.commands) {
        if let Action::Launch { kernel, .. } = &command.action {
            launches[kernel.index()] += 1;
        }
    }
    let mut by_type: BTreeMap<(u64, bool), (DType, f64)> = BTreeMap::new();
    for (kernel, times) in job.kernels.iter().zip(launches) {
        for node in &kernel.body.nodes {
            let (Op::Dot { tf32, .. } | Op::GroupedDot { tf32, .. }) = node.op else { continue };
            let factors = kernel.body[node.args[0]].ty.dtype;
            by_type.entry((factors.bytes(), tf32)).or_insert((factors, 0.0)).1 += times as f64 * Work::needed(kernel).flops as f64;
        }
    }
    let most = by_type.into_iter().max_by(|a, b| a.1.1.total_cmp(&b.1.1));
    most.map_or((DType::F32, false), |((_, tf32), (factors, _))| (factors, tf32))
}

/// Seconds of a path that a number governs.
fn governed_by(number: &Governed, path: &Cost) -> f64 {
    number.causes.iter().map(|c| path.of(*c)).sum()
}

/// The uncertainty of a path that follows from the spreads of a machine's numbers.
fn spread(machine: &Machine, factors: (DType, bool), path: &Cost) -> f64 {
    let each = machine.governed(factors).into_iter().map(|g| g.figure.spread * governed_by(&g, path));
    each.map(|x| x * x).sum::<f64>().sqrt()
}

fn limits(machine: &Machine, factors: (DType, bool), path: &Cost) -> Vec<(String, f64)> {
    // A tenth better means a time shorter by a tenth, or a rate higher by a tenth.
    let gain = |g: &Governed| governed_by(g, path) * if g.is_time { 0.1 } else { 1.0 - 1.0 / 1.1 };
    let all = machine.governed(factors).into_iter().map(|g| (gain(&g), g.name));
    let mut all: Vec<(String, f64)> = all.filter(|g| g.0 > 0.0).map(|(gain, name)| (name, gain)).collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1));
    all
}

/// What a cause is called on a machine.
pub fn name(machine: &Machine, cause: Cause) -> String {
    let link = |level: u8| machine.links.get(usize::from(level)).map_or("no link", |l| l.name.as_str());
    match cause {
        Cause::Product => "arithmetic of products".into(),
        Cause::Depth => "beginnings and ends of products' tiles".into(),
        Cause::Tail => "waves of products' tiles that are not full".into(),
        Cause::DepthOfTail => "beginnings and ends of tiles in waves that are not full".into(),
        Cause::AttentionForward => "arithmetic of attention".into(),
        Cause::AttentionBackward => "arithmetic of attention's gradients".into(),
        Cause::Memory => "bytes of the device's memory".into(),
        Cause::Launch => "launches".into(),
        Cause::Host => "kernels of the host".into(),
        Cause::Bus => "bytes between host and device".into(),
        Cause::Disk => "bytes of disks".into(),
        Cause::Bytes(level) => format!("bytes over {}", link(level)),
        Cause::Switched(level) => format!("bytes that a switch of {} adds up", link(level)),
        Cause::Latency(level) => format!("starts of exchanges over {}", link(level)),
        Cause::Hop(level) => format!("steps of exchanges over {}", link(level)),
        Cause::HeldKernels => "kernels that exchanges hold up".into(),
        Cause::HeldExchanges => "exchanges that kernels hold up".into(),
        Cause::Gap => "the host between phases".into(),
        Cause::Wake => "threads that go on after they have waited".into(),
        Cause::CrowdedWake => "threads that wait for a core before they go on".into(),
    }
}

fn path(machine: &Machine, path: &Cost) -> Vec<(String, f64)> {
    let mut all: Vec<(String, f64)> = Cause::ALL.into_iter().map(|c| (name(machine, c), path.of(c))).filter(|c| c.1 > 0.0).collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1));
    all
}

/// Kernels by family, exchanges by kind and axes and by their links, and both by the line of the model.
#[derive(Default)]
struct ByName {
    kernels: Rows,
    exchanges: Rows,
    links: Rows,
    lines: Rows,
}

impl ByName {
    fn of(job: &Job, machine: &Machine, options: &Options, played: &SimulationResult) -> ByName {
        let mut out = ByName::default();
        let mut costs = Costs::new(job, machine, options);
        let part = 1.0 / job.stages.len() as f64;
        for (s, stage) in job.stages.iter().enumerate() {
            let program = &job.programs[stage.program as usize];
            let mut calls = vec![0u64; program.bodies.len()];
            for call in [ProgramPhase::Train, ProgramPhase::Update].iter().flat_map(|p| stage.schedule.calls(*p)).filter(|c| c.part == 0) {
                calls[call.body.index()] += 1;
            }
            // Exchanges are numbered as in the stage's tape: body by body, command by command.
            let mut exchange = 0;
            for (body, times) in program.bodies.iter().zip(calls) {
                for command in body.commands.iter().filter(|c| c.predicate.is_none()) {
                    let times = times as f64 * part;
                    let row = |times: f64, seconds: f64| Row { calls: times, seconds: seconds * times, ..Row::default() };
                    let row = match costs.exchange(s, &command.action) {
                        Some(cost) => {
                            let exposed = played.times[s].exposed[exchange] * part;
                            exchange += 1;
                            // A message counts for its receiver.
                            let times = if matches!(command.action, Action::Send { .. }) { 0.0 } else { times };
                            let bytes = times * sent(&job.mesh, program, &command.action) as f64;
                            let row = Row { exposed, bytes, ..row(times, cost.seconds()) };
                            out.exchanges.add(&exchange_name(job, program, &command.action), &row);
                            out.links.add(machine.links.get(cost.level()).map_or("no link", |l| &l.name), &row);
                            row
                        }
                        None => {
                            let (kind, cost) = costs.work(s, &command.action);
                            let row = row(times, cost.seconds());
                            if row.seconds == 0.0 {
                                continue;
                            }
                            let row = Row { exposed: if kind == WorkKind::Device { row.seconds } else { 0.0 }, ..row };
                            out.kernels.add(work_name(job, &command.action), &row);
                            row
                        }
                    };
                    let line = command.origin.span.map_or_else(|| "no line of the text".into(), |span| line(job, span));
                    out.lines.add(&line, &row);
                }
            }
        }
        out
    }
}

fn line(job: &Job, span: Span) -> String {
    let source = job.sources.get(usize::from(span.file)).map_or("?", |s| s.name.as_str());
    format!("{source}:{}", span.line)
}

/// What rows call an exchange.
pub fn exchange_name(job: &Job, program: &Program, action: &Action) -> String {
    match action {
        Action::Collective { kind, group, .. } => format!("{} over {}", kind.name(), program.groups[group.index()].describe(&job.mesh)),
        _ => "messages between stages".into(),
    }
}

/// What rows call a command that is no exchange.
pub fn work_name(job: &Job, action: &Action) -> &'static str {
    match action {
        Action::Launch { kernel, .. } => {
            let kernel = &job.kernels[kernel.index()];
            if kernel.on == Space::Host { "kernels of the host" } else { kernel.family.describe() }
        }
        Action::Copy { .. } => "copies between memories",
        Action::Load { .. } => "the batch",
        Action::Report { .. } | Action::Limit { .. } => "reports",
        _ => "fills",
    }
}

/// Seconds that a step would take if what `keep` says no to took none, by stage, body and command.
///
/// # Errors
/// As [`play`].
pub fn without(job: &Job, machine: &Machine, options: Options, keep: &dyn Fn(usize, &ProgramBody, usize) -> bool) -> Result<f64, Deadlock> {
    let takes = |stage: usize, body: &ProgramBody, at: usize, cost: Cost| if keep(stage, body, at) { cost } else { Cost::default() };
    play(job, machine, options, &takes).map(|p| p.end - p.begin)
}
