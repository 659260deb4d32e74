//! The process of one rank.

use super::shielded::shield;
use crate::protocol::{self, Event};
use crate::shm::{RunRequest, Status, StatusBoard};
use serde::{Deserialize, Serialize};
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Something that a rank said, or its silence.
pub enum LauncherEvent {
    Event(u64, Event),
    /// Of a rank with a launcher of its own: how it is.
    Health(u64, RankHealth),
    /// Its process has ended; how, of a rank with a launcher of its own.
    Closed(u64, Option<ProcessExit>),
    /// The launcher of a rank is gone.
    Lost(u64),
    /// Another launcher was asked to end the run.
    Stop,
    /// What a rank with a launcher of its own had begun when it was asked for this.
    Begun(u64, RunRequest, u64),
}

/// How a rank is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankHealth {
    pub status: Status,
    /// For how many looks there was no sign of life.
    pub still: u32,
    /// It was stopped by a signal.
    pub stopped: bool,
    /// Bytes of memory that it has.
    pub memory: u64,
}

/// How a process ended, and where it was.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessExit {
    /// `was killed by signal 9`.
    pub how: String,
    /// What it wrote to its standard error.
    pub wrote: String,
    pub status: Status,
}

pub struct Process {
    rank: u64,
    child: Child,
    errors: Option<JoinHandle<String>>,
    sign: Sign,
    still: u32,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Sign {
    progress: u64,
    /// Time on cores, in ticks of the system.
    ticks: u64,
}

/// Most bytes that are kept of a rank's standard error.
const ERRORS: usize = 8 << 10;

impl Process {
    pub fn start(binary: &Path, rank: u64, memory: &OwnedFd, say: Sender<LauncherEvent>) -> io::Result<Process> {
        let mut child = shield(&mut Command::new(binary))
            .args(["--rank", &rank.to_string(), "--parent", &std::process::id().to_string()])
            .stdin(Stdio::from(memory.try_clone()?))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let (out, err) = (child.stdout.take(), child.stderr.take());
        let mut process = Process { rank, child, errors: None, sign: Sign::default(), still: 0 };
        let (Some(mut out), Some(err)) = (out, err) else { return Err(io::ErrorKind::BrokenPipe.into()) };
        std::thread::Builder::new().name(format!("rank-{rank}")).spawn(move || {
            while let Ok(Some(event)) = protocol::hear(&mut out) {
                if say.send(LauncherEvent::Event(rank, event)).is_err() {
                    return;
                }
            }
            let _ = say.send(LauncherEvent::Closed(rank, None));
        })?;
        let errors = std::thread::Builder::new().name(format!("errors-{rank}")).spawn(move || {
            let (mut err, mut text) = (err, vec![]);
            let _ = err.by_ref().take(ERRORS as u64).read_to_end(&mut text);
            let _ = io::copy(&mut err, &mut io::sink());
            String::from_utf8_lossy(&text).trim().to_owned()
        })?;
        process.errors = Some(errors);
        Ok(process)
    }

    /// Looks for signs of life. To be called at even intervals: looks are counted, so a launcher that was stopped
    /// itself accuses nobody.
    pub fn pulse(&mut self, board: &StatusBoard) -> RankHealth {
        let status = board.status(self.rank);
        let (ticks, state, memory) = usage(self.child.id());
        // A rank that waits wakes now and then to look whether the run has ended, so its time on cores is no sign of
        // life.
        let waits = status.waits.is_some();
        let sign = Sign { progress: status.progress, ticks: if waits { self.sign.ticks } else { ticks } };
        self.still = match state {
            State::Disk => 0,
            State::Ready if !waits => 0,
            State::Stopped | State::Ready | State::Other if sign != self.sign => 0,
            State::Stopped | State::Ready | State::Other => self.still + 1,
        };
        self.sign = sign;
        RankHealth { status, still: self.still, stopped: state == State::Stopped, memory }
    }

    /// How it ended, once its pipe is closed.
    pub fn ended(&mut self, board: &StatusBoard) -> ProcessExit {
        let how = self.child.wait().map_or_else(|e| e.to_string(), ended);
        let wrote = self.errors.take().and_then(|e| e.join().ok()).unwrap_or_default();
        ProcessExit { how, wrote, status: board.status(self.rank) }
    }
}

/// Ends the process, which has until then to leave by itself; a rank that is stuck does not.
pub fn leave(process: &mut Process, deadline: Instant) {
    while matches!(process.child.try_wait(), Ok(None)) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    let _ = process.child.kill();
    let _ = process.child.wait();
}

/// `was killed by signal 9`.
fn ended(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(signal), _) => format!("was killed by signal {signal}"),
        (None, Some(code)) => format!("ended with code {code}"),
        (None, None) => "ended".into(),
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Stopped,
    /// Runs, or would if a core were free.
    Ready,
    /// Waits for a disk.
    Disk,
    Other,
}

/// Time that a process has had on cores, its state, and bytes of its memory: fields of `/proc/PID/stat`
/// (proc_pid_stat(5)).
fn usage(pid: u32) -> (u64, State, u64) {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let fields: Vec<&str> = text.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace().collect();
    let number = |k: usize| fields.get(k).and_then(|f| f.parse::<u64>().ok()).unwrap_or(0);
    let state = match fields.first().copied() {
        Some("T" | "t") => State::Stopped,
        Some("R") => State::Ready,
        Some("D") => State::Disk,
        Some(_) | None => State::Other,
    };
    (number(11) + number(12), state, number(21) * rustix::param::page_size() as u64)
}
