//! What no text can say, and verifiers refuse all the same.

use crate::folder;
use ir::algebra::algebra;
use ir::faults::watch;
use ir::graph::{Body, Value};
use ir::module::{GlobalGraph, Module};
use ir::op::{Op, Reduce};
use ir::sharded::Placement;
use ir::text::{parse_module, print_module};
use passes::compile::holds;
use passes::table::verifiers;
use std::fs;
use verify::{BEYOND_TEXTS, Invariant};

fn base(name: &str) -> Module {
    parse_module(&fs::read_to_string(folder().join(name)).expect("UTF-8")).expect("a module")
}

fn said(module: &Module) -> Vec<Option<Invariant>> {
    verifiers(module).filter_map(|v| holds(v, module).err()).map(|e| e.invariant()).collect()
}

/// A sound module in which this invariant was broken.
fn broken(invariant: Invariant) -> Module {
    match invariant {
        Invariant::LocalTables => {
            let mut module = base("base_shared.mir");
            module.training.locals[0].reasons.pop();
            module
        }
        Invariant::StageProgram => {
            let mut module = base("base_jobzero.mir");
            module.job.as_mut().expect("a job").stages[0].program = 5;
            module
        }
        other => panic!("nothing here breaks {other}"),
    }
}

#[test]
fn what_no_text_can_say_is_refused() {
    for (invariant, why) in BEYOND_TEXTS.iter().filter(|(i, _)| ![Invariant::RowHolds, Invariant::RankPlaces].contains(i)) {
        let module = broken(*invariant);
        let all = said(&module);
        assert!(all.contains(&Some(*invariant)) && !all.contains(&None), "{invariant}: {all:?}");
        // The text of such a module does not parse, or is that of a valid one.
        let read = parse_module(&print_module(&module));
        assert!(read.is_err() || read.is_ok_and(|m| said(&m).is_empty()), "{invariant}: {why}");
    }
}

/// Where a rank is, who is in its groups, and in which order, is asked of one function by all but the verifier.
#[test]
fn ranks_in_other_places_are_refused() {
    let module = base("base_events.mir");
    assert_eq!(said(&module), []);
    for fault in ["mesh.group.reversed", "mesh.stage.reversed"] {
        let (all, _) = watch(Some(fault), || said(&module));
        assert!(all.contains(&Some(Invariant::RankPlaces)), "{fault}: {all:?}");
    }
}

/// A table that says of a greatest element what is true of a sum.
#[test]
fn a_wrong_row_of_the_table_is_refused() {
    let GlobalGraph::Sharded(mut sharded) = base("base_sharded.mir").training.whole else { panic!("it is sharded") };
    let sound = sharded.graph.body.clone();
    let partial = |v: &Value| sharded.mesh.ids().any(|u| sharded.sharding(*v)[u] == Placement::SUM);
    let sum = |v: &Value| matches!(sound[*v].op, Op::Reduce { kind: Reduce::Sum, .. });
    let v = sound.values().filter(sum).find(partial).expect("a sum over a dim that is split");
    let Op::Reduce { kind, .. } = &mut sharded.graph.body[v].op else { unreachable!("it is a sum") };
    *kind = Reduce::Max;
    let wrong = |body: &Body, w: Value| algebra(if w == v { &sound } else { body }, w);
    let refused = verify::sharded::verify_by(&sharded, wrong).map_err(|e| e.invariant);
    assert_eq!(refused, Err(Invariant::RowHolds));
}
