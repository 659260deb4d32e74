//! Writing a checkpoint that PyTorch loads: every tensor one item, in f32, under its name.

use super::dtype::Scalar;
use super::item::{HOOKS, REBUILD};
use super::metadata::{BYTES, CHUNK, INDEX, LAYOUT, MEMORY_FORMAT, METADATA as CLASS, PROPERTIES, SIZE, STORAGE, TENSOR};
use super::{METADATA, RunMetadata};
use crate::host::Whole;
use crate::pickle::Writer;
use ir::provenance::KEY;
use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

/// The only file with items.
const ITEMS: &str = "__0_0.distcp";
/// What PyTorch writes, and reads from 2.0 on.
const VERSION: &str = "1.0.0";
/// Elements that are written at a time.
const CHUNK_ELEMENTS: u64 = 1 << 16;
/// Data of an item begin at a multiple of it, as PyTorch's do.
const ALIGNED: u16 = 64;
/// Bytes of a record from which on zip files need longer fields, less what is around it.
const LARGE: u64 = (1 << 32) - (1 << 16);

/// An item that was written; of a tensor with its shape.
struct Written<'a> {
    name: &'a str,
    shape: Option<&'a [u64]>,
    byte: u64,
    bytes: u64,
}

/// Writes tensors, and what is said of their run, into a directory that is empty. Takes some hundred KiB of memory,
/// whatever their size.
///
/// # Errors
/// What the file system says.
pub fn write<'a>(dir: &Path, tensors: impl Iterator<Item = (&'a str, &'a [u64], &'a dyn Whole)>, about: Option<&RunMetadata>) -> io::Result<()> {
    let file = File::create_new(dir.join(ITEMS))?;
    let (mut written, mut end) = (vec![], 0);
    for (name, shape, values) in tensors {
        let elements = shape.iter().product::<u64>();
        let bytes = item(&file, end, &tensor_pickle(shape, elements), Some((elements, values)))?;
        written.push(Written { name, shape: Some(shape), byte: end, bytes });
        end += bytes;
    }
    if let Some(about) = about {
        let mut text = Writer::new();
        text.text(&serde_json::to_string(about).expect("invariant: plain data with text keys"));
        let bytes = item(&file, end, &text.finish(), None)?;
        written.push(Written { name: KEY, shape: None, byte: end, bytes });
    }
    file.sync_all()?;
    let mut metadata = File::create_new(dir.join(METADATA))?;
    metadata.write_all(&metadata_pickle(&written))?;
    metadata.sync_all()?;
    File::open(dir)?.sync_all()
}

/// Writes an item at a byte of a file, and gives its length.
fn item(file: &File, base: u64, pickle: &[u8], data: Option<(u64, &dyn Whole)>) -> io::Result<u64> {
    let plain = SimpleFileOptions::default().compression_method(CompressionMethod::Stored).with_alignment(ALIGNED);
    let mut zip = ZipWriter::new(Section { file, base, at: 0 });
    let mut record = |name: &str, bytes: &[u8]| {
        zip.start_file(format!("archive/{name}"), plain)?;
        zip.write_all(bytes)
    };
    record("data.pkl", pickle)?;
    record("byteorder", b"little")?;
    record("version", b"3\n")?;
    if let Some((elements, values)) = data {
        zip.start_file("archive/data/0", plain.large_file(elements * Scalar::F32.bytes() >= LARGE))?;
        let (mut numbers, mut bytes) = (vec![], vec![]);
        for from in (0..elements).step_by(CHUNK_ELEMENTS as usize) {
            numbers.resize((elements - from).min(CHUNK_ELEMENTS) as usize, 0.0);
            values.read(from, &mut numbers);
            bytes.clear();
            bytes.extend(numbers.iter().flat_map(|x| (*x as f32).to_le_bytes()));
            zip.write_all(&bytes)?;
        }
    }
    let mut section = zip.finish()?;
    section.seek(SeekFrom::End(0))
}

/// A contiguous tensor of f32.
fn tensor_pickle(shape: &[u64], elements: u64) -> Vec<u8> {
    let mut w = Writer::new();
    w.call(REBUILD, |w| {
        w.tuple(|w| {
            w.outside(|w| {
                w.tuple(|w| {
                    w.text("storage");
                    w.symbol(("torch", Scalar::F32.names().1));
                    w.text("0");
                    w.text("cpu");
                    w.count(elements);
                });
            });
            w.count(0);
            w.counts(shape);
            w.counts(&row_major(shape));
            w.bool(false);
            w.call(HOOKS, |w| w.counts(&[]));
        });
    });
    w.finish()
}

fn row_major(shape: &[u64]) -> Vec<u64> {
    let mut strides: Vec<u64> = shape.iter().rev().scan(1, |next, n| Some(std::mem::replace(next, *next * n.max(&1)))).collect();
    strides.reverse();
    strides
}

fn metadata_pickle(written: &[Written]) -> Vec<u8> {
    let mut w = Writer::new();
    w.object(CLASS, |w| {
        w.dict(|w| {
            w.text("state_dict_metadata");
            w.dict(|w| written.iter().for_each(|item| described(w, item)));
            // This maps flat names to paths of nested states; all states here are flat.
            w.text("planner_data");
            w.dict(|w| {
                for item in written {
                    w.text(item.name);
                    w.tuple(|w| w.text(item.name));
                }
            });
            w.text("storage_data");
            w.dict(|w| written.iter().for_each(|item| stored(w, item)));
            w.text("storage_meta");
            w.none();
            w.text("version");
            w.text(VERSION);
        });
    });
    w.finish()
}

/// What an item is.
fn described(w: &mut Writer, item: &Written) {
    w.text(item.name);
    let Some(shape) = item.shape else {
        w.object(BYTES, |w| w.dict(|_| ()));
        return;
    };
    w.object(TENSOR, |w| {
        w.dict(|w| {
            w.text("properties");
            w.object(PROPERTIES, |w| {
                // Strides are left out, as PyTorch before 2.9 does not take them.
                w.tuple(|w| {
                    w.symbol(("torch", Scalar::F32.names().0));
                    w.call(LAYOUT, |w| w.tuple(|w| w.text("torch.strided")));
                    w.bool(false);
                    w.call(MEMORY_FORMAT, |w| w.counts(&[0]));
                    w.bool(false);
                });
            });
            w.text("size");
            size(w, shape);
            w.text("chunks");
            w.list(|w| {
                w.object(CHUNK, |w| {
                    w.dict(|w| {
                        w.text("offsets");
                        size(w, &vec![0; shape.len()]);
                        w.text("sizes");
                        size(w, shape);
                    });
                });
            });
        });
    });
}

/// Where an item is.
fn stored(w: &mut Writer, item: &Written) {
    w.object(INDEX, |w| {
        w.dict(|w| {
            w.text("fqn");
            w.text(item.name);
            w.text("offset");
            match item.shape {
                Some(shape) => size(w, &vec![0; shape.len()]),
                None => w.none(),
            }
            w.text("index");
            match item.shape {
                Some(_) => w.count(0),
                None => w.none(),
            }
        });
    });
    w.object(STORAGE, |w| {
        w.dict(|w| {
            w.text("relative_path");
            w.text(ITEMS);
            w.text("offset");
            w.count(item.byte);
            w.text("length");
            w.count(item.bytes);
        });
    });
}

fn size(w: &mut Writer, sizes: &[u64]) {
    w.call(SIZE, |w| w.tuple(|w| w.counts(sizes)));
}

/// A file from some byte on, which nobody else writes.
struct Section<'f> {
    file: &'f File,
    base: u64,
    at: u64,
}

impl Write for Section<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.file.write_at(bytes, self.base + self.at)?;
        self.at += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Seek for Section<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let outside = || io::Error::from(io::ErrorKind::InvalidInput);
        let at = match to {
            SeekFrom::Start(n) => Some(n),
            SeekFrom::Current(n) => self.at.checked_add_signed(n),
            SeekFrom::End(n) => self.file.metadata()?.len().checked_sub(self.base).ok_or_else(outside)?.checked_add_signed(n),
        };
        self.at = at.ok_or_else(outside)?;
        Ok(self.at)
    }
}
