//! Where messages wait for their turn. NCCL promises no buffers, but a job's streams count on channels that take as
//! many messages as it has in flight ([`Job::in_flight`]): with those its check shows that no rank waits for ever. So
//! each message is copied to a slot, from which it goes out later.

use super::Outgoing;
use super::cuda::{CudaEvent, Reserved, Stream, text};
use crate::executor::peer;
use cudarc::driver::result;
use ir::program::{Action, Channel, Job};
use std::collections::BTreeMap;

/// Slots begin at multiples of so many bytes.
const ALIGN: u64 = 256;

/// What happened to a slot, as far as it may still be under way: since the list that is being issued began.
struct Slot {
    filled: CudaEvent,
    free: CudaEvent,
    was_filled: bool,
    was_freed: bool,
}

/// The slots of a channel to another rank.
struct Outbox {
    memory: Reserved,
    /// Bytes of a slot.
    bytes: u64,
    slots: Vec<Slot>,
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

/// Bytes of a card for what a rank sends, until it goes out.
pub fn outbox_bytes(job: &Job, rank: u64) -> u64 {
    let slots = u64::from(job.in_flight).max(1);
    largest(job, rank).values().map(|bytes| bytes.next_multiple_of(ALIGN).saturating_mul(slots)).fold(0, u64::saturating_add)
}

impl Outboxes {
    /// Memory for what a rank sends. The context is current.
    pub(super) fn new(job: &Job, rank: u64) -> Result<Outboxes, String> {
        let slots = u64::from(job.in_flight).max(1);
        let mut all = BTreeMap::new();
        for (to, bytes) in largest(job, rank) {
            let bytes = bytes.next_multiple_of(ALIGN);
            let slot = |_| Ok::<_, String>(Slot { filled: CudaEvent::new()?, free: CudaEvent::new()?, was_filled: false, was_freed: false });
            all.insert(to, Outbox { memory: Reserved::new(bytes * slots)?, bytes, slots: (0..slots).map(slot).collect::<Result<_, _>>()? });
        }
        Ok(Outboxes { all })
    }

    /// A list begins: what was before is through.
    pub(super) fn begin(&mut self) {
        let slots = self.all.values_mut().flat_map(|o| &mut o.slots);
        slots.for_each(|s| (s.was_filled, s.was_freed) = (false, false));
    }

    fn slot(&mut self, outgoing: &Outgoing) -> Result<(u64, &mut Slot), String> {
        let outbox = self.all.get_mut(&(outgoing.to, outgoing.channel));
        let outbox = outbox.ok_or_else(|| format!("nothing is sent to rank {} on this channel", outgoing.to))?;
        let at = outbox.memory.start() + u64::from(outgoing.slot) * outbox.bytes;
        let slot = outbox.slots.get_mut(outgoing.slot as usize).ok_or("a channel has not so many slots")?;
        Ok((at, slot))
    }

    /// Copies a message to its slot, on a stream, once the slot's last message has gone.
    pub(super) fn fill(&mut self, outgoing: &Outgoing, address: u64, on: &Stream) -> Result<(), String> {
        let (at, slot) = self.slot(outgoing)?;
        if slot.was_freed {
            slot.free.hold(on)?;
        }
        // SAFETY: the message lies within its arena and fits the slot, which is free.
        unsafe { result::memcpy_dtod_async(at, address, (outgoing.count * outgoing.dtype.bytes()) as usize, on.0) }.map_err(text)?;
        slot.was_filled = true;
        slot.filled.record(on)
    }

    /// Whether some of these were copied to their slots since the list began.
    pub(super) fn any_filled(&mut self, outgoing: &[Outgoing]) -> Result<bool, String> {
        outgoing.iter().try_fold(false, |any, o| Ok(any || self.slot(o)?.1.was_filled))
    }

    /// Lets a stream wait until messages are in their slots, and says where these are.
    pub(super) fn hold(&mut self, outgoing: &[Outgoing], on: &Stream) -> Result<Vec<u64>, String> {
        let place = |o: &Outgoing| {
            let (at, slot) = self.slot(o)?;
            if slot.was_filled { slot.filled.hold(on).map(|()| at) } else { Ok(at) }
        };
        outgoing.iter().map(place).collect()
    }

    /// Messages have gone, when a stream is through with what it was told.
    pub(super) fn free(&mut self, outgoing: &[Outgoing], on: &Stream) -> Result<(), String> {
        outgoing.iter().try_for_each(|o| {
            let (_, slot) = self.slot(o)?;
            slot.was_freed = true;
            slot.free.record(on)
        })
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
        assert!(outbox_bytes(&job, 0) >= u64::from(job.in_flight) * sent[0].values().sum::<u64>());
    }
}
