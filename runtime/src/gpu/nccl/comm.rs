//! A communicator: it starts without blocking and says later what it came to, within a time limit.

use super::library::{self, LEAST};
use cudarc::nccl::sys::{self, ncclResult_t};
use std::ffi::CStr;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

/// What marks a configuration as initialised, and a number in it as not given.
const MAGIC: u32 = 0xcafe_beef;
const UNDEFINED: i32 = i32::MIN;
/// How long until another look.
pub(super) const AGAIN: Duration = Duration::from_micros(100);

/// What a call came to; one that goes on is no error.
pub(super) fn check(what: &str, result: ncclResult_t) -> Result<(), String> {
    match result {
        ncclResult_t::ncclSuccess | ncclResult_t::ncclInProgress => Ok(()),
        other => {
            // SAFETY: the text is static.
            let text = unsafe { CStr::from_ptr(library::ncclGetErrorString(other)) };
            Err(format!("{what}: {}", text.to_string_lossy()))
        }
    }
}

/// A communicator, owned.
pub(super) struct Comm(pub(super) sys::ncclComm_t);

// SAFETY: a handle that one thread at a time uses.
unsafe impl Send for Comm {}

impl Drop for Comm {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: it is owned; aborting frees it whether or not something is under way.
            let _ = unsafe { library::ncclCommAbort(self.0) };
        }
    }
}

impl Comm {
    /// What came of the calls that have returned, so far.
    pub(super) fn state(&self, what: &str) -> Result<ncclResult_t, String> {
        let mut state = ncclResult_t::ncclSuccess;
        // SAFETY: the communicator exists, `state` is writable.
        check(what, unsafe { library::ncclCommGetAsyncError(self.0, &mut state) })?;
        Ok(state)
    }

    /// Waits until what was begun is through.
    pub(super) fn settle(&self, what: &str, deadline: Instant) -> Result<(), String> {
        loop {
            match self.state(what)? {
                ncclResult_t::ncclInProgress if Instant::now() < deadline => std::thread::sleep(AGAIN),
                ncclResult_t::ncclInProgress => return Err(format!("{what} took too long: is another rank gone?")),
                other => return check(what, other),
            }
        }
    }
}

/// A configuration of NCCL 2.18, whose fields the bindings have: newer versions take what they know beyond them from
/// their defaults.
pub(super) fn configuration(max_ctas: u32) -> sys::ncclConfig_t {
    sys::ncclConfig_t {
        size: size_of::<sys::ncclConfig_t>(),
        magic: MAGIC,
        version: LEAST as u32,
        blocking: 0,
        cgaClusterSize: UNDEFINED,
        minCTAs: UNDEFINED,
        maxCTAs: max_ctas as i32,
        netName: null_mut(),
        splitShare: UNDEFINED,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_is_that_of_2_18() {
        assert_eq!(configuration(24).size, 48);
    }
}
