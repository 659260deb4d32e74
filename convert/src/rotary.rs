//! Rotary position embedding: what configs say of it in either style, and how it is written.

use crate::config::{Config, Reader, literal};
use crate::family::{LongRopeSettings, Rope, SettingKind, YarnSettings};
use serde_json::{Map, Value};

/// The field of the theta of layers with windows, in the style of transformers 4, and what it is where there is none.
pub const LOCAL: &str = "rope_local_base_freq";
pub const LOCAL_THETA: &str = "10000.0";

impl Reader<'_> {
    /// transformers 4 writes `rope_theta`, `rope_scaling` and `partial_rotary_factor`, transformers 5 all of them in
    /// `rope_parameters`, by the type of layer if layers with windows have a theta of their own
    /// (`rope_local_base_freq` before). Frequencies are scaled as Llama 3 does it, all of them by one factor, or
    /// not at all.
    pub fn rope(&mut self, rope: &Rope) {
        let mut found: Option<(&str, &Value)> = None;
        for name in ["rope_parameters", "rope_scaling"] {
            let Some(value) = self.config.get(name).filter(|v| !v.is_null()) else { continue };
            if !value.is_object() {
                self.errors.push(format!("{name} = {value} is not an object"));
                return;
            }
            found.get_or_insert((name, value));
        }
        let silent = ["rope_parameters", "rope_scaling"].iter().all(|name| !self.config.contains_key(*name));
        if silent && rope.yarn.as_ref().is_some_and(|yarn| yarn.expected) {
            self.errors.push("rope_parameters is missing: without it transformers scales frequencies by YaRN; null is for none".into());
        }
        let empty = Map::new();
        let (mut group, mut inner) = found.map_or(("rope_parameters", &empty), |(name, value)| (name, value.as_object().unwrap_or(&empty)));
        if let Some(setting) = rope.local {
            let [full, local] = ["full_attention", "sliding_attention"].map(|name| inner.get(name));
            match local.or(self.config.get(LOCAL)) {
                None => self.settings.push((setting, LOCAL_THETA.into())),
                Some(Value::Object(local)) => self.local(setting, local),
                Some(value) => self.number(LOCAL, setting, value, SettingKind::Real),
            }
            if full.or(local).is_some() {
                for (name, value) in inner.iter().filter(|(name, _)| !["full_attention", "sliding_attention"].contains(&name.as_str())) {
                    self.errors.push(format!("{group}.{name} = {value} stands beside the types of layers"));
                }
                (group, inner) = ("rope_parameters.full_attention", full.and_then(Value::as_object).unwrap_or(&empty));
            }
        }
        let theta = self.either(group, inner, "rope_theta");
        match theta {
            Some(value) => self.number("rope_theta", "rope_theta", value, SettingKind::Real),
            None => self.settings.push(("rope_theta", rope.theta.into())),
        }
        let share = self.either(group, inner, "partial_rotary_factor");
        match (rope.share, share) {
            (Some((setting, _)), Some(value)) => self.number("partial_rotary_factor", setting, value, SettingKind::Real),
            (Some((setting, default)), None) => self.settings.push((setting, default.into())),
            (None, Some(value)) if value.as_f64() != Some(1.0) => {
                self.errors.push(format!("partial_rotary_factor = {value} is not supported, only 1.0"));
            }
            (None, _) => {}
        }
        let kind = inner.get("rope_type").or(inner.get("type"));
        let mut known = vec!["rope_type", "type", "rope_theta", "partial_rotary_factor"];
        match kind.map(|k| k.as_str().unwrap_or("")) {
            None if found.is_some() && !inner.contains_key("rope_theta") => {
                self.errors.push(format!("{group} = {} has no rope_type", Value::Object(inner.clone())))
            }
            None | Some("default") => {}
            Some("llama3") if !rope.scaling.is_empty() => {
                for (field, setting, kind) in rope.scaling {
                    known.push(field);
                    match inner.get(*field) {
                        Some(value) => self.number(&format!("{group}.{field}"), setting, value, *kind),
                        None => self.errors.push(format!("{group}.{field} is missing")),
                    }
                }
            }
            Some("linear") if rope.linear.is_some() => {
                known.push("factor");
                match (inner.get("factor"), rope.linear) {
                    (Some(value), Some(setting)) => self.number(&format!("{group}.factor"), setting, value, SettingKind::Real),
                    _ => self.errors.push(format!("{group}.factor is missing")),
                }
            }
            Some("yarn") if rope.yarn.is_some() => {
                let yarn = rope.yarn.as_ref().expect("invariant: the arm asks");
                known.extend(["factor", "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"]);
                known.push("original_max_position_embeddings");
                let given = YarnFields { group, inner, longest: self.config.get("max_position_embeddings") };
                match given.settings(yarn) {
                    Ok(settings) => self.settings.extend(settings),
                    Err(errors) => self.errors.extend(errors),
                }
            }
            // transformers has used all of these names for LongRoPE.
            Some("longrope" | "su" | "yarn") if rope.long.is_some() => {
                let long = rope.long.as_ref().expect("invariant: the arm asks");
                known.extend([
                    LongRopeSettings::SHORT.0,
                    LongRopeSettings::LONG.0,
                    LongRopeSettings::SCALE.0,
                    LongRopeSettings::ORIGINAL.0,
                    "factor",
                ]);
                self.long(group, inner, long);
            }
            Some(_) => {
                let kind = kind.unwrap_or(&Value::Null);
                let mut only = vec!["\"default\""];
                only.extend((!rope.scaling.is_empty()).then_some("\"llama3\""));
                only.extend(rope.linear.map(|_| "\"linear\""));
                only.extend(rope.yarn.as_ref().map(|_| "\"yarn\""));
                only.extend(rope.long.as_ref().map(|_| "\"longrope\""));
                self.errors.push(format!("{group}.rope_type = {kind} is not supported, only {}", only.join(" or ")));
                known.extend(inner.keys().map(String::as_str));
            }
        }
        for (name, value) in inner.iter().filter(|(name, _)| !known.contains(&name.as_str())) {
            self.warnings.push(format!("{group}.{name} = {value} is not known; if it changes the computation, the import is wrong"));
        }
    }

    /// LongRoPE: what stands beside the group counts for the original length, as transformers has it.
    fn long(&mut self, group: &str, inner: &Map<String, Value>, long: &LongRopeSettings) {
        let mut lengths = vec![];
        for (field, setting) in [LongRopeSettings::SHORT, LongRopeSettings::LONG] {
            match inner.get(field).filter(|v| !v.is_null()) {
                Some(value) => {
                    lengths.extend(value.as_array().map(Vec::len));
                    self.number(&format!("{group}.{field}"), setting, value, SettingKind::Reals);
                }
                None => self.errors.push(format!("{group}.{field} is missing")),
            }
        }
        if let [short, long] = lengths[..]
            && short != long
        {
            self.errors.push(format!("{group} has {short} numbers in {} and {long} in {}", LongRopeSettings::SHORT.0, LongRopeSettings::LONG.0));
        }
        let (field, setting) = LongRopeSettings::ORIGINAL;
        let usual = long.original.parse::<Value>().expect("invariant: a number");
        let original = self.config.get(field).filter(|v| !v.is_null()).unwrap_or(&usual);
        if let Some(other) = inner.get(field).filter(|v| !v.is_null() && v.as_f64() != original.as_f64()) {
            self.errors.push(format!("{group}.{field} = {other} contradicts {field} = {original}, which counts"));
        }
        self.number(field, setting, original, SettingKind::Size);
        let number = |name: &str| inner.get(name).and_then(Value::as_f64);
        let longest = self.config.get("max_position_embeddings").and_then(Value::as_f64).unwrap_or(1.0);
        let original = original.as_f64().unwrap_or(1.0);
        let ratio = number("factor").unwrap_or(longest / original);
        let scale = if ratio <= 1.0 {
            1.0
        } else {
            ir::fault!("convert.long.scale", 1.0 + ratio.ln() / original.ln(), (1.0 + ratio.ln() / original.ln()).sqrt())
        };
        match inner.get(LongRopeSettings::SCALE.0).filter(|v| !v.is_null()) {
            Some(value) => self.number(&format!("{group}.{}", LongRopeSettings::SCALE.0), LongRopeSettings::SCALE.1, value, SettingKind::Real),
            None => self.number(&format!("{group}.factor"), LongRopeSettings::SCALE.1, &scale.into(), SettingKind::Real),
        }
    }

    /// Rotary embedding of layers with windows, which has a theta of its own and no scaling.
    fn local(&mut self, setting: &'static str, local: &Map<String, Value>) {
        for (name, value) in local {
            match name.as_str() {
                "rope_theta" => self.number("rope_parameters.sliding_attention.rope_theta", setting, value, SettingKind::Real),
                "rope_type" if value == "default" => {}
                _ => self.errors.push(format!("rope_parameters.sliding_attention.{name} = {value} is not supported, only a rope_theta")),
            }
        }
        if !local.contains_key("rope_theta") {
            self.settings.push((setting, LOCAL_THETA.into()));
        }
    }
}

/// What a config says of YaRN.
struct YarnFields<'a> {
    group: &'a str,
    inner: &'a Map<String, Value>,
    /// The longest sequence, which is the original one where that is not said.
    longest: Option<&'a Value>,
}

impl YarnFields<'_> {
    fn given(&self, name: &str) -> Option<&Value> {
        self.inner.get(name).filter(|v| !v.is_null())
    }

    fn read(&self, name: &str, kind: SettingKind) -> Result<Option<String>, String> {
        let read = |value| literal(value, kind).map_err(|wanted| format!("{}.{name} = {value} is not {wanted}", self.group));
        self.given(name).map(read).transpose()
    }

    /// The settings of a text.
    ///
    /// # Errors
    /// Values that are missing or of another kind.
    fn settings(&self, yarn: &YarnSettings) -> Result<Vec<(&'static str, String)>, Vec<String>> {
        let (mut out, mut errors) = (vec![], vec![]);
        let mut add = |setting: &'static str, value: Result<Option<String>, String>, default: Result<&str, String>| match (value, default) {
            (Ok(Some(value)), _) => out.push((setting, value)),
            (Ok(None), Ok(default)) => out.push((setting, default.to_owned())),
            (Err(what), _) | (_, Err(what)) => errors.push(what),
        };
        let missing = |name: &str| Err(format!("{}.{name} is missing", self.group));
        let (factor, original, truncate) = (YarnSettings::FACTOR, YarnSettings::ORIGINAL, YarnSettings::TRUNCATE);
        add(factor.1, self.read(factor.0, SettingKind::Real), missing(factor.0));
        for (field, setting, kind, default) in YarnSettings::NUMBERS {
            add(setting, self.read(field, kind), Ok(default));
        }
        let longest = self.longest.and_then(Value::as_u64).map(|n| n.to_string());
        add(original.1, self.read(original.0, SettingKind::Size), longest.as_deref().map_or_else(|| missing(original.0), Ok));
        add(truncate.1, self.read(truncate.0, SettingKind::Bool), Ok("true"));
        if let Some(setting) = yarn.scores {
            add(setting, self.read("mscale_all_dim", SettingKind::Real), Ok("0.0"));
        }
        add(YarnSettings::SCALE.1, self.read(YarnSettings::SCALE.0, SettingKind::Real), Ok(&format!("{:?}", self.scale())));
        out.extend(yarn.chosen.map(|setting| (setting, "true".into())));
        if errors.is_empty() { Ok(out) } else { Err(errors) }
    }

    /// The default factor of queries and keys, if the config does not say it.
    fn scale(&self) -> f64 {
        let number = |name: &str| self.given(name).and_then(Value::as_f64);
        let factor = number("factor").unwrap_or(1.0);
        let gain = |mscale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
        match (number("mscale").filter(|m| *m != 0.0), number("mscale_all_dim").filter(|m| *m != 0.0)) {
            (Some(mscale), Some(all)) => gain(mscale) / gain(all),
            _ => gain(1.0),
        }
    }
}

/// The settings of a text that turns queries and keys.
pub fn settings(rope: &Rope) -> impl Iterator<Item = &'static str> {
    let plain = rope.scaling.iter().map(|s| s.1).chain(rope.share.map(|s| s.0)).chain(rope.local).chain(rope.linear).chain(["rope_theta"]);
    let yarn = rope.yarn.iter().flat_map(|yarn| {
        let own = [YarnSettings::FACTOR.1, YarnSettings::ORIGINAL.1, YarnSettings::TRUNCATE.1, YarnSettings::SCALE.1];
        own.into_iter().chain(YarnSettings::NUMBERS.map(|n| n.1)).chain(yarn.chosen).chain(yarn.scores)
    });
    let long =
        rope.long.iter().flat_map(|_| [LongRopeSettings::SHORT.1, LongRopeSettings::LONG.1, LongRopeSettings::SCALE.1, LongRopeSettings::ORIGINAL.1]);
    plain.chain(yarn).chain(long)
}

/// Whether a config that leaves a field out means a number that follows from the longest sequence: with LongRoPE and
/// YaRN.
pub fn reads_length(rope: &Rope, setting: &dyn Fn(&str) -> Option<Value>) -> bool {
    long(rope, setting).is_some() || yarn(rope, setting).is_some()
}

/// LongRoPE, if settings have its factors.
fn long<'r>(rope: &'r Rope, setting: &dyn Fn(&str) -> Option<Value>) -> Option<&'r LongRopeSettings> {
    let listed = |name: &str| setting(name).is_some_and(|v| v.as_array().is_some_and(|list| !list.is_empty()));
    rope.long.as_ref().filter(|_| listed(LongRopeSettings::SHORT.1) || listed(LongRopeSettings::LONG.1))
}

/// YaRN, if settings choose it.
fn yarn<'r>(rope: &'r Rope, setting: &dyn Fn(&str) -> Option<Value>) -> Option<&'r YarnSettings> {
    rope.yarn.as_ref().filter(|yarn| yarn.chosen.is_none_or(|chosen| setting(chosen) == Some(true.into())))
}

/// The fields of rotary position embedding, in the style of transformers 4, which both read.
pub fn write(rope: &Rope, config: &mut Config, setting: &dyn Fn(&str) -> Option<Value>) {
    config.remove("rope_parameters");
    config.insert("rope_theta".into(), setting("rope_theta").unwrap_or_default());
    let share = rope.share.and_then(|(name, _)| setting(name));
    config.extend(share.map(|value| ("partial_rotary_factor".to_owned(), value)));
    let local = rope.local.and_then(setting);
    config.extend(local.map(|value| (LOCAL.to_owned(), value)));
    let (yarn, long) = (yarn(rope, setting), long(rope, setting));
    let kind = match (yarn, rope.linear) {
        _ if long.is_some() => "longrope",
        (Some(_), _) => "yarn",
        (None, Some(_)) => "linear",
        (None, None) => "llama3",
    };
    let mut group = Map::from_iter([("rope_type".to_owned(), Value::from(kind))]);
    let mut fields: Vec<(&str, &str)> = vec![];
    if long.is_some() {
        fields.extend([LongRopeSettings::SHORT, LongRopeSettings::LONG, LongRopeSettings::SCALE]);
        config.extend(setting(LongRopeSettings::ORIGINAL.1).map(|value| (LongRopeSettings::ORIGINAL.0.to_owned(), value)));
    } else if let Some(yarn) = yarn {
        fields.extend([YarnSettings::FACTOR, YarnSettings::ORIGINAL, YarnSettings::TRUNCATE, YarnSettings::SCALE]);
        fields.extend(YarnSettings::NUMBERS.map(|n| (n.0, n.1)));
        fields.extend(yarn.scores.map(|setting| ("mscale_all_dim", setting)));
    } else {
        fields.extend(rope.linear.map(|name| ("factor", name)));
        fields.extend(rope.scaling.iter().map(|s| (s.0, s.1)));
    }
    group.extend(fields.into_iter().filter_map(|(field, name)| Some((field.to_owned(), setting(name)?))));
    let scaled = long.is_some() || group.get("factor").is_some_and(|f| f.as_f64() != Some(1.0));
    config.insert("rope_scaling".into(), if scaled { Value::Object(group) } else { Value::Null });
}
