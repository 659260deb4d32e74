//! Numbers: the types of elements, how they round, and constants that compare by their bits.

use serde::{Deserialize, Serialize};
use std::fmt;

/// An `f64` that compares and hashes by its bits, so that ops can be compared and hashed.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Real(pub f64);

impl PartialEq for Real {
    fn eq(&self, other: &Self) -> bool {
        self.0.to_bits() == other.0.to_bits()
    }
}

impl Eq for Real {}

impl std::hash::Hash for Real {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.0.to_bits().hash(state);
    }
}

impl fmt::Display for Real {
    /// The shortest text that reads back as the same number; `inf`, `-inf`, `nan` for the others.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_nan() {
            f.write_str("nan")
        } else if self.0.is_infinite() {
            f.write_str(if self.0 > 0.0 { "inf" } else { "-inf" })
        } else {
            write!(f, "{:?}", self.0)
        }
    }
}

/// Element types. `Bool` is stored as one byte, 0 or 1.
///
/// A 16-bit float is a type of values, not only of storage: every op rounds its result to it ([`DType::round`]), also between ops of
/// one kernel. Sums (`dot`, `reduce_sum`, `scatter`, the inner sums of attention) round once, at their end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum DType {
    /// IEEE 754 binary32.
    F32,
    /// The upper half of an f32: 8 bits of exponent, 7 of mantissa.
    Bf16,
    /// IEEE 754 binary16: 5 bits of exponent, 10 of mantissa.
    F16,
    /// Signed, of 32 bits.
    I32,
    /// True or false.
    Bool,
}

impl DType {
    /// Bytes per element.
    pub fn bytes(self) -> u64 {
        match self {
            DType::F32 | DType::I32 => 4,
            DType::Bf16 | DType::F16 => 2,
            DType::Bool => 1,
        }
    }

    /// Whether it is a float, of any width.
    pub fn is_float(self) -> bool {
        match self {
            DType::F32 | DType::Bf16 | DType::F16 => true,
            DType::I32 | DType::Bool => false,
        }
    }

    /// Whether it is a float of two bytes.
    pub fn is_half(self) -> bool {
        match self {
            DType::Bf16 | DType::F16 => true,
            DType::F32 | DType::I32 | DType::Bool => false,
        }
    }

    /// The nearest value of a 16-bit float, ties to even, beyond its range infinite (IEEE 754, section 4.3.1); other types as they are: the
    /// evaluator computes those in f64.
    pub fn round(self, x: f64) -> f64 {
        match self {
            DType::Bf16 => nearest(x, crate::fault!("numbers.bf16.digits", 7, 8), [-126, 127], f64::round_ties_even),
            DType::F16 => nearest(x, 11, [-14, 15], crate::fault!("numbers.f16.ties", f64::trunc, f64::round_ties_even)),
            DType::F32 | DType::I32 | DType::Bool => x,
        }
    }

    /// Whether a number stays finite when it is stored: neither infinite nor `NaN`, and not beyond the greatest one of this type.
    pub fn is_finite(self, x: f64) -> bool {
        match self {
            DType::F32 => (x as f32).is_finite(),
            DType::Bf16 | DType::F16 => self.round(x).is_finite(),
            DType::I32 | DType::Bool => x.is_finite(),
        }
    }

    /// As model texts and text forms write it: `bf16`.
    pub fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::Bf16 => "bf16",
            DType::F16 => "f16",
            DType::I32 => "i32",
            DType::Bool => "bool",
        }
    }

    /// The dtype of this name, if there is one.
    pub fn parse(name: &str) -> Option<DType> {
        [DType::F32, DType::Bf16, DType::F16, DType::I32, DType::Bool].into_iter().find(|t| t.name() == name)
    }
}

/// The nearest number with so many bits in its significand, by the exponents of the least normal and of the greatest one.
fn nearest(x: f64, bits: i32, [least, most]: [i32; 2], round: impl Fn(f64) -> f64) -> f64 {
    if x == 0.0 || !x.is_finite() {
        return x;
    }
    // Scaling by a power of two is exact here, far from the limits of f64.
    let exponent = ((x.to_bits() >> 52 & 0x7ff) as i32 - 1023).max(least);
    let unit = 2f64.powi(exponent + 1 - bits);
    let rounded = round(x / unit) * unit;
    if rounded.abs() >= 2f64.powi(most + 1) { f64::INFINITY.copysign(x) } else { rounded }
}

/// The nearest number of tf32, the exponents of f32 with 10 bits of mantissa; ties away from zero, as `cvt.rna.tf32.f32` of PTX rounds.
pub fn tf32(x: f64) -> f64 {
    nearest(x, 11, [-126, 127], f64::round)
}

#[cfg(test)]
mod tests {
    use super::{DType, tf32};

    #[test]
    fn bf16_has_eight_bits_and_ties_go_to_even() {
        let round = |x| DType::Bf16.round(x);
        assert_eq!([256.0, 257.0, 259.0, -257.0, 1.0 + 1.0 / 256.0].map(round), [256.0, 256.0, 260.0, -256.0, 1.0]);
        // The cases cover subnormal numbers, the greatest number and numbers beyond it.
        let least = 2f64.powi(-133);
        assert_eq!([least, 0.5 * least, 0.75 * least].map(round), [least, 0.0, least]);
        let most = 255.0 * 2f64.powi(120);
        assert_eq!([most, most * 1.0019, most * 1.002].map(round), [most, most, f64::INFINITY]);
        assert!(round(f64::NAN).is_nan());
    }

    #[test]
    fn numbers_beyond_the_greatest_of_a_type_are_not_finite_in_it() {
        let edge = f64::from(f32::MAX) + 2f64.powi(103);
        assert_eq!([edge.next_down(), edge, 1e39, -1e39, f64::NAN].map(|x| DType::F32.is_finite(x)), [true, false, false, false, false]);
        assert_eq!([65_519.0, 65_520.0].map(|x| DType::F16.is_finite(x)), [true, false]);
        assert_eq!([65_520.0, 3.39e38, 3.4e38].map(|x| DType::Bf16.is_finite(x)), [true, true, false]);
        assert!(DType::I32.is_finite(1e9) && !DType::Bool.is_finite(f64::INFINITY));
    }

    #[test]
    fn tf32_has_eleven_bits_and_ties_go_away_from_zero() {
        assert_eq!([2048.0, 2049.0, 2050.9, 2051.0, -2049.0].map(tf32), [2048.0, 2050.0, 2050.0, 2052.0, -2050.0]);
        // Rounding must equal adding half of the last kept place to the bits and cutting off the bits below it.
        for bits in [0x0000_0001, 0x0000_1000, 0x0012_3456, 0x3F80_0FFF, 0x3F80_1000, 0xC049_0FDB, 0x7F7F_EFFF, 0x7F7F_F000] {
            let want = f32::from_bits((bits + 0x1000) & !0x1FFF);
            assert_eq!(tf32(f32::from_bits(bits).into()), f64::from(want), "{bits:x}");
        }
    }

    #[test]
    fn f16_has_eleven_bits_and_ends_at_65504() {
        let round = |x| DType::F16.round(x);
        assert_eq!(
            [2049.0, 2051.0, 65504.0, 65519.9, 65520.0, -65520.0].map(round),
            [2048.0, 2052.0, 65504.0, 65504.0, f64::INFINITY, f64::NEG_INFINITY]
        );
        let least = 2f64.powi(-24);
        assert_eq!([least, 1.5 * least, 2.5 * least, 0.4 * least].map(round), [least, 2.0 * least, 2.0 * least, 0.0]);
    }
}
