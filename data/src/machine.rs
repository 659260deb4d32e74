//! What one process of a machine does alone, while others that need the same wait for it.
//!
//! The lock is a name of Linux's abstract sockets: it is the machine's own, whatever file systems it shares, it is
//! gone with the process that has it, and it leaves no file behind.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// How often a process that waits looks.
const TICK: Duration = Duration::from_millis(20);
/// How long it waits at most. It then does the same work beside the other, which costs time alone.
const PATIENCE: Duration = Duration::from_secs(600);

/// A lock of this machine: while it lives, other processes that want it wait.
pub struct MachineLock {
    _lock: Option<UnixListener>,
    /// Whether another process had it before.
    pub has_waited: bool,
}

/// Waits until no other process of this machine has the lock of this name, and takes it.
pub fn lock(name: &str) -> MachineLock {
    let begun = Instant::now();
    let mut has_waited = false;
    let address = SocketAddr::from_abstract_name(format!("mcc-data-{name}"));
    while let Ok(address) = &address
        && begun.elapsed() < PATIENCE
    {
        match UnixListener::bind_addr(address) {
            Ok(lock) => return MachineLock { _lock: Some(lock), has_waited },
            Err(e) if e.kind() == std::io::ErrorKind::AddrInUse => {
                has_waited = true;
                sleep(TICK);
            }
            // Where such names cannot be bound, each process does the work itself.
            Err(_) => break,
        }
    }
    MachineLock { _lock: None, has_waited }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_alone_at_a_time() {
        let name = format!("test-{}", std::process::id());
        let first = lock(&name);
        assert!(!first.has_waited && !lock(&format!("{name}-other")).has_waited);
        let second = std::thread::scope(|scope| {
            let second = scope.spawn(|| lock(&name).has_waited);
            sleep(3 * TICK);
            drop(first);
            second.join()
        });
        assert!(second.expect("it ends"));
    }
}
