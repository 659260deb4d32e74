//! The builder for GPUs, over LLVM IR for NVPTX (inkwell): a warp is a vector of 32 lanes.
//!
//! What a kernel's text calls a vector is one register of every lane; indices and pointers are the same in all lanes.
//! So the generic loops and the math library are written once for CPUs and GPUs, and a warp computes tiles as a
//! thread of a CPU does. Loads and stores of a vector are adjacent over the lanes, which is what memory wants.

mod frame;

pub use super::instructions::{Pointer, Value};
pub use frame::KernelParameters;

use super::asm::Half;
use super::instructions::{self, built, counted, intrinsic, of_floats, of_ints, open_function};
use super::lines::{AddedValues, LineTable};
use super::{Approximate, Builder, Compare, Convert, FloatBinary, FloatUnary, IntBinary, Lane, LoopBody};
use crate::CompileError;
use crate::target::Target;
use inkwell::builder::Builder as Writer;
use inkwell::context::Context;
use inkwell::module::Module;
use inkwell::types::BasicTypeEnum;
use inkwell::values::{FunctionValue, IntValue, PointerValue};
use inkwell::{AddressSpace, IntPredicate};
use std::cell::{Cell, OnceCell};

/// Lanes of a warp.
pub const LANES: usize = 32;
pub(super) const GLOBAL: u16 = 1;
const ALL: u64 = 0xFFFF_FFFF;

/// Writes one LLVM module with one kernel.
pub struct Simt<'c> {
    pub(super) context: &'c Context,
    /// What is written so far; [`Simt::finish`] gives it with its lines.
    pub module: Module<'c>,
    pub(super) writer: Writer<'c>,
    cpu: String,
    features: String,
    lines: LineTable<'c>,
    /// For each value of the kernel, whether hardware approximations are exact enough for functions that give it, and
    /// whether they are for the value that is being computed.
    narrow: OnceCell<Vec<bool>>,
    approximates: Cell<bool>,
}

impl<'c> Simt<'c> {
    /// # Errors
    /// LLVM does not know the target.
    pub fn new(context: &'c Context, name: &str, target: &Target) -> Result<Self, CompileError> {
        let module = context.create_module(name);
        // LLVM derives alignments from the data layout.
        module.set_data_layout(&target.machine()?.get_target_data().get_data_layout());
        let lines = LineTable::new(context, &module);
        Ok(Simt {
            context,
            module,
            writer: context.create_builder(),
            cpu: target.cpu.clone(),
            features: target.features.clone(),
            lines,
            narrow: OnceCell::new(),
            approximates: Cell::new(false),
        })
    }

    /// The kernel that is written has values beside those of the body whose lines are meant.
    pub fn add_values(&self, added: AddedValues) {
        self.lines.add(added);
    }

    /// Of each value of the kernel that is written, whether functions that the hardware approximates are exact enough
    /// for it.
    pub fn approximate_functions_of(&self, values: Vec<bool>) {
        self.narrow.set(values).expect("invariant: a builder writes one kernel");
    }

    /// The module, once its kernel is written.
    ///
    /// # Errors
    /// LLVM does not read its own text.
    pub fn finish(self) -> Result<Module<'c>, CompileError> {
        self.lines.finish(self.context, &self.module)
    }

    fn ty(&self, lane: Lane) -> BasicTypeEnum<'c> {
        match lane {
            Lane::F32 => self.context.f32_type().into(),
            Lane::F64 => self.context.f64_type().into(),
            Lane::I32 => self.context.i32_type().into(),
            Lane::I64 => self.context.i64_type().into(),
            Lane::Mask => self.context.bool_type().into(),
            Lane::Bf16 | Lane::F16 => unreachable!("invariant: 16-bit lanes are f32 in registers"),
        }
    }

    /// The type in memory: masks are bytes there, bf16 the upper half of an f32.
    pub(super) fn stored_type(&self, lane: Lane) -> BasicTypeEnum<'c> {
        match lane {
            Lane::Bf16 => self.context.i16_type().into(),
            Lane::F16 => self.context.f16_type().into(),
            Lane::Mask => self.context.i8_type().into(),
            Lane::F32 | Lane::F64 | Lane::I32 | Lane::I64 => self.ty(lane),
        }
    }

    pub(super) fn loaded(&self, lane: Lane, value: Value<'c>) -> Value<'c> {
        match lane {
            Lane::Mask => {
                let byte = value.into_int_value();
                built(self.writer.build_int_compare(IntPredicate::NE, byte, byte.get_type().const_zero(), "")).into()
            }
            Lane::Bf16 => {
                let wide = built(self.writer.build_int_z_extend(value.into_int_value(), self.context.i32_type(), ""));
                self.convert(Convert::Bits(Lane::F32), self.int2(IntBinary::Shl, wide.into(), self.i32(16)))
            }
            Lane::F16 => built(self.writer.build_float_ext(value.into_float_value(), self.context.f32_type(), "")).into(),
            Lane::F32 | Lane::F64 | Lane::I32 | Lane::I64 => value,
        }
    }

    pub(super) fn storable(&self, lane: Lane, value: Value<'c>) -> Value<'c> {
        match lane {
            Lane::Mask => built(self.writer.build_int_z_extend(value.into_int_value(), self.context.i8_type(), "")).into(),
            Lane::Bf16 => {
                let upper = self.int2(IntBinary::ShrLogical, self.convert(Convert::Bits(Lane::I32), value), self.i32(16));
                built(self.writer.build_int_truncate(upper.into_int_value(), self.context.i16_type(), "")).into()
            }
            Lane::F16 => built(self.writer.build_float_trunc(value.into_float_value(), self.context.f16_type(), "")).into(),
            Lane::F32 | Lane::F64 | Lane::I32 | Lane::I64 => value,
        }
    }

    pub(super) fn call(&self, name: &str, types: &[BasicTypeEnum<'c>], arguments: &[Value<'c>]) -> Option<Value<'c>> {
        intrinsic(&self.module, &self.writer, name, types, arguments)
    }

    pub(super) fn value(&self, name: &str, types: &[BasicTypeEnum<'c>], arguments: &[Value<'c>]) -> Value<'c> {
        self.call(name, types, arguments).expect("invariant: the intrinsic has a result")
    }

    pub(super) fn register(&self, name: &str) -> IntValue<'c> {
        let narrow = self.value(&format!("llvm.nvvm.read.ptx.sreg.{name}"), &[], &[]).into_int_value();
        built(self.writer.build_int_z_extend(narrow, self.context.i64_type(), ""))
    }

    /// The number of this lane, as 64 bits.
    pub fn lane(&self) -> IntValue<'c> {
        self.register("laneid")
    }

    fn number(&self, n: u64) -> Value<'c> {
        self.context.i32_type().const_int(n, false).into()
    }

    /// Waits until all lanes of the warp have come here, and makes their writes visible to each other.
    pub fn warp_barrier(&self) {
        self.call("llvm.nvvm.bar.warp.sync", &[], &[self.number(ALL)]);
    }

    /// Exchanges 32-bit words among lanes: `kind` is `bfly` or `idx`, `by` 32 bits.
    pub(super) fn shuffle(&self, kind: &str, a: Value<'c>, by: Value<'c>) -> Value<'c> {
        let name = format!("llvm.nvvm.shfl.sync.{kind}.i32");
        let word = |x: Value<'c>| self.value(&name, &[], &[self.number(ALL), x, by, self.number(31)]);
        let (int, long) = (self.context.i32_type(), self.context.i64_type());
        match a {
            Value::FloatValue(f) if f.get_type() == self.context.f32_type() => {
                let bits = built(self.writer.build_bit_cast(f, int, ""));
                built(self.writer.build_bit_cast(word(bits), f.get_type(), ""))
            }
            Value::FloatValue(f) => {
                let bits = built(self.writer.build_bit_cast(f, long, ""));
                built(self.writer.build_bit_cast(self.shuffle(kind, bits, by), f.get_type(), ""))
            }
            Value::IntValue(i) if i.get_type().get_bit_width() == 64 => {
                let half = |x: IntValue<'c>| {
                    let low = built(self.writer.build_int_truncate(x, int, ""));
                    built(self.writer.build_int_z_extend(word(low.into()).into_int_value(), long, ""))
                };
                let by32 = long.const_int(32, false);
                let high = built(self.writer.build_left_shift(half(built(self.writer.build_right_shift(i, by32, false, ""))), by32, ""));
                built(self.writer.build_or(high, half(i), "")).into()
            }
            Value::IntValue(i) if i.get_type().get_bit_width() == 1 => {
                let wide = built(self.writer.build_int_z_extend(i, int, ""));
                built(self.writer.build_int_truncate(word(wide.into()).into_int_value(), i.get_type(), "")).into()
            }
            other => word(other),
        }
    }

    pub(super) fn function(&self) -> FunctionValue<'c> {
        open_function(&self.writer)
    }

    /// Does something in the lanes of a mask alone; the others get zero.
    pub(super) fn only(&self, mask: Value<'c>, result: Option<BasicTypeEnum<'c>>, f: impl FnOnce() -> Option<Value<'c>>) -> Option<Value<'c>> {
        let before = self.writer.get_insert_block().expect("invariant: a block is open");
        let [inside, join] = ["lanes", "all"].map(|n| self.context.append_basic_block(self.function(), n));
        built(self.writer.build_conditional_branch(mask.into_int_value(), inside, join));
        self.writer.position_at_end(inside);
        let value = f();
        built(self.writer.build_unconditional_branch(join));
        self.writer.position_at_end(join);
        let (ty, value) = result.zip(value)?;
        let phi = built(self.writer.build_phi(ty, ""));
        phi.add_incoming(&[(&ty.const_zero(), before), (&value, inside)]);
        Some(phi.as_basic_value())
    }

    fn load_one(&self, from: PointerValue<'c>, lane: Lane, mask: Option<Value<'c>>) -> Value<'c> {
        let ty = self.stored_type(lane);
        let load = || built(self.writer.build_load(ty, from, ""));
        let value = match mask {
            None => load(),
            Some(mask) => self.only(mask, Some(ty), || Some(load())).expect("invariant: a load has a result"),
        };
        self.loaded(lane, value)
    }

    fn store_one(&self, to: PointerValue<'c>, value: Value<'c>, lane: Lane, mask: Option<Value<'c>>) {
        let value = self.storable(lane, value);
        let store = || {
            built(self.writer.build_store(to, value));
            None
        };
        match mask {
            None => store(),
            Some(mask) => self.only(mask, None, store),
        };
    }

    /// Address of this lane's element of a vector.
    fn own(&self, base: PointerValue<'c>, lane: Lane) -> PointerValue<'c> {
        self.at(base, self.index_mul(self.lane(), self.index(lane.bytes())))
    }

    fn moved(&self, base: PointerValue<'c>, offset: Value<'c>) -> PointerValue<'c> {
        self.at(base, offset.into_int_value())
    }

    /// A loop from, to and by numbers of any width.
    pub(super) fn counted(
        &self,
        range: [IntValue<'c>; 3],
        carried: &[Value<'c>],
        body: &mut LoopBody<'_, IntValue<'c>, Value<'c>>,
    ) -> Vec<Value<'c>> {
        counted(self.context, &self.writer, range, carried, body)
    }
}

impl<'c> Simt<'c> {
    /// The lane `number` of `a`, in every lane.
    pub fn broadcast(&self, a: Value<'c>, number: IntValue<'c>) -> Value<'c> {
        let number = built(self.writer.build_int_truncate(number, self.context.i32_type(), ""));
        self.shuffle("idx", a, number.into())
    }

    /// `carried`, or what `body` makes of it where the condition holds, which is the same in all lanes.
    pub fn when(&self, condition: Value<'c>, carried: &[Value<'c>], body: impl FnOnce() -> Vec<Value<'c>>) -> Vec<Value<'c>> {
        let before = self.writer.get_insert_block().expect("invariant: a block is open");
        let [inside, join] = ["then", "join"].map(|n| self.context.append_basic_block(self.function(), n));
        built(self.writer.build_conditional_branch(condition.into_int_value(), inside, join));
        self.writer.position_at_end(inside);
        let changed = body();
        let last = self.writer.get_insert_block().expect("invariant: a block is open");
        built(self.writer.build_unconditional_branch(join));
        self.writer.position_at_end(join);
        let pairs = carried.iter().zip(&changed);
        let joined = pairs.map(|(start, end)| {
            let phi = built(self.writer.build_phi(start.get_type(), ""));
            phi.add_incoming(&[(start, before), (end, last)]);
            phi.as_basic_value()
        });
        joined.collect()
    }
}

impl<'c> Simt<'c> {
    /// An address of global memory.
    pub fn global(&self, address: IntValue<'c>) -> PointerValue<'c> {
        let pointer = built(self.writer.build_int_to_ptr(address, self.context.ptr_type(AddressSpace::from(GLOBAL)), ""));
        built(self.writer.build_address_space_cast(pointer, self.context.ptr_type(AddressSpace::default()), ""))
    }
}

impl<'c> Builder for Simt<'c> {
    type Index = IntValue<'c>;
    type Pointer = PointerValue<'c>;
    type Vector = Value<'c>;

    fn lanes(&self) -> usize {
        LANES
    }

    fn locate(&self, value: ir::graph::Value) {
        self.lines.locate(self.context, &self.writer, value);
        self.approximates.set(self.narrow.get().is_some_and(|narrow| narrow.get(value.index()).copied().unwrap_or(false)));
    }
    fn index(&self, value: i64) -> IntValue<'c> {
        self.context.i64_type().const_int(value as u64, true)
    }
    fn index_add(&self, a: IntValue<'c>, b: IntValue<'c>) -> IntValue<'c> {
        built(self.writer.build_int_add(a, b, ""))
    }
    fn index_sub(&self, a: IntValue<'c>, b: IntValue<'c>) -> IntValue<'c> {
        built(self.writer.build_int_sub(a, b, ""))
    }
    fn index_mul(&self, a: IntValue<'c>, b: IntValue<'c>) -> IntValue<'c> {
        built(self.writer.build_int_mul(a, b, ""))
    }
    fn index_div(&self, a: IntValue<'c>, b: IntValue<'c>) -> IntValue<'c> {
        built(self.writer.build_int_unsigned_div(a, b, ""))
    }
    fn index_rem(&self, a: IntValue<'c>, b: IntValue<'c>) -> IntValue<'c> {
        built(self.writer.build_int_unsigned_rem(a, b, ""))
    }
    fn index_min(&self, a: IntValue<'c>, b: IntValue<'c>) -> IntValue<'c> {
        let less = built(self.writer.build_int_compare(IntPredicate::ULT, a, b, ""));
        built(self.writer.build_select(less, a, b, "")).into_int_value()
    }

    fn at(&self, base: PointerValue<'c>, bytes: IntValue<'c>) -> PointerValue<'c> {
        // SAFETY: an address is computed, not followed; without `inbounds` any offset is defined.
        unsafe { built(self.writer.build_gep(self.context.i8_type(), base, &[bytes], "")) }
    }
    fn load(&self, from: PointerValue<'c>, lane: Lane, mask: Option<Value<'c>>) -> Value<'c> {
        self.load_one(self.own(from, lane), lane, mask)
    }
    fn load_splat(&self, from: PointerValue<'c>, lane: Lane) -> Value<'c> {
        self.load_one(from, lane, None)
    }
    fn gather(&self, base: PointerValue<'c>, offsets: Value<'c>, lane: Lane, mask: Option<Value<'c>>) -> Value<'c> {
        self.load_one(self.moved(base, offsets), lane, mask)
    }
    fn store(&self, to: PointerValue<'c>, value: Value<'c>, lane: Lane, mask: Option<Value<'c>>) {
        self.store_one(self.own(to, lane), value, lane, mask);
    }
    fn scatter(&self, base: PointerValue<'c>, offsets: Value<'c>, value: Value<'c>, lane: Lane, mask: Option<Value<'c>>) {
        self.store_one(self.moved(base, offsets), value, lane, mask);
    }
    fn gather_run(&self, base: PointerValue<'c>, offsets: Value<'c>, lane: Lane, count: usize, mask: Option<Value<'c>>) -> Vec<Value<'c>> {
        self.load_words(self.moved(base, offsets), lane, count, mask)
    }
    fn if_aligned(&self, at: PointerValue<'c>, bytes: i64, yes: &dyn Fn(), no: &dyn Fn()) {
        let rest = self.bits(IntBinary::And, self.address(at), self.index(bytes - 1));
        self.either(self.equal(rest, self.index(0)), yes, no);
    }
    fn scatter_run(&self, base: PointerValue<'c>, offsets: Value<'c>, values: &[Value<'c>], lane: Lane) {
        self.store_words(self.moved(base, offsets), values, lane);
    }
    fn store_first(&self, to: PointerValue<'c>, value: Value<'c>, lane: Lane) {
        self.store_one(to, value, lane, Some(self.mask_first(1)));
        self.warp_barrier();
    }

    fn f32(&self, value: f64) -> Value<'c> {
        self.context.f32_type().const_float(value).into()
    }
    fn f64(&self, value: f64) -> Value<'c> {
        self.context.f64_type().const_float(value).into()
    }
    fn i32(&self, value: i32) -> Value<'c> {
        self.context.i32_type().const_int(value as u64, true).into()
    }
    fn i64(&self, value: i64) -> Value<'c> {
        self.context.i64_type().const_int(value as u64, true).into()
    }
    fn mask_first(&self, n: usize) -> Value<'c> {
        built(self.writer.build_int_compare(IntPredicate::ULT, self.lane(), self.index(n as i64), "")).into()
    }
    fn lane_numbers(&self) -> Value<'c> {
        self.lane().into()
    }
    fn splat(&self, value: IntValue<'c>) -> Value<'c> {
        value.into()
    }
    fn first_as_index(&self, value: Value<'c>) -> IntValue<'c> {
        self.shuffle("idx", value, self.number(0)).into_int_value()
    }

    fn float1(&self, op: FloatUnary, a: Value<'c>) -> Value<'c> {
        let name = match op {
            FloatUnary::Neg => return built(self.writer.build_float_neg(a.into_float_value(), "")).into(),
            FloatUnary::Abs => "llvm.fabs",
            FloatUnary::Sqrt => "llvm.sqrt",
            FloatUnary::Floor => "llvm.floor",
            FloatUnary::Round => "llvm.roundeven",
        };
        self.value(name, &[a.get_type()], &[a])
    }
    fn float2(&self, op: FloatBinary, a: Value<'c>, b: Value<'c>) -> Value<'c> {
        let (x, y) = (a.into_float_value(), b.into_float_value());
        built(match op {
            FloatBinary::Add => self.writer.build_float_add(x, y, ""),
            FloatBinary::Sub => self.writer.build_float_sub(x, y, ""),
            FloatBinary::Mul => self.writer.build_float_mul(x, y, ""),
            FloatBinary::Div => self.writer.build_float_div(x, y, ""),
            FloatBinary::CopySign => return self.value("llvm.copysign", &[a.get_type()], &[a, b]),
        })
        .into()
    }
    fn fma(&self, a: Value<'c>, b: Value<'c>, c: Value<'c>) -> Value<'c> {
        self.value("llvm.fma", &[a.get_type()], &[a, b, c])
    }
    fn int2(&self, op: IntBinary, a: Value<'c>, b: Value<'c>) -> Value<'c> {
        let (a, b) = (a.into_int_value(), b.into_int_value());
        instructions::int2(&self.writer, op, a, b).into()
    }
    fn compare_float(&self, op: Compare, a: Value<'c>, b: Value<'c>) -> Value<'c> {
        built(self.writer.build_float_compare(of_floats(op), a.into_float_value(), b.into_float_value(), "")).into()
    }
    fn compare_int(&self, op: Compare, a: Value<'c>, b: Value<'c>) -> Value<'c> {
        built(self.writer.build_int_compare(of_ints(op), a.into_int_value(), b.into_int_value(), "")).into()
    }
    fn select(&self, mask: Value<'c>, yes: Value<'c>, no: Value<'c>) -> Value<'c> {
        built(self.writer.build_select(mask.into_int_value(), yes, no, ""))
    }
    fn convert(&self, to: Convert, a: Value<'c>) -> Value<'c> {
        let (int, float) = (|lane| self.ty(lane).into_int_type(), |lane| self.ty(lane).into_float_type());
        match to {
            Convert::Bits(lane) => built(self.writer.build_bit_cast(a, self.ty(lane), "")),
            Convert::IntToFloat(lane) => built(self.writer.build_signed_int_to_float(a.into_int_value(), float(lane), "")).into(),
            Convert::FloatToInt(lane) => built(self.writer.build_float_to_signed_int(a.into_float_value(), int(lane), "")).into(),
            Convert::Float(lane) => built(self.writer.build_float_cast(a.into_float_value(), float(lane), "")).into(),
            Convert::Int(lane) => built(self.writer.build_int_cast_sign_flag(a.into_int_value(), int(lane), true, "")).into(),
            Convert::Unsigned(lane) => built(self.writer.build_int_cast_sign_flag(a.into_int_value(), int(lane), false, "")).into(),
        }
    }
    fn to_f16(&self, a: Value<'c>) -> Value<'c> {
        self.loaded(Lane::F16, self.storable(Lane::F16, a))
    }
    fn to_bf16(&self, a: Value<'c>) -> Value<'c> {
        // A pair of bf16 whose lower half is zero has the bits of its upper half as an f32.
        self.convert(Convert::Bits(Lane::F32), self.half_pair(Half::Bf16, [self.f32(0.0), a]))
    }
    fn approximate(&self, function: Approximate, a: Value<'c>) -> Option<Value<'c>> {
        self.approximates.get().then(|| match function {
            Approximate::Exp => self.fast_exp2(self.mul(a, self.f32(std::f64::consts::LOG2_E))),
            Approximate::Exp2 => self.fast_exp2(a),
            Approximate::Recip => self.value("llvm.nvvm.rcp.approx.ftz.f", &[], &[a]),
            Approximate::Rsqrt => self.value("llvm.nvvm.rsqrt.approx.ftz.f", &[], &[a]),
        })
    }
    fn swap_lanes(&self, a: Value<'c>, distance: usize) -> Value<'c> {
        self.shuffle("bfly", a, self.number(distance as u64))
    }

    /// Members are the warps of a block.
    fn member(&self) -> IntValue<'c> {
        self.widen(self.uniform(self.index_div(self.thread(), self.word(LANES as i64))))
    }

    /// Exchanges vectors through shared memory, where each member has a word of each lane for each vector.
    fn exchange(&self, own: &[Value<'c>], members: i64) -> Vec<Vec<Value<'c>>> {
        let (base, lane, count) = (self.shared(), self.narrow(self.lane()), own.len() as i64);
        let place = |member: IntValue<'c>, k: i64| {
            let vector = self.index_add(self.index_mul(member, self.word(count)), self.word(k));
            let word = self.index_add(self.index_mul(vector, self.word(LANES as i64)), lane);
            self.index_add(base, self.index_mul(word, self.word(Lane::F32.bytes())))
        };
        // All members must have read the previous content before it is overwritten.
        self.barrier();
        for (k, value) in (0..).zip(own) {
            self.store_shared(place(self.narrow(self.member()), k), &[*value]);
        }
        self.barrier();
        (0..members).map(|m| (0..count).map(|k| self.load_shared(place(self.word(m), k), 1)[0]).collect()).collect()
    }

    fn first_member(&self, body: &mut dyn FnMut()) {
        // All members must have read what `body` may overwrite.
        self.barrier();
        self.if_so(self.equal(self.member(), self.index(0)), body);
    }

    fn repeat(
        &self,
        from: IntValue<'c>,
        to: IntValue<'c>,
        step: i64,
        carried: &[Value<'c>],
        body: &mut LoopBody<'_, IntValue<'c>, Value<'c>>,
    ) -> Vec<Value<'c>> {
        let left = self.counted([from, to, self.index(step)], carried, body);
        // Other lanes may read what a loop has left in scratch.
        self.warp_barrier();
        left
    }
}
