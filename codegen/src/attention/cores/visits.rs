//! Which blocks of the other side a tile meets, and which of them need the mask.

use super::*;

/// Which side of the scores a row is of.
#[derive(Clone, Copy, PartialEq)]
pub enum Side {
    Queries,
    Keys,
}

impl Side {
    pub fn other(self) -> Side {
        match self {
            Side::Queries => Side::Keys,
            Side::Keys => Side::Queries,
        }
    }
}

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

/// A row that a tile meets, for the mask: its position, if that counts, and whether it is there, if it may not be.
#[derive(Clone, Copy)]
pub struct Met<'c> {
    pub position: Option<Value<'c>>,
    pub present: Option<Value<'c>>,
}

impl<'c> Visits<'c> {
    pub fn visit(&self, cores: &Cores<'_, 'c>, i: Index<'c>) -> Visit<'c> {
        let b = cores.b;
        let (head, i) = if self.heads == 1 { (b.word(0), i) } else { (b.index_div(i, self.of_head), b.index_rem(i, self.of_head)) };
        match self.list {
            Some(list) => Visit::listed(cores, head, b.load_shared_word(b.index_add(list, b.index_mul(i, b.word(4))))),
            None => Visit { head, block: i, masked: self.last.1.then(|| b.equal(i, b.word(self.last.0)).into()), entry: None },
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
    pub fn list_bytes(&self, own: Side, sizes: Sizes) -> i64 {
        match self.plan.positions {
            Some(_) => 4 * (div_ceil(self.count(own.other()), sizes.others) + 1),
            None => 0,
        }
    }

    /// The positions of rows of one side, by their numbers (64 bits); past the end the last one's.
    pub fn position(&self, at: &At<'c>, side: Side, number: Index<'c>) -> Option<Value<'c>> {
        let b = self.b;
        let tensor = self.plan.positions?[usize::from(side == Side::Keys)];
        let step = b.index(Lane::I32.bytes() * self.plan.stride(tensor, self.dim(side)));
        let number = b.least(number, b.index(self.count(side) - 1));
        Some(b.load_splat(b.at(at.tensors[tensor], b.index_mul(number, step)), Lane::I32))
    }

    /// The least and the greatest position of `count` rows from `first` on, in all lanes.
    fn bounds(&self, at: &At<'c>, side: Side, first: Index<'c>, count: i64) -> Option<[Value<'c>; 2]> {
        let b = self.b;
        let number = |k: i64| b.index_add(b.index_add(first, b.lane()), b.index(k * LANES as i64));
        let own = (0..count / LANES as i64).map(|k| self.position(at, side, number(k))).collect::<Option<Vec<_>>>()?;
        let fold = |op: Compare| own[1..].iter().fold(own[0], |x, y| b.select(b.compare_int(op, x, *y), x, *y));
        Some([b.least_of_warp(fold(Compare::Lt)), b.greatest_of_warp(fold(Compare::Gt))])
    }

    /// All blocks of `heads` heads, for a tile of one side.
    pub fn unlisted(&self, own: Side, sizes: Sizes, heads: i64) -> Visits<'c> {
        let (b, rows) = (self.b, self.count(own.other()));
        let blocks = div_ceil(rows, sizes.others);
        let last = (blocks - 1, rows % sizes.others != 0);
        Visits { count: b.word(heads * blocks), of_head: b.word(blocks), heads, list: None, last }
    }

    /// Finds what the tile meets of `heads` heads. `list` is where the list may be put. All of the team must call it.
    pub fn visits(&self, at: &At<'c>, own: &Own<'c>, heads: i64, list: Index<'c>) -> Visits<'c> {
        let (b, side, others) = (self.b, own.side.other(), own.sizes.others);
        let rows = self.count(side);
        let blocks = div_ceil(rows, others);
        let Some(mine) = self.bounds(at, own.side, own.first, own.sizes.own()) else {
            return self.unlisted(own.side, own.sizes, heads);
        };
        let lane = self.lane();
        let entry = |i: Index<'c>| b.index_add(list, self.scaled(i, 4));
        b.loop_over([self.warp(), b.word(blocks), b.word(self.team.warps)], &[], &mut |block, _| {
            let first = b.widen(self.scaled(block, others));
            let theirs = self.bounds(at, side, first, others).expect("invariant: both sides have positions");
            let [queries, keys] = match own.side {
                Side::Queries => [mine, theirs],
                Side::Keys => [theirs, mine],
            };
            let both = |x, y| b.int2(IntBinary::And, x, y);
            let mut any = b.compare_int(Compare::Le, keys[0], queries[1]);
            let mut all = b.compare_int(Compare::Le, keys[1], queries[0]);
            if let Some(window) = self.window() {
                any = both(any, self.near(queries[0], keys[1], window));
                all = both(all, self.near(ir::fault!("gpu.visits.near", queries[0], queries[1]), keys[0], window));
            }
            if rows % others != 0 {
                all = ir::fault!("gpu.visits.last", all, both(all, b.less(block, b.word(blocks - 1)).into()));
            }
            let twice = self.scaled(block, 2);
            let shown = b.choose(all.into_int_value(), twice, self.plus(twice, 1));
            let shown = b.choose(any.into_int_value(), shown, b.word(-1));
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
            b.if_so(b.equal(lane, b.word(0)), || b.store_shared(entry(b.word(blocks)), &count));
        });
        self.meet();
        let of_head = b.load_shared_word(entry(b.word(blocks)));
        Visits { count: self.scaled(of_head, heads), of_head, heads, list: Some(list), last: (0, false) }
    }

    fn window(&self) -> Option<i32> {
        self.plan.attention.window.map(|w| i32::try_from(w).unwrap_or(i32::MAX))
    }

    /// Positions are not negative, so that their differences are numbers too.
    fn near(&self, query: Value<'c>, key: Value<'c>, window: i32) -> Value<'c> {
        self.b.compare_int(Compare::Lt, self.b.int2(IntBinary::Sub, query, key), self.b.i32(window))
    }

    /// `values`, one of each score of a block, with `hidden` where the mask hides it.
    pub fn hide(&self, at: &At<'c>, own: &Own<'c>, visit: &Visit<'c>, values: &[Value<'c>], hidden: Value<'c>) -> Vec<Value<'c>> {
        let (b, side) = (self.b, own.side.other());
        self.hide_by(at, own, visit, values, hidden, &|n| {
            [0, 1].map(|e| {
                let number = b.index_add(self.scaled(visit.block, own.sizes.others), self.plus(self.column(n), e));
                Met { position: self.position(at, side, b.widen(number)), present: self.present(own, number) }
            })
        })
    }

    /// Whether the other side has a row of this number, if it may not.
    pub fn present(&self, own: &Own<'c>, number: Index<'c>) -> Option<Value<'c>> {
        let rows = self.count(own.side.other());
        (rows % own.sizes.others != 0).then(|| self.b.less(number, self.b.word(rows)).into())
    }

    /// The same, with what `met` says of this lane's columns among the n-th eight.
    pub fn hide_by(
        &self,
        at: &At<'c>,
        own: &Own<'c>,
        visit: &Visit<'c>,
        values: &[Value<'c>],
        hidden: Value<'c>,
        met: &dyn Fn(i64) -> [Met<'c>; 2],
    ) -> Vec<Value<'c>> {
        let Some(masked) = visit.masked else { return values.to_vec() };
        let (b, sizes) = (self.b, own.sizes);
        b.when(masked, values, || {
            let mine: Vec<_> = (0..2 * sizes.tall).map(|k| self.position(at, own.side, self.row(own, k / 2, k % 2))).collect();
            let mut values = values.to_vec();
            for n in 0..sizes.others / COLUMNS {
                for (e, Met { position, present }) in (0..).zip(met(n)) {
                    for k in 0..2 * sizes.tall {
                        let positions = mine[k as usize]
                            .zip(position)
                            .map(|(mine, theirs)| if own.side == Side::Queries { (mine, theirs) } else { (theirs, mine) });
                        let both = |x, y| b.int2(IntBinary::And, x, y);
                        let seen = positions.map(|(query, key)| {
                            let before = b.compare_int(Compare::Le, key, query);
                            self.window().map_or(before, |w| both(before, self.near(query, key, w)))
                        });
                        let seen = match (seen, present) {
                            (Some(seen), Some(present)) => both(seen, present),
                            (seen, present) => seen.or(present).expect("invariant: something is hidden"),
                        };
                        let at = ((k / 2 * sizes.others / COLUMNS + n) * 4 + 2 * (k % 2) + e) as usize;
                        values[at] = b.select(seen, values[at], hidden);
                    }
                }
            }
            values
        })
    }
}
