//! All that a process knows of its GPUs, behind one lock, and the thread that does what they are asked for.

use crate::capture::{Capture, Exec, Graph};
use crate::clocks::Clocks;
use crate::comm::Comm;
use crate::exchange::OpenExchange;
use crate::mesh::Mesh;
use crate::objects::{Context, Event, Function, Host, Module, Stream};
use crate::settings::Settings;
use crate::tasks::{Op, TaskId, Tasks};
use crate::touched::AccessMap;
use crate::watching::WorkAccesses;
use cudarc::driver::sys::CUresult;
use cudarc::nccl::sys::ncclResult_t;
use emulator::{Launch, LaunchError};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::ffi::c_void;
use std::fs::OpenOptions;
use std::io::Write;
use std::mem::transmute;
use std::os::unix::net::UnixListener;
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

/// The beginning of every line that this library writes.
pub const MARK: &str = "emulated driver: ";

/// The time after which a waiting thread looks again.
const TICK: Duration = Duration::from_millis(100);

/// Why a call is refused.
#[derive(Debug)]
pub struct Refused<C> {
    pub code: C,
    /// The reason; empty where the refusal is no mistake.
    pub why: String,
}

pub type Cuda<T = ()> = Result<T, Refused<CUresult>>;
pub type Nccl<T = ()> = Result<T, Refused<ncclResult_t>>;

pub fn refuse<T, C>(code: C, why: impl Into<String>) -> Result<T, Refused<C>> {
    Err(Refused { code, why: why.into() })
}

pub struct State {
    pub settings: Settings,
    pub initialised: bool,
    /// Waits of streams for events that were asked for.
    pub waits: u64,
    /// How long this process had run when it was looked at last. While the process is stopped nobody waits in vain.
    pub clock: Duration,
    looked: Instant,
    /// Handles and numbers are never used twice, so what is gone is known as such.
    next: u64,
    pub contexts: BTreeMap<u64, Context>,
    /// By the number of the GPU.
    pub primary: HashMap<i32, u64>,
    pub modules: BTreeMap<u64, Module>,
    pub functions: BTreeMap<u64, Function>,
    pub streams: BTreeMap<u64, Stream>,
    pub events: BTreeMap<u64, Event>,
    pub captures: BTreeMap<u64, Capture>,
    pub graphs: BTreeMap<u64, Graph>,
    pub execs: BTreeMap<u64, Exec>,
    /// By address.
    pub hosts: BTreeMap<u64, Host>,
    pub tasks: Tasks,
    pub clocks: Clocks,
    /// The number of clocks at which old ones are forgotten.
    pub clocks_kept: usize,
    /// What work did to pinned memory.
    pub on_host: AccessMap,
    pub comms: BTreeMap<u64, Comm>,
    pub meshes: BTreeMap<u64, Mesh>,
    /// The exchange that was issued last, by context.
    pub exchanges: HashMap<u64, TaskId>,
    /// Exchanges that have been begun.
    pub open: BTreeMap<TaskId, OpenExchange>,
    /// The sockets of ids that this process made.
    pub roots: Vec<UnixListener>,
}

struct Shared {
    state: Mutex<State>,
    moved: Condvar,
}

thread_local! {
    /// The context of a thread; 0 for none.
    pub static CURRENT: Cell<u64> = const { Cell::new(0) };
    static SAID: RefCell<String> = const { RefCell::new(String::new()) };
}

/// The reason that this thread's last refused call gave.
pub fn last_words() -> String {
    SAID.with_borrow(String::clone)
}

/// Writes a line; also to a file (`EMULATED_DRIVER_LOG`), as programs may keep their processes' errors to themselves.
pub fn say(what: &str) {
    let line = format!("{MARK}{what}\n");
    eprint!("{line}");
    if let Some(log) = std::env::var_os("EMULATED_DRIVER_LOG") {
        let written = OpenOptions::new().create(true).append(true).open(&log).and_then(|mut f| f.write_all(line.as_bytes()));
        if let Err(e) = written {
            eprintln!("{MARK}{}: {e}", log.display());
        }
    }
    SAID.set(what.to_string());
}

fn shared() -> &'static Shared {
    static SHARED: OnceLock<Shared> = OnceLock::new();
    SHARED.get_or_init(|| {
        std::thread::spawn(work);
        let settings = Settings::new(|name| std::env::var(name).ok());
        Shared { state: Mutex::new(State::new(settings)), moved: Condvar::new() }
    })
}

/// Does tasks that are needed, for ever.
fn work() {
    let mut state = lock();
    loop {
        if state.step() {
            // Unlocks the state so that calls can get it.
            drop(state);
            shared().moved.notify_all();
            state = lock();
        } else {
            state = wait(state);
        }
    }
}

pub fn lock() -> MutexGuard<'static, State> {
    shared().state.lock().unwrap_or_else(|held| held.into_inner())
}

/// Waits until something changes, or for a little while.
pub fn wait(state: MutexGuard<'static, State>) -> MutexGuard<'static, State> {
    shared().moved.wait_timeout(state, TICK).unwrap_or_else(|held| held.into_inner()).0
}

pub fn notify() {
    shared().moved.notify_all();
}

/// Answers a call of the C interface.
pub fn answer<C>(name: &str, good: C, call: impl FnOnce(&mut State) -> Result<(), Refused<C>>) -> C {
    let outcome = call(&mut lock());
    notify();
    told(name, good, outcome)
}

pub fn told<C>(name: &str, good: C, outcome: Result<(), Refused<C>>) -> C {
    match outcome {
        Ok(()) => good,
        Err(Refused { code, why }) => {
            if !why.is_empty() {
                say(&format!("{name}: {why}"));
            }
            code
        }
    }
}

impl State {
    fn new(settings: Settings) -> State {
        let seed = settings.seed;
        State {
            settings,
            initialised: false,
            waits: 0,
            clock: Duration::ZERO,
            looked: Instant::now(),
            next: 1,
            contexts: BTreeMap::new(),
            primary: HashMap::new(),
            modules: BTreeMap::new(),
            functions: BTreeMap::new(),
            streams: BTreeMap::new(),
            events: BTreeMap::new(),
            captures: BTreeMap::new(),
            graphs: BTreeMap::new(),
            execs: BTreeMap::new(),
            hosts: BTreeMap::new(),
            tasks: Tasks::new(seed),
            clocks: Clocks::default(),
            clocks_kept: 0,
            on_host: AccessMap::default(),
            comms: BTreeMap::new(),
            meshes: BTreeMap::new(),
            exchanges: HashMap::new(),
            open: BTreeMap::new(),
            roots: vec![],
        }
    }

    pub fn handle(&mut self) -> u64 {
        self.next += 1;
        0x7000_0000_0000 + 16 * self.next
    }

    /// The calling thread's context.
    pub fn current(&self) -> Cuda<u64> {
        if !self.initialised {
            return refuse(CUresult::CUDA_ERROR_NOT_INITIALIZED, "cuInit has not been called");
        }
        let handle = CURRENT.get();
        if handle == 0 {
            return refuse(CUresult::CUDA_ERROR_INVALID_CONTEXT, "no context is current to this thread");
        }
        let Some(context) = self.contexts.get(&handle) else {
            return refuse(CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED, "this thread's context has been given back");
        };
        match context.failed {
            // The failure was reported when it happened.
            Some(code) => refuse(code, ""),
            None => Ok(handle),
        }
    }

    /// Does one step of what is needed. Returns whether there was one.
    fn step(&mut self) -> bool {
        self.clock += self.looked.elapsed().min(2 * TICK);
        self.looked = Instant::now();
        self.heed();
        let open: Vec<TaskId> = self.open.keys().copied().collect();
        if open.into_iter().any(|id| self.exchange_ends(id)) {
            return true;
        }
        let Some(id) = self.tasks.take() else {
            self.complain();
            return false;
        };
        let task = self.tasks.get(id).expect("invariant: it was taken");
        let (context, op) = (task.context, task.op.clone());
        match self.execute(id, context, &op) {
            Ok(true) => self.tasks.finish(id),
            Ok(false) => {}
            Err(Refused { code, why }) => self.fails(context, code, &why),
        }
        true
    }

    /// Marks a context as failed: it does nothing any more.
    pub fn fails(&mut self, context: u64, code: CUresult, why: &str) {
        say(why);
        if let Some(c) = self.contexts.get_mut(&context) {
            c.failed = Some(code);
        }
        self.tasks.forget(context);
        let tasks = &self.tasks;
        self.open.retain(|id, _| !tasks.is_done(*id));
    }

    /// Does a task, or begins one that others take part in. Returns whether it is done.
    fn execute(&mut self, id: TaskId, context: u64, op: &Op) -> Cuda<bool> {
        let (touches, name) = self.touches(op);
        self.watch(id, context, &touches, &name)?;
        let device = &self.contexts[&context].device;
        let outside = |e: LaunchError| Refused { code: CUresult::CUDA_ERROR_ILLEGAL_ADDRESS, why: e.to_string() };
        match op {
            Op::Launch { function, grid, threads, shared, parameters } => {
                let function = &self.functions[function];
                let module = &self.modules[&function.module];
                let kernel = module.code.kernel(&function.name).expect("invariant: the function was found in it");
                let launch = Launch { grid: *grid, threads: *threads, shared: *shared };
                match device.launch_watched(kernel, launch, parameters) {
                    Ok((_, ranges)) => self.watch(id, context, &WorkAccesses::of_kernel(&ranges), &name)?,
                    Err(e) => return refuse(CUresult::CUDA_ERROR_LAUNCH_FAILED, e.to_string()),
                }
            }
            Op::Fill { address, element, count } => device.write(*address, &element.repeat(*count as usize)).map_err(outside)?,
            Op::ToDevice { to, from, bytes } => {
                let data = self.host(*from, *bytes)?;
                device.write(*to, data).map_err(outside)?;
            }
            Op::ToHost { to, from, bytes } => {
                let data: &mut [u8] = self.host(*to, *bytes)?;
                device.read(*from, data).map_err(outside)?;
            }
            Op::Copy { to, from, bytes } => {
                let mut data = vec![0; *bytes as usize];
                device.read(*from, &mut data).and_then(|()| device.write(*to, &data)).map_err(outside)?;
            }
            Op::Call { function, data } => {
                // SAFETY: the program gave both for this; a function that calls the driver, which it must not, waits
                // for ever.
                unsafe { transmute::<usize, unsafe extern "C" fn(*mut c_void)>(*function as usize)(*data as *mut c_void) };
                // The function may tell other threads that work is over.
                self.clocks.known_to_host(id);
            }
            Op::Exchange { comm, calls } => {
                self.exchange_begins(id, *comm, calls)?;
                return Ok(false);
            }
            Op::Join => {}
        }
        Ok(true)
    }
}
