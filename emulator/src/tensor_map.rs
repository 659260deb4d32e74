//! Tensor maps: how a tensor lies in global memory and a box of it in shared memory (CUDA driver API,
//! `cuTensorMapEncodeTiled`).
//!
//! The bits of a real map are the driver's secret. This one has a layout of its own in the same 128 bytes.

use crate::fault::Wrong;

/// How 16-byte pieces of a box's rows change places, against bank conflicts: within patterns of 256, 512 or 1024
/// bytes of shared memory, the bits of the piece are combined with those of the row by exclusive or.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Swizzle {
    /// All pieces stay where they are.
    #[default]
    None,
    /// Rows of up to 32 bytes, patterns of 256.
    B32,
    /// Rows of up to 64 bytes, patterns of 512.
    B64,
    /// Rows of up to 128 bytes, patterns of 1024.
    B128,
}

impl Swizzle {
    /// The place of a byte of shared memory.
    pub fn place(self, address: u64) -> u64 {
        match self {
            Swizzle::None => address,
            Swizzle::B32 => address ^ (address >> 3 & 0x10),
            Swizzle::B64 => address ^ (address >> 3 & 0x30),
            Swizzle::B128 => address ^ (address >> 3 & 0x70),
        }
    }

    /// Bytes of a row, at most; and after how many bytes the pattern repeats.
    pub fn row(self) -> u64 {
        match self {
            Swizzle::None => 16,
            Swizzle::B32 => 32,
            Swizzle::B64 => 64,
            Swizzle::B128 => 128,
        }
    }

    /// Alignment of a box in shared memory.
    pub fn align(self) -> u64 {
        match self {
            Swizzle::None => 128,
            Swizzle::B32 => 256,
            Swizzle::B64 => 512,
            Swizzle::B128 => 1024,
        }
    }
}

/// A tensor of up to 5 dims, innermost first, and the box of it that one copy moves. Elements outside of the tensor
/// read as zero and are not written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorMap {
    /// Address of the first element, a multiple of 16.
    pub base: u64,
    /// Bytes of an element: 1, 2, 4 or 8.
    pub element: u32,
    /// Elements along each dim, 1 to 2^32.
    pub size: Vec<u64>,
    /// Bytes from one index to the next, of all dims but the innermost; multiples of 16.
    pub stride: Vec<u64>,
    /// Elements of the box along each dim, 1 to 256.
    pub extent: Vec<u32>,
    /// How pieces of the box change places in shared memory.
    pub swizzle: Swizzle,
    /// Elements are f32, and are rounded to tf32 on their way to shared memory.
    pub tf32: bool,
}

const MAGIC: u32 = u32::from_le_bytes(*b"tmap");

impl TensorMap {
    /// The bytes of a kernel's parameter.
    ///
    /// # Errors
    /// What `cuTensorMapEncodeTiled` would refuse.
    pub fn encode(&self) -> Result<[u8; 128], String> {
        let dims = self.size.len();
        if !(1..=5).contains(&dims) || self.stride.len() + 1 != dims || self.extent.len() != dims {
            return Err("a tensor map has 1 to 5 dims, a stride less, and as many extents".into());
        }
        if self.tf32 && self.element != 4 {
            return Err(format!("tf32 has 4 bytes, the elements {}", self.element));
        }
        if ![1, 2, 4, 8].contains(&self.element)
            || !self.base.is_multiple_of(16)
            || self.stride.iter().any(|s| !s.is_multiple_of(16) || *s >= 1 << 40)
        {
            return Err("elements have 1, 2, 4 or 8 bytes; base and strides are multiples of 16 bytes".into());
        }
        if self.extent.iter().any(|e| !(1..=256).contains(e)) || self.size.iter().any(|s| !(1..=1 << 32).contains(s)) {
            return Err("extents are 1 to 256, sizes 1 to 2^32".into());
        }
        let inner = u64::from(self.extent[0]) * u64::from(self.element);
        if !inner.is_multiple_of(16) || self.swizzle != Swizzle::None && inner > self.swizzle.row() {
            return Err(format!("the box's rows of {inner} bytes are no multiple of 16 or longer than the swizzle's"));
        }
        let mut out = [0; 128];
        let mut at = 0;
        let mut put = |bytes: &[u8]| {
            out[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
        };
        put(&MAGIC.to_le_bytes());
        put(&[dims as u8, self.element as u8, self.swizzle as u8, self.tf32.into()]);
        put(&self.base.to_le_bytes());
        // A size of 2^32 is stored as 0.
        self.size.iter().for_each(|s| put(&(*s as u32).to_le_bytes()));
        self.stride.iter().for_each(|s| put(&s.to_le_bytes()));
        self.extent.iter().for_each(|e| put(&e.to_le_bytes()));
        Ok(out)
    }

    /// The inverse of [`TensorMap::encode`].
    ///
    /// # Errors
    /// The bytes are no tensor map.
    pub fn decode(bytes: &[u8]) -> Result<TensorMap, Wrong> {
        let no = || Wrong::Descriptor("the operand is no tensor map".into());
        let (word, long) = (
            |at: usize| bytes.get(at..at + 4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).ok_or_else(no),
            |at: usize| bytes.get(at..at + 8).map(crate::access::little).ok_or_else(no),
        );
        if word(0)? != MAGIC {
            return Err(no());
        }
        let dims = bytes[4] as usize;
        let swizzle = [Swizzle::None, Swizzle::B32, Swizzle::B64, Swizzle::B128].into_iter().find(|s| *s as u8 == bytes[6]).ok_or_else(no)?;
        let size = (0..dims).map(|d| word(16 + 4 * d).map(|s| if s == 0 { 1 << 32 } else { u64::from(s) })).collect::<Result<_, _>>()?;
        let strides = 16 + 4 * dims;
        let stride = (1..dims).map(|d| long(strides + 8 * (d - 1))).collect::<Result<_, _>>()?;
        let extents = strides + 8 * (dims - 1);
        let extent = (0..dims).map(|d| word(extents + 4 * d)).collect::<Result<_, _>>()?;
        Ok(TensorMap { base: long(8)?, element: u32::from(bytes[5]), size, stride, extent, swizzle, tf32: bytes[7] != 0 })
    }

    /// Bytes of a box.
    pub fn bytes(&self) -> u64 {
        self.extent.iter().map(|e| u64::from(*e)).product::<u64>() * u64::from(self.element)
    }

    /// For each row of a box, in the order of shared memory: address of its first element and, of its elements, which
    /// lie within the tensor.
    pub fn rows(&self, at: &[i64]) -> Vec<(u64, std::ops::Range<u64>)> {
        let outer: u64 = self.extent[1..].iter().map(|e| u64::from(*e)).product();
        let row = |n: u64| {
            let (mut left, mut inside, mut address) = (n, true, self.base as i64);
            for (((at, extent), size), stride) in at.iter().zip(&self.extent).zip(&self.size).skip(1).zip(&self.stride) {
                let k = at + (left % u64::from(*extent)) as i64;
                left /= u64::from(*extent);
                inside &= (0..*size as i64).contains(&k);
                address += k * *stride as i64;
            }
            let extent = i64::from(self.extent[0]);
            let (from, to) = ((-at[0]).clamp(0, extent), (self.size[0] as i64 - at[0]).clamp(0, extent));
            let range = if inside && from < to { from as u64..to as u64 } else { 0..0 };
            ((address + at[0] * i64::from(self.element)) as u64, range)
        };
        (0..outer).map(row).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_survives_its_128_bytes_and_clips_boxes() {
        let map =
            TensorMap { base: 1 << 45, element: 2, size: vec![100, 7], stride: vec![208], extent: vec![64, 4], swizzle: Swizzle::B128, tf32: false };
        assert_eq!(TensorMap::decode(&map.encode().expect("it is sound")), Ok(map.clone()));
        let rows = map.rows(&[64, 5]);
        assert_eq!(rows[0], (map.base + 5 * 208 + 128, 0..36));
        assert_eq!(rows[2].1, 0..0);
        assert_eq!(map.rows(&[-8, 0])[0], (map.base - 16, 8..64));
        let wide = TensorMap { extent: vec![128, 1], ..map.clone() };
        assert!(wide.encode().is_err());
        let rounded = TensorMap { element: 4, extent: vec![32, 4], tf32: true, ..map.clone() };
        assert_eq!(TensorMap::decode(&rounded.encode().expect("it is sound")), Ok(rounded));
        assert!(TensorMap { tf32: true, ..map }.encode().is_err());
    }

    #[test]
    fn a_swizzle_permutes_its_pattern() {
        for s in [Swizzle::None, Swizzle::B32, Swizzle::B64, Swizzle::B128] {
            let mut seen: Vec<u64> = (0..64).map(|k| s.place(16 * k)).collect();
            seen.sort_unstable();
            assert_eq!(seen, (0..64).map(|k| 16 * k).collect::<Vec<_>>());
        }
        assert_eq!(Swizzle::B128.place(0x80 + 0x10), 0x80);
    }
}
