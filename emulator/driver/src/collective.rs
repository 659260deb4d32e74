//! What collectives make of what their members give. Members are combined in their order, one after the other, each
//! sum rounded to its type.

use half::{bf16, f16};

/// The types that mcc uses, with the numbers of NCCL's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    U8 = 1,
    I32 = 2,
    F16 = 6,
    F32 = 7,
    Bf16 = 9,
}

impl Dtype {
    pub fn new(number: u32) -> Option<Dtype> {
        [Dtype::U8, Dtype::I32, Dtype::F16, Dtype::F32, Dtype::Bf16].into_iter().find(|d| *d as u32 == number)
    }

    pub fn bytes(self) -> u64 {
        match self {
            Dtype::U8 => 1,
            Dtype::F16 | Dtype::Bf16 => 2,
            Dtype::I32 | Dtype::F32 => 4,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduce {
    Sum = 0,
    Max = 2,
}

impl Reduce {
    pub fn new(number: u32) -> Option<Reduce> {
        [Reduce::Sum, Reduce::Max].into_iter().find(|r| *r as u32 == number)
    }
}

fn each<const N: usize>(to: &mut [u8], from: &[u8], f: impl Fn([u8; N], [u8; N]) -> [u8; N]) {
    for (x, y) in to.as_chunks_mut().0.iter_mut().zip(from.as_chunks().0) {
        *x = f(*x, *y);
    }
}

fn number(reduce: Reduce, x: f32, y: f32) -> f32 {
    match reduce {
        Reduce::Sum => x + y,
        Reduce::Max if x > y || x.is_nan() => x,
        Reduce::Max => y,
    }
}

fn combine(reduce: Reduce, dtype: Dtype, to: &mut [u8], from: &[u8]) {
    match dtype {
        Dtype::F32 => each(to, from, |x, y| number(reduce, f32::from_le_bytes(x), f32::from_le_bytes(y)).to_le_bytes()),
        Dtype::Bf16 => {
            each(to, from, |x, y| bf16::from_f32(number(reduce, bf16::from_le_bytes(x).to_f32(), bf16::from_le_bytes(y).to_f32())).to_le_bytes())
        }
        Dtype::F16 => {
            each(to, from, |x, y| f16::from_f32(number(reduce, f16::from_le_bytes(x).to_f32(), f16::from_le_bytes(y).to_f32())).to_le_bytes())
        }
        Dtype::I32 => each(to, from, |x, y| {
            let (x, y) = (i32::from_le_bytes(x), i32::from_le_bytes(y));
            let z = match reduce {
                Reduce::Sum => x.wrapping_add(y),
                Reduce::Max => x.max(y),
            };
            z.to_le_bytes()
        }),
        Dtype::U8 => each(to, from, |[x], [y]| match reduce {
            Reduce::Sum => [x.wrapping_add(y)],
            Reduce::Max => [x.max(y)],
        }),
    }
}

/// Combines all parts into one.
pub fn fold(reduce: Reduce, dtype: Dtype, parts: &[&[u8]]) -> Vec<u8> {
    let mut all = parts[0].to_vec();
    parts[1..].iter().for_each(|p| combine(reduce, dtype, &mut all, p));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_combined_in_order_and_rounded_each_time() {
        let of = |x: f32| x.to_le_bytes();
        let [a, b, c] = [of(1e8), of(-1e8), of(1.0)];
        assert_eq!(fold(Reduce::Sum, Dtype::F32, &[&a, &b, &c]), of(1.0));
        assert_eq!(fold(Reduce::Sum, Dtype::F32, &[&c, &a, &b]), of(0.0));
        let half = |x: f32| bf16::from_f32(x).to_le_bytes();
        assert_eq!(fold(Reduce::Sum, Dtype::Bf16, &[&half(256.0), &half(1.0), &half(1.0)]), half(256.0));
        assert_eq!(fold(Reduce::Max, Dtype::Bf16, &[&half(-2.0), &half(-1.0)]), half(-1.0));
        assert_eq!(fold(Reduce::Max, Dtype::U8, &[&[0, 1], &[0, 0]]), [0, 1]);
        assert_eq!(fold(Reduce::Sum, Dtype::I32, &[&7i32.to_le_bytes(), &(-9i32).to_le_bytes()]), (-2i32).to_le_bytes());
    }
}
