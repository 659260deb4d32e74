//! What no text can say, and verifiers refuse all the same.

use crate::folder;
use ir::module::Module;
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
    for (invariant, why) in BEYOND_TEXTS {
        let module = broken(*invariant);
        let all = said(&module);
        assert!(all.contains(&Some(*invariant)) && !all.contains(&None), "{invariant}: {all:?}");
        // The text of such a module is none, or that of a sound one.
        let read = parse_module(&print_module(&module));
        assert!(read.is_err() || read.is_ok_and(|m| said(&m).is_empty()), "{invariant}: {why}");
    }
}
