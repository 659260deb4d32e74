//! `mcc run --check-first-step`: the model of an artifact on one rank, of fewer sequences, to be interpreted.

use crate::misuse::misuse;
use crate::print::note;
use crate::report::count;
use crate::shown::Verbosity;
use ir::diag::Sources;
use ir::model::Train;
use ir::op::DType;
use ir::options::Options;
use ir::program::Job;
use mcc::Elaborated;
use procfs::{Current, Meminfo};
use runtime::artifact::Artifact;
use runtime::launch::{self, RunOptions};
use runtime::protocol::FirstStep;
use runtime::reference;

/// Sequences that are looked at by default, where the batch has so many.
const FEW: u64 = 4;

/// What the interpreter comes to in a second, about: multiplications in products of matrices, and points of
/// other loops.
const SPEED: [f64; 2] = [6e9, 1.5e8];

/// What the first step of a run should come to on so many sequences, or on as many as are looked at by default.
///
/// # Errors
/// A number that does not divide the batch, a model that is too large, or that is not what it is on copies; and as of
/// [`launch::first_step`].
pub fn expected(artifact: &Artifact, options: &RunOptions, sequences: Option<u64>, verbosity: Verbosity) -> anyhow::Result<Option<FirstStep>> {
    let batch = artifact.job.global_batch;
    let _interpreting = options.stop.interpreting();
    let few = match sequences {
        None => (1..=FEW).rev().find(|n| batch.is_multiple_of(*n)).unwrap_or(1),
        Some(n) if batch.is_multiple_of(n) => n,
        Some(n) => return Err(misuse!("--check-first-step={n}: the batch of {batch} sequences is no multiple of that")),
    };
    // Twice as many sequences are the fewest that show whether copies give the same result.
    let numbers = if few == batch { vec![few] } else { vec![few, 2 * few] };
    let jobs = numbers.iter().map(|n| on_one_rank(&artifact.job, *n)).collect::<anyhow::Result<Vec<_>>>()?;
    let most = jobs.iter().map(reference::bytes).max().unwrap_or(0);
    if let Some(free) = Meminfo::current().ok().and_then(|m| m.mem_available).filter(|free| *free < most) {
        let [most, free] = [most, free].map(|n| n as f64 / f64::from(1 << 30));
        return Err(misuse!(
            "--check-first-step: the model takes {most:.1} GiB where it is interpreted, and {free:.1} GiB are free here; fewer sequences or a smaller model of the same kind may fit"
        ));
    }
    if verbosity != Verbosity::Quiet {
        // The first job is interpreted twice.
        let work = jobs.iter().chain(&jobs[..1]).map(reference::work);
        let [products, points] = work.fold([0.0; 2], |sums, own| [0, 1].map(|i: usize| sums[i] + own[i] as f64));
        note!(
            "interpreting the first step, on {few} of {batch} sequences: {} multiplications in products and {} other operations, about {}",
            count(products as u64),
            count(points as u64),
            time(products / SPEED[0] + points / SPEED[1])
        );
    }
    Ok(launch::first_step(artifact, options, &jobs)?)
}

/// `20 s`, `3 min`, `2 h`.
fn time(seconds: f64) -> String {
    match seconds.ceil() as u64 {
        s @ 0..100 => format!("{s} s"),
        s @ 100..6_000 => format!("{} min", s.div_ceil(60)),
        s => format!("{} h", s.div_ceil(3_600)),
    }
}

/// The model of a job as its text has it, in f32, on one rank and for so many sequences a step.
fn on_one_rank(job: &Job, sequences: u64) -> anyhow::Result<Job> {
    let defines = job.settings.iter().filter(|(name, _)| name != "batch").cloned().collect();
    let elaboration = frontend::Options { defines, batch: sequences, precision: DType::F32, ..frontend::Options::default() };
    let mut sources = Sources::default();
    let told = |errors: Vec<ir::diag::Diagnostic>, sources: &Sources| {
        let texts: Vec<String> = errors.iter().map(|e| frontend::render(e, sources, frontend::Style::Plain)).collect();
        anyhow::anyhow!("--check-first-step: the model on {sequences} sequences of one rank cannot be compiled:\n{}", texts.join("\n\n"))
    };
    let models = frontend::compile_texts_both(&mut sources, &job.sources, &elaboration).map_err(|e| told(e, &sources))?;
    let options = Options { micro_batch: sequences, global_batch: sequences, ..Options::default() };
    let mut models = Elaborated { training: models.training, evaluation: models.evaluation, options, sources, warnings: vec![] };
    // Optimizer states that a run resumes from have to fit, so the optimizer is the job's; its updates are not
    // compared.
    models.training.train = Train { loss_scale: None, ..job.train };
    let progress = ir::progress::Progress::default();
    let mut passes = models.passes(&progress)?;
    while passes.step()?.is_some() {}
    Ok(passes.finish().compiled.job)
}
