//! How words, names and texts are written, in the text forms and in MLIR.

use std::fmt::Write;

/// What may stand in a name without quotes.
pub(super) fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '/' | '*' | '%' | '-')
}

/// Whether a name needs no quotes.
pub(super) fn is_bare(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_') && name.chars().all(is_word)
}

/// A text in quotes, all on one line.
pub(super) fn quote(s: &str) -> String {
    let mut out = String::from("\"");
    for c in s.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c.is_control() => write!(out, "\\u{{{:x}}}", u32::from(c)).expect("invariant: a string takes all text"),
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

/// A text in quotes: what does not print is `\0A`, byte by byte.
pub(super) fn mlir_quote(s: &str) -> String {
    let mut out = String::from("\"");
    for c in s.chars() {
        if c == '"' || c == '\\' || c.is_ascii_control() {
            write!(out, "\\{:02X}", u32::from(c)).expect("invariant: a string takes all text");
        } else {
            out.push(c);
        }
    }
    out.push('"');
    out
}

/// An integer attribute of a decimal text.
pub(super) fn mlir_int(text: &str) -> String {
    format!("{text} : {}", if text.parse::<i64>().is_ok() { "i64" } else { "ui64" })
}

/// A float attribute: MLIR wants a point in each, and bits for what is not finite.
pub(super) fn mlir_real(x: f64) -> String {
    if !x.is_finite() {
        return format!("0x{:016X} : f64", x.to_bits());
    }
    let text = format!("{x:e}");
    let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let point = if mantissa.contains('.') { "" } else { ".0" };
    format!("{mantissa}{point}e{exponent} : f64")
}
