//! One call of a body: the order of reads and writes, and the memory of temporary buffers.

use super::access::{Access, CommandChecker, Effect, few, per_microbatch};
use super::races::AccessTrace;
use super::replicas::BodyFlow;
use crate::cover::{Cover, TooMany};
use crate::violation::{Breach, Checked, ensure};
use crate::{Invariant, Location, LocationPart, Violation};
use ir::module::JobLevel;
use ir::op::Real;
use ir::program::{Action, Arena, BodyKind, Buffer, BufferId, Content, ProgramBody, Space};
use std::collections::BTreeMap;

/// How a body affects a buffer that outlives its calls, as numbers of commands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BufferEffects {
    /// The first read of what was there before the call.
    pub need: Option<usize>,
    pub first_read: Option<usize>,
    /// The first write. All elements are written in the end.
    pub write: Option<usize>,
    /// The value with which it is filled, if it is.
    pub fill: Option<Real>,
    /// The first and the last addition. All elements are added to once.
    pub add: Option<(usize, usize)>,
    /// A command whose result replaces its operand.
    pub replace: Option<usize>,
}

/// The effects of a body's calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BodySummary {
    /// Buffers that outlive a call.
    pub touches: BTreeMap<BufferId, BufferEffects>,
    /// `(command, report)`.
    pub reports: Vec<(usize, u32)>,
    /// A command that differs from microbatch to microbatch, or adds to a sum over them.
    pub per_microbatch: Option<usize>,
    /// Its temporary buffers, in either memory.
    pub temporary: Vec<LiveRange>,
    /// For each stash that the body touches, the first and the last command that touch it.
    pub stashed: BTreeMap<usize, (usize, usize)>,
}

/// A temporary buffer of a body: its bytes, and the commands that touch it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LiveRange {
    pub id: BufferId,
    pub from: u64,
    pub to: u64,
    pub first: usize,
    pub last: usize,
}

/// Whether a buffer's content comes from outside and lives over steps.
pub fn is_held(buffer: &Buffer) -> bool {
    match buffer.content {
        Content::Param { .. } | Content::State { .. } | Content::Table { .. } => true,
        Content::Accumulator | Content::Activation => false,
    }
}

/// What has happened to a buffer's elements within one call.
#[derive(Default)]
struct BufferHistory {
    written: Cover,
    added: Cover,
    /// The elements of each addition. Equal ones are kept once.
    additions: Vec<Cover>,
    touch: BufferEffects,
    first: usize,
    last: usize,
}

/// Checks a body's commands in order, as they touch memory.
///
/// # Errors
/// The first command that does not fit, or two temporary buffers that would be in each other's way.
pub fn check(
    checker: &CommandChecker,
    body: &ProgramBody,
    settled: JobLevel,
    at: &Location,
) -> Result<(BodySummary, BodyFlow, AccessTrace), Violation> {
    let buffers = &checker.program.buffers;
    let cut = |c: &u32| *c > 0 && (*c as usize) < body.commands.len();
    let in_order = body.cuts.iter().all(cut) && body.cuts.windows(2).all(|w| w[0] < w[1]);
    let what = || format!("{} commands are cut at {:?}", body.commands.len(), body.cuts);
    ensure(in_order, Invariant::BodyCut, what).map_err(|e| at.error(e))?;
    // Only passes may be cut. They write values of their own microbatch or add to sums, whereas the results of other
    // bodies are complete before the passes begin.
    let is_pass = matches!(body.kind, BodyKind::Forward(_) | BodyKind::Backward(_) | BodyKind::Weight(_));
    ensure(is_pass || body.cuts.is_empty(), Invariant::BodyCut, || format!("{} is cut", body.kind.name())).map_err(|e| at.error(e))?;
    let mut lives: BTreeMap<BufferId, BufferHistory> = BTreeMap::new();
    let mut summary = BodySummary { touches: BTreeMap::new(), reports: vec![], per_microbatch: None, temporary: vec![], stashed: BTreeMap::new() };
    let mut flow = BodyFlow::new();
    let mut trace = AccessTrace::default();
    let mut additions: Vec<&Action> = vec![];
    for (k, command) in body.commands.iter().enumerate() {
        let action = &command.action;
        let here = |what: Breach| at.command(k, command).error(what);
        let accesses = checker.accesses(command).map_err(here)?;
        flow.push(checker.program, checker.kernels, k, command, &accesses);
        trace.push(checker.program, &accesses);
        if let Some(access) = accesses.iter().find(|a| a.effect == Effect::Add) {
            let what = || format!("it adds to buffer `{}` a second time, and the same", buffers[access.buffer.index()].name);
            ensure(!additions.contains(&action), Invariant::AddedOnce, what).map_err(here)?;
            additions.push(action);
        }
        for access in &accesses {
            let life = lives.entry(access.buffer).or_insert_with(|| BufferHistory { first: k, ..BufferHistory::default() });
            life.last = k;
            touch(&buffers[access.buffer.index()], life, access, k).map_err(here)?;
            let adds = access.effect == Effect::Add && life.touch.add.is_some_and(|add| add.1 == k);
            if adds && !buffers[access.buffer.index()].arena.is_temporary() {
                summary.per_microbatch.get_or_insert(k);
            }
        }
        if per_microbatch(&checker.job.mesh, command) {
            summary.per_microbatch.get_or_insert(k);
        }
        match action {
            Action::Fill { buffer, value } => {
                if let Some(life) = lives.get_mut(buffer) {
                    life.touch.fill = Some(*value);
                }
            }
            Action::Report { report, .. } => summary.reports.push((k, *report)),
            Action::Launch { .. }
            | Action::Collective { .. }
            | Action::Send { .. }
            | Action::Recv { .. }
            | Action::Copy { .. }
            | Action::Load { .. }
            | Action::Limit { .. }
            | Action::Record { .. }
            | Action::Wait { .. } => {}
        }
    }
    for (id, life) in &lives {
        let buffer = &buffers[id.index()];
        if buffer.arena.is_temporary() {
            let (from, to) = (buffer.offset, buffer.offset + buffer.bytes());
            summary.temporary.push(LiveRange { id: *id, from, to, first: life.first, last: life.last });
        }
        if let Some((stash, _)) = checker.program.stash(buffer) {
            let (first, last) = summary.stashed.entry(stash).or_insert((life.first, life.last));
            (*first, *last) = ((*first).min(life.first), (*last).max(life.last));
        }
        if buffer.arena.is_temporary() {
            continue;
        }
        let (name, all) = (&buffer.name, (0, buffer.elements()));
        if let Some(k) = life.touch.write {
            let what = || format!("writes only a part of buffer `{name}`, which outlives the call");
            let whole = few(name, life.written.contains(all)).and_then(|whole| ensure(whole, Invariant::WrittenWhole, what));
            whole.map_err(|e| at.command(k, &body.commands[k]).error(e))?;
        }
        if let Some((k, _)) = life.touch.add {
            let what = || format!("adds only to a part of buffer `{name}`");
            let whole = few(name, life.added.contains(all)).and_then(|whole| ensure(whole, Invariant::AddedWhole, what));
            whole.map_err(|e| at.command(k, &body.commands[k]).error(e))?;
        }
        summary.touches.insert(*id, life.touch.clone());
    }
    if settled >= JobLevel::Memory {
        apart(buffers, &lives, at)?;
    }
    Ok((summary, flow, trace))
}

fn touch(buffer: &Buffer, life: &mut BufferHistory, access: &Access, k: usize) -> Checked {
    let name = &buffer.name;
    let (temporary, held) = (buffer.arena.is_temporary(), is_held(buffer));
    let defined = |life: &BufferHistory| few(name, is_written(life, access));
    let insert = |to: &mut Cover| few(name, access.elements().and_then(|new| to.insert(&new)));
    match access.effect {
        Effect::Read | Effect::Replace => {
            if temporary {
                ensure(defined(life)?, Invariant::ReadBeforeWrite, || format!("it reads buffer `{name}` before that is written"))?;
            } else if life.written.is_empty() || held && !few(name, life.written.meets(access.hull()))? {
                life.touch.need.get_or_insert(k);
            } else {
                ensure(defined(life)?, Invariant::ReadWhole, || format!("it reads buffer `{name}`, of which only a part is written"))?;
            }
            life.touch.first_read.get_or_insert(k);
            if access.effect == Effect::Replace {
                life.touch.replace = Some(k);
                if held && access.spread == 0 {
                    ensure(insert(&mut life.written)?, Invariant::WrittenOnce, || format!("it writes `{name}` again"))?;
                    life.touch.write.get_or_insert(k);
                }
            }
        }
        // Each rank writes its own part, at an offset that depends on coordinates. The buffer held values before.
        Effect::Write if access.spread != 0 => {
            ensure(held && life.written.is_empty(), Invariant::OwnPartWritten, || {
                format!("it writes a part of buffer `{name}`, which depends on coordinates")
            })?;
            life.touch.replace = Some(k);
        }
        Effect::Write => {
            ensure(insert(&mut life.written)?, Invariant::WrittenOnce, || format!("it writes what was already written of buffer `{name}`"))?;
            life.touch.write.get_or_insert(k);
        }
        Effect::Add => {
            ensure(!held, Invariant::HeldAdded, || format!("it adds to `{name}`"))?;
            // An addition to elements that this call has written changes only them, whatever the buffer held before.
            if !temporary && !life.written.is_empty() && defined(life)? {
                return Ok(());
            }
            let ready = if temporary || !life.written.is_empty() { defined(life)? } else { true };
            ensure(ready, Invariant::AddedAfterFill, || format!("it adds to buffer `{name}` before that is filled"))?;
            ensure(life.touch.first_read.is_none(), Invariant::AddedBeforeRead, || format!("it adds to buffer `{name}` after that was read"))?;
            let new = few(name, access.elements())?;
            let again = life.additions.contains(&new);
            ensure(again || insert(&mut life.added)?, Invariant::AddedOnce, || {
                format!("it adds to buffer `{name}` a second time, but to other elements")
            })?;
            if !again {
                life.additions.push(new);
            }
            life.touch.add = Some((life.touch.add.map_or(k, |a| a.0), k));
        }
    }
    Ok(())
}

/// Whether all that a command reads of a buffer was written.
fn is_written(life: &BufferHistory, access: &Access) -> Result<bool, TooMany> {
    if life.written.contains(access.hull())? {
        return Ok(true);
    }
    Ok(access.spread == 0 && access.shape.is_injective() && life.written.holds(&access.elements()?)?)
}

/// Temporary buffers of an arena that are in use at the same command lie apart.
fn apart(buffers: &[Buffer], lives: &BTreeMap<BufferId, BufferHistory>, at: &Location) -> Result<(), Violation> {
    Space::ALL.into_iter().try_for_each(|space| apart_in(space.temporary(), buffers, lives, at))
}

fn apart_in(arena: Arena, buffers: &[Buffer], lives: &BTreeMap<BufferId, BufferHistory>, at: &Location) -> Result<(), Violation> {
    let temporary = |id: &BufferId| buffers[id.index()].arena == arena;
    let stay = |(id, life): (&BufferId, &BufferHistory)| {
        let buffer = &buffers[id.index()];
        (*id, (buffer.offset, buffer.offset + buffer.bytes()), life.first, life.last)
    };
    let Some((k, id, other)) = meeting(lives.iter().filter(|(id, _)| temporary(id)).map(stay)) else { return Ok(()) };
    Err(at.of(LocationPart::Number(k)).error(Invariant::TemporaryApart.breach(format!(
        "buffers `{}` and `{}`, both in use, overlap",
        buffers[other.index()].name,
        buffers[id.index()].name
    ))))
}

/// The first moment at which two owners have the same bytes, each of which has some from one moment to another.
/// Returns the moment, the owner that comes then and the owner that is there.
pub fn meeting<T: Copy + Ord>(all: impl Iterator<Item = (T, (u64, u64), usize, usize)>) -> Option<(usize, T, T)> {
    // At the same moment, begins sort before ends.
    let ends = |(who, bytes, first, last)| [(first, false, who, bytes), (last, true, who, bytes)];
    let mut turns: Vec<(usize, bool, T, (u64, u64))> = all.filter(|(_, (from, to), ..)| from < to).flat_map(ends).collect();
    turns.sort_unstable();
    let mut live = OccupiedBytes::default();
    turns.into_iter().find_map(|(moment, ends, who, (from, to))| match ends {
        true => {
            live.remove(from);
            None
        }
        false => live.insert(from, to, who).err().map(|other| (moment, who, other)),
    })
}

/// Bytes of an arena that are in use: begin, end and owner.
pub struct OccupiedBytes<T>(BTreeMap<u64, (u64, T)>);

impl<T> Default for OccupiedBytes<T> {
    fn default() -> OccupiedBytes<T> {
        OccupiedBytes(BTreeMap::new())
    }
}

impl<T: Copy> OccupiedBytes<T> {
    /// Marks bytes as used, at least one.
    ///
    /// # Errors
    /// Who has some of them.
    pub fn insert(&mut self, from: u64, to: u64, owner: T) -> Result<(), T> {
        match self.0.range(..to).next_back() {
            Some((_, (end, other))) if *end > from => Err(*other),
            _ => {
                self.0.insert(from, (to, owner));
                Ok(())
            }
        }
    }

    /// Frees the bytes that begin there.
    pub fn remove(&mut self, from: u64) {
        self.0.remove(&from);
    }
}
