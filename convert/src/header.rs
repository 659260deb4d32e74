//! The model text with other defaults for its settings.

use frontend::ast::{Ast, Header, StmtKind};
use ir::diag::{Diagnostic, Sources, Span};

/// Replaces the defaults of settings in a model's header; comments and everything else stay, in the formatter's
/// layout.
///
/// # Errors
/// The text does not parse, or has no such setting.
pub fn with_defaults(name: &str, text: &str, values: &[(&str, String)]) -> Result<String, Vec<Diagnostic>> {
    let ast = frontend::parse(&mut Sources::default(), name, text)?;
    let settings = header(&ast);
    let (mut edits, mut errors) = (vec![], vec![]);
    for (name, value) in values {
        match settings.iter().find(|s| *s.name.name == **name).and_then(|s| s.default.as_ref()) {
            Some(default) => edits.push((default.span, value)),
            None => errors.push(Diagnostic::error("E0407", format!("the model has no setting `{name}` with a default"))),
        }
    }
    if !errors.is_empty() {
        return Err(errors);
    }
    // Edits go from the end to the start, so that the earlier spans stay valid.
    edits.sort_by_key(|(span, _)| std::cmp::Reverse((span.line, span.col)));
    let mut text = text.to_owned();
    for (span, value) in edits {
        text.replace_range(bytes(span, &text), value);
    }
    frontend::format(name, &text)
}

/// The names of the settings of a text's model.
pub fn settings(ast: &Ast) -> Vec<&str> {
    header(ast).iter().map(|s| &*s.name.name).collect()
}

fn header(ast: &Ast) -> &[Header] {
    let model = ast.items.iter().find_map(|i| if let StmtKind::Model(m) = &i.kind { Some(m) } else { None });
    model.map(|m| m.settings.as_slice()).unwrap_or_default()
}

fn bytes(span: Span, text: &str) -> std::ops::Range<usize> {
    let lines = text.split_inclusive('\n').take(span.line as usize - 1);
    let start = lines.map(str::len).sum::<usize>() + span.col as usize - 1;
    start..start + span.len as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_named_defaults_change() {
        let text = "// A model.\nmodel m(batch, hidden = 8, heads = 2, head_dim = hidden / heads, eps = 1e-5) {\n  output batch;  // here\n}\n";
        let out = with_defaults("m.mdl", text, &[("head_dim", "16".into()), ("hidden", "4096".into())]).unwrap();
        assert_eq!(out, "// A model.\nmodel m(batch, hidden = 4096, heads = 2, head_dim = 16, eps = 1e-5) {\n  output batch;  // here\n}\n");
    }

    #[test]
    fn a_setting_that_is_not_there_is_an_error() {
        let error = with_defaults("m.mdl", "model m(batch) {\n  output batch;\n}\n", &[("hidden", "8".into())]).unwrap_err();
        assert_eq!(error[0].message, "the model has no setting `hidden` with a default");
    }
}
