//! Processes that know each other: a socket between each two of them, by default in the namespace of the machine.
//! Messages are read by a thread for each and kept until an exchange takes them; whose socket ends is gone.

use crate::state::{Nccl, Refused, lock, notify, refuse};
use cudarc::nccl::sys::ncclResult_t;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

const AGAIN: Duration = Duration::from_millis(2);

/// The kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum MessageKind {
    /// A member's part of a collective.
    Part,
    /// A sender has come.
    Offer,
    /// A receiver has come.
    Ready,
    /// The data of a message.
    Data,
    /// A member's arguments of a split.
    Split,
    /// A member comes to the first use of a connection to another.
    Connect,
}

const KINDS: [MessageKind; 6] =
    [MessageKind::Part, MessageKind::Offer, MessageKind::Ready, MessageKind::Data, MessageKind::Split, MessageKind::Connect];

/// The communicator, the kind, the sender, and the message's number among these.
pub type Key = (u64, MessageKind, usize, u64);

/// The properties that both ends must agree on, and the bytes.
pub type Message = (String, Vec<u8>);

pub struct Mesh {
    pub inbox: BTreeMap<Key, Message>,
    pub gone: BTreeSet<usize>,
    to: Vec<Option<Sender<Vec<u8>>>>,
    unsent: Arc<AtomicUsize>,
}

impl Mesh {
    /// Sends a message to another member, or to itself.
    pub fn post(&mut self, to: usize, comm: u64, kind: MessageKind, number: u64, terms: &str, data: &[u8]) {
        let Some(sender) = &self.to[to] else {
            self.inbox.insert((comm, kind, to, number), (terms.into(), data.to_vec()));
            return;
        };
        let head = [comm, kind as u64, number, terms.len() as u64, data.len() as u64];
        let bytes = head.iter().flat_map(|n| n.to_le_bytes()).chain(terms.bytes()).chain(data.iter().copied()).collect();
        self.unsent.fetch_add(1, Ordering::Relaxed);
        if sender.send(bytes).is_err() {
            self.unsent.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Whether all messages have been written to sockets.
    pub fn is_flushed(&self) -> bool {
        self.unsent.load(Ordering::Relaxed) == 0
    }
}

/// An address in the machine's abstract namespace, or a file in a directory.
fn address(sockets: Option<&Path>, name: &str) -> io::Result<SocketAddr> {
    match sockets {
        Some(dir) => SocketAddr::from_pathname(dir.join(name)),
        None => SocketAddr::from_abstract_name(name),
    }
}

/// The number of a GPU among those of all machines, which are told apart by their names.
fn identity(gpu: i32) -> io::Result<u64> {
    let mut hasher = DefaultHasher::new();
    (std::fs::read("/proc/sys/kernel/hostname")?, gpu).hash(&mut hasher);
    Ok(hasher.finish())
}

/// The socket at which members with an id meet. It lasts as long as the process that made the id.
pub fn root(sockets: Option<&Path>, id: &str) -> io::Result<UnixListener> {
    UnixListener::bind_addr(&address(sockets, id)?)
}

fn read_words<const N: usize>(from: &mut UnixStream) -> io::Result<[u64; N]> {
    let mut words = [0; N];
    for w in &mut words {
        let mut bytes = [0; 8];
        from.read_exact(&mut bytes)?;
        *w = u64::from_le_bytes(bytes);
    }
    Ok(words)
}

/// Connects one of `count` to all others, each of which says on which GPU it is; `is_wanted` is asked now and then.
pub fn connect(sockets: Option<&Path>, id: &str, count: usize, me: usize, gpu: i32, is_wanted: impl Fn() -> bool) -> Nccl<Vec<Option<UnixStream>>> {
    let system = |e: io::Error| Refused { code: ncclResult_t::ncclSystemError, why: format!("rank {me} of {count} cannot be connected: {e}") };
    let place = |rank: usize| address(sockets, &format!("{id}-{rank}"));
    if address(sockets, id).and_then(|a| UnixStream::connect_addr(&a)).is_err() {
        return refuse(ncclResult_t::ncclSystemError, "the process that made the id is gone");
    }
    let listener = match place(me).and_then(|a| UnixListener::bind_addr(&a)) {
        Err(e) if e.kind() == io::ErrorKind::AddrInUse => {
            return refuse(ncclResult_t::ncclInvalidUsage, format!("two ranks call themselves {me}"));
        }
        other => other.map_err(system)?,
    };
    listener.set_nonblocking(true).map_err(system)?;
    let mut sockets: Vec<Option<UnixStream>> = (0..count).map(|_| None).collect();
    let identity = identity(gpu).map_err(system)?;
    let mut gpus = vec![identity; count];
    let own: Vec<u8> = [me as u64, count as u64, identity].iter().flat_map(|n| n.to_le_bytes()).collect();
    let mut greet = |mut socket: UnixStream| -> Nccl {
        socket.set_nonblocking(false).map_err(system)?;
        socket.write_all(&own).map_err(system)?;
        let [rank, theirs, gpu] = read_words(&mut socket).map_err(system)?;
        if theirs != count as u64 || rank >= theirs {
            return refuse(ncclResult_t::ncclInvalidUsage, format!("rank {me} is one of {count}, rank {rank} one of {theirs}"));
        }
        gpus[rank as usize] = gpu;
        sockets[rank as usize] = Some(socket);
        Ok(())
    };
    let again = || {
        std::thread::sleep(AGAIN);
        if is_wanted() { Ok(()) } else { refuse(ncclResult_t::ncclInternalError, "") }
    };
    for other in 0..me {
        loop {
            match place(other).and_then(|a| UnixStream::connect_addr(&a)) {
                Ok(socket) => break greet(socket)?,
                Err(_) => again()?,
            }
        }
    }
    let mut missing = count - me - 1;
    while missing > 0 {
        match listener.accept() {
            Ok((socket, _)) => {
                greet(socket)?;
                missing -= 1;
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => again()?,
            Err(e) => return Err(system(e)),
        }
    }
    match (0..count).find(|k| *k != me && gpus[*k] == identity) {
        Some(other) => refuse(ncclResult_t::ncclInvalidUsage, format!("ranks {me} and {other} are both on GPU {gpu}")),
        None => Ok(sockets),
    }
}

/// Starts the threads that read and write.
pub fn start(id: u64, sockets: Vec<Option<UnixStream>>) -> io::Result<Mesh> {
    let unsent = Arc::new(AtomicUsize::new(0));
    let mut to = vec![];
    for (rank, socket) in sockets.into_iter().enumerate() {
        let Some(mut socket) = socket else {
            to.push(None);
            continue;
        };
        let mut reader = socket.try_clone()?;
        std::thread::spawn(move || {
            while let Ok((key, message)) = receive(&mut reader, rank) {
                let mut state = lock();
                let Some(mesh) = state.meshes.get_mut(&id) else { return };
                mesh.inbox.insert(key, message);
                drop(state);
                notify();
            }
            if let Some(mesh) = lock().meshes.get_mut(&id) {
                mesh.gone.insert(rank);
            }
            notify();
        });
        let (sender, receiver) = channel::<Vec<u8>>();
        let left = unsent.clone();
        std::thread::spawn(move || {
            for bytes in receiver {
                // If the peer no longer reads, it is gone, which the reading thread finds out.
                let _ = socket.write_all(&bytes);
                left.fetch_sub(1, Ordering::Relaxed);
                notify();
            }
            let _ = socket.shutdown(std::net::Shutdown::Write);
        });
        to.push(Some(sender));
    }
    Ok(Mesh { inbox: BTreeMap::new(), gone: BTreeSet::new(), to, unsent })
}

fn receive(from: &mut UnixStream, rank: usize) -> io::Result<(Key, Message)> {
    let [comm, kind, number, terms, data] = read_words(from)?;
    let kind = KINDS.get(kind as usize).ok_or(io::ErrorKind::InvalidData)?;
    let (mut text, mut bytes) = (vec![0; terms as usize], vec![0; data as usize]);
    from.read_exact(&mut text)?;
    from.read_exact(&mut bytes)?;
    Ok(((comm, *kind, rank, number), (String::from_utf8_lossy(&text).into_owned(), bytes)))
}
