//! What a job says beside its programs: names, sizes, initial values, inputs, tables, reports and settings, as
//! they are in the module's graphs.

use crate::violation::{Checked, ensure};
use crate::{Invariant, LocationPart, Violation};
use ir::dim::Dim;
use ir::graph::{Graph, Table};
use ir::mesh::Axis;
use ir::module::Module;
use ir::program::{Extent, Job, TableEntry};
use std::collections::BTreeMap;

/// V530 to V535: a job describes the graphs of its module.
///
/// # Errors
/// The first thing that it says otherwise.
pub fn verify(job: &Job, m: &Module) -> Result<(), Violation> {
    let graphs = [m.training.whole.graph(), m.evaluation.whole.graph()];
    let checks = [settings(job, m), params(job, graphs[0]), inputs(job, m), tables(job, graphs[0]), reports(job, graphs), stages(job, m)];
    checks.into_iter().try_for_each(|c| c.map_err(|e| e.at(LocationPart::Job)))
}

/// The job's number of each table of a graph: one of the same numbers over dims of the same sizes.
///
/// # Errors
/// The job has none like it.
pub(crate) fn numbers(job: &Job, g: &Graph) -> Checked<Vec<u32>> {
    let number = |t: &Table| {
        let found = job.tables.iter().position(|entry| is_table(entry, g, t));
        found.map(|k| k as u32).ok_or_else(|| Invariant::ProgramTable.breach(format!("the job has no table like `{}`", t.name)))
    };
    g.tables.iter().map(number).collect()
}

fn settings(job: &Job, m: &Module) -> Checked {
    let graph = m.training.whole.graph();
    let unlike = |what: &str, same: bool| ensure(same, Invariant::DescribedSettings, || format!("the {what} of the job is not the module's"));
    unlike("name of the model", job.model == graph.name)?;
    unlike("list of settings", job.settings == m.settings)?;
    unlike("optimizer or schedule", job.train == m.train)?;
    unlike("mesh", job.mesh == m.mesh)?;
    unlike("batch of a step", job.global_batch == m.options.global_batch)?;
    unlike("number of microbatches", job.microbatches == m.mesh.size(Axis::Microbatch))
}

fn params(job: &Job, g: &Graph) -> Checked {
    let numbers = [job.params.len(), g.params.len()];
    ensure(numbers[0] == numbers[1], Invariant::DescribedParameters, || format!("{} parameters of {}", numbers[0], numbers[1]))?;
    job.params.iter().zip(&g.params).try_for_each(|(entry, p)| {
        let same = entry.name == p.name && entry.init == p.init && are_dims(&entry.dims, g, &p.ty.dims);
        ensure(same, Invariant::DescribedParameters, || format!("`{}` has another name, size, order or beginning than `{}`", entry.name, p.name))
    })
}

fn inputs(job: &Job, m: &Module) -> Checked {
    let g = m.training.whole.graph();
    let numbers = [job.inputs.len(), g.inputs.len()];
    ensure(numbers[0] == numbers[1], Invariant::DescribedInputs, || format!("{} inputs of {}", numbers[0], numbers[1]))?;
    job.inputs.iter().zip(&g.inputs).enumerate().try_for_each(|(k, (entry, i))| {
        let takes = m.takes.get(k).and_then(Option::as_ref);
        let same = entry.name == i.name && entry.dtype == i.ty.dtype && are_dims(&entry.dims, g, &i.ty.dims);
        let fed = entry.default == i.default && entry.takes.as_ref() == takes;
        ensure(same && fed, Invariant::DescribedInputs, || {
            format!("`{}` has another name, type, size, default or range than `{}`", entry.name, i.name)
        })
    })
}

/// A step numbers its tables as the job does; those of an evaluation are found by what they hold ([`numbers`]).
fn tables(job: &Job, training: &Graph) -> Checked {
    let own = |k: usize, t: &Table| job.tables.get(k).is_some_and(|entry| is_table(entry, training, t));
    let wrong = training.tables.iter().enumerate().find(|(k, t)| !own(*k, t));
    ensure(wrong.is_none(), Invariant::DescribedTables, || {
        let (k, table) = wrong.map_or((0, ""), |(k, t)| (k, &t.name));
        format!("table {k} of the job is not `{table}` of the step")
    })
}

fn reports(job: &Job, [g, evaluation]: [&Graph; 2]) -> Checked {
    let named = |g: &Graph| g.losses.iter().chain(&g.metrics).map(|r| r.name.clone()).collect::<Vec<_>>();
    let want = [vec!["loss".to_string(), "grad_norm".to_string()], named(g)].concat();
    let list = |names: &[String]| names.join(", ");
    ensure(job.reports == want, Invariant::DescribedReports, || format!("reports {}, not {}", list(&job.reports), list(&want)))?;
    let evaluated = named(evaluation);
    ensure(evaluated == named(g), Invariant::DescribedReports, || format!("an evaluation reports {}, a step {}", list(&evaluated), list(&named(g))))
}

/// Each stage runs the program of its class, with the parameters that it has there.
fn stages(job: &Job, m: &Module) -> Checked {
    let known: BTreeMap<u64, (u32, &Vec<u32>)> =
        (0u32..).zip(&m.training.locals).flat_map(|(class, l)| l.stages.iter().map(move |(s, params)| (*s, (class, params)))).collect();
    ensure(known.len() == job.stages.len(), Invariant::DescribedStages, || format!("{} stages of {}", job.stages.len(), known.len()))?;
    (0u64..).zip(&job.stages).try_for_each(|(s, stage)| {
        let same = known.get(&s).is_some_and(|(class, params)| stage.program == *class && stage.params == **params);
        ensure(same, Invariant::DescribedStages, || format!("stage {s} runs another program than that of its class, or with other parameters"))
    })
}

fn is_table(entry: &TableEntry, g: &Graph, t: &Table) -> bool {
    // Compared as bits, a NaN equals itself.
    let same = |a: &[f64], b: &[f64]| a.len() == b.len() && a.iter().zip(b).all(|(x, y)| x.to_bits() == y.to_bits());
    entry.dtype == t.ty.dtype && are_dims(&entry.dims, g, &t.ty.dims) && same(&entry.data, &t.data)
}

/// Names and sizes without and with padding, and orders of storage.
fn are_dims(extents: &[Extent], g: &Graph, dims: &[Dim]) -> bool {
    extents.len() == dims.len()
        && extents.iter().zip(dims).all(|(e, d)| {
            let info = &g.body.dims[*d];
            e.name == info.name && e.size == info.logical && e.padded == info.size && e.order == info.order
        })
}
