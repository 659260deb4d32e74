//! A sample's documents and tokens, and which of them count.

use super::{Arranged, Dataset, Error, Set};
use crate::indexed::Token;
use crate::order::{OrderError, Overlong};
use std::ops::Range;

/// What a sample turned out to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// The data set that it is of, of those of its blend.
    pub set: usize,
    /// Tokens of documents. What comes after them fills the sample up.
    pub tokens: usize,
}

/// A document in a sample, whole or in part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The token of the sample with which it begins.
    pub at: u32,
    /// The document: a sequence of the data set.
    pub document: u32,
    /// The token of the document with which it begins.
    pub from: u32,
}

impl Dataset {
    /// Copies sample number n, with [`Dataset::width`] tokens, and says which documents it is made of.
    ///
    /// # Errors
    /// There is no such sample; the buffer has another size; a token that its type does not take; a damaged cache.
    pub fn sample<T: Token>(&self, n: u64, tokens: &mut [T], pieces: &mut Vec<Piece>) -> Result<Sample, Error> {
        let all = 0..tokens.len();
        self.columns(n, std::slice::from_ref(&all), tokens, pieces)
    }

    /// As [`Dataset::sample`], of which these ranges are read alone; the others stay as they are.
    ///
    /// # Errors
    /// As of [`Dataset::sample`].
    pub fn columns<T: Token>(&self, n: u64, columns: &[Range<usize>], tokens: &mut [T], pieces: &mut Vec<Piece>) -> Result<Sample, Error> {
        if tokens.len() != self.width {
            return Err(Error::Room { width: self.width, room: tokens.len() });
        }
        let (set, own) = self.set(n).ok_or(Error::Beyond { n, samples: self.len() })?;
        let Some(of) = self.sets.get(set) else { return Err(Error::Beyond { n, samples: self.len() }) };
        let filled = self.pieces(of, own, pieces)?;
        for (piece, places) in places(pieces, filled) {
            for own in within(columns, &places) {
                of.tokens.read(piece.document.into(), piece.token(own.start), &mut tokens[own])?;
            }
        }
        let pad = T::of(self.pad.into()).ok_or(Error::Pad { pad: self.pad, takes: T::TAKES })?;
        tokens[filled..].fill(pad);
        Ok(Sample { set, tokens: filled })
    }

    /// Which tokens of a sample count as labels, in these ranges alone, of a sample of which [`Dataset::columns`]
    /// gave the pieces: 1 or 0. Without masks all tokens of documents do. What fills the sample up does not.
    ///
    /// # Errors
    /// The buffer has another size; a mask that is neither 0 nor 1.
    pub fn counted(&self, sample: &Sample, columns: &[Range<usize>], pieces: &[Piece], counted: &mut [u8]) -> Result<(), Error> {
        if counted.len() != self.width {
            return Err(Error::Room { width: self.width, room: counted.len() });
        }
        counted[sample.tokens..].fill(0);
        let Some(mask) = self.sets.get(sample.set).and_then(|s| s.mask.as_ref()) else {
            counted[..sample.tokens].fill(1);
            return Ok(());
        };
        for (piece, places) in places(pieces, sample.tokens) {
            for own in within(columns, &places) {
                mask.read(piece.document, piece.token(own.start), &mut counted[own])?;
            }
        }
        Ok(())
    }

    /// The documents of a data set's sample, and how many tokens they have in it.
    fn pieces(&self, set: &Set, own: u64, pieces: &mut Vec<Piece>) -> Result<usize, Error> {
        let damaged = || Error::Order { prefix: set.tokens.prefix().into(), part: self.part, cause: OrderError::Damaged };
        let length = |document: u32| set.tokens.length(document.into());
        pieces.clear();
        let mut filled = 0;
        match &set.order {
            Arranged::Stream(order) => {
                let start = order.sample_start(own).ok_or_else(damaged)?;
                let (mut at, mut from) = (start.document, start.token);
                while filled < self.width {
                    let Some(document) = order.document(at) else { break };
                    let left = length(document).and_then(|l| l.checked_sub(from)).ok_or_else(damaged)?;
                    pieces.push(Piece { at: filled as u32, document, from });
                    filled += (left as usize).min(self.width - filled);
                    from = 0;
                    at = at.checked_add(1).ok_or_else(damaged)?;
                }
            }
            Arranged::Packed(packed) => {
                for [document, from] in packed.row(own).ok_or_else(damaged)? {
                    pieces.push(Piece { at: filled as u32, document, from });
                    let left = length(document).and_then(|l| l.checked_sub(from)).ok_or_else(damaged)?;
                    filled += left.min(self.room) as usize;
                    if filled > self.room as usize {
                        return Err(damaged());
                    }
                    // The document goes on behind this full row, and its next token is the label of the row's last
                    // one.
                    if packed.overlong == Overlong::Split && left > self.room {
                        filled = self.width;
                    }
                }
            }
        }
        Ok(filled)
    }
}

impl Piece {
    /// The token of the document that stands at a place of the sample.
    pub fn token(&self, at: usize) -> u64 {
        u64::from(self.from) + at as u64 - u64::from(self.at)
    }
}

/// Which tokens of a sample each of its pieces is.
fn places(pieces: &[Piece], filled: usize) -> impl Iterator<Item = (&Piece, Range<usize>)> {
    let ends = pieces.iter().skip(1).map(|next| next.at as usize).chain([filled]);
    pieces.iter().zip(ends).map(|(piece, end)| (piece, piece.at as usize..end))
}

/// What columns have of some places.
fn within(columns: &[Range<usize>], places: &Range<usize>) -> impl Iterator<Item = Range<usize>> {
    columns.iter().map(move |c| c.start.max(places.start)..c.end.min(places.end)).filter(|own| own.start < own.end)
}
