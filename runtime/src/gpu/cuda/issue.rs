//! Issues lists of work on the streams of a rank, ordered by events as the list says.

use super::driver::text;
use super::kernel::CudaKernel;
use super::memory::Pinned;
use super::stream::{CudaEvent, Stream};
use crate::gpu::host::{HostCall, HostKernels};
use crate::gpu::nccl::Nccl;
use crate::gpu::outbox::Outboxes;
use crate::gpu::{CardExchange, Outgoing, Work};
use cudarc::driver::{result, sys};
use ir::program::{KernelId, Stream as Lane};
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::c_void;
use std::sync::Arc;

const NO_HOST: &str = "there is no code for the host";

/// The streams of a rank, in the order of [`Lane::ALL`], and the events that order them. Each list of work begins on
/// all streams after what was before on that of kernels, which goes on when all are through.
pub(super) struct Streams {
    all: Vec<Stream>,
    fork: CudaEvent,
    joins: Vec<CudaEvent>,
    events: HashMap<u32, CudaEvent>,
    exchanges: ExchangeStream,
    /// What is sent to other GPUs, once it is connected to them.
    pub(super) outboxes: Outboxes,
}

/// The stream of all that NCCL does, whose kernels so never run at once: an exchange takes its turn there, after what
/// is before on its own stream, which then waits for it. Where the card is full, its kernels come before those of
/// compute that have not begun, as other ranks wait for them.
struct ExchangeStream {
    stream: Stream,
    begins: CudaEvent,
    ended: CudaEvent,
    last: LastIssued,
}

/// The last that the exchanges' stream was told of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LastIssued {
    Nothing,
    /// An exchange of another stream, which waits for it.
    OfStream,
    /// Sends alone, for which nothing waits.
    Sends,
}

impl Streams {
    pub(super) fn new() -> Result<Streams, String> {
        let all = Lane::ALL.iter().map(|_| Stream::new()).collect::<Result<_, _>>()?;
        let joins = Lane::ALL.iter().map(|_| CudaEvent::new()).collect::<Result<_, _>>()?;
        let exchanges = ExchangeStream { stream: Stream::first()?, begins: CudaEvent::new()?, ended: CudaEvent::new()?, last: LastIssued::Nothing };
        Ok(Streams { all, fork: CudaEvent::new()?, joins, events: HashMap::new(), exchanges, outboxes: Outboxes::default() })
    }

    /// The stream of kernels.
    pub(super) fn compute(&self) -> &Stream {
        &self.all[Lane::Compute as usize]
    }

    /// Issues a list, which uses what is kept for it; `launched` is called after each launch.
    pub(super) fn issue(
        &mut self,
        work: &[Work],
        context: &IssueContext,
        kept: &mut Kept,
        mut launched: impl FnMut(&Stream, &[u8]) -> Result<(), String>,
    ) -> Result<(), String> {
        let beside: BTreeSet<usize> = work.iter().map(|w| w.stream() as usize).filter(|s| *s != Lane::Compute as usize).collect();
        self.fork.record(self.compute())?;
        for s in &beside {
            self.fork.hold(&self.all[*s])?;
        }
        self.outboxes.begin();
        self.exchanges.last = LastIssued::Nothing;
        let mut recorded = BTreeSet::new();
        for work in work {
            match work {
                Work::Launch { kernel, parameters } => {
                    self.compute().launch(&context.kernels[kernel], parameters)?;
                    launched(self.compute(), parameters)?;
                }
                Work::Fill { address, element, width, count } => self.compute().fill(*address, *element, *width, *count)?,
                Work::Write { address, bytes } => kept.write(self.compute(), *address, bytes)?,
                Work::Copy { stream, to, device, host, bytes } => self.all[*stream as usize].copy(*to, *device, *host, *bytes)?,
                Work::Disk { stream, copied } => {
                    let host_kernels = context.host_kernels.ok_or(NO_HOST)?;
                    kept.call(&self.all[*stream as usize], HostCall::Disk(host_kernels.arenas(), *copied))?;
                }
                Work::Host { stream, kernel, args, scalars } => {
                    let host_kernels = context.host_kernels.ok_or(NO_HOST)?;
                    kept.call(&self.all[*stream as usize], HostCall::new(host_kernels, *kernel, args, scalars))?;
                }
                Work::Post { stream, address, outgoing } => self.outboxes.fill(outgoing, *address, &self.all[*stream as usize])?,
                Work::Send(outgoing) => self.exchange(context, None, &[*outgoing])?,
                Work::Exchange { stream, exchange, outgoing } => self.exchange(context, Some((*stream, exchange)), outgoing)?,
                Work::Record { stream, event } => {
                    let known = match self.events.entry(*event) {
                        Entry::Occupied(e) => e.into_mut(),
                        Entry::Vacant(e) => e.insert(CudaEvent::new()?),
                    };
                    known.record(&self.all[*stream as usize])?;
                    recorded.insert(*event);
                }
                // An event that an earlier list recorded is through already.
                Work::Wait { stream, event } => {
                    if let Some(known) = self.events.get(event).filter(|_| recorded.contains(event)) {
                        known.hold(&self.all[*stream as usize])?;
                    }
                }
            }
        }
        for s in &beside {
            self.joins[*s].record(&self.all[*s])?;
            self.joins[*s].hold(self.compute())?;
        }
        // After an exchange of a stream, that stream has waited already.
        if self.exchanges.last == LastIssued::Sends {
            self.exchanges.ended.record(&self.exchanges.stream)?;
            self.exchanges.ended.hold(self.compute())?;
        }
        Ok(())
    }

    /// Issues an exchange of a stream, if there is one, and what goes out with it.
    fn exchange(&mut self, context: &IssueContext, exchange: Option<(Lane, &CardExchange)>, outgoing: &[Outgoing]) -> Result<(), String> {
        let nccl = context.nccl.ok_or("the GPU is not connected to others")?;
        let ExchangeStream { stream, begins, ended, last } = &mut self.exchanges;
        match exchange {
            Some((lane, _)) => {
                begins.record(&self.all[lane as usize])?;
                begins.hold(stream)?;
            }
            // An earlier list filled these outboxes, so nothing in this one is waited for, and the stream joins it at
            // the fork.
            None if *last == LastIssued::Nothing && !self.outboxes.any_filled(outgoing)? => self.fork.hold(stream)?,
            None => {}
        }
        *last = if exchange.is_some() { LastIssued::OfStream } else { LastIssued::Sends };
        let places = self.outboxes.hold(outgoing, stream)?;
        nccl.issue(exchange.map(|e| e.1), outgoing, &places, stream)?;
        self.outboxes.free(outgoing, stream)?;
        if let Some((lane, _)) = exchange {
            ended.record(stream)?;
            ended.hold(&self.all[lane as usize])?;
        }
        Ok(())
    }
}

/// What a list is issued with.
pub(super) struct IssueContext<'a> {
    pub(super) kernels: &'a BTreeMap<KernelId, CudaKernel>,
    pub(super) nccl: Option<&'a Nccl>,
    pub(super) host_kernels: Option<&'a HostKernels>,
}

/// What work under way uses of the host, and a graph as long as it lives.
#[derive(Default)]
pub(super) struct Kept {
    /// What is written comes from here, one after the other.
    pub(super) data: Option<Pinned>,
    written: usize,
    /// What the host does, in order.
    pub(super) calls: Vec<Arc<HostCall>>,
}

impl Kept {
    /// Room for what a list writes.
    pub(super) fn new(work: &[Work]) -> Result<Kept, String> {
        let bytes: usize = work.iter().map(Work::bytes).sum();
        let data = if bytes > 0 { Some(Pinned::new(bytes)?) } else { None };
        Ok(Kept { data, ..Kept::default() })
    }

    /// Issues a copy from pinned memory, after having put there what it copies.
    fn write(&mut self, on: &Stream, address: u64, bytes: &[u8]) -> Result<(), String> {
        let Some(data) = &mut self.data else { return Ok(()) };
        let piece = &mut data.slice()[self.written..self.written + bytes.len()];
        piece.copy_from_slice(bytes);
        self.written += bytes.len();
        // SAFETY: places lie within their arenas; the memory lives until the copy is done, or as long as the graph.
        unsafe { result::memcpy_htod_async(address, piece, on.0) }.map_err(text)
    }

    /// Issues what the host does.
    fn call(&mut self, on: &Stream, call: HostCall) -> Result<(), String> {
        unsafe extern "C" fn run(call: *mut c_void) {
            // SAFETY: it is a call that is kept until the stream is through.
            unsafe { &*call.cast_const().cast::<HostCall>() }.run();
        }
        let call = Arc::new(call);
        // SAFETY: the stream is alive; what is called uses no driver, and operands that are its own by the order of
        // streams.
        unsafe { sys::cuLaunchHostFunc(on.0, Some(run), Arc::as_ptr(&call).cast_mut().cast()) }.result().map_err(text)?;
        self.calls.push(call);
        Ok(())
    }
}
