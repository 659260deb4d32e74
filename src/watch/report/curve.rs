//! A number of each step, thinned as it is read.

use serde::Serialize;

/// Points of a curve, or a few less.
pub const POINTS: u64 = 4000;

/// Of steps that lie together, in a bucket, the least and the greatest number stay: nothing that stands out is
/// lost.
#[derive(Clone, Debug)]
pub struct Curve {
    /// Steps of a bucket.
    width: u64,
    open: Option<Bucket>,
    drawn: PlottedCurve,
}

/// What is drawn of a curve.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PlottedCurve {
    pub points: Points,
    /// The mean of each bucket, if buckets have more than one step.
    pub means: Points,
}

/// Numbers that are not there are gaps.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Points {
    pub x: Vec<u64>,
    pub y: Vec<Option<f64>>,
}

#[derive(Clone, Copy, Debug)]
struct Bucket {
    number: u64,
    /// The first step, for what has no number.
    first: u64,
    ends: Option<[(u64, f64); 2]>,
    sum: f64,
    count: u64,
}

/// How many steps a bucket has, so that two points for each are few enough; the first and the last bucket may
/// be cut.
pub fn width(first: u64, last: u64) -> u64 {
    let steps = last.saturating_sub(first).saturating_add(1);
    if steps <= POINTS { 1 } else { steps.div_ceil(POINTS / 2 - 1) }
}

impl Curve {
    pub fn new(width: u64) -> Curve {
        Curve { width, open: None, drawn: PlottedCurve::default() }
    }

    /// The number of a step, which comes after all that were pushed.
    pub fn push(&mut self, step: u64, number: Option<f64>) {
        let bucket = step / self.width;
        if self.open.is_some_and(|open| open.number != bucket) {
            self.close();
        }
        let open = self.open.get_or_insert(Bucket { number: bucket, first: step, ends: None, sum: 0.0, count: 0 });
        if let Some(y) = number.filter(|y| y.is_finite()) {
            open.sum += y;
            open.count += 1;
            let [least, most] = open.ends.get_or_insert([(step, y); 2]);
            if y < least.1 {
                *least = (step, y);
            }
            if y > most.1 {
                *most = (step, y);
            }
        }
    }

    fn close(&mut self) {
        let Some(bucket) = self.open.take() else { return };
        if self.width > 1 {
            self.drawn.means.push(bucket.first, (bucket.count > 0).then(|| bucket.sum / bucket.count as f64).filter(|y| y.is_finite()));
        }
        let points = &mut self.drawn.points;
        let Some(mut ends) = bucket.ends else { return points.push(bucket.first, None) };
        ends.sort_by_key(|(step, _)| *step);
        let [a, b] = ends;
        points.push(a.0, Some(a.1));
        if a.0 != b.0 {
            points.push(b.0, Some(b.1));
        }
    }

    pub fn drawn(mut self) -> PlottedCurve {
        self.close();
        self.drawn
    }
}

impl Points {
    fn push(&mut self, step: u64, number: Option<f64>) {
        self.x.push(step);
        self.y.push(number);
    }

    fn scaled(mut self, factor: f64) -> Points {
        self.y.iter_mut().flatten().for_each(|y| *y = six_digits(*y * factor));
        self
    }
}

impl PlottedCurve {
    /// With numbers in another unit, and no more digits than can be seen.
    pub fn scaled(self, factor: f64) -> PlottedCurve {
        PlottedCurve { points: self.points.scaled(factor), means: self.means.scaled(factor) }
    }

    /// Whether a few numbers are so great that the others cannot be told apart beside them.
    pub fn has_spikes(&self) -> bool {
        let mut sorted: Vec<f64> = self.points.y.iter().flatten().copied().collect();
        sorted.sort_by(f64::total_cmp);
        let (middle, least) = (sorted.get(sorted.len() / 2), sorted.first());
        least.is_some_and(|least| *least > 0.0) && middle.zip(sorted.last()).is_some_and(|(middle, most)| *most > 20.0 * middle)
    }

    /// None if there is no number at all.
    pub fn greatest(&self) -> Option<f64> {
        self.points.y.iter().flatten().copied().max_by(f64::total_cmp)
    }
}

fn six_digits(x: f64) -> f64 {
    format!("{x:.5e}").parse().unwrap_or(x)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(first: u64, last: u64, number: impl Fn(u64) -> Option<f64>) -> PlottedCurve {
        let mut curve = Curve::new(width(first, last));
        (first..=last).for_each(|step| curve.push(step, number(step)));
        curve.drawn()
    }

    #[test]
    fn a_short_curve_has_every_step_and_gaps_where_there_is_no_number() {
        let PlottedCurve { points, means } = drawn(1, 4000, |step| match step {
            7 => None,
            8 => Some(f64::NAN),
            _ => Some(step as f64),
        });
        assert_eq!((points.x, means), ((1..=4000).collect::<Vec<_>>(), Points::default()));
        assert_eq!(points.y[5..9], [Some(6.0), None, None, Some(9.0)]);
    }

    #[test]
    fn a_long_curve_keeps_every_spike_and_its_step() {
        let number = |step| match step {
            123_456 => Some(1e6),
            654_321 => Some(-1e6),
            _ => Some((step % 10) as f64),
        };
        let PlottedCurve { points, means } = drawn(1, 1_000_000, number);
        assert!(points.x.len() as u64 <= POINTS, "{}", points.x.len());
        assert!(points.x.is_sorted_by(|a, b| a < b));
        let at = |step| points.y[points.x.iter().position(|x| *x == step).unwrap()];
        assert_eq!((at(123_456), at(654_321)), (Some(1e6), Some(-1e6)));
        // Three means lie outside of this range: those of the two spikes, and that of the few last steps.
        assert!(means.x.len() as u64 <= POINTS / 2 && means.y.iter().flatten().filter(|y| (4.0..5.0).contains(*y)).count() == means.x.len() - 3);
        let rare = drawn(1, 1_000_000, |step| (step % 100_000 == 0).then_some(2.0));
        assert_eq!(rare.points.y.iter().flatten().count(), 10);
        // The greatest step numbers do not overflow.
        assert!(drawn(u64::MAX - 9, u64::MAX, |_| Some(1.0)).points.x.len() == 10 && width(0, u64::MAX) > 0);
    }

    #[test]
    fn one_slow_step_of_many_is_a_spike() {
        let spikes = |spike| drawn(1, 100, |step| Some(if step == 50 { spike } else { 30.0 })).has_spikes();
        assert_eq!((spikes(40.0), spikes(20_000.0), spikes(-1.0)), (false, true, false));
    }

    #[test]
    fn numbers_have_six_digits() {
        let points = Points { x: vec![1, 2], y: vec![Some(5.544_999_933), Some(0.0)] };
        assert_eq!(points.scaled(1.0).y, [Some(5.545), Some(0.0)]);
    }
}
