//! The order of one data set's samples: `GPTDataset` of megatron-core.
//!
//! All tokens of the documents, in an order drawn anew for each epoch, are cut into samples of `sequence_length`
//! tokens, of which each also takes the first token of the next. Samples are drawn in another order again.
//! Documents are Megatron's sequences: what `PREFIX.idx` has a length of.
//!
//! | index | has | bytes |
//! |---|---|---|
//! | documents | those of all epochs, shuffled; a last one used to less than 80 % by itself | 4 a document and epoch |
//! | samples | of each sample and of the end: the place in `documents`, and the token there | 8 a sample |
//! | shuffle | the sample that comes n-th; those of a last epoch that stands by itself come last | 4 a sample |
//!
//! The source is `megatron/core/datasets/gpt_dataset.py` and `build_sample_idx` in `helpers.cpp`, megatron-core 0.16.

use crate::cache::Rows;
use crate::cores;
use crate::map::{Numbers, number};
use crate::random::RandomState;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Whether samples take one token more than they are long: the label of the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtraToken {
    /// One more, which is also the first of the next sample.
    Included,
    /// No token more than `sequence_length`.
    Omitted,
}

impl ExtraToken {
    /// Tokens of a sample beyond `sequence_length`: 1 or 0.
    pub fn tokens(self) -> u32 {
        match self {
            ExtraToken::Included => 1,
            ExtraToken::Omitted => 0,
        }
    }
}

/// What becomes of tokens at the end that are too few for a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remainder {
    /// Tokens that are too few for a sample are in none.
    Dropped,
    /// A last sample, which is filled up.
    Kept,
}

/// How documents become samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// One after the other, cut each `sequence_length` tokens: Megatron's.
    Stream,
    /// As many in a sample as fit, whole ([`crate::packing`]).
    Packed(Overlong),
}

/// What becomes of a document that is longer than a packed sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Overlong {
    /// It is cut: what is behind is in no sample.
    Cut,
    /// It is split into pieces of a sample's length and a rest, each of which goes where it fits.
    Split,
}

/// What decides an order, beside the lengths of documents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Tokens of a sample, without the extra one; 1 or more.
    pub sequence_length: u32,
    /// Whether a sample has the token behind its last one too.
    pub extra: ExtraToken,
    /// Whether tokens at the end that are too few for a sample make one.
    pub rest: Remainder,
    /// Seed of the generator that shuffles documents and then samples.
    pub seed: u32,
    /// As many epochs are shuffled as make so many samples; none asks for one epoch.
    pub samples: Option<u64>,
    /// The documents that are used, of all of the data set.
    pub documents: Range<u64>,
}

/// Why there is no order.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum OrderError {
    #[error("a sequence length of 0; it is 1 or more")]
    Length,
    #[error("documents {} to {} of {of} are asked for", .asked.start, .asked.end)]
    Documents { asked: Range<u64>, of: u64 },
    #[error("{}; give this part more of the split or nothing (as in 95,5,0), or leave out the data set", nothing(.0))]
    Empty(Range<u64>),
    #[error("{samples} samples; an order has at most {MOST}: ask for fewer, or for longer sequences")]
    Samples { samples: u128 },
    #[error("{epochs} epochs of {documents} documents are more than {MOST} documents: ask for fewer samples, or join documents")]
    Epochs { epochs: u128, documents: u64 },
    #[error("its indices have a place outside of the data set: the cache is damaged, and is built anew if it is deleted")]
    Damaged,
}

fn nothing(documents: &Range<u64>) -> String {
    let Range { start, end } = documents;
    if documents.is_empty() { "the split leaves it no document".into() } else { format!("its documents {start} to {end} have no tokens") }
}

/// The most documents of all epochs, and the most samples.
pub const MOST: u32 = u32::MAX - 2;

/// The order of one data set's samples.
pub struct Order {
    /// Documents; samples, two numbers each; shuffle.
    pub(crate) rows: Rows,
}

/// Where a sample begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampleStart {
    /// Index in the order of documents.
    pub document: u32,
    /// The document's token.
    pub token: u32,
}

/// What follows from a rule and the number of tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extent {
    /// How often the documents are gone through, 1 or more.
    pub epochs: u32,
    /// Samples that all epochs make, at most [`MOST`].
    pub samples: u32,
    /// The samples before a last epoch that is shuffled by itself.
    pub before_last: Option<u32>,
}

impl Extent {
    /// # Errors
    /// No tokens; more than an order can have.
    pub fn of(rule: &Rule, tokens: u64) -> Result<Extent, OrderError> {
        if rule.sequence_length == 0 {
            return Err(OrderError::Length);
        }
        if tokens == 0 {
            return Err(OrderError::Empty(rule.documents.clone()));
        }
        let (length, extra, tokens) = (u128::from(rule.sequence_length), u128::from(rule.extra.tokens()), u128::from(tokens));
        let epochs = rule.samples.map_or(1, |n| (u128::from(n) * length + extra).div_ceil(tokens).max(1));
        let documents = rule.documents.end - rule.documents.start;
        if epochs * u128::from(documents) > u128::from(MOST) {
            return Err(OrderError::Epochs { epochs, documents });
        }
        let all = epochs * tokens - extra;
        let samples = match rule.rest {
            Remainder::Dropped => all / length,
            // Megatron divides in f32, and the rounding is part of the order.
            Remainder::Kept => (all as f32 / rule.sequence_length as f32).ceil() as u128,
        };
        if samples > u128::from(MOST) {
            return Err(OrderError::Samples { samples });
        }
        let before_last = rule.samples.filter(|_| epochs > 1).and_then(|asked| {
            let before = ((epochs - 1) * tokens - extra) / length;
            let from_last = u128::from(asked).saturating_sub(before);
            let of_epoch = (tokens - extra) / length;
            (from_last < (0.8 * of_epoch as f64) as u128).then_some(before as u32)
        });
        Ok(Extent { epochs: epochs as u32, samples: samples as u32, before_last })
    }
}

impl Order {
    /// Builds the order for documents of these lengths, as [`crate::indexed::Indexed::lengths`] gives them.
    ///
    /// # Errors
    /// No tokens; more samples or documents than an order can have.
    pub fn build(rule: &Rule, lengths: &[u8]) -> Result<Order, OrderError> {
        let of = (lengths.len() / 4) as u64;
        let Range { start, end } = rule.documents;
        if start > end || end > of {
            return Err(OrderError::Documents { asked: rule.documents.clone(), of });
        }
        let length = |document: u32| number(lengths, document.into()).map_or(0, u32::from_le_bytes);
        let tokens =
            cores::map(cores::ranges((end - start) as usize), |range| range.map(|n| u64::from(length((start + n as u64) as u32))).sum::<u64>());
        let extent = Extent::of(rule, tokens.into_iter().sum())?;
        if end > u64::from(MOST) {
            return Err(OrderError::Epochs { epochs: extent.epochs.into(), documents: end });
        }
        let mut random = RandomState::new(rule.seed);
        let documents = shuffled_documents(start as u32..end as u32, &extent, &mut random);
        // Samples depend on no random number and the shuffle depends on no sample, so both are made at once.
        let (samples, shuffle) = std::thread::scope(|scope| {
            let samples = scope.spawn(|| cut(rule, &extent, &documents, length));
            let shuffle = shuffled_samples(&extent, &mut random);
            (samples.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), shuffle)
        });
        Ok(Order { rows: [documents, samples, shuffle].map(Numbers::Memory) })
    }

    /// The order that rows are, if they have the lengths for it.
    pub(crate) fn of(rows: Rows) -> Option<Order> {
        (rows[1].len() == 2 * rows[2].len() + 2).then_some(Order { rows })
    }

    /// Samples.
    pub fn len(&self) -> u64 {
        self.rows[2].len()
    }

    /// Whether there is no sample, as where documents have too few tokens.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The document at a place in the order of documents.
    pub fn document(&self, at: u32) -> Option<u32> {
        self.rows[0].get(at.into())
    }

    /// Where sample number n begins.
    pub fn sample_start(&self, n: u64) -> Option<SampleStart> {
        let sample = u64::from(self.rows[2].get(n)?);
        Some(SampleStart { document: self.rows[1].get(2 * sample)?, token: self.rows[1].get(2 * sample + 1)? })
    }

    /// The documents of all epochs, as Megatron's `document_index`.
    pub fn documents(&self) -> impl Iterator<Item = u32> + '_ {
        self.rows[0].iter()
    }

    /// Places and tokens in turn, as the rows of Megatron's `sample_index`.
    pub fn samples(&self) -> impl Iterator<Item = u32> + '_ {
        self.rows[1].iter()
    }

    /// The numbers of Megatron's `shuffle_index`.
    pub fn shuffle(&self) -> impl Iterator<Item = u32> + '_ {
        self.rows[2].iter()
    }
}

fn shuffled_documents(documents: Range<u32>, extent: &Extent, random: &mut RandomState) -> Vec<u32> {
    let together = if extent.before_last.is_some() { extent.epochs - 1 } else { extent.epochs };
    let mut out = Vec::with_capacity(documents.len() * extent.epochs as usize);
    (0..extent.epochs).for_each(|_| out.extend(documents.clone()));
    let (first, last) = out.split_at_mut(documents.len() * together as usize);
    random.shuffle(first);
    random.shuffle(last);
    out
}

fn shuffled_samples(extent: &Extent, random: &mut RandomState) -> Vec<u32> {
    let mut out: Vec<u32> = (0..extent.samples).collect();
    let (first, last) = out.split_at_mut(extent.before_last.unwrap_or(extent.samples).min(extent.samples) as usize);
    random.shuffle(first);
    random.shuffle(last);
    out
}

/// Where each sample begins, and where the last ends: of all tokens in order, at each multiple of a sample's length.
///
/// With an extra token, a border is in the document that has the token after it. Without one, it is in the document
/// that has the token before it, so that a border between two documents is the end of the first.
fn cut(rule: &Rule, extent: &Extent, documents: &[u32], length: impl Fn(u32) -> u32 + Sync) -> Vec<u32> {
    let step = u64::from(rule.sequence_length);
    let borders = extent.samples as usize + 1;
    let mut out = vec![0u32; 2 * borders];
    let ranges = cores::ranges(documents.len());
    let sums = cores::map(ranges.clone(), |range| documents[range].iter().map(|d| u64::from(length(*d))).sum::<u64>());
    // A border lies in the document of the token after it; without an extra token, in that of the token before it.
    // The first border, which has no token before it, is already 0.
    let back = 1 - u64::from(rule.extra.tokens());
    let first_at = |token: u64| (token + back).div_ceil(step).max(1).min(borders as u64) as usize;
    let mut pieces = vec![];
    let (mut begin, mut rest) = (0, &mut out[2..]);
    for (range, sum) in ranges.into_iter().zip(sums) {
        let (from, to) = (first_at(begin), first_at(begin + sum));
        let (own, after) = rest.split_at_mut(2 * (to - from));
        pieces.push((range, begin, from, own));
        (begin, rest) = (begin + sum, after);
    }
    // The remaining borders lie behind the last token. Megatron ends such samples in the last document.
    let last = documents.len() - 1;
    let end = length(documents[last]).saturating_sub(rule.extra.tokens());
    rest.as_chunks_mut::<2>().0.iter_mut().for_each(|place| *place = [last as u32, end]);
    cores::map(pieces, |(range, begin, from, own)| {
        let mut borders = own.as_chunks_mut::<2>().0.iter_mut().zip(from as u64..).peekable();
        let mut begin = begin;
        for at in range {
            let end = begin + u64::from(length(documents[at]));
            while let Some((place, border)) = borders.next_if(|(_, k)| k * step - back < end) {
                *place = [at as u32, (border * step - begin) as u32];
            }
            begin = end;
        }
    });
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(extra: ExtraToken, rest: Remainder, samples: Option<u64>, documents: u64) -> Rule {
        Rule { sequence_length: 4, extra, rest, seed: 1, samples, documents: 0..documents }
    }

    fn bytes(lengths: &[i32]) -> Vec<u8> {
        lengths.iter().flat_map(|l| l.to_le_bytes()).collect()
    }

    /// `build_sample_idx` of Megatron's helpers, step by step.
    fn slowly(rule: &Rule, extent: &Extent, documents: &[u32], lengths: &[i32]) -> Vec<i64> {
        let (mut out, mut at, mut offset) = (vec![0, 0], 0, 0i64);
        let extra = i64::from(rule.extra.tokens());
        for _ in 0..extent.samples {
            let mut remaining = i64::from(rule.sequence_length) + extra;
            while remaining != 0 {
                let length = i64::from(lengths[documents[at] as usize]) - offset;
                remaining -= length;
                if remaining <= 0 {
                    offset += remaining + length - extra;
                    remaining = 0;
                } else if at == documents.len() - 1 {
                    offset = i64::from(lengths[documents[at] as usize]) - extra;
                    break;
                } else {
                    at += 1;
                    offset = 0;
                }
            }
            out.extend([at as i64, offset]);
        }
        out
    }

    #[test]
    fn samples_are_cut_as_megatron_cuts_them_also_by_many_cores() {
        let mut random = RandomState::new(7);
        for case in 0..200 {
            let many = case % 50 == 0;
            let count = if many { 200_000 } else { 1 + random.interval(30) as usize };
            let mut lengths: Vec<i32> = (0..count).map(|_| random.interval(9) as i32).collect();
            // If the last document were empty, Megatron's index would hold -1 and Megatron would refuse it.
            lengths.iter_mut().for_each(|l| *l += i32::from(case % 2 == 0));
            lengths.push(3);
            let documents: Vec<u32> = (0..lengths.len() as u32).collect();
            for extra in [ExtraToken::Included, ExtraToken::Omitted] {
                for rest in [Remainder::Dropped, Remainder::Kept] {
                    let rule = rule(extra, rest, None, lengths.len() as u64);
                    let extent = Extent::of(&rule, lengths.iter().map(|l| *l as u64).sum()).expect("an extent");
                    let cut = cut(&rule, &extent, &documents, |d| lengths[d as usize] as u32);
                    let cut: Vec<i64> = cut.into_iter().map(i64::from).collect();
                    assert_eq!(cut, slowly(&rule, &extent, &documents, &lengths), "{case}: {rule:?}");
                }
            }
        }
    }

    #[test]
    fn an_order_that_cannot_be_is_refused() {
        let empty = Order::build(&rule(ExtraToken::Included, Remainder::Dropped, Some(3), 2), &bytes(&[0, 0]));
        let text = empty.err().map(|e| e.to_string());
        assert_eq!(
            text.as_deref(),
            Some("its documents 0 to 2 have no tokens; give this part more of the split or nothing (as in 95,5,0), or leave out the data set")
        );
        let none = Order::build(&Rule { documents: 2..2, ..rule(ExtraToken::Included, Remainder::Dropped, Some(3), 2) }, &bytes(&[1, 1]));
        assert!(none.err().is_some_and(|e| e.to_string().starts_with("the split leaves it no document; give")));
        let beyond = Order::build(&rule(ExtraToken::Included, Remainder::Dropped, None, 3), &bytes(&[1, 1]));
        assert_eq!(beyond.err(), Some(OrderError::Documents { asked: 0..3, of: 2 }));
        let long = Order::build(&rule(ExtraToken::Included, Remainder::Dropped, Some(u64::MAX), 1), &bytes(&[1 << 30]));
        assert_eq!(long.err(), Some(OrderError::Samples { samples: u128::from(u64::MAX) }).filter(|_| false).or(long_error()));
    }

    fn long_error() -> Option<OrderError> {
        let epochs = (u128::from(u64::MAX) * 4 + 1).div_ceil(1 << 30);
        Some(OrderError::Epochs { epochs, documents: 1 })
    }
}
