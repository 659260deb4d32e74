//! What `explain` says, held to the formulas of Megatron-LM and to the table of a compile.

use crate::counts::EXPERTS;
use crate::harness::{Case, compiled};
use crate::models::{GPT2, MIXTRAL, case};
use ir::mesh::Axis;
use ir::options::MoeBuffer;
use ir::reason::{AvoidedBy, Reason};
use passes::compile::Compiled;
use passes::report::explain::{Exchange, exchanges, line, totals};

const SEQ: u64 = 16;
const HIDDEN: u64 = 32;
const SIZES: &[(&str, &str)] = &[("vocab", "32"), ("hidden", "32"), ("heads", "4"), ("ffn", "64"), ("layers", "4"), ("seq", "16")];

fn on(words: &str) -> Compiled {
    compiled(GPT2.0, SIZES, &case(words))
}

/// Bytes that a rank sends per layer and microbatch along tp, of activations: what eight layers send more than four.
fn per_layer(words: &str) -> u64 {
    let of = |layers: &str| {
        let sizes: Vec<(&str, &str)> = SIZES.iter().copied().filter(|s| s.0 != "layers").chain([("layers", layers)]).collect();
        let found = exchanges(&compiled(GPT2.0, &sizes, &case(words)).job);
        found.iter().filter(|e| e.axis == "tp" && ["forward", "backward"].contains(&e.body.as_str())).map(|e| e.sent_per_step).sum::<u64>()
    };
    (of("8") - of("4")) / 4 / 2
}

/// SEMANTICS: 4 all-reduces' worth of 2 (t-1)/t * sbh each; one more for what is gathered again with sp, and for what recomputation repeats.
#[test]
fn tensor_parallel_bytes_are_those_of_the_formula() {
    let sbh = 4 * SEQ * HIDDEN;
    for t in [2, 4] {
        let reduce = 2 * sbh * (t - 1) / t;
        assert_eq!(per_layer(&format!("tp{t} m2")), 4 * reduce);
        assert_eq!(per_layer(&format!("tp{t} sp m2")), 5 * reduce);
        assert_eq!(per_layer(&format!("tp{t} m2 full1")), 5 * reduce);
        assert_eq!(per_layer(&format!("tp{t} m2 full4")), 6 * reduce - reduce / 4);
    }
}

/// SEMANTICS: sbh per boundary, microbatch and direction, 1/t of it with sp; 2 (d-1)/d of the gradients' bytes.
#[test]
fn pipeline_and_data_parallel_bytes_are_those_of_the_formulas() {
    let sent = |c: &Compiled, axis: &str, kind: &str| {
        let all = totals(&exchanges(&c.job), false);
        all.iter().filter(|((a, k), _)| a == axis && *k == kind).map(|(_, (_, bytes))| *bytes).sum::<u64>()
    };
    let sbh = 4 * SEQ * HIDDEN;
    // An inner stage sends both forward and backward.
    assert_eq!(sent(&on("pp4 m4"), "pp", "send"), 2 * 4 * sbh);
    assert_eq!(sent(&on("pp4 tp2 sp m4"), "pp", "send"), 2 * 4 * sbh / 2);
    let c = on("dp2 m2");
    let parameters: u64 = c.job.params.iter().map(|p| 4 * p.dims.iter().map(|d| d.size).product::<u64>()).sum();
    let gradients = sent(&c, "dp", "all_reduce");
    assert!((parameters..parameters + 64).contains(&gradients), "{gradients} of {parameters}");
}

/// SEMANTICS: 4 * 2 * T k h (e-1)/e in 16 bits for the T tokens of a rank, to experts and back in both passes; and once how many rows go to each expert.
#[test]
fn expert_parallel_bytes_are_those_of_the_formula() {
    let (layers, h, k, experts) = (3, 32, 2, 8);
    let balanced = |words: &str| Case { moe_buffer: MoeBuffer::Factor(1.0), ..case(words) };
    for (words, e, m, t) in [
        ("bf16 dp2 ep2", 2, 1, SEQ),
        ("bf16 dp4 ep4 m3", 4, 3, SEQ),
        ("bf16 dp8 ep4", 4, 1, SEQ),
        ("bf16 cp2 ep2 m2", 2, 2, SEQ / 2),
        ("f16 tp4 sp ep4 etp1 b4", 4, 1, SEQ),
        ("f16 dp2 tp2 sp ep4 etp1 b2", 4, 1, SEQ),
    ] {
        let found = exchanges(&compiled(EXPERTS, &[], &balanced(words)).job);
        let sent: u64 = found.iter().filter(|e| e.kind == "all_to_all").map(|e| e.sent_per_step).sum();
        let (rows, counts) = (4 * 2 * t * k * h * (e - 1) / e, 4 * experts * (e - 1) / e);
        assert_eq!(sent, layers * m * (rows + counts), "{words}");
    }
}

/// SEMANTICS: a ring sends 4 b s h_kv (c-1)/c forward, in 16 bits; and the positions of the keys.
#[test]
fn context_parallel_bytes_are_those_of_the_formula() {
    for c in [2, 4] {
        let found = exchanges(&on(&format!("bf16 cp{c} b2 m3")).job);
        let sent: u64 = found.iter().filter(|e| e.kind == "shift" && e.body == "forward").map(|e| e.sent_per_step).sum();
        let (blocks, positions) = (4 * 2 * SEQ * HIDDEN, 4 * SEQ);
        assert_eq!(sent, 3 * 4 * (blocks + positions) * (c - 1) / c);
    }
}

#[test]
fn every_collective_has_a_reason_and_says_what_would_do_without_it() {
    let of = |words: &str| exchanges(&on(words).job);
    let found: Vec<Exchange> = ["dp2 tp2 pp2 sp m2 full1", "dp2 cp2 pp2 m2", "dp2 cp2 ulysses zero3 m2"].into_iter().flat_map(of).collect();
    for e in &found {
        let why = |r: &Reason| !r.why.is_empty() && r.avoided_by.is_some();
        assert!(e.reason.as_ref().is_some_and(why) && e.members.len() > 1, "{e:?}");
    }
    let reasons: Vec<&Reason> = found.iter().filter_map(|e| e.reason.as_ref()).collect();
    for change in [
        AvoidedBy::NoSequenceParallelism,
        AvoidedBy::NoRecomputation,
        AvoidedBy::NoZero,
        AvoidedBy::SameData(Axis::Dp),
        AvoidedBy::OneRank(Axis::Pp),
        AvoidedBy::OneRank(Axis::Cp),
    ] {
        assert!(reasons.iter().any(|r| r.avoided_by.as_ref() == Some(&change)), "{change:?} avoids nothing");
    }
    assert!(reasons.iter().any(|r| r.why.contains("in one bucket")));
    assert!(found.iter().filter(|e| e.recomputed).all(|e| e.body == "backward"));
}

#[test]
fn a_line_names_what_it_declares_computes_keeps_and_communicates() {
    let c = on("tp2 sp pp2 m2");
    let text = GPT2.0;
    let number = |part: &str| 1 + text.lines().position(|l| l.contains(part)).expect("a line") as u32;
    let file = c.sharded.graph.params[0].span.expect("a place").file;
    let mlp = line(&c.sharded, &c.job, file, number("drop(mlp(")).expect("computes something");
    assert_eq!(mlp.stages, [0, 1]);
    assert!(
        mlp.values.iter().any(|v| v.dims.contains("ffn = 64 / tp")) && mlp.values.iter().any(|v| v.dims.contains("seq = 16 / tp")),
        "{:?}",
        mlp.values
    );
    // Every layer and sequence has two products of 2 * sbh * ffn each, and twice that in the backward pass.
    assert_eq!(mlp.forward_flops, u128::from(4 * 2 * 2 * 2 * SEQ * HIDDEN * 64));
    // The gradients of the norm are contractions, too, and add a little.
    assert!((2 * mlp.forward_flops..2 * mlp.forward_flops + mlp.forward_flops / 32).contains(&mlp.backward_flops), "{}", mlp.backward_flops);
    assert!(mlp.memory.iter().any(|m| m.1 == "activations") && mlp.memory.iter().any(|m| m.1 == "parameters"), "{:?}", mlp.memory);
    assert!(mlp.exchanges.iter().any(|e| e.kind == "all_gather") && mlp.exchanges.iter().any(|e| e.kind == "reduce_scatter"));
    let wte = line(&c.sharded, &c.job, file, number("param wte")).expect("declares something");
    assert_eq!(wte.parameters[0].dims, "[vocab = 32 / tp, hidden = 32]");
    assert_eq!(line(&c.sharded, &c.job, file, 1), None);
}

#[test]
fn of_experts_what_their_rows_cost_is_counted() {
    let (text, sizes) = MIXTRAL;
    let number = 1 + text.lines().position(|l| l.contains("experts_mlp(")).expect("a line") as u32;
    for words in ["b2", "dp2 ep2", "dp2 tp2 sp ep4 etp1"] {
        let c = compiled(text, sizes, &case(words));
        let file = c.sharded.graph.params[0].span.expect("a place").file;
        let experts = line(&c.sharded, &c.job, file, number).expect("computes something");
        // There are two layers, and two of four experts for each of two sequences of four tokens. An expert has three
        // products of 8 x 8, and the two rows are summed with weights.
        let rows = 2 * 2 * 2 * 4;
        assert_eq!(experts.forward_flops, rows * (3 * 2 * 8 * 8 + 2 * 8), "{words}");
        // The gradient of what is summed with weights is a product of elements, which is no contraction.
        assert_eq!(experts.backward_flops, 2 * experts.forward_flops - rows * 2 * 8, "{words}");
    }
}
