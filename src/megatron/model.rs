//! The model text and its settings.

use super::flags::Flag;
use super::plan::{Plan, Sizes};
use super::text::Text;
use super::traits::{self, Activation, Normalization, Positions};
use crate::foreign_flags::{FlagReplacement, replacement};

/// Flags that say what a model is, all of which the choice of a text answers.
const CHOOSING: &[&str] = &[
    "normalization",
    "apply-layernorm-1p",
    "swiglu",
    "squared-relu",
    "quick-geglu",
    "openai-gelu",
    "onnx-safe",
    "position-embedding-type",
    "use-rotary-position-embeddings",
    "no-position-embedding",
    "disable-bias-linear",
    "multi-latent-attention",
];

/// Flags that are not their setting as they stand.
const OTHERWISE: &[&str] = &["moe-aux-loss-coeff", "moe-router-bias-update-rate", "moe-ffn-hidden-size"];

/// Flags that only other models than those of the texts have.
pub const FOREIGN_MODELS: &[&str] =
    &["img-h", "img-w", "language-model-type", "model-provider", "hybrid-layer-pattern", "hybrid-override-pattern", "retro-add-retriever"];

/// What Megatron-LM takes for settings of which a script says nothing.
const DEFAULTS: &[(&str, &str, &str)] = &[
    ("rotary-base", "rope_theta", "10000"),
    ("moe-router-topk", "top_k", "2"),
    ("kv-lora-rank", "kv_rank", "32"),
    ("qk-head-dim", "nope", "128"),
    ("qk-pos-emb-head-dim", "turned", "64"),
    ("v-head-dim", "v_dim", "128"),
];

impl Plan<'_> {
    /// The settings of the text. What is chosen by the text itself is said where it does not fit.
    pub fn model(&mut self, sizes: &mut Sizes) {
        let traits = traits::of(&self.flags);
        self.differs.extend(self.text.traits.differences(&traits, self.text.file));
        self.differs.extend(self.text.otherwise.iter().map(ToString::to_string));
        for name in CHOOSING {
            if let Some(flag) = self.flags.take(name) {
                self.leave(
                    &flag,
                    format!(
                        "models/{} was chosen by it{}",
                        self.text.file,
                        if *name == "apply-layernorm-1p" && traits.norm == Normalization::Rms {
                            "; weights of RMSNorm are kept as they are, not minus 1, which computes the same"
                        } else {
                            ""
                        }
                    ),
                );
            }
        }
        self.depth(sizes);
        let hidden = self.flags.get("hidden-size").and_then(|f| f.values.first()).and_then(Text::whole).and_then(|v| v.parse::<u64>().ok());
        let heads = self.flags.get("num-attention-heads").and_then(|f| f.values.first()).cloned();
        self.key_heads(heads);
        self.widths(hidden, traits.activation);
        self.positions();
        self.vocabulary();
        self.dropout();
        self.ties();
        self.drop_flag("attention-softmax-in-fp32", "the softmax of attention is computed in f32 always");
        if self.text.traits.has_experts && self.flags.get("moe-router-dtype").and_then(|f| f.values.first()).and_then(Text::whole) == Some("fp32") {
            self.drop_flag("moe-router-dtype", "the text's router computes in f32");
        }
        self.direct();
        for (name, setting, default) in DEFAULTS {
            if !self.compile.iter().any(|p| p.flag == format!("-D {setting}")) {
                self.set_default(setting, default, &format!("--{name}"));
            }
        }
        if self.text.norm_eps != "1e-5" && !self.compile.iter().any(|p| p.flag == "-D norm_eps") {
            self.set_default("norm_eps", "1e-5", "--norm-epsilon");
        }
        self.experts(sizes);
    }

    /// Flags that are settings as they stand, by the table of foreign flags.
    fn direct(&mut self) {
        for name in self.flags.names() {
            if let Some(FlagReplacement::Setting(setting)) = replacement(&name)
                && self.text.has(setting)
                && !OTHERWISE.contains(&name.as_str())
                && self.flags.get(&name).is_some_and(|f| !f.values.is_empty())
                && !self.compile.iter().any(|p| p.flag == format!("-D {setting}"))
                && let Some((flag, value)) = self.valued(&name)
            {
                self.set(setting, value, &flag);
            }
        }
    }

    /// Layers, and the length of sequences.
    fn depth(&mut self, sizes: &mut Sizes) {
        let layers = self.valued("num-layers").or_else(|| self.valued("encoder-num-layers"));
        if let Some((flag, value)) = layers {
            sizes.layers = self.count(&flag, &value);
            let setting = if self.text.has("encoder_layers") { "encoder_layers" } else { "layers" };
            self.set(setting, value.clone(), &flag);
            if self.text.has("decoder_layers") && !self.flags.has("decoder-num-layers") {
                self.set("decoder_layers", value, &flag);
            }
        }
        if let Some((flag, value)) = self.valued("decoder-num-layers") {
            self.set("decoder_layers", value, &flag);
        }
        let length = self.valued("seq-length").or_else(|| self.valued("encoder-seq-length"));
        let setting = if self.text.has("source") { "source" } else { "seq" };
        if let Some((flag, value)) = &length {
            self.set(setting, value.clone(), flag);
        }
        if let Some((flag, value)) = self.valued("decoder-seq-length") {
            self.set("target", value, &flag);
        }
        if let Some((flag, value)) = self.valued("max-position-embeddings") {
            let is_length = length.is_some_and(|(_, l)| l.whole() == value.whole());
            let has_table = self.text.traits.positions == Positions::Learned;
            match (is_length, has_table) {
                (true, _) => self.leave(&flag, format!("it is `-D {setting}` here")),
                (false, false) => self.leave(&flag, "it is no size of such a model: positions are computed"),
                (false, true) => {
                    self.leave(&flag, "a model text has a learned position for each of its sequence: `-D seq`");
                    self.differs
                        .push(format!("the script's model has a table of {} positions, here it is as long as a sequence", self.shell.shown(&value)));
                }
            }
        }
    }

    /// Widths of feed-forward layers. Without a flag Megatron-LM has four times the hidden size, or two thirds
    /// of that for gated ones.
    fn widths(&mut self, hidden: Option<u64>, activation: Activation) {
        let is_of_experts = !self.text.has("ffn") && self.flags.has("moe-ffn-hidden-size");
        if is_of_experts {
            self.drop_flag("ffn-hidden-size", "all feed-forward layers of the text are experts: `--moe-ffn-hidden-size` counts");
        }
        let given = self.valued("ffn-hidden-size");
        let default = hidden.map(|h| if activation == Activation::Swiglu { h.saturating_mul(8) / 3 / 64 * 64 } else { h.saturating_mul(4) });
        let ffn = match (given, default) {
            (Some((_, value)), _) => Some(value),
            (None, Some(size)) => {
                if !is_of_experts {
                    self.defaults.push(format!("--ffn-hidden-size {size}"));
                }
                Some(Text::known(size.to_string(), 0))
            }
            (None, None) => None,
        };
        if self.text.has("ffn")
            && let Some(ffn) = &ffn
        {
            self.compile("-D ffn", ffn.clone());
        }
        if self.text.has("expert_ffn") {
            let own = self.valued("moe-ffn-hidden-size").map(|(_, value)| value);
            if let Some(value) = own.or(ffn) {
                self.compile("-D expert_ffn", value);
            }
        }
    }

    fn dropout(&mut self) {
        let hidden = self.valued("hidden-dropout");
        match hidden {
            Some((flag, value)) if self.text.has("dropout_rate") => self.set("dropout_rate", value, &flag),
            Some((flag, value)) => self.without_dropout(&flag, &value, "of activations"),
            None if self.text.has("dropout_rate") => self.set_default("dropout_rate", "0.1", "--hidden-dropout"),
            None => self.differs.push("Megatron-LM's default `--hidden-dropout 0.1` is in the script's model, no dropout in the text".into()),
        }
        let own = self.text.has("attention_dropout");
        match self.valued("attention-dropout") {
            Some((flag, value)) if own => self.set("attention_dropout", value, &flag),
            Some((flag, value)) => self.without_dropout(&flag, &value, "of attention's weights"),
            None if own => self.set_default("attention_dropout", "0.1", "--attention-dropout"),
            None => self.differs.push(
                "Megatron-LM's default `--attention-dropout 0.1` is in the script's model, no dropout of attention's weights in the text".into(),
            ),
        }
    }

    fn without_dropout(&mut self, flag: &Flag, value: &Text, what: &str) {
        let is_none = value.whole().and_then(|v| v.parse::<f64>().ok()) == Some(0.0);
        self.leave(flag, format!("models/{} has no dropout {what}", self.text.file));
        if !is_none {
            self.differs.push(format!("`{}` is in the script's model, no dropout {what} in the text", self.shown(flag)));
        }
    }

    fn ties(&mut self) {
        let untied = self.switch("untie-embeddings-and-output-weights");
        let line = untied.as_ref().map_or(0, |f| f.line);
        match (self.text.is_tied, &untied) {
            (None, _) => self.compile("-D tied", Text::known(untied.is_none().to_string(), line)),
            (Some(true), Some(flag)) => {
                self.leave(flag, format!("models/{} shares the weights of embedding and output: models/llama.mdl shows how not to", self.text.file));
                self.differs.push("the script's model has an output layer of its own, the text shares the embedding's weights".into());
            }
            (Some(false), None) => self.differs.push("the script's model shares the weights of embedding and output, the text does not".into()),
            (Some(false), Some(flag)) => self.leave(&flag.clone(), "the text does so always"),
            (Some(true), None) => {}
        }
    }

    /// Tokens. Megatron-LM asks the tokenizer, which is not here.
    fn vocabulary(&mut self) {
        let tokenizer = self.flags.get("tokenizer-type").and_then(|f| f.values.first()).and_then(Text::whole).unwrap_or("").to_string();
        let given = self.valued("padded-vocab-size").or_else(|| self.valued("vocab-size"));
        let value = match given {
            Some((flag, value)) => {
                self.set("vocab", value, &flag);
                return;
            }
            None if tokenizer == "GPT2BPETokenizer" || (tokenizer.is_empty() && self.flags.has("merge-file")) => {
                self.defaults.push("--vocab-size 50257 (of GPT-2's tokenizer)".into());
                Text::known("50257", 0)
            }
            None => {
                let whose = if tokenizer.is_empty() { "the tokenizer" } else { &tokenizer };
                self.shell.needed("VOCAB", &format!("the number of tokens that {whose} has: the script does not say it"), self.launch.line)
            }
        };
        self.compile("-D vocab", value);
    }
}
