//! A listening port at which strangers cost next to nothing. All who knock are heard side by side, without threads,
//! in memory that grows with what they have sent and ends at [`HELLO`](super::HELLO); each has one deadline for all
//! it has to say; when there are too many, the oldest that has proved nothing goes.

use super::frames::Link;
use super::handshake::Purpose;
use super::incoming::{AuthenticatedPeer, IncomingHandshake};
use super::secret::Key;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::VecDeque;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// How long one that knocks may take to prove itself and to say who it is, in all.
pub const PATIENCE: Duration = Duration::from_secs(5);
/// Most that are heard at a time.
const CONNECTIONS: usize = 256;
/// Most that are let in before all are heard again.
const BATCH: usize = 64;
/// Connections that may wait in the system's queue; beyond them it drops what ranks send too, which costs them a
/// second.
const QUEUE: i32 = 4096;
/// Pause when the system refuses to give connections out.
const PAUSE: Duration = Duration::from_millis(20);

/// Listens for ranks and takes them through the handshake.
pub struct HandshakeListener {
    listener: TcpListener,
    key: Key,
    purpose: Purpose,
    patience: Duration,
    /// Connections that have not proved themselves, in the order in which they came.
    pending: VecDeque<PendingConnection>,
    /// Number of connections that came to nothing.
    pub strangers: u64,
    /// Address of the last of them.
    pub last: Option<SocketAddr>,
}

struct PendingConnection {
    stream: TcpStream,
    address: SocketAddr,
    since: Instant,
    handshake: IncomingHandshake,
}

/// The state of a connection after it was heard.
enum Outcome {
    /// More is to come.
    Waits,
    /// It is a rank, and said this first.
    Came(AuthenticatedPeer),
    Gone,
}

impl HandshakeListener {
    /// Accepts connections of a listener.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn new(listener: TcpListener, key: Key, purpose: Purpose) -> io::Result<HandshakeListener> {
        rustix::net::listen(&listener, QUEUE)?;
        listener.set_nonblocking(true)?;
        Ok(HandshakeListener { listener, key, purpose, patience: PATIENCE, pending: VecDeque::new(), strangers: 0, last: None })
    }

    /// The next that proves itself within this time, and what it says first.
    pub fn next(&mut self, time: Duration) -> Option<(Link, Vec<u8>)> {
        let until = Instant::now() + time;
        loop {
            let mut came = None;
            for mut connection in std::mem::take(&mut self.pending) {
                let outcome = if came.is_some() { Outcome::Waits } else { connection.advance() };
                match outcome {
                    Outcome::Waits if connection.since.elapsed() < self.patience => self.pending.push_back(connection),
                    Outcome::Waits | Outcome::Gone => self.dismiss(&connection),
                    Outcome::Came(peer) => came = connection.link(peer),
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

    /// Waits until somebody connects or says something, or one has had its time.
    fn wait(&self, time: Duration) {
        let oldest = self.pending.front().map_or(self.patience, |g| self.patience.saturating_sub(g.since.elapsed()));
        let time = time.min(oldest).max(Duration::from_millis(1));
        let streams = self.pending.iter().map(|g| PollFd::new(&g.stream, PollFlags::IN));
        let mut all: Vec<PollFd> = std::iter::once(PollFd::new(&self.listener, PollFlags::IN)).chain(streams).collect();
        let time = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
        // An error is an interruption, after which all are looked at once more.
        let _ = poll(&mut all, Some(&time));
    }

    /// Lets in some of those that wait.
    fn admit(&mut self) {
        for _ in 0..BATCH {
            let (stream, address) = match self.listener.accept() {
                Ok(new) => new,
                Err(e) if matches!(e.kind(), io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted) => continue,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                // The system has no descriptors or memory left, and others may give some back.
                Err(_) => return std::thread::sleep(PAUSE),
            };
            if stream.set_nonblocking(true).is_err() {
                continue;
            }
            if self.pending.len() >= CONNECTIONS {
                // A rank proves itself at once and tries again, so connections that have been here for long without
                // proof are hardly ranks.
                let oldest = self.pending.iter().position(|g| !g.handshake.has_proved_itself()).unwrap_or(0);
                if let Some(connection) = self.pending.remove(oldest) {
                    self.dismiss(&connection);
                }
            }
            let handshake = IncomingHandshake::new(self.key.clone(), self.purpose);
            self.pending.push_back(PendingConnection { stream, address, since: Instant::now(), handshake });
        }
    }

    fn dismiss(&mut self, connection: &PendingConnection) {
        self.strangers += 1;
        self.last = Some(connection.address);
    }
}

impl PendingConnection {
    fn advance(&mut self) -> Outcome {
        match self.handshake.hear(&mut &self.stream) {
            Ok(Some(peer)) => Outcome::Came(peer),
            Ok(None) => Outcome::Gone,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Outcome::Waits,
            Err(_) => Outcome::Gone,
        }
    }

    fn link(self, AuthenticatedPeer { hello, from, to }: AuthenticatedPeer) -> Option<(Link, Vec<u8>)> {
        self.stream.set_nonblocking(false).and_then(|()| self.stream.set_nodelay(true)).ok()?;
        Some((Link::after_hello(self.stream, from, to), hello))
    }
}

#[cfg(test)]
mod tests;
