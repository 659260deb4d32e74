//! `mma.sync`: which element of a matrix each lane holds (PTX ISA, section 9.7.14.5).

use crate::float;
use crate::inst::{Element, Sw, W};
use crate::warp::{Warp, Words};

/// The A operand of 16 rows from registers, for k of 4, 8 or 16.
pub fn fragment_a(e: Element, k: usize, a: &[Words]) -> [[f32; 16]; 16] {
    let mut out = [[0.0; 16]; 16];
    for (n, v) in a.iter().enumerate() {
        let (down, block) = (8 * (n % 2), n / 2);
        match e {
            Element::Tf32 => {
                for (l, v) in v.iter().enumerate() {
                    out[l / 4 + down][l % 4 + 4 * block] = tf32(*v);
                }
            }
            Element::F16 | Element::Bf16 => {
                let [low, high] = float::halves(e, v);
                for l in 0..32 {
                    let place = &mut out[l / 4 + down][2 * (l % 4) + 8 * block..][..2];
                    (place[0], place[1]) = (low[l], high[l]);
                }
            }
        }
    }
    debug_assert!(a.len() == if e == Element::Tf32 { k / 2 } else { k / 4 });
    out
}

/// A tf32 operand, which has 10 bits of mantissa. The others are ignored.
pub fn tf32(bits: u32) -> f32 {
    f32::from_bits(bits & !0x1FFF)
}

/// `d = a * b + c` of 16 x 8, along k in order, in f32: products of operands of at most 11 bits are exact there.
pub fn mma(w: &mut Warp, e: Element, k: u32, d: &[W; 4], a: &[Sw], b: &[Sw], c: &[Sw; 4]) {
    let k = k as usize;
    let a: Vec<Words> = a.iter().map(|s| w.word(*s)).collect();
    let am = fragment_a(e, k, &a);
    let mut bm = [[0f32; 8]; 16];
    for (n, s) in b.iter().enumerate() {
        let v = w.word(*s);
        match e {
            Element::Tf32 => {
                for (l, v) in v.iter().enumerate() {
                    bm[l % 4 + 4 * n][l / 4] = tf32(*v);
                }
            }
            Element::F16 | Element::Bf16 => {
                let [low, high] = float::halves(e, &v);
                for l in 0..32 {
                    let rows = &mut bm[2 * (l % 4) + 8 * n..][..2];
                    (rows[0][l / 4], rows[1][l / 4]) = (low[l], high[l]);
                }
            }
        }
    }
    let c = c.map(|s| w.word(s));
    let mut sums = [[0f32; 8]; 16];
    for l in 0..32 {
        for (n, c) in c.iter().enumerate() {
            sums[l / 4 + 8 * (n / 2)][2 * (l % 4) + n % 2] = f32::from_bits(c[l]);
        }
    }
    for (row, sums) in am.iter().zip(&mut sums) {
        for (x, b) in row[..k].iter().zip(&bm) {
            for (s, b) in sums.iter_mut().zip(b) {
                *s += x * b;
            }
        }
    }
    for (n, d) in d.iter().enumerate() {
        let out = std::array::from_fn(|l| sums[l / 4 + 8 * (n / 2)][2 * (l % 4) + n % 2].to_bits());
        w.set_word(*d, &out, u32::MAX);
    }
}
