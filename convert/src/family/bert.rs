//! BERT with the head that predicts masked tokens.

use super::{Family, FieldValue, attention_dropout, irrelevant, must, real, size};

pub const BERT: Family = Family {
    architecture: "BertForMaskedLM",
    others: &["BertForPreTraining"],
    model_type: "bert",
    model: "bert",
    text: include_str!("../../../models/bert.mdl"),
    base: "bert.",
    fields: &[&[
        size("vocab_size", "vocab"),
        size("type_vocab_size", "types"),
        size("hidden_size", "hidden"),
        size("num_attention_heads", "heads"),
        size("intermediate_size", "ffn"),
        size("num_hidden_layers", "layers"),
        size("max_position_embeddings", "seq"),
        real("layer_norm_eps", "norm_eps", "1e-12"),
        real("hidden_dropout_prob", "dropout_rate", "0.1"),
        attention_dropout("attention_probs_dropout_prob", "0.1"),
        must("hidden_act", &[FieldValue::Text("gelu")]),
        must("position_embedding_type", &[FieldValue::Text("absolute")]),
        must("tie_word_embeddings", &[FieldValue::Bool(true)]),
        must("is_decoder", &[FieldValue::Bool(false)]),
        irrelevant("classifier_dropout"),
    ]],
    rope: None,
    fixed: &[],
    free: &["batch", "padded"],
    unused: &["embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias", "cls.seq_relationship.weight", "cls.seq_relationship.bias"],
    predicting: None,
    tied: &[("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"), ("cls.predictions.decoder.bias", "cls.predictions.bias")],
    renamed: &[("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")],
};
