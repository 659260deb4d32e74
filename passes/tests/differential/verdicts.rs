//! What becomes of mutants.

use crate::harness::Outcomes;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use verify::{Invariant, Violation};

/// The outcomes of mutants, by kind.
#[derive(Default)]
pub struct Verdicts {
    /// How many are tried, refused, harmless and missed.
    kinds: BTreeMap<&'static str, [u32; 4]>,
    /// How many each invariant refused.
    refused: BTreeMap<Invariant, u32>,
    missed: Vec<String>,
}

impl Verdicts {
    /// Judges a mutant: verifiers refuse it, or it computes, to the last bit, what is wanted. `run` gives nothing where it ends the compile later.
    pub fn judge(
        &mut self,
        (seed, kind): (u64, &'static str),
        verify: impl FnOnce() -> Result<(), Violation>,
        run: impl FnOnce() -> Option<Result<Outcomes, String>>,
        want: &Outcomes,
    ) {
        let verdict = catch_unwind(AssertUnwindSafe(verify)).unwrap_or_else(|_| panic!("mutant {seed} ({kind}) makes a verifier panic"));
        let got = match verdict {
            Ok(()) => catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| Some(Err("a panic".into()))),
            Err(violation) => {
                *self.refused.entry(violation.invariant).or_default() += 1;
                None
            }
        };
        let row = self.kinds.entry(kind).or_default();
        row[0] += 1;
        match got {
            None => row[1] += 1,
            Some(Ok(got)) if got == *want => row[2] += 1,
            Some(got) => {
                row[3] += 1;
                self.missed.push(format!("{seed}: {kind}: {}", got.err().unwrap_or_else(|| "other results".into())));
            }
        }
    }

    /// Prints them. Fails if more than so many in a hundred of those refused are missed, or if fewer than half are refused. How many were refused.
    pub fn end(self, percent: u32) -> u32 {
        let sum = |k: usize| self.kinds.values().map(|r| r[k]).sum::<u32>();
        let all = [0, 1, 2, 3].map(sum);
        println!("{:<34} {:>6} {:>8} {:>9} {:>7}", "", "tried", "refused", "harmless", "missed");
        for (name, [tried, refused, harmless, missed]) in self.kinds.iter().chain([(&"all", &all)]) {
            println!("{name:<34} {tried:>6} {refused:>8} {harmless:>9} {missed:>7}");
        }
        for (invariant, n) in &self.refused {
            println!("{:<34} {:>6} {n:>8}", format!("{invariant} {}", invariant.name()), "");
        }
        let [tried, refused, _, missed] = all;
        assert!(missed * 100 <= refused * percent, "{missed} mutants are missed:\n{}", self.missed.join("\n"));
        assert!(refused * 2 > tried, "only {refused} of {tried} mutants are refused");
        refused
    }
}
