//! Attention on the tensor cores of sm_80, after FlashAttention-2 (Dao 2023): 16-bit operands, heads of a
//! multiple of 8 elements, up to 256.
//!
//! A block keeps a tile of rows of one side in shared memory, its own, and the other side's rows come by in blocks:
//! while one is computed with, the next is on its way (`cp.async`). A warp has some rows of the tile. Scores, their
//! exponentials and all sums stay in its registers: the layout of a product's sums is that of a product's first
//! factor (`mma.m16n8k16`), so exponentials are rounded to 16 bits and multiplied where they are.
//!
//! Rows lie 16 bytes further apart in shared memory than they are long, so that neither the copies nor `ldmatrix`,
//! eight rows at a time, meet in a bank, and all addresses of a tile are one and a constant. A list of the blocks
//! that the mask leaves something of is made first, from the bounds of positions; it says which need the mask.

mod backward;
mod bias;
mod block_mask;
mod forward;
mod tile_scheduler;
pub mod warp_specialized;

use super::scoring::{Applied, Operand};
use super::{Arguments, AttentionPlan, GpuArguments, GradientOperands, HeadSize, OperandRows, ScoreSide};
use crate::abi::{LaunchBounds, launch_of_blocks};
use crate::build::asm::{Half, Instruction};
use crate::build::block::Index;
use crate::build::simt::{LANES, Pointer, Simt, Value};
use crate::build::{Builder, Compare, Frame, IntBinary, Lane};
use crate::layout::{div_ceil, tensors};
use crate::loops::accumulated;
use crate::{CompileError, Shape, pointwise};
use backward::{GradientTiles, SumWeights};
use block_mask::{BlockMask, ColumnValues, VisibleBlock};
use ir::dim::Dim;
use ir::kernel::{Kernel, Output};
use ir::launch::Launch;
use ir::op::{AttentionGrad, DType, Op};
use tile_scheduler::TileOrder;

/// Warps and threads of a block.
const WARPS: i64 = 4;
const THREADS: i64 = WARPS * LANES as i64;
/// Rows, columns and contracted elements of one instruction.
const ROWS: i64 = 16;
const COLUMNS: i64 = 8;
const DEPTH: i64 = 16;
/// Bytes of an element, of a copy, and elements of a copy.
const ELEMENT: i64 = 2;
const UNIT: i64 = 16;

/// Elements of a head at most.
const MOST_ELEMENTS: i64 = 256;

/// Most rows of a side: the list of their blocks must leave room for the tiles in the shared memory of sm_80, 163
/// KiB.
const MOST_ROWS: i64 = 1 << 19;

/// The element type of the factors, if tensor cores can do this attention: 16-bit elements, contiguous in a head,
/// whose rows begin at multiples of 16 bytes.
pub fn half(plan: &AttentionPlan) -> Option<Half> {
    let kernel = plan.kernel;
    let node = &kernel.body[kernel.outputs.iter().find(|o| !matches!(kernel.body[o.value].op, Op::AttentionLse(_)))?.value];
    let factors = match node.op {
        Op::AttentionGrad(..) => vec![node.args[0], node.args[1], node.args[2], node.args[5]],
        _ => node.args[..3].to_vec(),
    };
    let dtype = kernel.body[factors[0]].ty.dtype;
    let half = match dtype {
        DType::Bf16 => Half::Bf16,
        DType::F16 => Half::F16,
        DType::F32 | DType::I32 | DType::Bool => return None,
    };
    let tensors = tensors(kernel);
    // Elements of a head are contiguous; other strides are multiples of `unit`. A dim of size 1 may have any stride.
    let dense = |tensor: usize, unit: u64| {
        let (ty, strides) = tensors[tensor];
        let fits = |d: &Dim, s: u64| if *d == plan.attention.d || *d == plan.attention.values { s == 1 } else { s.is_multiple_of(unit) };
        ty.dims.iter().zip(strides).all(|(d, s)| kernel.body.dims.size(*d) == 1 || fits(d, *s))
    };
    let inputs = factors.iter().all(|f| kernel.body[*f].ty.dtype == dtype && plan.operand(*f).is_ok_and(|t| dense(t, (UNIT / ELEMENT) as u64)));
    // Logarithms of rows and gradients of pairs are stored element by element, so their strides do not matter.
    let of_heads = |o: &Output| !matches!(kernel.body[o.value].op, Op::AttentionLse(_) | Op::AttentionGrad(_, AttentionGrad::Bias));
    let mut outputs = kernel.outputs.iter().enumerate().filter(|(_, o)| of_heads(o));
    let fits = [plan.d, plan.values].iter().all(|s| s.d % 8 == 0 && s.d <= MOST_ELEMENTS)
        && plan.queries.max(plan.keys) <= MOST_ROWS
        && plan.attention.scale.0 > 0.0
        && inputs;
    (fits && outputs.all(|(i, _)| dense(kernel.inputs.len() + i, 2))).then_some(half)
}

/// Writes the kernel `name` and reports what it needs.
///
/// # Errors
/// An operand is not an input.
pub fn emit(b: &Simt, plan: &AttentionPlan, half: Half, name: &str) -> Result<(Shape, Launch), CompileError> {
    let kernel = plan.kernel;
    let mma = MmaAttention { b, plan, half, team: WarpTeam { first: 0, warps: WARPS, threads: THREADS } };
    let parts = match kernel.family {
        ir::kernel::Family::AttentionGrad => mma.backward()?,
        _ => vec![mma.forward()?],
    };
    let arguments = [kernel.inputs.len() + kernel.outputs.len(), kernel.scalars.len()];
    let bounds = LaunchBounds { threads: THREADS as u32, blocks: 2, cluster: 1 };
    b.kernel_of_blocks(name, arguments, bounds, &mut |entry| {
        let arguments = Arguments::new(kernel, entry, |from, bytes| b.load_pointer(b.at_const(from, bytes)));
        // All warps must have read the previous tile before this one replaces it in shared memory.
        b.barrier();
        let mut before = 0;
        for part in &parts {
            let end = before + part.order.tiles();
            let here = b.int2(
                IntBinary::And,
                b.compare_int(Compare::Ge, entry.first_tile.into(), b.i64(before)),
                b.compare_int(Compare::Lt, entry.first_tile.into(), b.i64(end)),
            );
            b.if_so(here.into_int_value(), || {
                let number = b.narrow(b.index_sub(entry.first_tile, b.index(before)));
                let [head, run] = part.order.place(b, number).map(|n| b.widen(n));
                let at = arguments.at(b, plan, &part.heads, head);
                (part.write)(&at, run);
            });
            before = end;
        }
        Ok(())
    })?;
    let shared = parts.iter().map(|p| p.shared_bytes).max().expect("invariant: a kernel has results");
    let shape = Shape { tiles: parts.iter().map(|p| p.order.tiles() as u64).sum(), line: 1, scratch_bytes: 0 };
    Ok((shape, launch_of_blocks(kernel, &shape, bounds, shared as u32)))
}

/// Writes a tile, given the arguments at its head and the number of its run in that head.
type WriteRun<'s, 'c> = dyn Fn(&GpuArguments<'c>, Index<'c>) + 's;
/// Computes with one block in a stage of shared memory: takes the carried values and returns the next ones.
type ComputeBlock<'s, 'c> = dyn FnMut(&VisibleBlock<'c>, Index<'c>, &[Value<'c>]) -> Vec<Value<'c>> + 's;

/// Tiles of one kind: runs of rows of each head.
struct MmaTiles<'s, 'c> {
    heads: Vec<Dim>,
    order: TileOrder,
    shared_bytes: i64,
    write: Box<WriteRun<'s, 'c>>,
}

/// How many rows a tile and a block of the other side have.
#[derive(Clone, Copy)]
struct TileSizes {
    /// Warps that share the tile's rows.
    warps: i64,
    /// Rows of a warp, in units of 16.
    tall: i64,
    /// Rows of a block of the other side.
    others: i64,
}

impl TileSizes {
    fn of_warp(self) -> i64 {
        self.tall * ROWS
    }

    fn own(self) -> i64 {
        self.warps * self.of_warp()
    }
}

/// Consecutive warps that work together, in a block of `threads` threads.
#[derive(Clone, Copy)]
struct WarpTeam {
    first: i64,
    warps: i64,
    threads: i64,
}

/// The kernel under construction, for one team of warps.
struct MmaAttention<'a, 'c> {
    b: &'a Simt<'c>,
    plan: &'a AttentionPlan<'a>,
    half: Half,
    team: WarpTeam,
}

/// A tile of rows of one side.
#[derive(Clone, Copy)]
struct RowTile<'c> {
    side: ScoreSide,
    sizes: TileSizes,
    /// The number of the tile's first row, 64 bits.
    first: Index<'c>,
}

impl<'c> MmaAttention<'_, 'c> {
    /// Bytes from row to row in shared memory.
    fn row_bytes(size: HeadSize) -> i64 {
        ELEMENT * size.padded() + UNIT
    }

    fn lane(&self) -> Index<'c> {
        self.b.narrow(self.b.lane())
    }

    /// The number of the warp in its team.
    fn warp(&self) -> Index<'c> {
        let b = self.b;
        let warp = b.index_div(b.thread(), b.word(LANES as i64));
        if self.team.first == 0 { warp } else { b.index_sub(warp, b.word(self.team.first)) }
    }

    /// Waits until all warps of the team have come here, and makes their writes visible to the team.
    fn team_barrier(&self) {
        let threads = self.team.warps * LANES as i64;
        if threads == self.team.threads { self.b.barrier() } else { self.b.barrier_of(threads) }
    }

    fn scaled(&self, n: Index<'c>, by: i64) -> Index<'c> {
        self.b.index_mul(n, self.b.word(by))
    }

    fn plus(&self, n: Index<'c>, constant: i64) -> Index<'c> {
        self.b.index_add(n, self.b.word(constant))
    }

    /// `count` bits of the lane's number, from bit `from` on.
    fn lane_bits(&self, from: i64, count: i64) -> Index<'c> {
        let b = self.b;
        b.bits(IntBinary::And, b.bits(IntBinary::ShrLogical, self.lane(), b.word(from)), b.word((1 << count) - 1))
    }

    /// Starts the copy of `count` rows, from `first` on (64 bits), into shared memory. Rows past the end become zero.
    fn copy_rows(&self, at: &GpuArguments<'c>, rows: &OperandRows, first: Index<'c>, count: i64, to: Index<'c>) {
        let b = self.b;
        let (units, row_bytes) = (ELEMENT * rows.size.padded() / UNIT, Self::row_bytes(rows.size));
        if THREADS % units != 0 || rows.size.d != rows.size.padded() {
            return self.copy_uneven_rows(at, rows, first, count, to);
        }
        let (row, unit) = (b.index_div(b.thread(), b.word(units)), b.index_rem(b.thread(), b.word(units)));
        let to = b.index_add(b.index_add(to, self.scaled(row, row_bytes)), self.scaled(unit, UNIT));
        let row = b.index_add(first, b.widen(row));
        let from = b.at(at.tensors[rows.tensor], b.index_mul(row, b.index(rows.bytes(rows.row_stride))));
        let from = b.index_add(b.address(from), b.widen(self.scaled(unit, UNIT)));
        let together = THREADS / units;
        for pass in 0..count / together {
            let to = self.plus(to, pass * together * row_bytes);
            let from = b.index_add(from, b.index(pass * together * rows.bytes(rows.row_stride)));
            if rows.rows % count == 0 {
                b.asm(Instruction::CopyAsync { bytes: UNIT as u32 }, &[to.into(), from.into()]);
            } else {
                let present = b.less(ir::fault!("gpu.mma.present", row, b.index_add(row, b.index(pass * together))), b.index(rows.rows));
                let bytes = b.choose(present, b.word(UNIT), b.word(0));
                b.asm(Instruction::CopyAsyncFilled { bytes: UNIT as u32 }, &[to.into(), from.into(), bytes.into()]);
            }
        }
    }

    /// The same where the threads do not divide evenly among the units of rows, or rows are padded with zeros.
    fn copy_uneven_rows(&self, at: &GpuArguments<'c>, rows: &OperandRows, first: Index<'c>, count: i64, to: Index<'c>) {
        let b = self.b;
        let (units, there) = (ELEMENT * rows.size.padded() / UNIT, ELEMENT * rows.size.d / UNIT);
        for pass in 0..div_ceil(count * units, THREADS) {
            let number = self.plus(b.thread(), pass * THREADS);
            let (row, unit) = (b.index_div(number, b.word(units)), b.index_rem(number, b.word(units)));
            let to = b.index_add(b.index_add(to, self.scaled(row, Self::row_bytes(rows.size))), self.scaled(unit, UNIT));
            let row = b.index_add(first, b.widen(row));
            let present = b.bits(IntBinary::And, b.less(row, b.index(rows.rows)), b.less(unit, b.word(there)));
            // The source of a unit that is not copied is clamped, so that its address stays within the operand.
            let (row, unit) = (b.least(row, b.index(rows.rows - 1)), b.choose(present, unit, b.word(0)));
            let from = b.at(at.tensors[rows.tensor], b.index_mul(row, b.index(rows.bytes(rows.row_stride))));
            let from = b.index_add(b.address(from), b.widen(self.scaled(unit, UNIT)));
            let bytes = b.choose(present, b.word(UNIT), b.word(0));
            let copy = || {
                b.asm(Instruction::CopyAsyncFilled { bytes: UNIT as u32 }, &[to.into(), from.into(), bytes.into()]);
            };
            match (pass + 1) * THREADS <= count * units {
                true => copy(),
                false => b.if_so(b.less(number, b.word(count * units)), copy),
            }
        }
    }

    /// The address of a unit of a row, for `ldmatrix`.
    fn matrix(&self, size: HeadSize, tile: Index<'c>, row: Index<'c>, unit: Index<'c>) -> Index<'c> {
        self.b.index_add(self.b.index_add(tile, self.scaled(row, Self::row_bytes(size))), self.scaled(unit, UNIT))
    }

    /// The products of the warp's rows of a tile with the rows of a block: for each 16 of the former and each 8 of
    /// the latter four sums.
    fn products(&self, sizes: TileSizes, size: HeadSize, own: Index<'c>, others: Index<'c>) -> Vec<Value<'c>> {
        let (b, row_bytes) = (self.b, Self::row_bytes(size));
        let own = b.index_add(own, self.scaled(self.warp(), sizes.of_warp() * row_bytes));
        let mut sums = vec![b.f32(0.0); (sizes.of_warp() * sizes.others / LANES as i64) as usize];
        // Of the four matrices of a load, rows vary faster than units for the first factor, and units faster than
        // rows for the second.
        let first = self.matrix(size, own, self.lane_bits(0, 4), self.lane_bits(4, 1));
        let second_row = b.index_add(self.lane_bits(0, 3), self.scaled(self.lane_bits(4, 1), 8));
        let second = self.matrix(size, others, second_row, self.lane_bits(3, 1));
        for step in 0..size.padded() / DEPTH {
            let load = |from, rows: i64| {
                let plain = Instruction::LoadMatrices { transposed: false };
                let at = |i: i64| self.plus(from, 16 * i * row_bytes + 2 * UNIT * step);
                (0..rows / 16).map(|i| b.asm(plain, &[at(i).into()])).collect::<Vec<_>>()
            };
            let (rows, columns) = (load(first, sizes.of_warp()), load(second, sizes.others).concat());
            self.multiply(&mut sums, &rows, &columns);
        }
        sums
    }

    /// Adds to the sums of each 16 rows and 8 columns the product of those rows and columns.
    fn multiply(&self, sums: &mut [Value<'c>], rows: &[Vec<Value<'c>>], columns: &[Value<'c>]) {
        let pairs = rows.iter().flat_map(|row| columns.chunks_exact(2).map(move |column| (row, column)));
        for (sums, (row, column)) in sums.chunks_exact_mut(4).zip(pairs) {
            sums.copy_from_slice(&self.b.asm(Instruction::Multiply(self.half.into()), &[row, column, &*sums].concat()));
        }
    }

    /// Adds to the sums of each of the warp's rows the rows of a block times its weights. Weights are laid out as
    /// `products` returns them and are rounded to 16 bits.
    fn weigh(&self, sizes: TileSizes, size: HeadSize, weights: &[Value<'c>], others: Index<'c>, sums: &mut [Value<'c>]) {
        let b = self.b;
        let across = (sizes.others / COLUMNS * 4) as usize;
        let first = self.matrix(size, others, self.lane_bits(0, 4), self.lane_bits(4, 1));
        for step in 0..sizes.others / DEPTH {
            let row = |weights: &[Value<'c>]| {
                let two_tiles = &weights[(8 * step) as usize..][..8];
                two_tiles.chunks_exact(2).map(|pair| b.half_pair(self.half, [pair[0], pair[1]])).collect::<Vec<_>>()
            };
            let rows: Vec<_> = weights.chunks_exact(across).map(row).collect();
            for pair in 0..size.padded() / 16 {
                let from = self.plus(first, DEPTH * step * Self::row_bytes(size) + 2 * UNIT * pair);
                let columns = b.asm(Instruction::LoadMatrices { transposed: true }, &[from.into()]);
                for (sums, row) in sums.chunks_exact_mut((size.padded() / 2) as usize).zip(&rows) {
                    self.multiply(&mut sums[(8 * pair) as usize..][..8], std::slice::from_ref(row), &columns);
                }
            }
        }
    }

    /// Row within the tile of this lane's sums `2 * half ..` in the `tall`-th group of 16 rows.
    fn row_of_tile(&self, sizes: TileSizes, tall: i64, half: i64) -> Index<'c> {
        let of_warp = self.scaled(self.warp(), sizes.of_warp());
        self.plus(self.b.index_add(of_warp, self.lane_bits(2, 3)), tall * ROWS + 8 * half)
    }

    /// The number of that row among all, 64 bits.
    fn row(&self, own: &RowTile<'c>, tall: i64, half: i64) -> Index<'c> {
        self.b.index_add(own.first, self.b.widen(self.row_of_tile(own.sizes, tall, half)))
    }

    /// This lane's first column in the `n`-th group of 8 of a block of products.
    fn column(&self, n: i64) -> Index<'c> {
        self.plus(self.scaled(self.lane_bits(0, 2), 2), COLUMNS * n)
    }

    fn count(&self, side: ScoreSide) -> i64 {
        match side {
            ScoreSide::Queries => self.plan.queries,
            ScoreSide::Keys => self.plan.keys,
        }
    }

    fn dim(&self, side: ScoreSide) -> Dim {
        match side {
            ScoreSide::Queries => self.plan.attention.at,
            ScoreSide::Keys => self.plan.attention.keys,
        }
    }

    /// The outputs whose op `wanted` picks, by tensor.
    fn outputs(&self, wanted: impl Fn(&Op) -> bool) -> Vec<(usize, &Output)> {
        let kernel: &Kernel = self.plan.kernel;
        let outputs = kernel.outputs.iter().enumerate().map(|(i, o)| (kernel.inputs.len() + i, o));
        outputs.filter(|(_, o)| wanted(&kernel.body[o.value].op)).collect()
    }

    /// Calls `write` with the start of each of this lane's rows of an output, for the rows that exist.
    fn each_row(&self, at: &GpuArguments<'c>, own: &RowTile<'c>, tensor: usize, write: &dyn Fn(usize, Pointer<'c>)) {
        let b = self.b;
        let bytes = pointwise::stored(tensors(self.plan.kernel)[tensor].0.dtype).bytes();
        let step = b.index(bytes * self.plan.stride(tensor, self.dim(own.side)));
        for k in 0..2 * own.sizes.tall {
            let row = self.row(own, k / 2, k % 2);
            let store = || write(k as usize, b.at(at.tensors[tensor], b.index_mul(row, step)));
            if self.count(own.side) % own.sizes.own() == 0 {
                store();
            } else {
                b.if_so(b.less(row, b.index(self.count(own.side))), store);
            }
        }
    }

    /// Stores sums over the elements of a head; those of row k are multiplied by `factors[k]`.
    fn store_sums(&self, at: &GpuArguments<'c>, own: &RowTile<'c>, (tensor, output): (usize, &Output), sums: &[Value<'c>], factors: &[Value<'c>]) {
        let b = self.b;
        let dtype = self.plan.kernel.body[output.value].ty.dtype;
        let lane = pointwise::stored(dtype);
        let size = self.plan.columns_of(tensor).1;
        self.each_row(at, own, tensor, &|k, start| {
            let start = b.at(start, b.widen(self.scaled(self.column(0), lane.bytes())));
            let of_tall = &sums[k / 2 * (size.padded() / COLUMNS * 4) as usize..];
            for (n, sums) in (0..size.d / COLUMNS).zip(of_tall.chunks_exact(4)) {
                let place = b.at_const(start, n * COLUMNS * lane.bytes());
                let pair = [0, 1].map(|e| b.mul(sums[2 * (k % 2) + e], factors[k]));
                if output.accumulate {
                    for (e, value) in (0..).zip(pair) {
                        let place = b.at_const(place, e * lane.bytes());
                        let sum = accumulated(b, dtype, b.load_splat(place, lane), pointwise::rounded(b, dtype, value));
                        b.store_each(place, sum, lane);
                    }
                    continue;
                }
                match dtype {
                    DType::Bf16 => b.store_each(place, b.half_pair(Half::Bf16, pair), Lane::I32),
                    DType::F16 => b.store_each(place, b.half_pair(Half::F16, pair), Lane::I32),
                    DType::F32 | DType::I32 | DType::Bool => b.store_two(place, pair),
                }
            }
        });
    }

    /// The sum or the greatest over the four lanes that share a row.
    fn across_row(&self, x: Value<'c>, join: impl Fn(Value<'c>, Value<'c>) -> Value<'c>) -> Value<'c> {
        let x = join(x, self.b.swap_lanes(x, 1));
        join(x, self.b.swap_lanes(x, 2))
    }

    /// Goes through all blocks: `load` starts the copies of one into a stage of shared memory, and `body` computes
    /// with it. `begin` starts the other copies that the first block needs.
    fn stream(
        &self,
        mask: &BlockMask<'c>,
        [stages, stage_bytes]: [Index<'c>; 2],
        begin: impl FnOnce(),
        load: &dyn Fn(&VisibleBlock<'c>, Index<'c>),
        carried: &[Value<'c>],
        body: &mut ComputeBlock<'_, 'c>,
    ) -> Vec<Value<'c>> {
        let b = self.b;
        let stage = |i: Index<'c>| b.index_add(stages, b.index_mul(b.bits(IntBinary::And, i, b.word(1)), stage_bytes));
        let start = |i: Index<'c>| {
            load(&mask.block(self, i), stage(i));
            b.asm(Instruction::CommitCopies, &[]);
        };
        b.if_so(b.less(b.word(0), mask.count), || {
            begin();
            start(b.word(0));
        });
        b.loop_over([b.word(0), mask.count, b.word(1)], carried, &mut |i, carried| {
            // The loop stays rolled, as one iteration needs nearly all registers.
            b.asm(Instruction::LeaveRolled, &[]);
            b.asm(Instruction::WaitCopies { left: 0 }, &[]);
            // Behind the barrier, the copies of all threads have landed, and the next stage to fill is no longer
            // read.
            b.barrier();
            let next = b.index_add(i, b.word(1));
            b.if_so(b.less(next, mask.count), || start(next));
            body(&mask.block(self, i), stage(i), carried)
        })
    }
}
