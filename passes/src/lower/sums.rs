//! Sums over microbatches: which values are, where they are made, and that they begin at zero.

use super::LocalLowering;
use crate::local::role::{Role, role};
use crate::lower::kernels::Target;
use crate::lower::view::View;
use ir::graph::{Origin, Phase, Value};
use ir::local::Chunk;
use ir::mesh::Axis;
use ir::op::{Op, Real};
use ir::program::{Action, Arena, BodyKind, BufferAddress, BufferId, Command, Content, ProgramBody, Stream};
use std::collections::BTreeSet;

impl LocalLowering<'_, '_, '_> {
    /// Whether a chunk that runs at another rhythm reads the value, and sums it over microbatches.
    pub(super) fn is_summed(&self, v: Value) -> bool {
        let chunk = self.local.chunks[v.index()];
        self.local.accumulate[v.index()]
            && (self.users[v.index()].iter().any(|(c, _)| self.crosses(chunk, self.local.chunks[c.index()])) || self.is_root(v))
    }

    pub(super) fn crosses(&self, from: Chunk, to: Chunk) -> bool {
        from != to && !(from.is_pass() && to.is_pass())
    }

    pub(super) fn is_root(&self, v: Value) -> bool {
        self.local.reports.iter().any(|r| r.1 == v)
    }

    /// A concatenation of nothing but what the microbatches leave, each value in storage order, needs no copy: they are made in its buffer. So
    /// are values of its own chunk that nothing else reads.
    pub(super) fn find_homes(&mut self) {
        let body = &self.local.body;
        let results: BTreeSet<Value> = self.local.updates.iter().flat_map(|u| u.states.iter().copied().chain([u.new])).collect();
        for group in &self.groups {
            let [c] = group.nodes[..] else { continue };
            if !matches!(body[c].op, Op::Concat { .. }) || body.dims_of(c).len() != 1 || self.pieced.contains(&c) {
                continue;
            }
            let chunk = self.local.chunks[c.index()];
            let mut at = 0;
            // `found` holds values with their offsets, `makers` the chunks that first write there.
            let (mut found, mut makers): (Vec<(Value, u64)>, Vec<Chunk>) = (vec![], vec![]);
            for a in &body[c].args {
                let whole = matches!(&body[*a].op, Op::View { from, .. } if *from == body.dims_of(body[*a].args[0]));
                let x = if whole { body[*a].args[0] } else { *a };
                // A pointwise function of a sum is computed over the sum.
                let alone = |v: Value| self.users[v.index()].len() == 1 && !self.is_root(v) && !results.contains(&v);
                let sum = body[x].args.iter().copied().find(|y| {
                    let alike = body[*y].ty == body[x].ty && alone(x) && alone(*y) && body[x].op.is_pointwise();
                    alike && self.local.chunks[x.index()] == chunk && chunk != self.local.chunks[y.index()] && self.is_left(*y)
                });
                let first = sum.unwrap_or(x);
                let maker = self.local.chunks[first.index()];
                let fits = role(body, first) == Role::Compute && alone(first) && (self.is_left(first) || maker == chunk);
                if fits && found.iter().all(|f| f.0 != first) && !self.homes.contains_key(&first) {
                    found.extend(sum.into_iter().chain([x]).map(|v| (v, at)));
                    makers.push(maker);
                }
                at += body.elements(*a);
            }
            // One body must write, or add to, the whole buffer.
            if makers.len() == body[c].args.len() && makers.iter().all(|m| *m == makers[0]) {
                self.homes.extend(found.into_iter().map(|(x, at)| (x, (c, at))));
            }
        }
    }

    /// Whether a value is available after the microbatches: as their sum, or as that of the only one.
    pub(super) fn is_left(&self, v: Value) -> bool {
        self.is_summed(v) || self.local.chunks[v.index()].per_microbatch() && self.local.mesh.size(Axis::Microbatch) == 1
    }

    /// A buffer for a value that is left.
    pub(super) fn sum_buffer(&mut self, v: Value) -> View {
        let order = self.local.body[v].ty.dims.clone();
        let Some((c, at)) = self.homes.get(&v).copied() else { return self.buffer(v, &order, Content::Accumulator) };
        let whole = match self.joined.get(&c) {
            Some(view) => view.clone(),
            None => {
                let dims = self.local.body[c].ty.dims.clone();
                let view = self.buffer(c, &dims, Content::Accumulator);
                self.joined.insert(c, view.clone());
                view
            }
        };
        let place = BufferAddress { offset: whole.place.offset + ir::fault!("lower.sums.place", 0, at), ..whole.place };
        View { place, strides: self.local.body.dims.strides(&order), dims: order }
    }

    /// Every sum starts at zero.
    pub(super) fn zero_sums(&mut self) {
        let mut ids: Vec<(BufferId, Chunk)> = self.sums.iter().map(|(v, s)| (s.place.buffer, self.local.chunks[v.index()])).collect();
        ids.sort_unstable();
        // Several sums may be in one buffer, which is filled once.
        ids.dedup_by_key(|i| i.0);
        let fills: Vec<Command> = ids
            .into_iter()
            .map(|(buffer, _)| Command {
                stream: Stream::Compute,
                action: Action::Fill { buffer, value: Real(ir::fault!("lower.sums.start", 1.0, 0.0)) },
                predicate: None,
                origin: Origin::new(Phase::Forward),
                reason: None,
            })
            .collect();
        for f in &fills {
            if let Action::Fill { buffer, .. } = &f.action {
                self.touched.remove(buffer);
                self.l.program.buffers[buffer.index()].arena = Arena::Persistent;
            }
        }
        if !fills.is_empty() {
            self.l.program.bodies.push(ProgramBody {
                name: format!("{}zero", self.names.prefix),
                kind: BodyKind::Prologue,
                commands: fills,
                cuts: vec![],
            });
        }
    }

    /// Where a term is added to its sum. The first term of a microbatch overwrites the buffer, unless the sum starts
    /// at zero.
    pub(super) fn added_to(&mut self, term: Value, sum: Value) -> Target {
        let summed = self.is_summed(sum);
        let known = if summed { self.sums.get(&sum) } else { self.views.get(&sum) }.cloned();
        let accumulate = ir::fault!("lower.added.first", summed, summed || known.is_some());
        let view = known.unwrap_or_else(|| {
            let left = self.users[sum.index()].iter().any(|(c, _)| self.crosses(self.chunk, self.local.chunks[c.index()]));
            let order = self.local.body[sum].ty.dims.clone();
            if left || self.homes.contains_key(&sum) { self.sum_buffer(sum) } else { self.buffer(sum, &order, Content::Activation) }
        });
        let all = if summed { &mut self.sums } else { &mut self.views };
        all.insert(sum, view.clone());
        Target { value: term, view, accumulate }
    }
}
