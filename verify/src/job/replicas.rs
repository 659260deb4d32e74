//! Replicas: where ranks that hold copies of a value hold the same value.
//!
//! For every buffer, at every command: the axes along which ranks may hold different values. Data, parts of
//! parameters and coordinates differ along the axes that split them; a result differs along the axes of what it
//! depends on; an all-reduce or all-gather makes its members agree, to the bit. So a reduction that is missing, or
//! over the wrong axes, shows where it matters: in a report, or in a parameter of which there are copies.

use super::access::{Access, Effect, KernelFacts};
use super::exchange::{MatchedExchanges, Site};
use crate::violation::{Checked, ensure};
use crate::{Invariant, Location, Violation};
use ir::dim::{Base, IndexMap, Linear};
use ir::mesh::{Axis, Mesh, SubAxis};
use ir::op::{Collective, Scalar};
use ir::program::ProgramPhase;
use ir::program::{Action, Buffer, BufferAddress, BufferId, Command, Content, Group, Job, Program, Stage};
use std::collections::HashMap;

/// A set of sub-axes, by bit.
type Axes = u64;

fn axes<'a>(subs: impl IntoIterator<Item = &'a SubAxis>) -> Axes {
    subs.into_iter().fold(0, |set, u| set | 1 << u.0)
}

fn along(form: &Linear) -> Axes {
    axes(form.iter().filter(|(_, stride)| *stride != 0).map(|(u, _)| u))
}

fn split(index: &[IndexMap]) -> Axes {
    index.iter().fold(0, |set, map| match &map.base {
        Base::Coords(form) => set | along(form),
        Base::Zero | Base::Slot(_) => set,
    })
}

/// A buffer, or a part of it, that a command reads at an offset that depends on these axes.
type Source = (BufferId, Axes);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Target {
    buffer: BufferId,
    effect: Effect,
    /// Whether it is all of the buffer.
    whole: bool,
    /// The axes on whose coordinates its offset depends.
    along: Axes,
    from: Vec<Source>,
    /// The axes along which it differs by itself.
    own: Axes,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum FlowStep {
    Compute(Vec<Target>),
    /// A copy from one memory to another. Joined values stay so if it copies whole buffers.
    Copy(Target),
    Exchange {
        kind: Collective,
        group: Axes,
        across: bool,
        target: Target,
    },
    Send(Source),
    Recv(Target),
    Report(u32, Source),
}

/// The flow of values between buffers in a body, with the numbers of commands.
pub struct BodyFlow {
    steps: Vec<(usize, FlowStep)>,
    /// Buffers of which some command reads only a part.
    parted: Vec<BufferId>,
}

impl BodyFlow {
    pub fn new() -> BodyFlow {
        BodyFlow { steps: vec![], parted: vec![] }
    }

    /// Appends a command with its accesses, as they were checked.
    pub fn push(&mut self, program: &Program, kernels: &[KernelFacts], k: usize, command: &Command, accesses: &[Access]) {
        let source = |place: &BufferAddress| (place.buffer, along(&place.coords));
        let target = |access: &Access, place: Axes, mut from: Vec<Source>, own: Axes| {
            // The predicate decides whether the target is written, so it is a source too. What the target held before
            // is not read then (V514, V517).
            from.extend(command.predicate.iter().map(source));
            let all = program.buffers[access.buffer.index()].elements();
            let dense = access.shape.is_injective() && access.shape.outer().is_empty();
            let whole = dense && (access.start, access.shape.run()) == (0, all);
            Target { buffer: access.buffer, effect: access.effect, whole: whole && place == 0, along: place, from, own }
        };
        let step = match &command.action {
            Action::Launch { kernel, args, scalars } => {
                let facts = &kernels[kernel.index()];
                let outputs = accesses[facts.inputs()..args.len()].iter().enumerate().map(|(o, access)| {
                    let (inputs, used) = facts.depends(o);
                    let own = used.iter().fold(0, |set, k| match &scalars[*k] {
                        Scalar::Linear(form) => set | along(form),
                        Scalar::LearningRate | Scalar::LossScale | Scalar::Step | Scalar::Seed | Scalar::BiasCorrection(_) | Scalar::Slot(_) => set,
                    });
                    let place = along(&args[facts.inputs() + o].coords);
                    target(access, place, inputs.iter().map(|i| source(&args[*i])).collect(), own)
                });
                FlowStep::Compute(outputs.collect())
            }
            Action::Fill { .. } => FlowStep::Compute(vec![target(&accesses[0], 0, vec![], 0)]),
            Action::Copy { src, dst, .. } => FlowStep::Copy(target(&accesses[1], along(&dst.coords), vec![source(src)], 0)),
            Action::Load { index, .. } => FlowStep::Compute(vec![target(&accesses[0], 0, vec![], split(index))]),
            Action::Collective { kind, group, src, dst, .. } => {
                let Group { subs, stages } = &program.groups[group.index()];
                let across = stages.as_ref().is_some_and(|s| s.len() > 1);
                FlowStep::Exchange { kind: *kind, group: axes(subs), across, target: target(&accesses[1], along(&dst.coords), vec![source(src)], 0) }
            }
            Action::Send { src, .. } => FlowStep::Send(source(src)),
            Action::Recv { .. } => FlowStep::Recv(target(&accesses[0], 0, vec![], 0)),
            Action::Report { report, src } => FlowStep::Report(*report, source(src)),
            Action::Limit { .. } | Action::Record { .. } | Action::Wait { .. } => return,
        };
        let part = |a: &&Access| a.effect == Effect::Read && a.hull() != (0, program.buffers[a.buffer.index()].elements());
        self.parted.extend(accesses.iter().filter(part).map(|a| a.buffer));
        self.steps.push((k, step));
    }
}

/// What is known of a buffer's value.
#[derive(Clone, Copy, Default)]
struct Value {
    /// The axes along which it may differ.
    differs: Axes,
    /// The axes along which a collective has made it from all members' values.
    joined: Axes,
}

struct Analysis<'a> {
    job: &'a Job,
    /// The axes along which each send and each collective across stages differs.
    given: HashMap<Site, Axes>,
    matches: &'a MatchedExchanges,
    /// The axes that tell ranks of a stage apart.
    ranks: Axes,
    /// The bit of the stages' axis.
    pp: Axes,
}

/// Checks reports and updates of all stages. `flows` are those of each stage's bodies.
///
/// # Errors
/// The first value that differs where it must not.
pub fn check(job: &Job, flows: &[&[BodyFlow]], matches: &MatchedExchanges) -> Result<(), Violation> {
    let of = |axis: Axis| job.mesh.of(axis).fold(0, |set, u| set | axes([&u]));
    let mut analysis = Analysis { job, given: HashMap::new(), matches, ranks: of(Axis::Dp) | of(Axis::Cp) | of(Axis::Tp), pp: of(Axis::Pp) };
    let mut order: Vec<usize> = (0..flows.len()).collect();
    // Forward passes go through the stages in one direction and backward passes in the other, so the order
    // alternates.
    loop {
        let before = analysis.given.clone();
        for s in &order {
            analysis.stage(*s, flows[*s], Errors::Later)?;
        }
        if analysis.given == before {
            break;
        }
        order.reverse();
    }
    (0..flows.len()).try_for_each(|s| analysis.stage(s, flows[s], Errors::Now))
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Errors {
    Now,
    /// Errors are not reported yet, as it is not known what other stages give.
    Later,
}

impl Analysis<'_> {
    fn stage(&mut self, s: usize, flows: &[BodyFlow], errors: Errors) -> Result<(), Violation> {
        let program = &self.job.programs[self.job.stages[s].program as usize];
        let stage = &self.job.stages[s];
        let held: Vec<Option<Axes>> = program.buffers.iter().map(|b| held(program, stage, b)).collect();
        let mut values: Vec<Value> = held.iter().map(|h| Value { differs: h.unwrap_or(0), joined: 0 }).collect();
        let mut parted = vec![false; program.buffers.len()];
        flows.iter().flat_map(|f| &f.parted).for_each(|b| parted[b.index()] = true);
        for phase in ProgramPhase::ALL {
            let calls = self.job.stages[s].schedule.calls(phase);
            // A body that reads what another one writes has its last call after it (`order`). What passes write side
            // by side is read only by later bodies.
            let mut last: Vec<(usize, usize)> =
                (0..flows.len()).filter_map(|b| Some((calls.iter().rposition(|c| c.body.index() == b)?, b))).collect();
            last.sort_unstable();
            for (_, b) in last {
                let mut written = vec![false; program.buffers.len()];
                for (k, step) in &flows[b].steps {
                    let mut known = ReplicaState { program, held: &held, values: &mut values, written: &mut written };
                    let result = self.step(&mut known, (s, b, *k), step, &parted);
                    if errors == Errors::Now {
                        let body = &program.bodies[b];
                        result.map_err(|e| Location::stage(s as u64).body(&body.name).command(*k, &body.commands[*k]).error(e))?;
                    }
                }
            }
        }
        for ((buffer, value), differs) in program.buffers.iter().zip(&values).zip(&held) {
            let wrong = differs.map_or(0, |d| value.differs & !d);
            let what = || format!("parts of `{}` are renewed and not gathered along {}", buffer.name, describe(&self.job.mesh, wrong));
            ensure(wrong == 0 || errors == Errors::Later, Invariant::PartsGathered, what).map_err(|e| Location::stage(s as u64).error(e))?;
        }
        Ok(())
    }

    fn step(&mut self, known: &mut ReplicaState, site: Site, step: &FlowStep, parted: &[bool]) -> Checked {
        let mesh = &self.job.mesh;
        let ranks = self.ranks;
        let read = |values: &[Value], from: &[Source]| ranks & from.iter().fold(0, |set, (b, place)| set | values[b.index()].differs | place);
        match step {
            FlowStep::Compute(targets) => {
                let results: Vec<Axes> = targets.iter().map(|t| t.own & ranks | read(known.values, &t.from)).collect();
                targets.iter().zip(results).try_for_each(|(t, differs)| known.write(mesh, t, Value { differs, joined: 0 }))
            }
            FlowStep::Copy(target) => {
                let joined = target.from.iter().filter(|(b, _)| !parted[b.index()]).fold(0, |set, (b, _)| set | known.values[b.index()].joined);
                known.write(mesh, target, Value { differs: read(known.values, &target.from), joined })
            }
            FlowStep::Exchange { kind, group, across, target } => {
                let mut differs = read(known.values, &target.from);
                let joined = target.from.iter().fold(0, |set, (b, _)| set | known.values[b.index()].joined);
                let over = group | if *across { self.pp } else { 0 };
                let again = joined & over;
                if *across {
                    let hub = self.matches.hub(site);
                    let all = self.given.entry(hub).or_default();
                    *all |= differs;
                    differs = *all;
                }
                let value = match kind {
                    Collective::AllReduce(_) | Collective::AllGather => Value { differs: differs & !group, joined: joined | over },
                    // If all members have equal values, they still have after a shift.
                    Collective::Shift => Value { differs, joined },
                    Collective::ReduceScatter(_) | Collective::AllToAll => Value { differs: differs | group, joined: 0 },
                };
                known.write(mesh, target, value)?;
                let reduces = matches!(kind, Collective::AllReduce(_));
                ensure(!reduces || again == 0, Invariant::JoinedOnce, || format!("it reduces what is already joined along {}", describe(mesh, again)))
            }
            FlowStep::Send(source) => {
                *self.given.entry(site).or_default() |= read(known.values, &[*source]);
                Ok(())
            }
            // The values of a joined message may differ along different axes, so nothing is claimed about it.
            FlowStep::Recv(target) if parted[target.buffer.index()] => known.write(mesh, target, Value::default()),
            FlowStep::Recv(target) => {
                let differs = self.matches.senders(site).iter().fold(0, |set, from| set | self.given.get(from).copied().unwrap_or(0));
                known.write(mesh, target, Value { differs, joined: 0 })
            }
            FlowStep::Report(report, source) => {
                let differs = read(known.values, &[*source]);
                ensure(differs == 0, Invariant::ReportAlike, || {
                    format!("`{}` may differ along {}", self.job.reports[*report as usize], describe(mesh, differs))
                })
            }
        }
    }
}

/// What is known of all buffers at a command.
struct ReplicaState<'a> {
    program: &'a Program,
    /// For each buffer whose content comes from outside, the axes along which it may differ.
    held: &'a [Option<Axes>],
    values: &'a mut [Value],
    written: &'a mut [bool],
}

impl ReplicaState<'_> {
    fn write(&mut self, mesh: &Mesh, target: &Target, new: Value) -> Checked {
        let b = target.buffer.index();
        if let Some(differs) = self.held[b] {
            // Each rank writes its own part, and the parts are gathered later.
            let differs = differs | target.along;
            let wrong = new.differs & !differs;
            self.values[b].differs = if target.whole { new.differs } else { self.values[b].differs | new.differs };
            return ensure(wrong == 0, Invariant::CopiesAlike, || {
                format!("copies of `{}` may come to differ along {}", self.program.buffers[b].name, describe(mesh, wrong))
            });
        }
        let fresh = match target.effect {
            Effect::Write => !std::mem::replace(&mut self.written[b], true),
            Effect::Replace => target.whole,
            Effect::Add | Effect::Read => false,
        };
        let old = self.values[b];
        self.values[b] = match fresh {
            true => Value { differs: new.differs, joined: if target.whole { new.joined } else { 0 } },
            false => Value { differs: old.differs | new.differs, joined: 0 },
        };
        Ok(())
    }
}

/// The axes along which a buffer's content from outside differs, if it is from outside.
fn held(program: &Program, stage: &Stage, buffer: &Buffer) -> Option<Axes> {
    let pieces = program.parts(stage, &buffer.content).iter().fold(0, |set, p| set | split(p.index));
    match &buffer.content {
        Content::Param { index, .. } | Content::State { index, .. } | Content::Table { index, .. } => Some(split(index) | pieces),
        Content::Accumulator | Content::Activation => None,
    }
}

fn describe(mesh: &Mesh, set: Axes) -> String {
    let subs: Vec<SubAxis> = mesh.ids().filter(|u| set >> u.0 & 1 == 1).collect();
    mesh.describe(&subs)
}
