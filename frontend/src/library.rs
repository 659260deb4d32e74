//! The standard library: .mdl texts that every model can use.

use crate::ast::Ast;
use crate::parse::parse_all;
use ir::diag::{Source, Sources};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

/// The library's files, by the names that places in them have.
pub const FILES: [(&str, &str); 4] = [
    ("std/nn.mdl", include_str!("../std/nn.mdl")),
    ("std/attention.mdl", include_str!("../std/attention.mdl")),
    ("std/loss.mdl", include_str!("../std/loss.mdl")),
    ("std/moe.mdl", include_str!("../std/moe.mdl")),
];

thread_local! {
    /// The library as it was parsed, by the number of its first file, which places in it have.
    static PARSED: RefCell<BTreeMap<usize, Rc<[Ast]>>> = const { RefCell::new(BTreeMap::new()) };
}

/// The library, parsed once for each number that its first file may have; a test holds that it parses without an
/// error.
pub fn parse_library(sources: &mut Sources) -> Rc<[Ast]> {
    let first = sources.files.len();
    if let Some(parsed) = PARSED.with_borrow(|all| all.get(&first).cloned()) {
        sources.files.extend(FILES.map(|(name, text)| Source { name: name.into(), text: text.into() }));
        return parsed;
    }
    let parsed: Rc<[Ast]> = FILES.iter().map(|(name, text)| parse_all(sources, name, text).0).collect();
    PARSED.with_borrow_mut(|all| all.insert(first, parsed.clone()));
    parsed
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ast::{Block, Body, Function, StmtKind};
    use crate::scope::{KnownNames, check};

    #[test]
    fn the_library_parses_and_uses_only_names_it_has() {
        let mut sources = Sources::default();
        let mut asts = vec![];
        for (name, text) in FILES {
            let (ast, errors) = parse_all(&mut sources, name, text);
            assert!(errors.is_empty(), "{name}: {errors:?}");
            asts.push(ast);
        }
        let mut functions: Vec<Rc<str>> = asts.iter().flat_map(crate::imports::functions).map(|f| f.name.name.clone()).collect();
        functions.extend(crate::elab::PRIMITIVES.iter().map(|n| (*n).into()));
        let known = KnownNames { functions, modules: vec![] };
        for ast in &asts {
            assert_eq!(check(ast, &known, false), vec![]);
        }
    }

    /// The text of a function up to its body.
    fn signature(text: &str, function: &Function) -> String {
        let mut depth = 0;
        let ends = |(at, c): (usize, char)| {
            depth += i32::from("([".contains(c)) - i32::from(")]".contains(c));
            let short = matches!(function.body, Body::Short(_)) && depth == 0 && text[at..].starts_with(" =");
            short.then_some(at)
        };
        let end = text.char_indices().find_map(ends).unwrap_or(text.len());
        text[..end].trim_end().to_string()
    }

    /// The parameters that a function owns itself, and where they stand under a condition.
    fn parameters(block: &Block) -> Vec<String> {
        let of = |kind: &StmtKind| match kind {
            StmtKind::Param(storage) => storage.names.iter().map(|n| format!("`{}`", n.name)).collect(),
            StmtKind::If(branch) => branch.branches.iter().flat_map(|(_, b)| parameters(b)).map(|p| p + "?").collect(),
            _ => vec![],
        };
        block.stmts.iter().flat_map(|s| of(&s.kind)).collect()
    }

    /// `docs/library.md`: each function's signature under the comment that stands before it.
    fn page() -> String {
        let mut page = String::from(
            "# The library\n\nThe functions that every model text can call, from `frontend/std/`.\n\
             [The language](language.md#functions) says how they are called. A setting with a default may be left out.\n\
             Parameters that a function has itself are listed; `?` marks those that its settings ask for.\n",
        );
        for (name, text) in FILES {
            let mut sources = Sources::default();
            let (ast, _) = parse_all(&mut sources, name, text);
            page += &format!("\n## {name}\n");
            for stmt in &ast.items {
                let StmtKind::Fn(function) = &stmt.kind else { continue };
                // An empty line separates the file's own comment from that of the function.
                let comment = stmt.trivia.before.rsplit(String::is_empty).next().unwrap_or(&[]);
                assert!(!comment.is_empty(), "{name}: `{}` has no comment", function.name.name);
                let said: Vec<_> = comment.iter().map(|c| c.trim_start_matches("//").trim()).collect();
                let own = if let Body::Block(block) = &function.body { parameters(block) } else { vec![] };
                let own = if own.is_empty() { String::new() } else { format!("\nParameters: {}.", own.join(", ")) };
                let before: usize = text.split_inclusive('\n').take(stmt.span.line as usize - 1).map(str::len).sum();
                let text = &text[before + stmt.span.col as usize - 1..][..stmt.span.len as usize];
                page += &format!("\n```text\n{}\n```\n\n{}{own}\n", signature(text, function), said.join("\n"));
            }
        }
        page
    }

    #[test]
    fn the_page_of_the_library_shows_every_function() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/library.md");
        if std::env::var_os("UPDATE_EXPECT").is_some() {
            std::fs::write(&path, page()).expect("written");
        }
        let shown = std::fs::read_to_string(&path).expect("UPDATE_EXPECT=1 writes it");
        assert!(shown == page(), "docs/library.md is not current: UPDATE_EXPECT=1 cargo test -p frontend --lib");
    }
}
