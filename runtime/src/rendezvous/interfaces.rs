//! At which addresses of this machine a rank listens: as few as others need.

use super::MeetError;
use super::handshake::KnockError;
use super::secret::Trust;
use crate::world::RendezvousEndpoint;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};

/// A listener at an address of this machine; at every one for the unspecified address. Port 0 stands for one that the
/// system chooses.
///
/// # Errors
/// If the port is taken, or the address is another machine's.
pub fn listen(address: IpAddr, port: u16) -> io::Result<TcpListener> {
    if address.is_unspecified() {
        // This listens at both kinds of addresses, where the system has both.
        return TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)));
    }
    TcpListener::bind((address, port))
}

/// The addresses of a meeting. The outer error is what ranks without a secret must not do, the inner one may pass.
pub(super) fn addresses(meeting: &RendezvousEndpoint, trust: &Trust) -> Result<Result<Vec<SocketAddr>, KnockError>, MeetError> {
    let found = match (meeting.host.as_str(), meeting.port).to_socket_addrs() {
        Ok(found) => found.collect::<Vec<_>>(),
        Err(e) => return Ok(Err(KnockError::Io(e))),
    };
    match trust {
        Trust::Loopback if !found.iter().all(|a| a.ip().to_canonical().is_loopback()) => Err(MeetError::Exposed { meeting: meeting.clone() }),
        Trust::Secret(_) | Trust::Loopback | Trust::Insecure => Ok(Ok(found)),
    }
}

/// Whether a meeting can be only on this machine. (The own name of many a machine stands for a loopback address
/// there, and for another one elsewhere.)
fn is_here(meeting: &RendezvousEndpoint) -> bool {
    meeting.host.parse().map_or(meeting.host == "localhost", |a: IpAddr| a.to_canonical().is_loopback())
}

/// Listens for rank 0 at the address that the meeting's host stands for; at all of this machine if it stands for none
/// of them, and says so.
///
/// # Errors
/// If the port is taken, or ranks without a secret would meet where others can come.
pub(super) fn listen_for(meeting: &RendezvousEndpoint, trust: &Trust, note: &mut dyn FnMut(String)) -> Result<TcpListener, MeetError> {
    let failed = |cause| MeetError::Listen { rank: 0, port: meeting.port, cause };
    let found = match addresses(meeting, trust)? {
        Ok(found) => found,
        Err(KnockError::Io(cause)) if *trust == Trust::Loopback => return Err(failed(cause)),
        Err(_) => vec![],
    };
    for address in found.iter().filter(|a| *trust == Trust::Loopback || is_here(meeting) || !a.ip().is_loopback()) {
        match listen(address.ip(), meeting.port) {
            Err(e) if e.kind() == io::ErrorKind::AddrNotAvailable => {}
            other => return other.map_err(failed),
        }
    }
    if *trust == Trust::Loopback {
        return Err(failed(io::ErrorKind::AddrNotAvailable.into()));
    }
    note(format!("`{}` stands for no address of this machine's networks, so rank 0 listens at all of them", meeting.host));
    listen(Ipv4Addr::UNSPECIFIED.into(), meeting.port).map_err(failed)
}

/// Where a rank listens for those of other machines, given its own addresses on the ways to the ranks it met: at the
/// one network by which it was reached, at all if there are several. Ranks that met on their own machine need nobody
/// else.
pub fn own_address(meeting: &RendezvousEndpoint, trust: &Trust, ways: impl Iterator<Item = IpAddr>) -> IpAddr {
    let ways: Vec<IpAddr> = ways.collect();
    let mut outer = ways.iter().filter(|a| !a.is_loopback());
    match (outer.next(), ways.first()) {
        (Some(first), _) if outer.all(|a| a == first) => *first,
        (None, Some(first)) if *trust == Trust::Loopback || is_here(meeting) => *first,
        _ => Ipv4Addr::UNSPECIFIED.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_listen_at_the_one_network_by_which_they_were_reached() {
        let secret = Trust::secret("", &[1; 16]).unwrap();
        let cases: [(&str, &Trust, &[&str], &str); 8] = [
            ("node1", &secret, &["10.0.0.1"], "10.0.0.1"),
            ("node1", &secret, &["127.0.1.1", "10.0.0.1", "10.0.0.1"], "10.0.0.1"),
            ("node1", &secret, &["10.0.0.1", "10.1.0.1"], "0.0.0.0"),
            ("node1", &secret, &["127.0.1.1"], "0.0.0.0"),
            ("localhost", &secret, &["127.0.0.1"], "127.0.0.1"),
            ("127.0.0.1", &Trust::Insecure, &["127.0.0.1"], "127.0.0.1"),
            ("node1", &Trust::Loopback, &["127.0.1.1"], "127.0.1.1"),
            ("::1", &secret, &["::1"], "::1"),
        ];
        for (host, trust, ways, wanted) in cases {
            let meeting = RendezvousEndpoint { host: host.into(), port: 1 };
            let ways = ways.iter().map(|a| a.parse().unwrap());
            assert_eq!(own_address(&meeting, trust, ways), wanted.parse::<IpAddr>().unwrap(), "{host}");
        }
    }

    #[test]
    fn without_a_secret_ranks_meet_at_loopback_addresses_alone() {
        let secret = Trust::secret("", &[1; 16]).unwrap();
        let is_refused = |host: &str, trust: &Trust| addresses(&RendezvousEndpoint { host: host.into(), port: 1 }, trust).is_err();
        for (host, wanted) in
            [("127.0.0.1", false), ("::1", false), ("localhost", false), ("10.0.0.1", true), ("0.0.0.0", true), ("::ffff:1.2.3.4", true)]
        {
            assert_eq!(is_refused(host, &Trust::Loopback), wanted, "{host}");
            assert!(!is_refused(host, &secret) && !is_refused(host, &Trust::Insecure), "{host}");
        }
        let error = addresses(&RendezvousEndpoint { host: "10.0.0.1".into(), port: 1 }, &Trust::Loopback).unwrap_err().to_string();
        for says in ["10.0.0.1:1", "export MCC_SECRET=$(openssl rand -hex 32)", "--secret-file", "--insecure-rendezvous"] {
            assert!(error.contains(says), "{error}");
        }
    }
}
