//! Proves that the local graphs of all stages compute the sharded graph, whoever made them.
//!
//! Every local node that claims to hold a value of the sharded graph ([`ir::local::Local::source`]) is shown to hold
//! the part of it that its sharding says, by induction over the nodes:
//! - It is the same op of local dims, and its operands hold the parts that the shardings of the op's operands say.
//!   That the op of parts is the part of the op is the sharding algebra, which [`crate::sharded`] has checked; what
//!   is checked here is that each local dim is its part, with its indices.
//! - Or the value is a reshard, and views, slices and collectives lead from the operand's part to this one, element
//!   by element: an index into the whole value is a mixed-radix number of local indices and coordinates ([`shards`]),
//!   of which a gather turns coordinates into a dim, a scatter a dim into coordinates, an all-to-all both, and a
//!   reduction makes a partial value whole.
//! - Or it is attention with keys that go round ([`ring`]), a sum over stages, or was received; then both ends mean
//!   the same value ([`exchanges`]), and what was sent is shown on the stage that sends it. (That no stage gets a
//!   value back from itself is that messages arrive at all: [`crate::job`].)
//!
//! A sum over microbatches is taken where a value that is accumulated is used by a chunk that runs once; nothing else
//! of one microbatch may be used there. Parameters are updated with, and reports are, what the graph says.
//!
//! What is stored as rows of experts, from a dispatch to the first dense values, claims to hold no value. What it
//! holds is found out from the choices on ([`rows`]).

mod ends;
pub mod exchanges;
pub mod local;
mod ring;
mod rows;
mod shards;
mod stage;
mod stages;
mod sums;

use crate::{LocationPart, Violation, references};
use ir::local::Local as Graph;
use ir::sharded::Sharded;
use shards::ShardViews;
use stage::Stage;
use std::collections::HashSet;
use sums::Sums;

/// Checks what the module's documentation says of the local graphs of all stages, each of one stage.
///
/// # Errors
/// The first node that does not hold what it claims to.
pub fn verify(s: &Sharded, stages: &[Graph]) -> Result<(), Violation> {
    references::sharded(s)?;
    references::locals(stages, Some(s))?;
    let (mut shards, mut sums) = (ShardViews::new(s), Sums::default());
    for local in stages {
        let users = local.body.users();
        let mut stage = Stage {
            shards: &mut shards,
            local,
            users: &users,
            held: vec![None; local.body.nodes.len()],
            parts: HashSet::new(),
            bounds: HashSet::new(),
            limits: HashSet::new(),
        };
        for w in local.body.values() {
            stage.held[w.index()] = stage.node(w, &mut sums).map_err(|e| e.at(w).within(LocationPart::Stage(local.stages[0].0)))?;
        }
        stage.ends().map_err(|e| e.within(LocationPart::Stage(local.stages[0].0)))?;
    }
    sums.verify(s)
}
