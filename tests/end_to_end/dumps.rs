//! `mcc dump` at every level: texts that parse back, MLIR that MLIR's own tool accepts.

use crate::mcc::{CommandOutput, Dir};
use ir::text;
use std::fs;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

const COMPILE: &str = "compile {models}/llama.mdl --dp 2 --tp 2 --pp 2 --sp --global-batch-size 4 \
                       -D vocab=23 -D hidden=16 -D heads=4 -D kv_heads=2 -D ffn=24 -D layers=3 -D seq=8 -o out.mcc";

fn compiled(emit: &str) -> Dir {
    let dir = Dir::new();
    dir.line(&format!("{COMPILE} {emit}")).succeeds();
    dir
}

fn dump(dir: &Dir, level: &str) -> String {
    dir.line(&format!("dump out.mcc --level {level}")).succeeds().stdout
}

/// The texts of classes, which each begin with a line of their own.
fn split<'a>(text: &'a str, first: &str) -> Vec<&'a str> {
    let starts: Vec<usize> = text.match_indices(first).map(|(at, _)| at).filter(|at| *at == 0 || text.as_bytes()[at - 1] == b'\n').collect();
    let ends = starts.iter().skip(1).copied().chain([text.len()]);
    starts.iter().zip(ends).map(|(start, end)| &text[*start..end]).collect()
}

#[test]
fn texts_of_all_levels_parse_back() {
    let dir = compiled("");
    let graph = dump(&dir, "graph");
    assert_eq!(text::print_graph(&text::parse_graph(&graph).expect("a graph")), graph);
    let sharded = dump(&dir, "sharded");
    assert_eq!(text::print_sharded(&text::parse_sharded(&sharded).expect("a sharded graph")), sharded);
    let local = dump(&dir, "local");
    let locals = split(&local, "local\n");
    assert_eq!(locals.len(), 2);
    for local in locals {
        assert_eq!(text::print_local(&text::parse_local(local).expect("a rank's graph")), local);
    }
    let program = dump(&dir, "program");
    let programs = split(&program, "// class ");
    assert_eq!(programs.len(), 2);
    for (k, program) in programs.into_iter().enumerate() {
        let body = program.split_once('\n').expect("a heading").1;
        assert_eq!(text::print_program(&text::parse_program(body).expect("a program")), body);
        assert_eq!(dump(&dir, &format!("program --class {k}")), program);
    }
    let kernel = dump(&dir, "kernel");
    let kernels = split(&kernel, "// ");
    assert!(kernels.len() > 10);
    for kernel in kernels {
        let body = kernel.split_once('\n').expect("a heading").1;
        assert_eq!(text::print_kernel(&text::parse_kernel(body).expect("a kernel")), body);
    }
}

/// The drawing is of a V-shaped zero-bubble schedule. Boxes of a stage never overlap, and each pass of the text is
/// one.
#[test]
fn a_schedule_is_drawn_pass_by_pass() {
    let dir = Dir::new();
    let model = "{models}/gpt2.mdl --pp 2 --pipeline-schedule zb-v --global-batch-size 4 -D layers=4 -D hidden=16 -D heads=2 -D seq=8 -D vocab=32";
    dir.line(&format!("compile {model} -o v.mcc")).succeeds();
    let text = dir.line("dump v.mcc --level schedule").succeeds().stdout;
    let passes = |line: &str| line.split_whitespace().filter(|w| w.starts_with(['F', 'B', 'W'])).count();
    let all: Vec<usize> = text.lines().filter(|l| l.starts_with(|c: char| c.is_ascii_digit())).map(passes).collect();
    assert!(all.len() == 2 && all.iter().all(|n| *n == 24), "{text}");
    let svg = dir.line("dump v.mcc --level schedule --svg").succeeds().stdout;
    let number = |rect: &str, name: &str| -> u64 {
        let value = rect.split_once(&format!(" {name}=\"")).and_then(|(_, rest)| rest.split_once('"')).expect("an attribute").0;
        value.parse().expect("a number")
    };
    let boxes: Vec<&str> = svg.split("<rect ").filter(|r| r.contains(" of microbatch ")).collect();
    for (stage, passes) in all.iter().enumerate() {
        let row: Vec<_> = boxes.iter().filter(|r| number(r, "y") == 24 * stage as u64).map(|r| [number(r, "x"), number(r, "width")]).collect();
        assert_eq!(row.len(), *passes, "stage {stage}");
        assert!(row.windows(2).all(|pair| pair[0][0] + pair[0][1] <= pair[1][0]), "{row:?}");
    }
    for more in ["", "--level ptx --costs"] {
        dir.line(&format!("dump v.mcc --svg {more}")).misuses_with(&["--svg goes with --level schedule"]);
    }
}

#[test]
fn collectives_say_why() {
    let dir = compiled("");
    let local = dump(&dir, "local");
    let exchanges = local.lines().filter(|l| ["all_reduce", "all_gather", "reduce_scatter"].iter().any(|c| l.contains(&format!(" = {c}"))));
    assert!(exchanges.clone().count() > 10);
    for line in exchanges {
        assert!(line.contains(" because \""), "{line}");
    }
}

#[test]
fn code_can_be_read() {
    let dir = compiled("");
    assert!(dump(&dir, "llvm").contains("define "));
    assert!(dump(&dir, "asm").contains("ret"));
    dir.line("dump out.mcc --level llvm --class 2").misuses_with(&["there is no class 2: the artifact has 2 (0 to 1)"]);
    dir.line("dump out.mcc --level mlir").succeeds();
}

#[test]
fn every_level_can_be_written_at_compile_time() {
    let dir = compiled("--emit graph,sharded,local,program,kernel,mlir,llvm,asm");
    let names: Vec<String> =
        fs::read_dir(dir.path("out.mcc/dumps")).expect("dumps").map(|e| e.expect("an entry").file_name().into_string().expect("UTF-8")).collect();
    for name in ["graph.txt", "sharded.txt", "local.0.txt", "local.1.txt", "program.0.txt", "graph.mlir", "sharded.mlir", "local.1.mlir"] {
        assert!(names.iter().any(|n| n == name), "no {name}");
    }
    for ending in [".ll", ".s"] {
        assert!(names.iter().any(|n| n.ends_with(ending)), "no *{ending}");
    }
    let without = compiled("--emit program");
    for level in ["graph", "sharded", "local"] {
        without.line(&format!("dump out.mcc --level {level}")).fails_with(&[&format!("compile with --emit {level}")]);
    }
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let dir = compiled("");
    let mut dump = dir.command(["dump", "out.mcc", "--level", "program"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("mcc starts");
    drop(dump.stdout.take());
    CommandOutput::new(dump.wait_with_output().expect("the end")).succeeds();
}

/// The tool, if the machine has it; `make deps` installs it.
fn mlir_opt() -> Option<&'static str> {
    static TOOL: OnceLock<Option<&str>> = OnceLock::new();
    *TOOL.get_or_init(|| {
        ["mlir-opt-22", "/usr/lib/llvm-22/bin/mlir-opt"]
            .into_iter()
            .find(|t| Command::new(t).arg("--version").output().is_ok_and(|o| o.status.success()))
    })
}

#[test]
fn mlir_accepts_its_exports() {
    let tool = mlir_opt().expect("mlir-opt-22, which `make deps` installs");
    let dir = compiled("--emit mlir");
    let mut seen = 0;
    for entry in fs::read_dir(dir.path("out.mcc/dumps")).expect("dumps") {
        let path = entry.expect("an entry").path();
        let out = Command::new(tool).args(["--allow-unregistered-dialect", "-o", "/dev/null"]).arg(&path).output().expect("mlir-opt starts");
        assert!(out.status.success(), "{}: {}", path.display(), String::from_utf8_lossy(&out.stderr));
        seen += 1;
    }
    assert!(seen >= 4, "{seen} files");
}

/// Flags that would have no effect are refused.
#[test]
fn explain_takes_the_flags_that_matter() {
    let dir = compiled("");
    dir.line("explain out.mcc --json").succeeds();
    dir.line("explain out.mcc --tp 4 --json").misuses_with(&["`--tp` is for a model text: `out.mcc` has been compiled"]);
    dir.line("explain out.mcc:3").misuses_with(&["`out.mcc` is an artifact: ask for a line of its model text"]);
    dir.line("explain {models}/gpt2.mdl:3 --collectives").misuses_with(&["`--collectives` is of a whole job"]);
    dir.line("explain {models}/gpt2.mdl:3 --output x.mcc").misuses_with(&["--output"]);
    dir.line("explain {models}/gpt2.mdl --svg").misuses_with(&["--svg draws the collectives of a line"]);
    let line = "explain {models}/gpt2.mdl:44 -D layers=2 -D hidden=64 -D heads=4 -D seq=32 -D vocab=128 --svg";
    dir.line(line).fails_with(&["line 44", "needs no collective with these flags"]);
    let svg = dir.line(&format!("{line} --tp 2")).succeeds().stdout;
    assert_eq!(svg.matches("partial over tp").count(), svg.matches("class=\"collective\"").count(), "{svg}");
    assert!(["all_reduce", "layers.0.mlp.down.w", "ffn = 256 / tp"].iter().all(|words| svg.contains(words)), "{svg}");
}

/// Virtual stages and stages that send alike are one entry of `mcc explain`, which adds up to the totals.
#[test]
fn explain_joins_what_stages_do_alike() {
    let flags = "--pp 2 --vpp 2 --tp 2 --global-batch-size 4 -D layers=4 -D hidden=64 -D heads=4 -D seq=32 -D vocab=128";
    let text = Dir::new().line(&format!("explain {{models}}/gpt2.mdl --collectives {flags}")).succeeds().stdout;
    let entries: Vec<&str> = text.lines().filter(|l| l.starts_with("all_reduce over tp, forward of")).collect();
    assert!(entries.iter().any(|e| e.ends_with("on stages 0 to 1")), "{text}");
    assert!(!text.contains("forward1") && !text.contains("backward1"), "{text}");
    let calls = |line: &str| -> u64 {
        let words: Vec<&str> = line.split_whitespace().collect();
        let at = words.iter().position(|w| w.starts_with("calls")).expect("calls");
        words[at - 1].parse().expect("a number")
    };
    // Both stages run two layers in each of two virtual stages, and four microbatches: no stage differs in these.
    let layers: Vec<u64> = text
        .lines()
        .zip(text.lines().skip(1))
        .filter(|(head, _)| entries.contains(head) && head.ends_with("0 to 1"))
        .map(|(_, line)| calls(line))
        .collect();
    assert!(!layers.is_empty() && layers.iter().all(|n| n % 8 == 0), "{text}");
}

/// The number of a kernel in a program leads to its text at any level.
#[test]
fn kernels_are_found_by_the_number_that_programs_have() {
    let dir = compiled("");
    let launched = dump(&dir, "program");
    let number = launched.lines().find_map(|l| l.trim().split_once("launch kernel ")).expect("a launch").1.split(' ').next().expect("a number");
    let all = dump(&dir, "kernel");
    let one = dump(&dir, &format!("kernel --kernel {number}"));
    assert!(one.starts_with(&format!("// kernel {number}: k_")) && one.matches("// kernel ").count() == 1 && all.contains(&one), "{one}");
    dir.line("dump out.mcc --level llvm --kernel 99999").misuses_with(&["there is no kernel 99999"]);
    dir.line("dump out.mcc --kernel 0").misuses_with(&["--kernel goes with --level kernel"]);
}
