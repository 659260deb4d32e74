//! The order in which a body issues its commands: what communication needs comes first, what needs its result comes late.
//!
//! Commands are listed one by one (list scheduling, Graham 1966) on a nominal machine
//! ([`crate::commands::cost_model`]) whose streams run side by side. Communication, and copies between memories, are
//! issued as soon as their operands are, what comes back from the host ([`crate::commands::prefetch`]) no
//! sooner than where it stands. Of the other commands that could follow, those that wait for nothing under way come
//! first; of these, those on the way to the next communication; else the order is that of the graph.
//!
//! The order is the program's, hence the same on all ranks of a stage. Exchanges with other stages keep their order among themselves, so
//! they meet as before.
//!
//! Commands move away from those that used the same values, which makes values live longer. So a command overtakes no
//! more than a *window* of others, the widest with which the body's temporary memory stays below a bound. Where
//! memory matters more than time ([`MemoryOrder::Memory`]), it is the window with the least, or an order that looks
//! at bytes alone ([`frugal`]).

mod frugal;

use crate::commands::best_fit::{ALIGN, most_alive};
use crate::commands::cost_model::CostModel;
use crate::commands::effects::{MemoryEffect, memory_effects};
use crate::commands::liveness::{SingleSlotBuffers, temporaries};
use crate::commands::spills::returns;
use frugal::SharedBuffers;
use ir::kernel::Kernel;
use ir::mesh::Mesh;
use ir::options::MemoryOrder;
use ir::program::{Action, BufferId, CallSchedule, Command, Job, Program, Space, Stream};
use std::collections::{BTreeMap, BTreeSet};

/// Of the memory of a rank's device with a slot for each stashed buffer, and of the host, how much more temporary
/// memory a new order may cost: a 32nd.
pub const PRICE: u64 = 32;

/// Puts the commands of all programs in the order of their issue.
pub fn schedule(mut job: Job, how: MemoryOrder) -> Job {
    let Job { mesh, kernels, programs, stages, .. } = &mut job;
    let costs = CostModel::new(mesh, kernels);
    for (p, program) in programs.iter_mut().enumerate() {
        let schedules: Vec<&CallSchedule> = stages.iter().filter(|s| s.program as usize == p).map(|s| &s.schedule).collect();
        if let Some(first) = schedules.first() {
            let kept = (how == MemoryOrder::Memory).then(|| SingleSlotBuffers::of(program, &schedules));
            issue(mesh, kernels, &costs, program, kept.as_ref(), first);
        }
    }
    job
}

/// Puts the commands of every body in the order of their issue, bodies in that of their last calls: one for memory
/// where it is said what is kept for one microbatch at a time.
fn issue(mesh: &Mesh, kernels: &[Kernel], costs: &CostModel, program: &mut Program, kept: Option<&SingleSlotBuffers>, schedule: &CallSchedule) {
    let alive = |space: Space, program: &Program, commands: &[Command]| most_alive(&temporaries(space.temporary(), program, commands).1);
    let lasting = |space: Space| {
        let own = program.buffers.iter().filter(|b| b.arena.space() == Some(space) && !b.arena.is_temporary());
        own.map(|b| b.bytes().next_multiple_of(ALIGN)).fold(0, u64::saturating_add)
    };
    let lists = [&schedule.train, &schedule.update, &schedule.eval];
    // There is one bound per list of calls, as these use the same memory one after the other.
    let bounds = lists.map(|calls| {
        Space::ALL.map(|space| {
            let called: BTreeSet<usize> = calls.iter().map(|c| c.body.index()).collect();
            let most = called.iter().map(|b| alive(space, program, &program.bodies[*b].commands)).max().unwrap_or(0);
            let more = lasting(space).saturating_add(most) / PRICE;
            match space {
                Space::Device => most.saturating_add(more),
                // While one piece is worked on, the next one is read and the last one is written.
                Space::Host => most.saturating_mul(3).saturating_add(more),
            }
        })
    });
    let calls = || lists.into_iter().flatten();
    let mut bodies: Vec<usize> = (0..program.bodies.len()).collect();
    bodies.sort_by_key(|b| calls().enumerate().filter(|(_, c)| c.body.index() == *b).map(|(at, _)| at).last());
    let (mut written, mut count): (BTreeMap<BufferId, usize>, usize) = (BTreeMap::new(), 0);
    for b in bodies {
        let commands = &program.bodies[b].commands;
        let of_lists = lists.iter().zip(&bounds).filter(|(calls, _)| calls.iter().any(|c| c.body.index() == b)).map(|(_, bounds)| bounds);
        let fits =
            |c: &[Command]| Space::ALL.into_iter().all(|space| of_lists.clone().all(|bounds| alive(space, program, c) <= bounds[space as usize]));
        let serial = commands.iter().all(|c| c.stream == Stream::Compute);
        let graph = (kept.is_some() || !serial).then(|| Graph::new(mesh, kernels, costs, program, commands, &written));
        // Where all commands are on the compute stream, windows would change nothing.
        let windows = graph.iter().filter(|_| !serial).flat_map(|graph| WINDOWS.iter().map(|window| graph.listed(*window, commands)));
        let commands = match (&graph, kept) {
            (Some(graph), Some(kept)) => {
                let touched = touched(program, kept, b, commands);
                let by_bytes = [frugal::order(&graph.users, &touched), frugal::order_backward(&graph.users, &touched)];
                let orders = windows.chain([commands.clone()]).chain(by_bytes.map(|order| put(&order, commands)));
                let in_use = |c: &Vec<Command>| {
                    let mut needs = temporaries(Space::Device.temporary(), program, c).1;
                    needs.extend(kept.needs(program, b, c));
                    (most_alive(&needs), alive(Space::Host, program, c))
                };
                orders.min_by_key(in_use).expect("invariant: it is not empty")
            }
            _ => windows.into_iter().find(|c| fits(c)).unwrap_or_else(|| commands.clone()),
        };
        for touch in commands.iter().flat_map(|c| memory_effects(mesh, kernels, program, c)).filter(|t| t.writes) {
            count += 1;
            written.insert(touch.buffer, count);
        }
        program.bodies[b].commands = commands;
    }
}

/// Windows that are tried; the last one keeps every command in its place.
const WINDOWS: [usize; 6] = [usize::MAX, 256, 64, 16, 4, 0];

/// The buffers of shared device memory that each command touches.
fn touched(program: &Program, kept: &SingleSlotBuffers, body: usize, commands: &[Command]) -> SharedBuffers {
    let mut numbers: BTreeMap<BufferId, usize> = BTreeMap::new();
    let mut of = vec![];
    for command in commands {
        let shared = |id: &BufferId| program.buffers[id.index()].arena == Space::Device.temporary() || kept.singly.contains(id);
        let ids: BTreeSet<BufferId> = command.buffers().into_iter().filter(shared).collect();
        let mut number = |id: BufferId| {
            let next = numbers.len();
            *numbers.entry(id).or_insert(next)
        };
        of.push(ids.into_iter().map(&mut number).collect());
    }
    let mut ids: Vec<(usize, BufferId)> = numbers.into_iter().map(|(id, k)| (k, id)).collect();
    ids.sort_unstable();
    let (before, behind) = ids.iter().map(|(_, id)| kept.passes(body, *id)).unzip();
    SharedBuffers { bytes: ids.iter().map(|(_, id)| program.buffers[id.index()].bytes()).collect(), of, before, behind }
}

/// The commands in this order.
fn put(order: &[usize], commands: &[Command]) -> Vec<Command> {
    order.iter().map(|k| commands[*k].clone()).collect()
}

/// Whether a stream has kernels, of the device or of the host.
fn computes(stream: Stream) -> bool {
    match stream {
        Stream::Compute | Stream::Host => true,
        Stream::Tensor | Stream::Data | Stream::Send | Stream::Receive => false,
        Stream::ToHost | Stream::ToDevice | Stream::ToDisk | Stream::FromDisk => false,
    }
}

/// Which commands are copies to or from the host of values that wait or rest there. No command is moved ahead for
/// them, as they come in time.
fn spills(program: &Program, commands: &[Command], returns: &[bool]) -> Vec<bool> {
    let leaves = |a: &Action| matches!(a, Action::Copy { dst, .. } if program.buffers[dst.buffer.index()].arena == Space::Host.stash());
    commands.iter().zip(returns).map(|(c, returns)| *returns || leaves(&c.action)).collect()
}

/// Commands and what they need of each other.
pub struct Graph {
    /// Stream of each command, by its place in the body.
    pub streams: Vec<Stream>,
    /// Nominal femtoseconds of each command, by its place in the body.
    pub times: Vec<u64>,
    needs: Vec<usize>,
    /// For each command, the later ones that must be issued after it.
    pub users: Vec<BTreeSet<usize>>,
    /// The first communication that follows from a command.
    leads: Vec<usize>,
    /// Per command, when earlier bodies last wrote a buffer that it touches; 0 if none did.
    since: Vec<usize>,
}

impl Graph {
    /// `written` says in which order earlier bodies last wrote buffers: messages go in that order, so that none waits
    /// for one that is ready later.
    pub fn new(
        mesh: &Mesh,
        kernels: &[Kernel],
        costs: &CostModel,
        program: &Program,
        commands: &[Command],
        written: &BTreeMap<BufferId, usize>,
    ) -> Graph {
        let streams: Vec<Stream> = commands.iter().map(|c| c.stream).collect();
        let returns = returns(program, commands);
        let spills = spills(program, commands, &returns);
        let mut since = vec![0; commands.len()];
        let mut users: Vec<BTreeSet<usize>> = vec![BTreeSet::new(); commands.len()];
        let mut before: BTreeMap<BufferId, Vec<(usize, MemoryEffect)>> = BTreeMap::new();
        // These are the last exchanges with other stages (a sum, a send, a receive), and the last kernel.
        let [mut sum, mut send, mut receive, mut kernel] = [None; 4];
        for (k, command) in commands.iter().enumerate() {
            for touch in memory_effects(mesh, kernels, program, command) {
                // A copy takes a complete buffer, so copies keep the order of the graph.
                if !matches!(command.action, Action::Copy { .. }) {
                    since[k] = written.get(&touch.buffer).copied().unwrap_or(0).max(since[k]);
                }
                let before = before.entry(touch.buffer).or_default();
                let meets = |t: &MemoryEffect| {
                    t.from < touch.to && touch.from < t.to && ir::fault!("list_schedule.hazard.reads", touch.writes, t.writes || touch.writes)
                };
                before.iter().filter(|(j, t)| *j != k && meets(t)).for_each(|(j, _)| {
                    users[*j].insert(k);
                });
                // Commands after a write also come after all commands that the write came after.
                if touch.writes {
                    before.retain(|(j, t)| *j == k || t.from < touch.from || touch.to < t.to);
                }
                before.push((k, touch));
            }
            let mut after = |last: Option<usize>| {
                if let Some(j) = last {
                    users[j].insert(k);
                }
            };
            match &command.action {
                Action::Collective { group, .. } if program.groups[group.index()].stages.is_some() => {
                    after(ir::fault!("list_schedule.sums.order", None, sum.replace(k)))
                }
                Action::Send { .. } => after(send.replace(k)),
                // A receive may not come before a send on which its own message may depend.
                Action::Recv { .. } => {
                    after(receive.replace(k));
                    after(send);
                }
                // A value from the host comes back where its own pass put the copy, and takes no memory before.
                Action::Copy { .. } if returns[k] => after(ir::fault!("list_schedule.spill.soon", None, kernel)),
                Action::Launch { .. } => kernel = Some(k),
                Action::Collective { .. }
                | Action::Copy { .. }
                | Action::Fill { .. }
                | Action::Load { .. }
                | Action::Report { .. }
                | Action::Limit { .. }
                | Action::Record { .. }
                | Action::Wait { .. } => {}
            }
        }
        let mut needs = vec![0; commands.len()];
        users.iter().flatten().for_each(|k| needs[*k] += 1);
        let mut leads = vec![usize::MAX; commands.len()];
        for k in (0..commands.len()).rev() {
            let first = |j: &usize| if computes(streams[*j]) || spills[*j] { leads[*j] } else { *j };
            leads[k] = users[k].iter().map(first).min().unwrap_or(usize::MAX);
        }
        Graph { streams, times: commands.iter().map(|c| costs.time(program, &c.action)).collect(), needs, users, leads, since }
    }

    fn listed(&self, window: usize, commands: &[Command]) -> Vec<Command> {
        put(&self.list(window), commands)
    }

    /// An order in which no command overtakes one that is `window` places or more before it.
    fn list(&self, window: usize) -> Vec<usize> {
        let n = self.needs.len();
        let mut needs = self.needs.clone();
        let mut clocks = [0u64; Stream::ALL.len()];
        let mut ready_at = vec![0u64; n];
        let mut out = Vec::with_capacity(n);
        let mut done = vec![false; n];
        // Commands whose operands are issued: `ready` holds those too far ahead, `messages` communication, and
        // `waiting` and `due` the kernels of each stream that wait for something under way and those that do not.
        let mut ready: BTreeSet<usize> = (0..n).filter(|k| needs[*k] == 0).collect();
        let mut messages: BTreeSet<(usize, usize)> = BTreeSet::new();
        let mut waiting: [BTreeSet<(u64, usize, usize)>; Stream::ALL.len()] = Default::default();
        let mut due = waiting.clone();
        let mut front = 0;
        while out.len() < n {
            while done[front] {
                front += 1;
            }
            let reach = front.saturating_add(window);
            while let Some(k) = ready.first().copied().filter(|k| *k <= reach) {
                ready.remove(&k);
                if computes(self.streams[k]) {
                    waiting[self.streams[k] as usize].insert((ready_at[k], self.leads[k], k));
                } else {
                    messages.insert((self.since[k], k));
                }
            }
            for (stream, clock) in clocks.iter().enumerate() {
                while let Some(first) = waiting[stream].first().copied().filter(|w| w.0 <= *clock) {
                    waiting[stream].remove(&first);
                    due[stream].insert((0, first.1, first.2));
                }
            }
            let k = match messages.pop_first() {
                Some((_, k)) => k,
                None => {
                    let first = |stream: usize| {
                        let soon = waiting[stream].first().map(|(at, leads, k)| (at - clocks[stream], *leads, *k));
                        due[stream].first().copied().or(soon)
                    };
                    let (_, _, k) = (0..Stream::ALL.len()).filter_map(first).min().expect("invariant: what is left first needs nothing");
                    let stream = self.streams[k] as usize;
                    due[stream].remove(&(0, self.leads[k], k));
                    waiting[stream].remove(&(ready_at[k], self.leads[k], k));
                    k
                }
            };
            done[k] = true;
            out.push(k);
            let clock = &mut clocks[self.streams[k] as usize];
            *clock = (*clock).max(ready_at[k]).saturating_add(self.times[k]);
            for user in &self.users[k] {
                ready_at[*user] = ready_at[*user].max(*clock);
                needs[*user] -= 1;
                if needs[*user] == 0 {
                    ready.insert(*user);
                }
            }
        }
        out
    }
}
