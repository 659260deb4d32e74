//! The kinds of models that can be imported: their texts, and what each field of their config means.
//!
//! A new kind is a model text with a `weights hf` section and one [`Family`] here.

/// A kind of model, as Hugging Face names it and as mcc writes it.
pub struct Family {
    /// `architectures` of the config.
    pub architecture: &'static str,
    /// The same without the head; its files do if the head is tied.
    pub bare: &'static str,
    /// `model_type` of the config.
    pub model_type: &'static str,
    /// The name of the model in the text, and the text.
    pub model: &'static str,
    pub text: &'static str,
    /// Prefix of most tensor names, which files saved from the bare model lack.
    pub base: &'static str,
    /// The config's fields beside [`COMMON`].
    pub fields: &'static [Field],
    /// Settings of the text that speak of the data, not of the model: no config has to say them.
    pub free: &'static [&'static str],
    /// Ends of names of tensors that hold no weights.
    pub buffers: &'static [&'static str],
    /// A tensor that some files hold although it is tied to another parameter: both names.
    pub tied: (&'static str, &'static str),
}

pub struct Field {
    pub name: &'static str,
    pub role: Role,
}

/// What a field means.
#[derive(Clone, Copy)]
pub enum Role {
    /// The value of a setting of the model text.
    Setting { name: &'static str, kind: Kind, missing: Missing },
    /// The text computes only this; other values are refused. Where the field is missing, it has the first of them.
    Must(&'static [Plain]),
    /// The text has one setting for this field and another one, which it follows: a warning if they differ.
    As(&'static str),
    /// Another value changes training and nothing else: a warning, with the reason.
    Should(Plain, &'static str),
    /// Rotary position embedding, in one of two styles.
    Rope,
    /// Does not change what the model computes.
    Irrelevant,
}

#[derive(Clone, Copy, PartialEq)]
pub enum Kind {
    Size,
    Real,
    Bool,
}

/// What a field that is missing or null stands for.
#[derive(Clone, Copy, PartialEq)]
pub enum Missing {
    Refused,
    /// The text's own default, which is the same formula.
    Default,
    /// Hugging Face's default, as the text writes it.
    Value(&'static str),
}

/// A value of a field that is compared, never computed with.
#[derive(Clone, Copy, Debug)]
pub enum Plain {
    Null,
    Bool(bool),
    Number(f64),
    Text(&'static str),
    EmptyObject,
}

const fn irrelevant(name: &'static str) -> Field {
    Field { name, role: Role::Irrelevant }
}

const fn must(name: &'static str, values: &'static [Plain]) -> Field {
    Field { name, role: Role::Must(values) }
}

const fn size(field: &'static str, name: &'static str) -> Field {
    Field { name: field, role: Role::Setting { name, kind: Kind::Size, missing: Missing::Refused } }
}

/// A size that null leaves to the text's formula.
const fn derived(field: &'static str, name: &'static str) -> Field {
    Field { name: field, role: Role::Setting { name, kind: Kind::Size, missing: Missing::Default } }
}

const fn real(field: &'static str, name: &'static str, default: &'static str) -> Field {
    Field { name: field, role: Role::Setting { name, kind: Kind::Real, missing: Missing::Value(default) } }
}

/// Fields of every config.
pub const COMMON: &[Field] = &[
    // Code of the repository instead of the architecture's.
    must("auto_map", &[Plain::Null]),
    must("quantization_config", &[Plain::Null]),
    must("pruned_heads", &[Plain::Null, Plain::EmptyObject]),
    must("is_encoder_decoder", &[Plain::Bool(false), Plain::Null]),
    must("add_cross_attention", &[Plain::Bool(false), Plain::Null]),
    irrelevant("architectures"),
    irrelevant("model_type"),
    irrelevant("transformers_version"),
    // The dtype of the tensors is that of the file.
    irrelevant("dtype"),
    irrelevant("torch_dtype"),
    irrelevant("use_cache"),
    irrelevant("bos_token_id"),
    irrelevant("eos_token_id"),
    irrelevant("pad_token_id"),
    irrelevant("sep_token_id"),
    irrelevant("initializer_range"),
    irrelevant("initializer_factor"),
    irrelevant("output_attentions"),
    irrelevant("output_hidden_states"),
    irrelevant("return_dict"),
    irrelevant("torchscript"),
    irrelevant("attn_implementation"),
    irrelevant("_attn_implementation"),
    irrelevant("_attn_implementation_autoset"),
    irrelevant("_name_or_path"),
    irrelevant("name_or_path"),
    irrelevant("_commit_hash"),
    irrelevant("tokenizer_class"),
    irrelevant("task_specific_params"),
    irrelevant("problem_type"),
    irrelevant("finetuning_task"),
    irrelevant("id2label"),
    irrelevant("label2id"),
    irrelevant("num_labels"),
    irrelevant("is_decoder"),
    irrelevant("_num_labels"),
    irrelevant("chunk_size_feed_forward"),
    irrelevant("gradient_checkpointing"),
    irrelevant("cross_attention_hidden_size"),
    irrelevant("tie_encoder_decoder"),
    irrelevant("tf_legacy_loss"),
    irrelevant("use_bfloat16"),
    irrelevant("transformers.js_config"),
    irrelevant("decoder_start_token_id"),
    irrelevant("prefix"),
    // Generation.
    irrelevant("max_length"),
    irrelevant("min_length"),
    irrelevant("do_sample"),
    irrelevant("early_stopping"),
    irrelevant("num_beams"),
    irrelevant("temperature"),
    irrelevant("top_k"),
    irrelevant("top_p"),
    irrelevant("typical_p"),
    irrelevant("repetition_penalty"),
    irrelevant("encoder_no_repeat_ngram_size"),
    irrelevant("no_repeat_ngram_size"),
    irrelevant("length_penalty"),
    irrelevant("exponential_decay_length_penalty"),
    irrelevant("diversity_penalty"),
    irrelevant("num_beam_groups"),
    irrelevant("num_return_sequences"),
    irrelevant("output_scores"),
    irrelevant("return_dict_in_generate"),
    irrelevant("remove_invalid_values"),
    irrelevant("bad_words_ids"),
    irrelevant("forced_bos_token_id"),
    irrelevant("forced_eos_token_id"),
    irrelevant("suppress_tokens"),
    irrelevant("begin_suppress_tokens"),
];

pub const GPT2: Family = Family {
    architecture: "GPT2LMHeadModel",
    bare: "GPT2Model",
    model_type: "gpt2",
    model: "gpt2",
    text: include_str!("../../models/gpt2.mdl"),
    base: "transformer.",
    fields: &[
        size("vocab_size", "vocab"),
        size("n_embd", "hidden"),
        size("n_head", "heads"),
        derived("n_inner", "ffn"),
        size("n_layer", "layers"),
        size("n_positions", "seq"),
        real("layer_norm_epsilon", "norm_eps", "1e-5"),
        real("resid_pdrop", "dropout_rate", "0.1"),
        Field { name: "embd_pdrop", role: Role::As("resid_pdrop") },
        Field {
            name: "attn_pdrop",
            role: Role::Should(Plain::Number(0.0), "mcc drops no attention weights, so training regularises a little less; inference is the same"),
        },
        must("activation_function", &[Plain::Text("gelu_new"), Plain::Text("gelu_pytorch_tanh")]),
        must("tie_word_embeddings", &[Plain::Bool(true)]),
        must("scale_attn_weights", &[Plain::Bool(true)]),
        must("scale_attn_by_inverse_layer_idx", &[Plain::Bool(false)]),
        // The same formula in another order of rounding.
        irrelevant("reorder_and_upcast_attn"),
        // The extent of the mask buffer.
        irrelevant("n_ctx"),
        irrelevant("summary_activation"),
        irrelevant("summary_first_dropout"),
        irrelevant("summary_proj_to_labels"),
        irrelevant("summary_type"),
        irrelevant("summary_use_proj"),
    ],
    free: &["batch"],
    buffers: &[".attn.bias", ".attn.masked_bias"],
    tied: ("lm_head.weight", "transformer.wte.weight"),
};

pub const LLAMA: Family = Family {
    architecture: "LlamaForCausalLM",
    bare: "LlamaModel",
    model_type: "llama",
    model: "llama",
    text: include_str!("../../models/llama.mdl"),
    base: "model.",
    fields: &[
        size("vocab_size", "vocab"),
        size("hidden_size", "hidden"),
        size("num_attention_heads", "heads"),
        derived("num_key_value_heads", "kv_heads"),
        derived("head_dim", "head_dim"),
        size("intermediate_size", "ffn"),
        size("num_hidden_layers", "layers"),
        size("max_position_embeddings", "seq"),
        real("rms_norm_eps", "norm_eps", "1e-6"),
        Field { name: "tie_word_embeddings", role: Role::Setting { name: "tied", kind: Kind::Bool, missing: Missing::Value("false") } },
        Field { name: "rope_theta", role: Role::Rope },
        Field { name: "rope_scaling", role: Role::Rope },
        Field { name: "rope_parameters", role: Role::Rope },
        must("hidden_act", &[Plain::Text("silu"), Plain::Text("swish")]),
        must("attention_bias", &[Plain::Bool(false)]),
        must("mlp_bias", &[Plain::Bool(false)]),
        must("rope_interleaved", &[Plain::Bool(false), Plain::Null]),
        must("partial_rotary_factor", &[Plain::Number(1.0), Plain::Null]),
        Field {
            name: "attention_dropout",
            role: Role::Should(Plain::Number(0.0), "mcc drops no attention weights, so training regularises a little less; inference is the same"),
        },
        // How the same products are cut into pieces.
        irrelevant("pretraining_tp"),
    ],
    free: &["batch", "packed", "separator"],
    buffers: &["rotary_emb.inv_freq"],
    tied: ("lm_head.weight", "model.embed_tokens.weight"),
};

pub const FAMILIES: [&Family; 2] = [&GPT2, &LLAMA];

impl Family {
    /// What a field means, if it is known.
    pub fn role(&self, field: &str) -> Option<Role> {
        self.fields.iter().chain(COMMON).find(|f| f.name == field).map(|f| f.role)
    }
}
