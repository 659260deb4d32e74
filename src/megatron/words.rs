//! Words of a script as its shell would expand them, as far as that can be known without running anything.

use super::shell::{ScriptError, Shell};
use super::text::{Fields, JOINED, Text};
use std::collections::BTreeMap;
use tree_sitter::Node;

/// Follows a source. What is in quotes and run later, as by `bash -c`, is a source of its own.
pub struct Walk<'s, 'n> {
    pub source: &'s str,
    /// The line of the script on which the source begins.
    pub first_line: usize,
    pub shell: &'s mut Shell,
    pub functions: BTreeMap<String, Node<'n>>,
    /// Sources and functions that this one is within.
    pub depth: usize,
}

/// Whether an expansion stands in quotes. Without them, blanks of its value end a word.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum QuoteContext {
    Within,
    Without,
}

impl<'s> Walk<'s, '_> {
    pub fn source_of(&self, node: Node<'_>) -> &'s str {
        self.source.get(node.byte_range()).unwrap_or("")
    }

    pub fn line(&self, node: Node<'_>) -> usize {
        self.first_line + node.start_position().row
    }

    /// The words that a node comes to: none, one or many.
    pub fn words(&mut self, node: Node<'_>) -> Result<Vec<Text>, ScriptError> {
        let mut fields = Fields::default();
        self.expand(node, QuoteContext::Without, &mut fields)?;
        Ok(fields.words())
    }

    /// The text that a node comes to where it stays whole, as in an assignment.
    pub fn text(&mut self, node: Node<'_>) -> Result<Text, ScriptError> {
        let mut fields = Fields::default();
        self.expand(node, QuoteContext::Within, &mut fields)?;
        Ok(fields.joined(self.line(node)))
    }

    pub fn expand(&mut self, node: Node<'_>, quotes: QuoteContext, out: &mut Fields) -> Result<(), ScriptError> {
        let (source, line) = (self.source_of(node), self.line(node));
        self.shell.charge(source.len(), line)?;
        match node.kind() {
            "string" => self.string(node, out),
            "translated_string" | "command_name" => node.named_child(0).map_or(Ok(()), |s| self.expand(s, quotes, out)),
            "raw_string" => {
                out.quoted(&Text::known(source.trim_matches('\''), line));
                Ok(())
            }
            "ansi_c_string" => {
                let inner = source.strip_prefix("$'").and_then(|s| s.strip_suffix('\'')).unwrap_or(source);
                out.quoted(&Text::known(inner.replace("\\n", "\n").replace("\\t", "\t").replace("\\'", "'").replace("\\\\", "\\"), line));
                Ok(())
            }
            "concatenation" => {
                let mut cursor = node.walk();
                node.children(&mut cursor).try_for_each(|part| self.expand(part, quotes, out))
            }
            "simple_expansion" => {
                let name = source.trim_start().trim_start_matches('$');
                // `$1_text` is the first argument, followed by text.
                let (name, more) = if name.starts_with(|c: char| c.is_ascii_digit()) { name.split_at(1) } else { (name, "") };
                self.parameter(name, None, line, quotes, out)?;
                if !more.is_empty() {
                    out.quoted(&Text::known(more, line));
                }
                Ok(())
            }
            "expansion" => self.expansion(node, quotes, out),
            "arithmetic_expansion" => {
                let text = match self.compute(node)? {
                    Some(n) => Text::known(n.to_string(), line),
                    None => self.shell.printed(source, line),
                };
                out.quoted(&text);
                Ok(())
            }
            "command_substitution" | "process_substitution" => self.substitution(source, line, out),
            _ if source.starts_with("~/") => {
                self.parameter("HOME", None, line, QuoteContext::Within, out)?;
                out.quoted(&Text::known(unescaped(&source[1..]), line));
                Ok(())
            }
            _ => {
                let literal = Text::known(unescaped(source), line);
                // A default without quotes may have blanks, and is split at them.
                if literal.starts_with(" ") {
                    out.split(&literal)
                } else {
                    out.quoted(&literal)
                }
                Ok(())
            }
        }
    }

    /// What is in double quotes. The tree leaves out blanks between its parts, so these are taken from the source.
    fn string(&mut self, node: Node<'_>, out: &mut Fields) -> Result<(), ScriptError> {
        let mut cursor = node.walk();
        let parts: Vec<Node> = node.named_children(&mut cursor).collect();
        let end = node.end_byte().saturating_sub(1);
        if let [only] = parts.as_slice()
            && (only.start_byte(), only.end_byte()) == (node.start_byte() + 1, end)
            && only.kind() != "string_content"
        {
            // `"${A[@]}"` gives no word if the array is empty.
            return self.expand(*only, QuoteContext::Within, out);
        }
        self.spliced(node.start_byte() + 1, end, self.line(node), &parts, out)
    }

    /// The source from one byte to another, with parts of it expanded and all else as it stands.
    pub fn spliced(&mut self, start: usize, end: usize, line: usize, parts: &[Node<'_>], out: &mut Fields) -> Result<(), ScriptError> {
        out.quoted(&Text::empty(line));
        let mut at = start;
        let source = self.source;
        let literal = |from: usize, to: usize| unescaped_in_quotes(source.get(from..to).unwrap_or(""));
        for part in parts.iter().filter(|p| !matches!(p.kind(), "string_content" | "heredoc_content")) {
            // The node of a `$(` includes the blanks before it.
            let own = self.source_of(*part);
            let begin = part.start_byte() + (own.len() - own.trim_start().len());
            out.quoted(&Text::known(literal(at, begin), line));
            self.expand(*part, QuoteContext::Within, out)?;
            at = part.end_byte();
        }
        out.quoted(&Text::known(literal(at, end), line));
        Ok(())
    }

    /// `$(command)`: nothing is run. Of the directory it is known how a shell calls it, of some commands what they
    /// make of their words, and tree-sitter takes `$((..))` in a default for a command.
    fn substitution(&mut self, source: &str, line: usize, out: &mut Fields) -> Result<(), ScriptError> {
        let source = source.trim();
        let command = source.trim_start_matches("$(").trim_end_matches(')').trim_matches('`').trim();
        if command == "pwd" {
            return self.parameter("PWD", None, line, QuoteContext::Within, out);
        }
        let inner = source.strip_prefix("$(").and_then(|s| s.strip_suffix(')')).unwrap_or(source.trim_matches('`'));
        let mut text = self.known_output(inner.trim(), line)?;
        if source.starts_with("$((") {
            text = self
                .within(source, line, |walk, root| {
                    let mut node = root;
                    while node.kind() != "arithmetic_expansion" {
                        let Some(inner) = node.named_child(0) else { return Ok(None) };
                        node = inner;
                    }
                    Ok(walk.compute(node)?.map(|n| Text::known(n.to_string(), line)))
                })?
                .flatten();
        }
        let text = text.unwrap_or_else(|| self.shell.printed(source, line));
        out.quoted(&text);
        Ok(())
    }

    /// A variable's name and index: `A[@]`.
    pub fn named(&self, node: Node<'_>) -> (String, Option<String>) {
        if node.kind() != "subscript" {
            return (self.source_of(node).into(), None);
        }
        let source = self.source_of(node);
        let (name, index) = source.split_once('[').unwrap_or((source, ""));
        (name.into(), Some(index.trim_end_matches(']').into()))
    }
}

/// A word without the backslashes that quote its characters; one at the end of a line joins it with the next.
fn unescaped(word: &str) -> String {
    let mut out = String::with_capacity(word.len());
    let mut chars = word.chars();
    while let Some(c) = chars.next() {
        match c {
            '\\' => out.extend(chars.next().filter(|c| *c != '\n')),
            _ => out.push(c),
        }
    }
    out
}

/// The same in double quotes, where a backslash quotes only what means something there.
fn unescaped_in_quotes(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match (c, chars.peek()) {
            // A shell drops an escaped end of a line. Beside a blank it is kept here, so that lines can be counted.
            ('\\', Some('\n')) => {
                chars.next();
                if out.ends_with(char::is_whitespace) || chars.peek().is_none_or(|c| c.is_whitespace()) {
                    out.push(JOINED);
                }
            }
            ('\\', Some('"' | '$' | '`' | '\\')) => out.extend(chars.next()),
            _ => out.push(c),
        }
    }
    out
}
