//! Files that a run is given: weights and data.

use crate::fixture;
use ir::dim::Order;
use ir::graph::InputDefault;
use ir::op::DType;
use ir::program::{Extent, InputEntry, Interval, Job};
use runtime::checkpoint::{Distributed, METADATA, Stored};
use runtime::data::{Encoding, Spec, open_checked};
use runtime::executor::PersistentId;
use runtime::weights::Weights;
use std::fs;
use std::path::PathBuf;
use std::sync::OnceLock;
use tempfile::TempDir;

pub fn job() -> Job {
    fixture::job(&fixture::Split { microbatches: 1, pp: 1, dp: 1, tp: 1 })
}

/// [`job`] with tokens and targets `[2, 3]` below 256 in place of its inputs.
fn reader() -> Job {
    let dims = || [2, 3].map(|n| Extent { name: "d".into(), size: n, padded: n, order: Order::Plain }).to_vec();
    let entry = |name: &str, default| InputEntry {
        name: name.into(),
        dtype: DType::I32,
        dims: dims(),
        default,
        takes: Some(vec![Interval { least: 0, most: 255 }]),
    };
    Job { inputs: vec![entry("tokens", None), entry("targets", Some(InputDefault::Next(0)))], ..job() }
}

/// A file with these bytes, always the same one of this process: in memory, where the system has such a directory.
fn file(bytes: &[u8]) -> PathBuf {
    static DIR: OnceLock<TempDir> = OnceLock::new();
    let dir = DIR.get_or_init(|| tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a directory"));
    let path = dir.path().join("input");
    fs::write(&path, bytes).expect("a file");
    path
}

/// A safetensors file gives whole tensors of the job's sizes, or is refused; so is one to resume from.
pub fn weights(bytes: &[u8]) {
    let (path, job) = (file(bytes), job());
    let opened = [Weights::open(&path, &job).ok(), Weights::resume(&path, &job).ok().map(|r| r.weights)];
    for weights in opened.into_iter().flatten() {
        for (p, param) in (0..).zip(&job.params) {
            let mut all = vec![0.0; param.dims.iter().map(|d| d.size as usize).product()];
            weights.get(PersistentId::Param(p)).expect("every parameter").read(0, &mut all);
        }
    }
}

/// The file of items of a [`distributed`] checkpoint.
pub const ITEMS: &str = "__0_0.distcp";

/// A checkpoint of PyTorch's, in two files of which the first's length comes first, gives whole tensors with no
/// more elements than it has bytes, or is refused.
pub fn distributed(bytes: &[u8]) {
    let Some((len, rest)) = bytes.split_first_chunk() else { return };
    let (metadata, items) = rest.split_at(rest.len().min(u16::from_le_bytes(*len).into()));
    let dir = file(metadata).with_file_name("distributed");
    fs::create_dir_all(&dir).expect("a directory");
    fs::write(dir.join(METADATA), metadata).expect("a file");
    fs::write(dir.join(ITEMS), items).expect("a file");
    if let Ok(opened) = Distributed::open(&dir) {
        // Either result is fine: the fuzzed bytes may be damaged.
        drop(opened.verify());
    }
    let (Ok(first), Ok(second)) = (Stored::open(&dir), Stored::open(&dir)) else { return };
    assert!(first.elements() <= items.len() as u64, "{} elements", first.elements());
    if let Ok(differences) = first.differences(&second, 0.0, drop) {
        assert_eq!(differences, []);
    }
}

/// A data file gives batches whose every element is within the input's limit, or is refused.
pub fn data(bytes: &[u8]) {
    let (path, job) = (file(bytes), reader());
    let spec = Spec { input: None, file: path, encoding: Encoding::Text };
    let Ok([Some(data), _]) = open_checked(&job, Some(&[spec]), None) else { return };
    for step in 0..3 {
        let Ok(batch) = data.batch(step) else { return };
        for tensor in &batch {
            assert_eq!(tensor.data.len(), 6);
            assert!(tensor.data.iter().all(|x| (0.0..256.0).contains(x) && x.fract() == 0.0), "{:?}", tensor.data);
        }
    }
}
