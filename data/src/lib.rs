//! Data sets of tokens as Megatron-LM keeps them, and the order in which it trains on them.
//!
//! | module | holds |
//! |---|---|
//! | [`indexed`] | `PREFIX.bin` and `PREFIX.idx`: read in place, and written byte for byte as megatron-core does |
//! | [`random`] | numpy's legacy shuffle, from which all orders follow |
//! | [`order`] | which tokens are sample number n of one data set: its documents, samples and shuffle |
//! | [`packing`] | in its place, which whole documents are sample number n |
//! | [`mask`] | `PREFIX.mask`: which tokens count as labels |
//! | [`blend`] | which data set, and which of its samples, is sample number n of several |
//! | [`split`] | `99,1,0`: which documents train, which are held out |
//! | [`shards`] | `0.7 'dir/*.bin'`: data sets that are meant by one name |
//! | [`dataset`] | all of it put together: [`dataset::open`] gives the samples of each split |
//! | [`inspect`] | what a data set holds |
//! | [`text`] | text to data sets, and new tokenizers (feature `text`) |
//!
//! Nothing here prints, and nothing panics, whatever bytes a file has. Memory is bounded by the size of the files
//! that were opened and the number of samples that were asked for. The crate depends on no sibling.

pub mod blend;
mod cache;
mod cores;
pub mod dataset;
pub mod indexed;
pub mod inspect;
mod machine;
mod map;
pub mod mask;
pub mod order;
pub mod packing;
pub mod random;
pub mod shards;
pub mod split;
#[cfg(feature = "text")]
pub mod text;

pub use dataset::{Dataset, Error};
