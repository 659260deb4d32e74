//! Functions, branches and loops of a module for CPUs.

use super::{Index, Llvm, Pointer, Value, Vector};
use crate::build::Builder;
use crate::build::instructions::{built, counted, open_function};
use inkwell::attributes::{Attribute, AttributeLoc};
use inkwell::context::Context;
use inkwell::module::Linkage;
use inkwell::types::BasicMetadataTypeEnum;
use inkwell::values::{BasicMetadataValueEnum, FunctionValue, IntValue};

/// Where a function can be seen from.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Visibility {
    /// From outside of the module, by its name.
    Exported,
    /// Inside the module, kept out of line so that each body gets the whole register file.
    Local,
}

/// The values that a loop carries: pointers that advance and vectors that accumulate.
#[derive(Clone, Default)]
pub struct CarriedValues<'c> {
    /// As they are when an iteration begins, in an order that all iterations keep.
    pub pointers: Vec<Pointer<'c>>,
    /// As they are when an iteration begins, in an order that all iterations keep.
    pub vectors: Vec<Vector<'c>>,
}

impl<'c> Llvm<'c> {
    /// Starts a function of `pointers` pointers followed by `indices` 64-bit integers and leaves the builder in its
    /// entry block.
    pub fn function(&self, name: &str, pointers: usize, indices: usize, visibility: Visibility) -> FunctionValue<'c> {
        let mut types: Vec<BasicMetadataTypeEnum> = vec![self.pointer_type().into(); pointers];
        types.extend(vec![BasicMetadataTypeEnum::from(self.context.i64_type()); indices]);
        self.start_function(name, &types, visibility)
    }

    /// Starts a function of the given parameter types.
    fn start_function(&self, name: &str, types: &[BasicMetadataTypeEnum<'c>], visibility: Visibility) -> FunctionValue<'c> {
        let linkage = match visibility {
            Visibility::Exported => Linkage::External,
            Visibility::Local => Linkage::Internal,
        };
        let function = self.module.add_function(name, self.context.void_type().fn_type(types, false), Some(linkage));
        set_target_attributes(self.context, function, &self.cpu, &self.features);
        if visibility == Visibility::Local {
            let id = Attribute::get_named_enum_kind_id("noinline");
            function.add_attribute(AttributeLoc::Function, self.context.create_enum_attribute(id, 0));
        }
        let entry = self.context.append_basic_block(function, "entry");
        self.writer.position_at_end(entry);
        function
    }

    /// Starts the exported kernel `name` with mcc's kernel ABI and returns its parameters.
    pub fn kernel(&self, name: &str) -> crate::abi::Entry<Index<'c>, Pointer<'c>> {
        let (pointer, index) = (self.pointer_type().into(), self.context.i64_type().into());
        let function = self.start_function(name, &[pointer, pointer, index, index, pointer, index, index], Visibility::Exported);
        crate::abi::Entry {
            arguments: self.pointer_parameter(function, 0),
            scalars: self.pointer_parameter(function, 1),
            first_tile: self.index_parameter(function, 2),
            end_tile: self.index_parameter(function, 3),
            scratch: self.pointer_parameter(function, 4),
            begin: self.index_parameter(function, 5),
            until: self.index_parameter(function, 6),
        }
    }

    /// A parameter that is a pointer; `position` counts all parameters from 0.
    pub fn pointer_parameter(&self, function: FunctionValue<'c>, position: u32) -> Pointer<'c> {
        function.get_nth_param(position).expect("invariant: the parameter exists").into_pointer_value()
    }

    /// A parameter that is an integer; `position` counts all parameters from 0.
    pub fn index_parameter(&self, function: FunctionValue<'c>, position: u32) -> Index<'c> {
        function.get_nth_param(position).expect("invariant: the parameter exists").into_int_value()
    }

    /// Ends the open function by a return without a value.
    pub fn finish_function(&self) {
        built(self.writer.build_return(None));
    }

    /// Calls a function that takes these pointers first, then these indices, as [`Llvm::function`] declares it.
    pub fn call(&self, function: FunctionValue<'c>, pointers: &[Pointer<'c>], indices: &[Index<'c>]) {
        let mut arguments: Vec<BasicMetadataValueEnum> = pointers.iter().map(|p| (*p).into()).collect();
        arguments.extend(indices.iter().map(|i| BasicMetadataValueEnum::from(*i)));
        built(self.writer.build_call(function, &arguments, ""));
    }

    /// Does `yes` where the condition holds, else `no`; what is written next follows both.
    pub fn branch(&self, condition: IntValue<'c>, yes: impl FnOnce(), no: impl FnOnce()) {
        let function = open_function(&self.writer);
        let [yes_block, no_block, join] = ["then", "else", "join"].map(|n| self.context.append_basic_block(function, n));
        built(self.writer.build_conditional_branch(condition, yes_block, no_block));
        self.writer.position_at_end(yes_block);
        yes();
        built(self.writer.build_unconditional_branch(join));
        self.writer.position_at_end(no_block);
        no();
        built(self.writer.build_unconditional_branch(join));
        self.writer.position_at_end(join);
    }

    /// A counted loop that carries pointers as well as vectors. `step` may be any run-time index.
    pub fn repeat_carrying(
        &self,
        from: Index<'c>,
        to: Index<'c>,
        step: Index<'c>,
        carried: &CarriedValues<'c>,
        body: &mut dyn FnMut(Index<'c>, &CarriedValues<'c>) -> CarriedValues<'c>,
    ) -> CarriedValues<'c> {
        let flat = |c: &CarriedValues<'c>| -> Vec<Value<'c>> {
            c.pointers.iter().map(|p| Value::from(*p)).chain(c.vectors.iter().map(|v| Value::from(*v))).collect()
        };
        let split = |values: &[Value<'c>]| CarriedValues {
            pointers: values[..carried.pointers.len()].iter().map(|v| v.into_pointer_value()).collect(),
            vectors: values[carried.pointers.len()..].iter().map(|v| v.into_vector_value()).collect(),
        };
        let joined = counted(self.context, &self.writer, [from, to, step], &flat(carried), &mut |i, current| flat(&body(i, &split(current))));
        split(&joined)
    }

    /// A counted loop that carries nothing.
    pub fn for_each(&self, from: Index<'c>, to: Index<'c>, step: i64, body: &mut dyn FnMut(Index<'c>)) {
        self.repeat(from, to, step, &[], &mut |i, _| {
            body(i);
            Vec::new()
        });
    }
}

/// Gives a function the target's attributes; also used on functions that came from MLIR.
pub fn set_target_attributes<'c>(context: &'c Context, function: FunctionValue<'c>, cpu: &str, features: &str) {
    let attributes = [("target-cpu", cpu), ("target-features", features), ("prefer-vector-width", "512"), ("no-builtins", "")];
    for (name, value) in attributes {
        function.add_attribute(AttributeLoc::Function, context.create_string_attribute(name, value));
    }
    let id = Attribute::get_named_enum_kind_id("nounwind");
    function.add_attribute(AttributeLoc::Function, context.create_enum_attribute(id, 0));
}
