//! Whole texts through the front end.

use frontend::{Elaborated, Options, Style, compile, render};
use ir::diag::{Diagnostic, Sources};
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn no_imports(_: &str) -> Result<String, String> {
    Err("imports are not read here".into())
}

fn model(name: &str) -> String {
    std::fs::read_to_string(root().join("models").join(format!("{name}.mdl"))).expect("a model text")
}

fn run(name: &str, text: &str, options: &Options) -> Result<Elaborated, (Vec<Diagnostic>, String)> {
    let mut sources = Sources::default();
    compile(&mut sources, name, text, options, &mut no_imports).map_err(|errors| {
        let shown: Vec<String> = errors.iter().map(|e| render(e, &sources, Style::Plain)).collect();
        (errors, shown.join("\n\n"))
    })
}

fn elaborated(name: &str, defines: &[(&str, &str)]) -> Elaborated {
    let defines = defines.iter().map(|(n, v)| (n.to_string(), v.to_string())).collect();
    let options = Options { defines, ..Options::default() };
    match run(&format!("{name}.mdl"), &model(name), &options) {
        Ok(e) => e,
        Err((_, shown)) => panic!("{shown}"),
    }
}

/// Every node obeys the type rules of the graph.
fn check_types(e: &Elaborated) {
    let body = &e.model.graph.body;
    for v in body.values() {
        if let Err(error) = ir::infer::check(body, v) {
            panic!("{v}: {error}");
        }
    }
}

#[test]
fn every_model_elaborates_to_a_well_typed_graph() {
    for name in ["mlp", "gpt2", "llama", "bert", "vit", "umlp", "t5", "nemotron"] {
        for inline_ops in [false, true] {
            let options = Options { inline_ops, ..Options::default() };
            match run(&format!("{name}.mdl"), &model(name), &options) {
                Ok(e) => {
                    check_types(&e);
                    println!("{name}: {} nodes, {} params, {} layers", e.model.graph.body.nodes.len(), e.model.graph.params.len(), e.model.graph.layers);
                    assert!(e.warnings.is_empty(), "{name}: {:?}", e.warnings);
                }
                Err((_, shown)) => panic!("{shown}"),
            }
        }
    }
}

#[test]
fn models_and_library_are_formatted() {
    let names = ["models", "frontend/std"];
    for dir in names {
        for entry in std::fs::read_dir(root().join(dir)).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.extension().is_some_and(|e| e == "mdl") {
                let text = std::fs::read_to_string(&path).expect("a text");
                let formatted = frontend::format("t.mdl", &text).expect("a text that parses");
                if std::env::var_os("MCC_BLESS").is_some() {
                    std::fs::write(&path, &formatted).expect("written");
                } else {
                    assert_eq!(formatted, text, "{}", path.display());
                }
            }
        }
    }
}

/// The diagnostics of a text, errors or warnings, with the line of their first label.
fn diagnostics(name: &str, text: &str) -> (Vec<(u32, String, String)>, String) {
    let defines = text.lines().filter_map(|l| l.strip_prefix("// -D ")).filter_map(|d| d.split_once('='));
    let options = Options { defines: defines.map(|(n, v)| (n.into(), v.into())).collect(), ..Options::default() };
    let mut sources = Sources::default();
    let found = match compile(&mut sources, name, text, &options, &mut no_imports) {
        Ok(e) => e.warnings,
        Err(errors) => errors,
    };
    let shown: Vec<String> = found.iter().map(|d| render(d, &sources, Style::Plain)).collect();
    for d in &found {
        assert!(!d.labels.is_empty() || d.code == "E0905", "{name}: no place: {}", d.message);
        assert!(!d.help.is_empty() || d.labels.iter().any(|l| !l.text.is_empty()), "{name}: no way out: {}", d.message);
    }
    let key = |d: &Diagnostic| (d.labels.first().map_or(0, |l| l.span.line), d.code.clone(), d.message.clone());
    (found.iter().map(key).collect(), shown.join("\n\n"))
}

#[test]
fn each_error_stands_where_the_text_expects_it() {
    let mut paths: Vec<PathBuf> = std::fs::read_dir(root().join("frontend/tests/errors")).expect("a folder").map(|e| e.expect("an entry").path()).collect();
    paths.sort();
    let mut wrong = String::new();
    for path in paths {
        let text = std::fs::read_to_string(&path).expect("a text");
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        let expected: Vec<(u32, &str)> =
            text.lines().enumerate().filter_map(|(i, l)| l.split_once("//~ ").map(|(_, e)| (i as u32 + 1, e.trim()))).collect();
        let (found, shown) = diagnostics(&name, &text);
        if std::env::var_os("MCC_SHOW").is_some() {
            println!("{shown}\n");
        }
        let fits = |(line, what): &(u32, &str), (at, code, message): &(u32, String, String)| {
            let (wanted, part) = what.split_once(' ').unwrap_or((what, ""));
            line == at && wanted == code && message.contains(part)
        };
        if expected.len() != found.len() || !expected.iter().all(|e| found.iter().any(|f| fits(e, f))) {
            wrong += &format!("--- {name}: expected {expected:?}\n{shown}\n\n");
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}

/// Pieces that a careless edit may leave behind.
const SCRAPS: &[&str] = &[
    "{", "}", "(", ")", "[", "]", ";", ",", "..", "->", "=", "==", "~", "@", "\"", "//", "^", "-", " not ", " as ", " in ", "let ", "dim ", "repeat ",
    "if ", "else ", "fn f(x) = ", "return ", "none", "true", "1e999", "0", "-1", "99999999999", "0.5.5", "é", "\u{FEFF}", "\n", "layers", "seq",
    "view(", "attention(", "index(", "expand(", "concat(", "[0]", "import \"x\";", "model m(", "training",
];

#[derive(Clone, Debug)]
enum Edit {
    Delete { at: usize, len: usize },
    Insert { at: usize, scrap: usize },
    Copy { from: usize, len: usize, to: usize },
}

fn edited(text: &str, edits: &[Edit]) -> String {
    let mut chars: Vec<char> = text.chars().collect();
    for edit in edits {
        let n = chars.len().max(1);
        match *edit {
            Edit::Delete { at, len } => {
                let start = at % n;
                chars.drain(start.min(chars.len())..(start + len).min(chars.len()));
            }
            Edit::Insert { at, scrap } => {
                let at = (at % n).min(chars.len());
                chars.splice(at..at, SCRAPS[scrap % SCRAPS.len()].chars());
            }
            Edit::Copy { from, len, to } => {
                let start = (from % n).min(chars.len());
                let piece: Vec<char> = chars[start..(start + len).min(chars.len())].to_vec();
                let to = (to % n).min(chars.len());
                chars.splice(to..to, piece);
            }
        }
    }
    chars.into_iter().collect()
}

fn edit() -> impl proptest::strategy::Strategy<Value = Edit> {
    use proptest::prelude::*;
    prop_oneof![
        (0..10_000usize, 1..40usize).prop_map(|(at, len)| Edit::Delete { at, len }),
        (0..10_000usize, 0..SCRAPS.len()).prop_map(|(at, scrap)| Edit::Insert { at, scrap }),
        (0..10_000usize, 1..60usize, 0..10_000usize).prop_map(|(from, len, to)| Edit::Copy { from, len, to }),
    ]
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig { cases: 300, failure_persistence: None, ..Default::default() })]

    #[test]
    fn no_edit_of_a_model_makes_the_front_end_panic(
        which in 0..5usize,
        edits in proptest::collection::vec(edit(), 1..6),
    ) {
        let text = edited(&model(["mlp", "gpt2", "llama", "umlp", "vit"][which]), &edits);
        let (found, shown) = match run("edited.mdl", &text, &Options::default()) {
            Ok(e) => {
                check_types(&e);
                (e.warnings, String::new())
            }
            Err(errors) => errors,
        };
        proptest::prop_assert!(found.len() <= 201 + text.len() / 2, "{shown}");
        if let Ok(once) = frontend::format("edited.mdl", &text) {
            let twice = frontend::format("edited.mdl", &once);
            proptest::prop_assert_eq!(twice.as_ref(), Ok(&once), "of {}", text);
            let comments = |t: &str| t.lines().filter(|l| l.contains("//")).count();
            proptest::prop_assert!(comments(&once) >= comments(&text));
        }
    }
}
