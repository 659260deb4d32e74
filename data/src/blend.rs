//! Samples of several data sets in one order: `BlendedDataset` of megatron-core.
//!
//! The next sample is of the data set that is furthest behind its weight, the first of equals
//! (`build_blending_indices` in `helpers.cpp`). Each data set's own samples come in their order. So one number a
//! sample is kept, which data set it is of; which of its samples that is, is counted from the last mark on.

use crate::cache::Rows;
use crate::map::Numbers;
use crate::split::normalized;
use blake3::Hash;
use std::path::PathBuf;

/// Data sets and what part of the samples is of each.
#[derive(Clone, Debug, PartialEq)]
pub struct Blend {
    /// Paths of the data sets, with or without the ends of their files' names.
    pub prefixes: Vec<PathBuf>,
    /// Weight of each data set; none takes all samples of each for one epoch.
    pub weights: Option<Vec<f64>>,
}

/// Words that are no blend, or a blend that cannot be.
#[derive(Debug, thiserror::Error, PartialEq)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum BlendError {
    #[error("no data set is named")]
    Nothing,
    #[error("`{0}` stands where a weight is meant, as others have one: either all data sets have weights, as in 0.7 A 0.3 B, or none")]
    Mixed(String),
    #[error("`{}` has the weight {weight}; a weight is above 0: leave the data set out", .prefix.display())]
    Weight { prefix: PathBuf, weight: f64 },
    #[error("{0} data sets; a blend has at most {MOST}: join some of them")]
    Many(usize),
    #[error("{prefixes} data sets and {weights} weights; each data set has one")]
    Count { prefixes: usize, weights: usize },
    #[error(
        "`{}` has {has} samples, and the blend takes {takes} of it; a larger surplus makes more, for example two or ten times {surplus}",
        .prefix.display()
    )]
    Oversampled { prefix: PathBuf, has: u64, takes: u64, surplus: f64 },
    #[error("`{}` has no sample for this split: leave it out of the blend, or give the split more", .0.display())]
    Empty(PathBuf),
    #[error("{0} samples; a blend has at most 4294967293: ask for fewer, or for longer sequences")]
    Large(u64),
    #[error("weights need a number of samples that is to be drawn by them")]
    Unsized,
}

/// Most data sets of a blend.
pub const MOST: usize = 32766;

impl Blend {
    /// Reads `A`, `A B C` or `0.7 A 0.3 B`, as Megatron reads `--data-path`.
    ///
    /// # Errors
    /// Nothing; some weights but not all; weights that are not above 0.
    pub fn parse(words: &[String]) -> Result<Blend, BlendError> {
        let paths = |words: Vec<&str>| words.into_iter().map(|w| PathBuf::from(w.trim())).collect();
        let even: Vec<(&str, &str)> = words.as_chunks::<2>().0.iter().map(|[w, p]| (w.as_str(), p.as_str())).collect();
        let weights: Vec<Option<f64>> = even.iter().map(|(w, _)| w.trim().parse().ok()).collect();
        let blend = match weights.iter().copied().collect::<Option<Vec<f64>>>() {
            Some(weights) if words.len().is_multiple_of(2) => {
                Blend { prefixes: paths(even.into_iter().map(|(_, p)| p).collect()), weights: Some(weights) }
            }
            _ if words.len().is_multiple_of(2) && weights.iter().any(Option::is_some) => {
                let odd = weights.iter().position(Option::is_none).unwrap_or(0);
                return Err(BlendError::Mixed(even[odd].0.into()));
            }
            _ => Blend { prefixes: paths(words.iter().map(String::as_str).collect()), weights: None },
        };
        blend.check()?;
        Ok(blend)
    }

    /// # Errors
    /// As [`Blend::parse`].
    pub fn check(&self) -> Result<(), BlendError> {
        let count = self.prefixes.len();
        if count == 0 {
            return Err(BlendError::Nothing);
        }
        if count > MOST {
            return Err(BlendError::Many(count));
        }
        let Some(weights) = &self.weights else { return Ok(()) };
        if weights.len() != count {
            return Err(BlendError::Count { prefixes: count, weights: weights.len() });
        }
        let sum = weights.iter().sum::<f64>();
        match self.prefixes.iter().zip(weights).find(|(_, w)| !(**w > 0.0 && (**w / sum) > 0.0)) {
            Some((prefix, weight)) => Err(BlendError::Weight { prefix: prefix.clone(), weight: *weight }),
            None => Ok(()),
        }
    }
}

/// How many samples of each data set are used, for so many of all, and how many are made, with a surplus
/// (`_get_size_per_split_per_dataset`).
pub fn sizes(weights: &[f64], samples: u64, surplus: f64) -> Vec<(u64, u64)> {
    let used = |weight: f64| (samples as f64 * weight).ceil() as u64;
    let made = |used: u64| (used as f64 * (1.0 + surplus)).ceil() as u64;
    normalized(weights).into_iter().map(|w| (used(w), made(used(w)))).collect()
}

/// Which data set each sample is of.
pub struct BlendedOrder {
    /// The data set of each sample, two a number, the first in the lower half; how many data sets and samples there
    /// are; how many samples of each data set come before every `stride`-th sample, and before the end.
    pub(crate) rows: Rows,
    sets: usize,
    samples: u64,
}

/// An order that is being blended.
struct BlendBuilder {
    of: Vec<u32>,
    marks: Vec<u32>,
    counts: Vec<u32>,
    samples: u32,
    stride: usize,
    /// Samples until the next mark.
    to_mark: usize,
}

/// Samples between marks, which then take half a byte a sample at most.
fn stride(sets: usize) -> usize {
    (8 * sets).max(64)
}

impl BlendBuilder {
    fn new(sets: usize, samples: u32) -> BlendBuilder {
        BlendBuilder {
            of: Vec::with_capacity((samples as usize).div_ceil(2)),
            marks: vec![],
            counts: vec![0; sets],
            samples: 0,
            stride: stride(sets),
            to_mark: 0,
        }
    }

    fn push(&mut self, set: usize) {
        if self.to_mark == 0 {
            self.marks.extend_from_slice(&self.counts);
            self.to_mark = self.stride;
        }
        self.to_mark -= 1;
        match self.of.last_mut() {
            Some(last) if self.samples % 2 == 1 => *last |= (set as u32) << 16,
            Some(_) | None => self.of.push(set as u32),
        }
        self.samples += 1;
        self.counts[set] += 1;
    }

    fn done(mut self) -> BlendedOrder {
        self.marks.extend_from_slice(&self.counts);
        let (sets, samples) = (self.counts.len(), self.samples);
        let rows = [self.of, vec![sets as u32, samples], self.marks];
        BlendedOrder { rows: rows.map(Numbers::Memory), sets, samples: samples.into() }
    }
}

impl BlendedOrder {
    /// Blends this many samples by weights.
    pub fn by_weights(weights: &[f64], samples: u32) -> BlendedOrder {
        let weights = normalized(weights);
        let mut mixing = BlendBuilder::new(weights.len(), samples);
        // The errors are floats that no branch stands between, so that the compiler vectorizes their loop.
        let (mut taken, mut errors) = (vec![0.0f64; weights.len()], vec![0.0f64; weights.len()]);
        for n in 0..samples {
            let at = f64::from(n).max(1.0);
            errors.iter_mut().zip(&weights).zip(&taken).for_each(|((error, weight), taken)| *error = weight * at - taken);
            let most = largest(&errors);
            let set = errors.iter().position(|e| *e == most).unwrap_or(0);
            mixing.push(set);
            taken[set] += 1.0;
        }
        mixing.done()
    }

    /// All samples of each data set, each in its part of the way (`build_exhaustive_blending_indices`).
    pub fn exhaustive(sizes: &[u32]) -> BlendedOrder {
        let total: u64 = sizes.iter().map(|s| u64::from(*s)).sum();
        let weights: Vec<f64> = sizes.iter().map(|s| f64::from(*s) / total as f64).collect();
        let mut mixing = BlendBuilder::new(sizes.len(), total.min(u32::MAX.into()) as u32);
        let mut unspent: Vec<usize> = (0..sizes.len()).filter(|s| sizes[*s] > 0).collect();
        let mut n = 0.0f64;
        while !unspent.is_empty() {
            let mut most = (0, f64::MIN);
            for (place, set) in unspent.iter().enumerate() {
                let error = weights[*set] * n.max(1.0) - f64::from(mixing.counts[*set]);
                if error > most.1 {
                    most = (place, error);
                }
            }
            let set = unspent[most.0];
            mixing.push(set);
            if mixing.counts[set] == sizes[set] {
                unspent.remove(most.0);
            }
            n += 1.0;
        }
        mixing.done()
    }

    /// The blend of so many data sets that rows are, if they have the lengths for it.
    pub(crate) fn of(rows: Rows, sets: usize) -> Option<BlendedOrder> {
        let [of, about, marks] = &rows;
        let samples = about.get(1).map(u64::from)?;
        let fits = about.get(0) == u32::try_from(sets).ok() && about.len() == 2 && of.len() == samples.div_ceil(2);
        let marked = samples.div_ceil(stride(sets) as u64) + 1;
        (fits && marks.len() == marked * sets as u64).then_some(BlendedOrder { sets, samples, rows })
    }

    /// Key of the blend of these weights, or of the blend of all samples, in a cache.
    pub(crate) fn key(weights: &[f64], samples: Option<u32>) -> Hash {
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"a blend of samples, as megatron-core 0.16");
        hasher.update(&samples.map_or(u64::MAX, u64::from).to_le_bytes());
        weights.iter().for_each(|w| {
            hasher.update(&w.to_le_bytes());
        });
        hasher.finalize()
    }

    /// Samples.
    pub fn len(&self) -> u64 {
        self.samples
    }

    /// Whether there are no samples.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn set(&self, n: u64) -> Option<usize> {
        let two = self.rows[0].get(n / 2)?;
        Some((two >> (16 * (n % 2)) & 0xffff) as usize).filter(|set| *set < self.sets)
    }

    /// The data set of sample number n, and its own number there.
    pub fn get(&self, n: u64) -> Option<(usize, u64)> {
        let set = self.set(n).filter(|_| n < self.samples)?;
        let mark = n / stride(self.sets) as u64;
        let before = self.rows[2].get(mark * self.sets as u64 + set as u64)?;
        let since = (mark * stride(self.sets) as u64..n).filter(|k| self.set(*k) == Some(set)).count();
        Some((set, u64::from(before) + since as u64))
    }

    /// How many samples each data set has in it.
    pub fn counts(&self) -> Vec<u64> {
        let end = self.rows[2].len().saturating_sub(self.sets as u64);
        (0..self.sets as u64).map(|set| self.rows[2].get(end + set).map_or(0, u64::from)).collect()
    }
}

/// The largest of some numbers.
fn largest(numbers: &[f64]) -> f64 {
    let larger = |a: f64, b: f64| if b > a { b } else { a };
    let (fours, rest) = numbers.as_chunks::<4>();
    let mut most = [f64::MIN; 4];
    for four in fours {
        most = std::array::from_fn(|k| larger(most[k], four[k]));
    }
    most.iter().chain(rest).copied().fold(f64::MIN, larger)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(String::from).collect()
    }

    #[test]
    fn blends_are_read_as_megatron_reads_them() {
        let paths = |text: &str| words(text).into_iter().map(PathBuf::from).collect::<Vec<_>>();
        assert_eq!(Blend::parse(&words("30 a 70 b")), Ok(Blend { prefixes: paths("a b"), weights: Some(vec![30.0, 70.0]) }));
        assert_eq!(Blend::parse(&words("a b")), Ok(Blend { prefixes: paths("a b"), weights: None }));
        assert_eq!(Blend::parse(&words("1 2 3")), Ok(Blend { prefixes: paths("1 2 3"), weights: None }));
        assert_eq!(Blend::parse(&words("1 a b c")), Err(BlendError::Mixed("b".into())));
        assert_eq!(Blend::parse(&words("0 a 1 b")), Err(BlendError::Weight { prefix: "a".into(), weight: 0.0 }));
        assert!(Blend::parse(&words("nan a 1 b")).is_err() && Blend::parse(&words("inf a 1 b")).is_err());
        assert_eq!(Blend::parse(&[]), Err(BlendError::Nothing));
    }

    #[test]
    fn a_samples_own_number_counts_those_of_its_data_set_before_it() {
        for mixed in [BlendedOrder::by_weights(&[0.2, 0.5, 0.3], 5001), BlendedOrder::exhaustive(&[1000, 0, 2500])] {
            let mut counts = [0; 3];
            for n in 0..mixed.len() {
                let (set, own) = mixed.get(n).expect("a sample");
                assert_eq!(own, counts[set]);
                counts[set] += 1;
            }
            assert_eq!(mixed.counts(), counts);
            assert_eq!(mixed.get(mixed.len()), None);
        }
    }
}
