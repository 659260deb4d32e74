//! Weights of mcc to a Hugging Face directory.

use crate::config::{self, Config};
use crate::copy::{Direction, copy};
use crate::family::{FAMILIES, Family};
use crate::import::{CONFIG, elaborate, parameters, read_config, text};
use crate::layout::{Foreign, foreign};
use crate::staging::Staging;
use crate::tensors::{Checkpoint, Format, WHOLE, write};
use crate::{ConvertError, check};
use ir::diag::Sources;
use ir::model::Model;
use std::io::Write;
use std::path::{Path, PathBuf};

/// What an export has written.
#[derive(Clone, Debug, PartialEq)]
pub struct Exported {
    pub tensors: usize,
    pub elements: u64,
    pub weights: PathBuf,
    /// None: the model is no architecture of the importer's, and has no config beside it.
    pub config: Option<PathBuf>,
    /// Warnings about the model text.
    pub warnings: Vec<ir::diag::Diagnostic>,
    pub sources: Sources,
}

/// Reads weights of the model in the text `model`, with settings given as `-D name=value`; writes `model.safetensors` and
/// `config.json` to `out`, as Hugging Face does: tensors by name, one after the other, `format: pt`.
///
/// The config is the `config.json` beside the text, byte for byte, unless settings have changed since or it speaks of another
/// dtype than f32; without one it is made from the settings.
///
/// # Errors
/// Files that are missing or malformed; a text with errors or without `weights hf`; tensors that do not fit; settings that the
/// config cannot say. Nothing is written then.
pub fn export(weights: &Path, model: &Path, defines: &[(String, String)], out: &Path) -> Result<Exported, ConvertError> {
    let mut sources = Sources::default();
    let frontend::Elaborated { model: described, warnings } = elaborate(&mut sources, model, defines)?;
    let mut tensors = foreign("hf", &described).map_err(|diagnostics| ConvertError::Text { sources: sources.clone(), diagnostics })?;
    let checkpoint = Checkpoint::file(weights)?;
    let params = parameters(&described.graph);
    check::fits(&checkpoint, &params, &[])?;
    let config = config_of(&described, &model.with_file_name(CONFIG))?;

    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    let shapes: Vec<_> = tensors.iter().map(|t| (t.name.clone(), t.shape.clone())).collect();
    let mut staging = Staging::new(out)?;
    staging.file(WHOLE, |f| {
        write(f, Format::Pytorch, &shapes, |i, bytes| {
            for part in &tensors[i].parts {
                let found = &checkpoint.tensors[&params[part.param].0];
                copy(&part.loops, Direction::Export, (checkpoint.bytes(found), found.dtype, part.own), (bytes, part.foreign));
            }
        })
    })?;
    if let Some(config) = &config {
        staging.file(CONFIG, |f| f.write_all(config))?;
    }
    staging.commit()?;
    let elements = |t: &Foreign| t.shape.iter().product::<u64>();
    Ok(Exported {
        tensors: tensors.len(),
        elements: tensors.iter().map(elements).sum(),
        weights: out.join(WHOLE),
        config: config.map(|_| out.join(CONFIG)),
        warnings,
        sources,
    })
}

/// The bytes of the config that goes with a model; none if nothing is known of its kind.
fn config_of(model: &Model, beside: &Path) -> Result<Option<Vec<u8>>, ConvertError> {
    let refused = |what| ConvertError::Config { path: beside.into(), what };
    if !beside.exists() {
        return Ok(made(model).map_err(refused)?.map(|config| bytes(&config)));
    }
    let (original, config) = read_config(beside)?;
    let reading = config::read(&config).map_err(refused)?;
    let family = reading.family;
    if family.model != model.graph.name {
        let what = format!("architecture {} goes with a model `{}`, the text has `{}`", family.architecture, family.model, model.graph.name);
        return Err(refused(vec![what]));
    }
    let then = text(family, &reading.settings)?.1.settings;
    let new = config::write(family, config.clone(), &then, &model.settings);
    says(family, &new, model).map_err(refused)?;
    Ok(Some(if new == config { original } else { bytes(&new) }))
}

fn bytes(config: &Config) -> Vec<u8> {
    let mut bytes = serde_json::to_vec_pretty(config).expect("invariant: JSON with text keys");
    bytes.push(b'\n');
    bytes
}

/// A config made from settings, of the first architecture that can say them all; none if no architecture has the model.
///
/// # Errors
/// What the nearest one cannot say.
fn made(model: &Model) -> Result<Option<Config>, Vec<String>> {
    let mut nearest: Option<Vec<String>> = None;
    for family in FAMILIES.into_iter().filter(|f| f.model == model.graph.name) {
        let config = config::write(family, config::fresh(family), &[], &model.settings);
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
