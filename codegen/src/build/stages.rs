//! Kernels whose warps differ in what they do: stages of shared memory go around between a thread that fills them by
//! tensor copies and warps that use them up.
//!
//! For each stage there are two mbarriers: one that it is full, which the bytes that arrive complete, and one that it
//! is empty, at which warps arrive when they are done with it. All go through the same stages in the same order, so
//! nothing else is shared. The warpgroup of the thread that copies gives registers to the others.
//!
//! In a [`Cluster`] a copy may fill the same stage of all blocks. So each block's is empty when the warps of all have
//! arrived at its mbarrier.

use super::asm::Instruction;
use super::block::{Index, Variable};
use super::simt::{LANES, Simt};
use super::{Builder, IntBinary};

/// Threads of a warpgroup; the first one of a block copies.
pub const WARPGROUP: i64 = 128;
/// Registers of a multiprocessor.
const REGISTERS: i64 = 65536;
/// Registers of a thread of the warpgroup that copies.
pub const FEW_REGISTERS: u32 = 40;

/// Registers of a thread of the other warpgroups, where so many blocks share a multiprocessor.
pub fn more_registers(groups: i64, blocks: u32) -> u32 {
    let even = REGISTERS / ((groups + 1) * WARPGROUP * i64::from(blocks)) / 8 * 8;
    ((even * (groups + 1) - i64::from(FEW_REGISTERS)) / groups / 8 * 8) as u32
}

/// The blocks of a cluster, as one of them sees them.
#[derive(Clone, Copy)]
pub struct Cluster<'c> {
    /// How many there are.
    pub blocks: i64,
    /// This one's number.
    pub rank: Index<'c>,
}

impl<'c> Cluster<'c> {
    /// A cluster of so many blocks; one block has none.
    pub fn new(b: &Simt<'c>, blocks: i64) -> Self {
        let rank = if blocks == 1 { b.word(0) } else { b.asm(Instruction::Rank, &[])[0].into_int_value() };
        Cluster { blocks, rank }
    }

    /// Whether there is no other block.
    pub fn is_alone(&self) -> bool {
        self.blocks == 1
    }

    /// Arrives at the mbarrier that lies there in the block with this number.
    pub fn arrive(&self, b: &Simt<'c>, barrier: Index<'c>, rank: Index<'c>) {
        if self.is_alone() {
            b.asm(Instruction::Arrive, &[barrier.into()]);
        } else {
            b.asm(Instruction::ArriveAt, &[self.place(b, barrier, rank).into()]);
        }
    }

    /// The address of the same place in the shared memory of the block with this number.
    pub fn place(&self, b: &Simt<'c>, at: Index<'c>, rank: Index<'c>) -> Index<'c> {
        b.asm(Instruction::MapRank, &[at.into(), rank.into()])[0].into_int_value()
    }

    /// Waits for all threads of all blocks, with whole warps.
    pub fn meet(&self, b: &Simt<'c>) {
        if self.is_alone() {
            b.barrier();
        } else {
            b.asm(Instruction::MeetCluster, &[]);
        }
    }
}

/// A number of stages, and the address of their mbarriers in shared memory.
pub struct Stages<'a, 'c> {
    b: &'a Simt<'c>,
    barriers: Index<'c>,
    count: i64,
    cluster: Cluster<'c>,
}

/// The stage that a thread is at.
#[derive(Clone, Copy)]
pub struct Position<'c> {
    slot: Variable<'c>,
    /// Parity of the phase that it waits for.
    parity: Variable<'c>,
}

impl<'a, 'c> Stages<'a, 'c> {
    /// `count` stages, whose mbarriers begin at an address in shared memory.
    pub fn new(b: &'a Simt<'c>, barriers: Index<'c>, count: i64) -> Self {
        Stages { b, barriers, count, cluster: Cluster::new(b, 1) }
    }

    /// The same stages, used up by the warps of all blocks of a cluster.
    pub fn of(self, cluster: Cluster<'c>) -> Self {
        Stages { cluster, ..self }
    }

    /// Bytes of the mbarriers of so many stages.
    pub const fn bytes(count: i64) -> i64 {
        2 * 8 * count
    }

    /// Address of the mbarrier that says that a stage is full.
    pub fn full(&self, slot: Index<'c>) -> Index<'c> {
        let b = self.b;
        b.index_add(self.barriers, b.index_mul(slot, b.word(8)))
    }

    /// Address of the mbarrier that says that a stage is empty.
    pub fn empty(&self, slot: Index<'c>) -> Index<'c> {
        let b = self.b;
        b.index_add(self.full(slot), b.word(8 * self.count))
    }

    /// Makes the mbarriers, which one thread does: stages are empty when so many of each block have arrived.
    pub fn prepare(&self, arrivals: i64) {
        let (b, arrivals) = (self.b, arrivals * self.cluster.blocks);
        for slot in 0..self.count {
            b.asm(Instruction::BarrierInit { arrivals: 1 }, &[self.full(b.word(slot)).into()]);
            b.asm(Instruction::BarrierInit { arrivals: arrivals as u32 }, &[self.empty(b.word(slot)).into()]);
        }
    }

    /// Initial position of the thread that fills stages: all are empty, as if a phase before the first had ended.
    pub fn filling(&self) -> Position<'c> {
        self.start(1)
    }

    /// Initial position of the threads that use stages up.
    pub fn using(&self) -> Position<'c> {
        self.start(0)
    }

    fn start(&self, parity: i64) -> Position<'c> {
        let b = self.b;
        Position { slot: b.variable(b.word(0)), parity: b.variable(b.word(parity)) }
    }

    /// The number of the stage that a thread is at, from 0.
    pub fn slot(&self, position: Position<'c>) -> Index<'c> {
        self.b.get(position.slot)
    }

    /// The stage before one.
    pub fn before(&self, slot: Index<'c>) -> Index<'c> {
        let b = self.b;
        b.choose(b.equal(slot, b.word(0)), b.word(self.count - 1), b.index_sub(slot, b.word(1)))
    }

    /// Goes on to the next stage, from the last to the first.
    pub fn advance(&self, position: Position<'c>) {
        let [slot, parity] = self.after(position);
        self.b.set(position.slot, slot);
        self.b.set(position.parity, parity);
    }

    /// Passes over so many stages, which other warps use up.
    pub fn pass(&self, position: Position<'c>, stages: Index<'c>) {
        let (b, count) = (self.b, self.b.word(self.count));
        let next = b.index_add(b.get(position.slot), stages);
        b.set(position.slot, b.index_rem(next, count));
        let odd = b.bits(IntBinary::And, b.index_div(next, count), b.word(1));
        b.set(position.parity, b.bits(IntBinary::Xor, b.get(position.parity), odd));
    }

    /// The stage after one, and the parity of its phase.
    fn after(&self, position: Position<'c>) -> [Index<'c>; 2] {
        let b = self.b;
        let [slot, parity] = [position.slot, position.parity].map(|v| b.get(v));
        if self.count == 1 {
            return [slot, b.bits(IntBinary::Xor, parity, b.word(1))];
        }
        let next = b.index_add(slot, b.word(1));
        let around = b.equal(next, b.word(self.count));
        [b.choose(around, b.word(0), next), b.bits(IntBinary::Xor, parity, b.choose(around, b.word(1), b.word(0)))]
    }

    /// Waits until the stage is empty.
    pub fn wait_empty(&self, slot: Index<'c>, position: Position<'c>) {
        self.b.wait_for(self.empty(slot), self.b.get(position.parity), !self.cluster.is_alone());
    }

    /// Waits until the stage is full.
    pub fn wait_full(&self, slot: Index<'c>, position: Position<'c>) {
        self.b.wait(self.full(slot), self.b.get(position.parity));
    }

    /// The same of a stage that another block's thread fills.
    pub fn wait_told(&self, slot: Index<'c>, position: Position<'c>) {
        self.b.wait_for(self.full(slot), self.b.get(position.parity), !self.cluster.is_alone());
    }

    /// Whether this lane tells for its warp that a stage is empty: one does it for each block.
    pub fn tells(&self) -> Index<'c> {
        let (b, lane) = (self.b, self.b.narrow(self.b.lane()));
        if self.cluster.is_alone() { b.equal(lane, b.word(0)) } else { b.less(lane, b.word(self.cluster.blocks)) }
    }

    /// Tells one block that a stage is empty, in such a lane.
    pub fn tell_empty(&self, slot: Index<'c>) {
        self.cluster.arrive(self.b, self.empty(slot), self.b.narrow(self.b.lane()));
    }

    /// Waits until the stage after this one is full.
    pub fn wait_next_full(&self, position: Position<'c>) {
        let [slot, parity] = self.after(position);
        self.b.wait(self.full(slot), parity);
    }
}

/// How two teams of warps take turns at the stages of one ring: an mbarrier for each, at which the other arrives when
/// it has seen all of its stages full. Before, a team cannot tell the phases of the next stages from those before.
pub struct Turns<'a, 'c> {
    b: &'a Simt<'c>,
    barriers: Index<'c>,
    team: Index<'c>,
    /// The number of the tile of both, which begins so that its bit 1 is the parity of the phase to wait for.
    tile: Variable<'c>,
}

impl<'a, 'c> Turns<'a, 'c> {
    /// Bytes of shared memory.
    pub const BYTES: i64 = 2 * 8;

    /// Makes the mbarriers, which one thread does, for teams of so many warps.
    pub fn prepare(b: &Simt<'c>, barriers: Index<'c>, warps: i64) {
        for team in 0..2 {
            b.asm(Instruction::BarrierInit { arrivals: warps as u32 }, &[b.index_add(barriers, b.word(8 * team)).into()]);
        }
    }

    /// The turns of team 0, which begins, or 1.
    pub fn new(b: &'a Simt<'c>, barriers: Index<'c>, team: Index<'c>) -> Self {
        let first = b.index_mul(b.index_sub(b.word(1), team), b.word(2));
        Turns { b, barriers, team, tile: b.variable(first) }
    }

    /// Runs one of both for the next tile: `mine` when it is this team's turn, or `others`.
    pub fn either(&self, mine: impl FnOnce(), others: impl FnOnce()) {
        let b = self.b;
        let tile = b.get(self.tile);
        let is_mine = b.equal(b.bits(IntBinary::And, tile, b.word(1)), self.team);
        let parity = b.bits(IntBinary::And, b.index_div(tile, b.word(2)), b.word(1));
        let wait_and_run = || {
            b.wait(self.barrier(self.team), parity);
            mine();
        };
        b.either(is_mine, wait_and_run, others);
        b.set(self.tile, b.index_add(tile, b.word(1)));
    }

    /// Lets the other team begin, when this one has seen all of its stages full.
    pub fn pass_on(&self) {
        let b = self.b;
        b.if_so(b.equal(b.narrow(b.lane()), b.word(0)), || {
            b.asm(Instruction::Arrive, &[self.barrier(b.index_sub(b.word(1), self.team)).into()]);
        });
    }

    fn barrier(&self, team: Index<'c>) -> Index<'c> {
        self.b.index_add(self.barriers, self.b.index_mul(team, self.b.word(8)))
    }
}

/// Arrives at one of a stage's mbarriers when the whole warp is done with the stage, including reads and writes of
/// words beside it.
pub fn release<'c>(b: &Simt<'c>, barrier: Index<'c>) {
    when_done(b, || {
        b.asm(Instruction::Arrive, &[barrier.into()]);
    });
}

/// Runs `f` in one lane when the whole warp has come here.
pub fn when_done(b: &Simt, f: impl FnOnce()) {
    b.warp_barrier();
    b.if_so(b.equal(b.narrow(b.lane()), b.word(0)), f);
}

/// Runs `f` in one thread of the first warp.
pub fn elected(b: &Simt, f: impl FnOnce()) {
    first_warp(b, || one_lane(b, f));
}

/// Runs `f` in the first warp.
pub fn first_warp(b: &Simt, f: impl FnOnce()) {
    let warp = b.uniform(b.index_div(b.thread(), b.word(LANES as i64)));
    b.if_so(b.equal(warp, b.word(0)), f);
}

/// Runs `f` in one thread of the warp.
pub fn one_lane(b: &Simt, f: impl FnOnce()) {
    let elected = b.asm(Instruction::Elect, &[])[0].into_int_value();
    b.if_so(b.equal(elected, b.word(1)), f);
}
