//! The pages `docs/commands.md` and `docs/flags.md`, of the command line's own description and of the table of foreign
//! flags; `docs/ops.md` and `docs/formats.md`, of declarations in the source. `UPDATE_EXPECT=1` writes them.

mod declared;
mod formats;
mod ops;

use crate::cli::Cli;
use crate::foreign_flags::{FOREIGN, FlagReplacement};
use clap::{Arg, Command, CommandFactory};
use std::path::Path;

/// A cell of a table.
fn cell(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|")
}

fn code(text: &str) -> String {
    format!("`{}`", cell(text))
}

/// All commands that do something, with the words that call them, in the order of `mcc --help`.
fn commands(command: &Command, called: &str) -> Vec<(String, Command)> {
    let below: Vec<_> = command.get_subcommands().filter(|c| c.get_name() != "help" && !c.is_hide_set()).collect();
    if below.is_empty() {
        return vec![(called.to_string(), command.clone())];
    }
    below.into_iter().flat_map(|c| commands(c, &format!("{called} {}", c.get_name()))).collect()
}

/// How an argument is written, with the names that it has beside its own.
fn written(arg: &Arg) -> String {
    let Some(long) = arg.get_long() else { return code(&arg.to_string()) };
    let short = arg.get_short().map(|s| format!("`-{s}`, ")).unwrap_or_default();
    let value = if arg.get_action().takes_values() { arg.to_string() } else { format!("--{long}") };
    let others = arg.get_visible_aliases().unwrap_or_default();
    short + &code(&value) + &others.iter().map(|a| format!(", `--{a}`")).collect::<String>()
}

/// What an argument is for, the values that it takes, and the one that it has by itself.
fn meaning(arg: &Arg) -> String {
    let said = arg.get_long_help().or(arg.get_help()).map(ToString::to_string).unwrap_or_default();
    let values = if arg.is_hide_possible_values_set() { vec![] } else { arg.get_possible_values() };
    let values: Vec<_> = values.into_iter().filter(|v| arg.get_action().takes_values() && !v.is_hide_set()).collect();
    let value = |v: &clap::builder::PossibleValue| match v.get_help() {
        Some(help) => format!("{}: {}", code(v.get_name()), cell(&help.to_string())),
        None => code(v.get_name()),
    };
    let values = values.iter().map(value).collect::<Vec<_>>().join("; ");
    let default: Vec<_> = arg.get_default_values().iter().map(|d| d.to_string_lossy()).collect();
    let default =
        if default.is_empty() || !arg.get_action().takes_values() { String::new() } else { format!(" [default: {}]", code(&default.join(" "))) };
    format!("{}{}{default}", cell(&said), if values.is_empty() { String::new() } else { format!(" ({values})") })
}

/// Arguments under the commands that take them: one that several take alike stands once, under all of these.
fn commands_page() -> String {
    let mut root = Cli::command();
    root.build();
    let all = commands(&root, "mcc");
    let mut rows: Vec<(String, Vec<&str>)> = vec![];
    for (called, command) in &all {
        for arg in command.get_arguments().filter(|a| !a.is_hide_set() && !["help", "version"].contains(&a.get_id().as_str())) {
            let row = format!("| {} | {} |", written(arg), meaning(arg));
            match rows.iter_mut().find(|(r, _)| *r == row) {
                Some((_, takers)) => takers.push(called),
                None => rows.push((row, vec![called])),
            }
        }
    }
    let mut page = String::from(
        "# Commands\n\nWhat each command of mcc does and takes, from its own description; `mcc COMMAND --help` says the same.\n\
         A flag that several commands take alike stands once, under all of them.\n\n| command | does |\n|---|---|\n",
    );
    for (called, command) in &all {
        page += &format!("| {} | {} |\n", code(called), cell(&command.get_about().map(ToString::to_string).unwrap_or_default()));
    }
    let mut groups: Vec<&[&str]> = vec![];
    rows.iter().for_each(|(_, takers)| {
        if !groups.contains(&takers.as_slice()) {
            groups.push(takers);
        }
    });
    for group in groups {
        let heading: Vec<String> = group.iter().map(|c| code(c)).collect();
        page += &format!("\n## {}\n\n| argument | meaning |\n|---|---|\n", heading.join(", "));
        rows.iter().filter(|(_, takers)| takers == group).for_each(|(row, _)| page += &format!("{row}\n"));
    }
    page
}

/// Foreign flags by what there is in their place.
fn flags_page() -> String {
    let mut page = String::from(
        "# Flags of other programs\n\nFlags of Megatron-LM, DeepSpeed, torchtitan, NeMo, torchrun and Hugging Face's `Trainer` that mcc does not\n\
         take, and what it has in their place. The command line answers with the same table. Names that mcc takes itself,\n\
         many of Megatron-LM's among them, are in [commands](commands.md).\n",
    );
    type Row = fn(&FlagReplacement) -> Option<String>;
    let parts: [(&str, &str, Row); 5] = [
        ("Flags of mcc", "write", |i| match i {
            FlagReplacement::Flag(command, flag) => Some(code(&format!("mcc {command} {flag}"))),
            _ => None,
        }),
        ("Settings of the model text", "write", |i| match i {
            FlagReplacement::Setting(name) => Some(code(&format!("-D {name}=.."))),
            _ => None,
        }),
        ("Said by the model text", "how", |i| match i {
            FlagReplacement::Text(how) => Some(cell(how)),
            _ => None,
        }),
        ("Not needed", "why", |i| match i {
            FlagReplacement::Always(why) => Some(cell(why)),
            _ => None,
        }),
        ("Not there", "why, or in which other way", |i| match i {
            FlagReplacement::Nothing(why) => Some(cell(why)),
            _ => None,
        }),
    ];
    for (heading, column, row) in parts {
        page += &format!("\n## {heading}\n\n| there | {column} |\n|---|---|\n");
        for (names, instead) in FOREIGN {
            let Some(cell) = row(instead) else { continue };
            let names: Vec<String> = names.iter().map(|n| code(&format!("--{n}"))).collect();
            page += &format!("| {} | {cell} |\n", names.join(", "));
        }
    }
    page
}

#[test]
fn generated_pages_are_current() {
    let pages = [("commands.md", commands_page()), ("flags.md", flags_page()), ("ops.md", ops::page()), ("formats.md", formats::page())];
    for (name, page) in pages {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs").join(name);
        if std::env::var_os("UPDATE_EXPECT").is_some() {
            std::fs::write(&path, &page).expect("written");
        }
        assert!(std::fs::read_to_string(&path).is_ok_and(|text| text == page), "docs/{name} is another one; UPDATE_EXPECT=1 renews it");
    }
    assert!(commands_page().lines().filter(|l| l.starts_with("| `")).count() > 200 && flags_page().contains("`--hidden-size`"));
}
