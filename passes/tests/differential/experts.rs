//! Rows of experts: whatever a model does with dispatched values is what the dense values are.

use crate::harness::{Case, Data, Outcome, Range, Ranges, attempt, compiled};
use crate::models::{DEEPSEEK, case};
use ir::options::{MoeBuffer, RowChoice, Zero};

/// Models from a dispatch to the losses, for arbitrary choices: an expert may be chosen twice or never, and a choice
/// may be no expert's.
fn model(what: &str) -> String {
    format!(
        "model m(batch, seq = 4, hidden = 4, experts = 4, picks = 2, ffn = 4) {{
          input x0: f32[batch, seq, hidden];
          input chosen: i32[batch, seq, picks];
          input w: f32[batch, seq];
          param scale: [hidden] ~ normal(0.02);
          param prob: [seq, experts] ~ normal(0.02);
          param up, bias: [experts, hidden, ffn] ~ normal(0.02);
          param down: [experts, ffn, hidden] ~ normal(0.02);
          loss used = mean(prob) + mean(up) + mean(bias) + mean(down);
          dim slot;
          let x = x0 * scale;
          let h = dispatch(x, chosen, over: [batch, seq, picks], into: [experts, slot]);
          {what}
        }}
        plan {{ dp: batch; sp: seq; ep: experts; etp: ffn; }}"
    )
}

const BACK: &str = "let y = combine(z, chosen, over: [batch, seq, picks], from: [experts, slot]);
  loss mean(y * y);";

fn agrees_on(text: &str, words: &str, below: u64) {
    let ranges: Ranges = [("chosen".to_string(), Range { below, ignored: false })].into();
    let data = [Data::Real, Data::Exact];
    let all = data.into_iter().flat_map(|data| [RowChoice::Rules, RowChoice::Random(1), RowChoice::Random(2)].map(|rows| (data, rows, 1, "4")));
    // Longer sequences are needed here, as a pass has room for at least eight rows.
    let in_passes = [(Data::Exact, 2), (Data::Real, 2), (Data::Real, 4)].map(|(data, passes)| (data, RowChoice::Rules, passes, "16"));
    for (data, rows, moe_passes, seq) in all.chain(in_passes) {
        let moe_buffer = if moe_passes == 1 { MoeBuffer::Whole } else { MoeBuffer::Factor(2.0 / moe_passes as f64) };
        let case = Case { data, rows, moe_buffer, moe_passes, seed: 7 + below, ..case(words) };
        match attempt(text, &[("seq", seq)], &case, &ranges) {
            Ok(Outcome::Right(_) | Outcome::NotFinite) => {}
            other => panic!("{other:?} in {case:?} with sequences of {seq}\n{text}"),
        }
    }
}

fn agrees(what: &str) {
    agrees_at_once(what);
    agrees_on(&model(what), "dp2 ep2 m2", 6);
}

/// Runs with the whole batch in one microbatch.
fn agrees_at_once(what: &str) {
    for words in ["b2", "dp2 tp2 sp ep2", "dp2 tp2 sp ep4 etp1", "tp2 sp ep2 etp1 b2", "tp2 sp b2"] {
        agrees_on(&model(what), words, 6);
    }
}

#[test]
fn experts_with_weights_and_biases_of_their_own() {
    agrees(&format!("let a = maximum(dot(h, up, over: hidden) + sum(bias, over: hidden), 0); let z = dot(a * a, down, over: ffn); {BACK}"));
}

#[test]
fn rows_times_what_tokens_and_experts_have() {
    agrees(&format!("let z = h * w + h * prob + dot(h, sum(up, over: ffn), over: hidden); {BACK}"));
}

#[test]
fn rows_in_losses_without_a_combination() {
    agrees("let a = dot(h, up, over: hidden); loss mean(a * a); loss part = mean(sum(a * w, over: experts) ^ 2);");
    agrees_at_once("let a = dot(h, up, over: hidden); loss mean(sum(a * h[hidden: 1], over: [batch, seq]) ^ 2);");
}

#[test]
fn what_is_not_zero_where_there_is_no_row_is_dense() {
    agrees(&format!("let z = dot(exp(minimum(dot(h, up, over: hidden), 1)), down, over: ffn); loss all = 0.5 * mean(z); {BACK}"));
    agrees_at_once(&format!(
        "let a = dot(h, up, over: hidden) + 1; loss most = mean(max(a, over: [batch, seq])); let z = dot(a, down, over: ffn); {BACK}"
    ));
}

#[test]
fn rows_of_two_routings_meet() {
    let other = "let other = dispatch(x * 2, 3 - chosen, over: [batch, seq, picks], into: [experts, slot]);";
    agrees(&format!("{other} let z = h * other + h; {BACK}"));
}

#[test]
fn all_tokens_may_choose_one_expert() {
    let text = model(&format!("let z = dot(maximum(dot(h, up, over: hidden), 0), down, over: ffn); {BACK}"));
    for words in ["b2", "dp2 ep2 m2", "dp2 tp2 sp ep4 etp1"] {
        agrees_on(&text, words, 1);
        agrees_on(&text, words, 2);
    }
}

/// 16 tokens on each of two ranks have two choices each, all among the two experts of the first rank.
fn with_room(factor: f64, zero: Zero) -> Outcome {
    let text = model(&format!("let z = dot(maximum(dot(h, up, over: hidden), 0), down, over: ffn); {BACK}"));
    let ranges: Ranges = [("chosen".to_string(), Range { below: 2, ignored: false })].into();
    let case = Case { moe_buffer: MoeBuffer::Factor(factor), zero, ..case("dp2 ep2") };
    attempt(&text, &[("seq", "16")], &case, &ranges).unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn more_rows_than_there_is_room_for_stop_the_step() {
    for zero in Zero::ALL {
        match with_room(1.0, zero) {
            Outcome::Full(e) => {
                let told =
                    e.starts_with("rank ") && e.contains("limit of 16") && e.contains(" is more than 16: rows from a rank to a group of experts");
                assert!(told, "{e}");
            }
            other => panic!("{zero:?}: {other:?}"),
        }
    }
}

/// All of four passes with room for eight rows each are needed if all tokens choose one rank's experts.
#[test]
fn passes_have_room_for_any_choice_together() {
    let text = model(&format!("let z = dot(maximum(dot(h, up, over: hidden), 0), down, over: ffn); {BACK}"));
    let ran = |moe_passes: u64, below: u64, seed: u64| {
        let ranges: Ranges = [("chosen".to_string(), Range { below, ignored: false })].into();
        let case = Case { moe_buffer: MoeBuffer::Factor(0.5), moe_passes, seed, ..case("dp2 ep2") };
        attempt(&text, &[("seq", "16")], &case, &ranges).unwrap_or_else(|e| panic!("{e}"))
    };
    for below in [1, 2] {
        let ran = ran(4, below, 1);
        assert!(matches!(ran, Outcome::Right(_)), "{ran:?}");
    }
    match ran(3, 2, 1) {
        Outcome::Full(e) => assert!(e.contains(" is more than 24: rows from a rank to a group of experts"), "{e}"),
        other => panic!("{other:?}"),
    }
}

/// Where choices come from: all experts or few, those of one rank alone, one, some of none.
const ROUTINGS: [&str; 8] =
    ["chosen", "3 - chosen", "minimum(chosen, 1)", "maximum(chosen, 2)", "chosen * 0 + 3", "chosen - 1", "chosen * 2", "maximum(chosen, 3)"];

/// Balanced routers need two passes or more of these, others up to all. Results are those of all rows at once, to the
/// bit.
#[test]
fn five_hundred_routings_lose_no_row_in_passes() {
    let meshes = ["dp2 ep2", "dp2 tp2 sp ep2", "tp2 sp ep2 etp1 b2", "dp2 ep4 etp1 tp2 b2", "b2"];
    let attempted = |seed: u64| {
        let (routing, below, moe_passes) = (ROUTINGS[(seed % 8) as usize], 1 + seed % 5, 2 + seed / 8 % 3);
        let z = "let z = dot(maximum(dot(h, up, over: hidden), 0), down, over: ffn)";
        let text = model(&format!("{z}; {BACK}")).replace("dispatch(x, chosen", "dispatch(x, to").replace("combine(z, chosen", "combine(z, to");
        let text = text.replace("dim slot;", &format!("let to = {routing}; dim slot;")).replace("mean(", "sum(");
        let text = format!("{text} train {{ optimizer: sgd(momentum: 0.5); clip: 0.0; weight_decay: 0.0; }}");
        let ranges: Ranges = [("chosen".to_string(), Range { below, ignored: false })].into();
        let moe_buffer = MoeBuffer::Factor(2.0 / moe_passes as f64);
        let case = Case { data: Data::Exact, moe_buffer, moe_passes, seed, ..case(meshes[(seed % 5) as usize]) };
        match attempt(&text, &[("seq", "16")], &case, &ranges) {
            Ok(Outcome::Right(Data::Exact)) => {}
            other => panic!("{other:?} of {routing} below {below} in {case:?}"),
        }
    };
    std::thread::scope(|scope| {
        for part in 0..2 {
            scope.spawn(move || (0..500).filter(|seed| seed / 8 % 2 == part).for_each(attempted));
        }
    });
}

#[test]
fn room_for_all_is_room_for_any_choice() {
    assert!(matches!(with_room(2.0, Zero::States), Outcome::Right(_)));
}

/// Tokens times experts, and elements times slots, may be large numbers.
#[test]
fn rows_of_published_sizes_are_proved() {
    let sizes = [("layers", "2"), ("first_dense", "1")];
    for words in ["dp128 ep64", "dp1024 ep4 zero1"] {
        let job = compiled(DEEPSEEK.0, &sizes, &case(words)).job;
        assert!(job.params.iter().any(|p| p.dims.iter().map(|d| d.size).product::<u64>() == 256 * 7168 * 2048), "{words}");
    }
}
