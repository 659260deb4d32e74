use super::*;
use std::collections::BTreeMap;

fn shape(stages: u32, chunks: u32, microbatches: u32) -> ScheduleShape {
    ScheduleShape { stages, chunks, microbatches, group: stages, pairs: false }
}

/// The most microbatches that are in a stage's stash at a time, each from its forward pass to its last pass.
fn in_flight(passes: &[Pass]) -> u32 {
    let last = |p: &Pass| passes.iter().rposition(|q| (q.chunk, q.microbatch) == (p.chunk, p.microbatch)).unwrap();
    let (mut now, mut most) = (0u32, 0);
    for (k, p) in passes.iter().enumerate() {
        now += u32::from(p.kind == PassKind::Forward);
        most = most.max(now);
        now -= u32::from(last(p) == k);
    }
    most
}

/// The most time that a stage is idle between its first and last pass. A pass takes 1, or 2 if it computes all
/// gradients.
fn idle(order: &PassOrder) -> u32 {
    let stages = order.stages.len() as u32;
    let cost = |p: &Pass| if p.kind == PassKind::Backward && !order.splits_backward() { 2 } else { 1 };
    let mut ends: BTreeMap<(PassKind, u32, u32), u32> = BTreeMap::new();
    let virtual_stage = |s: usize, chunk: u32| (0..stages * order.chunks()).find(|g| order.placement.place(*g, stages) == (s as u32, chunk)).unwrap();
    let mut at: Vec<(usize, u32, u32)> = vec![(0, 0, u32::MAX); stages as usize];
    let mut moved = true;
    while std::mem::take(&mut moved) {
        for (s, passes) in order.stages.iter().enumerate() {
            let Some(p) = passes.get(at[s].0) else { continue };
            let (g, k) = (virtual_stage(s, p.chunk), p.microbatch);
            let needs = match p.kind {
                PassKind::Forward if g == 0 => vec![],
                PassKind::Forward => vec![(PassKind::Forward, g - 1, k)],
                PassKind::Backward if g + 1 == stages * order.chunks() => vec![],
                PassKind::Backward => vec![(PassKind::Backward, g + 1, k)],
                PassKind::Weight => vec![],
            };
            let Some(ready) = needs.iter().map(|n| ends.get(n).copied()).collect::<Option<Vec<u32>>>() else { continue };
            let start = ready.into_iter().max().unwrap_or(0).max(at[s].1);
            at[s] = (at[s].0 + 1, start + cost(p), at[s].2.min(start));
            ends.insert((p.kind, g, k), start + cost(p));
            moved = true;
        }
    }
    let work = |s: usize| order.stages[s].iter().map(cost).sum::<u32>();
    (0..stages as usize).map(|s| at[s].1 - at[s].2 - work(s)).max().unwrap()
}

fn text(passes: &[Pass]) -> String {
    passes.iter().map(Pass::to_string).collect::<Vec<_>>().join(" ")
}

#[test]
fn every_generator_makes_an_order_that_can_be_run() {
    for m in 1..10 {
        for p in 1..5 {
            for schedule in [Schedule::GPipe, Schedule::OneFOneB, Schedule::ZbH1] {
                assert_eq!(super::order(&schedule, shape(p, 1, m)).check(m), Ok(()), "{schedule:?} p={p} m={m}");
            }
            assert_eq!(super::order(&Schedule::ZbV, shape(p, 2, m)).check(m), Ok(()), "p={p} m={m}");
            for v in 1..4 {
                assert_eq!(super::order(&Schedule::GPipe, shape(p, v, m)).check(m), Ok(()), "p={p} v={v} m={m}");
                for group in p..=m {
                    if m % group == 0 || m % group >= p {
                        let order = super::order(&Schedule::OneFOneB, ScheduleShape { group, ..shape(p, v, m) });
                        assert_eq!(order.check(m), Ok(()), "p={p} v={v} m={m} group={group}");
                    }
                }
            }
        }
    }
}

/// Both passes of a pair have what they need before either begins, as both are under way until the other ends.
#[test]
fn passes_run_in_pairs() {
    let paired = |schedule: Schedule, shape: ScheduleShape| {
        let order = super::order(&schedule, ScheduleShape { pairs: true, ..shape });
        assert_eq!(order.check(shape.microbatches), Ok(()), "{schedule:?} {shape:?}");
        order.pairs().iter().map(|pairs| pairs.len() as u32).collect::<Vec<_>>()
    };
    // If all forward passes are warm-up, the last one may still pair with the first backward pass.
    let all_but = |all: u32, warmup: u32, pairs: u32| if all > warmup { pairs == all - warmup } else { pairs <= 1 };
    for m in 1..14 {
        for p in 1..6 {
            // All forward passes but those of the warm-up are in pairs.
            let pairs = paired(Schedule::OneFOneB, shape(p, 1, m));
            assert!((0..p).zip(&pairs).all(|(r, n)| all_but(m, 2 * (p - r) - 1, *n)), "p={p} m={m}: {pairs:?}");
            let pairs = paired(Schedule::DualPipeV, shape(p, 2, m));
            if m >= 2 * p {
                let of_stage = |r: u32| 2 * (m - 2 * p + r + 1) + (p - r - 1);
                // There are at least as many pairs as in the published program.
                assert!((0..p).zip(&pairs).all(|(r, n)| *n >= of_stage(r)), "dualpipev p={p} m={m}: {pairs:?}");
            }
            for (v, group) in (2..4).flat_map(|v| (p..=m).map(move |group| (v, group))) {
                if m % group == 0 || m % group >= p {
                    let pairs = paired(Schedule::OneFOneB, ScheduleShape { group, ..shape(p, v, m) });
                    let warmup = |r: u32| 2 * (p - r) - 1 + (v - 1) * group;
                    assert!((0..p).zip(&pairs).all(|(r, n)| all_but(v * m, warmup(r), *n)), "p={p} v={v} m={m} G={group}: {pairs:?}");
                }
            }
        }
    }
    // Without the longer warm-up, both passes of the last stage are of the same microbatch, so there are no pairs.
    let plain = super::order(&Schedule::OneFOneB, shape(3, 1, 6));
    assert_eq!(plain.pairs().iter().map(BTreeMap::len).collect::<Vec<_>>(), [4, 5, 0]);
    assert_eq!(super::order(&Schedule::GPipe, shape(2, 1, 3)).pairs().iter().map(BTreeMap::len).collect::<Vec<_>>(), [0, 1]);
}

#[test]
fn one_f_one_b_warms_up_with_a_forward_for_each_later_stage() {
    let order = super::order(&Schedule::OneFOneB, shape(4, 1, 8));
    let warmup = |s: usize| order.stages[s].iter().position(|p| p.kind == PassKind::Backward).unwrap() - 1;
    assert_eq!([0, 1, 2, 3].map(warmup), [3, 2, 1, 0]);
    assert_eq!([0, 1, 2, 3].map(|s| in_flight(&order.stages[s])), [4, 3, 2, 1]);
    assert_eq!(in_flight(&super::order(&Schedule::GPipe, shape(4, 1, 8)).stages[0]), 8);
}

/// The published example: two stages, five microbatches in groups of three, two virtual stages each.
#[test]
fn interleaving_goes_through_groups_of_microbatches() {
    let order = super::order(&Schedule::OneFOneB, ScheduleShape { group: 3, ..shape(2, 2, 5) });
    let forward: Vec<Pass> = order.stages[0].iter().copied().filter(|p| p.kind == PassKind::Forward).collect();
    assert_eq!(text(&forward), "F0.0 F0.1 F0.2 F1.0 F1.1 F1.2 F0.3 F0.4 F1.3 F1.4");
    // There are 2 (p - r - 1) + (v - 1) G forward passes, then forward and backward passes alternate.
    assert_eq!(text(&order.stages[0][..8]), "F0.0 F0.1 F0.2 F1.0 F1.1 F1.2 B1.0 F0.3");
    assert_eq!(text(&order.stages[1][..6]), "F0.0 F0.1 F0.2 F1.0 B1.0 F1.1");
}

#[test]
fn interleaving_keeps_a_little_more_in_flight() {
    // The expected number is p (1 + (p - 1) / (p v)) stages' worth of 1 / v each, and the pass that just ended.
    let order = super::order(&Schedule::OneFOneB, shape(4, 2, 8));
    assert_eq!(in_flight(&order.stages[0]), 4 * 2 + 3);
}

#[test]
fn the_bubbles_are_those_of_the_papers() {
    for (p, m) in [(2, 4), (4, 8), (3, 9), (8, 16)] {
        // The bubble of 1F1B is (p - 1) / m, with 3 units for a forward and a backward pass.
        assert_eq!(idle(&super::order(&Schedule::OneFOneB, shape(p, 1, m))), 3 * (p - 1), "p={p} m={m}");
        // The interleaved bubble is (p - 1) / (v m), the same time for v times as many passes.
        assert_eq!(idle(&super::order(&Schedule::OneFOneB, shape(p, 2, m - m % p))), 3 * (p - 1), "p={p} m={m}");
        // ZB-H1 idles a third as long as 1F1B, and ZB-V never.
        assert_eq!(idle(&super::order(&Schedule::ZbH1, shape(p, 1, m))), p - 1, "p={p} m={m}");
        assert_eq!(idle(&super::order(&Schedule::ZbV, shape(p, 2, m))), 0, "p={p} m={m}");
        // Here gradients of weights are not deferred.
        assert!(idle(&super::order(&Schedule::DualPipeV, shape(p, 2, m.max(2 * p)))) <= 4 * (p - 1), "p={p} m={m}");
    }
}

#[test]
fn v_shaped_placement_puts_first_and_last_on_one_stage() {
    let of = |placement: StagePlacement| (0..8).map(|g| placement.place(g, 4)).collect::<Vec<_>>();
    assert_eq!(of(StagePlacement::V), [(0, 0), (1, 0), (2, 0), (3, 0), (3, 1), (2, 1), (1, 1), (0, 1)]);
    assert_eq!(of(StagePlacement::Interleaved), [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1), (1, 1), (2, 1), (3, 1)]);
}

#[test]
fn a_printed_schedule_parses_back() {
    for order in [
        super::order(&Schedule::ZbV, shape(3, 2, 5)),
        super::order(&Schedule::OneFOneB, shape(2, 2, 4)),
        super::order(&Schedule::GPipe, shape(1, 1, 2)),
    ] {
        assert_eq!(PassOrder::parse(&order.text()), Ok(order));
    }
}

/// The error of a schedule of two microbatches.
fn wrong(text: &str) -> String {
    match PassOrder::parse(text).and_then(|order| order.check(2)) {
        Ok(()) => "nothing".into(),
        Err(e) => e.to_string(),
    }
}

#[test]
fn a_schedule_from_a_file_is_checked() {
    assert_eq!(wrong("# two stages\n0: F0.0 F0.1 B0.0 B0.1\n1: F0.0 B0.0 F0.1 B0.1\n"), "nothing");
    assert_eq!(wrong(""), "it has no line `0: F0.0 ...`");
    assert_eq!(wrong("0: F0.0\nF0.1"), "line 2: expected `1: F0.0 ...`, the passes of stage 1");
    assert_eq!(wrong("1: F0.0"), "line 1: expected stage 0, found `1`");
    assert_eq!(wrong("0: F0.0 X0.0"), "line 1: `X0.0` is no pass: `F0.3`, `B0.3` and `W0.3` are");
    assert_eq!(wrong("0: F0.0 F+1.0"), "line 1: `F+1.0` is no pass: `F0.3`, `B0.3` and `W0.3` are");
    assert_eq!(wrong("placement w"), "line 1: `w` is no placement: `interleaved` and `v` are");
    assert_eq!(wrong("0: F0.0 F0.2"), "stage 0, pass 2 (F0.2): there are 2 microbatches, from 0");
    assert_eq!(wrong("0: F0.0 F0.0"), "stage 0, pass 2 (F0.0): it is there twice");
    assert_eq!(wrong("0: F0.0 F0.1 B0.0"), "stage 0 has no pass B0.1");
    assert_eq!(wrong("0: F0.0 F0.1 B0.0 B0.1 W0.0"), "stage 0 has no pass W0.1");
    assert_eq!(wrong("0: F0.0 B0.1 B0.0 F0.1"), "stage 0, pass 2 (B0.1): it needs F0.1 of stage 0, which cannot come before it");
    assert_eq!(
        wrong("0: F0.0 B0.0 F0.1 B0.1\n1: F0.1 F0.0 B0.0 B0.1"),
        "stage 0, pass 2 (B0.0): it needs B0.0 of stage 1, which cannot come before it"
    );
    assert_eq!(
        wrong("0: F0.0 F0.1 B0.0 B0.1\n1: F0.1 F0.0 B0.0 B0.1"),
        "stage 1, pass 1 (F0.1): stage 0 runs F0.0 before the pass that this one follows, and messages do not overtake each other"
    );
}
