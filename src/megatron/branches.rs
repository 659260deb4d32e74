//! Branches and loops: which of them a shell would take.

use super::conditions::{ConditionValue, matches};
use super::grammar::{flags_in, short};
use super::shell::{ScriptError, ShellValue};
use super::words::Walk;
use tree_sitter::Node;

impl<'n> Walk<'_, 'n> {
    /// Follows a statement, and says whether it would succeed.
    pub fn truth(&mut self, node: Node<'n>) -> Result<ConditionValue, ScriptError> {
        let mut cursor = node.walk();
        let parts: Vec<Node> = node.children(&mut cursor).filter(|c| c.kind() != "comment").collect();
        match node.kind() {
            "test_command" => self.test(node),
            "compound_statement" if self.source_of(node).starts_with("((") => self.test(node),
            "negated_command" => match parts.last() {
                Some(last) => Ok(self.truth(*last)?.not()),
                None => Ok(ConditionValue::open(false)),
            },
            "list" => {
                let [left, op, right] = parts.as_slice() else { return Ok(ConditionValue::open(false)) };
                let first = self.truth(*left)?;
                let goes_on = if op.kind() == "&&" { first } else { first.not() };
                if !goes_on.holds {
                    self.skipped(*right, goes_on, self.source_of(*left));
                    return Ok(if op.kind() == "&&" { first.and(ConditionValue::open(false)) } else { first });
                }
                self.truth(*right)
            }
            "command" => {
                let name = node.child_by_field_name("name").map_or("", |n| self.source_of(n));
                if matches!(name, "test" | "command" | "type" | "grep" | "false" | "true" | ":") {
                    return Ok(self.succeeds(name));
                }
                self.statement(node)?;
                Ok(ConditionValue::sure(true))
            }
            _ => {
                self.statement(node)?;
                Ok(ConditionValue::sure(true))
            }
        }
    }

    /// Says of a part that is not followed what it would have set.
    fn skipped(&mut self, node: Node<'_>, truth: ConditionValue, condition: &str) {
        let flags = flags_in(self.source_of(node));
        let sets = self.source_of(node).contains('=');
        if flags.is_empty() && !(truth.is_open && sets) {
            return;
        }
        let condition = short(condition);
        let why = if truth.is_open {
            format!("`{condition}` is taken not to hold (`--set NAME=VALUE` may say otherwise)")
        } else {
            format!("`{condition}` decides so")
        };
        self.shell.note(self.line(node), format!("`{}` is not followed, as {why}{flags}", short(self.source_of(node))));
    }

    pub fn conditional(&mut self, node: Node<'n>) -> Result<(), ScriptError> {
        let mut cursor = node.walk();
        let parts: Vec<Node> = node.children(&mut cursor).filter(|c| c.kind() != "comment").collect();
        let mut is_done = false;
        let mut text = "";
        // The first branch stands between `if` and the first `elif` or `else`.
        let (first, others): (Vec<Node>, Vec<Node>) = parts.iter().partition(|p| !matches!(p.kind(), "elif_clause" | "else_clause"));
        for branch in std::iter::once(first).chain(others.into_iter().map(|o| {
            let mut cursor = o.walk();
            o.children(&mut cursor).filter(|c| c.kind() != "comment").collect()
        })) {
            let then = branch.iter().position(|p| p.kind() == "then");
            let (before, body) = branch.split_at(then.unwrap_or(0));
            let condition: Vec<Node> = before.iter().copied().filter(Node::is_named).collect();
            let body: Vec<Node> = body.iter().copied().filter(Node::is_named).collect();
            let mut truth = ConditionValue::sure(!is_done);
            if !is_done && let Some((last, earlier)) = condition.split_last() {
                earlier.iter().try_for_each(|c| self.statement(*c))?;
                truth = self.truth(*last)?;
                text = self.source_of(*last);
                // A branch that ends the script reports an error, so it is not taken if its condition is unknown.
                if truth.is_open && body.iter().any(|s| leaves(self.source_of(*s))) {
                    truth.holds = false;
                    continue;
                }
            }
            if truth.holds {
                if truth.is_open {
                    self.shell.note(self.line(branch[0]), format!("`{}` is taken to hold", short(text)));
                }
                is_done = true;
                body.iter().try_for_each(|s| self.statement(*s))?;
            } else {
                body.iter().for_each(|s| self.skipped(*s, truth, text));
            }
        }
        Ok(())
    }

    pub fn case(&mut self, node: Node<'n>) -> Result<(), ScriptError> {
        let Some(value) = node.child_by_field_name("value") else { return Ok(()) };
        let text = self.text(value)?;
        let known = text.filled(|_| String::new());
        let mut cursor = node.walk();
        let mut is_done = false;
        for item in node.named_children(&mut cursor).filter(|c| c.kind() == "case_item").collect::<Vec<_>>() {
            let mut cursor = item.walk();
            let parts: Vec<Node> = item.children(&mut cursor).filter(|c| c.kind() != "comment").collect();
            let close = parts.iter().position(|p| p.kind() == ")").unwrap_or(0);
            let mut applies = false;
            for pattern in parts[..close].iter().filter(|p| p.is_named()) {
                let pattern = self.text(*pattern)?;
                applies |= pattern.whole().is_some_and(|p| matches(&known, p));
            }
            let truth = ConditionValue { holds: applies && !is_done, is_open: text.whole().is_none() };
            let body = parts[close..].iter().copied().filter(Node::is_named);
            if truth.holds {
                is_done = true;
                body.collect::<Vec<_>>().into_iter().try_for_each(|s| self.statement(s))?;
            } else {
                let shown = format!("case {}", self.source_of(value));
                body.collect::<Vec<_>>().into_iter().for_each(|s| self.skipped(s, truth, &shown));
            }
        }
        Ok(())
    }

    pub fn each(&mut self, node: Node<'n>) -> Result<(), ScriptError> {
        let line = self.line(node);
        let (Some(variable), Some(body)) = (node.child_by_field_name("variable"), node.child_by_field_name("body")) else { return Ok(()) };
        let name = self.source_of(variable).to_string();
        let mut cursor = node.walk();
        let mut words = vec![];
        for value in node.children_by_field_name("value", &mut cursor).collect::<Vec<_>>() {
            words.extend(self.words(value)?);
        }
        if words.iter().any(|w| w.whole().is_none()) {
            self.shell.note(line, format!("the loop `{}` is not followed{}", short(self.source_of(node)), flags_in(self.source_of(node))));
            return Ok(());
        }
        words.into_iter().try_for_each(|word| {
            self.shell.assign(&name, ShellValue::Text(word));
            self.statement(body)
        })
    }
}

/// Whether a statement ends the script.
fn leaves(source: &str) -> bool {
    source.split(|c: char| c.is_whitespace() || c == ';').any(|word| matches!(word, "exit" | "return"))
}
