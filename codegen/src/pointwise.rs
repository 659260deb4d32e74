//! The ops of kernel bodies that compute a result at a point from their operands at that point, and sources.
//!
//! In registers a float is an `F32` lane, an i32 an `I32` lane, a bool a `Mask` lane. The result of an op of a 16-bit
//! float is rounded to it before anything uses it, in registers too.

use crate::CompileError;
use crate::build::{Builder, Compare, Convert, FloatBinary, FloatUnary, IntBinary, Lane};
use crate::math::{self, Circular};
use ir::dim::{Base, Dim, DimInfo, Dims, IndexMap, Order};
use ir::graph::{Body, Type, Value};
use ir::op::{self, Binary, DType, Op, Scalar, Unary};

/// The lane that holds elements of this dtype in registers.
pub fn lane(dtype: DType) -> Lane {
    match dtype {
        DType::F32 | DType::Bf16 | DType::F16 => Lane::F32,
        DType::I32 => Lane::I32,
        DType::Bool => Lane::Mask,
    }
}

/// The lane of elements of this dtype in memory.
pub fn stored(dtype: DType) -> Lane {
    match dtype {
        DType::F32 => Lane::F32,
        DType::Bf16 => Lane::Bf16,
        DType::F16 => Lane::F16,
        DType::I32 => Lane::I32,
        DType::Bool => Lane::Mask,
    }
}

/// A value of this dtype that was computed in f32: to the nearest 16-bit float, ties to even; others are what they
/// are.
pub fn rounded<B: Builder>(b: &B, dtype: DType, x: B::Vector) -> B::Vector {
    match dtype {
        DType::F32 | DType::I32 | DType::Bool => x,
        DType::F16 => b.to_f16(x),
        DType::Bf16 => b.to_bf16(x),
    }
}

/// Whether the op's result may need rounding though its operands are of its dtype.
fn rounds(op: &Op) -> bool {
    match op {
        Op::Select | Op::StopGradient | Op::Expand | Op::Compare(_) => false,
        Op::Unary(u) => ir::fault!("pointwise.function.rounded", false, !matches!(u, Unary::Neg | Unary::Abs | Unary::Sign | Unary::Not)),
        Op::Binary(o) => !matches!(o, Binary::Max | Binary::Min | Binary::And | Binary::Or),
        _ => true,
    }
}

/// A scalar argument in every lane, in the lane of its dtype.
pub fn scalar<B: Builder>(b: &B, scalars: B::Pointer, slot: u32, dtype: DType) -> B::Vector {
    let from = b.at_const(scalars, 8 * i64::from(slot));
    match dtype {
        DType::F32 | DType::Bf16 | DType::F16 => rounded(b, dtype, b.convert(Convert::Float(Lane::F32), b.load_splat(from, Lane::F64))),
        DType::I32 => b.convert(Convert::Int(Lane::I32), b.load_splat(from, Lane::I64)),
        DType::Bool => b.compare_int(Compare::Ne, b.load_splat(from, Lane::I64), b.i64(0)),
    }
}

/// The model's index, as `I64` lanes, of a local one.
pub fn global_index<B: Builder>(b: &B, scalars: B::Pointer, info: &DimInfo, local: B::Vector) -> B::Vector {
    let stored = stored_index(b, scalars, &info.index, local);
    let Order::ZigZag { pairs, chunk } = info.order else { return stored };
    // The zig-zag follows `Order::index`.
    let number = b.int2(IntBinary::Div, stored, b.i64(chunk as i64));
    let inside = b.int2(IntBinary::Rem, stored, b.i64(chunk as i64));
    let pair = b.int2(IntBinary::ShrLogical, number, b.i64(1));
    let last = b.compare_int(Compare::Eq, b.int2(IntBinary::And, number, b.i64(1)), b.i64(1));
    let mirrored = b.int2(IntBinary::Sub, b.i64(2 * pairs as i64 - ir::fault!("pointwise.index.mirrored", 0, 1)), pair);
    let chunks = b.int2(IntBinary::Mul, b.select(last, mirrored, pair), b.i64(chunk as i64));
    b.int2(IntBinary::Add, chunks, inside)
}

/// The index in the whole dim as it is stored.
fn stored_index<B: Builder>(b: &B, scalars: B::Pointer, map: &IndexMap, local: B::Vector) -> B::Vector {
    let mut sum = None;
    if map.is_contiguous() {
        sum = Some(local);
    } else {
        // The digits of a mixed-radix number are taken innermost first; the outermost needs no remainder.
        let mut rest = local;
        for (k, &(extent, stride)) in map.parts.iter().enumerate().rev() {
            let digit = if k == ir::fault!("pointwise.index.outermost", map.parts.len() - 1, 0) {
                rest
            } else {
                b.int2(IntBinary::Rem, rest, b.i64(extent as i64))
            };
            if k != 0 {
                rest = b.int2(IntBinary::Div, rest, b.i64(extent as i64));
            }
            let term = b.int2(IntBinary::Mul, digit, b.i64(stride as i64));
            sum = Some(sum.map_or(term, |s| b.int2(IntBinary::Add, s, term)));
        }
    }
    let sum = sum.unwrap_or_else(|| b.i64(0));
    match &map.base {
        Base::Zero => sum,
        Base::Slot(slot) => b.int2(IntBinary::Add, sum, b.load_splat(b.at_const(scalars, 8 * i64::from(*slot)), Lane::I64)),
        Base::Coords(_) => unreachable!("invariant: a verified kernel has slots only"),
    }
}

/// A number in every lane.
pub fn constant<B: Builder>(b: &B, dtype: DType, number: f64) -> B::Vector {
    match dtype {
        DType::F32 | DType::Bf16 | DType::F16 => b.f32(f64::from(dtype.round(number) as f32)),
        DType::I32 => b.i32(number as i32),
        DType::Bool => b.mask_first(if number != 0.0 { b.lanes() } else { 0 }),
    }
}

/// Writes sources: ops without operands, other than inputs.
pub struct Sources<'a, B: Builder> {
    pub b: &'a B,
    pub body: &'a Body,
    pub scalars: B::Pointer,
    /// The number of scalar arguments: the last two are seed and step where random numbers are drawn.
    pub scalar_count: usize,
}

impl<B: Builder> Sources<'_, B> {
    /// The value of a source; `local` gives the local index along a dim as `I64` lanes.
    ///
    /// # Errors
    /// The op is not a source of kernels.
    pub fn value(&self, v: Value, local: &mut dyn FnMut(Dim) -> B::Vector) -> Result<B::Vector, CompileError> {
        let (b, node) = (self.b, &self.body[v]);
        match &node.op {
            Op::Const(number) => Ok(constant(b, node.ty.dtype, number.0)),
            Op::Scalar(Scalar::Slot(slot)) => Ok(scalar(b, self.scalars, *slot, node.ty.dtype)),
            Op::Iota(dim) => {
                let index = global_index(b, self.scalars, &self.body.dims[*dim], local(*dim));
                Ok(b.convert(Convert::Int(Lane::I32), index))
            }
            Op::Uniform { key } => Ok(self.uniform(*key, &node.ty, &self.body.dims, local)),
            other => Err(CompileError::unsupported(format!("`{}` as a source", other.name()))),
        }
    }

    /// Follows `ir::random::uniform`, bit for bit.
    fn uniform(&self, key: u64, ty: &Type, dims: &Dims, local: &mut dyn FnMut(Dim) -> B::Vector) -> B::Vector {
        let b = self.b;
        let xor = |x, y| b.int2(IntBinary::Xor, x, y);
        let mix = |z| {
            let shifted = |z, by| xor(z, b.int2(IntBinary::ShrLogical, z, b.i64(by)));
            let z = b.int2(IntBinary::Add, z, b.i64(0x9e37_79b9_7f4a_7c15_u64 as i64));
            let z = b.int2(IntBinary::Mul, shifted(z, 30), b.i64(0xbf58_476d_1ce4_e5b9_u64 as i64));
            let z = b.int2(IntBinary::Mul, shifted(z, 27), b.i64(0x94d0_49bb_1331_11eb_u64 as i64));
            shifted(z, 31)
        };
        let argument = |from_end: usize| b.load_splat(b.at_const(self.scalars, 8 * (self.scalar_count - from_end) as i64), Lane::I64);
        let [seed, step] = ir::fault!("pointwise.uniform.step", [1, 2], [2, 1]).map(argument);
        let stream = mix(xor(mix(xor(b.i64(key as i64), mix(seed))), step));
        let mut index = b.i64(0);
        for &dim in &ty.dims {
            let global = global_index(b, self.scalars, &dims[dim], local(dim));
            index = b.int2(
                IntBinary::Add,
                b.int2(IntBinary::Mul, index, b.i64(ir::fault!("pointwise.uniform.local", dims[dim].size, dims[dim].logical) as i64)),
                global,
            );
        }
        let bits = b.int2(IntBinary::ShrLogical, mix(xor(stream, index)), b.i64(40));
        let whole = b.convert(Convert::IntToFloat(Lane::F32), b.convert(Convert::Int(Lane::I32), bits));
        b.mul(whole, b.f32(1.0 / f64::from(1 << 24)))
    }
}

/// The sum of two numbers.
pub fn plus<B: Builder>(b: &B, lane: Lane, x: B::Vector, y: B::Vector) -> B::Vector {
    match lane {
        Lane::F32 => b.add(x, y),
        Lane::I32 => b.int2(IntBinary::Add, x, y),
        Lane::Mask | Lane::F64 | Lane::I64 | Lane::Bf16 | Lane::F16 => unreachable!("invariant: `add` is of numbers in registers"),
    }
}

/// The result of a pointwise op from its operands' values.
///
/// # Errors
/// The op is not pointwise.
pub fn apply<B: Builder>(b: &B, body: &Body, v: Value, args: &[B::Vector]) -> Result<B::Vector, CompileError> {
    b.locate(v);
    of_one(b, body, v, args)
}

/// The same within what computes one value of the kernel, of another body than the kernel's.
///
/// # Errors
/// The op is not pointwise.
pub fn of_one<B: Builder>(b: &B, body: &Body, v: Value, args: &[B::Vector]) -> Result<B::Vector, CompileError> {
    let node = &body[v];
    let from = |k: usize| lane(body[node.args[k]].ty.dtype);
    let value = match &node.op {
        Op::Unary(op) => unary(b, *op, from(0), args[0]),
        Op::Binary(op) => binary(b, *op, from(0), args[0], args[1]),
        Op::Compare(op) => compare(b, *op, from(0), args[0], args[1]),
        Op::Select => b.select(args[0], args[1], args[2]),
        Op::Add => {
            let (first, rest) = args.split_first().expect("invariant: `add` has operands");
            rest.iter().fold(*first, |sum, &x| plus(b, from(0), sum, x))
        }
        Op::Cast => cast(b, from(0), lane(node.ty.dtype), args[0]),
        Op::StopGradient | Op::Expand => args[0],
        other => return Err(CompileError::unsupported(format!("`{}` beside a contraction", other.name()))),
    };
    Ok(if rounds(&node.op) { rounded(b, node.ty.dtype, value) } else { value })
}

/// Conversion between dtypes: float to int truncates, to bool is `!= 0`.
fn cast<B: Builder>(b: &B, from: Lane, to: Lane, x: B::Vector) -> B::Vector {
    match (from, to) {
        (Lane::F32, Lane::I32) => b.convert(Convert::FloatToInt(Lane::I32), x),
        (Lane::F32, Lane::Mask) => b.compare_float(Compare::Ne, x, b.f32(0.0)),
        (Lane::I32, Lane::F32) => b.convert(Convert::IntToFloat(Lane::F32), x),
        (Lane::I32, Lane::Mask) => b.compare_int(Compare::Ne, x, b.i32(0)),
        (Lane::Mask, Lane::F32) => b.select(x, b.f32(1.0), b.f32(0.0)),
        (Lane::Mask, Lane::I32) => b.convert(ir::fault!("pointwise.cast.bool", Convert::Int(Lane::I32), Convert::Unsigned(Lane::I32)), x),
        _ => x,
    }
}

fn unary<B: Builder>(b: &B, op: Unary, lane: Lane, x: B::Vector) -> B::Vector {
    if lane == Lane::I32 {
        let zero = b.i32(0);
        let negative = b.int2(IntBinary::Sub, zero, x);
        let below = b.compare_int(Compare::Lt, x, zero);
        return match op {
            Unary::Neg => negative,
            Unary::Abs => b.select(below, negative, x),
            Unary::Sign => b.select(below, b.i32(-1), b.select(b.compare_int(Compare::Gt, x, zero), b.i32(1), zero)),
            Unary::Exp
            | Unary::Log
            | Unary::Sqrt
            | Unary::Rsqrt
            | Unary::Recip
            | Unary::Tanh
            | Unary::Sin
            | Unary::Cos
            | Unary::Erf
            | Unary::Floor
            | Unary::Not => unreachable!("invariant: not an op of ints"),
        };
    }
    match op {
        Unary::Neg => b.float1(FloatUnary::Neg, x),
        Unary::Exp => math::exp(b, x),
        Unary::Log => math::log(b, x),
        Unary::Sqrt => b.float1(FloatUnary::Sqrt, x),
        Unary::Rsqrt => math::rsqrt(b, x),
        Unary::Recip => math::quotient(b, b.f32(1.0), x),
        Unary::Tanh => math::tanh(b, x),
        Unary::Sin => math::circular(b, Circular::Sin, x),
        Unary::Cos => math::circular(b, Circular::Cos, x),
        Unary::Erf => math::erf(b, x),
        Unary::Abs => b.float1(FloatUnary::Abs, x),
        Unary::Floor => b.float1(FloatUnary::Floor, x),
        Unary::Sign => {
            let zero = b.f32(0.0);
            let one = b.float2(FloatBinary::CopySign, b.f32(1.0), x);
            // Zero and NaN stay what they are.
            let moving = b.int2(IntBinary::Or, b.compare_float(Compare::Lt, x, zero), b.compare_float(Compare::Gt, x, zero));
            ir::fault!("pointwise.sign.zero", one, b.select(moving, one, x))
        }
        Unary::Not => b.int2(IntBinary::Xor, x, b.mask_first(b.lanes())),
    }
}

/// The greater of two floats; not-a-number if either is.
pub fn greater<B: Builder>(b: &B, x: B::Vector, y: B::Vector) -> B::Vector {
    ir::fault!("pointwise.greater.broken", b.max(x, y), b.select(b.compare_float(Compare::Eq, x, x), b.max(x, y), x))
}

/// [`ir::random::mix_two`].
fn mix<B: Builder>(b: &B, x: B::Vector, y: B::Vector) -> B::Vector {
    let [first, second, third] = ir::random::MIX_FACTORS.map(|f| b.i32(f.cast_signed()));
    let [far, near] = ir::random::MIX_SHIFTS.map(|s| b.i32(s as i32));
    let folded = |z, shift| b.int2(IntBinary::Xor, z, b.int2(IntBinary::ShrLogical, z, shift));
    let z = b.int2(IntBinary::Xor, x, b.int2(IntBinary::Mul, y, first));
    let z = b.int2(IntBinary::Mul, folded(z, far), second);
    let z = b.int2(IntBinary::Add, folded(z, near), x);
    folded(b.int2(IntBinary::Mul, z, third), ir::fault!("pointwise.mix.shift", far, near))
}

fn binary<B: Builder>(b: &B, op: Binary, lane: Lane, x: B::Vector, y: B::Vector) -> B::Vector {
    match (op, lane) {
        (Binary::And, _) => b.int2(IntBinary::And, x, y),
        (Binary::Or, _) => b.int2(IntBinary::Or, x, y),
        (Binary::Mix, _) => mix(b, x, y),
        (Binary::Sub, Lane::I32) => b.int2(IntBinary::Sub, x, y),
        (Binary::Mul, Lane::I32) => b.int2(IntBinary::Mul, x, y),
        (Binary::Max, Lane::I32) => b.select(b.compare_int(Compare::Gt, x, y), x, y),
        (Binary::Min, Lane::I32) => b.select(b.compare_int(Compare::Lt, x, y), x, y),
        (Binary::Div | Binary::Rem, Lane::I32) => {
            // The floored quotient is one less than the truncated one where there is a remainder and the signs
            // differ. A zero divisor would trap, so it counts as one.
            let y = b.select(b.compare_int(Compare::Eq, y, b.i32(0)), b.i32(1), y);
            let (quotient, remainder) = (b.int2(IntBinary::Div, x, y), b.int2(IntBinary::Rem, x, y));
            let signs_differ =
                b.compare_int(Compare::Lt, b.int2(IntBinary::Xor, ir::fault!("pointwise.ints.signs", quotient, remainder), y), b.i32(0));
            let off = ir::fault!(
                "pointwise.ints.floored",
                signs_differ,
                b.int2(IntBinary::And, b.compare_int(Compare::Ne, remainder, b.i32(0)), signs_differ)
            );
            match op {
                Binary::Div => b.select(off, b.int2(IntBinary::Sub, quotient, b.i32(1)), quotient),
                _ => b.select(off, b.int2(IntBinary::Add, remainder, y), remainder),
            }
        }
        (Binary::Pow, Lane::I32) => {
            let float = |x| b.convert(Convert::IntToFloat(Lane::F32), x);
            b.convert(Convert::FloatToInt(Lane::I32), math::pow(b, float(x), float(y)))
        }
        (Binary::Sub, _) => b.sub(x, y),
        (Binary::Mul, _) => b.mul(x, y),
        (Binary::Div, _) => math::quotient(b, x, y),
        (Binary::Rem, _) => b.sub(x, b.mul(b.float1(FloatUnary::Floor, b.div(x, y)), y)),
        (Binary::Pow, _) => math::pow(b, x, y),
        (Binary::Max, _) => greater(b, x, y),
        (Binary::Min, _) => b.select(b.compare_float(Compare::Eq, x, x), b.min(x, y), x),
    }
}

fn compare<B: Builder>(b: &B, op: op::Compare, lane: Lane, x: B::Vector, y: B::Vector) -> B::Vector {
    let op = match op {
        op::Compare::Eq => Compare::Eq,
        op::Compare::Ne => Compare::Ne,
        op::Compare::Lt => Compare::Lt,
        op::Compare::Le => Compare::Le,
        op::Compare::Gt => Compare::Gt,
        op::Compare::Ge => Compare::Ge,
    };
    match lane {
        Lane::F32 | Lane::F64 | Lane::Bf16 | Lane::F16 => b.compare_float(op, x, y),
        Lane::I32 | Lane::I64 => b.compare_int(op, x, y),
        Lane::Mask => b.compare_int(op, b.convert(Convert::Unsigned(Lane::I32), x), b.convert(Convert::Unsigned(Lane::I32), y)),
    }
}
