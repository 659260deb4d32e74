//! Buffers at rest: their place in the arenas, and what of parameters, states and tables they hold.

use super::body::{Live, is_held};
use super::{At, Checked, JobError, ensure};
use crate::dim::{Base, IndexMap, Order};
use crate::mesh::{Axis, Mesh};
use crate::program::{Arena, Buffer, BufferId, Content, Extent, Job, Program, Stage};
use std::collections::BTreeMap;

/// Alignment of every buffer, in bytes.
const ALIGN: u64 = 64;

/// The most bytes of an arena: sums and products of sizes below it cannot overflow.
const MOST: u64 = 1 << 48;

/// Every buffer lies in its arena; those that outlive a call lie apart from each other.
pub fn arenas(program: &Program, at: &At) -> Result<(), JobError> {
    let [mut persistent, mut stash] = [Live::default(), Live::default()];
    let whole = program.stashes.iter().try_fold(0u64, |n, bytes| n.checked_add(*bytes));
    let divided = whole == Some(program.arena_bytes[Arena::Stash as usize]) && program.stashes.iter().all(|b| b.is_multiple_of(ALIGN));
    ensure(divided, || format!("its stashes do not divide the stash arena, at multiples of {ALIGN}")).map_err(|e| at.error(e))?;
    for (k, buffer) in program.buffers.iter().enumerate() {
        let fail = |what: String| at.error(format!("buffer `{}`: {what}", buffer.name));
        let size = program.arena_bytes[buffer.arena as usize];
        ensure(size <= MOST, || format!("its arena has {size} bytes")).map_err(fail)?;
        let elements = buffer.dims.iter().try_fold(1u64, |n, d| n.checked_mul(d.1));
        let end = elements.and_then(|n| n.checked_mul(buffer.dtype.bytes())).and_then(|b| b.checked_add(buffer.offset));
        ensure(end.is_some_and(|e| e <= size), || format!("it does not lie within the {} arena's {size} bytes", buffer.arena.name()))
            .map_err(fail)?;
        ensure(buffer.offset.is_multiple_of(ALIGN), || format!("its offset {} is not a multiple of {ALIGN}", buffer.offset)).map_err(fail)?;
        let apart = buffer.arena != Arena::Stash || program.stash(buffer).is_some();
        ensure(apart, || "it lies in no one stash".into()).map_err(fail)?;
        let id = BufferId(k as u32);
        let taken = match buffer.arena {
            _ if buffer.bytes() == 0 => Ok(()),
            Arena::Persistent => persistent.insert(buffer, id),
            Arena::Stash => stash.insert(buffer, id),
            Arena::Temporary => Ok(()),
        };
        taken.map_err(|other| fail(format!("it overlaps buffer `{}`", program.buffers[other.index()].name)))?;
        ensure(!is_held(buffer) || buffer.arena == Arena::Persistent, || "it lives over steps outside of the persistent arena".into())
            .map_err(fail)?;
    }
    Ok(())
}

/// What is held on a stage fits the job's parameters and tables; every slot of the stage has its parameter once.
pub fn stage(job: &Job, stage: &Stage, at: &At) -> Result<(), JobError> {
    let mut held: BTreeMap<(u8, u32, u32), &str> = BTreeMap::new();
    for buffer in &job.programs[stage.program as usize].buffers {
        let fail = |what: String| at.error(format!("buffer `{}`: {what}", buffer.name));
        let of_slot = |slot: u32| {
            let param = stage.params.get(slot as usize).ok_or_else(|| format!("nothing fills parameter slot {slot}"))?;
            job.params.get(*param as usize).map(|p| p.dims.as_slice()).ok_or_else(|| format!("there is no parameter {param}"))
        };
        let (key, dims, index) = match &buffer.content {
            Content::Param { slot, index } => ((0, *slot, 0), of_slot(*slot), index),
            Content::State { slot, state, index } => ((1, *slot, *state), of_slot(*slot), index),
            Content::Table { table, index } => {
                let entry = job.tables.get(*table as usize).map(|t| t.dims.as_slice());
                ((2, *table, 0), entry.ok_or_else(|| format!("there is no table {table}")), index)
            }
            Content::Accumulator | Content::Activation => continue,
        };
        covers(&job.mesh, dims.map_err(fail)?, index, buffer, &[]).map_err(fail)?;
        // A table may be there in several parts; parameters and states are saved, so they have one home.
        if let Some(other) = held.insert(key, &buffer.name).filter(|_| key.0 != 2) {
            return Err(fail(format!("it holds what buffer `{other}` holds")));
        }
    }
    for slot in 0..stage.params.len() as u32 {
        ensure(held.contains_key(&(0, slot, 0)), || format!("no buffer holds parameter slot {slot}")).map_err(|e| at.error(e))?;
    }
    Ok(())
}

/// The index maps of a buffer fit its dims, and over the coordinates of ranks (and of the axes `also`) they reach every
/// element of the whole tensor exactly once: extents and strides of parts and coordinates form a mixed-radix number.
pub fn covers(mesh: &Mesh, whole: &[Extent], index: &[IndexMap], buffer: &Buffer, also: &[Axis]) -> Checked {
    ensure(index.len() == buffer.dims.len() && index.len() == whole.len(), || {
        format!("{} dims, {} index maps, {} dims as a whole", buffer.dims.len(), index.len(), whole.len())
    })?;
    let mut used = vec![];
    for ((map, (name, size)), extent) in index.iter().zip(&buffer.dims).zip(whole) {
        let len = map.parts.iter().fold(1u64, |n, p| n.saturating_mul(p.0));
        ensure(len == *size, || format!("dim `{name}` has {size} elements, its index map {len}"))?;
        ensure(extent.size <= extent.padded, || format!("dim `{name}` is padded from {} to {}", extent.size, extent.padded))?;
        ensure(extent.order == Order::Plain || extent.order.fits(extent.padded) && extent.size == extent.padded, || {
            format!("dim `{name}` is stored in the order of another size")
        })?;
        let mut digits = map.parts.clone();
        match &map.base {
            Base::Zero => {}
            Base::Slot(_) => return Err(format!("dim `{name}` begins at a kernel's scalar")),
            Base::Coords(form) => {
                for (u, stride) in form {
                    let sub = mesh.subs.get(u.0 as usize).ok_or_else(|| format!("dim `{name}` is split over no axis"))?;
                    let apart = sub.axis.within_stage() || also.contains(&sub.axis);
                    ensure(apart && !used.contains(u), || format!("dim `{name}` cannot be split over `{}` here", sub.axis))?;
                    used.push(*u);
                    digits.push((sub.size, *stride));
                }
            }
        }
        digits.retain(|d| d.0 != 1);
        digits.sort_unstable_by_key(|d| d.1);
        let reached = digits.iter().try_fold(1u64, |n, (extent, stride)| if *stride == n { n.checked_mul(*extent) } else { None });
        ensure(reached == Some(extent.padded), || format!("the parts of dim `{name}` do not make up its {} elements", extent.padded))?;
    }
    Ok(())
}
