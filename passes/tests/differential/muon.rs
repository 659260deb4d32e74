//! Muon on any mesh: matrices of heads, of experts and of routers, and what is none.

use crate::harness::{check, compiled};
use crate::models::{DEEPSEEK, GPT2, LLAMA, MIXTRAL, T5, case};
use ir::graph::Graph;
use ir::matrix;
use passes::report::footprint::{Footprint, MemoryCategory};
use passes::report::matrices;

/// The rule of `models/` replaced.
fn by_muon(text: &str, rule: &str) -> String {
    let Some(from) = text.find("optimizer:") else { return format!("{text} train {{ optimizer: {rule}; }}") };
    let to = from + text[from..].find(';').expect("a setting ends");
    format!("{}optimizer: {rule}{}", &text[..from], &text[to..])
}

fn graph((text, defines): (&str, &[(&str, &str)])) -> Graph {
    compiled(&by_muon(text, "muon()"), defines, &case("")).graph
}

/// `q: 1x8x16`: a name without the layer's number, and how many matrices of how many inputs and outputs.
fn matrices(graph: &Graph) -> Vec<String> {
    let elements = |dims: &[ir::dim::Dim]| graph.body.dims.elements(dims);
    let mut out: Vec<String> = vec![];
    for (p, m) in graph.params.iter().zip(matrix::hidden(graph)) {
        let shape = m.map_or("adamw".to_string(), |m| format!("{}x{}x{}", elements(&m.batch), elements(&m.inputs), elements(&m.outputs)));
        let name: Vec<&str> = p.name.split('.').filter(|part| part.parse::<u32>().is_err()).collect();
        let line = format!("{}: {shape}", name.join("."));
        if !out.contains(&line) {
            out.push(line);
        }
    }
    out
}

#[test]
fn products_say_what_is_a_matrix() {
    let gpt2 = matrices(&graph(GPT2));
    for line in ["layers.attn.q.w: 1x8x8", "layers.attn.o.w: 1x8x8", "layers.mlp.up.w: 1x8x16", "layers.mlp.down.w: 1x16x8", "layers.attn.q.b: adamw"]
    {
        assert!(gpt2.iter().any(|l| l == line), "{line}: {gpt2:?}");
    }
    for line in ["wte: adamw", "wpe: adamw", "ln_f.w: adamw"] {
        assert!(gpt2.iter().any(|l| l == line), "{line}: {gpt2:?}");
    }
    let llama = matrices(&graph(LLAMA));
    for line in ["head: adamw", "embed: adamw", "layers.attn.k.w: 1x8x8", "layers.attn.o.w: 1x16x8"] {
        assert!(llama.iter().any(|l| l == line), "{line}: {llama:?}");
    }
    let mixtral = matrices(&graph(MIXTRAL));
    assert!(mixtral.iter().any(|l| l.ends_with(": 4x8x8")) && mixtral.iter().any(|l| l.ends_with(": 1x8x4")), "{mixtral:?}");
    let deepseek = matrices(&graph(DEEPSEEK));
    for line in ["layers.attn.kv_a.w: 1x8x4", "layers.moe.router.w: 1x8x8", "layers.moe.experts.down: 8x4x8", "head: adamw"] {
        assert!(deepseek.iter().any(|l| l == line), "{line}: {deepseek:?}");
    }
    // The output layer reads the embedding, too, so AdamW updates it.
    let t5 = matrices(&graph(T5));
    for line in ["embed: adamw", "encoder.relative: adamw", "decoder.layers.cross.k.w: 1x8x8"] {
        assert!(t5.iter().any(|l| l == line), "{line}: {t5:?}");
    }
    let given = by_muon(LLAMA.0, "muon()").replace("train {", "train { group \"layers.attn.*\" { muon: false; }");
    let given = matrices(&compiled(&given, LLAMA.1, &case("")).graph);
    assert!(given.iter().any(|l| l == "layers.attn.q.w: adamw") && given.iter().any(|l| l == "layers.mlp.up.w: 1x8x12"), "{given:?}");
}

/// Bytes of optimizer states per rank.
#[test]
fn ranks_share_momentum_out() {
    let text = by_muon(GPT2.0, "muon()");
    let sizes = [("vocab", "64"), ("hidden", "64"), ("heads", "4"), ("ffn", "128"), ("layers", "2"), ("seq", "4")];
    let states = |words: &str| {
        let c = compiled(&text, &sizes, &case(words));
        let held = Footprint::of(&c.job, 0);
        [MemoryCategory::Optimizer, MemoryCategory::Gradients].map(|kind| held.bytes[&kind])
    };
    let [whole, gradients] = states("dp2 m2");
    for words in ["dp2 m2 zero1", "dp2 m2 zero2", "dp2 m2 zero3"] {
        let [half, of_gradients] = states(words);
        assert!(half * 2 < whole + whole / 10, "{words}: {half} of {whole} bytes of states");
        // With zero1, the scattered gradients are kept beside the accumulated ones.
        let most = if words.ends_with("zero1") { gradients * 3 / 2 } else { gradients * 6 / 10 };
        assert!(of_gradients <= most, "{words}: {of_gradients} of {gradients} bytes of gradients");
    }
}

/// Matrices, places, and places of a rank; and a rank's share of operations and states, in percent.
fn shared(text: &str, sizes: &[(&str, &str)], words: &str) -> ([u64; 3], [u64; 2]) {
    let c = compiled(text, sizes, &case(words));
    let m = matrices::matrices(&c.graph, &c.locals).expect("matrices");
    ([m.count, m.places, m.of_rank], [m.operations, m.bytes].map(|[own, all]| 100 * own / all))
}

/// Each layer has three matrices of one kind, and one each of three others.
#[test]
fn each_matrix_belongs_whole_to_one_rank() {
    let text = by_muon(GPT2.0, "muon()");
    let sizes = |layers| [("vocab", "16"), ("hidden", "16"), ("heads", "4"), ("ffn", "32"), ("layers", layers), ("seq", "4")];
    for zero in ["zero1", "zero2", "bf16 zero1"] {
        let of = |mesh: &str, layers| shared(&text, &sizes(layers), &format!("{mesh} {zero}"));
        assert_eq!(of("dp2", "8"), ([48, 48, 24], [50, 50]), "{zero}");
        assert_eq!(of("dp4", "8"), ([48, 48, 12], [25, 25]), "{zero}");
        assert_eq!(of("dp2 cp2", "8"), ([48, 48, 12], [25, 25]), "{zero}");
        assert_eq!(of("dp2 tp2", "8"), ([48, 48, 24], [50, 50]), "{zero}");
        assert_eq!(of("dp2 pp2 m2", "8"), ([24, 24, 12], [50, 50]), "{zero}");
        // Nine matrices of a kind and one of each of three others are shared by four ranks, where one place in four
        // is empty.
        assert_eq!(of("dp4", "3").0, [18, 24, 6], "{zero}");
        // Two matrices of a kind on four ranks are shared by pairs of ranks.
        assert_eq!(of("dp4", "2").0, [12, 14, 5], "{zero}");
    }
    // Gradients of virtual stages are scattered together once per step, or separately in each microbatch.
    assert_eq!(shared(&text, &sizes("4"), "dp2 pp2 v2 m2 zero1").0, [12, 12, 6]);
    assert_eq!(shared(&text, &sizes("4"), "dp2 pp2 v2 m2 zero2").0, [12, 14, 10]);
    // A single matrix of a kind is not sharded, and without --zero none is.
    assert_eq!(shared(&text, &sizes("1"), "dp2 zero1").0, [6, 7, 5]);
    assert_eq!(shared(&text, &sizes("2"), "dp2"), ([12, 12, 12], [100, 100]));
}

#[test]
fn muon_goes_the_same_way_on_any_mesh() {
    let meshes = [
        "m2",
        "dp2 m2",
        "tp2 sp m2",
        "tp4",
        "pp2 m2",
        "dp2 zero1 m2",
        "dp2 zero2 m2",
        "dp2 zero3 m2",
        "dp2 tp2 pp2 sp m2 zero1",
        "bf16 dp2 m2 zero1",
        "bf16 dp2 tp2 m2 zero2",
        "dp4 m2 zero2 bucket40",
        "dp2 cp2 m2 zero1",
        "dp4 zero1",
        "dp2 tp2 m2 zero2",
        "tp4 dp2 zero1",
        "bf16 dp4 m2 zero1",
        "bf16 dp2 cp2 zero2",
        "dp2 pp2 m2 zero2 bucket1000",
        "dp6 zero1",
        "dp2 pp2 v2 m2 zero1",
        "dp2 pp2 v2 m2 zero2",
    ];
    let text = by_muon(GPT2.0, "muon()");
    meshes.iter().for_each(|words| check(&text, GPT2.1, &case(words)));
    let text = by_muon(MIXTRAL.0, "muon(momentum: 0.5, nesterov: false, scale: \"shape_scaling\", factor: 1.0)");
    ["b2", "dp2 ep2", "tp2 sp ep2 etp1", "dp2 ep2 zero1", "dp2 zero2", "dp4 ep2 zero2"]
        .iter()
        .for_each(|words| check(&text, MIXTRAL.1, &case(words)));
}

#[test]
fn muon_on_the_host_keeps_momentum_there() {
    let text = by_muon(LLAMA.0, "muon(iterations: 2)");
    ["offload m2", "offload dp2 zero1 m2", "bf16 offload dp2 m2", "bucket40 offload m2", "bucket40 bf16 offload params dp2 zero1 m2"]
        .iter()
        .for_each(|words| check(&text, LLAMA.1, &case(words)));
}
