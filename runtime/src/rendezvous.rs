//! How ranks meet before they can talk otherwise: over TCP, at an address that all know. Rank 0 listens there; each rank says who it is and what it
//! runs, and gets what rank 0 has for all, once all have come.
//!
//! Every message is a length in four bytes and that many bytes.

use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// Most bytes of a message.
const MOST: u32 = 1 << 20;
/// How long until another try to connect.
const AGAIN: Duration = Duration::from_millis(20);

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
    #[error("rank {rank} cannot listen at {address}: {cause}")]
    Listen { rank: u64, address: SocketAddr, cause: io::Error },
    #[error("rank {rank} does not reach rank 0 at {address}: {cause}")]
    Unreached { rank: u64, address: SocketAddr, cause: io::Error },
    /// What rank 0 says of those that came.
    #[error("{0}")]
    Refused(String),
}

fn put(to: &mut TcpStream, bytes: &[u8]) -> io::Result<()> {
    to.write_all(&(bytes.len() as u32).to_le_bytes())?;
    to.write_all(bytes)
}

fn get(from: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut length = [0; 4];
    from.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length);
    if length > MOST {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "not a message of a rank"));
    }
    let mut bytes = vec![0; length as usize];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// What rank 0 answers: its gift, or why there is none.
type Answer = Result<Vec<u8>, String>;

/// Meets all ranks of a world and gives what rank 0 brought: `gift`, which the others lack.
///
/// # Errors
/// If ranks do not come within the time, disagree on the world or what they run, or come twice.
pub fn meet(address: SocketAddr, member: &Member, gift: Option<Vec<u8>>, limit: Duration) -> Result<Vec<u8>, MeetError> {
    let deadline = Instant::now() + limit;
    if let Some(gift) = gift {
        let listener = TcpListener::bind(address).map_err(|cause| MeetError::Listen { rank: member.rank, address, cause })?;
        return serve(&listener, member, gift, deadline).map_err(MeetError::Refused);
    }
    let unreached = |cause| MeetError::Unreached { rank: member.rank, address, cause };
    let mut stream = loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match TcpStream::connect_timeout(&address, left.max(AGAIN)) {
            Ok(stream) => break stream,
            Err(cause) if left.is_zero() => return Err(unreached(cause)),
            // Rank 0 may not listen yet.
            Err(_) => std::thread::sleep(AGAIN),
        }
    };
    // Rank 0 answers by the deadline whatever happens; a little more is for the way.
    let patience = deadline.saturating_duration_since(Instant::now()) + Duration::from_secs(5);
    let mut talk = || {
        stream.set_read_timeout(Some(patience))?;
        put(&mut stream, &postcard::to_stdvec(member).expect("invariant: plain data"))?;
        let answer: Answer = postcard::from_bytes(&get(&mut stream)?).map_err(io::Error::other)?;
        Ok(answer)
    };
    talk().map_err(unreached)?.map_err(MeetError::Refused)
}

/// Waits for all others and answers them, each the same.
fn serve(listener: &TcpListener, own: &Member, gift: Vec<u8>, deadline: Instant) -> Answer {
    let mut come: Vec<Option<TcpStream>> = (0..own.world).map(|_| None).collect();
    let outcome = gather(listener, own, &mut come, deadline).map(|()| gift);
    let answer = postcard::to_stdvec(&outcome).expect("invariant: plain data");
    for stream in come.iter_mut().flatten() {
        // Who has gone since is found missing by what follows.
        let _ = put(stream, &answer);
    }
    outcome
}

fn gather(listener: &TcpListener, own: &Member, come: &mut [Option<TcpStream>], deadline: Instant) -> Result<(), String> {
    listener.set_nonblocking(true).map_err(|e| e.to_string())?;
    loop {
        let missing: Vec<u64> = (0..own.world).filter(|r| *r != own.rank && come[*r as usize].is_none()).collect();
        if missing.is_empty() {
            return Ok(());
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(format!("{} did not come in time", crate::comm::ranks(&missing)));
        }
        let Ok((mut stream, _)) = listener.accept() else {
            std::thread::sleep(AGAIN.min(left));
            continue;
        };
        let hello = stream.set_nonblocking(false).and_then(|()| stream.set_read_timeout(Some(left))).and_then(|()| get(&mut stream));
        // Whoever is no rank is not answered.
        let Some(member) = hello.ok().and_then(|bytes| postcard::from_bytes::<Member>(&bytes).ok()) else { continue };
        let wrong = wrong(own, &member, come);
        if let Some(place) = come.get_mut(member.rank as usize) {
            place.get_or_insert(stream);
        }
        wrong.map_or(Ok(()), Err)?;
    }
}

/// Why a rank does not belong to those that came.
fn wrong(own: &Member, member: &Member, come: &[Option<TcpStream>]) -> Option<String> {
    let rank = member.rank;
    if member.world != own.world {
        return Some(format!("rank {rank} is of a world of {} ranks, rank {} of one of {}", member.world, own.rank, own.world));
    }
    if member.id != own.id {
        return Some(format!("rank {rank} runs {}, rank {} runs {}", member.id, own.rank, own.id));
    }
    match come.get(rank as usize) {
        None => Some(format!("rank {rank} is not in a world of {} ranks", own.world)),
        Some(Some(_)) => Some(format!("two ranks {rank} came")),
        Some(None) if rank == own.rank => Some(format!("two ranks {rank} came")),
        Some(None) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Output, Stdio};

    const MEMBER: &str = "MCC_TEST_MEMBER";

    /// What a process of the tests below does: `rank world id address milliseconds`. Without them there is nothing to do.
    #[test]
    fn member() {
        let Ok(text) = std::env::var(MEMBER) else { return };
        let words: Vec<&str> = text.split(' ').collect();
        let number = |k: usize| words[k].parse::<u64>().unwrap();
        let member = Member { rank: number(0), world: number(1), id: words[2].into() };
        let gift = (member.rank == 0).then(|| b"from rank 0".to_vec());
        let met = meet(words[3].parse().unwrap(), &member, gift, Duration::from_millis(number(4)));
        println!("[{}]", met.map_or_else(|e| e.to_string(), |g| String::from_utf8(g).unwrap()));
    }

    /// A process for each of `members` (rank, world, id), the last one first; what each says in the end.
    fn processes(members: &[(u64, u64, &str)], milliseconds: u64) -> Vec<String> {
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let start = |(rank, world, id): &(u64, u64, &str)| {
            let text = format!("{rank} {world} {id} {address} {milliseconds}");
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
        assert_eq!(processes(&members, 30_000), ["from rank 0"; 4]);
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
    fn without_rank_0_others_say_where_they_looked() {
        let said = processes(&[(1, 2, "a")], 200);
        assert!(said[0].starts_with("rank 1 does not reach rank 0 at 127.0.0.1:"), "{said:?}");
    }
}
