//! Names in a text of things whose names are not unique: the first of a name is `keys`, the next `keys#1`.

use std::collections::HashMap;

/// The labels of a table, by position.
#[derive(Clone, Debug, Default)]
pub(super) struct Labels {
    names: Vec<(String, u32)>,
    positions: HashMap<(String, u32), u32>,
    count: HashMap<String, u32>,
}

impl Labels {
    pub fn of<'a>(names: impl IntoIterator<Item = &'a str>) -> Labels {
        let mut labels = Labels::default();
        names.into_iter().for_each(|n| labels.add(n));
        labels
    }

    pub fn add(&mut self, name: &str) {
        let count = self.count.entry(name.into()).or_default();
        let key = (name.to_string(), *count);
        *count += 1;
        self.positions.insert(key.clone(), self.names.len() as u32);
        self.names.push(key);
    }

    pub fn len(&self) -> usize {
        self.names.len()
    }

    /// The name at a position, which exists, and its number.
    pub fn get(&self, position: usize) -> (String, u32) {
        self.names[position].clone()
    }

    /// As [`Labels::get`], of a position that may be outside of the table.
    pub fn at(&self, position: u32) -> Option<(String, u32)> {
        self.names.get(position as usize).cloned()
    }

    /// The position of a name and its number.
    pub fn position(&self, key: &(String, u32)) -> Option<u32> {
        self.positions.get(key).copied()
    }

    /// The label of a position as plain text; `?9` of one outside of the table.
    pub fn text(&self, position: u32) -> String {
        match self.names.get(position as usize) {
            Some((name, 0)) => name.clone(),
            Some((name, k)) => format!("{name}#{k}"),
            None => format!("?{position}"),
        }
    }
}
