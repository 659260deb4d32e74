//! An end for code that has none.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::time::{ClockId, clock_gettime};

/// Seconds of a processor that a kernel's code gets: its run takes milliseconds, and on the slowest machine not
/// these.
pub const SECONDS: u64 = 60;

/// Ends this process, by `SIGXCPU`, if something takes it so many seconds of a processor; one thing at a time.
pub fn within<T>(seconds: Option<u64>, run: impl FnOnce() -> T) -> T {
    let Some(seconds) = seconds else { return run() };
    let before = getrlimit(Resource::Cpu);
    let used = u64::try_from(clock_gettime(ClockId::ProcessCPUTime).tv_sec).unwrap_or(0);
    let end = before.current.unwrap_or(u64::MAX).min(used + seconds);
    // If the limit cannot be set, the code runs without one.
    let set = setrlimit(Resource::Cpu, Rlimit { current: Some(end), ..before }).is_ok();
    let out = run();
    if set {
        let _ = setrlimit(Resource::Cpu, before);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    const ENDLESS: &str = "MCC_TEST_ENDLESS";

    /// This test runs itself once more, there without an end.
    #[test]
    fn what_never_ends_is_ended() {
        if std::env::var_os(ENDLESS).is_some() {
            assert_eq!(within(Some(1), || 7), 7);
            assert_eq!(getrlimit(Resource::Cpu).current, None, "the limit is as it was");
            within(Some(1), || {
                loop {
                    std::hint::spin_loop();
                }
            })
        }
        let test = Command::new(std::env::current_exe().expect("a test"))
            .args(["--exact", "check::limit::tests::what_never_ends_is_ended"])
            .env(ENDLESS, "1")
            .output()
            .expect("it runs");
        assert_eq!(test.status.signal(), Some(rustix::process::Signal::XCPU.as_raw()), "{test:?}");
    }
}
