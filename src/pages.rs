//! Pages of HTML: one file each, which reads nothing else.

pub mod numbers;

use maud::{DOCTYPE, Markup, PreEscaped, html};
use numbers::{quoted, time};
use serde::Serialize;

const STYLE: &str = include_str!("pages/page.css");
const SHARED: &str = include_str!("pages/plot.js");
const PLOT: &str = include_str!("pages/uplot/uPlot.iife.min.js");
const PLOT_STYLE: &str = include_str!("pages/uplot/uPlot.min.css");
const PLOT_LICENSE: &str = include_str!("pages/uplot/LICENSE");
/// Nothing is fetched from anywhere.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'";

/// What a page draws when it is looked at.
pub struct Script {
    /// What it reads, as text of a `<script>` ([`json`]).
    pub data: String,
    /// Its words, which come behind those of uPlot and of `plot.js`.
    pub code: &'static str,
}

/// A page around what is in it; `made` is when, in seconds since 1970.
pub fn page(title: &str, header: &Markup, main: &Markup, script: Option<&Script>, made: f64) -> String {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta http-equiv="Content-Security-Policy" content=(POLICY);
                title { (title) }
                style { (PreEscaped(PLOT_STYLE)) (PreEscaped(STYLE)) }
            }
            body {
                header { (header) }
                main { (main) }
                footer.faint.small {
                    p { "Made by mcc " (env!("CARGO_PKG_VERSION")) " at " (time(made)) " UTC. Times are UTC." }
                    details.screen { summary { "Curves are drawn with uPlot" } pre { (PLOT_LICENSE) } }
                }
                @if let Some(Script { data, code }) = script {
                    script type="application/json" id="curves" { (PreEscaped(data)) }
                    script { (PreEscaped(PLOT)) }
                    script { (PreEscaped(SHARED)) }
                    script { (PreEscaped(code)) }
                }
            }
        }
    };
    page.into_string()
}

/// As the text of a `<script>`: nothing in it ends that, or begins anything.
pub fn json(data: &impl Serialize) -> String {
    let text = serde_json::to_string(data).expect("invariant: plain data with text keys");
    // JSON has these characters inside of strings only.
    let escapes = [('<', "\\u003c"), ('>', "\\u003e"), ('&', "\\u0026"), ('\u{2028}', "\\u2028"), ('\u{2029}', "\\u2029")];
    escapes.into_iter().fold(text, |text, (c, escape)| text.replace(c, escape))
}

/// What was typed, as a shell takes it.
pub fn command_line() -> String {
    let words: Vec<String> = std::env::args_os().skip(1).map(|w| w.to_string_lossy().into_owned()).collect();
    format!("mcc {}", quoted(&words))
}

/// Kinds have a colour each, as far as there are some.
pub fn colour(k: usize) -> String {
    format!("k{}", k % 9)
}
