//! `mcc checkpoint`, and runs that go on from what another mesh has saved.

use crate::mcc::{Dir, metrics, models};
use std::fs;

/// A pipeline with tensor parallelism, and ranks that share the same model out as `--zero 2` does.
fn two_meshes() -> Dir {
    let dir = Dir::new();
    dir.write("text.txt", "The quick brown fox jumps over the lazy dog, and then over a wall. ".repeat(40));
    let model = "compile {models}/gpt2.mdl -D vocab=251 -D hidden=32 -D heads=4 -D layers=2 -D seq=8 --lr 1e-3 --min-lr 1e-3 --lr-warmup-iters 5";
    dir.line(&format!("{model} --tp 2 --pp 2 -o pipeline.mcc")).succeeds();
    dir.line(&format!("{model} --dp 3 --micro-batch-size 1 --global-batch-size 3 --zero 2 -o shared.mcc")).succeeds();
    dir
}

#[test]
fn any_mesh_goes_on_from_any_others_checkpoint_and_all_forms_hold_the_same() {
    let dir = two_meshes();
    let run = |words: &str| dir.line(&format!("run {words} --data text.txt --quiet --threads-per-rank 1")).succeeds();
    run("pipeline.mcc --steps 6 --save pipeline --save-interval 3 --save-state state --save-weights weights.safetensors");
    let same = |words: &str| assert!(dir.line(&format!("checkpoint diff {words}")).succeeds().stdout.starts_with("the same: "), "{words}");
    same("pipeline/step-6 state");
    // No step is trained, so the other mesh holds what it read: a checkpoint, a file of it, and a checkpoint of that
    // file.
    dir.line("checkpoint convert pipeline/step-6 of-it.safetensors").succeeds();
    same("of-it.safetensors state");
    dir.line("checkpoint convert of-it.safetensors step-6").succeeds();
    same("step-6 pipeline/step-6");
    dir.line("checkpoint convert pipeline/step-6 only.safetensors --weights").succeeds();
    same("only.safetensors weights.safetensors");
    for (k, from) in ["--load pipeline", "--resume state", "--load step-6"].into_iter().enumerate() {
        run(&format!("shared.mcc --steps 8 {from} --allow-changed batch --save shared{k} --metrics m{k}"));
        same(&format!("shared0/step-8 shared{k}/step-8"));
        assert_eq!(fs::read_to_string(dir.path(&format!("m{k}"))).expect("metrics").lines().count(), 2);
    }
    run("pipeline.mcc --steps 9 --load shared0 --allow-changed batch --save back --save-interval 1 --keep 1");
    assert_eq!(fs::read_dir(dir.path("back")).expect("a directory").count(), 1);
    // Runs on both meshes from the same state differ by rounding alone.
    run("pipeline.mcc --steps 8 --load pipeline --force --save there");
    let differ = dir.line("checkpoint diff there/step-8 shared0/step-8").fails_with(&[]);
    assert!(differ.stdout.contains("differ, by "), "{}", differ.stdout);
}

#[test]
fn a_checkpoint_goes_to_pytorch_and_back() {
    let dir = two_meshes();
    dir.line("run shared.mcc --data text.txt --steps 3 --save ck --quiet").succeeds();
    dir.line("checkpoint convert ck/step-3 dcp --format dcp").succeeds();
    for made in ["dcp back", "ck/step-3 straight"] {
        dir.line(&format!("checkpoint convert {made}")).succeeds();
    }
    for file in ["checkpoint.json", "rank-0.safetensors"] {
        let read = |of: &str| fs::read(dir.path(&format!("{of}/{file}"))).expect("a file");
        assert!(read("back") == read("straight"), "{file}");
    }
    assert!(dir.line("checkpoint diff dcp ck/step-3").succeeds().stdout.starts_with("the same: "));
    let verified = dir.line("checkpoint verify dcp").succeeds().stdout;
    assert!(verified.contains("each element of its ") && verified.contains("have no hashes"), "{verified}");
    assert!(dir.line("checkpoint ls dcp").succeeds().stdout.starts_with("dcp  PyTorch (DCP)  step 3  "));
    dir.line("run shared.mcc --data text.txt --steps 4 --resume dcp --quiet").succeeds();
    dir.line("run shared.mcc --data text.txt --steps 4 --load dcp").fails_with(&["`--load dcp` is a checkpoint of PyTorch's (DCP), not a directory"]);
    // A flipped bit contradicts the checksum.
    let file = fs::read_dir(dir.path("dcp")).expect("there").flatten().map(|e| e.path()).find(|p| p.extension().is_some_and(|e| e == "distcp"));
    let file = file.expect("a file of items");
    let whole = fs::read(&file).expect("read");
    let mut bytes = whole.clone();
    let at = bytes.len() / 2;
    bytes[at] ^= 1;
    fs::write(&file, bytes).expect("written");
    for line in ["checkpoint convert dcp no.safetensors", "run shared.mcc --data text.txt --steps 4 --resume dcp --quiet"] {
        dir.line(line).fails_with(&["is not as it was written", "Invalid checksum"]);
    }
    fs::write(&file, whole).expect("written");
    // Weights alone are no state of a run, in this form too.
    dir.line("checkpoint convert ck/step-3 weights --format dcp --weights").succeeds();
    dir.line("run shared.mcc --data text.txt --steps 1 --init weights --quiet").succeeds();
    dir.line("checkpoint convert weights no").fails_with(&["`weights` does not say after which step it was saved"]);
    dir.line("checkpoint convert dcp weights").fails_with(&["`weights` exists: --force replaces it"]);
    dir.line("checkpoint convert dcp weights --force").succeeds();
    assert!(dir.path("weights/checkpoint.json").exists() && !dir.path("weights/.metadata").exists());
}

#[test]
fn what_pytorch_saved_is_read_but_no_run_goes_on_from_it() {
    let dir = Dir::new();
    let torch = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/dcp");
    let ran = dir.line(&format!("checkpoint convert {torch} w.safetensors")).succeeds();
    assert!(ran.stderr.contains("note: left out, as it is no tensor: `epoch`"), "{}", ran.stderr);
    assert!(dir.line(&format!("checkpoint diff {torch} w.safetensors")).succeeds().stdout.starts_with("the same: 98 numbers"));
    dir.line(&format!("checkpoint convert {torch} no")).fails_with(&["does not say after which step it was saved, so no run can go on from it"]);
    // This pickle would start a program.
    fs::create_dir(dir.path("evil")).expect("made");
    dir.write("evil/.metadata", "cos\nsystem\n(X\u{4}\0\0\0truetR.");
    dir.line("checkpoint convert evil w2.safetensors").fails_with(&[".metadata: byte 0: it names `os.system`", "nothing of it was executed"]);
}

#[test]
fn checkpoints_are_listed_verified_and_compared() {
    let dir = two_meshes();
    dir.line("run shared.mcc --data text.txt --steps 4 --save ck --save-interval 2 --quiet").succeeds();
    let listed = dir.line("checkpoint ls ck").succeeds().stdout;
    let lines: Vec<&str> = listed.lines().collect();
    assert!(matches!(lines[..], [a, b] if a.starts_with("ck/step-2  step 2 of 4  ") && b.contains("  gpt2  dp 3  ")), "{listed}");
    let json = dir.line("checkpoint ls ck/step-4 --json").succeeds().stdout;
    let one: serde_json::Value = serde_json::from_str(&json).expect("an object");
    assert_eq!((&one["step"], &one["mesh"]["dp"], &one["shards"]), (&4.into(), &3.into(), &3.into()));
    assert_eq!(dir.line("checkpoint verify ck").succeeds().stdout.matches(": whole, ").count(), 2);
    // A flipped bit of an element leaves all sizes right.
    let shard = dir.path("ck/step-4/rank-1.safetensors");
    let mut bytes = fs::read(&shard).expect("a shard");
    let at = bytes.len() / 2;
    bytes[at] ^= 1;
    fs::write(&shard, &bytes).expect("written");
    let found = dir.line("checkpoint verify ck").fails_with(&["ck/step-4/rank-1.safetensors` is not as it was written: the hash of bytes 0 to"]);
    assert!(found.stdout.starts_with("ck/step-2: whole, "), "{}", found.stdout);
    // A checkpoint that is named is not replaced by an earlier one.
    dir.line("run shared.mcc --data text.txt --steps 5 --load ck/step-4")
        .fails_with(&["rank-1.safetensors` is not as it was written", "an earlier checkpoint may be whole"]);
    let ran = dir.line("run shared.mcc --data text.txt --steps 5 --load ck").succeeds();
    let says = ["warning: `ck/step-4/rank-1.safetensors` is not as it was written", "going on from `ck/step-2`"];
    assert!(says.iter().all(|s| ran.stderr.contains(s)) && !ran.stderr.contains("set aside"), "{}", ran.stderr);
    dir.line("checkpoint diff ck/step-2 ck/step-4").fails_with(&["is not as it was written"]);
    dir.line("checkpoint convert ck/step-4 w.safetensors").fails_with(&["is not as it was written"]);
    assert!(!dir.path("w.safetensors").exists());
    // Half of the shard is gone, so the checkpoint before is taken.
    bytes.truncate(at);
    fs::write(&shard, &bytes).expect("written");
    let ran = dir.line("run shared.mcc --data text.txt --steps 5 --load ck").succeeds();
    let says = ["warning: the checkpoint `ck/step-4` cannot be read: rank-1.safetensors has ", "going on from `ck/step-2`"];
    assert!(says.iter().all(|s| ran.stderr.contains(s)), "{}", ran.stderr);
    dir.line("checkpoint ls ck").fails_with(&["the checkpoint `ck/step-4` cannot be read"]);
    dir.line("checkpoint ls shared.mcc").fails_with(&["`shared.mcc` is an artifact, not a directory of checkpoints"]);
    dir.line("checkpoint convert ck/step-2 ck/step-4").fails_with(&["`ck/step-4` exists: --force replaces it"]);
}

/// Flips a bit of a shard, and damages a manifest.
fn spoil(dir: &Dir, shard: &str, manifest: &str) {
    let mut bytes = fs::read(dir.path(shard)).expect("a shard");
    let at = bytes.len() / 2;
    bytes[at] ^= 1;
    dir.write(shard, bytes);
    dir.write(manifest, "no manifest");
}

#[test]
fn a_run_that_begins_again_by_itself_passes_by_what_is_damaged() {
    let dir = two_meshes();
    let line = "run shared.mcc --data text.txt --quiet --threads-per-rank 1";
    dir.line(&format!("{line} --steps 9 --save whole")).succeeds();
    dir.line(&format!("{line} --steps 8 --save ck --save-interval 2")).succeeds();
    spoil(&dir, "ck/step-8/rank-1.safetensors", "ck/step-6/checkpoint.json");
    let ran = dir.line(&format!("{line} --steps 9 --save ck --resume auto")).succeeds();
    let says = ["going on from `ck/step-8`", "`ck/step-8` is set aside as `ck/damaged-step-8`", "going on from `ck/step-4`"];
    assert!(says.iter().all(|s| ran.stderr.contains(s)), "{}", ran.stderr);
    assert!(dir.line("checkpoint diff ck/step-9 whole/step-9").succeeds().stdout.starts_with("the same: "));
    let mut left: Vec<_> = fs::read_dir(dir.path("ck")).expect("there").flatten().map(|e| e.file_name().into_string().expect("text")).collect();
    left.sort();
    assert_eq!(left, ["damaged-step-6", "damaged-step-8", "step-2", "step-4", "step-9"]);
    // If the manifest of the newest checkpoint is damaged, that checkpoint is not even tried.
    dir.write("ck/step-9/checkpoint.json", "no manifest");
    let ran = dir.line(&format!("{line} --steps 9 --save ck --resume auto")).succeeds();
    assert!(ran.stderr.contains("`ck/step-9` is set aside") && !ran.stderr.contains("going on from `ck/step-9`"), "{}", ran.stderr);
    assert!(dir.line("checkpoint diff ck/step-9 whole/step-9").succeeds().stdout.starts_with("the same: "));
}

#[test]
fn seeds_optimizers_precisions_and_fallbacks_that_are_not_the_runs_are_refused() {
    let dir = two_meshes();
    let model = "compile {models}/gpt2.mdl -D vocab=251 -D hidden=32 -D heads=4 -D seq=8 --lr 1e-3 --min-lr 1e-3 --lr-warmup-iters 5";
    let shared = "--dp 3 --micro-batch-size 1 --global-batch-size 3";
    dir.line(&format!("{model} -D layers=2 {shared} --weight-decay 0.5 --adam-beta1 0.5 -o decays.mcc")).succeeds();
    dir.line(&format!("{model} -D layers=3 {shared} -o deep.mcc")).succeeds();
    let run = |artifact: &str, words: &str| dir.line(&format!("run {artifact} --data text.txt --quiet --steps 4 {words}"));
    assert_eq!(run("shared.mcc", "--save ck --seed 7 --exit-interval 2").code, Some(75));
    run("shared.mcc", "--save ck --seed 8 --resume auto").misuses_with(&["has seed 7, with which it goes on: leave out --seed 8"]);
    let differs = ["updates were by AdamW with betas 0.9 and 0.95", "weight decay 0.5", "--allow-changed optimizer"];
    run("decays.mcc", "--load ck").fails_with(&differs);
    run("decays.mcc", "--load ck --allow-changed optimizer").succeeds();
    dir.line(&format!("{model} -D layers=2 {shared} --bf16 -o half.mcc")).succeeds();
    run("half.mcc", "--load ck").fails_with(&["activations were f32 and are bf16", "--allow-changed precision"]);
    run("half.mcc", "--load ck --allow-changed precision").succeeds();
    run("shared.mcc", "--fallback gone.mcc").fails_with(&["`gone.mcc`: there is no such artifact"]);
    run("shared.mcc", "--fallback deep.mcc").misuses_with(&["of different models", "layers = 3 (here 2)"]);
    run("shared.mcc", "--on-spike back --spike-factor 0.5").misuses_with(&["above 1"]);
    // The same command begins with weights, and goes on where there is a checkpoint.
    dir.line("checkpoint convert ck/step-2 w.safetensors --weights").succeeds();
    for (steps, goes_on) in [(1, false), (2, true)] {
        let ran = dir.line(&format!("run shared.mcc --data text.txt --steps {steps} --init w.safetensors --save tuned --resume auto")).succeeds();
        assert_eq!(ran.stderr.contains("going on from `tuned/step-1`"), goes_on, "{}", ran.stderr);
    }
    run("shared.mcc", "--init w.safetensors --resume w.safetensors").misuses_with(&["--init begins a run, --resume goes on with one"]);
}

#[test]
fn a_run_that_goes_on_with_something_else_says_what_and_asks_for_a_flag() {
    let dir = two_meshes();
    dir.line("run pipeline.mcc --data text.txt --steps 4 --save ck --save-state state --quiet").succeeds();
    let text = fs::read_to_string(dir.path("text.txt")).expect("a text");
    dir.write("moved.txt", &text);
    dir.write("other.txt", text.replacen("fox", "cat", 1));
    dir.write("more.txt", format!("{text}."));
    dir.write("gpt2.mdl", fs::read_to_string(models().join("gpt2.mdl")).expect("a model").replacen("gelu_tanh", "relu", 1));
    let sizes = "-D vocab=251 -D hidden=32 -D heads=4 -D layers=2 -D seq=8 --min-lr 1e-3 --lr-warmup-iters 5";
    dir.line(&format!("compile {{models}}/gpt2.mdl {sizes} --lr 2e-3 --global-batch-size 6 -o changed.mcc")).succeeds();
    dir.line(&format!("compile gpt2.mdl {sizes} --lr 1e-3 --global-batch-size 2 -o text.mcc")).succeeds();
    let go_on = |words: &str, flag: &str, says: &[&str]| {
        for from in ["--load ck", "--resume state"] {
            let line = |allowed: &str| dir.line(&format!("run {words} --steps 5 {from} --quiet {allowed}"));
            line("").fails_with(&[says, &["this run cannot become what that of", flag]].concat());
            // Permission for another change does not help.
            line(if flag.ends_with("data") { "--allow-changed rate" } else { "--allow-changed data" }).fails_with(says);
            line(flag).succeeds();
        }
    };
    dir.line("run pipeline.mcc --data moved.txt --steps 5 --load ck --quiet").succeeds();
    let data = "--allow-changed data";
    go_on("pipeline.mcc --data other.txt", data, &["`tokens` was `text.txt` and is `other.txt`, which has other content"]);
    go_on("pipeline.mcc --data more.txt", data, &["`tokens` was `text.txt` of ", " bytes and is `more.txt` of "]);
    let changed = ["a step had 2 sequences and has 6", "the learning rate of step 5 was to be 1.000e-3 and is 2.000e-3"];
    go_on("changed.mcc --data text.txt", "--allow-changed batch,rate", &changed);
    go_on("text.mcc --data text.txt", "--allow-changed model", &["the model was another: `gpt2.mdl` from line "]);
    let ran = dir.line("run pipeline.mcc --data text.txt --steps 5 --allow-changed data").succeeds();
    assert!(ran.stderr.contains("is about a run that goes on, and this one begins"), "{}", ran.stderr);
}

/// It ends as a run does whose data never had what made the loss jump.
#[test]
fn a_run_whose_loss_jumps_goes_back_and_leaves_the_data_out() {
    let dir = Dir::new();
    let sizes = "-D vocab=256 -D hidden=32 -D heads=4 -D layers=1 -D seq=8 --lr 1e-2 --min-lr 1e-2 --lr-warmup-iters 2 --global-batch-size 2";
    dir.line(&format!("compile {{models}}/gpt2.mdl {sizes} -o a.mcc")).succeeds();
    // Each step reads 16 bytes. Those of steps 34 and 35 are noise, of which the first byte continues the pattern.
    let (plain, noise) = ("abcdefgh".repeat(96), "aQ9#zK!5u%X2&j0?w*L3^m1=v(N4)b7+");
    dir.write("clean.txt", &plain);
    dir.write("noisy.txt", format!("{}{noise}{}", &plain[..33 * 16], &plain[33 * 16..]));
    let run = |words: &str| dir.line(&format!("run a.mcc --steps 40 --save-interval 10 {words}"));
    run("--data clean.txt --save clean --quiet").succeeds();
    let back = "--data noisy.txt --on-spike back --spike-factor 3 --save noisy";
    let ran = run(&format!("{back} --restarts 9 --log-dir log")).succeeds();
    let says = ["error: the loss of step 34 jumped to ", "going on from `noisy/step-", "without the data of steps ", " to 34, restart 1 of 9: "];
    assert!(says.iter().all(|s| ran.stderr.contains(s)), "{}", ran.stderr);
    let log = fs::read_to_string(dir.path("log/run.jsonl")).expect("a log");
    assert!(log.contains(r#""event":"restarted""#) && log.contains(r#""skipped":"#) && !log.contains(r#""skipped":0"#), "{log}");
    // All data since the checkpoint are left out, not the noise alone. The data repeat, so the result is the same.
    dir.line("checkpoint diff clean/step-40 noisy/step-40").succeeds();
}

/// A file with those tensors of another whose names are asked for.
fn part(dir: &Dir, from: &str, to: &str, has: impl Fn(&str) -> bool) {
    let bytes = fs::read(dir.path(from)).expect("a file");
    let all = safetensors::SafeTensors::deserialize(&bytes).expect("tensors");
    let some = all.tensors().into_iter().filter(|(name, _)| has(name));
    dir.write(to, safetensors::serialize(some, None).expect("tensors"));
}

#[test]
fn a_run_begins_with_the_weights_of_several_files() {
    let dir = two_meshes();
    let run = |words: &str| dir.line(&format!("run pipeline.mcc --data text.txt --threads-per-rank 1 {words}"));
    run("--steps 2 --save-weights w.safetensors --quiet").succeeds();
    let is_top = |name: &str| name.starts_with("layers.1.") || name.starts_with("wpe");
    part(&dir, "w.safetensors", "top", is_top);
    part(&dir, "w.safetensors", "base", |name| !is_top(name));
    part(&dir, "w.safetensors", "base-and-ln", |name| !is_top(name) || name == "layers.1.ln1.b");
    run("--steps 2 --init w.safetensors --save-weights whole --quiet").succeeds();
    run("--steps 2 --init base --init top --save-weights both --quiet").succeeds();
    dir.line("checkpoint diff whole both").succeeds();
    run("--steps 2 --init base-and-ln --init top").fails_with(&["`layers.1.ln1.b` is in `base-and-ln`, and in `top` too"]);
    run("--steps 2 --init base").fails_with(&["`base` does not fit the model", "`layers.1.attn.q.w` is missing", "more"]);
    run("--steps 2 --init base --allow-missing layers.attn.*").fails_with(&["`layers.1.ln1.b` is missing"]);
    run("--steps 2 --init base --allow-missing head.*").misuses_with(&["`--allow-missing head.*` fits no parameter of the model"]);
    // Weights that are drawn equal those of a run that begins without weights.
    let ran = run("--steps 0 --init base --allow-missing layers.1.* --allow-missing wpe* --save-weights drawn").succeeds();
    assert!(ran.stderr.contains("note: drawn, as no file of --init has them: "), "{}", ran.stderr);
    run("--steps 0 --save-weights fresh --quiet").succeeds();
    part(&dir, "drawn", "drawn-top", is_top);
    part(&dir, "fresh", "fresh-top", is_top);
    dir.line("checkpoint diff drawn-top fresh-top").succeeds();
    part(&dir, "drawn", "drawn-base", |name| !is_top(name));
    dir.line("checkpoint diff drawn-base base").succeeds();
    let ran = run("--steps 2 --init w.safetensors --allow-missing wpe*").succeeds();
    assert!(ran.stderr.contains("note: no weights are missing: --allow-missing changes nothing"), "{}", ran.stderr);
}

/// A run with a directory of checkpoints that is empty yet: it was killed in its first steps.
#[test]
fn a_run_that_died_before_its_first_checkpoint_begins_again_with_what_it_logged() {
    let dir = two_meshes();
    let lives = "run shared.mcc --data text.txt --quiet --metrics m --log-dir log --tensorboard-dir board";
    dir.line(&format!("{lives} --steps 3")).succeeds();
    fs::create_dir_all(dir.path("ck/.unfinished-123-0")).expect("made");
    dir.line(&format!("{lives} --steps 5 --save ck")).fails_with(&["`log/run.jsonl` exists: --force replaces it"]);
    let ran = dir.line(&format!("{lives} --steps 5 --save ck --resume auto")).succeeds();
    assert!(ran.stderr.contains("`ck` has no checkpoint, so the run begins; lines in `m` are of a life of it"), "{}", ran.stderr);
    let steps = || -> Vec<u64> { metrics(&dir.path("m")).iter().map(|line| line["step"].as_u64().expect("a step")).collect() };
    assert_eq!(steps(), [1, 2, 3, 1, 2, 3, 4, 5]);
    let (lines, log) = (metrics(&dir.path("m")), metrics(&dir.path("log/run.jsonl")));
    assert!((0..3).all(|k| lines[k]["loss"] == lines[k + 3]["loss"]), "another run: {lines:?}");
    let began: Vec<&serde_json::Value> = log.iter().filter(|line| line["event"] == "began").map(|line| &line["first"]).collect();
    assert_eq!(began, [1, 1]);
    assert!(dir.path("ck/step-5").exists());
    // Metrics are not appended to a file of something else.
    dir.write("other", "mine");
    dir.line("run shared.mcc --data text.txt --steps 2 --save new --resume auto --metrics other").fails_with(&["`other` holds something else"]);
}

#[test]
fn a_directory_of_checkpoints_is_one_runs() {
    let dir = two_meshes();
    let run = |words: &str| dir.line(&format!("run shared.mcc --data text.txt --quiet --save ck --save-interval 2 {words}"));
    run("--steps 6").succeeds();
    let steps = || {
        let mut names: Vec<String> =
            fs::read_dir(dir.path("ck")).expect("a directory").map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    };
    run("--steps 6").fails_with(&["`ck` has checkpoints up to step 6, from which this run does not go on (--load does"]);
    run("--steps 8 --load ck/step-2").fails_with(&["`ck` has checkpoints up to step 6, later ones than step 2, from which this run goes on"]);
    assert_eq!(steps(), ["step-2", "step-4", "step-6"]);
    run("--steps 5 --load ck/step-2 --force").succeeds();
    assert_eq!(steps(), ["step-2", "step-4", "step-5"]);
    run("--steps 7 --load ck --keep 2").succeeds();
    assert_eq!(steps(), ["step-6", "step-7"]);
    assert!(run("--steps 7 --resume auto").succeeds().stderr.contains("nothing is left to do"));
    run("--steps 7 --load ck").fails_with(&["nothing is left to do"]);
    // Leftovers of a killed run are removed; files that are not mcc's stay.
    fs::create_dir(dir.path("ck/.unfinished-123-0")).expect("made");
    dir.write("ck/notes.txt", "mine");
    run("--steps 1 --force").succeeds();
    assert_eq!(steps(), ["notes.txt", "step-1"]);
}
