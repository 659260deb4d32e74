//! How ranks meet before they can talk otherwise: over TCP, at an address that all know. Rank 0 listens there and keeps a link to each other rank. Ranks
//! then go on in rounds: each brings a word, and rank 0 has an answer for all, which it makes of everyone's words.
//!
//! Every message is a length in four bytes and that many bytes.

use crate::comm::ranks;
use crate::world::Meeting;
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// Most bytes of a message.
const MOST: u32 = 64 << 20;
/// How long until another try to connect.
const AGAIN: Duration = Duration::from_millis(20);
/// Rank 0 answers by the deadline whatever happens; this much more is for the way.
const WAY: Duration = Duration::from_secs(5);

/// Who comes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    pub rank: u64,
    pub world: u64,
    /// What it runs: the same for all, such as an artifact's hash.
    pub id: String,
}

#[derive(Debug, thiserror::Error)]
pub enum MeetError {
    #[error("rank {rank} cannot listen at port {port}: {cause}; another port can be given with --rendezvous HOST:PORT")]
    Listen { rank: u64, port: u16, cause: io::Error },
    #[error("rank {rank} does not reach rank 0 at {}:{}: {cause}", .meeting.host, .meeting.port)]
    Unreached { rank: u64, meeting: Meeting, cause: io::Error },
    /// What rank 0 says of those that came.
    #[error("{0}")]
    Refused(String),
}

/// A listener at every address of this machine.
///
/// # Errors
/// If the port is taken.
pub fn listen(port: u16) -> io::Result<TcpListener> {
    // Both kinds of addresses, where the system has both.
    TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)))
}

/// Two ranks' launchers, connected.
#[derive(Debug)]
pub struct Link {
    stream: TcpStream,
}

impl Link {
    fn new(stream: TcpStream) -> io::Result<Link> {
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        Ok(Link { stream })
    }

    /// Another handle of the same.
    ///
    /// # Errors
    /// If the system has none left.
    pub fn twin(&self) -> io::Result<Link> {
        Ok(Link { stream: self.stream.try_clone()? })
    }

    /// The other side's address, as this one sees it.
    pub fn peer(&self) -> Option<IpAddr> {
        self.stream.peer_addr().ok().map(|a| a.ip().to_canonical())
    }

    /// Says something, within a time.
    ///
    /// # Errors
    /// If the other side is gone or takes nothing.
    pub fn say(&mut self, what: &impl Serialize, time: Duration) -> io::Result<()> {
        let bytes = postcard::to_stdvec(what).expect("invariant: plain data");
        self.stream.set_write_timeout(Some(time))?;
        self.stream.write_all(&(bytes.len() as u32).to_le_bytes())?;
        self.stream.write_all(&bytes)
    }

    /// Hears what the other side says next, within a time or however long it takes.
    ///
    /// # Errors
    /// If it is gone, silent, or says something else.
    pub fn hear<T: for<'de> Deserialize<'de>>(&mut self, time: Option<Duration>) -> io::Result<T> {
        self.stream.set_read_timeout(time.map(|t| t.max(Duration::from_millis(1))))?;
        let mut length = [0; 4];
        self.stream.read_exact(&mut length)?;
        let length = u32::from_le_bytes(length);
        if length > MOST {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "not a message of a rank"));
        }
        let mut bytes = vec![0; length as usize];
        self.stream.read_exact(&mut bytes)?;
        postcard::from_bytes(&bytes).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e.to_string()))
    }

    /// Says that nothing more will be said.
    pub fn close(&self) {
        let _ = self.stream.shutdown(std::net::Shutdown::Write);
    }
}

/// A rank's links to the others.
#[derive(Debug)]
pub enum Star {
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

/// Meets all ranks of a world.
///
/// # Errors
/// If ranks do not come by the deadline, disagree on the world or what they run, or come twice.
pub fn meet(meeting: &Meeting, member: &Member, deadline: Instant) -> Result<Star, MeetError> {
    if member.rank == 0 {
        let listener = listen(meeting.port).map_err(|cause| MeetError::Listen { rank: 0, port: meeting.port, cause })?;
        let mut come: Vec<Option<Link>> = (1..member.world).map(|_| None).collect();
        let gathered = gather(&listener, member, &mut come, deadline);
        let mut links: Vec<Link> = come.into_iter().flatten().collect();
        answer(&mut links, &gathered.clone().map(|()| vec![]));
        return gathered.map(|()| Star::Hub(links)).map_err(MeetError::Refused);
    }
    let unreached = |cause| MeetError::Unreached { rank: member.rank, meeting: meeting.clone(), cause };
    let stream = loop {
        let tried = (meeting.host.as_str(), meeting.port).to_socket_addrs().and_then(|addresses| connect(addresses, left(deadline).max(AGAIN)));
        match tried {
            Ok(stream) => break stream,
            Err(cause) if left(deadline).is_zero() => return Err(unreached(cause)),
            // Rank 0 may not listen yet.
            Err(_) => std::thread::sleep(AGAIN),
        }
    };
    let greet = |stream| {
        let mut link = Link::new(stream)?;
        link.say(member, WAY)?;
        Ok((link.hear::<Answer>(Some(left(deadline) + WAY))?, link))
    };
    let (answer, link) = greet(stream).map_err(unreached)?;
    answer.map(|_| Star::Spoke(link)).map_err(MeetError::Refused)
}

fn connect(addresses: impl Iterator<Item = SocketAddr>, time: Duration) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in addresses {
        match TcpStream::connect_timeout(&address, time) {
            Ok(stream) => return Ok(stream),
            Err(e) => last = e,
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

fn gather(listener: &TcpListener, own: &Member, come: &mut [Option<Link>], deadline: Instant) -> Result<(), String> {
    listener.set_nonblocking(true).map_err(|e| e.to_string())?;
    loop {
        let missing: Vec<u64> = (1..own.world).filter(|r| come[*r as usize - 1].is_none()).collect();
        if missing.is_empty() {
            return Ok(());
        }
        let left = left(deadline);
        if left.is_zero() {
            return Err(format!("{} did not come in time", ranks(&missing)));
        }
        let Ok((stream, _)) = listener.accept() else {
            std::thread::sleep(AGAIN.min(left));
            continue;
        };
        let hello = Link::new(stream).and_then(|mut link| Ok((link.hear::<Member>(Some(left.min(WAY)))?, link)));
        // Whoever is no rank is not answered.
        let Ok((member, link)) = hello else { continue };
        let wrong = wrong(own, &member, come);
        match (member.rank as usize).checked_sub(1).and_then(|k| come.get_mut(k)) {
            Some(place) if place.is_none() => *place = Some(link),
            Some(_) | None => answer(&mut [link], &Err(wrong.clone().unwrap_or_default())),
        }
        wrong.map_or(Ok(()), Err)?;
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

impl Star {
    /// One round; gives rank 0's answer, which it makes of all words in rank order. A rank that has an error in place of a word ends the meeting for all.
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
            Star::Hub(links) => {
                let made = collect(links, word, deadline).and_then(|words| make(links, words));
                answer(links, &made);
                made.map_err(MeetError::Refused)
            }
            Star::Spoke(link) => {
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
mod tests {
    use super::*;
    use std::process::{Command, Output, Stdio};

    const MEMBER: &str = "MCC_TEST_MEMBER";

    /// What a process of the tests below does: `rank world id address milliseconds [error]`. Without them there is nothing to do.
    #[test]
    fn member() {
        let Ok(text) = std::env::var(MEMBER) else { return };
        let words: Vec<&str> = text.split(' ').collect();
        let number = |k: usize| words[k].parse::<u64>().unwrap();
        let member = Member { rank: number(0), world: number(1), id: words[2].into() };
        let deadline = Instant::now() + Duration::from_millis(number(4));
        let word = words.get(5).map_or(Ok(vec![b'a' + member.rank as u8]), |e| Err(e.replace('_', " ")));
        let met = meet(&Meeting::parse(words[3]).unwrap(), &member, deadline)
            .and_then(|mut star| star.round(word, deadline, |_, words| Ok(words.concat())));
        println!("[{}]", met.map_or_else(|e| e.to_string(), |w| String::from_utf8(w).unwrap()));
    }

    /// A process for each of `members` (rank, world, id), the last one first; what each says in the end.
    fn processes(members: &[(u64, u64, &str)], milliseconds: u64) -> Vec<String> {
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let start = |(rank, world, id): &(u64, u64, &str)| {
            let (id, error) = id.split_once(' ').map_or((*id, String::new()), |(id, e)| (id, format!(" rank_{rank}:_{e}")));
            let text = format!("{rank} {world} {id} {address} {milliseconds}{error}");
            let arguments = ["--exact", "rendezvous::tests::member", "--nocapture"];
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(arguments).env(MEMBER, text).stdout(Stdio::piped()).spawn().unwrap()
        };
        let children: Vec<_> = members.iter().rev().map(start).collect();
        let said = |o: Output| {
            let text = String::from_utf8(o.stdout).unwrap();
            text.split_once('[').and_then(|t| t.1.split_once(']')).map(|t| t.0.to_owned()).unwrap_or(text)
        };
        children.into_iter().rev().map(|c| said(c.wait_with_output().unwrap())).collect()
    }

    #[test]
    fn processes_meet_in_any_order() {
        let members: Vec<(u64, u64, &str)> = (0..4).map(|r| (r, 4, "a")).collect();
        assert_eq!(processes(&members, 30_000), ["abcd"; 4]);
    }

    #[test]
    fn a_rank_that_does_not_come_is_named_to_all() {
        assert_eq!(processes(&[(0, 3, "a"), (2, 3, "a")], 1_500), ["rank 1 did not come in time"; 2]);
    }

    #[test]
    fn ranks_of_another_run_or_world_are_refused() {
        assert_eq!(processes(&[(0, 2, "a"), (1, 2, "b")], 30_000), ["rank 1 runs b, rank 0 runs a"; 2]);
        assert_eq!(processes(&[(0, 2, "a"), (1, 3, "a")], 30_000), ["rank 1 is of a world of 3 ranks, rank 0 of one of 2"; 2]);
    }

    #[test]
    fn a_rank_that_has_an_error_tells_all() {
        assert_eq!(processes(&[(0, 3, "a"), (1, 3, "a"), (2, 3, "a x")], 30_000), ["rank 2: x"; 3]);
    }

    #[test]
    fn without_rank_0_others_say_where_they_looked() {
        let said = processes(&[(1, 2, "a")], 200);
        assert!(said[0].starts_with("rank 1 does not reach rank 0 at 127.0.0.1:"), "{said:?}");
    }
}
