//! What a script reads and asks for: files beside it that it sources, and the few commands whose output is
//! known without running them, which take paths apart.

use super::grammar::{parse, with_braces};
use super::script::MOST_SOURCES;
use super::shell::{ScriptError, Shell};
use super::text::{Fields, Text};
use super::words::Walk;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use tree_sitter::Node;

/// Most bytes of a script.
pub const MOST_BYTES: u64 = 1 << 20;

/// Commands that may be known by what they are given.
const KNOWN: [&str; 4] = ["basename", "dirname", "cd", "echo"];

impl Walk<'_, '_> {
    /// Follows a file that lies in the script's directory or below it, as `source FILE` does. Others are named.
    pub fn sourced(&mut self, words: &[Text], line: usize) -> Result<(), ScriptError> {
        let Some(file) = words.get(1) else { return Ok(()) };
        let arguments = words[2..].to_vec();
        let shown = self.shell.shown(file);
        let refused = |why: &str| format!("`{shown}` is not read: {why}; what it sets can be given as `--set NAME=VALUE`");
        let found = match file.whole() {
            Some(name) => beside(self.shell, Path::new(name)),
            None => Err("its name is not known".into()),
        };
        let source = match found {
            _ if self.depth >= MOST_SOURCES => Err("too many files are within each other".into()),
            Ok(path) => read(&path).map_err(|e| e.to_string()),
            Err(why) => Err(why),
        };
        let source = match source {
            Ok(source) => source,
            Err(why) => {
                let text = refused(&why);
                self.shell.note(line, text);
                return Ok(());
            }
        };
        self.shell.charge(source.len(), line)?;
        // Line numbers of the file differ from all of the script's.
        let first_line = self.shell.begin_file(&shown);
        let source = with_braces(&source);
        let tree = parse(&source, first_line, self.shell).map_err(|e| e.at(line))?;
        let before = (!arguments.is_empty()).then(|| self.shell.arguments.replace(arguments));
        let mut walk = Walk { source: &source, first_line, shell: self.shell, functions: BTreeMap::new(), depth: self.depth + 1 };
        let done = walk.all(tree.root_node()).map_err(|e| e.at(line));
        let functions: Vec<String> = walk.functions.keys().cloned().collect();
        if let Some(before) = before {
            self.shell.arguments = before;
        }
        // The file may have ended with `return`.
        self.shell.has_ended = false;
        if !functions.is_empty() {
            self.shell.note(line, format!("functions of `{shown}` are not followed where they are called: {}", functions.join(", ")));
        }
        done
    }

    /// What a command prints, if it is one of those that take a path apart, or repeat their words.
    pub fn known_output(&mut self, command: &str, line: usize) -> Result<Option<Text>, ScriptError> {
        let first = command.split_whitespace().next().unwrap_or("");
        if !KNOWN.contains(&first) {
            return Ok(None);
        }
        let text = self.within(command, line, |walk, root| {
            let mut cursor = root.walk();
            let statements: Vec<Node> = root.named_children(&mut cursor).collect();
            match statements.as_slice() {
                [only] if only.kind() == "command" => walk.output(*only, line),
                // The command may be `cd DIR && pwd`.
                [only] if only.kind() == "list" => {
                    let mut cursor = only.walk();
                    let parts: Vec<Node> = only.children(&mut cursor).collect();
                    let [cd, op, pwd] = parts.as_slice() else { return Ok(None) };
                    let is_pwd = op.kind() == "&&" && matches!(walk.source_of(*pwd).trim(), "pwd" | "pwd -P");
                    if is_pwd && cd.kind() == "command" { walk.output(*cd, line) } else { Ok(None) }
                }
                _ => Ok(None),
            }
        })?;
        Ok(text.flatten())
    }

    fn output(&mut self, command: Node<'_>, line: usize) -> Result<Option<Text>, ScriptError> {
        let mut cursor = command.walk();
        let parts: Vec<Node> = command.named_children(&mut cursor).collect();
        let mut words = vec![];
        for part in parts {
            words.extend(self.words(part)?);
        }
        let words: Vec<Text> = words.into_iter().filter(|w| w.whole() != Some("--")).collect();
        if words[1..].iter().any(|w| w.starts_with("-")) {
            return Ok(None);
        }
        Ok(match (words[0].whole(), &words[1..]) {
            (Some("basename"), [path]) => path.base_name(),
            (Some("basename"), [path, ending]) => path.base_name().zip(ending.whole()).map(|(name, ending)| match name.whole() {
                Some(whole) => Text::known(whole.strip_suffix(ending).filter(|rest| !rest.is_empty()).unwrap_or(whole), line),
                None => name.without_end(ending),
            }),
            (Some("dirname"), [path]) => path.dir_name(),
            (Some("cd"), [path]) => Some(path.clone()),
            (Some("echo"), words) => {
                let mut fields = Fields::default();
                for word in words {
                    fields.end();
                    fields.quoted(word);
                }
                Some(fields.joined(line))
            }
            _ => None,
        })
    }
}

/// Where a file is that a script names, if it is in the script's directory or below it.
fn beside(shell: &Shell, name: &Path) -> Result<PathBuf, String> {
    let Some(script) = &shell.script else { return Err("no file but the script is read here".into()) };
    let home = script.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let within = |path: PathBuf| {
        let (found, home) = (path.canonicalize().ok()?, home.canonicalize().ok()?);
        Some(found.starts_with(home)).map(|inside| (found, inside))
    };
    // The file is looked for beside the script, where such scripts are started, and then as `$(dirname $0)` gives it.
    match within(home.join(name)).or_else(|| within(name.to_path_buf())) {
        Some((path, true)) if path.is_file() => Ok(path),
        Some((_, true)) => Err("it is no file".into()),
        Some((_, false)) => Err("it is not in the script's directory".into()),
        None => Err("there is no such file beside the script".into()),
    }
}

/// The text of a script.
pub fn read(path: &Path) -> Result<String, Unreadable> {
    let mut bytes = vec![];
    File::open(path)?.take(MOST_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MOST_BYTES {
        return Err(Unreadable::Long);
    }
    String::from_utf8(bytes).map_err(|_| Unreadable::Bytes)
}

#[derive(Debug, thiserror::Error)]
pub enum Unreadable {
    #[error("{0}")]
    Io(#[from] std::io::Error),
    #[error("it has more than {MOST_BYTES} bytes, which no launch script has: is it one?")]
    Long,
    #[error("it is no text in UTF-8: is it a launch script?")]
    Bytes,
}
