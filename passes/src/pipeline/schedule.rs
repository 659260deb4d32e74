//! Generators of pipeline schedules: GPipe, 1F1B, interleaved, ZB-H1, ZB-V, DualPipeV.

use ir::pipeline::{Pass, PassKind, PassOrder, Schedule, StagePlacement};
use std::collections::BTreeMap;

/// What a schedule is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScheduleShape {
    /// Pipeline stages, each of which gets a list of passes.
    pub stages: u32,
    /// Virtual stages on each stage.
    pub chunks: u32,
    /// Microbatches that go through every stage in a step.
    pub microbatches: u32,
    /// Microbatches that go through a virtual stage before the next one of the stage has its turn, where interleaved.
    pub group: u32,
    /// Whether passes run in pairs: 1F1B then begins one backward pass later, and on the way to it waits for no pass
    /// that is in a pair at the same time.
    pub pairs: bool,
}

/// The passes of all stages. The shape fits the schedule.
pub fn order(schedule: &Schedule, shape: ScheduleShape) -> PassOrder {
    let generate =
        |placement, of: fn(ScheduleShape, u32) -> Vec<Pass>| PassOrder { placement, stages: (0..shape.stages).map(|s| of(shape, s)).collect() };
    match schedule {
        Schedule::GPipe => generate(StagePlacement::Interleaved, gpipe),
        Schedule::OneFOneB if shape.chunks == 1 => generate(StagePlacement::Interleaved, one_f_one_b),
        Schedule::OneFOneB => generate(StagePlacement::Interleaved, interleaved),
        Schedule::ZbH1 => generate(StagePlacement::Interleaved, zb_h1),
        Schedule::ZbV => generate(StagePlacement::V, zb_v),
        Schedule::DualPipeV => generate(StagePlacement::V, dual_pipe_v),
        Schedule::Given(order) => order.clone(),
    }
}

/// Passes in order, each of the next microbatch of its kind and virtual stage.
#[derive(Default)]
struct ScheduleBuilder {
    passes: Vec<Pass>,
    next: BTreeMap<(PassKind, u32), u32>,
}

impl ScheduleBuilder {
    fn push(&mut self, passes: &[(PassKind, u32)], times: u32) {
        for (kind, chunk) in passes.iter().copied().cycle().take(passes.len() * times as usize) {
            let next = self.next.entry((kind, chunk)).or_default();
            self.passes.push(Pass { kind, chunk, microbatch: *next });
            *next += 1;
        }
    }
}

fn gpipe(shape: ScheduleShape, _: u32) -> Vec<Pass> {
    let all = |kind, chunk| (0..shape.microbatches).map(move |microbatch| Pass { kind, chunk, microbatch });
    let forward = (0..shape.chunks).flat_map(|c| all(PassKind::Forward, c));
    forward
        .chain((0..shape.chunks).rev().flat_map(|c| all(PassKind::Backward, ir::fault!("schedule.gpipe.chunk", shape.chunks - 1 - c, c))))
        .collect()
}

/// `warmup` forwards, then a forward and a backward in turn, then the other backwards.
fn alternate(forward: Vec<Pass>, backward: Vec<Pass>, warmup: u32) -> Vec<Pass> {
    let warmup = (warmup as usize).min(forward.len());
    let (steady, cooldown) = backward.split_at(forward.len() - warmup);
    let pairs = forward[warmup..].iter().zip(steady).flat_map(|(f, b)| [*f, *b]);
    forward[..warmup].iter().copied().chain(pairs).chain(cooldown.iter().copied()).collect()
}

fn one_f_one_b(shape: ScheduleShape, stage: u32) -> Vec<Pass> {
    let all = |kind| (0..shape.microbatches).map(|microbatch| Pass { kind, chunk: 0, microbatch }).collect();
    let after = ir::fault!("schedule.one_f_one_b.warmup", stage, shape.stages - stage - 1);
    alternate(all(PassKind::Forward), all(PassKind::Backward), if shape.pairs { 2 * after + 1 } else { after })
}

/// A group of microbatches goes through the virtual stages one after the other, then the next group does.
fn interleaved(shape: ScheduleShape, stage: u32) -> Vec<Pass> {
    let all = |kind: PassKind| {
        let mut out = vec![];
        for first in (0..shape.microbatches).step_by(shape.group as usize) {
            for turn in 0..shape.chunks {
                let chunk = if kind == PassKind::Forward { turn } else { ir::fault!("schedule.interleaved.chunk", turn, shape.chunks - 1 - turn) };
                let end = ir::fault!("schedule.interleaved.end", first + shape.group, (first + shape.group).min(shape.microbatches));
                out.extend((first..end).map(|microbatch| Pass { kind, chunk, microbatch }));
            }
        }
        out
    };
    alternate(
        all(PassKind::Forward),
        all(PassKind::Backward),
        2 * (shape.stages - stage - 1) + (shape.chunks - 1) * shape.group + u32::from(shape.pairs),
    )
}

/// Stage r puts the gradients of parameters off by r microbatches: those of the last stage, which has no cool-down, fill it at its end, and
/// those of the first the gaps between the backward passes of its cool-down.
fn zb_h1(shape: ScheduleShape, stage: u32) -> Vec<Pass> {
    let (m, warmup) = (shape.microbatches, (shape.stages - stage - 1).min(shape.microbatches));
    let pass = |kind, microbatch| Pass { kind, chunk: 0, microbatch };
    let mut out: Vec<Pass> = (0..warmup).map(|k| pass(PassKind::Forward, k)).collect();
    for k in 0..m {
        out.extend((warmup + k < m).then(|| pass(PassKind::Forward, warmup + k)));
        out.push(pass(PassKind::Backward, k));
        out.extend(k.checked_sub(ir::fault!("schedule.zb_h1.weight", stage + 1, stage)).map(|w| pass(PassKind::Weight, w)));
    }
    out.extend((m.saturating_sub(stage)..m).map(|w| pass(PassKind::Weight, w)));
    out
}

/// Fewer microbatches than fill the pipeline are the first of as many as do.
fn zb_v(shape: ScheduleShape, stage: u32) -> Vec<Pass> {
    use PassKind::{Backward as B, Forward as F, Weight as W};
    let (p, r) = (shape.stages, stage);
    let full = shape.microbatches.max(2 * p - 1);
    let mut out = ScheduleBuilder::default();
    out.push(&[(F, 0)], 2 * (p - r) - 1);
    out.push(&[(F, 1), (F, 0)], r);
    out.push(&[(F, 1), (B, 1), (W, 1)], p - r);
    // `begun` counts the microbatches that have begun so far, `turned` those whose forward pass has ended.
    let (begun, turned) = (ir::fault!("schedule.zb_v.begun", 2 * p - r, 2 * p - r - 1), p);
    out.push(&[(F, 0), (B, 0), (W, 0), (F, 1), (B, 1), (W, 1)], full - begun);
    out.push(&[(B, 0), (W, 0), (F, 1), (B, 1), (W, 1)], begun - turned);
    out.push(&[(B, 0), (B, 1)], r);
    out.push(&[(B, 0), (W, 0)], p - r);
    out.push(&[(W, 1)], r);
    out.push(&[(W, 0)], r);
    out.passes.retain(|pass| pass.microbatch < shape.microbatches);
    out.passes
}

/// Fewer microbatches than fill the pipeline are the first of as many as do. The published program puts some
/// gradients of weights off, which fills gaps at the ends; what they read would be kept for them, of experts' rows
/// the whole room.
fn dual_pipe_v(shape: ScheduleShape, stage: u32) -> Vec<Pass> {
    use PassKind::{Backward as B, Forward as F};
    let (p, r) = (shape.stages, stage);
    let full = shape.microbatches.max(2 * p);
    let (above, own) = (p - r - 1, r + 1);
    let mut out = ScheduleBuilder::default();
    out.push(&[(F, 0)], 2 * above);
    out.push(&[(F, 0), (F, 1)], own);
    out.push(&[(B, 1), (F, 1)], above);
    out.push(&[(F, 0), (B, 1), (F, 1), (B, 0)], ir::fault!("schedule.dual_pipe_v.begun", full - 2 * p + r, full - 2 * p + own));
    out.push(&[(B, 1), (F, 1), (B, 0)], above);
    out.push(&[(B, 1), (B, 0)], own);
    out.push(&[(B, 0)], above);
    out.passes.retain(|pass| pass.microbatch < shape.microbatches);
    out.passes
}

#[cfg(test)]
mod tests;
