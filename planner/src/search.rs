//! The search: bounds and samples say which plans to compile whole, and the best of these are changed a little
//! further.

use crate::bound::{Arithmetic, least};
use crate::checkpoint::checkpoint;
use crate::estimate::{Estimate, ReachCache, estimate};
use crate::sample::{self, Key, Layers, Sample, key};
use crate::space::{Choice, Space, chunks};
use ir::diag::Source;
use ir::model::Model;
use ir::op::DType;
use ir::options::{ActivationOffload, Counts, CpComm, Cuts, Offload, Options, Overlap, ParamOffload, Recompute, TpOverlap, Zero};
use ir::pipeline::Schedule;
use ir::program::{Job, Stage};
use ir::progress::Progress;
use passes::compile::{Compile, unverified};
use passes::remedy::side_by_side;
use simulate::goodput::Checkpoint;
use simulate::machine::Machine;
use simulate::step::{Step, predict};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

/// A model to train and to evaluate, and the options as a compile wants them.
pub type Models = (Model, Model, Options);

/// Where samples are kept from one search to the next.
pub trait SampleCache: Sync {
    /// The kept sample of these options, of a model of so many layers (`None`: of all its layers).
    fn get(&self, sample: &Options, layers: Option<u32>) -> Option<Sample>;
    /// Keeps a sample for later calls of [`SampleCache::get`] with these options and layers.
    fn put(&self, sample: &Options, layers: Option<u32>, found: &Sample);
}

/// What a search is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SearchPhase {
    /// Samples of few layers are compiled.
    Samples,
    /// Plans that are expected to be the best are compiled whole.
    Plans,
    /// Plans that differ a little from the best are compiled whole.
    Changes,
    /// The best plans are compiled in the form in which they run.
    Settled,
}

/// What is searched, and with what.
pub struct Search<'a> {
    /// The plans to choose from.
    pub space: Space,
    /// The machine on which steps are predicted.
    pub machine: &'a Machine,
    /// Of a rank, on CPUs.
    pub threads: u64,
    /// The model's working precision, which sets the peak rate that bounds assume.
    pub precision: DType,
    /// Bytes of a device.
    pub budget: u64,
    /// The models of a plan, with fewer layers where that is asked for; none where the text refuses.
    pub models: &'a (dyn Fn(&Options, Option<u32>) -> Option<Models> + Sync),
    /// The texts that they are from, by which a plan's step names lines.
    pub sources: &'a [Source],
    /// Bytes that a rank takes of its device, of the fullest stage.
    pub bytes: &'a (dyn Fn(&Job) -> u64 + Sync),
    /// Where samples are looked up, and put once they are made.
    pub kept: &'a dyn SampleCache,
    /// Is told how much of something is done.
    pub progress: &'a (dyn Fn(SearchPhase, usize, usize) + Sync),
    /// How many samples, compiles and changes there may be.
    pub effort: Effort,
}

/// How much is tried.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Effort {
    /// Meshes (tensor, context and expert parallelism) of which all samples are made.
    pub meshes: usize,
    /// Plans that are compiled whole at most.
    pub plans: usize,
    /// A plan is compiled if it is expected to take at most so much longer than the best so far, as a part of it.
    pub slack: f64,
    /// Rounds of changes to the best.
    pub changes: usize,
    /// Commands of a step, of all stages, after which no more plans are compiled: those of large jobs take long.
    pub commands: u64,
    /// Plans that are wanted, in the form in which they run ([`short`](crate::space::ModelFacts::short)).
    pub top: usize,
    /// When the search begins nothing more, once it has a plan; `None`: it is not timed, and finds the same each time.
    pub until: Option<Instant>,
}

impl Default for Effort {
    fn default() -> Effort {
        Effort { meshes: 16, plans: 16, slack: 0.1, changes: 2, commands: 20_000_000, top: 5, until: None }
    }
}

/// A plan with the step that its programs take.
#[derive(Clone, Debug)]
pub struct Planned {
    /// The options that were planned, not those of their shorter form.
    pub options: Options,
    /// The step that is predicted of its compiled programs.
    pub step: Step,
    /// Of a rank's device.
    pub bytes: u64,
    /// What was expected; none of a change to another plan.
    pub estimate: Option<Estimate>,
    /// That all stages issue in the passes of a step.
    pub commands: u64,
    /// Bytes that its ranks save, and read when they go on.
    pub checkpoint: Checkpoint,
}

/// What came of a search.
#[derive(Clone, Debug, Default)]
pub struct SearchResult {
    /// Those that fit, the fastest first.
    pub plans: Vec<Planned>,
    /// Of those that do not fit, the one that takes least.
    pub smallest: Option<Planned>,
    /// Plans of the space, before any is left out.
    pub considered: usize,
    /// Of them, those of meshes that looked worse than others, of which no more was asked, or that time was too
    /// short for.
    pub unsampled: usize,
    /// Whether time was too short for something ([`Effort::until`]).
    pub stopped: bool,
    /// Those that the model forbids, as far as a compile, of them or of their samples, has said so.
    pub refused: usize,
    /// Those that are expected to need more memory than there is.
    pub too_large: usize,
    /// Samples that were made or looked up, refused ones included.
    pub samples: usize,
    /// Plans that were compiled whole and predicted, changes included.
    pub compiled: usize,
    /// Commands of these.
    pub commands: u64,
    /// Plans that no compile was tried of, of which the bound does not say that they are slower than the best.
    pub open: usize,
    /// The least that any of these is expected to take.
    pub next: Option<f64>,
    /// Seconds and bytes of compiled plans relative to what was expected, by family.
    ratios: BTreeMap<Family, Vec<[f64; 2]>>,
}

impl SearchResult {
    /// The median ratio between what compiled plans of this family take and what was expected: seconds and bytes.
    fn ratio(&self, plan: &Options) -> [f64; 2] {
        let known = self.ratios.get(&family(plan));
        [0, 1].map(|k| {
            let mut all: Vec<f64> = known.into_iter().flatten().map(|r| r[k]).collect();
            all.sort_by(f64::total_cmp);
            all.get(all.len() / 2).map_or(1.0, |r| r.max(1.0))
        })
    }
}

/// The properties of plans whose estimates are wrong alike: order of passes, whether a stage has several virtual
/// ones, and ZeRO.
type Family = (usize, bool, Zero);

fn family(plan: &Options) -> Family {
    let order = match plan.schedule {
        Schedule::GPipe => 0,
        Schedule::OneFOneB => 1,
        Schedule::ZbH1 => 2,
        Schedule::ZbV => 3,
        Schedule::DualPipeV => 4,
        Schedule::Given(_) => 5,
    };
    (order, chunks(plan) > 1, plan.zero)
}

/// The number of plans that a thread estimates at a time.
const CHUNK: usize = 4096;

/// A plan whose expected memory exceeds the budget by more than this factor is expected not to fit.
const FITS: f64 = 1.1;

/// The number of plans that are compiled before the next ones are chosen. It does not depend on the number of cores,
/// so that a search finds the same on any machine.
const WAVE: usize = 4;
/// The most rounds of compiles, whatever is refused.
const MOST_WAVES: usize = 64;
/// The number of first rounds in which the plans are of different kinds.
const VARIED: usize = 2;

/// The number of best plans that are changed further, and that are at least compiled as they run.
const BEST: usize = 3;

/// A plan with what is known of it before it is compiled.
#[derive(Clone, Debug)]
struct Candidate {
    options: Options,
    least: f64,
    estimate: Estimate,
}

impl Search<'_> {
    /// The best plans. If none fits the memory, optimizer, activations and parameters go to the host, one after the
    /// other.
    pub fn run(&self) -> SearchResult {
        let base = &self.space.base;
        let optimizer = Options { offload: Offload::Optimizer, ..base.clone() };
        let activations = Options { activation_offload: ActivationOffload::Layers(None), ..optimizer.clone() };
        let params = Options { param_offload: ParamOffload::Host, ..activations.clone() };
        let mut found = self.with(base);
        for way in [optimizer, activations, params] {
            let is_for_memory = found.smallest.is_some() || found.too_large > 0;
            if !found.plans.is_empty() || !is_for_memory || self.machine.is_cpu() || self.space.fixed.contains(&Choice::Offload) {
                break;
            }
            let more = self.with(&way);
            found = SearchResult {
                smallest: [found.smallest, more.smallest.clone()].into_iter().flatten().min_by_key(|p| p.bytes),
                considered: found.considered + more.considered,
                unsampled: found.unsampled + more.unsampled,
                stopped: found.stopped || more.stopped,
                refused: found.refused + more.refused,
                too_large: found.too_large + more.too_large,
                samples: found.samples + more.samples,
                compiled: found.compiled + more.compiled,
                commands: found.commands + more.commands,
                ..more
            };
        }
        found
    }

    /// All plans, each with its estimate and with a lower bound of its step.
    pub fn estimates(&self) -> Vec<(Options, Estimate, f64)> {
        let plans = self.space.plans();
        let Some(mut samples) = Samples::new(self, &plans) else { return vec![] };
        samples.make(&plans);
        self.candidates(plans, &samples).into_iter().map(|c| (c.options, c.estimate, c.least)).collect()
    }

    fn candidates(&self, plans: Vec<Options>, samples: &Samples<'_>) -> Vec<Candidate> {
        let (facts, arithmetic) = (&self.space.model, self.arithmetic(&plans));
        let candidates = side_by_side(plans.chunks(CHUNK).collect(), &|chunk: &[Options]| {
            let mut reaches = ReachCache::new();
            let candidate = |options: &Options| {
                let estimate = samples.estimate(options, &mut reaches)?;
                let least = least(options, facts, &arithmetic, self.machine, self.precision, self.threads);
                Some(Candidate { options: options.clone(), least, estimate })
            };
            Some(chunk.iter().filter_map(candidate).collect::<Vec<_>>())
        });
        candidates.concat()
    }

    fn with(&self, base: &Options) -> SearchResult {
        let space = Space { base: base.clone(), ..self.space.clone() };
        let mut plans = space.plans();
        let mut found = SearchResult { considered: plans.len(), ..SearchResult::default() };
        let Some(mut samples) = Samples::new(self, &plans) else { return found };
        let meshes = self.meshes(&plans, &mut samples);
        plans.retain(|p| meshes.contains(&mesh(p)));
        samples.make(&plans);
        plans.retain(|p| samples.made.contains_key(&key(p)));
        found.unsampled = found.considered - plans.len();
        found.stopped = samples.stopped;
        found.samples = samples.made.len();
        let asked = plans.len();
        let all = self.candidates(plans, &samples);
        found.refused = asked - all.len();
        found.too_large = all.iter().filter(|c| self.is_too_large(c)).count();
        self.compile(&all, &mut found);
        self.change(&mut found);
        self.settle(&mut found);
        found
    }

    /// Compiles the best plans as they run, if they were compiled in a shorter form, until as many fit as are wanted.
    fn settle(&self, found: &mut SearchResult) {
        let (mut settled, mut rest) = (vec![], std::mem::take(&mut found.plans));
        // As they run, the plans may rank differently, so several are compiled.
        let wanted = if self.is_over() { 1 } else { self.effort.top.max(BEST) };
        found.stopped |= wanted < rest.len().min(self.effort.top);
        while settled.len() < wanted && !rest.is_empty() {
            let next: Vec<Planned> = rest.drain(..rest.len().min(wanted - settled.len())).collect();
            let (mut short, own): (Vec<_>, Vec<_>) = next.into_iter().partition(|p| self.space.model.short(&p.options).is_some());
            settled.extend(own);
            // Plans that take longest to compile go first, so that none is left to one core at the end.
            short.sort_by_key(|p| std::cmp::Reverse(p.commands));
            (self.progress)(SearchPhase::Settled, 0, short.len());
            let whole = side_by_side(short, &|p: Planned| self.whole(&p.options, &p.options).map(|whole| Planned { estimate: p.estimate, ..whole }));
            let (fit, not): (Vec<_>, Vec<_>) = whole.into_iter().partition(|p| p.bytes <= self.budget);
            settled.extend(fit);
            found.smallest = found.smallest.take().into_iter().chain(not).min_by_key(|p| p.bytes);
        }
        settled.sort_by(|a, b| a.step.seconds.total_cmp(&b.step.seconds));
        found.plans = settled;
    }

    fn is_over(&self) -> bool {
        self.effort.until.is_some_and(|until| Instant::now() >= until)
    }

    fn is_too_large(&self, candidate: &Candidate) -> bool {
        candidate.estimate.bytes > FITS * self.budget as f64
    }

    /// The meshes of which all samples are made: those whose best plans with the smallest microbatches are expected
    /// to be the best that fit, if need be with layers recomputed. Meshes that split the sequence further are tried
    /// where they are variants of the best that split it less.
    fn meshes(&self, plans: &[Options], samples: &mut Samples<'_>) -> BTreeSet<Mesh> {
        let mut simplest: BTreeMap<Mesh, Vec<&Options>> = BTreeMap::new();
        let rank = |p: &Options| (p.micro_batch, p.recompute);
        for plan in plans {
            let of_mesh = simplest.entry(mesh(plan)).or_default();
            match of_mesh.first().map(|first| rank(plan).cmp(&rank(first))) {
                Some(std::cmp::Ordering::Greater) => {}
                Some(std::cmp::Ordering::Less) => *of_mesh = vec![plan],
                Some(std::cmp::Ordering::Equal) | None => of_mesh.push(plan),
            }
        }
        if simplest.len() <= self.effort.meshes {
            return simplest.into_keys().collect();
        }
        let mut ranked: Vec<(bool, f64, Mesh)> = vec![];
        let splits: BTreeSet<u64> = simplest.keys().map(|m| m.1).collect();
        for cp in splits {
            let is_of_best = |m: &Mesh| ranked.is_empty() || ranked.iter().take(self.effort.meshes).any(|r| (r.2.0, r.2.2, r.2.3) == (m.0, m.2, m.3));
            let new: Vec<&Mesh> = simplest.keys().filter(|m| m.1 == cp && is_of_best(m)).collect();
            samples.make(new.iter().flat_map(|m| simplest[*m].iter().copied()));
            let mut reaches = ReachCache::new();
            let mut best = |m: &Mesh| {
                let each = simplest[m].iter().filter_map(|p| samples.estimate(p, &mut reaches));
                let each = each.map(|e| (e.floor > self.budget as f64, e.seconds));
                each.min_by(|a, b| a.partial_cmp(b).unwrap_or(std::cmp::Ordering::Equal))
            };
            let more: Vec<_> = new.into_iter().filter_map(|m| best(m).map(|(is_large, seconds)| (is_large, seconds, *m))).collect();
            ranked.extend(more);
            ranked.sort_by(|a, b| a.partial_cmp(b).unwrap_or(std::cmp::Ordering::Equal));
        }
        ranked.into_iter().take(self.effort.meshes).map(|r| r.2).collect()
    }

    /// The arithmetic of the whole model, differentiated.
    fn arithmetic(&self, plans: &[Options]) -> Arithmetic {
        let of = |plan: &Options| {
            let (training, evaluation, options) = (self.models)(&sample::options(plan), None)?;
            let progress = Progress::default();
            let mut compile = Compile::new(training, evaluation, &options, &progress).ok()?;
            while compile.step().ok()??.name != "simplify" {}
            Some(Arithmetic::of(compile.module().training.whole.graph()))
        };
        plans.iter().find_map(of).unwrap_or_default()
    }

    /// Compiles the plans that are expected to be the best, as long as they may be. What they take corrects the
    /// estimates of their family. The first ones each have a mesh, stages and an order of passes of their own.
    fn compile(&self, all: &[Candidate], found: &mut SearchResult) {
        let mut rest: Vec<&Candidate> = all.iter().collect();
        for wave in 0usize.. {
            let best = found.plans.first().map_or(f64::INFINITY, |p| p.step.seconds);
            let expected = |c: &Candidate| {
                let [seconds, bytes] = found.ratio(&c.options);
                let bytes = c.estimate.bytes * bytes;
                // Plans that are expected not to fit come last, those that need the least memory first.
                if bytes > FITS * self.budget as f64 { (1, bytes) } else { (0, c.estimate.seconds * seconds) }
            };
            rest.retain(|c| c.least < best);
            let mut open: Vec<((i32, f64), &Candidate)> = rest.iter().map(|c| (expected(c), *c)).collect();
            let is_open = |e: &(i32, f64)| found.plans.is_empty() || (e.0 == 0 && e.1 < best * (1.0 + self.effort.slack));
            open.retain(|(e, _)| is_open(e));
            open.sort_by(|a, b| a.0.partial_cmp(&b.0).unwrap_or(std::cmp::Ordering::Equal));
            let mut seen = BTreeSet::new();
            let mut is_new = |c: &Candidate| wave >= VARIED || seen.insert((mesh(&c.options), c.options.pp, family(&c.options).0));
            let left = self.left(found).min(self.effort.plans.saturating_sub(found.compiled)).min(WAVE);
            let new: Vec<&Candidate> = open.into_iter().map(|(_, c)| c).filter(|c| is_new(c)).take(left).collect();
            if new.is_empty() || wave > MOST_WAVES {
                break;
            }
            if wave > 0 && self.is_over() {
                found.stopped = true;
                break;
            }
            rest.retain(|c| !new.iter().any(|n| std::ptr::eq(*n, *c)));
            self.take(new.into_iter().map(|c| (c.options.clone(), Some(c.estimate))).collect(), SearchPhase::Plans, found);
        }
        let best = found.plans.first().map_or(f64::INFINITY, |p| p.step.seconds);
        let open = rest.into_iter().filter(|c| c.least < best && !self.is_too_large(c));
        found.next = open.clone().map(|c| c.estimate.seconds * found.ratio(&c.options)[0]).min_by(f64::total_cmp);
        found.open = open.count();
    }

    /// The number of plans that may still be compiled, given their commands. Some always may as long as none fits.
    fn left(&self, found: &SearchResult) -> usize {
        let each = found.commands / (found.compiled as u64).max(1);
        let left = self.effort.commands.saturating_sub(found.commands).checked_div(each).unwrap_or(u64::MAX);
        usize::try_from(left).unwrap_or(usize::MAX).max(if found.plans.is_empty() { WAVE } else { 0 })
    }

    /// Compiles plans whole, side by side, and puts them in order.
    fn take(&self, plans: Vec<(Options, Option<Estimate>)>, phase: SearchPhase, found: &mut SearchResult) {
        let (done, most) = (AtomicUsize::new(0), plans.len());
        (self.progress)(phase, 0, most);
        let tried: Vec<Planned> = side_by_side(plans, &|(options, estimate)| {
            let planned = self.plan(&options);
            (self.progress)(phase, 1 + done.fetch_add(1, Ordering::Relaxed), most);
            planned.map(|p| Planned { estimate, ..p })
        });
        for (plan, expected) in tried.iter().filter_map(|p| Some((p, p.estimate?))) {
            let ratios = [plan.step.seconds / expected.seconds, plan.bytes as f64 / expected.bytes];
            found.ratios.entry(family(&plan.options)).or_default().push(ratios);
        }
        found.compiled += tried.len();
        found.refused += most - tried.len();
        found.commands += tried.iter().map(|p| p.commands).sum::<u64>();
        let (fit, not): (Vec<_>, Vec<_>) = tried.into_iter().partition(|p| p.bytes <= self.budget);
        found.smallest = found.smallest.take().into_iter().chain(not).min_by_key(|p| p.bytes);
        found.plans.extend(fit);
        found.plans.sort_by(|a, b| a.step.seconds.total_cmp(&b.step.seconds));
        // Plans with equal time and memory are taken for the same plan under other flags. The first one stays.
        found.plans.dedup_by(|b, a| (a.step.seconds, a.bytes) == (b.step.seconds, b.bytes));
    }

    /// A plan whole, in its shorter form if it has one; none if it is refused.
    pub fn plan(&self, options: &Options) -> Option<Planned> {
        self.whole(options, &self.space.model.short(options).unwrap_or_else(|| options.clone()))
    }

    /// The programs of a plan as they run; none if it is refused.
    pub fn job(&self, options: &Options) -> Option<Job> {
        let (training, evaluation, own) = (self.models)(options, None)?;
        let job = unverified(training, evaluation, &own).ok()?.job;
        Some(Job { sources: self.sources.to_vec(), ..job })
    }

    /// A plan as it is compiled with these options.
    fn whole(&self, options: &Options, compiled: &Options) -> Option<Planned> {
        let job = self.job(compiled)?;
        let plays = simulate::Options { threads: self.threads, slow: None };
        let step = predict(&job, self.machine, plays).ok()?;
        let (bytes, commands, checkpoint) = ((self.bytes)(&job), commands(&job), checkpoint(&job));
        Some(Planned { options: options.clone(), step, bytes, estimate: None, commands, checkpoint })
    }

    /// Tries what is no part of the space on the best plans, on the best one of each mesh and number of stages, one
    /// change at a time, and then on the results.
    fn change(&self, found: &mut SearchResult) {
        let mut changed: Vec<Options> = vec![];
        for _ in 0..self.effort.changes {
            let mut seen = BTreeSet::new();
            let best = found.plans.iter().filter(|p| seen.insert((mesh(&p.options), p.options.pp))).take(BEST).map(|p| &p.options);
            let best: Vec<Options> = best.filter(|o| !changed.contains(o)).cloned().collect();
            let mut new: Vec<(Options, Option<Estimate>)> = vec![];
            for options in best.iter().flat_map(|o| self.changes(o)) {
                if new.iter().all(|n| n.0 != options) && found.plans.iter().all(|p| p.options != options) {
                    new.push((options, None));
                }
            }
            // Changes to the best plans come first, so they are the ones that stay.
            new.truncate(self.left(found).max(if changed.is_empty() { WAVE } else { 0 }));
            if new.is_empty() {
                return;
            }
            if self.is_over() {
                found.stopped = true;
                return;
            }
            changed.extend(best);
            self.take(new, SearchPhase::Changes, found);
        }
    }

    fn changes(&self, best: &Options) -> Vec<Options> {
        let (mut out, o) = (vec![], best);
        let is_free = |choice: Choice| !self.space.fixed.contains(&choice);
        if o.tp > 1 && o.tp_overlap == TpOverlap::Off && is_free(Choice::TpOverlap) {
            out.push(Options { tp_overlap: TpOverlap::Pipeline { chunks: 4 }, ..o.clone() });
        }
        if o.pp > 1 && (o.ep > 1 || o.tp > 1) && !o.pass_pairs && o.overlap == Overlap::On {
            out.push(Options { pass_pairs: true, ..o.clone() });
        }
        let even = Cuts::Even { embedding: Counts::AsNothing, loss: Counts::AsNothing };
        if o.pp > 1 && o.layout == even && is_free(Choice::Layout) {
            out.push(Options { layout: Cuts::Balanced, ..o.clone() });
        }
        if o.cp > 1 && is_free(Choice::CpComm) {
            out.extend(CpComm::ALL.into_iter().filter(|c| *c != o.cp_comm).map(|cp_comm| Options { cp_comm, ..o.clone() }));
        }
        let machines = o.dp / self.space.devices.max(1);
        if o.zero > Zero::None && o.replicas == 1 && is_free(Choice::Replicas) && machines > 1 && o.dp.is_multiple_of(machines) {
            out.push(Options { replicas: machines, ..o.clone() });
        }
        if is_free(Choice::Recompute) {
            let layers = self.space.model.layers / o.pp as u32;
            // If all layers are recomputed, fewer of them are tried.
            if o.recompute == Recompute::Uniform(1) {
                out.extend([layers / 2, layers / 4].into_iter().filter(|n| *n > 0).map(|n| Options { recompute: Recompute::Block(n), ..o.clone() }));
            }
        }
        out
    }
}

fn commands(job: &Job) -> u64 {
    let of_stage = |stage: &Stage| {
        let bodies = &job.programs[stage.program as usize].bodies;
        stage.schedule.train.iter().filter(|c| c.part == 0).map(|c| bodies[c.body.index()].commands.len() as u64).sum::<u64>()
    };
    job.stages.iter().map(of_stage).sum()
}

/// The part of a plan that decides most about how its layers run: tp, cp, ep and etp.
type Mesh = (u64, u64, u64, Option<u64>);

fn mesh(plan: &Options) -> Mesh {
    (plan.tp, plan.cp, plan.ep, plan.etp)
}

/// Samples of a space.
struct Samples<'a> {
    search: &'a Search<'a>,
    layers: Layers,
    /// Names of dims along which experts are split.
    experts: Vec<String>,
    /// The samples by key. `None` where a plan is refused.
    made: BTreeMap<Key, Option<Sample>>,
    /// Whether time was too short for some.
    stopped: bool,
}

impl<'a> Samples<'a> {
    /// Prepares samples, or returns `None` if the text refuses all plans.
    fn new(search: &'a Search<'a>, plans: &[Options]) -> Option<Samples<'a>> {
        let first = |plan: &Options| {
            let options = sample::options(plan);
            (search.models)(&options, None).map(|m| (m.0, options))
        };
        let (whole, options) = plans.iter().find_map(first)?;
        let with = |n: u32| (search.models)(&options, Some(n)).map(|m| m.0);
        let experts = whole.plan.get("ep").map_or(vec![], |e| e.tiers.concat());
        Some(Samples { search, layers: Layers::of(&whole, &with), experts, made: BTreeMap::new(), stopped: false })
    }

    /// Makes the samples of plans that do not exist yet. When the time is over, those that were not begun are left
    /// out, unless none is usable.
    fn make<'p>(&mut self, plans: impl IntoIterator<Item = &'p Options>) {
        let mut new: BTreeMap<Key, Options> = BTreeMap::new();
        for plan in plans {
            let key = key(plan);
            if !self.made.contains_key(&key) {
                new.entry(key).or_insert_with(|| sample::options(plan));
            }
        }
        let (done, most) = (AtomicUsize::new(0), new.len());
        let is_usable = AtomicBool::new(self.made.values().any(Option::is_some));
        let made = side_by_side(new.into_iter().collect(), &|(key, options): (Key, Options)| {
            if self.search.is_over() && is_usable.load(Ordering::Relaxed) {
                return None;
            }
            let sample = self.sample(&options);
            is_usable.fetch_or(sample.is_some(), Ordering::Relaxed);
            (self.search.progress)(SearchPhase::Samples, 1 + done.fetch_add(1, Ordering::Relaxed), most);
            Some((key, sample))
        });
        self.stopped |= made.len() < most;
        self.made.extend(made);
    }

    fn sample(&self, options: &Options) -> Option<Sample> {
        let (search, few) = (self.search, self.layers.few);
        if let Some(sample) = search.kept.get(options, few) {
            return Some(sample);
        }
        let short = search.space.model.short(options);
        let (training, evaluation, own) = (search.models)(short.as_ref().unwrap_or(options), few)?;
        let graph = training.graph.clone();
        let job = unverified(training, evaluation, &own).ok()?.job;
        let sample = Sample::of(&job, &graph, &self.layers.sample, search.machine, search.threads, &self.experts).ok()?;
        search.kept.put(options, few, &sample);
        Some(sample)
    }

    fn estimate(&self, plan: &Options, reaches: &mut ReachCache) -> Option<Estimate> {
        let sample = self.made.get(&key(plan))?.as_ref()?;
        estimate(plan, &self.search.space.model, &self.layers.whole, sample, self.search.machine, reaches)
    }
}
