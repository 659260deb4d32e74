//! Inputs that follow from another one, line by line.

use ir::graph::InputDefault;
use std::ops::Range;

/// What stands where a line has no element any more: labels of it count for nothing.
pub const NOTHING: f64 = -100.0;

/// A line of what files or data sets hold, as far as it was read.
pub struct SourceRow<'a> {
    /// Elements of the line, with one more than the input has where there is one.
    pub values: &'a [f64],
    /// Elements of the input.
    pub length: usize,
    /// The elements with which documents begin, as a data set says; none of a file, which does not.
    pub borders: &'a [usize],
    /// Whether what follows a document's end counts for nothing: if the model keeps documents apart.
    pub is_apart: bool,
    /// Where documents end. What fills the line up behind them is no label.
    pub end: usize,
    /// 1 for each element that counts as a label, else 0; none if all count.
    pub mask: Option<&'a [u8]>,
}

/// How an input takes its elements from a line.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RowDerivation<'a> {
    Itself,
    Fed(&'a InputDefault),
    /// What comes later by so much and one: `from` is 1 for what looks ahead of the next.
    Ahead {
        from: usize,
        depth: usize,
    },
}

impl RowDerivation<'_> {
    /// The elements of a line of which these columns are made.
    pub fn needs(self, columns: &Range<usize>, length: usize) -> Range<usize> {
        let Range { start, end } = *columns;
        match self {
            RowDerivation::Itself | RowDerivation::Fed(InputDefault::Const(_)) => start..end,
            RowDerivation::Fed(InputDefault::Next(_)) => start + 1..end + 1,
            RowDerivation::Fed(InputDefault::Prev(..)) => start.saturating_sub(1)..end.saturating_sub(1),
            // All separators before these columns count.
            RowDerivation::Fed(InputDefault::Documents(..) | InputDefault::Positions(..)) => 0..end,
            // Nothing past the line's end is read.
            RowDerivation::Fed(InputDefault::Ahead(_)) => start..start,
            RowDerivation::Ahead { from, depth } => {
                let last = length + from;
                (start + from + depth + 1).min(last)..(end + from + depth + 1).min(last)
            }
        }
    }
}

impl SourceRow<'_> {
    /// The elements of an input in these columns.
    pub fn take(&self, derivation: RowDerivation, columns: Range<usize>, out: &mut Vec<f64>) {
        out.clear();
        match derivation {
            RowDerivation::Itself => out.extend(&self.values[columns]),
            RowDerivation::Fed(InputDefault::Const(value)) => out.extend(columns.map(|_| value.0)),
            RowDerivation::Fed(InputDefault::Next(_)) => out.extend(columns.map(|c| self.within(c, c + 1))),
            RowDerivation::Fed(InputDefault::Prev(_, first)) => {
                out.extend(columns.map(|c| c.checked_sub(1).map_or(*first as f64, |c| self.values[c])))
            }
            RowDerivation::Fed(InputDefault::Documents(_, separator)) => self.count(*separator as f64, columns, out, |number, _| number),
            RowDerivation::Fed(InputDefault::Positions(_, separator)) => self.count(*separator as f64, columns, out, |_, since| since),
            RowDerivation::Fed(InputDefault::Ahead(_)) => out.extend(columns.map(|_| NOTHING)),
            RowDerivation::Ahead { from, depth } => {
                let further = |c: usize| Some(c + from + depth + 1).filter(|at| *at < self.length + from);
                out.extend(columns.map(|c| further(c).map_or(NOTHING, |at| self.within(c, at))));
            }
        }
    }

    /// The element at a place, if it is a label that counts, and none of another document than that of an element
    /// before.
    fn within(&self, element: usize, at: usize) -> f64 {
        let begun = self.borders.partition_point(|border| *border <= at);
        let is_beyond = self.is_apart && begun > 0 && element < self.borders[begun - 1];
        let counts = at < self.end && self.mask.is_none_or(|mask| mask[at] != 0);
        if counts && !is_beyond { self.values[at] } else { NOTHING }
    }

    /// Of each column, what becomes of the number of documents that ended before it and of the elements since. A
    /// separator ends its document, and a document of a data set ends by itself too.
    fn count(&self, separator: f64, columns: Range<usize>, out: &mut Vec<f64>, make: impl Fn(f64, f64) -> f64) {
        let (mut number, mut since) = (0.0, 0.0);
        let mut borders = self.borders.iter().copied().peekable();
        for at in 0..columns.end {
            let mut begins = at > 0 && self.values[at - 1] == separator;
            while let Some(border) = borders.next_if(|b| *b <= at) {
                begins |= border == at && at > 0;
            }
            if begins {
                (number, since) = (number + 1.0, 0.0);
            }
            if at >= columns.start {
                out.push(make(number, since));
            }
            since += 1.0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn derived(line: &SourceRow, derivation: RowDerivation) -> Vec<f64> {
        let (mut whole, mut part) = (vec![], vec![]);
        line.take(derivation, 0..line.length, &mut whole);
        // Columns that are taken alone have the same values, and read only what `needs` says.
        for c in 0..line.length {
            let needs = derivation.needs(&(c..c + 1), line.length);
            let values: Vec<f64> = line.values.iter().enumerate().map(|(k, x)| if needs.contains(&k) { *x } else { f64::NAN }).collect();
            SourceRow { values: &values, ..*line }.take(derivation, c..c + 1, &mut part);
            assert_eq!(part, whole[c..=c], "{derivation:?} at {c}");
        }
        whole
    }

    #[test]
    fn derived_inputs_follow_their_definitions() {
        let values = [5.0, 0.0, 7.0, 0.0, 0.0, 9.0];
        let line = SourceRow { values: &values, length: 5, borders: &[], is_apart: true, end: 6, mask: None };
        assert_eq!(derived(&line, RowDerivation::Itself), values[..5]);
        assert_eq!(derived(&line, RowDerivation::Fed(&InputDefault::Next(0))), values[1..]);
        assert_eq!(derived(&line, RowDerivation::Fed(&InputDefault::Prev(0, 3))), [3.0, 5.0, 0.0, 7.0, 0.0]);
        assert_eq!(derived(&line, RowDerivation::Fed(&InputDefault::Documents(0, 0))), [0.0, 0.0, 1.0, 1.0, 2.0]);
        assert_eq!(derived(&line, RowDerivation::Fed(&InputDefault::Positions(0, 0))), [0.0, 1.0, 0.0, 1.0, 0.0]);
        assert_eq!(derived(&line, RowDerivation::Ahead { from: 0, depth: 1 }), [7.0, 0.0, 0.0, NOTHING, NOTHING]);
        assert_eq!(derived(&line, RowDerivation::Ahead { from: 1, depth: 0 }), [7.0, 0.0, 0.0, 9.0, NOTHING]);
    }

    #[test]
    fn documents_of_a_data_set_end_without_a_separator() {
        let line = SourceRow { values: &[5.0, 6.0, 7.0, 8.0, 9.0, 4.0], length: 5, borders: &[0, 2, 5], is_apart: true, end: 6, mask: None };
        assert_eq!(derived(&line, RowDerivation::Fed(&InputDefault::Documents(0, 0))), [0.0, 0.0, 1.0, 1.0, 1.0]);
        assert_eq!(derived(&line, RowDerivation::Fed(&InputDefault::Positions(0, 0))), [0.0, 1.0, 0.0, 1.0, 2.0]);
        assert_eq!(derived(&line, RowDerivation::Fed(&InputDefault::Next(0))), [6.0, NOTHING, 8.0, 9.0, NOTHING]);
        assert_eq!(derived(&line, RowDerivation::Ahead { from: 1, depth: 0 }), [NOTHING, NOTHING, 9.0, NOTHING, NOTHING]);
        assert_eq!(derived(&SourceRow { is_apart: false, ..line }, RowDerivation::Fed(&InputDefault::Next(0))), [6.0, 7.0, 8.0, 9.0, 4.0]);
        // A document that ends with a separator still ends only once.
        let both = SourceRow { values: &[5.0, 0.0, 7.0, 0.0, 9.0, 4.0], borders: &[0, 2, 4], ..line };
        assert_eq!(derived(&both, RowDerivation::Fed(&InputDefault::Documents(0, 0))), [0.0, 0.0, 1.0, 1.0, 2.0]);
        assert_eq!(derived(&both, RowDerivation::Fed(&InputDefault::Positions(0, 0))), [0.0, 1.0, 0.0, 1.0, 0.0]);
    }
    #[test]
    fn what_fills_a_line_up_and_what_a_mask_leaves_out_are_no_labels() {
        // The line has documents of two and one elements, and is filled up with two more.
        let values = [5.0, 6.0, 7.0, 0.0, 0.0, 0.0];
        let line = SourceRow { values: &values, length: 5, borders: &[0, 2, 3], is_apart: true, end: 3, mask: None };
        assert_eq!(derived(&line, RowDerivation::Fed(&InputDefault::Next(0))), [6.0, NOTHING, NOTHING, NOTHING, NOTHING]);
        assert_eq!(derived(&line, RowDerivation::Fed(&InputDefault::Documents(0, 9))), [0.0, 0.0, 1.0, 2.0, 2.0]);
        assert_eq!(derived(&line, RowDerivation::Fed(&InputDefault::Positions(0, 9))), [0.0, 1.0, 0.0, 0.0, 1.0]);
        let whole = SourceRow { borders: &[0], end: 6, values: &[5.0, 6.0, 7.0, 8.0, 9.0, 4.0], ..line };
        let masked = SourceRow { mask: Some(&[1, 0, 1, 1, 0, 1]), ..whole };
        assert_eq!(derived(&masked, RowDerivation::Fed(&InputDefault::Next(0))), [NOTHING, 7.0, 8.0, NOTHING, 4.0]);
        assert_eq!(derived(&masked, RowDerivation::Ahead { from: 1, depth: 0 }), [7.0, 8.0, NOTHING, 4.0, NOTHING]);
        assert_eq!(derived(&masked, RowDerivation::Itself), whole.values[..5]);
    }
}
