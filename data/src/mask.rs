//! Which tokens of a data set count as labels: a data set of zeros and ones, `PREFIX.mask.bin` and `PREFIX.mask.idx`,
//! whose sequences are as long as those of `PREFIX`.

use crate::cores;
use crate::indexed::{Dtype, HEADER, Indexed, IndexedError, bare, paths, with};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Which tokens count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Masks {
    /// All.
    Nowhere,
    /// Those whose number in `PREFIX.mask` is 1, beside each data set.
    Beside,
}

/// Why a mask cannot be used.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum MaskError {
    #[error(transparent)]
    Indexed(#[from] IndexedError),
    #[error(
        "`{}` has no loss mask: neither `{}` nor its .idx is there; tokenizing prompts and answers writes both, or train on all tokens",
        .prefix.display(),
        .bin.display()
    )]
    Missing { prefix: PathBuf, bin: PathBuf },
    #[error("`{}`, byte {at}: {what}; the mask belongs to other tokens: tokenize again", .file.display())]
    Other { file: PathBuf, at: u64, what: String },
    #[error("`{}`, byte {byte}: the mask of token {token} of document {document} is {value}; it is 0 or 1", .file.display())]
    Value { file: PathBuf, byte: u64, token: u64, document: u32, value: i64 },
}

/// The prefix of the mask of a data set.
pub fn prefix(of: &Path) -> PathBuf {
    with(&bare(of), ".mask")
}

/// Whether a data set is the mask of one that is there.
pub(crate) fn is_mask(prefix: &Path) -> bool {
    let of = prefix.extension().is_some_and(|e| e == "mask").then(|| prefix.with_extension(""));
    of.is_some_and(|of| paths(&of).1.exists())
}

/// Whether a data set has a mask beside it, or a part of one.
pub fn is_beside(of: &Path) -> bool {
    let (bin, idx) = paths(&prefix(of));
    bin.exists() || idx.exists()
}

/// The mask of a data set.
pub struct Mask(Indexed);

impl Mask {
    /// Opens the mask beside a data set. Its numbers are looked at when they are read.
    ///
    /// # Errors
    /// There is none; it is not one of bytes, or not as long as the tokens, sequence by sequence.
    pub fn open(tokens: &Indexed) -> Result<Mask, MaskError> {
        let prefix = prefix(tokens.prefix());
        let mask = Indexed::open(&prefix).map_err(|e| match e {
            IndexedError::Missing(_) => MaskError::Missing { prefix: tokens.prefix().into(), bin: paths(&prefix).0 },
            other => other.into(),
        })?;
        let other = |at: usize, what: String| Err(MaskError::Other { file: paths(&prefix).1, at: at as u64, what });
        if mask.dtype() != Dtype::U8 {
            return other(17, format!("it has numbers of {}, and a mask has uint8", mask.dtype().name()));
        }
        if mask.sequences() != tokens.sequences() {
            return other(18, format!("it has {} sequences, and `{}` {}", mask.sequences(), tokens.prefix().display(), tokens.sequences()));
        }
        if mask.lengths() != tokens.lengths() {
            let differs = |n: &u64| mask.length(*n) != tokens.length(*n);
            let n = (0..mask.sequences()).find(differs).unwrap_or(0);
            let [own, of] = [&mask, tokens].map(|set| set.length(n).unwrap_or(0));
            let what = format!("sequence {n} has {own} numbers, and in `{}` it has {of} tokens", tokens.prefix().display());
            return other(HEADER + 4 * n as usize, what);
        }
        Ok(Mask(mask))
    }

    /// Hash by which the mask is known again.
    pub fn sampled(&self) -> blake3::Hash {
        self.0.sampled()
    }

    /// Copies numbers of a document, from one on, as many as there is room for.
    ///
    /// # Errors
    /// The document has not so many; one that is neither 0 nor 1.
    pub fn read(&self, document: u32, from: u64, out: &mut [u8]) -> Result<(), MaskError> {
        let bytes = self.0.bytes(document.into(), from..from.saturating_add(out.len() as u64))?;
        if let Some(wrong) = bytes.iter().position(|b| *b > 1) {
            let token = from + wrong as u64;
            let byte = self.0.byte(document.into(), token).unwrap_or(0);
            return Err(MaskError::Value { file: self.0.bin().into(), byte, token, document, value: bytes[wrong].into() });
        }
        out.copy_from_slice(bytes);
        Ok(())
    }
    /// How many tokens count, of all.
    ///
    /// # Errors
    /// A number that is neither 0 nor 1.
    pub fn counted(&self) -> Result<u64, MaskError> {
        let of = |range: Range<usize>| {
            let mut buffer = vec![];
            range.into_iter().try_fold(0, |sum, document| {
                buffer.resize(self.0.length(document as u64).unwrap_or(0) as usize, 0);
                self.read(document as u32, 0, &mut buffer)?;
                Ok(sum + buffer.iter().map(|b| u64::from(*b)).sum::<u64>())
            })
        };
        let sums = cores::map(cores::ranges(self.0.sequences() as usize), of);
        sums.into_iter().sum()
    }
}
