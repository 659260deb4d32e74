//! The page `docs/fields.md`, of the tables of configs' fields. `UPDATE_EXPECT=1` writes it.

use crate::family::{COMMON, FAMILIES, Family, Field, FieldDefault, FieldRole, LongRopeSettings, Rope, YarnSettings};
use crate::layer_types::PATTERN;
use crate::rotary::{LOCAL, LOCAL_THETA};
use std::fmt::Write;

const HEAD: &str = "\
# Fields of config.json

What [`mcc import hf`](import.md) makes of each field of a `config.json`: the setting of the model text that gets its
value, and what a missing field stands for. A value there is transformers' own default. An export writes the same
fields.

A field that stands neither below its architecture nor below [all](#all-architectures) is a warning with its value. A
null counts as a missing field where nothing else is said. `rope_theta` and `partial_rotary_factor` are read in
`rope_parameters` too, where transformers 5 writes them.
";

/// What a missing field stands for.
fn missing(default: FieldDefault) -> String {
    match default {
        FieldDefault::Refused => "an error".into(),
        FieldDefault::Default => "the text's own formula".into(),
        FieldDefault::Value(value) => format!("`{value}`"),
        FieldDefault::Absent(value) => format!("`{value}`; null: the text's own formula"),
        FieldDefault::Either { absent, null } => format!("`{absent}`; null: `{null}`"),
    }
}

/// Rows of fields that rotary embedding reads: the field, the setting, what a missing field stands for.
fn rotary(rope: &Rope) -> Vec<(String, String, String)> {
    let row = |field: &str, setting: &str, missing: &str| (format!("`{field}`"), format!("`{setting}`"), missing.to_owned());
    let scaled = |kind: &str, field: &str, setting: &str, missing: &str| {
        (format!("`{field}` of `rope_scaling` or `rope_parameters`, type `{kind}`"), format!("`{setting}`"), missing.to_owned())
    };
    let mut rows = vec![row("rope_theta", "rope_theta", &format!("`{}`", rope.theta))];
    rows.extend(rope.share.map(|(setting, default)| row("partial_rotary_factor", setting, &format!("`{default}`"))));
    rows.extend(rope.local.map(|setting| row(LOCAL, setting, &format!("`{LOCAL_THETA}`"))));
    rows.extend(rope.scaling.iter().map(|(field, setting, _)| scaled("llama3", field, setting, "an error")));
    rows.extend(rope.linear.map(|setting| scaled("linear", "factor", setting, "an error")));
    if let Some(yarn) = &rope.yarn {
        let of = |(field, setting): (&str, &str), missing: &str| scaled("yarn", field, setting, missing);
        rows.push(of(YarnSettings::FACTOR, "an error"));
        rows.extend(YarnSettings::NUMBERS.map(|(field, setting, _, default)| of((field, setting), &format!("`{default}`"))));
        rows.push(of(YarnSettings::ORIGINAL, "`max_position_embeddings`"));
        rows.push(of(YarnSettings::TRUNCATE, "`true`"));
        rows.push(of(YarnSettings::SCALE, "of `factor`, `mscale` and `mscale_all_dim`"));
        rows.extend(yarn.scores.map(|setting| of(("mscale_all_dim", setting), "`0.0`")));
        let expected = || ("`rope_parameters` or `rope_scaling`".into(), "those above; null is for no YaRN".into(), "an error".into());
        rows.extend(yarn.expected.then(expected));
    }
    if let Some(long) = &rope.long {
        let of = |(field, setting): (&str, &str), missing: &str| scaled("longrope", field, setting, missing);
        rows.push(of(LongRopeSettings::SHORT, "an error"));
        rows.push(of(LongRopeSettings::LONG, "an error"));
        rows.push(of(LongRopeSettings::SCALE, "of `factor`"));
        rows.push(row(LongRopeSettings::ORIGINAL.0, LongRopeSettings::ORIGINAL.1, &format!("`{}`", long.original)));
    }
    rows
}

fn quoted<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    names.into_iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

/// The section of an architecture.
fn section(family: &Family) -> String {
    let mut out = format!("\n## {}\n\nThe text is `models/{}.mdl`.", family.architecture, family.model);
    if !family.others.is_empty() {
        let _ = write!(out, " Files of {} are read too.", quoted(family.others.iter().copied()));
    }
    if !family.fixed.is_empty() {
        let fixed: Vec<String> = family.fixed.iter().map(|(setting, value)| format!("`{setting}={value}`")).collect();
        let _ = write!(out, " It always has {}.", fixed.join(", "));
    }
    out += "\n";
    out += &tables(family.fields.iter().copied().flatten(), family.rope.as_ref());
    out
}

/// The tables of fields: those that give settings, those that must have a value, those without effect.
fn tables(fields: impl Iterator<Item = &'static Field>, rope: Option<&Rope>) -> String {
    let (mut settings, mut must, mut ignored) = (vec![], vec![], vec![]);
    for field in fields {
        let name = format!("`{}`", field.name);
        match field.role {
            FieldRole::Setting { name: setting, missing: default, .. } => settings.push((name, format!("`{setting}`"), missing(default))),
            FieldRole::FullEvery(setting, n) => {
                settings.push((name, format!("`{setting}`, the n of which every n-th layer has no window"), format!("`{PATTERN}`, else `{n}`")))
            }
            FieldRole::Choice { missing, options } => {
                let means = |(value, all): &(&str, &[(&str, &str)])| {
                    format!("\"{value}\": {}", all.iter().map(|(setting, value)| format!("`{setting}={value}`")).collect::<Vec<_>>().join(", "))
                };
                settings.push((name, options.iter().map(means).collect::<Vec<_>>().join("; "), format!("\"{missing}\"")));
            }
            FieldRole::Over(other) => settings.push((name, format!("if there, counts in place of `{other}`"), String::new())),
            FieldRole::Alias(other) => settings.push((name, format!("another name of `{other}`"), String::new())),
            FieldRole::As(other) => settings.push((name, format!("follows `{other}`; another value is a warning"), String::new())),
            FieldRole::Must(values) => must.push((name, values.iter().map(|v| format!("`{}`", v.json())).collect::<Vec<_>>().join(" or "))),
            FieldRole::Every(value) => must.push((name, format!("a list of nothing but \"{value}\""))),
            FieldRole::Equal(other) => must.push((name, format!("what `{other}` is"))),
            FieldRole::Should(value, _) => must.push((name, format!("`{}`; another value is a warning", value.json()))),
            FieldRole::Quantised => {
                settings.push((name, "FP8 or MXFP4, [computed to f32](import.md#types-and-names-of-tensors)".into(), "no such tensors".into()))
            }
            FieldRole::Rope => {}
            // It is read where the types of layers are missing.
            FieldRole::Irrelevant if field.name == PATTERN => {}
            FieldRole::Irrelevant => ignored.push(field.name),
        }
    }
    settings.extend(rope.into_iter().flat_map(rotary));
    must.extend(rope.filter(|rope| rope.share.is_none()).map(|_| ("`partial_rotary_factor`".into(), "`1.0`".into())));
    let table = |head: &str, rows: Vec<String>| if rows.is_empty() { String::new() } else { format!("\n{head}\n{}", rows.concat()) };
    let settings = settings.into_iter().map(|(field, setting, missing)| format!("| {field} | {setting} | {missing} |\n")).collect();
    let must = must.into_iter().map(|(field, value)| format!("| {field} | {value} |\n")).collect();
    let ignored = if ignored.is_empty() { vec![] } else { vec![format!("| {} |\n", quoted(ignored))] };
    table("| field | setting | if it is missing |\n|---|---|---|", settings)
        + &table("| field | must be, if it is there |\n|---|---|", must)
        + &table("| without effect |\n|---|", ignored)
}

fn page() -> String {
    let common = format!("\n## All architectures\n\nAn architecture's own tables come first.\n{}", tables(COMMON.iter(), None));
    HEAD.to_owned() + &FAMILIES.iter().map(|family| section(family)).collect::<String>() + &common
}

#[test]
fn page_of_fields_is_current() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/fields.md");
    let page = page();
    if std::env::var_os("UPDATE_EXPECT").is_some() {
        std::fs::write(&path, &page).expect("written");
    }
    assert!(std::fs::read_to_string(&path).is_ok_and(|text| text == page), "docs/fields.md is another one; UPDATE_EXPECT=1 renews it");
    for family in FAMILIES {
        let section = section(family);
        for field in family.fields.iter().copied().flatten() {
            let elsewhere = matches!(field.role, FieldRole::Rope);
            assert!(elsewhere || section.contains(&format!("`{}`", field.name)), "{} of {}", field.name, family.architecture);
        }
    }
}
