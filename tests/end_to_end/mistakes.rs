//! Typical mistakes at the command line: each is refused, or warned of, with what is wrong and a way out.

use crate::mcc::{CommandOutput, Dir, Weights, models, save_weights};
use std::fs;
use std::io::Write;
use std::process::Stdio;

/// Sizes with which GPT-2 compiles in no time.
const TINY: &str = "-D vocab=256 -D hidden=8 -D heads=4 -D layers=2 -D seq=4";

/// Arguments, with `TINY` for these sizes; the exit code; what is wrong; a way out. The exit code is 0 if a flag
/// merely has no use.
type MistakeCase = (&'static str, i32, &'static str, &'static str);

/// Commands: none, wrong ones, in the wrong place.
const COMMANDS: &[MistakeCase] = &[
    ("", 2, "Usage: mcc <COMMAND>", "Commands:"),
    ("train a.mcc", 2, "mcc has no command `train`", "`mcc run`"),
    ("build gpt2.mdl", 2, "mcc has no command `build`", "`mcc compile`"),
    ("comple gpt2.mdl", 2, "mcc has no command `comple`", "`mcc compile`"),
    ("frobnicate", 2, "mcc has no command `frobnicate`", "check, fmt, compile"),
    ("gpt2.mdl", 2, "which command?", "`mcc compile gpt2.mdl`"),
    ("a.mcc", 2, "which command?", "`mcc run a.mcc`"),
    ("help gibberish", 2, "mcc has no command `gibberish`", "check, fmt, compile"),
    ("--tp 2 compile gpt2.mdl", 2, "`--tp` comes after its command", "`mcc compile .. --tp`"),
    ("--sped compile gpt2.mdl", 2, "`--sped` is no flag of mcc", "`mcc COMMAND ..`"),
    ("import gpt2", 2, "does not know the format `gpt2`", "`mcc import hf gpt2 -o OUT`"),
    ("import hf", 2, "<DIRECTORY>", "Usage: mcc import hf"),
    ("import train.sh", 2, "does not know the format `train.sh`", "`mcc import megatron-args train.sh -o OUT`"),
    ("import megatron-args", 2, "<SCRIPT.sh>", "Usage: mcc import megatron-args"),
    ("import megatron-args nope.sh", 1, "`nope.sh`: there is no such file", "`pretrain_gpt.py`"),
    ("import megatron-args gpt2.mdl", 1, "`gpt2.mdl` is a model text, not a launch script", "`mcc compile gpt2.mdl -o gpt2.mcc`"),
    ("import megatron-args corpus.txt", 1, "starts no training that can be seen", "`pretrain_gpt.py`"),
    ("export hf w.safetensors", 2, "--output <DIR>", "Usage: mcc export hf"),
    ("compile", 2, "<MODEL>", "Usage: mcc compile"),
    ("run", 2, "<ARTIFACT>", "Usage: mcc run"),
    ("check", 2, "<MODEL>", "Usage: mcc check"),
    ("fmt", 2, "<MODELS>", "Usage: mcc fmt"),
    ("compile gpt2.mdl t5.mdl", 2, "`t5.mdl` is one too many", "takes <MODEL>"),
    ("run a.mcc gpt2.mcc", 2, "`gpt2.mcc` is one too many", "takes <ARTIFACT>"),
    ("run a.mcc corpus.txt", 2, "`corpus.txt` is one too many", "mcc run --help"),
];

/// Flags: of other trainers, of other commands of mcc, misspelt.
const FLAGS: &[MistakeCase] = &[
    ("compile gpt2.mdl --hidden-size 768", 2, "no `--hidden-size`", "`-D hidden=768`"),
    ("compile gpt2.mdl --hidden_size=768", 2, "no `--hidden_size`", "`-D hidden=768`"),
    ("compile gpt2.mdl --num-layers 12 --num-attention-heads 8 --seq-length 64", 2, "no `--num-attention-heads`", "`-D seq=64`"),
    ("compile gpt2.mdl --num-query-groups 2", 2, "no `--num-query-groups`", "those of `gpt2.mdl` are batch, vocab, hidden"),
    ("compile gpt2.mdl --swiglu", 2, "no `--swiglu`", "the model text says it"),
    ("compile gpt2.mdl --use-flash-attn", 2, "no `--use-flash-attn`", "not needed"),
    ("compile gpt2.mdl --force", 2, "no `--force`", "an artifact that is there is replaced"),
    ("check gpt2.mdl --pp 2 --num-layers-per-virtual-pipeline-stage 2", 2, "no `--num-layers", "mcc has `--vpp`"),
    ("compile gpt2.mdl --overlap-grad-reduce", 2, "no `--overlap-grad-reduce`", "it is not needed: communication runs beside compute"),
    ("compile gpt2.mdl --save-interval 100", 2, "no `--save-interval`", "it is a flag of `mcc run`"),
    ("compile gpt2.mdl --tokenizer-type GPT2BPETokenizer", 2, "no `--tokenizer-type`", "`mcc data tokenize`"),
    ("compile gpt2.mdl --lr-warmup-fraction 0.1", 2, "no `--lr-warmup-fraction`", "`--lr-warmup-iters`"),
    ("compile gpt2.mdl --max-grad-norm 1", 2, "no `--max-grad-norm`", "`--clip-grad`"),
    ("compile gpt2.mdl --zero-stage 2", 2, "no `--zero-stage`", "`--zero`"),
    ("compile gpt2.mdl --deepspeed ds.json", 2, "no `--deepspeed`", "`train` and `plan`"),
    ("compile gpt2.mdl --parallelism.tensor_parallel_degree 2", 2, "no `--parallelism.tensor_parallel_degree`", "`--tp`"),
    ("compile gpt2.mdl trainer.devices=8", 2, "`trainer.devices=8` is no flag", "`--dp`"),
    ("compile gpt2.mdl model.hidden_size=8", 2, "`model.hidden_size=8` is no flag", "`-D hidden=8`"),
    ("compile gpt2.mdl --tensor_model_parallel_size 2", 2, "no `--tensor_model_parallel_size`", "write `--tensor-model-parallel-size`"),
    ("run a.mcc --nproc-per-node 4", 2, "no `--nproc-per-node`", "torchrun takes it"),
    ("run a.mcc --resume-from ckpt", 2, "no `--resume-from`", "`--load`"),
    ("run a.mcc --save-top-k 3", 2, "no `--save-top-k`", "`--keep`"),
    ("run a.mcc --max-steps 4", 2, "no `--max-steps`", "`--steps`"),
    ("run a.mcc --wandb-project p", 2, "no `--wandb-project`", "`--log-dir`"),
    ("run a.mcc --seq-length 64", 2, "no `--seq-length`", "`mcc compile .. -D seq=64`"),
    ("run a.mcc --tp 2", 2, "no `--tp`", "a flag of `mcc compile`, and part of the artifact"),
    ("run a.mcc --lr 1e-3 --dtype bf16", 2, "no `--dtype`", "a flag of `mcc compile`"),
    ("compile gpt2.mdl --steps 4", 2, "no `--steps`", "a flag of `mcc run`"),
    ("compile gpt2.mdl --data corpus.txt", 2, "no `--data`", "a flag of `mcc run`"),
    ("compile --model gpt2.mdl", 2, "no `--model`", "<MODEL> comes without a flag"),
    ("run --artifact a.mcc", 2, "no `--artifact`", "<ARTIFACT> comes without a flag"),
    ("check gpt2.mdl --output x.mcc", 2, "no `--output`", "a flag of `mcc compile`"),
    ("compile gpt2.mdl --optimiser sgd", 2, "no `--optimiser`", "`--optimizer`"),
    ("run a.mcc --sed 1", 2, "no `--sed`", "did you mean `--seed`?"),
    ("run a.mcc --xyzzy", 2, "no `--xyzzy`", "nor has any other command"),
    ("compile gpt2.mdl -tp 2", 2, "no `-t`", "write `--tp`"),
    ("compile gpt2.mdl \u{2013}tp 2", 2, "a dash that is not `-`", "write `--tp`"),
    ("compile gpt2.mdl -x", 2, "no `-x`", "begin with `--`"),
];

/// Values of flags.
const VALUES: &[MistakeCase] = &[
    ("compile gpt2.mdl --tp", 2, "a value is required for '--tp <N>'", "--help"),
    ("compile gpt2.mdl --tp two", 2, "'two' for '--tp <N>'", "a whole number from 1 on"),
    ("compile gpt2.mdl --tp 0", 2, "'0' for '--tp <N>'", "a whole number from 1 on"),
    ("compile gpt2.mdl --dp -2", 2, "`-2`", "no value here may be below 0"),
    ("compile gpt2.mdl --tp 2 --tp 4", 2, "'--tp <N>' cannot be used multiple times", "Usage: mcc compile"),
    ("compile gpt2.mdl --lr 1e39", 2, "'1e39' for '--lr <X>': ranks compute with it in f32, where it is inf", "from 0 on, such as 3e-4"),
    ("compile gpt2.mdl --adam-eps 1e-50", 2, "in f32, where it is 0", "above 0, such as 1.25"),
    ("compile gpt2.mdl --zero 4", 2, "'4' for '--zero <LEVEL>'", "0..=3"),
    ("compile gpt2.mdl --zero 1 --use-distributed-optimizer", 2, "cannot be used with '--use-distributed-optimizer'", "Usage: mcc compile"),
    ("compile gpt2.mdl --bf16 --fp16", 2, "cannot be used with '--fp16'", "Usage: mcc compile"),
    ("compile gpt2.mdl --dtype float16", 2, "'float16' for '--dtype <DTYPE>'", "fp32, bf16, fp16"),
    ("compile gpt2.mdl --lr=-1", 2, "'-1' for '--lr <X>'", "a number from 0 on"),
    ("compile gpt2.mdl --lr -1", 2, "'-1' for '--lr <X>'", "a number from 0 on"),
    ("compile gpt2.mdl --lr 1e400", 2, "'1e400' for '--lr <X>'", "a number from 0 on"),
    ("compile gpt2.mdl --lr nan", 2, "'nan' for '--lr <X>'", "a number from 0 on"),
    ("compile gpt2.mdl --lr 1,5e-4", 2, "'1,5e-4' for '--lr <X>'", "such as 3e-4"),
    ("compile gpt2.mdl --weight-decay -1", 2, "'-1' for '--weight-decay <X>'", "a number from 0 on"),
    ("compile gpt2.mdl --adam-beta1 1", 2, "'1' for '--adam-beta1 <X>'", "below 1, such as 0.9"),
    ("compile gpt2.mdl --adam-eps 0", 2, "'0' for '--adam-eps <X>'", "above 0"),
    ("compile gpt2.mdl --clip-grad=-1", 2, "'-1' for '--clip-grad <X>'", "a number from 0 on"),
    ("check gpt2.mdl --global-batch-size 18446744073709551615", 1, "batch = 18446744073709551615 is too large", "at most 1099511627776"),
    ("compile gpt2.mdl --bucket-size 0", 2, "'0' for '--bucket-size <N>'", "a whole number from 1 on"),
    ("compile gpt2.mdl --memory 5parsecs", 2, "`parsecs` is no unit", "GiB"),
    ("compile gpt2.mdl --memory 5 parsecs", 2, "`parsecs` is one too many", "mcc compile --help"),
    ("compile gpt2.mdl --emit everything", 2, "'everything' for '--emit <LEVEL,..>'", "graph, sharded, local"),
    ("compile gpt2.mdl --pipeline-schedule best", 2, "`best` is neither 1f1b", "nor a file that can be read"),
    ("compile gpt2.mdl --target sm_70", 2, "unknown target `sm_70`", "`sm_80` and `sm_90a`"),
    ("compile gpt2.mdl -D layers", 2, "'layers' for '-D <NAME=VALUE>'", "`layers=4`"),
    ("compile gpt2.mdl -D layers 4", 2, "`4` stands alone", "`-D layers=4`"),
    ("compile gpt2.mdl layers=4", 2, "`layers=4` stands alone", "`-D layers=4`"),
    ("compile gpt2.mdl -D hiden=8", 2, "no setting `hiden`", "did you mean `hidden`?"),
    ("compile gpt2.mdl -D hidden=wide", 2, "E0408", "hidden"),
    ("compile gpt2.mdl -D hidden=10 -D heads=4", 1, "heads = 4 does not divide hidden = 10", "10 divides by"),
    ("run a.mcc --steps ten", 2, "'ten' for '--steps <N>'", "a whole number from 0 on"),
    ("run a.mcc --steps -1", 2, "`-1`", "no value here may be below 0"),
    ("run a.mcc --threads-per-rank 4096", 2, "'4096' for '--threads-per-rank <T>'", "from 1 to 1024"),
    ("run a.mcc --threads-per-rank 0", 2, "'0' for '--threads-per-rank <T>'", "from 1 to 1024"),
    ("dump a.mcc --level everything", 2, "'everything' for '--level <LEVEL>'", "program, kernel"),
];

/// Flags that lack another, contradict one, or do nothing.
const TOGETHER: &[MistakeCase] = &[
    ("check gpt2.mdl TINY --tp 3", 2, "heads = 4 does not divide by tp = 3", "`-D heads=6`"),
    ("check gpt2.mdl TINY --pp 3", 2, "2 layers cannot fill 3 pipeline stages", "--pp 2 at most"),
    ("check gpt2.mdl TINY --dp 2 --global-batch-size 3", 2, "global batch 3 does not divide", "`--global-batch-size 4` does"),
    ("check gpt2.mdl TINY --dp 4 --global-batch-size 4 --dp-replicate 3", 2, "E0638", "`--dp-replicate` takes one of 1, 2, 4"),
    ("check gpt2.mdl TINY --ep 2", 2, "E0635", "must divide --dp x --cp x --tp"),
    ("check gpt2.mdl TINY --global-batch-size 2097152", 2, "E0634", "raise --micro-batch-size"),
    ("check gpt2.mdl TINY --tp 8", 0, "W0204", "nearest sizes that divide: 8 (`-D heads=8`)"),
    ("check gpt2.mdl TINY --vpp 2", 2, "pp = 1", "`--pp 2` or more"),
    ("check gpt2.mdl TINY --memory 1KiB", 1, "E0640", "its budget of 1.00 KiB"),
    ("check gpt2.mdl TINY --tf32", 2, "E0642", "`--target sm_80`"),
    ("check gpt2.mdl TINY --host-target cpu", 2, "--host-target is for kernels beside GPUs", "compiled for the same CPU"),
    ("check gpt2.mdl TINY --lr-decay-iters 20", 2, "error[E0703]: the learning rate warms up for 2000 steps", "`--lr-warmup-iters 2`"),
    (
        "check gpt2.mdl TINY --lr 1e-5",
        2,
        "error[E0703]: the learning rate would rise from its peak, 1e-5, to its final value, 6e-5",
        "`--min-lr 1e-6`",
    ),
    ("check gpt2.mdl TINY --sgd-momentum 0.9", 2, "error[E0702]: `--sgd-momentum` is not of the optimizer", "`--optimizer sgd`"),
    (
        "check gpt2.mdl TINY -D batch=4 --global-batch-size 8",
        2,
        "error[E0704]: --global-batch-size is 8, and `-D batch` says 4",
        "leave one of them out",
    ),
    ("check gpt2.mdl --optimizer sgd --adam-beta1 0.5", 2, "`--adam-beta1` is AdamW's", "`--optimizer adamw`"),
    ("check gpt2.mdl --optimizer adamw --sgd-momentum 0.5", 2, "`--sgd-momentum` is SGD's", "`--optimizer sgd`"),
    ("check gpt2.mdl --optimizer sgd --lion-beta1 0.5", 2, "`--lion-beta1` is Lion's", "`--optimizer lion`"),
    ("check gpt2.mdl --optimizer lion --muon-momentum 0.5", 2, "`--muon-momentum` is Muon's", "`--optimizer muon`"),
    ("check gpt2.mdl --muon-nesterov off", 2, "`--muon-nesterov` is not of the optimizer that the text trains with", "`--optimizer muon`"),
    (
        "check gpt2.mdl --lr-decay-style constant",
        0,
        "warning[W0706]: with `--lr-decay-style constant` the rate still warms up for the text's 2000 steps",
        "`--lr-warmup-iters 0`",
    ),
    ("check gpt2.mdl --lr-decay-iters 2100 --lr-constant-iters 100", 2, "is to have fallen at step 2000", "a smaller --lr-constant-iters than 100"),
    ("check gpt2.mdl --lr-decay-style constant --lr-constant-iters 9", 0, "`--lr-constant-iters` does nothing", "leave it out"),
    ("check gpt2.mdl --lr 1e-3 --min-lr 1", 2, "above `--lr`", "a smaller `--min-lr`"),
    ("check gpt2.mdl --lr-warmup-iters 9 --lr-decay-iters 9", 2, "`--lr-warmup-iters` still raises it", "a smaller `--lr-warmup-iters`"),
    ("check gpt2.mdl --min-loss-scale 8 --initial-loss-scale 4", 2, "above `--initial-loss-scale`", "a smaller `--min-loss-scale`"),
    ("check gpt2.mdl --recompute-method block", 2, "which layers `--recompute full` is about", "add `--recompute full`"),
    ("check gpt2.mdl --recompute-num-layers 2", 2, "which layers `--recompute full` is about", "add `--recompute full`"),
    ("check gpt2.mdl --recompute-modules mlp", 2, "says what `--recompute selective` computes again", "add `--recompute selective`"),
    ("check gpt2.mdl --recompute selective --recompute-modules mpl", 1, "nothing that the model calls is `mpl`", "did you mean `mlp`?"),
    ("check gpt2.mdl --tp-comm-overlap-chunks 2", 2, "which is off", "add `--tp-comm-overlap`"),
    ("check gpt2.mdl --microbatch-group-size-per-virtual-pipeline-stage 2", 2, "one per pipeline stage", "add `--vpp 2`"),
    ("check gpt2.mdl TINY --sp", 0, "`--sp` does nothing on one", "`--tp 2` or more"),
    ("check gpt2.mdl TINY --tp-comm-overlap", 0, "`--tp-comm-overlap` does nothing on one", "`--tp 2` or more"),
    ("check gpt2.mdl TINY --cp-comm-type a2a", 0, "`--cp-comm-type` does nothing on one", "`--cp 2` or more"),
    ("check gpt2.mdl TINY --zero 1", 0, "`--zero` does nothing on one", "`--dp 2` or more"),
    ("check gpt2.mdl TINY --bucket-size 100", 0, "`--bucket-size` does nothing on one", "`--dp 2` or more"),
    ("check gpt2.mdl TINY --pipeline-layers 2", 0, "`--pipeline-layers` does nothing in one", "`--pp 2` or more"),
    ("check gpt2.mdl TINY --overlap off", 0, "`--overlap` does nothing on one rank", "leave it out"),
    ("check gpt2.mdl TINY --dp 2 --ep 2", 0, "`--ep` does nothing: `gpt2` has no experts", "leave it out"),
    ("check gpt2.mdl TINY --etp 1", 0, "`--etp` does nothing: `gpt2` has no experts", "leave it out"),
    ("check gpt2.mdl TINY --moe-buffer-factor 2", 0, "`--moe-buffer-factor` does nothing", "leave it out"),
    (
        "check mixtral.mdl -D vocab=64 -D hidden=8 -D heads=2 -D kv_heads=2 -D expert_ffn=8 -D layers=1 -D seq=4 --moe-buffer-factor 9 --moe-passes 2",
        0,
        "more passes do nothing",
        "leave `--moe-passes` out",
    ),
    ("check gpt2.mdl TINY --moe-passes 2", 0, "`--moe-passes` does nothing", "leave it out"),
    ("check gpt2.mdl TINY --overlap-moe-expert-parallel-comm", 0, "`--overlap-moe-expert-parallel-comm` hides nothing", "leave it out"),
    ("check gpt2.mdl TINY --tp 2 --overlap off --overlap-moe-expert-parallel-comm", 2, "`--overlap off` puts in order", "leave one"),
    ("check gpt2.mdl TINY --optimizer-offload --optimizer sgd", 0, "`--optimizer-offload` does nothing", "`--optimizer adamw`"),
    ("check gpt2.mdl TINY --param-offload", 2, "`--param-offload` moves what passes read of parameters", "add `--optimizer-offload`"),
    ("check gpt2.mdl TINY --optimizer-offload --param-offload --optimizer sgd", 0, "`--param-offload` does nothing", "leave it out"),
    ("check gpt2.mdl TINY --activation-offload mpl", 1, "nothing that the model calls is `mpl`, which is to be offloaded", "did you mean `mlp`?"),
    ("check gpt2.mdl TINY --activation-offload ln_f", 0, "`--activation-offload` does nothing", "leave it out"),
    ("check gpt2.mdl TINY --target sm_80 --host-target cpu", 0, "`--host-target` does nothing", "`--optimizer-offload`"),
    ("check gpt2.mdl TINY --lr-decay-style WSD", 2, "in how many steps the learning rate falls", "`--lr-wsd-decay-iters N`"),
    (
        "check gpt2.mdl TINY --lr-decay-style WSD --lr-wsd-decay-iters 95 --lr-warmup-iters 10 --lr-decay-iters 100",
        2,
        "to fall in the last 95 of 100 steps, and warms up for 10",
        "`--lr-wsd-decay-iters 90` or less",
    ),
    ("check gpt2.mdl TINY --lr-decay-style WSD --lr-wsd-decay-iters 0", 2, "whole number from 1 on", "--lr-wsd-decay-iters"),
    ("check gpt2.mdl TINY --lr-decay-style linear --lr-wsd-decay-iters 9", 0, "counts with `--lr-decay-style WSD` alone", "or leave it out"),
    ("check gpt2.mdl TINY --lr-wsd-decay-style linear", 0, "the text's learning rate is not one that stays", "add `--lr-decay-style WSD`"),
    ("check gpt2.mdl TINY --lr-decay-style constant --min-lr 1e-5", 0, "`--min-lr` does nothing with", "`--lr-decay-style cosine`"),
    ("check mlp.mdl --cp 2", 0, "`--cp` splits nothing: the text's plan has no `cp`", "a line `cp: DIM;`"),
    ("check mlp.mdl --tp 2 --sp", 0, "`--sp` splits nothing: the text's plan has no `sp`", "a line `sp: DIM;`"),
    ("check mlp.mdl --recompute selective", 0, "W0641", "recompute"),
    ("check gpt2.mdl TINY -D layers=3", 0, "sets a setting twice", "leave the others out"),
    ("run a.mcc --data corpus.txt --eval-interval 2", 2, "there is no held-out data", "add `--valid-data FILE`"),
    ("run a.mcc --data corpus.txt --eval-iters 2", 2, "there is no held-out data", "add `--valid-data FILE`"),
    ("run a.mcc --data corpus.txt --valid-data corpus.txt", 2, "none is asked for", "add `--eval-interval N`"),
    ("run a.mcc --data corpus.txt --trace t.json", 2, "--profile", "Usage: mcc run"),
    ("run a.mcc --data corpus.txt --resume s --seed 2", 2, "`--seed` is that of the run from which `--resume` goes on", "leave it out"),
    ("run a.mcc --data corpus.txt --save-interval 5", 2, "is about checkpoints, and none are written", "`--save DIR`"),
    ("run a.mcc --data corpus.txt --on-spike back", 2, "goes back by starting again, which --restarts allows", "add `--restarts R"),
    ("run a.mcc --data corpus.txt --spike-factor 3", 2, "says when a loss jumps, and nothing happens then", "add `--on-spike back`"),
    ("run a.mcc --data corpus.txt --steps 1 --allow-changed data", 0, "is about a run that goes on, and this one begins", "or leave it out"),
    ("run a.mcc --data corpus.txt --resume auto", 2, "goes on from the newest checkpoint in the directory of `--save`", "add `--save DIR`"),
    ("run a.mcc --data corpus.txt --steps 1 --init own.safetensors --seed 2", 0, "`--seed` does nothing: all weights are read", "leave it out"),
    ("run a.mcc --data corpus.txt --save-weights w --save-state w", 2, "names the file of `--save-weights`", "two names"),
    ("run a.mcc --data corpus.txt --save-weights w --metrics w", 2, "names a file that something else is written to", "metrics.jsonl"),
    ("run a.mcc --data corpus.txt --max-skips 3", 2, "says how many steps in a row may be skipped", "add `--on-nonfinite skip`"),
    ("run a.mcc --data corpus.txt --bytes --data-dtype uint16", 2, "'--bytes' cannot be used with '--data-dtype <DTYPE>'", "Usage: mcc run"),
    ("run a.mcc --data corpus.txt --rendezvous node01:29500", 2, "did not start this process", "leave it out"),
    (
        "run a.mcc --data corpus.txt --steps 2",
        0,
        "warning[W0705]: the learning rate warms up for 2000 steps, and this run ends after 2",
        "--lr-warmup-iters",
    ),
    ("run a.mcc --data corpus.txt --steps 2 --rendezvous-timeout 5", 0, "`--rendezvous-timeout` does nothing", "leave it out"),
    ("run a.mcc --data corpus.txt --steps 1 --threads-per-rank 999", 0, "more than this machine has cores", "ranks share out the cores"),
    ("run a.mcc --data corpus.txt --exchanges nccl", 2, "NCCL: GPUs do", "the device `cpu` does not"),
    ("run a.mcc --data corpus.txt --device emulated", 2, "is compiled for the CPU", "cpu does"),
    ("explain gpt2.mdl", 2, "which line?", "`mcc explain gpt2.mdl:12`"),
    ("explain gpt2.mdl:999", 2, "nothing is computed on line 999", "lines"),
    ("explain a.mcc --tp 2", 2, "`--tp` is for a model text", "has been compiled"),
    ("explain a.mcc:3", 2, "`a.mcc` is an artifact", "`MODEL.mdl:LINE`"),
    ("dump a.mcc --level graph --class 0", 2, "this level is above them", "`--level local`"),
    ("dump a.mcc --class 9", 2, "there is no class 9", "0 to 0"),
    ("dump a.mcc --level ptx", 2, "has no PTX", "--target sm_80"),
    ("gpu-check --device cpu", 2, "the checks are of GPUs", "`--device emulated`"),
    ("gpu-check --device emulated --target sm_70", 2, "unknown target `sm_70`", "`sm_80`"),
];

/// Files: missing, or with a wrong content.
const FILES: &[MistakeCase] = &[
    ("check nope.mdl", 1, "`nope.mdl`: there is no such file", "a file such as `models/gpt2.mdl`"),
    ("check gone.mdl", 1, "`gone.mdl`: there is no such file", "a file such as `models/gpt2.mdl`"),
    ("check gpt3.mdl", 1, "`gpt3.mdl`: there is no such file", "did you mean `gpt2.mdl`?"),
    ("compile mlp -o m.mcc", 1, "`mlp`: there is no such file", "did you mean `mlp.mdl`?"),
    ("check gpt2.mdl/x", 1, "`gpt2.mdl/x`: there is no such file", "a file such as `models/gpt2.mdl`"),
    ("check binary.mdl", 1, "E0108", "save the file as UTF-8"),
    ("check empty.mdl", 1, "E0112", "empty"),
    ("check prose.mdl", 1, "prose.mdl:1:1", "error[E"),
    ("check /proc/sys/net/ipv4/route/flush", 1, "this user may not read it", "`chmod`"),
    ("explain nope.mdl:3", 1, "`nope.mdl`: there is no such file", "a file such as `models/gpt2.mdl`"),
    ("explain nope", 1, "`nope`: there is no such file", "a file such as `models/gpt2.mdl`"),
    ("compile gpt2.mdl TINY -o corpus.txt", 1, "`corpus.txt` exists and is not an artifact", "it was left alone"),
    ("compile gpt2.mdl TINY --emit ptx", 2, "PTX is for GPUs", "--target sm_80"),
    ("fmt nope.mdl", 1, "`nope.mdl`: there is no such file", "a file such as `models/gpt2.mdl`"),
    ("run nope.mcc --data corpus.txt", 1, "`nope.mcc`: there is no such artifact", "`mcc compile MODEL.mdl -o nope.mcc`"),
    ("run a.mc --data corpus.txt", 1, "`a.mc`: there is no such artifact", "did you mean `a.mcc`?"),
    ("dump nope.mcc", 1, "`nope.mcc`: there is no such artifact", "`mcc compile MODEL.mdl -o nope.mcc`"),
    ("run a.mcc", 2, "no data for input `tokens`", "--data FILE"),
    ("run a.mcc --data nope.txt", 1, "`--data nope.txt`: there is no such file", "a text, or token ids"),
    ("run a.mcc --data tokens=corpus.tx", 1, "`--data corpus.tx`: there is no such file", "did you mean `corpus.txt`?"),
    ("run a.mcc --data empty.txt", 1, "`empty.txt`: it is empty", "it is empty"),
    ("run a.mcc --data tokenz=corpus.txt", 2, "no input `tokenz`", "its inputs are tokens, targets"),
    ("run a.mcc --data corpus.txt --init nope", 1, "`--init nope`: there is no such file", "`mcc run --save-weights`"),
    ("run a.mcc --data corpus.txt --init damaged.safetensors", 1, "`damaged.safetensors` is not a safetensors file", "header"),
    ("import hf dir", 1, "`dir` is a directory, not a checkpoint of Hugging Face's", "config.json"),
    ("run a.mcc --data corpus.txt --load nope", 1, "`--load nope`: there is no such directory", "`mcc run --save`"),
    ("run a.mcc --data corpus.txt --load a.mcc", 1, "`--load a.mcc` is an artifact, not a directory of checkpoints", "`mcc run a.mcc --data FILE`"),
    ("run a.mcc --data corpus.txt --save w.safetensors", 1, "it names a directory of checkpoints", "`--save-weights w.safetensors`"),
    ("run a.mcc --data corpus.txt --save a.mcc/ck", 2, "is in the artifact", "name a directory outside"),
    ("run a.mcc --data corpus.txt --resume nope", 1, "`--resume nope`: there is no such file", "`mcc run --save-state`"),
    ("run a.mcc --data corpus.txt --save-weights nowhere/w.safetensors", 1, "there is no directory `nowhere`", "`mkdir -p nowhere`"),
    ("run a.mcc --data corpus.txt --metrics dir", 1, "`--metrics dir` is a directory", "`dir/metrics`"),
    ("import hf dir -o out -D a=2", 2, "--model <MODEL.mdl>", "Usage: mcc import hf"),
    ("import hf owner/name -o out", 1, "`owner/name`: there is no such directory", "`hf download owner/name --local-dir name`"),
    ("import hf hf --model nope.mdl -o out", 1, "`--model nope.mdl`: there is no such file", "a file such as `models/gpt2.mdl`"),
    ("import hf hf --model gpt.mdl -o out", 1, "`--model gpt.mdl`: there is no such file", "did you mean `gpt2.mdl`?"),
    ("import hf hf --model binary.mdl -o out", 1, "E0108", "save the file as UTF-8"),
    ("export hf w -o out", 1, "`w`: there is no such file", "did you mean `w.safetensors`?"),
    ("export hf w.safetensors -o out", 2, "does not say which model it is of", "--model"),
    ("export hf w.safetensors --model binary.mdl -o out", 1, "E0108", "save the file as UTF-8"),
    ("export hf damaged.safetensors --model gpt2.mdl -o out", 1, "`damaged.safetensors` is not a safetensors file", "header"),
];

/// Things that mcc knows, in the place of others.
const MIXED_UP: &[MistakeCase] = &[
    ("check a.mcc", 1, "`a.mcc` is an artifact, not a model text", "`mcc run a.mcc --data FILE`"),
    ("compile a.mcc", 1, "`a.mcc` is an artifact, not a model text", "`mcc dump a.mcc`"),
    ("fmt gpt2.mdl a.mcc", 1, "`a.mcc` is an artifact, not a model text", "`mcc run a.mcc --data FILE`"),
    ("check w.safetensors", 1, "`w.safetensors` is a file of weights, not a model text", "`mcc run ARTIFACT --init w.safetensors`"),
    ("compile plain.bin", 1, "`plain.bin` is a file of weights, not a model text", "`mcc export hf plain.bin -o DIR`"),
    ("fmt w.safetensors", 1, "`w.safetensors` is a file of weights, not a model text", "`mcc export hf w.safetensors -o DIR`"),
    ("check hf", 1, "`hf` is a checkpoint of Hugging Face's, not a model text", "`mcc import hf hf -o OUT`"),
    ("check imported", 1, "`imported` is a directory, not a model text", "did you mean `imported/model.mdl`?"),
    ("check dir", 1, "`dir` is a directory, not a model text", "a file such as `models/gpt2.mdl`"),
    ("check empty", 1, "`empty` is an empty directory, not a model text", "a file such as `models/gpt2.mdl`"),
    ("explain w.safetensors", 1, "`w.safetensors` is a file of weights, not a model text", "`mcc run ARTIFACT --init w.safetensors`"),
    ("explain w.safetensors:3", 1, "`w.safetensors` is a file of weights, not a model text", "`mcc run ARTIFACT --init w.safetensors`"),
    ("explain dir", 1, "`dir` is a directory, not an artifact", "manifest.json"),
    ("explain -", 2, "which line?", "`mcc explain -- -:12`"),
    ("explain -:3", 2, "`-:3` begins as flags do", "`mcc explain .. -- -:3`"),
    ("run gpt2.mdl --data corpus.txt", 1, "`gpt2.mdl` is a model text, not an artifact", "`mcc compile gpt2.mdl -o gpt2.mcc`"),
    ("dump gpt2.mdl", 1, "`gpt2.mdl` is a model text, not an artifact", "`mcc compile gpt2.mdl -o gpt2.mcc`"),
    ("run w.safetensors", 1, "`w.safetensors` is a file of weights, not an artifact", "`mcc run ARTIFACT --init w.safetensors`"),
    ("dump w.safetensors", 1, "`w.safetensors` is a file of weights, not an artifact", "`mcc export hf w.safetensors -o DIR`"),
    ("run hf --data corpus.txt", 1, "`hf` is a checkpoint of Hugging Face's, not an artifact", "`mcc import hf hf -o OUT`"),
    ("run corpus.txt", 1, "`corpus.txt` is not an artifact", "the directory that `mcc compile` writes"),
    ("run a.mcc/manifest.json", 1, "`a.mcc/manifest.json` is not an artifact", "the directory that `mcc compile` writes"),
    ("run empty.txt", 1, "`empty.txt` is an empty file, not an artifact", "the directory that `mcc compile` writes"),
    ("run dir --data corpus.txt", 1, "`dir` is a directory, not an artifact", "manifest.json"),
    ("dump empty", 1, "`empty` is an empty directory, not an artifact", "manifest.json"),
    ("run a.mcc --data dir", 1, "`--data dir` is a directory, not a file of data", "token ids in a .bin or .npy"),
    ("run a.mcc --data a.mcc", 1, "`--data a.mcc` is an artifact, not a file of data", "`mcc run a.mcc --data FILE`"),
    ("run a.mcc --data w.safetensors", 1, "it is safetensors, weights and no data", "--init reads such"),
    ("run a.mcc --data corpus.txt --init corpus.txt", 1, "`--init corpus.txt` is not a file of weights (safetensors)", "`mcc run --save-weights`"),
    ("run a.mcc --data corpus.txt --init a.mcc", 1, "`--init a.mcc` is an artifact, not a file of weights", "`mcc run a.mcc --data FILE`"),
    ("run a.mcc --data corpus.txt --init gpt2.mdl", 1, "`--init gpt2.mdl` is a model text, not a file of weights", "`mcc compile gpt2.mdl"),
    ("run a.mcc --data corpus.txt --init hf", 1, "`--init hf` is a checkpoint of Hugging Face's, not a file of weights", "`mcc import hf hf -o OUT`"),
    ("run a.mcc --data corpus.txt --resume a.mcc", 1, "`--resume a.mcc` is an artifact, not the state of a run", "`mcc run a.mcc --data FILE`"),
    ("run a.mcc --data corpus.txt --resume w.safetensors", 1, "does not say after which step it was saved", "`--init w.safetensors`"),
    ("import hf a.mcc -o out", 1, "`a.mcc` is an artifact, not a checkpoint of Hugging Face's", "`mcc run a.mcc --data FILE`"),
    ("import hf gpt2.mdl -o out", 1, "`gpt2.mdl` is a model text, not a checkpoint of Hugging Face's", "`mcc compile gpt2.mdl -o gpt2.mcc`"),
    ("import hf w.safetensors -o out", 1, "`w.safetensors` is a file of weights, not a checkpoint", "`mcc run ARTIFACT --init w.safetensors`"),
    ("import hf dir -o out", 1, "`dir` is a directory, not a checkpoint of Hugging Face's", "a config.json"),
    ("import hf hf --model a.mcc -o out", 1, "`--model a.mcc` is an artifact, not a model text", "`mcc run a.mcc --data FILE`"),
    ("export hf a.mcc -o out", 1, "`a.mcc` is an artifact, not a file of weights (safetensors)", "`--save-weights` saves its weights"),
    ("export hf gpt2.mdl -o out", 1, "`gpt2.mdl` is a model text, not a file of weights (safetensors)", "`--model gpt2.mdl` names it"),
    ("export hf hf -o out", 1, "`hf` is a checkpoint of Hugging Face's, not a file of weights", "`mcc import hf hf -o OUT`"),
    ("export hf imported -o out", 1, "`imported` is a directory, not a file of weights", "did you mean `imported/weights.safetensors`?"),
    ("export hf corpus.txt --model gpt2.mdl -o out", 1, "`corpus.txt` is not a file of weights (safetensors)", "`mcc run --save-weights`"),
    ("export hf w.safetensors --model w.safetensors -o out", 1, "`--model w.safetensors` is a file of weights, not a model text", "`mcc export hf"),
];

/// Runs all mistakes of a table; every one that does not go as it says is in the message.
fn all(mistakes: &[MistakeCase]) {
    let dir = Dir::new();
    for model in ["gpt2.mdl", "t5.mdl", "mlp.mdl", "mixtral.mdl"] {
        fs::copy(models().join(model), dir.path(model)).expect("copied");
    }
    dir.write("corpus.txt", "The quick brown fox jumps over the lazy dog. ".repeat(10));
    dir.write("binary.mdl", [b'm', 0xff, 0xfe, 0]);
    dir.write("empty.mdl", "");
    dir.write("prose.mdl", "The quick brown fox\n");
    dir.write("empty.txt", "");
    dir.write("damaged.safetensors", "these are no weights");
    for name in ["dir", "empty", "hf", "imported"] {
        fs::create_dir(dir.path(name)).expect("created");
    }
    dir.write("dir/corpus.txt", "The quick brown fox");
    let weights = Weights::from([("w".to_string(), (vec![1], vec![0.0]))]);
    for name in ["w.safetensors", "plain.bin", "hf/model.safetensors", "imported/weights.safetensors"] {
        save_weights(&dir.path(name), &weights);
    }
    for name in ["hf/config.json", "imported/config.json"] {
        dir.write(name, "{}");
    }
    fs::copy(models().join("mlp.mdl"), dir.path("imported/model.mdl")).expect("copied");
    std::os::unix::fs::symlink("nowhere.mdl", dir.path("gone.mdl")).expect("linked");
    dir.line(&format!("compile gpt2.mdl {TINY} -o a.mcc")).succeeds();
    dir.line("run a.mcc --data corpus.txt --steps 0 --save-weights own.safetensors").succeeds();
    let before = dir.entries();
    let mut wrong = vec![];
    for (line, code, message, way_out) in mistakes {
        let ran = dir.line(&line.replace("TINY", TINY));
        let said = &ran.stderr;
        if ran.code != Some(*code) || !said.contains(message) || !said.contains(way_out) || said.contains("panicked") || said.contains("bug in mcc") {
            wrong.push(format!("mcc {line}\n  expected {code}, `{message}`, `{way_out}`\n  got {:?}: {said}", ran.code));
        }
    }
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), mistakes.len(), wrong.join("\n"));
    assert_eq!(dir.entries(), before, "a mistake left something");
}

#[test]
fn wrong_commands_have_a_way_out() {
    all(COMMANDS);
}

#[test]
fn wrong_flags_have_a_way_out() {
    all(FLAGS);
}

#[test]
fn wrong_values_have_a_way_out() {
    all(VALUES);
}

#[test]
fn flags_that_do_not_go_together_say_so() {
    all(TOGETHER);
}

#[test]
fn wrong_files_have_a_way_out() {
    all(FILES);
}

#[test]
fn things_in_the_place_of_others_are_named_with_what_takes_them() {
    all(MIXED_UP);
}

#[test]
fn what_is_right_is_not_complained_about() {
    let dir = Dir::new();
    for line in [
        "check {models}/gpt2.mdl TINY",
        "check {models}/gpt2.mdl TINY --dp 2 --tp 2 --sp --zero 1 --bucket-size 100",
        "check {models}/gpt2.mdl TINY --cp 2 --cp-comm-type a2a --overlap off --tp 2 --tp-comm-overlap --tp-comm-overlap-chunks 2",
        "check {models}/gpt2.mdl TINY --pp 2 --vpp 1 --pipeline-layers 1,1 --optimizer-offload --recompute full --recompute-num-layers 1",
        "check {models}/gpt2.mdl TINY --activation-offload all --overlap off",
        "check {models}/gpt2.mdl TINY --pp 2 --activation-offload mlp,attention --activation-offload-layers 1",
        "check {models}/gpt2.mdl TINY --lr 1e-3 --min-lr 1e-4 --lr-warmup-iters 2 --lr-decay-iters 20 --adam-beta1 0",
        "check {models}/mixtral.mdl -D vocab=64 -D hidden=8 -D heads=2 -D kv_heads=2 -D expert_ffn=8 -D layers=1 -D seq=4 --ep 2 --dp 2 --etp 1 --moe-buffer-factor 2",
        "check {models}/gpt2.mdl TINY --target sm_80 --optimizer-offload --host-target x86-64-v3 --tf32",
    ] {
        let ran = dir.line(&line.replace("TINY", TINY)).succeeds();
        assert_eq!(ran.stderr, "", "{line}");
    }
}

/// Runs a command that reads a text on standard input.
fn piped(dir: &Dir, words: &[&str], text: &str) -> CommandOutput {
    let mut child = dir.command(words).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("mcc starts");
    child.stdin.take().expect("piped").write_all(text.as_bytes()).expect("read");
    CommandOutput::new(child.wait_with_output().expect("waited"))
}

#[test]
fn all_that_take_a_text_take_it_on_standard_input() {
    let dir = Dir::new();
    let text = fs::read_to_string(models().join("mlp.mdl")).expect("read");
    assert_eq!(piped(&dir, &["fmt", "-"], &text).succeeds().stdout, text);
    piped(&dir, &["fmt", "--check", "-"], &text).succeeds();
    piped(&dir, &["fmt", "--check", "-"], &text.replace("  let", " let")).fails_with(&["standard input is not formatted"]);
    piped(&dir, &["compile", "-", "-D", "hidden=8"], &text).succeeds();
    assert_eq!(dir.entries(), ["mlp.mcc"]);
    let line = 1 + text.lines().position(|l| l.contains("as first")).expect("it is there");
    let explained = piped(&dir, &["explain", "--", &format!("-:{line}")], &text).succeeds();
    assert!(explained.stdout.starts_with(&format!("<stdin>:{line} ")), "{}", explained.stdout);
}

#[test]
fn check_reads_standard_input_and_speaks_json() {
    let dir = Dir::new();
    let check = |text: &str, flags: &[&str]| {
        let ran = piped(&dir, &[&["check", "-"], flags].concat(), text);
        (ran.code, ran.stdout, ran.stderr)
    };
    let objects = |out: &str| out.lines().map(|l| serde_json::from_str(l).expect("JSON")).collect::<Vec<serde_json::Value>>();
    let gpt2 = fs::read_to_string(models().join("gpt2.mdl")).expect("read");
    let tiny: Vec<&str> = TINY.split(' ').collect();

    let (code, out, said) = check(&gpt2, &[&tiny[..], &["--dp", "2", "--tp", "2"]].concat());
    assert_eq!((code, said.as_str()), (Some(0), ""));
    assert!(out.starts_with("gpt2: ") && out.ends_with("no errors on 4 ranks (dp 2, tp 2)\n"), "{out}");

    let (code, out, said) = check(&gpt2, &[&tiny[..], &["--json"]].concat());
    assert_eq!((code, out.as_str(), said.as_str()), (Some(0), "", ""));

    let (code, out, said) = check(&gpt2, &[&tiny[..], &["--tp", "3", "--zero", "1", "--json"]].concat());
    assert_eq!((code, said.as_str()), (Some(2), ""));
    let found = objects(&out);
    let codes: Vec<&str> = found.iter().map(|o| o["code"].as_str().expect("a code")).collect();
    assert_eq!(codes, ["W0701", "E0204", "E0204"]);
    let first = &found[1];
    assert_eq!((first["severity"].as_str(), first["labels"][0]["file"].as_str()), (Some("error"), Some("<stdin>")));
    let place = &first["labels"][0];
    let line = 1 + gpt2[..gpt2.find("let q = ").expect("it is there")].matches('\n').count() as u64;
    assert_eq!((place["line"].as_u64(), place["column"].as_u64()), (Some(line), Some(13)));
    assert!(first["message"].as_str().expect("a text").contains("heads = 4 does not divide by tp = 3"));
    assert!(first["help"][0].as_str().expect("a text").contains("-D heads=6"));

    let ran = dir.line("check nope.mdl --json");
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(1), ""));
    let [object] = &objects(&ran.stdout)[..] else { panic!("{}", ran.stdout) };
    assert!(object["code"].is_null() && object["message"].as_str().expect("a text").contains("nope.mdl"));
}
