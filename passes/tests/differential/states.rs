//! States, and what rows of a batch have to do with each other: texts of which each was called a bug in mcc.

use crate::harness::{Case, Data, check, compiled};
use crate::models::{case, refused};

/// A model of three layers whose states `rest` says.
fn layers(rest: &str) -> String {
    format!(
        "model m(batch, d = 4, vocab = 6, layers = 4) {{
          input tokens: i32[batch];
          param table: [vocab, d] ~ normal(0.02);
          let x = table[vocab: tokens];
          let first = x;
          repeat layers {{
            param w: [d] ~ normal(0.02);
            x = minimum(maximum(x * w, -2), 2);
          }}
          loss sum(x * x);
          {rest}
        }}
        train {{ optimizer: sgd(momentum: 0.5); clip: 0.0; }}
        plan {{ dp: batch; tp: vocab; pp: layers; }}"
    )
}

const MESHES: [&str; 8] = ["b2", "m2", "dp2 m2 zero1", "tp2 m2", "pp2 m2", "dp2 pp2 m2 zero3", "tp2 pp4 m4 zero2", "pp2 v2 m2"];

#[test]
fn states_take_what_others_were() {
    let texts = [
        "state one: [d] = 0; state two: [d] = 1; update one = two; update two = one; metric turned = sum(one * two);",
        "state one: [d] = 0; state two: [d] = 1; update one = sum(x, over: batch); update two = one; metric turned = sum(one * two);",
        "state one: [d] = 0; state two: [d] = 1; update one = one + 1; update two = one; metric turned = sum(one - two);",
    ];
    for text in texts {
        MESHES.iter().for_each(|words| check(&layers(text), &[], &case(words)));
    }
}

#[test]
fn states_follow_weights_and_values_of_any_stage() {
    let texts = [
        "state slow: [vocab, d] = 0; update slow = 0.5 * slow + 0.5 * table; metric far = sum(abs(table - slow));",
        "state slow: [vocab, d] = 0; update slow = table; metric far = sum(x * slow[vocab: tokens]);",
        "state mean: [d] = 0; update mean = sum(x, over: batch); metric far = sum(first * mean);",
        "state mean: [d] = 0; update mean = sum(first, over: batch); metric far = sum(x * mean);",
        "state both: [d] = 0; update both = sum(first, over: batch) + sum(x, over: batch) + both; metric far = sum(both);",
        "state both: [] = 0; update both = maximum(sum(first), sum(x)) + both; metric far = both;",
        "state near: [] = 0; update near = sum(first); metric far = near;",
        "param scale: [] ~ normal(0.5); loss scaled = sum(x * scale); metric far = scale;",
        "param scale: [] ~ normal(0.5); loss scaled = sum(first * scale); state both: [] = 0; update both = maximum(scale, sum(x)); metric far = both;",
        "state both: [] = 0; update both = sum(table) * sum(x) + both; metric far = both;",
    ];
    for text in texts {
        MESHES.iter().for_each(|words| check(&layers(text), &[], &case(words)));
    }
}

/// An average of weights is where they are, not on every stage.
#[test]
fn a_state_that_updates_alone_read_is_on_the_stages_of_what_it_follows() {
    let text =
        layers("state slow: [vocab, d] = 0; update slow = 0.5 * slow + 0.5 * table; state slower: [vocab, d] = 0; update slower = slow + slower;");
    let c = compiled(&text, &[], &case("pp2 m2"));
    let held: Vec<usize> = c.locals.iter().map(|l| l.params.len()).collect();
    assert_eq!(held, [5, 2]);
}

#[test]
fn a_sum_of_running_sums_has_its_gradient() {
    let text = "model m(batch, seq = 12) {
        input x: f32[batch, seq];
        param w: [seq] ~ normal(0.5);
        let y = tanh(x * w);
        loss sum(cumsum(y, over: seq)) + sum(y * dot(exp(-0.1 * index(seq)), expand(index(seq), seq_too), over: seq));
      }
      plan { dp: batch; tp: seq; }";
    let text = text.replace("let y", "dim seq_too = seq; let y").replace("sum(y * dot", "sum(view(y, seq -> seq_too) * dot");
    for words in ["b2", "m2", "dp2 tp2"] {
        check(&text, &[], &Case { data: Data::Real, ..case(words) });
    }
}

/// Behind the last element a running sum is what all of them come to.
#[test]
fn a_running_sum_is_not_zero_in_padding() {
    let text = "model m(batch, d = 4, classes = 6) {
        input x: f32[batch, d];
        param rows: [classes, d] ~ normal(0.5);
        let side = tanh(dot(x, rows, over: d));
        loss sum(cumsum(side, over: classes)) + sum(x * rows[classes: argmax(side, over: classes)]);
      }
      plan { dp: batch; tp: classes; }";
    for words in ["b2", "tp4 m2", "dp2 tp4"] {
        check(text, &[], &Case { data: Data::Real, ..case(words) });
    }
}

/// A plain sum has ones for gradient: of a product with them, cut into chunks, nothing tells one chunk from another.
#[test]
fn rows_that_are_all_alike_are_not_cut() {
    let text = "model m(batch, seq = 4, hidden = 4, classes = 6, layers = 1) {
        input x: f32[batch, seq, hidden];
        param w: [hidden] ~ normal(0.5);
        let y = x * w;
        repeat layers {
          y = minimum(maximum(y, -3), 3);
        }
        loss sum(linear(y, hidden, classes) as second);
      }
      plan { dp: batch; tp: classes; sp: seq; }";
    for words in ["tp3 chunks2", "tp2 sp chunks2 m2", "bf16 tp3 chunks2", "dp2 tp2 chunks2"] {
        check(text, &[], &Case { data: Data::Real, ..case(words) });
    }
}

/// Draws are numbered by the model's own dims, whatever a mesh makes of those.
#[test]
fn what_is_drawn_is_the_same_with_padding() {
    let text = "model m(batch, seq = 4, hidden = 6, vocab = 5) {
        input tokens: i32[batch, seq];
        param wte: [vocab, hidden] ~ normal(0.5);
        param row: [hidden] ~ normal(0.5);
        let x = dropout(wte[vocab: tokens], 0.5);
        loss sum(x * x * row[hidden: argmax(x, over: hidden)]);
      }
      plan { dp: batch; tp: hidden; }";
    for words in ["b2", "tp2", "tp4 m2", "dp2 tp8"] {
        check(text, &[], &Case { data: Data::Real, ..case(words) });
    }
}

/// What a metric makes of sums over the batch is computed when all microbatches are behind.
#[test]
fn metrics_make_anything_of_sums_over_the_batch() {
    let texts = [
        "metric one = exp(sum(x * x) / 64);",
        "metric one = sqrt(sum(x * x) + 1); metric two = sum(x) / (1 + sum(abs(x))) + 3;",
        "metric one = maximum(sum(x), sum(first));",
        "metric one = max(tanh(sum(x, over: batch)) * sum(table, over: vocab));",
        "metric one = tanh(sum(x)); state seen: [] = 0; update seen = seen + exp(sum(x) / 64); metric two = seen;",
        "let all = sum(x * first); loss other = all * 2; metric one = all ^ 2;",
    ];
    for text in texts {
        MESHES.iter().for_each(|words| check(&layers(text), &[], &Case { data: Data::Real, ..case(words) }));
    }
}

/// What a dim is a part of, or is made of, says how long it is: it is not padded, whoever looks rows up in it.
#[test]
fn what_is_measured_by_others_is_not_padded() {
    let text = "model m(batch, hidden = 6, vocab = 5) {
        dim both = 2 * hidden, other = hidden, pair = 2, half = hidden / 2;
        input tokens: i32[batch];
        param wte: [vocab, hidden] ~ normal(0.5);
        param row: [hidden] ~ normal(0.5);
        param rest: [half] ~ normal(0.5);
        let x = wte[vocab: tokens];
        let y = concat(x, tanh(linear(x, hidden, other) as side), [hidden, other] -> both);
        let z = view(x, hidden -> [pair, half]) * rest[half: argmax(view(x, hidden -> [pair, half]), over: half)];
        loss sum(tanh(linear(y, both, hidden) as back) * row[hidden: argmax(x, over: hidden)]);
        loss halves = sum(tanh(z));
      }
      plan { dp: batch; tp: hidden; }";
    for words in ["b2", "tp4 m2", "dp2 tp4"] {
        check(text, &[], &Case { data: Data::Real, ..case(words) });
    }
}

/// A mean that layers add to is a sum of sums, whatever stage each is on.
#[test]
fn sums_over_the_batch_go_through_layers() {
    let text = "model m(batch, hidden = 4, ffn = 6, layers = 4) {
        input x: f32[batch, hidden];
        let h = x;
        let total = expand(0.0, []);
        let greatest = expand(0.0, []);
        repeat layers {
          h = h + mlp(h, hidden, ffn) as mlp;
          total = total + mean(h ^ 2);
          greatest = greatest + sum(abs(h));
        }
        loss size = 0.1 * total;
        loss main = mean(abs(h));
        metric greatest = sqrt(greatest);
      }
      plan { dp: batch; tp: ffn; pp: layers; }";
    for words in MESHES {
        check(text, &[], &Case { data: Data::Real, ..case(words) });
    }
}

/// Which way Lion goes is one mean of gradients, and what it keeps another.
#[test]
fn lion_goes_the_same_way_on_any_mesh() {
    let text = layers("").replace("sgd(momentum: 0.5); clip: 0.0;", "lion(betas: [0.5, 0.75]); weight_decay: 0.25;");
    for words in MESHES.into_iter().chain(["dp2 zero2 offload", "bf16 dp2 m2 zero1", "pp2 m2 zbh"]) {
        check(&text, &[], &case(words));
    }
}

#[test]
fn what_asks_for_the_whole_batch_needs_one_microbatch() {
    let model =
        |rest: &str| format!("model m(batch, d = 4) {{ input x: f32[batch, d]; param w: [d] = 1; let z = x * w; {rest} }} plan {{ dp: batch; }}");
    let texts = [
        ("state rows: [batch, d] = 0; update rows = z; loss sum(z * rows);", "E0636"),
        ("param rows: [batch, d] = 0; loss sum(z * rows);", "E0636"),
        ("dim slots = batch; state rows: [slots, d] = 0; update rows = view(z, batch -> slots); loss sum(dot(z, rows, over: d));", "E0636"),
        ("dim other = batch; loss sum(z * view(z, batch -> other)[other: batch - 1 - index(batch)]);", "E0636"),
        ("loss sum(z * z); metric deviation = sqrt(mean((x - mean(x)) ^ 2));", "E0631"),
    ];
    for (rest, code) in texts {
        assert!(refused((&model(rest), &[]), &[], "m2").iter().all(|e| e == code), "{rest}");
        ["b4", "dp2", "dp2 b2"].iter().for_each(|words| check(&model(rest), &[], &Case { data: Data::Real, ..case(words) }));
    }
    let apart = "loss sum(z * z); metric deviation = sqrt(mean(x ^ 2) - mean(x) ^ 2);";
    check(&model(apart), &[], &Case { data: Data::Real, ..case("dp2 m2") });
}
