//! How ranks come together.
//!
//! On GPUs a rank does its exchanges one by one, as NCCL's guide asks for: collectives and receives in the order of
//! issue, each send at its turn ([`SendTurn`]), and a message goes when both ends have come to
//! it. On CPUs each stream exchanges by itself, and messages are buffered.

use super::stage::{RunningOp, State};
use super::{Mark, Simulation};
use crate::cost::{Cause, Cost};
use crate::kernels;
use crate::links::PIECE;
use crate::tape::{ExchangePartner, Item, StageTape, WorkKind};
use ir::op::Channel;
use ir::program::{CallSchedule, ProgramPhase, SendTurn};
use std::collections::VecDeque;

/// Messages between two stages on a channel, whose ends have been reached.
#[derive(Clone, Debug, Default)]
pub(super) struct Route {
    /// The sender's exchange, since when it waits, and when it was begun.
    sends: VecDeque<(u32, Mark, f64)>,
    /// The receiver's stream and exchange, and since when it waits.
    receives: VecDeque<(usize, u32, Mark)>,
}

/// A send of a phase, as it goes out.
#[derive(Clone, Copy, Debug)]
struct ScheduledSend {
    /// The number of the send, in the order of issue.
    send: usize,
    /// The number of other exchanges that come before it.
    after: u32,
    /// Whether it goes with the next of them.
    grouped: bool,
}

/// A stage's exchanges of a phase, one by one.
#[derive(Clone, Debug, Default)]
pub(super) struct Queue {
    turns: Vec<ScheduledSend>,
    /// Sends that have been copied away: the exchange, and since when.
    issued: Vec<(u32, Mark)>,
    sends_done: usize,
    others_done: u32,
    /// Streams that are at an exchange: the number of the exchange, the stream and the exchange.
    here: Vec<(u32, usize, u32)>,
    /// The number of exchanges of the group under way that have not ended.
    left: usize,
    /// How many sends and how many other exchanges that group has.
    group: (usize, u32),
    /// The end of the last one.
    pub mark: Mark,
}

impl Queue {
    pub fn new(schedule: &CallSchedule, phase: ProgramPhase, tape: &StageTape, mark: Mark) -> Queue {
        let turns = schedule.sends(phase);
        if turns.is_empty() {
            return Queue { mark, ..Queue::default() };
        }
        // The program also counts exchanges that a bool leaves out.
        let (mut played, mut before) = (vec![], 0);
        for call in schedule.calls(phase) {
            let part = &tape.tapes[call.body.index()][call.part as usize];
            played.extend(part.played.iter().map(|n| n + before));
            before += part.others;
        }
        let turn = |t: &SendTurn| {
            let of = |n: u32| played.get(n as usize).copied().unwrap_or(before);
            ScheduledSend { send: t.send as usize, after: of(t.after), grouped: t.grouped && of(t.after) < of(t.after + 1) }
        };
        Queue { turns: turns.iter().map(turn).collect(), mark, ..Queue::default() }
    }

    pub fn is_done(&self) -> bool {
        self.sends_done == self.turns.len() && self.left == 0
    }
}

impl Simulation<'_> {
    /// Notes that a stream is at a collective or a receive, number `number` of its phase.
    pub(super) fn arrive(&mut self, s: usize, k: usize, exchange: u32, number: u32) {
        if self.serial {
            self.stages[s].queue.here.push((number, k, exchange));
            self.take_turns(s);
        } else {
            let mark = self.stages[s].streams[k].mark;
            self.meet(s, k, exchange, mark);
        }
    }

    /// Notes that a stream is at a send.
    pub(super) fn send(&mut self, s: usize, k: usize, exchange: u32) {
        let mark = self.stages[s].streams[k].mark;
        let e = &self.tapes[s].exchanges[exchange as usize];
        if self.serial {
            // The message is read and written once, to where it waits for its turn.
            let copy = Cost::new(Cause::Memory, kernels::memory(self.machine, 2.0 * e.bytes as f64, 1));
            let cost = if e.bytes > 0 { copy.and(Cause::Launch, self.machine.device.launch.value) } else { copy };
            self.begin(s, k, WorkKind::Copy, cost, mark, &[]);
        } else {
            let cost = e.cost;
            self.begin(s, k, WorkKind::Exchange, cost, mark, &[(s, exchange)]);
        }
    }

    /// Notes that what a stream sends has been copied away.
    pub(super) fn copied(&mut self, s: usize, k: usize, mark: Mark) {
        let Some(Item::Send { exchange }) = self.item(s, k) else { return };
        let exchange = *exchange;
        self.stages[s].queue.issued.push((exchange, mark));
        self.pass(s, k, mark);
        self.take_turns(s);
    }

    /// Begins the exchanges whose turn it is, if their streams have come to them.
    fn take_turns(&mut self, s: usize) {
        let queue = &mut self.stages[s].queue;
        if queue.left > 0 {
            return;
        }
        let rest = &queue.turns[queue.sends_done..];
        let is_issued = |t: &ScheduledSend| t.send < queue.issued.len();
        if let Some(turn) = rest.first().filter(|t| !t.grouped && t.after <= queue.others_done) {
            if is_issued(turn) {
                let (send, mark) = (turn.send, queue.issued[turn.send].1.later(queue.mark));
                (queue.left, queue.group) = (1, (1, 0));
                self.offer(s, send, mark);
            }
            return;
        }
        let Some(at) = queue.here.iter().position(|h| h.0 == queue.others_done) else { return };
        let with: Vec<ScheduledSend> = rest.iter().take_while(|t| t.grouped && t.after == queue.others_done).copied().collect();
        if !with.iter().all(is_issued) {
            return;
        }
        let (_, k, exchange) = queue.here.swap_remove(at);
        (queue.left, queue.group) = (1 + with.len(), (with.len(), 1));
        let queue = &self.stages[s].queue;
        let mark = with.iter().map(|t| queue.issued[t.send].1).fold(self.stages[s].streams[k].mark.later(queue.mark), Mark::later);
        with.iter().for_each(|turn| self.offer(s, turn.send, mark));
        self.meet(s, k, exchange, mark);
    }

    /// Sends a message whose turn it is.
    fn offer(&mut self, s: usize, send: usize, mark: Mark) {
        let exchange = self.stages[s].queue.issued[send].0;
        let ExchangePartner::Send { to, channel } = self.tapes[s].exchanges[exchange as usize].with else { return };
        self.routes.entry((s, to, channel)).or_default().sends.push_back((exchange, mark, mark.time));
        self.transfer(s, to, channel);
    }

    /// Begins an exchange whose turn it is, or waits for the others.
    fn meet(&mut self, s: usize, k: usize, exchange: u32, mark: Mark) {
        let e = &self.tapes[s].exchanges[exchange as usize];
        let cost = e.cost;
        match e.with {
            ExchangePartner::Within => self.begin(s, k, WorkKind::Exchange, cost, mark, &[(s, exchange)]),
            ExchangePartner::Meeting(number) => {
                // A stream that waits keeps its mark.
                self.stages[s].streams[k].mark = mark;
                self.met[number].push((s, k, exchange));
                if self.met[number].len() == self.meetings[number].len() {
                    let all = std::mem::take(&mut self.met[number]);
                    let marks = all.iter().map(|(s, k, _)| self.stages[*s].streams[*k].mark);
                    let mark = marks.reduce(Mark::later).unwrap_or(mark);
                    let parties: Vec<(usize, u32)> = all.iter().map(|(s, _, e)| (*s, *e)).collect();
                    self.begin(s, k, WorkKind::Exchange, cost, mark, &parties);
                }
            }
            ExchangePartner::Recv { from, channel } => {
                self.routes.entry((from, s, channel)).or_default().receives.push_back((k, exchange, mark));
                self.transfer(from, s, channel);
            }
            ExchangePartner::Send { .. } => unreachable!("invariant: sends are offered"),
        }
    }

    /// Transfers a message if both ends are there. It counts for the receiver.
    fn transfer(&mut self, from: usize, to: usize, channel: Channel) {
        let Some(route) = self.routes.get_mut(&(from, to, channel)) else { return };
        let (Some(sent), Some(received)) = (route.sends.front().copied(), route.receives.front().copied()) else { return };
        route.sends.pop_front();
        route.receives.pop_front();
        let (k, exchange, mark) = received;
        let e = &self.tapes[to].exchanges[exchange as usize];
        let mut cost = e.cost;
        if !self.serial {
            // A receiver that waits copies the message out piece by piece while it is copied in.
            let meanwhile = (sent.1.time - mark.time.max(sent.2)).max(0.0);
            let left = (1.0 - meanwhile / cost.seconds().max(f64::MIN_POSITIVE)).max((PIECE as f64 / e.bytes.max(1) as f64).min(1.0));
            cost = cost.times(left);
        }
        let both = [(to, exchange), (from, sent.0)];
        let parties = if self.serial { &both[..] } else { &both[..1] };
        self.begin(to, k, WorkKind::Exchange, cost, mark.later(sent.1), parties);
    }

    /// Ends an exchange of a stream.
    pub(super) fn exchanged(&mut self, s: usize, k: usize, op: &RunningOp, mark: Mark) {
        let (first, exchange) = op.parties[0];
        if let (ExchangePartner::Send { to, channel }, false) = (&self.tapes[first].exchanges[exchange as usize].with, self.serial) {
            let (to, channel) = (*to, *channel);
            self.routes.entry((s, to, channel)).or_default().sends.push_back((exchange, mark, op.mark.time));
            self.tell(s, k, op.mark.time);
            self.pass(s, k, mark);
            return self.transfer(s, to, channel);
        }
        for (party, exchange) in &op.parties {
            // The sender has gone on already.
            if !matches!(self.tapes[*party].exchanges[*exchange as usize].with, ExchangePartner::Send { .. }) {
                let at = (0..self.stages[*party].streams.len()).find(|k| self.is_at(*party, *k, *exchange));
                let at = at.expect("invariant: a stream waits for it");
                self.tell(*party, at, op.mark.time);
                let waited = op.mark.time - self.stages[*party].streams[at].mark.time;
                self.wake(*party, at, waited, mark);
            }
            if self.serial {
                self.end_turn(*party, mark);
            }
        }
    }

    fn is_at(&self, s: usize, k: usize, exchange: u32) -> bool {
        let is_item = matches!(self.item(s, k), Some(Item::Exchange { exchange: e, .. }) if *e == exchange);
        is_item && self.stages[s].streams[k].state == State::Exchanges
    }

    /// Ends one exchange of a stage's turn.
    fn end_turn(&mut self, s: usize, mark: Mark) {
        let queue = &mut self.stages[s].queue;
        queue.left -= 1;
        if queue.left == 0 {
            let (sends, others) = queue.group;
            (queue.sends_done, queue.others_done, queue.mark) = (queue.sends_done + sends, queue.others_done + others, mark);
            self.take_turns(s);
            self.end_phase(s);
        }
    }
}
