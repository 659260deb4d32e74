//! What a data set holds.

use crate::cores;
use crate::indexed::{Dtype, Indexed, IndexedError};

/// How closely a data set is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InspectDepth {
    /// Only the index is read.
    Index,
    /// At every token too.
    Tokens,
}

/// What a data set holds. Lengths are the tokens of documents.
#[derive(Clone, Debug, PartialEq)]
pub struct Contents {
    /// How tokens are stored.
    pub dtype: Dtype,
    /// Number of documents, those without tokens among them.
    pub documents: u64,
    /// Number of sequences of all documents.
    pub sequences: u64,
    /// Number of tokens of all documents.
    pub tokens: u64,
    /// Documents without tokens.
    pub empty: u64,
    /// Length of the shortest document; 0 if there is none.
    pub shortest: u64,
    /// The least length that half of the documents do not exceed.
    pub median: u64,
    /// Length of the longest document; 0 if there is none.
    pub longest: u64,
    /// Largest token, if all tokens were looked at and there are any.
    pub largest_token: Option<u32>,
}

/// Tokens that are copied at once.
const TOKENS: usize = 1 << 16;

/// # Errors
/// A token below 0 or above 4294967295, if all are looked at.
pub fn inspect(set: &Indexed, depth: InspectDepth) -> Result<Contents, IndexedError> {
    let lengths = cores::map(cores::ranges(set.documents() as usize), |range| {
        let length = |d: usize| set.document(d as u64).into_iter().flatten().filter_map(|s| set.length(s)).map(u64::from).sum();
        range.map(length).collect::<Vec<u64>>()
    });
    let mut lengths = lengths.concat();
    let middle = lengths.len().saturating_sub(1) / 2;
    let median = if lengths.is_empty() { 0 } else { *lengths.select_nth_unstable(middle).1 };
    let largest_token = match depth {
        InspectDepth::Index => None,
        InspectDepth::Tokens => {
            let ranges = cores::ranges(set.sequences() as usize);
            let found = cores::map(ranges, |range| largest(set, range.start as u64..range.end as u64));
            found.into_iter().collect::<Result<Vec<_>, _>>()?.into_iter().flatten().max()
        }
    };
    Ok(Contents {
        dtype: set.dtype(),
        documents: set.documents(),
        sequences: set.sequences(),
        tokens: set.tokens(),
        empty: lengths.iter().filter(|l| **l == 0).count() as u64,
        shortest: lengths.iter().copied().min().unwrap_or(0),
        median,
        longest: lengths.iter().copied().max().unwrap_or(0),
        largest_token,
    })
}

fn largest(set: &Indexed, sequences: std::ops::Range<u64>) -> Result<Option<u32>, IndexedError> {
    let mut most = None;
    let mut tokens = vec![0u32; TOKENS];
    for sequence in sequences {
        let length = set.length(sequence).unwrap_or(0) as usize;
        for from in (0..length).step_by(TOKENS) {
            let some = &mut tokens[..TOKENS.min(length - from)];
            set.read(sequence, from as u64, some)?;
            most = most.max(some.iter().copied().max());
        }
    }
    Ok(most)
}

/// The tokens of a document, up to so many.
///
/// # Errors
/// A token below 0 or above 4294967295.
pub fn document(set: &Indexed, document: u64, most: usize) -> Result<Vec<u32>, IndexedError> {
    let mut tokens = vec![];
    for sequence in set.document(document).into_iter().flatten() {
        let length = set.length(sequence).unwrap_or(0) as usize;
        let begin = tokens.len();
        tokens.resize((begin + length).min(most), 0);
        set.read(sequence, 0, &mut tokens[begin..])?;
    }
    Ok(tokens)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::indexed::Writer;

    #[test]
    fn contents_count_documents_and_not_sequences() {
        let folder = tempfile::tempdir().expect("a folder");
        let prefix = folder.path().join("x");
        let mut writer = Writer::create(&prefix, Dtype::U16).expect("a writer");
        writer.document(&[1, 2, 3], &[1, 2]).and_then(|()| writer.document(&[], &[])).expect("written");
        writer.document(&[900; 100], &[100]).and_then(|()| writer.finish()).expect("written");
        let set = Indexed::open(&prefix).expect("a data set");
        let contents = inspect(&set, InspectDepth::Tokens).expect("contents");
        let (documents, sequences, tokens, largest_token) = (3, 3, 103, Some(900));
        let expected = Contents { dtype: Dtype::U16, documents, sequences, tokens, empty: 1, shortest: 0, median: 3, longest: 100, largest_token };
        assert_eq!(contents, expected);
        assert_eq!(inspect(&set, InspectDepth::Index).expect("contents"), Contents { largest_token: None, ..expected });
        assert_eq!(document(&set, 0, 2).expect("tokens"), [1, 2]);
        assert_eq!(document(&set, 0, 9).expect("tokens"), [1, 2, 3]);
        assert!(document(&set, 7, 9).expect("tokens").is_empty());
    }
}
