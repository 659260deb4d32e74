//! A launch that does not end, and which one failed: a card says neither.

use crate::device::DeviceError;
use ir::kernel::Kernel;
use std::io::Write;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

/// A card that is waited for longer than this does not answer any more.
const LONG: Duration = Duration::from_secs(60);

/// Waits for a launch of a kernel, and says which one failed. If it does not end, the process does: a card that hangs
/// cannot be told to stop.
pub fn watched<T>(kernel: &Kernel, launch: impl FnOnce() -> Result<T, DeviceError>) -> Result<T, DeviceError> {
    let (ended, waits): (Sender<()>, _) = channel();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            if waits.recv_timeout(LONG) == Err(RecvTimeoutError::Timeout) {
                // The process ends even if this message cannot be written.
                let _ = writeln!(
                    std::io::stderr(),
                    "error: kernel {} has not ended after {} s; its definition is\n{}",
                    kernel.name(),
                    LONG.as_secs(),
                    ir::text::print_kernel(kernel)
                );
                std::process::abort();
            }
        });
        let outcome = launch();
        drop(ended);
        outcome
    })
    .map_err(|e| match e {
        DeviceError::Failed(why) => DeviceError::Failed(format!("kernel {}: {why}", kernel.name())),
        other @ (DeviceError::OutOfMemory { .. } | DeviceError::NotLoaded(_)) => other,
    })
}
