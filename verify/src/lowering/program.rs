//! A program on terms: the calls of one microbatch and those of no microbatch, command by command.

use super::graph::StepOutcome;
use crate::terms::memory::{BufferSlice, Memory};
use crate::terms::{Index, Term, TermKind, TermView, Terms};
use crate::violation::Checked;
use crate::{Invariant, Location, LocationPart, Violation};
use ir::dim::{Base, IndexMap, Order};
use ir::kernel::Kernel;
use ir::mesh::{Mesh, SubAxis};
use ir::op::{Channel, Collective, DType, Op, Real, Scalar};
use ir::program::{Action, BodyKind, Buffer, BufferAddress, Call, Command, Content, Job, Program, Space};
use std::collections::{BTreeMap, BTreeSet};

/// Runs each list of calls as each kind of microbatch meets it, and compares what comes out.
pub fn all(job: &Job, program: &Program, lists: impl Iterator<Item = Vec<Call>>, terms: &mut Terms, want: &StepOutcome) -> Result<(), Violation> {
    let mut seen: BTreeSet<Vec<usize>> = BTreeSet::new();
    for calls in lists.filter(|c| !c.is_empty()) {
        let last = job.microbatches.saturating_sub(1) as u32;
        let mut count = vec![0; program.bodies.len()];
        // The parts of a body run one after the other for a microbatch, so the first part stands for all.
        let calls: Vec<Call> = calls.into_iter().filter(|c| c.part == 0).collect();
        calls.iter().for_each(|c| count[c.body.index()] += 1);
        for microbatch in [0, 1.min(last), last] {
            let meets = |c: &&Call| count[c.body.index()] == 1 || c.microbatch == microbatch;
            let path: Vec<usize> = calls.iter().filter(meets).map(|c| c.body.index()).collect();
            if seen.insert(path.clone()) {
                run(job, program, &path, terms, want).map_err(|e| e.within(LocationPart::Microbatch(microbatch)))?;
            }
        }
    }
    Ok(())
}

fn run(job: &Job, program: &Program, path: &[usize], terms: &mut Terms, want: &StepOutcome) -> Result<(), Violation> {
    let mut machine = Machine::new(job, program, terms);
    for (b, body) in path.iter().map(|b| (*b, &program.bodies[*b])) {
        machine.memory.iter_mut().for_each(|m| m.enter(b));
        machine.bools.clear();
        for (k, command) in body.commands.iter().enumerate() {
            let here = || Location::from(LocationPart::Body(body.name.clone())).command(k, command);
            machine.command(command).map_err(|e| here().error(e))?;
        }
    }
    let updates = path.iter().any(|b| program.bodies[*b].kind == BodyKind::Update);
    machine.compare(want, updates).map_err(|e| e.at(LocationPart::Results))
}

struct Machine<'a> {
    job: &'a Job,
    program: &'a Program,
    terms: &'a mut Terms,
    memory: Vec<Memory>,
    /// Terms of zero by dtype, with which sums begin.
    zeros: BTreeMap<DType, Term>,
    got: StepOutcome,
    received: BTreeMap<(i64, Channel), usize>,
    /// The bool that decides whether the running command is done.
    only_if: Option<TermView>,
    /// The bools that commands of the running body were left out by: ranks read each once.
    bools: Vec<(BufferAddress, TermView)>,
    /// For each buffer, the bools that decide whether its content was made.
    made_if: BTreeMap<usize, Vec<TermView>>,
}

impl<'a> Machine<'a> {
    fn new(job: &'a Job, program: &'a Program, terms: &'a mut Terms) -> Machine<'a> {
        let mut m = Machine {
            job,
            program,
            terms,
            memory: vec![Memory::default(); program.buffers.len()],
            zeros: BTreeMap::new(),
            got: StepOutcome::default(),
            received: BTreeMap::new(),
            only_if: None,
            bools: vec![],
            made_if: BTreeMap::new(),
        };
        for (k, b) in program.buffers.iter().enumerate() {
            let (op, index) = match &b.content {
                Content::Param { slot, index } => (Op::Param(*slot), index),
                Content::State { slot, state, index } => (Op::State(*slot, *state), index),
                Content::Table { table, index } => (Op::Table(*table), index),
                Content::Accumulator | Content::Activation => continue,
            };
            m.hold(k, op, index);
        }
        m
    }

    /// Puts a part of something from outside into the whole buffer.
    fn hold(&mut self, buffer: usize, op: Op, index: &[IndexMap]) {
        let b: &Buffer = &self.program.buffers[buffer];
        let sizes: Vec<u64> = b.dims.iter().map(|d| d.1).collect();
        let maps: Vec<Index> = index.iter().map(|m| (m.clone(), 0, Order::Plain)).collect();
        let term = self.terms.plain(TermKind::Held(op, maps), vec![], sizes.clone(), b.dtype);
        self.memory[buffer].write(&self.job.mesh, &whole(b), TermView::whole(term, &sizes));
    }

    fn read(&mut self, place: &BufferAddress, dims: Vec<(u64, u64)>) -> Checked<TermView> {
        let slice = BufferSlice { offset: place.offset, coords: place.coords.clone(), dims };
        let buffer = &self.program.buffers[place.buffer.index()];
        if !self.made_if.get(&place.buffer.index()).into_iter().flatten().all(|bool| self.only_if.as_ref() == Some(bool)) {
            return Err(Invariant::ReadIfMade.breach(format!("it may read what was not made in buffer `{}`", buffer.name)));
        }
        let found = self.memory[place.buffer.index()].read(&self.job.mesh, self.terms, &slice, buffer.dtype);
        found.ok_or_else(|| Invariant::ReadValue.breach(format!("what it reads in buffer `{}` is no value, or more than one", buffer.name)))
    }

    fn dense(&mut self, place: &BufferAddress, count: u64) -> Checked<TermView> {
        self.read(place, vec![(count, 1)])
    }

    fn write(&mut self, place: &BufferAddress, dims: Vec<(u64, u64)>, value: TermView) {
        let slice = BufferSlice { offset: place.offset, coords: place.coords.clone(), dims };
        self.memory[place.buffer.index()].write(&self.job.mesh, &slice, value);
        if let Some(bool) = &self.only_if {
            let known = self.made_if.entry(place.buffer.index()).or_default();
            if !known.contains(bool) {
                known.push(bool.clone());
            }
        }
    }

    /// Runs a command, which is left out where its predicate is false. What it adds to a sum is then zero. What it
    /// writes is visible only to commands with the same predicate.
    fn command(&mut self, command: &Command) -> Checked {
        self.only_if = None;
        let Some(place) = &command.predicate else { return self.execute(&command.action) };
        let bool = self.read(place, vec![])?;
        let bool = self.terms.normal(bool);
        match self.bools.iter().find(|b| b.0 == *place) {
            Some((_, known)) if *known != bool => return Err(Invariant::ReadValue.breach("its bool is another one than before in this call")),
            Some(_) => {}
            None => self.bools.push((place.clone(), bool.clone())),
        }
        match &command.action {
            Action::Launch { kernel, .. } if self.job.kernels[kernel.index()].on == Space::Device => {}
            Action::Copy { .. } => {}
            Action::Collective { group, .. } => {
                let group = &self.program.groups[group.index()];
                if group.stages.as_ref().is_some_and(|s| s.len() > 1) || !self.is_common(&bool, &group.subs) {
                    return Err(Invariant::LeftOutByAll.breach("nothing shows that all members leave it out, or none"));
                }
            }
            _ => return Err(Invariant::MayBeLeftOut.breach("it may be left out")),
        }
        self.only_if = Some(bool);
        self.execute(&command.action)
    }

    /// Whether ranks that differ along these axes alone have the same value: it is computed of what a collective gave
    /// all of them.
    fn is_common(&self, x: &TermView, subs: &[SubAxis]) -> bool {
        let key = self.terms.key(x.term);
        let mesh = &self.job.mesh;
        x.coords.is_empty()
            && match &key.kind {
                TermKind::Exchange { kind: Collective::AllReduce(_), subs: over, stages: None } => {
                    subs.iter().all(|u| mesh[*u].size == 1 || over.contains(u))
                }
                TermKind::Op(Op::Const(_) | Op::Compare(_) | Op::Binary(_) | Op::Unary(_) | Op::Select | Op::Cast, _) | TermKind::Stored => {
                    key.args.iter().all(|a| self.is_common(a, subs))
                }
                _ => false,
            }
    }

    fn execute(&mut self, action: &Action) -> Checked {
        match action {
            Action::Launch { kernel, args, scalars } => {
                let job: &Job = self.job;
                self.launch(&job.kernels[kernel.index()], args, scalars)
            }
            Action::Collective { kind, group, dtype, count, src, dst } => {
                let group = &self.program.groups[group.index()];
                let stages = group.stages.as_ref().map_or(1, |s| s.len() as u64);
                let members = stages * group.subs.iter().map(|u| self.job.mesh[*u].size).product::<u64>();
                let (give, get) = kind.elements(*count, members);
                let x = self.dense(src, give)?;
                let kind = TermKind::Exchange { kind: *kind, subs: group.subs.clone(), stages: group.stages.clone() };
                let value = TermView::whole(self.terms.plain(kind, vec![x], vec![get], *dtype), &[get]);
                if let Some(stages) = group.stages.as_ref().filter(|s| s.len() > 1) {
                    self.got.met.entry(stages.clone()).or_default().push(value.clone());
                }
                self.write(dst, vec![(get, 1)], value);
                Ok(())
            }
            Action::Send { hops, channel, count, src, .. } => {
                let x = self.dense(src, *count)?;
                self.got.sent.entry((*hops, *channel)).or_default().push(x);
                Ok(())
            }
            Action::Recv { hops, channel, dtype, count, dst } => {
                let number = self.received.entry((*hops, *channel)).or_insert(0);
                *number += 1;
                let kind = TermKind::Message { hops: *hops, channel: *channel, number: *number - 1 };
                let term = self.terms.plain(kind, vec![], vec![*count], *dtype);
                self.write(dst, vec![(*count, 1)], TermView::whole(term, &[*count]));
                Ok(())
            }
            Action::Copy { count, src, dst, .. } => {
                let x = self.dense(src, *count)?;
                self.write(dst, vec![(*count, 1)], x);
                Ok(())
            }
            Action::Fill { buffer, value } => {
                let b = &self.program.buffers[buffer.index()];
                let term = self.terms.plain(TermKind::Fill(*value), vec![], vec![], b.dtype);
                if *value == Real(0.0) {
                    self.zeros.insert(b.dtype, term);
                }
                let slice = whole(b);
                let dims = slice.dims.iter().map(|d| crate::terms::digits::Digits::new([(d.0, 0)])).collect();
                self.memory[buffer.index()].write(&self.job.mesh, &slice, TermView { term, offset: 0, coords: vec![], dims });
                Ok(())
            }
            Action::Load { input, dst, index } => {
                self.hold(dst.index(), Op::Input(*input), index);
                Ok(())
            }
            Action::Limit { src, most } => {
                let x = self.dense(src, 1)?;
                self.got.held.insert((*most, x));
                Ok(())
            }
            Action::Report { report, src } => {
                let x = self.dense(src, 1)?;
                self.got.reports.insert(*report, x);
                Ok(())
            }
            Action::Record { .. } | Action::Wait { .. } => Ok(()),
        }
    }

    fn launch(&mut self, kernel: &Kernel, args: &[BufferAddress], scalars: &[Scalar]) -> Checked {
        let body = &kernel.body;
        let base = |b: &Base| match b {
            Base::Slot(i) => match scalars.get(*i as usize)? {
                Scalar::Linear(form) => Some(Base::Coords(form.clone())),
                _ => None,
            },
            other => Some(other.clone()),
        };
        let scalar = |s: &Scalar| match s {
            Scalar::Slot(i) => scalars.get(*i as usize).cloned(),
            _ => None,
        };
        let mesh: &Mesh = &self.job.mesh;
        let mut values: Vec<TermView> = Vec::with_capacity(body.nodes.len());
        for v in body.values() {
            let node = &body[v];
            let value = match &node.op {
                Op::Input(i) => {
                    let operand = &kernel.inputs[*i as usize];
                    let dims = operand.ty.dims.iter().zip(&operand.strides).map(|(d, s)| (body.dims.size(*d), *s)).collect();
                    self.read(&args[*i as usize], dims)?
                }
                _ => {
                    let operands: Vec<TermView> = node.args.iter().map(|a| values[a.index()].clone()).collect();
                    let found = self.terms.node(mesh, body, v, &operands, &base, &scalar);
                    found.ok_or_else(|| Invariant::KernelMeaning.breach(format!("{v} ({}) is nothing that terms can say", node.op.name())))?
                }
            };
            values.push(value);
        }
        for (output, place) in kernel.outputs.iter().zip(&args[kernel.inputs.len()..]) {
            let dims: Vec<(u64, u64)> = body.dims_of(output.value).iter().zip(&output.strides).map(|(d, s)| (body.dims.size(*d), *s)).collect();
            let value = values[output.value.index()].clone();
            if !output.accumulate {
                self.write(place, dims, value);
                continue;
            }
            let buffer = &self.program.buffers[place.buffer.index()];
            let slice = BufferSlice { offset: place.offset, coords: place.coords.clone(), dims };
            let zero = self.zeros.get(&buffer.dtype).copied().unwrap_or(Term(u32::MAX));
            let value = match &self.only_if {
                // The sum itself is there only if this bool is true, so its terms need no mask.
                Some(bool) if self.made_if.get(&place.buffer.index()).is_some_and(|made| made == std::slice::from_ref(bool)) => value,
                Some(bool) => {
                    let sizes: Vec<u64> = slice.dims.iter().map(|d| d.0).collect();
                    self.terms.value_or_zero(bool, value, &sizes, buffer.dtype)
                }
                None => value,
            };
            if !self.memory[place.buffer.index()].add(&slice, value, zero) {
                return Err(Invariant::AddedSum.breach(format!("it adds to buffer `{}`, which holds no sum", buffer.name)));
            }
        }
        Ok(())
    }

    fn compare(mut self, want: &StepOutcome, updates: bool) -> Checked {
        let got = std::mem::take(&mut self.got);
        for (report, x) in &want.reports {
            let known = self.job.reports.get(*report as usize);
            let name = known.ok_or_else(|| Invariant::Reported.breach(format!("there is no report {report}")))?;
            let got = got.reports.get(report).ok_or_else(|| Invariant::Reported.breach(format!("`{name}` is not reported")))?;
            self.same(Invariant::ReportValue, &format!("report `{name}`"), x, got)?;
        }
        if got.held != want.held {
            return Err(Invariant::LimitValues.breach("it holds other numbers to limits than its graph"));
        }
        if got.sent.keys().ne(want.sent.keys()) {
            return Err(Invariant::SentChannels.breach("it sends on other channels than its graph"));
        }
        for ((hops, channel), list) in &want.sent {
            self.lists(
                [Invariant::SentChannels, Invariant::SentValues],
                &format!("what it sends {hops} stages on, on {channel}"),
                list,
                &got.sent[&(*hops, *channel)],
            )?;
        }
        if got.met.keys().ne(want.met.keys()) {
            return Err(Invariant::MetStages.breach("it exchanges with other stages than its graph"));
        }
        for (stages, list) in &want.met {
            self.lists([Invariant::MetStages, Invariant::MetValues], &format!("what it exchanges with stages {stages:?}"), list, &got.met[stages])?;
        }
        for (k, b) in self.program.buffers.iter().enumerate() {
            let (name, wanted, op, index) = match &b.content {
                Content::Param { slot, index } => (&b.name, want.params.get(slot), Op::Param(*slot), index),
                Content::State { slot, state, index } => (&b.name, want.states.get(&(*slot, *state)), Op::State(*slot, *state), index),
                Content::Table { .. } | Content::Accumulator | Content::Activation => continue,
            };
            let sizes: Vec<u64> = b.dims.iter().map(|d| d.1).collect();
            let old = || TermKind::Held(op, index.iter().map(|m| (m.clone(), 0, Order::Plain)).collect());
            let wanted = match wanted.filter(|_| updates) {
                Some(x) => x.clone(),
                None => TermView::whole(self.terms.plain(old(), vec![], sizes.clone(), b.dtype), &sizes).flat(),
            };
            let found = self.memory[k].read(&self.job.mesh, self.terms, &whole(b), b.dtype).filter(|_| !self.made_if.contains_key(&k));
            let found = found.ok_or_else(|| Invariant::RestValue.breach(format!("`{name}` is no value, or more than one")))?;
            self.same(Invariant::FinalValue, &format!("`{name}`"), &wanted, &found.flat())?;
        }
        Ok(())
    }

    fn lists(&mut self, [as_many, same]: [Invariant; 2], what: &str, want: &[TermView], got: &[TermView]) -> Checked {
        if want.len() != got.len() {
            return Err(as_many.breach(format!("{what} are {} values, in its graph {}", got.len(), want.len())));
        }
        want.iter().zip(got).enumerate().try_for_each(|(k, (w, g))| self.same(same, &format!("{what}, value {k},"), w, g))
    }

    fn same(&mut self, invariant: Invariant, what: &str, want: &TermView, got: &TermView) -> Checked {
        let (want, got) = (self.terms.normal(want.clone()), self.terms.normal(got.clone()));
        if want == got {
            return Ok(());
        }
        Err(invariant.breach(format!("{what} is not what its graph says: {}", self.terms.difference(&want, &got))))
    }
}

/// The whole of a buffer, dim by dim.
fn whole(b: &Buffer) -> BufferSlice {
    let mut stride = 1;
    let mut dims: Vec<(u64, u64)> = vec![];
    for (_, n) in b.dims.iter().rev() {
        dims.push((*n, stride));
        stride *= n;
    }
    dims.reverse();
    BufferSlice { offset: 0, coords: vec![], dims }
}
