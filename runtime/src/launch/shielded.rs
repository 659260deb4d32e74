//! Ranks are shielded from the signals that end a run early: those go to a terminal's whole group of processes, or to
//! all processes of a batch job's step, but it is the launcher that ends a run, after a step. Ranks die with their
//! launcher in any case.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// What a rank ignores. Beyond its limit on the size of files it gets an error, which it can name, in place of the
/// last.
const IGNORED: [libc::c_int; 5] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGUSR1, libc::SIGXFSZ];

/// Shields the process that this command starts, from its first instant.
pub fn shield(command: &mut Command) -> &mut Command {
    let ignore = || {
        for signal in IGNORED {
            // SAFETY: no handler is installed, and signal(2) may be called between fork and exec.
            if unsafe { libc::signal(signal, libc::SIG_IGN) } == libc::SIG_ERR {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(())
    };
    // SAFETY: it calls nothing but signal(2), and allocates nothing.
    unsafe { command.pre_exec(ignore) }
}
