//! Kernels as the driver has them: functions of modules, the parameters that they are launched with, and tensor maps, which are among these.

use super::driver::text;
use cudarc::driver::{result, sys};
use ir::launch::{Launch, MAP_BYTES, Swizzle, TensorMap};
use ir::op::DType;
use std::ffi::{CString, c_void};
use std::ptr::null_mut;

/// A kernel that can be launched.
#[derive(Clone)]
pub(super) struct Loaded {
    pub(super) function: sys::CUfunction,
    pub(super) launch: Launch,
}

// SAFETY: handles of a context that lives as long as its `Cuda`; the driver may be called from any thread.
unsafe impl Send for Loaded {}
// SAFETY: as above.
unsafe impl Sync for Loaded {}

/// Loads a module for its one kernel. It stays loaded as long as the context.
pub(super) fn function(ptx: &CString, name: &CString, launch: &Launch) -> Result<sys::CUfunction, String> {
    // SAFETY: the text ends with a zero byte; the driver copies it.
    let module = unsafe { result::module::load_data(ptx.as_ptr().cast()) }.map_err(text)?;
    // SAFETY: the module is loaded.
    let function = unsafe { result::module::get_function(module, name.clone()) }.map_err(text)?;
    if launch.shared_bytes > 0 {
        let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function is loaded.
        unsafe { result::function::set_function_attribute(function, attribute, launch.shared_bytes as i32) }.map_err(text)?;
    }
    Ok(function)
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
    let (base, sizes) = map.placed(address);
    let steps = vec![1; sizes.len()];
    let mut out = sys::CUtensorMap { opaque: [0; MAP_BYTES / 8] };
    // SAFETY: the lists are as long as the driver expects for so many dims, and `out` is writable; the memory is not touched.
    unsafe {
        sys::cuTensorMapEncodeTiled(
            &mut out,
            dtype,
            sizes.len() as u32,
            base as *mut c_void,
            sizes.as_ptr(),
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
    .map_err(|e| format!("a tensor map of sizes {sizes:?}, strides {:?}, in boxes of {:?}: {}", map.strides, map.extents, text(e)))?;
    let mut bytes = [0; MAP_BYTES];
    bytes.chunks_exact_mut(8).zip(out.opaque).for_each(|(to, word)| to.copy_from_slice(&word.to_le_bytes()));
    Ok(bytes)
}

/// What `cuLaunchKernel` takes in place of a list of parameters: the packed ones, as they are.
pub(super) struct Packed {
    bytes: usize,
    pub(super) extra: [*mut c_void; 5],
}

impl Packed {
    /// The result refers to `parameters` and to itself: it stays where it is while it is used.
    pub(super) fn new(parameters: &[u8]) -> Box<Packed> {
        let mut packed = Box::new(Packed { bytes: parameters.len(), extra: [null_mut(); 5] });
        let tag = |n: u32| n as usize as *mut c_void;
        let size = (&raw mut packed.bytes).cast::<c_void>();
        let start = parameters.as_ptr().cast_mut().cast::<c_void>();
        packed.extra = [
            tag(sys::CU_LAUNCH_PARAM_BUFFER_POINTER_AS_INT),
            start,
            tag(sys::CU_LAUNCH_PARAM_BUFFER_SIZE_AS_INT),
            size,
            tag(sys::CU_LAUNCH_PARAM_END_AS_INT),
        ];
        packed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_parameters_are_passed_by_address_and_length() {
        let parameters = [1u8, 2, 3, 4, 5, 6, 7, 8];
        let packed = Packed::new(&parameters);
        // SAFETY: both addresses are those of values that live.
        let (start, size) = unsafe { (packed.extra[1].cast::<u8>(), *packed.extra[3].cast::<usize>()) };
        assert_eq!((start.cast_const(), size), (parameters.as_ptr(), 8));
        assert_eq!([0, 2, 4].map(|k| packed.extra[k] as usize), [1, 2, 0]);
    }
}
