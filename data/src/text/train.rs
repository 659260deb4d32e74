//! A byte-level BPE tokenizer, as GPT-2's, made of documents.

use super::documents::{Documents, Fields, Position};
use super::error::TextError;
use super::tokenizer::Tokenizer;
use std::cell::RefCell;
use std::fs;
use std::path::{Path, PathBuf};
use tokenizers::AddedToken;
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainerBuilder};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

/// What a new tokenizer is made of.
pub struct Recipe {
    /// Files of text, in the order in which they are read.
    pub inputs: Vec<PathBuf>,
    /// Field of JSON lines, or column of Parquet, that has the text.
    pub field: String,
    /// All tokens, special ones too.
    pub tokens: usize,
    /// Tokens that no text makes. The first ends a document.
    pub special: Vec<String>,
}

/// Makes a tokenizer of all documents and writes it as a `tokenizer.json`, with the `tokenizer_config.json` beside it
/// that says which token ends a document. Their folder is made, too. The same documents make the same file.
///
/// # Errors
/// Fewer tokens than there are bytes; text that cannot be read; what the file system says.
pub fn train(recipe: &Recipe, file: &Path) -> Result<Tokenizer, TextError> {
    let least = 256 + recipe.special.len();
    if recipe.tokens < least {
        return Err(TextError::Small { tokens: recipe.tokens, least });
    }
    let special: Vec<AddedToken> = recipe.special.iter().map(|t| AddedToken::from(t.clone(), true)).collect();
    let alphabet = ByteLevel::alphabet().into_iter().collect();
    let trainer = BpeTrainerBuilder::new().show_progress(false).vocab_size(recipe.tokens).min_frequency(2);
    let mut trainer: TrainerWrapper = trainer.special_tokens(special).initial_alphabet(alphabet).build().into();
    let mut tokenizer = tokenizers::Tokenizer::new(BPE::default());
    tokenizer.with_pre_tokenizer(Some(ByteLevel::new(false, true, true)));
    tokenizer.with_decoder(Some(ByteLevel::default()));
    tokenizer.with_post_processor(Some(ByteLevel::new(false, false, true)));
    // An iterator cannot return an error, so the first error ends it.
    let failed = RefCell::new(None);
    let fields = Fields::of_texts(&recipe.field);
    let mut documents = Documents::new(&recipe.inputs, &fields, Position::default())?;
    let batches = std::iter::from_fn(|| match documents.batch(1 << 18) {
        Ok(Some(batch)) => {
            let mut texts = vec![];
            let read = batch.texts(&fields, |of| {
                texts.extend(of.texts.iter().map(ToString::to_string));
                Ok(())
            });
            read.map_err(|e| failed.replace(Some(e))).ok().map(|()| texts)
        }
        Ok(None) => None,
        Err(e) => {
            failed.replace(Some(e));
            None
        }
    });
    // The trainer requires an iterator that is `Send`, which this one is not.
    let texts: Vec<String> = batches.flatten().collect();
    if let Some(error) = failed.into_inner() {
        return Err(error);
    }
    let wrong = |what: String| TextError::Tokenizer { file: file.into(), what };
    tokenizer.train(&mut trainer, texts.into_iter()).map_err(|e| wrong(e.to_string()))?;
    let text = tokenizer.to_string(true).map_err(|e| wrong(e.to_string()))?;
    let io = |file: &Path| {
        let file = file.to_path_buf();
        |cause| TextError::Io { file, cause }
    };
    if let Some(folder) = file.parent().filter(|f| !f.as_os_str().is_empty()) {
        fs::create_dir_all(folder).map_err(io(folder))?;
    }
    fs::write(file, text).map_err(io(file))?;
    if let Some(end) = recipe.special.first() {
        let config = file.with_file_name("tokenizer_config.json");
        let text = format!("{:#}\n", serde_json::json!({"eos_token": end, "tokenizer_class": "PreTrainedTokenizerFast"}));
        fs::write(&config, text).map_err(io(&config))?;
    }
    Tokenizer::open(file)
}
