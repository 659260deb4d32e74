//! Builds the local graph of one stage, node by node.

use super::job_view::{JobView, index_map};
use super::rows;
use ir::dim::{Dim, DimInfo, Dims};
use ir::graph::{Body, Node, Origin, Phase, Type, Value};
use ir::local::{Chunk, Local, LocalParam, LocalUpdate};
use ir::mesh::{Axis, SubAxis};
use ir::op::{Attention, Collective, Op, Real, Reduce, Unary};
use ir::reason::{AvoidedBy, Reason};
use ir::sharded::Placement;
use std::collections::{BTreeSet, HashMap};

/// Builds the local graph of one stage.
pub(super) struct Emitter<'a> {
    pub(super) job: &'a JobView<'a>,
    pub(super) stage: u32,
    pub(super) out: Local,
    /// The local value of a sharded one; loose values have one per chunk that uses them.
    pub(super) map: HashMap<(Value, Chunk), Value>,
    dims: HashMap<(Dim, Vec<SubAxis>), Dim>,
    slots: HashMap<u32, u32>,
    pub(super) rows: rows::RowState,
}

impl<'a> Emitter<'a> {
    pub(super) fn new(job: &'a JobView<'a>, stage: u32) -> Emitter<'a> {
        let out = Local {
            mesh: job.s.mesh.clone(),
            stages: vec![(u64::from(stage), vec![])],
            body: Body { dims: Dims::default(), nodes: vec![] },
            params: vec![],
            buckets: vec![],
            copied: BTreeSet::new(),
            host: BTreeSet::new(),
            chunks: vec![],
            accumulate: vec![],
            source: vec![],
            reasons: vec![],
            reports: vec![],
            updates: vec![],
        };
        Emitter { job, stage, out, map: HashMap::new(), dims: HashMap::new(), slots: HashMap::new(), rows: rows::RowState::default() }
    }

    pub(super) fn run(mut self) -> Local {
        let (job, stage) = (self.job, self.stage);
        let own: Vec<u32> = (0..job.layout.virtual_stages()).filter(|g| job.layout.stage(*g) == stage).collect();
        for g in &own {
            self.pass(Phase::Forward, *g, g.checked_sub(1), Some(g + 1), &[Chunk::Forward(job.layout.chunk(*g))]);
        }
        for g in own.iter().rev() {
            let chunk = job.layout.chunk(*g);
            self.pass(Phase::Backward, *g, Some(g + 1), g.checked_sub(1), &[Chunk::Backward(chunk), Chunk::Weight(chunk)]);
        }
        // All stages emit these sums in the same order, so that their collectives match.
        for (v, members) in &job.stage_sums {
            let once = matches!(job.chunk[v.index()], Chunk::Reduce | Chunk::Update);
            if members.contains(&self.stage) || once && job.demand[v.index()].contains(&self.stage) {
                self.get(*v, if once { job.chunk[v.index()] } else { Chunk::Reduce });
            }
        }
        for (report, v) in &job.reports {
            let w = self.get(*v, Chunk::Reduce);
            self.out.reports.push((*report, w));
        }
        for u in &job.s.graph.updates {
            if !job.demand[u.new.index()].contains(&self.stage) {
                continue;
            }
            let new = self.get(u.new, Chunk::Update);
            let states: Vec<Value> = u.states.iter().map(|v| self.get(*v, Chunk::Update)).collect();
            let slot = self.slot(u.param);
            self.out.params[slot as usize].states = states.len() as u32;
            self.out.updates.push(LocalUpdate { slot, new, states });
        }
        self.out
    }

    /// The chunks of a virtual stage in a phase, between two others.
    fn pass(&mut self, phase: Phase, virtual_stage: u32, before: Option<u32>, after: Option<u32>, chunks: &[Chunk]) {
        let job = self.job;
        for message in before.map_or(vec![], |from| job.messages(phase, from, virtual_stage)) {
            self.receive(&message, chunks[0]);
        }
        let messages = after.map_or(vec![], |to| job.messages(phase, virtual_stage, to));
        let last: Vec<Option<Value>> = messages.iter().map(|m| job.last_of(&m.values, virtual_stage)).collect();
        let sent_after = |v: Option<Value>| messages.iter().zip(&last).filter(move |m| *m.1 == v).map(|m| m.0);
        for message in sent_after(None) {
            self.send(message, chunks[0]);
        }
        let here = job.of_pass.get(&(phase, virtual_stage)).map_or(&[][..], Vec::as_slice);
        for chunk in chunks {
            for v in here.iter().filter(|v| job.chunk[v.index()] == *chunk && !job.rows.joined(**v)) {
                self.emit(*v, *chunk);
                for message in sent_after(Some(*v)) {
                    self.send(message, *chunk);
                }
            }
        }
    }

    /// The local value of `v`, dense, for a user in `chunk`.
    pub(super) fn get(&mut self, v: Value, chunk: Chunk) -> Value {
        if self.job.rows.layout(v).is_some() { self.dense(v, chunk) } else { self.value(v, chunk) }
    }

    /// The local value of `v` as it is stored.
    pub(super) fn value(&mut self, v: Value, chunk: Chunk) -> Value {
        let job = self.job;
        let once = matches!(chunk, Chunk::Reduce | Chunk::Update);
        if once && let Some(members) = job.stage_sums.get(&v) {
            if let Some(w) = self.map.get(&(v, Chunk::Reduce)) {
                return *w;
            }
            let members: Vec<u64> = members.iter().map(|s| u64::from(*s)).collect();
            return self.sum_over_stages(v, members);
        }
        let own = self.chunk_of(v, chunk);
        if let Some(w) = self.map.get(&(v, own)) {
            return *w;
        }
        let here = job.stage(v).is_none_or(|s| s == self.stage);
        assert!(here, "invariant: what other stages make has been received");
        self.emit(v, own)
    }

    /// The chunk of a value that a user in `chunk` needs.
    fn chunk_of(&self, v: Value, chunk: Chunk) -> Chunk {
        let job = self.job;
        let once = matches!(chunk, Chunk::Reduce | Chunk::Update);
        match job.virtual_stage[v.index()] {
            Some(_) => job.chunk[v.index()],
            None if job.prologue[v.index()] => Chunk::PrologueReduce,
            None if matches!(job.chunk[v.index()], Chunk::Reduce | Chunk::Update) => job.chunk[v.index()],
            // A loose value of a microbatch is gone at the end of the step, so passes of its phase sum it up.
            None if once && self.sums_batches(v) => job.chunk[v.index()],
            None => chunk,
        }
    }

    /// Emits a value after all its operands. Values that wait are in a list, since recursion along a chain of values
    /// as long as the model could overflow the stack.
    fn emit(&mut self, v: Value, chunk: Chunk) -> Value {
        if let Some(w) = self.map.get(&(v, chunk)) {
            return *w;
        }
        let mut waiting = vec![(v, chunk, 0)];
        while let Some((v, chunk, had)) = waiting.last_mut() {
            let (v, chunk, operand) = (*v, *chunk, self.operands(*v, *chunk).get(*had).copied());
            *had += 1;
            match operand {
                Some(a) => match self.missing(a, chunk) {
                    Some(own) => waiting.push((a, own, 0)),
                    None => {
                        self.get(a, chunk);
                    }
                },
                None => {
                    self.emit_with_operands(v, chunk);
                    waiting.pop();
                }
            }
        }
        self.map[&(v, chunk)]
    }

    /// The operands that are emitted first, dense and in the op's own chunk.
    fn operands(&self, v: Value, chunk: Chunk) -> &'a [Value] {
        let job = self.job;
        let (node, rows) = (&job.s.graph.body[v], &job.rows);
        let elsewhere = matches!(node.op, Op::Reshard { .. }) && chunk == Chunk::PrologueReduce;
        let otherwise = elsewhere || rows.layout(v).is_some() || rows.from(&job.s.graph.body, v).is_some() || self.is_ring(v);
        if otherwise { &[] } else { &node.args }
    }

    /// The chunk of a value that is not emitted yet and needs nothing but its op.
    fn missing(&self, v: Value, chunk: Chunk) -> Option<Chunk> {
        let summed = matches!(chunk, Chunk::Reduce | Chunk::Update) && self.job.stage_sums.contains_key(&v);
        let own = self.chunk_of(v, chunk);
        let here = self.job.stage(v).is_none_or(|s| s == self.stage);
        (here && !summed && self.job.rows.layout(v).is_none() && !self.map.contains_key(&(v, own))).then_some(own)
    }

    fn emit_with_operands(&mut self, v: Value, chunk: Chunk) {
        let job = self.job;
        let node = &job.s.graph.body[v];
        let w = match (&node.op, job.rows.from(&job.s.graph.body, v)) {
            _ if job.rows.layout(v).is_some() => self.in_rows(v, chunk),
            (_, Some((layout, how))) => self.out_of_rows(v, layout, how, chunk),
            _ if self.is_ring(v) => self.ring(v, chunk),
            (Op::Reshard { kind, subs }, None) => self.reshard(v, *kind, subs, chunk),
            (op, None) => {
                let args: Vec<Value> = node.args.iter().map(|a| self.get(*a, chunk)).collect();
                // In dense form, `experts` is a dim of the operand, from which a gather takes the chosen ones.
                let op = if let Op::Combine(r) = op { Op::Gather { dim: self.dim_of(node.args[0], r.experts) } } else { self.local_op(v) };
                let ty = self.local_type(v);
                self.push(op, args, ty, chunk, &node.origin, Some(v))
            }
        };
        self.map.insert((v, chunk), w);
    }

    pub(super) fn push(&mut self, op: Op, args: Vec<Value>, ty: Type, chunk: Chunk, origin: &Origin, source: Option<Value>) -> Value {
        let w = self.out.push(Node { op, args, ty, origin: origin.clone() }, chunk);
        if let Some(v) = source {
            self.stands_for(w, v);
        }
        w
    }

    /// Says that a local value holds one of the sharded graph.
    pub(super) fn stands_for(&mut self, w: Value, v: Value) {
        self.out.accumulate[w.index()] =
            ir::fault!("partition.accumulate.lost", false, self.sums_batches(v)) && self.out.chunks[w.index()].per_microbatch();
        self.out.source[w.index()] = Some((v, self.job.s.sharding(v).clone()));
    }

    /// Whether a value is a sum over microbatches.
    fn sums_batches(&self, v: Value) -> bool {
        let s = self.job.s;
        s.mesh.of(Axis::Microbatch).any(|u| s.sharding(v)[u] == Placement::SUM)
    }

    fn slot(&mut self, param: u32) -> u32 {
        if let Some(s) = self.slots.get(&param) {
            return *s;
        }
        let s = self.job.s;
        let source = *self.job.of_params.get(&param).expect("invariant: a parameter in use has a node");
        let dims = s.graph.body.dims_of(source).to_vec();
        let index = dims.iter().map(|d| index_map(s, *d, &s.sharding(source).splits(*d), &[])).collect();
        let slot = self.out.params.len() as u32;
        self.out.params.push(LocalParam { index, states: 0 });
        self.out.stages[0].1.push(param);
        self.slots.insert(param, slot);
        slot
    }

    /// The part of a dim that a rank has when these sub-axes split it.
    pub(super) fn dim(&mut self, d: Dim, splits: &[SubAxis]) -> Dim {
        let key = (d, splits.to_vec());
        if let Some(l) = self.dims.get(&key) {
            return *l;
        }
        let s = self.job.s;
        let info = &s.graph.body.dims[d];
        let index = index_map(s, d, splits, &[]);
        let name = if splits.is_empty() { info.name.clone() } else { format!("{}/{}", info.name, s.mesh.describe(splits)) };
        let copy_of = info.copy_of.map(|o| self.dim(o, splits));
        let local = self.out.body.dims.add(DimInfo {
            name,
            size: index.len(),
            logical: info.logical,
            copy_of,
            whole: info.whole,
            index,
            global: info.size,
            order: info.order,
        });
        self.dims.insert(key, local);
        local
    }

    /// An auxiliary dim: the parts of a collective, or a piece of an index.
    pub(super) fn piece(&mut self, name: &str, size: u64) -> Dim {
        self.out.body.dims.add(DimInfo::new(name, size))
    }

    pub(super) fn dim_of(&mut self, v: Value, d: Dim) -> Dim {
        let splits = self.job.s.sharding(v).splits(d);
        self.dim(d, &splits)
    }

    pub(super) fn local_type(&mut self, v: Value) -> Type {
        let ty = self.job.s.graph.body[v].ty.clone();
        Type::new(ty.dtype, ty.dims.iter().map(|d| self.dim_of(v, *d)).collect::<Vec<_>>())
    }

    /// The op with its dims replaced by local ones: each as the result or an operand has it.
    pub(super) fn local_op(&mut self, v: Value) -> Op {
        let body = &self.job.s.graph.body;
        let node = &body[v];
        // Only faults depend on the stage.
        let stage = self.stage as f64;
        let mut at = |d: Dim| {
            let holder = std::iter::once(&v).chain(&node.args).find(|w| body[**w].ty.has(d));
            match holder {
                Some(w) => self.dim_of(*w, d),
                None => self.dim(d, &[]),
            }
        };
        match &node.op {
            Op::Param(p) => Op::Param(ir::fault!("partition.param.slot", 0, self.slot(*p))),
            Op::State(p, k) => Op::State(self.slot(*p), ir::fault!("partition.state.number", 0, *k)),
            Op::Shard { .. } | Op::Reshard { .. } | Op::Collective { .. } | Op::Recv { .. } | Op::Send { .. } => {
                unreachable!("invariant: not an op of the sharded level, or handled as a reshard")
            }
            Op::Const(x) => {
                Op::Const(ir::fault!("partition.constant.all", Real(x.0 + 1.0), ir::fault!("partition.constant.stage", Real(x.0 + stage), *x)))
            }
            Op::Unary(f) => Op::Unary(ir::fault!("partition.unary.stage", if stage > 0.0 { Unary::Neg } else { *f }, *f)),
            Op::Attention(a) => {
                let scaled = |times: f64| Real(times * a.scale.0);
                let scale = ir::fault!("partition.scale.all", scaled(2.0), ir::fault!("partition.scale.stage", scaled(1.0 + stage), a.scale));
                Op::Attention(Attention { scale, ..a.clone() }).map_dims(&mut at)
            }
            op => op.map_dims(&mut at),
        }
    }

    fn sum_over_stages(&mut self, v: Value, members: Vec<u64>) -> Value {
        let job = self.job;
        let node = &job.s.graph.body[v];
        let chunk = Chunk::Reduce;
        let ty = self.local_type(v);
        let alone = job.adds_on.get(&(v, usize::MAX));
        let terms: Vec<Value> = match alone {
            Some(on) if *on == self.stage => {
                let own = if job.virtual_stage[v.index()].is_some() { job.chunk[v.index()] } else { chunk };
                let w = match self.map.get(&(v, own)) {
                    Some(w) if own != chunk => *w,
                    _ => {
                        let args: Vec<Value> = node.args.iter().map(|a| self.get(*a, chunk)).collect();
                        match &node.op {
                            Op::Reshard { kind, subs } => self.reshard(v, *kind, subs, chunk),
                            _ => {
                                let op = self.local_op(v);
                                self.push(op, args, ty.clone(), chunk, &node.origin, Some(v))
                            }
                        }
                    }
                };
                vec![w]
            }
            Some(_) => vec![],
            None => {
                let mine: Vec<Value> = (0..node.args.len())
                    .filter(|k| ir::fault!("partition.stage_sum.twice", job.adds_on[&(v, *k)] >= self.stage, job.adds_on[&(v, *k)] == self.stage))
                    .map(|k| node.args[k])
                    .collect();
                mine.into_iter().map(|a| self.get(a, chunk)).collect()
            }
        };
        let term = match terms.as_slice() {
            [] => {
                let zero = self.push(Op::Const(Real(0.0)), vec![], Type::scalar(ty.dtype), chunk, &node.origin, None);
                if ty.dims.is_empty() { zero } else { self.push(Op::Expand, vec![zero], ty.clone(), chunk, &node.origin, None) }
            }
            [one] => *one,
            many => self.push(Op::Add, many.to_vec(), ty.clone(), chunk, &node.origin, Some(v)),
        };
        let w = if members.len() > ir::fault!("partition.stage_sum.lost", 2, 1) {
            let op = Op::Collective { kind: Collective::AllReduce(Reduce::Sum), subs: vec![], stages: Some(members), part: None };
            let w = self.push(op, vec![term], ty, chunk, &node.origin, Some(v));
            self.out.reasons[w.index()] = Some(Reason::avoided("sums what several stages have, for those that need it", AvoidedBy::OneStage));
            w
        } else {
            term
        };
        self.map.insert((v, chunk), w);
        w
    }
}
