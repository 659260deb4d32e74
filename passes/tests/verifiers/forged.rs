//! What no text can say, or not in a line, and verifiers refuse all the same.

use crate::folder;
use ir::dim::{Base, IndexMap};
use ir::module::Module;
use ir::op::Op;
use ir::text::parse_module;
use passes::compile::holds;
use passes::table::verifiers;
use std::fs;
use verify::Invariant;

fn shared() -> Module {
    parse_module(&fs::read_to_string(folder().join("base_shared.mir")).expect("UTF-8")).expect("a module")
}

fn said(module: &Module) -> Vec<Option<Invariant>> {
    verifiers(module).filter_map(|v| holds(v, module).err()).map(|e| e.invariant()).collect()
}

#[test]
fn a_table_with_an_entry_missing_is_refused() {
    let mut module = shared();
    module.training.locals[0].reasons.pop();
    assert_eq!(said(&module), [Some(Invariant::LocalTables)]);
}

/// Of a bucket's two states, the second is read as if each rank had all of it.
#[test]
fn states_of_a_bucket_at_different_ranks_are_refused() {
    let mut module = shared();
    let local = &mut module.training.locals[0];
    let at = local.body.values().find(|v| matches!(local.body[*v].op, Op::State(2, 0))).expect("a state of the bucket");
    let part = local.body[at].ty.dims[0];
    let mut whole = local.body.dims[part].clone();
    whole.size = 128;
    whole.index = IndexMap { parts: vec![(128, 1)], base: Base::Coords(vec![]) };
    let whole = local.body.dims.add(whole);
    let mut node = local.body[at].clone();
    node.op = Op::State(2, 1);
    node.ty.dims = vec![whole];
    local.body.nodes.push(node);
    local.chunks.push(local.chunks[at.index()]);
    local.accumulate.push(false);
    local.source.push(None);
    local.reasons.push(None);
    assert_eq!(said(&module), [Some(Invariant::BucketOwners)]);
}
