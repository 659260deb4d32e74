//! Numbers of several ranks are combined in rank order, in their dtype: the same bits on every rank and in every run.
//! 16-bit floats are reduced in f32 and rounded once, at the end.

use crate::comm::CommError;
use crate::device::Element;
use ir::op::{DType, Reduce};

/// What elements are reduced in.
fn wide(element: Element) -> Element {
    match element {
        Element::Bf16 | Element::F16 => Element::F32,
        Element::F64 | Element::F32 | Element::I32 | Element::Bool => element,
    }
}

/// Appends elements as [`wide`] ones.
fn widen(element: Element, from: &[u8], to: &mut Vec<u8>) {
    let pairs = from.chunks_exact(2).map(|b| [b[0], b[1]]);
    match element {
        Element::Bf16 => pairs.for_each(|b| to.extend(half::bf16::from_le_bytes(b).to_f32().to_le_bytes())),
        Element::F16 => pairs.for_each(|b| to.extend(half::f16::from_le_bytes(b).to_f32().to_le_bytes())),
        Element::F64 | Element::F32 | Element::I32 | Element::Bool => to.extend_from_slice(from),
    }
}

/// Begins a sum with the numbers of the first rank.
pub fn begin(element: Element, first: &[u8], sum: &mut Vec<u8>) {
    sum.clear();
    widen(element, first, sum);
}

/// Adds the numbers of the next rank.
///
/// # Errors
/// If such elements are not combined so.
pub fn add(reduce: Reduce, element: Element, dtype: DType, sum: &mut [u8], next: &[u8]) -> Result<(), CommError> {
    if wide(element) == element {
        return fold(reduce, element, dtype, sum, next);
    }
    let mut more = Vec::with_capacity(sum.len());
    widen(element, next, &mut more);
    fold(reduce, wide(element), dtype, sum, &more)
}

/// Ends a sum: rounds its elements to what they were, in place.
pub fn round(element: Element, data: &mut Vec<u8>) {
    let rounded = |x: f32| match element {
        Element::Bf16 => Some(half::bf16::from_f32(x).to_le_bytes()),
        Element::F16 => Some(half::f16::from_f32(x).to_le_bytes()),
        Element::F64 | Element::F32 | Element::I32 | Element::Bool => None,
    };
    if rounded(0.0).is_none() {
        return;
    }
    for k in 0..data.len() / 4 {
        let x = f32::from_le_bytes(data[4 * k..][..4].try_into().expect("invariant: four bytes"));
        if let Some(bytes) = rounded(x) {
            data[2 * k..][..2].copy_from_slice(&bytes);
        }
    }
    data.truncate(data.len() / 2);
}

/// Applies `f` to elements that lie in bytes: as slices where both are aligned, which is the rule, else one by one.
macro_rules! each {
    ($t:ty, $sum:expr, $more:expr, $f:expr) => {{
        let (sum, more): (&mut [u8], &[u8]) = ($sum, $more);
        // SAFETY: any bits are a number of this type.
        let (a, b) = unsafe { (sum.align_to_mut::<$t>(), more.align_to::<$t>()) };
        if a.0.is_empty() && b.0.is_empty() {
            for (x, y) in a.1.iter_mut().zip(b.1) {
                *x = $f(*x, *y);
            }
        } else {
            const N: usize = size_of::<$t>();
            for (x, y) in sum.chunks_exact_mut(N).zip(more.chunks_exact(N)) {
                let number = |bytes: &[u8]| <$t>::from_le_bytes(bytes.try_into().expect("invariant: the bytes of one number"));
                let result = $f(number(x), number(y));
                x.copy_from_slice(&result.to_le_bytes());
            }
        }
    }};
}

/// `sum = sum op more`, element by element.
fn fold(reduce: Reduce, element: Element, dtype: DType, sum: &mut [u8], more: &[u8]) -> Result<(), CommError> {
    match (reduce, element) {
        (Reduce::Sum, Element::F32) => each!(f32, sum, more, |x: f32, y: f32| x + y),
        (Reduce::Sum, Element::F64) => each!(f64, sum, more, |x: f64, y: f64| x + y),
        (Reduce::Sum, Element::I32) => each!(i32, sum, more, |x: i32, y: i32| x.wrapping_add(y)),
        (Reduce::Max, Element::F32) => each!(f32, sum, more, |x: f32, y: f32| if x > y || x.is_nan() { x } else { y }),
        (Reduce::Max, Element::F64) => each!(f64, sum, more, |x: f64, y: f64| if x > y || x.is_nan() { x } else { y }),
        (Reduce::Max, Element::I32) => each!(i32, sum, more, |x: i32, y: i32| x.max(y)),
        (Reduce::Any, Element::Bool) => each!(u8, sum, more, |x: u8, y: u8| x | y),
        (Reduce::Any, Element::F64) => each!(f64, sum, more, |x: f64, y: f64| f64::from(x != 0.0 || y != 0.0)),
        (Reduce::Sum | Reduce::Max, Element::Bf16 | Element::F16 | Element::Bool)
        | (Reduce::Any, Element::F32 | Element::Bf16 | Element::F16 | Element::I32) => {
            return Err(CommError::Unsupported { kind: reduce.name(), dtype: dtype.name() });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_terms_add_up_before_the_sum_is_rounded() {
        // In bf16, 256 + 1 is 256 again.
        let terms = [256.0, 1.0, 1.0].map(|x| half::bf16::from_f32(x).to_le_bytes());
        let mut sum = vec![];
        begin(Element::Bf16, &terms[0], &mut sum);
        terms[1..].iter().for_each(|term| add(Reduce::Sum, Element::Bf16, DType::Bf16, &mut sum, term).unwrap());
        round(Element::Bf16, &mut sum);
        assert_eq!(half::bf16::from_le_bytes(sum[..].try_into().unwrap()).to_f32(), 258.0);
    }

    #[test]
    fn other_elements_are_what_they_were() {
        let mut data = vec![];
        begin(Element::I32, &7i32.to_le_bytes(), &mut data);
        round(Element::I32, &mut data);
        assert_eq!(data, 7i32.to_le_bytes());
    }
}
