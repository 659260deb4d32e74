//! What handles stand for, and what memory there is.

use crate::capture::Capture;
use crate::state::{Cuda, State, refuse, say};
use crate::tasks::TaskId;
use crate::touched::AccessMap;
use cudarc::driver::sys::CUresult;
use emulator::Device;
use std::collections::BTreeMap;

/// A GPU's primary context.
pub struct Context {
    pub ordinal: i32,
    /// How often the context was retained and not released.
    pub uses: u32,
    pub device: Device,
    /// Bytes by address.
    pub allocations: BTreeMap<u64, u64>,
    /// The last accesses to device memory.
    pub touched: AccessMap,
    /// The error after which nothing is done in the context any more.
    pub failed: Option<CUresult>,
}

pub struct Module {
    pub context: u64,
    pub code: emulator::Module,
}

pub struct Function {
    pub context: u64,
    pub module: u64,
    pub name: String,
    /// Offset and bytes of each parameter, and the bytes of all.
    pub parameters: Vec<(u64, u64)>,
    pub parameter_bytes: u64,
    /// The most threads of a block.
    pub threads: Option<[u32; 3]>,
    pub threads_exact: bool,
    /// Static shared memory of a block.
    pub shared_bytes: u64,
    /// The most dynamic shared memory of a launch.
    pub most_shared: u64,
}

impl Function {
    /// Registers of a thread if one block had all of a multiprocessor.
    pub fn registers(&self) -> i32 {
        let threads = self.threads.map_or(1024, |[x, y, z]| x * y * z).max(1);
        (65_536 / threads / 8 * 8).min(255) as i32
    }
}

pub struct Stream {
    pub context: u64,
    /// The tasks after which the next one on the stream comes.
    pub tail: Vec<TaskId>,
    /// The capture that the stream takes part in, and the nodes after which its next one comes.
    pub capture: Option<(u64, Vec<u64>)>,
}

pub enum Recorded {
    Never,
    Tasks(Vec<TaskId>),
    /// Recorded in a capture, after these nodes.
    Nodes(u64, Vec<u64>),
}

pub struct Event {
    pub context: u64,
    pub last: Recorded,
}

/// Pinned memory.
pub struct Host {
    pub context: u64,
    pub bytes: u64,
    /// The memory, if the driver allocated it; `None` if the program lent it.
    data: Option<*mut [u64]>,
}

// SAFETY: plain memory that is owned.
unsafe impl Send for Host {}

impl Drop for Host {
    fn drop(&mut self) {
        if let Some(data) = self.data {
            // SAFETY: it came from a box, and nobody may touch it any more.
            drop(unsafe { Box::from_raw(data) });
        }
    }
}

/// Whether a range lies within one of the ranges by address.
fn lies_in(all: &BTreeMap<u64, u64>, address: u64, bytes: u64) -> bool {
    let near = all.range(..=address).next_back();
    near.is_some_and(|(start, size)| address - start <= *size && bytes <= size - (address - start))
}

/// The greatest priority of a stream; the least is 0.
pub const GREATEST_PRIORITY: i32 = -5;

impl State {
    /// A new stream of the current context.
    pub fn new_stream(&mut self, flags: u32) -> Cuda<u64> {
        let context = self.current()?;
        if flags != 1 {
            return refuse(CUresult::CUDA_ERROR_NOT_SUPPORTED, "streams that wait for the default stream are not modelled");
        }
        let handle = self.handle();
        self.streams.insert(handle, Stream { context, tail: vec![], capture: None });
        Ok(handle)
    }

    pub fn context(&mut self, handle: u64) -> &mut Context {
        self.contexts.get_mut(&handle).expect("invariant: contexts outlive what is in them")
    }

    /// A stream of the current context.
    pub fn stream(&mut self, handle: u64) -> Cuda<&mut Stream> {
        let context = self.current()?;
        if handle <= 2 {
            return refuse(CUresult::CUDA_ERROR_NOT_SUPPORTED, "the default stream, which waits for all others, is not modelled");
        }
        match self.streams.get_mut(&handle) {
            Some(stream) if stream.context == context => Ok(stream),
            Some(_) => refuse(CUresult::CUDA_ERROR_INVALID_HANDLE, "the stream is of another context than this thread's"),
            None => refuse(CUresult::CUDA_ERROR_INVALID_HANDLE, format!("there is no stream {handle:#x}, or not any more")),
        }
    }

    pub fn event(&mut self, handle: u64) -> Cuda<&mut Event> {
        let context = self.current()?;
        match self.events.get_mut(&handle) {
            Some(event) if event.context == context => Ok(event),
            Some(_) => refuse(CUresult::CUDA_ERROR_INVALID_HANDLE, "the event is of another context than this thread's"),
            None => refuse(CUresult::CUDA_ERROR_INVALID_HANDLE, format!("there is no event {handle:#x}, or not any more")),
        }
    }

    /// Checks that device memory lies within one allocation.
    pub fn on_device(&self, context: u64, address: u64, bytes: u64) -> Cuda {
        let allocations = &self.contexts[&context].allocations;
        if lies_in(allocations, address, bytes) {
            return Ok(());
        }
        let why = format!("{bytes} bytes at {address:#x} of the GPU's memory do not lie within an allocation");
        refuse(CUresult::CUDA_ERROR_INVALID_VALUE, why)
    }

    /// Pinned memory, as a slice that lives as long as nobody frees it.
    pub fn host(&self, address: u64, bytes: u64) -> Cuda<&'static mut [u8]> {
        let near = self.hosts.range(..=address).next_back();
        if !near.is_some_and(|(start, h)| address - start <= h.bytes && bytes <= h.bytes - (address - start)) {
            let why = format!("{bytes} bytes at {address:#x} of the host's memory are not pinned, or not any more");
            return refuse(CUresult::CUDA_ERROR_INVALID_VALUE, why);
        }
        // SAFETY: within an allocation; the program leaves alone what copies touch that are under way, which is what
        // is being checked.
        Ok(unsafe { std::slice::from_raw_parts_mut(address as *mut u8, bytes as usize) })
    }

    /// Refuses a call that a thread may not make while it captures. The capture is then invalid.
    pub fn not_while_capturing(&mut self) -> Cuda {
        let thread = std::thread::current().id();
        match self.captures.values_mut().find(|c| c.forbids(thread)) {
            Some(capture) => {
                capture.spoil("a call that may synchronise was made while it was under way");
                refuse(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "not allowed while a stream captures")
            }
            None => Ok(()),
        }
    }

    pub fn capture(&mut self, id: u64) -> &mut Capture {
        self.captures.get_mut(&id).expect("invariant: streams and events leave a capture when it ends")
    }

    pub fn allocate(&mut self, bytes: u64) -> Cuda<u64> {
        let context = self.current()?;
        self.not_while_capturing()?;
        if bytes == 0 {
            return refuse(CUresult::CUDA_ERROR_INVALID_VALUE, "nothing to allocate");
        }
        let c = self.context(context);
        if c.allocations.values().sum::<u64>() + bytes > MEMORY {
            return refuse(CUresult::CUDA_ERROR_OUT_OF_MEMORY, "");
        }
        let address = c.device.allocate(bytes);
        c.allocations.insert(address, bytes);
        Ok(address)
    }

    pub fn free(&mut self, address: u64) -> Cuda {
        let context = self.current()?;
        self.not_while_capturing()?;
        if self.tasks.iter().any(|(_, t)| t.context == context) {
            return refuse(CUresult::CUDA_ERROR_INVALID_VALUE, "memory of the GPU is freed while work is under way");
        }
        let c = self.context(context);
        match c.allocations.remove(&address) {
            Some(bytes) => {
                c.touched.forget(address, address + bytes);
                c.device.free(address);
                Ok(())
            }
            None => refuse(CUresult::CUDA_ERROR_INVALID_VALUE, format!("{address:#x} is no allocation of this context, or not any more")),
        }
    }

    /// Allocates pinned memory, which nobody has written.
    pub fn allocate_host(&mut self, bytes: u64) -> Cuda<u64> {
        let context = self.current()?;
        self.not_while_capturing()?;
        if bytes == 0 {
            return refuse(CUresult::CUDA_ERROR_INVALID_VALUE, "nothing to allocate");
        }
        let data = Box::into_raw(vec![u64::MAX; bytes.div_ceil(8) as usize].into_boxed_slice());
        let address = data.cast::<u8>() as u64;
        self.hosts.insert(address, Host { context, bytes, data: Some(data) });
        Ok(address)
    }

    /// Pins memory of the program's own.
    pub fn register(&mut self, address: u64, bytes: u64) -> Cuda {
        let context = self.current()?;
        self.not_while_capturing()?;
        if address == 0 || bytes == 0 {
            return refuse(CUresult::CUDA_ERROR_INVALID_VALUE, "nothing to register");
        }
        if self.hosts.iter().any(|(start, h)| *start < address + bytes && address < start + h.bytes) {
            let why = format!("of {bytes} bytes at {address:#x} some are pinned already");
            return refuse(CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, why);
        }
        self.hosts.insert(address, Host { context, bytes, data: None });
        Ok(())
    }

    /// Frees pinned memory, or unpins memory of the program's own.
    pub fn free_host(&mut self, address: u64, lent: HostMemoryOwner) -> Cuda {
        self.current()?;
        self.not_while_capturing()?;
        let (was, what, code) = match lent {
            HostMemoryOwner::ByProgram => (false, "registered", CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED),
            HostMemoryOwner::ByDriver => (true, "pinned", CUresult::CUDA_ERROR_INVALID_VALUE),
        };
        let Some(host) = self.hosts.get(&address).filter(|h| h.data.is_some() == was) else {
            return refuse(code, format!("{address:#x} is no {what} memory, or not any more"));
        };
        let range = address..address + host.bytes;
        let touches = |(at, bytes): (u64, u64)| at < range.end && range.start < at + bytes;
        if self.tasks.iter().any(|(_, t)| t.op.host().is_some_and(touches)) {
            return refuse(CUresult::CUDA_ERROR_INVALID_VALUE, "pinned memory is freed while a copy that uses it is under way");
        }
        if self.execs.values().flat_map(|e| e.nodes.values()).any(|n| n.op.host().is_some_and(touches)) {
            return refuse(CUresult::CUDA_ERROR_INVALID_VALUE, "pinned memory is freed that a graph copies from or to");
        }
        self.hosts.remove(&address);
        self.on_host.forget(range.start, range.end);
        Ok(())
    }

    /// Releases a use of a GPU's context. With the last use all that is in it is gone.
    pub fn release(&mut self, ordinal: i32) -> Cuda {
        let Some(handle) = self.primary.get(&ordinal).copied() else {
            return refuse(CUresult::CUDA_ERROR_INVALID_CONTEXT, "its context has not been retained");
        };
        let context = self.context(handle);
        context.uses -= 1;
        if context.uses > 0 {
            return Ok(());
        }
        let failed = context.failed.is_some();
        let count = |all: usize, what: &str| (all > 0).then(|| format!("{all} {what}"));
        let of = |c: &u64| *c == handle;
        let left = [
            count(self.tasks.iter().filter(|(_, t)| of(&t.context)).count(), "pieces of work that are not done"),
            count(self.contexts[&handle].allocations.len(), "allocations"),
            count(self.hosts.values().filter(|h| of(&h.context)).count(), "allocations of pinned memory"),
            count(self.streams.values().filter(|s| of(&s.context)).count(), "streams"),
            count(self.events.values().filter(|e| of(&e.context)).count(), "events"),
            count(self.graphs.values().filter(|g| of(&g.context)).count(), "graphs"),
            count(self.execs.values().filter(|e| of(&e.context)).count(), "instantiated graphs"),
            count(self.comms.values().filter(|c| of(&c.context)).count(), "communicators"),
        ];
        let left: Vec<String> = left.into_iter().flatten().collect();
        self.primary.remove(&ordinal);
        self.tasks.forget(handle);
        self.contexts.remove(&handle);
        self.modules.retain(|_, m| m.context != handle);
        self.functions.retain(|_, f| f.context != handle);
        self.streams.retain(|_, s| s.context != handle);
        self.events.retain(|_, e| e.context != handle);
        self.graphs.retain(|_, g| g.context != handle);
        self.execs.retain(|_, e| e.context != handle);
        let pinned = self.hosts.iter().filter(|(_, h)| of(&h.context)).map(|(at, h)| (*at, at + h.bytes));
        pinned.for_each(|(start, end)| self.on_host.forget(start, end));
        self.hosts.retain(|_, h| h.context != handle);
        let tasks = &self.tasks;
        self.open.retain(|id, _| !tasks.is_done(*id));
        // After a failure, the program cannot free things in order.
        if !left.is_empty() && !failed {
            say(&format!("the context is given back with {}", left.join(", ")));
        }
        Ok(())
    }
}

/// Who owns pinned memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostMemoryOwner {
    ByDriver,
    ByProgram,
}

/// Bytes of a GPU's memory.
pub const MEMORY: u64 = 80 << 30;
