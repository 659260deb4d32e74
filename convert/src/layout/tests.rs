//! Small sections, and those of the models.

use super::*;
use ir::diag::Sources;

/// The foreign tensors of a model with the given parameters and lines, or the first error.
fn check(params: &str, lines: &str) -> Result<Vec<Foreign>, String> {
    let text = format!("model m(batch, a = 2, b = 3, c = 5, layers = 2) {{\n{params}\noutput batch;\n}}\nweights hf {{\n{lines}\n}}\n");
    let text = text.replace("output batch;", "input x: f32[batch];\noutput x;");
    let elaborated = frontend::compile(&mut Sources::default(), "m.mdl", &text, &frontend::Options::default(), &mut |_| Err("none".into()));
    foreign("hf", &elaborated.map_err(|e| e[0].message.clone())?.model).map_err(|e| e[0].message.clone())
}

fn shapes(params: &str, lines: &str) -> Vec<(String, Vec<u64>)> {
    check(params, lines).unwrap().into_iter().map(|f| (f.name, f.shape)).collect()
}

#[test]
fn without_a_layout_dims_stand_as_declared() {
    assert_eq!(shapes("param w: [a, b] = 0;", "w = \"x\";"), [("x".into(), vec![2, 3])]);
}

#[test]
fn a_layout_transposes_and_merges() {
    let found = check("param w: [a, b, c] = 0;", "w = \"x\" [b*c, a];").unwrap();
    assert_eq!(found[0].shape, [15, 2]);
    let loops = [Loop { size: 3, own: 5, foreign: 10 }, Loop { size: 5, own: 1, foreign: 2 }, Loop { size: 2, own: 15, foreign: 1 }];
    assert_eq!(found[0].parts, [ParamSlice { param: 0, own: 0, foreign: 0, loops: loops.to_vec() }]);
}

#[test]
fn alternatives_lie_end_to_end() {
    let found = check("param v: [a, b] = 0;\nparam w: [a, c] = 0;", "v, w = \"x\" [a, (b | c)];").unwrap();
    assert_eq!((found[0].shape.clone(), found[0].parts[1].foreign), (vec![2, 8], 3));
    assert_eq!(found[0].parts[1].loops[0], Loop { size: 2, own: 5, foreign: 8 });
}

#[test]
fn alternatives_can_alternate_within_a_merged_dim() {
    let found = check("param v: [a, b] = 0;\nparam w: [a, c] = 0;", "v, w = \"x\" [a*(b | c)];").unwrap();
    assert_eq!((found[0].shape.clone(), found[0].parts[1].foreign), (vec![16], 3));
    assert_eq!(found[0].parts[1].loops, [Loop { size: 2, own: 5, foreign: 8 }, Loop { size: 5, own: 1, foreign: 1 }]);
}

#[test]
fn a_repeat_gives_one_tensor_per_iteration() {
    let found = shapes("repeat layers {\nparam w: [a] = 0;\n}", "layers.w = \"h.{layers}.x\";");
    assert_eq!(found, [("h.0.x".into(), vec![2]), ("h.1.x".into(), vec![2])]);
}

#[test]
fn a_dim_in_the_template_gives_one_tensor_per_index() {
    let found = check("param w: [b, a] = 0;", "w = \"e.{a}.x\";").unwrap();
    assert_eq!((found[1].name.as_str(), found[1].shape.as_slice(), found[1].parts[0].own), ("e.1.x", [3u64].as_slice(), 1));
    assert_eq!(found[1].parts[0].loops, [Loop { size: 3, own: 2, foreign: 1 }]);
}

#[test]
fn an_index_can_count_on_from_a_setting() {
    let params = "repeat layers {\nparam w: [a] = 0;\n}\nrepeat a as more {\nparam w: [b] = 0;\n}";
    let found = shapes(params, "layers.w = \"h.{layers}.x\";\nmore.w = \"h.{ layers+more }.x\";");
    let shape = |n: u64| if n < 2 { vec![2] } else { vec![3] };
    assert_eq!(found, (0..4).map(|n| (format!("h.{n}.x"), shape(n))).collect::<Vec<_>>());
    let found = shapes("param w: [b, a] = 0;", "w = \"e.{c + a}.x\";");
    assert_eq!(found, [("e.5.x".into(), vec![3]), ("e.6.x".into(), vec![3])]);
}

#[test]
fn further_templates_name_copies_one_for_each_iteration() {
    let line = "w = \"x\", \"y\", \"h.{layers + more}.x\";\nmore.v = \"h.{layers + more}.v\";";
    let found = check("param w: [a] = 0;\nrepeat b as more {\nparam v: [a] = 0;\n}", line).unwrap();
    assert_eq!((found[0].name.as_str(), found[0].copies.join(" ")), ("x", "y h.2.x h.3.x h.4.x".into()));
    // A configuration without the repeat has no copies of it.
    assert_eq!(check("param w: [a] = 0;", line).unwrap()[0].copies, ["y"]);
    let found = check("param w: [b, a] = 0;", "w = \"x.{a}\", \"y.{a}\";").unwrap();
    assert_eq!((found[1].name.as_str(), found[1].copies.join(" ")), ("x.1", "y.1".into()));
    let error = check("param w: [a] = 0;\nparam v: [a] = 0;", "w = \"x\", \"y\";\nv = \"y\";").unwrap_err();
    assert_eq!(error, "two lines name the tensor \"y\"");
}

#[test]
fn lines_of_other_configurations_are_skipped() {
    assert_eq!(shapes("param w: [a] = 0;", "w = \"x\";\nv.w = \"y\" [b];").len(), 1);
}

#[test]
fn lines_that_do_not_fit_are_errors() {
    let error = |params: &str, lines: &str| check(params, lines).unwrap_err();
    assert_eq!(error("param w: [a] = 0;\nparam v: [a] = 0;", "w = \"x\";"), "parameter `v` has no line in the `weights` section");
    assert_eq!(error("param w: [a] = 0;", "w = \"x\";\nw = \"y\";"), "parameter `w` has two lines");
    assert_eq!(error("param w: [a] = 0;\nparam v: [a] = 0;", "w = \"x\";\nv = \"x\";"), "two lines name the tensor \"x\"");
    assert_eq!(error("param w: [a, b] = 0;", "w = \"x\" [a*c];"), "the layout has [a, c], `w` has [a, b]");
    assert_eq!(error("param w: [a, b] = 0;", "w = \"x\" [a];"), "the layout has [a], `w` has [a, b]");
    assert_eq!(error("param w: [a] = 0;\nparam v: [a] = 0;", "w, v = \"x\";"), "2 parameters in one tensor, and no layout that says where each is");
    assert_eq!(error("param w: [a] = 0;\nparam v: [a] = 0;", "w, v = \"x\" [(a | a | a)];"), "3 alternatives for 2 parameters");
    assert_eq!(error("param w: [a] = 0;", "w = \"x.{c}\";"), "`{c}` is neither a repeat around `w` nor a dim of it");
    assert_eq!(error("param w: [a] = 0;", "w = \"x.{a\";"), "\"x.{a\" has an open brace");
    assert_eq!(error("param w: [a] = 0;", "w, v = \"x\" [(a | a)];"), "this configuration has no parameter `v`, but others of the line");
    let lacks = "counts on from `q`, which is no setting that is a whole number";
    assert_eq!(error("param w: [a] = 0;", "w = \"x.{q + a}\";"), format!("`{{q + a}}` {lacks}"));
    let repeated = "repeat layers {\nparam w: [a] = 0;\n}";
    assert_eq!(error(repeated, "layers.w = \"x\";"), "\"x\" is one tensor for all iterations of `layers`");
}

/// Sizes at which every element can be looked at; those that a model has.
const SMALL: [&str; 11] =
    ["vocab=4", "hidden=8", "ffn=8", "heads=2", "kv_heads=2", "head_dim=4", "layers=2", "encoder_layers=2", "decoder_layers=2", "seq=4", "mtp=2"];

fn small(text: &str) -> Model {
    let defines = SMALL.iter().filter_map(|d| d.split_once('=')).filter(|(name, _)| text.contains(&format!(" {name} = ")));
    let defines = defines.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
    let options = frontend::Options { defines, ..frontend::Options::default() };
    frontend::compile(&mut Sources::default(), "m.mdl", text, &options, &mut |_| Err("none".into())).unwrap().model
}

#[test]
fn the_sections_of_all_models_hold_every_element_once() {
    let mut models = 0;
    for entry in std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../models")).unwrap() {
        let text = std::fs::read_to_string(entry.unwrap().path()).unwrap_or_default();
        if !text.contains("weights hf") {
            continue;
        }
        models += 1;
        let model = small(&text);
        let elements = |p: &Param| model.graph.body.dims.elements(&p.ty.dims) as usize;
        let mut seen: Vec<Vec<bool>> = model.graph.params.iter().map(|p| vec![false; elements(p)]).collect();
        for tensor in foreign("hf", &model).unwrap() {
            let mut filled = vec![false; tensor.shape.iter().product::<u64>() as usize];
            for part in &tensor.parts {
                for mut i in 0..part.loops.iter().map(|l| l.size).product() {
                    let (mut own, mut foreign) = (part.own, part.foreign);
                    for l in part.loops.iter().rev() {
                        (own, foreign) = (own + i % l.size * l.own, foreign + i % l.size * l.foreign);
                        i /= l.size;
                    }
                    assert!(!std::mem::replace(&mut seen[part.param][own as usize], true), "{}", tensor.name);
                    assert!(!std::mem::replace(&mut filled[foreign as usize], true), "{}", tensor.name);
                }
            }
            assert!(filled.iter().all(|f| *f), "{}", tensor.name);
        }
        assert!(seen.iter().flatten().all(|s| *s), "{}", model.graph.name);
    }
    assert!(models >= 2, "the models were not found");
}
