//! The calls of a rank's program: which bodies, for which microbatches, and what passes from call to call.

use super::apart::apart;
use super::body::{BodySummary, BufferEffects, is_held};
use super::persistent::ALIGN;
use crate::violation::{Breach, Checked, ensure};
use crate::{Invariant, Location, LocationPart, Violation};
use ir::module::JobLevel;
use ir::program::{BodyKind, BufferId, CallSchedule, Content, Job, MOST_BYTES, Program, Slots, Space};
use ir::program::{Call, ProgramBody, ProgramPhase};
use std::collections::{BTreeMap, BTreeSet};

/// For each body that writes something: a buffer, and the command that reads it.
type Writers = BTreeMap<usize, (BufferId, usize)>;

/// The calls of one body within a phase or a run of phases.
#[derive(Clone, Debug, PartialEq, Eq)]
struct BodyCalls {
    count: usize,
    /// The position of each part's first call in the list of calls.
    first: Vec<usize>,
    /// The position of each part's last call.
    last: Vec<usize>,
}

impl BodyCalls {
    /// The same calls, counted as if so many others came before.
    fn after(mut self, later: usize) -> BodyCalls {
        self.first.iter_mut().chain(&mut self.last).for_each(|at| *at += later);
        self
    }
}

/// A call's position and a command's.
type Moment = (usize, usize);

/// Checks the order of calls of the program of one stage, given what its bodies do. Returns the reports of an
/// evaluation.
///
/// # Errors
/// The first call, buffer or report that is wrong.
pub fn check(
    job: &Job,
    program: &Program,
    schedule: &CallSchedule,
    bodies: &[BodySummary],
    settled: JobLevel,
    at: &Location,
) -> Result<BTreeSet<u32>, Violation> {
    let placed = settled >= JobLevel::Memory;
    if placed {
        slots(job, program, schedule, at)?;
    }
    let mut uses = vec![];
    for phase in ProgramPhase::ALL {
        let at = at.of(LocationPart::Calls(phase.name()));
        uses.push(calls(job, program, schedule, bodies, phase, &at)?);
        if placed {
            stash(program, schedule, bodies, phase, &at)?;
            apart(program, schedule, bodies, phase, &at)?;
        }
    }
    for (b, body) in program.bodies.iter().enumerate() {
        ensure(uses.iter().any(|u| u[b].is_some()), Invariant::BodyCalled, || format!("body `{}` is never called", body.name))
            .map_err(|e| at.error(e))?;
    }
    // The update belongs to the step of the training pass before it, so its calls are numbered after those of the
    // pass.
    let later = schedule.train.len();
    let step: Vec<Option<BodyCalls>> = uses[0].iter().zip(&uses[1]).map(|(t, u)| t.clone().or(u.clone().map(|u| u.after(later)))).collect();
    persistent(program, bodies, &step, Some(later), &at.of(LocationPart::Calls("step")))?;
    persistent(program, bodies, &uses[2], None, &at.of(LocationPart::Calls(ProgramPhase::Eval.name())))?;
    reports(job, program, schedule, bodies, &uses, at)
}

/// Every stash of a program has slots beside temporary buffers of its memory.
fn slots(job: &Job, program: &Program, schedule: &CallSchedule, at: &Location) -> Result<(), Violation> {
    let stashes = program.stashes.len();
    ensure(schedule.slots.len() == stashes, Invariant::StashSlots, || format!("numbers of slots for {} of {stashes} stashes", schedule.slots.len()))
        .map_err(|e| at.error(e))?;
    for Slots { count, at: begin } in &schedule.slots {
        ensure(*count > 0, Invariant::StashSlots, || "a stash has no slot".into()).map_err(|e| at.error(e))?;
        ensure(u64::from(*count) <= job.microbatches, Invariant::StashSlots, || format!("{count} slots for {} microbatches", job.microbatches))
            .map_err(|e| at.error(e))?;
        ensure(begin.is_multiple_of(ALIGN), Invariant::StashAligned, || format!("a stash begins at {begin}, not a multiple of {ALIGN}"))
            .map_err(|e| at.error(e))?;
    }
    let sizes = schedule.arena_bytes(program);
    Space::ALL.map(Space::temporary).into_iter().try_for_each(|arena| {
        let size = sizes[arena as usize];
        ensure(size <= MOST_BYTES, Invariant::TemporarySize, || format!("{} memory has {size} bytes", arena.name())).map_err(|e| at.error(e))
    })
}

/// Whether bodies of a kind are called in a phase.
fn belongs(kind: BodyKind, phase: ProgramPhase) -> bool {
    match kind {
        BodyKind::Prologue | BodyKind::Forward(_) | BodyKind::Reduce => phase != ProgramPhase::Update,
        BodyKind::Backward(_) | BodyKind::Weight(_) => phase == ProgramPhase::Train,
        BodyKind::Update => phase == ProgramPhase::Update,
    }
}

/// The body of a call, for a microbatch of the job.
pub fn exists<'a>(job: &Job, program: &'a Program, call: &Call) -> Checked<&'a ProgramBody> {
    let (m, k) = (job.microbatches, call.microbatch);
    let body = program.bodies.get(call.body.index());
    let body = body.ok_or_else(|| Invariant::CallExists.breach(format!("there is no body {}", call.body.index())))?;
    ensure(u64::from(k) < m, Invariant::CallExists, || format!("there is no microbatch {k} of {m}"))?;
    ensure(call.part < body.parts(), Invariant::CallExists, || format!("there is no part {} of {}", call.part, body.parts()))?;
    Ok(body)
}

/// Every body is called once, or once for every microbatch where that makes a difference: part by part, with no other
/// body of the microbatch nor another microbatch of the body between two parts.
fn calls(
    job: &Job,
    program: &Program,
    schedule: &CallSchedule,
    bodies: &[BodySummary],
    phase: ProgramPhase,
    at: &Location,
) -> Result<Vec<Option<BodyCalls>>, Violation> {
    let m = job.microbatches as usize;
    let mut uses: Vec<Option<BodyCalls>> = vec![None; bodies.len()];
    // The number of parts that were called, by body and microbatch.
    let mut seen: Vec<Vec<u32>> = vec![vec![]; bodies.len()];
    // The body and the microbatch of each call of which parts are still to come.
    let mut open: Vec<(usize, usize)> = vec![];
    for (c, call) in schedule.calls(phase).iter().enumerate() {
        let fail = |what: Breach| at.of(LocationPart::Call(c)).error(what);
        let (b, k) = (call.body.index(), call.microbatch as usize);
        let body = exists(job, program, call).map_err(fail)?;
        ensure(belongs(body.kind, phase), Invariant::CallPhase, || format!("`{}` is not of this phase", body.name)).map_err(fail)?;
        seen[b].resize(m, 0);
        let part = seen[b][k];
        ensure(call.part >= part, Invariant::CalledOnce, || format!("`{}` is called for microbatch {k} again", body.name)).map_err(fail)?;
        ensure(call.part == part, Invariant::PartsInOrder, || format!("part {} of `{}` comes before part {part}", call.part, body.name))
            .map_err(fail)?;
        if let Some((other, of)) = open.iter().find(|other| **other != (b, k) && (other.0 == b || other.1 == k)) {
            let what = format!("`{}` of microbatch {k} comes between parts of `{}` of microbatch {of}", body.name, program.bodies[*other].name);
            return Err(fail(Invariant::PartsInOrder.breach(what)));
        }
        open.retain(|other| *other != (b, k));
        open.extend((part + 1 < body.parts()).then_some((b, k)));
        let done = |kind: BodyKind| program.bodies.iter().zip(&seen).any(|(f, s)| f.kind == kind && s.get(k) == Some(&f.parts()));
        match body.kind {
            BodyKind::Backward(l) => ensure(done(BodyKind::Forward(l)), Invariant::PassOrder, || {
                format!("`{}` comes before the forward pass of microbatch {k}", body.name)
            }),
            // A stage may have passes for weight gradients alone.
            BodyKind::Weight(l) => {
                let passes = program.bodies.iter().any(|b| b.kind == BodyKind::Backward(l));
                ensure(!passes || done(BodyKind::Backward(l)), Invariant::PassOrder, || {
                    format!("`{}` comes before the backward pass of microbatch {k}", body.name)
                })
            }
            BodyKind::Prologue | BodyKind::Forward(_) | BodyKind::Reduce | BodyKind::Update => Ok(()),
        }
        .map_err(fail)?;
        seen[b][k] += 1;
        let u = uses[b].get_or_insert(BodyCalls { count: 0, first: vec![], last: vec![] });
        let part = part as usize;
        if u.first.len() == part {
            u.first.push(c);
            u.last.push(c);
        }
        u.last[part] = c;
        u.count += usize::from(part == 0);
    }
    if let Some((b, k)) = open.first() {
        let what = format!("parts of `{}` are not called for microbatch {k}", program.bodies[*b].name);
        return Err(at.error(Invariant::PartsInOrder.breach(what)));
    }
    for ((body, summary), u) in program.bodies.iter().zip(bodies).zip(&uses) {
        let Some(u) = u else { continue };
        let right = match body.kind {
            BodyKind::Forward(_) | BodyKind::Backward(_) | BodyKind::Weight(_) => u.count == m,
            BodyKind::Prologue => u.count == m || u.count == 1 && summary.per_microbatch.is_none(),
            BodyKind::Reduce | BodyKind::Update => u.count == 1 && (m == 1 || summary.per_microbatch.is_none()),
        };
        ensure(right, Invariant::CallCount, || format!("`{}` is called for {} of {m} microbatches", body.name, u.count)).map_err(|e| at.error(e))?;
    }
    Ok(uses)
}

/// Checks that each slot of a stash serves one microbatch at a time: what a call reads was written by calls for the
/// same microbatch, since another microbatch last had the slot.
fn stash(program: &Program, schedule: &CallSchedule, bodies: &[BodySummary], phase: ProgramPhase, at: &Location) -> Result<(), Violation> {
    let calls = schedule.calls(phase);
    let called: BTreeSet<usize> = calls.iter().map(|c| c.body.index()).collect();
    let of = |b: usize| bodies[b].touches.iter().filter(|(id, _)| program.buffers[id.index()].arena.is_stash());
    let mut writer: BTreeMap<BufferId, usize> = BTreeMap::new();
    for &b in &called {
        for (id, touch) in of(b) {
            let name = || &program.buffers[id.index()].name;
            ensure(touch.add.is_none(), Invariant::StashAdded, || format!("`{}` adds to `{}` in the stash", program.bodies[b].name, name()))
                .map_err(|e| at.error(e))?;
            if touch.write.is_some()
                && let Some(other) = writer.insert(*id, b)
            {
                return Err(at.error(Invariant::StashWriter.breach(format!(
                    "`{}` and `{}` both write `{}` in the stash",
                    program.bodies[other].name,
                    program.bodies[b].name,
                    name()
                ))));
            }
        }
    }
    // For each body and each stash that it uses: the bodies that write what it reads there, with one buffer of each.
    let mut needs: BTreeMap<usize, BTreeMap<usize, Writers>> = BTreeMap::new();
    for &b in &called {
        for (id, touch) in of(b) {
            let Some((stash, _)) = program.stash(&program.buffers[id.index()]) else { continue };
            let all = needs.entry(b).or_default().entry(stash).or_default();
            let Some(k) = touch.need else { continue };
            let from = writer.get(id).ok_or_else(|| {
                at.body(&program.bodies[b].name)
                    .command(k, &program.bodies[b].commands[k])
                    .error(Invariant::StashWritten.breach(format!("nothing writes buffer `{}`, which it reads", program.buffers[id.index()].name)))
            })?;
            all.entry(*from).or_insert((*id, k));
        }
    }
    let mut stashes: Vec<Vec<(u32, Vec<usize>)>> = schedule.slots.iter().map(|s| vec![(0, vec![]); s.count as usize]).collect();
    for call in calls {
        let b = call.body.index();
        let part = program.bodies[b].part(call.part);
        for (stash, needs) in needs.get(&b).into_iter().flatten() {
            // A call uses the slot from the first part that touches the stash to the last one.
            let used = bodies[b].stashed[stash];
            if part.end <= used.0 || used.1 < part.start {
                continue;
            }
            let slots = &mut stashes[*stash];
            let k = call.microbatch as usize % slots.len();
            let (owner, ran) = &mut slots[k];
            let error = |k: usize, what: Breach| {
                at.of(LocationPart::Pass(program.bodies[b].name.clone(), call.microbatch)).command(k, &program.bodies[b].commands[k]).error(what)
            };
            let name = |id: &BufferId| &program.buffers[id.index()].name;
            if *owner != call.microbatch {
                let before = std::mem::replace(owner, call.microbatch);
                if let Some((id, k)) = needs.values().next() {
                    return Err(error(
                        *k,
                        Invariant::StashOwner.breach(format!("the stash's slot holds microbatch {before}, not buffer `{}` of this one", name(id))),
                    ));
                }
                ran.clear();
            }
            if let Some((_, (id, k))) = needs.iter().find(|(from, (_, k))| part.contains(k) && !ran.contains(from)) {
                return Err(error(*k, Invariant::StashWritten.breach(format!("it reads buffer `{}` before that is written", name(id)))));
            }
            if part.contains(&used.1) {
                ran.push(b);
            }
        }
    }
    Ok(())
}

/// A use of a buffer by a body.
struct BodyUse<'a> {
    body: usize,
    whole: &'a ProgramBody,
    touch: &'a BufferEffects,
    calls: &'a BodyCalls,
}

impl BodyUse<'_> {
    fn first(&self, command: usize) -> Moment {
        (self.calls.first[self.whole.part_of(command) as usize], command)
    }

    fn last(&self, command: usize) -> Moment {
        (self.calls.last[self.whole.part_of(command) as usize], command)
    }
}

/// Checks what passes through the persistent arena in a run of calls. `update` is where the update's calls begin, if
/// there are any.
fn persistent(program: &Program, bodies: &[BodySummary], uses: &[Option<BodyCalls>], update: Option<usize>, at: &Location) -> Result<(), Violation> {
    let mut parts: BTreeMap<BufferId, Vec<BodyUse>> = BTreeMap::new();
    for (body, summary) in bodies.iter().enumerate() {
        let Some(calls) = &uses[body] else { continue };
        let whole = &program.bodies[body];
        for (id, touch) in &summary.touches {
            if program.buffers[id.index()].arena.lasts() {
                parts.entry(*id).or_default().push(BodyUse { body, whole, touch, calls });
            }
        }
    }
    for (id, parts) in &parts {
        match is_held(&program.buffers[id.index()]) {
            true => held(program, *id, parts, update, at)?,
            false => made(program, *id, parts, at)?,
        }
    }
    if update.is_some() {
        // If the optimizer keeps states of a parameter, each step renews them and the parameter.
        let with_states: BTreeSet<u32> =
            program.buffers.iter().filter_map(|b| if let Content::State { slot, .. } = b.content { Some(slot) } else { None }).collect();
        for (k, buffer) in program.buffers.iter().enumerate() {
            let renewed = match &buffer.content {
                Content::Param { slot, .. } | Content::State { slot, .. } => with_states.contains(slot),
                Content::Table { .. } | Content::Accumulator | Content::Activation => false,
            };
            let written = parts.get(&BufferId(k as u32)).is_some_and(|parts| parts.iter().any(|p| p.touch.write.is_some()));
            ensure(!renewed || written, Invariant::StatesRenewed, || format!("no call updates `{}`", buffer.name)).map_err(|e| at.error(e))?;
        }
    }
    Ok(())
}

/// The error of one of a body's commands.
fn fail(program: &Program, at: &Location, part: &BodyUse, command: usize, what: Breach) -> Violation {
    let body = &program.bodies[part.body];
    at.body(&body.name).command(command, &body.commands[command]).error(what)
}

/// Checks that parameters and states are replaced once, in an update, and tables never.
fn held(program: &Program, id: BufferId, parts: &[BodyUse], update: Option<usize>, at: &Location) -> Result<(), Violation> {
    let buffer = &program.buffers[id.index()];
    let mut replaced = false;
    for part in parts {
        let Some(k) = part.touch.write.or(part.touch.replace) else { continue };
        let in_update = update.is_some_and(|u| part.calls.first[0] >= u) && !matches!(buffer.content, Content::Table { .. });
        ensure(in_update, Invariant::HeldInUpdate, || format!("it writes `{}` outside of an update", buffer.name))
            .map_err(|e| fail(program, at, part, k, e))?;
        ensure(part.calls.count == 1 && !replaced, Invariant::ChangedOnce, || format!("it writes `{}` again", buffer.name))
            .map_err(|e| fail(program, at, part, k, e))?;
        replaced = true;
    }
    Ok(())
}

/// Checks that one call writes each other buffer before all reads. A sum is set to zero by it; then come all
/// additions, and then the reads.
fn made(program: &Program, id: BufferId, parts: &[BodyUse], at: &Location) -> Result<(), Violation> {
    let name = &program.buffers[id.index()].name;
    let mut written: Option<Moment> = None;
    let mut fill = None;
    let mut added: Option<Moment> = None;
    for part in parts {
        if let Some(k) = part.touch.write {
            let again = part.calls.count > 1 || written.is_some();
            ensure(!again, Invariant::MadeOnce, || format!("more than one call writes `{name}`, which does not belong to a microbatch"))
                .map_err(|e| fail(program, at, part, k, e))?;
            written = Some(part.first(k));
            fill = part.touch.fill.map(|value| (part, k, value));
        }
        if let Some((_, k)) = part.touch.add {
            added = added.max(Some(part.last(k)));
        }
        if let Some(k) = part.touch.replace {
            ensure(part.calls.count == 1, Invariant::ReplacedOnce, || format!("each of its calls changes `{name}` in place"))
                .map_err(|e| fail(program, at, part, k, e))?;
        }
    }
    for part in parts {
        if let Some((k, _)) = part.touch.add {
            let ready = written.is_some_and(|w| w < part.first(k));
            ensure(ready, Invariant::SumFilled, || format!("it adds to `{name}` before that is set to zero"))
                .map_err(|e| fail(program, at, part, k, e))?;
            if let Some((filler, f, value)) = fill {
                ensure(value.0 == 0.0, Invariant::SumFromZero, || format!("the sum `{name}` begins at {value}"))
                    .map_err(|e| fail(program, at, filler, f, e))?;
            }
        }
        if let Some(k) = part.touch.first_read {
            let complete = added.is_none_or(|a| a < part.first(k));
            ensure(complete, Invariant::SumComplete, || format!("it reads the sum `{name}` before its last addition"))
                .map_err(|e| fail(program, at, part, k, e))?;
            let ready = written.is_some_and(|w| w < part.first(k));
            ensure(ready, Invariant::MadeBeforeRead, || format!("it reads buffer `{name}` before that is written"))
                .map_err(|e| fail(program, at, part, k, e))?;
            let summed = fill.is_none() || added.is_some();
            ensure(summed, Invariant::SumOfSomething, || format!("it reads the sum `{name}`, to which nothing is added"))
                .map_err(|e| fail(program, at, part, k, e))?;
        }
    }
    Ok(())
}

/// Checks that every report is issued once in training, and in an evaluation at most once, the loss for certain.
/// Returns the latter.
fn reports(
    job: &Job,
    program: &Program,
    schedule: &CallSchedule,
    bodies: &[BodySummary],
    uses: &[Vec<Option<BodyCalls>>],
    at: &Location,
) -> Result<BTreeSet<u32>, Violation> {
    let mut evaluated = BTreeSet::new();
    for (phase, uses) in ProgramPhase::ALL.into_iter().zip(uses) {
        let mut count = vec![0; job.reports.len()];
        for (b, summary) in bodies.iter().enumerate() {
            let Some(u) = &uses[b] else { continue };
            for (k, report) in &summary.reports {
                count[*report as usize] += u.count;
                let once = phase != ProgramPhase::Update && count[*report as usize] == 1;
                let what = || format!("`{}` is reported again, or in an update", job.reports[*report as usize]);
                ensure(once, Invariant::ReportedOnce, what)
                    .map_err(|e| at.body(&program.bodies[b].name).command(*k, &program.bodies[b].commands[*k]).error(e))?;
            }
        }
        for (report, (name, n)) in job.reports.iter().zip(count).enumerate() {
            let due = match phase {
                ProgramPhase::Train => true,
                ProgramPhase::Update => false,
                ProgramPhase::Eval => report == 0 && !schedule.eval.is_empty(),
            };
            ensure(n == 1 || !due, Invariant::ReportDue, || format!("`{name}` is not reported"))
                .map_err(|e| at.of(LocationPart::Calls(phase.name())).error(e))?;
            if phase == ProgramPhase::Eval && n == 1 {
                evaluated.insert(report as u32);
            }
        }
    }
    Ok(evaluated)
}
