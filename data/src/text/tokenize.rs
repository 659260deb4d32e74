//! All documents to tokens, on all cores, in the order in which they are read.

use super::documents::{Batch, Documents, Fields, Position};
use super::error::TextError;
use super::journal::{self, Journal, Resumed, State};
use super::tokenizer::{Special, Tokenizer};
use crate::cores;
use crate::indexed::{Dtype, IndexedError, Writer, bare, paths};
use crate::mask;
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
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
    /// The job does not begin: [`TextError::Exists`].
    Refused,
    /// The data set is overwritten when the job is done.
    Replaced,
}

/// Where a job begins that was interrupted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begin {
    /// Where it was, if it is the same.
    Resume,
    /// From the first document on; what an interrupted job left is overwritten.
    Anew,
}

/// What is asked for.
pub struct TokenizeRequest<'a> {
    /// Files of text, in the order in which they are read.
    pub inputs: Vec<PathBuf>,
    /// What makes tokens of texts.
    pub tokenizer: &'a Tokenizer,
    /// Of JSON lines the fields, of Parquet the columns. With prompts, `PREFIX.mask` says which tokens are not
    /// theirs.
    pub fields: Fields,
    /// The token that is put after each document that has any: [`Tokenizer::end`] says which.
    pub end: Option<u32>,
    /// Whether the tokenizer adds the tokens that begin or end a text for its model.
    pub special: Special,
    /// How tokens are stored; none takes what Megatron takes for the vocabulary.
    pub dtype: Option<Dtype>,
    /// Path of the data set to be written, with or without the end of a file name.
    pub prefix: PathBuf,
    /// What becomes of a data set that has this prefix already.
    pub existing: Existing,
    /// Where to begin if a job with this prefix was interrupted.
    pub begin: Begin,
}

/// How far a job is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Bytes of the files that were read, as they are on the disk.
    pub bytes: u64,
    /// Bytes of all files as they are on the disk.
    pub of: u64,
    /// Documents written so far, those of an interrupted job among them.
    pub documents: u64,
    /// Tokens written so far, those that end documents among them.
    pub tokens: u64,
}

/// What was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Summary {
    /// How tokens are stored in the written data set.
    pub dtype: Dtype,
    /// Documents of the data set, those without tokens among them.
    pub documents: u64,
    /// Sequences of all documents.
    pub sequences: u64,
    /// Tokens of all sequences.
    pub tokens: u64,
    /// Tokens that the mask counts, if there is one.
    pub counted: Option<u64>,
    /// Documents that an earlier job had made.
    pub resumed: u64,
}

/// How a job ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All documents were written, and the files have their names.
    Done(Summary),
    /// `progress` said so. The same job goes on from here.
    Stopped(Progress),
}

/// What a core makes of a batch.
struct TokenizedBatch {
    tokens: Vec<u32>,
    /// Lengths of the sequences of each document.
    documents: Vec<Vec<usize>>,
    /// Of each token whether it is learnt, where that is not all.
    learnt: Vec<bool>,
}

/// What is written: tokens, and their mask where not all is learnt.
struct Writers {
    tokens: Writer,
    mask: Option<Writer>,
}

impl Writers {
    fn create(prefix: &Path, dtype: Dtype, fields: &Fields) -> Result<Writers, IndexedError> {
        let mask = fields.has_mask().then(|| Writer::create(&mask::prefix(prefix), Dtype::U8)).transpose()?;
        Ok(Writers { tokens: Writer::create(prefix, dtype)?, mask })
    }

    /// Goes on with what an earlier job left.
    fn resume(prefix: &Path, dtype: Dtype, fields: &Fields, from: &Resumed) -> Result<Writers, IndexedError> {
        let on = |prefix: &Path, dtype| Writer::resume(prefix, dtype, from.lengths.clone(), from.borders.clone());
        let mask = fields.has_mask().then(|| on(&mask::prefix(prefix), Dtype::U8)).transpose()?;
        Ok(Writers { tokens: on(prefix, dtype)?, mask })
    }

    fn settle(&mut self) -> Result<(), IndexedError> {
        self.mask.iter_mut().try_for_each(Writer::settle)?;
        self.tokens.settle()
    }

    /// Gives all files their names, that of the index of tokens last.
    fn finish(self) -> Result<(), IndexedError> {
        self.mask.map(Writer::finish).transpose()?;
        self.tokens.finish()
    }
}

/// The files that a job writes: those of tokens, and those of the mask where not all is learnt.
pub fn written(prefix: &Path, fields: &Fields) -> Vec<PathBuf> {
    let prefixes = [Some(bare(prefix)), fields.has_mask().then(|| mask::prefix(prefix))];
    let both = prefixes.into_iter().flatten().map(|p| <[PathBuf; 2]>::from(paths(&p)));
    both.flatten().collect()
}

/// Writes `PREFIX.bin` and `PREFIX.idx` of all documents, byte for byte as Megatron's `preprocess_data.py` does.
///
/// `progress` is told now and then how far it is, and may end it.
///
/// # Errors
/// A data set that is there already; text that cannot be read, with its file and line; an unfinished job with the
/// same prefix that was another one; what the file system says.
pub fn tokenize(request: &TokenizeRequest, mut progress: impl FnMut(&Progress) -> ControlFlow<()>) -> Result<Outcome, TextError> {
    let prefix = bare(&request.prefix);
    if request.existing == Existing::Refused
        && let Some(there) = written(&prefix, &request.fields).into_iter().find(|f| f.exists())
    {
        return Err(TextError::Exists(there));
    }
    Documents::new(&request.inputs, &request.fields, Position::default())?;
    let dtype = request.dtype.unwrap_or(Dtype::of_vocabulary(request.tokenizer.tokens()));
    let (job, of) = identity(request, dtype)?;
    let earlier = match request.begin {
        Begin::Resume => journal::resume(&prefix, &job)?,
        Begin::Anew => None,
    };
    // If the tokens of the earlier job are gone, the job begins anew.
    let writer = earlier.as_ref().and_then(|r| Writers::resume(&prefix, dtype, &request.fields, r).ok());
    let earlier = earlier.filter(|_| writer.is_some());
    let mut writer = match writer {
        Some(writer) => writer,
        None => Writers::create(&prefix, dtype, &request.fields)?,
    };
    let mut journal = Journal::begin(&prefix, earlier.as_ref())?;
    let fresh = State { job, position: Position::default(), documents: 0, sequences: 0, tokens: 0, counted: 0 };
    let mut state = earlier.map_or(fresh, |r| r.state);
    let resumed = state.documents;
    let mut documents = Documents::new(&request.inputs, &request.fields, state.position)?;
    let before: u64 = request.inputs.iter().take(state.position.input).filter_map(|f| fs::metadata(f).ok()).map(|m| m.len()).sum();
    // Progress counts bytes that were tokenized, not those that were read ahead.
    let told = |state: &State, read: u64| Progress { bytes: of.min(before + read), of, documents: state.documents, tokens: state.tokens };
    let begun = progress(&told(&state, state.position.offset));

    // The next round is read while this one is tokenized.
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
        let (mut unsettled, mut read) = (0, 0);
        // The receiver is dropped at the end of this closure, so that the reader does not wait for ever.
        let rounds = rounds;
        for round in &rounds {
            let batches = round?;
            let ends: Vec<(Position, usize)> = batches.iter().map(|b| (b.end, b.bytes)).collect();
            read = batches.last().map_or(read, |b| b.read);
            let made = cores::queue(batches, |batch: Batch| make(request, &batch));
            for (made, (end, bytes)) in made.into_iter().zip(ends) {
                write(&mut writer, &mut journal, &mut state, &made?)?;
                state.position = end;
                unsettled += bytes;
            }
            let stop = progress(&told(&state, read)).is_break() || begun.is_break();
            if stop || unsettled >= SETTLED {
                writer.settle()?;
                journal.settle(&state)?;
                unsettled = 0;
            }
            if stop {
                return Ok(Some(told(&state, read)));
            }
        }
        Ok::<_, TextError>(None)
    })?;
    if let Some(progress) = stopped {
        return Ok(Outcome::Stopped(progress));
    }
    writer.finish()?;
    journal.finish()?;
    let State { documents, sequences, tokens, counted, .. } = state;
    let counted = request.fields.has_mask().then_some(counted);
    Ok(Outcome::Done(Summary { dtype, documents, sequences, tokens, counted, resumed }))
}

/// What identifies a job, and the bytes of all its files.
fn identity(request: &TokenizeRequest, dtype: Dtype) -> Result<(Vec<String>, u64), TextError> {
    let mut job = vec![
        "files of version 1".into(),
        format!("a tokenizer with the hash {}", request.tokenizer.hash().to_hex()),
        format!("the field `{}`", request.fields.text),
        request.end.map_or("no token at the end of documents".into(), |t| format!("the token {t} at the end of documents")),
        match request.special {
            Special::Added => "the tokenizer's special tokens".into(),
            Special::LeftOut => "no special tokens".into(),
        },
        format!("tokens of {}", dtype.name()),
        format!("{} files", request.inputs.len()),
    ];
    job.extend(request.fields.prompt.iter().map(|field| format!("prompts of the field `{field}`")));
    job.extend(request.fields.chat.iter().map(|chat| format!("a chat template with the hash {}", chat.hash().to_hex())));
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

fn make(request: &TokenizeRequest, batch: &Batch) -> Result<TokenizedBatch, TextError> {
    let mut made = TokenizedBatch { tokens: vec![], documents: vec![], learnt: vec![] };
    batch.texts(&request.fields, |document| {
        let mut lengths = vec![];
        for text in document.texts {
            let tokens = match document.learnt {
                None => request.tokenizer.encode(text, request.special)?,
                Some(learnt) => {
                    let (tokens, counts) = request.tokenizer.encode_learnt(text, learnt, request.special)?;
                    made.learnt.extend(counts);
                    tokens
                }
            };
            if !tokens.is_empty() {
                lengths.push(tokens.len());
                made.tokens.extend(tokens);
            }
        }
        if let (Some(end), Some(last)) = (request.end, lengths.last_mut()) {
            made.tokens.push(end);
            // The end token counts if the end of the text does.
            let length: usize = document.texts.iter().map(|text| text.len()).sum();
            made.learnt.extend(document.learnt.map(|learnt| learnt.last().is_some_and(|last| last.end >= length)));
            *last += 1;
        }
        made.documents.push(lengths);
        Ok(())
    })?;
    Ok(made)
}

fn write(writers: &mut Writers, journal: &mut Journal, state: &mut State, made: &TokenizedBatch) -> Result<(), TextError> {
    let mut rest = &made.tokens[..];
    let mut learnt = &made.learnt[..];
    for lengths in &made.documents {
        let (tokens, after) = rest.split_at(lengths.iter().sum());
        if let Some(mask) = &mut writers.mask {
            let (own, after) = learnt.split_at(tokens.len());
            let counts: Vec<u32> = own.iter().copied().map(u32::from).collect();
            mask.document(&counts, lengths)?;
            state.counted += own.iter().filter(|is_learnt| **is_learnt).count() as u64;
            learnt = after;
        }
        writers.tokens.document(tokens, lengths)?;
        journal.document(lengths)?;
        state.documents += 1;
        state.sequences += lengths.len() as u64;
        state.tokens += tokens.len() as u64;
        rest = after;
    }
    Ok(())
}
