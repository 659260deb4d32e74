//! Nearest names, for "did you mean".

/// The candidate with the fewest edits to `name`, if they are few for its length. Of equally near ones, the first.
pub fn nearest<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let allowed = 1 + name.chars().count() / 4;
    let near = candidates.into_iter().map(|c| (distance(name, c, allowed + 1), c));
    near.filter(|(d, c)| *d <= allowed && *d < c.chars().count()).min_by_key(|(d, _)| *d).map(|(_, c)| c)
}

/// Edits (insert, delete, replace, swap of neighbours; Damerau's optimal string alignment) between two names, or
/// `limit` if not fewer.
fn distance(a: &str, b: &str, limit: usize) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    if a.len().abs_diff(b.len()) >= limit || a.len() > 200 {
        return limit;
    }
    let mut rows = vec![(0..=b.len()).collect::<Vec<_>>()];
    for i in 0..a.len() {
        let mut row = vec![i + 1];
        for j in 0..b.len() {
            let replaced = rows[i][j] + usize::from(a[i] != b[j]);
            let mut best = replaced.min(rows[i][j + 1] + 1).min(row[j] + 1);
            if i > 0 && j > 0 && a[i] == b[j - 1] && a[i - 1] == b[j] {
                best = best.min(rows[i - 1][j - 1] + 1);
            }
            row.push(best);
        }
        rows.push(row);
    }
    rows[a.len()][b.len()].min(limit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_letter_off_is_near() {
        assert_eq!(nearest("hiden", ["heads", "hidden", "ffn"]), Some("hidden"));
    }

    #[test]
    fn swapped_letters_are_one_edit() {
        assert_eq!(nearest("seq", ["qes", "esq"]), Some("esq"));
    }

    #[test]
    fn a_stranger_has_no_nearest_name() {
        assert_eq!(nearest("banana", ["heads", "hidden"]), None);
    }
}
