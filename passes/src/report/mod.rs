//! What is said of a job: read from its programs, changing nothing.

pub mod complaints;
pub mod explain;
pub mod footprint;
pub mod in_use;
pub mod matrices;
pub mod pipeline_timeline;
pub mod reshards;
pub mod sizes;
