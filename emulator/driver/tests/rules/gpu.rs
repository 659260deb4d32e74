//! A GPU for each test, and calls in few words.

use cudarc::driver::sys::{self, CUresult};
use emulated_driver::driver::*;
use emulated_driver::last_words;
use std::ffi::{CString, c_void};
use std::ptr::null_mut;
use std::sync::Once;
use std::sync::atomic::{AtomicI32, Ordering};

pub const GOOD: CUresult = CUresult::CUDA_SUCCESS;

/// Doubles a number per thread.
pub const TWICE: &str = "
.version 8.0
.target sm_80
.address_size 64
.visible .entry twice(.param .u64 p) {
    .reg .b32 %r<3>; .reg .b64 %d<4>;
    ld.param.u64 %d1, [p];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %d2, %r1, 4;
    add.s64 %d3, %d1, %d2;
    ld.global.u32 %r2, [%d3];
    add.s32 %r2, %r2, %r2;
    st.global.u32 [%d3], %r2;
    ret;
}";

/// Checks that a call was refused with this code and these words.
#[track_caller]
pub fn refused(got: CUresult, code: CUresult, words: &str) {
    assert_eq!(got, code, "{}", last_words());
    assert!(last_words().contains(words), "{}", last_words());
}

/// A GPU that no other test has, whose context is this thread's.
pub struct Gpu {
    pub ordinal: i32,
    pub context: u64,
}

impl Gpu {
    pub fn new() -> Gpu {
        static START: Once = Once::new();
        static NEXT: AtomicI32 = AtomicI32::new(0);
        START.call_once(|| {
            // SAFETY: what reads the environment takes the same lock, as all is Rust.
            unsafe {
                std::env::set_var("EMULATED_GPUS", "1000");
                std::env::set_var("EMULATED_NCCL_PATIENCE", "5");
            }
        });
        let ordinal = NEXT.fetch_add(1, Ordering::Relaxed);
        let mut context = null_mut();
        unsafe {
            assert_eq!(cuInit(0), GOOD);
            assert_eq!(cuDevicePrimaryCtxRetain(&mut context, ordinal), GOOD);
        }
        let gpu = Gpu { ordinal, context: context as u64 };
        gpu.enter();
        gpu
    }

    pub fn enter(&self) {
        assert_eq!(unsafe { cuCtxSetCurrent(self.context as _) }, GOOD);
    }

    pub fn stream(&self) -> u64 {
        let mut new = null_mut();
        assert_eq!(unsafe { cuStreamCreate(&mut new, 1) }, GOOD);
        new as u64
    }

    pub fn event(&self) -> u64 {
        let mut new = null_mut();
        assert_eq!(unsafe { cuEventCreate(&mut new, 2) }, GOOD);
        new as u64
    }

    pub fn allocate(&self, bytes: usize) -> u64 {
        let mut new = 0;
        assert_eq!(unsafe { cuMemAlloc_v2(&mut new, bytes) }, GOOD);
        new
    }

    pub fn pinned(&self, bytes: usize) -> *mut u8 {
        let mut new = null_mut();
        assert_eq!(unsafe { cuMemHostAlloc(&mut new, bytes, 0) }, GOOD);
        new.cast()
    }

    pub fn load(&self, ptx: &str) -> Result<u64, CUresult> {
        let text = CString::new(ptx).expect("no zero byte");
        let mut new = null_mut();
        match unsafe { cuModuleLoadData(&mut new, text.as_ptr().cast()) } {
            GOOD => Ok(new as u64),
            other => Err(other),
        }
    }

    pub fn function(&self, ptx: &str, name: &str) -> u64 {
        let (module, name) = (self.load(ptx).expect("it loads"), CString::new(name).expect("no zero byte"));
        let mut new = null_mut();
        assert_eq!(unsafe { cuModuleGetFunction(&mut new, module as _, name.as_ptr()) }, GOOD);
        new as u64
    }

    /// Launches a kernel with one parameter.
    pub fn launch(&self, function: u64, threads: u32, shared: u32, parameters: &[u8; 8], stream: u64) -> CUresult {
        let mut place = parameters.as_ptr().cast_mut().cast::<c_void>();
        unsafe { cuLaunchKernel(function as _, 1, 1, 1, threads, 1, 1, shared, stream as _, &mut place, null_mut()) }
    }

    pub fn replace(&self, exec: u64, node: sys::CUgraphNode, function: u64, parameters: &[u8; 8]) -> CUresult {
        let mut place = parameters.as_ptr().cast_mut().cast::<c_void>();
        let new = sys::CUDA_KERNEL_NODE_PARAMS {
            func: function as _,
            gridDimX: 1,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: 32,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: 0,
            kernelParams: &mut place,
            extra: null_mut(),
            kern: null_mut(),
            ctx: null_mut(),
        };
        unsafe { cuGraphExecKernelNodeSetParams_v2(exec as _, node, &new) }
    }

    pub fn begin(&self, stream: u64) {
        assert_eq!(unsafe { cuStreamBeginCapture_v2(stream as _, 1) }, GOOD);
    }

    pub fn end(&self, stream: u64) -> Result<u64, CUresult> {
        let mut graph = null_mut();
        match unsafe { cuStreamEndCapture(stream as _, &mut graph) } {
            GOOD => Ok(graph as u64),
            other => Err(other),
        }
    }

    pub fn instantiate(&self, graph: u64) -> u64 {
        let mut exec = null_mut();
        assert_eq!(unsafe { cuGraphInstantiateWithFlags(&mut exec, graph as _, 0) }, GOOD);
        exec as u64
    }

    /// Bytes of the GPU's memory, after what is on a stream.
    pub fn read(&self, at: u64, bytes: usize, stream: u64) -> Vec<u8> {
        let host = self.pinned(bytes);
        unsafe {
            assert_eq!(cuMemcpyDtoHAsync_v2(host.cast(), at, bytes, stream as _), GOOD);
            assert_eq!(cuStreamSynchronize(stream as _), GOOD, "{}", last_words());
            let got = std::slice::from_raw_parts(host, bytes).to_vec();
            assert_eq!(cuMemFreeHost(host.cast()), GOOD);
            got
        }
    }
}

/// A tensor map of two dims.
#[derive(Clone, Copy)]
pub struct Map {
    pub dtype: u32,
    pub address: u64,
    pub sizes: [u64; 2],
    pub stride: u64,
    pub extents: [u32; 2],
    pub swizzle: u32,
}

impl Map {
    /// Encodes the map at an address so many bytes beside where it should be.
    pub fn encode(&self, beside: usize) -> CUresult {
        let mut maps = [sys::CUtensorMap { opaque: [0; 16] }; 2];
        let at = maps.as_mut_ptr().wrapping_byte_add(beside);
        let Map { dtype, address, sizes, stride, extents, swizzle } = self;
        unsafe {
            cuTensorMapEncodeTiled(at, *dtype, 2, *address as _, sizes.as_ptr(), stride, extents.as_ptr(), [1u32; 2].as_ptr(), 0, *swizzle, 3, 0)
        }
    }
}
