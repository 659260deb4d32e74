//! A Hugging Face config by the table of its family: settings of the model text, refusals, warnings.

use crate::dtypes::Float;
use crate::family::{FAMILIES, Family, Field, FieldDefault, FieldRole, FieldValue, SettingKind};
use crate::layer_types;
use crate::quantised::Scheme;
use crate::rotary;
use serde_json::{Map, Value};

pub type Config = Map<String, Value>;

/// What a config says.
pub struct Reading {
    pub family: &'static Family,
    /// Settings of the model text and their values as the text writes them. What is left out keeps its default.
    pub settings: Vec<(&'static str, String)>,
    /// How tensors are coded.
    pub quantised: Option<Scheme>,
    pub warnings: Vec<String>,
}

/// The family of a config.
///
/// # Errors
/// None is known by its `architectures`, or without one by its `model_type`.
pub fn family(config: &Config) -> Result<&'static Family, String> {
    let known = || FAMILIES.map(|f| f.architecture).join(", ");
    if let Some(listed) = config.get("architectures").filter(|v| !v.is_null()) {
        let found = listed
            .as_array()
            .and_then(|names| names.iter().find_map(|n| FAMILIES.into_iter().find(|f| n == f.architecture || f.others.iter().any(|o| n == o))));
        return found.ok_or_else(|| format!("architectures = {listed} is none of those known: {}", known()));
    }
    let kind = config.get("model_type").unwrap_or(&Value::Null);
    FAMILIES
        .into_iter()
        .find(|f| kind == f.model_type)
        .ok_or_else(|| format!("there are no architectures, and model_type = {kind} is none of {}", known()))
}

/// Reads a config.
///
/// # Errors
/// Every field that is missing, that has no value of its kind, or that asks for what the model text does not compute.
pub fn read(config: &Config) -> Result<Reading, Vec<String>> {
    let family = family(config).map_err(|e| vec![e])?;
    let fixed = family.fixed.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
    let mut reader = Reader { config, settings: fixed, quantised: None, warnings: vec![], errors: vec![] };
    for field in family.fields() {
        reader.field(family, field.name, field.role);
    }
    if let Some(rope) = &family.rope {
        reader.rope(rope);
    }
    for (name, value) in config.iter().filter(|(name, _)| family.role(name).is_none()) {
        reader
            .warnings
            .push(format!("{name} = {value} is not known for {}; if it changes the computation, the import is wrong", family.architecture));
    }
    let Reader { settings, quantised, warnings, errors, .. } = reader;
    if errors.is_empty() { Ok(Reading { family, settings, quantised, warnings }) } else { Err(errors) }
}

pub struct Reader<'a> {
    pub config: &'a Config,
    pub settings: Vec<(&'static str, String)>,
    quantised: Option<Scheme>,
    pub warnings: Vec<String>,
    pub errors: Vec<String>,
}

impl<'a> Reader<'a> {
    fn field(&mut self, family: &Family, name: &'static str, role: FieldRole) {
        let value = self.config.get(written_as(family, self.config, name));
        match role {
            FieldRole::Setting { name: setting, kind, missing } => match (value.filter(|v| !v.is_null()), missing) {
                (Some(value), _) => match literal(value, kind) {
                    Ok(text) => self.settings.push((setting, text)),
                    Err(wanted) => self.errors.push(format!("{name} = {value} is not {wanted}")),
                },
                (None, FieldDefault::Refused) => self.errors.push(format!("{name} is missing")),
                (None, FieldDefault::Default) => {}
                (None, FieldDefault::Value(text)) => self.settings.push((setting, text.into())),
                (None, FieldDefault::Absent(text)) => self.settings.extend(value.is_none().then(|| (setting, text.into()))),
                (None, FieldDefault::Either { absent, null }) => self.settings.push((setting, if value.is_none() { absent } else { null }.into())),
            },
            FieldRole::Must(allowed) => {
                if let Some(value) = value.filter(|v| !allowed.iter().any(|a| a.is(v))) {
                    let only: Vec<String> = allowed.iter().map(|a| a.json().to_string()).collect();
                    self.errors.push(format!("{name} = {value} is not supported, only {}", only.join(" or ")));
                }
            }
            FieldRole::Every(only) => {
                let value = value.filter(|v| !v.is_null());
                if let Some(value) = value.filter(|v| v.as_array().is_none_or(|list| list.iter().any(|v| v != only))) {
                    self.errors.push(format!("{name} = {value} is not supported, only lists of \"{only}\""));
                }
            }
            FieldRole::FullEvery(setting, usual) => match layer_types::full_every(self.config, name, usual) {
                Ok(n) => self.settings.push((setting, n.to_string())),
                Err(what) => self.errors.push(what),
            },
            FieldRole::As(other) => {
                let followed = self.config.get(other);
                if let (Some(value), Some(followed)) = (value, followed)
                    && value.as_f64() != followed.as_f64()
                {
                    self.warnings.push(format!("{name} = {value} differs from {other} = {followed}; training uses {followed} for both"));
                }
            }
            FieldRole::Should(usual, reason) => {
                if let Some(value) = value.filter(|v| !v.is_null() && !usual.is(v)) {
                    self.warnings.push(format!("{name} = {value}: {reason}"));
                }
            }
            FieldRole::Quantised => match value.filter(|v| !v.is_null()).map(Scheme::read) {
                Some(Ok(scheme)) => self.quantised = Some(scheme),
                Some(Err(what)) => self.errors.push(what),
                None => {}
            },
            FieldRole::Equal(other) => {
                if let (Some(value), Some(wanted)) = (value.filter(|v| !v.is_null()), self.config.get(other))
                    && value != wanted
                {
                    self.errors.push(format!("{name} = {value} is not supported, only what {other} is, {wanted}"));
                }
            }
            FieldRole::Alias(other) => {
                if let (Some(value), Some(same)) = (value, self.config.get(other))
                    && value != same
                {
                    self.errors.push(format!("{name} = {value} contradicts {other} = {same}"));
                }
            }
            FieldRole::Choice { missing, options } => {
                let said = value.filter(|v| !v.is_null()).cloned().unwrap_or_else(|| missing.into());
                match options.iter().find(|(option, _)| said == *option) {
                    Some((_, settings)) => self.settings.extend(settings.iter().map(|(name, value)| (*name, quoted(value)))),
                    None => {
                        let only: Vec<String> = options.iter().map(|(option, _)| format!("\"{option}\"")).collect();
                        self.errors.push(format!("{name} = {said} is not supported, only {}", only.join(" or ")));
                    }
                }
            }
            FieldRole::Rope | FieldRole::Over(_) | FieldRole::Irrelevant => {}
        }
    }

    /// A field that stands in a group or beside it.
    pub fn either<'v>(&mut self, group: &str, inner: &'v Map<String, Value>, name: &str) -> Option<&'v Value>
    where
        'a: 'v,
    {
        let config: &'a Config = self.config;
        let (inner, outer) = (inner.get(name).filter(|v| !v.is_null()), config.get(name).filter(|v| !v.is_null()));
        if let (Some(a), Some(b)) = (inner, outer)
            && a.as_f64() != b.as_f64()
        {
            self.errors.push(format!("{group}.{name} = {a} contradicts {name} = {b}"));
        }
        inner.or(outer)
    }

    pub fn number(&mut self, field: &str, setting: &'static str, value: &Value, kind: SettingKind) {
        match literal(value, kind) {
            Ok(text) => self.settings.push((setting, text)),
            Err(wanted) => self.errors.push(format!("{field} = {value} is not {wanted}")),
        }
    }
}

/// A choice of a setting as the model text writes it.
fn quoted(value: &str) -> String {
    if value.parse::<bool>().is_ok() { value.into() } else { format!("\"{value}\"") }
}

/// The name that a config has for a field: one that counts in its place, or an alias if that alone is there.
pub fn written_as(family: &Family, config: &Config, name: &'static str) -> &'static str {
    let alias = |f: &&Field| matches!(f.role, FieldRole::Alias(other) if other == name) && config.contains_key(f.name);
    let over = |f: &&Field| matches!(f.role, FieldRole::Over(other) if other == name) && config.contains_key(f.name);
    if let Some(field) = family.fields().find(over) {
        return field.name;
    }
    if config.contains_key(name) { name } else { family.fields().find(alias).map_or(name, |f| f.name) }
}

/// A value as the model text writes it, or what it should have been.
pub fn literal(value: &Value, kind: SettingKind) -> Result<String, &'static str> {
    match kind {
        SettingKind::Size => value.as_i64().filter(|n| *n >= 1).map(|n| n.to_string()).ok_or("a whole number from 1 on"),
        SettingKind::Count => value.as_i64().filter(|n| *n >= 0).map(|n| n.to_string()).ok_or("a whole number from 0 on"),
        SettingKind::Real => value.as_f64().filter(|x| x.is_finite() && *x >= 0.0).map(|x| format!("{x:?}")).ok_or("a number from 0 on"),
        SettingKind::Reals => {
            let all: Option<Vec<String>> = value
                .as_array()
                .filter(|list| !list.is_empty())
                .and_then(|list| list.iter().map(|v| v.as_f64().filter(|x| x.is_finite() && *x > 0.0).map(|x| format!("{x:?}"))).collect());
            all.map(|all| format!("[{}]", all.join(", "))).ok_or("a list of numbers above 0")
        }
        SettingKind::Bool => value.as_bool().map(|b| b.to_string()).ok_or("true or false"),
    }
}

impl FieldValue {
    fn is(&self, value: &Value) -> bool {
        match self {
            FieldValue::Null => value.is_null(),
            FieldValue::Bool(b) => value == b,
            FieldValue::Number(x) => value.as_f64() == Some(*x),
            FieldValue::Text(text) => value == text,
            FieldValue::EmptyObject => value.as_object().is_some_and(Map::is_empty),
            FieldValue::EmptyList => value.as_array().is_some_and(Vec::is_empty),
        }
    }

    pub fn json(&self) -> Value {
        match *self {
            FieldValue::Null => Value::Null,
            FieldValue::Bool(b) => b.into(),
            FieldValue::Number(x) => x.into(),
            FieldValue::Text(text) => text.into(),
            FieldValue::EmptyObject => Value::Object(Map::new()),
            FieldValue::EmptyList => Value::Array(vec![]),
        }
    }
}

/// The config of a model with these settings: a given one, with the fields of settings that have changed since
/// replaced.
///
/// `now` are all settings of the model; `then` those that `config` stands for.
pub fn write(family: &Family, mut config: Config, then: &[(String, String)], now: &[(String, String)]) -> Config {
    let get = |list: &[(String, String)], name: &str| list.iter().find(|(n, _)| n == name).map(|(_, v)| v.clone());
    let changed = |name: &str| get(now, name).filter(|value| get(then, name).is_none_or(|old| !same(&old, value)));
    let json = |text: &str| serde_json::from_str::<Value>(text).unwrap_or_else(|_| Value::String(text.into()));
    for field in family.fields() {
        let (setting, kind, missing) = match field.role {
            FieldRole::Setting { name, kind, missing } => (name, kind, missing),
            FieldRole::As(other) => match family.role(other) {
                Some(FieldRole::Setting { name, kind, missing }) => (name, kind, missing),
                _ => continue,
            },
            FieldRole::FullEvery(setting, _) => {
                let number = |name: &str| get(now, name).and_then(|v| v.parse::<u64>().ok());
                if let (Some(n), Some(layers)) = (number(setting).filter(|n| *n >= 1), number("layers"))
                    && (changed(setting).is_some() || changed("layers").is_some())
                {
                    config.insert(field.name.into(), layer_types::list(n, layers));
                    if family.role(layer_types::PATTERN).is_some() {
                        config.insert(layer_types::PATTERN.into(), n.into());
                    }
                }
                continue;
            }
            FieldRole::Choice { options, .. } => {
                let is = |(_, settings): &&(_, &[(&str, &str)])| settings.iter().all(|(name, value)| get(now, name).is_some_and(|v| same(&v, value)));
                if let Some((option, _)) = options.iter().find(is).filter(|(_, settings)| settings.iter().any(|(name, _)| changed(name).is_some())) {
                    config.insert(field.name.into(), (*option).into());
                }
                continue;
            }
            FieldRole::Equal(other) => {
                if let Some(FieldRole::Setting { name, .. }) = family.role(other)
                    && let Some(value) = changed(name).filter(|_| config.contains_key(field.name))
                {
                    config.insert(field.name.into(), json(&value));
                }
                continue;
            }
            FieldRole::Must(_)
            | FieldRole::Every(_)
            | FieldRole::Alias(_)
            | FieldRole::Over(_)
            | FieldRole::Should(..)
            | FieldRole::Rope
            | FieldRole::Quantised
            | FieldRole::Irrelevant => {
                continue;
            }
        };
        if let Some(value) = changed(setting) {
            let none = (kind == SettingKind::Size && value == "0") || matches!(missing, FieldDefault::Either { null, .. } if same(&value, null));
            config.insert(written_as(family, &config, field.name).into(), if none { Value::Null } else { json(&value) });
        }
    }
    let setting = |name: &str| get(now, name).map(|v| json(&v));
    if let Some(rope) = &family.rope
        && (rotary::settings(rope).any(|setting| changed(setting).is_some()) || rotary::reads_length(rope, &setting) && changed("seq").is_some())
    {
        rotary::write(rope, &mut config, &setting);
    }
    config
}

/// Has a config speak of tensors of this type, if it speaks of any.
pub fn set_dtype(config: &mut Config, dtype: Float) {
    for name in ["dtype", "torch_dtype"] {
        if let Some(value) = config.get_mut(name) {
            *value = dtype.of_config().into();
        }
    }
}

/// A config as a file.
pub fn bytes(config: &Config) -> Vec<u8> {
    let mut bytes = serde_json::to_vec_pretty(config).expect("invariant: JSON with text keys");
    bytes.push(b'\n');
    bytes
}

/// The fields of a config that do not come from settings.
pub fn fresh(family: &Family) -> Config {
    let mut config = Map::from_iter([
        ("architectures".to_owned(), Value::from(vec![family.architecture])),
        ("model_type".to_owned(), family.model_type.into()),
        ("torch_dtype".to_owned(), "float32".into()),
    ]);
    for field in family.fields.iter().copied().flatten() {
        let value = match field.role {
            FieldRole::Must(allowed) => allowed.first().map(FieldValue::json),
            FieldRole::Should(usual, _) => Some(usual.json()),
            FieldRole::Setting { .. }
            | FieldRole::As(_)
            | FieldRole::Every(_)
            | FieldRole::FullEvery(..)
            | FieldRole::Equal(_)
            | FieldRole::Alias(_)
            | FieldRole::Over(_)
            | FieldRole::Choice { .. }
            | FieldRole::Rope
            | FieldRole::Quantised
            | FieldRole::Irrelevant => None,
        };
        config.extend(value.map(|v| (field.name.to_owned(), v)));
    }
    config
}

/// Whether two values of a setting are the same, however they are written.
pub fn same(a: &str, b: &str) -> bool {
    let list = |text: &str| serde_json::from_str::<Vec<f64>>(text);
    a == b || matches!((a.parse::<f64>(), b.parse::<f64>()), (Ok(a), Ok(b)) if a == b) || matches!((list(a), list(b)), (Ok(a), Ok(b)) if a == b)
}

#[cfg(test)]
mod tests;
