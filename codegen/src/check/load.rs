//! An object in this process, loaded without a linker: a run of lld takes as long as compiling a small kernel.

use crate::abi::KernelFn;
use inkwell::llvm_sys::core::LLVMCreateMemoryBufferWithMemoryRangeCopy;
use inkwell::llvm_sys::error::{LLVMDisposeErrorMessage, LLVMErrorRef, LLVMGetErrorMessage};
use inkwell::llvm_sys::orc2::lljit::{
    LLVMOrcCreateLLJIT, LLVMOrcDisposeLLJIT, LLVMOrcLLJITAddObjectFileWithRT, LLVMOrcLLJITGetMainJITDylib, LLVMOrcLLJITLookup, LLVMOrcLLJITRef,
};
use inkwell::llvm_sys::orc2::{
    LLVMOrcJITDylibCreateResourceTracker, LLVMOrcReleaseResourceTracker, LLVMOrcResourceTrackerRef, LLVMOrcResourceTrackerRemove,
};
use std::ffi::{CStr, CString};
use std::marker::PhantomData;
use std::ptr::null_mut;

/// LLVM's loader of objects.
pub struct Loader {
    jit: LLVMOrcLLJITRef,
}

impl Drop for Loader {
    fn drop(&mut self) {
        // SAFETY: nobody has code of it any more.
        let _ = llvm_result(unsafe { LLVMOrcDisposeLLJIT(self.jit) });
    }
}

/// A kernel's code.
pub struct LoadedKernel<'l> {
    tracker: LLVMOrcResourceTrackerRef,
    pub function: KernelFn,
    loader: PhantomData<&'l Loader>,
}

impl Drop for LoadedKernel<'_> {
    fn drop(&mut self) {
        remove(self.tracker);
    }
}

fn remove(tracker: LLVMOrcResourceTrackerRef) {
    // SAFETY: the tracker is released once, and nobody calls its code any more.
    unsafe {
        let _ = llvm_result(LLVMOrcResourceTrackerRemove(tracker));
        LLVMOrcReleaseResourceTracker(tracker);
    }
}

/// What LLVM says went wrong.
fn llvm_result(error: LLVMErrorRef) -> Result<(), String> {
    if error.is_null() {
        return Ok(());
    }
    // SAFETY: an error is LLVM's, and read once; its message too.
    unsafe {
        let message = LLVMGetErrorMessage(error);
        let text = CStr::from_ptr(message).to_string_lossy().into_owned();
        LLVMDisposeErrorMessage(message);
        Err(text)
    }
}

impl Loader {
    /// A loader of code for this machine.
    ///
    /// # Errors
    /// LLVM has none.
    pub fn new() -> Result<Loader, String> {
        let mut jit = null_mut();
        // SAFETY: without a builder, LLVM makes one for this machine, whose target was initialised to say which
        // code runs here.
        llvm_result(unsafe { LLVMOrcCreateLLJIT(&mut jit, null_mut()) })?;
        Ok(Loader { jit })
    }

    /// The kernel of this name in an object.
    ///
    /// # Errors
    /// LLVM cannot load it.
    pub fn load(&self, object: &[u8], name: &str) -> Result<LoadedKernel<'_>, String> {
        let symbol = CString::new(name).map_err(|e| e.to_string())?;
        let mut address = 0;
        // SAFETY: the buffer, a copy, becomes the JIT's; the symbol ends with a zero.
        let (tracker, loaded) = unsafe {
            let tracker = LLVMOrcJITDylibCreateResourceTracker(LLVMOrcLLJITGetMainJITDylib(self.jit));
            let buffer = LLVMCreateMemoryBufferWithMemoryRangeCopy(object.as_ptr().cast(), object.len(), symbol.as_ptr());
            let added = llvm_result(LLVMOrcLLJITAddObjectFileWithRT(self.jit, tracker, buffer));
            (tracker, added.and_then(|()| llvm_result(LLVMOrcLLJITLookup(self.jit, &mut address, symbol.as_ptr()))))
        };
        match loaded {
            Ok(()) => {
                // SAFETY: the symbol was found, and has the kernel ABI.
                let function = unsafe { std::mem::transmute::<*const (), KernelFn>(address as *const ()) };
                Ok(LoadedKernel { tracker, function, loader: PhantomData })
            }
            Err(text) => {
                remove(tracker);
                Err(text)
            }
        }
    }
}
