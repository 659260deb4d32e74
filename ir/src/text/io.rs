//! One description of a text form, read both ways.
//!
//! Every construct has one function that takes an [`Io`] and the value. When writing, it appends the value's text; when
//! reading, it consumes that text and sets the value. So printer and parser cannot disagree. Text is line by line: blanks
//! within a line are free, line ends are not. A line that begins with `;` is a comment.

use super::labels::Labels;
use super::words::{is_word, mlir_quote};
use crate::mesh::Mesh;
use std::fmt::{Display, Write};
use std::rc::Rc;

/// Text that is not the form of what was asked for: where (both from 1, the column in characters) and why.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{line}:{column}: {text}")]
pub struct ParseError {
    /// From 1.
    pub line: usize,
    /// In characters, from 1.
    pub column: usize,
    /// What is wrong there.
    pub text: String,
}

pub(super) type Result<T = ()> = std::result::Result<T, ParseError>;

enum Side<'a> {
    Write(String),
    Read { text: &'a str, at: usize },
}

/// A text being written or read, with the names that it can refer to.
pub(super) struct Io<'a> {
    side: Side<'a>,
    /// Whether fields are written as MLIR attributes, `over = ["hidden"]`; the words before a field are its name.
    pub attributes: bool,
    pub dims: Rc<Labels>,
    pub buffers: Labels,
    pub bodies: Labels,
    pub mesh: Mesh,
    pub hints: Hints,
    /// When reading, the values that exist so far.
    pub values: usize,
}

/// Names that a printer adds to numbers, in parentheses, for readers. Parsers skip them.
#[derive(Clone, Debug, Default)]
pub(super) struct Hints {
    /// Of a graph, for its ops.
    pub params: Vec<String>,
    pub inputs: Vec<String>,
    pub tables: Vec<String>,
    /// Of a job, for its commands.
    pub kernels: Vec<String>,
    pub loads: Vec<String>,
    pub reports: Vec<String>,
}

/// The text of a value, by its form.
pub(super) fn print<T: Clone>(x: &T, form: impl FnOnce(&mut Io, &mut T) -> Result) -> String {
    let mut io = Io::new(Side::Write(String::new()));
    form(&mut io, &mut x.clone()).expect("invariant: writing has no errors");
    io.take() + "\n"
}

/// The fields of a value as MLIR attributes, by its form. The names that the form refers to are set first.
pub(super) fn attributes<T: Clone>(x: &T, dims: &Rc<Labels>, mesh: &Mesh, form: impl FnOnce(&mut Io, &mut T) -> Result) -> String {
    let mut io = Io::new(Side::Write(String::new()));
    (io.attributes, io.dims, io.mesh) = (true, Rc::clone(dims), mesh.clone());
    form(&mut io, &mut x.clone()).expect("invariant: writing has no errors");
    io.take()
}

/// The value of a text, by its form.
pub(super) fn parse<T>(text: &str, mut blank: T, form: impl FnOnce(&mut Io, &mut T) -> Result) -> Result<T> {
    let mut io = Io::new(Side::Read { text, at: 0 });
    form(&mut io, &mut blank)?;
    io.line_ends();
    if io.rest().is_empty() { Ok(blank) } else { io.expected("a line that belongs here") }
}

impl<'a> Io<'a> {
    fn new(side: Side<'a>) -> Io<'a> {
        Io {
            side,
            attributes: false,
            dims: Rc::default(),
            buffers: Labels::default(),
            bodies: Labels::default(),
            mesh: Mesh { subs: vec![] },
            hints: Hints::default(),
            values: 0,
        }
    }

    pub fn reading(&self) -> bool {
        match self.side {
            Side::Write(_) => false,
            Side::Read { .. } => true,
        }
    }

    /// What was written so far; the text begins anew.
    fn take(&mut self) -> String {
        match &mut self.side {
            Side::Write(out) => std::mem::take(out),
            Side::Read { .. } => String::new(),
        }
    }

    /// The name of the attribute that these words before a field stand for.
    fn key(&mut self, words: &str) {
        if !matches!(&self.side, Side::Write(out) if out.is_empty()) {
            self.put(", ");
        }
        self.put(match words.trim() {
            "" => "value",
            "->" => "to",
            word => word,
        });
    }

    /// A value that is one text, also as an attribute.
    pub fn as_text<T>(&mut self, x: &mut T, form: impl FnOnce(&mut Self, &mut T) -> Result) -> Result {
        if !self.attributes {
            return form(self, x);
        }
        let before = self.take();
        self.attributes = false;
        form(self, x)?;
        self.attributes = true;
        let text = self.take();
        self.put(before + &mlir_quote(&text));
        Ok(())
    }

    /// Appends to a text being written.
    pub fn put(&mut self, x: impl Display) {
        if let Side::Write(out) = &mut self.side {
            write!(out, "{x}").expect("invariant: a string takes all text");
        }
    }

    /// What is left of a text being read, from the next character that is not blank.
    pub fn rest(&mut self) -> &'a str {
        match &mut self.side {
            Side::Write(_) => "",
            Side::Read { text, at } => {
                let rest = text[*at..].trim_start_matches([' ', '\t', '\r']);
                *at = text.len() - rest.len();
                rest
            }
        }
    }

    pub fn advance(&mut self, bytes: usize) {
        if let Side::Read { at, .. } = &mut self.side {
            *at += bytes;
        }
    }

    /// The next character, blanks included.
    pub fn next(&mut self) -> Option<char> {
        let Side::Read { text, at } = &mut self.side else { return None };
        let c = text[*at..].chars().next()?;
        *at += c.len_utf8();
        Some(c)
    }

    /// A place to come back to, when reading.
    pub fn mark(&self) -> usize {
        match self.side {
            Side::Write(_) => 0,
            Side::Read { at, .. } => at,
        }
    }

    pub fn rewind(&mut self, mark: usize) {
        if let Side::Read { at, .. } = &mut self.side {
            *at = mark;
        }
    }

    /// The error of a text that reads well and says something impossible, at `mark`.
    pub fn wrong<T>(&self, mark: usize, text: impl Into<String>) -> Result<T> {
        let before = match self.side {
            Side::Write(_) => "",
            Side::Read { text, .. } => &text[..mark],
        };
        let line = before.rsplit('\n').next().unwrap_or("");
        Err(ParseError { line: before.matches('\n').count() + 1, column: line.chars().count() + 1, text: text.into() })
    }

    pub fn expected<T>(&mut self, what: impl Display) -> Result<T> {
        let found = match self.rest().split([' ', '\n']).next() {
            _ if self.rest().is_empty() => "the end".into(),
            Some("") | None => "the end of the line".into(),
            Some(word) => format!("`{}`", word.chars().take(30).collect::<String>()),
        };
        self.wrong(self.mark(), format!("expected {what}, found {found}"))
    }

    /// When reading, consumes these words if they come next.
    pub fn eat(&mut self, words: &str) -> bool {
        let mark = self.mark();
        let parts = if words == "\n" { vec!["\n"] } else { words.split_whitespace().collect() };
        for part in parts {
            let Some(after) = self.rest().strip_prefix(part) else {
                self.rewind(mark);
                return false;
            };
            if part.ends_with(|c: char| c.is_ascii_alphanumeric() || c == '_') && after.starts_with(is_word) {
                self.rewind(mark);
                return false;
            }
            self.advance(part.len());
        }
        true
    }

    /// Fixed words.
    pub fn lit(&mut self, words: &str) -> Result {
        if !self.reading() {
            self.put(words);
            Ok(())
        } else if self.eat(words) {
            Ok(())
        } else {
            self.expected(format_args!("`{}`", words.trim()))
        }
    }

    /// Fixed words and a value.
    pub fn with<T>(&mut self, words: &str, x: &mut T, form: impl FnOnce(&mut Self, &mut T) -> Result) -> Result {
        if self.attributes {
            self.key(words);
            self.put(" = ");
        } else {
            self.lit(words)?;
        }
        form(self, x)
    }

    /// Words that stand there if `present`; whether they do.
    pub fn opt(&mut self, present: bool, words: &str) -> bool {
        if self.reading() {
            return self.eat(words);
        }
        if present {
            self.put(words);
        }
        present
    }

    /// A new line that begins with these words, if `present`; whether it is there.
    pub fn line_if(&mut self, present: bool, words: &str) -> bool {
        if let Side::Write(out) = &mut self.side {
            if present {
                let end = if out.is_empty() { "" } else { "\n" };
                write!(out, "{end}{words}").expect("invariant: a string takes all text");
            }
            return present;
        }
        let mark = self.mark();
        let fresh = self.line_ends() || mark == 0;
        // Blank words stand for any indented line.
        let indented = !words.trim().is_empty() || self.is_indented();
        if fresh && indented && self.eat(words) {
            return true;
        }
        self.rewind(mark);
        false
    }

    /// When reading, skips line ends, and the lines between them that begin with `;`, which are for people; whether there are some.
    fn line_ends(&mut self) -> bool {
        let mut some = false;
        loop {
            let mark = self.mark();
            if self.eat("\n") {
                some = true;
            } else if (some || mark == 0) && self.rest().starts_with(';') {
                self.skip_line();
            } else {
                // Blanks at the line's start stay unread, because the caller asks whether the line is indented.
                self.rewind(mark);
                return some;
            }
        }
    }

    /// Whether the next line begins with these words, which stay to be read; when writing, `present`.
    pub fn line_follows(&mut self, present: bool, words: &str) -> bool {
        if !self.reading() {
            return present;
        }
        let mark = self.mark();
        let follows = self.line_if(true, words);
        self.rewind(mark);
        follows
    }

    /// When reading, whether blanks and then something come next.
    fn is_indented(&mut self) -> bool {
        let mark = self.mark();
        let rest = self.rest();
        self.mark() > mark && !rest.is_empty()
    }

    /// A new line that begins with these words.
    pub fn line(&mut self, words: &str) -> Result {
        if self.line_if(true, words) {
            return Ok(());
        }
        if !self.rest().starts_with('\n') {
            return self.expected("the end of the line");
        }
        self.line_ends();
        self.expected(format_args!("`{}`", words.trim()))
    }

    /// When reading, goes to the end of the line.
    pub fn skip_line(&mut self) {
        let rest = self.rest();
        self.advance(rest.find('\n').unwrap_or(rest.len()));
    }

    /// Lines that begin with `words`, one per item.
    pub fn rows<T: Clone>(&mut self, items: &mut Vec<T>, blank: T, words: &str, mut form: impl FnMut(&mut Self, usize, &mut T) -> Result) -> Result {
        for i in 0.. {
            if !self.line_if(i < items.len(), words) {
                break;
            }
            if self.reading() {
                items.push(blank.clone());
            }
            form(self, i, &mut items[i])?;
        }
        Ok(())
    }

    /// `[a, b, c]`.
    pub fn list<T: Clone>(&mut self, items: &mut Vec<T>, blank: T, mut form: impl FnMut(&mut Self, &mut T) -> Result) -> Result {
        self.lit("[")?;
        if self.reading() {
            items.clear();
            while !self.eat("]") {
                if !items.is_empty() {
                    self.lit(",")?;
                }
                items.push(blank.clone());
                let last = items.len() - 1;
                form(self, &mut items[last])?;
            }
            return Ok(());
        }
        for (i, item) in items.iter_mut().enumerate() {
            if i > 0 {
                self.put(", ");
            }
            form(self, item)?;
        }
        self.lit("]")
    }

    /// `words` and a value, or nothing.
    pub fn option<T>(&mut self, slot: &mut Option<T>, blank: T, words: &str, form: impl FnOnce(&mut Self, &mut T) -> Result) -> Result {
        if self.attributes {
            return slot.as_mut().map_or(Ok(()), |x| self.with(words, x, form));
        }
        if self.opt(slot.is_some(), words) { form(self, slot.get_or_insert(blank)) } else { Ok(()) }
    }

    /// `words` and a value, or nothing for the value `default`.
    pub fn or<T: PartialEq>(&mut self, slot: &mut T, default: T, words: &str, form: impl FnOnce(&mut Self, &mut T) -> Result) -> Result {
        if self.opt(*slot != default, words) {
            form(self, slot)
        } else {
            *slot = default;
            Ok(())
        }
    }

    /// `words`, or nothing for `false`.
    pub fn flag(&mut self, slot: &mut bool, words: &str) -> Result {
        if !self.attributes {
            *slot = self.opt(*slot, words);
        } else if *slot {
            self.key(words);
        }
        Ok(())
    }
}
