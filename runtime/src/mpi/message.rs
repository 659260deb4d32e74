//! Messages of channels.

use super::{MESSAGE, Mpi, PendingSend, Receiving, failed};
use crate::comm::{CommError, Message, Polled};
use crate::device::{Location, Memory};
use crate::headers::{HEADER, decode_message, encode_range};
use std::collections::VecDeque;
use std::sync::Arc;

/// Pieces of a message that a rank waits for at a time.
const AHEAD: usize = 2;

/// What a channel has taken and the receiver has not: a list for each message.
#[derive(Default)]
pub struct SendQueue {
    pub sent: VecDeque<Vec<PendingSend>>,
}

impl SendQueue {
    pub fn look(&mut self) -> Result<(), String> {
        while let Some(pieces) = self.sent.front_mut() {
            if !forget(pieces)? {
                break;
            }
            self.sent.pop_front();
        }
        Ok(())
    }
}

/// Forgets what has been sent; whether that is all.
pub fn forget(sent: &mut Vec<PendingSend>) -> Result<bool, String> {
    let mut outcome = Ok(());
    sent.retain_mut(|sent| match sent.request.is_done() {
        Ok(done) => !done,
        Err(e) => {
            outcome = Err(e);
            true
        }
    });
    outcome.map(|()| sent.is_empty())
}

/// A message that is being received.
#[derive(Default)]
pub struct Incoming {
    /// Elements that were asked for.
    asked: u64,
    /// Pieces that were: their first elements and their lengths.
    pieces: VecDeque<(u64, u64, Box<dyn Receiving>)>,
    begun: bool,
}

impl Mpi {
    /// A copy of elements behind room for a header.
    pub(super) fn loaded(memory: &dyn Memory, message: &Message, first: u64, count: u64, header: [u8; HEADER]) -> Vec<u8> {
        let mut bytes = vec![0; HEADER + count as usize * memory.element(message.dtype).bytes()];
        bytes[..HEADER].copy_from_slice(&header);
        let at = Location { byte: message.at.byte + first * message.dtype.bytes(), ..message.at };
        memory.load(at, message.dtype, &mut bytes[HEADER..]);
        bytes
    }

    pub(super) fn push(&mut self, memory: &mut dyn Memory, to: u64, message: &Message) -> Result<Polled, CommError> {
        let outgoing = self.outgoing.entry((to, message.channel)).or_default();
        outgoing.look().map_err(|e| failed(&e))?;
        if outgoing.sent.len() > self.in_flight {
            return Ok(Polled::default());
        }
        let tag = self.tags.of_channel(message.channel);
        let header = encode_range(message.dtype, message.count);
        let step = piece(memory, message);
        let mut pieces = vec![];
        let mut first = 0;
        // A message without elements is sent as a header.
        while first < message.count || pieces.is_empty() {
            let count = step.min(message.count - first);
            let bytes = Arc::new(Mpi::loaded(memory, message, first, count, header));
            let request = self.wires.send(to, tag, bytes).map_err(|e| failed(&e))?;
            pieces.push(PendingSend { to, request });
            first += count;
        }
        outgoing.sent.push_back(pieces);
        Ok(Polled { done: true, moved: true })
    }

    pub(super) fn pull(&mut self, memory: &mut dyn Memory, from: u64, message: &Message) -> Result<Polled, CommError> {
        let incoming = self.incoming.entry((from, message.channel)).or_default();
        let tag = self.tags.of_channel(message.channel);
        let (step, width) = (piece(memory, message), memory.element(message.dtype).bytes());
        let mut moved = false;
        loop {
            while incoming.pieces.len() < AHEAD && (incoming.asked < message.count || !incoming.begun) {
                let count = step.min(message.count - incoming.asked);
                let request = self.wires.recv(from, tag, HEADER + count as usize * width).map_err(|e| failed(&e))?;
                incoming.pieces.push_back((incoming.asked, count, request));
                incoming.asked += count;
                (incoming.begun, moved) = (true, true);
            }
            let Some((first, count, request)) = incoming.pieces.front_mut() else {
                self.incoming.remove(&(from, message.channel));
                return Ok(Polled { done: true, moved: true });
            };
            let Some(bytes) = request.received().map_err(|e| failed(&format!("of rank {from}'s message on {}, {e}", message.channel)))? else {
                return Ok(Polled { done: false, moved });
            };
            let header = encode_range(message.dtype, message.count);
            if bytes.len() != HEADER + *count as usize * width || bytes[..HEADER] != header {
                let theirs = bytes.get(..HEADER).map_or("something unreadable".into(), decode_message);
                let mine = format!("{} {}", message.count, message.dtype.name());
                return Err(CommError::Message { here: self.rank, mine, there: from, theirs });
            }
            let at = Location { byte: message.at.byte + *first * message.dtype.bytes(), ..message.at };
            memory.store(at, message.dtype, &bytes[HEADER..]);
            incoming.pieces.pop_front();
            moved = true;
        }
    }
}

/// Elements of a piece of a message.
fn piece(memory: &dyn Memory, message: &Message) -> u64 {
    (MESSAGE / memory.element(message.dtype).bytes()) as u64
}
