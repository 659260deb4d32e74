//! CUDA graphs: what is given to a GPU at once is captured when it comes for the first time. When the same comes again, parameters that differ (step,
//! learning rate) are replaced, data is put where the graph copies it from, and one launch does it all.

use super::cuda::{Loaded, Pinned, text};
use super::host::{Call, Natively};
use super::nccl::Nccl;
use super::outbox::Outboxes;
use super::{Between, Work};
use crate::device::Location;
use cudarc::driver::result::{self, event, stream};
use cudarc::driver::sys;
use ir::program::{KernelId, Space, Stream as Lane};
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;

/// Fewer launches are issued one by one.
const LEAST: usize = 4;

/// A stream of the current context, owned.
pub(super) struct Stream(pub(super) sys::CUstream);

// SAFETY: a handle that may be used from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: it is owned.
        let _ = unsafe { stream::destroy(self.0) };
    }
}

/// What `cuLaunchKernel` takes in place of a list of parameters: the packed ones, as they are.
struct Packed {
    bytes: usize,
    extra: [*mut c_void; 5],
}

impl Packed {
    /// The result refers to `parameters` and to itself: it stays where it is while it is used.
    fn new(parameters: &[u8]) -> Box<Packed> {
        let mut packed = Box::new(Packed { bytes: parameters.len(), extra: [null_mut(); 5] });
        let tag = |n: u32| n as usize as *mut c_void;
        let size = (&raw mut packed.bytes).cast::<c_void>();
        let start = parameters.as_ptr().cast_mut().cast::<c_void>();
        packed.extra = [
            tag(sys::CU_LAUNCH_PARAM_BUFFER_POINTER_AS_INT),
            start,
            tag(sys::CU_LAUNCH_PARAM_BUFFER_SIZE_AS_INT),
            size,
            tag(sys::CU_LAUNCH_PARAM_END_AS_INT),
        ];
        packed
    }
}

impl Stream {
    pub(super) fn new() -> Result<Stream, String> {
        stream::create(stream::StreamKind::NonBlocking).map(Stream).map_err(text)
    }

    /// Waits until all is done.
    pub(super) fn wait(&self) -> Result<(), String> {
        // SAFETY: the stream is alive.
        unsafe { stream::synchronize(self.0) }.map_err(text)
    }

    /// Issues a launch or a fill.
    fn issue(&self, work: &Work, kernels: &BTreeMap<KernelId, Loaded>) -> Result<(), String> {
        match work {
            Work::Launch { kernel, parameters } => self.launch(&kernels[kernel], parameters),
            // SAFETY: places lie within their arenas, at multiples of their width.
            Work::Fill { address, element, width, count } => unsafe {
                let [a, b, c, d] = *element;
                match width {
                    1 => sys::cuMemsetD8Async(*address, a, *count as usize, self.0),
                    2 => sys::cuMemsetD16Async(*address, u16::from_le_bytes([a, b]), *count as usize, self.0),
                    _ => sys::cuMemsetD32Async(*address, u32::from_le_bytes([a, b, c, d]), *count as usize, self.0),
                }
                .result()
                .map_err(text)
            },
            Work::Write { .. } | Work::Copy { .. } | Work::Host { .. } | Work::Exchange { .. } | Work::Record { .. } | Work::Wait { .. } => {
                unreachable!("invariant: not a launch or a fill")
            }
        }
    }

    /// Issues a copy between the memories, of which the host's is lent to the GPU.
    fn copy(&self, to: Space, device: u64, host: u64, bytes: u64) -> Result<(), String> {
        // SAFETY: places lie within their arenas; nobody else uses them meanwhile, as streams and events say.
        let copied = unsafe {
            match to {
                Space::Host => sys::cuMemcpyDtoHAsync_v2(host as *mut c_void, device, bytes as usize, self.0),
                Space::Device => sys::cuMemcpyHtoDAsync_v2(device, host as *const c_void, bytes as usize, self.0),
            }
        };
        copied.result().map_err(text)
    }

    fn launch(&self, kernel: &Loaded, parameters: &[u8]) -> Result<(), String> {
        let (l, mut packed) = (&kernel.launch, Packed::new(parameters));
        // SAFETY: the parameters are those of the kernel, packed as it declares them; the driver copies them.
        unsafe { sys::cuLaunchKernel(kernel.function, l.grid, 1, 1, l.block, 1, 1, l.shared_bytes, self.0, null_mut(), packed.extra.as_mut_ptr()) }
            .result()
            .map_err(text)
    }

    /// Whether all is done.
    pub(super) fn is_idle(&self) -> Result<bool, String> {
        // SAFETY: the stream is alive.
        match unsafe { sys::cuStreamQuery(self.0) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            other => other.result().map(|()| true).map_err(text),
        }
    }

    /// The node that was captured last.
    fn last_node(&self) -> Result<sys::CUgraphNode, String> {
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        let (mut nodes, mut count) = (std::ptr::null(), 0);
        // SAFETY: all results are writable; the list of nodes is the driver's, and read at once.
        unsafe {
            sys::cuStreamGetCaptureInfo_v2(self.0, &mut status, null_mut(), null_mut(), &mut nodes, &mut count).result().map_err(text)?;
            if count == 1 { Ok(*nodes) } else { Err(format!("a captured launch left {count} nodes")) }
        }
    }
}

/// An event, owned.
pub(super) struct Event(sys::CUevent);

// SAFETY: a handle that may be used from any thread.
unsafe impl Send for Event {}

impl Event {
    pub(super) fn new() -> Result<Event, String> {
        event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING).map(Event).map_err(text)
    }

    pub(super) fn record(&self, on: &Stream) -> Result<(), String> {
        // SAFETY: both are alive.
        unsafe { event::record(self.0, on.0) }.map_err(text)
    }

    pub(super) fn hold(&self, on: &Stream) -> Result<(), String> {
        // SAFETY: as above.
        unsafe { stream::wait_event(on.0, self.0, sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT) }.map_err(text)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: it is owned.
        let _ = unsafe { event::destroy(self.0) };
    }
}

/// The streams of a rank, in the order of [`Lane::ALL`], and the events that order them. Each list of work begins on all streams after what was
/// before on that of kernels, which goes on when all are through.
pub(super) struct Streams {
    all: Vec<Stream>,
    fork: Event,
    joins: Vec<Event>,
    events: HashMap<u32, Event>,
    /// What is sent to other GPUs, once it is connected to them.
    pub(super) outboxes: Outboxes,
}

impl Streams {
    pub(super) fn new() -> Result<Streams, String> {
        let all = Lane::ALL.iter().map(|_| Stream::new()).collect::<Result<_, _>>()?;
        let joins = Lane::ALL.iter().map(|_| Event::new()).collect::<Result<_, _>>()?;
        Ok(Streams { all, fork: Event::new()?, joins, events: HashMap::new(), outboxes: Outboxes::default() })
    }

    /// Of kernels.
    pub(super) fn compute(&self) -> &Stream {
        &self.all[Lane::Compute as usize]
    }

    /// Issues a list, which uses what is kept for it; `launched` is called after each launch.
    fn issue(
        &mut self,
        work: &[Work],
        on: &On,
        kept: &mut Kept,
        mut launched: impl FnMut(&Stream, &[u8]) -> Result<(), String>,
    ) -> Result<(), String> {
        let beside: BTreeSet<usize> = work.iter().map(|w| w.stream() as usize).filter(|s| *s != Lane::Compute as usize).collect();
        self.fork.record(self.compute())?;
        for s in &beside {
            self.fork.hold(&self.all[*s])?;
        }
        let mut recorded = BTreeSet::new();
        for work in work {
            match work {
                Work::Launch { parameters, .. } => {
                    self.compute().issue(work, on.kernels)?;
                    launched(self.compute(), parameters)?;
                }
                Work::Fill { .. } => self.compute().issue(work, on.kernels)?,
                Work::Write { address, bytes } => kept.write(self.compute(), *address, bytes)?,
                Work::Copy { stream, to, device, host, bytes } => self.all[*stream as usize].copy(*to, *device, *host, *bytes)?,
                Work::Host { stream, kernel, args, scalars } => {
                    let natively = on.natively.ok_or("there is no code for the host's kernels")?;
                    kept.call(&self.all[*stream as usize], Call::new(natively, *kernel, args, scalars))?;
                }
                Work::Exchange { stream, between } => {
                    let nccl = on.nccl.ok_or("the GPU is not connected to others")?;
                    self.outboxes.issue(nccl, between, &self.all[*stream as usize])?;
                }
                Work::Record { stream, event } => {
                    let known = match self.events.entry(*event) {
                        Entry::Occupied(e) => e.into_mut(),
                        Entry::Vacant(e) => e.insert(Event::new()?),
                    };
                    known.record(&self.all[*stream as usize])?;
                    recorded.insert(*event);
                }
                // What was recorded in a list before is through.
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
        self.outboxes.join(&self.all[Lane::Compute as usize])
    }
}

/// What a list is issued with.
pub(super) struct On<'a> {
    pub(super) kernels: &'a BTreeMap<KernelId, Loaded>,
    pub(super) nccl: Option<&'a Nccl>,
    pub(super) natively: Option<&'a Natively>,
}

/// What makes two lists the same graph.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Key {
    Launch(KernelId),
    Fill(u64, [u8; 4], u8, u64),
    Write(u64, usize),
    Copy(Lane, Space, u64, u64, u64),
    Host(Lane, KernelId, Vec<Location>),
    Exchange(Lane, Between),
    Record(Lane, u32),
    Wait(Lane, u32),
}

fn keys(work: &[Work]) -> Vec<Key> {
    let key = |w: &Work| match w {
        Work::Launch { kernel, .. } => Key::Launch(*kernel),
        Work::Fill { address, element, width, count } => Key::Fill(*address, *element, *width, *count),
        Work::Write { address, bytes } => Key::Write(*address, bytes.len()),
        Work::Copy { stream, to, device, host, bytes } => Key::Copy(*stream, *to, *device, *host, *bytes),
        Work::Host { stream, kernel, args, .. } => Key::Host(*stream, *kernel, args.clone()),
        Work::Exchange { stream, between } => Key::Exchange(*stream, between.clone()),
        Work::Record { stream, event } => Key::Record(*stream, *event),
        Work::Wait { stream, event } => Key::Wait(*stream, *event),
    };
    work.iter().map(key).collect()
}

/// A captured list.
struct Graph {
    exec: sys::CUgraphExec,
    /// Of each launch in order: its node, and the parameters that the graph has.
    launches: Vec<(sys::CUgraphNode, Vec<u8>)>,
    kept: Kept,
    /// Owns the nodes.
    graph: sys::CUgraph,
}

// SAFETY: handles that may be used from any thread.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: both are owned, and what was launched has been waited for.
        unsafe {
            let _ = result::graph::exec_destroy(self.exec);
            let _ = result::graph::destroy(self.graph);
        }
    }
}

/// The graphs of a rank.
#[derive(Default)]
pub(super) struct Graphs {
    known: HashMap<Vec<Key>, Graph>,
    /// Of the last list that is no graph.
    kept: Kept,
}

impl Graphs {
    /// Whether a list is worth a graph.
    fn takes(work: &[Work]) -> bool {
        work.iter().filter(|w| matches!(w, Work::Launch { .. } | Work::Host { .. })).count() >= LEAST
    }

    /// Gives up all graphs, but not what is kept for them, which may be in use.
    pub(super) fn end(&mut self) -> Vec<Kept> {
        let of_graphs = self.known.drain().map(|(_, mut graph)| std::mem::take(&mut graph.kept));
        of_graphs.chain([std::mem::take(&mut self.kept)]).collect()
    }

    /// Does a list. All before is through: so data may change, and events of other lists are of no matter.
    pub(super) fn run(&mut self, work: &[Work], on: &On, streams: &mut Streams) -> Result<(), String> {
        if !Graphs::takes(work) {
            // What was kept for the last such list is free now.
            self.kept = Kept::new(work)?;
            return streams.issue(work, on, &mut self.kept, |_, _| Ok(()));
        }
        let keys = keys(work);
        if !self.known.contains_key(&keys) {
            let graph = capture(work, on, streams)?;
            self.known.insert(keys.clone(), graph);
        }
        let graph = self.known.get_mut(&keys).expect("invariant: it was just captured");
        graph.update(work, on.kernels)?;
        // SAFETY: the graph is instantiated, the stream alive.
        unsafe { result::graph::launch(graph.exec, streams.compute().0) }.map_err(text)
    }
}

/// What work under way uses of the host, and a graph as long as it lives.
#[derive(Default)]
pub(super) struct Kept {
    /// What is written comes from here, one after the other.
    data: Option<Pinned>,
    written: usize,
    /// Kernels of the host, in order.
    calls: Vec<Arc<Call>>,
}

impl Kept {
    /// Room for what a list writes.
    fn new(work: &[Work]) -> Result<Kept, String> {
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

    /// Issues a kernel of the host.
    fn call(&mut self, on: &Stream, call: Call) -> Result<(), String> {
        unsafe extern "C" fn run(call: *mut c_void) {
            // SAFETY: it is a call that is kept until the stream is through.
            unsafe { &*call.cast_const().cast::<Call>() }.run();
        }
        let call = Arc::new(call);
        // SAFETY: the stream is alive; what is called uses no driver, and operands that are its own by the order of streams.
        unsafe { sys::cuLaunchHostFunc(on.0, Some(run), Arc::as_ptr(&call).cast_mut().cast()) }.result().map_err(text)?;
        self.calls.push(call);
        Ok(())
    }
}

fn capture(work: &[Work], on: &On, streams: &mut Streams) -> Result<Graph, String> {
    let mut kept = Kept::new(work)?;
    let mut launches = vec![];
    let compute = streams.compute().0;
    // SAFETY: the stream is alive and captures nothing else.
    unsafe { stream::begin_capture(compute, sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL) }.map_err(text)?;
    let launched = |stream: &Stream, parameters: &[u8]| {
        launches.push((stream.last_node()?, parameters.to_vec()));
        Ok(())
    };
    let issued = streams.issue(work, on, &mut kept, launched);
    // SAFETY: the capture was begun above; it is ended whatever came of it.
    let graph = unsafe { stream::end_capture(compute) }.map_err(text);
    issued?;
    let graph = graph?;
    // SAFETY: the graph is complete.
    let exec = unsafe { result::graph::instantiate(graph, sys::CUgraphInstantiate_flags_enum(0)) }.map_err(text)?;
    Ok(Graph { exec, launches, kept, graph })
}

impl Graph {
    /// Gives it the parameters and the data of a list of its kind.
    fn update(&mut self, work: &[Work], kernels: &BTreeMap<KernelId, Loaded>) -> Result<(), String> {
        let mut at = 0;
        let (mut launches, mut calls) = (self.launches.iter_mut(), self.kept.calls.iter());
        for work in work {
            match work {
                Work::Write { bytes, .. } => {
                    if let Some(data) = &mut self.kept.data {
                        data.slice()[at..at + bytes.len()].copy_from_slice(bytes);
                    }
                    at += bytes.len();
                }
                Work::Launch { kernel, parameters } => {
                    let (node, old) = launches.next().expect("invariant: a list of the same kind has as many launches");
                    if old != parameters {
                        replace(self.exec, *node, &kernels[kernel], parameters)?;
                        old.clone_from(parameters);
                    }
                }
                Work::Host { scalars, .. } => calls.next().expect("invariant: a list of the same kind has as many calls").set(scalars),
                Work::Fill { .. } | Work::Copy { .. } | Work::Exchange { .. } | Work::Record { .. } | Work::Wait { .. } => {}
            }
        }
        Ok(())
    }
}

fn replace(exec: sys::CUgraphExec, node: sys::CUgraphNode, kernel: &Loaded, parameters: &[u8]) -> Result<(), String> {
    let (l, mut packed) = (&kernel.launch, Packed::new(parameters));
    let changed = sys::CUDA_KERNEL_NODE_PARAMS_v2_st {
        func: kernel.function,
        gridDimX: l.grid,
        gridDimY: 1,
        gridDimZ: 1,
        blockDimX: l.block,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: l.shared_bytes,
        kernelParams: null_mut(),
        extra: packed.extra.as_mut_ptr(),
        kern: null_mut(),
        ctx: null_mut(),
    };
    // SAFETY: the node is one of this kernel, in the graph that was instantiated; the driver copies the parameters.
    unsafe { sys::cuGraphExecKernelNodeSetParams_v2(exec, node, &changed) }.result().map_err(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(rate: u8, label: u8) -> Vec<Work> {
        let launch = |k| Work::Launch { kernel: KernelId(k), parameters: vec![rate; 8] };
        vec![
            Work::Write { address: 256, bytes: vec![label; 4] },
            launch(0),
            Work::Fill { address: 512, element: [0; 4], width: 4, count: 2 },
            launch(1),
        ]
    }

    #[test]
    fn steps_that_differ_in_numbers_alone_are_one_graph() {
        assert_eq!(keys(&step(1, 2)), keys(&step(3, 4)));
        let mut other = step(1, 2);
        other.swap(1, 3);
        assert_ne!(keys(&step(1, 2)), keys(&other));
        assert!(!Graphs::takes(&step(1, 2)));
        assert!(Graphs::takes(&[step(1, 2), step(1, 2)].concat()));
    }

    #[test]
    fn packed_parameters_are_passed_by_address_and_length() {
        let parameters = [1u8, 2, 3, 4, 5, 6, 7, 8];
        let packed = Packed::new(&parameters);
        // SAFETY: both addresses are those of values that live.
        let (start, size) = unsafe { (packed.extra[1].cast::<u8>(), *packed.extra[3].cast::<usize>()) };
        assert_eq!((start.cast_const(), size), (parameters.as_ptr(), 8));
        assert_eq!([0, 2, 4].map(|k| packed.extra[k] as usize), [1, 2, 0]);
    }
}
