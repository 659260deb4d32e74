//! Which blocks of the other side a tile meets, and which of them need the mask.

use super::*;

/// The blocks of the other side that a tile meets, in order. Indices have 32 bits.
pub struct BlockMask<'c> {
    pub count: Index<'c>,
    /// Blocks for each head of the other side.
    of_head: Index<'c>,
    /// Heads that are met, one after the other.
    heads: i64,
    /// Address of the list, if some blocks may be hidden. An entry is twice the block's number, plus one if the mask
    /// is needed.
    list: Option<Index<'c>>,
    /// Without a list: the last block's number, and whether it is partial.
    last: (i64, bool),
}

/// One block of the other side.
pub struct VisibleBlock<'c> {
    pub head: Index<'c>,
    pub index: Index<'c>,
    /// Whether the mask must be applied; `None` if it never hides a score.
    pub masked: Option<Value<'c>>,
    /// Entry of the list, if there is one.
    pub entry: Option<Index<'c>>,
}

/// The values that a row of the other side has for the program of scores, and whether the row exists. Operands that
/// are not read, or not of that side only, have no value; `present` is `None` if all rows exist.
#[derive(Clone)]
pub struct ColumnValues<'c> {
    pub numbers: Vec<Option<Value<'c>>>,
    pub present: Option<Value<'c>>,
}

/// For each operand of the program, its least and greatest value among some rows, if bounds are found with rows of
/// that side.
type BoundsOf<'c> = Vec<Option<[Value<'c>; 2]>>;

/// The value of each operand of the program for a pair.
type OperandValues<'n, 'c> = dyn Fn(usize) -> Value<'c> + 'n;

impl<'c> BlockMask<'c> {
    pub fn block(&self, mma: &MmaAttention<'_, 'c>, i: Index<'c>) -> VisibleBlock<'c> {
        let b = mma.b;
        let (head, i) = if self.heads == 1 { (b.word(0), i) } else { (b.index_div(i, self.of_head), b.index_rem(i, self.of_head)) };
        match self.list {
            Some(list) => VisibleBlock::listed(mma, head, b.load_shared_word(b.index_add(list, b.index_mul(i, b.word(4))))),
            None => {
                let last = self.last.1.then(|| b.equal(i, b.word(self.last.0)).into());
                let masked = if mma.plan.program.hides() { Some(b.equal(i, i).into()) } else { last };
                VisibleBlock { head, index: i, masked, entry: None }
            }
        }
    }
}

impl<'c> VisibleBlock<'c> {
    /// The block of a list's entry.
    pub fn listed(mma: &MmaAttention<'_, 'c>, head: Index<'c>, entry: Index<'c>) -> Self {
        let b = mma.b;
        let masked = b.equal(b.bits(IntBinary::And, entry, b.word(1)), b.word(1));
        VisibleBlock { head, index: b.bits(IntBinary::ShrLogical, entry, b.word(1)), masked: Some(masked.into()), entry: Some(entry) }
    }
}

impl<'c> MmaAttention<'_, 'c> {
    /// Bytes of the list of blocks.
    pub fn list_bytes(&self, own: ScoreSide, sizes: TileSizes) -> i64 {
        if self.plan.program.tells() { 4 * (div_ceil(self.count(own.other()), sizes.others) + 1) } else { 0 }
    }

    /// Value of an operand for a row of its side, by the row's number (64 bits). Past the end it is the last row's.
    pub fn number(&self, at: &GpuArguments<'c>, side: ScoreSide, operand: &Operand, number: Index<'c>) -> Value<'c> {
        let b = self.b;
        let number = b.least(number, b.index(self.count(side) - 1));
        b.load_splat(b.at(at.tensors[operand.tensor], b.index_mul(number, b.index(operand.step(side.index())))), operand.lane())
    }

    /// The least and the greatest values of operands for `count` rows from `first` on, in all lanes.
    fn bounds(&self, at: &GpuArguments<'c>, side: ScoreSide, first: Index<'c>, count: i64) -> BoundsOf<'c> {
        let b = self.b;
        let number = |k: i64| b.index_add(b.index_add(first, b.lane()), b.index(k * LANES as i64));
        let of = |operand: &Operand| {
            let value = |k: i64| operand.counted(b, self.number(at, side, operand, number(k)));
            if operand.strides[side.index()].is_none() {
                return [value(0); 2];
            }
            let own: Vec<_> = (0..count / LANES as i64).map(value).collect();
            let fold = |op: Compare| own[1..].iter().fold(own[0], |x, y| b.select(b.compare_int(op, x, *y), x, *y));
            [b.least_of_warp(fold(Compare::Lt)), b.greatest_of_warp(fold(Compare::Gt))]
        };
        self.plan.program.operands.iter().map(|o| (o.bounded && o.bounded_with() == side.index()).then(|| of(o))).collect()
    }

    /// Block `block` of the other side, for a tile with these sizes.
    pub fn block_of(&self, own: ScoreSide, sizes: TileSizes, block: Index<'c>) -> VisibleBlock<'c> {
        let (b, plan, rows) = (self.b, self.plan, self.count(own.other()));
        let last = (rows % sizes.others != 0).then(|| b.equal(block, b.word(rows / sizes.others)));
        let masked = if plan.program.hides() { Some(b.equal(block, block)) } else { last };
        VisibleBlock { head: b.word(0), index: block, masked: masked.map(Into::into), entry: None }
    }

    /// Whether any score of a block may be seen, as far as the bounds of operands say.
    pub fn any_seen(&self, at: &GpuArguments<'c>, own: &RowTile<'c>, block: &VisibleBlock<'c>) -> Option<Value<'c>> {
        if !self.plan.program.tells() {
            return None;
        }
        let others = own.sizes.others;
        let first = self.b.widen(self.scaled(block.index, others));
        let mine = self.bounds(at, own.side, own.first, own.sizes.own());
        let theirs = self.bounds(at, own.side.other(), first, others);
        self.plan.program.block_visibility(self.b, &|k| mine[k].or(theirs[k]).expect("invariant: a bounded operand has a side")).any
    }

    /// All blocks of `heads` heads, for a tile of one side.
    pub fn full_mask(&self, own: ScoreSide, sizes: TileSizes, heads: i64) -> BlockMask<'c> {
        let (b, rows) = (self.b, self.count(own.other()));
        let blocks = div_ceil(rows, sizes.others);
        let last = (blocks - 1, rows % sizes.others != 0);
        BlockMask { count: b.word(heads * blocks), of_head: b.word(blocks), heads, list: None, last }
    }

    /// Finds the blocks that the tile meets in `heads` heads. `list` is the address for the list, whose previous
    /// content must have been read. All warps of the team must call it.
    pub fn block_mask(&self, at: &GpuArguments<'c>, own: &RowTile<'c>, heads: i64, list: Index<'c>) -> BlockMask<'c> {
        let (b, side, others) = (self.b, own.side.other(), own.sizes.others);
        let rows = self.count(side);
        let blocks = div_ceil(rows, others);
        if !self.plan.program.tells() {
            return self.full_mask(own.side, own.sizes, heads);
        }
        let mine = self.bounds(at, own.side, own.first, own.sizes.own());
        let lane = self.lane();
        // The count lies before the entries, at an address that no entry of any list has.
        let (counted, list) = (list, self.plus(list, 4));
        let entry = |i: Index<'c>| b.index_add(list, self.scaled(i, 4));
        b.loop_over([self.warp(), b.word(blocks), b.word(self.team.warps)], &[], &mut |block, _| {
            let first = b.widen(self.scaled(block, others));
            let theirs = self.bounds(at, side, first, others);
            let visibility = self.plan.program.block_visibility(b, &|k| mine[k].or(theirs[k]).expect("invariant: a bounded operand has a side"));
            let mut all = visibility.all.unwrap_or_else(|| b.less(b.word(0), b.word(0)).into());
            if rows % others != 0 {
                let whole = b.less(block, b.word(blocks - 1)).into();
                all = ir::fault!("gpu.visits.last", all, b.int2(IntBinary::And, all, whole));
            }
            let twice = self.scaled(block, 2);
            let shown = b.choose(all.into_int_value(), twice, self.plus(twice, 1));
            let shown = visibility.any.map_or(shown, |any| b.choose(any.into_int_value(), shown, b.word(-1)));
            b.if_so(b.equal(lane, b.word(0)), || b.store_shared(entry(block), &[shown.into()]));
            vec![]
        });
        self.team_barrier();
        // One warp compacts the list in place. The ballot separates a chunk's reads from its writes.
        b.if_so(b.equal(self.warp(), b.word(0)), || {
            let below = b.bits(IntBinary::Sub, b.bits(IntBinary::Shl, b.word(1), lane), b.word(1));
            let count = b.loop_over([b.word(0), b.word(blocks), b.word(LANES as i64)], &[b.i32(0)], &mut |chunk, count| {
                let i = b.index_add(chunk, lane);
                let here = b.load_shared_word(entry(b.least(i, b.word(blocks - 1))));
                let shown = b.choose(b.less(i, b.word(blocks)), here, b.word(-1));
                let seen = b.less(b.word(-1), shown);
                let vote = b.ballot(seen.into());
                let count = count[0].into_int_value();
                let place = b.index_add(count, b.count_ones(b.bits(IntBinary::And, vote, below)));
                b.if_so(seen, || b.store_shared(entry(place), &[shown.into()]));
                vec![b.index_add(count, b.count_ones(vote)).into()]
            });
            b.if_so(b.equal(lane, b.word(0)), || b.store_shared(counted, &count));
        });
        self.team_barrier();
        let of_head = b.load_shared_word(counted);
        BlockMask { count: self.scaled(of_head, heads), of_head, heads, list: Some(list), last: (0, false) }
    }

    /// Applies the program to the products of a block. Returns the scores and their slopes, unless these are 1.
    pub fn changed(
        &self,
        at: &GpuArguments<'c>,
        own: &RowTile<'c>,
        block: &VisibleBlock<'c>,
        products: &[Value<'c>],
    ) -> (Vec<Value<'c>>, Option<Vec<Value<'c>>>) {
        let (b, program) = (self.b, &self.plan.program);
        if !program.changes() {
            return (products.to_vec(), None);
        }
        let reads = [program.reads(program.scoring.score), program.reads(program.slope)].concat();
        let scale = b.f32(self.plan.attention.scale.0);
        let (mut scores, mut slopes) = (products.to_vec(), vec![b.f32(1.0); products.len()]);
        self.each_pair(at, own, block, &reads, &mut |place, number| {
            let mut applied = Applied::new(b, program, b.mul(products[place], scale), number);
            scores[place] = applied.score();
            if let Some(slope) = applied.slope() {
                slopes[place] = slope;
            }
        });
        (scores, program.slope.map(|_| slopes))
    }

    /// Weights of the probabilities of a block; `None` where all are 1.
    pub fn weights(&self, at: &GpuArguments<'c>, own: &RowTile<'c>, block: &VisibleBlock<'c>) -> Option<Vec<Value<'c>>> {
        let (b, program) = (self.b, &self.plan.program);
        let reads = program.reads(Some(program.scoring.weight?));
        let mut weights = vec![b.f32(1.0); (own.sizes.of_warp() * own.sizes.others / LANES as i64) as usize];
        self.each_pair(at, own, block, &reads, &mut |place, number| {
            let weight = Applied::new(b, program, b.f32(0.0), number).weight();
            weights[place] = weight.expect("invariant: the program has a weight");
        });
        Some(weights)
    }

    /// Calls `body` for each pair of a block with the pair's position among the lane's elements, and with a function
    /// that gives the values of the operands in `reads`.
    fn each_pair(
        &self,
        at: &GpuArguments<'c>,
        own: &RowTile<'c>,
        block: &VisibleBlock<'c>,
        reads: &[usize],
        body: &mut dyn FnMut(usize, &OperandValues<'_, 'c>),
    ) {
        let mine = self.own_numbers(at, own, reads);
        for n in 0..own.sizes.others / COLUMNS {
            for (e, column) in (0..).zip(self.column_values(at, own, block, n, reads)) {
                for k in 0..2 * own.sizes.tall {
                    let number = |i: usize| self.of_pair(at, own, block, (&mine[k as usize], &column.numbers), i, (n, e, k));
                    body(place(own.sizes, n, e, k), &number);
                }
            }
        }
    }

    /// For each of this lane's rows, the values of the operands in `reads` that belong to the tile's side only.
    fn own_numbers(&self, at: &GpuArguments<'c>, own: &RowTile<'c>, reads: &[usize]) -> Vec<Vec<Option<Value<'c>>>> {
        let rows = (0..2 * own.sizes.tall).map(|k| self.row(own, k / 2, k % 2));
        rows.map(|row| self.numbers_of_side(at, own.side, row, reads)).collect()
    }

    fn numbers_of_side(&self, at: &GpuArguments<'c>, side: ScoreSide, number: Index<'c>, reads: &[usize]) -> Vec<Option<Value<'c>>> {
        let operands = self.plan.program.operands.iter().enumerate();
        operands.map(|(k, o)| (o.side() == side.index() && reads.contains(&k)).then(|| self.number(at, side, o, number))).collect()
    }

    /// Values of this lane's two columns in the n-th group of 8 of a block.
    fn column_values(&self, at: &GpuArguments<'c>, own: &RowTile<'c>, block: &VisibleBlock<'c>, n: i64, reads: &[usize]) -> [ColumnValues<'c>; 2] {
        [0, 1].map(|e| {
            let number = self.b.index_add(self.scaled(block.index, own.sizes.others), self.plus(self.column(n), e));
            ColumnValues { numbers: self.numbers_of_side(at, own.side.other(), self.b.widen(number), reads), present: self.present(own, number) }
        })
    }

    /// Value of operand `i` for a pair: the tile's row k and this lane's column e in the n-th group of 8.
    fn of_pair(
        &self,
        at: &GpuArguments<'c>,
        own: &RowTile<'c>,
        block: &VisibleBlock<'c>,
        (mine, theirs): (&[Option<Value<'c>>], &[Option<Value<'c>>]),
        i: usize,
        (n, e, k): (i64, i64, i64),
    ) -> Value<'c> {
        if let Some(value) = mine[i].or(theirs[i]) {
            return value;
        }
        let (b, operand) = (self.b, &self.plan.program.operands[i]);
        let (side, other) = (own.side, own.side.other());
        let row = b.least(self.row(own, k / 2, k % 2), b.index(self.count(side) - 1));
        let column = b.widen(b.index_add(self.scaled(block.index, own.sizes.others), self.plus(self.column(n), e)));
        let column = b.least(column, b.index(self.count(other) - 1));
        let [row, column] = [(row, side), (column, other)].map(|(number, side)| b.index_mul(number, b.index(operand.step(side.index()))));
        b.load_splat(b.at(b.at(at.tensors[operand.tensor], row), column), operand.lane())
    }

    /// `values`, one of each score of a block, with `hidden` where the program hides it.
    pub fn hide(
        &self,
        at: &GpuArguments<'c>,
        own: &RowTile<'c>,
        block: &VisibleBlock<'c>,
        values: &[Value<'c>],
        hidden: Value<'c>,
    ) -> Vec<Value<'c>> {
        let reads = self.plan.program.reads(self.plan.program.scoring.seen);
        self.hide_by(at, own, block, values, hidden, &|n| self.column_values(at, own, block, n, &reads))
    }

    /// Whether the other side has a row of this number; `None` if it surely has.
    pub fn present(&self, own: &RowTile<'c>, number: Index<'c>) -> Option<Value<'c>> {
        let rows = self.count(own.side.other());
        (rows % own.sizes.others != 0).then(|| self.b.less(number, self.b.word(rows)).into())
    }

    /// The same, with the values that `columns` gives for this lane's columns in the n-th group of 8.
    pub fn hide_by(
        &self,
        at: &GpuArguments<'c>,
        own: &RowTile<'c>,
        block: &VisibleBlock<'c>,
        values: &[Value<'c>],
        hidden: Value<'c>,
        columns: &dyn Fn(i64) -> [ColumnValues<'c>; 2],
    ) -> Vec<Value<'c>> {
        let Some(masked) = block.masked else { return values.to_vec() };
        let (b, program) = (self.b, &self.plan.program);
        b.when(masked, values, || {
            let mine = self.own_numbers(at, own, &program.reads(program.scoring.seen));
            let mut values = values.to_vec();
            for n in 0..own.sizes.others / COLUMNS {
                for (e, column) in (0..).zip(columns(n)) {
                    for k in 0..2 * own.sizes.tall {
                        let place = place(own.sizes, n, e, k);
                        let number = |i: usize| self.of_pair(at, own, block, (&mine[k as usize], &column.numbers), i, (n, e, k));
                        let seen = match (Applied::new(b, program, values[place], &number).seen(), column.present) {
                            (Some(seen), Some(present)) => b.int2(IntBinary::And, seen, present),
                            (seen, present) => seen.or(present).expect("invariant: something is hidden"),
                        };
                        values[place] = b.select(seen, values[place], hidden);
                    }
                }
            }
            values
        })
    }
}

/// Position, among a lane's elements of a block, of that in its row k and its column e of the n-th group of 8.
pub fn place(sizes: TileSizes, n: i64, e: i64, k: i64) -> usize {
    ((k / 2 * sizes.others / COLUMNS + n) * 4 + 2 * (k % 2) + e) as usize
}
