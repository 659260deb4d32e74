//! The verifier of what the passes over logical graphs leave: a step computes what the text says, with its
//! gradient and its optimizer.
//!
//! The graph of the text and the graph that passes made of it are evaluated on the same random numbers, in f64,
//! on a few elements of each dim ([`chosen`]); the results are compared. Of the gradient, which no text says,
//! the derivative of the text's loss along a random direction is computed forward ([`tangent`]) and compared
//! with `<gradient, direction>`. Of the update, gradients are replaced by random numbers, and what comes of
//! those is compared with formulas of [`optimizer`]. Two polynomials that differ agree on random numbers with
//! probability zero (Schwartz 1980; Zippel 1979), and analytic functions likewise.
//!
//! That is no proof of all inputs: what differs at elements or numbers that are not looked at, is not seen.
//! `docs/proofs.md` says what that leaves.

mod chance;
mod chosen;
mod claims;
mod muon;
mod optimizer;
mod ranges;
mod rounding;
mod sample;
mod small;
mod tangent;
#[cfg(test)]
mod tests;
mod updates;

use crate::violation::{Location, fail};
use crate::{Invariant, LocationPart, Violation, references};
use chosen::{ChosenElements, Mismatch, choose};
use claims::GraphComparison;
use ir::dim::Dim;
use ir::graph::{Body, Graph, Value};
use ir::infer;
use ir::module::{Graphs, Level, Module};
use ir::op::{Binary, Op, Reduce, Unary};
use ir::program::Interval;
use sample::Sample;
use small::{DrawMode, SmallGraph};

pub use claims::Unproved;

/// Bounds of random weights. The first one is used with which the text's results are numbers.
const SCALES: [f64; 4] = [0.7, 0.2, 0.05, 0.01];

/// The most operations that are evaluated.
const WORK: u64 = 1_000_000_000;

/// Small graphs are evaluated on several samples, since two of a few numbers are more likely to be equal by chance:
/// as many as take so many operations, and at most this many.
const SAMPLES: (u64, u64) = (200_000, 5);

/// That the logical or sharded graphs of a module compute what its text says. A module without the graphs of
/// its text, which somebody wrote by hand, claims nothing.
///
/// # Errors
/// V150 to V158: the first claim that does not hold.
pub fn verify(m: &Module) -> Result<Unproved, Violation> {
    let both = [&m.training, &m.evaluation];
    let [Some(training), Some(evaluation)] = both.map(|g| g.model.as_ref()) else { return Ok(None) };
    // A graph that is malformed cannot be evaluated.
    for graph in [training, both[0].whole.graph(), evaluation, both[1].whole.graph()] {
        sound(graph)?;
    }
    for (part, graphs, model) in [(LocationPart::Training, both[0], training), (LocationPart::Evaluation, both[1], evaluation)] {
        // Sums are widened by one of the passes that are verified together, so rounding is checked once all of them
        // are done.
        let whole = m.level() >= Level::Sharded;
        let rounded = || if whole { rounding::verify(graphs.whole.graph()) } else { Ok(()) };
        names(model, graphs).and_then(|()| rounded()).map_err(|e| e.within(part))?;
    }
    let graphs = [training, both[0].whole.graph(), evaluation, both[1].whole.graph()];
    let chosen = match choose(&graphs, &same(&graphs)) {
        Ok(chosen) => chosen,
        Err(why) => return Ok(Some(why)),
    };
    // A pass fills `takes`, so ranges are checked only once it is known.
    let ranges = if m.takes.is_empty() { vec![] } else { vec![(LocationPart::Training, 0), (LocationPart::Evaluation, 2)] };
    for (part, text) in ranges {
        ranges::verify(graphs[text], &chosen[text], &m.takes).map_err(|e| e.within(part))?;
    }
    let plain = Sample::new(training, &chosen[0], 0, SCALES[0]);
    let work = (0..4).map(|k| SmallGraph::new(graphs[k], &chosen[k], &plain, DrawMode::Keyed).work()).fold(1, u64::saturating_add);
    if work > WORK {
        return Ok(Some(format!("the elements that views and slices lead to take {work} operations, more than {WORK}")));
    }
    let bent = bends(&training.body);
    for number in 0..(SAMPLES.0 / work).clamp(1, SAMPLES.1) {
        let (mut why, mut kink) = (None, None);
        for scale in SCALES {
            match held(m, &graphs, &chosen, &Sample::new(training, &chosen[0], number, scale)) {
                // If clamps leave a sum exactly where another clamp begins, it has two derivatives and rounding
                // chooses one of them. At another scale it has one, whereas a real error shows there too.
                Err(e) if e.invariant == Invariant::Gradient && bent && kink.is_none() => kink = Some(e),
                Err(e) => return Err(kink.unwrap_or(e)),
                Ok(unproved) => {
                    why = unproved;
                    if why.is_none() {
                        break;
                    }
                }
            }
        }
        if why.is_some() {
            return Ok(why);
        }
    }
    Ok(None)
}

/// Whether a body has a point with two derivatives: a clamp, a step or a comparison of floats. A maximum that is
/// subtracted behind a `stop_gradient` has none.
fn bends(body: &Body) -> bool {
    let users = body.users();
    let float = |v: Value| body[v].ty.dtype.is_float();
    let kinks = |op: &Op| {
        matches!(op, Op::Binary(Binary::Max | Binary::Min | Binary::Rem) | Op::Unary(Unary::Abs | Unary::Sign | Unary::Floor) | Op::Compare(_))
    };
    body.values().any(|v| match &body[v].op {
        Op::Reduce { kind: Reduce::Max, .. } => users[v.index()].iter().any(|(user, _)| body[*user].op != Op::StopGradient),
        Op::Attention(a) => a.scoring.steps.iter().any(|s| kinks(&s.op) && s.args.iter().any(|x| a.scoring.steps[*x as usize].dtype.is_float())),
        op => kinks(op) && body[v].args.iter().any(|x| float(*x)),
    })
}

/// That no index of the graph of a text leaves its table while inputs hold what they may, by input ([`mod@ranges`]);
/// or why that was not looked at.
///
/// # Errors
/// V158.
pub fn ranges(text: &Graph, takes: &[Option<Vec<Interval>>]) -> Result<Unproved, Violation> {
    match choose(&[text], &[]) {
        Ok(chosen) => ranges::verify(text, &chosen[0], takes).map(|()| None),
        Err(why) => Ok(Some(why)),
    }
}

/// Checks that a graph names what exists, and has the types that its ops give it.
fn sound(g: &Graph) -> Result<(), Violation> {
    references::graph(g)?;
    let wrong = g.body.values().find_map(|v| Some((v, infer::check(&g.body, v).err()?)));
    wrong.map_or(Ok(()), |(v, e)| fail(Invariant::NodeType, v, e.to_string()))
}

/// Checks all claims on one sample, or says why it shows nothing.
fn held(m: &Module, graphs: &[&Graph; 4], chosen: &[ChosenElements], sample: &Sample) -> Result<Unproved, Violation> {
    let small = |k: usize, draws| SmallGraph::new(graphs[k], &chosen[k], sample, draws);
    let of = [0, 1, 2, 3].map(|k| small(k, DrawMode::Keyed));
    let whole = m.level() >= Level::Sharded;
    let claims = GraphComparison { train: &m.train, model: &of[0], graph: &of[1], sample, whole };
    let (training, why) = claims.training()?;
    if why.is_some() {
        return Ok(why);
    }
    let evaluated = GraphComparison { train: &m.train, model: &of[2], graph: &of[3], sample, whole }.evaluation()?;
    // A text that asks whether it trains, or draws itself, may do what it likes in an evaluation.
    if !m.asks_training {
        let mean = small(0, DrawMode::Mean);
        claims::without_drops(&mean, &training, &of[2], &evaluated)?;
    }
    Ok(None)
}

/// The equal dims of the graphs of step and evaluation and of their texts: those that the two texts fill from
/// outside, and the dims of a text's graph, which passes keep.
fn same(graphs: &[&Graph; 4]) -> Vec<((usize, Dim), (usize, Dim))> {
    let mut out = vec![];
    for (text, graph) in [(0, 1), (2, 3)] {
        out.extend(graphs[text].body.dims.ids().map(|d| ((text, d), (graph, d))));
    }
    let types = |g: &Graph| -> Vec<(String, Vec<Dim>)> {
        let params = g.params.iter().map(|p| (format!("param {}", p.name), p.ty.dims.clone()));
        params.chain(g.inputs.iter().map(|i| (format!("input {}", i.name), i.ty.dims.clone()))).collect()
    };
    let evaluated: std::collections::HashMap<String, Vec<Dim>> = types(graphs[2]).into_iter().collect();
    for (name, dims) in types(graphs[0]) {
        let others = evaluated.get(&name).into_iter().flatten();
        out.extend(dims.iter().zip(others).map(|(a, b)| ((0, *a), (2, *b))));
    }
    out
}

/// Checks that a graph names what its text does: dims, parameters, inputs and reports.
fn names(model: &Graph, graphs: &Graphs) -> Result<(), Violation> {
    let graph = graphs.whole.graph();
    let unlike = |what: String| fail(Invariant::SameNames, Location::from(LocationPart::Graph), what);
    chosen::same_dims(&model.body.dims, &graph.body.dims).or_else(|Mismatch(what)| unlike(what))?;
    if graph.params.len() != model.params.len() {
        return unlike(format!("{} parameters; the text has {}", graph.params.len(), model.params.len()));
    }
    if let Some((_, p)) = graph.params.iter().zip(&model.params).find(|(a, b)| a != b) {
        return unlike(format!("parameter `{}` is not that of the text", p.name));
    }
    if graph.inputs.len() != model.inputs.len() {
        return unlike(format!("{} inputs; the text has {}", graph.inputs.len(), model.inputs.len()));
    }
    if let Some((_, i)) = graph.inputs.iter().zip(&model.inputs).find(|(a, b)| a != b) {
        return unlike(format!("input `{}` is not that of the text", i.name));
    }
    if graph.batch != model.batch {
        return unlike("the dim that microbatches split is another one".into());
    }
    if graph.layers != model.layers {
        return unlike(format!("{} layers; the text has {}", graph.layers, model.layers));
    }
    Ok(())
}
