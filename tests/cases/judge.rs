//! Holds a run of a reference case against what is expected of it. Included by tests with `#[path]`.

use serde_json::Value;
use std::collections::BTreeMap;

/// Largest relative errors that pass.
pub struct Bounds {
    pub losses: f64,
    pub grad_norms: f64,
    pub param_norms: f64,
}

/// Bounds for runs in f32.
pub const STRICT: Bounds = Bounds { losses: 1e-5, grad_norms: 1e-4, param_norms: 5e-4 };

/// What a run reports.
pub struct Run<'a> {
    /// Losses before each step's update.
    pub losses: &'a [f64],
    /// Global gradient norms before clipping.
    pub grad_norms: &'a [f64],
    /// L2 norms after the last step, by the names of the checkpoint; none: not compared.
    pub param_norms: Option<&'a BTreeMap<String, f64>>,
}

/// What is wrong with a run in f32, one line per quantity; nothing if it passes.
pub fn judge(run: &Run<'_>, expected: &Value) -> Vec<String> {
    judge_within(run, expected, &STRICT)
}

/// What is wrong with a run, within other bounds.
pub fn judge_within(run: &Run<'_>, expected: &Value, bounds: &Bounds) -> Vec<String> {
    let mut failures = vec![];
    series("losses", run.losses, &expected["losses"], bounds.losses, &mut failures);
    series("grad_norms", run.grad_norms, &expected["grad_norms"], bounds.grad_norms, &mut failures);
    if let Some(norms) = run.param_norms {
        table("param_norms", norms, &expected["param_norms"], bounds.param_norms, &mut failures);
    }
    failures
}

/// The error of `found` relative to `wanted`; infinite if it is no number.
fn relative(found: f64, wanted: f64) -> f64 {
    if found.is_finite() { (found - wanted).abs() / wanted.abs().max(1e-12) } else { f64::INFINITY }
}

fn series(name: &str, found: &[f64], wanted: &Value, tolerance: f64, failures: &mut Vec<String>) {
    let Some(wanted) = wanted.as_array().and_then(|list| list.iter().map(Value::as_f64).collect::<Option<Vec<f64>>>()) else {
        failures.push(format!("{name}: nothing is expected"));
        return;
    };
    if found.len() != wanted.len() || wanted.is_empty() {
        failures.push(format!("{name}: {} steps, expected {}", found.len(), wanted.len()));
        return;
    }
    let errors = found.iter().zip(&wanted).map(|(f, w)| relative(*f, *w));
    let (step, error) = errors.enumerate().fold((0, 0.0), |worst, e| if e.1 > worst.1 { e } else { worst });
    if error > tolerance {
        failures.push(format!("{name}: relative error {error:.1e} at step {step}, {} instead of {}", found[step], wanted[step]));
    }
}

/// Entries that are rounding noise are held to 1e-6 of the greatest one only.
fn table(name: &str, found: &BTreeMap<String, f64>, wanted: &Value, tolerance: f64, failures: &mut Vec<String>) {
    let entries =
        wanted.as_object().and_then(|map| map.iter().map(|(k, v)| Some((k.clone(), v.as_f64()?))).collect::<Option<BTreeMap<String, f64>>>());
    let Some(wanted) = entries.filter(|e| !e.is_empty()) else {
        failures.push(format!("{name}: nothing is expected"));
        return;
    };
    let differ: Vec<&String> = found.keys().filter(|k| !wanted.contains_key(*k)).chain(wanted.keys().filter(|k| !found.contains_key(*k))).collect();
    if let Some(first) = differ.first() {
        failures.push(format!("{name}: {} names differ, the first is {first}", differ.len()));
        return;
    }
    let greatest = wanted.values().copied().fold(0.0, f64::max);
    let error = |(name, wanted): (&String, &f64)| {
        let noise = (found[name] - wanted).abs() / (1e-6 * greatest) * tolerance;
        let error = if found[name].is_finite() { relative(found[name], *wanted).min(noise) } else { f64::INFINITY };
        (name.clone(), error)
    };
    let worst = wanted.iter().map(error).max_by(|a, b| a.1.total_cmp(&b.1));
    if let Some((worst, error)) = worst.filter(|w| w.1 > tolerance) {
        failures.push(format!("{name}: relative error {error:.1e} of {worst}, {} instead of {}", found[&worst], wanted[&worst]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn expected() -> Value {
        json!({"losses": [4.0, 2.0], "grad_norms": [1.0, 3.0], "param_norms": {"a": 10.0, "b": 2.0, "c": 1e-7}})
    }

    fn check(losses: &[f64], grad_norms: &[f64], norms: &[(&str, f64)]) -> Vec<String> {
        let norms = norms.iter().map(|(n, x)| ((*n).to_owned(), *x)).collect();
        judge(&Run { losses, grad_norms, param_norms: Some(&norms) }, &expected())
    }

    const NORMS: [(&str, f64); 3] = [("a", 10.0), ("b", 2.0), ("c", 1e-7)];

    #[test]
    fn a_run_within_the_tolerances_passes() {
        let close = check(&[4.0 * (1.0 + 9e-6), 2.0], &[1.0 - 9e-5, 3.0], &[("a", 10.0 + 4e-3), NORMS[1], NORMS[2]]);
        assert_eq!(close, Vec::<String>::new());
    }

    #[test]
    fn each_quantity_out_of_tolerance_is_a_failure() {
        assert_eq!(check(&[4.0, 2.0 * (1.0 + 2e-5)], &[1.0, 3.0], &NORMS).len(), 1);
        assert_eq!(check(&[4.0, 2.0], &[1.0002, 3.0], &NORMS), ["grad_norms: relative error 2.0e-4 at step 0, 1.0002 instead of 1"]);
        assert_eq!(check(&[4.0, 2.0], &[1.0, 3.0], &[NORMS[0], ("b", 2.002), NORMS[2]]).len(), 1);
    }

    #[test]
    fn an_entry_that_is_noise_is_held_to_the_greatest_one() {
        assert!(check(&[4.0, 2.0], &[1.0, 3.0], &[NORMS[0], NORMS[1], ("c", 8e-6)]).is_empty());
        assert_eq!(check(&[4.0, 2.0], &[1.0, 3.0], &[NORMS[0], NORMS[1], ("c", 2e-5)]).len(), 1);
    }

    #[test]
    fn missing_steps_missing_names_and_what_is_no_number_fail() {
        assert_eq!(check(&[4.0], &[1.0, 3.0], &NORMS), ["losses: 1 steps, expected 2"]);
        assert_eq!(check(&[4.0, f64::NAN], &[1.0, 3.0], &NORMS).len(), 1);
        assert_eq!(check(&[4.0, 2.0], &[1.0, 3.0], &NORMS[..2]), ["param_norms: 1 names differ, the first is c"]);
        assert_eq!(check(&[4.0, 2.0], &[1.0, 3.0], &[NORMS[0], NORMS[1], ("c", f64::INFINITY)]).len(), 1);
    }
}
