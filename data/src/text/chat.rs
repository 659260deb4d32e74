//! Lists of messages as text: the chat template of a tokenizer, which is a Jinja program, as `apply_chat_template` of
//! Hugging Face's transformers runs it; and what of the text assistants say.
//!
//! A template that marks what it generates (`{% generation %} .. {% endgeneration %}`) says itself which text that
//! is. Of others it is what a message of the role `assistant` adds to the text of the messages before it, behind what
//! asks for an answer (`add_generation_prompt`). That text has to be the same whatever follows.

use super::error::TextError;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, context};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// A chat template, with the tokens of its tokenizer that it names.
pub struct Chat {
    file: PathBuf,
    environment: Environment<'static>,
    tokens: BTreeMap<String, String>,
    /// Whether it says which text assistants generate.
    marks: bool,
    hash: blake3::Hash,
}

/// A text, and the bytes of it that are learnt: of a conversation what assistants say.
pub struct RenderedChat {
    pub text: String,
    pub learnt: Vec<Range<usize>>,
}

/// What stands around generated text until its place is known. No text of a message may have them.
const MARKS: [char; 2] = ['\u{10fffe}', '\u{10ffff}'];
const NAME: &str = "chat";

impl Chat {
    /// The template in a file, else the `chat_template.jinja` beside a `tokenizer.json`, else the `chat_template` of
    /// the `tokenizer_config.json` there; of several the one that is called `default`.
    ///
    /// # Errors
    /// There is none; it is no Jinja.
    pub fn open(tokenizer: &Path, own: Option<&Path>) -> Result<Chat, TextError> {
        let config = tokenizer.with_file_name("tokenizer_config.json");
        let held: serde_json::Value = fs::read(&config).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default();
        let beside = tokenizer.with_file_name("chat_template.jinja");
        let file = own.map(Path::to_path_buf).or_else(|| Some(beside).filter(|f| f.is_file()));
        let (file, text) = match file {
            Some(file) => {
                let text = fs::read_to_string(&file).map_err(|cause| TextError::Io { file: file.clone(), cause })?;
                (file, text)
            }
            None => {
                let text = of_config(&held["chat_template"]).ok_or_else(|| TextError::Template {
                    file: config.clone(),
                    what: "it has no chat template, and no chat_template.jinja is beside it: name the file of one".into(),
                })?;
                (config, text)
            }
        };
        let tokens = held.as_object().into_iter().flatten().filter(|(name, _)| name.ends_with("_token"));
        let tokens = tokens.filter_map(|(name, token)| Some((name.clone(), token.as_str().or_else(|| token["content"].as_str())?.to_string())));
        let (text, marks) = marked(&text);
        let hash = blake3::hash(text.as_bytes());
        let environment = environment(text).map_err(|e| TextError::Template { file: file.clone(), what: said(&e) })?;
        Ok(Chat { file, environment, tokens: tokens.collect(), marks, hash })
    }

    /// Where it is from.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Hash of the template.
    pub fn hash(&self) -> blake3::Hash {
        self.hash
    }

    /// As [`Chat::text`], of a line of JSON.
    ///
    /// # Errors
    /// As [`Chat::text`], with the column if the line is no JSON.
    pub fn line(&self, line: &[u8], field: &str) -> Result<RenderedChat, (Option<usize>, String)> {
        let object: Value = serde_json::from_slice(line).map_err(|e| {
            let what = e.to_string();
            let what = what.rsplit_once(" at line ").map_or(what.as_str(), |(what, _)| what);
            (Some(e.column().max(1)), format!("{what}: each line is a JSON object whose field `{field}` is a list of messages"))
        })?;
        self.text(&object, field).map_err(|what| (None, what))
    }

    /// The text of the messages that a field of a JSON object has; with its `tools`, where it has any.
    ///
    /// # Errors
    /// What is no object with such a list; what the template says; a template that writes what assistants say
    /// otherwise where other messages follow, and does not mark it.
    pub fn text(&self, object: &Value, field: &str) -> Result<RenderedChat, String> {
        let missing = || format!("it has no list of messages `{field}`: name the field that has it");
        let list = object.get_attr(field).ok().filter(|list| list.kind() == ValueKind::Seq).ok_or_else(missing)?;
        let messages: Vec<Value> = list.try_iter().map_err(|e| e.to_string())?.collect();
        let tools = object.get_attr("tools").ok().filter(|tools| !tools.is_undefined()).unwrap_or(Value::from(()));
        let all = self.render(&messages, &tools, Prompt::None)?;
        if self.marks {
            return unmarked(&all);
        }
        let mut learnt = vec![];
        for (n, _) in messages.iter().enumerate().filter(|(_, m)| m.get_attr("role").is_ok_and(|role| role.as_str() == Some("assistant"))) {
            let begin = self.render(&messages[..n], &tools, Prompt::Asked)?;
            let end = self.render(&messages[..=n], &tools, Prompt::None)?;
            if !end.starts_with(&begin) || !all.starts_with(&end) {
                return Err(format!(
                    "message {n}, counted from 0: where it begins or ends in the text cannot be told, as the template writes it otherwise before \
                     other messages, or asks for it with other text: have the template mark it by {{% generation %}}"
                ));
            }
            learnt.push(begin.len()..end.len());
        }
        Ok(RenderedChat { text: all, learnt })
    }

    fn render(&self, messages: &[Value], tools: &Value, prompt: Prompt) -> Result<String, String> {
        let add_generation_prompt = prompt == Prompt::Asked;
        let none = Value::from(());
        let of = context! { messages, tools, documents => none, add_generation_prompt, ..Value::from_pairs(self.tokens.clone()) };
        self.environment.get_template(NAME).and_then(|template| template.render(of)).map_err(|e| format!("the chat template: {}", said(&e)))
    }
}

/// Whether the text ends with what asks for an answer.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Prompt {
    Asked,
    None,
}

/// A template, or the default one of a list.
fn of_config(template: &serde_json::Value) -> Option<String> {
    let of_list = || template.as_array()?.iter().find(|t| t["name"] == "default")?["template"].as_str();
    template.as_str().or_else(of_list).map(String::from)
}

/// The same with filters in place of the tags of generated text, which Jinja itself does not have; and whether there
/// are any.
fn marked(template: &str) -> (String, bool) {
    let mut out = String::with_capacity(template.len());
    let (mut rest, mut found) = (template, false);
    while let Some(begin) = rest.find("{%") {
        let Some(length) = rest[begin..].find("%}") else { break };
        let tag = &rest[begin..begin + length + 2];
        let with = match tag.trim_matches(['{', '%', '}', '-', '+']).trim() {
            "generation" => Some(tag.replace("generation", "filter generation")),
            "endgeneration" => Some(tag.replace("endgeneration", "endfilter")),
            _ => None,
        };
        found |= with.is_some();
        out += &rest[..begin];
        out += with.as_deref().unwrap_or(tag);
        rest = &rest[begin + tag.len()..];
    }
    (out + rest, found)
}

/// A text without marks, and where they were.
fn unmarked(marked: &str) -> Result<RenderedChat, String> {
    let (mut text, mut learnt, mut begun) = (String::new(), vec![], None);
    for c in marked.chars() {
        match (MARKS.iter().position(|m| *m == c), begun) {
            (None, _) => text.push(c),
            (Some(0), None) => begun = Some(text.len()),
            (Some(1), Some(begin)) => {
                learnt.push(begin..text.len());
                begun = None;
            }
            (Some(_), _) => return Err(format!("a message has U+{:X}, which no text has", c as u32)),
        }
    }
    Ok(RenderedChat { text, learnt })
}

/// An environment as transformers sets it up, but without the day's date (`strftime_now`), so that the same messages
/// make the same text.
fn environment(template: String) -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_unknown_method_callback(unknown_method_callback);
    environment.add_function("raise_exception", |what: String| -> Result<Value, Error> { Err(Error::new(ErrorKind::InvalidOperation, what)) });
    environment.add_filter("tojson", json);
    environment.add_filter("generation", |_: &State, text: String| format!("{}{text}{}", MARKS[0], MARKS[1]));
    environment.add_template_owned(NAME, template)?;
    Ok(environment)
}

/// What is wrong, with its line.
fn said(error: &Error) -> String {
    let what = error.detail().map_or_else(|| error.kind().to_string(), String::from);
    error.line().map_or(what.clone(), |line| format!("line {line}: {what}"))
}

/// Writes JSON as Python's `json.dumps` does with `ensure_ascii=False`.
fn json(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    // The option is accepted and ignored, as the text is Unicode in either case.
    let _: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let mut out = vec![];
    let written = match indent {
        Some(n) => value.serialize(&mut Serializer::with_formatter(&mut out, PrettyFormatter::with_indent(" ".repeat(n.min(80)).as_bytes()))),
        None => value.serialize(&mut Serializer::with_formatter(&mut out, SpacedFormatter)),
    };
    let wrong = |what: String| Error::new(ErrorKind::BadSerialization, what);
    written.map_err(|e| wrong(e.to_string()))?;
    String::from_utf8(out).map_err(|e| wrong(e.to_string()))
}

/// A JSON formatter with a space behind each comma and colon.
struct SpacedFormatter;

impl Formatter for SpacedFormatter {
    fn begin_array_value<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(b": ")
    }
}

#[cfg(test)]
mod tests;
