//! From the sharded graph to one local graph per program class: local shapes, collectives, transfers between stages.
//!
//! Every stage's graph is emitted by walking the sharded graph once; stages whose graphs are equal up to names become one
//! class. Values that a step needs once are separated from those of each microbatch here: the sum over the axis
//! `mb` is an accumulation, legal only where a step has all microbatches behind it, or before it (sums of data alone).

mod cross;
mod emit;
mod job_view;
mod param_stages;
mod reshard;
mod ring;
mod rows;
pub mod stored_rows;

use emit::Emitter;
use ir::diag::Diagnostic;
use ir::local::Local;
use ir::pipeline::{Layout, WeightGradients};
use ir::sharded::Sharded;
use job_view::JobView;
use stored_rows::RowBudget;

/// The local graphs, one per stage. An evaluation is told the graph of `training`, which says where parameters are
/// that none of its stages uses.
///
/// # Errors
/// E0631: a sum over the whole batch is used in a way that neither precedes nor follows the microbatches.
pub fn partition(
    s: &Sharded,
    training: Option<&Sharded>,
    layout: &Layout,
    weights: WeightGradients,
    room: RowBudget,
) -> Result<Vec<Local>, Vec<Diagnostic>> {
    let job = JobView::new(s, training, layout, weights, room)?;
    Ok((0..layout.stages).map(|stage| Emitter::new(&job, stage).run()).collect())
}

/// The most passes that rows of experts take on a rank; none if nothing is in rows.
pub fn most_passes(s: &Sharded, layout: &Layout, weights: WeightGradients, room: RowBudget) -> Option<u64> {
    let job = JobView::new(s, None, layout, weights, room).ok()?;
    let mut emitter = Emitter::new(&job, 0);
    (0..job.rows.layouts.len()).map(|l| emitter.passes(l)).max()
}

/// The local graphs, one per program class; together they cover every stage once.
pub fn classes(stages: Vec<Local>) -> Vec<Local> {
    let mut classes: Vec<Local> = vec![];
    for local in stages {
        match classes.iter_mut().find(|c| same_class(c, &local)) {
            Some(class) => class.stages.extend(local.stages),
            None => classes.push(local),
        }
    }
    classes
}

/// Equal up to names and places.
fn same_class(a: &Local, b: &Local) -> bool {
    a.body.nodes.len() == b.body.nodes.len()
        && a.body.dims == b.body.dims
        && a.params == b.params
        && a.buckets == b.buckets
        && a.chunks == b.chunks
        && a.accumulate == b.accumulate
        && a.reports == b.reports
        && a.updates == b.updates
        && a.body.nodes.iter().zip(&b.body.nodes).all(|(x, y)| x.op == y.op && x.args == y.args && x.ty == y.ty)
}
