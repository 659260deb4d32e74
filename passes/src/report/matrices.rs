//! What a rank has to do with the matrices that the optimizer multiplies, as Muon does, and what it keeps of them.

use ir::graph::{Graph, Value};
use ir::local::{Chunk, Local};
use ir::op::Op;
use ir::program::Piece;
use std::collections::{BTreeMap, BTreeSet};

/// Of the ranks of a stage, which all have as much to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Matrices {
    /// Pipeline stage; of several that run the same program, the first.
    pub stage: u64,
    /// Parameters that the optimizer multiplies.
    pub count: u64,
    /// Places for the matrices on all ranks that share them out; some may be empty.
    pub places: u64,
    /// Places of a rank.
    pub of_rank: u64,
    /// Operations of these products, two per multiply-add: of a rank, and of all matrices.
    pub operations: [u64; 2],
    /// Bytes of their states, with f32 weights where parameters are copies: on a rank, and if each rank kept all.
    pub bytes: [u64; 2],
}

/// Of the stage whose ranks have most to do with them; none if there are no such matrices. `locals` are those of
/// training, after all passes.
pub fn matrices(graph: &Graph, locals: &[Local]) -> Option<Matrices> {
    let all = locals.iter().map(|l| of_class(graph, l)).filter(|m| m.count > 0);
    // On ties, the first stage is taken.
    all.reduce(|a, b| if b.operations[0] > a.operations[0] { b } else { a })
}

fn of_class(graph: &Graph, local: &Local) -> Matrices {
    let (body, (stage, params)) = (&local.body, &local.stages[0]);
    // Nodes of an update are in the scope of its parameter; those of a bucket are in the scope of its first
    // parameter.
    let mut operations: BTreeMap<&str, u64> = BTreeMap::new();
    let mut states: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
    let mut parts: BTreeMap<u32, Value> = BTreeMap::new();
    for v in body.values().filter(|v| local.chunks[v.index()] == Chunk::Update) {
        match &body[v].op {
            Op::Dot { over, .. } => {
                *operations.entry(&body[v].origin.scope).or_default() += 2 * body.elements(v) * body.dims.elements(over);
            }
            Op::State(slot, k) => {
                states.entry(*slot).or_default().insert(*k);
                parts.insert(*slot, v);
            }
            _ => {}
        }
    }
    let name = |slot: u32| graph.params[params[slot as usize] as usize].name.as_str();
    let mut out = Matrices { stage: *stage, ..Matrices::default() };
    let mut add = |slot: u32, operations: u64, [count, places, of_rank]: [u64; 3], [part, elements]: [u64; 2]| {
        out.count += count;
        out.places += places;
        out.of_rank += of_rank;
        // Every place of a rank takes the same number of operations.
        let kept = 4 * states.get(&slot).map_or(0, |s| s.len() as u64);
        for (sum, more) in out.operations.iter_mut().zip([operations, operations / of_rank * count]) {
            *sum += more;
        }
        for (sum, more) in out.bytes.iter_mut().zip([kept * part, kept * elements]) {
            *sum += more;
        }
    };
    let homes: BTreeSet<u32> = local.buckets.iter().flat_map(|b| &b.pieces).map(|p| p.slot).collect();
    for slot in (0..params.len() as u32).filter(|s| !homes.contains(s)) {
        if let (Some(flops), Some(v)) = (operations.get(name(slot)), parts.get(&slot)) {
            add(slot, *flops, [1; 3], [body.elements(*v); 2]);
        }
    }
    for (k, bucket) in local.buckets.iter().enumerate() {
        let slot = (params.len() + k) as u32;
        let found = bucket.pieces.iter().find_map(|p| operations.get(name(p.slot)));
        let (Some(flops), Some(v)) = (found, parts.get(&slot)) else { continue };
        let part = body.elements(*v);
        let elements = bucket.pieces.iter().map(Piece::elements).sum();
        // The pieces lie at equal distances.
        let [first, second, ..] = &bucket.pieces[..] else { continue };
        let distance = second.at - first.at;
        add(slot, *flops, [bucket.pieces.len() as u64, bucket.size / distance, part / distance], [part, elements]);
    }
    out
}
