//! A Hugging Face config by the table of its family: settings of the model text, refusals, warnings.

use crate::family::{FAMILIES, Family, Field, Kind, Missing, Plain, Role, Rope};
use crate::layer_types;
use serde_json::{Map, Value};

pub type Config = Map<String, Value>;

/// What a config says.
pub struct Reading {
    pub family: &'static Family,
    /// Settings of the model text and their values as the text writes them. What is left out keeps its default.
    pub settings: Vec<(&'static str, String)>,
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
    let mut reader = Reader { config, settings: fixed, warnings: vec![], errors: vec![] };
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
    let Reader { settings, warnings, errors, .. } = reader;
    if errors.is_empty() { Ok(Reading { family, settings, warnings }) } else { Err(errors) }
}

struct Reader<'a> {
    config: &'a Config,
    settings: Vec<(&'static str, String)>,
    warnings: Vec<String>,
    errors: Vec<String>,
}

impl<'a> Reader<'a> {
    fn field(&mut self, family: &Family, name: &'static str, role: Role) {
        let value = self.config.get(written_as(family, self.config, name));
        match role {
            Role::Setting { name: setting, kind, missing } => match (value.filter(|v| !v.is_null()), missing) {
                (Some(value), _) => match literal(value, kind) {
                    Ok(text) => self.settings.push((setting, text)),
                    Err(wanted) => self.errors.push(format!("{name} = {value} is not {wanted}")),
                },
                (None, Missing::Refused) => self.errors.push(format!("{name} is missing")),
                (None, Missing::Default) => {}
                (None, Missing::Value(text)) => self.settings.push((setting, text.into())),
                (None, Missing::Absent(text)) => self.settings.extend(value.is_none().then(|| (setting, text.into()))),
                (None, Missing::Either { absent, null }) => self.settings.push((setting, if value.is_none() { absent } else { null }.into())),
            },
            Role::Must(allowed) => {
                if let Some(value) = value.filter(|v| !allowed.iter().any(|a| a.is(v))) {
                    let only: Vec<String> = allowed.iter().map(|a| a.json().to_string()).collect();
                    self.errors.push(format!("{name} = {value} is not supported, only {}", only.join(" or ")));
                }
            }
            Role::Every(only) => {
                let value = value.filter(|v| !v.is_null());
                if let Some(value) = value.filter(|v| v.as_array().is_none_or(|list| list.iter().any(|v| v != only))) {
                    self.errors.push(format!("{name} = {value} is not supported, only lists of \"{only}\""));
                }
            }
            Role::FullEvery(setting, usual) => match layer_types::full_every(self.config, name, usual) {
                Ok(n) => self.settings.push((setting, n.to_string())),
                Err(what) => self.errors.push(what),
            },
            Role::As(other) => {
                let followed = self.config.get(other);
                if let (Some(value), Some(followed)) = (value, followed)
                    && value.as_f64() != followed.as_f64()
                {
                    self.warnings.push(format!("{name} = {value} differs from {other} = {followed}; training uses {followed} for both"));
                }
            }
            Role::Should(usual, reason) => {
                if let Some(value) = value.filter(|v| !v.is_null() && !usual.is(v)) {
                    self.warnings.push(format!("{name} = {value}: {reason}"));
                }
            }
            Role::Alias(other) => {
                if let (Some(value), Some(same)) = (value, self.config.get(other))
                    && value != same
                {
                    self.errors.push(format!("{name} = {value} contradicts {other} = {same}"));
                }
            }
            Role::Rope | Role::Irrelevant => {}
        }
    }

    /// transformers 4 writes `rope_theta`, `rope_scaling` and `partial_rotary_factor`, transformers 5 all of them in
    /// `rope_parameters`. Frequencies are scaled as Llama 3 does it, or not at all.
    fn rope(&mut self, rope: &Rope) {
        let mut found: Option<(&str, &Value)> = None;
        for name in ["rope_parameters", "rope_scaling"] {
            let Some(value) = self.config.get(name).filter(|v| !v.is_null()) else { continue };
            if !value.is_object() {
                self.errors.push(format!("{name} = {value} is not an object"));
                return;
            }
            found.get_or_insert((name, value));
        }
        let empty = Map::new();
        let (group, inner) = found.map_or(("rope_parameters", &empty), |(name, value)| (name, value.as_object().unwrap_or(&empty)));
        let theta = self.either(group, inner, "rope_theta");
        match theta {
            Some(value) => self.number("rope_theta", "rope_theta", value, Kind::Real),
            None => self.settings.push(("rope_theta", rope.theta.into())),
        }
        let share = self.either(group, inner, "partial_rotary_factor");
        match (rope.share, share) {
            (Some((setting, _)), Some(value)) => self.number("partial_rotary_factor", setting, value, Kind::Real),
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
            Some(_) => {
                let kind = kind.unwrap_or(&Value::Null);
                let only = if rope.scaling.is_empty() { "\"default\"" } else { "\"default\" or \"llama3\"" };
                self.errors.push(format!("{group}.rope_type = {kind} is not supported, only {only}"));
                known.extend(inner.keys().map(String::as_str));
            }
        }
        for (name, value) in inner.iter().filter(|(name, _)| !known.contains(&name.as_str())) {
            self.warnings.push(format!("{group}.{name} = {value} is not known; if it changes the computation, the import is wrong"));
        }
    }

    /// A field that stands in a group or beside it.
    fn either<'v>(&mut self, group: &str, inner: &'v Map<String, Value>, name: &str) -> Option<&'v Value>
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

    fn number(&mut self, field: &str, setting: &'static str, value: &Value, kind: Kind) {
        match literal(value, kind) {
            Ok(text) => self.settings.push((setting, text)),
            Err(wanted) => self.errors.push(format!("{field} = {value} is not {wanted}")),
        }
    }
}

/// The name that a config has for a field: an alias if that alone is there.
fn written_as(family: &Family, config: &Config, name: &'static str) -> &'static str {
    let alias = |f: &&Field| matches!(f.role, Role::Alias(other) if other == name) && config.contains_key(f.name);
    if config.contains_key(name) { name } else { family.fields().find(alias).map_or(name, |f| f.name) }
}

/// A value as the model text writes it, or what it should have been.
fn literal(value: &Value, kind: Kind) -> Result<String, &'static str> {
    match kind {
        Kind::Size => value.as_i64().filter(|n| *n >= 1).map(|n| n.to_string()).ok_or("a whole number from 1 on"),
        Kind::Real => value.as_f64().filter(|x| x.is_finite() && *x >= 0.0).map(|x| format!("{x:?}")).ok_or("a number from 0 on"),
        Kind::Bool => value.as_bool().map(|b| b.to_string()).ok_or("true or false"),
    }
}

impl Plain {
    fn is(&self, value: &Value) -> bool {
        match self {
            Plain::Null => value.is_null(),
            Plain::Bool(b) => value == b,
            Plain::Number(x) => value.as_f64() == Some(*x),
            Plain::Text(text) => value == text,
            Plain::EmptyObject => value.as_object().is_some_and(Map::is_empty),
            Plain::EmptyList => value.as_array().is_some_and(Vec::is_empty),
        }
    }

    pub fn json(&self) -> Value {
        match *self {
            Plain::Null => Value::Null,
            Plain::Bool(b) => b.into(),
            Plain::Number(x) => x.into(),
            Plain::Text(text) => text.into(),
            Plain::EmptyObject => Value::Object(Map::new()),
            Plain::EmptyList => Value::Array(vec![]),
        }
    }
}

/// The config of a model with these settings: a given one, with the fields of settings that have changed since replaced.
///
/// `now` are all settings of the model; `then` those that `config` stands for.
pub fn write(family: &Family, mut config: Config, then: &[(String, String)], now: &[(String, String)]) -> Config {
    let get = |list: &[(String, String)], name: &str| list.iter().find(|(n, _)| n == name).map(|(_, v)| v.clone());
    let changed = |name: &str| get(now, name).filter(|value| get(then, name).is_none_or(|old| !same(&old, value)));
    let json = |text: &str| serde_json::from_str::<Value>(text).unwrap_or_else(|_| Value::String(text.into()));
    for field in family.fields() {
        let (setting, kind, missing) = match field.role {
            Role::Setting { name, kind, missing } => (name, kind, missing),
            Role::As(other) => match family.role(other) {
                Some(Role::Setting { name, kind, missing }) => (name, kind, missing),
                _ => continue,
            },
            Role::FullEvery(setting, _) => {
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
            Role::Must(_) | Role::Every(_) | Role::Alias(_) | Role::Should(..) | Role::Rope | Role::Irrelevant => continue,
        };
        if let Some(value) = changed(setting) {
            let none = (kind == Kind::Size && value == "0") || matches!(missing, Missing::Either { null, .. } if same(&value, null));
            config.insert(written_as(family, &config, field.name).into(), if none { Value::Null } else { json(&value) });
        }
    }
    if let Some(rope) = &family.rope {
        let mut settings = rope.scaling.iter().map(|s| s.1).chain(rope.share.map(|s| s.0)).chain(["rope_theta"]);
        if settings.any(|setting| changed(setting).is_some()) {
            write_rope(rope, &mut config, &|name| get(now, name).map(|v| json(&v)));
        }
    }
    for dtype in ["dtype", "torch_dtype"] {
        if let Some(value) = config.get_mut(dtype) {
            *value = "float32".into();
        }
    }
    config
}

/// The fields of rotary position embedding, in the style of transformers 4, which both read.
fn write_rope(rope: &Rope, config: &mut Config, setting: &dyn Fn(&str) -> Option<Value>) {
    config.remove("rope_parameters");
    config.insert("rope_theta".into(), setting("rope_theta").unwrap_or_default());
    let share = rope.share.and_then(|(name, _)| setting(name));
    config.extend(share.map(|value| ("partial_rotary_factor".to_owned(), value)));
    let mut group = Map::from_iter([("rope_type".to_owned(), Value::from("llama3"))]);
    group.extend(rope.scaling.iter().filter_map(|(field, name, _)| Some(((*field).to_owned(), setting(name)?))));
    let scaled = group.get("factor").is_some_and(|f| f.as_f64() != Some(1.0));
    config.insert("rope_scaling".into(), if scaled { Value::Object(group) } else { Value::Null });
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
            Role::Must(allowed) => allowed.first().map(Plain::json),
            Role::Should(usual, _) => Some(usual.json()),
            Role::Setting { .. } | Role::As(_) | Role::Every(_) | Role::FullEvery(..) | Role::Alias(_) | Role::Rope | Role::Irrelevant => None,
        };
        config.extend(value.map(|v| (field.name.to_owned(), v)));
    }
    config
}

/// Whether two values of a setting are the same, however they are written.
pub fn same(a: &str, b: &str) -> bool {
    a == b || matches!((a.parse::<f64>(), b.parse::<f64>()), (Ok(a), Ok(b)) if a == b)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpt2() -> Config {
        serde_json::from_str(include_str!("../../tests/cases/gpt2/config.json")).unwrap()
    }

    fn llama(style: &str) -> Config {
        serde_json::from_str(match style {
            "4" => include_str!("../../tests/cases/llama/config.v4.json"),
            _ => include_str!("../../tests/cases/llama/config.json"),
        })
        .unwrap()
    }

    fn with(mut config: Config, field: &str, value: &str) -> Config {
        config.insert(field.into(), serde_json::from_str(value).unwrap());
        config
    }

    fn setting(reading: &Reading, name: &str) -> String {
        reading.settings.iter().find(|(n, _)| *n == name).map_or_else(|| "default".into(), |(_, v)| v.clone())
    }

    fn errors(config: &Config) -> String {
        read(config).err().unwrap_or_default().join("; ")
    }

    fn warnings(config: &Config) -> String {
        read(config).unwrap().warnings.join("; ")
    }

    #[test]
    fn both_styles_give_the_same_settings() {
        assert_eq!(read(&llama("4")).unwrap().settings, read(&llama("5")).unwrap().settings);
        let old: Config = serde_json::from_str(include_str!("../../tests/cases/gpt2/config.v4.json")).unwrap();
        assert_eq!(read(&old).unwrap().settings, read(&gpt2()).unwrap().settings);
    }

    #[test]
    fn the_reference_cases_give_no_warning() {
        assert_eq!(warnings(&gpt2()) + &warnings(&llama("4")) + &warnings(&llama("5")), "");
    }

    #[test]
    fn a_null_keeps_the_formula_of_the_text() {
        assert_eq!(setting(&read(&gpt2()).unwrap(), "ffn"), "default");
        assert_eq!(setting(&read(&with(gpt2(), "n_inner", "300")).unwrap(), "ffn"), "300");
    }

    #[test]
    fn an_unknown_field_is_named_with_its_value() {
        assert!(warnings(&with(gpt2(), "residual_scale", "0.5")).starts_with("residual_scale = 0.5 is not known for GPT2LMHeadModel"));
    }

    #[test]
    fn what_the_text_does_not_compute_is_refused_by_field_and_value() {
        assert_eq!(
            errors(&with(gpt2(), "activation_function", "\"relu\"")),
            "activation_function = \"relu\" is not supported, only \"gelu_new\" or \"gelu_pytorch_tanh\""
        );
        assert_eq!(errors(&with(llama("5"), "attention_bias", "true")), "attention_bias = true is not supported, only false");
        assert!(errors(&with(llama("4"), "quantization_config", "{\"bits\":4}")).starts_with("quantization_config = {\"bits\":4} is not"));
    }

    #[test]
    fn all_errors_come_at_once() {
        let mut config = with(with(gpt2(), "n_head", "-1"), "scale_attn_weights", "false");
        config.remove("n_embd");
        assert_eq!(
            errors(&config),
            "n_embd is missing; n_head = -1 is not a whole number from 1 on; scale_attn_weights = false is not supported, only true"
        );
    }

    #[test]
    fn another_architecture_is_named() {
        let error = errors(&with(gpt2(), "architectures", "[\"BloomForCausalLM\"]"));
        assert!(error.starts_with("architectures = [\"BloomForCausalLM\"] is none of those known: GPT2LMHeadModel, LlamaForCausalLM, "), "{error}");
    }

    #[test]
    fn the_frequencies_of_llama_3_are_read_in_both_styles() {
        let scaling =
            r#"{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192"#;
        let four = with(with(llama("4"), "rope_theta", "500000.0"), "rope_scaling", &format!("{scaling}}}"));
        let five = with(llama("5"), "rope_parameters", &format!("{scaling}, \"rope_theta\": 5e5}}"));
        let (four, five) = (read(&four).unwrap(), read(&five).unwrap());
        assert_eq!(four.settings, five.settings);
        assert_eq!((setting(&four, "rope_theta"), setting(&four, "rope_factor")), ("500000.0".into(), "8.0".into()));
    }

    #[test]
    fn other_scalings_of_frequencies_are_refused() {
        let error = errors(&with(llama("4"), "rope_scaling", r#"{"type": "yarn", "factor": 4.0}"#));
        assert_eq!(error, "rope_scaling.rope_type = \"yarn\" is not supported, only \"default\" or \"llama3\"");
    }

    fn case(name: &str) -> Config {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/cases").join(name).join("config.json");
        serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
    }

    #[test]
    fn a_window_that_is_missing_is_mistrals_own_and_null_is_none() {
        let window = |config: &Config| setting(&read(config).unwrap(), "window");
        assert_eq!(window(&case("mistral")), "7");
        assert_eq!(window(&with(case("mistral"), "sliding_window", "null")), "default");
        let mut config = case("mistral");
        config.remove("sliding_window");
        assert_eq!(window(&config), "4096");
    }

    #[test]
    fn the_balance_of_experts_counts_where_the_config_returns_what_routers_say() {
        let balanced = |config: &Config| setting(&read(config).unwrap(), "balanced");
        assert_eq!(balanced(&case("mixtral")), "true");
        let mut config = case("mixtral");
        config.remove("output_router_logits");
        assert_eq!(balanced(&config), "false");
        let noisy = with(case("mixtral"), "router_jitter_noise", "0.01");
        assert!(warnings(&noisy).starts_with("router_jitter_noise = 0.01: "), "{}", warnings(&noisy));
    }

    #[test]
    fn windows_of_some_layers_are_refused() {
        assert_eq!(errors(&with(case("qwen2"), "use_sliding_window", "true")), "use_sliding_window = true is not supported, only false");
        let mixed = with(case("qwen3"), "layer_types", r#"["full_attention","sliding_attention"]"#);
        assert!(errors(&mixed).ends_with("is not supported, only lists of \"full_attention\""), "{}", errors(&mixed));
    }

    #[test]
    fn windows_of_all_but_every_nth_layer_are_a_number() {
        let gemma = |field: &str, value: &str| with(case("gemma2"), field, value);
        assert_eq!(setting(&read(&case("gemma2")).unwrap(), "full_every"), "2");
        let every = |list: &str| setting(&read(&with(gemma("layer_types", list), "num_hidden_layers", "3")).unwrap(), "full_every");
        assert_eq!(every("null"), "2");
        assert_eq!(every(r#"["sliding_attention","sliding_attention","full_attention"]"#), "3");
        assert_eq!(every(r#"["full_attention","full_attention","full_attention"]"#), "1");
        assert_eq!(every(r#"["sliding_attention","sliding_attention","sliding_attention"]"#), "4");
        for odd in [r#"["full_attention","sliding_attention"]"#, r#"["sliding_attention"]"#, "[]", r#""full_attention""#] {
            assert!(errors(&gemma("layer_types", odd)).contains("is not supported, only \"sliding_attention\" with every n-th layer"), "{odd}");
        }
    }

    #[test]
    fn a_cap_that_is_null_is_none() {
        let mut config = with(case("gemma2"), "attn_logit_softcapping", "null");
        assert_eq!(setting(&read(&config).unwrap(), "score_cap"), "0.0");
        config.remove("attn_logit_softcapping");
        assert_eq!(setting(&read(&config).unwrap(), "score_cap"), "50.0");
        let family = read(&config).unwrap().family;
        let now = [("score_cap".to_owned(), "0.0".to_owned()), ("full_every".to_owned(), "1".to_owned()), ("layers".to_owned(), "2".to_owned())];
        let written = write(family, config, &[], &now);
        assert_eq!((&written["attn_logit_softcapping"], &written["layer_types"]), (&Value::Null, &layer_types::list(1, 2)));
    }

    #[test]
    fn a_field_has_another_name_in_another_version() {
        let mut old = case("qwen3_moe");
        let count = old.remove("num_local_experts").unwrap();
        assert_eq!(errors(&old), "num_experts is missing");
        old.insert("num_experts".into(), count);
        assert_eq!(read(&old).unwrap().settings, read(&case("qwen3_moe")).unwrap().settings);
        let both = with(case("qwen3_moe"), "num_experts", "7");
        assert!(errors(&both).starts_with("num_local_experts = 8 contradicts num_experts = 7"), "{}", errors(&both));
        let now = [("experts".to_owned(), "16".to_owned())];
        for config in [old, case("qwen3_moe")] {
            let written = write(&crate::family::QWEN3_MOE, config.clone(), &[], &now);
            assert_eq!(written.len(), config.len());
            assert_eq!(setting(&read(&written).unwrap(), "experts"), "16");
        }
    }

    #[test]
    fn layers_without_experts_are_refused() {
        assert_eq!(errors(&with(case("qwen3_moe"), "mlp_only_layers", "[0]")), "mlp_only_layers = [0] is not supported, only [] or null");
        assert_eq!(errors(&with(case("qwen3_moe"), "decoder_sparse_step", "2")), "decoder_sparse_step = 2 is not supported, only 1.0");
    }

    #[test]
    fn the_architecture_implies_settings() {
        assert_eq!(setting(&read(&case("qwen2")).unwrap(), "qkv_bias"), "true");
        assert_eq!(setting(&read(&case("qwen3")).unwrap(), "qk_norm"), "true");
    }

    #[test]
    fn the_share_of_a_head_that_turns_is_read_in_both_styles() {
        let five = case("nemotron");
        let mut four = with(with(case("nemotron"), "rope_theta", "10000.0"), "partial_rotary_factor", "0.5");
        four.remove("rope_parameters");
        assert_eq!(read(&four).unwrap().settings, read(&five).unwrap().settings);
        let both = with(five, "partial_rotary_factor", "0.25");
        assert_eq!(errors(&both), "rope_parameters.partial_rotary_factor = 0.5 contradicts partial_rotary_factor = 0.25");
        assert_eq!(errors(&with(llama("4"), "partial_rotary_factor", "0.5")), "partial_rotary_factor = 0.5 is not supported, only 1.0");
    }

    #[test]
    fn a_scaling_that_the_text_lacks_is_refused() {
        let error = errors(&with(case("nemotron"), "rope_parameters", r#"{"rope_type": "llama3", "rope_theta": 1e4}"#));
        assert!(error.starts_with("rope_parameters.rope_type = \"llama3\" is not supported, only \"default\""), "{error}");
    }

    #[test]
    fn dropout_that_the_text_cannot_say_is_a_warning() {
        assert!(warnings(&with(gpt2(), "attn_pdrop", "0.1")).starts_with("attn_pdrop = 0.1: "));
        assert!(warnings(&with(gpt2(), "embd_pdrop", "0.2")).starts_with("embd_pdrop = 0.2 differs from resid_pdrop = 0.0"));
    }

    #[test]
    fn a_config_made_from_settings_reads_back() {
        let now: Vec<(String, String)> = [
            ("vocab", "96"),
            ("hidden", "64"),
            ("heads", "4"),
            ("kv_heads", "2"),
            ("head_dim", "16"),
            ("ffn", "128"),
            ("layers", "2"),
            ("seq", "32"),
            ("norm_eps", "0.00001"),
            ("tied", "true"),
            ("rope_theta", "10000.0"),
            ("rope_factor", "2.0"),
            ("rope_low", "1.0"),
            ("rope_high", "4.0"),
            ("rope_original", "16"),
        ]
        .map(|(a, b)| (a.to_owned(), b.to_owned()))
        .to_vec();
        let config = write(&crate::family::LLAMA, fresh(&crate::family::LLAMA), &[], &now);
        let reading = read(&config).unwrap();
        assert_eq!(reading.warnings, Vec::<String>::new());
        for (name, value) in &now {
            assert!(same(&setting(&reading, name), value), "{name}: {} is not {value}", setting(&reading, name));
        }
    }
}
