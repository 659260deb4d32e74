//! A warp: 32 lanes with their registers, and where each of them is.

use crate::decode::Kernel;
use crate::inst::*;
use crate::order::{BlockViews, Engine, Stamp, View};

/// A register of all lanes.
pub type Words = [u32; 32];
pub type Longs = [u64; 32];

/// Lanes that go together until they reach `join`.
#[derive(Clone, Copy, Debug)]
pub struct Frame {
    pub pc: u32,
    pub join: u32,
    pub mask: u32,
}

/// Whether a warp runs, or why not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Running,
    /// The warp waits at a barrier of the block.
    Barrier(u32),
    /// At `barrier.cluster.wait`, until all warps of the cluster have arrived.
    Cluster,
    /// Suspended by `try_wait` at an mbarrier, until the phase that it waits for is over.
    Waiting {
        barrier: u64,
        phase: u64,
    },
    /// At `setmaxnreg.inc`, until the block's pool has as many registers for each of its threads.
    Registers(u32),
    /// At `wgmma.wait_group`, until the other warps of its four have started the products too.
    Matrix,
    Done,
}

/// The geometry that all warps of a block share.
#[derive(Clone, Copy)]
pub struct LaunchGeometry {
    pub block: [u32; 3],
    /// Blocks of a cluster, which are neighbours along x.
    pub ranks: u32,
    pub grid: [u32; 3],
    pub threads: [u32; 3],
    pub dynamic: u32,
}

impl LaunchGeometry {
    /// The index in the grid of a block with this number.
    pub fn of(&self, block: u32) -> [u32; 3] {
        let [x, y, _] = self.grid;
        [block % x, block / x % y, block / (x * y)]
    }
}

pub struct Warp {
    /// Its number in the cluster, and in its block.
    pub id: usize,
    pub of_block: usize,
    pub place: LaunchGeometry,
    words: Vec<Words>,
    longs: Vec<Longs>,
    predicates: Vec<u32>,
    pub stack: Vec<Frame>,
    pub state: State,
    pub local: Vec<u8>,
    pub view: View,
    /// What the warp's last fence publishes to other blocks by later strong stores.
    pub released: Option<Box<View>>,
    /// What the warp will learn of other blocks at its next fence.
    pub heard: BlockViews,
    /// The phase of the cluster's barrier that the warp has arrived at and not yet waited for.
    pub arrived: Option<u64>,
    /// The branch where lanes parted, if nothing has brought them together since.
    pub parted: Option<u32>,
    /// Registers of a thread, where `setmaxnreg` changes them.
    pub held: u32,
    /// Moments of its agents, by engine.
    moments: [u32; 4],
    pub instructions: u64,
}

impl Warp {
    /// Registers hold `0xFF` everywhere before they are written: NaN, or -1.
    pub fn new([id, of_block]: [usize; 2], lanes: u32, place: LaunchGeometry, kernel: &Kernel, view: View) -> Warp {
        let [words, longs, predicates] = kernel.registers;
        let mut w = Warp {
            id,
            of_block,
            place,
            words: vec![[u32::MAX; 32]; words],
            longs: vec![[u64::MAX; 32]; longs],
            predicates: vec![u32::MAX; predicates],
            stack: vec![Frame { pc: 0, join: u32::MAX, mask: lanes }],
            state: State::Running,
            local: vec![0xFF; kernel.local_bytes as usize * 32],
            view,
            released: None,
            heard: BlockViews::default(),
            arrived: None,
            parted: None,
            held: kernel.registers_at_launch().unwrap_or(0),
            moments: [1; 4],
            instructions: 0,
        };
        w.view.see(w.stamp(Engine::Warp));
        w
    }

    /// The number of its block in the cluster.
    pub fn rank(&self) -> u64 {
        u64::from(self.place.block[0] % self.place.ranks)
    }

    /// The instruction that it executes.
    pub fn pc(&self) -> u32 {
        self.stack.last().map_or(0, |f| f.pc)
    }

    /// The present moment of one of its agents.
    pub fn stamp(&self, engine: Engine) -> Stamp {
        Stamp::new(self.id, engine, self.moments[engine as usize])
    }

    /// Begins a new moment, so that later accesses are not those that others may have learned of.
    pub fn tick(&mut self, engine: Engine) {
        self.moments[engine as usize] += 1;
        if engine == Engine::Warp {
            self.view.see(self.stamp(Engine::Warp));
        }
    }

    /// The active lanes of an instruction: those that are here and for which its guard holds.
    pub fn lanes(&self, guard: Option<(P, bool)>) -> u32 {
        let here = self.stack.last().map_or(0, |f| f.mask);
        match guard {
            None => here,
            Some((p, negated)) => here & self.predicate(Sp::Reg(p, negated)),
        }
    }

    pub fn predicate(&self, s: Sp) -> u32 {
        match s {
            Sp::Reg(p, false) => self.predicates[p.0 as usize],
            Sp::Reg(p, true) => !self.predicates[p.0 as usize],
            Sp::Const(true) => u32::MAX,
            Sp::Const(false) => 0,
        }
    }

    pub fn set_predicate(&mut self, p: P, value: u32, mask: u32) {
        let old = &mut self.predicates[p.0 as usize];
        *old = *old & !mask | value & mask;
    }

    #[inline]
    pub fn word(&self, s: Sw) -> Words {
        match s {
            Sw::Reg(w) => self.words[w.0 as usize],
            Sw::Imm(v) => [v; 32],
            Sw::Special(s) => self.special(s),
        }
    }

    #[inline]
    pub fn long(&self, s: Sd) -> Longs {
        match s {
            Sd::Reg(d) => self.longs[d.0 as usize],
            Sd::Imm(v) => [v; 32],
            Sd::Low(w) => self.words[w.0 as usize].map(u64::from),
            Sd::Clock => [self.instructions; 32],
        }
    }

    /// A source of any size, extended with zeros.
    pub fn bits(&self, s: Src) -> Longs {
        match s {
            Src::W(s) => self.word(s).map(u64::from),
            Src::D(s) => self.long(s),
        }
    }

    #[inline]
    pub fn set_word(&mut self, d: W, v: &Words, mask: u32) {
        let old = &mut self.words[d.0 as usize];
        if mask == u32::MAX {
            *old = *v;
        } else {
            for l in 0..32 {
                old[l] = if mask >> l & 1 != 0 { v[l] } else { old[l] };
            }
        }
    }

    #[inline]
    pub fn set_long(&mut self, d: D, v: &Longs, mask: u32) {
        let old = &mut self.longs[d.0 as usize];
        for l in 0..32 {
            old[l] = if mask >> l & 1 != 0 { v[l] } else { old[l] };
        }
    }

    pub fn set(&mut self, d: Reg, v: &Longs, mask: u32) {
        match d {
            Reg::W(w) => self.set_word(w, &v.map(|x| x as u32), mask),
            Reg::D(d) => self.set_long(d, v, mask),
            Reg::Sink => {}
        }
    }

    pub fn addresses(&self, a: Address) -> Longs {
        self.long(a.base).map(|b| b.wrapping_add(a.offset as u64))
    }

    fn special(&self, s: Special) -> Words {
        let LaunchGeometry { block, ranks, grid, threads, dynamic } = self.place;
        let lane = |f: &dyn Fn(u32) -> u32| std::array::from_fn(|l| f(l as u32));
        match s {
            Special::Tid(d) => lane(&|l| {
                let t = self.of_block as u32 * 32 + l;
                [t % threads[0], t / threads[0] % threads[1], t / (threads[0] * threads[1])][d]
            }),
            Special::Ntid(d) => [threads[d]; 32],
            Special::Ctaid(d) => [block[d]; 32],
            Special::Nctaid(d) => [grid[d]; 32],
            Special::Lane => lane(&|l| l),
            Special::Warp => [self.of_block as u32; 32],
            Special::Mask(LaneMask::Eq) => lane(&|l| 1 << l),
            Special::Mask(LaneMask::Lt) => lane(&|l| (1 << l) - 1),
            Special::Mask(LaneMask::Le) => lane(&|l| (1 << l) | ((1 << l) - 1)),
            Special::Mask(LaneMask::Gt) => lane(&|l| !((1 << l) | ((1 << l) - 1))),
            Special::Mask(LaneMask::Ge) => lane(&|l| !((1 << l) - 1)),
            Special::Clock => [self.instructions as u32; 32],
            Special::DynamicShared => [dynamic; 32],
            Special::Rank | Special::ClusterCtaid(0) => [self.rank() as u32; 32],
            Special::Ranks | Special::ClusterNctaid(0) => [ranks; 32],
            Special::ClusterCtaid(_) => [0; 32],
            Special::ClusterNctaid(_) => [1; 32],
            Special::Cluster(d) => [if d == 0 { block[0] / ranks } else { block[d] }; 32],
            Special::Clusters(d) => [if d == 0 { grid[0] / ranks } else { grid[d] }; 32],
        }
    }

    /// Drops frames whose lanes have all reached their join or ended. Returns the next instruction, if any lane is
    /// left.
    pub fn settle(&mut self) -> Option<u32> {
        while let Some(f) = self.stack.last() {
            if f.mask != 0 && f.pc != f.join {
                return Some(f.pc);
            }
            self.stack.pop();
        }
        None
    }

    pub fn go_to(&mut self, pc: u32) {
        if let Some(f) = self.stack.last_mut() {
            f.pc = pc;
        }
    }

    /// Lanes `taken` go to `to`, the others on; all meet again at `join`.
    pub fn branch(&mut self, taken: u32, to: u32, join: u32) {
        let Some(f) = self.stack.last_mut() else { return };
        let (here, pc) = (f.mask, f.pc);
        if taken == 0 {
            f.pc = pc + 1;
        } else if taken == here {
            f.pc = to;
        } else {
            f.pc = join;
            self.parted = Some(pc);
            self.stack.push(Frame { pc: pc + 1, join, mask: here & !taken });
            self.stack.push(Frame { pc: to, join, mask: taken });
        }
    }

    pub fn exit(&mut self, lanes: u32) {
        self.stack.iter_mut().for_each(|f| f.mask &= !lanes);
    }

    /// All lanes that have not ended, wherever they are.
    pub fn alive(&self) -> u32 {
        self.stack.first().map_or(0, |f| f.mask)
    }
}
