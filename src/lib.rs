//! mcc as a library: a model text and options in, an artifact out. Nothing is printed, and nothing is read but what
//! is given.
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
//! [`compile`] is three steps, between which who wants more can look and change: [`Request::elaborate`], the passes
//! one by one ([`Passes`]), [`Request::generate`]. The command line takes these.

#![deny(clippy::print_stdout, clippy::print_stderr, reason = "a library prints nothing")]

pub mod machine;
pub mod targets;

use codegen::target::Arch;
use codegen::{Batch, BatchError, Emit, LinkError, Verification, Verify, Workers};
use frontend::{Loader, Models};
use ir::diag::{Diagnostic, Severity, Sources, Span};
use ir::kernel::Kernel;
use ir::model::Model;
use ir::module::Module;
use ir::options::{Options, SplitK};
use ir::progress::Progress;
use machine::{Machine, beyond_scratch, entries, generate};
use passes::compile::{Compile, CompileError, Compiled, CompilerBug};
use passes::table::Pass;
use runtime::artifact::{self, ArtifactError, ArtifactParts, Manifest};
use runtime::signature::SecretKey;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;
use targets::{Targets, TargetsError};

/// What to compile, and how.
#[derive(Clone, Debug)]
pub struct Request {
    /// What diagnostics call the text.
    pub name: String,
    /// Text of the model, as a `.mdl` file has it.
    pub text: String,
    /// Settings, precision; `batch` and `training` are `options`' and the compile's.
    pub elaboration: frontend::Options,
    /// How the model is split and run.
    pub options: Options,
    /// What kernels of devices and of the host are compiled for.
    pub targets: Targets,
    /// Who compiles kernels: this process, or worker processes.
    pub workers: Workers,
    /// The directory of compiled kernels, if any.
    pub cache: Option<PathBuf>,
    /// Which kernels are held to their bodies.
    pub verify: Verify,
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
            targets: Targets::named("cpu", None)?,
            workers: Workers::InProcess,
            cache: None,
            verify: Verify::New,
        })
    }

    /// The text as a model to train and to evaluate. `imports` reads the texts that it imports, by name.
    ///
    /// # Errors
    /// Options that fit no text, and all that is wrong with this one.
    pub fn elaborate(&self, imports: Loader<'_>, progress: &Progress) -> Result<Elaborated, Error> {
        let Request { name, text, options, .. } = self;
        let mut sources = Sources::default();
        if options.tf32 && self.targets.device.arch == Arch::X86_64 {
            return Err(Error::User(vec![tf32_on_cpu(&self.targets.device.cpu)], sources));
        }
        passes::start::ranks(options).map_err(|errors| Error::User(errors, sources.clone()))?;
        progress.enter("parse");
        let elaboration = frontend::Options {
            batch: options.global_batch,
            micro_batch: Some(options.micro_batch.saturating_mul(options.dp)),
            ..self.elaboration.clone()
        };
        let models = frontend::compile_both(&mut sources, name, text, &elaboration, imports);
        let Models { training, evaluation, warnings } = models.map_err(|errors| Error::User(errors, sources.clone()))?;
        // The text's setting `batch` is the global batch too, and was given beside the option.
        let global_batch = training.graph.batch.map_or(options.global_batch, |d| training.graph.body.dims.size(d));
        // A run may decide that GPUs exchange by NCCL, which needs serial exchanges.
        let serial_exchanges = self.targets.device.arch == Arch::Nvptx;
        let split_k = self.targets.device.generation().map_or(SplitK::Off, SplitK::For);
        let options = Options { global_batch, serial_exchanges, split_k, ..options.clone() };
        Ok(Elaborated { training, evaluation, options, sources, warnings })
    }

    /// Compiles the kernels of a job and links them.
    ///
    /// # Errors
    /// A kernel that code cannot be made of, or whose code is not what its body says; or that wants more scratch than
    /// there is.
    pub fn generate(&self, levels: Levels, progress: &Progress) -> Result<Artifact, Error> {
        let (job, targets) = (&levels.compiled.job, &self.targets);
        let batch = generate(&job.kernels, targets, Emit::default(), self.verify, self.cache.as_deref(), &self.workers, progress)?;
        let (checked, Batch { kernels, .. }) = (KernelChecks::of(&batch, &job.kernels), batch);
        if let Some(error) = beyond_scratch(&entries(&kernels), job, targets) {
            return Err(Error::User(vec![error], levels.sources));
        }
        let machine = Machine::new(kernels, targets, progress)?;
        let target = targets.to_artifact(&job.kernels);
        Ok(Artifact { levels, machine, target, checked })
    }
}

/// E0642: CPUs have no tf32.
fn tf32_on_cpu(cpu: &str) -> Diagnostic {
    let d = Diagnostic::error("E0642", format!("--tf32 is for tensor cores, and {cpu} is a CPU, which has none"));
    d.help("without it f32 is multiplied with all its bits; `--target sm_80` or `--target sm_90a` for GPUs")
}

/// A text through the front end. The models may be changed, as flags change the `train` section, before passes get
/// them.
#[derive(Clone, Debug)]
pub struct Elaborated {
    /// What a training step computes, random drops included.
    pub training: Model,
    /// Without random drops.
    pub evaluation: Model,
    /// With the global batch that the text's setting `batch` gives, if it does.
    pub options: Options,
    /// The text and what it imports: diagnostics refer to them.
    pub sources: Sources,
    /// What the front end warns of in the texts.
    pub warnings: Vec<Diagnostic>,
}

impl Elaborated {
    /// The compile of these models, before its first pass.
    ///
    /// # Errors
    /// What the user can mend, or a bug of mcc's.
    pub fn passes(self, progress: &Progress) -> Result<Passes<'_>, Error> {
        let Elaborated { training, evaluation, options, sources, warnings } = self;
        match Compile::new(training, evaluation, &options, progress) {
            Ok(compile) => Ok(Passes { compile, sources, warnings }),
            Err(e) => Err(Error::new(e, &sources)),
        }
    }
}

/// A compile on its way, pass by pass.
pub struct Passes<'a> {
    compile: Compile<'a>,
    sources: Sources,
    /// Warnings about the text.
    warnings: Vec<Diagnostic>,
}

impl Passes<'_> {
    /// The pass that [`Passes::step`] would run; none when all are done.
    pub fn next_pass(&self) -> Option<&'static Pass> {
        self.compile.next_pass()
    }

    /// Runs the next pass that options ask for, and its verifiers; none when all are done.
    ///
    /// # Errors
    /// What the user can mend, or a bug of mcc's.
    pub fn step(&mut self) -> Result<Option<&'static Pass>, Error> {
        self.compile.step().map_err(|e| Error::new(e, &self.sources))
    }

    /// The module after the passes that have run.
    pub fn module(&self) -> &Module {
        self.compile.module()
    }

    /// As [`Compile::damage`].
    ///
    /// # Errors
    /// A bug, as it would be shown.
    pub fn damage(&mut self) -> Result<(), Error> {
        self.compile.damage().map_err(|e| Error::new(e, &self.sources))
    }

    /// What all passes left.
    ///
    /// # Panics
    /// Not all were run.
    pub fn finish(self) -> Levels {
        let Passes { compile, sources, mut warnings } = self;
        let mut compiled = compile.finish();
        compiled.job.sources = frontend::without_library(&sources);
        warnings.append(&mut compiled.warnings);
        compiled.warnings = warnings;
        Levels { compiled, sources }
    }
}

/// A model at every level, before code generation.
#[derive(Clone, Debug)]
pub struct Levels {
    /// Its warnings are those of the text and of the passes.
    pub compiled: Compiled,
    /// The text and what it imports.
    pub sources: Sources,
}

/// A compiled model: every level of it, and its code.
#[derive(Clone, Debug)]
pub struct Artifact {
    /// The model at every level, down to the job.
    pub levels: Levels,
    /// Code of the job's kernels.
    pub machine: Machine,
    /// Which device runs the kernels, as the manifest says it.
    pub target: runtime::target::Target,
    /// How many kernels were held to their bodies, and why others were not.
    pub checked: KernelChecks,
}

/// What is known of the code of an artifact's kernels.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KernelChecks {
    /// How many were found in the cache.
    pub cached: usize,
    /// Held to their bodies, now and before.
    pub held: usize,
    /// Held to their bodies by this compile.
    pub now: usize,
    /// How long this compile held kernels to their bodies, summed over kernels.
    pub time: Duration,
    /// How many nobody has looked at, as nobody asked for it.
    pub unseen: usize,
    /// Why the code of others does not run here, and of how many.
    pub foreign: BTreeMap<String, usize>,
    /// Those that are too large for it.
    pub not_checked: Vec<NotChecked>,
}

/// A kernel that is too large to be held to its body.
#[derive(Clone, Debug, PartialEq)]
pub struct NotChecked {
    /// The kernel's name, and its symbol in the object.
    pub kernel: String,
    /// What of the text it computes.
    pub span: Option<Span>,
    /// By what it is too large.
    pub why: String,
}

impl KernelChecks {
    fn of(batch: &Batch, kernels: &[Kernel]) -> KernelChecks {
        let mut out = KernelChecks { cached: batch.cached, now: batch.verified, time: batch.verify_time, ..KernelChecks::default() };
        for (kernel, compiled) in kernels.iter().zip(&batch.kernels) {
            match &compiled.verification {
                Verification::Passed { .. } => out.held += 1,
                Verification::Foreign(why) => *out.foreign.entry(why.clone()).or_default() += 1,
                Verification::NotChecked(why) => {
                    let span = kernel.body.nodes.iter().rev().find_map(|n| n.origin.span);
                    out.not_checked.push(NotChecked { kernel: compiled.name.clone(), span, why: why.clone() });
                }
                Verification::None => out.unseen += 1,
            }
        }
        out
    }
}

impl Artifact {
    /// Writes a directory that `mcc run` starts; nothing, if that fails.
    ///
    /// # Errors
    /// Something other than an artifact has that name, or the file system says so.
    pub fn write(&self, directory: &Path) -> Result<Manifest, ArtifactError> {
        self.parts(&[], None, |parts| artifact::write(directory, parts))
    }

    /// Gives `write` what an artifact is of, with these dumps, and signed with that key.
    pub fn parts<T>(&self, dumps: &[(String, String)], sign: Option<&SecretKey>, write: impl FnOnce(&ArtifactParts<'_>) -> T) -> T {
        let (job, target) = (&self.levels.compiled.job, &self.target);
        self.machine.kernels(|kernels| write(&ArtifactParts { job, target, kernels: Some(kernels), dumps, sign }))
    }
}

/// Why there is no artifact.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum Error {
    /// What the user can mend, all of it, with the texts that its places are in.
    #[error("{}", rendered(.0, .1))]
    User(Vec<Diagnostic>, Sources),
    #[error(transparent)]
    Bug(Box<CompilerBug>),
    #[error(transparent)]
    Kernel(#[from] BatchError),
    #[error(transparent)]
    Link(#[from] LinkError),
}

impl Error {
    fn new(error: CompileError, sources: &Sources) -> Error {
        match error {
            CompileError::User(errors) => Error::User(errors, sources.clone()),
            CompileError::Broken(broken) => Error::Bug(broken),
        }
    }
}

fn rendered(errors: &[Diagnostic], sources: &Sources) -> String {
    let errors = errors.iter().filter(|e| e.severity == Severity::Error);
    errors.map(|e| frontend::render(e, sources, frontend::Style::Plain)).collect::<Vec<_>>().join("\n\n")
}

/// Compiles a text. `imports` reads the texts that it imports, by name; `progress` is told what the compile is at.
///
/// # Errors
/// What the user can mend; a bug of mcc's; a kernel that code cannot be made of, or whose code is not what its body
/// says.
pub fn compile(request: &Request, imports: Loader<'_>, progress: &Progress) -> Result<Artifact, Error> {
    let mut passes = request.elaborate(imports, progress)?.passes(progress)?;
    while passes.step()?.is_some() {}
    request.generate(passes.finish(), progress)
}
