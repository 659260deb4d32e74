//! Modules, and what launches their kernels; copies and fills; what is waited for.

use crate::objects::{Function, Module};
use crate::state::{Cuda, State, refuse};
use crate::tasks::Op;
use cudarc::driver::sys::{self, CUresult};
use std::ffi::{c_int, c_void};

/// Bytes of shared memory that a block may have without setting an attribute.
const SHARED: u64 = 48 << 10;

impl State {
    pub fn started(&self) -> Cuda {
        if self.initialised { Ok(()) } else { refuse(CUresult::CUDA_ERROR_NOT_INITIALIZED, "cuInit has not been called") }
    }

    pub fn has(&self, ordinal: c_int) -> Cuda {
        self.started()?;
        if (0..self.settings.gpus).contains(&ordinal) {
            return Ok(());
        }
        refuse(CUresult::CUDA_ERROR_INVALID_DEVICE, format!("there is no GPU {ordinal}"))
    }

    /// Asks for all work on a stream. Returns whether it is done.
    pub fn waited_for(&mut self, on: u64) -> Cuda<bool> {
        let stream = self.stream(on)?;
        let (tail, capture) = (stream.tail.clone(), stream.capture.as_ref().map(|c| c.0));
        if let Some(id) = capture {
            self.capture(id).spoil("a stream of it was waited for");
            return refuse(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "the stream captures: there is nothing to wait for");
        }
        self.not_while_capturing()?;
        tail.iter().for_each(|t| self.tasks.need(*t));
        let done = tail.iter().all(|t| self.tasks.is_done(*t));
        if done {
            tail.iter().for_each(|t| self.clocks.known_to_host(*t));
        }
        Ok(done)
    }

    /// Checks that a copy can be made.
    pub fn copied(&self, device: u64, host: u64, bytes: u64) -> Cuda {
        let context = self.current()?;
        self.on_device(context, device, bytes)?;
        self.host(host, bytes).map(drop)
    }

    pub fn fill(&mut self, address: u64, element: &[u8], count: usize, on: sys::CUstream) -> Cuda {
        let (context, width) = (self.current()?, element.len() as u64);
        self.on_device(context, address, count as u64 * width)?;
        if !address.is_multiple_of(width) {
            return refuse(CUresult::CUDA_ERROR_INVALID_VALUE, format!("{address:#x} is no multiple of {width}"));
        }
        self.issue(on as u64, Op::Fill { address, element: element.to_vec(), count: count as u64 })
    }

    /// Shared memory that a block can have at most.
    pub fn most_shared(&self) -> u64 {
        if self.settings.capability[0] >= 9 { 227 << 10 } else { 163 << 10 }
    }

    pub fn load(&mut self, ptx: &str) -> Cuda<u64> {
        let context = self.current()?;
        self.not_while_capturing()?;
        if ptx.starts_with("\x7fELF") {
            return refuse(CUresult::CUDA_ERROR_NOT_SUPPORTED, "a cubin: code of a GPU is not modelled, only PTX");
        }
        let directive = |name: &str| ptx.lines().find_map(|l| l.trim().strip_prefix(name)).map(str::trim).unwrap_or_default();
        let (version, target) = (directive(".version"), directive(".target"));
        let [major, minor] = self.settings.capability;
        let number = |s: &str| s.chars().filter(char::is_ascii_digit).collect::<String>().parse::<i32>().unwrap_or(i32::MAX);
        let (own, wanted, isa) = (10 * major + minor, number(target), number(version));
        if wanted > own || target.ends_with('a') && wanted != own {
            return refuse(CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU, format!("PTX for {target} does not run on a GPU of {major}.{minor}"));
        }
        // PTX 8.n came with CUDA 12.n, for small n.
        if isa > 80 + self.settings.driver % 1000 / 10 {
            return refuse(CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION, format!("PTX {version} is too new for the driver"));
        }
        let code = match self.context(context).device.load(ptx) {
            Ok(code) => code,
            Err(e) => return refuse(CUresult::CUDA_ERROR_INVALID_PTX, e.to_string()),
        };
        if let Some(kernel) = code.kernels().iter().find(|k| k.parameter_bytes > 4096 && isa < 81) {
            let why = format!("{} has {} bytes of parameters, for which PTX 8.1 is needed", kernel.name, kernel.parameter_bytes);
            return refuse(CUresult::CUDA_ERROR_INVALID_PTX, why);
        }
        let handle = self.handle();
        self.modules.insert(handle, Module { context, code });
        Ok(handle)
    }

    pub fn function(&mut self, module: u64, name: &str) -> Cuda<u64> {
        let context = self.current()?;
        let Some(m) = self.modules.get(&module) else {
            return refuse(CUresult::CUDA_ERROR_INVALID_HANDLE, format!("there is no module {module:#x}, or not any more"));
        };
        let Some(k) = m.code.kernel(name) else {
            return refuse(CUresult::CUDA_ERROR_NOT_FOUND, format!("the module has no kernel {name}"));
        };
        let function = Function {
            context,
            module,
            name: name.into(),
            parameters: k.parameters.clone(),
            parameter_bytes: k.parameter_bytes,
            threads: k.threads,
            threads_exact: k.threads_exact,
            shared_bytes: k.shared_bytes,
            most_shared: SHARED.saturating_sub(k.shared_bytes),
        };
        let handle = self.handle();
        self.functions.insert(handle, function);
        Ok(handle)
    }

    pub fn launchable(&mut self, function: u64) -> Cuda<&mut Function> {
        let context = self.current()?;
        match self.functions.get_mut(&function) {
            Some(f) if f.context == context => Ok(f),
            _ => refuse(CUresult::CUDA_ERROR_INVALID_HANDLE, format!("there is no function {function:#x} in this context")),
        }
    }

    /// The launch of a kernel with one pointer for each parameter. Drivers misread one buffer of all parameters where
    /// the first is aligned to more than 16 bytes.
    pub fn launch(
        &mut self,
        function: u64,
        grid: [u32; 3],
        threads: [u32; 3],
        shared: u32,
        each: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) -> Cuda<Op> {
        let f = self.launchable(function)?;
        let no = |why: String| refuse(CUresult::CUDA_ERROR_INVALID_VALUE, format!("{}: {why}", f.name));
        if !extra.is_null() || each.is_null() {
            return no("only parameters by their places are modelled, not packed ones".into());
        }
        let mut parameters = vec![0; f.parameter_bytes as usize];
        for (k, (at, bytes)) in f.parameters.iter().enumerate() {
            // SAFETY: the caller gives as many places as the kernel has parameters.
            let place = unsafe { *each.add(k) };
            if place.is_null() {
                return no(format!("parameter {k} has no place"));
            }
            // SAFETY: there are as many bytes as the parameter is long.
            let given = unsafe { std::slice::from_raw_parts(place.cast_const().cast::<u8>(), *bytes as usize) };
            parameters[*at as usize..][..given.len()].copy_from_slice(given);
        }
        if u64::from(shared) > f.most_shared {
            return no(format!("{shared} bytes of dynamic shared memory, where {} are allowed", f.most_shared));
        }
        let block = threads.iter().map(|t| u64::from(*t)).product::<u64>();
        let most = f.threads.map_or(1024, |t| t.iter().map(|t| u64::from(*t)).product());
        if !(1..=most).contains(&block) || f.threads_exact && f.threads != Some(threads) {
            return no(format!("blocks of {threads:?} threads, where there may be {most}"));
        }
        if grid.contains(&0) || grid[0] > i32::MAX as u32 || grid[1] > 65_535 || grid[2] > 65_535 {
            return no(format!("a grid of {grid:?} blocks"));
        }
        Ok(Op::Launch { function, grid, threads, shared, parameters })
    }
}
