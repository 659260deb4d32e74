//! Dense values that are sums over rows, or the rows at their places.
//!
//! A sum of rows by a table is, for each token or expert, the sum over its rows: the sum of the dense value over
//! experts or tokens if that is zero where there is no row. By both, each row goes to its own place, and the sum is
//! the dense value itself. What is summed may be a product of rows, and may be summed over other dims before.

use super::ops::{Names, joined, same_sum};
use super::space::all;
use super::{Count, Layout, Local, Packed, ShardView, Stage, Steps, Table, View};
use crate::terms::digits::{Digits, add};
use crate::terms::{Term, TermView};
use ir::dim::Dim;
use ir::graph::Value;
use ir::op::{Binary, DType, Op, Reduce};

/// A product of rows, summed over dims of what is in a row.
struct RowProduct {
    factors: Vec<Value>,
    over: Vec<Dim>,
}

/// A sum by token or by expert that is being recognised.
struct Sum {
    layout: Layout,
    /// The summed product, in each way in which it may be read.
    products: Vec<RowProduct>,
    /// Indices of all rows that are summed.
    row: View,
    /// The dims of the result that count tokens, experts and homes.
    kept: View,
    tokens: bool,
    experts: bool,
}

/// The type in which values of a type are summed, to be rounded once.
fn wide(dtype: DType) -> DType {
    match dtype {
        DType::Bf16 | DType::F16 => DType::F32,
        DType::F32 | DType::I32 | DType::Bool => dtype,
    }
}

impl Stage<'_, '_> {
    /// The value before conversions to types that hold all its numbers.
    fn exact(&self, a: Value) -> Value {
        let (body, node) = (&self.local.body, &self.local.body[a]);
        match (&node.op, node.args.as_slice()) {
            (Op::Cast, [x]) if node.ty.dtype == wide(body[*x].ty.dtype) || (body[*x].ty.dtype, node.ty.dtype) == (DType::Bool, DType::I32) => *x,
            _ => a,
        }
    }

    /// The products of rows that a node may compute, of one operand or two: the node itself, converted or before it
    /// was, or a product and a sum over dims of what is in a row.
    fn products(&self, x: Value) -> Vec<RowProduct> {
        let node = &self.local.body[x];
        let alone = |x: Value| RowProduct { factors: vec![x], over: vec![] };
        let mut out = vec![alone(self.exact(x))];
        out.extend((self.exact(x) != x).then(|| alone(x)));
        let over = match &node.op {
            Op::Binary(Binary::Mul) => vec![],
            Op::Dot { over, .. } | Op::Reduce { kind: Reduce::Sum, over } => over.clone(),
            _ => return out,
        };
        let factors: Vec<Value> = node.args.iter().map(|a| self.exact(*a)).collect();
        // The product is in the wide type, so it is rounded only once, at the end.
        if factors.iter().all(|a| wide(self.local.body[*a].ty.dtype) == node.ty.dtype) {
            out.push(RowProduct { factors, over });
        }
        out
    }

    /// The sum that a scatter or a grouped dot computes.
    fn sums(&self, w: Value) -> Option<Sum> {
        let chunk = self.local.chunks[w.index()];
        let node = &self.local.body[w];
        let group = |layout: Layout| all(Count::Expert, layout.group);
        let (layout, products, row, key) = match (&node.op, node.args.as_slice()) {
            (Op::Scatter { dim }, [x, t]) => {
                let (table, layout, view) = self.read_table(*t, chunk)?;
                let tokens = all(Count::Token, self.shards.home(layout).count());
                let steps = match table {
                    Table::Token => tokens,
                    Table::Expert => group(layout),
                    Table::Place => [tokens, group(layout)].concat(),
                    _ => return None,
                };
                let by = (table != Table::Expert, table != Table::Token);
                self.is_plain(*dim).then(|| (layout, self.products(*x), view, (*dim, steps, by)))?
            }
            (Op::GroupedDot { rows, experts, over, .. }, [a, b, ends]) => {
                let p = self.read_rows(*a, chunk)?;
                self.ends_of(&p, *rows, *experts, *ends, chunk)?;
                let rest = over.iter().copied().filter(|d| p.row.of(*d).is_none()).collect();
                let product = RowProduct { factors: vec![*a, *b], over: rest };
                (p.layout, vec![product], p.row, (*experts, group(p.layout), (false, true)))
            }
            _ => return None,
        };
        let (dim, steps, (tokens, experts)) = key;
        let counts = |steps: &Steps, what: fn(&Count) -> bool| steps.iter().any(|s| what(&s.0));
        let is_home = |c: &Count| matches!(c, Count::Home(_));
        let mut kept = View { dims: vec![(dim, steps)], coords: row.coords.clone() };
        for (l, steps) in &row.dims {
            let stays = node.ty.has(*l);
            // A dim of homes stays in sums by token and a dim of experts in sums by expert, while slots are always
            // summed.
            let right = (!counts(steps, is_home) || stays == tokens)
                && (!counts(steps, |c| *c == Count::Expert) || stays == experts)
                && (!counts(steps, |c| *c == Count::Slot) || !stays);
            if !right {
                return None;
            }
            if stays {
                kept.dims.push((*l, steps.clone()));
            }
        }
        Some(Sum { layout, products, row, kept, tokens, experts })
    }

    /// A dense value that is a sum over rows, or the rows at their places.
    pub(super) fn sum_of_rows(&mut self, w: Value) -> Option<Local> {
        let node = &self.local.body[w];
        // This is a sum over experts of their sums over rows.
        if let (Op::Reduce { kind: Reduce::Sum, over }, [x]) = (&node.op, node.args.as_slice()) {
            let sum = self.sums(*x)?;
            let counted = |l: &Dim| sum.kept.of(*l).is_some();
            let whole = sum.kept.dims.iter().all(|(l, steps)| steps.is_empty() || over.contains(l));
            let same = self.local.chunks[x.index()] == self.local.chunks[w.index()];
            let unrounded = self.local.body[*x].ty.dtype == node.ty.dtype && !node.ty.dtype.is_half();
            if sum.tokens || !sum.experts || !whole || !over.iter().all(counted) || !same || !unrounded {
                return None;
            }
            let kept = View { dims: vec![], coords: sum.kept.coords.clone() };
            return self.is_sum(w, Sum { kept, experts: false, ..sum });
        }
        let sum = self.sums(w)?;
        self.is_sum(w, sum)
    }

    fn is_sum(&mut self, w: Value, sum: Sum) -> Option<Local> {
        let chunk = self.local.chunks[w.index()];
        for product in &sum.products {
            let packs = product.factors.iter().map(|a| self.read_rows(*a, chunk)).collect::<Option<Vec<_>>>();
            let Some(packs) = packs else { continue };
            if packs.iter().any(|p| p.layout != sum.layout || !p.row.is_like(&sum.row)) {
                continue;
            }
            if sum.tokens && sum.experts {
                if let ([p], []) = (packs.as_slice(), product.over.as_slice())
                    && let Some(out) = self.spread(w, p, &sum)
                {
                    return Some(out);
                }
                continue;
            }
            for v in self.shards.routed.users[packs[0].of.index()].clone() {
                if let Some(names) = self.sums_to(w, v, &sum, product, &packs)
                    && let Some(held) = self.dense_result(w, v, sum.layout, &sum.kept, &names)
                {
                    return Some(self.of_pass(held, sum.layout, false, &sum.row));
                }
            }
        }
        None
    }

    /// The names of the dims of what is in a row, if `v` is that sum.
    fn sums_to(&mut self, w: Value, v: Value, sum: &Sum, product: &RowProduct, packs: &[Packed]) -> Option<Names> {
        let s = self.shards.s;
        let g = &s.graph.body[v];
        let (Op::Dot { over, .. } | Op::Reduce { kind: Reduce::Sum, over }) = &g.op else { return None };
        if g.args.len() != packs.len() || self.local.body[w].ty.dtype != g.ty.dtype && self.local.body[w].ty.dtype != wide(g.ty.dtype) {
            return None;
        }
        // An operand with all tokens and experts is zero where there is no row, and its sharding says where the rows
        // are.
        let whole = |b: &Value| self.shards.has_places(*b, sum.layout.home);
        let experts = g.args.iter().filter(|b| whole(b)).find_map(|b| self.shards.experts_of(*b, self.shards.home(sum.layout)))?;
        let lead = g.args.iter().copied().find(|b| whole(b))?;
        if self.shards.row_coords(lead, sum.layout)? != sum.row.coords {
            return None;
        }
        let home = self.shards.home(sum.layout);
        let by_token = home.tokens.iter().filter(|d| over.contains(d)).count();
        if by_token != if sum.tokens { 0 } else { home.tokens.len() } || over.contains(&experts) == sum.experts {
            return None;
        }
        if !g.args.iter().any(|b| self.shards.is_zero_elsewhere(*b, sum.layout.home)) {
            return None;
        }
        let rest: Vec<Dim> = over.iter().copied().filter(|d| *d != experts && !self.shards.home(sum.layout).tokens.contains(d)).collect();
        let orders: &[&[usize]] = if packs.len() == 2 { &[&[0, 1], &[1, 0]] } else { &[&[0]] };
        orders.iter().find_map(|order| {
            let mut names = Names::new();
            for ((p, a), k) in packs.iter().zip(&product.factors).zip(*order) {
                let b = g.args[*k];
                if self.local.body[*a].ty.dtype != s.graph.body[b].ty.dtype {
                    return None;
                }
                names = joined(names, self.fits(p, b)?)?;
            }
            same_sum(self.local, &product.over, &rest, &names).then_some(names)
        })
    }

    /// Rows at their places, zero elsewhere.
    fn spread(&mut self, w: Value, p: &Packed, sum: &Sum) -> Option<Local> {
        let dtype = self.shards.s.graph.body[p.of].ty.dtype;
        let own = self.local.body[w].ty.dtype;
        let space = self.shards.space(super::RoutedTensor::Rows(p.of, p.layout))?;
        let rows = super::Space(space.0[1..].to_vec());
        let same = own == dtype || (dtype, own) == (DType::Bool, DType::I32);
        if !same || !self.shards.is_zero_elsewhere(p.of, sum.layout.home) || !p.row.covers(&rows) {
            return None;
        }
        let home = self.shards.home(sum.layout);
        let dims = self.local.body.dims_of(w).iter().map(|l| match sum.kept.of(*l) {
            Some(steps) => self.shards.dense(p.of, home, steps),
            None => match p.rest.iter().find(|r| r.0 == *l) {
                Some(r) => Some(r.1.clone()),
                None => (self.local.body.dims.size(*l) == 1).then(Digits::default),
            },
        });
        let dims = dims.collect::<Option<_>>()?;
        let mut form = p.inside.clone();
        for (u, steps) in &p.row.coords {
            form = add(&form, &vec![(*u, self.shards.dense(p.of, home, steps)?)])?;
        }
        let x = TermView { term: Term(p.of.0), offset: 0, coords: form, dims };
        Some(self.of_pass(ShardView { x, partial: p.partial.clone(), turn: None }, p.layout, true, &p.row))
    }
}
