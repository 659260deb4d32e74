//! The text form of the sharded graph.

use super::body::{NodeAnnotations, entry, mesh, reason};
use super::graph::graph_with;
use super::io::{Io, Result};
use super::op::dim;
use crate::dim::Dim;
use crate::graph::Graph;
use crate::mesh::{Mesh, SubAxis};
use crate::reason::Reason;
use crate::sharded::{Digits, Partial, Placement, Sharded, Sharding};

struct ShardingAnnotations<'a> {
    shardings: &'a mut Vec<Sharding>,
    reasons: &'a mut Vec<Option<Reason>>,
}

impl NodeAnnotations for ShardingAnnotations<'_> {
    fn after_type(&mut self, io: &mut Io, i: usize) -> Result {
        let blank = Sharding::replicated(&io.mesh);
        io.with(" ", entry(self.shardings, i, blank), |io, s| sharding(io, s, dim))
    }

    fn at_end(&mut self, io: &mut Io, i: usize) -> Result {
        reason(io, entry(self.reasons, i, None))
    }
}

pub(super) fn blank_sharded() -> Sharded {
    Sharded { graph: Graph::default(), mesh: Mesh { subs: vec![] }, digits: vec![], shardings: vec![], reasons: vec![] }
}

pub(super) fn sharded(io: &mut Io, s: &mut Sharded) -> Result {
    io.line("sharded")?;
    mesh(io, &mut s.mesh)?;
    io.line("graph ")?;
    graph_with(io, &mut s.graph, &mut ShardingAnnotations { shardings: &mut s.shardings, reasons: &mut s.reasons })?;
    digits(io, &mut s.digits)
}

/// For each dim that is ever split, its digits: `digits batch = dp*cp`.
fn digits(io: &mut Io, digits: &mut Digits) -> Result {
    let mut count = digits.len();
    io.line("digits:")?;
    let dims = io.dims.len();
    let mark = io.mark();
    io.or(&mut count, dims, " of ", Io::number)?;
    if io.reading() {
        if count > dims {
            return io.wrong(mark, "more than there are dims");
        }
        digits.resize(count, vec![]);
    }
    let mut rows: Vec<(Dim, Vec<SubAxis>)> = digits.iter().enumerate().filter(|d| !d.1.is_empty()).map(|(i, d)| (Dim(i as u32), d.clone())).collect();
    let mut at = 0;
    io.rows(&mut rows, (Dim(0), vec![]), "  ", |io, _, (d, subs)| {
        at = io.mark();
        dim(io, d)?;
        io.with(": ", subs, Io::subs)
    })?;
    for (d, subs) in rows {
        match digits.get_mut(d.0 as usize) {
            Some(slot) => *slot = subs,
            None => return io.wrong(at, "a dim that has no digits"),
        }
    }
    Ok(())
}

/// `{batch:dp, heads:tp.0, sum(tp.1)}`: split dims and partial axes; replicated on the others. `name` is the form of a dim.
pub(super) fn sharding(io: &mut Io, s: &mut Sharding, name: fn(&mut Io, &mut Dim) -> Result) -> Result {
    let mut items: Vec<(Placement, Vec<SubAxis>)> = vec![];
    for (u, p) in s.0.iter().enumerate().filter(|x| *x.1 != Placement::Replicated) {
        match items.iter_mut().find(|(q, _)| q == p) {
            Some((_, subs)) => subs.push(SubAxis(u as u8)),
            None => items.push((*p, vec![SubAxis(u as u8)])),
        }
    }
    io.lit("{")?;
    for i in 0.. {
        if io.reading() {
            if io.opt(false, "}") {
                break;
            }
            items.push((Placement::Replicated, vec![]));
        } else if i == items.len() {
            io.lit("}")?;
            break;
        }
        if i > 0 {
            io.lit(", ")?;
        }
        let (placement, subs) = &mut items[i];
        for (partial, words) in [(Partial::Sum, "sum("), (Partial::Max, "max(")] {
            if io.opt(*placement == Placement::Partial(partial), words) {
                *placement = Placement::Partial(partial);
            }
        }
        if placement.is_partial() {
            io.subs(subs)?;
            io.lit(")")?;
        } else {
            let mut d = if let Placement::Split(d) = placement { *d } else { Dim(0) };
            name(io, &mut d)?;
            *placement = Placement::Split(d);
            io.with(":", subs, Io::subs)?;
        }
    }
    if !io.reading() {
        return Ok(());
    }
    *s = Sharding::replicated(&io.mesh);
    for (p, subs) in items {
        for u in subs {
            match s.0.get_mut(usize::from(u.0)) {
                Some(slot) => *slot = p,
                None => return io.wrong(io.mark(), "an axis that the mesh lacks"),
            }
        }
    }
    Ok(())
}
