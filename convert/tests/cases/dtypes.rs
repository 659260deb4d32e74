//! The types of tensors, there and back.

use crate::bench::{Bench, Tensor, case, read};
use convert::{Exported, Float};
use safetensors::Dtype;
use std::fs;

const FLOATS: [(&str, Dtype, &str); 2] = [("bf16", Dtype::BF16, "bfloat16"), ("f16", Dtype::F16, "float16")];

/// A tensor in another type, from f32.
fn narrow(tensor: &mut Tensor, dtype: Dtype) {
    let values = tensor.3.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b));
    tensor.3 = match dtype {
        Dtype::BF16 => values.flat_map(|x| half::bf16::from_f32(x).to_le_bytes()).collect(),
        _ => values.flat_map(|x| half::f16::from_f32(x).to_le_bytes()).collect(),
    };
    tensor.1 = dtype;
}

/// A case whose tensors are of this type, but for those whose name ends so; the config says it, in the style of
/// transformers 5.
fn narrowed(name: &str, (_, dtype, of_config): (&str, Dtype, &str), but: &str) -> Bench {
    let bench = Bench::new(name);
    bench.tensors(|list| list.iter_mut().filter(|t| !t.0.ends_with(but)).for_each(|t| narrow(t, dtype)));
    let config = fs::read_to_string(bench.path("in/config.json")).unwrap();
    fs::write(bench.path("in/config.json"), config.replace("\"float32\"", &format!("\"{of_config}\""))).unwrap();
    bench
}

fn export(bench: &Bench, dtype: Float) -> Result<Exported, convert::ConvertError> {
    convert::export(&bench.path("out/weights.safetensors"), Some(&bench.path("out/model.mdl")), &[], Some(dtype), &bench.path("other"))
}

fn json(bench: &Bench, name: &str) -> serde_json::Value {
    serde_json::from_slice(&fs::read(bench.path(name)).unwrap()).unwrap()
}

#[test]
pub fn tensors_come_back_in_the_type_that_they_had() {
    for name in ["gpt2", "llama31", "mixtral", "bert"] {
        for float in FLOATS {
            let bench = narrowed(name, float, "-");
            let count = read(&bench.path("in/model.safetensors")).len();
            assert_eq!(bench.import().unwrap().widened, [(float.0, count)], "{name}");
            let exported = bench.export().unwrap();
            assert_eq!((exported.dtype.name(), exported.rounded), (float.0, 0));
            bench.same("in/config.json", "back/config.json");
            bench.same("in/model.safetensors", "back/model.safetensors");
        }
    }
}

#[test]
fn tensors_of_several_types_come_back_each_in_its_own() {
    let bench = narrowed("mixtral", FLOATS[0], "gate.weight");
    bench.import().unwrap();
    let record = json(&bench, "out/dtypes.json");
    assert_eq!(record["dtype"], "bf16");
    assert_eq!(record["others"]["model.layers.1.block_sparse_moe.gate.weight"], "f32");
    bench.export().unwrap();
    bench.same("in/model.safetensors", "back/model.safetensors");
}

#[test]
fn a_type_that_is_given_is_that_of_all_tensors_and_of_the_config() {
    let bench = narrowed("gpt2", FLOATS[0], "ln_f.weight");
    bench.import().unwrap();
    assert_eq!(export(&bench, Float::F32).unwrap().rounded, 0);
    let exact: Vec<u8> = read(&bench.path("in/model.safetensors"))[1]
        .3
        .as_chunks::<2>()
        .0
        .iter()
        .flat_map(|b| half::bf16::from_le_bytes(*b).to_f32().to_le_bytes())
        .collect();
    let list = read(&bench.path("other/model.safetensors"));
    assert!(list.iter().all(|t| t.1 == Dtype::F32) && list[1].3 == exact);
    assert_eq!(json(&bench, "other/config.json")["dtype"], "float32");
}

#[test]
fn what_a_narrow_type_cannot_hold_is_rounded_to_nearest_and_counted() {
    let bench = Bench::new("llama31");
    bench.import().unwrap();
    let mut rounded = 0;
    let mut wanted = read(&case("llama31").join("model.safetensors"));
    for tensor in &mut wanted {
        let before = tensor.3.clone();
        narrow(tensor, Dtype::BF16);
        let same = |(wide, narrow): (&[u8; 4], &[u8; 2])| f32::from_le_bytes(*wide) == half::bf16::from_le_bytes(*narrow).to_f32();
        rounded += before.as_chunks::<4>().0.iter().zip(tensor.3.as_chunks::<2>().0).filter(|p| !same(*p)).count() as u64;
    }
    assert_eq!(export(&bench, Float::Bf16).unwrap().rounded, rounded);
    assert!(read(&bench.path("other/model.safetensors")) == wanted);
    assert_eq!(json(&bench, "other/config.json")["dtype"], "bfloat16");
}

#[test]
fn what_is_beyond_a_type_is_refused() {
    let bench = Bench::new("gpt2");
    bench.tensors(|list| list[0].3[..4].copy_from_slice(&1e5f32.to_le_bytes()));
    bench.import().unwrap();
    let error = export(&bench, Float::F16).unwrap_err().to_string();
    assert!(error.contains("has 1e5, which is beyond the range of f16"), "{error}");
    assert!(!bench.path("other").exists());
    export(&bench, Float::Bf16).unwrap();
}

/// The value of a code of E4M3, by its bits.
fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let size = if exponent == 0 { mantissa / 512.0 } else { (8.0 + mantissa) * 2f32.powi(exponent - 10) };
    if code < 128 { size } else { -size }
}

#[test]
pub fn fp8_with_scales_per_block_is_imported_as_what_it_stands_for_and_exported_as_bf16() {
    let bench = narrowed("deepseek_v3", FLOATS[0], "_correction_bias");
    let config = fs::read_to_string(bench.path("in/config.json")).unwrap();
    let coded = r#"{"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [8, 16]},"#;
    fs::write(bench.path("in/config.json"), config.replacen('{', coded, 1)).unwrap();
    let mut count = 0;
    bench.tensors(|list| {
        let mut scales = vec![];
        for (name, dtype, shape, bytes) in list.iter_mut().filter(|t| t.0.ends_with("_proj.weight")) {
            let elements = shape.iter().product::<usize>();
            *dtype = Dtype::F8_E4M3;
            *bytes = (0..elements).map(|i| (i * 37 % 251) as u8).map(|code| if code & 127 == 127 { 0 } else { code }).collect();
            let blocks = vec![shape[0].div_ceil(8), shape[1].div_ceil(16)];
            let values = (0..blocks[0] * blocks[1]).flat_map(|i| (0.01 + i as f32).to_le_bytes()).collect();
            scales.push((format!("{name}_scale_inv"), Dtype::F32, blocks, values));
        }
        count = scales.len();
        list.extend(scales);
        // This tensor is of a layer that predicts a further token.
        list.push(("model.layers.2.enorm.weight".into(), Dtype::BF16, vec![1], vec![0; 2]));
    });
    let imported = bench.import().unwrap();
    assert_eq!((imported.decoded, imported.skipped), (Some(("fp8", count)), vec!["model.layers.2.enorm.weight".to_owned()]));
    let weights = read(&bench.path("out/weights.safetensors"));
    let up = &weights.iter().find(|t| t.0 == "layers.0.mlp.up.w").unwrap().3;
    for (row, column) in [(0, 0), (7, 15), (8, 16), (47, 31)] {
        // The model's tensor is [hidden, ffn], the checkpoint's [ffn, hidden].
        let code = ((row * 32 + column) * 37 % 251) as u8;
        let value = if code & 127 == 127 { 0.0 } else { e4m3(code) } * (0.01 + (row / 8 * 2 + column / 16) as f32);
        assert_eq!(up[(column * 48 + row) * 4..][..4], value.to_le_bytes(), "{row} {column}");
    }
    assert!(json(&bench, "out/config.json").get("quantization_config").is_none());
    let exported = bench.export().unwrap();
    assert_eq!(exported.dtype, Float::Bf16);
    bench.same("out/config.json", "back/config.json");
    // Every element is compared, as the last block of a tensor may be partial.
    let back = read(&bench.path("back/model.safetensors"));
    for (name, _, shape, codes) in read(&bench.path("in/model.safetensors")).into_iter().filter(|t| t.1 == Dtype::F8_E4M3) {
        let found = &back.iter().find(|t| t.0 == name).unwrap().3;
        for (i, (code, bytes)) in codes.iter().zip(found.as_chunks::<2>().0).enumerate() {
            let block = i / shape[1] / 8 * shape[1].div_ceil(16) + i % shape[1] / 16;
            assert_eq!(half::bf16::from_le_bytes(*bytes), half::bf16::from_f32(e4m3(*code) * (0.01 + block as f32)), "{name} {i}");
        }
    }
    for (name, dtype, ..) in read(&bench.path("back/model.safetensors")) {
        assert_eq!(dtype, if name.ends_with("_correction_bias") { Dtype::F32 } else { Dtype::BF16 }, "{name}");
    }
}

#[test]
fn scales_that_do_not_go_with_their_codes_are_refused() {
    let bench = Bench::new("deepseek_v3");
    let config = fs::read_to_string(bench.path("in/config.json")).unwrap();
    fs::write(bench.path("in/config.json"), config.replacen('{', r#"{"quantization_config": {"quant_method": "fp8"},"#, 1)).unwrap();
    bench.tensors(|list| list.push(("model.layers.0.self_attn.o_proj.weight_scale_inv".into(), Dtype::F32, vec![1, 1], vec![0; 4])));
    let error = bench.error();
    let name = "model.layers.0.self_attn.o_proj.weight";
    assert!(error.contains(&format!("`{name}`, F32 [32, 48], and `{name}_scale_inv`, F32 [1, 1], are not fp8 with scales")), "{error}");
}

/// Codes of MXFP4 and their scales, [rows, columns], and the values that they stand for, [columns, rows].
fn mxfp4(rows: usize, columns: usize) -> (Vec<u8>, Vec<u8>, Vec<f32>) {
    const VALUES: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];
    let code = |row: usize, column: usize| (row * 7 + column * 5) % 16;
    let scales: Vec<u8> = (0..rows * columns / 32).map(|i| 120 + (i % 5) as u8).collect();
    let at = |i: usize| (i / columns, i % columns);
    let codes = (0..rows * columns / 2).map(|i| [2 * i, 2 * i + 1].map(at)).map(|[a, b]| (code(a.0, a.1) | code(b.0, b.1) << 4) as u8);
    let value = |column: usize, row: usize| VALUES[code(row, column)] * 2f32.powi(i32::from(scales[(row * columns + column) / 32]) - 127);
    let values = (0..columns).flat_map(|column| (0..rows).map(move |row| (column, row))).map(|(c, r)| value(c, r)).collect();
    (codes.collect(), scales.clone(), values)
}

#[test]
pub fn experts_in_mxfp4_are_imported_as_what_they_stand_for() {
    let (plain, coded) = (Bench::new("gpt_oss"), Bench::new("gpt_oss"));
    // The down projection is [experts, 20, 32], and 20 elements make no group of 32: only `gate_up_proj` is quantised
    // here.
    let experts = |name: &str| name.ends_with(".experts.gate_up_proj");
    let (codes, scales, values) = mxfp4(40, 32);
    let whole: Vec<u8> = (0..4).flat_map(|_| values.iter().flat_map(|x| x.to_le_bytes())).collect();
    plain.tensors(|list| list.iter_mut().filter(|t| experts(&t.0)).for_each(|t| t.3.clone_from(&whole)));
    coded.tensors(|list| {
        let names: Vec<String> = list.iter().map(|t| t.0.clone()).filter(|name| experts(name)).collect();
        list.retain(|t| !experts(&t.0));
        for name in names {
            list.push((format!("{name}_blocks"), Dtype::U8, vec![4, 40, 1, 16], codes.repeat(4)));
            list.push((format!("{name}_scales"), Dtype::U8, vec![4, 40, 1], scales.repeat(4)));
        }
    });
    let config = fs::read_to_string(coded.path("in/config.json")).unwrap();
    fs::write(coded.path("in/config.json"), config.replacen('{', r#"{"quantization_config": {"quant_method": "mxfp4"},"#, 1)).unwrap();
    plain.import().unwrap();
    assert_eq!(coded.import().unwrap().decoded, Some(("mxfp4", 2)));
    assert!(read(&plain.path("out/weights.safetensors")) == read(&coded.path("out/weights.safetensors")));
    assert_eq!(json(&coded, "out/dtypes.json")["others"]["model.layers.0.mlp.experts.gate_up_proj"], "bf16");
    // Values of mxfp4 have two significant bits, which bf16 holds exactly.
    assert_eq!(coded.export().unwrap().rounded, 0);
}
