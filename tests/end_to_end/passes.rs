//! Passes by themselves, from the command line: `mcc passes`, `mcc opt`, `mcc reduce`, and what a bug leaves.

use crate::mcc::Dir;
use ir::module::Level;
use passes::table::{PASSES, VERIFIERS};
use std::fs;
use std::path::Path;

const SMALL: &str = "{models}/gpt2.mdl -D layers=2 -D hidden=16 -D heads=2 -D seq=8 -D vocab=32 --tp 2";

#[test]
fn the_page_of_passes_and_the_picture_of_levels_are_those_of_their_table() {
    for (name, made) in [("passes.md", passes::page::passes()), ("images/levels.svg", passes::page::levels())] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs").join(name);
        if std::env::var_os("UPDATE_EXPECT").is_some() {
            fs::write(&path, &made).expect("written");
        }
        assert!(fs::read_to_string(&path).is_ok_and(|text| text == made), "docs/{name} is another one; UPDATE_EXPECT=1 renews it");
    }
}

#[test]
fn passes_are_listed_in_order() {
    let listed = Dir::new().line("passes").succeeds().stdout;
    let names: Vec<&str> = listed.lines().filter_map(|l| l.strip_prefix("  ")?.split_whitespace().next()).collect();
    assert_eq!(names, PASSES.iter().map(|p| p.name).collect::<Vec<_>>());
}

/// The modules that a compile prints, by pass.
fn printed(text: &str) -> Vec<(&str, &str)> {
    text.split("; after ").skip(1).map(|part| part.split_once('\n').expect("a name and a module")).collect()
}

#[test]
fn every_pass_runs_on_what_the_one_before_printed() {
    let dir = Dir::new();
    let all = dir.line(&format!("compile {SMALL} --print-after all -o small.mcc")).succeeds();
    assert!(all.stderr.contains("wrote small.mcc"), "{}", all.stderr);
    let modules = printed(&all.stdout);
    assert!(modules.len() > 15);
    for pair in modules.windows(2) {
        let [(_, before), (pass, after)] = pair else { unreachable!("invariant: windows of two") };
        dir.write("before.mir", before);
        let alone = dir.line(&format!("opt before.mir --passes {pass}")).succeeds();
        assert!(alone.stdout == *after, "`{pass}` alone");
    }
    // One command runs all passes, from the first module to the job.
    dir.write("first.mir", modules[0].1);
    let rest: Vec<&str> = modules[1..].iter().map(|m| m.0).collect();
    let chain = dir.line(&format!("opt first.mir --passes {}", rest.join(","))).succeeds();
    assert!(chain.stdout == modules.last().expect("the job").1);
    dir.write("last.mir", chain.stdout);
    let held = dir.line("opt last.mir --verify").succeeds().stdout;
    let of_jobs = VERIFIERS.iter().filter(|v| v.levels.1 == Level::Job).count();
    assert!(of_jobs > 4 && held.lines().count() == of_jobs, "{held}");
}

#[test]
fn a_compile_ends_and_prints_where_it_is_told_to() {
    let dir = Dir::new();
    let stopped = dir.line(&format!("compile {SMALL} --stop-after propagate")).succeeds().stdout;
    let printed_after = dir.line(&format!("compile {SMALL} --print-after simplify,propagate --stop-after propagate")).succeeds().stdout;
    let modules = printed(&printed_after);
    assert_eq!(modules.iter().map(|m| m.0).collect::<Vec<_>>(), ["simplify", "propagate"]);
    assert!(modules[1].1 == stopped);
    assert_eq!(dir.entries(), Vec::<String>::new());
    dir.line(&format!("compile {SMALL} --stop-after zero")).misuses_with(&["`zero` does not run with these options"]);
    dir.line(&format!("compile {SMALL} --print-after fuse")).misuses_with(&["invalid value 'fuse'", "simplify"]);
}

#[test]
fn what_passes_change_is_shown_without_what_has_another_number_alone() {
    let dir = Dir::new();
    let shown = dir.line(&format!("compile {SMALL} --print-before optimize,simplify --print-changed simplify,classes --stop-after classes"));
    let text = shown.succeeds().stdout;
    let (before, changed) = text.split_once("; changed by simplify\n").expect("both");
    let (first, second) = before.strip_prefix("; before optimize\n").and_then(|b| b.split_once("; before simplify\n")).expect("two modules");
    assert!(first.lines().count() < second.lines().count());
    let (simplified, joined) = changed.split_once("; changed by classes\n").expect("both");
    // What was there is in the module before, and all that is gone or new begins so.
    let lines = |sign: char| simplified.lines().filter(move |l| l.starts_with(sign)).collect::<Vec<_>>();
    assert!(lines('-').iter().any(|l| l.contains("%was") && l.contains("stop_gradient")), "{simplified}");
    assert!(lines('+').len() < second.lines().count() / 4, "{simplified}");
    assert!(joined.starts_with("@@") || joined == "; nothing\n", "{joined}");
    // `mcc opt` shows the same of the same pass.
    dir.write("second.mir", second);
    let alone = dir.line("opt second.mir --passes simplify --print-changed all").succeeds().stdout;
    assert_eq!(alone, format!("; changed by simplify\n{simplified}"));
    dir.line("opt second.mir --passes simplify --print-after lower").misuses_with(&["`lower` is none of the passes that run"]);
    dir.line("opt second.mir --verify --print-after all").misuses_with(&["no pass runs"]);
}

#[test]
fn passes_that_cannot_run_say_so() {
    let dir = Dir::new();
    dir.write("m.mir", dir.line(&format!("compile {SMALL} --stop-after classes")).succeeds().stdout);
    dir.line("opt m.mir --passes simplify").misuses_with(&["`simplify` takes a module at level `graph`, and the module is at level `local`"]);
    dir.line("opt m.mir --passes lower,bucket")
        .misuses_with(&["`bucket` takes a module at level `local`, and the passes before it leave it at level `commands`"]);
    dir.line("opt m.mir --passes zero").misuses_with(&["`zero` does nothing with the module's options"]);
    dir.line("opt m.mir --passes bucket --verify").misuses_with(&["cannot be used with"]);
    dir.line("opt m.mir").misuses_with(&["what is to run?"]);
    dir.line("opt none.mir --verify").fails_with(&["cannot read none.mir"]);
    dir.line("reduce m.mir --passes bucket").fails_with(&["m.mir does not fail so"]);
    dir.write("text.mir", "module\ntraining:\ngraph tiny\ndims:\nbody:\n  %0 = const é\n");
    dir.line("opt text.mir --verify").fails_with(&["error[E0113]", "text.mir:6:14", "expected a number, found `é`"]);
}

#[test]
fn a_bug_leaves_a_module_that_repeats_it_and_can_be_made_smaller() {
    let dir = Dir::new();
    for pass in ["simplify", "propagate", "partition", "bucket", "lower", "list_schedule", "allocate", "events"] {
        let compiled = dir.line(&format!("compile {SMALL} --damage-after {pass}"));
        let file = format!("mcc-bug-{pass}.mir");
        let bug = format!("error: bug in mcc: after `{pass}`: ");
        let compiled = compiled.fails_with(&[&bug, &file, "please report this"]);
        let says = compiled.stderr.lines().find(|l| l.starts_with(&bug)).expect("what is wrong");
        let text = fs::read_to_string(dir.path(&file)).expect("a reproducer");
        assert!(compiled.stderr.contains(&format!("`mcc opt {file}`")), "{}", compiled.stderr);
        let run = text.lines().find_map(|l| l.strip_prefix("; RUN: mcc ")).expect("a command").replace("%s", &file);
        dir.line(&run).fails_with(&[says]);
        dir.line(&format!("opt {file}")).fails_with(&[says]);
        // Reducing takes seconds, so one module of each level is enough.
        if !["simplify", "propagate", "bucket", "allocate"].contains(&pass) {
            continue;
        }
        let reduced = dir.line(&format!("reduce {file}")).succeeds();
        let small = format!("mcc-bug-{pass}.reduced.mir");
        assert!(reduced.stdout.contains(&small), "{}", reduced.stdout);
        let smaller = fs::read_to_string(dir.path(&small)).expect("a smaller one");
        assert!(smaller.lines().count() < 70, "{smaller}");
        // None of these bugs needs rematerialization.
        assert!(!reduced.stdout.contains("rematerialize"), "{}", reduced.stdout);
        dir.line(&format!("opt {small}")).fails_with(&[&bug]);
    }
    // An existing file stays, so the new one has another name.
    dir.line(&format!("compile {SMALL} --damage-after lower")).fails_with(&["mcc-bug-lower-2.mir"]);
}

#[test]
fn a_mistake_of_a_late_pass_comes_from_few_operations() {
    let dir = Dir::new();
    dir.write("early.mir", dir.line(&format!("compile {SMALL} --stop-after zigzag")).succeeds().stdout);
    let rest = "propagate,partition,classes,bucket,split_reduction,lower";
    dir.line(&format!("reduce early.mir --passes {rest} --damage-after lower -o small.mir")).succeeds();
    let small = fs::read_to_string(dir.path("small.mir")).expect("a smaller one");
    assert!(small.lines().count() < 60, "{small}");
    dir.line("reduce small.mir --verify").fails_with(&["does not fail so"]);
}
