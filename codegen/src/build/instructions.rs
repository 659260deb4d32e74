//! What the builders over LLVM IR have in common: instructions of scalars and vectors alike, intrinsics, and the
//! counted loop.

use super::{Compare, IntBinary, LoopBody};
use inkwell::builder::{Builder as Writer, BuilderError};
use inkwell::context::Context;
use inkwell::intrinsics::Intrinsic;
use inkwell::module::Module;
use inkwell::types::BasicTypeEnum;
use inkwell::values::{BasicMetadataValueEnum, BasicValueEnum, FunctionValue, IntMathValue, IntValue, PointerValue};
use inkwell::{FloatPredicate, IntPredicate};

/// An integer of 64 bits; on GPUs also one of 32 bits, for what counts within a block.
pub type Index<'c> = IntValue<'c>;
/// An address; on GPUs generic, or in one of the address spaces.
pub type Pointer<'c> = PointerValue<'c>;
/// An index, a pointer, a vector, or one lane of it; on GPUs a register of each lane, whose values may differ among
/// them.
pub type Value<'c> = BasicValueEnum<'c>;

/// inkwell refuses an instruction only when types disagree or no block is open: both are bugs of the kernel's text.
pub fn built<T>(result: Result<T, BuilderError>) -> T {
    result.expect("invariant: operand types agree and a block is open")
}

/// The function that is being written.
pub fn open_function<'c>(writer: &Writer<'c>) -> FunctionValue<'c> {
    writer.get_insert_block().and_then(|b| b.get_parent()).expect("invariant: a block is open")
}

/// False where an operand is not a number, except `Ne`.
pub fn of_floats(op: Compare) -> FloatPredicate {
    match op {
        Compare::Lt => FloatPredicate::OLT,
        Compare::Le => FloatPredicate::OLE,
        Compare::Gt => FloatPredicate::OGT,
        Compare::Ge => FloatPredicate::OGE,
        Compare::Eq => FloatPredicate::OEQ,
        Compare::Ne => FloatPredicate::UNE,
    }
}

/// The comparison of signed numbers.
pub fn of_ints(op: Compare) -> IntPredicate {
    match op {
        Compare::Lt => IntPredicate::SLT,
        Compare::Le => IntPredicate::SLE,
        Compare::Gt => IntPredicate::SGT,
        Compare::Ge => IntPredicate::SGE,
        Compare::Eq => IntPredicate::EQ,
        Compare::Ne => IntPredicate::NE,
    }
}

pub fn int2<'c, T: IntMathValue<'c>>(writer: &Writer<'c>, op: IntBinary, a: T, b: T) -> T {
    built(match op {
        IntBinary::Add => writer.build_int_add(a, b, ""),
        IntBinary::Sub => writer.build_int_sub(a, b, ""),
        IntBinary::Mul => writer.build_int_mul(a, b, ""),
        IntBinary::Div => writer.build_int_signed_div(a, b, ""),
        IntBinary::Rem => writer.build_int_signed_rem(a, b, ""),
        IntBinary::And => writer.build_and(a, b, ""),
        IntBinary::Or => writer.build_or(a, b, ""),
        IntBinary::Xor => writer.build_xor(a, b, ""),
        IntBinary::Shl => writer.build_left_shift(a, b, ""),
        IntBinary::ShrLogical => writer.build_right_shift(a, b, false, ""),
        IntBinary::ShrArithmetic => writer.build_right_shift(a, b, true, ""),
    })
}

/// Calls an intrinsic, which is declared for these types.
pub fn intrinsic<'c>(
    module: &Module<'c>,
    writer: &Writer<'c>,
    name: &str,
    types: &[BasicTypeEnum<'c>],
    arguments: &[BasicValueEnum<'c>],
) -> Option<BasicValueEnum<'c>> {
    let function =
        Intrinsic::find(name).and_then(|found| found.get_declaration(module, types)).expect("invariant: the intrinsic exists for these types");
    let arguments: Vec<BasicMetadataValueEnum> = arguments.iter().map(|a| (*a).into()).collect();
    built(writer.build_call(function, &arguments, "")).try_as_basic_value().basic()
}

/// A loop over `from..to`, of numbers of any width, by a step; the values that it carries, at its end.
pub fn counted<'c>(
    context: &'c Context,
    writer: &Writer<'c>,
    [from, to, step]: [IntValue<'c>; 3],
    carried: &[BasicValueEnum<'c>],
    body: &mut LoopBody<'_, IntValue<'c>, BasicValueEnum<'c>>,
) -> Vec<BasicValueEnum<'c>> {
    let before = writer.get_insert_block().expect("invariant: a block is open");
    let [inside, after] = ["loop", "done"].map(|n| context.append_basic_block(open_function(writer), n));
    let less = |a, b| built(writer.build_int_compare(IntPredicate::ULT, a, b, ""));
    built(writer.build_conditional_branch(less(from, to), inside, after));

    writer.position_at_end(inside);
    let counter = built(writer.build_phi(from.get_type(), "i"));
    counter.add_incoming(&[(&from, before)]);
    let entering: Vec<_> = carried
        .iter()
        .map(|value| {
            let phi = built(writer.build_phi(value.get_type(), ""));
            phi.add_incoming(&[(value, before)]);
            phi
        })
        .collect();
    let current: Vec<BasicValueEnum> = entering.iter().map(|phi| phi.as_basic_value()).collect();
    let i = counter.as_basic_value().into_int_value();
    let leaving = body(i, &current);
    let next = built(writer.build_int_add(i, step, ""));
    let last = writer.get_insert_block().expect("invariant: a block is open");
    counter.add_incoming(&[(&next, last)]);
    for (phi, value) in entering.iter().zip(&leaving) {
        phi.add_incoming(&[(value, last)]);
    }
    built(writer.build_conditional_branch(less(next, to), inside, after));

    writer.position_at_end(after);
    let joined = carried.iter().zip(&leaving).map(|(start, end)| {
        let phi = built(writer.build_phi(start.get_type(), ""));
        phi.add_incoming(&[(start, before), (end, last)]);
        phi.as_basic_value()
    });
    joined.collect()
}
