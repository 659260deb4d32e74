//! Searches the plan with which a training step takes the least time on a machine.
//!
//! [`space`] says which plans there are. A [`bound`] says what no step of a plan is below; a [`sample`], compiled of
//! few layers and shared by many plans, what layers take; an [`estimate`] puts these together. [`search`] compiles
//! the best of them whole and plays them ([`simulate`]): what is proposed is a plan that compiles, with the time of
//! its own programs. No code is generated.

pub mod bound;
pub mod checkpoint;
pub mod estimate;
pub mod sample;
pub mod search;
pub mod space;
