//! Lines in PTX: `.loc 1 N 0` stands before what computes the value `N - 1` of the kernel's body. Kernels are kept by
//! content, whatever their place in a model; `mcc dump` knows the model's line of each value.

use crate::CompileError;
use inkwell::builder::Builder;
use inkwell::context::Context;
use inkwell::debug_info::{
    AsDIScope, DICompileUnit, DIFlagsConstants, DISubprogram, DWARFEmissionKind, DWARFSourceLanguage, DebugInfoBuilder, debug_metadata_version,
};
use inkwell::memory_buffer::MemoryBuffer;
use inkwell::module::{FlagBehavior, Module};
use inkwell::values::FunctionValue;
use ir::graph::Value;
use std::cell::Cell;

/// Debug info of one module, from which its PTX has its `.loc` directives.
pub struct LineTable<'c> {
    builder: DebugInfoBuilder<'c>,
    unit: DICompileUnit<'c>,
    function: Cell<Option<DISubprogram<'c>>>,
    line: Cell<u32>,
    added: Cell<AddedValues>,
}

/// Values that the written kernel has beside those of the original body: `count` of them, before value `before`.
#[derive(Clone, Copy, Default)]
pub struct AddedValues {
    /// Number of the body's value before which they are; `u32::MAX` where there are none.
    pub before: u32,
    /// How many they are.
    pub count: u32,
}

/// Replacement that asks for `.loc` directives without debugger sections, a kind that the bindings lack.
const DIRECTIVES: [&str; 2] = ["emissionKind: LineTablesOnly", "emissionKind: DebugDirectivesOnly"];

impl<'c> LineTable<'c> {
    /// Adds debug info to a module, none of whose functions is entered.
    pub fn new(context: &'c Context, module: &Module<'c>) -> LineTable<'c> {
        let version = context.i32_type().const_int(debug_metadata_version().into(), false);
        module.add_basic_value_flag("Debug Info Version", FlagBehavior::Warning, version);
        let (language, kind) = (DWARFSourceLanguage::C, DWARFEmissionKind::LineTablesOnly);
        let (builder, unit) = module.create_debug_info_builder(true, language, "kernel", "", "mcc", true, "", 0, "", kind, 0, false, false, "", "");
        LineTable { builder, unit, function: Cell::default(), line: Cell::new(0), added: Cell::default() }
    }

    /// The text that is written is not quite the kernel's body.
    pub fn add(&self, added: AddedValues) {
        self.added.set(added);
    }

    /// The function that is written from now on.
    pub fn enter(&self, context: &'c Context, writer: &Builder<'c>, name: &str, function: FunctionValue<'c>) {
        let file = self.unit.get_file();
        let ty = self.builder.create_subroutine_type(file, None, &[], DIFlagsConstants::ZERO);
        let scope = self.unit.as_debug_info_scope();
        let entry = self.builder.create_function(scope, name, None, file, 1, ty, false, true, 1, DIFlagsConstants::ZERO, true);
        function.set_subprogram(entry);
        self.function.set(Some(entry));
        self.mark(context, writer);
    }

    /// What is written from now on computes `value`.
    pub fn locate(&self, context: &'c Context, writer: &Builder<'c>, value: Value) {
        let AddedValues { before, count } = self.added.get();
        let own = if value.0 < before { value.0 } else { value.0.saturating_sub(count).max(before) };
        self.line.set(own + 1);
        self.mark(context, writer);
    }

    fn mark(&self, context: &'c Context, writer: &Builder<'c>) {
        if let Some(function) = self.function.get() {
            let location = self.builder.create_debug_location(context, self.line.get(), 0, function.as_debug_info_scope(), None);
            writer.set_current_debug_location(location);
        }
    }

    /// The module with its lines.
    ///
    /// # Errors
    /// LLVM does not read its own text.
    pub fn finish(&self, context: &'c Context, module: &Module<'c>) -> Result<Module<'c>, CompileError> {
        self.builder.finalize();
        let text = module.print_to_string().to_string().replacen(DIRECTIVES[0], DIRECTIVES[1], 1);
        let buffer = MemoryBuffer::create_from_memory_range_copy(text.as_bytes(), "kernel");
        context.create_module_from_ir(buffer).map_err(|e| CompileError::Invalid { text: e.to_string() })
    }
}
