//! Runs `mcc` in a directory of its own.

use npyz::WriterBuilder;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;
use tempfile::TempDir;

/// What a command left.
pub struct CommandOutput {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl CommandOutput {
    pub fn new(o: Output) -> CommandOutput {
        CommandOutput { code: o.status.code(), stdout: String::from_utf8_lossy(&o.stdout).into(), stderr: String::from_utf8_lossy(&o.stderr).into() }
    }

    #[track_caller]
    pub fn succeeds(self) -> CommandOutput {
        assert_eq!(self.code, Some(0), "{}{}", self.stdout, self.stderr);
        self
    }

    /// Refused as a wrong command line.
    #[track_caller]
    pub fn refused(self) -> CommandOutput {
        assert_eq!(self.code, Some(2), "{}{}", self.stdout, self.stderr);
        self
    }

    /// Refused as a user's mistake: exit code 1, all of these in the message, and no panic.
    #[track_caller]
    pub fn fails_with(self, words: &[&str]) -> CommandOutput {
        self.fails(1, words)
    }

    /// As [`CommandOutput::fails_with`], of a command line that is wrong by itself: exit code 2.
    #[track_caller]
    pub fn misuses_with(self, words: &[&str]) -> CommandOutput {
        self.fails(2, words)
    }

    #[track_caller]
    pub fn fails(self, code: i32, words: &[&str]) -> CommandOutput {
        assert_eq!(self.code, Some(code), "{}{}", self.stdout, self.stderr);
        assert!(!self.stderr.contains("panicked"), "{}", self.stderr);
        for w in words {
            assert!(self.stderr.contains(w), "no `{w}` in: {}", self.stderr);
        }
        self
    }
}

/// A directory for one test, gone at its end.
pub struct Dir(TempDir);

impl Dir {
    pub fn new() -> Dir {
        Dir(tempfile::tempdir().expect("a directory"))
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        fs::write(self.path(name), content).expect("written");
    }

    /// Names of all entries, sorted.
    pub fn entries(&self) -> Vec<String> {
        let mut names: Vec<String> =
            fs::read_dir(self.0.path()).expect("a directory").map(|e| e.expect("an entry").file_name().into_string().expect("UTF-8")).collect();
        names.sort();
        names
    }

    /// `mcc` in this directory. Kernels are cached for all tests, and none of the user's environment counts.
    pub fn command<S: AsRef<str>>(&self, arguments: impl IntoIterator<Item = S>) -> Command {
        let mut c = Command::new(env!("CARGO_BIN_EXE_mcc"));
        c.current_dir(self.0.path()).args(arguments.into_iter().map(|a| a.as_ref().to_string()));
        c.env("MCC_CACHE", Path::new(env!("CARGO_TARGET_TMPDIR")).join("kernels")).env("MCC_RANK", rank_binary());
        for name in
            ["RANK", "WORLD_SIZE", "SLURM_STEP_ID", "SLURM_JOB_ID", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MASTER_ADDR", "MASTER_PORT", "COLUMNS"]
        {
            c.env_remove(name);
        }
        c
    }

    /// `mcc` in this directory, started by a program with these words before it.
    pub fn within(&self, words: &[&str], line: &str) -> Command {
        let models = models().display().to_string();
        let run = self.command(line.split_whitespace().map(|w| w.replace("{models}", &models)));
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).arg(run.get_program()).args(run.get_args()).current_dir(self.path(""));
        for (name, value) in run.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command
    }

    /// `mcc` that hears the signals which whoever runs the tests may ignore, as a shell does of what it runs in the
    /// background.
    pub fn hearing(&self, line: &str) -> Command {
        self.within(&["env", "--default-signal=TERM,INT,HUP,USR1"], line)
    }

    pub fn mcc<S: AsRef<str>>(&self, arguments: impl IntoIterator<Item = S>) -> CommandOutput {
        CommandOutput::new(self.command(arguments).output().expect("mcc starts"))
    }

    /// As [`Dir::mcc`], of words with blanks between; `{models}` stands for the models of this repository.
    pub fn line(&self, line: &str) -> CommandOutput {
        let models = models().display().to_string();
        self.mcc(line.split_whitespace().map(|w| w.replace("{models}", &models)))
    }
}

pub fn models() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/models"))
}

/// `mcc-rank` beside `mcc`. Cargo builds it for a test of the whole workspace, but not for the first one of this
/// package alone.
fn rank_binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        let profile = Path::new(env!("CARGO_BIN_EXE_mcc")).parent().expect("a profile's directory");
        let rank = profile.join("mcc-rank");
        if !rank.exists() {
            let mut c = Command::new(env!("CARGO"));
            c.args(["build", "--quiet", "--package", "runtime", "--bin", "mcc-rank", "--target-dir"])
                .arg(profile.parent().expect("a target directory"));
            if profile.ends_with("release") {
                c.arg("--release");
            }
            assert!(c.status().expect("cargo starts").success(), "mcc-rank does not build");
        }
        rank
    })
}

/// Whole tensors by name, as f32.
pub type Weights = BTreeMap<String, (Vec<u64>, Vec<f32>)>;

pub fn save_weights(path: &Path, weights: &Weights) {
    let bytes: Vec<(&String, Vec<usize>, Vec<u8>)> =
        weights.iter().map(|(n, (s, d))| (n, s.iter().map(|s| *s as usize).collect(), d.iter().flat_map(|x| x.to_le_bytes()).collect())).collect();
    let views = bytes.iter().map(|(n, s, b)| (n, TensorView::new(Dtype::F32, s.clone(), b).expect("sizes fit")));
    safetensors::serialize_to_file(views, None, path).expect("written");
}

pub fn load_weights(path: &Path) -> Weights {
    let bytes = fs::read(path).expect("saved weights");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    file.iter()
        .map(|(name, t)| {
            assert_eq!(t.dtype(), Dtype::F32);
            let data = t.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().expect("four bytes"))).collect();
            (name.to_string(), (t.shape().iter().map(|s| *s as u64).collect(), data))
        })
        .collect()
}

/// Writes a `.npy` file.
pub fn save_array<T: npyz::AutoSerialize>(path: &Path, shape: &[u64], data: impl IntoIterator<Item = T>) {
    let file = std::io::BufWriter::new(fs::File::create(path).expect("created"));
    let mut out = npyz::WriteOptions::new().default_dtype().shape(shape).writer(file).begin_nd().expect("begun");
    out.extend(data).expect("written");
    out.finish().expect("finished");
}

/// The lines of a metrics file.
pub fn metrics(path: &Path) -> Vec<serde_json::Value> {
    fs::read_to_string(path).expect("metrics").lines().map(|l| serde_json::from_str(l).expect("JSON")).collect()
}
