//! All ranks of a run, as the launcher that leads it sees them: processes of its own, and links to the launchers of
//! others.

use super::control::{BEAT, Down, TAKES, Up};
use super::error::RunFailure;
use super::process::{self, LauncherEvent, Process, RankHealth, leave};
use super::stop::RunEnd;
use crate::comm::ranks as names;
use crate::executor::describe;
use crate::protocol::Event;
use crate::rendezvous::{Link, LinkWriter};
use crate::shm::{ASKS, RunRequest, Status, StatusBoard};
use ir::program::Job;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

struct RankState {
    hold: RankHandle,
    life: RankPhase,
    pulse: RankHealth,
}

enum RankHandle {
    Own(Process),
    /// Another launcher's, and when that was last heard of.
    Far {
        link: LinkWriter,
        host: String,
        heard: Instant,
    },
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum RankPhase {
    Running,
    /// It said that it is done.
    Done,
    Closed,
}

/// How far all launchers are with a request.
#[derive(Clone, Debug, PartialEq, Eq)]
enum RequestProgress {
    No,
    /// What each rank has begun, as far as its launcher has said so.
    Asked(Vec<Option<u64>>),
    /// All do it after this step.
    Known(u64),
}

/// Dropping it ends all processes and reaps its own.
pub struct Ranks<'a> {
    job: &'a Job,
    board: StatusBoard<'a>,
    ranks: Vec<RankState>,
    say: Sender<LauncherEvent>,
    said: Receiver<LauncherEvent>,
    failure: Option<RunFailure>,
    /// Why all others are told that the run has ended.
    reason: Option<Down>,
    told: Instant,
    /// By [`RunRequest`].
    asking: [RequestProgress; ASKS],
}

/// How many times longer than a rank that computes, ranks that wait for each other may be still.
const DEADLOCK: u32 = 5;
/// How many times longer than a rank, a launcher may be silent.
const SILENCE: u32 = 4;
/// How long other launchers have to say how their ranks are when the run fails, and to leave when it has ended.
const LAST: Duration = Duration::from_millis(1200);

impl<'a> Ranks<'a> {
    /// No ranks yet; what they say comes through this channel.
    pub fn new(job: &'a Job, board: StatusBoard<'a>, (say, said): (Sender<LauncherEvent>, Receiver<LauncherEvent>)) -> Ranks<'a> {
        Ranks {
            job,
            board,
            ranks: vec![],
            say,
            said,
            failure: None,
            reason: None,
            told: Instant::now(),
            asking: [const { RequestProgress::No }; ASKS],
        }
    }

    /// Starts the next rank here.
    pub fn start(&mut self, binary: &Path, memory: &OwnedFd) -> io::Result<()> {
        let process = Process::start(binary, self.ranks.len() as u64, memory, self.say.clone())?;
        self.ranks.push(RankState { hold: RankHandle::Own(process), life: RankPhase::Running, pulse: RankHealth::default() });
        Ok(())
    }

    /// The next rank is that of another launcher.
    pub fn link(&mut self, link: Link, host: String) -> io::Result<()> {
        let rank = self.ranks.len() as u64;
        let ((mut ear, link), say, from) = (link.split(), self.say.clone(), host.clone());
        std::thread::Builder::new().name(format!("link-{rank}")).spawn(move || {
            loop {
                let said = match ear.hear::<Up>(None) {
                    Ok(up) => up.said(rank),
                    Err(e) if e.kind() == io::ErrorKind::InvalidData => {
                        let message = format!("of what rank {rank}'s `mcc run` on {from} said, {e}");
                        let _ = say.send(LauncherEvent::Event(rank, Event::Failed { message, help: None, aborted: false }));
                        break;
                    }
                    Err(_) => break,
                };
                if say.send(said).is_err() {
                    return;
                }
            }
            let _ = say.send(LauncherEvent::Lost(rank));
        })?;
        let hold = RankHandle::Far { link, host, heard: Instant::now() };
        self.ranks.push(RankState { hold, life: RankPhase::Running, pulse: RankHealth::default() });
        Ok(())
    }

    /// Whether all ranks are done and gone.
    pub fn finished(&self) -> bool {
        self.ranks.iter().all(|p| p.life == RankPhase::Closed)
    }

    /// The next thing that a rank says, if one does within this time.
    pub fn listen(&mut self, time: Duration) -> Option<LauncherEvent> {
        let said = self.said.recv_timeout(time).ok()?;
        if let LauncherEvent::Event(rank, _) | LauncherEvent::Health(rank, _) | LauncherEvent::Closed(rank, _) | LauncherEvent::Begun(rank, ..) =
            &said
            && let RankHandle::Far { heard, .. } = &mut self.ranks[*rank as usize].hold
        {
            *heard = Instant::now();
        }
        Some(said)
    }

    /// Why the run has ended early, and who was waiting for whom.
    pub fn failure(&mut self) -> Option<RunFailure> {
        self.failure.take()
    }

    fn fail(&mut self, failure: RunFailure) {
        if self.failure.is_some() {
            return;
        }
        // Other launchers have yet to report which of their ranks wait because of that.
        let last = Instant::now() + LAST;
        while self.is_spread()
            && let Some(left) = last.checked_duration_since(Instant::now())
            && let Ok(said) = self.said.recv_timeout(left)
        {
            if let LauncherEvent::Health(rank, pulse) = said {
                self.pulse(rank, pulse);
            }
        }
        let failure = RunFailure { waiting: self.waiting(), ..failure };
        self.board.end(&failure.reason);
        self.end(failure.clone());
        self.failure = Some(failure);
    }

    fn is_spread(&self) -> bool {
        self.ranks.iter().any(|r| matches!(r.hold, RankHandle::Far { .. }))
    }

    /// What launchers elsewhere are told when this is dropped: the first reason, or that all is well.
    pub fn end(&mut self, failure: RunFailure) {
        self.reason.get_or_insert(Down::End(failure));
    }

    /// All is well.
    pub fn is_well(&mut self, ended: RunEnd) {
        self.reason.get_or_insert(Down::Done(ended));
    }

    pub fn done(&mut self, rank: u64) {
        self.ranks[rank as usize].life = RankPhase::Done;
    }

    pub fn pulse(&mut self, rank: u64, pulse: RankHealth) {
        self.ranks[rank as usize].pulse = pulse;
    }

    /// A rank said why it gives up. One that stops because another did is not the reason.
    pub fn failed(&mut self, rank: u64, failure: RunFailure, aborted: bool) {
        self.done(rank);
        if !aborted {
            self.fail(failure);
        }
    }

    /// Whoever leads gives the run up.
    pub fn give_up(&mut self, why: String) {
        self.fail(RunFailure::new(why));
    }

    /// A rank's process has ended.
    pub fn closed(&mut self, rank: u64, ended: Option<process::ProcessExit>) {
        let held = &mut self.ranks[rank as usize];
        let life = std::mem::replace(&mut held.life, RankPhase::Closed);
        let ended = match (&mut held.hold, ended) {
            (RankHandle::Own(process), _) => Some(process.ended(&self.board)),
            (RankHandle::Far { .. }, ended) => ended,
        };
        if let (RankPhase::Running, Some(process::ProcessExit { how, wrote, status })) = (life, ended) {
            let tail = if wrote.is_empty() { String::new() } else { format!("; it wrote: {wrote}") };
            self.fail(RunFailure::new(format!("rank {rank} {how} at {}{tail}", place(self.job, rank, &status))));
        }
    }

    /// The launcher of a rank is gone.
    pub fn lost(&mut self, rank: u64) {
        let held = &mut self.ranks[rank as usize];
        let life = std::mem::replace(&mut held.life, RankPhase::Closed);
        if let (RankHandle::Far { host, .. }, true) = (&held.hold, life != RankPhase::Closed) {
            let gone = format!("rank {rank}'s `mcc run` on {host} is gone");
            let place = place(self.job, rank, &held.pulse.status);
            self.fail(RunFailure::new(format!("{gone}, last heard of at {place}")));
        }
    }

    /// Asks all ranks for something, unless they have been and have not done it yet.
    pub fn ask(&mut self, ask: RunRequest) {
        if self.asking[ask as usize] != RequestProgress::No {
            return;
        }
        self.board.ask(ask);
        let begun = (0..).zip(&mut self.ranks).map(|(rank, held)| match &mut held.hold {
            RankHandle::Own(_) => Some(self.board.begun(rank)),
            RankHandle::Far { link, .. } => {
                // Errors are ignored, as `listen` soon reports a launcher that is gone.
                let _ = link.say(&Down::Request(ask), TAKES);
                None
            }
        });
        self.asking[ask as usize] = RequestProgress::Asked(begun.collect());
        self.settle(ask);
    }

    /// Another launcher says what its rank has begun.
    pub fn begun(&mut self, rank: u64, ask: RunRequest, step: u64) {
        if let RequestProgress::Asked(begun) = &mut self.asking[ask as usize] {
            begun[rank as usize] = Some(step);
            self.settle(ask);
        }
    }

    /// All ranks are through with the checkpoint of a step.
    pub fn saved(&mut self, step: u64) {
        let asking = &mut self.asking[RunRequest::Save as usize];
        if matches!(asking, RequestProgress::Known(last) if *last <= step) {
            *asking = RequestProgress::No;
        }
    }

    fn settle(&mut self, ask: RunRequest) {
        let RequestProgress::Asked(begun) = &self.asking[ask as usize] else { return };
        let Some(last) = begun.iter().copied().collect::<Option<Vec<u64>>>().and_then(|all| all.into_iter().max()) else { return };
        self.board.settle(ask, last);
        for held in &mut self.ranks {
            if let RankHandle::Far { link, .. } = &mut held.hold {
                let _ = link.say(&Down::After(ask, last), TAKES);
            }
        }
        self.asking[ask as usize] = RequestProgress::Known(last);
    }

    /// Who waits for whom.
    fn waiting(&mut self) -> Vec<String> {
        let board = self.board;
        let running = (0..).zip(&self.ranks).filter(|(_, p)| p.life == RankPhase::Running);
        running
            .filter_map(|(rank, held)| {
                let status = match &held.hold {
                    RankHandle::Own(_) => board.status(rank),
                    RankHandle::Far { .. } => held.pulse.status.clone(),
                };
                waits(self.job, rank, &status)
            })
            .collect()
    }

    /// The most bytes of memory that a rank had when it was last looked at.
    pub fn memory(&self) -> u64 {
        self.ranks.iter().map(|r| r.pulse.memory).max().unwrap_or(0)
    }

    /// Looks for signs of life; without any for so many looks, a rank that computes is stuck. Ranks that all wait are
    /// deadlocked, but only after [`DEADLOCK`] times as many looks: the compiler has proved that programs cannot
    /// deadlock, and a core that a crowded machine takes away for seconds looks just the same. To be called once a
    /// `tick`.
    pub fn watch(&mut self, patience: u32, tick: Duration) {
        let (mut stuck, mut silent) = (None, None);
        let (mut running, mut waiting) = (0, 0);
        let beat = self.told.elapsed() >= BEAT;
        for (rank, held) in (0..).zip(&mut self.ranks) {
            match &mut held.hold {
                RankHandle::Far { link, host, heard } if held.life != RankPhase::Closed => {
                    // Errors are ignored, as `listen` soon reports a launcher that is gone.
                    let _ = if beat { link.say(&Down::Alive, TAKES) } else { Ok(()) };
                    if heard.elapsed() > tick * patience * SILENCE {
                        silent = silent.or(Some((rank, host.clone(), heard.elapsed().as_secs())));
                    }
                }
                RankHandle::Own(process) if held.life == RankPhase::Running => held.pulse = process.pulse(&self.board),
                RankHandle::Far { .. } | RankHandle::Own(_) => {}
            }
            if held.life != RankPhase::Running {
                continue;
            }
            let RankHealth { status, still, stopped, .. } = &held.pulse;
            running += 1;
            // A rank may have been stopped while it waited.
            let stopped = *stopped || status.waits.is_none();
            if *still >= patience * DEADLOCK && !stopped {
                waiting += 1;
            } else if *still >= patience && stopped && stuck.is_none() {
                stuck = Some((rank, status.clone()));
            }
        }
        if beat {
            self.told = Instant::now();
        }
        if let Some((rank, status)) = stuck {
            self.fail(RunFailure::new(format!("rank {rank} is stuck at {}", place(self.job, rank, &status))));
        } else if let Some((rank, host, seconds)) = silent {
            self.fail(RunFailure::new(format!("rank {rank}'s `mcc run` on {host} has not been heard of for {seconds} s")));
        } else if running > 0 && waiting == running {
            self.fail(RunFailure::new("deadlock: all ranks wait"));
        }
    }
}

/// `step 3, forward microbatch 0 command 4 (..)`.
pub fn place(job: &Job, rank: u64, status: &Status) -> String {
    if status.step == 0 {
        return "the start".into();
    }
    format!("step {}, {}", status.step, describe(job, rank, status.position))
}

/// For whom a rank waits and where, if it does.
pub fn waits(job: &Job, rank: u64, status: &Status) -> Option<String> {
    let on = status.waits.as_ref().filter(|w| !w.is_empty())?;
    Some(format!("rank {rank} waits for {} at {}", names(on), place(job, rank, status)))
}

impl Drop for Ranks<'_> {
    fn drop(&mut self) {
        let why = "the launcher ended the run";
        self.board.end(why);
        let last = self.reason.take().unwrap_or_else(|| Down::End(RunFailure::new(why)));
        let mut open = 0;
        for held in &mut self.ranks {
            if let RankHandle::Far { link, .. } = &mut held.hold
                && link.say(&last, TAKES).is_ok()
            {
                link.close();
                open += 1;
            }
        }
        let deadline = Instant::now() + Duration::from_millis(300);
        for held in &mut self.ranks {
            if let RankHandle::Own(process) = &mut held.hold {
                leave(process, deadline);
            }
        }
        // Launchers need time to read their last message, which is lost if this process ends first.
        let deadline = Instant::now() + LAST;
        while open > 0
            && let Some(left) = deadline.checked_duration_since(Instant::now())
            && let Ok(said) = self.said.recv_timeout(left)
        {
            open -= usize::from(matches!(said, LauncherEvent::Lost(_)));
        }
    }
}
