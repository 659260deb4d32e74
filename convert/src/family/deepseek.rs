//! DeepSeek-V3.

use super::{
    Family, Field, Kind, Missing, Plain, Predicting, Role, Rope, Yarn, attention_dropout, flag, irrelevant, must, real, rope, size, size_or,
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
        Field { name: "num_key_value_heads", role: Role::Equal("num_attention_heads") },
        size("num_hidden_layers", "layers"),
        Field { name: "first_k_dense_replace", role: Role::Setting { name: "first_dense", kind: Kind::Count, missing: Missing::Value("3") } },
        size("intermediate_size", "ffn"),
        size("max_position_embeddings", "seq"),
        Field {
            name: "q_lora_rank",
            role: Role::Setting { name: "q_rank", kind: Kind::Size, missing: Missing::Either { absent: "1536", null: "0" } },
        },
        size("kv_lora_rank", "kv_rank"),
        size("qk_nope_head_dim", "nope"),
        size("qk_rope_head_dim", "turned"),
        size("v_head_dim", "v_dim"),
        // As transformers 5 writes them, which follow from these.
        Field { name: "head_dim", role: Role::Equal("qk_rope_head_dim") },
        irrelevant("qk_head_dim"),
        size("n_routed_experts", "experts"),
        Field { name: "num_local_experts", role: Role::Alias("n_routed_experts") },
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
        must("hidden_act", &[Plain::Text("silu"), Plain::Text("swish")]),
        must("attention_bias", &[Plain::Bool(false)]),
        must("tie_word_embeddings", &[Plain::Bool(false)]),
        must("scoring_func", &[Plain::Text("sigmoid")]),
        must("topk_method", &[Plain::Text("noaux_tc")]),
        must("moe_layer_freq", &[Plain::Number(1.0)]),
        attention_dropout("attention_dropout", "0.0"),
        Field { name: FURTHER, role: Role::Setting { name: "mtp", kind: Kind::Count, missing: Missing::Value("0") } },
        Field { name: "num_mtp_layers", role: Role::Alias(FURTHER) },
        // The code of the first files, which transformers has had since as its own.
        irrelevant("auto_map"),
        // Losses of that code's, which transformers does not add.
        irrelevant("aux_loss_alpha"),
        irrelevant("seq_aux"),
        irrelevant("output_router_logits"),
        irrelevant("ep_size"),
        irrelevant("pretraining_tp"),
    ]],
    rope: Some(Rope {
        theta: "10000.0",
        scaling: &[],
        yarn: Some(Yarn { chosen: None, scores: Some("mscale_all"), expected: false }),
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
