//! CUDA graphs: what is given to a GPU at once is captured when it comes for the first time. When the same comes
//! again, parameters that differ (step, learning rate) are replaced, data is put where the graph copies it from, and
//! one launch does it all.

use super::driver::text;
use super::issue::{IssueContext, Kept, Streams};
use super::kernel::{CudaKernel, places};
use super::stream::Stream;
use crate::device::Location;
use crate::executor::Copied;
use crate::gpu::{CardExchange, Outgoing, Work};
use cudarc::driver::result::{self, stream};
use cudarc::driver::sys;
use ir::program::{KernelId, Space, Stream as Lane};
use std::collections::{BTreeMap, HashMap};
use std::ptr::null_mut;

/// Fewer launches are issued one by one.
const LEAST: usize = 4;

/// What makes two lists the same graph.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum WorkKey {
    Launch(KernelId),
    Fill(u64, [u8; 4], u8, u64),
    Write(u64, usize),
    Copy(Lane, Space, u64, u64, u64),
    Disk(Lane, Copied),
    Host(Lane, KernelId, Vec<Location>),
    Post(Lane, u64, Outgoing),
    Send(Outgoing),
    Exchange(Lane, CardExchange, Vec<Outgoing>),
    Record(Lane, u32),
    Wait(Lane, u32),
}

fn keys(work: &[Work]) -> Vec<WorkKey> {
    let key = |w: &Work| match w {
        Work::Launch { kernel, .. } => WorkKey::Launch(*kernel),
        Work::Fill { address, element, width, count } => WorkKey::Fill(*address, *element, *width, *count),
        Work::Write { address, bytes } => WorkKey::Write(*address, bytes.len()),
        Work::Copy { stream, to, device, host, bytes } => WorkKey::Copy(*stream, *to, *device, *host, *bytes),
        Work::Disk { stream, copied } => WorkKey::Disk(*stream, *copied),
        Work::Host { stream, kernel, args, .. } => WorkKey::Host(*stream, *kernel, args.clone()),
        Work::Post { stream, address, outgoing } => WorkKey::Post(*stream, *address, *outgoing),
        Work::Send(outgoing) => WorkKey::Send(*outgoing),
        Work::Exchange { stream, exchange, outgoing } => WorkKey::Exchange(*stream, exchange.clone(), outgoing.clone()),
        Work::Record { stream, event } => WorkKey::Record(*stream, *event),
        Work::Wait { stream, event } => WorkKey::Wait(*stream, *event),
    };
    work.iter().map(key).collect()
}

/// A captured list.
struct Graph {
    exec: sys::CUgraphExec,
    /// Node of each launch in order, with the parameters that the graph has for it.
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
    known: HashMap<Vec<WorkKey>, Graph>,
    /// What the last list that is no graph uses of the host.
    kept: Kept,
}

impl Graphs {
    /// Whether a list is worth a graph.
    fn takes(work: &[Work]) -> bool {
        work.iter().filter(|w| matches!(w, Work::Launch { .. } | Work::Disk { .. } | Work::Host { .. })).count() >= LEAST
    }

    /// Gives up all graphs, but not what is kept for them, which may be in use.
    pub(super) fn end(&mut self) -> Vec<Kept> {
        let of_graphs = self.known.drain().map(|(_, mut graph)| std::mem::take(&mut graph.kept));
        of_graphs.chain([std::mem::take(&mut self.kept)]).collect()
    }

    /// Does a list. All before is through: so data may change, and events of other lists are of no matter.
    pub(super) fn run(&mut self, work: &[Work], context: &IssueContext, streams: &mut Streams) -> Result<(), String> {
        if !Graphs::takes(work) {
            // The last list of this kind is through, so what was kept for it is dropped.
            self.kept = Kept::new(work)?;
            return streams.issue(work, context, &mut self.kept, |_, _| Ok(()));
        }
        let keys = keys(work);
        if !self.known.contains_key(&keys) {
            let graph = capture(work, context, streams)?;
            self.known.insert(keys.clone(), graph);
        }
        let graph = self.known.get_mut(&keys).expect("invariant: it was just captured");
        graph.update(work, context.kernels)?;
        // SAFETY: the graph is instantiated, the stream alive.
        unsafe { result::graph::launch(graph.exec, streams.compute().0) }.map_err(text)
    }
}

/// Captures a list as a graph.
fn capture(work: &[Work], context: &IssueContext, streams: &mut Streams) -> Result<Graph, String> {
    let mut kept = Kept::new(work)?;
    let mut launches = vec![];
    let compute = streams.compute().0;
    // SAFETY: the stream is alive and captures nothing else.
    unsafe { stream::begin_capture(compute, sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL) }.map_err(text)?;
    let launched = |stream: &Stream, parameters: &[u8]| {
        launches.push((last_node(stream)?, parameters.to_vec()));
        Ok(())
    };
    let issued = streams.issue(work, context, &mut kept, launched);
    // SAFETY: the capture was begun above; it is ended whatever came of it.
    let graph = unsafe { stream::end_capture(compute) }.map_err(text);
    issued?;
    let graph = graph?;
    // SAFETY: the graph is complete.
    let exec = unsafe { result::graph::instantiate(graph, sys::CUgraphInstantiate_flags_enum(0)) }.map_err(text)?;
    Ok(Graph { exec, launches, kept, graph })
}

/// The node that a stream captured last.
fn last_node(stream: &Stream) -> Result<sys::CUgraphNode, String> {
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    let (mut nodes, mut count) = (std::ptr::null(), 0);
    // SAFETY: all results are writable; the list of nodes is the driver's, and read at once.
    unsafe {
        sys::cuStreamGetCaptureInfo_v2(stream.0, &mut status, null_mut(), null_mut(), &mut nodes, &mut count).result().map_err(text)?;
        if count == 1 { Ok(*nodes) } else { Err(format!("a captured launch left {count} nodes")) }
    }
}

impl Graph {
    /// Gives it the parameters and the data of a list of its kind.
    fn update(&mut self, work: &[Work], kernels: &BTreeMap<KernelId, CudaKernel>) -> Result<(), String> {
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
                Work::Disk { .. } => drop(calls.next()),
                Work::Host { scalars, .. } => calls.next().expect("invariant: a list of the same kind has as many calls").set(scalars),
                Work::Fill { .. }
                | Work::Copy { .. }
                | Work::Post { .. }
                | Work::Send(_)
                | Work::Exchange { .. }
                | Work::Record { .. }
                | Work::Wait { .. } => {}
            }
        }
        Ok(())
    }
}

fn replace(exec: sys::CUgraphExec, node: sys::CUgraphNode, kernel: &CudaKernel, parameters: &[u8]) -> Result<(), String> {
    let (l, mut places) = (&kernel.launch, places(&kernel.launch, parameters));
    let changed = sys::CUDA_KERNEL_NODE_PARAMS_v2_st {
        func: kernel.function,
        gridDimX: l.grid,
        gridDimY: 1,
        gridDimZ: 1,
        blockDimX: l.block,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: l.shared_bytes,
        kernelParams: places.as_mut_ptr(),
        extra: null_mut(),
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
}
