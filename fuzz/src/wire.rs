//! What comes over the network: handshakes, messages, frames of wires. Bytes alone never get beyond a keyed hash, so
//! most inputs say which of their parts have right ones.

use crate::fixture;
use ir::program::Job;
use runtime::launch::{RunOptions, fuzzed};
use runtime::rendezvous::{Challenge, HELLO, HandshakeRole, IncomingHandshake, Key, Member, Nonce, Purpose, Seal, Trust, hear};
use runtime::shm::{Segment, SegmentLayout, take};
use runtime::target::Target;
use runtime::world::{Launcher, RendezvousEndpoint, World};
use std::cell::RefCell;
use std::io::{self, ErrorKind, Read, Write};
use std::sync::OnceLock;

fn key() -> Key {
    static KEY: OnceLock<Key> = OnceLock::new();
    KEY.get_or_init(|| Trust::secret("fuzz", b"a secret of the fuzzer").expect("it is long enough").key()).clone()
}

/// The other side of a connection: what it says, so many bytes at a time, and what it has heard.
struct Peer {
    says: Vec<u8>,
    piece: usize,
    /// Whether nothing has come since the last piece.
    waits: bool,
    heard: Vec<u8>,
}

impl Peer {
    fn say(&mut self, bytes: &[u8]) {
        self.says.extend_from_slice(bytes);
    }
}

impl Read for Peer {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.waits = !self.waits;
        if self.says.is_empty() || !self.waits {
            return Err(ErrorKind::WouldBlock.into());
        }
        let n = bytes.len().min(self.piece).min(self.says.len());
        bytes[..n].copy_from_slice(&self.says[..n]);
        self.says.drain(..n);
        Ok(n)
    }
}

impl Write for Peer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.heard.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A process that connects. The first byte says how far it behaves as a rank does: not at all, to its nonce, to its
/// proof, to all but the hash of its first message, or in everything. The second says how its bytes arrive. Only the
/// last gets in, with its message; nobody is told anything before a proof.
pub fn hello(input: &[u8]) {
    let [how, piece, bytes @ ..] = input else { return };
    let how = how % 5;
    let mut peer = Peer { says: vec![], piece: usize::from(*piece) + 1, waits: false, heard: vec![] };
    let mut handshake = IncomingHandshake::new(key(), Purpose::Meeting);
    let mut advance = |peer: &mut Peer| {
        loop {
            match handshake.hear(peer) {
                Err(e) if e.kind() == ErrorKind::WouldBlock && peer.says.is_empty() => return None,
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                other => return other.ok().flatten(),
            }
        }
    };
    let nonce: Nonce = [7; 32];
    if how == 0 {
        peer.say(bytes);
        assert!(advance(&mut peer).is_none() && [0, 32].contains(&peer.heard.len()));
        return;
    }
    peer.say(&Purpose::Meeting.mark());
    peer.say(&nonce);
    assert!(advance(&mut peer).is_none());
    let listener = peer.heard[..].try_into().expect("a listener answers a nonce with its own");
    if how == 1 {
        peer.say(bytes);
        assert!(advance(&mut peer).is_none() && peer.heard.len() == 32);
        return;
    }
    let key = key();
    let challenge = Challenge { key: &key, purpose: Purpose::Meeting, connector: nonce, listener };
    peer.say(challenge.proof(HandshakeRole::Connector).as_bytes());
    assert!(advance(&mut peer).is_none());
    assert_eq!(&peer.heard[32..], challenge.proof(HandshakeRole::Listener).as_bytes());
    let mut seal = Seal::new(challenge.session(HandshakeRole::Connector));
    match how {
        2 => {
            peer.say(bytes);
            assert!(advance(&mut peer).is_none());
        }
        3 => {
            // The message has an arbitrary length field, its bytes, and a right hash of both.
            let (length, rest) = bytes.split_at(bytes.len().min(4));
            let mut length = length.to_vec();
            length.resize(4, 0);
            peer.say(&[&length, rest, seal.begin().update(&length).update(rest).finalize().as_bytes()].concat());
            let is_right = u32::from_le_bytes(length[..].try_into().expect("four bytes")) as usize == rest.len() && rest.len() <= HELLO;
            assert_eq!(advance(&mut peer).map(|g| g.hello), is_right.then(|| rest.to_vec()));
        }
        _ => {
            peer.say(&sealed(bytes, &mut seal));
            assert_eq!(advance(&mut peer).map(|g| g.hello), (bytes.len() <= HELLO).then(|| bytes.to_vec()));
            let _ = postcard::from_bytes::<Member>(bytes);
        }
    }
}

/// A message with its length and hash.
fn sealed(bytes: &[u8], seal: &mut Seal) -> Vec<u8> {
    let length = (bytes.len() as u32).to_le_bytes();
    let mut hasher = seal.begin();
    hasher.update(&length).update(bytes);
    [&length[..], bytes, hasher.finalize().as_bytes()].concat()
}

/// Messages of processes that have met. The first byte chooses: arbitrary bytes, none of which is believed; messages
/// of ranks to rank 0's process; or rank 0's messages to another process.
pub fn message(input: &[u8]) {
    let Some((how, bytes)) = input.split_first() else { return };
    match how % 3 {
        0 => {
            let mut from = bytes;
            assert!(hear::<Member>(&mut from, &mut Seal::new(key())).is_err(), "a right hash by chance");
        }
        1 => fuzzed::by_rank_0(job(), bytes),
        _ => {
            let meeting = RendezvousEndpoint { host: "127.0.0.1".into(), port: 1 };
            let world = World { launcher: Launcher::Torchrun, rank: 1, size: 2, node: None, meeting };
            fuzzed::by_others(&world, &RunOptions::new("mcc-rank".into()), bytes);
        }
    }
}

/// A job of two ranks, each of which calls all that ranks call.
fn job() -> &'static Job {
    static JOB: OnceLock<Job> = OnceLock::new();
    JOB.get_or_init(|| fixture::streamed(fixture::job(&fixture::Split { microbatches: 2, pp: 2, dp: 1, tp: 1 })))
}

/// Most bytes that a frame of the fuzzer's announces: more than a segment has.
const ANNOUNCED: u64 = 1 << 20;

/// Frames of a wire. If the first byte is even, the bytes come as they are; otherwise each frame's hashes are right,
/// whatever it says. Only what a frame says is written to memory.
pub fn frames(input: &[u8]) {
    thread_local!(static MEMORY: RefCell<(Segment, SegmentLayout)> = RefCell::new({
        let layout = SegmentLayout::new(job(), &Target::Reference, 0);
        (Segment::create(layout.bytes).expect("memory").1, layout)
    }));
    let Some((how, bytes)) = input.split_first() else { return };
    MEMORY.with_borrow(|(segment, layout)| {
        let size = segment.bytes() as usize;
        let mut expected = segment.slice(0, size).to_vec();
        if how % 2 == 0 {
            assert!(take(segment, layout, bytes, Seal::new(key())).is_err());
        } else {
            let said = framed(bytes, layout.world, &mut expected, &|rank| layout.status(rank).doorbell());
            assert!(take(segment, layout, &said[..], Seal::new(key())).is_err(), "it ends with the bytes at the latest");
        }
        assert!(segment.slice(0, size) == expected, "something else was written than was said");
    });
}

/// Frames of these bytes with right hashes, up to the first that does not fit; `memory` becomes what they write.
fn framed(mut bytes: &[u8], world: u64, memory: &mut [u8], doorbell: &dyn Fn(u64) -> u64) -> Vec<u8> {
    let (mut said, mut seal) = (vec![], Seal::new(key()));
    let piece = |bytes: &mut &[u8], n: usize| {
        let (taken, rest) = bytes.split_at(bytes.len().min(n));
        *bytes = rest;
        let mut taken = taken.to_vec();
        taken.resize(n, 0);
        taken
    };
    let number = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
    let fits = |size: usize, at: u64, n: u64| at.checked_add(n).is_some_and(|end| end <= size as u64);
    while !bytes.is_empty() {
        let mut head = piece(&mut bytes, 24);
        let [counts, at, value] = [0, 8, 16].map(|k| number(&head[k..k + 8]));
        let [ranges, wakes] = [counts as u32, (counts >> 32) as u32].map(|n| n as usize);
        if ranges > 64 || wakes > 64 {
            said.extend(head);
            break;
        }
        head.extend(piece(&mut bytes, 16 * ranges + 8 * wakes));
        let numbers: Vec<u64> = head[24..].chunks(8).map(number).collect();
        let (places, woken) = numbers.split_at(2 * ranges);
        let places: Vec<(u64, u64)> = places.chunks(2).map(|p| (p[0], p[1])).collect();
        let mut hasher = seal.begin();
        hasher.update(&head);
        said.extend(head);
        said.extend(hasher.finalize().as_bytes());
        let is_sound =
            at % 8 == 0 && fits(memory.len(), at, 8) && places.iter().all(|(at, n)| fits(memory.len(), *at, *n)) && woken.iter().all(|r| *r < world);
        if !is_sound || wakes as u64 > world || places.iter().map(|p| p.1).sum::<u64>() > ANNOUNCED {
            // The frame is unsound, or announces more bytes than the fuzzer sends: the input ends here.
            break;
        }
        for (at, n) in places {
            let data = piece(&mut bytes, n as usize);
            hasher.update(&data);
            memory[at as usize..][..n as usize].copy_from_slice(&data);
            said.extend(data);
        }
        said.extend(hasher.finalize().as_bytes());
        memory[at as usize..][..4].copy_from_slice(&(value as u32).to_le_bytes());
        for rank in woken {
            let bell = &mut memory[doorbell(*rank) as usize..][..4];
            let rung = u32::from_le_bytes((&*bell).try_into().expect("four bytes")).wrapping_add(1);
            bell.copy_from_slice(&rung.to_le_bytes());
        }
    }
    said
}
