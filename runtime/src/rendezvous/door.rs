//! A listening port at which strangers cost next to nothing. All who knock are heard side by side, without threads, in memory that grows with what they have sent and
//! ends at [`HELLO`]; each has one deadline for all it has to say; when there are too many, the oldest that has proved nothing goes.

use super::frames::{Link, Seal, TAG};
use super::handshake::{Challenge, Nonce, Purpose, Side, random};
use super::secret::Key;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// How long one that knocks may take to prove itself and to say who it is, in all.
pub const PATIENCE: Duration = Duration::from_secs(5);
/// Most bytes of what it says first.
pub const HELLO: usize = 4 << 10;
/// Most that are heard at a time.
const GUESTS: usize = 256;
/// Most that are let in before all are heard again.
const BATCH: usize = 64;
/// Connections that may wait in the system's queue; beyond them it drops what ranks send too, which costs them a second.
const QUEUE: i32 = 4096;
/// Pause when the system refuses to give connections out.
const PAUSE: Duration = Duration::from_millis(20);

/// Where ranks knock.
pub struct Door {
    listener: TcpListener,
    key: Key,
    purpose: Purpose,
    patience: Duration,
    /// In the order in which they came.
    guests: VecDeque<Guest>,
    /// Connections that came to nothing.
    pub strangers: u64,
    /// The last of them.
    pub last: Option<SocketAddr>,
}

struct Guest {
    stream: TcpStream,
    address: SocketAddr,
    since: Instant,
    /// Of the current stage, as far as they have come.
    bytes: Vec<u8>,
    stage: Stage,
}

enum Stage {
    /// Nothing is known of it.
    Nonce,
    Proof {
        connector: Nonce,
        listener: Nonce,
    },
    /// It has proved itself.
    Hello {
        from: Seal,
        to: Key,
    },
}

/// What has become of one that knocked.
enum Outcome {
    /// More is to come.
    Waits,
    /// It is a rank, and said this.
    Came(Vec<u8>),
    Gone,
}

impl Door {
    /// At a port that is listened at.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn new(listener: TcpListener, key: Key, purpose: Purpose) -> io::Result<Door> {
        rustix::net::listen(&listener, QUEUE)?;
        listener.set_nonblocking(true)?;
        Ok(Door { listener, key, purpose, patience: PATIENCE, guests: VecDeque::new(), strangers: 0, last: None })
    }

    /// The next that proves itself within this time, and what it says first.
    pub fn next(&mut self, time: Duration) -> Option<(Link, Vec<u8>)> {
        let until = Instant::now() + time;
        loop {
            let mut came = None;
            for mut guest in std::mem::take(&mut self.guests) {
                let outcome = if came.is_some() { Outcome::Waits } else { guest.advance(&self.key, self.purpose) };
                match outcome {
                    Outcome::Waits if guest.since.elapsed() < self.patience => self.guests.push_back(guest),
                    Outcome::Waits | Outcome::Gone => self.dismiss(&guest),
                    Outcome::Came(hello) => came = guest.link().map(|link| (link, hello)),
                }
            }
            let left = until.saturating_duration_since(Instant::now());
            if came.is_some() || left.is_zero() {
                return came;
            }
            self.wait(left);
            self.admit();
        }
    }

    /// Until somebody knocks or says something, or one has had its time.
    fn wait(&self, time: Duration) {
        let oldest = self.guests.front().map_or(self.patience, |g| self.patience.saturating_sub(g.since.elapsed()));
        let time = time.min(oldest).max(Duration::from_millis(1));
        let streams = self.guests.iter().map(|g| PollFd::new(&g.stream, PollFlags::IN));
        let mut all: Vec<PollFd> = std::iter::once(PollFd::new(&self.listener, PollFlags::IN)).chain(streams).collect();
        let time = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
        // An error is an interruption: then all are looked at once more.
        let _ = poll(&mut all, Some(&time));
    }

    /// Lets in some of those that wait.
    fn admit(&mut self) {
        for _ in 0..BATCH {
            let (stream, address) = match self.listener.accept() {
                Ok(new) => new,
                Err(e) if matches!(e.kind(), io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted) => continue,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                // It has no descriptors or memory left: others may give some back.
                Err(_) => return std::thread::sleep(PAUSE),
            };
            if stream.set_nonblocking(true).is_err() {
                continue;
            }
            if self.guests.len() >= GUESTS {
                // A rank proves itself at once and tries again, so those that have been here for long without proof are hardly ranks.
                let oldest = self.guests.iter().position(|g| !matches!(g.stage, Stage::Hello { .. })).unwrap_or(0);
                if let Some(guest) = self.guests.remove(oldest) {
                    self.dismiss(&guest);
                }
            }
            self.guests.push_back(Guest { stream, address, since: Instant::now(), bytes: vec![], stage: Stage::Nonce });
        }
    }

    fn dismiss(&mut self, guest: &Guest) {
        self.strangers += 1;
        self.last = Some(guest.address);
    }
}

impl Guest {
    /// Takes what has come. What is sent fits into any connection's buffers, so nothing waits.
    fn advance(&mut self, key: &Key, purpose: Purpose) -> Outcome {
        match self.try_advance(key, purpose) {
            Ok(Some(hello)) => Outcome::Came(hello),
            Ok(None) => Outcome::Gone,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Outcome::Waits,
            Err(_) => Outcome::Gone,
        }
    }

    /// What it says first; none if it is a stranger.
    fn try_advance(&mut self, key: &Key, purpose: Purpose) -> io::Result<Option<Vec<u8>>> {
        loop {
            match &mut self.stage {
                Stage::Nonce => {
                    let Some(said) = filled::<40>(&self.stream, &mut self.bytes)? else { return Ok(None) };
                    let (mark, connector) = said.split_at(8);
                    if mark != purpose.mark() {
                        return Ok(None);
                    }
                    let connector: Nonce = connector.try_into().expect("invariant: 32 of 40 bytes");
                    let listener: Nonce = random()?;
                    (&self.stream).write_all(&listener)?;
                    self.stage = Stage::Proof { connector, listener };
                }
                Stage::Proof { connector, listener } => {
                    let Some(said) = filled::<32>(&self.stream, &mut self.bytes)? else { return Ok(None) };
                    let challenge = Challenge { key, purpose, connector: *connector, listener: *listener };
                    if blake3::Hash::from(said) != challenge.proof(Side::Connector) {
                        return Ok(None);
                    }
                    (&self.stream).write_all(challenge.proof(Side::Listener).as_bytes())?;
                    let [from, to] = [Side::Connector, Side::Listener].map(|side| challenge.session(side));
                    self.stage = Stage::Hello { from: Seal::new(from), to };
                }
                Stage::Hello { from, .. } => {
                    if !fill(&self.stream, &mut self.bytes, 4)? {
                        return Ok(None);
                    }
                    let length = u32::from_le_bytes(self.bytes[..4].try_into().expect("invariant: four bytes")) as usize;
                    if length > HELLO || !fill(&self.stream, &mut self.bytes, 4 + length + TAG)? {
                        return Ok(None);
                    }
                    let (said, tag) = self.bytes.split_at(4 + length);
                    let tag = tag.try_into().expect("invariant: as many as were waited for");
                    return Ok(Seal::check(from.begin().update(said), tag).is_ok().then(|| said[4..].to_vec()));
                }
            }
        }
    }

    fn link(self) -> Option<Link> {
        let Stage::Hello { from, to } = self.stage else { return None };
        self.stream.set_nonblocking(false).and_then(|()| self.stream.set_nodelay(true)).ok()?;
        Some(Link::after_hello(self.stream, from, to))
    }
}

/// Reads until there are so many bytes, and no more; false if there will not be.
fn fill(mut stream: &TcpStream, bytes: &mut Vec<u8>, count: usize) -> io::Result<bool> {
    while bytes.len() < count {
        let mut piece = [0; 512];
        let wanted = piece.len().min(count - bytes.len());
        match stream.read(&mut piece[..wanted])? {
            0 => return Ok(false),
            n => bytes.extend_from_slice(&piece[..n]),
        }
    }
    Ok(true)
}

/// As [`fill`], for a stage of fixed length, which is then over.
fn filled<const N: usize>(stream: &TcpStream, bytes: &mut Vec<u8>) -> io::Result<Option<[u8; N]>> {
    if !fill(stream, bytes, N)? {
        return Ok(None);
    }
    let said = bytes[..].try_into().expect("invariant: as many as were waited for");
    bytes.clear();
    Ok(Some(said))
}

#[cfg(test)]
mod tests;
