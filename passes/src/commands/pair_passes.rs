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
    // Bodies with parts are in pairs already.
    if programs.iter().flat_map(|p| &p.bodies).any(|b| b.parts() > 1) {
        return job;
    }
    for (p, program) in programs.iter_mut().enumerate() {
        let of_program = stages.iter_mut().zip(&pairs).filter(|(s, _)| s.program as usize == p);
        let mut lists: Vec<StageCalls> = of_program.map(|(s, pairs)| StageCalls { calls: &mut s.schedule.train, pairs }).collect();
        pair_calls(mesh, kernels, &costs, program, &mut lists);
    }
    // Messages of both passes of a pair may be under way at the same time.
    job.in_flight = job.in_flight.max(verify::job::least_in_flight(&job));
    job
}

/// The calls of a stage's step, and the pairs of its passes.
struct StageCalls<'a> {
    calls: &'a mut Vec<Call>,
    pairs: &'a BTreeMap<Pass, Pass>,
}

/// Bodies of two lanes side by side: a forward pass, and a backward pass with its pass for weights.
type BodyPair = [Vec<BodyId>; 2];

/// Parts of bodies, in the order in which they are called.
type PartOrder = Vec<(BodyId, u32)>;

fn pair_calls(mesh: &Mesh, kernels: &[Kernel], costs: &CostModel, program: &mut Program, lists: &mut [StageCalls]) {
    let pairs: BTreeSet<BodyPair> = lists.iter().flat_map(|list| (0..list.calls.len()).filter_map(|at| list.pair_at(program, at))).collect();
    let bodies: BTreeSet<BodyId> = pairs.iter().flatten().flatten().copied().collect();
    let divided: BTreeMap<BodyId, DividedBody> = bodies.iter().map(|b| (*b, DividedBody::new(mesh, kernels, costs, program, *b))).collect();
    let mut turns: BTreeMap<BodyPair, PartOrder> = pairs.iter().filter_map(|pair| Some((pair.clone(), best(&divided, pair)?))).collect();
    // A body is cut only where some pair switches to its other lane.
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

impl StageCalls<'_> {
    /// The pair that begins at a call, if one does.
    fn pair_at(&self, program: &Program, at: usize) -> Option<BodyPair> {
        let kind = |c: &Call| program.bodies[c.body.index()].kind;
        let [f, b, rest @ ..] = &self.calls[at..] else { return None };
        let (BodyKind::Forward(chunk), BodyKind::Backward(own)) = (kind(f), kind(b)) else { return None };
        let weight = rest.first().filter(|w| w.microbatch == b.microbatch && kind(w) == BodyKind::Weight(own));
        let pass = |kind: PassKind, chunk: u32, call: &Call| Pass { kind, chunk, microbatch: call.microbatch };
        // A stage may have nothing to compute in a pass, so neighbours in the list need not be a pair of the order.
        let beside = self.pairs.get(&pass(PassKind::Forward, chunk, f)) == Some(&pass(PassKind::Backward, own, b));
        ir::fault!("pair_passes.pairs.all", true, beside).then(|| [vec![f.body], [b].into_iter().chain(weight).map(|c| c.body).collect()])
    }

    /// The calls, with the parts of pairs in turn.
    fn in_turns(&self, program: &Program, turns: &BTreeMap<BodyPair, PartOrder>) -> Vec<Call> {
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
struct DividedBody {
    parts: Vec<LanePart>,
}

/// A part of a lane on the nominal machine. Commands with a predicate are skipped, as in most steps.
#[derive(Default)]
struct LanePart {
    /// The number of its first command.
    begin: usize,
    steps: Vec<PartStep>,
    /// The steps whose ends later parts wait for.
    awaited: Vec<Dependency>,
}

struct PartStep {
    stream: Stream,
    time: u64,
    /// The steps on other streams that it comes after.
    after: Vec<Dependency>,
}

/// A step that was issued before.
#[derive(Clone, Copy)]
enum Dependency {
    /// Index of a step of this part.
    Here(usize),
    /// Index into `awaited` of the part before.
    Before(usize),
}

/// A body is cut at kernels that wait for exchanges, at those that follow the start of an exchange, and at all that
/// take more than this fraction (1 / `SHARE`) of the time of its kernels.
const SHARE: u64 = 64;

impl DividedBody {
    fn new(mesh: &Mesh, kernels: &[Kernel], costs: &CostModel, program: &Program, body: BodyId) -> DividedBody {
        let commands = &program.bodies[body.index()].commands;
        let Graph { streams, times, users, .. } = Graph::new(mesh, kernels, costs, program, commands, &BTreeMap::new());
        let runs = |k: usize| commands[k].predicate.is_none();
        let computes = |k: usize| streams[k] == Stream::Compute;
        // `after` holds, per command and stream, the last command that it has to come after.
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
        // `known` holds, per stream, the last command that compute has waited for, which implies all earlier ones.
        let mut known = [None; Stream::ALL.len()];
        let (mut out, mut part, mut place) = (DividedBody { parts: vec![] }, LanePart::default(), BTreeMap::new());
        let mut behind = false;
        for k in (0..commands.len()).filter(|k| runs(*k)) {
            if computes(k) {
                let waits = known.iter().zip(&after[k]).enumerate().any(|(s, (known, after))| s != Stream::Compute as usize && known < after);
                known.iter_mut().zip(&after[k]).for_each(|(known, after)| *known = (*after).max(*known));
                if (waits || behind || times[k] > long) && !part.steps.is_empty() {
                    out.parts.push(std::mem::replace(&mut part, LanePart { begin: k, ..LanePart::default() }));
                }
            }
            behind = !computes(k);
            place.insert(k, (out.parts.len(), part.steps.len()));
            // `Before` holds the command's index here; `settle` replaces it by its position.
            let others = after[k].iter().enumerate().filter(|(s, _)| *s != streams[k] as usize);
            part.steps.push(PartStep { stream: streams[k], time: times[k], after: others.filter_map(|(_, j)| j.map(Dependency::Before)).collect() });
        }
        out.parts.push(part);
        out.settle(&place);
        out
    }

    /// Replaces the command indices of `after` by positions: in the same part, or in `awaited` of the part before.
    fn settle(&mut self, place: &BTreeMap<usize, (usize, usize)>) {
        // `awaited` holds, from the last part to the first, the commands of earlier parts that a part or a later one
        // waits for.
        let mut awaited: Vec<usize> = vec![];
        for (p, part) in self.parts.iter_mut().enumerate().rev() {
            let own = |command: &usize| place[command].0 == p;
            let needs = part.steps.iter().flat_map(|s| &s.after).filter_map(|done| if let Dependency::Before(j) = done { Some(*j) } else { None });
            let mut before: Vec<usize> = needs.chain(awaited.iter().copied()).filter(|j| !own(j)).collect();
            before.sort_unstable();
            before.dedup();
            let find = |j: usize| {
                if own(&j) { Dependency::Here(place[&j].1) } else { Dependency::Before(before.binary_search(&j).expect("invariant: it is there")) }
            };
            part.awaited = awaited.iter().map(|j| find(*j)).collect();
            for done in part.steps.iter_mut().flat_map(|s| &mut s.after) {
                if let Dependency::Before(j) = *done {
                    *done = find(j);
                }
            }
            awaited = before;
        }
    }
}

/// Bounds of the beam search: at most `BEAM` orders of the same parts, and at most `WIDTH` different choices of
/// parts.
const BEAM: usize = 8;
const WIDTH: usize = 64;

/// The order of a pair's parts that ends first of those that were tried; `None` if running one lane after the other
/// is as fast.
///
/// Orders grow part by part. Of the orders of the same parts, one is dropped if in another neither compute nor
/// exchanges end later; if too many remain, those in which compute ends latest are dropped. Of the choices of parts,
/// those in which compute has waited longest are dropped. So the work grows linearly with the number of parts.
fn best(bodies: &BTreeMap<BodyId, DividedBody>, pair: &BodyPair) -> Option<PartOrder> {
    let steps = [0, 1].map(|l: usize| -> PartOrder {
        let parts = |body: &BodyId| (0..bodies[body].parts.len() as u32).map(|part| (*body, part)).collect::<Vec<_>>();
        pair[l].iter().flat_map(parts).collect()
    });
    let apart = steps
        .iter()
        .enumerate()
        .fold(BeamState::default(), |trial, (l, steps)| steps.iter().fold(trial, |trial, (body, part)| trial.then(bodies, l, *body, *part)));
    // `trials` are indexed by the steps taken of the first lane, which gives those of the second, as the sum is
    // equal.
    let mut trials: Vec<Vec<BeamState>> = vec![vec![BeamState::default()]];
    for taken in 0..steps[0].len() + steps[1].len() {
        let mut next: Vec<Vec<BeamState>> = vec![vec![]; steps[0].len().min(taken + 1) + 1];
        for (first, trials) in trials.iter().enumerate() {
            let at = [first, taken - first.min(taken)];
            for (l, (body, part)) in [0, 1].into_iter().filter_map(|l| Some((l, *steps[l].get(at[l])?))) {
                let to = &mut next[first + usize::from(l == 0)];
                to.extend(trials.iter().map(|trial| trial.then(bodies, l, body, part)));
            }
        }
        next.iter_mut().for_each(thin);
        let mut waited: Vec<(u64, usize)> =
            next.iter().enumerate().filter_map(|(first, t)| Some((t.iter().map(BeamState::waited).min()?, first))).collect();
        waited.sort_unstable();
        waited.iter().skip(WIDTH).for_each(|(_, first)| next[*first].clear());
        trials = next;
    }
    let best = trials.into_iter().flatten().min_by_key(BeamState::end)?;
    (best.end() < apart.end()).then(|| best.turns())
}

/// Drops trials for which there is a better one, and all but a few of the others.
fn thin(trials: &mut Vec<BeamState>) {
    let exchanged = |t: &BeamState| t.clocks.iter().skip(1).copied().max().unwrap_or(0);
    trials.sort_by_key(|t| (t.clocks[Stream::Compute as usize], exchanged(t)));
    let mut least = u64::MAX;
    trials.retain(|t| {
        let (now, before) = (exchanged(t), least);
        least = least.min(now);
        now < before
    });
    trials.truncate(BEAM);
}

/// The state of the nominal machine after some parts of both lanes in an order.
#[derive(Clone, Default)]
struct BeamState {
    clocks: [u64; Stream::ALL.len()],
    /// The time of its kernels.
    busy: u64,
    /// Per lane, the ends of the steps that its next part waits for.
    awaited: [Rc<Vec<u64>>; 2],
    turns: Option<Rc<OrderNode>>,
}

/// The last part of an order, and those before.
struct OrderNode {
    part: (BodyId, u32),
    before: Option<Rc<OrderNode>>,
}

/// Drops the list iteratively, as recursion over many parts would overflow the stack.
impl Drop for OrderNode {
    fn drop(&mut self) {
        let mut before = self.before.take();
        while let Some(mut turn) = before.and_then(Rc::into_inner) {
            before = turn.before.take();
        }
    }
}

impl BeamState {
    /// The state with one more part of a lane.
    fn then(&self, bodies: &BTreeMap<BodyId, DividedBody>, l: usize, body: BodyId, part: u32) -> BeamState {
        let mut out = self.clone();
        let here = &bodies[&body].parts[part as usize];
        let mut ends: Vec<u64> = Vec::with_capacity(here.steps.len());
        let end = |ends: &[u64], done: &Dependency| match done {
            Dependency::Here(step) => ends[*step],
            Dependency::Before(k) => self.awaited[l][*k],
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
        out.turns = Some(Rc::new(OrderNode { part: (body, part), before: out.turns.take() }));
        out
    }

    /// How long the compute stream has been idle.
    fn waited(&self) -> u64 {
        self.clocks[Stream::Compute as usize].saturating_sub(self.busy)
    }

    fn end(&self) -> u64 {
        self.clocks.into_iter().max().unwrap_or(0)
    }

    fn turns(&self) -> PartOrder {
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
