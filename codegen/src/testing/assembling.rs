//! Every kernel that tests make for GPUs is assembled too.

use crate::ptxas::{Assembled, Ptxas};
use crate::target::Target;
use std::sync::OnceLock;

/// The assembler, fetched once into the build's directory; nothing without a network, which is said, and is an error
/// in CI.
pub fn ptxas() -> Option<&'static Ptxas> {
    static PTXAS: OnceLock<Option<Ptxas>> = OnceLock::new();
    let find = || {
        let test = std::env::current_exe().expect("a test has an executable");
        // The test lies at target/debug/deps/codegen-0123.
        let directory = test.ancestors().nth(3).expect("tests lie in the build's directory").join("cuda-13.5.37");
        let found = Ptxas::fetched(&directory);
        if let Err(why) = &found {
            assert!(std::env::var_os("CI").is_none_or(|v| v != "true"), "ptxas cannot be had:\n{why}");
            // Writing to stderr directly gets past the capture of test output.
            use std::io::Write;
            let _ = writeln!(std::io::stderr(), "NOT CHECKED: no GPU kernel is assembled, since ptxas cannot be had:\n{why}");
        }
        found.ok()
    };
    PTXAS.get_or_init(find).as_ref()
}

/// Assembles PTX; it must need no stack and draw no warning.
pub fn assemble(ptx: &str, target: &Target) -> Option<Assembled> {
    let assembled = ptxas()?.assemble(ptx, &target.cpu).unwrap_or_else(|e| panic!("{e}\n{ptx}"));
    assert_eq!((assembled.stack_bytes, assembled.spill_bytes), (0, 0), "stack and spills for {}\n{ptx}", target.cpu);
    assert!(assembled.warnings.is_empty(), "{:?}\n{ptx}", assembled.warnings);
    Some(assembled)
}
