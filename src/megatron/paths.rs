//! Parts of texts: `${NAME%.*}`, `basename`, `dirname`. Of a text that is known in part, what they take has to
//! be in the part that is known.

use super::conditions::matches;
use super::text::{ScriptPiece, Text};

/// Most bytes of a text of which a part is cut by a pattern: each of its ends is compared.
const MOST: usize = 4096;

impl Text {
    /// What is left without what a pattern says: `%` and `%%` cut the shortest and the longest end, `#` and
    /// `##` such a beginning. None if that is not known.
    pub fn cut(&self, op: &str, pattern: &str) -> Option<Text> {
        let is_plain = !pattern.contains(['?', '[', '\\', '"', '\'', '$', '`']);
        if !is_plain || self.len() > MOST || pattern.len() > MOST {
            return None;
        }
        let at_end = op.starts_with('%');
        let is_whole = self.whole().is_some();
        let piece = if at_end { self.pieces().last() } else { self.pieces().first() };
        let known = match piece {
            Some(ScriptPiece::Known(text)) => text.as_str(),
            Some(ScriptPiece::Unknown(_)) => return None,
            None => "",
        };
        // The longest match may reach into an unknown piece.
        if !is_whole && op.len() == 2 {
            return None;
        }
        let mut ends: Vec<usize> = known.char_indices().map(|(at, _)| at).chain([known.len()]).collect();
        // `%` and `#` try the shortest part first, `%%` and `##` the longest.
        if at_end == (op.len() == 1) {
            ends.reverse();
        }
        let cut = |at: &usize| if at_end { matches(&known[*at..], pattern) } else { matches(&known[..*at], pattern) };
        match ends.iter().find(|at| cut(at)) {
            Some(at) => Some(self.with_piece(at_end, if at_end { &known[..*at] } else { &known[*at..] })),
            // A longer part, which reaches into an unknown piece, may match.
            None => is_whole.then(|| self.clone()),
        }
    }

    /// With other text in place of its last piece, or of its first.
    fn with_piece(&self, is_last: bool, text: &str) -> Text {
        let mut out = Text::empty(self.line);
        let end = self.pieces().len().saturating_sub(1);
        for (k, piece) in self.pieces().iter().enumerate() {
            match piece {
                _ if k == if is_last { end } else { 0 } => out.push_known(text),
                ScriptPiece::Known(known) => out.push_known(known),
                ScriptPiece::Unknown(which) => out.push(&Text::unknown(*which, self.line)),
            }
        }
        out
    }

    /// Without this ending, if it has it.
    pub fn without_end(&self, ending: &str) -> Text {
        match self.pieces().last() {
            Some(ScriptPiece::Known(last)) if last.ends_with(ending) => self.with_piece(true, &last[..last.len() - ending.len()]),
            _ => self.clone(),
        }
    }

    /// What `basename` prints.
    pub fn base_name(&self) -> Option<Text> {
        match self.pieces() {
            [.., ScriptPiece::Known(last)] => {
                let last = last.trim_end_matches('/');
                match last.rsplit_once('/') {
                    Some((_, name)) => Some(Text::known(name, self.line)),
                    None => self.whole().map(|whole| Text::known(if last.is_empty() && !whole.is_empty() { "/" } else { last }, self.line)),
                }
            }
            [] => Some(self.clone()),
            // In `dir/$NAME`, the unknown name may have a `/` itself.
            _ => None,
        }
    }

    /// What `dirname` prints.
    pub fn dir_name(&self) -> Option<Text> {
        let Some(ScriptPiece::Known(last)) = self.pieces().last() else { return None };
        match last.trim_end_matches('/').rsplit_once('/') {
            Some(("", _)) if self.whole().is_some() => Some(Text::known("/", self.line)),
            Some((dir, _)) => Some(self.with_piece(true, dir.trim_end_matches('/'))),
            None => self.whole().map(|whole| Text::known(if whole.starts_with('/') { "/" } else { "." }, self.line)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(text: Option<Text>) -> Option<String> {
        text.map(|t| t.filled(|k| format!("<{k}>")))
    }

    #[test]
    fn parts_are_cut_as_a_shell_cuts_them() {
        let cut = |text: &str, op: &str, pattern: &str| shown(Text::known(text, 1).cut(op, pattern)).expect("it is known");
        assert_eq!(cut("a/b.c.d", "%", ".*"), "a/b.c");
        assert_eq!(cut("a/b.c.d", "%%", ".*"), "a/b");
        assert_eq!(cut("a/b/c", "#", "*/"), "b/c");
        assert_eq!(cut("a/b/c", "##", "*/"), "c");
        assert_eq!(cut("corpus_text", "%", "_text"), "corpus");
        assert_eq!(cut("corpus", "%", "_text"), "corpus");
        assert_eq!(cut("", "##", "*/"), "");
        assert_eq!(cut("größe.bin", "%", "e.bin"), "größ");
        assert_eq!(shown(Text::known("abc", 1).cut("%", "[bc]")), None);
    }

    #[test]
    fn names_and_directories_are_those_of_paths() {
        let of = |text: &str| {
            let text = Text::known(text, 1);
            (shown(text.dir_name()).expect("known"), shown(text.base_name()).expect("known"))
        };
        let pairs = [("a/b/c.sh", "a/b", "c.sh"), ("c.sh", ".", "c.sh"), ("/c", "/", "c"), ("a/b/", "a", "b"), ("/", "/", "/"), ("a//b", "a", "b")];
        for (path, dir, name) in pairs {
            assert_eq!(of(path), (dir.into(), name.into()), "{path}");
        }
    }

    #[test]
    fn what_is_unknown_stays_so_and_goes_with_the_rest() {
        let mut text = Text::unknown(0, 1);
        assert_eq!((text.base_name(), text.dir_name(), text.cut("##", "*/")), (None, None, None));
        text.push_known("/data/corpus.bin");
        assert_eq!(shown(text.cut("%", ".bin")), Some("<0>/data/corpus".into()));
        assert_eq!(shown(text.cut("%", ".idx")), None);
        assert_eq!(shown(text.cut("%%", ".*")), None);
        assert_eq!(shown(text.base_name()), Some("corpus.bin".into()));
        assert_eq!(shown(text.dir_name()), Some("<0>/data".into()));
        assert_eq!(shown(text.base_name().map(|t| t.without_end(".bin"))), Some("corpus".into()));
    }
}
