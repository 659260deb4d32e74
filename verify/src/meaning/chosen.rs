//! Which elements of each dim are looked at: a few, the same in all graphs that are compared.
//!
//! An op that goes from one dim to another (a view, a slice, a concatenation) takes these with it: what is
//! looked at of the one has its counterpart in the other. So a graph on the elements chosen is a graph of its
//! own, with smaller dims, and what is the same of the whole graphs is the same of these: sums go over fewer
//! elements, everything else stays.
//!
//! Of a dim of n elements the first, the middle and the last are looked at, of a batch the first and the last;
//! where a window or a constant tells one index from the next, both of these; of a padded dim two of its
//! padding. From there the choice is closed under the ops.

use ir::dim::{Dim, Dims};
use ir::graph::{Body, Graph, Value};
use ir::op::{DType, Op, Real};
use std::collections::BTreeSet;

/// Why two things that should be alike are not.
pub struct Mismatch(pub String);

/// The most elements of one dim that are evaluated.
const MOST: usize = 96;

/// For each dim of a graph, the elements that are evaluated: positions in the order of storage, ascending.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChosenElements(Vec<BTreeSet<u64>>);

impl ChosenElements {
    /// The positions of a dim's chosen elements in the order of storage.
    pub fn places(&self, d: Dim) -> Vec<u64> {
        self.0[d.0 as usize].iter().copied().collect()
    }

    pub fn count(&self, d: Dim) -> u64 {
        self.0[d.0 as usize].len() as u64
    }

    /// The number of chosen elements that are stored before this position.
    pub fn before(&self, d: Dim, place: u64) -> u64 {
        self.0[d.0 as usize].range(..place).count() as u64
    }
}

/// The number of a graph, and one of its dims.
type GraphDim = (usize, Dim);

/// Chooses for graphs of which some dims are the same: `same` lists pairs of those.
///
/// # Errors
/// A dim of which too many elements would have to be looked at, as a text.
pub fn choose(graphs: &[&Graph], same: &[(GraphDim, GraphDim)]) -> Result<Vec<ChosenElements>, String> {
    let mut chosen: Vec<ChosenElements> = graphs.iter().map(|g| first(g)).collect();
    let ties: Vec<Vec<DimRelation>> = graphs.iter().map(|g| ties(&g.body)).collect();
    loop {
        let before: usize = chosen.iter().flat_map(|c| &c.0).map(BTreeSet::len).sum();
        for ((g, c), ties) in graphs.iter().zip(&mut chosen).zip(&ties) {
            ties.iter().try_for_each(|tie| tie.close(&g.body.dims, c))?;
            for d in g.body.dims.ids() {
                let own = &c.0[d.0 as usize];
                if own.len() > MOST {
                    let name = g.body.dims.name(d);
                    return Err(format!("views and slices lead to {} elements of `{name}`, more than {MOST}", own.len()));
                }
            }
        }
        for &((i, a), (j, b)) in same {
            let of = |k: usize, d: Dim| indices(&graphs[k].body.dims, d, &chosen[k]);
            let (x, y) = (of(i, a), of(j, b));
            add(&graphs[j].body.dims, b, &mut chosen[j], x);
            add(&graphs[i].body.dims, a, &mut chosen[i], y);
        }
        if before == chosen.iter().flat_map(|c| &c.0).map(BTreeSet::len).sum() {
            return Ok(chosen);
        }
    }
}

/// The model's indices of the chosen elements, without padding.
fn indices(dims: &Dims, d: Dim, chosen: &ChosenElements) -> Vec<u64> {
    let info = &dims[d];
    chosen.0[d.0 as usize].iter().map(|p| info.order.index(*p)).filter(|i| *i < info.logical).collect()
}

/// Adds these indices of the model, as far as they exist.
fn add(dims: &Dims, d: Dim, chosen: &mut ChosenElements, indices: impl IntoIterator<Item = u64>) {
    let info = &dims[d];
    chosen.0[d.0 as usize].extend(indices.into_iter().filter(|i| *i < info.logical).map(|i| info.order.stored(i)));
}

/// The elements that are chosen whatever the ops are.
fn first(g: &Graph) -> ChosenElements {
    let dims = &g.body.dims;
    let mut chosen = ChosenElements(vec![BTreeSet::new(); dims.list.len()]);
    for d in dims.ids() {
        let (n, of_batch) = (dims[d].logical, g.batch.is_some_and(|b| b == dims.original(d)));
        let list = if of_batch { vec![0, n.saturating_sub(1)] } else { vec![0, n / 2, n.saturating_sub(1)] };
        add(dims, d, &mut chosen, list);
        if dims.size(d) > n {
            chosen.0[d.0 as usize].extend([n, dims.size(d) - 1]);
        }
    }
    let around = |chosen: &mut ChosenElements, d: Dim, c: u64| {
        let d = dims.original(d);
        add(dims, d, chosen, [c.saturating_sub(1), c]);
    };
    for node in &g.body.nodes {
        match &node.op {
            Op::Attention(a) => {
                add(dims, dims.original(a.at), &mut chosen, [1]);
                for step in &a.scoring.steps {
                    match step.op {
                        Op::Const(Real(c)) if step.dtype == DType::I32 && c >= 0.0 => around(&mut chosen, a.at, c as u64),
                        _ => {}
                    }
                }
            }
            Op::Compare(_) => {
                let number = |v: &Value| match g.body[*v].op {
                    Op::Const(Real(c)) if c >= 0.0 && c.fract() == 0.0 => Some(c as u64),
                    _ => None,
                };
                let along = |v: &Value| match g.body[*v].op {
                    Op::Iota(d) => Some(d),
                    _ => None,
                };
                for (x, y) in [(0, 1), (1, 0)] {
                    if let (Some(d), Some(c)) = (along(&node.args[x]), number(&node.args[y])) {
                        around(&mut chosen, d, c);
                    }
                }
            }
            _ => {}
        }
    }
    chosen
}

/// How an op relates two dims: which elements of one are those of the other.
enum DimRelation {
    /// The same elements.
    Same(Dim, Dim),
    /// Elements `at ..` of the first are those of the second.
    Part(Dim, Dim, u64),
    /// One element is read or written.
    At(Dim, u64),
    /// The row-major order of the elements of both is one.
    View(Vec<Dim>, Vec<Dim>),
}

fn ties(body: &Body) -> Vec<DimRelation> {
    let mut out: Vec<DimRelation> = body.dims.ids().filter_map(|d| body.dims[d].copy_of.map(|o| DimRelation::Same(d, o))).collect();
    for node in &body.nodes {
        match &node.op {
            Op::View { from, to } => out.push(match (from.as_slice(), to.as_slice()) {
                (&[a], &[b]) => DimRelation::Same(a, b),
                _ => DimRelation::View(from.clone(), to.clone()),
            }),
            Op::Slice { from, to, at } | Op::Pad { from: to, to: from, at } => out.push(match to {
                Some(to) => DimRelation::Part(*from, *to, *at),
                None => DimRelation::At(*from, *at),
            }),
            Op::Concat { from, to } => {
                let mut at = 0;
                for f in from {
                    out.push(DimRelation::Part(*to, *f, at));
                    at += body.dims.size(*f);
                }
            }
            _ => {}
        }
    }
    out
}

impl DimRelation {
    /// Adds the elements that the relation requires on each side, given those on the other.
    fn close(&self, dims: &Dims, chosen: &mut ChosenElements) -> Result<(), String> {
        let sets = &mut chosen.0;
        match self {
            DimRelation::Same(a, b) => {
                let both: BTreeSet<u64> = sets[a.0 as usize].union(&sets[b.0 as usize]).copied().collect();
                for d in [a, b] {
                    sets[d.0 as usize] = both.iter().copied().filter(|p| *p < dims.size(*d)).collect();
                }
            }
            DimRelation::Part(whole, part, at) => {
                let inside: Vec<u64> = sets[whole.0 as usize].range(*at..at + dims.size(*part)).map(|p| p - at).collect();
                sets[part.0 as usize].extend(inside);
                let outside: Vec<u64> = sets[part.0 as usize].iter().map(|p| p + at).collect();
                sets[whole.0 as usize].extend(outside);
            }
            DimRelation::At(d, at) => {
                sets[d.0 as usize].insert(*at);
            }
            DimRelation::View(from, to) => {
                for (a, b) in [(from, to), (to, from)] {
                    for flat in flat(dims, a, chosen)? {
                        let mut rest = flat;
                        for d in b.iter().rev() {
                            chosen.0[d.0 as usize].insert(rest % dims.size(*d));
                            rest /= dims.size(*d);
                        }
                    }
                }
            }
        }
        Ok(())
    }
}

/// The row-major positions of all chosen elements of these dims together.
fn flat(dims: &Dims, list: &[Dim], chosen: &ChosenElements) -> Result<Vec<u64>, String> {
    let mut out = vec![0];
    for d in list {
        out = out.iter().flat_map(|x| chosen.0[d.0 as usize].iter().map(move |p| x * dims.size(*d) + p)).collect();
        if out.len() > MOST * MOST {
            return Err(format!("a view of `{}` leads to more than {} elements", dims.name(*d), MOST * MOST));
        }
    }
    Ok(out)
}

/// Checks that two tables of dims are the same as far as the first one goes, except for sizes of padding and orders
/// of storage.
///
/// # Errors
/// The first dim that is another one.
pub fn same_dims(model: &Dims, dims: &Dims) -> Result<(), Mismatch> {
    for d in model.ids() {
        let known = dims.list.get(d.0 as usize);
        let alike = known.is_some_and(|k| {
            let m = &model[d];
            (k.name == m.name, k.logical == m.logical, k.copy_of == m.copy_of, k.size >= m.size) == (true, true, true, true)
        });
        if !alike {
            return Err(Mismatch(format!("dim {d} of the text, `{}`, is another one", model.name(d))));
        }
    }
    Ok(())
}
