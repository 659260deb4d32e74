//! Parameters: from random numbers or safetensors files, and back to files. Files hold whole f32 tensors under the job's
//! names, so they depend neither on the mesh nor on what its ranks share out.
//!
//! A file from which a run resumes also has the optimizer states, as `state0/NAME`, `state1/NAME`, and says after which step. Every file says which model it
//! is of, with its text and settings ([`Provenance`]).

use crate::checkpoint::not_finite;
use crate::conditions::Conditions;
use crate::device::decode;
use crate::executor::Held;
use crate::host::{Whole, sizes};
use crate::scale::Scaling;
use ir::graph::Init;
use ir::op::DType;
use ir::pattern;
use ir::program::{Job, ParamEntry, Part, Role};
use ir::provenance::{self, Provenance};
use ir::random;
use memmap2::Mmap;
use safetensors::tensor::{Metadata, TensorInfo, TensorView};
use safetensors::{Dtype, SafeTensors};
use serde::{Deserialize, Serialize};
use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Display;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    #[error("`{}`: {cause}", .file.display())]
    Io { file: PathBuf, cause: io::Error },
    #[error("`{}` is not a safetensors file: {what}", .file.display())]
    Malformed { file: PathBuf, what: String },
    /// The first tensors of each kind, how many there are more, and the likely reason.
    #[error("`{}` does not fit the model:{}", .file.display(), .what.iter().map(|w| format!("\n  {w}")).collect::<String>())]
    Mismatch { file: PathBuf, what: Vec<String> },
    #[error("`{}`: element {element} of `{tensor}` is {value}, with which nothing can be trained; take what was saved before it became so", .file.display())]
    NotFinite { file: PathBuf, tensor: String, element: u64, value: f64 },
    #[error("`{}`: element {element} of `{tensor}` is a whole number beyond 2^24 that f32, in which mcc stores all, does not hold exactly: store it in another way, or leave it out", .file.display())]
    Inexact { file: PathBuf, tensor: String, element: u64 },
    /// What is said of a directory.
    #[error("{0}")]
    Checkpoint(String),
    /// Found while it was read.
    #[error("{what}; an earlier checkpoint may be whole")]
    Damaged { what: String },
    #[error("`{}` does not say after which step it was saved, so no run can go on from it: `--init {}` starts a new one from its weights (`--save-state` writes what `--resume` reads)", .file.display(), .file.display())]
    Unmarked { file: PathBuf },
}

/// How far a run has come, and what its random numbers depend on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    /// Steps done.
    pub step: u64,
    pub seed: u64,
    /// Of a run with a dynamic loss scale: what that came to.
    #[serde(default)]
    pub scaling: Option<Scaling>,
    /// Sequences read; if it is not said, as many a step as the run that goes on.
    #[serde(default)]
    pub sequences: Option<u64>,
}

impl Mark {
    /// Sequences read, of a run that has so many a step.
    pub fn read(&self, batch: u64) -> u64 {
        self.sequences.unwrap_or(self.step.saturating_mul(batch))
    }
}

/// What a file's metadata says under [`provenance::KEY`].
#[derive(Clone, Serialize, Deserialize)]
struct About {
    #[serde(flatten)]
    provenance: Provenance,
    /// Of a file that a run resumes from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    run: Option<Mark>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    conditions: Option<Conditions>,
}

/// Bytes of a mark, spaces at its end included: files are laid out before it is known what a run comes to.
const MARK_BYTES: usize = 256;

/// Elements that are read at a time.
const CHUNK: usize = 1 << 16;

fn text(about: &About) -> String {
    serde_json::to_string(about).expect("invariant: plain data with text keys")
}

/// What a header says of its tensors, for its seal.
fn described<'a, N: Display>(tensors: impl IntoIterator<Item = (N, &'a TensorInfo)>) -> Vec<String> {
    tensors.into_iter().map(|(name, i)| format!("{name} {:?} {:?} {:?}", i.dtype, i.shape, i.data_offsets)).collect()
}

/// The parameters of a job, in its order.
fn params(job: &Job) -> impl Iterator<Item = Held> {
    (0..job.params.len() as u32).map(Held::Param)
}

/// The optimizer states that some stage of a job keeps.
fn states(job: &Job) -> BTreeSet<Held> {
    let of_stage = |stage: &ir::program::Stage| {
        let program = &job.programs[stage.program as usize];
        let state = |p: Part| match p.role {
            Role::State(k) => Some(Held::State(stage.params[p.slot as usize], k)),
            Role::Weights | Role::Copy => None,
        };
        program.buffers.iter().flat_map(|b| program.parts(stage, &b.content)).filter_map(state).collect::<Vec<_>>()
    };
    job.stages.iter().flat_map(of_stage).collect()
}

/// The name and sizes of a tensor in files; tables have none.
fn entry(job: &Job, held: Held) -> Option<(String, Vec<u64>)> {
    let param = |p: u32| &job.params[p as usize];
    match held {
        Held::Param(p) => Some((param(p).name.clone(), sizes(&param(p).dims))),
        Held::State(p, k) => Some((format!("state{k}/{}", param(p).name), sizes(&param(p).dims))),
        Held::Table(_) => None,
    }
}

/// What a parameter or optimizer state is called in files; tables are in none.
pub fn name(job: &Job, held: Held) -> Option<String> {
    Some(entry(job, held)?.0)
}

/// The initial values of a parameter, by its name, the seed and each element's index.
struct Random {
    init: Init,
    stream: u64,
}

impl Random {
    fn new(entry: &ParamEntry, seed: u64) -> Random {
        Random { init: entry.init, stream: random::stream(random::key(&entry.name), seed, 0) }
    }
}

impl Whole for Random {
    fn read(&self, at: u64, out: &mut [f64]) {
        match self.init {
            Init::Const(value) => out.fill(value.0),
            Init::Normal(deviation) => {
                out.iter_mut().zip(at..).for_each(|(x, i)| *x = random::normal(self.stream, i) * deviation.0);
            }
        }
    }
}

/// What a job starts from: its parameters and, if it resumes, optimizer states.
pub struct Weights {
    tensors: BTreeMap<Held, Box<dyn Whole>>,
    /// Of those from files: their names, and what was found when they were read.
    files: Vec<(PathBuf, Rc<OnceCell<Wrong>>)>,
}

/// What a run goes on from.
pub struct Resumed {
    pub weights: Weights,
    /// Where it stood.
    pub mark: Mark,
    pub model: Option<Provenance>,
    pub conditions: Option<Conditions>,
}

/// The first that was read and cannot be used.
pub(crate) enum Wrong {
    NotFinite {
        tensor: String,
        element: u64,
        value: f64,
    },
    /// A whole number that f32 does not hold.
    Inexact {
        tensor: String,
        element: u64,
    },
    /// Bytes that are not as they were written.
    Damaged(String),
}

/// A tensor that a file has.
pub(crate) struct Offered {
    pub name: String,
    pub shape: Vec<u64>,
    /// Or what its elements are, if they are none that can be read.
    pub values: Result<Box<dyn Whole>, String>,
}

impl Weights {
    /// Every parameter as its model text says.
    pub fn random(job: &Job, seed: u64) -> Weights {
        let random = job.params.iter().map(|p| Box::new(Random::new(p, seed)) as Box<dyn Whole>);
        Weights { tensors: params(job).zip(random).collect(), files: vec![] }
    }

    /// Every parameter from a file. Optimizer states that it has too are left out.
    ///
    /// # Errors
    /// Tensors that are missing, too many, of another shape or of a dtype that is not f32, f16 or bf16, and the likely reason.
    pub fn open(file: &Path, job: &Job) -> Result<Weights, WeightsError> {
        let wrong = Rc::default();
        let content = stored(file, &wrong)?;
        Weights::fitted(file, content, wrong, job, params(job))
    }

    /// Every parameter and optimizer state from a file, and where its run stood.
    ///
    /// # Errors
    /// As [`Weights::open`]; or the file is none that a run resumes from.
    pub fn resume(file: &Path, job: &Job) -> Result<Resumed, WeightsError> {
        let wrong = Rc::default();
        let content = stored(file, &wrong)?;
        Weights::resumed(file, content, wrong, job)
    }

    /// Parameters and optimizer states of what a file or directory holds, and where its run stood.
    pub(crate) fn resumed(file: &Path, content: Content, wrong: Rc<OnceCell<Wrong>>, job: &Job) -> Result<Resumed, WeightsError> {
        // Weights alone lack every state too; that they are weights alone says more.
        let mark = content.run.ok_or_else(|| WeightsError::Unmarked { file: file.to_path_buf() })?;
        let (model, conditions) = (content.model.clone(), content.conditions.clone());
        Ok(Resumed { weights: Weights::fitted(file, content, wrong, job, params(job).chain(states(job)))?, mark, model, conditions })
    }

    /// Parameters of what files or directories hold together. Those that are in none and fit a pattern of
    /// `drawn` are drawn; gives their names.
    ///
    /// # Errors
    /// As [`Weights::open`]; parameters that two of them have.
    pub(crate) fn together(sources: Vec<Source>, job: &Job, drawn: &[String], seed: u64) -> Result<(Weights, Vec<String>), WeightsError> {
        let (mut from, mut twice, mut files) = (BTreeMap::<String, PathBuf>::new(), vec![], vec![]);
        let mut all = Content { tensors: vec![], run: None, model: None, conditions: None, others: vec![] };
        for Source { file, content, wrong } in sources {
            for tensor in content.tensors {
                match from.get(&tensor.name) {
                    Some(other) if job.params.iter().any(|p| p.name == tensor.name) => {
                        twice.push(format!("`{}` is in `{}`, and in `{}` too", tensor.name, other.display(), file.display()));
                    }
                    // Of states nothing is taken.
                    Some(_) => {}
                    None => {
                        from.insert(tensor.name.clone(), file.clone());
                        all.tensors.push(tensor);
                    }
                }
            }
            all.model = all.model.or(content.model);
            all.others.extend(content.others);
            files.push((file, wrong));
        }
        let names: Vec<String> = files.iter().map(|(file, _)| file.display().to_string()).collect();
        let name = PathBuf::from(names.join("` with `"));
        if !twice.is_empty() {
            return Err(WeightsError::Mismatch { file: name, what: provenance::few(&twice) });
        }
        let is_drawn = |p: &&ParamEntry| !from.contains_key(&p.name) && drawn.iter().any(|pattern| pattern::matches(pattern, &p.name));
        let missing: Vec<&ParamEntry> = job.params.iter().filter(is_drawn).collect();
        all.tensors.extend(missing.iter().map(|p| Offered {
            name: p.name.clone(),
            shape: sizes(&p.dims),
            values: Ok(Box::new(Random::new(p, seed))),
        }));
        let tensors = fitted(&name, all, job, params(job))?;
        Ok((Weights { tensors, files }, missing.iter().map(|p| p.name.clone()).collect()))
    }

    fn fitted(
        file: &Path,
        content: Content,
        wrong: Rc<OnceCell<Wrong>>,
        job: &Job,
        wanted: impl Iterator<Item = Held>,
    ) -> Result<Weights, WeightsError> {
        fitted(file, content, job, wanted).map(|tensors| Weights { tensors, files: vec![(file.to_path_buf(), wrong)] })
    }

    /// A parameter or optimizer state, if it starts from something else than zero.
    pub fn get(&self, held: Held) -> Option<&dyn Whole> {
        self.tensors.get(&held).map(AsRef::as_ref)
    }

    /// Whether all that was read so far was finite, and as it was written.
    ///
    /// # Errors
    /// The first that was not.
    pub fn check(&self) -> Result<(), WeightsError> {
        self.files.iter().try_for_each(|(file, wrong)| sound(file, wrong))
    }
}

/// # Errors
/// What was found wrong with a file when it was read.
pub(crate) fn sound(file: &Path, wrong: &OnceCell<Wrong>) -> Result<(), WeightsError> {
    match wrong.get() {
        None => Ok(()),
        Some(Wrong::NotFinite { tensor, element, value }) => {
            Err(WeightsError::NotFinite { file: file.to_path_buf(), tensor: tensor.clone(), element: *element, value: *value })
        }
        Some(Wrong::Inexact { tensor, element }) => {
            Err(WeightsError::Inexact { file: file.to_path_buf(), tensor: tensor.clone(), element: *element })
        }
        Some(Wrong::Damaged(what)) => Err(WeightsError::Damaged { what: what.clone() }),
    }
}

/// What a file or directory holds, and what is found when it is read.
pub(crate) struct Source {
    pub file: PathBuf,
    pub content: Content,
    pub wrong: Rc<OnceCell<Wrong>>,
}

/// What a file holds.
pub(crate) struct Content {
    pub tensors: Vec<Offered>,
    /// Where its run stood.
    pub run: Option<Mark>,
    pub model: Option<Provenance>,
    pub conditions: Option<Conditions>,
    /// Names of what is no tensor.
    pub others: Vec<String>,
}

/// All that a file holds.
///
/// # Errors
/// It is no safetensors file.
pub(crate) fn stored(file: &Path, wrong: &Rc<OnceCell<Wrong>>) -> Result<Content, WeightsError> {
    let opened = Opened::new(file)?;
    let tensors = opened.offered(wrong)?;
    let (run, model, conditions) = opened.about.map_or((None, None, None), |a| (a.run, Some(a.provenance), a.conditions));
    Ok(Content { tensors, run, model, conditions, others: vec![] })
}

/// Writes whole tensors in f32, as a file from which a run starts, or goes on if it is known where it stood.
///
/// # Errors
/// What the file system says.
pub(crate) fn write_stored<'a>(
    file: &mut File,
    tensors: impl Iterator<Item = (&'a str, &'a [u64], &'a dyn Whole)> + Clone,
    model: Option<&Provenance>,
    run: Option<Mark>,
    conditions: Option<&Conditions>,
) -> io::Result<()> {
    let about = model.map(|model| about_text(&About { provenance: model.clone(), run: None, conditions: conditions.cloned() }, run.as_ref()));
    let (header, _, _) = header(tensors.clone().map(|(name, shape, _)| (name.to_owned(), shape.to_vec())), about);
    file.write_all(&header)?;
    let (mut numbers, mut bytes) = (vec![], vec![]);
    for (_, shape, values) in tensors {
        let elements: u64 = shape.iter().product();
        for from in (0..elements).step_by(CHUNK) {
            numbers.resize((elements - from).min(CHUNK as u64) as usize, 0.0);
            values.read(from, &mut numbers);
            bytes.clear();
            bytes.extend(numbers.iter().flat_map(|x| (*x as f32).to_le_bytes()));
            file.write_all(&bytes)?;
        }
    }
    Ok(())
}

/// A safetensors file.
struct Opened {
    file: PathBuf,
    map: Arc<Mmap>,
    /// None in files that another program has written.
    about: Option<About>,
}

impl Opened {
    fn new(file: &Path) -> Result<Opened, WeightsError> {
        let io = |cause| WeightsError::Io { file: file.to_path_buf(), cause };
        let handle = File::open(file).map_err(io)?;
        // SAFETY: the file is only read; if another process shortens it meanwhile, this one ends.
        let map = Arc::new(unsafe { Mmap::map(&handle) }.map_err(io)?);
        let malformed = |what: String| WeightsError::Malformed { file: file.to_path_buf(), what };
        let (_, header) = SafeTensors::read_metadata(&map).map_err(|e| malformed(e.to_string()))?;
        let about = match header.metadata().as_ref().and_then(|m| m.get(provenance::KEY)) {
            None => None,
            Some(sealed) => {
                let json = provenance::open(sealed, described(header.tensors())).map_err(malformed)?;
                let about = serde_json::from_str(json);
                Some(about.map_err(|e| malformed(format!("what it says of its model cannot be read: {e}")))?)
            }
        };
        Ok(Opened { file: file.to_path_buf(), map, about })
    }

    fn offered(&self, wrong: &Rc<OnceCell<Wrong>>) -> Result<Vec<Offered>, WeightsError> {
        let malformed = |e: safetensors::SafeTensorError| WeightsError::Malformed { file: self.file.clone(), what: e.to_string() };
        let tensors = SafeTensors::deserialize(&self.map).map_err(malformed)?;
        let offer = |(name, view): (String, TensorView)| {
            let shape = view.shape().iter().map(|n| *n as u64).collect();
            let start = view.data().as_ptr() as usize - self.map.as_ptr() as usize;
            let values = match view.dtype() {
                Dtype::F32 | Dtype::F16 | Dtype::BF16 => {
                    let mapped = Mapped { map: self.map.clone(), start, dtype: view.dtype(), name: name.clone(), wrong: wrong.clone() };
                    Ok(Box::new(mapped) as Box<dyn Whole>)
                }
                other => Err(format!("{other:?}")),
            };
            Offered { name, shape, values }
        };
        Ok(tensors.tensors().into_iter().map(offer).collect())
    }
}

/// The tensors that a job wants, of those that a file of this model has.
///
/// # Errors
/// Tensors that are missing, too many or of another shape or dtype, and the likely reason.
fn fitted(file: &Path, content: Content, job: &Job, wanted: impl Iterator<Item = Held>) -> Result<BTreeMap<Held, Box<dyn Whole>>, WeightsError> {
    let (mut missing, mut others, mut found) = (vec![], vec![], BTreeMap::new());
    let mut offered: BTreeMap<String, Offered> = content.tensors.into_iter().map(|o| (o.name.clone(), o)).collect();
    let known: BTreeSet<String> = params(job).chain(states(job)).filter_map(|h| Some(entry(job, h)?.0)).collect();
    let unknown = offered.keys().filter(|n| !known.contains(*n)).chain(&content.others);
    let extra: Vec<String> = unknown.map(|n| format!("`{n}` is not in the model")).collect();
    for (held, (name, sizes)) in wanted.filter_map(|h| Some((h, entry(job, h)?))) {
        match offered.remove(&name) {
            None => missing.push(format!("`{name}` is missing")),
            Some(Offered { shape, .. }) if shape != sizes => others.push(format!("`{name}` is {shape:?}, the model has {sizes:?}")),
            Some(Offered { values: Err(dtype), .. }) => others.push(format!("`{name}` is {dtype}")),
            Some(Offered { values: Ok(values), .. }) => drop(found.insert(held, values)),
        }
    }
    let kinds = [missing, others, extra];
    if kinds.iter().all(Vec::is_empty) {
        return Ok(found);
    }
    let likely = provenance::likely(content.model.as_ref(), &job.model, &job.settings);
    let what = kinds.iter().flat_map(|kind| provenance::few(kind)).chain(likely).collect();
    Err(WeightsError::Mismatch { file: file.to_path_buf(), what })
}

/// A tensor of a mapped file.
struct Mapped {
    map: Arc<Mmap>,
    /// Byte of its first element.
    start: usize,
    dtype: Dtype,
    name: String,
    wrong: Rc<OnceCell<Wrong>>,
}

impl Whole for Mapped {
    fn read(&self, at: u64, out: &mut [f64]) {
        let width = if self.dtype == Dtype::F32 { 4 } else { 2 };
        let bytes = &self.map[self.start + at as usize * width..][..out.len() * width];
        for (x, b) in out.iter_mut().zip(bytes.chunks_exact(width)) {
            *x = match self.dtype {
                Dtype::F32 => f64::from(f32::from_le_bytes(b.try_into().expect("invariant: four bytes"))),
                Dtype::F16 => half::f16::from_le_bytes([b[0], b[1]]).to_f64(),
                _ => half::bf16::from_le_bytes([b[0], b[1]]).to_f64(),
            };
        }
        if let Some(k) = out.iter().position(|x| !x.is_finite()) {
            // The first that is found stays.
            let _ = self.wrong.set(Wrong::NotFinite { tensor: self.name.clone(), element: at + k as u64, value: out[k] });
        }
    }

    fn bytes(&self, at: u64, dtype: DType, out: &mut [u8]) -> bool {
        if (dtype, self.dtype) != (DType::F32, Dtype::F32) {
            return false;
        }
        out.copy_from_slice(&self.map[self.start + at as usize * 4..][..out.len()]);
        if let Some(k) = not_finite(dtype, out) {
            let value = decode(dtype, &out[4 * k..4 * k + 4]);
            let _ = self.wrong.set(Wrong::NotFinite { tensor: self.name.clone(), element: at + k as u64, value });
        }
        true
    }
}

/// What is said of a file, with room for any mark if a run resumes from it.
fn about_text(about: &About, run: Option<&Mark>) -> String {
    let Some(run) = run else { return text(about) };
    let bytes = text(about).len() + MARK_BYTES;
    let text = text(&About { run: Some(*run), ..about.clone() });
    format!("{text:bytes$}")
}

/// The header of a file of f32 tensors, the byte of the first element of each, and the bytes of the file.
fn header(tensors: impl Iterator<Item = (String, Vec<u64>)>, about: Option<String>) -> (Vec<u8>, Vec<u64>, u64) {
    let mut end = 0;
    let (mut infos, mut starts) = (vec![], vec![]);
    for (name, sizes) in tensors {
        let shape: Vec<usize> = sizes.iter().map(|n| *n as usize).collect();
        let start = end;
        end += shape.iter().product::<usize>() * 4;
        starts.push(start as u64);
        infos.push((name, TensorInfo { dtype: Dtype::F32, shape, data_offsets: (start, end) }));
    }
    let about =
        about.map(|about| HashMap::from([(provenance::KEY.to_owned(), provenance::seal(&about, described(infos.iter().map(|(n, i)| (n, i)))))]));
    let metadata = Metadata::new(about, infos).expect("invariant: tensors follow each other");
    let mut text = serde_json::to_vec(&metadata).expect("invariant: plain data with text keys");
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.extend(text);
    let first = header.len() as u64;
    starts.iter_mut().for_each(|s| *s += first);
    (header, starts, first + end as u64)
}

/// Where a job's parameters (and optimizer states) lie in a safetensors file.
pub struct Layout {
    header: Vec<u8>,
    /// Byte of the first element of each tensor.
    starts: BTreeMap<Held, u64>,
    pub bytes: u64,
}

impl Layout {
    /// Of the parameters alone.
    pub fn new(job: &Job) -> Layout {
        Layout::of(job, params(job), text(&About { provenance: Provenance::of(job), run: None, conditions: None }))
    }

    /// Of all that a run resumes from. The mark decides nothing but the header's text.
    pub fn of_run(job: &Job, mark: &Mark, conditions: Option<&Conditions>) -> Layout {
        let about = About { provenance: Provenance::of(job), run: None, conditions: conditions.cloned() };
        Layout::of(job, params(job).chain(states(job)), about_text(&about, Some(mark)))
    }

    fn of(job: &Job, tensors: impl Iterator<Item = Held>, about: String) -> Layout {
        let tensors: Vec<(Held, (String, Vec<u64>))> = tensors.filter_map(|h| Some((h, entry(job, h)?))).collect();
        let (header, starts, bytes) = header(tensors.iter().map(|(_, entry)| entry.clone()), Some(about));
        Layout { starts: tensors.into_iter().map(|(held, _)| held).zip(starts).collect(), bytes, header }
    }

    /// Gives a file its size and header.
    ///
    /// # Errors
    /// What the file system says.
    pub fn start(&self, file: &File) -> io::Result<()> {
        file.set_len(self.bytes)?;
        file.write_all_at(&self.header, 0)
    }

    /// Writes elements of a tensor from row-major index `at` on, if the file has it.
    ///
    /// # Errors
    /// What the file system says.
    pub fn write(&self, file: &File, held: Held, at: u64, values: &[f64]) -> io::Result<()> {
        let Some(start) = self.starts.get(&held) else { return Ok(()) };
        let bytes: Vec<u8> = values.iter().flat_map(|x| (*x as f32).to_le_bytes()).collect();
        file.write_all_at(&bytes, start + at * 4)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{self, Split};

    fn job() -> Job {
        fixture::job(&Split { microbatches: 1, pp: 1, dp: 1, tp: 1 })
    }

    fn values(weights: &Weights) -> Vec<f64> {
        let mut out = vec![0.0; 3];
        weights.get(Held::Param(0)).unwrap().read(0, &mut out);
        out
    }

    #[test]
    fn what_was_written_reads_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("w.safetensors");
        let (job, file) = (job(), File::create_new(&path).unwrap());
        let layout = Layout::new(&job);
        layout.start(&file).unwrap();
        layout.write(&file, Held::Param(0), 1, &[2.0, -3.5]).unwrap();
        assert_eq!(values(&Weights::open(&path, &job).unwrap()), [0.0, 2.0, -3.5]);
    }

    #[test]
    fn what_a_run_resumes_from_has_states_and_says_where_it_stood() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run.safetensors");
        let (job, file) = (job(), File::create_new(&path).unwrap());
        Layout::of_run(&job, &Mark { step: 5, seed: 9, ..Mark::default() }, None).start(&file).unwrap();
        let most = Scaling { bits: u64::MAX, good: u64::MAX, patience: u64::MAX };
        let mark = Mark { step: u64::MAX, seed: u64::MAX, scaling: Some(most), sequences: Some(u64::MAX) };
        let layout = Layout::of_run(&job, &mark, None);
        layout.write(&file, Held::State(0, 0), 2, &[4.0]).unwrap();
        layout.start(&file).unwrap();
        let Resumed { weights, mark: found, .. } = Weights::resume(&path, &job).unwrap();
        assert_eq!(found, mark);
        let mut state = [0.0; 3];
        weights.get(Held::State(0, 0)).unwrap().read(0, &mut state);
        assert_eq!(state, [0.0, 0.0, 4.0]);
        assert!(Weights::open(&path, &job).unwrap().get(Held::State(0, 0)).is_none());
    }

    #[test]
    fn weights_alone_are_nothing_to_resume_from() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("w.safetensors");
        Layout::new(&job()).start(&File::create_new(&path).unwrap()).unwrap();
        let Err(error) = Weights::resume(&path, &job()) else { panic!("it resumed") };
        assert!(error.to_string().contains("w.safetensors` starts a new one from its weights"), "{error}");
    }

    #[test]
    fn random_parameters_depend_on_name_seed_and_index_alone() {
        let (job, mut alone) = (job(), [0.0]);
        let all = values(&Weights::random(&job, 7));
        Weights::random(&job, 7).get(Held::Param(0)).unwrap().read(2, &mut alone);
        assert_eq!(alone[0], all[2]);
        assert_ne!(values(&Weights::random(&job, 8)), all);
        assert_eq!(all[1], random::normal(random::stream(random::key("w"), 7, 0), 1));
    }

    #[test]
    fn all_tensors_that_do_not_fit_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("w.safetensors");
        let mut other = job();
        other.params[0].dims[0].size = 4;
        let mut more = other.params[0].clone();
        more.name = "b".into();
        other.params.push(more);
        other.settings = vec![("ins".into(), "4".into())];
        Layout::new(&other).start(&File::create_new(&path).unwrap()).unwrap();
        let mut here = job();
        here.settings = vec![("ins".into(), "3".into())];
        let Err(error) = Weights::open(&path, &here) else { panic!("it opened") };
        let wanted = "does not fit the model:\n  `w` is [4], the model has [3]\n  `b` is not in the model\n  \
                      the file says that it is of `linear` with other settings: ins = 4 (here 3)";
        assert!(error.to_string().ends_with(wanted), "{error}");
        let mut wanted = job();
        wanted.params[0].name = "u".into();
        let Err(error) = Weights::open(&path, &wanted) else { panic!("it opened") };
        assert!(error.to_string().contains("`u` is missing"), "{error}");
    }

    #[test]
    fn a_number_that_is_not_finite_is_found_where_it_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("w.safetensors");
        let (job, file) = (job(), File::create_new(&path).unwrap());
        let layout = Layout::new(&job);
        layout.start(&file).unwrap();
        layout.write(&file, Held::Param(0), 0, &[1.0, f64::INFINITY, f64::NAN]).unwrap();
        let weights = Weights::open(&path, &job).unwrap();
        let tensor = weights.get(Held::Param(0)).unwrap();
        tensor.read(0, &mut [0.0]);
        assert!(weights.check().is_ok(), "a rank looks at what is its own");
        tensor.read(1, &mut [0.0; 2]);
        tensor.read(2, &mut [0.0]);
        let again = Weights::open(&path, &job).unwrap();
        let (whole, mut bytes) = (again.get(Held::Param(0)).unwrap(), [0; 8]);
        assert!(whole.bytes(0, DType::F32, &mut bytes[..4]) && again.check().is_ok() && bytes[..4] == 1f32.to_le_bytes());
        assert!(!whole.bytes(0, DType::Bf16, &mut bytes[..2]), "it would be converted");
        assert!(whole.bytes(1, DType::F32, &mut bytes));
        assert_eq!(again.check().unwrap_err().to_string(), weights.check().unwrap_err().to_string());
        let error = weights.check().unwrap_err().to_string();
        assert!(error.contains("w.safetensors`: element 1 of `w` is inf, with which nothing can be trained"), "{error}");
    }

    #[test]
    fn a_file_of_another_kind_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("poem.txt");
        std::fs::write(&path, "roses are red").unwrap();
        let Err(error) = Weights::open(&path, &job()) else { panic!("it opened") };
        assert!(error.to_string().contains("poem.txt` is not a safetensors file"), "{error}");
    }
}
