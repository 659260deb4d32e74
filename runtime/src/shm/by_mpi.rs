//! Ranks whose programs exchange by MPI: the memory that they share then has how they are, what they are asked and
//! how the run ends, and no numbers.

use super::Shm;
use super::wires::WHY;
use crate::comm::{CommError, Polled};
use crate::device::Memory;
use crate::executor::Transfer;
use crate::mpi::Mpi;
use rustix::thread::set_current_timer_slack;
use std::num::NonZeroU64;
use std::sync::{Arc, Mutex, MutexGuard, mpsc};
use std::time::{Duration, Instant};

/// How often a rank that waits for all others in one call shows that it is alive.
const SIGN: Duration = Duration::from_millis(100);
/// As long as a look at MPI takes, so many are taken at shared memory.
const LOOKS: u32 = 20;
/// Nanoseconds by which the system may lengthen a sleep; by default 50,000.
const SLACK: u64 = 1_000;
/// How often a rank that was failed looks whether it is told why.
const LOOK: Duration = Duration::from_millis(20);

impl Shm<'_> {
    /// From now on exchanges of this end, and of its twins to come, go by MPI.
    pub fn exchange_by(&mut self, mpi: Mpi) {
        self.mpi = Some(Arc::new(Mutex::new(mpi)));
    }

    fn mpi(&self) -> Option<MutexGuard<'_, Mpi>> {
        self.mpi.as_ref().map(|mpi| mpi.lock().expect("invariant: no holder panics"))
    }

    /// Goes on with a communication by MPI, if that is how this rank exchanges.
    pub(super) fn poll_mpi(&self, memory: &mut dyn Memory, transfer: &Transfer) -> Option<Result<Polled, CommError>> {
        let polled = self.mpi()?.poll(memory, transfer);
        Some(polled.map_err(|e| self.why(e)))
    }

    pub(super) fn waits_by_mpi(&self, transfer: &Transfer) -> Option<Vec<u64>> {
        Some(self.mpi()?.waits_for(transfer))
    }

    /// How long to sleep at most until the next look, if anything goes on only while this rank looks.
    pub(super) fn nap(&self) -> Option<Duration> {
        self.mpi()?.nap()
    }

    /// Whether anything is under way, beside what streams have come to, that only goes on while this rank looks.
    pub fn is_busy(&self) -> bool {
        self.mpi().is_some_and(|mut mpi| mpi.is_busy())
    }

    /// How often a thread of this rank looks before it sleeps, of so many looks at shared memory, which cost little.
    /// Where it is MPI that is asked, sleeps are as short as they are meant from here on.
    pub(crate) fn awake(&self, looks: u32) -> u32 {
        if self.mpi.is_none() {
            return looks;
        }
        // If this fails, short sleeps take longer, and nothing else is lost.
        let _ = set_current_timer_slack(NonZeroU64::new(SLACK));
        looks.div_ceil(LOOKS)
    }

    /// A connection that breaks is mostly the end of another rank: who watches all of them says which.
    fn why(&self, error: CommError) -> CommError {
        let CommError::Failed(_) = error else { return error };
        let deadline = Instant::now() + WHY;
        while Instant::now() < deadline {
            if let Some(reason) = self.ended() {
                return CommError::Aborted(reason);
            }
            std::thread::sleep(LOOK);
        }
        error
    }

    /// Makes a call in which this rank waits for all others, however long that takes them, up to a limit: then it
    /// does not show any more that it is alive.
    pub fn together<T>(&self, limit: Duration, call: impl FnOnce() -> T) -> T {
        let others: Vec<u64> = (0..self.board.layout.world).filter(|r| *r != self.rank).collect();
        self.waiting(None, &others);
        let (done, waits) = mpsc::channel::<()>();
        let made = std::thread::scope(|scope| {
            scope.spawn(move || {
                let deadline = Instant::now() + limit;
                while Instant::now() < deadline && waits.recv_timeout(SIGN) == Err(mpsc::RecvTimeoutError::Timeout) {
                    self.progress();
                }
            });
            let made = call();
            drop(done);
            made
        });
        self.running();
        made
    }

    /// Leaves MPI together with all other ranks, if it exchanges so. There are no twins any more.
    ///
    /// # Errors
    /// If the run ends meanwhile, or what was sent last cannot be.
    pub fn leave(&mut self, limit: Duration) -> Result<(), CommError> {
        let Some(mpi) = self.mpi.take() else { return Ok(()) };
        let mpi = Arc::into_inner(mpi).expect("invariant: twins live as long as a phase");
        let mpi = mpi.into_inner().expect("invariant: no holder panics");
        self.together(limit, || mpi.leave(|| self.ended())).map_err(|e| self.why(e))
    }
}
