//! The settings in a model's header, with the values given for them from outside.

use super::value::{DimEntry, FrameId, Val, is_reals};
use super::{Elab, MAX_DIM};
use crate::ast::*;
use crate::names::nearest;
use ir::diag::Diagnostic;
use std::rc::Rc;

/// The kind of a setting that is a list.
const REALS: &str = "a list of numbers";

impl Elab<'_> {
    /// Evaluates the header in order; an earlier setting can be used by later ones. Returns every value as text.
    pub fn settings(&mut self, model: &Model, frame: FrameId) -> Vec<(String, String)> {
        self.check_defines(model);
        let mut shown = vec![];
        for setting in &model.settings {
            let name = &setting.name;
            if let Some(first) = self.frames[frame.0].vars.get(&name.name) {
                let e = Diagnostic::error("E0402", format!("setting `{}` is declared twice", name.name)).label(name.span, "again");
                let e = e.label(first.span, "first time");
                self.report(e.help("remove or rename one of them"));
                continue;
            }
            let val = self.setting(setting, model, frame);
            let val = match val {
                // An integer setting is also a dim.
                Val::Int(n) => {
                    let entry = DimEntry { name: name.name.clone(), size: Some(n), copy_of: None, span: name.span, ir: None };
                    Val::Dim(self.new_dim(entry))
                }
                Val::Dim(d) => {
                    let entry = DimEntry { name: name.name.clone(), size: self.dims[d.0].size, copy_of: None, span: name.span, ir: None };
                    Val::Dim(self.new_dim(entry))
                }
                other => other,
            };
            if !matches!(val, Val::Bad) {
                shown.push((name.name.to_string(), self.shown(&val)));
            }
            self.declare(frame, name, val);
        }
        shown
    }

    fn check_defines(&mut self, model: &Model) {
        let names: Vec<&str> = model.settings.iter().map(|s| &*s.name.name).collect();
        let options = self.options;
        for (name, value) in &options.defines {
            if !names.contains(&name.as_str()) {
                let e = Diagnostic::error("E0407", format!("`{}` has no setting `{name}` (given as {name}={value})", model.name.name));
                let e = e.label(model.name.span, "this model");
                self.report(match nearest(name, names.iter().copied()) {
                    Some(near) => e.help(format!("did you mean `{near}`?")),
                    None => e.help(format!("its settings are {}", names.join(", "))),
                });
            }
        }
    }

    fn setting(&mut self, setting: &Header, model: &Model, frame: FrameId) -> Val {
        let name = &setting.name;
        let given = self.options.defines.iter().rev().find(|(n, _)| n.as_str() == &*name.name).map(|(_, v)| v.clone());
        let Some(text) = given else {
            return match &setting.default {
                Some(default) => {
                    if !self.uses_earlier(default, setting, model, frame) {
                        return Val::Bad;
                    }
                    let val = self.eval(frame, default);
                    self.setting_kind(setting, val, default.span)
                }
                None if &*name.name == "batch" => self.sequences(name, self.options.batch, "the global batch"),
                None if &*name.name == "micro_batch" => {
                    self.sequences(name, self.options.micro_batch.unwrap_or(self.options.batch), "the sequences of a microbatch")
                }
                None => {
                    let e = Diagnostic::error("E0406", format!("setting `{}` needs a value", name.name)).label(name.span, "has no default");
                    self.fail(e.help(format!("give it one: `-D {}=..`", name.name)))
                }
            };
        };
        let Some(kind) = self.wanted(setting, frame) else { return Val::Bad };
        let val = literal(&text);
        let fitted = match (kind, val) {
            ("an int", Val::Int(n)) => Some(Val::Int(n)),
            ("a real", Val::Int(n)) => Some(Val::Real(n as f64)),
            ("a real", Val::Real(x)) => Some(Val::Real(x)),
            ("a bool", Val::Bool(b)) => Some(Val::Bool(b)),
            (REALS, val) if is_reals(&val) => Some(val),
            ("a text", _) => Some(Val::Text(text.trim().trim_matches('"').into())),
            ("anything", val) => Some(val),
            _ => None,
        };
        fitted.unwrap_or_else(|| {
            let e = Diagnostic::error("E0408", format!("setting `{}` wants {kind}, given `{text}`", name.name));
            let e = e.label(name.span, format!("is {kind}"));
            self.fail(match kind {
                "an int" => e.help("an integer such as 4096 or 50_304"),
                "a real" => e.help("a number such as 0.1 or 1e-5"),
                REALS => e.help("numbers in brackets, such as [1.0, 1.5], or [] for none"),
                _ => e.help("true or false"),
            })
        })
    }

    /// A number of sequences from the command line.
    fn sequences(&mut self, name: &Ident, sequences: u64, what: &str) -> Val {
        match i64::try_from(sequences) {
            Ok(size) => Val::Int(size),
            Err(_) => {
                let e = Diagnostic::error("E0302", format!("{} = {sequences} is too large for a dim", name.name));
                self.fail(e.label(name.span, what).help(format!("at most {MAX_DIM}")))
            }
        }
    }

    /// The kind of value that a setting takes: as declared, or else as its default.
    fn wanted(&mut self, setting: &Header, frame: FrameId) -> Option<&'static str> {
        match &setting.kind {
            Some(ParamKind::Int | ParamKind::Dim) => return Some("an int"),
            Some(ParamKind::Real) => return Some("a real"),
            Some(ParamKind::Bool) => return Some("a bool"),
            Some(ParamKind::Text) => return Some("a text"),
            Some(ParamKind::Reals) => return Some(REALS),
            Some(ParamKind::Type(_) | ParamKind::Dims) => {
                let e = Diagnostic::error("E0202", format!("setting `{}` cannot be a tensor or a list of dims", setting.name.name));
                self.report(e.label(setting.name.span, "an int, real, bool, text or list of numbers"));
                return None;
            }
            None => {}
        }
        let Some(default) = &setting.default else { return Some("an int") };
        // The default is evaluated only for its kind. Its errors do not matter, since another value was given.
        let (reported, seen, stopped) = (self.diagnostics.len(), self.seen.clone(), self.stopped);
        let val = self.eval(frame, default);
        self.diagnostics.truncate(reported);
        (self.seen, self.stopped) = (seen, stopped);
        Some(match val {
            Val::Int(_) | Val::Dim(_) => "an int",
            Val::Real(_) => "a real",
            Val::Bool(_) => "a bool",
            Val::Text(_) => "a text",
            Val::Reals(_) => REALS,
            Val::Dims(dims) if dims.is_empty() => REALS,
            Val::Bad | Val::None | Val::Dims(_) | Val::Tensor(_) | Val::Tuple(_) => "anything",
        })
    }

    fn setting_kind(&mut self, setting: &Header, val: Val, span: ir::diag::Span) -> Val {
        let (kind, fits) = match (&setting.kind, &val) {
            (_, Val::Bad) => return val,
            (Some(ParamKind::Int | ParamKind::Dim), v) => ("an int", matches!(v, Val::Int(_) | Val::Dim(_))),
            (Some(ParamKind::Real), v) => match self.real(v) {
                Some(x) => return Val::Real(x),
                None => ("a real", false),
            },
            (Some(ParamKind::Bool), v) => ("a bool", matches!(v, Val::Bool(_))),
            (Some(ParamKind::Text), v) => ("a text", matches!(v, Val::Text(_))),
            (Some(ParamKind::Reals), v) => (REALS, is_reals(v)),
            (Some(ParamKind::Type(_) | ParamKind::Dims) | None, v) => {
                let plain = matches!(v, Val::Int(_) | Val::Dim(_) | Val::Real(_) | Val::Bool(_) | Val::Text(_));
                ("an int, real, bool, text or list of numbers", plain || is_reals(v))
            }
        };
        if fits {
            return val;
        }
        let e = Diagnostic::error("E0202", format!("setting `{}` is {kind}, its default is {}", setting.name.name, val.kind()));
        self.fail(e.label(span, format!("is {}", val.kind())))
    }

    /// Reports a default that uses itself or a setting after it.
    fn uses_earlier(&mut self, default: &Expr, setting: &Header, model: &Model, frame: FrameId) -> bool {
        let names = crate::resolve::names_in(default);
        let later = names.iter().find(|(n, _)| !self.frames[frame.0].vars.contains_key(n) && model.settings.iter().any(|s| s.name.name == *n));
        let Some((name, span)) = later else { return true };
        let e = match cycle(&setting.name.name, model) {
            Some(path) => {
                let e = Diagnostic::error("E0405", format!("settings are defined by each other: {}", path.join(" -> ")));
                e.label(*span, "needs itself").help("give one of them a number")
            }
            None => {
                let e = Diagnostic::error("E0404", format!("setting `{name}` is used before it is declared")).label(*span, "not known yet");
                e.help(format!("move `{name}` before `{}` in the header", setting.name.name))
            }
        };
        self.report(e);
        false
    }
}

/// The settings on a way from a setting's default back to itself.
fn cycle(start: &Rc<str>, model: &Model) -> Option<Vec<String>> {
    let mut path = vec![start.clone()];
    let mut tried: Vec<Rc<str>> = vec![];
    loop {
        let last = path.last()?.clone();
        let default = model.settings.iter().find(|s| s.name.name == last).and_then(|s| s.default.as_ref());
        let uses = default.map(crate::resolve::names_in).unwrap_or_default();
        if uses.iter().any(|(n, _)| n == start) {
            return Some(path.iter().chain([start]).map(|n| n.to_string()).collect());
        }
        let next = uses.iter().find(|(n, _)| !tried.contains(n) && !path.contains(n) && model.settings.iter().any(|s| s.name.name == *n));
        match next {
            Some((n, _)) => path.push(n.clone()),
            None => {
                tried.push(path.pop()?);
                if path.is_empty() {
                    return None;
                }
            }
        }
    }
}

/// The value of a `-D`: a number, true or false, numbers in brackets, else a text.
fn literal(text: &str) -> Val {
    let text = text.trim();
    let Some(list) = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) else { return single(text) };
    if list.trim().is_empty() {
        return Val::Dims(vec![]);
    }
    let number = |item: &str| match single(item.trim()) {
        Val::Int(n) => Some(n as f64),
        Val::Real(x) => Some(x),
        _ => None,
    };
    list.split(',').map(number).collect::<Option<Vec<f64>>>().map_or_else(|| Val::Text(text.into()), |numbers| Val::Reals(numbers.into()))
}

fn single(text: &str) -> Val {
    let (negative, digits) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    match text {
        "true" => return Val::Bool(true),
        "false" => return Val::Bool(false),
        _ => {}
    }
    if digits.starts_with(|c: char| c.is_ascii_digit()) {
        match crate::build::number(digits) {
            Ok(crate::build::Number::Int(n)) => return Val::Int(if negative { -n } else { n }),
            Ok(crate::build::Number::Real(x)) => return Val::Real(if negative { -x } else { x }),
            Err(_) => {}
        }
    }
    Val::Text(text.trim_matches('"').into())
}
