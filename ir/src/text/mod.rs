//! Text forms of every level, which read back: `parse(print(x)) == x`. `docs/ir.md` explains them to readers of dumps.
//!
//! **Invariant:** a construct has one form function, which writes or reads it (see `io.rs`); an op has one line in the table of
//! `op.rs`. Printers take anything, also graphs that a verifier rejects; references to dims, buffers and values that
//! do not exist print and do not read back. Parsers check references, not types: that is the verifiers' part.

mod body;
mod graph;
mod io;
mod kernel;
mod labels;
mod local;
pub mod mlir;
mod module;
mod op;
mod program;
#[cfg(test)]
mod samples;
mod scoring;
mod sharded;
#[cfg(test)]
mod tests;
mod tokens;
mod words;

use crate::graph::Graph;
use crate::kernel::Kernel;
use crate::local::Local;
use crate::mesh::Mesh;
use crate::module::Module;
use crate::program::{CallSchedule, Job, Program};
use crate::sharded::Sharded;
pub use io::ParseError;
use io::Result;

/// The text of a logical graph, for [`parse_graph`].
pub fn print_graph(g: &Graph) -> String {
    io::print(g, graph::graph)
}

/// # Errors
/// The text is not a printed graph.
pub fn parse_graph(text: &str) -> Result<Graph> {
    io::parse(text, Graph::default(), graph::graph)
}

/// The text of a sharded graph, for [`parse_sharded`].
pub fn print_sharded(s: &Sharded) -> String {
    io::print(s, sharded::sharded)
}

/// # Errors
/// The text is not a printed sharded graph.
pub fn parse_sharded(text: &str) -> Result<Sharded> {
    io::parse(text, sharded::blank_sharded(), sharded::sharded)
}

/// The text of a local graph, for [`parse_local`].
pub fn print_local(l: &Local) -> String {
    io::print(l, local::local)
}

/// # Errors
/// The text is not a printed local graph.
pub fn parse_local(text: &str) -> Result<Local> {
    io::parse(text, local::blank_local(), local::local)
}

/// The text of a kernel, for [`parse_kernel`].
pub fn print_kernel(k: &Kernel) -> String {
    io::print(k, |io, k| {
        io.line("kernel ")?;
        kernel::kernel(io, k)
    })
}

/// # Errors
/// The text is not a printed kernel.
pub fn parse_kernel(text: &str) -> Result<Kernel> {
    io::parse(text, kernel::blank_kernel(), |io, k| {
        io.line("kernel ")?;
        kernel::kernel(io, k)
    })
}

/// A program of a job, the mesh that it refers to, and the stages that run it with their schedules.
pub type StagedProgram = (Mesh, Program, Vec<(u64, CallSchedule)>);

/// The text of a program, for [`parse_program`].
pub fn print_program(p: &StagedProgram) -> String {
    io::print(p, staged)
}

fn staged(io: &mut io::Io, (mesh, p, stages): &mut StagedProgram) -> Result<()> {
    body::mesh(io, mesh)?;
    program::program(io, p)?;
    io.rows(stages, (0, CallSchedule::default()), "stage ", |io, _, (stage, s)| {
        io.number(stage)?;
        program::schedule(io, s)
    })
}

/// # Errors
/// The text is not a printed program.
pub fn parse_program(text: &str) -> Result<StagedProgram> {
    io::parse(text, (Mesh { subs: vec![] }, program::blank_program(), vec![]), staged)
}

/// The text of a job, for [`parse_job`].
pub fn print_job(j: &Job) -> String {
    io::print(j, program::job)
}

/// # Errors
/// The text is not a printed job.
pub fn parse_job(text: &str) -> Result<Job> {
    io::parse(text, program::blank_job(), program::job)
}

/// All that passes go by and work on, at any level; `docs/ir.md` explains it.
pub fn print_module(m: &Module) -> String {
    io::print(m, module::module)
}

/// # Errors
/// The text is not a printed module.
pub fn parse_module(text: &str) -> Result<Module> {
    io::parse(text, module::blank_module(), module::module)
}
