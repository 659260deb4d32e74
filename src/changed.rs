//! What a pass changes of a module's text, as a diff in which the numbers of values are the later text's.
//!
//! A pass that drops one node gives all nodes behind it other numbers, so a plain diff shows them all. Here lines are first
//! matched without numbers. Values of matched lines then have the later number in both texts, and a second diff shows what
//! is left: lines that came, that went, and that read another value.

use similar::{ChangeTag, TextDiff, TextDiffConfig};
use std::collections::BTreeMap;
use std::time::Duration;

/// Beyond this, a diff shows more lines than it has to.
const MOST_TIME: Duration = Duration::from_secs(20);

/// The diff, with three lines around each change. Values that are gone are `%was12`.
pub fn changed(before: &str, after: &str) -> String {
    if before == after {
        return "; nothing\n".into();
    }
    let [plain_before, plain_after] = [before, after].map(|text| renumbered(text, &mut |_, _| String::new()));
    let matched = diff().diff_lines(&*plain_before, &*plain_after);
    let [defined_before, defined_after] = [before, after].map(definitions);
    let mut later: BTreeMap<(usize, &str), &str> = BTreeMap::new();
    for change in matched.iter_all_changes().filter(|c| c.tag() == ChangeTag::Equal) {
        let (Some(old), Some(new)) = (change.old_index(), change.new_index()) else { continue };
        if let (Some(old), Some((_, new))) = (defined_before[old], defined_after[new]) {
            later.insert(old, new);
        }
    }
    let before = renumbered(before, &mut |numbering, number| later.get(&(numbering, number)).map_or(format!("was{number}"), |n| n.to_string()));
    let text = diff().diff_lines(&*before, after).unified_diff().context_radius(3).to_string();
    if text.is_empty() { "; nothing\n".into() } else { text }
}

fn diff() -> TextDiffConfig {
    let mut config = TextDiff::configure();
    config.timeout(MOST_TIME);
    config
}

/// Which numbering the values of a line are of. A numbering begins with the line of its value 0. Behind `holds`, the
/// numbers are those of the graph of all ranks, whatever the line is of.
#[derive(Default)]
struct Numberings {
    count: usize,
    /// That of the line.
    own: usize,
    /// That of the last graph of all ranks.
    whole: usize,
    /// A graph of all ranks has begun, of which no value was seen.
    is_whole: bool,
}

impl Numberings {
    fn enter(&mut self, line: &str) {
        if line.starts_with("graph ") {
            self.is_whole = true;
        }
        if line.trim_start().starts_with("%0 = ") {
            self.count += 1;
            self.own = self.count;
            if std::mem::take(&mut self.is_whole) {
                self.whole = self.own;
            }
        }
    }

    /// Of a `%` behind this text of the line; none within a name, as of a buffer.
    fn of(&self, before: &str) -> Option<usize> {
        match () {
            () if before.ends_with(['"', '_']) => None,
            () if before.ends_with(" holds ") => Some(self.whole),
            () => Some(self.own),
        }
    }
}

/// Of each line that is a node, its numbering and its number.
fn definitions(text: &str) -> Vec<Option<(usize, &str)>> {
    let mut numberings = Numberings::default();
    text.lines()
        .map(|line| {
            numberings.enter(line);
            let (number, _) = line.trim_start().strip_prefix('%')?.split_once(" = ")?;
            Some((numberings.own, number))
        })
        .collect()
}

/// The text with other numbers behind each `%`: what `number` makes of a value's numbering and number.
fn renumbered(text: &str, number: &mut dyn FnMut(usize, &str) -> String) -> String {
    let (mut out, mut numberings) = (String::new(), Numberings::default());
    for line in text.split_inclusive('\n') {
        numberings.enter(line);
        let mut rest = line;
        while let Some((before, behind)) = rest.split_once('%') {
            out += before;
            out.push('%');
            let digits = behind.find(|c: char| !c.is_ascii_digit()).unwrap_or(behind.len());
            match numberings.of(before) {
                Some(numbering) if digits > 0 => out += &number(numbering, &behind[..digits]),
                _ => out += &behind[..digits],
            }
            rest = &behind[digits..];
        }
        out += rest;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::changed;

    #[test]
    fn values_that_have_another_number_alone_are_no_change() {
        let before = "graph\n  %0 = input 0\n  %1 = cut %0\n  %2 = exp %0\n  %3 = log %2\n  %4 = neg %1\n";
        let after = "graph\n  %0 = input 0\n  %1 = exp %0\n  %2 = log %1\n  %3 = neg %0\n";
        let diff = changed(before, after);
        let changes: Vec<&str> = diff.lines().filter(|l| l.starts_with(['+', '-'])).collect();
        assert_eq!(changes, ["-  %was1 = cut %0", "-  %3 = neg %was1", "+  %3 = neg %0"]);
        assert_eq!(changed(after, after), "; nothing\n");
    }

    /// What stands behind the nodes of a graph, and what a rank's graph says of that of all ranks.
    #[test]
    fn lines_without_a_node_have_the_numbers_of_their_graph() {
        let module = |n: u32, list: &str| {
            let input = |k: u32| format!("%{k} = input 0 : f32[\"%{k}\"]");
            let skipped = if n == 1 { "  %0 = cut 0\n" } else { "" };
            format!("graph m\nbody:\n{skipped}  {}\nloss %{n}\nlocal\nbody:\n  {} holds %{n} {{}}\nreport 0 = %0\n{list}\n", input(n), input(0))
        };
        let changes = |diff: String| diff.lines().filter(|l| l.starts_with(['+', '-'])).map(String::from).collect::<Vec<_>>();
        let diff = changed(&module(1, "list a").replace("\"%1\"", "\"%0\""), &module(0, "list b"));
        assert_eq!(changes(diff), ["-  %was0 = cut 0", "-list a", "+list b"]);
    }

    #[test]
    fn each_graph_has_numbers_of_its_own() {
        let graph = |first: &str| format!("train\n{first}  %1 = exp %0\neval\n  %0 = input 0\n  %1 = log %0\n");
        let diff = changed(&graph("  %0 = input 0\n"), &graph("  %0 = input 1\n"));
        let changes: Vec<&str> = diff.lines().filter(|l| l.starts_with(['+', '-'])).collect();
        assert_eq!(changes, ["-  %was0 = input 0", "-  %1 = exp %was0", "+  %0 = input 1", "+  %1 = exp %0"]);
    }
}
