//! Why the collectives of a line are there, as a picture: a row for each change of sharding. From left to right: what the
//! op before it reads, what that op makes, the collective, and the value as it is read.

use maud::{Markup, PreEscaped, html};
use passes::report::explain::Tensor;
use passes::report::reshards::ShardingChange;

/// Pixels of a line of text.
const LINE: u64 = 15;
/// Pixels around the text of a box.
const PAD: u64 = 8;
/// Pixels between boxes of a column, and above a row's boxes.
const GAP: u64 = 10;
/// Where the columns begin, and how wide their boxes are: operands, the value before, the collective, the value after, readers.
const COLUMNS: [(u64, u64); 5] = [(8, 230), (278, 230), (548, 130), (718, 230), (988, 130)];
const WIDTH: u64 = 1126;
/// Most operands that are drawn.
const MOST: usize = 4;

const STYLE: &str = "text{font:12px sans-serif;fill:#222}.name{font-weight:bold}.split{fill:#1c5d99}.partial{fill:#b03a2e}\
                     rect{fill:#f3f5f7;stroke:#c5ccd3}.collective{fill:#fbe3c5;stroke:#d9a05b}path{stroke:#777;fill:none}";

/// A line of a box, with its class.
type Words = (String, &'static str);

/// A tensor's name, its dims one by one, and what is not summed yet.
fn of_tensor(tensor: &Tensor) -> Vec<Words> {
    let dims = tensor.dims.trim_matches(['[', ']']).split(", ").filter(|d| !d.is_empty());
    let dims = dims.map(|d| (d.to_string(), if d.contains(" / ") { "split" } else { "" }));
    let partial = (!tensor.partial.is_empty()).then(|| (format!("partial over {}", tensor.partial), "partial"));
    std::iter::once((tensor.name.clone(), "name")).chain(dims).chain(partial).collect()
}

fn height(lines: &[Words]) -> u64 {
    LINE * lines.len() as u64 + PAD
}

/// A box with its lines, at the top of `y`.
fn boxed((x, width): (u64, u64), y: u64, lines: &[Words], class: &str) -> Markup {
    html! {
        rect class=(class) x=(x) y=(y) width=(width) height=(height(lines)) rx="3" {}
        @for ((words, class), y) in lines.iter().zip((0..).map(|k| y + LINE * (k + 1))) {
            text class=(class) x=(x + PAD) y=(y) { (words) }
        }
    }
}

/// From the right edge of a column to the left edge of the next.
fn arrow(column: usize, from: u64, to: u64) -> Markup {
    let (x, width) = COLUMNS[column];
    let (begin, end) = (x + width, COLUMNS[column + 1].0);
    html! { path marker-end="url(#head)" d=(format!("M{begin} {from}L{} {to}", end - 6)) {} }
}

/// A row of the picture from `top` on, and where it ends.
fn row(change: &ShardingChange, top: u64) -> (Markup, u64) {
    let mut operands: Vec<Vec<Words>> = change.operands.iter().take(MOST).map(of_tensor).collect();
    if let Some(more) = change.operands.len().checked_sub(MOST).filter(|n| *n > 0) {
        operands.push(vec![(format!("and {more} more"), "")]);
    }
    let first = top + LINE + GAP;
    let mut at = first;
    let mut places: Vec<(u64, Vec<Words>)> = vec![];
    for lines in operands {
        let next = at + height(&lines) + GAP;
        places.push((at, lines));
        at = next;
    }
    let before = of_tensor(&change.before);
    let after = [vec![("read as".to_string(), "name")], of_tensor(&change.after).split_off(1)].concat();
    let collective = [(change.kind.to_string(), "name"), (format!("over {}", change.axes), "")];
    let mut readers: Vec<Words> = vec![("read by".to_string(), "name")];
    readers.extend(change.readers.iter().map(|name| (name.to_string(), "")));
    let tallest = [&before[..], &after, &collective, &readers].map(height).into_iter().max().unwrap_or(0);
    let end = at.saturating_sub(GAP).max(first + tallest);
    let middle = first + (end - first) / 2;
    let top_of = |lines: &[Words]| middle - height(lines) / 2;
    let markup = html! {
        text x=(COLUMNS[0].0) y=(top + LINE) { (change.phase) @if !change.why.is_empty() { ": " (change.why) } }
        @for (y, lines) in &places {
            (boxed(COLUMNS[0], *y, lines, ""))
            (arrow(0, y + height(lines) / 2, middle))
        }
        (boxed(COLUMNS[1], top_of(&before), &before, ""))
        (arrow(1, middle, middle))
        (boxed(COLUMNS[2], top_of(&collective), &collective, "collective"))
        (arrow(2, middle, middle))
        (boxed(COLUMNS[3], top_of(&after), &after, ""))
        (arrow(3, middle, middle))
        (boxed(COLUMNS[4], top_of(&readers), &readers, ""))
    };
    (markup, end + 2 * GAP)
}

/// The picture, as a file of SVG.
pub fn picture(changes: &[ShardingChange]) -> String {
    let (mut rows, mut height) = (vec![], GAP);
    for change in changes {
        let (markup, end) = row(change, height);
        rows.push(markup);
        height = end;
    }
    let markup = html! {
        svg xmlns="http://www.w3.org/2000/svg" width=(WIDTH) height=(height) viewBox=(format!("0 0 {WIDTH} {height}")) {
            style { (PreEscaped(STYLE)) }
            defs {
                marker id="head" viewBox="0 0 8 8" refX="2" refY="4" markerWidth="7" markerHeight="7" orient="auto" {
                    path d="M0 0L8 4L0 8z" style="fill:#777" {}
                }
            }
            rect width=(WIDTH) height=(height) style="fill:#fff;stroke:none" {}
            @for row in &rows { (row) }
        }
    };
    markup.into_string() + "\n"
}
