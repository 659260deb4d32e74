//! Whether a condition of a script holds.
//!
//! One that looks at what the script does not say is open, and taken in this way: a variable of the environment
//! is not set, an argument and what a command prints are there, and so is a file.

use super::shell::{Origin, ScriptError};
use super::text::Text;
use super::words::Walk;
use tree_sitter::Node;

/// Whether a condition holds, and whether that is only assumed (`is_open`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConditionValue {
    pub holds: bool,
    pub is_open: bool,
}

impl ConditionValue {
    pub fn sure(holds: bool) -> ConditionValue {
        ConditionValue { holds, is_open: false }
    }

    pub fn open(holds: bool) -> ConditionValue {
        ConditionValue { holds, is_open: true }
    }

    pub fn not(self) -> ConditionValue {
        ConditionValue { holds: !self.holds, ..self }
    }

    pub fn and(self, other: ConditionValue) -> ConditionValue {
        match (self, other) {
            (ConditionValue { holds: false, is_open: false }, _) | (_, ConditionValue { holds: false, is_open: false }) => {
                ConditionValue::sure(false)
            }
            _ => ConditionValue { holds: self.holds && other.holds, is_open: self.is_open || other.is_open },
        }
    }

    pub fn or(self, other: ConditionValue) -> ConditionValue {
        self.not().and(other.not()).not()
    }
}

/// A word of `[ .. ]`.
enum Token {
    Operator(String),
    Operand(Text),
}

impl Walk<'_, '_> {
    /// `[ .. ]`, `[[ .. ]]` or `(( .. ))`.
    pub fn test(&mut self, node: Node<'_>) -> Result<ConditionValue, ScriptError> {
        if self.source_of(node).starts_with("((") {
            return Ok(self.compute(node)?.map_or(ConditionValue::open(false), |n| ConditionValue::sure(n != 0)));
        }
        let mut tokens = vec![];
        let mut end = 0;
        let mut cursor = node.walk();
        for part in node.children(&mut cursor).filter(|c| !matches!(c.kind(), "[" | "]" | "[[" | "]]")) {
            self.tokens(part, &mut tokens, &mut end)?;
        }
        let mut at = 0;
        Ok(self.either(&tokens, &mut at))
    }

    /// Words in order: how the tree groups them does not count, since its `-a` binds as tightly as `=`.
    fn tokens(&mut self, node: Node<'_>, out: &mut Vec<Token>, end: &mut usize) -> Result<(), ScriptError> {
        let mut cursor = node.walk();
        match node.kind() {
            "binary_expression" | "unary_expression" | "parenthesized_expression" => {
                for part in node.children(&mut cursor) {
                    self.tokens(part, out, end)?;
                }
            }
            "!" | "&&" | "||" | "==" | "=" | "!=" | "<" | ">" | "=~" | "(" | ")" | "test_operator" => {
                out.push(Token::Operator(self.source_of(node).into()));
            }
            _ => {
                let text = self.text(node)?;
                // `*"x"*` is one word, although its nodes are several.
                match out.last_mut() {
                    Some(Token::Operand(last)) if *end == node.start_byte() => last.push(&text),
                    _ => out.push(Token::Operand(text)),
                }
            }
        }
        *end = node.end_byte();
        Ok(())
    }

    fn either(&self, tokens: &[Token], at: &mut usize) -> ConditionValue {
        let mut truth = self.both(tokens, at);
        while operator(tokens, *at, &["||", "-o"]) {
            *at += 1;
            truth = truth.or(self.both(tokens, at));
        }
        truth
    }

    fn both(&self, tokens: &[Token], at: &mut usize) -> ConditionValue {
        let mut truth = self.one(tokens, at);
        while operator(tokens, *at, &["&&", "-a"]) {
            *at += 1;
            truth = truth.and(self.one(tokens, at));
        }
        truth
    }

    fn one(&self, tokens: &[Token], at: &mut usize) -> ConditionValue {
        let mut negated = false;
        while operator(tokens, *at, &["!"]) {
            *at += 1;
            negated = !negated;
        }
        let truth = match tokens.get(*at) {
            Some(Token::Operator(op)) if op == "(" => {
                *at += 1;
                let truth = self.either(tokens, at);
                *at += usize::from(operator(tokens, *at, &[")"]));
                truth
            }
            Some(Token::Operator(op)) => {
                *at += 1;
                let operand = if let Some(Token::Operand(text)) = tokens.get(*at) { Some(text) } else { None };
                *at += usize::from(operand.is_some());
                self.unary(op, operand)
            }
            Some(Token::Operand(left)) => {
                *at += 1;
                match (tokens.get(*at), tokens.get(*at + 1)) {
                    (Some(Token::Operator(op)), Some(Token::Operand(right))) if !matches!(op.as_str(), "&&" | "||" | "-a" | "-o" | ")") => {
                        *at += 2;
                        self.compare(left, op, right)
                    }
                    _ => self.filled(left),
                }
            }
            None => ConditionValue::sure(false),
        };
        if negated { truth.not() } else { truth }
    }

    fn unary(&self, op: &str, operand: Option<&Text>) -> ConditionValue {
        let Some(operand) = operand else { return ConditionValue::open(false) };
        match op {
            "-n" => self.filled(operand),
            "-z" => self.filled(operand).not(),
            "-e" | "-f" | "-d" | "-s" | "-r" | "-w" | "-x" => ConditionValue::open(true),
            "-v" => ConditionValue::open(false),
            _ => ConditionValue::open(false),
        }
    }

    /// Whether a text is not empty.
    fn filled(&self, text: &Text) -> ConditionValue {
        match text.whole() {
            Some(known) => ConditionValue::sure(!known.is_empty()),
            None => ConditionValue::open(text.pieces().len() > 1 || text.unknowns().any(|u| self.shell.unknowns[u].origin != Origin::Environment)),
        }
    }

    fn compare(&self, left: &Text, op: &str, right: &Text) -> ConditionValue {
        let is_open = left.whole().is_none() || right.whole().is_none();
        // An unknown value equals nothing else; a variable that is not set is empty.
        let of =
            |text: &Text| text.filled(|u| if self.shell.unknowns[u].origin == Origin::Environment { String::new() } else { format!("\u{0}{u}") });
        let (a, b) = (of(left), of(right));
        // An empty operand is 0 for `[[`.
        let number = |text: &str| if text.trim().is_empty() { Some(0) } else { text.trim().parse::<i64>().ok() };
        let numbers = number(&a).zip(number(&b));
        let by_number = |holds: fn(i64, i64) -> bool| numbers.map(|(a, b)| holds(a, b));
        let holds = match op {
            "=" | "==" => Some(matches(&a, &b)),
            "!=" => Some(!matches(&a, &b)),
            "<" => Some(a < b),
            ">" => Some(a > b),
            "-eq" => by_number(|a, b| a == b),
            "-ne" => by_number(|a, b| a != b),
            "-lt" => by_number(|a, b| a < b),
            "-le" => by_number(|a, b| a <= b),
            "-gt" => by_number(|a, b| a > b),
            "-ge" => by_number(|a, b| a >= b),
            _ => None,
        };
        match holds {
            Some(holds) => ConditionValue { holds, is_open },
            None => ConditionValue::open(false),
        }
    }

    /// Whether a command that is a condition would succeed. None is run.
    pub fn succeeds(&mut self, name: &str) -> ConditionValue {
        match name {
            "true" | ":" => ConditionValue::sure(true),
            "false" => ConditionValue::sure(false),
            _ => ConditionValue::open(false),
        }
    }
}

fn operator(tokens: &[Token], at: usize, ops: &[&str]) -> bool {
    matches!(tokens.get(at), Some(Token::Operator(op)) if ops.contains(&op.as_str()))
}

/// Whether a text matches a pattern in which `*` is any text.
pub fn matches(text: &str, pattern: &str) -> bool {
    let parts: Vec<&str> = pattern.split('*').collect();
    let [first, middle @ .., last] = parts.as_slice() else { return text == pattern };
    let Some(mut rest) = text.strip_prefix(first) else { return false };
    for part in middle {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stars_are_any_text() {
        let yes = [("8B", "8B"), ("8B", "*"), ("llama_8B", "*8B"), ("llama", "l*m*"), ("", "*")];
        assert!(yes.iter().all(|(text, pattern)| matches(text, pattern)));
        let no = [("8B", "70B"), ("8B", "8"), ("ab", "a*bb"), ("aa", "a*a*a")];
        assert!(!no.iter().any(|(text, pattern)| matches(text, pattern)));
    }
}
