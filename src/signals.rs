//! Signals of batch systems, terminals and people: they end `mcc run` early, with everything saved, and `mcc compile`
//! with nothing left behind.

use crate::failure::Failure;
use crate::print::note;
use anyhow::Context;
use runtime::launch::StopRequest;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGXFSZ};
use signal_hook::iterator::Signals;
use signal_hook::{flag, low_level};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// What a shell says of a process that SIGINT ended.
const INTERRUPTED: i32 = 130;

/// Whether the signals are announced.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Announce {
    Yes,
    No,
}

/// From now on whoever writes beyond the limit on the size of files gets an error, which is told and cleaned up after
/// like any other; SIGXFSZ would end this process, or one that it starts, in the middle.
///
/// # Errors
/// If the system has no handlers left.
pub fn outlive_limits() -> Result<(), Failure> {
    // A handler is set instead of ignoring the signal, so that programs that are started get the default back; mcc's
    // own programs do the same.
    flag::register(SIGXFSZ, Arc::default()).context("cannot listen to signals")?;
    Ok(())
}

/// From now on SIGTERM, SIGINT, SIGHUP and SIGUSR1 ask the run to stop, and a second SIGINT ends this process. A
/// signal that is ignored already (as `nohup` has SIGHUP ignored, and a shell SIGINT for what it runs in the
/// background) stays so.
///
/// # Errors
/// If the system has no handlers left.
pub fn listen(stop: StopRequest, announce: Announce) -> Result<(), Failure> {
    let ignored = ignored();
    let ending = [SIGTERM, SIGINT, SIGHUP, SIGUSR1].into_iter().filter(|s| ignored >> (s - 1) & 1 == 0);
    let mut signals = Signals::new(ending).context("cannot listen to signals")?;
    let mut interrupts = 0;
    let act = move || {
        for signal in signals.forever() {
            let name = low_level::signal_name(signal).unwrap_or("a signal");
            interrupts += u32::from(signal == SIGINT);
            if let Some(awaited) = stop.awaited() {
                note!("error: {name} came before {awaited}: nothing was trained, and nothing is saved");
                low_level::exit(1);
            }
            if signal == SIGINT && interrupts > 1 {
                note!("error: SIGINT came twice: the run ends at once, and nothing is saved");
                low_level::exit(INTERRUPTED);
            }
            if !stop.is_asked() && announce == Announce::Yes {
                let again = if signal == SIGINT { "; a second SIGINT ends it at once, with nothing saved" } else { "" };
                note!("{name}: the run ends after the step that is under way, and saves{again}");
            }
            stop.ask();
        }
    };
    std::thread::Builder::new().name("signals".into()).spawn(act).context("cannot listen to signals")?;
    Ok(())
}

/// Does what would leave files behind if a signal ended this process in the middle. The act is told whether SIGTERM,
/// SIGINT or SIGHUP has come and it shall give up; after it that signal ends the process, as it does from then on.
///
/// # Errors
/// If the system has no handlers left.
pub fn tidily<T>(act: impl FnOnce(&dyn Fn() -> bool) -> T) -> Result<T, Failure> {
    let (came, ends, ignored) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)), ignored());
    for signal in [SIGTERM, SIGINT, SIGHUP].into_iter().filter(|s| ignored >> (s - 1) & 1 == 0) {
        flag::register_usize(signal, came.clone(), signal as usize).context("cannot listen to signals")?;
        flag::register_conditional_default(signal, ends.clone()).context("cannot listen to signals")?;
    }
    let result = act(&|| came.load(Ordering::SeqCst) != 0);
    ends.store(true, Ordering::SeqCst);
    match came.load(Ordering::SeqCst) {
        0 => {}
        signal => low_level::emulate_default_handler(signal as i32).context("cannot end by a signal")?,
    }
    Ok(result)
}

/// The signals that this process ignores, one a bit from that of number 1 on (proc_pid_status(5)).
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|l| l.strip_prefix("SigIgn:"));
    mask.and_then(|m| u64::from_str_radix(m.trim(), 16).ok()).unwrap_or(0)
}
