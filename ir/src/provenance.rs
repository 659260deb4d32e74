//! What weights say of the model that they belong to, so that they can be read without a model text beside them.

use crate::diag::Source;
use crate::program::Job;
use serde::{Deserialize, Serialize};

/// The key in the metadata of a safetensors file under which all that mcc says of it stands, [`seal`]ed. It is the only one, as a file with several would have
/// them in any order.
pub const KEY: &str = "mcc";

/// Settings that say of how many sequences a step is.
const SIZES: [&str; 2] = ["batch", "micro_batch"];

/// The most differences that a message names.
const FEW: usize = 5;

/// The model of which a file holds weights.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Provenance {
    /// The version of mcc that wrote it.
    pub version: String,
    /// As its text declares it: `gpt2`.
    pub model: String,
    /// Every setting with its value, as `-D` takes it, but for sizes of batches, on which weights do not depend.
    pub settings: Vec<(String, String)>,
    /// The model text, then what it imports, by paths relative to it. The standard library is mcc's own.
    pub texts: Vec<Source>,
}

impl Provenance {
    /// Of a model by this name, from its texts, which may have the standard library's without their content. Where the model's text was is left out.
    pub fn new(model: &str, settings: &[(String, String)], texts: &[Source]) -> Provenance {
        let mut texts: Vec<Source> = texts.iter().filter(|s| !s.text.is_empty()).cloned().collect();
        if let Some(main) = texts.first_mut() {
            main.name = main.name.rsplit('/').next().unwrap_or_default().to_owned();
        }
        let settings = settings.iter().filter(|s| !SIZES.contains(&s.0.as_str())).cloned().collect();
        Provenance { version: env!("CARGO_PKG_VERSION").into(), model: model.into(), settings, texts }
    }

    /// Of the model that a job is of.
    pub fn of(job: &Job) -> Provenance {
        Provenance::new(&job.model, &job.settings, &job.sources)
    }

    /// What differs from a model with these settings: `layers = 2 (here 4)`; empty if nothing does.
    pub fn differences(&self, settings: &[(String, String)]) -> Vec<String> {
        let value = |list: &[(String, String)], name: &str| list.iter().find(|s| s.0 == name).map(|s| s.1.clone());
        let differs = |(name, theirs): &(String, String)| match value(settings, name) {
            Some(ours) if ours == *theirs => None,
            Some(ours) => Some(format!("{name} = {theirs} (here {ours})")),
            None => Some(format!("{name} = {theirs} (here none)")),
        };
        self.settings.iter().filter_map(differs).collect()
    }
}

/// What is said of a file, in JSON, behind the BLAKE3 hash of that and of the file's tensors, each as a text with its name, type, shape and place: damage to a
/// header shows. The hash is not one of the tensors' elements.
pub fn seal(json: &str, tensors: Vec<String>) -> String {
    format!("{} {json}", hash(json, tensors))
}

/// The JSON of what [`seal`] has made.
///
/// # Errors
/// It is no such text, or one of other tensors.
pub fn open(sealed: &str, tensors: Vec<String>) -> Result<&str, String> {
    let (found, json) = sealed.split_once(' ').ok_or("its header has no hash")?;
    if found == hash(json, tensors) { Ok(json) } else { Err("its header is not as it was written: the hash differs".into()) }
}

fn hash(json: &str, mut tensors: Vec<String>) -> String {
    tensors.sort_unstable();
    let mut hasher = blake3::Hasher::new();
    for text in [json].into_iter().chain(tensors.iter().map(String::as_str)) {
        hasher.update(&(text.len() as u64).to_le_bytes()).update(text.as_bytes());
    }
    hasher.finalize().to_hex().to_string()
}

/// The likely reason why weights do not fit a model by this name with these settings, as lines of a message.
pub fn likely(theirs: Option<&Provenance>, model: &str, settings: &[(String, String)]) -> Vec<String> {
    let Some(theirs) = theirs else {
        let own: Vec<String> = settings.iter().filter(|s| !SIZES.contains(&s.0.as_str())).map(|(name, value)| format!("{name} = {value}")).collect();
        return vec![format!("the file does not say which model it is of; here it is `{model}` with {}", few(&own).join(", "))];
    };
    if theirs.model != model {
        return vec![format!("the file says that it is of a model `{}`, here it is `{model}`", theirs.model)];
    }
    match theirs.differences(settings) {
        differences if differences.is_empty() => {
            vec![format!("the file says that it is of `{model}` with the same settings: the model text has changed since")]
        }
        differences => vec![format!("the file says that it is of `{model}` with other settings: {}", few(&differences).join(", "))],
    }
}

/// The first of a list, and how many more there are.
pub fn few(list: &[String]) -> Vec<String> {
    let more = list.len().saturating_sub(FEW);
    let mut out: Vec<String> = list.iter().take(FEW).cloned().collect();
    if more > 0 {
        out.push(format!("and {more} more"));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(list: &[(&str, &str)]) -> Vec<(String, String)> {
        list.iter().map(|(n, v)| (n.to_string(), v.to_string())).collect()
    }

    #[test]
    fn the_likely_reason_names_what_differs() {
        let theirs = Provenance::new("gpt2", &settings(&[("batch", "8"), ("layers", "2"), ("hidden", "64")]), &[]);
        let cases = [
            (Some(&theirs), "bert", vec![], "the file says that it is of a model `gpt2`, here it is `bert`"),
            (
                Some(&theirs),
                "gpt2",
                vec![("layers", "4"), ("hidden", "64")],
                "the file says that it is of `gpt2` with other settings: layers = 2 (here 4)",
            ),
            (
                Some(&theirs),
                "gpt2",
                vec![("layers", "2"), ("hidden", "64")],
                "the file says that it is of `gpt2` with the same settings: the model text has changed since",
            ),
            (None, "gpt2", vec![("layers", "2")], "the file does not say which model it is of; here it is `gpt2` with layers = 2"),
        ];
        for (theirs, model, own, wanted) in cases {
            assert_eq!(likely(theirs, model, &settings(&own)), [wanted]);
        }
    }

    #[test]
    fn a_seal_is_of_what_is_said_and_of_the_tensors_in_any_order() {
        let tensors = |list: &[&str]| list.iter().map(|t| t.to_string()).collect::<Vec<_>>();
        let sealed = seal("{}", tensors(&["a [2]", "b [3]"]));
        assert_eq!(open(&sealed, tensors(&["b [3]", "a [2]"])), Ok("{}"));
        for other in [tensors(&["a [2]"]), tensors(&["a [2]", "b [4]"]), tensors(&["a [2]b [3]"])] {
            assert!(open(&sealed, other).is_err());
        }
        assert!(open(&sealed.replace('}', " }"), tensors(&["a [2]", "b [3]"])).is_err());
    }

    #[test]
    fn long_lists_are_cut_and_counted() {
        let list: Vec<String> = (0..7).map(|k| k.to_string()).collect();
        assert_eq!(few(&list).join(" "), "0 1 2 3 4 and 2 more");
        assert_eq!(few(&list[..5]), list[..5]);
    }

    #[test]
    fn the_library_is_not_carried() {
        let source = |name: &str, text: &str| Source { name: name.into(), text: text.into() };
        let p = Provenance::new("m", &[], &[source("models/m.mdl", "model"), source("std/nn.mdl", "")]);
        assert_eq!(p.texts, [source("m.mdl", "model")]);
    }
}
