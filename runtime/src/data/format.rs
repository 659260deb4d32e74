//! What data files hold, as plain data: it is found out (`stream`, `array`) and read (`file`) elsewhere.

use serde::{Deserialize, Serialize};

/// How a file is read that does not say itself what it holds, as `.npy` files and llm.c's do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Encoding {
    /// Its bytes are tokens if it is text, that is UTF-8 without zeros; anything else is refused.
    #[default]
    Text,
    /// Its bytes are tokens, whatever they are.
    Bytes,
    /// Tokens of so many bits, little-endian.
    U16,
    /// Tokens of 32 bits without a sign, little-endian.
    U32,
    /// Tokens of 32 bits with a sign, little-endian.
    I32,
}

/// What a file holds.
pub enum DataFormat {
    /// Tokens one after the other.
    Stream { element: FileDType, tokens: u64, named: FormatSource },
    /// Whole batches.
    Array { element: FileDType, shape: Vec<u64> },
}

/// The type of the numbers in a file, which are little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileDType {
    I32,
    I64,
    U32,
    U16,
    U8,
    F32,
    F64,
}

impl FileDType {
    pub fn bytes(self) -> usize {
        match self {
            FileDType::U8 => 1,
            FileDType::U16 => 2,
            FileDType::I32 | FileDType::U32 | FileDType::F32 => 4,
            FileDType::I64 | FileDType::F64 => 8,
        }
    }

    pub fn is_float(self) -> bool {
        matches!(self, FileDType::F32 | FileDType::F64)
    }

    pub fn read(self, bytes: &[u8]) -> f64 {
        let four = || bytes.try_into().expect("invariant: four bytes");
        let eight = || bytes.try_into().expect("invariant: eight bytes");
        match self {
            FileDType::U8 => f64::from(bytes[0]),
            FileDType::U16 => f64::from(u16::from_le_bytes([bytes[0], bytes[1]])),
            FileDType::I32 => f64::from(i32::from_le_bytes(four())),
            FileDType::U32 => f64::from(u32::from_le_bytes(four())),
            FileDType::F32 => f64::from(f32::from_le_bytes(four())),
            FileDType::I64 => i64::from_le_bytes(eight()) as f64,
            FileDType::F64 => f64::from_le_bytes(eight()),
        }
    }
}

/// Who says what a stream holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FormatSource {
    ByItself,
    ByUser,
    /// Nobody: all of it has to be text.
    AsText,
}
