//! Parameters: from random numbers or safetensors files, and back to files. Files hold whole f32 tensors under the job's
//! names, so they do not depend on the mesh.

use crate::host::{Whole, sizes};
use ir::graph::Init;
use ir::program::{Job, ParamEntry};
use ir::random;
use memmap2::Mmap;
use safetensors::tensor::{Metadata, TensorInfo};
use safetensors::{Dtype, SafeTensors};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    #[error("`{}`: {cause}", .file.display())]
    Io { file: PathBuf, cause: io::Error },
    #[error("`{}` is not a safetensors file: {what}", .file.display())]
    Malformed { file: PathBuf, what: String },
    #[error("`{}` does not fit the model:{}", .file.display(), .what.iter().map(|w| format!("\n  {w}")).collect::<String>())]
    Mismatch { file: PathBuf, what: Vec<String> },
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

/// Initial parameters of a job, in its order.
pub struct Weights {
    tensors: Vec<Box<dyn Whole>>,
}

impl Weights {
    /// Every parameter as its model text says.
    pub fn random(job: &Job, seed: u64) -> Weights {
        Weights { tensors: job.params.iter().map(|p| Box::new(Random::new(p, seed)) as Box<dyn Whole>).collect() }
    }

    /// Every parameter from a file.
    ///
    /// # Errors
    /// All tensors that are missing, too many, of another shape or of a dtype that is not f32, f16 or bf16.
    pub fn open(file: &Path, job: &Job) -> Result<Weights, WeightsError> {
        let io = |cause| WeightsError::Io { file: file.to_path_buf(), cause };
        let handle = File::open(file).map_err(io)?;
        // SAFETY: the file is only read; if another process shortens it meanwhile, this one ends.
        let map = std::sync::Arc::new(unsafe { Mmap::map(&handle) }.map_err(io)?);
        let malformed = |e: safetensors::SafeTensorError| WeightsError::Malformed { file: file.to_path_buf(), what: e.to_string() };
        let tensors = SafeTensors::deserialize(&map).map_err(malformed)?;
        let (mut what, mut found) = (vec![], vec![]);
        for param in &job.params {
            let Ok(view) = tensors.tensor(&param.name) else {
                what.push(format!("`{}` is missing", param.name));
                continue;
            };
            let shape: Vec<u64> = view.shape().iter().map(|n| *n as u64).collect();
            if shape != sizes(&param.dims) {
                what.push(format!("`{}` is {shape:?}, the model has {:?}", param.name, sizes(&param.dims)));
            } else if !matches!(view.dtype(), Dtype::F32 | Dtype::F16 | Dtype::BF16) {
                what.push(format!("`{}` is {:?}", param.name, view.dtype()));
            } else {
                let start = view.data().as_ptr() as usize - map.as_ptr() as usize;
                found.push(Box::new(Mapped { map: map.clone(), start, dtype: view.dtype() }) as Box<dyn Whole>);
            }
        }
        let mut extra: Vec<String> = tensors.names().into_iter().filter(|n| job.params.iter().all(|p| p.name != **n)).map(str::to_owned).collect();
        extra.sort_unstable();
        what.extend(extra.into_iter().map(|n| format!("`{n}` is not in the model")));
        if what.is_empty() { Ok(Weights { tensors: found }) } else { Err(WeightsError::Mismatch { file: file.to_path_buf(), what }) }
    }

    pub fn param(&self, param: u32) -> &dyn Whole {
        self.tensors[param as usize].as_ref()
    }
}

/// A tensor of a mapped file.
struct Mapped {
    map: std::sync::Arc<Mmap>,
    /// Byte of its first element.
    start: usize,
    dtype: Dtype,
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
    }
}

/// Where a job's parameters lie in a safetensors file.
pub struct Layout {
    header: Vec<u8>,
    /// Byte of the first element of each parameter.
    starts: Vec<u64>,
    pub bytes: u64,
}

impl Layout {
    pub fn new(job: &Job) -> Layout {
        let mut end = 0;
        let mut infos = vec![];
        for param in &job.params {
            let shape: Vec<usize> = sizes(&param.dims).iter().map(|n| *n as usize).collect();
            let start = end;
            end += shape.iter().product::<usize>() * 4;
            infos.push((param.name.clone(), TensorInfo { dtype: Dtype::F32, shape, data_offsets: (start, end) }));
        }
        let starts: Vec<u64> = infos.iter().map(|(_, i)| i.data_offsets.0 as u64).collect();
        let metadata = Metadata::new(None, infos).expect("invariant: tensors follow each other");
        let mut text = serde_json::to_vec(&metadata).expect("invariant: plain data with text keys");
        text.resize(text.len().next_multiple_of(8), b' ');
        let mut header = (text.len() as u64).to_le_bytes().to_vec();
        header.extend(text);
        let first = header.len() as u64;
        Layout { starts: starts.iter().map(|s| s + first).collect(), bytes: first + end as u64, header }
    }

    /// Gives an empty file its size and header.
    ///
    /// # Errors
    /// What the file system says.
    pub fn start(&self, file: &File) -> io::Result<()> {
        file.set_len(self.bytes)?;
        file.write_all_at(&self.header, 0)
    }

    /// Writes elements of a parameter from row-major index `at` on.
    ///
    /// # Errors
    /// What the file system says.
    pub fn write(&self, file: &File, param: u32, at: u64, values: &[f64]) -> io::Result<()> {
        let bytes: Vec<u8> = values.iter().flat_map(|x| (*x as f32).to_le_bytes()).collect();
        file.write_all_at(&bytes, self.starts[param as usize] + at * 4)
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
        weights.param(0).read(0, &mut out);
        out
    }

    #[test]
    fn what_was_written_reads_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("w.safetensors");
        let (job, file) = (job(), File::create_new(&path).unwrap());
        let layout = Layout::new(&job);
        layout.start(&file).unwrap();
        layout.write(&file, 0, 1, &[2.0, -3.5]).unwrap();
        assert_eq!(values(&Weights::open(&path, &job).unwrap()), [0.0, 2.0, -3.5]);
    }

    #[test]
    fn random_parameters_depend_on_name_seed_and_index_alone() {
        let (job, mut alone) = (job(), [0.0]);
        let all = values(&Weights::random(&job, 7));
        Weights::random(&job, 7).param(0).read(2, &mut alone);
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
        Layout::new(&other).start(&File::create_new(&path).unwrap()).unwrap();
        let Err(error) = Weights::open(&path, &job()) else { panic!("it opened") };
        assert!(error.to_string().ends_with("does not fit the model:\n  `w` is [4], the model has [3]\n  `b` is not in the model"), "{error}");
        let mut wanted = job();
        wanted.params[0].name = "u".into();
        let Err(error) = Weights::open(&path, &wanted) else { panic!("it opened") };
        assert!(error.to_string().contains("`u` is missing"), "{error}");
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
