use super::*;
use frontend::{Options, Style, render};
use ir::diag::Sources;
use std::fs;
use std::path::Path;

fn graph(text: &str, defines: &str) -> Graph {
    let mut sources = Sources::default();
    let defines = defines.split_whitespace().filter_map(|d| d.split_once('=')).map(|(k, v)| (k.into(), v.into())).collect();
    let elaborated = frontend::compile(&mut sources, "m.mdl", text, &Options { defines, ..Options::default() }, &mut |_| Err("no imports".into()));
    elaborated.unwrap_or_else(|e| panic!("{}", e.iter().map(|e| render(e, &sources, Style::Plain)).collect::<String>())).model.graph
}

/// `labels: -100, 0 to 9`, for each input of integers, then the warnings' places.
fn said(graph: &Graph) -> String {
    let found = indices(graph);
    assert_eq!(verify::meaning::ranges(graph, &found.takes), Ok(None));
    let takes = |all: &Vec<Interval>| all.iter().map(Interval::to_string).collect::<Vec<_>>().join(", ");
    let inputs = graph.inputs.iter().zip(&found.takes).filter_map(|(i, t)| Some(format!("{}: {}", i.name, takes(t.as_ref()?))));
    let lines = found.warnings.iter().map(|w| format!("warned at {}", w.labels.iter().map(|l| l.span.line.to_string()).collect::<String>()));
    inputs.chain(lines).collect::<Vec<_>>().join("; ")
}

/// For each end of the inputs' intervals, whether the verifier refuses one value more.
fn refused_beyond(graph: &Graph) -> Vec<bool> {
    let takes = indices(graph).takes;
    let mut refused = vec![];
    for (k, i) in takes.iter().enumerate().flat_map(|(k, t)| (0..t.as_ref().map_or(0, Vec::len)).map(move |i| (k, i))) {
        for (least, most) in [(1, 0), (0, 1)] {
            let mut wide = takes.clone();
            let end = &mut wide[k].as_mut().expect("intervals")[i];
            let Some(wider) = end.least.checked_sub(least).zip(end.most.checked_add(most)) else { continue };
            (end.least, end.most) = wider;
            let meets = takes[k].iter().flatten().enumerate().any(|(j, other)| j != i && other.least <= wider.1 && wider.0 <= other.most);
            if !meets {
                refused.push(verify::meaning::ranges(graph, &wide).is_err());
            }
        }
    }
    refused
}

#[test]
fn what_leaves_its_table_is_refused_by_the_verifier() {
    for index in ["x", "where(x != -100, x, 0)", "x + 3", "9 - 2 * x", "abs(x - 2)", "where(m, x, 0)", "where(m, x, 77)"] {
        let refused = refused_beyond(&graph(&text_of(index), ""));
        assert!(refused.len() >= 2 && refused.iter().all(|r| *r), "{index}: {refused:?}");
    }
    // An index made of two elements gives a warning and no bounds.
    for index in ["x + y", "x * y"] {
        assert_eq!(refused_beyond(&graph(&text_of(index), "")), [], "{index}");
    }
}

/// The index of a table of 10 rows, of inputs `x` and `y` over `seq` and a mask `m`; line 5 of the text.
fn of_index(index: &str) -> String {
    said(&graph(&text_of(index), "")).replace("-2147483648", "MIN").replace("2147483647", "MAX").replace("; y: MIN to MAX", "")
}

fn text_of(index: &str) -> String {
    format!(
        "model m(batch, seq = 4, rows = 10) {{
  input x: i32[batch, seq]; input y: i32[batch, seq]; input m: bool[batch, seq]; input f: f32[batch, seq];
  dim keys = seq, two = 2, half = seq / 2;
  param table: [rows] ~ normal(1.0);
  let i = {index};
  let t = table[rows: i];
  loss mean(t) + 0 * mean(f) + 0 * mean(f32(m)) + 0 * mean(f32(x > 0)) + 0 * mean(f32(y > 0));
}}"
    )
}

#[test]
fn what_an_input_may_hold_follows_from_how_it_becomes_an_index() {
    for (index, want) in [
        ("x", "x: 0 to 9"),
        ("where(x != -100, x, 0)", "x: -100, 0 to 9"),
        ("where(x == -100, 9, x)", "x: -100, 0 to 9"),
        ("where(not (x == -1 or x == 77), x, 3)", "x: -1 to 9, 77"),
        ("where(x != -100, x, 10)", "x: 0 to 9"),
        ("where(x > 5 and x < 20, x - 10, x)", "x: 0 to 5, 10 to 19"),
        ("x + 3", "x: -3 to 6"),
        ("3 * x + 1", "x: 0 to 2"),
        ("9 - 2 * x", "x: 0 to 4"),
        ("-x", "x: -9 to 0"),
        ("abs(x - 2)", "x: -7 to 11"),
        ("maximum(x, 0)", "x: MIN to 9"),
        ("minimum(maximum(x, 0), rows - 1)", "x: MIN to MAX"),
        ("x % 10", "x: MIN to MAX"),
        ("i32(x > 3) * 9", "x: MIN to MAX"),
        ("where(x > 3, index(seq), x)", "x: 0 to 9"),
        ("x - x", "x: MIN to MAX"),
        // The compared element is not the one that becomes the index.
        ("where(slice(x, seq -> half) > 0, slice(x, seq -> half, at: 2), 1)", "x: 0 to 9"),
        ("view(where(x != -100, x, 0), seq -> keys)", "x: -100, 0 to 9"),
        ("where(view(x, seq -> keys) != -100, view(x, seq -> keys), 0)", "x: -100, 0 to 9"),
        ("stack(x, where(x > 20, 0, x), over: two)", "x: 0 to 9"),
        ("max(where(x > 20, 0, x), over: seq)", "x: 0 to 9"),
        ("sum(i32(x > 3), over: seq)", "x: MIN to MAX"),
        ("where(m, x, 0)", "x: 0 to 9"),
        ("i32(m)", "x: MIN to MAX"),
        ("index(seq) + 6", "x: MIN to MAX"),
        ("i32(f32(index(seq)) * 2.5)", "x: MIN to MAX"),
    ] {
        assert_eq!(of_index(index), want, "{index}");
    }
    assert_eq!(of_index("where(x == 5, y, x)"), "x: 0 to 9; y: 0 to 9");
}

#[test]
fn values_that_a_text_replaces_are_refused_unless_it_names_them_one_by_one() {
    for (index, want) in [
        ("where(x < 10, x, 0)", "x: 0 to 9"),
        ("where(x >= 0, x, 0)", "x: 0 to 9"),
        ("where(x >= 0 and x < 10, x, 0)", "x: 0 to 9"),
        ("where(not (x < 0 or x > 9), x, 0)", "x: 0 to 9"),
        ("where(x != -100, where(x >= 0, x, 0), 0)", "x: -100, 0 to 9"),
        ("where(x >= 0 or x == -100, maximum(x, 0), 0)", "x: -100, 0 to 9"),
        ("where(x >= 50 and x < 60, 0, x)", "x: 0 to 9"),
        ("where(x < 10, x + 1, 0)", "x: -1 to 8"),
        ("x * i32(x < 10)", "x: 0 to 9"),
        ("where(f32(x > 9) > 0, 0, x)", "x: 0 to 9"),
        ("where(m and x < 10, x, 0)", "x: 0 to 9"),
        ("where(y > 3 and x < 10, x, 0)", "x: 0 to 9"),
        ("where(view(x, seq -> keys) < 10, view(x, seq -> keys), 0)", "x: 0 to 9"),
        // The compared input is not used as an index.
        ("where(x > 3, 1, 0)", "x: MIN to MAX"),
        ("where(x > 3, y, 0)", "x: MIN to MAX; y: 0 to 9"),
        // A clamp accepts any value by definition.
        ("minimum(maximum(x, 0), 9)", "x: MIN to MAX"),
    ] {
        assert_eq!(of_index(index), want, "{index}");
    }
}

#[test]
fn one_true_of_several_is_an_index() {
    for (more, loss, want) in [
        ("", "mean(f32(one_hot(x, rows)))", "x: 0 to 9"),
        ("", "mean(f32(index(rows) == expand(x, rows)))", "x: 0 to 9"),
        ("", "mean(f32(one_hot(where(x != -100, x, 0), rows)))", "x: -100, 0 to 9"),
        ("", "mean(f32(one_hot(where(x < 10, x, 0), rows)))", "x: 0 to 9"),
        ("", "mean(f32(one_hot(x * x, rows)))", "x: MIN to MAX"),
        (" @any", "mean(f32(one_hot(x, rows)))", "x: MIN to MAX"),
        // Two dims of equal size do not make an index of one an index of the other.
        ("", "mean(f32(same(x, batch, keys)))", "x: MIN to MAX"),
    ] {
        let over = if loss.contains("same") { "seq" } else { "batch" };
        let text = format!("model m(batch, seq = 4, rows = 10) {{ dim keys = seq; input x: i32[{over}]{more}; loss {loss}; }}");
        assert_eq!(
            said(&graph(&text.replace("same(x, batch", "same(x, seq"), "")).replace("-2147483648", "MIN").replace("2147483647", "MAX"),
            want,
            "{loss}"
        );
    }
}

#[test]
fn any_value_of_an_input_is_taken_if_the_text_says_so() {
    let text = |more: &str, index: &str| {
        let text = format!(
            "model m(batch, rows = 10) {{
              input x: i32[batch]{more};
              param a: [rows] ~ normal(1.0);
              loss mean(a[rows: {index}]);
            }}"
        );
        said(&graph(&text, "")).replace("-2147483648", "MIN").replace("2147483647", "MAX")
    };
    let hidden = "where(x >= 0 and x < rows, x, 0)";
    assert_eq!(text("", hidden), "x: 0 to 9");
    assert_eq!(text(" @any", hidden), "x: MIN to MAX");
    assert_eq!(text(" @any", "x"), "x: MIN to MAX; warned at 4");
    assert_eq!(text(" = 3 @any", "where(x < 10, x, 0)"), "x: MIN to MAX; warned at 4");
}

#[test]
fn numbers_that_are_more_than_indices_are_bounded_only_where_they_are_indices() {
    let text = "model m(batch, rows = 10) {
      input price: i32[batch];
      param a: [rows] ~ normal(1.0);
      loss mean(a[rows: where(price < 9, price, 9)] * f32(price));
    }";
    assert_eq!(said(&graph(text, "")), "price: 0 to 2147483647");
}

#[test]
fn an_index_that_nothing_bounds_is_warned_of_at_its_line() {
    for index in
        ["x + y", "x * y", "x * x", "i32(f)", "i32(f32(x))", "cumsum(x, over: seq)", "index(seq) + 7", "where(m, x * y, x)", "where(m, 77, x)"]
    {
        let said = of_index(index);
        assert!(said.ends_with("; warned at 6"), "{index}: {said}");
    }
}

#[test]
fn indices_of_one_input_are_all_satisfied() {
    let text = "model m(batch, rows = 10, few = 4) {
      input x: i32[batch];
      param a: [rows] ~ normal(1.0); param b: [few] ~ normal(1.0);
      loss mean(a[rows: where(x != -100, x, 0)]) + mean(b[few: maximum(x, 0)]);
    }";
    assert_eq!(said(&graph(text, "")), "x: -100, 0 to 3");
    let (one, other) = (Interval { least: -5, most: 20 }, [Interval { least: 0, most: 3 }, Interval { least: 9, most: 50 }]);
    let found = |takes: &[Interval]| Indices { takes: vec![None, Some(takes.to_vec())], warnings: vec![] };
    let both = found(&[one]).and(found(&other));
    assert_eq!(both, found(&[other[0], Interval { least: 9, most: 20 }]));
}

/// Covers all models of this repository, in all configurations that change the inputs.
#[test]
fn every_input_that_a_model_indexes_with_is_bounded_by_its_table() {
    let of_class = "label: -100, 0 to ";
    let wanted = [
        ("bert", "", "tokens: 0 to 30521; labels: -100, 0 to 30521; kinds: 0 to 1".to_string()),
        ("bert", "padded=true", "tokens: 0 to 30521; labels: -100, 0 to 30521; kinds: 0 to 1".into()),
        ("deepseek_v3", "", "tokens: 0 to 129279; targets: -100, 0 to 129279".into()),
        ("gemma", "", "tokens: 0 to 255999; targets: -100, 0 to 255999".into()),
        ("deepseek_v3", "mtp=1", "tokens: 0 to 129279; targets: -100, 0 to 129279; further: -100, 0 to 129279".into()),
        ("gpt_oss", "", "tokens: 0 to 201087; targets: -100, 0 to 201087".into()),
        ("gpt2", "", "tokens: 0 to 50303; targets: -100, 0 to 50303".into()),
        ("llama", "", "tokens: 0 to 31999; targets: -100, 0 to 31999".into()),
        (
            "llama",
            "packed=true",
            "tokens: 0 to 31999; targets: -100, 0 to 31999; document: -2147483648 to 2147483647; position: -2147483648 to 2147483647".into(),
        ),
        ("mixtral", "", "tokens: 0 to 31999; targets: -100, 0 to 31999".into()),
        ("mlp", "", format!("{of_class}9")),
        ("nemotron", "", "tokens: 0 to 255999; targets: -100, 0 to 255999".into()),
        ("t5", "", "tokens: 0 to 32127; labels: -100, 0 to 32127; shifted: -100, 0 to 32127".into()),
        ("t5", "tied=false", "tokens: 0 to 32127; labels: -100, 0 to 32127; shifted: -100, 0 to 32127".into()),
        ("umlp", "", String::new()),
        ("vit", "", format!("{of_class}999")),
    ];
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models");
    for (name, defines, want) in &wanted {
        let text = fs::read_to_string(models.join(format!("{name}.mdl"))).expect("a model text");
        assert_eq!(said(&graph(&text, defines)), *want, "{name} {defines}");
    }
    for entry in fs::read_dir(models).expect("models") {
        let file = entry.expect("an entry").file_name();
        assert!(wanted.iter().any(|w| *file == *format!("{}.mdl", w.0)), "{file:?} is not among them");
    }
}
