use super::*;
use crate::fixture::{self, Split};
use crate::target::Processor;
use ir::{dim, graph, kernel, mesh, model, op, program};
use serde_reflection::{Tracer, TracerConfig};

fn artifact(dir: &Path) -> PathBuf {
    let job = fixture::job(&Split { microbatches: 2, pp: 1, dp: 2, tp: 1 });
    let out = dir.join("linear.mcc");
    let dumps = [("program.txt".to_owned(), "text\n".to_owned())];
    write(&out, &Parts { job: &job, target: &Target::Reference, kernels: None, dumps: &dumps }).unwrap();
    out
}

fn refused(out: &Path) -> String {
    read(out).unwrap_err().to_string()
}

#[test]
fn what_was_written_reads_back() {
    let dir = tempfile::tempdir().unwrap();
    let out = artifact(dir.path());
    let read = read(&out).unwrap();
    assert_eq!(read.job, fixture::job(&Split { microbatches: 2, pp: 1, dp: 2, tp: 1 }));
    assert_eq!(read.manifest.ranks, 2);
    assert_eq!(fs::read_to_string(out.join("dumps/program.txt")).unwrap(), "text\n");
}

#[test]
fn writing_twice_replaces_and_leaves_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    artifact(dir.path());
    let out = artifact(dir.path());
    read(&out).unwrap();
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn a_directory_of_someone_else_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("thesis.txt"), "mine").unwrap();
    let job = fixture::job(&Split { microbatches: 1, pp: 1, dp: 1, tp: 1 });
    let error = write(dir.path(), &Parts { job: &job, target: &Target::Reference, kernels: None, dumps: &[] }).unwrap_err();
    assert!(error.to_string().contains("is not an artifact; it was left alone"), "{error}");
    assert!(refused(dir.path()).contains("is not an artifact: it has no manifest.json"));
}

/// An artifact for GPUs, of kernels that all have this launch.
fn for_gpus(dir: &Path, launch: Option<Launch>) -> PathBuf {
    let job = fixture::job(&Split { microbatches: 1, pp: 1, dp: 1, tp: 1 });
    let entry = |k: usize| KernelEntry { name: format!("k_{k}"), tiles: 1, scratch_bytes: 0, launch: launch.clone() };
    let entries: Vec<KernelEntry> = (0..job.kernels.len()).map(entry).collect();
    let modules = vec![b"// PTX".as_slice(); entries.len()];
    let ptx: &[&[u8]] = if launch.is_some() { &modules } else { &[] };
    let kernels = Some(Kernels { entries: &entries, library: launch.is_none().then_some(b"".as_slice()), ptx });
    let out = dir.join("gpu.mcc");
    write(&out, &Parts { job: &job, target: &Target::Gpu { arch: "sm_80".into(), host: None }, kernels, dumps: &[] }).unwrap();
    out
}

#[test]
fn a_kernel_for_gpus_has_a_module_and_a_launch_that_can_be() {
    let dir = tempfile::tempdir().unwrap();
    let parameters = vec![ir::launch::Parameter::Argument(0)];
    let launch = Launch { grid: 1, block: 32, shared_bytes: 0, scratch_bytes: 0, maps: vec![], parameters };
    let out = for_gpus(dir.path(), Some(launch.clone()));
    let artifact = read(&out).unwrap();
    assert_eq!(artifact.kernels[0].launch, Some(launch.clone()));
    assert_eq!(artifact.ptx(&artifact.kernels[1]).unwrap(), "// PTX");
    for_gpus(dir.path(), Some(Launch { grid: 0, ..launch }));
    assert!(refused(&out).contains("kernel `k_0` has 0 blocks, not 1 to"), "{}", refused(&out));
    for_gpus(dir.path(), None);
    assert!(refused(&out).contains("kernel `k_0` has nothing about its launch"), "{}", refused(&out));
}

/// Kernels of the host have code for a CPU, which the target names, and no launch.
#[test]
fn a_kernel_of_the_host_has_code_for_a_cpu() {
    let mut job = fixture::job(&Split { microbatches: 1, pp: 1, dp: 1, tp: 1 });
    job.kernels[0].on = Space::Host;
    let launch = Launch { grid: 1, block: 32, shared_bytes: 0, scratch_bytes: 0, maps: vec![], parameters: vec![ir::launch::Parameter::Argument(0)] };
    let sound = |host: Option<Processor>, launched: bool| {
        let entry = |k: usize| KernelEntry {
            name: format!("k_{k}"),
            tiles: 1,
            scratch_bytes: 0,
            launch: (launched || job.kernels[k].on == Space::Device).then(|| launch.clone()),
        };
        let entries: Vec<KernelEntry> = (0..job.kernels.len()).map(entry).collect();
        let target = Target::Gpu { arch: "sm_80".into(), host };
        runnable(Path::new("kernels.json"), &job, &entries, &target).map_err(|e| e.to_string())
    };
    let here = || Some(Processor { cpu: "x86-64-v3".into(), features: String::new() });
    assert_eq!(sound(here(), false), Ok(()));
    assert_eq!(sound(None, false), Err("`kernels.json` is damaged: kernel `k_0` has no CPU to run on".into()));
    assert_eq!(sound(here(), true), Err("`kernels.json` is damaged: kernel `k_0` has a launch, though a CPU runs it".into()));
}

#[test]
fn every_flipped_byte_of_the_job_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let out = artifact(dir.path());
    let file = out.join("job.bin");
    let bytes = fs::read(&file).unwrap();
    for at in (0..bytes.len()).step_by(97) {
        let mut damaged = bytes.clone();
        damaged[at] ^= 1;
        fs::write(&file, damaged).unwrap();
        assert!(refused(&out).contains("job.bin` is damaged: its hash is"));
    }
    fs::write(&file, &bytes[1..]).unwrap();
    assert!(refused(&out).contains("job.bin` is damaged: it has"));
    fs::remove_file(&file).unwrap();
    assert!(refused(&out).contains("job.bin"));
}

/// Behind a manifest that vouches for it.
#[test]
fn a_forged_job_is_an_error_and_no_panic() {
    let plain = postcard::to_stdvec(&fixture::job(&Split { microbatches: 2, pp: 1, dp: 2, tp: 1 })).unwrap();
    for at in 0..plain.len() {
        let mut forged = plain.clone();
        forged[at] = forged[at].wrapping_add(1 + (at % 7) as u8);
        if let Ok(job) = postcard::from_bytes(&forged) {
            let _ = check::check(&job);
        }
    }
}

/// By the types alone. A job written with other types would be read as something else, and only by chance be refused.
#[test]
fn a_layout_of_jobs_has_a_format_of_its_own() {
    let mut tracer = Tracer::new(TracerConfig::default().is_human_readable(false));
    macro_rules! trace {
        ($($ty:ty),*) => { $(tracer.trace_simple_type::<$ty>().unwrap();)* };
    }
    trace!(Job, op::Op, op::DType, op::Unary, op::Binary, op::Compare, op::Reduce, op::AttentionGrad, op::Reshard, op::Collective, op::Scalar);
    trace!(
        dim::Base,
        dim::Order,
        graph::Phase,
        graph::Init,
        graph::Feed,
        kernel::Family,
        mesh::Axis,
        model::Optimizer,
        model::Decay,
        model::LossScale
    );
    trace!(program::BodyKind, program::Stream, program::Action, program::Arena, program::Space, program::Content, program::Holds);
    // An enum that is not among them is an error that names it.
    let registry = tracer.registry().unwrap();
    for name in ["Op", "Unary", "ProgramBody"] {
        assert!(registry.contains_key(name), "{:?}", registry.keys());
    }
    let hash = blake3::hash(&serde_json::to_vec(&registry).unwrap()).to_hex();
    let (format, layout) = (4, "5bc267954515332c");
    assert_eq!(
        (FORMAT, &hash[..16]),
        (format, layout),
        "job.bin has another layout than format {format}: raise `FORMAT`, then write both here (of a type or field that only got another name, the hash)"
    );
}

#[test]
fn another_format_is_named_with_its_version() {
    let dir = tempfile::tempdir().unwrap();
    let out = artifact(dir.path());
    let manifest = out.join("manifest.json");
    let text = fs::read_to_string(&manifest).unwrap();
    fs::write(&manifest, text.replace(&format!("\"format\": {FORMAT}"), "\"format\": 9")).unwrap();
    assert!(refused(&out).contains("has format 9, written by mcc"));
    fs::write(&manifest, &text[..100]).unwrap();
    assert!(refused(&out).contains("manifest.json` is damaged"));
    fs::write(&manifest, text.replace("job.bin", "../job.bin")).unwrap();
    assert!(refused(&out).contains("it names a file `../job.bin` elsewhere"));
}

#[test]
fn code_for_another_cpu_is_refused_with_what_is_missing() {
    let dir = tempfile::tempdir().unwrap();
    let out = artifact(dir.path());
    let manifest = out.join("manifest.json");
    let text = fs::read_to_string(&manifest).unwrap();
    let foreign = r#""kind": "cpu", "cpu": "bdver4", "features": "+tbm,+prfchw""#;
    fs::write(&manifest, text.replace(r#""kind": "reference""#, foreign)).unwrap();
    assert!(refused(&out).contains("does not list kernels.so"));
    let target = Target::Cpu(Processor { cpu: "bdver4".into(), features: "+tbm,+prfchw,-avx512f".into() });
    if !std::is_x86_feature_detected!("tbm") {
        assert_eq!(target.check().unwrap_err().to_string(), "its kernels need a CPU with tbm, which this one lacks");
    }
}
