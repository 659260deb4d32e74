//! Instructions that only touch registers.

use crate::float;
use crate::inst::*;
use crate::warp::{Longs, Warp, Words};

fn words(f: impl Fn(usize) -> u32) -> Words {
    std::array::from_fn(f)
}

fn longs(f: impl Fn(usize) -> u64) -> Longs {
    std::array::from_fn(f)
}

fn real(bits: u32) -> f32 {
    f32::from_bits(bits)
}

fn double(bits: u64) -> f64 {
    f64::from_bits(bits)
}

/// The value of an integer type, from its bits.
fn int(ty: Ty, bits: u64) -> i128 {
    match ty {
        Ty::U8 => i128::from(bits as u8),
        Ty::S8 => i128::from(bits as i8),
        Ty::U16 | Ty::F16 | Ty::Bf16 => i128::from(bits as u16),
        Ty::S16 => i128::from(bits as i16),
        Ty::U32 | Ty::F32 => i128::from(bits as u32),
        Ty::S32 => i128::from(bits as i32),
        Ty::U64 | Ty::F64 => i128::from(bits),
        Ty::S64 => i128::from(bits as i64),
    }
}

fn wide(f: Int2, ty: Ty, a: u64, b: u64) -> u64 {
    let bits = ty.bytes() * 8;
    let (x, y) = (int(ty, a), int(ty, b));
    let r = match f {
        Int2::Add => x + y,
        Int2::Sub => x - y,
        Int2::MulLo => x.wrapping_mul(y),
        Int2::MulHi if ty == Ty::U64 => ((a as u128 * b as u128) >> 64) as i128,
        Int2::MulHi => (x * y) >> bits,
        Int2::Div if y == 0 => -1,
        Int2::Div => x / y,
        Int2::Rem if y == 0 => -1,
        Int2::Rem => x % y,
        Int2::Min => x.min(y),
        Int2::Max => x.max(y),
        Int2::MinRelu => x.min(y).max(0),
        Int2::MaxRelu => x.max(y).max(0),
        Int2::And => x & y,
        Int2::Or => x | y,
        Int2::Xor => x ^ y,
        Int2::Shl if (b as u32) >= bits => 0,
        Int2::Shl => x << (b as u32),
        // A shift beyond the width leaves only the sign.
        Int2::Shr => x >> (b as u32).min(bits),
    };
    r as u64
}

/// Executes an instruction that only touches registers. Returns false for any other one.
pub fn execute(w: &mut Warp, op: &Op, mask: u32) -> bool {
    match op {
        Op::Nop => {}
        Op::MovW(d, a) => w.set_word(*d, &w.word(*a), mask),
        Op::MovD(d, a) => w.set_long(*d, &w.long(*a), mask),
        Op::MovP(d, a) => w.set_predicate(*d, w.predicate(*a), mask),
        Op::Pack(d, parts, bytes) => {
            let mut out = [0u64; 32];
            for (k, p) in parts.iter().enumerate() {
                let (v, low) = (w.word(*p), u64::MAX >> (64 - 8 * bytes));
                (0..32).for_each(|l| out[l] |= (u64::from(v[l]) & low) << (8 * bytes * k as u32));
            }
            w.set(*d, &out, mask);
        }
        Op::Unpack(d, s, bytes) => {
            let (v, low) = (w.bits(*s), u64::MAX >> (64 - 8 * bytes));
            for (k, d) in d.iter().enumerate() {
                w.set(*d, &v.map(|x| x >> (8 * bytes * k as u32) & low), mask);
            }
        }
        Op::IntW(f, ty, d, a, b) => int_word(w, *f, *ty, *d, *a, *b, mask),
        Op::IntD(f, ty, d, a, b) => {
            let (a, b) = (w.long(*a), w.long(*b));
            let out = match f {
                Int2::Add => longs(|l| a[l].wrapping_add(b[l])),
                Int2::Sub => longs(|l| a[l].wrapping_sub(b[l])),
                Int2::And => longs(|l| a[l] & b[l]),
                Int2::Or => longs(|l| a[l] | b[l]),
                Int2::Xor => longs(|l| a[l] ^ b[l]),
                Int2::MulLo => longs(|l| a[l].wrapping_mul(b[l])),
                Int2::MulHi | Int2::Div | Int2::Rem | Int2::Min | Int2::Max | Int2::MinRelu | Int2::MaxRelu | Int2::Shl | Int2::Shr => {
                    longs(|l| wide(*f, *ty, a[l], b[l]))
                }
            };
            w.set_long(*d, &out, mask);
        }
        Op::ShiftD(f, ty, d, a, b) => {
            let (a, b) = (w.long(*a), w.word(*b));
            w.set_long(*d, &longs(|l| wide(*f, *ty, a[l], u64::from(b[l]))), mask);
        }
        Op::Int1W(f, ty, d, a) => {
            let a = w.word(*a);
            let keep = if ty.bytes() == 2 { 0xFFFF } else { u32::MAX };
            let out = match f {
                Int1::Neg => a.map(|x| x.wrapping_neg() & keep),
                Int1::Not => a.map(|x| !x & keep),
                Int1::Abs => a.map(|x| int(*ty, u64::from(x)).unsigned_abs() as u32 & keep),
                Int1::Popc => a.map(u32::count_ones),
                Int1::Clz => a.map(u32::leading_zeros),
                Int1::Brev => a.map(u32::reverse_bits),
            };
            w.set_word(*d, &out, mask);
        }
        Op::Int1D(f, ty, d, a) => {
            let a = w.long(*a);
            let out = match f {
                Int1::Neg => a.map(u64::wrapping_neg),
                Int1::Not => a.map(|x| !x),
                Int1::Abs => a.map(|x| int(*ty, x).unsigned_abs() as u64),
                Int1::Brev => a.map(u64::reverse_bits),
                Int1::Popc | Int1::Clz => unreachable!("invariant: counts have 32 bits"),
            };
            w.set_long(*d, &out, mask);
        }
        Op::CountD(f, d, a) => {
            let a = w.long(*a);
            w.set_word(*d, &a.map(|x| if *f == Int1::Popc { x.count_ones() } else { x.leading_zeros() }), mask);
        }
        Op::WideD(ty, d, a, b, c) => {
            let (a, b, c) = (w.word(*a), w.word(*b), c.map_or([0; 32], |c| w.long(c)));
            let out = if ty.is_signed() {
                longs(|l| (i64::from(a[l] as i32) * i64::from(b[l] as i32)).wrapping_add(c[l] as i64) as u64)
            } else {
                longs(|l| (u64::from(a[l]) * u64::from(b[l])).wrapping_add(c[l]))
            };
            w.set_long(*d, &out, mask);
        }
        Op::WideW(ty, d, a, b, c) => {
            let (a, b, c) = (w.word(*a), w.word(*b), c.map_or([0; 32], |c| w.word(c)));
            w.set_word(*d, &words(|l| ((int(*ty, u64::from(a[l])) * int(*ty, u64::from(b[l]))) as u32).wrapping_add(c[l])), mask);
        }
        Op::MadW(ty, d, a, b, c) => {
            let (a, b, c) = (w.word(*a), w.word(*b), w.word(*c));
            let keep = if ty.bytes() == 2 { 0xFFFF } else { u32::MAX };
            w.set_word(*d, &words(|l| a[l].wrapping_mul(b[l]).wrapping_add(c[l]) & keep), mask);
        }
        Op::MadD(d, a, b, c) => {
            let (a, b, c) = (w.long(*a), w.long(*b), w.long(*c));
            w.set_long(*d, &longs(|l| a[l].wrapping_mul(b[l]).wrapping_add(c[l])), mask);
        }
        Op::Funnel { left, wrap, d, lo, hi, by } => {
            let (lo, hi, by) = (w.word(*lo), w.word(*hi), w.word(*by));
            let out = words(|l| {
                let n = if *wrap { by[l] & 31 } else { by[l].min(32) };
                let both = u64::from(hi[l]) << 32 | u64::from(lo[l]);
                if *left { ((both << n) >> 32) as u32 } else { (both >> n) as u32 }
            });
            w.set_word(*d, &out, mask);
        }
        Op::ExtractW(ty, d, a, at, n) => {
            let (a, at, n) = (w.word(*a), w.word(*at), w.word(*n));
            w.set_word(*d, &words(|l| extract(ty.is_signed(), 32, u64::from(a[l]), at[l], n[l]) as u32), mask);
        }
        Op::ExtractD(ty, d, a, at, n) => {
            let (a, at, n) = (w.long(*a), w.word(*at), w.word(*n));
            w.set_long(*d, &longs(|l| extract(ty.is_signed(), 64, a[l], at[l], n[l])), mask);
        }
        Op::InsertW(d, a, b, at, n) => {
            let (a, b, at, n) = (w.word(*a), w.word(*b), w.word(*at), w.word(*n));
            w.set_word(*d, &words(|l| insert(32, u64::from(a[l]), u64::from(b[l]), at[l], n[l]) as u32), mask);
        }
        Op::InsertD(d, a, b, at, n) => {
            let (a, b, at, n) = (w.long(*a), w.long(*b), w.word(*at), w.word(*n));
            w.set_long(*d, &longs(|l| insert(64, a[l], b[l], at[l], n[l])), mask);
        }
        Op::Prmt(d, a, b, s) => {
            let (a, b, s) = (w.word(*a), w.word(*b), w.word(*s));
            let out = words(|l| {
                let bytes = (u64::from(b[l]) << 32 | u64::from(a[l])).to_le_bytes();
                let pick = |k: u32| {
                    let n = s[l] >> (4 * k);
                    let byte = bytes[(n & 7) as usize];
                    // Bit 3 asks for the byte's sign in all its bits.
                    if n & 8 != 0 { (byte as i8 >> 7) as u8 } else { byte }
                };
                u32::from_le_bytes([pick(0), pick(1), pick(2), pick(3)])
            });
            w.set_word(*d, &out, mask);
        }
        Op::Lop3(d, a, b, c, table) => {
            let (a, b, c) = (w.word(*a), w.word(*b), w.word(*c));
            let out = words(|l| {
                (0..8u32).filter(|k| table >> k & 1 != 0).fold(0, |sum, k| {
                    let side = |v: u32, bit: u32| if k >> bit & 1 != 0 { v } else { !v };
                    sum | side(a[l], 2) & side(b[l], 1) & side(c[l], 0)
                })
            });
            w.set_word(*d, &out, mask);
        }
        Op::F1(f, m, d, a) => {
            let a = w.word(*a);
            w.set_word(*d, &words(|l| float::leave(*m, float::one(*f, float::enter(*m, a[l])))), mask);
        }
        Op::F2(f, m, d, a, b) => {
            let (a, b) = (w.word(*a), w.word(*b));
            let plain = *m == Mode::default();
            let out = match f {
                Float2::Add if plain => words(|l| (real(a[l]) + real(b[l])).to_bits()),
                Float2::Sub if plain => words(|l| (real(a[l]) - real(b[l])).to_bits()),
                Float2::Mul if plain => words(|l| (real(a[l]) * real(b[l])).to_bits()),
                Float2::Add
                | Float2::Sub
                | Float2::Mul
                | Float2::Div
                | Float2::Min
                | Float2::Max
                | Float2::MinNan
                | Float2::MaxNan
                | Float2::CopySign => words(|l| float::leave(*m, float::two(*f, float::enter(*m, a[l]), float::enter(*m, b[l])))),
            };
            w.set_word(*d, &out, mask);
        }
        Op::Fma(m, d, a, b, c) => {
            let (a, b, c) = (w.word(*a), w.word(*b), w.word(*c));
            let out = if *m == Mode::default() {
                words(|l| real(a[l]).mul_add(real(b[l]), real(c[l])).to_bits())
            } else {
                words(|l| float::leave(*m, float::enter(*m, a[l]).mul_add(float::enter(*m, b[l]), float::enter(*m, c[l]))))
            };
            w.set_word(*d, &out, mask);
        }
        Op::H1(f, e, n, d, a) => {
            let a = w.word(*a);
            w.set_word(*d, &halves(*e, *n, |k, l| float::one(*f, float::widen(*e, (a[l] >> (16 * k)) as u16))), mask);
        }
        Op::H2(f, e, n, d, a, b) => {
            let (a, b) = (w.word(*a), w.word(*b));
            let get = |v: u32, k: u32| float::widen(*e, (v >> (16 * k)) as u16);
            w.set_word(*d, &halves(*e, *n, |k, l| float::two(*f, get(a[l], k), get(b[l], k))), mask);
        }
        Op::HFma(e, n, d, a, b, c) => {
            let (a, b, c) = (w.word(*a), w.word(*b), w.word(*c));
            let get = |v: u32, k: u32| f64::from(float::widen(*e, (v >> (16 * k)) as u16));
            // The product of two numbers is exact in f64. The sum is rounded twice only where it needs more than 53
            // bits.
            let out =
                words(|l| (0..*n).map(|k| u32::from(float::narrow_f64(*e, get(a[l], k).mul_add(get(b[l], k), get(c[l], k)))) << (16 * k)).sum());
            w.set_word(*d, &out, mask);
        }
        Op::D1(f, d, a) => w.set_long(*d, &w.long(*a).map(|x| float::one_f64(*f, double(x)).to_bits()), mask),
        Op::D2(f, d, a, b) => {
            let (a, b) = (w.long(*a), w.long(*b));
            w.set_long(*d, &longs(|l| float::two_f64(*f, double(a[l]), double(b[l])).to_bits()), mask);
        }
        Op::DFma(d, a, b, c) => {
            let (a, b, c) = (w.long(*a), w.long(*b), w.long(*c));
            w.set_long(*d, &longs(|l| double(a[l]).mul_add(double(b[l]), double(c[l])).to_bits()), mask);
        }
        Op::SetP { cmp, ty, unordered, d, inverse, a, b, and } => {
            let (a, b) = (w.bits(*a), w.bits(*b));
            let mut result = compare(*cmp, *ty, *unordered, &a, &b);
            let mut other = !result;
            if let Some((logic, p)) = and {
                let p = w.predicate(*p);
                let join = |x: u32| match logic {
                    Logic::And => x & p,
                    Logic::Or => x | p,
                    Logic::Xor => x ^ p,
                };
                (result, other) = (join(result), join(other));
            }
            if let Some(d) = d {
                w.set_predicate(*d, result, mask);
            }
            if let Some(q) = inverse {
                w.set_predicate(*q, other, mask);
            }
        }
        Op::SelW(d, a, b, p) => {
            let (a, b, p) = (w.word(*a), w.word(*b), w.predicate(*p));
            w.set_word(*d, &words(|l| if p >> l & 1 != 0 { a[l] } else { b[l] }), mask);
        }
        Op::SelD(d, a, b, p) => {
            let (a, b, p) = (w.long(*a), w.long(*b), w.predicate(*p));
            w.set_long(*d, &longs(|l| if p >> l & 1 != 0 { a[l] } else { b[l] }), mask);
        }
        Op::LogicP(f, d, a, b) => {
            let (a, b) = (w.predicate(*a), w.predicate(*b));
            let out = match f {
                Logic::And => a & b,
                Logic::Or => a | b,
                Logic::Xor => a ^ b,
            };
            w.set_predicate(*d, out, mask);
        }
        Op::Convert { from, to, round, integral, mode, d, a } => {
            let a = w.bits(*a);
            w.set(*d, &longs(|l| convert(*from, *to, *round, *integral, *mode, a[l])), mask);
        }
        Op::ConvertPair { to, relu, d, high, low } => {
            let (high, low) = (w.word(*high), w.word(*low));
            let one = |bits: u32| {
                let x = real(bits);
                u32::from(float::narrow(*to, if *relu && x < 0.0 { 0.0 } else { x }))
            };
            w.set_word(*d, &words(|l| one(high[l]) << 16 | one(low[l])), mask);
        }
        Op::ActiveMask(d) => w.set_word(*d, &[mask; 32], mask),
        Op::ToGeneric(..)
        | Op::FromGeneric(..)
        | Op::Load { .. }
        | Op::Store { .. }
        | Op::Atom { .. }
        | Op::Shfl { .. }
        | Op::Vote { .. }
        | Op::Redux { .. }
        | Op::Elect(..)
        | Op::Bra { .. }
        | Op::Exit
        | Op::Bar { .. }
        | Op::Fence
        | Op::Registers(..)
        | Op::SyncWarp(_)
        | Op::FenceProxy
        | Op::FenceBarriers
        | Op::Trap
        | Op::CpAsync { .. }
        | Op::CpCommit
        | Op::CpWait(_)
        | Op::CpArrive { .. }
        | Op::BarrierInit(..)
        | Op::BarrierInval(_)
        | Op::BarrierArrive { .. }
        | Op::ClusterArrive { .. }
        | Op::ClusterWait
        | Op::MapRank(..)
        | Op::BarrierTest { .. }
        | Op::TensorLoad { .. }
        | Op::TensorStore { .. }
        | Op::BulkLoad { .. }
        | Op::BulkStore { .. }
        | Op::BulkCommit
        | Op::BulkWait { .. }
        | Op::LdMatrix { .. }
        | Op::StMatrix { .. }
        | Op::Mma { .. }
        | Op::Wgmma(_)
        | Op::WgmmaFence
        | Op::WgmmaCommit
        | Op::WgmmaWait(_) => return false,
    }
    true
}

fn int_word(w: &mut Warp, f: Int2, ty: Ty, d: W, a: Sw, b: Sw, mask: u32) {
    let (a, b) = (w.word(a), w.word(b));
    let out = match (f, ty) {
        (Int2::Add, Ty::U32 | Ty::S32) => words(|l| a[l].wrapping_add(b[l])),
        (Int2::Sub, Ty::U32 | Ty::S32) => words(|l| a[l].wrapping_sub(b[l])),
        (Int2::MulLo, Ty::U32 | Ty::S32) => words(|l| a[l].wrapping_mul(b[l])),
        (Int2::And, Ty::U32 | Ty::S32) => words(|l| a[l] & b[l]),
        (Int2::Or, Ty::U32 | Ty::S32) => words(|l| a[l] | b[l]),
        (Int2::Xor, Ty::U32 | Ty::S32) => words(|l| a[l] ^ b[l]),
        (Int2::Shl, Ty::U32 | Ty::S32) => words(|l| if b[l] > 31 { 0 } else { a[l] << b[l] }),
        (Int2::Shr, Ty::U32) => words(|l| if b[l] > 31 { 0 } else { a[l] >> b[l] }),
        (Int2::Shr, Ty::S32) => words(|l| ((a[l] as i32) >> b[l].min(31)) as u32),
        (Int2::Max, Ty::S32) => words(|l| (a[l] as i32).max(b[l] as i32) as u32),
        (Int2::Min, Ty::S32) => words(|l| (a[l] as i32).min(b[l] as i32) as u32),
        (Int2::Max, Ty::U32) => words(|l| a[l].max(b[l])),
        (Int2::Min, Ty::U32) => words(|l| a[l].min(b[l])),
        _ => {
            let keep = if ty.bytes() == 2 { 0xFFFF } else { u32::MAX };
            words(|l| wide(f, ty, u64::from(a[l]), u64::from(b[l])) as u32 & keep)
        }
    };
    w.set_word(d, &out, mask);
}

/// Packs `n` 16-bit results into each lane's register.
fn halves(e: Element, n: u32, f: impl Fn(u32, usize) -> f32) -> Words {
    words(|l| (0..n).map(|k| u32::from(float::narrow(e, f(k, l))) << (16 * k)).sum())
}

fn extract(signed: bool, bits: u32, a: u64, at: u32, n: u32) -> u64 {
    let (at, n) = (at & 0xFF, n & 0xFF);
    let mut out = 0u64;
    let top = (at + n).saturating_sub(1).min(bits - 1);
    let sign = signed && n > 0 && a >> top & 1 != 0;
    for k in 0..bits {
        let from = at + k;
        let bit = if k < n && from < bits { a >> from & 1 != 0 } else { sign };
        out |= u64::from(bit) << k;
    }
    out
}

fn insert(bits: u32, a: u64, b: u64, at: u32, n: u32) -> u64 {
    let (at, n) = (at & 0xFF, n & 0xFF);
    (0..n).take_while(|k| at + k < bits).fold(b, |out, k| out & !(1 << (at + k)) | (a >> k & 1) << (at + k))
}

fn compare(cmp: Cmp, ty: Ty, unordered: bool, a: &Longs, b: &Longs) -> u32 {
    fn all<T: PartialOrd>(cmp: Cmp, f: impl Fn(usize) -> (T, T)) -> u32 {
        (0..32).fold(0, |out, l| {
            let (x, y) = f(l);
            let holds = match cmp {
                Cmp::Eq => x == y,
                Cmp::Ne => x.partial_cmp(&y).is_some_and(std::cmp::Ordering::is_ne),
                Cmp::Lt => x < y,
                Cmp::Le => x <= y,
                Cmp::Gt => x > y,
                Cmp::Ge => x >= y,
                Cmp::Num => x.partial_cmp(&y).is_some(),
                Cmp::Nan => false,
            };
            out | u32::from(holds) << l
        })
    }
    fn floats(cmp: Cmp, unordered: bool, f: impl Fn(usize) -> (f64, f64)) -> u32 {
        let nan = (0..32).fold(0, |out, l| {
            let (x, y) = f(l);
            out | u32::from(x.is_nan() || y.is_nan()) << l
        });
        all(cmp, f) | if unordered { nan } else { 0 }
    }
    match ty {
        Ty::U8 | Ty::U16 => all(cmp, |l| (a[l] as u16, b[l] as u16)),
        Ty::S8 | Ty::S16 => all(cmp, |l| (a[l] as i16, b[l] as i16)),
        Ty::U32 => all(cmp, |l| (a[l] as u32, b[l] as u32)),
        Ty::S32 => all(cmp, |l| (a[l] as i32, b[l] as i32)),
        Ty::U64 => all(cmp, |l| (a[l], b[l])),
        Ty::S64 => all(cmp, |l| (a[l] as i64, b[l] as i64)),
        Ty::F32 => floats(cmp, unordered, |l| (f64::from(real(a[l] as u32)), f64::from(real(b[l] as u32)))),
        Ty::F64 => floats(cmp, unordered, |l| (double(a[l]), double(b[l]))),
        Ty::F16 | Ty::Bf16 => {
            let e = if ty == Ty::F16 { Element::F16 } else { Element::Bf16 };
            floats(cmp, unordered, |l| (f64::from(float::widen(e, a[l] as u16)), f64::from(float::widen(e, b[l] as u16))))
        }
    }
}

fn convert(from: Ty, to: Ty, round: Round, integral: bool, mode: Mode, bits: u64) -> u64 {
    let value = match from {
        Ty::F16 => f64::from(float::widen(Element::F16, bits as u16)),
        Ty::Bf16 => f64::from(float::widen(Element::Bf16, bits as u16)),
        Ty::F32 => f64::from(float::enter(mode, bits as u32)),
        Ty::F64 => double(bits),
        Ty::U8 | Ty::S8 | Ty::U16 | Ty::S16 | Ty::U32 | Ty::S32 | Ty::U64 | Ty::S64 => {
            let x = int(from, bits);
            return match to {
                Ty::F32 => u64::from((x as f32).to_bits()),
                Ty::F64 => (x as f64).to_bits(),
                // Integers below 2^64 are rounded twice only in bits that 16-bit types do not keep.
                Ty::F16 => u64::from(float::narrow_f64(Element::F16, x as f64)),
                Ty::Bf16 => u64::from(float::narrow_f64(Element::Bf16, x as f64)),
                Ty::U8 | Ty::S8 | Ty::U16 | Ty::S16 | Ty::U32 | Ty::S32 | Ty::U64 | Ty::S64 => {
                    let x = if mode.saturate { clamp(to, x) } else { x };
                    extend(to, x)
                }
            };
        }
    };
    let rounded = |x: f64| match round {
        Round::Nearest => x.round_ties_even(),
        Round::Zero => x.trunc(),
        Round::Down => x.floor(),
        Round::Up => x.ceil(),
    };
    let value = if integral && to.is_float() { rounded(value) } else { value };
    match to {
        Ty::F64 => value.to_bits(),
        Ty::F32 => u64::from(float::leave(mode, value as f32)),
        Ty::F16 => u64::from(float::narrow_f64(Element::F16, value)),
        Ty::Bf16 => u64::from(float::narrow_f64(Element::Bf16, value)),
        // Numbers out of range give the nearest integer, and NaN gives 0.
        Ty::U8 | Ty::S8 | Ty::U16 | Ty::S16 | Ty::U32 | Ty::S32 | Ty::U64 | Ty::S64 => extend(to, clamp(to, rounded(value) as i128)),
    }
}

fn clamp(ty: Ty, x: i128) -> i128 {
    let bits = ty.bytes() * 8;
    if ty.is_signed() { x.clamp(-(1 << (bits - 1)), (1 << (bits - 1)) - 1) } else { x.clamp(0, (1 << bits) - 1) }
}

/// The bits of a register of at least the type's size that holds it.
fn extend(ty: Ty, x: i128) -> u64 {
    let low = u64::MAX >> (64 - 8 * ty.bytes());
    int(ty, x as u64 & low) as u64
}
