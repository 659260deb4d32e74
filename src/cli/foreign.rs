//! What `mcc import` and `mcc export` take.

use super::values::define;
use clap::{Args, Subcommand};
use std::path::PathBuf;

#[derive(Subcommand)]
pub enum Import {
    /// A Hugging Face directory: config.json and model.safetensors, or its shards
    Hf(ImportArgs),
}

#[derive(Args)]
pub struct ImportArgs {
    /// The directory: `hf download gpt2 --local-dir gpt2` makes one of a model on the hub
    pub directory: PathBuf,
    /// Replace what is there of these files; without it the import is refused
    #[arg(long)]
    pub force: bool,
    /// Where model.mdl, weights.safetensors and config.json go: needed
    #[arg(short, long, value_name = "OUT")]
    pub output: Option<PathBuf>,
    /// A model text of your own with a section `weights hf`, instead of one for the config: only weights.safetensors is written
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
    /// Where model.safetensors and config.json go
    #[arg(short, long, value_name = "DIR")]
    pub output: PathBuf,
    /// Replace what is there of these files; without it the export is refused
    #[arg(long)]
    pub force: bool,
}
