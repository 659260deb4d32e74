//! Means over a varying number of labels: however they lie in ranks and microbatches, all divide by the same number.

use crate::harness::{Case, Data, Outcome, Range, Ranges, attempt};
use crate::models::{BERT, case};

/// About one in three labels counts in about half of the rows, none in the others.
fn uneven() -> Ranges {
    let range = |below, ignored| Range { below, ignored };
    [("labels", range(3, true)), ("used", range(2, false))].map(|(name, r)| (name.to_owned(), r)).into()
}

fn agrees(text: &str, defines: &[(&str, &str)], data: Data, words: &str) {
    for seed in 1..=4 {
        let case = Case { seed, data, ..case(words) };
        match attempt(text, defines, &case, &uneven()) {
            Ok(Outcome::Right(found)) => assert_eq!(found, data, "{case:?}"),
            other => panic!("{other:?} in {case:?}"),
        }
    }
}

/// The denominator is a power of two that depends on the number of labels, so that a division by it is exact and any other
/// number of labels, as that of one rank or one microbatch, shows.
const POWER_OF_TWO: &str = r#"
model m(batch, seq = 4, width = 4, layers = 2) {
  input x: f32[batch, seq, width];
  input labels: i32[batch, seq];
  input used: i32[batch];
  dim inner = width;
  let keep = labels != -100 and expand(used, seq) == 1;
  let n = sum(f32(keep));
  let some = where(n > 1, 2, 1);
  let many = where(n > 8, 4 * some, some);
  let whole = where(n > 16, 2 * many, many);
  repeat layers {
    x = x + view(relu(linear(x, width, inner) as up), inner -> width);
  }
  loss sum(where(keep, sum(x, over: width), 0)) / whole;
}
train {
  optimizer: sgd(momentum: 0);
  weight_decay: 0;
}
plan {
  dp: batch;
  tp: inner;
  sp: seq;
  pp: layers;
}
"#;

#[test]
fn a_mean_over_uneven_labels_is_exact_on_every_mesh() {
    for words in ["b8", "m8", "dp4 m2", "dp2 m2 b2", "tp2 sp m8", "pp2 m8", "dp2 tp2 pp2 sp m4"] {
        agrees(POWER_OF_TWO, &[], Data::Exact, words);
    }
}

#[test]
fn bert_agrees_with_uneven_labels() {
    for words in ["b4", "m4", "dp2 m2", "tp2 sp m4", "pp2 m4", "dp2 tp2 pp2 sp m2"] {
        agrees(BERT.0, BERT.1, Data::Real, words);
    }
}
