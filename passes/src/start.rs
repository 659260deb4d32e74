//! What a compile begins with: the module of a model and options, with the mesh and the pipeline that follow from these.

use crate::pipeline::plan;
use ir::diag::{Diagnostic, Help};
use ir::mesh::{Axis, Mesh, Sizes};
use ir::model::Model;
use ir::module::{Graphs, JobLevel, Module};
use ir::options::{OptionName, Options};

/// Most ranks, and most passes of a step over all stages.
const MOST: u64 = 1 << 20;

/// The module of a model, elaborated for training and (without random drops) for evaluation.
///
/// # Errors
/// E0208, E0633 to E0635, E0637, E0638: sizes and options that do not fit together.
pub fn module(training: Model, evaluation: Model, options: &Options) -> Result<Module, Vec<Diagnostic>> {
    let mesh = mesh(options)?;
    let pipeline = plan::plan(&training.graph, mesh.size(Axis::Microbatch) as u32, options).map_err(|d| vec![d])?;
    let Model { graph, settings, asks_training, train, plan, .. } = training;
    Ok(Module {
        settings,
        asks_training,
        train,
        plan,
        options: options.clone(),
        mesh,
        pipeline,
        takes: vec![],
        training: Graphs::of_text(graph),
        evaluation: Graphs::of_text(evaluation.graph),
        job: None,
        settled: JobLevel::default(),
    })
}

/// How many ranks there are: of this, unlike of microbatches, options say all before there is a model.
///
/// # Errors
/// E0634: absurdly many.
pub fn ranks(o: &Options) -> Result<u64, Vec<Diagnostic>> {
    let ranks = [o.cp, o.tp, o.pp].into_iter().try_fold(o.dp, u64::checked_mul);
    ranks.filter(|n| *n <= MOST).ok_or_else(|| {
        let help = Help::from("reduce ").option(OptionName::Dp).and(", ").option(OptionName::Cp).and(", ").option(OptionName::Tp);
        too_many("ranks", ranks, help.and(" or ").option(OptionName::Pp))
    })
}

fn too_many(what: &str, n: Option<u64>, help: Help) -> Vec<Diagnostic> {
    let n = n.map_or("far".to_string(), |n| n.to_string());
    vec![Diagnostic::error("E0634", format!("{n} {what} are more than {MOST}")).help(help)]
}

/// The mesh of so many ranks and microbatches.
///
/// # Errors
/// E0208, E0634, E0635, E0638: sizes that do not divide, or are absurd.
fn mesh(o: &Options) -> Result<Mesh, Vec<Diagnostic>> {
    let rows = o.micro_batch.saturating_mul(o.dp);
    let empty = [o.tp, o.cp, o.pp, o.ep, o.etp.unwrap_or(1)].contains(&0);
    if rows == 0 || empty || o.global_batch == 0 || !o.global_batch.is_multiple_of(rows) {
        let above = o.global_batch.max(1).checked_next_multiple_of(rows.max(1)).unwrap_or(rows);
        let d = Diagnostic::error(
            "E0208",
            format!("global batch {} does not divide into microbatches of {} on dp = {}", o.global_batch, o.micro_batch, o.dp),
        );
        return Err(vec![d.help(Help::from("`").option(OptionName::GlobalBatch).and(format!(" {above}` does")))]);
    }
    // Schedules are lists and sizes are factorized, so absurd sizes are refused before any work is done for them.
    ranks(o)?;
    if o.replicas == 0 || !o.dp.is_multiple_of(o.replicas) {
        let d = Diagnostic::error("E0638", format!("dp = {} does not divide into {} groups of ranks", o.dp, o.replicas));
        let some: Vec<String> = (1..=o.dp).filter(|n| o.dp.is_multiple_of(*n)).map(|n| n.to_string()).collect();
        return Err(vec![d.help(Help::from("`").option(OptionName::Replicas).and(format!("` takes one of {}", some.join(", "))))]);
    }
    let microbatches = o.global_batch / rows;
    let passes = microbatches.checked_mul(o.pp).and_then(|n| n.checked_mul(o.vpp.unwrap_or(1)));
    if passes.is_none_or(|n| n > MOST) {
        let help = Help::from("raise ").option(OptionName::MicroBatch).and(", or lower ").option(OptionName::GlobalBatch);
        return Err(too_many("passes of microbatches through pipeline stages", passes, help));
    }
    let sizes = Sizes { microbatches, pp: o.pp, dp: o.dp, cp: o.cp, tp: o.tp, ep: o.ep, etp: o.etp, replicas: o.replicas };
    Mesh::of_sizes(&sizes).ok_or_else(|| {
        let etp = o.etp.unwrap_or(o.tp);
        let d = Diagnostic::error(
            "E0635",
            format!("ep = {} and etp = {etp} do not divide the ranks of a stage, dp x cp x tp = {}", o.ep, o.dp * o.cp * o.tp),
        );
        let help = Help::from("experts are split over the ranks that dense layers are split over: ").option(OptionName::Ep).and(" times ");
        let help = help.option(OptionName::Etp).and(" must divide ").option(OptionName::Dp).and(" x ").option(OptionName::Cp);
        vec![d.help(help.and(" x ").option(OptionName::Tp))]
    })
}
