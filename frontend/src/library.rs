//! The standard library: .mdl texts that every model can use.

use crate::ast::Ast;
use crate::parse::parse_all;
use ir::diag::Sources;

/// The library's files, by the names that places in them have.
pub const FILES: [(&str, &str); 4] = [
    ("std/nn.mdl", include_str!("../std/nn.mdl")),
    ("std/attention.mdl", include_str!("../std/attention.mdl")),
    ("std/loss.mdl", include_str!("../std/loss.mdl")),
    ("std/moe.mdl", include_str!("../std/moe.mdl")),
];

/// Parses the library; a test holds that it parses without an error.
pub fn parse_library(sources: &mut Sources) -> Vec<Ast> {
    FILES.iter().map(|(name, text)| parse_all(sources, name, text).0).collect()
}
