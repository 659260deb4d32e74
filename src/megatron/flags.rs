//! The flags of a training, to be taken one by one: what is left at the end has no meaning for mcc, and is named.

use super::text::Text;
use crate::foreign_flags::normal;
use std::collections::BTreeSet;

#[derive(Clone, Debug)]
pub struct Flag {
    /// As the tables have it: `num-layers`.
    pub name: String,
    /// As it was typed: `--num-layers`.
    pub typed: String,
    pub values: Vec<Text>,
    pub line: usize,
}

#[derive(Clone, Debug, Default)]
pub struct Flags {
    left: Vec<Flag>,
    /// Words that belong to no flag.
    pub strays: Vec<Text>,
    /// Those of which a later one counts.
    pub repeated: Vec<Flag>,
}

impl Flags {
    pub fn new(words: &[Text]) -> Flags {
        let mut out = Flags::default();
        for word in words {
            let is_flag = word.starts_with("--") && word.pieces().len() <= 2;
            match out.left.last_mut() {
                _ if is_flag => {
                    let (name, value) = word.split_once('=').map_or((word.clone(), None), |(name, value)| (name, Some(value)));
                    let typed = name.filled(|_| "..".into());
                    out.left.push(Flag { name: normal(&typed), typed, values: value.into_iter().collect(), line: word.line });
                }
                Some(flag) => flag.values.push(word.clone()),
                None => out.strays.push(word.clone()),
            }
        }
        // The last of repeated flags counts, as for argparse.
        let mut seen = BTreeSet::new();
        let (mut last, repeated): (Vec<Flag>, Vec<Flag>) = std::mem::take(&mut out.left).into_iter().rev().partition(|f| seen.insert(f.name.clone()));
        last.reverse();
        Flags { left: last, repeated, ..out }
    }

    pub fn has(&self, name: &str) -> bool {
        self.left.iter().any(|f| f.name == name)
    }

    /// The names of those that are left.
    pub fn names(&self) -> Vec<String> {
        self.left.iter().map(|f| f.name.clone()).collect()
    }

    pub fn get(&self, name: &str) -> Option<&Flag> {
        self.left.iter().find(|f| f.name == name)
    }

    /// A flag that is not to be named among those left.
    pub fn take(&mut self, name: &str) -> Option<Flag> {
        let at = self.left.iter().position(|f| f.name == name)?;
        Some(self.left.remove(at))
    }

    /// All that were not taken, in the script's order.
    pub fn rest(&mut self) -> Vec<Flag> {
        std::mem::take(&mut self.left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_belong_to_the_flag_before_them() {
        let words: Vec<Text> = "stray --a 1 2 --B_c=x --d --a -3".split_whitespace().map(|w| Text::known(w, 1)).collect();
        let mut flags = Flags::new(&words);
        assert_eq!(flags.strays.len(), 1);
        assert_eq!(flags.repeated.iter().map(|f| (f.name.as_str(), f.values.len())).collect::<Vec<_>>(), [("a", 2)]);
        assert_eq!(flags.take("b-c").map(|f| (f.typed, f.values[0].whole().unwrap().to_string())), Some(("--B_c".into(), "x".into())));
        assert_eq!(flags.rest().iter().map(|f| (f.name.as_str(), f.values.len())).collect::<Vec<_>>(), [("d", 0), ("a", 1)]);
    }
}
