//! Kernels whose warps differ in what they do: stages of shared memory go around between a thread that fills them by
//! tensor copies and warps that use them up.
//!
//! For each stage there are two mbarriers: one that it is full, which the bytes that arrive complete, and one that it
//! is empty, at which warps arrive when they are done with it. All go through the same stages in the same order, so
//! nothing else is shared. The warpgroup of the thread that copies gives registers to the others.

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

/// A number of stages, and the address of their mbarriers in shared memory.
pub struct Stages<'a, 'c> {
    b: &'a Simt<'c>,
    barriers: Index<'c>,
    count: i64,
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
        Stages { b, barriers, count }
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

    /// Makes the mbarriers, which one thread does: stages are empty when so many have arrived.
    pub fn prepare(&self, arrivals: i64) {
        let b = self.b;
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
        self.b.wait(self.empty(slot), self.b.get(position.parity));
    }

    /// Waits until the stage is full.
    pub fn wait_full(&self, slot: Index<'c>, position: Position<'c>) {
        self.b.wait(self.full(slot), self.b.get(position.parity));
    }

    /// Waits until the stage after this one is full.
    pub fn wait_next_full(&self, position: Position<'c>) {
        let [slot, parity] = self.after(position);
        self.b.wait(self.full(slot), parity);
    }
}

/// Arrives at one of a stage's mbarriers when the whole warp is done with the stage, including reads and writes of
/// words beside it.
pub fn release<'c>(b: &Simt<'c>, barrier: Index<'c>) {
    b.warp_barrier();
    b.if_so(b.equal(b.narrow(b.lane()), b.word(0)), || {
        b.asm(Instruction::Arrive, &[barrier.into()]);
    });
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
