//! How a tensor is cut into pieces.
//!
//! Each dim is cut into classes of indices, which need not be consecutive; a choice of one class per dim is a
//! cell, and the elements of a cell, row-major, are cut into consecutive pieces. Thus split parameters are
//! cells of one piece, and optimizer states that ranks have shared out as flat ranges are pieces of a cell.

use std::ops::Range;

/// Indices of one dim: first ones, and how many follow each other.
pub type Class = Vec<(u64, u64)>;

/// Checked: each element is in one piece.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grid {
    sizes: Vec<u64>,
    /// Of each dim: indices that follow each other, in order, each with its class and how many of that are
    /// before it.
    dims: Vec<Vec<Span>>,
    /// Elements of each class of each dim.
    lens: Vec<Vec<u64>>,
    /// Pieces, sorted by cell and first element.
    pieces: Vec<Cell>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Span {
    first: u64,
    len: u64,
    class: u32,
    before: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Cell {
    classes: Vec<u32>,
    from: u64,
    to: u64,
    /// Index of the piece in the list that was given.
    number: usize,
}

impl Grid {
    /// Of a tensor of these sizes, of which each dim is cut into these classes; a piece is a choice of classes
    /// and a range of elements.
    ///
    /// # Errors
    /// Elements that are in no piece or in several, or numbers that cannot be.
    pub fn new<'a>(sizes: &[u64], cuts: &[Vec<Class>], pieces: impl IntoIterator<Item = (&'a [u32], Range<u64>)>) -> Result<Grid, String> {
        if cuts.len() != sizes.len() {
            return Err(format!("{} of its {} dims are cut", cuts.len(), sizes.len()));
        }
        let elements = sizes.iter().try_fold(1, |product: u64, n| product.checked_mul(*n)).ok_or("it has too many elements")?;
        let (mut dims, mut lens) = (vec![], vec![]);
        for (size, classes) in sizes.iter().zip(cuts) {
            let (spans, len) = dim(*size, classes)?;
            dims.push(spans);
            lens.push(len);
        }
        let mut cells: Vec<Cell> = pieces
            .into_iter()
            .enumerate()
            .map(|(number, (classes, r))| Cell { classes: classes.to_vec(), from: r.start, to: r.end, number })
            .collect();
        cells.sort_unstable();
        let mut covered = 0;
        for (k, cell) in cells.iter().enumerate() {
            let lens = cell.classes.iter().zip(&lens).map(|(class, lens)| lens.get(*class as usize).copied()).collect::<Option<Vec<u64>>>();
            let lens = lens.filter(|_| cell.classes.len() == sizes.len()).ok_or("a piece is in a class that there is not")?;
            // Each piece lies within its cell and begins where the one before it ends.
            let (all, before) = (lens.iter().product::<u64>(), k.checked_sub(1).map(|k| &cells[k]).filter(|c| c.classes == cell.classes));
            let is_last = cells.get(k + 1).is_none_or(|next| next.classes != cell.classes);
            if cell.from >= cell.to || cell.to > all || cell.from != before.map_or(0, |c| c.to) || is_last && cell.to != all {
                return Err(format!("elements {} to {} of {all} are no piece that follows the one before", cell.from, cell.to));
            }
            covered += cell.to - cell.from;
        }
        if covered != elements {
            return Err(format!("its pieces have {covered} of its {elements} elements"));
        }
        Ok(Grid { sizes: sizes.to_vec(), dims, lens, pieces: cells })
    }

    /// Where elements are from row-major index `at` on: the piece, the element of it, and how many follow each
    /// other there. `at + len` is within the tensor.
    pub fn visit(&self, at: u64, len: u64, mut visit: impl FnMut(usize, u64, u64)) {
        let (mut at, end) = (at, at + len);
        let mut classes = vec![0; self.sizes.len()];
        while at < end {
            let (mut rest, mut flat, mut row, mut stride) = (at, 0, end - at, 1);
            // `line` is the size of the inner dims as long as none of them is cut; such lines are contiguous.
            let mut line = Some(1);
            for k in (0..self.sizes.len()).rev() {
                let (index, spans) = (rest % self.sizes[k], &self.dims[k]);
                rest /= self.sizes[k];
                let span = spans[spans.partition_point(|s| s.first <= index) - 1];
                classes[k] = span.class;
                line = line.and_then(|width| {
                    let is_whole = span.len == self.sizes[k];
                    if !is_whole {
                        row = row.min((span.first + span.len - index) * width - at % width);
                    }
                    is_whole.then_some(width * span.len)
                });
                flat += (span.before + index - span.first) * stride;
                stride *= self.lens[k][span.class as usize];
            }
            let next = self.pieces.partition_point(|c| (&c.classes, c.from) <= (&classes, flat));
            let piece = &self.pieces[next - 1];
            let len = row.min(piece.to - flat);
            visit(piece.number, flat - piece.from, len);
            at += len;
        }
    }
}

/// The spans of a dim in order, and the elements of each of its classes.
fn dim(size: u64, classes: &[Class]) -> Result<(Vec<Span>, Vec<u64>), String> {
    let (mut spans, mut lens) = (vec![], vec![]);
    for (class, list) in (0..).zip(classes) {
        let mut before: u64 = 0;
        for &(first, len) in list {
            if len == 0 || first.checked_add(len).is_none_or(|end| end > size) {
                return Err(format!("a dim of {size} is cut at {first} for {len}"));
            }
            spans.push(Span { first, len, class, before });
            before = before.checked_add(len).ok_or("a dim is too large")?;
        }
        lens.push(before);
    }
    spans.sort_unstable_by_key(|s| s.first);
    let mut end = 0;
    for span in &spans {
        if span.first != end {
            return Err(format!("index {} of a dim of {size} is in no piece, or in several", end.min(span.first)));
        }
        end = span.first + span.len;
    }
    if end == size { Ok((spans, lens)) } else { Err(format!("index {end} of a dim of {size} is in no piece")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_found_in_cells_and_their_pieces() {
        // Two rows are cut into columns 0 and 3, which are two pieces, and columns 1 and 2.
        let cuts = [vec![vec![(0, 2)]], vec![vec![(0, 1), (3, 1)], vec![(1, 2)]]];
        let pieces: [(&[u32], Range<u64>); 3] = [(&[0, 1], 0..4), (&[0, 0], 0..3), (&[0, 0], 3..4)];
        let grid = Grid::new(&[2, 4], &cuts, pieces.clone()).unwrap();
        let mut found = vec![];
        grid.visit(1, 7, |piece, at, len| found.push((piece, at, len)));
        assert_eq!(found, [(0, 0, 2), (1, 1, 1), (1, 2, 1), (0, 2, 2), (2, 0, 1)]);
        // Rows 0 and 1 are one piece and row 2 is another; whole rows are contiguous.
        let rows = Grid::new(
            &[3, 2, 2],
            &[vec![vec![(0, 2)], vec![(2, 1)]], vec![vec![(0, 2)]], vec![vec![(0, 2)]]],
            [(&[0, 0, 0][..], 0..8), (&[1, 0, 0][..], 0..4)],
        );
        let mut found = vec![];
        rows.unwrap().visit(1, 10, |piece, at, len| found.push((piece, at, len)));
        assert_eq!(found, [(0, 1, 7), (1, 0, 3)]);
        let scalar = Grid::new(&[], &[], [(&[] as &[u32], 0..1)]).unwrap();
        scalar.visit(0, 1, |piece, at, len| assert_eq!((piece, at, len), (0, 0, 1)));

        let wrong = |cuts: &[Vec<Class>], pieces: &[(&[u32], Range<u64>)]| Grid::new(&[2, 4], cuts, pieces.iter().cloned()).unwrap_err();
        assert_eq!(wrong(&cuts, &pieces[..2]), "elements 0 to 3 of 4 are no piece that follows the one before");
        assert_eq!(wrong(&cuts, &pieces[1..]), "its pieces have 4 of its 8 elements");
        assert_eq!(wrong(&cuts, &[(&[0, 2], 0..1)]), "a piece is in a class that there is not");
        assert_eq!(wrong(&cuts, &[(&[0], 0..1)]), "a piece is in a class that there is not");
        assert_eq!(wrong(&[vec![vec![(0, 2)]], vec![vec![(0, 3)]]], &[]), "index 3 of a dim of 4 is in no piece");
        assert_eq!(wrong(&[vec![vec![(0, 2)]], vec![vec![(0, 3)], vec![(2, 2)]]], &[]), "index 2 of a dim of 4 is in no piece, or in several");
        assert_eq!(wrong(&[vec![vec![(0, 2)]], vec![vec![(0, u64::MAX)]]], &[]), format!("a dim of 4 is cut at 0 for {}", u64::MAX));
    }
}
