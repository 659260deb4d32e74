//! The MPI library, by the crate `mpi`, whose bindings give the non-blocking calls: their requests outlive the phase
//! of a step in which they are begun, which its own scopes do not allow.

use super::{PointToPoint, Receiving, Sending};
use mpi::environment::{self, Threading, Universe};
use mpi::ffi;
use mpi::traits::{AsRaw, Communicator};
use std::mem::{ManuallyDrop, MaybeUninit};
use std::os::raw::{c_char, c_int, c_void};
use std::ptr;
use std::sync::Arc;

/// Its name and version.
pub fn version() -> String {
    let all = environment::library_version().unwrap_or_default();
    let words: Vec<&str> = all.lines().next().unwrap_or_default().split(',').next().unwrap_or_default().split_whitespace().collect();
    words.join(" ").trim_end_matches('\0').to_owned()
}

/// All ranks, as MPI has them. Dropping it leaves them alone: who leaves waits for the others
/// ([`PointToPoint::leave`]).
struct MpiWorld {
    universe: ManuallyDrop<Universe>,
    comm: ffi::MPI_Comm,
    tags: u32,
}

// SAFETY: a handle, which the library takes from any thread, one at a time: so it was initialised, and its owner is
// behind a lock.
unsafe impl Send for MpiWorld {}

/// As [`super::connect`].
pub fn connect(rank: u64, world: u64) -> Result<Box<dyn PointToPoint>, String> {
    let (universe, threads) = environment::initialize_with_threading(Threading::Serialized).ok_or("it was initialised before")?;
    let universe = ManuallyDrop::new(universe);
    let all = universe.world();
    let (found, size) = (all.rank(), all.size());
    if (found as u64, size as u64) != (rank, world) {
        return Err(format!(
            "{} says that this is rank {found} of {size}, and it is rank {rank} of {world}: the launcher is of another MPI than that with which \
             mcc-rank was built, or does not speak to it (srun has --mpi=pmix for Open MPI; `srun --mpi=list` says what else)",
            version()
        ));
    }
    if threads < Threading::Serialized {
        return Err(format!("{} cannot be called by several threads, though one at a time", version()));
    }
    // SAFETY: the library is initialised; the handle is written before it is used.
    unsafe {
        let mut comm = MaybeUninit::uninit();
        check(ffi::MPI_Comm_dup(all.as_raw(), comm.as_mut_ptr()))?;
        let comm = comm.assume_init();
        check(ffi::MPI_Comm_set_errhandler(comm, ffi::RSMPI_ERRORS_RETURN))?;
        // Errors of calls that name no communicator go to this one.
        check(ffi::MPI_Comm_set_errhandler(all.as_raw(), ffi::RSMPI_ERRORS_RETURN))?;
        let (mut most, mut found): (*mut c_int, c_int) = (ptr::null_mut(), 0);
        check(ffi::MPI_Comm_get_attr(all.as_raw(), ffi::MPI_TAG_UB as c_int, (&raw mut most).cast::<c_void>(), &mut found))?;
        // The standard guarantees at least this many tags.
        let tags = if found != 0 && !most.is_null() { *most as u32 } else { 32_767 };
        Ok(Box::new(MpiWorld { universe, comm, tags }))
    }
}

impl PointToPoint for MpiWorld {
    fn send(&mut self, to: u64, tag: u32, bytes: Arc<Vec<u8>>) -> Result<Box<dyn Sending>, String> {
        let mut request = MaybeUninit::uninit();
        // SAFETY: the bytes stay where they are until the request is done, or for ever (`Out`).
        let request = unsafe {
            let (start, count) = (bytes.as_ptr().cast(), bytes.len() as c_int);
            check(ffi::MPI_Isend(start, count, ffi::RSMPI_UINT8_T, to as c_int, tag as c_int, self.comm, request.as_mut_ptr()))?;
            request.assume_init()
        };
        Ok(Box::new(Out { request, bytes: ManuallyDrop::new(bytes), done: false }))
    }

    fn recv(&mut self, from: u64, tag: u32, most: usize) -> Result<Box<dyn Receiving>, String> {
        let mut bytes = vec![0; most];
        let mut request = MaybeUninit::uninit();
        // SAFETY: the bytes stay where they are, and nobody else uses them, until the request is done, or for ever
        // (`In`).
        let request = unsafe {
            let (start, count) = (bytes.as_mut_ptr().cast(), most as c_int);
            check(ffi::MPI_Irecv(start, count, ffi::RSMPI_UINT8_T, from as c_int, tag as c_int, self.comm, request.as_mut_ptr()))?;
            request.assume_init()
        };
        Ok(Box::new(In { request, bytes: ManuallyDrop::new(bytes) }))
    }

    fn tags(&self) -> u32 {
        self.tags
    }

    fn leave(mut self: Box<Self>) {
        // SAFETY: nothing is under way by it.
        unsafe { ffi::MPI_Comm_free(&mut self.comm) };
        ManuallyDrop::into_inner(self.universe);
    }
}

/// A message that is being sent. While it is, dropping it keeps its bytes.
struct Out {
    request: ffi::MPI_Request,
    bytes: ManuallyDrop<Arc<Vec<u8>>>,
    done: bool,
}

// SAFETY: as for `MpiWorld`.
unsafe impl Send for Out {}

impl Sending for Out {
    fn is_done(&mut self) -> Result<bool, String> {
        if !self.done && test(&mut self.request)?.is_some() {
            self.done = true;
            // SAFETY: once, and not used again.
            unsafe { ManuallyDrop::drop(&mut self.bytes) };
        }
        Ok(self.done)
    }
}

/// A message that is being received. While it is, dropping it keeps its bytes.
struct In {
    request: ffi::MPI_Request,
    bytes: ManuallyDrop<Vec<u8>>,
}

// SAFETY: as for `MpiWorld`.
unsafe impl Send for In {}

impl Receiving for In {
    fn received(&mut self) -> Result<Option<Vec<u8>>, String> {
        let Some(status) = test(&mut self.request)? else { return Ok(None) };
        let mut count = 0;
        // SAFETY: the status is of a message that was received.
        check(unsafe { ffi::MPI_Get_count(&status, ffi::RSMPI_UINT8_T, &mut count) })?;
        let mut bytes = std::mem::take(&mut *self.bytes);
        bytes.truncate(count as usize);
        Ok(Some(bytes))
    }
}

/// Whether a request is done; what the library says of it then.
fn test(request: &mut ffi::MPI_Request) -> Result<Option<ffi::MPI_Status>, String> {
    let (mut done, mut status) = (0, MaybeUninit::<ffi::MPI_Status>::zeroed());
    // SAFETY: the request was begun, or is the library's word for none.
    let code = unsafe { ffi::MPI_Test(request, &mut done, status.as_mut_ptr()) };
    check(code)?;
    // SAFETY: zeros are a status, and the library has written it where the request is done.
    Ok((done != 0).then(|| unsafe { status.assume_init() }))
}

fn check(code: c_int) -> Result<(), String> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    // The buffer is longer than any library's messages.
    let (mut text, mut length) = ([0u8; 4096], 0);
    // SAFETY: there is room for the text.
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast::<c_char>(), &mut length) };
    let text = String::from_utf8_lossy(&text[..(length.max(0) as usize).min(text.len())]).into_owned();
    Err(text.split_whitespace().collect::<Vec<_>>().join(" "))
}
