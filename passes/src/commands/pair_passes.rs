//! Forward and backward passes side by side: while one waits for its exchanges, the other computes.
//!
//! Within a pass over one microbatch, what follows an exchange mostly needs its result: the rows that experts get,
//! the whole of what tensor parallelism had split. A forward pass and the backward pass after it, of another
//! microbatch, need nothing of each other, so the exchanges of one are under way beside the compute of the other
//! (Megatron-LM's `--overlap-moe-expert-parallel-comm`; DualPipe of DeepSeek-V3). The schedule has them one after the
//! other, and both can begin when either can ([`PassOrder::pairs`]).
//!
//! Bodies stay as they are. Each is cut into parts, and the parts of the two are called in turn, in the order that
//! ends first on the nominal machine ([`crate::commands::cost_model`]). If none ends before the two do one after the
//! other, they stay so. Gradients of weights that have a pass of their own right after the backward pass belong to
//! it.

use crate::commands::cost_model::CostModel;
use crate::commands::list_schedule::Graph;
use ir::kernel::Kernel;
use ir::mesh::Mesh;
use ir::pipeline::{Pass, PassKind, PassOrder};
use ir::program::{BodyId, BodyKind, Call, Job, Program, Stream};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// Runs passes of all stages in the pairs that their order allows.
pub fn pair(mut job: Job, order: &PassOrder) -> Job {
    let Job { mesh, kernels, programs, stages, .. } = &mut job;
    let costs = CostModel::new(mesh, kernels);
    let pairs = order.pairs();
    // They are in pairs already.
    if programs.iter().flat_map(|p| &p.bodies).any(|b| b.parts() > 1) {
        return job;
    }
    for (p, program) in programs.iter_mut().enumerate() {
        let of_program = stages.iter_mut().zip(&pairs).filter(|(s, _)| s.program as usize == p);
        let mut lists: Vec<List> = of_program.map(|(s, pairs)| List { calls: &mut s.schedule.train, pairs }).collect();
        pair_calls(mesh, kernels, &costs, program, &mut lists);
    }
    // Messages of a pair may be under way together.
    job.in_flight = job.in_flight.max(verify::job::least_in_flight(&job));
    job
}

/// The calls of a stage's step, and the pairs of its passes.
struct List<'a> {
    calls: &'a mut Vec<Call>,
    pairs: &'a BTreeMap<Pass, Pass>,
}

/// Bodies of two lanes side by side: a forward pass, and a backward pass with what belongs to it.
type Pair = [Vec<BodyId>; 2];

/// Parts of bodies, in the order in which they are called.
type Turns = Vec<(BodyId, u32)>;

fn pair_calls(mesh: &Mesh, kernels: &[Kernel], costs: &CostModel, program: &mut Program, lists: &mut [List]) {
    let pairs: BTreeSet<Pair> = lists.iter().flat_map(|list| (0..list.calls.len()).filter_map(|at| list.pair_at(program, at))).collect();
    let bodies: BTreeSet<BodyId> = pairs.iter().flatten().flatten().copied().collect();
    let divided: BTreeMap<BodyId, Divided> = bodies.iter().map(|b| (*b, Divided::new(mesh, kernels, costs, program, *b))).collect();
    let mut turns: BTreeMap<Pair, Turns> = pairs.iter().filter_map(|pair| Some((pair.clone(), best(&divided, pair)?))).collect();
    // Cuts at which no pair goes over to its other lane are none.
    let mut switches: BTreeMap<BodyId, BTreeSet<u32>> = bodies.iter().map(|b| (*b, BTreeSet::new())).collect();
    for two in turns.values().flat_map(|turns| turns.windows(2)).filter(|two| two[0].0 != two[1].0) {
        let (body, part) = two[1];
        switches.entry(body).or_default().extend((part > 0).then_some(part));
    }
    for turns in turns.values_mut() {
        turns.retain(|(body, part)| *part == 0 || switches[body].contains(part));
        turns.iter_mut().for_each(|(body, part)| *part = switches[body].range(..=*part).count() as u32);
    }
    for (body, switches) in &switches {
        let begins = switches.iter().map(|part| divided[body].parts[*part as usize].begin as u32);
        program.bodies[body.index()].cuts = begins.map(|at| ir::fault!("pair_passes.cuts.begin", 0, at)).collect();
    }
    lists.iter_mut().for_each(|list| *list.calls = list.in_turns(program, &turns));
}

impl List<'_> {
    /// The pair that begins at a call, if one does.
    fn pair_at(&self, program: &Program, at: usize) -> Option<Pair> {
        let kind = |c: &Call| program.bodies[c.body.index()].kind;
        let [f, b, rest @ ..] = &self.calls[at..] else { return None };
        let (BodyKind::Forward(chunk), BodyKind::Backward(own)) = (kind(f), kind(b)) else { return None };
        let weight = rest.first().filter(|w| w.microbatch == b.microbatch && kind(w) == BodyKind::Weight(own));
        let pass = |kind: PassKind, chunk: u32, call: &Call| Pass { kind, chunk, microbatch: call.microbatch };
        // A stage may have nothing to compute in a pass, so others stand side by side here than in the order.
        let beside = self.pairs.get(&pass(PassKind::Forward, chunk, f)) == Some(&pass(PassKind::Backward, own, b));
        ir::fault!("pair_passes.pairs.all", true, beside).then(|| [vec![f.body], [b].into_iter().chain(weight).map(|c| c.body).collect()])
    }

    /// The calls, pairs of them part by part.
    fn in_turns(&self, program: &Program, turns: &BTreeMap<Pair, Turns>) -> Vec<Call> {
        let (mut out, mut at) = (vec![], 0);
        while let Some(call) = self.calls.get(at) {
            let pair = self.pair_at(program, at);
            let Some((pair, turns)) = pair.and_then(|pair| turns.get_key_value(&pair)) else {
                let parts = ir::fault!("pair_passes.alone.first", 1, program.bodies[call.body.index()].parts());
                out.extend((0..parts).map(|part| Call { part, ..*call }));
                at += 1;
                continue;
            };
            let backward = self.calls[at + 1].microbatch;
            let backward = ir::fault!("pair_passes.microbatch.same", call.microbatch, backward);
            let microbatch = |body: BodyId| if pair[0].contains(&body) { call.microbatch } else { backward };
            let turns = &turns[..ir::fault!("pair_passes.parts.lost", turns.len() - 1, turns.len())];
            out.extend(turns.iter().map(|(body, part)| Call { body: *body, microbatch: microbatch(*body), part: *part }));
            at += pair[0].len() + pair[1].len();
        }
        out
    }
}

/// A body, cut wherever it may be interrupted.
struct Divided {
    parts: Vec<Stretch>,
}

/// A part of a lane, on the nominal machine: what a bool may leave out is left out, as in most steps.
#[derive(Default)]
struct Stretch {
    /// The number of its first command.
    begin: usize,
    steps: Vec<PartStep>,
    /// Whose ends later parts wait for.
    awaited: Vec<Done>,
}

struct PartStep {
    stream: Stream,
    time: u64,
    /// What it comes after, on other streams.
    after: Vec<Done>,
}

/// Something that was begun before.
#[derive(Clone, Copy)]
enum Done {
    /// By a step of this part.
    Here(usize),
    /// By a part before, which said that it is awaited.
    Before(usize),
}

/// A body is cut at kernels that wait for exchanges, at those behind which an exchange is under way, and at all that
/// take more than so small a share of its kernels' time.
const SHARE: u64 = 64;

impl Divided {
    fn new(mesh: &Mesh, kernels: &[Kernel], costs: &CostModel, program: &Program, body: BodyId) -> Divided {
        let commands = &program.bodies[body.index()].commands;
        let Graph { streams, times, users, .. } = Graph::new(mesh, kernels, costs, program, commands, &BTreeMap::new());
        let runs = |k: usize| commands[k].predicate.is_none();
        let computes = |k: usize| streams[k] == Stream::Compute;
        // On each stream, the last command that one has to come after.
        let mut after = vec![[None; Stream::ALL.len()]; commands.len()];
        for (k, users) in users.iter().enumerate() {
            let mut own = after[k];
            if runs(k) {
                own = [None; Stream::ALL.len()];
                own[streams[k] as usize] = Some(k);
            }
            let join = |user: &usize| after[*user].iter_mut().zip(own).for_each(|(mine, theirs)| *mine = theirs.max(*mine));
            users.iter().for_each(join);
        }
        let long = (0..commands.len()).filter(|k| computes(*k) && runs(*k)).map(|k| times[k]).fold(0, u64::saturating_add) / SHARE;
        // Of each stream, what compute has waited for: that implies what went before.
        let mut known = [None; Stream::ALL.len()];
        let (mut out, mut part, mut place) = (Divided { parts: vec![] }, Stretch::default(), BTreeMap::new());
        let mut behind = false;
        for k in (0..commands.len()).filter(|k| runs(*k)) {
            if computes(k) {
                let waits = known.iter().zip(&after[k]).enumerate().any(|(s, (known, after))| s != Stream::Compute as usize && known < after);
                known.iter_mut().zip(&after[k]).for_each(|(known, after)| *known = (*after).max(*known));
                if (waits || behind || times[k] > long) && !part.steps.is_empty() {
                    out.parts.push(std::mem::replace(&mut part, Stretch { begin: k, ..Stretch::default() }));
                }
            }
            behind = !computes(k);
            place.insert(k, (out.parts.len(), part.steps.len()));
            // By command, until its place in its part is known.
            let others = after[k].iter().enumerate().filter(|(s, _)| *s != streams[k] as usize);
            part.steps.push(PartStep { stream: streams[k], time: times[k], after: others.filter_map(|(_, j)| j.map(Done::Before)).collect() });
        }
        out.parts.push(part);
        out.settle(&place);
        out
    }

    /// Has steps name what they come after by its place: in their part, or among what the part before says is
    /// awaited.
    fn settle(&mut self, place: &BTreeMap<usize, (usize, usize)>) {
        // From behind, the commands that a part or one behind it waits for, of parts before.
        let mut awaited: Vec<usize> = vec![];
        for (p, part) in self.parts.iter_mut().enumerate().rev() {
            let own = |command: &usize| place[command].0 == p;
            let needs = part.steps.iter().flat_map(|s| &s.after).filter_map(|done| if let Done::Before(j) = done { Some(*j) } else { None });
            let mut before: Vec<usize> = needs.chain(awaited.iter().copied()).filter(|j| !own(j)).collect();
            before.sort_unstable();
            before.dedup();
            let find =
                |j: usize| if own(&j) { Done::Here(place[&j].1) } else { Done::Before(before.binary_search(&j).expect("invariant: it is there")) };
            part.awaited = awaited.iter().map(|j| find(*j)).collect();
            for done in part.steps.iter_mut().flat_map(|s| &mut s.after) {
                if let Done::Before(j) = *done {
                    *done = find(j);
                }
            }
            awaited = before;
        }
    }
}

/// Of the orders of as many parts that are followed further: as many of the same parts, and of so many different
/// choices of parts.
const BEAM: usize = 8;
const WIDTH: usize = 64;

/// The order of the parts of a pair that ends first, of those that were tried; none if that is one lane after the
/// other.
///
/// Orders grow part by part. Of those of the same parts, one is given up for another with which neither compute nor
/// exchanges are through later, and if too many are left, those in which compute is through latest. Of choices of
/// parts, those are given up in which compute has waited longest. So the work grows with the number of parts.
fn best(bodies: &BTreeMap<BodyId, Divided>, pair: &Pair) -> Option<Turns> {
    let steps = [0, 1].map(|l: usize| -> Turns {
        let parts = |body: &BodyId| (0..bodies[body].parts.len() as u32).map(|part| (*body, part)).collect::<Vec<_>>();
        pair[l].iter().flat_map(parts).collect()
    });
    let apart = steps
        .iter()
        .enumerate()
        .fold(Trial::default(), |trial, (l, steps)| steps.iter().fold(trial, |trial, (body, part)| trial.then(bodies, l, *body, *part)));
    // By how many steps of the first lane were taken; those of the second follow, as all have taken equally many.
    let mut trials: Vec<Vec<Trial>> = vec![vec![Trial::default()]];
    for taken in 0..steps[0].len() + steps[1].len() {
        let mut next: Vec<Vec<Trial>> = vec![vec![]; steps[0].len().min(taken + 1) + 1];
        for (first, trials) in trials.iter().enumerate() {
            let at = [first, taken - first.min(taken)];
            for (l, (body, part)) in [0, 1].into_iter().filter_map(|l| Some((l, *steps[l].get(at[l])?))) {
                let to = &mut next[first + usize::from(l == 0)];
                to.extend(trials.iter().map(|trial| trial.then(bodies, l, body, part)));
            }
        }
        next.iter_mut().for_each(thin);
        let mut waited: Vec<(u64, usize)> =
            next.iter().enumerate().filter_map(|(first, t)| Some((t.iter().map(Trial::waited).min()?, first))).collect();
        waited.sort_unstable();
        waited.iter().skip(WIDTH).for_each(|(_, first)| next[*first].clear());
        trials = next;
    }
    let best = trials.into_iter().flatten().min_by_key(Trial::end)?;
    (best.end() < apart.end()).then(|| best.turns())
}

/// Leaves out trials for which there is a better one, and all but a few of the others.
fn thin(trials: &mut Vec<Trial>) {
    let exchanged = |t: &Trial| t.clocks.iter().skip(1).copied().max().unwrap_or(0);
    trials.sort_by_key(|t| (t.clocks[Stream::Compute as usize], exchanged(t)));
    let mut least = u64::MAX;
    trials.retain(|t| {
        let (now, before) = (exchanged(t), least);
        least = least.min(now);
        now < before
    });
    trials.truncate(BEAM);
}

/// Some parts of both lanes on the nominal machine, in an order.
#[derive(Clone, Default)]
struct Trial {
    clocks: [u64; Stream::ALL.len()],
    /// The time of its kernels.
    busy: u64,
    /// Of each lane, when what its next part waits for has ended.
    awaited: [Rc<Vec<u64>>; 2],
    turns: Option<Rc<Turn>>,
}

/// The last part of an order, and those before.
struct Turn {
    part: (BodyId, u32),
    before: Option<Rc<Turn>>,
}

/// One after the other, as orders of many parts would use up the stack.
impl Drop for Turn {
    fn drop(&mut self) {
        let mut before = self.before.take();
        while let Some(mut turn) = before.and_then(Rc::into_inner) {
            before = turn.before.take();
        }
    }
}

impl Trial {
    /// With one more part, of a lane.
    fn then(&self, bodies: &BTreeMap<BodyId, Divided>, l: usize, body: BodyId, part: u32) -> Trial {
        let mut out = self.clone();
        let here = &bodies[&body].parts[part as usize];
        let mut ends: Vec<u64> = Vec::with_capacity(here.steps.len());
        let end = |ends: &[u64], done: &Done| match done {
            Done::Here(step) => ends[*step],
            Done::Before(k) => self.awaited[l][*k],
        };
        for PartStep { stream, time, after } in &here.steps {
            let ready = after.iter().map(|done| end(&ends, done)).max().unwrap_or(0);
            let clock = &mut out.clocks[*stream as usize];
            *clock = (*clock).max(ready).saturating_add(*time);
            ends.push(*clock);
            if *stream == Stream::Compute {
                out.busy = out.busy.saturating_add(*time);
            }
        }
        out.awaited[l] = Rc::new(here.awaited.iter().map(|done| end(&ends, done)).collect());
        out.turns = Some(Rc::new(Turn { part: (body, part), before: out.turns.take() }));
        out
    }

    /// How long compute has had nothing to do.
    fn waited(&self) -> u64 {
        self.clocks[Stream::Compute as usize].saturating_sub(self.busy)
    }

    fn end(&self) -> u64 {
        self.clocks.into_iter().max().unwrap_or(0)
    }

    fn turns(&self) -> Turns {
        let (mut out, mut last) = (vec![], &self.turns);
        while let Some(turn) = last {
            out.push(turn.part);
            last = &turn.before;
        }
        if ir::fault!("pair_passes.parts.backward", false, true) {
            out.reverse();
        }
        out
    }
}
