//! What ranks say of what they exchange, before the numbers: sixteen bytes, which both sides compare.

use crate::comm::Terms;
use ir::op::{DType, Reduce};
use ir::program::Collective;

/// Bytes of a header.
pub const HEADER: usize = 16;

/// What a member of a collective says of it, before its numbers.
pub fn encode(terms: &Terms) -> [u8; HEADER] {
    let (kind, reduce) = match terms.kind {
        Collective::AllReduce(r) => (1, r),
        Collective::AllGather => (2, Reduce::Any),
        Collective::ReduceScatter(r) => (3, r),
        Collective::AllToAll => (4, Reduce::Any),
        Collective::Shift => (5, Reduce::Any),
    };
    let reduce = Reduce::ALL.iter().position(|r| *r == reduce).unwrap_or(0) as u8;
    let mut out = encode_range(terms.dtype, terms.count);
    (out[1], out[2]) = (kind, reduce);
    out
}

/// In words, what [`encode`] made.
pub fn decode(bytes: &[u8]) -> String {
    let reduce = Reduce::ALL.get(usize::from(bytes[2])).copied().unwrap_or(Reduce::Any);
    let kind = match bytes[1] {
        1 => Collective::AllReduce(reduce),
        2 => Collective::AllGather,
        3 => Collective::ReduceScatter(reduce),
        4 => Collective::AllToAll,
        5 => Collective::Shift,
        _ => return "something unreadable".into(),
    };
    format!("{} of {}", kind.name(), decode_message(bytes))
}

const DTYPES: [DType; 5] = [DType::F32, DType::Bf16, DType::F16, DType::I32, DType::Bool];

/// What a sender says of its message, before its numbers.
pub fn encode_range(dtype: DType, count: u64) -> [u8; HEADER] {
    let mut out = [0; HEADER];
    out[0] = DTYPES.iter().position(|t| *t == dtype).unwrap_or(0) as u8;
    out[8..].copy_from_slice(&count.to_le_bytes());
    out
}

/// In words, what [`encode_range`] made.
pub fn decode_message(bytes: &[u8]) -> String {
    let count = u64::from_le_bytes(bytes[8..16].try_into().expect("invariant: eight bytes"));
    let dtype = DTYPES.get(usize::from(bytes[0])).map_or("?", |t| t.name());
    format!("{count} {dtype}")
}
