//! Whole texts through the front end.

use frontend::{Elaborated, Options, Style, compile, render};
use ir::diag::{Diagnostic, Sources};
use ir::graph::Type;
use ir::op::{DType, Op};
use std::collections::BTreeSet;
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

fn elaborated(name: &str, defines: &str, options: Options) -> Elaborated {
    let defines = defines.split_whitespace().filter_map(|d| d.split_once('=')).map(|(n, v)| (n.into(), v.into())).collect();
    match run(&format!("{name}.mdl"), &model(name), &Options { defines, ..options }) {
        Ok(e) => e,
        Err((_, shown)) => panic!("{shown}"),
    }
}

/// Checks that every node obeys the type rules of the graph.
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
    for name in ["mlp", "gpt2", "llama", "bert", "vit", "umlp", "t5", "nemotron", "mixtral", "deepseek_v3", "gpt_oss", "gemma"] {
        for inline_ops in [false, true] {
            let options = Options { inline_ops, ..Options::default() };
            match run(&format!("{name}.mdl"), &model(name), &options) {
                Ok(e) => {
                    check_types(&e);
                    assert!(e.warnings.is_empty(), "{name}: {:?}", e.warnings);
                }
                Err((_, shown)) => panic!("{shown}"),
            }
        }
    }
}

/// Sources filled by name and index, so that graphs of one text get the same values.
struct Filled<'a>(&'a ir::graph::Graph);

impl ir::eval::Env for Filled<'_> {
    fn source(&mut self, op: &Op, ty: &Type) -> Vec<f64> {
        let name = match op {
            Op::Param(n) => &self.0.params[*n as usize].name,
            Op::Input(n) => &self.0.inputs[*n as usize].name,
            other => panic!("no source: {}", other.name()),
        };
        let count = self.0.body.dims.elements(&ty.dims);
        let stream = ir::random::stream(ir::random::key(name), 1, 1);
        let draw = |i| ir::random::uniform(stream, i);
        (0..count).map(|i| if ty.dtype == DType::I32 { (draw(i) * 7.0).floor() } else { draw(i) - 0.5 }).collect()
    }

    fn scalar(&self, _: &ir::op::Scalar) -> f64 {
        0.0
    }

    fn base(&self, _: &ir::dim::Base) -> u64 {
        0
    }
}

/// The same sources, except for inputs with given values.
struct GivenInputs<'a>(Filled<'a>, &'a [(&'a str, Vec<f64>)]);

impl ir::eval::Env for GivenInputs<'_> {
    fn source(&mut self, op: &Op, ty: &Type) -> Vec<f64> {
        let name = if let Op::Input(n) = op { &self.0.0.inputs[*n as usize].name } else { "" };
        let given = self.1.iter().find(|(given, _)| *given == name);
        given.map_or_else(|| self.0.source(op, ty), |(_, data)| data.clone())
    }

    fn scalar(&self, scalar: &ir::op::Scalar) -> f64 {
        self.0.scalar(scalar)
    }

    fn base(&self, base: &ir::dim::Base) -> u64 {
        self.0.base(base)
    }
}

fn loss(e: &Elaborated) -> f64 {
    let graph = &e.model.graph;
    let values = ir::eval::run(&graph.body, &mut Filled(graph));
    graph.losses.iter().map(|l| values[l.value.index()][0]).sum()
}

const TINY: &[(&str, &str)] = &[
    ("gpt2", "batch=2 vocab=11 hidden=8 heads=2 layers=2 seq=5"),
    ("llama", "batch=2 vocab=11 hidden=8 heads=4 kv_heads=2 ffn=12 layers=2 seq=5 qk_norm=true"),
    ("llama", "batch=2 vocab=11 hidden=8 heads=4 kv_heads=2 ffn=12 layers=2 seq=5 olmo=true"),
    ("llama", "batch=2 vocab=11 hidden=8 heads=2 ffn=12 layers=2 seq=5 window=2 packed=true tied=true"),
    ("gemma", "batch=2 vocab=11 hidden=8 heads=4 kv_heads=2 head_dim=4 ffn=12 layers=3 seq=5 window=2 score_cap=1.0"),
    ("gemma", "batch=2 vocab=11 hidden=8 heads=2 head_dim=4 kv_heads=1 ffn=12 layers=3 seq=5 window=2 qk_norm=true score_cap=0.0 local_theta=10.0"),
    ("bert", "batch=2 vocab=11 hidden=8 heads=2 layers=2 seq=5"),
    ("vit", "batch=2 height=4 width=4 patch=2 hidden=8 heads=2 layers=1 classes=5"),
    ("nemotron", "batch=2 vocab=11 hidden=16 heads=2 kv_heads=1 ffn=12 layers=1 seq=5"),
    ("t5", "batch=2 vocab=11 hidden=8 heads=2 head_dim=4 ffn=6 encoder_layers=1 decoder_layers=1 source=5 target=4 buckets=8 max_distance=16"),
    ("mixtral", "batch=2 vocab=11 hidden=8 heads=2 kv_heads=1 experts=4 top_k=2 expert_ffn=6 layers=2 seq=5"),
    (
        "deepseek_v3",
        "batch=2 vocab=11 hidden=8 heads=2 layers=2 first_dense=1 ffn=12 seq=5 q_rank=6 kv_rank=4 nope=4 turned=2 v_dim=4 experts=8 top_k=2 expert_ffn=6 groups=4 top_groups=2 bias_rate=0.1",
    ),
];

#[test]
fn the_attention_op_computes_what_its_body_says() {
    for (name, defines) in TINY {
        let op = elaborated(name, defines, Options::default());
        let body = elaborated(name, defines, Options { inline_ops: true, ..Options::default() });
        let (a, b) = (loss(&op), loss(&body));
        assert!((a - b).abs() < 1e-9, "{name} {defines}: {a} and {b}");
    }
}

/// Attention, positions and the loss of one document do not depend on another one.
#[test]
fn a_packed_sequence_has_the_losses_of_its_documents_alone() {
    let documents: [&[u8]; 3] = [&[5, 7, 9, 3], &[8, 6, 3], &[4, 10, 1, 2, 9, 7]];
    let all: Vec<f64> = documents.concat().into_iter().map(f64::from).collect();
    let numbers = |of: &[u8]| of.iter().map(|x| f64::from(*x)).collect::<Vec<f64>>();
    let place = |per_document: fn(usize, usize) -> usize| {
        let each = documents.iter().enumerate().flat_map(|(k, d)| (0..d.len()).map(move |i| per_document(k, i) as f64));
        each.take(all.len() - 1).collect::<Vec<f64>>()
    };
    let sizes = "batch=1 vocab=11 hidden=8 heads=2 layers=2";
    for (name, more) in [("llama", "ffn=12"), ("gpt2", ""), ("gemma", "head_dim=4 kv_heads=1 ffn=12 window=2")] {
        let of = |seq: usize, packed: bool, inputs: &[(&str, Vec<f64>)]| {
            let e = elaborated(name, &format!("{sizes} {more} seq={seq} packed={packed} separator=3"), Options::default());
            let graph = &e.model.graph;
            let values = ir::eval::run(&graph.body, &mut GivenInputs(Filled(graph), inputs));
            graph.losses.iter().map(|l| values[l.value.index()][0]).sum::<f64>()
        };
        let inputs =
            [("tokens", all[..all.len() - 1].to_vec()), ("targets", all[1..].to_vec()), ("document", place(|k, _| k)), ("position", place(|_, i| i))];
        let packed = of(all.len() - 1, true, &inputs);
        let alone = documents.map(|d| {
            let counted = d.len() - 1;
            counted as f64 * of(counted, false, &[("tokens", numbers(&d[..counted])), ("targets", numbers(&d[1..]))])
        });
        let counted: usize = documents.iter().map(|d| d.len() - 1).sum();
        let wanted = alone.iter().sum::<f64>() / counted as f64;
        assert!((packed - wanted).abs() < 1e-9, "{name}: {packed}, its documents alone {wanted}");
    }
}

#[test]
fn a_plain_causal_model_uses_the_attention_op() {
    let uses = |e: &Elaborated| e.model.graph.body.nodes.iter().filter(|n| matches!(n.op, Op::Attention(_))).count();
    assert_eq!(uses(&elaborated("gpt2", "layers=3", Options::default())), 3);
    assert_eq!(uses(&elaborated("llama", "layers=3 kv_heads=8", Options::default())), 3);
    assert_eq!(uses(&elaborated("llama", "layers=3 packed=true", Options::default())), 3);
    assert_eq!(uses(&elaborated("gpt2", "layers=3", Options { inline_ops: true, ..Options::default() })), 0);
}

#[test]
fn a_window_belongs_to_the_attention_op() {
    let windows = |defines: &str| {
        let e = elaborated("llama", defines, Options::default());
        let window = |op: &Op| if let Op::Attention(a) = op { a.scoring.ordered().map(|o| a.scoring.window(o)) } else { None };
        e.model.graph.body.nodes.iter().filter_map(|n| window(&n.op)).collect::<Vec<_>>()
    };
    assert_eq!(windows("layers=3 window=128 window_every=2"), [Some(128), None, Some(128)]);
}

/// The outputs of a text without inputs and parameters.
fn outputs(body: &str) -> Vec<Vec<f64>> {
    let text = format!("model m(batch, d = 5, k = 3, hidden = 2) {{\n{body}\n}}\n");
    let e = run("m.mdl", &text, &Options::default()).unwrap_or_else(|(_, shown)| panic!("{shown}"));
    let graph = &e.model.graph;
    let values = ir::eval::run(&graph.body, &mut Filled(graph));
    graph.outputs.iter().map(|o| values[o.value.index()].clone()).collect()
}

#[test]
fn the_greatest_come_first_and_among_equals_the_lowest_index() {
    let text = "let x = where(index(d) % 2 == 1, 2.0, where(index(d) == 0, -inf, 1.0)); let best, at = top_k(x, over: d, k: k); output best, at;";
    assert_eq!(outputs(text), [[2.0, 2.0, 1.0], [1.0, 3.0, 2.0]]);
    let text = "let x = where(index(d) == 3, 1.0, -inf); let best, at = top_k(x, over: d, k: k); output best, at;";
    assert_eq!(outputs(text), [[1.0, f64::NEG_INFINITY, f64::NEG_INFINITY], [3.0, 0.0, 1.0]]);
}

#[test]
fn rows_beyond_a_capacity_come_back_as_zero() {
    // The tokens go to experts 0, 1, 0, 1, 0, and each expert takes two rows.
    let text = "dim one = 1, slot = 2, experts = 2;
      let chosen = expand(index(d) % 2, one);
      let x = real(expand(index(d) + 1, hidden));
      let y = combine(dispatch(x, chosen, over: [d, one], into: [experts, slot]), chosen, over: [d, one], from: [experts, slot]);
      let back = sum(y, over: [one, hidden]);
      output back;";
    assert_eq!(outputs(text), [[2.0, 4.0, 6.0, 8.0, 0.0]]);
}

#[test]
fn what_routers_pick_from_is_another_dim_than_the_experts_that_rows_go_to() {
    let e = elaborated("mixtral", "layers=1", Options::default());
    let graph = &e.model.graph;
    let whole = |name: &str| {
        let p = graph.params.iter().find(|p| p.name == name).unwrap_or_else(|| panic!("no {name}"));
        p.ty.dims.iter().filter(|d| graph.body.dims.name(**d) == "experts").map(|d| graph.body.dims[*d].whole).collect::<Vec<bool>>()
    };
    assert_eq!(whole("layers.0.moe.router.w"), [true]);
    assert_eq!(whole("layers.0.moe.experts.gate"), [false]);
}

#[test]
fn dropout_is_the_identity_outside_of_training() {
    let draws = |e: &Elaborated| e.model.graph.body.nodes.iter().filter(|n| matches!(n.op, Op::Uniform { .. })).count();
    let defines = "layers=2 dropout_rate=0.1";
    assert_eq!(draws(&elaborated("gpt2", defines, Options::default())), 5);
    assert_eq!(draws(&elaborated("gpt2", defines, Options { training: false, ..Options::default() })), 0);
}

#[test]
fn parameters_are_named_by_their_path() {
    let e = elaborated("llama", "layers=2", Options::default());
    let names: Vec<&str> = e.model.graph.params.iter().map(|p| p.name.as_str()).collect();
    assert!(names.contains(&"layers.1.attn.q.w") && names.contains(&"embed") && names.contains(&"norm.w"), "{names:?}");
    let layers: Vec<Option<u32>> = e.model.graph.params.iter().filter(|p| p.name.ends_with("mlp.up.w")).map(|p| p.layer).collect();
    assert_eq!(layers, [Some(0), Some(1)]);
}

#[test]
fn a_define_replaces_a_default_and_what_follows_from_it() {
    let e = elaborated("gpt2", "hidden=96 heads=4 layers=1", Options::default());
    let get = |name: &str| e.model.settings.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str());
    assert_eq!((get("hidden"), get("head_dim"), get("ffn")), (Some("96"), Some("24"), Some("384")));
}

#[test]
fn imported_functions_are_called_by_their_file() {
    let text = "import \"parts.mdl\" as parts;\nmodel m(batch, hidden = 4) {\n  input x: f32[batch, hidden];\n  loss mean(parts.twice(x));\n}\n";
    let mut sources = Sources::default();
    let mut loader = |path: &str| if path == "parts.mdl" { Ok("fn twice(x) = x + x;".to_string()) } else { Err("no such file".into()) };
    let e = compile(&mut sources, "m.mdl", text, &Options::default(), &mut loader).expect("a text that elaborates");
    assert_eq!(e.model.graph.losses.len(), 1);
}

#[test]
fn bytes_that_are_no_text_are_refused_with_their_place() {
    let error = frontend::decode("m.mdl", b"model\n  \xff".to_vec()).expect_err("not text");
    assert_eq!((error.code.as_str(), error.message.contains("2:3")), ("E0108", true));
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

/// The diagnostics of a text, errors or warnings: line of the first label, code, message and help. And all of them as they are shown.
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
    let said = |d: &Diagnostic| d.help.iter().fold(d.message.clone(), |text, help| format!("{text}\n{help}"));
    let key = |d: &Diagnostic| (d.labels.first().map_or(0, |l| l.span.line), d.code.clone(), said(d));
    (found.iter().map(key).collect(), shown.join("\n\n"))
}

/// `(line, "E0201 part of the message or its help")` of the `//~` comments of a text.
fn expected(text: &str) -> Vec<(u32, &str)> {
    text.lines().enumerate().flat_map(|(i, l)| l.split("//~ ").skip(1).map(move |e| (i as u32 + 1, e.trim()))).collect()
}

/// Whether exactly the expected diagnostics were found.
fn as_expected(expected: &[(u32, &str)], found: &[(u32, String, String)]) -> bool {
    let fits = |(line, what): &(u32, &str), (at, code, message): &(u32, String, String)| {
        let (wanted, part) = what.split_once(' ').unwrap_or((what, ""));
        line == at && wanted == code && message.contains(part)
    };
    // Each diagnostic meets one expectation, and the longest expectations choose first.
    let mut left: Vec<_> = found.iter().collect();
    let mut expected: Vec<_> = expected.iter().collect();
    expected.sort_by_key(|(_, what)| std::cmp::Reverse(what.len()));
    expected.into_iter().all(|e| left.iter().position(|f| fits(e, f)).map(|k| left.remove(k)).is_some()) && left.is_empty()
}

#[test]
fn the_examples_of_the_reference_do_what_it_says() {
    let page = std::fs::read_to_string(root().join("docs/language.md")).expect("the reference");
    let header = "model doc(batch, seq = 8, hidden = 16, heads = 4, head_dim = hidden / heads, ffn = 32, layers = 2, vocab = 64) { \
                  input tokens: i32[batch, seq]; input targets: i32[batch, seq] = next(tokens); input x: f32[batch, seq, hidden]; ";
    let mut count = 0;
    for block in page.split("```mdl\n").skip(1) {
        let block = block.split("```").next().unwrap_or("");
        let whole = block.contains("model ");
        let text = if whole { block.to_string() } else { format!("{header}{block} output x; }}") };
        let (found, shown) = diagnostics("language.md", &text);
        let errors: Vec<_> = found.into_iter().filter(|(_, code, _)| code.starts_with('E')).collect();
        assert!(as_expected(&expected(&text), &errors), "{text}\n{shown}");
        count += 1;
    }
    assert!(count >= 10, "{count} examples");
}

/// The texts of all files below these folders.
fn texts(folders: &[&str]) -> Vec<String> {
    let mut paths: Vec<PathBuf> = folders.iter().map(|c| root().join(c)).collect();
    let mut found = vec![];
    while let Some(path) = paths.pop() {
        match path.is_dir() {
            true => paths.extend(std::fs::read_dir(path).expect("a folder").map(|e| e.expect("an entry").path())),
            false => found.push(String::from_utf8_lossy(&std::fs::read(path).expect("a file")).into_owned()),
        }
    }
    found
}

/// The codes that the sources name.
fn codes() -> BTreeSet<String> {
    let sources = texts(&["src", "frontend/src", "ir/src", "verify/src", "passes/src", "codegen/src", "runtime/src", "convert/src"]);
    let is_code = |part: &&str| part.len() == 5 && part.starts_with(['E', 'W']) && part[1..].bytes().all(|b| b.is_ascii_digit());
    sources.iter().flat_map(|text| text.split('"')).filter(is_code).map(String::from).collect()
}

#[test]
fn every_code_is_documented_and_every_documented_code_is_one() {
    let page = std::fs::read_to_string(root().join("docs/errors.md")).expect("the page of codes");
    let first = page.lines().filter_map(|l| l.strip_prefix("| ")?.split_once(" |")).flat_map(|(codes, _)| codes.split(", "));
    let documented: BTreeSet<String> = first.filter(|c| c.starts_with(['E', 'W']) && c.len() == 5).map(String::from).collect();
    assert_eq!(codes(), documented);
}

/// A code is expected as a shown diagnostic, in a `//~` comment, or in a test's own text.
#[test]
fn every_code_is_expected_by_a_test() {
    let tests = texts(&["tests", "frontend/tests", "passes/tests"]).concat();
    let ways = |code: &str| [format!("error[{code}]"), format!("warning[{code}]"), format!("//~ {code}"), format!("\"{code}\"")];
    let unseen: Vec<String> = codes().into_iter().filter(|code| !ways(code).iter().any(|way| tests.contains(way))).collect();
    assert_eq!(unseen, Vec::<String>::new());
}

#[test]
fn each_error_stands_where_the_text_expects_it() {
    let mut paths: Vec<PathBuf> =
        std::fs::read_dir(root().join("frontend/tests/errors")).expect("a folder").map(|e| e.expect("an entry").path()).collect();
    paths.sort();
    let mut wrong = String::new();
    for path in paths {
        let text = std::fs::read_to_string(&path).expect("a text");
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        let expected = expected(&text);
        let (found, shown) = diagnostics(&name, &text);
        if !as_expected(&expected, &found) {
            wrong += &format!("--- {name}: expected {expected:?}\n{shown}\n\n");
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}

/// Pieces that a careless edit may leave behind.
const SCRAPS: &[&str] = &[
    "{",
    "}",
    "(",
    ")",
    "[",
    "]",
    ";",
    ",",
    "..",
    "->",
    "=",
    "==",
    "~",
    "@",
    "\"",
    "//",
    "^",
    "-",
    " not ",
    " as ",
    " in ",
    "let ",
    "dim ",
    "repeat ",
    "if ",
    "else ",
    "fn f(x) = ",
    "return ",
    "none",
    "true",
    "1e999",
    "0",
    "-1",
    "99999999999",
    "0.5.5",
    "é",
    "\u{FEFF}",
    "\n",
    "layers",
    "seq",
    "view(",
    "attention(",
    "index(",
    "expand(",
    "concat(",
    "[0]",
    "import \"x\";",
    "model m(",
    "training",
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
