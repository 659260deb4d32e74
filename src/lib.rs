//! mcc as a library: a model text and options in, an artifact out. Nothing is printed, and nothing is read but what is given.
//!
//! ```no_run
//! use mcc::{Request, compile};
//! let text = std::fs::read_to_string("models/gpt2.mdl")?;
//! let mut request = Request::new("gpt2.mdl", &text)?;
//! request.options.tp = 2;
//! let compiled = compile(&request, &mut |_| Err("it imports nothing".into()), &Default::default())?;
//! compiled.write("gpt2.mcc".as_ref())?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The command line goes through the same pieces, one by one: [`frontend::compile_both`], [`passes::compile::Compile`], [`machine::generate`],
//! [`machine::Machine`].

#![deny(clippy::print_stdout, clippy::print_stderr, reason = "a library prints nothing")]

pub mod machine;
pub mod targets;

use codegen::{BatchError, Emit, LinkError, Workers};
use frontend::Loader;
use ir::diag::{Diagnostic, Severity, Sources};
use ir::model::{Model, Train};
use ir::options::Options;
use ir::progress::Progress;
use machine::{Machine, generate};
use passes::compile::{Broken, Compile, CompileError, Compiled};
use runtime::artifact::{self, ArtifactError, Manifest, Parts};
use std::path::{Path, PathBuf};
use targets::{Targets, TargetsError};

/// What to compile, and how.
#[derive(Clone, Debug)]
pub struct Request {
    /// What diagnostics call the text.
    pub name: String,
    pub text: String,
    /// Settings, precision; `batch` and `training` are `options`' and the compile's.
    pub elaboration: frontend::Options,
    pub options: Options,
    /// In place of the text's `train` section, if some.
    pub train: Option<Train>,
    pub targets: Targets,
    pub workers: Workers,
    /// The directory of compiled kernels, if any.
    pub cache: Option<PathBuf>,
}

impl Request {
    /// A text as it is, on one rank, for this machine's CPU; kernels are compiled in this process.
    ///
    /// # Errors
    /// This CPU is too old.
    pub fn new(name: &str, text: &str) -> Result<Request, TargetsError> {
        Ok(Request {
            name: name.into(),
            text: text.into(),
            elaboration: frontend::Options::default(),
            options: Options::default(),
            train: None,
            targets: Targets::named("cpu", None)?,
            workers: Workers::InProcess,
            cache: None,
        })
    }
}

/// A compiled model: every level of it, and its code.
#[derive(Clone, Debug)]
pub struct Artifact {
    pub compiled: Compiled,
    pub machine: Machine,
    pub target: runtime::target::Target,
    /// The text and what it imports.
    pub sources: Sources,
    /// Of the text and of the passes.
    pub warnings: Vec<Diagnostic>,
}

impl Artifact {
    /// Writes a directory that `mcc run` starts; nothing, if that fails.
    ///
    /// # Errors
    /// Something other than an artifact has that name, or the file system says so.
    pub fn write(&self, directory: &Path) -> Result<Manifest, ArtifactError> {
        self.machine.parts(|kernels| {
            let parts = Parts { job: &self.compiled.job, target: &self.target, kernels: Some(kernels), dumps: &[], sign: None };
            artifact::write(directory, &parts)
        })
    }
}

/// Why there is no artifact.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// What the user can mend, all of it, with the texts that its places are in.
    #[error("{}", rendered(.0, .1))]
    User(Vec<Diagnostic>, Sources),
    #[error(transparent)]
    Bug(Box<Broken>),
    #[error(transparent)]
    Kernel(#[from] BatchError),
    #[error(transparent)]
    Link(#[from] LinkError),
}

fn rendered(errors: &[Diagnostic], sources: &Sources) -> String {
    let errors = errors.iter().filter(|e| e.severity == Severity::Error);
    errors.map(|e| frontend::render(e, sources, frontend::Style::Plain)).collect::<Vec<_>>().join("\n\n")
}

/// Compiles a text. `imports` reads the texts that it imports, by name; `progress` is told what the compile is at.
///
/// # Errors
/// What the user can mend; a bug of mcc's; a kernel that code cannot be made of.
pub fn compile(request: &Request, imports: Loader<'_>, progress: &Progress) -> Result<Artifact, Error> {
    let Request { name, text, elaboration, options, targets, .. } = request;
    let mut sources = Sources::default();
    progress.enter("parse");
    let elaboration = frontend::Options { batch: options.global_batch, ..elaboration.clone() };
    let models = frontend::compile_both(&mut sources, name, text, &elaboration, imports);
    let mut models = models.map_err(|errors| Error::User(errors, sources.clone()))?;
    let options = Options { global_batch: global_batch(&models.training, options.global_batch), ..options.clone() };
    models.training.train = request.train.unwrap_or(models.training.train);
    let failed = |e| match e {
        CompileError::User(errors) => Error::User(errors, sources.clone()),
        CompileError::Broken(broken) => Error::Bug(broken),
    };
    let mut passes = Compile::new(models.training, models.evaluation, &options, progress).map_err(failed)?;
    while passes.step().map_err(failed)?.is_some() {}
    let mut compiled = passes.finish();
    compiled.job.sources = frontend::without_library(&sources);
    let kernels = generate(&compiled.job.kernels, targets, Emit::default(), request.cache.as_deref(), &request.workers, progress)?;
    let machine = Machine::new(kernels, targets, progress)?;
    let target = targets.to_artifact(&compiled.job.kernels);
    let warnings = models.warnings.into_iter().chain(compiled.warnings.iter().cloned()).collect();
    Ok(Artifact { compiled, machine, target, sources, warnings })
}

/// Sequences of a step: what the text's setting `batch` says, which is the same thing, else `default`.
pub fn global_batch(model: &Model, default: u64) -> u64 {
    model.graph.batch.map_or(default, |d| model.graph.body.dims.size(d))
}
