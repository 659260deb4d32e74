//! The page of a predicted step.

use super::memory::{ComputeSlices, MemoryCurve};
use super::time;
use crate::failure::Failure;
use crate::pages::numbers::{bytes, count, of, percent};
use crate::pages::{self, Script, colour, json};
use crate::print::note;
use crate::report::axes;
use anyhow::Context;
use ir::program::Job;
use maud::{Markup, html};
use runtime::paths::write_whole;
use serde::Serialize;
use simulate::Options;
use simulate::machine::Machine;
use simulate::play::TimeBreakdown;
use simulate::step::{Row, Step};
use simulate::tape::Costs;
use simulate::timeline::{LinkLine, StageLine, TimeSpan, Timeline};
use std::io::Write;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

const SCRIPT: &str = include_str!("page.js");
/// Rows of a table that are seen without asking.
const ROWS: usize = 12;
/// Kinds of bodies, with their colours.
const KINDS: [(&str, usize); 6] = [("forward", 0), ("backward", 1), ("weight", 2), ("prologue", 6), ("reduce", 8), ("update", 7)];
/// Kinds that are passes of a microbatch: the first ones.
const PASSES: usize = 3;
/// The colour of the first exchange; passes have those before it.
const EXCHANGES: usize = 3;
/// Ticks of a step: times are whole numbers of them.
const TICKS: f64 = 1e6;

/// What a page is of.
pub struct Predicted<'a> {
    pub job: &'a Job,
    /// On which it was played, and how.
    pub machine: &'a Machine,
    pub options: Options,
    /// What came of it.
    pub step: &'a Step,
    /// Lines of the table of the plan that say how to come by it.
    pub commands: Vec<(&'static str, String)>,
    /// Other plans, beside which it was found.
    pub plans: Option<Markup>,
}

/// What the script draws.
#[derive(Serialize)]
struct StepData {
    /// Names and colours of kinds of calls, passes first.
    kinds: [(&'static str, usize); KINDS.len()],
    passes: usize,
    first_colour: usize,
    /// Seconds of a tick.
    tick: f64,
    /// The first and the last tick that is shown; the step is from 0 on.
    shown: (i64, i64),
    step: i64,
    stages: Vec<Stage>,
    exchanges: Vec<String>,
    links: Vec<LinkLine>,
    memory: Vec<MemoryCurve>,
    device: u64,
}

/// What a rank of a stage does. Spans are numbers one after the other, in threes: how much more than the number
/// before what is done has, how much later than the end before it begins, how long it takes.
#[derive(Serialize)]
struct Stage {
    /// Number in [`KINDS`], microbatch, virtual stage.
    calls: Vec<(usize, u32, u32)>,
    computes: Vec<i64>,
    exchanges: Vec<i64>,
}

impl Stage {
    fn of(line: StageLine, tick: f64) -> Stage {
        let StageLine { calls, computes, exchanges } = line;
        let calls = calls
            .into_iter()
            .map(|c| (KINDS.iter().position(|k| k.0 == c.kind).expect("invariant: bodies are of these kinds"), c.microbatch, c.chunk))
            .collect();
        Stage { calls, computes: packed(&computes, tick), exchanges: packed(&exchanges, tick) }
    }
}

fn packed(spans: &[TimeSpan], tick: f64) -> Vec<i64> {
    let (mut what, mut end) = (0, 0);
    let ticks = |seconds: f64| (seconds / tick).round() as i64;
    let threes = spans.iter().flat_map(|s| {
        let three = [i64::from(s.what) - what, ticks(s.start) - end, ticks(s.end) - ticks(s.start)];
        (what, end) = (i64::from(s.what), ticks(s.end));
        three
    });
    threes.collect()
}

impl Predicted<'_> {
    /// Writes the page.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn write(self, path: &Path) -> Result<(), Failure> {
        let page = self.page()?;
        write_whole(path, |file| file.write_all(page.as_bytes())).with_context(|| format!("`--html {}` cannot be written", path.display()))?;
        note!("wrote {}", path.display());
        Ok(())
    }

    fn page(self) -> Result<String, Failure> {
        let made = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |t| t.as_secs_f64());
        let (job, step) = (self.job, self.step);
        let data = self.data()?;
        let ranks = if step.ranks == 1 { "1 rank".into() } else { format!("{} ranks", count(step.ranks as f64)) };
        let header = html! {
            h1 { (job.model) }
            p.faint { span.state { "predicted" } " A step of " (ranks) " on " (step.machine) ", played from their programs; none of it has run." }
            (cards(step))
        };
        let main = html! {
            @if step.memory > step.device_memory {
                p.warn { "A rank needs " (bytes(step.memory)) ", and the device has " (bytes(step.device_memory)) "." }
            }
            @if !step.steady { p.warn { "Steps do not become alike: this is the last of those that were played." } }
            @if let Some(n) = &self.machine.note { p.warn { (n) } }
            @if let Some(plans) = &self.plans { (plans) }
            (timeline(&data))
            (stages(step))
            (waits(step))
            (memory(&data))
            (links(step, &data))
            (rows("Kernels", "family", step, &step.kernels, false))
            (rows("Exchanges", "collective and axes", step, &step.exchanges, true))
            (self.lines())
            (self.plan())
        };
        let script = Script { data: json(&data), code: SCRIPT };
        Ok(pages::page(&format!("{}: a predicted step", job.model), &header, &main, Some(&script), made))
    }

    fn data(&self) -> Result<StepData, Failure> {
        let (job, machine, step) = (self.job, self.machine, self.step);
        let mut computed = ComputeSlices::default();
        let line = Timeline::of(job, machine, self.options, step, &mut |slice| computed.add(slice)).map_err(anyhow::Error::from)?;
        let spans = || line.stages.iter().flat_map(|s| s.computes.iter().chain(&s.exchanges));
        let from = spans().map(|s| s.start).fold(0.0, f64::min);
        let to = spans().map(|s| s.end).fold(step.seconds, f64::max);
        let costs = Costs::new(job, machine, &self.options);
        let memory = computed.curves(job, &costs, (step.begin + from, step.begin + to));
        let tick = step.seconds / TICKS;
        let ticks = |seconds: f64| (seconds / tick).round() as i64;
        let links = line.links.into_iter().map(|l| LinkLine { busy: l.busy.iter().map(|b| (b * 1e4).round() / 1e4).collect(), ..l });
        Ok(StepData {
            kinds: KINDS,
            passes: PASSES,
            first_colour: EXCHANGES,
            tick,
            shown: (ticks(from), ticks(to)),
            step: ticks(step.seconds),
            exchanges: line.exchanges,
            links: links.collect(),
            stages: line.stages.into_iter().map(|s| Stage::of(s, tick)).collect(),
            memory,
            device: step.device_memory,
        })
    }

    /// Lines of the text, with their words.
    fn lines(&self) -> Markup {
        let text = |name: &str| -> Option<String> {
            let (file, number) = name.rsplit_once(':')?;
            let source = self.job.sources.iter().find(|s| s.name == file)?;
            let line = source.text.lines().nth(number.parse::<usize>().ok()?.checked_sub(1)?)?;
            Some(line.trim().to_owned())
        };
        let row = |row: &Row| {
            html! { tr { (share(row.exposed, self.step)) td.what { (row.name) @if let Some(text) = text(&row.name) { span.faint { code { (text) } } } } (seconds(row)) } }
        };
        html! {
            h2 { "Lines of the text" }
            (table(&html! { th { "share" } th { "line" } (seconds_head()) }, &self.step.lines, &row))
        }
    }

    fn plan(&self) -> Markup {
        let job = self.job;
        let batch = format!("{}, in {} of a data-parallel rank", of(job.global_batch, "sequence"), of(job.microbatches, "microbatch"));
        let mesh = if job.mesh.world() == 1 { "one rank".into() } else { axes(&job.mesh) };
        html! {
            h2 { "Plan" }
            div.scroll {
                table.data.plan {
                    tr { th { "Model" } td { (job.model) } }
                    tr { th { "Parameters" } td { (count(job.parameters() as f64)) } }
                    tr { th { "Mesh" } td { (mesh) } }
                    tr { th { "Batch" } td { (batch) } }
                    tr { th { "Machine" } td { (self.machine.name) } }
                    tr { th { "Settings" } td { code { (job.settings.iter().map(|(n, v)| format!("{n} = {v}")).collect::<Vec<_>>().join(", ")) } } }
                    @for (name, command) in &self.commands { tr { th { (name) } td { code { (command) } } } }
                }
            }
        }
    }
}

fn cards(step: &Step) -> Markup {
    let card = |name: &str, value: String, below: String| html! { div { dt { (name) } dd { (value) span { (below) } } } };
    let part = |seconds: f64| percent(seconds / step.seconds);
    html! {
        dl.cards {
            (card("A step", time(step.seconds), format!("give or take {} ({:.0} %)", time(step.give_or_take), 100.0 * step.give_or_take / step.seconds)))
            (card("Tokens per second", count(step.tokens_per_second), String::new()))
            (card("MFU", percent(step.mfu), format!("{:.1} TFLOP/s a rank", step.flops_per_second / 1e12)))
            (card("Memory of a rank", bytes(step.memory), format!("of {}, exchanges and the driver apart", bytes(step.device_memory))))
            (card("Exposed exchanges", part(step.spent.exchanges), "of a step, mean of the stages".into()))
            (card("Bubble", part(step.spent.bubble), "waits for other stages".into()))
        }
    }
}

/// A chart that the script draws.
fn chart(name: &str, title: &str, more: &Markup) -> Markup {
    html! { figure.chart.wide id=(name) { figcaption { span { (title) } (more) } div {} p.faint.small.said { " " } } }
}

fn timeline(data: &StepData) -> Markup {
    let has = |kind: usize| data.stages.iter().flat_map(|s| &s.calls).any(|c| c.0 == kind);
    let more = html! { label.screen { "drag to zoom, double-click for all" } };
    html! {
        h2 { "When stages do what" }
        noscript { p.warn { "This is drawn by a script, which is in this page and does not run." } }
        ul.key {
            @for (_, (kind, colour)) in KINDS.into_iter().enumerate().filter(|(k, _)| has(*k)) { li { i.(pages::colour(colour)) {} (kind) } }
        }
        @if !data.exchanges.is_empty() {
            ul.key { li.faint { "below it:" } @for (k, name) in data.exchanges.iter().enumerate() { li { i.(colour(EXCHANGES + k)) {} (name) } } }
        }
        (chart("timeline", "A rank of each stage", &more))
    }
}

fn stages(step: &Step) -> Markup {
    // Colours follow the order of `named`; time that a rank waits is grey.
    const COLOURS: [usize; 8] = [0, 5, 2, 3, 7, 4, 8, 6];
    let names: Vec<&str> = step.spent.named().iter().map(|n| n.0).collect();
    let bars = |stages: &[TimeBreakdown], from: usize| {
        html! {
            div.stages {
                @for (stage, spent) in stages.iter().enumerate() {
                    span { "stage " (from + stage) }
                    div.stack {
                        @for (k, (name, seconds)) in spent.named().into_iter().enumerate().filter(|(_, n)| n.1 > 0.0) {
                            i.(colour(COLOURS[k])) title={ (name) ": " (time(seconds)) } style={ "width:" (format!("{:.3}", 100.0 * seconds / step.seconds)) "%" } {}
                        }
                    }
                    span.n.total { (percent(spent.kernels / step.seconds)) " kernels" }
                }
            }
        }
    };
    let (first, rest) = step.stages.split_at(step.stages.len().min(ROWS));
    let is_there = |k: usize| step.stages.iter().any(|s| s.named()[k].1 > 0.0);
    html! {
        h2 { "What a rank of each stage does" }
        ul.key { @for (k, name) in names.iter().enumerate().filter(|(k, _)| is_there(*k)) { li { i.(colour(COLOURS[k])) {} (name) } } }
        (bars(first, 0))
        @if !rest.is_empty() { details { summary { (of(rest.len() as u64, "other stage")) } (bars(rest, first.len())) } }
        p.faint.small { "Of exchanges, copies, disk and host it is the time in which nothing is computed beside them." }
    }
}

/// A share of the step, as a bar.
fn share(seconds: f64, step: &Step) -> Markup {
    let part = seconds / step.seconds;
    html! { td.share { i style={ "width:" (format!("{:.2}", (100.0 * part).clamp(0.0, 100.0))) "%" } {} b { (percent(part)) } } }
}

fn waits(step: &Step) -> Markup {
    let row = |(name, seconds): &(String, f64)| html! { tr { (share(*seconds, step)) td.what { (name) } td.n { (time(*seconds)) } } };
    let gain =
        |(name, seconds): &(String, f64)| html! { tr { td.n { (percent(seconds / step.seconds)) } td.what { (name) } td.n { (time(*seconds)) } } };
    html! {
        h2 { "What the step waits for" }
        p { "Along the chain of things that each waited for the last, to the end of the step." }
        (table(&html! { th { "share" } th { "cause" } th.n { "seconds" } }, &step.path, &row))
        h3 { "What would gain most" }
        p { "If one number of the machine were a tenth better, to first order: another chain may be the longest then." }
        (table(&html! { th.n { "gain" } th { "number" } th.n { "seconds" } }, &step.limits, &gain))
    }
}

fn memory(data: &StepData) -> Markup {
    let most = (0..data.memory.len()).max_by_key(|k| (data.memory[*k].planned, std::cmp::Reverse(*k))).unwrap_or(0);
    let more = html! {
        label.screen {
            "stage "
            select id="stage" { @for (k, m) in data.memory.iter().enumerate() { option value=(k) selected[k == most] { (k) ", " (bytes(m.planned)) } } }
        }
    };
    html! {
        h2 { "Memory in use" }
        p { "Of a rank's device, by what bytes are for and the line of the text that they are due to: the most of any kernel in each part of the step." }
        (chart("memory", "Memory of a rank", &more))
    }
}

fn links(step: &Step, data: &StepData) -> Markup {
    let row = |row: &Row| {
        let rate = if row.seconds > 0.0 { format!("{:.1}", row.bytes / row.seconds / 1e9) } else { String::new() };
        html! { tr { (share(row.exposed, step)) td.what { (row.name) } (seconds(row)) td.n { (bytes(row.bytes as u64)) } td.n { (rate) } } }
    };
    html! {
        h2 { "Communication by link" }
        @if step.links.is_empty() && data.links.is_empty() {
            p { "Nothing is communicated." }
        } @else {
            @if !data.links.is_empty() { (chart("links", "Ranks that use a link (%)", &html! {})) }
            @if !step.links.is_empty() {
                p.faint.small { "An exchange that passes several links is counted for the one that takes most of its time." }
                (table(&html! { th { "share" } th { "link" } (seconds_head()) th.n { "bytes of a rank" } th.n { "GB/s" } }, &step.links, &row))
            }
        }
    }
}

fn rows(title: &str, what: &str, step: &Step, all: &[Row], has_bytes: bool) -> Markup {
    let row = |row: &Row| {
        html! { tr { (share(row.exposed, step)) td.what { (row.name) } (seconds(row)) @if has_bytes { td.n { (bytes(row.bytes as u64)) } } } }
    };
    let head = html! { th { "share" } th { (what) } (seconds_head()) @if has_bytes { th.n { "bytes of a rank" } } };
    html! { @if !all.is_empty() { h2 { (title) } (table(&head, all, &row)) } }
}

fn seconds_head() -> Markup {
    html! { th.n { "exposed" } th.n { "by itself" } th.n { "calls" } }
}

fn seconds(row: &Row) -> Markup {
    html! { td.n { (time(row.exposed)) } td.n { (time(row.seconds)) } td.n { (count(row.calls)) } }
}

/// The first rows of all, and the others for those who ask.
fn table<T>(head: &Markup, all: &[T], row: &dyn Fn(&T) -> Markup) -> Markup {
    let (first, rest) = all.split_at(all.len().min(ROWS));
    let part = |rows: &[T]| html! { div.scroll { table.data { thead { tr { (head) } } tbody { @for one in rows { (row(one)) } } } } };
    html! {
        (part(first))
        @if !rest.is_empty() { details { summary { (of(rest.len() as u64, "other row")) } (part(rest)) } }
    }
}
