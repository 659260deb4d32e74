//! Patterns of parameters' names.

/// Whether a parameter's name fits a pattern: `*` stands for any text; iteration numbers may be left out of the
/// pattern.
pub fn matches(pattern: &str, name: &str) -> bool {
    let plain: Vec<&str> = name.split('.').filter(|part| !part.bytes().all(|b| b.is_ascii_digit())).collect();
    glob(pattern, name) || glob(pattern, &plain.join("."))
}

fn glob(pattern: &str, text: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(first) = parts.next() else { return text.is_empty() };
    let Some(mut rest) = text.strip_prefix(first) else { return false };
    let middle: Vec<&str> = parts.collect();
    let Some((last, middle)) = middle.split_last() else { return rest.is_empty() };
    for part in middle {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn a_star_stands_for_any_text() {
        assert!(matches("*.b", "layers.0.attn.q.b"));
        assert!(!matches("*.b", "layers.0.attn.q.w"));
    }

    #[test]
    fn iteration_numbers_may_be_left_out() {
        assert!(matches("layers.attn.*", "layers.11.attn.q.w"));
        assert!(matches("layers.11.attn.*", "layers.11.attn.q.w"));
        assert!(!matches("layers.1.attn.*", "layers.11.attn.q.w"));
    }
}
