//! The builder over LLVM IR (inkwell).
//!
//! Every function carries `target-cpu`, `target-features` and `prefer-vector-width` itself: the code generator reads
//! the attributes, not the target machine's defaults.

mod control;

pub use super::instructions::{Index, Pointer, Value};
pub use control::{CarriedValues, Visibility, set_target_attributes};

use super::instructions::{self, built, intrinsic, of_floats, of_ints};
use super::{Builder, Compare, Convert, FloatBinary, FloatUnary, IntBinary, Lane, LoopBody};
use crate::target::Target;
use inkwell::builder::Builder as Writer;
use inkwell::context::Context;
use inkwell::module::Module;
use inkwell::types::{BasicType, BasicTypeEnum, VectorType};
use inkwell::values::{BasicValue, IntValue, VectorValue};
use inkwell::{AddressSpace, IntPredicate};

/// A vector of as many lanes as a register of the target has of f32.
pub type Vector<'c> = VectorValue<'c>;

/// Writes one LLVM module.
pub struct Llvm<'c> {
    /// LLVM's context, which owns the module's types and constants.
    pub context: &'c Context,
    /// What is written so far; it has no function at first.
    pub module: Module<'c>,
    writer: Writer<'c>,
    lanes: usize,
    cpu: String,
    features: String,
}

/// How near to the core a line is brought ahead of its use.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum CacheLevel {
    /// Into the first-level cache of the core.
    First,
    /// Soon enough for what streams: fetching into the first level, few lines can be under way.
    Second,
}

impl CacheLevel {
    /// LLVM's number for it.
    fn locality(self) -> u64 {
        match self {
            CacheLevel::First => 3,
            CacheLevel::Second => 2,
        }
    }
}

impl<'c> Llvm<'c> {
    /// An empty module of that name, whose functions are for the target's CPU.
    pub fn new(context: &'c Context, name: &str, target: &Target) -> Self {
        Self {
            context,
            module: context.create_module(name),
            writer: context.create_builder(),
            lanes: target.lanes(),
            cpu: target.cpu.clone(),
            features: target.features.clone(),
        }
    }

    fn pointer_type(&self) -> inkwell::types::PointerType<'c> {
        self.context.ptr_type(AddressSpace::default())
    }

    fn vector_type(&self, lane: Lane) -> VectorType<'c> {
        let lanes = self.lanes as u32;
        match lane {
            Lane::F32 => self.context.f32_type().vec_type(lanes),
            Lane::F64 => self.context.f64_type().vec_type(lanes),
            Lane::I32 => self.context.i32_type().vec_type(lanes),
            Lane::I64 => self.context.i64_type().vec_type(lanes),
            Lane::Mask => self.context.bool_type().vec_type(lanes),
            Lane::Bf16 | Lane::F16 => unreachable!("invariant: 16-bit lanes are f32 in registers"),
        }
    }

    /// The type in memory: masks are bytes there, bf16 the upper half of an f32.
    fn stored_type(&self, lane: Lane) -> VectorType<'c> {
        match lane {
            Lane::Bf16 => self.context.i16_type().vec_type(self.lanes as u32),
            Lane::F16 => self.context.f16_type().vec_type(self.lanes as u32),
            Lane::Mask => self.context.i8_type().vec_type(self.lanes as u32),
            Lane::F32 | Lane::F64 | Lane::I32 | Lane::I64 => self.vector_type(lane),
        }
    }

    fn loaded(&self, lane: Lane, value: Vector<'c>) -> Vector<'c> {
        match lane {
            Lane::Mask => built(self.writer.build_int_compare(IntPredicate::NE, value, value.get_type().const_zero(), "")),
            Lane::Bf16 => {
                let wide = built(self.writer.build_int_z_extend(value, self.vector_type(Lane::I32), ""));
                self.convert(Convert::Bits(Lane::F32), self.int2(IntBinary::Shl, wide, self.i32(16)))
            }
            Lane::F16 => built(self.writer.build_float_ext(value, self.vector_type(Lane::F32), "")),
            Lane::F32 | Lane::F64 | Lane::I32 | Lane::I64 => value,
        }
    }

    fn storable(&self, lane: Lane, value: Vector<'c>) -> Vector<'c> {
        match lane {
            Lane::Mask => built(self.writer.build_int_z_extend(value, self.stored_type(lane), "")),
            Lane::Bf16 => {
                let upper = self.int2(IntBinary::ShrLogical, self.convert(Convert::Bits(Lane::I32), value), self.i32(16));
                built(self.writer.build_int_truncate(upper, self.stored_type(lane), ""))
            }
            Lane::F16 => built(self.writer.build_float_trunc(value, self.stored_type(lane), "")),
            Lane::F32 | Lane::F64 | Lane::I32 | Lane::I64 => value,
        }
    }

    fn intrinsic(&self, name: &str, types: &[BasicTypeEnum<'c>], arguments: &[Value<'c>]) -> Option<Value<'c>> {
        intrinsic(&self.module, &self.writer, name, types, arguments)
    }

    fn vector_intrinsic(&self, name: &str, arguments: &[Vector<'c>]) -> Vector<'c> {
        let types = [arguments[0].get_type().as_basic_type_enum()];
        let arguments: Vec<Value> = arguments.iter().map(|a| (*a).into()).collect();
        self.intrinsic(name, &types, &arguments).expect("invariant: the intrinsic has a result").into_vector_value()
    }

    fn splat_value(&self, value: Value<'c>, ty: VectorType<'c>) -> Vector<'c> {
        let zero = self.context.i32_type().const_zero();
        let first = built(self.writer.build_insert_element(ty.get_poison(), value, zero, ""));
        let all_zero = self.context.i32_type().vec_type(self.lanes as u32).const_zero();
        built(self.writer.build_shuffle_vector(first, ty.get_poison(), all_zero, ""))
    }

    /// Lanes of `a` then `b`, picked by position.
    pub fn shuffle(&self, a: Vector<'c>, b: Vector<'c>, picks: &[u32]) -> Vector<'c> {
        let picks: Vec<_> = picks.iter().map(|&p| self.context.i32_type().const_int(u64::from(p), false)).collect();
        built(self.writer.build_shuffle_vector(a, b, VectorType::const_vector(&picks), ""))
    }

    /// The transpose of a square of `lanes` rows, in log2(lanes) stages: stage `s` exchanges bit `s` of the row's and
    /// of the lane's number.
    pub fn transpose(&self, rows: &[Vector<'c>]) -> Vec<Vector<'c>> {
        let n = rows.len();
        let mut rows = rows.to_vec();
        let mut bit = 1;
        while bit < n {
            let low: Vec<u32> = (0..n).map(|l| if l & bit == 0 { l } else { n + l - bit } as u32).collect();
            let high: Vec<u32> = (0..n).map(|l| if l & bit == 0 { l + bit } else { n + l } as u32).collect();
            for i in (0..n).filter(|i| i & bit == 0) {
                let (a, b) = (rows[i], rows[i + bit]);
                rows[i] = self.shuffle(a, b, &low);
                rows[i + bit] = self.shuffle(a, b, &high);
            }
            bit *= 2;
        }
        rows
    }

    /// Lanes below `n` true; `n` may be negative or beyond the number of lanes.
    pub fn mask_below(&self, n: Index<'c>) -> Vector<'c> {
        self.compare_int(Compare::Lt, self.lane_numbers(), self.splat(n))
    }

    /// Whether some lane of a mask is true.
    pub fn any(&self, mask: Vector<'c>) -> IntValue<'c> {
        let types = [mask.get_type().as_basic_type_enum()];
        self.intrinsic("llvm.vector.reduce.or", &types, &[mask.into()]).expect("invariant: the intrinsic has a result").into_int_value()
    }

    /// Brings the line at `p` into a cache before it is read.
    pub fn prefetch(&self, p: Pointer<'c>, level: CacheLevel) {
        let number = |n| self.context.i32_type().const_int(n, false).into();
        let (read, keep, data) = (number(0), number(level.locality()), number(1));
        self.intrinsic("llvm.prefetch", &[self.pointer_type().into()], &[p.into(), read, keep, data]);
    }

    /// The pointer stored at `from`.
    pub fn load_pointer(&self, from: Pointer<'c>) -> Pointer<'c> {
        built(self.writer.build_load(self.pointer_type(), from, "")).into_pointer_value()
    }

    /// The 64-bit integer stored at `from`.
    pub fn load_index(&self, from: Pointer<'c>) -> Index<'c> {
        built(self.writer.build_load(self.context.i64_type(), from, "")).into_int_value()
    }

    /// Stores a 64-bit integer at `to`.
    pub fn store_index(&self, to: Pointer<'c>, value: Index<'c>) {
        built(self.writer.build_store(to, value));
    }

    /// The element at `from` as an index.
    pub fn load_integer(&self, from: Pointer<'c>, lane: Lane) -> Index<'c> {
        match lane {
            Lane::I64 => self.load_index(from),
            Lane::I32 => {
                let narrow = built(self.writer.build_load(self.context.i32_type(), from, "")).into_int_value();
                built(self.writer.build_int_s_extend(narrow, self.context.i64_type(), ""))
            }
            Lane::F32 | Lane::F64 | Lane::Mask | Lane::Bf16 | Lane::F16 => unreachable!("invariant: indices are stored as integers"),
        }
    }

    /// Whether `a < b`, both unsigned.
    pub fn index_less(&self, a: Index<'c>, b: Index<'c>) -> IntValue<'c> {
        built(self.writer.build_int_compare(IntPredicate::ULT, a, b, ""))
    }

    /// Whether `a <= b`, both unsigned.
    pub fn index_less_equal(&self, a: Index<'c>, b: Index<'c>) -> IntValue<'c> {
        built(self.writer.build_int_compare(IntPredicate::ULE, a, b, ""))
    }

    /// Whether `a <= b`, both signed.
    pub fn signed_less_equal(&self, a: Index<'c>, b: Index<'c>) -> IntValue<'c> {
        built(self.writer.build_int_compare(IntPredicate::SLE, a, b, ""))
    }

    /// Whether `a == b`.
    pub fn index_equal(&self, a: Index<'c>, b: Index<'c>) -> IntValue<'c> {
        built(self.writer.build_int_compare(IntPredicate::EQ, a, b, ""))
    }

    /// Whether `a != b`.
    pub fn index_unequal(&self, a: Index<'c>, b: Index<'c>) -> IntValue<'c> {
        built(self.writer.build_int_compare(IntPredicate::NE, a, b, ""))
    }

    /// Whether at least one of two conditions holds.
    pub fn either(&self, a: IntValue<'c>, b: IntValue<'c>) -> IntValue<'c> {
        built(self.writer.build_or(a, b, ""))
    }

    /// The greater, both unsigned.
    pub fn index_max(&self, a: Index<'c>, b: Index<'c>) -> Index<'c> {
        self.index_select(self.index_less(a, b), b, a)
    }

    /// Whether two conditions both hold.
    pub fn both(&self, a: IntValue<'c>, b: IntValue<'c>) -> IntValue<'c> {
        built(self.writer.build_and(a, b, ""))
    }

    /// `yes` where the condition holds, else `no`.
    pub fn index_select(&self, condition: IntValue<'c>, yes: Index<'c>, no: Index<'c>) -> Index<'c> {
        built(self.writer.build_select(condition, yes, no, "")).into_int_value()
    }

    /// `yes` where the condition holds, else `no`; neither is followed.
    pub fn pointer_select(&self, condition: IntValue<'c>, yes: Pointer<'c>, no: Pointer<'c>) -> Pointer<'c> {
        built(self.writer.build_select(condition, yes, no, "")).into_pointer_value()
    }
}

impl<'c> Builder for Llvm<'c> {
    type Index = Index<'c>;
    type Pointer = Pointer<'c>;
    type Vector = Vector<'c>;

    fn lanes(&self) -> usize {
        self.lanes
    }

    fn index(&self, value: i64) -> Index<'c> {
        self.context.i64_type().const_int(value as u64, true)
    }
    fn index_add(&self, a: Index<'c>, b: Index<'c>) -> Index<'c> {
        built(self.writer.build_int_add(a, b, ""))
    }
    fn index_sub(&self, a: Index<'c>, b: Index<'c>) -> Index<'c> {
        built(self.writer.build_int_sub(a, b, ""))
    }
    fn index_mul(&self, a: Index<'c>, b: Index<'c>) -> Index<'c> {
        built(self.writer.build_int_mul(a, b, ""))
    }
    fn index_div(&self, a: Index<'c>, b: Index<'c>) -> Index<'c> {
        built(self.writer.build_int_unsigned_div(a, b, ""))
    }
    fn index_rem(&self, a: Index<'c>, b: Index<'c>) -> Index<'c> {
        built(self.writer.build_int_unsigned_rem(a, b, ""))
    }
    fn index_min(&self, a: Index<'c>, b: Index<'c>) -> Index<'c> {
        self.index_select(self.index_less(a, b), a, b)
    }

    fn at(&self, base: Pointer<'c>, bytes: Index<'c>) -> Pointer<'c> {
        // SAFETY: an address is computed, not followed; without `inbounds` any offset is defined.
        unsafe { built(self.writer.build_gep(self.context.i8_type(), base, &[bytes], "")) }
    }

    fn load(&self, from: Pointer<'c>, lane: Lane, mask: Option<Vector<'c>>) -> Vector<'c> {
        let ty = self.stored_type(lane);
        let value = match mask {
            Some(mask) => self
                .intrinsic("llvm.masked.load", &[ty.into(), self.pointer_type().into()], &[from.into(), mask.into(), ty.const_zero().into()])
                .expect("invariant: a load has a result")
                .into_vector_value(),
            None => {
                let loaded = built(self.writer.build_load(ty, from, ""));
                let instruction = loaded.as_instruction_value().expect("invariant: a load is an instruction");
                instruction.set_alignment(lane.bytes() as u32).expect("invariant: alignments are powers of two");
                loaded.into_vector_value()
            }
        };
        self.loaded(lane, value)
    }

    fn load_splat(&self, from: Pointer<'c>, lane: Lane) -> Vector<'c> {
        let ty = self.stored_type(lane);
        let one = built(self.writer.build_load(ty.get_element_type(), from, ""));
        self.loaded(lane, self.splat_value(one, ty))
    }

    fn gather(&self, base: Pointer<'c>, offsets: Vector<'c>, lane: Lane, mask: Option<Vector<'c>>) -> Vector<'c> {
        let (ty, pointers) = (self.stored_type(lane), self.pointers(base, offsets));
        let mask = mask.unwrap_or_else(|| self.mask_first(self.lanes));
        let value = self
            .intrinsic("llvm.masked.gather", &[ty.into(), pointers.get_type().into()], &[pointers.into(), mask.into(), ty.const_zero().into()])
            .expect("invariant: a gather has a result");
        self.loaded(lane, value.into_vector_value())
    }

    fn store(&self, to: Pointer<'c>, value: Vector<'c>, lane: Lane, mask: Option<Vector<'c>>) {
        let value = self.storable(lane, value);
        match mask {
            Some(mask) => {
                let types = [value.get_type().as_basic_type_enum(), self.pointer_type().into()];
                self.intrinsic("llvm.masked.store", &types, &[value.into(), to.into(), mask.into()]);
            }
            None => built(self.writer.build_store(to, value)).set_alignment(lane.bytes() as u32).expect("invariant: alignments are powers of two"),
        }
    }

    fn scatter(&self, base: Pointer<'c>, offsets: Vector<'c>, value: Vector<'c>, lane: Lane, mask: Option<Vector<'c>>) {
        let (value, pointers) = (self.storable(lane, value), self.pointers(base, offsets));
        let mask = mask.unwrap_or_else(|| self.mask_first(self.lanes));
        let types = [value.get_type().as_basic_type_enum(), pointers.get_type().into()];
        self.intrinsic("llvm.masked.scatter", &types, &[value.into(), pointers.into(), mask.into()]);
    }

    fn store_first(&self, to: Pointer<'c>, value: Vector<'c>, lane: Lane) {
        let value = self.storable(lane, value);
        let first = built(self.writer.build_extract_element(value, self.context.i32_type().const_zero(), ""));
        built(self.writer.build_store(to, first));
    }

    fn f32(&self, value: f64) -> Vector<'c> {
        VectorType::const_vector(&vec![self.context.f32_type().const_float(value); self.lanes])
    }
    fn f64(&self, value: f64) -> Vector<'c> {
        VectorType::const_vector(&vec![self.context.f64_type().const_float(value); self.lanes])
    }
    fn i32(&self, value: i32) -> Vector<'c> {
        VectorType::const_vector(&vec![self.context.i32_type().const_int(value as u64, true); self.lanes])
    }
    fn i64(&self, value: i64) -> Vector<'c> {
        VectorType::const_vector(&vec![self.context.i64_type().const_int(value as u64, true); self.lanes])
    }
    fn mask_first(&self, n: usize) -> Vector<'c> {
        let bits: Vec<_> = (0..self.lanes).map(|i| self.context.bool_type().const_int(u64::from(i < n), false)).collect();
        VectorType::const_vector(&bits)
    }
    fn lane_numbers(&self) -> Vector<'c> {
        let numbers: Vec<_> = (0..self.lanes).map(|i| self.context.i64_type().const_int(i as u64, false)).collect();
        VectorType::const_vector(&numbers)
    }
    fn splat(&self, value: Index<'c>) -> Vector<'c> {
        self.splat_value(value.into(), self.vector_type(Lane::I64))
    }
    fn first_as_index(&self, value: Vector<'c>) -> Index<'c> {
        built(self.writer.build_extract_element(value, self.context.i32_type().const_zero(), "")).into_int_value()
    }

    fn float1(&self, op: FloatUnary, a: Vector<'c>) -> Vector<'c> {
        match op {
            FloatUnary::Neg => built(self.writer.build_float_neg(a, "")),
            FloatUnary::Abs => self.vector_intrinsic("llvm.fabs", &[a]),
            FloatUnary::Sqrt => self.vector_intrinsic("llvm.sqrt", &[a]),
            FloatUnary::Floor => self.vector_intrinsic("llvm.floor", &[a]),
            FloatUnary::Round => self.vector_intrinsic("llvm.roundeven", &[a]),
        }
    }

    fn float2(&self, op: FloatBinary, a: Vector<'c>, b: Vector<'c>) -> Vector<'c> {
        match op {
            FloatBinary::Add => built(self.writer.build_float_add(a, b, "")),
            FloatBinary::Sub => built(self.writer.build_float_sub(a, b, "")),
            FloatBinary::Mul => built(self.writer.build_float_mul(a, b, "")),
            FloatBinary::Div => built(self.writer.build_float_div(a, b, "")),
            FloatBinary::CopySign => self.vector_intrinsic("llvm.copysign", &[a, b]),
        }
    }

    fn fma(&self, a: Vector<'c>, b: Vector<'c>, c: Vector<'c>) -> Vector<'c> {
        self.vector_intrinsic("llvm.fma", &[a, b, c])
    }

    fn int2(&self, op: IntBinary, a: Vector<'c>, b: Vector<'c>) -> Vector<'c> {
        instructions::int2(&self.writer, op, a, b)
    }

    fn compare_float(&self, op: Compare, a: Vector<'c>, b: Vector<'c>) -> Vector<'c> {
        built(self.writer.build_float_compare(of_floats(op), a, b, ""))
    }

    fn compare_int(&self, op: Compare, a: Vector<'c>, b: Vector<'c>) -> Vector<'c> {
        built(self.writer.build_int_compare(of_ints(op), a, b, ""))
    }

    fn select(&self, mask: Vector<'c>, yes: Vector<'c>, no: Vector<'c>) -> Vector<'c> {
        built(self.writer.build_select(mask, yes, no, "")).into_vector_value()
    }

    fn convert(&self, to: Convert, a: Vector<'c>) -> Vector<'c> {
        let ty = |lane| self.vector_type(lane);
        match to {
            Convert::Bits(lane) => built(self.writer.build_bit_cast(a, ty(lane), "")).into_vector_value(),
            Convert::IntToFloat(lane) => built(self.writer.build_signed_int_to_float(a, ty(lane), "")),
            Convert::FloatToInt(lane) => built(self.writer.build_float_to_signed_int(a, ty(lane), "")),
            Convert::Float(lane) => built(self.writer.build_float_cast(a, ty(lane), "")),
            Convert::Int(lane) => built(self.writer.build_int_cast_sign_flag(a, ty(lane), true, "")),
            Convert::Unsigned(lane) => built(self.writer.build_int_cast_sign_flag(a, ty(lane), false, "")),
        }
    }

    fn to_f16(&self, a: Vector<'c>) -> Vector<'c> {
        let narrow = built(self.writer.build_float_trunc(a, self.stored_type(Lane::F16), ""));
        built(self.writer.build_float_ext(narrow, self.vector_type(Lane::F32), ""))
    }

    fn swap_lanes(&self, a: Vector<'c>, distance: usize) -> Vector<'c> {
        let picks: Vec<u32> = (0..self.lanes).map(|l| (l ^ distance) as u32).collect();
        self.shuffle(a, a, &picks)
    }

    fn repeat(
        &self,
        from: Index<'c>,
        to: Index<'c>,
        step: i64,
        carried: &[Vector<'c>],
        body: &mut LoopBody<'_, Index<'c>, Vector<'c>>,
    ) -> Vec<Vector<'c>> {
        let carried = CarriedValues { pointers: Vec::new(), vectors: carried.to_vec() };
        let result = self.repeat_carrying(from, to, self.index(step), &carried, &mut |i, state| CarriedValues {
            pointers: Vec::new(),
            vectors: body(i, &state.vectors),
        });
        result.vectors
    }
}

impl<'c> Llvm<'c> {
    fn pointers(&self, base: Pointer<'c>, offsets: Vector<'c>) -> Vector<'c> {
        let lanes = self.lanes as u32;
        let start = built(self.writer.build_ptr_to_int(base, self.context.i64_type(), ""));
        let addresses = self.int2(IntBinary::Add, self.splat(start), offsets);
        built(self.writer.build_int_to_ptr(addresses, self.pointer_type().vec_type(lanes), ""))
    }
}
