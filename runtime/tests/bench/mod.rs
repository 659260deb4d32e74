//! An artifact of the fixture's job with what it needs to run.

use crate::fixture::{self, Split};
use runtime::artifact::{self, AcceptedArtifacts, Artifact, ArtifactParts, KernelEntry, Kernels};
use runtime::data::{Encoding, Spec};
use runtime::executor::PersistentId;
use runtime::launch::{self, Existing, RunError, RunEvent, RunOptions, StepMetrics, Summary};
use runtime::target::{Processor, Target};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use tempfile::TempDir;

/// A directory with an artifact, data and initial weights.
pub struct Bench {
    pub dir: Directory,
    pub artifact: Artifact,
}

/// One that goes with its bench, or another process's.
pub enum Directory {
    Own(TempDir),
    Given(PathBuf),
}

impl Directory {
    pub fn path(&self) -> &Path {
        match self {
            Directory::Own(dir) => dir.path(),
            Directory::Given(path) => path,
        }
    }
}

pub const STEPS: u64 = 4;

pub fn npy(path: &Path, shape: &str, data: &[f64]) {
    let mut header = format!("{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}");
    while (header.len() + 11) % 64 != 0 {
        header.push(' ');
    }
    header.push('\n');
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((header.len() as u16).to_le_bytes());
    bytes.extend(header.bytes());
    bytes.extend(data.iter().flat_map(|x| x.to_le_bytes()));
    fs::write(path, bytes).unwrap();
}

impl Bench {
    pub fn new(split: &Split) -> Bench {
        Bench::with(fixture::job(split))
    }

    pub fn with(job: ir::program::Job) -> Bench {
        Bench::of(&ArtifactParts { job: &job, target: &Target::Reference, kernels: None, dumps: &[], sign: None })
    }

    /// With native kernels in a library of its own.
    pub fn native(job: &ir::program::Job, split: &Split) -> Bench {
        Bench::native_with(job, split, "")
    }

    /// As [`native`](Bench::native), with more in the library.
    pub fn native_with(job: &ir::program::Job, split: &Split, more: &str) -> Bench {
        let (rows, columns) = (fixture::BATCH / split.dp / split.microbatches, (fixture::INS + 1) / split.tp);
        let dir = tempfile::tempdir().unwrap();
        let (source, library) = (dir.path().join("kernels.rs"), dir.path().join("kernels.so"));
        let sizes = format!("const ROWS: usize = {rows};\nconst COLUMNS: usize = {columns};\n");
        fs::write(&source, sizes + include_str!("../fixture/kernels.rs") + more).unwrap();
        let arguments = ["--edition", "2024", "--crate-type", "cdylib", "-C", "panic=abort", "-A", "warnings", "-o"];
        let compiler = std::env::var_os("RUSTC").unwrap_or("rustc".into());
        assert!(Command::new(compiler).args(arguments).arg(&library).arg(&source).status().unwrap().success());
        let entry = |name: &str, tiles| KernelEntry { name: name.into(), tiles, scratch_bytes: 64, launch: None };
        let entries = [
            entry("k_product", rows),
            entry("k_loss", 1),
            entry("k_gradient", columns),
            entry("k_squares", 1),
            entry("k_root", 1),
            entry("k_update", columns),
        ];
        let library = fs::read(&library).unwrap();
        let kernels = Some(Kernels { entries: &entries, library: Some(&library), ptx: &[], cubins: &[] });
        let target = Target::Cpu(Processor { cpu: "x86-64".into(), features: String::new() });
        Bench::of(&ArtifactParts { job, target: &target, kernels, dumps: &[], sign: None })
    }

    pub fn of(parts: &ArtifactParts) -> Bench {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("linear.mcc");
        // The verifier rejects some of the fixture's jobs, but ranks do not ask it either.
        let id = artifact::write(&out, parts).unwrap().id();
        let bench = Bench { artifact: artifact::read(&out, &AcceptedArtifacts::Verified(&id)).unwrap(), dir: Directory::Own(dir) };
        bench.weights("init", &fixture::params()["w"].data);
        bench.feed(STEPS);
        bench
    }

    /// What another process has made and fed.
    pub fn at(dir: PathBuf) -> Bench {
        let out = dir.join("linear.mcc");
        let id = blake3::hash(&fs::read(out.join("manifest.json")).unwrap()).to_hex();
        Bench { artifact: artifact::read(&out, &AcceptedArtifacts::Verified(&id)).unwrap(), dir: Directory::Given(dir) }
    }

    /// The same batch for so many steps.
    pub fn feed(&self, steps: u64) {
        let inputs = fixture::inputs();
        let data = |name: &str| inputs[name].data.repeat(steps as usize);
        npy(&self.path("x.npy"), &format!("({steps}, {}, {})", fixture::BATCH, fixture::INS), &data("x"));
        npy(&self.path("t.npy"), &format!("({steps}, {})", fixture::BATCH), &data("t"));
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn weights(&self, name: &str, values: &[f64]) {
        let layout = runtime::weights::SafetensorsLayout::new(&self.artifact.job);
        let file = fs::File::create(self.path(name)).unwrap();
        layout.start(&file).unwrap();
        layout.write(&file, PersistentId::Param(0), 0, values).unwrap();
    }

    pub fn options(&self) -> RunOptions {
        let spec = |name: &str| Spec { input: Some(name.into()), file: self.path(&format!("{name}.npy")), encoding: Encoding::Text };
        RunOptions {
            data: vec![spec("x"), spec("t")],
            init: vec![self.path("init")],
            threads_per_rank: Some(1),
            existing: Existing::Replace,
            patience: Duration::from_secs(1),
            ..RunOptions::new(env!("CARGO_BIN_EXE_mcc-rank").into())
        }
    }

    /// The saved bytes and the progress of a whole run.
    pub fn train(&self) -> (Vec<u8>, Vec<StepMetrics>) {
        let options = RunOptions { save_weights: Some(self.path("out")), metrics: Some(self.path("metrics")), ..self.options() };
        let mut steps = vec![];
        let summary = run(&self.artifact, &options, &mut |p| steps.push(p.clone())).unwrap();
        assert_eq!(summary.steps, STEPS);
        (fs::read(self.path("out")).unwrap(), steps)
    }

    pub fn fails(&self, options: &RunOptions, progress: &mut dyn FnMut(&StepMetrics)) -> String {
        let error = run(&self.artifact, options, progress).unwrap_err().to_string();
        assert_eq!(children(), Vec::<u32>::new(), "{error}");
        error
    }
}

/// Runs an artifact; `progress` is told of every step.
pub fn run(artifact: &Artifact, options: &RunOptions, progress: &mut dyn FnMut(&StepMetrics)) -> Result<Summary, RunError> {
    launch::run(artifact, options, &mut |event| match event {
        RunEvent::Step(step) => progress(step),
        RunEvent::Note(_) | RunEvent::Saved(_) | RunEvent::Ranks(_) => {}
    })
}

/// Processes that this test's thread has started and that are still there. (Other tests run beside it.)
pub fn children() -> Vec<u32> {
    let list = fs::read_to_string(format!("/proc/self/task/{}/children", rustix::thread::gettid().as_raw_nonzero())).unwrap_or_default();
    list.split_whitespace().filter_map(|p| p.parse().ok()).collect()
}

pub const TRAINING: f64 = 1e-3;
