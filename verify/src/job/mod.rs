//! The verifier of programs: what it accepts runs on all ranks to its end, whoever made it.
//!
//! It looks at nothing but the [`Job`]: not at the graphs that it came from, nor at how passes think. Sizes, places
//! and messages do not depend on data. Operands, memory and replicas are looked at as if commands took effect in the
//! order in which a rank issues them; that every order which streams and events leave open comes to the same is a
//! proof of its own ([`races`]).
//!
//! **Invariants of operands** (each command, at all coordinates):
//! - A kernel keeps its own invariants ([`Kernel::verify`](ir::kernel::Kernel::verify)). A launch passes as many
//!   places and scalars as the kernel has, of its dtypes; what operands reach, and the ranges of other commands, lie
//!   within their buffers.
//! - Where a command writes does not depend on coordinates. What it writes overlaps nothing else that it touches,
//!   unless the result takes the place of an operand: of equal type and strides, on which it depends point by point
//!   alone.
//! - A kernel's operands lie in the memory that it works on; a copy is from one memory to another; all else touches
//!   the device's.
//! - Buffers are aligned and lie in their arenas. Parameters, states, tables and inputs are split so that the ranks
//!   (and microbatches) together have every element once; every parameter slot of a stage is filled, and has one
//!   buffer.
//!
//! **Invariants of memory** (each rank):
//! - Buffers of an arena that lives over steps never overlap, nor do those of a stash, which lie in one, nor
//!   temporary buffers between the first and last commands of a call that touch them. From the first to the last
//!   command of a phase that touch a stash for a microbatch, nothing else that is in use lies in its memory; what an
//!   evaluation does, or an update, may.
//! - A microbatch goes through a pass part by part; calls of other passes, for other microbatches, may be between. Of
//!   calls that are under way together no two temporary buffers that are in use overlap either ([`apart`]), so what
//!   holds of a body by itself holds of its calls.
//! - Nothing is read before it is written: temporary buffers in the same call, stashes by calls for the same
//!   microbatch to which the slot belonged since, others earlier in the same step. What comes from outside is there
//!   from the start.
//! - Nothing is written twice: an element once per call in temporary buffers and the stash, once per step elsewhere.
//!   So a dropped, repeated or misplaced command shows.
//! - A sum is set to zero by one call, then added to once per call, then read. Bodies that add to one, or depend on
//!   the microbatch, are called once for each; others once. Backward follows forward.
//! - Parameters and states change in updates alone, and once; a read finds the old or the new value, never some of
//!   each. Where states are kept, all are renewed.
//! - Every report is issued once in training on every rank; in evaluation on all ranks alike, the loss always.
//! - What inputs of integers may hold is a list of intervals, in order and apart. Other inputs have none.
//!
//! **Invariants of streams** (each rank, [`races`]):
//! - Two commands that touch the same bytes, one of them writing, are ordered by their stream or by events.
//! - What goes to one group, channel, event or disk goes through one stream.
//!
//! **Invariants of communication** (all ranks together):
//! - Members of groups exist and agree on each other.
//! - Members of a group issue the same collectives in the same order, of one kind, dtype and count. Every send meets
//!   its receive: in order per sender, receiver and channel, of one dtype, count and microbatch. No phase leaves a
//!   message behind.
//! - No rank waits forever, with [`Job::in_flight`] messages under way per sender, receiver and channel.
//!
//! The last three are shown by playing one rank per stage. **Lemma**: if these come to their end, all ranks do. Ranks
//! of a stage run the same program and see the same calls, counts and dtypes: no command has any that depends on
//! coordinates. Call ranks that differ in the stage alone a *column*. Messages go along columns (`hops` changes the
//! stage alone). The members of a rank's group are the ranks in the group's stages (the rank's own stage if it lists
//! none) that differ from it in the group's axes, none of which is the pipeline's or the microbatch's; so members
//! name the same members, and in each of the group's stages all ranks belong to one such group each. Now let every
//! column do what the played one does, turn by turn. Before and after each turn all columns are in the same state. A
//! send or receive that the played column can do, each can, in its own mailboxes. A collective that all its stages
//! have come to in the played column, all ranks of these stages have come to, hence all members of each group. A
//! collective within one stage never waits, as its members are always at the same command. So all columns end when
//! the played one does. Nor does it matter that real ranks do not take such turns: what a rank waits for is never
//! taken away by another (only it takes from its mailboxes, only it puts into theirs), so every order of turns comes
//! to the same end. For the same reason phases may follow each other without a barrier, as each begins and ends with
//! empty mailboxes.
//!
//! The play takes each rank's commands in order of issue, as if they were on one stream. **Lemma**: if that comes to
//! its end, so does every run with streams, and the same messages and collectives meet. A group, a channel to send on
//! and one to receive from have one stream each ([`races`]), so the n-th of each rank is the same command in every
//! run. Let T be the commands of all ranks in the order of the play, and suppose that a run with streams stands still
//! before its end. Take the first command of T that it has not done. What is before it on its stream, and the records
//! that its waits are for, were issued earlier by its rank, hence are earlier in T, and done; so its stream has come
//! to it. If it is a receive, the matching send is earlier in T; if it is a send, so are the receives that made room
//! for it; if it is a collective, what every other member issues before is, so the other members' streams have come
//! to it too. So it can go on, which is a contradiction. Hence an executor may take ranks' lists as they are, or
//! every stream by itself, and both come to the same end.
//!
//! **Exchanges one by one** ([`serial`]). Where sends have turns, the same is shown once more for ranks that buffer
//! no message and do one exchange after the other, which is how GPUs use NCCL: each exchange, and each group of sends
//! with a receive, begins when the one before has ended. The columns of the first lemma do that too. **Lemma**: if
//! this play comes to its end, so does every run whose other commands are as above. Let T be the commands of all
//! ranks in the order in which the play issued them, but groups where the play ended them. Suppose that a run stands
//! still, and take the first of T that it has not done. If it is no group, what it waits for is earlier in T, as
//! above; the copy of a send that waits for room waits for a group that the play had ended. If it is a group, then
//! for each of its exchanges the groups of all members, its own among them, had begun before the play ended it. What
//! such a group needs to begin is earlier in T: the group before it on its rank had ended, the sends of it were
//! copied, and what its receive or collective waits for is issued earlier. All that is done; so all these groups have
//! begun in the run too, and its exchanges happen. As a run does no exchange out of turn, what meets is the same in
//! every run.
//!
//! **Invariants of replicas** (all ranks of a stage, [`replicas`]):
//! - Reports are the same on all ranks, and copies of parameters and states stay equal: what differs along an axis
//!   was joined along it. What is joined along an axis is not reduced along it again.
//!
//! Not shown: that programs compute what the local graphs say, where copies agree all the same (a maximum that is not
//! shared before a sum that is); that messages of equal type and the same channel are not exchanged for each other;
//! what differs within a message of several values.

mod access;
mod apart;
mod body;
mod cells;
mod exchange;
mod order;
mod persistent;
mod races;
mod replicas;
mod serial;
#[cfg(test)]
mod tests;

pub use exchange::least_in_flight;
pub use serial::check as check_serial;

use crate::violation::{Checked, ensure};
use crate::{Invariant, Location, LocationPart, Violation};
pub(crate) use access::parts_in_rank_order;
use access::{CommandChecker, KernelFacts};
use body::BodySummary;
use exchange::{Events, ExchangeSimulation};
use ir::mesh::{Axis, Mesh};
use ir::module::JobLevel;
use ir::op::DType;
use ir::program::ProgramPhase;
use ir::program::{CallSchedule, Job, Program, Stage};
use races::AccessTrace;
use replicas::BodyFlow;

/// The effects of a program's bodies.
struct ProgramEffects {
    bodies: Vec<BodySummary>,
    flows: Vec<BodyFlow>,
    traces: Vec<AccessTrace>,
    events: Events,
}

/// Checks the invariants of the module's documentation.
///
/// # Errors
/// The first that does not hold, and where.
pub fn verify(job: &Job) -> Result<(), Violation> {
    verify_settled(job, JobLevel::All)
}

/// Checks the invariants that must hold once so much of a job is settled. Before offsets in memory are, that is all
/// but those of arenas, stashes and streams; with them, all but those of streams.
///
/// # Errors
/// The first that does not hold, and where.
pub fn verify_settled(job: &Job, settled: JobLevel) -> Result<(), Violation> {
    let whole = Location::from(LocationPart::Job);
    let kernels = kernels(job)?;
    let mut classes: Vec<Option<ProgramEffects>> = job.programs.iter().map(|_| None).collect();
    let mut checked: Vec<(u32, &CallSchedule)> = vec![];
    let mut evaluated = None;
    for (s, stage) in job.stages.iter().enumerate() {
        let at = Location::stage(s as u64);
        let program = program(job, stage, &at)?;
        exchange::groups(&job.mesh, s as u64, &program.groups, &at)?;
        let class = match &mut classes[stage.program as usize] {
            Some(class) => class,
            none => none.insert(check_bodies(job, program, &kernels, settled, &at)?),
        };
        if !checked.contains(&(stage.program, &stage.schedule)) {
            let reports = order::check(job, program, &stage.schedule, &class.bodies, settled, &at)?;
            let alike = *evaluated.get_or_insert_with(|| reports.clone()) == reports;
            if settled >= JobLevel::All {
                races::check(&job.mesh, &job.kernels, program, &stage.schedule, &class.traces, &at)?;
            }
            ensure(alike, Invariant::ReportsAgree, || "its evaluation reports other numbers than stage 0's".into()).map_err(|e| at.error(e))?;
            checked.push((stage.program, &stage.schedule));
        }
        persistent::stage(job, stage, &at)?;
    }
    if let Some(p) = classes.iter().position(Option::is_none) {
        return Err(whole.error(Invariant::ProgramRuns.breach(format!("no stage runs program {p}"))));
    }
    let of_stages: Vec<&ProgramEffects> = job.stages.iter().filter_map(|s| classes[s.program as usize].as_ref()).collect();
    let events: Vec<&Events> = of_stages.iter().map(|c| &c.events).collect();
    let mut play = ExchangeSimulation::new(job, &events);
    ProgramPhase::ALL.into_iter().try_for_each(|phase| play.run(phase))?;
    serial::check(job)?;
    let flows: Vec<&[BodyFlow]> = of_stages.iter().map(|c| c.flows.as_slice()).collect();
    replicas::check(job, &flows, &play.matches())?;
    whole_params(job).map_err(|e| whole.error(e))
}

/// Checks that commands and calls name what exists, and that operands fit, so that programs can be followed command
/// by command: not what they then do. Arenas count once offsets in memory are settled.
///
/// # Errors
/// The first command that cannot be followed.
pub fn operands(job: &Job, settled: JobLevel) -> Result<(), Violation> {
    let kernels = kernels(job)?;
    for (s, stage) in job.stages.iter().enumerate() {
        let at = Location::stage(s as u64);
        let program = program(job, stage, &at)?;
        exchange::groups(&job.mesh, s as u64, &program.groups, &at)?;
        persistent::stage(job, stage, &at)?;
        for phase in ProgramPhase::ALL {
            let calls = at.of(LocationPart::Calls(phase.name()));
            for (c, call) in stage.schedule.calls(phase).iter().enumerate() {
                order::exists(job, program, call).map_err(|e| calls.of(LocationPart::Call(c)).error(e))?;
            }
        }
    }
    for (p, program) in job.programs.iter().enumerate() {
        let Some(s) = job.stages.iter().position(|s| s.program as usize == p) else { continue };
        if settled >= JobLevel::Memory {
            persistent::arenas(program, &Location::stage(s as u64))?;
        }
        let checker = CommandChecker { job, program, kernels: &kernels };
        for b in &program.bodies {
            let at = Location::stage(s as u64).body(&b.name);
            b.commands.iter().enumerate().try_for_each(|(k, c)| checker.accesses(c).map(drop).map_err(|e| at.command(k, c).error(e)))?;
        }
    }
    Ok(())
}

/// What is known of all kernels, with the mesh and the inputs that they are run on.
fn kernels(job: &Job) -> Result<Vec<KernelFacts>, Violation> {
    let whole = Location::from(LocationPart::Job);
    mesh(job).map_err(|e| whole.error(e))?;
    inputs(job).map_err(|e| whole.error(e))?;
    for (k, kernel) in job.kernels.iter().enumerate() {
        kernel.verify().map_err(|e| Location::from(LocationPart::Kernel(k)).error(Invariant::KernelSound.breach(e.to_string())))?;
    }
    Ok(job.kernels.iter().map(KernelFacts::new).collect())
}

/// The program that a stage runs.
fn program<'a>(job: &'a Job, stage: &Stage, at: &Location) -> Result<&'a Program, Violation> {
    let found = job.programs.get(stage.program as usize);
    found.ok_or_else(|| at.error(Invariant::StageProgram.breach(format!("there is no program {}, but {}", stage.program, job.programs.len()))))
}

/// The mesh is sound, has the job's microbatches and a stage for each of the pipeline's ranks.
fn mesh(job: &Job) -> Checked {
    let mesh: &Mesh = &job.mesh;
    let ranks = mesh.subs.iter().try_fold(1u64, |n, s| n.checked_mul(s.size)).filter(|n| *n < 1 << 48);
    ensure(mesh.subs.len() <= 64, Invariant::MeshSize, || format!("its mesh has {} axes", mesh.subs.len()))?;
    ensure(ranks.is_some_and(|n| n > 0), Invariant::MeshSize, || "its mesh has an empty axis, or too many ranks".into())?;
    for (axis, n, what) in [(Axis::Microbatch, job.microbatches, "microbatches"), (Axis::Pp, job.stages.len() as u64, "stages")] {
        ensure(mesh.of(axis).count() <= 1, Invariant::MeshSize, || format!("its mesh has axis `{axis}` in parts"))?;
        ensure(mesh.size(axis) == n, Invariant::MeshFits, || format!("{n} {what}, {} in its mesh", mesh.size(axis)))?;
    }
    ensure(job.microbatches <= u64::from(u32::MAX), Invariant::MeshSize, || format!("{} microbatches", job.microbatches))?;
    ensure(job.in_flight > 0, Invariant::ChannelRoom, || "its channels take no message".into())
}

/// Checks that the job gives the intervals of its integer inputs, in order.
fn inputs(job: &Job) -> Checked {
    job.inputs.iter().try_for_each(|input| {
        let said = match &input.takes {
            Some(all) => input.dtype == DType::I32 && all.iter().all(|i| i.least <= i.most) && all.windows(2).all(|w| w[0].most < w[1].least),
            None => input.dtype != DType::I32,
        };
        ensure(said, Invariant::InputRange, || format!("what input `{}` may hold is not said as it has to be", input.name))
    })
}

/// Every parameter is on some stage.
fn whole_params(job: &Job) -> Checked {
    let mut there = vec![false; job.params.len()];
    job.stages.iter().flat_map(|s| &s.params).for_each(|p| there[*p as usize] = true);
    match there.iter().position(|t| !t) {
        None => Ok(()),
        Some(p) => Err(Invariant::ParameterPlaced.breach(format!("no stage has parameter `{}`", job.params[p].name))),
    }
}

fn check_bodies(job: &Job, program: &Program, kernels: &[KernelFacts], settled: JobLevel, at: &Location) -> Result<ProgramEffects, Violation> {
    if settled >= JobLevel::Memory {
        persistent::arenas(program, at)?;
    }
    let checker = CommandChecker { job, program, kernels };
    let (mut bodies, mut flows, mut traces) = (vec![], vec![], vec![]);
    for b in &program.bodies {
        let (summary, flow, trace) = body::check(&checker, b, settled, &at.body(&b.name))?;
        bodies.push(summary);
        flows.push(flow);
        traces.push(trace);
    }
    Ok(ProgramEffects { bodies, flows, traces, events: Events::new(program) })
}
