//! How kernels of GPUs begin, and which tiles a warp or a block of a launch computes.

use super::{LANES, Simt};
use crate::CompileError;
use crate::abi::{Entry, LaunchBounds, WARPS};
use crate::build::instructions::built;
use crate::build::llvm::set_target_attributes;
use crate::build::{Builder, Frame, IntBinary, KernelBody};
use inkwell::AddressSpace;
use inkwell::attributes::{Attribute, AttributeLoc};
use inkwell::types::BasicMetadataTypeEnum;
use inkwell::values::{BasicValueEnum as Value, IntValue, PointerValue};
use ir::launch::MAP_BYTES;

/// LLVM's number of the calling convention `ptx_kernel`.
const PTX_KERNEL: u32 = 71;

/// Who computes a tile.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Unit {
    Warp,
    Block,
}

/// The parameters of a kernel under construction.
pub struct KernelParameters<'c> {
    /// Where pointers to inputs and outputs lie, 8 bytes each.
    pub arguments: PointerValue<'c>,
    /// Where scalars lie, 8 bytes each.
    pub scalars: PointerValue<'c>,
    /// The number of tiles, the address of scratch or of the tile counter, and scratch bytes per warp.
    pub tiles: IntValue<'c>,
    scratch: IntValue<'c>,
    stride: IntValue<'c>,
    /// Addresses of the tensor maps.
    pub maps: Vec<IntValue<'c>>,
}

impl<'c> KernelParameters<'c> {
    /// Address of the tile counter, in a kernel that has no scratch ([`crate::abi::launch_of_specialized_warps`]).
    pub fn counter(&self) -> IntValue<'c> {
        self.scratch
    }
}

impl<'c> Simt<'c> {
    /// Begins a kernel of the module [`crate::abi`].
    fn begin(&self, name: &str, [pointers, scalars]: [usize; 2], maps: usize, bounds: LaunchBounds) -> KernelParameters<'c> {
        let bytes = 8 * (pointers + scalars + crate::abi::GPU_EXTRA);
        let parameters = vec![BasicMetadataTypeEnum::from(self.context.ptr_type(AddressSpace::default())); maps + 1];
        let function = self.module.add_function(name, self.context.void_type().fn_type(&parameters, false), None);
        function.set_call_conventions(PTX_KERNEL);
        set_target_attributes(self.context, function, &self.cpu, &self.features);
        for (name, value) in [("nvvm.maxntid", bounds.threads), ("nvvm.minctasm", bounds.blocks)] {
            function.add_attribute(AttributeLoc::Function, self.context.create_string_attribute(name, &value.to_string()));
        }
        if bounds.cluster > 1 {
            let dims = format!("{},1,1", bounds.cluster);
            function.add_attribute(AttributeLoc::Function, self.context.create_string_attribute("nvvm.cluster_dim", &dims));
        }
        let kind = Attribute::get_named_enum_kind_id;
        let by_value = |number: usize, bytes: usize, align| {
            let at = AttributeLoc::Param(number as u32);
            let block = self.context.i8_type().array_type(bytes as u32);
            function.add_attribute(at, self.context.create_type_attribute(kind("byval"), block.into()));
            function.add_attribute(at, self.context.create_enum_attribute(kind("align"), align));
        };
        for number in 0..maps {
            by_value(number, MAP_BYTES, 64);
            // The map must be read from where the launch put it, not from a copy.
            function.add_attribute(AttributeLoc::Param(number as u32), self.context.create_string_attribute("nvvm.grid_constant", ""));
        }
        by_value(maps, bytes, 8);
        self.writer.position_at_end(self.context.append_basic_block(function, "entry"));
        self.lines.enter(self.context, &self.writer, name, function);

        let parameter = |number: usize| function.get_nth_param(number as u32).expect("invariant: there is a parameter").into_pointer_value();
        let arguments = parameter(maps);
        let scalar = |k: usize| {
            let from = self.at_const(arguments, 8 * (pointers + k) as i64);
            built(self.writer.build_load(self.context.i64_type(), from, "")).into_int_value()
        };
        let [tiles, scratch, stride] = [0, 1, 2].map(|k| scalar(scalars + k));
        let map = |number: usize| built(self.writer.build_ptr_to_int(parameter(number), self.context.i64_type(), ""));
        KernelParameters {
            arguments,
            scalars: self.at_const(arguments, 8 * pointers as i64),
            tiles,
            scratch,
            stride,
            maps: (0..maps).map(map).collect(),
        }
    }

    /// A kernel of which each warp, or block, computes every n-th tile, n being the number of them. A block has no
    /// scratch.
    fn frame<T>(
        &self,
        name: &str,
        counts: [usize; 2],
        unit: Unit,
        bounds: LaunchBounds,
        body: &mut KernelBody<'_, IntValue<'c>, PointerValue<'c>, T>,
    ) -> Result<T, CompileError> {
        let KernelParameters { arguments, scalars, tiles, scratch, stride, .. } = self.begin(name, counts, 0, bounds);
        let (unit, units) = match unit {
            Unit::Warp => {
                let threads = self.register("ntid.x");
                let thread = self.index_add(self.index_mul(self.register("ctaid.x"), threads), self.register("tid.x"));
                let warps = self.index_div(self.index_mul(self.register("nctaid.x"), threads), self.index(LANES as i64));
                (self.index_div(thread, self.index(LANES as i64)), warps)
            }
            Unit::Block => (self.register("ctaid.x"), self.register("nctaid.x")),
        };
        let scratch = self.global(self.index_add(scratch, self.index_mul(unit, stride)));
        let mut result = None;
        self.counted([unit, tiles, units], &[], &mut |tile, _| {
            let end = self.index_add(tile, self.index(1));
            let entry = Entry { arguments, scalars, first_tile: tile, end_tile: end, scratch, begin: tile, until: end };
            result = Some(body(&entry));
            vec![]
        });
        built(self.writer.build_return(None));
        result.expect("invariant: a loop's body is written once")
    }

    /// A kernel whose tiles are computed by blocks, one tile after the other.
    ///
    /// # Errors
    /// Those of `body`.
    pub fn kernel_of_blocks<T>(
        &self,
        name: &str,
        arguments: [usize; 2],
        bounds: LaunchBounds,
        body: &mut KernelBody<'_, IntValue<'c>, PointerValue<'c>, T>,
    ) -> Result<T, CompileError> {
        self.frame(name, arguments, Unit::Block, bounds, body)
    }

    /// A kernel whose warps differ in what they do, with tensor maps; `body` is all of it. Which tiles are the
    /// block's, [`crate::build::scheduler`] says.
    ///
    /// # Errors
    /// Those of `body`.
    pub fn kernel_of_specialized_warps<T>(
        &self,
        name: &str,
        arguments: [usize; 2],
        maps: usize,
        bounds: LaunchBounds,
        body: impl FnOnce(&KernelParameters<'c>) -> Result<T, CompileError>,
    ) -> Result<T, CompileError> {
        let result = body(&self.begin(name, arguments, maps, bounds));
        built(self.writer.build_return(None));
        result
    }
}

impl<'c> Frame for Simt<'c> {
    fn kernel<T>(&self, name: &str, arguments: [usize; 2], body: &mut KernelBody<'_, IntValue<'c>, PointerValue<'c>, T>) -> Result<T, CompileError> {
        self.frame(name, arguments, Unit::Warp, LaunchBounds { threads: WARPS * LANES as u32, blocks: 1, cluster: 1 }, body)
    }

    fn kernel_of_teams<T>(
        &self,
        name: &str,
        arguments: [usize; 2],
        members: i64,
        body: &mut KernelBody<'_, IntValue<'c>, PointerValue<'c>, T>,
    ) -> Result<T, CompileError> {
        match members {
            1 => self.kernel(name, arguments, body),
            // The members are warps of one block.
            _ => self.kernel_of_blocks(name, arguments, LaunchBounds::of_team(members), body),
        }
    }

    fn load_pointer(&self, from: PointerValue<'c>) -> PointerValue<'c> {
        self.global(built(self.writer.build_load(self.context.i64_type(), from, "")).into_int_value())
    }

    fn each_lane(&self, mask: Value<'c>, values: Value<'c>, body: &mut dyn FnMut(IntValue<'c>, IntValue<'c>)) {
        let word = self.ballot(mask);
        let count = self.widen(self.count_ones(word));
        let never_zero = self.context.bool_type().const_int(1, false);
        self.counted([self.index(0), count, self.index(1)], &[word.into()], &mut |_, left| {
            let left = left[0].into_int_value();
            let lane = self.value("llvm.cttz", &[left.get_type().into()], &[left.into(), never_zero.into()]);
            body(self.widen(lane.into_int_value()), self.shuffle("idx", values, lane).into_int_value());
            vec![self.bits(IntBinary::And, left, self.index_sub(left, self.word(1))).into()]
        });
    }
}
