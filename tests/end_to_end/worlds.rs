//! Ranks that were started one by one, with the environment that torchrun and srun give them.

use crate::mcc::{CommandOutput, Dir, metrics};
use std::fs;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};

const GPT2: &str = "compile {models}/gpt2.mdl --tp 2 --dp 2 --zero 1 --micro-batch-size 1 -D vocab=256 -D hidden=16 -D heads=4 -D layers=2 -D seq=8 --lr 1e-3 -o out.mcc";

fn model(dir: &Dir) {
    dir.write("text.txt", "The quick brown fox jumps over the lazy dog, and then over a wall. ".repeat(20));
    dir.line(GPT2).succeeds();
}

/// Starts `mcc run` once for each of these environments and waits for all.
fn start(dir: &Dir, arguments: &str, environments: &[Vec<(&str, String)>]) -> Vec<CommandOutput> {
    let started: Vec<_> = environments
        .iter()
        .map(|e| {
            let mut c = dir.command(format!("run out.mcc --data text.txt {arguments}").split_whitespace());
            c.envs(e.iter().map(|(k, v)| (*k, v.as_str()))).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("mcc starts")
        })
        .collect();
    started.into_iter().map(|c| CommandOutput::new(c.wait_with_output().expect("it ends"))).collect()
}

fn port() -> String {
    TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a port").port().to_string()
}

/// As `torchrun --nnodes 2 --nproc-per-node 2` starts four ranks on two machines.
fn torchrun(port: &str) -> Vec<Vec<(&'static str, String)>> {
    torchrun_of(2, port)
}

/// The same with so many machines.
fn torchrun_of(machines: u64, port: &str) -> Vec<Vec<(&'static str, String)>> {
    let rank = |r: u64| {
        let numbers = [("RANK", r), ("WORLD_SIZE", 2 * machines), ("LOCAL_RANK", r % 2), ("LOCAL_WORLD_SIZE", 2), ("GROUP_RANK", r / 2)];
        let mut all: Vec<(&'static str, String)> = numbers.map(|(k, v)| (k, v.to_string())).to_vec();
        all.extend([("MASTER_ADDR", "localhost".to_owned()), ("MASTER_PORT", port.to_owned())]);
        all
    };
    (0..2 * machines).map(rank).collect()
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

const SECRET: &str = "0123456789abcdef";

/// A file `secret` with these permissions.
fn secret(dir: &Dir, mode: u32) {
    dir.write("secret", format!("{SECRET}\n"));
    fs::set_permissions(dir.path("secret"), fs::Permissions::from_mode(mode)).expect("changed");
}

/// A machine of two is gone when the job starts again: what was compiled for one goes on from the checkpoint,
/// and says so.
#[test]
fn fewer_ranks_run_what_was_compiled_for_them() {
    let dir = Dir::new();
    model(&dir);
    dir.line(&GPT2.replace("--dp 2", "--dp 1 --global-batch-size 2").replace("out.mcc", "fewer.mcc")).succeeds();
    let flags = "--save ck --resume auto --quiet --fallback fewer.mcc --steps";
    start(&dir, &format!("{flags} 3"), &torchrun(&port())).into_iter().for_each(|r| drop(r.succeeds()));
    for ran in start(&dir, &format!("{flags} 5"), &torchrun_of(1, &port())) {
        let ran = ran.succeeds();
        assert!(ran.stderr.contains("warning: 2 ranks are here: `fewer.mcc` runs in place of `out.mcc`"), "{}", ran.stderr);
    }
    let listed = dir.line("checkpoint ls ck").succeeds().stdout;
    assert!(listed.contains("ck/step-3  step 3 of 3") && listed.contains("ck/step-5  step 5 of 5"), "{listed}");
    for ran in start(&dir, &format!("{flags} 7"), &torchrun_of(3, &port())) {
        ran.fails_with(&["6 ranks are here, for which neither `out.mcc` nor a --fallback is compiled: `fewer.mcc` has 2"]);
    }
}

#[test]
fn ranks_of_torchrun_and_srun_train_to_the_bits_of_one_launchers() {
    let dir = Dir::new();
    model(&dir);
    let flags = "--steps 3 --force --metrics m.jsonl --save-weights w.safetensors --save-state s.safetensors";
    let read = || {
        let numbers = metrics(&dir.path("m.jsonl")).iter().map(|s| [s["loss"].clone(), s["grad_norm"].clone()]).collect::<Vec<_>>();
        (numbers, ["w", "s"].map(|n| fs::read(dir.path(&format!("{n}.safetensors"))).expect("saved")))
    };
    dir.line(&format!("run out.mcc --data text.txt {flags}")).succeeds();
    let want = read();
    // Ranks meet without a secret at a loopback address, with one from a file, and with one from the environment.
    secret(&dir, 0o600);
    let [rendezvous, file] = [format!("{flags} --rendezvous localhost:{}", port()), format!("{flags} --secret-file secret")];
    let known = srun().into_iter().map(|mut e| {
        e.push(("MCC_SECRET", SECRET.to_owned()));
        e
    });
    for (arguments, environments) in [(flags, torchrun(&port())), (file.as_str(), torchrun(&port())), (rendezvous.as_str(), known.collect())] {
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

#[test]
fn ranks_that_others_could_join_are_refused_with_ways_out() {
    let dir = Dir::new();
    model(&dir);
    let open = "is no loopback address, so others could join them, and they share no secret";
    let cases = [
        ("", None, 0o600, 1, open),
        ("", None, 0o600, 1, "export MCC_SECRET=$(openssl rand -hex 32)"),
        ("", Some("short"), 0o600, 1, "the secret of `MCC_SECRET` has 5 bytes, it should have 16 to 65536"),
        ("", Some(""), 0o600, 1, "the secret of `MCC_SECRET` has 0 bytes"),
        ("--insecure-rendezvous", Some(SECRET), 0o600, 2, "--insecure-rendezvous goes without a secret, but MCC_SECRET is one"),
        ("--insecure-rendezvous --secret-file secret", None, 0o600, 2, "cannot be used with"),
        ("--secret-file secret", None, 0o644, 1, "has mode 644, so that others can read or write it: chmod 600 secret"),
        ("--secret-file none", None, 0o600, 1, "the secret file `none`: No such file"),
    ];
    for (flags, variable, mode, code, says) in cases {
        secret(&dir, mode);
        let mut environment = torchrun("29500").remove(1);
        environment.extend([("MASTER_ADDR", "192.0.2.1".to_owned())]);
        environment.extend(variable.map(|v| ("MCC_SECRET", v.to_owned())));
        let ran = start(&dir, flags, &[environment]).remove(0);
        assert_eq!(ran.code, Some(code), "{flags}: {}", ran.stderr);
        assert!(ran.stderr.contains(says), "{flags}: {}", ran.stderr);
    }
    // Flags about other ranks do nothing where no others are started, and mcc says so.
    let ran = dir.line("run out.mcc --data text.txt --steps 1 --secret-file secret").succeeds();
    assert!(ran.stderr.contains("`--secret-file` does nothing"), "{}", ran.stderr);
}

#[test]
fn a_signal_while_ranks_meet_ends_a_rank_that_has_nothing_to_save() {
    let dir = Dir::new();
    model(&dir);
    let port = port();
    let first = torchrun(&port).swap_remove(0);
    let mut command = dir.hearing("run out.mcc --data text.txt --steps 3 --save-weights w.safetensors");
    let mut run = command.envs(first).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("mcc starts");
    // The rank listens, so it waits for the others.
    while TcpStream::connect(format!("127.0.0.1:{port}")).is_err() {
        assert!(run.try_wait().expect("a process").is_none(), "it does not wait");
        std::thread::yield_now();
    }
    assert!(Command::new("kill").args(["-s", "TERM", &run.id().to_string()]).status().expect("kill").success());
    CommandOutput::new(run.wait_with_output().expect("the end")).fails_with(&["SIGTERM came before all ranks had met", "nothing is saved"]);
    assert!(!dir.path("w.safetensors").exists());
}

#[test]
fn quiet_ranks_say_errors_and_warnings_alone() {
    let dir = Dir::new();
    model(&dir);
    for (flags, notes) in [("", 1), ("--quiet", 0)] {
        let mut first = torchrun(&port()).swap_remove(0);
        first.extend([("MASTER_ADDR", "192.0.2.1".to_owned()), ("MCC_SECRET", SECRET.to_owned())]);
        let said = start(&dir, &format!("--steps 1 --rendezvous-timeout 1 {flags}"), &[first]).swap_remove(0).fails_with(&["error: "]).stderr;
        assert_eq!(said.matches("note: `192.0.2.1` stands for no address of this machine's networks").count(), notes, "{said}");
    }
}

/// Of a build without MPI, as tests are.
#[test]
fn exchanges_by_mpi_are_refused_with_what_they_need() {
    let dir = Dir::new();
    model(&dir);
    let alone = dir.line("run out.mcc --data text.txt --steps 1 --exchanges mpi");
    alone.misuses_with(&["ranks cannot exchange by MPI: an MPI launcher has to start each of them: `mpirun -n 4 mcc run ..`"]);
    for ran in start(&dir, "--steps 1 --exchanges mpi", &torchrun(&port())) {
        ran.misuses_with(&["torchrun started them, which knows nothing of it; `mpirun -n 4 mcc run ..` does"]);
    }
    for ran in start(&dir, &format!("--steps 1 --exchanges mpi --rendezvous localhost:{}", port()), &srun()) {
        ran.misuses_with(&["was built without it; `cargo build --release -p runtime --features mpi` builds one"]);
    }
}
