//! `'dir/part-*'` in a blend: all data sets whose prefixes, or files, the pattern matches, each with its part of the
//! weight.
//!
//! A part is by tokens, so that a shard is read as often as the others. Without a weight, a pattern makes a blend of
//! all that are named, by their tokens.

use crate::blend::{Blend, MOST};
use crate::indexed::{bare, paths};
use crate::mask::is_mask;
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Why a pattern names no data sets.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum ShardsError {
    #[error("`{}`: {cause}", .at.display())]
    Io { at: PathBuf, cause: io::Error },
    #[error("no data set matches `{}`: there is no such .idx and .bin", .0.display())]
    None(PathBuf),
    #[error("`{}` has no {missing} beside it: the data set is not whole, or still being written", .there.display())]
    Half { there: PathBuf, missing: &'static str },
    #[error("{0} data sets, and a blend has at most {MOST}: join some of them")]
    Many(usize),
    #[error("`{}`: {why}; `*` stands for any letters of a name, `?` for one, `[0-9]` for one of these", .pattern.display())]
    Pattern { pattern: PathBuf, why: String },
}

/// Puts the data sets themselves in the places of patterns, sorted by name.
///
/// # Errors
/// A pattern that nothing matches, or half a data set; more data sets than a blend has; a folder that cannot be read.
pub fn expand(blend: Blend) -> Result<Blend, ShardsError> {
    if !blend.prefixes.iter().any(|p| is_pattern(p)) {
        return Ok(blend);
    }
    let Blend { prefixes, weights } = blend;
    let mut out = Blend { prefixes: vec![], weights: Some(vec![]) };
    for (k, prefix) in prefixes.into_iter().enumerate() {
        let found = if is_pattern(&prefix) { matching(&prefix)? } else { vec![prefix] };
        let sizes = found.iter().map(|p| bytes(p)).collect::<Result<Vec<f64>, _>>()?;
        let all: f64 = sizes.iter().sum();
        let share = |size: f64| match &weights {
            Some(weights) => weights[k] * size / all,
            None => size,
        };
        // A data set without tokens gets no share.
        for (prefix, size) in found.into_iter().zip(sizes).filter(|(_, size)| *size > 0.0) {
            out.prefixes.push(prefix);
            out.weights.get_or_insert_default().push(share(size));
        }
    }
    if out.prefixes.len() > MOST { Err(ShardsError::Many(out.prefixes.len())) } else { Ok(out) }
}

/// A data set whose own name has such letters is no pattern.
fn is_pattern(prefix: &Path) -> bool {
    let letters = prefix.as_os_str().as_encoded_bytes();
    letters.iter().any(|b| b"*?[".contains(b)) && !paths(&bare(prefix)).1.exists()
}

/// The prefixes that a pattern matches, in order.
fn matching(pattern: &Path) -> Result<Vec<PathBuf>, ShardsError> {
    let (bin, idx) = paths(&bare(pattern));
    let wrong = |why: String| ShardsError::Pattern { pattern: pattern.into(), why };
    let options = glob::MatchOptions { require_literal_separator: true, require_literal_leading_dot: true, ..Default::default() };
    let files = |of: &Path| -> Result<BTreeSet<PathBuf>, ShardsError> {
        let of = of.to_str().ok_or_else(|| wrong("it is not UTF-8".into()))?;
        let found = glob::glob_with(of, options).map_err(|e| wrong(e.to_string()))?;
        let found =
            found.map(|f| f.map(|f| bare(&f)).map_err(|e| ShardsError::Io { at: e.path().into(), cause: io::Error::other(e.error().to_string()) }));
        // A mask lies beside its data set and is no data set of its own.
        found.filter(|f| !f.as_ref().is_ok_and(|f| is_mask(f))).collect()
    };
    let (bins, indices) = (files(&bin)?, files(&idx)?);
    if let Some(prefix) = bins.difference(&indices).next() {
        return Err(ShardsError::Half { there: paths(prefix).0, missing: ".idx" });
    }
    if let Some(prefix) = indices.difference(&bins).next() {
        return Err(ShardsError::Half { there: paths(prefix).1, missing: ".bin" });
    }
    if bins.is_empty() { Err(ShardsError::None(pattern.into())) } else { Ok(bins.into_iter().collect()) }
}

fn bytes(prefix: &Path) -> Result<f64, ShardsError> {
    let (bin, _) = paths(prefix);
    fs::metadata(&bin).map(|about| about.len() as f64).map_err(|cause| ShardsError::Io { at: bin, cause })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_stands_for_its_data_sets_by_their_size() {
        let folder = tempfile::tempdir().expect("a folder");
        let write = |name: &str, bytes: usize| fs::write(folder.path().join(name), vec![0; bytes]).expect("written");
        for (name, bytes) in [("wiki-0", 10), ("wiki-1", 30), ("wiki-2", 0), ("code", 8), ("co[de]", 6)] {
            write(&format!("{name}.bin"), bytes);
            write(&format!("{name}.idx"), 1);
        }
        let at = |name: &str| folder.path().join(name);
        // This is the mask of `wiki-0`, and no data set.
        write("wiki-0.mask.bin", 5);
        write("wiki-0.mask.idx", 5);
        let blend = |words: &[(f64, &str)]| {
            let (weights, prefixes) = words.iter().map(|(w, p)| (*w, at(p))).unzip();
            Blend { prefixes, weights: Some(weights) }
        };
        let expanded = expand(blend(&[(0.8, "wiki-*.bin"), (0.2, "code")])).expect("a blend");
        assert_eq!(expanded, blend(&[(0.8 * 10.0 / 40.0, "wiki-0"), (0.8 * 30.0 / 40.0, "wiki-1"), (0.2 * 8.0 / 8.0, "code")]));
        let plain = |names: &[&str]| Blend { prefixes: names.iter().map(|n| at(n)).collect(), weights: None };
        assert_eq!(expand(plain(&["*i-[1-3]", "code"])).expect("a blend"), blend(&[(30.0, "wiki-1"), (8.0, "code")]));
        assert_eq!(expand(plain(&["co[de]"])).expect("a name"), plain(&["co[de]"]));
        let refused = |name: &str| expand(plain(&[name])).expect_err("refused").to_string();
        assert!(refused("books*").contains("no data set matches"));
        assert!(refused("wiki[").contains("Pattern syntax error"));
        write("wiki-9.bin", 5);
        assert!(refused("wiki-*").contains("wiki-9.bin` has no .idx beside it"));
    }
}
