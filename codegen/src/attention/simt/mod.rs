//! Attention on GPUs without tensor cores: of any type, any size of a head, any strides.
//!
//! A warp keeps a few rows of one side, the queries or the keys, and meets the other side's rows 32 at a time, one to
//! a lane. A product with them gives each lane its scores; sums over them are taken by one lane's weight at a time,
//! broadcast, while the lanes hold the elements of a head. Nothing goes through memory between the two, so no warp
//! waits for another. Blocks that the mask hides from all rows of the warp are skipped.

mod backward;
mod forward;

use super::scoring::{Applied, Operand};
use super::tiles::{Column, OutputRows, across, load_strided, store_column, vector_columns};
use super::{Arguments, AttentionPlan, GpuArguments, GradientOperands, HeadSize, OperandRows, ScoreSide};
use crate::build::simt::{LANES, Simt, Value};
use crate::build::{Builder, Compare, Frame, IntBinary, Lane};
use crate::layout::{div_ceil, tensors};
use crate::{CompileError, Shape, math, pointwise};
use inkwell::values::{IntValue, PointerValue};
use ir::dim::Dim;
use ir::kernel::Output;
use ir::op::Op;

/// Registers of sums that a warp keeps.
const SUMS: i64 = 64;
/// Rows that a warp keeps at most.
const ROWS: i64 = 8;

/// Writes the kernel `name`, of attention or of its gradients, and reports what it needs.
///
/// # Errors
/// An operand is not an input.
pub fn emit(b: &Simt, plan: &AttentionPlan, name: &str) -> Result<Shape, CompileError> {
    let kernel = plan.kernel;
    let simt = SimtAttention { b, plan };
    let parts = match kernel.family {
        ir::kernel::Family::AttentionGrad => simt.backward()?,
        _ => vec![simt.forward()?],
    };
    let arguments = [kernel.inputs.len() + kernel.outputs.len(), kernel.scalars.len()];
    b.kernel(name, arguments, &mut |entry| {
        let arguments = Arguments::new(kernel, entry, |from, bytes| b.load_pointer(b.at_const(from, bytes)));
        let mut before = 0;
        for part in &parts {
            let (tile, runs) = (b.index_sub(entry.first_tile, b.index(before)), b.index(part.runs));
            let [number, end] = [entry.first_tile, b.index(before + part.tiles(plan))].map(|i| b.splat(i));
            let here = b.int2(IntBinary::And, b.compare_int(Compare::Ge, number, b.i64(before)), b.compare_int(Compare::Lt, number, end));
            b.when(here, &[], || {
                // With a causal mask, the last runs of a head take longest, so they come first.
                let run = b.index_sub(b.index(part.runs - 1), b.index_rem(tile, runs));
                let at = arguments.at(b, plan, &part.heads, b.index_div(tile, runs));
                (part.write)(&at, b.index_mul(run, b.index(part.rows)));
                vec![]
            });
            before += part.tiles(plan);
        }
        Ok(())
    })?;
    Ok(Shape { tiles: parts.iter().map(|part| part.tiles(plan) as u64).sum(), line: 1, scratch_bytes: 0 })
}

/// Writes a tile, given the arguments at its head and its first row.
type WriteRows<'s, 'c> = dyn Fn(&GpuArguments<'c>, IntValue<'c>) + 's;

/// Tiles of one kind: runs of rows of each head.
struct SimtTiles<'s, 'c> {
    heads: Vec<Dim>,
    rows: i64,
    runs: i64,
    write: Box<WriteRows<'s, 'c>>,
}

impl SimtTiles<'_, '_> {
    fn tiles(&self, plan: &AttentionPlan) -> i64 {
        self.runs * plan.sizes(&self.heads)
    }
}

/// The rows of a tile. Those past the end are the last one again, and are not stored.
#[derive(Clone)]
struct WarpRows<'c> {
    side: ScoreSide,
    first: IntValue<'c>,
    numbers: Vec<IntValue<'c>>,
    /// For each operand of the program of this side only, its value for each row; `None` for the others.
    operand_values: Vec<Option<Vec<Value<'c>>>>,
}

/// 32 rows of the other side, one to a lane. Lanes past the end have the last row.
struct OtherRows<'c> {
    first: IntValue<'c>,
    count: IntValue<'c>,
    /// The lanes' rows, as `I64`.
    numbers: Value<'c>,
    /// The lanes that have a row of their own, unless all do.
    present: Option<Value<'c>>,
    /// For each operand of the program of this side only, its values for the lanes' rows; `None` for the others.
    operand_values: Vec<Option<Value<'c>>>,
}

/// The program's results for a row's products: scores, slopes and weights unless these are 1, and the mask of visible
/// lanes unless all are.
struct WeightedScores<'c> {
    score: Value<'c>,
    slope: Option<Value<'c>>,
    weight: Option<Value<'c>>,
    mask: Option<Value<'c>>,
}

/// The kernel under construction.
struct SimtAttention<'a, 'c> {
    b: &'a Simt<'c>,
    plan: &'a AttentionPlan<'a>,
}

impl<'c> SimtAttention<'_, 'c> {
    /// Rows that a warp keeps with so many vectors of sums for each.
    fn rows_of_tile(&self, sums: usize) -> i64 {
        let fit = SUMS / (sums as i64).max(1);
        if fit >= ROWS { ROWS } else { fit.max(1) }
    }

    /// Vectors of a row.
    fn columns(size: HeadSize) -> usize {
        size.width as usize / LANES
    }

    fn dim(&self, side: ScoreSide) -> Dim {
        match side {
            ScoreSide::Queries => self.plan.attention.at,
            ScoreSide::Keys => self.plan.attention.keys,
        }
    }

    fn count(&self, side: ScoreSide) -> i64 {
        match side {
            ScoreSide::Queries => self.plan.queries,
            ScoreSide::Keys => self.plan.keys,
        }
    }

    /// The operands of the program, and whether they are of one side alone.
    fn operands(&self, side: ScoreSide) -> impl Iterator<Item = (&Operand, bool)> {
        let which = usize::from(side == ScoreSide::Keys);
        self.plan.program.operands.iter().map(move |o| (o, o.side() == which))
    }

    fn own(&self, at: &GpuArguments<'c>, side: ScoreSide, first: IntValue<'c>, rows: i64) -> WarpRows<'c> {
        let b = self.b;
        let last = b.index(self.count(side) - 1);
        let numbers: Vec<_> = (0..rows).map(|r| b.index_min(b.index_add(first, b.index(r)), last)).collect();
        let row = |o: &Operand, n: &IntValue<'c>| b.at(at.tensors[o.tensor], b.index_mul(*n, b.index(o.step(usize::from(side == ScoreSide::Keys)))));
        let all = |o: &Operand| numbers.iter().map(|n| b.load_splat(row(o, n), o.lane())).collect();
        let operand_values = self.operands(side).map(|(o, own)| own.then(|| all(o))).collect();
        WarpRows { side, first, numbers, operand_values }
    }

    fn others(&self, at: &GpuArguments<'c>, side: ScoreSide, first: IntValue<'c>) -> OtherRows<'c> {
        let (b, rows) = (self.b, self.count(side));
        let count = b.index_min(b.index_sub(b.index(rows), first), b.index(LANES as i64));
        let present = (rows % LANES as i64 != 0).then(|| b.compare_int(Compare::Lt, b.lane_numbers(), b.splat(count)));
        let number = b.int2(IntBinary::Add, b.splat(first), b.lane_numbers());
        let numbers = present.map_or(number, |present| b.select(present, number, b.i64(rows - 1)));
        let which = usize::from(side == ScoreSide::Keys);
        let operand_values =
            self.operands(side).map(|(o, own)| own.then(|| self.each(at.tensors[o.tensor], numbers, o.step(which), o.lane()))).collect();
        OtherRows { first, count, numbers, present, operand_values }
    }

    /// The elements of the lanes' rows, `step` bytes apart.
    fn each(&self, from: PointerValue<'c>, numbers: Value<'c>, step: i64, lane: Lane) -> Value<'c> {
        self.b.gather(from, self.b.int2(IntBinary::Mul, numbers, self.b.i64(step)), lane, None)
    }

    /// Whether any score of these rows is seen, as far as the bounds of operands say.
    fn any_visible(&self, at: &GpuArguments<'c>, own: &WarpRows<'c>, others: &OtherRows<'c>) -> Option<Value<'c>> {
        let b = self.b;
        let lesser = |x, y| b.select(b.compare_int(Compare::Lt, x, y), x, y);
        let greater = |x, y| b.select(b.compare_int(Compare::Gt, x, y), x, y);
        let bounds = |k: usize| {
            let operand = &self.plan.program.operands[k];
            match (&own.operand_values[k], others.operand_values[k]) {
                (Some(mine), _) => {
                    let mine: Vec<_> = mine.iter().map(|value| operand.counted(b, *value)).collect();
                    [&lesser as &dyn Fn(_, _) -> _, &greater].map(|join| mine[1..].iter().fold(mine[0], |x, y| join(x, *y)))
                }
                (None, Some(theirs)) => {
                    let theirs = operand.counted(b, theirs);
                    [across(b, theirs, lesser), across(b, theirs, greater)]
                }
                // The operand has one value for all pairs.
                (None, None) => [operand.counted(b, b.load_splat(at.tensors[operand.tensor], operand.lane())); 2],
            }
        };
        self.plan.program.block_visibility(b, &bounds).any
    }

    /// Applies the program to the products of row `row` with the lanes' rows.
    fn scored(&self, at: &GpuArguments<'c>, own: &WarpRows<'c>, row: usize, others: &OtherRows<'c>, product: Value<'c>) -> WeightedScores<'c> {
        let b = self.b;
        let number = |k: usize| match (&own.operand_values[k], others.operand_values[k]) {
            (Some(mine), _) => mine[row],
            (None, Some(theirs)) => theirs,
            (None, None) => {
                let operand = &self.plan.program.operands[k];
                let [mine, theirs] = if own.side == ScoreSide::Queries { [0, 1] } else { [1, 0] }.map(|side| operand.step(side));
                let row = b.at(at.tensors[operand.tensor], b.index_mul(own.numbers[row], b.index(mine)));
                if theirs == 0 { b.load_splat(row, operand.lane()) } else { self.each(row, others.numbers, theirs, operand.lane()) }
            }
        };
        let mut applied = Applied::new(b, &self.plan.program, product, &number);
        let (score, slope, weight, seen) = (applied.score(), applied.slope(), applied.weight(), applied.seen());
        let mask = match (seen, others.present) {
            (Some(seen), Some(present)) => Some(ir::fault!("gpu.lanes.present", seen, b.int2(IntBinary::And, seen, present))),
            (seen, present) => seen.or(present),
        };
        WeightedScores { score, slope, weight, mask }
    }

    /// Calls `body` with all rows of the other side that some row of the tile may see, and the carried values.
    fn for_visible_rows(
        &self,
        at: &GpuArguments<'c>,
        own: &WarpRows<'c>,
        carried: &[Value<'c>],
        body: &mut dyn FnMut(&OtherRows<'c>, &[Value<'c>]) -> Vec<Value<'c>>,
    ) -> Vec<Value<'c>> {
        let (b, side) = (self.b, own.side.other());
        b.repeat(b.index(0), b.index(self.count(side)), LANES as i64, carried, &mut |first, carried| {
            let others = self.others(at, side, first);
            match self.any_visible(at, own, &others) {
                None => body(&others, carried),
                Some(any) => b.when(any, carried, || body(&others, carried)),
            }
        })
    }

    /// Addresses of the rows of a tile.
    fn starts(&self, at: &GpuArguments<'c>, rows: &OperandRows, own: &WarpRows<'c>) -> Vec<PointerValue<'c>> {
        let b = self.b;
        let place = |n: &IntValue<'c>| b.at(at.tensors[rows.tensor], b.index_mul(*n, b.index(rows.bytes(rows.row_stride))));
        own.numbers.iter().map(place).collect()
    }

    /// The products of each row of the tile with the lanes' rows.
    fn products(
        &self,
        at: &GpuArguments<'c>,
        mine: (&OperandRows, &[PointerValue<'c>]),
        theirs: &OperandRows,
        others: &OtherRows<'c>,
    ) -> Vec<Value<'c>> {
        let (b, (rows, starts)) = (self.b, mine);
        let d = rows.size.d;
        let unroll = if d % 4 == 0 { 4 } else { 1 };
        let column = |rows: &OperandRows, from, e| b.at(from, b.index_mul(e, b.index(rows.bytes(rows.column_stride))));
        let zeros = vec![b.f32(0.0); starts.len()];
        b.repeat(b.index(0), b.index(d), unroll, &zeros, &mut |e, sums| {
            let mut sums = sums.to_vec();
            for u in 0..unroll {
                let e = b.index_add(e, b.index(u));
                let y = self.each(column(theirs, at.tensors[theirs.tensor], e), others.numbers, theirs.bytes(theirs.row_stride), theirs.lane);
                for (sum, start) in sums.iter_mut().zip(starts) {
                    *sum = b.fma(b.load_splat(column(rows, *start, e), rows.lane), y, *sum);
                }
            }
            sums
        })
    }

    /// Adds the other side's rows to the sums of each row of the tile, times the lanes' weights.
    fn weigh(
        &self,
        at: &GpuArguments<'c>,
        weights: &[Value<'c>],
        theirs: &OperandRows,
        others: &OtherRows<'c>,
        sums: &[Value<'c>],
    ) -> Vec<Value<'c>> {
        let b = self.b;
        let row_bytes = b.index(theirs.bytes(theirs.row_stride));
        b.repeat(b.index(0), others.count, 1, sums, &mut |lane, sums| {
            let row = b.at(at.tensors[theirs.tensor], b.index_mul(b.index_add(others.first, lane), row_bytes));
            let weights: Vec<_> = weights.iter().map(|w| b.broadcast(*w, lane)).collect();
            let elements: Vec<_> = vector_columns(b, theirs.size)
                .iter()
                .map(|c| load_strided(b, b.at_const(row, theirs.bytes(c.first * theirs.column_stride)), theirs.column_stride, theirs.lane, c.mask))
                .collect();
            sums.chunks(elements.len()).zip(weights).flat_map(|(sums, w)| sums.iter().zip(&elements).map(move |(s, e)| b.fma(w, *e, *s))).collect()
        })
    }

    /// The outputs whose op `wanted` picks, by tensor.
    fn outputs(&self, wanted: impl Fn(&Op) -> bool) -> Vec<(usize, &Output)> {
        let kernel = self.plan.kernel;
        let outputs = kernel.outputs.iter().enumerate().map(|(i, o)| (kernel.inputs.len() + i, o));
        outputs.filter(|(_, o)| wanted(&kernel.body[o.value].op)).collect()
    }

    /// Calls `write` for each distinct row of the tile with its number within the tile and the address of its row of
    /// an output.
    fn store_rows(&self, at: &GpuArguments<'c>, own: &WarpRows<'c>, tensor: usize, write: &dyn Fn(usize, PointerValue<'c>)) {
        let b = self.b;
        let lane = pointwise::stored(tensors(self.plan.kernel)[tensor].0.dtype);
        let step = b.index(lane.bytes() * self.plan.stride(tensor, self.dim(own.side)));
        for (row, number) in own.numbers.iter().enumerate() {
            let place = b.at(at.tensors[tensor], b.index_mul(*number, step));
            let row_number = ir::fault!("gpu.lanes.distinct", *number, b.index_add(own.first, b.index(row as i64)));
            let distinct = b.compare_int(Compare::Eq, b.splat(*number), b.splat(row_number));
            b.when(distinct, &[], || {
                write(row, place);
                vec![]
            });
        }
    }

    /// Stores sums over the elements of a head, as one output's rows.
    fn store_sums(&self, at: &GpuArguments<'c>, own: &WarpRows<'c>, (tensor, output): (usize, &Output), sums: &[Value<'c>]) {
        let b = self.b;
        let dtype = self.plan.kernel.body[output.value].ty.dtype;
        let (columns, size) = self.plan.columns_of(tensor);
        let stored = OutputRows { dtype, stride: self.plan.stride(tensor, columns), size, accumulate: output.accumulate };
        self.store_rows(at, own, tensor, &|row, place| {
            for (column, sum) in vector_columns(b, size).iter().zip(&sums[row * Self::columns(size)..]) {
                store_column(b, place, column, stored, *sum);
            }
        });
    }
}
