//! How much of attention is computed, counted: of packed documents the sum of their squares, of padding nothing. What
//! is counted is what the code that is released does: its calls on CPUs, instructions of tensor cores on GPUs.

use super::super::AttentionPlan;
use super::super::panels::Division;
use crate::target::Target;
use crate::testing::counting::calls;
use crate::testing::{KernelDraft, assembling, compiled, matrix_operations, random_inputs};
use ir::dim::Dim;
use ir::graph::Value;
use ir::kernel::{Family, Kernel};
use ir::op::{Attention, AttentionGrad, Compare, DType, Op, Real, Scoring};

/// Number of queries and of keys.
const POSITIONS: u64 = 512;

/// The mask of a test.
#[derive(Clone, Copy)]
enum Mask {
    /// Keys of other documents than the query's, which these are by its position.
    Documents(fn(u64) -> u64),
    /// Keys that are not there: a bool of each.
    Padding(fn(u64) -> bool),
    /// Keys from the first of these on: their number is an operand.
    Length(u64),
}

impl Mask {
    /// The program's result, and the operands that it takes, of queries, of keys or of neither, with their numbers.
    fn written(self, scoring: &mut Scoring, [at, keys]: [Dim; 2]) -> Vec<(DType, Vec<Dim>, Vec<f64>)> {
        let all = |of: &dyn Fn(u64) -> f64| (0..POSITIONS).map(of).collect::<Vec<f64>>();
        let mut input = |n: u32, dtype: DType| scoring.step(Op::Input(n), dtype, &[]);
        match self {
            Mask::Documents(of) => {
                let sides = [1, 2].map(|n| input(n, DType::I32));
                scoring.seen = Some(scoring.step(Op::Compare(Compare::Eq), DType::Bool, &sides));
                [at, keys].map(|d| (DType::I32, vec![d], all(&|i| of(i) as f64))).to_vec()
            }
            Mask::Padding(there) => {
                scoring.seen = Some(input(1, DType::Bool));
                vec![(DType::Bool, vec![keys], all(&|i| f64::from(u8::from(there(i)))))]
            }
            Mask::Length(length) => {
                let sides = [1, 2].map(|n| input(n, DType::I32));
                scoring.seen = Some(scoring.step(Op::Compare(Compare::Lt), DType::Bool, &sides));
                vec![(DType::I32, vec![keys], all(&|i| i as f64)), (DType::I32, vec![], vec![length as f64])]
            }
        }
    }

    fn sees(self, query: u64, key: u64) -> bool {
        match self {
            Mask::Documents(of) => of(query) == of(key),
            Mask::Padding(there) => there(key),
            Mask::Length(length) => key < length,
        }
    }
}

/// The kernel of a test.
#[derive(Clone, Copy, PartialEq, Debug)]
enum AttentionPass {
    Forward,
    Backward,
    /// The gradient of a bias of each pair.
    Bias,
}

/// The kernel, with one head of 64 elements, and its operands.
fn kernel(pass: AttentionPass, mask: Mask, dtype: DType) -> (Kernel, Vec<Vec<f64>>) {
    let mut make = KernelDraft::default();
    let [kv, d] = [("kv", 1), ("d", 64)].map(|(name, size)| make.dim(name, size));
    let [at, keys] = ["at", "keys"].map(|name| make.dim(name, POSITIONS));
    let mut scoring = Scoring::PLAIN;
    let operands = mask.written(&mut scoring, [at, keys]);
    if pass == AttentionPass::Bias {
        let args = [0, operands.len() as u32 + 1].map(|n| scoring.step(Op::Input(n), DType::F32, &[]));
        scoring.score = Some(scoring.step(Op::Add, DType::F32, &args));
    }
    let attention = Attention { at, keys, d, values: d, scale: Real(0.125), scoring };
    let q = make.input(dtype, &[at, kv, d]);
    let [k, v] = [0, 1].map(|_| make.input(dtype, &[keys, kv, d]));
    let gradients = |make: &mut KernelDraft| [&[0, 1].map(|_| make.input(DType::F32, &[at, kv]))[..], &[make.input(dtype, &[at, kv, d])]].concat();
    let of_gradients = if pass == AttentionPass::Forward { vec![] } else { gradients(&mut make) };
    let further: Vec<Value> = operands.iter().map(|(dtype, dims, _)| make.input(*dtype, dims)).collect();
    let mut args = [&[q, k, v], &of_gradients[..], &further].concat();
    let (first, count) = (3 + of_gradients.len(), operands.len());
    let kernel = match pass {
        AttentionPass::Forward => {
            let out = make.op(Op::Attention(attention), &args);
            make.kernel(Family::Attention, &[out])
        }
        AttentionPass::Backward => {
            let one = |(grad, of): (AttentionGrad, Value)| {
                let ty = make.body[of].ty.clone();
                make.op_as(Op::AttentionGrad(attention.clone(), grad), &args, ty)
            };
            let outputs = [(AttentionGrad::Q, q), (AttentionGrad::K, k), (AttentionGrad::V, v)].map(one);
            make.kernel(Family::AttentionGrad, &outputs)
        }
        AttentionPass::Bias => {
            let bias = make.input(DType::F32, &[at, keys]);
            args.push(bias);
            let ty = make.body[bias].ty.clone();
            let output = make.op_as(Op::AttentionGrad(attention, AttentionGrad::Bias), &args, ty);
            make.kernel(Family::AttentionGrad, &[output])
        }
    };
    let mut inputs = random_inputs(&kernel, 4, 1);
    inputs[first..first + count].iter_mut().zip(operands).for_each(|(input, (_, _, numbers))| *input = numbers);
    (kernel, inputs)
}

/// One document; documents of 128, 256 and 128 positions; three whose borders are no borders of blocks.
const ONE: Mask = Mask::Documents(|_| 0);
const THREE: Mask = Mask::Documents(|i| (i >= 128) as u64 + (i >= 384) as u64);
const RAGGED: Mask = Mask::Documents(|i| (i >= 77) as u64 + (i >= 301) as u64);
/// A quarter of the keys is there, by one or the other operand, or a run of them in the middle.
const QUARTER: Mask = Mask::Padding(|key| key < 128);
const LENGTH: Mask = Mask::Length(128);
const MIDDLE: Mask = Mask::Padding(|key| (250..300).contains(&key));

/// Checks that a mask leaves `some / of` of the operations that one document takes.
fn holds_on_gpus(mask: Mask, (some, of): (u64, u64)) {
    for gpu in ["sm_80", "sm_90a"] {
        for pass in [AttentionPass::Forward, AttentionPass::Backward, AttentionPass::Bias] {
            let [all, left] = [ONE, mask].map(|mask| {
                let ((kernel, inputs), target) = (kernel(pass, mask, DType::Bf16), Target::gpu(gpu));
                assembling::assemble(&compiled(&kernel, &target).1, &target);
                matrix_operations(&kernel, &target, &inputs)
            });
            assert!(all > 0 && of * left == some * all, "{gpu}, {pass:?}: {left} of {all}");
        }
    }
}

/// Of the 16 squares of 128 by 128 scores, 1 + 4 + 1 are computed.
#[test]
fn the_work_of_documents_on_gpus_is_the_sum_of_their_squares() {
    holds_on_gpus(THREE, (6, 16));
}

#[test]
fn no_work_is_done_for_padding_on_gpus() {
    holds_on_gpus(QUARTER, (1, 4));
    holds_on_gpus(LENGTH, (1, 4));
}

/// Rows and columns of blocks of scores that are computed at a time, each by where it begins and ends.
type BlockRanges = [Vec<[u64; 2]>; 2];

fn runs(of: u64) -> Vec<[u64; 2]> {
    (0..POSITIONS.div_ceil(of)).map(|n| [n * of, POSITIONS.min((n + 1) * of)]).collect()
}

/// The blocks of a kernel on a CPU.
fn blocks(pass: AttentionPass, kernel: &Kernel, target: &Target) -> BlockRanges {
    let plan = AttentionPlan::new(kernel, target).expect("it is attention");
    if pass != AttentionPass::Forward {
        return [runs(plan.query_block as u64), runs(plan.key_block as u64)];
    }
    let division = Division::new(&plan, target);
    let row = |panel: i64| (panel * division.height + panel.min(division.tall)) as u64;
    [(0..division.panels).map(|panel| [row(panel), row(panel + 1)]).collect(), runs(division.strip as u64)]
}

/// How many blocks are computed, and how many of these are fully visible.
fn counted(pass: AttentionPass, mask: Mask, target: &Target) -> [u64; 2] {
    let (kernel, inputs) = kernel(pass, mask, DType::F32);
    let calls = calls(&kernel, target, &inputs);
    let of = |names: &[&str]| {
        let is_one = |name: &str| names.iter().any(|n| name == *n || name.strip_prefix(n).is_some_and(|rest| rest[1..].parse::<u64>().is_ok()));
        calls.iter().filter(|(name, _)| is_one(name)).map(|(_, count)| count).sum::<u64>()
    };
    let (whole, masked) = match pass {
        AttentionPass::Forward => ("exponentials", "exponentials_masked"),
        AttentionPass::Backward | AttentionPass::Bias => ("gradient", "gradient_masked"),
    };
    let computed = of(&[whole, masked]);
    if pass != AttentionPass::Forward {
        let of_kernel: &[&str] = if pass == AttentionPass::Bias { &["scores", "dp"] } else { &["scores", "dp", "dq", "dk", "dv"] };
        of_kernel.iter().for_each(|name| assert_eq!(of(&[name]), computed, "{name} of {calls:?}"));
    }
    [computed, of(&[whole])]
}

/// How many blocks have a visible pair, and how many are fully visible, by looking at every pair.
fn expected(pass: AttentionPass, mask: Mask, target: &Target) -> [u64; 2] {
    let [rows, columns] = blocks(pass, &kernel(pass, mask, DType::F32).0, target);
    let pairs = |[r, c]: [[u64; 2]; 2]| (r[0]..r[1]).flat_map(move |q| (c[0]..c[1]).map(move |k| mask.sees(q, k)));
    let blocks = || rows.iter().flat_map(|r| columns.iter().map(|c| [*r, *c]));
    [blocks().filter(|b| pairs(*b).any(|seen| seen)).count() as u64, blocks().filter(|b| pairs(*b).all(|seen| seen)).count() as u64]
}

/// What the code calls on CPUs is what is visible, block by block. (Of a panel of queries, strips between visible
/// ones count as visible; here there are none.)
#[test]
fn no_block_is_computed_on_cpus_of_which_nothing_is_seen() {
    for target in [Target::host().expect("a supported machine"), Target::x86_64_v3()] {
        for pass in [AttentionPass::Forward, AttentionPass::Backward, AttentionPass::Bias] {
            for mask in [ONE, THREE, RAGGED, QUARTER, LENGTH, MIDDLE] {
                assert_eq!(counted(pass, mask, &target), expected(pass, mask, &target), "{pass:?}, {}", target.cpu);
            }
        }
    }
}

#[test]
fn the_work_of_documents_on_cpus_is_the_sum_of_their_squares() {
    let target = Target::host().expect("a supported machine");
    for pass in [AttentionPass::Backward, AttentionPass::Bias] {
        let [all, some] = [ONE, THREE].map(|mask| counted(pass, mask, &target)[0]);
        assert_eq!((all, some), (64, 24), "{pass:?}");
    }
    // A panel of queries that straddles two documents meets the keys of both.
    let [all, some] = [ONE, THREE].map(|mask| counted(AttentionPass::Forward, mask, &target)[0]);
    assert!(16 * some >= 6 * all && 15 * some <= 6 * all, "{some} of {all}");
}
