use crate::Target;
use crate::gemm::GemmPlan;
use crate::testing::{KernelDraft, RandomNumbers, check_with, random_inputs, seeds};
use ir::dim::Dim;
use ir::graph::{Type, Value};
use ir::kernel::{Family, Kernel};
use ir::op::{Binary, DType, Op, Unary};

/// A kernel with one `GroupedDot`, whose ends are its input 2.
struct Grouped {
    kernel: Kernel,
    rows: Dim,
    experts: Dim,
}

impl Grouped {
    fn size(&self, d: Dim) -> usize {
        self.kernel.body.dims.size(d) as usize
    }

    /// Runs it with these ends for all parts alike, what is nobody's being no number, and compares with the
    /// evaluator.
    fn check(&self, ends: &[usize], tolerance: f64) {
        self.check_parts(&mut |_| ends.to_vec(), tolerance);
    }

    fn check_parts(&self, ends: &mut dyn FnMut(usize) -> Vec<usize>, tolerance: f64) {
        let kernel = &self.kernel;
        let mut inputs = random_inputs(kernel, 1, 7);
        let place = |slot: usize, at: &dyn Fn(Dim) -> usize| kernel.inputs[slot].ty.dims.iter().fold(0, |sum, d| sum * self.size(*d) + at(*d));
        let parts: Vec<Dim> = kernel.inputs[2].ty.dims.iter().copied().filter(|d| *d != self.experts).collect();
        let index = |mut number: usize, dims: &[Dim]| {
            let mut all = vec![];
            for d in dims {
                all.push((*d, number % self.size(*d)));
                number /= self.size(*d);
            }
            move |d: Dim| all.iter().find(|x| x.0 == d).map_or(0, |x| x.1)
        };
        for part in 0..parts.iter().map(|d| self.size(*d)).product() {
            let ends = ends(part);
            let of_part = index(part, &parts);
            for (e, end) in ends.iter().enumerate() {
                inputs[2][place(2, &|d| if d == self.experts { e } else { of_part(d) })] = *end as f64;
            }
            let last = ends.last().map_or(0, |x| *x);
            for (slot, data) in inputs.iter_mut().enumerate().take(2) {
                let ty = &kernel.inputs[slot].ty;
                if !ty.has(self.rows) {
                    continue;
                }
                let rest: Vec<Dim> = ty.dims.iter().copied().filter(|d| *d != self.rows && !parts.contains(d)).collect();
                for other in 0..rest.iter().map(|d| self.size(*d)).product() {
                    let of_rest = index(other, &rest);
                    for row in last..self.size(self.rows) {
                        // If the operand lacks a part's dim, a row may be nobody's in one part and an expert's in
                        // another.
                        if parts.iter().all(|d| ty.has(*d)) {
                            data[place(slot, &|d| if d == self.rows { row } else { of_part(d) + of_rest(d) })] = f64::NAN;
                        }
                    }
                }
            }
        }
        check_with(kernel, &inputs, &[], tolerance);
    }
}

/// Rows of `[rows, h]` times matrices `[experts, h, f]`, the latter perhaps stored `[experts, f, h]`.
fn forward([rows, experts, h, f]: [u64; 4], transposed: bool, dtype: DType, to: DType) -> Grouped {
    let mut make = KernelDraft::default();
    let [rows, experts, h, f] = [("rows", rows), ("experts", experts), ("h", h), ("f", f)].map(|(n, s)| make.dim(n, s));
    let a = make.input(dtype, &[rows, h]);
    let b = make.input(dtype, &if transposed { [experts, f, h] } else { [experts, h, f] });
    let ends = make.input(DType::I32, &[experts]);
    let y = make.op_as(Op::grouped_dot(rows, experts, vec![experts, h]), &[a, b, ends], Type::new(to, [rows, f]));
    Grouped { kernel: make.kernel(Family::Gemm, &[y]), rows, experts }
}

/// The sums over `rows` of `[rows, h]` times `[rows, f]`.
fn gradient([rows, experts, h, f]: [u64; 4], dtype: DType, to: DType) -> Grouped {
    let mut make = KernelDraft::default();
    let [rows, experts, h, f] = [("rows", rows), ("experts", experts), ("h", h), ("f", f)].map(|(n, s)| make.dim(n, s));
    let a = make.input(dtype, &[rows, h]);
    let b = make.input(dtype, &[rows, f]);
    let ends = make.input(DType::I32, &[experts]);
    let y = make.op_as(Op::grouped_dot(rows, experts, vec![rows]), &[a, b, ends], Type::new(to, [experts, h, f]));
    Grouped { kernel: make.kernel(Family::Gemm, &[y]), rows, experts }
}

const ENDS: [[usize; 4]; 6] = [[10, 40, 41, 67], [0, 0, 67, 67], [67, 67, 67, 67], [0, 0, 0, 0], [5, 5, 30, 30], [1, 2, 3, 4]];

#[test]
fn rows_meet_their_experts_matrix_and_nobodys_are_zero() {
    for transposed in [false, true] {
        let grouped = forward([67, 4, 33, 50], transposed, DType::F32, DType::F32);
        for ends in ENDS {
            grouped.check(&ends, 1e-5);
        }
    }
}

#[test]
fn sums_of_an_expert_are_over_its_rows_alone() {
    for accumulate in [false, true] {
        let mut grouped = gradient([67, 4, 33, 50], DType::F32, DType::F32);
        grouped.kernel.outputs[0].accumulate = accumulate;
        for ends in ENDS {
            grouped.check(&ends, 1e-5);
        }
    }
}

#[test]
fn several_blocks_of_contracted_elements_add_up_for_experts_too() {
    for accumulate in [false, true] {
        let mut grouped = forward([90, 3, 1030, 40], false, DType::F32, DType::F32);
        grouped.kernel.outputs[0].accumulate = accumulate;
        grouped.check(&[31, 31, 80], 1e-4);
        let mut grouped = gradient([1400, 3, 20, 40], DType::F32, DType::F32);
        grouped.kernel.outputs[0].accumulate = accumulate;
        grouped.check(&[1300, 1300, 1310], 1e-4);
    }
}

#[test]
fn parts_of_tiles_cover_what_experts_own() {
    for grouped in [forward([700, 4, 256, 256], false, DType::F32, DType::F32), gradient([700, 4, 256, 256], DType::F32, DType::F32)] {
        let plan = GemmPlan::new(&grouped.kernel, &Target::host().expect("invariant: the tests run where kernels do")).expect("invariant: a product");
        assert!(plan.blocks.parts > 1, "{:?}", plan.blocks);
        grouped.check(&[130, 130, 500, 690], 1e-5);
    }
}

#[test]
fn an_end_beyond_the_rows_is_their_number() {
    forward([20, 3, 8, 16], false, DType::F32, DType::F32).check(&[7, 30, 40], 1e-5);
    gradient([20, 3, 8, 16], DType::F32, DType::F32).check(&[7, 30, 40], 1e-5);
}

#[test]
fn experts_of_sixteen_bits_sum_in_f32_and_round_once() {
    for dtype in [DType::Bf16, DType::F16] {
        for (to, tolerance) in [(DType::F32, 1e-5), (dtype, 0.01)] {
            for transposed in [false, true] {
                forward([67, 4, 33, 50], transposed, dtype, to).check(&ENDS[0], tolerance);
            }
            gradient([67, 4, 33, 50], dtype, to).check(&ENDS[4], tolerance);
            // Sums of so many products have larger errors, in whatever order they are added.
            gradient([1400, 3, 20, 40], dtype, to).check(&[1300, 1300, 1310], tolerance.max(1e-4));
        }
    }
}

/// Matrices that tensor maps describe on GPUs that have them.
#[test]
fn rows_whose_places_are_multiples_of_sixteen_bytes_meet_their_experts_matrix() {
    for transposed in [false, true] {
        for ends in [ENDS[0], ENDS[2], ENDS[4]] {
            forward([72, 4, 80, 72], transposed, DType::Bf16, DType::F32).check(&ends, 1e-5);
        }
    }
    forward([136, 4, 40, 104], true, DType::F16, DType::F16).check(&[50, 50, 70, 130], 0.01);
    for ends in ENDS {
        gradient([72, 4, 80, 72], DType::Bf16, DType::F32).check(&ends, 1e-5);
    }
    gradient([208, 3, 80, 72], DType::F16, DType::F16).check(&[63, 64, 200], 0.01);
}

/// A grouped product of random dims in random storage orders, with a random epilogue.
fn random_grouped(numbers: &mut RandomNumbers) -> Grouped {
    let mut make = KernelDraft::default();
    let sizes = [1, 1, 2, 3, 4, 7, 16, 17, 33];
    let some = |make: &mut KernelDraft, name: &str, most: u64, numbers: &mut RandomNumbers| -> Vec<Dim> {
        (0..numbers.below(most + 1)).map(|_| make.dim(name, sizes[numbers.below(9) as usize])).collect()
    };
    let rows = make.dim("rows", [1, 5, 29, 64, 130][numbers.below(5) as usize]);
    let experts = make.dim("experts", [1, 2, 5, 16][numbers.below(4) as usize]);
    let parts: Vec<Dim> = (0..numbers.below(3)).map(|_| make.dim("part", 1 + numbers.below(3))).collect();
    let [mine, other, both] = [("h", 2), ("f", 2), ("k", 2)].map(|(name, most)| some(&mut make, name, most, numbers));
    let shuffled = |parts: &[&[Dim]], numbers: &mut RandomNumbers| {
        let mut dims = parts.concat();
        for i in (1..dims.len()).rev() {
            dims.swap(i, numbers.below(i as u64 + 1) as usize);
        }
        dims
    };
    let dtype = [DType::F32, DType::F32, DType::Bf16][numbers.below(3) as usize];
    let of_rows = numbers.below(2) == 0;
    let ends_dims = shuffled(&[&parts, &[experts]], numbers);
    // The second operand has some, none or all of the parts' dims.
    let shared: Vec<Dim> = parts.iter().copied().filter(|_| numbers.below(2) == 0).collect();
    let (b_own, summed, kept) = match of_rows {
        true => (experts, [both.clone(), vec![experts]].concat(), [&parts[..], &[rows], &mine, &other].concat()),
        false => {
            let over: Vec<Dim> = shared.iter().copied().filter(|_| numbers.below(2) == 0).collect();
            let rest: Vec<Dim> = parts.iter().copied().filter(|d| !over.contains(d)).collect();
            (rows, [over, vec![rows]].concat(), [&rest[..], &[experts], &mine, &other, &both].concat())
        }
    };
    let a = make.input(dtype, &shuffled(&[&parts, &[rows], &mine, &both], numbers));
    let b = make.input(dtype, &shuffled(&[&shared, &[b_own], &other, &both], numbers));
    let ends = make.input(DType::I32, &ends_dims);
    let result = shuffled(&[&kept], numbers);
    let dot: Value = make.op_as(Op::grouped_dot(rows, experts, summed), &[a, b, ends], Type::new(DType::F32, result.clone()));
    let some_dims: Vec<Dim> = result.iter().copied().filter(|_| numbers.below(2) == 0).collect();
    let other = make.input(DType::F32, &shuffled(&[&some_dims], numbers));
    let out = match numbers.below(3) {
        0 => dot,
        1 => make.op(Op::Add, &[dot, other]),
        _ => {
            let product = make.op(Op::Binary(Binary::Mul), &[dot, other]);
            make.op(Op::Unary(Unary::Tanh), &[product])
        }
    };
    let out = make.ordered(out, &result);
    let mut kernel = make.kernel(Family::Gemm, &[out]);
    kernel.outputs[0].accumulate = numbers.below(2) == 0;
    Grouped { kernel, rows, experts }
}

#[test]
fn random_products_of_experts_agree_with_the_evaluator() {
    for seed in seeds(12) {
        let mut numbers = RandomNumbers::new(seed);
        let grouped = random_grouped(&mut numbers);
        let (rows, experts) = (grouped.size(grouped.rows), grouped.size(grouped.experts));
        let mut ends = |_: usize| match numbers.below(4) {
            0 => vec![0; experts],
            1 => (0..experts).map(|e| if e < experts / 2 { 0 } else { rows }).collect(),
            _ => {
                let mut ends: Vec<usize> = (0..experts).map(|_| numbers.below(rows as u64 + 1) as usize).collect();
                ends.sort_unstable();
                ends
            }
        };
        grouped.check_parts(&mut ends, 2e-5);
    }
}
