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

/// The diff, with three lines around each change; values that are gone are `%was12`.
pub fn changed(before: &str, after: &str) -> String {
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
    let before = renumbered(before, &mut |graph, number| later.get(&(graph, number)).map_or(format!("was{number}"), |n| n.to_string()));
    let text = diff().diff_lines(&*before, after).unified_diff().context_radius(3).to_string();
    if text.is_empty() { "; nothing\n".into() } else { text }
}

fn diff() -> TextDiffConfig {
    let mut config = TextDiff::configure();
    config.timeout(MOST_TIME);
    config
}

/// Of each line that is a node, its graph and its number. Each line that is not indented begins a graph.
fn definitions(text: &str) -> Vec<Option<(usize, &str)>> {
    let mut graph = 0;
    let node = |line: &str| -> Option<usize> {
        line.trim_start().strip_prefix('%').map(|rest| rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len()))
    };
    text.lines()
        .map(|line| {
            graph += usize::from(!line.starts_with(' '));
            node(line).map(|digits| (graph, &line.trim_start()[1..=digits]))
        })
        .collect()
}

/// The text with other numbers behind each `%`: what `number` makes of a value's graph and number.
fn renumbered(text: &str, number: &mut dyn FnMut(usize, &str) -> String) -> String {
    let (mut out, mut graph) = (String::new(), 0);
    for line in text.split_inclusive('\n') {
        graph += usize::from(!line.starts_with(' '));
        for (k, part) in line.split('%').enumerate() {
            if k == 0 {
                out += part;
                continue;
            }
            let digits = part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len());
            out.push('%');
            if digits > 0 {
                out += &number(graph, &part[..digits]);
            }
            out += &part[digits..];
        }
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

    #[test]
    fn each_graph_has_numbers_of_its_own() {
        let graph = |first: &str| format!("train\n{first}  %1 = exp %0\neval\n  %0 = input 0\n  %1 = log %0\n");
        let diff = changed(&graph("  %0 = input 0\n"), &graph("  %0 = input 1\n"));
        let changes: Vec<&str> = diff.lines().filter(|l| l.starts_with(['+', '-'])).collect();
        assert_eq!(changes, ["-  %was0 = input 0", "-  %1 = exp %was0", "+  %0 = input 1", "+  %1 = exp %0"]);
    }
}
