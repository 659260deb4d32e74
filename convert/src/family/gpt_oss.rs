//! gpt-oss.

use super::{Family, Field, Kind, Missing, Plain, Role, Rope, Yarn, attention_dropout, irrelevant, must, real, rope, size, size_or};

pub const GPT_OSS: Family = Family {
    architecture: "GptOssForCausalLM",
    others: &["GptOssModel"],
    model_type: "gpt_oss",
    model: "gpt_oss",
    text: include_str!("../../../models/gpt_oss.mdl"),
    base: "model.",
    fields: &[&[
        size("vocab_size", "vocab"),
        size("hidden_size", "hidden"),
        size("num_attention_heads", "heads"),
        size_or("num_key_value_heads", "kv_heads", "8"),
        size_or("head_dim", "head_dim", "64"),
        size("num_local_experts", "experts"),
        Field { name: "num_experts", role: Role::Alias("num_local_experts") },
        size("num_experts_per_tok", "top_k"),
        Field { name: "experts_per_token", role: Role::Alias("num_experts_per_tok") },
        size("intermediate_size", "expert_ffn"),
        size("num_hidden_layers", "layers"),
        size("max_position_embeddings", "seq"),
        Field {
            name: "sliding_window",
            role: Role::Setting { name: "window", kind: Kind::Size, missing: Missing::Either { absent: "128", null: "0" } },
        },
        Field { name: "layer_types", role: Role::FullEvery("full_every", 2) },
        real("rms_norm_eps", "norm_eps", "1e-5"),
        real("swiglu_limit", "limit", "7.0"),
        real("swiglu_alpha", "alpha", "1.702"),
        rope("rope_theta"),
        rope("rope_scaling"),
        rope("rope_parameters"),
        rope("partial_rotary_factor"),
        must("attention_bias", &[Plain::Bool(true)]),
        must("hidden_act", &[Plain::Text("silu"), Plain::Text("swish")]),
        must("tie_word_embeddings", &[Plain::Bool(false)]),
        must("output_router_logits", &[Plain::Bool(false)]),
        // Of use with `output_router_logits` only.
        irrelevant("router_aux_loss_coef"),
        // The length that frequencies are scaled from stands beside their factor.
        irrelevant("initial_context_length"),
        attention_dropout("attention_dropout"),
    ]],
    rope: Some(Rope { theta: "150000.0", scaling: &[], yarn: Some(Yarn { chosen: None, scores: None }), share: None, local: None, linear: None }),
    fixed: &[],
    free: &["batch", "packed", "separator"],
    unused: &["rotary_emb.inv_freq"],
    beyond: None,
    tied: &[],
    renamed: &[],
};
