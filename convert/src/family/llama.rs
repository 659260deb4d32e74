//! Llama and those whose text is `models/llama.mdl` too.

use super::{
    Family, Field, FieldRole, FieldValue, LongRopeSettings, Rope, SettingKind, YarnSettings, attention_dropout, derived, flag, irrelevant, must,
    no_dropout, real, rope, size, size_or,
};

/// What all of them have.
const SHARED: &[Field] = &[
    size("vocab_size", "vocab"),
    size("hidden_size", "hidden"),
    size("num_attention_heads", "heads"),
    size("intermediate_size", "ffn"),
    size("num_hidden_layers", "layers"),
    size("max_position_embeddings", "seq"),
    flag("tie_word_embeddings", "tied", "false"),
    rope("rope_theta"),
    rope("rope_scaling"),
    rope("rope_parameters"),
    rope("partial_rotary_factor"),
    must("hidden_act", &[FieldValue::Text("silu"), FieldValue::Text("swish")]),
    attention_dropout("attention_dropout", "0.0"),
];

/// The constant in norms, of all but OLMo.
const EPS: &[Field] = &[real("rms_norm_eps", "norm_eps", "1e-6")];

const ROPE: Rope = Rope {
    theta: "10000.0",
    scaling: &[
        ("factor", "rope_factor", SettingKind::Real),
        ("low_freq_factor", "rope_low", SettingKind::Real),
        ("high_freq_factor", "rope_high", SettingKind::Real),
        ("original_max_position_embeddings", "rope_original", SettingKind::Size),
    ],
    yarn: Some(YarnSettings { chosen: Some("yarn"), scores: None, expected: false }),
    share: None,
    local: None,
    linear: None,
    long: None,
};

pub const LLAMA: Family = Family {
    architecture: "LlamaForCausalLM",
    others: &["LlamaModel"],
    model_type: "llama",
    model: "llama",
    text: include_str!("../../../models/llama.mdl"),
    base: "model.",
    fields: &[
        SHARED,
        EPS,
        &[
            derived("num_key_value_heads", "kv_heads"),
            derived("head_dim", "head_dim"),
            flag("attention_bias", "o_bias", "false"),
            flag("mlp_bias", "mlp_bias", "false"),
            must("rope_interleaved", &[FieldValue::Bool(false), FieldValue::Null]),
            // `pretraining_tp` only cuts the same products into pieces.
            irrelevant("pretraining_tp"),
        ],
    ],
    rope: Some(ROPE),
    fixed: &[],
    free: &["batch", "packed", "separator"],
    unused: &["rotary_emb.inv_freq"],
    predicting: None,
    tied: &[("lm_head.weight", "model.embed_tokens.weight")],
    renamed: &[],
};

/// Every layer sees as far back as `sliding_window` says.
pub const MISTRAL: Family = Family {
    architecture: "MistralForCausalLM",
    others: &["MistralModel"],
    model_type: "mistral",
    fields: &[
        SHARED,
        EPS,
        &[size_or("num_key_value_heads", "kv_heads", "8"), derived("head_dim", "head_dim"), size_or("sliding_window", "window", "4096")],
    ],
    ..LLAMA
};

/// What Qwen says of windows, in which case the text has none.
const NO_WINDOW: &[Field] = &[
    must("use_sliding_window", &[FieldValue::Bool(false)]),
    Field { name: "layer_types", role: FieldRole::Every("full_attention") },
    // These two fields matter with `use_sliding_window` only.
    irrelevant("sliding_window"),
    irrelevant("max_window_layers"),
];

/// Biases of queries, keys and values.
pub const QWEN2: Family = Family {
    architecture: "Qwen2ForCausalLM",
    others: &["Qwen2Model"],
    model_type: "qwen2",
    fields: &[SHARED, EPS, NO_WINDOW, &[size_or("num_key_value_heads", "kv_heads", "32"), derived("head_dim", "head_dim")]],
    fixed: &[("qkv_bias", "true")],
    ..LLAMA
};

/// Norms of queries and keys, over each head.
pub const QWEN3: Family = Family {
    architecture: "Qwen3ForCausalLM",
    others: &["Qwen3Model"],
    model_type: "qwen3",
    fields: &[
        SHARED,
        EPS,
        NO_WINDOW,
        &[size_or("num_key_value_heads", "kv_heads", "32"), size_or("head_dim", "head_dim", "128"), flag("attention_bias", "o_bias", "false")],
    ],
    fixed: &[("qk_norm", "true")],
    ..LLAMA
};

/// Norms behind the blocks, and of whole queries and keys.
pub const OLMO2: Family = Family {
    architecture: "Olmo2ForCausalLM",
    others: &["Olmo2Model"],
    model_type: "olmo2",
    fields: &[
        SHARED,
        &[
            real("rms_norm_eps", "norm_eps", "1e-5"),
            derived("num_key_value_heads", "kv_heads"),
            derived("head_dim", "head_dim"),
            flag("attention_bias", "o_bias", "false"),
        ],
    ],
    fixed: &[("olmo", "true")],
    ..LLAMA
};

/// Queries, keys and values in one tensor, and both sides of the gate; a window in every layer or none.
pub const PHI3: Family = Family {
    architecture: "Phi3ForCausalLM",
    others: &["Phi3Model"],
    model_type: "phi3",
    fields: &[
        SHARED,
        &[
            real("rms_norm_eps", "norm_eps", "1e-5"),
            derived("num_key_value_heads", "kv_heads"),
            derived("head_dim", "head_dim"),
            derived("sliding_window", "window"),
            must("attention_bias", &[FieldValue::Bool(false)]),
            must("mlp_bias", &[FieldValue::Bool(false)]),
            no_dropout("resid_pdrop"),
            no_dropout("embd_pdrop"),
            rope("original_max_position_embeddings"),
            // The first files name code of their repository here, which transformers has since adopted.
            irrelevant("auto_map"),
        ],
    ],
    rope: Some(Rope {
        theta: "10000.0",
        scaling: &[],
        yarn: None,
        share: Some(("rotary_factor", "1.0")),
        local: None,
        linear: None,
        long: Some(LongRopeSettings { original: "4096" }),
    }),
    fixed: &[("fused", "true")],
    ..LLAMA
};
