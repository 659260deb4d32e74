//! `--check-first-step`: what ranks make of a few sequences, against the model interpreted on one rank.

use crate::mcc::{Dir, metrics};
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

const GPT2: &str = "gpt2.mdl -D vocab=256 -D hidden=16 -D heads=4 -D layers=2 -D seq=16 --lr 1e-2 --lr-warmup-iters 1 --lr-decay-style constant";

/// A model that was compiled for batches of eight sequences.
fn compiled(flags: &str) -> Dir {
    let dir = Dir::new();
    dir.write("text.txt", "The quick brown fox jumps over the lazy dog. ".repeat(40));
    dir.line(&format!("compile {{models}}/{flags} --global-batch-size 8 -o out.mcc")).succeeds();
    dir
}

#[test]
fn the_first_step_of_any_mesh_is_that_of_the_reference() {
    let mixtral =
        "mixtral.mdl -D vocab=256 -D hidden=16 -D heads=4 -D kv_heads=2 -D layers=2 -D seq=16 -D experts=4 -D expert_ffn=8 -D aux_per_sequence=true";
    for (flags, looked_at) in [
        (format!("{GPT2} --dp 2 --tp 2 --micro-batch-size 2"), "4 of the 8"),
        (format!("{GPT2} --pp 2 --micro-batch-size 2 --fp16"), "4 of the 8"),
        (format!("{mixtral} --dp 2 --ep 2 --zero 1 --bf16"), "4 of the 8"),
        // Dropout differs between sequences, so all of them have to be interpreted.
        (format!("{GPT2} -D dropout_rate=0.2 --dp 2"), "all 8"),
    ] {
        let dir = compiled(&flags);
        let check = if looked_at == "all 8" { "--check-first-step=8" } else { "--check-first-step" };
        let said = dir.line(&format!("run out.mcc --data text.txt --steps 1 {check}")).succeeds();
        assert!(said.stderr.contains(&format!("the first step, on {looked_at} sequences: loss ")), "{flags}: {}", said.stderr);
    }
}

#[test]
fn looking_at_the_first_step_changes_no_bit_of_a_run_that_begins_or_goes_on() {
    let dir = compiled(&format!("{GPT2} --dp 2 --micro-batch-size 2"));
    let trained = |flags: &str| {
        dir.line(&format!("run out.mcc --data text.txt --steps 3 --force --save-weights w.safetensors --metrics m.jsonl {flags}")).succeeds();
        let losses: Vec<_> = metrics(&dir.path("m.jsonl")).iter().map(|m| (m["step"].clone(), m["loss"].clone())).collect();
        (fs::read(dir.path("w.safetensors")).expect("weights"), losses)
    };
    let whole = trained("");
    assert!(whole == trained("--check-first-step=2"));
    dir.line("run out.mcc --data text.txt --steps 2 --save ck").succeeds();
    assert!(whole.0 == trained("--load ck --check-first-step").0);
}

#[test]
fn what_copies_of_sequences_do_not_show_is_refused() {
    let dir = compiled(&format!("{GPT2} -D dropout_rate=0.2"));
    dir.line("run out.mcc --data text.txt --steps 1 --check-first-step").fails_with(&["the first step has no reference", "--check-first-step=8"]);
    dir.line("run out.mcc --data text.txt --steps 1 --check-first-step=0").misuses_with(&["it should be a whole number from 1 on"]);
    dir.line("run out.mcc --data text.txt --steps 1 --check-first-step=3").misuses_with(&["the batch of 8 sequences is no multiple of that"]);
}

/// A student that begins as its teacher: what its loss and its gradient are made of cancels.
const STUDENT: &str = "model m(batch, seq = 8, vocab = 256, hidden = 16) {
  input tokens: i32[batch, seq];
  param table: [vocab, hidden] ~ normal(0.5);
  param out: [hidden, vocab] ~ normal(0.5);
  let h = stop_gradient(table)[vocab: tokens];
  let teacher = softmax(dot(h, stop_gradient(out), over: hidden), over: vocab);
  let student = softmax(dot(h, out, over: hidden), over: vocab);
  let far = sum(teacher * (log(teacher) - log(student)), over: vocab);
  loss mean(far);
}
";

#[test]
fn a_loss_that_begins_at_zero_is_held_to_the_size_of_its_terms() {
    let dir = Dir::new();
    dir.write("text.txt", "The quick brown fox jumps over the lazy dog. ".repeat(40));
    dir.write("m.mdl", STUDENT);
    for flags in ["--dp 2 --micro-batch-size 2", "--tp 2 --micro-batch-size 8", "--bf16"] {
        dir.line(&format!("compile m.mdl {flags} --global-batch-size 8 -o out.mcc")).succeeds();
        for check in ["--check-first-step", "--check-first-step=8"] {
            let said = dir.line(&format!("run out.mcc --data text.txt --steps 1 {check}")).succeeds();
            assert!(said.stderr.contains("sequences: loss "), "{flags} {check}: {}", said.stderr);
        }
    }
}

/// Nothing is lost by that, as nothing is done yet.
#[test]
fn a_signal_ends_a_run_that_interprets_its_first_step() {
    let dir = Dir::new();
    dir.write("text.txt", "The quick brown fox jumps over the lazy dog. ".repeat(400));
    let large = "-D vocab=2000 -D hidden=256 -D heads=4 -D layers=8 -D seq=256";
    dir.line(&format!("compile {{models}}/gpt2.mdl {large} --micro-batch-size 8 --global-batch-size 8 -o out.mcc")).succeeds();
    let mut command = dir.hearing("run out.mcc --data text.txt --steps 1 --check-first-step");
    let mut run = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("mcc starts");
    let mut said = BufReader::new(run.stderr.take().expect("a pipe")).lines().map_while(Result::ok);
    let begins = said.find(|line| line.contains("interpreting the first step")).expect("it says so");
    assert!(begins.contains(" multiplications in products and ") && begins.contains(", about "), "{begins}");
    let status = Command::new("kill").args(["-TERM", &run.id().to_string()]).status().expect("kill");
    assert!(status.success());
    let last: Vec<String> = said.collect();
    assert!(last.iter().any(|line| line.contains("SIGTERM came before the first step was interpreted")), "{last:?}");
    assert_eq!(run.wait().expect("it ran").code(), Some(1));
}
