//! Faults of the code generator's own source ([`ir::faults`]), switched on one by one: the check of a compile has
//! to refuse what comes of each.
//!
//! A process of its own compiles kernels with a fault on, since wrong code may crash. Code for CPUs is held to its
//! body as a compile holds it (V950), code for GPUs runs in the emulator, as in `mcc gpu-check`. Code that is
//! another one and was not refused is held to the right code, on other operands and everywhere: if its results
//! differ in some kernel, and none was refused, the fault got *through*, and has to stand in [`KNOWN`], with the
//! reason.

mod judge;
mod kernels;
mod known;

use super::{Checker, Verification};
use crate::object::{self, Compiled, Emit};
use crate::target::Arch;
use ir::faults::{Fault, in_sources, watch};
use kernels::{FaultCase, cases};
use known::KNOWN;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

/// The faults of this crate.
fn faults() -> Vec<Fault> {
    in_sources(Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a workspace"), &["codegen"])
}

/// What came of a fault in a kernel.
#[derive(Clone, Debug, PartialEq)]
enum FaultOutcome {
    /// The same code.
    Same,
    /// Other code with the same results.
    Equal,
    /// The code was refused, by this.
    Refused(String),
    /// The results differ, as the text says.
    Through(String),
}

/// The right code of a case: the faults that compiling it reaches, and the code's hash.
struct ReferenceCode {
    reached: BTreeSet<&'static str>,
    hash: String,
}

fn compiled(case: &FaultCase) -> Result<Compiled, String> {
    object::compile(&case.kernel, &case.target(), Emit::default()).map_err(|e| e.to_string())
}

fn hash(compiled: &Compiled) -> String {
    blake3::hash(&compiled.encode()).to_hex().to_string()
}

impl ReferenceCode {
    fn new(case: &FaultCase) -> ReferenceCode {
        let (compiled, reached) = watch(None, || compiled(case));
        let compiled = compiled.unwrap_or_else(|e| panic!("{}: {e}", case.name));
        let refused = refused(case, &compiled);
        assert_eq!(refused, Ok(None), "{}", case.name);
        ReferenceCode { reached, hash: hash(&compiled) }
    }
}

/// What refuses code, if anything does.
///
/// # Errors
/// It is not checked.
fn refused(case: &FaultCase, compiled: &Compiled) -> Result<Option<String>, String> {
    match case.target().arch {
        Arch::Nvptx => Ok(judge::emulated(case, compiled)),
        Arch::X86_64 => match Checker::default().check(&case.kernel, compiled, &case.target()) {
            Ok(Verification::Passed { .. }) => Ok(None),
            Ok(other) => Err(format!("{other:?}")),
            Err(_) => Ok(Some("V950".into())),
        },
    }
}

/// What a child says of a case before it runs what may crash.
const PASSED: &str = "passed";

/// Tries a case with a fault switched on, in a child process.
fn with(case: &FaultCase, fault: &'static str, right: &str, say: &dyn Fn(&str)) -> FaultOutcome {
    let (compiled, _) = watch(Some(fault), || compiled(case));
    let compiled = match compiled {
        Ok(compiled) => compiled,
        Err(_) => return FaultOutcome::Refused("the compiler".into()),
    };
    if hash(&compiled) == right {
        return FaultOutcome::Same;
    }
    match refused(case, &compiled) {
        Ok(None) => {}
        Ok(Some(by)) => return FaultOutcome::Refused(by),
        Err(why) => return FaultOutcome::Through(why),
    }
    say(PASSED);
    judge::differs(case, fault).map_or(FaultOutcome::Equal, FaultOutcome::Through)
}

/// What a parent asks its child for: a fault, and numbers of cases with the hash of their right code. `-` on all of
/// them.
const ASKED: &str = "CODEGEN_FAULT";
/// What a child's lines begin with, that the test harness has not written.
const SAYS: &str = "a fault: ";

/// The child process of the test below, which passes it a fault by environment; on its own it does nothing.
#[test]
fn a_child_tries_a_fault() {
    let Ok(asked) = std::env::var(ASKED) else { return };
    let mut words = asked.split(' ').map(|w| w.to_string().leak() as &'static str);
    let (fault, everywhere) = (words.next().expect("a fault"), words.next() == Some("everywhere"));
    let cases = cases();
    for word in words {
        let (number, right) = word.split_once(':').expect("a case");
        let say = |word: &str| println!("\n{SAYS}{number} {word}");
        say("begins");
        let (words, conclusive) = match with(&cases[number.parse::<usize>().expect("a number")], fault, right, &say) {
            FaultOutcome::Same => ("same".into(), false),
            FaultOutcome::Equal => ("equal".into(), false),
            FaultOutcome::Refused(by) => (format!("refused {by}"), true),
            FaultOutcome::Through(what) => (format!("through {what}"), false),
        };
        say(&words);
        if conclusive && !everywhere {
            return;
        }
    }
}

/// Time limit for the code of a case; code that does not end is wrong.
const LIMIT: Duration = Duration::from_secs(60);

/// Asks a child for a fault on these cases, and gives what came of each.
fn ask(fault: &Fault, of: &[(usize, String)], everywhere: bool) -> Vec<(usize, FaultOutcome)> {
    let cases: Vec<String> = of.iter().map(|(number, hash)| format!(" {number}:{hash}")).collect();
    let asked = format!("{} {}{}", fault.name, if everywhere { "everywhere" } else { "first" }, cases.concat());
    let program = std::env::current_exe().expect("a test binary");
    let arguments = ["--exact", "check::faults::a_child_tries_a_fault", "--nocapture", "--test-threads=1"];
    let mut child: Child =
        Command::new(program).args(arguments).env(ASKED, asked).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("a child");
    let out = BufReader::new(child.stdout.take().expect("it is piped"));
    let (to, from) = channel();
    std::thread::spawn(move || out.lines().map_while(Result::ok).try_for_each(|line| to.send(line)));
    let (mut outcomes, mut last) = (vec![], None);
    loop {
        let line = match from.recv_timeout(LIMIT) {
            Ok(line) => line,
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {
                last = last.map(|(number, _)| (number, FaultOutcome::Through("it does not end".into())));
                child.kill().expect("it runs");
                break;
            }
        };
        let Some((number, words)) = line.strip_prefix(SAYS).and_then(|rest| rest.split_once(' ')) else { continue };
        let number: usize = number.parse().expect("a number");
        let (word, rest) = words.split_once(' ').unwrap_or((words, ""));
        last = None;
        match word {
            "begins" => last = Some((number, FaultOutcome::Refused("a crash".into()))),
            PASSED => last = Some((number, FaultOutcome::Through("a crash on other operands".into()))),
            "same" => outcomes.push((number, FaultOutcome::Same)),
            "equal" => outcomes.push((number, FaultOutcome::Equal)),
            "refused" => outcomes.push((number, FaultOutcome::Refused(rest.into()))),
            _ => outcomes.push((number, FaultOutcome::Through(rest.into()))),
        }
    }
    child.wait().expect("it ran");
    outcomes.extend(last);
    outcomes
}

/// What came of a fault in all cases that were tried.
#[derive(Default)]
struct FaultTally {
    cases: usize,
    /// How many of these have other code with the same results.
    other: usize,
    refused: Option<String>,
    /// How many have other results and were not refused; then, what the first of these is.
    wrong: usize,
    through: Option<String>,
}

impl FaultTally {
    fn verdict(&self) -> String {
        match (&self.through, &self.refused) {
            (Some(_), Some(by)) => format!("refused by {by}; not in {} other kernels", self.wrong),
            (Some(what), None) => format!("THROUGH {what}"),
            (None, Some(by)) => format!("refused by {by}"),
            (None, None) if self.cases == 0 => "NOT REACHED".into(),
            (None, None) if self.other == 0 => format!("changes none of {} kernels", self.cases),
            (None, None) => format!("harmless: {} of {} kernels have other code, and the same results", self.other, self.cases),
        }
    }
}

/// Tries a fault on kernels until one is refused; on all of them if `everywhere`.
fn try_out(fault: &Fault, all: &[FaultCase], right: &[OnceLock<ReferenceCode>], everywhere: bool) -> FaultTally {
    let mut tally = FaultTally::default();
    // A child gets few cases at a time, as the first case settles most faults.
    let mut numbers = (0..all.len()).filter(|n| right[*n].get_or_init(|| ReferenceCode::new(&all[*n])).reached.contains(fault.name)).peekable();
    while numbers.peek().is_some() && (everywhere || tally.refused.is_none()) {
        let some: Vec<(usize, String)> = numbers.by_ref().take(8).map(|n| (n, right[n].get().expect("it was made").hash.clone())).collect();
        for (number, outcome) in ask(fault, &some, everywhere) {
            let case = &all[number];
            tally.cases += 1;
            match outcome {
                FaultOutcome::Same => {}
                FaultOutcome::Equal => tally.other += 1,
                FaultOutcome::Refused(by) => drop(tally.refused.get_or_insert(by)),
                FaultOutcome::Through(what) => {
                    tally.wrong += 1;
                    tally.through.get_or_insert(format!("({}: {what})", case.name));
                }
            }
        }
    }
    tally
}

/// How many faults are tried by default.
const SAMPLE: usize = 3;

fn number(variable: &str, default: usize) -> usize {
    std::env::var(variable).map_or(default, |n| n.parse().expect("a number"))
}

/// A sample of faults, or `FAULTS` from number `FAULTS_FIRST` on, each on kernels until one is refused; with
/// `FAULTS_EVERYWHERE=1` on all kernels. `FAULT=name` tries those whose names begin so.
#[test]
fn no_fault_of_the_code_generator_gets_through() {
    let list = faults();
    let names: BTreeSet<&str> = list.iter().map(|f| f.name).collect();
    assert_eq!(names.len(), list.len(), "two faults have one name");
    assert!(list.len() <= 400, "{} faults are more than `make test-long-faults` tries", list.len());
    for (name, _) in KNOWN {
        assert!(names.contains(name), "`{name}` is known to get through, and nowhere");
    }
    let (first, count) = (number("FAULTS_FIRST", 0), number("FAULTS", SAMPLE));
    let chosen: Vec<&Fault> = match std::env::var("FAULT") {
        Ok(name) => list.iter().filter(|f| f.name.starts_with(&name)).collect(),
        Err(_) => list.iter().skip(first).take(count).collect(),
    };
    let (all, everywhere) = (cases(), number("FAULTS_EVERYWHERE", 0) > 0);
    let right: Vec<OnceLock<ReferenceCode>> = all.iter().map(|_| OnceLock::new()).collect();
    let (next, done) = (AtomicUsize::new(0), Mutex::new(BTreeMap::new()));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(2, |n| n.get()) {
            scope.spawn(|| {
                while let Some(fault) = chosen.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let tally = try_out(fault, &all, &right, everywhere);
                    println!("{:<36} {:<44} {}", fault.name, fault.place, tally.verdict());
                    done.lock().expect("no poison").insert(fault.name, tally);
                }
            });
        }
    });
    let done = done.into_inner().expect("no poison");
    table(&done);
    let of = |holds: &dyn Fn(&FaultTally) -> bool| done.iter().filter(|(_, t)| holds(t)).map(|(name, _)| *name).collect::<BTreeSet<&str>>();
    let known: BTreeSet<&str> = KNOWN.iter().map(|k| k.0).filter(|name| done.contains_key(name)).collect();
    let through = of(&|t| t.through.is_some() && t.refused.is_none());
    let new: Vec<&&str> = through.difference(&known).collect();
    let mended: Vec<&&str> = known.difference(&through).collect();
    let missed = of(&|t| t.cases == 0);
    assert!(missed.is_empty(), "no kernel reaches {missed:?}");
    assert!(new.is_empty(), "{} faults get through: {new:?}", new.len());
    assert!(mended.is_empty(), "these get through no more, and faults/known.rs says so: {mended:?}");
}

/// By family: faults, those that were refused and by what, that made other code with the same results or changed
/// none, that got through.
fn table(done: &BTreeMap<&'static str, FaultTally>) {
    let mut families: BTreeMap<&str, Vec<&FaultTally>> = BTreeMap::new();
    done.iter().for_each(|(name, tally)| families.entry(name.split('.').next().unwrap_or_default()).or_default().push(tally));
    println!("| code of | faults | refused | harmless | no change | through | by |");
    println!("|---|---|---|---|---|---|---|");
    let line = |family: &str, all: &[&FaultTally]| {
        let count = |holds: &dyn Fn(&FaultTally) -> bool| all.iter().filter(|t| holds(t)).count();
        let through = count(&|t| t.through.is_some() && t.refused.is_none());
        let refused = count(&|t| t.refused.is_some());
        let mut by: BTreeMap<&str, usize> = BTreeMap::new();
        all.iter().filter_map(|t| t.refused.as_deref()).for_each(|r| *by.entry(r).or_default() += 1);
        let by: Vec<String> = by.into_iter().map(|(r, n)| if n > 1 { format!("{r} ({n})") } else { r.to_string() }).collect();
        let harmless = count(&|t| t.through.is_none() && t.refused.is_none() && t.other > 0);
        let same = all.len() - through - refused - harmless;
        println!("| {family} | {} | {refused} | {harmless} | {same} | {through} | {} |", all.len(), by.join(", "));
    };
    families.iter().for_each(|(family, all)| line(family, all));
    line("all", &done.values().collect::<Vec<_>>());
}
