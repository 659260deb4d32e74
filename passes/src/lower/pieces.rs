//! New parameters and states that are computed piece by piece, each piece in its place: over the old one, or where
//! passes read the parameter ([`crate::local::update_pieces`]).

use super::LocalLowering;
use crate::local::role::{Role, role};
use crate::lower::view::View;
use ir::dim::Dim;
use ir::graph::Value;
use ir::local::Chunk;
use ir::op::Op;
use ir::program::{BufferAddress, Space};
use std::collections::{BTreeSet, HashMap};

impl LocalLowering<'_, '_, '_> {
    /// Finds the concatenations of updates whose pieces can be computed in place: each piece has its own pointwise
    /// kernel, which is the only one to read the old piece.
    pub(super) fn find_pieced(&mut self) {
        let body = &self.local.body;
        self.pieced = body.values().filter(|c| self.is_pieced(*c)).collect();
    }

    fn is_pieced(&self, c: Value) -> bool {
        let body = &self.local.body;
        let Op::Concat { to, .. } = body[c].op else { return false };
        let outermost = body.dims_of(c).iter().take_while(|d| **d != to).all(|d| body.dims.size(*d) == 1);
        let (pieces, update) = (&body[c].args, self.local.chunks[c.index()] == Chunk::Update);
        let distinct = pieces.iter().collect::<BTreeSet<_>>().len() == pieces.len();
        if !outermost || !update || !distinct || !self.is_at_hand(c) {
            return false;
        }
        let alone = |v: Value| {
            let [g] = self.groups_of.get(&v).map_or(&[][..], Vec::as_slice) else { return None };
            let group = &self.groups[*g];
            let own = group.chunk == Chunk::Update && group.space == Space::Host && group.nodes.iter().all(|n| body[*n].op.is_pointwise());
            let (of_piece, of_all) = (body.dims_of(v), body.dims_of(c));
            let alike = of_piece.len() == of_all.len() && of_piece.iter().zip(of_all).all(|(a, b)| a == b || *b == to);
            (role(body, v) == Role::Compute && own && alike && body[v].ty.dtype == body[c].ty.dtype).then_some(group)
        };
        let mut first = 0;
        pieces.iter().all(|v| {
            let range = (first, first + body.elements(*v));
            first = range.1;
            alone(*v).is_some_and(|group| self.old_readers(c, to, range).all(|reader| group.nodes.contains(&reader)))
        })
    }

    /// Whether the parameter or state that a concatenation replaces is in the same memory and of the same type.
    fn is_at_hand(&self, c: Value) -> bool {
        let body = &self.local.body;
        let alike = |h: &Value| body[*h].ty == body[c].ty && self.local.space(*h) == self.local.space(c);
        match self.renewed(c) {
            Some(of) => self.readers.get(&of).is_some_and(|all| all.iter().all(alike)),
            None => matches!(self.users[c.index()][..], [(gather, _)] if self.gathers(gather).is_some()),
        }
    }

    /// The parameter or state that a value becomes: its slot, and the number of the state.
    fn renewed(&self, c: Value) -> Option<(u32, Option<u32>)> {
        let update = self.renews.get(&c).map(|k| &self.local.updates[*k])?;
        let states = (0..update.states.len()).filter(|k| update.states[*k] == c).map(|k| Some(k as u32));
        (update.new == c).then_some(None).into_iter().chain(states).next().map(|state| (update.slot, state))
    }

    /// The nodes of the update that read some of the given elements of the value that a concatenation along a dim
    /// replaces.
    fn old_readers(&self, c: Value, along: Dim, (from, to): (u64, u64)) -> impl Iterator<Item = Value> {
        let body = &self.local.body;
        let olds = self.renewed(c).and_then(|of| self.readers.get(&of)).into_iter().flatten();
        let read = olds.flat_map(|h| &self.users[h.index()]).filter(|(s, _)| self.local.chunks[s.index()] == Chunk::Update);
        read.flat_map(move |(s, _)| match body[*s].op {
            Op::Slice { from: dim, to: Some(piece), at } if dim == along => {
                let row = body.elements(*s) / body.dims.size(piece).max(1);
                let apart = to <= at * row || at * row + body.elements(*s) <= from;
                self.users[s.index()].iter().filter(|_| !apart).map(|(reader, _)| *reader).collect::<Vec<_>>()
            }
            _ => vec![*s],
        })
    }

    /// The place of a piece in this memory, if it is to be made there.
    pub(super) fn piece_in_place(&mut self, v: Value) -> Option<View> {
        let (c, at) = self.users[v.index()].iter().copied().find(|(c, _)| self.pieced.contains(c) && self.local.space(*c) == self.space)?;
        let whole = self.of_pieces(c)?;
        let offset = whole.place.offset + ir::fault!("lower.piece.first", 0, self.first_of(c, at));
        let body = &self.local.body;
        // Dims of one element have the strides of the whole, as in the old piece.
        let strides = body.dims_of(c).iter().map(|d| whole.stride(*d).unwrap_or(0)).collect();
        Some(View { place: BufferAddress { offset, ..whole.place }, strides, dims: body.dims_of(v).to_vec() })
    }

    /// The view of a concatenation, if its pieces were computed in place.
    pub(super) fn made_in_pieces(&mut self, c: Value, pieces: &HashMap<Value, View>) -> Option<View> {
        let whole = self.pieced.contains(&c).then(|| self.of_pieces(c))??;
        let own = |at: usize| BufferAddress { offset: whole.place.offset + self.first_of(c, at), ..whole.place.clone() };
        let args = &self.local.body[c].args;
        (0..args.len()).all(|at| pieces.get(&args[at]).is_some_and(|view| view.place == own(at))).then_some(whole)
    }

    /// Copies pieces of new parameters to the device as soon as they are computed.
    pub(super) fn bring_pieces(&mut self, made: &[Value]) {
        let (local, users) = (self.local, &self.users);
        let joined = |v: &Value| users[v.index()].iter().any(|(c, _)| self.pieced.contains(c) && local.space(*c) == Space::Device);
        let pieces: Vec<Value> = made.iter().copied().filter(joined).collect();
        let space = std::mem::replace(&mut self.space, Space::Device);
        for v in pieces {
            self.view(v);
        }
        self.space = space;
    }

    /// The view of the whole whose pieces are computed in place.
    fn of_pieces(&mut self, c: Value) -> Option<View> {
        match self.renewed(c) {
            Some(of) => self.readers.get(&of)?.iter().find_map(|h| self.views.get(h)).cloned(),
            None => self.part_in_place(c, &[]),
        }
    }

    /// The first element of an operand of a concatenation along its outermost dim.
    fn first_of(&self, c: Value, at: usize) -> u64 {
        let body = &self.local.body;
        body[c].args[..at].iter().map(|v| body.elements(*v)).sum()
    }
}
