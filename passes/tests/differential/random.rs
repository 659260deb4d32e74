//! Random models on random meshes.

use crate::generate::{Triple, triple};
use crate::harness::{Case, Data, Outcome, attempt, check};
use crate::shrink::shrunk;
use ir::op::DType;
use ir::options::{ActivationOffload, CpComm, MemoryOrder, MoeBuffer, Offload, ParamOffload, Recompute, RowChoice, TpOverlap, Zero};
use ir::pipeline::Schedule;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// A number that the environment sets: how much of a test to run.
pub fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).ok().and_then(|s| s.parse().ok()).unwrap_or(default)
}

/// The errors that random models may be refused with, and why they are no fault of the compiler's.
const REFUSALS: &[(&str, &str)] = &[
    ("E0204", "a plan lists dims that its axes do not divide"),
    ("E0502", "all that the losses depend on is frozen"),
    ("E0631", "a sum over the batch is used other than linearly, and there are several microbatches"),
    ("E0636", "rows of the batch meet, and there are several microbatches"),
];

/// The error of an unexpected refusal, or of a missing one.
fn misjudged(Triple { case, whole, .. }: &Triple, outcome: &Outcome) -> Option<String> {
    let many = case.global_batch > case.dp * case.micro_batch;
    let Outcome::Refused(errors) = outcome else {
        return (many && (whole.meets || whole.sums)).then(|| format!("several microbatches have {whole:?}"));
    };
    let wrong = errors.iter().find(|e| match e.code.as_str() {
        "E0631" => !many || !whole.sums,
        "E0636" => !many || !whole.meets,
        code => !REFUSALS.iter().any(|(known, _)| *known == code),
    });
    wrong.map(|e| format!("refused with {}: {}", e.code, e.message))
}

/// The features of a triple.
fn features(Triple { text, case, .. }: &Triple) -> Vec<&'static str> {
    let many = |n: u64| n > 1;
    let has = |words: &[&str]| words.iter().any(|word| text.contains(word));
    let all = [
        ("dp", many(case.dp)),
        ("tp", many(case.tp)),
        ("sp", case.sp && many(case.tp)),
        ("tp overlap", case.tp_overlap != TpOverlap::Off && many(case.tp)),
        ("cp", many(case.cp)),
        ("ring", many(case.cp) && matches!(case.cp_comm, CpComm::Ring | CpComm::AllToAllAndRing) && text.contains("attention(")),
        ("ulysses", many(case.cp) && matches!(case.cp_comm, CpComm::AllToAll | CpComm::AllToAllAndRing) && text.contains("attention(")),
        ("pp", many(case.pp)),
        ("captures", many(case.pp) && ["kept", "curve", "total = total"].iter().any(|name| text.contains(name))),
        ("vpp", case.vpp.is_some_and(many)),
        ("gpipe", many(case.pp) && case.schedule == Schedule::GPipe),
        ("zero-bubble or dualpipev", many(case.pp) && matches!(case.schedule, Schedule::ZbH1 | Schedule::ZbV | Schedule::DualPipeV)),
        ("passes in pairs", case.pairs && case.global_batch > case.dp * case.micro_batch),
        ("given order", many(case.pp) && matches!(case.schedule, Schedule::Given(_))),
        ("bounded rows", case.moe_buffer != MoeBuffer::Whole && many(case.ep)),
        ("passes of rows", many(case.moe_passes) && text.contains("dispatch(")),
        ("experts", text.contains("dispatch(") || text.contains("experts_mlp(")),
        ("ep", many(case.ep)),
        ("etp", case.etp.is_some_and(|n| n != case.tp)),
        ("zero 1", case.zero == Zero::States),
        ("zero 2", case.zero == Zero::Gradients),
        ("zero 3", case.zero == Zero::Params),
        ("replicas", many(case.replicas) && case.zero != Zero::None),
        ("chunks of logits", many(case.logits) && text.contains("token_loss(")),
        ("order for memory", case.memory_order == MemoryOrder::Memory),
        ("offload", case.offload != Offload::Off),
        ("states on a disk", case.offload == Offload::Disk),
        ("parameters on the host", case.offload != Offload::Off && case.param_offload != ParamOffload::Off),
        ("parameters on a disk", case.offload != Offload::Off && case.param_offload == ParamOffload::Disk),
        ("offloaded activations", case.activation_offload != ActivationOffload::Off),
        ("recompute", case.recompute != Recompute::None),
        ("bf16", case.precision == DType::Bf16),
        ("f16", case.precision == DType::F16),
        ("tf32", case.tf32),
        ("split products", many(case.segments)),
        ("random rows", case.rows != RowChoice::Rules),
        ("microbatches", case.global_batch > case.dp * case.micro_batch),
        ("metrics of data", has(&["metric of_data"])),
        ("losses", text.matches("  loss ").count() > 1),
        ("outputs", has(&["\n  output "])),
        ("running sums", has(&["cumsum("])),
        ("argmax", has(&["argmax("])),
        ("states", has(&["  state "])),
        ("states of the end", has(&["  state slow", "  state last", "  state one_ago", "  state both", "  state seen"])),
    ];
    all.into_iter().filter(|f| f.1).map(|f| f.0).collect()
}

/// Features of which a triple has one at most: a pipeline has one schedule, and only 1F1B and GPipe take any number of virtual stages; data-parallel
/// ranks share out one set of things; there is one working precision.
const EXCLUSIVE: &[&[&str]] = &[
    &["tp overlap", "split products"],
    &["gpipe", "zero-bubble or dualpipev", "given order"],
    &["passes in pairs", "gpipe", "given order"],
    &["vpp", "zero-bubble or dualpipev"],
    &["vpp", "given order"],
    &["zero 1", "zero 2", "zero 3"],
    &["bf16", "f16"],
];

/// Pairs of features, by how often they came together.
type Pairs = BTreeMap<(&'static str, &'static str), u64>;

fn run(seed: u64) -> Result<Outcome, String> {
    let Triple { text, case, ranges, whole: _ } = triple(seed);
    let ran = catch_unwind(AssertUnwindSafe(|| attempt(&text, &[], &case, &ranges))).unwrap_or_else(|e| {
        let why = e.downcast_ref::<String>().cloned().or(e.downcast_ref::<&str>().map(|s| s.to_string()));
        Err(format!("panic: {}", why.unwrap_or_default()))
    });
    let judged = ran.and_then(|outcome| misjudged(&triple(seed), &outcome).map_or(Ok(outcome), Err));
    judged.map_err(|e| format!("DIFFERENTIAL_SEED={seed}: {e}\n{case:?}\n{text}"))
}

/// How many triples, and from which seed on: among these every two features meet.
const SAMPLE: (u64, u64) = (400, 200);

/// A sample of triples, or `DIFFERENTIAL_COUNT` from seed `DIFFERENTIAL_FIRST` on. `DIFFERENTIAL_SEED=n` runs the one of
/// seed n alone and prints it; with `SHRINK=1`, if it is wrong, something smaller that is wrong likewise.
#[test]
fn random_models_compute_on_any_mesh_what_the_logical_graph_says() {
    if let Some(seed) = std::env::var("DIFFERENTIAL_SEED").ok().and_then(|s| s.parse().ok()) {
        let Triple { text, case, .. } = triple(seed);
        println!("{case:?}\n{text}");
        if number("SHRINK", 0) > 0 {
            let small = shrunk(triple(seed));
            println!("shrunk to\n{:?}\n{}", small.case, small.text);
        }
        println!("{:?}", run(seed).unwrap_or_else(|e| panic!("{e}")));
        return;
    }
    let (triples, first) = (number("DIFFERENTIAL_COUNT", SAMPLE.0), number("DIFFERENTIAL_FIRST", SAMPLE.1));
    // A short sample may by chance have few of some feature.
    let short = triples < 600 && (triples, first) != SAMPLE;
    let next = AtomicU64::new(first);
    let (failures, refused) = (Mutex::new(vec![]), Mutex::new(vec![]));
    let pairs = Mutex::new(Pairs::new());
    let (blown, exact, full, met) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(2, |n| n.get()) {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= first + triples {
                        break;
                    }
                    let outcome = run(seed);
                    if let Ok(Outcome::Right(_)) = outcome {
                        let random = triple(seed);
                        met.fetch_add(u64::from(random.whole.meets && random.case.global_batch > 1), Ordering::Relaxed);
                        let seen = features(&random);
                        let mut pairs = pairs.lock().expect("no poison");
                        for (k, a) in seen.iter().enumerate() {
                            seen[..=k].iter().for_each(|b| *pairs.entry((*b, *a)).or_default() += 1);
                        }
                    }
                    match outcome {
                        Ok(Outcome::Right(Data::Exact)) => drop(exact.fetch_add(1, Ordering::Relaxed)),
                        Ok(Outcome::Right(Data::Real)) => {}
                        Ok(Outcome::Full(_)) => drop(full.fetch_add(1, Ordering::Relaxed)),
                        Ok(Outcome::NotFinite) => drop(blown.fetch_add(1, Ordering::Relaxed)),
                        Ok(Outcome::Refused(errors)) => refused.lock().expect("no poison").push((seed, errors)),
                        Err(e) => failures.lock().expect("no poison").push((seed, e)),
                    }
                }
            });
        }
    });
    let (mut failures, refused) = (failures.into_inner().expect("no poison"), refused.into_inner().expect("no poison"));
    failures.sort_by_key(|f| f.0);
    let heads: Vec<&str> = failures.iter().map(|f| f.1.lines().next().unwrap_or_default()).collect();
    let shortest = failures.iter().map(|f| &f.1).min_by_key(|text| text.len());
    assert!(failures.is_empty(), "{} of {triples} triples are wrong:\n{}\n{}", failures.len(), heads.join("\n"), shortest.map_or("", |s| s));
    let codes: Vec<String> = refused.iter().map(|(seed, e)| format!("{seed}: {} {}", e[0].code, e[0].message)).collect();
    assert!(short || refused.len() as u64 <= triples / 10, "{} triples are refused:\n{}", refused.len(), codes.join("\n"));
    let (blown, exact, full, met) = (blown.into_inner(), exact.into_inner(), full.into_inner(), met.into_inner());
    let late = refused.iter().filter(|(_, errors)| errors.iter().any(|e| e.code == "E0636")).count() as u64;
    println!("{triples} triples: {exact} exact, {} refused, {blown} not finite, {full} with more rows than room", refused.len());
    println!("rows of the batch meet in {met}, and were refused for several microbatches in {late}");
    let pairs = pairs.into_inner().expect("no poison");
    let names: Vec<&str> = pairs.keys().filter(|p| p.0 == p.1).map(|p| p.0).collect();
    let together = |a: &str, b: &str| pairs.iter().any(|(p, _)| *p == (a, b) || *p == (b, a));
    let excluded = |a: &str, b: &str| EXCLUSIVE.iter().any(|list| list.contains(&a) && list.contains(&b));
    let (mut never, mut by_rule) = (vec![], vec![]);
    for (k, a) in names.iter().enumerate() {
        for b in names[..k].iter().filter(|b| !together(a, b)) {
            if excluded(a, b) { by_rule.push(format!("{b} + {a}")) } else { never.push(format!("{b} + {a}")) }
        }
    }
    println!("{} features, {} pairs seen together", names.len(), pairs.len() - names.len());
    println!("exclude each other: {}", by_rule.join(", "));
    println!("never seen together: {}", never.join(", "));
    assert!(short || names.len() >= 20, "features are missing: only {names:?}");
    assert!(short || never.is_empty(), "pairs of features are never seen together: {never:?}");
    assert!(short || met >= triples / 50 && late >= triples / 200, "rows of the batch meet in {met} and {late}");
    assert!(short || exact >= triples / 6, "only {exact} triples were compared to the last bit");
    assert!(short || full <= triples / 20, "{full} models have more rows than room");
    assert!(short || blown <= triples / 50, "{blown} models leave the finite numbers");
}

/// Split products that could not be shown to be the whole ones, or where the proof broke off: of values that are the
/// same along a dim, of copies whose segments lie otherwise than they, of parts of copies, and sums of views of
/// products.
#[test]
fn what_split_products_came_to_once() {
    for seed in [382, 476, 20182, 21257, 21651, 22400, 22981] {
        run(seed).unwrap_or_else(|e| panic!("{e}"));
    }
}

/// A regression with other rules than the usual ones.
fn on_random_rows(text: &str, case: &Case, seeds: impl IntoIterator<Item = u64>) {
    for seed in seeds {
        check(text, &[], &Case { rows: RowChoice::Random(seed), ..case.clone() });
    }
}

/// All ranks compute the rows of the forward pass, and put them at their places for a backward pass that splits
/// tokens. What 16-bit rows were converted to has the places of the converted value, not of the one before.
#[test]
fn converted_rows_go_to_their_places() {
    let text = "model m(batch, seq = 12, hidden = 4, vocab = 11, experts = 2, expert_ffn = 16, top = 2) {
        input tokens: i32[batch, seq];
        param wte: [vocab, hidden] ~ normal(0.02);
        let x = wte[vocab: tokens];
        let score, chosen = top_k(linear(x, hidden, experts) as router, over: experts, k: top);
        x = x + experts_mlp(x, chosen, score, [batch, seq], top, experts, hidden, expert_ffn) as experts;
        input targets: i32[batch, seq];
        loss token_loss(dot(x, wte, over: hidden), targets, over: vocab);
      }
      plan { sp: seq; ep: experts; etp: expert_ffn; }";
    let case = Case { tp: 2, sp: true, precision: DType::Bf16, ..Case::default() };
    check(text, &[], &case);
    check(text, &[], &Case { ep: 2, etp: Some(1), precision: DType::F16, ..case });
}

/// Elements and their rivals are compared: sums in two orders, which round differently, made an element a rival of itself.
#[test]
fn what_is_compared_with_itself_is_summed_once() {
    let text = "model m(batch, seq = 16, hidden = 8, classes = 3, experts = 8, ffn = 1, top = 1) {
        dim features = 3;
        input feats: [batch, seq, features];
        let x = linear(feats, features, hidden) as embed;
        let logits = linear(x, hidden, experts) as router;
        let score, chosen = top_k(logits, over: experts, k: top);
        let weight = softmax(score, over: top);
        let y = experts_mlp(x, chosen, weight, [batch, seq], top, experts, hidden, ffn) as experts;
        input targets: i32[batch, seq];
        loss token_loss(linear(x + y, hidden, classes, bias: true) as head, targets, over: classes);
      }
      plan { cp: seq; tp: hidden, classes; }";
    on_random_rows(text, &Case { cp: 4, cp_comm: CpComm::AllToAllAndRing, seed: 3538, ..Case::default() }, [90, 94, 101, 134, 137, 153]);
}

/// A rank's part of a gradient lies where its coordinates say, and the update reads a part of that part.
#[test]
fn parts_of_parts_of_gradients_are_found() {
    let text = "model m(batch, seq = 2, hidden = 6, kv = 4, head_dim = 4, depth = 2) {
        input x: [batch, seq, hidden];
        repeat i in depth as layers {
          dim keys = seq;
          let q = linear(x, hidden, [kv, head_dim]) as q;
          let k = view(linear(x, hidden, [kv, head_dim]) as k, seq -> keys);
          let v = view(linear(x, hidden, [kv, head_dim]) as v, seq -> keys);
          x = x + linear(dot(dot(q, k, over: head_dim), v, over: keys), [kv, head_dim], hidden) as o;
        }
        input goal: [batch, seq, hidden];
        loss sum(x * goal);
      }
      plan { dp: batch | hidden; cp: seq; attention.cp: kv; }";
    on_random_rows(text, &Case { dp: 2, cp: 2, global_batch: 2, ..Case::default() }, 0..30);
}

/// In a sum cut into chunks one term is the same in all rows: each chunk is a part of what there was before.
#[test]
fn chunks_of_what_rows_share_are_parts_of_it() {
    let text = "model m(batch, hidden = 4, ffn = 12, classes = 12, experts = 2, expert_ffn = 8, top = 2, depth = 1) {
        fn norm(x) = minimum(maximum(x, -2), 2);
        fn act(x) = where(x > 1, x, 0);
        dim features = 3;
        input feats: [batch, features];
        let x = linear(feats, features, hidden, bias: true) as embed;
        x = norm(x);
        param shared: [hidden] ~ normal(0.02);
        param curved: [hidden] ~ normal(0.02);
        let curve = act(curved * 2);
        repeat i in depth as layers {
          let z = minimum(maximum(x * shared + curve, -3), 3);
          let logits = linear(z, hidden, experts) as router;
          let score, chosen = top_k(logits, over: experts, k: top);
          let weight = minimum(maximum(score, -1), 1);
          let y = experts_mlp(z, chosen, weight, [batch], top, experts, hidden, expert_ffn, act: \"relu\") as experts;
          x = norm(y + linear(act(linear(z, hidden, ffn) as up), ffn, hidden) as beside);
          loss aux = sum(x);
        }
        loss second = sum(linear(x, hidden, classes) as side);
      }
      plan { dp: batch; tp: ffn, classes; }";
    let case = Case { dp: 2, tp: 4, tp_overlap: TpOverlap::Pipeline { chunks: 2 }, micro_batch: 2, global_batch: 4, ..Case::default() };
    on_random_rows(text, &case, [0, 1, 2, 3, 2568]);
}

/// Gradients that stages sum come in one order on all of them, also where one follows from what a bucket of
/// others brings.
#[test]
fn sums_over_stages_keep_their_order_beside_buckets() {
    let text = "model m(batch, seq = 6, hidden = 2, ffn = 4, classes = 2, vocab = 5, depth = 9) {
        fn norm(x) = rms_norm(x, over: hidden);
        input tokens: i32[batch, seq];
        param wte: [vocab, hidden] ~ normal(0.02);
        let x = wte[vocab: tokens];
        dim features = 3;
        input feats: [batch, seq, features];
        x = x + linear(feats, features, hidden, bias: true) as embed;
        x = norm(x) as norm0;
        param shared: [hidden] ~ normal(0.02);
        let y = stop_gradient(x) * 2;
        param curved: [hidden] ~ normal(0.02);
        let curve = tanh(curved * 2);
        fn block(x) {
          let g = tanh(linear(x, hidden, ffn) as gate);
          return linear(g * linear(x, hidden, ffn) as up, ffn, hidden) as down;
        }
        fn beside(x) {
          state centre: [hidden] = 0;
          update centre = centre + tanh(sum(x, over: [batch, seq]));
          return x * stop_gradient(centre);
        }
        repeat i in depth as layers {
          let z = x * shared + curve;
          z = z + beside(norm(z) as norm_beside) as beside;
          x = norm(x + block(z) as part) as norm0;
          y = x - y;
        }
        x = norm(x + y) as last_norm;
        input goal: [batch, seq, classes];
        loss fit = mean(tanh(linear(x, hidden, classes) as guess) * goal);
        loss size_of_embedding = sum(wte * wte);
        metric size = mean(x * x);
      }
      plan { dp: batch | hidden; tp: classes, hidden, ffn, vocab; sp: seq; pp: depth; }";
    let case = Case { dp: 2, tp: 2, pp: 3, sp: true, vpp: Some(3), group: Some(3), micro_batch: 1, global_batch: 6, ..Case::default() };
    on_random_rows(text, &case, [0, 1, 3105]);
}

/// A gradient that is the same along a dim, and a weight that is not, are told apart where both lie in one row
/// of a bucket.
#[test]
fn a_bucket_may_hold_gradients_that_repeat() {
    let text = "model m(batch, seq = 2, hidden = 6, classes = 3) {
        dim features = 3;
        input feats: [batch, seq, features];
        let x = linear(feats, features, hidden, bias: true) as embed;
        loss second = sum(linear(x, hidden, classes) as side);
      }
      train { optimizer: sgd(momentum: 0); weight_decay: 0.25; }
      plan { cp: seq; }";
    for zero in Zero::ALL {
        let case = Case { dp: 2, cp: 2, zero, micro_batch: 1, global_batch: 2, ..Case::default() };
        check(text, &[], &case);
    }
}

/// A state needs the weights too: the update has them from there.
#[test]
fn weights_that_a_state_reads_stay_where_they_are_read() {
    let text = "model m(batch, seq = 6, hidden = 2, vocab = 5, classes = 1, depth = 2) {
        input tokens: i32[batch, seq];
        param wte: [vocab, hidden] ~ normal(0.02);
        let x = wte[vocab: tokens];
        repeat i in depth as layers {
          x = rms_norm(x + tanh(x), over: hidden) as norm;
        }
        input goal: [batch, seq, classes];
        loss fit = mean((linear(x, hidden, classes) as guess - goal) ^ 2);
        state both: [] = 0;
        update both = mean(wte * wte) * mean(x * x) + 0.5 * both;
      }
      plan { dp: batch | hidden; tp: hidden; pp: depth; }";
    let case = Case { dp: 2, pp: 2, zero: Zero::Params, offload: Offload::Optimizer, micro_batch: 1, global_batch: 2, ..Case::default() };
    on_random_rows(text, &case, (0..20).chain([1601]));
}
