use super::plan::LoopPlan;
use crate::object::{self, Emit};
use crate::target::Target;
use crate::testing::{KernelDraft, RandomNumbers, check, check_with, emulate, golden, random_inputs, run, seeds};
use ir::dim::{Base, Dim, DimInfo, IndexMap};
use ir::graph::{Type, Value};
use ir::kernel::{Family, Kernel};
use ir::op::{Binary, Compare, DType, Op, Reduce, Unary};

fn unary_kernel(op: Unary, size: u64) -> Kernel {
    let mut make = KernelDraft::default();
    let d = make.dim("d", size);
    let x = make.input(DType::F32, &[d]);
    let y = make.op(Op::Unary(op), &[x]);
    make.kernel(Family::Loops { grid: vec![d] }, &[y])
}

#[test]
fn every_float_function_agrees() {
    for op in Unary::ALL.iter().copied().filter(|op| *op != Unary::Not) {
        let kernel = unary_kernel(op, 37);
        let mut inputs = random_inputs(&kernel, 3, 1);
        for x in &mut inputs[0] {
            let wanted = match op {
                Unary::Log | Unary::Sqrt | Unary::Rsqrt => x.abs() * 9.0 + 0.01,
                Unary::Recip => *x + 2.0,
                _ => *x * 9.0,
            };
            *x = f64::from(wanted as f32);
        }
        inputs[0][0] = if op == Unary::Recip { 4.0 } else { 0.0 };
        check_with(&kernel, &inputs, &[], 1e-6);
    }
}

#[test]
fn every_operation_of_two_operands_agrees() {
    for dtype in [DType::F32, DType::I32, DType::Bool] {
        for op in Binary::ALL.iter().copied().filter(|op| op.takes(dtype)) {
            let mut make = KernelDraft::default();
            let d = make.dim("d", 50);
            let (x, y) = (make.input(dtype, &[d]), make.input(dtype, &[d]));
            let z = make.op(Op::Binary(op), &[x, y]);
            let kernel = make.kernel(Family::Loops { grid: vec![d] }, &[z]);
            let mut inputs = random_inputs(&kernel, 5, 9);
            if dtype == DType::F32 {
                inputs[0].iter_mut().for_each(|x| *x = if op == Binary::Pow { x.abs() } else { *x * 8.0 });
            }
            if dtype == DType::I32 {
                inputs[0].iter_mut().for_each(|x| *x -= if op == Binary::Pow { 0.0 } else { 4.0 });
                inputs[1].iter_mut().for_each(|y| *y = (*y % 4.0 + 1.0) * if *y > 4.0 && op != Binary::Pow { -1.0 } else { 1.0 });
            }
            check_with(&kernel, &inputs, &[], 2e-6);
        }
    }
}

#[test]
fn comparisons_selections_and_casts_agree() {
    for dtype in [DType::F32, DType::I32, DType::Bool] {
        for op in Compare::ALL {
            let mut make = KernelDraft::default();
            let d = make.dim("d", 21);
            let (x, y) = (make.input(dtype, &[d]), make.input(dtype, &[d]));
            let less = make.op(Op::Compare(*op), &[x, y]);
            let picked = make.op(Op::Select, &[less, x, y]);
            let outputs: Vec<Value> = [DType::F32, DType::I32, DType::Bool]
                .into_iter()
                .map(|to| make.op_as(Op::Cast, &[picked], Type::new(to, [d])))
                .chain([less])
                .collect();
            check(&make.kernel(Family::Loops { grid: vec![d] }, &outputs), &[], 1e-6);
        }
    }
}

#[test]
fn ints_have_signs() {
    for op in [Unary::Neg, Unary::Abs, Unary::Sign] {
        let mut make = KernelDraft::default();
        let d = make.dim("d", 21);
        let x = make.input(DType::I32, &[d]);
        let y = make.op(Op::Unary(op), &[x]);
        let kernel = make.kernel(Family::Loops { grid: vec![d] }, &[y]);
        let inputs = vec![(0..21).map(|i| f64::from(i - 10)).collect()];
        check_with(&kernel, &inputs, &[], 0.0);
    }
}

/// A norm over the last dims: mean, variance, scale.
fn norm(sizes: [u64; 3], inner: usize) -> Kernel {
    let mut make = KernelDraft::default();
    let dims: Vec<Dim> = sizes.iter().map(|s| make.dim("d", *s)).collect();
    let (grid, over) = dims.split_at(dims.len() - inner);
    let x = make.input(DType::F32, &dims);
    let g = make.input(DType::F32, over);
    let count = make.number(over.iter().map(|d| make.body.dims.size(*d) as f64).product());
    let sum = make.op(Op::Reduce { kind: Reduce::Sum, over: over.to_vec() }, &[x]);
    let mean = make.op(Op::Binary(Binary::Div), &[sum, count]);
    let centred = make.op(Op::Binary(Binary::Sub), &[x, mean]);
    let square = make.op(Op::Binary(Binary::Mul), &[centred, centred]);
    let sum = make.op(Op::Reduce { kind: Reduce::Sum, over: over.to_vec() }, &[square]);
    let one = make.number(1.0);
    let sum = make.op(Op::Add, &[sum, one]);
    let scale = make.op(Op::Unary(Unary::Rsqrt), &[sum]);
    let y = make.op(Op::Binary(Binary::Mul), &[centred, scale]);
    let y = make.op(Op::Binary(Binary::Mul), &[y, g]);
    make.kernel(Family::Loops { grid: grid.to_vec() }, &[y, mean])
}

#[test]
fn norms_agree_along_any_number_of_dims() {
    for sizes in [[2, 3, 100], [1, 5, 16], [4, 7, 5], [3, 2, 130]] {
        for inner in 1..=3 {
            check(&norm(sizes, inner), &[], 1e-5);
        }
    }
}

#[test]
fn column_sums_run_along_the_grid() {
    let mut make = KernelDraft::default();
    let [b, s, h] = [("b", 3), ("s", 9), ("h", 70)].map(|(n, s)| make.dim(n, s));
    let (x, dy) = (make.input(DType::F32, &[b, s, h]), make.input(DType::F32, &[b, s, h]));
    let product = make.op(Op::Binary(Binary::Mul), &[x, dy]);
    let weight = make.op(Op::Reduce { kind: Reduce::Sum, over: vec![b, s] }, &[product]);
    let bias = make.op(Op::Reduce { kind: Reduce::Sum, over: vec![b, s] }, &[dy]);
    let mut kernel = make.kernel(Family::Loops { grid: vec![h] }, &[weight, bias]);
    kernel.outputs[1].accumulate = true;
    check(&kernel, &[], 1e-5);
}

/// On a GPU warps of a block share the rows: of columns that are no multiple of a warp, of several results, with what
/// is done to them, and added to what is there.
#[test]
fn warps_of_a_block_share_sums_over_many_rows() {
    for (dtype, rows, members) in [(DType::F32, [3, 256], 16), (DType::Bf16, [2, 96], 4), (DType::F32, [1, 33], 1)] {
        let mut make = KernelDraft::default();
        let [i, s, h] = [("i", rows[0]), ("s", rows[1]), ("h", 75)].map(|(n, size)| make.dim(n, size));
        let (x, y) = (make.input(dtype, &[i, s, h]), make.input(dtype, &[i, s, h]));
        let sum = make.op_as(Op::Reduce { kind: Reduce::Sum, over: vec![i, s] }, &[x], Type::new(DType::F32, [h]));
        let dot = make.op_as(Op::dot(vec![i, s]), &[x, y], Type::new(DType::F32, [h]));
        let scaled = make.op(Op::Unary(Unary::Neg), &[dot]);
        let mut kernel = make.kernel(Family::Loops { grid: vec![h] }, &[sum, scaled]);
        kernel.outputs[0].accumulate = true;
        let inputs: Vec<Vec<f64>> = (0..2).map(|k| (0..rows[0] * rows[1] * 75).map(|e| ((e * 7 + k * 3) % 5) as f64 - 2.0).collect()).collect();
        check_with(&kernel, &inputs, &[], 1e-6);
        for cpu in ["sm_80", "sm_90a"] {
            let target = Target::named(cpu).expect("known");
            let compiled = object::compile(&kernel, &target, Emit::default()).expect("compiled");
            let block = compiled.launch.as_ref().expect("of a GPU").block;
            assert_eq!(block, if members == 1 { 128 } else { 32 * members }, "{cpu}");
            assert_eq!(emulate(&kernel, &target, &inputs, &[], 1.0), run(&kernel, &Target::x86_64_v3(), &inputs, &[], 1.0), "{cpu}");
        }
    }
}

/// The gradient of a norm that divides rows of `h` by what it is of: one pass over rows, and the sum of its rows
/// times factors.
#[test]
fn dots_of_rows_and_columns_are_summed_among_other_ops() {
    for (dtype, h) in [(DType::F32, 70), (DType::F32, 300), (DType::Bf16, 300)] {
        for by_rows in [true, false] {
            let mut make = KernelDraft::default();
            let [b, s, h] = [("b", 3), ("s", 9), ("h", h)].map(|(n, s)| make.dim(n, s));
            let (x, dy, scale) = (make.input(dtype, &[b, s, h]), make.input(dtype, &[b, s, h]), make.input(dtype, &[b, s]));
            let scaled = make.op(Op::Binary(Binary::Mul), &[x, scale]);
            let kernel = if by_rows {
                let dot = make.op(Op::dot(vec![h]), &[scaled, dy]);
                let back = make.op(Op::Binary(Binary::Mul), &[dot, x]);
                let sum = make.op(Op::Add, &[back, dy]);
                make.kernel(Family::Loops { grid: vec![b, s] }, &[sum, dot])
            } else {
                let dot = make.op(Op::dot(vec![b, s]), &[dy, scaled]);
                make.kernel(Family::Loops { grid: vec![h] }, &[dot])
            };
            check(&kernel, &[], if dtype == DType::F32 { 1e-5 } else { 2e-2 });
        }
    }
}

#[test]
fn reductions_leave_inner_dims_and_feed_later_nests() {
    for grid_size in [0, 1, 2] {
        let mut make = KernelDraft::default();
        let dims = [("b", 3), ("s", 5), ("h", 9), ("d", 18)].map(|(n, s)| make.dim(n, s));
        let [_, _, h, d] = dims;
        let x = make.input(DType::F32, &dims);
        let top = make.op(Op::Reduce { kind: Reduce::Max, over: vec![d] }, &[x]);
        let off = make.op(Op::Binary(Binary::Sub), &[x, top]);
        let e = make.op(Op::Unary(Unary::Exp), &[off]);
        let sum = make.op(Op::Reduce { kind: Reduce::Sum, over: vec![h] }, &[e]);
        let share = make.op(Op::Binary(Binary::Div), &[e, sum]);
        check(&make.kernel(Family::Loops { grid: dims[..grid_size].to_vec() }, &[share, sum, top]), &[], 1e-5);
    }
}

#[test]
fn the_greatest_element_is_found_with_the_lowest_index() {
    for (size, base) in [(5, 0.0), (16, 100.0), (75, 3.0)] {
        let mut make = KernelDraft::default();
        let s = make.dim("s", 4);
        let v = make.sharded_dim("v", size, 1000, 0);
        make.scalar(DType::I32);
        let x = make.input(DType::F32, &[s, v]);
        let best = make.op(Op::ArgMax { over: v }, &[x]);
        let zero = make.number(0.0);
        let positive = make.op(Op::Compare(Compare::Gt), &[x, zero]);
        let any = make.op(Op::Reduce { kind: Reduce::Any, over: vec![v] }, &[positive]);
        let kernel = make.kernel(Family::Loops { grid: vec![s] }, &[best, any]);
        let mut inputs = random_inputs(&kernel, 2, 1);
        inputs[0].iter_mut().for_each(|x| *x = (*x * 3.0).floor());
        check_with(&kernel, &inputs, &[base], 0.0);
    }
}

#[test]
fn a_running_sum_goes_either_way() {
    for reverse in [false, true] {
        let mut make = KernelDraft::default();
        let [s, t, h] = [("s", 3), ("t", 11), ("h", 20)].map(|(n, s)| make.dim(n, s));
        let x = make.input(DType::F32, &[s, t, h]);
        let y = make.op(Op::Cumsum { over: t, reverse }, &[x]);
        let z = make.op(Op::Add, &[y, x]);
        check(&make.kernel(Family::Loops { grid: vec![s] }, &[z, y]), &[], 1e-5);
        let mut make = KernelDraft::default();
        let t = make.dim("t", 33);
        let x = make.input(DType::I32, &[t]);
        let y = make.op(Op::Cumsum { over: t, reverse }, &[x]);
        check(&make.kernel(Family::Loops { grid: vec![] }, &[y]), &[], 0.0);
    }
}

#[test]
fn running_sums_of_lanes_go_either_way() {
    // The cases cover unrolled vectors, single vectors, a partial vector at the end, and several rows.
    for (size, dtype) in [(256, DType::I32), (96, DType::I32), (133, DType::I32), (45, DType::F32), (512, DType::F32), (70, DType::Bf16)] {
        for reverse in [false, true] {
            let mut make = KernelDraft::default();
            let [e, t] = [("e", 3), ("t", size)].map(|(n, s)| make.dim(n, s));
            let x = make.input(dtype, &[e, t]);
            let y = make.op(Op::Cumsum { over: t, reverse }, &[x]);
            let z = make.op(Op::Add, &[y, x]);
            check(&make.kernel(Family::Loops { grid: vec![e] }, &[z]), &[], if dtype == DType::Bf16 { 2e-2 } else { 1e-5 });
        }
    }
}

#[test]
fn rows_are_gathered_and_missing_rows_are_zero() {
    let mut make = KernelDraft::default();
    let [b, s, h] = [("b", 2), ("s", 9), ("h", 20)].map(|(n, s)| make.dim(n, s));
    let v = make.sharded_dim("v", 5, 20, 0);
    make.scalar(DType::I32);
    let table = make.input(DType::F32, &[v, h]);
    let index = make.input(DType::I32, &[b, s]);
    let rows = make.op(Op::Gather { dim: v }, &[table, index]);
    let rows = make.ordered(rows, &[b, s, h]);
    for base in [0.0, 2.0, 9.0] {
        check(&make_clone(&make.body, &[(DType::F32, vec![v, h]), (DType::I32, vec![b, s])], vec![b, s, h], rows), &[base], 0.0);
    }
}

/// The same body as a kernel once more, with one scalar.
fn make_clone(body: &ir::graph::Body, inputs: &[(DType, Vec<Dim>)], grid: Vec<Dim>, output: Value) -> Kernel {
    let operand = |(dtype, dims): &(DType, Vec<Dim>)| {
        let ty = Type::new(*dtype, dims.clone());
        ir::kernel::Operand { strides: ir::kernel::dense(&body.dims, &ty), ty, unaligned: false }
    };
    let strides = ir::kernel::dense(&body.dims, &body[output].ty);
    Kernel {
        on: ir::program::Space::Device,
        family: Family::Loops { grid },
        body: body.clone(),
        inputs: inputs.iter().map(operand).collect(),
        scalars: vec![DType::I32],
        outputs: vec![ir::kernel::Output { value: output, strides, accumulate: false }],
    }
}

#[test]
fn one_element_per_row_is_picked_from_a_computed_table() {
    // The kernel picks the logit of the target, as cross entropy does.
    let mut make = KernelDraft::default();
    let [s, v] = [("s", 19), ("v", 7)].map(|(n, s)| make.dim(n, s));
    let logits = make.input(DType::F32, &[s, v]);
    let target = make.input(DType::I32, &[s]);
    let e = make.op(Op::Unary(Unary::Exp), &[logits]);
    let picked = make.op(Op::Gather { dim: v }, &[e, target]);
    let sum = make.op(Op::Reduce { kind: Reduce::Sum, over: vec![v] }, &[e]);
    let share = make.op(Op::Binary(Binary::Div), &[picked, sum]);
    let class = make.source(Op::Iota(v), DType::I32, &[v]);
    let hit = make.op(Op::Compare(Compare::Eq), &[class, target]);
    let one = make.op_as(Op::Cast, &[hit], Type::new(DType::F32, [s, v]));
    let p = make.op(Op::Binary(Binary::Div), &[e, sum]);
    let gradient = make.op(Op::Binary(Binary::Sub), &[p, one]);
    let gradient = make.ordered(gradient, &[s, v]);
    check(&make.kernel(Family::Loops { grid: vec![s] }, &[share, gradient]), &[], 1e-5);
}

#[test]
fn parts_are_joined_and_padded_along_any_dim() {
    for swap in [false, true] {
        let mut make = KernelDraft::default();
        let [s, a, b, c, ab] = [("s", 6), ("a", 13), ("b", 8), ("c", 20), ("ab", 21)].map(|(n, s)| make.dim(n, s));
        let dims = |d: Dim| if swap { [d, s] } else { [s, d] };
        let x = make.input(DType::F32, &dims(a));
        let y = make.input(DType::F32, &dims(b));
        let negative = make.op(Op::Unary(Unary::Neg), &[y]);
        let joined = make.op(Op::Concat { from: vec![a, b], to: ab }, &[x, negative]);
        let z = make.input(DType::F32, &dims(a));
        let padded = make.op(Op::Pad { from: Some(a), to: c, at: 3 }, &[z]);
        let single = make.input(DType::F32, &[s]);
        let row = make.op_as(Op::Pad { from: None, to: c, at: 17 }, &[single], Type::new(DType::F32, dims(c)));
        let both = make.op(Op::Add, &[padded, row]);
        let both = make.ordered(both, &dims(c));
        check(&make.kernel(Family::Loops { grid: vec![s] }, &[joined, both]), &[], 0.0);
    }
}

#[test]
fn a_sum_kept_in_scratch_can_be_padded() {
    let mut make = KernelDraft::default();
    let [s, h, d, wide] = [("s", 3), ("h", 9), ("d", 5), ("wide", 24)].map(|(n, s)| make.dim(n, s));
    let x = make.input(DType::F32, &[s, h, d]);
    let sum = make.op(Op::Reduce { kind: Reduce::Sum, over: vec![d] }, &[x]);
    let padded = make.op(Op::Pad { from: Some(h), to: wide, at: 7 }, &[sum]);
    let tail = make.input(DType::F32, &[s, wide]);
    let y = make.op(Op::Add, &[padded, tail]);
    check(&make.kernel(Family::Loops { grid: vec![s] }, &[y]), &[], 1e-6);
}

#[test]
fn storage_orders_change_and_operands_may_be_strided() {
    let mut make = KernelDraft::default();
    let [a, b, c] = [("a", 5), ("b", 18), ("c", 33)].map(|(n, s)| make.dim(n, s));
    let x = make.input(DType::F32, &[a, b, c]);
    let y = make.strided_input(DType::F32, &[b, c], &[99, 3]);
    let sum = make.op(Op::Add, &[x, y]);
    let sum = make.ordered(sum, &[c, a, b]);
    let mut kernel = make.kernel(Family::Loops { grid: vec![a, b, c] }, &[sum]);
    check(&kernel, &[], 1e-6);
    kernel.outputs[0].strides = vec![200, 2, 11];
    check(&kernel, &[], 1e-6);
}

#[test]
fn scalars_and_random_numbers_come_from_arguments() {
    let mut make = KernelDraft::default();
    let d = make.sharded_dim("d", 41, 1000, 0);
    let s = make.dim("s", 3);
    make.scalar(DType::I32);
    let rate = make.scalar(DType::F32);
    make.scalar(DType::I32);
    make.scalar(DType::I32);
    let x = make.input(DType::F32, &[s, d]);
    let u = make.source(Op::Uniform { key: 0xdead_beef_0123 }, DType::F32, &[s, d]);
    let keep = make.op(Op::Compare(Compare::Lt), &[u, rate]);
    let zero = make.number(0.0);
    let dropped = make.op(Op::Select, &[keep, x, zero]);
    let dropped = make.ordered(dropped, &[s, d]);
    check(&make.kernel(Family::Loops { grid: vec![s, d] }, &[dropped, u]), &[123.0, 0.7, 42.0, 9.0], 0.0);
}

#[test]
fn an_index_map_of_several_parts_is_followed() {
    let mut make = KernelDraft::default();
    // The map has two chunks of four elements, 20 apart.
    let index = IndexMap { parts: vec![(2, 20), (4, 1)], base: Base::Slot(0) };
    let d = make.body.dims.add(DimInfo { index, ..DimInfo::new("d", 8) });
    make.scalar(DType::I32);
    let s = make.dim("s", 10);
    let at = make.source(Op::Iota(d), DType::I32, &[d]);
    let table = make.input(DType::F32, &[d]);
    let ids = make.input(DType::I32, &[s]);
    let rows = make.op(Op::Gather { dim: d }, &[table, ids]);
    let both = make.op_as(Op::Cast, &[at], Type::new(DType::F32, [d]));
    let sum = make.op(Op::Add, &[both, rows]);
    let sum = make.ordered(sum, &[s, d]);
    let kernel = make.kernel(Family::Loops { grid: vec![s, d] }, &[sum]);
    let inputs = vec![(0..8).map(f64::from).collect(), vec![4.0, 5.0, 7.0, 8.0, 24.0, 27.0, 28.0, 3.0, 100.0, 26.0]];
    check_with(&kernel, &inputs, &[4.0], 0.0);
}

#[test]
fn a_kernel_without_dims_computes_one_number() {
    let mut make = KernelDraft::default();
    let (x, y) = (make.input(DType::F32, &[]), make.scalar(DType::F32));
    let z = make.op(Op::Binary(Binary::Mul), &[x, y]);
    check(&make.kernel(Family::Loops { grid: vec![] }, &[z]), &[3.0], 1e-6);
}

#[test]
fn special_values_stay_special() {
    let nan = f64::NAN;
    let values = vec![nan, f64::INFINITY, f64::NEG_INFINITY, 0.0, -0.0, 100.0, -200.0, 1e-40];
    for op in [Unary::Exp, Unary::Log, Unary::Tanh, Unary::Erf, Unary::Sqrt, Unary::Abs, Unary::Neg, Unary::Sign] {
        check_with(&unary_kernel(op, 8), std::slice::from_ref(&values), &[], 1e-5);
    }
    for op in [Binary::Max, Binary::Min, Binary::Div] {
        let mut make = KernelDraft::default();
        let (d, e) = (make.dim("d", 8), make.dim("e", 8));
        let (x, y) = (make.input(DType::F32, &[d]), make.input(DType::F32, &[e]));
        let z = make.op(Op::Binary(op), &[x, y]);
        let top = make.op(Op::Reduce { kind: Reduce::Max, over: vec![e] }, &[z]);
        let kernel = make.kernel(Family::Loops { grid: vec![d] }, &[z, top]);
        check_with(&kernel, &[values[..7].iter().copied().chain([1.0]).collect(), values[..7].iter().copied().chain([2.0]).collect()], &[], 1e-5);
    }
}

/// A random chain of ops over random dims, with reductions over what is not in the grid.
fn random_kernel(seed: u64) -> Kernel {
    let mut numbers = RandomNumbers::new(seed);
    let mut make = KernelDraft::default();
    let sizes = [1, 2, 3, 5, 8, 15, 16, 17, 33, 40];
    let dims: Vec<Dim> = (0..numbers.below(3) + 1).map(|_| make.dim("d", sizes[numbers.below(10) as usize])).collect();
    let grid: Vec<Dim> = dims.iter().copied().filter(|_| numbers.below(2) == 0).collect();
    let mut values = Vec::new();
    for _ in 0..numbers.below(3) + 1 {
        let own: Vec<Dim> = dims.iter().copied().filter(|_| numbers.below(3) != 0).collect();
        values.push(make.input(DType::F32, &own));
    }
    values.push(make.input(DType::F32, &dims));
    for _ in 0..numbers.below(9) + 1 {
        let pick = |numbers: &mut RandomNumbers| values[numbers.below(values.len() as u64) as usize];
        let (x, y) = (pick(&mut numbers), pick(&mut numbers));
        let unary = [Unary::Tanh, Unary::Sin, Unary::Abs, Unary::Neg, Unary::Erf];
        let binary = [Binary::Sub, Binary::Mul, Binary::Max, Binary::Min];
        let over: Vec<Dim> = make.body.dims_of(x).iter().copied().filter(|d| !grid.contains(d) && numbers.below(2) == 0).collect();
        let value = match numbers.below(4) {
            0 => make.op(Op::Unary(unary[numbers.below(5) as usize]), &[x]),
            1 => make.op(Op::Binary(binary[numbers.below(4) as usize]), &[x, y]),
            2 => make.op(Op::Add, &[x, y, x]),
            _ if over.is_empty() => continue,
            _ => {
                let kind = if numbers.below(2) == 0 { Reduce::Sum } else { Reduce::Max };
                let sum = make.op(Op::Reduce { kind, over }, &[x]);
                make.op(Op::Unary(Unary::Tanh), &[sum])
            }
        };
        values.push(value);
    }
    let whole = make.input(DType::F32, &dims);
    let last = *values.last().expect("inputs are values");
    let sum = make.op(Op::Add, &[last, whole]);
    let complete = |v: &Value| grid.iter().all(|d| make.body[*v].ty.has(*d));
    let mut outputs: Vec<Value> = values.iter().copied().filter(complete).collect();
    outputs.truncate(2);
    outputs.push(sum);
    make.kernel(Family::Loops { grid }, &outputs)
}

#[test]
fn random_kernels_agree_with_the_evaluator() {
    for seed in seeds(20) {
        check(&random_kernel(seed), &[], 2e-5);
    }
}

#[test]
fn an_output_over_an_input_is_stored_after_every_read() {
    // The gradient of cross entropy overwrites the logits, of which another output picks an element.
    let mut make = KernelDraft::default();
    let [s, v] = [("s", 5), ("v", 19)].map(|(n, s)| make.dim(n, s));
    let logits = make.input(DType::F32, &[s, v]);
    let target = make.input(DType::I32, &[s]);
    let top = make.op(Op::Reduce { kind: Reduce::Max, over: vec![v] }, &[logits]);
    let gradient = make.op(Op::Binary(Binary::Sub), &[logits, top]);
    let picked = make.op(Op::Gather { dim: v }, &[logits, target]);
    let kernel = make.kernel(Family::Loops { grid: vec![s] }, &[gradient, picked]);
    let inputs = random_inputs(&kernel, 1, 19);
    let want = kernel.run(&inputs, &[]);
    let host = crate::target::Target::host().expect("a supported machine");
    assert_eq!(crate::testing::run_in_place(&kernel, &host, &inputs, &[(0, 0)]), want.iter().map(|o| rounded(o)).collect::<Vec<_>>());
}

fn rounded(values: &[f64]) -> Vec<f64> {
    values.iter().map(|x| f64::from(*x as f32)).collect()
}

#[test]
fn a_kernel_may_have_more_operands_than_older_drivers_take() {
    let mut make = KernelDraft::default();
    let d = make.dim("d", 64);
    let terms: Vec<Value> = (0..700).map(|_| make.input(DType::F32, &[d])).collect();
    let sum = make.op(Op::Add, &terms);
    let scaled = make.op(Op::Binary(Binary::Mul), &[sum, terms[699]]);
    check(&make.kernel(Family::Loops { grid: vec![d] }, &[scaled]), &[], 1e-4);

    // The second kernel is the norm of many gradients, of which it squares the last one itself.
    let mut make = KernelDraft::default();
    let h = make.dim("h", 200);
    let last = make.input(DType::F32, &[h]);
    let square = make.op(Op::Binary(Binary::Mul), &[last, last]);
    let mut terms: Vec<Value> = (0..1150).map(|_| make.input(DType::F32, &[])).collect();
    terms.push(make.op(Op::Reduce { kind: Reduce::Sum, over: vec![h] }, &[square]));
    let sum = make.op(Op::Add, &terms);
    check(&make.kernel(Family::Loops { grid: vec![] }, &[square, sum]), &[], 1e-4);
}

#[test]
fn points_of_a_short_dim_share_what_is_read() {
    // The first kernel is a rotation: nothing that it reads lies along the halves. The second is its gradient, which
    // joins them. In the third an operand lies along them.
    for (joined, apart) in [(false, false), (true, false), (false, true)] {
        let mut make = KernelDraft::default();
        let [s, two, p] = [("s", 5), ("two", 2), ("p", 70)].map(|(n, size)| make.dim(n, size));
        let [a, b] = [0, 1].map(|_| make.input(DType::Bf16, &[s, p]));
        let [cos, sin] = [0, 1].map(|_| make.input(DType::Bf16, &[s, p]));
        let mul = |make: &mut KernelDraft, a, b| make.op(Op::Binary(Binary::Mul), &[a, b]);
        let [ac, bs, bc, a_s] = [(a, cos), (b, sin), (b, cos), (a, sin)].map(|(x, y)| mul(&mut make, x, y));
        let (first, second) = (make.op(Op::Binary(Binary::Sub), &[ac, bs]), make.op(Op::Add, &[bc, a_s]));
        let mut both = if joined {
            let halves = [(first, 0), (second, 1)].map(|(half, at)| make.op(Op::Pad { from: None, to: two, at }, &[half]));
            make.op(Op::Add, &halves)
        } else {
            let half = make.source(Op::Iota(two), DType::I32, &[two]);
            let (half, zero) = (make.op_as(Op::Cast, &[half], Type::new(DType::F32, [two])), make.number(0.0));
            let is_first = make.op(Op::Compare(Compare::Eq), &[half, zero]);
            make.op(Op::Select, &[is_first, first, second])
        };
        if apart {
            let scale = make.input(DType::Bf16, &[two]);
            both = mul(&mut make, both, scale);
        }
        let both = make.ordered(both, &[s, two, p]);
        let kernel = make.kernel(Family::Loops { grid: vec![s, two, p] }, &[both]);
        let plan = LoopPlan::new(&kernel, &[s, two, p], &Target::gpu("sm_90a"));
        assert_eq!(plan.shared, (!apart).then_some(two));
        check(&kernel, &[], 1e-2);
    }
}

/// The text has a `.loc` line for each op that is computed.
#[test]
fn the_text_of_a_norm_for_gpus_is_as_it_was() {
    let mut make = KernelDraft::default();
    let [s, h] = [("s", 4), ("h", 96)].map(|(n, size)| make.dim(n, size));
    let (x, w) = (make.input(DType::Bf16, &[s, h]), make.input(DType::F32, &[h]));
    let wide = make.op_as(Op::Cast, &[x], Type::new(DType::F32, [s, h]));
    let square = make.op(Op::Binary(Binary::Mul), &[wide, wide]);
    let sum = make.op(Op::Reduce { kind: Reduce::Sum, over: vec![h] }, &[square]);
    let scale = make.op(Op::Unary(Unary::Rsqrt), &[sum]);
    let scaled = make.op(Op::Binary(Binary::Mul), &[wide, scale]);
    let y = make.op(Op::Binary(Binary::Mul), &[scaled, w]);
    let kernel = make.kernel(Family::Loops { grid: vec![s] }, &[y]);
    let compiled = object::compile(&kernel, &Target::gpu("sm_90a"), Emit::default()).expect("the kernel compiles");
    golden("norm_bf16_sm_90a.ptx", &String::from_utf8(compiled.object).expect("PTX is text"));
}
