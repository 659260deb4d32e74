//! Texts of which a part may be unknown: what `$1` stands for, or a command would print.

/// The end of a line that a backslash joins with the next. It is a blank, so that words and lines are counted,
/// and nothing where a text is whole.
pub const JOINED: char = '\u{b}';

/// A part of a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ScriptPiece {
    Known(String),
    /// Index in the list of unknowns.
    Unknown(usize),
}

/// A value of a script, with the line on which it is written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Text {
    pieces: Vec<ScriptPiece>,
    pub line: usize,
}

impl Text {
    pub fn empty(line: usize) -> Text {
        Text { pieces: vec![], line }
    }

    pub fn known(text: impl Into<String>, line: usize) -> Text {
        let mut out = Text::empty(line);
        out.push_known(&text.into());
        out
    }

    pub fn unknown(which: usize, line: usize) -> Text {
        Text { pieces: vec![ScriptPiece::Unknown(which)], line }
    }

    pub fn pieces(&self) -> &[ScriptPiece] {
        &self.pieces
    }

    pub fn push_known(&mut self, text: &str) {
        match self.pieces.last_mut() {
            Some(ScriptPiece::Known(last)) => last.push_str(text),
            _ if text.is_empty() => {}
            _ => self.pieces.push(ScriptPiece::Known(text.into())),
        }
    }

    pub fn push(&mut self, text: &Text) {
        for piece in &text.pieces {
            match piece {
                ScriptPiece::Known(known) => self.push_known(known),
                ScriptPiece::Unknown(_) => self.pieces.push(piece.clone()),
            }
        }
    }

    /// The text, if all of it is known.
    pub fn whole(&self) -> Option<&str> {
        match self.pieces.as_slice() {
            [] => Some(""),
            [ScriptPiece::Known(text)] => Some(text),
            _ => None,
        }
    }

    /// The unknown that it is and nothing else.
    pub fn lone_unknown(&self) -> Option<usize> {
        match self.pieces.as_slice() {
            [ScriptPiece::Unknown(which)] => Some(*which),
            _ => None,
        }
    }

    pub fn unknowns(&self) -> impl Iterator<Item = usize> {
        self.pieces.iter().filter_map(|p| if let ScriptPiece::Unknown(which) = p { Some(*which) } else { None })
    }

    pub fn starts_with(&self, start: &str) -> bool {
        matches!(self.pieces.first(), Some(ScriptPiece::Known(text)) if text.starts_with(start))
    }

    pub fn ends_with(&self, end: &str) -> bool {
        matches!(self.pieces.last(), Some(ScriptPiece::Known(text)) if text.ends_with(end))
    }

    /// The bytes that are known.
    pub fn len(&self) -> usize {
        self.pieces.iter().map(|p| if let ScriptPiece::Known(text) = p { text.len() } else { 1 }).sum()
    }

    /// With `write` for what each unknown stands for.
    pub fn filled(&self, mut write: impl FnMut(usize) -> String) -> String {
        let mut piece = |p: &ScriptPiece| match p {
            ScriptPiece::Known(text) => text.clone(),
            ScriptPiece::Unknown(which) => write(*which),
        };
        self.pieces.iter().map(&mut piece).collect()
    }

    /// At the first `separator` of what is known.
    pub fn split_once(&self, separator: char) -> Option<(Text, Text)> {
        let at = self.pieces.iter().position(|p| matches!(p, ScriptPiece::Known(text) if text.contains(separator)))?;
        let ScriptPiece::Known(text) = &self.pieces[at] else { return None };
        let (left, right) = text.split_once(separator)?;
        let mut before = Text { pieces: self.pieces[..at].to_vec(), line: self.line };
        before.push_known(left);
        let mut after = Text::known(right, self.line);
        after.pieces.extend_from_slice(&self.pieces[at + 1..]);
        Some((before, after))
    }
}

/// Words as a shell makes them of texts: those in quotes stay whole, others fall apart at blanks.
#[derive(Default)]
pub struct Fields {
    done: Vec<Text>,
    open: Option<Text>,
}

impl Fields {
    /// Goes on with the word as it is, or begins one, even of nothing.
    pub fn quoted(&mut self, text: &Text) {
        self.open.get_or_insert_with(|| Text::empty(text.line)).push(text);
    }

    /// Goes on with the word, and ends it at each blank. Lines are counted: a string may go over many.
    pub fn split(&mut self, text: &Text) {
        let mut line = text.line;
        for piece in &text.pieces {
            match piece {
                ScriptPiece::Unknown(which) => self.quoted(&Text::unknown(*which, line)),
                ScriptPiece::Known(known) => {
                    for part in known.split_inclusive(char::is_whitespace) {
                        let word = part.trim_end_matches(char::is_whitespace);
                        if !word.is_empty() {
                            self.quoted(&Text::known(word, line));
                        }
                        if word.len() < part.len() {
                            self.end();
                            line += usize::from(part.ends_with(['\n', JOINED]));
                        }
                    }
                }
            }
        }
    }

    /// Ends the word, if one has begun.
    pub fn end(&mut self) {
        self.done.extend(self.open.take());
    }

    pub fn words(mut self) -> Vec<Text> {
        self.end();
        self.done
    }

    /// As one text, with a blank between words.
    pub fn joined(self, line: usize) -> Text {
        let mut out = Text::empty(line);
        for (k, word) in self.words().iter().enumerate() {
            if k > 0 {
                out.push_known(" ");
            }
            out.push(word);
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_split_at_blanks_and_keep_their_lines() {
        let mut fields = Fields::default();
        let mut text = Text::known("a b\n --c=", 3);
        text.push(&Text::unknown(0, 3));
        fields.split(&text);
        fields.end();
        fields.quoted(&Text::known("x y", 9));
        let words = fields.words();
        let shown: Vec<_> = words.iter().map(|w| (w.filled(|k| format!("<{k}>")), w.line)).collect();
        assert_eq!(shown, [("a".into(), 3), ("b".into(), 3), ("--c=<0>".into(), 4), ("x y".into(), 9)]);
    }

    #[test]
    fn texts_split_around_what_is_unknown() {
        let mut text = Text::known("--save=", 1);
        text.push(&Text::unknown(2, 1));
        text.push_known("/a=b");
        let (name, value) = text.split_once('=').expect("it has one");
        assert_eq!(name.whole(), Some("--save"));
        assert_eq!(value.filled(|k| k.to_string()), "2/a=b");
    }
}
