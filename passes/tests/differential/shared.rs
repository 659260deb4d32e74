//! What several stages or virtual stages have terms of: gradients that are summed over them.

use crate::harness::{Case, check};
use crate::models::{GPT2, case};
use ir::options::{Cuts, Zero};
use ir::pipeline::{PassOrder, Schedule};

/// Layers that share a parameter; what is before them is used after them too.
const SHARED: &str = "
model shared(batch, hidden = 4, features = 3, depth = 4) {
  input feats: [batch, features];
  let first = linear(feats, features, hidden) as embed;
  param scale: [hidden] ~ normal(0.02);
  let x = first;
  repeat depth { x = x + tanh(x * scale); }
  loss sum((x + first) ^ 2);
}
plan { dp: batch; pp: depth; }";

/// What layers capture comes from a parameter and from data: its gradient is no linear function of theirs but on the stage that has both.
const CAPTURED: &str = "
model captured(batch, hidden = 4, vocab = 8, depth = 4) {
  input tokens: i32[batch];
  param wte: [vocab, hidden] ~ normal(0.5);
  let x = wte[vocab: tokens];
  let kept = tanh(x);
  repeat depth { x = x + tanh(x + kept); }
  loss sum(dot(x, wte, over: hidden) ^ 2);
}
plan { dp: batch; pp: depth; }";

#[test]
fn weight_gradients_of_virtual_stages_may_come_in_any_order() {
    for weights in ["W0.0 W0.1 W1.0 W1.1", "W1.1 W0.0 W0.1 W1.0"] {
        for placement in ["", "placement v\n"] {
            let passes = format!("F0.0 F0.1 F1.0 F1.1 B1.0 B1.1 B0.0 B0.1 {weights}");
            let order = PassOrder::parse(&format!("{placement}0: {passes}\n1: {passes}")).expect("a schedule");
            for (text, defines) in [(SHARED, &[] as &[_]), (CAPTURED, &[]), (GPT2.0, GPT2.1)] {
                check(text, defines, &Case { schedule: Schedule::Given(order.clone()), ..case("pp2 m2") });
            }
        }
    }
}

#[test]
fn a_stage_may_have_weight_gradients_alone() {
    check(GPT2.0, GPT2.1, &Case { layout: Cuts::Text("E|tttt|L".into()), ..case("pp3 m3 zbh1") });
    check(SHARED, &[], &Case { layout: Cuts::Text("E|tt|ttL".into()), ..case("pp3 m3 zbh1") });
}

/// The last stage has a term of the embedding's gradient, and not the embedding.
#[test]
fn a_stage_may_add_to_the_gradient_of_a_parameter_that_it_has_not() {
    for zero in Zero::ALL {
        check(SHARED, &[], &Case { zero, ..case("dp2 pp2 m2") });
        check(SHARED, &[], &Case { zero, ..case("dp2 pp4 m4 zbh1") });
    }
}
