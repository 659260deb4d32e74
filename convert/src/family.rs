//! The kinds of models that can be imported: their texts, and what each field of their config means.
//!
//! A new kind is a model text with a `weights hf` section and one [`Family`] in a file here.

mod bert;
mod common;
mod deepseek;
mod gemma;
mod gpt2;
mod gpt_oss;
mod llama;
mod mixtral;
mod nemotron;
mod t5;

pub use common::COMMON;
#[cfg(test)]
pub use llama::LLAMA;
#[cfg(test)]
pub use mixtral::QWEN3_MOE;

/// A kind of model, as Hugging Face names it and as mcc writes it.
pub struct Family {
    /// `architectures` of the config.
    pub architecture: &'static str,
    /// Others whose files hold all tensors of it: with further heads, or without the head if that is tied.
    pub others: &'static [&'static str],
    /// `model_type` of the config.
    pub model_type: &'static str,
    /// The name of the model in the text, and the text.
    pub model: &'static str,
    pub text: &'static str,
    /// Prefix of most tensor names, which files saved from the bare model lack.
    pub base: &'static str,
    /// The config's fields beside [`COMMON`], in groups that families may share.
    pub fields: &'static [&'static [Field]],
    /// Rotary position embedding, if it has [`FieldRole::Rope`] fields.
    pub rope: Option<Rope>,
    /// Settings that the architecture itself implies.
    pub fixed: &'static [(&'static str, &'static str)],
    /// Settings of the text that speak of the data, not of the model: no config has to say them.
    pub free: &'static [&'static str],
    /// Ends of names of tensors that the model does not compute with: buffers and other heads.
    pub unused: &'static [&'static str],
    /// Layers that predict further tokens, if the text has such. What lies behind them is left out.
    pub predicting: Option<Predicting>,
    /// Tensors that some files hold although they are tied to another parameter: both names.
    pub tied: &'static [(&'static str, &'static str)],
    /// Ends of names that older files write otherwise: today's and theirs.
    pub renamed: &'static [(&'static str, &'static str)],
}

/// Layers behind the others, which predict further tokens.
#[derive(Clone, Copy)]
pub struct Predicting {
    /// What stands before the number of any layer in names of tensors.
    pub prefix: &'static str,
    /// The setting of how many there are, and the config's field.
    pub setting: &'static str,
    pub field: &'static str,
}

/// The settings of a text that turns queries and keys by their position.
pub struct Rope {
    /// Hugging Face's `rope_theta` where the config has none, as the text writes it.
    pub theta: &'static str,
    /// Fields and settings of the scaling that Llama 3 has; none: the text has no such scaling.
    pub scaling: &'static [(&'static str, &'static str, SettingKind)],
    /// How the text says YaRN; none: it has no such scaling.
    pub yarn: Option<YarnSettings>,
    /// The setting of the share of each head that turns, and its default; none: all of it.
    pub share: Option<(&'static str, &'static str)>,
    /// The setting of the theta of layers with windows; none: all layers turn alike.
    pub local: Option<&'static str>,
    /// The setting of a factor that divides all frequencies; none: the text has none.
    pub linear: Option<&'static str>,
    /// LongRoPE; none: the text has no such scaling.
    pub long: Option<LongRopeSettings>,
}

/// The settings of LongRoPE: a factor for each frequency, others for sequences longer than the original ones.
pub struct LongRopeSettings {
    /// Hugging Face's length of original sequences where the config has none.
    pub original: &'static str,
}

impl LongRopeSettings {
    pub const SHORT: (&str, &str) = ("short_factor", "short_factors");
    pub const LONG: (&str, &str) = ("long_factor", "long_factors");
    /// Factor of queries and keys.
    pub const SCALE: (&str, &str) = ("attention_factor", "long_scale");
    pub const ORIGINAL: (&str, &str) = ("original_max_position_embeddings", "rope_original");
}

/// The settings of YaRN.
pub struct YarnSettings {
    /// The setting that chooses it; none: a text with a factor has it.
    pub chosen: Option<&'static str>,
    /// Whether scores are multiplied too, by what `mscale_all_dim` says: the setting of that.
    pub scores: Option<&'static str>,
    /// Whether transformers takes a config that says nothing of frequencies for one that scales them.
    pub expected: bool,
}

impl YarnSettings {
    /// Fields and their settings, with Hugging Face's defaults.
    pub const NUMBERS: [(&str, &str, SettingKind, &str); 2] =
        [("beta_slow", "rope_low", SettingKind::Real, "1.0"), ("beta_fast", "rope_high", SettingKind::Real, "32.0")];
    pub const FACTOR: (&str, &str) = ("factor", "rope_factor");
    pub const ORIGINAL: (&str, &str) = ("original_max_position_embeddings", "rope_original");
    pub const TRUNCATE: (&str, &str) = ("truncate", "yarn_truncate");
    /// Factor of queries and keys.
    pub const SCALE: (&str, &str) = ("attention_factor", "yarn_scale");
}

pub struct Field {
    pub name: &'static str,
    pub role: FieldRole,
}

/// What a field means.
#[derive(Clone, Copy)]
pub enum FieldRole {
    /// The value of a setting of the model text.
    Setting { name: &'static str, kind: SettingKind, missing: FieldDefault },
    /// The text computes only this; other values are refused. Where the field is missing, it has the first of them.
    Must(&'static [FieldValue]),
    /// A list of which every entry must be this; other lists are refused.
    Every(&'static str),
    /// A list of the type of each layer: the setting is the n of which every n-th layer has no window. Without a
    /// list it has this value.
    FullEvery(&'static str, u64),
    /// The field has to equal another one, or be missing.
    Equal(&'static str),
    /// Each option stands for several settings; other values are refused. `missing` is the value of a missing field.
    Choice { missing: &'static str, options: &'static [(&'static str, &'static [(&'static str, &'static str)])] },
    /// If the field is present, it replaces another field.
    Over(&'static str),
    /// Another name of a field, in configs of other versions.
    Alias(&'static str),
    /// The text has one setting for this field and another one, which it follows: a warning if they differ.
    As(&'static str),
    /// Another value changes training and nothing else: a warning, with the reason.
    Should(FieldValue, &'static str),
    /// Rotary position embedding, in one of two styles.
    Rope,
    /// How tensors are coded.
    Quantised,
    /// Does not change what the model computes.
    Irrelevant,
}

#[derive(Clone, Copy, PartialEq)]
pub enum SettingKind {
    /// A whole number from 1 on. Where the text writes 0 for none, configs have null.
    Size,
    /// A whole number from 0 on.
    Count,
    Real,
    /// A list of real numbers.
    Reals,
    Bool,
}

/// What a field that is missing or null stands for.
#[derive(Clone, Copy, PartialEq)]
pub enum FieldDefault {
    Refused,
    /// The text's own default, which is the same formula.
    Default,
    /// Hugging Face's default, as the text writes it.
    Value(&'static str),
    /// The same if it is missing; null is the text's own default.
    Absent(&'static str),
    /// One value if it is missing, another if it is null.
    Either {
        absent: &'static str,
        null: &'static str,
    },
}

/// A value of a field that is compared, never computed with.
#[derive(Clone, Copy, Debug)]
pub enum FieldValue {
    Null,
    Bool(bool),
    Number(f64),
    Text(&'static str),
    EmptyObject,
    EmptyList,
}

const fn irrelevant(name: &'static str) -> Field {
    Field { name, role: FieldRole::Irrelevant }
}

const fn must(name: &'static str, values: &'static [FieldValue]) -> Field {
    Field { name, role: FieldRole::Must(values) }
}

const fn size(field: &'static str, name: &'static str) -> Field {
    Field { name: field, role: FieldRole::Setting { name, kind: SettingKind::Size, missing: FieldDefault::Refused } }
}

const fn flag(field: &'static str, name: &'static str, default: &'static str) -> Field {
    Field { name: field, role: FieldRole::Setting { name, kind: SettingKind::Bool, missing: FieldDefault::Value(default) } }
}

const fn rope(name: &'static str) -> Field {
    Field { name, role: FieldRole::Rope }
}

/// A rate of dropout of attention weights; the default is Transformers'.
const fn attention_dropout(name: &'static str, default: &'static str) -> Field {
    real(name, "attention_dropout", default)
}

/// A rate of dropout, of which the text has none.
const fn no_dropout(name: &'static str) -> Field {
    const REASON: &str = "mcc drops nothing in this model, so training regularises less; inference is the same";
    Field { name, role: FieldRole::Should(FieldValue::Number(0.0), REASON) }
}

/// A size that null leaves to the text's formula.
const fn derived(field: &'static str, name: &'static str) -> Field {
    Field { name: field, role: FieldRole::Setting { name, kind: SettingKind::Size, missing: FieldDefault::Default } }
}

/// A size that null leaves to the text, but for which Hugging Face has a default of its own.
const fn size_or(field: &'static str, name: &'static str, default: &'static str) -> Field {
    Field { name: field, role: FieldRole::Setting { name, kind: SettingKind::Size, missing: FieldDefault::Absent(default) } }
}

const fn real(field: &'static str, name: &'static str, default: &'static str) -> Field {
    Field { name: field, role: FieldRole::Setting { name, kind: SettingKind::Real, missing: FieldDefault::Value(default) } }
}

/// The first of those that share a model text is the one that a text without a config is exported as, if it can say
/// all of its settings.
pub const FAMILIES: [&Family; 16] = [
    &gpt2::GPT2,
    &llama::LLAMA,
    &llama::MISTRAL,
    &llama::QWEN2,
    &llama::QWEN3,
    &llama::OLMO2,
    &llama::PHI3,
    &mixtral::MIXTRAL,
    &mixtral::QWEN3_MOE,
    &deepseek::DEEPSEEK_V3,
    &gpt_oss::GPT_OSS,
    &nemotron::NEMOTRON,
    &gemma::GEMMA2,
    &gemma::GEMMA3,
    &bert::BERT,
    &t5::T5,
];

impl Family {
    /// What the fields of its configs mean: its own, and those of all of which it says nothing.
    pub fn fields(&self) -> impl Iterator<Item = &'static Field> {
        let own = || self.fields.iter().copied().flatten();
        own().chain(COMMON.iter().filter(move |common| own().all(|f| f.name != common.name)))
    }

    /// What a field means, if it is known.
    pub fn role(&self, field: &str) -> Option<FieldRole> {
        self.fields().find(|f| f.name == field).map(|f| f.role)
    }
}
