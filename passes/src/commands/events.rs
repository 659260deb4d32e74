//! Events between streams: communication waits for what it needs, and compute for what came of it, and for nothing
//! else.
//!
//! Events follow from hazards: where a command touches bytes that an earlier command of another stream touched, one
//! of them writing, and nothing orders the two yet, that command is recorded and this one waits. The order of issue
//! is played for that with vector clocks, call by call; a wait that another one implies is left out.
//!
//! Steps and evaluations are played several times, one after the other, as what comes before differs. Their middles
//! do not: what each leaves behind is kept from the first time (`again.rs`).

mod steady_state;

use crate::commands::effects::{MemoryEffect, memory_effects};
use ir::kernel::Kernel;
use ir::mesh::Mesh;
use ir::program::{Action, Arena, BodyId, Call, CallSchedule, Command, Job, Program, ProgramBody, Slots, Space, Stash, Stream};
use smallvec::SmallVec;
use std::collections::{BTreeMap, BTreeSet};
use steady_state::{PhaseState, counts, middle};

/// Puts events where streams of a program need each other. Where all is on one stream, nothing does.
pub fn synchronise(mut job: Job) -> Job {
    let Job { mesh, kernels, programs, stages, .. } = &mut job;
    for (p, program) in programs.iter_mut().enumerate() {
        let mut schedules: Vec<&CallSchedule> = vec![];
        for schedule in stages.iter().filter(|s| s.program as usize == p).map(|s| &s.schedule) {
            if !schedules.contains(&schedule) {
                schedules.push(schedule);
            }
        }
        of_program(mesh, kernels, program, &schedules, middle);
    }
    job
}

const STREAMS: usize = Stream::ALL.len();

/// Per stream, how many of its commands are known to be done.
type Clock = [u32; STREAMS];

/// Index of a command, counted over all bodies of the program.
type CommandIndex = u32;

/// When a command was issued, by its stream's clock, and which one it was. Clocks begin at 1; 0 stands for no
/// command.
type Issued = (u32, CommandIndex);

/// The last accesses to some bytes.
#[derive(Clone, Copy, Default)]
struct LastAccesses {
    /// The last write, and its stream.
    written: Issued,
    writer: u8,
    /// Per stream, the last read since.
    read: [Issued; STREAMS],
}

/// Finds the calls of a phase that are simulated only once, from the number of slots of each stash.
type MiddleFinder = fn(&[Call], &[u64]) -> std::ops::Range<usize>;

/// Inserts the records and waits that the hazards of these schedules need.
fn of_program(mesh: &Mesh, kernels: &[Kernel], program: &mut Program, schedules: &[&CallSchedule], middle: MiddleFinder) {
    let mut needed: Vec<BTreeSet<CommandIndex>> = vec![BTreeSet::new(); program.bodies.iter().map(|b| b.commands.len()).sum()];
    let used: BTreeSet<Stream> = program.bodies.iter().flat_map(|b| &b.commands).map(|c| c.stream).collect();
    if used.len() < 2 {
        return;
    }
    let sites = CommandAccesses::new(mesh, kernels, program);
    for schedule in schedules {
        IssueReplay::new(program, &sites, schedule, &mut needed).play(schedule, middle);
    }
    let recorded: BTreeSet<CommandIndex> = needed.iter().flatten().copied().collect();
    let events: BTreeMap<CommandIndex, u32> = recorded.iter().enumerate().map(|(k, site)| (*site, k as u32)).collect();
    let mut site = 0;
    for ProgramBody { commands, cuts, .. } in &mut program.bodies {
        let (mut out, mut next) = (Vec::with_capacity(commands.len()), 0);
        for (k, command) in std::mem::take(commands).into_iter().enumerate() {
            if cuts.get(next).is_some_and(|cut| *cut as usize == k) {
                cuts[next] = ir::fault!("events.cuts.stay", cuts[next], out.len() as u32);
                next += 1;
            }
            let with = |action| Command { stream: command.stream, action, predicate: None, origin: command.origin.clone(), reason: None };
            out.extend(needed[site as usize].iter().map(|s| with(Action::Wait { event: events[s] })));
            let record = events.get(&site).map(|e| with(Action::Record { event: *e }));
            out.push(command);
            out.extend(record);
            site += 1;
        }
        *commands = out;
    }
}

/// Where bytes are.
#[derive(Clone, Copy)]
enum ByteLocation {
    /// In an arena that has one slot.
    Arena(Arena),
    /// In a slot of this stash.
    Stash(usize),
}

/// Bytes `from..to` that a command touches, of an arena or of a slot of a stash.
struct Range {
    place: ByteLocation,
    from: u64,
    to: u64,
    writes: bool,
}

/// The bytes that each command of a program touches.
struct CommandAccesses {
    /// Per body, the number of its first command.
    first: Vec<CommandIndex>,
    commands: Vec<(usize, Vec<Range>)>,
}

impl CommandAccesses {
    fn new(mesh: &Mesh, kernels: &[Kernel], program: &Program) -> CommandAccesses {
        let range = |touch: &MemoryEffect| {
            let b = &program.buffers[touch.buffer.index()];
            let (place, begin) = match (b.arena, program.stash(b)) {
                (_, Some((k, begin))) => (ByteLocation::Stash(k), begin),
                (arena, None) => (ByteLocation::Arena(arena), 0),
            };
            let [from, to] = [touch.from, touch.to].map(|element| b.offset + element * b.dtype.bytes() - begin);
            Range { place, from, to, writes: touch.writes }
        };
        let (mut first, mut commands) = (vec![], vec![]);
        for body in &program.bodies {
            first.push(commands.len() as CommandIndex);
            let touched = |c: &Command| memory_effects(mesh, kernels, program, c).iter().map(range).collect();
            commands.extend(body.commands.iter().map(|c| (c.stream as usize, touched(c))));
        }
        CommandAccesses { first, commands }
    }
}

/// Memory, divided into cells: each key is the first byte of a cell, which ends at the next key. A write joins all
/// cells that it covers, so their number follows from the last writes, not from all buffers that are ever placed
/// there.
struct Cells(BTreeMap<u64, LastAccesses>);

impl Cells {
    fn new() -> Cells {
        Cells([(0, LastAccesses::default())].into())
    }

    /// Visits the cells of some bytes, cut at both ends. Returns how many they are.
    fn each(&mut self, bytes: &std::ops::Range<u64>, mut visit: impl FnMut(&mut LastAccesses)) -> usize {
        // Usually cells already begin and end at both bounds. Then one descent of the tree finds all, from the last
        // to the first.
        let (mut begins, mut ends) = (false, false);
        for (begin, _) in self.0.range(..=bytes.end).rev() {
            ends |= *begin == bytes.end;
            begins = *begin == bytes.start;
            if *begin <= bytes.start {
                break;
            }
        }
        for at in [bytes.start, bytes.end].into_iter().zip([begins, ends]).filter_map(|(at, is_there)| (!is_there).then_some(at)) {
            let (_, cell) = self.0.range(..=at).next_back().expect("invariant: the first cell begins at 0");
            let cell = *cell;
            self.0.insert(at, cell);
        }
        let mut count = 0;
        for (_, cell) in self.0.range_mut(bytes.clone()) {
            visit(cell);
            count += 1;
        }
        count
    }

    /// Makes one cell of bytes that consist of this many whole cells.
    fn join(&mut self, bytes: &std::ops::Range<u64>, cells: usize, cell: LastAccesses) {
        while cells > 1
            && let Some((begin, _)) = self.0.range(bytes.start + 1..bytes.end).next()
        {
            let begin = *begin;
            self.0.remove(&begin);
        }
        self.0.insert(bytes.start, cell);
    }
}

/// Replays the order of issue of one stage.
struct IssueReplay<'a> {
    program: &'a Program,
    sites: &'a CommandAccesses,
    /// Per stash: the number of slots, the bytes of a slot, and the first byte of slot 0 among those of temporary
    /// buffers.
    slots: Vec<(u64, u64, u64)>,
    /// The first byte of each arena.
    arenas: [u64; Arena::ALL.len()],
    /// Per command, the commands whose events it waits for.
    needed: &'a mut Vec<BTreeSet<CommandIndex>>,
    clocks: [Clock; STREAMS],
    /// Per command, its stream's clock when it was last done.
    done: Vec<Clock>,
    cells: Cells,
}

/// The calls of a phase without most calls of bodies that are called very often: a body's first and last calls show
/// the hazards of the others. (The verifier looks at all calls.)
fn ends(calls: &[Call], slots: usize) -> Vec<Call> {
    let most = 2 * slots + 16;
    let count = counts(calls);
    let mut seen: BTreeMap<BodyId, usize> = BTreeMap::new();
    let is_end = |call: &&Call| {
        let k = seen.entry(call.body).or_default();
        *k += usize::from(call.part == 0);
        *k <= most || *k + most > count[&call.body]
    };
    calls.iter().filter(is_end).copied().collect()
}

impl<'a> IssueReplay<'a> {
    fn new(
        program: &'a Program,
        sites: &'a CommandAccesses,
        schedule: &CallSchedule,
        needed: &'a mut Vec<BTreeSet<CommandIndex>>,
    ) -> IssueReplay<'a> {
        let mut end = 0;
        let arenas = schedule.arena_bytes(program).map(|bytes| {
            end += bytes;
            end - bytes
        });
        let stash = |(stash, s): (&Stash, &Slots)| {
            (u64::from(s.count), stash.bytes, arenas[ir::fault!("events.stash.space", Space::Device, stash.space).temporary() as usize] + s.at)
        };
        let slots = program.stashes.iter().zip(&schedule.slots).map(stash).collect();
        let done = vec![[0; STREAMS]; sites.commands.len()];
        IssueReplay { program, sites, slots, arenas, needed, clocks: [[0; STREAMS]; STREAMS], done, cells: Cells::new() }
    }

    /// Replays steps, with and without their updates, and evaluations, so that each kind follows each other kind.
    fn play(&mut self, schedule: &CallSchedule, middle: MiddleFinder) {
        let slots: Vec<u64> = self.slots.iter().map(|s| s.0).collect();
        let most = slots.iter().max().map_or(1, |n| *n as usize);
        let phases = [&schedule.train, &schedule.update, &schedule.eval].map(|calls| ends(calls, most));
        let middles = phases.each_ref().map(|calls| middle(calls, &slots));
        let mut left: [Option<PhaseState>; 3] = Default::default();
        let [train, update, eval] = [0, 1, 2];
        for k in [train, update, train, update, eval, eval, train, train, eval, train, update, train, update] {
            let (calls, middle, begin) = (&phases[k], &middles[k], self.now());
            calls[..middle.start].iter().for_each(|call| self.call(call));
            match &left[k] {
                Some(left) => self.leave(left, &begin),
                None => calls[middle.clone()].iter().for_each(|call| self.call(call)),
            }
            if left[k].is_none() && !middle.is_empty() {
                left[k] = Some(self.left(&begin));
            }
            calls[middle.end..].iter().for_each(|call| self.call(call));
        }
    }

    fn call(&mut self, call: &Call) {
        let first = self.sites.first[call.body.index()];
        let part = self.program.bodies[call.body.index()].part(call.part);
        part.for_each(|k| self.command(first + k as CommandIndex, u64::from(call.microbatch)));
    }

    fn command(&mut self, site: CommandIndex, microbatch: u64) {
        let (s, touches) = &self.sites.commands[site as usize];
        let s = *s;
        let touches = touches.iter().map(|t| (self.bytes(t, microbatch), t.writes, 0));
        let mut touches: SmallVec<[(std::ops::Range<u64>, bool, usize); 8]> = touches.filter(|(bytes, ..)| !bytes.is_empty()).collect();
        for other in &self.needed[site as usize] {
            join(&mut self.clocks[s], &self.done[*other as usize]);
        }
        // `after` holds, per stream, the latest command that this one has to come after.
        let mut after: [Issued; STREAMS] = [(0, 0); STREAMS];
        self.clocks[s][s] += 1;
        let now = self.clocks[s][s];
        for (bytes, writes, count) in &mut touches {
            *count = self.cells.each(bytes, |cell| {
                let last = &mut after[cell.writer as usize];
                *last = cell.written.max(*last);
                if *writes {
                    let reads = cell.read.iter().take(ir::fault!("events.waits.reads", 0, STREAMS));
                    reads.zip(&mut after).for_each(|(read, last)| *last = (*read).max(*last));
                } else {
                    cell.read[s] = (now, site);
                }
            });
        }
        // A stream runs its own commands in order, so no wait is needed.
        after[s] = (0, 0);
        let missing: SmallVec<[(usize, u32, CommandIndex); STREAMS]> =
            after.iter().enumerate().filter(|(_, a)| a.0 > 0).map(|(t, (moment, site))| (t, *moment, *site)).collect();
        // Waits that imply most of the others come first. A wait is for the last issue of its command, which may be
        // later than the missing moment. So two waits can imply each other, and one is left out only if the waits
        // chosen before it imply it.
        let implies = |b: CommandIndex| missing.iter().filter(|(t, moment, _)| self.done[b as usize][*t] >= *moment).count();
        let mut waits: SmallVec<[(usize, usize, u32, CommandIndex); STREAMS]> =
            missing.iter().map(|(t, moment, site)| (implies(*site), *t, *moment, *site)).collect();
        waits.sort_unstable_by_key(|w| std::cmp::Reverse(*w));
        for (_, t, moment, other) in waits {
            if ir::fault!("events.waits.none", false, self.clocks[s][t] < moment) {
                self.needed[site as usize].insert(other);
                join(&mut self.clocks[s], &self.done[other as usize]);
            }
        }
        self.done[site as usize] = self.clocks[s];
        for (bytes, _, count) in touches.iter().filter(|(_, writes, _)| *writes) {
            // If another operand begins or ends within these bytes, their cells were cut once more.
            let is_cut = touches.iter().any(|(other, ..)| [other.start, other.end].iter().any(|at| bytes.start < *at && *at < bytes.end));
            self.cells.join(bytes, count + usize::from(is_cut), LastAccesses { written: (now, site), writer: s as u8, ..LastAccesses::default() });
        }
    }

    /// The bytes that a call touches for a microbatch.
    fn bytes(&self, touch: &Range, microbatch: u64) -> std::ops::Range<u64> {
        let first = match touch.place {
            ByteLocation::Arena(arena) => self.arenas[arena as usize],
            ByteLocation::Stash(k) => {
                let (slots, bytes, first) = self.slots[k];
                first + microbatch % ir::fault!("events.slots.one", 1, slots) * bytes
            }
        };
        first + touch.from..first + touch.to
    }
}

fn join(clock: &mut Clock, other: &Clock) {
    clock.iter_mut().zip(other).for_each(|(mine, theirs)| *mine = (*mine).max(*theirs));
}

#[cfg(test)]
mod tests;
