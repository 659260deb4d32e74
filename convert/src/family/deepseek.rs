//! DeepSeek-V3.

use super::{
    Family, Field, FieldDefault, FieldRole, FieldValue, Predicting, Rope, SettingKind, YarnSettings, attention_dropout, flag, irrelevant, must, real,
    rope, size, size_or,
};

/// The field of how many layers predict further tokens.
const FURTHER: &str = "num_nextn_predict_layers";

pub const DEEPSEEK_V3: Family = Family {
    architecture: "DeepseekV3ForCausalLM",
    others: &["DeepseekV3Model"],
    model_type: "deepseek_v3",
    model: "deepseek_v3",
    text: include_str!("../../../models/deepseek_v3.mdl"),
    base: "model.",
    fields: &[&[
        size("vocab_size", "vocab"),
        size("hidden_size", "hidden"),
        size("num_attention_heads", "heads"),
        // Every head has keys and values of its own.
        Field { name: "num_key_value_heads", role: FieldRole::Equal("num_attention_heads") },
        size("num_hidden_layers", "layers"),
        Field {
            name: "first_k_dense_replace",
            role: FieldRole::Setting { name: "first_dense", kind: SettingKind::Count, missing: FieldDefault::Value("3") },
        },
        size("intermediate_size", "ffn"),
        size("max_position_embeddings", "seq"),
        Field {
            name: "q_lora_rank",
            role: FieldRole::Setting { name: "q_rank", kind: SettingKind::Size, missing: FieldDefault::Either { absent: "1536", null: "0" } },
        },
        size("kv_lora_rank", "kv_rank"),
        size("qk_nope_head_dim", "nope"),
        size("qk_rope_head_dim", "turned"),
        size("v_head_dim", "v_dim"),
        // transformers 5 writes these two fields, which follow from the sizes above.
        Field { name: "head_dim", role: FieldRole::Equal("qk_rope_head_dim") },
        irrelevant("qk_head_dim"),
        size("n_routed_experts", "experts"),
        Field { name: "num_local_experts", role: FieldRole::Alias("n_routed_experts") },
        size("num_experts_per_tok", "top_k"),
        size("moe_intermediate_size", "expert_ffn"),
        size("n_shared_experts", "shared"),
        size_or("n_group", "groups", "8"),
        size_or("topk_group", "top_groups", "4"),
        flag("norm_topk_prob", "norm_topk", "true"),
        real("routed_scaling_factor", "route_scale", "2.5"),
        real("rms_norm_eps", "norm_eps", "1e-6"),
        rope("rope_theta"),
        rope("rope_scaling"),
        rope("rope_parameters"),
        rope("partial_rotary_factor"),
        flag("rope_interleave", "interleaved", "true"),
        must("hidden_act", &[FieldValue::Text("silu"), FieldValue::Text("swish")]),
        must("attention_bias", &[FieldValue::Bool(false)]),
        must("tie_word_embeddings", &[FieldValue::Bool(false)]),
        must("scoring_func", &[FieldValue::Text("sigmoid")]),
        must("topk_method", &[FieldValue::Text("noaux_tc")]),
        must("moe_layer_freq", &[FieldValue::Number(1.0)]),
        attention_dropout("attention_dropout", "0.0"),
        Field { name: FURTHER, role: FieldRole::Setting { name: "mtp", kind: SettingKind::Count, missing: FieldDefault::Value("0") } },
        Field { name: "num_mtp_layers", role: FieldRole::Alias(FURTHER) },
        // The first files name code of their repository here, which transformers has since adopted.
        irrelevant("auto_map"),
        // `aux_loss_alpha` and `seq_aux` set a loss of that code, which transformers does not add.
        irrelevant("aux_loss_alpha"),
        irrelevant("seq_aux"),
        irrelevant("output_router_logits"),
        irrelevant("ep_size"),
        irrelevant("pretraining_tp"),
    ]],
    rope: Some(Rope {
        theta: "10000.0",
        scaling: &[],
        yarn: Some(YarnSettings { chosen: None, scores: Some("mscale_all"), expected: false }),
        share: None,
        local: None,
        linear: None,
        long: None,
    }),
    fixed: &[],
    free: &["batch", "packed", "separator", "bias_rate", "mtp_weight"],
    unused: &["rotary_emb.inv_freq"],
    predicting: Some(Predicting { prefix: "model.layers.", setting: "mtp", field: FURTHER }),
    tied: &[],
    renamed: &[],
};
