//! Follows the statements of a script to the training that it starts. Nothing is run; what it sources is read if it
//! is a file beside it.
//!
//! Each statement is followed once, in order; loops over lists as often as these have words.

use super::conditions::ConditionValue;
use super::grammar::{flags_in, parse, short, with_braces};
use super::launch;
use super::shell::{ScriptError, Shell, ShellValue};
use super::text::{Fields, JOINED, Text};
use super::words::Walk;
use std::collections::BTreeMap;
use tree_sitter::Node;

/// Most sources, and functions, within each other.
pub const MOST_SOURCES: usize = 8;

/// Commands of which nothing is to be said: they change no flag.
const SILENT: &[&str] = &[
    "echo", "printf", "set", "shopt", "true", ":", "mkdir", "wait", "tee", "sleep", "trap", "ulimit", "date", "ls", "which", "hostname", "exit",
    "return",
];

/// Follows a script from its first line on.
pub fn follow(source: &str, shell: &mut Shell) -> Result<(), ScriptError> {
    let source = with_braces(source);
    let tree = parse(&source, 1, shell)?;
    let mut walk = Walk { source: &source, first_line: 1, shell, functions: BTreeMap::new(), depth: 0 };
    walk.all(tree.root_node())
}

impl<'n> Walk<'_, 'n> {
    /// Calls `then` with a source that this one has in quotes, and its tree; not if they are too many within
    /// each other.
    pub fn within<T>(
        &mut self,
        source: &str,
        line: usize,
        then: impl for<'t> FnOnce(&mut Walk<'_, 't>, Node<'t>) -> Result<T, ScriptError>,
    ) -> Result<Option<T>, ScriptError> {
        if self.depth >= MOST_SOURCES {
            return Err(ScriptError::Deep(line));
        }
        self.shell.charge(source.len(), line)?;
        let source = with_braces(source);
        let tree = parse(&source, line, self.shell)?;
        let mut walk = Walk { source: &source, first_line: line, shell: self.shell, functions: BTreeMap::new(), depth: self.depth + 1 };
        then(&mut walk, tree.root_node()).map(Some)
    }

    /// Follows a text that a shell is to run.
    fn nested(&mut self, text: &Text) -> Result<(), ScriptError> {
        let source = self.shell.shown(text).replace(JOINED, "\\\n");
        self.within(&source, text.line, |walk, root| walk.all(root))?;
        Ok(())
    }

    /// Follows all statements in a node.
    pub fn all(&mut self, node: Node<'n>) -> Result<(), ScriptError> {
        let mut cursor = node.walk();
        let statements: Vec<Node> = node.named_children(&mut cursor).collect();
        statements.into_iter().try_for_each(|s| self.statement(s))
    }

    pub fn statement(&mut self, node: Node<'n>) -> Result<(), ScriptError> {
        if self.shell.has_ended {
            return Ok(());
        }
        let line = self.line(node);
        self.shell.step(line)?;
        let mut cursor = node.walk();
        match node.kind() {
            "comment" | "ERROR" | "heredoc_redirect" | "file_redirect" | "herestring_redirect" => Ok(()),
            "variable_assignment" => self.assignment(node),
            "declaration_command" => self.declaration(node),
            "unset_command" => {
                let names: Vec<Node> = node.named_children(&mut cursor).collect();
                names.into_iter().for_each(|n| self.shell.unset(self.source_of(n)));
                Ok(())
            }
            "variable_assignments" | "do_group" | "subshell" | "pipeline" | "program" => self.all(node),
            "compound_statement" if self.source_of(node).starts_with("((") => {
                self.shell.note(line, format!("`{}` is not followed", short(self.source_of(node))));
                Ok(())
            }
            "compound_statement" => self.all(node),
            "list" | "test_command" | "negated_command" => self.truth(node).map(|_| ()),
            "if_statement" => self.conditional(node),
            "case_statement" => self.case(node),
            "for_statement" => self.each(node),
            "while_statement" => {
                let condition = node.child_by_field_name("condition");
                let truth = condition.map_or(Ok(ConditionValue::open(false)), |c| self.truth(c))?;
                if truth.holds || truth.is_open {
                    self.shell.note(line, format!("the loop `{}` is not followed{}", short(self.source_of(node)), flags_in(self.source_of(node))));
                }
                Ok(())
            }
            "function_definition" => {
                if let Some((name, body)) = node.child_by_field_name("name").zip(node.child_by_field_name("body")) {
                    self.functions.insert(self.source_of(name).into(), body);
                }
                Ok(())
            }
            "redirected_statement" => self.redirected(node),
            "command" => self.command(node),
            _ => {
                let source = self.source_of(node).trim();
                if !source.is_empty() && source != "\\" {
                    self.shell.note(line, format!("`{}` is not understood{}", short(source), flags_in(source)));
                }
                Ok(())
            }
        }
    }

    /// `NAME=text`, `NAME+=text`, `NAME=(words)`.
    fn assignment(&mut self, node: Node<'n>) -> Result<(), ScriptError> {
        let line = self.line(node);
        let Some(name) = node.child_by_field_name("name") else { return Ok(()) };
        let (name, index) = self.named(name);
        let appends = node.child(1).is_some_and(|c| c.kind() == "+=");
        let value = match node.child_by_field_name("value") {
            Some(array) if array.kind() == "array" => {
                let mut words = vec![];
                let mut cursor = array.walk();
                for element in array.named_children(&mut cursor).filter(|e| !matches!(e.kind(), "comment" | "ERROR")).collect::<Vec<_>>() {
                    words.extend(self.words(element)?);
                }
                ShellValue::Array(words)
            }
            Some(text) => ShellValue::Text(self.text(text)?),
            None => ShellValue::Text(Text::empty(line)),
        };
        if index.is_some() {
            self.shell.note(line, format!("`{}` is not followed", short(self.source_of(node))));
            return Ok(());
        }
        let before = if appends { self.shell.read(&name) } else { None };
        let value = match (before, value) {
            (Some(ShellValue::Array(mut all)), ShellValue::Array(more)) => {
                all.extend(more);
                ShellValue::Array(all)
            }
            (Some(ShellValue::Array(mut all)), ShellValue::Text(more)) => {
                match all.first_mut() {
                    Some(first) => first.push(&more),
                    None => all.push(more),
                }
                ShellValue::Array(all)
            }
            (Some(ShellValue::Text(text)), ShellValue::Array(more)) => ShellValue::Array(std::iter::once(text).chain(more).collect()),
            (Some(ShellValue::Text(mut text)), ShellValue::Text(more)) => {
                text.push(&more);
                ShellValue::Text(text)
            }
            (None, value) => value,
        };
        let bytes = match &value {
            ShellValue::Text(text) => text.len(),
            ShellValue::Array(all) => all.iter().map(Text::len).sum(),
        };
        self.shell.charge(bytes, line)?;
        self.shell.assign(&name, value);
        Ok(())
    }

    /// `export A=1 B`, `declare -a A=(..)`, `local A=1`.
    fn declaration(&mut self, node: Node<'n>) -> Result<(), ScriptError> {
        let exports = node.child(0).is_some_and(|c| c.kind() == "export");
        let mut cursor = node.walk();
        for part in node.named_children(&mut cursor).collect::<Vec<_>>() {
            if part.kind() == "variable_assignment" {
                self.assignment(part)?;
            }
            let name = if part.kind() == "variable_name" { Some(part) } else { part.child_by_field_name("name") };
            if let Some(name) = name.filter(|_| exports) {
                let (name, line) = (self.source_of(name).to_string(), self.line(part));
                self.shell.exported.push((name, line));
            }
        }
        Ok(())
    }

    /// A command with files for its input or output. Only the output's name is lost; what a shell reads from
    /// the script itself is followed.
    fn redirected(&mut self, node: Node<'n>) -> Result<(), ScriptError> {
        let Some(body) = node.child_by_field_name("body") else { return Ok(()) };
        self.statement(body)?;
        let name = body.child_by_field_name("name").map_or("", |n| self.source_of(n));
        let mut cursor = node.walk();
        for heredoc in node.named_children(&mut cursor).filter(|c| c.kind() == "heredoc_redirect").collect::<Vec<_>>() {
            let mut cursor = heredoc.walk();
            let parts: Vec<Node> = heredoc.named_children(&mut cursor).collect();
            let Some(text) = parts.iter().find(|p| p.kind() == "heredoc_body") else { continue };
            let line = self.line(*text);
            if !matches!(name, "sbatch" | "bash" | "sh" | "srun" | "ssh") {
                self.shell.note(line, format!("what `{name}` reads here is not followed{}", flags_in(self.source_of(*text))));
                continue;
            }
            let is_quoted = parts.iter().any(|p| p.kind() == "heredoc_start" && self.source_of(*p).starts_with(['\'', '"']));
            let mut fields = Fields::default();
            if is_quoted {
                fields.quoted(&Text::known(self.source_of(*text), line));
            } else {
                let mut cursor = text.walk();
                let expanded: Vec<Node> = text.named_children(&mut cursor).collect();
                self.spliced(text.start_byte(), text.end_byte(), line, &expanded, &mut fields)?;
            }
            self.nested(&fields.joined(line))?;
        }
        Ok(())
    }

    fn command(&mut self, node: Node<'n>) -> Result<(), ScriptError> {
        let line = self.line(node);
        let mut cursor = node.walk();
        let parts: Vec<Node> = node.children(&mut cursor).filter(|c| !matches!(c.kind(), "comment" | "ERROR")).collect();
        let (set, words): (Vec<Node>, Vec<Node>) = parts.into_iter().filter(Node::is_named).partition(|p| p.kind() == "variable_assignment");
        let Some(name) = node.child_by_field_name("name") else { return set.into_iter().try_for_each(|s| self.assignment(s)) };
        if let Some(last) = set.last() {
            let between = self.source.get(last.end_byte()..name.start_byte()).unwrap_or("");
            if between.contains('\n') && !between.contains('\\') {
                // A blank at the end of a line of assignments hides its end from tree-sitter.
                set.iter().try_for_each(|s| self.assignment(*s))?;
                let rest = self.source.get(name.start_byte()..node.end_byte()).unwrap_or("");
                self.within(rest, self.first_line + name.start_position().row, |walk, root| walk.all(root))?;
                return Ok(());
            }
            for one in &set {
                if let Some(variable) = one.child_by_field_name("name") {
                    let variable = self.source_of(variable).to_string();
                    self.shell.exported.push((variable, line));
                }
            }
        }
        let mut expanded = vec![];
        for word in words {
            expanded.extend(self.words(word)?);
        }
        let known = expanded.first().and_then(Text::whole).unwrap_or("").to_string();
        if let Some(body) = self.functions.get(&known).copied() {
            return self.call(body, expanded[1..].to_vec(), line);
        }
        match known.as_str() {
            "exit" | "return" => {
                self.shell.has_ended = true;
                Ok(())
            }
            "source" | "." => self.sourced(&expanded, line),
            "eval" => {
                let mut fields = Fields::default();
                expanded[1..].iter().for_each(|word| {
                    fields.end();
                    fields.quoted(word);
                });
                // Lines of the evaluated text are those of the string.
                let begins = expanded.get(1).map_or(line, |first| first.line);
                self.nested(&fields.joined(begins))
            }
            _ => match launch::shell_text(&expanded) {
                Some((before, text)) => {
                    let first = self.shell.launches.len();
                    let text = text.clone();
                    let before = before.to_vec();
                    self.nested(&text)?;
                    for launch in &mut self.shell.launches[first..] {
                        launch.before.splice(..0, before.iter().cloned());
                    }
                    Ok(())
                }
                None => {
                    match launch::find(&expanded, line) {
                        Some(launch) => self.shell.launches.push(launch),
                        None if SILENT.contains(&known.as_str()) => {}
                        None => self.shell.note(line, format!("`{}` is not run", short(self.source_of(node)))),
                    }
                    Ok(())
                }
            },
        }
    }

    /// Follows a function with these arguments.
    fn call(&mut self, body: Node<'n>, arguments: Vec<Text>, line: usize) -> Result<(), ScriptError> {
        if self.depth >= MOST_SOURCES {
            return Err(ScriptError::Deep(line));
        }
        let before = self.shell.arguments.replace(arguments);
        self.depth += 1;
        let done = self.statement(body);
        self.depth -= 1;
        self.shell.arguments = before;
        // The function may have ended with `return`.
        self.shell.has_ended = false;
        done
    }
}
