//! Reshards become views, copies and collectives.

use super::emit::Emitter;
use super::job_view::index_map;
use ir::dim::Dim;
use ir::graph::{Origin, Phase, Type, Value};
use ir::local::Chunk;
use ir::mesh::{Axis, SubAxis};
use ir::op::{Collective, DType, Op, Real, Reduce, Reshard, Scalar};
use ir::sharded::{Partial, Placement};

impl Emitter<'_> {
    /// A reshard as views, copies and a collective.
    pub(super) fn reshard(&mut self, v: Value, kind: Reshard, subs: &[SubAxis], chunk: Chunk) -> Value {
        let s = self.job.s;
        let node = &s.graph.body[v];
        let arg = node.args[0];
        let batches = |u: &&SubAxis| s.mesh[**u].axis == Axis::Microbatch;
        let places: Vec<SubAxis> = subs.iter().filter(|u| !batches(u)).copied().collect();
        let completes = matches!(kind, Reshard::AllReduce | Reshard::ReduceScatter) && subs.iter().any(|u| batches(&u));
        // A sum over microbatches is complete after the last one, as the accumulated value.
        let from = if completes && chunk == Chunk::PrologueReduce { Chunk::Prologue } else { chunk };
        let mut x = self.get(arg, from);
        let reduce = match s.sharding(arg)[subs[0]] {
            Placement::Partial(Partial::Max) => ir::fault!("partition.reduce.max", Reduce::Sum, Reduce::Max),
            Placement::Partial(Partial::Sum) | Placement::Replicated | Placement::Split(_) => Reduce::Sum,
        };
        let split = |w: Value| match s.sharding(w)[subs[0]] {
            Placement::Split(d) => d,
            Placement::Replicated | Placement::Partial(_) => unreachable!("invariant: the verifier has seen this reshard"),
        };
        let parts: u64 = places.iter().map(|u| s.mesh[*u].size).product();
        // Only faults use this.
        let another = || s.mesh.ids().find(|u| !places.contains(u) && !batches(&u)).unwrap_or(places[0]);
        let reason = s.reasons[v.index()].clone();
        let origin = &node.origin;
        let result = match kind {
            Reshard::Slice => {
                let d = split(v);
                let (from, to) = (self.dim_of(arg, d), self.dim_of(v, d));
                let index = index_map(s, d, &s.sharding(v).splits(d), &ir::fault!("partition.slice.within", vec![], s.sharding(arg).splits(d)));
                let ty = self.local_type(v);
                self.push(Op::Shard { from, to, index }, vec![x], ty, chunk, origin, Some(v))
            }
            Reshard::Mask => {
                // A value that is computed once per step needs no mask over microbatches.
                let over: Vec<SubAxis> = subs
                    .iter()
                    .filter(|u| ir::fault!("partition.mask.microbatches", !batches(u), chunk.per_microbatch() || !batches(u)))
                    .copied()
                    .collect();
                if over.is_empty() {
                    return x;
                }
                let ty = self.local_type(v);
                self.mask(x, ty, &over, chunk, origin, Some(v))
            }
            Reshard::AllReduce
                if places.is_empty()
                    || ir::fault!("partition.all_reduce.lost", node.origin.phase == Phase::Forward, false)
                    || ir::fault!("partition.all_reduce.backward", node.origin.phase == Phase::Backward, false)
                    || ir::fault!("partition.all_reduce.counts", chunk == Chunk::PrologueReduce, false) =>
            {
                return x;
            }
            Reshard::AllReduce => {
                let ty = self.local_type(v);
                let op = Op::Collective {
                    kind: ir::fault!("partition.all_reduce.gather", Collective::AllGather, Collective::AllReduce(reduce)),
                    subs: ir::fault!("partition.all_reduce.group", vec![another()], places),
                    stages: None,
                    part: None,
                };
                self.push(op, vec![x], ty, chunk, origin, Some(v))
            }
            Reshard::AllGather => {
                let d = split(arg);
                let part = self.piece("part", parts);
                let mut ty = self.out.body[x].ty.clone();
                ty.dims.insert(0, part);
                let op = Op::Collective {
                    kind: ir::fault!("partition.gather.reduce", Collective::AllReduce(Reduce::Sum), Collective::AllGather),
                    subs: ir::fault!("partition.gather.group", vec![another()], ir::fault!("partition.gather.subs", vec![places[0]], places.clone())),
                    stages: None,
                    part: Some(part),
                };
                x = self.push(op, vec![x], ty, chunk, origin, None);
                self.out.reasons[x.index()] = reason.clone();
                self.merge_parts(x, v, d, part, arg, &places, chunk)
            }
            Reshard::ReduceScatter => {
                let d = split(v);
                let part = self.piece("part", parts);
                let x = self.split_parts(x, arg, d, part, v, &places, chunk);
                let mut ty = self.out.body[x].ty.clone();
                ty.dims.retain(|e| *e != part);
                let op = Op::Collective {
                    kind: Collective::ReduceScatter(ir::fault!("partition.scatter.sum", Reduce::Max, reduce)),
                    subs: places,
                    stages: None,
                    part: Some(part),
                };
                self.push(op, vec![x], ty, chunk, origin, Some(v))
            }
            Reshard::AllToAll => {
                let (gathered, scattered) = (split(arg), split(v));
                let part = self.piece("part", parts);
                let x = self.split_parts(x, arg, scattered, part, v, &places, chunk);
                let ty = self.out.body[x].ty.clone();
                let op = Op::Collective { kind: Collective::AllToAll, subs: places.clone(), stages: None, part: Some(part) };
                let x = self.push(op, vec![x], ty, chunk, origin, None);
                self.out.reasons[x.index()] = reason.clone();
                self.merge_parts(x, v, gathered, part, arg, &places, chunk)
            }
        };
        if matches!(self.out.body[result].op, Op::Collective { .. }) {
            self.out.reasons[result.index()] = reason;
        }
        result
    }

    /// The value where all coordinates are 0, zero elsewhere.
    pub(super) fn mask(&mut self, x: Value, ty: Type, subs: &[SubAxis], chunk: Chunk, origin: &Origin, source: Option<Value>) -> Value {
        let form = subs.iter().map(|u| (*u, 1)).collect();
        let at = self.push(Op::Scalar(Scalar::Linear(form)), vec![], Type::scalar(DType::I32), chunk, origin, None);
        let zero = self.push(Op::Const(Real(0.0)), vec![], Type::scalar(DType::I32), chunk, origin, None);
        let first = self.push(Op::Compare(ir::op::Compare::Eq), vec![at, zero], Type::scalar(DType::Bool), chunk, origin, None);
        let none = self.push(Op::Const(Real(0.0)), vec![], Type::scalar(ty.dtype), chunk, origin, None);
        self.push(Op::Select, vec![first, x, none], ty, chunk, origin, source)
    }

    /// The pieces of a dim's index, outermost first, if `kept` split it before and after: per run of digits, whether
    /// it counts parts (`moving` sub-axes) or local elements, and its extent.
    fn runs(&self, d: Dim, kept: &[SubAxis], moving: &[SubAxis]) -> Vec<(bool, u64)> {
        let s = self.job.s;
        let body = &s.graph.body;
        let digits = &s.digits[body.dims.original(d).0 as usize];
        let mut runs: Vec<(bool, u64)> = vec![];
        let mut rest = body.dims.size(d);
        let pieces = digits.iter().map(|u| (Some(*u), s.mesh[*u].size)).collect::<Vec<_>>();
        for (u, n) in &pieces {
            rest /= n;
            let u = u.expect("invariant: digits are sub-axes");
            if !kept.contains(&u) {
                runs.push((ir::fault!("partition.runs.moving", true, moving.contains(&u)), *n));
            }
        }
        runs.push((false, rest));
        runs.into_iter().fold(vec![], |mut out: Vec<(bool, u64)>, (m, n)| {
            match out.last_mut() {
                Some(last) if last.0 == m => last.1 *= n,
                _ => out.push((m, n)),
            }
            out
        })
    }

    /// Makes pieces of the dims that the runs describe: `(part pieces, local pieces, all in order)`.
    fn pieces(&mut self, runs: &[(bool, u64)], part: Dim, local: Dim) -> (Vec<Dim>, Vec<Dim>, Vec<Dim>) {
        let count = |m: bool| runs.iter().filter(|r| r.0 == m).count();
        let (single_part, single_local) = (count(true) == 1, count(false) == 1);
        let (mut parts, mut locals, mut order) = (vec![], vec![], vec![]);
        for (moving, n) in runs {
            let d = match moving {
                true if single_part => part,
                false if single_local => local,
                _ => self.piece("piece", *n),
            };
            if *moving {
                parts.push(d)
            } else {
                locals.push(d)
            }
            order.push(d);
        }
        (parts, locals, order)
    }

    /// Dims `from` replaced by `to`, in order.
    pub(super) fn view(&mut self, x: Value, from: &[Dim], to: &[Dim], chunk: Chunk, origin: &Origin, source: Option<Value>) -> Value {
        if from == to {
            return x;
        }
        let old = self.out.body[x].ty.clone();
        // Dims to merge must be adjacent and in order, which may take a copy.
        let mut dims: Vec<Dim> = old.dims.iter().copied().filter(|d| !from.contains(d)).collect();
        let at = old.dims.iter().position(|d| *d == from[from.len() - 1]).expect("invariant: the value has the dim");
        let at = old.dims[..at].iter().filter(|d| !from.contains(d)).count();
        dims.splice(at..at, from.iter().copied());
        let x = self.permute(x, &dims, chunk, origin);
        let mut ty = Type::new(old.dtype, dims);
        ty.dims.splice(at..at + from.len(), to.iter().copied());
        self.push(Op::View { from: from.to_vec(), to: to.to_vec() }, vec![x], ty, chunk, origin, source)
    }

    /// Another storage order: a copy, unless it only moves dims of one element.
    pub(super) fn permute(&mut self, x: Value, dims: &[Dim], chunk: Chunk, origin: &Origin) -> Value {
        let ty = self.out.body[x].ty.clone();
        if ty.dims == dims {
            return x;
        }
        self.push(Op::Expand, vec![x], Type::new(ty.dtype, dims), chunk, origin, None)
    }

    /// `[part, .., local, ..]` to the gathered dim, in the value's order.
    #[expect(clippy::too_many_arguments, reason = "the two ends of one reshard")]
    fn merge_parts(&mut self, x: Value, v: Value, d: Dim, part: Dim, arg: Value, moving: &[SubAxis], chunk: Chunk) -> Value {
        let x = self.merged(x, v, d, part, arg, moving, chunk, Some(v));
        let want = self.local_type(v);
        let origin = self.job.s.graph.body[v].origin.clone();
        self.permute(x, &want.dims, chunk, &origin)
    }

    /// `[part, .., local, ..]` to the gathered dim.
    #[expect(clippy::too_many_arguments, reason = "the two ends of one reshard")]
    pub(super) fn merged(
        &mut self,
        x: Value,
        v: Value,
        d: Dim,
        part: Dim,
        arg: Value,
        moving: &[SubAxis],
        chunk: Chunk,
        source: Option<Value>,
    ) -> Value {
        let s = self.job.s;
        let origin = s.graph.body[v].origin.clone();
        let kept: Vec<SubAxis> = ir::fault!("partition.merged.kept", s.sharding(arg).splits(d), s.sharding(v).splits(d));
        let runs = self.runs(d, &kept, moving);
        let (local, whole) = (self.dim_of(arg, d), self.dim_of(v, d));
        let (parts, locals, order) = self.pieces(&runs, part, local);
        let x = self.view(x, &[part], &parts, chunk, &origin, None);
        let x = self.view(x, &[local], &locals, chunk, &origin, None);
        self.view(x, &order, &[whole], chunk, &origin, source)
    }

    /// A dim to `[part, .., local, ..]`, the parts outermost.
    #[expect(clippy::too_many_arguments, reason = "the two ends of one reshard")]
    pub(super) fn split_parts(&mut self, x: Value, arg: Value, d: Dim, part: Dim, v: Value, moving: &[SubAxis], chunk: Chunk) -> Value {
        let s = self.job.s;
        let origin = s.graph.body[v].origin.clone();
        let kept: Vec<SubAxis> = s.sharding(arg).splits(d);
        let runs = self.runs(d, &kept, moving);
        let (whole, local) = (self.dim_of(arg, d), self.dim_of(v, d));
        let (parts, locals, order) = self.pieces(&runs, part, local);
        let mut x = self.view(x, &[whole], &order, chunk, &origin, None);
        let dims: Vec<Dim> = {
            let rest = self.out.body[x].ty.dims.iter().copied().filter(|e| !parts.contains(e));
            parts.iter().copied().chain(rest).collect()
        };
        x = self.permute(x, &dims, chunk, &origin);
        x = self.view(x, &parts, &[part], chunk, &origin, None);
        self.view(x, &locals, &[local], chunk, &origin, None)
    }
}
