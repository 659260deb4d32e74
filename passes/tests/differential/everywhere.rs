//! The models of `models/` on meshes of up to 8 ranks, against the logical graph.

use crate::harness::{Case, Outcome, Ranges, attempt};
use crate::meshes::{meshes, mixed};
use crate::models::{BERT, DEEPSEEK, GEMMA, GPT2, LLAMA, MIXTRAL};
use crate::random::number;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A model: its name, its text, its settings.
type Model = (&'static str, (&'static str, &'static [(&'static str, &'static str)]), &'static [(&'static str, &'static str)]);

/// Models that differ in the dims that a mesh splits, with some sizes that 8 ranks on any axis divide.
const MODELS: [Model; 7] = [
    ("gpt2", GPT2, &[("seq", "16"), ("hidden", "16"), ("heads", "8"), ("layers", "8")]),
    ("llama", LLAMA, &[("seq", "8"), ("heads", "8"), ("ffn", "24")]),
    ("windows", LLAMA, &[("seq", "8"), ("window", "3"), ("window_every", "2"), ("tied", "true")]),
    ("gemma", GEMMA, &[("seq", "8"), ("window", "3"), ("score_cap", "1.0"), ("logit_cap", "2.0")]),
    ("bert", BERT, &[("seq", "8")]),
    ("mixtral", MIXTRAL, &[("seq", "8"), ("aux_per_sequence", "true")]),
    ("deepseek", DEEPSEEK, &[("seq", "8")]),
];

/// 60 of them, or `MESHES`, from number `MESHES_FIRST` on.
#[test]
fn models_agree_on_every_mesh_of_eight_ranks() {
    let (count, first) = (number("MESHES", 60) as usize, number("MESHES_FIRST", 0) as usize);
    let all = MODELS.iter().flat_map(|m| meshes(m.1.0.contains("experts_mlp(")).into_iter().map(move |case| (m, case))).collect();
    let cases: Vec<(&Model, Case)> = mixed(all).into_iter().skip(first).take(count).collect();
    let next = AtomicUsize::new(0);
    let (failures, refused) = (Mutex::new(vec![]), Mutex::new(BTreeMap::<String, u64>::new()));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(2, |n| n.get()) {
            scope.spawn(|| {
                while let Some(((name, model, more), case)) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let defines: Vec<(&str, &str)> = model.1.iter().filter(|(n, _)| more.iter().all(|m| m.0 != *n)).chain(*more).copied().collect();
                    match attempt(model.0, &defines, case, &Ranges::new()) {
                        Ok(Outcome::Right(_)) => {}
                        Ok(Outcome::Refused(errors)) => *refused.lock().expect("no poison").entry(errors[0].code.clone()).or_default() += 1,
                        Ok(Outcome::Full(why)) => failures.lock().expect("no poison").push(format!("{name} {case:?}: {why}")),
                        Ok(Outcome::NotFinite) => failures.lock().expect("no poison").push(format!("{name} {case:?}: not finite")),
                        Err(e) => failures.lock().expect("no poison").push(format!("{name} {case:?}: {e}")),
                    }
                }
            });
        }
    });
    let (failures, refused) = (failures.into_inner().expect("no poison"), refused.into_inner().expect("no poison"));
    println!("{} meshes; refused: {refused:?}", cases.len());
    assert!(failures.is_empty(), "{} of {} meshes are wrong:\n{}", failures.len(), cases.len(), failures.join("\n"));
    // Only sizes that an axis does not divide, and fewer layers than stages, may be refused.
    assert!(refused.keys().all(|code| ["E0204", "E0633"].contains(&code.as_str())), "{refused:?}");
}
