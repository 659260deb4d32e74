//! How documents read: lines and paragraphs that fit the eye, links that lead somewhere, a book that has every page.

use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Component, Path, PathBuf};

/// Columns of a line of prose; lines of tables, of code and those of one link alone are as wide as they are.
const WIDTH: usize = 120;
/// Lines of a paragraph, or of a list's item.
const LINES: usize = 4;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// All files below a folder whose names end so, but for what is built or fetched.
fn files(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).expect("a folder").map(|e| e.expect("an entry").path());
    let is_ours = |p: &PathBuf| !["target", "out", ".git"].iter().any(|n| p.ends_with(n));
    let below = |p: PathBuf| if p.is_dir() { files(&p, extension) } else { vec![p] };
    entries.filter(is_ours).flat_map(below).filter(|p| p.extension().is_some_and(|e| e == extension)).collect()
}

/// All documents, by their paths in the repository.
fn documents() -> BTreeMap<PathBuf, String> {
    let inside = |p: &Path| p.strip_prefix(root()).expect("below the root").to_path_buf();
    let all: BTreeMap<_, _> = files(root(), "md").iter().map(|p| (inside(p), std::fs::read_to_string(p).expect("UTF-8"))).collect();
    assert!(all.len() > 20, "documents of the repository");
    all
}

fn events(text: &str) -> impl Iterator<Item = (Event<'_>, Range<usize>)> {
    Parser::new_ext(text, Options::ENABLE_TABLES).into_offset_iter()
}

/// Pieces of prose, each all that stands between two blocks (a paragraph, a heading, an item of a list), with the
/// number of its first line. Tables and code are none.
fn prose(text: &str) -> Vec<(usize, &str)> {
    let mut pieces: Vec<Range<usize>> = vec![Range::default()];
    let mut other = 0;
    for (event, range) in events(text) {
        let inside = other > 0;
        match event {
            Event::Start(Tag::Table(_) | Tag::CodeBlock(_) | Tag::HtmlBlock) => other += 1,
            Event::End(TagEnd::Table | TagEnd::CodeBlock | TagEnd::HtmlBlock) => other -= 1,
            Event::Text(_) | Event::Code(_) | Event::SoftBreak | Event::HardBreak | Event::InlineHtml(_) => {
                let last = pieces.last_mut().expect("the first");
                *last = if last.start == last.end { range } else { last.start..range.end };
                continue;
            }
            Event::Start(Tag::Emphasis | Tag::Strong | Tag::Link { .. }) | Event::End(TagEnd::Emphasis | TagEnd::Strong | TagEnd::Link) => continue,
            _ => {}
        }
        if inside {
            pieces.pop();
        }
        pieces.push(Range::default());
    }
    pieces.retain(|p| p.start < p.end);
    pieces.into_iter().map(|p| (1 + text[..p.start].matches('\n').count(), whole_lines(text, p))).collect()
}

/// The lines that a range touches.
fn whole_lines(text: &str, range: Range<usize>) -> &str {
    let begin = text[..range.start].rfind('\n').map_or(0, |n| n + 1);
    let end = text[range.end..].find('\n').map_or(text.len(), |n| range.end + n);
    &text[begin..end]
}

#[test]
fn lines_and_paragraphs_are_short() {
    let mut wrong = vec![];
    for (path, text) in documents() {
        for (line, piece) in prose(&text) {
            let lines: Vec<&str> = piece.lines().collect();
            if lines.len() > LINES {
                wrong.push(format!("{}:{line}: {} lines of one paragraph", path.display(), lines.len()));
            }
            for (k, wide) in lines.iter().enumerate().filter(|(_, l)| l.chars().count() > WIDTH && l.contains(' ')) {
                wrong.push(format!("{}:{}: {} columns", path.display(), line + k, wide.chars().count()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}: more than {LINES} lines a paragraph, or {WIDTH} columns a line\n{}", wrong.len(), wrong.join("\n"));
}

/// The anchor that GitHub gives a heading.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c.to_ascii_lowercase() }).collect()
}

/// Anchors of all headings of a document; of equal ones the second has `-1`.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut out = BTreeSet::new();
    let mut heading: Option<String> = None;
    for (event, _) in events(text) {
        match event {
            Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
            Event::Text(t) | Event::Code(t) => {
                if let Some(heading) = &mut heading {
                    heading.push_str(&t);
                }
            }
            Event::End(TagEnd::Heading(_)) => {
                let anchor = anchor(&heading.take().expect("a heading"));
                let more = (1..).map(|n| format!("{anchor}-{n}"));
                let new = std::iter::once(anchor.clone()).chain(more).find(|a| !out.contains(a)).expect("one is free");
                out.insert(new);
            }
            _ => {}
        }
    }
    out
}

/// A path without `.` and `..`.
fn without_dots(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(out.pop()),
            Component::CurDir => {}
            part => out.push(part),
        }
    }
    out
}

#[test]
fn links_lead_to_files_and_headings_that_are_there() {
    let documents = documents();
    let (mut wrong, mut followed) = (vec![], 0);
    for (path, text) in &documents {
        for (event, range) in events(text) {
            let Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) = event else { continue };
            if dest_url.contains("://") || dest_url.starts_with("mailto:") {
                continue;
            }
            followed += 1;
            let (file, heading) = dest_url.split_once('#').unwrap_or((&dest_url, ""));
            let target = if file.is_empty() { path.clone() } else { without_dots(&path.with_file_name("").join(file)) };
            let has_heading = || heading.is_empty() || documents.get(&target).is_some_and(|d| anchors(d).contains(heading));
            if !root().join(&target).exists() || !has_heading() {
                wrong.push(format!("{}:{}: {dest_url}", path.display(), 1 + text[..range.start].matches('\n').count()));
            }
        }
    }
    assert!(followed > 300, "{followed} links");
    assert!(wrong.is_empty(), "links that lead nowhere:\n{}", wrong.join("\n"));
}

/// Whether a source declares a type of this name.
fn declares(source: &Path, name: &str) -> bool {
    let text = std::fs::read_to_string(source).expect("UTF-8");
    ["struct", "enum", "trait", "type"].into_iter().any(|kind| {
        let behind = |at: usize| text[at..].chars().next();
        let declaration = format!("{kind} {name}");
        text.match_indices(&declaration).any(|(at, _)| behind(at + declaration.len()).is_none_or(|c| !c.is_alphanumeric() && c != '_'))
    })
}

#[test]
fn words_that_the_glossary_calls_gone_name_no_file_and_no_type() {
    let page = std::fs::read_to_string(root().join("docs/glossary.md")).expect("the glossary");
    let rows = page.split("## Words that are gone").nth(1).expect("its last table").lines().filter_map(|l| l.strip_prefix("| "));
    let mut looked_at = 0;
    for row in rows.skip(1) {
        let [gone, _, folders] = row.trim_end_matches(" |").split(" | ").collect::<Vec<_>>().try_into().expect("three columns");
        for folder in folders.split(", ").map(|f| if f.contains('/') { f.into() } else { format!("{f}/src") }) {
            let is_it = |p: &&PathBuf| p.with_extension("").components().any(|c| c.as_os_str() == gone);
            let inside = |p: &PathBuf| p.strip_prefix(root()).expect("below the root").to_path_buf();
            let sources = files(&root().join(&folder), "rs");
            let found: Vec<PathBuf> = sources.iter().map(inside).collect();
            assert_eq!(found.iter().filter(is_it).collect::<Vec<_>>(), Vec::<&PathBuf>::new(), "`{gone}` in {folder}");
            let declared: Vec<&PathBuf> = sources.iter().filter(|p| declares(p, gone)).collect();
            assert_eq!(declared, Vec::<&PathBuf>::new(), "a type `{gone}` in {folder}");
            looked_at += 1;
        }
    }
    assert!(looked_at > 20, "{looked_at} rows");
}

#[test]
fn the_book_has_every_page() {
    let contents = std::fs::read_to_string(root().join("docs/SUMMARY.md")).expect("the book's contents");
    let pages = documents().into_keys().filter_map(|p| p.strip_prefix("docs").ok().map(|p| p.display().to_string()));
    let missing: Vec<String> = pages.filter(|p| p != "SUMMARY.md" && !contents.contains(&format!("]({p})"))).collect();
    assert_eq!(missing, Vec::<String>::new(), "pages that docs/SUMMARY.md lacks");
}
