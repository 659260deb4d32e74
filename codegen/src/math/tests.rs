use crate::build::{Builder, Lane};
use crate::object::compile_written;
use crate::target::Target;
use crate::testing::{KernelDraft, KernelLibrary, run};
use crate::{Shape, math};
use ir::graph::Value;
use ir::kernel::{Family, Kernel};
use ir::op::{Binary, DType, Op, Unary};

const POINTS: u64 = 1 << 16;

fn kernel(inputs: usize, op: &Op) -> Kernel {
    let mut make = KernelDraft::default();
    let d = make.dim("d", POINTS);
    let args: Vec<Value> = (0..inputs).map(|_| make.input(DType::F32, &[d])).collect();
    let y = make.op(op.clone(), &args);
    make.kernel(Family::Loops { grid: vec![d] }, &[y])
}

/// Points spread evenly over a range.
fn even(from: f64, to: f64) -> Vec<f64> {
    (0..POINTS).map(|i| f64::from((from + (to - from) * i as f64 / POINTS as f64) as f32)).collect()
}

/// Points of both signs spread over magnitudes, or of one sign if `from` is positive.
fn magnitudes(from: f64, to: f64, both: bool) -> Vec<f64> {
    let one = |i: u64| {
        let x = from.abs() * (to / from.abs()).powf(i as f64 / POINTS as f64);
        f64::from(if both && i % 2 == 1 { -x } else { x } as f32)
    };
    (0..POINTS).map(one).collect()
}

/// The greatest error in units of the last place of the exact result.
fn worst(op: &Op, inputs: &[Vec<f64>], exact: impl Fn(usize) -> f64) -> f64 {
    let kernel = kernel(inputs.len(), op);
    let mut worst = 0.0f64;
    for target in [Target::host().expect("a supported machine"), Target::x86_64_v3()] {
        let got = run(&kernel, &target, inputs, &[], 0.0).swap_remove(0);
        for (i, got) in got.iter().enumerate() {
            let want = exact(i);
            let near = (want.abs() as f32).max(f32::MIN_POSITIVE);
            let unit = f64::from(f32::from_bits(near.to_bits() + 1)) - f64::from(near);
            worst = worst.max((got - want).abs() / unit);
        }
    }
    worst
}

fn worst_unary(op: Unary, x: Vec<f64>, exact: impl Fn(f64) -> f64) -> f64 {
    let inputs = [x];
    worst(&Op::Unary(op), &inputs, |i| exact(inputs[0][i]))
}

#[test]
fn exp_is_within_one_unit() {
    assert!(worst_unary(Unary::Exp, even(-87.3, 88.7), f64::exp) < 1.0);
    assert!(worst_unary(Unary::Exp, magnitudes(1e-20, 80.0, true), f64::exp) < 1.0);
}

#[test]
fn log_is_within_one_unit() {
    assert!(worst_unary(Unary::Log, magnitudes(1e-44, 3e38, false), f64::ln) < 1.0);
    assert!(worst_unary(Unary::Log, even(0.4, 2.5), f64::ln) < 1.0);
}

#[test]
fn tanh_is_within_one_and_a_half_units() {
    assert!(worst_unary(Unary::Tanh, even(-10.0, 10.0), f64::tanh) < 1.5);
    assert!(worst_unary(Unary::Tanh, magnitudes(1e-30, 1.0, true), f64::tanh) < 1.5);
}

/// [`math::tanh_of_score`] of numbers, whole vectors of them.
fn tanh_of_scores(target: &Target, x: &[f32]) -> Vec<f32> {
    let compiled = compile_written("tanh_of_scores", target, |b| {
        let entry = b.kernel("tanh_of_scores");
        let [from, to] = [0, 8].map(|at| b.load_pointer(b.at_const(entry.arguments, at)));
        b.for_each(entry.first_tile, entry.end_tile, b.lanes() as i64, &mut |i| {
            let [from, to] = [from, to].map(|start| b.at(start, b.index_mul(i, b.index(4))));
            b.store(to, math::tanh_of_score(b, b.load(from, Lane::F32, None)), Lane::F32, None);
        });
        b.finish_function();
        Ok(Shape { tiles: 0, line: 1, scratch_bytes: 0 })
    });
    let loaded = KernelLibrary::of(compiled.expect("it compiles"));
    let (mut x, mut y) = (x.to_vec(), vec![0.0f32; x.len()]);
    let pointers = [x.as_mut_ptr(), y.as_mut_ptr()].map(|p| p.cast::<u8>());
    let n = x.len() as u64;
    // SAFETY: both have `n` numbers, whole vectors, and there are no scalars and no scratch.
    unsafe { loaded.function()(pointers.as_ptr(), std::ptr::null(), 0, n, std::ptr::null_mut(), 0, n) };
    y
}

/// Every eighth f32 between 2^-12 and 16 is tested, and some of each magnitude beyond, with both signs.
#[test]
fn tanh_of_a_score_is_within_its_bound() {
    let near = (2f32.powi(-12).to_bits()..16f32.to_bits()).step_by(8);
    let far = (0..2f32.powi(-12).to_bits()).chain(16f32.to_bits()..=f32::INFINITY.to_bits()).step_by(1 << 12);
    let both = near.chain(far).flat_map(|bits| [bits, bits | 1 << 31]);
    let mut x: Vec<f32> = both.map(f32::from_bits).chain([f32::NAN, f32::INFINITY, f32::NEG_INFINITY]).collect();
    x.resize(x.len().next_multiple_of(16), 0.0);
    for target in [Target::host().expect("a supported machine"), Target::x86_64_v3()] {
        let mut worst = 0.0f64;
        for (x, y) in x.iter().zip(tanh_of_scores(&target, &x)) {
            assert_eq!(x.is_nan(), y.is_nan(), "{x}");
            let (want, y) = (f64::from(*x).tanh(), f64::from(y));
            worst = worst.max((y - want).abs() / want.abs().max(f64::from(f32::MIN_POSITIVE)));
        }
        assert!(worst < 3.5e-7, "{worst:e}");
    }
}

#[test]
fn erf_is_within_one_and_a_half_units() {
    assert!(worst_unary(Unary::Erf, even(-5.0, 5.0), ir::eval::erf) < 1.5);
    assert!(worst_unary(Unary::Erf, magnitudes(1e-30, 1.0, true), ir::eval::erf) < 1.5);
}

#[test]
fn roots_are_within_one_and_a_half_units() {
    assert!(worst_unary(Unary::Sqrt, magnitudes(1e-30, 1e30, false), f64::sqrt) < 0.51);
    assert!(worst_unary(Unary::Rsqrt, magnitudes(1e-30, 1e30, false), |x| 1.0 / x.sqrt()) < 1.5);
}

#[test]
fn sin_and_cos_are_within_two_units_where_they_are_not_tiny() {
    // Near a zero of the function its unit shrinks without end; there the error is measured against 2^-26.
    let bound = |op: Unary, x: Vec<f64>, exact: fn(f64) -> f64| {
        let inputs = [x];
        let target = Target::host().expect("a supported machine");
        let got = run(&kernel(1, &Op::Unary(op)), &target, &inputs, &[], 0.0).swap_remove(0);
        for (x, got) in inputs[0].iter().zip(got) {
            assert!((got - exact(*x)).abs() < 1.2e-7, "{} of {x}: {got}, not {}", op.name(), exact(*x));
        }
    };
    for (op, exact) in [(Unary::Sin, f64::sin as fn(f64) -> f64), (Unary::Cos, f64::cos)] {
        bound(op, even(-10.0, 10.0), exact);
        bound(op, even(-10_000.0, 10_000.0), exact);
        bound(op, even(0.0, 130_000.0), exact);
    }
}

#[test]
fn pow_is_within_one_unit() {
    let (x, y) = (magnitudes(1e-3, 1e4, false), even(-9.0, 9.0));
    let inputs = [x, y];
    assert!(worst(&Op::Binary(Binary::Pow), &inputs, |i| inputs[0][i].powf(inputs[1][i])) < 1.0);
}

#[test]
fn pow_follows_c_at_its_special_points() {
    let mut x = vec![1.0; POINTS as usize];
    let mut y = vec![1.0; POINTS as usize];
    let points = [-2.0, -1.0, -0.0, 0.0, 0.5, 1.0, 2.0, 3.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN, -0.5];
    for (i, a) in points.iter().enumerate() {
        for (j, b) in points.iter().enumerate() {
            x[i * points.len() + j] = *a;
            y[i * points.len() + j] = *b;
        }
    }
    let target = Target::host().expect("a supported machine");
    let inputs = [x, y];
    let got = run(&kernel(2, &Op::Binary(Binary::Pow)), &target, &inputs, &[], 0.0).swap_remove(0);
    for i in 0..points.len() * points.len() {
        let want = inputs[0][i].powf(inputs[1][i]);
        let close = (got[i] - want).abs() <= 1e-6 * want.abs() || got[i] == want || (got[i].is_nan() && want.is_nan());
        assert!(close, "{} ^ {}: {}, not {want}", inputs[0][i], inputs[1][i], got[i]);
    }
}
