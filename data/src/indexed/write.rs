//! Data sets written, as `IndexedDatasetBuilder` of megatron-core does.

use super::format::{Dtype, IndexedError, MAGIC, VERSION, bare, paths, with};
use super::read::Indexed;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// Writes a data set. Files have other names, which end in `.part`, until all of it is written.
pub struct Writer {
    prefix: PathBuf,
    part: PathBuf,
    bin: BufWriter<File>,
    dtype: Dtype,
    lengths: Vec<i32>,
    borders: Vec<i64>,
    bytes: Vec<u8>,
}

impl Writer {
    /// Begins `PREFIX.bin` and `PREFIX.idx`.
    ///
    /// # Errors
    /// What the file system says.
    pub fn create(prefix: &Path, dtype: Dtype) -> Result<Writer, IndexedError> {
        let prefix = bare(prefix);
        let part = part(&prefix);
        let file = File::create(&part).map_err(|cause| IndexedError::Io { file: part.clone(), cause })?;
        Ok(Writer { prefix, part, bin: BufWriter::with_capacity(1 << 20, file), dtype, lengths: vec![], borders: vec![0], bytes: vec![] })
    }

    /// Goes on with what an earlier writer left, up to these sequences and documents.
    ///
    /// # Errors
    /// What the file system says; a file with fewer tokens than that.
    pub fn resume(prefix: &Path, dtype: Dtype, lengths: Vec<i32>, borders: Vec<i64>) -> Result<Writer, IndexedError> {
        let prefix = bare(prefix);
        let part = part(&prefix);
        let io = |cause| IndexedError::Io { file: part.clone(), cause };
        let tokens: u64 = lengths.iter().map(|l| *l as u64).sum();
        let bytes = tokens * dtype.size();
        let mut file = File::options().write(true).open(&part).map_err(io)?;
        let has = file.metadata().map_err(io)?.len();
        if has < bytes {
            return Err(IndexedError::Malformed { at: has, what: format!("it ends here, where {bytes} bytes were written"), file: part });
        }
        file.set_len(bytes).and_then(|()| io::Seek::seek(&mut file, io::SeekFrom::End(0))).map_err(io)?;
        Ok(Writer { prefix, part, bin: BufWriter::with_capacity(1 << 20, file), dtype, lengths, borders, bytes: vec![] })
    }

    /// How tokens are stored in `PREFIX.bin`.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Documents that have ended so far, those of an earlier writer among them.
    pub fn documents(&self) -> u64 {
        self.borders.len() as u64 - 1
    }

    /// Adds a sequence to the document that is being written.
    ///
    /// # Errors
    /// A token that is too large; what the file system says.
    pub fn sequence(&mut self, tokens: &[u32]) -> Result<(), IndexedError> {
        let length = i32::try_from(tokens.len()).map_err(|_| IndexedError::Long { file: self.part.clone(), tokens: tokens.len() })?;
        if let Some(value) = tokens.iter().copied().find(|t| *t > self.dtype.largest()) {
            return Err(IndexedError::Wide { file: self.part.clone(), value, dtype: self.dtype });
        }
        self.bytes.clear();
        match self.dtype {
            Dtype::U8 | Dtype::I8 => self.bytes.extend(tokens.iter().map(|t| *t as u8)),
            Dtype::I16 | Dtype::U16 => self.bytes.extend(tokens.iter().flat_map(|t| (*t as u16).to_le_bytes())),
            Dtype::I32 => self.bytes.extend(tokens.iter().flat_map(|t| t.to_le_bytes())),
            Dtype::I64 => self.bytes.extend(tokens.iter().flat_map(|t| u64::from(*t).to_le_bytes())),
        }
        self.bin.write_all(&self.bytes).map_err(|cause| IndexedError::Io { file: self.part.clone(), cause })?;
        self.lengths.push(length);
        Ok(())
    }

    /// Ends the document that is being written.
    pub fn end_document(&mut self) {
        self.borders.push(self.lengths.len() as i64);
    }

    /// Adds a whole document, whose sequences have these lengths.
    ///
    /// # Errors
    /// As [`Writer::sequence`]; lengths that are not those of the tokens.
    pub fn document(&mut self, tokens: &[u32], lengths: &[usize]) -> Result<(), IndexedError> {
        let sum: usize = lengths.iter().sum();
        if sum != tokens.len() {
            return Err(IndexedError::Lengths { file: self.part.clone(), lengths: sum, tokens: tokens.len() });
        }
        let mut rest = tokens;
        for length in lengths {
            let (sequence, after) = rest.split_at(*length);
            self.sequence(sequence)?;
            rest = after;
        }
        self.end_document();
        Ok(())
    }

    /// Adds all documents of another data set.
    ///
    /// # Errors
    /// It has tokens of another type; a token that mcc does not take; what the file system says.
    pub fn append(&mut self, other: &Indexed) -> Result<(), IndexedError> {
        if other.dtype() != self.dtype {
            return Err(IndexedError::Types { file: paths(other.prefix()).1, has: other.dtype(), written: self.dtype });
        }
        let mut tokens: Vec<u32> = vec![];
        for document in (0..other.documents()).filter_map(|d| other.document(d)) {
            for sequence in document {
                tokens.resize(other.length(sequence).unwrap_or(0) as usize, 0);
                other.read(sequence, 0, &mut tokens)?;
                self.sequence(&tokens)?;
            }
            self.end_document();
        }
        Ok(())
    }

    /// Puts all tokens so far on the disk, so that [`Writer::resume`] finds them.
    ///
    /// # Errors
    /// What the file system says.
    pub fn settle(&mut self) -> Result<(), IndexedError> {
        self.bin.flush().and_then(|()| self.bin.get_ref().sync_data()).map_err(|cause| IndexedError::Io { file: self.part.clone(), cause })
    }

    /// Writes the index and gives both files their names.
    ///
    /// # Errors
    /// What the file system says.
    pub fn finish(mut self) -> Result<(), IndexedError> {
        self.settle()?;
        let (bin, idx) = paths(&self.prefix);
        let part = with(&idx, ".part");
        let io = |file: &Path| {
            let file = file.to_path_buf();
            |cause| IndexedError::Io { file, cause }
        };
        let written = File::create(&part).and_then(|file| {
            let mut out = BufWriter::with_capacity(1 << 20, file);
            write_index(&mut out, self.dtype, &self.lengths, &self.borders)?;
            out.into_inner().map_err(io::IntoInnerError::into_error)?.sync_data()
        });
        written.map_err(io(&part))?;
        fs::rename(&self.part, &bin).map_err(io(&bin))?;
        fs::rename(&part, &idx).map_err(io(&idx))
    }
}

/// What tokens are in while they are written.
fn part(prefix: &Path) -> PathBuf {
    with(prefix, ".bin.part")
}

/// Writes the bytes of an index.
///
/// # Errors
/// What the writer says.
pub fn write_index(out: &mut impl Write, dtype: Dtype, lengths: &[i32], borders: &[i64]) -> io::Result<()> {
    out.write_all(&MAGIC)?;
    out.write_all(&VERSION.to_le_bytes())?;
    out.write_all(&[dtype.code()])?;
    out.write_all(&(lengths.len() as u64).to_le_bytes())?;
    out.write_all(&(borders.len() as u64).to_le_bytes())?;
    lengths.iter().try_for_each(|length| out.write_all(&length.to_le_bytes()))?;
    let mut pointer = 0i64;
    for length in lengths {
        out.write_all(&pointer.to_le_bytes())?;
        pointer += i64::from(*length) * dtype.size() as i64;
    }
    borders.iter().try_for_each(|border| out.write_all(&border.to_le_bytes()))
}
