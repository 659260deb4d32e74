//! Parameters: from random numbers or safetensors files, and back to files. Files hold whole f32 tensors under the
//! job's names, so they depend neither on the mesh nor on what its ranks share out.
//!
//! A file from which a run resumes also has the optimizer states, as `state0/NAME`, `state1/NAME`, and says after
//! which step. Every file says which model it is of, with its text and settings ([`Provenance`]).

mod file;
mod mark;
mod names;
mod random;
mod source;
#[cfg(test)]
mod tests;

pub use file::SafetensorsLayout;
pub(crate) use file::{stored, write_stored};
pub use mark::Mark;
pub use names::name;
pub use source::WeightsError;
pub(crate) use source::{Content, FileTensor, WeightsFault, WeightsSource, sound};

use crate::conditions::Conditions;
use crate::executor::PersistentId;
use crate::host::{Whole, sizes};
use ir::pattern;
use ir::program::{Job, ParamEntry};
use ir::provenance::{self, Provenance};
use names::{entry, params, states};
use random::Random;
use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// What a job starts from: its parameters and, if it resumes, optimizer states.
pub struct Weights {
    tensors: BTreeMap<PersistentId, Box<dyn Whole>>,
    /// Files of the weights: their names, and what was found when they were read.
    files: Vec<(PathBuf, Rc<OnceCell<WeightsFault>>)>,
}

/// What a run goes on from.
pub struct Resumed {
    /// Parameters and optimizer states.
    pub weights: Weights,
    /// Where it stood.
    pub mark: Mark,
    /// The model that the weights belong to; none if the file does not say.
    pub model: Option<Provenance>,
    /// What the run depended on beside its model; none if the file does not say.
    pub conditions: Option<Conditions>,
}

impl Weights {
    /// Every parameter as its model text says.
    pub fn random(job: &Job, seed: u64) -> Weights {
        let random = job.params.iter().map(|p| Box::new(Random::new(p, seed)) as Box<dyn Whole>);
        Weights { tensors: params(job).zip(random).collect(), files: vec![] }
    }

    /// Every parameter from a file. Optimizer states that it has too are left out.
    ///
    /// # Errors
    /// Tensors that are missing, too many, of another shape or of a dtype that is not f32, f16 or bf16, and the
    /// likely reason.
    pub fn open(file: &Path, job: &Job) -> Result<Weights, WeightsError> {
        let wrong = Rc::default();
        let content = stored(file, &wrong)?;
        Weights::fitted(file, content, wrong, job, params(job))
    }

    /// Every parameter and optimizer state from a file, and where its run stood.
    ///
    /// # Errors
    /// As [`Weights::open`]; or the file is none that a run resumes from.
    pub fn resume(file: &Path, job: &Job) -> Result<Resumed, WeightsError> {
        let wrong = Rc::default();
        let content = stored(file, &wrong)?;
        Weights::resumed(file, content, wrong, job)
    }

    /// Parameters and optimizer states of what a file or directory holds, and where its run stood.
    pub(crate) fn resumed(file: &Path, content: Content, wrong: Rc<OnceCell<WeightsFault>>, job: &Job) -> Result<Resumed, WeightsError> {
        // A file of weights alone lacks every state, too, but that it is one says more.
        let mark = content.run.ok_or_else(|| WeightsError::Unmarked { file: file.to_path_buf() })?;
        let (model, conditions) = (content.model.clone(), content.conditions.clone());
        Ok(Resumed { weights: Weights::fitted(file, content, wrong, job, params(job).chain(states(job)))?, mark, model, conditions })
    }

    /// Parameters of what files or directories hold together. Those that are in none and fit a pattern of
    /// `drawn` are drawn; gives their names, and those of what is no tensor, which is left out.
    ///
    /// # Errors
    /// As [`Weights::open`]; parameters that two of them have.
    pub(crate) fn together(
        sources: Vec<WeightsSource>,
        job: &Job,
        drawn: &[String],
        seed: u64,
    ) -> Result<(Weights, Vec<String>, Vec<String>), WeightsError> {
        let (mut from, mut twice, mut files) = (BTreeMap::<String, PathBuf>::new(), vec![], vec![]);
        let mut all = Content { tensors: vec![], run: None, model: None, conditions: None, others: vec![] };
        for WeightsSource { file, content, wrong } in sources {
            for tensor in content.tensors {
                match from.get(&tensor.name) {
                    Some(other) if job.params.iter().any(|p| p.name == tensor.name) => {
                        twice.push(format!("`{}` is in `{}`, and in `{}` too", tensor.name, other.display(), file.display()));
                    }
                    // Optimizer states are not taken from these files.
                    Some(_) => {}
                    None => {
                        from.insert(tensor.name.clone(), file.clone());
                        all.tensors.push(tensor);
                    }
                }
            }
            all.model = all.model.or(content.model);
            all.others.extend(content.others);
            files.push((file, wrong));
        }
        let names: Vec<String> = files.iter().map(|(file, _)| file.display().to_string()).collect();
        let name = PathBuf::from(names.join("` with `"));
        if !twice.is_empty() {
            return Err(WeightsError::Mismatch { file: name, what: provenance::few(&twice) });
        }
        let is_drawn = |p: &&ParamEntry| !from.contains_key(&p.name) && drawn.iter().any(|pattern| pattern::matches(pattern, &p.name));
        let missing: Vec<&ParamEntry> = job.params.iter().filter(is_drawn).collect();
        all.tensors.extend(missing.iter().map(|p| FileTensor {
            name: p.name.clone(),
            shape: sizes(&p.dims),
            values: Ok(Box::new(Random::new(p, seed))),
        }));
        let left_out = std::mem::take(&mut all.others);
        let tensors = fitted(&name, all, job, params(job))?;
        Ok((Weights { tensors, files }, missing.iter().map(|p| p.name.clone()).collect(), left_out))
    }

    fn fitted(
        file: &Path,
        content: Content,
        wrong: Rc<OnceCell<WeightsFault>>,
        job: &Job,
        wanted: impl Iterator<Item = PersistentId>,
    ) -> Result<Weights, WeightsError> {
        fitted(file, content, job, wanted).map(|tensors| Weights { tensors, files: vec![(file.to_path_buf(), wrong)] })
    }

    /// A parameter or optimizer state, if it starts from something else than zero.
    pub fn get(&self, held: PersistentId) -> Option<&dyn Whole> {
        self.tensors.get(&held).map(AsRef::as_ref)
    }

    /// Whether all that was read so far was finite, and as it was written.
    ///
    /// # Errors
    /// The first that was not.
    pub fn check(&self) -> Result<(), WeightsError> {
        self.files.iter().try_for_each(|(file, wrong)| sound(file, wrong))
    }
}

/// The tensors that a job wants, of those that a file of this model has.
///
/// # Errors
/// Tensors that are missing, too many or of another shape or dtype, and the likely reason.
fn fitted(
    file: &Path,
    content: Content,
    job: &Job,
    wanted: impl Iterator<Item = PersistentId>,
) -> Result<BTreeMap<PersistentId, Box<dyn Whole>>, WeightsError> {
    let (mut missing, mut others, mut found) = (vec![], vec![], BTreeMap::new());
    let mut offered: BTreeMap<String, FileTensor> = content.tensors.into_iter().map(|o| (o.name.clone(), o)).collect();
    let known: BTreeSet<String> = params(job).chain(states(job)).filter_map(|h| Some(entry(job, h)?.0)).collect();
    let unknown = offered.keys().filter(|n| !known.contains(*n)).chain(&content.others);
    let extra: Vec<String> = unknown.map(|n| format!("`{n}` is not in the model")).collect();
    for (held, (name, sizes)) in wanted.filter_map(|h| Some((h, entry(job, h)?))) {
        match offered.remove(&name) {
            None => missing.push(format!("`{name}` is missing")),
            Some(FileTensor { shape, .. }) if shape != sizes => others.push(format!("`{name}` is {shape:?}, the model has {sizes:?}")),
            Some(FileTensor { values: Err(dtype), .. }) => others.push(format!("`{name}` is {dtype}")),
            Some(FileTensor { values: Ok(values), .. }) => drop(found.insert(held, values)),
        }
    }
    let kinds = [missing, others, extra];
    if kinds.iter().all(Vec::is_empty) {
        return Ok(found);
    }
    let likely = provenance::likely(content.model.as_ref(), &job.model, &job.settings);
    let what = kinds.iter().flat_map(|kind| provenance::few(kind)).chain(likely).collect();
    Err(WeightsError::Mismatch { file: file.to_path_buf(), what })
}
