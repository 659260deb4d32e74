//! What `.metadata` says: which tensors there are, how they are cut, and where the parts are.

use super::dtype::{self, Scalar};
use super::tiling::{Block, elements};
use crate::pickle::{Id, Pickle, Symbol};
use std::collections::HashMap;

pub const METADATA: Symbol = ("torch.distributed.checkpoint.metadata", "Metadata");
pub const TENSOR: Symbol = ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata");
pub const BYTES: Symbol = ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata");
pub const CHUNK: Symbol = ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata");
pub const PROPERTIES: Symbol = ("torch.distributed.checkpoint.metadata", "TensorProperties");
pub const MEMORY_FORMAT: Symbol = ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING");
pub const INDEX: Symbol = ("torch.distributed.checkpoint.metadata", "MetadataIndex");
pub const STORAGE: Symbol = ("torch.distributed.checkpoint.filesystem", "_StorageInfo");
pub const SIZE: Symbol = ("torch", "Size");
pub const LAYOUT: Symbol = ("torch.serialization", "_get_layout");
/// The class of properties in PyTorch before 2.3.
const OLD_PROPERTIES: Symbol = ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties");

/// What a `.metadata` may name.
const SYMBOLS: &[Symbol] = &[
    METADATA,
    TENSOR,
    BYTES,
    CHUNK,
    PROPERTIES,
    MEMORY_FORMAT,
    INDEX,
    STORAGE,
    SIZE,
    LAYOUT,
    OLD_PROPERTIES,
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
    // These say who saved the checkpoint, and are not used.
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
    // These say how the save was planned, which Megatron keeps.
    ("torch.distributed.checkpoint.planner", "SavePlan"),
    ("torch.distributed.checkpoint.planner", "WriteItem"),
    ("torch.distributed.checkpoint.planner", "WriteItemType"),
    ("torch.distributed.checkpoint.planner", "TensorWriteData"),
    ("torch.distributed.checkpoint.planner", "BytesIOWriteData"),
    ("collections", "OrderedDict"),
    // These are dtypes, some of which can be read.
    ("torch", "float32"),
    ("torch", "float64"),
    ("torch", "float16"),
    ("torch", "bfloat16"),
    ("torch", "int8"),
    ("torch", "int16"),
    ("torch", "int32"),
    ("torch", "int64"),
    ("torch", "uint8"),
    ("torch", "uint16"),
    ("torch", "uint32"),
    ("torch", "uint64"),
    ("torch", "bool"),
    ("torch", "complex32"),
    ("torch", "complex64"),
    ("torch", "complex128"),
    ("torch", "float8_e4m3fn"),
    ("torch", "float8_e4m3fnuz"),
    ("torch", "float8_e5m2"),
    ("torch", "float8_e5m2fnuz"),
    ("torch", "float8_e8m0fnu"),
    ("torch", "float4_e2m1fn_x2"),
];

/// What in our files is no tensor's name.
const TAKEN: [&str; 2] = ["__metadata__", super::super::shard::HASHES];

/// Dims of a tensor of PyTorch's.
const MOST_DIMS: usize = 64;
/// Bytes of a name: many entries may share one.
const MOST_NAME: usize = 4096;
/// Bytes that a part of a tensor takes at least.
const LEAST_PART: usize = 16;
/// Fields of an object: many objects may share them.
const MOST_FIELDS: usize = 64;

/// Where an item is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ItemLocation {
    /// Index in [`Metadata::files`].
    pub file: usize,
    pub byte: u64,
    pub bytes: u64,
}

#[derive(Debug)]
pub struct TensorMeta {
    pub name: String,
    /// Dtype, or a description of elements that cannot be read.
    pub dtype: Result<Scalar, String>,
    pub shape: Vec<u64>,
    /// Parts that have elements.
    pub parts: Vec<(Block, ItemLocation)>,
}

#[derive(Debug)]
pub struct Metadata {
    pub files: Vec<String>,
    /// Tensors in the order of their names.
    pub tensors: Vec<TensorMeta>,
    /// What is no tensor, by name.
    pub others: Vec<(String, ItemLocation)>,
}

impl Metadata {
    /// # Errors
    /// It is no `.metadata`, or one of which items are missing or have no place.
    pub fn read(bytes: &[u8]) -> Result<Metadata, String> {
        let pickle = Pickle::read(bytes, SYMBOLS).map_err(|e| e.to_string())?;
        Reader { pickle: &pickle }.metadata(bytes.len() / LEAST_PART)
    }
}

/// Location of each item, by name and, for a part of a tensor, its offsets.
type ItemLocations<'a> = HashMap<(&'a str, Option<Vec<u64>>), ItemLocation>;

struct Reader<'p, 'a> {
    pickle: &'p Pickle<'a>,
}

impl<'a> Reader<'_, 'a> {
    /// Tensors may share lists of parts: no more parts than `budget` are looked at.
    fn metadata(&self, mut budget: usize) -> Result<Metadata, String> {
        let root = self.pickle.root();
        self.of_class(root, &[METADATA])?;
        let (described, stored) = (self.field(root, "state_dict_metadata")?, self.field(root, "storage_data")?);
        let (mut places, files) = self.places(stored)?;
        let (mut tensors, mut others) = (vec![], vec![]);
        for (key, value) in self.pickle.entries(described).ok_or("state_dict_metadata is no dict")? {
            let name = self.name(*key)?;
            if TAKEN.contains(&name) {
                return Err(format!("`{name}` is a name that mcc's files keep for themselves"));
            }
            match self.pickle.made(*value) {
                Some((TENSOR, _)) => {
                    let wrong = |what: String| format!("`{name}`: {what}");
                    tensors.push(self.tensor(name, *value, &mut places, &mut budget).map_err(wrong)?);
                }
                Some((BYTES, _)) => {
                    let place = places.remove(&(name, None)).ok_or_else(|| format!("`{name}` is stored nowhere"))?;
                    others.push((name.to_owned(), place));
                }
                _ => return Err(format!("`{name}` is neither a tensor nor bytes")),
            }
        }
        if let Some((name, _)) = places.keys().min() {
            return Err(format!("something is stored for `{name}` that is no part of it"));
        }
        tensors.sort_by(|a, b| a.name.cmp(&b.name));
        others.sort_by(|a, b| a.0.cmp(&b.0));
        let mut names: Vec<&String> = tensors.iter().map(|t| &t.name).chain(others.iter().map(|o| &o.0)).collect();
        names.sort_unstable();
        if let Some(twice) = names.windows(2).find(|w| w[0] == w[1]) {
            return Err(format!("`{}` is there twice", twice[0]));
        }
        Ok(Metadata { files, tensors, others })
    }

    /// Where everything is stored, and the files.
    fn places(&self, stored: Id) -> Result<(ItemLocations<'a>, Vec<String>), String> {
        let (mut places, mut files, mut numbers) = (HashMap::new(), vec![], HashMap::new());
        for (key, value) in self.pickle.entries(stored).ok_or("storage_data is no dict")? {
            self.of_class(*key, &[INDEX])?;
            self.of_class(*value, &[STORAGE])?;
            let name = self.name(self.field(*key, "fqn")?)?;
            let wrong = |what: String| format!("`{name}`: {what}");
            let offset = self.optional(*key, "offset").map_err(wrong)?.map(|offset| self.sizes(offset)).transpose().map_err(wrong)?;
            if let Some(transforms) = self.optional(*value, "transform_descriptors").map_err(wrong)? {
                let first = self.pickle.items(transforms).and_then(|t| self.pickle.text(*t.first()?)).unwrap_or("an unknown one");
                return Err(wrong(format!("it is stored through a transformation ({first:.40}), which is not read")));
            }
            let file = self.field(*value, "relative_path").and_then(|f| self.name(f)).map_err(wrong)?;
            if file.contains(['/', '\0']) || file.starts_with('.') || file.is_empty() {
                return Err(wrong(format!("it is in `{file}`, which is no name of a file beside .metadata")));
            }
            let number = *numbers.entry(file).or_insert_with(|| {
                files.push(file.to_owned());
                files.len() - 1
            });
            let count = |field| self.pickle.count(self.field(*value, field)?).ok_or_else(|| format!("its {field} is no count"));
            let place = ItemLocation { file: number, byte: count("offset").map_err(wrong)?, bytes: count("length").map_err(wrong)? };
            if places.insert((name, offset), place).is_some() {
                return Err(wrong("a part is stored twice".into()));
            }
        }
        Ok((places, files))
    }

    fn tensor(&self, name: &'a str, value: Id, places: &mut ItemLocations<'a>, budget: &mut usize) -> Result<TensorMeta, String> {
        let dtype = self.dtype(self.field(value, "properties")?)?;
        let shape = self.sizes(self.field(value, "size")?)?;
        // An empty dim counts as 1, so that the sizes can be multiplied in any order without overflow.
        shape.iter().try_fold(dtype::WIDEST, |bytes, n| bytes.checked_mul((*n).max(1))).ok_or("it has too many elements")?;
        let chunks = self.pickle.items(self.field(value, "chunks")?).ok_or("its chunks are no list")?;
        *budget = budget.checked_sub(chunks.len()).ok_or("it shares its parts with other tensors")?;
        let mut blocks = vec![];
        for chunk in chunks {
            self.of_class(*chunk, &[CHUNK])?;
            let (from, sizes) = (self.sizes(self.field(*chunk, "offsets")?)?, self.sizes(self.field(*chunk, "sizes")?)?);
            if from.len() != shape.len() || sizes.len() != shape.len() {
                return Err(format!("a part has {} dims, and it has {}", from.len(), shape.len()));
            }
            blocks.push(Block { from, sizes });
        }
        // Several ranks may list a block that they all have; it is stored once.
        blocks.sort_unstable();
        blocks.dedup();
        let (mut parts, mut empty) = (vec![], vec![]);
        for block in blocks {
            let key = (name, Some(block.from.clone()));
            if block.sizes.contains(&0) {
                empty.push(key);
                continue;
            }
            let place = places.remove(&key).ok_or_else(|| format!("its part at {:?} is stored nowhere, or is two parts", block.from))?;
            parts.push((block, place));
        }
        for key in empty {
            places.remove(&key);
        }
        if elements(&shape) == Some(0) && !parts.is_empty() {
            return Err("it has no elements, and a part of it has".into());
        }
        Ok(TensorMeta { name: name.to_owned(), dtype, shape, parts })
    }

    /// Reads the dtype, which comes first in the tuple of a tensor's properties.
    fn dtype(&self, properties: Id) -> Result<Result<Scalar, String>, String> {
        self.of_class(properties, &[PROPERTIES, OLD_PROPERTIES])?;
        let state = self.pickle.state(properties).and_then(|s| self.pickle.items(s)).ok_or("its properties have no dtype")?;
        let [dtype, layout, ..] = state else { return Err("its properties have no dtype".into()) };
        let dtype = self.pickle.symbol(*dtype).filter(|s| s.0 == "torch").ok_or("its dtype is none")?;
        let layout = self.pickle.made(*layout).filter(|m| m.0 == LAYOUT).and_then(|m| self.pickle.text(*m.1.first()?)).unwrap_or("none");
        if layout != "torch.strided" {
            return Err(format!("its layout is {layout:.40}; torch.strided is read alone"));
        }
        Ok(Scalar::named(dtype.1).ok_or_else(|| format!("torch.{}", dtype.1)))
    }

    fn of_class(&self, id: Id, classes: &[Symbol]) -> Result<(), String> {
        let found = self.pickle.made(id).filter(|made| classes.contains(&made.0));
        found.map(drop).ok_or_else(|| format!("something else is in the place of a {}", classes[0].1))
    }

    /// A field of an object whose state is a dict, if it has that field.
    fn optional(&self, object: Id, name: &str) -> Result<Option<Id>, String> {
        let fields = self.pickle.state(object).and_then(|s| self.pickle.entries(s)).ok_or("an object has no fields")?;
        if fields.len() > MOST_FIELDS {
            return Err(format!("an object has {} fields", fields.len()));
        }
        let mut found = fields.iter().filter(|f| self.pickle.text(f.0) == Some(name)).map(|f| f.1);
        let first = found.next();
        if found.next().is_some() {
            return Err(format!("an object has two fields {name}"));
        }
        Ok(first.filter(|id| *self.pickle.node(*id) != crate::pickle::Node::None))
    }

    fn field(&self, object: Id, name: &str) -> Result<Id, String> {
        self.optional(object, name)?.ok_or_else(|| format!("an object has no {name}"))
    }

    fn name(&self, id: Id) -> Result<&'a str, String> {
        self.pickle.text(id).filter(|t| t.len() <= MOST_NAME).ok_or_else(|| format!("a name is no text of {MOST_NAME} bytes or less"))
    }

    /// A `torch.Size`, or a tuple.
    fn sizes(&self, id: Id) -> Result<Vec<u64>, String> {
        let of_size = self.pickle.made(id).filter(|m| m.0 == SIZE).and_then(|m| m.1.first().copied());
        let items = self.pickle.items(of_size.unwrap_or(id)).filter(|i| i.len() <= MOST_DIMS);
        let counts = items.and_then(|i| i.iter().map(|n| self.pickle.count(*n)).collect());
        counts.ok_or_else(|| format!("sizes are no tuple of {MOST_DIMS} counts or fewer"))
    }
}

#[cfg(test)]
mod tests;
