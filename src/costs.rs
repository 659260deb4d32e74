//! `mcc dump --level ptx --costs`, and `mcc run --device emulated --profile`: how long a card would take for the
//! kernels of a training step, and why.

use crate::cli::DumpArgs;
use crate::failure::Failure;
use crate::misuse::misuse;
use crate::print::{note, out};
use codegen::costs::{A100, CARDS, Card, Predicted, Predictor, WIDTHS, usual};
use ir::launch::WARP;
use ir::program::{Action, Job, KernelId, ProgramPhase};
use ir::work::Work;
use runtime::artifact::Artifact;
use runtime::profile::named::NamedCommands;
use runtime::target::Target;
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How long nothing is said of how far it is.
const SILENT: Duration = Duration::from_secs(5);

/// The card that is named, or the one of this kind.
pub fn card(artifact: &Artifact, name: Option<&str>) -> Result<&'static Card, Failure> {
    let Target::Gpu { arch, .. } = &artifact.manifest.target else {
        return Err(misuse!("`{}` has no PTX: compile with --target sm_80 or sm_90a", artifact.dir.display()).into());
    };
    let Some(name) = name else { return Ok(usual(arch)) };
    let known = || CARDS.map(|c| format!("`{}`", c.name)).join(", ");
    let card = Card::named(name).ok_or_else(|| misuse!("no card is called `{name}`: there are {}", known()))?;
    if arch == "sm_90a" && card.name == A100.name {
        return Err(misuse!("code for sm_90a does not run on `{}`: compile with --target sm_80", card.name).into());
    }
    Ok(card)
}

/// How often each kernel of a class is launched in a training step, without what is left out of most steps.
pub fn launches(job: &Job, class: usize) -> BTreeMap<KernelId, u64> {
    let mut launches = BTreeMap::new();
    let Some(stage) = job.stages.iter().find(|s| s.program as usize == class) else { return launches };
    for call in [ProgramPhase::Train, ProgramPhase::Update].iter().flat_map(|p| stage.schedule.calls(*p)) {
        for (_, command) in job.programs[class].commands(call).filter(|(_, c)| c.predicate.is_none()) {
            if let Action::Launch { kernel, .. } = &command.action {
                *launches.entry(*kernel).or_default() += 1;
            }
        }
    }
    launches
}

/// A kernel of a step, as a card is predicted to run it.
#[derive(Clone, Debug, Serialize)]
pub struct KernelCost {
    pub kernel: String,
    pub family: &'static str,
    /// What it computes, and for which lines.
    pub name: String,
    pub places: String,
    /// Of a training step.
    pub launches: u64,
    pub blocks: u32,
    /// Of a block.
    pub warps: u64,
    /// Bytes that no kernel of its definition can do without.
    pub bytes: u64,
    #[serde(flatten)]
    pub outcome: Outcome,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    Predicted(Estimate),
    NotPredicted(String),
}

/// Of one launch.
#[derive(Clone, Debug, Serialize)]
pub struct Estimate {
    pub seconds: f64,
    pub bound: String,
    /// Seconds of what multiplying warps do while nothing of theirs is multiplied.
    pub alone: f64,
    /// Blocks of a multiprocessor at a time, and how often it is filled with them.
    pub resident: u32,
    pub waves: u64,
    pub trips: u64,
    /// Instructions of all its warps.
    pub instructions: u64,
    /// Sectors of global memory for one that is needed, and wavefronts of shared memory.
    pub sectors: Option<f64>,
    pub banks: Option<f64>,
    /// Of the bytes that lanes load and store, the share that goes 16 at a time, and by less than 4.
    pub wide: Option<f64>,
    pub narrow: Option<f64>,
}

impl Estimate {
    fn new(p: &Predicted) -> Estimate {
        let Predicted { counts, cost, blocks } = p;
        let ratio = |a: u64, b: u64| (b > 0).then(|| a as f64 / b as f64);
        let widths: Vec<u64> = (0..WIDTHS.len()).map(|k| counts.loads.widths[k] + counts.stores.widths[k]).collect();
        let all = widths.iter().sum();
        Estimate {
            seconds: cost.seconds,
            bound: cost.bound.to_string(),
            alone: cost.alone,
            resident: cost.resident,
            waves: cost.waves,
            trips: counts.trips,
            instructions: (counts.instructions() as f64 * f64::from(*blocks) / counts.blocks.max(1) as f64) as u64,
            sectors: ratio(counts.loads.sectors + counts.stores.sectors, counts.loads.needed + counts.stores.needed),
            banks: ratio(counts.shared.wavefronts, counts.shared.needed),
            wide: ratio(widths[WIDTHS.len() - 1], all),
            narrow: ratio(widths.iter().zip(WIDTHS).filter(|(_, w)| *w < 4).map(|(n, _)| n).sum(), all),
        }
    }
}

/// The kernels of a class on a card, those that take most of a step first.
fn rows(artifact: &Artifact, class: usize, predictor: &mut Predictor, progress: &mut dyn FnMut(usize, usize)) -> Vec<KernelCost> {
    let (job, names) = (&artifact.job, NamedCommands::new(&artifact.job));
    let launches: Vec<(KernelId, u64)> = launches(job, class).into_iter().filter(|(k, _)| artifact.kernels[k.index()].launch.is_some()).collect();
    let row = |(done, (id, times)): (usize, &(KernelId, u64))| {
        let (entry, kernel) = (&artifact.kernels[id.index()], &job.kernels[id.index()]);
        let launch = entry.launch.as_ref().expect("invariant: it is launched on the card");
        let (name, places) = names.kernel(*id);
        let outcome = match predictor.predict(kernel, &entry.name, artifact.ptx(entry), launch) {
            Ok(predicted) => Outcome::Predicted(Estimate::new(&predicted)),
            Err(why) => Outcome::NotPredicted(why),
        };
        progress(done + 1, launches.len());
        KernelCost {
            kernel: entry.name.clone(),
            family: kernel.family.describe(),
            name: name.into(),
            places,
            launches: *times,
            blocks: predictor.blocks(launch),
            warps: u64::from(launch.block / WARP),
            bytes: Work::needed(kernel).bytes,
            outcome,
        }
    };
    let mut rows: Vec<KernelCost> = launches.iter().enumerate().map(row).collect();
    rows.sort_by(|a, b| b.seconds().total_cmp(&a.seconds()));
    rows
}

impl KernelCost {
    /// Of a training step; none if it is not predicted.
    fn seconds(&self) -> f64 {
        match &self.outcome {
            Outcome::Predicted(e) => e.seconds * self.launches as f64,
            Outcome::NotPredicted(_) => 0.0,
        }
    }
}

/// The kernels of all classes, or of one; from time to time it says how far it is.
pub fn of_classes(artifact: &Artifact, card: &'static Card, class: Option<usize>) -> BTreeMap<usize, Vec<KernelCost>> {
    let mut predictor = Predictor::new(card);
    let mut classes = BTreeMap::new();
    for k in (0..artifact.job.programs.len()).filter(|k| class.is_none_or(|c| c == *k)) {
        let mut said = Instant::now();
        let mut progress = |done: usize, of: usize| {
            if said.elapsed() > SILENT {
                note!("{done} of {of} kernels of class {k}\n");
                said = Instant::now();
            }
        };
        classes.insert(k, rows(artifact, k, &mut predictor, &mut progress));
    }
    classes
}

pub fn run(artifact: &Artifact, args: &DumpArgs) -> Result<(), Failure> {
    let card = card(artifact, args.card.as_deref())?;
    let classes = of_classes(artifact, card, args.class);
    if args.json {
        let all = serde_json::json!({ "card": card.name, "classes": classes });
        out!("{}\n", serde_json::to_string_pretty(&all).map_err(anyhow::Error::from)?)?;
        return Ok(());
    }
    classes.iter().try_for_each(|(class, rows)| out!("{}", table(card, *class, rows)))?;
    Ok(())
}

const HEAD: &str = "  share   ms/step launches   us each bound         alone  blocks  warps trips sectors  wide banks  what";

/// For people.
pub fn table(card: &Card, class: usize, rows: &[KernelCost]) -> String {
    let whole: f64 = rows.iter().map(KernelCost::seconds).sum();
    let ms = 1e3 * whole;
    let mut out = format!("predicted for {}, class {class}: {ms:.3} ms of kernels in a training step, one after the other\n{HEAD}\n", card.name);
    for row in rows {
        let KernelCost { name, places, launches, blocks, warps, .. } = row;
        match &row.outcome {
            Outcome::NotPredicted(why) => out += &format!("not predicted: {name}; {places}: {why}\n"),
            Outcome::Predicted(e) => {
                let number = |x: Option<f64>| x.map_or(String::new(), |x| format!("{x:.2}"));
                out += &format!(
                    "{:>5.1} % {:>9.3} {launches:>8} {:>9.2} {:<13} {:>5} {blocks:>7} {warps:>6} {:>5} {:>7} {:>5} {:>5}  {name}; {places}\n",
                    100.0 * row.seconds() / whole,
                    1e3 * row.seconds(),
                    1e6 * e.seconds,
                    e.bound,
                    percent(e.alone / e.seconds),
                    e.trips,
                    number(e.sectors),
                    e.wide.map_or(String::new(), percent),
                    number(e.banks),
                );
            }
        }
    }
    out
}

fn percent(part: f64) -> String {
    format!("{:.0} %", 100.0 * part)
}
