//! What goes wrong is named, and nothing stays behind.

use crate::mcc::{CommandOutput, Dir, Weights, load_weights, save_array, save_weights};
use runtime::artifact::Manifest;
use runtime::target::{Processor, Target};
use std::fs;
use std::os::unix::fs::FileExt;
use std::process::Stdio;
use std::time::{Duration, Instant};

const TINY: &str = "-D vocab=256 -D hidden=16 -D heads=4 -D layers=2 -D seq=16";

/// A directory with `out.mcc`, a small GPT-2, and `text.txt`.
fn gpt2(mesh: &str) -> Dir {
    let dir = Dir::new();
    dir.write("text.txt", "The quick brown fox jumps over the lazy dog. ".repeat(40));
    dir.line(&format!("compile {{models}}/gpt2.mdl {TINY} {mesh} -o out.mcc")).succeeds();
    dir
}

/// Process id and command line of every child of a process.
fn children(parent: u32) -> Vec<(u32, String)> {
    let processes = fs::read_dir("/proc").expect("processes").filter_map(|e| e.ok()?.file_name().to_str()?.parse::<u32>().ok());
    let of_parent = |pid: &u32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The process's name, in brackets, may hold anything.
        stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse::<u32>().ok()
    };
    processes
        .filter(|pid| of_parent(pid) == Some(parent))
        .filter_map(|pid| Some((pid, String::from_utf8_lossy(&fs::read(format!("/proc/{pid}/cmdline")).ok()?).replace('\0', " "))))
        .collect()
}

/// Looks until it finds something.
fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(start.elapsed() < Duration::from_secs(120), "no {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn shared_memory() -> Vec<String> {
    let names = fs::read_dir("/dev/shm").map(|d| d.filter_map(|e| e.ok()?.file_name().into_string().ok()).filter(|n| n.contains("mcc")).collect());
    names.unwrap_or_default()
}

#[test]
fn a_killed_rank_ends_the_run_and_is_named() {
    let dir = gpt2("--tp 2 --pp 2");
    let before = shared_memory();
    let mut run = dir.command("run out.mcc --data text.txt --steps 100000000 --save-weights w.safetensors --metrics m.jsonl".split(' '));
    let run = run.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("mcc starts");
    wait_for("second step", || (fs::read_to_string(dir.path("m.jsonl")).ok()?.lines().count() > 2).then_some(()));
    let ranks = children(run.id());
    assert_eq!(ranks.len(), 4, "{ranks:?}");
    let (victim, _) = ranks.iter().find(|(_, c)| c.contains("--rank 2 ")).expect("rank 2");
    assert!(std::process::Command::new("kill").args(["-9", &victim.to_string()]).status().expect("kill").success());
    let killed = Instant::now();
    let ended = run.wait_with_output().expect("the end");
    // The run has 5 seconds, and as much again because the machine may be busy with other tests.
    assert!(killed.elapsed() < Duration::from_secs(10), "it took {:?}", killed.elapsed());
    CommandOutput::new(ended).fails_with(&["rank 2", "signal 9"]);
    for (pid, line) in ranks {
        let now = fs::read(format!("/proc/{pid}/cmdline")).map(|c| String::from_utf8_lossy(&c).replace('\0', " "));
        assert!(now.is_err() || now.is_ok_and(|now| now != line), "{line} stays behind");
    }
    assert_eq!(dir.entries(), ["m.jsonl", "out.mcc", "text.txt"]);
    assert_eq!(shared_memory(), before);
}

#[test]
fn a_killed_launcher_takes_its_ranks_along() {
    let dir = gpt2("--tp 2");
    let mut run = dir.command("run out.mcc --data text.txt --steps 100000000 --save-weights w.safetensors --metrics m.jsonl".split(' '));
    let mut run = run.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("mcc starts");
    wait_for("first step", || (fs::read_to_string(dir.path("m.jsonl")).ok()?.lines().count() > 1).then_some(()));
    let ranks = children(run.id());
    assert_eq!(ranks.len(), 2);
    run.kill().expect("killed");
    run.wait().expect("the end");
    wait_for("end of the ranks", || {
        ranks
            .iter()
            .all(|(pid, line)| !fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|c| String::from_utf8_lossy(&c).replace('\0', " ") == *line))
            .then_some(())
    });
    assert_eq!(dir.entries(), ["m.jsonl", "out.mcc", "text.txt"]);
}

#[test]
fn a_world_of_the_wrong_size_is_refused() {
    let dir = gpt2("--tp 2");
    let run = |variables: &[(&str, &str)]| {
        let mut c = dir.command("run out.mcc --data text.txt --steps 1".split(' '));
        CommandOutput::new(c.envs(variables.iter().copied()).output().expect("mcc starts"))
    };
    run(&[("RANK", "0"), ("WORLD_SIZE", "8")]).fails_with(&["torchrun started 8 ranks, but the artifact is for 2"]);
    run(&[("SLURM_STEP_ID", "0"), ("SLURM_PROCID", "1"), ("SLURM_STEP_NUM_TASKS", "3")])
        .fails_with(&["srun started 3 ranks, but the artifact is for 2"]);
    run(&[("RANK", "2"), ("WORLD_SIZE", "2")]).fails_with(&["`RANK` is 2, but `WORLD_SIZE` is 2: ranks count from 0"]);
    let named = [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost")];
    run(&named).fails_with(&["`MASTER_PORT` is not set; --rendezvous HOST:PORT"]);
    run(&[&named[..], &[("MASTER_PORT", "http")]].concat()).fails_with(&["`MASTER_PORT`, which torchrun sets, is `http`, not a port"]);
    // The script of a batch job has these variables, and is no rank.
    run(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "3"), ("SLURM_JOB_ID", "7")]).succeeds();
    run(&[("RANK", "0"), ("WORLD_SIZE", "1")]).succeeds();
}

/// Runs with one file of the artifact changed.
fn damaged(dir: &Dir, file: &str, change: impl FnOnce(&mut Vec<u8>)) -> CommandOutput {
    let path = dir.path("out.mcc").join(file);
    let whole = fs::read(&path).expect("part of the artifact");
    let mut bytes = whole.clone();
    change(&mut bytes);
    fs::write(&path, bytes).expect("written");
    let ran = dir.line("run out.mcc --data text.txt --steps 1");
    fs::write(&path, whole).expect("restored");
    ran
}

#[test]
fn a_damaged_artifact_is_refused_by_name() {
    let dir = gpt2("--tp 2");
    for file in ["job.bin", "kernels.so", "kernels.json", "dumps/graph.txt"] {
        damaged(&dir, file, |b| b.truncate(b.len() / 2)).fails_with(&[file, "damaged"]);
        damaged(&dir, file, |b| b[100] ^= 4).fails_with(&[file, "damaged"]);
        damaged(&dir, file, |b| b.clear()).fails_with(&[file, "damaged"]);
    }
    damaged(&dir, "manifest.json", |b| b.truncate(b.len() / 2)).fails_with(&["manifest.json", "damaged"]);
    fs::remove_file(dir.path("out.mcc/kernels.so")).expect("removed");
    dir.line("run out.mcc --data text.txt --steps 1").fails_with(&["kernels.so"]);
    dir.line("dump out.mcc").fails_with(&["kernels.so"]);
}

fn processor(features: &str) -> Target {
    Target::Cpu(Processor { cpu: "x86-64".into(), features: features.into() })
}

#[test]
fn an_artifact_from_elsewhere_is_refused_by_name() {
    let dir = gpt2("");
    let told = |change: fn(&mut Manifest)| {
        damaged(&dir, "manifest.json", |b| {
            let mut manifest: Manifest = serde_json::from_slice(b).expect("JSON");
            change(&mut manifest);
            *b = manifest.sealed().bytes();
        })
    };
    told(|m| m.format = 99).fails_with(&["`out.mcc` has format 99", "compile the model again"]);
    // Only some CPUs of 2012 to 2017 have tbm.
    told(|m| m.target = processor("+sse3,+tbm")).fails_with(&["`out.mcc` cannot run on this machine", "tbm"]);
    told(|m| m.target = processor("+6aes")).fails_with(&["with 6aes, of which this mcc does not know whether this one has it"]);
    told(|m| m.ranks = 4).fails_with(&["manifest.json"]);
    told(|m| m.kernels = 1).fails_with(&["manifest.json"]);
}

#[test]
fn what_is_no_artifact_is_refused_and_left_alone() {
    let dir = Dir::new();
    fs::create_dir(dir.path("other")).expect("created");
    dir.write("other/file", "mine");
    dir.line("run other --data x").fails_with(&["`other` is a directory, not an artifact"]);
    dir.line("run missing --data x").fails_with(&["missing"]);
    dir.line("run other/file --data x").fails_with(&["other/file"]);
    dir.line(&format!("compile {{models}}/gpt2.mdl {TINY} -o other")).fails_with(&["`other` exists and is not an artifact; it was left alone"]);
    assert_eq!(fs::read(dir.path("other/file")).expect("still there"), b"mine");
    assert_eq!(dir.entries(), ["other"]);
}

/// A text's own loss, which replaces labels before it uses them.
#[test]
fn labels_that_a_text_replaces_are_checked_all_the_same() {
    let dir = Dir::new();
    let text = |input: &str, index: &str| {
        format!(
            "model own(batch, classes = 10, features = 4) {{
              input x: f32[batch, features];
              input label: i32[batch]{input};
              let log_p = linear(x, features, classes);
              let keep = label >= 0 and label < classes;
              {index}
              loss sum(where(keep, each, 0)) / maximum(sum(f32(keep)), 1);
            }}"
        )
    };
    let by_table = "let each = cross_entropy(log_p, where(keep, label, 0), classes);";
    let by_product = "let each = -sum(where(one_hot(label, classes), log_p, 0), over: classes);";
    let labels = |wrong: i64| {
        save_array(&dir.path("label.npy"), &[1, 4], [1, 2, wrong, 9]);
        save_array(&dir.path("x.npy"), &[1, 4, 4], (0..16).map(|i| i % 3));
    };
    let run = "run out.mcc --data x=x.npy --data label=label.npy --steps 1";
    for index in [by_table, by_product] {
        dir.write("own.mdl", text("", index));
        dir.line("compile own.mdl --global-batch-size 4 --micro-batch-size 4 --lr-warmup-iters 0 -o out.mcc").succeeds();
        for wrong in [9999, 10, -1] {
            labels(wrong);
            dir.line(run).fails_with(&["label.npy", &format!("element 2 is {wrong}"), "`label` takes 0 to 9", "the text says so: `@any`"]);
        }
        labels(3);
        dir.line(run).succeeds();
        dir.write("own.mdl", text(" @any", index));
        dir.line("compile own.mdl --global-batch-size 4 --micro-batch-size 4 --lr-warmup-iters 0 -o out.mcc").succeeds();
        labels(9999);
        dir.line(run).succeeds();
    }
}

#[test]
fn bad_data_is_refused_before_ranks_start() {
    let dir = gpt2("");
    dir.line("run out.mcc --steps 1").misuses_with(&["no data for input `tokens`"]);
    dir.line("run out.mcc --data nothing.txt --steps 1").fails_with(&["nothing.txt"]);
    dir.line("run out.mcc --data colour=text.txt --steps 1").misuses_with(&["no input `colour`", "tokens"]);
    dir.line("run out.mcc --data text.txt --data tokens=text.txt --steps 1").misuses_with(&["fed twice"]);
    save_array(&dir.path("wide.npy"), &[2, 1, 17], (0..34).map(|i| if i == 20 { 256 } else { i }));
    dir.line("run out.mcc --data wide.npy").fails_with(&["wide.npy", "element 20 is 256", "`tokens` takes 0 to 255"]);
    // The last element of a row is a label only.
    for label in [9999, -1] {
        save_array(&dir.path("label.npy"), &[1, 1, 17], (0..17).map(|i| if i == 16 { label } else { i }));
        dir.line("run out.mcc --data label.npy").fails_with(&["label.npy", &format!("element 16 is {label}"), "`targets` takes -100 or 0 to 255"]);
    }
    save_array(&dir.path("label.npy"), &[1, 1, 17], (0..17).map(|i| if i == 16 { -100 } else { i }));
    dir.line("run out.mcc --data label.npy").succeeds();
    dir.write("bytes.bin", (0..400u16).flat_map(u16::to_le_bytes).collect::<Vec<_>>());
    let run = "run out.mcc --data bytes.bin --steps 1";
    dir.line(run).fails_with(&["bytes.bin", "byte 0 (0x00) is zero", "--data-dtype uint16", "--bytes"]);
    dir.line(&format!("{run} --bytes")).succeeds();
    dir.line(&format!("{run} --data-dtype uint16")).succeeds();
    dir.line(&format!("{run} --data-dtype int32")).fails_with(&["bytes.bin", "element 0 is 65536"]);
    dir.line("run out.mcc --data label.npy --bytes")
        .misuses_with(&["--bytes and --data-dtype are for files that do not say what they hold", "label.npy"]);
    dir.write("lines.jsonl", "{\"text\": \"The quick brown fox\"}\n".repeat(9));
    dir.line("run out.mcc --data lines.jsonl --steps 1").fails_with(&["lines.jsonl", "it is JSON", "--bytes"]);
    dir.line("run out.mcc --data text.txt --valid-data lines.jsonl --eval-interval 1 --steps 1").fails_with(&["lines.jsonl", "it is JSON"]);
    save_array(&dir.path("short.npy"), &[2, 1, 9], 0..18);
    dir.line("run out.mcc --data short.npy").fails_with(&["short.npy"]);
    save_array(&dir.path("few.npy"), &[2, 1, 17], 0..34);
    dir.line("run out.mcc --data few.npy --steps 3").fails_with(&["`few.npy` has 2 steps; step 3 was asked for"]);
    dir.write("half.npy", &fs::read(dir.path("few.npy")).expect("read")[..100]);
    dir.line("run out.mcc --data half.npy").fails_with(&["half.npy"]);
    dir.write("empty.txt", "");
    dir.line("run out.mcc --data empty.txt").fails_with(&["empty.txt"]);
    dir.line("run out.mcc --data text.txt --steps 1 --seed 9007199254740992").misuses_with(&["seed"]);
    dir.line("run out.mcc --data text.txt --steps 1 --save-weights no/such/w.safetensors").fails_with(&["no/such/w.safetensors"]);
}

/// The weights of a run without steps.
fn weights(dir: &Dir) -> Weights {
    dir.line("run out.mcc --data text.txt --steps 0 --save-weights w.safetensors").succeeds();
    load_weights(&dir.path("w.safetensors"))
}

#[test]
fn weights_that_do_not_fit_are_refused_by_name() {
    let dir = gpt2("--tp 2");
    let good = weights(&dir);
    let run = |change: &dyn Fn(&mut Weights)| {
        let mut weights = good.clone();
        change(&mut weights);
        save_weights(&dir.path("w.safetensors"), &weights);
        dir.line("run out.mcc --data text.txt --steps 1 --init w.safetensors")
    };
    run(&|_| {}).succeeds();
    run(&|w| drop(w.remove("layers.1.attn.q.w"))).fails_with(&["w.safetensors", "layers.1.attn.q.w"]);
    run(&|w| drop(w.insert("layers.7.attn.q.w".into(), (vec![1], vec![0.0])))).fails_with(&["layers.7.attn.q.w"]);
    run(&|w| drop(w.insert("wpe".into(), (vec![4, 64], vec![0.0; 256])))).fails_with(&["wpe", "4", "64", "16"]);
    dir.write("w.safetensors", "nonsense");
    dir.line("run out.mcc --data text.txt --steps 1 --init w.safetensors").fails_with(&["w.safetensors", "not a safetensors file"]);
    dir.line("run out.mcc --data text.txt --steps 1 --init none.safetensors").fails_with(&["none.safetensors"]);
}

#[test]
fn a_loss_that_is_not_finite_is_traced_to_the_rank_and_the_op() {
    let dir = gpt2("--pp 2");
    let mut bad = weights(&dir);
    // Layer 1 belongs to the second stage.
    bad.get_mut("layers.1.mlp.up.w").expect("a parameter").1.fill(3e38);
    save_weights(&dir.path("bad.safetensors"), &bad);
    let said = dir.line("run out.mcc --data text.txt --steps 2 --init bad.safetensors --save-weights never.safetensors");
    let said = said.fails_with(&["step 1", "is not finite", "rank 1"]).stderr;
    assert!(said.contains("layers.1.mlp"), "{said}");
    assert_eq!(dir.entries(), ["bad.safetensors", "out.mcc", "text.txt", "w.safetensors"]);
}

#[test]
fn steps_that_are_not_finite_are_skipped_as_often_as_allowed_and_nothing_is_saved_of_them() {
    let dir = gpt2("--tp 2");
    let mut bad = weights(&dir);
    bad.get_mut("ln_f.w").expect("a parameter").1.fill(3e38);
    save_weights(&dir.path("bad.safetensors"), &bad);
    let run = "run out.mcc --data text.txt --init bad.safetensors --save-weights after.safetensors --on-nonfinite skip";
    dir.line(&format!("{run} --steps 2 --metrics m.jsonl")).fails_with(&["nothing was trained", "in all of 2 steps"]);
    assert!(crate::mcc::metrics(&dir.path("m.jsonl")).iter().all(|m| m["skipped"] == true && m["loss"].is_null()));
    dir.line(&format!("{run} --steps 9 --max-skips 3")).fails_with(&["3 steps in a row were skipped by step 3", "--max-skips allows 3"]);
    assert_eq!(dir.entries(), ["bad.safetensors", "m.jsonl", "out.mcc", "text.txt", "w.safetensors"]);
    bad.get_mut("ln_f.w").expect("a parameter").1[3] = f32::NAN;
    save_weights(&dir.path("bad.safetensors"), &bad);
    dir.line(&format!("{run} --steps 2")).fails_with(&["bad.safetensors`: element 3 of `ln_f.w` is NaN"]);
}

/// Rows for 2 groups of experts, with room for less than half of them in either: some group gets more.
#[test]
fn more_rows_of_experts_than_there_is_room_for_stop_the_run_by_name() {
    const SMALL: &str = "-D hidden=16 -D heads=4 -D kv_heads=2 -D head_dim=4 -D experts=4 -D expert_ffn=8 -D layers=2 -D seq=16";
    let dir = Dir::new();
    dir.write("text.txt", "The quick brown fox jumps over the lazy dog. ".repeat(40));
    for zero in [0, 1] {
        let mesh = format!("--dp 2 --ep 2 --zero {zero} --moe-buffer-factor 0.4 --moe-passes 1");
        dir.line(&format!("compile {{models}}/mixtral.mdl -D vocab=256 {SMALL} {mesh} -o out.mcc")).succeeds();
        let ran = dir.line("run out.mcc --data text.txt --steps 3 --save-weights w.safetensors");
        assert_eq!(ran.code, Some(1), "{}", ran.stderr);
        let told = [
            "error: rank ",
            ", step 1, forward microbatch 0 command ",
            "(limit of 7 for layers.0.moe at ",
            "mixtral.mdl:",
            " is more than 7: rows from a rank to",
        ];
        assert!(told.iter().all(|part| ran.stderr.contains(part)), "{}", ran.stderr);
        assert!(ran.stderr.contains("a greater --moe-buffer-factor makes room for more"), "{}", ran.stderr);
        assert!(!dir.path("w.safetensors").exists(), "nothing is saved of a step that stopped");
    }
}

#[test]
fn a_parameter_that_training_does_not_use_is_refused_by_line() {
    let dir = Dir::new();
    dir.write(
        "spare.mdl",
        "model m(batch, features = 4, classes = 3) {\n  input x: f32[batch, features];\n  input label: i32[batch];\n  param spare: [features] ~ normal(0.02);\n  \
         let logits = linear(x, features, classes, bias: true) as last;\n  loss token_loss(logits, label, over: classes);\n}\nplan { dp: batch; }\n",
    );
    dir.line("compile spare.mdl -o out.mcc").fails_with(&[
        "E0507",
        "training does not use parameter `spare`",
        "spare.mdl:4:9",
        "let the loss depend on it",
    ]);
}

/// Changes a bit of each copy of some bytes that a process has in memory of its own; gives how many there were.
fn flip(pid: u32, bytes: &[u8]) -> usize {
    let memory = fs::File::options().read(true).write(true).open(format!("/proc/{pid}/mem")).expect("memory of a child");
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("its maps");
    let mut found = 0;
    for line in maps.lines().filter(|line| line.split(' ').nth(1).is_some_and(|rights| rights.starts_with("rw"))) {
        let (from, to) = line.split(' ').next().and_then(|range| range.split_once('-')).expect("a range");
        let [from, to] = [from, to].map(|at| u64::from_str_radix(at, 16).expect("an address"));
        let mut all = vec![0; (to - from) as usize];
        if memory.read_exact_at(&mut all, from).is_err() {
            continue;
        }
        for at in (0..all.len().saturating_sub(bytes.len())).step_by(4).filter(|at| all[*at..].starts_with(bytes)) {
            memory.write_all_at(&[bytes[0] ^ 1], from + at as u64).expect("written");
            found += 1;
        }
    }
    found
}

#[test]
fn memory_that_changes_by_itself_is_found_by_comparing_replicas() {
    let dir = gpt2("--dp 3 --micro-batch-size 1 --global-batch-size 3 --lr 1e-30 --min-lr 1e-30");
    dir.line("run out.mcc --data text.txt --steps 1 --check-replicas 1 --save-weights w.safetensors -v").succeeds();
    // The learning rate is too small to change a weight.
    let weights = load_weights(&dir.path("w.safetensors"));
    let (_, values) = &weights["wpe"];
    let bytes: Vec<u8> = values[..16].iter().flat_map(|x| x.to_le_bytes()).collect();
    let line =
        "run out.mcc --init w.safetensors --data text.txt --steps 100000000 --check-replicas 2 --metrics m.jsonl --save-weights w2.safetensors";
    let mut run = dir.command(line.split(' '));
    let run = run.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("mcc starts");
    wait_for("fourth step", || (fs::read_to_string(dir.path("m.jsonl")).ok()?.lines().count() > 4).then_some(()));
    let ranks = children(run.id());
    let (victim, _) = ranks.iter().find(|(_, c)| c.contains("--rank 1 ")).expect("rank 1");
    assert!(flip(*victim, &bytes) > 0, "rank 1 holds its weights");
    let ended = CommandOutput::new(run.wait_with_output().expect("the end"));
    ended.fails_with(&["ranks 0, 2 and rank 1 hold different numbers of `wpe`", "they were the same after step"]);
    assert!(!dir.path("w2.safetensors").exists());
}
