//! The page of all invariants, `docs/verifier.md`, from their table.

use crate::{BEYOND_TEXTS, GROUPS, Group, Invariant};
use std::fmt::Write;

/// The page, as Markdown. A test holds the file to it.
pub fn invariants() -> String {
    let mut out = String::from(
        "# Verifiers

After every pass of every compile a verifier checks the module, and trusts nothing of the pass. Each thing that it
checks, an invariant, has a number. [passes.md](passes.md#verifiers) says which verifier runs when. This page is made of
the table in [`verify/src/invariant.rs`](../verify/src/invariant.rs).

A complaint is a bug in mcc, whatever the input. It names the invariant, the place from the outside in, and what is
there instead:

```
error: bug in mcc: after `events`: V803: stage 0, train, forward microbatch 1, command 5 (launch of kernel 4): nothing orders it after ..
  = V803: Of two commands that touch the same bytes, one of them writing, one is ordered after the other.
```

A number keeps its meaning: one that is no longer checked is not given to another invariant. Each has a file in
[`passes/tests/files/verify`](../passes/tests/files/verify), which breaks a sound module in one place. No text of a
module can break the few in the next table: a test breaks them in a module that was read,
or in mcc's own table.

Beside these there is V950, that a kernel's code computes what the kernel's body says. It is looked at when code is
made, not between passes ([proofs.md](proofs.md#how-a-kernels-code-is-held-to-its-body)).

| number | why no text can break it |
|---|---|
",
    );
    for (invariant, why) in BEYOND_TEXTS {
        let _ = writeln!(out, "| {invariant} | {why} |");
    }
    for group in GROUPS {
        let Group { title, file, .. } = group;
        let _ = write!(out, "\n## {title}\n\nIn [`verify/src/{file}`](../verify/src/{file}).\n\n| number | name | what holds |\n|---|---|---|\n");
        for i in Invariant::ALL.iter().filter(|i| i.group().first == group.first) {
            let _ = writeln!(out, "| {i} | `{}` | {} |", i.name(), i.holds());
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::Path;

    #[test]
    fn the_page_of_verifiers_is_current() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/verifier.md");
        let page = invariants();
        if std::env::var_os("UPDATE_EXPECT").is_some() {
            fs::write(&path, &page).expect("the page");
        }
        assert!(fs::read_to_string(&path).is_ok_and(|text| text == page), "docs/verifier.md is another one; UPDATE_EXPECT=1 renews it");
    }

    #[test]
    fn numbers_ascend_and_names_differ() {
        assert!(Invariant::ALL.windows(2).all(|w| w[0].number() < w[1].number()));
        let sentences: BTreeSet<&str> = Invariant::ALL.iter().map(|i| i.holds()).collect();
        assert_eq!(sentences.len(), Invariant::ALL.len());
        assert_eq!((Invariant::ReadBeforeWrite.to_string(), Invariant::ReadBeforeWrite.name()), ("V660".into(), "read_before_write".into()));
    }

    #[test]
    fn every_group_is_a_file_with_invariants_that_it_checks() {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        for group in GROUPS {
            let own: Vec<&Invariant> = Invariant::ALL.iter().filter(|i| i.group().first == group.first).collect();
            assert!(!own.is_empty(), "{}", group.title);
            let text = fs::read_to_string(source.join(group.file)).expect("the file of a group");
            assert!(own.iter().any(|i| text.contains(&format!("Invariant::{i:?}"))), "{}", group.file);
        }
    }
}
