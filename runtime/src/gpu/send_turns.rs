//! When what a rank sends goes out ([`SendTurn`]): NCCL buffers no message, and its kernels may not run at once, so
//! exchanges are one by one.

use super::{CardMessage, Outgoing};
use ir::op::Channel;
use ir::program::SendTurn;
use std::collections::{BTreeMap, VecDeque};

/// The sends of a phase, and how far it has come.
#[derive(Default)]
pub(super) struct SendTurns {
    left: VecDeque<SendTurn>,
    issued: Vec<Outgoing>,
    /// Sends that were issued, by the rank and channel that they are for.
    counts: BTreeMap<(u64, Channel), u32>,
    /// Exchanges that were issued and are no sends.
    others: u32,
}

impl SendTurns {
    /// The turns of a phase that begins, when all of the last one went out.
    pub(super) fn begin(&mut self, turns: &[SendTurn]) {
        *self = SendTurns { left: turns.iter().copied().collect(), ..SendTurns::default() };
    }

    /// A message is copied away: where to, of as many slots as a channel has.
    pub(super) fn post(&mut self, to: u64, message: &CardMessage, slots: u32) -> Outgoing {
        let count = self.counts.entry((to, message.channel)).or_default();
        let outgoing = Outgoing { to, channel: message.channel, slot: *count % slots, dtype: message.dtype, count: message.count };
        *count += 1;
        self.issued.push(outgoing);
        outgoing
    }

    /// What goes out now, one after the other.
    pub(super) fn due(&mut self) -> Vec<Outgoing> {
        let mut due = vec![];
        while let Some(turn) = self.left.front().filter(|t| t.after == self.others && !t.grouped)
            && let Some(outgoing) = self.issued.get(turn.send as usize)
        {
            due.push(*outgoing);
            self.left.pop_front();
        }
        due
    }

    /// What goes out at once with the next exchange, which is issued now.
    ///
    /// # Errors
    /// Something else should have gone out before: the check of the job shows that there is nothing.
    pub(super) fn pass(&mut self) -> Result<Vec<Outgoing>, String> {
        let mut grouped = vec![];
        while let Some(turn) = self.left.front().filter(|t| t.after == self.others) {
            let outgoing = self.issued.get(turn.send as usize).filter(|_| turn.grouped);
            grouped.push(*outgoing.ok_or_else(|| format!("send {} has missed its turn", turn.send))?);
            self.left.pop_front();
        }
        self.others += 1;
        Ok(grouped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ir::op::DType;

    fn post(turns: &mut SendTurns, count: u64) -> Vec<u64> {
        turns.post(1, &CardMessage { channel: Channel(0), dtype: DType::F32, count, address: 0 }, 2);
        due(turns)
    }

    fn due(turns: &mut SendTurns) -> Vec<u64> {
        turns.due().iter().map(|o| o.count).collect()
    }

    fn pass(turns: &mut SendTurns) -> Vec<u64> {
        turns.pass().unwrap().iter().map(|o| o.count).collect()
    }

    #[test]
    fn sends_go_out_after_as_many_other_exchanges_as_their_turns_say() {
        let mut turns = SendTurns::default();
        let turn = |send, after, grouped| SendTurn { send, after, grouped };
        turns.begin(&[turn(1, 0, false), turn(0, 1, false), turn(2, 1, true)]);
        assert!(post(&mut turns, 10).is_empty());
        assert_eq!(post(&mut turns, 11), [11]);
        assert!(pass(&mut turns).is_empty());
        assert_eq!(due(&mut turns), [10]);
        assert!(post(&mut turns, 12).is_empty());
        assert_eq!(pass(&mut turns), [12]);
        assert_eq!(turns.issued.iter().map(|o| o.slot).collect::<Vec<_>>(), [0, 1, 0]);
    }

    #[test]
    fn a_send_that_is_issued_too_late_is_an_error() {
        let mut turns = SendTurns::default();
        turns.begin(&[SendTurn { send: 0, after: 0, grouped: false }]);
        assert_eq!(turns.pass(), Err("send 0 has missed its turn".into()));
    }
}
