//! Random models on random meshes.

use crate::generate::{Triple, triple};
use crate::harness::{Data, Outcome, attempt};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// How many triples: 600, or `DIFFERENTIAL_COUNT`. `DIFFERENTIAL_SEED=n` runs the one of seed n alone and prints it.
fn triples() -> u64 {
    std::env::var("DIFFERENTIAL_COUNT").ok().and_then(|s| s.parse().ok()).unwrap_or(600)
}

fn run(seed: u64) -> Result<Outcome, String> {
    let Triple { text, case, ranges } = triple(seed);
    let ran = catch_unwind(AssertUnwindSafe(|| attempt(&text, &[], &case, &ranges))).unwrap_or_else(|e| {
        let why = e.downcast_ref::<String>().cloned().or(e.downcast_ref::<&str>().map(|s| s.to_string()));
        Err(format!("panic: {}", why.unwrap_or_default()))
    });
    ran.map_err(|e| format!("DIFFERENTIAL_SEED={seed}: {e}\n{case:?}\n{text}"))
}

#[test]
fn random_models_compute_on_any_mesh_what_the_logical_graph_says() {
    if let Some(seed) = std::env::var("DIFFERENTIAL_SEED").ok().and_then(|s| s.parse().ok()) {
        let Triple { text, case, .. } = triple(seed);
        println!("{case:?}\n{text}");
        println!("{:?}", run(seed).unwrap_or_else(|e| panic!("{e}")));
        return;
    }
    let triples = triples();
    let next = AtomicU64::new(0);
    let (failures, refused) = (Mutex::new(vec![]), Mutex::new(vec![]));
    let (blown, exact) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(2, |n| n.get()) {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= triples {
                        break;
                    }
                    match run(seed) {
                        Ok(Outcome::Right(Data::Exact)) => drop(exact.fetch_add(1, Ordering::Relaxed)),
                        Ok(Outcome::Right(Data::Real)) => {}
                        Ok(Outcome::NotFinite) => drop(blown.fetch_add(1, Ordering::Relaxed)),
                        Ok(Outcome::Refused(errors)) => refused.lock().expect("no poison").push((seed, errors)),
                        Err(e) => failures.lock().expect("no poison").push((seed, e)),
                    }
                }
            });
        }
    });
    let (mut failures, refused) = (failures.into_inner().expect("no poison"), refused.into_inner().expect("no poison"));
    failures.sort_by_key(|f| f.0);
    let heads: Vec<&str> = failures.iter().map(|f| f.1.lines().next().unwrap_or_default()).collect();
    let shortest = failures.iter().map(|f| &f.1).min_by_key(|text| text.len());
    assert!(failures.is_empty(), "{} of {triples} triples are wrong:\n{}\n{}", failures.len(), heads.join("\n"), shortest.map_or("", |s| s));
    let codes: Vec<String> = refused.iter().map(|(seed, e)| format!("{seed}: {} {}", e[0].code, e[0].message)).collect();
    assert!(refused.len() as u64 <= triples / 10, "{} triples are refused:\n{}", refused.len(), codes.join("\n"));
    let (blown, exact) = (blown.into_inner(), exact.into_inner());
    println!("{triples} triples: {exact} exact, {} refused, {blown} not finite", refused.len());
    assert!(exact >= triples / 5, "only {exact} triples were compared to the last bit");
    assert!(blown <= triples / 50, "{blown} models leave the finite numbers");
}
