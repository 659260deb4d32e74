//! Whether what a graph leaves is what another one left.

use super::pieces::{self, Joined, SymbolicValue};
use super::rules::Rules;
use super::run::ClassOutcome;
use super::{StageClass, place};
use crate::violation::{Checked, fail};
use crate::{Invariant, LocationPart, Violation};
use ir::graph::Value;
use ir::local::Local;
use ir::op::DType;
use ir::program::{Bucket, ParamRole, Piece};
use std::collections::BTreeMap;

/// What a class should leave, including the contents of its buckets.
pub struct ExpectedOutcome<'a> {
    class: &'a StageClass<'a>,
    of: ClassOutcome,
    /// For each slot that is updated by itself: the new parameter and its states.
    apart: BTreeMap<u32, (SymbolicValue, Vec<SymbolicValue>)>,
    /// Per bucket: the new parameters and the states, all ranks' parts of them.
    buckets: Vec<(Joined, Vec<Joined>)>,
}

impl<'a> ExpectedOutcome<'a> {
    /// Derives what a class should leave from what its graph before leaves.
    pub fn new(rules: &mut Rules, class: &'a StageClass, of: ClassOutcome) -> Result<ExpectedOutcome<'a>, Violation> {
        let mut apart = BTreeMap::new();
        for (slot, (v, new, states)) in of.updates.iter().filter(|u| !class.home(*u.0)) {
            let (mut new, mut states) = (new.clone(), states.clone());
            if class.training.copied.contains(slot) {
                let SymbolicValue::One(x) = &new else { return fail(Invariant::BucketUpdate, *v, "a new value is in pieces") };
                let x = x.clone();
                states.insert(0, new);
                new = SymbolicValue::One(pieces::cast(rules, x, class.dtype(*slot)));
            }
            apart.insert(*slot, (new, states));
        }
        let mut buckets = vec![];
        if !of.updates.is_empty() {
            for (k, b) in class.after.buckets.iter().enumerate() {
                let dtype = class.dtype((class.training.params.len() + k) as u32);
                let found = of_bucket(rules, class, &of, b, dtype);
                buckets.push(found.map_err(|e| e.at(LocationPart::Bucket(k)))?);
            }
        }
        Ok(ExpectedOutcome { class, of, apart, buckets })
    }

    /// Whether another outcome is this one.
    pub fn is(&self, rules: &mut Rules, got: &ClassOutcome) -> Result<(), Violation> {
        let (want, after) = (&self.of, self.class.after);
        if !want.reports.keys().eq(got.reports.keys()) {
            let [was, is] = [want, got].map(|o| o.reports.keys().collect::<Vec<_>>());
            return fail(Invariant::SameReports, LocationPart::Graph, format!("it reports {is:?}, before {was:?}"));
        }
        if !want.sent.keys().eq(got.sent.keys()) {
            let [was, is] = [want, got].map(|o| o.sent.keys().map(|(hops, channel)| format!("{hops} on {channel}")).collect::<Vec<_>>());
            return fail(Invariant::SameChannels, LocationPart::Graph, format!("it sends {is:?}, before {was:?}"));
        }
        if want.limits.len() != got.limits.len() {
            let text = format!("it holds {} values to limits, before {}", got.limits.len(), want.limits.len());
            return fail(Invariant::SameLimits, LocationPart::Graph, text);
        }
        for ((report, want), (v, x)) in want.reports.iter().map(|(k, w)| (k, &w.1)).zip(got.reports.values()) {
            if !same(rules, want, x) {
                return differs(Invariant::SameReport, (after, got), *v, &format!("report {report}"));
            }
        }
        for (want, list) in want.sent.values().zip(got.sent.values()) {
            if want.len() != list.len() {
                return fail(Invariant::SameChannels, LocationPart::Graph, "it sends more or fewer values than before");
            }
            for (want, (v, x)) in want.iter().zip(list) {
                if !same(rules, &want.1, x) {
                    return differs(Invariant::SameMessage, (after, got), *v, "what it sends");
                }
            }
        }
        let mut covers = |a: &ClassOutcome, b: &ClassOutcome| b.limits.iter().all(|(m, x)| a.limits.iter().any(|(n, y)| m == n && same(rules, x, y)));
        if !covers(want, got) || !covers(got, want) {
            return fail(Invariant::SameLimits, LocationPart::Graph, "what it holds to a limit is not what it was");
        }
        self.updated(rules, got)
    }

    /// Whether parameters and states are what they are to be, each by itself or in a bucket.
    fn updated(&self, rules: &mut Rules, got: &ClassOutcome) -> Result<(), Violation> {
        let after = self.class.after;
        // Slots of buckets come after those of parameters. Parameters outside of buckets are updated one by one.
        let first = self.class.training.params.len() as u32;
        if !self.apart.keys().eq(got.updates.keys().filter(|s| **s < first)) {
            return fail(Invariant::SameUpdates, LocationPart::Graph, "it updates other parameters than before");
        }
        if !got.updates.range(first..).map(|u| *u.0).eq(first..first + self.buckets.len() as u32) {
            return fail(Invariant::SameUpdates, LocationPart::Graph, "it updates other buckets than there are");
        }
        for (slot, (want, states)) in &self.apart {
            let (v, x, own) = &got.updates[slot];
            if !same(rules, want, x) || states.len() != own.len() || !states.iter().zip(own).all(|(a, b)| same(rules, a, b)) {
                return differs(Invariant::SameParameter, (after, got), *v, &format!("the new value of slot {slot}"));
            }
        }
        for ((slot, (v, x, own)), (new, states)) in got.updates.range(first..).zip(&self.buckets) {
            let owners = got.owners.get(slot).cloned().unwrap_or_default();
            let agree = |rules: &mut Rules| -> Checked<bool> {
                let mut all = new.agrees(rules, x)? && states.len() == own.len();
                for (want, x) in states.iter().zip(own) {
                    all &= Joined { own: owners.clone(), ..want.clone() }.agrees(rules, x)?;
                }
                Ok(all)
            };
            let what = format!("the new value of bucket {}", slot - first);
            match agree(rules) {
                Ok(true) => {}
                Ok(false) => return differs(Invariant::SameBucket, (after, got), *v, &what),
                Err(e) => return fail(e.invariant, *v, format!("{}: {what} is not what it was{}", e.found, place(after, *v))),
            }
        }
        Ok(())
    }
}

/// What a bucket and its states should hold.
fn of_bucket(rules: &mut Rules, class: &StageClass, of: &ClassOutcome, b: &Bucket, dtype: DType) -> Checked<(Joined, Vec<Joined>)> {
    let copies = b.holds == ParamRole::Copies;
    let count = b.pieces.iter().map(|p| of.updates.get(&p.slot).map_or(0, |u| u.2.len())).max().unwrap_or(0);
    // Returns the new value of a parameter, or of one of its states.
    let wanted = |p: &Piece, state: Option<usize>| {
        let (_, new, states) = of.updates.get(&p.slot).ok_or_else(|| Invariant::BucketUpdate.breach("it holds what is not updated"))?;
        if states.len() != count || class.before.params[p.slot as usize].index != p.index {
            return Err(Invariant::BucketUpdate.breach("it holds another part of a parameter, or other states"));
        }
        match state.map_or(new, |k| &states[k]) {
            SymbolicValue::One(x) => Ok(x.clone()),
            SymbolicValue::Joined(_) | SymbolicValue::Each(_) | SymbolicValue::Sums(_) => {
                Err(Invariant::BucketUpdate.breach("a new value is in pieces"))
            }
        }
    };
    let new = pieces::bucket(b, &mut |p| {
        let x = wanted(p, None)?;
        Ok(if copies { pieces::cast(rules, x, dtype) } else { x })
    })?;
    // In a bucket of copies, the first state holds the weights that were copied.
    let states = (0..count + usize::from(copies)).map(|k| pieces::bucket(b, &mut |p| wanted(p, k.checked_sub(usize::from(copies)))));
    Ok((new, states.collect::<Checked<_>>()?))
}

/// A result that differs, with the first value that leads to it and that is new: most often, the one that is wrong.
fn differs(invariant: Invariant, (local, got): (&Local, &ClassOutcome), v: Value, what: &str) -> Result<(), Violation> {
    let first = first_new(local, &got.new, v).filter(|first| *first != v);
    let first = first.map_or(String::new(), |f| format!(": the first value behind it that is new is {f}{}", place(local, f)));
    fail(invariant, v, format!("{what} is not what it was{}{first}", place(local, v)))
}

/// The first in order of the new values that lead to a value.
fn first_new(local: &Local, new: &[bool], v: Value) -> Option<Value> {
    let mut leads = vec![false; v.index() + 1];
    leads[v.index()] = true;
    for k in (0..=v.index()).rev().filter(|k| local.body.nodes.get(*k).is_some()) {
        if leads[k] {
            local.body.nodes[k].args.iter().for_each(|a| leads[a.index()] = true);
        }
    }
    (0..leads.len()).find(|k| leads[*k] && new.get(*k) == Some(&true)).map(|k| Value(k as u32))
}

fn same(rules: &mut Rules, a: &SymbolicValue, b: &SymbolicValue) -> bool {
    match (a, b) {
        (SymbolicValue::One(x), SymbolicValue::One(y)) => rules.terms.normal(x.clone()) == rules.terms.normal(y.clone()),
        (SymbolicValue::One(_) | SymbolicValue::Joined(_) | SymbolicValue::Each(_) | SymbolicValue::Sums(_), _) => false,
    }
}
