//! Which documents train and which are held out: Megatron's `--split 99,1,0`.

/// Training, validation and test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// Documents that are trained on.
    Train,
    /// Documents on which the loss is evaluated during training.
    Valid,
    /// Documents on which the loss is evaluated after training.
    Test,
}

impl Part {
    /// All parts, in the order of a split's weights.
    pub const ALL: [Part; 3] = [Part::Train, Part::Valid, Part::Test];

    /// Megatron's name.
    pub fn name(self) -> &'static str {
        match self {
            Part::Train => "train",
            Part::Valid => "valid",
            Part::Test => "test",
        }
    }
}

/// What part of the sequences each of training, validation and test has: where it begins and ends, of 0 to 1. None
/// has no sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct Split(pub [Option<(f64, f64)>; 3]);

/// A split that means nothing.
#[derive(Debug, thiserror::Error, PartialEq)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum SplitError {
    #[error("the split `{split}`: `{word}` is no number; three weights are meant, as in 99,1,0")]
    Number { split: String, word: String },
    #[error("the split `{split}` has {count} weights; it has three, of training, validation and test, as in 99,1,0")]
    Count { split: String, count: usize },
    #[error("the split `{split}` gives nobody anything: one of its weights has to be above 0")]
    Nothing { split: String },
}

impl Split {
    /// Reads up to three weights, of which those that are not there are 0, and normalizes them as Megatron does.
    ///
    /// # Errors
    /// What is no number or below 0; more than three; zeros alone.
    pub fn parse(text: &str) -> Result<Split, SplitError> {
        let split = || text.to_string();
        let mut weights = vec![];
        for word in text.split([',', '/', ' ']).map(str::trim).filter(|w| !w.is_empty()) {
            let plain = word.chars().all(|c| c == '.' || c.is_ascii_digit());
            let weight = word.parse().ok().filter(|_| plain);
            weights.push(weight.ok_or_else(|| SplitError::Number { split: split(), word: word.into() })?);
        }
        let count = weights.len();
        if count == 0 || count > 3 {
            return Err(SplitError::Count { split: split(), count });
        }
        weights.resize(3, 0.0);
        if !weights.iter().any(|w: &f64| *w > 0.0) || !weights.iter().sum::<f64>().is_finite() {
            return Err(SplitError::Nothing { split: split() });
        }
        let mut begin = 0.0;
        let mut parts = [None; 3];
        for (part, weight) in parts.iter_mut().zip(normalized(&weights)) {
            let end = begin + weight;
            *part = (end > begin).then_some((begin, end));
            begin = end;
        }
        Ok(Split(parts))
    }

    /// All for one part, as where each has a blend of its own.
    pub fn all_for(part: Part) -> Split {
        Split(Part::ALL.map(|p| (p == part).then_some((0.0, 1.0))))
    }

    /// The sequences of a part, of so many.
    pub fn sequences(&self, part: Part, of: u64) -> Option<std::ops::Range<u64>> {
        let at = |border: f64| ((border * of as f64).round_ties_even() as u64).min(of);
        self.0[part as usize].map(|(begin, end)| at(begin)..at(end))
    }
}

/// Weights that sum to one, with numpy's rounding.
pub(crate) fn normalized(weights: &[f64]) -> Vec<f64> {
    let sum = pairwise_sum(weights);
    weights.iter().map(|w| w / sum).collect()
}

/// `numpy.sum` of f64: eight sums side by side of up to 128 numbers, and halves of more
/// (`numpy/_core/src/umath/loops_utils.h.src`).
pub(crate) fn pairwise_sum(a: &[f64]) -> f64 {
    let n = a.len();
    if n < 8 {
        return a.iter().fold(-0.0, |sum, x| sum + x);
    }
    if n <= 128 {
        let mut r: [f64; 8] = std::array::from_fn(|k| a[k]);
        let (eights, rest) = a[8..].as_chunks::<8>();
        for eight in eights {
            r.iter_mut().zip(eight).for_each(|(r, x)| *r += x);
        }
        let sum = ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]));
        return rest.iter().fold(sum, |sum, x| sum + x);
    }
    let half = n / 2 - n / 2 % 8;
    pairwise_sum(&a[..half]) + pairwise_sum(&a[half..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_split_is_normalized_and_rounded_to_even() {
        let split = Split::parse("99,1,0").expect("a split");
        assert_eq!(split.0, [Some((0.0, 0.99)), Some((0.99, 1.0)), None]);
        assert_eq!(split.sequences(Part::Train, 50), Some(0..50));
        assert_eq!(split.sequences(Part::Valid, 50), Some(50..50));
        assert_eq!(split.sequences(Part::Test, 50), None);
        assert_eq!(Split::parse("1, 1").expect("a split").sequences(Part::Valid, 5), Some(2..5));
    }

    #[test]
    fn what_is_no_split_is_refused() {
        for (text, says) in [
            ("99,x,0", "the split `99,x,0`: `x` is no number; three weights are meant, as in 99,1,0"),
            ("99,-1,0", "the split `99,-1,0`: `-1` is no number; three weights are meant, as in 99,1,0"),
            ("1,1,1,1", "the split `1,1,1,1` has 4 weights; it has three, of training, validation and test, as in 99,1,0"),
            ("0,0", "the split `0,0` gives nobody anything: one of its weights has to be above 0"),
        ] {
            assert_eq!(Split::parse(text).expect_err("refused").to_string(), says);
        }
    }
}
