//! The file of a rank: a safetensors file of its pieces, whose last tensor holds the hashes of the data's blocks.

use super::manifest::ShardEntry;
use super::piece::Piece;
use crate::device::{Element, Location, Memory, decode, encode};
use ir::op::DType;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Bytes of data that have a hash of their own.
pub const BLOCK: u64 = 1 << 20;
/// Bytes of a hash.
pub const HASH: u64 = 32;
/// Data begin at a multiple of it.
const ALIGNED: usize = 4096;
/// The tensor of hashes.
const HASHES: &str = "mcc.blake3";

#[derive(Debug)]
pub enum ShardError {
    Io(io::Error),
    /// A number that nothing could go on from.
    NotFinite {
        tensor: String,
        element: u64,
        value: f64,
    },
}

impl From<io::Error> for ShardError {
    fn from(cause: io::Error) -> ShardError {
        ShardError::Io(cause)
    }
}

/// The file of a rank's pieces.
pub struct Shard<'a> {
    rank: u64,
    /// As they lie in the file.
    pieces: Vec<Piece<'a>>,
    header: Vec<u8>,
    data: u64,
}

/// How elements are stored: as in memory, but for bools, which become numbers.
fn stored(dtype: DType) -> (DType, Dtype) {
    match dtype {
        DType::F32 | DType::Bool => (DType::F32, Dtype::F32),
        DType::Bf16 => (dtype, Dtype::BF16),
        DType::F16 => (dtype, Dtype::F16),
        DType::I32 => (dtype, Dtype::I32),
    }
}

fn count(piece: &Piece) -> u64 {
    piece.elements.end - piece.elements.start
}

impl<'a> Shard<'a> {
    /// Of a rank that owns something.
    pub fn new(rank: u64, mut pieces: Vec<Piece<'a>>) -> Option<Shard<'a>> {
        // Wide elements first, so that all are where readers expect them.
        pieces.sort_by_key(|p| std::cmp::Reverse(stored(p.dtype).0.bytes()));
        let mut end = 0;
        let mut infos = vec![];
        for piece in &pieces {
            let whole: Vec<usize> = piece.spans.iter().map(|s| s.iter().map(|s| s.1 as usize).sum()).collect();
            let elements = count(piece) as usize;
            let shape = if whole.iter().product::<usize>() == elements { whole } else { vec![elements] };
            let (dtype, name) = stored(piece.dtype);
            let start = end;
            end += elements * dtype.bytes() as usize;
            infos.push((piece.name.clone(), TensorInfo { dtype: name, shape, data_offsets: (start, end) }));
        }
        if pieces.is_empty() {
            return None;
        }
        let blocks = end.div_ceil(BLOCK as usize);
        let hashes = TensorInfo { dtype: Dtype::U8, shape: vec![blocks, HASH as usize], data_offsets: (end, end + blocks * HASH as usize) };
        infos.push((HASHES.into(), hashes));
        let metadata = Metadata::new(None, infos).expect("invariant: tensors follow each other");
        let mut text = serde_json::to_vec(&metadata).expect("invariant: plain data with text keys");
        text.resize((8 + text.len()).next_multiple_of(ALIGNED) - 8, b' ');
        let mut header = (text.len() as u64).to_le_bytes().to_vec();
        header.extend(text);
        Some(Shard { rank, pieces, header, data: end as u64 })
    }

    /// What the manifest says of it, but for the hash, which is known when it is written.
    pub fn entry(&self) -> ShardEntry {
        ShardEntry { file: self.file(), header: self.header.len() as u64, data: self.data, hash: String::new() }
    }

    pub fn file(&self) -> String {
        format!("rank-{}.safetensors", self.rank)
    }

    /// Of its file.
    pub fn bytes(&self) -> u64 {
        self.header.len() as u64 + self.data + self.data.div_ceil(BLOCK) * HASH
    }

    /// Its pieces, with the name that safetensors has for their elements, and the byte of the data at which each begins.
    pub fn pieces(&self) -> impl Iterator<Item = (&Piece<'a>, String, u64)> {
        self.pieces.iter().scan(0, |end, piece| {
            let byte = *end;
            let (dtype, name) = stored(piece.dtype);
            *end += count(piece) * dtype.bytes();
            Some((piece, format!("{name:?}"), byte))
        })
    }

    /// Writes all of it, and gives the hash for the manifest. Takes one block of memory, whatever the size.
    ///
    /// # Errors
    /// What the file system says, or a number that is not finite.
    pub fn write(&self, memory: &dyn Memory, file: &File) -> Result<[u8; 32], ShardError> {
        let mut out = Blocks { file, at: self.header.len() as u64, block: Vec::with_capacity(BLOCK as usize), hashes: vec![] };
        file.write_all_at(&self.header, 0)?;
        let mut numbers = vec![];
        for piece in &self.pieces {
            let (dtype, _) = stored(piece.dtype);
            let width = dtype.bytes() as usize;
            let mut done = 0;
            for (at, len) in piece.places() {
                let mut from = 0;
                while from < len {
                    let part = (len - from).min((out.room() / width) as u64);
                    let bytes = out.take(part as usize * width);
                    let at = Location { byte: at.byte + from * piece.dtype.bytes(), ..at };
                    if memory.element(piece.dtype) == Element::native(dtype) {
                        memory.load(at, piece.dtype, bytes);
                    } else {
                        numbers.resize(part as usize, 0.0);
                        memory.read(at, piece.dtype, &mut numbers);
                        bytes.chunks_exact_mut(width).zip(&numbers).for_each(|(b, x)| encode(dtype, *x, b));
                    }
                    if let Some(k) = not_finite(dtype, bytes) {
                        let value = decode(dtype, &bytes[k * width..][..width]);
                        return Err(ShardError::NotFinite { tensor: piece.name.clone(), element: done + k as u64, value });
                    }
                    out.flush_if_full()?;
                    from += part;
                    done += part;
                }
            }
        }
        out.flush()?;
        let Blocks { at, hashes, .. } = out;
        file.write_all_at(&hashes, at)?;
        Ok(*blake3::Hasher::new().update(&self.header).update(&hashes).finalize().as_bytes())
    }
}

/// The first element that is no number that can be trained from.
fn not_finite(dtype: DType, bytes: &[u8]) -> Option<usize> {
    let four = |mask: u32| bytes.chunks_exact(4).position(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]) & mask == mask);
    let two = |mask: u16| bytes.chunks_exact(2).position(|b| u16::from_le_bytes([b[0], b[1]]) & mask == mask);
    match dtype {
        DType::F32 => four(0x7f80_0000),
        DType::Bf16 => two(0x7f80),
        DType::F16 => two(0x7c00),
        DType::I32 | DType::Bool => None,
    }
}

/// Data on their way into a file, block by block.
struct Blocks<'a> {
    file: &'a File,
    at: u64,
    block: Vec<u8>,
    hashes: Vec<u8>,
}

impl Blocks<'_> {
    fn room(&self) -> usize {
        BLOCK as usize - self.block.len()
    }

    fn take(&mut self, bytes: usize) -> &mut [u8] {
        let from = self.block.len();
        self.block.resize(from + bytes, 0);
        &mut self.block[from..]
    }

    fn flush_if_full(&mut self) -> io::Result<()> {
        if self.room() == 0 { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.block.is_empty() {
            return Ok(());
        }
        self.file.write_all_at(&self.block, self.at)?;
        self.hashes.extend(blake3::hash(&self.block).as_bytes());
        self.at += self.block.len() as u64;
        self.block.clear();
        Ok(())
    }
}
