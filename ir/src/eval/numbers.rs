//! What pointwise ops make of numbers.

use crate::op::{Binary, Compare, DType, Unary};

pub(super) fn unary(op: Unary, x: f64) -> f64 {
    match op {
        Unary::Neg => -x,
        Unary::Exp => x.exp(),
        Unary::Log => x.ln(),
        Unary::Sqrt => x.sqrt(),
        Unary::Rsqrt => 1.0 / x.sqrt(),
        Unary::Recip => 1.0 / x,
        Unary::Tanh => x.tanh(),
        Unary::Sin => x.sin(),
        Unary::Cos => x.cos(),
        Unary::Erf => erf(x),
        Unary::Abs => x.abs(),
        Unary::Floor => x.floor(),
        Unary::Sign => {
            if x == 0.0 || x.is_nan() {
                x
            } else {
                x.signum()
            }
        }
        Unary::Not => f64::from(x == 0.0),
    }
}

/// The error function to about 1e-16: the series below 3, the continued fraction of erfc above (Abramowitz & Stegun 7.1.5, 7.1.14).
pub fn erf(x: f64) -> f64 {
    let a = x.abs();
    if a.is_nan() {
        return x;
    }
    if a > 6.0 {
        return x.signum();
    }
    if a < 3.0 {
        let (mut term, mut sum, mut n) = (a, a, 0.0);
        while term.abs() > 1e-18 * sum.abs() {
            n += 1.0;
            term *= -a * a / n;
            sum += term / (2.0 * n + 1.0);
            if term == 0.0 {
                break;
            }
        }
        return x.signum() * sum * 2.0 / std::f64::consts::PI.sqrt();
    }
    let mut fraction = 0.0;
    for k in (1..=60).rev() {
        fraction = f64::from(k) / 2.0 / (a + fraction);
    }
    x.signum() * (1.0 - (-a * a).exp() / ((a + fraction) * std::f64::consts::PI.sqrt()))
}

pub(super) fn binary(op: Binary, dtype: DType, a: f64, b: f64) -> f64 {
    match op {
        Binary::Sub => a - b,
        Binary::Mul => a * b,
        Binary::Div if dtype.is_float() => a / b,
        Binary::Div => (a / b).floor(),
        Binary::Rem => a - b * (a / b).floor(),
        Binary::Pow => a.powf(b),
        Binary::Max => {
            if a > b || a.is_nan() {
                a
            } else {
                b
            }
        }
        Binary::Min => {
            if a < b || a.is_nan() {
                a
            } else {
                b
            }
        }
        Binary::And => f64::from(a != 0.0 && b != 0.0),
        Binary::Or => f64::from(a != 0.0 || b != 0.0),
        Binary::Mix => f64::from(crate::random::mix_two(a as i32, b as i32)),
    }
}

pub(super) fn compare(op: Compare, a: f64, b: f64) -> f64 {
    f64::from(match op {
        Compare::Eq => a == b,
        Compare::Ne => a != b,
        Compare::Lt => a < b,
        Compare::Le => a <= b,
        Compare::Gt => a > b,
        Compare::Ge => a >= b,
    })
}
