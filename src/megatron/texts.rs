//! The model texts of `models/`, by what Megatron-LM's flags say of a model.

use super::traits::{Activation, Normalization, Positions, Traits};

/// A text of `models/`.
pub struct ModelText {
    pub file: &'static str,
    /// The programs of Megatron-LM that train such models.
    pub programs: &'static [&'static str],
    pub traits: Traits,
    /// Whether embedding and output share their weights; `None`: the setting `tied` says it.
    pub is_tied: Option<bool>,
    pub settings: &'static [&'static str],
    /// Standard deviation of weights that are drawn.
    pub std: &'static str,
    /// Default of the setting `norm_eps`.
    pub norm_eps: &'static str,
    /// What every model of Megatron-LM's programs has otherwise, beside traits.
    pub otherwise: &'static [&'static str],
}

const GPT: &[&str] = &["pretrain_gpt.py", "finetune_gpt.py", "pretrain_gpt_core.py"];
const LLAMA_LIKE: Traits = Traits {
    norm: Normalization::Rms,
    activation: Activation::Swiglu,
    positions: Positions::Rotary,
    has_biases: false,
    has_experts: false,
    has_latent: false,
};
const GPT_LIKE: Traits = Traits {
    norm: Normalization::Layer,
    activation: Activation::Gelu,
    positions: Positions::Learned,
    has_biases: true,
    has_experts: false,
    has_latent: false,
};

/// Model texts; the first of equally near ones is taken.
pub const TEXTS: &[ModelText] = &[
    ModelText {
        file: "gpt2.mdl",
        programs: GPT,
        traits: GPT_LIKE,
        is_tied: Some(true),
        settings: &[
            "vocab",
            "hidden",
            "heads",
            "head_dim",
            "ffn",
            "layers",
            "seq",
            "norm_eps",
            "attention_dropout",
            "dropout_rate",
            "packed",
            "separator",
        ],
        std: "0.02",
        norm_eps: "1e-5",
        otherwise: &[],
    },
    ModelText {
        file: "llama.mdl",
        programs: GPT,
        traits: LLAMA_LIKE,
        is_tied: None,
        settings: &[
            "vocab",
            "hidden",
            "heads",
            "kv_heads",
            "head_dim",
            "ffn",
            "layers",
            "seq",
            "norm_eps",
            "attention_dropout",
            "tied",
            "qkv_bias",
            "qk_norm",
            "window",
            "window_every",
            "packed",
            "separator",
            "rope_theta",
            "rope_factor",
            "rope_low",
            "rope_high",
            "rope_original",
        ],
        std: "0.02",
        norm_eps: "1e-5",
        otherwise: &[],
    },
    ModelText {
        file: "nemotron.mdl",
        programs: GPT,
        traits: Traits { norm: Normalization::LayerFromOne, activation: Activation::SquaredRelu, ..LLAMA_LIKE },
        is_tied: Some(false),
        settings: &[
            "vocab",
            "hidden",
            "heads",
            "kv_heads",
            "head_dim",
            "rotary_factor",
            "ffn",
            "layers",
            "seq",
            "norm_eps",
            "attention_dropout",
            "rope_theta",
        ],
        std: "0.0134",
        norm_eps: "1e-5",
        otherwise: &[],
    },
    ModelText {
        file: "mixtral.mdl",
        programs: GPT,
        traits: Traits { has_experts: true, ..LLAMA_LIKE },
        is_tied: Some(false),
        settings: &[
            "vocab",
            "hidden",
            "heads",
            "kv_heads",
            "head_dim",
            "experts",
            "top_k",
            "expert_ffn",
            "layers",
            "seq",
            "norm_eps",
            "attention_dropout",
            "window",
            "rope_theta",
            "balanced",
            "aux_coef",
            "aux_per_sequence",
            "packed",
            "separator",
        ],
        std: "0.02",
        norm_eps: "1e-5",
        otherwise: &[],
    },
    ModelText {
        file: "deepseek_v3.mdl",
        programs: GPT,
        traits: Traits { has_experts: true, has_latent: true, ..LLAMA_LIKE },
        is_tied: Some(false),
        settings: &[
            "vocab",
            "hidden",
            "heads",
            "layers",
            "first_dense",
            "ffn",
            "seq",
            "q_rank",
            "kv_rank",
            "nope",
            "turned",
            "v_dim",
            "experts",
            "top_k",
            "expert_ffn",
            "shared_ffn",
            "groups",
            "top_groups",
            "best",
            "route_scale",
            "bias_rate",
            "norm_eps",
            "attention_dropout",
            "rope_theta",
            "rope_factor",
            "rope_original",
            "yarn_scale",
            "mscale_all",
            "mtp",
            "mtp_weight",
            "packed",
            "separator",
        ],
        std: "0.02",
        norm_eps: "1e-6",
        otherwise: &[],
    },
    ModelText {
        file: "bert.mdl",
        programs: &["pretrain_bert.py"],
        traits: GPT_LIKE,
        is_tied: Some(true),
        settings: &[
            "vocab",
            "types",
            "hidden",
            "heads",
            "head_dim",
            "ffn",
            "layers",
            "seq",
            "norm_eps",
            "attention_dropout",
            "dropout_rate",
            "padded",
        ],
        std: "0.02",
        norm_eps: "1e-12",
        otherwise: &[
            "Megatron-LM's BERT normalises what enters a part of a layer, models/bert.mdl what leaves it",
            "Megatron-LM's BERT also learns whether two sentences follow each other, models/bert.mdl predicts tokens alone",
        ],
    },
    ModelText {
        file: "t5.mdl",
        programs: &["pretrain_t5.py"],
        traits: Traits { norm: Normalization::Rms, activation: Activation::Geglu, positions: Positions::Relative, has_biases: false, ..GPT_LIKE },
        is_tied: None,
        settings: &[
            "vocab",
            "hidden",
            "heads",
            "head_dim",
            "ffn",
            "encoder_layers",
            "decoder_layers",
            "source",
            "target",
            "buckets",
            "max_distance",
            "norm_eps",
            "tied",
        ],
        std: "",
        norm_eps: "1e-6",
        otherwise: &[],
    },
];

impl ModelText {
    pub fn has(&self, setting: &str) -> bool {
        self.settings.contains(&setting)
    }

    /// The text that computes most of what a program trains; `None` for a program whose models none computes.
    pub fn nearest(program: &str, traits: &Traits) -> Option<&'static ModelText> {
        let known = TEXTS.iter().any(|t| t.programs.contains(&program));
        // A program of the user's own is taken to train GPTs, as those of Megatron-LM's examples do.
        let is_foreign = ["mamba", "hybrid", "vision", "ict", "vlm", "retro", "mimo"].iter().any(|kind| program.contains(kind));
        let program = if known || is_foreign { program } else { GPT[0] };
        TEXTS.iter().filter(|t| t.programs.contains(&program)).min_by_key(|t| t.traits.distance(traits))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_have_the_settings_that_they_are_said_to_have() {
        for text in TEXTS {
            let path = format!("{}/models/{}", env!("CARGO_MANIFEST_DIR"), text.file);
            let source = std::fs::read_to_string(path).expect("a text");
            let header: String = source.split(") {").next().expect("a header").split_whitespace().collect::<Vec<_>>().join(" ");
            for setting in text.settings {
                assert!(header.contains(&format!(" {setting} = ")), "{}: {setting}", text.file);
            }
            assert!(header.contains(&format!("norm_eps = {}", text.norm_eps)), "{}", text.file);
            assert!(source.contains(&format!("~ normal({})", text.std)) || text.std.is_empty(), "{}", text.file);
            assert!(text.is_tied.is_some() != text.has("tied"), "{}", text.file);
        }
    }

    #[test]
    fn the_nearest_text_computes_most_of_a_model() {
        let file = |program: &str, traits: Traits| ModelText::nearest(program, &traits).map(|t| t.file);
        assert_eq!(file("pretrain_gpt.py", GPT_LIKE), Some("gpt2.mdl"));
        assert_eq!(file("pretrain_gpt.py", LLAMA_LIKE), Some("llama.mdl"));
        assert_eq!(file("pretrain_gpt.py", Traits { has_biases: true, ..LLAMA_LIKE }), Some("llama.mdl"));
        assert_eq!(file("my_own.py", Traits { has_experts: true, ..GPT_LIKE }), Some("mixtral.mdl"));
        assert_eq!(file("pretrain_gpt.py", Traits { has_experts: true, has_latent: true, ..LLAMA_LIKE }), Some("deepseek_v3.mdl"));
        assert_eq!(file("pretrain_bert.py", GPT_LIKE), Some("bert.mdl"));
        assert_eq!(file("pretrain_hybrid.py", GPT_LIKE), None);
    }
}
