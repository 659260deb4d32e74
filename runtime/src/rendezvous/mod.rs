//! How ranks meet before they can talk otherwise: over TCP, at an address that all know. Rank 0 listens there and
//! keeps a link to each other rank. Ranks then go on in rounds: each brings a word, and rank 0 has an answer for all,
//! which it makes of everyone's words.
//!
//! Nobody is a rank who has not proved that it knows the secret ([`handshake`]), and what is said carries keyed
//! hashes ([`frames`]). Without a secret the key is one that everybody knows, and ranks meet on their own machine
//! only, unless they are told to go without ([`Trust`]).

mod frames;
mod handshake;
mod incoming;
mod interfaces;
mod listener;
mod secret;

use crate::comm::ranks;
use crate::world::RendezvousEndpoint;
pub use frames::{Link, LinkReader, LinkWriter, Seal, TAG, Tampered, hear};
pub use handshake::{Challenge, HandshakeRole, KnockError, Nonce, Purpose, knock, random};
pub use incoming::{AuthenticatedPeer, HELLO, IncomingHandshake};
pub use interfaces::listen;
use interfaces::own_address;
pub use listener::HandshakeListener;
pub use secret::{Key, SecretError, Trust};
use serde::{Deserialize, Serialize};
use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// How long until another try to connect.
const AGAIN: Duration = Duration::from_millis(20);
/// How long until another try when who answered was a stranger, or took this rank for one.
const STRANGE: Duration = Duration::from_millis(500);
/// How many such answers in a row are believed. One alone may be rank 0's, whom others besiege.
const STRANGERS: u32 = 10;
/// How long ranks wait for others before they say so, once.
const QUIET: Duration = Duration::from_secs(10);
/// Rank 0 answers by the deadline whatever happens; this much more is for the way. Also, how long one handshake may
/// take.
const WAY: Duration = Duration::from_secs(5);
/// How long rank 0 waits for the other ranks when it has found that the meeting is to be refused, so that they hear
/// why.
const LINGER: Duration = Duration::from_secs(5);

/// A process that comes to the meeting.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// Its number in the world, from 0.
    pub rank: u64,
    /// Ranks of the world that it was started into.
    pub world: u64,
    /// What it runs: the same for all, such as an artifact's hash.
    pub id: String,
}

/// Why ranks did not meet.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum MeetError {
    #[error("rank {rank} cannot listen at port {port}: {cause}; another port can be given with --rendezvous HOST:PORT")]
    Listen { rank: u64, port: u16, cause: io::Error },
    #[error("rank {rank} does not reach rank 0 at {}:{}: {cause}", .meeting.host, .meeting.port)]
    Unreached { rank: u64, meeting: RendezvousEndpoint, cause: io::Error },
    #[error(
        "rank {rank}: who answers at {}:{} has not proved that it knows this rank's secret: all ranks need the same (MCC_SECRET or --secret-file), and the port to \
         themselves (--rendezvous HOST:PORT)", .meeting.host, .meeting.port
    )]
    Stranger { rank: u64, meeting: RendezvousEndpoint },
    #[error(
        "ranks would meet at {}:{}, which is no loopback address, so others could join them, and they share no secret. Before the launcher starts them:\n  \
         export MCC_SECRET=$(openssl rand -hex 32)\nor give each `--secret-file FILE` with the same content. On a network where nobody else is, \
         --insecure-rendezvous goes without", .meeting.host, .meeting.port
    )]
    Exposed { meeting: RendezvousEndpoint },
    /// What rank 0 says of those that came.
    #[error("{0}")]
    Refused(String),
}

/// A rank's links to the others.
pub enum StarLinks {
    /// Rank 0's: to rank 1 and on.
    Hub(Vec<Link>),
    /// Any other's: to rank 0.
    Spoke(Link),
}

/// What rank 0 answers, or what is wrong.
type Answer = Result<Vec<u8>, String>;

fn left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

/// Meets all ranks of a world. `note` is told what a user should know and nothing depends on.
///
/// # Errors
/// If ranks do not come by the deadline, disagree on the world or what they run, or come twice; if they have no
/// secret and would meet where others can come.
pub fn meet(
    meeting: &RendezvousEndpoint,
    member: &Member,
    trust: &Trust,
    deadline: Instant,
    note: &mut dyn FnMut(String),
) -> Result<StarLinks, MeetError> {
    if member.rank == 0 {
        let listener = interfaces::listen_for(meeting, trust, note)?;
        let refused = |e: io::Error| MeetError::Listen { rank: 0, port: meeting.port, cause: e };
        let mut incoming = HandshakeListener::new(listener, trust.key(), Purpose::Meeting).map_err(refused)?;
        let mut come: Vec<Option<Link>> = (1..member.world).map(|_| None).collect();
        let gathered = gather(&mut incoming, member, &mut come, deadline, note);
        // Nobody else is expected, so the port is closed.
        drop(incoming);
        let mut links: Vec<Link> = come.into_iter().flatten().collect();
        answer(&mut links, &gathered.clone().map(|()| vec![]));
        return gathered.map(|()| StarLinks::Hub(links)).map_err(MeetError::Refused);
    }
    let mut link = reach(meeting, member, trust, deadline, note)?;
    let unreached = |cause| MeetError::Unreached { rank: member.rank, meeting: meeting.clone(), cause };
    let answer: Answer = link.hear(Some(left(deadline) + LINGER + WAY)).map_err(unreached)?;
    answer.map(|_| StarLinks::Spoke(link)).map_err(MeetError::Refused)
}

/// Connects to rank 0, which may not listen yet or be besieged.
fn reach(meeting: &RendezvousEndpoint, member: &Member, trust: &Trust, deadline: Instant, note: &mut dyn FnMut(String)) -> Result<Link, MeetError> {
    let hello = postcard::to_stdvec(member).expect("invariant: plain data");
    let (key, mut strange) = (trust.key(), 0);
    let unreached = |cause| MeetError::Unreached { rank: member.rank, meeting: meeting.clone(), cause };
    let stranger = || MeetError::Stranger { rank: member.rank, meeting: meeting.clone() };
    let mut quiet = Some(Instant::now() + QUIET);
    loop {
        if quiet.take_if(|q| Instant::now() >= *q).is_some() {
            let RendezvousEndpoint { host, port, .. } = meeting;
            note(format!("rank {} waits for rank 0 at {host}:{port}, at most {} s more", member.rank, left(deadline).as_secs()));
        }
        let tried = interfaces::addresses(meeting, trust)?.and_then(|addresses| try_each(&addresses, |a| greet(a, &key, &hello, deadline)));
        match tried {
            Ok(link) => return Ok(link),
            Err(KnockError::Io(cause)) if left(deadline).is_zero() => return Err(if strange > 0 { stranger() } else { unreached(cause) }),
            Err(KnockError::Io(_)) => std::thread::sleep(AGAIN),
            Err(KnockError::Stranger) => {
                strange += 1;
                if strange == STRANGERS || left(deadline) <= STRANGE {
                    return Err(stranger());
                }
                std::thread::sleep(STRANGE);
            }
        }
    }
}

fn greet(address: SocketAddr, key: &Key, hello: &[u8], deadline: Instant) -> Result<Link, KnockError> {
    let time = left(deadline).clamp(AGAIN, WAY);
    let stream = TcpStream::connect_timeout(&address, time)?;
    knock(stream, key, Purpose::Meeting, hello, Instant::now() + time)
}

/// The first link that comes about, or what was wrong with the last.
fn try_each(addresses: &[SocketAddr], greet: impl Fn(SocketAddr) -> Result<Link, KnockError>) -> Result<Link, KnockError> {
    let mut last = KnockError::Io(io::Error::new(io::ErrorKind::NotFound, "the name has no address"));
    for address in addresses {
        match (greet(*address), &last) {
            (Ok(link), _) => return Ok(link),
            // A stranger at one address says more than silence at another.
            (Err(KnockError::Io(_)), KnockError::Stranger) => {}
            (Err(e), _) => last = e,
        }
    }
    Err(last)
}

/// Tells all that came the same. Who has gone since is found missing by what follows.
fn answer(links: &mut [Link], answer: &Answer) {
    for link in links {
        let _ = link.say(answer, WAY);
    }
}

/// Waits until all ranks have come. Those that came are in their places whatever the outcome, to be told of it.
fn gather(
    incoming: &mut HandshakeListener,
    own: &Member,
    come: &mut Vec<Option<Link>>,
    deadline: Instant,
    note: &mut dyn FnMut(String),
) -> Result<(), String> {
    let (mut refused, mut deadline) = (None, deadline);
    let mut quiet = Some(Instant::now() + QUIET);
    let mut more = vec![];
    let outcome = loop {
        let missing: Vec<u64> = (1..own.world).filter(|r| come[*r as usize - 1].is_none()).collect();
        // Ranks of other worlds came in place of all that are missing, so nobody else is waited for.
        if missing.len() <= more.len() {
            break refused.map_or(Ok(()), Err);
        }
        if quiet.take_if(|q| Instant::now() >= *q).is_some() {
            note(format!("rank 0 waits for {} of {}, at most {} s more", ranks(&missing), own.world, left(deadline).as_secs()));
        }
        let Some((link, hello)) = incoming.next(left(deadline).min(WAY)) else {
            if left(deadline).is_zero() {
                break Err(refused.unwrap_or_else(|| format!("{} did not come in time{}", ranks(&missing), strangers(incoming))));
            }
            continue;
        };
        // The peer knows the secret, so it is a rank, be it one of another version of mcc.
        let wrong = match postcard::from_bytes::<Member>(&hello) {
            Ok(member) => {
                let wrong = wrong(own, &member, come);
                match (member.rank as usize).checked_sub(1).and_then(|k| come.get_mut(k)) {
                    Some(place) if place.is_none() => *place = Some(link),
                    Some(_) | None => more.push(Some(link)),
                }
                wrong
            }
            Err(_) => {
                more.push(Some(link));
                Some("a rank came that is not of this version of mcc".into())
            }
        };
        if let (Some(wrong), None) = (wrong, &refused) {
            refused = Some(wrong);
            deadline = deadline.min(Instant::now() + LINGER);
        }
    };
    come.append(&mut more);
    outcome
}

/// What to say of those that came and were none of this run.
fn strangers(incoming: &HandshakeListener) -> String {
    match incoming.last {
        Some(last) => format!("; {} connections, the last from {last}, did not prove that they know this run's secret", incoming.strangers),
        None => String::new(),
    }
}

/// Why a rank does not belong to those that came.
fn wrong(own: &Member, member: &Member, come: &[Option<Link>]) -> Option<String> {
    let rank = member.rank;
    if member.world != own.world {
        return Some(format!("rank {rank} is of a world of {} ranks, rank {} of one of {}", member.world, own.rank, own.world));
    }
    if member.id != own.id {
        return Some(format!("rank {rank} runs {}, rank {} runs {}", member.id, own.rank, own.id));
    }
    if rank >= own.world {
        return Some(format!("rank {rank} is not in a world of {} ranks", own.world));
    }
    (rank == own.rank || come[rank as usize - 1].is_some()).then(|| format!("two ranks {rank} came"))
}

impl StarLinks {
    /// Where this rank is to listen for those of other machines: at the network by which it met the others
    /// ([`own_address`]).
    pub fn own_address(&self, meeting: &RendezvousEndpoint, trust: &Trust) -> IpAddr {
        let links = match self {
            StarLinks::Hub(links) => &links[..],
            StarLinks::Spoke(link) => std::slice::from_ref(link),
        };
        own_address(meeting, trust, links.iter().filter_map(Link::local))
    }

    /// One round; gives rank 0's answer, which it makes of all words in rank order. A rank that has an error in place
    /// of a word ends the meeting for all.
    ///
    /// # Errors
    /// That error; what the answer's maker says; a rank that is gone, or has no word by the deadline.
    pub fn round(
        &mut self,
        word: Result<Vec<u8>, String>,
        deadline: Instant,
        make: impl FnOnce(&[Link], Vec<Vec<u8>>) -> Answer,
    ) -> Result<Vec<u8>, MeetError> {
        match self {
            StarLinks::Hub(links) => {
                let made = collect(links, word, deadline).and_then(|words| make(links, words));
                answer(links, &made);
                made.map_err(MeetError::Refused)
            }
            StarLinks::Spoke(link) => {
                let gone = |e: io::Error| MeetError::Refused(format!("rank 0 is gone: {e}"));
                link.say(&word, WAY).map_err(gone)?;
                link.hear::<Answer>(Some(left(deadline) + WAY)).map_err(gone)?.map_err(MeetError::Refused)
            }
        }
    }
}

fn collect(links: &mut [Link], own: Result<Vec<u8>, String>, deadline: Instant) -> Result<Vec<Vec<u8>>, String> {
    let mut words = vec![own];
    for (k, link) in links.iter_mut().enumerate() {
        let said = link.hear::<Result<Vec<u8>, String>>(Some(left(deadline)));
        words.push(said.unwrap_or_else(|e| match e.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Err(format!("rank {} came and then said nothing in time", k + 1)),
            _ => Err(format!("rank {} came and is gone: {e}", k + 1)),
        }));
    }
    words.into_iter().collect()
}

#[cfg(test)]
mod tests;
