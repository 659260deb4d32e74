//! The models of `models/`, at small sizes, on many meshes.

use crate::harness::{Case, Data, Outcome, Ranges, attempt, check};
use ir::op::DType;
use ir::options::{ActivationOffload, Counts, CpComm, Cuts, MemoryOrder, MoeBuffer, Offload, ParamOffload, Recompute, TpOverlap, Zero};
use ir::pipeline::Schedule;

pub const GPT2: (&str, &[(&str, &str)]) =
    (include_str!("../../../models/gpt2.mdl"), &[("vocab", "24"), ("hidden", "8"), ("heads", "4"), ("ffn", "16"), ("layers", "4"), ("seq", "4")]);

pub const BERT: (&str, &[(&str, &str)]) =
    (include_str!("../../../models/bert.mdl"), &[("vocab", "15"), ("hidden", "8"), ("heads", "4"), ("layers", "2"), ("seq", "4")]);

pub const LLAMA: (&str, &[(&str, &str)]) = (
    include_str!("../../../models/llama.mdl"),
    &[("vocab", "24"), ("hidden", "8"), ("heads", "4"), ("kv_heads", "2"), ("head_dim", "4"), ("ffn", "12"), ("layers", "4"), ("seq", "4")],
);

pub const GEMMA: (&str, &[(&str, &str)]) = (
    include_str!("../../../models/gemma.mdl"),
    &[("vocab", "24"), ("hidden", "8"), ("heads", "4"), ("kv_heads", "2"), ("head_dim", "4"), ("ffn", "12"), ("layers", "4"), ("seq", "4")],
);

pub const MIXTRAL: (&str, &[(&str, &str)]) = (
    include_str!("../../../models/mixtral.mdl"),
    &[
        ("vocab", "24"),
        ("hidden", "8"),
        ("heads", "4"),
        ("kv_heads", "2"),
        ("head_dim", "4"),
        ("experts", "4"),
        ("expert_ffn", "8"),
        ("layers", "2"),
        ("seq", "4"),
    ],
);

pub const DEEPSEEK: (&str, &[(&str, &str)]) = (
    include_str!("../../../models/deepseek_v3.mdl"),
    &[
        ("vocab", "24"),
        ("hidden", "8"),
        ("heads", "2"),
        ("layers", "2"),
        ("first_dense", "1"),
        ("ffn", "8"),
        ("seq", "4"),
        ("q_rank", "6"),
        ("kv_rank", "4"),
        ("nope", "4"),
        ("turned", "2"),
        ("v_dim", "4"),
        ("experts", "8"),
        ("top_k", "2"),
        ("expert_ffn", "4"),
        ("groups", "4"),
        ("top_groups", "2"),
        ("bias_rate", "0.125"),
    ],
);

pub const T5: (&str, &[(&str, &str)]) = (
    include_str!("../../../models/t5.mdl"),
    &[
        ("vocab", "15"),
        ("hidden", "8"),
        ("heads", "2"),
        ("head_dim", "4"),
        ("ffn", "8"),
        ("encoder_layers", "1"),
        ("decoder_layers", "1"),
        ("source", "6"),
        ("target", "4"),
        ("buckets", "8"),
        ("max_distance", "8"),
    ],
);

/// `bf16 dp2 cp2 ulysses tp4 pp2 ep2 etp1 sp m3 b2 full2 gpipe`: precision, sizes of axes, how context-parallel
/// attention exchanges (a ring, unless it says ulysses, gather or both), sequence parallelism, microbatches,
/// sequences per microbatch and rank, layers recomputed together, `frugal` orders of commands, `segments4` of a
/// product at most, `bucket40` elements of a full bucket, `room150` hundredths of a rank's share of experts' rows,
/// `v2 group3` virtual stages and microbatches in a group; 1F1B unless it says gpipe, zbh1, zbv or
/// dualpipev, `paired` passes.
pub fn case(words: &str) -> Case {
    let mut case = Case { micro_batch: 1, ..Case::default() };
    let mut microbatches = 1;
    for word in words.split_whitespace() {
        if let Some(precision) = DType::parse(word) {
            case.precision = precision;
            continue;
        }
        let (name, number) = word.split_at(word.find(|c: char| c.is_ascii_digit()).unwrap_or(word.len()));
        let number = || number.parse::<u64>().unwrap_or_else(|_| panic!("{word} has no number"));
        match name {
            "dp" => case.dp = number(),
            "cp" => case.cp = number(),
            "tp" => case.tp = number(),
            "ep" => case.ep = number(),
            "etp" => case.etp = Some(number()),
            "gather" => case.cp_comm = CpComm::AllGather,
            "both" => case.cp_comm = CpComm::AllToAllAndRing,
            "ulysses" => case.cp_comm = CpComm::AllToAll,
            "pp" => case.pp = number(),
            "sp" => case.sp = true,
            "chunks" => case.tp_overlap = TpOverlap::Pipeline { chunks: number() },
            "zero" => case.zero = Zero::ALL[number() as usize],
            "replicas" => case.replicas = number(),
            "frugal" => case.memory_order = MemoryOrder::Memory,
            "offload" => case.offload = Offload::Optimizer,
            "disk" => case.offload = Offload::Disk,
            "params" => case.param_offload = ParamOffload::Host,
            "params_disk" => case.param_offload = ParamOffload::Disk,
            "spill" => case.activation_offload = ActivationOffload::Layers(None),
            "spilled" => case.activation_offload = ActivationOffload::Layers(Some(number() as u32)),
            "tf" => case.tf32 = true,
            "logits" => case.logits = number(),
            "segments" => case.segments = number(),
            "bucket" => case.bucket_size = Some(number()),
            "room" => case.moe_buffer = MoeBuffer::Factor(number() as f64 / 100.0),
            "passes" => case.moe_passes = number(),
            "m" => microbatches = number(),
            "b" => case.micro_batch = number(),
            "selective" => case.recompute = Recompute::Selective,
            "full" => case.recompute = Recompute::Uniform(number() as u32),
            "block" => case.recompute = Recompute::Block(number() as u32),
            "v" => case.vpp = Some(number()),
            "group" => case.group = Some(number()),
            "gpipe" => case.schedule = Schedule::GPipe,
            "zbh" => case.schedule = Schedule::ZbH1,
            "zbv" => case.schedule = Schedule::ZbV,
            "dualpipev" => case.schedule = Schedule::DualPipeV,
            "paired" => case.pairs = true,
            _ => panic!("{word}"),
        }
    }
    case.global_batch = case.dp * case.micro_batch * microbatches;
    case
}

pub fn on(model: (&str, &[(&str, &str)]), more: &[(&str, &str)], cases: &[&str]) {
    let defines: Vec<(&str, &str)> = model.1.iter().chain(more).copied().collect();
    for words in cases {
        check(model.0, &defines, &case(words));
    }
}

#[test]
fn gpt2_agrees_on_every_axis_and_all_together() {
    on(GPT2, &[], &["b2", "m4", "dp2 m2", "tp2 m2", "tp4 sp m2", "pp2 m4", "pp4 m4 gpipe", "dp2 tp2 pp2 sp m2 b2", "dp3 tp2 m2 b2"]);
}

#[test]
fn recomputation_changes_no_bit_on_any_mesh() {
    on(GPT2, &[], &["m2 selective", "m2 full1", "tp2 sp m2 full2", "tp2 pp2 sp m4 full1", "dp2 tp2 m2 full4", "pp2 m2 block1", "cp2 tp2 sp full1"]);
    on(LLAMA, &[], &["tp4 m2 full1", "tp2 sp pp2 m2 selective", "cp2 ulysses m2 full2", "tp2 m2 block2"]);
}

#[test]
fn dropout_is_drawn_again_as_it_was() {
    on(GPT2, &[("dropout_rate", "0.25")], &["tp2 sp m2 full1", "dp2 m2 full2"]);
}

#[test]
fn llama_agrees_on_every_axis_and_all_together() {
    on(LLAMA, &[], &["b2 m2", "dp2 m2", "tp2 sp m2", "pp2 m3", "pp4 m2", "dp2 tp2 pp2 sp m2", "tp2 pp4 sp m2 gpipe"]);
}

#[test]
fn models_agree_with_parts_of_the_sequence() {
    on(GPT2, &[], &["cp2 gather m2", "cp4 gather", "cp2 tp2 sp gather m2", "dp2 cp2 pp2 gather m2", "cp2 ulysses m2", "cp2 tp2 sp ulysses"]);
    on(LLAMA, &[], &["cp2 gather m2", "cp4 tp2 gather", "cp2 tp2 sp pp2 gather m2", "cp2 ulysses m2"]);
}

#[test]
fn models_agree_with_keys_that_go_round() {
    on(GPT2, &[], &["cp2", "cp4 m2", "cp2 tp2 sp m2", "dp2 cp2 pp2 m2", "cp4 both"]);
    on(LLAMA, &[], &["cp2 m2", "cp4 tp2", "cp2 tp2 sp pp2 m2", "cp4 both m2"]);
}

#[test]
fn llama_agrees_with_fewer_kv_heads_than_tp() {
    on(LLAMA, &[], &["tp4 m2", "tp4 sp m2", "dp2 tp4 sp", "tp4 pp2 sp m2"]);
    on(LLAMA, &[("kv_heads", "1"), ("qk_norm", "true"), ("qkv_bias", "true")], &["tp2 sp m2", "tp4 sp m2", "tp4 pp2 m2"]);
}

#[test]
fn llama_agrees_with_windows_and_packed_documents() {
    on(LLAMA, &[("window", "2"), ("window_every", "2")], &["tp2 sp m2", "dp2 pp2 m2"]);
    on(LLAMA, &[("packed", "true")], &["tp2 sp m2", "dp2 pp2 m2"]);
}

#[test]
fn windows_and_documents_agree_with_parts_of_the_sequence() {
    let meshes = ["cp2", "cp4 m2", "cp2 gather", "cp4 tp2 sp gather", "cp2 ulysses", "cp4 both", "cp2 tp2 sp pp2 m2"];
    for (window, every) in [("3", "1"), ("1", "1"), ("5", "2")] {
        on(LLAMA, &[("seq", "16"), ("window", window), ("window_every", every)], &meshes);
    }
    on(LLAMA, &[("packed", "true"), ("window", "3")], &["cp2", "cp2 gather", "cp2 ulysses"]);
    check(LLAMA.0, &[LLAMA.1, &[("window", "3")]].concat(), &Case { inline_ops: true, ..case("cp2") });
}

#[test]
fn heads_that_context_parallel_ranks_cannot_share_out_are_refused() {
    assert_eq!(refused(GPT2, &[], "cp8 ulysses"), ["E0204"]);
    assert_eq!(refused(LLAMA, &[("kv_heads", "1"), ("heads", "2")], "cp2 tp2 ulysses"), ["E0204"]);
    on(GPT2, &[("seq", "16")], &["cp8", "cp8 gather", "cp8 both"]);
}

#[test]
fn models_agree_in_sixteen_bits() {
    for precision in ["bf16", "f16"] {
        let of = |mesh: &str| format!("{precision} {mesh}");
        let meshes = ["m2", "dp2 m2", "tp2 sp m2", "dp2 tp2 pp2 m2", "cp2 m2"].map(of);
        let meshes: Vec<&str> = meshes.iter().map(String::as_str).collect();
        on(GPT2, &[], &meshes);
        on(LLAMA, &[], &meshes);
    }
}

#[test]
fn tied_embeddings_agree_across_stages() {
    on(GPT2, &[], &["pp2 m2", "pp4 m4", "tp2 pp2 sp m2", "dp2 pp2 m2"]);
    on(LLAMA, &[("tied", "true")], &["pp4 m2", "tp2 pp2 sp m2"]);
}

#[test]
fn embedding_and_loss_may_have_stages_of_their_own() {
    let counted = Cuts::Even { embedding: Counts::AsLayer, loss: Counts::AsLayer };
    let layouts = [counted, Cuts::Balanced, Cuts::Text("E|tttt|L".into()), Cuts::Text("E|tt|ttL".into())];
    for layout in layouts {
        check(GPT2.0, GPT2.1, &Case { layout: layout.clone(), ..case("pp3 m3") });
        check(LLAMA.0, LLAMA.1, &Case { layout, ..case("tp2 pp3 sp m2") });
    }
    check(LLAMA.0, LLAMA.1, &Case { layout: Cuts::Text("E|t*2|(t|)*2L".into()), schedule: Schedule::GPipe, vpp: None, ..case("pp5 m2") });
    check(GPT2.0, GPT2.1, &Case { layout: Cuts::Text("E|t|tt|tL".into()), ..case("pp2 m4 zbv") });
    check(GPT2.0, GPT2.1, &Case { layout: Cuts::Text("E|tt|tt|L".into()), ..case("pp2 m4") });
}

#[test]
fn every_schedule_computes_the_same() {
    let cases = ["pp2 v2 m2", "pp2 v2 m5 group3", "pp2 v2 m4 gpipe", "pp2 m3 zbh1", "pp4 m4 zbh1", "zbv m2", "pp2 m1 zbv", "pp2 m4 zbv"];
    on(GPT2, &[], &cases);
    on(LLAMA, &[], &["pp2 v2 tp2 sp m4", "dp2 pp2 v2 m2", "pp2 tp2 sp m3 zbh1", "dp2 pp2 m2 zbv", "tp2 sp zbv m2"]);
    on(
        LLAMA,
        &[("tied", "true"), ("layers", "6")],
        &["pp3 v2 m3", "pp3 m5 zbv", "pp3 m5 zbh1", "pp3 v2 m7 group4", "pp2 v3 m5 group3", "pp3 m2 zbv", "pp3 m1 zbh1"],
    );
}

#[test]
fn what_layers_capture_is_relayed_from_stage_to_stage() {
    let small: &[(&str, &str)] = &[("encoder_layers", "2"), ("decoder_layers", "2")];
    on(T5, &[], &["pp2 m2", "pp2 m3 gpipe", "tp2 pp2 sp m2", "pp2 m2 zbh1"]);
    on(T5, small, &["pp4 m2", "pp2 tp2 m2", "pp2 v2 m2", "pp2 v2 tp2 sp m3 group3", "pp2 m2 zbv", "pp4 m3 zbh1 full1", "dp2 pp4 zero3 m2"]);
    let large: &[(&str, &str)] = &[("encoder_layers", "3"), ("decoder_layers", "5")];
    on(T5, large, &["pp4 v2 m4", "pp4 m5 zbv selective", "tp2 sp pp4 m2 full1", "cp2 pp4 v2 m5 group5", "bf16 pp4 m2"]);
    for layout in ["E|t|tt|tL", "Et|tt|t|L", "Ettt|tL"] {
        let pp = layout.matches('|').count() + 1;
        check(T5.0, &[T5.1, small].concat(), &Case { layout: Cuts::Text(layout.into()), ..case(&format!("pp{pp} m2")) });
    }
}

#[test]
fn vocabularies_that_do_not_divide_are_padded() {
    on(GPT2, &[("vocab", "23")], &["tp2 m2", "tp4 sp m2", "tp4 pp2 m2", "tp2 pp4 sp m2"]);
    on(LLAMA, &[("vocab", "21")], &["tp4 sp m2", "tp2 pp4 m2"]);
}

/// The padding of a logarithm or a quotient may be infinite, and zero times that is NaN.
#[test]
fn what_is_infinite_in_the_padding_is_masked() {
    let text = "model m(batch, features = 4, vocab = 5) {
      input x: f32[batch, features];
      input id: i32[batch];
      param table: [vocab, features] ~ normal(1);
      param w: [vocab] ~ normal(1);
      param s: [vocab] = 2;
      let y = dot(x + table[vocab: id], table, over: features);
      loss mean(sum(w / s * y, over: vocab)) + mean(dot(w * log(s * s), y * rsqrt(s * s), over: vocab));
      metric logs = sum(w * log(s * s), over: vocab);
      metric far = mean(sum(exp(y - 1000.0) * w, over: vocab));
    }
    train { optimizer: sgd(momentum: 0.0); lr: constant(0.001); }
    plan { dp: batch; tp: vocab; }";
    for words in ["tp2", "tp4", "dp2 tp2 m2"] {
        check(text, &[], &Case { data: Data::Real, ..case(words) });
    }
}

#[test]
fn stages_may_have_different_numbers_of_layers() {
    for layout in [[1, 3], [3, 1]] {
        check(GPT2.0, GPT2.1, &Case { layout: Cuts::Sizes(layout.to_vec()), ..case("pp2 m3") });
    }
    check(LLAMA.0, LLAMA.1, &Case { layout: Cuts::Sizes(vec![1, 2, 1]), ..case("tp2 pp3 sp m3") });
}

#[test]
fn dropout_drops_the_same_elements_on_every_mesh() {
    let cases = ["m2", "dp2 m2", "tp2 m2", "tp4 sp m2", "pp2 m2", "dp2 tp2 pp2 sp m2"];
    on(GPT2, &[("dropout_rate", "0.5")], &cases);
}

#[test]
fn attention_agrees_with_its_body_inlined() {
    check(GPT2.0, GPT2.1, &Case { inline_ops: true, ..case("tp2 sp m2") });
    check(LLAMA.0, LLAMA.1, &Case { inline_ops: true, ..case("tp4 sp m2") });
}

#[test]
fn mixtral_agrees_on_both_grids() {
    on(
        MIXTRAL,
        &[],
        &["", "dp2", "tp2 sp", "dp2 ep2", "dp2 tp2 sp ep2", "tp2 sp ep2 etp1", "dp2 tp2 sp ep4 etp1", "cp2 tp2 sp ep2 etp2", "dp2 pp2 ep2"],
    );
    on(MIXTRAL, &[], &["m2", "dp2 ep2 m2", "dp2 tp2 sp ep2 pp2 m2", "dp2 ep2 b4 m2"]);
    on(MIXTRAL, &[("aux_per_sequence", "false")], &["dp2 ep2 b2", "dp2 tp2 sp ep2", "dp2 pp2 ep2"]);
}

#[test]
fn rows_of_experts_in_passes_agree() {
    let seq = ("seq", "16");
    on(
        MIXTRAL,
        &[seq],
        &["b2 passes2", "dp2 ep2 passes4", "bf16 dp2 ep2 zero3 passes2", "dp2 tp2 sp ep2 etp2 passes3", "dp2 tp2 sp ep4 etp1 passes2"],
    );
    let stages = ["dp2 ep2 pp2 m2 passes2", "dp2 ep2 pp2 zbh m2 passes3", "dp2 ep2 selective m2 passes2", "bf16 dp2 ep2 full1 zero1 m2 passes2"];
    on(MIXTRAL, &[seq], &stages);
    on(DEEPSEEK, &[seq], &["dp2 ep2 m2 passes3", "bf16 dp2 pp2 ep2 m2 room50 passes4"]);
}

/// The error with which a text is refused.
pub fn refused(model: (&str, &[(&str, &str)]), more: &[(&str, &str)], words: &str) -> Vec<String> {
    let defines: Vec<(&str, &str)> = model.1.iter().chain(more).copied().collect();
    match attempt(model.0, &defines, &case(words), &Ranges::new()) {
        Ok(Outcome::Refused(errors)) => errors.into_iter().map(|e| e.code).collect(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_model_whose_parameters_are_all_frozen_has_nothing_to_train() {
    let text = "model m(batch, hidden = 4, out = 2) {
      input x: f32[batch, hidden];
      loss mean(linear(x, hidden, out) as map);
    }
    train { group \"*.w\" { frozen: true; } }";
    assert_eq!(refused((text, &[]), &[], "m2"), ["E0502"]);
}

#[test]
fn a_balance_of_the_whole_batch_needs_one_microbatch() {
    assert!(refused(MIXTRAL, &[("aux_per_sequence", "false")], "m2").iter().all(|code| code == "E0631"));
}

#[test]
fn a_capacity_of_the_whole_batch_needs_one_microbatch() {
    let text = "model m(batch, hidden = 4, ffn = 4, experts = 2, top = 1) {
      input x: f32[batch, hidden];
      let score, chosen = top_k(linear(x, hidden, experts) as router, over: experts, k: top);
      loss mean(experts_mlp(x, chosen, score, batch, top, experts, hidden, ffn, capacity: 1));
    }";
    assert_eq!(refused((text, &[]), &[], "m2"), ["E0636"]);
}

/// Each of these texts was once reported as a bug in mcc.
#[test]
fn what_meets_across_the_batch_needs_one_microbatch() {
    let model = |rest: &str| {
        format!(
            "model m(batch, d = 4) {{ input x: f32[batch, d]; param w: [d] = 1; let z = x * w; dim other = batch; {rest} }} plan {{ dp: batch; }}"
        )
    };
    let meets = [
        "loss mean(z ^ 2); metric a = max(x);",
        "loss mean(z ^ 2); metric a = max(z);",
        "loss mean(z ^ 2); metric a = sum(x) + max(x);",
        "loss mean(dot(z, view(z, batch -> other), over: d) ^ 2);",
        "loss mean(log_sum_exp(dot(z, view(x, batch -> other), over: d), over: other));",
    ];
    for rest in meets {
        assert_eq!(refused((&model(rest), &[]), &[], "m2"), ["E0636"], "{rest}");
        check(&model(rest), &[], &Case { data: Data::Real, ..case("dp2") });
    }
    let alone = "loss mean(z ^ 2); metric a = mean(max(x, over: d)); metric b = mean(x);";
    check(&model(alone), &[], &Case { data: Data::Real, ..case("dp2 m2") });
}

/// Two tokens further: layers on what was, the embedding and the head shared, on any stage.
#[test]
fn deepseek_agrees_where_it_predicts_further_tokens() {
    on(DEEPSEEK, &[("mtp", "2")], &["m2", "dp2 ep2 m2", "tp2 sp ep2 etp1 m2", "cp2", "pp2 m2", "pp4 m2 zbh", "dp2 pp2 cp2 selective m2"]);
    on(DEEPSEEK, &[("mtp", "1"), ("packed", "true"), ("separator", "3")], &["tp2", "cp2 gather", "pp2 m2"]);
}

#[test]
fn deepseek_agrees_with_its_routing_bias_updated_once_per_step() {
    on(DEEPSEEK, &[], &["", "m2", "dp2 ep2 m2", "dp2 tp2 sp ep2 m2", "tp2 sp ep2 etp1", "cp2 ep2", "dp2 pp2 ep2 m2"]);
}

#[test]
fn the_other_models_agree() {
    let mlp = (include_str!("../../../models/mlp.mdl"), &[("features", "6"), ("hidden", "8"), ("classes", "4")][..]);
    on(mlp, &[], &["b2 m2", "dp2 m2", "tp2 m2", "tp4 pp2 m2", "bf16 tp2 m2"]);
    check(mlp.0, mlp.1, &Case { data: Data::Real, ..case("dp2 tp2 pp2 m2") });
    let umlp = (include_str!("../../../models/umlp.mdl"), &[("width", "16"), ("levels", "2")][..]);
    on(umlp, &[], &["m2", "dp2 m2", "tp2 m2", "tp4 m2", "bf16 m2"]);
    on(BERT, &[], &["m2", "dp2 m2", "tp2 sp m2", "tp4 pp2 m2", "bf16 m2"]);
    let vit = (
        include_str!("../../../models/vit.mdl"),
        &[
            ("height", "4"),
            ("width", "4"),
            ("channels", "1"),
            ("patch", "2"),
            ("hidden", "8"),
            ("heads", "2"),
            ("layers", "2"),
            ("ffn", "8"),
            ("classes", "4"),
        ][..],
    );
    on(vit, &[], &["m2", "dp2 m2", "tp2 m2", "pp2 m2", "bf16 tp2 m2", "f16 m2"]);
    on(T5, &[], &["m2", "dp2 m2", "tp2 sp m2", "bf16 m2"]);
    let nemotron = (
        include_str!("../../../models/nemotron.mdl"),
        &[("vocab", "21"), ("hidden", "8"), ("heads", "4"), ("kv_heads", "2"), ("head_dim", "4"), ("ffn", "8"), ("layers", "2"), ("seq", "4")][..],
    );
    on(nemotron, &[], &["m2", "dp2 m2", "tp2 sp m2", "tp4 pp2 m2", "bf16 m2"]);
}

#[test]
fn parameters_that_data_parallel_ranks_share_out_agree() {
    on(GPT2, &[], &["dp2 zero3 m2", "dp4 tp2 zero3 sp m2", "dp2 pp2 zero3 m2", "dp2 tp2 pp2 zero3 sp m2"]);
    on(LLAMA, &[("tied", "true")], &["dp2 pp2 zero3 m2", "dp3 zero3"]);
}

#[test]
fn optimizer_states_and_gradients_that_data_parallel_ranks_share_out_agree() {
    on(GPT2, &[], &["dp2 zero1 m2", "dp2 zero2 m2", "dp4 tp2 zero1 sp m2", "dp4 tp2 zero2 sp m2", "dp2 tp2 pp2 zero2 sp m2"]);
    on(LLAMA, &[("tied", "true")], &["dp2 pp2 zero1 m2", "dp2 pp2 zero2 m2", "dp2 cp2 zero1 m2", "dp2 cp2 zero2", "dp2 cp2 zero3"]);
    on(LLAMA, &[], &["dp2 tp4 zero1 sp m2", "bf16 dp2 zero1 m2", "bf16 dp2 tp2 sp zero2 m2", "f16 dp2 cp2 zero1 m2", "f16 dp2 pp2 v2 zero1 m2"]);
    on(LLAMA, &[("tied", "true")], &["bf16 dp2 pp2 zero1 m2", "bf16 dp3 zero3 m2"]);
    let routed = ["dp4 ep2 zero1 m2", "dp4 ep2 zero2 m2", "bf16 dp2 tp2 sp ep2 etp2 zero1 m2", "dp2 tp2 ep4 etp1 zero1 m2"];
    on(MIXTRAL, &[], &routed);
    // Vocabularies are padded here, so their gradients are masked.
    on(GPT2, &[("vocab", "23")], &["dp2 tp2 zero1 m2", "dp2 tp2 zero2 m2", "dp2 tp2 zero1", "bf16 dp2 tp2 pp2 sp zero1 m2"]);
}

/// Gathers and reductions beside products, in chunks of rows; with a batch that lies inside and outside of them.
#[test]
fn products_in_chunks_compute_the_same() {
    on(GPT2, &[("seq", "8")], &["tp2 sp chunks2", "tp4 sp chunks2 b2 m2", "tp2 chunks4 m2", "tp2 b2 chunks2", "dp2 tp2 pp2 sp chunks4 m2"]);
    on(LLAMA, &[("seq", "12")], &["tp2 sp chunks3", "tp4 sp chunks2 full1", "tp2 sp cp2 chunks3 m2", "bf16 tp2 sp chunks3"]);
}

/// The exponentials of these curves' arguments overflow every float.
const FLAT: &str = "
model flat(batch, hidden = 4) {
  input x: f32[batch, hidden];
  param w: [hidden] = 1;
  loss mean(x * (silu(w - 5000) + sigmoid(w - 9000) + silu(w + 5000)));
}
train { optimizer: adamw(betas: [0.9, 0.95], eps: 1e-8); }
plan { dp: batch; }
";

#[test]
fn gradients_of_curves_are_numbers_where_these_are_flat() {
    for words in ["b2", "dp2"] {
        check(FLAT, &[], &case(words));
    }
}
