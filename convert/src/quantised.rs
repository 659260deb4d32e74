//! Checkpoints of fewer bits than their values have: FP8 with a scale per block, and MXFP4. They are computed to f32
//! as they are read.

use crate::ConvertError;
use crate::tensors::{Checkpoint, ElementCoding, Tensor};
use safetensors::Dtype;
use serde_json::Value;

/// The field of a config that says so.
pub const FIELD: &str = "quantization_config";

/// How a config says that tensors are coded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scheme {
    /// Matrices of E4M3, times an f32 for each block of so many rows and columns (`weight_scale_inv`).
    Fp8 { block: [u64; 2] },
    /// Experts of E2M1, 32 of which share a power of two (`_blocks`, `_scales`).
    Mxfp4,
}

impl Scheme {
    pub fn name(self) -> &'static str {
        match self {
            Scheme::Fp8 { .. } => "fp8",
            Scheme::Mxfp4 => "mxfp4",
        }
    }

    /// What a config's field says.
    ///
    /// # Errors
    /// It says another scheme, or something of it that is not known.
    pub fn read(value: &Value) -> Result<Scheme, String> {
        let only = || format!("{FIELD} = {value} is not supported, only quant_method \"fp8\" in e4m3 or \"mxfp4\"");
        let method = value.get("quant_method").and_then(Value::as_str).ok_or_else(only)?;
        // Fields about the rounding of activations are accepted: they concern inference only.
        let known: &[&str] = match method {
            "fp8" => &["quant_method", "fmt", "weight_block_size", "activation_scheme", "scale_fmt", "modules_to_not_convert", "dequantize"],
            "mxfp4" => &["quant_method", "modules_to_not_convert", "dequantize"],
            _ => return Err(only()),
        };
        if let Some((name, value)) = value.as_object().into_iter().flatten().find(|(name, _)| !known.contains(&name.as_str())) {
            return Err(format!("{FIELD}.{name} = {value} is not known"));
        }
        if method == "mxfp4" {
            return Ok(Scheme::Mxfp4);
        }
        if value.get("fmt").is_some_and(|fmt| fmt != "e4m3") {
            return Err(only());
        }
        let Some(size) = value.get("weight_block_size") else { return Ok(Scheme::Fp8 { block: [128, 128] }) };
        let sizes: Option<Vec<u64>> = size.as_array().and_then(|list| list.iter().map(|n| n.as_u64().filter(|n| *n >= 1)).collect());
        let block = sizes.and_then(|sizes| sizes.try_into().ok());
        block.map(|block| Scheme::Fp8 { block }).ok_or_else(|| format!("{FIELD}.weight_block_size = {size} is not two numbers from 1 on"))
    }
}

/// Has coded tensors stand for what they code, in the place of their pieces.
///
/// # Errors
/// Pieces that do not go together.
pub fn decode(checkpoint: &mut Checkpoint, scheme: Scheme) -> Result<(), ConvertError> {
    let scale_of = match scheme {
        Scheme::Fp8 { .. } => "_scale_inv",
        Scheme::Mxfp4 => "_scales",
    };
    let mut wrong = vec![];
    let scales: Vec<String> = checkpoint.tensors.keys().filter(|name| name.ends_with(scale_of)).cloned().collect();
    for name in scales {
        let stem = name.strip_suffix(scale_of).expect("invariant: the names were chosen by it");
        let (coded, wanted) = match scheme {
            Scheme::Fp8 { .. } => (stem.to_owned(), [Dtype::F8_E4M3, Dtype::F32]),
            Scheme::Mxfp4 => (format!("{stem}_blocks"), [Dtype::U8, Dtype::U8]),
        };
        let Some(tensor) = checkpoint.tensors.get(&coded) else {
            wrong.push(format!("`{name}` is there without `{coded}`"));
            continue;
        };
        let scale = &checkpoint.tensors[&name];
        let shapes = match (scheme, tensor.shape.as_slice()) {
            (Scheme::Fp8 { block: [a, b] }, &[rows, columns]) => Some((vec![rows.div_ceil(a), columns.div_ceil(b)], vec![rows, columns])),
            (Scheme::Mxfp4, &[experts, rows, groups, 16]) => Some((vec![experts, rows, groups], vec![experts, groups * 32, rows])),
            _ => None,
        };
        match shapes {
            Some((of_scale, shape)) if scale.shape == of_scale && [tensor.dtype, scale.dtype] == wanted => {
                let scale = Box::new(checkpoint.tensors.remove(&name).expect("invariant: it was looked at"));
                let tensor = checkpoint.tensors.remove(&coded).expect("invariant: it was looked at");
                let coding = ElementCoding::Scaled(scheme, scale);
                checkpoint.tensors.insert(stem.to_owned(), tensor.standing_for(shape, coding));
            }
            _ => {
                let shown = |t: &Tensor| format!("{:?} {:?}", t.dtype, t.shape);
                wrong.push(format!("`{coded}`, {}, and `{name}`, {}, are not {} with scales", shown(tensor), shown(scale), scheme.name()));
            }
        }
    }
    if wrong.is_empty() { Ok(()) } else { Err(ConvertError::Tensors { path: checkpoint.path.clone(), what: ir::provenance::few(&wrong) }) }
}

/// The f32 values of a coded tensor, row-major.
pub fn values(scheme: Scheme, shape: &[u64], codes: &[u8], scales: &[u8]) -> Vec<u8> {
    let sizes: Vec<usize> = shape.iter().map(|n| *n as usize).collect();
    match (scheme, sizes.as_slice()) {
        (Scheme::Fp8 { block }, &[_, columns]) => {
            let [high, wide] = block.map(|n| n as usize);
            let (scales, across) = (scales.as_chunks::<4>().0, ir::fault!("convert.fp8.last", columns / wide, columns.div_ceil(wide)));
            let scale = |row: usize, column: usize| f32::from_le_bytes(scales[row / high * across + column / wide]);
            let value = |(i, code): (usize, &u8)| (e4m3(*code) * scale(i / columns, i % columns)).to_le_bytes();
            codes.iter().enumerate().flat_map(value).collect()
        }
        (Scheme::Mxfp4, &[experts, columns, rows]) => {
            let mut out = Vec::with_capacity(experts * columns * rows * 4);
            for expert in 0..experts {
                for column in 0..columns {
                    for row in 0..rows {
                        let at = (expert * rows + row) * columns + column;
                        let code = codes[at / 2] >> (4 * ir::fault!("convert.mxfp4.half", 1 - at % 2, at % 2));
                        out.extend((e2m1(code & 15) * 2f32.powi(i32::from(scales[at / 32]) - 127)).to_le_bytes());
                    }
                }
            }
            out
        }
        _ => unreachable!("invariant: `decode` made this shape"),
    }
}

/// E4M3 without infinities: exponents from -6 to 8.
fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let size = match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa * 2f32.powi(-9),
        _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
    };
    if code & 128 == 0 { size } else { -size }
}

fn e2m1(code: u8) -> f32 {
    let size = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code & 7)];
    if code & 8 == 0 { size } else { -size }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn floats(bytes: &[u8]) -> Vec<f32> {
        bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }

    #[test]
    fn codes_of_fp8_are_the_types_values() {
        assert_eq!([0x38, 0x01, 0x08, 0x7e, 0xb8, 0x80].map(e4m3), [1.0, 2f32.powi(-9), 2f32.powi(-6), 448.0, -1.0, -0.0]);
        assert!(e4m3(0x7f).is_nan() && e4m3(0xff).is_nan());
        let finite = (0..=255).map(e4m3).filter(|x| x.is_finite()).map(f32::to_bits);
        assert_eq!(finite.collect::<std::collections::BTreeSet<_>>().len(), 254);
    }

    #[test]
    fn each_block_has_a_scale_of_its_own_and_the_last_ones_are_smaller() {
        let scales: Vec<u8> = [1f32, 10.0, 100.0, 1000.0].iter().flat_map(|x| x.to_le_bytes()).collect();
        let values = values(Scheme::Fp8 { block: [2, 2] }, &[3, 3], &[0x38; 9], &scales);
        assert_eq!(floats(&values), [1.0, 1.0, 10.0, 1.0, 1.0, 10.0, 100.0, 100.0, 1000.0]);
    }

    #[test]
    fn the_lower_half_of_a_byte_of_mxfp4_comes_first_and_rows_become_columns() {
        // Each of the two rows has one group. The first begins with 0.5 and 6 and has scale 2; the second begins with
        // -1 and has scale 1/2.
        let (mut codes, scales) = ([0u8; 32], [128, 126]);
        codes[0] = 0x71;
        codes[16] = 0x0a;
        let values = floats(&values(Scheme::Mxfp4, &[1, 32, 2], &codes, &scales));
        assert_eq!(values[..4], [1.0, -0.5, 12.0, 0.0]);
        assert!(values[4..].iter().all(|x| *x == 0.0));
    }

    /// Some values, their sum, that of their sizes, and their sum with each times its place.
    fn gist(values: &[f32], places: &[usize]) -> (Vec<f32>, [f64; 3]) {
        let sums = values.iter().enumerate().fold([0.0; 3], |[a, b, c], (i, x)| {
            let x = f64::from(*x);
            [a + x, b + x.abs(), c + i as f64 * x]
        });
        (places.iter().map(|i| values[*i]).collect(), sums)
    }

    /// As `torch.float8_e4m3fn` times each block's `weight_scale_inv`, with the block of published files, of which
    /// the last row and column of `kv_a_proj_with_mqa` and others have a part.
    #[test]
    fn blocks_of_128_that_do_not_go_round_are_what_pytorch_makes_of_them() {
        let codes: Vec<u8> = (0..200 * 300).map(|i| (i * 37 % 251) as u8).map(|c| if c & 127 == 127 { 0 } else { c }).collect();
        let scales: Vec<u8> = (1..=6).flat_map(|i| (i as f32 / 4.0).to_le_bytes()).collect();
        let values = floats(&values(Scheme::Fp8 { block: [128, 128] }, &[200, 300], &codes, &scales));
        let places = [(127, 127), (127, 128), (128, 127), (199, 255), (199, 256), (199, 299)].map(|(row, column)| row * 300 + column);
        let (some, [sum, sizes, placed]) = gist(&values, &places);
        assert_eq!(some, [0.0068359375, 0.34375, 3.5, -320.0, 0.234375, 360.0]);
        assert_eq!((sum, sizes), (267_691.175_292_968_75, 1_542_041.872_558_593_8));
        assert!((placed / 10_024_454_333.866_7 - 1.0).abs() < 1e-12, "{placed}");
    }

    /// As transformers' `convert_moe_packed_tensors`, with several groups in a row.
    #[test]
    fn groups_of_mxfp4_are_what_transformers_makes_of_them() {
        let codes: Vec<u8> = (0..2 * 40 * 3 * 16).map(|i| (i * 37 % 251) as u8).collect();
        let scales: Vec<u8> = (0..2 * 40 * 3).map(|i| (120 + i * 5 % 11) as u8).collect();
        let values = floats(&values(Scheme::Mxfp4, &[2, 96, 40], &codes, &scales));
        let places = [(0, 31, 39), (0, 32, 1), (1, 95, 39), (1, 63, 20), (1, 64, 20)].map(|(e, column, row)| (e * 96 + column) * 40 + row);
        let (some, sums) = gist(&values, &places);
        assert_eq!(some, [0.03125, -12.0, -4.0, 0.03125, 1.0]);
        assert_eq!(sums, [1_086.097_656_25, 24_852.214_843_75, 3_396_040.812_5]);
    }

    #[test]
    fn other_schemes_and_what_is_not_known_of_one_are_refused() {
        let read = |text: &str| Scheme::read(&serde_json::from_str(text).unwrap());
        assert_eq!(read(r#"{"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}"#), Ok(Scheme::Fp8 { block: [128, 128] }));
        assert_eq!(read(r#"{"quant_method": "fp8", "weight_block_size": [64, 32]}"#), Ok(Scheme::Fp8 { block: [64, 32] }));
        for bad in [r#"{"quant_method": "gptq"}"#, r#"{"bits": 4}"#, "3", r#"{"quant_method": "fp8", "fmt": "e5m2"}"#] {
            assert!(read(bad).unwrap_err().contains("is not supported, only"), "{bad}");
        }
        assert_eq!(read(r#"{"quant_method": "fp8", "x": 1}"#), Err("quantization_config.x = 1 is not known".into()));
        assert!(read(r#"{"quant_method": "fp8", "weight_block_size": [64]}"#).unwrap_err().ends_with("is not two numbers from 1 on"));
    }
}
