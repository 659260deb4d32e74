//! What stages add to sums over stages.

use crate::violation::fail;
use crate::{Invariant, Violation};
use ir::graph::Value;
use ir::sharded::Sharded;
use std::collections::BTreeMap;

/// The term that a stage adds to a sum over stages.
pub enum StageTerm {
    /// The whole sum.
    All,
    /// Some of its terms, by position; if there are none, zero.
    Terms(Vec<usize>),
}

/// The term that each stage adds.
pub type StageTerms = Vec<(u64, StageTerm)>;

/// The sums over stages: for each value and set of stages, what each stage adds.
#[derive(Default)]
pub struct Sums(pub BTreeMap<(Value, Vec<u64>), StageTerms>);

impl Sums {
    /// Every stage of a sum takes part, and every term is added once.
    pub fn verify(self, s: &Sharded) -> Result<(), Violation> {
        for ((v, stages), mut adds) in self.0 {
            adds.sort_unstable_by_key(|a| a.0);
            let all = adds.iter().filter(|a| matches!(a.1, StageTerm::All)).count();
            let mut terms: Vec<usize> = vec![];
            for (_, a) in &adds {
                if let StageTerm::Terms(list) = a {
                    terms.extend(list);
                }
            }
            terms.sort_unstable();
            let complete = match all {
                0 => terms == (0..s.graph.body[v].args.len()).collect::<Vec<_>>(),
                n => n == 1 && terms.is_empty(),
            };
            if !complete || adds.iter().map(|a| a.0).ne(stages.iter().copied()) {
                return fail(Invariant::StageSumComplete, v, format!("stages {stages:?} do not add up its terms"));
            }
        }
        Ok(())
    }
}
