//! Faults of the compiler's own source ([`ir::faults`]), switched on one by one: each has to be refused, or to change nothing.
//!
//! A job is compiled with a fault on. If a verifier refuses, that is that. If another job than without the fault comes of it, two steps and an
//! evaluation of all ranks are compared with those of the right one, and so is what jobs say beside their programs, and what is reported of them. What changes a result and
//! was not refused got *through*: it has to stand in [`KNOWN`], with the reason.

mod jobs;
mod known;
mod told;

use crate::harness::{Outcomes, Ranges, Runner, models, options};
use crate::models::{GPT2, case};
use crate::random::number;
use ir::faults::{Fault, in_sources, watch};
use ir::program::Job;
use jobs::{FaultJob, jobs};
use known::KNOWN;
use passes::compile::{CompileError, Compiled, compile};
use runtime::host::Tensor;
use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};
use told::{ReportTexts, otherwise, told};

/// The pass, or what else makes such mistakes.
fn pass(fault: &Fault) -> &'static str {
    fault.name.split('.').next().unwrap_or_default()
}

/// Whether what runs a job has it too: then equal jobs may do otherwise.
fn is_of_runs(fault: &Fault) -> bool {
    ["ir/", "runtime/"].iter().any(|folder| fault.place.starts_with(folder))
}

/// Whether what is reported of a job has it.
fn is_told(fault: &Fault) -> bool {
    ["ir/", "passes/src/report/"].iter().any(|folder| fault.place.starts_with(folder))
}

/// The outcome of a fault in a job.
#[derive(Debug)]
enum FaultOutcome {
    /// The same job.
    Same,
    /// Another job that computes the same.
    Equal,
    /// The fault was refused by this invariant or error.
    Refused(String),
    Panicked,
    /// The fault got through, with this difference.
    Through(String),
}

/// A job without faults, and where compiling it comes by.
struct SoundJob {
    compiled: Compiled,
    runner: Runner,
    reached: BTreeSet<&'static str>,
    ran: OnceLock<(Outcomes, BTreeSet<&'static str>)>,
    told: OnceLock<(ReportTexts, BTreeSet<&'static str>)>,
}

impl SoundJob {
    fn new(asked: &FaultJob) -> SoundJob {
        let (compiled, reached) = watch(None, || asked.compile());
        let compiled = match compiled {
            Ok(Ok(compiled)) => compiled,
            Ok(Err(e)) => panic!("{asked}: {e:?}"),
            Err(e) => panic!("{asked}: {e}"),
        };
        let runner = Runner::new(&compiled, &asked.case, &Ranges::new());
        SoundJob { compiled, runner, reached, ran: OnceLock::new(), told: OnceLock::new() }
    }

    fn ran(&self, asked: &FaultJob) -> &(Outcomes, BTreeSet<&'static str>) {
        self.ran.get_or_init(|| {
            let (got, reached) = watch(None, || self.runner.outcomes(&self.compiled.job));
            (got.unwrap_or_else(|e| panic!("{asked}: {e}")), reached)
        })
    }

    fn told(&self) -> &(ReportTexts, BTreeSet<&'static str>) {
        self.told.get_or_init(|| watch(None, || told(&self.compiled)))
    }

    fn reaches(&self, asked: &FaultJob, fault: &Fault) -> bool {
        self.reached.contains(fault.name)
            || is_told(fault) && self.told().1.contains(fault.name)
            || is_of_runs(fault) && self.ran(asked).1.contains(fault.name)
    }
}

impl FaultJob {
    /// # Errors
    /// What is wrong with the text, rendered; in it, what is wrong with the job.
    fn compile(&self) -> Result<Result<Compiled, CompileError>, String> {
        let defines: Vec<(&str, &str)> = self.defines.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        let models = models(&self.text, &defines, &self.case)?;
        Ok(compile(models.training, models.evaluation, &options(&self.case)))
    }

    /// Compiles and, if something else comes of it, runs the job with a fault on.
    fn with(&self, fault: &Fault, right: &SoundJob) -> FaultOutcome {
        let compiled = match watch(Some(fault.name), || quietly(|| self.compile())).0 {
            Err(_) => return FaultOutcome::Panicked,
            Ok(Err(text)) => return FaultOutcome::Refused(code(&text).into()),
            Ok(Ok(Err(CompileError::User(errors)))) => return FaultOutcome::Refused(errors[0].code.clone()),
            Ok(Ok(Err(CompileError::Broken(broken)))) => {
                return broken.complaint.invariant().map_or(FaultOutcome::Panicked, |invariant| FaultOutcome::Refused(invariant.to_string()));
            }
            Ok(Ok(Ok(compiled))) => compiled,
        };
        let (got, want) = (&compiled.job, &right.compiled.job);
        if got == want && is_told(fault) {
            match watch(Some(fault.name), || quietly(|| told(&compiled))).0 {
                Err(_) => return FaultOutcome::Through("a report panics".into()),
                Ok(got) => {
                    if let Some(what) = otherwise(&got, &right.told().0) {
                        return FaultOutcome::Through(format!("reports {what} otherwise"));
                    }
                }
            }
        }
        if got == want && !is_of_runs(fault) {
            return FaultOutcome::Same;
        }
        if said(got) != said(want) {
            return FaultOutcome::Through("says otherwise what it is".into());
        }
        match watch(Some(fault.name), || quietly(|| right.runner.outcomes(got))).0 {
            Err(_) => FaultOutcome::Through("a rank panics".into()),
            Ok(Err(e)) => FaultOutcome::Through(format!("runs otherwise: {}", e.lines().next().unwrap_or_default())),
            Ok(Ok(got)) => differs(&got, &right.ran(self).0).map_or(FaultOutcome::Equal, FaultOutcome::Through),
        }
    }
}

/// The first code of rendered errors.
fn code(text: &str) -> &str {
    text.split_once('[').and_then(|(_, rest)| rest.split_once(']')).map_or("an error", |(code, _)| code)
}

/// Catches a panic without printing it.
fn quietly<T>(run: impl FnOnce() -> T) -> Result<T, Box<dyn Any + Send>> {
    catch_unwind(AssertUnwindSafe(run))
}

/// The parts of a job beside its programs and the tables that these read.
fn said(job: &Job) -> Job {
    Job { kernels: vec![], programs: vec![], stages: vec![], tables: vec![], in_flight: 1, ..job.clone() }
}

/// The first result that differs by more than the rounding of f64.
fn differs(got: &Outcomes, want: &Outcomes) -> Option<String> {
    let reports = |name: &str, got: &BTreeMap<String, f64>, want: &BTreeMap<String, f64>| {
        if got.keys().ne(want.keys()) {
            return Some(format!("other reports of {name}"));
        }
        want.iter().find(|(k, x)| far(&[got[*k]], &[**x])).map(|(k, x)| format!("{name} reports {k} = {} instead of {x}", got[k]))
    };
    let tensors = |name: &str, got: &Tensor, want: &Tensor| far(&got.data, &want.data).then(|| format!("{name} is another one"));
    reports("a step", &got.0, &want.0)
        .or_else(|| reports("an evaluation", &got.3, &want.3))
        .or_else(|| want.1.iter().find_map(|(name, t)| tensors(name, got.1.get(name)?, t)))
        .or_else(|| want.2.iter().find_map(|(key, t)| tensors(&format!("state {} of {}", key.1, key.0), got.2.get(key)?, t)))
        .or_else(|| (got.1.len() != want.1.len() || got.2.len() != want.2.len()).then(|| "other parameters or states".into()))
}

fn far(got: &[f64], want: &[f64]) -> bool {
    let bound = 1e-9 * want.iter().fold(1e-3f64, |most, x| most.max(x.abs()));
    got.len() != want.len() || got.iter().zip(want).any(|(g, w)| (g - w).abs() > bound || (g - w).is_nan())
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a workspace").into()
}

/// The faults above the code generator.
fn faults() -> Vec<Fault> {
    in_sources(&root(), &["frontend", "ir", "passes", "runtime"])
}

/// The outcome of a fault in all jobs that were tried.
#[derive(Default)]
struct FaultSummary {
    jobs: usize,
    /// How many of these became different jobs that compute the same.
    other: usize,
    refused: Option<String>,
    through: Option<String>,
}

impl FaultSummary {
    fn verdict(&self) -> String {
        match (&self.through, &self.refused) {
            (Some(what), _) => format!("THROUGH {what}"),
            (None, Some(by)) => format!("refused by {by}"),
            (None, None) if self.jobs == 0 => "NOT REACHED".into(),
            (None, None) if self.other == 0 => format!("changes none of {} jobs", self.jobs),
            (None, None) => format!("harmless: {} of {} jobs are other ones, and compute the same", self.other, self.jobs),
        }
    }
}

/// Tries a fault on jobs until one is refused, or gets through; on all of them if `everywhere`.
fn try_out(fault: &Fault, all: &[FaultJob], right: &[OnceLock<SoundJob>], everywhere: bool) -> FaultSummary {
    let (mut tried, begin) = (FaultSummary::default(), Instant::now());
    for (asked, right) in all.iter().zip(right) {
        let right = right.get_or_init(|| SoundJob::new(asked));
        if !right.reaches(asked, fault) {
            continue;
        }
        tried.jobs += 1;
        match asked.with(fault, right) {
            FaultOutcome::Same => {}
            FaultOutcome::Equal => tried.other += 1,
            FaultOutcome::Refused(by) => drop(tried.refused.get_or_insert(by)),
            FaultOutcome::Panicked => drop(tried.refused.get_or_insert("a panic".into())),
            FaultOutcome::Through(what) => drop(tried.through.get_or_insert(format!("({asked}: {what})"))),
        }
        let known = tried.refused.is_some() || tried.through.is_some();
        if known && !everywhere || begin.elapsed() > LIMIT {
            break;
        }
    }
    tried
}

/// For a fault, most of which time is for the jobs that are the first to need it.
const LIMIT: Duration = Duration::from_secs(60);

/// How many faults are tried by default.
const SAMPLE: u64 = 8;

/// A sample of faults, or `FAULTS` from number `FAULTS_FIRST` on, each on jobs until one shows what becomes of it; with `FAULTS_EVERYWHERE=1`
/// on all jobs. `FAULT=name` tries one alone.
#[test]
fn no_fault_of_a_pass_gets_through() {
    let list = faults();
    let names: BTreeSet<&str> = list.iter().map(|f| f.name).collect();
    assert_eq!(names.len(), list.len(), "two faults have one name");
    assert!(list.len() <= 440, "{} faults are more than `make test-long-faults` tries", list.len());
    for (name, _) in KNOWN {
        assert!(names.contains(name), "`{name}` is known to get through, and nowhere");
    }
    let (first, count) = (number("FAULTS_FIRST", 0) as usize, number("FAULTS", SAMPLE) as usize);
    let one = std::env::var("FAULT").ok();
    let chosen: Vec<&Fault> = match &one {
        Some(name) => list.iter().filter(|f| f.name.starts_with(name)).collect(),
        None => list.iter().skip(first).take(count).collect(),
    };
    let (all, everywhere) = (jobs(), number("FAULTS_EVERYWHERE", 0) > 0);
    let right: Vec<OnceLock<SoundJob>> = all.iter().map(|_| OnceLock::new()).collect();
    let (next, done) = (AtomicUsize::new(0), Mutex::new(BTreeMap::new()));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(2, |n| n.get()) {
            scope.spawn(|| {
                while let Some(fault) = chosen.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let begin = Instant::now();
                    let tried = try_out(fault, &all, &right, everywhere);
                    println!("{:<36} {:<44} {:>6.2} s  {}", fault.name, fault.place, begin.elapsed().as_secs_f64(), tried.verdict());
                    done.lock().expect("no poison").insert(fault.name, (pass(fault), tried));
                }
            });
        }
    });
    let done = done.into_inner().expect("no poison");
    table(&done);
    let of = |holds: &dyn Fn(&FaultSummary) -> bool| done.iter().filter(|(_, (_, t))| holds(t)).map(|(name, _)| *name).collect::<BTreeSet<&str>>();
    let known: BTreeSet<&str> = KNOWN.iter().map(|k| k.0).filter(|name| done.contains_key(name)).collect();
    let through = of(&|t| t.through.is_some());
    let new: Vec<&&str> = through.difference(&known).collect();
    let mended: Vec<&&str> = known.difference(&through).collect();
    let missed = of(&|t| t.jobs == 0);
    assert!(missed.is_empty(), "no job reaches {missed:?}");
    assert!(new.is_empty(), "{} faults get through: {new:?}", new.len());
    assert!(mended.is_empty(), "these get through no more, and faults/known.rs says so: {mended:?}");
}

/// What a gradient is made of is looked at below the sums over ranks and microbatches, and so are sums of terms in 16 bits.
#[test]
fn gradients_that_are_rounded_before_they_are_summed_are_refused() {
    let list = faults();
    for name in ["accumulate_f32.gradients.half", "differentiate.copies.half"] {
        let fault = list.iter().find(|f| f.name == name).expect("a fault");
        for words in ["bf16 m2", "bf16 dp2 tp2 sp m2"] {
            let asked = FaultJob::new("gpt2", GPT2, words);
            let came = asked.with(fault, &SoundJob::new(&asked));
            assert!(matches!(&came, FaultOutcome::Refused(by) if by == "V156"), "{name} in {words}: {came:?}");
        }
    }
}

/// By pass: faults, those that were refused and by what, that made jobs that compute the same or changed none, that got through.
fn table(done: &BTreeMap<&'static str, (&'static str, FaultSummary)>) {
    let mut passes: BTreeMap<&str, Vec<&FaultSummary>> = BTreeMap::new();
    done.values().for_each(|(pass, tried)| passes.entry(pass).or_default().push(tried));
    println!("| pass | faults | refused | harmless | no change | through | by |");
    println!("|---|---|---|---|---|---|---|");
    let line = |pass: &str, all: &[&FaultSummary]| {
        let count = |holds: &dyn Fn(&FaultSummary) -> bool| all.iter().filter(|t| holds(t)).count();
        let through = count(&|t| t.through.is_some());
        let refused = count(&|t| t.through.is_none() && t.refused.is_some());
        let mut by: BTreeMap<&str, usize> = BTreeMap::new();
        all.iter().filter(|t| t.through.is_none()).filter_map(|t| t.refused.as_deref()).for_each(|r| *by.entry(r).or_default() += 1);
        let by: Vec<String> = by.into_iter().map(|(r, n)| if n > 1 { format!("{r} ({n})") } else { r.to_string() }).collect();
        let harmless = count(&|t| t.through.is_none() && t.refused.is_none() && t.other > 0);
        let same = all.len() - through - refused - harmless;
        println!("| {pass} | {} | {refused} | {harmless} | {same} | {through} | {} |", all.len(), by.join(", "));
    };
    passes.iter().for_each(|(pass, all)| line(pass, all));
    let all: Vec<&FaultSummary> = done.values().map(|d| &d.1).collect();
    line("all", &all);
}

/// The feature is asked for by tests alone: nothing that a build makes has faults.
#[test]
fn builds_have_no_faults() {
    let features = |edges: &str| {
        let arguments = ["tree", "--locked", "--workspace", "--invert", "ir", "--depth", "0", "--format", "{f}", "--edges", edges];
        let out = Command::new(env!("CARGO")).args(arguments).output().expect("cargo runs");
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8(out.stdout).expect("UTF-8").lines().next().unwrap_or_default().to_string()
    };
    assert_eq!((features("normal,build").as_str(), features("normal,build,dev").as_str()), ("", "faults"));
}

/// A compile runs some verifiers once for several passes; after a refusal it names the first pass that is wrong.
#[test]
fn the_first_wrong_pass_is_named() {
    let case = case("dp2 m2");
    for (fault, wrong) in [("differentiate.tanh.order", "differentiate"), ("bucket.result.offset", "bucket"), ("lower.sum.stored", "lower")] {
        let found = models(GPT2.0, GPT2.1, &case).expect("a model");
        let (compiled, reached) = watch(Some(fault), || compile(found.training, found.evaluation, &options(&case)));
        assert!(reached.contains(fault), "{fault}");
        let Err(CompileError::Broken(bug)) = compiled else { panic!("{fault} was not refused") };
        assert_eq!(bug.pass, wrong, "{fault}: {bug}");
    }
}
