//! Every input that is kept, through its target: seeds, and whatever once broke something.

use std::fs;
use std::path::Path;

/// Larger seeds are damaged at one place alone: whole models take their time.
const SMALL: usize = 1024;

#[test]
fn what_is_kept_breaks_nothing() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    let seeds = fuzz::seeds::all().expect("seeds");
    let mut seen = vec![];
    for (name, check) in fuzz::TARGETS {
        for (_, bytes) in seeds.iter().filter(|s| s.0 == name) {
            check(bytes);
            // Each input is also checked truncated, and with one bit flipped, at a few offsets.
            for k in 1..if bytes.len() < SMALL { 8 } else { 2 } {
                let at = bytes.len() * k / 8;
                check(&bytes[..at]);
                let mut turned = bytes.clone();
                turned.get_mut(at).into_iter().for_each(|b| *b ^= 1 << k);
                check(&turned);
            }
            seen.push(name);
        }
        for file in fs::read_dir(corpus.join(name)).into_iter().flatten() {
            check(&fs::read(file.expect("a file").path()).expect("its bytes"));
        }
    }
    assert!(fuzz::TARGETS.iter().all(|t| seen.contains(&t.0)), "a target has no seed: {seen:?}");
}

#[test]
fn every_corpus_has_a_target() {
    for folder in fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus")).expect("the corpora") {
        let name = folder.expect("a folder").file_name();
        assert!(fuzz::target(&name.to_string_lossy()).is_some(), "{name:?}");
    }
}
