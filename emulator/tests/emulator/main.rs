//! Kernels that are right, in every timing; and what is wrong with those that are not.

mod arithmetic;
mod clusters;
mod counts;
mod faults;
mod flow;
mod matmul;
mod races;
mod registers;
mod turns;

use emulator::{Device, Fault, Launch, LaunchError, Options, Timing};

/// Every timing, with some orders of warps.
fn all_options() -> Vec<Options> {
    let timings = [Timing::Early, Timing::Late, Timing::Random];
    timings.into_iter().flat_map(|timing| (0..4).map(move |seed| Options { timing, seed, ..Options::default() })).collect()
}

fn bytes<T: Copy, const N: usize>(values: &[T], f: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|v| f(*v)).collect()
}

fn words(device: &Device, address: u64, n: usize) -> Vec<u32> {
    let mut out = vec![0; 4 * n];
    device.read(address, &mut out).expect("it was allocated");
    out.chunks_exact(4).map(|c| u32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect()
}

fn reals(device: &Device, address: u64, n: usize) -> Vec<f32> {
    words(device, address, n).into_iter().map(f32::from_bits).collect()
}

fn upload(device: &mut Device, data: &[u8]) -> u64 {
    let p = device.allocate(data.len() as u64);
    device.write(p, data).expect("it was allocated");
    p
}

/// A kernel `k(p)` of these registers and statements, within a module.
fn text(body: &str) -> String {
    format!(
        ".version 8.0\n.target sm_90a\n.address_size 64\n.visible .entry k(.param .u64 p) {{\n.reg .pred %p<9>; .reg .b16 %h<9>; .reg .b32 %r<40>; .reg .f32 %f<9>; .reg .b64 %d<20>;\n\
         ld.param.u64 %d0, [p];\nmov.u32 %r0, %tid.x;\nmul.wide.u32 %d1, %r0, 4;\nadd.u64 %d1, %d1, %d0;\n{body}\nret;\n}}\n"
    )
}

/// Runs such a kernel on these words with so many threads. Returns the words afterwards.
fn run(body: &str, threads: u32, input: &[u32], options: Options) -> Result<Vec<u32>, Box<Fault>> {
    let mut device = Device::new(options);
    let module = device.load(&text(body)).unwrap_or_else(|e| panic!("{e}"));
    let p = upload(&mut device, &bytes(input, u32::to_le_bytes));
    let launch = Launch { grid: [1, 1, 1], threads: [threads, 1, 1], shared: 0 };
    match device.launch(module.kernel("k").expect("it is there"), launch, &p.to_le_bytes()) {
        Ok(_) => Ok(words(&device, p, input.len())),
        Err(LaunchError::Fault(f)) => Err(f),
        Err(e) => panic!("{e}"),
    }
}
