//! The tree of a script. The grammar is tree-sitter's: its tree says where an error is and goes on behind it.

use super::shell::{ScriptError, Shell};
use tree_sitter::{Parser, Tree};

/// Most nodes of a tree within each other.
const MOST_LEVELS: usize = 100;

fn tree(source: &str) -> Tree {
    let mut parser = Parser::new();
    parser.set_language(&tree_sitter_bash::LANGUAGE.into()).expect("invariant: the grammar is of this version");
    parser.parse(source, None).expect("invariant: there is a language, and no limit of time")
}

/// Parses a source, and names what the grammar does not understand of it.
pub fn parse(source: &str, first_line: usize, shell: &mut Shell) -> Result<Tree, ScriptError> {
    let tree = tree(source);
    look_through(&tree, source, first_line, shell)?;
    Ok(tree)
}

/// The source with braces where the grammar needs them: it ends the word `${A}_$B.c` behind the second `$`.
pub fn with_braces(source: &str) -> String {
    let tree = tree(source);
    let mut cursor = tree.walk();
    let mut ends = vec![];
    'all: loop {
        let node = cursor.node();
        if node.kind() == "$" && node.parent().is_none_or(|p| p.kind() != "simple_expansion") {
            ends.push(node.end_byte());
        }
        if cursor.goto_first_child() {
            continue;
        }
        while !cursor.goto_next_sibling() {
            if !cursor.goto_parent() {
                break 'all;
            }
        }
    }
    let mut out = source.to_string();
    for end in ends.into_iter().rev() {
        let name = source[end..].bytes().take_while(|b| b.is_ascii_alphanumeric() || *b == b'_').count();
        if name > 0 && !source.as_bytes()[end].is_ascii_digit() {
            out.insert(end + name, '}');
            out.insert(end, '{');
        }
    }
    out
}

/// Names what the grammar does not understand. Nodes that are too many within each other are an error.
fn look_through(tree: &Tree, source: &str, first_line: usize, shell: &mut Shell) -> Result<(), ScriptError> {
    let mut cursor = tree.walk();
    let mut depth = 0;
    loop {
        let node = cursor.node();
        let line = first_line + node.start_position().row;
        if node.is_missing() {
            shell.note(line, format!("a `{}` is missing", node.kind()));
        } else if node.is_error() {
            let text = source.get(node.byte_range()).unwrap_or("").trim();
            if !text.is_empty() && text != "\\" {
                shell.note(line, format!("`{}` is not understood{}", short(text), flags_in(text)));
            }
        }
        if depth > MOST_LEVELS {
            return Err(ScriptError::Deep(line));
        }
        if cursor.goto_first_child() {
            depth += 1;
            continue;
        }
        while !cursor.goto_next_sibling() {
            if !cursor.goto_parent() {
                return Ok(());
            }
            depth -= 1;
        }
    }
}

/// The first line of a statement, for a message.
pub fn short(source: &str) -> String {
    let line = source.trim().lines().next().unwrap_or("").trim_end_matches('\\').trim_end();
    let cut: String = line.chars().take(60).collect();
    if cut.len() < source.trim().len() { format!("{cut} ..") } else { cut }
}

/// The flags that a part of a script names, to be told when the part is not followed: `: --a, --b`.
pub fn flags_in(source: &str) -> String {
    let words =
        source.lines().filter(|l| !l.trim_start().starts_with('#')).flat_map(|l| l.split(|c: char| c.is_whitespace() || "\"'()=;".contains(c)));
    let mut flags: Vec<&str> = words.filter(|w| w.len() > 3 && w.starts_with("--") && !w.contains(['$', '{', '`'])).collect();
    flags.dedup();
    flags.truncate(200);
    if flags.is_empty() { String::new() } else { format!(": {}", flags.join(", ")) }
}
