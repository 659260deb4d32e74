//! Checks a job before anything is run: whatever it names exists, and whatever it touches lies within its arena.
//!
//! This is what the executor's own indexing rests on, and what the verifier of the program level ([`verify::job`]),
//! which proves much more, takes for granted: so it looks at a job from anywhere without panicking, and neither needs
//! memory beyond the job's own.
//!
//! It looks at what the job says alone. That the code of a kernel touches no more than its operands is up to whoever
//! has made it: no check of the job, and no hash, can tell.

use crate::strides::reach;
use ir::dim::{Base, Dim, IndexMap, Linear, Order};
use ir::graph::InputDefault;
use ir::kernel::{Family, Kernel};
use ir::mesh::{Axis, Mesh};
use ir::op::{DType, Op, Reduce, Scalar};
use ir::program::{
    Action, Arena, BLOCK, Buffer, BufferAddress, BufferId, Command, Content, Extent, Job, Program, ProgramPhase, Space, Stage, Stream,
};
use std::collections::BTreeSet;

/// The first thing that is wrong with a job, and where.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{place}: {what}")]
pub struct CheckError {
    /// `program 1, forward command 3`.
    pub place: String,
    /// What is wrong there, in words.
    pub what: String,
}

type CheckResult = Result<(), String>;

fn ensure(condition: bool, what: impl FnOnce() -> String) -> CheckResult {
    if condition { Ok(()) } else { Err(what()) }
}

/// Checks everything.
///
/// # Errors
/// The first thing that is wrong, and where.
pub fn check(job: &Job) -> Result<(), CheckError> {
    let at = |place: String| move |what: String| CheckError { place: place.clone(), what };
    whole(job).map_err(at("job".into()))?;
    for (k, kernel) in job.kernels.iter().enumerate() {
        kernel_sound(kernel).map_err(at(format!("kernel {k}")))?;
    }
    for (s, stage) in job.stages.iter().enumerate() {
        stage_sound(job, s as u64, stage).map_err(at(format!("stage {s}")))?;
    }
    for (p, program) in job.programs.iter().enumerate() {
        for buffer in &program.buffers {
            buffer_sound(job, program, buffer).map_err(at(format!("program {p}, buffer `{}`", buffer.name)))?;
        }
        for (g, group) in program.groups.iter().enumerate() {
            let known = group.subs.iter().all(|u| job.mesh.subs.get(u.0 as usize).is_some_and(|s| s.axis != Axis::Microbatch));
            ensure(known, || "it names no axis of ranks".into()).map_err(at(format!("program {p}, group {g}")))?;
            let once = group.subs.iter().collect::<BTreeSet<_>>().len() == group.subs.len();
            ensure(once, || "it names an axis twice".into()).map_err(at(format!("program {p}, group {g}")))?;
        }
        for body in &program.bodies {
            for (c, command) in body.commands.iter().enumerate() {
                command_sound(job, program, command).map_err(at(format!("program {p}, {} command {c}", body.name)))?;
            }
        }
    }
    groups_sound(job)?;
    reports_sound(job).map_err(at("job".into()))
}

/// Ranks decide from what they report whether to update, so all must report the same.
fn reports_sound(job: &Job) -> CheckResult {
    let deciding = |stage: &Stage| -> Vec<bool> {
        let program = &job.programs[stage.program as usize];
        let calls = stage.schedule.train.iter().flat_map(|c| program.commands(c));
        let reported: Vec<u32> = calls.filter_map(|(_, c)| if let Action::Report { report, .. } = c.action { Some(report) } else { None }).collect();
        let names = job.reports.iter().zip(0..).filter(|(name, _)| *name == "loss" || *name == "grad_norm");
        names.map(|(_, k)| reported.contains(&k)).collect()
    };
    let first = job.stages.first().map(deciding);
    ensure(job.stages.iter().all(|s| Some(deciding(s)) == first), || "not all programs report the loss and the gradient norm".into())
}

/// The most elements of the messages in flight on a channel, which the shared ring's 32-bit counters rely on.
const MOST_IN_RING: u64 = 1 << 32;

/// The most elements or bytes of anything: sums and products of sizes below it cannot overflow.
const MOST: u64 = 1 << 48;

fn product(sizes: impl IntoIterator<Item = u64>) -> Result<u64, String> {
    let mut out = 1u64;
    for n in sizes {
        out = out.checked_mul(n).filter(|p| *p <= MOST).ok_or("more elements than can be")?;
    }
    Ok(out)
}

fn whole(job: &Job) -> CheckResult {
    let mesh = &job.mesh;
    // This comes before anything multiplies the sizes.
    product(mesh.subs.iter().map(|s| s.size))?;
    ensure(mesh.subs.len() <= 255 && mesh.subs.iter().all(|s| s.size > 0), || "its mesh is malformed".into())?;
    ensure(mesh.world() <= 1 << 20, || format!("its mesh has {} ranks", mesh.world()))?;
    for axis in [Axis::Microbatch, Axis::Pp] {
        ensure(mesh.of(axis).count() <= 1, || format!("its mesh splits `{axis}`"))?;
    }
    ensure(mesh.size(Axis::Microbatch) == job.microbatches && job.microbatches <= u64::from(u32::MAX), || {
        format!("{} microbatches, {} in the mesh", job.microbatches, mesh.size(Axis::Microbatch))
    })?;
    // This keeps what is allocated for each microbatch in proportion to the job.
    let calls = job.stages.iter().map(|s| s.schedule.train.len()).max().unwrap_or(0) as u64;
    ensure(job.microbatches <= calls, || format!("{} microbatches, and {calls} calls in a step", job.microbatches))?;
    names(job)?;
    ensure((1..=job.microbatches.max(1)).contains(&u64::from(job.in_flight)), || format!("{} messages in flight on a channel", job.in_flight))?;
    ensure(job.stages.len() as u64 == mesh.size(Axis::Pp), || format!("{} stages, {} in the mesh", job.stages.len(), mesh.size(Axis::Pp)))?;
    let named = job.params.iter().map(|p| (&p.name, &p.dims)).chain(job.inputs.iter().map(|i| (&i.name, &i.dims)));
    for (name, dims) in named.chain(job.tables.iter().map(|t| (&t.name, &t.dims))) {
        product(dims.iter().map(|d| d.padded)).map_err(|e| format!("`{name}`: {e}"))?;
        for d in dims {
            let holds = 0 < d.size && d.size <= d.padded;
            ensure(holds, || format!("`{name}`: dim `{}` has {} elements, padded {}", d.name, d.size, d.padded))?;
        }
    }
    for param in &job.params {
        // safetensors reserves `__metadata__`, and names like `state0/w` are those of optimizer states.
        let state = |name: &str| name.strip_prefix("state").and_then(|n| n.split_once('/')).is_some_and(|n| n.0.bytes().all(|b| b.is_ascii_digit()));
        ensure(param.name != "__metadata__" && !state(&param.name), || format!("a parameter is called `{}`", param.name))?;
    }
    for table in &job.tables {
        let expected = product(table.dims.iter().map(|d| d.size))?;
        ensure(table.data.len() as u64 == expected, || format!("table `{}` has {} elements, not {expected}", table.name, table.data.len()))?;
    }
    for input in &job.inputs {
        let source = input.default.as_ref().and_then(InputDefault::source);
        ensure(source.is_none_or(|i| (i as usize) < job.inputs.len()), || format!("input `{}` derives from no input", input.name))?;
    }
    Ok(())
}

/// What files and reports are told apart by is told apart.
fn names(job: &Job) -> CheckResult {
    unique("parameter", job.params.iter().map(|p| p.name.as_str()))?;
    unique("input", job.inputs.iter().map(|i| i.name.as_str()))?;
    unique("report", job.reports.iter().map(String::as_str))
}

fn unique<'a>(kind: &str, mut names: impl Iterator<Item = &'a str>) -> CheckResult {
    let mut seen = BTreeSet::new();
    match names.find(|n| n.is_empty() || !seen.insert(*n)) {
        None => Ok(()),
        Some("") => Err(format!("a {kind} has no name")),
        Some(name) => Err(format!("two {kind}s are called `{name}`")),
    }
}

fn kernel_sound(kernel: &Kernel) -> CheckResult {
    body_sound(kernel)?;
    kernel.verify().map_err(|e| e.to_string())?;
    let inputs = kernel.inputs.iter().map(|i| (&i.ty, &i.strides));
    let outputs = kernel.outputs.iter().map(|o| (&kernel.body[o.value].ty, &o.strides));
    for (ty, strides) in inputs.chain(outputs) {
        let mut span = 0u64;
        for (d, stride) in ty.dims.iter().zip(strides) {
            let step = kernel.body.dims.size(*d).saturating_sub(1).checked_mul(*stride);
            span = step.and_then(|s| span.checked_add(s)).filter(|s| *s <= MOST).ok_or("an operand reaches too far")?;
        }
    }
    Ok(())
}

/// Values, dims and scalars that a kernel's body names exist, so that its verifier can look at them.
fn body_sound(kernel: &Kernel) -> CheckResult {
    let (body, dims) = (&kernel.body, &kernel.body.dims);
    let known = |d: &Dim| (d.0 as usize) < dims.list.len();
    for (k, info) in dims.list.iter().enumerate() {
        ensure(info.copy_of.is_none_or(|d| (d.0 as usize) < k), || format!("dim `{}` is a copy of a later one", info.name))?;
        ensure([info.size, info.logical, info.global].into_iter().all(|n| n <= MOST), || format!("dim `{}` has {} elements", info.name, info.size))?;
        ensure(info.index.parts.iter().all(|p| p.0 > 0 && p.1 > 0 && p.0 <= MOST && p.1 <= MOST), || {
            format!("dim `{}` has an empty part", info.name)
        })?;
        ensure(product(info.index.parts.iter().map(|p| p.0))? == info.size, || format!("dim `{}` and its index map differ", info.name))?;
        let ordered = match info.order {
            Order::Plain => true,
            Order::ZigZag { pairs, chunk } => pairs <= MOST && chunk <= MOST && info.order.fits(product([2, pairs, chunk])?),
        };
        ensure(ordered, || format!("dim `{}` has no order", info.name))?;
        match &info.index.base {
            Base::Zero => {}
            Base::Slot(i) => ensure((*i as usize) < kernel.scalars.len(), || format!("there is no scalar argument {i}"))?,
            Base::Coords(_) => return Err(format!("dim `{}` begins at coordinates", info.name)),
        }
    }
    if let Family::Loops { grid } = &kernel.family {
        ensure(grid.iter().all(known), || "its grid has an unknown dim".into())?;
    }
    for input in &kernel.inputs {
        ensure(input.ty.dims.iter().all(known), || "an operand has an unknown dim".into())?;
        product(input.ty.dims.iter().map(|d| dims.size(*d)))?;
    }
    for (k, node) in body.nodes.iter().enumerate() {
        ensure(node.args.iter().all(|a| a.index() < k), || format!("node {k} uses a later one"))?;
        ensure(node.ty.dims.iter().chain(&node.op.dims()).all(known), || format!("node {k} has an unknown dim"))?;
        product(node.ty.dims.iter().map(|d| dims.size(*d)))?;
        if let Op::View { from, to } = &node.op {
            product(from.iter().map(|d| dims.size(*d)))?;
            product(to.iter().map(|d| dims.size(*d)))?;
        }
        let random = matches!(node.op, Op::Uniform { .. });
        ensure(!random || kernel.scalars.len() >= 2, || "it draws random numbers without seed and step".into())?;
    }
    ensure(kernel.outputs.iter().all(|o| o.value.index() < body.nodes.len()), || "an output is no value".into())
}

fn stage_sound(job: &Job, number: u64, stage: &Stage) -> CheckResult {
    let program = job.programs.get(stage.program as usize).ok_or_else(|| format!("there is no program {}", stage.program))?;
    for body in &program.bodies {
        let within = body.cuts.iter().all(|c| *c > 0 && (*c as usize) < body.commands.len());
        ensure(within && body.cuts.windows(2).all(|w| w[0] < w[1]), || format!("`{}` is cut at {:?}", body.name, body.cuts))?;
    }
    if let Some(p) = stage.params.iter().find(|p| **p as usize >= job.params.len()) {
        return Err(format!("there is no parameter {p}"));
    }
    for phase in ProgramPhase::ALL {
        for (c, call) in stage.schedule.calls(phase).iter().enumerate() {
            ensure(call.body.index() < program.bodies.len(), || format!("there is no body {}", call.body.0))
                .and_then(|()| ensure(u64::from(call.microbatch) < job.microbatches, || format!("there is no microbatch {}", call.microbatch)))
                .and_then(|()| ensure(call.part < program.bodies[call.body.index()].parts(), || format!("there is no part {}", call.part)))
                .map_err(|e| format!("{} call {c}: {e}", phase.name()))?;
        }
    }
    let slots = &stage.schedule.slots;
    let sound = slots.len() == program.stashes.len()
        && slots.iter().all(|s| s.count > 0 && s.at.is_multiple_of(64))
        && program.stashes.iter().all(|s| s.bytes.is_multiple_of(64));
    ensure(sound, || format!("slots {slots:?} for {} stashes", program.stashes.len()))?;
    let bytes = stage.schedule.arena_bytes(program);
    ensure(bytes.iter().all(|bytes| *bytes <= MOST), || format!("the stashes have slots {slots:?} of {:?} bytes", program.stashes))?;
    for bucket in &program.buckets {
        let mut end = 0u64;
        for piece in &bucket.pieces {
            let slot = piece.slot;
            let param = stage.params.get(slot as usize).ok_or_else(|| format!("a bucket has slot {slot}, which there is not"))?;
            let dims = &job.params[*param as usize].dims;
            let lens = piece.index.iter().map(|m| product(m.parts.iter().map(|p| p.0))).collect::<Result<Vec<_>, _>>()?;
            let sizes: Vec<(String, u64)> = dims.iter().map(|d| d.name.clone()).zip(lens.iter().copied()).collect();
            cut(&job.mesh, dims, &piece.index, &sizes).map_err(|e| format!("a bucket's slot {slot}: {e}"))?;
            ensure(piece.at >= end, || format!("a bucket's slot {slot} overlaps the one before"))?;
            end = product(lens)?.checked_add(piece.at).ok_or("a bucket is too large")?;
        }
        ensure(end <= bucket.size && bucket.size <= MOST, || format!("a bucket of {} elements has {end}", bucket.size))?;
    }
    for buffer in &program.buffers {
        let (slot, index) = match &buffer.content {
            Content::Param { slot, index } | Content::State { slot, index, .. } => (*slot, index),
            Content::Table { .. } | Content::Accumulator | Content::Activation => continue,
        };
        let bucket = program.bucket(stage, slot).map(|b| vec![Extent { name: "bucket".into(), size: b.size, padded: b.size, order: Order::Plain }]);
        let dims = match &bucket {
            Some(dims) => {
                ensure(index.iter().all(IndexMap::is_contiguous), || format!("buffer `{}` holds a bucket in pieces", buffer.name))?;
                dims
            }
            None => {
                let param = stage.params.get(slot as usize).ok_or_else(|| format!("buffer `{}`: there is no slot {slot}", buffer.name))?;
                &job.params[*param as usize].dims
            }
        };
        cut(&job.mesh, dims, index, &buffer.dims).map_err(|e| format!("buffer `{}`: {e}", buffer.name))?;
    }
    let stages = job.stages.len() as u64;
    for command in program.bodies.iter().flat_map(|b| &b.commands) {
        if let Action::Send { hops, .. } | Action::Recv { hops, .. } = command.action {
            let there = number.checked_add_signed(hops).filter(|s| *s < stages && hops != 0);
            ensure(there.is_some(), || format!("a message goes {hops} stages on, of {stages}"))?;
        }
    }
    Ok(())
}

/// Every rank must be in its own groups; groups depend on the stage only by their list of stages.
fn groups_sound(job: &Job) -> Result<(), CheckError> {
    for (s, stage) in job.stages.iter().enumerate() {
        for (g, group) in job.programs[stage.program as usize].groups.iter().enumerate() {
            if group.stages.as_ref().is_some_and(|list| !list.contains(&(s as u64)) || list.iter().any(|x| *x >= job.stages.len() as u64)) {
                return Err(CheckError { place: format!("stage {s}, group {g}"), what: "its stages do not include this one".into() });
            }
        }
    }
    Ok(())
}

fn buffer_sound(job: &Job, program: &Program, buffer: &Buffer) -> CheckResult {
    let elements = product(buffer.dims.iter().map(|d| d.1))?;
    let size = program.arena_bytes[buffer.arena as usize];
    ensure(size <= MOST, || format!("the {} arena has {size} bytes", buffer.arena.name()))?;
    let end = (elements * buffer.dtype.bytes()).checked_add(buffer.offset);
    ensure(end.is_some_and(|e| e <= size), || {
        format!("offset {} and {} bytes lie outside of the {} arena's {size}", buffer.offset, elements * buffer.dtype.bytes(), buffer.arena.name())
    })?;
    let align = if buffer.arena == Arena::Disk { BLOCK } else { 64 };
    ensure(buffer.offset.is_multiple_of(align), || format!("offset {} is not a multiple of {align}", buffer.offset))?;
    match &buffer.content {
        Content::Table { table, index } => {
            let table = job.tables.get(*table as usize).ok_or_else(|| format!("there is no table {table}"))?;
            cut(&job.mesh, &table.dims, index, &buffer.dims)?;
        }
        Content::Param { .. } | Content::State { .. } | Content::Accumulator | Content::Activation => {}
    }
    ensure(!buffer.arena.is_stash() || program.stash(buffer).is_some(), || "it lies in no one stash".into())?;
    let held = !matches!(buffer.content, Content::Accumulator | Content::Activation);
    ensure(!held || buffer.arena.lasts(), || "it lives over steps, but not in an arena that does".into())
}

/// Index maps fit dims and stay within the whole tensor.
fn cut(mesh: &Mesh, whole: &[Extent], index: &[IndexMap], dims: &[(String, u64)]) -> CheckResult {
    ensure(index.len() == dims.len() && index.len() == whole.len(), || {
        format!("{} dims, {} index maps, {} dims as a whole", dims.len(), index.len(), whole.len())
    })?;
    for ((map, (name, size)), extent) in index.iter().zip(dims).zip(whole) {
        ensure(extent.order.fits(extent.padded), || format!("dim `{name}` has an order of another size"))?;
        ensure(map.parts.iter().all(|p| p.1 > 0), || format!("dim `{name}` has an index map without a stride"))?;
        let len = product(map.parts.iter().map(|p| p.0))?;
        ensure(len == *size, || format!("dim `{name}` has {size} elements, its index map {len}"))?;
        if len == 0 {
            continue;
        }
        let base = match &map.base {
            Base::Zero => 0,
            Base::Coords(form) => greatest(mesh, form)?,
            Base::Slot(_) => return Err(format!("dim `{name}` begins at a kernel's scalar")),
        };
        let mut last = base;
        for (extent, stride) in &map.parts {
            last = (extent - 1).checked_mul(*stride).and_then(|s| last.checked_add(s)).ok_or("an index map reaches too far")?;
        }
        ensure(last < extent.padded, || format!("dim `{name}` reaches element {last} of {}", extent.padded))?;
    }
    Ok(())
}

/// The greatest value of a linear form.
fn greatest(mesh: &Mesh, form: &Linear) -> Result<u64, String> {
    let mut sum = 0u64;
    for (u, stride) in form {
        let sub = mesh.subs.get(u.0 as usize).ok_or("a linear form names no axis")?;
        sum = (sub.size - 1).checked_mul(*stride).and_then(|s| sum.checked_add(s)).filter(|s| *s <= MOST).ok_or("a linear form is too great")?;
    }
    Ok(sum)
}

fn buffer(program: &Program, id: BufferId) -> Result<&Buffer, String> {
    program.buffers.get(id.index()).ok_or_else(|| format!("there is no buffer {}", id.0))
}

/// `count` elements from a place on are within its buffer, and of this dtype.
fn place_sound(mesh: &Mesh, program: &Program, place: &BufferAddress, dtype: DType, count: u64) -> CheckResult {
    let buffer = buffer(program, place.buffer)?;
    ensure(buffer.dtype == dtype, || format!("buffer `{}` is {}, not {}", buffer.name, buffer.dtype.name(), dtype.name()))?;
    let end = place.offset.checked_add(greatest(mesh, &place.coords)?).and_then(|s| s.checked_add(count));
    ensure(end.is_some_and(|e| e <= buffer.elements()), || {
        format!("{count} elements from {} on lie outside of buffer `{}` of {}", place.offset, buffer.name, buffer.elements())
    })
}

fn command_sound(job: &Job, program: &Program, command: &Command) -> CheckResult {
    action_sound(job, program, &command.action)?;
    let Some(predicate) = &command.predicate else { return Ok(()) };
    let may = matches!(command.action, Action::Launch { .. } | Action::Copy { .. } | Action::Collective { .. });
    ensure(may && command.stream != Stream::Host, || "it has a predicate, but is nothing that may be left out".into())?;
    place_sound(&job.mesh, program, predicate, DType::Bool, 1)?;
    ensure(program.buffers[predicate.buffer.index()].arena.space() == Some(Space::Device), || "its predicate is not in the device's memory".into())
}

fn action_sound(job: &Job, program: &Program, action: &Action) -> CheckResult {
    let mesh = &job.mesh;
    match action {
        Action::Launch { kernel, args, scalars } => {
            let kernel = job.kernels.get(kernel.index()).ok_or_else(|| format!("there is no kernel {}", kernel.0))?;
            let expected = kernel.inputs.len() + kernel.outputs.len();
            ensure(args.len() == expected, || format!("{} operands, the kernel has {expected}", args.len()))?;
            ensure(scalars.len() == kernel.scalars.len(), || format!("{} scalars, the kernel has {}", scalars.len(), kernel.scalars.len()))?;
            let inputs = kernel.inputs.iter().map(|i| (&i.ty, &i.strides));
            let outputs = kernel.outputs.iter().map(|o| (&kernel.body[o.value].ty, &o.strides));
            for ((ty, strides), place) in inputs.chain(outputs).zip(args) {
                let held = buffer(program, place.buffer)?;
                ensure(held.arena.space() == Some(kernel.on), || {
                    format!("`{}` is not in the memory of the {}, which runs the kernel", held.name, kernel.on.name())
                })?;
                let sizes: Vec<u64> = ty.dims.iter().map(|d| kernel.body.dims.size(*d)).collect();
                place_sound(mesh, program, place, ty.dtype, reach(&sizes, strides))?;
            }
            for scalar in scalars {
                match scalar {
                    Scalar::Linear(form) => drop(greatest(mesh, form)?),
                    Scalar::Slot(i) => return Err(format!("scalar argument {i} outside of a kernel")),
                    Scalar::LearningRate | Scalar::LossScale | Scalar::Step | Scalar::Seed | Scalar::BiasCorrection(_) => {}
                }
            }
            Ok(())
        }
        Action::Collective { kind, group, dtype, count, src, dst } => {
            let group = program.groups.get(group.index()).ok_or_else(|| format!("there is no group {}", group.0))?;
            let stages = group.stages.as_ref().map_or(1, |s| s.len() as u64);
            let subs = group.subs.iter().filter(|u| group.stages.is_none() || mesh[**u].axis != Axis::Pp);
            let members = product(subs.map(|u| mesh[*u].size).chain([stages]))?;
            let (give, get) = kind.elements(1, members);
            if let Some(reduce) = kind.reduction() {
                ensure((reduce == Reduce::Any) == (*dtype == DType::Bool), || format!("a reduction `{}` of {}", reduce.name(), dtype.name()))?;
            }
            place_sound(mesh, program, src, *dtype, product([*count, give])?)?;
            place_sound(mesh, program, dst, *dtype, product([*count, get])?)
        }
        Action::Send { dtype, count, src: place, .. } | Action::Recv { dtype, count, dst: place, .. } => {
            let room = count.checked_mul(u64::from(job.in_flight) + 1).filter(|n| *n <= MOST_IN_RING);
            ensure(room.is_some(), || format!("{} messages of {count} elements are in flight", job.in_flight))?;
            place_sound(mesh, program, place, *dtype, *count)
        }
        Action::Copy { dtype, count, src, dst } => {
            place_sound(mesh, program, src, *dtype, *count)?;
            place_sound(mesh, program, dst, *dtype, *count)?;
            let ends = [buffer(program, src.buffer)?, buffer(program, dst.buffer)?].map(|b| b.arena.space());
            ensure(ends[0] != ends[1] && ends.contains(&Some(Space::Host)), || "it is not between the host's memory and another".into())
        }
        Action::Fill { buffer: id, .. } => buffer(program, *id).map(drop),
        Action::Load { input, dst, index } => {
            let input = job.inputs.get(*input as usize).ok_or_else(|| format!("there is no input {input}"))?;
            let dst = buffer(program, *dst)?;
            ensure(dst.dtype == input.dtype, || format!("buffer `{}` is {}, the input {}", dst.name, dst.dtype.name(), input.dtype.name()))?;
            cut(mesh, &input.dims, index, &dst.dims)
        }
        Action::Report { report, src } => {
            ensure((*report as usize) < job.reports.len(), || format!("there is no report {report}"))?;
            place_sound(mesh, program, src, DType::F32, 1)
        }
        Action::Limit { src, .. } => place_sound(mesh, program, src, DType::I32, 1),
        Action::Record { .. } | Action::Wait { .. } => Ok(()),
    }
}
