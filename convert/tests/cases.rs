//! The reference cases: imported, exported, and computed by the reference interpreter.

#[path = "../../tests/cases/judge.rs"]
mod judge;

use convert::{ConvertError, Imported};
use ir::dim::Base;
use ir::eval::{Env, eval};
use ir::graph::{Graph, Type, Value};
use ir::op::{Op, Scalar};
use safetensors::SafeTensors;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

fn case(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/cases").join(name)
}

/// All cases.
const CASES: [&str; 13] =
    ["gpt2", "llama", "llama31", "qwen2", "qwen3", "olmo2", "mistral", "mixtral", "qwen3_moe", "nemotron", "gemma2", "gemma3", "bert"];

/// A directory with a case's files, to be changed, and what is imported from it.
struct Bench {
    dir: tempfile::TempDir,
}

impl Bench {
    fn new(name: &str) -> Bench {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("in")).unwrap();
        for file in ["config.json", "model.safetensors"] {
            fs::copy(case(name).join(file), dir.path().join("in").join(file)).unwrap();
        }
        Bench { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn import(&self) -> Result<Imported, ConvertError> {
        convert::import(&self.path("in"), &self.path("out"))
    }

    fn error(&self) -> String {
        let error = self.import().unwrap_err().to_string();
        assert!(!self.path("out").exists(), "something was written");
        error
    }

    fn export(&self) -> Result<convert::Exported, ConvertError> {
        convert::export(&self.path("out/weights.safetensors"), Some(&self.path("out/model.mdl")), &[], &self.path("back"))
    }

    /// Replaces the tensors by what a function makes of their list of name, dtype, shape and bytes.
    fn tensors(&self, change: impl FnOnce(&mut Vec<Tensor>)) {
        let path = self.path("in/model.safetensors");
        let mut list = read(&path);
        change(&mut list);
        save(&path, &list);
    }

    /// Weights as another program would write them, which do not say which model they are of.
    fn anonymous(&self, name: &str) {
        let path = self.path(name);
        save(&path, &read(&path));
    }

    fn same(&self, a: &str, b: &str) {
        assert!(fs::read(self.path(a)).unwrap() == fs::read(self.path(b)).unwrap(), "{a} differs from {b}");
    }
}

type Tensor = (String, safetensors::Dtype, Vec<usize>, Vec<u8>);

fn read(path: &Path) -> Vec<Tensor> {
    let bytes = fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut list: Vec<Tensor> = file.iter().map(|(n, t)| (n.to_owned(), t.dtype(), t.shape().to_vec(), t.data().to_vec())).collect();
    list.sort_by(|a, b| a.0.cmp(&b.0));
    list
}

fn save(path: &Path, list: &[Tensor]) {
    let views = list.iter().map(|(n, d, s, b)| (n.as_str(), safetensors::tensor::TensorView::new(*d, s.clone(), b).unwrap()));
    fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

#[test]
fn what_was_imported_exports_to_the_same_files() {
    for name in CASES {
        let bench = Bench::new(name);
        let imported = bench.import().unwrap();
        assert_eq!(imported.warnings, Vec::<String>::new(), "{name}");
        bench.export().unwrap();
        bench.same("in/model.safetensors", "back/model.safetensors");
        bench.same("in/config.json", "back/config.json");
    }
}

#[test]
fn both_styles_of_config_give_the_same_model() {
    for name in ["gpt2", "llama"] {
        let (new, old) = (Bench::new(name), Bench::new(name));
        fs::copy(case(name).join("config.v4.json"), old.path("in/config.json")).unwrap();
        new.import().unwrap();
        old.import().unwrap();
        for file in ["out/model.mdl", "out/weights.safetensors"] {
            assert!(fs::read(new.path(file)).unwrap() == fs::read(old.path(file)).unwrap(), "{name}: {file}");
        }
    }
}

#[test]
fn weights_have_the_models_names_and_declared_dims() {
    let bench = Bench::new("llama");
    bench.import().unwrap();
    let list = read(&bench.path("out/weights.safetensors"));
    let shape = |name: &str| list.iter().find(|t| t.0 == name).map(|t| t.2.clone()).unwrap();
    assert_eq!(shape("layers.3.attn.q.w"), [128, 4, 2, 16]);
    assert_eq!(shape("layers.0.mlp.down.w"), [384, 128]);
    assert_eq!(shape("head"), [512, 128]);
}

#[test]
fn the_text_has_the_configs_values_as_defaults() {
    let bench = Bench::new("gpt2");
    bench.import().unwrap();
    let text = fs::read_to_string(bench.path("out/model.mdl")).unwrap();
    let head: String = text.split(" {").next().unwrap().split_whitespace().collect::<Vec<_>>().join(" ");
    assert_eq!(
        head,
        "// GPT-2: learned positions, pre-norm, tied output. model gpt2(batch, vocab = 512, hidden = 128, heads = 8, head_dim = hidden / heads, \
         ffn = 4 * hidden, layers = 4, seq = 64, norm_eps = 1e-5, dropout_rate = 0.0, packed = false, separator = 0)"
    );
    assert_eq!(frontend::format("model.mdl", &text).unwrap(), text);
}

#[test]
fn old_files_without_prefix_and_with_buffers_and_a_tied_copy_are_read() {
    let (plain, old) = (Bench::new("gpt2"), Bench::new("gpt2"));
    old.tensors(|list| {
        for tensor in list.iter_mut() {
            tensor.0 = tensor.0.trim_start_matches("transformer.").to_owned();
        }
        let wte = list.iter().find(|t| t.0 == "wte.weight").unwrap().clone();
        list.push(("lm_head.weight".into(), wte.1, wte.2, wte.3));
        list.push(("h.0.attn.bias".into(), safetensors::Dtype::U8, vec![1, 1, 2, 2], vec![1, 0, 1, 1]));
        list.push(("h.0.attn.masked_bias".into(), safetensors::Dtype::F32, vec![], vec![0; 4]));
    });
    plain.import().unwrap();
    assert_eq!(old.import().unwrap().skipped, ["h.0.attn.bias", "h.0.attn.masked_bias", "lm_head.weight"]);
    assert!(fs::read(plain.path("out/weights.safetensors")).unwrap() == fs::read(old.path("out/weights.safetensors")).unwrap());
}

#[test]
fn the_first_bert_files_are_read() {
    let (plain, old) = (Bench::new("bert"), Bench::new("bert"));
    old.tensors(|list| {
        for tensor in list.iter_mut() {
            tensor.0 = tensor.0.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta");
        }
        for (copy, source) in [("decoder.weight", "bert.embeddings.word_embeddings.weight"), ("decoder.bias", "cls.predictions.bias")] {
            let tensor = list.iter().find(|t| t.0 == source).unwrap().clone();
            list.push((format!("cls.predictions.{copy}"), tensor.1, tensor.2, tensor.3));
        }
        for (name, shape) in [("bert.pooler.dense.bias", vec![32]), ("cls.seq_relationship.weight", vec![2, 32])] {
            let bytes = vec![0; 4 * shape.iter().product::<usize>()];
            list.push((name.into(), safetensors::Dtype::F32, shape, bytes));
        }
    });
    plain.import().unwrap();
    let skipped = old.import().unwrap().skipped;
    assert_eq!(skipped, ["bert.pooler.dense.bias", "cls.seq_relationship.weight", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"]);
    assert!(fs::read(plain.path("out/weights.safetensors")).unwrap() == fs::read(old.path("out/weights.safetensors")).unwrap());
}

#[test]
fn tensors_are_imported_for_a_given_text_whatever_the_config_says() {
    let bench = Bench::new("llama");
    bench.import().unwrap();
    let config = fs::read_to_string(bench.path("in/config.json")).unwrap();
    fs::write(bench.path("in/config.json"), config.replace("LlamaForCausalLM", "OtherForCausalLM")).unwrap();
    let error = convert::import(&bench.path("in"), &bench.path("own")).unwrap_err().to_string();
    assert!(error.contains("OtherForCausalLM") && error.contains("help: `--model TEXT.mdl`"), "{error}");
    let own = convert::import_as(&bench.path("in"), &bench.path("out/model.mdl"), &[], &bench.path("own")).unwrap();
    assert_eq!(own.architecture, "llama");
    assert!(read(&bench.path("out/weights.safetensors")) == read(&bench.path("own/weights.safetensors")));
    let fewer = [("layers".to_owned(), "3".to_owned())];
    let error = convert::import_as(&bench.path("in"), &bench.path("out/model.mdl"), &fewer, &bench.path("fewer")).unwrap_err().to_string();
    assert!(error.contains("`model.layers.3.input_layernorm.weight` [128] is not a part of the model"), "{error}");
    assert!(!bench.path("fewer").exists());
}

#[test]
fn experts_that_share_a_tensor_are_refused_by_name() {
    let bench = Bench::new("mixtral");
    bench.tensors(|list| {
        let own = |t: &Tensor| t.0.starts_with("model.layers.1.block_sparse_moe.experts.");
        list.retain(|t| !own(t));
        let shape = vec![4, 40, 32];
        let bytes = vec![0; 4 * shape.iter().product::<usize>()];
        list.push(("model.layers.1.mlp.experts.gate_up_proj".into(), safetensors::Dtype::F32, shape, bytes));
    });
    let error = bench.error();
    assert!(error.contains("`model.layers.1.block_sparse_moe.experts.0.w1.weight` is missing, expected [20, 32]"), "{error}");
    assert!(error.contains("`model.layers.1.mlp.experts.gate_up_proj` [4, 40, 32] is not a part of the model"), "{error}");
}

#[test]
fn a_tied_copy_that_differs_is_refused() {
    let bench = Bench::new("gpt2");
    bench.tensors(|list| {
        let mut wte = list.iter().find(|t| t.0 == "transformer.wte.weight").unwrap().clone();
        wte.0 = "lm_head.weight".into();
        wte.3[5] ^= 1;
        list.push(wte);
    });
    assert!(bench.error().contains("`lm_head.weight` is not equal to `transformer.wte.weight`"));
}

#[test]
fn shards_are_read_as_one_file() {
    let (whole, sharded) = (Bench::new("llama"), Bench::new("llama"));
    let list = read(&sharded.path("in/model.safetensors"));
    fs::remove_file(sharded.path("in/model.safetensors")).unwrap();
    let mut map = BTreeMap::new();
    for (i, part) in list.chunks(20).enumerate() {
        let name = format!("model-{i:05}.safetensors");
        save(&sharded.path("in").join(&name), part);
        map.extend(part.iter().map(|t| (t.0.clone(), name.clone())));
    }
    let index = sharded.path("in/model.safetensors.index.json");
    fs::write(&index, serde_json::json!({"metadata": {}, "weight_map": map}).to_string()).unwrap();
    whole.import().unwrap();
    sharded.import().unwrap();
    sharded.export().unwrap();
    assert!(fs::read(whole.path("in/model.safetensors")).unwrap() == fs::read(sharded.path("back/model.safetensors")).unwrap());

    map.insert("model.norm.weight".into(), "../elsewhere.safetensors".into());
    fs::write(&index, serde_json::json!({"weight_map": map}).to_string()).unwrap();
    let error = sharded.import().unwrap_err().to_string();
    assert!(error.contains("does not name a file beside it for `model.norm.weight`"), "{error}");
}

#[test]
fn narrow_floats_are_widened_and_counted() {
    let bench = Bench::new("gpt2");
    let narrow = |b: &[u8]| half::bf16::from_f32(f32::from_le_bytes(b.try_into().unwrap()));
    bench.tensors(|list| {
        for tensor in list.iter_mut() {
            (tensor.1, tensor.3) = (safetensors::Dtype::BF16, tensor.3.chunks(4).flat_map(|b| narrow(b).to_le_bytes()).collect());
        }
    });
    assert_eq!(bench.import().unwrap().widened, [("bf16", 52)]);
    let exact: Vec<u8> = read(&case("gpt2").join("model.safetensors"))[1].3.chunks(4).flat_map(|b| narrow(b).to_f32().to_le_bytes()).collect();
    bench.export().unwrap();
    assert!(read(&bench.path("back/model.safetensors"))[1].3 == exact);
}

#[test]
fn tensors_that_do_not_fit_are_all_named_with_their_shapes() {
    let bench = Bench::new("gpt2");
    bench.tensors(|list| {
        list.retain(|t| t.0 != "transformer.ln_f.bias");
        list.iter_mut().find(|t| t.0 == "transformer.wpe.weight").unwrap().2 = vec![128, 64];
        list.push(("transformer.extra".into(), safetensors::Dtype::F32, vec![1], vec![0; 4]));
    });
    let error = bench.error();
    let lines: Vec<&str> = error.lines().skip(1).map(str::trim).collect();
    assert_eq!(
        lines,
        [
            "`transformer.ln_f.bias` is missing, expected [128]",
            "`transformer.wpe.weight` is [128, 64], expected [64, 128]",
            "`transformer.extra` [1] is not a part of the model",
        ]
    );
}

#[test]
fn sizes_that_do_not_go_together_are_errors_of_the_text() {
    let bench = Bench::new("gpt2");
    let config = fs::read_to_string(bench.path("in/config.json")).unwrap();
    fs::write(bench.path("in/config.json"), config.replace("\"n_head\": 8", "\"n_head\": 7")).unwrap();
    let Err(ConvertError::Text { diagnostics, sources }) = bench.import() else { panic!("it was imported") };
    let shown = frontend::render(&diagnostics[0], &sources, frontend::Style::Plain);
    assert!(shown.contains("E0301") && shown.contains("hidden / heads"), "{shown}");
    assert!(!bench.path("out").exists());
}

#[test]
fn no_value_of_a_field_makes_an_import_panic() {
    let odd = ["null", "-1", "3", "1e300", "9223372036854775807", "\"x\"", "[]", "{\"rope_type\": 3}", "true"];
    for name in CASES {
        let bench = Bench::new(name);
        // Without tensors the import ends once the model is known.
        fs::remove_file(bench.path("in/model.safetensors")).unwrap();
        let config: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(&fs::read(bench.path("in/config.json")).unwrap()).unwrap();
        for field in config.keys() {
            for value in odd {
                let mut changed = config.clone();
                changed.insert(field.clone(), serde_json::from_str(value).unwrap());
                fs::write(bench.path("in/config.json"), serde_json::to_vec(&changed).unwrap()).unwrap();
                assert!(!bench.error().is_empty());
            }
        }
    }
}

#[test]
fn files_that_are_missing_or_damaged_are_named() {
    let bench = Bench::new("gpt2");
    fs::write(bench.path("in/model.safetensors"), "no tensors").unwrap();
    assert!(bench.error().contains("model.safetensors` is not a safetensors file"));
    fs::remove_file(bench.path("in/model.safetensors")).unwrap();
    assert!(bench.error().contains("has neither model.safetensors nor model.safetensors.index.json"));
    fs::write(bench.path("in/config.json"), "[]").unwrap();
    assert!(bench.error().contains("config.json` is not a JSON object"));
}

#[test]
fn settings_changed_since_the_import_change_the_config() {
    let bench = Bench::new("gpt2");
    bench.import().unwrap();
    let text = fs::read_to_string(bench.path("out/model.mdl")).unwrap();
    fs::write(bench.path("out/model.mdl"), text.replace("norm_eps = 1e-5", "norm_eps = 1e-6")).unwrap();
    // What weights say of their settings counts, unless they say nothing.
    bench.export().unwrap();
    bench.same("in/config.json", "back/config.json");
    bench.anonymous("out/weights.safetensors");
    bench.export().unwrap();
    let config: serde_json::Value = serde_json::from_slice(&fs::read(bench.path("back/config.json")).unwrap()).unwrap();
    let mut original: serde_json::Value = serde_json::from_slice(&fs::read(bench.path("in/config.json")).unwrap()).unwrap();
    original["layer_norm_epsilon"] = 1e-6.into();
    assert_eq!(config, original);
}

#[test]
fn a_model_without_a_config_gets_one_that_imports_again() {
    for name in CASES {
        let bench = Bench::new(name);
        let imported = bench.import().unwrap();
        fs::remove_file(bench.path("out/config.json")).unwrap();
        bench.export().unwrap();
        let again = convert::import(&bench.path("back"), &bench.path("again")).unwrap();
        assert_eq!(again.warnings, Vec::<String>::new());
        assert_eq!((again.architecture, again.settings), (imported.architecture, imported.settings));
        assert!(read(&bench.path("out/weights.safetensors")) == read(&bench.path("again/weights.safetensors")), "{name}");
    }
}

#[test]
fn a_setting_that_the_architecture_lacks_is_refused() {
    let bench = Bench::new("llama");
    bench.import().unwrap();
    bench.anonymous("out/weights.safetensors");
    let defines = [("window".to_owned(), "16".to_owned())];
    let error =
        convert::export(&bench.path("out/weights.safetensors"), Some(&bench.path("out/model.mdl")), &defines, &bench.path("back")).unwrap_err();
    assert!(error.to_string().contains("LlamaForCausalLM computes window = 0, the model has 16"), "{error}");
    assert!(!bench.path("back").exists());
}

#[test]
fn weights_of_another_model_are_refused() {
    let bench = Bench::new("gpt2");
    bench.import().unwrap();
    fs::copy(bench.path("in/model.safetensors"), bench.path("out/weights.safetensors")).unwrap();
    let error = bench.export().unwrap_err().to_string();
    assert!(error.contains("`wte` is missing, expected [512, 128]"), "{error}");
    assert!(error.contains("`transformer.h.0.attn.c_attn.weight` [128, 384] is not a part of the model"), "{error}");
    assert!(error.contains("the file does not say which model it is of; here it is `gpt2` with vocab = 512"), "{error}");
    assert!(!bench.path("back").exists());
}

/// The weights and the first batch of a case.
struct Data<'a> {
    graph: &'a Graph,
    weights: BTreeMap<String, Vec<f64>>,
    inputs: BTreeMap<String, Vec<f64>>,
}

impl Env for Data<'_> {
    fn source(&mut self, op: &Op, ty: &Type) -> Vec<f64> {
        match op {
            Op::Param(p) => self.weights[&self.graph.params[*p as usize].name].clone(),
            Op::Input(i) => self.inputs[&self.graph.inputs[*i as usize].name].clone(),
            Op::State(..) => vec![0.0; self.graph.body.dims.elements(&ty.dims) as usize],
            Op::Table(t) => self.graph.tables[*t as usize].data.clone(),
            other => panic!("{other:?} in a logical graph"),
        }
    }

    fn scalar(&self, _: &Scalar) -> f64 {
        0.0
    }

    fn base(&self, _: &Base) -> u64 {
        0
    }
}

/// An array of a case for each step, batch and place.
struct Array {
    name: String,
    shape: Vec<usize>,
    data: Vec<f64>,
}

fn arrays(name: &str) -> Vec<Array> {
    let mut out = vec![];
    for input in ["tokens", "labels", "kinds"] {
        let Ok(bytes) = fs::read(case(name).join(format!("{input}.npy"))) else { continue };
        let file = npyz::NpyFile::new(&bytes[..]).unwrap();
        let shape = file.shape().iter().map(|n| *n as usize).collect();
        out.push(Array { name: input.into(), shape, data: file.into_vec::<i32>().unwrap().into_iter().map(f64::from).collect() });
    }
    out
}

/// The inputs of the first step; tokens without labels are their own targets, one place later.
fn inputs(arrays: &[Array]) -> BTreeMap<String, Vec<f64>> {
    let mut out = BTreeMap::new();
    for array in arrays {
        let [batch, width] = [array.shape[1], array.shape[2]];
        let rows = || array.data.chunks(width).take(batch);
        if arrays.len() == 1 {
            out.insert("tokens".into(), rows().flat_map(|r| &r[..width - 1]).copied().collect());
            out.insert("targets".into(), rows().flat_map(|r| &r[1..]).copied().collect());
        } else {
            out.insert(array.name.clone(), rows().flatten().copied().collect());
        }
    }
    out
}

/// What the reference interpreter computes for step 0 in f64.
struct Step {
    loss: f64,
    grad_norm: f64,
    /// L2 norm of each gradient, by the names of the checkpoint: gradients are exported as if they were weights.
    grad_norms: BTreeMap<String, f64>,
}

fn step(name: &str) -> Step {
    let bench = Bench::new(name);
    bench.import().unwrap();
    let text = fs::read_to_string(bench.path("out/model.mdl")).unwrap();
    let arrays = arrays(name);
    let inputs = inputs(&arrays);
    let batch = arrays[0].shape[1];
    let seq = inputs["tokens"].len() / batch;
    let options = frontend::Options { defines: vec![("seq".into(), seq.to_string())], batch: batch as u64, ..frontend::Options::default() };
    let mut sources = ir::diag::Sources::default();
    let model = frontend::compile(&mut sources, "model.mdl", &text, &options, &mut |_| Err("none".into())).unwrap().model;
    let graph = passes::graph::differentiate::differentiate(model.graph, &model.train).unwrap();
    let graph = passes::graph::optimize::optimize(graph, &model.train);
    let float = |b: &[u8]| f64::from(f32::from_le_bytes(b.try_into().unwrap()));
    let mut data = Data {
        graph: &graph,
        weights: read(&bench.path("out/weights.safetensors")).into_iter().map(|t| (t.0, t.3.chunks(4).map(float).collect())).collect(),
        inputs,
    };
    let (loss, norm) = (graph.loss.unwrap(), graph.grad_norm.unwrap());
    let needed = needed(&graph, &[loss, norm]);
    let mut values: Vec<Vec<f64>> = vec![];
    for v in graph.body.values() {
        let args: Vec<&[f64]> = graph.body[v].args.iter().map(|a| values[a.index()].as_slice()).collect();
        let value = if needed[v.index()] { eval(&graph.body, v, &args, &mut data) } else { vec![] };
        values.push(value);
    }
    let mut list = read(&bench.path("out/weights.safetensors"));
    for (param, v) in &graph.grads {
        let (param, dims) = (&graph.params[*param as usize], &graph.body[*v].ty.dims);
        assert_eq!(*dims, param.ty.dims, "{}", param.name);
        let tensor = list.iter_mut().find(|t| t.0 == param.name).unwrap();
        tensor.3 = values[v.index()].iter().flat_map(|x| (*x as f32).to_le_bytes()).collect();
    }
    save(&bench.path("out/weights.safetensors"), &list);
    bench.export().unwrap();
    let grad_norms = convert::norms(&bench.path("back/model.safetensors")).unwrap();
    Step { loss: values[loss.index()][0], grad_norm: values[norm.index()][0], grad_norms }
}

fn needed(graph: &Graph, roots: &[Value]) -> Vec<bool> {
    let mut needed = vec![false; graph.body.nodes.len()];
    let mut stack = roots.to_vec();
    while let Some(v) = stack.pop() {
        if !std::mem::replace(&mut needed[v.index()], true) {
            stack.extend(&graph.body[v].args);
        }
    }
    needed
}

fn expected(name: &str) -> serde_json::Value {
    serde_json::from_slice(&fs::read(case(name).join("expected.json")).unwrap()).unwrap()
}

fn agrees(name: &str) {
    let (step, expected) = (step(name), expected(name));
    let first = serde_json::json!({
        "losses": [expected["losses"][0]],
        "grad_norms": [expected["grad_norms"][0]],
        "param_norms": expected["grad_norms_by_param_step0"],
    });
    let run = judge::Run { losses: &[step.loss], grad_norms: &[step.grad_norm], param_norms: Some(&step.grad_norms) };
    assert_eq!(judge::judge(&run, &first), Vec::<String>::new(), "{name}");
}

#[test]
fn the_first_step_of_every_case_agrees() {
    for name in CASES {
        agrees(name);
    }
}

#[test]
fn the_norms_of_the_cases_weights_are_the_expected_ones() {
    for name in CASES {
        let norms = convert::norms(&case(name).join("model.safetensors")).unwrap();
        let first = serde_json::json!({"losses": [1.0], "grad_norms": [1.0], "param_norms": expected(name)["param_norms_init"]});
        let run = judge::Run { losses: &[1.0], grad_norms: &[1.0], param_norms: Some(&norms) };
        assert_eq!(judge::judge(&run, &first), Vec::<String>::new(), "{name}");
    }
}

#[test]
fn weights_say_which_model_they_are_of() {
    for name in CASES {
        let bench = Bench::new(name);
        bench.import().unwrap();
        bench.export().unwrap();
        let weights = bench.path("out/weights.safetensors");
        convert::export(&weights, None, &[], &bench.path("alone")).unwrap_or_else(|e| panic!("{name}: {e}"));
        bench.same("back/model.safetensors", "alone/model.safetensors");
        bench.same("back/config.json", "alone/config.json");
    }
}

#[test]
fn settings_that_contradict_the_weights_are_refused() {
    let bench = Bench::new("gpt2");
    bench.import().unwrap();
    let weights = bench.path("out/weights.safetensors");
    let export = |model: Option<&Path>, name: &str, value: &str| {
        let error = convert::export(&weights, model, &[(name.into(), value.into())], &bench.path("back")).err().map(|e| e.to_string());
        error.map(|e| e.replace(&bench.dir.path().display().to_string(), ""))
    };
    let text = bench.path("out/model.mdl");
    let refused =
        |given: &str| Some(format!("`/out/weights.safetensors` was saved with layers = 4, `-D layers={given}` says otherwise: leave it out"));
    assert_eq!(export(None, "layers", "3"), refused("3"));
    assert_eq!(export(Some(&text), "layers", "3"), refused("3"));
    assert_eq!(export(None, "layers", "4"), None);
    assert_eq!(export(None, "batch", "64"), None);
}

/// As when a model of long sequences was trained on short ones.
#[test]
fn a_given_text_keeps_its_length_of_sequences() {
    let bench = Bench::new("llama");
    bench.import().unwrap();
    let shorter = [("seq".to_owned(), "8".to_owned())];
    convert::import_as(&bench.path("in"), &bench.path("out/model.mdl"), &shorter, &bench.path("short")).unwrap();
    convert::export(&bench.path("short/weights.safetensors"), Some(&bench.path("out/model.mdl")), &[], &bench.path("back")).unwrap();
    bench.same("in/config.json", "back/config.json");
}

#[test]
fn a_text_that_weights_do_not_fit_is_told_by_the_first_tensors_and_the_reason() {
    let (bench, other) = (Bench::new("gpt2"), Bench::new("llama"));
    bench.import().unwrap();
    other.import().unwrap();
    let error = convert::export(&bench.path("out/weights.safetensors"), Some(&other.path("out/model.mdl")), &[], &bench.path("back"))
        .unwrap_err()
        .to_string();
    assert!(error.lines().count() < 24 && error.contains(" more\n"), "{error}");
    assert!(error.ends_with("the file says that it is of a model `gpt2`, here it is `llama`"), "{error}");
}

#[test]
fn weights_of_another_program_need_a_text() {
    let bench = Bench::new("gpt2");
    let error = convert::export(&bench.path("in/model.safetensors"), None, &[], &bench.path("back")).unwrap_err().to_string();
    assert!(error.ends_with("name the text with --model, and its settings with -D"), "{error}");
}
