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
