//! A rank whose streams run at the same time: compute on the rank's own threads, communication on one more, which takes a piece of
//! whatever can go on in turn, so that no stream holds up another. A phase is over when compute is through; what communication is left is taken up
//! again in the next one.

use crate::comm::CommError;
use crate::cursor::Cursor;
use crate::device::Memory;
use crate::executor::{ExecError, Fault, Frame, Step};
use crate::shm::{Pending, Shm};
use ir::program::Action;
use rustix::thread::futex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// How often each event was reached, and what the threads of a rank tell each other.
#[derive(Debug)]
pub struct Events {
    reached: Vec<AtomicU64>,
    /// Counts whatever the compute stream may wait for; it sleeps on it.
    bell: AtomicU32,
    sleeps: AtomicBool,
    /// The compute stream waits, or is done.
    idle: AtomicBool,
    stop: AtomicBool,
}

impl Events {
    pub fn new(count: usize) -> Events {
        Events {
            reached: (0..count).map(|_| AtomicU64::new(0)).collect(),
            bell: AtomicU32::new(0),
            sleeps: AtomicBool::new(false),
            idle: AtomicBool::new(false),
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

    fn ring(&self) {
        self.bell.fetch_add(1, Ordering::SeqCst);
        if self.sleeps.load(Ordering::SeqCst) {
            let _ = futex::wake(&self.bell, futex::Flags::PRIVATE, 1);
        }
    }

    /// Ends the work of all threads.
    fn end(&self) {
        self.stop.store(true, Ordering::SeqCst);
        self.ring();
    }

    fn ended(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    /// Lets the compute stream wait until an event is reached so often, or the work has ended. `awake` looks before it sleeps.
    fn wait(&self, event: u32, due: u64, awake: u32, shm: &Shm) {
        let ready = || self.reached(event) >= due || self.ended();
        if (0..awake).any(|_| {
            std::hint::spin_loop();
            ready()
        }) {
            return;
        }
        self.idle(true, shm);
        self.sleeps.store(true, Ordering::SeqCst);
        loop {
            let seen = self.bell.load(Ordering::SeqCst);
            if ready() {
                break;
            }
            let _ = futex::wait(&self.bell, futex::Flags::PRIVATE, seen, None);
        }
        self.sleeps.store(false, Ordering::SeqCst);
        self.idle(false, shm);
    }

    /// Whether the rank waits as a whole is for the communication's thread to say.
    fn idle(&self, idle: bool, shm: &Shm) {
        self.idle.store(idle, Ordering::SeqCst);
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

/// The streams of communication in a phase.
pub struct Communication<'a> {
    pub frame: &'a Frame<'a>,
    pub cursors: Vec<Cursor>,
    pub memory: Box<dyn Memory + Send>,
    pub shm: Shm<'a>,
}

/// How long streams run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    Computed,
    /// Nothing is left of any stream.
    Settled,
}

/// Runs a phase: `compute` takes a turn of the compute stream on the calling thread, communication has a thread that calls `begin`
/// first. Gives the cursors back.
///
/// # Errors
/// What stopped one of the two threads first; the other one has ended too.
pub fn run(
    mut communication: Communication,
    begin: Box<dyn FnOnce() + Send>,
    events: &Events,
    until: Until,
    step: &Step,
    shm: &mut Shm,
    mut compute: impl FnMut(&mut Shm) -> Result<Compute, ExecError>,
) -> Result<Vec<Cursor>, ExecError> {
    let awake = shm.spins();
    events.stop.store(false, Ordering::SeqCst);
    std::thread::scope(|scope| {
        let builder = std::thread::Builder::new().name("communication".into());
        let rank = communication.frame.rank;
        let thread = builder.spawn_scoped(scope, move || {
            begin();
            let outcome = communication.run(events, step);
            if outcome.is_err() {
                events.end();
            }
            outcome.map(|()| communication.cursors)
        });
        let thread = thread.map_err(|e| {
            let fault = Fault::Comm(CommError::Failed(format!("a thread could not start: {e}")));
            ExecError { rank, step: step.number, command: "the start of a phase".into(), fault }
        })?;
        let outcome = loop {
            match compute(shm) {
                Ok(Compute::Moved) => {}
                Ok(Compute::Finished) => {
                    if until == Until::Computed {
                        events.end();
                    }
                    break Ok(());
                }
                Ok(Compute::Waits(event, due)) => events.wait(event, due, awake, shm),
                Err(e) => {
                    events.end();
                    break Err(e);
                }
            }
            if events.ended() {
                break Ok(());
            }
        };
        events.idle(true, shm);
        let communicated = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        events.idle(false, shm);
        outcome.and(communicated)
    })
}

impl Communication<'_> {
    /// Until all streams have come to the end of the phase, or the work has ended. What is under way then can be taken up again.
    fn run(&mut self, events: &Events, step: &Step) -> Result<(), ExecError> {
        let frame = self.frame;
        let mut pending: Vec<Option<Pending>> = self.cursors.iter().map(|_| None).collect();
        let mut coords = self.frame.job.mesh.coords(self.frame.rank);
        // Few: a core that waits for messages is one that does not compute.
        let awake = self.shm.spins().min(200);
        let mut looks = 0;
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
                            if pending.is_none() {
                                *pending = frame.transfer(&mut coords, call, action).map(|t| Pending::new(t, cursor.through));
                            }
                            let transfer = pending.as_mut().expect("invariant: only communication is on other streams than compute");
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
            if !left || events.ended() {
                for (cursor, pending) in self.cursors.iter_mut().zip(&pending) {
                    cursor.through = pending.as_ref().map_or(cursor.through, Pending::through);
                }
                return Ok(());
            }
            looks = if moved { 0 } else { looks + 1 };
            if moved || looks < awake {
                std::hint::spin_loop();
                continue;
            }
            self.sleep(events, step, &pending, bell)?;
        }
    }

    /// Sleeps until something may have changed. While the compute stream waits as well, the rank says for whom.
    fn sleep(&mut self, events: &Events, step: &Step, pending: &[Option<Pending>], bell: u32) -> Result<(), ExecError> {
        let first = pending.iter().zip(&self.cursors).find_map(|(p, cursor)| p.as_ref().map(|_| cursor.at));
        let on: Vec<u64> = pending.iter().flatten().flat_map(|p| self.shm.waits_for(p)).collect();
        let told = events.idle.load(Ordering::SeqCst) && !on.is_empty();
        if told {
            self.shm.waiting(first.map(|at| (step.number, at)), &on);
        }
        self.shm.sleep(bell);
        if told {
            self.shm.running();
        }
        match self.shm.ended() {
            None => Ok(()),
            Some(reason) => Err(self.frame.error(step, first.unwrap_or_default(), Fault::Comm(CommError::Aborted(reason)))),
        }
    }
}
