//! The verifiers of all levels. They believe nothing of the pass that made what they look at.
//!
//! **Invariant:** depends on `ir` alone. Of an op they take its definition there (type, loops, value, name and kind).
//! What a pass concludes from these, as where zero stays zero, has a rule of its own here: the same mistake is not to
//! be made twice.
//!
//! - [`references`]: what graphs of any level name exists; the other verifiers of graphs begin with it.
//! - [`graph`]: types, phases, one gradient and one update per parameter of a logical graph.
//! - [`meaning`]: logical and sharded graphs compute what the text says, with its gradient and its optimizer.
//! - [`sharded`]: each op and reshard of a sharded graph is a row of the sharding algebra.
//! - [`algebra`]: the rows of ops that a sharded graph uses hold on numbers.
//! - [`partition`]: local graphs compute their sharded graph, and their stages mean the same by what they exchange.
//! - [`equivalence`]: local graphs that passes have rewritten compute what they did before.
//! - [`lowering`]: a program computes its local graph.
//! - [`job`]: all ranks together run to their end, without races, and agree.
//!
//! What they show is numbered: [`Invariant`]. What does not hold is a [`Violation`], a bug of the pass before.
//!
//! The middle three run graphs and programs on [`terms`]: what a value is, whatever computed it and wherever it lies.

pub mod algebra;
mod cover;
pub mod equivalence;
pub mod graph;
mod invariant;
pub mod job;
pub mod lowering;
pub mod meaning;
pub mod page;
pub mod partition;
pub mod references;
mod region;
pub mod sharded;
mod terms;
mod violation;

pub use invariant::{BEYOND_TEXTS, GROUPS, Group, Invariant};
pub use violation::{Location, LocationPart, Violation};
