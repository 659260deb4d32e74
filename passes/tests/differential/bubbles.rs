//! Bubbles, warm-up and activations in flight, counted from the programs of compiled jobs.

use crate::harness::compiled;
use crate::models::{GPT2, case};
use ir::pipeline::PassOrder;
use passes::report::pipeline_timeline::{Timeline, UNIT, timeline};

/// GPT-2 with so many layers.
fn of(words: &str, layers: u64) -> Timeline {
    let layers = layers.to_string();
    let defines: Vec<(&str, &str)> = GPT2.1.iter().copied().filter(|d| d.0 != "layers").chain([("layers", layers.as_str())]).collect();
    timeline(&compiled(GPT2.0, &defines, &case(words)).job, UNIT)
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() < 1e-9
}

#[test]
fn bubbles_of_programs_are_those_of_the_papers() {
    for (p, m) in [(2, 4), (3, 9), (4, 8)] {
        let (stages, most) = (p as f64 - 1.0, m as f64);
        for (words, layers, share) in [
            (format!("pp{p} m{m}"), p, stages / most),
            (format!("pp{p} m{m} gpipe"), p, stages / most),
            (format!("pp{p} m{} v2", m - m % p), 2 * p, stages / (2.0 * (m - m % p) as f64)),
            (format!("pp{p} m{m} zbh1"), p, stages / most / 3.0),
            (format!("pp{p} m{m} zbv"), 2 * p, 0.0),
        ] {
            let bubble = of(&words, layers).bubble();
            assert!(close(bubble, share), "{words}: {bubble} instead of {share}");
        }
    }
    let three = of("pp2 m4 v3", 6).bubble();
    assert!(close(three, 1.0 / 12.0), "{three}");
}

#[test]
fn the_schedule_of_a_job_is_a_schedule_file() {
    for words in ["pp2 v2 m4", "pp2 m3 zbv", "pp2 m2 zbh1"] {
        let c = compiled(GPT2.0, GPT2.1, &case(words));
        assert_eq!(PassOrder::parse(&timeline(&c.job, UNIT).text(&c.order)).as_ref(), Ok(&c.order), "{words}");
    }
    let c = compiled(GPT2.0, GPT2.1, &case("pp2 m2"));
    let text = "\
# takes 9, with a bubble of 50.0 % of the work, where a forward pass takes 1, a backward pass 2
# stage 0: 2 forward passes before the first backward pass, 2.0 microbatches in flight, idle for 3 of 9
# stage 1: 1 forward pass before the first backward pass, 1.0 microbatches in flight, idle for 0 of 6
0: F0.0 F0.1 B0.0 B0.1
1: F0.0 B0.0 F0.1 B0.1
";
    assert_eq!(timeline(&c.job, UNIT).text(&c.order), text);
}

#[test]
fn a_pipeline_takes_as_long_as_its_passes_and_its_bubble() {
    // A step takes m + p - 1 forward passes of 1 and as many backward passes of 2.
    assert_eq!(of("pp4 m8", 4).length, 3 * (8 + 3));
    assert_eq!(of("pp4 m8 gpipe", 4).length, 3 * (8 + 3));
    // The last stage has no gap between its passes.
    let idle = |words: &str| of(words, 4).stages.iter().map(|s| s.idle).collect::<Vec<_>>();
    assert_eq!(idle("pp4 m8"), [9, 6, 3, 0]);
}

#[test]
fn stages_warm_up_with_a_forward_pass_for_each_later_stage() {
    // This is one more than Megatron-LM's count, which leaves out the pass right before the first backward pass.
    let warmup = |words: &str, layers| of(words, layers).stages.iter().map(|s| s.warmup).collect::<Vec<_>>();
    assert_eq!(warmup("pp4 m8", 4), [4, 3, 2, 1]);
    assert_eq!(warmup("pp4 m2", 4), [2, 2, 2, 1]);
    assert_eq!(warmup("pp4 m8 gpipe", 4), [8, 8, 8, 8]);
    // There are 2 (p - r - 1) + (v - 1) G passes, and that one.
    assert_eq!(warmup("pp4 v2 m8", 8), [11, 9, 7, 5]);
    assert_eq!(warmup("pp2 v2 m5 group3", 4), [6, 4]);
}

/// SEMANTICS: min(m, p) on the first stage of 1F1B, 1 + (p - 1) / (p v) times as much interleaved; on stage r, r less (interleaved 2 r / v).
#[test]
fn stashes_hold_what_is_in_flight() {
    let kept = |words: &str, layers| of(words, layers).stages.iter().map(|s| s.in_flight).collect::<Vec<_>>();
    for (p, m) in [(2, 1), (2, 5), (3, 4), (4, 3), (4, 8)] {
        let least: Vec<f64> = (0..p).map(|r| m.min(p - r) as f64).collect();
        assert_eq!(kept(&format!("pp{p} m{m}"), p), least, "1F1B: p = {p}, m = {m}");
        assert_eq!(kept(&format!("pp{p} m{m} gpipe"), p), vec![m as f64; p as usize], "GPipe: p = {p}, m = {m}");
        // Operands of weight gradients stay a little longer; on the last stage so do the logits, whose memory their
        // gradient has.
        let mut split: Vec<f64> = kept(&format!("pp{p} m{m} zbh1"), p).iter().map(|n| n.floor()).collect();
        let last = split.last_mut().expect("stages");
        assert!((1.0..=2.0).contains(last), "ZB-H1: p = {p}, m = {m}: {last}");
        *last = 1.0;
        assert_eq!(split, least, "ZB-H1: p = {p}, m = {m}");
        // Apart from that, no stage of a V keeps more than the first one of 1F1B.
        let v = kept(&format!("pp{p} m{m} zbv"), 2 * p);
        let (bound, most) = (m.min(p) as f64, v.iter().copied().fold(0.0, f64::max));
        assert!((bound..bound + 0.1).contains(&most), "ZB-V: p = {p}, m = {m}: {v:?}");
    }
    for (p, v, m) in [(2, 2, 4), (2, 3, 4), (3, 2, 6), (4, 2, 8), (4, 3, 8)] {
        let found = kept(&format!("pp{p} m{m} v{v}"), p * v);
        let first = p as f64 * (1.0 + (p - 1) as f64 / (p * v) as f64);
        let on = |r: u64| first - (2 * r) as f64 / v as f64;
        let (last, others) = found.split_last().expect("stages");
        assert!((0..).zip(others).all(|(r, n)| close(*n, on(r))), "p = {p}, v = {v}, m = {m}: {found:?}");
        // The last stage keeps less, as its backward passes follow their forward passes at once.
        assert!(*last < on(p - 1), "p = {p}, v = {v}, m = {m}: {found:?}");
    }
}
