//! Exchanges under way: what a communicator's member does as one piece of work. A collective ends when all members
//! have come to it. Sends are not buffered: one ends when its receiver is there. What is read must stay as it is, and
//! what is written to is poison, until the end.

use crate::collective::{Dtype, Reduce, fold};
use crate::mesh::{Message, MessageKind};
use crate::state::{Cuda, Nccl, Refused, State, refuse, say};
use crate::tasks::TaskId;
use cudarc::driver::sys::CUresult;
use cudarc::nccl::sys::ncclResult_t;
use emulator::{Device, LaunchError};
use std::sync::Arc;
use std::time::Duration;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExchangeKind {
    AllReduce(Reduce),
    AllGather,
    ReduceScatter(Reduce),
    /// A message to or from a member, by its number.
    Send(usize),
    Recv(usize),
}

/// An exchange that a member asks a communicator for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    pub kind: ExchangeKind,
    pub dtype: Dtype,
    pub count: u64,
    pub from: u64,
    pub to: u64,
}

impl Call {
    /// Bytes that the call reads and writes, if there are so many members.
    pub fn bytes(&self, members: u64) -> [u64; 2] {
        let n = self.count * self.dtype.bytes();
        match self.kind {
            ExchangeKind::AllReduce(_) => [n, n],
            ExchangeKind::AllGather => [n, n * members],
            ExchangeKind::ReduceScatter(_) => [n * members, n],
            ExchangeKind::Send(_) => [n, 0],
            ExchangeKind::Recv(_) => [0, n],
        }
    }

    /// The kind of call for which NCCL may connect at its first use. How a collective is done depends on its size.
    pub fn prepared_kind(&self) -> String {
        match self.kind {
            ExchangeKind::Send(other) => format!("send to {other}"),
            ExchangeKind::Recv(other) => format!("receive from {other}"),
            ExchangeKind::AllReduce(_) | ExchangeKind::AllGather | ExchangeKind::ReduceScatter(_) => self.terms(),
        }
    }

    /// The properties that all members must agree on.
    fn terms(&self) -> String {
        let what = match self.kind {
            ExchangeKind::AllReduce(reduce) => format!("all-reduce ({reduce:?}) of"),
            ExchangeKind::AllGather => "all-gather of".into(),
            ExchangeKind::ReduceScatter(reduce) => format!("reduce-scatter ({reduce:?}) of"),
            ExchangeKind::Send(_) | ExchangeKind::Recv(_) => "message of".into(),
        };
        format!("{what} {} {:?}", self.count, self.dtype)
    }
}

/// A call that has been begun.
struct ActiveCall {
    call: Call,
    /// The call's number among those of the communicator, or among those between two members.
    number: u64,
    /// The data that the call read.
    data: Vec<u8>,
    /// Members that the call waits for; empty once it has ended.
    waits: Vec<usize>,
    ended: bool,
}

pub struct OpenExchange {
    pub comm: u64,
    calls: Vec<ActiveCall>,
    since: Duration,
}

fn failed(e: LaunchError) -> Refused<CUresult> {
    Refused { code: CUresult::CUDA_ERROR_ILLEGAL_ADDRESS, why: e.to_string() }
}

impl State {
    fn post(&mut self, comm: u64, to: usize, kind: MessageKind, number: u64, terms: &str, data: &[u8]) {
        let c = &self.comms[&comm];
        let (id, rank, mesh) = (c.id, c.members[to], c.mesh);
        if let Some(mesh) = self.meshes.get_mut(&mesh) {
            mesh.post(rank, id, kind, number, terms, data);
        }
    }

    fn receive(&mut self, comm: u64, from: usize, kind: MessageKind, number: u64) -> Option<Message> {
        let c = &self.comms[&comm];
        let key = (c.id, kind, c.members[from], number);
        self.meshes.get_mut(&c.mesh)?.inbox.remove(&key)
    }

    pub fn exchange_begins(&mut self, task: TaskId, comm: u64, calls: &Arc<Vec<Call>>) -> Cuda {
        let Some(c) = self.comms.get(&comm) else {
            return refuse(CUresult::CUDA_ERROR_LAUNCH_FAILED, "a communicator is gone whose calls a graph still has");
        };
        let (context, me, members) = (c.context, c.me, c.members.len());
        let mut begun = vec![];
        for call in calls.iter() {
            let [reads, writes] = call.bytes(members as u64);
            let mut data = vec![0; reads as usize];
            let device = &self.contexts[&context].device;
            read(device, call.from, &mut data).map_err(failed)?;
            if writes > 0 && (call.from + reads <= call.to || call.to + writes <= call.from) {
                device.write(call.to, &vec![0xFF; writes as usize]).map_err(failed)?;
            }
            let terms = call.terms();
            let c = self.comms.get_mut(&comm).expect("invariant: it was just there");
            let number = match call.kind {
                ExchangeKind::Send(to) => next(c.sent.entry(to).or_default()),
                ExchangeKind::Recv(from) => next(c.received.entry(from).or_default()),
                ExchangeKind::AllReduce(_) | ExchangeKind::AllGather | ExchangeKind::ReduceScatter(_) => next(&mut c.collectives),
            };
            match call.kind {
                ExchangeKind::Send(to) => self.post(comm, to, MessageKind::Offer, number, &terms, &[]),
                ExchangeKind::Recv(from) => self.post(comm, from, MessageKind::Ready, number, &terms, &[]),
                ExchangeKind::AllReduce(_) | ExchangeKind::AllGather | ExchangeKind::ReduceScatter(_) => {
                    (0..members).filter(|m| *m != me).for_each(|m| self.post(comm, m, MessageKind::Part, number, &terms, &data));
                }
            }
            begun.push(ActiveCall { call: call.clone(), number, data, waits: vec![], ended: false });
        }
        self.open.insert(task, OpenExchange { comm, calls: begun, since: self.clock });
        Ok(())
    }

    /// Goes on with an exchange. Returns whether that ended it.
    pub fn exchange_ends(&mut self, task: TaskId) -> bool {
        let Some(mut open) = self.open.remove(&task) else { return false };
        let Some(c) = self.comms.get(&open.comm).filter(|c| c.error.is_none()) else {
            self.open.insert(task, open);
            return false;
        };
        let (comm, context) = (open.comm, c.context);
        for begun in open.calls.iter_mut().filter(|b| !b.ended) {
            if let Err(Refused { code, why }) = self.call_ends(comm, context, begun) {
                self.comm_fails(comm, code, &why);
                break;
            }
        }
        let ended = open.calls.iter().all(|b| b.ended);
        if ended {
            self.tasks.finish(task);
            if let Some(c) = self.comms.get_mut(&comm) {
                c.queue.retain(|t| *t != task);
            }
        } else {
            self.open.insert(task, open);
        }
        ended
    }

    fn call_ends(&mut self, comm: u64, context: u64, begun: &mut ActiveCall) -> Nccl {
        let ActiveCall { call, number, data, waits, ended } = begun;
        let number = *number;
        let terms = call.terms();
        let (me, members) = (self.comms[&comm].me, self.comms[&comm].members.clone());
        let others: Vec<(usize, MessageKind)> = match call.kind {
            ExchangeKind::Send(to) => vec![(to, MessageKind::Ready)],
            ExchangeKind::Recv(from) => vec![(from, MessageKind::Offer), (from, MessageKind::Data)],
            ExchangeKind::AllReduce(_) | ExchangeKind::AllGather | ExchangeKind::ReduceScatter(_) => {
                (0..members.len()).filter(|m| *m != me).map(|m| (m, MessageKind::Part)).collect()
            }
        };
        let mesh = &self.meshes[&self.comms[&comm].mesh];
        let id = self.comms[&comm].id;
        waits.clear();
        for (member, kind) in &others {
            let rank = members[*member];
            match mesh.inbox.get(&(id, *kind, rank, number)) {
                Some((theirs, _)) if *theirs != terms => {
                    let why = format!("member {me} is at its {terms}, member {member} at its {theirs}");
                    return refuse(ncclResult_t::ncclInvalidUsage, why);
                }
                Some(_) => {}
                None => {
                    waits.push(*member);
                    let message = matches!(call.kind, ExchangeKind::Send(_) | ExchangeKind::Recv(_));
                    let at = mesh.inbox.iter().find(|((c, k, r, _), _)| {
                        (*c, *r) == (id, rank) && if message { *k == MessageKind::Part } else { matches!(k, MessageKind::Offer | MessageKind::Ready) }
                    });
                    if let Some((_, (theirs, _))) = at {
                        let why = format!("member {me} is at its {terms}, member {member} at its {theirs}");
                        return refuse(ncclResult_t::ncclInvalidUsage, why);
                    }
                    if mesh.gone.contains(&rank) {
                        return refuse(ncclResult_t::ncclRemoteError, format!("{terms}: member {member} is gone"));
                    }
                }
            }
        }
        if !waits.is_empty() {
            return Ok(());
        }
        let mut now = vec![0; data.len()];
        let invalid = |e: LaunchError| refuse(ncclResult_t::ncclUnhandledCudaError, e.to_string());
        read(&self.contexts[&context].device, call.from, &mut now).or_else(invalid)?;
        if now != *data {
            return refuse(ncclResult_t::ncclInvalidUsage, format!("{terms}: what it reads was written to while it was under way"));
        }
        let got: Vec<Vec<u8>> = others.iter().filter_map(|(m, k)| self.receive(comm, *m, *k, number)).map(|m| m.1).collect();
        let mut parts: Vec<&[u8]> = got.iter().map(Vec::as_slice).collect();
        let size = (call.count * call.dtype.bytes()) as usize;
        let out = match call.kind {
            ExchangeKind::Send(to) => {
                self.post(comm, to, MessageKind::Data, number, &terms, data);
                vec![]
            }
            ExchangeKind::Recv(_) => parts[1].to_vec(),
            ExchangeKind::AllReduce(_) | ExchangeKind::AllGather | ExchangeKind::ReduceScatter(_) => {
                parts.insert(me, data);
                match call.kind {
                    ExchangeKind::AllReduce(reduce) => fold(reduce, call.dtype, &parts),
                    ExchangeKind::ReduceScatter(reduce) => {
                        let own: Vec<&[u8]> = parts.iter().map(|p| &p[me * size..][..size]).collect();
                        fold(reduce, call.dtype, &own)
                    }
                    ExchangeKind::AllGather | ExchangeKind::Send(_) | ExchangeKind::Recv(_) => parts.concat(),
                }
            }
        };
        if !out.is_empty() {
            self.contexts[&context].device.write(call.to, &out).or_else(invalid)?;
        }
        *ended = true;
        Ok(())
    }

    /// Reports exchanges that wait too long, and for whom.
    pub fn complain(&mut self) {
        let (patience, clock) = (self.settings.patience, self.clock);
        let late: Vec<(u64, String)> = self
            .open
            .values()
            .filter(|o| clock - o.since > patience && self.comms.get(&o.comm).is_some_and(|c| c.error.is_none()))
            .map(|o| {
                let waits = o.calls.iter().filter(|b| !b.ended).map(|b| format!("{} waits for members {:?}", b.call.terms(), b.waits));
                (o.comm, waits.collect::<Vec<_>>().join(", "))
            })
            .collect();
        for (comm, waits) in late {
            self.comm_fails(comm, ncclResult_t::ncclSystemError, &format!("nothing has moved for {} s: {waits}", patience.as_secs()));
        }
    }

    pub fn comm_fails(&mut self, comm: u64, code: ncclResult_t, why: &str) {
        if let Some(c) = self.comms.get_mut(&comm) {
            say(&format!("member {} of communicator {:x} ({} members): {why}", c.me, c.id & 0xFFFF, c.members.len()));
            c.error.get_or_insert(code);
        }
    }
}

fn read(device: &Device, address: u64, out: &mut [u8]) -> Result<(), LaunchError> {
    if out.is_empty() { Ok(()) } else { device.read(address, out) }
}

/// Increases a number and returns the old one.
fn next(number: &mut u64) -> u64 {
    *number += 1;
    *number - 1
}
