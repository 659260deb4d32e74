use super::read::runnable;
use super::*;
use crate::check;
use crate::fixture::{self, Split};
use crate::signature::{self, PublicKey, SecretKey};
use crate::target::{Processor, Target};
use ir::op::DType;
use ir::program::{Job, Space, TableEntry};
use ir::{dim, graph, kernel, mesh, model, op, program, reason};
use serde_reflection::{Tracer, TracerConfig};
use std::fs;
use std::os::unix::fs::PermissionsExt;

fn artifact(dir: &Path) -> PathBuf {
    let job = fixture::job(&Split { microbatches: 2, pp: 1, dp: 2, tp: 1 });
    let out = dir.join("linear.mcc");
    let dumps = [("program.txt".to_owned(), "text\n".to_owned())];
    write(&out, &ArtifactParts { job: &job, target: &Target::Reference, kernels: None, dumps: &dumps, sign: None }).unwrap();
    out
}

fn refused(out: &Path) -> String {
    read(out, &AcceptedArtifacts::Anyones).unwrap_err().to_string()
}

#[test]
fn what_was_written_reads_back() {
    let dir = tempfile::tempdir().unwrap();
    let out = artifact(dir.path());
    let read = read(&out, &AcceptedArtifacts::Anyones).unwrap();
    assert_eq!(read.job, fixture::job(&Split { microbatches: 2, pp: 1, dp: 2, tp: 1 }));
    assert_eq!(read.manifest.ranks, 2);
    assert_eq!(fs::read_to_string(out.join("dumps/program.txt")).unwrap(), "text\n");
}

#[test]
fn writing_twice_replaces_and_leaves_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    artifact(dir.path());
    let out = artifact(dir.path());
    read(&out, &AcceptedArtifacts::Anyones).unwrap();
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn what_killed_processes_left_goes_and_what_others_have_stays() {
    let dir = tempfile::tempdir().unwrap();
    let leave = |name: &str, file: &str| {
        fs::create_dir(dir.path().join(name)).unwrap();
        fs::write(dir.path().join(name).join(file), "{}").unwrap();
        fs::File::open(dir.path().join(name)).unwrap()
    };
    for (name, file) in [(".linear.mcc.left.tmp", JOB), (".linear.mcc.17.tmp", MANIFEST)] {
        leave(name, file);
    }
    let kept = [(".linear.mcc.mine.tmp", "thesis.txt"), (".linear.mcc.old", JOB), (".other.mcc.left.tmp", JOB), (".linear.mcc.written.tmp", JOB)];
    let open = kept.map(|(name, file)| leave(name, file));
    open[3].lock().unwrap();
    artifact(dir.path());
    let mut names: Vec<String> = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    let mut wanted: Vec<&str> = kept.iter().map(|k| k.0).chain(["linear.mcc"]).collect();
    wanted.sort_unstable();
    assert_eq!(names, wanted);
}

#[test]
fn an_artifact_that_is_given_up_leaves_the_former_one() {
    let dir = tempfile::tempdir().unwrap();
    let out = artifact(dir.path());
    let before = read(&out, &AcceptedArtifacts::Anyones).unwrap().id;
    let job = fixture::job(&Split { microbatches: 1, pp: 1, dp: 1, tp: 1 });
    for files in 0..2 {
        let asked = std::cell::Cell::new(0);
        let given_up = || asked.replace(asked.get() + 1) == files;
        let dumps = [("program.txt".to_owned(), "text\n".to_owned())];
        let error = write_unless(&out, &ArtifactParts { job: &job, target: &Target::Reference, kernels: None, dumps: &dumps, sign: None }, &given_up);
        assert!(matches!(error, Err(ArtifactError::GivenUp)));
        assert_eq!(read(&out, &AcceptedArtifacts::Anyones).unwrap().id, before);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}

#[test]
fn a_directory_of_someone_else_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("thesis.txt"), "mine").unwrap();
    let job = fixture::job(&Split { microbatches: 1, pp: 1, dp: 1, tp: 1 });
    let error = write(dir.path(), &ArtifactParts { job: &job, target: &Target::Reference, kernels: None, dumps: &[], sign: None }).unwrap_err();
    assert!(error.to_string().contains("is not an artifact; it was left alone"), "{error}");
    assert!(refused(dir.path()).contains("is not an artifact: it has no manifest.json"));
}

/// A launch that every GPU can do, of a kernel with one operand.
fn launch() -> Launch {
    let parameters = vec![ir::launch::Parameter::Argument(0)];
    Launch { grid: 1, resident: None, cluster: 1, block: 32, shared_bytes: 0, scratch_bytes: 0, maps: vec![], parameters }
}

/// An artifact for GPUs, of kernels that all have this launch.
fn for_gpus(dir: &Path, launch: Option<Launch>) -> PathBuf {
    with_cubins(dir, launch, &[])
}

/// The same, with as many cubins as there are kernels, of these bytes, if there are some.
fn with_cubins(dir: &Path, launch: Option<Launch>, cubin: &[u8]) -> PathBuf {
    let job = fixture::job(&Split { microbatches: 1, pp: 1, dp: 1, tp: 1 });
    let entry = |k: usize| KernelEntry { name: format!("k_{k}"), tiles: 1, scratch_bytes: 0, launch: launch.clone() };
    let entries: Vec<KernelEntry> = (0..job.kernels.len()).map(entry).collect();
    let modules = vec![b"// PTX".as_slice(); entries.len()];
    let cubins = vec![cubin; if cubin.is_empty() { 0 } else { entries.len() }];
    let ptx: &[&[u8]] = if launch.is_some() { &modules } else { &[] };
    let kernels = Some(Kernels { entries: &entries, library: launch.is_none().then_some(b"".as_slice()), ptx, cubins: &cubins });
    let out = dir.join("gpu.mcc");
    write(&out, &ArtifactParts { job: &job, target: &Target::Gpu { arch: "sm_80".into(), host: None }, kernels, dumps: &[], sign: None }).unwrap();
    out
}

#[test]
fn a_kernel_for_gpus_has_a_module_and_a_launch_that_can_be() {
    let dir = tempfile::tempdir().unwrap();
    let launch = launch();
    let out = for_gpus(dir.path(), Some(launch.clone()));
    let artifact = read(&out, &AcceptedArtifacts::Anyones).unwrap();
    assert_eq!(artifact.kernels[0].launch, Some(launch.clone()));
    assert_eq!(artifact.ptx(&artifact.kernels[1]), "// PTX");
    for_gpus(dir.path(), Some(Launch { grid: 0, ..launch }));
    assert!(refused(&out).contains("kernel `k_0` has 0 blocks, not 1 to"), "{}", refused(&out));
    for_gpus(dir.path(), None);
    assert!(refused(&out).contains("kernel `k_0` has nothing about its launch"), "{}", refused(&out));
}

/// Assembled code is hashed and looked at as all else is; there is some of every kernel or of none.
#[test]
fn cubins_that_are_damaged_or_missing_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let launch = launch();
    let out = for_gpus(dir.path(), Some(launch.clone()));
    let artifact = read(&out, &AcceptedArtifacts::Anyones).unwrap();
    assert_eq!(artifact.cubin(&artifact.kernels[0]), None);
    let cubin = [b"\x7fELF\x02\x01".as_slice(), &[0; 12], &[190, 0, 7, 7]].concat();
    let out = with_cubins(dir.path(), Some(launch.clone()), &cubin);
    let artifact = read(&out, &AcceptedArtifacts::Anyones).unwrap();
    assert_eq!(artifact.cubin(&artifact.kernels[1]), Some(cubin.as_slice()));
    let file = out.join("cubin/k_1.cubin");
    for at in 0..cubin.len() {
        let mut damaged = cubin.clone();
        damaged[at] ^= 1;
        fs::write(&file, &damaged).unwrap();
        assert!(refused(&out).contains("k_1.cubin` is damaged: its hash is"), "{}", refused(&out));
    }
    fs::write(&file, &cubin[..8]).unwrap();
    assert!(refused(&out).contains("k_1.cubin` is damaged: it has 8 bytes"), "{}", refused(&out));
    fs::write(&file, &cubin).unwrap();
    reseal(&out, |m| drop(m.files.remove("cubin/k_1.cubin")));
    assert!(refused(&out).contains("it does not list cubin/k_1.cubin"), "{}", refused(&out));
    // This file is for another machine, though its hash is right.
    let mut native = cubin;
    native[18] = 62;
    assert!(refused(&with_cubins(dir.path(), Some(launch), &native)).contains("k_0.cubin` is damaged: it is no cubin"));
}

/// Kernels of the host have code for a CPU, which the target names, and no launch.
#[test]
fn a_kernel_of_the_host_has_code_for_a_cpu() {
    let mut job = fixture::job(&Split { microbatches: 1, pp: 1, dp: 1, tp: 1 });
    job.kernels[0].on = Space::Host;
    let launch = launch();
    let sound = |host: Option<Processor>, launched: bool| {
        let entry = |k: usize| KernelEntry {
            name: format!("k_{k}"),
            tiles: 1,
            scratch_bytes: 0,
            launch: (launched || job.kernels[k].on == Space::Device).then(|| launch.clone()),
        };
        let entries: Vec<KernelEntry> = (0..job.kernels.len()).map(entry).collect();
        let target = Target::Gpu { arch: "sm_80".into(), host };
        runnable(&job, &entries, &target)
    };
    let here = || Some(Processor { cpu: "x86-64-v3".into(), features: String::new() });
    assert_eq!(sound(here(), false), Ok(()));
    assert_eq!(sound(None, false), Err("kernel `k_0` has no CPU to run on".into()));
    assert_eq!(sound(here(), true), Err("kernel `k_0` has a launch, though a CPU runs it".into()));
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

/// The manifest vouches for the forged job.
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

/// With padding alone, no rank would hold an element that exists.
#[test]
fn a_dim_of_which_nothing_exists_is_refused() {
    let mut job = fixture::job(&Split { microbatches: 1, pp: 1, dp: 1, tp: 1 });
    let name = job.params[0].name.clone();
    let padded = job.params[0].dims[0].padded;
    job.params[0].dims[0].size = 0;
    let error = check::check(&job).unwrap_err().to_string();
    assert!(error.contains(&format!("`{name}`: dim ")) && error.ends_with(&format!("has 0 elements, padded {padded}")), "{error}");
}

/// The hash is of the types alone. A job written with other types would be read as something else, and be refused
/// only by chance.
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
        graph::InputDefault,
        kernel::Family,
        mesh::Axis,
        model::Optimizer,
        model::Decay,
        model::LossScale,
        model::MuonScale,
        reason::AvoidedBy
    );
    trace!(program::BodyKind, program::Stream, program::Action, program::Arena, program::Space, program::Content, program::ParamRole);
    // `registry` fails and names any enum that is not traced above.
    let registry = tracer.registry().unwrap();
    for name in ["Op", "Unary", "ProgramBody"] {
        assert!(registry.contains_key(name), "{:?}", registry.keys());
    }
    let hash = blake3::hash(&serde_json::to_vec(&registry).unwrap()).to_hex();
    let (format, layout) = (19, "8c6bb484ec324068");
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
    fs::write(&manifest, text.replace(&format!("\"format\": {FORMAT}"), &format!("\"format\": {}", FORMAT + 1))).unwrap();
    assert!(refused(&out).contains(&format!("has format {}, written by mcc", FORMAT + 1)));
    fs::write(&manifest, &text[..100]).unwrap();
    assert!(refused(&out).contains("manifest.json` is damaged"));
}

/// Changes a manifest and gives it the hash that belongs to the change.
fn reseal(out: &Path, change: impl FnOnce(&mut Manifest)) {
    let (mut manifest, _) = manifest::read(out).unwrap();
    change(&mut manifest);
    fs::write(out.join(MANIFEST), manifest.sealed().bytes()).unwrap();
}

#[test]
fn every_change_of_the_manifest_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let out = artifact(dir.path());
    let file = out.join(MANIFEST);
    let bytes = fs::read(&file).unwrap();
    for at in 0..bytes.len() {
        for bit in [1, 0x20, 0x80] {
            let mut damaged = bytes.clone();
            damaged[at] ^= bit;
            fs::write(&file, damaged).unwrap();
            let error = refused(&out);
            assert!(error.contains("manifest.json` is damaged") || error.contains("has format"), "byte {at}: {error}");
        }
    }
    let text = String::from_utf8(bytes).unwrap();
    let own_hash = "its own hash is";
    let cases = [
        (text.replace("0.1.0", "0.9.9"), own_hash),
        (text.replace("\"reference\"", "\"gpu\", \"arch\": \"sm_80\""), "not written as mcc writes it"),
        (text.replace("{\n  \"format\"", "{\n  \"note\": 1,\n  \"format\""), "unknown field `note`"),
        (text.replace("{\n  \"format\"", "{\n  \"model\": \"x\",\n  \"format\""), "duplicate field `model`"),
        (text.replace("    \"job.bin\"", "    \"job.bin\": {\"bytes\": 1, \"hash\": \"\"},\n    \"job.bin\""), "not written as mcc writes it"),
        (text.replace("\n  ", "\n "), "not written as mcc writes it"),
    ];
    for (changed, wanted) in cases {
        assert_ne!(changed, text, "{wanted}");
        fs::write(&file, changed).unwrap();
        assert!(refused(&out).contains(wanted), "{}", refused(&out));
    }
}

#[test]
fn a_manifest_is_held_against_what_is_there() {
    let dir = tempfile::tempdir().unwrap();
    let change = |change: &dyn Fn(&mut Manifest)| {
        let out = artifact(dir.path());
        reseal(&out, change);
        refused(&out)
    };
    let moved = |m: &mut Manifest, to: &str| {
        let file = m.files.remove(JOB).unwrap();
        m.files.insert(JOB.into(), file.clone());
        m.files.insert(to.into(), file);
    };
    assert!(change(&|m| moved(m, "../job.bin")).contains("it names a file `../job.bin` elsewhere"));
    assert!(change(&|m| moved(m, "extra")).contains("it lists `extra`, which is no file of an artifact"));
    assert!(change(&|m| moved(m, "dumps/gone.txt")).contains("gone.txt`: No such file"));
    assert!(change(&|m| m.ranks += 1).contains("it describes another job"));
    assert!(change(&|m| m.model = "other".into()).contains("it describes another job"));
    assert!(change(&|m| drop(m.files.remove(JOB))).contains("it does not list job.bin"));
    let foreign = Processor { cpu: "x86-64".into(), features: "+6aes".into() };
    assert!(change(&|m| m.target = Target::Cpu(foreign.clone())).contains("with 6aes, of which this mcc does not know"));
}

#[test]
fn a_signature_is_looked_at_before_anything_else() {
    let dir = tempfile::tempdir().unwrap();
    let out = artifact(dir.path());
    let key = |name: &str, text: &str| {
        let path = dir.path().join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        path
    };
    let secret = SecretKey::read(&key("secret.pem", signature::tests::SECRET)).unwrap();
    let public = PublicKey::read(&key("public.pem", signature::tests::PUBLIC)).unwrap();
    let other = PublicKey::read(&key("other.pem", signature::tests::OTHER)).unwrap();
    let trusting = |keys: &[PublicKey]| read(&out, &AcceptedArtifacts::SignedBy(keys)).map(|a| a.id).map_err(|e| e.to_string());
    assert!(trusting(std::slice::from_ref(&public)).unwrap_err().contains("is not signed, and --trust takes what is signed alone"));
    let job = fixture::job(&Split { microbatches: 2, pp: 1, dp: 2, tp: 1 });
    write(&out, &ArtifactParts { job: &job, target: &Target::Reference, kernels: None, dumps: &[], sign: Some(&secret) }).unwrap();
    let id = trusting(&[other.clone(), public.clone()]).unwrap();
    assert!(trusting(&[other]).unwrap_err().contains("is signed with a key that --trust does not name"));
    // A rank accepts the artifact that its launcher has verified, and no other.
    read(&out, &AcceptedArtifacts::Verified(&id)).unwrap();
    assert!(read(&out, &AcceptedArtifacts::Verified("0")).unwrap_err().to_string().contains("is another artifact than the launcher has"));
    // The signature is refused before the manifest could show any damage.
    reseal(&out, |m| m.mcc = "0.9.9".into());
    fs::write(out.join(JOB), "").unwrap();
    assert!(trusting(std::slice::from_ref(&public)).unwrap_err().contains("is signed with a key that --trust does not name"));
    fs::write(out.join(SIGNATURE), "short").unwrap();
    assert!(trusting(&[public]).unwrap_err().contains("a signature has 64 bytes, it has 5"));
}

#[test]
fn what_is_no_artifact_is_said_to_be_none() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("m.mdl");
    fs::write(&file, "model").unwrap();
    assert!(refused(&file).ends_with("m.mdl` is not an artifact: it has no manifest.json"));
}

/// The two artifacts are equal otherwise.
#[test]
fn an_artifact_is_told_by_its_id_from_one_with_another_file() {
    let dir = tempfile::tempdir().unwrap();
    let id = |out: &Path| read(out, &AcceptedArtifacts::Anyones).unwrap().id;
    let out = artifact(dir.path());
    let first = id(&out);
    reseal(&out, |m| drop(m.files.remove("dumps/program.txt")));
    assert_ne!(id(&out), first);
}

#[test]
fn what_follows_a_job_or_unpacks_to_too_much_is_refused() {
    let job = fixture::job(&Split { microbatches: 2, pp: 1, dp: 2, tp: 1 });
    assert_eq!(packed::unpack(&packed::pack(&job).unwrap()).unwrap(), job);
    // A table like T5's relative positions of 1,024 queries and keys packs to less than a hundredth of its size.
    let table = TableEntry { name: "positions".into(), dtype: DType::I32, dims: vec![], data: vec![31.0; 1024 * 1024] };
    let large = Job { tables: vec![table], ..job.clone() };
    assert!(packed::unpack(&packed::pack(&large).unwrap()).unwrap() == large);
    let mut plain = postcard::to_stdvec(&job).unwrap();
    plain.push(0);
    assert_eq!(packed::unpack(&zstd::encode_all(plain.as_slice(), 3).unwrap()).unwrap_err(), "1 bytes follow the job");
    let bomb = zstd::encode_all(vec![0; 128 << 20].as_slice(), 19).unwrap();
    assert!(packed::unpack(&bomb).is_err_and(|e| e.contains("unpacks to more than") || e.contains("memory")), "{:?}", packed::unpack(&bomb));
}

#[test]
fn code_for_another_cpu_is_refused_with_what_is_missing() {
    let dir = tempfile::tempdir().unwrap();
    let out = artifact(dir.path());
    reseal(&out, |m| m.target = Target::Cpu(Processor { cpu: "x86-64".into(), features: "+sse2".into() }));
    assert!(refused(&out).contains("does not list kernels.so"));
    let missing = if std::is_x86_feature_detected!("tbm") { "avx512vp2intersect" } else { "tbm" };
    reseal(&out, |m| m.target = Target::Cpu(Processor { cpu: "x86-64".into(), features: format!("+{missing}") }));
    assert!(refused(&out).contains(&format!("cannot run on this machine: its kernels need a CPU with {missing}, which this one lacks")));
}
