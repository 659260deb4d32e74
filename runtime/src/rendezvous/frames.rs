//! Messages between two processes that have proved themselves to each other.
//!
//! A message is its length in four bytes, that many bytes, and a keyed hash of 32 bytes over the message's number,
//! the length and the bytes. Each direction has a key and numbers of its own, so a message that is changed, left out,
//! repeated or out of order is noticed. It is not hidden from whoever listens.

use super::secret::Key;
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};
use std::net::{IpAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Most bytes of a message.
const MOST: u32 = 64 << 20;
/// Bytes of a keyed hash.
pub const TAG: usize = 32;

/// What came under a right hash's name is not what was said.
#[derive(Debug, thiserror::Error)]
#[error("data in flight was tampered with: its keyed hash is wrong")]
pub struct Tampered;

impl From<Tampered> for io::Error {
    fn from(e: Tampered) -> io::Error {
        io::Error::new(io::ErrorKind::InvalidData, e)
    }
}

/// The keyed hashes of one direction of one connection, in order.
#[derive(Clone)]
pub struct Seal {
    key: Key,
    next: u64,
}

impl Seal {
    /// The seal of the first message.
    pub fn new(key: Key) -> Seal {
        Seal { key, next: 0 }
    }

    /// The hash of the next message, to which its bytes are to be added.
    pub fn begin(&mut self) -> blake3::Hasher {
        let mut hasher = self.key.hasher();
        hasher.update(&self.next.to_le_bytes());
        self.next += 1;
        hasher
    }

    /// Whether a message so far is what was said.
    ///
    /// # Errors
    /// If not.
    pub fn check(hasher: &blake3::Hasher, tag: [u8; TAG]) -> Result<(), Tampered> {
        // Equality of hashes takes the same time whatever differs.
        if hasher.finalize() == blake3::Hash::from(tag) { Ok(()) } else { Err(Tampered) }
    }
}

/// A stream on which everything until the deadline has to happen, however many reads and writes it takes.
pub(super) struct DeadlineStream<'a> {
    stream: &'a TcpStream,
    deadline: Option<Instant>,
}

impl<'a> DeadlineStream<'a> {
    pub fn new(stream: &'a TcpStream, deadline: Option<Instant>) -> DeadlineStream<'a> {
        DeadlineStream { stream, deadline }
    }

    fn left(&self) -> io::Result<Option<Duration>> {
        let Some(deadline) = self.deadline else { return Ok(None) };
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(Some(left.max(Duration::from_millis(1)))) }
    }
}

impl Read for DeadlineStream<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(self.left()?)?;
        let mut stream = self.stream;
        stream.read(bytes)
    }
}

impl Write for DeadlineStream<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(self.left()?)?;
        let mut stream = self.stream;
        stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Two ranks' launchers, connected.
pub struct Link {
    reader: LinkReader,
    writer: LinkWriter,
}

/// What the other side of a link says.
pub struct LinkReader {
    stream: Arc<TcpStream>,
    seal: Seal,
}

/// What this side of a link says.
pub struct LinkWriter {
    stream: Arc<TcpStream>,
    seal: Seal,
}

impl Link {
    /// A stream that has been proved, with the keys of what comes and what goes.
    pub(super) fn new(stream: TcpStream, from: Key, to: Key) -> Link {
        let stream = Arc::new(stream);
        Link { reader: LinkReader { stream: stream.clone(), seal: Seal::new(from) }, writer: LinkWriter { stream, seal: Seal::new(to) } }
    }

    /// A link as [`new`](Link::new) makes it, after the other side's first message, whose hash `seal` has checked.
    pub(super) fn after_hello(stream: TcpStream, seal: Seal, to: Key) -> Link {
        let stream = Arc::new(stream);
        Link { reader: LinkReader { stream: stream.clone(), seal }, writer: LinkWriter { stream, seal: Seal::new(to) } }
    }

    /// The other side's address, as this one sees it.
    pub fn peer(&self) -> Option<IpAddr> {
        self.reader.stream.peer_addr().ok().map(|a| a.ip().to_canonical())
    }

    /// This side's address on the way to the other.
    pub fn local(&self) -> Option<IpAddr> {
        self.reader.stream.local_addr().ok().map(|a| a.ip().to_canonical())
    }

    /// Both directions, for threads of their own.
    pub fn split(self) -> (LinkReader, LinkWriter) {
        (self.reader, self.writer)
    }

    pub(super) fn writer(&mut self) -> &mut LinkWriter {
        &mut self.writer
    }

    /// [`LinkWriter::say`].
    ///
    /// # Errors
    /// As there.
    pub fn say(&mut self, what: &impl Serialize, time: Duration) -> io::Result<()> {
        self.writer.say(what, time)
    }

    /// [`LinkReader::hear`].
    ///
    /// # Errors
    /// As there.
    pub fn hear<T: for<'de> Deserialize<'de>>(&mut self, time: Option<Duration>) -> io::Result<T> {
        self.reader.hear(time)
    }
}

/// Says bytes as the next message.
pub(super) fn say(writer: &mut LinkWriter, bytes: &[u8], deadline: Instant) -> io::Result<()> {
    let length = u32::try_from(bytes.len()).ok().filter(|n| *n <= MOST).ok_or(io::ErrorKind::InvalidInput)?.to_le_bytes();
    let mut hasher = writer.seal.begin();
    hasher.update(&length).update(bytes);
    let frame = [&length[..], bytes, hasher.finalize().as_bytes()].concat();
    DeadlineStream::new(&writer.stream, Some(deadline)).write_all(&frame)
}

impl LinkWriter {
    /// Says something, within a time.
    ///
    /// # Errors
    /// If the other side is gone or takes nothing.
    pub fn say(&mut self, what: &impl Serialize, time: Duration) -> io::Result<()> {
        let bytes = postcard::to_stdvec(what).expect("invariant: plain data");
        say(self, &bytes, Instant::now() + time)
    }

    /// The stream, and the hashes of what is written to it.
    pub fn into_parts(self) -> (Arc<TcpStream>, Seal) {
        (self.stream, self.seal)
    }

    /// Says that nothing more will be said.
    pub fn close(&self) {
        let _ = self.stream.shutdown(std::net::Shutdown::Write);
    }
}

impl LinkReader {
    /// Hears what the other side says next, within a time or however long it takes. Memory grows with what has come.
    ///
    /// # Errors
    /// If it is gone, silent, or says something else; of kind `InvalidData` if what came is not what it said.
    pub fn hear<T: for<'de> Deserialize<'de>>(&mut self, time: Option<Duration>) -> io::Result<T> {
        hear(&mut DeadlineStream::new(&self.stream, time.map(|t| Instant::now() + t)), &mut self.seal)
    }

    /// The stream, and the hashes of what comes from it.
    pub fn into_parts(self) -> (Arc<TcpStream>, Seal) {
        (self.stream, self.seal)
    }
}

/// The next message on a stream, as [`LinkReader::hear`].
///
/// # Errors
/// As there.
pub fn hear<T: for<'de> Deserialize<'de>>(stream: &mut impl Read, seal: &mut Seal) -> io::Result<T> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let mut hasher = seal.begin();
    hasher.update(&length);
    let length = u32::from_le_bytes(length);
    if length > MOST {
        return Err(Tampered.into());
    }
    let mut bytes = vec![];
    if stream.take(length.into()).read_to_end(&mut bytes)? < length as usize {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let mut tag = [0; TAG];
    stream.read_exact(&mut tag)?;
    Seal::check(hasher.update(&bytes), tag)?;
    postcard::from_bytes(&bytes).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::secret::Trust;
    use std::net::{Shutdown, TcpListener};

    /// Frames of `a`, `b` and `c`, as they travel.
    fn frames() -> Vec<Vec<u8>> {
        let mut seal = Seal::new(Trust::Loopback.key());
        let frame = |text: &str| {
            let bytes = postcard::to_stdvec(text).unwrap();
            let length = (bytes.len() as u32).to_le_bytes();
            let mut hasher = seal.begin();
            hasher.update(&length).update(&bytes);
            [&length[..], &bytes, hasher.finalize().as_bytes()].concat()
        };
        ["a", "b", "c"].map(frame).to_vec()
    }

    /// What is heard of these bytes, until the first error.
    fn heard(bytes: &[u8]) -> (String, io::ErrorKind) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut other = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let stream = listener.accept().unwrap().0;
        other.write_all(bytes).unwrap();
        other.shutdown(Shutdown::Write).unwrap();
        let key = Trust::Loopback.key();
        let (mut reader, _) = Link::new(stream, key.clone(), key).split();
        let mut all = String::new();
        loop {
            match reader.hear::<String>(Some(Duration::from_secs(10))) {
                Ok(text) => all += &text,
                Err(e) => return (all, e.kind()),
            }
        }
    }

    #[test]
    fn frames_that_are_changed_repeated_reordered_or_cut_are_not_heard() {
        use io::ErrorKind::{InvalidData, UnexpectedEof};
        let [a, b, c] = frames().try_into().unwrap();
        assert_eq!(heard(&[&a[..], &b, &c].concat()), ("abc".into(), UnexpectedEof));
        assert_eq!(heard(&[&a[..], &a].concat()), ("a".into(), InvalidData));
        assert_eq!(heard(&[&a[..], &c].concat()), ("a".into(), InvalidData));
        assert_eq!(heard(&[&b[..], &a].concat()), (String::new(), InvalidData));
        assert_eq!(heard(&[&a[..], &b[..b.len() - 1]].concat()), ("a".into(), UnexpectedEof));
        for k in 0..b.len() {
            let mut changed = b.clone();
            changed[k] ^= 1;
            let (text, kind) = heard(&[&a[..], &changed].concat());
            // A greater length asks for more bytes than there are.
            assert!(text == "a" && (kind == InvalidData || kind == UnexpectedEof && k < 4), "byte {k}: {text}, {kind}");
        }
    }

    #[test]
    fn a_giant_length_costs_no_memory() {
        let mut bytes = MOST.to_le_bytes().to_vec();
        bytes.extend([1; 100]);
        assert_eq!(heard(&bytes), (String::new(), io::ErrorKind::UnexpectedEof));
        assert_eq!(heard(&(MOST + 1).to_le_bytes()), (String::new(), io::ErrorKind::InvalidData));
    }
}
