//! The plans of a search, as a part of the page of the best.

use super::PlanRequest;
use super::show::{NUMBERS, chosen, duration, left, rests, why};
use crate::pages::numbers::{bytes, count, of, percent};
use crate::simulate::time;
use maud::{Markup, html};
use planner::search::{Planned, Search, SearchResult};
use simulate::goodput::goodput;

/// Of the plans that are shown: times, memory, what takes the time, and why the others take longer.
pub fn plans(search: &Search<'_>, found: &SearchResult, asked: &PlanRequest<'_>, top: usize) -> Markup {
    let plans = &found.plans[..found.plans.len().min(top)];
    let SearchResult { considered, too_large, samples, compiled, .. } = found;
    let best = &plans[0];
    let lost = goodput(search.machine, search.space.ranks, best.checkpoint, best.step.seconds);
    let rests = rests(plans);
    html! {
        h2 { "Plans" }
        p {
            "Of " (of(*considered as u64, "plan")) " of " (of(search.space.ranks, "rank")) ", " (count(*too_large as f64)) " are expected to need more than "
            (bytes(search.budget)) "; " (of(*samples as u64, "sample")) " of layers were taken, and " (of(*compiled as u64, "plan")) " compiled whole. Left: "
            (left(found)) ". Below is the first of these."
        }
        div.scroll {
            table.data {
                thead {
                    tr {
                        th {} th.n { "a step" } th.n { "give or take" } th.n { "memory" } th.n { "tokens/s" } th.n { "MFU" } th.n { "kernels" }
                        th.n { "exchanges" } th.n { "bubble" } th { "plan, and why it takes longer than the first" }
                    }
                }
                tbody { @for (k, plan) in plans.iter().enumerate() { (row(k, plan, best, asked)) } }
            }
        }
        @match rests.is_empty() {
            true if plans.len() < 2 => {}
            true => p.faint.small { "No number of the machine that is a tenth off, to first order, changes which of these is the fastest." }
            false => p.faint.small {
                "Another of these is the fastest, to first order, if a number of the machine is a tenth "
                @for (k, (name, way, plan)) in rests.iter().take(NUMBERS).enumerate() { @if k > 0 { "; " } (way) ": " (name) " (plan " (plan + 1) ")" } "."
            }
        }
        @if let Some(g) = lost {
            p {
                "A job of so many devices fails every " (duration(g.between_failures)) " in the mean, and takes " (duration(g.restart))
                " until training goes on. With a checkpoint of " (bytes(g.bytes)) " every " (count(g.save_interval as f64)) " steps, "
                (percent(g.part)) " of its time trains and is not lost."
            }
        }
    }
}

fn row(k: usize, plan: &Planned, best: &Planned, asked: &PlanRequest<'_>) -> Markup {
    let step = &plan.step;
    let part = |seconds: f64| percent(seconds / step.seconds);
    let longer = 100.0 * (step.seconds / best.step.seconds - 1.0);
    html! {
        tr {
            td.n { (k + 1) } td.n { (time(step.seconds)) } td.n { (part(step.give_or_take)) } td.n { (bytes(plan.bytes)) }
            td.n { (count(step.tokens_per_second)) } td.n { (percent(step.mfu)) } td.n { (part(step.spent.kernels)) }
            td.n { (part(step.spent.exchanges)) } td.n { (part(step.spent.bubble)) }
            td.what { (chosen(asked, plan)) @if k > 0 { span.faint { (format!("{longer:+.1} %: ")) (why(&best.step, step)) } } }
        }
    }
}
