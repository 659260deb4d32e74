//! Kernels as the driver has them: functions of modules, the parameters that they are launched with, and tensor maps,
//! which are among these.

use super::driver::text;
use crate::device::ThreadResources;
use cudarc::driver::{result, sys};
use ir::launch::{Launch, MAP_BYTES, Swizzle, TensorMap};
use ir::op::DType;
use std::ffi::{CString, c_void};

/// A kernel that can be launched.
#[derive(Clone)]
pub(super) struct CudaKernel {
    pub(super) function: sys::CUfunction,
    pub(super) launch: Launch,
    pub(super) needs: ThreadResources,
}

// SAFETY: handles of a context that lives as long as its `Cuda`; the driver may be called from any thread.
unsafe impl Send for CudaKernel {}
// SAFETY: as above.
unsafe impl Sync for CudaKernel {}

/// Loads a module for its one kernel, as it was assembled if it was. It stays loaded as long as the context.
///
/// # Errors
/// The driver refuses it, or gave it too few registers to share out among its warps.
pub(super) fn load(ptx: &CString, cubin: Option<&[u8]>, name: &CString, launch: Launch) -> Result<CudaKernel, String> {
    let module = match cubin {
        // SAFETY: the text ends with a zero byte; the driver copies it.
        None => unsafe { result::module::load_data(ptx.as_ptr().cast()) }.map_err(text),
        // SAFETY: an ELF file, which says itself how long it is, and has been hashed; the driver copies it.
        Some(code) => unsafe { result::module::load_data(code.as_ptr().cast()) }
            .map_err(|e| format!("{}: the driver does not take its cubin; compiled without --cubin, the driver makes code of PTX", text(e))),
    }?;
    // SAFETY: the module is loaded.
    let function = unsafe { result::module::get_function(module, name.clone()) }.map_err(text)?;
    if launch.shared_bytes > 0 {
        let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function is loaded.
        unsafe { result::function::set_function_attribute(function, attribute, launch.shared_bytes as i32) }.map_err(text)?;
    }
    use sys::CUfunction_attribute_enum::{CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES as LOCAL, CU_FUNC_ATTRIBUTE_NUM_REGS as REGISTERS};
    // SAFETY: the function is loaded.
    let [registers, local_bytes] = [REGISTERS, LOCAL].map(|a| unsafe { result::function::get_function_attribute(function, a) }.map_err(text));
    let needs = ThreadResources { registers: registers? as u32, local_bytes: local_bytes? as u32 };
    shared_out(&ptx.to_string_lossy(), launch.block, needs.registers)?;
    Ok(CudaKernel { function, launch, needs })
}

/// Threads of a warpgroup, which have more or fewer registers together.
const WARPGROUP: u32 = 128;

/// Whether a block's registers are enough for what its warpgroups will have: one gives some of its own to all others,
/// which wait for them. With fewer than the text was written for, they would wait for ever.
fn shared_out(ptx: &str, threads: u32, registers: u32) -> Result<(), String> {
    let asked = |what: &str| -> Option<u32> {
        let (_, after) = ptx.split_once(&format!("setmaxnreg.{what}.sync.aligned.u32"))?;
        after.trim_start().split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
    };
    let (Some(more), Some(fewer)) = (asked("inc"), asked("dec")) else { return Ok(()) };
    let wanted = more * (threads - WARPGROUP) + fewer * WARPGROUP;
    if wanted <= registers * threads {
        return Ok(());
    }
    Err(format!(
        "the driver gives its {threads} threads {registers} registers each, which are too few to have {more} in all warpgroups but one and {fewer} in that: \
         it would hang"
    ))
}

/// The driver's bytes of a tensor map. Its memory is read in pieces of 256 bytes, as neighbouring boxes share them.
pub(super) fn encoded(map: &TensorMap, address: u64) -> Result<[u8; MAP_BYTES], String> {
    let dtype = match map.dtype {
        DType::F32 if map.tf32 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_TFLOAT32,
        DType::F32 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        DType::Bf16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        DType::F16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        DType::I32 | DType::Bool => unreachable!("invariant: tensor maps are of floats"),
    };
    let swizzle = match map.swizzle {
        Swizzle::B128 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
    };
    let steps = vec![1; map.sizes.len()];
    let mut out = sys::CUtensorMap { opaque: [0; MAP_BYTES / 8] };
    // SAFETY: the lists are as long as the driver expects for so many dims, and `out` is writable; the memory is not
    // touched.
    unsafe {
        sys::cuTensorMapEncodeTiled(
            &mut out,
            dtype,
            map.sizes.len() as u32,
            address as *mut c_void,
            map.sizes.as_ptr(),
            map.strides.as_ptr(),
            map.extents.as_ptr(),
            steps.as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    }
    .result()
    .map_err(|e| {
        format!("a tensor map at {address:#x} of sizes {:?}, strides {:?}, in boxes of {:?}: {}", map.sizes, map.strides, map.extents, text(e))
    })?;
    let mut bytes = [0; MAP_BYTES];
    bytes.chunks_exact_mut(8).zip(out.opaque).for_each(|(to, word)| to.copy_from_slice(&word.to_le_bytes()));
    Ok(bytes)
}

/// Where each parameter of a kernel lies among the packed ones: the tensor maps, and one for all others, as
/// `cuLaunchKernel` takes them.
///
/// Not as one buffer (`CU_LAUNCH_PARAM_BUFFER_POINTER`): driver 580 puts that where parameters begin, and not where a
/// kernel whose first parameter is aligned to 64 bytes has it, so tensor maps are read 48 bytes off.
pub(super) fn places(launch: &Launch, parameters: &[u8]) -> Vec<*mut c_void> {
    let maps = launch.maps.len() * MAP_BYTES;
    let each = (0..maps).step_by(MAP_BYTES).chain((maps < parameters.len()).then_some(maps));
    each.map(|at| parameters[at..].as_ptr().cast_mut().cast()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warpgroups_that_would_wait_for_registers_for_ever_are_refused() {
        let ptx = "setmaxnreg.dec.sync.aligned.u32 40;\n setmaxnreg.inc.sync.aligned.u32 232;";
        assert_eq!(shared_out(ptx, 384, 168), Ok(()));
        assert!(shared_out(ptx, 384, 160).is_err_and(|e| e.contains("160 registers") && e.contains("hang")));
        assert_eq!(shared_out("add.f32", 1024, 16), Ok(()));
    }

    #[test]
    fn each_map_and_the_rest_are_a_parameter() {
        let map = TensorMap {
            argument: 0,
            dtype: DType::Bf16,
            tf32: false,
            sizes: vec![64, 64],
            strides: vec![128],
            extents: vec![64, 64],
            swizzle: Swizzle::B128,
        };
        let launch = |maps| Launch {
            grid: 1,
            resident: None,
            cluster: 1,
            block: 32,
            shared_bytes: 0,
            scratch_bytes: 0,
            maps: vec![map.clone(); maps],
            parameters: vec![],
        };
        let parameters = vec![0u8; 2 * MAP_BYTES + 16];
        let offsets = |launch: &Launch, parameters: &[u8]| -> Vec<usize> {
            places(launch, parameters).iter().map(|p| *p as usize - parameters.as_ptr() as usize).collect()
        };
        assert_eq!(offsets(&launch(2), &parameters), [0, MAP_BYTES, 2 * MAP_BYTES]);
        assert_eq!(offsets(&launch(2), &parameters[..2 * MAP_BYTES]), [0, MAP_BYTES]);
        assert_eq!(offsets(&launch(0), &parameters[..16]), [0]);
    }
}
