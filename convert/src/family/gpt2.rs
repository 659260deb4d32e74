//! GPT-2.

use super::{Family, Field, FieldRole, FieldValue, attention_dropout, derived, irrelevant, must, real, size};

pub const GPT2: Family = Family {
    architecture: "GPT2LMHeadModel",
    others: &["GPT2Model"],
    model_type: "gpt2",
    model: "gpt2",
    text: include_str!("../../../models/gpt2.mdl"),
    base: "transformer.",
    fields: &[&[
        size("vocab_size", "vocab"),
        size("n_embd", "hidden"),
        size("n_head", "heads"),
        derived("n_inner", "ffn"),
        size("n_layer", "layers"),
        size("n_positions", "seq"),
        real("layer_norm_epsilon", "norm_eps", "1e-5"),
        real("resid_pdrop", "dropout_rate", "0.1"),
        Field { name: "embd_pdrop", role: FieldRole::As("resid_pdrop") },
        attention_dropout("attn_pdrop", "0.1"),
        must("activation_function", &[FieldValue::Text("gelu_new"), FieldValue::Text("gelu_pytorch_tanh")]),
        must("tie_word_embeddings", &[FieldValue::Bool(true)]),
        must("scale_attn_weights", &[FieldValue::Bool(true)]),
        must("scale_attn_by_inverse_layer_idx", &[FieldValue::Bool(false)]),
        // Either value computes the same formula, with another order of rounding.
        irrelevant("reorder_and_upcast_attn"),
        // `n_ctx` is the extent of the mask buffer.
        irrelevant("n_ctx"),
        irrelevant("summary_activation"),
        irrelevant("summary_first_dropout"),
        irrelevant("summary_proj_to_labels"),
        irrelevant("summary_type"),
        irrelevant("summary_use_proj"),
    ]],
    rope: None,
    fixed: &[],
    free: &["batch"],
    unused: &[".attn.bias", ".attn.masked_bias"],
    predicting: None,
    tied: &[("lm_head.weight", "transformer.wte.weight")],
    renamed: &[],
};
