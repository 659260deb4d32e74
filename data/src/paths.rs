//! Data sets named by a pattern: `dir/part-*` for all of `dir/part-00`, `dir/part-01` and so on.

use crate::blend::MOST;
use crate::indexed::{bare, paths};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Why a pattern names no data sets.
#[derive(Debug, thiserror::Error)]
pub enum PathsError {
    #[error("`{}`: {cause}", .folder.display())]
    Io { folder: PathBuf, cause: io::Error },
    #[error("no data set matches `{0}`: there is no such .idx and .bin")]
    Nothing(String),
    #[error("`{}` has no {missing} beside it: the data set is not whole, or still being written", .there.display())]
    Half { there: PathBuf, missing: &'static str },
    #[error("`{pattern}` matches {found} data sets, and a blend has at most {MOST}: join some of them")]
    Many { pattern: String, found: usize },
    #[error("`{pattern}`: {what}; `*` stands for any letters of a name, `?` for one, `[0-9]` for one of these")]
    Pattern { pattern: String, what: &'static str },
}

/// The prefixes of all data sets that a pattern matches, sorted by their bytes. A word without `*`, `?` and `[` is one
/// prefix, which need not be there.
///
/// The pattern is one of prefixes, or of their `.idx` or `.bin`. `*` does not match a `/`, nor a name's leading dot.
///
/// # Errors
/// Nothing matches; an `.idx` without its `.bin`, or a `.bin` without its `.idx`; a folder that cannot be read.
pub fn expand(word: &str) -> Result<Vec<PathBuf>, PathsError> {
    if !word.contains(['*', '?', '[']) {
        return Ok(vec![word.into()]);
    }
    let pattern = bare(Path::new(word)).to_string_lossy().into_owned();
    let mut folders = vec![PathBuf::from(if pattern.starts_with('/') { "/" } else { "" })];
    let mut parts: Vec<&str> = pattern.split('/').filter(|p| !p.is_empty()).collect();
    let name = parts.pop().unwrap_or_default();
    for part in parts {
        let mut next = vec![];
        for folder in folders {
            if part.contains(['*', '?', '[']) {
                let names = entries(&folder)?.into_iter();
                let matching = names.filter(|n| matches(part, n).unwrap_or(false)).map(|n| folder.join(n));
                next.extend(matching.filter(|f| f.is_dir()));
            } else if folder.join(part).is_dir() {
                next.push(folder.join(part));
            }
        }
        folders = next;
    }
    // Which of its two files each prefix has.
    let mut found: BTreeMap<PathBuf, [bool; 2]> = BTreeMap::new();
    let wrong = |what| PathsError::Pattern { pattern: word.into(), what };
    matches(name, "").map_err(wrong)?;
    for folder in folders {
        for file in entries(&folder)? {
            for (which, end) in [".bin", ".idx"].into_iter().enumerate() {
                if let Some(prefix) = file.strip_suffix(end).filter(|p| matches(name, p).unwrap_or(false)) {
                    found.entry(folder.join(prefix)).or_default()[which] = true;
                }
            }
        }
    }
    for (prefix, has) in &found {
        let (bin, idx) = paths(prefix);
        match has {
            [true, true] => {}
            [true, false] => return Err(PathsError::Half { there: bin, missing: ".idx" }),
            [false, _] => return Err(PathsError::Half { there: idx, missing: ".bin" }),
        }
    }
    match found.len() {
        0 => Err(PathsError::Nothing(word.into())),
        many if many > MOST => Err(PathsError::Many { pattern: word.into(), found: many }),
        _ => Ok(found.into_keys().collect()),
    }
}

/// As [`expand`], of all words of a blend without weights: the data sets of each pattern stand where it stood.
///
/// # Errors
/// As [`expand`]; more data sets than a blend has.
pub fn expand_all(words: &[String]) -> Result<Vec<PathBuf>, PathsError> {
    let mut all = vec![];
    for word in words {
        all.extend(expand(word)?);
    }
    if all.len() > MOST {
        return Err(PathsError::Many { pattern: words.join(" "), found: all.len() });
    }
    Ok(all)
}

/// The names in a folder that are UTF-8.
fn entries(folder: &Path) -> Result<Vec<String>, PathsError> {
    let here = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let io = |cause| PathsError::Io { folder: here.into(), cause };
    let read = fs::read_dir(here).map_err(io)?;
    let names = read.map(|entry| entry.map(|e| e.file_name().into_string().ok())).collect::<io::Result<Vec<_>>>();
    Ok(names.map_err(io)?.into_iter().flatten().collect())
}

/// Whether a name is one that a pattern stands for, or what is wrong with the pattern.
fn matches(pattern: &str, name: &str) -> Result<bool, &'static str> {
    let (pattern, name): (Vec<char>, Vec<char>) = (pattern.chars().collect(), name.chars().collect());
    let hidden = name.first() == Some(&'.') && pattern.first() != Some(&'.');
    // Which beginnings of the name the pattern so far stands for.
    let mut reached = vec![false; name.len() + 1];
    reached[0] = true;
    let mut at = 0;
    while at < pattern.len() {
        let mut next = vec![false; name.len() + 1];
        if pattern[at] == '*' {
            let mut any = false;
            for (to, from) in next.iter_mut().zip(&reached) {
                any |= from;
                *to = any;
            }
            at += 1;
        } else {
            let (set, after) = set(&pattern, at)?;
            for k in 0..name.len() {
                next[k + 1] = reached[k] && set.has(name[k]);
            }
            at = after;
        }
        reached = next;
    }
    Ok(reached[name.len()] && !hidden)
}

/// Letters of which one may stand at a place.
struct Set {
    ranges: Vec<(char, char)>,
    others: bool,
}

impl Set {
    fn has(&self, letter: char) -> bool {
        self.ranges.iter().any(|(from, to)| (*from..=*to).contains(&letter)) != self.others
    }
}

/// The letters that a place of a pattern stands for, and where the next begins.
fn set(pattern: &[char], at: usize) -> Result<(Set, usize), &'static str> {
    match pattern[at] {
        '?' => Ok((Set { ranges: vec![], others: true }, at + 1)),
        '[' => {
            let others = matches!(pattern.get(at + 1), Some('!' | '^'));
            let begin = at + 1 + usize::from(others);
            // A bracket that stands first is one of the letters.
            let close = pattern.iter().skip(begin + 1).position(|c| *c == ']').ok_or("its `[` has no `]`")? + begin + 1;
            let (mut ranges, mut k) = (vec![], begin);
            while k < close {
                let (last, after) = match pattern[k + 1..close] {
                    ['-', last, ..] => (last, k + 3),
                    _ => (pattern[k], k + 1),
                };
                ranges.push((pattern[k], last));
                k = after;
            }
            Ok((Set { ranges, others }, close + 1))
        }
        letter => Ok((Set { ranges: vec![(letter, letter)], others: false }, at + 1)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(files: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("a folder");
        for file in files {
            let path = folder.path().join(file);
            fs::create_dir_all(path.parent().expect("a folder")).and_then(|()| fs::write(path, "")).expect("written");
        }
        folder
    }

    fn found(folder: &tempfile::TempDir, word: &str) -> Result<Vec<String>, String> {
        let begin = format!("{}/", folder.path().display());
        let all = expand(&format!("{begin}{word}")).map_err(|e| e.to_string().replace(&begin, ""))?;
        Ok(all.iter().map(|p| p.display().to_string().replace(&begin, "")).collect())
    }

    #[test]
    fn a_pattern_gives_its_data_sets_sorted() {
        let names = ["part-2", "part-10", "part-1", "other", "a/x", "b/x", "b/.x"];
        let files: Vec<String> = names.iter().flat_map(|n| [format!("{n}.bin"), format!("{n}.idx")]).collect();
        let beside = ["part-1.state.part", "part-3.txt", "part-1.cache/train.order"].map(String::from);
        let folder = folder(&files.iter().chain(&beside).map(String::as_str).collect::<Vec<_>>());
        assert_eq!(found(&folder, "part-*"), Ok(["part-1", "part-10", "part-2"].map(String::from).to_vec()));
        assert_eq!(found(&folder, "part-*.bin"), found(&folder, "part-*"));
        assert_eq!(found(&folder, "part-?"), Ok(["part-1", "part-2"].map(String::from).to_vec()));
        assert_eq!(found(&folder, "part-[!2-9]*"), Ok(["part-1", "part-10"].map(String::from).to_vec()));
        assert_eq!(found(&folder, "*/*"), Ok(["a/x", "b/x"].map(String::from).to_vec()));
        assert_eq!(found(&folder, "not-there"), Ok(vec!["not-there".into()]), "a word without a pattern is itself");
        let words = ["b/x", "part-?"].map(|w| format!("{}/{w}", folder.path().display()));
        assert_eq!(expand_all(&words).expect("data sets").len(), 3);
    }

    #[test]
    fn what_names_no_data_sets_is_refused() {
        let folder = folder(&["x-1.bin", "x-1.idx", "x-2.bin", "y-1.idx"]);
        assert_eq!(found(&folder, "z*"), Err("no data set matches `z*`: there is no such .idx and .bin".into()));
        assert_eq!(found(&folder, "no/z*"), Err("no data set matches `no/z*`: there is no such .idx and .bin".into()));
        let half = |there, missing| Err(format!("`{there}` has no {missing} beside it: the data set is not whole, or still being written"));
        assert_eq!(found(&folder, "x*"), half("x-2.bin", ".idx"));
        assert_eq!(found(&folder, "y*"), half("y-1.idx", ".bin"));
        let says = "`x[1`: its `[` has no `]`; `*` stands for any letters of a name, `?` for one, `[0-9]` for one of these";
        assert_eq!(found(&folder, "x[1"), Err(says.into()));
    }

    #[test]
    fn patterns_stand_for_names() {
        for (pattern, name, is) in [
            ("*", "", true),
            ("a*b*c", "axxbyyc", true),
            ("a*b*c", "axxbyy", false),
            ("[]-]", "-", true),
            ("[]-]", "]", true),
            ("[^a]", "é", true),
            ("[a-c]", "d", false),
            ("*", ".hidden", false),
            (".*", ".hidden", true),
        ] {
            assert_eq!(matches(pattern, name), Ok(is), "{pattern} {name}");
        }
    }
}
