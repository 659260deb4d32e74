//! The types of the tensors that an import has read, kept beside the text, so that an export has them again.

use crate::ConvertError;
use safetensors::Dtype;
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The file of an import that says of which type the tensors were.
pub const DTYPES: &str = "dtypes.json";

/// A type that tensors are exported in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Float {
    /// IEEE 754 single precision.
    F32,
    /// bfloat16: the upper 16 bits of f32, rounded.
    Bf16,
    /// IEEE 754 half precision.
    F16,
}

/// What is lost when f32 becomes narrower.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RoundingLosses {
    /// Number of values that were rounded, to nearest and half to even.
    pub rounded: u64,
    /// A finite value that is beyond the range of the type.
    pub beyond: Option<f32>,
}

impl Float {
    /// In the order in which an export writes their tensors.
    pub const ALL: [Float; 3] = [Float::F32, Float::Bf16, Float::F16];

    /// As messages and `dtypes.json` write it: `f32`, `bf16` or `f16`.
    pub fn name(self) -> &'static str {
        match self {
            Float::F32 => "f32",
            Float::Bf16 => "bf16",
            Float::F16 => "f16",
        }
    }

    /// The name in a config: `float32`, `bfloat16` or `float16`.
    pub fn of_config(self) -> &'static str {
        match self {
            Float::F32 => "float32",
            Float::Bf16 => "bfloat16",
            Float::F16 => "float16",
        }
    }

    /// The type by which a safetensors header says it.
    pub fn stored(self) -> Dtype {
        match self {
            Float::F32 => Dtype::F32,
            Float::Bf16 => Dtype::BF16,
            Float::F16 => Dtype::F16,
        }
    }

    /// Bytes of an element.
    pub fn size(self) -> usize {
        match self {
            Float::F32 => 4,
            Float::Bf16 | Float::F16 => 2,
        }
    }

    /// The bytes of f32 values in this type.
    pub fn narrow(self, wide: &[u8], losses: &mut RoundingLosses) -> Vec<u8> {
        match self {
            Float::F32 => wide.to_vec(),
            Float::Bf16 => narrow(wide, losses, |x| (half::bf16::from_f32(x).to_le_bytes(), half::bf16::from_f32(x).to_f32())),
            Float::F16 => narrow(wide, losses, |x| (half::f16::from_f32(x).to_le_bytes(), half::f16::from_f32(x).to_f32())),
        }
    }

    fn by_name(name: &str) -> Option<Float> {
        Float::ALL.into_iter().find(|d| d.name() == name)
    }
}

/// `round` gives the bytes of a value and what they stand for.
fn narrow(wide: &[u8], losses: &mut RoundingLosses, round: impl Fn(f32) -> ([u8; 2], f32)) -> Vec<u8> {
    let mut out = Vec::with_capacity(wide.len() / 2);
    for bytes in wide.as_chunks::<4>().0 {
        let value = f32::from_le_bytes(*bytes);
        let (narrow, back) = round(value);
        losses.rounded += u64::from(back != value && !value.is_nan());
        if value.is_finite() && !back.is_finite() {
            losses.beyond = Some(value);
        }
        out.extend(narrow);
    }
    out
}

/// The type of most tensors, and of each other one by its name; which copies there were not.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    pub usual: Float,
    others: BTreeMap<String, Float>,
    /// Copies of tensors that the text speaks of and the checkpoint did not have.
    absent: BTreeSet<String>,
}

impl Record {
    /// The record of these tensors' types, and of copies that the checkpoint did not have.
    pub fn new(tensors: &[(String, Float)], absent: &[String]) -> Record {
        let count = |dtype: Float| tensors.iter().filter(|t| t.1 == dtype).count();
        let usual = Float::ALL.into_iter().rev().max_by_key(|d| count(*d)).unwrap_or(Float::F32);
        Record { usual, others: tensors.iter().filter(|t| t.1 != usual).cloned().collect(), absent: absent.iter().cloned().collect() }
    }

    /// Whether a copy was not there.
    pub fn lacks(&self, copy: &str) -> bool {
        self.absent.contains(copy)
    }

    pub fn of(&self, tensor: &str) -> Float {
        self.others.get(tensor).copied().unwrap_or(self.usual)
    }

    /// The text of the file.
    pub fn text(&self) -> String {
        let others: Map<String, Value> = self.others.iter().map(|(name, dtype)| (name.clone(), dtype.name().into())).collect();
        let mut record = Map::from_iter([("dtype".to_owned(), self.usual.name().into()), ("others".to_owned(), others.into())]);
        if !self.absent.is_empty() {
            record.insert("absent".into(), self.absent.iter().cloned().collect());
        }
        format!("{:#}\n", Value::from(record))
    }

    /// The file of an import; none if there is none.
    ///
    /// # Errors
    /// It cannot be read, or is not what an import writes.
    pub fn read(path: &Path) -> Result<Option<Record>, ConvertError> {
        if !path.exists() {
            return Ok(None);
        }
        let bytes = std::fs::read(path).map_err(ConvertError::io(path))?;
        let parsed = serde_json::from_slice::<Value>(&bytes).ok().and_then(|value| {
            let usual = Float::by_name(value.get("dtype")?.as_str()?)?;
            let others = value.get("others")?.as_object()?.iter().map(|(name, d)| Some((name.clone(), Float::by_name(d.as_str()?)?)));
            let absent = match value.get("absent") {
                Some(names) => names.as_array()?.iter().map(|name| Some(name.as_str()?.to_owned())).collect::<Option<_>>()?,
                None => BTreeSet::new(),
            };
            Some(Record { usual, others: others.collect::<Option<_>>()?, absent })
        });
        let malformed =
            || ConvertError::Malformed { path: path.into(), what: "does not say dtypes as an import does: --dtype takes its place".into() };
        parsed.map(Some).ok_or_else(malformed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_rounded_to_nearest_and_half_to_even_and_counted() {
        let ulp = 2f32.powi(-7);
        let values = [1.0, 1.0 + ulp / 2.0, 1.0 + ulp * 1.5, 1.0 + ulp * 0.75, -0.0, f32::NAN];
        let wide: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let mut losses = RoundingLosses::default();
        let bytes = Float::Bf16.narrow(&wide, &mut losses);
        let back: Vec<f32> = bytes.as_chunks::<2>().0.iter().map(|b| half::bf16::from_le_bytes(*b).to_f32()).collect();
        assert_eq!(back[..4], [1.0, 1.0, 1.0 + 2.0 * ulp, 1.0 + ulp]);
        assert!(back[4].is_sign_negative() && back[5].is_nan());
        assert_eq!(losses, RoundingLosses { rounded: 3, beyond: None });
    }

    #[test]
    fn values_beyond_the_range_are_known() {
        let mut losses = RoundingLosses::default();
        Float::F16.narrow(&70000f32.to_le_bytes(), &mut losses);
        assert_eq!(losses.beyond, Some(70000.0));
    }

    #[test]
    fn a_record_reads_back() {
        let tensors = [("a".to_owned(), Float::Bf16), ("b".to_owned(), Float::F32), ("c".to_owned(), Float::Bf16)];
        let record = Record::new(&tensors, &["d".to_owned()]);
        assert!(record.lacks("d") && !record.lacks("a"));
        assert_eq!((record.usual, record.of("b"), record.of("c")), (Float::Bf16, Float::F32, Float::Bf16));
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(DTYPES);
        assert_eq!(Record::read(&path).unwrap(), None);
        std::fs::write(&path, record.text()).unwrap();
        assert_eq!(Record::read(&path).unwrap(), Some(record));
        for bad in [
            "",
            "{}",
            r#"{"dtype": "f8", "others": {}}"#,
            r#"{"dtype": "f32", "others": {"a": 1}}"#,
            r#"{"dtype": "f32", "others": {}, "absent": [1]}"#,
        ] {
            std::fs::write(&path, bad).unwrap();
            assert!(Record::read(&path).is_err(), "{bad}");
        }
    }
}
