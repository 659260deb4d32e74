//! Which tile a block computes next: a counter in memory says it, so that a block that had to wait for its place, or
//! has long tiles, computes fewer of them. What a tile's result is does not depend on who computes it.
//!
//! One thread takes numbers. It puts each into shared memory, from where all warps that compute the tile read it: the
//! number is a stage of its own ([`Stages`]), which is empty again when they have. A block's first tile has the
//! block's number, and the counter hands out those behind: `n` blocks that share `t` tiles add to it `t` times, `n`
//! of them in vain, and `atom.inc` makes it 0 with the last of these, as the next launch wants it.
//!
//! In a cluster the blocks have one number at a time. A thread of the first takes it and puts it into the shared
//! memory of all; those that copy read it there too.

use super::Builder;
use super::asm::Instruction;
use super::block::Index;
use super::simt::{KernelParameters, Simt};
use super::stages::{Cluster, Position, Stages, when_done};

/// The numbers of a block's tiles.
pub struct Scheduler<'a, 'c> {
    b: &'a Simt<'c>,
    parameters: &'a KernelParameters<'c>,
    number: Stages<'a, 'c>,
    number_at: Index<'c>,
    cluster: Cluster<'c>,
}

impl<'a, 'c> Scheduler<'a, 'c> {
    /// Bytes of shared memory.
    pub const BYTES: i64 = Stages::bytes(1) + 8;

    /// In shared memory from `at` on, a multiple of 8.
    pub fn new(b: &'a Simt<'c>, parameters: &'a KernelParameters<'c>, at: Index<'c>) -> Self {
        let number_at = b.index_add(at, b.word(Stages::bytes(1)));
        Scheduler { b, parameters, number: Stages::new(b, at, 1), number_at, cluster: Cluster::new(b, 1) }
    }

    /// The same for the blocks of a cluster.
    pub fn of(self, cluster: Cluster<'c>) -> Self {
        Scheduler { number: self.number.of(cluster), cluster, ..self }
    }

    /// Makes the mbarriers, which one thread does, for so many warps of a block that read.
    pub fn prepare(&self, readers: i64) {
        self.number.prepare(readers + if self.cluster.is_alone() { 0 } else { 1 });
    }

    /// A number of blocks, in clusters.
    fn clusters(&self, blocks: Index<'c>) -> Index<'c> {
        if self.cluster.is_alone() { blocks } else { self.b.index_div(blocks, self.b.word(self.cluster.blocks)) }
    }

    /// Initial position of the thread that takes numbers.
    pub fn taking(&self) -> Position<'c> {
        self.number.filling()
    }

    /// Hands out the block's first number, and gives it. One thread does it.
    pub fn first(&self, position: Position<'c>) -> Index<'c> {
        self.hand_out(position, self.clusters(self.b.narrow(self.b.register("ctaid.x"))))
    }

    /// Takes the next number, hands it out, and gives it. The same thread does it, when it has begun all copies of
    /// the tile before.
    pub fn next(&self, position: Position<'c>) -> Index<'c> {
        let b = self.b;
        let last = b.index_sub(b.narrow(self.parameters.tiles), b.word(ir::fault!("gpu.scheduler.last", 0, 1)));
        let taken = b.asm(Instruction::CountAround, &[self.parameters.counter().into(), last.into()])[0].into_int_value();
        let blocks = b.asm(Instruction::Blocks, &[])[0].into_int_value();
        self.number.wait_empty(b.word(0), position);
        self.hand_out(position, b.index_add(self.clusters(blocks), taken))
    }

    fn hand_out(&self, position: Position<'c>, number: Index<'c>) -> Index<'c> {
        let (b, full) = (self.b, self.number.full(self.b.word(0)));
        for rank in (0..self.cluster.blocks).map(|rank| b.word(rank)) {
            if self.cluster.is_alone() {
                b.store_shared(self.number_at, &[number.into()]);
            } else {
                b.asm(Instruction::StoreAt, &[self.cluster.place(b, self.number_at, rank).into(), number.into()]);
            }
            self.cluster.arrive(b, full, rank);
        }
        self.number.advance(position);
        number
    }

    /// Runs `body` for each tile of the block, in the thread that takes tile numbers. No other thread of its warp may
    /// do anything.
    pub fn each_taken(&self, body: impl FnOnce(Index<'c>)) {
        let (b, position) = (self.b, self.taking());
        if !self.cluster.is_alone() {
            return self.each_taken_by_one(position, body);
        }
        let number = b.variable(self.first(position));
        let is_tile = || (b.less(b.get(number), b.narrow(self.parameters.tiles)), b.get(number));
        b.as_long_as(is_tile, |tile| {
            body(tile);
            b.set(number, self.next(position));
        });
    }

    /// The same in a cluster: only the first block's thread takes numbers, and that of each reads them.
    fn each_taken_by_one(&self, taking: Position<'c>, body: impl FnOnce(Index<'c>)) {
        let (b, reading, slot) = (self.b, self.number.using(), self.b.word(0));
        let takes = b.equal(self.cluster.rank, b.word(0));
        b.if_so(takes, || {
            self.first(taking);
        });
        let number = || {
            self.number.wait_told(slot, reading);
            let number = b.load_shared_word(self.number_at);
            self.cluster.arrive(b, self.number.empty(slot), b.word(0));
            self.number.advance(reading);
            (b.less(number, b.narrow(self.parameters.tiles)), number)
        };
        b.as_long_as(number, |tile| {
            body(tile);
            b.if_so(takes, || {
                self.next(taking);
            });
        });
    }

    /// Runs `body` for each tile of the block. All lanes of a warp must call it.
    pub fn each(&self, body: impl FnOnce(Index<'c>)) {
        let position = self.number.using();
        self.each_beside(position, |number| {
            body(number);
            self.number.advance(position);
        });
    }

    /// The same, where each tile has a single stage, whose position serves for tile numbers too; `body` advances it.
    /// That saves a register.
    pub fn each_beside(&self, position: Position<'c>, body: impl FnOnce(Index<'c>)) {
        let b = self.b;
        let number = || {
            let slot = b.word(0);
            self.number.wait_told(slot, position);
            let number = b.of_warp(b.load_shared_word(self.number_at));
            when_done(b, || self.cluster.arrive(b, self.number.empty(slot), b.word(0)));
            (b.less(number, b.narrow(self.parameters.tiles)), number)
        };
        b.as_long_as(number, body);
    }
}
