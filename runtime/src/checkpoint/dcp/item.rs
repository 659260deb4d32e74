//! An item: what `torch.save` writes, a zip file of a pickle and of the bytes of storages.

use super::dtype::Scalar;
use super::tiling::elements;
use crate::pickle::{Node, Pickle, Symbol};
use std::io::{self, Cursor};
use zip::{CompressionMethod, ZipArchive};

pub const REBUILD: Symbol = ("torch._utils", "_rebuild_tensor_v2");
pub const HOOKS: Symbol = ("collections", "OrderedDict");

/// What a tensor's pickle may name.
const SYMBOLS: &[Symbol] = &[
    REBUILD,
    HOOKS,
    ("torch", "DoubleStorage"),
    ("torch", "FloatStorage"),
    ("torch", "HalfStorage"),
    ("torch", "BFloat16Storage"),
    ("torch", "LongStorage"),
    ("torch", "IntStorage"),
    ("torch", "ShortStorage"),
    ("torch", "CharStorage"),
    ("torch", "ByteStorage"),
    ("torch", "BoolStorage"),
];

const START: &[u8] = b"PK\x03\x04";

/// An opened item.
pub struct Item<'a> {
    bytes: &'a [u8],
    zip: ZipArchive<Cursor<&'a [u8]>>,
    /// The folder of all names, with its slash.
    root: String,
}

/// Where the elements of a tensor are in its item.
#[derive(Debug, PartialEq, Eq)]
pub struct ItemLayout {
    pub byte: u64,
    /// Stride of each dim; none if the elements are row-major.
    pub strides: Option<Vec<u64>>,
}

/// Whether bytes may be an item.
pub fn is_item(bytes: &[u8]) -> bool {
    bytes.starts_with(START)
}

impl<'a> Item<'a> {
    /// # Errors
    /// It is none.
    pub fn open(bytes: &'a [u8]) -> Result<Item<'a>, String> {
        if !is_item(bytes) {
            return Err("it is not what torch.save writes".into());
        }
        let zip = ZipArchive::new(Cursor::new(bytes)).map_err(|e| format!("its zip file cannot be read: {e}"))?;
        let root = zip.file_names().flatten().find_map(|n| Some(n.strip_suffix("data.pkl").filter(|root| root.ends_with('/'))?.to_owned()));
        let root = root.ok_or("it has no data.pkl")?;
        let mut item = Item { bytes, zip, root };
        // Older files have no such record.
        if item.zip.index_for_name(&item.named("byteorder")).is_some() && item.record("byteorder")? != b"little" {
            return Err("its bytes are in another order than the lowest first".into());
        }
        Ok(item)
    }

    fn named(&self, name: &str) -> String {
        format!("{}{name}", self.root)
    }

    fn record(&mut self, name: &str) -> Result<&'a [u8], String> {
        let entry = self.zip.by_name(&self.named(name)).map_err(|e| format!("its {name:.40} cannot be read: {e}"))?;
        if entry.compression() != CompressionMethod::Stored || entry.encrypted() || entry.size() != entry.compressed_size() {
            return Err(format!("its {name:.40} is compressed or encrypted"));
        }
        let start = entry.data_start().and_then(|n| usize::try_from(n).ok());
        let range = start.and_then(|n| Some(n..n.checked_add(usize::try_from(entry.size()).ok()?)?));
        range.and_then(|r| self.bytes.get(r)).ok_or_else(|| format!("its {name:.40} is not within it"))
    }

    /// The text that it is.
    ///
    /// # Errors
    /// It is something else.
    pub fn text(&mut self) -> Result<&'a str, String> {
        let pickle = Pickle::read(self.record("data.pkl")?, &[]).map_err(|e| e.to_string())?;
        pickle.text(pickle.root()).ok_or_else(|| "it is no text".into())
    }

    /// Where the elements of the tensor that it is are.
    ///
    /// # Errors
    /// It is something else, or a tensor of another dtype or other sizes.
    pub fn tensor(&mut self, dtype: Scalar, sizes: &[u64]) -> Result<ItemLayout, String> {
        let pickle = Pickle::read(self.record("data.pkl")?, SYMBOLS).map_err(|e| format!("data.pkl, {e}"))?;
        let odd = || "it is no plain tensor".to_owned();
        let args = pickle.made(pickle.root()).filter(|m| m.0 == REBUILD).ok_or_else(odd)?.1;
        let [storage, offset, shape, strides, ..] = args else { return Err(odd()) };
        let Node::Outside(storage) = pickle.node(*storage) else { return Err(odd()) };
        let [kind, class, key, _, len] = pickle.items(*storage).unwrap_or_default() else { return Err(odd()) };
        let class = pickle.symbol(*class).and_then(|s| Scalar::of_storage(s.1));
        let counts = |id| pickle.items(id).and_then(|i| i.iter().map(|n| pickle.count(*n)).collect::<Option<Vec<u64>>>());
        let (Some("storage"), Some(class), Some(key), Some(len)) = (pickle.text(*kind), class, pickle.text(*key), pickle.count(*len)) else {
            return Err(odd());
        };
        let (Some(0), Some(shape), Some(strides)) = (pickle.count(*offset), counts(*shape), counts(*strides)) else { return Err(odd()) };
        if class != dtype || shape != sizes {
            return Err(format!("it is {} {shape:?}, and .metadata says {} {sizes:?}", class.names().0, dtype.names().0));
        }
        if elements(sizes) != Some(len) {
            return Err(format!("its storage has {len} elements"));
        }
        let strides = dense(sizes, &strides)?;
        let data = self.record(&format!("data/{key}"))?;
        if len.checked_mul(dtype.bytes()) != Some(data.len() as u64) {
            return Err(format!("its storage has {} bytes for {len} elements", data.len()));
        }
        let byte = data.as_ptr() as usize - self.bytes.as_ptr() as usize;
        Ok(ItemLayout { byte: byte as u64, strides })
    }

    /// Whether its records have the checksums (CRC-32) that it says.
    ///
    /// # Errors
    /// The first that has not.
    pub fn check(&mut self) -> Result<(), String> {
        let mut rest = self.bytes.len() as u64;
        for k in 0..self.zip.len() {
            let mut entry = self.zip.by_index(k).map_err(|e| e.to_string())?;
            // Records that share bytes could take for ever to read.
            rest = rest.checked_sub(entry.size()).ok_or("its records are larger than it is")?;
            let name: String = entry.name().map_err(|e| e.to_string())?.chars().take(40).collect();
            io::copy(&mut entry, &mut io::sink()).map_err(|e| format!("{name}: {e}"))?;
        }
        Ok(())
    }
}

/// The strides of a tensor that has each element of its storage once; none if they are row-major.
fn dense(sizes: &[u64], strides: &[u64]) -> Result<Option<Vec<u64>>, String> {
    if sizes.len() != strides.len() {
        return Err("it has not as many strides as dims".into());
    }
    // Strides of dims with one index, and of tensors without elements, say nothing.
    if sizes.contains(&0) {
        return Ok(None);
    }
    let mut dims: Vec<usize> = (0..sizes.len()).filter(|k| sizes[*k] > 1).collect();
    let is_chain = |dims: &[usize]| dims.iter().rev().try_fold(1, |next, k| (strides[*k] == next).then(|| next * sizes[*k])).is_some();
    if is_chain(&dims) {
        return Ok(None);
    }
    dims.sort_by_key(|k| std::cmp::Reverse(strides[*k]));
    if is_chain(&dims) { Ok(Some(strides.to_vec())) } else { Err(format!("its strides are {strides:?}, with gaps or overlaps")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strides_have_each_element_once() {
        assert_eq!(dense(&[2, 3], &[3, 1]), Ok(None));
        assert_eq!(dense(&[1, 3], &[9, 1]), Ok(None));
        assert_eq!(dense(&[0, 3], &[7, 7]), Ok(None));
        assert_eq!(dense(&[], &[]), Ok(None));
        assert_eq!(dense(&[2, 3], &[1, 2]), Ok(Some(vec![1, 2])));
        for strides in [[0, 1], [1, 1], [4, 1], [6, 2]] {
            assert_eq!(dense(&[2, 3], &strides), Err(format!("its strides are {strides:?}, with gaps or overlaps")));
        }
        assert!(dense(&[2], &[]).is_err());
    }
}
