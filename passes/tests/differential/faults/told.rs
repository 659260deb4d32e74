//! What is reported of a job: that costs and memory are what programs have is held by tests alone, so a fault there
//! is seen by comparing.

use ir::diag::Sources;
use ir::program::Space;
use passes::compile::Compiled;
use passes::report::explain::{exchanges, line, totals};
use passes::report::footprint::{Budget, Footprint, Footprints, over_budget, owners};
use passes::report::pipeline_timeline::{PassTimes, UNIT, timeline};
use std::collections::BTreeSet;

/// The texts of all reports of a job, by report.
pub type ReportTexts = Vec<(&'static str, String)>;

pub fn told(compiled: &Compiled) -> ReportTexts {
    let (job, sharded) = (&compiled.job, &compiled.sharded);
    let all = exchanges(job);
    let stages = 0..job.stages.len();
    let memory: Vec<_> = stages.map(|stage| (Footprint::of(job, stage), owners(job, stage))).collect();
    let footprints = Footprints::new(job, &Footprint::of);
    let most = (footprints.most(), footprints.most_by(Footprint::on_host), footprints.least());
    let budget = over_budget(job, &footprints, &Sources::default(), Space::Device, Budget([1; 2]));
    let times = [UNIT, PassTimes { forward: 2, backward: 3, weight: 1 }].map(|costs| timeline(job, costs));
    let spans: BTreeSet<(u16, u32)> = sharded.graph.body.nodes.iter().filter_map(|n| n.origin.span).map(|s| (s.file, s.line)).collect();
    let lines: Vec<_> = spans.into_iter().map(|(file, number)| line(sharded, job, file, number)).collect();
    vec![
        ("exchanges", format!("{all:?}")),
        ("exchanges of a step", format!("{:?}", totals(&all, false))),
        ("memory", format!("{memory:?}")),
        ("the stage that holds most", format!("{most:?}")),
        ("a budget", format!("{budget:?}")),
        ("times", format!("{times:?}")),
        ("lines of the text", format!("{lines:?}")),
    ]
}

/// The name of the first report that differs.
pub fn otherwise(got: &ReportTexts, want: &ReportTexts) -> Option<&'static str> {
    got.iter().zip(want).find(|(g, w)| g != w).map(|(g, _)| g.0)
}
