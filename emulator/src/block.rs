//! A block of threads, or the blocks of a cluster: its warps take turns, in an order drawn from a seed, and what they
//! leave to engines happens in its own time.

use crate::alu;
use crate::barrier::Barriers;
use crate::counting::Counting;
use crate::counts::Counts;
use crate::decode::Kernel;
use crate::engine::{Engines, Task};
use crate::fault::{Fault, Wrong};
use crate::history::Access;
use crate::inst::{Op, Sw};
use crate::launch_races::LaunchAccesses;
use crate::memory::Memory;
use crate::order::{BlockViews, Engine, View};
use crate::shared::Shared;
use crate::touched::BlockAccesses;
use crate::warp::{LaunchGeometry, State, Warp};
use std::collections::VecDeque;
use std::ops::Range;

/// When copies and matrix products happen that a kernel starts and later waits for. What it does right happens right
/// at any time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Timing {
    /// At once.
    Early,
    /// When something waits for them and nothing else can go on.
    #[default]
    Late,
    /// At times drawn from the seed.
    Random,
}

/// How kernels run, and what is checked and counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// When copies and matrix products happen that a kernel starts and later waits for.
    pub timing: Timing,
    /// Of the order in which warps run, and in which blocks begin: by their numbers, if it is 0.
    pub seed: u64,
    /// Whether accesses to shared memory are held against the order that barriers give.
    pub races: bool,
    /// The same of global memory, also between the blocks of a launch.
    pub global_races: bool,
    /// Whether lanes that part at a branch count as apart for what all lanes must execute together (`bar.sync`,
    /// `mma.sync`, `wgmma`), until `bar.warp.sync` or another exchange of all lanes brings them together. PTX
    /// promises no less, but `ptxas` brings them together where their ways meet, and compilers rely on it.
    pub lanes: bool,
    /// Instructions of one warp, beyond which a kernel counts as endless.
    pub limit: u64,
    /// Threads of this machine that run blocks.
    pub threads: usize,
    /// Whether what a launch asks of a GPU is counted.
    pub count: bool,
    /// Whether a block that takes numbers from a counter (`atom.inc`) finds those that it would if all blocks of the
    /// launch took one in turn. So a few of them are like all, and the counter stays as it is.
    pub turns: bool,
    /// Whether matrix instructions compute. Where they do not, sums are what they were before: control flow,
    /// addresses and counts are the same unless they depend on them.
    pub products: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            timing: Timing::Late,
            seed: 0,
            races: true,
            global_races: true,
            lanes: false,
            limit: 1 << 32,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            count: false,
            turns: false,
            products: true,
        }
    }
}

/// What a launch executed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Instructions, once per warp.
    pub warp_instructions: u64,
    /// Instructions, once per lane that took part.
    pub thread_instructions: u64,
    /// Operations of matrix instructions, two per product.
    pub matrix_operations: u64,
    /// What is counted if it is asked for.
    pub counts: Counts,
}

impl Statistics {
    /// Adds what other blocks executed.
    pub fn add(&mut self, other: &Statistics) {
        self.warp_instructions += other.warp_instructions;
        self.thread_instructions += other.thread_instructions;
        self.matrix_operations += other.matrix_operations;
        self.counts.add(&other.counts);
    }
}

/// A hash that mixes all bits of a number.
pub fn mixed(n: u64) -> u64 {
    let z = (n ^ n >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ z >> 31
}

/// What follows an instruction.
pub enum Flow {
    Next,
    /// The instruction has moved the lanes itself.
    Moved,
}

/// A block, or all blocks of a cluster, whose warps are numbered through.
pub struct Block<'a> {
    pub kernel: &'a Kernel,
    pub memory: &'a Memory,
    pub parameters: &'a [u8],
    pub options: Options,
    pub warps: Vec<Warp>,
    pub shared: Shared,
    /// The block's accesses to global memory, if these are watched, and those of its launch.
    pub touched: Option<BlockAccesses>,
    pub launch: &'a LaunchAccesses,
    /// The number of the block, or of the cluster's first.
    pub number: u32,
    /// Numbers that the block has taken from a counter ([`Options::turns`]).
    pub taken: u64,
    pub barriers: Barriers,
    pub engines: Vec<Engines>,
    /// Copies that end with an arrival at an mbarrier.
    pub tasks: VecDeque<Task>,
    pub statistics: Statistics,
    pub counting: Option<Counting>,
    random: u64,
}

impl<'a> Block<'a> {
    pub fn new(
        kernel: &'a Kernel,
        memory: &'a Memory,
        parameters: &'a [u8],
        options: Options,
        place: LaunchGeometry,
        launch: &'a LaunchAccesses,
    ) -> Block<'a> {
        let threads = place.threads.iter().product::<u32>();
        let (of_block, ranks) = (threads.div_ceil(32) as usize, place.ranks as usize);
        let count = ranks * of_block;
        let warps: Vec<Warp> = (0..count)
            .map(|id| {
                let (rank, within) = (id / of_block, id % of_block);
                let lanes = (threads - 32 * within as u32).min(32);
                let [x, y, z] = place.block;
                let place = LaunchGeometry { block: [x + rank as u32, y, z], ..place };
                Warp::new([id, within], u32::MAX >> (32 - lanes), place, kernel, View::new(count))
            })
            .collect();
        let [x, y, z] = place.block.map(u64::from);
        let number = place.block[0] + place.grid[0] * (place.block[1] + place.grid[1] * place.block[2]);
        let random = options.seed ^ (x + 0x1_0001 * y + 0x1_0000_0003 * z).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        Block {
            kernel,
            memory,
            parameters,
            options,
            shared: Shared::new(ranks, kernel.shared_bytes as usize + place.dynamic as usize, options.races),
            touched: options.global_races.then(BlockAccesses::default),
            launch,
            number,
            taken: 0,
            barriers: Barriers::new(count),
            engines: (0..count).map(|_| Engines::new(kernel.registers[0])).collect(),
            warps,
            tasks: VecDeque::new(),
            statistics: Statistics::default(),
            counting: options.count.then(|| Counting::new(ranks as u64, count, kernel.registers)),
            random,
        }
    }

    /// The warps of the block that a warp belongs to.
    pub fn of_block(&self, w: usize) -> Range<usize> {
        let (first, count) = (w - self.warps[w].of_block, self.warps.len() / self.warps[w].place.ranks as usize);
        first..first + count
    }

    /// The next number of a sequence drawn from the seed (splitmix64, Steele, Lea and Flood, 2014).
    pub fn draw(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mixed(self.random)
    }

    /// Runs the block to its end.
    ///
    /// # Errors
    /// The first thing that a warp did and must not.
    pub fn run(&mut self) -> Result<Statistics, Box<Fault>> {
        // Counts warps that were woken although what they wait for has not come.
        let mut futile = 0;
        loop {
            let ready: Vec<usize> = (0..self.warps.len()).filter(|w| self.warps[*w].state == State::Running).collect();
            if !self.tasks.is_empty() && (ready.is_empty() || self.options.timing == Timing::Random && self.draw().is_multiple_of(4)) {
                let any = if self.options.timing == Timing::Random { self.draw() as usize % self.tasks.len() } else { 0 };
                let task = self.tasks.remove(any).expect("invariant: the task is one of those there are");
                let (warp, pc) = (task.warp, task.pc);
                self.perform(task).map_err(|wrong| self.fault(warp, pc, wrong))?;
                futile = 0;
                continue;
            }
            let Some(k) = (!ready.is_empty()).then(|| self.draw() as usize % ready.len()) else {
                let waiting = (0..self.warps.len()).find(|w| matches!(self.warps[*w].state, State::Waiting { .. }));
                match waiting {
                    // A wait with a time limit may end before what it waits for has come.
                    Some(w) if futile <= 2 * self.warps.len() => {
                        let w = (w + futile) % self.warps.len();
                        if matches!(self.warps[w].state, State::Waiting { .. }) {
                            self.warps[w].state = State::Running;
                        }
                        futile += 1;
                        continue;
                    }
                    None if self.warps.iter().all(|w| w.state == State::Done) => {
                        self.join_launch()?;
                        self.statistics.counts = self.counting.as_ref().map_or_else(Counts::default, |c| c.counts);
                        return Ok(self.statistics);
                    }
                    Some(_) | None => return Err(self.deadlock()),
                }
            };
            let done = self.barriers.completed;
            let quantum = 1 + self.draw() % 256;
            self.turn(ready[k], quantum)?;
            if self.barriers.completed != done {
                futile = 0;
            }
        }
    }

    /// Checks the block's accesses to global memory against those of finished blocks.
    fn join_launch(&mut self) -> Result<(), Box<Fault>> {
        let Some(touched) = self.touched.take() else { return Ok(()) };
        let mut known = BlockViews::default();
        self.warps.iter().for_each(|w| known.learn(w.view.others()));
        self.launch.end(self.number, &touched, known).map_err(|clash| {
            let ((mark, kind), (from, what)) = (clash.this, clash.other);
            let [x, y, z] = self.warps[0].place.of(from.block);
            let other = format!("{} of block ({x}, {y}, {z})", from.mark.describe(what));
            let wrong = Wrong::Race { space: "global", address: clash.address, this: mark.describe(kind), other, line: from.mark.pc() };
            self.fault(mark.stamp.warp(), mark.pc(), wrong)
        })
    }

    fn deadlock(&self) -> Box<Fault> {
        let mut where_ = vec![];
        for w in self.warps.iter().filter(|w| w.state != State::Done) {
            let line = self.kernel.lines.get(Self::waits_at(w) as usize).map_or(0, |l| l.0);
            let what = match w.state {
                State::Barrier(id) => format!("warp {} waits at barrier {id}, line {line}", w.id),
                State::Waiting { barrier, .. } => format!("warp {} waits at line {line} for {}", w.id, self.barriers.describe(barrier)),
                State::Matrix => format!("warp {} waits at line {line} for `wgmma` of the other warps of its warpgroup", w.id),
                State::Cluster => format!("warp {} waits at line {line} for all warps of its cluster", w.id),
                State::Registers(count) => format!("warp {} waits at line {line} for {}", w.id, self.describe_pool(w.id, count)),
                State::Running | State::Done => continue,
            };
            where_.push(what);
        }
        let first = self.warps.iter().find(|w| w.state != State::Done).map_or(0, |w| w.id);
        self.fault(first, Self::waits_at(&self.warps[first]), Wrong::Deadlock(where_))
    }

    /// The instruction that a warp waits at. Some instructions start again when they can go on; the lanes have moved
    /// past others.
    fn waits_at(w: &Warp) -> u32 {
        match w.state {
            State::Registers(_) | State::Matrix | State::Cluster => w.pc(),
            State::Barrier(_) | State::Waiting { .. } | State::Running | State::Done => w.pc().saturating_sub(1),
        }
    }

    fn fault(&self, warp: usize, pc: u32, wrong: Wrong) -> Box<Fault> {
        let (line, source) = self.kernel.lines.get(pc as usize).copied().unwrap_or_default();
        let source = source.map(|(file, line)| (self.kernel.files.get(&file).cloned().unwrap_or_default(), line));
        let block = self.warps[warp].place.block;
        let line_of = |pc: u32| self.kernel.lines.get(pc as usize).map_or(0, |l| l.0);
        let wrong = match wrong {
            // Until here, `line` is the number of an instruction.
            Wrong::Race { space, address, this, other, line } => Wrong::Race { space, address, this, other, line: line_of(line) },
            wrong => wrong,
        };
        Box::new(Fault { kernel: self.kernel.name.clone(), line, source, block, warp: warp as u32, wrong })
    }

    /// Lets a warp run until it waits, ends, or has had its turn.
    fn turn(&mut self, w: usize, quantum: u64) -> Result<(), Box<Fault>> {
        let kernel = self.kernel;
        for _ in 0..quantum {
            let Some(pc) = self.warps[w].settle() else {
                self.end(w).map_err(|wrong| self.fault(w, kernel.code.len() as u32 - 1, wrong))?;
                return Ok(());
            };
            let Some(inst) = kernel.code.get(pc as usize) else {
                self.warps[w].exit(u32::MAX);
                continue;
            };
            let warp = &mut self.warps[w];
            let mask = warp.lanes(inst.guard);
            warp.instructions += 1;
            if warp.instructions > self.options.limit {
                return Err(self.fault(w, pc, Wrong::Endless(self.options.limit)));
            }
            self.statistics.warp_instructions += 1;
            self.statistics.thread_instructions += u64::from(mask.count_ones());
            if let Some(counting) = &mut self.counting {
                counting.count(warp, self.engines[w].matrix.is_busy(), &kernel.steps[pc as usize], &inst.op, mask);
            }
            if inst.feeds_wgmma && mask != 0 {
                self.engines[w].matrix.dirty = true;
            }
            let flow = if let Op::Bra { to } = inst.op {
                warp.branch(mask, to, kernel.joins[pc as usize]);
                Flow::Moved
            } else if mask == 0 || alu::execute(warp, &inst.op, mask) {
                Flow::Next
            } else {
                self.step(w, pc, &inst.op, mask).map_err(|wrong| self.fault(w, pc, wrong))?
            };
            if let Flow::Next = flow {
                self.warps[w].go_to(pc + 1);
            }
            if self.warps[w].state != State::Running {
                return Ok(());
            }
        }
        Ok(())
    }

    /// An instruction that does more than compute.
    fn step(&mut self, w: usize, pc: u32, op: &Op, mask: u32) -> Result<Flow, Wrong> {
        match op {
            Op::Exit => self.warps[w].exit(mask),
            Op::Trap => return Err(Wrong::Trap),
            Op::ToGeneric(..)
            | Op::FromGeneric(..)
            | Op::MapRank(..)
            | Op::Load { .. }
            | Op::Store { .. }
            | Op::Atom { .. }
            | Op::LdMatrix { .. }
            | Op::StMatrix { .. } => {
                self.access(w, op, mask)?;
            }
            Op::ClusterWait => return self.wait_for_cluster(w, mask),
            Op::Registers(count, more) => return self.set_registers(w, *count, *more, mask),
            Op::Shfl { .. } | Op::Vote { .. } | Op::Redux { .. } | Op::Elect(..) | Op::SyncWarp(_) => self.exchange(w, op, mask)?,
            Op::Bar { .. }
            | Op::BarrierInit(..)
            | Op::BarrierInval(_)
            | Op::BarrierArrive { .. }
            | Op::ClusterArrive { .. }
            | Op::BarrierTest { .. }
            | Op::Fence
            | Op::FenceProxy
            | Op::FenceBarriers => self.synchronise(w, op, mask)?,
            Op::CpAsync { .. }
            | Op::CpCommit
            | Op::CpWait(_)
            | Op::CpArrive { .. }
            | Op::TensorLoad { .. }
            | Op::TensorStore { .. }
            | Op::BulkLoad { .. }
            | Op::BulkStore { .. }
            | Op::BulkCommit
            | Op::BulkWait { .. } => self.copy(w, pc, op, mask)?,
            Op::Mma { element, k, d, a, b, c } => {
                self.converged(w, mask, "mma.sync")?;
                self.statistics.matrix_operations += 2 * 16 * 8 * u64::from(*k);
                if self.options.products {
                    crate::matrix::mma(&mut self.warps[w], *element, *k, d, a, b, c);
                }
            }
            Op::Wgmma(_) | Op::WgmmaFence | Op::WgmmaCommit | Op::WgmmaWait(_) => return self.wgmma(w, op, mask),
            _ => unreachable!("invariant: what only touches registers has been executed"),
        }
        Ok(Flow::Next)
    }

    /// Checks that all remaining lanes of a warp execute an instruction together.
    pub fn converged(&self, w: usize, mask: u32, what: &str) -> Result<(), Wrong> {
        let alive = self.warps[w].alive();
        if mask == alive {
            return match self.warps[w].parted.filter(|_| self.options.lanes) {
                None => Ok(()),
                Some(pc) => {
                    let line = self.kernel.lines.get(pc as usize).map_or(0, |l| l.0);
                    let why = format!("`{what}` is for all lanes together; they parted at line {line}, and no `bar.warp.sync` is between");
                    Err(Wrong::Divergent(why))
                }
            };
        }
        Err(Wrong::Divergent(format!("`{what}` is for all lanes together; here are {mask:#010x} of {alive:#010x}")))
    }

    /// Checks that the lanes that a `.sync` instruction names are here.
    pub fn members(&mut self, w: usize, members: Sw, mask: u32, what: &str) -> Result<(), Wrong> {
        let named = self.warps[w].word(members);
        let here = mask.trailing_zeros() as usize;
        let alive = self.warps[w].alive();
        let needed = named[here & 31] & alive;
        if needed & !mask == 0 {
            // All lanes have waited for each other.
            if needed == alive {
                self.warps[w].parted = None;
            }
            return Ok(());
        }
        Err(Wrong::Divergent(format!("`{what}` names lanes {needed:#010x}; here are {mask:#010x}")))
    }

    /// An access by a warp itself, at this moment.
    pub fn own<'b>(warp: &'b Warp) -> Access<'b> {
        Access { stamp: warp.stamp(Engine::Warp), view: &warp.view, pc: warp.pc() }
    }

    fn end(&mut self, w: usize) -> Result<(), Wrong> {
        self.warps[w].state = State::Done;
        if let Some(counting) = &mut self.counting {
            counting.end(&self.warps[w]);
        }
        self.finish_copies(w)?;
        self.left_block(w);
        Ok(())
    }
}
