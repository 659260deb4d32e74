//! Scripts, and what is made of them.

use super::*;
use crate::cli::MegatronArgs;
use expect_test::{Expect, expect};

const SIZES: &str = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 256 --micro-batch-size 1 --lr 1e-3";

fn args(set: &[(&str, &str)]) -> MegatronArgs {
    let set = set.iter().map(|(n, v)| (n.to_string(), v.to_string())).collect();
    MegatronArgs { script: "train.sh".into(), output: None, force: false, set, models: "models".into(), target: "cpu".into() }
}

/// The words of the trainings that a script starts, and what is noted.
fn followed(script: &str, set: &[(&str, &str)], expected: &Expect) {
    let mut shell = Shell::new(&args(set).set);
    let mut out = match script::follow(script, &mut shell) {
        Ok(()) => String::new(),
        Err(e) => format!("{e}\n"),
    };
    for launch in &shell.launches {
        let words: Vec<String> = launch.before.iter().chain([&launch.program]).chain(&launch.flags).map(|w| shell.shown(w)).collect();
        let lines: Vec<String> = launch.flags.iter().map(|w| w.line.to_string()).collect();
        out += &format!("{}: {}\n  lines {}\n", launch.line, words.join("|"), lines.join(" "));
    }
    for note in &shell.notes {
        out += &format!("note {}: {}\n", note.line, note.text);
    }
    expected.assert_eq(&out);
}

fn refused(script: &str, set: &[(&str, &str)], expected: &Expect) {
    let error = make(script, &args(set)).err().expect("it is refused");
    expected.assert_eq(&format!("{error:#}\n"));
}

#[test]
fn variables_arrays_and_strings_are_expanded() {
    let script = r#"
GPUS=4
N=$((GPUS * 2 / (1 + 1)))
ARGS=(
    --a $N  # how many
    "--b x" '--c=y z'
)
ARGS+=("${MORE[@]}" --d "${DIR:-/data}/c")
LIST="
    --e $GPUS \\
    --f $1_text
"
torchrun --nproc_per_node $GPUS pretrain_gpt.py ${ARGS[@]} \\
    $LIST --g "$(date)" --h ${2:-ten} 2>&1 | tee log
"#;
    followed(
        &script.replace("\\\\", "\\"),
        &[("3", "unused")],
        &expect![[r#"
            13: torchrun|--nproc_per_node|4|pretrain_gpt.py|--a|4|--b|x|--c=y|z|--d|/data/c|--e|4|--f|${ARGUMENT_1}_text|--g|${OF_LINE_14}|--h|ten
              lines 5 3 6 6 6 6 8 8 10 10 11 11 14 14 14 14
            note 8: the array `MORE` is empty: nothing in the script sets it
            note 8: `DIR` of the environment is taken as `/data`, the script's default (`--set DIR=..` gives another)
            note 14: argument 2 is taken as `ten`, the script's default (`--set 2=..` gives another)
        "#]],
    );
}

#[test]
fn branches_are_taken_as_a_shell_would() {
    let script = r#"
SIZE=8B
case $SIZE in
    small) L=2 ;;
    8B|8b) L=32 ;;
    *) exit 1 ;;
esac
if [[ "$SIZE" == 8* && ! -f missing ]] || [ $L -gt 40 -a -n "$L" ]; then A="--file"; elif (( L > 31 )); then A="--large"; else A="--small"; fi
if [ -n "$WANDB" ]; then A="$A --wandb-project x"; fi
if [ -z "$1" ]; then echo usage; exit 1; fi
[ "$SIZE" = 8B ] && A="$A --eight"
for k in 1 2; do A="$A --k$k"; done
NOTHING=
run() { torchrun pretrain_gpt.py $A "$1"; }
run last
if [[ $BATCH -eq 0 ]]; then START="torchrun --nnodes 1"; fi
$NOTHING $START pretrain_gpt.py
while read x; do A="--none"; done
"#;
    followed(
        script,
        &[],
        &expect![[r#"
            14: torchrun|pretrain_gpt.py|--large|--eight|--k1|--k2|last
              lines 12 12 12 12 15
            17: torchrun|--nnodes|1|pretrain_gpt.py
              lines 
            note 8: `A="--file"` is not followed, as `[[ "$SIZE" == 8* && ! -f missing ]] || [ $L -gt 40 -a -n "$L ..` decides so: --file
            note 8: `A="--small"` is not followed, as `(( L > 31 ))` decides so: --small
            note 9: `A="$A --wandb-project x"` is not followed, as `[ -n "$WANDB" ]` is taken not to hold (`--set NAME=VALUE` may say otherwise): --wandb-project
            note 16: `[[ $BATCH -eq 0 ]]` is taken to hold
            note 18: `read x` is not run
            note 18: the loop `while read x; do A="--none"; done` is not followed: --none
        "#]],
    );
}

/// tree-sitter ends a word at a `$` behind `${A}`, and what is lost there would train on other data.
#[test]
fn variables_in_and_without_braces_are_one_word() {
    let script = r#"
A=/a
B=b_1
OUT=${A}/logs_$B.txt
MORE=(--x ${A}/$B.x)
torchrun pretrain_gpt.py --data-path ${A}/corpus_$B.text '$B' --out $OUT ${MORE[@]} --log=${A}/%j_$B.log
"#;
    followed(
        script,
        &[],
        &expect![[r#"
            6: torchrun|pretrain_gpt.py|--data-path|/a/corpus_b_1.text|$B|--out|/a/logs_b_1.txt|--x|/a/b_1.x|--log=/a/%j_b_1.log
              lines 6 2 6 6 4 5 2 6
        "#]],
    );
}

#[test]
fn what_a_shell_runs_from_a_string_is_followed() {
    let script = r#"
#SBATCH --nodes=2
ARGS="--x 1 \\
  --y 2"
srun -l bash -c "cd /m; python -u pretrain_gpt.py ${ARGS} --z '1 2'"
CMD="torchrun pretrain_gpt.py $ARGS"
eval "$CMD"
sbatch <<EOF
srun python pretrain_gpt.py $ARGS --job \$SLURM_JOB_ID
EOF
"#;
    followed(
        &script.replace("\\\\", "\\"),
        &[],
        &expect![[r#"
        5: srun|-l|python|-u|pretrain_gpt.py|--x|1|--y|2|--z|1 2
          lines 5 5 6 6 6 6
        6: torchrun|pretrain_gpt.py|--x|1|--y|2
          lines 6 6 7 7
        9: srun|python|pretrain_gpt.py|--x|1|--y|2|--job|${SLURM_JOB_ID}
          lines 9 9 10 10 10 10
        note 5: `cd /m` is not run
        note 8: `sbatch` is not run
    "#]],
    );
}

#[test]
fn what_is_not_understood_is_named_with_its_line() {
    let script = "source env.sh\nA=${B%.*}\n((i++))\nuntil x; do y --flag; done\nC[2]=1\npython pretrain_gpt.py --a $A --b ${C[0]} $D\n";
    followed(
        script,
        &[],
        &expect![[r#"
            6: python|pretrain_gpt.py|--a|${A}|--b|${C}|${D}
              lines 6 2 6 6 6
            note 1: `env.sh` is not read: no file but the script is read here; what it sets can be given as `--set NAME=VALUE`
            note 3: `((i++))` is not followed
            note 4: `x` is not run
            note 4: the loop `until x; do y --flag; done` is not followed: --flag
            note 5: `C[2]=1` is not followed
        "#]],
    );
}

#[test]
fn hostile_scripts_end_with_an_error() {
    let mut doubled = String::from("A=xxxxxxxxxxxxxxxx\n");
    doubled.push_str(&"A=$A$A\n".repeat(40));
    followed(
        &doubled,
        &[],
        &expect![[r#"
        line 19: the variables of the script come to more than 16 MiB
    "#]],
    );
    followed(
        &"(".repeat(1000),
        &[],
        &expect![[r#"
        note 1: `(((((((((((((((((((((((((((((((((((((((((((((((((((((((((((( ..` is not understood
    "#]],
    );
    followed(
        &format!("A={}1{}", "$(( ".repeat(300), " ))".repeat(300)),
        &[],
        &expect![[r#"
            line 1: more than 100 brackets, quotes, strings or functions are within each other
        "#]],
    );
    followed(
        "f() { f; }\nf\n",
        &[],
        &expect![[r#"
            line 1: more than 100 brackets, quotes, strings or functions are within each other
        "#]],
    );
    followed(
        "A='eval \"$A\"'\neval \"$A\"\n",
        &[],
        &expect![[r#"
            line 1: more than 100 brackets, quotes, strings or functions are within each other
        "#]],
    );
    let loops = "for a in 1 2 3 4 5 6 7 8 9 0; do ".repeat(6) + "x=1; " + &"done; ".repeat(6);
    followed(
        &loops,
        &[],
        &expect![[r#"
        line 1: more than 100,000 statements, with those of loops
    "#]],
    );
}

#[test]
fn what_cannot_be_compiled_is_refused_with_a_way_out() {
    refused(
        "echo\nmodule load cuda\n",
        &[],
        &expect![[r#"
        `train.sh` starts no training that can be seen: a command with a program such as `pretrain_gpt.py` and its flags
          line 2: `module load cuda` is not run
    "#]],
    );
    refused(
        &format!("torchrun --nproc_per_node 8 pretrain_gpt.py {SIZES} --tensor-model-parallel-size $TP --pipeline-model-parallel-size $1"),
        &[],
        &expect![[r#"
            `train.sh` cannot be imported:
              line 1: `--tensor-model-parallel-size ${TP}` decides what is compiled, and its value is not known: `--set TP=..` gives it
              line 1: `--pipeline-model-parallel-size ${ARGUMENT_1}` decides what is compiled, and its value is not known: `--set 1=..` gives it
        "#]],
    );
    refused(
        &format!("python pretrain_gpt.py {SIZES} --tensor-model-parallel-size 2"),
        &[],
        &expect![[r#"
        `train.sh` cannot be imported:
          line 1: the script starts 1 rank, and tp x pp x cp are 2, which does not divide them, so that Megatron-LM would refuse it too: `--set NAME=N`, with the variable that says how many machines there are, gives another number
    "#]],
    );
    refused(
        "python pretrain_gpt.py $ARGS",
        &[],
        &expect![[r#"
        `train.sh` cannot be imported:
          line 1: the training has no --num-layers, --hidden-size, --num-attention-heads, --seq-length: `--set ARGS=..` gives it
    "#]],
    );
    refused(
        &format!("python pretrain_gpt.py {SIZES} --clip-grad much --save-interval"),
        &[("TPP", "1")],
        &expect![[r#"
        `train.sh` cannot be imported:
          line 1: `--save-interval` has no value
          invalid value 'much' for '--clip-grad <X>': it should be a number from 0 on, such as 3e-4
          `--set TPP=..`: the script asks for no `TPP`
    "#]],
    );
    refused(
        &format!("python pretrain_mamba.py {SIZES}"),
        &[],
        &expect![[r#"
            line 1: no text of models/ computes the model of `pretrain_mamba.py`: docs/language.md says how to write one
        "#]],
    );
}

/// What is said of a script's flags beside the sizes of a model.
fn lines_of(flags: &str) -> String {
    let made = make(&format!("python pretrain_gpt.py {SIZES} {flags}"), &args(&[])).unwrap_or_else(|e| panic!("{e:#}"));
    made.lines.replace("\n#     ", " ")
}

#[test]
fn what_mcc_lacks_is_named_with_what_to_do_instead() {
    let says = lines_of("--train-iters 1000 --lr-decay-style power");
    assert!(says.contains("the line has `constant`, which falls at no step") && says.contains("--lr-decay-style constant"), "{says}");
}

/// The flags of the line that runs, without `\`.
fn run_flags(says: &str) -> String {
    let line = says.split("\nmcc run ").nth(1).unwrap_or("").split("\n\n").next().unwrap_or("");
    line.trim_end().split(" \\\n  ").collect::<Vec<_>>().join(" ")
}

#[test]
fn data_sets_of_a_script_are_those_of_the_line() {
    let says = lines_of("--train-iters 8 --data-path 3 a_text 1 ${B} --split \"'949, 50,1'\" --data-cache-path c");
    let line = "train.mcc --data-path 3 a_text 1 ${B} --split 949,50,1 --data-cache-path c --eval-interval 1000 --eval-iters 100 --steps 8 \
                --log-interval 100 --seed 1234";
    assert_eq!(run_flags(&says), line, "{says}");
    assert!(says.contains("#   --seed 1234\n") && !says.contains("VALID_DATA"), "{says}");
    let says = lines_of("--train-data-path a b --valid-data-path c --test-data-path d --split 1,1,1 --eval-interval 5 --eval-iters 2 --seed 3");
    let line = "train.mcc --train-data-path a b --valid-data-path c --test-data-path d --eval-interval 5 --eval-iters 2 --steps \"${STEPS}\"";
    assert!(run_flags(&says).starts_with(line) && says.contains("--seed 3"), "{says}");
    assert!(says.contains("--split 1,1,1: each part of the run has data sets of its own"), "{says}");
    let says = lines_of("--train-iters 8 --per-split-data-args-path blend.json --eval-iters 0 --eval-interval 5");
    assert!(run_flags(&says).starts_with("train.mcc --per-split-data-args-path blend.json --steps 8"), "{says}");
    let says = lines_of("--train-iters 8 --mock-data --data-cache-path c --split 1,1,1");
    assert!(run_flags(&says).starts_with("train.mcc --data \"${DATA}\"") && says.contains("VALID_DATA:+") && !says.contains("--seed"), "{says}");
    let refused = |flags: &str| format!("{:#}", make(&format!("python pretrain_gpt.py {SIZES} {flags}"), &args(&[])).err().expect("it is refused"));
    assert!(refused("--data-path 0.5 a b c").contains("line 1: `--data-path 0.5 a b c`: `b` stands where a weight is meant"));
    assert!(refused("--data-path a --split 1,1,1,1").contains("line 1: `--split 1,1,1,1`: the split"));
}

#[test]
fn documents_are_kept_apart_as_in_the_script() {
    let all = "--reset-attention-mask --reset-position-ids --eod-mask-loss";
    let says = lines_of(&format!("--train-iters 8 --data-path a {all}"));
    assert!(says.contains("  -D packed=true \\\n  -D separator=-1 \\\n") && !says.contains("as with `--"), "{says}");
    let says = lines_of("--train-iters 8 --data-path a --reset-attention-mask");
    assert!(says.contains("as with `--reset-position-ids`") && says.contains("as with `--eod-mask-loss`"), "{says}");
    let says = lines_of("--train-iters 8 --data-path a --eod-mask-loss");
    assert!(!says.contains("packed=true \\") && says.contains("`--eod-mask-loss`: the text does so where attention keeps"), "{says}");
    let says = lines_of(&format!("--mock-data {all}"));
    assert!(says.contains("-D packed=true \\") && !says.contains("separator=-1"), "{says}");
}

#[test]
fn latent_attention_has_yarn_and_layers_that_predict() {
    let latent = "--multi-latent-attention --num-experts 4 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope";
    let says =
        lines_of(&format!("{latent} --rotary-scaling-factor 40 --mscale 0.5 --mscale-all-dim 1.0 --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3"));
    let scale = (0.05 * 40f64.ln() + 1.0) / (0.1 * 40f64.ln() + 1.0);
    let settings = ["rope_factor=40", "rope_original=4096", "mscale_all=1.0", "mtp=1", "mtp_weight=0.3", &format!("yarn_scale={scale:?}")];
    for setting in settings {
        assert!(says.contains(&format!("  -D {setting} ")), "{setting}: {says}");
    }
    assert!(!says.contains("by YaRN"), "{says}");
    // If both scales are equal, or neither is given, queries and keys are scaled no further.
    let says = lines_of(&format!("{latent} --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0"));
    assert!(says.contains("-D mscale_all=1.0") && !says.contains("-D yarn_scale="), "{says}");
    let says = lines_of(latent);
    assert!(!says.contains("rope_factor") && !says.contains("YaRN"), "{says}");
    let says = lines_of(&format!("{latent} --rotary-scaling-factor $F --mscale 0.5"));
    assert!(says.contains("-D \"rope_factor=${F}\"") || says.contains("-D rope_factor=\"${F}\""), "{says}");
    assert!(says.contains("is not computed: `-D yarn_scale=..`"), "{says}");
    let says = lines_of(&format!("{latent} --rope-type rope --rotary-scaling-factor 40"));
    assert!(!says.contains("yarn_scale"), "{says}");
}

#[test]
fn a_rate_that_stays_and_falls_at_the_end_is_taken() {
    let flags = |says: &str| -> String {
        let of_rate = |word: &&str| word.starts_with("--lr-") || word.starts_with("--min-lr");
        let words: Vec<&str> = says.lines().filter(|line| !line.starts_with('#')).flat_map(str::split_whitespace).collect();
        let pairs = words.windows(2).filter(|pair| of_rate(&pair[0])).map(|pair| pair.join(" "));
        pairs.collect::<Vec<_>>().join(" ")
    };
    let says = lines_of("--train-iters 10 --optimizer muon --muon-extra-scale-factor 0.2 --muon-tp-mode duplicated --adam-beta2 0.95");
    for flag in ["--optimizer muon", "--muon-momentum 0.9", "--muon-scale-mode spectral", "--muon-extra-scale-factor 0.2", "--muon-nesterov off"] {
        assert!(says.contains(flag), "{flag}: {says}");
    }
    assert!(says.contains("--adam-beta2 0.95") && says.contains("a matrix is orthogonalized as a whole"), "{says}");
    let says = lines_of("--train-iters 1000 --lr-decay-style inverse-square-root --lr-warmup-iters 10");
    assert_eq!(flags(&says), "--lr-decay-style inverse-square-root --lr-warmup-iters 10 --min-lr 0 --lr-decay-iters 1000", "{says}");
    let says = lines_of("--train-iters 1000 --lr-decay-style WSD --lr-wsd-decay-iters 100 --lr-wsd-decay-style minus_sqrt --min-lr 1e-4");
    let wanted =
        "--lr-decay-style WSD --lr-wsd-decay-style minus_sqrt --lr-wsd-decay-iters 100 --lr-warmup-iters 0 --min-lr 1e-4 --lr-decay-iters 1000";
    assert_eq!(flags(&says), wanted);
    assert!(!says.contains("falls at no step"), "{says}");
    // This schedule is given in samples, with Megatron-LM's default curve.
    let samples = "--global-batch-size 4 --train-samples 4000 --lr-decay-samples 3600 --lr-warmup-samples 40";
    let says = lines_of(&format!("{samples} --lr-decay-style WSD --lr-wsd-decay-samples 400"));
    let wanted =
        "--lr-decay-style WSD --lr-wsd-decay-style exponential --lr-wsd-decay-iters 100 --lr-warmup-iters 10 --min-lr 0 --lr-decay-iters 900";
    assert_eq!(flags(&says), wanted);
    assert!(says.contains("--lr-wsd-decay-samples 400: 100 steps of 4 samples") && says.contains("--lr-wsd-decay-style exponential"), "{says}");
    let says = lines_of("--train-iters 1000 --lr-decay-style cosine --lr-wsd-decay-iters 100");
    assert!(says.contains("--lr-wsd-decay-iters 100: it counts with `--lr-decay-style WSD` alone"), "{says}");
    let script = |flags: &str| format!("python pretrain_gpt.py {SIZES} --train-iters 100 --lr-decay-style WSD {flags}");
    let error = |flags: &str| format!("{:#}", make(&script(flags), &args(&[])).err().expect("it is refused"));
    assert!(error("").contains("needs `--lr-wsd-decay-iters`"));
    let early = error("--lr-wsd-decay-iters 95 --lr-warmup-iters 10");
    assert!(early.contains("falls in the last 95 of 100 steps, and the first 10 still raise it"), "{early}");
}

#[test]
fn paths_are_taken_apart_as_a_shell_does() {
    let script = r#"
F=data/corpus_text_document.bin
N=$(basename "$F" .bin)
D=`dirname $F`
R=$1
python pretrain_gpt.py --a ${F%.bin} --b ${N%%_*} --c ${F##*/} --d "${F#data/}" --e $D --f ${R%/} --g $(basename $R/model) --h ${#N} --i $(cd $D && pwd)/x
"#;
    followed(
        script,
        &[],
        &expect![[r#"
            6: python|pretrain_gpt.py|--a|data/corpus_text_document|--b|corpus|--c|corpus_text_document.bin|--d|corpus_text_document.bin|--e|data|--f|${OF_LINE_6}|--g|model|--h|${OF_LINE_6_2}|--i|data/x
              lines 6 6 6 6 6 6 6 6 6 4 6 6 6 5 6 6 6 4
        "#]],
    );
}

/// Bytes are changed at random, always the same ones.
#[test]
fn broken_scripts_make_no_panic() {
    let script = format!(
        "A=(--a \"$B\" # c\n)\nif [ -n \"${{C:-x y}}\" ]; then D=$((1+2)); fi\ntorchrun --nnodes $N pretrain_gpt.py ${{A[@]}} {SIZES} --bf16 --moe-layer-freq [0]*1+[1]*2 --num-experts 4 $(x) <<E\ny\nE\n"
    );
    let mut state = 1u64;
    let mut random = |n: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % n
    };
    for _ in 0..600 {
        let mut bytes = script.clone().into_bytes();
        for _ in 0..=random(4) {
            let at = random(bytes.len());
            let with = b"$(){}[]\"'`\\\n #=-<>&|;*09a"[random(25)];
            match random(3) {
                0 => bytes[at] = with,
                1 => bytes.insert(at, with),
                _ => bytes.truncate(at + 1),
            }
        }
        let _ = make(&String::from_utf8(bytes).expect("ASCII"), &args(&[("N", "1")]));
    }
}

/// Every flag of the table, and of mcc's own, beside the sizes of a model: the lines, what is left out or the
/// error has its name or its value.
#[test]
fn no_flag_is_left_out_in_silence() {
    use crate::cli::Cli;
    use clap::CommandFactory;
    let root = Cli::command();
    let own = ["compile", "run"].into_iter().flat_map(|c| root.find_subcommand(c).expect("a command").get_arguments().filter_map(|a| a.get_long()));
    // These flags of mcc need `--profile` or `--init` beside them.
    let own = own.filter(|name| !["profile-steps", "trace", "allow-missing"].contains(name));
    let all: Vec<&str> = crate::foreign_flags::FOREIGN.iter().flat_map(|(names, _)| names.iter().copied()).chain(own).collect();
    let experts = "--num-experts 4 --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear";
    let mut gone = vec![];
    for (name, more) in all.iter().flat_map(|name| [(name, ""), (name, experts)]) {
        let script = format!("python pretrain_gpt.py {SIZES} {more} --{name} 7919");
        let said = match make(&script, &args(&[])) {
            Ok(made) => made.lines,
            Err(e) => format!("{e:#}"),
        };
        if !said.contains(&format!("--{name}")) && !said.contains("7919") {
            gone.push(*name);
        }
    }
    assert_eq!(gone, Vec::<&str>::new());
}
