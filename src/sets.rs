//! The data sets that flags of `mcc run` name, in themselves or in files.

use crate::cli::{Packing, RunArgs};
use crate::misuse::misuse;
use anyhow::{Context, anyhow};
use data::blend::Blend;
use data::order::Overlong;
use runtime::data::{DataSets, SetNames, Validation};
use serde::Deserialize;
use serde_json::Number;
use std::fs;
use std::path::Path;

/// Megatron-LM's, where no flag says another.
const SPLIT: &str = "969,30,1";

/// The data sets that flags name, if they do.
///
/// # Errors
/// A file of names that cannot be read.
pub fn of(args: &RunArgs) -> anyhow::Result<Option<DataSets>> {
    if !args.has_sets() {
        return Ok(None);
    }
    let split = || args.split.clone().unwrap_or_else(|| SPLIT.into());
    let names = match (&args.data_args_path, &args.per_split_data_args_path) {
        (Some(file), _) => SetNames::Shared { blend: words(file)?, split: split() },
        (None, Some(file)) => SetNames::Own(of_parts(file)?),
        (None, None) if !args.data_path.is_empty() => SetNames::Shared { blend: args.data_path.clone(), split: split() },
        (None, None) => SetNames::Own([args.train_data_path.clone(), args.valid_data_path.clone(), args.test_data_path.clone()]),
    };
    let of_validation = match &names {
        SetNames::Shared { blend, .. } => blend,
        SetNames::Own(own) => &own[1],
    };
    let has_weights = Blend::parse(of_validation).is_ok_and(|blend| blend.weights.is_some());
    if args.full_validation && !args.multiple_validation_sets && has_weights {
        return Err(misuse!(
            "`--full-validation` takes all samples of each validation data set, which are not drawn by weights: leave these out, or add \
             `--multiple-validation-sets`, with which each has a loss of its own"
        ));
    }
    let own_names = args.multiple_validation_sets.then(|| args.validation_set_names.clone());
    let validation = Validation { names: own_names, is_full: args.full_validation };
    let packing = args.packing.map(|packing| match packing {
        Packing::Cut => Overlong::Cut,
        Packing::Split => Overlong::Split,
    });
    Ok(Some(DataSets { names, cache: args.data_cache_path.clone(), validation, packing, is_masked: args.loss_mask }))
}

fn read(flag: &str, file: &Path) -> anyhow::Result<String> {
    fs::read_to_string(file).with_context(|| format!("cannot read `{flag} {}`", file.display()))
}

/// What a file has in place of the words of `--data-path`.
fn words(file: &Path) -> anyhow::Result<Vec<String>> {
    let words: Vec<String> = read("--data-args-path", file)?.split_whitespace().map(str::to_string).collect();
    if words.is_empty() {
        return Err(misuse!("`--data-args-path {}` names no data set: it has what `--data-path` takes, as `0.7 wiki 0.3 code`", file.display()));
    }
    Ok(words)
}

/// Data sets of each part of a run.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SplitBlends {
    train: BlendArgs,
    #[serde(default)]
    valid: Option<BlendArgs>,
    #[serde(default)]
    test: Option<BlendArgs>,
}

/// The words of a blend, as one text or as a list.
#[derive(Deserialize)]
#[serde(untagged)]
enum BlendArgs {
    Text(String),
    Words(Vec<BlendWord>),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum BlendWord {
    Text(String),
    Weight(Number),
}

impl BlendArgs {
    fn words(self) -> Vec<String> {
        match self {
            BlendArgs::Text(text) => text.split_whitespace().map(str::to_string).collect(),
            BlendArgs::Words(words) => words.into_iter().map(BlendWord::text).collect(),
        }
    }
}

impl BlendWord {
    fn text(self) -> String {
        match self {
            BlendWord::Text(text) => text,
            BlendWord::Weight(weight) => weight.to_string(),
        }
    }
}

/// What a file of JSON has in place of `--train-data-path`, `--valid-data-path` and `--test-data-path`.
fn of_parts(file: &Path) -> anyhow::Result<[Vec<String>; 3]> {
    const FLAG: &str = "--per-split-data-args-path";
    let shown = file.display();
    let splits: SplitBlends = serde_json::from_str(&read(FLAG, file)?).map_err(|e| {
        anyhow!("`{FLAG} {shown}`: {e}; it is an object as {{\"train\": [\"0.7\", \"wiki\", \"0.3\", \"code\"], \"valid\": [\"wiki-valid\"], \"test\": null}}")
    })?;
    let all = [Some(splits.train), splits.valid, splits.test].map(|args| args.map(BlendArgs::words).unwrap_or_default());
    if all[0].is_empty() {
        return Err(misuse!("`{FLAG} {shown}` names no data set of training: its `train` is empty"));
    }
    Ok(all)
}
