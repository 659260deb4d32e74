//! A tokenizer's files, which go along with what was made by it: beside a data set, weights and checkpoints, and
//! byte for byte from one to the next.
//!
//! | of | they are in |
//! |---|---|
//! | a data set `PREFIX` | `PREFIX.tokenizer/` |
//! | a file of weights `trained.safetensors` | `trained.tokenizer/`, or its directory |
//! | a checkpoint | its directory, or that of the checkpoints |

use crate::print::note;
use runtime::data::DataSets;
use runtime::paths::write_whole;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Files of Hugging Face's, of which each tokenizer has some. One of the first three makes a tokenizer.
pub const FILES: [&str; 11] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
];

/// The files of a tokenizer that are in a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenizerFiles {
    /// `tokenizer.json`, from which data sets are made.
    main: PathBuf,
    dir: PathBuf,
    names: Vec<&'static str>,
}

impl TokenizerFiles {
    /// The tokenizer in a directory, if there is one.
    pub fn within(dir: &Path) -> Option<TokenizerFiles> {
        let names: Vec<&str> = FILES.into_iter().filter(|name| dir.join(name).is_file()).collect();
        let is_one = names.first().is_some_and(|first| FILES[..3].contains(first));
        is_one.then(|| TokenizerFiles { main: dir.join(FILES[0]), dir: dir.to_path_buf(), names })
    }

    /// That with a `tokenizer.json`, whatever the file is called.
    pub fn of_file(file: &Path) -> TokenizerFiles {
        let dir = file.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        match TokenizerFiles::within(dir).filter(|_| file.file_name().is_some_and(|name| name == FILES[0])) {
            Some(kept) => kept,
            None => TokenizerFiles { main: file.to_path_buf(), dir: dir.to_path_buf(), names: vec![FILES[0]] },
        }
    }

    /// That of weights, or of a checkpoint.
    pub fn of_weights(weights: &Path) -> Option<TokenizerFiles> {
        let own = if weights.is_dir() { weights.to_path_buf() } else { beside(weights) };
        let parent = weights.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        TokenizerFiles::within(&own).or_else(|| TokenizerFiles::within(parent))
    }

    pub fn names(&self) -> &[&'static str] {
        &self.names
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    fn file(&self, name: &str) -> PathBuf {
        if name == FILES[0] { self.main.clone() } else { self.dir.join(name) }
    }

    /// Copies them into a directory, which is made; what is the same there stays.
    ///
    /// # Errors
    /// What the file system says.
    pub fn put(&self, dir: &Path) -> io::Result<()> {
        fs::create_dir_all(dir)?;
        for name in &self.names {
            let bytes = fs::read(self.file(name))?;
            if fs::read(dir.join(name)).ok().as_ref() != Some(&bytes) {
                write_whole(&dir.join(name), |file| file.write_all(&bytes))?;
            }
        }
        Ok(())
    }

    /// Whether they are not the same, as far as one can tell: by the bytes of `tokenizer.json`.
    pub fn differs(&self, other: &TokenizerFiles) -> bool {
        let (a, b) = (&self.main, &other.main);
        match (fs::metadata(a), fs::metadata(b)) {
            (Ok(x), Ok(y)) => x.len() != y.len() || fs::read(a).ok() != fs::read(b).ok(),
            (Err(_), _) | (_, Err(_)) => false,
        }
    }
}

/// The directory of the tokenizer of a data set or of a file of weights.
pub fn beside(file: &Path) -> PathBuf {
    match file.extension().is_some_and(|e| e == "safetensors") {
        true => file.with_extension("tokenizer"),
        false => {
            let mut name = data::indexed::bare(file).into_os_string();
            name.push(".tokenizer");
            name.into()
        }
    }
}

/// The tokenizer of a run: that of its data sets, else that of the weights with which it begins. Where these were
/// made by several, a warning says so.
pub fn of_run(sets: Option<&DataSets>, begins: &[PathBuf]) -> Option<TokenizerFiles> {
    let prefixes = sets.and_then(|sets| sets.settled().ok()).map(|sets| sets.prefixes()).unwrap_or_default();
    let of_data: Vec<(PathBuf, TokenizerFiles)> =
        prefixes.into_iter().filter_map(|p| Some((p.clone(), TokenizerFiles::within(&beside(&p))?))).collect();
    let of_weights = begins.iter().find_map(|weights| Some((weights, TokenizerFiles::of_weights(weights)?)));
    let Some((first, tokenizer)) = of_data.first() else { return of_weights.map(|w| w.1) };
    if let Some((other, kept)) = of_data.iter().find(|(_, kept)| kept.differs(tokenizer)) {
        note!(
            "warning: `{}` and `{}` were made by different tokenizers: `{}` and `{}` are not the same, and a token may mean another text in each",
            first.display(),
            other.display(),
            tokenizer.main.display(),
            kept.main.display()
        );
    }
    if let Some((weights, kept)) = of_weights.filter(|(_, kept)| kept.differs(tokenizer)) {
        note!(
            "warning: `{}` was made by another tokenizer than that of `{}`: `{}` and `{}` are not the same, and tokens may mean other texts than the \
             weights have learnt; `mcc data tokenize --tokenizer {}` makes data for them",
            first.display(),
            weights.display(),
            tokenizer.main.display(),
            kept.main.display(),
            kept.dir.display()
        );
    }
    Some(tokenizer.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tokenizer_is_found_beside_what_was_made_by_it() {
        let dir = tempfile::tempdir().expect("a directory");
        let at = |name: &str| dir.path().join(name);
        let put = |name: &str, text: &str| {
            fs::create_dir_all(at(name).parent().expect("a parent")).expect("made");
            fs::write(at(name), text).expect("written");
        };
        // A vocab.txt alone is no tokenizer.
        put("vocab.txt", "a");
        put("w.safetensors", "");
        assert_eq!(TokenizerFiles::of_weights(&at("w.safetensors")), None);
        put("tokenizer.json", "{}");
        let of_directory = TokenizerFiles::of_weights(&at("w.safetensors")).expect("one");
        assert_eq!(of_directory.names(), ["tokenizer.json", "vocab.txt"]);
        put("w.tokenizer/tokenizer.json", "{} ");
        let own = TokenizerFiles::of_weights(&at("w.safetensors")).expect("one");
        assert!(own.differs(&of_directory) && !own.differs(&own));
        put("saves/step-1/manifest.json", "{}");
        assert_eq!(TokenizerFiles::of_weights(&at("saves/step-1")), None);
        own.put(&at("saves")).expect("copied");
        assert_eq!(TokenizerFiles::of_weights(&at("saves/step-1")).map(|kept| kept.dir), Some(at("saves")));
        assert_eq!(fs::read(at("saves/tokenizer.json")).expect("there"), b"{} ");
        assert_eq!(beside(Path::new("a/wiki.v2")), Path::new("a/wiki.v2.tokenizer"));
    }
}
