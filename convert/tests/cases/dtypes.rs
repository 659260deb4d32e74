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

/// A case whose tensors are of this type, but for those whose name ends so; the config says it, in the style of transformers 5.
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
fn tensors_come_back_in_the_type_that_they_had() {
    for name in ["gpt2", "llama31", "mixtral", "bert"] {
        for float in FLOATS {
            let bench = narrowed(name, float, "-");
            let count = read(&bench.path("in/model.safetensors")).len();
            assert_eq!(bench.import().unwrap().widened, [(float.0, count)], "{name}");
            let exported = bench.export().unwrap();
            assert_eq!((exported.dtype.name(), exported.rounded), (float.0, 0));
            bench.same("in/config.json", "back/config.json");
            assert!(read(&bench.path("in/model.safetensors")) == read(&bench.path("back/model.safetensors")), "{name}");
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
    assert!(read(&bench.path("in/model.safetensors")) == read(&bench.path("back/model.safetensors")));
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
