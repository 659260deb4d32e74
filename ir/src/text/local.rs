//! The text form of a rank's graph.

use super::body::{NodeAnnotations, body, entry, mesh, reason, row_number, values};
use super::io::{Io, Result};
use super::op::index;
use super::sharded::sharding;
use crate::dim::{Base, Dim, IndexMap};
use crate::graph::{Body, Value};
use crate::local::{Chunk, Local, LocalParam, LocalUpdate};
use crate::mesh::Mesh;
use crate::program::{Bucket, ParamRole, Piece};
use crate::reason::Reason;
use crate::sharded::Sharding;
use std::collections::BTreeSet;

/// One of each kind; none begins with another's name that comes before it.
const CHUNKS: [Chunk; 7] =
    [Chunk::PrologueReduce, Chunk::Prologue, Chunk::Forward(0), Chunk::Backward(0), Chunk::Weight(0), Chunk::Reduce, Chunk::Update];

/// ` stage 1`: the number of a virtual stage, unless it is the first.
fn chunk_number(io: &mut Io, chunk: &mut Chunk) -> Result {
    match chunk {
        Chunk::Forward(l) | Chunk::Backward(l) | Chunk::Weight(l) => virtual_stage(io, l),
        Chunk::Prologue | Chunk::PrologueReduce | Chunk::Reduce | Chunk::Update => Ok(()),
    }
}

pub(super) fn virtual_stage(io: &mut Io, l: &mut u32) -> Result {
    io.or(l, 0, " stage ", Io::number)
}

struct LocalAnnotations<'a> {
    chunk: Option<Chunk>,
    chunks: &'a mut Vec<Chunk>,
    accumulate: &'a mut Vec<bool>,
    source: &'a mut Vec<Option<(Value, Sharding)>>,
    reasons: &'a mut Vec<Option<Reason>>,
}

impl NodeAnnotations for LocalAnnotations<'_> {
    /// A heading `forward:` wherever the chunk changes; nodes keep their order.
    fn before(&mut self, io: &mut Io, i: usize) -> Result {
        if io.reading() {
            for mut chunk in CHUNKS {
                if io.line_if(true, chunk.name()) {
                    chunk_number(io, &mut chunk)?;
                    io.lit(":")?;
                    self.chunk = Some(chunk);
                }
            }
            return Ok(());
        }
        let mut chunk = *entry(self.chunks, i, Chunk::Forward(0));
        if self.chunk != Some(chunk) {
            self.chunk = Some(chunk);
            io.line(chunk.name())?;
            chunk_number(io, &mut chunk)?;
            io.lit(":")?;
        }
        Ok(())
    }

    fn after_type(&mut self, io: &mut Io, i: usize) -> Result {
        if io.reading() {
            match self.chunk {
                Some(chunk) => self.chunks.push(chunk),
                None => return io.wrong(io.mark(), "a node without a heading that says when it runs"),
            }
        }
        io.flag(entry(self.accumulate, i, false), " accumulate")?;
        let blank = (Value(0), Sharding::replicated(&io.mesh));
        io.option(entry(self.source, i, None), blank, " holds %", |io, (v, s)| {
            io.number(&mut v.0)?;
            io.with(" ", s, |io, s| sharding(io, s, foreign_dim))
        })
    }

    fn at_end(&mut self, io: &mut Io, i: usize) -> Result {
        reason(io, entry(self.reasons, i, None))
    }
}

/// A dim of the sharded graph by its number, `d3`: this text does not have that graph's names.
fn foreign_dim(io: &mut Io, d: &mut Dim) -> Result {
    if !io.reading() {
        return io.lit(&d.to_string());
    }
    let mark = io.mark();
    match io.word("a dim's number")?.strip_prefix('d').and_then(|n| n.parse().ok()) {
        Some(n) => *d = Dim(n),
        None => return io.wrong(mark, "expected a dim's number, `d3`"),
    }
    Ok(())
}

pub(super) fn blank_local() -> Local {
    Local {
        mesh: Mesh { subs: vec![] },
        stages: vec![],
        body: Body::default(),
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
    }
}

pub(super) fn local(io: &mut Io, l: &mut Local) -> Result {
    io.line("local")?;
    mesh(io, &mut l.mesh)?;
    io.rows(&mut l.stages, (0, vec![]), "stage ", |io, _, (stage, params)| {
        io.number(stage)?;
        io.with(" params ", params, |io, p| io.list(p, 0, Io::number))
    })?;
    io.rows(&mut l.params, LocalParam { index: vec![], states: 0 }, "slot ", |io, i, p| {
        row_number(io, i)?;
        io.with(" index ", &mut p.index, indices)?;
        io.with(" states ", &mut p.states, Io::number)
    })?;
    copied(io, &mut l.copied)?;
    io.rows(&mut l.buckets, blank_bucket(), "bucket ", bucket)?;
    let mut annotations =
        LocalAnnotations { chunk: None, chunks: &mut l.chunks, accumulate: &mut l.accumulate, source: &mut l.source, reasons: &mut l.reasons };
    body(io, &mut l.body, &mut annotations)?;
    set(io, &mut l.host, "in host ", Value(0), |io, v| io.value(v))?;
    io.rows(&mut l.reports, (0, Value(0)), "report ", |io, _, (r, v)| {
        io.number(r)?;
        io.with(" = ", v, Io::value)
    })?;
    io.rows(&mut l.updates, LocalUpdate { slot: 0, new: Value(0), states: vec![] }, "update ", |io, _, u| {
        io.number(&mut u.slot)?;
        io.with(" to ", &mut u.new, Io::value)?;
        io.with(" states ", &mut u.states, values)
    })
}

/// The slots whose parameters are copies, if there are some.
pub(super) fn copied(io: &mut Io, slots: &mut BTreeSet<u32>) -> Result {
    set(io, slots, "copied ", 0, |io, s| io.number(s))
}

/// A line for a set, unless that is empty.
fn set<T: Copy + Ord>(io: &mut Io, items: &mut BTreeSet<T>, words: &str, blank: T, form: impl FnMut(&mut Io, &mut T) -> Result) -> Result {
    let mut list: Vec<T> = items.iter().copied().collect();
    if io.line_if(!list.is_empty(), words) {
        io.list(&mut list, blank, form)?;
        *items = list.into_iter().collect();
    }
    Ok(())
}

pub(super) fn blank_bucket() -> Bucket {
    Bucket { size: 0, holds: ParamRole::Weights, pieces: vec![] }
}

/// `bucket 0 of 4096 weights [3 @0 index [..], ..]`: parameter slots and where they begin.
pub(super) fn bucket(io: &mut Io, i: usize, b: &mut Bucket) -> Result {
    row_number(io, i)?;
    io.with(" of ", &mut b.size, Io::number)?;
    io.lit(" ")?;
    io.variant(&mut b.holds, "what a bucket holds", &[("weights", ParamRole::Weights), ("copies", ParamRole::Copies)])?;
    io.lit(" ")?;
    io.list(&mut b.pieces, Piece { slot: 0, at: 0, index: vec![] }, |io, p| {
        io.number(&mut p.slot)?;
        io.with(" @", &mut p.at, Io::number)?;
        io.with(" index ", &mut p.index, indices)
    })
}

/// Index maps, one per dim.
pub(super) fn indices(io: &mut Io, maps: &mut Vec<IndexMap>) -> Result {
    io.list(maps, IndexMap { parts: vec![], base: Base::Zero }, index)
}
