//! Checkpoints of PyTorch's (`torch.distributed.checkpoint`, DCP), which torchtitan, FSDP and Megatron write.
//!
//! ```text
//! DIR/.metadata      which parts of which tensor lie where: a pickle
//!     __0_0.distcp   items of rank 0, one after the other, each what torch.save writes
//!     __1_0.distcp
//! ```
//!
//! Pickles are read as data ([`crate::pickle`]). Before anything is read of a tensor, its parts are known to be
//! each element once ([`Tiling`]), and each part to lie in its file as it should ([`Item`]). Elements are then
//! decoded where they are asked for. There are no hashes, only the checksums of zip files (CRC-32), which
//! [`Distributed::verify`] looks at.
//!
//! What mcc writes has one item more, [`KEY`]: where the run stood, and its model.

mod dtype;
mod item;
mod metadata;
mod tiling;
mod write;

pub(super) use write::write;

use super::CheckpointError;
use crate::conditions::Conditions;
use crate::host::Whole;
use crate::weights::{Content, FileTensor, Mark, WeightsFault};
use dtype::Scalar;
use ir::provenance::{KEY, Provenance};
use item::{Item, is_item};
use memmap2::Mmap;
use metadata::{ItemLocation, Metadata};
use serde::{Deserialize, Serialize};
use std::cell::OnceCell;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use tiling::Tiling;

/// The file that makes a directory such a checkpoint.
pub const METADATA: &str = ".metadata";

/// Whether a directory is such a checkpoint.
pub fn is_distributed(dir: &Path) -> bool {
    dir.join(METADATA).is_file()
}

/// What mcc says of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunMetadata {
    #[serde(flatten)]
    pub model: Provenance,
    /// State of the run, in a checkpoint that a run resumes from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<Mark>,
    /// As in a manifest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub conditions: Option<Conditions>,
    pub artifact: String,
    pub mesh: Vec<(String, u64)>,
}

/// An opened checkpoint, of which every part is where it should be.
pub struct Distributed {
    /// What mcc says of the run and its model; none without the item [`KEY`].
    pub about: Option<RunMetadata>,
    /// The names of what is no tensor, and not mcc's.
    pub others: Vec<String>,
    dir: PathBuf,
    metadata: Metadata,
    tensors: Vec<TensorResult>,
    files: Rc<Vec<Mmap>>,
}

/// A tensor that can be read, or what its elements are.
type TensorResult = Result<Rc<ChunkedTensor>, String>;

/// Where the elements of a tensor are.
struct ChunkedTensor {
    dtype: Scalar,
    /// How the tensor is cut into parts; none if it has no elements.
    tiling: Option<Tiling>,
    parts: Vec<TensorChunk>,
}

struct TensorChunk {
    /// Offset in the file of its item, in bytes.
    byte: u64,
    /// Its item, and whether that has the checksums that it says, once it was looked at.
    item: ItemLocation,
    is_sound: OnceCell<Result<(), String>>,
    sizes: Vec<u64>,
    /// Stride of each dim; none if row-major.
    strides: Option<Vec<u64>>,
}

impl Distributed {
    /// # Errors
    /// There is none, or it is damaged, or of a kind that is not read.
    pub fn open(dir: &Path) -> Result<Distributed, CheckpointError> {
        let malformed = |what: String| CheckpointError::Malformed { dir: dir.to_path_buf(), what };
        let map = |name: &str| {
            let handle = File::open(dir.join(name))?;
            if !handle.metadata()?.is_file() {
                return Err(std::io::Error::other("it is no file"));
            }
            // SAFETY: the file is only read; if another process shortens it meanwhile, this one ends.
            unsafe { Mmap::map(&handle) }
        };
        let map = |name: &str| map(name).map_err(|e| malformed(format!("{name}: {e}")));
        let metadata = Metadata::read(&map(METADATA)?).map_err(|what| malformed(format!("{METADATA}: {what}")))?;
        let files = metadata.files.iter().map(|f| map(f)).collect::<Result<Vec<_>, _>>()?;
        let wrong = |name: &str, what: String| malformed(format!("`{name}`: {what}"));
        apart(&metadata, &files).map_err(malformed)?;
        let mut tensors = vec![];
        for tensor in &metadata.tensors {
            let Ok(dtype) = &tensor.dtype else {
                tensors.push(Err(tensor.dtype.clone().expect_err("invariant: it is none")));
                continue;
            };
            let mut parts = vec![];
            for (block, place) in &tensor.parts {
                let layout = opened(&metadata, &files, place).and_then(|mut i| i.tensor(*dtype, &block.sizes));
                let layout = layout.map_err(|what| wrong(&tensor.name, format!("its part in {}: {what}", metadata.files[place.file])))?;
                parts.push(TensorChunk {
                    byte: place.byte + layout.byte,
                    item: *place,
                    is_sound: OnceCell::new(),
                    sizes: block.sizes.clone(),
                    strides: layout.strides,
                });
            }
            let blocks = tensor.parts.iter().map(|p| p.0.clone()).collect();
            let tiling =
                if tensor.shape.contains(&0) { None } else { Some(Tiling::new(&tensor.shape, blocks).map_err(|what| wrong(&tensor.name, what))?) };
            tensors.push(Ok(Rc::new(ChunkedTensor { dtype: *dtype, tiling, parts })));
        }
        let mut about = None;
        let mut others = vec![];
        for (name, place) in &metadata.others {
            if name != KEY {
                others.push(name.clone());
                continue;
            }
            let text = opened(&metadata, &files, place).and_then(|mut i| i.text());
            let parsed = text.and_then(|t| serde_json::from_str(t).map_err(|e| format!("what it says of its run cannot be read: {e}")));
            about = Some(parsed.map_err(|what| wrong(name, what))?);
        }
        Ok(Distributed { about, others, dir: dir.to_path_buf(), metadata, tensors, files: Rc::new(files) })
    }

    /// All that it holds; what is wrong with that is told when it is read.
    pub(crate) fn content(&self, wrong: &Rc<OnceCell<WeightsFault>>) -> Content {
        let offer = |(meta, parts): (&metadata::TensorMeta, &TensorResult)| {
            let whole = |parts: &Rc<ChunkedTensor>| {
                Box::new(Tiled { parts: parts.clone(), files: self.files.clone(), name: meta.name.clone(), wrong: wrong.clone() }) as Box<dyn Whole>
            };
            FileTensor { name: meta.name.clone(), shape: meta.shape.clone(), values: parts.as_ref().map(whole).map_err(Clone::clone) }
        };
        let tensors = self.metadata.tensors.iter().zip(&self.tensors).map(offer).collect();
        let run = self.about.as_ref().and_then(|a| a.run);
        Content {
            tensors,
            run,
            model: self.about.as_ref().map(|a| a.model.clone()),
            conditions: self.about.as_ref().and_then(|a| a.conditions.clone()),
            others: self.others.clone(),
        }
    }

    /// How many there are.
    pub fn tensors(&self) -> usize {
        self.tensors.len()
    }

    /// Bytes of all its files with items.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|f| f.len() as u64).sum()
    }

    /// Whether all bytes have the checksums that their zip files say, and all tensors can be read.
    ///
    /// # Errors
    /// What is not so.
    pub fn verify(&self) -> Result<(), Vec<String>> {
        let named = |what: String| format!("the checkpoint `{}`: {what}", self.dir.display());
        let mut damage = vec![];
        for (meta, tensor) in self.metadata.tensors.iter().zip(&self.tensors) {
            if let Err(dtype) = tensor {
                damage.push(named(format!("`{}` is {dtype}, which is not read", meta.name)));
            }
        }
        let tensors = self.metadata.tensors.iter().flat_map(|t| t.parts.iter().map(|p| (&t.name, p.1)));
        let others = self.metadata.others.iter().map(|(name, place)| (name, *place));
        for (name, place) in tensors.chain(others) {
            let bytes = bytes(&self.files, &place);
            // An entry that is no tensor may hold any bytes.
            if is_item(bytes)
                && let Err(what) = Item::open(bytes).and_then(|mut i| i.check())
            {
                damage.push(named(format!("{}, `{name}`: {what}", self.metadata.files[place.file])));
            }
        }
        if damage.is_empty() { Ok(()) } else { Err(damage) }
    }
}

/// Items are within their files, and none shares bytes with another: all are looked at in time that grows with
/// the files.
fn apart(metadata: &Metadata, files: &[Mmap]) -> Result<(), String> {
    let tensors = metadata.tensors.iter().flat_map(|t| t.parts.iter().map(|p| (p.1, &t.name)));
    let mut places: Vec<(ItemLocation, &String)> = tensors.chain(metadata.others.iter().map(|(name, place)| (*place, name))).collect();
    places.sort_by_key(|(p, _)| (p.file, p.byte));
    let mut end = (0, 0);
    for (place, name) in places {
        let (file, len) = (&metadata.files[place.file], files[place.file].len() as u64);
        let next = place.byte.checked_add(place.bytes).filter(|next| *next <= len);
        let next = next.ok_or_else(|| format!("`{name}` is said to be {} bytes at {} of {file}, which has {len}", place.bytes, place.byte))?;
        if place.file == end.0 && place.byte < end.1 {
            return Err(format!("`{name}` shares bytes of {file} with another item"));
        }
        end = (place.file, next);
    }
    Ok(())
}

fn bytes<'f>(files: &'f [Mmap], place: &ItemLocation) -> &'f [u8] {
    &files[place.file][place.byte as usize..][..place.bytes as usize]
}

fn opened<'f>(metadata: &Metadata, files: &'f [Mmap], place: &ItemLocation) -> Result<Item<'f>, String> {
    let file = &files[place.file];
    let header = file.first_chunk().map(|n| u64::from_le_bytes(*n));
    if metadata.files[place.file].ends_with(".safetensors")
        || !is_item(file) && header.is_some_and(|n| n < file.len() as u64) && file.get(8) == Some(&b'{')
    {
        return Err(
            "it is a safetensors file (HuggingFaceStorageWriter or SerializationFormat.SAFETENSORS); mcc reads what torch.save writes, which is FileSystemWriter's default".into(),
        );
    }
    Item::open(bytes(files, place))
}

/// A tensor of blocks in several files.
struct Tiled {
    parts: Rc<ChunkedTensor>,
    files: Rc<Vec<Mmap>>,
    name: String,
    wrong: Rc<OnceCell<WeightsFault>>,
}

impl Whole for Tiled {
    fn read(&self, at: u64, out: &mut [f64]) {
        let ChunkedTensor { dtype, tiling: Some(tiling), parts } = &*self.parts else { return };
        let (wanted, width, mut done) = (out.len() as u64, dtype.bytes() as usize, 0);
        let mut put = |bytes: &[u8]| {
            let element = || at + done as u64;
            let x = dtype.decode(bytes).unwrap_or_else(|| {
                // Only the first fault is kept.
                let _ = self.wrong.set(WeightsFault::Inexact { tensor: self.name.clone(), element: element() });
                0.0
            });
            // Values are stored as f32, in which larger ones are infinite.
            if !(x as f32).is_finite() {
                let _ = self.wrong.set(WeightsFault::NotFinite { tensor: self.name.clone(), element: element(), value: x });
            }
            out[done] = x;
            done += 1;
        };
        tiling.visit(at, wanted, |number, flat, len| {
            let part = &parts[number];
            let look = || Item::open(bytes(&self.files, &part.item)).and_then(|mut item| item.check());
            if let Err(what) = part.is_sound.get_or_init(look) {
                let _ = self.wrong.set(WeightsFault::Damaged(format!("`{}` is not as it was written: {what}", self.name)));
            }
            let bytes = &self.files[part.item.file][part.byte as usize..];
            match &part.strides {
                None => bytes[flat as usize * width..][..len as usize * width].chunks_exact(width).for_each(&mut put),
                Some(strides) => {
                    for k in flat..flat + len {
                        let (mut rest, mut place) = (k, 0);
                        for (size, stride) in part.sizes.iter().zip(strides).rev() {
                            place += rest % size * stride;
                            rest /= size;
                        }
                        put(&bytes[place as usize * width..][..width]);
                    }
                }
            }
        });
    }
}

#[cfg(test)]
mod tests;
