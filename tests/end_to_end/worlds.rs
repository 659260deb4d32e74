//! Ranks that were started one by one, with the environment that torchrun and srun give them.

use crate::mcc::{Dir, Ran, metrics};
use std::net::TcpListener;
use std::process::Stdio;

const GPT2: &str = "compile {models}/gpt2.mdl --tp 2 --dp 2 --zero 1 --micro-batch-size 1 -D vocab=256 -D hidden=16 -D heads=4 -D layers=2 -D seq=8 --lr 1e-3 -o out.mcc";

fn model(dir: &Dir) {
    dir.write("text.txt", "The quick brown fox jumps over the lazy dog, and then over a wall. ".repeat(20));
    dir.line(GPT2).succeeds();
}

/// Starts `mcc run` once for each of these environments and waits for all.
fn start(dir: &Dir, arguments: &str, environments: &[Vec<(&str, String)>]) -> Vec<Ran> {
    let started: Vec<_> = environments
        .iter()
        .map(|e| {
            let mut c = dir.command(format!("run out.mcc --data text.txt {arguments}").split_whitespace());
            c.envs(e.iter().map(|(k, v)| (*k, v.as_str()))).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("mcc starts")
        })
        .collect();
    started.into_iter().map(|c| Ran::new(c.wait_with_output().expect("it ends"))).collect()
}

fn port() -> String {
    TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a port").port().to_string()
}

/// As `torchrun --nnodes 2 --nproc-per-node 2` starts four ranks on two machines.
fn torchrun(port: &str) -> Vec<Vec<(&'static str, String)>> {
    let rank = |r: u64| {
        let numbers = [("RANK", r), ("WORLD_SIZE", 4), ("LOCAL_RANK", r % 2), ("LOCAL_WORLD_SIZE", 2), ("GROUP_RANK", r / 2)];
        let mut all: Vec<(&'static str, String)> = numbers.map(|(k, v)| (k, v.to_string())).to_vec();
        all.extend([("MASTER_ADDR", "localhost".to_owned()), ("MASTER_PORT", port.to_owned())]);
        all
    };
    (0..4).map(rank).collect()
}

/// As srun starts four tasks on two nodes, in turn.
fn srun() -> Vec<Vec<(&'static str, String)>> {
    let task = |r: u64| {
        let numbers = [("SLURM_PROCID", r), ("SLURM_STEP_NUM_TASKS", 4), ("SLURM_LOCALID", r / 2), ("SLURM_NODEID", r % 2), ("SLURM_STEP_ID", 0)];
        let mut all: Vec<(&'static str, String)> = numbers.map(|(k, v)| (k, v.to_string())).to_vec();
        all.extend([("SLURM_JOB_ID", "7".to_owned()), ("SLURM_STEP_TASKS_PER_NODE", "2(x2)".into()), ("SLURM_STEP_NODELIST", "localhost".into())]);
        all
    };
    (0..4).map(task).collect()
}

#[test]
fn ranks_of_torchrun_and_srun_train_to_the_bits_of_one_launchers() {
    let dir = Dir::new();
    model(&dir);
    let flags = "--steps 3 --metrics m.jsonl --save w.safetensors --save-state s.safetensors";
    let read = || {
        let numbers = metrics(&dir.path("m.jsonl")).iter().map(|s| [s["loss"].clone(), s["grad_norm"].clone()]).collect::<Vec<_>>();
        (numbers, ["w", "s"].map(|n| std::fs::read(dir.path(&format!("{n}.safetensors"))).expect("saved")))
    };
    dir.line(&format!("run out.mcc --data text.txt {flags}")).succeeds();
    let want = read();
    let rendezvous = format!("{flags} --rendezvous localhost:{}", port());
    for (arguments, environments) in [(flags, torchrun(&port())), (rendezvous.as_str(), srun())] {
        let ran = start(&dir, arguments, &environments);
        for (rank, ran) in ran.into_iter().enumerate() {
            let said = ran.succeeds().stdout;
            assert_eq!(said.contains("loss") && said.contains("saved w.safetensors"), rank == 0, "{said}");
            assert_eq!(said.is_empty(), rank != 0, "{said}");
        }
        assert!(read() == want);
    }
}

#[test]
fn a_rank_that_is_not_started_is_named_by_all_others() {
    let dir = Dir::new();
    model(&dir);
    let mut environments = torchrun(&port());
    environments.remove(3);
    for ran in start(&dir, "--steps 3 --rendezvous-timeout 2", &environments) {
        ran.fails_with(&["rank 3 did not come in time"]);
    }
}
