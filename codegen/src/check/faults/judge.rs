//! Whether wrong code is another function: on operands that the check of a compile does not draw, and everywhere.

use super::{FaultCase, compiled};
use crate::check::draw::{self, Draw};
use crate::object::Compiled;
use crate::target::Arch;
use crate::testing::{KernelLibrary, run_loaded, run_ptx};
use ir::faults::watch;
use ir::kernel::distance::{Distance, narrowest};
use ir::kernel::{Family, Kernel};
use ir::op::DType;
use ir::random::mix;

/// Operands of one kind.
#[derive(Clone, Copy, Debug)]
pub enum OperandKind {
    /// The operands of a compile's check.
    Usual,
    Large,
    /// No value is positive, unless all of an operand must be.
    Negative,
    /// Few numbers, of which some are zero; and indices outside of their tables.
    Few,
    /// Some values are NaN.
    Broken,
}

const ALL: [OperandKind; 5] = [OperandKind::Usual, OperandKind::Large, OperandKind::Negative, OperandKind::Few, OperandKind::Broken];

impl OperandKind {
    fn float(self, draw: Draw, bits: u64) -> f64 {
        let usual = draw::float(draw, bits % 4096, bits);
        match (self, draw) {
            (OperandKind::Usual, _) => usual,
            (OperandKind::Large, _) => 16.0 * usual,
            (OperandKind::Few, Draw::Positive) => (bits % 4 + 1) as f64 / 2.0,
            (OperandKind::Negative | OperandKind::Broken, Draw::Positive) => usual,
            (OperandKind::Negative, _) => -usual.abs(),
            (OperandKind::Few, _) => (bits % 5) as f64 / 2.0 - 1.0,
            (OperandKind::Broken, _) => {
                if bits >> 32 & 31 == 0 {
                    f64::NAN
                } else {
                    usual
                }
            }
        }
    }

    fn of(self, kernel: &Kernel) -> Vec<Vec<f64>> {
        let dims = &kernel.body.dims;
        let inputs = kernel.inputs.iter().zip(draw::draws(kernel)).zip(0..);
        inputs
            .map(|((input, draw), slot)| {
                let ty = &input.ty;
                let mut at = vec![0; ty.dims.len()];
                let element = |number: u64| {
                    let bits = mix(number ^ mix(slot ^ (self as u64) << 32));
                    let x = match (ty.dtype.is_float(), self, draw) {
                        (true, _, _) => ty.dtype.round(self.float(draw, bits)),
                        (false, OperandKind::Few, Draw::Below { first: 0, end }) => ((bits >> 8) % (end + 4)) as f64 - 2.0,
                        (false, _, _) => draw::int(draw, dims, &ty.dims, &at, bits) as f64,
                    };
                    for k in (0..at.len()).rev() {
                        at[k] += 1;
                        if at[k] < dims.size(ty.dims[k]) {
                            break;
                        }
                        at[k] = 0;
                    }
                    x
                };
                (0..dims.elements(&ty.dims)).map(element).collect()
            })
            .collect()
    }
}

/// Calls of so many tiles: two ranges, the second first, or each tile by itself.
fn halves(tiles: u64) -> Vec<[u64; 4]> {
    let half = tiles / 2;
    vec![[half, tiles, half, tiles], [0, half, 0, half]]
}

fn singles(tiles: u64) -> Vec<[u64; 4]> {
    (0..tiles).map(|t| [t, t + 1, 0, tiles]).collect()
}

/// Value of the outputs before a run.
const BEFORE: f64 = 2.0;

/// What rounding in another order may do, of results whose floats are as narrow: a tenth of what a compile allows.
fn order(kernel: &Kernel) -> Distance {
    match narrowest(kernel) {
        DType::F32 | DType::I32 | DType::Bool => Distance { element: 1e-5, norm: 1e-5 },
        DType::F16 => Distance { element: 2e-3, norm: 2e-4 },
        DType::Bf16 => Distance { element: 1e-2, norm: 1e-3 },
    }
}

fn first_other(kernel: &Kernel, got: &[Vec<f64>], want: &[Vec<f64>], allowed: impl Fn(DType) -> Distance) -> Option<usize> {
    let dtype = |k: usize| kernel.body[kernel.outputs[k].value].ty.dtype;
    (0..want.len()).find(|k| !Distance::of(&got[*k], &want[*k], 0.0).is_within(allowed(dtype(*k))))
}

/// What in a case's results is another than the right code's, if anything.
pub fn differs(case: &FaultCase, fault: &'static str) -> Option<String> {
    let kernel = &case.kernel;
    let scalars = draw::scalars(kernel);
    let allowed = |dtype: DType| if dtype.is_float() { order(kernel) } else { Distance::default() };
    let found =
        |what: String, got: Vec<Vec<f64>>, want: Vec<Vec<f64>>| first_other(kernel, &got, &want, allowed).map(|k| format!("{what}: result {k}"));
    // Only loops get NaN: elsewhere, code may multiply hidden values by 0 or leave them out, and both are right.
    let all = &ALL[..if matches!(kernel.family, Family::Loops { .. }) { 5 } else { 4 }];
    if case.target().arch == Arch::Nvptx {
        let [right, wrong] = [None, Some(fault)].map(|fault| watch(fault, || compiled(case)).0.expect("it compiled before"));
        return all.iter().find_map(|kind| {
            let run = |compiled: &Compiled| in_emulator(kernel, compiled, &kind.of(kernel), &scalars);
            let right = run(&right).expect("the right code runs");
            match run(&wrong) {
                Err(e) => Some(format!("{kind:?}: {}", e.lines().next().unwrap_or_default())),
                Ok(wrong) => found(format!("{kind:?}"), wrong, right),
            }
        });
    }
    let [right, wrong] = [None, Some(fault)].map(|fault| watch(fault, || KernelLibrary::new(kernel, &case.target())).0);
    all.iter().find_map(|kind| {
        let inputs = kind.of(kernel);
        [("halves", halves as fn(u64) -> Vec<[u64; 4]>), ("singles", singles)].iter().find_map(|(name, calls)| {
            let [right, wrong] = [&right, &wrong].map(|code| run_loaded(code, kernel, &inputs, &scalars, BEFORE, &[], calls));
            found(format!("{kind:?} operands, in {name}"), wrong, right)
        })
    })
}

/// Instructions of a warp beyond which code does not end.
const ENDLESS: u64 = 1 << 24;

fn in_emulator(kernel: &Kernel, compiled: &Compiled, inputs: &[Vec<f64>], scalars: &[f64]) -> Result<Vec<Vec<f64>>, String> {
    let options = emulator::Options { threads: 1, limit: ENDLESS, ..Default::default() };
    let ptx = String::from_utf8(compiled.object.clone()).expect("PTX is text");
    run_ptx(kernel, compiled, &ptx, options, inputs, scalars, BEFORE)
}

/// Holds a GPU's code, in the emulator, to the body: what refuses it, if anything does.
pub fn emulated(case: &FaultCase, compiled: &Compiled) -> Option<String> {
    let kernel = &case.kernel;
    let (inputs, scalars) = (OperandKind::Usual.of(kernel), draw::scalars(kernel));
    let Ok(got) = in_emulator(kernel, compiled, &inputs, &scalars) else { return Some("the emulator".into()) };
    let mut want = kernel.run(&inputs, &scalars);
    for (output, want) in kernel.outputs.iter().zip(&mut want) {
        let dtype = kernel.body[output.value].ty.dtype;
        let before = if output.accumulate { BEFORE } else { 0.0 };
        want.iter_mut().for_each(|x| *x = dtype.round(*x + before));
    }
    let allowed = |dtype: DType| if dtype.is_float() { Distance::allowed(narrowest(kernel)) } else { Distance::default() };
    first_other(kernel, &got, &want, allowed).map(|_| "the body in the emulator".into())
}
