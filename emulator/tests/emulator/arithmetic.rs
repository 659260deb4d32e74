//! Each instruction against the same in Rust.

use super::{Options, run};

/// Checks `%r3 = op(%r1, %r2)` on pairs of words.
fn check(op: &str, cases: &[(u32, u32, u32)]) {
    let mut input = vec![0; 64];
    for (k, (a, b, _)) in cases.iter().enumerate() {
        (input[k], input[k + 32]) = (*a, *b);
    }
    let body = format!("ld.global.u32 %r1, [%d1];\nld.global.u32 %r2, [%d1+128];\n{op}\nst.global.u32 [%d1], %r3;");
    let out = run(&body, 32, &input, Options::default()).unwrap_or_else(|f| panic!("{op}: {f}"));
    for (k, (a, b, expected)) in cases.iter().enumerate() {
        assert_eq!(out[k], *expected, "{op} of {a:#x}, {b:#x}: {:#x} instead of {expected:#x}", out[k]);
    }
}

fn f(x: f32) -> u32 {
    x.to_bits()
}

const MINUS: fn(u32) -> u32 = u32::wrapping_neg;

#[test]
fn integers() {
    check("sub.s32 %r3, %r1, %r2;", &[(3, 5, MINUS(2)), (0, 1 << 31, 1 << 31)]);
    check("mul.hi.u32 %r3, %r1, %r2;", &[(1 << 31, 6, 3), (u32::MAX, u32::MAX, u32::MAX - 1)]);
    check("mul.hi.s32 %r3, %r1, %r2;", &[(MINUS(2), 1 << 30, u32::MAX), (u32::MAX, u32::MAX, 0)]);
    check("div.s32 %r3, %r1, %r2;", &[(MINUS(7), 2, MINUS(3)), (7, MINUS(2), MINUS(3))]);
    check("rem.s32 %r3, %r1, %r2;", &[(MINUS(7), 2, MINUS(1)), (7, 4, 3)]);
    check("div.u32 %r3, %r1, %r2;", &[(u32::MAX, 16, u32::MAX / 16)]);
    check("min.s32 %r3, %r1, %r2;", &[(MINUS(1), 1, MINUS(1))]);
    check("min.relu.s32 %r3, %r1, %r2;", &[(MINUS(5), 8, 0), (3, 8, 3)]);
    check("max.relu.s32 %r3, %r1, %r2;", &[(MINUS(5), MINUS(8), 0), (MINUS(3), 8, 8)]);
    check("min.u32 %r3, %r1, %r2;", &[(MINUS(1), 1, 1)]);
    check("shl.b32 %r3, %r1, %r2;", &[(1, 31, 1 << 31), (1, 32, 0)]);
    check("shr.u32 %r3, %r1, %r2;", &[(1 << 31, 31, 1), (1, 99, 0)]);
    check("shr.s32 %r3, %r1, %r2;", &[(1 << 31, 31, u32::MAX), (1 << 31, 99, u32::MAX)]);
    check("mad.lo.s32 %r3, %r1, %r2, %r1;", &[(7, 3, 28)]);
    check("bfe.u32 %r3, %r1, 4, 8;", &[(0xABCD, 0, 0xBC)]);
    check("bfe.s32 %r3, %r1, 4, 8;", &[(0xABCD, 0, 0xFFFF_FFBC)]);
    check("bfi.b32 %r3, %r1, %r2, 8, 4;", &[(0x5, 0xFFFF_FFFF, 0xFFFF_F5FF)]);
    check("prmt.b32 %r3, %r1, %r2, 0x5410;", &[(0x1111_2222, 0x3333_4444, 0x4444_2222)]);
    check("lop3.b32 %r3, %r1, %r2, 12, 0x96;", &[(0b1010, 0b0110, 0b1010 ^ 0b0110 ^ 12)]);
    check("shf.l.wrap.b32 %r3, %r1, %r2, 8;", &[(0x1122_3344, 0x5566_7788, 0x6677_8811)]);
    check("popc.b32 %r3, %r1; add.u32 %r3, %r3, %r2;", &[(0xF0F0, 1, 9)]);
    check("clz.b32 %r3, %r1;", &[(1, 0, 31), (0, 0, 32)]);
    check("not.b32 %r3, %r1;", &[(0xF0, 0, !0xF0)]);
    check("mul.wide.s32 %d3, %r1, %r2; shr.s64 %d3, %d3, 4; cvt.u32.u64 %r3, %d3;", &[(MINUS(5), 1 << 10, (-5i64 * 64) as u32)]);
    check("setp.lt.s32 %p1, %r1, %r2; selp.b32 %r3, 1, 2, %p1;", &[(MINUS(1), 0, 1), (1, 0, 2)]);
    check("setp.lt.u32 %p1, %r1, %r2; selp.b32 %r3, 1, 2, %p1;", &[(MINUS(1), 0, 2), (0, 1, 1)]);
    check("setp.ne.and.s32 %p1|%p2, %r1, %r2, !%p3; selp.b32 %r3, 1, 2, %p1;", &[(1, 0, 2)]);
    check("mov.b32 {%h1, %h2}, %r1; mov.b32 %r3, {%h2, %h1};", &[(0x1234_5678, 0, 0x5678_1234)]);
    check("cvt.s32.s8 %r3, %r1;", &[(0x80, 0, 0xFFFF_FF80)]);
    check("mul.wide.u32 %d3, %r1, %r2; st.global.b32 [%d1], %d3; ld.global.b32 %r3, [%d1];", &[(1 << 31, 6, 0), (1 << 20, (1 << 12) + 3, 3 << 20)]);
    check("cvt.u16.u32 %h1, %r1; cvt.u32.u16 %r3, %h1;", &[(0x1_2345, 0, 0x2345)]);
}

#[test]
fn floats() {
    check("add.f32 %r3, %r1, %r2;", &[(f(0.1), f(0.2), f(0.1 + 0.2))]);
    check("fma.rn.f32 %r3, %r1, %r2, %r1;", &[(f(0.1), f(0.3), f(0.1f32.mul_add(0.3, 0.1)))]);
    check("div.rn.f32 %r3, %r1, %r2;", &[(f(1.0), f(3.0), f(1.0 / 3.0))]);
    check("max.f32 %r3, %r1, %r2;", &[(f(f32::NAN), f(3.0), f(3.0)), (f(-1.0), f(-2.0), f(-1.0))]);
    check("max.NaN.f32 %r3, %r1, %r2; setp.nan.f32 %p1, %r3, %r3; selp.u32 %r3, 1, 0, %p1;", &[(f(f32::NAN), f(3.0), 1), (f(1.0), f(3.0), 0)]);
    check("add.ftz.f32 %r3, %r1, %r2;", &[(1, 1, 0), (f(1.0), 1, f(1.0))]);
    check("add.sat.f32 %r3, %r1, %r2;", &[(f(0.7), f(0.7), f(1.0)), (f(-1.0), f(0.5), 0)]);
    check("ex2.approx.ftz.f32 %r3, %r1;", &[(f(3.0), 0, f(8.0)), (f(f32::NEG_INFINITY), 0, 0)]);
    check("lg2.approx.f32 %r3, %r1;", &[(f(8.0), 0, f(3.0))]);
    check("rsqrt.approx.f32 %r3, %r1;", &[(f(16.0), 0, f(0.25))]);
    check("rcp.rn.f32 %r3, %r1;", &[(f(4.0), 0, f(0.25))]);
    check("copysign.f32 %r3, %r1, %r2;", &[(f(-0.0), f(2.0), f(-2.0)), (f(3.0), f(-1.0), f(1.0))]);
    check("neg.f32 %r3, %r1;", &[(f(0.0), 0, f(-0.0))]);
    check("setp.ltu.f32 %p1, %r1, %r2; selp.u32 %r3, 1, 0, %p1;", &[(f(f32::NAN), f(1.0), 1), (f(2.0), f(1.0), 0)]);
    check("setp.neu.f32 %p1, %r1, %r2; selp.u32 %r3, 1, 0, %p1;", &[(f(f32::NAN), f(1.0), 1), (f(1.0), f(1.0), 0)]);
    check("cvt.rn.f32.s32 %r3, %r1;", &[(MINUS(3), 0, f(-3.0)), (16_777_217, 0, f(16_777_216.0))]);
    check("cvt.rzi.s32.f32 %r3, %r1;", &[(f(-2.9), 0, MINUS(2)), (f(3e9), 0, i32::MAX as u32), (f(f32::NAN), 0, 0)]);
    check("cvt.rni.f32.f32 %r3, %r1;", &[(f(2.5), 0, f(2.0)), (f(-3.5), 0, f(-4.0))]);
    check("cvt.rn.bf16x2.f32 %r3, %r1, %r2;", &[(f(1.0), f(-2.0), 0x3F80_C000), (f(1.003_906_3), f(0.0), 0x3F80_0000)]);
    check("cvt.rn.f16.f32 %h1, %r1; cvt.f32.f16 %r3, %h1;", &[(f(1.0005), 0, f(1.0009766)), (f(1e6), 0, f(f32::INFINITY))]);
    check("fma.rn.bf16x2 %r3, %r1, %r2, %r1;", &[(0x3F80_4000, 0x4040_4040, 0x4080_4100)]);
    check("cvt.rna.tf32.f32 %r3, %r1;", &[(0x3F80_1000, 0, 0x3F80_2000), (0xBF80_0FFF, 0, 0xBF80_0000), (0x7F7F_FFFF, 0, f(f32::INFINITY))]);
    check("cvt.f64.f32 %d3, %r1; mul.f64 %d3, %d3, %d3; cvt.rn.f32.f64 %r3, %d3;", &[(f(1.5), 0, f(2.25))]);
}
