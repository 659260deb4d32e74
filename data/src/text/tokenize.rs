//! All documents to tokens, on all cores, in the order in which they are read.

use super::documents::{Batch, Documents, Position};
use super::error::TextError;
use super::journal::{self, Journal, State};
use super::tokenizer::{Special, Tokenizer};
use crate::cores;
use crate::indexed::{Dtype, Writer, bare, paths};
use std::fs;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::mpsc::sync_channel;
use std::thread;
use std::time::UNIX_EPOCH;

/// Bytes of text that a core takes at a time.
const BATCH: usize = 1 << 18;
/// Batches that all cores make before they are written.
const ROUND: usize = 64;
/// Bytes of text after which a job could go on if it ended.
const SETTLED: usize = 64 << 20;

/// What becomes of a data set that is there already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    Refused,
    Replaced,
}

/// Where a job begins that was interrupted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begin {
    /// Where it was, if it is the same.
    On,
    Anew,
}

/// What is asked for.
pub struct Request<'a> {
    pub inputs: Vec<PathBuf>,
    pub tokenizer: &'a Tokenizer,
    /// Of JSON lines the field that has the text, of Parquet the column.
    pub field: String,
    /// The token that is put after each document that has any: [`Tokenizer::end`] says which.
    pub end: Option<u32>,
    pub special: Special,
    /// How tokens are stored; none takes what Megatron takes for the vocabulary.
    pub dtype: Option<Dtype>,
    pub prefix: PathBuf,
    pub existing: Existing,
    pub begin: Begin,
}

/// How far a job is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Of the files as they are on the disk, compressed or not.
    pub bytes: u64,
    pub of: u64,
    pub documents: u64,
    pub tokens: u64,
}

/// What was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Summary {
    pub dtype: Dtype,
    pub documents: u64,
    pub sequences: u64,
    pub tokens: u64,
    /// Documents that an earlier job had made.
    pub resumed: u64,
}

/// How a job ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Done(Summary),
    /// `progress` said so. The same job goes on from here.
    Stopped(Progress),
}

/// What a core makes of a batch.
struct Made {
    tokens: Vec<u32>,
    /// Of each document the lengths of its sequences.
    documents: Vec<Vec<usize>>,
}

/// Writes `PREFIX.bin` and `PREFIX.idx` of all documents, byte for byte as Megatron's `preprocess_data.py` does.
///
/// `progress` is told now and then how far it is, and may end it.
///
/// # Errors
/// A data set that is there already; text that cannot be read, with its file and line; an unfinished job with the
/// same prefix that was another one; what the file system says.
pub fn tokenize(request: &Request, mut progress: impl FnMut(&Progress) -> ControlFlow<()>) -> Result<Outcome, TextError> {
    let prefix = bare(&request.prefix);
    let (bin, idx) = paths(&prefix);
    if request.existing == Existing::Refused
        && let Some(there) = [bin, idx].into_iter().find(|f| f.exists())
    {
        return Err(TextError::Exists(there));
    }
    Documents::new(&request.inputs, &request.field, Position::default())?;
    let dtype = request.dtype.unwrap_or(Dtype::of_vocabulary(request.tokenizer.tokens()));
    let (job, of) = identity(request, dtype)?;
    let earlier = match request.begin {
        Begin::On => journal::resume(&prefix, &job)?,
        Begin::Anew => None,
    };
    // Tokens that are not there any more are made again.
    let writer = earlier.as_ref().and_then(|r| Writer::resume(&prefix, dtype, r.lengths.clone(), r.borders.clone()).ok());
    let earlier = earlier.filter(|_| writer.is_some());
    let mut writer = match writer {
        Some(writer) => writer,
        None => Writer::create(&prefix, dtype)?,
    };
    let mut journal = Journal::begin(&prefix, earlier.as_ref())?;
    let fresh = State { job, position: Position::default(), documents: 0, sequences: 0, tokens: 0 };
    let mut state = earlier.map_or(fresh, |r| r.state);
    let resumed = state.documents;
    let mut documents = Documents::new(&request.inputs, &request.field, state.position)?;
    let before: u64 = request.inputs.iter().take(state.position.input).filter_map(|f| fs::metadata(f).ok()).map(|m| m.len()).sum();
    let read = documents.read();
    let told = |state: &State| Progress { bytes: before + read.load(Ordering::Relaxed), of, documents: state.documents, tokens: state.tokens };

    // The next round is read while this one is made into tokens.
    let (sender, rounds) = sync_channel(1);
    let stopped = thread::scope(|scope| {
        scope.spawn(move || {
            loop {
                let round = round(&mut documents);
                let last = !matches!(&round, Ok(batches) if !batches.is_empty());
                if sender.send(round).is_err() || last {
                    return;
                }
            }
        });
        let mut unsettled = 0;
        // Dropped where this ends, so that the reader does not wait for ever.
        let rounds = rounds;
        for round in &rounds {
            let batches = round?;
            let ends: Vec<(Position, usize)> = batches.iter().map(|b| (b.end, b.bytes)).collect();
            let made = cores::queue(batches, |batch: Batch| make(request, &batch));
            for (made, (end, bytes)) in made.into_iter().zip(ends) {
                write(&mut writer, &mut journal, &mut state, &made?)?;
                state.position = end;
                unsettled += bytes;
            }
            let stop = progress(&told(&state)).is_break();
            if stop || unsettled >= SETTLED {
                writer.settle()?;
                journal.settle(&state)?;
                unsettled = 0;
            }
            if stop {
                return Ok(Some(told(&state)));
            }
        }
        Ok::<_, TextError>(None)
    })?;
    if let Some(progress) = stopped {
        return Ok(Outcome::Stopped(progress));
    }
    writer.finish()?;
    journal.finish()?;
    let State { documents, sequences, tokens, .. } = state;
    Ok(Outcome::Done(Summary { dtype, documents, sequences, tokens, resumed }))
}

/// By what a job is known again, and the bytes of all files.
fn identity(request: &Request, dtype: Dtype) -> Result<(Vec<String>, u64), TextError> {
    let mut job = vec![
        "files of version 1".into(),
        format!("a tokenizer with the hash {}", request.tokenizer.hash().to_hex()),
        format!("the field `{}`", request.field),
        request.end.map_or("no token at the end of documents".into(), |t| format!("the token {t} at the end of documents")),
        match request.special {
            Special::Added => "the tokenizer's special tokens".into(),
            Special::LeftOut => "no special tokens".into(),
        },
        format!("tokens of {}", dtype.name()),
        format!("{} files", request.inputs.len()),
    ];
    let mut bytes = 0;
    for (number, input) in request.inputs.iter().enumerate() {
        let about = fs::metadata(input).map_err(|cause| TextError::Io { file: input.clone(), cause })?;
        let changed = about.modified().ok().and_then(|t| t.duration_since(UNIX_EPOCH).ok()).unwrap_or_default().as_nanos();
        job.push(format!("`{}` as file {number}, of {} bytes, changed at {changed} ns", input.display(), about.len()));
        bytes += about.len();
    }
    Ok((job, bytes))
}

/// The next batches; none after the last document.
fn round(documents: &mut Documents) -> Result<Vec<Batch>, TextError> {
    let mut batches: Vec<Batch> = vec![];
    let mut bytes = 0;
    while batches.len() < ROUND && bytes < ROUND * BATCH {
        let Some(batch) = documents.batch(BATCH)? else { break };
        bytes += batch.bytes;
        batches.push(batch);
    }
    Ok(batches)
}

fn make(request: &Request, batch: &Batch) -> Result<Made, TextError> {
    let mut made = Made { tokens: vec![], documents: vec![] };
    batch.texts(&request.field, |texts| {
        let mut lengths = vec![];
        for text in texts {
            let tokens = request.tokenizer.encode(text, request.special)?;
            if !tokens.is_empty() {
                lengths.push(tokens.len());
                made.tokens.extend(tokens);
            }
        }
        if let (Some(end), Some(last)) = (request.end, lengths.last_mut()) {
            made.tokens.push(end);
            *last += 1;
        }
        made.documents.push(lengths);
        Ok(())
    })?;
    Ok(made)
}

fn write(writer: &mut Writer, journal: &mut Journal, state: &mut State, made: &Made) -> Result<(), TextError> {
    let mut rest = &made.tokens[..];
    for lengths in &made.documents {
        let (tokens, after) = rest.split_at(lengths.iter().sum());
        writer.document(tokens, lengths)?;
        journal.document(lengths)?;
        state.documents += 1;
        state.sequences += lengths.len() as u64;
        state.tokens += tokens.len() as u64;
        rest = after;
    }
    Ok(())
}
