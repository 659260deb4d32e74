//! The words of the text forms: numbers, names, texts, values and axes.

use super::io::{Hints, Io, Result};
use super::labels::Labels;
use super::words::{is_bare, is_word, mlir_int, mlir_real, quote};
use crate::graph::Value;
use crate::mesh::SubAxis;
use crate::op::Real;
use std::fmt::Display;
use std::str::FromStr;

impl<'a> Io<'a> {
    /// A number and, for readers, the name at that position of `names`: `3 (layers.0.w)`.
    pub fn hinted(&mut self, x: &mut u32, names: fn(&Hints) -> &Vec<String>) -> Result {
        self.number(x)?;
        self.hint(*x, names)
    }

    /// The name at a position of `names`, for readers.
    pub fn hint(&mut self, position: u32, names: fn(&Hints) -> &Vec<String>) -> Result {
        let name = if self.attributes { None } else { names(&self.hints).get(position as usize).cloned() };
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
            Err(_) if digits.trim_matches('-').is_empty() => return self.expected("a number"),
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

/// A name and how many of the same name came before it.
pub(super) fn numbered(io: &mut Io, name: &mut String, count: &mut u32) -> Result {
    io.name(name)?;
    io.or(count, 0, "#", Io::number)
}

/// A position in a table of names. One outside of the table prints as `?9`, for dumps of broken graphs; it does not read back.
pub(super) fn label(io: &mut Io, table: for<'x> fn(&'x Io<'_>) -> &'x Labels, what: &str, position: &mut u32) -> Result {
    let mark = io.mark();
    if !io.reading() {
        return match table(io).at(*position) {
            Some((mut name, mut count)) => numbered(io, &mut name, &mut count),
            None => io.lit(&format!("?{position}")),
        };
    }
    let mut key = (String::new(), 0);
    numbered(io, &mut key.0, &mut key.1)?;
    match table(io).position(&key) {
        Some(p) => *position = p,
        None => return io.wrong(mark, format!("no {what} is called `{}`{}", key.0, if key.1 == 0 { String::new() } else { format!("#{}", key.1) })),
    }
    Ok(())
}
