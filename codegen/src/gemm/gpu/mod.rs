//! Products on GPUs: a block of threads computes a tile, which it takes through shared memory in stages of contracted elements.
//!
//! While one stage is multiplied the next ones are on their way (`cp.async`). 16-bit factors meet in tensor cores, others in f32 multiply-adds. The sums go
//! through shared memory once more, so that the epilogue, which is the CPU's, sees neighbouring columns in neighbouring lanes. Blocks take tiles in an
//! order in which those at work at a time share rows and columns. Where experts own rows or contracted elements, a tile of rows goes through the experts
//! that own some of them, and then through nobody's, whose sums are 0.

mod copy;
mod fma;
mod groups;
mod mma;
pub mod plan;
#[cfg(test)]
mod tests;

use super::epilogue::{Epilogue, Spot};
use super::product::{Experts, Own, Product};
use crate::abi::launch_of_blocks;
use crate::build::asm::Instruction;
use crate::build::block::Index;
use crate::build::simt::{Bounds, LANES, Pointer, Simt, Value};
use crate::build::{Builder, Frame};
use crate::layout::{Axis, div_ceil, tensors};
use crate::target::Target;
use crate::{CompileError, Shape, pointwise};
use copy::Stage;
use fma::Fma;
use groups::Groups;
use ir::kernel::Kernel;
use ir::launch::Launch;
use mma::Mma;
use plan::{Core, Plan};

/// Tiles of rows that are computed at about the same time, with all their columns.
const GROUP: i64 = 8;

/// What the parts of a kernel under construction share.
pub struct Gpu<'a, 'c> {
    pub b: &'a Simt<'c>,
    pub kernel: &'a Kernel,
    pub product: &'a Product,
    pub plan: &'a Plan,
}

/// A part of a tile that is one product: rows `from..to`, contracted elements `k_from..k_to`. All but `outer` have 32 bits.
struct Part<'c> {
    /// The tile's first row and column.
    row: Index<'c>,
    column: Index<'c>,
    from: Index<'c>,
    to: Index<'c>,
    k_from: Index<'c>,
    k_to: Index<'c>,
    /// Which repetition of the product it is, and the first element of every tensor there.
    outer: Index<'c>,
    starts: Vec<Pointer<'c>>,
}

/// Writes the kernel `name` and reports what it needs.
///
/// # Errors
/// An op or dtype of the kernel is not supported.
pub fn emit(b: &Simt, kernel: &Kernel, target: &Target, name: &str) -> Result<(Shape, Launch), CompileError> {
    let product = Product::new(kernel)?;
    let plan = Plan::new(kernel, &product, target);
    let g = Gpu { b, kernel, product: &product, plan: &plan };
    let tensors = kernel.inputs.len() + kernel.outputs.len();
    let bounds = Bounds { threads: plan.threads() as u32, blocks: plan.tile.blocks };
    b.kernel_of_blocks(name, [tensors, kernel.scalars.len()], bounds, &mut |entry| {
        let tensors: Vec<Pointer> = (0..tensors).map(|i| b.load_pointer(b.at_const(entry.arguments, 8 * i as i64))).collect();
        g.tile(b.narrow(entry.first_tile), &tensors, entry.scalars)
    })?;
    let [rows, columns] = plan.grid(&product);
    let shape = Shape { tiles: (product.repeats() * rows * columns) as u64, scratch_bytes: 0 };
    Ok((shape, launch_of_blocks(kernel, &shape, bounds, plan.shared_bytes() as u32)))
}

/// A thread's part of the arithmetic.
enum Multiplier<'c> {
    Tensor(Mma<'c>),
    Groups(Groups<'c>),
    Plain(Fma<'c>),
}

impl<'c> Multiplier<'c> {
    fn new(g: &Gpu<'_, 'c>) -> Self {
        match g.plan.core {
            Core::Tensor(half) => Multiplier::Tensor(Mma::new(g, half)),
            Core::Groups(half) => Multiplier::Groups(Groups::new(g, half)),
            Core::Plain => Multiplier::Plain(Fma::new(g)),
        }
    }

    fn zero(&self, b: &Simt<'c>) -> Vec<Value<'c>> {
        match self {
            Multiplier::Tensor(x) => x.zero(b),
            Multiplier::Groups(x) => x.zero(b),
            Multiplier::Plain(x) => x.zero(b),
        }
    }

    fn multiply(&self, b: &Simt<'c>, factors: [Index<'c>; 2], sums: &mut [Value<'c>]) {
        match self {
            Multiplier::Tensor(x) => x.multiply(b, factors, sums),
            Multiplier::Groups(x) => x.multiply(b, factors, sums),
            Multiplier::Plain(x) => x.multiply(b, factors, sums),
        }
    }

    /// Before what this thread copied is multiplied by others.
    fn show(&self, b: &Simt<'c>) {
        match self {
            Multiplier::Tensor(_) | Multiplier::Plain(_) => {}
            Multiplier::Groups(x) => x.show(b),
        }
    }

    /// Whether other warps may still read the stages after the last products. Those of a warpgroup wait for each other's.
    fn leaves_readers(&self, plan: &Plan) -> bool {
        match self {
            Multiplier::Tensor(_) | Multiplier::Plain(_) => true,
            Multiplier::Groups(_) => plan.threads() > groups::THREADS,
        }
    }

    /// After the last products.
    fn finish(&self, b: &Simt<'c>) {
        match self {
            Multiplier::Tensor(_) | Multiplier::Plain(_) => {}
            Multiplier::Groups(x) => x.finish(b),
        }
    }

    fn store(&self, b: &Simt<'c>, to: Index<'c>, row_bytes: i64, sums: &[Value<'c>]) {
        match self {
            Multiplier::Tensor(x) => x.store(b, to, row_bytes, sums),
            Multiplier::Groups(x) => x.store(b, to, row_bytes, sums),
            Multiplier::Plain(x) => x.store(b, to, row_bytes, sums),
        }
    }
}

impl<'c> Gpu<'_, 'c> {
    fn bytes(&self, tensor: usize) -> i64 {
        pointwise::stored(tensors(self.kernel)[tensor].0.dtype).bytes()
    }

    /// One tile; numbers count those of a group of rows first.
    fn tile(&self, number: Index<'c>, tensors: &[Pointer<'c>], scalars: Pointer<'c>) -> Result<(), CompileError> {
        let (b, product, tile) = (self.b, self.product, &self.plan.tile);
        let [rows, columns] = self.plan.grid(product);
        let (outer, number) = (b.index_div(number, b.word(rows * columns)), b.index_rem(number, b.word(rows * columns)));
        let (group, within) = (b.index_div(number, b.word(GROUP * columns)), b.index_rem(number, b.word(GROUP * columns)));
        let first = b.index_mul(group, b.word(GROUP));
        let height = b.least(b.word(GROUP), b.index_sub(b.word(rows), first));
        let row = b.index_mul(b.index_add(first, b.index_rem(within, height)), b.word(tile.rows));
        let column = b.index_mul(b.index_div(within, height), b.word(tile.columns));
        let outer = b.widen(outer);
        let starts: Vec<Pointer> = (0..tensors.len()).map(|t| self.shifted(tensors[t], outer, &product.outer, t)).collect();
        let end = b.least(b.index_add(row, b.word(tile.rows)), b.word(product.m.size));
        let (none, all) = (b.word(0), b.word(product.k.size));
        let whole = Part { row, column, from: row, to: end, k_from: none, k_to: all, outer, starts };
        match &product.experts {
            Some(experts) if experts.own == Own::Rows => self.rows_of_experts(experts, &whole, scalars),
            Some(_) | None => self.part(&whole, scalars),
        }
    }

    /// `start` moved to the repetition `number` of `axes`, whose last is the fastest.
    fn shifted(&self, start: Pointer<'c>, number: Index<'c>, axes: &[Axis], tensor: usize) -> Pointer<'c> {
        let b = self.b;
        let (mut place, mut rest) = (start, number);
        for axis in axes.iter().rev() {
            let digit = b.index_rem(rest, b.index(axis.size));
            rest = b.index_div(rest, b.index(axis.size));
            place = b.at(place, b.index_mul(digit, b.index(self.bytes(tensor) * axis.strides[tensor])));
        }
        place
    }

    /// What an expert, whose end is at `end`, owns of `size`: from the end of the one before to its own.
    fn owned(&self, experts: &Experts, end: Pointer<'c>, expert: Index<'c>, size: i64) -> [Index<'c>; 2] {
        let b = self.b;
        let is_first = b.equal(expert, b.word(0));
        let back = b.choose(is_first, b.index(0), b.index(-4 * experts.axis.strides[experts.ends]));
        let read = |at| b.least(b.load_splat(at, crate::build::Lane::I32).into_int_value(), b.word(size));
        let from = b.choose(is_first, b.word(0), read(b.at(end, back)));
        [from, b.most(from, read(end))]
    }

    /// A tile of rows: those of every expert with its factor, then those of nobody, without any contracted element.
    fn rows_of_experts(&self, experts: &Experts, whole: &Part<'c>, scalars: Pointer<'c>) -> Result<(), CompileError> {
        let (b, product) = (self.b, self.product);
        let count = experts.axis.size;
        let mut result = Ok(());
        b.loop_over([b.word(0), b.word(count + 1), b.word(1)], &[], &mut |number, _| {
            let nobody = b.equal(number, b.word(count));
            let expert = b.least(number, b.word(count - 1));
            let moved = |tensor: usize| {
                let step = b.index(self.bytes(tensor) * experts.axis.strides[tensor]);
                b.at(whole.starts[tensor], b.index_mul(b.widen(expert), step))
            };
            let [from, to] = self.owned(experts, moved(experts.ends), expert, product.m.size);
            let (from, to) = (b.choose(nobody, to, from), b.choose(nobody, b.word(product.m.size), to));
            let (from, to) = (b.most(from, whole.from), b.least(to, whole.to));
            let k_to = b.choose(nobody, b.word(0), whole.k_to);
            let mut starts = whole.starts.clone();
            starts[product.b] = moved(product.b);
            let part = Part { from, to, k_to, starts, ..*whole };
            b.if_so(b.less(from, to), || result = self.part(&part, scalars));
            vec![]
        });
        result
    }

    /// One product, and what follows it.
    fn part(&self, part: &Part<'c>, scalars: Pointer<'c>) -> Result<(), CompileError> {
        let b = self.b;
        let multiplier = Multiplier::new(self);
        let sums = self.sums(&multiplier, part);
        // Where nobody reads the stages any more the sums take their place.
        if multiplier.leaves_readers(self.plan) {
            b.barrier();
        }
        multiplier.store(b, b.shared(), self.plan.sums_row(), &sums);
        b.barrier();
        self.epilogue(part, scalars)?;
        b.barrier();
        Ok(())
    }

    /// The sums over all contracted elements.
    fn sums(&self, multiplier: &Multiplier<'c>, part: &Part<'c>) -> Vec<Value<'c>> {
        let (b, product) = (self.b, self.product);
        let repeats: i64 = product.outer_k.iter().map(|x| x.size).product();
        let zero = multiplier.zero(b);
        let experts = product.experts.as_ref().filter(|x| x.own == Own::Contracted);
        let Some(experts) = experts else { return self.stages(multiplier, part, None, zero) };
        // What the expert owns may differ among the repetitions of the contracted elements.
        b.loop_over([b.word(0), b.word(repeats), b.word(1)], &zero, &mut |repeat, sums| {
            let each = product.repeats() / experts.axis.size;
            let expert = b.narrow(b.index_div(part.outer, b.index(each)));
            // The repetition of the product has moved the ends to the expert's own.
            let end = self.shifted(part.starts[experts.ends], b.widen(repeat), &product.outer_k, experts.ends);
            let [k_from, k_to] = self.owned(experts, end, expert, product.k.size);
            let part = Part { k_from, k_to, starts: part.starts.clone(), ..*part };
            let sums = self.stages(multiplier, &part, Some(repeat), sums.to_vec());
            if repeats > 1 {
                b.barrier();
            }
            sums
        })
    }

    /// The sums of all stages, in one repetition of the contracted elements or in all, added to others.
    fn stages(&self, multiplier: &Multiplier<'c>, part: &Part<'c>, repeat: Option<Index<'c>>, sums: Vec<Value<'c>>) -> Vec<Value<'c>> {
        let (b, plan, product) = (self.b, self.plan, self.product);
        let (depth, stages, ahead) = (b.word(plan.tile.depth), plan.tile.stages, plan.ahead());
        let [first, second] =
            [(&plan.a, part.row), (&plan.b, part.column)].map(|(copy, own)| copy.place(b, b.address(part.starts[copy.tensor]), own));
        let length = b.index_sub(part.k_to, part.k_from);
        let rounds = b.index_div(b.index_add(length, b.word(plan.tile.depth - 1)), depth);
        let repeats: i64 = product.outer_k.iter().map(|x| x.size).product();
        let steps = if repeat.is_some() { rounds } else { b.index_mul(rounds, b.word(repeats)) };
        let base = b.shared();
        let fill = |step: Index<'c>, offset: Index<'c>| {
            let (repeat, round) = match repeat {
                Some(repeat) => (repeat, step),
                None if repeats == 1 => (b.word(0), step),
                None => (b.index_div(step, rounds), b.index_rem(step, rounds)),
            };
            let k = b.index_add(part.k_from, b.index_mul(round, depth));
            let to = b.index_add(base, offset);
            plan.a.fill(self, &first, Stage { to, k, k_end: part.k_to, repeat });
            plan.b.fill(self, &second, Stage { to: b.index_add(to, b.word(plan.a.bytes())), k, k_end: part.k_to, repeat });
        };
        let commit = || b.asm(Instruction::CommitCopies, &[]);
        for step in 0..ahead {
            let number = b.word(step);
            b.if_so(b.less(number, steps), || fill(number, b.word(step * plan.stage_bytes())));
            commit();
        }
        let bytes = b.word(plan.stage_bytes());
        let next = |offset: Index<'c>| {
            let end = b.equal(offset, b.word((stages - 1) * plan.stage_bytes()));
            b.choose(end, b.word(0), b.index_add(offset, bytes))
        };
        let (count, mut carried) = (sums.len(), sums);
        carried.extend([b.word(0), b.word(ahead * plan.stage_bytes())].map(Value::from));
        let out = b.loop_over([b.word(0), steps, b.word(1)], &carried, &mut |step, carried| {
            let [read, write] = [0, 1].map(|k| carried[count + k].into_int_value());
            b.asm(Instruction::WaitCopies { left: ahead as u32 - 1 }, &[]);
            multiplier.show(b);
            // This stage is there, and that which is filled next has been read, by all.
            b.barrier();
            let later = b.index_add(step, b.word(ahead));
            b.if_so(b.less(later, steps), || fill(later, write));
            commit();
            let mut sums = carried[..count].to_vec();
            let at = b.index_add(base, read);
            multiplier.multiply(b, [at, b.index_add(at, b.word(plan.a.bytes()))], &mut sums);
            sums.extend([next(read), next(write)].map(Value::from));
            sums
        });
        multiplier.finish(b);
        out[..count].to_vec()
    }

    /// The ops after the product, a row to a warp.
    fn epilogue(&self, part: &Part<'c>, scalars: Pointer<'c>) -> Result<(), CompileError> {
        let (b, plan, product) = (self.b, self.plan, self.product);
        let (row, column) = (b.widen(part.row), b.widen(part.column));
        let place = |(tensor, start): (usize, &Pointer<'c>)| {
            let bytes = |stride: i64| b.index(self.bytes(tensor) * stride);
            let down = b.at(*start, b.index_mul(row, bytes(product.m.strides[tensor])));
            b.at(down, b.index_mul(column, bytes(product.n.strides[tensor])))
        };
        let tensors = part.starts.iter().enumerate().map(place).collect();
        let epilogue = Epilogue { b, kernel: self.kernel, product, scalars, tensors, row, column, outer: part.outer };
        let thread = b.thread();
        let (warp, lane) = (b.index_div(thread, b.word(LANES as i64)), b.index_rem(thread, b.word(LANES as i64)));
        let lanes = b.index_add(b.shared(), b.index_mul(lane, b.word(4)));
        let warps = b.word(plan.threads() / LANES as i64);
        let mut result = Ok(());
        let from = b.index_add(b.index_sub(part.from, part.row), warp);
        b.loop_over([from, b.index_sub(part.to, part.row), warps], &[], &mut |row, _| {
            let line = b.index_add(lanes, b.index_mul(row, b.word(plan.sums_row())));
            for j in 0..div_ceil(plan.tile.columns, LANES as i64) {
                let first = j * LANES as i64;
                let sum = b.load_shared(b.index_add(line, b.word(4 * first)), 1)[0];
                let left = || b.index_sub(b.word(product.n.size - first), part.column);
                let mask = (product.n.size % plan.tile.columns != 0).then(|| b.less(lane, left()).into());
                let done = epilogue.write(Spot { row: b.widen(row), column: first, mask }, sum);
                if result.is_ok() {
                    result = done;
                }
            }
            vec![]
        });
        result
    }
}
