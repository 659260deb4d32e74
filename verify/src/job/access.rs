//! What each command reads and writes, once its operands were found to fit.

use crate::Invariant;
use crate::cover::{Cover, MOST_PARTS, TooMany};
use crate::region::Shape;
use crate::violation::{Checked, ensure};
use ir::dim::{Base, Linear};
use ir::graph::Value;
use ir::kernel::{ALIGN, Kernel};
use ir::mesh::{Axis, Mesh, SubAxis};
use ir::op::{Collective, DType, Op, Reduce, Scalar};
use ir::program::{Action, Arena, BLOCK, Buffer, BufferAddress, BufferId, Command, Content, Job, Program, Space};
use std::rc::Rc;

/// How a command affects elements of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    Read,
    Write,
    /// Adds to what is there.
    Add,
    /// Writes a result in place of one of its operands.
    Replace,
}

/// A part of a buffer that a command touches.
#[derive(Clone, Debug)]
pub struct Access {
    pub buffer: BufferId,
    pub effect: Effect,
    /// First element at coordinates zero.
    pub start: u64,
    /// How much further the access can lie at other coordinates.
    pub spread: u64,
    pub shape: Rc<Shape>,
}

impl Access {
    /// The elements that an injective operand reaches at coordinates zero.
    ///
    /// # Errors
    /// If they lie in too many parts.
    pub fn elements(&self) -> Result<Cover, TooMany> {
        Cover::of(&self.shape, self.start)
    }

    /// All elements that the access can reach at any coordinates, and those between.
    pub fn hull(&self) -> (u64, u64) {
        match self.shape.reach() {
            0 => (self.start, self.start),
            reach => (self.start, self.start + self.spread + reach),
        }
    }
}

/// What a launch has to know about a kernel.
pub struct KernelFacts {
    on: Space,
    inputs: Vec<(DType, Rc<Shape>)>,
    /// Per input.
    unaligned: Vec<bool>,
    outputs: Vec<(DType, Rc<Shape>, Effect)>,
    /// For each output and input, whether they may be the same memory.
    in_place: Vec<Vec<bool>>,
    /// For each output, the inputs and scalars on which it depends.
    depends: Vec<(Vec<usize>, Vec<usize>)>,
    scalars: Vec<DType>,
    random: bool,
}

impl KernelFacts {
    /// Collects the facts of a kernel that was verified.
    pub fn new(kernel: &Kernel) -> KernelFacts {
        let body = &kernel.body;
        let shape =
            |dims: &[ir::dim::Dim], strides: &[u64]| Rc::new(Shape::new(dims.iter().map(|d| body.dims.size(*d)).zip(strides.iter().copied())));
        KernelFacts {
            on: kernel.on,
            inputs: kernel.inputs.iter().map(|i| (i.ty.dtype, shape(&i.ty.dims, &i.strides))).collect(),
            unaligned: kernel.inputs.iter().map(|i| i.unaligned).collect(),
            outputs: kernel
                .outputs
                .iter()
                .map(|o| {
                    let ty = &body[o.value].ty;
                    (ty.dtype, shape(&ty.dims, &o.strides), if o.accumulate { Effect::Add } else { Effect::Write })
                })
                .collect(),
            in_place: kernel.in_place(),
            depends: kernel.outputs.iter().map(|o| depends(kernel, o.value)).collect(),
            scalars: kernel.scalars.clone(),
            random: body.nodes.iter().any(|n| matches!(n.op, Op::Uniform { .. })),
        }
    }

    /// The number of inputs.
    pub fn inputs(&self) -> usize {
        self.inputs.len()
    }

    /// Inputs and scalars on which an output depends.
    pub fn depends(&self, output: usize) -> (&[usize], &[usize]) {
        let (inputs, scalars) = &self.depends[output];
        (inputs, scalars)
    }
}

fn depends(kernel: &Kernel, of: Value) -> (Vec<usize>, Vec<usize>) {
    let body = &kernel.body;
    let mut reached = vec![false; body.nodes.len()];
    reached[of.index()] = true;
    let (mut inputs, mut scalars) = (vec![false; kernel.inputs.len()], vec![false; kernel.scalars.len()]);
    for v in body.values().rev().filter(|v| v.index() <= of.index()) {
        if !reached[v.index()] {
            continue;
        }
        let node = &body[v];
        node.args.iter().for_each(|a| reached[a.index()] = true);
        match &node.op {
            Op::Input(i) => inputs[*i as usize] = true,
            Op::Scalar(Scalar::Slot(i)) => scalars[*i as usize] = true,
            op if op.is_pointwise() => {}
            // Other ops may ask for an element's index in the whole dim, which the scalar determines.
            _ => {
                for d in node.args.iter().flat_map(|a| body.dims_of(*a)).chain(&node.ty.dims) {
                    if let Base::Slot(i) = body.dims[*d].index.base {
                        scalars[i as usize] = true;
                    }
                }
            }
        }
    }
    let chosen = |set: Vec<bool>| (0..set.len()).filter(|k| set[*k]).collect();
    (chosen(inputs), chosen(scalars))
}

/// Where the part of each member of a group over `subs` begins, if members have parts of `count` elements in rank
/// order. One step along a coordinate skips as many parts as there are members between. Passes have a rule of their
/// own, which is checked against this one.
pub fn parts_in_rank_order(mesh: &Mesh, subs: &[SubAxis], count: u64) -> Linear {
    let members = mesh.group(0, subs);
    let of = |u: SubAxis| {
        let mut next = mesh.coords(0);
        next[u.0 as usize] = 1;
        let place = members.iter().position(|m| *m == mesh.rank(&next))?;
        Some((u, count.saturating_mul(place as u64)))
    };
    mesh.ids().filter(|u| subs.contains(u) && mesh[*u].size > 1).filter_map(of).collect()
}

/// The greatest value of a linear form over all coordinates.
pub fn greatest(mesh: &Mesh, form: &Linear) -> Checked<u64> {
    form.iter().try_fold(0u64, |sum, (u, stride)| {
        let sub = mesh.subs.get(u.0 as usize).ok_or_else(|| Invariant::CoordinateAxis.breach("a linear form names no axis"))?;
        Ok(sum.saturating_add((sub.size - 1).saturating_mul(*stride)))
    })
}

/// Whether a linear form depends on the microbatch.
pub fn varies(mesh: &Mesh, form: &[(SubAxis, u64)]) -> bool {
    form.iter().any(|(u, stride)| *stride != 0 && mesh[*u].axis == Axis::Microbatch)
}

/// Whether a command reads other memory or data for each microbatch.
pub fn per_microbatch(mesh: &Mesh, command: &Command) -> bool {
    let place = |p: &BufferAddress| varies(mesh, &p.coords);
    let of_action = match &command.action {
        Action::Launch { args, scalars, .. } => {
            args.iter().any(place) || scalars.iter().any(|s| matches!(s, Scalar::Linear(form) if varies(mesh, form)))
        }
        Action::Collective { src, dst, .. } | Action::Copy { src, dst, .. } => place(src) || place(dst),
        Action::Send { src: p, .. } | Action::Recv { dst: p, .. } | Action::Report { src: p, .. } | Action::Limit { src: p, .. } => place(p),
        Action::Load { index, .. } => index.iter().any(|map| matches!(&map.base, Base::Coords(form) if varies(mesh, form))),
        Action::Fill { .. } | Action::Record { .. } | Action::Wait { .. } => false,
    };
    of_action || command.predicate.as_ref().is_some_and(place)
}

/// Checks commands of one program.
pub struct CommandChecker<'a> {
    pub job: &'a Job,
    pub program: &'a Program,
    pub kernels: &'a [KernelFacts],
}

impl CommandChecker<'_> {
    /// The accesses of a command: reads first, its predicate last. Every operand exists, has the right dtype and lies
    /// in its buffer at all coordinates. Nothing that it writes overlaps anything else that it touches, except in
    /// place.
    pub fn accesses(&self, command: &Command) -> Checked<Vec<Access>> {
        let action = &command.action;
        let mut accesses = self.touched(action)?;
        let of = |a: &Access| self.program.buffers[a.buffer.index()].arena.space();
        let fits = match action {
            Action::Launch { kernel, .. } => accesses.iter().all(|a| of(a) == Some(self.kernels[kernel.index()].on)),
            // A device reaches a disk only through the host's memory.
            Action::Copy { .. } => {
                let ends = [of(&accesses[0]), of(&accesses[1])];
                ends[0] != ends[1] && ends.contains(&Some(Space::Host))
            }
            Action::Report { .. }
            | Action::Collective { .. }
            | Action::Send { .. }
            | Action::Recv { .. }
            | Action::Fill { .. }
            | Action::Load { .. }
            | Action::Limit { .. }
            | Action::Record { .. }
            | Action::Wait { .. } => accesses.iter().all(|a| of(a) == Some(Space::Device)),
        };
        ensure(fits, Invariant::WorkingMemory, || "it does not work on the memory that its operands are in".into())?;
        if let Some(place) = &command.predicate {
            let read = self.dense(place, DType::Bool, 1, Effect::Read)?;
            ensure(of(&read) == Some(Space::Device), Invariant::WorkingMemory, || "its predicate is not in the device's memory".into())?;
            for written in accesses.iter().filter(|a| a.effect != Effect::Read) {
                let name = &self.program.buffers[place.buffer.index()].name;
                ensure(few(name, apart(written, &read))?, Invariant::OperandsApart, || format!("it overlaps its predicate in buffer `{name}`"))?;
            }
            accesses.push(read);
        }
        Ok(accesses)
    }

    fn touched(&self, action: &Action) -> Checked<Vec<Access>> {
        match action {
            Action::Launch { kernel, args, scalars } => {
                let facts =
                    self.kernels.get(kernel.index()).ok_or_else(|| Invariant::NamedThing.breach(format!("there is no kernel {}", kernel.0)))?;
                self.launch(facts, args, scalars)
            }
            Action::Collective { kind, group, dtype, count, src, dst } => self.collective(*kind, group.index(), *dtype, *count, [src, dst]),
            Action::Send { dtype, count, src, .. } => Ok(vec![self.dense(src, *dtype, *count, Effect::Read)?]),
            Action::Recv { dtype, count, dst, .. } => Ok(vec![self.dense(dst, *dtype, *count, Effect::Write)?]),
            Action::Copy { dtype, count, src, dst } => {
                let (read, written) = (self.dense(src, *dtype, *count, Effect::Read)?, self.dense(dst, *dtype, *count, Effect::Write)?);
                let part = matches!(self.buffer(dst.buffer)?.content, Content::Param { .. });
                ensure(written.spread == 0 || part, Invariant::WriteFixed, || "where it writes depends on coordinates".into())?;
                for place in [src, dst] {
                    self.in_blocks(place, *count)?;
                }
                Ok(vec![read, written])
            }
            Action::Fill { buffer, .. } => Ok(vec![self.whole(*buffer)?]),
            Action::Load { input, dst, index } => {
                let entry = self.job.inputs.get(*input as usize).ok_or_else(|| Invariant::NamedThing.breach(format!("there is no input {input}")))?;
                let buffer = self.buffer(*dst)?;
                ensure(buffer.dtype == entry.dtype, Invariant::OperandType, || {
                    format!("buffer `{}` is {}, the input {}", buffer.name, buffer.dtype.name(), entry.dtype.name())
                })?;
                super::persistent::covers(&self.job.mesh, &entry.dims, index, &buffer.dims, &[Axis::Microbatch])?;
                Ok(vec![self.whole(*dst)?])
            }
            Action::Report { report, src } => {
                ensure((*report as usize) < self.job.reports.len(), Invariant::NamedThing, || format!("there is no report {report}"))?;
                Ok(vec![self.dense(src, DType::F32, 1, Effect::Read)?])
            }
            Action::Limit { src, .. } => Ok(vec![self.dense(src, DType::I32, 1, Effect::Read)?]),
            Action::Record { .. } | Action::Wait { .. } => Ok(vec![]),
        }
    }

    /// Checks that a copy to or from a disk has whole blocks, or a last block that is its buffer's alone.
    fn in_blocks(&self, place: &BufferAddress, count: u64) -> Checked {
        let buffer = self.buffer(place.buffer)?;
        let is_edge = |element: u64| element == buffer.elements() || (element * buffer.dtype.bytes()).is_multiple_of(BLOCK);
        let whole = place.coords.is_empty() && is_edge(place.offset) && is_edge(place.offset + count);
        ensure(buffer.arena != Arena::Disk || whole, Invariant::DiskBlocks, || {
            format!("elements {}..{} of `{}` begin or end within a block of the disk", place.offset, place.offset + count, buffer.name)
        })
    }

    fn launch(&self, facts: &KernelFacts, args: &[BufferAddress], scalars: &[Scalar]) -> Checked<Vec<Access>> {
        let (inputs, outputs) = (&facts.inputs, &facts.outputs);
        let operands = inputs.len() + outputs.len();
        ensure(args.len() == operands, Invariant::PlaceCount, || format!("{} places for the kernel's {operands} operands", args.len()))?;
        ensure(scalars.len() == facts.scalars.len(), Invariant::ScalarType, || {
            format!("{} scalars, the kernel has {}", scalars.len(), facts.scalars.len())
        })?;
        for (k, (scalar, dtype)) in scalars.iter().zip(&facts.scalars).enumerate() {
            let fits = match scalar {
                Scalar::LearningRate | Scalar::LossScale | Scalar::BiasCorrection(_) => dtype.is_float(),
                Scalar::Step | Scalar::Seed => *dtype == DType::I32,
                Scalar::Linear(form) => {
                    greatest(&self.job.mesh, form)?;
                    *dtype == DType::I32
                }
                Scalar::Slot(_) => false,
            };
            ensure(fits, Invariant::ScalarType, || format!("scalar {k} is not {}", dtype.name()))?;
        }
        ensure(!facts.random || scalars.ends_with(&[Scalar::Seed, Scalar::Step]), Invariant::RandomSeed, || {
            "it draws random numbers without seed and step".into()
        })?;
        let mut out = Vec::with_capacity(operands);
        for (((dtype, shape), unaligned), place) in inputs.iter().zip(&facts.unaligned).zip(args) {
            out.push(self.access(place, *dtype, shape.clone(), Effect::Read)?);
            ensure(*unaligned || place.is_aligned(dtype.bytes()), Invariant::OperandAligned, || {
                let buffer = &self.program.buffers[place.buffer.index()];
                format!("an operand in buffer `{}` begins at no multiple of {ALIGN} bytes", buffer.name)
            })?;
        }
        for (k, ((dtype, shape, effect), place)) in outputs.iter().zip(&args[inputs.len()..]).enumerate() {
            let mut written = self.access(place, *dtype, shape.clone(), *effect)?;
            // A rank may write only its own part of a parameter, since the parts are gathered later
            // ([`super::replicas`]).
            let buffer = &self.program.buffers[place.buffer.index()];
            let part = matches!(buffer.content, Content::Param { .. }) && *effect == Effect::Write;
            ensure(written.spread == 0 || part, Invariant::WriteFixed, || {
                format!("where it writes in buffer `{}` depends on coordinates", buffer.name)
            })?;
            for (i, other) in out.iter().enumerate() {
                let same = i < inputs.len() && facts.in_place[k][i] && args[i] == *place;
                if same {
                    written.effect = Effect::Replace;
                } else {
                    let name = &self.program.buffers[place.buffer.index()].name;
                    ensure(few(name, apart(&written, other))?, Invariant::OperandsApart, || {
                        format!("output {k} overlaps operand {i} in buffer `{name}`")
                    })?;
                }
            }
            out.push(written);
        }
        Ok(out)
    }

    fn collective(&self, kind: Collective, group: usize, dtype: DType, count: u64, [src, dst]: [&BufferAddress; 2]) -> Checked<Vec<Access>> {
        let group = self.program.groups.get(group).ok_or_else(|| Invariant::NamedThing.breach(format!("there is no group {group}")))?;
        let (give, get) = kind.elements(count, group.size(&self.job.mesh));
        if let Collective::AllReduce(reduce) | Collective::ReduceScatter(reduce) = kind {
            ensure((reduce == Reduce::Any) == (dtype == DType::Bool), Invariant::ReductionType, || {
                format!("a reduction `{}` of {}", reduce.name(), dtype.name())
            })?;
        }
        let read = self.dense(src, dtype, give, Effect::Read)?;
        let part_of = |part: &BufferAddress, whole: &BufferAddress| {
            let mesh = &self.job.mesh;
            let told: Linear = part.coords.iter().copied().filter(|(u, _)| mesh.subs.get(u.0 as usize).is_none_or(|s| s.size > 1)).collect();
            let place = BufferAddress { coords: vec![], ..part.clone() };
            group.stages.is_none() && whole.coords.is_empty() && place == *whole && told == parts_in_rank_order(mesh, &group.subs, count)
        };
        let in_place = match kind {
            Collective::AllReduce(_) => src == dst,
            Collective::ReduceScatter(_) => part_of(dst, src),
            Collective::AllGather => part_of(src, dst),
            Collective::AllToAll | Collective::Shift => false,
        };
        // An all-gather writes the whole destination, even in place.
        let effect = if in_place && kind != Collective::AllGather { Effect::Replace } else { Effect::Write };
        let written = self.dense(dst, dtype, get, effect)?;
        let apart = in_place || few(&self.buffer(dst.buffer)?.name, apart(&read, &written))?;
        ensure(apart, Invariant::OperandsApart, || "its source overlaps its destination".into())?;
        ensure(in_place || written.spread == 0, Invariant::WriteFixed, || "where it writes depends on coordinates".into())?;
        Ok(vec![read, written])
    }

    fn buffer(&self, id: BufferId) -> Checked<&Buffer> {
        self.program.buffers.get(id.index()).ok_or_else(|| Invariant::NamedThing.breach(format!("there is no buffer {}", id.0)))
    }

    fn whole(&self, id: BufferId) -> Checked<Access> {
        let shape = Rc::new(Shape::dense(self.buffer(id)?.elements()));
        Ok(Access { buffer: id, effect: Effect::Write, start: 0, spread: 0, shape })
    }

    fn dense(&self, place: &BufferAddress, dtype: DType, count: u64, effect: Effect) -> Checked<Access> {
        self.access(place, dtype, Rc::new(Shape::dense(count)), effect)
    }

    fn access(&self, place: &BufferAddress, dtype: DType, shape: Rc<Shape>, effect: Effect) -> Checked<Access> {
        let buffer = self.buffer(place.buffer)?;
        let name = &buffer.name;
        ensure(buffer.dtype == dtype, Invariant::OperandType, || format!("buffer `{name}` is {}, not {}", buffer.dtype.name(), dtype.name()))?;
        let spread = greatest(&self.job.mesh, &place.coords)?;
        let end = place.offset.saturating_add(spread).saturating_add(shape.reach());
        ensure(end <= buffer.elements(), Invariant::OperandRange, || {
            format!("it reaches element {} of buffer `{name}`, which has {}", end.saturating_sub(1), buffer.elements())
        })?;
        if effect != Effect::Read {
            ensure(shape.is_injective(), Invariant::WriteInjective, || format!("it writes elements of buffer `{name}` twice"))?;
        }
        Ok(Access { buffer: place.buffer, effect, start: place.offset, spread, shape })
    }
}

/// Whether two accesses of a command share no element.
fn apart(a: &Access, b: &Access) -> Result<bool, TooMany> {
    let ((a0, a1), (b0, b1)) = (a.hull(), b.hull());
    if a.buffer != b.buffer || a1 <= b0 || b1 <= a0 {
        return Ok(true);
    }
    if a.spread != 0 || b.spread != 0 || !a.shape.is_injective() || !b.shape.is_injective() {
        return Ok(false);
    }
    a.elements()?.is_apart(&b.elements()?)
}

/// Turns a comparison that took too many parts into an error.
pub fn few<T>(name: &str, found: Result<T, TooMany>) -> Checked<T> {
    found
        .map_err(|TooMany| Invariant::OperandPieces.breach(format!("what it reaches of buffer `{name}` is compared in more than {MOST_PARTS} parts")))
}
