//! Faults of the importers ([`ir::faults`]), switched on one by one: a test has to fail of each.

use crate::{bench::Bench, copies_that_a_text_speaks_of_come_back_as_they_were, dtypes, first_step};
use ir::faults::{in_sources, watch};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

fn comes_back(name: &str) {
    let bench = Bench::new(name);
    bench.import().unwrap();
    bench.export().unwrap();
    bench.same("in/model.safetensors", "back/model.safetensors");
    bench.same("in/config.json", "back/config.json");
}

/// Each fault, and a test that fails of it.
const NOTICED: [(&str, fn()); 10] = [
    ("convert.layout.first", || comes_back("deepseek_mtp")),
    ("convert.layout.index", || comes_back("mixtral")),
    ("convert.layout.alternative", || first_step::agrees("deepseek_mtp")),
    ("convert.copies.unequal", copies_that_a_text_speaks_of_come_back_as_they_were),
    ("convert.copies.absent", copies_that_a_text_speaks_of_come_back_as_they_were),
    ("convert.layers.beyond", copies_that_a_text_speaks_of_come_back_as_they_were),
    ("convert.fp8.last", dtypes::fp8_with_scales_per_block_is_imported_as_what_it_stands_for_and_exported_as_bf16),
    ("convert.mxfp4.half", dtypes::experts_in_mxfp4_are_imported_as_what_they_stand_for),
    ("convert.copy.bf16", dtypes::tensors_come_back_in_the_type_that_they_had),
    ("convert.long.scale", || first_step::agrees("phi3_long")),
];

#[test]
fn a_test_fails_of_each_fault() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut found: Vec<&str> = in_sources(root, &["convert"]).iter().map(|f| f.name).collect();
    let mut listed: Vec<&str> = NOTICED.iter().map(|(name, _)| *name).collect();
    found.sort_unstable();
    listed.sort_unstable();
    assert_eq!(found, listed);
    for (name, test) in NOTICED {
        let passes = |fault| watch(fault, || catch_unwind(AssertUnwindSafe(test)).is_ok());
        let (right, reached) = passes(None);
        assert!(right && reached.contains(name), "{name} is not on the way of its test");
        assert!(!passes(Some(name)).0, "nothing fails of {name}");
    }
}
