//! What a launch asks of a GPU: counted as it runs, whatever the time it takes here.

use crate::decode::GLOBAL;
use crate::inst::*;

/// Where a multiprocessor executes an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pipe {
    /// f32 and 16-bit floats.
    Fma,
    /// Integers, comparisons, selections, conversions, votes.
    Alu,
    /// Inverses, roots, exponentials, and what else is made a few lanes at a time.
    Special,
    /// f64.
    Double,
    /// Loads, stores, exchanges among lanes.
    Memory,
    /// Branches, barriers, fences.
    Control,
    /// Matrix instructions.
    Tensor,
}

impl Pipe {
    /// All pipes, in the order in which [`Counts::issued`] has them.
    pub const ALL: [Pipe; 7] = [Pipe::Fma, Pipe::Alu, Pipe::Special, Pipe::Double, Pipe::Memory, Pipe::Control, Pipe::Tensor];

    /// What it is called in reports.
    pub fn name(self) -> &'static str {
        match self {
            Pipe::Fma => "fma",
            Pipe::Alu => "alu",
            Pipe::Special => "special",
            Pipe::Double => "f64",
            Pipe::Memory => "memory",
            Pipe::Control => "control",
            Pipe::Tensor => "tensor",
        }
    }
}

/// Bytes of a sector: what the caches and global memory exchange at least.
pub const SECTOR: u64 = 32;
/// Bytes that a lane may load at once, as [`Traffic::widths`] counts them.
pub const WIDTHS: [u64; 5] = [1, 2, 4, 8, 16];

/// What goes between a kernel and global memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Instructions of a warp, or copies of an engine.
    pub requests: u64,
    /// Different bytes of each request, summed.
    pub bytes: u64,
    /// Sectors that requests touch.
    pub sectors: u64,
    /// Sectors that as many bytes of each request would have if they were dense and aligned.
    pub needed: u64,
    /// Of the bytes, those that lanes take so many at a time; those of engines are in none.
    pub widths: [u64; WIDTHS.len()],
}

/// Accesses to shared memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Banks {
    /// Times that the 32 banks give or take a word each.
    pub wavefronts: u64,
    /// How often banks would give or take words if none were in conflict.
    pub needed: u64,
    /// Bytes that `wgmma` reads.
    pub product_bytes: u64,
}

/// Tiles that a counter handed out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CounterTiles {
    /// Tiles of all blocks.
    pub tiles: u64,
    /// Tiles of the block that has the most.
    pub most: u64,
    /// Blocks that took numbers of tiles: of a cluster one does.
    pub takers: u64,
    /// Tensor copies for tiles of these blocks.
    pub copies: u64,
    /// Tensor copies for the last tile of each, summed over blocks.
    pub last_tile_copies: u64,
}

impl CounterTiles {
    /// By how much the block that ends last has more to do than blocks in the mean, as a part of this: where tiles do
    /// not come out even one more of the last ones, which is the smaller the more tiles there are, and the shorter
    /// the last ones.
    pub fn uneven(&self) -> f64 {
        if self.copies == 0 {
            return 0.0;
        }
        let left = self.most as f64 - self.tiles as f64 / self.takers.max(1) as f64;
        left * self.last_tile_copies as f64 / self.copies as f64
    }
}

/// What a launch asks of a GPU. Numbers are sums over all blocks that ran.
///
/// **Trips** are times that a warp waits for global memory: a load's result is there one trip after its address and
/// after all that stands in order before it. Loads of a stretch of code without branches, stores and barriers go
/// together, and one that is not used yet is not waited for; of a short loop that does nothing else, so do those of
/// four rounds, as `ptxas` unrolls it. Warps learn of each other's trips at barriers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Blocks that ran.
    pub blocks: u64,
    /// Warps of the blocks that ran.
    pub warps: u64,
    /// Instructions of warps that a multiprocessor issues, by [`Pipe`]: about as many as `ptxas` makes of the PTX.
    pub issued: [u64; Pipe::ALL.len()],
    /// What is read of global memory, by lanes and by engines.
    pub loads: Traffic,
    /// What is written to global memory, by lanes and by engines; atomics too.
    pub stores: Traffic,
    /// What lanes and `wgmma` access of shared memory.
    pub shared: Banks,
    /// Barriers that a warp comes to, mbarriers among them.
    pub barriers: u64,
    /// Operations of `mma.sync` and of `wgmma`, each of factors of 16 bits and of tf32.
    pub products: [[u64; 2]; 2],
    /// Instructions of warps that multiply by `wgmma` while none of their products is under way, after the first.
    pub alone: u64,
    /// The most trips of a warp.
    pub trips: u64,
    /// Trips of all warps together.
    pub all_trips: u64,
    /// The most trips of a warp while none of its products by `wgmma` is under way, after the first.
    pub alone_trips: u64,
    /// Stages of shared memory that copies filled: phases of mbarriers of which bytes were expected.
    pub stages: u64,
    /// Those that warps waited for which multiply by `wgmma`, of all such warps together.
    pub used_stages: u64,
    /// Warps that multiply by `wgmma`.
    pub multipliers: u64,
    /// Where blocks take the numbers of their tiles from a counter.
    pub counter_tiles: CounterTiles,
}

impl Traffic {
    /// Counts a request for these pieces, each an address and bytes, in any order.
    pub fn request(&mut self, mut pieces: Vec<(u64, u64)>, width: Option<u64>) {
        if pieces.is_empty() {
            return;
        }
        pieces.sort_unstable();
        pieces.dedup();
        let (mut bytes, mut sectors, mut end) = (0, 0, 0);
        for (at, n) in pieces.into_iter().filter(|p| p.1 > 0) {
            bytes += n;
            let (first, last) = (at / SECTOR, (at + n - 1) / SECTOR + 1);
            sectors += last.saturating_sub(first.max(end));
            end = end.max(last);
        }
        self.requests += 1;
        self.bytes += bytes;
        self.sectors += sectors;
        self.needed += bytes.div_ceil(SECTOR);
        if let Some(k) = width.and_then(|w| WIDTHS.iter().position(|x| *x == w)) {
            self.widths[k] += bytes;
        }
    }

    fn add(&mut self, other: &Traffic) {
        self.requests += other.requests;
        self.bytes += other.bytes;
        self.sectors += other.sectors;
        self.needed += other.needed;
        self.widths.iter_mut().zip(other.widths).for_each(|(a, b)| *a += b);
    }
}

/// Banks of shared memory, of a word each.
const BANKS: usize = 32;
const WORD: u64 = 4;

impl Banks {
    /// Counts an access of lanes to so many bytes at each address. Lanes with 8 bytes are served in halves, and with
    /// 16 in quarters.
    pub fn access(&mut self, addresses: &[u64], bytes: u64) {
        let together = match bytes {
            0..=4 => 32,
            5..=8 => 16,
            _ => 8,
        };
        for lanes in addresses.chunks(together) {
            let mut words: Vec<u64> = lanes.iter().flat_map(|a| a / WORD..(a + bytes).div_ceil(WORD)).collect();
            words.sort_unstable();
            words.dedup();
            let mut of_bank = [0u64; BANKS];
            words.iter().for_each(|w| of_bank[(w % BANKS as u64) as usize] += 1);
            self.wavefronts += of_bank.into_iter().max().unwrap_or(0);
            self.needed += words.len().div_ceil(BANKS) as u64;
        }
    }
}

impl Counts {
    /// Adds counts of other blocks; of what is the most of a warp or block, the greater stays.
    pub fn add(&mut self, other: &Counts) {
        self.blocks += other.blocks;
        self.warps += other.warps;
        self.issued.iter_mut().zip(other.issued).for_each(|(a, b)| *a += b);
        self.loads.add(&other.loads);
        self.stores.add(&other.stores);
        self.shared.wavefronts += other.shared.wavefronts;
        self.shared.needed += other.shared.needed;
        self.shared.product_bytes += other.shared.product_bytes;
        self.barriers += other.barriers;
        self.products.as_flattened_mut().iter_mut().zip(other.products.as_flattened()).for_each(|(a, b)| *a += b);
        self.alone += other.alone;
        self.trips = self.trips.max(other.trips);
        self.all_trips += other.all_trips;
        self.alone_trips = self.alone_trips.max(other.alone_trips);
        self.stages += other.stages;
        self.used_stages += other.used_stages;
        self.multipliers += other.multipliers;
        self.counter_tiles.tiles += other.counter_tiles.tiles;
        self.counter_tiles.most = self.counter_tiles.most.max(other.counter_tiles.most);
        self.counter_tiles.takers += other.counter_tiles.takers;
        self.counter_tiles.copies += other.counter_tiles.copies;
        self.counter_tiles.last_tile_copies += other.counter_tiles.last_tile_copies;
    }

    /// The part of the stages that a warp which multiplies has. Where warps take turns at tiles, each has some of
    /// them, and the others multiply while it stores.
    pub fn turn(&self) -> f64 {
        let all = self.stages as f64 * self.multipliers as f64 / self.blocks.max(1) as f64;
        if all == 0.0 { 1.0 } else { (self.used_stages as f64 / all).min(1.0) }
    }

    /// All instructions.
    pub fn instructions(&self) -> u64 {
        self.issued.iter().sum()
    }
}

/// The properties of an instruction that are known before it runs.
#[derive(Clone, Debug)]
pub struct Step {
    pub pipe: Pipe,
    /// The number of instructions that a multiprocessor issues for it.
    pub slots: u32,
    /// Whether lanes may jump here, so that nothing is moved across it.
    pub leads: bool,
    /// Whether later loads stay behind it.
    pub orders: bool,
    /// Whether it ends a loop that is unrolled.
    pub repeats: bool,
    pub reads: Box<[u32]>,
    pub writes: Box<[u32]>,
}

/// The steps of a kernel's code with so many registers.
pub fn steps(code: &[Inst], registers: [usize; 3]) -> Vec<Step> {
    let mut leads = vec![false; code.len() + 1];
    for (k, inst) in code.iter().enumerate() {
        if let Op::Bra { to } = inst.op {
            leads[to as usize] = true;
            leads[k + 1] = true;
        }
    }
    // A loop is unrolled if nothing jumps into its body and no instruction in it keeps later loads back.
    let repeats = |k: usize, to: usize| to <= k && k - to < UNROLLED && (to..k).all(|i| !orders(&code[i].op) && (i == to || !leads[i]));
    let step = |(k, inst): (usize, &Inst)| {
        let r = crate::registers::Registers::of(inst, registers);
        let (pipe, slots) = slots(&inst.op);
        let repeats = matches!(inst.op, Op::Bra { to } if repeats(k, to as usize));
        Step { pipe, slots, leads: leads[k], orders: orders(&inst.op), repeats, reads: r.reads.into(), writes: r.writes.into() }
    };
    code.iter().enumerate().map(step).collect()
}

/// The most instructions of a loop that is unrolled, and the number of rounds that are joined.
const UNROLLED: usize = 128;
pub const ROUNDS: u32 = 4;

fn orders(op: &Op) -> bool {
    matches!(
        op,
        Op::Store { .. }
            | Op::Atom { .. }
            | Op::Bra { .. }
            | Op::Bar { .. }
            | Op::SyncWarp(_)
            | Op::ClusterArrive { .. }
            | Op::ClusterWait
            | Op::Fence
            | Op::Registers(..)
            | Op::BarrierInit(..)
            | Op::BarrierInval(_)
            | Op::BarrierArrive { .. }
            | Op::BarrierTest { .. }
            | Op::CpAsync { .. }
            | Op::CpCommit
            | Op::CpWait(_)
            | Op::CpArrive { .. }
            | Op::TensorLoad { .. }
            | Op::TensorStore { .. }
            | Op::BulkLoad { .. }
            | Op::BulkStore { .. }
            | Op::BulkCommit
            | Op::BulkWait { .. }
            | Op::Wgmma(_)
            | Op::WgmmaWait(_)
    )
}

/// Whether an access goes to global memory, if its first lane is at this address.
pub fn is_global(space: Space, address: u64) -> bool {
    match space {
        Space::Global => true,
        Space::Generic => address >= GLOBAL,
        Space::Shared | Space::Cluster | Space::Local | Space::Param => false,
    }
}

/// The pipe of an instruction, and its number of SASS instructions. Moves become renamed registers, and parameters
/// become operands. Functions that round to nearest are a first guess and the steps of its Newton iteration.
fn slots(op: &Op) -> (Pipe, u32) {
    let exact = |mode: &Mode, approximate: (Pipe, u32)| if mode.exact { (Pipe::Fma, 9) } else { approximate };
    match op {
        Op::Nop | Op::MovW(..) | Op::MovD(..) | Op::MovP(..) | Op::ActiveMask(_) => (Pipe::Alu, 0),
        Op::Pack(_, _, bytes) | Op::Unpack(_, _, bytes) => (Pipe::Alu, u32::from(*bytes < 4)),
        Op::ToGeneric(..) | Op::FromGeneric(..) => (Pipe::Alu, 0),
        Op::IntW(Int2::Div | Int2::Rem, ..) => (Pipe::Alu, 20),
        Op::IntD(Int2::Div | Int2::Rem, ..) => (Pipe::Alu, 70),
        Op::IntD(Int2::MulLo | Int2::MulHi | Int2::Min | Int2::Max, ..) | Op::MadD(..) => (Pipe::Alu, 4),
        Op::IntD(..) | Op::ShiftD(..) | Op::SelD(..) | Op::InsertW(..) | Op::Int1D(..) => (Pipe::Alu, 2),
        Op::ExtractD(..) | Op::InsertD(..) => (Pipe::Alu, 4),
        Op::Int1W(Int1::Popc | Int1::Clz | Int1::Brev, ..) => (Pipe::Special, 1),
        Op::CountD(..) => (Pipe::Special, 2),
        Op::IntW(..)
        | Op::Int1W(..)
        | Op::WideD(..)
        | Op::WideW(..)
        | Op::MadW(..)
        | Op::Funnel { .. }
        | Op::ExtractW(..)
        | Op::Prmt(..)
        | Op::Lop3(..)
        | Op::SelW(..)
        | Op::LogicP(..)
        | Op::ConvertPair { .. }
        | Op::Vote { .. }
        | Op::MapRank(..)
        | Op::Elect(..) => (Pipe::Alu, 1),
        Op::SetP { ty: Ty::F64, .. } => (Pipe::Double, 1),
        Op::SetP { ty, .. } => (Pipe::Alu, if ty.bytes() == 8 { 2 } else { 1 }),
        Op::Convert { from, to, .. } if from.bytes() == 8 && from.is_float() || to.bytes() == 8 && to.is_float() => (Pipe::Special, 1),
        Op::Convert { from, to, .. } if from.is_float() != to.is_float() => (Pipe::Special, 1),
        Op::Convert { .. } => (Pipe::Alu, 1),
        Op::F1(Float1::Neg | Float1::Abs, ..) | Op::H1(Float1::Neg | Float1::Abs, ..) => (Pipe::Alu, 0),
        Op::F1(Float1::Tf32, ..) => (Pipe::Alu, 1),
        Op::F1(_, mode, ..) => exact(mode, (Pipe::Special, 1)),
        Op::F2(Float2::Div, mode, ..) => exact(mode, (Pipe::Special, 2)),
        Op::F2(Float2::Add | Float2::Sub | Float2::Mul, ..) => (Pipe::Fma, 1),
        Op::F2(..) => (Pipe::Alu, 1),
        Op::H1(..) | Op::H2(Float2::Div, ..) => (Pipe::Special, 1),
        Op::H2(..) | Op::HFma(..) | Op::Fma(..) => (Pipe::Fma, 1),
        Op::D1(Float1::Neg | Float1::Abs, ..) => (Pipe::Double, 0),
        Op::D1(..) | Op::D2(Float2::Div, ..) => (Pipe::Double, 10),
        Op::D2(..) | Op::DFma(..) => (Pipe::Double, 1),
        Op::Load { space: Space::Param, .. } => (Pipe::Memory, 0),
        Op::Load { .. }
        | Op::Store { .. }
        | Op::Atom { .. }
        | Op::Shfl { .. }
        | Op::LdMatrix { .. }
        | Op::StMatrix { .. }
        | Op::CpAsync { .. }
        | Op::BarrierInit(..)
        | Op::BarrierInval(_)
        | Op::BarrierArrive { .. }
        | Op::BarrierTest { .. }
        | Op::CpArrive { .. }
        | Op::TensorLoad { .. }
        | Op::TensorStore { .. }
        | Op::BulkLoad { .. }
        | Op::BulkStore { .. } => (Pipe::Memory, 1),
        Op::Redux { .. } => (Pipe::Special, 1),
        Op::Bra { .. }
        | Op::Exit
        | Op::Trap
        | Op::Bar { .. }
        | Op::SyncWarp(_)
        | Op::ClusterArrive { .. }
        | Op::ClusterWait
        | Op::Fence
        | Op::Registers(..)
        | Op::FenceProxy
        | Op::FenceBarriers
        | Op::CpCommit
        | Op::CpWait(_)
        | Op::BulkCommit
        | Op::BulkWait { .. }
        | Op::WgmmaFence
        | Op::WgmmaCommit
        | Op::WgmmaWait(_) => (Pipe::Control, 1),
        Op::Mma { .. } | Op::Wgmma(_) => (Pipe::Tensor, 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sectors_are_those_that_lanes_touch() {
        let of = |stride: u64, bytes: u64, from: u64| {
            let mut t = Traffic::default();
            t.request((0..32).map(|l| (from + l * stride, bytes)).collect(), Some(bytes));
            [t.bytes, t.sectors, t.needed]
        };
        assert_eq!(of(4, 4, 0), [128, 4, 4]);
        assert_eq!(of(4, 4, 4), [128, 5, 4], "not aligned");
        assert_eq!(of(64, 4, 0), [128, 32, 4], "apart");
        assert_eq!(of(0, 4, 64), [4, 1, 1], "all the same");
        assert_eq!(of(16, 16, 0), [512, 16, 16]);
    }

    #[test]
    fn banks_conflict_where_words_share_one() {
        let of = |stride: u64, bytes: u64| {
            let mut b = Banks::default();
            b.access(&(0..32).map(|l| l * stride).collect::<Vec<_>>(), bytes);
            [b.wavefronts, b.needed]
        };
        assert_eq!(of(4, 4), [1, 1]);
        assert_eq!(of(8, 4), [2, 1]);
        assert_eq!(of(128, 4), [32, 1]);
        assert_eq!(of(0, 4), [1, 1], "one word for all");
        assert_eq!(of(2, 2), [1, 1], "two lanes a word");
        assert_eq!(of(16, 16), [4, 4]);
        assert_eq!(of(144, 16), [4, 4], "rows that are padded");
        assert_eq!(of(128, 16), [32, 4], "rows that are not");
    }
}
