//! Proves that local graphs that passes have rewritten compute what they did before, whoever rewrote them.
//!
//! Both graphs of each class of stages are run on the terms of [`crate::lowering`]: a term is what a value is, down
//! to parameters, inputs and messages, and views, slices and ranks' parts are mixed-radix maps into one. Between
//! graphs, more than views may differ; so terms have one form ([`rules`], [`sums`]):
//! - **Parts of ops.** An op of parts of operands, cut alike, is that part of the op: of each op that maps elements
//!   of its operands at one place to the element of its result there, and of dots, sums, maxima and lookups, along
//!   dims that these do not go through. So chunks are parts of a whole, joined again ([`pieces`]).
//! - **Dots.** A sum of a dot over a dim of both of its factors is a dot over that too, so is a sum of two dots of
//!   which one sums over what comes behind what the other does, and a dot in 16 bits is one in f32 that is rounded
//!   then; one over several dims is one over all of them as one ([`contractions`]). So products may be made in
//!   segments.
//! - **Collectives.** An all-reduce is a linear function of each element, so it is one of the whole term of which a
//!   part is reduced; a reduce-scatter is a rank's own part of it; an all-gather makes a dim of the member. Of ranks'
//!   own parts of what they all have it is that.
//! - **Sums commute**: those over microbatches, ranks and stages, with each other, with masks that are the same for
//!   all that is summed, and with sums of scalars. A sum of all elements is one in any order, and the sum of the sums
//!   of parts, whichever rank has them. The n-th sum over some stages is an op of what each of them gives to it; so
//!   all classes run side by side ([`run`]).
//! - **Pieces.** Values one after the other along an index, a rank's own part of them, and slices that digits cannot
//!   say at once are lists of runs of terms; ops are done run by run, and zeros between them stay zeros. What a
//!   bucket of parameters or states holds are its pieces, of old values where a step begins and of new ones where it
//!   ends.
//! - **Ranks.** A slice of ranks' own parts is one of what each of them has ([`per_rank`]). A node of such values is done
//!   for each rank by itself, unless it is a collective among them: an all-gather, of what all ranks take for the
//!   same, has their values one after the other.
//! - **Copies.** Where passes compute with a copy of a parameter, or of a bucket, that is the weights in its type,
//!   and the weights are the first state.
//!
//! **Invariants** (training and evaluation of each class): reports, new parameters and states, what is sent on each
//! channel, and what is held to limits, are what they were. All graphs of a class are one up to names. Whatever reads
//! or renews a parameter takes it to be of one type.
//!
//! Sums are sums of real numbers: rounding, and the order of sums, are no part of the proof, as they are none of the
//! algebra of shardings. Neither are memories, which are lowering's: a copy to the host is the value itself.

mod alike;
mod contractions;
mod outcome;
mod per_rank;
mod pieces;
mod rules;
mod run;
mod step;
mod sums;

use crate::violation::fail;
use crate::{Invariant, LocationPart, Violation, references};
use ir::graph::Value;
use ir::local::Local;
use ir::op::{DType, Op};
use outcome::ExpectedOutcome;
use rules::Rules;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::rc::Rc;

/// Graphs of a training step and of an evaluation.
#[derive(Clone, Copy)]
pub struct Graphs<'a> {
    /// Of a training step, one per stage or per class of stages.
    pub training: &'a [Local],
    /// Of an evaluation, one per stage or per class of stages.
    pub evaluation: &'a [Local],
}

/// Checks the invariants of the module's documentation. `before` are graphs of one stage each; `after` those of
/// classes, of evaluation in the order of those of training, whose slots are what pieces of buckets name.
///
/// # Errors
/// The first value that is none of the graph before, or the first result that differs.
pub fn verify(before: Graphs, after: Graphs) -> Result<(), Violation> {
    for graphs in [before, after] {
        references::locals(graphs.training, None).map_err(|e| e.within(LocationPart::Training))?;
        references::locals(graphs.evaluation, None).map_err(|e| e.within(LocationPart::Evaluation))?;
    }
    let listed: Vec<u64> = after.training.iter().flat_map(|l| &l.stages).map(|s| s.0).collect();
    let covered = listed.iter().collect::<BTreeSet<_>>().len();
    if [covered, listed.len()] != [before.training.len(); 2] || after.training.len() != after.evaluation.len() {
        return fail(Invariant::ClassesCover, LocationPart::Graph, "classes do not cover all stages once");
    }
    let (mut trained, mut evaluated) = (vec![], vec![]);
    let (mut first_slot, mut first_message) = (0, 0);
    for (training, evaluation) in after.training.iter().zip(after.evaluation) {
        let (first, params) = &training.stages[0];
        let (old, other) = (of_stage(before.training, *first)?, of_stage(before.evaluation, *first)?);
        let slots = slots(params, other)?;
        for (stage, params) in &training.stages {
            let (own, evaluated) = (of_stage(before.training, *stage)?, of_stage(before.evaluation, *stage)?);
            if own.stages[0].1 != *params || !is_alike(own, old) || !is_alike(evaluated, other) || self::slots(params, evaluated)? != slots {
                return fail(Invariant::ClassAlike, LocationPart::Graph, format!("stage {stage} is not in its class"));
            }
        }
        one_type(training, evaluation, &slots)?;
        let own = (0..params.len() as u32).collect();
        let homes: HashSet<u32> = training.buckets.iter().flat_map(|b| &b.pieces).map(|p| p.slot).collect();
        let dtypes: HashMap<u32, DType> = training.updates.iter().rev().map(|u| (u.slot, training.body[u.new].ty.dtype)).collect();
        let (homes, dtypes) = (Rc::new(homes), Rc::new(dtypes));
        let class = |before, after, slots| {
            let (homes, dtypes) = (homes.clone(), dtypes.clone());
            StageClass { before, after, training, slots, homes, dtypes, first_slot, first_message }
        };
        trained.push(class(old, training, own));
        evaluated.push(class(other, evaluation, slots));
        first_slot += params.len() as u32;
        first_message += old.body.nodes.len() + other.body.nodes.len();
    }
    all(&trained).map_err(|e| e.within(LocationPart::Training))?;
    all(&evaluated).map_err(|e| e.within(LocationPart::Evaluation))
}

/// A class of stages, with its graph before and after.
struct StageClass<'a> {
    before: &'a Local,
    after: &'a Local,
    training: &'a Local,
    /// For each parameter slot, the slot in the graph of training after.
    slots: Vec<u32>,
    /// The slots of parameters that buckets hold.
    homes: Rc<HashSet<u32>>,
    /// The type of each updated parameter or bucket, by slot.
    dtypes: Rc<HashMap<u32, DType>>,
    /// Parameters and messages of different classes are different values.
    first_slot: u32,
    first_message: usize,
}

impl StageClass<'_> {
    /// Whether a bucket holds the parameter of a slot.
    fn home(&self, slot: u32) -> bool {
        self.homes.contains(&slot)
    }

    /// The type of the parameter or bucket in a slot.
    fn dtype(&self, slot: u32) -> DType {
        self.dtypes.get(&slot).copied().unwrap_or(DType::F32)
    }

    fn is_whole(&self) -> Result<(), Violation> {
        let StageClass { before, after, training, slots, .. } = self;
        if before.mesh != after.mesh
            || !before.buckets.is_empty()
            || !before.copied.is_empty()
            || after.buckets != training.buckets
            || before.params.len() != after.params.len()
        {
            return fail(Invariant::SameLayout, LocationPart::Graph, "it has another mesh or other parameters");
        }
        let mut homes: Vec<u32> = after.buckets.iter().flat_map(|b| &b.pieces).map(|p| p.slot).collect();
        homes.sort_unstable();
        let once = homes.windows(2).all(|w| w[0] < w[1]) && homes.last().is_none_or(|s| (*s as usize) < training.params.len());
        if !once || slots.len() != before.params.len() {
            return fail(Invariant::OneHome, LocationPart::Graph, "a bucket holds no parameter, or one that is in another place too");
        }
        for (slot, (old, new)) in slots.iter().zip(before.params.iter().zip(&after.params)) {
            let copied = u32::from(training.copied.contains(slot));
            let states = if self.home(*slot) { 0 } else { old.states + copied };
            if old.index != new.index || std::ptr::eq(*after, *training) && new.states != states {
                return fail(Invariant::SlotPart, LocationPart::Graph, format!("slot {slot} is another part, or has other states"));
            }
        }
        Ok(())
    }
}

/// Checks all classes together.
fn all(classes: &[StageClass]) -> Result<(), Violation> {
    let Some(mesh) = classes.first().map(|c| &c.before.mesh) else { return Ok(()) };
    for class in classes {
        class.is_whole()?;
        if class.before.mesh != *mesh {
            return fail(Invariant::SameLayout, LocationPart::Graph, "classes have different meshes");
        }
    }
    let mut rules = Rules::new(mesh);
    // All wanted terms are made first, so that terms made piece by piece are recognised as parts of them.
    let before = run::all(&mut rules, classes, true)?;
    let wanted: Vec<ExpectedOutcome> = classes.iter().zip(before).map(|(c, o)| ExpectedOutcome::new(&mut rules, c, o)).collect::<Result<_, _>>()?;
    let after = run::all(&mut rules, classes, false)?;
    wanted.iter().zip(&after).try_for_each(|(want, got)| want.is(&mut rules, got))
}

/// Checks that all reads and updates of a parameter or bucket take it to be of one type.
fn one_type(training: &Local, evaluation: &Local, slots: &[u32]) -> Result<(), Violation> {
    let mut known: BTreeMap<u32, DType> = BTreeMap::new();
    for (local, slots) in [(training, None), (evaluation, Some(slots))] {
        let own = |slot: u32| match (slots, (slot as usize).checked_sub(local.params.len())) {
            (Some(_), Some(bucket)) => (training.params.len() + bucket) as u32,
            (Some(slots), None) => slots[slot as usize],
            (None, _) => slot,
        };
        let read = local.body.values().filter_map(|v| if let Op::Param(slot) = local.body[v].op { Some((own(slot), v)) } else { None });
        for (slot, v) in read.chain(local.updates.iter().map(|u| (own(u.slot), u.new))) {
            let dtype = local.body[v].ty.dtype;
            if *known.entry(slot).or_insert(dtype) != dtype {
                return fail(Invariant::OneType, v, format!("a parameter in two types{}", place(local, v)));
            }
        }
    }
    Ok(())
}

fn of_stage(all: &[Local], stage: u64) -> Result<&Local, Violation> {
    match all.iter().find(|l| l.stages.len() == 1 && l.stages[0].0 == stage) {
        Some(l) => Ok(l),
        None => fail(Invariant::ClassesCover, LocationPart::Graph, format!("there is no stage {stage}")),
    }
}

/// The slot of each parameter of an evaluation in the graph of training.
fn slots(params: &[u32], evaluation: &Local) -> Result<Vec<u32>, Violation> {
    let of: HashMap<u32, u32> = (0..params.len()).rev().map(|k| (params[k], k as u32)).collect();
    match evaluation.stages[0].1.iter().map(|p| of.get(p).copied()).collect() {
        Some(slots) => Ok(slots),
        None => fail(Invariant::EvaluatedParameters, LocationPart::Graph, "an evaluation with other parameters"),
    }
}

/// Whether two graphs are equal up to names and origins.
fn is_alike(a: &Local, b: &Local) -> bool {
    let nodes = || a.body.nodes.iter().zip(&b.body.nodes);
    std::ptr::eq(a, b)
        || a.body.nodes.len() == b.body.nodes.len()
            && nodes().all(|(x, y)| x.op == y.op && x.args == y.args && x.ty == y.ty)
            && a.body.dims == b.body.dims
            && (&a.chunks, &a.accumulate) == (&b.chunks, &b.accumulate)
            && (&a.params, &a.buckets) == (&b.params, &b.buckets)
            && (&a.reports, &a.updates) == (&b.reports, &b.updates)
}

/// Where a node comes from.
fn place(local: &Local, v: Value) -> String {
    let Some(node) = local.body.nodes.get(v.index()) else { return String::new() };
    let line = node.origin.span.map_or(String::new(), |s| format!(", line {}", s.line));
    let scope = if node.origin.scope.is_empty() { String::new() } else { format!(" of `{}`", node.origin.scope) };
    format!(" ({}{scope}{line})", node.op.name())
}
