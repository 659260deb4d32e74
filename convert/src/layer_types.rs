//! Which layers see all that is before them: every n-th, as the model text says it; by a list of the type of
//! each, as configs say it.

use crate::config::Config;
use serde_json::Value;

const FULL: &str = "full_attention";
const WINDOW: &str = "sliding_attention";

/// Configs before the list have the number.
pub const PATTERN: &str = "sliding_window_pattern";

/// The types of layers of which every `full_every`-th has no window.
pub fn list(full_every: u64, layers: u64) -> Value {
    (1..=layers).map(|n| if n.is_multiple_of(full_every) { FULL } else { WINDOW }).collect()
}

/// The number that stands for a config's list. Of those that give the same list, the config's own number or the
/// usual one is preferred.
///
/// # Errors
/// The list follows no such number, or is none.
pub fn full_every(config: &Config, field: &str, usual: u64) -> Result<u64, String> {
    let usual = match config.get(PATTERN).filter(|v| !v.is_null()) {
        Some(own) => own.as_u64().filter(|n| *n >= 1).ok_or_else(|| format!("{PATTERN} = {own} is not a whole number from 1 on"))?,
        None => usual,
    };
    let Some(types) = config.get(field).filter(|v| !v.is_null()) else { return Ok(usual) };
    let entries = types.as_array().map(Vec::as_slice).unwrap_or_default();
    let count = entries.len() as u64;
    let first = entries.iter().position(|t| t == FULL).map_or(count, |i| i as u64) + 1;
    let layers = config.get("num_hidden_layers").and_then(Value::as_u64);
    let found = [usual, first].into_iter().find(|n| *types == list(*n, count)).filter(|_| count > 0 && layers.is_none_or(|l| l == count));
    found.ok_or_else(|| format!("{field} = {types} is not supported, only \"{WINDOW}\" with every n-th layer \"{FULL}\", one for each layer"))
}
