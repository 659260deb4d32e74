//! What a model is beside its sizes: what its flags say, and how far it is from another.

use super::flags::Flags;
use super::text::Text;

/// How activations are normalised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Normalization {
    Layer,
    /// With weights that are kept minus 1.
    LayerFromOne,
    Rms,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    Gelu,
    Swiglu,
    Geglu,
    SquaredRelu,
    QuickGeglu,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Positions {
    Learned,
    Rotary,
    Relative,
    None,
    /// Another kind of Megatron-LM's.
    Other,
}

/// What a model is beside its sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Traits {
    pub norm: Normalization,
    pub activation: Activation,
    pub positions: Positions,
    /// Linear layers have biases.
    pub has_biases: bool,
    pub has_experts: bool,
    /// Keys and values come from a latent.
    pub has_latent: bool,
}

impl Traits {
    /// How far two models are from each other: experts and latents are what others cannot make up for.
    pub fn distance(&self, other: &Traits) -> usize {
        let far = [self.has_experts != other.has_experts, self.has_latent != other.has_latent];
        let near =
            [self.norm != other.norm, self.activation != other.activation, self.positions != other.positions, self.has_biases != other.has_biases];
        far.iter().filter(|d| **d).count() * 10 + near.iter().filter(|d| **d).count()
    }

    /// What a model has that this one has otherwise, each as a sentence.
    pub fn differences(&self, script: &Traits, file: &str) -> Vec<String> {
        let mut out = vec![];
        let mut say = |is_other: bool, theirs: String, ours: String| {
            if is_other {
                out.push(format!("the script's model has {theirs}, models/{file} has {ours}"));
            }
        };
        say(self.norm != script.norm, script.norm.to_string(), self.norm.to_string());
        say(self.activation != script.activation, script.activation.to_string(), self.activation.to_string());
        say(self.positions != script.positions, script.positions.to_string(), self.positions.to_string());
        let biases = |has: bool| if has { "biases in its linear layers".to_string() } else { "no biases".into() };
        say(self.has_biases != script.has_biases, biases(script.has_biases), biases(self.has_biases));
        let experts = |has: bool| if has { "experts".to_string() } else { "no experts".into() };
        say(self.has_experts != script.has_experts, experts(script.has_experts), experts(self.has_experts));
        let latent = |has: bool| if has { "latent attention".to_string() } else { "keys and values of each head".into() };
        say(self.has_latent != script.has_latent, latent(script.has_latent), latent(self.has_latent));
        out
    }
}

impl std::fmt::Display for Normalization {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Normalization::Layer => "LayerNorm",
            Normalization::LayerFromOne => "LayerNorm with weights that are kept minus 1",
            Normalization::Rms => "RMSNorm",
        })
    }
}

impl std::fmt::Display for Activation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Activation::Gelu => "GELU",
            Activation::Swiglu => "SwiGLU",
            Activation::Geglu => "a gated GELU",
            Activation::SquaredRelu => "squared ReLU",
            Activation::QuickGeglu => "a gated quick GELU",
        })
    }
}

impl std::fmt::Display for Positions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Positions::Learned => "learned positions",
            Positions::Rotary => "rotary positions",
            Positions::Relative => "a bias by distance",
            Positions::None => "no positions",
            Positions::Other => "another kind of positions",
        })
    }
}

/// What the flags say that a model is. Nothing is taken.
pub fn of(flags: &Flags) -> Traits {
    let value = |name: &str| flags.get(name).and_then(|f| f.values.first()).and_then(Text::whole).unwrap_or("").to_string();
    let norm = match (value("normalization").as_str(), flags.has("apply-layernorm-1p")) {
        ("RMSNorm", _) => Normalization::Rms,
        (_, true) => Normalization::LayerFromOne,
        (_, false) => Normalization::Layer,
    };
    let activation = match () {
        () if flags.has("swiglu") => Activation::Swiglu,
        () if flags.has("squared-relu") => Activation::SquaredRelu,
        () if flags.has("quick-geglu") => Activation::QuickGeglu,
        () => Activation::Gelu,
    };
    let positions = match value("position-embedding-type").as_str() {
        "rope" => Positions::Rotary,
        "relative" => Positions::Relative,
        "none" => Positions::None,
        "" if flags.has("use-rotary-position-embeddings") => Positions::Rotary,
        "" | "learned_absolute" => Positions::Learned,
        _ => Positions::Other,
    };
    Traits {
        norm,
        activation,
        positions,
        has_biases: !flags.has("disable-bias-linear"),
        has_experts: flags.has("num-experts"),
        has_latent: flags.has("multi-latent-attention"),
    }
}
