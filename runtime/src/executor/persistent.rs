//! What a rank holds over steps: its parts of parameters, optimizer states and tables, written before the first step
//! and read when they are saved.

use super::Rank;
use crate::device::{Device, Element, Location};
use crate::host::{Tensor, TensorSlice, Whole};
use ir::dim::Base;
use ir::mesh::{Coords, SubAxis};
use ir::op::DType;
use ir::program::{Content, Job, Program, Role, Stage};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::ops::Range;

impl<D: Device> Rank<'_, D> {
    /// Writes what is held over steps and comes from outside: parameters, optimizer states and tables. `whole` gives
    /// a tensor for a content; none is zero.
    pub fn initialise<'w>(&mut self, mut whole: impl FnMut(PersistentId) -> Option<&'w dyn Whole>) {
        let (job, program) = (self.frame.job, self.frame.program);
        for buffer in &program.buffers {
            let mut persistent_slices: Vec<_> =
                persistent_slices(job, program, self.frame.stage, &buffer.content).into_iter().map(|cut| (cut.part(&self.coords), cut)).collect();
            if persistent_slices.is_empty() {
                continue;
            }
            persistent_slices.sort_by_key(|(part, _)| part.place().start);
            let at = |element: u64| Location { arena: buffer.arena, byte: buffer.offset + element * buffer.dtype.bytes() };
            let clear = |device: &mut D, part: Range<u64>| {
                if !part.is_empty() {
                    device.fill(at(part.start), buffer.dtype, part.end - part.start, 0.0);
                }
            };
            let mut end = 0;
            for (part, cut) in persistent_slices {
                let place = part.place();
                // The gaps between the pieces of a bucket are zero.
                clear(&mut self.device, end..place.start);
                end = end.max(place.end);
                // A copy is made from the weights as they are stored here, in f32.
                let rounds = cut.role == Role::Copy && self.device.element(DType::F32) == Element::F32;
                match whole(cut.held) {
                    Some(source) if rounds => scatter(&mut self.device, &part, &InF32(source), at(0), buffer.dtype, &mut self.scratch),
                    Some(source) => scatter(&mut self.device, &part, source, at(0), buffer.dtype, &mut self.scratch),
                    None => clear(&mut self.device, place),
                }
            }
            clear(&mut self.device, end..buffer.elements());
        }
    }

    /// Gives every run of every parameter and optimizer state that this rank holds: what it is, where the run begins
    /// in the whole tensor, its elements.
    pub fn collect(&self, mut visit: impl FnMut(PersistentId, u64, &[f64])) {
        let mut values = vec![];
        for buffer in &self.frame.program.buffers {
            for cut in persistent_slices(self.frame.job, self.frame.program, self.frame.stage, &buffer.content) {
                if matches!(cut.held, PersistentId::Table(_)) || cut.role == Role::Copy {
                    continue;
                }
                let bytes = buffer.dtype.bytes();
                cut.part(&self.coords).runs(|run| {
                    let Some(global) = run.global else { return };
                    values.resize(run.len as usize, 0.0);
                    self.device.read(Location { arena: buffer.arena, byte: buffer.offset + run.local * bytes }, buffer.dtype, &mut values);
                    visit(cut.held, global, &values);
                });
            }
        }
    }

    /// A checksum of each part of a parameter, of its copies and of optimizer states that this rank holds.
    pub fn sums(&self) -> Vec<Sum> {
        let (mut sums, mut values, mut bytes) = (vec![], vec![], vec![]);
        for buffer in &self.frame.program.buffers {
            for cut in persistent_slices(self.frame.job, self.frame.program, self.frame.stage, &buffer.content) {
                if matches!(cut.held, PersistentId::Table(_)) {
                    continue;
                }
                let (mut region, mut sum) = (blake3::Hasher::new(), blake3::Hasher::new());
                region.update(&[buffer.dtype.bytes() as u8]);
                // Adjacent runs count as one, so that the layout of the part does not matter.
                let (mut first, mut end) = (0u64, 0u64);
                cut.part(&self.coords).runs(|run| {
                    let Some(global) = run.global else { return };
                    if global != end {
                        bounds(&mut region, first, end);
                        first = global;
                    }
                    end = global + run.len;
                    for from in (0..run.len).step_by(CHUNK as usize) {
                        values.resize((run.len - from).min(CHUNK) as usize, 0.0);
                        let at = Location { arena: buffer.arena, byte: buffer.offset + (run.local + from) * buffer.dtype.bytes() };
                        self.device.read(at, buffer.dtype, &mut values);
                        bytes.clear();
                        bytes.extend(values.iter().flat_map(|x| x.to_bits().to_le_bytes()));
                        sum.update(&bytes);
                    }
                });
                bounds(&mut region, first, end);
                if end > first {
                    sums.push(Sum { held: cut.held, is_copy: cut.role == Role::Copy, region: short(&region), sum: short(&sum) });
                }
            }
        }
        sums
    }

    /// The persistent accumulators by name: gradients, losses.
    pub fn accumulators(&self) -> Vec<(String, Tensor)> {
        let buffers = self.frame.program.buffers.iter().filter(|b| b.content == Content::Accumulator && b.arena.lasts());
        buffers
            .map(|b| {
                let mut tensor = Tensor::zeros(b.dims.iter().map(|d| d.1).collect());
                self.device.read(Location { arena: b.arena, byte: b.offset }, b.dtype, &mut tensor.data);
                (b.name.clone(), tensor)
            })
            .collect()
    }
}

/// Which tensor that lives over steps, as a whole: numbers are those of the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum PersistentId {
    /// A parameter, by its index into [`Job::params`].
    Param(u32),
    /// An optimizer state: the index of its parameter, and which of that one's states it is.
    State(u32, u32),
    /// A table, by its index into [`Job::tables`].
    Table(u32),
}

/// What a rank holds a part of, by its checksum: of ranks with the same part, `sum` is the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Sum {
    /// The parameter or optimizer state that the part is of.
    pub held: PersistentId,
    /// A rounded copy of a parameter, that passes read.
    pub is_copy: bool,
    /// Hash of the indices of the part's elements, in order, and of their width.
    pub region: u64,
    /// Of the numbers.
    pub sum: u64,
}

/// Takes in that the elements from `first` to `end` follow.
fn bounds(region: &mut blake3::Hasher, first: u64, end: u64) {
    region.update(&first.to_le_bytes()).update(&end.to_le_bytes());
}

/// The first 64 bits.
fn short(hasher: &blake3::Hasher) -> u64 {
    let mut out = [0; 8];
    hasher.finalize_xof().fill(&mut out);
    u64::from_le_bytes(out)
}

/// Which part of which persistent tensor a buffer holds.
pub(crate) struct PersistentSlice<'a> {
    pub held: PersistentId,
    pub role: Role,
    extents: &'a [ir::program::Extent],
    index: &'a [ir::dim::IndexMap],
    /// Of a bucket: where the piece begins, and which elements the buffer holds.
    window: Option<(u64, &'a ir::dim::IndexMap)>,
}

impl<'a> PersistentSlice<'a> {
    pub fn part(&self, coords: &Coords) -> TensorSlice<'a> {
        let part = TensorSlice::new(self.extents, self.index, coords);
        match self.window {
            Some((at, window)) => part.within(at, window, coords),
            None => part,
        }
    }

    /// The sub-axes on whose coordinate it depends which part that is.
    pub fn axes(&self) -> BTreeSet<SubAxis> {
        let maps = self.index.iter().chain(self.window.map(|w| w.1));
        let forms = maps.filter_map(|map| match &map.base {
            Base::Coords(form) => Some(form),
            Base::Zero | Base::Slot(_) => None,
        });
        forms.flatten().map(|(axis, _)| *axis).collect()
    }
}

/// What a buffer with this content holds parts of, on a stage.
pub(crate) fn persistent_slices<'a>(job: &'a Job, program: &'a Program, stage: &'a Stage, content: &'a Content) -> Vec<PersistentSlice<'a>> {
    if let Content::Table { table, index } = content {
        let extents = &job.tables[*table as usize].dims;
        return vec![PersistentSlice { held: PersistentId::Table(*table), role: Role::Weights, extents, index, window: None }];
    }
    let cut = |p: ir::program::ParamShard<'a>| {
        let param = stage.params[p.slot as usize];
        let held = match p.role {
            Role::Weights | Role::Copy => PersistentId::Param(param),
            Role::State(k) => PersistentId::State(param, k),
        };
        PersistentSlice { held, role: p.role, extents: &job.params[param as usize].dims, index: p.index, window: p.bucket }
    };
    program.parts(stage, content).into_iter().map(cut).collect()
}

/// A tensor rounded to f32.
struct InF32<'a>(&'a dyn Whole);

impl Whole for InF32<'_> {
    fn read(&self, at: u64, out: &mut [f64]) {
        self.0.read(at, out);
        out.iter_mut().for_each(|x| *x = f64::from(*x as f32));
    }
}

/// Elements that are read at a time.
const CHUNK: u64 = 1 << 18;

/// Copies a part of a whole tensor to a device; padding is zero.
pub(super) fn scatter<D: Device>(device: &mut D, part: &TensorSlice, whole: &dyn Whole, at: Location, dtype: DType, scratch: &mut Vec<f64>) {
    let as_it_is = device.element(dtype) == Element::native(dtype);
    part.runs(|run| {
        let at = |element: u64| Location { arena: at.arena, byte: at.byte + (run.local + element) * dtype.bytes() };
        if let (Some(global), true) = (run.global, as_it_is)
            && whole.pieces(global, run.len, dtype, &mut |element, bytes| device.store(at(element), dtype, bytes))
        {
            return;
        }
        scratch.clear();
        scratch.resize(run.len as usize, 0.0);
        if let Some(global) = run.global {
            whole.read(global, scratch);
        }
        device.write(at(0), dtype, scratch);
    });
}
