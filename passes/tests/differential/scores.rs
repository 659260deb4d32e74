//! Attention whose scores get everything: documents, a window, slopes, a bias out of a table, a soft cap, a sink,
//! values of another size.

use crate::harness::{Case, check};
use crate::models::{DEEPSEEK, GPT2, LLAMA, MIXTRAL, case, on};

pub const SCORES: (&str, &[(&str, &str)]) = (
    r#"
model scores(batch, hidden = 16, kv = 2, group = 2, head_dim = 4, value_dim = 6, layers = 2, seq = 16, table = true,
             trained = false, slopes = false) {
  input x0: f32[batch, seq, hidden];
  input ids: i32[batch, seq];
  dim buckets = 8;
  input near: f32[batch, buckets];
  let document = ids % 3;
  param scale: [hidden] ~ normal(1.0);
  fn self_attention(x) {
    dim keys = seq;
    param sink: [kv, group] ~ normal(1.0);
    let q = linear(x, hidden, [kv, group, head_dim], std: 0.5) as q;
    let k = view(linear(x, hidden, [kv, head_dim], std: 0.5) as k, seq -> keys);
    let v = view(linear(x, hidden, [kv, value_dim], std: 0.5) as v, seq -> keys);
    let back = f32(index(keys) - expand(index(seq), keys));
    let bias = expand(back, kv) * (2.0 ^ (-1.0 - index(kv)));
    if table {
      let by_table = near[buckets: (index(keys) + expand(index(seq), keys)) % 8];
      bias = expand(bias, batch) + expand(by_table, kv);
    }
    if trained {
      param relative: [buckets, kv] ~ normal(1.0);
      let learnt = relative[buckets: (expand(index(seq), keys) - index(keys) + 16) % 8];
      bias = bias + learnt;
    }
    if slopes {
      param slope: [group, keys] ~ normal(1.0);
      bias = slope;
    }
    let mask = (same(document, seq, keys) or expand(index(keys), seq) < 3) and within(seq, keys, 9);
    let y = attention(q, k, v, head_dim, keys, mask: mask and causal(seq, keys), bias: bias, cap: 2.0, sink: sink);
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
    on(SCORES, &[("table", "false"), ("slopes", "true")], &["dp2 tp2 m2", "cp2 gather"]);
    check(SCORES.0, &[("table", "false"), ("trained", "true")], &Case { inline_ops: true, ..case("tp2 m2") });
}
