//! What a step is fed: one whole global batch per input of the job, from files.
//!
//! A text (bytes as tokens), an llm.c `.bin` file, or whatever the user says to be tokens, is a stream of them: sequence `n` of a run is the window of `seq + 1`
//! tokens from `n * seq` on; `seq` of them are the input and the last `seq` the input that derives from it by `Next`. A stream
//! begins again at its end. A `.npy` file has whole batches, `[steps, batch, seq + 1]` or `[steps, ..dims of the input]`, and ends.

mod array;
mod error;
mod file;
mod foreign;
mod format;
mod stream;

pub use error::DataError;
pub use format::Encoding;

use crate::conditions::DataMark;
use crate::host::{Tensor, sizes};
use file::File;
use ir::graph::Feed;
use ir::program::{Action, InputEntry, Job};
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::path::PathBuf;

/// `FILE`, or `NAME=FILE` for the input of that name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    pub input: Option<String>,
    pub file: PathBuf,
    /// If the file does not say itself what it holds.
    pub encoding: Encoding,
}

impl Spec {
    pub fn parse(text: &str, encoding: Encoding) -> Spec {
        match text.split_once('=') {
            Some((name, file)) if !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || c == '_') => {
                Spec { input: Some(name.into()), file: file.into(), encoding }
            }
            _ => Spec { input: None, file: text.into(), encoding },
        }
    }
}

/// Opens training and held-out data as whoever starts a run does: what ranks need not look at again is looked at here.
///
/// # Errors
/// As [`Data::open`]; a file that is taken for text and is none; the user's word for files none of which needs it.
pub fn open_checked(job: &Job, training: Option<&[Spec]>, valid: Option<&[Spec]>) -> Result<[Option<Data>; 2], DataError> {
    let open = |specs: Option<&[Spec]>| specs.map(|s| Data::open(job, s)).transpose();
    let both = [open(training)?, open(valid)?];
    let files = || both.iter().flatten().flat_map(Data::files_with_paths);
    files().try_for_each(|(file, path)| file.check_text(path))?;
    let said = [training, valid].into_iter().flatten().flatten().any(|s| s.encoding != Encoding::Text);
    if said && !files().any(|(file, _)| file.is_named_by_user()) {
        return Err(DataError::Said(files().map(|f| f.1.clone()).collect()));
    }
    Ok(both)
}

/// Files up to so many bytes are looked through before a run begins; of longer ones each batch is when it is read.
const LOOKED_THROUGH: u64 = 1 << 30;

/// The data of a run.
pub struct Data {
    inputs: Vec<InputEntry>,
    sources: Vec<Source>,
    files: Vec<PathBuf>,
    /// Sequences of a step of the job.
    batch: u64,
    /// How many more sequences were read before a step than steps of this job would have read.
    ahead: i64,
}

/// Where an input's values come from.
enum Source {
    /// `longer`: the file's last dim has one element more than the input, for what derives from it.
    File {
        file: File,
        longer: bool,
        number: usize,
    },
    Feed(Feed),
}

impl Data {
    /// Opens the files and finds out which input each feeds: one without a name feeds the only input that has no default.
    ///
    /// # Errors
    /// If a file cannot be read, does not fit its input, or an input has no data.
    pub fn open(job: &Job, specs: &[Spec]) -> Result<Data, DataError> {
        let inputs = job.inputs.clone();
        let mut given: Vec<Option<usize>> = vec![None; inputs.len()];
        for (number, spec) in specs.iter().enumerate() {
            let input = find(&inputs, spec)?;
            if given[input].replace(number).is_some() {
                return Err(DataError::Twice(inputs[input].name.clone()));
            }
        }
        let mut sources = vec![];
        for (k, input) in inputs.iter().enumerate() {
            sources.push(match (given[k], &input.default) {
                (Some(number), _) => {
                    // Whoever takes the next element of this input needs one more than it has.
                    let next = inputs.iter().enumerate().any(|(d, i)| given[d].is_none() && i.default == Some(Feed::Next(k as u32)));
                    let file = File::open(&specs[number].file, specs[number].encoding, input, next)?;
                    Source::File { longer: file.longer(input), file, number }
                }
                (None, Some(feed)) => Source::Feed(feed.clone()),
                // What no program loads needs no data.
                (None, None) if !loaded(job, k as u32) => Source::Feed(Feed::Const(ir::op::Real(0.0))),
                (None, None) => {
                    let how = format!("pass --data FILE or --data {}=FILE.npy", input.name);
                    return Err(DataError::Missing { input: input.name.clone(), how });
                }
            });
        }
        let batch = job.global_batch.max(1);
        let data = Data { inputs, sources, batch, ahead: 0, files: specs.iter().map(|s| s.file.clone()).collect() };
        for (k, source) in data.sources.iter().enumerate() {
            data.check_default(k)?;
            if let Source::Feed(feed) = source
                && let Some(i) = feed.source()
            {
                data.derivable(k, i as usize)?;
            }
        }
        Ok(data)
    }

    /// The same, read on from where so many steps have read so many sequences.
    ///
    /// # Errors
    /// Arrays of whole batches, where that is in the midst of one.
    pub fn after(self, (step, sequences): (u64, u64)) -> Result<Data, DataError> {
        let ahead = i128::from(sequences) - i128::from(step) * i128::from(self.batch);
        let ahead = i64::try_from(ahead).ok().filter(|n| n % self.batch as i64 == 0 || self.end().is_none());
        ahead.map(|ahead| Data { ahead, ..self }).ok_or(DataError::Midst { sequences, batch: self.batch })
    }

    /// By what the files are known again, per input that has one.
    pub fn marks(&self) -> Vec<DataMark> {
        let files = self.sources.iter().zip(&self.inputs).filter_map(|(source, input)| match source {
            Source::File { file, number, .. } => Some((file, input, &self.files[*number])),
            Source::Feed(_) => None,
        });
        files
            .map(|(file, input, path)| DataMark {
                input: input.name.clone(),
                file: path.display().to_string(),
                bytes: file.bytes(),
                hash: file.hash().to_hex().to_string(),
            })
            .collect()
    }

    /// Where a step begins to read: a sequence of a stream, a batch of an array.
    fn start(&self, file: &File, input: &InputEntry, step: u64) -> u64 {
        // Of this input's; another number of them than the job's may make up a step.
        let rows = if file.ends() { 1 } else { input.dims[0].size };
        let start = i128::from(step) * i128::from(rows) + i128::from(self.ahead) * i128::from(rows) / i128::from(self.batch);
        start.clamp(0, i128::from(u64::MAX)) as u64
    }

    /// The number that the text gives for an input without a file, or before its first element, is one that it takes.
    fn check_default(&self, k: usize) -> Result<(), DataError> {
        let value = match self.sources[k] {
            Source::Feed(Feed::Const(value)) => value.0,
            Source::Feed(Feed::Prev(_, first)) => first as f64,
            Source::Feed(Feed::Next(_) | Feed::Documents(..) | Feed::Positions(..) | Feed::Ahead(_)) | Source::File { .. } => return Ok(()),
        };
        match &self.inputs[k].takes {
            Some(takes) if !takes.iter().any(|i| i.has(value)) => {
                Err(DataError::Default { input: self.inputs[k].name.clone(), value, takes: takes.clone() })
            }
            Some(_) | None => Ok(()),
        }
    }

    /// A derived input needs a file behind the one it derives from, and its dims.
    fn derivable(&self, derived: usize, from: usize) -> Result<(), DataError> {
        let (input, other) = (&self.inputs[derived], &self.inputs[from]);
        let missing = |how: String| Err(DataError::Missing { input: input.name.clone(), how });
        let ahead = matches!(self.sources[derived], Source::Feed(Feed::Ahead(_)));
        match &self.sources[from] {
            Source::Feed(Feed::Next(base)) if ahead && matches!(self.sources[*base as usize], Source::File { .. }) => {}
            Source::Feed(_) => return missing(format!("it derives from `{}`, which has no file", other.name)),
            Source::File { longer: false, .. } if matches!(self.sources[derived], Source::Feed(Feed::Next(_))) => {
                return missing(format!("it is what comes after `{}`, whose file has no element more than that input takes", other.name));
            }
            Source::File { .. } => {}
        }
        let mut own = sizes(&input.dims);
        if ahead && own.len() > 1 {
            own.remove(own.len() - 2);
        }
        if own == sizes(&other.dims) && !own.is_empty() {
            return Ok(());
        }
        missing(format!("it derives from `{}`, which has other dims", other.name))
    }

    /// Whole batches in the data: of arrays all, of streams without beginning again.
    pub fn batches(&self) -> u64 {
        self.files_with_inputs().map(|(file, input)| file.batches(input)).min().unwrap_or(1)
    }

    /// Batches after which there is no more; none if streams begin again.
    pub fn end(&self) -> Option<u64> {
        let steps = |(file, input): (&File, &InputEntry)| file.batches(input).saturating_add_signed(-(self.ahead / self.batch as i64));
        self.files_with_inputs().filter(|(file, _)| file.ends()).map(steps).min()
    }

    /// Looks at every element that these steps, counted from 0, will read; at those of the first alone if a file is too long for that.
    ///
    /// # Errors
    /// As [`Data::batch`] of the first step that would find something.
    pub fn check_steps(&self, steps: Range<u64>) -> Result<(), DataError> {
        let looked_at = match () {
            () if self.files_with_inputs().any(|(file, _)| file.bytes() > LOOKED_THROUGH) => 1,
            () if (0..self.inputs.len()).all(|k| self.surely_takes(k)) => 0,
            () => self.files_with_inputs().map(|(file, input)| file.round(input)).max().unwrap_or(1),
        };
        steps.take(looked_at as usize).try_for_each(|step| self.batch(step).map(drop))
    }

    /// Whether an input takes whatever there can be for it, as far as a look at its file as a whole can tell.
    fn surely_takes(&self, k: usize) -> bool {
        let Some(takes) = &self.inputs[k].takes else {
            return match &self.sources[k] {
                Source::File { file, .. } => file.is_finite(self.inputs[k].dtype),
                Source::Feed(_) => true,
            };
        };
        match &self.sources[k] {
            Source::File { file, .. } => file.holds_only(takes),
            Source::Feed(Feed::Next(i) | Feed::Prev(i, _)) => match &self.sources[*i as usize] {
                Source::File { file, .. } => file.holds_only(takes),
                Source::Feed(_) => true,
            },
            // What the text gives was looked at.
            Source::Feed(Feed::Const(_)) => true,
            Source::Feed(Feed::Ahead(i)) => {
                let (base, _) = self.base(*i);
                let of_file = match &self.sources[base] {
                    Source::File { file, .. } => file.holds_only(takes),
                    Source::Feed(_) => true,
                };
                of_file && takes.iter().any(|i| i.has(NOTHING))
            }
            Source::Feed(Feed::Documents(..) | Feed::Positions(..)) => {
                let line = self.inputs[k].dims.last().map_or(1, |d| d.size);
                takes.iter().any(|i| i.has(0.0) && i.has(line as f64))
            }
        }
    }

    fn files_with_inputs(&self) -> impl Iterator<Item = (&File, &InputEntry)> {
        self.sources.iter().zip(&self.inputs).filter_map(|(source, input)| match source {
            Source::File { file, .. } => Some((file, input)),
            Source::Feed(_) => None,
        })
    }

    fn files_with_paths(&self) -> impl Iterator<Item = (&File, &PathBuf)> {
        self.sources.iter().filter_map(|source| match source {
            Source::File { file, number, .. } => Some((file, &self.files[*number])),
            Source::Feed(_) => None,
        })
    }

    /// The batch of a step counted from 0, per input of the job.
    ///
    /// # Errors
    /// If the data has ended, or an element is none that its input takes.
    pub fn batch(&self, step: u64) -> Result<Vec<Tensor>, DataError> {
        // What files hold, with the element more where there is one.
        let mut held: Vec<Option<Vec<f64>>> = vec![];
        for (source, input) in self.sources.iter().zip(&self.inputs) {
            held.push(match source {
                Source::File { file, longer, number } => {
                    let start = self.start(file, input, step);
                    if file.ends() && start >= file.batches(input) {
                        return Err(DataError::Exhausted { file: self.files[*number].clone(), available: file.batches(input), step: start + 1 });
                    }
                    Some(file.read(input, start, *longer))
                }
                Source::Feed(_) => None,
            });
        }
        let mut out = vec![];
        for (k, (source, input)) in self.sources.iter().zip(&self.inputs).enumerate() {
            let (tensor, from) = match source {
                Source::File { longer, .. } => (lines(&held[k], input, *longer, |line, n| line[..n].to_vec()), k),
                Source::Feed(Feed::Const(value)) => {
                    let mut tensor = Tensor::zeros(sizes(&input.dims));
                    tensor.data.fill(value.0);
                    (tensor, k)
                }
                Source::Feed(Feed::Next(i)) => (lines(&held[*i as usize], input, true, |line, n| line[1..=n].to_vec()), *i as usize),
                Source::Feed(Feed::Ahead(i)) => {
                    let (base, shift) = self.base(*i);
                    let depth = input.dims.len().checked_sub(2).map_or(1, |d| input.dims[d].size) as usize;
                    let longer = matches!(self.sources[base], Source::File { longer: true, .. });
                    (lines(&held[base], input, longer, |line, n| ahead(&line[shift..n + shift], depth)), base)
                }
                Source::Feed(Feed::Prev(i, first)) => (self.derive(&held, *i, input, |line| previous(line, *first as f64)), *i as usize),
                Source::Feed(Feed::Documents(i, separator)) => {
                    (self.derive(&held, *i, input, |line| documents(line, *separator as f64)), *i as usize)
                }
                Source::Feed(Feed::Positions(i, separator)) => {
                    (self.derive(&held, *i, input, |line| positions(line, *separator as f64)), *i as usize)
                }
            };
            self.check(k, &tensor, from, step)?;
            out.push(tensor);
        }
        Ok(out)
    }

    /// The input with the file that one derives from which others look ahead in, and how much further on that one is.
    fn base(&self, from: u32) -> (usize, usize) {
        match self.sources[from as usize] {
            Source::Feed(Feed::Next(base)) => (base as usize, 1),
            Source::File { .. } | Source::Feed(_) => (from as usize, 0),
        }
    }

    fn derive(&self, held: &[Option<Vec<f64>>], from: u32, input: &InputEntry, f: impl Fn(&[f64]) -> Vec<f64>) -> Tensor {
        let longer = matches!(self.sources[from as usize], Source::File { longer: true, .. });
        lines(&held[from as usize], input, longer, |line, n| f(&line[..n]))
    }

    /// Every element of input `k` is one that it takes: of floats, one that is finite in memory too. `from` is the input
    /// that has the file.
    fn check(&self, k: usize, tensor: &Tensor, from: usize, step: u64) -> Result<(), DataError> {
        let input = &self.inputs[k];
        let wrong = match &input.takes {
            Some(takes) => tensor.data.iter().position(|x| !takes.iter().any(|i| i.has(*x))),
            None => tensor.data.iter().position(|x| !input.dtype.is_finite(*x)),
        };
        let Some(wrong) = wrong else { return Ok(()) };
        let Source::File { file, longer, number } = &self.sources[from] else { return Ok(()) };
        let position = file.position(&self.inputs[from], self.start(file, &self.inputs[from], step), wrong as u64, *longer);
        let (file, value, name) = (self.files[*number].clone(), tensor.data[wrong], input.name.clone());
        let Some(takes) = input.takes.clone() else {
            return Err(match value.is_finite() {
                true => DataError::Beyond { file, position, value, input: name, dtype: input.dtype },
                false => DataError::NotFinite { file, position, value, input: name },
            });
        };
        let input = name;
        let token = |position| DataError::Token { file: file.clone(), position, value, input: input.clone(), takes: takes.clone() };
        Err(match &self.sources[k] {
            Source::File { .. } | Source::Feed(Feed::Const(_)) => token(position),
            Source::Feed(Feed::Next(_)) => token(position + 1),
            // The first of a line is the text's number, which was looked at.
            Source::Feed(Feed::Prev(..)) => token(position.saturating_sub(1)),
            Source::Feed(Feed::Documents(..) | Feed::Positions(..) | Feed::Ahead(_)) => DataError::Derived { file, position, value, input, takes },
        })
    }
}

/// Whether a program loads an input.
fn loaded(job: &Job, input: u32) -> bool {
    let commands = job.programs.iter().flat_map(|p| &p.bodies).flat_map(|b| &b.commands);
    commands.into_iter().any(|c| matches!(c.action, Action::Load { input: i, .. } if i == input))
}

fn find(inputs: &[InputEntry], spec: &Spec) -> Result<usize, DataError> {
    let names = |list: &mut dyn Iterator<Item = &InputEntry>| list.map(|i| i.name.clone()).collect::<Vec<_>>();
    match &spec.input {
        Some(name) => {
            inputs.iter().position(|i| i.name == *name).ok_or_else(|| DataError::Unknown { name: name.clone(), known: names(&mut inputs.iter()) })
        }
        None => {
            let open: Vec<usize> = (0..inputs.len()).filter(|k| inputs[*k].default.is_none()).collect();
            match open[..] {
                [only] => Ok(only),
                [] => Err(DataError::Ambiguous { file: spec.file.clone(), inputs: names(&mut inputs.iter()) }),
                _ => Err(DataError::Ambiguous { file: spec.file.clone(), inputs: names(&mut open.iter().map(|k| &inputs[*k])) }),
            }
        }
    }
}

/// A tensor line by line along its last dim, from lines that may be one element longer.
fn lines(held: &Option<Vec<f64>>, input: &InputEntry, longer: bool, f: impl Fn(&[f64], usize) -> Vec<f64>) -> Tensor {
    let sizes = sizes(&input.dims);
    let n = sizes.last().copied().unwrap_or(1) as usize;
    let held = held.as_deref().unwrap_or_default();
    let data = held.chunks(n + usize::from(longer)).flat_map(|line| f(line, n)).collect();
    Tensor { sizes, data }
}

/// What stands where a line has no element any more: labels of it count for nothing.
const NOTHING: f64 = -100.0;

/// Of each depth the elements that come so much later, and one more.
fn ahead(line: &[f64], depth: usize) -> Vec<f64> {
    let row = |k: usize| line.iter().skip(k + 1).copied().chain(std::iter::repeat(NOTHING)).take(line.len());
    (0..depth).flat_map(row).collect()
}

fn previous(line: &[f64], first: f64) -> Vec<f64> {
    std::iter::once(first).chain(line.iter().copied()).take(line.len()).collect()
}

/// For each element, the number of separators before it.
fn documents(line: &[f64], separator: f64) -> Vec<f64> {
    let mut seen = 0.0;
    line.iter()
        .map(|x| {
            let now = seen;
            seen += f64::from(*x == separator);
            now
        })
        .collect()
}

/// For each element, how many come since the last separator before it.
fn positions(line: &[f64], separator: f64) -> Vec<f64> {
    let mut at = 0.0;
    line.iter()
        .map(|x| {
            let now = at;
            at = if *x == separator { 0.0 } else { at + 1.0 };
            now
        })
        .collect()
}

#[cfg(test)]
mod tests;
