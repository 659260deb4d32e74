//! Checkpoints between plans: what one plan has saved another reads, and what that saves again are the same
//! bytes of each parameter and each optimizer state. `PAIRS=200` tries so many pairs of plans, from number
//! `PAIRS_FIRST` on.

use crate::differential::meshes::{meshes, mixed};
use crate::harness::Case;
use crate::mcc::Dir;
use crate::triples::mesh_arguments;
use ir::pipeline::Schedule;
use ir::random::mix;
use safetensors::{Dtype, SafeTensors};
use std::collections::BTreeMap;
use std::fs;

/// Models with sizes of which some go with 8 ranks on any axis: their names, whether they have experts,
/// settings.
const MODELS: [(&str, bool, &str); 3] = [
    ("gpt2", false, "-D vocab=251 -D hidden=16 -D heads=8 -D layers=4 -D seq=16"),
    ("llama", false, "-D vocab=250 -D hidden=32 -D heads=8 -D kv_heads=4 -D ffn=24 -D layers=4 -D seq=8"),
    (
        "mixtral",
        true,
        "-D vocab=256 -D hidden=16 -D heads=4 -D kv_heads=2 -D experts=4 -D expert_ffn=8 -D layers=2 -D seq=8 -D aux_per_sequence=true",
    ),
];

const RATE: &str = "--lr 1e-2 --min-lr 1e-2 --lr-decay-style constant --lr-warmup-iters 0";

/// Numbers of a pair.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = mix(self.0);
        (self.0 % n as u64) as usize
    }
}

/// A mesh and what else a plan says: what is shared out, the order of passes, buckets, offload, precision.
fn plan(random: &mut Random, meshes: &[Case]) -> String {
    let mesh = &meshes[random.below(meshes.len())];
    let schedule = match random.below(4) {
        0 => Schedule::GPipe,
        1 if mesh.pp > 1 => Schedule::ZbH1,
        _ => Schedule::OneFOneB,
    };
    let schedule = if mesh.vpp.is_some() { Schedule::OneFOneB } else { schedule };
    let bucket_size = [None, Some(100), Some(3000)][random.below(3)];
    let mut words = mesh_arguments(&Case { schedule, bucket_size, micro_batch: 1, ..mesh.clone() });
    words.push(["", "", "--optimizer-offload"][random.below(3)].into());
    words.push(["", "", "--activation-offload all"][random.below(3)].into());
    words.push(["--dtype fp32", "--dtype fp32", "--bf16", "--fp16 --initial-loss-scale 256"][random.below(4)].into());
    words.join(" ")
}

/// The plan of an artifact of this name: the first that this model can have. Sizes, batches and layers that do
/// not go round are refused, nothing else is.
fn compiled(dir: &Dir, random: &mut Random, (model, experts, sizes): (&str, bool, &str), name: &str) -> String {
    let all = mixed(meshes(experts));
    for _ in 0..50 {
        let plan = plan(random, &all);
        let ran = dir.line(&format!("compile {{models}}/{model}.mdl {sizes} {RATE} {plan} -o {name}"));
        if ran.code == Some(2) && ["E0204", "E0208", "E0633", "E0637"].iter().any(|code| ran.stderr.contains(&format!("error[{code}]"))) {
            continue;
        }
        assert_eq!(ran.code, Some(0), "{model} {plan}: {}{}", ran.stdout, ran.stderr);
        return plan;
    }
    panic!("no plan of {model} compiles");
}

/// Everything that a file of states holds of each parameter and state.
fn tensors(dir: &Dir, file: &str) -> BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)> {
    let bytes = fs::read(dir.path(file)).expect("a state");
    let all = SafeTensors::deserialize(&bytes).expect("tensors");
    all.iter().map(|(name, t)| (name.to_string(), (t.dtype(), t.shape().to_vec(), t.data().to_vec()))).collect()
}

#[test]
fn what_a_plan_saves_another_reads_and_saves_again_to_the_byte() {
    let number = |variable: &str, default: u64| std::env::var(variable).map_or(default, |n| n.parse().expect("a number"));
    let (first, count) = (number("PAIRS_FIRST", 0), number("PAIRS", 3));
    for case in first..first + count {
        let (dir, mut random) = (Dir::new(), Random(mix(case ^ 0x70616972)));
        dir.write("text.txt", "The quick brown fox jumps over the lazy dog, and then over a wall. ".repeat(60));
        let model = MODELS[case as usize % MODELS.len()];
        let plans = ["one", "other"].map(|name| compiled(&dir, &mut random, model, name));
        let pair = format!("pair {case}: {} {} and {}", model.0, plans[0], plans[1]);
        let run = |words: &str| {
            let words = format!("run {words} --bytes --data text.txt --quiet --threads-per-rank 1 --allow-changed model,batch,rate");
            let ran = dir.line(&words);
            assert_eq!(ran.code, Some(0), "{pair}\n{words}: {}{}", ran.stdout, ran.stderr);
        };
        // After the last step there is nothing to train, so the saved state is what was read.
        run("one --steps 2 --save first --save-state saved");
        run("other --steps 2 --load first --save-state again");
        let (saved, again) = (tensors(&dir, "saved"), tensors(&dir, "again"));
        let moved = saved.values().filter(|t| t.2.iter().any(|byte| *byte != 0)).count();
        assert!(moved > saved.len() / 2 && saved == again, "{pair}: {:?}", differing(&saved, &again));
        // The state goes back after a step of the other plan.
        run("other --steps 3 --load first --save second --save-state saved-2");
        run("one --steps 3 --load second --save-state again-2");
        let (trained, back) = (tensors(&dir, "saved-2"), tensors(&dir, "again-2"));
        assert!(trained != saved && trained == back, "{pair}: {:?}", differing(&trained, &back));
        println!("{pair}: {} tensors", saved.len());
    }
}

fn differing<'a, T: PartialEq>(a: &'a BTreeMap<String, T>, b: &'a BTreeMap<String, T>) -> Vec<&'a String> {
    a.keys().chain(b.keys()).filter(|name| a.get(*name) != b.get(*name)).collect()
}
