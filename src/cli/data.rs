//! What `mcc data` takes.

use super::values::{from_one, whole};
use clap::{Args, Subcommand};
use std::path::PathBuf;

#[derive(Subcommand)]
pub enum Data {
    /// Makes a data set of tokens of texts, as Megatron-LM's preprocess_data.py does: PREFIX.bin and PREFIX.idx
    ///
    /// A signal that ends it loses no more than the last moments: the same command goes on from there.
    Tokenize(TokenizeArgs),
    /// Says what a data set holds: documents, tokens, lengths, and a document
    Inspect(DataInspectArgs),
    /// Makes a tokenizer of texts: bytes, and what often stands together (byte-level BPE, as GPT-2's)
    TrainTokenizer(TrainTokenizerArgs),
}

#[derive(Args)]
pub struct TextArgs {
    /// JSON lines (.jsonl, .json, .ndjson) or plain text (.txt, a document each), also with .gz or .zst, or .parquet
    #[arg(required = true, value_name = "IN")]
    pub inputs: Vec<PathBuf>,
}

#[derive(Args)]
pub struct TokenizeArgs {
    #[command(flatten)]
    pub text: TextArgs,
    /// Of JSON lines the field, of Parquet the column, that has the text, or a list of texts; beside a prompt the one
    /// with the answer [default: text, with --prompt-field completion, with --chat messages]
    #[arg(long, value_name = "NAME")]
    pub field: Option<String>,
    /// The field, or column, that has what comes before the answer: a document is both, and PREFIX.mask.bin and
    /// PREFIX.mask.idx say which tokens are the answer's, for `mcc run --loss-mask`
    #[arg(long, value_name = "NAME")]
    pub prompt_field: Option<String>,
    /// The field has a list of messages, as {"role": "user", "content": ".."}, which the tokenizer's chat template
    /// makes a text of; PREFIX.mask.bin and PREFIX.mask.idx say which tokens assistants say
    #[arg(long, conflicts_with = "prompt_field")]
    pub chat: bool,
    /// The chat template, in Jinja [default: the chat_template.jinja beside the tokenizer, or the `chat_template` of
    /// its tokenizer_config.json]
    #[arg(long, value_name = "FILE", requires = "chat")]
    pub chat_template: Option<PathBuf>,
    /// A tokenizer.json of Hugging Face's tokenizers, or a directory that has one
    #[arg(long, value_name = "FILE")]
    pub tokenizer: PathBuf,
    /// Put a token at the end of each document, from which training tells documents apart
    #[arg(long)]
    pub append_eod: bool,
    /// The token that ends a document [default: `eos_token` of the tokenizer_config.json beside the tokenizer]
    #[arg(long, value_name = "TOKEN", requires = "append_eod")]
    pub eod_token: Option<String>,
    /// Add the tokens with which the tokenizer begins or ends a text, as `<s>`. Megatron-LM leaves them out
    #[arg(long)]
    pub add_special_tokens: bool,
    /// The files' name, without `.bin` and `.idx`; the tokenizer is copied to PREFIX.tokenizer
    #[arg(short, long, value_name = "PREFIX")]
    pub output: PathBuf,
    /// Begin anew, also where an earlier command was ended, and replace what is there
    #[arg(long)]
    pub force: bool,
}

#[derive(Args)]
pub struct DataInspectArgs {
    /// The files' name, with or without `.bin` or `.idx`
    #[arg(value_name = "PREFIX")]
    pub prefix: PathBuf,
    /// Show a document as text by this tokenizer [default: that in PREFIX.tokenizer]
    #[arg(long, value_name = "FILE")]
    pub tokenizer: Option<PathBuf>,
    /// Which document is shown, from 0 on
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = whole::<u64>)]
    pub document: u64,
    /// How many of its tokens are shown
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = whole::<usize>)]
    pub tokens: usize,
    /// Look at the index alone, and not for the largest token
    #[arg(long)]
    pub quick: bool,
    /// For tools
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
pub struct TrainTokenizerArgs {
    #[command(flatten)]
    pub text: TextArgs,
    /// Of JSON lines the field, of Parquet the column, that has the text, or a list of texts
    #[arg(long, value_name = "NAME", default_value = "text")]
    pub field: String,
    /// All its tokens, with the 256 bytes and the special ones
    #[arg(long, value_name = "N", default_value_t = 32000, value_parser = from_one::<u32>)]
    pub tokens: u32,
    /// A token that no text makes; may be given several times. The first ends documents
    #[arg(long, value_name = "TOKEN", default_value = "<|endoftext|>")]
    pub special_token: Vec<String>,
    /// The directory for tokenizer.json and tokenizer_config.json
    #[arg(short, long, value_name = "DIR")]
    pub output: PathBuf,
    /// Replace what is there
    #[arg(long)]
    pub force: bool,
}
