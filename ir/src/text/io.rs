//! One description of a text form, read both ways.
//!
//! Every construct has one function that takes an [`Io`] and the value. When writing, it appends the value's text; when
//! reading, it consumes that text and sets the value. So printer and parser cannot disagree. Text is line by line: blanks
//! within a line are free, line ends are not.

use super::labels::Labels;
use super::mlir::{mlir_int, mlir_quote, mlir_real};
use crate::graph::Value;
use crate::mesh::{Mesh, SubAxis};
use crate::op::Real;
use std::fmt::{Display, Write};
use std::str::FromStr;

/// Text that is not the form of what was asked for: where (both from 1, the column in characters) and why.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{line}:{column}: {text}")]
pub struct ParseError {
    pub line: usize,
    pub column: usize,
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
    attributes: bool,
    pub dims: Labels,
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

/// What may stand in a name without quotes.
fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '/' | '*')
}

fn is_bare(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_') && name.chars().all(is_word)
}

/// The text of a value, by its form.
pub(super) fn print<T: Clone>(x: &T, form: impl FnOnce(&mut Io, &mut T) -> Result) -> String {
    let mut io = Io::new(Side::Write(String::new()));
    form(&mut io, &mut x.clone()).expect("invariant: writing has no errors");
    io.take() + "\n"
}

/// The fields of a value as MLIR attributes, by its form. The names that the form refers to are set first.
pub(super) fn attributes<T: Clone>(x: &T, dims: &Labels, mesh: &Mesh, form: impl FnOnce(&mut Io, &mut T) -> Result) -> String {
    let mut io = Io::new(Side::Write(String::new()));
    (io.attributes, io.dims, io.mesh) = (true, dims.clone(), mesh.clone());
    form(&mut io, &mut x.clone()).expect("invariant: writing has no errors");
    io.take()
}

/// The value of a text, by its form.
pub(super) fn parse<T>(text: &str, mut blank: T, form: impl FnOnce(&mut Io, &mut T) -> Result) -> Result<T> {
    let mut io = Io::new(Side::Read { text, at: 0 });
    form(&mut io, &mut blank)?;
    while io.eat("\n") {}
    if io.rest().is_empty() { Ok(blank) } else { io.expected("a line that belongs here") }
}

impl<'a> Io<'a> {
    fn new(side: Side<'a>) -> Io<'a> {
        Io { side, attributes: false, dims: Labels::default(), buffers: Labels::default(), bodies: Labels::default(), mesh: Mesh { subs: vec![] }, hints: Hints::default(), values: 0 }
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
    fn put(&mut self, x: impl Display) {
        if let Side::Write(out) = &mut self.side {
            write!(out, "{x}").expect("invariant: a string takes all text");
        }
    }

    /// What is left of a text being read, from the next character that is not blank.
    fn rest(&mut self) -> &'a str {
        match &mut self.side {
            Side::Write(_) => "",
            Side::Read { text, at } => {
                let rest = text[*at..].trim_start_matches([' ', '\t', '\r']);
                *at = text.len() - rest.len();
                rest
            }
        }
    }

    fn advance(&mut self, bytes: usize) {
        if let Side::Read { at, .. } = &mut self.side {
            *at += bytes;
        }
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
    fn eat(&mut self, words: &str) -> bool {
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
        let mut fresh = mark == 0;
        while self.eat("\n") {
            fresh = true;
        }
        // Blank words: a line that is indented, whatever it says.
        let indented = !words.trim().is_empty() || self.is_indented();
        if fresh && indented && self.eat(words) {
            return true;
        }
        self.rewind(mark);
        false
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
        while self.eat("\n") {}
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

    /// A number and, for readers, the name at that position of `names`: `3 (layers.0.w)`.
    pub fn hinted(&mut self, x: &mut u32, names: fn(&Hints) -> &Vec<String>) -> Result {
        self.number(x)?;
        let name = if self.attributes { None } else { names(&self.hints).get(*x as usize).cloned() };
        if self.opt(name.is_some(), " (") {
            self.name(&mut name.unwrap_or_default())?;
            self.lit(")")?;
        }
        Ok(())
    }

    /// The number that comes next when reading: where it began and its text.
    fn digits(&mut self, also: &[char]) -> (usize, &'a str) {
        let rest = self.rest();
        let mark = self.mark();
        let sign = usize::from(rest.starts_with('-'));
        let len = rest[sign..].find(|c: char| !(c.is_ascii_digit() || also.contains(&c))).unwrap_or(rest.len() - sign);
        self.advance(sign + len);
        (mark, &rest[..sign + len])
    }

    pub fn number<T: Display + FromStr>(&mut self, x: &mut T) -> Result {
        if !self.reading() {
            let text = x.to_string();
            self.put(if self.attributes { mlir_int(&text) } else { text });
            return Ok(());
        }
        let (mark, digits) = self.digits(&[]);
        match digits.parse() {
            Ok(n) => *x = n,
            Err(_) if digits.is_empty() => return self.expected("a number"),
            Err(_) => return self.wrong(mark, format!("`{digits}` is out of range")),
        }
        Ok(())
    }

    /// The shortest decimal that reads back as the same `f64`; `inf`, `nan`; other NaNs with their bits, `nan.7ff8000000000001`.
    pub fn real(&mut self, x: &mut f64) -> Result {
        if self.attributes {
            self.put(mlir_real(*x));
            return Ok(());
        }
        if !self.reading() {
            if x.is_nan() && x.to_bits() != f64::NAN.to_bits() {
                self.put(format_args!("nan.{:016x}", x.to_bits()));
            } else {
                self.put(Real(*x));
            }
            return Ok(());
        }
        if self.rest().starts_with("nan.") {
            self.advance(4);
            let rest = self.rest();
            let hex = rest.get(..16).and_then(|h| u64::from_str_radix(h, 16).ok());
            let Some(bits) = hex.filter(|b| f64::from_bits(*b).is_nan()) else { return self.expected("the bits of a NaN") };
            self.advance(16);
            *x = f64::from_bits(bits);
            return Ok(());
        }
        let mark = self.mark();
        let (_, digits) = self.digits(&['.', 'e', '-', '+', 'i', 'n', 'f', 'a']);
        match digits.parse() {
            Ok(n) => *x = n,
            Err(_) => {
                self.rewind(mark);
                return self.expected("a number");
            }
        }
        Ok(())
    }

    /// A word that is not quoted, when reading.
    pub fn word(&mut self, what: &str) -> Result<&'a str> {
        let rest = self.rest();
        let word = &rest[..rest.find(|c| !is_word(c)).unwrap_or(rest.len())];
        if word.is_empty() {
            return self.expected(what);
        }
        self.advance(word.len());
        Ok(word)
    }

    /// One of the names of `all`, which stand for values told apart by their variant; fields are the caller's.
    pub fn variant<T: Clone>(&mut self, x: &mut T, what: &str, all: &[(&str, T)]) -> Result {
        if !self.reading() {
            let same = std::mem::discriminant(x);
            let entry = all.iter().find(|(_, t)| std::mem::discriminant(t) == same);
            self.put(entry.expect("invariant: every variant has a name").0);
            return Ok(());
        }
        let mark = self.mark();
        let word = self.word(what)?;
        match all.iter().find(|(name, _)| *name == word) {
            Some((_, t)) => *x = t.clone(),
            None => {
                self.rewind(mark);
                let names: Vec<&str> = all.iter().map(|a| a.0).collect();
                return self.expected(format_args!("{what} ({})", names.join(", ")));
            }
        }
        Ok(())
    }

    /// `"text"`, with `\n`, `\r`, `\t`, `\"`, `\\` and `\u{hex}` for what does not print.
    pub fn string(&mut self, s: &mut String) -> Result {
        if !self.reading() {
            let quoted = quote(s);
            self.put(quoted);
            return Ok(());
        }
        self.lit("\"")?;
        s.clear();
        loop {
            let mark = self.mark();
            match self.next() {
                Some('"') => return Ok(()),
                Some('\\') => match self.escape() {
                    Some(c) => s.push(c),
                    None => return self.wrong(mark, "an unknown escape"),
                },
                Some('\n') | None => return self.wrong(mark, "a text without its closing quote"),
                Some(c) => s.push(c),
            }
        }
    }

    /// The next character, blanks included.
    fn next(&mut self) -> Option<char> {
        let Side::Read { text, at } = &mut self.side else { return None };
        let c = text[*at..].chars().next()?;
        *at += c.len_utf8();
        Some(c)
    }

    fn escape(&mut self) -> Option<char> {
        Some(match self.next()? {
            'n' => '\n',
            'r' => '\r',
            't' => '\t',
            '"' => '"',
            '\\' => '\\',
            'u' => {
                let hex = self.rest().strip_prefix('{')?.split_once('}')?.0;
                self.advance(hex.len() + 2);
                u32::from_str_radix(hex, 16).ok().and_then(char::from_u32)?
            }
            _ => return None,
        })
    }

    /// A name: bare if it is a word, else quoted.
    pub fn name(&mut self, s: &mut String) -> Result {
        if if self.reading() { self.rest().starts_with('"') } else { !is_bare(s) } {
            return self.string(s);
        }
        if !self.reading() {
            self.put(&s);
            return Ok(());
        }
        let mark = self.mark();
        let word = self.word("a name")?;
        if !is_bare(word) {
            self.rewind(mark);
            return self.expected("a name");
        }
        *s = word.into();
        Ok(())
    }

    /// A name that may be missing (empty) and is quoted if it is one of `reserved`, the words that may follow.
    pub fn name_or_nothing(&mut self, s: &mut String, words: &str, reserved: &[&str]) -> Result {
        if !self.reading() {
            return match s.as_str() {
                "" => Ok(()),
                word if reserved.contains(&word) => {
                    self.put(words);
                    self.string(s)
                }
                _ => {
                    self.put(words);
                    self.name(s)
                }
            };
        }
        let next = self.rest().starts_with(|c: char| c == '"' || c.is_ascii_alphabetic() || c == '_');
        let mark = self.mark();
        if next && !reserved.iter().any(|r| self.eat(r)) {
            return self.name(s);
        }
        self.rewind(mark);
        s.clear();
        Ok(())
    }

    /// `%3`. Only values that exist can be read.
    pub fn value(&mut self, v: &mut Value) -> Result {
        let mark = self.mark();
        self.lit("%")?;
        self.number(&mut v.0)?;
        if self.reading() && v.index() >= self.values {
            return self.wrong(mark, format!("{v} does not exist yet"));
        }
        Ok(())
    }

    /// Whether a value comes next; when writing, `more`.
    pub fn value_follows(&mut self, more: bool) -> bool {
        if self.reading() { self.rest().starts_with('%') } else { more }
    }

    /// Whether an origin comes next; when writing, `more`.
    pub fn origin_follows(&mut self, more: bool) -> bool {
        if self.reading() { self.rest().starts_with("//") } else { more }
    }

    /// Sub-axes in their order: `dp*tp.0`, an axis without a number being all of its factors; `none`.
    pub fn subs(&mut self, subs: &mut Vec<SubAxis>) -> Result {
        if !self.reading() {
            let mut parts = vec![];
            let mut rest = subs.as_slice();
            while let Some(u) = rest.first() {
                let all: Vec<SubAxis> = match self.mesh.subs.get(usize::from(u.0)) {
                    Some(info) => self.mesh.of(info.axis).collect(),
                    None => vec![],
                };
                if !all.is_empty() && rest.starts_with(&all) {
                    parts.push(self.mesh[*u].axis.name().to_string());
                    rest = &rest[all.len()..];
                } else {
                    parts.push(self.sub_name(*u));
                    rest = &rest[1..];
                }
            }
            self.put(if parts.is_empty() { "none".into() } else { parts.join("*") });
            return Ok(());
        }
        subs.clear();
        let mark = self.mark();
        for part in self.word("sub-axes")?.split('*').filter(|p| *p != "none") {
            match self.find_subs(part) {
                Some(found) => subs.extend(found),
                None => return self.wrong(mark, format!("`{part}` is no axis of the mesh")),
            }
        }
        Ok(())
    }

    /// One sub-axis: `tp`, or `tp.0` if its axis has several.
    pub fn sub(&mut self, u: &mut SubAxis) -> Result {
        let mut subs = vec![*u];
        let mark = self.mark();
        self.subs(&mut subs)?;
        match subs.as_slice() {
            [one] => *u = *one,
            _ => return self.wrong(mark, "expected one sub-axis"),
        }
        Ok(())
    }

    /// `tp.0`; `axis3` of a mesh that is not known.
    fn sub_name(&self, u: SubAxis) -> String {
        match self.mesh.subs.get(usize::from(u.0)) {
            Some(info) => format!("{}.{}", info.axis, info.factor),
            None => format!("axis{}", u.0),
        }
    }

    fn find_subs(&self, part: &str) -> Option<Vec<SubAxis>> {
        if let Some(number) = part.strip_prefix("axis") {
            return Some(vec![SubAxis(number.parse().ok()?)]);
        }
        match part.split_once('.') {
            None => Some(self.mesh.of(crate::mesh::Axis::parse(part)?).collect::<Vec<_>>()).filter(|s| !s.is_empty()),
            Some(_) => self.mesh.ids().find(|u| self.sub_name(*u) == part).map(|u| vec![u]),
        }
    }
}

/// A text in quotes, all on one line.
pub(super) fn quote(s: &str) -> String {
    let mut out = String::from("\"");
    for c in s.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c.is_control() => write!(out, "\\u{{{:x}}}", u32::from(c)).expect("invariant: a string takes all text"),
            c => out.push(c),
        }
    }
    out.push('"');
    out
}
