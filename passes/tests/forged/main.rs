//! Artifacts, weights and checkpoints that were damaged, or forged with all their hashes renewed: reading them never panics, takes memory in proportion to the files, and
//! accepts nothing that was damaged.
//!
//! Of jobs with another field, whatever it is, what the verifier accepts runs: a panic, a wait for ever or memory beyond the plan would be a hole of the verifier.
//!
//! What a forger may still do is write another valid program: of that only a signature tells (`docs/security.md`). 300 of each kind, or `FORGED`, from number
//! `FORGED_FIRST` on.

mod checkpoints;
mod execute;
mod leaves;
mod memory;
mod pytorch;
#[path = "../written/mod.rs"]
mod written;

use execute::{RunOutcome, execute};
use frontend::Options as Text;
use ir::diag::Sources;
use ir::options::{Options, SequenceParallel, Zero};
use ir::program::Job;
use ir::random::mix;
use leaves::Tree;
use passes::compile::compile;
use runtime::artifact::{AcceptedArtifacts, Artifact, ArtifactParts, read, write};
use runtime::conditions::Conditions;
use runtime::target::Target;
use runtime::weights::{Mark, SafetensorsLayout, Weights};
use std::collections::BTreeMap;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

/// A number from the environment.
fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).ok().and_then(|s| s.parse().ok()).unwrap_or(default)
}

fn seeds() -> std::ops::Range<u64> {
    let first = number("FORGED_FIRST", 0);
    first..first + number("FORGED", 300)
}

struct Rng(u64);

impl Rng {
    fn below(&mut self, n: usize) -> usize {
        self.0 = mix(self.0);
        ((self.0 >> 11) % n.max(1) as u64) as usize
    }

    /// Changes some bytes, at most `most` of them.
    fn spoil(&mut self, bytes: &mut [u8], most: usize) {
        for _ in 0..=self.below(most) {
            let at = self.below(bytes.len());
            match self.below(3) {
                0 => bytes[at] ^= 1 << self.below(8),
                1 => bytes[at] = [0, 1, 0x7f, 0x80, 0xff][self.below(5)],
                _ => bytes[at] = bytes[self.below(bytes.len())],
            }
        }
    }
}

/// Jobs of a few ranks: pipelines, sums over tensor-parallel ranks, buckets, experts, kernels of the host.
fn jobs() -> Vec<Job> {
    let gpt2 = (include_str!("../../../models/gpt2.mdl"), "vocab=24 hidden=8 heads=4 ffn=16 layers=2 seq=4");
    let mixtral = (include_str!("../../../models/mixtral.mdl"), "vocab=16 hidden=8 heads=2 kv_heads=2 expert_ffn=8 layers=1 seq=4 experts=4");
    let plain = Options { micro_batch: 1, global_batch: 4, ..Options::default() };
    let cases = [
        (gpt2, Options { tp: 2, pp: 2, sp: SequenceParallel::On, ..plain.clone() }),
        (gpt2, Options { dp: 2, zero: Zero::ALL[1], ..plain.clone() }),
        (gpt2, Options { offload: ir::options::Offload::Optimizer, ..plain.clone() }),
        (mixtral, Options { dp: 2, ep: 2, micro_batch: 2, ..plain }),
    ];
    let job = |((text, defines), options): ((&str, &str), Options)| {
        let defines: Vec<(String, String)> = defines.split(' ').filter_map(|d| d.split_once('=')).map(|(n, v)| (n.into(), v.into())).collect();
        let elaboration = Text { defines, batch: options.global_batch, ..Text::default() };
        let mut sources = Sources::default();
        let models = frontend::compile_both(&mut sources, "model.mdl", text, &elaboration, &mut |_| Err("no imports".into()));
        let models = models.unwrap_or_else(|e| panic!("{e:?}"));
        let compiled = compile(models.training, models.evaluation, &options).unwrap_or_else(|e| panic!("{e:?}"));
        Job { sources: frontend::without_library(&sources), ..compiled.job }
    };
    cases.into_iter().map(job).collect()
}

fn put(out: &Path, job: &Job) -> bool {
    let dumps = [("graph.txt".to_owned(), "a graph\n".to_owned())];
    write(out, &ArtifactParts { job, target: &Target::Reference, kernels: None, dumps: &dumps, sign: None }).is_ok()
}

/// All files below a directory, by path.
fn files(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut out = BTreeMap::new();
    for entry in fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()) {
        if entry.is_dir() {
            out.extend(files(&entry));
        } else {
            out.insert(entry.clone(), fs::read(&entry).unwrap());
        }
    }
    out
}

/// Reads within memory in proportion to so many bytes of files.
fn within<T>(bytes: usize, what: &str, act: impl FnOnce() -> T) -> T {
    let (result, most) = memory::most(act);
    let limit = (64 << 20) + 4096 * bytes;
    assert!(most <= limit, "{what}: {most} bytes of memory for {bytes} bytes of files");
    result
}

fn open(out: &Path, bytes: usize, what: &str) -> Result<Artifact, String> {
    within(bytes, what, || read(out, &AcceptedArtifacts::Anyones).map_err(|e| e.to_string()))
}

#[test]
fn what_was_damaged_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let originals: Vec<(PathBuf, BTreeMap<PathBuf, Vec<u8>>)> = jobs()
        .iter()
        .enumerate()
        .map(|(k, job)| {
            let out = dir.path().join(format!("{k}.mcc"));
            assert!(put(&out, job));
            assert_eq!(open(&out, files(&out).values().map(Vec::len).sum(), "the original").unwrap().job, *job);
            (out.clone(), files(&out))
        })
        .collect();
    for seed in seeds() {
        let mut dice = Rng(mix(seed));
        let (out, original) = &originals[dice.below(originals.len())];
        let other = &originals[dice.below(originals.len())].1;
        let (path, bytes) = original.iter().nth(dice.below(original.len())).unwrap();
        let mut damaged = bytes.clone();
        let kind = ["flip", "cut", "grow", "another's file", "of the same artifact", "gone"][dice.below(6)];
        match kind {
            "flip" => dice.spoil(&mut damaged, 4),
            "cut" => damaged.truncate(dice.below(bytes.len())),
            "grow" => damaged.extend((0..=dice.below(100)).map(|k| k as u8)),
            "another's file" => {
                let name = path.file_name();
                damaged = other.iter().find(|(p, _)| p.file_name() == name).unwrap().1.clone();
            }
            "of the same artifact" => damaged = original.values().nth(dice.below(original.len())).unwrap().clone(),
            _ => fs::remove_file(path).unwrap(),
        }
        if damaged == *bytes && kind != "gone" {
            continue;
        }
        if kind != "gone" {
            fs::write(path, &damaged).unwrap();
        }
        let what = format!("seed {seed}, {kind} of {}", path.display());
        assert!(open(out, damaged.len() + 1_000_000, &what).is_err(), "{what} was accepted");
        fs::write(path, bytes).unwrap();
    }
}

#[test]
fn what_was_forged_is_refused_or_sound() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("forged.mcc");
    let plain: Vec<Vec<u8>> = jobs().iter().map(|job| postcard::to_stdvec(job).unwrap()).collect();
    let (mut decoded, mut written, mut accepted) = (0, 0, 0);
    for seed in seeds() {
        let mut dice = Rng(mix(seed ^ 0xf0_23ed));
        let mut forged = plain[dice.below(plain.len())].clone();
        dice.spoil(&mut forged, 3);
        let what = format!("seed {seed}");
        let Ok(job) = within(forged.len(), &what, || postcard::from_bytes::<Job>(&forged)) else { continue };
        decoded += 1;
        // Writing the artifact is the first check.
        if !within(forged.len(), &what, || put(&out, &job)) {
            continue;
        }
        written += 1;
        if let Ok(artifact) = open(&out, forged.len(), &what) {
            accepted += 1;
            assert!(artifact.job == job || format!("{:?}", artifact.job) == format!("{job:?}"), "{what}: another job was read");
        }
    }
    println!("{} forged jobs: {decoded} decode, {written} pass the check, {accepted} the verifier too", seeds().count());
    assert!(seeds().count() < 100 || decoded > 0 && written > 0 && accepted < written, "nothing was tried");
}

/// A field of the job is another, whatever it is: what the verifier accepts then runs to its end, within its plan.
#[test]
fn what_is_accepted_with_another_field_runs() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("mutant.mcc");
    let jobs = jobs();
    let trees: Vec<Tree> = jobs.iter().map(Tree::of).collect();
    let (mut decoded, mut written, mut accepted, mut ran, mut wrong) = (0, 0, 0, [0; 3], String::new());
    for job in &jobs {
        assert!(execute(job, &mut Rng(1)) == RunOutcome::ToItsEnd, "the original does not run");
    }
    for seed in seeds() {
        let mut dice = Rng(mix(seed ^ 0x1eaf));
        let k = dice.below(jobs.len());
        let (what, mutant) = trees[k].mutant(&mut dice);
        let Some(job) = mutant.filter(|job| *job != jobs[k]) else { continue };
        decoded += 1;
        let what = format!("seed {seed}, job {k}, {what}");
        let bytes = postcard::to_stdvec(&job).unwrap().len();
        let read = catch_unwind(AssertUnwindSafe(|| within(bytes, &what, || put(&out, &job)).then(|| open(&out, bytes, &what))));
        let Ok(read) = read else {
            wrong += &format!("{what}: the checks panic\n");
            continue;
        };
        written += usize::from(read.is_some());
        let Some(Ok(artifact)) = read else { continue };
        accepted += 1;
        match execute(&artifact.job, &mut dice) {
            RunOutcome::ToItsEnd => ran[0] += 1,
            RunOutcome::TooLarge => ran[1] += 1,
            RunOutcome::Refused => ran[2] += 1,
            RunOutcome::Wrong(why) => wrong += &format!("{what}: {why}\n"),
        }
    }
    let [ended, large, refused] = ran;
    println!(
        "{} mutants: {decoded} decode, {written} pass the check, {accepted} the verifier too; of these {ended} run, {refused} refuse the data, {large} are too large to try",
        seeds().count()
    );
    assert!(wrong.is_empty(), "{wrong}");
    assert!(seeds().count() < 100 || ended > 0 && accepted < written && written < decoded, "nothing was tried");
}

#[test]
fn weights_with_another_header_are_refused_or_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.safetensors");
    let job = jobs().remove(0);
    let file = fs::File::create(&path).unwrap();
    SafetensorsLayout::of_run(&job, &Mark { step: 3, seed: 5, ..Mark::default() }, Some(&Conditions::new(&job, vec![], 9))).start(&file).unwrap();
    let original = fs::read(&path).unwrap();
    let header = 8 + u64::from_le_bytes(original[..8].try_into().unwrap()) as usize;
    Weights::resume(&path, &job).unwrap();
    for seed in seeds() {
        let mut dice = Rng(mix(seed ^ 0x3e16));
        let mut damaged = original.clone();
        match dice.below(4) {
            0 => damaged.truncate(dice.below(original.len())),
            1 => dice.spoil(&mut damaged[..8], 2),
            _ => dice.spoil(&mut damaged[..header], 4),
        }
        fs::write(&path, &damaged).unwrap();
        let what = format!("seed {seed}");
        let read = within(damaged.len(), &what, || Weights::resume(&path, &job).map(|r| r.mark));
        assert!(damaged == original || read.is_err(), "{what} was accepted");
    }
}
