//! Data sets read in place.

use super::format::{Dtype, HEADER, IndexedError, MAGIC, Token, VERSION, bare, paths};
use crate::cores;
use crate::map::{Map, number};
use blake3::{Hash, Hasher};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Number of samples that are hashed of a long file of tokens; the next is their length.
const SAMPLES: usize = 64;
const SAMPLE: usize = 64 << 10;

/// An indexed data set whose every number in `PREFIX.idx` was checked against the others and against the size of
/// `PREFIX.bin`.
pub struct Indexed {
    prefix: PathBuf,
    bin: PathBuf,
    index: Map,
    tokens: Map,
    dtype: Dtype,
    sequences: u64,
    /// Documents and one more.
    borders: u64,
}

impl Indexed {
    /// Opens `PREFIX.bin` and `PREFIX.idx`, and looks at all of the index.
    ///
    /// # Errors
    /// A file that is missing; an index that Megatron's builder would not have written for these tokens.
    pub fn open(prefix: &Path) -> Result<Indexed, IndexedError> {
        let prefix = bare(prefix);
        let (bin, idx) = paths(&prefix);
        let [tokens, index] = [&bin, &idx].map(|file| match Map::open(file) {
            Ok(map) => Ok(Some(map)),
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(cause) => Err(IndexedError::Io { file: file.clone(), cause }),
        });
        let (tokens, index) = match (tokens?, index?) {
            (Some(tokens), Some(index)) => (tokens, index),
            (Some(_), None) => return Err(IndexedError::Half { there: bin, missing: idx }),
            (None, Some(_)) => return Err(IndexedError::Half { there: idx, missing: bin }),
            (None, None) => return Err(IndexedError::Missing(prefix)),
        };
        let (dtype, sequences, borders) = header(&idx, &index)?;
        let out = Indexed { prefix, bin, index, tokens, dtype, sequences, borders };
        out.check(&idx)?;
        Ok(out)
    }

    /// Path of the data set, without the ends of its files' names.
    pub fn prefix(&self) -> &Path {
        &self.prefix
    }

    /// The file of its tokens.
    pub fn bin(&self) -> &Path {
        &self.bin
    }

    /// How its tokens are stored.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Number of sequences, those of all documents.
    pub fn sequences(&self) -> u64 {
        self.sequences
    }

    /// Number of documents, those without tokens among them.
    pub fn documents(&self) -> u64 {
        self.borders - 1
    }

    /// Number of tokens of all sequences.
    pub fn tokens(&self) -> u64 {
        self.tokens.len() as u64 / self.dtype.size()
    }

    /// Number of tokens of a range of sequences.
    pub fn tokens_of(&self, sequences: &Range<u64>) -> u64 {
        let begin = |n: u64| number(self.pointers(), n).map_or(self.tokens.len() as u64, u64::from_le_bytes);
        begin(sequences.end).saturating_sub(begin(sequences.start)) / self.dtype.size()
    }

    /// Where a token of a sequence is in the file of tokens.
    pub fn byte(&self, sequence: u64, token: u64) -> Option<u64> {
        number(self.pointers(), sequence).map(|begin| u64::from_le_bytes(begin).saturating_add(token.saturating_mul(self.dtype.size())))
    }

    /// The hash of the type and the number of tokens, and of the tokens themselves: of many, of samples that lie
    /// evenly.
    pub fn sampled(&self) -> Hash {
        let bytes: &[u8] = &self.tokens;
        let mut hasher = Hasher::new();
        hasher.update(&[self.dtype.code()]).update(&(bytes.len() as u64).to_le_bytes());
        if bytes.len() <= SAMPLES * SAMPLE {
            return hasher.update(bytes).finalize();
        }
        let last = bytes.len() - SAMPLE;
        for k in 0..SAMPLES {
            let from = (last as u128 * k as u128 / (SAMPLES - 1) as u128) as usize;
            hasher.update(&bytes[from..from + SAMPLE]);
        }
        hasher.finalize()
    }

    /// Tokens of a sequence.
    pub fn length(&self, sequence: u64) -> Option<u32> {
        number(self.lengths(), sequence).map(u32::from_le_bytes)
    }

    /// The sequences of a document.
    pub fn document(&self, document: u64) -> Option<Range<u64>> {
        let border = |n| number(self.documents_row(), n).map(u64::from_le_bytes);
        Some(border(document)?..border(document.checked_add(1)?)?)
    }

    /// The lengths of all sequences, four bytes each: what an order of samples depends on.
    pub fn lengths(&self) -> &[u8] {
        &self.index[HEADER..HEADER + 4 * self.sequences as usize]
    }

    fn pointers(&self) -> &[u8] {
        let begin = HEADER + 4 * self.sequences as usize;
        &self.index[begin..begin + 8 * self.sequences as usize]
    }

    fn documents_row(&self) -> &[u8] {
        &self.index[HEADER + 12 * self.sequences as usize..]
    }

    /// Tokens of a sequence as the file has them.
    ///
    /// # Errors
    /// The sequence has not so many.
    pub(crate) fn bytes(&self, sequence: u64, tokens: Range<u64>) -> Result<&[u8], IndexedError> {
        let length = self.length(sequence).map_or(0, u64::from);
        let Range { start: from, end: to } = tokens;
        let beyond = || IndexedError::Beyond { file: self.bin.clone(), sequence, from, to, length };
        let begin = number(self.pointers(), sequence).map(u64::from_le_bytes).filter(|_| to <= length).ok_or_else(beyond)?;
        let size = self.dtype.size();
        self.tokens.get((begin + from * size) as usize..(begin + to * size) as usize).ok_or_else(beyond)
    }

    /// Copies tokens of a sequence, from number `from` on, as many as there is room for.
    ///
    /// # Errors
    /// The sequence has not so many; a token that the buffer's type does not take.
    pub fn read<T: Token>(&self, sequence: u64, from: u64, out: &mut [T]) -> Result<(), IndexedError> {
        let bytes = self.bytes(sequence, from..from.saturating_add(out.len() as u64))?;
        let copied = match self.dtype {
            Dtype::U8 => copy(bytes, out, |[b]: [u8; 1]| b.into()),
            Dtype::I8 => copy(bytes, out, |b| i8::from_le_bytes(b).into()),
            Dtype::I16 => copy(bytes, out, |b| i16::from_le_bytes(b).into()),
            Dtype::U16 => copy(bytes, out, |b| u16::from_le_bytes(b).into()),
            Dtype::I32 => copy(bytes, out, |b| i32::from_le_bytes(b).into()),
            Dtype::I64 => copy(bytes, out, i64::from_le_bytes),
        };
        copied.map_err(|(at, value)| {
            let takes = if value < 0 { "0 or more" } else { T::TAKES };
            IndexedError::Token { file: self.bin.clone(), sequence, position: from + at as u64, value, takes }
        })
    }

    /// Holds the numbers of the index to each other.
    fn check(&self, idx: &Path) -> Result<(), IndexedError> {
        let size = self.dtype.size();
        let malformed = |at: usize, what: String| Err(IndexedError::Malformed { file: idx.to_path_buf(), at: at as u64, what });
        let (lengths, pointers, documents) = (self.lengths(), self.pointers(), self.documents_row());
        let (s, bytes) = (self.sequences as usize, self.tokens.len() as u64);
        let (at_pointers, at_documents) = (HEADER + 4 * s, HEADER + 12 * s);
        let pointer = |n: usize| number(pointers, n as u64).map_or(bytes, u64::from_le_bytes);
        if s == 0 && bytes != 0 {
            return malformed(18, format!("it says that there is no sequence, but `{}` has {bytes} bytes; {AGAIN}", self.bin.display()));
        }
        if s > 0 && pointer(0) != 0 {
            return malformed(at_pointers, format!("the first sequence begins at byte {}, and not at 0; {AGAIN}", pointer(0) as i64));
        }
        let sequences = |range: Range<usize>| {
            for n in range {
                let length = number(lengths, n as u64).map_or(0, i32::from_le_bytes);
                if length < 0 {
                    return malformed(HEADER + 4 * n, format!("sequence {n} has a length of {length}; {AGAIN}"));
                }
                let (begin, end) = (pointer(n), pointer(n + 1));
                // The product cannot overflow, as a length has 31 bits.
                if begin.checked_add(length as u64 * size) != Some(end) {
                    let after = if n + 1 == s { format!("`{}` ends", self.bin.display()) } else { "the next begins".into() };
                    let what = format!(
                        "sequence {n} begins at byte {}, has {length} tokens of {size} bytes, and {after} at byte {}",
                        begin as i64, end as i64
                    );
                    return malformed(at_pointers + 8 * n, format!("{what}; {AGAIN}"));
                }
            }
            Ok(())
        };
        cores::map(cores::ranges(s), sequences).into_iter().collect::<Result<(), _>>()?;
        let border = |n: usize| number(documents, n as u64).map_or(0, i64::from_le_bytes);
        let d = self.borders as usize;
        if border(0) != 0 {
            return malformed(at_documents, format!("the first document begins with sequence {}, and not with 0; {AGAIN}", border(0)));
        }
        if border(d - 1) != s as i64 {
            return malformed(at_documents + 8 * (d - 1), format!("documents end at sequence {}, of {s}; {AGAIN}", border(d - 1)));
        }
        let documents = |range: Range<usize>| match range.into_iter().find(|n| border(*n) > border(n + 1)) {
            Some(n) => malformed(
                at_documents + 8 * n,
                format!("document {n} begins with sequence {}, and the next with {}; {AGAIN}", border(n), border(n + 1)),
            ),
            None => Ok(()),
        };
        cores::map(cores::ranges(d - 1), documents).into_iter().collect()
    }
}

/// The way out of damage.
const AGAIN: &str = "the file is damaged or belongs to another `.bin`: copy both again, or tokenize again";

/// The type of tokens, the number of sequences and of borders, for which the file has the right size.
fn header(idx: &Path, index: &[u8]) -> Result<(Dtype, u64, u64), IndexedError> {
    let malformed = |at: usize, what: String| Err(IndexedError::Malformed { file: idx.to_path_buf(), at: at as u64, what });
    if !index.starts_with(&MAGIC) {
        return malformed(0, "it does not begin as the index of an indexed data set does, with MMIDIDX".into());
    }
    if index.len() < HEADER {
        return malformed(index.len(), format!("it ends within its header of {HEADER} bytes; {AGAIN}"));
    }
    let long = |at: usize| u64::from_le_bytes(std::array::from_fn(|k| index[at + k]));
    if long(9) != VERSION {
        return malformed(9, format!("it is of version {}, and only version {VERSION} is known", long(9)));
    }
    let code = index[17];
    let Some(dtype) = Dtype::ALL.into_iter().find(|d| d.code() == code) else {
        let floats = matches!(code, 6 | 7);
        let is = if floats { "that of floats, which are no tokens".into() } else { "none".into() };
        let known: Vec<String> = Dtype::ALL.iter().map(|d| format!("{} {}", d.code(), d.name())).collect();
        let is: String = is;
        return malformed(17, format!("the code {code} of the type of tokens is {is}; known are {}", known.join(", ")));
    };
    let (sequences, borders) = (long(18), long(26));
    if borders == 0 {
        return malformed(26, format!("it says that there are no borders of documents, where there is one at least; {AGAIN}"));
    }
    let expected = u128::from(sequences) * 12 + u128::from(borders) * 8 + HEADER as u128;
    let has = index.len() as u128;
    if has == expected + u128::from(sequences) && sequences > 0 {
        return malformed(expected as usize, "it has modes of sequences, so it is of a multimodal data set, which mcc does not read".into());
    }
    if has != expected {
        let end = if has < expected { "ends here" } else { "goes on" };
        let at = expected.min(has) as usize;
        return malformed(at, format!("{sequences} sequences and {borders} borders make {expected} bytes; it has {has} and {end}; {AGAIN}"));
    }
    Ok((dtype, sequences, borders))
}

/// Else the number of the token that is not taken, and what it is.
fn copy<const BYTES: usize, T: Token>(bytes: &[u8], out: &mut [T], value: impl Fn([u8; BYTES]) -> i64) -> Result<(), (usize, i64)> {
    let (tokens, _) = bytes.as_chunks::<BYTES>();
    for (at, (out, token)) in out.iter_mut().zip(tokens).enumerate() {
        let value = value(*token);
        *out = T::of(value).filter(|_| value >= 0).ok_or((at, value))?;
    }
    Ok(())
}
