//! T5, v1.0 and v1.1.

use super::{Family, Field, FieldRole, FieldValue, derived, flag, irrelevant, must, no_dropout, real, size, size_or};

pub const T5: Family = Family {
    architecture: "T5ForConditionalGeneration",
    others: &["T5WithLMHeadModel"],
    model_type: "t5",
    model: "t5",
    text: include_str!("../../../models/t5.mdl"),
    base: "",
    fields: &[&[
        size("vocab_size", "vocab"),
        size("d_model", "hidden"),
        size("num_heads", "heads"),
        size("d_kv", "head_dim"),
        size("d_ff", "ffn"),
        size("num_layers", "encoder_layers"),
        derived("num_decoder_layers", "decoder_layers"),
        size_or("relative_attention_num_buckets", "buckets", "32"),
        size_or("relative_attention_max_distance", "max_distance", "128"),
        real("layer_norm_epsilon", "norm_eps", "1e-6"),
        Field {
            name: "feed_forward_proj",
            role: FieldRole::Choice {
                missing: "relu",
                options: &[("relu", &[("gated", "false"), ("act", "relu")]), ("gated-gelu", &[("gated", "true"), ("act", "gelu_tanh")])],
            },
        },
        flag("tie_word_embeddings", "tied", "true"),
        // transformers 5 writes this field, beside a `tie_word_embeddings` that is always true.
        Field { name: "scale_decoder_outputs", role: FieldRole::Over("tie_word_embeddings") },
        no_dropout("dropout_rate"),
        must("is_encoder_decoder", &[FieldValue::Bool(true)]),
        must("decoder_start_token_id", &[FieldValue::Number(0.0)]),
        must("pad_token_id", &[FieldValue::Number(0.0)]),
        // These two fields follow from `feed_forward_proj`.
        irrelevant("dense_act_fn"),
        irrelevant("is_gated_act"),
        irrelevant("classifier_dropout"),
        irrelevant("n_positions"),
        irrelevant("output_past"),
    ]],
    rope: None,
    fixed: &[],
    free: &["batch", "source", "target"],
    unused: &["EncDecAttention.relative_attention_bias.weight"],
    predicting: None,
    tied: &[("encoder.embed_tokens.weight", "shared.weight"), ("decoder.embed_tokens.weight", "shared.weight"), ("lm_head.weight", "shared.weight")],
    renamed: &[],
};
