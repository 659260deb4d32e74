//! A Hugging Face directory to model text and weights.

use crate::config::{self, Config, Reading};
use crate::copy::{Direction, copy};
use crate::dtypes::{DTYPES, Float, Record};
use crate::family::{Family, Predicting};
use crate::layout::{Foreign, ParamSlice, foreign};
use crate::staging::StagedFiles;
use crate::tensors::{Checkpoint, ElementCoding, Format, Tensor, WrittenTensor, write};
use crate::{ConvertError, check, header, quantised};
use ir::diag::Sources;
use ir::graph::Graph;
use ir::model::Model;
use ir::provenance::Provenance;
use safetensors::Dtype;
use std::collections::HashSet;
use std::io::Write;
use std::path::{Path, PathBuf};

/// The file of a Hugging Face directory that describes the model; an import keeps a copy.
pub const CONFIG: &str = "config.json";
/// The model text that an import writes.
pub const MODEL: &str = "model.mdl";
/// The file of f32 parameters that an import writes.
pub const WEIGHTS: &str = "weights.safetensors";

/// What an import has written.
#[derive(Clone, Debug, PartialEq)]
pub struct Imported {
    /// As the config names it, `GPT2LMHeadModel`; the model's name if the text was given.
    pub architecture: String,
    /// Every setting of the model text with its value.
    pub settings: Vec<(String, String)>,
    /// Number of parameters (a `repeat`'s count per iteration) and of their elements.
    pub parameters: usize,
    /// Number of elements of all parameters.
    pub elements: u64,
    /// Number of tensors that were narrower than f32, by dtype: they were widened, which is exact.
    pub widened: Vec<(&'static str, usize)>,
    /// How tensors were coded, and how many: f32 has what the codes stand for, rounded once.
    pub decoded: Option<(&'static str, usize)>,
    /// Tensors that the model does not need: buffers, copies of tied ones, heads it has none of.
    pub skipped: Vec<String>,
    /// Fields of the config that are unknown, or that make training differ; warnings about a text that was given.
    pub warnings: Vec<String>,
    /// The written `model.mdl`, or the text that was given.
    pub model: PathBuf,
    /// The written `weights.safetensors`.
    pub weights: PathBuf,
}

/// What can be done about a config that asks for more than the known texts compute.
const WAY_OUT: &str = "help: `--model TEXT.mdl` imports the tensors for a text of your own, which says in a section `weights hf` how they are named";

/// Reads `config.json` and `model.safetensors` (or the shards of `model.safetensors.index.json`) in `dir`; writes
/// `model.mdl`, `weights.safetensors` (f32, one tensor per parameter under its own name, in its declared dims), a
/// copy of `config.json`, and `dtypes.json`, by which an export gives every tensor the type that it had, to `out`.
///
/// # Errors
/// Files that are missing or malformed; config fields or tensors that do not fit, all of them. Nothing is written
/// then.
pub fn import(dir: &Path, out: &Path) -> Result<Imported, ConvertError> {
    if !dir.join(CONFIG).exists() && dir.is_dir() {
        return Err(ConvertError::Malformed { path: dir.join(CONFIG), what: format!("is not there, which says what model this is\n{WAY_OUT}") });
    }
    let (mut original, mut config) = read_config(&dir.join(CONFIG))?;
    let refused = |what: Vec<String>| ConvertError::Config { path: dir.join(CONFIG), what: what.into_iter().chain([WAY_OUT.to_owned()]).collect() };
    let Reading { family, mut settings, quantised, mut warnings } = config::read(&config).map_err(refused)?;
    let (mut text, mut model) = self::text(family, &settings)?;
    let mut checkpoint = Checkpoint::in_directory(dir)?;
    if let Some(predicting) = family.predicting.filter(|p| lacking(p, &model, &checkpoint, family)) {
        warnings.push(format!("{} is not 0, and there are no such layers among the tensors: 0 is taken", predicting.field));
        settings.retain(|(name, _)| *name != predicting.setting);
        settings.push((predicting.setting, "0".into()));
        (text, model) = self::text(family, &settings)?;
        config.insert(config::written_as(family, &config, predicting.field).into(), 0.into());
        original = config::bytes(&config);
    }
    if let Some(scheme) = quantised {
        quantised::decode(&mut checkpoint, scheme)?;
        // Exports are not quantised, so the saved config does not say that tensors are.
        config.remove(quantised::FIELD);
        original = config::bytes(&config);
    }
    let mut tensors = foreign("hf", &model).map_err(|diagnostics| ConvertError::Text { sources: sources(&text), diagnostics })?;
    let own = tensors.clone();
    let skipped = names(&mut tensors, &checkpoint, family, &model)?;
    fit(&checkpoint, &tensors, &skipped)?;
    equal(&checkpoint, &tensors, family.predicting.map(|p| p.field))?;
    let record = record(&own, &tensors, &checkpoint);

    let mut staging = StagedFiles::new(out)?;
    staging.file(MODEL, |f| f.write_all(text.as_bytes()))?;
    let provenance = provenance(&model, &sources(&text));
    staging.file(WEIGHTS, |f| weights(f, &model.graph, &tensors, &checkpoint, &provenance))?;
    staging.file(CONFIG, |f| f.write_all(&original))?;
    staging.file(DTYPES, |f| f.write_all(record.text().as_bytes()))?;
    staging.commit()?;
    let plain = imported(model, &tensors, &checkpoint, out);
    Ok(Imported { architecture: family.architecture.into(), skipped, warnings, model: out.join(MODEL), ..plain })
}

/// Reads the tensors in `dir` for the model in the text `model`, with settings given as `-D name=value`; writes
/// `weights.safetensors` and `dtypes.json` to `out`. No config is read: the text says everything.
///
/// # Errors
/// Files that are missing or malformed; a text with errors or without `weights hf`; tensors that do not fit. Nothing
/// is written then.
pub fn import_as(dir: &Path, model: &Path, defines: &[(String, String)], out: &Path) -> Result<Imported, ConvertError> {
    let mut sources = Sources::default();
    let frontend::Elaborated { model: described, warnings } = elaborate(&mut sources, model, defines)?;
    let checkpoint = Checkpoint::in_directory(dir)?;
    let provenance = provenance(&described, &sources);
    let tensors = foreign("hf", &described).map_err(|diagnostics| ConvertError::Text { sources, diagnostics })?;
    fit(&checkpoint, &tensors, &[])?;
    equal(&checkpoint, &tensors, None)?;
    let record = record(&tensors, &tensors, &checkpoint);
    let mut staging = StagedFiles::new(out)?;
    staging.file(WEIGHTS, |f| weights(f, &described.graph, &tensors, &checkpoint, &provenance))?;
    staging.file(DTYPES, |f| f.write_all(record.text().as_bytes()))?;
    staging.commit()?;
    let warnings = warnings.into_iter().map(|w| w.message).collect();
    Ok(Imported { warnings, model: model.into(), ..imported(described, &tensors, &checkpoint, out) })
}

fn fit(checkpoint: &Checkpoint, tensors: &[Foreign], beside: &[String]) -> Result<(), ConvertError> {
    let expected: Vec<_> = tensors.iter().map(|t| (t.name.clone(), t.shape.clone())).collect();
    let copies = tensors.iter().flat_map(|t| &t.copies);
    check::fits(checkpoint, &expected, &beside.iter().chain(copies).cloned().collect::<Vec<_>>(), Vec::new)
}

/// Whether copies that are there are equal to what they are copies of; `field` says how many layers have some.
fn equal(checkpoint: &Checkpoint, tensors: &[Foreign], field: Option<&str>) -> Result<(), ConvertError> {
    let mut what = vec![];
    for (tensor, copy) in tensors.iter().flat_map(|t| t.copies.iter().map(move |copy| (t, copy))) {
        let first = &checkpoint.tensors[&tensor.name];
        if checkpoint.tensors.get(copy).is_some_and(|second| ir::fault!("convert.copies.unequal", false, !checkpoint.alike(first, second))) {
            what.push(format!("`{copy}` is not equal to `{}`, of which the text says that it is a copy", tensor.name));
        }
    }
    if what.is_empty() {
        return Ok(());
    }
    let mut what = ir::provenance::few(&what);
    what.extend(field.map(|field| format!("help: {field} = 0 in the config leaves these layers out")));
    Err(ConvertError::Tensors { path: checkpoint.path.clone(), what })
}

/// Whether a model has layers that predict further tokens, of which the files have no tensor: what transformers saves
/// has none.
fn lacking(predicting: &Predicting, model: &Model, checkpoint: &Checkpoint, family: &Family) -> bool {
    let layers = number(model, "layers");
    let prefix = format!("{}{layers}.", predicting.prefix);
    let bare = prefix.strip_prefix(family.base).unwrap_or(&prefix);
    number(model, predicting.setting) > 0 && !checkpoint.tensors.keys().any(|name| name.starts_with(&prefix) || name.starts_with(bare))
}

/// A setting that is a whole number.
fn number(model: &Model, setting: &str) -> u64 {
    model.settings.iter().find(|s| s.0 == setting).and_then(|s| s.1.parse().ok()).unwrap_or(0)
}

/// The types of tensors, by the names that an export gives them: codes are exported as bf16. Copies that are not
/// there.
fn record(own: &[Foreign], tensors: &[Foreign], checkpoint: &Checkpoint) -> Record {
    let float = |t: &Foreign| match &checkpoint.tensors[&t.name] {
        Tensor { coding: ElementCoding::Scaled(..), .. } | Tensor { dtype: Dtype::BF16, .. } => Float::Bf16,
        Tensor { dtype: Dtype::F16, .. } => Float::F16,
        _ => Float::F32,
    };
    let both = || own.iter().zip(tensors);
    let copies = both().flat_map(|(own, t)| own.copies.iter().zip(&t.copies));
    let absent: Vec<String> = copies.filter(|(_, copy)| !checkpoint.tensors.contains_key(*copy)).map(|(own, _)| own.clone()).collect();
    Record::new(&both().map(|(own, t)| (own.name.clone(), float(t))).collect::<Vec<_>>(), ir::fault!("convert.copies.absent", &[], &absent))
}

/// What weights of a model say of it.
fn provenance(model: &Model, sources: &Sources) -> Provenance {
    Provenance::new(&model.graph.name, &model.settings, &frontend::without_library(sources))
}

/// What can be said of any model whose tensors were written to a directory.
fn imported(model: Model, tensors: &[Foreign], checkpoint: &Checkpoint, out: &Path) -> Imported {
    let coded = |t: &Foreign| match &checkpoint.tensors[&t.name].coding {
        ElementCoding::Plain => None,
        ElementCoding::Scaled(scheme, _) => Some(scheme.name()),
    };
    let decoded = tensors.iter().filter_map(coded).next().map(|name| (name, tensors.iter().filter_map(coded).count()));
    let widened = [("f16", Dtype::F16), ("bf16", Dtype::BF16)].map(|(name, dtype)| {
        let is = |t: &&Foreign| coded(t).is_none() && checkpoint.tensors[&t.name].dtype == dtype;
        (name, tensors.iter().filter(is).count())
    });
    Imported {
        architecture: model.graph.name.to_string(),
        parameters: model.graph.params.len(),
        elements: model.graph.params.iter().map(|p| model.graph.body.dims.elements(&p.ty.dims)).sum(),
        settings: model.settings,
        widened: widened.into_iter().filter(|(_, n)| *n > 0).collect(),
        decoded,
        skipped: vec![],
        warnings: vec![],
        model: out.join(MODEL),
        weights: out.join(WEIGHTS),
    }
}

/// A model text.
///
/// # Errors
/// The file cannot be read, or is no text.
pub fn read(sources: &Sources, path: &Path) -> Result<String, ConvertError> {
    let bytes = std::fs::read(path).map_err(ConvertError::io(path))?;
    let text = frontend::decode(&path.display().to_string(), bytes);
    text.map_err(|e| ConvertError::Text { sources: sources.clone(), diagnostics: vec![*e] })
}

/// The model of a text in a file, which may import others.
///
/// # Errors
/// The file cannot be read, or the text is wrong.
pub fn elaborate(sources: &mut Sources, path: &Path, defines: &[(String, String)]) -> Result<frontend::Elaborated, ConvertError> {
    let (name, text) = (path.display().to_string(), read(sources, path)?);
    let options = frontend::Options { defines: defines.to_vec(), ..frontend::Options::default() };
    let mut loader = |import: &str| {
        let bytes = std::fs::read(path.with_file_name(import)).map_err(|e| e.to_string())?;
        frontend::decode(import, bytes).map_err(|e| e.message)
    };
    let compiled = frontend::compile(sources, &name, &text, &options, &mut loader);
    compiled.map_err(|diagnostics| ConvertError::Text { sources: std::mem::take(sources), diagnostics })
}

/// A config, as bytes and read.
pub fn read_config(path: &Path) -> Result<(Vec<u8>, Config), ConvertError> {
    let bytes = std::fs::read(path).map_err(ConvertError::io(path))?;
    let config =
        serde_json::from_slice(&bytes).map_err(|e| ConvertError::Malformed { path: path.into(), what: format!("is not a JSON object: {e}") })?;
    Ok((bytes, config))
}

fn sources(text: &str) -> Sources {
    let mut sources = Sources::default();
    sources.files.push(ir::diag::Source { name: MODEL.into(), text: text.into() });
    sources
}

/// The model text of a family with these settings, and the model it is.
///
/// # Errors
/// The values do not go together, as 12 heads for a width of 100.
pub fn text(family: &Family, settings: &[(&str, String)]) -> Result<(String, Model), ConvertError> {
    let text = header::with_defaults(MODEL, family.text, settings)
        .map_err(|diagnostics| ConvertError::Text { sources: sources(family.text), diagnostics })?;
    let mut sources = Sources::default();
    let elaborated = frontend::compile(&mut sources, MODEL, &text, &frontend::Options::default(), &mut |_| Err("the text stands alone".into()));
    match elaborated {
        Ok(elaborated) => Ok((text, elaborated.model)),
        Err(diagnostics) => Err(ConvertError::Text { sources, diagnostics }),
    }
}

/// Fits the names to a file that lacks the base prefix or has older names, and returns the tensors that the model
/// does not need.
///
/// # Errors
/// A copy of a tied tensor that is not equal to it.
fn names(tensors: &mut [Foreign], checkpoint: &Checkpoint, family: &Family, model: &Model) -> Result<Vec<String>, ConvertError> {
    let bare = !checkpoint.tensors.keys().any(|name| name.starts_with(family.base));
    let strip = |name: &str| if bare { name.strip_prefix(family.base).unwrap_or(name).to_owned() } else { name.to_owned() };
    let older = |name: &str| {
        let mut names = family.renamed.iter().filter_map(|(new, old)| Some(format!("{}{old}", name.strip_suffix(new)?)));
        names.find(|old| checkpoint.tensors.contains_key(old))
    };
    for tensor in tensors.iter_mut() {
        tensor.name = strip(&tensor.name);
        tensor.copies.iter_mut().for_each(|copy| *copy = strip(copy));
        if let (false, Some(old)) = (checkpoint.tensors.contains_key(&tensor.name), older(&tensor.name)) {
            tensor.name = old;
        }
    }
    let known: HashSet<&str> = tensors.iter().flat_map(|t| [&t.name].into_iter().chain(&t.copies)).map(String::as_str).collect();
    let wanted = |name: &str| known.contains(name);
    let beyond = |name: &str| {
        let Some(Predicting { prefix, setting, .. }) = family.predicting else { return false };
        let layer = name.strip_prefix(strip(prefix).as_str()).and_then(|rest| rest.split('.').next()?.parse::<u64>().ok());
        layer.is_some_and(|n| n >= number(model, "layers") + ir::fault!("convert.layers.beyond", 1, 0) + number(model, setting))
    };
    let is_unused = |name: &str| family.unused.iter().any(|u| name.ends_with(u)) || beyond(name);
    let mut skipped: Vec<String> = checkpoint.tensors.keys().filter(|name| is_unused(name) && !wanted(name)).cloned().collect();
    for (copy, source) in family.tied {
        let source = strip(source);
        if let (false, Some(second), Some(first)) = (wanted(copy), checkpoint.tensors.get(*copy), checkpoint.tensors.get(&source)) {
            if !checkpoint.alike(first, second) {
                let what = vec![format!("`{copy}` is not equal to `{source}`, although the config ties them")];
                return Err(ConvertError::Tensors { path: checkpoint.path.clone(), what });
            }
            skipped.push((*copy).to_owned());
        }
    }
    Ok(skipped)
}

/// Writes every parameter, one after the other.
fn weights(file: &mut std::fs::File, graph: &Graph, tensors: &[Foreign], checkpoint: &Checkpoint, provenance: &Provenance) -> std::io::Result<()> {
    let mut holders: Vec<Vec<(&Foreign, &ParamSlice)>> = vec![vec![]; graph.params.len()];
    for tensor in tensors {
        for part in &tensor.parts {
            holders[part.param].push((tensor, part));
        }
    }
    let written: Vec<WrittenTensor> = parameters(graph).into_iter().map(|(name, shape)| WrittenTensor { name, shape, dtype: Float::F32 }).collect();
    let exact = write(file, Format::Mcc(provenance), &written, |param, bytes| {
        for (tensor, part) in &holders[param] {
            let (values, dtype) = checkpoint.floats(&checkpoint.tensors[&tensor.name]);
            copy(&part.loops, Direction::Import, (&values, dtype, part.foreign), (bytes, part.own));
        }
    });
    exact.map(|_| ())
}

/// Names and shapes of a graph's parameters, in order.
pub fn parameters(graph: &Graph) -> Vec<(String, Vec<u64>)> {
    let shape = |dims: &[ir::dim::Dim]| dims.iter().map(|d| graph.body.dims.size(*d)).collect();
    graph.params.iter().map(|p| (p.name.clone(), shape(&p.ty.dims))).collect()
}
