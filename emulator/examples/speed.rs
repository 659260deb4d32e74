//! How fast the emulator is: thread instructions per second of a loop of float arithmetic, tensor operations per
//! second of `mma.sync`.
//!
//! `cargo run --release -p emulator --example speed`

use emulator::{Device, Launch, Options};
use std::time::Instant;

const LOOP: &str = "
.version 8.0
.target sm_80
.address_size 64
.visible .entry arithmetic(.param .u64 p) {
    .reg .pred %p<2>; .reg .b32 %r<4>; .reg .f32 %f<4>; .reg .b64 %d<4>;
    ld.param.u64 %d0, [p];
    mov.u32 %r0, %ctaid.x;
    mov.u32 %r1, %tid.x;
    mad.lo.u32 %r0, %r0, 256, %r1;
    mul.wide.u32 %d1, %r0, 4;
    add.u64 %d1, %d1, %d0;
    cvt.rn.f32.u32 %f0, %r0;
    mov.u32 %r1, 0;
AGAIN:
    fma.rn.f32 %f1, %f0, 0f3F000000, 0f3F800000;
    mul.f32 %f2, %f1, %f0;
    add.f32 %f0, %f1, 0fBF800000;
    max.f32 %f0, %f0, %f2;
    ld.global.f32 %f3, [%d1];
    add.u32 %r1, %r1, 1;
    setp.lt.u32 %p0, %r1, 1000;
    @%p0 bra AGAIN;
    st.global.f32 [%d1], %f0;
    ret;
}
.visible .entry tensor(.param .u64 p) {
    .reg .pred %p<2>; .reg .b32 %r<12>; .reg .f32 %f<4>;
    mov.b32 %r2, 0x3F803F80; mov.b32 %r3, %r2; mov.b32 %r4, %r2; mov.b32 %r5, %r2; mov.b32 %r6, %r2; mov.b32 %r7, %r2;
    mov.f32 %f0, 0f00000000; mov.f32 %f1, %f0; mov.f32 %f2, %f0; mov.f32 %f3, %f0;
    mov.u32 %r1, 0;
AGAIN:
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f0, %f1, %f2, %f3}, {%r2, %r3, %r4, %r5}, {%r6, %r7}, {%f0, %f1, %f2, %f3};
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f0, %f1, %f2, %f3}, {%r2, %r3, %r4, %r5}, {%r6, %r7}, {%f0, %f1, %f2, %f3};
    add.u32 %r1, %r1, 1;
    setp.lt.u32 %p0, %r1, 1000;
    @%p0 bra AGAIN;
    ret;
}";

fn main() {
    let mut device = Device::new(Options::default());
    let module = device.load(LOOP).expect("it is PTX");
    let p = device.allocate(4 * 256 * 64);
    for (name, blocks) in [("arithmetic", 64), ("tensor", 16)] {
        let launch = Launch { grid: [blocks, 1, 1], threads: [256, 1, 1], shared: 0 };
        let start = Instant::now();
        let s = device.launch(module.kernel(name).expect("it is there"), launch, &p.to_le_bytes()).expect("it is right");
        let seconds = start.elapsed().as_secs_f64();
        let (instructions, operations) = (s.thread_instructions as f64 / seconds / 1e6, s.matrix_operations as f64 / seconds / 1e9);
        println!("{name}: {instructions:.0} M thread instructions/s, {operations:.1} G tensor operations/s");
    }
}
