//! What is only added up: each term adds to the buffer of their sum, and has none of its own. So the gradient of a
//! head's weights, whose terms are those of chunks of tokens, takes the memory of one. So does what passes of rows of
//! experts add up, and a pass's rows are of no more use when the next begins.
//!
//! A term that a bool chooses (`select(bool, term, 0)`) is added where that is true; else nothing is added, and the
//! sum is as right.

use crate::local::role::{Role, role, roots};
use ir::graph::{Body, Users, Value};
use ir::local::Local;
use ir::mesh::Axis;
use ir::op::{DType, Op, Real};
use std::collections::{BTreeSet, HashMap};
use std::mem::discriminant;

/// Sums whose terms are added in place.
#[derive(Default)]
pub struct InPlaceSums {
    /// The sum of each term.
    pub of: HashMap<Value, Value>,
    /// The term before one, which is there when it is added: a sum keeps its order.
    pub before: HashMap<Value, Value>,
    /// The bool that chooses a term.
    pub only_if: HashMap<Value, Value>,
    /// The additions, and choices of terms, which no kernel makes.
    pub adds: BTreeSet<Value>,
}

/// The sums of a graph: those of a microbatch's pass that only the once-per-step chunks read, and sums over passes of
/// experts' rows, wherever they are read.
pub fn sums(local: &Local) -> InPlaceSums {
    let (body, users, roots) = (&local.body, local.body.users(), roots(local));
    let mut out = InPlaceSums::default();
    for v in body.values().rev().filter(|v| body[*v].op == Op::Add && local.chunks[v.index()].is_pass() && !roots.contains(v)) {
        if out.adds.contains(&v) {
            continue;
        }
        let mut found =
            SumTerms { local, users: &users, left: is_left(local, &users, v), adds: BTreeSet::new(), only_if: HashMap::new(), terms: vec![] };
        if found.collect(v) {
            // Terms keep their order, since another order would round differently.
            ir::fault!("lower.added.order", found.terms.reverse(), ());
            out.before.extend(found.terms.windows(2).map(|t| (t[1], t[0])));
            out.of.extend(found.terms.into_iter().map(|t| (t, v)));
            out.adds.extend(found.adds);
            out.only_if.extend(found.only_if);
        }
    }
    out
}

/// Whether only once-per-step chunks read a value of a pass, as a sum over microbatches or as that of the only one.
fn is_left(local: &Local, users: &Users, v: Value) -> bool {
    let lasts = local.accumulate[v.index()] || local.mesh.size(Axis::Microbatch) == 1;
    let used = &users[v.index()];
    lasts && !used.is_empty() && used.iter().all(|(c, _)| !local.chunks[c.index()].per_microbatch())
}

/// Whether a value is computed before another one, in the same chunk or in an earlier one of the same microbatch.
pub fn is_before(local: &Local, a: Value, b: Value) -> bool {
    let [at, other] = [a, b].map(|v| local.chunks[v.index()]);
    a < b && (at == other || at.precedes(other))
}

/// Collects the terms of a sum.
struct SumTerms<'a> {
    local: &'a Local,
    users: &'a Users,
    /// Whether only once-per-step chunks read the value.
    left: bool,
    adds: BTreeSet<Value>,
    only_if: HashMap<Value, Value>,
    terms: Vec<Value>,
}

impl SumTerms<'_> {
    /// Collects the additions and the terms of a value. The terms are of one op, and each addition adds the next term
    /// to the sum of those before. False if the value has another form.
    fn collect(&mut self, v: Value) -> bool {
        let body: &Body = &self.local.body;
        let node = &body[v];
        if node.ty.dims.is_empty() || self.local.host.contains(&v) {
            return false;
        }
        self.adds.insert(v);
        let &[before, last] = node.args.as_slice() else { return false };
        let in_order = before < last && !matches!(body[last].op, Op::Add);
        in_order
            && [before, last].into_iter().all(|a| match &body[a].op {
                _ if !self.is_of(a, v) => false,
                Op::Add => self.collect(a),
                // The first term of a sum must not have a predicate.
                Op::Select if !self.terms.is_empty() => match self.chosen(a) {
                    Some((bool, x)) if self.is_of(x, v) && self.take(x) => {
                        self.adds.insert(a);
                        self.only_if.insert(x, bool);
                        true
                    }
                    Some(_) | None => false,
                },
                _ => self.take(a),
            })
    }

    /// Whether a value is computed in the chunk of a sum and has no other use.
    fn is_of(&self, a: Value, sum: Value) -> bool {
        let local = self.local;
        let alone = self.users[a.index()].len() == 1 && !local.accumulate[a.index()] && local.chunks[a.index()] == local.chunks[sum.index()];
        alone && local.body[a].ty == local.body[sum].ty
    }

    /// Takes a value as a term, if it has the op of the other terms.
    fn take(&mut self, a: Value) -> bool {
        let body = &self.local.body;
        let fits = self.is_term(a) && self.terms.first().is_none_or(|t| discriminant(&body[*t].op) == discriminant(&body[a].op));
        if fits {
            self.terms.push(a);
        }
        fits
    }

    /// The bool and `x` of `select(bool, x, 0)`, where the bool is a scalar that a kernel computes before.
    fn chosen(&self, a: Value) -> Option<(Value, Value)> {
        let body = &self.local.body;
        let &[bool, x, none] = body[a].args.as_slice() else { return None };
        let zero = body[none].op == Op::Const(Real(0.0)) && body[none].ty.dims.is_empty();
        let scalar = body[bool].ty.dims.is_empty() && role(body, bool) == Role::Compute;
        (zero && scalar && is_before(self.local, bool, x)).then_some((bool, x))
    }

    /// Whether a kernel can add a value to a sum at no more cost than storing it, and its operands are not needed
    /// afterwards.
    fn is_term(&self, a: Value) -> bool {
        let body = &self.local.body;
        let node = &body[a];
        let wide = node.ty.dtype == DType::F32 && !self.local.host.contains(&a);
        match node.op {
            Op::Dot { .. } => wide && self.left && body.is_matrix_product(a),
            Op::GroupedDot { .. } | Op::Scatter { .. } => wide,
            // The table must be computed for the gather. A table that stays could be read together with others.
            Op::Gather { .. } => {
                let mut table = node.args[0];
                while role(body, table) == Role::Alias {
                    table = body[table].args[0];
                }
                let made = matches!(role(body, table), Role::Compute | Role::Exchange);
                made && self.local.chunks[table.index()] == self.local.chunks[a.index()] && !self.local.host.contains(&a)
            }
            _ => false,
        }
    }
}
