//! Safetensors files: mapped ones to read, whole or in shards, and the order of bytes to write.

use crate::ConvertError;
use crate::dtypes::{Float, RoundingLosses};
use crate::quantised::{self, Scheme};
use ir::provenance::{self, Provenance};
use memmap2::Mmap;
use safetensors::tensor::{Metadata, TensorInfo};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fmt::Display;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// The file with all tensors of a checkpoint that is not in shards.
pub const WHOLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// The tensors of a checkpoint by name.
pub struct Checkpoint {
    /// The file, or of several the index.
    pub path: PathBuf,
    maps: Vec<Mmap>,
    pub tensors: BTreeMap<String, Tensor>,
    /// What it says of its model; none unless mcc has written it.
    pub provenance: Option<Provenance>,
}

/// Where a tensor lies, and how.
pub struct Tensor {
    pub dtype: Dtype,
    pub shape: Vec<u64>,
    pub coding: ElementCoding,
    map: usize,
    bytes: std::ops::Range<usize>,
}

impl Tensor {
    /// The same bytes, as codes of a tensor of this shape.
    pub fn standing_for(self, shape: Vec<u64>, coding: ElementCoding) -> Tensor {
        Tensor { shape, coding, ..self }
    }
}

/// What the elements of a tensor are.
pub enum ElementCoding {
    /// The elements are values.
    Plain,
    /// The elements are codes, whose scales another tensor holds.
    Scaled(Scheme, Box<Tensor>),
}

impl Checkpoint {
    /// Opens `model.safetensors` in a directory, or the shards that its index lists.
    ///
    /// # Errors
    /// There is neither; a file is unreadable or malformed; the index and the shards contradict each other.
    pub fn in_directory(dir: &Path) -> Result<Checkpoint, ConvertError> {
        let (whole, index) = (dir.join(WHOLE), dir.join(INDEX));
        if whole.exists() {
            return Checkpoint::file(&whole);
        }
        if !index.exists() {
            let pickled = if dir.join("pytorch_model.bin").exists() || dir.join("pytorch_model.bin.index.json").exists() {
                "; pytorch_model.bin is not read, save the model as safetensors"
            } else {
                ""
            };
            return Err(ConvertError::Malformed { path: dir.into(), what: format!("has neither {WHOLE} nor {INDEX}{pickled}") });
        }
        Checkpoint::shards(dir, &index)
    }

    /// Opens one file.
    ///
    /// # Errors
    /// It is unreadable or malformed.
    pub fn file(path: &Path) -> Result<Checkpoint, ConvertError> {
        let mut checkpoint = Checkpoint { path: path.into(), maps: vec![], tensors: BTreeMap::new(), provenance: None };
        checkpoint.add(path)?;
        Ok(checkpoint)
    }

    fn shards(dir: &Path, index: &Path) -> Result<Checkpoint, ConvertError> {
        let malformed = |what: String| ConvertError::Malformed { path: index.into(), what };
        let text = std::fs::read(index).map_err(ConvertError::io(index))?;
        let value: Value = serde_json::from_slice(&text).map_err(|e| malformed(format!("is not JSON: {e}")))?;
        let map = value.get("weight_map").and_then(Value::as_object).ok_or_else(|| malformed("has no weight_map".into()))?;
        let mut names: Vec<&str> = vec![];
        for (tensor, file) in map {
            // A name with a path is refused, as it could lead out of the directory.
            let file = file.as_str().filter(|f| Path::new(f).file_name().is_some_and(|n| n == *f));
            let file = file.ok_or_else(|| malformed(format!("does not name a file beside it for `{tensor}`")))?;
            if !names.contains(&file) {
                names.push(file);
            }
        }
        names.sort_unstable();
        let mut checkpoint = Checkpoint { path: index.into(), maps: vec![], tensors: BTreeMap::new(), provenance: None };
        for name in &names {
            checkpoint.add(&dir.join(name))?;
        }
        let mut wrong = vec![];
        for (tensor, file) in map {
            match checkpoint.tensors.get(tensor) {
                Some(t) if file == names[t.map] => {}
                _ => wrong.push(format!("`{tensor}` is not in {file}")),
            }
        }
        for (name, tensor) in checkpoint.tensors.iter().filter(|(name, _)| !map.contains_key(*name)) {
            wrong.push(format!("`{name}` of \"{}\" is not in the index", names[tensor.map]));
        }
        if wrong.is_empty() { Ok(checkpoint) } else { Err(ConvertError::Tensors { path: index.into(), what: wrong }) }
    }

    fn add(&mut self, path: &Path) -> Result<(), ConvertError> {
        let malformed = |what: String| ConvertError::Malformed { path: path.into(), what };
        let file = File::open(path).map_err(ConvertError::io(path))?;
        if !file.metadata().map_err(ConvertError::io(path))?.is_file() {
            return Err(malformed("is not a file".into()));
        }
        // SAFETY: the file is only read; if another process shortens it meanwhile, this one ends.
        let map = unsafe { Mmap::map(&file) }.map_err(ConvertError::io(path))?;
        let (header, metadata) = SafeTensors::read_metadata(&map).map_err(|e| malformed(format!("is not a safetensors file: {e}")))?;
        if let Some(text) = metadata.metadata().as_ref().and_then(|m| m.get(provenance::KEY)) {
            let json = provenance::open(text, described(metadata.tensors())).map_err(|e| malformed(format!("is damaged: {e}")))?;
            let read = serde_json::from_str(json).map_err(|e| malformed(format!("says something of its model that cannot be read: {e}")))?;
            self.provenance = Some(read);
        }
        for (name, info) in metadata.tensors() {
            let (start, end) = info.data_offsets;
            let data = size_of::<u64>() + header;
            if data + end > map.len() {
                return Err(malformed(format!("ends within `{name}`")));
            }
            let shape = info.shape.iter().map(|n| *n as u64).collect();
            let tensor = Tensor { dtype: info.dtype, shape, coding: ElementCoding::Plain, map: self.maps.len(), bytes: data + start..data + end };
            if self.tensors.insert(name.clone(), tensor).is_some() {
                return Err(malformed(format!("holds `{name}`, which another shard holds too")));
            }
        }
        self.maps.push(map);
        Ok(())
    }

    /// The bytes of a tensor, row-major, little-endian.
    pub fn bytes(&self, tensor: &Tensor) -> &[u8] {
        &self.maps[tensor.map][tensor.bytes.clone()]
    }

    /// Whether two tensors are the same bytes of the same type.
    pub fn alike(&self, a: &Tensor, b: &Tensor) -> bool {
        a.shape == b.shape && a.dtype == b.dtype && self.bytes(a) == self.bytes(b)
    }

    /// The values of a tensor, row-major, little-endian, and their type.
    pub fn floats(&self, tensor: &Tensor) -> (Cow<'_, [u8]>, Dtype) {
        let bytes = self.bytes(tensor);
        match &tensor.coding {
            ElementCoding::Plain => (bytes.into(), tensor.dtype),
            ElementCoding::Scaled(scheme, scale) => (quantised::values(*scheme, &tensor.shape, bytes, self.bytes(scale)).into(), Dtype::F32),
        }
    }
}

/// The L2 norm of every tensor of a file, summed in f64.
///
/// # Errors
/// The file is unreadable or malformed, or a tensor is not f32.
pub fn norms(path: &Path) -> Result<BTreeMap<String, f64>, ConvertError> {
    let checkpoint = Checkpoint::file(path)?;
    let norm = |(name, tensor): (&String, &Tensor)| {
        if tensor.dtype != Dtype::F32 {
            return Err(ConvertError::Tensors { path: path.into(), what: vec![format!("`{name}` is {:?}, expected F32", tensor.dtype)] });
        }
        let (values, _) = checkpoint.bytes(tensor).as_chunks::<4>();
        let squares: f64 = values.iter().map(|b| f64::from(f32::from_le_bytes(*b)).powi(2)).sum();
        Ok((name.clone(), squares.sqrt()))
    };
    checkpoint.tensors.iter().map(norm).collect()
}

/// What a header says of its tensors, for its seal.
fn described<'a, N: Display>(tensors: impl IntoIterator<Item = (N, &'a TensorInfo)>) -> Vec<String> {
    tensors.into_iter().map(|(name, i)| format!("{name} {:?} {:?} {:?}", i.dtype, i.shape, i.data_offsets)).collect()
}

/// What a file's header says beside the tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Format<'a> {
    /// Which model it is of.
    Mcc(&'a Provenance),
    /// `format: pt`, as Hugging Face writes and expects it.
    Pytorch,
}

/// A tensor to be written.
#[derive(Clone, Debug, PartialEq)]
pub struct WrittenTensor {
    pub name: String,
    pub shape: Vec<u64>,
    pub dtype: Float,
}

/// Writes tensors, in this order. Each is filled in f32 (from zeros), brought to its type and written before the next
/// one takes memory. Returns what was lost of each.
///
/// # Errors
/// What the file system says.
pub fn write(
    file: &mut File,
    format: Format<'_>,
    tensors: &[WrittenTensor],
    mut fill: impl FnMut(usize, &mut [u8]),
) -> std::io::Result<Vec<RoundingLosses>> {
    let mut end = 0;
    let mut infos = vec![];
    for WrittenTensor { name, shape, dtype } in tensors {
        let shape: Vec<usize> = shape.iter().map(|n| *n as usize).collect();
        let start = end;
        end += shape.iter().product::<usize>() * dtype.size();
        infos.push((name.clone(), TensorInfo { dtype: dtype.stored(), shape, data_offsets: (start, end) }));
    }
    let (key, value) = match format {
        Format::Mcc(provenance) => {
            let json = serde_json::to_string(provenance).expect("invariant: plain data with text keys");
            (provenance::KEY, provenance::seal(&json, described(infos.iter().map(|(n, i)| (n, i)))))
        }
        Format::Pytorch => ("format", "pt".to_owned()),
    };
    let metadata = Metadata::new(Some(HashMap::from([(key.to_owned(), value)])), infos).expect("invariant: tensors follow each other");
    let mut header = serde_json::to_vec(&metadata).expect("invariant: plain data with text keys");
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut out = BufWriter::new(file);
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(&header)?;
    let mut buffer = vec![];
    let mut losses = vec![RoundingLosses::default(); tensors.len()];
    for (i, tensor) in tensors.iter().enumerate() {
        buffer.clear();
        buffer.resize(tensor.shape.iter().product::<u64>() as usize * 4, 0);
        fill(i, &mut buffer);
        match tensor.dtype {
            Float::F32 => out.write_all(&buffer)?,
            narrow => out.write_all(&narrow.narrow(&buffer, &mut losses[i]))?,
        }
    }
    out.flush()?;
    Ok(losses)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_damage_to_a_header_makes_reading_panic() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.safetensors");
        let wanted = |name: &str, shape: &[u64]| WrittenTensor { name: name.into(), shape: shape.into(), dtype: Float::F32 };
        let tensors = [wanted("a", &[2, 3]), wanted("b", &[])];
        write(&mut File::create(&path).unwrap(), Format::Pytorch, &tensors, |i, bytes| bytes.fill(i as u8)).unwrap();
        let good = std::fs::read(&path).unwrap();
        assert_eq!(norms(&path).unwrap().len(), 2);
        for at in 0..good.len() - 28 {
            for byte in [0, 0xff, b'9', b'}', good[at] ^ 1] {
                let mut bad = good.clone();
                bad[at] = byte;
                std::fs::write(&path, &bad).unwrap();
                let _ = norms(&path);
            }
        }
        for length in 0..good.len() {
            std::fs::write(&path, &good[..length]).unwrap();
            assert!(norms(&path).is_err());
        }
    }
}
