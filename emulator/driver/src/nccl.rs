//! The C interface of NCCL: what mcc looks up in it, under the names of its header.
#![expect(clippy::missing_safety_doc, reason = "the header's functions are documented by NVIDIA")]

use crate::collective::{Dtype, Reduce};
use crate::comm::CommOutput;
use crate::exchange::{Call, ExchangeKind};
use crate::mesh::root;
use crate::state::{Nccl, State, answer, refuse};
use cudarc::nccl::sys::{cudaStream_t, ncclComm_t, ncclConfig_t, ncclResult_t, ncclUniqueId};
use std::cell::RefCell;
use std::ffi::{c_char, c_int, c_void};
use std::time::SystemTime;

const GOOD: ncclResult_t = ncclResult_t::ncclSuccess;
const ON_ITS_WAY: ncclResult_t = ncclResult_t::ncclInProgress;
const INVALID: ncclResult_t = ncclResult_t::ncclInvalidArgument;
/// The mark of an initialised configuration, and its least size, which is that of NCCL 2.18.
const MAGIC: u32 = 0xcafe_beef;
const LEAST: usize = 48;

/// The number of groups that this thread has begun, and the calls in them.
struct Group {
    depth: u32,
    calls: Vec<(u64, u64, Call)>,
}

thread_local! {
    static GROUP: RefCell<Group> = const { RefCell::new(Group { depth: 0, calls: vec![] }) };
}

macro_rules! functions {
    ($(fn $name:ident($($argument:ident: $ty:ty),*) -> $good:ident |$state:ident| $body:block)*) => {
        $(
            /// As `nccl.h` declares it, for emulated GPUs.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($argument: $ty),*) -> ncclResult_t {
                answer(stringify!($name), $good, |$state: &mut State| $body)
            }
        )*
    };
}

fn put<T>(to: *mut T, value: T) -> Nccl {
    if to.is_null() {
        return refuse(INVALID, "a result has no place");
    }
    // SAFETY: the caller's pointers are valid.
    unsafe { to.write(value) };
    Ok(())
}

/// Checks a configuration, as far as it is modelled.
fn check(config: *const ncclConfig_t) -> Nccl {
    if config.is_null() {
        return refuse(INVALID, "communicators that block are not modelled");
    }
    // SAFETY: the caller's configuration has at least the fields of 2.18.
    let config = unsafe { config.read() };
    if config.magic != MAGIC || config.size < LEAST {
        return refuse(INVALID, "the configuration is not initialised");
    }
    if config.blocking != 0 {
        return refuse(INVALID, "communicators that block are not modelled");
    }
    if config.maxCTAs != i32::MIN && !(1..=32).contains(&config.maxCTAs) {
        return refuse(INVALID, format!("a communicator is to have at most {} blocks, of 1 to 32", config.maxCTAs));
    }
    Ok(())
}

functions! {
    fn ncclGetVersion(version: *mut c_int) -> GOOD |state| { put(version, state.settings.nccl) }
    fn ncclGetUniqueId(id: *mut ncclUniqueId) -> GOOD |state| {
        let now = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |t| t.as_nanos());
        let name = format!("emulated-nccl-{}-{}-{now:x}", std::process::id(), state.roots.len());
        let listener = root(state.settings.sockets.as_deref(), &name).or_else(|e| refuse(ncclResult_t::ncclSystemError, e.to_string()))?;
        state.roots.push(listener);
        let mut internal = [0; 128];
        internal.iter_mut().zip(name.bytes()).for_each(|(to, b)| *to = b as c_char);
        put(id, ncclUniqueId { internal })
    }
    fn ncclCommInitRankConfig(comm: *mut ncclComm_t, count: c_int, id: ncclUniqueId, rank: c_int, config: *mut ncclConfig_t) -> ON_ITS_WAY |state| {
        check(config)?;
        let name: Vec<u8> = id.internal.iter().map(|c| *c as u8).take_while(|c| *c != 0).collect();
        if count < 1 || rank < 0 {
            return refuse(INVALID, format!("rank {rank} of {count}"));
        }
        let new = state.join(String::from_utf8_lossy(&name).into_owned(), count as usize, rank as usize)?;
        put(comm, new as ncclComm_t)
    }
    fn ncclCommSplit(comm: ncclComm_t, color: c_int, key: c_int, new: *mut ncclComm_t, config: *mut ncclConfig_t) -> ON_ITS_WAY |state| {
        check(config)?;
        put(new, std::ptr::null_mut())?;
        state.split(comm as u64, color, key, CommOutput(new))
    }
    fn ncclCommGetAsyncError(comm: ncclComm_t, result: *mut ncclResult_t) -> GOOD |state| {
        let found = state.look(comm as u64)?;
        put(result, found)
    }
    fn ncclCommFinalize(comm: ncclComm_t) -> ON_ITS_WAY |state| { state.end(comm as u64) }
    fn ncclCommDestroy(comm: ncclComm_t) -> GOOD |state| { state.destroy(comm as u64) }
    fn ncclCommAbort(comm: ncclComm_t) -> GOOD |state| { state.abort(comm as u64) }
}

/// The text of a result code, which stays valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetErrorString(result: u32) -> *const c_char {
    let text = match result {
        0 => c"no error",
        1 => c"unhandled cuda error",
        2 => c"unhandled system error",
        3 => c"internal error",
        4 => c"invalid argument",
        5 => c"invalid usage",
        6 => c"remote process exited or there was a network error",
        7 => c"NCCL operation in progress",
        _ => c"unknown result code",
    };
    text.as_ptr()
}

/// Begins a group of calls of this thread, or one inside of another.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGroupStart() -> ncclResult_t {
    GROUP.with_borrow_mut(|g| g.depth += 1);
    GOOD
}

/// Ends a group; the outermost one starts its calls, all of one communicator and stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGroupEnd() -> ncclResult_t {
    answer("ncclGroupEnd", ON_ITS_WAY, |state| {
        let calls = GROUP.with_borrow_mut(|g| match g.depth {
            0 => refuse(ncclResult_t::ncclInvalidUsage, "no group has been begun"),
            depth => {
                g.depth -= 1;
                Ok(if depth == 1 { std::mem::take(&mut g.calls) } else { vec![] })
            }
        })?;
        let Some((comm, stream, _)) = calls.first().cloned() else { return Ok(()) };
        if calls.iter().any(|c| (c.0, c.1) != (comm, stream)) {
            return refuse(INVALID, "groups of several communicators or streams are not modelled");
        }
        state.ask(comm, stream, calls.into_iter().map(|c| c.2).collect())
    })
}

/// Asks for one call, now or at the end of its group.
fn ask(name: &str, comm: ncclComm_t, stream: cudaStream_t, dtype: u32, call: impl FnOnce(Dtype) -> Nccl<Call>) -> ncclResult_t {
    let grouped = GROUP.with_borrow(|g| g.depth > 0);
    answer(name, if grouped { GOOD } else { ON_ITS_WAY }, |state| {
        let Some(dtype) = Dtype::new(dtype) else { return refuse(INVALID, format!("elements of type {dtype} are not modelled")) };
        let call = call(dtype)?;
        let (comm, stream) = (comm as u64, stream as u64);
        if grouped {
            state.comm(comm)?;
            GROUP.with_borrow_mut(|g| g.calls.push((comm, stream, call)));
            return Ok(());
        }
        state.ask(comm, stream, vec![call])
    })
}

fn reduction(op: u32) -> Nccl<Reduce> {
    Reduce::new(op).map_or_else(|| refuse(INVALID, format!("reduction {op} is not modelled")), Ok)
}

/// Sends `count` elements to the rank `peer`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclSend(from: *const c_void, count: usize, ty: u32, peer: c_int, comm: ncclComm_t, on: cudaStream_t) -> ncclResult_t {
    let kind = ExchangeKind::Send(peer as usize);
    ask("ncclSend", comm, on, ty, |dtype| Ok(Call { kind, dtype, count: count as u64, from: from as u64, to: 0 }))
}

/// Receives `count` elements from the rank `peer`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclRecv(to: *mut c_void, count: usize, ty: u32, peer: c_int, comm: ncclComm_t, on: cudaStream_t) -> ncclResult_t {
    let kind = ExchangeKind::Recv(peer as usize);
    ask("ncclRecv", comm, on, ty, |dtype| Ok(Call { kind, dtype, count: count as u64, from: 0, to: to as u64 }))
}

/// Puts `count` elements of every rank, in the order of ranks, on all of them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAllGather(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    ty: u32,
    comm: ncclComm_t,
    on: cudaStream_t,
) -> ncclResult_t {
    let kind = ExchangeKind::AllGather;
    ask("ncclAllGather", comm, on, ty, |dtype| Ok(Call { kind, dtype, count: count as u64, from: from as u64, to: to as u64 }))
}

/// Reduces `count` elements over all ranks; all have the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAllReduce(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    ty: u32,
    op: u32,
    comm: ncclComm_t,
    on: cudaStream_t,
) -> ncclResult_t {
    ask("ncclAllReduce", comm, on, ty, |dtype| {
        Ok(Call { kind: ExchangeKind::AllReduce(reduction(op)?), dtype, count: count as u64, from: from as u64, to: to as u64 })
    })
}

/// Reduces elements over all ranks; each has its `count` of the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclReduceScatter(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    ty: u32,
    op: u32,
    comm: ncclComm_t,
    on: cudaStream_t,
) -> ncclResult_t {
    ask("ncclReduceScatter", comm, on, ty, |dtype| {
        Ok(Call { kind: ExchangeKind::ReduceScatter(reduction(op)?), dtype, count: count as u64, from: from as u64, to: to as u64 })
    })
}
