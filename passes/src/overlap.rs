//! Streams, and the events between them: communication leaves the compute stream and waits only for what it needs.
//!
//! Commands keep their order of issue, which is the same on all members of a group. A collective's stream follows from its group
//! alone, so members agree on it too. Events follow from hazards: where a command touches bytes that an earlier command of another
//! stream touched, one of them writing, and nothing orders the two yet, that command is recorded and this one waits. The order of issue is
//! played for that with vector clocks, call by call; a wait that another one implies is left out.

use crate::lower::buffers_of;
use crate::memory::{self, Need};
use ir::kernel::Kernel;
use ir::mesh::{Axis, Mesh};
use ir::program::{Action, Arena, Body, BodyId, BufferId, Call, CallSchedule, Command, Group, Job, Program, Stream};
use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Overlap {
    /// All commands on one stream.
    Off,
    #[default]
    On,
}

/// Puts communication of all programs on its streams, and events where they need each other.
pub fn overlap(mut job: Job) -> Job {
    let Job { mesh, kernels, programs, stages, .. } = &mut job;
    for (p, program) in programs.iter_mut().enumerate() {
        for body in &mut program.bodies {
            for command in &mut body.commands {
                command.stream = stream(mesh, &program.groups, &command.action);
            }
        }
        place_temporaries(program);
        let mut schedules: Vec<&CallSchedule> = vec![];
        for stage in stages.iter().filter(|s| s.program as usize == p) {
            if !schedules.contains(&&stage.schedule) {
                schedules.push(&stage.schedule);
            }
        }
        synchronise(program, kernels, &schedules);
    }
    job
}

/// The stream of a command.
fn stream(mesh: &Mesh, groups: &[Group], action: &Action) -> Stream {
    match action {
        Action::Collective { group, .. } => {
            let Group { subs, stages } = &groups[group.index()];
            let data = subs.iter().any(|u| mesh[*u].axis == Axis::Dp && mesh[*u].role == Axis::Edp);
            if data || stages.as_ref().is_some_and(|s| s.len() > 1) { Stream::Data } else { Stream::Tensor }
        }
        Action::Send { .. } => Stream::Send,
        Action::Recv { .. } => Stream::Receive,
        Action::Launch { .. } | Action::Fill { .. } | Action::Load { .. } | Action::Report { .. } | Action::Record { .. } | Action::Wait { .. } => {
            Stream::Compute
        }
    }
}

/// The buffers that a command touches, and whether it writes.
fn touches<'a>(kernels: &'a [Kernel], action: &'a Action) -> Vec<(BufferId, bool)> {
    match action {
        Action::Launch { kernel, args, .. } => {
            let inputs = kernels[kernel.index()].inputs.len();
            args.iter().enumerate().map(|(k, place)| (place.buffer, k >= inputs)).collect()
        }
        Action::Collective { src, dst, .. } => vec![(src.buffer, false), (dst.buffer, true)],
        Action::Send { src, .. } | Action::Report { src, .. } => vec![(src.buffer, false)],
        Action::Recv { dst, .. } => vec![(dst.buffer, true)],
        Action::Fill { buffer, .. } => vec![(*buffer, true)],
        Action::Load { dst, .. } => vec![(*dst, true)],
        Action::Record { .. } | Action::Wait { .. } => vec![],
    }
}

/// Plans temporary memory anew: what communication reads stays until the compute stream waits for that, at the first use of
/// the result at the latest, or else to the end of the call. So nobody waits for memory alone.
fn place_temporaries(program: &mut Program) {
    let mut most = 0;
    for body in &program.bodies {
        let temporary = |id: &BufferId| program.buffers[id.index()].arena == Arena::Temporary;
        let mut lives: BTreeMap<BufferId, (usize, usize)> = BTreeMap::new();
        for (k, c) in body.commands.iter().enumerate() {
            for id in buffers_of(&c.action).into_iter().filter(temporary) {
                lives.entry(id).or_insert((k, k)).1 = k;
            }
        }
        for (k, c) in body.commands.iter().enumerate() {
            let (from, result) = match &c.action {
                Action::Collective { src, dst, .. } => (src.buffer, Some(dst.buffer)),
                Action::Send { src, .. } => (src.buffer, None),
                Action::Launch { .. }
                | Action::Recv { .. }
                | Action::Fill { .. }
                | Action::Load { .. }
                | Action::Report { .. }
                | Action::Record { .. }
                | Action::Wait { .. } => continue,
            };
            let used = |c: &Command| c.stream == Stream::Compute && result.is_some_and(|r| buffers_of(&c.action).contains(&r));
            let end = (k + 1..body.commands.len()).find(|j| used(&body.commands[*j])).unwrap_or(body.commands.len());
            if let Some(life) = lives.get_mut(&from) {
                life.1 = life.1.max(end);
            }
        }
        let needs: Vec<Need> =
            lives.iter().map(|(id, (first, last))| Need { bytes: program.buffers[id.index()].bytes(), first: *first, last: *last }).collect();
        let (offsets, total) = memory::assign(&needs);
        for (id, offset) in lives.keys().zip(offsets) {
            program.buffers[id.index()].offset = offset;
        }
        most = most.max(total);
    }
    program.arena_bytes[Arena::Temporary as usize] = most;
}

const STREAMS: usize = Stream::ALL.len();

/// Per stream, how many of its commands are known to be done.
type Clock = [u32; STREAMS];

/// A command of the program: a number over all bodies.
type Site = usize;

/// What is in flight on some bytes.
#[derive(Clone, Copy, Default)]
struct Cell {
    /// Stream, moment and command of the last write, if any.
    written: Option<(usize, u32, Site)>,
    /// Per stream, moment and command of the last read since.
    read: [Option<(u32, Site)>; STREAMS],
}

/// Records and waits that the hazards of these schedules ask for.
fn synchronise(program: &mut Program, kernels: &[Kernel], schedules: &[&CallSchedule]) {
    let mut needed: Vec<BTreeSet<Site>> = vec![BTreeSet::new(); program.bodies.iter().map(|b| b.commands.len()).sum()];
    let used: BTreeSet<Stream> = program.bodies.iter().flat_map(|b| &b.commands).map(|c| c.stream).collect();
    if used.len() < 2 {
        return;
    }
    let cells = Cells::new(program, kernels);
    for schedule in schedules {
        Player::new(&cells, &schedule.slots, &mut needed).play(schedule);
    }
    let recorded: BTreeSet<Site> = needed.iter().flatten().copied().collect();
    let events: BTreeMap<Site, u32> = recorded.iter().enumerate().map(|(k, site)| (*site, k as u32)).collect();
    let mut site = 0;
    for Body { commands, .. } in &mut program.bodies {
        let mut out = Vec::with_capacity(commands.len());
        for command in std::mem::take(commands) {
            let with = |action| Command { stream: command.stream, action, origin: command.origin.clone(), reason: None };
            out.extend(needed[site].iter().map(|s| with(Action::Wait { event: events[s] })));
            let record = events.get(&site).map(|e| with(Action::Record { event: *e }));
            out.push(command);
            out.extend(record);
            site += 1;
        }
        *commands = out;
    }
}

/// Where cells are.
#[derive(Clone, Copy)]
enum Home {
    Persistent,
    /// In a slot of this stash.
    Stash(usize),
    Temporary,
}

/// Cells `from..to` that a command touches, of an arena or of a slot of a stash.
struct Touch {
    place: Home,
    from: usize,
    to: usize,
    writes: bool,
}

/// The bytes of a program, cut where a buffer begins or ends, and what commands do to them.
struct Cells {
    /// Per body, the number of its first command.
    first: Vec<Site>,
    commands: Vec<(usize, Vec<Touch>)>,
    persistent: usize,
    /// Of a slot of each stash.
    stashes: Vec<usize>,
    temporary: usize,
}

impl Cells {
    fn new(program: &Program, kernels: &[Kernel]) -> Cells {
        let mut cuts: [Vec<u64>; 3] = Default::default();
        for b in &program.buffers {
            cuts[b.arena as usize].extend([b.offset, b.offset + b.bytes()]);
        }
        for list in &mut cuts {
            list.sort_unstable();
            list.dedup();
        }
        let touch = |(id, writes): (BufferId, bool)| {
            let b = &program.buffers[id.index()];
            let cell = |byte: u64| cuts[b.arena as usize].partition_point(|c| *c < byte);
            let (place, begin) = match (b.arena, program.stash(b)) {
                (Arena::Persistent, _) => (Home::Persistent, 0),
                (Arena::Stash, stash) => {
                    let (k, begin) = stash.expect("invariant: a buffer of the stash arena is in a stash");
                    (Home::Stash(k), cell(begin))
                }
                (Arena::Temporary, _) => (Home::Temporary, 0),
            };
            Touch { place, from: cell(b.offset) - begin, to: cell(b.offset + b.bytes()) - begin, writes }
        };
        let mut end = 0;
        let of_stash = |bytes: &u64| {
            let begin = end;
            end += bytes;
            let cell = |byte: u64| cuts[Arena::Stash as usize].partition_point(|c| *c < byte);
            cell(end) - cell(begin)
        };
        let stashes = program.stashes.iter().map(of_stash).collect();
        let mut first = vec![];
        let mut commands = vec![];
        for body in &program.bodies {
            first.push(commands.len());
            commands.extend(body.commands.iter().map(|c| (c.stream as usize, touches(kernels, &c.action).into_iter().map(touch).collect())));
        }
        let [persistent, _, temporary] = cuts.map(|c| c.len());
        Cells { first, commands, persistent, stashes, temporary }
    }
}

/// Plays the order of issue of one stage.
struct Player<'a> {
    program: &'a Cells,
    /// Slots of each stash, and the first cell of its first slot.
    slots: Vec<(usize, usize)>,
    /// The first cell of the temporary arena.
    temporary: usize,
    /// Per command, those whose events it waits for.
    needed: &'a mut Vec<BTreeSet<Site>>,
    clocks: [Clock; STREAMS],
    /// Per command, its stream's clock when it was last done.
    done: Vec<Clock>,
    cells: Vec<Cell>,
}

/// Calls of a phase without most of those of bodies that are called over and over: first and last ones of a body show what the
/// others do. (The verifier looks at all calls.)
fn ends(calls: &[Call], slots: usize) -> Vec<Call> {
    let most = 2 * slots + 16;
    let mut count: BTreeMap<BodyId, usize> = BTreeMap::new();
    calls.iter().for_each(|c| *count.entry(c.body).or_default() += 1);
    let mut seen: BTreeMap<BodyId, usize> = BTreeMap::new();
    let is_end = |call: &&Call| {
        let k = seen.entry(call.body).or_default();
        *k += 1;
        *k <= most || *k + most > count[&call.body]
    };
    calls.iter().filter(is_end).copied().collect()
}

impl<'a> Player<'a> {
    fn new(program: &'a Cells, slots: &[u32], needed: &'a mut Vec<BTreeSet<Site>>) -> Player<'a> {
        let mut temporary = program.persistent;
        let of_stash = |(cells, slots): (&usize, &u32)| {
            let first = temporary;
            temporary += cells * *slots as usize;
            (*slots as usize, first)
        };
        let slots = program.stashes.iter().zip(slots).map(of_stash).collect();
        Player {
            program,
            slots,
            temporary,
            needed,
            clocks: [[0; STREAMS]; STREAMS],
            done: vec![[0; STREAMS]; program.commands.len()],
            cells: vec![Cell::default(); temporary + program.temporary],
        }
    }

    /// Steps, with and without their updates, and evaluations, each after each.
    fn play(&mut self, schedule: &CallSchedule) {
        let slots = self.slots.iter().map(|s| s.0).max().unwrap_or(1);
        let [train, update, eval] = [&schedule.train, &schedule.update, &schedule.eval].map(|calls| ends(calls, slots));
        for phase in [&train, &update, &train, &update, &eval, &eval, &train, &train, &eval, &train, &update, &train, &update] {
            phase.iter().for_each(|call| self.call(call));
        }
    }

    fn call(&mut self, call: &Call) {
        let first = self.program.first[call.body.index()];
        let end = self.program.first.get(call.body.index() + 1).copied().unwrap_or(self.program.commands.len());
        (first..end).for_each(|site| self.command(site, call.microbatch as usize));
    }

    fn command(&mut self, site: Site, microbatch: usize) {
        let program = self.program;
        let (s, touches) = &program.commands[site];
        let s = *s;
        for other in &self.needed[site] {
            join(&mut self.clocks[s], &self.done[*other]);
        }
        // Per stream, the latest command that this one has to come after.
        let mut after: [Option<(u32, Site)>; STREAMS] = [None; STREAMS];
        let mut hazard = |t: usize, moment: u32, site: Site| {
            if t != s {
                after[t] = after[t].max(Some((moment, site)));
            }
        };
        for touch in touches {
            for cell in &self.cells[self.range(touch, microbatch)] {
                if let Some((t, moment, site)) = cell.written {
                    hazard(t, moment, site);
                }
                if touch.writes {
                    cell.read.iter().enumerate().for_each(|(t, read)| read.iter().for_each(|(moment, site)| hazard(t, *moment, *site)));
                }
            }
        }
        let missing: Vec<(usize, u32, Site)> = after.iter().enumerate().filter_map(|(t, a)| a.map(|(moment, site)| (t, moment, site))).collect();
        // Those which imply most of the others first. A wait is for the last time that its command was issued, which may be after the
        // moment that is missing: two can imply each other, so each is left out only for what is waited for by then.
        let implies = |b: Site| missing.iter().filter(|(t, moment, _)| self.done[b][*t] >= *moment).count();
        let mut waits: Vec<(usize, usize, u32, Site)> = missing.iter().map(|(t, moment, site)| (implies(*site), *t, *moment, *site)).collect();
        waits.sort_unstable_by_key(|w| std::cmp::Reverse(*w));
        for (_, t, moment, other) in waits {
            if self.clocks[s][t] < moment {
                self.needed[site].insert(other);
                join(&mut self.clocks[s], &self.done[other]);
            }
        }
        self.clocks[s][s] += 1;
        let now = self.clocks[s][s];
        self.done[site] = self.clocks[s];
        for touch in touches {
            let range = self.range(touch, microbatch);
            for cell in &mut self.cells[range] {
                if touch.writes {
                    *cell = Cell { written: Some((s, now, site)), ..Cell::default() };
                } else {
                    cell.read[s] = Some((now, site));
                }
            }
        }
    }

    /// The cells of a touch by a call for a microbatch.
    fn range(&self, touch: &Touch, microbatch: usize) -> std::ops::Range<usize> {
        let first = match touch.place {
            Home::Persistent => 0,
            Home::Stash(k) => self.slots[k].1 + microbatch % self.slots[k].0 * self.program.stashes[k],
            Home::Temporary => self.temporary,
        };
        first + touch.from..first + touch.to
    }
}

fn join(clock: &mut Clock, other: &Clock) {
    clock.iter_mut().zip(other).for_each(|(mine, theirs)| *mine = (*mine).max(*theirs));
}
