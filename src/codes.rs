//! What the codes of mcc's messages mean: `mcc explain E0637`.

use std::fmt::Write;
use verify::Invariant;

const PAGE: &str = include_str!("../docs/errors.md");

/// Whether a word has the form of a code: a letter and a number.
pub fn is_code(word: &str) -> bool {
    word.split_at_checked(1).is_some_and(|(letter, number)| {
        matches!(letter, "E" | "W" | "V") && matches!(number.len(), 3 | 4) && number.bytes().all(|b| b.is_ascii_digit())
    })
}

/// What a code means, in some lines; none if mcc has no such code.
pub fn meaning(code: &str) -> Option<String> {
    if code == "V950" {
        return Some(bug("V950: The code of a kernel computes what the kernel's body says.\n", "when a kernel's code is made"));
    }
    if let Some(i) = Invariant::ALL.iter().find(|i| i.to_string() == code) {
        return Some(bug(&format!("{i} ({}): {}\n", i.name(), i.holds()), &format!("of: {}", i.group().title.to_lowercase())));
    }
    let cells = |line: &'static str| -> Vec<&str> { line.trim_matches('|').split(" | ").map(str::trim).collect() };
    let row = PAGE.lines().filter(|l| l.starts_with('|')).map(cells).find(|row| row[0].split(", ").any(|c| c == code))?;
    let mut out = format!("{code}: {}\n", row.get(1)?);
    if let Some(example) = row.get(2).filter(|e| !e.is_empty()) {
        let _ = writeln!(out, "\nfor example: {example}");
    }
    Some(out)
}

fn bug(what: &str, when: &str) -> String {
    format!("{what}\nThis always holds, whatever the input ({when}). A compile that ends with it has found a bug in mcc: please report it.\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_a_meaning() {
        let first = PAGE.lines().filter_map(|l| l.strip_prefix("| ")?.split_once(" |")).flat_map(|(codes, _)| codes.split(", "));
        let listed: Vec<&str> = first.filter(|w| is_code(w)).collect();
        assert!(listed.contains(&"W0204") && listed.len() > 80, "{}", listed.len());
        for code in listed {
            let text = meaning(code).unwrap_or_else(|| panic!("{code}"));
            assert!(text.starts_with(&format!("{code}: ")) && text.len() > code.len() + 8, "{text}");
        }
        for i in Invariant::ALL {
            assert!(meaning(&i.to_string()).is_some_and(|text| text.contains(i.holds())), "{i}");
        }
        assert!(meaning("V950").is_some_and(|text| text.contains("body")));
        assert_eq!((meaning(&format!("E{:04}", 0)), meaning("V999")), (None, None));
        assert!(is_code("V213") && is_code("W0801") && !is_code("E12") && !is_code("x.mdl") && !is_code("Ψ0101") && !is_code(""));
    }
}
