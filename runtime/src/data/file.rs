//! One data file, mapped into memory.

use super::error::DataError;
use super::format::{DataFormat, Encoding, FileDType, FormatSource};
use super::{array, stream};
use crate::host::sizes;
use crate::paths;
use ir::op::DType;
use ir::program::{InputEntry, Interval};
use memmap2::{Advice, Mmap};
use std::fs;
use std::ops::Range;
use std::path::Path;

/// Number of samples that are hashed of a long file; the next is their length in bytes.
const SAMPLES: usize = 64;
const SAMPLE: usize = 64 << 10;

pub struct DataFile {
    map: Mmap,
    /// Byte of the first element.
    start: usize,
    format: DataFormat,
}

impl DataFile {
    /// Opens a file for an input. With `next`, something takes the element after each of the input's.
    pub fn open(path: &Path, encoding: Encoding, input: &InputEntry, next: bool) -> Result<DataFile, DataError> {
        let malformed = |what: String| DataError::Malformed { file: path.to_path_buf(), what };
        let io = |cause| DataError::Io { file: path.to_path_buf(), cause };
        // This comes before opening, which would wait for the writer of a pipe.
        if let Some(why) = paths::unshared(path).map_err(io)? {
            return Err(malformed(why));
        }
        let handle = fs::File::open(path).map_err(io)?;
        let metadata = handle.metadata().map_err(io)?;
        if metadata.len() == 0 {
            return Err(malformed("it is empty".into()));
        }
        // SAFETY: the file is only read; if another process shortens it meanwhile, this one ends.
        let map = unsafe { Mmap::map(&handle) }.map_err(io)?;
        let opened = if map.starts_with(array::MAGIC) { array::open(&map) } else { stream::open(&map, path, encoding) };
        let (format, start) = opened.map_err(malformed)?;
        let file = DataFile { map, start, format };
        file.fits(input, next).map_err(malformed)?;
        Ok(file)
    }

    fn fits(&self, input: &InputEntry, next: bool) -> Result<(), String> {
        let want = sizes(&input.dims);
        match &self.format {
            DataFormat::Stream { tokens, .. } => {
                if !is_integer(input.dtype) || want.len() != 2 {
                    return Err(format!("a stream of tokens cannot feed `{}`, which is not [batch, seq] of i32; pass a .npy file", input.name));
                }
                if *tokens < want[1] + 1 {
                    return Err(format!("it has {tokens} tokens, fewer than one sequence of {} and the token after it", want[1]));
                }
            }
            DataFormat::Array { element, shape } => {
                let is_float = matches!(element, FileDType::F32 | FileDType::F64);
                if is_float && !input.dtype.is_float() {
                    return Err(format!("it holds floats, `{}` takes {}", input.name, input.dtype.name()));
                }
                let mut longer = want.clone();
                longer.last_mut().into_iter().for_each(|n| *n += 1);
                let rest = shape.get(1..).unwrap_or_default();
                if shape.is_empty() || rest != longer && (rest != want || next) {
                    let dims = |list: &[u64]| list.iter().map(|n| format!(", {n}")).collect::<String>();
                    let expected = if next { dims(&longer) } else { dims(&want) };
                    let flat = shape.len() == 1 && is_integer(input.dtype) && want.len() == 2;
                    let way_out = "; one token after the other is a stream: `numpy.load(OLD).astype(\"int32\").tofile(\"tokens.bin\")` writes it for --data-dtype int32";
                    return Err(format!("its shape is {shape:?}, `{}` takes [steps{expected}]{}", input.name, if flat { way_out } else { "" }));
                }
                let elements = shape.iter().try_fold(1u64, |p, n| p.checked_mul(*n)).filter(|n| *n < 1 << 48);
                let need = elements.ok_or("its shape is too large")? * element.bytes() as u64;
                let here = (self.map.len() - self.start) as u64;
                if here < need {
                    return Err(format!("it ends early: {here} bytes of data instead of {need}"));
                }
                if here > need {
                    return Err(format!("it goes on after its {need} bytes of data, with {} more: save one array", here - need));
                }
                if shape[0] == 0 {
                    return Err("it has no steps".into());
                }
            }
        }
        Ok(())
    }

    /// Reads through a file that is taken for text.
    ///
    /// # Errors
    /// The first byte that is none of a text.
    pub fn check_text(&self, path: &Path) -> Result<(), DataError> {
        match self.format {
            DataFormat::Stream { named: FormatSource::AsText, .. } => {
                // This is a hint, and the result does not depend on it.
                let _ = self.map.advise(Advice::Sequential);
                let checked = stream::check_text(&self.map, path).map_err(|what| DataError::Malformed { file: path.to_path_buf(), what });
                let _ = self.map.advise(Advice::Normal);
                checked
            }
            DataFormat::Stream { named: FormatSource::ByItself | FormatSource::ByUser, .. } | DataFormat::Array { .. } => Ok(()),
        }
    }

    /// Bytes of its elements.
    pub fn bytes(&self) -> u64 {
        (self.map.len() - self.start) as u64
    }

    /// Hash of how it is read, its length and its bytes; of a long file, evenly spaced samples are hashed.
    pub fn hash(&self) -> blake3::Hash {
        let (kind, element) = match &self.format {
            DataFormat::Stream { element, .. } => ("stream", element),
            DataFormat::Array { element, .. } => ("array", element),
        };
        let mut hasher = blake3::Hasher::new();
        hasher.update(kind.as_bytes()).update(&[element.bytes() as u8, u8::from(element.is_float())]).update(&self.bytes().to_le_bytes());
        let data = &self.map[self.start..];
        let last = data.len().saturating_sub(SAMPLE);
        if data.len() <= SAMPLES * SAMPLE {
            return hasher.update(data).finalize();
        }
        (0..SAMPLES).for_each(|k| {
            let from = (last as u128 * k as u128 / (SAMPLES - 1) as u128) as usize;
            hasher.update(&data[from..from + SAMPLE]);
        });
        hasher.finalize()
    }

    /// Whether all its elements are surely in these intervals; of floats that is not known.
    pub fn holds_only(&self, takes: &[Interval]) -> bool {
        let data = &self.map[self.start..];
        let (DataFormat::Stream { element, .. } | DataFormat::Array { element, .. }) = &self.format;
        let _ = self.map.advise(Advice::Sequential);
        let holds = match element {
            FileDType::U8 => all_in(data, u8::from_le_bytes, takes),
            FileDType::U16 => all_in(data, u16::from_le_bytes, takes),
            FileDType::U32 => all_in(data, u32::from_le_bytes, takes),
            FileDType::I32 => all_in(data, i32::from_le_bytes, takes),
            FileDType::I64 => all_in(data, i64::from_le_bytes, takes),
            FileDType::F32 | FileDType::F64 => false,
        };
        let _ = self.map.advise(Advice::Normal);
        holds
    }

    /// Whether all its elements are numbers that are finite in this type.
    pub fn is_finite(&self, dtype: DType) -> bool {
        let data = &self.map[self.start..];
        let (DataFormat::Stream { element, .. } | DataFormat::Array { element, .. }) = &self.format;
        let _ = self.map.advise(Advice::Sequential);
        let is = match element {
            FileDType::F32 => data.as_chunks().0.iter().all(|b| dtype.is_finite(f64::from(f32::from_le_bytes(*b)))),
            FileDType::F64 => data.as_chunks().0.iter().all(|b| dtype.is_finite(f64::from_le_bytes(*b))),
            // Only f16 cannot hold all of these integers; its batches are checked when they are read.
            FileDType::U8 | FileDType::U16 | FileDType::U32 | FileDType::I32 | FileDType::I64 => dtype != DType::F16,
        };
        let _ = self.map.advise(Advice::Normal);
        is
    }

    /// Batches after which all that is read was read once.
    pub fn round(&self, input: &InputEntry) -> u64 {
        match &self.format {
            DataFormat::Stream { tokens, .. } => windows(*tokens, input).div_ceil(input.dims[0].size.max(1)),
            DataFormat::Array { shape, .. } => shape[0],
        }
    }

    /// Whether the user's word for what it holds counts.
    pub fn is_named_by_user(&self) -> bool {
        matches!(self.format, DataFormat::Stream { named: FormatSource::ByUser, .. })
    }

    /// Whether lines of the last dim have one element more than the input.
    pub fn longer(&self, input: &InputEntry) -> bool {
        match &self.format {
            DataFormat::Stream { .. } => true,
            DataFormat::Array { shape, .. } => shape.len() > 1 && shape.last() != input.dims.last().map(|d| &d.size),
        }
    }

    /// Whether there is nothing after the last batch.
    pub fn ends(&self) -> bool {
        match self.format {
            DataFormat::Stream { .. } => false,
            DataFormat::Array { .. } => true,
        }
    }

    /// Whole batches, at least one.
    pub fn batches(&self, input: &InputEntry) -> u64 {
        match &self.format {
            DataFormat::Stream { tokens, .. } => (windows(*tokens, input) / input.dims[0].size.max(1)).max(1),
            DataFormat::Array { shape, .. } => shape[0],
        }
    }

    /// Bytes of an element.
    pub fn width(&self) -> u64 {
        let (DataFormat::Stream { element, .. } | DataFormat::Array { element, .. }) = &self.format;
        element.bytes() as u64
    }

    /// Columns of a line of the batch that begins at sequence `start` of a stream, or that has this number of an
    /// array. Others stay as they are.
    pub fn line(&self, input: &InputEntry, start: u64, line: u64, longer: bool, columns: &[Range<usize>], out: &mut [f64]) {
        let (DataFormat::Stream { element, .. } | DataFormat::Array { element, .. }) = &self.format;
        let width = element.bytes();
        let first = self.position(input, start, line * input.dims.last().map_or(1, |d| d.size.max(1)), longer) as usize;
        let data = &self.map[self.start..];
        for columns in columns {
            let bytes = &data[(first + columns.start) * width..(first + columns.end) * width];
            out[columns.clone()].iter_mut().zip(bytes.chunks_exact(width)).for_each(|(out, bytes)| *out = element.read(bytes));
        }
    }

    /// The place in the file of element `k` of an input's batch that begins there.
    pub fn position(&self, input: &InputEntry, start: u64, k: u64, longer: bool) -> u64 {
        let n = input.dims.last().map_or(1, |d| d.size.max(1));
        match &self.format {
            DataFormat::Stream { tokens, .. } => {
                let windows = windows(*tokens, input);
                let window = (start % windows + k / n) % windows;
                window * n + k % n
            }
            DataFormat::Array { .. } => start * batch_elements(input, longer) + k / n * (n + u64::from(longer)) + k % n,
        }
    }
}

/// Numbers that are compared at once.
const BLOCK: usize = 1 << 12;

/// Whether all numbers of so many bytes are in these intervals: the least and the greatest of a block in one, or each
/// of it in some.
fn all_in<T: Copy + Ord + Into<i64>, const N: usize>(bytes: &[u8], read: impl Fn([u8; N]) -> T, takes: &[Interval]) -> bool {
    let within = |least: T, most: T| takes.iter().any(|i| i64::from(i.least) <= least.into() && most.into() <= i64::from(i.most));
    bytes.as_chunks::<N>().0.chunks(BLOCK).all(|block| {
        let first = read(block[0]);
        let (least, most) = block.iter().fold((first, first), |(least, most), b| (least.min(read(*b)), most.max(read(*b))));
        within(least, most) || block.iter().all(|b| within(read(*b), read(*b)))
    })
}

fn batch_elements(input: &InputEntry, longer: bool) -> u64 {
    let mut dims = sizes(&input.dims);
    dims.last_mut().into_iter().for_each(|n| *n += u64::from(longer));
    dims.iter().product()
}

/// Sequences of a stream; each begins where the one before ends, and needs one token more.
fn windows(tokens: u64, input: &InputEntry) -> u64 {
    ((tokens - 1) / input.dims[1].size.max(1)).max(1)
}

/// Whether an input holds whole numbers.
fn is_integer(dtype: DType) -> bool {
    match dtype {
        DType::I32 => true,
        DType::F32 | DType::Bf16 | DType::F16 | DType::Bool => false,
    }
}
