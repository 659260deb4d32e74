//! Validation data sets that have a loss each, and those that are evaluated as a whole.

use super::{DataError, DataSets, Samples, SetNames};
use data::blend::Blend;
use ir::program::Job;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// How validation data are evaluated: Megatron-LM's `--multiple-validation-sets` and `--full-validation`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Validation {
    /// Each data set has a loss of its own, under these names, or those of their files where there are none; else all
    /// have one.
    pub names: Option<Vec<String>>,
    /// All samples of an epoch, each time.
    pub is_full: bool,
}

/// The samples of a run.
pub struct RunSamples {
    /// Samples to train on; `None` if the run takes none.
    pub training: Option<Samples>,
    /// One, or one for each data set.
    pub valid: Vec<Samples>,
    /// Samples of the test data; `None` if the run takes none.
    pub test: Option<Samples>,
}

impl DataSets {
    /// As [`DataSets::open_parts`], with each validation data set by itself where it has a loss of its own.
    ///
    /// # Errors
    /// As there.
    pub fn open(&self, job: &Job, seed: u64, takes: [u64; 3]) -> Result<RunSamples, DataError> {
        if self.validation.names.is_none() {
            let [training, valid, test] = self.open_parts(job, seed, takes)?;
            return Ok(RunSamples { training, valid: Vec::from_iter(valid), test });
        }
        let [training, _, test] = self.open_parts(job, seed, [takes[0], 0, takes[2]])?;
        let mut valid = vec![];
        for names in self.each()?.into_iter().filter(|_| takes[1] > 0) {
            let alone = DataSets { names, ..self.clone() };
            let [_, samples, _] = alone.open_parts(job, seed, [0, takes[1], 0])?;
            valid.extend(samples);
        }
        Ok(RunSamples { training, valid, test })
    }

    /// What validation data sets are called, if each has a loss of its own.
    pub fn valid_names(&self) -> &[String] {
        self.validation.names.as_deref().unwrap_or_default()
    }

    /// The same with a name for each validation data set, where each is to have a loss of its own.
    ///
    /// # Errors
    /// Names that are not as many, or not different.
    pub(super) fn named(self) -> Result<DataSets, DataError> {
        let Some(given) = &self.validation.names else { return Ok(self) };
        let prefixes = self.valid_prefixes()?;
        let name = |prefix: &String| Path::new(prefix).file_name().map_or_else(|| prefix.clone(), |name| name.to_string_lossy().into_owned());
        let names = if given.is_empty() { prefixes.iter().map(name).collect() } else { given.clone() };
        if names.len() != prefixes.len() {
            return Err(DataError::Names(format!("there are {} names and {} data sets", names.len(), prefixes.len())));
        }
        if let Some(twice) = names.iter().enumerate().find(|(k, name)| names[..*k].contains(name)).map(|(_, name)| name) {
            return Err(DataError::Names(format!("two are called `{twice}`")));
        }
        Ok(DataSets { validation: Validation { names: Some(names), ..self.validation }, ..self })
    }

    /// The data sets of validation, each by itself.
    fn each(&self) -> Result<Vec<SetNames>, DataError> {
        let alone = |prefix: String| match &self.names {
            SetNames::Shared { split, .. } => SetNames::Shared { blend: vec![prefix], split: split.clone() },
            SetNames::Own(_) => SetNames::Own([vec![], vec![prefix], vec![]]),
        };
        Ok(self.valid_prefixes()?.into_iter().map(alone).collect())
    }

    fn valid_prefixes(&self) -> Result<Vec<String>, DataError> {
        let (words, part) = match &self.names {
            SetNames::Shared { blend, .. } => (blend, 0),
            SetNames::Own(own) => (&own[1], 1),
        };
        if words.is_empty() {
            return Ok(vec![]);
        }
        let blend = Blend::parse(words).map_err(|cause| DataError::Blend { part: super::PARTS[part], cause })?;
        if part == 1 && blend.weights.is_some() {
            return Err(DataError::Names("each has a loss of its own, and so no weight".into()));
        }
        Ok(blend.prefixes.iter().map(|p| p.to_string_lossy().into_owned()).collect())
    }
}
