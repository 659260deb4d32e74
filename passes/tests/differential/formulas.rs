//! Golden numbers of the field: parameters and arithmetic of GPT, where layers and embeddings are in a pipeline.

use crate::harness::{Case, compiled, models};
use crate::models::{GPT2, case};
use passes::report::explain::{exchanges, line};
use std::collections::BTreeSet;

/// Billions of parameters as published, hidden size, heads, layers: Table 1 of Megatron-LM, all with 51,200 tokens and sequences of 2,048.
const TABLE: [(f64, u64, u64, u64); 10] = [
    (1.7, 2304, 24, 24),
    (3.6, 3072, 32, 30),
    (7.5, 4096, 32, 36),
    (18.4, 6144, 48, 40),
    (39.1, 8192, 64, 48),
    (76.1, 10240, 80, 60),
    (145.6, 12288, 96, 80),
    (310.1, 16384, 128, 96),
    (529.6, 20480, 128, 105),
    (1008.0, 25600, 160, 128),
];

/// SEMANTICS: 12 l h^2 (1 + 13 / (12 h) + (V + s) / (12 l h)); the norm after the last layer is left out.
#[test]
fn gpt_has_as_many_parameters_as_published() {
    let (v, s) = (51_200, 2_048);
    for (billions, h, heads, l) in TABLE {
        let sizes = [("vocab", v), ("seq", s), ("hidden", h), ("heads", heads), ("layers", l)].map(|(n, x): (&str, u64)| (n, x.to_string()));
        let defines: Vec<(&str, &str)> = sizes.iter().map(|(n, x)| (*n, x.as_str())).collect();
        let graph = models(GPT2.0, &defines, &Case::default()).expect("a model").training.graph;
        let count: u64 = graph.params.iter().map(|p| graph.body.dims.elements(&p.ty.dims)).sum();
        assert_eq!(count, 12 * l * h * h + 13 * l * h + (v + s) * h + 2 * h);
        assert_eq!((count as f64 / 1e8).round() / 10.0, billions);
    }
}

/// Floating-point operations of all lines in a step.
fn flops(words: &str) -> u64 {
    let c = compiled(GPT2.0, SIZES, &case(words));
    let file = c.sharded.graph.params[0].span.expect("a place").file;
    let lines = 1..=GPT2.0.lines().count() as u32;
    let all: u128 = lines.filter_map(|k| line(&c.sharded, &c.job, file, k)).map(|l| l.forward_flops + l.recomputed_flops + l.backward_flops).sum();
    u64::try_from(all).expect("a small model")
}

const SIZES: &[(&str, &str)] = &[("vocab", "64"), ("hidden", "32"), ("heads", "4"), ("ffn", "128"), ("layers", "4"), ("seq", "16")];

/// SEMANTICS: 72 B s l h^2 (1 + s / (6 h) + V / (12 l h)); with full recomputation 96 of it, logits aside, less the second product of
/// the MLP, whose result no gradient needs. Gradients of norms add a little.
#[test]
fn a_step_computes_what_the_formula_says_on_every_mesh() {
    let (v, h, l, s) = (64, 32, 4, 16);
    let products = |batch: u64, per_layer: u64| batch * s * l * (per_layer * h * h + per_layer / 6 * s * h) + 6 * batch * s * h * v;
    let near = |found: u64, wanted: u64, words: &str| assert!((wanted..wanted + wanted / 32).contains(&found), "{words}: {found} of {wanted}");
    for (words, batch) in [("m2", 2), ("tp2 sp m2", 2), ("dp2 tp2 pp2 m2", 4), ("dp2 zero3 m2", 4)] {
        near(flops(words), products(batch, 72), words);
    }
    for words in ["m2 full1", "pp2 m2 full1"] {
        near(flops(words), products(2, 96) - 2 * l * s * 8 * h * h, words);
    }
}

/// SEMANTICS: of 16 layers on 4 stages of 2 virtual ones, the first stage has the layers 1, 2, 9 and 10, the second 3, 4, 11 and 12.
#[test]
fn interleaved_stages_have_every_fourth_pair_of_layers() {
    let defines = [GPT2.1, &[("layers", "16")]].concat();
    let job = compiled(GPT2.0, &defines, &case("pp4 v2 m4")).job;
    let layers = |stage: usize| {
        let names = job.stages[stage].params.iter().map(|p| job.params[*p as usize].name.as_str());
        names.filter_map(|n| n.strip_prefix("layers.")?.split('.').next()?.parse::<u32>().ok()).collect::<BTreeSet<u32>>()
    };
    for stage in 0..4u32 {
        let first = 2 * stage;
        assert_eq!(layers(stage as usize), BTreeSet::from([first, first + 1, first + 8, first + 9]));
    }
}

/// SEMANTICS: the gradient of tied embeddings is summed over the first and the last stage; positions are on the first stage alone.
#[test]
fn embeddings_are_where_they_are_used() {
    let job = compiled(GPT2.0, GPT2.1, &case("tp2 pp4 m4")).job;
    let holds = |name: &str| {
        let has = |stage: &usize| job.stages[*stage].params.iter().any(|p| job.params[*p as usize].name == name);
        (0..4).filter(has).collect::<Vec<usize>>()
    };
    assert_eq!((holds("wte"), holds("wpe")), (vec![0, 3], vec![0]));
    let of_parts = |bytes: u64| exchanges(&job).into_iter().filter(move |e| e.axis == "pp" && e.kind == "all_reduce" && e.bytes == bytes);
    let found: Vec<_> = of_parts(4 * 24 / 2 * 8).collect();
    assert_eq!(found.iter().map(|e| (e.members.clone(), e.calls_per_step)).collect::<Vec<_>>(), [(vec![0, 6], 1)]);
}
