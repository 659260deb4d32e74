//! Where the time went, of a run that was profiled.

use crate::pages::numbers::{self, count, percent, short, time};
use crate::watch::log::RunStart;
use crate::watch::profile::Profiled;
use maud::{Markup, html};
use runtime::profile::breakdown::{ProfileRow, Rate, TimeShare};

/// Lines that have a row of their own.
const ROWS: usize = 20;

pub fn section(profile: &Profiled, began: Option<&RunStart>) -> Markup {
    let b = &profile.breakdown;
    let other = began.is_some_and(|began| began.id != profile.artifact);
    let end = |(rank, share): (u64, f64)| format!("{} on rank {rank}", percent(share));
    let waits = b.waits.filter(|_| b.ranks > 1).map(|(least, most)| format!("{} to {}", end(least), end(most)));
    html! {
        h2 { "Where the time goes" }
        p {
            "Steps " (b.steps.0) " to " (b.steps.1) " of " (time(profile.time)) ", mean over " (b.ranks) " rank" @if b.ranks != 1 { "s" } ": "
            (short(b.whole.ms)) " ms a step."
            @if let Some(c) = b.ceilings {
                " A rank's threads can do " (count(c.flops / 1e9)) " GFLOP/s in f32 and " (count(c.bytes / 1e9)) " GB/s."
            }
            @if let Some((arithmetic, memory)) = &b.bound {
                " " (percent(arithmetic.share)) " of the time is in kernels bound by arithmetic, " (percent(memory.share)) " in kernels bound by memory."
            }
            @if other { " It is of another artifact than the last run." }
        }
        div.scroll {
            table.data {
                thead {
                    tr {
                        th { "share" } th { "what" } th.n { "ms/step" } th.n { "least to most" } th.n { "calls" } th.n { "median ms" }
                        th.n { "GFLOP/s" } th.n { "of peak" } th.n { "GB/s" } th.n { "of peak" } th { "bound" }
                    }
                }
                tbody {
                    (sum(&b.whole, "the whole step", None))
                    (sum(&b.waiting, "waiting for communication, other streams and ranks", waits.as_deref()))
                    (sum(&b.between, "between commands: data, threads that start, the phases' ends", None))
                }
                tbody { (lines(&b.own)) }
                @if !b.beside.is_empty() {
                    thead { tr { th colspan="11" { "Beside it, waiting for other ranks included" } } }
                    tbody { (lines(&b.beside)) }
                }
            }
        }
    }
}

fn share(part: &TimeShare) -> Markup {
    html! { td.share { i style={ "width:" (format!("{:.2}", (100.0 * part.share).clamp(0.0, 100.0))) "%" } {} b { (percent(part.share)) } } }
}

fn milliseconds(part: &TimeShare) -> Markup {
    html! { td.n { (format!("{:.3}", part.ms)) } }
}

fn sum(part: &TimeShare, what: &str, below: Option<&str>) -> Markup {
    html! { tr.sum { (share(part)) td.what { (what) @if let Some(below) = below { span.faint { (below) } } } (milliseconds(part)) td colspan="8" {} } }
}

/// The first ones, and the rest as one.
fn lines(lines: &[ProfileRow]) -> Markup {
    let (shown, rest) = lines.split_at(lines.len().min(ROWS));
    let of = |f: fn(&TimeShare) -> f64| rest.iter().map(|l| f(&l.part)).sum();
    html! {
        @for line in shown { (row(line)) }
        @if !rest.is_empty() {
            (sum(&TimeShare { share: of(|p| p.share), ms: of(|p| p.ms) }, &numbers::of(rest.len() as u64, "other row"), None))
        }
    }
}

fn row(line: &ProfileRow) -> Markup {
    let rate = |rate: &Option<Rate>| {
        html! {
            td.n { @if let Some(r) = rate { (format!("{:.1}", r.per_second)) } }
            td.n { @if let Some(part) = rate.and_then(|r| r.of_peak) { (format!("{:.0} %", 100.0 * part)) } }
        }
    };
    let about = [line.places.as_str(), &line.bodies.join(", ")].into_iter().filter(|t| !t.is_empty()).collect::<Vec<_>>().join("; ");
    let calls = format!("{:.1}", line.calls);
    html! {
        tr {
            (share(&line.part))
            td.what title=[&line.symbol] { (line.name) span.faint { (about) } }
            (milliseconds(&line.part))
            td.n {
                @if let Some(((least, a), (most, b))) = line.ranks.filter(|(a, b)| a.0 != b.0) {
                    span title={ "rank " (least) " and rank " (most) } { (format!("{a:.3}–{b:.3}")) }
                }
            }
            td.n { (calls.trim_end_matches(".0")) }
            td.n { (format!("{:.4}", line.median_ms)) }
            (rate(&line.arithmetic))
            (rate(&line.memory))
            td { @if let Some(bound) = line.bound { (bound.name()) } }
        }
    }
}
