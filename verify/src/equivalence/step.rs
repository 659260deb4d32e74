//! What nodes of a rewritten graph make of values that are joined.

use super::pieces::{Joined, JoinedPiece, SymbolicValue, as_joined, bucket, cast, source};
use super::rules::{Rules, bits, in_rank_order, of_coords, own_part};
use crate::Invariant;
use crate::job::parts_in_rank_order;
use crate::terms::digits::Digits;
use crate::terms::{TermKind, TermView};
use crate::violation::Checked;
use ir::dim::{Base, Dim, DimInfo, IndexMap};
use ir::graph::{Body, Type, Value};
use ir::mesh::SubAxis;
use ir::op::{Collective, DType, Op, Reduce};
use ir::program::{Bucket, ParamRole, Piece};

/// Evaluates a node with a joined operand, or with a joined result.
pub struct NodeEvaluator<'s, 'r> {
    pub rules: &'s mut Rules<'r>,
    pub body: &'s Body,
    pub v: Value,
    /// Whether this is the graph before, where values that lie one after the other count as one value.
    pub before: bool,
}

impl NodeEvaluator<'_, '_> {
    fn sizes(&self) -> Vec<u64> {
        self.body.dims_of(self.v).iter().map(|d| self.body.dims.size(*d)).collect()
    }

    fn held(&self, joined: Joined) -> SymbolicValue {
        joined.held(self.rules.mesh, &self.sizes())
    }

    /// A bucket of parameters or states as one value. A rank has its own part of a state.
    pub fn bucket(&mut self, b: &Bucket, op: &Op, first_slot: u32) -> Checked<(SymbolicValue, Vec<SubAxis>)> {
        let (rules, ty) = (&mut *self.rules, &self.body[self.v].ty);
        let [dim] = ty.dims[..] else { return Err(Invariant::BucketPart.breach("a bucket has one dim")) };
        let copies = b.holds == ParamRole::Copies;
        let mut joined = bucket(b, &mut |p: &Piece| {
            let weights = |rules: &mut Rules| source(rules, Op::Param(first_slot + p.slot), &p.index, DType::F32);
            Ok(match op {
                Op::Param(_) if copies => {
                    let x = weights(rules).flat();
                    cast(rules, x, ty.dtype)
                }
                Op::State(_, 0) if copies => weights(rules),
                Op::State(_, k) => source(rules, Op::State(first_slot + p.slot, k - u32::from(copies)), &p.index, DType::F32),
                _ => weights(rules),
            })
        })?;
        let info = &self.body.dims[dim];
        match op {
            Op::State(..) => {
                joined.own = self.own(&info.index, b.size)?;
            }
            _ if info.size != b.size => return Err(Invariant::BucketPart.breach("it is not all of its bucket")),
            _ => {}
        }
        let own = joined.own.clone();
        Ok((self.held(joined), own))
    }

    /// The sub-axes over which ranks have equal parts of `size` elements, in rank order.
    fn own(&self, index: &IndexMap, size: u64) -> Checked<Vec<SubAxis>> {
        let mesh = self.rules.mesh;
        let Base::Coords(form) = &index.base else { return Err(Invariant::BucketPart.breach("it is no rank's part of a bucket")) };
        let subs = in_rank_order(&form.iter().map(|f| f.0).collect::<Vec<_>>());
        let ranks: u64 = subs.iter().map(|u| mesh[*u].size).product();
        let count = size / ranks;
        if count * ranks != size || index.parts != [(count, 1)] || *form != parts_in_rank_order(mesh, &subs, count) {
            return Err(Invariant::BucketPart.breach("it is not a rank's own part of a bucket"));
        }
        Ok(subs)
    }

    /// Concatenates operands along a dim.
    pub fn concat(&mut self, args: &[SymbolicValue], from: &[Dim], to: Dim) -> Checked<SymbolicValue> {
        let at = |v: Value, d: Dim| self.body.dims_of(v).iter().position(|e| *e == d);
        let node = &self.body[self.v];
        let lead = at(self.v, to).ok_or_else(|| Invariant::JoinedOperands.breach("it lacks the dim that it makes"))?;
        let trail = node.ty.dims.len() - lead - 1;
        let mut pieces = vec![];
        for (k, x) in args.iter().enumerate() {
            // Finds each of the result's dims in the operand, whose own dim stands for the joined one.
            let places: Option<Vec<usize>> = node.ty.dims.iter().map(|d| at(node.args[k], if *d == to { from[k] } else { *d })).collect();
            let places = places.ok_or_else(|| Invariant::JoinedOperands.breach("operands have other dims"))?;
            match x {
                SymbolicValue::One(x) => {
                    let dims: Vec<Digits> = places.iter().map(|i| x.dims[*i].clone()).collect();
                    pieces.push(JoinedPiece { count: dims[lead].extent(), of: Some(TermView { dims, ..x.clone() }) });
                }
                SymbolicValue::Joined(j) if (j.lead, j.trail) == (lead, trail) && j.own.is_empty() && places.is_sorted() => {
                    pieces.extend(j.pieces.iter().cloned())
                }
                SymbolicValue::Joined(_) | SymbolicValue::Each(_) | SymbolicValue::Sums(_) => {
                    return Err(Invariant::JoinedOperands.breach("it joins parts of buckets"));
                }
            }
        }
        let joined = self.held(Joined { lead, trail, own: vec![], pieces: pieces.into() }.merged());
        let plain: Option<Vec<TermView>> = args.iter().map(|x| if let SymbolicValue::One(x) = x { Some(x.clone()) } else { None }).collect();
        let (SymbolicValue::Joined(_), Some(plain)) = (&joined, plain) else { return Ok(joined) };
        let whole = self.rules.node(self.body, self.v, &plain);
        Ok(whole.filter(|x| self.is_copied(x)).map_or(joined, SymbolicValue::One))
    }

    /// Whether a value that digits cannot describe is a copy of its own. A copy in the graph before stays one after
    /// it.
    fn is_copied(&mut self, x: &TermView) -> bool {
        if self.before {
            self.rules.copied.insert(x.clone());
        }
        self.rules.copied.contains(x)
    }

    /// A slice that digits cannot describe: of a copy if the graph before has it, else in several pieces.
    pub fn slice(&mut self, x: &TermView, from: Dim, at: u64) -> Option<SymbolicValue> {
        let (body, v) = (self.body, self.v);
        let copy = self.rules.node(body, v, std::slice::from_ref(x)).map(|x| self.rules.terms.normal(x));
        if let Some(copy) = copy.filter(|x| self.is_copied(x)) {
            return Some(SymbolicValue::One(copy));
        }
        let lead = body.dims_of(body[v].args[0]).iter().position(|d| *d == from)?;
        let count = self.sizes()[lead];
        Joined::split(self.rules.mesh, x, lead, at, count).map(|j| self.held(j))
    }

    /// The result of a node with a joined operand.
    pub fn joined(&mut self, args: &[SymbolicValue]) -> Checked<SymbolicValue> {
        let (body, mesh) = (self.body, self.rules.mesh);
        let node = &body[self.v];
        let own = node.ty.dims.as_slice();
        let no = || Err(Invariant::OpOnPieces.breach(format!("{} of values in pieces", node.op.name())));
        let sums = matches!(node.op, Op::Reduce { kind: Reduce::Sum, .. });
        let (j, a) = match (args, &node.args[..]) {
            ([SymbolicValue::Joined(j)], [a]) => (j, a),
            ([SymbolicValue::Sums(j)], _) if sums => return if own.is_empty() { self.reduce(j) } else { Ok(args[0].clone()) },
            _ => return self.piecewise(args),
        };
        let arg = body.dims_of(*a);
        let (outer, rest) = arg.split_at(j.lead);
        let (middle, inner) = rest.split_at(rest.len() - j.trail);
        let within = own.strip_prefix(outer).and_then(|own| own.strip_suffix(inner));
        match &node.op {
            Op::View { from, to } if from == middle && within == Some(to.as_slice()) => Ok(self.held(j.clone())),
            Op::Slice { from, to: Some(to), at } if middle == [*from] && j.own.is_empty() && within == Some(&[*to]) => {
                let pieces = j.cut(mesh, *at, body.dims.size(*to))?.into();
                Ok(self.held(Joined { pieces, ..j.clone() }))
            }
            Op::Shard { from, to, index } if arg == [*from] && j.own.is_empty() && own == [*to] => {
                let subs = self.own(index, j.count())?;
                Ok(self.held(Joined { own: subs, ..j.clone() }))
            }
            Op::Expand | Op::Cut | Op::StopGradient if own == arg => Ok(args[0].clone()),
            Op::Reduce { .. } if sums && (j.lead, j.trail) == (0, 0) => match own {
                [] => self.reduce(j),
                _ => Ok(SymbolicValue::Sums(j.clone())),
            },
            Op::Collective { kind, subs, stages: None, part } => {
                let subs = in_rank_order(subs);
                match kind {
                    Collective::AllReduce(_) if own == arg => {
                        if bits(&subs) & bits(&j.own) != 0 {
                            return no();
                        }
                        Ok(SymbolicValue::Joined(self.linear(j, &TermKind::Exchange { kind: *kind, subs, stages: None })))
                    }
                    Collective::ReduceScatter(r) if j.own.is_empty() && arg.split_first().is_some_and(|(p, to)| Some(*p) == *part && to == own) => {
                        let kind = TermKind::Exchange { kind: Collective::AllReduce(*r), subs: subs.clone(), stages: None };
                        let all = self.linear(j, &kind);
                        if (all.lead, all.trail) == (0, 0) {
                            return Ok(self.held(Joined { own: subs, ..all }));
                        }
                        let lead = all.lead.checked_sub(1).ok_or_else(|| Invariant::OpOnPieces.breach("ranks' parts of what is in pieces"))?;
                        let part = |p: &JoinedPiece| {
                            let x =
                                p.of.as_ref()
                                    .map(|x| own_part(mesh, &subs, x).ok_or_else(|| Invariant::DigitView.breach("parts that digits cannot say")));
                            Ok(JoinedPiece { count: p.count, of: x.transpose()? })
                        };
                        let pieces = all.pieces.iter().map(part).collect::<Checked<_>>()?;
                        Ok(self.held(Joined { lead, pieces, ..all }))
                    }
                    Collective::AllGather if own.split_first().is_some_and(|(p, from)| Some(*p) == *part && from == arg) => {
                        if j.own.is_empty() {
                            let gathered = |p: &JoinedPiece, rules: &mut Rules| {
                                let x = p.of.as_ref().map(|x| {
                                    rules.gathered(&subs, x, node.ty.dtype).ok_or_else(|| Invariant::DigitView.breach("parts that digits cannot say"))
                                });
                                Ok(JoinedPiece { count: p.count, of: x.transpose()? })
                            };
                            let pieces = j.pieces.iter().map(|p| gathered(p, self.rules)).collect::<Checked<_>>()?;
                            return Ok(self.held(Joined { lead: j.lead + 1, pieces, ..j.clone() }));
                        }
                        // All ranks have the same values of these parts, so each rank's part is what the others take
                        // it for.
                        let alike = |x: &TermView, rules: &mut Rules| (rules.varies(x.term) | of_coords(x)) & bits(&subs) == 0;
                        if j.own != subs || !j.pieces.iter().filter_map(|p| p.of.as_ref()).all(|x| alike(x, self.rules)) {
                            return no();
                        }
                        Ok(self.held(Joined { own: vec![], ..j.clone() }))
                    }
                    Collective::AllReduce(_) | Collective::ReduceScatter(_) | Collective::AllGather | Collective::AllToAll | Collective::Shift => {
                        no()
                    }
                }
            }
            _ => self.piecewise(args),
        }
    }

    /// A linear function of each element.
    pub fn linear(&mut self, j: &Joined, function: &TermKind) -> Joined {
        let dtype = self.body[self.v].ty.dtype;
        let pieces = j.pieces.iter().map(|p| JoinedPiece { count: p.count, of: p.of.as_ref().map(|x| self.rules.linear(function, x, dtype)) });
        Joined { pieces: pieces.collect(), ..j.clone() }
    }

    fn reduce(&mut self, j: &Joined) -> Checked<SymbolicValue> {
        let dtype = self.body[self.v].ty.dtype;
        let mut terms = vec![];
        for p in j.pieces.iter() {
            let x = p.of.as_ref().ok_or_else(|| Invariant::KnownSum.breach("it sums what nothing is known of"))?;
            if (self.rules.varies(x.term) | of_coords(x)) & bits(&j.own) != 0 {
                return Err(Invariant::KnownSum.breach("ranks have different values of what it sums"));
            }
            terms.push(self.rules.reduce(Reduce::Sum, x, dtype));
        }
        Ok(SymbolicValue::One(if j.own.is_empty() { self.rules.sum(terms) } else { self.rules.parts(&j.own, terms, dtype) }))
    }

    /// The result of a node of values in pieces, one piece for each.
    fn piecewise(&mut self, args: &[SymbolicValue]) -> Checked<SymbolicValue> {
        let joined = match self.in_one_dim(args) {
            Some((body, v)) => NodeEvaluator { rules: self.rules, body: &body, v, before: self.before }.pieces(args)?,
            None => self.pieces(args)?,
        };
        Ok(self.held(joined))
    }

    /// A body with this node alone over flat dims, if the node is pointwise and its operands are in pieces along
    /// several dims at once.
    fn in_one_dim(&self, args: &[SymbolicValue]) -> Option<(Body, Value)> {
        let node = &self.body[self.v];
        let dims = node.ty.dims.as_slice();
        let ends = args.iter().find_map(|x| if let SymbolicValue::Joined(j) = x { Some((j.lead, j.trail)) } else { None })?;
        let middle = dims.get(ends.0..dims.len().checked_sub(ends.1)?).filter(|m| m.len() > 1)?;
        let mut body = Body { dims: self.body.dims.clone(), nodes: vec![] };
        let size = middle.iter().map(|d| body.dims.size(*d)).product();
        let flat = body.dims.add(DimInfo::new("flat", size));
        let one = [&dims[..ends.0], &[flat], &dims[dims.len() - ends.1..]].concat();
        for (k, (x, a)) in args.iter().zip(&node.args).enumerate() {
            let Type { dtype, dims: own } = &self.body[*a].ty;
            let own = match x {
                SymbolicValue::One(_) if own.is_empty() => vec![],
                SymbolicValue::Joined(j) if own == dims && (j.lead, j.trail) == ends => one.clone(),
                _ => return None,
            };
            body.push(Op::Input(k as u32), vec![], Type::new(*dtype, own), node.origin.clone());
        }
        let args: Vec<Value> = (0..args.len() as u32).map(Value).collect();
        let v = body.push(node.op.clone(), args, Type::new(node.ty.dtype, one), node.origin.clone());
        node.op.is_pointwise().then_some((body, v))
    }

    /// The result of an op that maps the operands' elements at each position along the joined dim to the result's
    /// elements there.
    fn pieces(&mut self, args: &[SymbolicValue]) -> Checked<Joined> {
        let (body, mesh) = (self.body, self.rules.mesh);
        let node = &body[self.v];
        let maps = match &node.op {
            Op::Dot { over, .. } => over.as_slice(),
            Op::Expand => &[],
            op if op.is_pointwise() => &[],
            op => return Err(Invariant::OpOnPieces.breach(format!("{} of values in pieces", op.name()))),
        };
        let shape = args.iter().zip(&node.args).find_map(|(x, a)| match x {
            SymbolicValue::Joined(j) => Some((j, body.dims_of(*a).get(j.lead).copied().filter(|_| body.dims_of(*a).len() == j.lead + 1 + j.trail)?)),
            SymbolicValue::One(_) | SymbolicValue::Each(_) | SymbolicValue::Sums(_) => None,
        });
        let (shape, along) = shape.ok_or_else(|| Invariant::OpOnPieces.breach(format!("{} of values in pieces, in several dims", node.op.name())))?;
        let at = |dims: &[Dim]| dims.iter().position(|d| *d == along);
        let lead =
            at(&node.ty.dims).filter(|_| !maps.contains(&along)).ok_or_else(|| Invariant::OpOnPieces.breach("it sums over values in pieces"))?;
        let (mut joined, mut place) = (vec![], vec![]);
        for (x, a) in args.iter().zip(&node.args) {
            let dims = body.dims_of(*a);
            let j = match (x, at(dims)) {
                (SymbolicValue::One(_), None) => None,
                (SymbolicValue::Joined(j), Some(k)) if (j.lead, j.trail) == (k, dims.len() - k - 1) => Some(j.clone()),
                (SymbolicValue::One(x), Some(_)) if !shape.own.is_empty() => {
                    Some(as_joined(mesh, x, shape).ok_or_else(|| Invariant::BucketAligned.breach("it is of ranks' parts, and of others"))?)
                }
                (SymbolicValue::One(x), Some(k)) => Some(Joined {
                    lead: k,
                    trail: dims.len() - k - 1,
                    own: vec![],
                    pieces: [JoinedPiece { count: x.dims[k].extent(), of: Some(x.clone()) }].into(),
                }),
                (SymbolicValue::Joined(_) | SymbolicValue::Each(_) | SymbolicValue::Sums(_), _) => {
                    return Err(Invariant::OpOnPieces.breach(format!("{} of values in different dims", node.op.name())));
                }
            };
            place.push(j.is_some());
            joined.extend(j);
        }
        let mut pieces = vec![];
        for (count, of) in Joined::aligned(mesh, &joined)? {
            let mut of = of.into_iter();
            let operand = |(x, in_pieces): (&SymbolicValue, &bool)| match x {
                SymbolicValue::One(x) if !in_pieces => Some(x.clone()),
                SymbolicValue::One(_) | SymbolicValue::Joined(_) | SymbolicValue::Each(_) | SymbolicValue::Sums(_) => of.next().flatten(),
            };
            let operands: Option<Vec<TermView>> = args.iter().zip(&place).map(operand).collect();
            let of = operands
                .map(|x| self.rules.piece(body, self.v, &x, along, count).ok_or_else(|| Invariant::DigitView.breach("a view that digits cannot say")))
                .transpose()?;
            pieces.push(JoinedPiece { count, of });
        }
        Ok(Joined { lead, trail: node.ty.dims.len() - lead - 1, own: shape.own.clone(), pieces: pieces.into() })
    }
}
