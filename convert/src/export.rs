//! Weights of mcc to a Hugging Face directory.

use crate::config::{self, Config};
use crate::copy::{Direction, copy};
use crate::dtypes::{DTYPES, Float, Record, RoundingLosses};
use crate::family::{FAMILIES, Family};
use crate::import::{CONFIG, elaborate, parameters, read, read_config, text};
use crate::layout::{Foreign, foreign};
use crate::staging::StagedFiles;
use crate::tensors::{Checkpoint, Format, WHOLE, WrittenTensor, write};
use crate::{ConvertError, check, header};
use ir::diag::Sources;
use ir::model::Model;
use ir::provenance::{Provenance, few, likely};
use std::io::Write;
use std::path::{Path, PathBuf};

/// What an export has written.
#[derive(Clone, Debug, PartialEq)]
pub struct Exported {
    /// Tensors of the written file, copies among them.
    pub tensors: usize,
    /// Elements of all written tensors, copies among them.
    pub elements: u64,
    /// The type of most of them, and how many elements were rounded to their tensor's.
    pub dtype: Float,
    /// Elements that their tensor's type does not hold exactly.
    pub rounded: u64,
    /// The `model.safetensors` that was written.
    pub weights: PathBuf,
    /// None: the model is no architecture of the importer's, and has no config beside it.
    pub config: Option<PathBuf>,
    /// Warnings about the model text.
    pub warnings: Vec<ir::diag::Diagnostic>,
    /// Texts of the model, by which the warnings are rendered.
    pub sources: Sources,
}

/// Reads weights; writes `model.safetensors` and `config.json` to `out`, as Hugging Face does: the widest type first,
/// by name, one after the other, `format: pt`.
///
/// The model is the one that the weights say they are of. The text `model`, if one is given, takes the place of
/// theirs, with their settings as far as it has them. Settings given as `-D name=value` are for what the weights do
/// not say.
///
/// Every tensor has the type `dtype`; without one that which the import has found, by the `dtypes.json` beside the
/// text, or beside the weights if no text is given; f32 if there is none.
///
/// The config is the `config.json` beside the text, or beside the weights, byte for byte, unless settings have
/// changed since or the type is not that of the import; without one it is made from the settings.
///
/// # Errors
/// Files that are missing or malformed; settings that contradict the weights; a text with errors or without `weights
/// hf`; tensors that do not fit; settings that the config cannot say; values beyond the range of their type. Nothing
/// is written then.
pub fn export(
    weights: &Path,
    model: Option<&Path>,
    defines: &[(String, String)],
    dtype: Option<Float>,
    out: &Path,
) -> Result<Exported, ConvertError> {
    export_with(weights, model, &model.unwrap_or(weights).with_file_name(""), defines, dtype, out)
}

/// Does what [`export`] does, with the config and the types of tensors that lie in the directory `kept`.
///
/// # Errors
/// Those of [`export`].
pub fn export_with(
    weights: &Path,
    model: Option<&Path>,
    kept: &Path,
    defines: &[(String, String)],
    dtype: Option<Float>,
    out: &Path,
) -> Result<Exported, ConvertError> {
    let checkpoint = Checkpoint::file(weights)?;
    let saved = checkpoint.provenance.as_ref();
    agree(weights, saved, defines)?;
    let mut sources = Sources::default();
    let frontend::Elaborated { model: described, warnings } = match (model, saved) {
        (Some(path), _) => given(&mut sources, path, &checkpoint, defines)?,
        (None, Some(saved)) => carried(&mut sources, saved, defines)?,
        (None, None) => return Err(ConvertError::Unexplained(weights.into())),
    };
    let of_model = foreign("hf", &described).map_err(|diagnostics| ConvertError::Text { sources: sources.clone(), diagnostics })?;
    let params = parameters(&described.graph);
    check::fits(&checkpoint, &params, &[], || likely(saved, &described.graph.name, &described.settings))?;
    let beside = |name: &str| kept.join(name);
    // A given dtype replaces the record, even one that cannot be read.
    let found = match (Record::read(&beside(DTYPES)), dtype) {
        (Err(_), Some(_)) => None,
        (found, _) => found?,
    };
    let record = found.as_ref().filter(|_| dtype.is_none());
    let usual = dtype.or(record.map(|r| r.usual)).unwrap_or(Float::F32);
    let config = config_of(&described, &beside(CONFIG), usual, record.is_some())?;

    // The record decides which copies are written, even where a given dtype replaces its types.
    let lacks = |copy: &str| found.as_ref().is_some_and(|r| r.lacks(copy));
    let mut tensors: Vec<(Float, &str, &Foreign)> = vec![];
    for tensor in &of_model {
        let dtype = record.map_or(usual, |r| r.of(&tensor.name));
        let copies = tensor.copies.iter().filter(|copy| !lacks(copy));
        tensors.extend([&tensor.name].into_iter().chain(copies).map(|name| (dtype, name.as_str(), tensor)));
    }
    // This is the order in which the safetensors library writes tensors.
    tensors.sort_by_key(|(dtype, name, _)| (*dtype, *name));
    let written: Vec<_> =
        tensors.iter().map(|(dtype, name, t)| WrittenTensor { name: (*name).into(), shape: t.shape.clone(), dtype: *dtype }).collect();
    let mut staging = StagedFiles::new(out)?;
    let losses = staging.file(WHOLE, |f| {
        write(f, Format::Pytorch, &written, |i, bytes| {
            for part in &tensors[i].2.parts {
                let found = &checkpoint.tensors[&params[part.param].0];
                copy(&part.loops, Direction::Export, (checkpoint.bytes(found), found.dtype, part.own), (bytes, part.foreign));
            }
        })
    })?;
    within(weights, &written, &losses)?;
    if let Some(config) = &config {
        staging.file(CONFIG, |f| f.write_all(config))?;
    }
    staging.commit()?;
    let elements = |t: &WrittenTensor| t.shape.iter().product::<u64>();
    Ok(Exported {
        tensors: written.len(),
        elements: written.iter().map(elements).sum(),
        dtype: usual,
        rounded: losses.iter().map(|l| l.rounded).sum(),
        weights: out.join(WHOLE),
        config: config.map(|_| out.join(CONFIG)),
        warnings,
        sources,
    })
}

/// Whether every value is in the range of its tensor's type.
fn within(weights: &Path, tensors: &[WrittenTensor], losses: &[RoundingLosses]) -> Result<(), ConvertError> {
    let beyond = |(tensor, losses): (&WrittenTensor, &RoundingLosses)| {
        losses.beyond.map(|value| format!("`{}` has {value:e}, which is beyond the range of {}", tensor.name, tensor.dtype.name()))
    };
    let what: Vec<String> = few(&tensors.iter().zip(losses).filter_map(beyond).collect::<Vec<_>>());
    if what.is_empty() { Ok(()) } else { Err(ConvertError::Tensors { path: weights.into(), what }) }
}

/// Settings that are given are those of the weights, or not among them.
fn agree(weights: &Path, saved: Option<&Provenance>, defines: &[(String, String)]) -> Result<(), ConvertError> {
    for (name, given) in defines {
        let of_weights = saved.into_iter().flat_map(|s| &s.settings).find(|s| s.0 == *name);
        if let Some((_, value)) = of_weights.filter(|s| !config::same(&s.1, given)) {
            let (name, saved, given) = (name.clone(), value.clone(), given.clone());
            return Err(ConvertError::Contradiction { path: weights.into(), name, saved, given });
        }
    }
    Ok(())
}

/// The model in a file, with the settings of the weights that it has, and what is given. The length of sequences
/// stays the text's if the weights fit it: they may have been trained on shorter ones than the model takes.
fn given(sources: &mut Sources, path: &Path, checkpoint: &Checkpoint, defines: &[(String, String)]) -> Result<frontend::Elaborated, ConvertError> {
    let saved = checkpoint.provenance.as_ref();
    let with = |sources: &mut Sources, leave: &[&str]| elaborate(sources, path, &settings(path, saved, defines, leave)?);
    let mut own = Sources::default();
    match with(&mut own, &["seq"]) {
        Ok(done) if check::fits(checkpoint, &parameters(&done.model.graph), &[], Vec::new).is_ok() => {
            *sources = own;
            Ok(done)
        }
        Ok(_) | Err(_) => with(sources, &[]),
    }
}

/// The settings for a text in a file: those of the weights that it has, but for some, then what is given.
fn settings(path: &Path, saved: Option<&Provenance>, defines: &[(String, String)], leave: &[&str]) -> Result<Vec<(String, String)>, ConvertError> {
    let mut sources = Sources::default();
    let text = read(&sources, path)?;
    let ast = frontend::parse(&mut sources, &path.display().to_string(), &text).map_err(|diagnostics| ConvertError::Text { sources, diagnostics })?;
    let has = header::settings(&ast);
    let known = saved.into_iter().flat_map(|s| &s.settings).filter(|s| has.contains(&s.0.as_str()) && !leave.contains(&s.0.as_str()));
    Ok(known.chain(defines).cloned().collect())
}

/// The model that weights are of, by their own text and settings.
fn carried(sources: &mut Sources, saved: &Provenance, defines: &[(String, String)]) -> Result<frontend::Elaborated, ConvertError> {
    let options = frontend::Options { defines: saved.settings.iter().chain(defines).cloned().collect(), ..frontend::Options::default() };
    let model = frontend::compile_texts(sources, &saved.texts, &options);
    model.map_err(|diagnostics| ConvertError::Text { sources: std::mem::take(sources), diagnostics })
}

/// The bytes of the config that goes with a model whose tensors are of this type, as they were in the import if
/// `imported`; none if nothing is known of its kind.
fn config_of(model: &Model, beside: &Path, dtype: Float, imported: bool) -> Result<Option<Vec<u8>>, ConvertError> {
    let refused = |what| ConvertError::Config { path: beside.into(), what };
    if !beside.exists() {
        return Ok(made(model, dtype).map_err(ConvertError::Unsaid)?.map(|config| config::bytes(&config)));
    }
    let (original, config) = read_config(beside)?;
    let reading = config::read(&config).map_err(refused)?;
    let family = reading.family;
    if family.model != model.graph.name {
        let what = format!("architecture {} goes with a model `{}`, the text has `{}`", family.architecture, family.model, model.graph.name);
        return Err(refused(vec![what]));
    }
    let then = text(family, &reading.settings)?.1.settings;
    let mut new = config::write(family, config.clone(), &then, &model.settings);
    if !imported {
        config::set_dtype(&mut new, dtype);
    }
    says(family, &new, model).map_err(refused)?;
    Ok(Some(if new == config { original } else { config::bytes(&new) }))
}

/// A config made from settings, of the first architecture that can say them all; none if no architecture has the
/// model.
///
/// # Errors
/// What the nearest one cannot say.
fn made(model: &Model, dtype: Float) -> Result<Option<Config>, Vec<String>> {
    let mut nearest: Option<Vec<String>> = None;
    for family in FAMILIES.into_iter().filter(|f| f.model == model.graph.name) {
        let mut config = config::write(family, config::fresh(family), &[], &model.settings);
        config::set_dtype(&mut config, dtype);
        match says(family, &config, model) {
            Ok(()) => return Ok(Some(config)),
            Err(what) if nearest.as_ref().is_none_or(|n| what.len() < n.len()) => nearest = Some(what),
            Err(_) => {}
        }
    }
    nearest.map_or(Ok(None), Err)
}

/// Whether a config stands for a model, setting by setting.
fn says(family: &Family, config: &Config, model: &Model) -> Result<(), Vec<String>> {
    let settings = config::read(config)?.settings;
    let read = match text(family, &settings) {
        Ok((_, read)) => read.settings,
        Err(ConvertError::Text { diagnostics, .. }) => return Err(diagnostics.into_iter().map(|d| d.message).collect()),
        Err(other) => return Err(vec![other.to_string()]),
    };
    let what: Vec<String> = model
        .settings
        .iter()
        .filter(|(name, _)| !family.free.contains(&name.as_str()))
        .filter_map(|(name, value)| {
            let said = read.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str());
            match said {
                Some(said) if config::same(said, value) => None,
                Some(said) => Some(format!("{} computes {name} = {said}, the model has {value}", family.architecture)),
                None => Some(format!("{} knows no {name}, the model has {value}", family.architecture)),
            }
        })
        .collect();
    if what.is_empty() { Ok(()) } else { Err(what) }
}
