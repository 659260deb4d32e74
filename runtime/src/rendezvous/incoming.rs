//! The listener's part of the handshake ([`handshake`](super::handshake)), and the first message: whatever a
//! connection says, in pieces of any size.

use super::frames::{Seal, TAG};
use super::handshake::{Challenge, HandshakeRole, Nonce, Purpose, random};
use super::secret::Key;
use std::io::{self, Read, Write};

/// Most bytes of a rank's first message.
pub const HELLO: usize = 4 << 10;

/// One that knocks, as far as it has come. It keeps what it has said of its stage, so at most [`HELLO`] bytes and a
/// few more.
pub struct IncomingHandshake {
    key: Key,
    purpose: Purpose,
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

/// A rank, and what it says first.
pub struct AuthenticatedPeer {
    /// Content of its first message, at most [`HELLO`] bytes.
    pub hello: Vec<u8>,
    /// The hashes of what it says next.
    pub from: Seal,
    /// The key of what is said to it.
    pub to: Key,
}

impl IncomingHandshake {
    /// The handshake of a connection of which nothing is known, and which has to know this key.
    pub fn new(key: Key, purpose: Purpose) -> IncomingHandshake {
        IncomingHandshake { key, purpose, bytes: vec![], stage: Stage::Nonce }
    }

    /// Whether it has shown that it knows the key.
    pub fn has_proved_itself(&self) -> bool {
        matches!(self.stage, Stage::Hello { .. })
    }

    /// Takes what there is on its stream, and answers. What is said to it fits into any connection's buffers, so
    /// nothing waits there. None if it is a stranger.
    ///
    /// # Errors
    /// What the stream says: with `WouldBlock`, more is to come, and this is to be called again.
    pub fn hear(&mut self, stream: &mut (impl Read + Write)) -> io::Result<Option<AuthenticatedPeer>> {
        loop {
            match &mut self.stage {
                Stage::Nonce => {
                    let Some(said) = filled::<40>(stream, &mut self.bytes)? else { return Ok(None) };
                    let (mark, connector) = said.split_at(8);
                    if mark != self.purpose.mark() {
                        return Ok(None);
                    }
                    let connector: Nonce = connector.try_into().expect("invariant: 32 of 40 bytes");
                    let listener: Nonce = random()?;
                    stream.write_all(&listener)?;
                    self.stage = Stage::Proof { connector, listener };
                }
                Stage::Proof { connector, listener } => {
                    let Some(said) = filled::<32>(stream, &mut self.bytes)? else { return Ok(None) };
                    let challenge = Challenge { key: &self.key, purpose: self.purpose, connector: *connector, listener: *listener };
                    if blake3::Hash::from(said) != challenge.proof(HandshakeRole::Connector) {
                        return Ok(None);
                    }
                    stream.write_all(challenge.proof(HandshakeRole::Listener).as_bytes())?;
                    let [from, to] = [HandshakeRole::Connector, HandshakeRole::Listener].map(|side| challenge.session(side));
                    self.stage = Stage::Hello { from: Seal::new(from), to };
                }
                Stage::Hello { from, to } => {
                    if !fill(stream, &mut self.bytes, 4)? {
                        return Ok(None);
                    }
                    let length = u32::from_le_bytes(self.bytes[..4].try_into().expect("invariant: four bytes")) as usize;
                    if length > HELLO || !fill(stream, &mut self.bytes, 4 + length + TAG)? {
                        return Ok(None);
                    }
                    let (said, tag) = self.bytes.split_at(4 + length);
                    let tag = tag.try_into().expect("invariant: as many as were waited for");
                    let is_right = Seal::check(from.begin().update(said), tag).is_ok();
                    return Ok(is_right.then(|| AuthenticatedPeer { hello: said[4..].to_vec(), from: from.clone(), to: to.clone() }));
                }
            }
        }
    }
}

/// Reads until there are so many bytes, and no more; false if there will not be.
fn fill(stream: &mut impl Read, bytes: &mut Vec<u8>, count: usize) -> io::Result<bool> {
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

/// Does what [`fill`] does, for a stage of fixed length, which is then over.
fn filled<const N: usize>(stream: &mut impl Read, bytes: &mut Vec<u8>) -> io::Result<Option<[u8; N]>> {
    if !fill(stream, bytes, N)? {
        return Ok(None);
    }
    let said = bytes[..].try_into().expect("invariant: as many as were waited for");
    bytes.clear();
    Ok(Some(said))
}
