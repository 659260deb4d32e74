//! What a kernel's code for a GPU asks of a card: some of its blocks run in the emulator, on operands as large as the
//! kernel's own, and are counted; matrix instructions do not compute. From the counts follows a time
//! ([`Card::cost`]).

use crate::check::Checker;
use crate::check::emulated::{EmulatedKernel, GpuCode};
use emulator::Options;
pub use emulator::{A100, CARDS, Card, Cost, Counts, H100, WIDTHS};
use ir::kernel::{Family, Kernel};
use ir::launch::{Launch, Parameter, WARP};
use ir::work::Work;
use std::collections::BTreeSet;

/// Blocks that run: the first, the last, and some between.
const SOME: u64 = 4;
/// Instructions of a warp beyond which nothing is said of a kernel.
const LONGEST: u64 = 1 << 26;

/// The card that code of a kind is usually for.
pub fn usual(arch: &str) -> &'static Card {
    if arch == "sm_90a" { &H100 } else { &A100 }
}

/// What a launch is predicted to ask of a card.
#[derive(Clone, Copy, Debug)]
pub struct Predicted {
    /// Of the blocks that ran, [`Counts::blocks`].
    pub counts: Counts,
    /// Time that it takes on the predictor's card, and why.
    pub cost: Cost,
    /// Blocks of the launch.
    pub blocks: u32,
}

/// Predicts launches, one after the other.
pub struct Predictor {
    checker: Checker,
    card: &'static Card,
}

/// The part of `bytes` that belongs to tiles that are computed at a time, where a tile, a warp's or a block's, reads
/// its own more than once. Products and attention read what their neighbours read at the time.
fn at_a_time(kernel: &Kernel, launch: &Launch, bytes: u64) -> u64 {
    let tiles = launch.parameters.iter().find_map(|p| if let Parameter::Number(n) = p { Some(*n) } else { None }).unwrap_or(1).max(1);
    let workers = if launch.shared_bytes > 0 { u64::from(launch.grid) } else { u64::from(launch.grid) * u64::from(launch.block / WARP) };
    match kernel.family {
        Family::Loops { .. } | Family::Scatter => (bytes as f64 * (workers as f64 / tiles as f64).min(1.0)) as u64,
        Family::Gemm | Family::Attention | Family::AttentionGrad => 0,
    }
}

impl Predictor {
    /// A predictor of launches on this card.
    pub fn new(card: &'static Card) -> Predictor {
        Predictor { checker: Checker::default(), card }
    }

    /// Blocks of a launch on the card.
    pub fn blocks(&self, launch: &Launch) -> u32 {
        launch.blocks_on(self.card.multiprocessors)
    }

    /// Predicts a launch of the kernel `name` in `ptx`. Data that costs depend on are random: indices are spread
    /// evenly.
    ///
    /// # Errors
    /// Why it cannot be run here, or what the emulator finds wrong.
    pub fn predict(&mut self, kernel: &Kernel, name: &str, ptx: &str, launch: &Launch) -> Result<Predicted, String> {
        let launch = &Launch { grid: self.blocks(launch), ..launch.clone() };
        let operands = self.checker.operands_of(kernel)?;
        let options = Options { count: true, products: false, races: false, global_races: false, limit: LONGEST, turns: true, ..Options::default() };
        let code = GpuCode { name, ptx, tiles: 0, launch: Some(launch) };
        let loaded = EmulatedKernel::new(&code, &operands, launch, options).map_err(|e| e.to_string())?;
        let grid = u64::from(launch.grid);
        let blocks: BTreeSet<usize> = (0..SOME).map(|k| (k * (grid - 1) / (SOME - 1)) as usize).collect();
        let one = |block: usize| Ok(loaded.blocks(&[block]).map_err(|e| e.to_string())?.counts);
        // Each block runs on a thread of its own.
        let counted: Vec<Counts> = std::thread::scope(|scope| {
            let running: Vec<_> = blocks.into_iter().map(|b| scope.spawn(move || one(b))).collect();
            running.into_iter().map(|r| r.join().expect("invariant: the emulator does not panic")).collect::<Result<_, String>>()
        })?;
        let mut counts = Counts::default();
        counted.iter().for_each(|c| counts.add(c));
        let (decoded, own) = loaded.kernel().map_err(|e| e.to_string())?;
        let bytes = Work::needed(kernel).bytes;
        let cost = self.card.cost(&counted, decoded, own, [bytes, at_a_time(kernel, launch, bytes)]);
        Ok(Predicted { counts, cost, blocks: launch.grid })
    }
}
