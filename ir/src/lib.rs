//! The intermediate representations of mcc, their text forms, type rules and reference interpreter.
//!
//! **Invariant:** depends on no other crate of the workspace.

pub mod algebra;
pub mod build;
pub mod diag;
pub mod dim;
pub mod eval;
pub mod faults;
pub mod graph;
pub mod infer;
pub mod kernel;
pub mod launch;
pub mod local;
pub mod matrix;
pub mod mesh;
pub mod model;
pub mod module;
pub mod op;
pub mod options;
pub mod pattern;
pub mod pipeline;
pub mod processor;
pub mod program;
pub mod progress;
pub mod provenance;
pub mod random;
pub mod reason;
pub mod sharded;
pub mod text;
pub mod tiles;
pub mod work;
