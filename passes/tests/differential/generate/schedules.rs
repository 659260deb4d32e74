//! Random pipeline schedules.

use super::Rng;
use ir::options::ActivationOffload;
use ir::pipeline::{Pass, PassKind, PassOrder, Schedule, StagePlacement};
use ir::random::mix;

/// Activations wait on the host in half of the models.
pub const ACTIVATIONS: [ActivationOffload; 4] =
    [ActivationOffload::Off, ActivationOffload::Off, ActivationOffload::Layers(None), ActivationOffload::Layers(Some(1))];

/// A schedule for a number of stages, virtual stages of each and microbatches of a group if it wants some, and a number of microbatches.
pub fn schedule(dice: &mut Rng, pp: u64) -> (Schedule, Option<u64>, Option<u64>, u64) {
    let microbatches = dice.pick(&[1, 2, 2, 3, 4]);
    let vpp = if pp > 1 && dice.chance(40) { Some(dice.pick(&[1, 2, 2, 3])) } else { None };
    match dice.below(20) {
        0..4 => (Schedule::GPipe, vpp, None, microbatches),
        4..11 if vpp.is_some_and(|v| v > 1) => {
            let microbatches = pp + dice.below(4);
            let fits = |g: &u64| microbatches.is_multiple_of(*g) || microbatches % g >= pp;
            let groups: Vec<u64> = (pp..=microbatches).filter(fits).collect();
            let group = dice.pick(&groups);
            let default = fits(&pp) && dice.chance(50);
            (Schedule::OneFOneB, vpp, (!default).then_some(group), microbatches)
        }
        4..11 => (Schedule::OneFOneB, vpp, None, microbatches),
        11..14 => (Schedule::ZbH1, None, None, microbatches),
        14..17 => (Schedule::ZbV, None, None, microbatches),
        _ => (Schedule::Given(order(dice, pp as u32, microbatches as u32)), None, None, microbatches),
    }
}

/// Replaces some schedules with two virtual stages in a V, and decides whether passes run in pairs, which not every
/// order allows.
pub fn pairs(seed: u64, schedule: Schedule) -> (Schedule, bool) {
    let schedule = match schedule {
        Schedule::ZbV if Rng(mix(!seed ^ 12)).chance(50) => Schedule::DualPipeV,
        other => other,
    };
    let paired = matches!(schedule, Schedule::OneFOneB | Schedule::DualPipeV) && Rng(mix(!seed ^ 13)).chance(40);
    (schedule, paired)
}

/// A random valid order: at each turn, a random stage runs a pass whose inputs are there.
fn order(dice: &mut Rng, stages: u32, microbatches: u32) -> PassOrder {
    let (chunks, split) = (dice.pick(&[1, 1, 2]), dice.chance(50));
    let placement = if chunks == 2 && dice.chance(50) { StagePlacement::V } else { StagePlacement::Interleaved };
    let mut order = PassOrder { placement, stages: vec![vec![]; stages as usize] };
    let kinds = if split { &[PassKind::Forward, PassKind::Backward, PassKind::Weight][..] } else { &[PassKind::Forward, PassKind::Backward] };
    let all = chunks * stages;
    let mut done: Vec<(PassKind, u32, u32)> = vec![];
    loop {
        let mut ready = vec![];
        for (kind, g, k) in kinds.iter().flat_map(|kind| (0..all).flat_map(move |g| (0..microbatches).map(move |k| (*kind, g, k)))) {
            let has = |kind, g| done.contains(&(kind, g, k));
            let able = match kind {
                PassKind::Forward => g == 0 || has(PassKind::Forward, g - 1),
                PassKind::Backward => has(PassKind::Forward, g) && (g + 1 == all || has(PassKind::Backward, g + 1)),
                PassKind::Weight => has(PassKind::Backward, g),
            };
            // Messages between two stages keep their order.
            let before = match kind {
                PassKind::Forward => g.checked_sub(1),
                PassKind::Backward => Some(g + 1),
                PassKind::Weight => None,
            };
            let crosses = |from: &u32| *from < all && placement.place(*from, stages).0 != placement.place(g, stages).0;
            let next = |from: u32| done.iter().find(|(of, at, k)| (*of, *at) == (kind, from) && !done.contains(&(kind, g, *k))).map(|d| d.2);
            let in_turn = before.filter(crosses).is_none_or(|from| next(from) == Some(k));
            if able && in_turn && !has(kind, g) {
                ready.push((kind, g, k));
            }
        }
        if ready.is_empty() {
            return order;
        }
        let (kind, g, microbatch) = dice.pick(&ready);
        let (stage, chunk) = placement.place(g, stages);
        order.stages[stage as usize].push(Pass { kind, chunk, microbatch });
        done.push((kind, g, microbatch));
    }
}
