//! Cuts a text into statements before any of it is parsed, so that a bad statement cannot hide the ones after it.
//!
//! A statement ends at `;`, at the `{` that opens its block, or at the `}` of the block around it. If the braces do
//! not balance, the text is cut again and missing `}` are placed where the indentation says that a block has ended.

use crate::ast::Trivia;
use ir::diag::{Diagnostic, Span};
use std::ops::Range;

/// The most blocks inside blocks.
const MAX_BLOCKS: usize = 64;
/// The most brackets inside brackets.
const MAX_BRACKETS: usize = 64;

/// Byte offsets of line starts, to turn offsets into [`Span`]s.
pub struct Lines<'t> {
    file: u16,
    pub text: &'t str,
    starts: Vec<usize>,
}

impl<'t> Lines<'t> {
    pub fn new(file: u16, text: &'t str) -> Self {
        let starts = std::iter::once(0).chain(text.match_indices('\n').map(|(i, _)| i + 1)).collect();
        Lines { file, text, starts }
    }

    pub fn span(&self, range: Range<usize>) -> Span {
        let line = self.line(range.start);
        let clip = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        Span { file: self.file, line: clip(line + 1), col: clip(range.start - self.starts[line] + 1), len: clip(range.len()) }
    }

    fn line(&self, at: usize) -> usize {
        self.starts.partition_point(|&start| start <= at) - 1
    }

    /// Whether only white space stands before `at` on its line.
    pub fn is_first(&self, at: usize) -> bool {
        self.text[self.starts[self.line(at)]..at].trim().is_empty()
    }

    fn indent(&self, at: usize) -> usize {
        let line = &self.text[self.starts[self.line(at)]..];
        line.len() - line.trim_start_matches([' ', '\t']).len()
    }
}

/// A statement or block header, not yet parsed.
pub struct Piece {
    pub trivia: Trivia,
    /// The text without its `;` or `{`.
    pub head: Range<usize>,
    pub end: End,
}

pub enum End {
    Semicolon,
    Block(Pieces),
    /// The enclosing block or the text ended before a `;`.
    Missing,
}

/// The inside of a block (or a whole file).
pub struct Pieces {
    pub pieces: Vec<Piece>,
    /// Comments after the last piece.
    pub tail: Vec<String>,
    /// The closing brace.
    pub close: Range<usize>,
}

struct OpenBlock {
    trivia: Trivia,
    head: Range<usize>,
    brace: usize,
    indent: usize,
    outer: Vec<Piece>,
}

struct Splitter<'l, 't> {
    lines: &'l Lines<'t>,
    by_indentation: bool,
    errors: Vec<Diagnostic>,
    stack: Vec<OpenBlock>,
    pieces: Vec<Piece>,
    /// Begin and end so far of the statement being read.
    current: Option<Range<usize>>,
    trivia: Trivia,
    newlines: usize,
    fatal: bool,
}

/// The statements of a text, with the errors of braces and quotes.
pub fn split(lines: &Lines<'_>) -> (Pieces, Vec<Diagnostic>) {
    let first = run(lines, false);
    let codes = |code: &str| first.1.iter().any(|e| e.code == code);
    if !codes("E0103") || codes("E0105") {
        return first;
    }
    let second = run(lines, true);
    // Without a usable indentation, the braces alone give fewer errors.
    if second.1.len() > first.1.len() { first } else { second }
}

fn run(lines: &Lines<'_>, by_indentation: bool) -> (Pieces, Vec<Diagnostic>) {
    let mut splitter = Splitter {
        lines,
        by_indentation,
        errors: vec![],
        stack: vec![],
        pieces: vec![],
        current: None,
        trivia: Trivia::default(),
        newlines: 0,
        fatal: false,
    };
    splitter.scan();
    let tail = std::mem::take(&mut splitter.trivia.before);
    let end = lines.text.len();
    (Pieces { pieces: splitter.pieces, tail, close: end..end }, splitter.errors)
}

impl Splitter<'_, '_> {
    fn scan(&mut self) {
        let text = self.lines.text;
        let bytes = text.as_bytes();
        let mut at = 0;
        while at < bytes.len() && !self.fatal {
            match bytes[at] {
                b'\n' => {
                    self.newlines += 1;
                    at += 1;
                }
                b' ' | b'\t' | b'\r' => at += 1,
                b'/' if bytes.get(at + 1) == Some(&b'/') => {
                    let end = text[at..].find('\n').map_or(text.len(), |n| at + n);
                    self.comment(text[at..end].trim_end());
                    at = end;
                }
                b'"' => {
                    let line_end = text[at + 1..].find('\n').map_or(text.len(), |n| at + 1 + n);
                    let end = match text[at + 1..line_end].find('"') {
                        Some(n) => at + n + 2,
                        None => {
                            // What follows such a sign more likely belongs to the statement than to the text.
                            let end = text[at..line_end].find([',', ')', ']', ';', '{']).map_or(line_end, |n| at + n);
                            let end = at + text[at..end].trim_end().len();
                            let e = Diagnostic::error("E0107", "this text is not closed").label(self.lines.span(at..end), "begins here");
                            self.errors.push(e.help("a text ends with `\"` on the line it began on"));
                            end
                        }
                    };
                    self.extend(at, end);
                    at = end;
                }
                b';' => {
                    match self.current.take() {
                        Some(head) => self.push(head, End::Semicolon),
                        None => {
                            let e = Diagnostic::error("E0101", "a `;` without a statement").label(self.lines.span(at..at + 1), "nothing before it");
                            self.errors.push(e.help("remove it"));
                        }
                    }
                    at += 1;
                }
                b'{' => {
                    self.open(at);
                    at += 1;
                }
                b'}' => {
                    self.close(at);
                    at += 1;
                }
                _ => {
                    let len = text[at..].chars().next().map_or(1, char::len_utf8);
                    self.extend(at, at + len);
                    at += len;
                }
            }
        }
        self.finish_statement();
        let end = text.trim_end().len();
        while self.fatal && !self.stack.is_empty() {
            self.pop(end..end);
        }
        while !self.stack.is_empty() {
            self.unclosed(end..end);
        }
    }

    fn comment(&mut self, comment: &str) {
        let same_line = self.newlines == 0 && self.current.is_none() && self.trivia.before.is_empty();
        if same_line && let Some(last) = self.pieces.last_mut().filter(|p| p.trivia.after.is_none()) {
            last.trivia.after = Some(comment.to_string());
        } else {
            if self.current.is_none() {
                self.note_blank();
            }
            self.trivia.before.push(comment.to_string());
        }
        self.newlines = 0;
    }

    /// Remembers an empty line before what comes now.
    fn note_blank(&mut self) {
        if self.newlines > 1 {
            if self.trivia.before.is_empty() {
                self.trivia.blank_before = !self.pieces.is_empty();
            } else {
                self.trivia.before.push(String::new());
            }
        }
        self.newlines = 0;
    }

    fn extend(&mut self, start: usize, end: usize) {
        if self.current.is_none() && self.by_indentation && self.lines.is_first(start) {
            let indent = self.lines.indent(start);
            while self.stack.last().is_some_and(|open| indent <= open.indent) {
                self.unclosed(start..start + 1);
            }
        }
        match &mut self.current {
            Some(range) => range.end = end,
            None => {
                self.note_blank();
                self.current = Some(start..end);
            }
        }
    }

    fn push(&mut self, head: Range<usize>, end: End) {
        let trivia = std::mem::take(&mut self.trivia);
        self.pieces.push(Piece { trivia, head, end });
        self.newlines = 0;
    }

    fn finish_statement(&mut self) {
        if let Some(head) = self.current.take() {
            self.push(head, End::Missing);
        }
    }

    fn open(&mut self, at: usize) {
        if self.stack.len() >= MAX_BLOCKS {
            let e = Diagnostic::error("E0105", format!("blocks are nested more than {MAX_BLOCKS} deep"));
            self.errors.push(e.label(self.lines.span(at..at + 1), "one too many").help("move inner blocks into functions"));
            self.current = None;
            self.fatal = true;
            return;
        }
        let head = self.current.take().unwrap_or(at..at);
        let trivia = std::mem::take(&mut self.trivia);
        let outer = std::mem::take(&mut self.pieces);
        self.stack.push(OpenBlock { trivia, brace: at, indent: self.lines.indent(head.start), head, outer });
        self.newlines = 0;
    }

    fn close(&mut self, at: usize) {
        self.finish_statement();
        if self.by_indentation && self.lines.is_first(at) {
            let indent = self.lines.indent(at);
            while self.stack.len() > 1 && self.stack.last().is_some_and(|open| indent < open.indent) {
                self.unclosed(at..at + 1);
            }
        }
        if self.stack.is_empty() {
            if self.errors.iter().any(|e| e.code == "E0104") {
                return; // Further `}` without a partner follow from the first one.
            }
            let e = Diagnostic::error("E0104", "a `}` that closes nothing").label(self.lines.span(at..at + 1), "no block is open here");
            self.errors.push(e.help("remove it, or look for a `}` too many above"));
            return;
        }
        self.pop(at..at + 1);
    }

    fn pop(&mut self, close: Range<usize>) {
        if let Some(open) = self.stack.pop() {
            let tail = std::mem::take(&mut self.trivia.before);
            self.trivia = Trivia::default();
            let pieces = std::mem::replace(&mut self.pieces, open.outer);
            self.pieces.push(Piece { trivia: open.trivia, head: open.head, end: End::Block(Pieces { pieces, tail, close }) });
            self.newlines = 0;
        }
    }

    /// Closes the innermost block at a place where its `}` is missing.
    fn unclosed(&mut self, at: Range<usize>) {
        if let Some(open) = self.stack.last() {
            let brace = self.lines.span(open.brace..open.brace + 1);
            let e = Diagnostic::error("E0103", "this `{` is never closed").label(brace, "opened here");
            self.errors.push(e.label(self.lines.span(at.clone()), "by the indentation, `}` is missing before this").help("add the `}`"));
        }
        // The comments read so far belong to what follows the block.
        let (trivia, newlines) = (std::mem::take(&mut self.trivia), self.newlines);
        self.pop(at.start..at.start);
        self.trivia = trivia;
        self.newlines = newlines;
    }
}

/// The errors of a statement's brackets that have no partner, or the first bracket that is nested too deep. A bracket
/// that closes an outer one leaves those within unclosed, so that none is blamed for what another lacks.
pub fn check_brackets(lines: &Lines<'_>, head: Range<usize>) -> Vec<Diagnostic> {
    let (mut open, mut owed, mut errors): (Vec<(usize, u8)>, Vec<u8>, Vec<Diagnostic>) = (vec![], vec![], vec![]);
    let bytes = lines.text.as_bytes();
    let (mut in_text, mut in_comment) = (false, false);
    for at in head {
        let byte = bytes[at];
        if byte == b'\n' {
            (in_text, in_comment) = (false, false);
        }
        if in_comment || (in_text && byte != b'"') {
            continue;
        }
        let closes = match byte {
            b'"' => {
                in_text = !in_text;
                continue;
            }
            b'/' if bytes.get(at + 1) == Some(&b'/') => {
                in_comment = true;
                continue;
            }
            b'(' | b'[' => {
                open.push((at, byte));
                if open.len() > MAX_BRACKETS {
                    let e = Diagnostic::error("E0105", format!("brackets are nested more than {MAX_BRACKETS} deep"));
                    errors.push(e.label(lines.span(at..at + 1), "one too many").help("name parts of the expression with `let`"));
                    return errors;
                }
                continue;
            }
            b')' => b'(',
            b']' => b'[',
            _ => continue,
        };
        let found = char::from(byte);
        match open.pop() {
            Some((_, kind)) if kind == closes => {}
            Some((start, kind)) => {
                match open.iter().rposition(|o| o.1 == closes) {
                    Some(outer) => open.truncate(outer),
                    None => owed.push(kind),
                }
                let e = Diagnostic::error("E0102", format!("`{}` is closed by `{found}`", char::from(kind)));
                errors.push(e.label(lines.span(at..at + 1), "does not fit").label(lines.span(start..start + 1), "opened here"));
            }
            // This is the partner of a bracket that was closed by another kind before.
            None if owed.contains(&closes) => owed.retain(|kind| *kind != closes),
            None => {
                let e = Diagnostic::error("E0102", format!("a `{found}` that closes nothing"));
                errors.push(e.label(lines.span(at..at + 1), "no bracket is open here").help("remove it"));
            }
        }
    }
    errors.extend(open.into_iter().map(|(at, kind)| {
        let partner = if kind == b'(' { ')' } else { ']' };
        let e = Diagnostic::error("E0102", format!("this `{}` is never closed", char::from(kind)));
        e.label(lines.span(at..at + 1), "opened here").help(format!("add the `{partner}`"))
    }));
    errors
}
