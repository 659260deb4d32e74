//! How a tensor is cut into blocks, each a range of every dim.

use std::ops::Range;

/// Levels of cuts that are followed; as many as a tensor of PyTorch's has dims.
const MOST_LEVELS: usize = 64;

/// A part of a tensor.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Block {
    pub from: Vec<u64>,
    pub sizes: Vec<u64>,
}

/// Checked: each element is in one block.
#[derive(Debug)]
pub struct Tiling {
    sizes: Vec<u64>,
    blocks: Vec<Block>,
    /// The first is the whole tensor.
    nodes: Vec<TilingNode>,
}

/// A part of the tensor that is one block, or cut along a dim.
#[derive(Debug)]
enum TilingNode {
    Block(usize),
    Cut {
        dim: usize,
        /// Where each part begins.
        starts: Vec<u64>,
        /// The node of the first; the others follow it.
        first: usize,
    },
}

/// A node that is to be made, of these blocks.
struct PendingNode {
    node: usize,
    blocks: Range<usize>,
    level: usize,
    /// What they have to fill.
    within: Block,
}

impl Block {
    fn end(&self, dim: usize) -> u64 {
        self.from[dim] + self.sizes[dim]
    }

    /// Number of elements; none if there are too many to count.
    pub fn elements(&self) -> Option<u64> {
        elements(&self.sizes)
    }
}

/// Number of elements of these sizes; none if there are too many to count.
pub fn elements(sizes: &[u64]) -> Option<u64> {
    // An empty dim leaves no elements, whatever the other sizes are.
    if sizes.contains(&0) { Some(0) } else { sizes.iter().try_fold(1, |all: u64, n| all.checked_mul(*n)) }
}

impl Tiling {
    /// Of a tensor of these sizes, which is not empty, as none of its blocks is.
    ///
    /// # Errors
    /// Elements that are in no block or in several, or blocks that no planes separate.
    pub fn new(sizes: &[u64], blocks: Vec<Block>) -> Result<Tiling, String> {
        let all = elements(sizes).ok_or("it has too many elements")?;
        let mut covered: u64 = 0;
        for block in &blocks {
            let is_within = (0..sizes.len()).all(|k| block.from[k].checked_add(block.sizes[k]).is_some_and(|end| end <= sizes[k]));
            if !is_within {
                return Err(format!("a part of {:?} at {:?} is not within {sizes:?}", block.sizes, block.from));
            }
            let n = block.elements().ok_or("a part has too many elements")?;
            covered = covered.checked_add(n).ok_or("its parts have too many elements")?;
        }
        if covered != all {
            return Err(format!("its parts have {covered} elements, and it has {all}"));
        }
        let mut order: Vec<usize> = (0..blocks.len()).collect();
        let mut nodes = vec![TilingNode::Block(0)];
        let whole = Block { from: vec![0; sizes.len()], sizes: sizes.to_vec() };
        let mut tasks = vec![PendingNode { node: 0, blocks: 0..blocks.len(), level: 0, within: whole }];
        while let Some(task) = tasks.pop() {
            let order = &mut order[task.blocks.clone()];
            if let [only] = *order {
                if blocks[only] != task.within {
                    return Err(format!("elements of {:?} at {:?} are in no part, or in several", task.within.sizes, task.within.from));
                }
                nodes[task.node] = TilingNode::Block(only);
                continue;
            }
            let cut = (0..sizes.len()).filter(|_| task.level < MOST_LEVELS).find_map(|dim| Some((dim, cut(&blocks, order, dim)?)));
            let (dim, groups) =
                cut.ok_or_else(|| format!("parts of {:?} at {:?} overlap, or no planes separate them", task.within.sizes, task.within.from))?;
            let mut starts: Vec<u64> = groups.iter().map(|g| blocks[order[g.start]].from[dim]).collect();
            starts[0] = task.within.from[dim];
            let first = nodes.len();
            for (k, group) in groups.into_iter().enumerate() {
                let mut within = task.within.clone();
                let end = starts.get(k + 1).copied().unwrap_or(task.within.end(dim));
                (within.from[dim], within.sizes[dim]) = (starts[k], end - starts[k]);
                let at = task.blocks.start;
                tasks.push(PendingNode { node: first + k, blocks: at + group.start..at + group.end, level: task.level + 1, within });
                nodes.push(TilingNode::Block(0));
            }
            nodes[task.node] = TilingNode::Cut { dim, starts, first };
        }
        Ok(Tiling { sizes: sizes.to_vec(), blocks, nodes })
    }

    /// Where elements are from row-major index `at` on: the block, the row-major index in it, and how many follow
    /// each other there. `at + len` is within the tensor.
    pub fn visit(&self, at: u64, len: u64, mut visit: impl FnMut(usize, u64, u64)) {
        let (mut at, end) = (at, at + len);
        let mut index = vec![0; self.sizes.len()];
        while at < end {
            let mut rest = at;
            for (i, size) in index.iter_mut().zip(&self.sizes).rev() {
                (*i, rest) = (rest % size, rest / size);
            }
            let number = self.find(&index);
            let block = &self.blocks[number];
            let (mut flat, mut stride, mut run, mut is_whole) = (0, 1, 1, true);
            for k in (0..self.sizes.len()).rev() {
                flat += (index[k] - block.from[k]) * stride;
                if is_whole {
                    // All later dims are whole in the block, so its rows are contiguous in the tensor, too.
                    run += (block.end(k) - index[k] - 1) * stride;
                    is_whole = block.sizes[k] == self.sizes[k];
                }
                stride *= block.sizes[k];
            }
            let run = run.min(end - at);
            visit(number, flat, run);
            at += run;
        }
    }

    /// The block that an element is in.
    fn find(&self, index: &[u64]) -> usize {
        let mut node = 0;
        loop {
            match &self.nodes[node] {
                TilingNode::Block(number) => return *number,
                TilingNode::Cut { dim, starts, first } => node = first + starts.partition_point(|s| *s <= index[*dim]) - 1,
            }
        }
    }
}

/// Sorts blocks along a dim, and gives the groups between which no block lies; none if all are one group.
fn cut(blocks: &[Block], order: &mut [usize], dim: usize) -> Option<Vec<Range<usize>>> {
    order.sort_unstable_by_key(|b| blocks[*b].from[dim]);
    let (mut groups, mut start, mut end) = (vec![], 0, 0);
    for (k, b) in order.iter().enumerate() {
        if k > start && blocks[*b].from[dim] >= end {
            groups.push(start..k);
            start = k;
        }
        end = end.max(blocks[*b].end(dim));
    }
    groups.push(start..order.len());
    (groups.len() > 1).then_some(groups)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(from: &[u64], sizes: &[u64]) -> Block {
        Block { from: from.to_vec(), sizes: sizes.to_vec() }
    }

    #[test]
    fn elements_are_found_in_their_blocks() {
        // The first two rows are cut at column 3, and the last row at column 1.
        let blocks = vec![block(&[2, 0], &[1, 1]), block(&[0, 0], &[2, 3]), block(&[2, 1], &[1, 3]), block(&[0, 3], &[2, 1])];
        let tiling = Tiling::new(&[3, 4], blocks).unwrap();
        let mut found = vec![];
        tiling.visit(1, 10, |b, at, len| found.push((b, at, len)));
        assert_eq!(found, [(1, 1, 2), (3, 0, 1), (1, 3, 3), (3, 1, 1), (0, 0, 1), (2, 0, 2)]);
        // Rows of whole blocks are contiguous.
        let rows = Tiling::new(&[3, 2, 2], vec![block(&[0, 0, 0], &[2, 2, 2]), block(&[2, 0, 0], &[1, 2, 2])]).unwrap();
        let mut found = vec![];
        rows.visit(3, 7, |b, at, len| found.push((b, at, len)));
        assert_eq!(found, [(0, 3, 5), (1, 0, 2)]);
        let mut found = vec![];
        Tiling::new(&[], vec![block(&[], &[])]).unwrap().visit(0, 1, |b, at, len| found.push((b, at, len)));
        assert_eq!(found, [(0, 0, 1)]);
    }

    #[test]
    fn every_way_to_cut_rows_and_columns_gives_each_element_its_place() {
        for (rows, columns) in (0..8u64).flat_map(|r| (0..8u64).map(move |c| (r, c))) {
            // Bit `k - 1` says whether there is a cut before row or column `k`.
            let spans = |bits: u64| {
                let mut cuts: Vec<u64> = vec![0];
                cuts.extend((1..4).filter(|k| bits >> (k - 1) & 1 == 1));
                cuts.push(4);
                cuts.windows(2).map(|w| (w[0], w[1] - w[0])).collect::<Vec<_>>()
            };
            let blocks: Vec<Block> = spans(rows)
                .into_iter()
                .flat_map(|r| spans(columns).into_iter().map(move |c| Block { from: vec![r.0, c.0], sizes: vec![r.1, c.1] }))
                .collect();
            let tiling = Tiling::new(&[4, 4], blocks.clone()).unwrap();
            let mut next = 0;
            tiling.visit(0, 16, |b, at, len| {
                for k in at..at + len {
                    let b = &blocks[b];
                    assert_eq!((b.from[0] + k / b.sizes[1]) * 4 + b.from[1] + k % b.sizes[1], next);
                    next += 1;
                }
            });
            assert_eq!(next, 16);
        }
    }

    #[test]
    fn each_element_is_in_one_block() {
        let wrong = |blocks: &[(&[u64], &[u64])]| Tiling::new(&[3, 3], blocks.iter().map(|(f, s)| block(f, s)).collect()).unwrap_err();
        assert_eq!(wrong(&[]), "its parts have 0 elements, and it has 9");
        assert_eq!(wrong(&[(&[0, 0], &[2, 3])]), "its parts have 6 elements, and it has 9");
        assert_eq!(wrong(&[(&[0, 0], &[3, 3]), (&[0, 0], &[3, 3])]), "its parts have 18 elements, and it has 9");
        assert_eq!(wrong(&[(&[1, 0], &[3, 3])]), "a part of [3, 3] at [1, 0] is not within [3, 3]");
        assert_eq!(wrong(&[(&[0, u64::MAX], &[3, 3])]), format!("a part of [3, 3] at [0, {}] is not within [3, 3]", u64::MAX));
        // The parts have as many elements as the tensor, but some of them twice.
        assert_eq!(wrong(&[(&[0, 0], &[2, 3]), (&[0, 0], &[1, 3])]), "parts of [3, 3] at [0, 0] overlap, or no planes separate them");
        assert_eq!(
            wrong(&[(&[0, 0], &[1, 3]), (&[1, 0], &[1, 3]), (&[1, 0], &[1, 3])]),
            "parts of [2, 3] at [1, 0] overlap, or no planes separate them"
        );
        // A pinwheel has each element once, but no plane separates its parts.
        let pinwheel: [(&[u64], &[u64]); 5] = [(&[0, 0], &[1, 2]), (&[0, 2], &[2, 1]), (&[2, 1], &[1, 2]), (&[1, 0], &[2, 1]), (&[1, 1], &[1, 1])];
        assert_eq!(wrong(&pinwheel), "parts of [3, 3] at [0, 0] overlap, or no planes separate them");
        assert_eq!(Tiling::new(&[u64::MAX, 3], vec![]).unwrap_err(), "it has too many elements");
    }
}
