//! What Rust source says of its own types: members, and the comments that document them. Pages are made of it.

/// A type, or a member of one.
#[derive(Default)]
pub struct Declared {
    pub name: String,
    /// What stands behind the name: a field's type, a variant's payload or its name in texts.
    pub of: String,
    /// The text of its documentation, in Markdown; paragraphs are separated by empty lines.
    pub says: String,
    pub members: Vec<Declared>,
}

/// The type whose declaration begins with a line that ends with `head {`, as in `pub enum Op`.
pub fn declared(source: &str, head: &str) -> Declared {
    let lines: Vec<&str> = source.lines().collect();
    let at = lines.iter().position(|l| l.strip_suffix(" {").is_some_and(|l| l.trim() == head)).unwrap_or_else(|| panic!("no `{head}`"));
    let before = lines[..at].iter().rposition(|l| !l.trim().starts_with("///") && !l.trim().starts_with("#[")).map_or(0, |k| k + 1);
    let indent = lines[at].len() - lines[at].trim_start().len();
    let end = at + lines[at..].iter().position(|l| l.trim() == "}" && l.len() == indent + 1).expect("a declaration ends");
    let name = head.rsplit(' ').next().unwrap_or(head).to_string();
    Declared { name, of: String::new(), says: documentation(&lines[before..at]), members: members(&lines[at + 1..end]) }
}

/// The members of a declaration's body.
fn members(lines: &[&str]) -> Vec<Declared> {
    let (mut out, mut from, mut k) = (vec![], 0, 0);
    while k < lines.len() {
        let line = lines[k].trim();
        let indent = lines[k].len() - lines[k].trim_start().len();
        let first = k;
        if !line.is_empty() && !line.starts_with("//") && !line.starts_with("#[") {
            let text = line.trim_start_matches("pub ");
            let end = text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
            let of = text[end..].trim_matches([' ', ',', ':', '=', '{', '"']).to_string();
            let mut inner = vec![];
            if line.ends_with('{') {
                let closes = |l: &&str| l.trim().starts_with('}') && l.len() - l.trim_start().len() == indent;
                let len = lines[k + 1..].iter().position(closes).expect("a member ends");
                inner = members(&lines[k + 1..k + 1 + len]);
                k += len + 1;
            }
            out.push(Declared { name: text[..end].to_string(), of, says: documentation(&lines[from..first]), members: inner });
            from = k + 1;
        }
        k += 1;
    }
    out
}

/// The documentation of lines: links to items are their names.
fn documentation(lines: &[&str]) -> String {
    let text: Vec<&str> = lines.iter().filter_map(|l| l.trim().strip_prefix("///")).map(|l| l.strip_prefix(' ').unwrap_or(l)).collect();
    let mut out = String::new();
    for (k, part) in text.join("\n").split("[`").enumerate() {
        match (k, part.split_once("`]")) {
            (0, _) | (_, None) => out += part,
            (_, Some((item, rest))) => {
                let rest = rest.strip_prefix('(').and_then(|r| r.split_once(')')).map_or(rest, |(_, rest)| rest);
                out += &format!("`{}`{rest}", item.rsplit("::").next().unwrap_or(item));
            }
        }
    }
    out
}

/// Text for prose: lines of at most 118 columns, paragraphs of at most four lines, behind so many columns from the second line on.
pub fn wrapped(text: &str, indent: usize) -> String {
    let mut out: Vec<String> = vec![];
    for paragraph in text.split("\n\n") {
        let mut lines = vec![String::new()];
        for word in paragraph.split_whitespace() {
            let line = lines.last_mut().expect("invariant: one at least");
            let ends = line.ends_with('.') && lines.len() == 4;
            let line = lines.last_mut().expect("invariant: one at least");
            if ends {
                out.push(lines.join("\n"));
                lines = vec![word.to_string()];
            } else if line.chars().count() + 1 + word.chars().count() > 118 - indent {
                lines.push(word.to_string());
            } else {
                *line = format!("{line} {word}").trim().to_string();
            }
        }
        out.push(lines.join("\n"));
    }
    out.join("\n\n").replace('\n', &format!("\n{}", " ".repeat(indent))).replace(&format!("\n{}\n", " ".repeat(indent)), "\n\n")
}
