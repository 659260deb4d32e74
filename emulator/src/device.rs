//! A device: memory, modules, launches.

use crate::block::{Block, Options, Statistics, mixed};
use crate::decode::{self, Kernel};
use crate::fault::{LaunchError, LoadError};
use crate::launch_races::LaunchAccesses;
use crate::memory::Memory;
use crate::syntax::{self, Number};
use crate::touched::Ranges;
use crate::warp::LaunchGeometry;
use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Shared memory that a block can have at most: that of sm_90.
const MOST_SHARED: u64 = 227 * 1024;
const MOST_THREADS: u64 = 1024;

/// Executes kernels on memory of its own.
#[derive(Default)]
pub struct Device {
    memory: Memory,
    /// How kernels run on it.
    pub options: Options,
}

/// The kernels of a module.
#[derive(Clone, Debug)]
pub struct Module {
    kernels: Vec<Kernel>,
}

impl Module {
    /// Finds a kernel by its name.
    pub fn kernel(&self, name: &str) -> Option<&Kernel> {
        self.kernels.iter().find(|k| k.name == name)
    }

    /// All kernels, in the order of the text.
    pub fn kernels(&self) -> &[Kernel] {
        &self.kernels
    }
}

/// How many blocks of how many threads, and bytes of dynamic shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Blocks along x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block along x, y and z.
    pub threads: [u32; 3],
    /// Bytes of dynamic shared memory of each block.
    pub shared: u32,
}

/// The order in which blocks begin: the given blocks or all of them, shuffled by the seed. `None` is the order of
/// their numbers.
fn order(some: Option<&[usize]>, blocks: usize, seed: u64) -> Option<Cow<'_, [usize]>> {
    if seed == 0 {
        return some.map(Cow::Borrowed);
    }
    let mut order: Vec<usize> = some.map_or_else(|| (0..blocks).collect(), <[usize]>::to_vec);
    order.sort_by_cached_key(|b| mixed(seed ^ (*b as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15)));
    Some(Cow::Owned(order))
}

impl Device {
    /// A device on which nothing is allocated.
    pub fn new(options: Options) -> Device {
        Device { memory: Memory::default(), options }
    }

    /// Reserves memory, filled with `0xFF`; its address. Nothing lies next to it.
    pub fn allocate(&mut self, bytes: u64) -> u64 {
        self.memory.allocate(bytes)
    }

    /// Takes memory of this machine as its own: its address. Nothing lies next to it.
    ///
    /// # Safety
    /// It is there, aligned to 8 bytes, and nobody else writes it, until the device is gone. What kernels are not to
    /// write need not be writable.
    pub unsafe fn lend(&mut self, memory: *const u8, bytes: u64) -> u64 {
        // SAFETY: as promised here.
        unsafe { self.memory.lend(memory, bytes) }
    }

    /// Gives memory back; whether it was an allocation's start. Its addresses are not used again.
    pub fn free(&mut self, address: u64) -> bool {
        self.memory.free(address)
    }

    /// Copies to device memory.
    ///
    /// # Errors
    /// If the range is not within one allocation.
    pub fn write(&self, address: u64, data: &[u8]) -> Result<(), LaunchError> {
        self.memory.write(address, data).map_err(|w| LaunchError::Arguments { kernel: "copy to the device".into(), message: w.to_string() })
    }

    /// Copies from device memory.
    ///
    /// # Errors
    /// If the range is not within one allocation.
    pub fn read(&self, address: u64, out: &mut [u8]) -> Result<(), LaunchError> {
        self.memory.read(address, out).map_err(|w| LaunchError::Arguments { kernel: "copy from the device".into(), message: w.to_string() })
    }

    /// Decodes a module, and gives its variables memory.
    ///
    /// # Errors
    /// The first line that is not PTX or not supported.
    pub fn load(&mut self, ptx: &str) -> Result<Module, LoadError> {
        let module = syntax::parse(ptx)?;
        let mut globals = HashMap::new();
        for v in module.variables.iter().filter(|v| v.space == "global" || v.space == "const") {
            let element =
                decode::element_bytes(&v.element).ok_or_else(|| LoadError { line: v.line, message: format!("`{}` has no size", v.name) })?;
            let count = v.count.unwrap_or(v.initial.len() as u64);
            let address = self.memory.allocate(element * count);
            let mut bytes = vec![0; (element * count) as usize];
            for (k, n) in v.initial.iter().enumerate().take(count as usize) {
                let value = match n {
                    Number::Int(n) => (*n as u64).to_le_bytes(),
                    Number::F32(bits) => u64::from(*bits).to_le_bytes(),
                    Number::F64(bits) => bits.to_le_bytes(),
                };
                bytes[k * element as usize..][..element as usize].copy_from_slice(&value[..element as usize]);
            }
            self.memory.write(address, &bytes).expect("invariant: it was just allocated");
            globals.insert(v.name.clone(), address);
        }
        Ok(Module { kernels: module.kernels.iter().map(|k| decode::kernel(&module, k, &globals)).collect::<Result<_, _>>()? })
    }

    /// Runs a kernel to its end. `parameters` are its parameters as the ABI lays them out: each aligned to its size.
    ///
    /// # Errors
    /// What does not fit the kernel; or what it did wrong, of the first block that did.
    pub fn launch(&self, kernel: &Kernel, launch: Launch, parameters: &[u8]) -> Result<Statistics, LaunchError> {
        self.launch_some(kernel, launch, parameters, None)
    }

    /// The same, and what of global memory it touched: nothing if that is not watched
    /// ([`Options::global_races`]).
    ///
    /// # Errors
    /// As of [`Device::launch`].
    pub fn launch_watched(&self, kernel: &Kernel, launch: Launch, parameters: &[u8]) -> Result<(Statistics, Ranges), LaunchError> {
        let launch_accesses = LaunchAccesses::default();
        let statistics = self.launch_blocks(kernel, launch, parameters, None, &launch_accesses)?;
        Ok((statistics, launch_accesses.ranges()))
    }

    /// The same, of these blocks alone, by number; all of them if none is named.
    ///
    /// # Errors
    /// As of [`Device::launch`].
    pub fn launch_some(&self, kernel: &Kernel, launch: Launch, parameters: &[u8], some: Option<&[usize]>) -> Result<Statistics, LaunchError> {
        self.launch_blocks(kernel, launch, parameters, some, &LaunchAccesses::default())
    }

    fn launch_blocks(
        &self,
        kernel: &Kernel,
        launch: Launch,
        parameters: &[u8],
        some: Option<&[usize]>,
        launch_accesses: &LaunchAccesses,
    ) -> Result<Statistics, LaunchError> {
        let refuse = |message: String| Err(LaunchError::Arguments { kernel: kernel.name.clone(), message });
        if parameters.len() as u64 != kernel.parameter_bytes {
            return refuse(format!("{} bytes of parameters instead of {}", parameters.len(), kernel.parameter_bytes));
        }
        let threads: u64 = launch.threads.iter().map(|t| u64::from(*t)).product();
        if threads == 0 || threads > MOST_THREADS {
            return refuse(format!("blocks have 1 to {MOST_THREADS} threads, not {threads}"));
        }
        let most: u64 = kernel.threads.map_or(MOST_THREADS, |t| t.iter().map(|t| u64::from(*t)).product());
        if threads > most || kernel.threads_exact && kernel.threads != Some(launch.threads) {
            return refuse(format!("{threads} threads a block; the kernel is compiled for {most}"));
        }
        let shared = kernel.shared_bytes + u64::from(launch.shared);
        if shared > MOST_SHARED {
            return refuse(format!("{shared} bytes of shared memory a block are more than {MOST_SHARED}"));
        }
        let blocks = launch.grid.iter().map(|n| *n as usize).product::<usize>();
        if blocks == 0 {
            return refuse("the grid is empty".into());
        }
        let ranks = kernel.cluster as usize;
        if !launch.grid[0].is_multiple_of(kernel.cluster) {
            return refuse(format!("{} blocks along x are no multiple of {ranks}, the blocks of a cluster", launch.grid[0]));
        }
        // A cluster runs as a whole: `some` and `blocks` now count clusters.
        let some = some.map(|some| some.iter().map(|b| b / ranks).collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>());
        let (some, blocks) = (some.as_deref(), blocks / ranks);
        let (next, order) = (AtomicUsize::new(0), order(some, blocks, self.options.seed));
        // This keeps the first faulty block in order, so that the same fault is reported however the threads run.
        let found: Mutex<(usize, Option<Box<crate::fault::Fault>>)> = Mutex::new((usize::MAX, None));
        let total = Mutex::new(Statistics::default());
        let work = || {
            loop {
                let k = next.fetch_add(1, Ordering::Relaxed);
                let Some(b) = order.as_ref().map_or(Some(k), |order| order.get(k).copied()) else { return };
                if b >= blocks || k > found.lock().expect("invariant: no thread panics here").0 {
                    return;
                }
                let mut place =
                    LaunchGeometry { block: [0; 3], ranks: kernel.cluster, grid: launch.grid, threads: launch.threads, dynamic: launch.shared };
                place.block = place.of((b * ranks) as u32);
                match Block::new(kernel, &self.memory, parameters, self.options, place, launch_accesses).run() {
                    Ok(s) => {
                        total.lock().expect("invariant: no thread panics here").add(&s);
                    }
                    Err(fault) => {
                        let mut found = found.lock().expect("invariant: no thread panics here");
                        if k < found.0 {
                            *found = (k, Some(fault));
                        }
                    }
                }
            }
        };
        let workers = self.options.threads.clamp(1, some.map_or(blocks, <[usize]>::len).max(1));
        if workers == 1 {
            work();
        } else {
            std::thread::scope(|s| {
                for _ in 0..workers {
                    s.spawn(work);
                }
            });
        }
        let fault = found.into_inner().expect("invariant: no thread panics here").1;
        match fault {
            Some(f) => Err(LaunchError::Fault(f)),
            None => Ok(total.into_inner().expect("invariant: no thread panics here")),
        }
    }
}
