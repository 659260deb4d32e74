//! `mcc data`, and runs over data sets.

use crate::mcc::{Dir, metrics, save_array};
use data::blend::Blend;
use data::dataset::{self, Cache, Request, Source};
use data::indexed::{Dtype, Writer};
use data::mask::{self, Masks};
use data::order::{Layout, Overlong};
use data::split::Split;
use expect_test::expect;
use std::fs;

#[test]
fn text_becomes_a_data_set_that_is_shown_as_text() {
    let dir = Dir::new();
    dir.write("a.jsonl", "{\"text\": \"The quick brown fox.\"}\n{\"text\": \"\"}\n");
    let trained = dir.line("data train-tokenizer a.jsonl --tokens 257 -o tokenizer").succeeds().stdout;
    assert_eq!(trained, "tokenizer/tokenizer.json: 257 tokens\n");
    let tokenize = "data tokenize a.jsonl --tokenizer tokenizer --append-eod -o a";
    let made = dir.line(tokenize).succeeds().stdout;
    assert_eq!(made, "a.bin, a.idx: 2 documents, 21 tokens of uint16\n");
    dir.line(tokenize).misuses_with(&["`a.bin` is there already", "--force"]);
    dir.line(&format!("{tokenize} --force")).succeeds();
    let shown = dir.line("data inspect a --tokenizer tokenizer").succeeds().stdout;
    expect![[r#"
        documents     2, 1 of them empty
        tokens        21 of uint16, 42 B
        lengths       0 to 21 tokens, half of them up to 0
        largest token 221
        document 0    "The quick brown fox.<|endoftext|>"
    "#]]
    .assert_eq(&shown);
    assert_eq!(dir.entries(), ["a.bin", "a.idx", "a.jsonl", "a.tokenizer", "tokenizer"]);
    assert_eq!(dir.line("data inspect a").succeeds().stdout, shown);
}

/// Goes from lines of prompts and answers to a run that learns the answers.
#[test]
fn prompts_and_answers_become_a_data_set_with_a_mask_that_a_run_reads() {
    let dir = Dir::new();
    let line = |n: usize| format!("{{\"prompt\": \"Count to {n}: \", \"completion\": \"{}\"}}\n", "1 ".repeat(n));
    dir.write("a.jsonl", (1..30).map(line).collect::<String>());
    dir.line("data train-tokenizer a.jsonl --field prompt --tokens 257 -o tokenizer").succeeds();
    let tokenize = "data tokenize a.jsonl --tokenizer tokenizer --prompt-field prompt --append-eod -o a";
    let made = dir.line(tokenize).succeeds().stdout;
    assert_eq!(made, "a.bin, a.idx: 29 documents, 1,267 tokens of uint16\na.mask.bin, a.mask.idx: 899 of these tokens are answers\n");
    dir.line(tokenize).misuses_with(&["`a.bin` is there already", "--force"]);
    dir.line("data tokenize a.jsonl --tokenizer tokenizer --prompt-field question -o b").fails_with(&["line 1: it has no field `question`"]);
    let shown = dir.line("data inspect a --tokenizer tokenizer").succeeds().stdout;
    assert!(shown.contains("loss mask     899 of these tokens count\n") && shown.contains("Count to 1: 1 <|endoftext|>"), "{shown}");
    dir.line(&format!("{MODEL} -D seq=64 -D packed=true --global-batch-size 2 -o packed.mcc").replace("vocab=250", "vocab=257")).succeeds();
    dir.line(&format!("{MODEL} -D seq=64 --global-batch-size 2 -o plain.mcc").replace("vocab=250", "vocab=257")).succeeds();
    let ran = dir.line("run packed.mcc --data-path a --split 1,0,0 --steps 2 --packing --loss-mask").succeeds();
    assert!(ran.stderr.contains("note: training: 29 documents of 43.7 tokens"), "{}", ran.stderr);
    // All documents but one are longer than these shorter sequences.
    dir.line(&format!("{MODEL} -D seq=16 -D packed=true --global-batch-size 2 -o short.mcc").replace("vocab=250", "vocab=257")).succeeds();
    let split = dir.line("run short.mcc --data-path a --split 1,0,0 --steps 2 --packing=split --loss-mask").succeeds();
    assert!(split.stderr.contains("split into rows: 28"), "{}", split.stderr);
    let cut = dir.line("run short.mcc --data-path a --split 1,0,0 --steps 2 --packing").succeeds();
    assert!(cut.stderr.contains("cut to a row: 28") && cut.stderr.contains("--packing=split keeps them"), "{}", cut.stderr);
    dir.line("run plain.mcc --data-path a* --split 1,0,0 --steps 2 --loss-mask").succeeds();
    // Both flags need the right model and the right data.
    dir.line("run plain.mcc --data-path a --steps 2 --packing").misuses_with(&["--packing puts several documents", "-D packed=true"]);
    write(&dir, "b", [40, 50, 60]);
    dir.line("run packed.mcc --data-path 1 a 1 b --split 1,0,0 --steps 2 --loss-mask").fails_with(&["b` has no loss mask", "b.mask.bin"]);
    write_mask(&dir, "b", [40, 50, 61]);
    dir.line("run packed.mcc --data-path 1 a 1 b --split 1,0,0 --steps 2 --loss-mask")
        .fails_with(&["b.mask.idx`, byte 42: sequence 2 has 61 numbers"]);
    dir.line("run packed.mcc --data a.jsonl --steps 2 --packing").misuses_with(&["`--packing` is about documents of data sets", "--data-path"]);
}

/// Goes from lists of messages, by the tokenizer's own template, to a mask of what assistants say.
#[test]
fn chats_become_a_data_set_with_a_mask_that_a_run_reads() {
    let dir = Dir::new();
    let line = |n: usize| {
        let said = |role: &str, text: String| format!("{{\"role\": \"{role}\", \"content\": \"{text}\"}}");
        let [first, second] = [said("user", format!("Count to {n}.")), said("user", "Again!".into())];
        let answer = said("assistant", "1 ".repeat(n));
        format!("{{\"messages\": [{first}, {answer}, {second}, {answer}]}}\n")
    };
    dir.write("a.jsonl", (1..20).map(line).collect::<String>());
    dir.write("a.txt", "Count to 1. Again!");
    dir.line("data train-tokenizer a.txt --tokens 257 -o tokenizer").succeeds();
    let tokenize = "data tokenize a.jsonl --tokenizer tokenizer --chat";
    dir.line(&format!("{tokenize} -o a")).fails_with(&["tokenizer_config.json`: it has no chat template", "name the file of one"]);
    dir.write(
        "tokenizer/chat_template.jinja",
        "{% for m in messages %}{{ m.role[:1] + ':' + m.content + eos_token }}{% endfor %}{{ 'a:' if add_generation_prompt }}",
    );
    let made = dir.line(&format!("{tokenize} -o a")).succeeds().stdout;
    // Each answer counts two bytes for each of its numbers, and the token after it.
    assert_eq!(made, "a.bin, a.idx: 19 documents, 1,321 tokens of uint16\na.mask.bin, a.mask.idx: 798 of these tokens are answers\n");
    let shown = dir.line("data inspect a").succeeds().stdout;
    assert!(shown.contains("\"u:Count to 1.<|endoftext|>a:1 <|endoftext|>u:Again!<|endoftext|>a:1 <|endoftext|>\""), "{shown}");
    dir.write("own.jinja", "{{ raise_exception('not ' + messages[0].role) }}");
    dir.line(&format!("{tokenize} --chat-template own.jinja -o b")).fails_with(&["`a.jsonl`, line 1: the chat template: line 1: not user"]);
    dir.line("data tokenize a.txt --tokenizer tokenizer --chat -o b").fails_with(&["`a.txt` has no messages"]);
    dir.line(&format!("{MODEL} -D seq=64 -D packed=true --global-batch-size 2 -o packed.mcc").replace("vocab=250", "vocab=257")).succeeds();
    dir.line("run packed.mcc --data-path a --split 1,0,0 --steps 2 --packing --loss-mask").succeeds();
}

#[test]
fn what_is_no_data_set_and_no_text_is_refused() {
    let dir = Dir::new();
    dir.write("a.csv", "1,2\n");
    dir.write("a.txt", "Some text");
    dir.write("b.bin", "tokens");
    dir.line("data train-tokenizer a.csv -o tokenizer").fails_with(&["`.csv` is no text that is known", ".jsonl"]);
    dir.line("data train-tokenizer a.txt --tokens 100 -o tokenizer").fails_with(&["257 or more"]);
    dir.line("data tokenize a.txt --tokenizer a.txt -o a").fails_with(&["no tokenizer that can be read"]);
    // The state of another job is refused. A tokenizer without a config leaves the end of documents to a default,
    // which is named.
    dir.line("data train-tokenizer a.txt --tokens 257 -o tokenizer").succeeds();
    dir.write(
        "c.state.part",
        r#"{"job":["the field `body`"],"position":{"input":0,"offset":0,"line":0,"group":0,"row":0},"documents":0,"sequences":0,"tokens":0}"#,
    );
    dir.line("data tokenize a.txt --tokenizer tokenizer -o c")
        .misuses_with(&["another job", "the field `body`: repeat that job, or --force begins anew"]);
    fs::remove_file(dir.path("c.state.part")).and_then(|()| fs::remove_file(dir.path("tokenizer/tokenizer_config.json"))).expect("removed");
    let ended = dir.line("data tokenize a.txt --tokenizer tokenizer --append-eod -o /dev/null/c");
    ended.fails_with(&["documents end with `<|endoftext|>`, token 0: no tokenizer_config.json says which, and --eod-token can"]);
    fs::remove_dir_all(dir.path("tokenizer")).expect("removed");
    dir.line("data inspect a").fails_with(&["there is no data set `a`"]);
    dir.line("data inspect b").fails_with(&["`b.bin` is there and `b.idx` is not"]);
    assert_eq!(dir.entries(), ["a.csv", "a.txt", "b.bin"]);
}

/// Writes a data set of documents of these lengths, of tokens below 250 that no separator is among.
fn write(dir: &Dir, name: &str, lengths: impl IntoIterator<Item = usize>) {
    let mut out = Writer::create(&dir.path(name), Dtype::U16).expect("a data set");
    let mut state = name.len() as u32;
    for length in lengths {
        let tokens: Vec<u32> = (0..length)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                1 + (state >> 16) % 249
            })
            .collect();
        out.document(&tokens, &[length]).expect("written");
    }
    out.finish().expect("finished");
}

const MODEL: &str = "compile {models}/gpt2.mdl -D vocab=250 -D hidden=16 -D heads=2 -D layers=2 --lr 1e-3 --lr-warmup-iters 2";

/// Two data sets, and the same model on several meshes, eight sequences of 16 tokens a step.
fn two_sets(meshes: &[(&str, &str)]) -> Dir {
    let dir = Dir::new();
    write(&dir, "wiki", (0..60).map(|n| 5 + n % 40));
    write(&dir, "code", (0..25).map(|n| 30 + n % 17));
    for (name, mesh) in meshes {
        dir.line(&format!("{MODEL} -D seq=16 --global-batch-size 8 {mesh} -o {name}.mcc")).succeeds();
    }
    dir
}

const SETS: &str = "--data-path 0.7 wiki 0.3 code --split 80,15,5 --seed 3";

fn losses(dir: &Dir, file: &str) -> Vec<f64> {
    metrics(&dir.path(file)).iter().map(|line| line["loss"].as_f64().expect("a loss")).collect()
}

#[track_caller]
fn near(found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    found.iter().zip(expected).for_each(|(a, b)| assert!((a - b).abs() < 2e-4, "{found:?} {expected:?}"));
}

/// A rank also reads the less, the more ranks share a batch.
#[test]
fn a_run_over_data_sets_goes_through_the_same_samples_on_any_mesh() {
    let dir = two_sets(&[
        ("one", "--micro-batch-size 8"),
        ("dp", "--dp 4 --micro-batch-size 1"),
        ("axes", "--dp 1 --cp 2 --pp 2 --micro-batch-size 4"),
        ("two", "--dp 2 --micro-batch-size 2"),
    ]);
    let run = |words: &str| dir.line(&format!("run {words} --quiet --threads-per-rank 1"));
    for mesh in ["one", "dp", "axes"] {
        run(&format!("{mesh}.mcc {SETS} --steps 6 --metrics {mesh}")).succeeds();
    }
    let whole = losses(&dir, "one");
    near(&losses(&dir, "dp"), &whole);
    near(&losses(&dir, "axes"), &whole);
    let read = |file: &str| metrics(&dir.path(file)).iter().map(|line| line["data_bytes"].as_u64().expect("bytes")).collect::<Vec<_>>();
    // Tokens have 16 bits. `one` reads all rows with the token after them, `dp` a fourth of the rows, and `axes` half
    // of each row.
    assert_eq!(read("one"), [8 * 17 * 2; 6]);
    assert_eq!(read("dp"), [2 * 17 * 2; 6]);
    assert!(read("axes").iter().all(|bytes| (8 * 8 * 2..=8 * 10 * 2).contains(bytes)), "{:?}", read("axes"));
    // Another mesh goes on with the samples that would have come.
    run(&format!("dp.mcc {SETS} --steps 6 --exit-interval 3 --save saved")).fails(75, &[]);
    for mesh in ["two", "axes"] {
        run(&format!("{mesh}.mcc {SETS} --steps 6 --load saved --metrics {mesh}-on").replace(" --seed 3", "")).succeeds();
        near(&losses(&dir, &format!("{mesh}-on")), &whole[3..]);
    }
    // More steps of the same epochs do not change the data; another split or other data sets do.
    let others =
        ["--data-path 0.7 wiki 0.3 code --split 90,5,5", "--data-path 0.6 wiki 0.4 code --split 80,15,5", "--data-path wiki --split 80,15,5"];
    for other in others {
        let says = ["`tokens` was `0.7 ", "split 80,15,5, seed 3", "--allow-changed data"];
        run(&format!("two.mcc {other} --steps 6 --load saved")).fails_with(&says);
    }
    run("two.mcc --data-path wiki --steps 4 --load saved --allow-changed data").succeeds();
}

#[test]
fn training_validation_and_test_have_losses_of_their_own() {
    let dir = two_sets(&[("dp", "--dp 2 --micro-batch-size 2")]);
    let run = |words: &str| dir.line(&format!("run dp.mcc {words} --threads-per-rank 1"));
    let ran = run(&format!("{SETS} --steps 4 --eval-interval 2 --eval-iters 2 --metrics metrics --data-cache-path cache")).succeeds();
    assert!(ran.stderr.contains("note: after the last step: validation loss 5.") && ran.stderr.contains(", test loss 5."), "{}", ran.stderr);
    let lines = metrics(&dir.path("metrics"));
    assert_eq!(lines.iter().map(|l| l.get("valid_loss").is_some()).collect::<Vec<_>>(), [false, true, false, true]);
    assert!(dir.path("cache").is_dir() && !dir.path("wiki.cache").exists());
    // Each part has its own data sets here, some of them named by a pattern.
    write(&dir, "wiki-2", [90, 80]);
    let own = "--train-data-path wi* --valid-data-path 1 code --steps 2 --eval-interval 1 --eval-iters 1";
    let ran = run(own).succeeds();
    assert!(ran.stderr.contains("after the last step: validation loss 5.") && !ran.stderr.contains("test"), "{}", ran.stderr);
    // Files may name the data sets.
    dir.write("blend", "0.7 wiki\n0.3 code\n");
    dir.write("parts.json", r#"{"train": [0.7, "wiki", "0.3", "code"], "valid": "code", "test": null}"#);
    for names in ["--data-args-path blend --split 80,15,5 --seed 3", "--per-split-data-args-path parts.json"] {
        run(&format!("{names} --steps 1 --metrics {}", &names[2..6])).succeeds();
    }
    near(&losses(&dir, "data"), &losses(&dir, "metrics")[..1]);
    dir.write("wrong.json", r#"{"train": ["wiki"], "validation": ["code"]}"#);
    run("--per-split-data-args-path wrong.json --steps 1").fails_with(&["unknown field `validation`", "\"valid\": ["]);
    run("--data-args-path none --steps 1").fails_with(&["cannot read `--data-args-path none`"]);
    run("--split 1,1,1 --data blend").misuses_with(&["`--split` says how data sets are shared out"]);
    run("--data-path wiki --data a").misuses_with(&["--data"]);
    run("--data-path wiki --steps 2 --split 1,x").misuses_with(&["the split `1,x`: `x` is no number"]);
    run("--data-path nothing --steps 2").fails_with(&["there is no data set", "nothing.bin"]);
    run("--data-path 0.7 wiki code --steps 2").fails_with(&["there is no data set", "`0.7` is no weight here", "as in 0.7 A 0.3 B"]);
    run("--data-path wiki --steps 2 --split 0,1,0").misuses_with(&["the split `0,1,0` leaves nothing for training"]);
    run("--data-path wiki --steps 2 --eval-iters 2").misuses_with(&["none is asked for: add `--eval-interval N`"]);
}

/// A sample of several documents trains as the documents do that each have a sequence of their own.
#[test]
fn documents_of_a_data_set_are_kept_apart_without_a_separator() {
    let dir = Dir::new();
    write(&dir, "docs", [8; 9]);
    dir.line(&format!("{MODEL} -D seq=16 -D packed=true -o packed.mcc")).succeeds();
    dir.line(&format!("{MODEL} -D seq=8 --global-batch-size 2 --micro-batch-size 2 -o alone.mcc")).succeeds();
    dir.line("run packed.mcc --data-path docs --split 1,0,0 --steps 4 --metrics packed --quiet").succeeds();
    // The same documents follow, each in a sequence of its own.
    let blend = Blend { prefixes: vec![dir.path("docs")], weights: None };
    let source = Source::Shared { blend, split: Split::parse("1,0,0").expect("a split") };
    let request = Request { seed: 0, ..Request::new(source, [Some(4), None, None], 16) };
    let [Some(set), ..] = dataset::open(&request).expect("samples").parts else { panic!("it trains") };
    let (mut tokens, mut labels, mut pieces) = (vec![], vec![], vec![]);
    for n in 0..4 {
        let mut sample = [0i64; 17];
        set.sample(n, &mut sample, &mut pieces).expect("a sample");
        assert_eq!(pieces.iter().map(|p| p.at).collect::<Vec<_>>(), [0, 8, 16]);
        for document in sample[..16].chunks(8) {
            tokens.extend(document.iter().map(|t| *t as i32));
            labels.extend(document[1..].iter().map(|t| *t as i32).chain([-100]));
        }
    }
    save_array(&dir.path("tokens.npy"), &[4, 2, 8], tokens);
    save_array(&dir.path("labels.npy"), &[4, 2, 8], labels);
    dir.line("run alone.mcc --data tokens=tokens.npy --data targets=labels.npy --steps 4 --metrics alone --quiet").succeeds();
    near(&losses(&dir, "packed"), &losses(&dir, "alone"));
}

/// Each validation data set has a loss, which is that of a run that has it alone.
#[test]
fn each_validation_data_set_has_a_loss_of_its_own() {
    let dir = two_sets(&[("dp", "--dp 2 --micro-batch-size 2")]);
    let run = |words: &str| dir.line(&format!("run dp.mcc --steps 2 --eval-interval 1 --eval-iters 2 --threads-per-rank 1 {words}"));
    let valid = |file: &str, name: &str| metrics(&dir.path(file)).iter().map(|l| l[name].as_f64().expect("a loss")).collect::<Vec<_>>();
    let own = "--train-data-path wiki --valid-data-path";
    let ran = run(&format!("{own} wiki code --multiple-validation-sets --metrics both --tensorboard-dir board")).succeeds();
    assert!(ran.stdout.contains("  held-out loss 5.") && ran.stdout.contains(" (code 5."), "{}", ran.stdout);
    assert!(ran.stderr.contains("validation loss of `wiki` 5.") && ran.stderr.contains(", validation loss of `code` 5."), "{}", ran.stderr);
    for name in ["wiki", "code"] {
        run(&format!("{own} {name} --metrics {name}")).succeeds();
        near(&valid("both", &format!("valid_loss/{name}")), &valid(name, "valid_loss"));
    }
    let mean: Vec<f64> = valid("wiki", "valid_loss").iter().zip(valid("code", "valid_loss")).map(|(a, b)| (a + b) / 2.0).collect();
    near(&valid("both", "valid_loss"), &mean);
    // The data sets of a split have losses too, under other names and over all samples.
    let words = "--data-path 0.7 wiki 0.3 code --split 60,40,0 --multiple-validation-sets --validation-set-names a b --full-validation";
    run(&format!("{words} --metrics full")).succeeds();
    assert!(valid("full", "valid_loss/a").iter().chain(&valid("full", "valid_loss/b")).all(|loss| (5.0..6.0).contains(loss)));
    run(&format!("{own} wiki code --multiple-validation-sets --validation-set-names a")).misuses_with(&["1 names and 2 data sets"]);
    run(&format!("{own} 1 wiki 2 code --multiple-validation-sets")).misuses_with(&["each has a loss of its own, and so no weight"]);
    run("--data-path 0.7 wiki 0.3 code --full-validation").misuses_with(&["`--full-validation` takes all samples", "leave these out"]);
    run("--train-data-path wiki --full-validation").misuses_with(&["`--full-validation`", "add `--valid-data-path PREFIX`"]);
    run("--data-path wiki --validation-set-names a").misuses_with(&["--multiple-validation-sets"]);
}

/// A tokenizer goes from a data set into checkpoints, weights and exports, and comes in with imported models.
#[test]
fn a_tokenizer_goes_along_byte_for_byte() {
    let dir = Dir::new();
    let bytes = |file: &str| fs::read(dir.path(file)).unwrap_or_else(|e| panic!("{file}: {e}"));
    dir.write("a.txt", "The quick brown fox jumps over the lazy dog. ".repeat(50));
    dir.line("data train-tokenizer a.txt --tokens 257 -o tokenizer").succeeds();
    dir.line("data train-tokenizer a.txt --tokens 280 -o other").succeeds();
    for (tokenizer, name) in [("tokenizer", "a"), ("other", "b")] {
        dir.line(&format!("data tokenize a.txt --tokenizer {tokenizer} -o {name}")).succeeds();
    }
    dir.line("compile {models}/gpt2.mdl -D vocab=280 -D hidden=16 -D heads=2 -D layers=1 -D seq=16 --lr-warmup-iters 0 -o m.mcc").succeeds();
    let ran = dir.line("run m.mcc --data-path a --split 1,0,0 --steps 2 --save saves --save-weights w.safetensors").succeeds();
    assert!(!ran.stderr.contains("tokenizer"), "{}", ran.stderr);
    for (weights, out) in [("saves/step-2", "of-run"), ("w.safetensors", "of-weights")] {
        dir.line(&format!("export hf {weights} -o {out}")).succeeds();
        for file in ["tokenizer.json", "tokenizer_config.json"] {
            assert_eq!(bytes(&format!("{out}/{file}")), bytes(&format!("tokenizer/{file}")), "{out}");
        }
    }
    dir.line("import hf of-run -o in").succeeds();
    assert_eq!(bytes("in/tokenizer.json"), bytes("tokenizer/tokenizer.json"));
    // Data of another tokenizer than the weights' give a warning, and so do data of two tokenizers.
    let ran = dir.line("run m.mcc --init in/weights.safetensors --data-path b --split 1,0,0 --steps 1").succeeds();
    assert!(ran.stderr.contains("warning: `") && ran.stderr.contains("`mcc data tokenize --tokenizer in`"), "{}", ran.stderr);
    let ran = dir.line("run m.mcc --data-path 1 a 1 b --split 1,0,0 --steps 1").succeeds();
    assert!(ran.stderr.contains("were made by different tokenizers"), "{}", ran.stderr);
    dir.line("export hf saves -o none")
        .fails_with(&["`saves` is a directory of checkpoints", "the newest of them, `saves/step-2`, which `mcc export hf`"]);
    dir.line("export hf saves/step-2 -o of-run").fails_with(&["`of-run/", "exists: --force replaces it"]);
    fs::remove_file(dir.path("b.bin")).expect("removed");
    fs::remove_file(dir.path("b.idx")).expect("removed");
    dir.line("data tokenize a.txt --tokenizer tokenizer -o b").misuses_with(&["`b.tokenizer` has another tokenizer: --force replaces it"]);
}

/// Writes the mask of a data set of documents of these lengths: of each, the first third counts for nothing.
fn write_mask(dir: &Dir, name: &str, lengths: impl IntoIterator<Item = usize>) {
    let mut out = Writer::create(&mask::prefix(&dir.path(name)), Dtype::U8).expect("a mask");
    for length in lengths {
        let counts: Vec<u32> = (0..length).map(|at| u32::from(3 * at >= length)).collect();
        out.document(&counts, &[length]).expect("written");
    }
    out.finish().expect("finished");
}

/// Each document of the packed rows of a data set, in rows of its own of 16 tokens, as many in a step as there are
/// documents in the most crowded: what is left is filled with labels that do not count. Says how many that is.
fn alone(dir: &Dir, name: &str, masks: Masks, [steps, batch]: [usize; 2]) -> usize {
    let blend = Blend { prefixes: vec![dir.path(name)], weights: None };
    let source = Source::Shared { blend, split: Split::parse("1,0,0").expect("a split") };
    let request = Request::new(source, [Some((steps * batch) as u64), None, None], 16);
    let request = Request { seed: 0, layout: Layout::Packed(Overlong::Cut), masks, cache: Cache::Nowhere, ..request };
    let [Some(set), ..] = dataset::open(&request).expect("samples").parts else { panic!("it trains") };
    let mut of_steps = vec![];
    for step in 0..steps {
        let mut documents: Vec<(Vec<i32>, Vec<i32>)> = vec![];
        for n in step * batch..(step + 1) * batch {
            let (mut tokens, mut pieces, mut counted) = ([0i64; 17], vec![], [0; 17]);
            let sample = set.sample(n as u64, &mut tokens, &mut pieces).expect("a sample");
            set.counted(&sample, std::slice::from_ref(&(0..17)), &pieces, &mut counted).expect("a mask");
            let ends = pieces.iter().skip(1).map(|p| p.at as usize).chain([sample.tokens]);
            for (begin, end) in pieces.iter().map(|p| p.at as usize).zip(ends) {
                let label = |at: usize| if at < end && counted[at] == 1 { tokens[at] as i32 } else { -100 };
                let filled = |mut row: Vec<i32>, with| {
                    row.resize(16, with);
                    row
                };
                documents
                    .push((filled(tokens[begin..end].iter().map(|t| *t as i32).collect(), 0), filled((begin + 1..=end).map(label).collect(), -100)));
            }
        }
        of_steps.push(documents);
    }
    let most = of_steps.iter().map(Vec::len).max().unwrap_or(0);
    of_steps.iter_mut().for_each(|documents| documents.resize(most, (vec![0; 16], vec![-100; 16])));
    let (tokens, labels): (Vec<_>, Vec<_>) = of_steps.into_iter().flatten().unzip();
    let shape = [steps as u64, most as u64, 16];
    save_array(&dir.path("tokens.npy"), &shape, tokens.concat());
    save_array(&dir.path("labels.npy"), &shape, labels.concat());
    most
}

/// The losses of what [`alone`] wrote.
fn losses_alone(dir: &Dir, documents: usize, steps: usize) -> Vec<f64> {
    dir.line(&format!("{MODEL} -D seq=16 --global-batch-size {documents} --micro-batch-size {documents} -o alone.mcc")).succeeds();
    let data = "--data tokens=tokens.npy --data targets=labels.npy";
    dir.line(&format!("run alone.mcc {data} --steps {steps} --metrics alone --quiet --force")).succeeds();
    losses(dir, "alone")
}

const PACKED: &str = "-D seq=16 -D packed=true --global-batch-size 4";

#[test]
fn packed_documents_train_on_any_mesh_as_they_do_alone() {
    let dir = Dir::new();
    let lengths = || (0..90).map(|n| 1 + n * 7 % 19);
    write(&dir, "docs", lengths());
    write_mask(&dir, "docs", lengths());
    for (name, mesh) in [("one", "--micro-batch-size 4"), ("dp", "--dp 2 --micro-batch-size 1"), ("axes", "--cp 2 --pp 2 --micro-batch-size 2")] {
        dir.line(&format!("{MODEL} {PACKED} {mesh} -o {name}.mcc")).succeeds();
    }
    let run = |words: &str| dir.line(&format!("run {words} --threads-per-rank 1"));
    let sets = "--data-path docs --split 1,0,0 --packing --steps 6";
    let mut seen = vec![];
    for (masks, flag) in [(Masks::Nowhere, ""), (Masks::Beside, " --loss-mask")] {
        let most = alone(&dir, "docs", masks, [6, 4]);
        assert!(most > 8, "several documents in a row: {most}");
        let expected = losses_alone(&dir, most, 6);
        for mesh in ["one", "dp", "axes"] {
            let ran = run(&format!("{mesh}.mcc {sets}{flag} --metrics {mesh} --force")).succeeds();
            near(&losses(&dir, mesh), &expected);
            let packed = "note: training: 90 documents of 10.0 tokens (median 10, longest 19) are packed into ";
            assert_eq!(ran.stderr.matches(packed).count(), 1, "{}", ran.stderr);
            assert!(ran.stderr.contains(" % full; cut to a row: 14, which leaves out 3.1 % of all tokens"), "{}", ran.stderr);
            let says = "there are loss masks beside";
            assert_eq!(ran.stderr.contains(says), masks == Masks::Nowhere, "{}", ran.stderr);
        }
        // Another mesh goes on with the rows that would have come, even where more steps take more epochs.
        run(&format!("dp.mcc {sets}{flag} --exit-interval 2 --save saved --force --quiet")).fails(75, &[]);
        let on = sets.replace("--steps 6", "--steps 40");
        for mesh in ["one", "axes"] {
            let file = format!("{mesh}-{masks:?}");
            run(&format!("{mesh}.mcc {on}{flag} --load saved --exit-interval 6 --metrics {file} --force --quiet")).fails(75, &[]);
            near(&losses(&dir, &file), &expected[2..]);
        }
        seen.push(expected);
    }
    assert!(seen[0].iter().zip(&seen[1]).all(|(all, some)| (all - some).abs() > 1e-3), "{seen:?}");
}
