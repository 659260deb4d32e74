//! Kernels for tests: built by a few words, compiled, run, and compared with the reference evaluator.

pub mod assembling;
pub mod counting;
pub mod ordering;

use crate::abi::KernelFn;
use crate::object::{self, Emit};
use crate::target::Target;
use ir::dim::{Base, Dim, DimInfo, IndexMap};
use ir::graph::{Body, Origin, Phase, Type, Value};
use ir::kernel::{self, Family, Kernel, Operand, Output};
use ir::op::{DType, Op, Real, Scalar};
use ir::program::Space;

/// A kernel under construction.
#[derive(Clone, Default)]
pub struct KernelDraft {
    pub body: Body,
    inputs: Vec<Operand>,
    scalars: Vec<DType>,
}

impl KernelDraft {
    pub fn dim(&mut self, name: &str, size: u64) -> Dim {
        self.body.dims.add(DimInfo::new(name, size))
    }

    /// Elements `base ..` (a scalar argument) of a dim of `logical` elements.
    pub fn sharded_dim(&mut self, name: &str, size: u64, logical: u64, base: u32) -> Dim {
        let index = IndexMap { parts: vec![(size, 1)], base: Base::Slot(base) };
        self.body.dims.add(DimInfo { index, logical, ..DimInfo::new(name, size) })
    }

    pub fn input(&mut self, dtype: DType, dims: &[Dim]) -> Value {
        let ty = Type::new(dtype, dims);
        let strides = kernel::dense(&self.body.dims, &ty);
        self.strided_input(dtype, dims, &strides)
    }

    pub fn strided_input(&mut self, dtype: DType, dims: &[Dim], strides: &[u64]) -> Value {
        let ty = Type::new(dtype, dims);
        self.inputs.push(Operand { ty: ty.clone(), strides: strides.to_vec(), unaligned: false });
        self.body.push(Op::Input(self.inputs.len() as u32 - 1), [], ty, Origin::new(Phase::Forward))
    }

    pub fn scalar(&mut self, dtype: DType) -> Value {
        self.scalars.push(dtype);
        self.source(Op::Scalar(Scalar::Slot(self.scalars.len() as u32 - 1)), dtype, &[])
    }

    pub fn number(&mut self, x: f64) -> Value {
        self.source(Op::Const(Real(x)), DType::F32, &[])
    }

    pub fn source(&mut self, op: Op, dtype: DType, dims: &[Dim]) -> Value {
        self.body.push(op, [], Type::new(dtype, dims), Origin::new(Phase::Forward))
    }

    pub fn op(&mut self, op: Op, args: &[Value]) -> Value {
        let declared = args.first().map_or(Type::scalar(DType::F32), |a| self.body[*a].ty.clone());
        self.op_as(op, args, declared)
    }

    /// An op whose result its operands do not determine; dims in the order of `declared` where it has the same ones.
    pub fn op_as(&mut self, op: Op, args: &[Value], declared: Type) -> Value {
        let types: Vec<&Type> = args.iter().map(|a| &self.body[*a].ty).collect();
        let mut ty = ir::infer::infer(&self.body, &op, &types, &declared).expect("a well-typed test");
        if ty.dims.len() == declared.dims.len() && ty.dims.iter().all(|d| declared.has(*d)) {
            ty.dims = declared.dims;
        }
        self.body.push(op, args, ty, Origin::new(Phase::Forward))
    }

    /// The value in another storage order.
    pub fn ordered(&mut self, v: Value, dims: &[Dim]) -> Value {
        let ty = Type::new(self.body[v].ty.dtype, dims);
        self.op_as(Op::Expand, &[v], ty)
    }

    pub fn kernel(self, family: Family, outputs: &[Value]) -> Kernel {
        let outputs =
            outputs.iter().map(|v| Output { value: *v, strides: kernel::dense(&self.body.dims, &self.body[*v].ty), accumulate: false }).collect();
        Kernel { on: Space::Device, family, body: self.body, inputs: self.inputs, scalars: self.scalars, outputs }
    }
}

/// Numbers in [-1, 1) by a linear congruence: the same in every run.
pub struct RandomNumbers(u64);

impl RandomNumbers {
    pub fn new(seed: u64) -> RandomNumbers {
        RandomNumbers(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }

    pub fn unit(&mut self) -> f64 {
        f64::from((self.below(1 << 24) as f32) / (1 << 23) as f32 - 1.0)
    }
}

/// Seeds of random kernels: so many, or as many as `KERNELS` says, from `KERNELS_FIRST` on. A test that fails shows
/// the last one it took.
pub fn seeds(count: u64) -> impl Iterator<Item = u64> {
    let number = |variable: &str, default: u64| std::env::var(variable).map_or(default, |n| n.parse().expect("a number"));
    let first = number("KERNELS_FIRST", 0);
    (first..first + number("KERNELS", count)).inspect(|seed| println!("KERNELS_FIRST={seed} KERNELS=1"))
}

/// Dense f64 inputs for a kernel: floats in [-1, 1), ints below `int_bound`, bools.
pub fn random_inputs(kernel: &Kernel, seed: u64, int_bound: u64) -> Vec<Vec<f64>> {
    let mut numbers = RandomNumbers::new(seed);
    let mut one = |dtype: DType| match dtype {
        DType::F32 | DType::Bf16 | DType::F16 => dtype.round(numbers.unit()),
        DType::I32 => numbers.below(int_bound) as f64,
        DType::Bool => numbers.below(2) as f64,
    };
    let inputs = kernel.inputs.iter();
    inputs.map(|i| (0..kernel.body.dims.elements(&i.ty.dims)).map(|_| one(i.ty.dtype)).collect()).collect()
}

/// Bytes of a strided tensor, between two pages that must not be touched: its last byte is the last before the second
/// one.
struct Buffer {
    mapping: *mut u8,
    mapped: usize,
    start: *mut u8,
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: the mapping is the buffer's own.
        unsafe { rustix::mm::munmap(self.mapping.cast(), self.mapped) }.expect("the mapping exists");
    }
}

/// Offsets, in elements, of the elements of a tensor in dense order.
fn offsets(kernel: &Kernel, ty: &Type, strides: &[u64]) -> Vec<usize> {
    let sizes: Vec<u64> = ty.dims.iter().map(|d| kernel.body.dims.size(*d)).collect();
    let total: u64 = sizes.iter().product();
    (0..total)
        .map(|mut i| {
            let mut offset = 0;
            for (size, stride) in sizes.iter().zip(strides).rev() {
                offset += i % size * stride;
                i /= size;
            }
            offset as usize
        })
        .collect()
}

impl Buffer {
    fn new(kernel: &Kernel, ty: &Type, strides: &[u64], data: &[f64]) -> Buffer {
        let offsets = offsets(kernel, ty, strides);
        let elements = offsets.iter().max().map_or(0, |m| m + 1);
        let (bytes, page) = (elements * ty.dtype.bytes() as usize, rustix::param::page_size());
        let inner = bytes.div_ceil(page) * page;
        let mapped = inner + 2 * page;
        use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect};
        // SAFETY: a new mapping, of which only the inner part is accessible.
        let mapping = unsafe {
            let mapping = mmap_anonymous(std::ptr::null_mut(), mapped, ProtFlags::empty(), MapFlags::PRIVATE).expect("memory");
            mprotect(mapping.byte_add(page), inner, MprotectFlags::READ | MprotectFlags::WRITE).expect("memory");
            std::slice::from_raw_parts_mut(mapping.byte_add(page).cast::<u8>(), inner).fill(0xff);
            mapping.cast::<u8>()
        };
        // SAFETY: within the inner part.
        let mut buffer = Buffer { mapping, mapped, start: unsafe { mapping.add(page + inner - bytes) } };
        for (offset, x) in offsets.iter().zip(data) {
            buffer.set(ty.dtype, *offset, *x);
        }
        buffer
    }

    fn set(&mut self, dtype: DType, offset: usize, x: f64) {
        let start = self.start;
        // SAFETY: the buffer was sized for the greatest offset.
        unsafe {
            match dtype {
                DType::F32 => start.cast::<f32>().add(offset).write(x as f32),
                DType::I32 => start.cast::<i32>().add(offset).write(x as i32),
                DType::Bool => start.add(offset).write(x as u8),
                DType::Bf16 => start.cast::<u16>().add(offset).write(half::bf16::from_f64(x).to_bits()),
                DType::F16 => start.cast::<u16>().add(offset).write(half::f16::from_f64(x).to_bits()),
            }
        }
    }

    fn get(&self, dtype: DType, offset: usize) -> f64 {
        let start = self.start;
        // SAFETY: the buffer was sized for the greatest offset.
        unsafe {
            match dtype {
                DType::F32 => f64::from(start.cast::<f32>().add(offset).read()),
                DType::I32 => f64::from(start.cast::<i32>().add(offset).read()),
                DType::Bool => f64::from(start.add(offset).read()),
                DType::Bf16 => half::bf16::from_bits(start.cast::<u16>().add(offset).read()).to_f64(),
                DType::F16 => half::f16::from_bits(start.cast::<u16>().add(offset).read()).to_f64(),
            }
        }
    }
}

/// A compiled kernel in memory.
pub struct KernelLibrary {
    pub compiled: object::Compiled,
    pub library: libloading::Library,
    _directory: tempfile::TempDir,
}

impl KernelLibrary {
    pub fn new(kernel: &Kernel, target: &Target) -> KernelLibrary {
        KernelLibrary::of(object::compile(kernel, target, Emit::default()).expect("the kernel compiles"))
    }

    pub fn of(compiled: object::Compiled) -> KernelLibrary {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = directory.path().join("kernel.so");
        let linked = crate::link::link_shared([compiled.object.as_slice()]).expect("the object links");
        std::fs::write(&path, linked).expect("written");
        // SAFETY: the library has no initialisers.
        let library = unsafe { libloading::Library::new(&path) }.expect("the library loads");
        KernelLibrary { compiled, library, _directory: directory }
    }

    pub fn function(&self) -> KernelFn {
        // SAFETY: the symbol has the kernel ABI.
        unsafe { *self.library.get::<KernelFn>(self.compiled.name.as_bytes()).expect("the kernel's symbol") }
    }
}

/// Calls of a kernel of so many tiles, one after the other: `[first, end, begin, until]` each.
pub type Calls<'a> = &'a dyn Fn(u64) -> Vec<[u64; 4]>;

/// Two ranges, the second first.
fn two_ranges(tiles: u64) -> Vec<[u64; 4]> {
    let half = tiles / 2;
    vec![[half, tiles, half, tiles], [0, half, 0, half]]
}

/// Runs generated code on dense inputs. Outputs begin as `initial`.
pub fn run(kernel: &Kernel, target: &Target, inputs: &[Vec<f64>], scalars: &[f64], initial: f64) -> Vec<Vec<f64>> {
    run_over(kernel, target, inputs, scalars, initial, &[], &two_ranges)
}

/// The same in given calls, without scalars.
pub fn run_in_calls(kernel: &Kernel, target: &Target, inputs: &[Vec<f64>], calls: Calls) -> Vec<Vec<f64>> {
    run_over(kernel, target, inputs, &[], 0.0, &[], calls)
}

/// The same without scalars, with outputs in the memory of inputs: pairs of output and input.
pub fn run_in_place(kernel: &Kernel, target: &Target, inputs: &[Vec<f64>], over: &[(usize, usize)]) -> Vec<Vec<f64>> {
    run_over(kernel, target, inputs, &[], 0.0, over, &two_ranges)
}

fn run_over(
    kernel: &Kernel,
    target: &Target,
    inputs: &[Vec<f64>],
    scalars: &[f64],
    initial: f64,
    over: &[(usize, usize)],
    calls: Calls,
) -> Vec<Vec<f64>> {
    run_loaded(&KernelLibrary::new(kernel, target), kernel, inputs, scalars, initial, over, calls)
}

/// The same of code that is loaded.
pub fn run_loaded(
    loaded: &KernelLibrary,
    kernel: &Kernel,
    inputs: &[Vec<f64>],
    scalars: &[f64],
    initial: f64,
    over: &[(usize, usize)],
    calls: Calls,
) -> Vec<Vec<f64>> {
    let mut buffers: Vec<Buffer> = kernel.inputs.iter().zip(inputs).map(|(i, data)| Buffer::new(kernel, &i.ty, &i.strides, data)).collect();
    for output in &kernel.outputs {
        let ty = &kernel.body[output.value].ty;
        let data = vec![initial; kernel.body.dims.elements(&ty.dims) as usize];
        buffers.push(Buffer::new(kernel, ty, &output.strides, &data));
    }
    let mut pointers: Vec<*mut u8> = buffers.iter().map(|b| b.start).collect();
    for (output, input) in over {
        pointers[kernel.inputs.len() + output] = pointers[*input];
    }
    let bits: Vec<u64> = kernel.scalars.iter().zip(scalars).map(|(t, x)| if t.is_float() { x.to_bits() } else { *x as i64 as u64 }).collect();
    let mut scratch = vec![[u64::MAX; 8]; loaded.compiled.shape.scratch_bytes as usize / 64 + 2];
    let start = scratch.as_mut_ptr().cast::<u8>();
    // SAFETY: within the allocation, which has a spare line.
    let aligned = unsafe { start.add(start.align_offset(64)) };
    let (tiles, function) = (loaded.compiled.shape.tiles, loaded.function());
    for [first, end, begin, until] in calls(tiles) {
        // SAFETY: pointers, scalars and scratch are as the kernel declares them.
        unsafe { function(pointers.as_ptr(), bits.as_ptr(), first, end, aligned, begin, until) };
    }
    let outputs = kernel.outputs.iter().enumerate();
    outputs
        .map(|(number, output)| {
            let shared = over.iter().find(|pair| pair.0 == number).map(|pair| pair.1);
            let buffer = &buffers[shared.unwrap_or(kernel.inputs.len() + number)];
            let ty = &kernel.body[output.value].ty;
            offsets(kernel, ty, &output.strides).into_iter().map(|o| buffer.get(ty.dtype, o)).collect()
        })
        .collect()
}

/// Bytes of a strided tensor: what is between its elements is NaN.
fn encoded(kernel: &Kernel, ty: &Type, strides: &[u64], data: &[f64]) -> Vec<u8> {
    let offsets = offsets(kernel, ty, strides);
    let bytes = ty.dtype.bytes() as usize;
    let mut out = vec![0xff; offsets.iter().max().map_or(0, |m| m + 1) * bytes];
    for (offset, x) in offsets.iter().zip(data) {
        let to = &mut out[offset * bytes..][..bytes];
        match ty.dtype {
            DType::F32 => to.copy_from_slice(&(*x as f32).to_le_bytes()),
            DType::I32 => to.copy_from_slice(&(*x as i32).to_le_bytes()),
            DType::Bool => to[0] = *x as u8,
            DType::Bf16 => to.copy_from_slice(&half::bf16::from_f64(*x).to_le_bytes()),
            DType::F16 => to.copy_from_slice(&half::f16::from_f64(*x).to_le_bytes()),
        }
    }
    out
}

fn decoded(kernel: &Kernel, ty: &Type, strides: &[u64], bytes: &[u8]) -> Vec<f64> {
    let size = ty.dtype.bytes() as usize;
    let element = |o: usize| &bytes[o * size..][..size];
    let four = |o: usize| [0, 1, 2, 3].map(|k| element(o)[k]);
    let two = |o: usize| [element(o)[0], element(o)[1]];
    offsets(kernel, ty, strides)
        .into_iter()
        .map(|o| match ty.dtype {
            DType::F32 => f64::from(f32::from_le_bytes(four(o))),
            DType::I32 => f64::from(i32::from_le_bytes(four(o))),
            DType::Bool => f64::from(element(o)[0]),
            DType::Bf16 => half::bf16::from_le_bytes(two(o)).to_f64(),
            DType::F16 => half::f16::from_le_bytes(two(o)).to_f64(),
        })
        .collect()
}

/// The kernel compiled for a GPU, and its PTX.
pub fn compiled(kernel: &Kernel, target: &Target) -> (object::Compiled, String) {
    let compiled = object::compile(kernel, target, Emit::default()).expect("the kernel compiles");
    let text = String::from_utf8(compiled.object.clone()).expect("PTX is text");
    (compiled, text)
}

/// Compiles to PTX and runs it in the emulator. Outputs begin as `initial`.
pub fn emulate(kernel: &Kernel, target: &Target, inputs: &[Vec<f64>], scalars: &[f64], initial: f64) -> Vec<Vec<f64>> {
    emulate_ptx(kernel, &compiled(kernel, target), inputs, scalars, initial)
}

fn emulate_ptx(kernel: &Kernel, (compiled, ptx): &(object::Compiled, String), inputs: &[Vec<f64>], scalars: &[f64], initial: f64) -> Vec<Vec<f64>> {
    let options = emulator::Options { threads: 1, ..Default::default() };
    run_ptx(kernel, compiled, ptx, options, inputs, scalars, initial).unwrap_or_else(|e| panic!("{e}\n{ptx}"))
}

/// Holds a text to the one in `codegen/golden`. `UPDATE_EXPECT=1` renews that.
pub fn golden(name: &str, text: &str) {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("golden").join(name);
    if std::env::var_os("UPDATE_EXPECT").is_some() {
        std::fs::write(&path, text).expect("the file can be written");
    }
    let want = std::fs::read_to_string(&path).expect("the file is there");
    assert!(want == text, "{name} is another one; UPDATE_EXPECT=1 renews it:\n{text}");
}

/// Runs the text of a compiled kernel in the emulator.
///
/// # Errors
/// What the emulator finds wrong.
pub fn run_ptx(
    kernel: &Kernel,
    compiled: &object::Compiled,
    ptx: &str,
    options: emulator::Options,
    inputs: &[Vec<f64>],
    scalars: &[f64],
    initial: f64,
) -> Result<Vec<Vec<f64>>, String> {
    run_ptx_shifted(kernel, compiled, ptx, options, inputs, scalars, initial, [0, 0]).map(|(outputs, _)| outputs)
}

/// The same, with inputs, and outputs, so many bytes after where allocations begin; and what was executed.
///
/// # Errors
/// What the emulator finds wrong.
#[expect(clippy::too_many_arguments, reason = "of tests only")]
pub fn run_ptx_shifted(
    kernel: &Kernel,
    compiled: &object::Compiled,
    ptx: &str,
    options: emulator::Options,
    inputs: &[Vec<f64>],
    scalars: &[f64],
    initial: f64,
    [of_inputs, of_outputs]: [u64; 2],
) -> Result<(Vec<Vec<f64>>, emulator::Statistics), String> {
    let mut device = emulator::Device::new(options);
    let module = device.load(ptx).map_err(|e| e.to_string())?;
    let mut upload = |bytes: Vec<u8>| {
        let p = device.allocate(bytes.len() as u64);
        device.write(p, &bytes).expect("it was allocated");
        p
    };
    let mut shifted = |bytes: Vec<u8>, shift: u64| upload([vec![0xff; shift as usize], bytes].concat()) + shift;
    let inputs = kernel.inputs.iter().zip(inputs);
    let mut pointers: Vec<u64> = inputs.map(|(i, data)| shifted(encoded(kernel, &i.ty, &i.strides, data), of_inputs)).collect();
    for output in &kernel.outputs {
        let ty = &kernel.body[output.value].ty;
        let data = vec![initial; kernel.body.dims.elements(&ty.dims) as usize];
        pointers.push(shifted(encoded(kernel, ty, &output.strides, &data), of_outputs));
    }
    let bits: Vec<u64> = kernel.scalars.iter().zip(scalars).map(|(t, x)| if t.is_float() { x.to_bits() } else { *x as i64 as u64 }).collect();
    let mut launch = compiled.launch.clone().expect("a kernel for GPUs is launched somehow");
    let scratch = upload(vec![0xff; launch.scratch_bytes as usize]);
    let counter = upload(vec![0; 4]);
    // The grid has fewer warps, or blocks, than tiles, so that some compute several.
    launch.grid = (launch.grid / launch.cluster / 2).clamp(1, 8 / launch.cluster) * launch.cluster;
    let parameters = launch.pack(&pointers, &bits, [scratch, counter], crate::check::encode)?;
    let launch = emulator::Launch { grid: [launch.grid, 1, 1], threads: [launch.block, 1, 1], shared: launch.shared_bytes };
    let executed = device.launch(module.kernel(&compiled.name).expect("the kernel is there"), launch, &parameters).map_err(|e| e.to_string())?;
    let mut count = [0; 4];
    device.read(counter, &mut count).expect("it was allocated");
    if count != [0; 4] {
        return Err(format!("the kernel leaves its counter at {}", u32::from_le_bytes(count)));
    }
    let outputs = kernel.outputs.iter().zip(&pointers[kernel.inputs.len()..]);
    let outputs = outputs
        .map(|(output, p)| {
            let ty = &kernel.body[output.value].ty;
            let last = offsets(kernel, ty, &output.strides).into_iter().max().map_or(0, |m| m + 1);
            let mut bytes = vec![0; last * ty.dtype.bytes() as usize];
            device.read(*p, &mut bytes).expect("it was allocated");
            decoded(kernel, ty, &output.strides, &bytes)
        })
        .collect();
    Ok((outputs, executed))
}

/// Operations of tensor cores that a kernel without scalars executes.
pub fn matrix_operations(kernel: &Kernel, target: &Target, inputs: &[Vec<f64>]) -> u64 {
    let (compiled, ptx) = compiled(kernel, target);
    let run = run_ptx_shifted(kernel, &compiled, &ptx, emulator::Options::default(), inputs, &[], 0.0, [0, 0]);
    run.unwrap_or_else(|e| panic!("{e}\n{ptx}")).1.matrix_operations
}

/// The GPUs that kernels are compiled and assembled for.
const GPUS: [&str; 2] = ["sm_80", "sm_90a"];

/// Whether all is asked for (`make test-long-kernels`), rather than a sample.
pub fn everything() -> bool {
    std::env::var_os("KERNELS").is_some()
}

/// Compiles for this machine, for AVX2 if that is less, and for GPUs, for these with products of f32 in tf32 too;
/// assembles for GPUs, runs on random inputs and compares with the evaluator within `tolerance` (absolute plus
/// relative). Of two GPUs with code of their own, a kernel gets one, by its text, unless all is asked for.
pub fn check_with(kernel: &Kernel, inputs: &[Vec<f64>], scalars: &[f64], tolerance: f64) {
    // Code for the two GPUs differs only for products and attention of 16-bit operands.
    let groups =
        matches!(kernel.family, Family::Gemm | Family::Attention | Family::AttentionGrad) && kernel.inputs.iter().any(|i| i.ty.dtype.is_half());
    let emulated = if groups { one_of_gpus(kernel) } else { &GPUS[..1] };
    let cpus = [Target::host().expect("a supported machine"), Target::x86_64_v3()];
    // Vectors as long and as many make the same code.
    let alike = (cpus[0].vector_bytes, cpus[0].registers) == (cpus[1].vector_bytes, cpus[1].registers);
    let cpus = if alike && !everything() { &cpus[..1] } else { &cpus[..] };
    check_on(cpus, emulated, kernel, inputs, scalars, tolerance);
    if let Some(rounding) = with_tf32(kernel) {
        check_on(&[], one_of_gpus(&rounding), &rounding, inputs, scalars, tolerance);
    }
}

/// The GPUs that a kernel runs on in the emulator, of those that get code of their own for it.
fn one_of_gpus(kernel: &Kernel) -> &'static [&'static str] {
    let text = ir::text::print_kernel(kernel);
    let turn = text.bytes().fold(0, |sum: u32, byte| sum.wrapping_mul(31).wrapping_add(byte.into())) >> 16;
    if everything() { &GPUS } else { &GPUS[turn as usize % 2..][..1] }
}

/// The same kernel with its product in tf32, if it is one of f32.
pub fn with_tf32(kernel: &Kernel) -> Option<Kernel> {
    let mut kernel = kernel.clone();
    let product = |v: &Value| kernel.family == Family::Gemm && matches!(kernel.body[*v].op, Op::Dot { .. } | Op::GroupedDot { .. });
    let v = kernel.body.values().find(product)?;
    let is_f32 = kernel.body[kernel.body[v].args[0]].ty.dtype == DType::F32;
    let (Op::Dot { tf32, .. } | Op::GroupedDot { tf32, .. }) = &mut kernel.body.nodes[v.index()].op else { return None };
    *tf32 = true;
    is_f32.then_some(kernel)
}

/// On these CPUs and these GPUs. For the other GPUs, which get the same code, it is assembled if all is asked for.
fn check_on(cpus: &[Target], emulated: &[&str], kernel: &Kernel, inputs: &[Vec<f64>], scalars: &[f64], tolerance: f64) {
    kernel.verify().expect("a well-formed test");
    let want = kernel.run(inputs, scalars);
    let compare = |cpu: &str, got: &[Vec<f64>]| {
        for (number, (got, want)) in got.iter().zip(&want).enumerate() {
            let dtype = kernel.body[kernel.outputs[number].value].ty.dtype;
            let before = if kernel.outputs[number].accumulate { 2.0 } else { 0.0 };
            for (at, (g, w)) in got.iter().zip(want).enumerate() {
                let w = if dtype == DType::F32 { f64::from((w + before) as f32) } else { dtype.round(w + before) };
                let close = (g - w).abs() <= tolerance * (1.0 + w.abs()) || *g == w || (g.is_nan() && w.is_nan());
                assert!(close, "{cpu} output {number} element {at}: {g}, not {w}");
            }
        }
    };
    for target in cpus {
        compare(&target.cpu, &run(kernel, target, inputs, scalars, 2.0));
    }
    for cpu in GPUS.into_iter().filter(|cpu| emulated.contains(cpu) || everything()) {
        let target = Target::gpu(cpu);
        let compiled = compiled(kernel, &target);
        assembling::assemble(&compiled.1, &target);
        if emulated.contains(&cpu) {
            compare(cpu, &emulate_ptx(kernel, &compiled, inputs, scalars, 2.0));
        }
    }
}

pub fn check(kernel: &Kernel, scalars: &[f64], tolerance: f64) {
    check_with(kernel, &random_inputs(kernel, 1, 7), scalars, tolerance);
}
