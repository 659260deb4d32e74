//! Buffers at rest: their place in the arenas, and what of parameters, states and tables they hold.

use super::body::{OccupiedBytes, is_held};
use crate::violation::{Breach, Checked, ensure};
use crate::{Invariant, Location, LocationPart, Violation};
use ir::dim::{Base, IndexMap, Order};
use ir::mesh::{Axis, Mesh, SubAxis};
use ir::program::{Arena, BLOCK, Bucket, BufferId, Content, Extent, Job, MOST_BYTES, ParamEntry, Program, Role, Space, Stage};
use std::collections::BTreeMap;

/// Alignment of every buffer, in bytes.
pub const ALIGN: u64 = 64;

/// Every buffer lies in its arena; those that outlive a call lie apart from each other.
pub fn arenas(program: &Program, at: &Location) -> Result<(), Violation> {
    let mut taken: [OccupiedBytes<BufferId>; Arena::ALL.len()] = Default::default();
    for space in Space::ALL {
        let stashes = || program.stashes.iter().filter(|s| s.space == space);
        let whole = stashes().try_fold(0u64, |n, s| n.checked_add(s.bytes));
        let arena = space.stash();
        let divided = whole == Some(program.arena_bytes[arena as usize]) && stashes().all(|s| s.bytes.is_multiple_of(ALIGN));
        ensure(divided, Invariant::StashDivision, || format!("its stashes do not divide the {} arena, at multiples of {ALIGN}", arena.name()))
            .map_err(|e| at.error(e))?;
    }
    for (k, buffer) in program.buffers.iter().enumerate() {
        let fail = |breach: Breach| at.buffer(&buffer.name).error(breach);
        let size = program.arena_bytes[buffer.arena as usize];
        ensure(size <= MOST_BYTES, Invariant::ArenaSize, || format!("its arena has {size} bytes")).map_err(fail)?;
        let elements = buffer.dims.iter().try_fold(1u64, |n, d| n.checked_mul(d.1));
        let end = elements.and_then(|n| n.checked_mul(buffer.dtype.bytes())).and_then(|b| b.checked_add(buffer.offset));
        ensure(end.is_some_and(|e| e <= size), Invariant::BufferInArena, || {
            format!("it does not lie within the {} arena's {size} bytes", buffer.arena.name())
        })
        .map_err(fail)?;
        let align = if buffer.arena == Arena::Disk { BLOCK } else { ALIGN };
        ensure(buffer.offset.is_multiple_of(align), Invariant::BufferAligned, || {
            format!("its offset {} is not a multiple of {align}", buffer.offset)
        })
        .map_err(fail)?;
        let apart = !buffer.arena.is_stash() || program.stash(buffer).is_some();
        ensure(apart, Invariant::BufferInStash, || "it lies in no one stash".into()).map_err(fail)?;
        let id = BufferId(k as u32);
        let taken = match buffer.arena {
            arena if arena.is_temporary() || buffer.bytes() == 0 => Ok(()),
            arena => taken[arena as usize].insert(buffer.offset, buffer.offset + buffer.bytes(), id),
        };
        taken.map_err(|other| fail(Invariant::LastingApart.breach(format!("it overlaps buffer `{}`", program.buffers[other.index()].name))))?;
        ensure(!is_held(buffer) || buffer.arena.lasts(), Invariant::HeldLasts, || "it lives over steps outside of an arena that does".into())
            .map_err(fail)?;
    }
    Ok(())
}

/// What is held on a stage fits the job's parameters and tables; every slot of the stage has its parameter once, in a
/// buffer of its own or in a bucket.
pub fn stage(job: &Job, stage: &Stage, at: &Location) -> Result<(), Violation> {
    let program = &job.programs[stage.program as usize];
    for (k, bucket) in program.buckets.iter().enumerate() {
        pieces(job, stage, bucket).map_err(|e| at.of(LocationPart::Bucket(k)).error(e))?;
    }
    let mut held: BTreeMap<(u8, u32, u32), &str> = BTreeMap::new();
    for buffer in &program.buffers {
        let fail = |breach: Breach| at.buffer(&buffer.name).error(breach);
        let (dims, index) = match &buffer.content {
            Content::Param { slot, index } | Content::State { slot, index, .. } => match program.bucket(stage, *slot) {
                Some(b) => (vec![Extent { name: "bucket".into(), size: b.size, padded: b.size, order: Order::Plain }], index),
                None => (param(job, stage, *slot).map_err(fail)?.dims.clone(), index),
            },
            Content::Table { table, index } => {
                let entry = job.tables.get(*table as usize).map(|t| t.dims.clone());
                (entry.ok_or_else(|| Invariant::NamedThing.breach(format!("there is no table {table}"))).map_err(fail)?, index)
            }
            Content::Accumulator | Content::Activation => continue,
        };
        covers(&job.mesh, &dims, index, &buffer.dims, &[]).map_err(fail)?;
        let whole = index.iter().all(|m| m.base == Base::Zero);
        for part in program.parts(stage, &buffer.content) {
            let key = match part.role {
                Role::Weights => (0, part.slot, 0),
                Role::State(k) => (1, part.slot, k),
                Role::Copy => (2, part.slot, 0),
            };
            // Ranks that differ along the axes of a piece hold different buckets, so a bucket is not split along
            // these.
            let apart =
                part.bucket.is_none() || part.index.iter().all(|m| axes(&m.base).all(|u| index.iter().all(|w| axes(&w.base).all(|v| v != u))));
            ensure(apart, Invariant::BucketAxes, || format!("the bucket and parameter slot {} are split over the same axis", part.slot))
                .map_err(fail)?;
            let of_use = part.bucket.is_none() || whole || !matches!(buffer.content, Content::Param { .. });
            ensure(of_use, Invariant::BucketWhole, || "it holds only a part of a bucket's parameters".into()).map_err(fail)?;
            // Parameters and states are saved, so only one buffer may hold each of them.
            if let Some(other) = held.insert(key, &buffer.name) {
                return Err(fail(Invariant::HeldOnce.breach(format!("it holds what buffer `{other}` holds"))));
            }
        }
    }
    for slot in 0..stage.params.len() as u32 {
        ensure(held.contains_key(&(0, slot, 0)), Invariant::SlotHeld, || format!("no buffer holds parameter slot {slot}"))
            .map_err(|e| at.error(e))?;
    }
    Ok(())
}

fn axes(base: &Base) -> impl Iterator<Item = SubAxis> + '_ {
    let form = match base {
        Base::Coords(form) => form.as_slice(),
        Base::Zero | Base::Slot(_) => &[],
    };
    form.iter().map(|f| f.0)
}

fn param<'a>(job: &'a Job, stage: &Stage, slot: u32) -> Checked<&'a ParamEntry> {
    let param = stage.params.get(slot as usize).ok_or_else(|| Invariant::SlotFilled.breach(format!("nothing fills parameter slot {slot}")))?;
    job.params.get(*param as usize).ok_or_else(|| Invariant::NamedThing.breach(format!("there is no parameter {param}")))
}

/// The pieces of a bucket follow each other within it, and their index maps fit their parameters.
fn pieces(job: &Job, stage: &Stage, bucket: &Bucket) -> Checked {
    let mut end = 0u64;
    for piece in &bucket.pieces {
        let entry = param(job, stage, piece.slot)?;
        let lens = piece.index.iter().map(|m| m.parts.iter().fold(1u64, |n, p| n.saturating_mul(p.0)));
        let dims: Vec<(String, u64)> = entry.dims.iter().map(|e| e.name.clone()).zip(lens.clone()).collect();
        covers(&job.mesh, &entry.dims, &piece.index, &dims, &[])
            .map_err(|e| Breach { found: format!("parameter slot {}: {}", piece.slot, e.found), ..e })?;
        ensure(piece.at >= end, Invariant::PiecesInBucket, || format!("parameter slot {} overlaps the one before", piece.slot))?;
        end = lens.fold(1u64, u64::saturating_mul).saturating_add(piece.at);
    }
    ensure(end <= bucket.size, Invariant::PiecesInBucket, || format!("its parameters need {end} elements, it has {}", bucket.size))
}

/// Index maps fit dims, and over the coordinates of ranks (and of the axes `also`) they reach every
/// element of the whole tensor exactly once: extents and strides of parts and coordinates form a mixed-radix number.
pub fn covers(mesh: &Mesh, whole: &[Extent], index: &[IndexMap], dims: &[(String, u64)], also: &[Axis]) -> Checked {
    ensure(index.len() == dims.len() && index.len() == whole.len(), Invariant::IndexShape, || {
        format!("{} dims, {} index maps, {} dims as a whole", dims.len(), index.len(), whole.len())
    })?;
    let mut used = vec![];
    for ((map, (name, size)), extent) in index.iter().zip(dims).zip(whole) {
        let len = map.parts.iter().fold(1u64, |n, p| n.saturating_mul(p.0));
        ensure(len == *size, Invariant::IndexShape, || format!("dim `{name}` has {size} elements, its index map {len}"))?;
        ensure(extent.size <= extent.padded, Invariant::StoredSize, || format!("dim `{name}` is padded from {} to {}", extent.size, extent.padded))?;
        ensure(extent.order == Order::Plain || extent.order.fits(extent.padded) && extent.size == extent.padded, Invariant::StoredSize, || {
            format!("dim `{name}` is stored in the order of another size")
        })?;
        let mut digits = map.parts.clone();
        match &map.base {
            Base::Zero => {}
            Base::Slot(_) => return Err(Invariant::SplitAxes.breach(format!("dim `{name}` begins at a kernel's scalar"))),
            Base::Coords(form) => {
                for (u, stride) in form {
                    let sub =
                        mesh.subs.get(u.0 as usize).ok_or_else(|| Invariant::SplitAxes.breach(format!("dim `{name}` is split over no axis")))?;
                    let apart = sub.axis.within_stage() || also.contains(&sub.axis);
                    ensure(apart && !used.contains(u), Invariant::SplitAxes, || format!("dim `{name}` cannot be split over `{}` here", sub.axis))?;
                    used.push(*u);
                    digits.push((sub.size, *stride));
                }
            }
        }
        digits.retain(|d| d.0 != 1);
        digits.sort_unstable_by_key(|d| d.1);
        let reached = digits.iter().try_fold(1u64, |n, (extent, stride)| if *stride == n { n.checked_mul(*extent) } else { None });
        ensure(reached == Some(extent.padded), Invariant::PartsCover, || {
            format!("the parts of dim `{name}` do not make up its {} elements", extent.padded)
        })?;
    }
    Ok(())
}
