//! `mcc plan --gpus A..B`: how the best plans change with the number of devices.

use super::PlanRequest;
use super::searching::Searching;
use super::show::{duration, spelled};
use crate::cli::Scaling;
use crate::failure::Failure;
use crate::print::out;
use crate::simulate::time;
use passes::report::footprint::size;
use planner::search::{Effort, Planned};
use serde::Serialize;
use simulate::goodput::{Goodput, goodput};
use std::fmt::Write;

/// The best plan of a number of devices.
#[derive(Clone, Serialize)]
struct Point {
    gpus: u64,
    /// Sequences of a step.
    sequences: u64,
    /// None if there is none that fits.
    best: Option<BestPlan>,
    /// Bytes of the plan that needs least, where none fits.
    #[serde(skip_serializing_if = "Option::is_none")]
    needs: Option<u64>,
}

#[derive(Clone, Serialize)]
struct BestPlan {
    flags: Vec<String>,
    seconds: f64,
    give_or_take: f64,
    tokens_per_second: f64,
    mfu: f64,
    bytes: u64,
    /// Tokens a second of a device, as a part of those of the fewest devices that have a plan.
    efficiency: f64,
    goodput: Option<Goodput>,
    #[serde(skip)]
    chosen: String,
}

/// Points of strong or of weak scaling.
#[derive(Serialize)]
pub struct ScalingCurve {
    scaling: &'static str,
    points: Vec<Point>,
}

/// The best plan for each number of devices: with the same batch, and with one that grows as they do.
///
/// # Errors
/// No number of devices has a plan: what the first is refused for.
pub fn search(searching: &Searching<'_>, typed: &[(String, String)]) -> Result<Vec<ScalingCurve>, Failure> {
    let (args, all) = (searching.args, searching.args.gpus.all());
    let (fewest, batch) = (all[0], searching.base.options.global_batch);
    let effort = Effort { plans: args.whole as usize, changes: 0, top: 1, ..Effort::default() };
    let asked = PlanRequest { base: &searching.base.options, typed, model: &args.model, target: &args.plan.target };
    let point = |gpus: u64, sequences: u64| {
        let effort = Effort { until: args.until(), ..effort };
        searching.search(gpus, sequences, effort, |_, found| {
            let best = found.plans.first().map(|plan| best(searching, gpus, plan, &asked));
            let needs = found.smallest.filter(|_| best.is_none()).map(|p| p.bytes);
            Point { gpus, sequences, needs, best }
        })
    };
    let mut curves: Vec<ScalingCurve> = vec![];
    for (how, scaling) in [(Scaling::Strong, "strong"), (Scaling::Weak, "weak")] {
        if args.scaling != how && args.scaling != Scaling::Both {
            continue;
        }
        let sequences = |gpus: u64| if how == Scaling::Weak { grown(batch, gpus, fewest) } else { batch };
        // The point of the fewest devices is the same for strong and weak scaling.
        let first = curves.first().map_or_else(|| point(fewest, batch), |strong| strong.points[0].clone());
        let others = all[1..].iter().map(|gpus| point(*gpus, sequences(*gpus)));
        let mut points: Vec<Point> = std::iter::once(first).chain(others).collect();
        let each = |p: &Point| p.best.as_ref().map(|b| b.tokens_per_second / p.gpus as f64);
        if let Some(first) = points.iter().find_map(each) {
            for p in &mut points {
                let own = each(p);
                p.best.iter_mut().for_each(|b| b.efficiency = own.unwrap_or(0.0) / first);
            }
        }
        curves.push(ScalingCurve { scaling, points });
    }
    if curves.iter().flat_map(|c| &c.points).all(|p| p.best.is_none()) {
        return Err(searching.search(fewest, batch, effort, |search, found| {
            searching.done();
            searching.none(search, &found)
        }));
    }
    Ok(curves)
}

/// Sequences of so many devices, where the fewest have so many, to the nearest one.
fn grown(batch: u64, devices: u64, fewest: u64) -> u64 {
    let product = u128::from(batch) * u128::from(devices) + u128::from(fewest / 2);
    u64::try_from(product / u128::from(fewest)).unwrap_or(u64::MAX)
}

fn best(searching: &Searching<'_>, gpus: u64, plan: &Planned, asked: &PlanRequest<'_>) -> BestPlan {
    let step = &plan.step;
    BestPlan {
        flags: asked.words(&plan.options),
        seconds: step.seconds,
        give_or_take: step.give_or_take,
        tokens_per_second: step.tokens_per_second,
        mfu: step.mfu,
        bytes: plan.bytes,
        efficiency: 1.0,
        goodput: goodput(&searching.machine, gpus, plan.checkpoint, step.seconds),
        chosen: match &asked.chosen(&plan.options)[..] {
            [] => "as given".into(),
            words => words.iter().map(|w| spelled(w)).collect::<Vec<_>>().join(" "),
        },
    }
}

/// # Errors
/// A reader that has left.
pub fn show(searching: &Searching<'_>, curves: &[ScalingCurve]) -> Result<(), Failure> {
    if searching.args.json {
        #[derive(Serialize)]
        struct CurveReport<'a> {
            machine: &'a str,
            curves: &'a [ScalingCurve],
        }
        let report = CurveReport { machine: &searching.machine.name, curves };
        return Ok(out!("{}\n", serde_json::to_string_pretty(&report).map_err(anyhow::Error::from)?)?);
    }
    let mut out = String::new();
    for (k, curve) in curves.iter().enumerate() {
        let how = if curve.scaling == "strong" { "the same batch for all" } else { "a batch that grows with the devices" };
        let _ = writeln!(out, "{}{} scaling on {}: {how}", if k > 0 { "\n" } else { "" }, curve.scaling, searching.machine.name);
        let _ = writeln!(
            out,
            "{:>8} {:>10} {:>9} {:>11} {:>10} {:>7} {:>11} {:>12} {:>10} {:>8} {:>10}  plan",
            "devices", "sequences", "step", "tokens/s", "efficiency", "MFU", "memory", "fails every", "save every", "goodput", "tokens/day"
        );
        curve.points.iter().for_each(|point| line(&mut out, point));
    }
    Ok(out!("{out}")?)
}

fn line(out: &mut String, point: &Point) {
    let Point { gpus, sequences, best, needs } = point;
    let _ = write!(out, "{gpus:>8} {sequences:>10} ");
    let Some(best) = best else {
        let why = needs.map_or("no plan splits so, or all are refused".into(), |n| format!("no plan fits: the smallest needs {}", size(n)));
        let _ = writeln!(out, "  {why}");
        return;
    };
    let _ = write!(
        out,
        "{:>9} {:>11.0} {:>8.1} % {:>5.1} % {:>11} ",
        time(best.seconds),
        best.tokens_per_second,
        100.0 * best.efficiency,
        100.0 * best.mfu,
        size(best.bytes)
    );
    let kept = best.goodput.as_ref().map_or(1.0, |g| g.part);
    let [fails, every, part] = match &best.goodput {
        Some(g) => [duration(g.between_failures), format!("{} steps", g.save_interval), format!("{:.0} %", 100.0 * g.part)],
        None => ["-".into(), "-".into(), "-".into()],
    };
    let day = best.tokens_per_second * 86400.0 * kept;
    let day = if day < 1e9 { format!("{:.1} M", day / 1e6) } else { format!("{:.1} B", day / 1e9) };
    let _ = writeln!(out, "{fails:>12} {every:>10} {part:>8} {day:>10}  {}", best.chosen);
}

#[cfg(test)]
mod tests {
    use super::grown;

    #[test]
    fn a_batch_grows_as_devices_do() {
        assert_eq!([2, 3, 4, 5].map(|devices| grown(5, devices, 2)), [5, 8, 10, 13]);
        assert_eq!(grown(1 << 60, 1 << 20, 1 << 10), u64::MAX);
        assert_eq!(grown((1 << 60) + 1, 4, 4), (1 << 60) + 1);
    }
}
