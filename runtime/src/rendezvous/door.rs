//! A listening port at which strangers cost next to nothing. All who knock are heard side by side, without threads, in memory that grows with what they have sent and
//! ends at [`HELLO`](super::HELLO); each has one deadline for all it has to say; when there are too many, the oldest that has proved nothing goes.

use super::caller::{Caller, Greeted};
use super::frames::Link;
use super::handshake::Purpose;
use super::secret::Key;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::VecDeque;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// How long one that knocks may take to prove itself and to say who it is, in all.
pub const PATIENCE: Duration = Duration::from_secs(5);
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
    caller: Caller,
}

/// What has become of one that knocked.
enum Outcome {
    /// More is to come.
    Waits,
    /// It is a rank, and said this.
    Came(Greeted),
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
                let outcome = if came.is_some() { Outcome::Waits } else { guest.advance() };
                match outcome {
                    Outcome::Waits if guest.since.elapsed() < self.patience => self.guests.push_back(guest),
                    Outcome::Waits | Outcome::Gone => self.dismiss(&guest),
                    Outcome::Came(greeted) => came = guest.link(greeted),
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
                let oldest = self.guests.iter().position(|g| !g.caller.has_proved_itself()).unwrap_or(0);
                if let Some(guest) = self.guests.remove(oldest) {
                    self.dismiss(&guest);
                }
            }
            let caller = Caller::new(self.key.clone(), self.purpose);
            self.guests.push_back(Guest { stream, address, since: Instant::now(), caller });
        }
    }

    fn dismiss(&mut self, guest: &Guest) {
        self.strangers += 1;
        self.last = Some(guest.address);
    }
}

impl Guest {
    fn advance(&mut self) -> Outcome {
        match self.caller.hear(&mut &self.stream) {
            Ok(Some(greeted)) => Outcome::Came(greeted),
            Ok(None) => Outcome::Gone,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Outcome::Waits,
            Err(_) => Outcome::Gone,
        }
    }

    fn link(self, Greeted { hello, from, to }: Greeted) -> Option<(Link, Vec<u8>)> {
        self.stream.set_nonblocking(false).and_then(|()| self.stream.set_nodelay(true)).ok()?;
        Some((Link::after_hello(self.stream, from, to), hello))
    }
}

#[cfg(test)]
mod tests;
