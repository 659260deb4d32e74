//! When the lanes of a warp have runs: several neighbours each, so that a lane reads and writes up to 16 bytes at a
//! time, and what is the same for a whole row is computed once per run.
//!
//! All that is read or written along the vector dim must lie together and be aligned to runs, what fills a part of a
//! longer dim must fill whole runs, and nothing may be kept along it in scratch. Where outputs begin is found at run
//! time ([`crate::build::Builder::if_aligned`]).

use super::plan::Step;
use crate::layout::tensors;
use crate::pointwise;
use ir::dim::Dim;
use ir::kernel::Kernel;
use ir::op::Op;
use std::collections::BTreeSet;

/// The elements of the runs that lanes have along `vector`, if any.
pub fn width(kernel: &Kernel, vector: Dim, steps: &[Step], lanes: i64) -> Option<i64> {
    let body = &kernel.body;
    let kept = |s: &Step| match s {
        Step::Reduce { left, .. } => left.contains(&vector),
        Step::Cumsum { .. } => true,
        Step::Store { .. } => false,
    };
    if steps.iter().any(kept) {
        return None;
    }
    // `dims` are those that lanes run along with `vector`. Runs must divide all of `borders`.
    let mut dims = BTreeSet::from([vector]);
    let mut borders = vec![body.dims.size(vector)];
    for node in body.nodes.iter().rev() {
        match &node.op {
            Op::Pad { from, to, at } if dims.contains(to) => {
                let from = (*from)?;
                borders.extend([*at, body.dims.size(from)]);
                dims.insert(from);
            }
            Op::Concat { from, to } if dims.contains(to) => {
                borders.extend(from.iter().map(|d| body.dims.size(*d)));
                dims.extend(from);
            }
            _ => {}
        }
    }
    let all = tensors(kernel);
    let (mut widest, mut narrowest) = (2, 4);
    let mut others = vec![];
    for (number, (ty, strides)) in all.iter().enumerate() {
        let bytes = pointwise::stored(ty.dtype).bytes() as u64;
        let along: Vec<u64> = ty.dims.iter().zip(strides.iter()).filter(|(d, _)| dims.contains(d)).map(|(_, s)| *s).collect();
        if along.iter().all(|s| *s == 0) {
            continue;
        }
        let anywhere = kernel.inputs.get(number).is_some_and(|i| i.unaligned);
        if along != [1] || anywhere {
            return None;
        }
        (widest, narrowest) = (widest.max(bytes), narrowest.min(bytes));
        others.extend(ty.dims.iter().zip(strides.iter()).filter(|(d, _)| !dims.contains(d)).map(|(_, s)| (*s, bytes)));
    }
    let fits = |width: &u64| {
        let size = body.dims.size(vector);
        let aligned = others.iter().all(|(stride, bytes)| (stride * bytes).is_multiple_of((width * bytes).min(16)));
        size >= width * lanes as u64 && borders.iter().all(|x| x.is_multiple_of(*width)) && aligned
    };
    // Runs must be whole words of 4 bytes, which is what lanes read.
    let widths: Vec<u64> = [8, 4, 2].into_iter().filter(|w| w * widest <= 16 && w * narrowest >= 4).filter(fits).collect();
    let whole = widths.iter().find(|w| body.dims.size(vector).is_multiple_of(*w * lanes as u64));
    whole.or(widths.first()).map(|w| *w as i64)
}

#[cfg(test)]
mod tests {
    use super::super::plan::LoopPlan;
    use crate::object::{self, Emit};
    use crate::target::Target;
    use crate::testing::{KernelDraft, check, random_inputs, run_ptx_shifted};
    use ir::dim::Dim;
    use ir::graph::{Type, Value};
    use ir::kernel::{Family, Kernel};
    use ir::op::{Binary, DType, Op, Reduce, Unary};

    /// `(x - mean) / sqrt(variance) * w` in 16-bit floats, computed in f32, with `w` of another type.
    fn norm(rows: u64, size: u64, weight: DType) -> (Kernel, Dim) {
        let mut make = KernelDraft::default();
        let [s, h] = [("s", rows), ("h", size)].map(|(n, s)| make.dim(n, s));
        let x = make.input(DType::Bf16, &[s, h]);
        let w = make.input(weight, &[h]);
        let wide = |make: &mut KernelDraft, v: Value, dims: &[Dim]| make.op_as(Op::Cast, &[v], Type::new(DType::F32, dims));
        let (x, w) = (wide(&mut make, x, &[s, h]), wide(&mut make, w, &[h]));
        let sum = Op::Reduce { kind: Reduce::Sum, over: vec![h] };
        let share = make.number(1.0 / size as f64);
        let total = make.op(sum.clone(), &[x]);
        let mean = make.op(Op::Binary(Binary::Mul), &[total, share]);
        let apart = make.op(Op::Binary(Binary::Sub), &[x, mean]);
        let square = make.op(Op::Binary(Binary::Mul), &[apart, apart]);
        let squares = make.op(sum, &[square]);
        let variance = make.op(Op::Binary(Binary::Mul), &[squares, share]);
        let inverse = make.op(Op::Unary(Unary::Rsqrt), &[variance]);
        let normal = make.op(Op::Binary(Binary::Mul), &[apart, inverse]);
        let scaled = make.op(Op::Binary(Binary::Mul), &[normal, w]);
        let narrow = make.op_as(Op::Cast, &[scaled], Type::new(DType::Bf16, [s, h]));
        (make.kernel(Family::Loops { grid: vec![s] }, &[narrow, inverse]), s)
    }

    fn width(kernel: &Kernel, grid: &[Dim]) -> Option<i64> {
        LoopPlan::new(kernel, grid, &Target::gpu("sm_90a")).run
    }

    #[test]
    fn runs_have_16_bytes_of_the_widest_elements_or_what_the_sizes_allow() {
        let of = |size, weight| {
            let (kernel, s) = norm(4, size, weight);
            width(&kernel, &[s])
        };
        assert_eq!(of(512, DType::Bf16), Some(8));
        assert_eq!(of(512, DType::F32), Some(4), "16 bytes of f32");
        assert_eq!(of(128, DType::Bf16), Some(4), "the longest of which a warp has whole ones");
        assert_eq!(of(96, DType::Bf16), Some(2));
        assert_eq!(of(510, DType::Bf16), Some(2), "rows begin at multiples of 4 bytes");
        assert_eq!(of(511, DType::Bf16), None, "rows begin anywhere");
        assert_eq!(of(32, DType::Bf16), None, "a lane has one element");
        let (mut kernel, s) = norm(4, 512, DType::Bf16);
        kernel.inputs[0].unaligned = true;
        assert_eq!(width(&kernel, &[s]), None, "the operand may begin anywhere");
        assert_eq!(LoopPlan::new(&kernel, &[s], &Target::x86_64_v3()).run, None, "lanes of CPUs have one element each");
    }

    #[test]
    fn norms_agree_whatever_the_runs() {
        for (size, weight) in [(512, DType::Bf16), (512, DType::F32), (128, DType::Bf16), (96, DType::F16), (328, DType::Bf16), (1000, DType::F32)] {
            check(&norm(3, size, weight).0, &[], 1e-2);
        }
    }

    #[test]
    fn elements_columns_and_windows_agree_in_runs() {
        // The first kernel is elementwise along the grid, with indices and a mask, and adds to its output.
        let mut make = KernelDraft::default();
        let [s, h] = [("s", 3), ("h", 288)].map(|(n, s)| make.dim(n, s));
        let x = make.input(DType::Bf16, &[s, h]);
        let row = make.input(DType::F32, &[s]);
        let flags = make.input(DType::Bool, &[s, h]);
        let number = make.source(Op::Iota(h), DType::I32, &[h]);
        let number = make.op_as(Op::Cast, &[number], Type::new(DType::F32, [h]));
        let wide = make.op_as(Op::Cast, &[x], Type::new(DType::F32, [s, h]));
        let sum = make.op(Op::Add, &[wide, number, row]);
        let chosen = make.op(Op::Select, &[flags, sum, wide]);
        let mut kernel = make.kernel(Family::Loops { grid: vec![s, h] }, &[chosen]);
        kernel.outputs[0].accumulate = true;
        assert_eq!(width(&kernel, &[s, h]), Some(4));
        check(&kernel, &[], 1e-2);

        // The second kernel sums over rows. It has so many columns that no warps share one, and each lane has a run
        // of columns.
        let mut make = KernelDraft::default();
        let [s, h] = [("s", 5), ("h", 34_048)].map(|(n, s)| make.dim(n, s));
        let x = make.input(DType::F32, &[s, h]);
        let sum = make.op(Op::Reduce { kind: Reduce::Sum, over: vec![s] }, &[x]);
        let greatest = make.op(Op::Reduce { kind: Reduce::Max, over: vec![s] }, &[x]);
        let both = make.op(Op::Binary(Binary::Mul), &[sum, greatest]);
        let kernel = make.kernel(Family::Loops { grid: vec![h] }, &[both]);
        assert_eq!(width(&kernel, &[h]), Some(4));
        check(&kernel, &[], 1e-5);

        // The third kernel swaps halves, as rotary embeddings do, and looks up rows.
        let mut make = KernelDraft::default();
        let [v, s, half, d, rest] = [("v", 7), ("s", 3), ("half", 64), ("d", 128), ("rest", 136)].map(|(n, s)| make.dim(n, s));
        let table = make.input(DType::Bf16, &[v, half]);
        let index = make.input(DType::I32, &[s]);
        let [a, b] = [0, 1].map(|_| make.input(DType::Bf16, &[s, half]));
        let rows = make.op(Op::Gather { dim: v }, &[table, index]);
        let first = make.op(Op::Add, &[rows, a]);
        let first = make.ordered(first, &[s, half]);
        let turned = make.op(Op::Concat { from: vec![half, half], to: d }, &[first, b]);
        let turned = make.ordered(turned, &[s, d]);
        let padded = make.op(Op::Pad { from: Some(d), to: rest, at: 8 }, &[turned]);
        let padded = make.ordered(padded, &[s, rest]);
        let kernel = make.kernel(Family::Loops { grid: vec![s] }, &[padded]);
        assert!(width(&kernel, &[s]).is_some_and(|w| w > 1), "{:?}", width(&kernel, &[s]));
        check(&kernel, &[], 1e-2);
    }

    #[test]
    fn windows_that_cut_runs_have_none() {
        let mut make = KernelDraft::default();
        let [s, d, rest] = [("s", 3), ("d", 128), ("rest", 256)].map(|(n, s)| make.dim(n, s));
        let x = make.input(DType::Bf16, &[s, d]);
        let padded = make.op(Op::Pad { from: Some(d), to: rest, at: 3 }, &[x]);
        let padded = make.ordered(padded, &[s, rest]);
        let kernel = make.kernel(Family::Loops { grid: vec![s] }, &[padded]);
        assert_eq!(width(&kernel, &[s]), None);
        check(&kernel, &[], 0.0);
    }

    #[test]
    fn outputs_may_begin_anywhere_and_inputs_where_they_say() {
        let (kernel, _) = norm(3, 512, DType::Bf16);
        let compiled = object::compile(&kernel, &Target::gpu("sm_90a"), Emit::default()).expect("the kernel compiles");
        let ptx = String::from_utf8(compiled.object.clone()).expect("PTX is text");
        let inputs = random_inputs(&kernel, 1, 7);
        let options = emulator::Options::default;
        let run = |shifts| run_ptx_shifted(&kernel, &compiled, &ptx, options(), &inputs, &[], 2.0, shifts).map(|(outputs, _)| outputs);
        let usual = run([0, 0]).expect("all begin at multiples of 16 bytes");
        assert_eq!(run([0, 4]).expect("outputs do not"), usual);
        assert!(run([4, 0]).expect_err("inputs said that they do").contains("align"), "{:?}", run([4, 0]));
    }
}
