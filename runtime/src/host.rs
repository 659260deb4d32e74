//! Whole tensors on the host, and the part of one that a rank holds.

use ir::dim::{Base, IndexMap};
use ir::mesh::Coords;
use ir::op::DType;
use ir::program::{Extent, linear};
use std::ops::Range;

/// A whole tensor: row-major over its unpadded sizes. Ints and bools are f64 too.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Elements of each dim, outermost first.
    pub sizes: Vec<u64>,
    /// All elements, as many as the product of the sizes.
    pub data: Vec<f64>,
}

impl Tensor {
    /// A tensor of these sizes whose elements are all 0.
    pub fn zeros(sizes: Vec<u64>) -> Tensor {
        let elements = sizes.iter().product::<u64>() as usize;
        Tensor { sizes, data: vec![0.0; elements] }
    }
}

/// The unpadded sizes of a whole tensor.
pub fn sizes(extents: &[Extent]) -> Vec<u64> {
    extents.iter().map(|e| e.size).collect()
}

/// Bytes that are looked at before the next are: all that is done to them finds them in a core's caches.
pub const PIECE: u64 = 1 << 20;

/// A whole tensor that is read piece by piece, so that a rank never holds more than its part.
pub trait Whole {
    /// The elements from row-major index `at` on.
    fn read(&self, at: u64, out: &mut [f64]);

    /// Shows the `len` elements from `at` on as they lie here, if that is in this dtype: nothing is converted then.
    /// `visit` gets them in pieces of at most [`PIECE`] bytes, each with the number of elements before it.
    fn pieces(&self, _at: u64, _len: u64, _dtype: DType, _visit: &mut dyn FnMut(u64, &[u8])) -> bool {
        false
    }
}

impl Whole for Tensor {
    fn read(&self, at: u64, out: &mut [f64]) {
        out.copy_from_slice(&self.data[at as usize..][..out.len()]);
    }
}

/// Consecutive elements of a part: from `local` on in the part, from `global` on in the unpadded whole tensor.
/// Without `global` they are padding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Index of the first element among those of the part that are held.
    pub local: u64,
    /// Row-major index of the first element in the whole tensor; none for padding.
    pub global: Option<u64>,
    /// How many elements it has.
    pub len: u64,
}

impl Run {
    /// Whether another one's elements follow this one's, in the part and in the whole tensor.
    fn goes_on_with(&self, next: &Run) -> bool {
        self.local + self.len == next.local && ir::fault!("host.run.joined", true, self.global.map(|g| g + self.len) == next.global)
    }
}

/// Elements of a run to which no line is added.
const LONG: u64 = 1 << 18;

/// The part of a whole tensor that index maps cut out at some coordinates.
pub struct TensorSlice<'a> {
    extents: &'a [Extent],
    index: &'a [IndexMap],
    bases: Vec<u64>,
    /// Of a bucket: local elements are counted from its first that is held, and only those held count.
    window: Option<BucketWindow>,
}

/// The elements of a bucket that a buffer holds, and where in the bucket a part begins.
#[derive(Clone, Copy)]
struct BucketWindow {
    at: u64,
    from: u64,
    to: u64,
}

impl<'a> TensorSlice<'a> {
    /// `index` has one map per dim. A part in a program never has a base that is a kernel's scalar.
    pub fn new(extents: &'a [Extent], index: &'a [IndexMap], coords: &Coords) -> TensorSlice<'a> {
        let bases = index
            .iter()
            .map(|map| match &map.base {
                Base::Zero | Base::Slot(_) => 0,
                Base::Coords(form) => linear(form, coords),
            })
            .collect();
        TensorSlice { extents, index, bases, window: None }
    }

    /// What of the part is held, if it begins at element `at` of a bucket of which `window` is held. Windows are
    /// consecutive.
    pub fn within(self, at: u64, window: &IndexMap, coords: &Coords) -> TensorSlice<'a> {
        let from = match &window.base {
            Base::Zero | Base::Slot(_) => 0,
            Base::Coords(form) => linear(form, coords),
        };
        TensorSlice { window: Some(BucketWindow { at, from, to: from + window.len() }), ..self }
    }

    /// Elements of the part, padding included.
    pub fn elements(&self) -> u64 {
        self.index.iter().map(IndexMap::len).product()
    }

    /// Where its elements lie in the buffer that holds them, one after the other.
    pub fn place(&self) -> Range<u64> {
        let elements = self.elements();
        self.window.map_or(0..elements, |BucketWindow { at, from, to }| {
            let [start, end] = [at, at + elements].map(|element| element.clamp(from, to) - from);
            start..end
        })
    }

    /// The runs of the part, in local order; together they are all its elements that are held. Lines that follow each
    /// other are one run, up to a length that costs no more to begin and no more memory.
    pub fn runs(&self, mut visit: impl FnMut(Run)) {
        let mut last: Option<Run> = None;
        let mut add = |run: Run| match &mut last {
            Some(before) if before.len < LONG && before.goes_on_with(&run) => before.len += run.len,
            before => {
                if let Some(done) = before.replace(run) {
                    visit(done);
                }
            }
        };
        match self.window {
            None => self.all_runs(add),
            Some(BucketWindow { at, from, to }) => self.all_runs(|run| {
                let (first, end) = (
                    (at + run.local).max(from),
                    ir::fault!("host.bucket.window", (at + run.local + run.len).min(to - 1), (at + run.local + run.len).min(to)),
                );
                if first < end {
                    let skipped = first - (at + run.local);
                    let skipped = ir::fault!("host.bucket.skipped", 0, skipped);
                    add(Run { local: first - from, global: run.global.map(|g| g + skipped), len: end - first });
                }
            }),
        }
        if let Some(done) = last {
            visit(done);
        }
    }

    fn all_runs(&self, mut visit: impl FnMut(Run)) {
        let Some(last) = self.index.len().checked_sub(1) else {
            visit(Run { local: 0, global: Some(0), len: 1 });
            return;
        };
        if self.elements() == 0 {
            return;
        }
        let inner = self.line(last);
        let width = self.index[last].len();
        let rows: u64 = self.index[..last].iter().map(IndexMap::len).product();
        let mut at = vec![0u64; last];
        for row in 0..rows {
            let mut start = Some(0u64);
            for (k, i) in at.iter().enumerate() {
                let (global, size) = (
                    ir::fault!(
                        "host.part.order",
                        self.bases[k] + self.index[k].offset(*i),
                        self.extents[k].order.index(self.bases[k] + self.index[k].offset(*i))
                    ),
                    self.extents[k].size,
                );
                start = start.filter(|_| global < size).map(|s| s * ir::fault!("host.part.padded", self.extents[k].padded, size) + global);
            }
            match start {
                None => visit(Run { local: row * width, global: None, len: width }),
                Some(start) => {
                    for run in &inner {
                        let global = run.global.map(|g| start * self.extents[last].size + g);
                        visit(Run { local: row * width + run.local, global, len: run.len });
                    }
                }
            }
            for k in (0..last).rev() {
                at[k] += 1;
                if at[k] < self.index[k].len() {
                    break;
                }
                at[k] = 0;
            }
        }
    }

    /// Of each dim, the indices of the whole tensor that the part has, in local order: first ones and how many
    /// follow each other. Padding is left out. None if all of the part is padding.
    pub fn spans(&self) -> Option<Vec<Vec<(u64, u64)>>> {
        let dim = |k| self.line(k).into_iter().filter_map(|run| Some((run.global?, run.len))).collect::<Vec<_>>();
        let spans: Vec<_> = (0..self.index.len()).map(dim).collect();
        spans.iter().all(|s| !s.is_empty()).then_some(spans)
    }

    /// Which elements of the product of [`TensorSlice::spans`] are held, row-major: all, but for buckets.
    pub fn held(&self) -> Range<u64> {
        let elements = self.elements();
        let (from, to) = self.window.map_or((0, elements), |w| (w.from.saturating_sub(w.at).min(elements), w.to.saturating_sub(w.at).min(elements)));
        let lines: Vec<Vec<Run>> = (0..self.index.len()).map(|k| self.line(k)).collect();
        self.counted(&lines, from)..self.counted(&lines, to)
    }

    /// How many of the elements before this one are no padding.
    fn counted(&self, lines: &[Vec<Run>], before: u64) -> u64 {
        let counted =
            |line: &[Run], end: u64| line.iter().filter(|r| r.global.is_some()).map(|r| end.clamp(r.local, r.local + r.len) - r.local).sum::<u64>();
        let mut inner: u64 = lines.iter().zip(self.index).map(|(line, map)| counted(line, map.len())).product();
        let mut stride = self.elements();
        if before >= stride || inner == 0 {
            return inner;
        }
        let (mut rest, mut sum) = (before, 0);
        for (line, map) in lines.iter().zip(self.index) {
            stride /= map.len();
            inner /= counted(line, map.len());
            let at = rest / stride;
            rest %= stride;
            sum += counted(line, at) * inner;
            if counted(line, at + 1) == counted(line, at) {
                break;
            }
        }
        sum
    }

    /// The runs along one dim.
    fn line(&self, k: usize) -> Vec<Run> {
        let (map, Extent { size, order, .. }) = (&self.index[k], &self.extents[k]);
        let mut runs: Vec<Run> = vec![];
        for local in 0..map.len() {
            let global = Some(order.index(ir::fault!("host.part.base", map.offset(local), self.bases[k] + map.offset(local))))
                .filter(|g| ir::fault!("host.part.padding", g <= size, g < size));
            match runs.last_mut() {
                Some(run) if run.global.map(|g| g + run.len) == global => run.len += 1,
                _ => runs.push(Run { local, global, len: 1 }),
            }
        }
        runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ir::dim::Order;
    use ir::mesh::SubAxis;

    fn extent(size: u64, padded: u64) -> Extent {
        Extent { name: "d".into(), size, padded, order: Order::Plain }
    }

    fn block(len: u64) -> IndexMap {
        IndexMap { parts: vec![(len, 1)], base: Base::Coords(vec![(SubAxis(0), len)]) }
    }

    fn runs(part: &TensorSlice) -> Vec<(u64, Option<u64>, u64)> {
        let mut out = vec![];
        part.runs(|r| out.push((r.local, r.global, r.len)));
        out
    }

    #[test]
    fn a_column_block_is_one_run_per_row() {
        let (extents, index) = ([extent(2, 2), extent(6, 6)], [IndexMap::whole(2), block(3)]);
        assert_eq!(runs(&TensorSlice::new(&extents, &index, &vec![1])), [(0, Some(3), 3), (3, Some(9), 3)]);
    }

    #[test]
    fn lines_that_follow_each_other_are_one_run() {
        let (extents, whole) = ([extent(3, 4), extent(2, 2), extent(5, 5)], [IndexMap::whole(4), IndexMap::whole(2), IndexMap::whole(5)]);
        assert_eq!(runs(&TensorSlice::new(&extents, &whole, &vec![])), [(0, Some(0), 30), (30, None, 10)]);
        let long = [extent(3 * LONG, 3 * LONG), extent(1, 1)];
        let index = [IndexMap::whole(3 * LONG), IndexMap::whole(1)];
        assert_eq!(runs(&TensorSlice::new(&long, &index, &vec![])), [0, LONG, 2 * LONG].map(|at| (at, Some(at), LONG)));
    }

    #[test]
    fn elements_beyond_the_size_are_padding() {
        let (extents, index) = ([extent(5, 6)], [block(3)]);
        assert_eq!(runs(&TensorSlice::new(&extents, &index, &vec![1])), [(0, Some(3), 2), (2, None, 1)]);
        let (extents, index) = ([extent(1, 2), extent(2, 2)], [block(1), IndexMap::whole(2)]);
        assert_eq!(runs(&TensorSlice::new(&extents, &index, &vec![1])), [(0, None, 2)]);
    }

    #[test]
    fn a_part_of_a_zig_zag_is_two_chunks() {
        let extents = [Extent { order: Order::ZigZag { pairs: 2, chunk: 3 }, ..extent(12, 12) }];
        assert_eq!(runs(&TensorSlice::new(&extents, &[block(6)], &vec![0])), [(0, Some(0), 3), (3, Some(9), 3)]);
        assert_eq!(runs(&TensorSlice::new(&extents, &[block(6)], &vec![1])), [(0, Some(3), 6)]);
    }

    #[test]
    fn of_a_bucket_only_what_is_held_counts() {
        let (extents, index) = ([extent(4, 4), extent(3, 3)], [IndexMap::whole(4), IndexMap::whole(3)]);
        let part = |rank| TensorSlice::new(&extents, &index, &vec![rank]).within(6, &block(8), &vec![rank]);
        let of = |rank| runs(&part(rank));
        // Elements 6 to 18 of the bucket are two on the first rank, eight on the second and two on the third.
        assert_eq!(of(0), [(6, Some(0), 2)]);
        assert_eq!(of(1), [(0, Some(2), 8)]);
        assert_eq!(of(2), [(0, Some(10), 2)]);
        assert_eq!(of(3), []);
    }

    #[test]
    fn what_is_held_is_counted_without_padding() {
        // The part has rows and columns 3 and 4 of 5, and one row and column of padding.
        let (extents, index) = ([extent(5, 6), extent(5, 6)], [block(3), block(3)]);
        let part = |window: &IndexMap| TensorSlice::new(&extents, &index, &vec![1]).within(0, window, &vec![0]).held();
        assert_eq!(TensorSlice::new(&extents, &index, &vec![1]).spans(), Some(vec![vec![(3, 2)], vec![(3, 2)]]));
        assert_eq!(TensorSlice::new(&extents, &index, &vec![1]).held(), 0..4);
        let up_to: Vec<u64> = (0..10).map(|n| part(&IndexMap::whole(n)).end).collect();
        assert_eq!(up_to, [0, 1, 2, 2, 3, 4, 4, 4, 4, 4]);
        assert_eq!(TensorSlice::new(&[extent(1, 2)], &[block(1)], &vec![1]).spans(), None);
        assert_eq!((TensorSlice::new(&[], &[], &vec![]).spans(), TensorSlice::new(&[], &[], &vec![]).held()), (Some(vec![]), 0..1));
    }

    #[test]
    fn a_strided_map_is_several_runs() {
        let map = IndexMap { parts: vec![(2, 4), (2, 1)], base: Base::Zero };
        let extents = [extent(8, 8)];
        assert_eq!(runs(&TensorSlice::new(&extents, &[map], &vec![])), [(0, Some(0), 2), (2, Some(4), 2)]);
    }
}
