//! Messages that are sent without their receivers' doing. NCCL promises no buffers, but a job's streams count on channels that take as many messages as it
//! has in flight ([`Job::in_flight`]): with those its check shows that no rank waits for ever. So each message is copied to a slot, from which a
//! stream of the channel's own sends it.

use super::cuda::{Event, Reserved, Stream, text};
use super::nccl::Nccl;
use super::{Between, End};
use crate::executor::peer;
use cudarc::driver::result;
use ir::program::{Action, Channel, Job};
use std::collections::BTreeMap;

/// Slots begin at multiples of so many bytes.
const ALIGN: u64 = 256;

struct Slot {
    filled: Event,
    free: Event,
}

/// Of a channel to another rank.
struct Outbox {
    stream: Stream,
    memory: Reserved,
    /// Of a slot.
    bytes: u64,
    slots: Vec<Slot>,
    /// Messages of the list that is being issued: before it all were through.
    count: usize,
    joined: Event,
}

/// All of a rank.
#[derive(Default)]
pub(super) struct Outboxes {
    all: BTreeMap<(u64, Channel), Outbox>,
}

/// The bytes of the largest message of each channel of a rank to another.
fn largest(job: &Job, rank: u64) -> BTreeMap<(u64, Channel), u64> {
    let program = &job.programs[job.stages[job.mesh.stage(rank) as usize].program as usize];
    let mut largest = BTreeMap::new();
    for command in program.bodies.iter().flat_map(|b| &b.commands) {
        if let Action::Send { hops, channel, dtype, count, .. } = &command.action {
            let most: &mut u64 = largest.entry((peer(job, rank, *hops), *channel)).or_default();
            *most = (count * dtype.bytes()).max(*most);
        }
    }
    largest
}

impl Outboxes {
    /// Memory and streams for what a rank sends. The context is current.
    pub(super) fn new(job: &Job, rank: u64) -> Result<Outboxes, String> {
        let slots = u64::from(job.in_flight).max(1);
        let mut all = BTreeMap::new();
        for (to, bytes) in largest(job, rank) {
            let bytes = bytes.next_multiple_of(ALIGN);
            let slot = |_| Ok::<_, String>(Slot { filled: Event::new()?, free: Event::new()? });
            let (stream, memory, joined) = (Stream::new()?, Reserved::new(bytes * slots)?, Event::new()?);
            all.insert(to, Outbox { stream, memory, bytes, slots: (0..slots).map(slot).collect::<Result<_, _>>()?, count: 0, joined });
        }
        Ok(Outboxes { all })
    }

    /// Issues an exchange on a stream, which goes on when a message to another has its slot.
    pub(super) fn issue(&mut self, nccl: &Nccl, between: &Between, on: &Stream) -> Result<(), String> {
        let Between::Message { end: end @ End::SendTo(to), channel, dtype, count, address } = between else { return nccl.issue(between, on) };
        let outbox = self.all.get_mut(&(*to, *channel)).ok_or_else(|| format!("nothing is sent to rank {to} on this channel"))?;
        let k = outbox.count % outbox.slots.len();
        let (slot, at) = (&outbox.slots[k], outbox.memory.start() + k as u64 * outbox.bytes);
        if outbox.count >= outbox.slots.len() {
            slot.free.hold(on)?;
        }
        // SAFETY: the message lies within its arena and fits the slot, which is free.
        unsafe { result::memcpy_dtod_async(at, *address, (count * dtype.bytes()) as usize, on.0) }.map_err(text)?;
        slot.filled.record(on)?;
        slot.filled.hold(&outbox.stream)?;
        let own = Between::Message { end: *end, channel: *channel, dtype: *dtype, count: *count, address: at };
        nccl.issue(&own, &outbox.stream)?;
        slot.free.record(&outbox.stream)?;
        outbox.count += 1;
        Ok(())
    }

    /// Lets a stream wait for all that was sent.
    pub(super) fn join(&mut self, compute: &Stream) -> Result<(), String> {
        for outbox in self.all.values_mut().filter(|o| o.count > 0) {
            outbox.joined.record(&outbox.stream)?;
            outbox.joined.hold(compute)?;
            outbox.count = 0;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{self, Split};

    #[test]
    fn a_rank_has_room_for_the_largest_message_of_each_channel() {
        let job = fixture::job(&Split { microbatches: 2, pp: 2, dp: 1, tp: 1 });
        let sent: Vec<_> = (0..2).map(|rank| largest(&job, rank)).collect();
        assert!(
            sent.iter().enumerate().all(|(rank, s)| !s.is_empty() && s.iter().all(|((to, _), bytes)| *to == 1 - rank as u64 && *bytes > 0)),
            "{sent:?}"
        );
    }
}
