//! Mixtral, and Qwen3-MoE, whose text is `models/mixtral.mdl` too.

use super::{Family, Field, FieldRole, FieldValue, Rope, attention_dropout, derived, flag, irrelevant, must, real, rope, size, size_or};

const NO_NOISE: &str = "mcc adds no noise to what routers see, so training explores a little less; inference is the same";

pub const MIXTRAL: Family = Family {
    architecture: "MixtralForCausalLM",
    others: &["MixtralModel"],
    model_type: "mixtral",
    model: "mixtral",
    text: include_str!("../../../models/mixtral.mdl"),
    base: "model.",
    fields: &[&[
        size("vocab_size", "vocab"),
        size("hidden_size", "hidden"),
        size("num_attention_heads", "heads"),
        size("num_key_value_heads", "kv_heads"),
        derived("head_dim", "head_dim"),
        size("num_local_experts", "experts"),
        size("num_experts_per_tok", "top_k"),
        size("intermediate_size", "expert_ffn"),
        size("num_hidden_layers", "layers"),
        size("max_position_embeddings", "seq"),
        derived("sliding_window", "window"),
        real("rms_norm_eps", "norm_eps", "1e-5"),
        // transformers adds the balancing loss only where it returns the router logits.
        flag("output_router_logits", "balanced", "false"),
        real("router_aux_loss_coef", "aux_coef", "0.001"),
        Field { name: "router_jitter_noise", role: FieldRole::Should(FieldValue::Number(0.0), NO_NOISE) },
        rope("rope_theta"),
        rope("rope_scaling"),
        rope("rope_parameters"),
        rope("partial_rotary_factor"),
        must("tie_word_embeddings", &[FieldValue::Bool(false)]),
        must("hidden_act", &[FieldValue::Text("silu"), FieldValue::Text("swish")]),
        attention_dropout("attention_dropout", "0.0"),
    ]],
    rope: Some(Rope { theta: "1000000.0", scaling: &[], yarn: None, share: None, local: None, linear: None, long: None }),
    fixed: &[],
    free: &["batch", "micro_batch", "aux_per_sequence"],
    unused: &["rotary_emb.inv_freq"],
    predicting: None,
    tied: &[],
    renamed: &[],
};

/// Norms of queries and keys, and experts in every layer.
pub const QWEN3_MOE: Family = Family {
    architecture: "Qwen3MoeForCausalLM",
    others: &["Qwen3MoeModel"],
    model_type: "qwen3_moe",
    fields: &[&[
        size("vocab_size", "vocab"),
        size("hidden_size", "hidden"),
        size("num_attention_heads", "heads"),
        size_or("num_key_value_heads", "kv_heads", "4"),
        derived("head_dim", "head_dim"),
        size("num_experts", "experts"),
        // transformers 5 writes this name.
        Field { name: "num_local_experts", role: FieldRole::Alias("num_experts") },
        size("num_experts_per_tok", "top_k"),
        size("moe_intermediate_size", "expert_ffn"),
        flag("norm_topk_prob", "norm_topk", "false"),
        size("num_hidden_layers", "layers"),
        size("max_position_embeddings", "seq"),
        real("rms_norm_eps", "norm_eps", "1e-6"),
        flag("output_router_logits", "balanced", "false"),
        real("router_aux_loss_coef", "aux_coef", "0.001"),
        rope("rope_theta"),
        rope("rope_scaling"),
        rope("rope_parameters"),
        rope("partial_rotary_factor"),
        must("decoder_sparse_step", &[FieldValue::Number(1.0)]),
        must("mlp_only_layers", &[FieldValue::EmptyList, FieldValue::Null]),
        // This is the width of layers without experts, of which there are none.
        irrelevant("intermediate_size"),
        must("use_sliding_window", &[FieldValue::Bool(false)]),
        // These two fields matter with `use_sliding_window` only.
        irrelevant("sliding_window"),
        irrelevant("max_window_layers"),
        must("attention_bias", &[FieldValue::Bool(false)]),
        must("tie_word_embeddings", &[FieldValue::Bool(false)]),
        must("hidden_act", &[FieldValue::Text("silu"), FieldValue::Text("swish")]),
        attention_dropout("attention_dropout", "0.0"),
    ]],
    rope: Some(Rope { theta: "10000.0", scaling: &[], yarn: None, share: None, local: None, linear: None, long: None }),
    fixed: &[("qk_norm", "true"), ("qwen", "true")],
    ..MIXTRAL
};
