//! How long a card would take for what was counted: a roofline of all that a multiprocessor and the memory do, and of
//! how long warps wait.

use crate::counts::{Counts, Pipe, SECTOR};
use crate::decode::Kernel;
use crate::device::Launch;

/// What a card can do. Rates are of one multiprocessor and clock where nothing else is said.
#[derive(Clone, Copy, Debug)]
pub struct Card {
    /// What reports call it; [`Card::named`] looks for its first word.
    pub name: &'static str,
    /// How many share the blocks of a launch.
    pub multiprocessors: u32,
    /// 10^9 clocks a second: while tensor cores are busy, and else.
    pub gigahertz: [f64; 2],
    /// Operations of tensor cores with factors of 16 bits, by `mma.sync` and `wgmma`; with tf32 half as many.
    pub tensor: [f64; 2],
    /// Instructions of a warp by [`Pipe`], but for tensor cores.
    pub pipes: [f64; 6],
    /// Bytes of all of global memory a second, as a copy of large arrays moves them.
    pub memory: f64,
    /// Bytes of the second-level cache a second, for all multiprocessors together.
    pub cache: f64,
    /// Bytes that the second-level cache holds.
    pub cache_bytes: u64,
    /// Clocks until what is loaded is there, from the second-level cache and from memory.
    pub latency: [f64; 2],
    /// Bytes of shared memory of a block that has a multiprocessor for itself.
    pub shared: u64,
    /// Registers of a multiprocessor, of 32 bits.
    pub registers: u32,
    /// Threads of a multiprocessor at a time, at most.
    pub threads: u32,
    /// Blocks of a multiprocessor at a time, at most.
    pub blocks: u32,
    /// Seconds between kernels of a graph.
    pub launch: f64,
}

/// H100 SXM5. Rates by pipe: CUDA C++ Programming Guide 12.8, table of arithmetic instructions. `wgmma`: NVIDIA's
/// H100 whitepaper, 512 multiply-adds of 16 bits a clock and tensor core, of which a multiprocessor has four;
/// `mma.sync` at 62 % of it, and latencies: Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU
/// Architecture" (2024). Memory: a copy of a large array on the card of `docs/benchmarks/gpu.md`; clocks: cuBLAS's
/// best there, 715 TFLOP/s, is 94 % of what tensor cores do at the first, and the peaks of NVIDIA's data sheet are of
/// the second. Cache: 5,120 bytes a clock of 1.755 GHz, as the A100 has (whitepaper).
pub const H100: Card = Card {
    name: "H100 SXM",
    multiprocessors: 132,
    gigahertz: [1.40, 1.83],
    tensor: [2540.0, 4096.0],
    pipes: [4.0, 2.0, 0.5, 2.0, 1.0, 4.0],
    memory: 3.02e12,
    cache: 9.0e12,
    cache_bytes: 50 << 20,
    latency: [263.0, 479.0],
    shared: 227 * 1024,
    registers: 65_536,
    threads: 2048,
    blocks: 32,
    launch: 1.5e-6,
};

/// A100 SXM4 of 80 GB: A100 whitepaper (108 multiprocessors, 2,048 operations, 1.41 GHz, 2,039 GB/s, of which copies
/// reach nine tenths); Luo et al. for latency.
pub const A100: Card = Card {
    name: "A100 SXM 80GB",
    multiprocessors: 108,
    gigahertz: [1.35, 1.41],
    tensor: [2048.0, 2048.0],
    pipes: [2.0, 2.0, 0.5, 1.0, 1.0, 4.0],
    memory: 1.83e12,
    cache: 7.2e12,
    cache_bytes: 40 << 20,
    latency: [262.0, 466.0],
    shared: 163 * 1024,
    registers: 65_536,
    threads: 2048,
    blocks: 32,
    launch: 1.5e-6,
};

/// H200 SXM: an H100 with 4.8 TB/s of memory, of which copies are taken to reach as much as there.
pub const H200: Card = Card { name: "H200 SXM", memory: 4.32e12, ..H100 };

/// All that are modelled.
pub const CARDS: [&Card; 3] = [&H100, &H200, &A100];

/// What a launch waits for most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// The time between kernels of a graph, which is longer than all else.
    Launch,
    /// Instructions of warps, of which a multiprocessor issues four a clock.
    Issue,
    /// Work of one pipe: its instructions, or the operations of tensor cores.
    Pipe(Pipe),
    /// Of banks of shared memory.
    Shared,
    /// Bytes that go through the second-level cache.
    Cache,
    /// Bytes that global memory gives and takes.
    Memory,
    /// Warps wait for what they load.
    Latency,
}

impl std::fmt::Display for Bound {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Bound::Launch => f.write_str("launch"),
            Bound::Issue => f.write_str("issue"),
            Bound::Pipe(p) => f.write_str(p.name()),
            Bound::Shared => f.write_str("shared memory"),
            Bound::Cache => f.write_str("cache"),
            Bound::Memory => f.write_str("memory"),
            Bound::Latency => f.write_str("latency"),
        }
    }
}

/// The time of a launch.
#[derive(Clone, Copy, Debug)]
pub struct Cost {
    /// How long the launch takes, with the time between kernels of a graph.
    pub seconds: f64,
    /// What the launch waits for most.
    pub bound: Bound,
    /// Of these, seconds of tensor cores' work that nothing overlaps: what multiplying warps do beside their
    /// products.
    pub alone: f64,
    /// How often multiprocessors are filled with blocks, at least one of them.
    pub waves: u64,
    /// Blocks that a multiprocessor runs at a time.
    pub resident: u32,
}

impl Card {
    /// The card of which a name has the first word: `h100`, or what a driver calls one.
    pub fn named(name: &str) -> Option<&'static Card> {
        let is = |c: &Card| c.name.split(' ').next().is_some_and(|first| name.split([' ', '-']).any(|w| w.eq_ignore_ascii_case(first)));
        CARDS.into_iter().find(|c| is(c))
    }

    /// Blocks that a multiprocessor runs at a time, as far as there is room. Registers are at least those that
    /// `ptxas` is told.
    fn resident(&self, kernel: &Kernel, launch: &Launch) -> u32 {
        let shared = kernel.shared_bytes + u64::from(launch.shared) + 1024;
        let threads: u32 = launch.threads.iter().product();
        let room = (self.shared + 1024) / shared;
        let threads = threads.max(1).next_multiple_of(32);
        let registers = (self.registers / (threads * kernel.registers_of_thread())).max(kernel.resident);
        registers.min(self.blocks).min(self.threads / threads).min(room as u32).max(1)
    }

    /// How long a launch takes of whose blocks these were counted, one by one. `bytes` are those of global memory
    /// that it touches in all, each once, and those that it would touch at a time if all blocks ran, where it reads
    /// them again.
    ///
    /// Each multiprocessor has its share of the blocks; the one with the most ends last. Where it has one alone, that
    /// is the block with the most to do, else they even out, as they do where a counter hands out tiles, but for the
    /// last ones ([`CounterTiles::uneven`](crate::counts::CounterTiles::uneven)). What it does at the same time
    /// (instructions, pipes, banks, tensor cores) takes as long as the longest of these; so do cache and memory,
    /// which all share; and so does waiting, [`Counts::trips`] after each other for each wave. What warps that
    /// multiply do while nothing of theirs is multiplied comes on top, unless other blocks of the multiprocessor, or
    /// warps that take turns with them, multiply then.
    pub fn cost(&self, counted: &[Counts], kernel: &Kernel, launch: &Launch, bytes: [u64; 2]) -> Cost {
        let mut sum = Counts::default();
        counted.iter().for_each(|c| sum.add(c));
        let blocks: u64 = launch.grid.iter().map(|n| u64::from(*n)).product();
        let resident = self.resident(kernel, launch);
        let most = blocks.div_ceil(u64::from(self.multiprocessors));
        let waves = most.div_ceil(u64::from(resident));
        let counts = match counted.iter().max_by_key(|c| (c.products, c.instructions())) {
            Some(last) if most == 1 && sum.counter_tiles.tiles == 0 => last,
            _ => &sum,
        };
        // Counts are sums over blocks. This is the share of the multiprocessor that ends last.
        let uneven = 1.0 + counts.counter_tiles.uneven();
        let share = |n: u64| n as f64 * most as f64 * uneven / counts.blocks.max(1) as f64;
        let multiplies = sum.products != [[0; 2]; 2];
        let clocks = |n: f64| n / (self.gigahertz[usize::from(!multiplies)] * 1e9);
        let latency = self.latency[usize::from(bytes[0] > self.cache_bytes)];
        let all = |n: u64| n as f64 * blocks as f64 / sum.blocks.max(1) as f64;
        let operations = |k: usize| (share(counts.products[k][0]) + 2.0 * share(counts.products[k][1])) / self.tensor[k];
        let waited = |trips: u64| trips as f64 * latency * waves as f64;
        let products = clocks(operations(0) + operations(1));
        // Warps that take turns do so while others multiply.
        let turn = counts.turn();
        let stored = clocks((turn * share(counts.alone) / 4.0 + waited(counts.alone_trips)) / f64::from(resident));
        let alone = (turn * products + stored - products).max(0.0);
        let sectors = all((sum.loads.sectors + sum.stores.sectors) * SECTOR);
        // Memory that is read again comes from the cache, if it is still there.
        let running = (f64::from(resident) * f64::from(self.multiprocessors) / blocks as f64).min(1.0);
        let moved = if bytes[1] as f64 * running > self.cache_bytes as f64 { sectors } else { sectors.min(bytes[0] as f64) };
        let mut parts = vec![
            (clocks(share(counts.instructions()) / 4.0), Bound::Issue),
            (clocks(share(counts.shared.wavefronts) + share(counts.shared.product_bytes) / 128.0), Bound::Shared),
            (sectors / self.cache, Bound::Cache),
            (moved / self.memory, Bound::Memory),
            (clocks(waited(counts.trips)), Bound::Latency),
        ];
        parts.extend(Pipe::ALL.into_iter().zip(self.pipes).map(|(p, rate)| (clocks(share(counts.issued[p as usize]) / rate), Bound::Pipe(p))));
        if products > 0.0 {
            parts.push((products + alone, Bound::Pipe(Pipe::Tensor)));
        }
        let (longest, bound) = parts.into_iter().fold((0.0, Bound::Launch), |a, b| if b.0 > a.0 { b } else { a });
        let bound = if longest < self.launch { Bound::Launch } else { bound };
        Cost { seconds: longest + self.launch, bound, alone, waves, resident }
    }
}
