//! NVIDIA's driver: whether this machine has one that is new enough, and what its GPUs are. It is loaded when
//! somebody asks for it.

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;
use ir::launch::{FEW_PARAMETERS, Launch};

/// The least version of the driver's interface: 12.0.
const LEAST_DRIVER: i32 = 12_000;
/// The least one for kernels with more than [`FEW_PARAMETERS`]: 12.1.
const LEAST_FOR_MANY: i32 = 12_010;

/// Why there is no GPU to run on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum Unavailable {
    #[error("this machine has no NVIDIA driver (libcuda.so cannot be loaded)")]
    NoDriver,
    #[error("the NVIDIA driver supports CUDA {}.{}, mcc needs 12.0 or newer", .0 / 1000, .0 % 1000 / 10)]
    Old(i32),
    #[error("the NVIDIA driver finds no GPU")]
    NoGpu,
    #[error("the NVIDIA driver does not start: {0}")]
    Failed(String),
}

/// The number of GPUs. Nothing of the driver may be called before this has said that there is one: the bindings panic
/// without it.
///
/// # Errors
/// Why there is none.
pub fn probe() -> Result<u64, Unavailable> {
    let failed = |e: DriverError| Unavailable::Failed(text(e));
    // SAFETY: loading the driver runs its constructors, which is what it is installed for.
    if !unsafe { sys::is_culib_present() } {
        return Err(Unavailable::NoDriver);
    }
    let version = version().map_err(failed)?;
    if version < LEAST_DRIVER {
        return Err(Unavailable::Old(version));
    }
    match result::init() {
        Err(DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => return Err(Unavailable::NoGpu),
        other => other.map_err(failed)?,
    }
    match result::device::get_count().map_err(failed)? {
        0 => Err(Unavailable::NoGpu),
        count => Ok(count as u64),
    }
}

/// Version of the driver's interface: 12010 for CUDA 12.1. The library is there.
pub(super) fn version() -> Result<i32, DriverError> {
    let mut version = 0;
    // SAFETY: `version` is writable.
    unsafe { sys::cuDriverGetVersion(&mut version) }.result()?;
    Ok(version)
}

/// Whether a driver takes a launch's parameters.
pub(super) fn takes(version: i32, launch: &Launch) -> Result<(), String> {
    match launch.parameter_bytes() {
        bytes if bytes > FEW_PARAMETERS && version < LEAST_FOR_MANY => Err(format!(
            "the NVIDIA driver supports CUDA {}.{}, a kernel with {bytes} bytes of parameters needs 12.1 or newer",
            version / 1000,
            version % 1000 / 10
        )),
        _ => Ok(()),
    }
}

/// A GPU, as the driver describes it.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Described {
    /// The model's name, such as `NVIDIA H200`.
    pub name: String,
    /// Compute capability: major, minor.
    pub capability: [i32; 2],
    /// Bytes of its memory, whether free or not.
    pub bytes: u64,
}

impl Described {
    /// Dense operations a second with factors in bf16, by the makers' data sheets, where they are known here.
    pub fn peak(&self) -> Option<f64> {
        let peaks = [
            ("B200", 2250e12),
            ("H100 PCIe", 756e12),
            ("H100 NVL", 835e12),
            ("H200 NVL", 835e12),
            ("H100", 989.4e12),
            ("H200", 989.4e12),
            ("A100", 312e12),
            ("L40S", 362e12),
            ("L4", 121e12),
        ];
        // The name has to match as a word: an L4 is no L40.
        let is = |name: &str| format!("{} ", self.name.replace('-', " ")).contains(&format!("{name} "));
        peaks.iter().find(|p| is(p.0)).map(|p| p.1)
    }
}

/// The first GPU.
///
/// # Errors
/// Why there is none.
pub fn describe() -> Result<Described, Unavailable> {
    probe()?;
    let failed = |e: DriverError| Unavailable::Failed(text(e));
    let device = result::device::get(0).map_err(failed)?;
    let capability = capability(device).map_err(failed)?;
    // SAFETY: the device exists.
    let bytes = unsafe { result::device::total_mem(device) }.map_err(failed)?;
    Ok(Described { name: result::device::get_name(device).map_err(failed)?, capability, bytes: bytes as u64 })
}

/// The compute capability of a GPU that exists: major, minor.
pub(super) fn capability(device: sys::CUdevice) -> Result<[i32; 2], DriverError> {
    use sys::CUdevice_attribute_enum as Attribute;
    // SAFETY: the device exists.
    let attribute = |a| unsafe { result::device::get_attribute(device, a) };
    Ok([attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?, attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?])
}

/// The multiprocessors of a GPU that exists.
pub(super) fn multiprocessors(device: sys::CUdevice) -> Result<u32, DriverError> {
    // SAFETY: the device exists.
    let count = unsafe { result::device::get_attribute(device, sys::CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT) };
    count.map(|n| n.max(1) as u32)
}

/// Whether a GPU of a compute capability runs PTX for an architecture: `sm_80` runs on all later ones, `sm_90a` on
/// 9.0 alone.
pub(super) fn fits(arch: &str, [major, minor]: [i32; 2]) -> Result<(), String> {
    let digits: String = arch.chars().filter(char::is_ascii_digit).collect();
    let needed: i32 = digits.parse().map_err(|_| format!("`{arch}` is no architecture"))?;
    let own = 10 * major + minor;
    let can = if arch.ends_with('a') { own == needed } else { own >= needed };
    if can { Ok(()) } else { Err(format!("the GPU has compute capability {major}.{minor}, kernels for {arch} do not run on it")) }
}

/// Whether code that was assembled for an architecture is that of a GPU of a compute capability: of no other, though
/// later ones of the same major number would take it.
pub(super) fn is_own(arch: &str, [major, minor]: [i32; 2]) -> bool {
    let digits: String = arch.chars().filter(char::is_ascii_digit).collect();
    digits.parse() == Ok(10 * major + minor)
}

/// What the driver says of an error.
pub(in crate::gpu) fn text(e: DriverError) -> String {
    let of = |s: Result<&std::ffi::CStr, DriverError>| s.map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
    format!("{}: {}", of(e.error_name()), of(e.error_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_run_on_later_gpus_unless_they_are_for_one_alone() {
        assert_eq!(fits("sm_80", [8, 0]), Ok(()));
        assert_eq!(fits("sm_80", [9, 0]), Ok(()));
        assert_eq!(fits("sm_90a", [9, 0]), Ok(()));
        assert_eq!(fits("sm_80", [7, 5]), Err("the GPU has compute capability 7.5, kernels for sm_80 do not run on it".into()));
        assert_eq!(fits("sm_90a", [10, 0]), Err("the GPU has compute capability 10.0, kernels for sm_90a do not run on it".into()));
    }

    #[test]
    fn assembled_code_is_for_gpus_of_its_own_architecture() {
        assert!(is_own("sm_80", [8, 0]) && is_own("sm_90a", [9, 0]));
        assert!(!is_own("sm_80", [8, 6]) && !is_own("sm_80", [9, 0]) && !is_own("sm_90a", [10, 0]) && !is_own("gpu", [8, 0]));
    }

    #[test]
    fn many_parameters_need_a_newer_driver() {
        let parameters = |count| vec![ir::launch::Parameter::Scratch; count];
        let with = |count| Launch {
            grid: 1,
            resident: None,
            cluster: 1,
            block: 32,
            shared_bytes: 0,
            scratch_bytes: 0,
            maps: vec![],
            parameters: parameters(count),
        };
        assert_eq!([(12_000, 512), (12_010, 513)].map(|(version, count)| takes(version, &with(count))), [Ok(()), Ok(())]);
        let refused = "the NVIDIA driver supports CUDA 12.0, a kernel with 4104 bytes of parameters needs 12.1 or newer";
        assert_eq!(takes(12_000, &with(513)), Err(refused.into()));
    }

    #[test]
    fn what_is_missing_is_said_in_one_line() {
        assert_eq!(Unavailable::Old(11_080).to_string(), "the NVIDIA driver supports CUDA 11.8, mcc needs 12.0 or newer");
        // Asking does not panic, whatever this machine has.
        assert!(probe().map_or_else(|e| !e.to_string().contains('\n'), |count| count > 0));
    }

    #[test]
    fn peaks_are_those_of_the_named_gpus() {
        let peak = |name: &str| Described { name: name.into(), capability: [0; 2], bytes: 0 }.peak();
        assert_eq!(["NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA H100 PCIe", "NVIDIA L4"].map(peak), [989.4e12, 312e12, 756e12, 121e12].map(Some));
        assert_eq!(["NVIDIA L40", "NVIDIA T4"].map(peak), [None; 2]);
    }
}
