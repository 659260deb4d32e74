//! Where logits are, and what is computed of them token by token.

use crate::local::role::roots;
use ir::dim::{Dim, IndexMap};
use ir::graph::{Body, Users, Value};
use ir::local::{Chunk, Local};
use ir::op::{Collective, DType, Op, Reduce};
use std::collections::{BTreeSet, HashMap};

/// Bytes of logits beyond which they are cut, where nothing is said: a chunk has about as many.
const LARGE: u64 = 256 << 20;
/// Tokens of a chunk at least, then: with fewer, each would add little to gradients of weights that go through memory.
const FEW: u64 = 1024;
/// Chunks at most, whatever sizes are: each is nodes of its own.
const MANY: u64 = 1024;

/// The nodes that are computed chunk by chunk.
pub struct LogitsRegion {
    /// In order: products that give logits, all that is computed of these, and what sums over tokens.
    pub nodes: Vec<Value>,
    /// Those of `nodes` that others read.
    pub left: BTreeSet<Value>,
    /// The values that depend on it in the forward pass.
    pub behind: BTreeSet<Value>,
    /// The chunk in which it runs.
    pub at: Chunk,
    /// The dim that is cut, and into how many parts.
    pub along: Dim,
    pub chunks: u64,
}

/// Logits that are to be cut and stay whole.
pub struct CutObstacle {
    pub logits: Value,
    /// The value that prevents the cut.
    pub by: Value,
    pub why: &'static str,
}

/// The regions of a graph, none of which reads another, and the logits that have none.
pub fn regions(local: &Local, chunks: Option<u64>) -> (Vec<LogitsRegion>, Vec<CutObstacle>) {
    let body = &local.body;
    let finder = LogitsFinder { local, users: body.users(), roots: roots(local), given: of_parameters(body) };
    let (mut out, mut uncut): (Vec<LogitsRegion>, Vec<CutObstacle>) = (vec![], vec![]);
    for v in body.values() {
        let region = match finder.region(v, chunks) {
            Ok(Some(region)) => region,
            Ok(None) => continue,
            Err((by, why)) => {
                uncut.push(CutObstacle { logits: v, by, why });
                continue;
            }
        };
        let apart = |r: &LogitsRegion| {
            !r.nodes.iter().any(|n| region.nodes.contains(n) || region.behind.contains(n)) && region.nodes.iter().all(|n| !r.behind.contains(n))
        };
        if out.iter().all(apart) {
            out.push(region);
        }
    }
    (out, uncut)
}

/// Which values follow from parameters alone.
fn of_parameters(body: &Body) -> Vec<bool> {
    let mut out: Vec<bool> = vec![];
    for v in body.values() {
        let node = &body[v];
        let fresh = matches!(node.op, Op::Input(_) | Op::Recv { .. } | Op::Uniform { .. });
        out.push(!fresh && node.args.iter().all(|a| out[a.index()]));
    }
    out
}

/// The computation of a value, with dims numbered in the order of appearance.
type ComputationKey = (Op, Vec<usize>, Vec<Vec<Dim>>, Vec<(u64, IndexMap)>, DType);

/// Per value, the first one with the same computation, which is equal.
pub fn alike(body: &Body) -> Vec<usize> {
    let mut known: HashMap<ComputationKey, usize> = HashMap::new();
    let mut out: Vec<usize> = vec![];
    for v in body.values() {
        let node = &body[v];
        let mut dims: Vec<Dim> = vec![];
        let mut number = |d: Dim| {
            let at = dims.iter().position(|e| *e == d).unwrap_or(dims.len());
            if at == dims.len() {
                dims.push(d);
            }
            Dim(at as u32)
        };
        let rows = node.args.iter().map(|a| body.dims_of(*a)).chain([&*node.ty.dims]);
        let rows = rows.map(|row| row.iter().map(|d| number(*d)).collect()).collect();
        let op = node.op.map_dims(&mut number);
        let sizes = dims.iter().map(|d| (body.dims.size(*d), body.dims[*d].index.clone())).collect();
        let computed = (op, node.args.iter().map(|a| out[a.index()]).collect(), rows, sizes, node.ty.dtype);
        out.push(match node.op {
            Op::Recv { .. } | Op::Send { .. } | Op::Limit { .. } => v.index(),
            _ => *known.entry(computed).or_insert(v.index()),
        });
    }
    out
}

struct LogitsFinder<'a> {
    local: &'a Local,
    users: Users,
    roots: BTreeSet<Value>,
    given: Vec<bool>,
}

impl LogitsFinder<'_> {
    /// The dims of a product's tokens, and the one of its words: a product in the forward pass of what follows from
    /// data with parameters.
    fn head(&self, v: Value) -> Option<(Vec<Dim>, Dim)> {
        let body = &self.local.body;
        let Op::Dot { .. } = &body[v].op else { return None };
        if !matches!(self.local.chunks[v.index()], Chunk::Forward(_)) || self.local.accumulate[v.index()] {
            return None;
        }
        let args = &body[v].args;
        let weights = (0..2).find(|k| self.given[args[*k].index()] && !self.given[args[1 - k].index()])?;
        let own =
            |k: usize| body.dims_of(v).iter().copied().filter(|d| body[args[k]].ty.has(*d) && !body[args[1 - k]].ty.has(*d)).collect::<Vec<Dim>>();
        let (words, tokens) = (own(weights), own(1 - weights));
        let all = words.len() + tokens.len() == body.dims_of(v).len();
        match words[..] {
            [words] if all && !tokens.is_empty() => Some((tokens, words)),
            _ => None,
        }
    }

    /// The dim of tokens along which logits are cut, and the number of parts: the outermost dim that has about as
    /// many.
    fn parts(&self, v: Value, tokens: &[Dim], chunks: Option<u64>) -> Option<(Dim, u64)> {
        let dims = &self.local.body.dims;
        let all = dims.elements(tokens);
        let divisors = |d: Dim| (2..=dims.size(d).min(MANY)).filter(move |n| dims.size(d).is_multiple_of(*n));
        match chunks {
            Some(most) => tokens.iter().find_map(|d| Some((*d, divisors(*d).filter(|n| *n <= most).max()?))),
            None => {
                let ty = &self.local.body[v].ty;
                let wanted = (dims.elements(&ty.dims) * ty.dtype.bytes()).div_ceil(LARGE);
                let possible = tokens.iter().flat_map(|d| divisors(*d).filter(|n| all / n >= FEW).map(|n| (*d, n)));
                let possible: Vec<(Dim, u64)> = possible.filter(|_| wanted > 1).collect();
                let enough = possible.iter().filter(|p| p.1 >= wanted).min_by_key(|p| p.1);
                enough.or_else(|| possible.iter().max_by_key(|p| p.1)).copied()
            }
        }
    }

    /// What is computed chunk by chunk of a product. None if that is no head whose logits are to be cut.
    ///
    /// # Errors
    /// The value that keeps them whole, and why.
    fn region(&self, v: Value, chunks: Option<u64>) -> Result<Option<LogitsRegion>, (Value, &'static str)> {
        let (local, body) = (self.local, &self.local.body);
        let Some((tokens, words)) = self.head(v) else { return Ok(None) };
        let Some((along, chunks)) = self.parts(v, &tokens, chunks) else { return Ok(None) };
        let Chunk::Forward(stage) = local.chunks[v.index()] else { return Ok(None) };
        let here = |w: Value| matches!(local.chunks[w.index()], Chunk::Forward(s) | Chunk::Backward(s) | Chunk::Weight(s) if s == stage);
        // `wide` are all values with tokens and words, `nodes` these and their readers.
        let (mut wide, mut open) = (BTreeSet::from([v]), vec![v]);
        let mut nodes = wide.clone();
        while let Some(x) = open.pop() {
            for (user, _) in &self.users[x.index()] {
                let is_wide = body[*user].ty.has(words) && body[*user].ty.has(along);
                if nodes.insert(*user) && is_wide {
                    wide.insert(*user);
                    open.push(*user);
                }
            }
        }
        if nodes.len() == 1 {
            return Ok(None);
        }
        // A product whose result goes on to other products or stages in the forward pass is no head.
        let goes_on = |w: &Value| {
            let on = matches!(body[*w].op, Op::Dot { .. } | Op::GroupedDot { .. } | Op::Send { .. });
            on && !wide.contains(w) && local.chunks[w.index()] == Chunk::Forward(stage)
        };
        let mut follows = vec![false; body.nodes.len()];
        for w in body.values() {
            follows[w.index()] = nodes.contains(&w) || body[w].args.iter().any(|a| follows[a.index()]);
            if follows[w.index()] && goes_on(&w) {
                return Ok(None);
            }
        }
        // Values between two such nodes belong to the region, too.
        let mut leads = vec![false; body.nodes.len()];
        for w in body.values().rev() {
            leads[w.index()] = self.users[w.index()].iter().any(|(c, _)| nodes.contains(c) || leads[c.index()]);
        }
        nodes.extend(body.values().filter(|w| follows[w.index()] && leads[w.index()]));
        // Values with tokens and words that only the region reads, such as a one-hot of labels, belong to it, too.
        for w in body.values().rev() {
            let alone = !self.users[w.index()].is_empty() && self.users[w.index()].iter().all(|(c, _)| nodes.contains(c));
            if alone && body[w].ty.has(words) && body[w].ty.has(along) && !body[w].op.is_source() {
                nodes.insert(w);
            }
        }
        let unfit = |w: &&Value| !here(**w) || self.roots.contains(w) || !self.cuts(**w, along, &nodes);
        if let Some(w) = nodes.iter().find(unfit) {
            return Err((*w, "this needs those of several tokens at once"));
        }
        let backward = nodes.iter().any(|w| local.chunks[w.index()] != Chunk::Forward(stage));
        let at = if backward { Chunk::Backward(stage) } else { Chunk::Forward(stage) };
        let behind: BTreeSet<Value> = body.values().filter(|w| follows[w.index()] && !nodes.contains(w) && local.chunks[w.index()] < at).collect();
        let movable = |w: &Value| local.chunks[w.index()] == Chunk::Forward(stage) && !matches!(body[*w].op, Op::Send { .. } | Op::Recv { .. });
        if let Some(w) = behind.iter().find(|w| backward && !movable(w)) {
            return Err((*w, "this follows from them, and not in the forward pass of this stage"));
        }
        let left: BTreeSet<Value> = nodes.iter().copied().filter(|w| self.users[w.index()].iter().any(|(c, _)| !nodes.contains(c))).collect();
        // Wide values may not be read outside, and sums over tokens may not be read inside.
        let summed = |w: &Value| !body[*w].ty.has(along) && self.users[w.index()].iter().any(|(c, _)| nodes.contains(c));
        if let Some(w) = left.iter().find(|w| wide.contains(w)).or_else(|| nodes.iter().find(|w| summed(w))) {
            return Err((*w, "this is read as a whole"));
        }
        let nodes: Vec<Value> = nodes.into_iter().collect();
        Ok(Some(LogitsRegion { nodes, left, behind, at, along, chunks }))
    }

    /// Whether a node's result for some tokens depends on those alone, or is a sum over them.
    fn cuts(&self, v: Value, along: Dim, nodes: &BTreeSet<Value>) -> bool {
        let node = &self.local.body[v];
        let has = |d: &Dim| *d == along;
        let sums = !node.ty.has(along);
        if self.local.accumulate[v.index()] && !sums {
            return false;
        }
        // Only gradients may be summed over tokens. The forward pass goes on with its own sums, such as the mean of a
        // router's choices, and a sum of all elements would become a sum of sums.
        if sums && (node.ty.dims.is_empty() || matches!(self.local.chunks[v.index()], Chunk::Forward(_))) {
            return false;
        }
        let plain = node.args.iter().all(|a| !nodes.contains(a) || self.local.body[*a].ty.has(along));
        plain
            && match &node.op {
                Op::Dot { over, .. } => sums == over.iter().any(has),
                Op::Reduce { kind, over } => sums == over.iter().any(has) && (!sums || *kind == Reduce::Sum),
                Op::Gather { dim } | Op::ArgMax { over: dim } => !sums && *dim != along,
                Op::View { from, to } => !sums && !from.iter().chain(to).any(has),
                Op::Collective { kind: Collective::AllReduce(_), stages: None, .. } => !sums,
                op => !sums && op.is_pointwise(),
            }
    }
}
