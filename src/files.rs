//! What a command line names: looked at before anything starts, and refused with what it is and which command takes
//! it.

use crate::cli::RunArgs;
use crate::failure::Failure;
use crate::misuse::misuse;
use anyhow::anyhow;
use frontend::names::nearest;
use runtime::checkpoint;
use runtime::data::{Encoding, Spec};
use runtime::paths::{is_own, same};
use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

/// What a command expects at a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpectedInput {
    Text,
    Artifact,
    /// A safetensors file under mcc's names, or a checkpoint of a run or of PyTorch's.
    Weights,
    /// As [`ExpectedInput::Weights`], with the step it was saved after.
    State,
    /// A checkpoint of a run, or a directory of such.
    Saves,
    /// As [`ExpectedInput::Saves`], or a checkpoint of PyTorch's.
    Listed,
    Data,
    /// A directory of Hugging Face's.
    Checkpoint,
    /// A launch script of Megatron-LM.
    Script,
    /// What `mcc run --log-dir` writes, or a file of metrics.
    Log,
    Metrics,
}

/// Value of `--resume` by which a run resumes from the directory of `--save`.
pub const AUTO: &str = "auto";

/// What a path leads to, as far as commands tell things apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PathKind {
    Artifact,
    /// A checkpoint of Hugging Face's.
    Checkpoint,
    /// A checkpoint of a run.
    Saved,
    /// A checkpoint of PyTorch's.
    Distributed,
    /// Checkpoints of a run, each a directory.
    Saves,
    /// A directory that is none of these.
    Directory,
    EmptyDirectory,
    Text,
    Weights,
    EmptyFile,
    /// A file of which no more is known, or something that is read as one, such as a pipe.
    File,
}

impl PathKind {
    fn of(path: &Path) -> std::io::Result<PathKind> {
        let metadata = fs::metadata(path)?;
        if metadata.is_dir() {
            let has = |name: &str| path.join(name).is_file();
            let is_empty = fs::read_dir(path)?.next().is_none();
            return Ok(match () {
                () if is_empty => PathKind::EmptyDirectory,
                () if has("manifest.json") => PathKind::Artifact,
                () if has(checkpoint::MANIFEST) => PathKind::Saved,
                () if has(checkpoint::METADATA) => PathKind::Distributed,
                () if checkpoint::steps(path).is_ok_and(|steps| !steps.is_empty()) => PathKind::Saves,
                // The directory of an import has a config.json too, beside its model.mdl.
                () if ["config.json", "model.safetensors", "model.safetensors.index.json"].into_iter().any(has) && !has("model.mdl") => {
                    PathKind::Checkpoint
                }
                () => PathKind::Directory,
            });
        }
        if !metadata.is_file() {
            return Ok(PathKind::File);
        }
        let ends = |ending: &str| path.extension().is_some_and(|e| e.eq_ignore_ascii_case(ending));
        let mut start = vec![];
        File::open(path)?.take(9).read_to_end(&mut start)?;
        // A safetensors file begins with the length of its header, which is a JSON object.
        let header = start.first_chunk().map(|n| u64::from_le_bytes(*n));
        let is_safetensors = header.is_some_and(|n| n < metadata.len()) && start.get(8) == Some(&b'{');
        Ok(match () {
            () if start.is_empty() => PathKind::EmptyFile,
            () if is_safetensors || ends("safetensors") => PathKind::Weights,
            () if ends("mdl") => PathKind::Text,
            () => PathKind::File,
        })
    }

    fn says(self) -> &'static str {
        match self {
            PathKind::Artifact => "an artifact",
            PathKind::Checkpoint => "a checkpoint of Hugging Face's",
            PathKind::Saved => "a checkpoint of a run",
            PathKind::Distributed => "a checkpoint of PyTorch's (DCP)",
            PathKind::Saves => "a directory of checkpoints",
            PathKind::Directory => "a directory",
            PathKind::EmptyDirectory => "an empty directory",
            PathKind::Text => "a model text",
            PathKind::Weights => "a file of weights",
            PathKind::EmptyFile => "an empty file",
            PathKind::File => "a file",
        }
    }

    /// The commands that take it; none where it is nothing in particular.
    fn taken_by(self, path: &Path) -> Option<String> {
        let newest = || checkpoint::steps(path).ok()?.first().map(|step| path.join(format!("step-{step}")));
        let (artifact, dir, path) = (path.with_extension("mcc"), path, path.display());
        match self {
            PathKind::Artifact => {
                Some(format!("`mcc run {path} --data FILE` trains it (`--save-weights` saves its weights), `mcc dump {path}` shows its programs"))
            }
            PathKind::Checkpoint => Some(format!("`mcc import hf {path} -o OUT` makes a model text and weights of it")),
            PathKind::Saved => Some(format!(
                "`mcc run ARTIFACT --load {path}` goes on from it, `mcc run ARTIFACT --init {path}` begins with its weights, `mcc export hf {path} -o DIR` makes a foreign checkpoint of it"
            )),
            PathKind::Distributed => Some(format!(
                "`mcc checkpoint convert {path} DIR` makes a checkpoint of it if mcc wrote it, `mcc checkpoint convert {path} FILE.safetensors` a file of its tensors"
            )),
            PathKind::Saves => Some(format!(
                "`mcc run ARTIFACT --load {path}` goes on from the newest of them, `{}`, which `mcc export hf` and `--init` take",
                newest().unwrap_or_else(|| dir.to_path_buf()).display()
            )),
            PathKind::Text => {
                Some(format!("`mcc compile {path} -o {}` makes an artifact of it, `--model {path}` names it beside weights", artifact.display()))
            }
            PathKind::Weights => Some(format!(
                "`mcc run ARTIFACT --init {path}` starts from it (`--resume` where it was written by `--save-state`), `mcc export hf {path} -o DIR` makes a foreign checkpoint of it"
            )),
            PathKind::Directory | PathKind::EmptyDirectory | PathKind::EmptyFile | PathKind::File => None,
        }
    }
}

impl ExpectedInput {
    /// Whether it is looked into further; what is wrong with its content is said by whoever reads it.
    fn takes(self, kind: PathKind) -> bool {
        match self {
            // The parser reports an empty file or prose, with the position of the error.
            ExpectedInput::Text => matches!(kind, PathKind::Text | PathKind::File | PathKind::EmptyFile),
            ExpectedInput::Artifact => kind == PathKind::Artifact,
            ExpectedInput::Weights | ExpectedInput::State => matches!(kind, PathKind::Weights | PathKind::Saved | PathKind::Distributed),
            ExpectedInput::Saves => matches!(kind, PathKind::Saved | PathKind::Saves),
            ExpectedInput::Listed => matches!(kind, PathKind::Saved | PathKind::Saves | PathKind::Distributed),
            // Any text is data, even a model's; other files are known by their first bytes.
            ExpectedInput::Data => matches!(kind, PathKind::Text | PathKind::Weights | PathKind::File | PathKind::EmptyFile),
            ExpectedInput::Checkpoint => kind == PathKind::Checkpoint,
            ExpectedInput::Script => matches!(kind, PathKind::File | PathKind::EmptyFile),
            ExpectedInput::Log => matches!(kind, PathKind::Directory | PathKind::EmptyDirectory | PathKind::File | PathKind::EmptyFile),
            ExpectedInput::Metrics => matches!(kind, PathKind::File | PathKind::EmptyFile),
        }
    }

    fn says(self) -> &'static str {
        match self {
            ExpectedInput::Text => "a model text",
            ExpectedInput::Artifact => "an artifact",
            ExpectedInput::Weights => "a file of weights (safetensors)",
            ExpectedInput::Saves | ExpectedInput::Listed => "a directory of checkpoints",
            ExpectedInput::State => "the state of a run (safetensors)",
            ExpectedInput::Data => "a file of data",
            ExpectedInput::Checkpoint => "a checkpoint of Hugging Face's",
            ExpectedInput::Script => "a launch script",
            ExpectedInput::Log => "the log of a run",
            ExpectedInput::Metrics => "a file of metrics",
        }
    }

    /// Whether each rank opens it by itself.
    fn is_of_ranks(self) -> bool {
        match self {
            ExpectedInput::Weights | ExpectedInput::State => true,
            // Readers of data report such a link themselves.
            ExpectedInput::Saves
            | ExpectedInput::Listed
            | ExpectedInput::Data
            | ExpectedInput::Text
            | ExpectedInput::Artifact
            | ExpectedInput::Checkpoint
            | ExpectedInput::Script => false,
            ExpectedInput::Log | ExpectedInput::Metrics => false,
        }
    }

    /// The noun for messages that say there is no such thing.
    fn noun(self) -> &'static str {
        match self {
            ExpectedInput::Text
            | ExpectedInput::Weights
            | ExpectedInput::State
            | ExpectedInput::Data
            | ExpectedInput::Script
            | ExpectedInput::Metrics => "file",
            ExpectedInput::Artifact => "artifact",
            ExpectedInput::Checkpoint | ExpectedInput::Saves | ExpectedInput::Listed | ExpectedInput::Log => "directory",
        }
    }

    /// How the user gets such a thing; `path` is where it was expected.
    fn made_by(self, path: &Path) -> String {
        let shown = path.display();
        match self {
            ExpectedInput::Text => "a model text is a file such as `models/gpt2.mdl`".into(),
            ExpectedInput::Artifact if path.exists() => "an artifact is the directory that `mcc compile` writes, with a manifest.json".into(),
            ExpectedInput::Artifact => format!("`mcc compile MODEL.mdl -o {shown}` writes one"),
            ExpectedInput::Saves | ExpectedInput::Listed => "`mcc run --save` writes one".into(),
            ExpectedInput::Weights => "`mcc run --save-weights` writes such, and `mcc import hf` makes one of foreign weights".into(),
            ExpectedInput::State => "`mcc run --save-state` writes one".into(),
            ExpectedInput::Log => "`mcc run --log-dir` writes one from its first step on".into(),
            ExpectedInput::Metrics => "`mcc run --metrics` writes one".into(),
            ExpectedInput::Data => "data are a text, or token ids in a .bin or .npy".into(),
            ExpectedInput::Script => "a launch script starts `pretrain_gpt.py`, as those of Megatron-LM's examples do".into(),
            ExpectedInput::Checkpoint if path.exists() => "such a directory has a config.json, and a model.safetensors or its shards".into(),
            ExpectedInput::Checkpoint => {
                let local = path.file_name().map_or_else(|| "model".into(), |n| n.to_string_lossy());
                format!("mcc downloads nothing: `hf download {shown} --local-dir {local}` does, then `mcc import hf {local}` takes the directory")
            }
        }
    }
}

/// Looks at a path that a command line names by itself.
///
/// # Errors
/// Nothing is there, it cannot be read, or it is something else than what is wanted.
pub fn look(path: &Path, expected: ExpectedInput) -> Result<(), Failure> {
    named(None, path, expected)
}

/// As [`look`], for a flag's value.
///
/// # Errors
/// As [`look`].
pub fn look_for(flag: &str, path: &Path, expected: ExpectedInput) -> Result<(), Failure> {
    named(Some(flag), path, expected)
}

fn named(flag: Option<&str>, path: &Path, expected: ExpectedInput) -> Result<(), Failure> {
    let shown = path.display();
    let name = flag.map_or_else(|| format!("`{shown}`"), |flag| format!("`{flag} {shown}`"));
    let made = || expected.made_by(path);
    let why = match PathKind::of(path) {
        Ok(kind) if expected.takes(kind) && expected.is_of_ranks() && is_own(path) => {
            format!(
                "{name} is a link to what this process alone has open, and every rank reads the file by itself: write it to a file first (`cat {shown} > FILE`)"
            )
        }
        Ok(kind) if expected.takes(kind) => return Ok(()),
        Ok(kind) => {
            let inside = || within(path, expected).map(|p| format!("did you mean `{}`?", p.display()));
            let way_out = kind.taken_by(path).or_else(inside).unwrap_or_else(made);
            let is = if kind == PathKind::File { String::new() } else { format!("{}, ", kind.says()) };
            format!("{name} is {is}not {}: {way_out}", expected.says())
        }
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            let near = beside(path, expected).map(|p| format!("did you mean `{}`?", p.display()));
            let begins = if flag == Some("--load") { "; `--save DIR --resume auto` begins where there is none" } else { "" };
            format!("{name}: there is no such {}; {}{begins}", expected.noun(), near.unwrap_or_else(made))
        }
        Err(e) if e.kind() == ErrorKind::PermissionDenied => {
            format!("{name}: this user may not read it; `ls -ld {shown}` shows who may, `chmod` changes it")
        }
        Err(e) => format!("{name} cannot be read: {e}"),
    };
    Err(anyhow!(why).into())
}

/// The names in a directory, sorted, with what they are.
fn entries(dir: &Path) -> Vec<(String, PathKind)> {
    let all = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut out: Vec<_> = all.filter_map(|e| Some((e.file_name().into_string().ok()?, PathKind::of(&e.path()).ok()?))).collect();
    out.sort_by(|a, b| a.0.cmp(&b.0));
    out
}

/// What is meant by a directory, if one thing in it is surely such.
fn within(dir: &Path, expected: ExpectedInput) -> Option<PathBuf> {
    let sure = |kind| expected.takes(kind) && !matches!(kind, PathKind::File | PathKind::EmptyFile);
    match &entries(dir).into_iter().filter(|(_, kind)| sure(*kind)).collect::<Vec<_>>()[..] {
        [(only, _)] => Some(dir.join(only)),
        _ => None,
    }
}

/// What has a similar name in the same directory, whatever its ending.
fn beside(path: &Path, expected: ExpectedInput) -> Option<PathBuf> {
    let parent = path.parent()?;
    let here = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
    let names: Vec<String> = entries(here).into_iter().filter(|(_, kind)| expected.takes(*kind)).map(|(name, _)| name).collect();
    let stem = |name: &str| Path::new(name).file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let stems: Vec<String> = names.iter().map(|n| stem(n)).collect();
    let near = nearest(&stem(path.file_name()?.to_str()?), stems.iter().map(String::as_str))?;
    let at = stems.iter().position(|s| s == near)?;
    Some(parent.join(&names[at]))
}

/// The flags of what a run writes, with their files.
fn written(args: &RunArgs) -> impl Iterator<Item = (&'static str, &Path)> {
    let files = [("--save-weights", &args.save_weights), ("--save-state", &args.save_state), ("--metrics", &args.metrics), ("--trace", &args.trace)];
    files.into_iter().filter_map(|(flag, file)| Some((flag, file.as_deref()?)))
}

/// Whether what a run writes is nothing that it reads, and nothing that it writes a second time. What it begins with
/// it may replace at its end: weights and states take their names when they are complete.
///
/// # Errors
/// The first two flags of one file.
pub fn apart(args: &RunArgs) -> Result<(), Failure> {
    let specs = |list: &[String]| list.iter().map(|s| Spec::parse(s, Encoding::Text).file).collect::<Vec<_>>();
    // The words may contain weights of a blend, whose paths name no file.
    let sets = |words: &[String]| words.iter().flat_map(|w| <[PathBuf; 2]>::from(data::indexed::paths(Path::new(w)))).collect::<Vec<_>>();
    let read = [
        ("--data", specs(&args.data)),
        ("--valid-data", specs(&args.valid_data)),
        ("--data-path", sets(&args.data_path)),
        ("--train-data-path", sets(&args.train_data_path)),
        ("--valid-data-path", sets(&args.valid_data_path)),
        ("--test-data-path", sets(&args.test_data_path)),
        ("--init", args.init.clone()),
        ("--resume", Vec::from_iter(args.resume.clone())),
        ("--trust", args.trust.clone()),
        ("--secret-file", Vec::from_iter(args.secret_file.clone())),
    ];
    let begins = |flag: &str| matches!(flag, "--init" | "--resume");
    let saves = |flag: &str| matches!(flag, "--save-weights" | "--save-state");
    let mut others: Vec<(&str, PathBuf)> = read.into_iter().flat_map(|(flag, files)| files.into_iter().map(move |f| (flag, f))).collect();
    if let Some(dir) = &args.save
        && dir.starts_with(&args.artifact)
    {
        return Err(misuse!("`--save {}` is in the artifact, which would be damaged by it; name a directory outside", dir.display()).into());
    }
    for (flag, file) in written(args) {
        let shown = file.display();
        if let Some((other, _)) = others.iter().find(|(other, f)| same(f, file) && !(begins(other) && saves(flag))) {
            return Err(misuse!("`{flag} {shown}` would destroy what `{other}` names: it is the same file; name another one").into());
        }
        if file.starts_with(&args.artifact) && args.artifact.is_dir() {
            return Err(misuse!("`{flag} {shown}` is in the artifact, which would be damaged by it; name a file outside").into());
        }
        others.push((flag, file.to_path_buf()));
    }
    Ok(())
}

/// What a run reads, and where it writes.
///
/// # Errors
/// The first file that is wrong.
pub fn of_run(args: &RunArgs) -> Result<(), Failure> {
    for (flag, specs) in [("--data", &args.data), ("--valid-data", &args.valid_data)] {
        specs.iter().try_for_each(|s| look_for(flag, &Spec::parse(s, Encoding::Text).file, ExpectedInput::Data))?;
    }
    args.init.iter().try_for_each(|file| look_for("--init", file, ExpectedInput::Weights))?;
    args.resume.iter().filter(|file| file.as_os_str() != AUTO).try_for_each(|file| look_for("--resume", file, ExpectedInput::State))?;
    args.load.iter().try_for_each(|dir| look_for("--load", dir, ExpectedInput::Saves))?;
    if let Some(dir) = &args.save {
        let shown = dir.display();
        if dir.extension().is_some_and(|e| e == "safetensors") || dir.is_file() {
            return Err(anyhow!(
                "`--save {shown}`: it names a directory of checkpoints, one for each step that is saved; `--save-weights {shown}` writes weights alone to a file"
            )
            .into());
        }
        if let Ok(kind @ (PathKind::Artifact | PathKind::Checkpoint | PathKind::Saved | PathKind::Distributed)) = PathKind::of(dir) {
            return Err(anyhow!("`--save {shown}` is {}; name a directory for checkpoints, such as `checkpoints`", kind.says()).into());
        }
    }
    for (flag, file) in written(args) {
        let parent = file.parent().filter(|p| !p.as_os_str().is_empty());
        if let Some(parent) = parent.filter(|p| !p.is_dir()) {
            let (file, parent) = (file.display(), parent.display());
            return Err(anyhow!("`{flag} {file}`: there is no directory `{parent}`; `mkdir -p {parent}` makes it").into());
        }
        if file.is_dir() {
            return Err(anyhow!("`{flag} {0}` is a directory; name a file, such as `{0}/{1}`", file.display(), flag.trim_start_matches('-')).into());
        }
    }
    Ok(())
}
