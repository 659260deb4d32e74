//! Numbers of 16 and 32 bits as the instructions see them.

use crate::inst::{Element, Float1, Float2, Mode};
use half::{bf16, f16};

pub fn widen(e: Element, bits: u16) -> f32 {
    match e {
        Element::F16 => f16::from_bits(bits).to_f32(),
        Element::Bf16 => f32::from_bits(u32::from(bits) << 16),
        Element::Tf32 => unreachable!("invariant: tf32 has 32 bits"),
    }
}

/// The lower and the upper halves of words, as f32.
pub fn halves<const N: usize>(e: Element, words: &[u32; N]) -> [[f32; N]; 2] {
    match e {
        Element::F16 => [words.map(|v| f16::from_bits(v as u16).to_f32()), words.map(|v| f16::from_bits((v >> 16) as u16).to_f32())],
        Element::Bf16 => [words.map(|v| f32::from_bits(v << 16)), words.map(|v| f32::from_bits(v & 0xFFFF_0000))],
        Element::Tf32 => unreachable!("invariant: tf32 has 32 bits"),
    }
}

pub fn narrow(e: Element, x: f32) -> u16 {
    match e {
        Element::F16 => f16::from_f32(x).to_bits(),
        Element::Bf16 => bf16::from_f32(x).to_bits(),
        Element::Tf32 => unreachable!("invariant: tf32 has 32 bits"),
    }
}

/// Rounds an f64 once to 16 bits.
pub fn narrow_f64(e: Element, x: f64) -> u16 {
    // The conversions ignore the lower half, so a bit that says whether it was nonzero stands for it. It decides
    // ties.
    let (upper, lower) = (x.to_bits() >> 32, x.to_bits() as u32);
    let x = f64::from_bits((upper | u64::from(lower != 0)) << 32);
    match e {
        Element::F16 => f16::from_f64(x).to_bits(),
        Element::Bf16 => bf16::from_f64(x).to_bits(),
        Element::Tf32 => unreachable!("invariant: tf32 has 32 bits"),
    }
}

fn flush(on: bool, x: f32) -> f32 {
    if on && x.is_subnormal() { 0f32.copysign(x) } else { x }
}

pub fn enter(m: Mode, bits: u32) -> f32 {
    flush(m.flush, f32::from_bits(bits))
}

pub fn leave(m: Mode, x: f32) -> u32 {
    let x = flush(m.flush, x);
    let x = match m.saturate {
        true if x.is_nan() => 0.0,
        true => x.clamp(0.0, 1.0),
        false => x,
    };
    x.to_bits()
}

/// Computes a function of one number. Approximate functions are more exact than in hardware.
pub fn one(f: Float1, x: f32) -> f32 {
    match f {
        Float1::Neg => -x,
        Float1::Abs => x.abs(),
        Float1::Sqrt => x.sqrt(),
        Float1::Rcp => 1.0 / x,
        Float1::Rsqrt => (1.0 / f64::from(x).sqrt()) as f32,
        Float1::Ex2 => x.exp2(),
        Float1::Lg2 => x.log2(),
        Float1::Sin => x.sin(),
        Float1::Cos => x.cos(),
        Float1::Tanh => x.tanh(),
        Float1::Tf32 => f32::from_bits(round_tf32(x.to_bits())),
    }
}

/// The nearest number of 10 bits of mantissa, ties away from zero.
pub fn round_tf32(bits: u32) -> u32 {
    if f32::from_bits(bits).is_nan() { bits | 1 << 22 } else { (bits + 0x1000) & !0x1FFF }
}

pub fn one_f64(f: Float1, x: f64) -> f64 {
    match f {
        Float1::Neg => -x,
        Float1::Abs => x.abs(),
        Float1::Sqrt => x.sqrt(),
        Float1::Rcp => 1.0 / x,
        Float1::Rsqrt => 1.0 / x.sqrt(),
        Float1::Ex2 => x.exp2(),
        Float1::Lg2 => x.log2(),
        Float1::Sin => x.sin(),
        Float1::Cos => x.cos(),
        Float1::Tanh => x.tanh(),
        Float1::Tf32 => unreachable!("invariant: it is decoded of f32 alone"),
    }
}

macro_rules! two {
    ($f:expr, $a:expr, $b:expr) => {{
        let (a, b) = ($a, $b);
        match $f {
            Float2::Add => a + b,
            Float2::Sub => a - b,
            Float2::Mul => a * b,
            Float2::CopySign => b.copysign(a),
            Float2::Div => a / b,
            Float2::Min => a.min(b),
            Float2::Max => a.max(b),
            Float2::MinNan => {
                if a.is_nan() || b.is_nan() {
                    a + b
                } else {
                    a.min(b)
                }
            }
            Float2::MaxNan => {
                if a.is_nan() || b.is_nan() {
                    a + b
                } else {
                    a.max(b)
                }
            }
        }
    }};
}

pub fn two(f: Float2, a: f32, b: f32) -> f32 {
    two!(f, a, b)
}

pub fn two_f64(f: Float2, a: f64, b: f64) -> f64 {
    two!(f, a, b)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_digits_decide_what_is_nearest() {
        for (element, bits) in [(Element::Bf16, 8), (Element::F16, 11)] {
            let (tie, next) = (2f64.powi(-bits), 2f64.powi(1 - bits));
            for (x, nearest) in [(tie, 0.0), (tie + 2f64.powi(-50), next), (tie - 2f64.powi(-50), 0.0)] {
                assert_eq!(f64::from(widen(element, narrow_f64(element, 1.0 + x))), 1.0 + nearest, "1 + {x:e} as {element:?}");
            }
        }
    }
}
