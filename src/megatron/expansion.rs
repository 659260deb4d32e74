//! Parameters: `$NAME`, `${NAME:-default}`, `${NAME[@]}`, `${NAME%.*}`.

use super::shell::{ScriptError, ShellValue};
use super::text::{Fields, Text};
use super::words::{QuoteContext, Walk};
use tree_sitter::Node;

impl Walk<'_, '_> {
    /// `${..}`.
    pub fn expansion(&mut self, node: Node<'_>, quotes: QuoteContext, out: &mut Fields) -> Result<(), ScriptError> {
        let line = self.line(node);
        let mut cursor = node.walk();
        let parts: Vec<Node> = node.children(&mut cursor).collect();
        let is_name = |n: &Node| matches!(n.kind(), "variable_name" | "subscript" | "special_variable_name");
        let Some(at) = parts.iter().position(is_name) else { return self.not_followed(node, out) };
        let prefix = &parts[1..at];
        let (name, index) = self.named(parts[at]);
        let rest: Vec<Node> = parts[at + 1..].iter().copied().filter(|n| n.kind() != "}").collect();
        let value = self.shell.read(&name);
        let is_empty = match &value {
            Some(ShellValue::Text(text)) => text.whole() == Some(""),
            Some(ShellValue::Array(all)) => all.is_empty(),
            None => true,
        };
        match (prefix.first().map(Node::kind), rest.first().map(Node::kind)) {
            (None, None) => self.parameter(&name, index.as_deref(), line, quotes, out),
            (None, Some(":-" | "-" | ":=" | "=")) => {
                let op = rest[0].kind();
                if value.is_some() && !(is_empty && op.starts_with(':')) {
                    return self.parameter(&name, index.as_deref(), line, quotes, out);
                }
                let mut default = Fields::default();
                rest[1..].iter().try_for_each(|part| self.expand(*part, quotes, &mut default))?;
                let words = default.words();
                if op.ends_with('=') {
                    let mut whole = Fields::default();
                    words.iter().for_each(|w| whole.split(w));
                    self.shell.assign(&name, ShellValue::Text(whole.joined(line)));
                }
                let shown = words.iter().map(|w| self.shell.shown(w)).collect::<Vec<_>>().join(" ");
                let say = if shown.is_empty() { "nothing".into() } else { format!("`{shown}`") };
                let whose = if name.parse::<u32>().is_ok() { format!("argument {name}") } else { format!("`{name}` of the environment") };
                self.shell.note(line, format!("{whose} is taken as {say}, the script's default (`--set {name}=..` gives another)"));
                for (k, word) in words.iter().enumerate() {
                    if k > 0 {
                        out.end();
                    }
                    out.quoted(word);
                }
                Ok(())
            }
            (None, Some(":+" | "+")) if is_empty => Ok(()),
            (None, Some(":+" | "+")) => rest[1..].iter().try_for_each(|part| self.expand(*part, quotes, out)),
            (None, Some(":?" | "?")) => self.parameter(&name, index.as_deref(), line, quotes, out),
            (None, Some(op @ ("%" | "%%" | "#" | "##"))) => {
                let mut pattern = Fields::default();
                rest[1..].iter().try_for_each(|part| self.expand(*part, QuoteContext::Within, &mut pattern))?;
                let pattern = pattern.joined(line);
                let mut whole = Fields::default();
                self.parameter(&name, index.as_deref(), line, QuoteContext::Within, &mut whole)?;
                match pattern.whole().and_then(|pattern| whole.joined(line).cut(op, pattern)) {
                    Some(text) if quotes == QuoteContext::Within => out.quoted(&text),
                    Some(text) => out.split(&text),
                    None => return self.not_followed(node, out),
                }
                Ok(())
            }
            (Some("#"), None) if index.as_deref().is_some_and(|i| i == "@" || i == "*") => {
                let n = if let Some(ShellValue::Array(all)) = &value { all.len() } else { usize::from(!is_empty) };
                out.quoted(&Text::known(n.to_string(), line));
                Ok(())
            }
            (None, Some(":")) if name == "@" => {
                let from = rest.get(1).and_then(|n| self.source_of(*n).parse::<usize>().ok()).unwrap_or(1);
                let all = self.shell.arguments().into_iter().skip(from.saturating_sub(1)).collect();
                self.spread(all, quotes, out)
            }
            _ => self.not_followed(node, out),
        }
    }

    /// An expansion that is not understood, as one that replaces a part of a text: it is unknown.
    fn not_followed(&mut self, node: Node<'_>, out: &mut Fields) -> Result<(), ScriptError> {
        let text = self.shell.printed(self.source_of(node), self.line(node));
        out.quoted(&text);
        Ok(())
    }

    /// The value of a variable, or of one of its elements.
    pub fn parameter(&mut self, name: &str, index: Option<&str>, line: usize, quotes: QuoteContext, out: &mut Fields) -> Result<(), ScriptError> {
        match name {
            "@" | "*" => return self.spread(self.shell.arguments(), quotes, out),
            "#" => {
                out.quoted(&Text::known(self.shell.arguments().len().to_string(), line));
                return Ok(());
            }
            "?" => {
                out.quoted(&Text::known("0", line));
                return Ok(());
            }
            _ if !is_name(name) => {
                let text = self.shell.printed(&format!("${name}"), line);
                out.quoted(&text);
                return Ok(());
            }
            _ => {}
        }
        let value = self.shell.read(name);
        let text = match (value, index) {
            (Some(ShellValue::Array(all)), Some("*")) if quotes == QuoteContext::Within => {
                let mut fields = Fields::default();
                self.spread(all, quotes, &mut fields)?;
                out.quoted(&fields.joined(line));
                return Ok(());
            }
            (Some(ShellValue::Array(all)), Some("@" | "*")) => return self.spread(all, quotes, out),
            (Some(ShellValue::Array(all)), index) => {
                let k = index.map_or(Some(0), |i| i.parse::<usize>().ok());
                k.and_then(|k| all.into_iter().nth(k)).unwrap_or_else(|| Text::empty(line))
            }
            (Some(ShellValue::Text(text)), _) => text,
            (None, Some("@" | "*")) => {
                self.shell.note(line, format!("the array `{name}` is empty: nothing in the script sets it"));
                return Ok(());
            }
            (None, _) => self.shell.missing(name, line),
        };
        self.shell.charge(text.len(), line)?;
        if quotes == QuoteContext::Within {
            out.quoted(&text)
        } else {
            out.split(&text)
        }
        Ok(())
    }

    /// Elements, each a word of its own.
    fn spread(&mut self, all: Vec<Text>, quotes: QuoteContext, out: &mut Fields) -> Result<(), ScriptError> {
        for (k, element) in all.iter().enumerate() {
            self.shell.charge(element.len(), element.line)?;
            if k > 0 {
                out.end();
            }
            if quotes == QuoteContext::Within { out.quoted(element) } else { out.split(element) }
        }
        Ok(())
    }
}

/// Whether a parameter is a variable's name, or the number of an argument.
fn is_name(name: &str) -> bool {
    let is_word = name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    is_word && (!name.starts_with(|c: char| c.is_ascii_digit()) || name.parse::<u32>().is_ok()) && !name.is_empty()
}
