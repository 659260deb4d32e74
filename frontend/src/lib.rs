//! .mdl text to the logical forward graph.
//!
//! [`compile`] does all of it: parse, import, elaborate; every error of the text at once. The library does no input
//! or output of its own: files named by `import` come from a [`Loader`].
//!
//! **Invariant:** nothing in here prints, reads files or the environment, or panics on any text.

pub mod ast;
mod build;
mod elab;
mod foreign;
mod format;
mod imports;
mod library;
pub mod names;
mod parse;
mod render;
mod repair;
mod resolve;
mod scope;
mod split;

pub use elab::Elaborated;
pub use format::format;
pub use parse::{parse, parse_all};
pub use render::{Style, render};

use ast::{Ast, StmtKind};
use ir::diag::{Diagnostic, Source, Sources};
use ir::model::Model;
use ir::op::DType;

/// Gives the text of an imported file, or why it cannot.
pub type Loader<'a> = &'a mut dyn FnMut(&str) -> Result<String, String>;

/// The text of a file's bytes.
///
/// # Errors
/// They are not UTF-8; says where.
pub fn decode(name: &str, bytes: Vec<u8>) -> Result<String, Box<Diagnostic>> {
    String::from_utf8(bytes).map_err(|error| {
        let valid = &error.as_bytes()[..error.utf8_error().valid_up_to()];
        let line = 1 + valid.iter().filter(|b| **b == b'\n').count();
        let column = 1 + valid.iter().rev().take_while(|b| **b != b'\n').count();
        let e = Diagnostic::error("E0108", format!("`{name}` is not text: byte {} at {line}:{column} is not UTF-8", error.as_bytes()[valid.len()]));
        Box::new(e.help("save the file as UTF-8; is it a model text at all?"))
    })
}

/// How a text is elaborated.
#[derive(Clone, Debug)]
pub struct Options {
    /// `-D name=value`, in order; the last of equal names counts.
    pub defines: Vec<(String, String)>,
    /// The global batch size, where no define gives `batch`.
    pub batch: u64,
    /// Sequences of a microbatch on all ranks, for a setting `micro_batch`; none: all of the batch.
    pub micro_batch: Option<u64>,
    /// The static value `training`: without it dropout is the identity.
    pub training: bool,
    /// Elaborate the bodies of `@op` functions, never the operations they stand for.
    pub inline_ops: bool,
    /// What the backward pass may compute again, in the place of what the text's plan says: functions, or what calls
    /// are named (`as`).
    pub recompute: Option<Vec<String>>,
    /// Functions, or what calls are named, whose values may wait on the host for the backward pass.
    pub offload: Vec<String>,
    /// The working precision, which unmarked float types have: `F32`, `Bf16` or `F16`.
    pub precision: DType,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            defines: vec![],
            batch: 1,
            micro_batch: None,
            training: true,
            inline_ops: false,
            recompute: None,
            offload: vec![],
            precision: DType::F32,
        }
    }
}

/// The texts that a compile has read, the library's by their names alone: they are the same in every mcc of a
/// version.
pub fn without_library(sources: &Sources) -> Vec<Source> {
    let of_library = |s: &Source| library::FILES.contains(&(s.name.as_str(), s.text.as_str()));
    sources.files.iter().map(|s| if of_library(s) { Source { name: s.name.clone(), text: String::new() } } else { s.clone() }).collect()
}

/// Elaborates a model from the texts of [`without_library`]: the first, which imports the others.
///
/// # Errors
/// All errors of the text.
pub fn compile_texts(sources: &mut Sources, texts: &[Source], options: &Options) -> Result<Elaborated, Vec<Diagnostic>> {
    let (name, text) = first_of(texts);
    compile(sources, name, text, options, &mut among(texts))
}

/// As [`compile_texts`], for training and for evaluation.
///
/// # Errors
/// All errors of the text.
pub fn compile_texts_both(sources: &mut Sources, texts: &[Source], options: &Options) -> Result<Models, Vec<Diagnostic>> {
    let (name, text) = first_of(texts);
    compile_both(sources, name, text, options, &mut among(texts))
}

fn first_of(texts: &[Source]) -> (&str, &str) {
    texts.first().map_or(("", ""), |s| (&s.name, &s.text))
}

/// What is imported, of texts that are there.
fn among(texts: &[Source]) -> impl FnMut(&str) -> Result<String, String> {
    |path| {
        let found = texts.iter().find(|s| s.name == path && !s.text.is_empty());
        found.map(|s| s.text.clone()).ok_or_else(|| "it is not among the texts".to_owned())
    }
}

/// Parses and elaborates a text, which is added to the sources together with what it imports and the library.
///
/// # Errors
/// All errors of the text.
pub fn compile(sources: &mut Sources, name: &str, text: &str, options: &Options, loader: Loader<'_>) -> Result<Elaborated, Vec<Diagnostic>> {
    let (ast, errors) = parse_all(sources, name, text);
    run(sources, &ast, options, loader, errors)
}

/// A model as it trains, and as it is evaluated: without random drops.
#[derive(Clone, Debug)]
pub struct Models {
    /// Elaborated with the static value `training` true.
    pub training: Model,
    /// Elaborated with the static value `training` false: dropout is the identity.
    pub evaluation: Model,
    /// Warnings of the elaboration for training.
    pub warnings: Vec<Diagnostic>,
}

/// Elaborates a text for training and for evaluation, whatever `options.training` says.
///
/// # Errors
/// All errors of the text.
pub fn compile_both(sources: &mut Sources, name: &str, text: &str, options: &Options, loader: Loader<'_>) -> Result<Models, Vec<Diagnostic>> {
    let trains = |training| Options { training, ..options.clone() };
    let Elaborated { model: training, warnings } = compile(sources, name, text, &trains(true), loader)?;
    *sources = Sources::default();
    let evaluation = compile(sources, name, text, &trains(false), loader)?.model;
    Ok(Models { training, evaluation, warnings })
}

/// Elaborates a parsed text.
///
/// # Errors
/// All errors of the text.
pub fn elaborate(sources: &mut Sources, ast: &Ast, options: &Options, loader: Loader<'_>) -> Result<Elaborated, Vec<Diagnostic>> {
    run(sources, ast, options, loader, vec![])
}

fn run(sources: &mut Sources, ast: &Ast, options: &Options, loader: Loader<'_>, mut errors: Vec<Diagnostic>) -> Result<Elaborated, Vec<Diagnostic>> {
    errors.extend(one_model(sources, ast, &errors));
    let name = sources.files.get(usize::from(ast.file)).map_or_else(String::new, |f| f.name.clone());
    let imports = imports::read(sources, &name, ast, loader, &mut errors);
    let library = library::parse_library(sources);
    let incomplete = !errors.is_empty();
    let files = [(ast, &imports.links)].into_iter().chain(imports.files.iter().map(|f| (&f.ast, &f.links)));
    for (ast, links) in files {
        errors.extend(imports.clashes(links));
        errors.extend(scope::check(ast, &imports.known(links, &library), incomplete));
    }
    elab::elaborate(ast, &imports, &library, options, errors)
}

/// A compiled file has exactly one model.
fn one_model(sources: &Sources, ast: &Ast, errors: &[Diagnostic]) -> Option<Diagnostic> {
    let mut models = ast.items.iter().filter_map(|i| if let StmtKind::Model(m) = &i.kind { Some(m) } else { None });
    let Some(first) = models.next() else {
        if !errors.is_empty() {
            return None;
        }
        let name = sources.files.get(usize::from(ast.file)).map_or("", |f| &f.name);
        let e = Diagnostic::error("E0111", format!("`{name}` has no model"));
        let e = match ast.items.first() {
            Some(item) => e.label(item.span, "the file begins here"),
            None => e,
        };
        return Some(e.help("a file to compile has one `model name(batch, ..) { .. }`"));
    };
    let second = models.next()?;
    let e = Diagnostic::error("E0111", format!("a second model, `{}`", second.name.name)).label(second.name.span, "again");
    Some(e.label(first.name.span, "first model").help("put each model into a file of its own"))
}
