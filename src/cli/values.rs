//! How values are read that clap does not know: each message says what is asked for.

/// `80GiB`, `1.5 GB`, `4096`.
pub fn bytes(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len()));
    let scale: u64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kib" => 1 << 10,
        "mib" => 1 << 20,
        "gib" => 1 << 30,
        "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => return Err(format!("`{}` is no unit: KiB, MiB, GiB, TiB, KB, MB, GB, TB", unit.trim())),
    };
    let whole = number.parse::<u64>().ok().and_then(|n| n.checked_mul(scale));
    let part = || number.parse::<f64>().ok().map(|x| x * scale as f64).filter(|x| *x < 2f64.powi(63)).map(|x| x as u64);
    whole.or_else(part).filter(|n| *n > 0).ok_or_else(|| "it should be a number of bytes, for example `80GiB`".into())
}

/// A loss scale: a finite number above 0.
pub fn scale(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|x: &f64| x.is_finite() && *x > 0.0).ok_or_else(|| "a number above 0, such as 65536".into())
}

/// Room for rows: a finite number above 0.
pub fn factor(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|x: &f64| x.is_finite() && *x > 0.0).ok_or_else(|| "a number above 0, such as 1.25".into())
}

pub fn define(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.trim().to_string(), value.trim().to_string())),
        _ => Err("it should be NAME=VALUE, for example `layers=4`".into()),
    }
}
