//! Shares out among data-parallel ranks what a step does once (ZeRO-1 and 2, as in Megatron-Core's `DistributedOptimizer`).
//!
//! Parameters are put into *buckets* that ignore their borders: gradients lie one after the other in one buffer, and so do parameters. A
//! reduce-scatter leaves each of the d ranks that have copies the sum of one d-th of a bucket, whatever parameters that belongs to. The optimizer
//! works on this slice alone, so its states rest as slices; an all-gather tells all ranks the new parameters. All of it is in ordinary ops:
//! concat, view, reduce_scatter, the optimizer's own ops over the slice, all_gather, slice.
//!
//! **Layout.** A parameter begins at a multiple of [`ALIGN`] elements, a bucket ends at one of lcm(d, [`END`]). Buckets hold parameters in the
//! order in which the backward pass completes their gradients, the reverse order of use.
//!
//! **Classes.** Parameters of a bucket have everything in common but their dims: who sums the gradient, when a term of it is known, how the new
//! value follows from it, to which sum its squares belong. So an update is one expression over the slice; where a model has others (no decay, norms that tensor-parallel
//! ranks sum too, experts), they are buckets of their own.
//!
//! **Whole matrices.** What is not updated element by element, as Muon's matrices, belongs whole to one rank:
//! parameters of one size and one expression lie in a bucket at equal distances, so many of them that each rank's
//! part is as many whole ones. A rank runs the expression for each of its own. Where there are too few for all
//! ranks, some of their sub-axes share them out ([`owners`]), and gradients are summed over the others too.
//!
//! **Replicas.** Along some sub-axes of dp nothing is shared out: groups of ranks along these do the same. A rank's part
//! of a gradient is then summed over the groups too, once a step.
//!
//! Where a model computes with 16-bit copies alone, the bucket of parameters holds those, and weights exist as slices only, as one more state.

mod emit;
mod find;
mod whole;

use emit::UpdateSharder;
use find::{BucketClass, ShardedUpdate, UpdateGranularity, find};
use ir::dim::{Base, IndexMap};
use ir::local::{Chunk, Local};
use ir::mesh::{Mesh, SubAxis};
use ir::op::{DType, Op};
use ir::options::{Options, Zero};
use ir::program::{Bucket, ParamRole, Piece, own_part};
use std::collections::HashMap;

/// Alignment of parameters in a bucket, in elements.
const ALIGN: u64 = 64;

/// A bucket's end is a multiple of this and of the number of its ranks.
const END: u64 = 128;

/// At most one slot in `EMPTY` for whole parameters may be empty, since it costs a parameter and a gradient of zeros
/// on all ranks.
const EMPTY: u64 = 4;

/// Shares out the updates of training graphs; each with the graph of evaluation of the same stages, which finds its parameters in the buckets. A bucket is
/// full with `size` elements.
pub fn share_out(stages: Vec<(Local, Local)>, options: &Options, size: u64) -> Vec<(Local, Local)> {
    if options.zero == Zero::None {
        return stages;
    }
    let mut found: Vec<Vec<ShardedUpdate>> = stages.iter().map(|(training, evaluation)| updates(training, evaluation)).collect();
    // Stages that sum a gradient together must agree on whether, and among which ranks, they shard it. A stage that
    // adds to it may lack the parameter.
    loop {
        let own = |((training, _), shared): (&(Local, Local), &Vec<ShardedUpdate>)| -> Vec<((u64, u32), Vec<SubAxis>)> {
            let stages = training.stages.iter().map(|(stage, params)| (*stage, params));
            stages.flat_map(|(stage, params)| shared.iter().map(move |s| ((stage, params[s.slot as usize]), s.class.subs.clone()))).collect()
        };
        let share: HashMap<(u64, u32), Vec<SubAxis>> = stages.iter().zip(&found).flat_map(own).collect();
        let count = |found: &[Vec<ShardedUpdate>]| found.iter().map(Vec::len).sum::<usize>();
        let before = count(&found);
        for ((training, _), shared) in stages.iter().zip(&mut found) {
            shared.retain(|s| {
                let Some(Op::Collective { stages: Some(members), .. }) = s.stages.map(|v| &training.body[v].op) else { return true };
                training.stages.iter().all(|(_, params)| members.iter().all(|m| share.get(&(*m, params[s.slot as usize])) == Some(&s.class.subs)))
            });
        }
        if count(&found) == before {
            break;
        }
    }
    stages.into_iter().zip(found).map(|((training, evaluation), shared)| share(training, evaluation, shared, options, size)).collect()
}

/// For each parameter of an evaluation graph, its slot in the training graph of the same stages.
pub fn slots(training: &Local, evaluation: &Local) -> Vec<Option<usize>> {
    let (stage, params) = &training.stages[0];
    let used: &[u32] = evaluation.stages.iter().find(|s| s.0 == *stage).map_or(&[], |s| &s.1);
    let of: HashMap<u32, usize> = params.iter().copied().zip(0..).collect();
    used.iter().map(|p| of.get(p).copied()).collect()
}

/// The updates of a training graph that can be shared out.
fn updates(training: &Local, evaluation: &Local) -> Vec<ShardedUpdate> {
    let copies = copies(training, evaluation);
    find(training, &|slot| copies.get(&slot).copied())
}

/// The 16-bit types of copies that are all that training and evaluation read of a parameter, by slot of the training graph.
pub fn copies(training: &Local, evaluation: &Local) -> HashMap<u32, DType> {
    let slot_of = slots(training, evaluation);
    let (own, other) = (read_as(training), read_as(evaluation));
    let agreed = |(slot, own): (u32, Option<DType>)| {
        let of_evaluation = slot_of.iter().position(|s| *s == Some(slot as usize)).and_then(|k| other.get(&(k as u32)));
        own.filter(|_| of_evaluation.is_none_or(|other| *other == own)).map(|dtype| (slot, dtype))
    };
    own.into_iter().filter_map(agreed).collect()
}

fn share(training: Local, evaluation: Local, updates: Vec<ShardedUpdate>, options: &Options, size: u64) -> (Local, Local) {
    let zero = options.zero;
    let replicas = training.mesh.replicas(options.replicas).unwrap_or_default();
    let slot_of = slots(&training, &evaluation);
    let mut classes: Vec<Vec<ShardedUpdate>> = vec![];
    // Gradients that are scattered once per step share buckets, whichever virtual stage computed their terms.
    let alike = |a: &BucketClass, b: &BucketClass| a == b || zero == Zero::States && a.takes == UpdateGranularity::Whole && *a == b.at(a.chunk);
    for shared in updates {
        match classes.iter_mut().find(|c| alike(&c[0].class, &shared.class)) {
            Some(class) => class.push(shared),
            None => classes.push(vec![shared]),
        }
    }
    let mut buckets: Vec<BucketPlan> = vec![];
    for class in classes {
        let within: Vec<SubAxis> = class[0].class.subs.iter().copied().filter(|u| !replicas.contains(u)).collect();
        let owners = match class[0].class.takes {
            UpdateGranularity::Elements => within,
            UpdateGranularity::Whole => owners(&training.mesh, &within, class.len() as u64),
        };
        // Without owners the parameters are updated unsharded.
        if !owners.is_empty() {
            buckets.extend(fill(&training, class, &owners, size).into_iter().map(|members| plan(&training, members, owners.clone())));
        }
    }
    let homes: HashMap<u32, (usize, u64)> =
        buckets.iter().enumerate().flat_map(|(k, b)| b.bucket.pieces.iter().map(move |p| (p.slot, (k, p.at)))).collect();
    let at_evaluation = |slot: u32| homes.get(&(slot_of[ir::fault!("zero.evaluation.slot", 0, slot as usize)]? as u32)).copied();
    let evaluation = emit::read_from_buckets(evaluation, &buckets, &at_evaluation);
    (UpdateSharder::new(&training, &buckets, &homes, zero).run(), evaluation)
}

/// A bucket with what lies in it.
struct BucketPlan {
    bucket: Bucket,
    members: Vec<ShardedUpdate>,
    /// The elements of a rank among those of the bucket.
    part: IndexMap,
    /// The ranks that have parts, of those that have a term of the gradient.
    owners: Vec<SubAxis>,
    /// Elements from one member to the next, if members are owned whole.
    distance: Option<u64>,
}

/// The sub-axes over which so many whole parameters are sharded: those with the most ranks that leave few slots
/// empty, the innermost of them. Empty for one parameter.
fn owners(mesh: &Mesh, subs: &[SubAxis], count: u64) -> Vec<SubAxis> {
    let ranks = |subs: &[SubAxis]| subs.iter().map(|u| mesh[*u].size).product::<u64>();
    let (mut best, mut most) = (vec![], 1);
    for chosen in 1u32..1 << subs.len() {
        let of: Vec<SubAxis> = subs.iter().rev().enumerate().filter(|(k, _)| chosen >> k & 1 == 1).map(|(_, u)| *u).rev().collect();
        let places = count.next_multiple_of(ranks(&of));
        if ranks(&of) > most && (places - count) * EMPTY <= places {
            (most, best) = (ranks(&of), of);
        }
    }
    best
}

/// Per parameter, the 16-bit type if all readers are casts to it, else `None`.
fn read_as(local: &Local) -> HashMap<u32, Option<DType>> {
    let body = &local.body;
    let mut out: HashMap<u32, Option<DType>> = HashMap::new();
    for v in body.values() {
        for a in &body[v].args {
            let Op::Param(slot) = body[*a].op else { continue };
            if local.chunks[v.index()] == Chunk::Update {
                continue;
            }
            let own = (body[v].op == Op::Cast && body[v].ty.dtype.is_half()).then_some(body[v].ty.dtype);
            let known = out.entry(slot).or_insert(own);
            if *known != own {
                *known = None;
            }
        }
    }
    out
}

/// Divides the members of a class into buckets; for whole parameters, in multiples of the number of owners.
fn fill(local: &Local, class: Vec<ShardedUpdate>, owners: &[SubAxis], size: u64) -> Vec<Vec<ShardedUpdate>> {
    let at_once = match class[0].class.takes {
        UpdateGranularity::Elements => 1,
        UpdateGranularity::Whole => ranks(local, owners) as usize,
    };
    let (mut out, mut elements): (Vec<Vec<ShardedUpdate>>, u64) = (vec![vec![]], 0);
    for shared in class {
        let last = out.last().expect("invariant: there is a bucket");
        if elements >= size && last.len().is_multiple_of(at_once) {
            out.push(vec![]);
            elements = 0;
        }
        elements += local.body.dims.elements(&shared.dims);
        out.last_mut().expect("invariant: there is a bucket").push(shared);
    }
    out
}

fn ranks(local: &Local, subs: &[SubAxis]) -> u64 {
    subs.iter().map(|u| local.mesh[*u].size).product()
}

fn plan(local: &Local, members: Vec<ShardedUpdate>, owners: Vec<SubAxis>) -> BucketPlan {
    let ranks = ranks(local, &owners);
    let mut end = 0u64;
    let mut pieces = vec![];
    for m in &members {
        let at = end.next_multiple_of(ALIGN);
        let index = m.dims.iter().map(|d| local.body.dims[*d].index.clone()).collect();
        pieces.push(Piece { slot: m.slot, at, index });
        end = ir::fault!("zero.piece.overlap", at, at + local.body.dims.elements(&m.dims));
    }
    // Parameters that are owned whole are all of one size.
    let distance = match members[0].class.takes {
        UpdateGranularity::Elements => None,
        UpdateGranularity::Whole => Some(local.body.dims.elements(&members[0].dims).next_multiple_of(ALIGN)),
    };
    let size = match distance {
        None => end.next_multiple_of(lcm(ranks, END)),
        Some(distance) => (members.len() as u64).next_multiple_of(ranks) * distance,
    };
    let count = size / ranks;
    let base = Base::Coords(own_part(&local.mesh, &owners, count));
    let part = IndexMap { parts: vec![(ir::fault!("zero.part.count", count / 2, count), 1)], base };
    let holds = if members[0].class.copies.is_some() { ParamRole::Copies } else { ParamRole::Weights };
    BucketPlan { bucket: Bucket { size, holds, pieces }, members, part, owners, distance }
}

fn lcm(a: u64, b: u64) -> u64 {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    a / x * b
}
