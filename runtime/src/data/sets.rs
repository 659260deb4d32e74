//! Data sets as Megatron-LM has them (the crate `data`): which there are, and the samples of a part of a run.

use super::derive::NOTHING;
use super::error::{DataError, WrongToken};
use super::loaded;
use crate::conditions::DataMark;
use data::blend::Blend;
use data::dataset::{Cache, Dataset, Error, Piece, Request, Source};
use data::indexed::{Indexed, IndexedError};
use data::mask::{Masks, is_beside};
use data::order::{Layout, Overlong};
use data::packing::Statistics;
use data::shards::expand;
use data::split::{Part, Split};
use ir::graph::InputDefault;
use ir::op::DType;
use ir::program::{InputEntry, Interval, Job};
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

mod validation;

pub use validation::{RunSamples, Validation};

/// What the parts of a run are called.
pub const PARTS: [&str; 3] = ["training", "validation", "test"];

/// The data sets of a run, in the words of Megatron-LM's flags.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataSets {
    /// The data sets that each part of a run reads.
    pub names: SetNames,
    /// Where orders of samples are kept; else beside each data set.
    pub cache: Option<PathBuf>,
    /// How validation data are evaluated.
    pub validation: Validation,
    /// A sample has whole documents, as many as fit, and this becomes of longer ones; else it is cut of a stream.
    pub packing: Option<Overlong>,
    /// Whether `PREFIX.mask` beside each data set says which tokens count as labels; else all do.
    pub is_masked: bool,
}

/// One prefix, several, or weights and prefixes in turn.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SetNames {
    /// Of which each part of a run has some documents.
    Shared {
        /// The words of `--data-path`: prefixes, or weights and prefixes in turn.
        blend: Vec<String>,
        /// Weights of training, validation and test, as in `99,1,0`.
        split: String,
    },
    /// Data sets of training, validation and test; nothing where there is none.
    Own([Vec<String>; 3]),
}

impl DataSets {
    /// The same, wherever a process runs: paths are absolute, and patterns stand for what fits them now.
    ///
    /// # Errors
    /// What is no blend; patterns that nothing fits.
    pub fn settled(&self) -> Result<DataSets, DataError> {
        let words = |part: usize, words: &[String]| -> Result<Vec<String>, DataError> {
            let blend = Blend::parse(words).map_err(|cause| DataError::Blend { part: PARTS[part], cause })?;
            let Blend { prefixes, weights } = expand(blend)?;
            let path = |p: &PathBuf| {
                let cause = |cause| Error::Indexed(IndexedError::Io { file: p.clone(), cause });
                let absolute = std::path::absolute(p).map_err(cause)?;
                // Other processes get the path as text.
                let text = absolute.to_str().map(str::to_owned);
                text.ok_or_else(|| cause(io::Error::new(io::ErrorKind::InvalidInput, "its name is not UTF-8")))
            };
            let paths = prefixes.iter().map(path).collect::<Result<Vec<String>, Error>>()?;
            Ok(match weights {
                Some(weights) => weights.iter().map(f64::to_string).zip(paths).flat_map(|(weight, path)| [weight, path]).collect(),
                None => paths,
            })
        };
        let names = match &self.names {
            SetNames::Shared { blend, split } => {
                Split::parse(split).map_err(DataError::Split)?;
                SetNames::Shared { blend: words(0, blend)?, split: split.clone() }
            }
            SetNames::Own(own) => {
                let mut all: [Vec<String>; 3] = Default::default();
                for (part, own) in own.iter().enumerate().filter(|(_, own)| !own.is_empty()) {
                    all[part] = words(part, own)?;
                }
                SetNames::Own(all)
            }
        };
        DataSets { names, ..self.clone() }.named()
    }

    /// The data sets of all parts, each once.
    pub fn prefixes(&self) -> Vec<PathBuf> {
        let words: Vec<&[String]> = match &self.names {
            SetNames::Shared { blend, .. } => vec![blend],
            SetNames::Own(own) => own.iter().map(Vec::as_slice).collect(),
        };
        let mut all: Vec<PathBuf> = words.into_iter().filter_map(|words| Blend::parse(words).ok()).flat_map(|blend| blend.prefixes).collect();
        all.sort();
        all.dedup();
        all
    }

    /// Whether there is anything for a part.
    ///
    /// # Errors
    /// What is no split.
    pub fn has(&self, part: usize) -> Result<bool, DataError> {
        Ok(match &self.names {
            SetNames::Shared { split, .. } => Split::parse(split).map_err(DataError::Split)?.0[part].is_some(),
            SetNames::Own(own) => !own[part].is_empty(),
        })
    }

    /// The samples of each part that takes any: so many of them, shuffled by a seed, as long as the model's input.
    ///
    /// # Errors
    /// Data sets that cannot be read or are too small; an input that takes none.
    fn open_parts(&self, job: &Job, seed: u64, takes: [u64; 3]) -> Result<[Option<Samples>; 3], DataError> {
        let fed = input(job)?;
        self.fits(job, fed as u32)?;
        let entry = &job.inputs[fed];
        let length = entry.dims[1].size;
        let sequence_length = u32::try_from(length).ok().filter(|n| *n < u32::MAX);
        let sequence_length = sequence_length.ok_or_else(|| DataError::Inputs(format!("a sequence has {length} tokens"), entry.name.clone()))?;
        let seed = u32::try_from(seed).map_err(|_| DataError::Seed(seed))?;
        let is_taken = |part: Part| takes[part as usize] > 0;
        if let SetNames::Shared { split, .. } = &self.names
            && is_taken(Part::Train)
            && !self.has(0)?
        {
            return Err(DataError::Untrained(split.clone()));
        }
        let parse = |part: usize, words: &[String]| Blend::parse(words).map_err(|cause| DataError::Blend { part: PARTS[part], cause });
        let source = match &self.names {
            SetNames::Shared { blend, split } => {
                let mut split = Split::parse(split).map_err(DataError::Split)?;
                Part::ALL.into_iter().filter(|part| !is_taken(*part)).for_each(|part| split.0[part as usize] = None);
                Source::Shared { blend: parse(0, blend)?, split }
            }
            SetNames::Own(own) => {
                let mut blends = [const { None }; 3];
                for part in Part::ALL.into_iter().filter(|part| is_taken(*part) && !own[*part as usize].is_empty()) {
                    blends[part as usize] = Some(parse(part as usize, &own[part as usize])?);
                }
                Source::Own(blends)
            }
        };
        let cache = self.cache.clone().map_or(Cache::Beside, Cache::Folder);
        let (is_full, valid) = (self.validation.is_full, Part::Valid as usize);
        let mut samples = takes.map(Some);
        if is_full {
            samples[valid] = None;
        }
        let layout = self.packing.map_or(Layout::Stream, Layout::Packed);
        let masks = if self.is_masked { Masks::Beside } else { Masks::Nowhere };
        let opened = data::dataset::open(&Request { seed, cache, layout, masks, ..Request::new(source, samples, sequence_length) })?;
        let mut out = [const { None }; 3];
        for (part, set) in opened.parts.into_iter().enumerate() {
            let Some(set) = set else { continue };
            let (has, takes) = (set.len(), if is_full && part == valid { job.global_batch } else { takes[part] });
            if has < takes {
                return Err(DataError::Short { part: PARTS[part], has, takes });
            }
            out[part] =
                Some(Samples { said: self.said(part, seed, &set), part: PARTS[part], set, is_masked: self.is_masked, scratch: RefCell::default() });
        }
        Ok(out)
    }

    /// Whether a model has what rows of whole documents and masks need of it.
    fn fits(&self, job: &Job, fed: u32) -> Result<(), DataError> {
        let loads = || (0..job.inputs.len()).filter(|k| loaded(job, *k as u32)).map(|k| &job.inputs[k]);
        if self.packing.is_some() && !loads().any(|i| matches!(i.default, Some(InputDefault::Documents(from, _)) if from == fed)) {
            return Err(DataError::Joined);
        }
        if self.packing.is_none() && !self.is_masked {
            return Ok(());
        }
        let is_label = |input: &&InputEntry| match input.default {
            Some(InputDefault::Next(from)) => from == fed,
            Some(InputDefault::Ahead(_)) => true,
            Some(InputDefault::Const(_) | InputDefault::Prev(..) | InputDefault::Documents(..) | InputDefault::Positions(..)) | None => false,
        };
        let labels: Vec<&InputEntry> = loads().filter(is_label).collect();
        let leaves_out = |label: &InputEntry| label.takes.as_ref().is_none_or(|takes| takes.iter().any(|i| i.has(NOTHING)));
        match labels.iter().find(|label| !leaves_out(label)) {
            Some(label) => Err(DataError::Counted(label.name.clone())),
            None if labels.is_empty() && self.is_masked => Err(DataError::Unlabelled(job.inputs[fed as usize].name.clone())),
            None => Ok(()),
        }
    }

    /// What a part is known by to users.
    fn said(&self, part: usize, seed: u32, set: &Dataset) -> String {
        let (words, split) = match &self.names {
            SetNames::Shared { blend, split } => (blend, format!("split {split}, ")),
            SetNames::Own(own) => (&own[part], String::new()),
        };
        let epochs = if set.epochs() == 1 { "1 epoch".into() } else { format!("{} epochs", set.epochs()) };
        let packed = match self.packing {
            None => "",
            Some(Overlong::Cut) => ", packed",
            Some(Overlong::Split) => ", packed, long documents split",
        };
        let masked = if self.is_masked { ", masked" } else { "" };
        format!("{} ({split}seed {seed}, {epochs}{packed}{masked})", words.join(" "))
    }

    /// Data sets with masks, where masks do not count.
    pub fn unused_masks(&self) -> Vec<PathBuf> {
        self.prefixes().into_iter().filter(|p| !self.is_masked && is_beside(p)).collect()
    }
}

/// The input that data sets feed: the only one without a default that programs load.
///
/// # Errors
/// There is none, or it is not one of sequences of tokens.
pub fn input(job: &Job) -> Result<usize, DataError> {
    let open = |k: &usize| job.inputs[*k].default.is_none() && loaded(job, *k as u32);
    let open: Vec<usize> = (0..job.inputs.len()).filter(open).collect();
    let is_of_tokens = |input: &InputEntry| input.dtype == DType::I32 && input.dims.len() == 2;
    match open[..] {
        [only] if is_of_tokens(&job.inputs[only]) => Ok(only),
        [only] => {
            let input = &job.inputs[only];
            let what = format!("`{}` has {} dims of {}", input.name, input.dims.len(), input.dtype.name());
            Err(DataError::Inputs(what, input.name.clone()))
        }
        [] => Err(DataError::Inputs("this model has none".into(), "INPUT".into())),
        [first, ..] => {
            let names: Vec<String> = open.iter().map(|k| format!("`{}`", job.inputs[*k].name)).collect();
            Err(DataError::Inputs(format!("this model takes {}", names.join(" and ")), job.inputs[first].name.clone()))
        }
    }
}

/// What a sample turned out to be, beside its tokens.
#[derive(Default)]
pub struct SampleAnnotations {
    /// The elements with which documents begin, and what comes behind the last.
    pub borders: Vec<usize>,
    /// Where the last document ends.
    pub end: usize,
    /// 1 for each element that counts as a label, else 0, where masks are read.
    pub mask: Option<Vec<u8>>,
}

/// The samples of a part of a run, in order.
pub struct Samples {
    set: Dataset,
    part: &'static str,
    said: String,
    is_masked: bool,
    scratch: RefCell<(Vec<i64>, Vec<Piece>)>,
}

impl Samples {
    /// How many there are.
    pub fn count(&self) -> u64 {
        self.set.len()
    }

    /// What identifies the samples: their order, and the tokens of the data sets.
    pub fn mark(&self, input: &str) -> DataMark {
        let bytes = self.set.sets().map(|tokens| tokens.tokens() * tokens.dtype().size()).sum();
        DataMark { input: input.into(), file: self.said.clone(), bytes, hash: self.set.course().to_hex().to_string() }
    }

    /// Columns of a sample, others stay as they are; with which documents begin, and which of these columns count.
    /// Gives the bytes that were read.
    ///
    /// # Errors
    /// There is no such sample; tokens below 0; a mask that is neither 0 nor 1; a damaged order.
    pub fn line(&self, sample: u64, columns: &[Range<usize>], out: &mut [f64], found: &mut SampleAnnotations) -> Result<u64, DataError> {
        let mut scratch = self.scratch.borrow_mut();
        let (tokens, pieces) = &mut *scratch;
        let width = self.set.width();
        tokens.resize(width, 0);
        let read = self.set.columns(sample, columns, tokens, pieces)?;
        for column in columns {
            out[column.clone()].iter_mut().zip(&tokens[column.clone()]).for_each(|(out, token)| *out = *token as f64);
        }
        found.borders.clear();
        found.borders.extend(pieces.iter().map(|piece| piece.at as usize));
        found.end = read.tokens;
        if read.tokens < width {
            found.borders.push(read.tokens);
        }
        if self.is_masked {
            let mask = found.mask.get_or_insert_default();
            mask.resize(width, 0);
            self.set.counted(&read, columns, pieces, mask)?;
        }
        let size = self.of(read.set).map_or(0, |tokens| tokens.dtype().size()) + u64::from(self.is_masked);
        Ok(columns.iter().map(|c| c.len().min(read.tokens.saturating_sub(c.start)) as u64).sum::<u64>() * size)
    }

    /// What packing made of its documents, for who starts a run; nothing of those that are not packed.
    pub fn packing(&self) -> Option<String> {
        let Statistics { documents, tokens, median, longest, rows, epochs, filled, long, lost } = self.set.packing()?;
        let (part, room) = (self.part, self.set.width() - 1);
        let mean = tokens as f64 / documents as f64;
        let over = if epochs > 1 { format!(" in {epochs} epochs") } else { String::new() };
        // The percentage is rounded down, as rows with a gap are not full.
        let percent = (filled * 1e3).floor() / 10.0;
        let mut text = format!(
            "{part}: {documents} documents of {mean:.1} tokens (median {median}, longest {longest}) are packed into {rows} rows of {room}{over}, {percent:.1} % full"
        );
        if lost > 0 {
            let share = 100.0 * lost as f64 / tokens as f64;
            text += &format!("; cut to a row: {long}, which leaves out {share:.1} % of all tokens (--packing=split keeps them)");
        } else if long > 0 {
            text += &format!("; split into rows: {long}");
        }
        Some(text)
    }

    fn of(&self, set: usize) -> Option<&Indexed> {
        self.set.sets().nth(set)
    }

    /// That an element of a sample is none that an input takes, with its place in a file.
    pub fn wrong(&self, sample: u64, at: usize, value: f64, input: String, takes: Vec<Interval>) -> DataError {
        let (mut tokens, mut pieces) = (vec![0i64; self.set.width()], vec![]);
        let found = match self.set.columns(sample, &[], &mut tokens, &mut pieces) {
            Ok(found) => found,
            Err(e) => return e.into(),
        };
        let piece = pieces.iter().rfind(|piece| piece.at as usize <= at).copied();
        let (document, token) = piece.map_or((0, 0), |p| (p.document, u64::from(p.from) + at as u64 - u64::from(p.at)));
        let indexed = self.of(found.set);
        let byte = indexed.and_then(|tokens| tokens.byte(document.into(), token)).unwrap_or(0);
        let file = indexed.map_or(Path::new(""), Indexed::bin).to_path_buf();
        DataError::Sample(Box::new(WrongToken { file, byte, token, document, sample, part: self.part, value, input, takes }))
    }
}

#[cfg(test)]
mod tests;
