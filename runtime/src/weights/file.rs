//! Whole f32 tensors in a safetensors file: how one is laid out, read and written.

use super::mark::Mark;
use super::names::{entry, params, states};
use super::source::{Content, FileTensor, WeightsError, WeightsFault};
use crate::conditions::Conditions;
use crate::device::{decode, not_finite};
use crate::executor::PersistentId;
use crate::host::{PIECE, Whole};
use ir::op::DType;
use ir::program::Job;
use ir::provenance::{self, Provenance};
use memmap2::Mmap;
use safetensors::tensor::{Metadata, TensorInfo, TensorView};
use safetensors::{Dtype, SafeTensors};
use serde::{Deserialize, Serialize};
use std::cell::OnceCell;
use std::collections::{BTreeMap, HashMap};
use std::fmt::Display;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

/// What a file's metadata says under [`provenance::KEY`].
#[derive(Clone, Serialize, Deserialize)]
struct FileMetadata {
    #[serde(flatten)]
    provenance: Provenance,
    /// State of the run, in a file that a run resumes from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    run: Option<Mark>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    conditions: Option<Conditions>,
}

/// Bytes of a mark, spaces at its end included: files are laid out before it is known what a run comes to.
const MARK_BYTES: usize = 256;

/// Elements that are read at a time.
const CHUNK: usize = 1 << 16;

fn text(about: &FileMetadata) -> String {
    serde_json::to_string(about).expect("invariant: plain data with text keys")
}

/// What a header says of its tensors, for its seal.
fn described<'a, N: Display>(tensors: impl IntoIterator<Item = (N, &'a TensorInfo)>) -> Vec<String> {
    tensors.into_iter().map(|(name, i)| format!("{name} {:?} {:?} {:?}", i.dtype, i.shape, i.data_offsets)).collect()
}

/// All that a file holds.
///
/// # Errors
/// It is no safetensors file.
pub(crate) fn stored(file: &Path, wrong: &Rc<OnceCell<WeightsFault>>) -> Result<Content, WeightsError> {
    let opened = SafetensorsFile::new(file)?;
    let tensors = opened.offered(wrong)?;
    let (run, model, conditions) = opened.about.map_or((None, None, None), |a| (a.run, Some(a.provenance), a.conditions));
    Ok(Content { tensors, run, model, conditions, others: vec![] })
}

/// A safetensors file.
struct SafetensorsFile {
    file: PathBuf,
    map: Arc<Mmap>,
    /// Metadata of the file; none if another program has written it.
    about: Option<FileMetadata>,
}

impl SafetensorsFile {
    fn new(file: &Path) -> Result<SafetensorsFile, WeightsError> {
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
        Ok(SafetensorsFile { file: file.to_path_buf(), map, about })
    }

    fn offered(&self, wrong: &Rc<OnceCell<WeightsFault>>) -> Result<Vec<FileTensor>, WeightsError> {
        let malformed = |e: safetensors::SafeTensorError| WeightsError::Malformed { file: self.file.clone(), what: e.to_string() };
        let tensors = SafeTensors::deserialize(&self.map).map_err(malformed)?;
        let offer = |(name, view): (String, TensorView)| {
            let shape = view.shape().iter().map(|n| *n as u64).collect();
            let start = view.data().as_ptr() as usize - self.map.as_ptr() as usize;
            let values = match view.dtype() {
                Dtype::F32 | Dtype::F16 | Dtype::BF16 => {
                    let mapped = MappedTensor { map: self.map.clone(), start, dtype: view.dtype(), name: name.clone(), wrong: wrong.clone() };
                    Ok(Box::new(mapped) as Box<dyn Whole>)
                }
                other => Err(format!("{other:?}")),
            };
            FileTensor { name, shape, values }
        };
        Ok(tensors.tensors().into_iter().map(offer).collect())
    }
}

/// A tensor of a mapped file.
struct MappedTensor {
    map: Arc<Mmap>,
    /// Byte of its first element.
    start: usize,
    dtype: Dtype,
    name: String,
    wrong: Rc<OnceCell<WeightsFault>>,
}

impl Whole for MappedTensor {
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
            // Only the first fault is kept.
            let _ = self.wrong.set(WeightsFault::NotFinite { tensor: self.name.clone(), element: at + k as u64, value: out[k] });
        }
    }

    fn pieces(&self, at: u64, len: u64, dtype: DType, visit: &mut dyn FnMut(u64, &[u8])) -> bool {
        if (dtype, self.dtype) != (DType::F32, Dtype::F32) {
            return false;
        }
        let mut done = 0;
        for piece in self.map[self.start + at as usize * 4..][..len as usize * 4].chunks(PIECE as usize) {
            if let Some(k) = not_finite(dtype, piece) {
                let value = decode(dtype, &piece[4 * k..4 * k + 4]);
                let _ = self.wrong.set(WeightsFault::NotFinite { tensor: self.name.clone(), element: at + done + k as u64, value });
            }
            visit(done, piece);
            done += piece.len() as u64 / 4;
        }
        true
    }
}

/// What is said of a file, with room for any mark if a run resumes from it.
fn about_text(about: &FileMetadata, run: Option<&Mark>) -> String {
    let Some(run) = run else { return text(about) };
    let bytes = text(about).len() + MARK_BYTES;
    let text = text(&FileMetadata { run: Some(*run), ..about.clone() });
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
    let about = model.map(|model| about_text(&FileMetadata { provenance: model.clone(), run: None, conditions: conditions.cloned() }, run.as_ref()));
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

/// Where a job's parameters (and optimizer states) lie in a safetensors file.
pub struct SafetensorsLayout {
    header: Vec<u8>,
    /// Byte of the first element of each tensor.
    starts: BTreeMap<PersistentId, u64>,
    /// Bytes of the whole file.
    pub bytes: u64,
}

impl SafetensorsLayout {
    /// The layout of the parameters alone.
    pub fn new(job: &Job) -> SafetensorsLayout {
        SafetensorsLayout::of(job, params(job), text(&FileMetadata { provenance: Provenance::of(job), run: None, conditions: None }))
    }

    /// The layout of all that a run resumes from. The mark decides nothing but the header's text.
    pub fn of_run(job: &Job, mark: &Mark, conditions: Option<&Conditions>) -> SafetensorsLayout {
        let about = FileMetadata { provenance: Provenance::of(job), run: None, conditions: conditions.cloned() };
        SafetensorsLayout::of(job, params(job).chain(states(job)), about_text(&about, Some(mark)))
    }

    fn of(job: &Job, tensors: impl Iterator<Item = PersistentId>, about: String) -> SafetensorsLayout {
        let tensors: Vec<(PersistentId, (String, Vec<u64>))> = tensors.filter_map(|h| Some((h, entry(job, h)?))).collect();
        let (header, starts, bytes) = header(tensors.iter().map(|(_, entry)| entry.clone()), Some(about));
        SafetensorsLayout { starts: tensors.into_iter().map(|(held, _)| held).zip(starts).collect(), bytes, header }
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
    pub fn write(&self, file: &File, held: PersistentId, at: u64, values: &[f64]) -> io::Result<()> {
        let Some(start) = self.starts.get(&held) else { return Ok(()) };
        let bytes: Vec<u8> = values.iter().flat_map(|x| (*x as f32).to_le_bytes()).collect();
        file.write_all_at(&bytes, start + at * 4)
    }
}
