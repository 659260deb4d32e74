//! Nemotron.

use super::{Family, FieldValue, Rope, attention_dropout, derived, must, real, rope, size};

pub const NEMOTRON: Family = Family {
    architecture: "NemotronForCausalLM",
    others: &[],
    model_type: "nemotron",
    model: "nemotron",
    text: include_str!("../../../models/nemotron.mdl"),
    base: "model.",
    fields: &[&[
        size("vocab_size", "vocab"),
        size("hidden_size", "hidden"),
        size("num_attention_heads", "heads"),
        derived("num_key_value_heads", "kv_heads"),
        derived("head_dim", "head_dim"),
        size("intermediate_size", "ffn"),
        size("num_hidden_layers", "layers"),
        size("max_position_embeddings", "seq"),
        real("norm_eps", "norm_eps", "1e-5"),
        rope("rope_theta"),
        rope("rope_scaling"),
        rope("rope_parameters"),
        rope("partial_rotary_factor"),
        must("hidden_act", &[FieldValue::Text("relu2")]),
        must("tie_word_embeddings", &[FieldValue::Bool(false)]),
        must("attention_bias", &[FieldValue::Bool(false)]),
        must("mlp_bias", &[FieldValue::Bool(false)]),
        attention_dropout("attention_dropout", "0.0"),
    ]],
    rope: Some(Rope { theta: "10000.0", scaling: &[], yarn: None, share: Some(("rotary_factor", "0.5")), local: None, linear: None, long: None }),
    fixed: &[],
    free: &["batch"],
    unused: &["rotary_emb.inv_freq"],
    predicting: None,
    tied: &[],
    renamed: &[],
};
