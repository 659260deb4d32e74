//! `.npy` files: whole batches, one after the other.

use super::format::{DataFormat, FileDType};
use npyz::{NpyHeader, Order, TypeChar};

pub const MAGIC: &[u8] = b"\x93NUMPY";

/// The longest header that is read, and the most brackets in it: that of an array of numbers has some 120 bytes and
/// two pairs.
const MOST_HEADER: usize = 4096;
const MOST_BRACKETS: usize = 8;

/// What a file holds, and its first element's byte.
///
/// # Errors
/// What is wrong with the header, and what to do instead.
pub fn open(bytes: &[u8]) -> Result<(DataFormat, usize), String> {
    let text = header(bytes).ok_or("it is no readable .npy file: its header is damaged, or that of records")?;
    if text.iter().filter(|b| b"([{".contains(b)).count() > MOST_BRACKETS {
        return Err("it is no readable .npy file: its header has too many brackets".into());
    }
    let mut rest = bytes;
    let header = NpyHeader::from_reader(&mut rest).map_err(|e| format!("it is no readable .npy file: {e}"))?;
    if header.order() != Order::C && header.shape().len() > 1 {
        return Err("it is in Fortran order; `numpy.save(NEW, numpy.ascontiguousarray(numpy.load(OLD)))` makes it C order".into());
    }
    let npyz::DType::Plain(plain) = header.dtype() else {
        return Err("its elements are records; `numpy.save(NEW, numpy.load(OLD)[FIELD])` takes one field of them".into());
    };
    if plain.endianness() == npyz::Endianness::Big {
        return Err("it is big-endian; `a = numpy.load(OLD)` and `numpy.save(NEW, a.astype(a.dtype.newbyteorder('<')))` make it little-endian".into());
    }
    let element = match (plain.type_char(), plain.size_field()) {
        (TypeChar::Int, 4) => FileDType::I32,
        (TypeChar::Int, 8) => FileDType::I64,
        (TypeChar::Uint, 4) => FileDType::U32,
        (TypeChar::Uint, 2) => FileDType::U16,
        (TypeChar::Uint | TypeChar::Bool, 1) => FileDType::U8,
        (TypeChar::Float, 4) => FileDType::F32,
        (TypeChar::Float, 8) => FileDType::F64,
        _ => {
            let known = "int32, int64, uint32, uint16, uint8, bool, float32, float64";
            return Err(format!(
                "its elements are `{plain}`; known are {known}: `numpy.save(NEW, numpy.load(OLD).astype(\"int32\"))` converts tokens"
            ));
        }
    };
    Ok((DataFormat::Array { element, shape: header.shape().to_vec() }, bytes.len() - rest.len()))
}

/// The text of a header that is whole and not too long.
fn header(bytes: &[u8]) -> Option<&[u8]> {
    let (length, start) = match *bytes.get(6)? {
        1 => (usize::from(u16::from_le_bytes(bytes.get(8..10)?.try_into().ok()?)), 10),
        _ => (u32::from_le_bytes(bytes.get(8..12)?.try_into().ok()?) as usize, 12),
    };
    bytes.get(start..)?.get(..length).filter(|text| text.len() <= MOST_HEADER)
}
