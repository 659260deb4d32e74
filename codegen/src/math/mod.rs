//! Vector functions of f32, written once against [`Builder`].
//!
//! Errors are at most about 1.5 units in the last place (measured against f64 by this module's tests), and special
//! values follow IEEE 754: not-a-number in, not-a-number out; overflow gives infinity. Results below the least normal
//! number may be zero. Values that are as good as 16-bit floats ([`crate::narrow`]) are made by what a GPU
//! approximates in one instruction instead ([`Builder::approximate`]): they have 8 or 11 digits, the approximations
//! 22. Polynomials: Cephes (S. Moshier) for exp, log, sin and cos; N. Juffa's two-branch form for erf.

#[cfg(test)]
mod tests;

use crate::build::{Approximate, Builder, Compare, Convert, FloatBinary, FloatUnary, IntBinary, Lane};

/// `c[0] * x^n + ... + c[n]`, by Horner's rule.
fn polynomial<B: Builder>(b: &B, x: B::Vector, coefficients: &[f64]) -> B::Vector {
    let (first, rest) = coefficients.split_first().expect("invariant: a polynomial has coefficients");
    rest.iter().fold(b.f32(*first), |sum, &c| b.fma(sum, x, b.f32(c)))
}

/// e^x: 2^n times a polynomial of the remainder, |r| <= ln(2) / 2. Below -87.33 zero.
pub fn exp<B: Builder>(b: &B, x: B::Vector) -> B::Vector {
    if let Some(power) = b.approximate(Approximate::Exp, x) {
        return power;
    }
    // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
    let magic = b.f32(12_582_912.0);
    let shifted = b.fma(x, b.f32(std::f64::consts::LOG2_E), magic);
    let n = b.sub(shifted, magic);
    let r = b.fma(n, b.f32(-0.693_145_751_953_125), x);
    let r = b.fma(n, b.f32(-1.428_606_765_330_187e-6), r);
    let p = polynomial(
        b,
        r,
        &[1.987_569_15e-4, 1.398_199_950_7e-3, 8.333_451_907_3e-3, 4.166_579_589_4e-2, 1.666_666_545_9e-1, 5.000_000_120_1e-1, 1.0, 1.0],
    );
    let exponent = b.int2(IntBinary::Shl, b.convert(Convert::Bits(Lane::I32), shifted), b.i32(23));
    let scaled = b.int2(IntBinary::Add, b.convert(Convert::Bits(Lane::I32), p), exponent);
    let result = b.convert(Convert::Bits(Lane::F32), scaled);
    let result = ir::fault!("math.exp.least", result, b.select(b.compare_float(Compare::Lt, x, b.f32(-87.33)), b.f32(0.0), result));
    let result = ir::fault!("math.exp.most", result, b.select(b.compare_float(Compare::Gt, x, b.f32(88.722_83)), b.f32(f64::INFINITY), result));
    b.select(b.compare_float(Compare::Eq, x, x), result, x)
}

/// 2^x for x below 128: 2^n times a polynomial of the remainder, |r| <= 1/2. Below -126.5 zero. A minimax fit of 2^r
/// / p(r) - 1 that is exact at 0.
pub fn exp2<B: Builder>(b: &B, x: B::Vector) -> B::Vector {
    if let Some(power) = b.approximate(Approximate::Exp2, x) {
        return power;
    }
    // Adding `magic` rounds to an integer and leaves it in the low bits with the exponent's bias. NaN stays NaN.
    let magic = b.f32(12_582_912.0 + 127.0);
    let x = b.max(b.f32(-127.0), x);
    let shifted = b.add(x, magic);
    let r = b.sub(x, b.sub(shifted, magic));
    let p = polynomial(
        b,
        r,
        &[1.535_335_306e-4, 1.339_887_458_8e-3, 9.618_437_358_5e-3, 5.550_332_470_7e-2, 2.402_264_791_36e-1, 6.931_472_028_55e-1, 1.0],
    );
    let exponent = b.int2(IntBinary::Shl, b.convert(Convert::Bits(Lane::I32), shifted), b.i32(23));
    b.mul(p, b.convert(Convert::Bits(Lane::F32), exponent))
}

/// The natural logarithm: zero gives minus infinity, less gives not-a-number. Subnormal numbers count as they are.
pub fn log<B: Builder>(b: &B, x: B::Vector) -> B::Vector {
    let tiny = b.compare_float(Compare::Lt, x, b.f32(f64::from(f32::MIN_POSITIVE)));
    let scaled = b.select(tiny, b.mul(x, b.f32(8_388_608.0)), x);
    let bits = b.convert(Convert::Bits(Lane::I32), scaled);
    // This exponent leaves the mantissa in [sqrt(1/2), sqrt(2)).
    let e = b.int2(IntBinary::ShrArithmetic, b.int2(IntBinary::Sub, bits, b.i32(0x3f35_04f3)), b.i32(23));
    let mantissa = b.convert(Convert::Bits(Lane::F32), b.int2(IntBinary::Sub, bits, b.int2(IntBinary::Shl, e, b.i32(23))));
    let f = b.sub(mantissa, b.f32(1.0));
    let e = b.convert(Convert::IntToFloat(Lane::F32), e);
    let e = b.select(tiny, b.sub(e, b.f32(23.0)), e);
    let p = polynomial(
        b,
        f,
        &[
            7.037_683_629_2e-2,
            -1.151_461_031e-1,
            1.167_699_874e-1,
            -1.242_014_084_6e-1,
            1.424_932_278_7e-1,
            -1.666_805_766_5e-1,
            2.000_071_476_5e-1,
            -2.499_999_399_3e-1,
            3.333_333_117_4e-1,
        ],
    );
    let z = b.mul(f, f);
    let y = b.mul(b.mul(f, z), p);
    let y = b.fma(e, b.f32(ir::fault!("math.log.low", 2.121_944_4e-4, -2.121_944_4e-4)), y);
    let y = b.fma(z, b.f32(-0.5), y);
    let result = b.fma(e, b.f32(0.693_359_375), b.add(f, y));
    // For positive finite x the result is as computed. It is minus infinity at zero, infinity at infinity, else NaN.
    let infinite = b.compare_float(Compare::Eq, x, b.f32(f64::INFINITY));
    let zero = b.compare_float(Compare::Eq, x, b.f32(0.0));
    let positive = b.compare_float(Compare::Gt, x, b.f32(0.0));
    let result = b.select(positive, result, b.f32(f64::NAN));
    let result = b.select(zero, b.f32(f64::NEG_INFINITY), result);
    b.select(infinite, x, result)
}

/// tanh: an odd polynomial below 0.625, above it 1 - 2 / (e^2|x| + 1).
pub fn tanh<B: Builder>(b: &B, x: B::Vector) -> B::Vector {
    let a = b.float1(FloatUnary::Abs, x);
    let e = exp(b, b.add(a, a));
    let large = b.sub(b.f32(1.0), quotient(b, b.f32(2.0), b.add(e, b.f32(1.0))));
    let z = b.mul(x, x);
    let p = polynomial(
        b,
        z,
        &[
            ir::fault!("math.tanh.term", 5.704_988_727_45e-3, -5.704_988_727_45e-3),
            2.063_908_879_54e-2,
            -5.373_971_555_31e-2,
            1.333_144_220_36e-1,
            -3.333_328_194_22e-1,
        ],
    );
    let small = b.fma(b.mul(p, z), a, a);
    let result = b.select(b.compare_float(Compare::Lt, a, b.f32(0.625)), small, large);
    b.float2(FloatBinary::CopySign, result, x)
}

/// tanh of a score: a quotient of polynomials, at half the cost of [`tanh`]. It errs by less than 3.5e-7 of its
/// result (3.3e-7 was found of all f32): of a capped score by as much as a few roundings of the products that it is
/// made of. A minimax fit of the relative error up to [`TANH_END`], where what is left to 1 is 1.3e-7.
/// Not-a-number stays.
pub fn tanh_of_score<B: Builder>(b: &B, x: B::Vector) -> B::Vector {
    let x = b.min(b.f32(TANH_END), b.max(b.f32(-TANH_END), x));
    let z = b.mul(x, x);
    let above = polynomial(b, z, &[1.464_828_081e-8, 2.150_851_105e-5, 3.549_170_215e-3, 1.342_587_173e-1, 1.0]);
    let below = polynomial(
        b,
        z,
        &[8.295_117_482e-7, 3.373_952_059e-4, 2.607_995_458e-2, ir::fault!("math.tanh_of_score.term", 4.575_919_712e-1, 4.675_919_712e-1), 1.0],
    );
    quotient(b, b.mul(x, above), below)
}

/// From here on [`tanh_of_score`] is the same.
const TANH_END: f64 = 8.3;

/// The error function: an odd polynomial up to 0.921875, above it 1 - e^p(|x|).
pub fn erf<B: Builder>(b: &B, x: B::Vector) -> B::Vector {
    let a = b.float1(FloatUnary::Abs, x);
    let square = b.mul(x, x);
    // Beyond 4 the result is 1 in f32; `min` keeps not-a-number because it returns its second operand then.
    let t = b.min(b.f32(4.0), a);
    let p = polynomial(
        b,
        t,
        &[-1.728_534_7e-5, 3.831_971_26e-4, -3.883_964_38e-3, 2.425_462_19e-2, -1.067_778_47e-1, -6.348_466_87e-1, -1.287_175_12e-1],
    );
    let large = b.sub(b.f32(1.0), exp(b, b.fma(p, t, ir::fault!("math.erf.sign", t, b.float1(FloatUnary::Neg, t)))));
    let q = polynomial(b, square, &[-5.967_617_03e-4, 4.991_194_23e-3, -2.676_813_49e-2, 1.128_199_25e-1, -3.761_253_36e-1, 1.283_791_66e-1]);
    let small = b.fma(q, a, a);
    let result = b.select(b.compare_float(Compare::Gt, a, b.f32(0.921_875)), large, small);
    b.float2(FloatBinary::CopySign, result, x)
}

/// 1 / sqrt(x), by an exact square root and a division.
pub fn rsqrt<B: Builder>(b: &B, x: B::Vector) -> B::Vector {
    b.approximate(Approximate::Rsqrt, x).unwrap_or_else(|| b.div(b.f32(1.0), b.float1(FloatUnary::Sqrt, x)))
}

/// x / y.
pub fn quotient<B: Builder>(b: &B, x: B::Vector, y: B::Vector) -> B::Vector {
    b.approximate(Approximate::Recip, y).map_or_else(|| b.div(x, y), |inverse| b.mul(x, inverse))
}

/// Which of the two circular functions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Circular {
    /// The sine, of an angle in radians.
    Sin,
    /// The cosine, of an angle in radians.
    Cos,
}

/// sin or cos: reduced by multiples of pi/2 in three parts (accurate to about |x| = 10^5; beyond 10^9 meaningless).
pub fn circular<B: Builder>(b: &B, which: Circular, x: B::Vector) -> B::Vector {
    let n = b.float1(FloatUnary::Round, b.mul(x, b.f32(std::f64::consts::FRAC_2_PI)));
    let r = b.fma(n, b.f32(-1.570_796_25), x);
    let r = b.fma(n, b.f32(ir::fault!("math.circular.middle", 0.0, -7.549_789_415_861_596e-8)), r);
    let r = b.fma(n, b.f32(-5.390_302_953_474_925e-15), r);
    let quadrant = b.convert(Convert::FloatToInt(Lane::I32), n);
    let quadrant = match which {
        Circular::Sin => quadrant,
        Circular::Cos => b.int2(IntBinary::Add, quadrant, b.i32(ir::fault!("math.cos.quadrant", 3, 1))),
    };
    let z = b.mul(r, r);
    let s = polynomial(b, z, &[-1.951_529_589_1e-4, 8.332_160_873_6e-3, -1.666_665_461_1e-1]);
    let sine = b.fma(b.mul(s, z), r, r);
    let c = polynomial(b, z, &[2.443_315_711_809_948e-5, -1.388_731_625_493_765e-3, 4.166_664_568_298_827e-2]);
    let cosine = b.fma(b.mul(z, z), c, b.fma(z, b.f32(-0.5), b.f32(1.0)));
    let bit = |n: i32| b.compare_int(Compare::Ne, b.int2(IntBinary::And, quadrant, b.i32(n)), b.i32(0));
    let result = b.select(bit(1), cosine, sine);
    b.select(bit(ir::fault!("math.circular.sign", 1, 2)), b.float1(FloatUnary::Neg, result), result)
}

/// x^y through f64: a rounding error of the logarithm would be multiplied by the size of the exponent.
///
/// Follows `pow` of C: x^0 = 1^y = 1; a negative x gives not-a-number unless y is an integer.
pub fn pow<B: Builder>(b: &B, x: B::Vector, y: B::Vector) -> B::Vector {
    let polynomial = |x: B::Vector, coefficients: &[f64]| {
        let (first, rest) = coefficients.split_first().expect("invariant: a polynomial has coefficients");
        rest.iter().fold(b.f64(*first), |sum, &c| b.fma(sum, x, b.f64(c)))
    };
    let magnitude = b.convert(Convert::Float(Lane::F64), b.float1(FloatUnary::Abs, x));
    let power = b.convert(Convert::Float(Lane::F64), y);
    // The power comes from log2 |x| = e + 2/ln(2) * atanh(s), s = (m - 1) / (m + 1), m in [sqrt(1/2), sqrt(2)).
    let bits = b.convert(Convert::Bits(Lane::I64), magnitude);
    let e = b.int2(IntBinary::ShrArithmetic, b.int2(IntBinary::Sub, bits, b.i64(0x3fe6_a09e_0000_0000)), b.i64(52));
    let m = b.convert(Convert::Bits(Lane::F64), b.int2(IntBinary::Sub, bits, b.int2(IntBinary::Shl, e, b.i64(52))));
    let s = b.div(b.sub(m, b.f64(1.0)), b.add(m, b.f64(1.0)));
    let z = b.mul(s, s);
    let series: Vec<f64> = (0..9).rev().map(|k| 1.0 / f64::from(2 * k + 1)).collect();
    let atanh = b.mul(polynomial(z, &series), s);
    let log2 = b.fma(atanh, b.f64(2.0 * std::f64::consts::LOG2_E), b.convert(Convert::IntToFloat(Lane::F64), e));
    // The power is 2^t, with t clamped to the range of f32 and room for infinity and zero.
    let t = b.mul(log2, power);
    let t = b.max(b.f64(-200.0), b.min(b.f64(200.0), t));
    let n = b.float1(FloatUnary::Round, t);
    let r = b.mul(b.sub(t, n), b.f64(std::f64::consts::LN_2));
    let mut factorial = 1.0;
    let mut taylor = vec![1.0];
    for k in 1..12 {
        factorial *= f64::from(k);
        taylor.push(1.0 / factorial);
    }
    taylor.reverse();
    let exponent = b.int2(IntBinary::Shl, b.convert(Convert::FloatToInt(Lane::I64), n), b.i64(52));
    let scaled = b.int2(IntBinary::Add, b.convert(Convert::Bits(Lane::I64), polynomial(r, &taylor)), exponent);
    let result = b.convert(Convert::Float(Lane::F32), b.convert(Convert::Bits(Lane::F64), scaled));
    special_powers(b, x, y, result)
}

/// The cases of `pow` that the logarithm does not cover; `result` is |x|^y for positive finite |x|.
fn special_powers<B: Builder>(b: &B, x: B::Vector, y: B::Vector, result: B::Vector) -> B::Vector {
    let (zero, one, infinity) = (b.f32(0.0), b.f32(1.0), b.f32(f64::INFINITY));
    let a = b.float1(FloatUnary::Abs, x);
    let falling = b.compare_float(Compare::Lt, y, zero);
    let result = b.select(b.compare_float(Compare::Eq, a, zero), b.select(falling, infinity, zero), result);
    let result = b.select(b.compare_float(Compare::Eq, a, infinity), b.select(falling, zero, infinity), result);
    let result = b.select(b.compare_float(Compare::Eq, a, one), one, result);
    // For negative x, odd powers are negative and fractional ones are NaN.
    let whole = b.compare_float(Compare::Eq, b.float1(FloatUnary::Floor, y), y);
    let half = b.mul(y, b.f32(0.5));
    let odd = b.int2(IntBinary::And, whole, b.compare_float(Compare::Ne, b.float1(FloatUnary::Floor, half), half));
    let negative = b.compare_int(Compare::Lt, b.convert(Convert::Bits(Lane::I32), x), b.i32(0));
    let signed = ir::fault!("math.pow.odd", result, b.select(odd, b.float1(FloatUnary::Neg, result), result));
    let below = b.int2(IntBinary::And, b.compare_float(Compare::Lt, x, zero), b.compare_float(Compare::Lt, a, infinity));
    let broken = b.compare_float(Compare::Ne, b.float1(FloatUnary::Floor, y), y);
    let signed = b.select(b.int2(IntBinary::And, below, broken), b.f32(f64::NAN), signed);
    let result = b.select(negative, signed, result);
    let result = b.select(b.compare_float(Compare::Eq, x, x), result, x);
    let result = b.select(b.compare_float(Compare::Eq, y, y), result, y);
    let result = b.select(b.compare_float(Compare::Eq, y, zero), one, result);
    b.select(b.compare_float(Compare::Eq, x, one), one, result)
}
