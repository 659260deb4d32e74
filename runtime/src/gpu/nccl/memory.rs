//! What exchanges by NCCL take of a card beside a job's arenas.
//!
//! Slots for messages are exact. What communicators take is an estimate, as NCCL says nothing of it: it follows the
//! source of NCCL 2.30. A connection from another rank has buffers for three protocols (`src/init.cc`,
//! `computeBuffSizes`): 4 MiB, 4.69 MiB and 0.5 MiB, allocated in pages of 2 MiB (`src/transport/p2p.cc`). A
//! communicator has as many channels as it may have blocks (`src/graph/connect.cc`), each with a connection for its
//! ring and, for all-reduces, three for its tree, from two children and a parent. Two ranks that send each other
//! messages, or all to all, are connected by a power of two of channels between GPUs of a machine, and by four
//! between machines with 400 Gb/s (`src/graph/paths.cc`).

use super::links::{NcclLink, of_rank};
use crate::gpu::outbox::outbox_bytes;
use ir::program::{Collective, Job};
use std::collections::BTreeSet;

/// Bytes of a connection.
const CONNECTION: u64 = 10 << 20;

/// Channels between two ranks of different machines.
const BETWEEN_MACHINES: u64 = 4;

/// GPUs of a machine.
const MACHINE: u64 = 8;

/// Most blocks of a communicator's kernel, unless a run says otherwise. It is a guess, so that plans have a bound: no
/// card has been asked how many it takes to fill its links.
pub const MAX_CTAS: u32 = 24;

/// Bytes of a rank's card for exchanges by NCCL: slots of messages, and communicators with so many blocks.
pub fn bytes_of_rank(job: &Job, rank: u64, max_ctas: u32) -> u64 {
    let channels = u64::from(max_ctas);
    let of_peer = if job.mesh.world() > MACHINE { BETWEEN_MACHINES } else { channels.next_power_of_two() };
    let mut senders = BTreeSet::new();
    let mut connections = 0u64;
    for (link, collectives) in of_rank(job, rank) {
        let members = match &link {
            NcclLink::Messages([from, _]) => {
                senders.extend(Some(*from).filter(|from| *from != rank));
                continue;
            }
            NcclLink::Group(members) => members.len() as u64,
        };
        let has = |kind: fn(&Collective) -> bool| collectives.keys().any(|(k, ..)| kind(k));
        let rings = has(|k| matches!(k, Collective::AllReduce(_) | Collective::AllGather | Collective::ReduceScatter(_)));
        let trees = has(|k| matches!(k, Collective::AllReduce(_))) && members > 2;
        let peers = if has(|k| matches!(k, Collective::AllToAll)) { members - 1 } else { u64::from(has(|k| matches!(k, Collective::Shift))) };
        connections += channels * (u64::from(rings) + 3 * u64::from(trees)) + peers * of_peer;
    }
    connections += senders.len() as u64 * of_peer;
    connections.saturating_mul(CONNECTION).saturating_add(outbox_bytes(job, rank))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{self, Split};

    #[test]
    fn communicators_take_what_their_connections_do() {
        let bytes = |split: &Split, ctas| {
            let job = fixture::job(split);
            bytes_of_rank(&job, 0, ctas) - outbox_bytes(&job, 0)
        };
        // The two ranks have one ring.
        assert_eq!(bytes(&Split { microbatches: 1, pp: 1, dp: 1, tp: 2 }, 24) % (24 * CONNECTION), 0);
        let [few, many] = [8, 16].map(|ctas| bytes(&Split { microbatches: 2, pp: 2, dp: 2, tp: 1 }, ctas));
        assert_eq!(2 * few, many);
        assert!(few > 0);
    }
}
