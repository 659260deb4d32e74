//! Dtypes of PyTorch's that are read, and what their elements are as numbers.

/// Bytes of the widest.
pub const WIDEST: u64 = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scalar {
    F64,
    F32,
    F16,
    Bf16,
    I64,
    I32,
    I16,
    I8,
    U8,
    Bool,
}

impl Scalar {
    pub const ALL: [Scalar; 10] =
        [Scalar::F64, Scalar::F32, Scalar::F16, Scalar::Bf16, Scalar::I64, Scalar::I32, Scalar::I16, Scalar::I8, Scalar::U8, Scalar::Bool];

    /// Its name in `torch`, and that of the class of its storages.
    pub fn names(self) -> (&'static str, &'static str) {
        match self {
            Scalar::F64 => ("float64", "DoubleStorage"),
            Scalar::F32 => ("float32", "FloatStorage"),
            Scalar::F16 => ("float16", "HalfStorage"),
            Scalar::Bf16 => ("bfloat16", "BFloat16Storage"),
            Scalar::I64 => ("int64", "LongStorage"),
            Scalar::I32 => ("int32", "IntStorage"),
            Scalar::I16 => ("int16", "ShortStorage"),
            Scalar::I8 => ("int8", "CharStorage"),
            Scalar::U8 => ("uint8", "ByteStorage"),
            Scalar::Bool => ("bool", "BoolStorage"),
        }
    }

    pub fn named(name: &str) -> Option<Scalar> {
        Scalar::ALL.into_iter().find(|s| s.names().0 == name)
    }

    pub fn of_storage(class: &str) -> Option<Scalar> {
        Scalar::ALL.into_iter().find(|s| s.names().1 == class)
    }

    pub fn bytes(self) -> u64 {
        match self {
            Scalar::F64 | Scalar::I64 => 8,
            Scalar::F32 | Scalar::I32 => 4,
            Scalar::F16 | Scalar::Bf16 | Scalar::I16 => 2,
            Scalar::I8 | Scalar::U8 | Scalar::Bool => 1,
        }
    }

    /// Of as many bytes as it has, the lowest first. None for a whole number that f32, in which all is stored,
    /// does not hold exactly.
    pub fn decode(self, bytes: &[u8]) -> Option<f64> {
        const EXPECTED: &str = "invariant: as many bytes as the dtype has";
        let exact = |n: i64| Some(n as f64).filter(|x| i128::from(n) == *x as f32 as i128);
        match self {
            Scalar::F64 => Some(f64::from_le_bytes(bytes.try_into().expect(EXPECTED))),
            Scalar::F32 => Some(f32::from_le_bytes(bytes.try_into().expect(EXPECTED)).into()),
            Scalar::F16 => Some(half::f16::from_le_bytes(bytes.try_into().expect(EXPECTED)).to_f64()),
            Scalar::Bf16 => Some(half::bf16::from_le_bytes(bytes.try_into().expect(EXPECTED)).to_f64()),
            Scalar::I64 => exact(i64::from_le_bytes(bytes.try_into().expect(EXPECTED))),
            Scalar::I32 => exact(i32::from_le_bytes(bytes.try_into().expect(EXPECTED)).into()),
            Scalar::I16 => Some(i16::from_le_bytes(bytes.try_into().expect(EXPECTED)).into()),
            Scalar::I8 => Some((bytes[0] as i8).into()),
            Scalar::U8 => Some(bytes[0].into()),
            Scalar::Bool => Some(f64::from(bytes[0] != 0)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_numbers_are_read_where_f32_holds_them() {
        let i64 = |n: i64| Scalar::I64.decode(&n.to_le_bytes());
        assert_eq!([0, -7, 1 << 24, i64::MIN].map(i64), [0.0, -7.0, 16_777_216.0, -(2f64.powi(63))].map(Some));
        assert_eq!([(1 << 24) + 1, i64::MAX, -(1 << 53) - 1].map(i64), [None; 3]);
        assert_eq!(Scalar::I32.decode(&i32::MAX.to_le_bytes()), None);
        assert_eq!([Scalar::I8, Scalar::U8, Scalar::Bool].map(|s| s.decode(&[0xff])), [-1.0, 255.0, 1.0].map(Some));
    }

    #[test]
    fn every_name_leads_back() {
        for scalar in Scalar::ALL {
            let (name, storage) = scalar.names();
            assert_eq!((Scalar::named(name), Scalar::of_storage(storage)), (Some(scalar), Some(scalar)));
        }
    }
}
