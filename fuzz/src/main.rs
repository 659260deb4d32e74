//! Searches for bytes that break a target: `FUZZ_TARGET=texts fuzz CORPUS.. [-max_total_time=SECONDS]`, or writes the
//! seeds of all targets: `FUZZ_SEEDS=DIR fuzz`. The options are libFuzzer's.

#![cfg_attr(not(test), no_main)]

use libfuzzer_sys::fuzz_target;
use std::process::exit;
use std::sync::OnceLock;

static TARGET: OnceLock<fuzz::Check> = OnceLock::new();

fuzz_target!(
    init: {
        if let Some(dir) = std::env::var_os("FUZZ_SEEDS") {
            if let Err(e) = fuzz::seeds::write(dir.as_ref()) {
                eprintln!("{e}");
                exit(1);
            }
            exit(0);
        }
        let name = std::env::var("FUZZ_TARGET").unwrap_or_default();
        let Some(target) = fuzz::target(&name) else {
            let known: Vec<&str> = fuzz::TARGETS.iter().map(|t| t.0).collect();
            eprintln!("FUZZ_TARGET is `{name}`; there are {}", known.join(", "));
            exit(2);
        };
        TARGET.get_or_init(|| target);
    },
    |bytes: &[u8]| {
        if let Some(target) = TARGET.get() {
            target(bytes);
        }
    }
);
