//! The builders that kernels are written with.
//!
//! [`Builder`] is what a kernel's text sees: indices, pointers, vectors of a fixed number of lanes, and counted
//! loops. [`llvm::Llvm`] writes LLVM IR through inkwell and adds what register-blocked kernels need (functions,
//! prefetch, shuffles); [`mlir::Mlir`] writes upstream MLIR dialects; [`simt::Simt`] writes LLVM IR for GPUs, where
//! the lanes of a vector are those of a warp. What it has in common with the first is in `instructions`. The vector
//! math library (`crate::math`) and the generic loops are written once, against the trait.

pub mod asm;
pub mod block;
pub mod fragments;
mod instructions;
pub mod lines;
pub mod llvm;
pub mod masked;
pub mod mlir;
pub mod scheduler;
pub mod simt;
pub mod stages;
pub mod swizzle;
mod words;

use crate::CompileError;
use crate::abi::Entry;
use ir::graph::Value;

/// What a lane of a vector holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Lane {
    /// A float of 32 bits.
    F32,
    /// A float of 64 bits.
    F64,
    /// An integer of 32 bits, with a sign.
    I32,
    /// An integer of 64 bits, with a sign.
    I64,
    /// One bit in registers, one byte (0 or 1) in memory.
    Mask,
    /// In memory only: an f32 in registers, which a store expects to be rounded to it (`pointwise::rounded`).
    Bf16,
    /// As `Bf16`.
    F16,
}

impl Lane {
    /// Bytes of one lane in memory.
    pub fn bytes(self) -> i64 {
        match self {
            Lane::F32 | Lane::I32 => 4,
            Lane::F64 | Lane::I64 => 8,
            Lane::Mask => 1,
            Lane::Bf16 | Lane::F16 => 2,
        }
    }
}

/// Operations on one floating-point vector.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FloatUnary {
    /// `-x`: the sign is flipped, that of zero too.
    Neg,
    /// `|x|`: the sign is cleared.
    Abs,
    /// The square root; not a number where `x < 0`.
    Sqrt,
    /// Rounds down to an integer.
    Floor,
    /// Rounds to the nearest integer, ties to even.
    Round,
}

/// Functions that hardware may approximate; what is less than the least normal number is zero to it, given or made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Approximate {
    /// A power of e: that of 2 of a product, which is rounded, so an error of up to 2^-24 |x| comes to it.
    Exp,
    /// A power of 2: `2^x`.
    Exp2,
    /// `1 / x`.
    Recip,
    /// `1 / sqrt(x)`.
    Rsqrt,
}

/// Operations on two floating-point vectors of one type.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FloatBinary {
    /// `a + b`.
    Add,
    /// `a - b`.
    Sub,
    /// `a * b`.
    Mul,
    /// `a / b`; by zero it is infinite, or not a number.
    Div,
    /// The magnitude of the first with the sign of the second.
    CopySign,
}

/// Operations on two integer vectors of one type, or on two masks for the bitwise ones. Shifts count below the lane's
/// width.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IntBinary {
    /// `a + b`, which wraps around.
    Add,
    /// `a - b`, which wraps around.
    Sub,
    /// `a * b`, which wraps around.
    Mul,
    /// Quotient rounded toward zero; the divisor is not zero.
    Div,
    /// Remainder with the sign of the dividend; the divisor is not zero.
    Rem,
    /// Bit by bit `a & b`.
    And,
    /// Bit by bit `a | b`.
    Or,
    /// Bit by bit `a ^ b`.
    Xor,
    /// Shift left, zeros enter.
    Shl,
    /// Shift right, zeros enter.
    ShrLogical,
    /// Shift right, the sign enters.
    ShrArithmetic,
}

/// Ordered comparisons: false where an operand is not a number, except `Ne`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Compare {
    /// `a < b`; integers have signs.
    Lt,
    /// `a <= b`; integers have signs.
    Le,
    /// `a > b`; integers have signs.
    Gt,
    /// `a >= b`; integers have signs.
    Ge,
    /// `a == b`.
    Eq,
    /// `a != b`, also where an operand is not a number.
    Ne,
}

/// Lane-wise changes of type.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Convert {
    /// The same bits, of a type as wide.
    Bits(Lane),
    /// Signed integer to float.
    IntToFloat(Lane),
    /// Float to signed integer, toward zero; out of range is unspecified.
    FloatToInt(Lane),
    /// To a wider or narrower float.
    Float(Lane),
    /// To a wider (sign extended) or narrower (truncated) integer.
    Int(Lane),
    /// To a wider integer, zeros enter; also from a mask.
    Unsigned(Lane),
}

/// The body of a loop: the counter and the carried values to the next carried values.
pub type LoopBody<'a, I, V> = dyn FnMut(I, &[V]) -> Vec<V> + 'a;

/// Writes a kernel's body. All vectors have [`Builder::lanes`] lanes.
///
/// Offsets are in bytes. Loads and stores of more than one lane assume the alignment of one lane only.
pub trait Builder {
    /// A 64-bit run-time integer, for addresses and counters.
    type Index: Copy;
    /// An address of memory.
    type Pointer: Copy;
    /// [`Builder::lanes`] lanes of one type, a [`Lane`].
    type Vector: Copy;

    /// Lanes per vector.
    fn lanes(&self) -> usize;

    /// A constant.
    fn index(&self, value: i64) -> Self::Index;
    /// `a + b`, which wraps around.
    fn index_add(&self, a: Self::Index, b: Self::Index) -> Self::Index;
    /// `a - b`, which wraps around.
    fn index_sub(&self, a: Self::Index, b: Self::Index) -> Self::Index;
    /// `a * b`, which wraps around.
    fn index_mul(&self, a: Self::Index, b: Self::Index) -> Self::Index;
    /// Unsigned quotient.
    fn index_div(&self, a: Self::Index, b: Self::Index) -> Self::Index;
    /// Unsigned remainder.
    fn index_rem(&self, a: Self::Index, b: Self::Index) -> Self::Index;
    /// Unsigned minimum.
    fn index_min(&self, a: Self::Index, b: Self::Index) -> Self::Index;

    /// `base` moved by a number of bytes that is known at run time.
    fn at(&self, base: Self::Pointer, bytes: Self::Index) -> Self::Pointer;
    /// Lanes adjacent in memory. Lanes outside `mask` are not read and are zero.
    fn load(&self, from: Self::Pointer, lane: Lane, mask: Option<Self::Vector>) -> Self::Vector;
    /// One element in every lane. With a mask, nothing is read unless some lane is in it; such lanes are zero.
    fn load_splat(&self, from: Self::Pointer, lane: Lane) -> Self::Vector;
    /// Lane `i` from `base + offsets[i]`, offsets being `I64` lanes in bytes. Lanes outside `mask` are not read and
    /// are zero.
    fn gather(&self, base: Self::Pointer, offsets: Self::Vector, lane: Lane, mask: Option<Self::Vector>) -> Self::Vector;
    /// Lanes to adjacent memory. Lanes outside `mask` are not written.
    fn store(&self, to: Self::Pointer, value: Self::Vector, lane: Lane, mask: Option<Self::Vector>);
    /// Lane `i` to `base + offsets[i]`; the inverse of [`Builder::gather`]. Later lanes win.
    fn scatter(&self, base: Self::Pointer, offsets: Self::Vector, value: Self::Vector, lane: Lane, mask: Option<Self::Vector>);
    /// `count` neighbours in each lane, from `base + offsets[i]`, which is aligned to all of them or to 16 bytes.
    /// Lanes outside `mask` are not read and are zero.
    fn gather_run(&self, base: Self::Pointer, offsets: Self::Vector, lane: Lane, count: usize, mask: Option<Self::Vector>) -> Vec<Self::Vector> {
        (0..count as i64).map(|k| self.gather(self.at_const(base, k * lane.bytes()), offsets, lane, mask)).collect()
    }
    /// Does one thing where an address is a multiple of so many bytes, a power of two, and else the other; where runs
    /// are never chosen, only the other.
    fn if_aligned(&self, _at: Self::Pointer, _bytes: i64, _yes: &dyn Fn(), no: &dyn Fn()) {
        no();
    }
    /// The inverse of [`Builder::gather_run`].
    fn scatter_run(&self, base: Self::Pointer, offsets: Self::Vector, values: &[Self::Vector], lane: Lane) {
        for (k, value) in (0..).zip(values) {
            self.scatter(self.at_const(base, k * lane.bytes()), offsets, *value, lane, None);
        }
    }
    /// The first lane as one element.
    fn store_first(&self, to: Self::Pointer, value: Self::Vector, lane: Lane);

    /// A constant, rounded to f32, in every lane.
    fn f32(&self, value: f64) -> Self::Vector;
    /// A constant in every lane, as `F64`.
    fn f64(&self, value: f64) -> Self::Vector;
    /// A constant in every lane, as `I32`.
    fn i32(&self, value: i32) -> Self::Vector;
    /// A constant in every lane, as `I64`.
    fn i64(&self, value: i64) -> Self::Vector;
    /// Lanes `0..n` true.
    fn mask_first(&self, n: usize) -> Self::Vector;
    /// `0, 1, 2, ...` as `I64` lanes.
    fn lane_numbers(&self) -> Self::Vector;
    /// An index in every lane, as `I64`.
    fn splat(&self, value: Self::Index) -> Self::Vector;
    /// The first lane of an `I64` vector.
    fn first_as_index(&self, value: Self::Vector) -> Self::Index;

    /// An operation on each lane of a vector of `F32` or `F64`.
    fn float1(&self, op: FloatUnary, a: Self::Vector) -> Self::Vector;
    /// An operation on each lane of two vectors, both of `F32` or both of `F64`.
    fn float2(&self, op: FloatBinary, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// `a * b + c`, rounded once.
    fn fma(&self, a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;
    /// An operation on each lane of two vectors of one integer type, or of two masks.
    fn int2(&self, op: IntBinary, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// The mask of lanes where the comparison of two floats holds.
    fn compare_float(&self, op: Compare, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// The mask of lanes where the comparison of two signed integers holds.
    fn compare_int(&self, op: Compare, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// Lanes of `yes` where the mask is true, else of `no`.
    fn select(&self, mask: Self::Vector, yes: Self::Vector, no: Self::Vector) -> Self::Vector;
    /// The lanes in another type.
    fn convert(&self, to: Convert, a: Self::Vector) -> Self::Vector;
    /// F32 lanes rounded to the nearest f16, ties to even, as f32.
    fn to_f16(&self, a: Self::Vector) -> Self::Vector;
    /// F32 lanes rounded to the nearest bf16, ties to even, as f32; not-a-number stays one.
    fn to_bf16(&self, a: Self::Vector) -> Self::Vector {
        // Adding half of the last kept place, less one unless that place is odd, rounds to nearest, ties to even. A
        // carry may reach infinity.
        let bits = self.convert(Convert::Bits(Lane::I32), a);
        let odd = self.int2(IntBinary::And, self.int2(IntBinary::ShrLogical, bits, self.i32(16)), self.i32(1));
        let up = self.int2(IntBinary::Add, bits, self.int2(IntBinary::Add, odd, self.i32(ir::fault!("pointwise.bf16.half", 0, 0x7fff))));
        let upper = |bits| self.convert(Convert::Bits(Lane::F32), self.int2(IntBinary::And, bits, self.i32(-0x10000)));
        // Setting the quiet bit, which is among the kept ones, keeps NaN from becoming infinity.
        let quiet = upper(self.int2(IntBinary::Or, bits, self.i32(0x40_0000)));
        self.select(self.compare_float(Compare::Eq, a, a), upper(up), quiet)
    }
    /// A function of F32 lanes as the hardware approximates it, off by about 2 units in the last place, where there
    /// is such a thing and the value that is computed is as good as 16-bit floats ([`crate::narrow`]).
    fn approximate(&self, _function: Approximate, _a: Self::Vector) -> Option<Self::Vector> {
        None
    }
    /// Lane `i` of the result is lane `i ^ distance` of `a`; `distance` is a power of two below the number of lanes.
    fn swap_lanes(&self, a: Self::Vector, distance: usize) -> Self::Vector;

    /// `for i in (from..to).step_by(step)`, with values carried from one iteration to the next.
    fn repeat(
        &self,
        from: Self::Index,
        to: Self::Index,
        step: i64,
        carried: &[Self::Vector],
        body: &mut LoopBody<'_, Self::Index, Self::Vector>,
    ) -> Vec<Self::Vector>;

    // The following methods are for workers that compute a tile together ([`Frame::kernel_of_teams`]). All of them
    // must make the same calls; usually there is one worker.
    /// The number of this worker.
    fn member(&self) -> Self::Index {
        self.index(0)
    }
    /// `F32` vectors of all workers, in order; each passes its own.
    fn exchange(&self, own: &[Self::Vector], _members: i64) -> Vec<Vec<Self::Vector>> {
        vec![own.to_vec()]
    }
    /// Runs `body` on the first worker only.
    fn first_member(&self, body: &mut dyn FnMut()) {
        body();
    }

    /// `a + b` of floats.
    fn add(&self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        self.float2(FloatBinary::Add, a, b)
    }
    /// `a - b` of floats.
    fn sub(&self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        self.float2(FloatBinary::Sub, a, b)
    }
    /// `a * b` of floats.
    fn mul(&self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        self.float2(FloatBinary::Mul, a, b)
    }
    /// `a / b` of floats.
    fn div(&self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        self.float2(FloatBinary::Div, a, b)
    }
    /// The greater; `b` where either is not a number.
    fn max(&self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        self.select(self.compare_float(Compare::Gt, a, b), a, b)
    }
    /// The lesser; `b` where either is not a number.
    fn min(&self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        self.select(self.compare_float(Compare::Lt, a, b), a, b)
    }
    /// What is written from now on computes a value of the kernel, where a target's text says so.
    fn locate(&self, _value: Value) {}
    /// `base` moved by a constant number of bytes.
    fn at_const(&self, base: Self::Pointer, bytes: i64) -> Self::Pointer {
        if bytes == 0 { base } else { self.at(base, self.index(bytes)) }
    }
}

/// What a kernel does with its parameters.
pub type KernelBody<'a, I, P, T> = dyn FnMut(&Entry<I, P>) -> Result<T, CompileError> + 'a;

/// A builder that can begin a kernel.
pub trait Frame: Builder {
    /// Writes the kernel `name` with the calling convention of [`crate::abi`], of so many pointers and scalars;
    /// `body` writes what it does and returns what to keep. `body` is called once.
    ///
    /// # Errors
    /// Those of `body`.
    fn kernel<T>(&self, name: &str, arguments: [usize; 2], body: &mut KernelBody<'_, Self::Index, Self::Pointer, T>) -> Result<T, CompileError>;

    /// The same, where so many workers compute a tile together. A builder whose tiles are a thread's has no teams.
    ///
    /// # Errors
    /// Those of `body`.
    fn kernel_of_teams<T>(
        &self,
        name: &str,
        arguments: [usize; 2],
        members: i64,
        body: &mut KernelBody<'_, Self::Index, Self::Pointer, T>,
    ) -> Result<T, CompileError> {
        debug_assert_eq!(members, 1, "invariant: only GPUs have teams");
        self.kernel(name, arguments, body)
    }

    /// The pointer stored at `from`, among the arguments.
    fn load_pointer(&self, from: Self::Pointer) -> Self::Pointer;

    /// Does something for each lane that a mask has, in order, with what it has of `values`, as `I64`.
    fn each_lane(&self, mask: Self::Vector, values: Self::Vector, body: &mut dyn FnMut(Self::Index, Self::Index));
}
