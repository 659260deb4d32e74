//! `$(( .. ))`: whole numbers.

use super::shell::{ScriptError, ShellValue};
use super::words::Walk;
use tree_sitter::Node;

impl Walk<'_, '_> {
    /// The value of an expression; `None` if a part of it is not known, or it has none.
    pub fn compute(&mut self, node: Node<'_>) -> Result<Option<i64>, ScriptError> {
        let mut cursor = node.walk();
        let parts: Vec<Node> = node.children(&mut cursor).collect();
        let named: Vec<Node> = parts.iter().copied().filter(Node::is_named).collect();
        Ok(match (node.kind(), named.as_slice()) {
            ("number", _) => self.source_of(node).parse().ok(),
            ("word" | "variable_name", _) => {
                let name = self.source_of(node).to_string();
                match self.shell.read(&name) {
                    Some(ShellValue::Text(text)) => text.whole().and_then(|t| t.trim().parse().ok()),
                    Some(ShellValue::Array(_)) => None,
                    None => name.parse().ok(),
                }
            }
            ("arithmetic_expansion" | "parenthesized_expression" | "compound_statement", [only]) => self.compute(*only)?,
            ("unary_expression", [only]) => match (parts[0].kind(), self.compute(*only)?) {
                ("-", Some(x)) => x.checked_neg(),
                ("+", x) => x,
                ("!", Some(x)) => Some(i64::from(x == 0)),
                _ => None,
            },
            ("binary_expression", [left, right]) => match (self.compute(*left)?, self.compute(*right)?) {
                (Some(a), Some(b)) => binary(a, parts[1].kind(), b),
                _ => None,
            },
            ("ternary_expression", [condition, yes, no]) => match self.compute(*condition)? {
                Some(0) => self.compute(*no)?,
                Some(_) => self.compute(*yes)?,
                None => None,
            },
            ("simple_expansion" | "expansion" | "string" | "concatenation", _) => self.text(node)?.whole().and_then(|t| t.trim().parse().ok()),
            _ => None,
        })
    }
}

fn binary(a: i64, op: &str, b: i64) -> Option<i64> {
    let truth = |t: bool| Some(i64::from(t));
    match op {
        "+" => a.checked_add(b),
        "-" => a.checked_sub(b),
        "*" => a.checked_mul(b),
        "/" => a.checked_div(b),
        "%" => a.checked_rem(b),
        "**" => a.checked_pow(u32::try_from(b).ok()?),
        "<" => truth(a < b),
        "<=" => truth(a <= b),
        ">" => truth(a > b),
        ">=" => truth(a >= b),
        "==" => truth(a == b),
        "!=" => truth(a != b),
        "&&" => truth(a != 0 && b != 0),
        "||" => truth(a != 0 || b != 0),
        _ => None,
    }
}
