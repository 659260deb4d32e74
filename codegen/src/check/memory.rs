//! Memory of operands as large as a kernel's own, of which only what is touched costs anything.
//!
//! An operand is one pool of random pages, mapped again and again: reading it needs no memory. An output is such a
//! pool too, private to whom writes it. The number of pages is prime, so elements that are a power of two apart
//! differ. Around an operand lie pages that cannot be touched, and an input cannot be written.

use crate::check::draw::{self, Draw};
use ir::dim::Dims;
use ir::graph::Type;
use ir::op::DType;
use ir::random::mix;
use rustix::fd::OwnedFd;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap, mmap_anonymous, mprotect, munmap};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ptr::null_mut;

/// Pages of a pool.
const PAGES: usize = 509;
const PAGE: usize = 4096;
/// Alignment of operands, which is that of a kernel's scratch.
const ALIGN: usize = 64;

/// Fill pattern of outputs: NaN as a float, -5898331 as an i32, and no valid bool.
const UNWRITTEN: u16 = 0xffa5;

/// The same, byte by byte.
fn unwritten(byte: usize) -> u8 {
    UNWRITTEN.to_le_bytes()[byte % 2]
}

/// Elements up to which ints are drawn one by one, and no pool is made of them.
const FEW: u64 = 1 << 20;

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum PoolContent {
    Unwritten,
    /// Every float is NaN.
    Garbage,
    Floats {
        dtype: DType,
        draw: Draw,
    },
    Ints(Draw),
    Bools,
}

/// Pools, each page filled when an operand first has it: those of most kernels have few.
#[derive(Default)]
pub struct Pools {
    made: HashMap<PoolContent, Pool>,
}

struct Pool {
    file: OwnedFd,
    content: PoolContent,
    filled: [bool; PAGES],
}

fn encode(dtype: DType, x: f64, to: &mut [u8]) {
    match dtype {
        DType::F32 => to.copy_from_slice(&(x as f32).to_le_bytes()),
        DType::I32 => to.copy_from_slice(&(x as i32).to_le_bytes()),
        DType::Bool => to[0] = x as u8,
        DType::Bf16 => to.copy_from_slice(&half::bf16::from_f64(x).to_le_bytes()),
        DType::F16 => to.copy_from_slice(&half::f16::from_f64(x).to_le_bytes()),
    }
}

/// A page of a pool. What an element is depends on nothing but its place in the pool.
fn content(content: PoolContent, page: usize) -> [u8; PAGE] {
    let mut bytes = [0; PAGE];
    let mut fill = |dtype: DType, of: &dyn Fn(u64) -> f64| {
        let first = (page * PAGE) as u64 / dtype.bytes();
        let elements = bytes.chunks_exact_mut(dtype.bytes() as usize).zip(first..);
        elements.for_each(|(to, i)| encode(dtype, of(i), to));
    };
    match content {
        PoolContent::Unwritten => bytes.chunks_exact_mut(2).for_each(|to| to.copy_from_slice(&UNWRITTEN.to_le_bytes())),
        PoolContent::Garbage => bytes.fill(0xff),
        PoolContent::Floats { dtype, draw } => fill(dtype, &|i| draw::float(draw, i * dtype.bytes(), mix(i))),
        PoolContent::Ints(draw) => fill(DType::I32, &|i| draw::one_int(draw, mix(i)) as f64),
        PoolContent::Bools => fill(DType::Bool, &|i| (mix(i) >> 63) as f64),
    }
    bytes
}

impl Pools {
    fn of(&mut self, which: PoolContent) -> Result<&mut Pool, Errno> {
        match self.made.entry(which) {
            Entry::Occupied(made) => Ok(made.into_mut()),
            Entry::Vacant(none) => {
                let file = memfd_create("mcc-operands", MemfdFlags::CLOEXEC)?;
                ftruncate(&file, (PAGES * PAGE) as u64)?;
                Ok(none.insert(Pool { file, content: which, filled: [false; PAGES] }))
            }
        }
    }
}

impl Pool {
    /// Fills the pages of so many bytes from this one on, if they are not filled already.
    fn fill(&mut self, first: usize, bytes: usize) -> Result<(), Errno> {
        for page in first..first + bytes.div_ceil(PAGE) {
            if !self.filled[page] {
                let (bytes, mut done) = (content(self.content, page), 0);
                while done < PAGE {
                    done += rustix::io::pwrite(&self.file, &bytes[done..], (page * PAGE + done) as u64)?;
                }
                self.filled[page] = true;
            }
        }
        Ok(())
    }
}

/// A mapping between two pages that must not be touched.
pub struct MappedMemory {
    mapping: *mut u8,
    mapped: usize,
    start: *mut u8,
    /// Bytes of the operand.
    bytes: usize,
}

impl Drop for MappedMemory {
    fn drop(&mut self) {
        // SAFETY: the mapping is its own. One that stays is lost, no more.
        let _ = unsafe { munmap(self.mapping.cast(), self.mapped) };
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Access {
    Read,
    Write,
}

impl MappedMemory {
    /// Reserves `bytes` bytes, which end less than [`ALIGN`] bytes before a page that must not be touched. They are
    /// of no pool yet.
    fn reserved(bytes: usize, access: Access) -> Result<(MappedMemory, usize), Errno> {
        let inner = bytes.div_ceil(PAGE).max(1) * PAGE;
        let mapped = inner + 2 * PAGE;
        // SAFETY: a new mapping.
        let mapping = unsafe { mmap_anonymous(null_mut(), mapped, ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::NORESERVE) }?.cast::<u8>();
        // SAFETY: within the mapping.
        let start = unsafe { mapping.add(PAGE + (inner - bytes) / ALIGN * ALIGN) };
        let new = MappedMemory { mapping, mapped, start, bytes };
        if access == Access::Write {
            // SAFETY: the inner part of the mapping.
            unsafe { mprotect(mapping.add(PAGE).cast(), inner, MprotectFlags::READ | MprotectFlags::WRITE) }?;
        }
        Ok((new, inner))
    }

    /// Maps `bytes` bytes of a pool, from its page `first` on.
    fn of_pool(pool: &mut Pool, first: usize, bytes: usize, access: Access) -> Result<MappedMemory, Errno> {
        let (new, inner) = MappedMemory::reserved(bytes, Access::Read)?;
        let protection = if access == Access::Write { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        let (mut done, mut page) = (0, first % PAGES);
        while done < inner {
            let some = (inner - done).min((PAGES - page) * PAGE);
            pool.fill(page, some)?;
            // SAFETY: over the inner part of the mapping.
            unsafe {
                let place = new.mapping.add(PAGE + done).cast();
                mmap(place, some, protection, MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE, &pool.file, (page * PAGE) as u64)?;
            }
            (done, page) = (done + some, 0);
        }
        Ok(new)
    }

    pub fn start(&self) -> *mut u8 {
        self.start
    }

    pub fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    /// The element at an offset. It lies within what was asked for.
    #[inline]
    pub fn get(&self, dtype: DType, offset: u64) -> f64 {
        let at = offset as usize;
        // SAFETY: callers ask for elements of the operand that the mapping is of.
        unsafe {
            match dtype {
                DType::F32 => f64::from(self.start.cast::<f32>().add(at).read()),
                DType::I32 => f64::from(self.start.cast::<i32>().add(at).read()),
                DType::Bool => f64::from(self.start.add(at).read()),
                DType::Bf16 => half::bf16::from_bits(self.start.cast::<u16>().add(at).read()).to_f64(),
                DType::F16 => half::f16::from_bits(self.start.cast::<u16>().add(at).read()).to_f64(),
            }
        }
    }

    /// Whether an element of an output that began unwritten still is.
    pub fn is_unwritten(&self, dtype: DType, offset: u64) -> bool {
        let at = offset as usize;
        let both = u32::from(UNWRITTEN) << 16 | u32::from(UNWRITTEN);
        // SAFETY: as for `get`.
        unsafe {
            match dtype.bytes() {
                4 => self.start.cast::<u32>().add(at).read() == both,
                2 => self.start.cast::<u16>().add(at).read() == UNWRITTEN,
                _ => self.start.add(at).read() > 1,
            }
        }
    }

    /// Whether the bytes before and behind the operand, up to the pages that must not be touched, are what they were:
    /// those of an output that began unwritten, or those of `before`.
    pub fn is_untouched_around(&self, before: Option<&MappedMemory>) -> bool {
        let inner = self.mapped - 2 * PAGE;
        // SAFETY: the inner part of a mapping can be read. Of both, if they are of outputs of one size.
        let all = |m: &MappedMemory| unsafe { std::slice::from_raw_parts(m.mapping.add(PAGE).cast_const(), inner) };
        // SAFETY: the operand begins in the inner part.
        let first = unsafe { self.start.offset_from(self.mapping) } as usize - PAGE;
        let (now, old) = (all(self), before.map(all));
        (0..first).chain(first + self.bytes..inner).all(|i| now[i] == old.map_or(unwritten(i), |old| old[i]))
    }

    /// Whether a byte of an output is what it was.
    pub fn is_untouched(&self, before: Option<&MappedMemory>, byte: usize) -> bool {
        // SAFETY: as for `get`.
        let at = |m: &MappedMemory| unsafe { m.start.add(byte).read() };
        at(self) == before.map_or(unwritten(byte), at)
    }

    /// Whether none of so many elements from the first on is unwritten.
    pub fn all_written(&self, dtype: DType, elements: u64) -> bool {
        let (n, both) = (elements as usize, u32::from(UNWRITTEN) << 16 | u32::from(UNWRITTEN));
        // SAFETY: as for `get`.
        unsafe {
            match dtype.bytes() {
                4 => std::slice::from_raw_parts(self.start.cast::<u32>(), n).iter().all(|x| *x != both),
                2 => std::slice::from_raw_parts(self.start.cast::<u16>(), n).iter().all(|x| *x != UNWRITTEN),
                _ => std::slice::from_raw_parts(self.start, n).iter().all(|x| *x <= 1),
            }
        }
    }
}

/// Bytes from the first to the last element of a tensor.
pub fn bytes(dims: &Dims, ty: &Type, strides: &[u64]) -> u64 {
    let last: u64 = ty.dims.iter().zip(strides).map(|(d, s)| (dims.size(*d).max(1) - 1).saturating_mul(*s)).fold(0, u64::saturating_add);
    last.saturating_add(1).saturating_mul(ty.dtype.bytes())
}

impl Pools {
    /// An operand, number `key` of its kernel; to be written, it is a copy of its own.
    pub fn input(&mut self, dims: &Dims, ty: &Type, strides: &[u64], draw: Draw, key: usize, access: Access) -> Result<MappedMemory, Errno> {
        let size = bytes(dims, ty, strides);
        let pool = match (ty.dtype, draw) {
            (DType::Bool, Draw::There) => return self.ints(dims, ty, strides, draw, key as u64),
            (DType::Bool, _) => PoolContent::Bools,
            (DType::I32, Draw::Below { .. } | Draw::Ints { .. }) if dims.elements(&ty.dims) > FEW => PoolContent::Ints(draw),
            (DType::I32, _) => return self.ints(dims, ty, strides, draw, key as u64),
            (dtype, draw) => PoolContent::Floats { dtype, draw },
        };
        // Operands of the same kind begin at different pages of the pool, so that they differ.
        MappedMemory::of_pool(self.of(pool)?, key * 97, size as usize, access)
    }

    fn ints(&mut self, dims: &Dims, ty: &Type, strides: &[u64], draw: Draw, key: u64) -> Result<MappedMemory, Errno> {
        let (new, _) = MappedMemory::reserved(bytes(dims, ty, strides) as usize, Access::Write)?;
        let mut at = vec![0; ty.dims.len()];
        for number in 0..dims.elements(&ty.dims) {
            let offset: u64 = at.iter().zip(strides).map(|(i, s)| i * s).sum();
            let x = draw::int(draw, dims, &ty.dims, &at, mix(number ^ mix(key)));
            // SAFETY: an element of the tensor that was asked for.
            unsafe {
                match ty.dtype {
                    DType::Bool => new.start.cast::<u8>().add(offset as usize).write(x as u8),
                    _ => new.start.cast::<i32>().add(offset as usize).write(x as i32),
                }
            };
            for k in (0..at.len()).rev() {
                at[k] += 1;
                if at[k] < dims.size(ty.dims[k]) {
                    break;
                }
                at[k] = 0;
            }
        }
        Ok(new)
    }

    /// Memory that may hold anything: every float is NaN.
    pub fn garbage(&mut self, bytes: u64) -> Result<MappedMemory, Errno> {
        MappedMemory::of_pool(self.of(PoolContent::Garbage)?, 0, bytes as usize, Access::Write)
    }

    /// An output that nothing has written yet.
    pub fn unwritten(&mut self, bytes: u64) -> Result<MappedMemory, Errno> {
        MappedMemory::of_pool(self.of(PoolContent::Unwritten)?, 0, bytes as usize, Access::Write)
    }

    /// An output that is added to, and what it was before.
    pub fn added_to(&mut self, dims: &Dims, ty: &Type, strides: &[u64], key: usize) -> Result<[MappedMemory; 2], Errno> {
        let which = if ty.dtype.is_float() { PoolContent::Floats { dtype: ty.dtype, draw: Draw::Signed } } else { PoolContent::Ints(Draw::INTS) };
        let (pool, size) = (self.of(which)?, bytes(dims, ty, strides) as usize);
        let mut of = |access| MappedMemory::of_pool(pool, key * 97, size, access);
        Ok([of(Access::Write)?, of(Access::Read)?])
    }
}
