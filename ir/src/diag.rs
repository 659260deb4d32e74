//! Places in model text and the user's errors.
//!
//! A [`Diagnostic`] is data: passes collect them, the command line renders them once, with the source line.

use crate::options::{CpComm, OptionName};
use serde::{Deserialize, Serialize};
use std::fmt;

/// A place in a source text: file number in the [`Sources`], 1-based line, 1-based column and length in bytes.
/// Spans travel with every value to the end of the pipeline and print as `file:line:col+len`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Span {
    /// Index into [`Sources::files`].
    pub file: u16,
    /// The line that it begins in, from 1.
    pub line: u32,
    /// The byte of the line that it begins at, from 1.
    pub col: u32,
    /// Bytes.
    pub len: u32,
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}+{}", self.file, self.line, self.col, self.len)
    }
}

/// The texts that a compile has read, in the order of their file numbers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sources {
    /// Indexed by [`Span::file`].
    pub files: Vec<Source>,
}

impl Sources {
    /// Where a place is, as a user finds it: `mlp.mdl:7`.
    pub fn line(&self, span: Span) -> Option<String> {
        self.files.get(span.file as usize).map(|f| format!("{}:{}", f.name, span.line))
    }
}

/// A text that a compile has read.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Source {
    /// As the user named it, or `std/nn.mdl` for the library.
    pub name: String,
    /// The whole content; empty if only the name is kept, as of the library's texts.
    pub text: String,
}

/// Whether a diagnostic stops the compile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Severity {
    /// Something is wrong, and nothing is compiled.
    Error,
    /// Something looks wrong, and the compile goes on.
    Warning,
}

/// Something the user should know: what, where (labels; the first is the primary one), why, and a way out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Diagnostic {
    /// Whether it stops the compile.
    pub severity: Severity,
    /// `E0204`; the codes are listed in `docs/errors.md`.
    pub code: String,
    /// What is wrong, without saying where.
    pub message: String,
    /// Places in model texts, the primary one first; empty if it is about none.
    pub labels: Vec<Label>,
    /// Why it is so, each to be shown by itself.
    pub notes: Vec<String>,
    /// Ways out, each to be shown by itself.
    pub help: Vec<Help>,
}

/// A place in a model text, and what is to be said of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Label {
    /// The piece of text that is marked.
    pub span: Span,
    /// What is written beside the mark.
    pub text: String,
}

impl Diagnostic {
    /// An error with a code such as `E0204`, and with no label, note or help yet.
    pub fn error(code: &str, message: impl Into<String>) -> Self {
        Self::new(Severity::Error, code, message)
    }

    /// A warning with a code such as `W0402`, and with no label, note or help yet.
    pub fn warning(code: &str, message: impl Into<String>) -> Self {
        Self::new(Severity::Warning, code, message)
    }

    fn new(severity: Severity, code: &str, message: impl Into<String>) -> Self {
        Diagnostic { severity, code: code.into(), message: message.into(), labels: vec![], notes: vec![], help: vec![] }
    }

    /// Adds a label; the first one added is the primary one.
    #[must_use]
    pub fn label(mut self, span: Span, text: impl Into<String>) -> Self {
        self.labels.push(Label { span, text: text.into() });
        self
    }

    /// Adds a reason.
    #[must_use]
    pub fn note(mut self, text: impl Into<String>) -> Self {
        self.notes.push(text.into());
        self
    }

    /// Adds a way out.
    #[must_use]
    pub fn help(mut self, way: impl Into<Help>) -> Self {
        self.help.push(way.into());
        self
    }
}

/// A way out, in words between which options stand as data: how these are spelled is for those to say who read them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Help(Vec<HelpPiece>);

/// A piece of a [`Help`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum HelpPiece {
    /// Words that are shown as they are.
    Words(String),
    /// An option, which is spelled as those who read the message know it.
    Option(OptionName),
    /// A value of the option of that name.
    CpComm(CpComm),
}

impl Help {
    /// Appends words.
    #[must_use]
    pub fn and(mut self, words: impl Into<String>) -> Self {
        self.0.push(HelpPiece::Words(words.into()));
        self
    }

    /// Appends an option.
    #[must_use]
    pub fn option(mut self, name: OptionName) -> Self {
        self.0.push(HelpPiece::Option(name));
        self
    }

    /// Appends a value of [`OptionName::CpComm`].
    #[must_use]
    pub fn cp_comm(mut self, value: CpComm) -> Self {
        self.0.push(HelpPiece::CpComm(value));
        self
    }

    /// As a text; `spell` says how options and their values are written.
    pub fn spelled(&self, spell: impl Fn(&HelpPiece) -> String) -> String {
        let words = |piece: &HelpPiece| match piece {
            HelpPiece::Words(words) => words.clone(),
            HelpPiece::Option(_) | HelpPiece::CpComm(_) => spell(piece),
        };
        self.0.iter().map(words).collect()
    }
}

impl<T: Into<String>> From<T> for Help {
    fn from(words: T) -> Help {
        Help(vec![HelpPiece::Words(words.into())])
    }
}

/// With the names that options have in [`Options`](crate::options::Options).
impl fmt::Display for Help {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.spelled(|piece| match piece {
            HelpPiece::Words(words) => words.clone(),
            HelpPiece::Option(name) => name.name().into(),
            HelpPiece::CpComm(value) => value.name().into(),
        }))
    }
}
