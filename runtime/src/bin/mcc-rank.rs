//! One rank of a run. Started by a launcher (`mcc run`), which gives it the run's memory as its standard input and
//! listens to its standard output.

use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd;
use std::process::ExitCode;

fn main() -> ExitCode {
    if std::env::args().nth(1).as_deref() == Some("--mpi") {
        return say_mpi();
    }
    let mut arguments = std::env::args().skip(1);
    let mut number = |flag: &str| (arguments.next().as_deref() == Some(flag)).then(|| arguments.next()?.parse::<u64>().ok()).flatten();
    let (Some(rank), Some(parent)) = (number("--rank"), number("--parent")) else {
        return refuse("is one rank of a run; `mcc run OUT.mcc` starts as many as are needed", 2);
    };
    if let Err(e) = follow(parent) {
        return refuse(&format!("ends: {e}"), 1);
    }
    let memory = match io::stdin().as_fd().try_clone_to_owned() {
        Ok(memory) if !io::stdin().is_terminal() => memory,
        Ok(_) | Err(_) => return refuse("ends: standard input is not the memory of a run", 1),
    };
    match runtime::worker::run(rank, memory, io::stdout().lock()) {
        Ok(()) => ExitCode::SUCCESS,
        // The launcher has the error already.
        Err(_) => ExitCode::FAILURE,
    }
}

/// Says with which MPI library ranks exchange that run this program.
fn say_mpi() -> ExitCode {
    match runtime::mpi::version() {
        Some(version) => writeln!(io::stdout(), "{version}").map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS),
        None => refuse("was built without MPI", 1),
    }
}

/// Says why there is nothing to do, if anybody listens.
fn refuse(why: &str, code: u8) -> ExitCode {
    let _ = writeln!(io::stderr(), "mcc-rank {why}");
    ExitCode::from(code)
}

/// Ends this process when the launcher ends, however it ends.
fn follow(parent: u64) -> Result<(), String> {
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL)).map_err(|e| e.to_string())?;
    // The parent may have ended before that took effect.
    match rustix::process::getppid() {
        Some(pid) if pid.as_raw_nonzero().get() as u64 == parent => Ok(()),
        Some(_) | None => Err(format!("process {parent}, which started this rank, is gone")),
    }
}
