//! The builder over MLIR's `func`, `scf`, `arith`, `math`, `vector` and `llvm` dialects (melior), and their lowering
//! to LLVM IR in process.
//!
//! Memory is reached through `llvm` pointers and intrinsics, since kernels get plain pointers and mask their tails;
//! everything else is of the upstream dialects above.

use super::{Builder, Compare, Convert, FloatBinary, FloatUnary, Frame, IntBinary, KernelBody, Lane, LoopBody};
use crate::CompileError;
use crate::abi::Entry;
use crate::target::Target;
use inkwell::context::AsContextRef;
use inkwell::module::Module as LlvmModule;
use melior::dialect::DialectRegistry;
use melior::ir::attribute::{DenseI32ArrayAttribute, DenseI64ArrayAttribute, IntegerAttribute, StringAttribute, TypeAttribute};
use melior::ir::operation::OperationBuilder;
use melior::ir::r#type::{FunctionType, IntegerType};
use melior::ir::{Attribute, Block, BlockLike, BlockRef, Identifier, Location, Module, Region, RegionLike, Type, Value, ValueLike};
use melior::pass::{PassManager, conversion, transform};
use melior::{Context, utility};
use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// A context with the dialects that kernels are written in.
pub fn context() -> Context {
    let registry = DialectRegistry::new();
    utility::register_all_dialects(&registry);
    let context = Context::new_with_registry(&registry, false);
    for dialect in ["func", "scf", "cf", "arith", "math", "vector", "llvm"] {
        context.get_or_load_dialect(dialect);
    }
    utility::register_all_llvm_translations(&context);
    context
}

/// Writes one MLIR module with one function.
pub struct Mlir<'c> {
    context: &'c Context,
    location: Location<'c>,
    module: Module<'c>,
    block: Cell<BlockRef<'c, 'c>>,
    lanes: usize,
}

type V<'c> = Value<'c, 'c>;

impl<'c> Mlir<'c> {
    /// An empty module, whose vectors are as wide as the target has them.
    pub fn new(context: &'c Context, target: &Target) -> Self {
        let location = Location::unknown(context);
        let module = Module::new(location);
        // SAFETY: the block belongs to the module, which lives as long as the builder.
        let block = unsafe { BlockRef::from_raw(module.body().to_raw()) };
        Self { context, location, module, block: Cell::new(block), lanes: target.lanes() }
    }

    fn attribute(&self, text: &str) -> Attribute<'c> {
        Attribute::parse(self.context, text).expect("invariant: attributes are written correctly")
    }

    fn ty(&self, text: &str) -> Type<'c> {
        Type::parse(self.context, text).expect("invariant: types are written correctly")
    }

    fn i64_type(&self) -> Type<'c> {
        IntegerType::new(self.context, 64).into()
    }

    fn pointer_type(&self) -> Type<'c> {
        melior::dialect::llvm::r#type::pointer(self.context, 0)
    }

    fn element(&self, lane: Lane) -> Type<'c> {
        match lane {
            Lane::F32 => Type::float32(self.context),
            Lane::F64 => Type::float64(self.context),
            Lane::I32 => IntegerType::new(self.context, 32).into(),
            Lane::I64 => self.i64_type(),
            Lane::Mask => IntegerType::new(self.context, 1).into(),
            Lane::Bf16 | Lane::F16 => unreachable!("invariant: 16-bit lanes are f32 in registers"),
        }
    }

    fn vector_of(&self, element: Type<'c>) -> Type<'c> {
        Type::vector(&[self.lanes as u64], element)
    }

    fn vector(&self, lane: Lane) -> Type<'c> {
        self.vector_of(self.element(lane))
    }

    /// The element type in memory: masks are bytes there, bf16 the upper half of an f32.
    fn stored_element(&self, lane: Lane) -> Type<'c> {
        match lane {
            Lane::Bf16 => IntegerType::new(self.context, 16).into(),
            Lane::F16 => Type::float16(self.context),
            Lane::Mask => IntegerType::new(self.context, 8).into(),
            Lane::F32 | Lane::F64 | Lane::I32 | Lane::I64 => self.element(lane),
        }
    }

    fn loaded(&self, lane: Lane, value: V<'c>) -> V<'c> {
        match lane {
            Lane::Mask => self.compare_int(Compare::Ne, value, self.constant("0", value.r#type())),
            Lane::Bf16 => {
                let wide = self.op("arith.extui", &[value], self.vector(Lane::I32), &[]);
                self.convert(Convert::Bits(Lane::F32), self.int2(IntBinary::Shl, wide, self.i32(16)))
            }
            Lane::F16 => self.op("arith.extf", &[value], self.vector(Lane::F32), &[]),
            Lane::F32 | Lane::F64 | Lane::I32 | Lane::I64 => value,
        }
    }

    fn storable(&self, lane: Lane, value: V<'c>) -> V<'c> {
        match lane {
            Lane::Mask => self.op("arith.extui", &[value], self.vector_of(self.stored_element(lane)), &[]),
            Lane::Bf16 => {
                let upper = self.int2(IntBinary::ShrLogical, self.convert(Convert::Bits(Lane::I32), value), self.i32(16));
                self.op("arith.trunci", &[upper], self.vector_of(self.stored_element(lane)), &[])
            }
            Lane::F16 => self.op("arith.truncf", &[value], self.vector_of(self.stored_element(lane)), &[]),
            Lane::F32 | Lane::F64 | Lane::I32 | Lane::I64 => value,
        }
    }

    fn append(
        &self,
        name: &str,
        operands: &[V<'c>],
        results: &[Type<'c>],
        attributes: &[(&str, Attribute<'c>)],
        regions: Vec<Region<'c>>,
    ) -> Vec<V<'c>> {
        let attributes: Vec<_> = attributes.iter().map(|(name, value)| (Identifier::new(self.context, name), *value)).collect();
        let operation = OperationBuilder::new(name, self.location)
            .add_operands(operands)
            .add_results(results)
            .add_attributes(&attributes)
            .add_regions_vec(regions)
            .build()
            .expect("invariant: operations are written correctly");
        let placed = self.block.get().append_operation(operation);
        (0..results.len())
            .map(|i| {
                let result = placed.result(i).expect("invariant: the result was declared");
                // SAFETY: the operation belongs to the module, which lives as long as the builder.
                unsafe { Value::from_raw(result.to_raw()) }
            })
            .collect()
    }

    fn op(&self, name: &str, operands: &[V<'c>], result: Type<'c>, attributes: &[(&str, Attribute<'c>)]) -> V<'c> {
        self.append(name, operands, &[result], attributes, Vec::new())[0]
    }

    fn same(&self, name: &str, operands: &[V<'c>]) -> V<'c> {
        self.op(name, operands, operands[0].r#type(), &[])
    }

    /// A vector constant: one element's text for all lanes, or a list of them.
    fn constant(&self, elements: &str, ty: Type<'c>) -> V<'c> {
        let value = self.attribute(&format!("dense<{elements}> : {ty}"));
        self.op("arith.constant", &[], ty, &[("value", value)])
    }

    fn alignment(&self, lane: Lane) -> Attribute<'c> {
        IntegerAttribute::new(self.i64_type(), lane.bytes()).into()
    }

    /// Alignment of the masked intrinsics, which differ from loads in the attribute's type.
    fn narrow_alignment(&self, lane: Lane) -> Attribute<'c> {
        IntegerAttribute::new(IntegerType::new(self.context, 32).into(), lane.bytes()).into()
    }

    fn address(&self, base: V<'c>, bytes: V<'c>, result: Type<'c>) -> V<'c> {
        let dynamic = DenseI32ArrayAttribute::new(self.context, &[i32::MIN]).into();
        let byte = TypeAttribute::new(IntegerType::new(self.context, 8).into()).into();
        self.op("llvm.getelementptr", &[base, bytes], result, &[("rawConstantIndices", dynamic), ("elem_type", byte)])
    }

    fn pointers(&self, base: V<'c>, offsets: V<'c>) -> V<'c> {
        let result = self.ty(&format!("vector<{}x!llvm.ptr>", self.lanes));
        self.address(base, offsets, result)
    }

    /// Makes `block` the one that grows; returns the one that was.
    fn enter(&self, block: &BlockRef<'c, '_>) -> BlockRef<'c, 'c> {
        // SAFETY: the block's region is handed to an operation of the module before anything is read from it.
        self.block.replace(unsafe { BlockRef::from_raw(block.to_raw()) })
    }

    fn argument(&self, block: &BlockRef<'c, '_>, position: usize) -> V<'c> {
        let argument = block.argument(position).expect("invariant: the block has the argument");
        // SAFETY: the block belongs to the module, which lives as long as the builder.
        unsafe { Value::from_raw(argument.to_raw()) }
    }

    /// The text, and the module lowered to LLVM IR.
    ///
    /// # Errors
    /// MLIR finds the module invalid: a bug of the code generator.
    pub fn lower<'l>(mut self, llvm: &'l inkwell::context::Context) -> Result<(String, LlvmModule<'l>), CompileError> {
        let text = self.module.as_operation().to_string();
        let passes = PassManager::new(self.context);
        passes.add_pass(transform::create_canonicalizer());
        passes.add_pass(transform::create_cse());
        passes.add_pass(transform::create_loop_invariant_code_motion());
        passes.add_pass(conversion::create_scf_to_control_flow());
        passes.add_pass(conversion::create_vector_to_llvm());
        passes.add_pass(conversion::create_math_to_llvm());
        passes.add_pass(conversion::create_arith_to_llvm());
        passes.add_pass(conversion::create_control_flow_to_llvm());
        passes.add_pass(conversion::create_func_to_llvm());
        passes.add_pass(conversion::create_reconcile_unrealized_casts());
        // MLIR's diagnostics go into the error, not to the terminal.
        let said = Rc::new(RefCell::new(String::new()));
        let heard = Rc::clone(&said);
        let handler = self.context.attach_diagnostic_handler(move |diagnostic| {
            heard.borrow_mut().push_str(&format!("{diagnostic}\n"));
            true
        });
        let run = passes.run(&mut self.module);
        self.context.detach_diagnostic_handler(handler);
        run.map_err(|e| CompileError::Invalid { text: format!("{e}: {}", said.borrow()) })?;
        // SAFETY: both sides are LLVM 22's C interface; the module made belongs to the context given.
        let module = unsafe {
            let raw = mlir_sys::mlirTranslateModuleToLLVMIR(self.module.as_operation().to_raw(), llvm.as_ctx_ref().cast());
            if raw.is_null() {
                return Err(CompileError::Invalid { text: "MLIR could not be translated to LLVM IR".into() });
            }
            LlvmModule::new(raw.cast())
        };
        Ok((text, module))
    }
}

impl<'c> Frame for Mlir<'c> {
    fn kernel<T>(&self, name: &str, _: [usize; 2], body: &mut KernelBody<'_, V<'c>, V<'c>, T>) -> Result<T, CompileError> {
        let (pointer, index) = (self.pointer_type(), self.i64_type());
        let types = [pointer, pointer, index, index, pointer, index, index];
        let region = Region::new();
        let block = region.append_block(Block::new(&types.map(|t| (t, self.location))));
        let outside = self.enter(&block);
        let parameter = |i: usize| self.argument(&self.block.get(), i);
        let [arguments, scalars, first_tile, end_tile, scratch, begin, until] = std::array::from_fn(parameter);
        let entry = Entry { arguments, scalars, first_tile, end_tile, scratch, begin, until };
        let result = body(&entry)?;
        self.append("func.return", &[], &[], &[], Vec::new());
        self.block.set(outside);
        let signature = TypeAttribute::new(FunctionType::new(self.context, &types, &[]).into()).into();
        let symbol = StringAttribute::new(self.context, name).into();
        self.append("func.func", &[], &[], &[("sym_name", symbol), ("function_type", signature)], vec![region]);
        Ok(result)
    }

    fn load_pointer(&self, from: V<'c>) -> V<'c> {
        self.op("llvm.load", &[from], self.pointer_type(), &[])
    }

    fn each_lane(&self, mask: V<'c>, values: V<'c>, body: &mut dyn FnMut(V<'c>, V<'c>)) {
        let bits: Type = IntegerType::new(self.context, self.lanes as u32).into();
        let word = self.op("vector.bitcast", &[mask], Type::vector(&[1], bits), &[]);
        let word = self.op("arith.extui", &[self.first(word, bits)], self.i64_type(), &[]);
        let (none, count) = (self.index(0), self.same("math.ctpop", &[word]));
        self.repeat(none, count, 1, &[word], &mut |_, left| {
            let lane = self.same("math.cttz", &[left[0]]);
            body(lane, self.op("llvm.extractelement", &[values, lane], self.i64_type(), &[]));
            vec![self.same("arith.andi", &[left[0], self.index_sub(left[0], self.index(1))])]
        });
    }
}

impl<'c> Builder for Mlir<'c> {
    type Index = V<'c>;
    type Pointer = V<'c>;
    type Vector = V<'c>;

    fn lanes(&self) -> usize {
        self.lanes
    }

    fn index(&self, value: i64) -> V<'c> {
        let ty = self.i64_type();
        self.op("arith.constant", &[], ty, &[("value", IntegerAttribute::new(ty, value).into())])
    }
    fn index_add(&self, a: V<'c>, b: V<'c>) -> V<'c> {
        self.same("arith.addi", &[a, b])
    }
    fn index_sub(&self, a: V<'c>, b: V<'c>) -> V<'c> {
        self.same("arith.subi", &[a, b])
    }
    fn index_mul(&self, a: V<'c>, b: V<'c>) -> V<'c> {
        self.same("arith.muli", &[a, b])
    }
    fn index_div(&self, a: V<'c>, b: V<'c>) -> V<'c> {
        self.same("arith.divui", &[a, b])
    }
    fn index_rem(&self, a: V<'c>, b: V<'c>) -> V<'c> {
        self.same("arith.remui", &[a, b])
    }
    fn index_min(&self, a: V<'c>, b: V<'c>) -> V<'c> {
        self.same("arith.minui", &[a, b])
    }

    fn at(&self, base: V<'c>, bytes: V<'c>) -> V<'c> {
        self.address(base, bytes, self.pointer_type())
    }

    fn load(&self, from: V<'c>, lane: Lane, mask: Option<V<'c>>) -> V<'c> {
        let ty = self.vector_of(self.stored_element(lane));
        let value = match mask {
            None => self.op("llvm.load", &[from], ty, &[("alignment", self.alignment(lane))]),
            Some(mask) => {
                let zero = self.zero(lane);
                self.op("llvm.intr.masked.load", &[from, mask, zero], ty, &[("alignment", self.narrow_alignment(lane))])
            }
        };
        self.loaded(lane, value)
    }

    fn load_splat(&self, from: V<'c>, lane: Lane) -> V<'c> {
        let one = self.op("llvm.load", &[from], self.stored_element(lane), &[]);
        let value = self.op("vector.broadcast", &[one], self.vector_of(self.stored_element(lane)), &[]);
        self.loaded(lane, value)
    }

    fn gather(&self, base: V<'c>, offsets: V<'c>, lane: Lane, mask: Option<V<'c>>) -> V<'c> {
        let mask = mask.unwrap_or_else(|| self.mask_first(self.lanes));
        let operands = [self.pointers(base, offsets), mask, self.zero(lane)];
        let ty = self.vector_of(self.stored_element(lane));
        let value = self.op("llvm.intr.masked.gather", &operands, ty, &[("alignment", self.narrow_alignment(lane))]);
        self.loaded(lane, value)
    }

    fn store(&self, to: V<'c>, value: V<'c>, lane: Lane, mask: Option<V<'c>>) {
        let value = self.storable(lane, value);
        match mask {
            None => self.append("llvm.store", &[value, to], &[], &[("alignment", self.alignment(lane))], Vec::new()),
            Some(mask) => {
                let alignment = self.narrow_alignment(lane);
                self.append("llvm.intr.masked.store", &[value, to, mask], &[], &[("alignment", alignment)], Vec::new())
            }
        };
    }

    fn scatter(&self, base: V<'c>, offsets: V<'c>, value: V<'c>, lane: Lane, mask: Option<V<'c>>) {
        let mask = mask.unwrap_or_else(|| self.mask_first(self.lanes));
        let operands = [self.storable(lane, value), self.pointers(base, offsets), mask];
        let alignment = self.narrow_alignment(lane);
        self.append("llvm.intr.masked.scatter", &operands, &[], &[("alignment", alignment)], Vec::new());
    }

    fn store_first(&self, to: V<'c>, value: V<'c>, lane: Lane) {
        let first = self.first(self.storable(lane, value), self.stored_element(lane));
        self.append("llvm.store", &[first, to], &[], &[], Vec::new());
    }

    fn f32(&self, value: f64) -> V<'c> {
        self.constant(&format!("{:#010X}", (value as f32).to_bits()), self.vector(Lane::F32))
    }
    fn f64(&self, value: f64) -> V<'c> {
        self.constant(&format!("{:#018X}", value.to_bits()), self.vector(Lane::F64))
    }
    fn i32(&self, value: i32) -> V<'c> {
        self.constant(&value.to_string(), self.vector(Lane::I32))
    }
    fn i64(&self, value: i64) -> V<'c> {
        self.constant(&value.to_string(), self.vector(Lane::I64))
    }
    fn mask_first(&self, n: usize) -> V<'c> {
        let bits: Vec<String> = (0..self.lanes).map(|i| (i < n).to_string()).collect();
        self.constant(&format!("[{}]", bits.join(", ")), self.vector(Lane::Mask))
    }
    fn lane_numbers(&self) -> V<'c> {
        let numbers: Vec<String> = (0..self.lanes).map(|i| i.to_string()).collect();
        self.constant(&format!("[{}]", numbers.join(", ")), self.vector(Lane::I64))
    }
    fn splat(&self, value: V<'c>) -> V<'c> {
        self.op("vector.broadcast", &[value], self.vector(Lane::I64), &[])
    }
    fn first_as_index(&self, value: V<'c>) -> V<'c> {
        self.first(value, self.i64_type())
    }

    fn float1(&self, op: FloatUnary, a: V<'c>) -> V<'c> {
        let name = match op {
            FloatUnary::Neg => "arith.negf",
            FloatUnary::Abs => "math.absf",
            FloatUnary::Sqrt => "math.sqrt",
            FloatUnary::Floor => "math.floor",
            FloatUnary::Round => "math.roundeven",
        };
        self.same(name, &[a])
    }

    fn float2(&self, op: FloatBinary, a: V<'c>, b: V<'c>) -> V<'c> {
        let name = match op {
            FloatBinary::Add => "arith.addf",
            FloatBinary::Sub => "arith.subf",
            FloatBinary::Mul => "arith.mulf",
            FloatBinary::Div => "arith.divf",
            FloatBinary::CopySign => "math.copysign",
        };
        self.same(name, &[a, b])
    }

    fn fma(&self, a: V<'c>, b: V<'c>, c: V<'c>) -> V<'c> {
        self.same("math.fma", &[a, b, c])
    }

    fn int2(&self, op: IntBinary, a: V<'c>, b: V<'c>) -> V<'c> {
        let name = match op {
            IntBinary::Add => "arith.addi",
            IntBinary::Sub => "arith.subi",
            IntBinary::Mul => "arith.muli",
            IntBinary::Div => "arith.divsi",
            IntBinary::Rem => "arith.remsi",
            IntBinary::And => "arith.andi",
            IntBinary::Or => "arith.ori",
            IntBinary::Xor => "arith.xori",
            IntBinary::Shl => "arith.shli",
            IntBinary::ShrLogical => "arith.shrui",
            IntBinary::ShrArithmetic => "arith.shrsi",
        };
        self.same(name, &[a, b])
    }

    /// Predicates by their numbers in the `arith` dialect.
    fn compare_float(&self, op: Compare, a: V<'c>, b: V<'c>) -> V<'c> {
        let predicate = match op {
            Compare::Eq => 1,
            Compare::Gt => 2,
            Compare::Ge => 3,
            Compare::Lt => 4,
            Compare::Le => 5,
            Compare::Ne => 13,
        };
        self.compare("arith.cmpf", predicate, a, b)
    }

    fn compare_int(&self, op: Compare, a: V<'c>, b: V<'c>) -> V<'c> {
        let predicate = match op {
            Compare::Eq => 0,
            Compare::Ne => 1,
            Compare::Lt => 2,
            Compare::Le => 3,
            Compare::Gt => 4,
            Compare::Ge => 5,
        };
        self.compare("arith.cmpi", predicate, a, b)
    }

    fn select(&self, mask: V<'c>, yes: V<'c>, no: V<'c>) -> V<'c> {
        self.op("arith.select", &[mask, yes, no], yes.r#type(), &[])
    }

    fn convert(&self, to: Convert, a: V<'c>) -> V<'c> {
        let width = |lane: Lane| if lane == Lane::Mask { 0 } else { lane.bytes() };
        let is = |lane: Lane| a.r#type() == self.vector(lane);
        let from = [Lane::F32, Lane::F64, Lane::I32, Lane::I64, Lane::Mask].into_iter().find(|l| is(*l));
        let from = from.expect("invariant: a vector of lanes");
        let (name, lane) = match to {
            Convert::Bits(lane) => ("arith.bitcast", lane),
            Convert::IntToFloat(lane) => ("arith.sitofp", lane),
            Convert::FloatToInt(lane) => ("arith.fptosi", lane),
            Convert::Float(lane) | Convert::Int(lane) | Convert::Unsigned(lane) if from == lane => return a,
            Convert::Float(lane) => (if width(lane) > width(from) { "arith.extf" } else { "arith.truncf" }, lane),
            Convert::Int(lane) => (if width(lane) > width(from) { "arith.extsi" } else { "arith.trunci" }, lane),
            Convert::Unsigned(lane) => (if width(lane) > width(from) { "arith.extui" } else { "arith.trunci" }, lane),
        };
        self.op(name, &[a], self.vector(lane), &[])
    }

    fn to_f16(&self, a: V<'c>) -> V<'c> {
        let narrow = self.op("arith.truncf", &[a], self.vector_of(self.stored_element(Lane::F16)), &[]);
        self.op("arith.extf", &[narrow], self.vector(Lane::F32), &[])
    }

    fn swap_lanes(&self, a: V<'c>, distance: usize) -> V<'c> {
        let picks: Vec<i64> = (0..self.lanes).map(|l| (l ^ distance) as i64).collect();
        let mask = DenseI64ArrayAttribute::new(self.context, &picks).into();
        self.op("vector.shuffle", &[a, a], a.r#type(), &[("mask", mask)])
    }

    fn repeat(&self, from: V<'c>, to: V<'c>, step: i64, carried: &[V<'c>], body: &mut LoopBody<'_, V<'c>, V<'c>>) -> Vec<V<'c>> {
        let types: Vec<Type> = carried.iter().map(|v| v.r#type()).collect();
        let arguments: Vec<_> = std::iter::once(self.i64_type()).chain(types.iter().copied()).map(|t| (t, self.location)).collect();
        let step = self.index(step);
        let region = Region::new();
        let block = region.append_block(Block::new(&arguments));
        let outside = self.enter(&block);
        let inside = self.block.get();
        let state: Vec<V> = (0..carried.len()).map(|i| self.argument(&inside, i + 1)).collect();
        let next = body(self.argument(&inside, 0), &state);
        self.append("scf.yield", &next, &[], &[], Vec::new());
        self.block.set(outside);
        let operands: Vec<V> = [from, to, step].into_iter().chain(carried.iter().copied()).collect();
        self.append("scf.for", &operands, &types, &[], vec![region])
    }
}

impl<'c> Mlir<'c> {
    fn compare(&self, name: &str, predicate: i64, a: V<'c>, b: V<'c>) -> V<'c> {
        let predicate = IntegerAttribute::new(self.i64_type(), predicate).into();
        self.op(name, &[a, b], self.vector(Lane::Mask), &[("predicate", predicate)])
    }

    fn first(&self, value: V<'c>, element: Type<'c>) -> V<'c> {
        let position = DenseI64ArrayAttribute::new(self.context, &[0]).into();
        self.op("vector.extract", &[value], element, &[("static_position", position)])
    }

    /// Zero as it is in memory.
    fn zero(&self, lane: Lane) -> V<'c> {
        let text = if matches!(lane, Lane::F32 | Lane::F64 | Lane::F16) { "0.0" } else { "0" };
        self.constant(text, self.vector_of(self.stored_element(lane)))
    }
}
