//! What both who reads and who writes a data set know of its files.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

/// First bytes of `PREFIX.idx`.
pub const MAGIC: [u8; 9] = *b"MMIDIDX\0\0";
/// The only version there is.
pub const VERSION: u64 = 1;
/// Bytes before the lengths.
pub const HEADER: usize = 34;

/// How a token is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    /// 8 bits, unsigned.
    U8,
    /// 8 bits, signed.
    I8,
    /// 16 bits, signed.
    I16,
    /// 32 bits, signed.
    I32,
    /// 64 bits, signed.
    I64,
    /// 16 bits, unsigned.
    U16,
}

impl Dtype {
    /// All types, in the order of their codes.
    pub const ALL: [Dtype; 6] = [Dtype::U8, Dtype::I8, Dtype::I16, Dtype::I32, Dtype::I64, Dtype::U16];

    /// What the header says for it.
    pub fn code(self) -> u8 {
        match self {
            Dtype::U8 => 1,
            Dtype::I8 => 2,
            Dtype::I16 => 3,
            Dtype::I32 => 4,
            Dtype::I64 => 5,
            Dtype::U16 => 8,
        }
    }

    /// Bytes of a token.
    pub fn size(self) -> u64 {
        match self {
            Dtype::U8 | Dtype::I8 => 1,
            Dtype::I16 | Dtype::U16 => 2,
            Dtype::I32 => 4,
            Dtype::I64 => 8,
        }
    }

    /// numpy's name.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::U8 => "uint8",
            Dtype::I8 => "int8",
            Dtype::I16 => "int16",
            Dtype::I32 => "int32",
            Dtype::I64 => "int64",
            Dtype::U16 => "uint16",
        }
    }

    /// The largest token that it stores, of those that mcc can use.
    pub fn largest(self) -> u32 {
        match self {
            Dtype::U8 => u8::MAX.into(),
            Dtype::I8 => i8::MAX as u32,
            Dtype::I16 => i16::MAX as u32,
            Dtype::U16 => u16::MAX.into(),
            Dtype::I32 => i32::MAX as u32,
            Dtype::I64 => u32::MAX,
        }
    }

    /// What Megatron takes for a vocabulary of so many tokens (`DType.optimal_dtype`).
    pub fn of_vocabulary(tokens: u64) -> Dtype {
        if tokens < 65500 { Dtype::U16 } else { Dtype::I32 }
    }
}

/// An element of a buffer that takes tokens.
pub trait Token: Copy + Send + Sync {
    /// What the buffer's element takes, for messages.
    const TAKES: &'static str;

    /// A token of a file as the buffer's type; `None` if it is out of range.
    fn of(token: i64) -> Option<Self>;
}

macro_rules! token {
    ($($t:ty: $takes:literal),*) => {
        $(impl Token for $t {
            const TAKES: &'static str = $takes;

            fn of(token: i64) -> Option<$t> {
                token.try_into().ok()
            }
        })*
    };
}
token!(i32: "-2147483648 to 2147483647", u32: "0 to 4294967295", i64: "any");

/// Why an indexed data set cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum IndexedError {
    #[error("`{}`: {cause}", .file.display())]
    Io { file: PathBuf, cause: io::Error },
    #[error("there is no data set `{}`: neither `{}.bin` nor `{}.idx` is there", .0.display(), .0.display(), .0.display())]
    Missing(PathBuf),
    #[error("`{}` is there and `{}` is not; a data set is both files: copy the other one too, or tokenize again", .there.display(), .missing.display())]
    Half { there: PathBuf, missing: PathBuf },
    #[error("`{}`, byte {at}: {what}", .file.display())]
    Malformed { file: PathBuf, at: u64, what: String },
    #[error("`{}`: token {position} of sequence {sequence} is {value}; taken is {takes}", .file.display())]
    Token { file: PathBuf, sequence: u64, position: u64, value: i64, takes: &'static str },
    #[error("`{}`: tokens {from} to {to} of sequence {sequence} are asked for, which has {length}", .file.display())]
    Beyond { file: PathBuf, sequence: u64, from: u64, to: u64, length: u64 },
    #[error("`{}`: token {value} does not fit {}, whose largest is {}; choose a larger type", .file.display(), .dtype.name(), .dtype.largest())]
    Wide { file: PathBuf, value: u32, dtype: Dtype },
    #[error("`{}`: a sequence of {tokens} tokens; at most 2147483647 fit: split the document", .file.display())]
    Long { file: PathBuf, tokens: usize },
    #[error("`{}`: lengths of a document's sequences sum to {lengths}, and it has {tokens} tokens", .file.display())]
    Lengths { file: PathBuf, lengths: usize, tokens: usize },
    #[error("`{}` has tokens of {}, and {} are written; tokenize one of them again", .file.display(), .has.name(), .written.name())]
    Types { file: PathBuf, has: Dtype, written: Dtype },
}

/// `PREFIX.bin` and `PREFIX.idx`. Whoever names one of them means both.
pub fn paths(prefix: &Path) -> (PathBuf, PathBuf) {
    let prefix = bare(prefix);
    (with(&prefix, ".bin"), with(&prefix, ".idx"))
}

/// The prefix, of which one of its files may have been named.
pub fn bare(prefix: &Path) -> PathBuf {
    match prefix.extension().and_then(|e| e.to_str()) {
        Some("bin" | "idx") => prefix.with_extension(""),
        Some(_) | None => prefix.to_path_buf(),
    }
}

/// The path with more at its end.
pub(crate) fn with(path: &Path, end: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(end);
    name.into()
}
