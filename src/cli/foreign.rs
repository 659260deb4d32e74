//! What `mcc import` and `mcc export` take.

use super::values::define;
use clap::{Args, Subcommand, ValueEnum};
use std::path::PathBuf;

#[derive(Subcommand)]
pub enum Import {
    /// A Hugging Face directory: config.json and model.safetensors, or its shards
    Hf(ImportArgs),
    /// A launch script of Megatron-LM: the commands of mcc that do the same, and what is left out of them.
    /// Nothing of the script is run; files beside it that it sources are read
    MegatronArgs(MegatronArgs),
}

#[derive(Args)]
pub struct MegatronArgs {
    /// The script that starts `pretrain_gpt.py`, `pretrain_bert.py` or `pretrain_t5.py`
    #[arg(value_name = "SCRIPT.sh")]
    pub script: PathBuf,
    /// Where the commands go, as a script [default: standard output]
    #[arg(short, long, value_name = "OUT.sh")]
    pub output: Option<PathBuf>,
    /// Replace that script if it exists; without it the import is refused
    #[arg(long)]
    pub force: bool,
    /// The value of a variable of the script, or of an argument, as `--set 1=/data/corpus`; it counts more than
    /// what the script says
    #[arg(long, value_name = "NAME=VALUE", value_parser = define)]
    pub set: Vec<(String, String)>,
    /// Where the lines find model texts
    #[arg(long, value_name = "DIR", default_value = "models")]
    pub models: PathBuf,
    /// What kernels are for: `sm_90a` and `sm_80` are GPUs
    #[arg(long, value_name = "TARGET", default_value = "cpu")]
    pub target: String,
}

#[derive(Args)]
pub struct ImportArgs {
    /// The directory: `hf download gpt2 --local-dir gpt2` makes one of a model on the hub
    pub directory: PathBuf,
    /// Replace what is there of these files; without it the import is refused
    #[arg(long)]
    pub force: bool,
    /// Where model.mdl, weights.safetensors, config.json, dtypes.json and the tokenizer's files go: needed
    #[arg(short, long, value_name = "OUT")]
    pub output: Option<PathBuf>,
    /// A model text of your own with a section `weights hf`, instead of one for the config: only weights.safetensors
    /// and dtypes.json are written
    #[arg(long, value_name = "MODEL.mdl")]
    pub model: Option<PathBuf>,
    /// Sets a setting of that model text
    #[arg(short = 'D', value_name = "NAME=VALUE", value_parser = define, requires = "model")]
    pub define: Vec<(String, String)>,
}

#[derive(Subcommand)]
pub enum Export {
    /// To a Hugging Face directory
    Hf(ExportArgs),
}

/// A type of exported tensors.
#[derive(Clone, Copy, ValueEnum)]
pub enum Float {
    F32,
    Bf16,
    F16,
}

impl From<Float> for convert::Float {
    fn from(float: Float) -> convert::Float {
        match float {
            Float::F32 => convert::Float::F32,
            Float::Bf16 => convert::Float::Bf16,
            Float::F16 => convert::Float::F16,
        }
    }
}

#[derive(Args)]
pub struct ExportArgs {
    /// Weights under mcc's names, as `mcc run --save-weights` writes them, or a checkpoint of a run
    pub weights: PathBuf,
    /// The model text that they belong to [default: the one that the weights have with them]
    #[arg(long, value_name = "MODEL.mdl")]
    pub model: Option<PathBuf>,
    /// Sets a setting of the model text, where the weights do not say it
    #[arg(short = 'D', value_name = "NAME=VALUE", value_parser = define)]
    pub define: Vec<(String, String)>,
    /// The type of all tensors; what it cannot hold is rounded to nearest even [default: of each the type that it had
    /// when it was imported, else f32]
    #[arg(long, value_enum)]
    pub dtype: Option<Float>,
    /// Where model.safetensors, config.json and the tokenizer's files go
    #[arg(short, long, value_name = "DIR")]
    pub output: PathBuf,
    /// Replace what is there of these files; without it the export is refused
    #[arg(long)]
    pub force: bool,
}
