//! The pickle of a checkpoint that PyTorch has written, spoilt: it is refused or read, without a panic and
//! without memory beyond a constant times its files.

use crate::{Rng, files, memory, seeds};
use ir::random::mix;
use runtime::checkpoint::Distributed;
use std::fs;
use std::path::Path;

/// Bytes of memory for each byte of the files, and for all of them.
const EACH: usize = 64;
const ALL: usize = 1 << 16;

#[test]
fn spoilt_pickles_neither_panic_nor_take_memory() {
    let dir = tempfile::tempdir().unwrap();
    for (path, bytes) in files(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/dcp")) {
        fs::write(dir.path().join(path.file_name().unwrap()), bytes).unwrap();
    }
    let path = dir.path().join(".metadata");
    let whole = fs::read(&path).unwrap();
    assert!(Distributed::open(dir.path()).is_ok());
    let (mut refused, mut read, mut largest) = (0, 0, 0);
    for seed in seeds() {
        let mut dice = Rng(mix(seed ^ 0x91c4));
        let mut spoilt = whole.clone();
        match dice.below(4) {
            0 => {
                let at = dice.below(spoilt.len());
                spoilt[at] ^= 1 << dice.below(8);
            }
            1 => dice.spoil(&mut spoilt, 8),
            2 => spoilt.truncate(dice.below(whole.len())),
            // This repeats a part of the file, for more opcodes that make and fetch nodes.
            _ => {
                let n = 1 + dice.below(whole.len() / 2);
                let (from, to) = (dice.below(whole.len() - n), dice.below(whole.len()));
                spoilt.splice(to..to, whole[from..from + n].iter().copied());
            }
        }
        fs::write(&path, &spoilt).unwrap();
        let bytes: usize = files(dir.path()).values().map(Vec::len).sum();
        let (opened, most) = memory::most(|| Distributed::open(dir.path()).map(drop));
        assert!(most <= ALL + EACH * bytes, "seed {seed}: {most} bytes of memory for {bytes} bytes of files");
        largest = largest.max(most);
        *(if opened.is_ok() { &mut read } else { &mut refused }) += 1;
    }
    println!("spoilt pickles: {refused} refused, {read} read, with {largest} bytes of memory at most");
    assert!(refused > 0);
}
