//! What ranks write for ranks of other machines, over TCP.
//!
//! Each machine's segment has the layout of all others, and each byte of it that matters has one writer. So a rank
//! sends to another machine what it wrote and then the counter that says so, and whoever receives it there writes
//! both at the same places. All that a rank sends to a machine goes through one connection, to one launcher of that
//! machine, so it arrives in order. Launchers always take what comes and never wait for anybody: a rank that waits
//! for room in a connection waits for the network alone.
//!
//! A frame is a header of 24 bytes (numbers of ranges and of ranks, the counter's place and value, zeros), the
//! ranges, the ranks to wake, a keyed hash of these, the bytes of all ranges, and a keyed hash of everything, the
//! frame's number included. Numbers are little-endian. So bytes are written only where the sender said, and nobody
//! reads them before they are known to be the sender's.

use super::layout::SegmentLayout;
use super::segment::{Counter, Segment};
use crate::comm::{CommError, ranks};
use crate::protocol::Spread;
use crate::rendezvous::{self, HandshakeListener, Key, KnockError, LinkReader, Purpose, Seal, TAG, Tampered, knock};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, BufReader, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a write may take until the rank looks whether the run has ended.
const LOOK: Duration = Duration::from_millis(50);
/// How long a connection may take to come about. The other side listens before any rank starts, but others may
/// besiege it.
const CONNECT: Duration = Duration::from_secs(10);
/// How long a rank whose connection broke waits to be told why the run ended.
pub(super) const WHY: Duration = Duration::from_secs(5);
/// Most ranges of a frame: a scattered chunk has one for each member on a machine, and one more.
const RANGES: usize = 1 << 16;
/// Bytes that are read, and hashed while they are in a cache, at a time.
const PIECE: usize = 64 << 10;

/// One connection, from when it is first used.
struct Wire {
    address: SocketAddr,
    host: String,
    stream: Option<(Arc<TcpStream>, Seal)>,
    /// What of a frame is to be sent next.
    frame: Vec<u8>,
}

/// A rank's connections to other machines.
pub struct Wires {
    rank: u64,
    key: Key,
    /// Machine of each rank.
    machines: Vec<u32>,
    wires: BTreeMap<u32, Mutex<Wire>>,
}

impl Wires {
    /// The wires of a rank, if there are other machines.
    pub fn new(rank: u64, spread: &Spread) -> Option<Arc<Wires>> {
        let machines: Vec<u32> = spread.places.iter().map(|p| p.machine).collect();
        let own = machines[rank as usize];
        let count = machines.iter().max().map_or(0, |m| m + 1);
        let wire = |machine| {
            let place = &spread.places[spread.receiver(rank, machine) as usize];
            let address = SocketAddr::new(place.address, place.port);
            (machine, Mutex::new(Wire { address, host: place.host.clone(), stream: None, frame: vec![] }))
        };
        let wires: BTreeMap<u32, Mutex<Wire>> = (0..count).filter(|m| *m != own).map(wire).collect();
        (!wires.is_empty()).then(|| Arc::new(Wires { rank, key: spread.key.clone(), machines, wires }))
    }

    /// Whether a rank is on this rank's machine.
    pub fn is_here(&self, rank: u64) -> bool {
        self.machines[rank as usize] == self.machines[self.rank as usize]
    }

    /// Other machines of some ranks, with those of them that are there.
    pub fn elsewhere(&self, ranks: &[u64]) -> BTreeMap<u32, Vec<u64>> {
        let mut out: BTreeMap<u32, Vec<u64>> = BTreeMap::new();
        ranks.iter().filter(|r| !self.is_here(**r)).for_each(|r| out.entry(self.machines[*r as usize]).or_default().push(*r));
        out
    }

    /// Writes ranges (first byte and number) of the segment, and then a counter, at another machine, and wakes ranks
    /// there. `waits` is called while the network takes its time; it gives the reason if the run has ended.
    ///
    /// # Errors
    /// If the run has ended, or the other machine is not reached any more.
    pub fn put(
        &self,
        segment: &Segment,
        machine: u32,
        wake: &[u64],
        ranges: &[(u64, usize)],
        (at, value): (u64, u32),
        waits: &mut dyn FnMut() -> Option<String>,
    ) -> Result<(), CommError> {
        let mut wire = self.wires[&machine].lock().expect("invariant: no holder panics");
        let Wire { address, host, stream, frame } = &mut *wire;
        frame.clear();
        frame.extend((ranges.len() as u32).to_le_bytes());
        frame.extend((wake.len() as u32).to_le_bytes());
        frame.extend(at.to_le_bytes());
        frame.extend(u64::from(value).to_le_bytes());
        ranges.iter().for_each(|(from, bytes)| frame.extend([*from, *bytes as u64].iter().flat_map(|n| n.to_le_bytes())));
        wake.iter().for_each(|rank| frame.extend(rank.to_le_bytes()));
        let broken = |e: io::Error, waits: &mut dyn FnMut() -> Option<String>| {
            let deadline = Instant::now() + WHY;
            while Instant::now() < deadline {
                if let Some(reason) = waits() {
                    return CommError::Aborted(reason);
                }
                std::thread::sleep(LOOK);
            }
            CommError::Failed(format!("the connection to {} on {host} ({address}) broke: {e}", ranks(wake)))
        };
        let (stream, seal) = match stream {
            Some(stream) => stream,
            None => match self.connect(*address) {
                Ok(new) => stream.insert(new),
                Err(e) => return Err(broken(e, waits)),
            },
        };
        let mut hasher = seal.begin();
        hasher.update(frame);
        frame.extend(hasher.finalize().as_bytes());
        let mut hashed = frame.len();
        let mut stream: &TcpStream = stream;
        let mut send = |frame: &mut Vec<u8>| {
            let mut left = &frame[..];
            while !left.is_empty() {
                match stream.write(left) {
                    Ok(0) => return Err(broken(io::ErrorKind::WriteZero.into(), waits)),
                    Ok(n) => left = &left[n..],
                    Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted) => {
                        if let Some(reason) = waits() {
                            return Err(CommError::Aborted(reason));
                        }
                    }
                    Err(e) => return Err(broken(e, waits)),
                }
            }
            frame.clear();
            Ok(())
        };
        // The receiver hashes one piece while this rank hashes the next.
        for piece in ranges.iter().flat_map(|(from, bytes)| segment.slice(*from, *bytes).chunks(PIECE)) {
            frame.extend_from_slice(piece);
            if frame.len() >= PIECE {
                hasher.update(&frame[hashed..]);
                hashed = 0;
                send(frame)?;
            }
        }
        hasher.update(&frame[hashed..]);
        frame.extend(hasher.finalize().as_bytes());
        send(frame)
    }

    /// Tries again while others besiege the port.
    fn connect(&self, address: SocketAddr) -> io::Result<(Arc<TcpStream>, Seal)> {
        let hello = postcard::to_stdvec(&self.rank).expect("invariant: plain data");
        let deadline = Instant::now() + CONNECT;
        loop {
            let tried = TcpStream::connect_timeout(&address, deadline.saturating_duration_since(Instant::now()).max(LOOK));
            let tried = tried.map_err(KnockError::Io).and_then(|stream| knock(stream, &self.key, Purpose::Wire, &hello, deadline));
            match tried {
                Ok(link) => {
                    let (stream, seal) = link.split().1.into_parts();
                    stream.set_write_timeout(Some(LOOK))?;
                    return Ok((stream, seal));
                }
                Err(_) if Instant::now() < deadline => std::thread::sleep(LOOK),
                Err(KnockError::Io(e)) => return Err(e),
                Err(e @ KnockError::Stranger) => return Err(io::Error::new(io::ErrorKind::PermissionDenied, e)),
            }
        }
    }
}

/// Takes what ranks of other machines write, until it is dropped.
pub struct Receiver {
    shared: Arc<WireState>,
    accepting: Option<JoinHandle<()>>,
}

struct WireState {
    segment: Arc<Segment>,
    layout: Arc<SegmentLayout>,
    ended: AtomicBool,
    open: Mutex<Vec<(Arc<TcpStream>, JoinHandle<()>)>>,
    /// Is told of what ends the run.
    report: Box<dyn Fn(String) + Send + Sync>,
}

impl Receiver {
    /// A listener for it at an address of this machine, and its port.
    ///
    /// # Errors
    /// If the system gives none.
    pub fn listen(address: IpAddr) -> io::Result<(TcpListener, u16)> {
        let listener = rendezvous::listen(address, 0)?;
        let port = listener.local_addr()?.port();
        Ok((listener, port))
    }

    /// Takes what these ranks write, each of which connects once with the run's key, until it is dropped. When all
    /// have connected, nobody listens any more. `report` is told if what comes is not what a rank wrote.
    ///
    /// # Errors
    /// If a thread cannot start.
    pub fn start(
        listener: TcpListener,
        (segment, layout): (Arc<Segment>, Arc<SegmentLayout>),
        key: Key,
        mut ranks: BTreeSet<u64>,
        report: impl Fn(String) + Send + Sync + 'static,
    ) -> io::Result<Receiver> {
        let shared = Arc::new(WireState { segment, layout, ended: AtomicBool::new(false), open: Mutex::default(), report: Box::new(report) });
        let mut incoming = HandshakeListener::new(listener, key, Purpose::Wire)?;
        let accepting = {
            let shared = shared.clone();
            std::thread::Builder::new().name("accept".into()).spawn(move || {
                while !shared.ended.load(Ordering::Acquire) && !ranks.is_empty() {
                    if let Some((link, hello)) = incoming.next(LOOK)
                        && let Ok(rank) = postcard::from_bytes(&hello)
                        && ranks.remove(&rank)
                    {
                        // If this fails, the rank finds that nobody listens to it, and says so.
                        let _ = shared.clone().begin(rank, link.split().0);
                    }
                }
            })?
        };
        Ok(Receiver { shared, accepting: Some(accepting) })
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::Release);
        self.accepting.take().map(JoinHandle::join);
        let open = std::mem::take(&mut *self.shared.open.lock().expect("invariant: no holder panics"));
        for (stream, thread) in open {
            let _ = stream.shutdown(Shutdown::Both);
            let _ = thread.join();
        }
    }
}

impl WireState {
    fn begin(self: Arc<WireState>, rank: u64, reader: LinkReader) -> io::Result<()> {
        let (stream, seal) = reader.into_parts();
        stream.set_read_timeout(None)?;
        let (handle, shared) = (stream.clone(), self.clone());
        let thread = std::thread::Builder::new().name("receive".into()).spawn(move || {
            // A sender finds out when nobody listens to it any more, and one that is gone is not missed here.
            match take(&shared.segment, &shared.layout, &*stream, seal) {
                Err(e) if e.kind() == io::ErrorKind::InvalidData => (shared.report)(format!("of what rank {rank} wrote to this machine, {e}")),
                Ok(()) | Err(_) => {}
            }
            let _ = stream.shutdown(Shutdown::Both);
        })?;
        self.open.lock().expect("invariant: no holder panics").push((handle, thread));
        Ok(())
    }
}

/// Writes what comes in frames to this machine's memory, until there are no more; nothing of a frame that is not its
/// sender's but the data that it announced.
///
/// # Errors
/// Of kind `InvalidData` if a frame is not what a rank wrote, or does not fit this memory.
pub fn take(segment: &Segment, layout: &SegmentLayout, from: impl Read, mut seal: Seal) -> io::Result<()> {
    let mut from = BufReader::with_capacity(PIECE, from);
    let (bytes, world) = (segment.bytes(), layout.world);
    loop {
        let mut frame = FrameReader { from: &mut from, hasher: seal.begin() };
        let (counts, at, value) = (frame.number()?, frame.number()?, frame.number()?);
        let (ranges, wakes) = ((counts & u64::from(u32::MAX)) as usize, (counts >> 32) as usize);
        if ranges > RANGES || wakes as u64 > world {
            return Err(Tampered.into());
        }
        let ranges = (0..ranges).map(|_| Ok((frame.number()?, frame.number()?))).collect::<io::Result<Vec<(u64, u64)>>>()?;
        let wakes = (0..wakes).map(|_| frame.number()).collect::<io::Result<Vec<u64>>>()?;
        frame.check()?;
        let fits = |at: u64, n: u64| at.checked_add(n).is_some_and(|end| end <= bytes);
        if !at.is_multiple_of(8) || !fits(at, 8) || !ranges.iter().all(|(at, n)| fits(*at, *n)) || wakes.iter().any(|r| *r >= world) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "a frame does not fit this machine's memory: not all machines run one build of mcc",
            ));
        }
        for (at, n) in ranges {
            // The sender is the only writer of these bytes, and nobody reads them before the counter is set.
            segment.slice_mut(at, n as usize).chunks_mut(PIECE).try_for_each(|piece| frame.read(piece))?;
        }
        frame.check()?;
        Counter::at(segment, at).set(value as u32);
        wakes.iter().for_each(|rank| Counter::at(segment, layout.status(*rank).doorbell()).ring());
    }
}

/// A frame that is coming in.
struct FrameReader<'a, R> {
    from: &'a mut BufReader<R>,
    hasher: blake3::Hasher,
}

impl<R: Read> FrameReader<'_, R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<()> {
        self.from.read_exact(bytes)?;
        self.hasher.update(bytes);
        Ok(())
    }

    fn number(&mut self) -> io::Result<u64> {
        let mut bytes = [0; 8];
        self.read(&mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Reads a hash, which must be that of all that came of this frame.
    fn check(&mut self) -> io::Result<()> {
        let mut tag = [0; TAG];
        self.from.read_exact(&mut tag)?;
        Ok(Seal::check(&self.hasher, tag)?)
    }
}
