//! A rank whose streams run at the same time: compute on the rank's own threads, the host's kernels on one of their
//! own, communication and copies on one more, which takes a piece of whatever can go on in turn, so that no stream
//! holds up another. A phase is over when kernels are through, whose scalars are those of its step; what is left of
//! communication is taken up again in the next one.

use crate::comm::CommError;
use crate::cursor::Cursor;
use crate::device::Memory;
use crate::executor::{ExecError, Fault, Frame, Step};
use crate::hosted::Hosted;
use crate::shm::{Pending, Shm};
use ir::program::Action;
use rustix::thread::futex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How often each event was reached, and what the threads of a rank tell each other.
#[derive(Debug)]
pub struct Events {
    reached: Vec<AtomicU64>,
    /// Counts whatever those who compute may wait for; they sleep on it.
    bell: AtomicU32,
    sleepers: AtomicU32,
    /// Threads that compute, and neither wait nor are done.
    working: AtomicU32,
    stop: AtomicBool,
}

impl Events {
    pub fn new(count: usize) -> Events {
        Events {
            reached: (0..count).map(|_| AtomicU64::new(0)).collect(),
            bell: AtomicU32::new(0),
            sleepers: AtomicU32::new(0),
            working: AtomicU32::new(0),
            stop: AtomicBool::new(false),
        }
    }

    /// How often an event was reached; what its stream did before is visible to the caller.
    pub fn reached(&self, event: u32) -> u64 {
        self.reached[event as usize].load(Ordering::Acquire)
    }

    pub fn reach(&self, event: u32) {
        self.reached[event as usize].fetch_add(1, Ordering::Release);
    }

    pub fn ring(&self) {
        self.bell.fetch_add(1, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            let _ = futex::wake(&self.bell, futex::Flags::PRIVATE, i32::MAX as u32);
        }
    }

    /// Ends the work of all threads.
    pub fn end(&self) {
        self.stop.store(true, Ordering::SeqCst);
        self.ring();
    }

    pub fn ended(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    /// Lets a thread that computes wait until an event is reached so often, or the work has ended. `awake` looks
    /// before it sleeps.
    pub fn wait(&self, event: u32, due: u64, awake: u32, shm: &Shm) {
        let ready = || self.reached(event) >= due || self.ended();
        if (0..awake).any(|_| {
            std::hint::spin_loop();
            ready()
        }) {
            return;
        }
        self.rests(shm);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        loop {
            let seen = self.bell.load(Ordering::SeqCst);
            if ready() {
                break;
            }
            let _ = futex::wait(&self.bell, futex::Flags::PRIVATE, seen, None);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        self.working.fetch_add(1, Ordering::SeqCst);
    }

    /// A thread no longer computes. Whether the rank waits as a whole is for the communication's thread to say.
    pub fn rests(&self, shm: &Shm) {
        self.working.fetch_sub(1, Ordering::SeqCst);
        shm.wake_own();
    }
}

/// What the compute stream has come to.
pub enum Compute {
    Moved,
    /// Waits until this event is reached so often.
    Waits(u32, u64),
    Finished,
}

/// The streams of communication and copies in a phase.
pub struct Communication<'a> {
    pub frame: &'a Frame<'a>,
    pub cursors: Vec<Cursor>,
    pub memory: Box<dyn Memory + Send>,
    pub shm: Shm<'a>,
}

/// How long communication may wait while a disk is at work.
const SHORT: Duration = Duration::from_micros(200);

/// How far a phase runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PhaseEnd {
    Computed,
    /// Nothing is left of any stream.
    Settled,
}

/// Runs a phase: `compute` takes a turn of the compute stream on the calling thread; communication has a thread that
/// calls `begin` first, and so has the host. Gives the cursors back, the host's first.
///
/// # Errors
/// What stopped one of the threads first; the others have ended too.
pub fn run(
    (mut communication, mut host): (Communication, Option<Hosted>),
    begin: Box<dyn Fn() + Send + Sync>,
    events: &Events,
    until: PhaseEnd,
    step: &Step,
    shm: &mut Shm,
    mut compute: impl FnMut(&mut Shm) -> Result<Compute, ExecError>,
) -> Result<Vec<Cursor>, ExecError> {
    let awake = shm.spins();
    events.stop.store(false, Ordering::SeqCst);
    events.working.store(1 + u32::from(host.is_some()), Ordering::SeqCst);
    std::thread::scope(|scope| {
        let rank = communication.frame.rank;
        let failed = |e: std::io::Error| {
            events.end();
            let fault = Fault::Comm(CommError::Failed(format!("a thread could not start: {e}")));
            ExecError { rank, step: step.number, command: "the start of a phase".into(), fault }
        };
        let begin = &begin;
        let ends = |outcome: Result<(), ExecError>| outcome.inspect_err(|_| events.end());
        let builder = std::thread::Builder::new().name("communication".into());
        let thread = builder.spawn_scoped(scope, move || {
            begin();
            ends(communication.run(events, step)).map(|()| communication.cursors)
        });
        let thread = thread.map_err(failed)?;
        let hosted = host.take().map(|mut host| {
            let builder = std::thread::Builder::new().name("host".into());
            builder.spawn_scoped(scope, move || {
                begin();
                let outcome = ends(host.run(events, step));
                events.rests(&host.shm);
                outcome.map(|()| host.cursor)
            })
        });
        let hosted = hosted.transpose().map_err(failed)?;
        let outcome = loop {
            match compute(shm) {
                Ok(Compute::Moved) => {}
                Ok(Compute::Finished) => break Ok(()),
                Ok(Compute::Waits(event, due)) => {
                    let begun = Instant::now();
                    events.wait(event, due, awake, shm);
                    shm.waited += begun.elapsed();
                }
                Err(e) => {
                    events.end();
                    break Err(e);
                }
            }
            if events.ended() {
                break Ok(());
            }
        };
        events.rests(shm);
        let hosted = hosted.map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).transpose();
        if until == PhaseEnd::Computed {
            events.end();
        }
        let communicated = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        outcome?;
        Ok(hosted?.into_iter().chain(communicated?).collect())
    })
}

impl Communication<'_> {
    /// Until all streams have come to the end of the phase, or the work has ended. What is under way then can be
    /// taken up again.
    fn run(&mut self, events: &Events, step: &Step) -> Result<(), ExecError> {
        let frame = self.frame;
        let mut pending: Vec<Option<Pending>> = self.cursors.iter().map(|_| None).collect();
        let mut coords = self.frame.job.mesh.coords(self.frame.rank);
        // The thread looks only a few times before it sleeps, as a core that waits for messages does not compute.
        let awake = self.shm.awake(self.shm.spins().min(200));
        let (mut looks, mut told) = (0, vec![]);
        loop {
            let bell = self.shm.bell();
            let (mut moved, mut left) = (false, false);
            for (cursor, pending) in self.cursors.iter_mut().zip(&mut pending) {
                while let Some((call, command)) = cursor.next(self.frame.program, &self.frame.stage.schedule) {
                    left = true;
                    let done = match &command.action {
                        Action::Wait { event } => events.reached(*event) >= cursor.due(*event),
                        Action::Record { event } => {
                            events.reach(*event);
                            events.ring();
                            true
                        }
                        action => {
                            if pending.is_none() && frame.is_left_out(&mut coords, call, command, self.memory.as_ref()) {
                                moved = true;
                                cursor.leave_out(command);
                                continue;
                            }
                            if pending.is_none() {
                                *pending = frame.transfer(&mut coords, call, action).map(|t| Pending::new(t, cursor.through));
                            }
                            let transfer =
                                pending.as_mut().expect("invariant: other streams than compute and the host's have communication and copies alone");
                            let outcome = self.shm.poll(self.memory.as_mut(), transfer);
                            let progress = outcome.map_err(|e| self.frame.error(step, cursor.at, Fault::Comm(e)))?;
                            moved |= progress.moved;
                            progress.done
                        }
                    };
                    if !done {
                        break;
                    }
                    *pending = None;
                    moved = true;
                    cursor.pass(command);
                }
            }
            // Messages that were sent last may need this thread to be on their way.
            if !left && !self.shm.is_busy() || events.ended() {
                self.shm.say_waits(None, vec![], &mut told);
                for (cursor, pending) in self.cursors.iter_mut().zip(&pending) {
                    cursor.through = pending.as_ref().map_or(cursor.through, Pending::through);
                }
                return Ok(());
            }
            looks = if moved { 0 } else { looks + 1 };
            if moved {
                self.shm.say_waits(None, vec![], &mut told);
            }
            // A disk rings no bell.
            if moved || looks < awake || self.memory.rest(SHORT) {
                std::hint::spin_loop();
                continue;
            }
            self.sleep(events, step, &pending, bell, &mut told)?;
        }
    }

    /// Sleeps until something may have changed. While the compute stream waits as well, the rank says for whom;
    /// `told` is what it has said.
    fn sleep(&mut self, events: &Events, step: &Step, pending: &[Option<Pending>], bell: u32, told: &mut Vec<u64>) -> Result<(), ExecError> {
        let first = pending.iter().zip(&self.cursors).find_map(|(p, cursor)| p.as_ref().map(|_| cursor.at));
        let on: Vec<u64> = pending.iter().flatten().flat_map(|p| self.shm.waits_for(p)).collect();
        let waits = events.working.load(Ordering::SeqCst) == 0;
        self.shm.say_waits(first.map(|at| (step.number, at)), if waits { on } else { vec![] }, told);
        self.shm.sleep(bell);
        match self.shm.ended() {
            None => Ok(()),
            Some(reason) => Err(self.frame.error(step, first.unwrap_or_default(), Fault::Comm(CommError::Aborted(reason)))),
        }
    }
}
