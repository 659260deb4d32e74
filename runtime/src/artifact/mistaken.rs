//! What people give in the place of an artifact.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// What a file is that is no artifact.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The text of a model.
    Text,
    /// A safetensors file.
    Weights,
    Other,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Text => "a model text",
            Kind::Weights => "a file of weights",
            Kind::Other => "a file",
        })
    }
}

impl Kind {
    /// What to do with the file instead.
    pub fn way_out(self, path: &Path) -> String {
        let (artifact, path) = (path.with_extension("mcc"), path.display());
        match self {
            Kind::Text => format!("`mcc compile {path} -o {}` makes an artifact of it", artifact.display()),
            Kind::Weights => format!("`mcc run ARTIFACT --init {path}` starts from it (`--resume` where it was written by `--save-state`)"),
            Kind::Other => "an artifact is the directory that `mcc compile` writes".into(),
        }
    }
}

/// What stands there, if it is a file instead of a directory.
pub fn kind(path: &Path) -> Option<Kind> {
    if !path.metadata().ok()?.is_file() {
        return None;
    }
    let ends = |ending: &str| path.extension().is_some_and(|e| e.eq_ignore_ascii_case(ending));
    // The length of the header, then an object.
    let is_safetensors = || {
        let mut begin = [0; 9];
        File::open(path).and_then(|mut f| f.read_exact(&mut begin)).is_ok() && begin[8] == b'{'
    };
    Some(match () {
        () if ends("mdl") => Kind::Text,
        () if ends("safetensors") || is_safetensors() => Kind::Weights,
        () => Kind::Other,
    })
}
