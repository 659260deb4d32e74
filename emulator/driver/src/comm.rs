//! Communicators. None blocks: what a call begins goes on while its result is looked at, and until that says so
//! nothing else may be asked for.

use crate::exchange::{Call, ExchangeKind};
use crate::mesh::{Mesh, MessageKind, connect, start};
use crate::state::{Nccl, Refused, State, lock, notify, refuse};
use crate::tasks::{Op, TaskId};
use cudarc::nccl::sys::{ncclComm_t, ncclResult_t};
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// Where a new communicator will be written once it is made.
pub struct CommOutput(pub *mut ncclComm_t);

// SAFETY: the caller keeps the place until the call is through, whoever gets it there.
unsafe impl Send for CommOutput {}

/// What was asked of a communicator and is not complete.
pub enum CommActivity {
    Nothing,
    Connecting,
    Splitting {
        number: u64,
        key: i32,
        color: i32,
        place: CommOutput,
    },
    /// The calls go onto the stream only after their result was asked for so often, and after all those have come for
    /// whom it is the first call.
    Issuing {
        stream: u64,
        calls: Arc<Vec<Call>>,
        looks: u32,
        since: Duration,
    },
    Ending,
}

pub struct Comm {
    /// The id that all members share.
    pub id: u64,
    pub mesh: u64,
    pub members: Vec<usize>,
    pub me: usize,
    pub context: u64,
    pub doing: CommActivity,
    pub error: Option<ncclResult_t>,
    /// Tasks that have been issued and are not done.
    pub queue: VecDeque<TaskId>,
    pub collectives: u64,
    /// The number of messages to each other member.
    pub sent: HashMap<usize, u64>,
    pub received: HashMap<usize, u64>,
    /// Connections that have been used.
    connected: BTreeSet<Connection>,
    /// Kinds of exchanges that were issued outside of captures.
    made: BTreeSet<String>,
    /// Connections whose first use this member has come to.
    asked: BTreeSet<Connection>,
    splits: u64,
    has_ended: bool,
}

/// A connection: another member, and its use.
type Connection = (usize, ConnectionUse);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum ConnectionUse {
    Collectives,
    Sending,
    Receiving,
}

impl ConnectionUse {
    /// The use of the same connection at the other end.
    fn other(self) -> ConnectionUse {
        match self {
            ConnectionUse::Collectives => ConnectionUse::Collectives,
            ConnectionUse::Sending => ConnectionUse::Receiving,
            ConnectionUse::Receiving => ConnectionUse::Sending,
        }
    }
}

const WHO_IS_IT: ncclResult_t = ncclResult_t::ncclInvalidArgument;
const MISUSED: ncclResult_t = ncclResult_t::ncclInvalidUsage;

fn cuda<T>(outcome: crate::state::Cuda<T>) -> Nccl<T> {
    outcome.map_err(|Refused { why, .. }| Refused { code: ncclResult_t::ncclUnhandledCudaError, why })
}

impl State {
    fn new_comm(&mut self, id: u64, mesh: u64, members: Vec<usize>, me: usize, context: u64, doing: CommActivity) -> u64 {
        let handle = self.handle();
        let (sent, received) = (HashMap::new(), HashMap::new());
        let comm = Comm {
            id,
            mesh,
            members,
            me,
            context,
            doing,
            error: None,
            queue: VecDeque::new(),
            collectives: 0,
            sent,
            received,
            connected: BTreeSet::new(),
            made: BTreeSet::new(),
            asked: BTreeSet::new(),
            splits: 0,
            has_ended: false,
        };
        self.comms.insert(handle, comm);
        handle
    }

    pub fn comm(&mut self, handle: u64) -> Nccl<&mut Comm> {
        self.comms.get_mut(&handle).map_or_else(|| refuse(WHO_IS_IT, format!("there is no communicator {handle:#x}, or not any more")), Ok)
    }

    /// The communicator, if nothing is under way on it.
    fn idle(&mut self, handle: u64) -> Nccl<&mut Comm> {
        let comm = self.comm(handle)?;
        match (&comm.error, &comm.doing) {
            (Some(error), _) => refuse(*error, "the communicator has failed"),
            (None, CommActivity::Nothing) if comm.has_ended => refuse(WHO_IS_IT, "the communicator has been finalized"),
            (None, CommActivity::Nothing) => Ok(comm),
            (None, _) => refuse(WHO_IS_IT, "what was asked of the communicator before is not through: look at its state until it is"),
        }
    }

    /// The first communicator of ranks that find each other by an id.
    pub fn join(&mut self, id: String, count: usize, me: usize) -> Nccl<u64> {
        let context = cuda(self.current())?;
        if me >= count {
            return refuse(WHO_IS_IT, format!("rank {me} of {count}"));
        }
        let (mesh, gpu) = (self.handle(), self.contexts[&context].ordinal);
        let handle = self.new_comm(0, mesh, (0..count).collect(), me, context, CommActivity::Connecting);
        let directory = self.settings.sockets.clone();
        std::thread::spawn(move || {
            let sockets = connect(directory.as_deref(), &id, count, me, gpu, || lock().comms.contains_key(&handle));
            let mut state = lock();
            if !state.comms.contains_key(&handle) {
                return;
            }
            let system = |e: std::io::Error| refuse(ncclResult_t::ncclSystemError, e.to_string());
            match sockets.and_then(|s| start(mesh, s).or_else(system)) {
                Ok(new) => {
                    state.meshes.insert(mesh, new);
                }
                Err(Refused { code, why }) => state.comm_fails(handle, code, &why),
            }
            state.comms.get_mut(&handle).expect("invariant: it was just there").doing = CommActivity::Nothing;
            drop(state);
            notify();
        });
        Ok(handle)
    }

    pub fn split(&mut self, parent: u64, color: i32, key: i32, place: CommOutput) -> Nccl {
        if cuda(self.current())? != self.comm(parent)?.context {
            return refuse(MISUSED, "the communicator is of another GPU than this thread's");
        }
        cuda(self.not_while_capturing())?;
        let comm = self.idle(parent)?;
        let number = comm.splits;
        comm.splits += 1;
        comm.doing = CommActivity::Splitting { number, key, color, place };
        let (id, me, members, mesh) = (comm.id, comm.me, comm.members.clone(), comm.mesh);
        let said = [color, key].iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<u8>>();
        if let Some(mesh) = self.meshes.get_mut(&mesh) {
            members.iter().filter(|m| **m != members[me]).for_each(|m| mesh.post(*m, id, MessageKind::Split, number, "split", &said));
        }
        Ok(())
    }

    /// Asks for calls that a stream performs at once.
    pub fn ask(&mut self, comm: u64, stream: u64, calls: Vec<Call>) -> Nccl {
        let c = self.idle(comm)?;
        let (context, count) = (c.context, c.members.len());
        if cuda(self.stream(stream))?.context != context {
            return refuse(MISUSED, "the stream is of another GPU than the communicator");
        }
        for call in &calls {
            let [reads, writes] = call.bytes(count as u64);
            let peer = match call.kind {
                ExchangeKind::Send(other) | ExchangeKind::Recv(other) => other,
                ExchangeKind::AllReduce(_) | ExchangeKind::AllGather | ExchangeKind::ReduceScatter(_) => 0,
            };
            if peer >= count {
                return refuse(WHO_IS_IT, format!("there is no member {peer}"));
            }
            if reads > 0 {
                cuda(self.on_device(context, call.from, reads))?;
            }
            if writes > 0 {
                cuda(self.on_device(context, call.to, writes))?;
            }
            let overlap = call.from < call.to + writes && call.to < call.from + reads;
            let own = count.min(self.comms[&comm].me) as u64;
            let n = call.count * call.dtype.bytes();
            let in_place = match call.kind {
                ExchangeKind::AllReduce(_) => call.from == call.to,
                ExchangeKind::AllGather => call.from == call.to + own * n,
                ExchangeKind::ReduceScatter(_) => call.to == call.from + own * n,
                ExchangeKind::Send(_) | ExchangeKind::Recv(_) => true,
            };
            if overlap && !in_place {
                return refuse(WHO_IS_IT, "the ranges of a collective overlap, but not as in place");
            }
        }
        let since = self.clock;
        self.idle(comm)?.doing = CommActivity::Issuing { stream, calls: Arc::new(calls), looks: 1, since };
        Ok(())
    }

    pub fn end(&mut self, comm: u64) -> Nccl {
        let c = self.idle(comm)?;
        c.doing = CommActivity::Ending;
        Ok(())
    }

    /// Whether a graph has calls of a communicator; NCCL then waits for it to be destroyed.
    fn is_in_graph(&self, comm: u64) -> bool {
        let nodes = self.graphs.values().flat_map(|g| g.nodes.values()).chain(self.execs.values().flat_map(|e| e.nodes.values()));
        nodes.into_iter().any(|n| n.op.comm() == Some(comm))
    }

    pub fn destroy(&mut self, comm: u64) -> Nccl {
        let c = self.comm(comm)?;
        if !c.has_ended {
            return refuse(MISUSED, "a communicator that does not block is destroyed before it has been finalized");
        }
        self.drop_comm(comm);
        Ok(())
    }

    /// Aborts a communicator with what is under way on it.
    pub fn abort(&mut self, comm: u64) -> Nccl {
        self.comm(comm)?;
        if self.is_in_graph(comm) {
            return refuse(MISUSED, "a communicator is aborted, which waits for ever for a graph that has calls of it");
        }
        self.drop_comm(comm);
        Ok(())
    }

    fn drop_comm(&mut self, comm: u64) {
        let Some(c) = self.comms.remove(&comm) else { return };
        for task in c.queue {
            self.open.remove(&task);
            self.tasks.finish(task);
        }
        if self.comms.values().all(|other| other.mesh != c.mesh) {
            self.meshes.remove(&c.mesh);
        }
    }

    /// The state of what was asked for last.
    pub fn look(&mut self, handle: u64) -> Nccl<ncclResult_t> {
        let comm = self.comm(handle)?;
        if let Some(error) = comm.error {
            return Ok(error);
        }
        let through = match std::mem::replace(&mut comm.doing, CommActivity::Nothing) {
            CommActivity::Nothing => return Ok(ncclResult_t::ncclSuccess),
            CommActivity::Connecting => Some(CommActivity::Connecting),
            CommActivity::Issuing { stream, calls, looks: 0, since } if !self.connects(handle, &calls, since)? => {
                Some(CommActivity::Issuing { stream, calls, looks: 0, since })
            }
            CommActivity::Issuing { stream, calls, looks: 0, .. } => {
                if let Err(why) = self.prepared(handle, stream, &calls) {
                    self.comm_fails(handle, MISUSED, &why);
                    return Ok(MISUSED);
                }
                if let Err(Refused { why, .. }) = self.issue(stream, Op::Exchange { comm: handle, calls }) {
                    self.comm_fails(handle, ncclResult_t::ncclUnhandledCudaError, &why);
                    return Ok(ncclResult_t::ncclUnhandledCudaError);
                }
                None
            }
            CommActivity::Issuing { stream, calls, looks, since } => Some(CommActivity::Issuing { stream, calls, looks: looks - 1, since }),
            CommActivity::Splitting { number, key, color, place } => match self.parted(handle, number, key, color) {
                Ok(Some(child)) => {
                    // SAFETY: the caller keeps the place until the split is through.
                    unsafe { place.0.write(child as ncclComm_t) };
                    None
                }
                Ok(None) => Some(CommActivity::Splitting { number, key, color, place }),
                Err(Refused { code, why }) => {
                    self.comm_fails(handle, code, &why);
                    return Ok(code);
                }
            },
            CommActivity::Ending => {
                let queue = self.comms[&handle].queue.clone();
                queue.iter().for_each(|t| self.tasks.need(*t));
                let flushed = self.meshes.get(&self.comms[&handle].mesh).is_none_or(Mesh::is_flushed);
                if self.is_in_graph(handle) {
                    let why = "a communicator is finalized, which waits for ever for a graph that has calls of it";
                    self.comm_fails(handle, MISUSED, why);
                    return Ok(MISUSED);
                }
                if queue.is_empty() && flushed {
                    self.comm(handle)?.has_ended = true;
                    None
                } else {
                    Some(CommActivity::Ending)
                }
            }
        };
        match through {
            None => Ok(ncclResult_t::ncclSuccess),
            Some(doing) => {
                self.comm(handle)?.doing = doing;
                Ok(ncclResult_t::ncclInProgress)
            }
        }
    }

    /// NCCL prepares a kind of exchange at its first use, which may allocate memory and synchronise. So a kind that
    /// is captured must have been used before.
    fn prepared(&mut self, handle: u64, stream: u64, calls: &[Call]) -> Result<(), String> {
        let captures = self.stream(stream).is_ok_and(|s| s.capture.is_some());
        let Some(comm) = self.comms.get_mut(&handle) else { return Ok(()) };
        for kind in calls.iter().map(Call::prepared_kind) {
            if captures && !comm.made.contains(&kind) {
                return Err(format!("a capture has the first {kind} of a communicator, which connects its members then"));
            }
            comm.made.insert(kind);
        }
        Ok(())
    }

    /// Whether all connections of these calls are made. Their first use makes them, for which both ends have to come
    /// to it.
    fn connects(&mut self, handle: u64, calls: &[Call], since: Duration) -> Nccl<bool> {
        let (patience, clock) = (self.settings.patience, self.clock);
        let c = self.comms.get_mut(&handle).expect("invariant: it is looked at");
        let Some(mesh) = self.meshes.get_mut(&c.mesh) else { return Ok(false) };
        let me = c.me;
        let ways = calls.iter().flat_map(|call| match call.kind {
            ExchangeKind::Send(to) => vec![(to, ConnectionUse::Sending)],
            ExchangeKind::Recv(from) => vec![(from, ConnectionUse::Receiving)],
            ExchangeKind::AllReduce(_) | ExchangeKind::AllGather | ExchangeKind::ReduceScatter(_) => {
                (0..c.members.len()).map(|m| (m, ConnectionUse::Collectives)).collect()
            }
        });
        let mut waits = vec![];
        for way in ways.filter(|w| w.0 != me) {
            let (rank, what) = (c.members[way.0], way.1);
            if c.asked.insert(way) {
                mesh.post(rank, c.id, MessageKind::Connect, what as u64, "", &[]);
            }
            if !c.connected.contains(&way) {
                match mesh.inbox.remove(&(c.id, MessageKind::Connect, rank, what.other() as u64)) {
                    Some(_) => drop(c.connected.insert(way)),
                    None => waits.push(way),
                }
            }
        }
        let Some((member, what)) = waits.first() else { return Ok(true) };
        if mesh.gone.contains(&c.members[*member]) {
            self.comm_fails(handle, ncclResult_t::ncclRemoteError, &format!("connecting: member {member} is gone"));
        } else if clock - since > patience {
            let why = format!("nothing has moved for {} s: connecting for {what:?} waits for member {member}", patience.as_secs());
            self.comm_fails(handle, ncclResult_t::ncclSystemError, &why);
        }
        Ok(false)
    }

    /// The communicator that a split makes, once all members have called it; 0 for none.
    fn parted(&mut self, parent: u64, number: u64, key: i32, color: i32) -> Nccl<Option<u64>> {
        let c = &self.comms[&parent];
        let (id, me, members, mesh, context) = (c.id, c.me, c.members.clone(), c.mesh, c.context);
        let Some(met) = self.meshes.get_mut(&mesh) else { return Ok(None) };
        let others = || members.iter().enumerate().filter(|(m, _)| *m != me);
        let mut complete = true;
        for (m, rank) in others() {
            if !met.inbox.contains_key(&(id, MessageKind::Split, *rank, number)) {
                complete = false;
                if met.gone.contains(rank) {
                    return refuse(ncclResult_t::ncclRemoteError, format!("a split: member {m} is gone"));
                }
            }
        }
        if !complete {
            return Ok(None);
        }
        let mut said = vec![(color, key, me)];
        for (m, rank) in others() {
            let (_, data) = met.inbox.remove(&(id, MessageKind::Split, *rank, number)).expect("invariant: it was just there");
            let of = |k: usize| i32::from_le_bytes([data[k], data[k + 1], data[k + 2], data[k + 3]]);
            said.push((of(0), of(4), m));
        }
        if color < 0 {
            return Ok(Some(0));
        }
        let mut own: Vec<(i32, usize)> = said.into_iter().filter(|s| s.0 == color).map(|s| (s.1, s.2)).collect();
        own.sort_unstable();
        let place = own.iter().position(|o| o.1 == me).expect("invariant: it said its own color");
        let ranks = own.iter().map(|o| members[o.1]).collect();
        let mix = |x: u64, y: u64| (x ^ y).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29) | 1;
        let child = mix(mix(id, number + 1), color as u64 + 1);
        Ok(Some(self.new_comm(child, mesh, ranks, place, context, CommActivity::Nothing)))
    }

    /// Serves others who wait for this process, as far as what they wait for has been issued.
    pub fn heed(&mut self) {
        for comm in self.comms.values() {
            let Some(mesh) = self.meshes.get(&comm.mesh) else { continue };
            let asked = mesh.inbox.keys().any(|(id, kind, ..)| *id == comm.id && !matches!(kind, MessageKind::Split | MessageKind::Connect));
            if let Some(task) = comm.queue.front().filter(|_| asked) {
                self.tasks.need(*task);
            }
        }
    }
}
