//! The text forms of a rank's program and of a whole job.

use super::body::{blank_origin, dtype, mesh, origin, reason, row_number};
use super::graph::{feed, init, numbered_rows};
use super::io::{Io, Result};
use super::kernel::{blank_kernel, kernel};
use super::labels::Labels;
use super::local::{blank_bucket, bucket, copied, indices, virtual_stage};
use super::op::{blank_collective, collective_kind, linear, route, scalar, zig_zag};
use super::tokens::{label, numbered};
use crate::diag::Source;
use crate::dim::Order;
use crate::graph::{Init, InputDefault};
use crate::kernel::Kernel;
use crate::mesh::Mesh;
use crate::model::{Decay, LossScale, Muon, MuonScale, Optimizer, Train};
use crate::op::{DType, Real, Scalar};
use crate::program::{
    Action, Arena, BodyId, BodyKind, Buffer, BufferAddress, BufferId, Call, CallSchedule, Channel, Command, Content, Extent, Group, GroupId,
    InputEntry, Interval, Job, KernelId, ParamEntry, Program, ProgramBody, ProgramPhase, SendTurn, Slots, Space, Stage, Stash, Stream, TableEntry,
};
use std::collections::BTreeSet;

/// Calls that one line may stand for.
const MOST_CALLS: u32 = 1 << 20;

pub(super) fn blank_program() -> Program {
    Program {
        buffers: vec![],
        arena_bytes: [0; Arena::ALL.len()],
        stashes: vec![],
        groups: vec![],
        copied: BTreeSet::new(),
        buckets: vec![],
        bodies: vec![],
    }
}

/// A program, given the mesh.
pub(super) fn program(io: &mut Io, p: &mut Program) -> Result {
    io.line("program")?;
    for (arena, bytes) in Arena::ALL.iter().zip(&mut p.arena_bytes) {
        let line = format!("arena {} bytes ", arena.name());
        match arena.space() {
            Some(Space::Device) => {
                io.line(&line)?;
                io.number(bytes)?;
            }
            // Programs that use no memory of the host, or no disk, do not mention it.
            Some(Space::Host) | None if io.line_if(*bytes != 0, &line) => io.number(bytes)?,
            Some(Space::Host) | None => {}
        }
    }
    io.rows(&mut p.stashes, Stash::default(), "stash bytes ", |io, _, stash| {
        io.number(&mut stash.bytes)?;
        io.or(&mut stash.space, Space::Device, " on ", |io, s| io.variant(s, "a space", &Space::ALL.map(|s| (s.name(), s))))
    })?;
    io.buffers = Labels::of(p.buffers.iter().map(|b| b.name.as_str()));
    let blank = Buffer {
        name: String::new(),
        dtype: DType::F32,
        dims: vec![],
        arena: Arena::Temporary,
        offset: 0,
        content: Content::Activation,
        origin: None,
    };
    io.rows(&mut p.buffers, blank, "buffer ", buffer)?;
    io.rows(&mut p.groups, Group { subs: vec![], stages: None }, "group ", |io, i, g| {
        row_number(io, i)?;
        io.with(" over ", &mut g.subs, Io::subs)?;
        io.option(&mut g.stages, vec![], " stages ", |io, s| io.list(s, 0, Io::number))
    })?;
    copied(io, &mut p.copied)?;
    io.rows(&mut p.buckets, blank_bucket(), "bucket ", bucket)?;
    io.bodies = Labels::of(p.bodies.iter().map(|b| b.name.as_str()));
    io.rows(&mut p.bodies, ProgramBody { name: String::new(), kind: BodyKind::Forward(0), commands: vec![], cuts: vec![] }, "body ", |io, i, b| {
        declare(io, |io| &mut io.bodies, i, &mut b.name)?;
        let kinds = [BodyKind::Prologue, BodyKind::Forward(0), BodyKind::Backward(0), BodyKind::Weight(0), BodyKind::Reduce, BodyKind::Update];
        io.lit(" kind ")?;
        io.variant(&mut b.kind, "a kind of body", &kinds.map(|k| (k.name(), k)))?;
        match &mut b.kind {
            BodyKind::Forward(l) | BodyKind::Backward(l) | BodyKind::Weight(l) => virtual_stage(io, l)?,
            BodyKind::Prologue | BodyKind::Reduce | BodyKind::Update => {}
        }
        if io.opt(!b.cuts.is_empty(), " cut at ") {
            io.list(&mut b.cuts, 0, Io::number)?;
        }
        let blank = Command { stream: Stream::Compute, action: Action::Record { event: 0 }, predicate: None, origin: blank_origin(), reason: None };
        io.rows(&mut b.commands, blank, "  ", |io, _, c| command(io, c))
    })?;
    Ok(())
}

/// The label of row `i` of a table, which grows by it when reading.
fn declare(io: &mut Io, table: for<'x> fn(&'x mut Io<'_>) -> &'x mut Labels, i: usize, name: &mut String) -> Result {
    let mark = io.mark();
    if !io.reading() {
        let (mut name, mut count) = table(io).get(i);
        return numbered(io, &mut name, &mut count);
    }
    let mut count = 0;
    numbered(io, name, &mut count)?;
    let labels = table(io);
    labels.add(name);
    if labels.get(i).1 == count { Ok(()) } else { io.wrong(mark, "numbers of a name must follow each other, from none") }
}

fn buffer(io: &mut Io, i: usize, b: &mut Buffer) -> Result {
    declare(io, |io| &mut io.buffers, i, &mut b.name)?;
    io.lit(" : ")?;
    dtype(io, &mut b.dtype)?;
    io.list(&mut b.dims, (String::new(), 0), |io, (name, size)| {
        io.name(name)?;
        io.with("=", size, Io::number)
    })?;
    io.lit(" in ")?;
    io.variant(&mut b.arena, "an arena", &Arena::ALL.map(|a| (a.name(), a)))?;
    io.with(" @", &mut b.offset, Io::number)?;
    bytes(io, b)?;
    let all = [
        ("param", Content::Param { slot: 0, index: vec![] }),
        ("state", Content::State { slot: 0, state: 0, index: vec![] }),
        ("table", Content::Table { table: 0, index: vec![] }),
        ("accumulator", Content::Accumulator),
        ("activation", Content::Activation),
    ];
    io.lit(" holds ")?;
    io.variant(&mut b.content, "what a buffer holds", &all)?;
    match &mut b.content {
        Content::Param { slot, index } | Content::Table { table: slot, index } => {
            io.with(" ", slot, Io::number)?;
            io.with(" index ", index, indices)?;
        }
        Content::State { slot, state, index } => {
            io.with(" ", state, Io::number)?;
            io.with(" of ", slot, Io::number)?;
            io.with(" index ", index, indices)?;
        }
        Content::Accumulator | Content::Activation => {}
    }
    if io.origin_follows(b.origin.is_some()) {
        origin(io, b.origin.get_or_insert_with(blank_origin))?;
    }
    Ok(())
}

/// ` bytes 64`, which follows from dims and element type.
fn bytes(io: &mut Io, b: &Buffer) -> Result {
    let want = b.dims.iter().fold(b.dtype.bytes(), |n, d| n.saturating_mul(d.1));
    let (mark, mut bytes) = (io.mark(), want);
    io.with(" bytes ", &mut bytes, Io::number)?;
    if bytes == want { Ok(()) } else { io.wrong(mark, format!("the buffer has {want} bytes")) }
}

fn buffer_id(io: &mut Io, b: &mut BufferId) -> Result {
    label(io, |io| &io.buffers, "buffer", &mut b.0)
}

/// `x @128 + 64*tp`: a buffer and, unless it is its start, the element.
fn place(io: &mut Io, p: &mut BufferAddress) -> Result {
    buffer_id(io, &mut p.buffer)?;
    io.or(&mut p.offset, 0, " @", Io::number)?;
    io.or(&mut p.coords, vec![], " + ", linear)
}

fn command(io: &mut Io, c: &mut Command) -> Result {
    io.variant(&mut c.stream, "a stream", &Stream::ALL.map(|s| (s.name(), s)))?;
    io.lit(" ")?;
    action(io, &mut c.action)?;
    io.option(&mut c.predicate, BufferAddress::start(BufferId(0)), " if ", place)?;
    origin(io, &mut c.origin)?;
    reason(io, &mut c.reason)
}

fn action(io: &mut Io, a: &mut Action) -> Result {
    let start = BufferAddress::start(BufferId(0));
    let (dst, src, f32) = (start.clone(), start.clone(), DType::F32);
    let all = [
        ("launch", Action::Launch { kernel: KernelId(0), args: vec![], scalars: vec![] }),
        ("collective", Action::Collective { kind: blank_collective(), group: GroupId(0), dtype: f32, count: 0, src: src.clone(), dst: dst.clone() }),
        ("send", Action::Send { hops: 0, channel: Channel(0), dtype: f32, count: 0, src: src.clone() }),
        ("recv", Action::Recv { hops: 0, channel: Channel(0), dtype: f32, count: 0, dst: dst.clone() }),
        ("copy", Action::Copy { dtype: f32, count: 0, src: src.clone(), dst }),
        ("fill", Action::Fill { buffer: BufferId(0), value: Real(0.0) }),
        ("load", Action::Load { input: 0, dst: BufferId(0), index: vec![] }),
        ("report", Action::Report { report: 0, src: src.clone() }),
        ("limit", Action::Limit { src, most: 0 }),
        ("record", Action::Record { event: 0 }),
        ("wait", Action::Wait { event: 0 }),
    ];
    io.variant(a, "a command", &all)?;
    match a {
        Action::Launch { kernel, args, scalars } => {
            io.with(" kernel ", &mut kernel.0, |io, k| io.hinted(k, |h| &h.kernels))?;
            io.with(" ", args, |io, args| io.list(args, start, place))?;
            if io.opt(!scalars.is_empty(), " scalars ") {
                io.list(scalars, Scalar::Step, scalar)?;
            }
            Ok(())
        }
        Action::Collective { kind, group, dtype: t, count, src, dst } => {
            io.with(" ", kind, collective_kind)?;
            io.with(" group ", &mut group.0, Io::number)?;
            transfer(io, count, t)?;
            io.with(" from ", src, place)?;
            io.with(" to ", dst, place)
        }
        Action::Send { hops, channel, dtype: t, count, src } => {
            route(io, hops, channel)?;
            transfer(io, count, t)?;
            io.with(" from ", src, place)
        }
        Action::Recv { hops, channel, dtype: t, count, dst } => {
            route(io, hops, channel)?;
            transfer(io, count, t)?;
            io.with(" to ", dst, place)
        }
        Action::Copy { dtype: t, count, src, dst } => {
            transfer(io, count, t)?;
            io.with(" from ", src, place)?;
            io.with(" to ", dst, place)
        }
        Action::Fill { buffer, value } => {
            io.with(" ", buffer, buffer_id)?;
            io.with(" with ", &mut value.0, Io::real)
        }
        Action::Load { input, dst, index } => {
            io.with(" input ", input, |io, i| io.hinted(i, |h| &h.loads))?;
            io.with(" to ", dst, buffer_id)?;
            io.with(" index ", index, indices)
        }
        Action::Report { report, src } => {
            io.with(" ", report, |io, r| io.hinted(r, |h| &h.reports))?;
            io.with(" from ", src, place)
        }
        Action::Limit { src, most } => {
            io.with(" ", src, place)?;
            io.with(" to ", most, Io::number)
        }
        Action::Record { event } | Action::Wait { event } => io.with(" ", event, Io::number),
    }
}

/// ` 4096 x f32`.
fn transfer(io: &mut Io, count: &mut u64, t: &mut DType) -> Result {
    io.with(" ", count, Io::number)?;
    io.with(" x ", t, dtype)
}

/// A stage's schedule, given the labels of its program's bodies.
pub(super) fn schedule(io: &mut Io, s: &mut CallSchedule) -> Result {
    io.with(" slots ", &mut s.slots, |io, all| {
        io.list(all, Slots { count: 0, at: 0 }, |io, s| {
            io.number(&mut s.count)?;
            io.with(" @", &mut s.at, Io::number)
        })
    })?;
    for (list, words) in [(&mut s.train, "train:"), (&mut s.update, "update:"), (&mut s.eval, "eval:")] {
        io.line(words)?;
        calls(io, list)?;
    }
    for (list, phase) in s.sends.iter_mut().zip(ProgramPhase::ALL) {
        if io.line_if(!list.is_empty(), &format!("sends of {}:", phase.name())) {
            io.with(" ", list, |io, list| io.list(list, SendTurn::default(), send_turn))?;
        }
    }
    Ok(())
}

/// `4 after 7`, or `4 with 7` if the exchange that comes next is at once with it.
fn send_turn(io: &mut Io, turn: &mut SendTurn) -> Result {
    io.number(&mut turn.send)?;
    turn.grouped = io.opt(turn.grouped, " with ");
    if !turn.grouped {
        io.lit(" after ")?;
    }
    io.number(&mut turn.after)
}

/// Consecutive calls of one body: for one microbatch after the other, or one part of it after the other.
#[derive(Clone)]
struct Calls {
    body: BodyId,
    microbatch: u32,
    microbatches: u32,
    part: u32,
    parts: u32,
}

impl Calls {
    /// Takes a call in, if it follows.
    fn extend(&mut self, call: &Call) -> bool {
        let next = |first: u32, count: u32, given: u32| first.checked_add(count) == Some(given);
        let (of_part, of_microbatch) = (
            self.microbatches == 1 && call.microbatch == self.microbatch && next(self.part, self.parts, call.part),
            self.parts == 1 && (self.part, call.part) == (0, 0) && next(self.microbatch, self.microbatches, call.microbatch),
        );
        match call.body == self.body {
            true if of_part => self.parts += 1,
            true if of_microbatch => self.microbatches += 1,
            _ => return false,
        }
        true
    }

    fn each(&self) -> impl Iterator<Item = Call> + use<> {
        let Calls { body, microbatch, part, .. } = *self;
        let parts = move |k: u32, n: u32| (0..n).map(move |p| Call { body, microbatch: microbatch + k, part: part + p });
        let n = self.parts;
        (0..self.microbatches).flat_map(move |k| parts(k, n))
    }
}

/// Calls in order, those of one body for consecutive microbatches as one line, `forward 0..4`, and so those of
/// consecutive parts of it: `forward 0 part 2..4`.
fn calls(io: &mut Io, calls: &mut Vec<Call>) -> Result {
    let mut runs: Vec<Calls> = vec![];
    for call in calls.iter() {
        if !runs.last_mut().is_some_and(|run| run.extend(call)) {
            runs.push(Calls { body: call.body, microbatch: call.microbatch, microbatches: 1, part: call.part, parts: 1 });
        }
    }
    // Where parts of a body are called separately, every call names its part.
    let cut: BTreeSet<u32> = calls.iter().filter(|c| c.part > 0).map(|c| c.body.0).collect();
    let blank = Calls { body: BodyId(0), microbatch: 0, microbatches: 1, part: 0, parts: 1 };
    io.rows(&mut runs, blank, "  ", |io, _, run| {
        label(io, |io| &io.bodies, "body", &mut run.body.0)?;
        io.lit(" ")?;
        count(io, &mut run.microbatch, &mut run.microbatches)?;
        if run.microbatches == 1 && io.opt(cut.contains(&run.body.0), " part ") {
            count(io, &mut run.part, &mut run.parts)?;
        }
        Ok(())
    })?;
    if io.reading() {
        *calls = runs.iter().flat_map(Calls::each).collect();
    }
    Ok(())
}

/// Numbers of calls from the first on: `3`, or `3..7` if they are several.
fn count(io: &mut Io, first: &mut u32, count: &mut u32) -> Result {
    let mark = io.mark();
    io.number(first)?;
    let mut end = u64::from(*first) + u64::from(*count);
    if io.opt(*count != 1, "..") {
        io.number(&mut end)?;
    } else {
        end = u64::from(*first) + 1;
    }
    match end.checked_sub(u64::from(*first)).and_then(|n| u32::try_from(n).ok()) {
        Some(n) if !io.reading() || (1..=MOST_CALLS).contains(&n) && end <= 1 << 32 => *count = n,
        _ => return io.wrong(mark, format!("expected 1 to {MOST_CALLS} calls")),
    }
    Ok(())
}

pub(super) fn blank_job() -> Job {
    Job {
        model: String::new(),
        sources: vec![],
        settings: vec![],
        mesh: Mesh { subs: vec![] },
        train: Train::default(),
        global_batch: 0,
        microbatches: 0,
        in_flight: 0,
        params: vec![],
        inputs: vec![],
        tables: vec![],
        reports: vec![],
        kernels: vec![],
        programs: vec![],
        stages: vec![],
    }
}

/// A whole job.
pub(super) fn job(io: &mut Io, j: &mut Job) -> Result {
    io.line("job ")?;
    io.name(&mut j.model)?;
    io.with(" global_batch ", &mut j.global_batch, Io::number)?;
    io.with(" microbatches ", &mut j.microbatches, Io::number)?;
    io.with(" in_flight ", &mut j.in_flight, Io::number)?;
    mesh(io, &mut j.mesh)?;
    let blank = Source { name: String::new(), text: String::new() };
    io.rows(&mut j.sources, blank, "source ", |io, _, source| {
        io.string(&mut source.name)?;
        io.with(" = ", &mut source.text, Io::string)
    })?;
    settings(io, &mut j.settings)?;
    train(io, &mut j.train)?;
    let blank = ParamEntry { name: String::new(), dims: vec![], init: Init::Const(Real(0.0)) };
    numbered_rows(io, &mut j.params, blank, "param ", |io, p| {
        io.with(" : ", &mut p.dims, extents)?;
        io.with(" init ", &mut p.init, init)
    })?;
    let blank = InputEntry { name: String::new(), dtype: DType::I32, dims: vec![], default: None, takes: None };
    numbered_rows(io, &mut j.inputs, blank, "input ", |io, x| {
        io.with(" : ", &mut x.dtype, dtype)?;
        extents(io, &mut x.dims)?;
        io.option(&mut x.default, InputDefault::Next(0), " default ", feed)?;
        io.option(&mut x.takes, vec![], " takes ", intervals)
    })?;
    numbered_rows(io, &mut j.tables, TableEntry { name: String::new(), dtype: DType::F32, dims: vec![], data: vec![] }, "table ", |io, t| {
        io.with(" : ", &mut t.dtype, dtype)?;
        extents(io, &mut t.dims)?;
        io.with(" = ", &mut t.data, |io, data| io.list(data, 0.0, Io::real))
    })?;
    io.rows(&mut j.reports, String::new(), "report ", |io, _, name| io.name(name))?;
    io.hints.kernels = j.kernels.iter().map(Kernel::name).collect();
    io.hints.loads = j.inputs.iter().map(|x| x.name.clone()).collect();
    io.hints.reports = j.reports.clone();
    io.rows(&mut j.kernels, blank_kernel(), "kernel ", |io, i, k| {
        row_number(io, i)?;
        io.hint(i as u32, |h| &h.kernels)?;
        io.lit(" ")?;
        kernel(io, k)
    })?;
    io.rows(&mut j.programs, blank_program(), "rank class ", |io, i, p| {
        row_number(io, i)?;
        program(io, p)
    })?;
    let bodies: Vec<Labels> = j.programs.iter().map(|p| Labels::of(p.bodies.iter().map(|b| b.name.as_str()))).collect();
    io.rows(&mut j.stages, Stage { program: 0, params: vec![], schedule: CallSchedule::default() }, "stage ", |io, i, s| {
        row_number(io, i)?;
        let mark = io.mark();
        io.with(" program ", &mut s.program, Io::number)?;
        match bodies.get(s.program as usize) {
            Some(labels) => io.bodies = labels.clone(),
            None if io.reading() => return io.wrong(mark, "there is no such program"),
            None => io.bodies = Labels::of(std::iter::empty()),
        }
        io.with(" params ", &mut s.params, |io, p| io.list(p, 0, Io::number))?;
        schedule(io, &mut s.schedule)
    })
}

/// Every setting with its value, a line each.
pub(super) fn settings(io: &mut Io, list: &mut Vec<(String, String)>) -> Result {
    io.rows(list, (String::new(), String::new()), "setting ", |io, _, (name, value)| {
        io.name(name)?;
        io.with(" = ", value, Io::string)
    })
}

/// `[-100, 0 to 255]`.
pub(super) fn intervals(io: &mut Io, all: &mut Vec<Interval>) -> Result {
    io.list(all, Interval::ALL, |io, i| {
        io.number(&mut i.least)?;
        io.or(&mut i.most, i.least, " to ", Io::number)
    })
}

/// `[vocab=50257 padded 50304, seq=64 zigzag 4 of 8]`.
fn extents(io: &mut Io, dims: &mut Vec<Extent>) -> Result {
    io.list(dims, Extent { name: String::new(), size: 0, padded: 0, order: Order::Plain }, |io, e| {
        io.name(&mut e.name)?;
        io.with("=", &mut e.size, Io::number)?;
        io.or(&mut e.padded, e.size, " padded ", Io::number)?;
        io.or(&mut e.order, Order::Plain, " zigzag ", zig_zag)
    })
}

pub(super) fn train(io: &mut Io, t: &mut Train) -> Result {
    io.line("optimizer ")?;
    let zero = Real(0.0);
    let all = [
        ("adamw", Optimizer::AdamW { beta1: zero, beta2: zero, eps: zero }),
        ("sgd", Optimizer::Sgd { momentum: zero }),
        ("lion", Optimizer::Lion { beta1: zero, beta2: zero }),
        ("muon", Optimizer::Muon { muon: Muon::default(), beta1: zero, beta2: zero, eps: zero }),
    ];
    io.variant(&mut t.optimizer, "an optimizer", &all)?;
    match &mut t.optimizer {
        Optimizer::AdamW { beta1, beta2, eps } => {
            io.with(" beta1 ", &mut beta1.0, Io::real)?;
            io.with(" beta2 ", &mut beta2.0, Io::real)?;
            io.with(" eps ", &mut eps.0, Io::real)?;
        }
        Optimizer::Sgd { momentum } => io.with(" momentum ", &mut momentum.0, Io::real)?,
        Optimizer::Lion { beta1, beta2 } => {
            io.with(" beta1 ", &mut beta1.0, Io::real)?;
            io.with(" beta2 ", &mut beta2.0, Io::real)?;
        }
        Optimizer::Muon { muon, beta1, beta2, eps } => {
            io.with(" momentum ", &mut muon.momentum.0, Io::real)?;
            io.flag(&mut muon.nesterov, " nesterov")?;
            io.with(" scale ", &mut muon.scale, |io, s| io.variant(s, "a scale", &MuonScale::ALL))?;
            io.with(" factor ", &mut muon.factor.0, Io::real)?;
            io.with(" iterations ", &mut muon.iterations, Io::number)?;
            io.with(" beta1 ", &mut beta1.0, Io::real)?;
            io.with(" beta2 ", &mut beta2.0, Io::real)?;
            io.with(" eps ", &mut eps.0, Io::real)?;
        }
    }
    io.with(" weight_decay ", &mut t.weight_decay.0, Io::real)?;
    io.option(&mut t.clip, zero, " clip ", |io, c| io.real(&mut c.0))?;
    io.option(&mut t.loss_scale, LossScale::Constant(zero), " loss_scale ", |io, scale| {
        io.variant(scale, "a loss scale", &[("constant", LossScale::Constant(zero)), ("dynamic", LossScale::FP16)])?;
        match scale {
            LossScale::Constant(x) => io.with(" ", &mut x.0, Io::real),
            LossScale::Dynamic { initial, least, window, hysteresis } => {
                io.with(" ", &mut initial.0, Io::real)?;
                io.with(" least ", &mut least.0, Io::real)?;
                io.with(" window ", window, Io::number)?;
                io.with(" hysteresis ", hysteresis, Io::number)
            }
        }
    })?;
    io.line("schedule ")?;
    let s = &mut t.schedule;
    io.variant(&mut s.decay, "a decay", &Decay::ALL)?;
    io.with(" peak ", &mut s.peak.0, Io::real)?;
    io.with(" min ", &mut s.min.0, Io::real)?;
    io.with(" warmup ", &mut s.warmup, Io::number)?;
    io.with(" steps ", &mut s.steps, Io::number)?;
    io.option(&mut s.falling, 0, " falling ", Io::number)?;
    io.or(&mut s.constant, 0, " constant ", Io::number)
}
