//! Rows of whole documents: each sample has as many as fit. Those longer than a row are cut to it, or split into
//! pieces of a row and a rest, which are then packed as documents are.
//!
//! Documents come in an order drawn anew for each epoch, and each goes to the first row of its epoch that has room
//! for it (first fit). Rows, which are fuller the earlier they are, are then drawn in another order. An epoch depends
//! on those before it by the random numbers that they took, and on nothing after it: whoever asks for more samples
//! gets the same ones first.
//!
//! | numbers | are | bytes |
//! |---|---|---|
//! | pieces | of each row, row by row: the document, and its token with which it begins | 8 a piece and epoch |
//! | begins | the piece with which each row begins, and the end | 4 a row |
//! | epochs | how many | 4 |
//!
//! Documents without tokens are in no row. What is left of a row is for whoever reads it to fill.

use crate::cache::Rows;
use crate::map::{Numbers, number};
use crate::order::{MOST, OrderError, Overlong, Rule};
use crate::random::RandomState;
use std::ops::Range;

/// The rows of one data set, in order.
pub struct Packed {
    /// Pieces, two numbers each; where rows begin; the number of epochs.
    pub(crate) rows: Rows,
    /// What became of documents longer than a row.
    pub(crate) overlong: Overlong,
}

/// What packing made of the documents of one or several data sets. Lengths are in tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Statistics {
    /// Documents that have tokens, of one epoch.
    pub documents: u64,
    /// Tokens of these documents, uncut.
    pub tokens: u64,
    /// The least length that half of the documents do not exceed, those without tokens left out.
    pub median: u64,
    /// Length of the longest document, before it is cut or split.
    pub longest: u64,
    /// Rows of all epochs.
    pub rows: u64,
    /// Epochs of the data set that has the most.
    pub epochs: u32,
    /// What part of all rows documents take, from 0 to 1.
    pub filled: f64,
    /// Documents that are longer than a row, and the tokens of these that are in none.
    pub long: u64,
    /// Tokens of one epoch that are in no row, as they were cut off.
    pub lost: u64,
}

/// A document, or a part of one, that is in a row: the document, and its token with which it begins.
pub type Start = [u32; 2];

impl Packed {
    /// Builds the rows for documents of these lengths, as [`crate::indexed::Indexed::lengths`] gives them. Of the
    /// rule, what says how samples are cut of a stream does not count.
    ///
    /// # Errors
    /// No tokens; more rows or pieces than there can be.
    pub fn build(rule: &Rule, overlong: Overlong, lengths: &[u8]) -> Result<Packed, OrderError> {
        let of = (lengths.len() / 4) as u64;
        let Range { start, end } = rule.documents;
        if start > end || end > of {
            return Err(OrderError::Documents { asked: rule.documents.clone(), of });
        }
        if rule.sequence_length == 0 {
            return Err(OrderError::Length);
        }
        let room = rule.sequence_length;
        if end > u64::from(MOST) {
            return Err(OrderError::Epochs { epochs: 1, documents: end });
        }
        let length = |document: u32| number(lengths, document.into()).map_or(0, u32::from_le_bytes);
        // Tokens that a piece takes in a row.
        let takes = |[document, from]: Start| (length(document) - from).min(room);
        let pieces = |document: u32| pieces(length(document), room, overlong);
        let count: u64 = (start as u32..end as u32).map(|d| pieces(d).len() as u64).sum();
        if count > u64::from(MOST) {
            return Err(OrderError::Epochs { epochs: 1, documents: count });
        }
        let all: Vec<Start> = (start as u32..end as u32).flat_map(|d| pieces(d).map(move |n| [d, n * room])).collect();
        let tokens = all.iter().map(|piece| u64::from(takes(*piece))).sum();
        if tokens == 0 {
            return Err(OrderError::Empty(rule.documents.clone()));
        }
        let most = most_rows(all.len(), tokens, room);
        let samples = rule.samples.unwrap_or(0);
        if samples > u64::from(MOST) {
            return Err(OrderError::Samples { samples: samples.into() });
        }
        let least = u128::from(samples).div_ceil(most as u128);
        if least * u128::from(count) > u128::from(MOST) {
            return Err(OrderError::Epochs { epochs: least, documents: count });
        }
        let mut random = RandomState::new(rule.seed);
        let (mut packed, mut begins, mut epochs) = (vec![], vec![], 0);
        while epochs == 0 || (begins.len() as u64) < samples {
            epochs += 1;
            if (packed.len() + all.len()) as u64 > u64::from(MOST) {
                return Err(OrderError::Epochs { epochs: epochs.into(), documents: count });
            }
            epoch(&all, most, room, takes, &mut random, (&mut packed, &mut begins));
        }
        begins.push(packed.len() as u32);
        Ok(Packed { rows: [packed.into_flattened(), begins, vec![epochs]].map(Numbers::Memory), overlong })
    }

    /// What numbers are, if they have the lengths for it.
    pub(crate) fn of(rows: Rows, overlong: Overlong) -> Option<Packed> {
        let [pieces, begins, epochs] = &rows;
        let last = begins.len().checked_sub(1).and_then(|n| begins.get(n));
        (epochs.len() == 1 && last.map(|n| 2 * u64::from(n)) == Some(pieces.len())).then_some(Packed { rows, overlong })
    }

    /// Rows.
    pub fn len(&self) -> u64 {
        self.rows[1].len().saturating_sub(1)
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Epochs that have been packed, each into rows of its own.
    pub fn epochs(&self) -> u32 {
        self.rows[2].get(0).unwrap_or(0)
    }

    /// The documents of row number n, or the parts of them that are in it.
    pub fn row(&self, n: u64) -> Option<impl Iterator<Item = Start> + '_> {
        let (begin, end) = (self.rows[1].get(n)?, self.rows[1].get(n.checked_add(1)?)?);
        Some((u64::from(begin)..u64::from(end)).map_while(|k| Some([self.rows[0].get(2 * k)?, self.rows[0].get(2 * k + 1)?])))
    }
}

/// The numbers of the pieces that a document of some tokens is in rows as.
fn pieces(length: u32, room: u32, overlong: Overlong) -> Range<u32> {
    let all = length.div_ceil(room);
    match overlong {
        Overlong::Cut => 0..all.min(1),
        Overlong::Split => 0..all,
    }
}

/// The most rows that first fit makes. No two of them are filled to a half or less, as what begins the later one
/// would have gone into the other.
fn most_rows(pieces: usize, tokens: u64, room: u32) -> usize {
    let halves = 2 * u128::from(tokens) / u128::from(room) + 1;
    pieces.min(usize::try_from(halves).unwrap_or(usize::MAX))
}

/// Adds the pieces of an epoch, and where its rows begin among all.
fn epoch(
    all: &[Start],
    most: usize,
    room: u32,
    takes: impl Fn(Start) -> u32,
    random: &mut RandomState,
    (packed, begins): (&mut Vec<Start>, &mut Vec<u32>),
) {
    let mut drawn = all.to_vec();
    random.shuffle(&mut drawn);
    let mut open = FirstFitTree::new(most, room);
    let rows: Vec<u32> = drawn.iter().map(|piece| open.take(takes(*piece)) as u32).collect();
    let count = rows.iter().max().map_or(0, |last| *last as usize + 1);
    let mut order: Vec<u32> = (0..count as u32).collect();
    random.shuffle(&mut order);
    // Rows are written in their new order, and the pieces of a row in the order in which they were drawn.
    let mut sizes = vec![0u32; count];
    rows.iter().for_each(|row| sizes[*row as usize] += 1);
    let mut next = sizes;
    let mut at = packed.len() as u32;
    for row in order {
        begins.push(at);
        let size = std::mem::replace(&mut next[row as usize], at);
        at += size;
    }
    packed.resize(at as usize, Start::default());
    for (piece, row) in drawn.into_iter().zip(rows) {
        let place = &mut next[row as usize];
        packed[*place as usize] = piece;
        *place += 1;
    }
}

/// How much room rows have: a tree in whose leaves it stands, and in each other node the most of those below.
struct FirstFitTree {
    most: Vec<u32>,
    leaves: usize,
}

impl FirstFitTree {
    fn new(rows: usize, room: u32) -> FirstFitTree {
        let leaves = rows.max(1).next_power_of_two();
        FirstFitTree { most: vec![room; 2 * leaves], leaves }
    }

    /// Takes room of the first row that has it, which there is, and gives its number.
    fn take(&mut self, length: u32) -> usize {
        let mut node = 1;
        while node < self.leaves {
            node = if self.most[2 * node] >= length { 2 * node } else { 2 * node + 1 };
        }
        let row = node - self.leaves;
        self.most[node] -= length;
        while node > 1 {
            node /= 2;
            let most = self.most[2 * node].max(self.most[2 * node + 1]);
            // The nodes above do not change either.
            if self.most[node] == most {
                break;
            }
            self.most[node] = most;
        }
        row
    }
}

/// What packing made of documents of these lengths, with the rows of each data set.
pub(crate) fn statistics<'a>(sets: impl Iterator<Item = (&'a [u8], &'a Range<u64>, &'a Packed)>, room: u32) -> Statistics {
    let mut all: Vec<u32> = vec![];
    let (mut rows, mut epochs, mut kept, mut lost) = (0u64, 0, 0u128, 0);
    for (lengths, documents, packed) in sets {
        let bytes = |n: u64| (n as usize).saturating_mul(4).min(lengths.len());
        let own = lengths.get(bytes(documents.start)..bytes(documents.end)).unwrap_or_default();
        let own = own.as_chunks::<4>().0.iter().map(|l| u32::from_le_bytes(*l)).filter(|l| *l > 0);
        let begin = all.len();
        all.extend(own);
        let own = &all[begin..];
        let behind = match packed.overlong {
            Overlong::Cut => own.iter().map(|l| u64::from(l.saturating_sub(room))).sum(),
            Overlong::Split => 0,
        };
        let tokens: u64 = own.iter().map(|l| u64::from(*l)).sum();
        kept += u128::from(tokens - behind) * u128::from(packed.epochs());
        lost += behind;
        rows += packed.len();
        epochs = epochs.max(packed.epochs());
    }
    let long = all.iter().filter(|l| **l > room).count() as u64;
    let tokens = all.iter().map(|l| u64::from(*l)).sum();
    let longest = all.iter().copied().max().unwrap_or(0).into();
    let middle = all.len().saturating_sub(1) / 2;
    let median = if all.is_empty() { 0 } else { (*all.select_nth_unstable(middle).1).into() };
    let filled = kept as f64 / (rows as f64 * f64::from(room)).max(1.0);
    Statistics { documents: all.len() as u64, tokens, median, longest, rows, epochs, filled, long, lost }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::order::{ExtraToken, Remainder};

    fn rule(room: u32, seed: u32, samples: Option<u64>, documents: u64) -> Rule {
        Rule { sequence_length: room, extra: ExtraToken::Included, rest: Remainder::Dropped, seed, samples, documents: 0..documents }
    }

    fn bytes(lengths: &[u32]) -> Vec<u8> {
        lengths.iter().flat_map(|l| l.to_le_bytes()).collect()
    }

    fn rows(packed: &Packed) -> Vec<Vec<Start>> {
        (0..packed.len()).map(|n| packed.row(n).expect("a row").collect()).collect()
    }

    /// First fit, looking at all rows from the first for each document.
    fn slowly(lengths: &[u32], room: u32, overlong: Overlong, seed: u32, epochs: u32) -> Vec<Vec<Start>> {
        let mut random = RandomState::new(seed);
        let length = |[d, from]: Start| (lengths[d as usize] - from).min(room);
        let mut out = vec![];
        for _ in 0..epochs {
            let mut drawn: Vec<Start> = vec![];
            for (d, length) in lengths.iter().enumerate() {
                let begins = (0..*length).step_by(room as usize).map(|from| [d as u32, from]);
                drawn.extend(begins.take(if overlong == Overlong::Cut { 1 } else { usize::MAX }));
            }
            random.shuffle(&mut drawn);
            let mut rows: Vec<Vec<Start>> = vec![];
            for piece in drawn {
                let filled = |row: &Vec<Start>| row.iter().map(|d| length(*d)).sum::<u32>();
                match rows.iter_mut().find(|row| filled(row) + length(piece) <= room) {
                    Some(row) => row.push(piece),
                    None => rows.push(vec![piece]),
                }
            }
            random.shuffle(&mut rows);
            out.extend(rows);
        }
        out
    }

    #[test]
    fn rows_are_those_of_first_fit_looking_at_each_row() {
        let mut random = RandomState::new(11);
        for case in 0..300 {
            let count = 1 + random.interval(if case % 10 == 0 { 400 } else { 40 });
            let room = 1 + random.interval(30);
            let longest = 1 + random.interval(4 * room);
            let overlong = if case % 2 == 0 { Overlong::Cut } else { Overlong::Split };
            let mut lengths: Vec<u32> = (0..count).map(|_| random.interval(longest)).collect();
            lengths.push(1);
            let samples = (case % 3 > 0).then(|| u64::from(random.interval(300)));
            let packed = Packed::build(&rule(room, case, samples, lengths.len() as u64), overlong, &bytes(&lengths)).expect("rows");
            assert_eq!(rows(&packed), slowly(&lengths, room, overlong, case, packed.epochs()), "{case}");
            assert!(packed.len() >= samples.unwrap_or(0) && packed.epochs() > 0);
            // One epoch fewer would not be enough.
            if packed.epochs() > 1 {
                let fewer = slowly(&lengths, room, overlong, case, packed.epochs() - 1).len() as u64;
                assert!(fewer < samples.expect("several epochs"));
            }
        }
    }

    #[test]
    fn whoever_asks_for_more_rows_gets_the_same_ones_first() {
        let lengths = bytes(&[3, 9, 2, 2, 7, 5, 4, 1]);
        let of = |samples| rows(&Packed::build(&rule(10, 4, samples, 8), Overlong::Cut, &lengths).expect("rows"));
        let (one, many) = (of(None), of(Some(40)));
        assert!(many.len() >= 40 && many.starts_with(&one) && many.starts_with(&of(Some(9))));
        assert_ne!(many[..one.len()], many[one.len()..2 * one.len()]);
        assert_ne!(rows(&Packed::build(&rule(10, 5, None, 8), Overlong::Cut, &lengths).expect("rows")), one);
    }

    #[test]
    fn statistics_are_those_of_all_documents() {
        let lengths = bytes(&[4, 0, 10, 25, 6]);
        let of = |overlong| {
            let packed = Packed::build(&rule(10, 0, Some(4), 5), overlong, &lengths).expect("rows");
            statistics([(&lengths[..], &(0..5), &packed)].into_iter(), 10)
        };
        let (documents, tokens, median, longest) = (4, 45, 6, 25);
        assert_eq!(of(Overlong::Cut), Statistics { documents, tokens, median, longest, rows: 6, epochs: 2, filled: 1.0, long: 1, lost: 15 });
        assert_eq!(of(Overlong::Split), Statistics { documents, tokens, median, longest, rows: 5, epochs: 1, filled: 0.9, long: 1, lost: 0 });
    }

    #[test]
    fn a_long_document_that_is_split_is_in_rows_to_its_end() {
        let lengths = bytes(&[25, 3]);
        let of = |overlong| rows(&Packed::build(&rule(10, 1, None, 2), overlong, &lengths).expect("rows")).concat();
        let sorted = |mut pieces: Vec<Start>| {
            pieces.sort_unstable();
            pieces
        };
        assert_eq!(sorted(of(Overlong::Split)), [[0, 0], [0, 10], [0, 20], [1, 0]]);
        assert_eq!(sorted(of(Overlong::Cut)), [[0, 0], [1, 0]]);
    }

    #[test]
    fn rows_that_cannot_be_are_refused() {
        let refused =
            |rule: &Rule, lengths: &[u32]| Packed::build(rule, Overlong::Split, &bytes(lengths)).err().map(|e| e.to_string()).unwrap_or_default();
        assert!(refused(&rule(4, 0, None, 2), &[0, 0]).contains("have no tokens"));
        assert!(refused(&rule(0, 0, None, 1), &[1]).contains("a sequence length of 0"));
        assert!(refused(&rule(4, 0, None, 3), &[1, 1]).contains("documents 0 to 3 of 2"));
        assert!(refused(&rule(4, 0, Some(1 << 33), 1), &[1]).contains("an order has at most"));
        assert!(refused(&rule(4, 0, Some(3_000_000_000), 3), &[1, 1, 1]).contains("epochs of 3 documents"));
        // The pieces are too many and are refused before memory for them is reserved.
        assert!(refused(&rule(1, 0, None, 3), &[1 << 31; 3]).contains("epochs of 6442450944 documents"));
        let damaged = [vec![1, 2], vec![0, 3], vec![1]].map(Numbers::Memory);
        assert!(Packed::of(damaged, Overlong::Cut).is_none());
    }
}
