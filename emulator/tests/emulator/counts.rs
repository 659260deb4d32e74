//! What is counted of kernels whose counts are known.

use super::{bytes, matmul, text, upload};
use emulator::{Counts, Device, H100, Launch, Options, Pipe};

fn counted(body: &str, threads: u32, input: &[u32]) -> Counts {
    let mut device = Device::new(Options { count: true, ..Options::default() });
    let module = device.load(&text(body)).unwrap_or_else(|e| panic!("{e}"));
    let p = upload(&mut device, &bytes(input, u32::to_le_bytes));
    let launch = Launch { grid: [1, 1, 1], threads: [threads, 1, 1], shared: 0 };
    device.launch(module.kernel("k").expect("it is there"), launch, &p.to_le_bytes()).unwrap_or_else(|e| panic!("{e}")).counts
}

fn trips(body: &str) -> u64 {
    counted(body, 32, &[0; 64]).trips
}

#[test]
fn a_trip_is_a_wait_for_what_is_loaded() {
    let load = |to: u32, at: u32| format!("ld.global.u32 %r{to}, [%d1+{at}];\n");
    let add = |to: u32, a: u32, b: u32| format!("add.u32 %r{to}, %r{a}, %r{b};\n");
    let store = |from: u32, at: u32| format!("st.global.u32 [%d1+{at}], %r{from};\n");
    assert_eq!(trips(&(load(1, 0) + &load(2, 128) + &add(3, 1, 2) + &store(3, 0))), 1, "two loads at once");
    assert_eq!(trips(&(load(1, 0) + &store(1, 128) + &load(2, 0) + &store(2, 128))), 2, "a load stays behind a store");
    assert_eq!(trips(&(load(1, 0) + &load(2, 128))), 0, "nothing waits for what nothing uses");
    let pointer = "mul.wide.u32 %d2, %r1, 4;\nadd.u64 %d2, %d2, %d1;\nld.global.u32 %r2, [%d2];\n";
    assert_eq!(trips(&(load(1, 0) + pointer + &store(2, 0))), 2, "an address that is loaded");
}

/// A kernel with a loop around a body, which ends after `times` rounds.
fn round(before: &str, body: &str, times: u32) -> String {
    format!("{before}mov.u32 %r9, 0;\nAGAIN:\n{body}add.u32 %r9, %r9, 1;\nsetp.lt.u32 %p1, %r9, {times};\n@%p1 bra AGAIN;\n")
}

#[test]
fn loops_wait_as_far_ahead_as_they_load() {
    let serial = round("", "ld.global.u32 %r1, [%d1];\nadd.u32 %r2, %r2, %r1;\n", 10);
    assert_eq!(trips(&serial), 3, "four rounds at a time");
    // A barrier in each round keeps the rounds apart.
    let round = |before: &str, body: &str| round(before, &format!("{body}bar.warp.sync -1;\n"), 10);
    assert_eq!(trips(&round("", "ld.global.u32 %r1, [%d1];\nadd.u32 %r2, %r2, %r1;\n")), 10);
    let ahead = round("ld.global.u32 %r1, [%d1];\n", "mov.b32 %r2, %r1;\nld.global.u32 %r1, [%d1];\nadd.u32 %r3, %r3, %r2;\n");
    assert_eq!(trips(&ahead), 5, "two under way: that of a round and of the next");
    let two = "mov.b32 %r4, %r1;\nmov.b32 %r1, %r2;\nld.global.u32 %r2, [%d1];\nadd.u32 %r3, %r3, %r4;\n";
    let ahead = round("ld.global.u32 %r1, [%d1];\nld.global.u32 %r2, [%d1];\n", two);
    assert_eq!(trips(&ahead), 4, "three under way");
    let sums = round("", "ld.global.u32 %r1, [%d1];\nadd.u32 %r1, %r1, 1;\nst.global.u32 [%d1], %r1;\n");
    assert_eq!(trips(&sums), 10);
}

#[test]
fn warps_learn_of_trips_at_barriers() {
    let body = "
        setp.ge.u32 %p1, %r0, 32;
        @%p1 bra MEET;
        ld.global.u32 %r1, [%d1];
        add.u32 %r1, %r1, 1;
        st.global.u32 [%d1], %r1;
    MEET:
        bar.sync 0;
        ld.global.u32 %r2, [%d0];
        st.global.u32 [%d1+256], %r2;";
    let counts = counted(body, 64, &[0; 128]);
    assert_eq!((counts.trips, counts.all_trips, counts.barriers), (2, 4, 2));
    assert_eq!((counts.warps, counts.blocks), (2, 1));
}

#[test]
fn instructions_go_to_their_pipes() {
    let counts = counted("mov.f32 %f1, 0f3F800000;\nfma.rn.f32 %f2, %f1, %f1, %f1;\nex2.approx.f32 %f3, %f2;\nrcp.rn.f32 %f3, %f3;", 32, &[0; 64]);
    let of = |p: Pipe| counts.issued[p as usize];
    assert_eq!((of(Pipe::Fma), of(Pipe::Special)), (10, 1), "a multiply-add, and an inverse rounded to nearest; an exponential");
    assert_eq!(of(Pipe::Memory), 0, "parameters are operands");
}

#[test]
fn products_are_counted_by_kind_and_need_no_arithmetic() {
    for products in [true, false] {
        let options = Options { count: true, products, ..Options::default() };
        let s = matmul::run_hopper(&matmul::hopper(), 1, options).expect("it is right").1;
        let operations = 2 * 64 * 64 * 64 * matmul::STEPS as u64;
        assert_eq!(s.counts.products, [[0, 0], [operations, 0]]);
        assert_eq!(s.matrix_operations, operations);
        let factors = 2 * 64 * 64 * 2 * matmul::STEPS as u64;
        assert_eq!((s.counts.loads.bytes, s.counts.loads.sectors), (factors, factors / 32));
        assert_eq!(s.counts.stores.bytes, 64 * 64 * 4);
        let s = matmul::run_ampere(include_str!("../kernels/matmul_sm80.ptx"), options).expect("it is right").1;
        assert_eq!(s.counts.products, [[2 * 16 * 8 * 16 * matmul::STEPS as u64, 0], [0, 0]]);
    }
}

/// A large copy of 16 bytes a lane on all of a card's multiprocessors takes as long as memory needs.
#[test]
fn a_large_copy_is_bound_by_memory_and_a_small_one_by_its_launch() {
    let own = "mov.u32 %r5, %ctaid.x;\nmul.wide.u32 %d2, %r5, 65536;\nadd.u64 %d1, %d1, %d2;\nmov.u64 %d2, %d1;\n";
    let body = round(own, "ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%d1];\nst.global.v4.u32 [%d2], {%r1, %r2, %r3, %r4};\n", 4);
    let mut device = Device::new(Options { count: true, ..Options::default() });
    // Lanes then lie 16 bytes apart.
    let module = device.load(&text(&body).replace("mul.wide.u32 %d1, %r0, 4", "mul.wide.u32 %d1, %r0, 16")).expect("it is PTX");
    let (p, kernel) = (device.allocate(1 << 20), module.kernel("k").expect("it is there"));
    let launch = |grid| Launch { grid: [grid, 1, 1], threads: [256, 1, 1], shared: 0 };
    let counts = device.launch(kernel, launch(2), &p.to_le_bytes()).expect("it is right").counts;
    assert_eq!((counts.loads.widths[4], counts.loads.sectors), (counts.loads.bytes, counts.loads.needed));
    let bytes = |grid: u64| [grid * 4 * 256 * 16 * 2, 0];
    let large = H100.cost(&[counts], kernel, &launch(132 * 256), bytes(132 * 256));
    assert_eq!(large.bound.to_string(), "memory");
    let ideal = bytes(132 * 256)[0] as f64 / H100.memory;
    assert!((ideal..1.1 * ideal).contains(&large.seconds), "{} of {ideal}", large.seconds);
    let small = H100.cost(&[counts], kernel, &launch(2), bytes(2));
    assert!(small.bound.to_string() == "launch" || small.bound.to_string() == "latency", "{}", small.bound);
}
