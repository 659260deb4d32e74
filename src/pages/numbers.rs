//! Numbers, times and words for people.

use indicatif::HumanCount;
use jiff::Timestamp;

/// `1,234`, rounded.
pub fn count(x: f64) -> String {
    HumanCount(x.round().max(0.0) as u64).to_string()
}

/// Four digits that count: `0.6931`, `12.34`, `5.1e-6`.
pub fn short(x: f64) -> String {
    match x.abs() {
        0.0 => "0".into(),
        a if !(1e-3..1e6).contains(&a) => format!("{x:.2e}"),
        a => format!("{x:.*}", (3 - a.log10().floor() as i32).clamp(0, 6) as usize),
    }
}

pub fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

/// `2.5 GiB`.
pub fn bytes(n: u64) -> String {
    indicatif::BinaryBytes(n).to_string()
}

/// `12.3 s`, `5 min 06 s`, `3 h 02 min`, `4 d 11 h`.
pub fn duration(seconds: f64) -> String {
    let whole = seconds.max(0.0).round() as u64;
    match whole {
        0..60 => format!("{:.1} s", seconds.max(0.0)),
        60..3600 => format!("{} min {:02} s", whole / 60, whole % 60),
        3600..172_800 => format!("{} h {:02} min", whole / 3600, whole % 3600 / 60),
        _ => format!("{} d {:02} h", whole / 86_400, whole % 86_400 / 3600),
    }
}

/// `1 step`, `2 steps`, `3 microbatches`.
pub fn of(n: u64, one: &str) -> String {
    let ending = match n {
        1 => "",
        _ if one.ends_with("ch") => "es",
        _ => "s",
    };
    format!("{} {one}{ending}", HumanCount(n))
}

/// A second of the calendar, in UTC; nothing of what is none.
pub fn time(seconds: f64) -> String {
    let stamp = Timestamp::from_second(seconds as i64);
    stamp.map_or(String::new(), |t| t.strftime("%Y-%m-%d %H:%M:%S").to_string())
}

/// A command as a shell takes it.
pub fn quoted(words: &[String]) -> String {
    let plain = |w: &str| !w.is_empty() && w.chars().all(|c| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c));
    let quote = |w: &String| if plain(w) { w.clone() } else { format!("'{}'", w.replace('\'', r"'\''")) };
    words.iter().map(quote).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_as_long_as_they_say_something() {
        let shown = [0.0, 0.12345, 5.54449, 123.456, 98765.4, 3e-5, -0.002, 1e9].map(short);
        assert_eq!(shown, ["0", "0.1235", "5.544", "123.5", "98765", "3.00e-5", "-0.002000", "1.00e9"]);
        assert_eq!([0.04, 61.0, 7384.0, 400_000.0].map(duration), ["0.0 s", "1 min 01 s", "2 h 03 min", "4 d 15 h"]);
        assert_eq!((time(0.0), time(1e300), time(f64::NAN)), ("1970-01-01 00:00:00".into(), "".into(), "1970-01-01 00:00:00".into()));
        assert_eq!(quoted(&["run".into(), "a b.mcc".into(), "it's".into(), "".into()]), r"run 'a b.mcc' 'it'\''s' ''");
    }
}
