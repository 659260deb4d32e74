//! What the command line says: helps, tables, errors. `UPDATE_EXPECT=1` writes the expected texts anew.

use crate::mcc::{CommandOutput, Dir, models};
use expect_test::{Expect, ExpectFile, expect, expect_file};
use std::fs;

fn help(arguments: &str, expected: ExpectFile) {
    let text = Dir::new().line(arguments).succeeds().stdout;
    expected.assert_eq(&text);
}

#[test]
fn mcc_explains_itself() {
    help("--help", expect_file!["./expected/mcc.txt"]);
}

#[test]
fn mcc_compile_explains_itself() {
    help("compile --help", expect_file!["./expected/compile.txt"]);
}

#[test]
fn mcc_run_explains_itself() {
    help("run --help", expect_file!["./expected/run.txt"]);
}

#[test]
fn mcc_dump_explains_itself() {
    help("dump --help", expect_file!["./expected/dump.txt"]);
}

#[test]
fn the_other_commands_explain_themselves() {
    help("check --help", expect_file!["./expected/check.txt"]);
    help("fmt --help", expect_file!["./expected/fmt.txt"]);
    help("simulate --help", expect_file!["./expected/simulate.txt"]);
    help("plan --help", expect_file!["./expected/plan.txt"]);
    help("machine --help", expect_file!["./expected/machine.txt"]);
    help("calibrate --help", expect_file!["./expected/calibrate.txt"]);
    help("report --help", expect_file!["./expected/report.txt"]);
    help("gpu-check --help", expect_file!["./expected/gpu-check.txt"]);
    help("import hf --help", expect_file!["./expected/import.txt"]);
    help("import megatron-args --help", expect_file!["./expected/import-megatron.txt"]);
    help("export hf --help", expect_file!["./expected/export.txt"]);
    help("data tokenize --help", expect_file!["./expected/data-tokenize.txt"]);
    help("data inspect --help", expect_file!["./expected/data-inspect.txt"]);
    help("data train-tokenizer --help", expect_file!["./expected/data-train-tokenizer.txt"]);
}

/// What `mcc check` does with a text.
fn checked(text: &str, arguments: &str) -> CommandOutput {
    let dir = Dir::new();
    dir.write("m.mdl", text);
    dir.line(&format!("check m.mdl {arguments}"))
}

/// What `mcc check` says of a text that is wrong.
fn check(text: &str, arguments: &str, expected: Expect) {
    expected.assert_eq(&checked(text, arguments).fails_with(&["error"]).stderr);
}

#[test]
fn all_errors_of_a_text_come_at_once() {
    check(
        "model m(batch, hidden = 8, heads = 3, head_dim = hidden / heads) {\n  input x: f32[batch, hidden];\n  loss sum(linear(x, hiden, heads) + y);\n}\n",
        "",
        expect![[r#"
            error[E0301]: heads = 3 does not divide hidden = 8
             --> m.mdl:1:57
              |
            1 | model m(batch, hidden = 8, heads = 3, head_dim = hidden / heads) {
              |                                                         ^ 8 / 3 is not an integer
              |
              = help: 8 divides by 1, 2, 4, 8
              = help: `1.0 * hidden / heads` is real division
            error[E0401]: nothing is called `hiden` here
             --> m.mdl:3:22
              |
            3 |   loss sum(linear(x, hiden, heads) + y);
              |                      ^^^^^ unknown name
              |
              = help: did you mean `hidden`?
            error[E0401]: nothing is called `y` here
             --> m.mdl:3:38
              |
            3 |   loss sum(linear(x, hiden, heads) + y);
              |                                      ^ unknown name
              |
              = help: declare it above: `let`, `dim`, `input` or `param`
            3 errors
        "#]],
    );
}

#[test]
fn an_unclosed_brace_is_placed_by_indentation() {
    check(
        "model m(batch, n = 2) {\n  input x: f32[batch, n];\n  repeat 2 {\n    x = relu(x);\n  loss sum(x);\n}\n",
        "",
        expect![[r#"
        error[E0101]: unexpected `2`
         --> m.mdl:3:10
          |
        3 |   repeat 2 {
          |          ^ expected a name
        error[E0103]: this `{` is never closed
         --> m.mdl:3:12
          |
        3 |   repeat 2 {
          |            ^ opened here
        4 |     x = relu(x);
        5 |   loss sum(x);
          |   - by the indentation, `}` is missing before this
          |
          = help: add the `}`
        2 errors
    "#]],
    );
}

#[test]
fn a_definition_of_nothing_offers_the_nearest_setting() {
    let text = "model m(batch, hidden = 8) {\n  input x: f32[batch, hidden];\n  loss sum(x);\n}\n";
    let said = checked(text, "-D hiden=4").misuses_with(&["error"]).stderr;
    expect![[r#"
        error[E0407]: `m` has no setting `hiden` (given as hiden=4)
         --> m.mdl:1:7
          |
        1 | model m(batch, hidden = 8) {
          |       ^ this model
          |
          = help: did you mean `hidden`?
    "#]]
    .assert_eq(&said);
}

#[test]
fn what_is_no_model_text_is_refused() {
    let dir = Dir::new();
    dir.write("binary.mdl", [b'm', 0xff, 0xfe, 0]);
    dir.write("empty.mdl", "");
    dir.write("prose.mdl", "The quick brown fox\n");
    fs::create_dir(dir.path("dir.mdl")).expect("created");
    for command in ["check", "fmt", "compile"] {
        dir.line(&format!("{command} binary.mdl")).fails_with(&["E0108", "binary.mdl", "1:2"]);
        dir.line(&format!("{command} prose.mdl")).fails_with(&["error[E", "prose.mdl:1:1"]);
        dir.line(&format!("{command} none.mdl")).fails_with(&["none.mdl"]);
        dir.line(&format!("{command} dir.mdl")).fails_with(&["dir.mdl"]);
    }
    dir.line("check empty.mdl").fails_with(&["E0112"]);
    assert_eq!(dir.entries(), ["binary.mdl", "dir.mdl", "empty.mdl", "prose.mdl"]);
}

#[test]
fn checking_counts_parameters() {
    let text = Dir::new().line("check {models}/gpt2.mdl").succeeds().stdout;
    expect![[r#"
        gpt2: 124.5 M parameters in 196 tensors, 12 layers; no errors
    "#]]
    .assert_eq(&text);
}

/// What `mcc compile` says of flags that do not fit the small GPT-2.
fn refuse(arguments: &str, expected: Expect) {
    let dir = Dir::new();
    fs::copy(models().join("gpt2.mdl"), dir.path("gpt2.mdl")).expect("copied");
    let tiny = "-D vocab=24 -D hidden=8 -D heads=4 -D layers=2 -D seq=4";
    let ran = dir.line(&format!("compile gpt2.mdl {tiny} {arguments}")).misuses_with(&["error"]);
    expected.assert_eq(&ran.stderr);
    assert_eq!(dir.entries(), ["gpt2.mdl"]);
}

#[test]
fn a_dim_that_does_not_divide_offers_sizes_that_do() {
    refuse(
        "--tp 3",
        expect![[r#"
        error[E0204]: dim `heads` of `layers.0.attn.q.w` cannot be split over axis `tp`: heads = 4 does not divide by tp = 3
          --> gpt2.mdl:24:13
           |
        24 |     let q = linear(x, hidden, [heads, head_dim], bias: true) as q;
           |             ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^ heads = 4 does not divide by tp = 3
        ...
        60 |   tp: heads, ffn, vocab;
           |   --------------------- `tp` splits `heads` here
           |
           = help: nearest sizes that divide: 3, 6 (`-D heads=6`)
        error[E0204]: dim `ffn` of `layers.0.mlp.up.w` cannot be split over axis `tp`: ffn = 32 does not divide by tp = 3
          --> gpt2.mdl:44:18
           |
        44 |     x = x + drop(mlp(norm(x) as ln2, hidden, ffn, act: "gelu_tanh", out_std: out_std) as mlp);
           |                  ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^ ffn = 32 does not divide by tp = 3
        ...
        60 |   tp: heads, ffn, vocab;
           |   --------------------- `tp` splits `ffn` here
           |
           = help: nearest sizes that divide: 30, 33 (`-D ffn=33`)
        2 errors
    "#]],
    );
}

#[test]
fn a_batch_that_does_not_divide_offers_one_that_does() {
    refuse(
        "--dp 2 --micro-batch-size 2 --global-batch-size 6",
        expect![[r#"
        error[E0208]: global batch 6 does not divide into microbatches of 2 on dp = 2
         |
         = help: `--global-batch-size 8` does
    "#]],
    );
}

#[test]
fn more_stages_than_layers_are_refused() {
    refuse(
        "--pp 3",
        expect![[r#"
        error[E0633]: 2 layers cannot fill 3 pipeline stages
         |
         = help: --pp 2 at most
    "#]],
    );
}

#[test]
fn a_split_of_layers_that_does_not_add_up_is_refused() {
    refuse(
        "--pp 2 --pipeline-layers 1,3",
        expect![[r#"
        error[E0633]: the layout [1, 3] has 2 stages and 4 layers; pp = 2 and the model has 2 layers
         |
         = help: one number of layers per stage, each at least 1
    "#]],
    );
}

#[test]
fn absurd_sizes_are_refused_without_panic() {
    let dir = Dir::new();
    for flags in [
        "--dp 18446744073709551615",
        "--tp 4294967296",
        "--pp 18446744073709551615",
        "--micro-batch-size 18446744073709551615 --dp 2",
        "--global-batch-size 18446744073709551615",
        "--global-batch-size 100000000",
        "--dp 1000000007",
        "-D hidden=9223372036854775807",
        "-D layers=1000000000000",
        "-D vocab=0",
        "-D seq=-1",
        "-D hidden=eight",
        "--target pdp11",
        "--pipeline-layers 4294967295,4294967295 --pp 2",
    ] {
        let ran = dir.line(&format!("compile {{models}}/gpt2.mdl -D layers=2 {flags} -o out.mcc"));
        assert!(matches!(ran.code, Some(1 | 2)), "{flags}: {:?} {}{}", ran.code, ran.stdout, ran.stderr);
        assert!(ran.stderr.contains("error") && !ran.stderr.contains("panicked") && !ran.stderr.contains("bug"), "{flags}: {}", ran.stderr);
    }
    assert_eq!(dir.entries(), Vec::<String>::new());
}

#[test]
fn compile_prints_a_table() {
    let line = "compile {models}/gpt2.mdl --dp 2 --tp 2 --pp 2 -D vocab=24 -D hidden=8 -D heads=4 -D layers=2 -D seq=4 -o out.mcc";
    let text = Dir::new().line(line).succeeds().stdout;
    let text = text.replace(&models().display().to_string(), "models");
    // Other tests check the numbers.
    let mut shape = text.split(|c: char| c.is_ascii_digit() || c == '.').filter(|s| !s.is_empty()).collect::<Vec<_>>().join("#");
    shape.truncate(shape.find("seconds").expect("a line of times"));
    expect![[r#"
        model      gpt#, # parameters, # sequences a step in # microbatches
        ranks      # (pp #, dp #, tp #), # program classes, # kernels (# matrix products)
        dp         all_reduce           # calls, # KiB sent by a rank in a step
        dp*tp      all_reduce           # calls, # B sent by a rank in a step
        pp         all_reduce           # calls, # B sent by a rank in a step
        pp         send                 # calls, # B sent by a rank in a step
        tp         all_reduce          # calls, # KiB sent by a rank in a step
        stages     ranks # to # are stage #, # to # stage #
        pipeline   schedule #f#b: bubble # % of the work, where a forward pass takes #, a backward pass #;
                   stage #: # forward passes before the first backward pass, # microbatches in flight;
                   stage #: # forward pass before the first backward pass, # microbatches in flight
        memory     a rank of stage # (most): # KiB = parameters # KiB + gradients # KiB + optimizer # KiB +
                   activations # x # KiB + messages # B + temporary # KiB + exchanges # KiB +
                   scratch of a thread # KiB
                   a rank of stage # (least): # KiB = parameters # KiB + gradients # KiB + optimizer # KiB +
                   activations # KiB + messages # B + temporary # B + exchanges # KiB + scratch of a thread # KiB
        peak       backward, in layers#attn#k, at models/gpt#mdl:#
                      # KiB optimizer of models/gpt#mdl:#
                      # KiB gradients of models/gpt#mdl:#
                      # KiB parameters of models/gpt#mdl:#
                         # B optimizer of models/gpt#mdl:#
                         # B activations of models/gpt#mdl:#
                         # B temporary of models/gpt#mdl:#
                         # B optimizer of models/gpt#mdl:#
                         # B activations of models/gpt#mdl:#
                         # B parameters of models/gpt#mdl:#
                         # B gradients of models/gpt#mdl:#
                      # KiB # more
    "#]]
    .assert_eq(&shape);
    assert!(text.contains("seconds    parse ") && text.contains("wrote out.mcc in "), "{text}");
}

#[test]
fn kernels_are_held_to_their_bodies_once_and_the_table_says_so() {
    let dir = Dir::new();
    let code = |verify: &str| {
        let arguments = format!("compile {}/mlp.mdl --verify-kernels {verify} -o out.mcc", models().display());
        let ran = dir.command(arguments.split_whitespace()).env("MCC_CACHE", dir.path("kernels")).output().expect("mcc starts");
        let text = String::from_utf8(ran.stdout).expect("UTF-8");
        text.lines().find_map(|l| l.strip_prefix("code ")).expect("a line of code").trim().to_string()
    };
    assert!(code("off").starts_with("0 from the cache, none compared with the interpreter"));
    // Kernels that were not compared before are compared now.
    let looked_at = code("new");
    assert!(!looked_at.starts_with("0 from the cache") && looked_at.contains(" compared with the interpreter in "), "{looked_at}");
    assert!(code("new").ends_with(" compared with the interpreter before"));
    assert!(code("all").ends_with(" compared with the interpreter before"));
}

#[test]
fn a_vocabulary_that_does_not_divide_is_padded_and_the_table_says_so() {
    let compile = |flags: &str| {
        let line = format!("compile {{models}}/gpt2.mdl --tp 2 {flags} -D vocab=25 -D hidden=8 -D heads=2 -D layers=1 -D seq=4 -o out.mcc");
        Dir::new().line(&line).succeeds().stdout
    };
    assert!(compile("").contains("\npadding    vocab from 25 to 26\n"));
    assert!(compile("--make-vocab-size-divisible-by 128").contains("\npadding    vocab from 25 to 256\n"));
}

#[test]
fn the_models_are_formatted() {
    let dir = Dir::new();
    let files: Vec<String> = fs::read_dir(models()).expect("models").map(|e| e.expect("an entry").path().display().to_string()).collect();
    dir.mcc(["fmt", "--check"].into_iter().map(String::from).chain(files)).succeeds();
}

#[test]
fn formatting_settles_and_check_only_tells() {
    let dir = Dir::new();
    let ugly = "model m( batch,n=2 ){input x:f32[batch,n];loss sum( x );}";
    dir.write("m.mdl", ugly);
    dir.line("fmt --check m.mdl").fails_with(&["m.mdl is not formatted"]);
    assert_eq!(fs::read_to_string(dir.path("m.mdl")).expect("read"), ugly);
    dir.line("fmt m.mdl").succeeds();
    dir.line("fmt --check m.mdl").succeeds();
    assert_eq!(dir.entries(), ["m.mdl"]);
}
