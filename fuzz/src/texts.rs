//! Model texts, through elaboration.

use frontend::{Options, Style};
use ir::diag::{Severity, Sources};

/// A text elaborates to a graph that its verifier accepts, or is refused with errors that can be shown. What the
/// formatter makes of it means the same and is left alone by it.
pub fn text(bytes: &[u8]) {
    let Ok(text) = frontend::decode("fuzz.mdl", bytes.to_vec()) else { return };
    let outcome = elaborate(&text);
    let Ok(formatted) = frontend::format("fuzz.mdl", &text) else { return };
    let again = frontend::format("fuzz.mdl", &formatted).expect("a formatted text is one");
    assert_eq!(again, formatted, "formatting twice changes the text");
    assert_eq!(elaborate(&formatted), outcome, "the formatted text means something else:\n{formatted}");
}

/// The graph as text, without the places in the model's text that nodes come from; or the codes of all errors.
fn elaborate(text: &str) -> Result<String, Vec<String>> {
    let mut sources = Sources::default();
    let mut no_imports = |name: &str| Err(format!("`{name}` is not there"));
    match frontend::compile(&mut sources, "fuzz.mdl", text, &Options::default(), &mut no_imports) {
        Ok(done) => {
            for warning in &done.warnings {
                frontend::render(warning, &sources, Style::Plain);
            }
            let mut graph = done.model.graph;
            verify::graph::verify(&graph).expect("what elaborates is sound");
            graph.body.nodes.iter_mut().for_each(|n| n.origin.span = None);
            graph.params.iter_mut().for_each(|p| p.span = None);
            graph.inputs.iter_mut().for_each(|i| i.span = None);
            Ok(ir::text::print_graph(&graph))
        }
        Err(errors) => {
            assert!(errors.iter().any(|e| e.severity == Severity::Error), "refused without an error");
            for error in &errors {
                assert!(!frontend::render(error, &sources, Style::Plain).is_empty());
            }
            Err(errors.iter().map(|e| e.code.clone()).collect())
        }
    }
}
