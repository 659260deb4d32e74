//! Attention whose scores get everything: documents, a window, slopes, a bias out of a table, a soft cap, a sink,
//! values of another size.

use crate::harness::{Case, check};
use crate::models::{DEEPSEEK, GPT2, LLAMA, MIXTRAL, case, on};
use crate::random::number;
use ir::random::mix;
use std::collections::BTreeSet;

pub const SCORES: (&str, &[(&str, &str)]) = (
    r#"
model scores(batch, hidden = 16, kv = 2, group = 2, head_dim = 4, value_dim = 6, layers = 2, seq = 16,
             ordered = true, window = 9, prefix = 3, documents = true, padding = false, sloped = true, table = true,
             trained = false, columns = false, cap = 2.0, sunk = true, rate = 0.0) {
  input x0: f32[batch, seq, hidden];
  input ids: i32[batch, seq];
  input there: bool[batch, seq];
  dim buckets = 8;
  input near: f32[batch, buckets];
  let document = ids % 3;
  param scale: [hidden] ~ normal(1.0);
  fn self_attention(x) {
    dim keys = seq;
    let q = linear(x, hidden, [kv, group, head_dim], std: 0.5) as q;
    let k = view(linear(x, hidden, [kv, head_dim], std: 0.5) as k, seq -> keys);
    let v = view(linear(x, hidden, [kv, value_dim], std: 0.5) as v, seq -> keys);
    let back = f32(index(keys) - expand(index(seq), keys));
    let bias = expand(back, kv) * (2.0 ^ (-1.0 - index(kv)));
    if not sloped {
      bias = expand(0.01 * back, kv);
    }
    if table {
      let by_table = near[buckets: (index(keys) + expand(index(seq), keys)) % 8];
      bias = expand(bias, batch) + expand(by_table, kv);
    }
    if trained and not columns {
      param relative: [buckets, kv] ~ normal(1.0);
      let learnt = relative[buckets: (expand(index(seq), keys) - index(keys) + 16) % 8];
      bias = bias + learnt;
    }
    if columns {
      param column: [group, keys] ~ normal(1.0);
      bias = column;
    }
    let mask = expand(index(keys), seq) < seq;
    if documents {
      mask = same(document, seq, keys);
    }
    if prefix > 0 {
      mask = mask or expand(index(keys), seq) < prefix;
    }
    if window > 0 {
      mask = mask and within(seq, keys, window);
    }
    if padding {
      mask = mask and expand(view(there, seq -> keys), seq);
    }
    if ordered {
      mask = mask and causal(seq, keys);
    }
    let most = none;
    if cap > 0 {
      most = cap;
    }
    let drain = none;
    if sunk {
      param sink: [kv, group] ~ normal(1.0);
      drain = sink;
    }
    let y = attention(q, k, v, head_dim, keys, mask: mask, bias: bias, cap: most, sink: drain, dropout: rate);
    return linear(y, [kv, group, value_dim], hidden, std: 0.5) as o;
  }
  let x = x0 * scale;
  repeat layers {
    x = x + self_attention(x) as attn;
  }
  loss mean(x * x);
}
train { optimizer: sgd(momentum: 0.0); lr: constant(0.01); }
plan { dp: batch; tp: kv, group; sp: seq; cp: seq; pp: layers; }
"#,
    &[],
);

/// Settings of `SCORES`, of which each is drawn, and what for.
const DRAWN: &[(&str, &[&str])] = &[
    ("ordered", &["true", "true", "false"]),
    ("window", &["0", "1", "5", "9"]),
    ("prefix", &["0", "3"]),
    ("documents", &["false", "true"]),
    ("padding", &["false", "true"]),
    ("sloped", &["false", "true"]),
    ("table", &["false", "false", "true"]),
    ("trained", &["false", "true"]),
    ("columns", &["false", "false", "false", "true"]),
    ("cap", &["0.0", "2.0"]),
    ("sunk", &["false", "true"]),
    ("rate", &["0.0", "0.3"]),
    ("kv", &["2", "4"]),
    ("group", &["1", "2"]),
    ("head_dim", &["4", "6"]),
    ("value_dim", &["4", "6"]),
    ("seq", &["8", "16"]),
];

/// Meshes, each with some way of context parallelism or none.
const MESHES: &[&str] = &[
    "",
    "m2",
    "dp2 m2",
    "tp2",
    "tp2 sp m2",
    "cp2",
    "cp2 m2",
    "cp4",
    "cp2 gather",
    "cp2 ulysses",
    "cp4 both",
    "tp2 cp2 m2",
    "tp2 cp2 gather",
    "tp2 cp2 pp2 sp m2",
    "dp2 cp2 pp2 m2",
    "full2 pp2 m2",
    "selective cp2",
];

/// How many random programs of scores are tried in one run; `make test-long-random` has 2,000.
const PROGRAMS: u64 = 120;

#[test]
fn scores_that_get_everything_agree_on_every_mesh() {
    let cases =
        ["", "m2", "dp2 m2", "tp2", "tp2 sp m2", "pp2 m2", "cp2", "cp2 gather", "cp2 ulysses", "tp2 cp2 m2", "tp2 cp2 pp2 sp m2", "full2 pp2 m2"];
    on(SCORES, &[], &cases);
}

#[test]
fn packed_documents_agree_on_every_mesh() {
    let packed = &[("packed", "true"), ("separator", "3")];
    for model in [GPT2, LLAMA, DEEPSEEK] {
        on(model, packed, &["m2", "dp2 tp2 sp m2", "pp2 m2", "cp2", "cp2 gather m2"]);
    }
    on(LLAMA, packed, &["cp4", "cp2 ulysses tp2 m2", "tp2 cp2 pp2 sp m2"]);
    on(MIXTRAL, packed, &["dp2 ep2", "cp2 tp2 sp ep2 etp2"]);
}

/// Which probabilities are dropped depends on no mesh.
#[test]
fn dropped_probabilities_agree_on_every_mesh() {
    let cases = ["", "m2", "dp2 m2", "tp2 sp m2", "cp2", "cp4 m2", "cp2 ulysses", "cp4 both", "tp2 cp2 pp2 sp m2", "full2 pp2 m2", "selective cp2"];
    on(SCORES, &[("table", "false"), ("rate", "0.3")], &cases);
    on(SCORES, &[("rate", "0.3")], &["dp2 m2", "tp2 cp2 m2"]);
    check(SCORES.0, &[("rate", "0.3")], &Case { inline_ops: true, ..case("m2") });
    for model in [GPT2, LLAMA, DEEPSEEK] {
        on(model, &[("attention_dropout", "0.2")], &["m2", "dp2 tp2 sp m2", "cp2"]);
    }
}

/// Without a number of each pair of positions keys go round.
#[test]
fn scores_without_a_table_agree_in_rings() {
    on(SCORES, &[("table", "false")], &["cp2", "cp4 m2", "tp2 cp2 m2", "dp2 cp2 gather m2", "cp2 pp2 m2"]);
}

#[test]
fn scores_that_get_everything_are_what_the_body_says() {
    check(SCORES.0, SCORES.1, &Case { inline_ops: true, ..case("m2") });
    check(SCORES.0, &[("table", "false")], &Case { inline_ops: true, ..case("tp2 m2") });
}

/// A bias that trains is a number of each pair, whose gradient is summed over what it has no dim of.
#[test]
fn biases_that_train_agree_on_every_mesh() {
    let cases = ["", "m2", "dp2 tp2 m2", "tp2 sp m2", "pp2 m2", "cp2", "cp2 ulysses", "tp2 cp2 pp2 sp m2", "full2 pp2 m2"];
    on(SCORES, &[("table", "false"), ("trained", "true")], &cases);
    on(SCORES, &[("trained", "true")], &["dp2 m2", "tp2 cp2 m2"]);
    on(SCORES, &[("table", "false"), ("columns", "true")], &["dp2 tp2 m2", "cp2 gather"]);
    check(SCORES.0, &[("table", "false"), ("trained", "true")], &Case { inline_ops: true, ..case("tp2 m2") });
}

/// Any mix of what scores can have, on any mesh.
#[test]
fn random_programs_of_scores_agree_on_meshes() {
    let first = number("SCORES_FIRST", 0);
    let mut pairs: BTreeSet<[(&str, &str); 2]> = BTreeSet::new();
    for seed in first..first + number("SCORES_COUNT", PROGRAMS) {
        let mut state = mix(seed);
        let mut pick = |n: usize| {
            state = mix(state);
            (state >> 11) as usize % n
        };
        let drawn: Vec<(&str, &str)> = DRAWN.iter().map(|(name, values)| (*name, values[pick(values.len())])).collect();
        let mesh = MESHES[pick(MESHES.len())];
        let wrong = std::panic::catch_unwind(|| check(SCORES.0, &drawn, &case(mesh)));
        assert!(wrong.is_ok(), "seed {seed}: {drawn:?} on `{mesh}`");
        let with: Vec<(&str, &str)> = drawn.into_iter().chain([("mesh", mesh)]).collect();
        pairs.extend(with.iter().enumerate().flat_map(|(i, a)| with[i + 1..].iter().map(|b| [*a, *b])));
    }
    println!("pairs of features: {}", pairs.len());
}
