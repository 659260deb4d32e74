//! What is left of a statement that does not parse: the names that it declares, and the statement without the part
//! that is wrong, so that one mistake does not hide the next.

use std::ops::Range;

/// Stands for an expression that did not parse. Where a text has it itself, that is an error.
pub const HOLE: char = '\u{1A}';

/// The bytes of the smallest part around `at`, where parsing failed, that can be an expression: what stands between
/// brackets, commas and the like. It ends before `at` if one of these comes too early. `None` if the statement does
/// not begin as it should.
pub fn part(text: &str, at: usize) -> Option<Range<usize>> {
    let tokens = tokens(text);
    // For each open bracket, where its current part begins.
    let mut begins: Vec<Option<usize>> = vec![None];
    for token in tokens.iter().filter(|t| t.start < at) {
        match &text[token.clone()] {
            "(" | "[" => begins.push(Some(token.end)),
            ")" | "]" => drop(begins.pop()),
            "," | ":" | "=" | "~" | "|" => *begins.last_mut()? = Some(token.end),
            _ => {}
        }
    }
    let begin = begins.pop()??;
    let mut depth = 0usize;
    let ends = |token: &&Range<usize>| {
        let word = &text[(*token).clone()];
        let ends = depth == 0 && matches!(word, ")" | "]" | ",");
        match word {
            "(" | "[" => depth += 1,
            ")" | "]" => depth = depth.saturating_sub(1),
            _ => {}
        }
        ends
    };
    let end = tokens.iter().filter(|t| t.start >= begin).find(ends).map_or(text.len(), |t| t.start);
    let inside = |t: &&Range<usize>| begin <= t.start && t.start < end;
    Some(tokens.iter().find(inside)?.start..tokens.iter().rfind(inside)?.end)
}

/// The statement with a [`HOLE`] in place of a part, as long as before and in the same lines.
pub fn without(text: &str, part: &Range<usize>) -> String {
    let blank = |b: u8| if b == b'\n' { '\n' } else { ' ' };
    let rest: String = text.as_bytes()[part.start + 1..part.end].iter().map(|b| blank(*b)).collect();
    format!("{}{HOLE}{rest}{}", &text[..part.start], &text[part.end..])
}

/// The names that a statement seems to declare: what stands after a word that declares, up to the sign that ends the
/// names. There can be several such words, as a `;` may be missing.
pub fn names(text: &str) -> Vec<Range<usize>> {
    let mut out = vec![];
    // The word that declares, whether its list of names goes on, and whether a name may come now.
    let (mut declares, mut listing, mut open, mut depth) = ("", false, false, 0usize);
    for token in tokens(text) {
        match &text[token.clone()] {
            word @ ("let" | "dim" | "input" | "param" | "state" | "fn" | "model" | "metric" | "import") if depth == 0 => {
                (declares, listing, open) = (word, true, true);
            }
            sign @ ("=" | ":" | "~" | "(" | "[" | ")" | "]") => {
                (listing, open) = (declares == "dim", false);
                match sign {
                    "(" | "[" => depth += 1,
                    ")" | "]" => depth = depth.saturating_sub(1),
                    _ => {}
                }
            }
            "," => open = listing && depth == 0,
            word if open && word.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_') => {
                out.push(token);
                open = false;
            }
            _ => {}
        }
    }
    out
}

/// Words, texts in quotes, and other signs one by one; no comments.
fn tokens(text: &str) -> Vec<Range<usize>> {
    let mut out = vec![];
    let mut at = 0;
    while let Some(first) = text[at..].chars().next() {
        let rest = &text[at..];
        let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let len = match first {
            '/' if rest.starts_with("//") => rest.find('\n').unwrap_or(rest.len()),
            '"' => rest[1..].find(['"', '\n']).map_or(rest.len(), |n| n + 2),
            c if is_word(c) => rest.find(|c| !is_word(c)).unwrap_or(rest.len()),
            c => c.len_utf8(),
        };
        if !first.is_whitespace() && !rest.starts_with("//") {
            out.push(at..at + len);
        }
        at += len;
    }
    out
}
