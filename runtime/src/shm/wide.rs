//! 16-bit floats are reduced in f32 and rounded once, at the end.

use crate::device::Element;

/// What elements are reduced in.
pub fn wide(element: Element) -> Element {
    match element {
        Element::Bf16 | Element::F16 => Element::F32,
        Element::F64 | Element::F32 | Element::I32 | Element::Bool => element,
    }
}

/// Appends elements as [`wide`] ones.
pub fn widen(element: Element, from: &[u8], to: &mut Vec<u8>) {
    let pairs = from.chunks_exact(2).map(|b| [b[0], b[1]]);
    match element {
        Element::Bf16 => pairs.for_each(|b| to.extend(half::bf16::from_le_bytes(b).to_f32().to_le_bytes())),
        Element::F16 => pairs.for_each(|b| to.extend(half::f16::from_le_bytes(b).to_f32().to_le_bytes())),
        Element::F64 | Element::F32 | Element::I32 | Element::Bool => to.extend_from_slice(from),
    }
}

/// Rounds [`wide`] elements to what they were, in place.
pub fn narrow(element: Element, data: &mut Vec<u8>) {
    let round = |x: f32| match element {
        Element::Bf16 => Some(half::bf16::from_f32(x).to_le_bytes()),
        Element::F16 => Some(half::f16::from_f32(x).to_le_bytes()),
        Element::F64 | Element::F32 | Element::I32 | Element::Bool => None,
    };
    if round(0.0).is_none() {
        return;
    }
    for k in 0..data.len() / 4 {
        let x = f32::from_le_bytes(data[4 * k..][..4].try_into().expect("invariant: four bytes"));
        if let Some(bytes) = round(x) {
            data[2 * k..][..2].copy_from_slice(&bytes);
        }
    }
    data.truncate(data.len() / 2);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_terms_add_up_before_the_sum_is_rounded() {
        // In bf16, 256 + 1 is 256 again.
        let terms = [256.0, 1.0, 1.0].map(|x| half::bf16::from_f32(x).to_le_bytes());
        let mut wide: Vec<Vec<u8>> = terms.iter().map(|t| Vec::from_iter(t.iter().copied())).collect();
        for term in &mut wide {
            let mut out = vec![];
            widen(Element::Bf16, term, &mut out);
            *term = out;
        }
        let sum: f32 = wide.iter().map(|t| f32::from_le_bytes(t[..].try_into().unwrap())).sum();
        let mut data = sum.to_le_bytes().to_vec();
        narrow(Element::Bf16, &mut data);
        assert_eq!(half::bf16::from_le_bytes(data[..].try_into().unwrap()).to_f32(), 258.0);
    }

    #[test]
    fn other_elements_are_what_they_were() {
        let mut data = vec![];
        widen(Element::I32, &7i32.to_le_bytes(), &mut data);
        narrow(Element::I32, &mut data);
        assert_eq!(data, 7i32.to_le_bytes());
    }
}
