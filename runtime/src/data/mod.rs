//! What a step is fed, from files or data sets: of one global batch per input of the job, what a rank loads.
//!
//! A text (bytes as tokens), an llm.c `.bin` file, or whatever the user says to be tokens, is a stream of them:
//! sequence `n` of a run is the window of `seq + 1` tokens from `n * seq` on; `seq` of them are the input and the
//! last `seq` the input that derives from it by `Next`. A stream begins again at its end. A `.npy` file has whole
//! batches, `[steps, batch, seq + 1]` or `[steps, ..dims of the input]`, and ends. Of a data set ([`DataSets`])
//! sequence `n` is sample `n`.
//!
//! What is read, and how it becomes an input's elements, goes line by line along the last dim ([`Data::read`]): a
//! line of a file or a data set, of which the columns are read that some input needs.

mod array;
mod batch;
mod derive;
mod error;
mod file;
mod foreign;
mod format;
mod load_regions;
mod sets;
mod stream;

pub use batch::Batch;
pub use error::DataError;
pub use format::Encoding;
pub use load_regions::LoadRegions;
pub use sets::{DataSets, PARTS, RunSamples, Samples, SetNames, Validation};

use crate::conditions::DataMark;
use crate::host::{Tensor, sizes};
use derive::{NOTHING, RowDerivation, SourceRow};
use file::DataFile;
use ir::graph::InputDefault;
use ir::program::{Action, InputEntry, Job};
use serde::{Deserialize, Serialize};
use sets::SampleAnnotations;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;

/// `FILE`, or `NAME=FILE` for the input of that name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    /// The input that the file feeds; `None` for the only one that has no default.
    pub input: Option<String>,
    /// Path of the file, absolute in what ranks are told.
    pub file: PathBuf,
    /// How the file is read if it does not say itself what it holds.
    pub encoding: Encoding,
}

impl Spec {
    /// Reads either form; what stands before `=` and is no name belongs to the path.
    pub fn parse(text: &str, encoding: Encoding) -> Spec {
        match text.split_once('=') {
            Some((name, file)) if !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || c == '_') => {
                Spec { input: Some(name.into()), file: file.into(), encoding }
            }
            _ => Spec { input: None, file: text.into(), encoding },
        }
    }
}

/// Opens training and held-out data as whoever starts a run does: what ranks need not look at again is looked at
/// here.
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
    sources: Vec<InputSource>,
    files: Vec<PathBuf>,
    /// Sequences of a step of the job.
    batch: u64,
    /// How many more sequences were read before a step than steps of this job would have read.
    ahead: i64,
}

/// Where an input's values come from.
enum InputSource {
    /// `longer`: the file's last dim has one element more than the input, for what derives from it.
    File {
        file: DataFile,
        longer: bool,
        number: usize,
    },
    /// Samples of data sets, of one token more than the input has.
    Set(Box<Samples>),
    Default(InputDefault),
}

impl Data {
    /// Opens the files and finds out which input each feeds: one without a name feeds the only input that has no
    /// default.
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
                    // An input that takes the next element of this one needs one more than it has.
                    let next = inputs.iter().enumerate().any(|(d, i)| given[d].is_none() && i.default == Some(InputDefault::Next(k as u32)));
                    let file = DataFile::open(&specs[number].file, specs[number].encoding, input, next)?;
                    InputSource::File { longer: file.longer(input), file, number }
                }
                (None, Some(feed)) => InputSource::Default(feed.clone()),
                // An input that no program loads needs no data.
                (None, None) if !loaded(job, k as u32) => InputSource::Default(InputDefault::Const(ir::op::Real(0.0))),
                (None, None) => {
                    let how = format!("pass --data FILE or --data {}=FILE.npy", input.name);
                    return Err(DataError::Missing { input: input.name.clone(), how });
                }
            });
        }
        Data::of(job, sources, specs.iter().map(|s| s.file.clone()).collect())
    }

    /// Has samples feed the only input that has no default.
    ///
    /// # Errors
    /// If that is not one of tokens, or there are others.
    pub fn of_samples(job: &Job, samples: Samples) -> Result<Data, DataError> {
        let input = sets::input(job)?;
        // An input that no program loads needs no data.
        let nothing = InputDefault::Const(ir::op::Real(0.0));
        let mut sources: Vec<InputSource> = job.inputs.iter().map(|i| InputSource::Default(i.default.clone().unwrap_or(nothing.clone()))).collect();
        sources[input] = InputSource::Set(Box::new(samples));
        Data::of(job, sources, vec![])
    }

    fn of(job: &Job, sources: Vec<InputSource>, files: Vec<PathBuf>) -> Result<Data, DataError> {
        let (inputs, batch) = (job.inputs.clone(), job.global_batch.max(1));
        let data = Data { inputs, sources, batch, ahead: 0, files };
        for (k, source) in data.sources.iter().enumerate() {
            data.check_default(k)?;
            if let InputSource::Default(feed) = source
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

    /// What identifies the file or data sets of each input that has any.
    pub fn marks(&self) -> Vec<DataMark> {
        let marks = self.sources.iter().zip(&self.inputs).filter_map(|(source, input)| match source {
            InputSource::File { file, number, .. } => Some(DataMark {
                input: input.name.clone(),
                file: self.files[*number].display().to_string(),
                bytes: file.bytes(),
                hash: file.hash().to_hex().to_string(),
            }),
            InputSource::Set(samples) => Some(samples.mark(&input.name)),
            InputSource::Default(_) => None,
        });
        marks.collect()
    }

    /// Where a step begins to read: a sequence of a stream or of data sets, a batch of an array.
    fn start(&self, source: usize, step: u64) -> u64 {
        // These are rows of this input, of which a step may have another number than the job has sequences.
        let rows = match &self.sources[source] {
            InputSource::File { file, .. } if file.ends() => 1,
            InputSource::File { .. } | InputSource::Set(_) | InputSource::Default(_) => self.inputs[source].dims[0].size,
        };
        let start = i128::from(step) * i128::from(rows) + i128::from(self.ahead) * i128::from(rows) / i128::from(self.batch);
        start.clamp(0, i128::from(u64::MAX)) as u64
    }

    /// The number that the text gives for an input without a file, or before its first element, is one that it takes.
    fn check_default(&self, k: usize) -> Result<(), DataError> {
        let value = match self.sources[k] {
            InputSource::Default(InputDefault::Const(value)) => value.0,
            InputSource::Default(InputDefault::Prev(_, first)) => first as f64,
            InputSource::Default(InputDefault::Next(_) | InputDefault::Documents(..) | InputDefault::Positions(..) | InputDefault::Ahead(_))
            | InputSource::File { .. }
            | InputSource::Set(_) => {
                return Ok(());
            }
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
        let ahead = matches!(self.sources[derived], InputSource::Default(InputDefault::Ahead(_)));
        match &self.sources[from] {
            InputSource::Default(InputDefault::Next(base))
                if ahead && matches!(self.sources[*base as usize], InputSource::File { .. } | InputSource::Set(_)) => {}
            InputSource::Default(_) => return missing(format!("it derives from `{}`, which has no file", other.name)),
            InputSource::File { longer: false, .. } if matches!(self.sources[derived], InputSource::Default(InputDefault::Next(_))) => {
                return missing(format!("it is what comes after `{}`, whose file has no element more than that input takes", other.name));
            }
            InputSource::File { .. } | InputSource::Set(_) => {}
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
        let steps = |(file, input): (&DataFile, &InputEntry)| file.batches(input).saturating_add_signed(-(self.ahead / self.batch as i64));
        self.files_with_inputs().filter(|(file, _)| file.ends()).map(steps).min()
    }

    /// Looks at every element that these steps, counted from 0, will read; at those of the first alone if there is
    /// too much for that.
    ///
    /// # Errors
    /// As [`Data::batch`] of the first step that would find something.
    pub fn check_steps(&self, steps: Range<u64>) -> Result<(), DataError> {
        let looked_at = match () {
            () if self.sources.iter().any(|s| matches!(s, InputSource::Set(_))) => 1,
            () if self.files_with_inputs().any(|(file, _)| file.bytes() > LOOKED_THROUGH) => 1,
            () if (0..self.inputs.len()).all(|k| self.surely_takes(k)) => 0,
            () => self.files_with_inputs().map(|(file, input)| file.round(input)).max().unwrap_or(1),
        };
        let all = LoadRegions::all(&self.inputs);
        steps.take(looked_at as usize).try_for_each(|step| self.read(step, &all).map(drop))
    }

    /// Whether an input takes whatever there can be for it, as far as a look at its file as a whole can tell.
    fn surely_takes(&self, k: usize) -> bool {
        let Some(takes) = &self.inputs[k].takes else {
            return match &self.sources[k] {
                InputSource::File { file, .. } => file.is_finite(self.inputs[k].dtype),
                InputSource::Set(_) | InputSource::Default(_) => true,
            };
        };
        match &self.sources[k] {
            InputSource::File { file, .. } => file.holds_only(takes),
            // Each batch of samples is checked when it is read.
            InputSource::Set(_) => true,
            InputSource::Default(InputDefault::Next(i) | InputDefault::Prev(i, _)) => match &self.sources[*i as usize] {
                InputSource::File { file, .. } => file.holds_only(takes),
                InputSource::Set(_) | InputSource::Default(_) => true,
            },
            // The constant was checked when the data was opened.
            InputSource::Default(InputDefault::Const(_)) => true,
            InputSource::Default(InputDefault::Ahead(i)) => {
                let (base, _) = self.base(*i);
                let of_file = match &self.sources[base] {
                    InputSource::File { file, .. } => file.holds_only(takes),
                    InputSource::Set(_) | InputSource::Default(_) => true,
                };
                of_file && takes.iter().any(|i| i.has(NOTHING))
            }
            InputSource::Default(InputDefault::Documents(..) | InputDefault::Positions(..)) => {
                let line = self.inputs[k].dims.last().map_or(1, |d| d.size);
                takes.iter().any(|i| i.has(0.0) && i.has(line as f64))
            }
        }
    }

    fn files_with_inputs(&self) -> impl Iterator<Item = (&DataFile, &InputEntry)> {
        self.sources.iter().zip(&self.inputs).filter_map(|(source, input)| match source {
            InputSource::File { file, .. } => Some((file, input)),
            InputSource::Set(_) | InputSource::Default(_) => None,
        })
    }

    fn files_with_paths(&self) -> impl Iterator<Item = (&DataFile, &PathBuf)> {
        self.sources.iter().filter_map(|source| match source {
            InputSource::File { file, number, .. } => Some((file, &self.files[*number])),
            InputSource::Set(_) | InputSource::Default(_) => None,
        })
    }

    /// The batch of a step counted from 0, per input of the job.
    ///
    /// # Errors
    /// If the data has ended, or an element is none that its input takes.
    pub fn batch(&self, step: u64) -> Result<Vec<Tensor>, DataError> {
        let all = LoadRegions::all(&self.inputs);
        Ok(self.read(step, &all)?.tensors(&self.inputs))
    }

    /// What is wanted of the batch of a step counted from 0.
    ///
    /// # Errors
    /// If the data has ended, or an element is none that its input takes.
    pub fn read<'a>(&self, step: u64, wanted: &'a LoadRegions) -> Result<Batch<'a>, DataError> {
        let mut batch = Batch::new(&self.inputs, wanted);
        for source in 0..self.sources.len() {
            match &self.sources[source] {
                InputSource::File { .. } | InputSource::Set(_) => self.read_source(source, step, wanted, &mut batch)?,
                InputSource::Default(InputDefault::Const(value)) => {
                    for (_, columns) in wanted.0[source].lines(self.width(source)) {
                        batch.extend(source, &vec![value.0; columns.len()]);
                    }
                }
                // A derived input is read with the one that it derives from.
                InputSource::Default(_) => {}
            }
        }
        Ok(batch)
    }

    /// Reads what is wanted of a file or data sets, for all inputs that are made of it.
    fn read_source(&self, source: usize, step: u64, wanted: &LoadRegions, batch: &mut Batch) -> Result<(), DataError> {
        let start = self.start(source, step);
        let (length, longer) = (self.width(source) as usize, self.longer(source));
        if let InputSource::File { file, number, .. } = &self.sources[source]
            && file.ends()
            && start >= file.batches(&self.inputs[source])
        {
            let available = file.batches(&self.inputs[source]);
            return Err(DataError::Exhausted { file: self.files[*number].clone(), available, step: start + 1 });
        }
        // For each line, this lists the inputs that read it, in their order, with what they take of it.
        let mut lines: BTreeMap<u64, Vec<(usize, RowDerivation, Range<usize>)>> = BTreeMap::new();
        for (input, regions) in wanted.0.iter().enumerate().filter(|(input, _)| self.root(*input) == Some(source)) {
            for (line, columns) in regions.lines(self.width(input)) {
                let (line, derivation) = self.derivation(input, line);
                lines.entry(line).or_default().push((input, derivation, columns));
            }
        }
        let mut values = vec![0.0; length + usize::from(longer)];
        let (mut found, mut made) = (SampleAnnotations::default(), vec![]);
        for (line, takers) in lines {
            let columns = joined(takers.iter().map(|(_, derivation, columns)| derivation.needs(columns, length)).collect());
            let read = columns.iter().map(|c| c.len() as u64).sum::<u64>();
            match &self.sources[source] {
                InputSource::File { file, .. } => {
                    file.line(&self.inputs[source], start, line, longer, &columns, &mut values);
                    batch.bytes += read * file.width();
                }
                InputSource::Set(samples) => batch.bytes += samples.line(start + line, &columns, &mut values, &mut found)?,
                InputSource::Default(_) => {}
            }
            // Only data sets say where documents end and which labels count.
            let (end, mask) = match &self.sources[source] {
                InputSource::Set(_) => (found.end, found.mask.as_deref()),
                InputSource::File { .. } | InputSource::Default(_) => (values.len(), None),
            };
            let held = SourceRow { values: &values, length, borders: &found.borders, is_apart: self.is_apart(source), end, mask };
            for (input, derivation, columns) in takers {
                held.take(derivation, columns.clone(), &mut made);
                self.check(input, &made, (source, start), (line, columns.start))?;
                batch.extend(input, &made);
            }
        }
        Ok(())
    }

    /// Elements of a line of an input.
    fn width(&self, input: usize) -> u64 {
        self.inputs[input].dims.last().map_or(1, |d| d.size).max(1)
    }

    fn longer(&self, source: usize) -> bool {
        match &self.sources[source] {
            InputSource::File { longer, .. } => *longer,
            InputSource::Set(_) => true,
            InputSource::Default(_) => false,
        }
    }

    /// Whether the model keeps documents apart that are in one line.
    fn is_apart(&self, source: usize) -> bool {
        self.sources
            .iter()
            .any(|s| matches!(s, InputSource::Default(InputDefault::Documents(i, _) | InputDefault::Positions(i, _)) if *i as usize == source))
    }

    /// The input with the file or the data sets that an input's elements come from, if any do.
    fn root(&self, input: usize) -> Option<usize> {
        match &self.sources[input] {
            InputSource::File { .. } | InputSource::Set(_) => Some(input),
            InputSource::Default(InputDefault::Ahead(i)) => Some(self.base(*i).0),
            InputSource::Default(feed) => feed.source().map(|i| i as usize),
        }
    }

    /// How an input takes a line of its own from one of what it comes from, and from which.
    fn derivation(&self, input: usize, line: u64) -> (u64, RowDerivation<'_>) {
        match &self.sources[input] {
            InputSource::File { .. } | InputSource::Set(_) => (line, RowDerivation::Itself),
            InputSource::Default(InputDefault::Ahead(i)) => {
                let dims = &self.inputs[input].dims;
                let depths = dims.len().checked_sub(2).map_or(1, |d| dims[d].size).max(1);
                (line / depths, RowDerivation::Ahead { from: self.base(*i).1, depth: (line % depths) as usize })
            }
            InputSource::Default(feed) => (line, RowDerivation::Fed(feed)),
        }
    }

    /// The input with the file that one derives from which others look ahead in, and how much further on that one is.
    fn base(&self, from: u32) -> (usize, usize) {
        match self.sources[from as usize] {
            InputSource::Default(InputDefault::Next(base)) => (base as usize, 1),
            InputSource::File { .. } | InputSource::Set(_) | InputSource::Default(_) => (from as usize, 0),
        }
    }

    /// Each element is one that an input takes: of floats, one that is finite in memory too. `at` is the line of the
    /// source and the first of the columns, `start` where the step begins in it.
    fn check(&self, k: usize, values: &[f64], (source, start): (usize, u64), (line, column): (u64, usize)) -> Result<(), DataError> {
        let input = &self.inputs[k];
        let wrong = match &input.takes {
            Some(takes) => values.iter().position(|x| !takes.iter().any(|i| i.has(*x))),
            None => values.iter().position(|x| !input.dtype.is_finite(*x)),
        };
        let Some(wrong) = wrong else { return Ok(()) };
        let (value, at, name) = (values[wrong], column + wrong, input.name.clone());
        // This is the place in the source's line. A `Prev` line begins with a constant, which was checked before.
        let stands = match &self.sources[k] {
            InputSource::Default(InputDefault::Next(_)) => at + 1,
            InputSource::Default(InputDefault::Prev(..)) => at.saturating_sub(1),
            InputSource::File { .. } | InputSource::Set(_) | InputSource::Default(_) => at,
        };
        if let (InputSource::Set(samples), Some(takes)) = (&self.sources[source], &input.takes) {
            return Err(samples.wrong(start + line, stands, value, name, takes.clone()));
        }
        let InputSource::File { file, longer, number } = &self.sources[source] else { return Ok(()) };
        let width = self.width(source);
        let position = |at: usize| file.position(&self.inputs[source], start, line * width, *longer) + at as u64;
        let file = self.files[*number].clone();
        let Some(takes) = input.takes.clone() else {
            return Err(match value.is_finite() {
                true => DataError::Beyond { file, position: position(at), value, input: name, dtype: input.dtype },
                false => DataError::NotFinite { file, position: position(at), value, input: name },
            });
        };
        let input = name;
        Err(match &self.sources[k] {
            InputSource::File { .. }
            | InputSource::Set(_)
            | InputSource::Default(InputDefault::Const(_) | InputDefault::Next(_) | InputDefault::Prev(..)) => {
                DataError::Token { file, position: position(stands), value, input, takes }
            }
            InputSource::Default(InputDefault::Documents(..) | InputDefault::Positions(..) | InputDefault::Ahead(_)) => {
                DataError::Derived { file, position: position(at), value, input, takes }
            }
        })
    }
}

/// Columns in order, those joined that touch.
fn joined(mut columns: Vec<Range<usize>>) -> Vec<Range<usize>> {
    columns.retain(|c| !c.is_empty());
    columns.sort_by_key(|c| c.start);
    let mut out: Vec<Range<usize>> = vec![];
    for range in columns {
        match out.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            Some(_) | None => out.push(range),
        }
    }
    out
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

#[cfg(test)]
mod tests;
