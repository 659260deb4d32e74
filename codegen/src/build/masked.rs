//! Stores of which a constant mask leaves one lane.
//!
//! LLVM 22 joins a truncation to 16 bits and a masked store of what comes of it, and where AVX-512 has one lane
//! left of that, stores all 32 bits: two bytes beyond the lane. So such a store is written as one of an element.

use crate::CompileError;
use inkwell::builder::Builder;
use inkwell::context::Context;
use inkwell::llvm_sys::core::{LLVMConstIntGetZExtValue, LLVMGetAggregateElement, LLVMIsAConstantInt};
use inkwell::module::Module;
use inkwell::values::{AsValueRef, InstructionOpcode, InstructionValue, PointerValue, VectorValue};

/// A masked store of ints of less than 32 bits in one lane.
struct SingleLaneStore<'c> {
    call: InstructionValue<'c>,
    value: VectorValue<'c>,
    to: PointerValue<'c>,
    lane: u64,
}

/// The lane of a constant mask, if it has one.
fn only(mask: VectorValue) -> Option<u64> {
    if !mask.is_const() {
        return None;
    }
    let is_set = |lane: &u64| {
        // SAFETY: a constant vector has an element for each lane; one that is no int, as poison, has no value.
        unsafe {
            let element = LLVMGetAggregateElement(mask.as_value_ref(), *lane as u32);
            !element.is_null() && !LLVMIsAConstantInt(element).is_null() && LLVMConstIntGetZExtValue(element) == 1
        }
    };
    let mut lanes = (0..u64::from(mask.get_type().get_size())).filter(is_set);
    lanes.next().filter(|_| lanes.next().is_none())
}

fn single(call: InstructionValue<'_>) -> Option<SingleLaneStore<'_>> {
    if call.get_opcode() != InstructionOpcode::Call || call.get_num_operands() != 4 {
        return None;
    }
    let operand = |k: u32| call.get_operand(k).and_then(|o| o.value());
    let callee = operand(3)?.into_pointer_value();
    if !callee.get_name().to_bytes().starts_with(b"llvm.masked.store.") {
        return None;
    }
    let value = operand(0)?.into_vector_value();
    let element = value.get_type().get_element_type();
    let is_narrow = element.is_int_type() && element.into_int_type().get_bit_width() < 32;
    let lane = only(operand(2)?.into_vector_value())?;
    is_narrow.then(|| Some(SingleLaneStore { call, value, to: operand(1)?.into_pointer_value(), lane }))?
}

/// Rewrites each such store as a store of one element.
///
/// # Errors
/// LLVM does not take an instruction.
pub fn spell_out_single_stores<'c>(context: &'c Context, module: &Module<'c>) -> Result<(), CompileError> {
    let blocks = module.get_functions().flat_map(|f| f.get_basic_blocks());
    let all: Vec<SingleLaneStore<'_>> = blocks.flat_map(|block| block.get_instructions()).filter_map(single).collect();
    let builder = context.create_builder();
    all.iter().try_for_each(|one| spell_out(context, &builder, one))
}

fn invalid(e: impl std::fmt::Display) -> CompileError {
    CompileError::Invalid { text: e.to_string() }
}

fn spell_out<'c>(context: &'c Context, builder: &Builder<'c>, one: &SingleLaneStore<'c>) -> Result<(), CompileError> {
    builder.position_before(&one.call);
    let lane = context.i64_type().const_int(one.lane, false);
    let element = builder.build_extract_element(one.value, lane, "").map_err(invalid)?.into_int_value();
    // SAFETY: the mask says that the lane is there.
    let place = unsafe { builder.build_gep(element.get_type(), one.to, &[lane], "") }.map_err(invalid)?;
    let bytes = element.get_type().get_bit_width().div_ceil(8);
    builder.build_store(place, element).map_err(invalid)?.set_alignment(bytes).map_err(invalid)?;
    one.call.erase_from_basic_block();
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::target::Target;
    use crate::testing::{KernelDraft, check_with, random_inputs};
    use ir::graph::Type;
    use ir::kernel::Family;
    use ir::op::{Binary, DType, Op};

    /// Rows of one element more than vectors have, of which the results lie apart: the check of a compile looks at
    /// what lies between.
    #[test]
    fn one_lane_of_16_bits_is_two_bytes() {
        for size in [17, 33] {
            let mut make = KernelDraft::default();
            let [s, h] = [("s", 3), ("h", size)].map(|(n, size)| make.dim(n, size));
            let (x, y) = (make.input(DType::F32, &[s, h]), make.input(DType::F32, &[s, h]));
            let product = make.op(Op::Binary(Binary::Mul), &[x, y]);
            let half = make.op_as(Op::Cast, &[product], Type::new(DType::Bf16, [s, h]));
            let mut kernel = make.kernel(Family::Loops { grid: vec![s, h] }, &[half]);
            check_with(&kernel, &random_inputs(&kernel, 1, 1), &[], 1e-6);
            kernel.outputs[0].strides = vec![size + 2, 1];
            crate::check::tests::passes(&kernel, &Target::host().expect("a supported machine"));
        }
    }
}
