//! Gemma 2 and the text part of Gemma 3, whose text is `models/gemma.mdl`.

use super::{Family, Field, FieldDefault, FieldRole, FieldValue, Rope, SettingKind, attention_dropout, irrelevant, must, real, rope, size, size_or};

/// What all of them have.
const SHARED: &[Field] = &[
    size("vocab_size", "vocab"),
    size("hidden_size", "hidden"),
    size("num_attention_heads", "heads"),
    size_or("num_key_value_heads", "kv_heads", "4"),
    size_or("head_dim", "head_dim", "256"),
    size("intermediate_size", "ffn"),
    size("num_hidden_layers", "layers"),
    size("max_position_embeddings", "seq"),
    real("rms_norm_eps", "norm_eps", "1e-6"),
    size_or("query_pre_attn_scalar", "query_scalar", "256"),
    Field {
        name: "sliding_window",
        role: FieldRole::Setting { name: "window", kind: SettingKind::Size, missing: FieldDefault::Either { absent: "4096", null: "0" } },
    },
    rope("rope_theta"),
    rope("rope_scaling"),
    rope("rope_parameters"),
    rope("partial_rotary_factor"),
    must("hidden_activation", &[FieldValue::Text("gelu_pytorch_tanh")]),
    // The first files have this field, which the architecture does not read.
    irrelevant("hidden_act"),
    must("tie_word_embeddings", &[FieldValue::Bool(true)]),
    must("attention_bias", &[FieldValue::Bool(false)]),
    must("use_bidirectional_attention", &[FieldValue::Bool(false), FieldValue::Null]),
    attention_dropout("attention_dropout", "0.0"),
    irrelevant("cache_implementation"),
];

/// A cap that null leaves out, and a config without the field has.
const fn cap(field: &'static str, name: &'static str, absent: &'static str) -> Field {
    Field { name: field, role: FieldRole::Setting { name, kind: SettingKind::Real, missing: FieldDefault::Either { absent, null: "0.0" } } }
}

/// Every second layer has a window.
pub const GEMMA2: Family = Family {
    architecture: "Gemma2ForCausalLM",
    others: &["Gemma2Model"],
    model_type: "gemma2",
    model: "gemma",
    text: include_str!("../../../models/gemma.mdl"),
    base: "model.",
    fields: &[
        SHARED,
        &[
            cap("attn_logit_softcapping", "score_cap", "50.0"),
            cap("final_logit_softcapping", "logit_cap", "30.0"),
            Field { name: "layer_types", role: FieldRole::FullEvery("full_every", 2) },
            // The first files have this field, which the architecture does not read.
            irrelevant("sliding_window_size"),
        ],
    ],
    rope: Some(Rope { theta: "10000.0", scaling: &[], yarn: None, share: None, local: None, linear: None, long: None }),
    fixed: &[],
    free: &["batch"],
    unused: &["rotary_emb.inv_freq"],
    predicting: None,
    tied: &[("lm_head.weight", "model.embed_tokens.weight")],
    renamed: &[],
};

/// Norms of queries and keys; five layers of six have a window, and a theta of their own.
pub const GEMMA3: Family = Family {
    architecture: "Gemma3ForCausalLM",
    others: &["Gemma3TextModel"],
    model_type: "gemma3_text",
    fields: &[
        SHARED,
        &[
            must("attn_logit_softcapping", &[FieldValue::Null]),
            cap("final_logit_softcapping", "logit_cap", "0.0"),
            Field { name: "layer_types", role: FieldRole::FullEvery("full_every", 6) },
            // `sliding_window_pattern` is read together with `layer_types`.
            irrelevant("sliding_window_pattern"),
            irrelevant("_sliding_window_pattern"),
            rope("rope_local_base_freq"),
        ],
    ],
    rope: Some(Rope {
        theta: "1000000.0",
        scaling: &[],
        yarn: None,
        share: None,
        local: Some("local_theta"),
        linear: Some("rope_factor"),
        long: None,
    }),
    fixed: &[("qk_norm", "true"), ("score_cap", "0.0")],
    ..GEMMA2
};
