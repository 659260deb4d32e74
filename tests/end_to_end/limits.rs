//! Compiles end: sizes that nothing can hold are the user's errors, and a compile that takes too much says what it
//! was at.

use crate::mcc::Dir;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// What to compile, and the error that it is; none if it is compiled. `explain` goes through all passes and stops
/// before machine code.
const EXTREMES: &[(&str, Option<&str>)] = &[
    // These are extreme sizes of dims, tensors and parameters.
    ("mlp -D hidden=4611686018427387904", Some("E0302")),
    ("mlp -D hidden=1099511627776", Some("E0302")),
    ("mlp -D hidden=1099511627776 -D features=8192", Some("E0302")),
    ("mlp -D hidden=94906265", Some("E0302")),
    ("mlp -D features=9223372036854775807", Some("E0302")),
    ("mlp -D features=9223372036854775808", Some("E0408")),
    ("mlp -D features=1099511627776 -D hidden=1", None),
    ("mlp -D classes=1099511627776 -D hidden=1", None),
    ("mlp -D classes=1099511627776 -D hidden=512", Some("E0644")),
    ("mlp -D hidden=0", Some("E0206")),
    ("mlp -D features=0", Some("E0206")),
    ("mlp -D features=-1", Some("E0206")),
    ("mlp -D hidden=-9223372036854775808", Some("E0408")),
    ("mlp -D depth=-1", Some("E0206")),
    ("mlp -D depth=0", None),
    ("gpt2 -D layers=1 -D vocab=1099511627776", Some("E0644")),
    ("gpt2 -D layers=1 -D vocab=4611686018427387904", Some("E0302")),
    ("gpt2 -D layers=1 -D vocab=4294967297 -D hidden=16 -D heads=1", None),
    ("gpt2 -D layers=1 -D seq=1099511627776", Some("E0302")),
    ("gpt2 -D layers=1 -D seq=4294967296 -D hidden=16 -D heads=1 -D vocab=16", Some("E0302")),
    ("gpt2 -D layers=1 -D seq=67108864 -D hidden=16 -D heads=1 -D vocab=16", None),
    ("gpt2 -D layers=1 -D seq=67108864 -D hidden=16 -D heads=2 -D vocab=16 --cp 2", None),
    ("gpt2 -D seq=9223372036854775807", Some("E0302")),
    ("gpt2 -D hidden=1099511627776 -D heads=1", Some("E0302")),
    ("gpt2 -D hidden=16777216 -D heads=1", Some("E0302")),
    ("gpt2 -D heads=9223372036854775807", Some("E0301")),
    ("gpt2 -D layers=9223372036854775807", Some("E0302")),
    ("llama -D layers=1 -D ffn=1099511627776", Some("E0302")),
    ("llama -D layers=1 -D window=9223372036854775807", None),
    ("mixtral -D layers=1 -D experts=1099511627776", Some("E0302")),
    ("mixtral -D layers=1 -D top_k=9223372036854775807", Some("E0302")),
    ("vit -D layers=1 -D height=1099511627776", Some("E0644")),
    ("vit -D patch=9223372036854775807", Some("E0301")),
    ("t5 -D buckets=9223372036854775807", Some("E0302")),
    // These are extreme batches.
    ("mlp -D batch=9223372036854775807", Some("E0302")),
    ("mlp -D batch=1099511627776", Some("E0634")),
    ("mlp -D batch=1099511627776 --micro-batch-size 1099511627776", Some("E0644")),
    ("mlp --micro-batch-size 1099511627776", Some("E0644")),
    ("mlp --micro-batch-size 1099511627776 -D hidden=8192", Some("E0644")),
    ("mlp --micro-batch-size 1099511627776 -D hidden=8000 -D features=1 -D depth=2000", Some("E0644")),
    ("mlp --micro-batch-size 9223372036854775807", Some("E0302")),
    ("mlp --micro-batch-size 18446744073709551615", Some("E0302")),
    ("mlp --global-batch-size 1048577", Some("E0634")),
    ("mlp --global-batch-size 9223372036854775807", Some("E0302")),
    ("mlp --global-batch-size 18446744073709551615", Some("E0302")),
    ("mlp --global-batch-size 18446744073709551615 --micro-batch-size 18446744073709551615", Some("E0302")),
    ("gpt2 -D layers=1 --micro-batch-size 1073741824 --global-batch-size 4294967296", Some("E0302")),
    // These are extreme meshes.
    ("mlp --pp 1000000", Some("E0634")),
    ("mlp --pp 18446744073709551615", Some("E0634")),
    ("mlp --dp 4294967296", Some("E0634")),
    ("mlp --dp 18446744073709551615", Some("E0634")),
    ("mlp --tp 1048576", None),
    ("mlp --tp 18446744073709551615", Some("E0634")),
    ("mlp --tp 4294967296 --dp 4294967296", Some("E0634")),
    ("mlp --cp 18446744073709551615", Some("E0634")),
    ("mlp --ep 18446744073709551615", Some("E0635")),
    ("mlp --etp 18446744073709551615", Some("E0635")),
    ("mlp --ep 4294967296 --etp 4294967296", Some("E0635")),
    ("mlp --pp 2 --vpp 18446744073709551615", Some("E0634")),
    ("mlp --dp-replicate 18446744073709551615", Some("E0638")),
    ("mlp --pp 2 --vpp 2 --microbatch-group-size-per-virtual-pipeline-stage 18446744073709551615", Some("E0637")),
    ("mlp --pp 2 --pipeline-layers 4294967295,4294967295", Some("E0633")),
    ("mlp --pp 2 --pipeline-layout t*4294967295|tL", Some("E0633")),
    ("mlp --pp 2 --pipeline-layout t*18446744073709551616|tL", Some("E0633")),
    // These are extreme buckets, paddings, recomputed layers and memories.
    ("mlp --dp 2 --bucket-size 18446744073709551615", None),
    ("mlp --dp 2 --bucket-size 18446744073709551615 --zero 2", None),
    ("mlp --pad-vocab-to 1048576", None),
    ("gpt2 -D layers=1 -D vocab=2 -D hidden=1073741824 -D heads=1 --tp 1048576 --pad-vocab-to 1048576", Some("E0302")),
    ("gpt2 -D layers=1 -D vocab=1099511627775 -D hidden=16 -D heads=1 --pad-vocab-to 1048576", Some("E0644")),
    ("mlp --recompute full --recompute-num-layers 4294967295", None),
    ("mlp --memory 18446744073709551615", None),
    ("mlp --memory 1", Some("E0640")),
    ("mixtral -D layers=1 --ep 2 --dp 2 --moe-buffer-factor 1e300", None),
    ("mixtral -D layers=1 --ep 2 --dp 2 --moe-buffer-factor 1e-300", None),
];

/// Of these, those that are of the flags alone: exit code 2.
const FLAGS: [&str; 6] = ["E0408", "E0633", "E0634", "E0635", "E0637", "E0638"];

#[test]
fn sizes_that_nothing_can_hold_are_errors_of_the_user() {
    let dir = Dir::new();
    let mut wrong = String::new();
    for (line, wanted) in EXTREMES {
        let (model, flags) = line.split_once(' ').expect("a model and flags");
        let ran = dir.line(&format!("explain {{models}}/{model}.mdl --collectives --limit-memory 4GiB --limit-seconds 120 {flags}"));
        let good = match wanted {
            None => ran.code == Some(0),
            Some(code) => {
                ran.code == Some(if FLAGS.contains(code) { 2 } else { 1 })
                    && ran.stderr.contains(&format!("error[{code}]"))
                    && ran.stderr.contains("help:")
            }
        };
        if !good || ran.stderr.contains("bug in mcc") {
            wrong += &format!("--- {line}: {wanted:?}, but code {:?}: {}\n", ran.code, ran.stderr);
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}

/// Statements that each need the one before: values of a batch, and of parameters alone, which no pass of a stage
/// makes.
#[test]
fn chains_may_be_as_long_as_texts() {
    let dir = Dir::new();
    for (start, end, statements) in [("x * w", "y", 3000), ("w", "x * y", 8000)] {
        let chain = "  y = relu(y);\n".repeat(statements);
        let loss = format!("  loss sum({end}, over: [batch, hidden]);\n");
        let text = format!(
            "model chain(batch, hidden = 4) {{\n  input x: f32[batch, hidden];\n  param w: [hidden] = 1;\n  let y = {start};\n{chain}{loss}}}\n"
        );
        dir.write("chain.mdl", text);
        dir.line("explain chain.mdl --collectives --limit-memory 4GiB --limit-seconds 120").succeeds();
    }
}

#[test]
fn memory_that_cannot_be_addressed_is_told_with_its_largest_tensor() {
    let ran = Dir::new().line("explain {models}/gpt2.mdl --collectives -D layers=1 -D vocab=1099511627776");
    ran.fails_with(&[
        "error[E0644]",
        "which is more than the 256.00 TiB that can be addressed",
        "its largest tensor: [batch = 1, seq = 1024, vocab = 1099511627776]",
        "gpt2.mdl:",
    ]);
}

#[test]
fn scratch_that_nothing_gives_is_told_with_what_wants_it() {
    let dir = Dir::new();
    let sizes = "-D layers=1 -D seq=40000000 -D hidden=16 -D heads=1 -D vocab=16";
    let ran = dir.line(&format!("compile {{models}}/gpt2.mdl {sizes} --target x86-64-v3 --no-cache -o out.mcc"));
    ran.fails_with(&[
        "error[E0645]",
        "of scratch for a thread of x86-64-v3, more than the 4.00 GiB that one can have",
        "gpt2.mdl:",
        "`--cp` for long",
    ]);
    assert_eq!(dir.entries(), Vec::<String>::new());
}

/// A limit that any compile exceeds within a second, and a model that takes longer than that.
#[test]
fn a_compile_beyond_its_limits_says_what_it_was_at_and_leaves_nothing() {
    let dir = Dir::new();
    for (limit, code) in [("--limit-memory 1MiB", "E0906"), ("--limit-seconds 1", "E0907")] {
        let ran = dir.line(&format!("compile {{models}}/mlp.mdl -D depth=8000 -D hidden=4 -D features=4 --no-cache {limit} -o out.mcc"));
        ran.fails_with(&[&format!("error[{code}]"), limit.split(' ').next().expect("a flag"), " had run for ", "so far: "]);
        assert_eq!(dir.entries(), Vec::<String>::new());
    }
}

/// A compile whose artifact takes a while to write, as it has all levels as texts.
fn compile(dir: &Dir) -> Child {
    let line = "compile {models}/mlp.mdl -D depth=300 -D hidden=8 -D features=8 --emit graph,sharded,local,program,mlir -o out.mcc";
    dir.hearing(line).stdout(Stdio::null()).spawn().expect("mcc starts")
}

fn unfinished(dir: &Dir) -> bool {
    dir.entries().iter().any(|name| name.ends_with(".tmp"))
}

/// Waits until an artifact is being written and so many of its files are there; false if it is there before.
fn writes(dir: &Dir, compile: &mut Child, files: usize) -> bool {
    loop {
        for name in dir.entries().iter().filter(|name| name.ends_with(".tmp")) {
            let of = |folder: &str| fs::read_dir(dir.path(name).join(folder)).map_or(0, |entries| entries.count());
            if of(".") + of("dumps") >= files {
                return true;
            }
        }
        if compile.try_wait().expect("a state").is_some() {
            return false;
        }
        // Writing a file takes longer than this, and the compile needs the core.
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_compile_that_is_killed_leaves_nothing_for_the_next_one() {
    let dir = Dir::new();
    let mut caught = 0;
    for files in [0, 2, 4, 6] {
        let mut killed = compile(&dir);
        writes(&dir, &mut killed, files);
        killed.kill().expect("killed");
        killed.wait().expect("ended");
        caught += usize::from(unfinished(&dir));
    }
    assert!(caught > 0, "each had ended before it was killed");
    assert!(compile(&dir).wait().expect("ended").success());
    assert_eq!(dir.entries(), ["out.mcc"]);
}

#[test]
fn a_compile_that_a_signal_ends_leaves_nothing() {
    let dir = Dir::new();
    for (signal, name) in [(15, "TERM"), (2, "INT"), (1, "HUP")] {
        let mut ended = compile(&dir);
        assert!(writes(&dir, &mut ended, 1), "it had ended before SIG{name}");
        assert!(Command::new("kill").args(["-s", name, &ended.id().to_string()]).status().expect("kill starts").success());
        assert_eq!(ended.wait().expect("ended").signal(), Some(signal));
        assert!(!unfinished(&dir), "{:?}", dir.entries());
    }
}
