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
    Stream { element: Element, tokens: u64, named: Named },
    /// Whole batches.
    Array { element: Element, shape: Vec<u64> },
}

/// A number in a file, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    I32,
    I64,
    U32,
    U16,
    U8,
    F32,
    F64,
}

impl Element {
    pub fn bytes(self) -> usize {
        match self {
            Element::U8 => 1,
            Element::U16 => 2,
            Element::I32 | Element::U32 | Element::F32 => 4,
            Element::I64 | Element::F64 => 8,
        }
    }

    pub fn is_float(self) -> bool {
        matches!(self, Element::F32 | Element::F64)
    }

    pub fn read(self, bytes: &[u8]) -> f64 {
        let four = || bytes.try_into().expect("invariant: four bytes");
        let eight = || bytes.try_into().expect("invariant: eight bytes");
        match self {
            Element::U8 => f64::from(bytes[0]),
            Element::U16 => f64::from(u16::from_le_bytes([bytes[0], bytes[1]])),
            Element::I32 => f64::from(i32::from_le_bytes(four())),
            Element::U32 => f64::from(u32::from_le_bytes(four())),
            Element::F32 => f64::from(f32::from_le_bytes(four())),
            Element::I64 => i64::from_le_bytes(eight()) as f64,
            Element::F64 => f64::from_le_bytes(eight()),
        }
    }
}

/// Who says what a stream holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Named {
    ByItself,
    ByUser,
    /// Nobody: all of it has to be text.
    AsText,
}
