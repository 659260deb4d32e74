//! What stages give each other: the verifier of local graphs together, before stages that compute alike become one
//! class.
//!
//! **Invariants**
//! - The n-th value that a stage sends on a channel and the n-th that the other one receives there hold the same
//!   value of the sharded graph, in the same sharding; a message of several values holds the same ones in the same
//!   order.
//! - The n-th collective over a set of stages completes the same value of the sharded graph on each of them.

use crate::violation::fail;
use crate::{Invariant, LocationPart, Violation, references};
use ir::graph::{Users, Value};
use ir::local::Local;
use ir::op::{Channel, Op};
use ir::sharded::Sharding;
use std::collections::BTreeMap;

/// A value of the sharded graph, and the sharding in which a stage holds it.
type ShardedValue = (Value, Sharding);

/// For each pair of stages and channel, the messages and the values that each holds.
type Messages = BTreeMap<(u64, u64, Channel), Vec<Vec<ShardedValue>>>;

/// Checks the invariants of the module's documentation. `stages` are the local graphs of all stages, each of one
/// stage.
///
/// # Errors
/// The first exchange whose ends mean different values.
pub fn verify(stages: &[Local]) -> Result<(), Violation> {
    references::locals(stages, None)?;
    let (mut sent, mut received) = (Messages::new(), Messages::new());
    let mut met: BTreeMap<&[u64], BTreeMap<u64, Vec<Vec<ShardedValue>>>> = BTreeMap::new();
    for local in stages {
        let stage = local.stages[0].0;
        let body = &local.body;
        let users = body.users();
        for v in body.values() {
            let peer = |hops: i64| {
                stage
                    .checked_add_signed(hops)
                    .ok_or_else(|| Invariant::PeerStage.breach(format!("there is no stage {hops} from stage {stage}")).at(v))
            };
            match &body[v].op {
                Op::Send { hops, channel } => {
                    let what = made_of(local, body[v].args[0]);
                    sent.entry((stage, peer(*hops)?, *channel)).or_default().push(what);
                }
                Op::Recv { hops, channel } => {
                    let mut what = vec![];
                    makes(local, &users, v, &mut what);
                    received.entry((peer(*hops)?, stage, *channel)).or_default().push(what);
                }
                Op::Collective { stages: Some(all), .. } if all.len() > 1 => {
                    met.entry(all).or_default().entry(stage).or_default().push(made_of(local, v));
                }
                _ => {}
            }
        }
    }
    for (key, want) in &sent {
        if received.get(key) != Some(want) {
            let (from, to, channel) = key;
            return fail(
                Invariant::MessageMeaning,
                LocationPart::Graph,
                format!("what stage {from} sends stage {to} on {channel} is not what that receives"),
            );
        }
    }
    if let Some((from, to, channel)) = received.keys().find(|k| !sent.contains_key(k)) {
        return fail(Invariant::MessageSent, LocationPart::Graph, format!("stage {to} receives on {channel} what stage {from} does not send"));
    }
    for (all, by_stage) in &met {
        let first = by_stage.values().next();
        if by_stage.len() != all.len() || by_stage.values().any(|list| Some(list) != first) {
            return fail(Invariant::SumMeaning, LocationPart::Graph, format!("stages {all:?} sum different values"));
        }
    }
    Ok(())
}

/// The values that make up a message, in order.
fn made_of(local: &Local, v: Value) -> Vec<ShardedValue> {
    match &local.source[v.index()] {
        Some(held) => vec![held.clone()],
        None => local.body[v].args.iter().flat_map(|a| made_of(local, *a)).collect(),
    }
}

/// The values that are cut out of a message, in order.
fn makes(local: &Local, users: &Users, v: Value, out: &mut Vec<ShardedValue>) {
    match &local.source[v.index()] {
        Some(held) => out.push(held.clone()),
        None => users[v.index()].iter().for_each(|(user, _)| makes(local, users, *user, out)),
    }
}
