//! One call of a body: the order of reads and writes, and the memory of temporary buffers.

use super::access::{Access, CommandChecker, Effect, few, per_microbatch};
use super::races::Trace;
use super::replicas::Flow;
use crate::cover::{Cover, TooMany};
use crate::violation::{Breach, Checked, ensure};
use crate::{Invariant, Locus, LocusPart, Violation};
use ir::module::Settled;
use ir::op::Real;
use ir::program::{Action, Arena, BodyKind, Buffer, BufferId, Content, ProgramBody, Space};
use std::collections::BTreeMap;

/// What a body does to a buffer that outlives its calls: numbers of commands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BufferEffects {
    /// The first read of what was there before the call.
    pub need: Option<usize>,
    pub first_read: Option<usize>,
    /// The first write, of all its elements in the end.
    pub write: Option<usize>,
    /// What it is filled with, if it is.
    pub fill: Option<Real>,
    /// First and last addition, once to all its elements.
    pub add: Option<(usize, usize)>,
    /// A result that takes the place of its operand.
    pub replace: Option<usize>,
}

/// What the calls of a body amount to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Buffers that outlive a call.
    pub touches: BTreeMap<BufferId, BufferEffects>,
    /// `(command, report)`.
    pub reports: Vec<(usize, u32)>,
    /// A command that does something else for each microbatch, or adds to a sum over them.
    pub per_microbatch: Option<usize>,
    /// Its temporary buffers, in either memory.
    pub temporary: Vec<Used>,
    /// Of each stash that it touches, the first and the last command that do.
    pub stashed: BTreeMap<usize, (usize, usize)>,
}

/// A temporary buffer of a body: its bytes, and the commands that touch it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
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

/// Elements of a buffer within one call.
#[derive(Default)]
struct Life {
    written: Cover,
    added: Cover,
    /// The elements of each addition, those of equal ones once.
    additions: Vec<Cover>,
    touch: BufferEffects,
    first: usize,
    last: usize,
}

/// Checks a body's commands in order, as they touch memory.
///
/// # Errors
/// The first command that does not fit, or two temporary buffers that would be in each other's way.
pub fn check(checker: &CommandChecker, body: &ProgramBody, settled: Settled, at: &Locus) -> Result<(Summary, Flow, Trace), Violation> {
    let buffers = &checker.program.buffers;
    let cut = |c: &u32| *c > 0 && (*c as usize) < body.commands.len();
    let in_order = body.cuts.iter().all(cut) && body.cuts.windows(2).all(|w| w[0] < w[1]);
    let what = || format!("{} commands are cut at {:?}", body.commands.len(), body.cuts);
    ensure(in_order, Invariant::BodyCut, what).map_err(|e| at.error(e))?;
    // What others write is there as a whole before passes begin: that of a pass is for its own microbatch, or a sum.
    let is_pass = matches!(body.kind, BodyKind::Forward(_) | BodyKind::Backward(_) | BodyKind::Weight(_));
    ensure(is_pass || body.cuts.is_empty(), Invariant::BodyCut, || format!("{} is cut", body.kind.name())).map_err(|e| at.error(e))?;
    let mut lives: BTreeMap<BufferId, Life> = BTreeMap::new();
    let mut summary = Summary { touches: BTreeMap::new(), reports: vec![], per_microbatch: None, temporary: vec![], stashed: BTreeMap::new() };
    let mut flow = Flow::new();
    let mut trace = Trace::default();
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
            let life = lives.entry(access.buffer).or_insert_with(|| Life { first: k, ..Life::default() });
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
            summary.temporary.push(Used { id: *id, from, to, first: life.first, last: life.last });
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
    if settled >= Settled::Memory {
        apart(buffers, &lives, at)?;
    }
    Ok((summary, flow, trace))
}

fn touch(buffer: &Buffer, life: &mut Life, access: &Access, k: usize) -> Checked {
    let name = &buffer.name;
    let (temporary, held) = (buffer.arena.is_temporary(), is_held(buffer));
    let defined = |life: &Life| few(name, is_written(life, access));
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
        // A part that coordinates tell: all of it was there before, and is.
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
            // What the call has put there it changes, whatever was there before.
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
fn is_written(life: &Life, access: &Access) -> Result<bool, TooMany> {
    if life.written.contains(access.hull())? {
        return Ok(true);
    }
    Ok(access.spread == 0 && access.shape.is_injective() && life.written.holds(&access.elements()?)?)
}

/// Temporary buffers of an arena that are in use at the same command lie apart.
fn apart(buffers: &[Buffer], lives: &BTreeMap<BufferId, Life>, at: &Locus) -> Result<(), Violation> {
    Space::ALL.into_iter().try_for_each(|space| apart_in(space.temporary(), buffers, lives, at))
}

fn apart_in(arena: Arena, buffers: &[Buffer], lives: &BTreeMap<BufferId, Life>, at: &Locus) -> Result<(), Violation> {
    let temporary = |id: &BufferId| buffers[id.index()].arena == arena;
    let stay = |(id, life): (&BufferId, &Life)| {
        let buffer = &buffers[id.index()];
        (*id, (buffer.offset, buffer.offset + buffer.bytes()), life.first, life.last)
    };
    let Some((k, id, other)) = meeting(lives.iter().filter(|(id, _)| temporary(id)).map(stay)) else { return Ok(()) };
    Err(at.of(LocusPart::Number(k)).error(Invariant::TemporaryApart.breach(format!(
        "buffers `{}` and `{}`, both in use, overlap",
        buffers[other.index()].name,
        buffers[id.index()].name
    ))))
}

/// The first moment at which two of these have the same bytes: each has some, from one moment to another. Of those
/// two the one that comes then, and the one that is there.
pub fn meeting<T: Copy + Ord>(all: impl Iterator<Item = (T, (u64, u64), usize, usize)>) -> Option<(usize, T, T)> {
    // Beginnings at a moment come before ends there.
    let ends = |(who, bytes, first, last)| [(first, false, who, bytes), (last, true, who, bytes)];
    let mut turns: Vec<(usize, bool, T, (u64, u64))> = all.filter(|(_, (from, to), ..)| from < to).flat_map(ends).collect();
    turns.sort_unstable();
    let mut live = Live::default();
    turns.into_iter().find_map(|(moment, ends, who, (from, to))| match ends {
        true => {
            live.remove(from);
            None
        }
        false => live.insert(from, to, who).err().map(|other| (moment, who, other)),
    })
}

/// Bytes of an arena in use: begin to end and owner.
pub struct Live<T>(BTreeMap<u64, (u64, T)>);

impl<T> Default for Live<T> {
    fn default() -> Live<T> {
        Live(BTreeMap::new())
    }
}

impl<T: Copy> Live<T> {
    /// Takes bytes, of which there is one at least.
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

    /// Gives back the bytes that begin there.
    pub fn remove(&mut self, from: u64) {
        self.0.remove(&from);
    }
}
