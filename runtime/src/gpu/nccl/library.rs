//! NCCL's library, found by the names under which it is installed: packages of distributions and of Python have
//! `libnccl.so.2` alone, which the bindings' own loader does not look for. Types are the bindings'.

use cudarc::nccl::sys::{cudaStream_t, ncclComm_t, ncclConfig_t, ncclDataType_t, ncclRedOp_t, ncclResult_t, ncclUniqueId};
use libloading::Library;
use std::ffi::{c_char, c_int, c_void};
use std::sync::OnceLock;

/// Names of the library; the first that can be loaded is taken.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

macro_rules! functions {
    ($($name:ident($($argument:ident: $ty:ty),*) -> $result:ty;)*) => {
        /// What mcc calls, by the names of NCCL's header.
        #[expect(non_snake_case, reason = "as in the header")]
        struct Functions {
            $($name: unsafe extern "C" fn($($ty),*) -> $result,)*
            _library: Library,
        }

        impl Functions {
            fn of(library: Library) -> Result<Functions, libloading::Error> {
                // SAFETY: the types are those of NCCL's header, and the library stays loaded as long as they are
                // there.
                unsafe { Ok(Functions { $($name: *library.get(concat!(stringify!($name), "\0").as_bytes())?,)* _library: library }) }
            }
        }

        $(
            /// # Safety
            /// As NCCL says; the library has been found ([`find`]).
            #[expect(non_snake_case, reason = "as in the header")]
            pub unsafe fn $name($($argument: $ty),*) -> $result {
                let functions = LOADED.get().and_then(|found| found.as_ref().ok()).expect("invariant: nothing is called before NCCL was found");
                // SAFETY: the caller's.
                unsafe { (functions.$name)($($argument),*) }
            }
        )*
    };
}

functions! {
    ncclGetUniqueId(id: *mut ncclUniqueId) -> ncclResult_t;
    ncclGetErrorString(result: ncclResult_t) -> *const c_char;
    ncclCommInitRankConfig(comm: *mut ncclComm_t, count: c_int, id: ncclUniqueId, rank: c_int, config: *mut ncclConfig_t) -> ncclResult_t;
    ncclCommSplit(comm: ncclComm_t, color: c_int, key: c_int, new: *mut ncclComm_t, config: *mut ncclConfig_t) -> ncclResult_t;
    ncclCommGetAsyncError(comm: ncclComm_t, state: *mut ncclResult_t) -> ncclResult_t;
    ncclCommFinalize(comm: ncclComm_t) -> ncclResult_t;
    ncclCommDestroy(comm: ncclComm_t) -> ncclResult_t;
    ncclCommAbort(comm: ncclComm_t) -> ncclResult_t;
    ncclGroupStart() -> ncclResult_t;
    ncclGroupEnd() -> ncclResult_t;
    ncclSend(from: *const c_void, count: usize, ty: ncclDataType_t, peer: c_int, comm: ncclComm_t, stream: cudaStream_t) -> ncclResult_t;
    ncclRecv(to: *mut c_void, count: usize, ty: ncclDataType_t, peer: c_int, comm: ncclComm_t, stream: cudaStream_t) -> ncclResult_t;
    ncclAllGather(from: *const c_void, to: *mut c_void, count: usize, ty: ncclDataType_t, comm: ncclComm_t, stream: cudaStream_t) -> ncclResult_t;
    ncclAllReduce(from: *const c_void, to: *mut c_void, count: usize, ty: ncclDataType_t, op: ncclRedOp_t, comm: ncclComm_t, stream: cudaStream_t) -> ncclResult_t;
    ncclReduceScatter(from: *const c_void, to: *mut c_void, count: usize, ty: ncclDataType_t, op: ncclRedOp_t, comm: ncclComm_t, stream: cudaStream_t) -> ncclResult_t;
}

/// The least version, as NCCL writes it: 2.18.0.
pub(super) const LEAST: i32 = 21_800;

static LOADED: OnceLock<Result<Functions, String>> = OnceLock::new();

/// Loads the library, once.
///
/// # Errors
/// It is not there, or not one that mcc can use.
pub fn find() -> Result<(), String> {
    LOADED.get_or_init(|| open(&NAMES)).as_ref().map(drop).map_err(Clone::clone)
}

/// Whether mcc can use a version.
fn recent(version: i32) -> Result<(), String> {
    if version >= LEAST {
        return Ok(());
    }
    // Versions before 2.9 have two digits less.
    let (major, minor) = if version < 10_000 { (version / 1000, version % 1000 / 100) } else { (version / 10_000, version % 10_000 / 100) };
    Err(format!("NCCL {major}.{minor} is too old, mcc needs 2.18 or newer"))
}

fn open(names: &[&str]) -> Result<Functions, String> {
    // SAFETY: loading the library runs its constructors, which is what it is installed for.
    let Some((name, library)) = names.iter().find_map(|name| Some((name, unsafe { Library::new(name) }.ok()?))) else {
        return Err(format!(
            "NCCL cannot be loaded: there is no {} where this machine's loader looks, LD_LIBRARY_PATH included. Install it (the package libnccl2, \
             or nvidia-nccl-cu12 from the Python package index) and, if it lies elsewhere, add its directory to LD_LIBRARY_PATH",
            names.join(" or ")
        ));
    };
    let unusable = |e: libloading::Error| format!("{name} is no NCCL that mcc can use: {e}");
    let mut version = 0;
    // SAFETY: the function's type is that of NCCL's header, `version` is writable.
    unsafe {
        let ask = library.get::<unsafe extern "C" fn(*mut c_int) -> ncclResult_t>(b"ncclGetVersion\0").map_err(unusable)?;
        if ask(&mut version) != ncclResult_t::ncclSuccess {
            return Err(format!("{name} does not say its version"));
        }
    }
    recent(version)?;
    Functions::of(library).map_err(unusable)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_there_is_no_library_the_names_are_said() {
        let said = open(&["libnothing.so.2", "libnothing.so"]).err().expect("it is not there");
        assert!(said.contains("there is no libnothing.so.2 or libnothing.so where this machine's loader looks"), "{said}");
        assert!(said.contains("libnccl2") && said.contains("nvidia-nccl-cu12") && said.contains("LD_LIBRARY_PATH"), "{said}");
    }

    #[test]
    fn the_first_name_that_loads_is_taken_and_must_be_nccl() {
        let said = open(&["libnothing.so.2", "libm.so.6"]).err().expect("it is another library");
        assert!(said.starts_with("libm.so.6 is no NCCL that mcc can use: ") && said.contains("ncclGetVersion"), "{said}");
    }

    #[test]
    fn old_versions_are_named() {
        assert_eq!(recent(21_800), Ok(()));
        assert_eq!(recent(23_004), Ok(()));
        assert_eq!(recent(21_706), Err("NCCL 2.17 is too old, mcc needs 2.18 or newer".into()));
        assert_eq!(recent(2_804), Err("NCCL 2.8 is too old, mcc needs 2.18 or newer".into()));
    }
}
