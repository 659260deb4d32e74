//! How far rounding may take a sum, by the sizes of its terms.
//!
//! A sum in f32 is that of terms of which each is another by at most so many roundings as additions follow it (N. J.
//! Higham, Accuracy and Stability of Numerical Algorithms, chapter 4). These go either way, so together they come to
//! about the root of their number (Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis, 2019).

use ir::dim::Dim;
use ir::eval::{Env, eval};
use ir::graph::{Body, Value};
use ir::op::{Op, Reduce};
use ir::random::mix;

/// Half the last place of an f32, in parts of it, at most.
const ROUNDING: f64 = 1.0 / (1 << 24) as f64;
/// How many times the root of their number roundings may come to.
const FACTOR: f64 = 3.0;
/// Terms that are added one after the other, of many: code adds up blocks, and then what these come to.
const BLOCK: f64 = 1024.0;

/// The terms of a sum, and whether code adds them one after the other.
fn terms(body: &Body, v: Value) -> Option<(f64, bool)> {
    let node = &body[v];
    let of = |dims: &[Dim]| body.dims.elements(dims) as f64;
    if !node.ty.dtype.is_float() {
        return None;
    }
    match &node.op {
        Op::Reduce { kind: Reduce::Sum, over } | Op::Dot { over, .. } => Some((of(over), false)),
        Op::GroupedDot { experts, over, .. } => Some((of(&over.iter().copied().filter(|d| d != experts).collect::<Vec<_>>()), false)),
        Op::Cumsum { over, .. } => Some((of(&[*over]), true)),
        Op::Scatter { .. } => Some((of(body.dims_of(node.args[1])), true)),
        _ => None,
    }
}

/// The greatest part of the sum of its terms' sizes by which rounding makes a sum another one.
fn part(terms: f64, one_by_one: bool) -> f64 {
    let additions = if one_by_one { terms } else { terms.min(BLOCK.max(2.0 * terms.sqrt()) + terms.sqrt()) };
    FACTOR * additions.sqrt() * ROUNDING
}

/// Makes sums as wrong as rounding may: all of them greater at time 0, later some greater and some less.
/// Products on GPUs add one term after the other.
pub fn change(body: &Body, time: u64, emulated: bool) -> impl FnMut(Value, &[&[f64]], &mut [f64], &mut dyn Env) {
    move |v, args, out, env| {
        let Some((terms, one_by_one)) = terms(body, v) else { return };
        let is_float = |k: usize| body[body[v].args[k]].ty.dtype.is_float();
        let sizes = args.iter().enumerate().map(|(k, x)| x.iter().map(|x| if is_float(k) { x.abs() } else { *x }).collect::<Vec<_>>());
        let sizes: Vec<Vec<f64>> = sizes.collect();
        let most = eval(body, v, &sizes.iter().map(Vec::as_slice).collect::<Vec<_>>(), env);
        let part = part(terms, one_by_one || emulated);
        let is_less = |k: u64| time > 0 && mix(k ^ time << 56 ^ (v.index() as u64) << 40) & 1 == 0;
        out.iter_mut().zip(most).zip(0..).for_each(|((x, most), k)| *x += if is_less(k) { -part } else { part } * most);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_rounding_may_do_to_a_sum_grows_with_its_terms() {
        let of = |terms: f64| part(terms, false) / ROUNDING;
        assert_eq!([1.0, 100.0, 1024.0].map(of), [3.0, 30.0, 96.0]);
        assert_eq!(of(65536.0).round(), 107.0);
        assert_eq!(of((1u64 << 32) as f64).round(), 3.0 * 443.0 + 1.0);
        assert_eq!(part(65536.0, true) / ROUNDING, 768.0);
    }
}
