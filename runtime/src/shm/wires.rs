//! What ranks write for ranks of other machines, over TCP.
//!
//! Each machine's segment has the layout of all others, and each byte of it that matters has one writer. So a rank sends to another machine what it wrote and then
//! the counter that says so, and whoever receives it there writes both at the same places. All that a rank sends to a machine goes through one
//! connection, to one launcher of that machine, so it arrives in order. Launchers always take what comes and never wait for anybody: a rank that waits for
//! room in a connection waits for the network alone.
//!
//! A frame is a header of 24 bytes (numbers of ranges and of ranks, the counter's place and value, zeros), the ranges, the ranks to wake, then the bytes of all
//! ranges. Numbers are little-endian.

use super::layout::Layout;
use super::segment::{Counter, Segment};
use crate::comm::{CommError, ranks};
use crate::protocol::Spread;
use crate::rendezvous;
use std::collections::BTreeMap;
use std::io::{self, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a write may take until the rank looks whether the run has ended.
const LOOK: Duration = Duration::from_millis(50);
/// How long a connection may take to come about. The other side listens before any rank starts.
const CONNECT: Duration = Duration::from_secs(10);
/// How long a rank whose connection broke waits to be told why the run ended.
const WHY: Duration = Duration::from_secs(5);
/// Most ranges of a frame: a scattered chunk has one for each member on a machine, and one more.
const RANGES: usize = 1 << 16;

/// One connection, from when it is first used.
struct Wire {
    address: SocketAddr,
    host: String,
    stream: Option<TcpStream>,
    /// The frame that is being sent.
    frame: Vec<u8>,
}

/// A rank's connections to other machines.
pub struct Wires {
    rank: u64,
    token: u64,
    /// Of each rank.
    machines: Vec<u32>,
    wires: BTreeMap<u32, Mutex<Wire>>,
}

impl Wires {
    /// Of a rank, if there are other machines.
    pub fn new(rank: u64, spread: &Spread) -> Option<Arc<Wires>> {
        let machines: Vec<u32> = spread.places.iter().map(|p| p.machine).collect();
        let (own, seat) = (machines[rank as usize], spread.neighbours(rank).iter().take_while(|r| **r < rank).count());
        let count = machines.iter().max().map_or(0, |m| m + 1);
        let wire = |machine| {
            // The ranks of one machine share the receivers of another one out among themselves.
            let there = spread.on(machine);
            let place = &spread.places[there[seat % there.len()] as usize];
            let address = SocketAddr::new(place.address, place.port);
            (machine, Mutex::new(Wire { address, host: place.host.clone(), stream: None, frame: vec![] }))
        };
        let wires: BTreeMap<u32, Mutex<Wire>> = (0..count).filter(|m| *m != own).map(wire).collect();
        (!wires.is_empty()).then(|| Arc::new(Wires { rank, token: spread.token, machines, wires }))
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

    /// Writes ranges (first byte and number) of the segment, and then a counter, at another machine, and wakes ranks there. `waits` is called while the
    /// network takes its time; it gives the reason if the run has ended.
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
        ranges.iter().for_each(|(from, bytes)| frame.extend_from_slice(segment.slice(*from, *bytes)));
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
        let stream = match stream {
            Some(stream) => stream,
            None => match self.connect(*address) {
                Ok(new) => stream.insert(new),
                Err(e) => return Err(broken(e, waits)),
            },
        };
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
        Ok(())
    }

    fn connect(&self, address: SocketAddr) -> io::Result<TcpStream> {
        let mut stream = TcpStream::connect_timeout(&address, CONNECT)?;
        stream.set_nodelay(true)?;
        stream.write_all(&self.token.to_le_bytes())?;
        stream.set_write_timeout(Some(LOOK))?;
        Ok(stream)
    }
}

/// Takes what ranks of other machines write, until it is dropped.
pub struct Receiver {
    shared: Arc<Shared>,
    accepting: Option<JoinHandle<()>>,
}

struct Shared {
    segment: Arc<Segment>,
    layout: Arc<Layout>,
    token: u64,
    ended: AtomicBool,
    open: Mutex<Vec<(TcpStream, JoinHandle<()>)>>,
}

impl Receiver {
    /// A listener for it, and its port.
    ///
    /// # Errors
    /// If the system gives none.
    pub fn listen() -> io::Result<(TcpListener, u16)> {
        let listener = rendezvous::listen(0)?;
        let port = listener.local_addr()?.port();
        Ok((listener, port))
    }

    /// Takes what comes from whoever knows the token.
    ///
    /// # Errors
    /// If a thread cannot start.
    pub fn start(listener: TcpListener, segment: Arc<Segment>, layout: Arc<Layout>, token: u64) -> io::Result<Receiver> {
        let shared = Arc::new(Shared { segment, layout, token, ended: AtomicBool::new(false), open: Mutex::default() });
        let accepting = {
            let shared = shared.clone();
            listener.set_nonblocking(true)?;
            std::thread::Builder::new().name("accept".into()).spawn(move || {
                while !shared.ended.load(Ordering::Acquire) {
                    match listener.accept() {
                        Ok((stream, _)) => drop(shared.clone().begin(stream)),
                        Err(_) => std::thread::sleep(LOOK / 5),
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

impl Shared {
    fn begin(self: Arc<Shared>, stream: TcpStream) -> io::Result<()> {
        stream.set_nonblocking(false)?;
        let (handle, shared) = (stream.try_clone()?, self.clone());
        let thread = std::thread::Builder::new().name("receive".into()).spawn(move || {
            // Whoever sends finds that it is not listened to any more; who is no rank, or gone, is not missed here.
            let _ = shared.take(&stream);
            let _ = stream.shutdown(Shutdown::Both);
        })?;
        self.open.lock().expect("invariant: no holder panics").push((handle, thread));
        Ok(())
    }

    /// Writes frames until there are no more.
    fn take(&self, stream: &TcpStream) -> io::Result<()> {
        let mut from = BufReader::with_capacity(64 << 10, stream);
        let number = |from: &mut BufReader<&TcpStream>| {
            let mut bytes = [0; 8];
            from.read_exact(&mut bytes).map(|()| u64::from_le_bytes(bytes))
        };
        let wrong = || io::Error::new(io::ErrorKind::InvalidData, "not a frame");
        if number(&mut from)? != self.token {
            return Err(wrong());
        }
        let (bytes, world) = (self.segment.bytes(), self.layout.world);
        loop {
            let (counts, at, value) = (number(&mut from)?, number(&mut from)?, number(&mut from)?);
            let (ranges, wakes) = ((counts & u64::from(u32::MAX)) as usize, (counts >> 32) as usize);
            if ranges > RANGES || wakes as u64 > world || !at.is_multiple_of(8) || at.checked_add(8).is_none_or(|end| end > bytes) {
                return Err(wrong());
            }
            let ranges = (0..ranges).map(|_| Ok((number(&mut from)?, number(&mut from)?))).collect::<io::Result<Vec<(u64, u64)>>>()?;
            let wakes = (0..wakes).map(|_| number(&mut from)).collect::<io::Result<Vec<u64>>>()?;
            if ranges.iter().any(|(at, n)| at.checked_add(*n).is_none_or(|end| end > bytes)) || wakes.iter().any(|r| *r >= world) {
                return Err(wrong());
            }
            for (at, n) in ranges {
                // The sender is the one writer of these bytes, and no reader looks at them before the counter.
                from.read_exact(self.segment.slice_mut(at, n as usize))?;
            }
            Counter::at(&self.segment, at).set(value as u32);
            wakes.iter().for_each(|rank| Counter::at(&self.segment, self.layout.status(*rank).doorbell()).ring());
        }
    }
}
