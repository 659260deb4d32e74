//! A job as a tree of plain values, of which one leaf is changed: whatever fields there are.

use crate::Rng;
use ciborium::Value;
use ciborium::value::Integer;
use ir::program::Job;
use std::collections::BTreeMap;

/// Unlike JSON, CBOR has numbers that are not finite.
pub struct Tree {
    root: Value,
    /// All leaves under a field's name, of which a change may take another.
    alike: BTreeMap<String, Vec<Value>>,
    leaves: usize,
}

impl Tree {
    pub fn of(job: &Job) -> Tree {
        let mut root = Value::serialized(job).expect("a job is plain data");
        let (mut alike, mut leaves): (BTreeMap<String, Vec<Value>>, usize) = (BTreeMap::new(), 0);
        visit(&mut root, "job", &mut |field, leaf| {
            alike.entry(field.into()).or_default().push(leaf.clone());
            leaves += 1;
        });
        Tree { root, alike, leaves }
    }

    /// The job with one leaf changed or one list shortened, lengthened or in another order, what that is, and the job, if it is one.
    pub fn mutant(&self, dice: &mut Rng) -> (String, Option<Job>) {
        let mut root = self.root.clone();
        let what = match dice.below(3) {
            // This takes any leaf, most of which are in commands and kernels.
            0 => {
                let (mut left, mut what) = (dice.below(self.leaves), None);
                visit(&mut root, "job", &mut |field, leaf| {
                    if left == 0 && what.is_none() {
                        what = Some(self.change(dice, field, leaf));
                    }
                    left = left.wrapping_sub(1);
                });
                what.expect("one of the leaves")
            }
            // This descends by random fields, so that rare fields change as often as frequent ones.
            1 => self.descend(dice, &mut root, "job", Target::Leaf),
            _ => self.descend(dice, &mut root, "job", Target::List),
        };
        (what, root.deserialized().ok())
    }

    fn descend(&self, dice: &mut Rng, value: &mut Value, field: &str, target: Target) -> String {
        let end = target == Target::List && dice.below(4) == 0;
        match value {
            Value::Array(items) if !items.is_empty() && end => {
                let (a, b) = (dice.below(items.len()), dice.below(items.len()));
                match dice.below(3) {
                    0 => drop(items.remove(a)),
                    1 => items.insert(a, items[b].clone()),
                    _ => items.swap(a, b),
                }
                format!("list `{field}`, {a} and {b}")
            }
            Value::Array(items) if !items.is_empty() => {
                let k = dice.below(items.len());
                self.descend(dice, &mut items[k], field, target)
            }
            Value::Map(entries) if !entries.is_empty() => {
                let k = dice.below(entries.len());
                let (key, value) = &mut entries[k];
                let name = key.as_text().unwrap_or(field).to_owned();
                self.descend(dice, value, &name, target)
            }
            leaf => self.change(dice, field, leaf),
        }
    }

    fn change(&self, dice: &mut Rng, field: &str, leaf: &mut Value) -> String {
        let before = format!("{leaf:?}");
        let other = self.alike.get(field).map_or(Value::Null, |all| all[dice.below(all.len())].clone());
        *leaf = match &*leaf {
            Value::Integer(n) if dice.below(3) > 0 => {
                let (n, step) = (i128::from(*n), [1, 2, 4, 64, 4096][dice.below(5)]);
                let all = [n - step, n + step, 0, 1, 2 * n, n / 2, -1, i128::from(i32::MAX), i128::from(u32::MAX), i128::from(u64::MAX), 1 << 40];
                Value::Integer(Integer::try_from(all[dice.below(all.len())]).unwrap_or(u64::MAX.into()))
            }
            Value::Float(x) if dice.below(3) > 0 => Value::Float([-x, 0.0, f64::NAN, f64::INFINITY, x + 1.0, 1e300][dice.below(6)]),
            Value::Bool(b) => Value::Bool(!b),
            _ => other,
        };
        format!("field `{field}`, {before} to {leaf:?}")
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Target {
    Leaf,
    List,
}

/// All leaves, with the name of the field that they are in.
fn visit(value: &mut Value, field: &str, act: &mut dyn FnMut(&str, &mut Value)) {
    match value {
        Value::Array(items) if !items.is_empty() => items.iter_mut().for_each(|item| visit(item, field, act)),
        Value::Map(entries) if !entries.is_empty() => {
            for (key, value) in entries {
                let name = key.as_text().unwrap_or(field).to_owned();
                visit(value, &name, act);
            }
        }
        leaf => act(field, leaf),
    }
}
