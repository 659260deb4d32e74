//! A tokenizer, and which of its tokens ends a document.

use super::bounds::unwound;
use super::error::TextError;
use serde_json::Value;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// A `tokenizer.json` of Hugging Face's tokenizers.
pub struct Tokenizer {
    file: PathBuf,
    inner: tokenizers::Tokenizer,
    hash: blake3::Hash,
}

/// Tokens that end a document in tokenizers which are known, where no configuration says it.
const ENDS: [&str; 6] = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<｜end▁of▁sentence｜>"];

impl Tokenizer {
    /// Reads a `tokenizer.json`, or that of a directory. It truncates and pads nothing, whatever the file says.
    ///
    /// # Errors
    /// What the file system says; a file that is no tokenizer.
    pub fn open(path: &Path) -> Result<Tokenizer, TextError> {
        let file = if path.is_dir() { path.join("tokenizer.json") } else { path.to_path_buf() };
        let bytes = fs::read(&file).map_err(|cause| TextError::Io { file: file.clone(), cause })?;
        let wrong = |what: String| TextError::Tokenizer { file: file.clone(), what };
        let read = guarded(|| tokenizers::Tokenizer::from_bytes(&bytes));
        let mut inner = read.map_err(wrong)?;
        inner.with_padding(None).with_truncation(None).map_err(|e| wrong(e.to_string()))?;
        Ok(Tokenizer { hash: blake3::hash(&bytes), file, inner })
    }

    /// Path of the `tokenizer.json` that was read.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Hash of the tokenizer's file.
    pub fn hash(&self) -> blake3::Hash {
        self.hash
    }

    /// Tokens, with those that were added.
    pub fn tokens(&self) -> u64 {
        self.inner.get_vocab_size(true) as u64
    }

    /// The tokens of a text.
    ///
    /// # Errors
    /// What the tokenizer says, as that a character is none of its vocabulary.
    pub fn encode(&self, text: &str, special: Special) -> Result<Vec<u32>, String> {
        let special = special == Special::Added;
        guarded(|| self.inner.encode_fast(text, special)).map(|e| e.get_ids().to_vec())
    }

    /// The tokens of a text, and of each whether it has anything of what is learnt: bytes of the text, in order.
    /// Tokens of no text, which are added, are as the one before them.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_learnt(&self, text: &str, learnt: &[Range<usize>], special: Special) -> Result<(Vec<u32>, Vec<bool>), String> {
        let special = special == Special::Added;
        let encoded = guarded(|| self.inner.encode(text, special))?;
        let (mut at, mut is_learnt) = (0, false);
        let counts = encoded.get_offsets().iter().map(|&(begin, end)| {
            // Offsets may leave out blanks, and are empty for a token of blanks alone.
            if let Some(last) = end.checked_sub(1) {
                at += learnt[at..].iter().take_while(|range| range.end <= begin.min(last)).count();
                is_learnt = learnt.get(at).is_some_and(|range| range.start < end && !range.is_empty());
            }
            is_learnt
        });
        Ok((encoded.get_ids().to_vec(), counts.collect()))
    }

    /// The text of tokens, special ones too. Tokens that it has not are left out.
    ///
    /// # Errors
    /// What the tokenizer says.
    pub fn decode(&self, tokens: &[u32]) -> Result<String, String> {
        guarded(|| self.inner.decode(tokens, false))
    }

    /// The token that ends a document: the one of this name, else the `eos_token` of the `tokenizer_config.json`
    /// beside it, else the only one of those that are known.
    ///
    /// # Errors
    /// It has no such token; which one it is cannot be told.
    pub fn end(&self, named: Option<&str>) -> Result<u32, TextError> {
        let id = |token: &str| self.inner.token_to_id(token);
        let named = named.map(String::from).or_else(|| self.configured());
        if let Some(token) = named {
            return id(&token).ok_or(TextError::Token { file: self.file.clone(), token });
        }
        let known: Vec<u32> = ENDS.iter().filter_map(|t| id(t)).collect();
        match known[..] {
            [only] => Ok(only),
            _ => Err(TextError::End(self.file.clone())),
        }
    }

    /// The `eos_token` of the `tokenizer_config.json` beside it, if there is one.
    pub fn configured(&self) -> Option<String> {
        let config = fs::read(self.file.with_file_name("tokenizer_config.json")).ok()?;
        let config: Value = serde_json::from_slice(&config).ok()?;
        let token = &config["eos_token"];
        Some(token.as_str().or_else(|| token["content"].as_str())?.to_string())
    }
}

/// Whether a tokenizer adds the tokens with which it begins or ends a text for its model, as `<s>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Special {
    /// Added, as Hugging Face's tokenizers do by default.
    Added,
    /// No special tokens are added, as in Megatron.
    LeftOut,
}

/// What a tokenizer does. A file that it does not expect may end it.
fn guarded<T>(work: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    unwound("the tokenizer", work)
}
