//! Moves optimizer states, and the weights that the optimizer works on, to the host's memory, and the optimizer to its
//! processor (ZeRO-Offload, Ren et al. 2021).
//!
//! What passes read of a parameter stays on the device, unless it is asked to rest on the host: the 16-bit copy that
//! they compute with, or a copy in f32. The weights become one more state. The values of a step that follow element by
//! element from gradients and states are computed on the host, each update by itself; so gradients go there, and new
//! copies come back, parameter by parameter, or bucket by bucket where ranks share updates out. No value is computed
//! otherwise, so results are the same to the bit. How values get from one memory to the other is for lowering to say,
//! and what goes on at the same time for `list_schedule` and `events`.
//!
//! Parameters that rest on the host ([`ParamOffload`]; ZeRO-Infinity, Rajbhandari et al. 2021) are copied to the device
//! by each pass that reads them, layer by layer. Weights in f32 are no state apart then, as passes read them where they
//! are. The smallest parameters stay on the device.
//!
//! An update stays on the device if it would free no memory there: one without states, of a parameter that passes read in f32. So does one of a parameter
//! outside of buckets whose new value is gathered: its states would be in parts.

use crate::local::role::{Role, role, without_dead};
use crate::local::zero;
use ir::graph::{Body, Node, Type, Value};
use ir::local::{Chunk, Local};
use ir::op::{Collective, DType, Op};
use ir::options::ParamOffload;
use ir::program::ParamRole;
use std::collections::{BTreeMap, BTreeSet};

/// The smallest values stay where they are, as far as all of these together are at most this fraction (1 / `SMALL`)
/// of the total.
const SMALL: u64 = 64;

/// The size up to which values stay, all of which are together no more than a share of all: copies take as long for a
/// few bytes as for many.
pub fn small(mut sizes: Vec<u64>) -> u64 {
    sizes.sort_unstable();
    let most = sizes.iter().fold(0, |sum: u64, n| sum.saturating_add(*n)) / SMALL;
    let (mut sum, mut size) = (0u64, 0);
    for alike in sizes.chunk_by(|a, b| a == b) {
        sum = sum.saturating_add(alike[0].saturating_mul(alike.len() as u64));
        if sum > most {
            break;
        }
        size = alike[0];
    }
    size
}

/// Moves the updates of a training graph. The graph of evaluation of the same stages comes to read the copies that passes read.
pub fn offload(training: Local, evaluation: Local, params: ParamOffload) -> (Local, Local) {
    let types = zero::copies(&training, &evaluation);
    let slots = zero::slots(&training, &evaluation);
    // Only weights that the update itself reads can be on the host.
    let at_update = |v: &Value| training.chunks[v.index()] == Chunk::Update;
    let own: BTreeSet<u32> = (training.body.values().filter(at_update))
        .filter_map(|v| if let Op::Param(slot) = training.body[v].op { Some(slot) } else { None })
        .collect();
    // `moved` holds, by slot of a moved update, the element type that passes read.
    let moved: BTreeMap<u32, DType> = training
        .updates
        .iter()
        .filter(|u| !u.states.is_empty() || types.contains_key(&u.slot))
        .filter(|u| u.slot as usize >= training.params.len() || own_part(&training.body, u.new) == u.new && own.contains(&u.slot))
        .map(|u| (u.slot, types.get(&u.slot).copied().unwrap_or(DType::F32)))
        .collect();
    if moved.is_empty() {
        return (training, evaluation);
    }
    let of_training = |slot: u32| match (slot as usize).checked_sub(evaluation.params.len()) {
        Some(bucket) => Some((training.params.len() + bucket) as u32),
        None => slots[slot as usize].map(|s| s as u32),
    };
    let evaluated: BTreeMap<u32, u32> =
        (0..(evaluation.params.len() + evaluation.buckets.len()) as u32).filter_map(|s| Some((s, of_training(s)?))).collect();
    let types = evaluated.iter().filter_map(|(s, of)| Some((*s, *moved.get(of)?))).collect();
    let mut evaluation = without_dead(ir::fault!("offload.evaluation.weights", evaluation, copies_read(evaluation, &types)));
    let training = copies_read(training, &moved);
    let resting = if params == ParamOffload::Off { BTreeSet::new() } else { resting(&training, &moved) };
    let training = without_dead(apart(training, &moved, &resting));
    evaluation.buckets = training.buckets.clone();
    let rests = |slot: &u32| evaluated.get(slot).is_some_and(|of| resting.contains(of));
    evaluation.host = params_of(&evaluation, &rests);
    (on_host(training, &moved, &resting), evaluation)
}

/// The slots of moved updates whose parameters are large enough to be copied for each pass.
fn resting(local: &Local, moved: &BTreeMap<u32, DType>) -> BTreeSet<u32> {
    let body = &local.body;
    let elements = |v: Value| match body[v].op {
        Op::Param(slot) => Some((slot, body.elements(v).saturating_mul(moved.get(&slot)?.bytes()))),
        _ => None,
    };
    let bytes: BTreeMap<u32, u64> = body.values().filter_map(elements).collect();
    let small = small(bytes.values().copied().collect());
    bytes.into_iter().filter(|(_, bytes)| *bytes > small).map(|(slot, _)| slot).collect()
}

/// The nodes that are parameters of some slots.
fn params_of(local: &Local, of: &dyn Fn(&u32) -> bool) -> BTreeSet<Value> {
    local.body.values().filter(|v| matches!(&local.body[*v].op, Op::Param(slot) if of(slot))).collect()
}

/// The graph with every parameter read as it is stored for the model: casts to that type are the parameter itself.
fn copies_read(mut local: Local, moved: &BTreeMap<u32, DType>) -> Local {
    for v in local.body.values() {
        let [arg] = local.body[v].args[..] else { continue };
        let Op::Param(slot) = local.body[arg].op else { continue };
        let ty = &local.body[v].ty;
        let copy = local.body[v].op == Op::Cast && local.chunks[v.index()] != Chunk::Update && moved.get(&slot) == Some(&ty.dtype);
        if copy {
            let node = &mut local.body.nodes[v.index()];
            (node.op, node.args) = (Op::Param(slot), vec![]);
        }
    }
    local
}

/// The training graph with weights as states, apart from what passes read, unless that is the same and rests on the
/// host.
fn apart(mut local: Local, moved: &BTreeMap<u32, DType>, resting: &BTreeSet<u32>) -> Local {
    let params = local.params.len() as u32;
    let whole = |local: &Local, slot: u32| match slot.checked_sub(params) {
        Some(k) => local.buckets[k as usize].holds == ParamRole::Weights,
        None => true,
    };
    let same = |slot: &u32, dtype: &DType| *dtype == DType::F32 && resting.contains(slot);
    let apart: BTreeSet<u32> = moved.iter().filter(|(slot, dtype)| whole(&local, **slot) && !same(slot, dtype)).map(|m| *m.0).collect();
    for v in local.body.values().filter(|v| local.chunks[v.index()] == Chunk::Update).collect::<Vec<_>>() {
        let arg = local.body[v].args.first().map(|a| local.body[*a].op.clone());
        let (op, slot) = match (&local.body[v].op, arg) {
            (Op::State(slot, k), _) => (Op::State(*slot, ir::fault!("offload.state.number", *k, k + 1)), *slot),
            // For a bucket, the update reads this rank's shard.
            (Op::Param(slot), _) if *slot < params => (Op::State(*slot, 0), *slot),
            (Op::Shard { .. }, Some(Op::Param(slot))) if slot >= params => (Op::State(slot, 0), slot),
            _ => continue,
        };
        if apart.contains(&slot) {
            let node = &mut local.body.nodes[v.index()];
            (node.op, node.args) = (op, vec![]);
        }
    }
    for k in 0..local.updates.len() {
        let (slot, new) = (local.updates[k].slot, local.updates[k].new);
        if !apart.contains(&slot) {
            continue;
        }
        let own = own_part(&local.body, new);
        let states = &mut local.updates[k].states;
        states.insert(ir::fault!("offload.weights.last", states.len(), 0), own);
        match slot.checked_sub(params) {
            Some(bucket) => local.buckets[bucket as usize].holds = ParamRole::Copies,
            None => {
                local.copied.insert(slot);
                local.params[slot as usize].states += 1;
                local.updates[k].new = ir::fault!("offload.copy.unrounded", new, rounded(&mut local, new, moved[&slot]));
            }
        }
    }
    local
}

/// The part of a new parameter that a rank computes before the gather.
pub fn own_part(body: &Body, mut new: Value) -> Value {
    let mut v = new;
    while let Op::View { .. } | Op::Collective { kind: Collective::AllGather, .. } = body[v].op {
        let gathers = matches!(body[v].op, Op::Collective { .. });
        v = body[v].args[0];
        if gathers {
            new = v;
        }
    }
    new
}

/// A value of an update in another type.
fn rounded(local: &mut Local, v: Value, dtype: DType) -> Value {
    let node = &local.body[v];
    if node.ty.dtype == dtype {
        return v;
    }
    let node = Node { op: Op::Cast, args: vec![v], ty: Type::new(dtype, node.ty.dims.clone()), origin: node.origin.clone() };
    local.push(node, Chunk::Update)
}

/// The graph with the states of updates, and all that follows from them element by element, on the host; so are the
/// values that lead there, and the parameters that rest there.
fn on_host(mut local: Local, moved: &BTreeMap<u32, DType>, resting: &BTreeSet<u32>) -> Local {
    let body = &local.body;
    let mut host: BTreeSet<Value> = body.values().filter(|v| matches!(&body[*v].op, Op::State(slot, _) if moved.contains_key(slot))).collect();
    host.extend(params_of(&local, &|slot| ir::fault!("offload.params.none", false, resting.contains(slot))));
    let roots = local.updates.iter().filter(|u| moved.contains_key(&u.slot));
    let mut stack: Vec<Value> = roots.flat_map(|u| u.states.iter().copied().chain([own_part(body, u.new)])).collect();
    while let Some(v) = stack.pop() {
        let steps = role(body, v) == Role::Compute && body[v].op.is_pointwise() && local.chunks[v.index()] == Chunk::Update;
        if steps && host.insert(v) {
            stack.extend(&body[v].args);
        }
    }
    local.host = host;
    local
}
