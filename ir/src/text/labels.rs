//! Names in a text of things whose names are not unique: the first of a name is `keys`, the next `keys#1`.

use super::io::{Io, Result};
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

    /// The label of a position as plain text; `?9` of one outside of the table.
    pub fn text(&self, position: u32) -> String {
        match self.names.get(position as usize) {
            Some((name, 0)) => name.clone(),
            Some((name, k)) => format!("{name}#{k}"),
            None => format!("?{position}"),
        }
    }
}

/// A name and how many of the same name came before it.
pub(super) fn numbered(io: &mut Io, name: &mut String, count: &mut u32) -> Result {
    io.name(name)?;
    io.or(count, 0, "#", Io::number)
}

/// A position in a table of names. One outside of the table prints as `?9`, for dumps of broken graphs; it does not read back.
pub(super) fn label(io: &mut Io, table: for<'x> fn(&'x Io<'_>) -> &'x Labels, what: &str, position: &mut u32) -> Result {
    let mark = io.mark();
    if !io.reading() {
        return match table(io).names.get(*position as usize).cloned() {
            Some((mut name, mut count)) => numbered(io, &mut name, &mut count),
            None => io.lit(&format!("?{position}")),
        };
    }
    let mut key = (String::new(), 0);
    numbered(io, &mut key.0, &mut key.1)?;
    match table(io).positions.get(&key) {
        Some(p) => *position = *p,
        None => return io.wrong(mark, format!("no {what} is called `{}`{}", key.0, if key.1 == 0 { String::new() } else { format!("#{}", key.1) })),
    }
    Ok(())
}
