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

/// Two things that should be alike, and are not.
pub struct Unlike(pub String);

/// More elements of one dim than these are not evaluated.
const MOST: usize = 96;

/// Of each dim of a graph the elements that are looked at: places in the order of storage, ascending.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chosen(Vec<BTreeSet<u64>>);

impl Chosen {
    /// Places in the order of storage.
    pub fn places(&self, d: Dim) -> Vec<u64> {
        self.0[d.0 as usize].iter().copied().collect()
    }

    pub fn count(&self, d: Dim) -> u64 {
        self.0[d.0 as usize].len() as u64
    }

    /// How many elements that are looked at are stored before this place.
    pub fn before(&self, d: Dim, place: u64) -> u64 {
        self.0[d.0 as usize].range(..place).count() as u64
    }
}

/// A dim of the graph of this number.
type Place = (usize, Dim);

/// Chooses for graphs of which some dims are the same: `same` lists pairs of those.
///
/// # Errors
/// A dim of which too many elements would have to be looked at, as a text.
pub fn choose(graphs: &[&Graph], same: &[(Place, Place)]) -> Result<Vec<Chosen>, String> {
    let mut chosen: Vec<Chosen> = graphs.iter().map(|g| first(g)).collect();
    let ties: Vec<Vec<Tie>> = graphs.iter().map(|g| ties(&g.body)).collect();
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

/// The model's indices of what is looked at, without padding.
fn indices(dims: &Dims, d: Dim, chosen: &Chosen) -> Vec<u64> {
    let info = &dims[d];
    chosen.0[d.0 as usize].iter().map(|p| info.order.index(*p)).filter(|i| *i < info.logical).collect()
}

/// Looks at these indices of the model's too, as far as they exist.
fn add(dims: &Dims, d: Dim, chosen: &mut Chosen, indices: impl IntoIterator<Item = u64>) {
    let info = &dims[d];
    chosen.0[d.0 as usize].extend(indices.into_iter().filter(|i| *i < info.logical).map(|i| info.order.stored(i)));
}

/// What is looked at whatever ops do.
fn first(g: &Graph) -> Chosen {
    let dims = &g.body.dims;
    let mut chosen = Chosen(vec![BTreeSet::new(); dims.list.len()]);
    for d in dims.ids() {
        let (n, of_batch) = (dims[d].logical, g.batch.is_some_and(|b| b == dims.original(d)));
        let list = if of_batch { vec![0, n.saturating_sub(1)] } else { vec![0, n / 2, n.saturating_sub(1)] };
        add(dims, d, &mut chosen, list);
        if dims.size(d) > n {
            chosen.0[d.0 as usize].extend([n, dims.size(d) - 1]);
        }
    }
    let around = |chosen: &mut Chosen, d: Dim, c: u64| {
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

/// What an op makes of dims: where elements of the one lie in the other.
enum Tie {
    /// The same elements.
    Same(Dim, Dim),
    /// Elements `at ..` of the first are those of the second.
    Part(Dim, Dim, u64),
    /// One element is read or written.
    At(Dim, u64),
    /// The row-major order of the elements of both is one.
    View(Vec<Dim>, Vec<Dim>),
}

fn ties(body: &Body) -> Vec<Tie> {
    let mut out: Vec<Tie> = body.dims.ids().filter_map(|d| body.dims[d].copy_of.map(|o| Tie::Same(d, o))).collect();
    for node in &body.nodes {
        match &node.op {
            Op::View { from, to } => out.push(match (from.as_slice(), to.as_slice()) {
                (&[a], &[b]) => Tie::Same(a, b),
                _ => Tie::View(from.clone(), to.clone()),
            }),
            Op::Slice { from, to, at } | Op::Pad { from: to, to: from, at } => out.push(match to {
                Some(to) => Tie::Part(*from, *to, *at),
                None => Tie::At(*from, *at),
            }),
            Op::Concat { from, to } => {
                let mut at = 0;
                for f in from {
                    out.push(Tie::Part(*to, *f, at));
                    at += body.dims.size(*f);
                }
            }
            _ => {}
        }
    }
    out
}

impl Tie {
    /// Chooses what it takes to go from what is chosen of one side to the other.
    fn close(&self, dims: &Dims, chosen: &mut Chosen) -> Result<(), String> {
        let sets = &mut chosen.0;
        match self {
            Tie::Same(a, b) => {
                let both: BTreeSet<u64> = sets[a.0 as usize].union(&sets[b.0 as usize]).copied().collect();
                for d in [a, b] {
                    sets[d.0 as usize] = both.iter().copied().filter(|p| *p < dims.size(*d)).collect();
                }
            }
            Tie::Part(whole, part, at) => {
                let inside: Vec<u64> = sets[whole.0 as usize].range(*at..at + dims.size(*part)).map(|p| p - at).collect();
                sets[part.0 as usize].extend(inside);
                let outside: Vec<u64> = sets[part.0 as usize].iter().map(|p| p + at).collect();
                sets[whole.0 as usize].extend(outside);
            }
            Tie::At(d, at) => {
                sets[d.0 as usize].insert(*at);
            }
            Tie::View(from, to) => {
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

/// Row-major places of all that is looked at of these dims together.
fn flat(dims: &Dims, list: &[Dim], chosen: &Chosen) -> Result<Vec<u64>, String> {
    let mut out = vec![0];
    for d in list {
        out = out.iter().flat_map(|x| chosen.0[d.0 as usize].iter().map(move |p| x * dims.size(*d) + p)).collect();
        if out.len() > MOST * MOST {
            return Err(format!("a view of `{}` leads to more than {} elements", dims.name(*d), MOST * MOST));
        }
    }
    Ok(out)
}

/// That two tables of dims are the same as far as the first one goes, but for sizes of padding and orders of
/// storage.
///
/// # Errors
/// The first dim that is another one.
pub fn same_dims(model: &Dims, dims: &Dims) -> Result<(), Unlike> {
    for d in model.ids() {
        let known = dims.list.get(d.0 as usize);
        let alike = known.is_some_and(|k| {
            let m = &model[d];
            (k.name == m.name, k.logical == m.logical, k.copy_of == m.copy_of, k.size >= m.size) == (true, true, true, true)
        });
        if !alike {
            return Err(Unlike(format!("dim {d} of the text, `{}`, is another one", model.name(d))));
        }
    }
    Ok(())
}
