//! `mcc gpu-check`, with the emulator as the device.

use crate::mcc::Dir;

#[test]
fn the_checks_of_a_gpu_pass_in_the_emulator_and_are_written_down() {
    let dir = Dir::new();
    for target in ["sm_80", "sm_90a"] {
        let said = dir.line(&format!("gpu-check --device emulated --target {target} --quick --seed 7 --output {target}")).succeeds().stdout;
        assert!(said.contains(&format!("emulator, {target}, seed 7")), "{said}");
        let file = std::fs::read_to_string(dir.path(&format!("{target}/gpu-check.json"))).expect("written");
        let report: serde_json::Value = serde_json::from_str(&file).expect("JSON");
        assert_eq!((&report["measured"], &report["gpu"]), (&false.into(), &serde_json::Value::Null));
        let kernels = report["kernels"]["kernels"].as_array().expect("a list");
        for family in ["product", "attention", "gradients of attention", "loops", "sums by index"] {
            assert!(kernels.iter().any(|k| k["family"] == family), "no {family}");
        }
        for kernel in kernels {
            assert_eq!(kernel["right"], true, "{kernel}");
            assert!(kernel["verdict"]["launches"].as_u64() > Some(0), "{kernel}");
        }
        let steps = report["steps"]["rows"].as_array().expect("a list");
        assert!(!steps.is_empty() && steps.iter().all(|s| s["right"] == true), "{steps:?}");
        let timed = report["benchmarks"]["kernels"].as_array().expect("a list");
        for kind in ["product", "attention", "bytes"] {
            assert!(timed.iter().any(|k| k["shape"]["kind"] == kind && k["seconds"].as_f64() > Some(0.0)), "no {kind}");
        }
        let text = std::fs::read_to_string(dir.path(&format!("{target}/gpu-check.md"))).expect("written");
        assert!(text.contains("Not measured: there is no GPU.") && !text.contains("WRONG"), "{text}");
    }
}

#[test]
fn without_a_gpu_nothing_is_checked_and_that_is_said() {
    let dir = Dir::new();
    if let Err(e) = runtime::gpu::cuda::probe() {
        dir.line("gpu-check --output out").fails_with(&["nothing was checked", &e.to_string(), "--device emulated"]);
        assert_eq!(dir.entries(), Vec::<String>::new());
    }
}
