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

/// The library, parsed once for each number that its first file may have; a test holds that it parses without an error.
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
    use crate::scope::{Known, check};

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
        let known = Known { functions, modules: vec![] };
        for ast in &asts {
            assert_eq!(check(ast, &known, false), vec![]);
        }
    }
}
