//! A schedule as a picture: a row for each stage, a box for each pass with its microbatch, time to the right. Passes
//! side by side are drawn one after the other, as their time is counted.

use ir::program::BodyKind;
use maud::{Markup, PreEscaped, html};
use passes::report::pipeline_timeline::{StageTime, Timeline};

/// Pixels of a unit of time.
const UNIT: u64 = 24;
/// Pixels from a row to the next.
const ROW: u64 = 24;
/// Pixels for the name of a stage, before its row.
const LABEL: u64 = 72;
/// Pixels for the legend, below all rows.
const LEGEND: u64 = 40;

/// Colours: fill of a pass of the first virtual stage, and of others, which are lighter.
const STYLE: &str = "text{font:11px sans-serif;fill:#222}rect{stroke:#fff}\
                     .f{fill:#8db8e8}.b{fill:#f2b36b}.w{fill:#9fd39a}.f.later{fill:#cfe0f4}.b.later{fill:#f9dcb8}.w.later{fill:#d5ecd2}";

/// The class of a pass, its word in the legend, and its virtual stage; none of what is no pass.
fn drawn(kind: BodyKind) -> Option<([&'static str; 2], u32)> {
    match kind {
        BodyKind::Forward(v) => Some((["f", "forward"], v)),
        BodyKind::Backward(v) => Some((["b", "backward"], v)),
        BodyKind::Weight(v) => Some((["w", "gradients of weights"], v)),
        BodyKind::Prologue | BodyKind::Reduce | BodyKind::Update => None,
    }
}

/// A rectangle of a row, with what it says when pointed at.
fn boxed([x, y, width]: [u64; 3], class: &str, text: &str, title: &str) -> Markup {
    html! {
        rect class=(class) x=(x) y=(y) width=(width) height=(ROW - 2) { title { (title) } }
        text x=(x + width / 2) y=(y + 15) text-anchor="middle" pointer-events="none" { (text) }
    }
}

fn row(stage: &StageTime, y: u64) -> Markup {
    html! {
        @for (pass, ([class, word], v)) in stage.passes.iter().filter_map(|p| Some((p, drawn(p.kind)?))) {
            @let shade = if v == 0 { class.to_string() } else { format!("{class} later") };
            @let title = format!("{word} of microbatch {}, virtual stage {v}", pass.microbatch);
            (boxed([LABEL + UNIT * pass.begin, y, UNIT * pass.takes], &shade, &pass.microbatch.to_string(), &title))
        }
    }
}

/// The picture, as a file of SVG.
pub fn picture(timeline: &Timeline) -> String {
    let stages = timeline.stages.len() as u64;
    let [width, height] = [(LABEL + UNIT * timeline.length + 8).max(720), ROW * stages + LEGEND];
    let mut kinds: Vec<[&str; 2]> = vec![];
    let mut later = false;
    for (kind, v) in timeline.stages.iter().flat_map(|s| &s.passes).filter_map(|p| drawn(p.kind)) {
        later |= v > 0;
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    let markup = html! {
        svg xmlns="http://www.w3.org/2000/svg" width=(width) height=(height) viewBox=(format!("0 0 {width} {height}")) {
            style { (PreEscaped(STYLE)) }
            rect width=(width) height=(height) fill="#fff" {}
            @for (stage, y) in timeline.stages.iter().zip((0..).map(|k| k * ROW)) {
                text x="4" y=(y + 15) { "stage " (y / ROW) }
                (row(stage, y))
            }
            @for ([class, word], x) in kinds.iter().zip((0..).map(|k| LABEL + 150 * k)) {
                (boxed([x, ROW * stages + 10, UNIT], class, "", word))
                text x=(x + UNIT + 6) y=(ROW * stages + 25) { (word) }
            }
            @if later {
                text x=(LABEL + 150 * kinds.len() as u64) y=(ROW * stages + 25) { "lighter: a later virtual stage" }
            }
        }
    };
    markup.into_string() + "\n"
}
