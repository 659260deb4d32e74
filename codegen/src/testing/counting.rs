//! What a kernel does on a CPU, counted: how often each function of its code is called.

use super::{KernelLibrary, run_loaded, two_ranges};
use crate::object::compile_changed;
use crate::target::Target;
use inkwell::module::{Linkage, Module};
use ir::kernel::Kernel;
use std::collections::BTreeMap;

/// How often each function that the kernel's code has beside its entry is called, by its name. The code is what is
/// released, but for a counter that each of these functions begins by raising.
pub fn calls(kernel: &Kernel, target: &Target, inputs: &[Vec<f64>]) -> BTreeMap<String, u64> {
    let mut names = vec![];
    let compiled = compile_changed(kernel, target, |module| names = raise_counters(module, &kernel.name()));
    let loaded = KernelLibrary::of(compiled.expect("the kernel compiles"));
    run_loaded(&loaded, kernel, inputs, &[], 0.0, &[], &two_ranges);
    let count = |name: &String| {
        // SAFETY: the symbol is a number of 64 bits, which nothing changes any more.
        unsafe { **loaded.library.get::<*const u64>(counter(name).as_bytes()).expect("the counter's symbol") }
    };
    names.iter().map(|name| (name.clone(), count(name))).collect()
}

fn counter(name: &str) -> String {
    format!("calls_{name}")
}

/// Has each function of a module but its entry begin with raising a counter; the functions.
fn raise_counters(module: &Module, entry: &str) -> Vec<String> {
    let functions = module.get_functions().filter(|f| f.count_basic_blocks() > 0).map(|f| (f, f.get_name().to_string_lossy().into_owned()));
    let functions: Vec<_> = functions.filter(|(_, name)| name != entry).collect();
    let context = module.get_context();
    let writer = context.create_builder();
    let number = context.i64_type();
    for (function, name) in &functions {
        let counter = module.add_global(number, None, &counter(name));
        counter.set_initializer(&number.const_zero());
        counter.set_linkage(Linkage::External);
        let first = function.get_first_basic_block().and_then(|block| block.get_first_instruction()).expect("a function with code");
        writer.position_before(&first);
        let place = counter.as_pointer_value();
        let before = writer.build_load(number, place, "").expect("in a block").into_int_value();
        let after = writer.build_int_add(before, number.const_int(1, false), "").expect("in a block");
        writer.build_store(place, after).expect("in a block");
    }
    functions.into_iter().map(|(_, name)| name).collect()
}
