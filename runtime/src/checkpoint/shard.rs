//! The file of a rank: a safetensors file of its pieces, whose last tensor holds the hashes of the data's blocks.

use super::manifest::ShardEntry;
use super::piece::Piece;
use crate::device::{Element, Location, Memory, decode, encode, not_finite};
use ir::op::DType;
use ir::program::BufferId;
use memmap2::MmapMut;
use rustix::fs::OFlags;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes of data that have a hash of their own.
pub const BLOCK: u64 = 1 << 20;
/// Bytes of a hash.
pub const HASH: u64 = 32;
/// Data begin at a multiple of it.
const ALIGNED: usize = 4096;
/// The tensor of hashes.
pub const HASHES: &str = "mcc.blake3";

/// Why a shard could not be written.
#[derive(Debug)]
pub enum ShardError {
    /// What the file system said.
    Io(io::Error),
    /// A number that nothing could go on from.
    NotFinite {
        /// Name of the tensor that has it.
        tensor: String,
        /// Its index among the elements of that tensor that are written here.
        element: u64,
        /// The number itself, infinite or NaN.
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
    /// Pieces in the order in which they lie in the file.
    pieces: Vec<Piece<'a>>,
    layout: ShardLayout,
}

/// Where tensors lie in a shard.
pub(super) struct ShardLayout {
    header: Vec<u8>,
    pub data: u64,
}

impl ShardLayout {
    /// The layout of tensors with these names, dtypes and shapes, one after the other.
    pub fn new(tensors: impl IntoIterator<Item = (String, Dtype, Vec<usize>)>) -> ShardLayout {
        let mut end = 0;
        let mut infos = vec![];
        for (name, dtype, shape) in tensors {
            let start = end;
            end += shape.iter().product::<usize>() * dtype.bitsize() / 8;
            infos.push((name, TensorInfo { dtype, shape, data_offsets: (start, end) }));
        }
        let blocks = end.div_ceil(BLOCK as usize);
        let hashes = TensorInfo { dtype: Dtype::U8, shape: vec![blocks, HASH as usize], data_offsets: (end, end + blocks * HASH as usize) };
        infos.push((HASHES.into(), hashes));
        let metadata = Metadata::new(None, infos).expect("invariant: tensors follow each other");
        let mut text = serde_json::to_vec(&metadata).expect("invariant: plain data with text keys");
        text.resize((8 + text.len()).next_multiple_of(ALIGNED) - 8, b' ');
        let mut header = (text.len() as u64).to_le_bytes().to_vec();
        header.extend(text);
        ShardLayout { header, data: end as u64 }
    }

    /// What a manifest says of the file, but for its hash.
    pub fn entry(&self, file: String) -> ShardEntry {
        ShardEntry { file, header: self.header.len() as u64, data: self.data, hash: String::new() }
    }

    /// Writes all of the file, of which `fill` gives the data in order, and gives its hash. Takes one block of
    /// memory, whatever the size. Until it `is_urgent`, blocks go to the disk past the page cache: that takes half of
    /// the processor's time, and lasts as long as the disk takes.
    ///
    /// # Errors
    /// What the file system or `fill` say.
    pub fn write(
        &self,
        file: &File,
        is_urgent: &AtomicBool,
        fill: impl FnOnce(&mut Blocks) -> Result<(), ShardError>,
    ) -> Result<[u8; 32], ShardError> {
        let block = MmapMut::map_anon(BLOCK as usize)?;
        let mut out = Blocks { file, at: self.header.len() as u64, block, used: 0, hashes: vec![], is_urgent, is_direct: false, may_be_direct: true };
        file.write_all_at(&self.header, 0)?;
        fill(&mut out)?;
        out.flush()?;
        out.set_direct(false)?;
        let Blocks { at, hashes, .. } = out;
        file.write_all_at(&hashes, at)?;
        Ok(*blake3::Hasher::new().update(&self.header).update(&hashes).finalize().as_bytes())
    }
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
    /// The shard of a rank; none if it owns nothing.
    pub fn new(rank: u64, mut pieces: Vec<Piece<'a>>) -> Option<Shard<'a>> {
        if pieces.is_empty() {
            return None;
        }
        // Wide elements come first, so that all are aligned as readers expect.
        pieces.sort_by_key(|p| std::cmp::Reverse(stored(p.dtype).0.bytes()));
        let tensor = |piece: &Piece| {
            let whole: Vec<usize> = piece.spans.iter().map(|s| s.iter().map(|s| s.1 as usize).sum()).collect();
            let elements = count(piece) as usize;
            let shape = if whole.iter().product::<usize>() == elements { whole } else { vec![elements] };
            (piece.name.clone(), stored(piece.dtype).1, shape)
        };
        let layout = ShardLayout::new(pieces.iter().map(tensor));
        Some(Shard { rank, pieces, layout })
    }

    /// What the manifest says of it, but for the hash, which is known when it is written.
    pub fn entry(&self) -> ShardEntry {
        self.layout.entry(self.file())
    }

    /// Name of its file, such as `rank-0.safetensors`.
    pub fn file(&self) -> String {
        shard_file(self.rank)
    }

    /// Buffers from which the shard is written.
    pub fn buffers(&self) -> BTreeSet<BufferId> {
        self.pieces.iter().map(|p| p.id).collect()
    }

    /// Bytes of the shard's file.
    pub fn bytes(&self) -> u64 {
        self.layout.header.len() as u64 + self.layout.data + self.layout.data.div_ceil(BLOCK) * HASH
    }

    /// Its pieces, with the name that safetensors has for their elements, and the byte of the data at which
    /// each begins.
    pub fn pieces(&self) -> impl Iterator<Item = (&Piece<'a>, String, u64)> {
        self.pieces.iter().scan(0, |end, piece| {
            let byte = *end;
            let (dtype, name) = stored(piece.dtype);
            *end += count(piece) * dtype.bytes();
            Some((piece, format!("{name:?}"), byte))
        })
    }

    /// Writes all of it from a rank's memory, and gives the hash for the manifest ([`ShardLayout::write`]).
    ///
    /// # Errors
    /// What the file system says, or a number that is not finite.
    pub fn write(&self, memory: &dyn Memory, file: &File, is_urgent: &AtomicBool) -> Result<[u8; 32], ShardError> {
        let mut numbers = vec![];
        self.layout.write(file, is_urgent, |out| {
            for piece in &self.pieces {
                let (dtype, _) = stored(piece.dtype);
                let is_native = memory.element(piece.dtype) == Element::native(dtype);
                let mut done = 0;
                for (at, len) in piece.places() {
                    out.put(&piece.name, done, dtype, len, |from, bytes| {
                        let at = Location { byte: at.byte + from * piece.dtype.bytes(), ..at };
                        if is_native {
                            memory.load(at, piece.dtype, bytes);
                            return;
                        }
                        let width = dtype.bytes() as usize;
                        numbers.resize(bytes.len() / width, 0.0);
                        memory.read(at, piece.dtype, &mut numbers);
                        bytes.chunks_exact_mut(width).zip(&numbers).for_each(|(b, x)| encode(dtype, *x, b));
                    })?;
                    done += len;
                }
            }
            Ok(())
        })
    }
}

/// What the shard of a rank is called.
pub(super) fn shard_file(rank: u64) -> String {
    format!("rank-{rank}.safetensors")
}

/// Data on their way into a file, block by block.
pub(super) struct Blocks<'a> {
    file: &'a File,
    at: u64,
    /// Begins at a page, as writes past the page cache must.
    block: MmapMut,
    used: usize,
    hashes: Vec<u8>,
    is_urgent: &'a AtomicBool,
    /// Whether writes go past the page cache.
    is_direct: bool,
    /// Not where the file system refuses it.
    may_be_direct: bool,
}

impl Blocks<'_> {
    /// Adds `len` elements of a tensor; `fill` gives their bytes in pieces, each from an element on. The first
    /// of them is number `first` among those of the tensor here.
    ///
    /// # Errors
    /// What the file system says, or a number that is not finite.
    pub fn put(&mut self, tensor: &str, first: u64, dtype: DType, len: u64, mut fill: impl FnMut(u64, &mut [u8])) -> Result<(), ShardError> {
        let width = dtype.bytes() as usize;
        let mut from = 0;
        while from < len {
            // Wide elements come first, so that none is in two blocks.
            let part = (len - from).min(((self.block.len() - self.used) / width) as u64);
            let bytes = &mut self.block[self.used..][..part as usize * width];
            fill(from, bytes);
            if let Some(k) = not_finite(dtype, bytes) {
                let value = decode(dtype, &bytes[k * width..][..width]);
                return Err(ShardError::NotFinite { tensor: tensor.to_owned(), element: first + from + k as u64, value });
            }
            self.used += bytes.len();
            from += part;
            if self.used == self.block.len() {
                self.flush()?;
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.used == 0 {
            return Ok(());
        }
        // A partial block may end anywhere, which only the page cache allows.
        self.set_direct(self.may_be_direct && self.used == self.block.len() && !self.is_urgent.load(Ordering::Relaxed))?;
        let mut written = self.file.write_all_at(&self.block[..self.used], self.at);
        if self.is_direct && written.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::InvalidInput) {
            self.may_be_direct = false;
            self.set_direct(false)?;
            written = self.file.write_all_at(&self.block[..self.used], self.at);
        }
        written?;
        let block = &self.block[..self.used];
        self.hashes.extend(blake3::hash(block).as_bytes());
        self.at += block.len() as u64;
        self.used = 0;
        Ok(())
    }

    /// Whether writes go past the page cache, if the file system knows how.
    fn set_direct(&mut self, is_direct: bool) -> io::Result<()> {
        if self.is_direct == is_direct {
            return Ok(());
        }
        let mut flags = rustix::fs::fcntl_getfl(self.file)?;
        flags.set(OFlags::DIRECT, is_direct);
        match rustix::fs::fcntl_setfl(self.file, flags) {
            Ok(()) => self.is_direct = is_direct,
            Err(_) if is_direct => self.may_be_direct = false,
            Err(e) => return Err(e.into()),
        }
        Ok(())
    }
}
