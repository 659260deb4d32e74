//! What configs mean, and what is refused.

use super::*;

fn gpt2() -> Config {
    serde_json::from_str(include_str!("../../../tests/cases/gpt2/config.json")).unwrap()
}

fn llama(style: &str) -> Config {
    serde_json::from_str(match style {
        "4" => include_str!("../../../tests/cases/llama/config.v4.json"),
        _ => include_str!("../../../tests/cases/llama/config.json"),
    })
    .unwrap()
}

fn with(mut config: Config, field: &str, value: &str) -> Config {
    config.insert(field.into(), serde_json::from_str(value).unwrap());
    config
}

fn setting(reading: &Reading, name: &str) -> String {
    reading.settings.iter().find(|(n, _)| *n == name).map_or_else(|| "default".into(), |(_, v)| v.clone())
}

fn errors(config: &Config) -> String {
    read(config).err().unwrap_or_default().join("; ")
}

fn warnings(config: &Config) -> String {
    read(config).unwrap().warnings.join("; ")
}

#[test]
fn both_styles_give_the_same_settings() {
    assert_eq!(read(&llama("4")).unwrap().settings, read(&llama("5")).unwrap().settings);
    let old: Config = serde_json::from_str(include_str!("../../../tests/cases/gpt2/config.v4.json")).unwrap();
    assert_eq!(read(&old).unwrap().settings, read(&gpt2()).unwrap().settings);
}

#[test]
fn the_reference_cases_give_no_warning() {
    assert_eq!(warnings(&gpt2()) + &warnings(&llama("4")) + &warnings(&llama("5")), "");
}

#[test]
fn frequencies_that_gpt_oss_does_not_speak_of_are_no_plain_ones() {
    let mut config: Config = serde_json::from_str(include_str!("../../../tests/cases/gpt_oss/config.json")).unwrap();
    assert_eq!(errors(&config), "");
    for name in ["rope_parameters", "rope_scaling"] {
        config.remove(name);
    }
    assert!(errors(&config).contains("rope_parameters is missing"), "{}", errors(&config));
    assert_eq!(errors(&with(config, "rope_scaling", "null")), "");
}

#[test]
fn a_null_keeps_the_formula_of_the_text() {
    assert_eq!(setting(&read(&gpt2()).unwrap(), "ffn"), "default");
    assert_eq!(setting(&read(&with(gpt2(), "n_inner", "300")).unwrap(), "ffn"), "300");
}

#[test]
fn an_unknown_field_is_named_with_its_value() {
    assert!(warnings(&with(gpt2(), "residual_scale", "0.5")).starts_with("residual_scale = 0.5 is not known for GPT2LMHeadModel"));
}

#[test]
fn what_the_text_does_not_compute_is_refused_by_field_and_value() {
    assert_eq!(
        errors(&with(gpt2(), "activation_function", "\"relu\"")),
        "activation_function = \"relu\" is not supported, only \"gelu_new\" or \"gelu_pytorch_tanh\""
    );
    assert_eq!(errors(&with(llama("5"), "rope_interleaved", "true")), "rope_interleaved = true is not supported, only false or null");
    assert!(errors(&with(llama("4"), "quantization_config", "{\"bits\":4}")).starts_with("quantization_config = {\"bits\":4} is not"));
}

#[test]
fn all_errors_come_at_once() {
    let mut config = with(with(gpt2(), "n_head", "-1"), "scale_attn_weights", "false");
    config.remove("n_embd");
    assert_eq!(
        errors(&config),
        "n_embd is missing; n_head = -1 is not a whole number from 1 on; scale_attn_weights = false is not supported, only true"
    );
}

#[test]
fn another_architecture_is_named() {
    let error = errors(&with(gpt2(), "architectures", "[\"BloomForCausalLM\"]"));
    assert!(error.starts_with("architectures = [\"BloomForCausalLM\"] is none of those known: GPT2LMHeadModel, LlamaForCausalLM, "), "{error}");
}

#[test]
fn the_frequencies_of_llama_3_are_read_in_both_styles() {
    let scaling =
        r#"{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192"#;
    let four = with(with(llama("4"), "rope_theta", "500000.0"), "rope_scaling", &format!("{scaling}}}"));
    let five = with(llama("5"), "rope_parameters", &format!("{scaling}, \"rope_theta\": 5e5}}"));
    let (four, five) = (read(&four).unwrap(), read(&five).unwrap());
    assert_eq!(four.settings, five.settings);
    assert_eq!((setting(&four, "rope_theta"), setting(&four, "rope_factor")), ("500000.0".into(), "8.0".into()));
}

#[test]
fn other_scalings_of_frequencies_are_refused() {
    let error = errors(&with(llama("4"), "rope_scaling", r#"{"type": "dynamic", "factor": 4.0}"#));
    assert_eq!(error, "rope_scaling.rope_type = \"dynamic\" is not supported, only \"default\" or \"llama3\" or \"yarn\"");
}

fn case(name: &str) -> Config {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/cases").join(name).join("config.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

#[test]
fn a_window_that_is_missing_is_mistrals_own_and_null_is_none() {
    let window = |config: &Config| setting(&read(config).unwrap(), "window");
    assert_eq!(window(&case("mistral")), "7");
    assert_eq!(window(&with(case("mistral"), "sliding_window", "null")), "default");
    let mut config = case("mistral");
    config.remove("sliding_window");
    assert_eq!(window(&config), "4096");
}

#[test]
fn the_balance_of_experts_counts_where_the_config_returns_what_routers_say() {
    let balanced = |config: &Config| setting(&read(config).unwrap(), "balanced");
    assert_eq!(balanced(&case("mixtral")), "true");
    let mut config = case("mixtral");
    config.remove("output_router_logits");
    assert_eq!(balanced(&config), "false");
    let noisy = with(case("mixtral"), "router_jitter_noise", "0.01");
    assert!(warnings(&noisy).starts_with("router_jitter_noise = 0.01: "), "{}", warnings(&noisy));
}

#[test]
fn windows_of_some_layers_are_refused() {
    assert_eq!(errors(&with(case("qwen2"), "use_sliding_window", "true")), "use_sliding_window = true is not supported, only false");
    let mixed = with(case("qwen3"), "layer_types", r#"["full_attention","sliding_attention"]"#);
    assert!(errors(&mixed).ends_with("is not supported, only lists of \"full_attention\""), "{}", errors(&mixed));
}

#[test]
fn windows_of_all_but_every_nth_layer_are_a_number() {
    let gemma = |field: &str, value: &str| with(case("gemma2"), field, value);
    assert_eq!(setting(&read(&case("gemma2")).unwrap(), "full_every"), "2");
    let every = |list: &str| setting(&read(&with(gemma("layer_types", list), "num_hidden_layers", "3")).unwrap(), "full_every");
    assert_eq!(every("null"), "2");
    assert_eq!(every(r#"["sliding_attention","sliding_attention","full_attention"]"#), "3");
    assert_eq!(every(r#"["full_attention","full_attention","full_attention"]"#), "1");
    assert_eq!(every(r#"["sliding_attention","sliding_attention","sliding_attention"]"#), "4");
    for odd in [r#"["full_attention","sliding_attention"]"#, r#"["sliding_attention"]"#, "[]", r#""full_attention""#] {
        assert!(errors(&gemma("layer_types", odd)).contains("is not supported, only \"sliding_attention\" with every n-th layer"), "{odd}");
    }
}

#[test]
fn a_cap_that_is_null_is_none() {
    let mut config = with(case("gemma2"), "attn_logit_softcapping", "null");
    assert_eq!(setting(&read(&config).unwrap(), "score_cap"), "0.0");
    config.remove("attn_logit_softcapping");
    assert_eq!(setting(&read(&config).unwrap(), "score_cap"), "50.0");
    let family = read(&config).unwrap().family;
    let now = [("score_cap".to_owned(), "0.0".to_owned()), ("full_every".to_owned(), "1".to_owned()), ("layers".to_owned(), "2".to_owned())];
    let written = write(family, config, &[], &now);
    assert_eq!((&written["attn_logit_softcapping"], &written["layer_types"]), (&Value::Null, &layer_types::list(1, 2)));
}

#[test]
fn a_field_has_another_name_in_another_version() {
    let mut old = case("qwen3_moe");
    let count = old.remove("num_local_experts").unwrap();
    assert_eq!(errors(&old), "num_experts is missing");
    old.insert("num_experts".into(), count);
    assert_eq!(read(&old).unwrap().settings, read(&case("qwen3_moe")).unwrap().settings);
    let both = with(case("qwen3_moe"), "num_experts", "7");
    assert!(errors(&both).starts_with("num_local_experts = 8 contradicts num_experts = 7"), "{}", errors(&both));
    let now = [("experts".to_owned(), "16".to_owned())];
    for config in [old, case("qwen3_moe")] {
        let written = write(&crate::family::QWEN3_MOE, config.clone(), &[], &now);
        assert_eq!(written.len(), config.len());
        assert_eq!(setting(&read(&written).unwrap(), "experts"), "16");
    }
}

#[test]
fn layers_without_experts_are_refused() {
    assert_eq!(errors(&with(case("qwen3_moe"), "mlp_only_layers", "[0]")), "mlp_only_layers = [0] is not supported, only [] or null");
    assert_eq!(errors(&with(case("qwen3_moe"), "decoder_sparse_step", "2")), "decoder_sparse_step = 2 is not supported, only 1.0");
}

#[test]
fn layers_with_windows_have_a_theta_of_their_own_in_both_styles() {
    let five = case("gemma3");
    let scaling = r#"{"rope_type": "linear", "factor": 2.0}"#;
    let mut four = with(with(with(five.clone(), "rope_theta", "1000"), "rope_local_base_freq", "100"), "rope_scaling", scaling);
    four.remove("rope_parameters");
    four.remove("layer_types");
    four.insert("sliding_window_pattern".into(), 6.into());
    let settings = |config: &Config| read(config).unwrap().settings.into_iter().collect::<std::collections::BTreeMap<_, _>>();
    assert_eq!(settings(&four), settings(&five));
    assert_eq!((setting(&read(&four).unwrap(), "rope_factor"), setting(&read(&four).unwrap(), "local_theta")), ("2.0".into(), "100.0".into()));
    for name in ["rope_theta", "rope_local_base_freq", "rope_scaling"] {
        four.remove(name);
    }
    assert_eq!((setting(&read(&four).unwrap(), "rope_theta"), setting(&read(&four).unwrap(), "local_theta")), ("1000000.0".into(), "10000.0".into()));
}

#[test]
fn other_ways_to_turn_some_layers_are_refused() {
    let gemma = |value: &str| errors(&with(case("gemma3"), "rope_parameters", value));
    let local = r#"{"full_attention": {"rope_theta": 10.0}, "sliding_attention": {"rope_theta": 10.0, "rope_type": "linear", "factor": 2.0}}"#;
    assert!(gemma(local).contains("rope_parameters.sliding_attention.rope_type = \"linear\" is not supported"), "{}", gemma(local));
    let yarn = r#"{"full_attention": {"rope_theta": 10.0, "rope_type": "yarn"}, "sliding_attention": {"rope_theta": 10.0}}"#;
    assert_eq!(gemma(yarn), "rope_parameters.full_attention.rope_type = \"yarn\" is not supported, only \"default\" or \"linear\"");
    assert!(errors(&with(case("gemma3"), "attn_logit_softcapping", "50.0")).starts_with("attn_logit_softcapping = 50.0 is not supported"));
}

#[test]
fn the_architecture_implies_settings() {
    assert_eq!(setting(&read(&case("qwen2")).unwrap(), "qkv_bias"), "true");
    assert_eq!(setting(&read(&case("qwen3")).unwrap(), "qk_norm"), "true");
}

#[test]
fn the_share_of_a_head_that_turns_is_read_in_both_styles() {
    let five = case("nemotron");
    let mut four = with(with(case("nemotron"), "rope_theta", "10000.0"), "partial_rotary_factor", "0.5");
    four.remove("rope_parameters");
    assert_eq!(read(&four).unwrap().settings, read(&five).unwrap().settings);
    let both = with(five, "partial_rotary_factor", "0.25");
    assert_eq!(errors(&both), "rope_parameters.partial_rotary_factor = 0.5 contradicts partial_rotary_factor = 0.25");
    assert_eq!(errors(&with(llama("4"), "partial_rotary_factor", "0.5")), "partial_rotary_factor = 0.5 is not supported, only 1.0");
}

#[test]
fn a_scaling_that_the_text_lacks_is_refused() {
    let error = errors(&with(case("nemotron"), "rope_parameters", r#"{"rope_type": "llama3", "rope_theta": 1e4}"#));
    assert!(error.starts_with("rope_parameters.rope_type = \"llama3\" is not supported, only \"default\""), "{error}");
}

#[test]
fn dropout_is_a_setting_and_a_rate_of_its_own_a_warning() {
    assert_eq!(setting(&read(&with(gpt2(), "attn_pdrop", "0.1")).unwrap(), "attention_dropout"), "0.1");
    assert!(warnings(&with(gpt2(), "embd_pdrop", "0.2")).starts_with("embd_pdrop = 0.2 differs from resid_pdrop = 0.0"));
}

#[test]
fn a_config_made_from_settings_reads_back() {
    let now: Vec<(String, String)> = [
        ("vocab", "96"),
        ("hidden", "64"),
        ("heads", "4"),
        ("kv_heads", "2"),
        ("head_dim", "16"),
        ("ffn", "128"),
        ("layers", "2"),
        ("seq", "32"),
        ("norm_eps", "0.00001"),
        ("tied", "true"),
        ("rope_theta", "10000.0"),
        ("rope_factor", "2.0"),
        ("rope_low", "1.0"),
        ("rope_high", "4.0"),
        ("rope_original", "16"),
    ]
    .map(|(a, b)| (a.to_owned(), b.to_owned()))
    .to_vec();
    let config = write(&crate::family::LLAMA, fresh(&crate::family::LLAMA), &[], &now);
    let reading = read(&config).unwrap();
    assert_eq!(reading.warnings, Vec::<String>::new());
    for (name, value) in &now {
        assert!(same(&setting(&reading, name), value), "{name}: {} is not {value}", setting(&reading, name));
    }
}

#[test]
fn what_deepseek_asks_for_and_the_text_does_not_compute_is_refused() {
    let config = |field: &str, value: &str| with(case("deepseek_v3"), field, value);
    assert_eq!(errors(&config("num_key_value_heads", "2")), "num_key_value_heads = 2 is not supported, only what num_attention_heads is, 4");
    assert_eq!(errors(&config("scoring_func", "\"softmax\"")), "scoring_func = \"softmax\" is not supported, only \"sigmoid\"");
    assert_eq!(errors(&config("attention_bias", "true")), "attention_bias = true is not supported, only false");
    assert!(warnings(&config("swa_every", "2")).starts_with("swa_every = 2 is not known for DeepseekV3ForCausalLM"));
    assert_eq!(warnings(&config("auto_map", r#"{"AutoConfig": "configuration_deepseek.DeepseekV3Config"}"#)), "");
}

#[test]
fn queries_of_deepseek_may_come_from_the_stream_and_all_layers_may_have_experts() {
    let config = with(with(case("deepseek_v3"), "q_lora_rank", "null"), "first_k_dense_replace", "0");
    let reading = read(&config).unwrap();
    assert_eq!((setting(&reading, "q_rank"), setting(&reading, "first_dense")), ("0".into(), "0".into()));
    let now = [("q_rank".to_owned(), "0".to_owned()), ("first_dense".to_owned(), "0".to_owned()), ("heads".to_owned(), "8".to_owned())];
    let written = write(reading.family, case("deepseek_v3"), &[], &now);
    assert_eq!((&written["q_lora_rank"], &written["first_k_dense_replace"]), (&Value::Null, &Value::from(0)));
    assert_eq!((&written["num_key_value_heads"], &written["num_attention_heads"]), (&Value::from(8), &Value::from(8)));
}

#[test]
fn yarn_is_read_in_both_styles_with_what_it_implies() {
    let yarn = r#"{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16"#;
    let four = with(with(llama("4"), "rope_theta", "10000.0"), "rope_scaling", &format!("{yarn}}}"));
    let five = with(llama("5"), "rope_parameters", &format!("{yarn}, \"rope_theta\": 1e4}}"));
    let reading = read(&four).unwrap();
    assert_eq!(reading.settings, read(&five).unwrap().settings);
    let of = |name: &str| setting(&reading, name);
    assert_eq!((of("yarn"), of("rope_low"), of("rope_high"), of("yarn_truncate")), ("true".into(), "1.0".into(), "32.0".into(), "true".into()));
    assert_eq!(of("yarn_scale"), format!("{:?}", 0.1 * 4f64.ln() + 1.0));
    let more = |fields: &str| read(&with(llama("5"), "rope_parameters", &format!("{yarn}, \"rope_theta\": 1e4, {fields}}}"))).unwrap();
    assert_eq!(setting(&more(r#""mscale": 1.0, "mscale_all_dim": 1.0"#), "yarn_scale"), "1.0");
    assert_eq!(setting(&more(r#""attention_factor": 1.5, "mscale": 2.0, "mscale_all_dim": 1.0"#), "yarn_scale"), "1.5");
    assert_eq!(errors(&with(llama("4"), "rope_scaling", r#"{"type": "yarn"}"#)), "rope_scaling.factor is missing");
    let odd = r#"{"type": "yarn", "factor": 2.0, "truncate": 3}"#;
    assert_eq!(errors(&with(llama("4"), "rope_scaling", odd)), "rope_scaling.truncate = 3 is not true or false");
}

#[test]
fn yarn_is_written_and_reads_back() {
    for (name, fields) in [("llama", ""), ("deepseek_v3", r#", "mscale": 0.5, "mscale_all_dim": 2.0"#)] {
        let yarn = format!(r#"{{"rope_type": "yarn", "factor": 4.0, "beta_fast": 8.0, "truncate": false, "rope_theta": 1e4{fields}}}"#);
        let reading = read(&with(case(name), "rope_parameters", &yarn)).unwrap();
        let now: Vec<(String, String)> = reading.settings.iter().map(|(n, v)| ((*n).to_owned(), v.clone())).collect();
        let again = read(&write(reading.family, case(name), &[], &now)).unwrap();
        for (name, value) in now {
            assert!(same(&setting(&again, &name), &value), "{name}: {} is not {value}", setting(&again, &name));
        }
    }
}

#[test]
fn biases_of_llamas_attention_are_those_of_all_its_projections() {
    let reading = read(&with(with(llama("5"), "attention_bias", "true"), "mlp_bias", "true")).unwrap();
    assert_eq!(
        (setting(&reading, "o_bias"), setting(&reading, "qkv_bias"), setting(&reading, "mlp_bias")),
        ("true".into(), "default".into(), "true".into())
    );
}

#[test]
fn what_t5_feeds_forward_is_a_choice_of_two_settings() {
    let reading = |name: &str| read(&case(name)).unwrap();
    let of = |reading: &Reading| ["gated", "act", "tied"].map(|name| setting(reading, name));
    assert_eq!(of(&reading("t5")), ["true", "\"gelu_tanh\"", "false"]);
    assert_eq!(of(&reading("t5_relu")), ["false", "\"relu\"", "true"]);
    let silu = with(case("t5"), "feed_forward_proj", "\"gated-silu\"");
    assert_eq!(errors(&silu), "feed_forward_proj = \"gated-silu\" is not supported, only \"relu\" or \"gated-gelu\"");
    // For an untied embedding, transformers 4 writes `tie_word_embeddings` = false, 5 writes `scale_decoder_outputs`
    // = false.
    let mut four = with(case("t5"), "tie_word_embeddings", "false");
    four.remove("scale_decoder_outputs");
    assert_eq!(of(&read(&four).unwrap()), of(&reading("t5")));
    let now = [("gated".to_owned(), "false".to_owned()), ("act".to_owned(), "relu".to_owned()), ("tied".to_owned(), "true".to_owned())];
    let written = write(reading("t5").family, four, &[], &now);
    assert_eq!((&written["feed_forward_proj"], &written["tie_word_embeddings"]), (&Value::from("relu"), &Value::from(true)));
    assert!(warnings(&with(case("t5"), "dropout_rate", "0.1")).starts_with("dropout_rate = 0.1: mcc drops nothing"));
    assert!(errors(&with(case("t5"), "decoder_start_token_id", "1")).starts_with("decoder_start_token_id = 1 is not supported"));
}

#[test]
fn phi_3_has_a_share_of_each_head_that_turns_and_a_window() {
    assert_eq!(setting(&read(&case("phi3")).unwrap(), "rotary_factor"), "0.5");
    assert_eq!(setting(&read(&with(case("phi3"), "sliding_window", "null")).unwrap(), "window"), "default");
    let error = errors(&with(case("phi3"), "rope_parameters", r#"{"rope_type": "llama3", "rope_theta": 1e4}"#));
    assert_eq!(error, "rope_parameters.rope_type = \"llama3\" is not supported, only \"default\" or \"longrope\"");
}

#[test]
fn longrope_is_read_in_both_styles_with_what_it_implies() {
    let five = case("phi3_long");
    let mut four = five.clone();
    four.remove("rope_parameters");
    for (field, value) in [
        ("rope_theta", "100.0"),
        ("partial_rotary_factor", "0.75"),
        ("rope_scaling", r#"{"type": "su", "short_factor": [1, 1.25, 1.5], "long_factor": [1.5, 3, 6.0]}"#),
    ] {
        four = with(four, field, value);
    }
    let (read_five, read_four) = (read(&five).unwrap(), read(&four).unwrap());
    assert_eq!(read_five.settings, read_four.settings);
    assert_eq!(read_four.warnings, Vec::<String>::new());
    let of = |config: &Config, name: &str| setting(&read(config).unwrap(), name);
    assert_eq!((of(&five, "short_factors"), of(&five, "rope_original")), ("[1.0, 1.25, 1.5]".into(), "16".into()));
    // The scale follows from the ratio of the two lengths, 64 and 16.
    assert_eq!(of(&five, "long_scale"), format!("{:?}", 1.5f64.sqrt()));
    assert_eq!(of(&with(five.clone(), "max_position_embeddings", "16"), "long_scale"), "1.0");
    let scaled = |more: &str| {
        let group = format!(r#"{{"type": "longrope", "short_factor": [1, 1, 1], "long_factor": [1, 2, 3], {more}}}"#);
        with(four.clone(), "rope_scaling", &group)
    };
    assert_eq!(of(&scaled(r#""factor": 1.0"#), "long_scale"), "1.0");
    assert_eq!(of(&scaled(r#""attention_factor": 1.25"#), "long_scale"), "1.25");
    assert_eq!(of(&with(four.clone(), "original_max_position_embeddings", "null"), "rope_original"), "4096");
    assert_eq!(
        errors(&scaled(r#""original_max_position_embeddings": 32"#)),
        "rope_scaling.original_max_position_embeddings = 32 contradicts original_max_position_embeddings = 16, which counts"
    );
    let wrong = r#"{"type": "longrope", "short_factor": [1, 2], "long_factor": [1, 2, 3]}"#;
    assert_eq!(errors(&with(four.clone(), "rope_scaling", wrong)), "rope_scaling has 2 numbers in short_factor and 3 in long_factor");
    let wrong = r#"{"type": "longrope", "short_factor": [1, 0]}"#;
    assert_eq!(
        errors(&with(four, "rope_scaling", wrong)),
        "rope_scaling.short_factor = [1,0] is not a list of numbers above 0; rope_scaling.long_factor is missing"
    );
}

#[test]
fn longrope_is_written_and_reads_back() {
    let reading = read(&case("phi3_long")).unwrap();
    let then: Vec<(String, String)> = reading.settings.iter().map(|(n, v)| ((*n).to_owned(), v.clone())).collect();
    let now: Vec<_> = then.iter().map(|(n, v)| (n.clone(), if n == "short_factors" { "[1.0, 1.0, 2.0]".into() } else { v.clone() })).collect();
    let written = write(reading.family, case("phi3_long"), &then, &now);
    assert_eq!(written["rope_scaling"]["short_factor"], serde_json::json!([1.0, 1.0, 2.0]));
    let again = read(&written).unwrap();
    assert_eq!(again.warnings, Vec::<String>::new());
    for (name, value) in &now {
        assert!(same(&setting(&again, name), value), "{name}: {} is not {value}", setting(&again, name));
    }
    assert!(same("[1, 2.0]", "[1.0,2]") && !same("[1.0]", "[2.0]") && !same("[1.0]", "1.0"));
}

#[test]
fn gpt_oss_has_windows_in_all_but_every_nth_layer_and_a_limit() {
    let reading = read(&case("gpt_oss")).unwrap();
    let of = |name: &str| setting(&reading, name);
    assert_eq!((of("full_every"), of("limit"), of("rope_factor"), of("yarn_truncate")), ("2".into(), "0.5".into(), "4.0".into(), "false".into()));
    assert_eq!(errors(&with(case("gpt_oss"), "attention_bias", "false")), "attention_bias = false is not supported, only true");
    assert!(errors(&with(case("gpt_oss"), "output_router_logits", "true")).starts_with("output_router_logits = true is not supported"));
}
