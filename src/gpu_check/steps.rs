//! Whole training steps, on one rank and on several that share the card, against the CPU's; and with NCCL.

use super::check::Check;
use super::table::{Table, markdown, verdict};
use crate::print::progress;
use runtime::gpu::{cuda, nccl};
use runtime::launch::{NARROW, WIDE};
use runtime::target::DeviceKind;
use serde::Serialize;

const STEPS: usize = 3;

#[derive(Clone, Copy)]
struct Case {
    model: &'static str,
    flags: &'static str,
    /// How far its numbers may be from the CPU's, in parts: losses, gradient norms.
    allowed: [f64; 2],
    meshes: &'static [&'static str],
}

const DENSE: [&str; 6] = ["--tp 2 --pp 2", "", "--tp 2", "--dp 2 --zero 1", "--dp 2 --cp 2", OFFLOADED];

/// Where the host computes too.
const OFFLOADED: &str = "--dp 2 --zero 1 --optimizer-offload";

const CASES: [Case; 4] = [
    Case { model: "gpt2", flags: "--dtype fp32", allowed: WIDE, meshes: &DENSE },
    Case { model: "gpt2", flags: "--dtype bf16", allowed: NARROW, meshes: &DENSE },
    Case { model: "llama", flags: "--dtype fp32 -D kv_heads=2 -D ffn=32", allowed: WIDE, meshes: &DENSE },
    Case {
        model: "mixtral",
        flags: "--dtype fp32 -D kv_heads=2 -D experts=4 -D expert_ffn=32 -D aux_per_sequence=true",
        allowed: WIDE,
        meshes: &["--tp 2 --pp 2", "", "--dp 2 --ep 2"],
    },
];

#[derive(Serialize)]
pub struct Steps {
    heading: &'static str,
    rows: Vec<StepRow>,
    /// Why there are no rows.
    note: Option<String>,
}

#[derive(Serialize)]
struct StepRow {
    model: String,
    flags: String,
    mesh: String,
    /// The largest distances from the CPU's losses and gradient norms, in parts; or what went wrong.
    found: Result<[f64; 2], String>,
    allowed: [f64; 2],
    right: bool,
}

impl StepRow {
    fn new(Case { model, flags, allowed, .. }: Case, mesh: &str, found: anyhow::Result<[f64; 2]>) -> StepRow {
        let found = found.map_err(|e| format!("{e:#}"));
        let right = found.as_ref().is_ok_and(|d| d.iter().zip(allowed).all(|(d, most)| *d <= most));
        progress!("steps {}: {model} {flags} {mesh}", if right { "right" } else { "WRONG" });
        StepRow { model: model.into(), flags: flags.into(), mesh: mesh.into(), found, allowed, right }
    }
}

/// Losses and gradient norms of all steps.
fn train(check: &Check, Case { model, flags, .. }: Case, mesh: &str, target: &str, run: &str) -> anyhow::Result<Vec<[f64; 2]>> {
    let sizes = "-D vocab=256 -D hidden=16 -D heads=4 -D layers=2 -D seq=8 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3";
    let artifact = check.compile(model, &format!("{flags} {mesh} {sizes}"), target)?;
    let metrics = check.work.join("metrics.jsonl");
    let seed = check.seed;
    check.mcc(&format!("run {} --data text.txt --steps {STEPS} --seed {seed} --force --metrics {} {run}", artifact.display(), metrics.display()))?;
    let number = |line: &serde_json::Value, name: &str| line[name].as_f64().unwrap_or(f64::NAN);
    let lines = std::fs::read_to_string(&metrics)?;
    let lines = lines.lines().map(serde_json::from_str::<serde_json::Value>).collect::<Result<Vec<_>, _>>()?;
    Ok(lines.iter().map(|l| ["loss", "grad_norm"].map(|n| number(l, n))).collect())
}

/// Largest distances, in parts of what is wanted.
fn distances(got: &[[f64; 2]], want: &[[f64; 2]]) -> [f64; 2] {
    if got.len() != want.len() {
        return [f64::INFINITY; 2];
    }
    [0, 1].map(|k| {
        let parts = got.iter().zip(want).map(|(g, w)| (g[k] - w[k]).abs() / w[k].abs());
        // A NaN counts as infinitely far away.
        parts.fold(0.0, |most: f64, d| {
            if d <= most {
                most
            } else if d.is_nan() {
                f64::INFINITY
            } else {
                d
            }
        })
    })
}

pub fn run(check: &Check) -> anyhow::Result<Steps> {
    let (cases, most) = if check.args.quick { (&CASES[..1], 1) } else { (&CASES[..], usize::MAX) };
    let device = format!("--device {}", check.device.name());
    let mut rows = vec![];
    for case in cases {
        let want = train(check, *case, "", "cpu", "")?;
        for mesh in case.meshes.iter().take(most) {
            let found = train(check, *case, mesh, &check.target, &device).map(|got| distances(&got, &want));
            rows.push(StepRow::new(*case, mesh, found));
        }
    }
    Ok(Steps { heading: "Training steps against the CPU's, ranks sharing the card", rows, note: None })
}

/// The same with exchanges by NCCL: one rank, and as many as there are cards for.
pub fn nccl(check: &Check) -> anyhow::Result<Steps> {
    let heading = "Training steps with NCCL";
    let none = |note: String| Ok(Steps { heading, rows: vec![], note: Some(note) });
    if check.device != DeviceKind::Cuda {
        return none("Not checked: NCCL needs GPUs.".into());
    }
    if let Err(e) = nccl::probe() {
        return none(format!("Not checked: {e}."));
    }
    let cards = cuda::probe()?;
    let case = CASES[0];
    let want = train(check, case, "", "cpu", "")?;
    let mut rows = vec![];
    for (ranks, mesh) in
        [(1, ""), (2, "--tp 2"), (2, "--pp 2"), (2, "--dp 2 --zero 1"), (2, OFFLOADED), (4, "--tp 2 --pp 2"), (8, "--tp 2 --pp 2 --dp 2")]
    {
        if ranks <= cards {
            let found = train(check, case, mesh, &check.target, "--device cuda --exchanges nccl").map(|got| distances(&got, &want));
            rows.push(StepRow::new(case, mesh, found));
        }
    }
    Ok(Steps { heading, rows, note: None })
}

impl Table for Steps {
    fn table(&self) -> String {
        if let Some(note) = &self.note {
            return format!("## {}\n\n{note}\n", self.heading);
        }
        let rows = self.rows.iter().map(|r| {
            let mesh = if r.mesh.is_empty() { "one rank".into() } else { r.mesh.clone() };
            let [loss, norm] = match &r.found {
                Ok(found) => [0, 1].map(|k| format!("{:.1e} of {:.0e}", found[k], r.allowed[k])),
                // Warnings stand before the error.
                Err(e) => [e.lines().find(|l| l.contains("error")).or(e.lines().next()).unwrap_or_default().to_owned(), "-".into()],
            };
            vec![r.model.clone(), r.flags.clone(), mesh, loss, norm, verdict(r.right)]
        });
        markdown(self.heading, &["model", "flags", "mesh", "losses", "gradient norms", ""], rows)
    }

    fn wrong(&self) -> usize {
        self.rows.iter().filter(|r| !r.right).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_distance_counts_and_what_is_no_number_is_far() {
        assert_eq!(distances(&[[1.0, 2.0], [3.0, 4.0]], &[[1.0, 2.0], [4.0, 2.0]]), [0.25, 1.0]);
        assert_eq!(distances(&[[f64::NAN, 2.0]], &[[1.0, 2.0]]), [f64::INFINITY, 0.0]);
        assert_eq!(distances(&[], &[[1.0, 2.0]]), [f64::INFINITY; 2]);
    }
}
