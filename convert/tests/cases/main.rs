//! The reference cases: imported, exported, and computed by the reference interpreter.

mod bench;
mod dtypes;
mod faults;
mod first_step;
#[path = "../../../tests/cases/judge.rs"]
mod judge;

use bench::{Bench, CASES, Tensor, case, read, save};
use convert::ConvertError;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

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
         ffn = 4 * hidden, layers = 4, seq = 64, norm_eps = 1e-5, dropout_rate = 0.0, attention_dropout = 0.0, packed = false, separator = 0)"
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
fn copies_that_a_text_speaks_of_come_back_as_they_were() {
    let (embed, head) = ("model.layers.2.embed_tokens.weight", "model.layers.3.shared_head.head.weight");
    let bench = Bench::new("deepseek_mtp");
    bench.tensors(|list| list.retain(|t| t.0 != embed && t.0 != head));
    assert_eq!(bench.import().unwrap().skipped, Vec::<String>::new());
    bench.export().unwrap();
    bench.same("in/model.safetensors", "back/model.safetensors");
    let float = Some(convert::Float::F32);
    convert::export(&bench.path("out/weights.safetensors"), Some(&bench.path("out/model.mdl")), &[], float, &bench.path("f32")).unwrap();
    bench.same("in/model.safetensors", "f32/model.safetensors");
    let text = bench.path("out/model.mdl");
    convert::import_as(&bench.path("in"), &text, &[], &bench.path("own")).unwrap();
    assert!(read(&bench.path("out/weights.safetensors")) == read(&bench.path("own/weights.safetensors")));
    bench.same("out/dtypes.json", "own/dtypes.json");

    let differs = Bench::new("deepseek_mtp");
    differs.tensors(|list| list.iter_mut().find(|t| t.0 == head).unwrap().3[5] ^= 1);
    let error = differs.error();
    assert!(error.contains(&format!("`{head}` is not equal to `lm_head.weight`, of which the text says that it is a copy")), "{error}");
    assert!(error.contains("num_nextn_predict_layers = 0 in the config"), "{error}");
    // With this value in the config, the layers are skipped.
    let config = fs::read_to_string(differs.path("in/config.json")).unwrap();
    fs::write(differs.path("in/config.json"), config.replace("\"num_nextn_predict_layers\": 2", "\"num_nextn_predict_layers\": 0")).unwrap();
    let skipped = differs.import().unwrap().skipped;
    assert!(skipped.iter().any(|name| name == head) && skipped.iter().all(|name| name > &"model.layers.2.".to_owned()), "{skipped:?}");
    // A layer after all of these is skipped too.
    let more = Bench::new("deepseek_mtp");
    more.tensors(|list| list.push(("model.layers.4.enorm.weight".into(), safetensors::Dtype::F32, vec![32], vec![0; 128])));
    assert_eq!(more.import().unwrap().skipped, ["model.layers.4.enorm.weight"]);
}

/// As transformers saves a model whose config speaks of such layers.
#[test]
fn layers_that_predict_and_are_not_there_are_not_in_the_model() {
    let bench = Bench::new("deepseek_mtp");
    bench.tensors(|list| list.retain(|t| !t.0.starts_with("model.layers.2.") && !t.0.starts_with("model.layers.3.")));
    let warning = "num_nextn_predict_layers is not 0, and there are no such layers among the tensors: 0 is taken";
    assert_eq!(bench.import().unwrap().warnings, [warning]);
    bench.export().unwrap();
    bench.same("in/model.safetensors", "back/model.safetensors");
    let config = fs::read_to_string(bench.path("back/config.json")).unwrap();
    assert!(config.contains("\"num_nextn_predict_layers\": 0"), "{config}");
    // One of the two layers is missing.
    let half = Bench::new("deepseek_mtp");
    half.tensors(|list| list.retain(|t| !t.0.starts_with("model.layers.3.")));
    assert!(half.error().contains("`model.layers.3.enorm.weight` is missing, expected [32]"));
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
        // Each value goes to a sixth of the fields, and each field gets one or two; with `IMPORTS` (`make
        // test-long-forged`) each field gets all.
        let one_in = if std::env::var_os("IMPORTS").is_some() { 1 } else { 6 };
        for (k, field) in config.keys().enumerate() {
            for value in odd.into_iter().skip(k % one_in).step_by(one_in) {
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
    // Settings that the weights record take precedence over those of the text.
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
        convert::export(&bench.path("out/weights.safetensors"), Some(&bench.path("out/model.mdl")), &defines, None, &bench.path("back")).unwrap_err();
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

#[test]
fn weights_say_which_model_they_are_of() {
    for name in CASES {
        let bench = Bench::new(name);
        bench.import().unwrap();
        bench.export().unwrap();
        let weights = bench.path("out/weights.safetensors");
        convert::export(&weights, None, &[], None, &bench.path("alone")).unwrap_or_else(|e| panic!("{name}: {e}"));
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
        let error = convert::export(&weights, model, &[(name.into(), value.into())], None, &bench.path("back")).err().map(|e| e.to_string());
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
    convert::export(&bench.path("short/weights.safetensors"), Some(&bench.path("out/model.mdl")), &[], None, &bench.path("back")).unwrap();
    bench.same("in/config.json", "back/config.json");
}

#[test]
fn a_text_that_weights_do_not_fit_is_told_by_the_first_tensors_and_the_reason() {
    let (bench, other) = (Bench::new("gpt2"), Bench::new("llama"));
    bench.import().unwrap();
    other.import().unwrap();
    let error = convert::export(&bench.path("out/weights.safetensors"), Some(&other.path("out/model.mdl")), &[], None, &bench.path("back"))
        .unwrap_err()
        .to_string();
    assert!(error.lines().count() < 24 && error.contains(" more\n"), "{error}");
    assert!(error.ends_with("the file says that it is of a model `gpt2`, here it is `llama`"), "{error}");
}

#[test]
fn weights_of_another_program_need_a_text() {
    let bench = Bench::new("gpt2");
    let error = convert::export(&bench.path("in/model.safetensors"), None, &[], None, &bench.path("back")).unwrap_err().to_string();
    assert!(error.ends_with("name the text with --model, and its settings with -D"), "{error}");
}
