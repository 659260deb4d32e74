//! How far results are from what they should be, and how far rounding may take them.

use crate::kernel::Kernel;
use crate::op::DType;
use serde::{Deserialize, Deserializer, Serialize};

/// How far numbers are from others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Distance {
    /// Of one element, in parts of it, of the root mean square of all, or of what that would be without
    /// cancellation, whichever is greatest.
    #[serde(deserialize_with = "or_infinite")]
    pub element: f64,
    /// Of all together: the norm of the differences, in parts of the norm, or of what that would be without
    /// cancellation.
    #[serde(deserialize_with = "or_infinite")]
    pub norm: f64,
}

/// JSON has no infinite numbers: they are written as null.
fn or_infinite<'de, D: Deserializer<'de>>(d: D) -> Result<f64, D::Error> {
    Ok(Option::<f64>::deserialize(d)?.unwrap_or(f64::INFINITY))
}

/// The root mean square of what is finite.
pub fn rms(values: impl Iterator<Item = f64>) -> f64 {
    let (n, sum) = values.filter(|x| x.is_finite()).fold((0u64, 0.0), |(n, sum), x| (n + 1, sum + x * x));
    (sum / n.max(1) as f64).sqrt()
}

impl Distance {
    /// Of `got` from `want`, numbers that are `size` without cancellation. Where one is not a number the other is
    /// to be none either, and infinite numbers are to be the same; else the distance is infinite.
    pub fn of(got: &[f64], want: &[f64], size: f64) -> Distance {
        let scale = rms(want.iter().copied()).max(size);
        let same = |g: f64, w: f64| g == w || g.is_nan() && w.is_nan();
        let far = |d: f64| if d.is_nan() { f64::INFINITY } else { d };
        let pairs = || got.iter().zip(want).map(|(g, w)| (*g, *w)).filter(|(g, w)| !same(*g, *w));
        let element = pairs().map(|(g, w)| far((g - w).abs() / w.abs().max(scale))).fold(0.0, f64::max);
        let squares: f64 = pairs().map(|(g, w)| (g - w) * (g - w)).sum();
        let norm = if squares == 0.0 { 0.0 } else { far((squares / got.len() as f64).sqrt() / scale) };
        Distance { element, norm }
    }

    /// The worse of both.
    pub fn or(self, other: Distance) -> Distance {
        Distance { element: self.element.max(other.element), norm: self.norm.max(other.norm) }
    }

    /// What rounding allows a kernel whose narrowest floats are these: sums in f32, every result of an op rounded
    /// to its type; and on GPUs, functions that the hardware approximates.
    pub fn allowed(dtype: DType) -> Distance {
        match dtype {
            DType::F32 | DType::I32 | DType::Bool => Distance { element: 1e-4, norm: 2e-5 },
            DType::F16 => Distance { element: 1e-2, norm: 2e-3 },
            DType::Bf16 => Distance { element: 5e-2, norm: 1e-2 },
        }
    }

    /// Whether neither distance is greater than that of `most`.
    pub fn is_within(self, most: Distance) -> bool {
        self.element <= most.element && self.norm <= most.norm
    }
}

/// The narrowest float of a kernel.
pub fn narrowest(kernel: &Kernel) -> DType {
    let floats = kernel.body.nodes.iter().map(|n| n.ty.dtype).filter(|t| t.is_float());
    // bf16 comes before f16, since it has fewer digits.
    floats.min_by_key(|t| (t.bytes(), *t != DType::Bf16)).unwrap_or(DType::F32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_are_relative_and_what_is_no_number_counts() {
        let nan = f64::NAN;
        let of = |got: &[f64], want: &[f64]| Distance::of(got, want, 0.0);
        assert_eq!(of(&[1.0, nan], &[1.0, nan]), Distance::default());
        assert_eq!(of(&[nan], &[1.0]).element, f64::INFINITY);
        assert_eq!(of(&[1.0], &[nan]).element, f64::INFINITY);
        assert_eq!(of(&[f64::INFINITY], &[f64::INFINITY]), Distance::default());
        let d = of(&[3.0, 4.5], &[3.0, 4.0]);
        assert_eq!((d.element, (d.norm * 1e3).round()), (0.125, 100.0));
        // Here both are the remainder of values of size 1000 that cancelled.
        assert_eq!(Distance::of(&[1.5], &[1.0], 1000.0).element, 5e-4);
    }
}
