//! Launch scripts of Megatron-LM: what is imported compiles and trains.

use crate::mcc::{CommandOutput, Dir, load_weights, models};
use data::indexed::{Dtype, Writer};
use std::fs;
use std::path::Path;
use std::process::Command;

/// A Llama, as scripts with arrays have it: four ranks, of which two split each layer. The documentation
/// imports it too.
const LLAMA: &str = include_str!("../megatron/train.sh");

/// A GPT-2, as scripts with strings have it, on one rank.
const GPT2: &str = r#"
GPT_ARGS="
    --num-layers 1 \
    --hidden-size 32 \
    --num-attention-heads 2 \
    --seq-length 16 \
    --max-position-embeddings 16 \
    --micro-batch-size 2 \
    --lr 0.001 --lr-decay-style constant \
    --train-iters ${ITERS} \
    --vocab-size 256 --make-vocab-size-divisible-by 128
"
python pretrain_gpt.py $GPT_ARGS --mock-data
"#;

/// Runs a script that was made, with the built `mcc` as the first of its name.
fn run_script(dir: &Dir, script: &str, arguments: &[&str], environment: &[(&str, &str)]) -> CommandOutput {
    let like = dir.command(["run"]);
    let binaries = Path::new(env!("CARGO_BIN_EXE_mcc")).parent().expect("a directory");
    let mut command = Command::new("sh");
    command.arg(script).args(arguments).current_dir(dir.path(""));
    for (name, value) in like.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    let path = std::env::var("PATH").expect("a path");
    command.env("PATH", format!("{}:{path}", binaries.display())).envs(environment.iter().copied());
    CommandOutput::new(command.output().expect("sh starts"))
}

/// A data set of tokens below 250.
fn data_set(dir: &Dir, name: &str) {
    let mut out = Writer::create(&dir.path(name), Dtype::U16).expect("a data set");
    for document in 0..100 {
        let tokens: Vec<u32> = (0..40).map(|k| (document * 13 + k * 7 + k / 11) % 250).collect();
        out.document(&tokens, &[40]).expect("written");
    }
    out.finish().expect("finished");
}

#[test]
fn a_script_of_a_llama_becomes_lines_that_compile_and_train() {
    let dir = Dir::new();
    dir.write("train.sh", LLAMA);
    data_set(&dir, "wiki");
    data_set(&dir, "code");
    let import = format!("import megatron-args train.sh -o lines.sh --models {}", models().display());
    let done = dir.line(&import).succeeds();
    assert!(done.stderr.contains("not known to mcc, and in no line: --no-such-flag"), "{}", done.stderr);
    let lines = fs::read_to_string(dir.path("lines.sh")).expect("written");
    for part in [
        "--tp 2 ",
        "--dp 2 ",
        "--sp ",
        "--zero 1 ",
        "-D layers=2 ",
        "-D kv_heads=2 ",
        "-D ffn=96 ",
        "-D rope_theta=500000 ",
        "-D tied=false ",
        "-D vocab=250 ",
        "--dtype bf16 ",
        "--adam-beta2 0.999 ",
        "--lr-warmup-iters 1 ",
        "--lr-decay-iters 100 ",
        "--global-batch-size 4 ",
        "--steps 2 ",
        "--data-path ${DATA_PATH} ",
        "--split 99,1,0 ",
        "--eval-interval 1 ",
        "--resume auto ",
        "--save-interval 1 ",
    ] {
        assert!(lines.contains(&format!("\n  {part}\\\n")), "no `{part}` in:\n{lines}");
    }
    assert!(lines.contains("\n  --seed 7\n"), "{lines}");
    for left in [
        "line 2: CUDA_DEVICE_MAX_CONNECTIONS",
        "line 9: --use-mcore-models",
        "line 15: --max-position-embeddings 64",
        "line 17: --swiglu",
        "line 20: --tokenizer-type NullTokenizer",
        "--overlap-grad-reduce",
        "--wandb-project llama",
        "--no-such-flag 3",
        "`TRAINING_ARGS+=(--fp8-format hybrid)` is not followed",
        "torchrun --nproc_per_node 4 --nnodes 1",
    ] {
        assert!(lines.contains(left), "no `{left}` in:\n{lines}");
    }
    let shown = include_str!("../../docs/import.md");
    let line = |start: &str| lines.lines().find(|l| l.starts_with(start)).expect("a line").to_string();
    for start in ["DATA_PATH=", "mcc run ", "#   line 15", "#   line 17: --swiglu", "# Computed", "#   --train-samples"] {
        assert!(shown.contains(&line(start)), "the documentation shows another line than `{}`", line(start));
    }
    // A data path that the script does not say may be a blend.
    let ran = run_script(&dir, "lines.sh", &["0.7 wiki 0.3 code", "checkpoints"], &[]).succeeds();
    assert!(!ran.stderr.contains("warning"), "{}", ran.stderr);
    assert!(ran.stdout.contains("held-out loss 5."), "{}", ran.stdout);
    assert!(ran.stderr.contains("after the last step: validation loss 5."), "{}", ran.stderr);
    dir.line("checkpoint convert checkpoints/step-2 weights.safetensors --weights").succeeds();
    let weights = load_weights(&dir.path("weights.safetensors"));
    let shape = |name: &str| weights.get(name).map(|(shape, _)| shape.clone());
    assert_eq!(shape("layers.1.attn.q.w"), Some(vec![64, 2, 2, 16]));
    assert_eq!(shape("layers.1.attn.k.w"), Some(vec![64, 2, 16]));
    assert_eq!(shape("layers.1.mlp.gate.w"), Some(vec![64, 96]));
    assert_eq!(shape("head"), Some(vec![250, 64]));
    assert_eq!(shape("layers.2.attn.q.w"), None);
}

#[test]
fn a_script_of_a_gpt_becomes_lines_that_ask_for_what_is_missing() {
    let dir = Dir::new();
    dir.write("gpt.sh", GPT2);
    dir.write("corpus.txt", "The quick brown fox jumps over the lazy dog. ".repeat(40));
    let import = format!("import megatron-args gpt.sh --models {}", models().display());
    dir.line(&import).fails_with(&["line 10: `--train-iters ${ITERS}`", "`--set ITERS=..` gives it"]);
    dir.line(&format!("{import} --set ITERS=1 --set ITTERS=2")).fails_with(&["`--set ITTERS=..`", "did you mean `ITERS`?"]);
    let made = dir.line(&format!("{import} --set ITERS=1")).succeeds();
    for part in [
        "-D dropout_rate=0.1",
        "-D attention_dropout=0.1",
        "-D ffn=128",
        "--pad-vocab-to 128",
        "--lr-decay-style constant",
        "--global-batch-size 2",
        "--dp 1",
    ] {
        assert!(made.stdout.contains(part), "no `{part}` in:\n{}", made.stdout);
    }
    assert!(!made.stdout.contains("--lr-decay-iters") && made.stdout.contains("#   --attention-dropout 0.1"), "{}{}", made.stdout, made.stderr);
    dir.write("lines.sh", &made.stdout);
    let missing = run_script(&dir, "lines.sh", &[], &[]);
    assert!(missing.code != Some(0) && missing.stderr.contains("DATA"), "{}", missing.stderr);
    let ran = run_script(&dir, "lines.sh", &[], &[("DATA", "corpus.txt")]).succeeds();
    assert!(!ran.stderr.contains("warning"), "{}", ran.stderr);
}

#[test]
fn several_machines_start_as_the_script_started_them() {
    let dir = Dir::new();
    let sizes = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 256 --micro-batch-size 1 --lr 1e-3";
    dir.write(
        "torchrun.sh",
        format!("python -m torch.distributed.run --nnodes 2 --nproc_per_node 4 --node_rank $RANK pretrain_gpt.py {sizes} --distributed-timeout-minutes 5\n"),
    );
    dir.write(
        "srun.sh",
        format!(
            "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\nsrun -l sh -c \"python -u pretrain_gpt.py {sizes} --tensor-model-parallel-size 2\"\n"
        ),
    );
    let torchrun = dir.line("import megatron-args torchrun.sh --target sm_90a").succeeds().stdout;
    assert!(torchrun.contains("torchrun --no-python --nnodes 2 --nproc_per_node 4 --node_rank \"${RANK}\" mcc run torchrun.mcc \\\n"), "{torchrun}");
    for part in ["--dp 8 ", "--target sm_90a ", "--exchanges nccl ", "--rendezvous-timeout 300 "] {
        assert!(torchrun.contains(&format!("\n  {part}\\\n")), "no `{part}` in:\n{torchrun}");
    }
    let srun = dir.line("import megatron-args srun.sh").succeeds().stdout;
    assert!(srun.contains("\nsrun -l mcc run srun.mcc \\\n") && srun.contains("--dp 4 "), "{srun}");
}

#[test]
fn files_beside_a_script_are_read_where_it_sources_them() {
    let dir = Dir::new();
    fs::create_dir_all(dir.path("job/conf")).expect("made");
    dir.write("outside.sh", "LAYERS=9\n");
    dir.write(
        "job/conf/sizes.sh",
        "check() { :; }\nLAYERS=2\nSIZES=(--num-layers $LAYERS\n  --hidden-size 64 --tensor-model-parallel-size ${TP}\n  --such-a-flag 1)\nsource ./conf/again.sh\n",
    );
    dir.write("job/conf/again.sh", "source ./conf/again.sh\n");
    let script = r#"
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$HERE/conf/sizes.sh"
. ../outside.sh
. $HERE/no-such.sh
NAME=$(basename "$0" .sh)
DATA=data/corpus_text.bin
python pretrain_gpt.py ${SIZES[@]} --num-attention-heads 4 --seq-length 32 --vocab-size 256 --micro-batch-size 1 --lr 1e-3 \
  --data-path ${DATA%.bin} --save ck/${NAME#train-}
"#;
    dir.write("job/train-small.sh", script.replace("\\\\", "\\"));
    dir.line("import megatron-args job/train-small.sh").fails_with(&["line 4 of job/conf/sizes.sh: `--tensor-model-parallel-size ${TP}` decides"]);
    let lines = dir.line("import megatron-args job/train-small.sh --set TP=1").succeeds().stdout.replace("\n#     ", " ");
    for part in [
        "-D layers=2 ",
        "--data-path data/corpus_text ",
        "--save ck/small",
        "line 5 of job/conf/sizes.sh: --such-a-flag 1",
        "line 4: `../outside.sh` is not read: it is not in the script's directory; what it sets can be given as `--set NAME=VALUE`",
        "line 5: `job/no-such.sh` is not read: there is no such file beside the script",
        "functions of `job/conf/sizes.sh` are not followed where they are called: check",
        "`./conf/again.sh` is not read: too many files are within each other",
    ] {
        assert!(lines.contains(part), "no `{part}` in:\n{lines}");
    }
}

#[test]
fn files_are_looked_at_before_they_are_replaced() {
    let dir = Dir::new();
    dir.write("train.sh", GPT2);
    dir.write("there.sh", "mine");
    dir.write("bytes.sh", [0xff, 0xfe, 0]);
    dir.line("import megatron-args no-such.sh").fails_with(&["no-such.sh"]);
    dir.line("import megatron-args .").fails_with(&["directory, not a launch script"]);
    dir.line("import megatron-args bytes.sh").fails_with(&["bytes.sh", "UTF-8"]);
    dir.line("import megatron-args train.sh --set ITERS=1 -o there.sh").fails_with(&["`there.sh` exists: --force replaces it"]);
    assert_eq!(fs::read_to_string(dir.path("there.sh")).expect("there"), "mine");
    dir.line("import megatron-args train.sh --set ITERS=1 -o there.sh --force").succeeds();
    dir.line("import megatron-args train.sh --set ITERS").misuses_with(&["NAME=VALUE"]);
}
