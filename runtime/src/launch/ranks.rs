//! The processes of a run.

use crate::comm::ranks as names;
use crate::executor::describe;
use crate::protocol::{self, Event};
use crate::shm::{Board, Status};
use ir::program::Job;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Something that a rank said, or its silence.
pub enum Said {
    Event(u64, Event),
    Closed(u64),
}

struct Process {
    child: Child,
    /// What it wrote to its standard error.
    errors: Option<JoinHandle<String>>,
    life: Life,
    /// Its last sign of life, and for how many looks there was no other.
    sign: Sign,
    still: u32,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Life {
    Running,
    /// It said that it is done.
    Done,
    Closed,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Sign {
    progress: u64,
    /// Time on cores, in ticks of the system.
    ticks: u64,
}

/// All processes of a run. Dropping it ends and reaps them.
pub struct Ranks<'a> {
    job: &'a Job,
    board: Board<'a>,
    processes: Vec<Process>,
    said: Receiver<Said>,
    failure: Option<(String, Vec<String>)>,
}

/// Most bytes that are kept of a rank's standard error.
const ERRORS: usize = 8 << 10;

impl<'a> Ranks<'a> {
    pub fn start(binary: &Path, job: &'a Job, board: Board<'a>, memory: &OwnedFd) -> io::Result<Ranks<'a>> {
        let (say, said) = mpsc::channel();
        let mut ranks = Ranks { job, board, processes: vec![], said, failure: None };
        for rank in 0..job.mesh.world() {
            let mut child = Command::new(binary)
                .args(["--rank", &rank.to_string(), "--parent", &std::process::id().to_string()])
                .stdin(Stdio::from(memory.try_clone()?))
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()?;
            let (out, err) = (child.stdout.take(), child.stderr.take());
            ranks.processes.push(Process { child, errors: None, life: Life::Running, sign: Sign::default(), still: 0 });
            let (Some(mut out), Some(err)) = (out, err) else { return Err(io::ErrorKind::BrokenPipe.into()) };
            let say = say.clone();
            std::thread::Builder::new().name(format!("rank-{rank}")).spawn(move || {
                while let Ok(Some(event)) = protocol::hear(&mut out) {
                    if say.send(Said::Event(rank, event)).is_err() {
                        return;
                    }
                }
                let _ = say.send(Said::Closed(rank));
            })?;
            let errors = std::thread::Builder::new().name(format!("errors-{rank}")).spawn(move || {
                let (mut err, mut text) = (err, vec![]);
                let _ = err.by_ref().take(ERRORS as u64).read_to_end(&mut text);
                let _ = io::copy(&mut err, &mut io::sink());
                String::from_utf8_lossy(&text).trim().to_owned()
            })?;
            ranks.processes[rank as usize].errors = Some(errors);
        }
        Ok(ranks)
    }

    /// Whether all ranks are done and gone.
    pub fn finished(&self) -> bool {
        self.processes.iter().all(|p| p.life == Life::Closed)
    }

    /// The next thing that a rank says, if one does within this time.
    pub fn listen(&self, time: Duration) -> Option<Said> {
        self.said.recv_timeout(time).ok()
    }

    /// Why the run has ended early, and who was waiting for whom.
    pub fn failure(&mut self) -> Option<(String, Vec<String>)> {
        self.failure.take()
    }

    fn fail(&mut self, reason: String) {
        if self.failure.is_none() {
            let waiting = self.waiting();
            self.board.end(&reason);
            self.failure = Some((reason, waiting));
        }
    }

    pub fn done(&mut self, rank: u64) {
        self.processes[rank as usize].life = Life::Done;
    }

    /// A rank said why it gives up. One that stops because another did is not the reason.
    pub fn failed(&mut self, rank: u64, message: String, aborted: bool) {
        self.done(rank);
        if !aborted {
            self.fail(message);
        }
    }

    /// A rank's pipe is closed: it has ended.
    pub fn closed(&mut self, rank: u64) {
        let process = &mut self.processes[rank as usize];
        let life = std::mem::replace(&mut process.life, Life::Closed);
        let status = process.child.wait();
        if life == Life::Running {
            let errors = process.errors.take().and_then(|e| e.join().ok()).unwrap_or_default();
            let how = status.map_or_else(|e| e.to_string(), ended);
            let tail = if errors.is_empty() { String::new() } else { format!("; it wrote: {errors}") };
            self.fail(format!("rank {rank} {how} at {}{tail}", self.place(rank, &self.board.status(rank))));
        }
    }

    fn place(&self, rank: u64, status: &Status) -> String {
        if status.step == 0 {
            return "the start".into();
        }
        format!("step {}, {}", status.step, describe(self.job, rank, status.position))
    }

    /// Who waits for whom.
    fn waiting(&self) -> Vec<String> {
        let running = self.processes.iter().enumerate().filter(|(_, p)| p.life == Life::Running);
        running
            .filter_map(|(rank, _)| {
                let rank = rank as u64;
                let status = self.board.status(rank);
                let on = status.waits.as_ref().filter(|w| !w.is_empty())?;
                Some(format!("rank {rank} waits for {} at {}", names(on), self.place(rank, &status)))
            })
            .collect()
    }

    /// Looks for signs of life; without any for so many looks, a rank that computes is stuck. Ranks that all wait are deadlocked,
    /// but only after [`DEADLOCK`] times as many looks: the compiler has proved that programs cannot deadlock, and a core that
    /// a crowded machine takes away for seconds looks just the same. To be called at even intervals: looks are counted, so a launcher that was stopped itself accuses nobody.
    pub fn watch(&mut self, patience: u32) {
        let mut stuck = None;
        let (mut running, mut waiting) = (0, 0);
        for (rank, process) in self.processes.iter_mut().enumerate().filter(|(_, p)| p.life == Life::Running) {
            let status = self.board.status(rank as u64);
            let (ticks, state) = cpu_time(process.child.id());
            // A rank that waits wakes now and then to look whether the run has ended.
            let waits = status.waits.is_some();
            let sign = Sign { progress: status.progress, ticks: if waits { process.sign.ticks } else { ticks } };
            process.still = match state {
                State::Disk => 0,
                State::Ready if !waits => 0,
                State::Stopped | State::Ready | State::Other if sign != process.sign => 0,
                State::Stopped | State::Ready | State::Other => process.still + 1,
            };
            process.sign = sign;
            running += 1;
            // A rank may have been stopped while it waited.
            let stopped = !waits || state == State::Stopped;
            if process.still >= patience * DEADLOCK && !stopped {
                waiting += 1;
            } else if process.still >= patience && stopped && stuck.is_none() {
                stuck = Some((rank as u64, status));
            }
        }
        if let Some((rank, status)) = stuck {
            self.fail(format!("rank {rank} is stuck at {}", self.place(rank, &status)));
        } else if running > 0 && waiting == running {
            self.fail("deadlock: all ranks wait".into());
        }
    }
}

impl Drop for Ranks<'_> {
    fn drop(&mut self) {
        self.board.end("the launcher ended the run");
        // Time to leave by themselves; a rank that is stuck does not.
        let deadline = Instant::now() + Duration::from_millis(300);
        for process in &mut self.processes {
            while matches!(process.child.try_wait(), Ok(None)) && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(5));
            }
            let _ = process.child.kill();
            let _ = process.child.wait();
        }
    }
}

/// `was killed by signal 9`.
fn ended(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(signal), _) => format!("was killed by signal {signal}"),
        (None, Some(code)) => format!("ended with code {code}"),
        (None, None) => "ended".into(),
    }
}

/// How many times longer than a rank that computes, ranks that wait for each other may be still.
const DEADLOCK: u32 = 5;

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Stopped,
    /// Runs, or would if a core were free.
    Ready,
    /// Waits for a disk.
    Disk,
    Other,
}

/// Time that a process has had on cores, and its state: fields of `/proc/PID/stat` (proc_pid_stat(5)).
fn cpu_time(pid: u32) -> (u64, State) {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let fields: Vec<&str> = text.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace().collect();
    let number = |k: usize| fields.get(k).and_then(|f| f.parse::<u64>().ok()).unwrap_or(0);
    let state = match fields.first().copied() {
        Some("T" | "t") => State::Stopped,
        Some("R") => State::Ready,
        Some("D") => State::Disk,
        Some(_) | None => State::Other,
    };
    (number(11) + number(12), state)
}
