//! .mdl text to the logical forward graph.

pub mod ast;
mod build;
mod names;
mod parse;
mod split;

pub use parse::{parse, parse_all};
