//! The layout of layers on stages and the order of passes, as the options ask for them.

use crate::pipeline::schedule::{self, ScheduleShape};
use crate::pipeline::stage_layout;
use ir::diag::{Diagnostic, Help};
use ir::graph::Graph;
use ir::options::{Cuts, OptionName, Options};
use ir::pipeline::{Layout, MOST_CHUNKS, Pass, PassKind, Pipeline, Schedule, StagePlacement, VirtualStage};

/// The plan for a model.
///
/// # Errors
/// E0633: layers and stages do not fit. E0637: the schedule does not fit the stages or microbatches.
///
/// # Panics
/// A schedule of mcc's own cannot be run.
pub fn plan(graph: &Graph, microbatches: u32, options: &Options) -> Result<Pipeline, Diagnostic> {
    let stages = options.pp as u32;
    let chunks = chunks(options)?;
    let group = u32::try_from(options.group.unwrap_or(options.pp)).unwrap_or(u32::MAX);
    let shape = ScheduleShape { stages, chunks, microbatches, group, pairs: options.pairs_passes() };
    if options.schedule == Schedule::OneFOneB && chunks > 1 {
        grouped(shape)?;
    }
    let order = schedule::order(&options.schedule, shape);
    if order.stages.len() as u32 != stages {
        let d = Diagnostic::error("E0637", format!("the schedule is for {} stages; pp = {stages}", order.stages.len()));
        return Err(d.help(Help::from("`").option(OptionName::Pp).and(format!(" {}`, or a line for each of {stages} stages", order.stages.len()))));
    }
    match (order.check(microbatches), &options.schedule) {
        (Ok(()), _) => {}
        (Err(e), Schedule::Given(_)) => return Err(Diagnostic::error("E0637", format!("the schedule cannot be run: {e}"))),
        (Err(e), _) => unreachable!("invariant: a schedule of mcc's own can be run: {e}"),
    }
    Ok(Pipeline { layout: layout(graph, shape, order.placement, options)?, order })
}

/// Virtual stages of a stage: what was asked for, or what the schedule needs.
fn chunks(options: &Options) -> Result<u32, Diagnostic> {
    let needed = match &options.schedule {
        Schedule::GPipe | Schedule::OneFOneB => None,
        Schedule::ZbH1 => Some(1),
        Schedule::ZbV | Schedule::DualPipeV => Some(2),
        Schedule::Given(order) => Some(order.chunks()),
    };
    let asked = match (&options.layout, options.vpp) {
        // The parts of a layout text are virtual stages.
        (Cuts::Text(text), None) if needed.is_none() => {
            let parts = stage_layout::parse(text)?.len() as u64;
            (parts > options.pp && parts.is_multiple_of(options.pp)).then_some(parts / options.pp)
        }
        (_, asked) => asked,
    };
    let asked = asked.map(|v| u32::try_from(v).unwrap_or(u32::MAX));
    match (needed, asked) {
        (Some(n), Some(v)) if n != v => {
            let d = Diagnostic::error("E0637", format!("the schedule has {n} virtual stages on each stage; vpp = {v}"));
            Err(d.help(Help::from("leave ").option(OptionName::Vpp).and(" out, or `").option(OptionName::Vpp).and(format!(" {n}`"))))
        }
        (Some(n), _) => Ok(n),
        (None, Some(v)) if v > 1 && options.pp == 1 => {
            let d = Diagnostic::error("E0637", "virtual stages are for a pipeline of several stages; pp = 1");
            Err(d.help(Help::from("`").option(OptionName::Pp).and(" 2` or more, or no ").option(OptionName::Vpp)))
        }
        (None, Some(v)) if v > MOST_CHUNKS || v == 0 => {
            Err(Diagnostic::error("E0637", format!("{v} virtual stages on a stage are not 1 to {MOST_CHUNKS}")))
        }
        (None, v) => Ok(v.unwrap_or(1)),
    }
}

/// Whether microbatches can go in groups: a last, smaller group must still fill the pipeline.
fn grouped(shape: ScheduleShape) -> Result<(), Diagnostic> {
    let ScheduleShape { stages, microbatches, group, .. } = shape;
    let fits = |group: u32| (stages..=microbatches).contains(&group) && (microbatches % group == 0 || microbatches % group >= stages);
    if fits(group) {
        return Ok(());
    }
    let text = format!("{microbatches} microbatches do not go through {stages} interleaved stages in groups of {group}");
    let d = Diagnostic::error("E0637", text)
        .note("a group has at least as many microbatches as there are stages, and so has what is left for the last one");
    Err(match (stages..=microbatches).filter(|g| fits(*g)).min_by_key(|g| g.abs_diff(group)) {
        Some(best) => d.help(Help::from("`").option(OptionName::Group).and(format!(" {best}` does"))),
        None => d.help(Help::from("raise ").option(OptionName::GlobalBatch).and(format!(" to {stages} microbatches or more"))),
    })
}

fn layout(graph: &Graph, shape: ScheduleShape, placement: StagePlacement, options: &Options) -> Result<Layout, Diagnostic> {
    let (layers, all) = (graph.layers, u64::from(shape.stages) * u64::from(shape.chunks));
    let what = if shape.chunks > 1 { "virtual pipeline stages" } else { "pipeline stages" };
    let few = || {
        let d = Diagnostic::error("E0633", format!("{layers} layers cannot fill {all} {what}"));
        d.help(match shape.chunks {
            1 => Help::from("").option(OptionName::Pp).and(format!(" {} at most", layers.max(1))),
            _ => Help::from("").option(OptionName::Vpp).and(format!(" {} at most, or fewer stages", (layers / shape.stages).max(1))),
        })
    };
    let virtual_stages = u32::try_from(all).map_err(|_| few())?;
    if layers == 0 && all > 1 {
        return Err(few());
    }
    let given = shape_text(shape);
    let parts = match &options.layout {
        Cuts::Even { embedding, loss } => stage_layout::even_parts(layers, virtual_stages, *embedding, *loss).ok_or_else(few)?,
        Cuts::Balanced => stage_layout::balanced(&stage_layout::costs(graph), virtual_stages).ok_or_else(few)?,
        Cuts::Sizes(sizes) => {
            let sum: u64 = sizes.iter().map(|s| u64::from(*s)).sum();
            if sizes.len() as u64 != all || sum != u64::from(layers) || sizes.contains(&0) {
                let text = format!("the layout {sizes:?} has {} stages and {sum} layers; {given} and the model has {layers} layers", sizes.len());
                let each = if shape.chunks > 1 { "virtual stage, in the order of the layers" } else { "stage" };
                return Err(Diagnostic::error("E0633", text).help(format!("one number of layers per {each}, each at least 1")));
            }
            sizes.iter().map(|layers| VirtualStage { layers: *layers, ..VirtualStage::default() }).collect()
        }
        Cuts::Text(text) => {
            let parts = stage_layout::parse(text)?;
            let sum: u32 = parts.iter().map(|p| p.layers).sum();
            if parts.len() as u64 != all || sum != layers {
                let text = format!("the pipeline layout has {} parts and {sum} layers; {given} and the model has {layers} layers", parts.len());
                return Err(Diagnostic::error("E0633", text).help(format!("{all} parts with {layers} `t` together")));
            }
            parts
        }
    };
    let end = parts.len() - 1;
    if let Some(g) = parts.iter().enumerate().position(|(g, p)| p.layers == 0 && !(p.embedding && g == 0) && !(p.loss && g == end) && end > 0) {
        let d = Diagnostic::error("E0633", format!("part {} of the pipeline layout has no layer", g + 1));
        return Err(d.help("only the first part, with the embedding, and the last, with the loss, can do without"));
    }
    Ok(Layout::from_parts(&parts, shape.stages, placement))
}

/// What the options say of stages.
fn shape_text(shape: ScheduleShape) -> String {
    match shape.chunks {
        1 => format!("pp = {}", shape.stages),
        n => format!("pp = {}, with {n} virtual stages each,", shape.stages),
    }
}

/// The order of an evaluation: the forward passes of the training.
pub fn forward(passes: &[Pass]) -> Vec<Pass> {
    passes.iter().copied().filter(|p| p.kind == PassKind::Forward).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ir::pipeline::PassOrder;

    /// What is wrong with options, and the way out, for a model of eight layers.
    fn refused(microbatches: u32, options: &Options) -> String {
        let graph = Graph { layers: 8, ..Graph::default() };
        match plan(&graph, microbatches, options) {
            Ok(_) => "nothing".into(),
            Err(d) => format!("{} {}; {}", d.code, d.message, d.help.iter().map(Help::to_string).collect::<Vec<_>>().join("; ")),
        }
    }

    /// Stages, microbatches, and the groups that go: at least as many as there are stages in each, the last one too.
    const GROUPS: &[(u32, u32, &[u32])] = &[
        (2, 1, &[]),
        (2, 2, &[2]),
        (2, 3, &[3]),
        (2, 4, &[2, 4]),
        (2, 5, &[3, 5]),
        (2, 6, &[2, 3, 4, 6]),
        (2, 7, &[4, 5, 7]),
        (2, 8, &[2, 3, 4, 5, 6, 8]),
        (2, 9, &[3, 5, 6, 7, 9]),
        (3, 1, &[]),
        (3, 2, &[]),
        (3, 3, &[3]),
        (3, 4, &[4]),
        (3, 5, &[5]),
        (3, 6, &[3, 6]),
        (3, 7, &[4, 7]),
        (3, 8, &[4, 5, 8]),
        (3, 9, &[3, 5, 6, 9]),
    ];

    #[test]
    fn interleaving_takes_groups_that_fill_the_pipeline() {
        for (stages, microbatches, fit) in GROUPS {
            for (chunks, group) in (2..=8 / u64::from(*stages)).flat_map(|chunks| (1..=microbatches + 1).map(move |group| (chunks, group))) {
                let options = Options { pp: (*stages).into(), vpp: Some(chunks), group: Some(group.into()), ..Options::default() };
                let taken = refused(*microbatches, &options) == "nothing";
                assert_eq!(taken, fit.contains(&group), "p={stages} v={chunks} m={microbatches} G={group}");
                let shape = ScheduleShape { stages: *stages, chunks: chunks as u32, microbatches: *microbatches, group, pairs: false };
                assert!(!taken || schedule::order(&Schedule::OneFOneB, shape).check(*microbatches).is_ok());
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_with_a_way_out() {
        let interleaved = |group, pp| Options { pp, vpp: Some(2), group, ..Options::default() };
        assert_eq!(
            refused(5, &interleaved(Some(2), 2)),
            "E0637 5 microbatches do not go through 2 interleaved stages in groups of 2; `group 3` does"
        );
        assert_eq!(
            refused(3, &interleaved(None, 4)),
            "E0637 3 microbatches do not go through 4 interleaved stages in groups of 4; raise global_batch to 4 microbatches or more"
        );
        let zero_bubble = |schedule, vpp| Options { pp: 2, vpp, schedule, ..Options::default() };
        assert_eq!(
            refused(4, &zero_bubble(Schedule::ZbH1, Some(2))),
            "E0637 the schedule has 1 virtual stages on each stage; vpp = 2; leave vpp out, or `vpp 1`"
        );
        assert_eq!(refused(4, &interleaved(None, 1)), "E0637 virtual stages are for a pipeline of several stages; pp = 1; `pp 2` or more, or no vpp");
        assert_eq!(refused(4, &Options { pp: 16, ..Options::default() }), "E0633 8 layers cannot fill 16 pipeline stages; pp 8 at most");
        let given = Schedule::Given(PassOrder::parse("0: F0.0 B0.0").expect("a schedule"));
        assert_eq!(refused(1, &zero_bubble(given, None)), "E0637 the schedule is for 1 stages; pp = 2; `pp 1`, or a line for each of 2 stages");
        // These schedules accept any number of microbatches.
        for microbatches in 1..10 {
            for schedule in [Schedule::GPipe, Schedule::OneFOneB, Schedule::ZbH1, Schedule::ZbV, Schedule::DualPipeV] {
                assert_eq!(refused(microbatches, &Options { pp: 4, schedule, ..Options::default() }), "nothing");
            }
        }
    }
}
