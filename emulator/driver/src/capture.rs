//! Issuing: on a stream at once, or into the graph that it captures. A stream's place is a set of tasks, or of nodes,
//! after which the next one is; recording an event remembers it, and waiting joins it to that of another stream.

use crate::objects::Recorded;
use crate::state::{Cuda, State, refuse};
use crate::tasks::{Op, TaskId};
use cudarc::driver::sys::CUresult;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::thread::ThreadId;

/// Capture modes of `cuda.h`: one that checks no thread, and one that checks the capturing thread only.
const RELAXED: u32 = 2;
const OF_THREAD: u32 = 1;

#[derive(Clone)]
pub struct Node {
    pub op: Op,
    pub after: Vec<u64>,
}

/// Nodes by handle. Handles grow in the order of capture.
pub type Nodes = BTreeMap<u64, Node>;

pub struct Capture {
    origin: u64,
    thread: ThreadId,
    mode: u32,
    nodes: Nodes,
    /// The last node of each communicator, whose calls happen one after the other.
    comms: HashMap<u64, u64>,
    /// The last node of any communicator.
    exchange: Option<u64>,
    /// Why the capture is invalid, if it is.
    spoiled: Option<String>,
    /// The list of handles that was asked for last, to which the caller has a pointer.
    pub asked: Box<[u64]>,
}

impl Capture {
    /// Whether the capture forbids a thread to make calls that could synchronise.
    pub fn forbids(&self, thread: ThreadId) -> bool {
        match self.mode {
            RELAXED => false,
            OF_THREAD => self.thread == thread,
            _ => true,
        }
    }

    pub fn spoil(&mut self, why: &str) {
        self.spoiled.get_or_insert_with(|| why.into());
    }

    fn sound(&self) -> Cuda {
        match &self.spoiled {
            Some(why) => refuse(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, format!("the capture is of no use any more: {why}")),
            None => Ok(()),
        }
    }

    /// These nodes and all nodes before them.
    fn reach(&self, nodes: &[u64]) -> BTreeSet<u64> {
        let (mut reached, mut open) = (BTreeSet::new(), nodes.to_vec());
        while let Some(n) = open.pop() {
            if reached.insert(n) {
                open.extend(&self.nodes[&n].after);
            }
        }
        reached
    }
}

pub struct Graph {
    pub context: u64,
    pub nodes: Nodes,
}

/// An instantiated graph, with parameters of its own.
pub struct Exec {
    pub context: u64,
    pub nodes: Nodes,
    /// The task that ends the last launch.
    pub last: Option<TaskId>,
}

/// Refuses two exchanges that may run at once. Kernels of communicators keep their blocks until other ranks have
/// come, so two at once may wait for each other's blocks for ever.
fn at_once<T>() -> Cuda<T> {
    let why = "an exchange may be under way at once with another of this GPU, which NCCL does not support: no stream or event orders them";
    refuse(CUresult::CUDA_ERROR_NOT_SUPPORTED, why)
}

impl State {
    /// Issues an operation on a stream of the current context.
    pub fn issue(&mut self, on: u64, op: Op) -> Cuda {
        let stream = self.stream(on)?;
        let context = stream.context;
        if let Some((id, after)) = &stream.capture {
            let (id, mut after) = (*id, after.clone());
            let node = self.handle();
            let capture = self.capture(id);
            capture.sound()?;
            if let Some(comm) = op.comm() {
                after.extend(capture.comms.insert(comm, node));
                if capture.exchange.replace(node).is_some_and(|last| !capture.reach(&after).contains(&last)) {
                    return at_once();
                }
            }
            capture.nodes.insert(node, Node { op, after });
            self.stream(on)?.capture = Some((id, vec![node]));
            return Ok(());
        }
        let before = stream.tail.clone();
        let is_exchange = op.comm().is_some();
        let task = self.add(context, op, before);
        self.stream(on)?.tail = vec![task];
        if is_exchange { self.alone(context, task, task) } else { Ok(()) }
    }

    /// Refuses the first of some issued exchanges if the exchange before it may still be under way. The last of them
    /// then becomes the one before.
    fn alone(&mut self, context: u64, first: TaskId, last: TaskId) -> Cuda {
        match self.exchanges.insert(context, last) {
            Some(before) if !self.tasks.follows(first, before) => at_once(),
            Some(_) | None => Ok(()),
        }
    }

    /// Adds a task. A task of a communicator comes after that communicator's task before it.
    fn add(&mut self, context: u64, op: Op, mut before: Vec<TaskId>) -> TaskId {
        let comm = op.comm();
        if let Some(queue) = comm.and_then(|c| self.comms.get(&c)).map(|c| &c.queue) {
            before.extend(queue.back());
        }
        let task = self.tasks.add(context, op, &before);
        self.clock(task, &before);
        if let Some(comm) = comm.and_then(|c| self.comms.get_mut(&c)) {
            comm.queue.push_back(task);
        }
        task
    }

    pub fn record(&mut self, event: u64, on: u64) -> Cuda {
        let stream = self.stream(on)?;
        let last = match &stream.capture {
            Some((id, nodes)) => Recorded::Nodes(*id, nodes.clone()),
            None => Recorded::Tasks(stream.tail.clone()),
        };
        self.event(event)?.last = last;
        Ok(())
    }

    /// Makes later work on a stream wait for the work that an event was recorded after.
    pub fn hold(&mut self, on: u64, event: u64) -> Cuda {
        let own = self.stream(on)?.capture.as_ref().map(|c| c.0);
        self.waits += 1;
        if self.settings.forgets == Some(self.waits - 1) {
            return Ok(());
        }
        if let Some(id) = own {
            self.capture(id).sound()?;
        }
        match (&self.event(event)?.last, own) {
            // CUDA allows this wait, but no program wants it.
            (Recorded::Never, _) => refuse(CUresult::CUDA_ERROR_INVALID_VALUE, "a stream waits for an event that was never recorded"),
            (Recorded::Tasks(_), Some(id)) => {
                self.capture(id).spoil("it waits for an event from outside of it");
                let why = "a stream that captures waits for an event that was recorded outside of the capture";
                refuse(CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION, why)
            }
            (Recorded::Tasks(tasks), None) => {
                // Tasks that are done are joined too, since only this orders later work after them for certain.
                let tasks = tasks.clone();
                let tail = &mut self.stream(on)?.tail;
                tail.extend(tasks);
                tail.sort_unstable();
                tail.dedup();
                Ok(())
            }
            (Recorded::Nodes(id, nodes), own) => {
                let (id, nodes) = (*id, nodes.clone());
                if !self.captures.contains_key(&id) {
                    let why = "a stream waits for an event that was last recorded in a capture, which has ended";
                    return refuse(CUresult::CUDA_ERROR_CAPTURED_EVENT, why);
                }
                if own.is_some_and(|own| own != id) {
                    return refuse(CUresult::CUDA_ERROR_STREAM_CAPTURE_MERGE, "two captures are joined by an event");
                }
                self.capture(id).sound()?;
                let after = &mut self.stream(on)?.capture.get_or_insert_with(|| (id, vec![])).1;
                after.extend(nodes);
                after.sort_unstable();
                after.dedup();
                Ok(())
            }
        }
    }

    pub fn begin_capture(&mut self, on: u64, mode: u32) -> Cuda {
        if self.stream(on)?.capture.is_some() {
            return refuse(CUresult::CUDA_ERROR_ILLEGAL_STATE, "the stream captures already");
        }
        let id = self.handle();
        let thread = std::thread::current().id();
        let capture =
            Capture { origin: on, thread, mode, nodes: Nodes::new(), comms: HashMap::new(), exchange: None, spoiled: None, asked: Box::default() };
        self.captures.insert(id, capture);
        self.stream(on)?.capture = Some((id, vec![]));
        Ok(())
    }

    /// Ends a capture and returns its graph. All streams that took part leave the capture, whatever comes of it.
    pub fn end_capture(&mut self, on: u64) -> Cuda<u64> {
        let stream = self.stream(on)?;
        let context = stream.context;
        let Some((id, end)) = stream.capture.clone() else {
            return refuse(CUresult::CUDA_ERROR_ILLEGAL_STATE, "the stream does not capture");
        };
        let capture = self.capture(id);
        if capture.origin != on {
            return refuse(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "the capture was begun on another stream");
        }
        if capture.mode != RELAXED && capture.thread != std::thread::current().id() {
            return refuse(CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, "the capture was begun by another thread");
        }
        let capture = self.captures.remove(&id).expect("invariant: it was just there");
        let mut ends = vec![];
        for stream in self.streams.values_mut() {
            if let Some((_, last)) = stream.capture.take_if(|c| c.0 == id) {
                ends.extend(last);
            }
        }
        capture.sound()?;
        let joined = capture.reach(&end);
        if ends.iter().any(|n| !joined.contains(n)) {
            let why = "a stream that took part in the capture was not joined to the one on which it began";
            return refuse(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED, why);
        }
        let graph = self.handle();
        self.graphs.insert(graph, Graph { context, nodes: capture.nodes });
        Ok(graph)
    }

    pub fn instantiate(&mut self, graph: u64, flags: u64) -> Cuda<u64> {
        let context = self.current()?;
        if flags != 0 {
            return refuse(CUresult::CUDA_ERROR_NOT_SUPPORTED, format!("instantiation with the flags {flags:#x} is not modelled"));
        }
        let Some(found) = self.graphs.get(&graph) else {
            return refuse(CUresult::CUDA_ERROR_INVALID_HANDLE, format!("there is no graph {graph:#x}, or not any more"));
        };
        let nodes = found.nodes.clone();
        let exec = self.handle();
        self.execs.insert(exec, Exec { context, nodes, last: None });
        Ok(exec)
    }

    pub fn exec(&mut self, exec: u64) -> Cuda<&mut Exec> {
        self.current()?;
        let gone = format!("there is no instantiated graph {exec:#x}, or not any more");
        self.execs.get_mut(&exec).map_or_else(|| refuse(CUresult::CUDA_ERROR_INVALID_HANDLE, gone), Ok)
    }

    /// Launches a graph after what is on the stream and after the graph's last launch.
    pub fn launch_graph(&mut self, exec: u64, on: u64) -> Cuda {
        let stream = self.stream(on)?;
        if stream.capture.is_some() {
            return refuse(CUresult::CUDA_ERROR_NOT_SUPPORTED, "graphs within graphs are not modelled");
        }
        let (context, mut start) = (stream.context, stream.tail.clone());
        let found = self.exec(exec)?;
        start.extend(found.last);
        let nodes = found.nodes.clone();
        let mut tasks: HashMap<u64, TaskId> = HashMap::new();
        let mut exchanges = vec![];
        for (handle, node) in nodes {
            let before = if node.after.is_empty() { start.clone() } else { node.after.iter().map(|n| tasks[n]).collect() };
            let is_exchange = node.op.comm().is_some();
            let task = self.add(context, node.op, before);
            exchanges.extend(is_exchange.then_some(task));
            tasks.insert(handle, task);
        }
        // The exchanges of one graph were checked against each other during capture.
        if let (Some(first), Some(last)) = (exchanges.first(), exchanges.last()) {
            self.alone(context, *first, *last)?;
        }
        let all: Vec<TaskId> = tasks.into_values().chain(start).collect();
        let end = self.tasks.add(context, Op::Join, &all);
        self.clock(end, &all);
        self.exec(exec)?.last = Some(end);
        self.stream(on)?.tail = vec![end];
        Ok(())
    }
}
