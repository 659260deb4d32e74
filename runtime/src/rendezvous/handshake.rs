//! Mutual proof that both sides of a connection know one secret, which neither tells.
//!
//! ```text
//! connector                                         listener
//!     mark of the purpose (8), own nonce (32)  ->
//!                                              <-   own nonce (32)
//!     proof of the connector (32)              ->
//!                                              <-   proof of the listener (32)
//! ```
//!
//! A proof is BLAKE3 under the secret's key over the side's name, the purpose and both nonces. The names keep one
//! side's proof from being the other's, and fresh nonces of both sides keep proofs from being used again. The keys of
//! what follows, one for each direction, come from the same in the same way ([`Seal`](super::Seal)).

use super::frames::{DeadlineStream, Link, say};
use super::secret::Key;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::Instant;

/// A number that nobody has seen before.
pub type Nonce = [u8; 32];

/// What a connection is for. Proofs for one are none for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// A rank's link to rank 0.
    Meeting,
    /// What a rank writes for ranks of another machine.
    Wire,
}

impl Purpose {
    /// How a connection for it begins.
    pub const fn mark(self) -> [u8; 8] {
        match self {
            Purpose::Meeting => *b"mcc meet",
            Purpose::Wire => *b"mcc wire",
        }
    }
}

/// A side of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandshakeRole {
    /// The one that connects, and speaks first.
    Connector,
    /// The one that was connected to.
    Listener,
}

/// What proofs and keys of one connection are made of.
pub struct Challenge<'a> {
    /// The key that both sides have to know.
    pub key: &'a Key,
    /// What the connection is for.
    pub purpose: Purpose,
    /// The number that the connector drew for this connection.
    pub connector: Nonce,
    /// The number that the listener drew for this connection.
    pub listener: Nonce,
}

impl Challenge<'_> {
    fn hash(&self, label: &[u8; 8]) -> blake3::Hash {
        let mut hasher = self.key.labelled(label);
        hasher.update(&self.purpose.mark()).update(&self.connector).update(&self.listener);
        hasher.finalize()
    }

    /// What shows that a side knows the key. Equality of hashes takes the same time whatever differs.
    pub fn proof(&self, side: HandshakeRole) -> blake3::Hash {
        self.hash(match side {
            HandshakeRole::Connector => b"connects",
            HandshakeRole::Listener => b"listens ",
        })
    }

    /// The key of what a side says afterwards.
    pub fn session(&self, side: HandshakeRole) -> Key {
        Key::from_hash(self.hash(match side {
            HandshakeRole::Connector => b"key conn",
            HandshakeRole::Listener => b"key list",
        }))
    }
}

/// A number that nobody has seen.
///
/// # Errors
/// If the system has none.
pub fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        filled += rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty())?;
    }
    Ok(bytes)
}

/// Why a connection came to nothing.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum KnockError {
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The listener did not accept the proof, or gave none that is right.
    #[error("it does not know this run's secret, or another one")]
    Stranger,
}

/// The connector's part. Nothing but a nonce and a proof is sent before the listener has proved itself; then `hello`.
///
/// # Errors
/// If the listener is gone, slow, or a stranger.
pub fn knock(stream: TcpStream, key: &Key, purpose: Purpose, hello: &[u8], deadline: Instant) -> Result<Link, KnockError> {
    stream.set_nodelay(true)?;
    let mut timed = DeadlineStream::new(&stream, Some(deadline));
    let connector: Nonce = random()?;
    timed.write_all(&[&purpose.mark()[..], &connector].concat())?;
    let mut listener: Nonce = [0; 32];
    timed.read_exact(&mut listener)?;
    let challenge = Challenge { key, purpose, connector, listener };
    timed.write_all(challenge.proof(HandshakeRole::Connector).as_bytes())?;
    let mut proof = [0; 32];
    match timed.read_exact(&mut proof) {
        Ok(()) if blake3::Hash::from(proof) == challenge.proof(HandshakeRole::Listener) => {}
        Err(e) if !matches!(e.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset) => return Err(KnockError::Io(e)),
        Ok(()) | Err(_) => return Err(KnockError::Stranger),
    }
    let [from, to] = [HandshakeRole::Listener, HandshakeRole::Connector].map(|side| challenge.session(side));
    let mut link = Link::new(stream, from, to);
    say(link.writer(), hello, deadline)?;
    Ok(link)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::secret::Trust;

    #[test]
    fn proofs_and_keys_differ_with_all_that_they_are_made_of() {
        let [one, other] = [&[1; 16], &[2; 16]].map(|s| Trust::secret("", s).unwrap().key());
        let challenge = |key, purpose, connector, listener| Challenge { key, purpose, connector: [connector; 32], listener: [listener; 32] };
        let all = [
            challenge(&one, Purpose::Meeting, 1, 2),
            challenge(&other, Purpose::Meeting, 1, 2),
            challenge(&one, Purpose::Wire, 1, 2),
            challenge(&one, Purpose::Meeting, 2, 1),
            challenge(&one, Purpose::Meeting, 1, 3),
        ];
        let mut made: Vec<[u8; 32]> = vec![];
        for c in &all {
            for side in [HandshakeRole::Connector, HandshakeRole::Listener] {
                made.extend([*c.proof(side).as_bytes(), *c.session(side).labelled(b"        ").finalize().as_bytes()]);
            }
        }
        let count = made.len();
        made.sort();
        made.dedup();
        assert_eq!(made.len(), count);
    }
}
