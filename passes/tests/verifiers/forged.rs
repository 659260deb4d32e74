//! What no text can say, or not in a line, and verifiers refuse all the same.

use crate::folder;
use ir::dim::{Base, IndexMap, Order};
use ir::graph::{Table, Type};
use ir::module::{Module, Whole};
use ir::op::{DType, Op};
use ir::program::{Extent, TableEntry};
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

/// A table that is none of the step's comes before all others.
#[test]
fn a_job_with_tables_in_another_order_is_refused() {
    let mut module = parse_module(&fs::read_to_string(folder().join("base_jobzero.mir")).expect("UTF-8")).expect("a module");
    let body = &module.training.whole.graph().body;
    let dim = body.dims.ids().next().expect("a dim");
    let ty = Type::new(DType::F32, vec![dim]);
    let (name, size) = (body.dims.name(dim).to_string(), body.dims.size(dim));
    let extent = Extent { name, size, padded: size, order: Order::Plain };
    let numbers = |first: f64| (0..size).map(|i| first + i as f64).collect::<Vec<f64>>();
    let Whole::Sharded(sharded) = &mut module.training.whole else { panic!("a job has a sharded graph") };
    for (name, first) in [("table0", 0.0), ("table1", 1.0)] {
        sharded.graph.tables.push(Table { name: name.into(), ty: ty.clone(), data: numbers(first) });
        let entry = TableEntry { name: name.into(), dtype: DType::F32, dims: vec![extent.clone()], data: numbers(first) };
        module.job.as_mut().expect("a job").tables.push(entry);
    }
    assert_eq!(said(&module), []);
    module.job.as_mut().expect("a job").tables.reverse();
    assert_eq!(said(&module), [Some(Invariant::DescribedTables)]);
}
