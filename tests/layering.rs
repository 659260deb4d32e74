//! Who may depend on whom, over `cargo metadata` and over `use` paths, and who may print: the invariants of
//! `docs/architecture.md`.

mod uses;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use uses::Files;

/// For every package of the workspace, all packages that its library or binaries link, directly or not.
fn dependencies() -> BTreeMap<String, BTreeSet<String>> {
    // Packages for other platforms were never downloaded, so they are left out.
    let platform = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let arguments = ["metadata", "--format-version", "1", "--locked", "--filter-platform", &platform];
    let out = Command::new(env!("CARGO")).args(arguments).output().expect("cargo runs");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let meta: serde_json::Value = serde_json::from_slice(&out.stdout).expect("metadata is JSON");
    let name_of: BTreeMap<&str, &str> = list(&meta["packages"]).map(|p| (text(&p["id"]), text(&p["name"]))).collect();
    let direct: BTreeMap<&str, Vec<&str>> = list(&meta["resolve"]["nodes"])
        .map(|n| {
            let normal = list(&n["deps"]).filter(|d| list(&d["dep_kinds"]).any(|k| k["kind"].is_null())).map(|d| text(&d["pkg"])).collect();
            (text(&n["id"]), normal)
        })
        .collect();
    list(&meta["workspace_members"])
        .map(|m| {
            let (mut seen, mut open) = (BTreeSet::new(), vec![text(m)]);
            while let Some(p) = open.pop() {
                for d in &direct[p] {
                    if seen.insert(name_of[d].to_string()) {
                        open.push(d);
                    }
                }
            }
            (name_of[text(m)].to_string(), seen)
        })
        .collect()
}

fn list(v: &serde_json::Value) -> impl Iterator<Item = &serde_json::Value> {
    v.as_array().expect("a list").iter()
}

fn text(v: &serde_json::Value) -> &str {
    v.as_str().expect("a text")
}

const LLVM: [&str; 4] = ["melior", "inkwell", "mlir-sys", "llvm-sys"];

#[test]
fn only_codegen_links_llvm() {
    for (package, deps) in dependencies() {
        let links = LLVM.iter().any(|l| deps.contains(*l));
        assert_eq!(links, package == "codegen" || package == "mcc", "{package}");
    }
}

#[test]
fn ir_depends_on_no_sibling() {
    let all = dependencies();
    let siblings: BTreeSet<String> = all.keys().cloned().collect();
    assert_eq!(all["ir"].intersection(&siblings).collect::<Vec<_>>(), Vec::<&String>::new());
}

#[test]
fn the_emulator_stands_alone() {
    let all = dependencies();
    assert!(all["emulator"].iter().all(|d| !all.contains_key(d)));
}

/// Whoever trains by other means can use it as it is.
#[test]
fn data_stands_alone() {
    let all = dependencies();
    assert!(all["data"].iter().all(|d| !all.contains_key(d)));
}

#[test]
fn the_pipeline_knows_only_what_is_before_it() {
    let all = dependencies();
    for (package, allowed) in [
        ("frontend", vec!["ir"]),
        ("verify", vec!["ir"]),
        ("passes", vec!["ir", "verify"]),
        ("codegen", vec!["emulator", "ir"]),
        ("runtime", vec!["data", "emulator", "ir", "verify"]),
        ("emulated-driver", vec!["emulator"]),
        ("convert", vec!["frontend", "ir"]),
        ("simulate", vec!["ir"]),
        ("planner", vec!["ir", "passes", "simulate", "verify"]),
    ] {
        let siblings: Vec<&String> = all[package].iter().filter(|d| all.contains_key(*d)).collect();
        assert_eq!(siblings, allowed, "{package}");
    }
}

/// The crates' roots.
const CRATES: [&str; 12] = [
    "src/main.rs",
    "frontend/src/lib.rs",
    "ir/src/lib.rs",
    "verify/src/lib.rs",
    "passes/src/lib.rs",
    "codegen/src/lib.rs",
    "runtime/src/lib.rs",
    "convert/src/lib.rs",
    "data/src/lib.rs",
    "emulator/src/lib.rs",
    "simulate/src/lib.rs",
    "planner/src/lib.rs",
];

fn files(root: &str) -> Files {
    Files::of(&Path::new(env!("CARGO_MANIFEST_DIR")).join(root))
}

#[test]
fn files_use_each_other_in_small_circles_at_most() {
    let mut found = vec![];
    for root in CRATES {
        let files = files(root);
        assert!(files.uses.len() >= 6, "{root}: {} files", files.uses.len());
        found.extend(files.circles().into_iter().filter(|c| c.len() > 3).map(|c| (root, c)));
    }
    assert_eq!(found, [], "circles of more than three files");
}

/// The rooms of the passes, in the order of the pipeline.
const ROOMS: [&str; 8] = ["pipeline", "graph", "sharding", "partition", "local", "lower", "commands", "report"];

#[test]
fn no_room_of_the_passes_uses_a_later_one() {
    let name = |p: &Path| p.components().next().expect("a file").as_os_str().to_string_lossy().trim_end_matches(".rs").to_string();
    // The table, and the files beside it, are above all rooms.
    let place = |p: &Path| ROOMS.iter().position(|r| *r == name(p)).unwrap_or(ROOMS.len());
    let files = files("passes/src/lib.rs");
    assert!(ROOMS.iter().all(|r| files.uses.keys().any(|f| name(f) == *r)));
    let all = files.uses.iter().flat_map(|(file, used)| used.iter().map(move |other| (file, other)));
    let upward: Vec<_> = all.filter(|(file, other)| place(other) > place(file)).collect();
    assert_eq!(upward, [], "a file, and what it uses of a later room");
}

/// All files of Rust below a folder.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("a folder").map(|e| e.expect("an entry").path());
    entries.flat_map(|p| if p.is_dir() { sources(&p) } else { vec![p] }).filter(|p| p.extension().is_some_and(|e| e == "rs")).collect()
}

#[test]
fn files_fit_on_a_few_screens() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folders =
        ["src", "tests", "frontend", "ir", "verify", "passes", "codegen", "runtime", "convert", "data", "emulator", "fuzz", "simulate", "planner"];
    let long = |f: &PathBuf| fs::read_to_string(f).expect("UTF-8").lines().count() > 600;
    let files = folders.iter().flat_map(|c| sources(&root.join(c))).filter(|f| !f.components().any(|c| c.as_os_str() == "target"));
    let long: Vec<PathBuf> = files.filter(long).map(|f| f.strip_prefix(root).expect("below it").into()).collect();
    assert_eq!(long, Vec::<PathBuf>::new());
}

#[test]
fn nothing_prints_in_a_way_that_panics_when_nobody_reads() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let crates =
        ["src", "frontend/src", "ir/src", "verify/src", "passes/src", "codegen/src", "runtime/src", "convert/src", "data/src", "emulator/src"];
    let files: Vec<PathBuf> = crates.iter().flat_map(|c| sources(&root.join(c))).collect();
    assert!(files.len() > 100, "{} files were found", files.len());
    // Tests may print for whoever runs them.
    let is_of_tests = |f: &PathBuf| f.ends_with("tests.rs") || f.components().any(|c| ["testing", "faults"].iter().any(|of| c.as_os_str() == *of));
    for file in files.into_iter().filter(|f| !is_of_tests(f)) {
        let text = fs::read_to_string(&file).expect("UTF-8");
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        let prints = |line: &str| ["println!(", "print!(", "dbg!("].iter().any(|p| line.contains(p)) && !line.trim_start().starts_with("//");
        if let Some((number, line)) = (1..).zip(code.lines()).find(|(_, l)| prints(l)) {
            panic!("{}:{number}: `{}`; src/print.rs says what prints here", file.display(), line.trim());
        }
    }
}

/// A page of docs, which shows commands.
const SHOWS_COMMANDS: &str = "passes/src/page.rs";

/// What follows each `--` with which a word begins.
fn after_dashes(text: &str) -> impl Iterator<Item = &str> {
    let begins = |at: &usize| !text[..*at].ends_with(|c: char| c == '-' || c.is_ascii_alphanumeric());
    text.match_indices("--").map(|(at, _)| at).filter(begins).map(|at| &text[at + 2..])
}

/// The names of all flags in a text.
fn flags(text: &str) -> impl Iterator<Item = &str> {
    let names = after_dashes(text).filter_map(|rest| rest.split(|c: char| c != '-' && !c.is_ascii_alphanumeric()).next());
    names.map(|n| n.trim_end_matches('-')).filter(|n| n.starts_with(|c: char| c.is_ascii_lowercase()))
}

/// Whether a line of code has such a flag, which is then not in a comment.
fn has_flag(line: &str, is_one: impl Fn(&str) -> bool) -> bool {
    !line.trim_start().starts_with("//") && after_dashes(line).any(is_one)
}

/// `src/cli/` spells flags. The runtime, which is not among these, names flags of `mcc run` in its messages; the
/// code generator's are its linker's.
#[test]
fn what_compiles_speaks_of_options_and_not_of_flags() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let files: Vec<PathBuf> =
        ["ir/src", "verify/src", "frontend/src", "passes/src", "data/src"].iter().flat_map(|c| sources(&root.join(c))).collect();
    assert!(files.len() > 100, "{} files were found", files.len());
    let spelled = |line: &str| has_flag(line, |name| name.starts_with(|c: char| c.is_ascii_lowercase() || c == '{'));
    for file in files.into_iter().filter(|f| !f.ends_with("tests.rs") && !f.ends_with(SHOWS_COMMANDS)) {
        none_is_spelled(&file, spelled);
    }
}

/// No line of a file's code, up to its tests, is one that spells a flag.
fn none_is_spelled(file: &Path, spelled: impl Fn(&str) -> bool) {
    let text = fs::read_to_string(file).expect("UTF-8");
    let code = text.split("#[cfg(test)]").next().unwrap_or_default();
    if let Some((number, line)) = (1..).zip(code.lines()).find(|(_, l)| spelled(l)) {
        panic!("{}:{number}: `{}`; src/cli/spelling.rs spells flags", file.display(), line.trim());
    }
}

#[test]
fn what_runs_speaks_of_the_options_of_a_compile_and_not_of_their_flags() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let spelling = fs::read_to_string(root.join("src/cli/spelling.rs")).expect("UTF-8");
    let named = spelling.lines().filter_map(|l| l.trim().strip_prefix("OptionName::")?.strip_suffix("\",")?.split_once(" => \"--"));
    let flags: BTreeSet<&str> = named.map(|(_, flag)| flag).collect();
    assert!(flags.len() > 10, "{flags:?}");
    let spelled =
        |line: &str| has_flag(line, |name| name.split(|c: char| c != '-' && !c.is_ascii_lowercase()).next().is_some_and(|n| flags.contains(n)));
    sources(&root.join("runtime/src")).iter().filter(|f| !f.ends_with("tests.rs")).for_each(|file| none_is_spelled(file, spelled));
}

/// Flags of torchrun, srun, cargo and `mcc-rank`.
const OF_OTHERS: [&str; 10] = ["nproc-per-node", "nnodes", "no-python", "ntasks", "mpi", "release", "features", "workspace", "rank", "parent"];

/// A message that names a flag names one that there is: those that `--help` shows, which the end-to-end tests hold to
/// `tests/end_to_end/expected`.
#[test]
fn flags_that_messages_name_are_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let helps = fs::read_dir(root.join("tests/end_to_end/expected")).expect("a folder").map(|e| e.expect("a file").path());
    let helps: String = helps.map(|f| fs::read_to_string(f).expect("UTF-8")).collect();
    let shown: BTreeSet<&str> = flags(&helps).collect();
    assert!(shown.len() > 100, "{shown:?}");
    let mut named = 0;
    for file in ["runtime/src", "convert/src"].iter().flat_map(|c| sources(&root.join(c))).filter(|f| !f.ends_with("tests.rs")) {
        let text = fs::read_to_string(&file).expect("UTF-8");
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        for (number, line) in (1..).zip(code.lines()).filter(|(_, l)| !l.trim_start().starts_with("//") && l.contains('"')) {
            for flag in flags(line) {
                named += 1;
                assert!(shown.contains(flag) || OF_OTHERS.contains(&flag), "{}:{number}: there is no --{flag}: `{}`", file.display(), line.trim());
            }
        }
    }
    assert!(named > 40, "{named}");
}

/// The name of the type that a line defines; none of an associated type, which stands for another one in each place.
fn defined(line: &str) -> Option<&str> {
    let line = line.trim_start();
    let line = match line.strip_prefix("pub") {
        Some(rest) if rest.starts_with('(') => rest.split_once(") ")?.1,
        Some(rest) => rest.trim_start(),
        None => line,
    };
    let name = ["struct ", "enum ", "trait ", "union "].iter().find_map(|k| line.strip_prefix(k))?;
    let name = name.split(|c: char| !c.is_alphanumeric()).next()?;
    name.starts_with(char::is_uppercase).then_some(name)
}

#[test]
fn a_types_name_means_one_thing_in_a_crate() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folders = fs::read_dir(root).expect("a folder").map(|e| e.expect("an entry").path().join("src"));
    let crates: Vec<PathBuf> = folders.filter(|p| p.is_dir()).chain([root.join("src")]).collect();
    assert!(crates.len() > 10, "{crates:?}");
    for crate_ in crates {
        let mut seen: BTreeMap<String, PathBuf> = BTreeMap::new();
        for file in sources(&crate_) {
            let text = fs::read_to_string(&file).expect("UTF-8");
            for name in text.lines().filter_map(defined).filter(|n| !["Error", "Options"].contains(n)) {
                let before = seen.insert(name.to_string(), file.clone());
                assert!(before.is_none(), "`{name}` is a type of {} and of {}", file.display(), before.unwrap_or_default().display());
            }
        }
        assert!(!seen.is_empty(), "{}", crate_.display());
    }
    assert_eq!(["pub(super) struct Ab<'a> {", "    enum Cd {", "type X = u8;", "structure"].map(defined), [Some("Ab"), Some("Cd"), None, None]);
}
