//! Mixtral.

use super::{Family, Field, Plain, Role, Rope, attention_dropout, derived, flag, must, real, rope, size};

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
        // Hugging Face adds the loss only where it returns what routers say.
        flag("output_router_logits", "balanced", "false"),
        real("router_aux_loss_coef", "aux_coef", "0.001"),
        Field { name: "router_jitter_noise", role: Role::Should(Plain::Number(0.0), NO_NOISE) },
        rope("rope_theta"),
        rope("rope_scaling"),
        rope("rope_parameters"),
        rope("partial_rotary_factor"),
        must("tie_word_embeddings", &[Plain::Bool(false)]),
        must("hidden_act", &[Plain::Text("silu"), Plain::Text("swish")]),
        attention_dropout("attention_dropout"),
    ]],
    rope: Some(Rope { theta: "1000000.0", scaling: &[], share: None }),
    fixed: &[],
    free: &["batch", "aux_per_sequence"],
    unused: &["rotary_emb.inv_freq"],
    tied: &[],
    renamed: &[],
};
