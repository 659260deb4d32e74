//! How values are read that clap does not know: each message says what is asked for.

use std::str::FromStr;

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

/// A whole number from 0 on.
pub fn whole<T: FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| "it should be a whole number from 0 on, such as 100".into())
}

/// A whole number from 1 on.
pub fn from_one<T: FromStr + PartialOrd + From<u8>>(text: &str) -> Result<T, String> {
    text.parse().ok().filter(|n| *n >= T::from(1)).ok_or_else(|| "it should be a whole number from 1 on, such as 2".into())
}

/// A number of devices, or the least and the most of several, with each twice the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Devices {
    Of(u64),
    Range(u64, u64),
}

impl Devices {
    /// All, the most last: it need not be twice the one before.
    pub fn all(self) -> Vec<u64> {
        let Devices::Range(least, most) = self else { return vec![self.most()] };
        let doubled = std::iter::successors(Some(least), |n| n.checked_mul(2)).take_while(|n| *n < most);
        doubled.chain([most]).collect()
    }

    pub fn most(self) -> u64 {
        match self {
            Devices::Of(n) | Devices::Range(_, n) => n,
        }
    }
}

impl FromStr for Devices {
    type Err = String;

    fn from_str(text: &str) -> Result<Devices, String> {
        let Some((least, most)) = text.split_once("..") else { return from_one(text).map(Devices::Of) };
        match (from_one::<u64>(least), from_one::<u64>(most)) {
            (Ok(least), Ok(most)) if least < most => Ok(Devices::Range(least, most)),
            _ => Err("it should be the least and the most, whole numbers from 1 on, such as 256..4096".into()),
        }
    }
}

/// Threads of a rank: from 1 to 1024.
pub fn threads(text: &str) -> Result<usize, String> {
    let limits = 1..=1024;
    text.parse()
        .ok()
        .filter(|n| limits.contains(n))
        .ok_or_else(|| "it should be a whole number from 1 to 1024; more than the cores are slower".into())
}

/// A finite number above 0: room for rows.
pub fn factor(text: &str) -> Result<f64, String> {
    number(text, |x| x > 0.0, "above 0, such as 1.25")
}

/// How far a loss may jump: above 1.
pub fn spike(text: &str) -> Result<f64, String> {
    number(text, |x| x > 1.0, "above 1, such as 2")
}

/// Minutes: above 0, and at most those of a century.
pub fn minutes(text: &str) -> Result<f64, String> {
    number(text, |x| x > 0.0 && x <= 60.0 * 24.0 * 36_525.0, "of minutes, such as 0.5 or 230")
}

/// A number above 0 that ranks compute with: a loss scale, an epsilon.
pub fn above_zero(text: &str) -> Result<f64, String> {
    single(text, |x| x > 0.0, "above 0, such as 1.25")
}

/// A number from 0 on that ranks compute with: a learning rate, a decay, a norm.
pub fn from_zero(text: &str) -> Result<f64, String> {
    single(text, |x| x >= 0.0, "from 0 on, such as 3e-4")
}

/// What a mean keeps of itself in a step: from 0 on and below 1.
pub fn share(text: &str) -> Result<f64, String> {
    single(text, |x| (0.0..1.0).contains(&x), "from 0 on and below 1, such as 0.9")
}

/// Ranks compute with it in f32, in which it must be allowed too: 1e39 is infinite there, 1e-46 is 0.
fn single(text: &str, allowed: impl Fn(f64) -> bool, expected: &str) -> Result<f64, String> {
    let x = number(text, &allowed, expected)?;
    let rounded = f64::from(x as f32);
    if rounded.is_finite() && allowed(rounded) {
        return Ok(x);
    }
    Err(format!("ranks compute with it in f32, where it is {rounded}: it should be a number {expected}"))
}

fn number(text: &str, allowed: impl Fn(f64) -> bool, expected: &str) -> Result<f64, String> {
    text.parse().ok().filter(|x: &f64| x.is_finite() && allowed(*x)).ok_or_else(|| format!("it should be a number {expected}"))
}

/// A setting of a model text, `layers=4`.
pub fn define(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.trim().to_string(), value.trim().to_string())),
        _ => Err("it should be NAME=VALUE, for example `layers=4`".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_one_number_or_a_range() {
        let all = |text: &str| text.parse::<Devices>().map(Devices::all);
        assert_eq!(all("8"), Ok(vec![8]));
        assert_eq!(all("8..40"), Ok(vec![8, 16, 32, 40]));
        assert_eq!(all("3..6"), Ok(vec![3, 6]));
        assert_eq!(all(&format!("1..{}", u64::MAX)).map(|a| (a.len(), a[64])), Ok((65, u64::MAX)));
        for wrong in ["0", "0..4", "8..8", "8..4", "..8", "8..", "1...4", "a..b"] {
            assert!(all(wrong).is_err(), "{wrong}");
        }
    }
}
