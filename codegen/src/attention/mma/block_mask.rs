//! Which blocks of the other side a tile meets, and which of them need the mask.

use super::*;

/// What a tile meets, in order. Numbers have 32 bits.
pub struct Visits<'c> {
    pub count: Index<'c>,
    /// Blocks of the other side, for each of its heads.
    of_head: Index<'c>,
    /// Heads that are met, one after the other.
    heads: i64,
    /// Where the list is, if some blocks may be hidden: for each visit twice the block's number, and one more if the mask is needed.
    list: Option<Index<'c>>,
    /// The last block and whether it is a part of one, if there is no list.
    last: (i64, bool),
}

/// One block of the other side.
pub struct Visit<'c> {
    pub head: Index<'c>,
    pub block: Index<'c>,
    /// Whether the mask hides some of its scores, if it can.
    pub masked: Option<Value<'c>>,
    /// What the list says of it, if there is a list.
    pub entry: Option<Index<'c>>,
}

/// A row that a tile meets, for the program of scores: what each operand of its side alone holds for it, as far
/// as that counts, and whether it is there, if it may not be.
#[derive(Clone)]
pub struct Met<'c> {
    pub numbers: Vec<Option<Value<'c>>>,
    pub present: Option<Value<'c>>,
}

/// Of each operand of the program its least and its greatest number among some rows, where these are its side's
/// and that counts.
type BoundsOf<'c> = Vec<Option<[Value<'c>; 2]>>;

/// What each operand of the program holds for a pair.
type OperandValues<'n, 'c> = dyn Fn(usize) -> Value<'c> + 'n;

impl<'c> Visits<'c> {
    pub fn visit(&self, cores: &Cores<'_, 'c>, i: Index<'c>) -> Visit<'c> {
        let b = cores.b;
        let (head, i) = if self.heads == 1 { (b.word(0), i) } else { (b.index_div(i, self.of_head), b.index_rem(i, self.of_head)) };
        match self.list {
            Some(list) => Visit::listed(cores, head, b.load_shared_word(b.index_add(list, b.index_mul(i, b.word(4))))),
            None => {
                let last = self.last.1.then(|| b.equal(i, b.word(self.last.0)).into());
                let masked = if cores.plan.program.hides() { Some(b.equal(i, i).into()) } else { last };
                Visit { head, block: i, masked, entry: None }
            }
        }
    }
}

impl<'c> Visit<'c> {
    /// The visit that an entry of a list says.
    pub fn listed(cores: &Cores<'_, 'c>, head: Index<'c>, entry: Index<'c>) -> Self {
        let b = cores.b;
        let masked = b.equal(b.bits(IntBinary::And, entry, b.word(1)), b.word(1));
        Visit { head, block: b.bits(IntBinary::ShrLogical, entry, b.word(1)), masked: Some(masked.into()), entry: Some(entry) }
    }
}

impl<'c> Cores<'_, 'c> {
    /// Bytes of the list of visits.
    pub fn list_bytes(&self, own: ScoreSide, sizes: Sizes) -> i64 {
        if self.plan.program.tells() { 4 * (div_ceil(self.count(own.other()), sizes.others) + 1) } else { 0 }
    }

    /// What an operand holds for a row of its side, by its number (64 bits); past the end the last one's.
    pub fn number(&self, at: &GpuArguments<'c>, side: ScoreSide, operand: &Operand, number: Index<'c>) -> Value<'c> {
        let b = self.b;
        let number = b.least(number, b.index(self.count(side) - 1));
        b.load_splat(b.at(at.tensors[operand.tensor], b.index_mul(number, b.index(operand.step(side.which())))), operand.lane())
    }

    /// The least and the greatest numbers that operands hold for `count` rows from `first` on, in all lanes.
    fn bounds(&self, at: &GpuArguments<'c>, side: ScoreSide, first: Index<'c>, count: i64) -> BoundsOf<'c> {
        let b = self.b;
        let number = |k: i64| b.index_add(b.index_add(first, b.lane()), b.index(k * LANES as i64));
        let of = |operand: &Operand| {
            let held = |k: i64| operand.counted(b, self.number(at, side, operand, number(k)));
            if operand.strides[side.which()].is_none() {
                return [held(0); 2];
            }
            let own: Vec<_> = (0..count / LANES as i64).map(held).collect();
            let fold = |op: Compare| own[1..].iter().fold(own[0], |x, y| b.select(b.compare_int(op, x, *y), x, *y));
            [b.least_of_warp(fold(Compare::Lt)), b.greatest_of_warp(fold(Compare::Gt))]
        };
        self.plan.program.operands.iter().map(|o| (o.bounded && o.bounded_with() == side.which()).then(|| of(o))).collect()
    }

    /// The visit of one block of the other side, for a tile with these sizes.
    pub fn visit_of(&self, own: ScoreSide, sizes: Sizes, block: Index<'c>) -> Visit<'c> {
        let (b, plan, rows) = (self.b, self.plan, self.count(own.other()));
        let last = (rows % sizes.others != 0).then(|| b.equal(block, b.word(rows / sizes.others)));
        let masked = if plan.program.hides() { Some(b.equal(block, block)) } else { last };
        Visit { head: b.word(0), block, masked: masked.map(Into::into), entry: None }
    }

    /// Whether any score of a block may be seen, as far as the bounds of operands say.
    pub fn any_seen(&self, at: &GpuArguments<'c>, own: &RowTile<'c>, visit: &Visit<'c>) -> Option<Value<'c>> {
        if !self.plan.program.tells() {
            return None;
        }
        let others = own.sizes.others;
        let first = self.b.widen(self.scaled(visit.block, others));
        let mine = self.bounds(at, own.side, own.first, own.sizes.own());
        let theirs = self.bounds(at, own.side.other(), first, others);
        self.plan.program.sight(self.b, &|k| mine[k].or(theirs[k]).expect("invariant: a bounded operand has a side")).any
    }

    /// All blocks of `heads` heads, for a tile of one side.
    pub fn unlisted(&self, own: ScoreSide, sizes: Sizes, heads: i64) -> Visits<'c> {
        let (b, rows) = (self.b, self.count(own.other()));
        let blocks = div_ceil(rows, sizes.others);
        let last = (blocks - 1, rows % sizes.others != 0);
        Visits { count: b.word(heads * blocks), of_head: b.word(blocks), heads, list: None, last }
    }

    /// Finds what the tile meets of `heads` heads. `list` is where the list may be put, if the one there is read no
    /// more. All of the team must call it.
    pub fn visits(&self, at: &GpuArguments<'c>, own: &RowTile<'c>, heads: i64, list: Index<'c>) -> Visits<'c> {
        let (b, side, others) = (self.b, own.side.other(), own.sizes.others);
        let rows = self.count(side);
        let blocks = div_ceil(rows, others);
        if !self.plan.program.tells() {
            return self.unlisted(own.side, own.sizes, heads);
        }
        let mine = self.bounds(at, own.side, own.first, own.sizes.own());
        let lane = self.lane();
        // How many there are stands before the list, where no list of another length has an entry.
        let (counted, list) = (list, self.plus(list, 4));
        let entry = |i: Index<'c>| b.index_add(list, self.scaled(i, 4));
        b.loop_over([self.warp(), b.word(blocks), b.word(self.team.warps)], &[], &mut |block, _| {
            let first = b.widen(self.scaled(block, others));
            let theirs = self.bounds(at, side, first, others);
            let sight = self.plan.program.sight(b, &|k| mine[k].or(theirs[k]).expect("invariant: a bounded operand has a side"));
            let mut all = sight.all.unwrap_or_else(|| b.less(b.word(0), b.word(0)).into());
            if rows % others != 0 {
                let whole = b.less(block, b.word(blocks - 1)).into();
                all = ir::fault!("gpu.visits.last", all, b.int2(IntBinary::And, all, whole));
            }
            let twice = self.scaled(block, 2);
            let shown = b.choose(all.into_int_value(), twice, self.plus(twice, 1));
            let shown = sight.any.map_or(shown, |any| b.choose(any.into_int_value(), shown, b.word(-1)));
            b.if_so(b.equal(lane, b.word(0)), || b.store_shared(entry(block), &[shown.into()]));
            vec![]
        });
        self.meet();
        // One warp closes the gaps. A vote of all lanes lies between a chunk's reads and its writes.
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
        self.meet();
        let of_head = b.load_shared_word(counted);
        Visits { count: self.scaled(of_head, heads), of_head, heads, list: Some(list), last: (0, false) }
    }

    /// What the program makes of scaled products, one of each pair of a block, and the slopes of that, unless
    /// these are 1.
    pub fn changed(
        &self,
        at: &GpuArguments<'c>,
        own: &RowTile<'c>,
        visit: &Visit<'c>,
        products: &[Value<'c>],
    ) -> (Vec<Value<'c>>, Option<Vec<Value<'c>>>) {
        let (b, program) = (self.b, &self.plan.program);
        if !program.changes() {
            return (products.to_vec(), None);
        }
        let reads = [program.reads(program.scoring.score), program.reads(program.slope)].concat();
        let scale = b.f32(self.plan.attention.scale.0);
        let (mut scores, mut slopes) = (products.to_vec(), vec![b.f32(1.0); products.len()]);
        self.each_pair(at, own, visit, &reads, &mut |place, number| {
            let mut applied = Applied::new(b, program, b.mul(products[place], scale), number);
            scores[place] = applied.score();
            if let Some(slope) = applied.slope() {
                slopes[place] = slope;
            }
        });
        (scores, program.slope.map(|_| slopes))
    }

    /// What the probability of each pair of a block counts, if not 1.
    pub fn weights(&self, at: &GpuArguments<'c>, own: &RowTile<'c>, visit: &Visit<'c>) -> Option<Vec<Value<'c>>> {
        let (b, program) = (self.b, &self.plan.program);
        let reads = program.reads(Some(program.scoring.weight?));
        let mut weights = vec![b.f32(1.0); (own.sizes.of_warp() * own.sizes.others / LANES as i64) as usize];
        self.each_pair(at, own, visit, &reads, &mut |place, number| {
            let weight = Applied::new(b, program, b.f32(0.0), number).weight();
            weights[place] = weight.expect("invariant: the program has a weight");
        });
        Some(weights)
    }

    /// Calls `body` for each pair of a block with the pair's place among the lane's elements, and with what says of
    /// the operands in `reads` what they hold for it.
    fn each_pair(
        &self,
        at: &GpuArguments<'c>,
        own: &RowTile<'c>,
        visit: &Visit<'c>,
        reads: &[usize],
        body: &mut dyn FnMut(usize, &OperandValues<'_, 'c>),
    ) {
        let mine = self.own_numbers(at, own, reads);
        for n in 0..own.sizes.others / COLUMNS {
            for (e, met) in (0..).zip(self.met(at, own, visit, n, reads)) {
                for k in 0..2 * own.sizes.tall {
                    let number = |i: usize| self.of_pair(at, own, visit, (&mine[k as usize], &met.numbers), i, (n, e, k));
                    body(place(own.sizes, n, e, k), &number);
                }
            }
        }
    }

    /// What operands of the tile's own side alone hold for each of this lane's rows, as far as they are read.
    fn own_numbers(&self, at: &GpuArguments<'c>, own: &RowTile<'c>, reads: &[usize]) -> Vec<Vec<Option<Value<'c>>>> {
        let rows = (0..2 * own.sizes.tall).map(|k| self.row(own, k / 2, k % 2));
        rows.map(|row| self.numbers_of_side(at, own.side, row, reads)).collect()
    }

    fn numbers_of_side(&self, at: &GpuArguments<'c>, side: ScoreSide, number: Index<'c>, reads: &[usize]) -> Vec<Option<Value<'c>>> {
        let operands = self.plan.program.operands.iter().enumerate();
        operands.map(|(k, o)| (o.side() == side.which() && reads.contains(&k)).then(|| self.number(at, side, o, number))).collect()
    }

    /// This lane's columns among the n-th eight of a block.
    fn met(&self, at: &GpuArguments<'c>, own: &RowTile<'c>, visit: &Visit<'c>, n: i64, reads: &[usize]) -> [Met<'c>; 2] {
        [0, 1].map(|e| {
            let number = self.b.index_add(self.scaled(visit.block, own.sizes.others), self.plus(self.column(n), e));
            Met { numbers: self.numbers_of_side(at, own.side.other(), self.b.widen(number), reads), present: self.present(own, number) }
        })
    }

    /// What operand `i` holds for a pair: of the tile's row k, and of this lane's column e among the n-th eight.
    fn of_pair(
        &self,
        at: &GpuArguments<'c>,
        own: &RowTile<'c>,
        visit: &Visit<'c>,
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
        let column = b.widen(b.index_add(self.scaled(visit.block, own.sizes.others), self.plus(self.column(n), e)));
        let column = b.least(column, b.index(self.count(other) - 1));
        let [row, column] = [(row, side), (column, other)].map(|(number, side)| b.index_mul(number, b.index(operand.step(side.which()))));
        b.load_splat(b.at(b.at(at.tensors[operand.tensor], row), column), operand.lane())
    }

    /// `values`, one of each score of a block, with `hidden` where the program hides it.
    pub fn hide(&self, at: &GpuArguments<'c>, own: &RowTile<'c>, visit: &Visit<'c>, values: &[Value<'c>], hidden: Value<'c>) -> Vec<Value<'c>> {
        let reads = self.plan.program.reads(self.plan.program.scoring.seen);
        self.hide_by(at, own, visit, values, hidden, &|n| self.met(at, own, visit, n, &reads))
    }

    /// Whether the other side has a row of this number, if it may not.
    pub fn present(&self, own: &RowTile<'c>, number: Index<'c>) -> Option<Value<'c>> {
        let rows = self.count(own.side.other());
        (rows % own.sizes.others != 0).then(|| self.b.less(number, self.b.word(rows)).into())
    }

    /// The same, with what `met` says of this lane's columns among the n-th eight.
    pub fn hide_by(
        &self,
        at: &GpuArguments<'c>,
        own: &RowTile<'c>,
        visit: &Visit<'c>,
        values: &[Value<'c>],
        hidden: Value<'c>,
        met: &dyn Fn(i64) -> [Met<'c>; 2],
    ) -> Vec<Value<'c>> {
        let Some(masked) = visit.masked else { return values.to_vec() };
        let (b, program) = (self.b, &self.plan.program);
        b.when(masked, values, || {
            let mine = self.own_numbers(at, own, &program.reads(program.scoring.seen));
            let mut values = values.to_vec();
            for n in 0..own.sizes.others / COLUMNS {
                for (e, met) in (0..).zip(met(n)) {
                    for k in 0..2 * own.sizes.tall {
                        let place = place(own.sizes, n, e, k);
                        let number = |i: usize| self.of_pair(at, own, visit, (&mine[k as usize], &met.numbers), i, (n, e, k));
                        let seen = match (Applied::new(b, program, values[place], &number).seen(), met.present) {
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

/// Where, among a lane's elements of a block, that of its row k and of its column e among the n-th eight is.
pub fn place(sizes: Sizes, n: i64, e: i64, k: i64) -> usize {
    ((k / 2 * sizes.others / COLUMNS + n) * 4 + 2 * (k % 2) + e) as usize
}
