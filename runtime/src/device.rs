//! What holds a rank's arenas and runs its kernels.

use crate::executor::{Copied, Transfer};
use ir::op::DType;
use ir::program::{Arena, KernelId, SendTurn, Stream};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// A byte of an arena. Stashes lie in the temporary one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Location {
    /// Which of the rank's arenas it is in.
    pub arena: Arena,
    /// Offset from the start of the arena, in bytes.
    pub byte: u64,
}

/// How memory hands elements to a communicator ([`Memory::load`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// 8 bytes, in which the reference device holds elements of all dtypes.
    F64,
    /// IEEE 754 single precision, 4 bytes.
    F32,
    /// The upper half of an f32, 2 bytes.
    Bf16,
    /// IEEE 754 half precision, 2 bytes.
    F16,
    /// A signed integer of 4 bytes.
    I32,
    /// One byte: 0 or 1.
    Bool,
}

impl Element {
    /// Elements of memory that holds them in their own dtype.
    pub fn native(dtype: DType) -> Element {
        match dtype {
            DType::F32 => Element::F32,
            DType::Bf16 => Element::Bf16,
            DType::F16 => Element::F16,
            DType::I32 => Element::I32,
            DType::Bool => Element::Bool,
        }
    }

    /// Bytes per element.
    pub fn bytes(self) -> usize {
        match self {
            Element::F64 => 8,
            Element::F32 | Element::I32 => 4,
            Element::Bf16 | Element::F16 => 2,
            Element::Bool => 1,
        }
    }
}

/// Why a device could not do what it was told.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum DeviceError {
    #[error("kernel {0} is not loaded")]
    NotLoaded(u32),
    #[error("{bytes} bytes of the {arena} arena could not be allocated: {cause}")]
    OutOfMemory { arena: &'static str, bytes: u64, cause: String },
    #[error("{0}")]
    Failed(String),
}

/// The arenas of a rank, as communication and the host use them. Locations have been checked against the arenas
/// ([`crate::check`]); ranges are dense and start at `at`.
pub trait Memory {
    /// How elements of a dtype look to [`Memory::load`] and [`Memory::store`].
    fn element(&self, dtype: DType) -> Element;
    /// Copies elements out, as bytes of [`Memory::element`].
    fn load(&self, at: Location, dtype: DType, out: &mut [u8]);
    /// Copies elements in.
    fn store(&mut self, at: Location, dtype: DType, bytes: &[u8]);
    /// Elements as numbers.
    fn read(&self, at: Location, dtype: DType, out: &mut [f64]);
    /// Numbers as elements, rounded to the nearest.
    fn write(&mut self, at: Location, dtype: DType, values: &[f64]);
    /// Copies elements from one place to another.
    fn copy(&mut self, from: Location, to: Location, dtype: DType, count: u64) {
        let mut bytes = vec![0; count as usize * self.element(dtype).bytes()];
        self.load(from, dtype, &mut bytes);
        self.store(to, dtype, &bytes);
    }
    /// Goes on with a copy of which so many elements are through, by about `most` bytes, and says how many are then.
    /// To or from a disk, there may be none for a while ([`Memory::rest`]), and one copy each way is under way at a
    /// time.
    ///
    /// # Errors
    /// What the disk says.
    fn advance(&mut self, copied: &Copied, done: u64, most: usize) -> Result<u64, DeviceError> {
        Ok(advanced(self, copied, done, most))
    }
    /// If a copy to or from a disk is under way, waits until more of it is through, but not longer than this; says
    /// whether it is.
    fn rest(&self, _most: Duration) -> bool {
        false
    }
    /// What failed where nobody could be told, if it must not be lost.
    ///
    /// # Errors
    /// That.
    fn outcome(&self) -> Result<(), DeviceError> {
        Ok(())
    }
}

/// Copies up to `most` bytes from element `done` on, and says how many elements are through.
pub(crate) fn advanced<M: Memory + ?Sized>(memory: &mut M, copied: &Copied, done: u64, most: usize) -> u64 {
    let elements = (copied.count - done).min((most / memory.element(copied.dtype).bytes()) as u64);
    let at = |start: Location| Location { byte: start.byte + done * copied.dtype.bytes(), ..start };
    memory.copy(at(copied.src), at(copied.dst), copied.dtype, elements);
    done + elements
}

/// A device's memory for another thread, which copies or communicates beside the device's own.
pub struct DeviceHandle {
    /// The arenas of the device, which both threads use.
    pub memory: Box<dyn Memory + Send>,
    /// Is called on that thread before anything else.
    pub begin: Box<dyn Fn() + Send + Sync>,
}

/// What exchanges with the devices of other ranks, on streams of the device. It is told in the order of issue.
pub trait Fabric {
    /// A phase begins, in which what is sent goes out at these turns; all of the phase before was issued.
    fn phase(&mut self, sends: &[SendTurn]);
    /// Issues a communication or copy on a stream.
    fn transfer(&mut self, stream: Stream, transfer: &Transfer);
    /// A collective is left out, by all of its members. What has its turn behind it goes out.
    fn leave_out(&mut self);
    /// Runs a kernel of the host when the stream comes to it.
    fn run_on_host(&mut self, stream: Stream, kernel: KernelId, args: &[Location], scalars: &[f64]);
    /// Marks this point of a stream as the last record of an event.
    fn record(&mut self, stream: Stream, event: u32);
    /// The stream goes on when what was before the event's last record is done.
    fn wait(&mut self, stream: Stream, event: u32);
}

/// What each thread of a kernel has of a multiprocessor, as the driver assembled it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThreadResources {
    /// 32-bit registers of one thread.
    pub registers: u32,
    /// Bytes of local memory a thread, for its stack and spilled registers: none in a kernel worth running.
    pub local_bytes: u32,
}

/// Runs kernels.
pub trait Launches {
    /// What a kernel takes, of a device that says so.
    fn needs(&self, _kernel: KernelId) -> Option<ThreadResources> {
        None
    }

    /// Runs a kernel: `args` are its inputs, then its outputs.
    ///
    /// # Errors
    /// If the kernel cannot run.
    fn launch(&mut self, kernel: KernelId, args: &[Location], scalars: &[f64]) -> Result<(), DeviceError>;
}

/// A device executes what it is told in order; some of it maybe later, but before memory shows anything else.
pub trait Device: Memory + Launches {
    /// Sets `count` elements.
    fn fill(&mut self, at: Location, dtype: DType, count: u64, value: f64);
    /// Waits until everything that it was told is done: other threads may then see it.
    ///
    /// # Errors
    /// What went wrong since.
    fn synchronize(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }
    /// Lets another thread use its memory at the same time, if that can be.
    fn second_handle(&self) -> Option<DeviceHandle> {
        None
    }
    /// The device's own communication, if it has any: then no communicator is asked.
    fn fabric(&mut self) -> Option<&mut dyn Fabric> {
        None
    }
    /// What runs the host's kernels, on a thread of its own while this device computes; of a device whose memory can
    /// be shared.
    ///
    /// # Errors
    /// If it cannot be had.
    fn host(&self) -> Option<Result<Box<dyn Launches + Send>, DeviceError>> {
        None
    }
    /// Told where a buffer comes into use whose content is not: what so many bytes hold from there on is of no more
    /// use.
    fn discard(&mut self, _at: Location, _bytes: u64) {}
}

/// A number from memory that holds elements in their dtype.
pub(crate) fn decode(dtype: DType, bytes: &[u8]) -> f64 {
    let four = || bytes.try_into().expect("invariant: four bytes");
    let two = || bytes.try_into().expect("invariant: two bytes");
    match dtype {
        DType::F32 => f64::from(f32::from_le_bytes(four())),
        DType::I32 => f64::from(i32::from_le_bytes(four())),
        DType::Bf16 => half::bf16::from_le_bytes(two()).to_f64(),
        DType::F16 => half::f16::from_le_bytes(two()).to_f64(),
        DType::Bool => f64::from(bytes[0]),
    }
}

/// A number as an element, rounded to the nearest.
pub(crate) fn encode(dtype: DType, x: f64, bytes: &mut [u8]) {
    match dtype {
        DType::F32 => bytes.copy_from_slice(&(x as f32).to_le_bytes()),
        DType::I32 => bytes.copy_from_slice(&(x as i32).to_le_bytes()),
        // The value is rounded before, as the conversions ignore the lower half of an f64.
        DType::Bf16 => bytes.copy_from_slice(&half::bf16::from_f64(dtype.round(x)).to_le_bytes()),
        DType::F16 => bytes.copy_from_slice(&half::f16::from_f64(dtype.round(x)).to_le_bytes()),
        DType::Bool => bytes[0] = u8::from(x != 0.0),
    }
}

/// A scalar argument of a kernel: the bits of an f64 or an i64.
pub(crate) fn bits(dtype: DType, x: f64) -> u64 {
    if dtype.is_float() { x.to_bits() } else { x as i64 as u64 }
}

/// The first element that is no number that can be trained from: all bits of its exponent are set.
pub(crate) fn not_finite(dtype: DType, bytes: &[u8]) -> Option<usize> {
    match dtype {
        DType::F32 => first(bytes.as_chunks().0, |b| u32::from_le_bytes(*b) & 0x7f80_0000 == 0x7f80_0000),
        DType::Bf16 => first(bytes.as_chunks().0, |b| u16::from_le_bytes(*b) & 0x7f80 == 0x7f80),
        DType::F16 => first(bytes.as_chunks().0, |b| u16::from_le_bytes(*b) & 0x7c00 == 0x7c00),
        DType::I32 | DType::Bool => None,
    }
}

/// The first of which something is so. Nearly always there is none: blocks are looked through without a branch.
fn first<const N: usize>(elements: &[[u8; N]], is: impl Fn(&[u8; N]) -> bool) -> Option<usize> {
    const BLOCK: usize = 1024;
    let block = elements.chunks(BLOCK).position(|block| block.iter().fold(false, |any, b| any | is(b)))?;
    elements.iter().skip(block * BLOCK).position(is).map(|k| block * BLOCK + k)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_digits_decide_what_is_nearest() {
        for (dtype, bits) in [(DType::Bf16, 8), (DType::F16, 11)] {
            let (tie, next) = (2f64.powi(-bits), 2f64.powi(1 - bits));
            for (x, nearest) in [(tie, 0.0), (tie + 2f64.powi(-23), next), (tie + 2f64.powi(-50), next), (tie - 2f64.powi(-50), 0.0)] {
                let mut bytes = [0; 2];
                encode(dtype, 1.0 + x, &mut bytes);
                assert_eq!(decode(dtype, &bytes), 1.0 + nearest, "1 + {x:e} as {}", dtype.name());
            }
        }
    }

    #[test]
    fn the_first_number_that_is_none_is_found_in_any_block() {
        for at in [0, 1, 1023, 1024, 2500, 2999] {
            let mut numbers = vec![f32::MAX; 3000];
            assert_eq!(not_finite(DType::F32, &numbers.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>()), None);
            numbers[at..].fill(f32::NEG_INFINITY);
            assert_eq!(not_finite(DType::F32, &numbers.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>()), Some(at));
            let halves = numbers.iter().flat_map(|x| half::bf16::from_f32(*x * 0.5).to_le_bytes());
            assert_eq!(not_finite(DType::Bf16, &halves.collect::<Vec<_>>()), Some(at));
        }
    }
}
