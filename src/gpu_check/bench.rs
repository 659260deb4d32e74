//! How fast kernels and steps are: against PyTorch (cuBLAS, its best attention, `torch.compile`) where that is
//! installed, and against the card's peak.
//!
//! Kernels are timed one by one, as many launches in a CUDA graph, on the operands that a step of training gives
//! them.

use super::check::Check;
use super::kernels::{is_narrow, ops, step};
use super::table::{Table, markdown};
use crate::costs::launches;
use anyhow::{Context, anyhow};
use codegen::costs::{Card, Predictor, usual};
use ir::dim::Dim;
use ir::graph::Value;
use ir::kernel::{Family, Kernel};
use ir::op::Op;
use ir::work::Work;
use runtime::artifact::{self, AcceptedArtifacts};
use runtime::checked::Instrumentation;
use runtime::gpu::cuda::Described;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::Write;
use std::process::{Command, Stdio};

/// What PyTorch takes for the same: reads [`BenchRequest`], writes [`TorchTimes`].
const TORCH: &str = include_str!("torch.py");

/// Models of one layer whose kernels are timed: products of 8192 x 8192 x 8192, and those of a GPT of 1.7 billion
/// parameters with heads of 128 and of 64.
const KERNELS: [(&str, &str); 3] = [
    ("llama", "-D hidden=8192 -D heads=64 -D ffn=8192 -D layers=1 -D seq=2048 -D vocab=1024"),
    ("gpt2", "-D hidden=2048 -D heads=16 -D layers=1 -D seq=2048 -D vocab=50304"),
    ("gpt2", "-D hidden=2048 -D heads=32 -D layers=1 -D seq=2048 -D vocab=50304"),
];
const SMALL: [(&str, &str); 1] = [("gpt2", "-D hidden=64 -D heads=1 -D layers=1 -D seq=16 -D vocab=256")];

/// A GPT-2 whose step is timed.
#[derive(Clone, Copy, Serialize)]
struct Gpt {
    vocab: u64,
    hidden: u64,
    heads: u64,
    layers: u64,
    seq: u64,
    batch: u64,
}

const GPT: Gpt = Gpt { vocab: 50_304, hidden: 2048, heads: 16, layers: 32, seq: 2048, batch: 4 };
const TINY: Gpt = Gpt { vocab: 256, hidden: 64, heads: 1, layers: 1, seq: 16, batch: 2 };

impl Gpt {
    fn parameters(&self) -> u64 {
        let Gpt { vocab, hidden, layers, seq, .. } = *self;
        vocab * hidden + seq * hidden + layers * (12 * hidden * hidden + 13 * hidden) + 2 * hidden
    }

    /// Of a step, as is usual: six per parameter of products and token, and twelve per layer, position and hidden
    /// element for attention, masked ones too.
    fn flops(&self) -> f64 {
        let products = self.parameters() - self.seq * self.hidden;
        let token = 6 * products + 12 * self.layers * self.hidden * self.seq;
        (token * self.batch * self.seq) as f64
    }
}

/// What a kernel computes, as PyTorch would be asked for it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
enum Shape {
    /// `count` products of m x k by k x n; whether each factor is stored with its contracted dim outermost (a) or
    /// innermost (b).
    Product { count: u64, m: u64, n: u64, k: u64, a_transposed: bool, b_transposed: bool },
    /// Heads of all sequences together.
    Attention { heads: u64, kv_heads: u64, seq: u64, d: u64, causal: bool, backward: bool },
    /// The rest is a matter of bytes.
    Bytes { what: String },
}

impl Shape {
    fn of(kernel: &Kernel) -> Shape {
        let body = &kernel.body;
        let bytes = || Shape::Bytes { what: format!("{}: {}", kernel.family.describe(), ops(kernel)) };
        let size = |dims: &mut dyn Iterator<Item = Dim>| dims.map(|d| body.dims.size(d)).product::<u64>();
        let dims = |v: Value| body[v].ty.dims.clone();
        // Dots in a kernel of loops are sums of products of elements, so bytes decide their time.
        if matches!(kernel.family, Family::Loops { .. }) {
            return bytes();
        }
        match body.values().map(|v| &body[v]).find(|n| matches!(n.op, Op::Dot { .. } | Op::Attention(_) | Op::AttentionGrad(..))) {
            Some(node) => match &node.op {
                Op::Dot { over, .. } => {
                    let (a, b) = (dims(node.args[0]), dims(node.args[1]));
                    let only = |own: &[Dim], other: &[Dim]| size(&mut own.iter().copied().filter(|d| !other.contains(d)));
                    let count = size(&mut a.iter().copied().filter(|d| b.contains(d) && !over.contains(d)));
                    let innermost = |own: &[Dim]| own.last().is_some_and(|d| over.contains(d));
                    let k = size(&mut over.iter().copied());
                    Shape::Product { count, m: only(&a, &b), n: only(&b, &a), k, a_transposed: !innermost(&a), b_transposed: innermost(&b) }
                }
                Op::Attention(x) | Op::AttentionGrad(x, _) => {
                    let heads = |v: Value, at: Dim| size(&mut dims(v).into_iter().filter(|d| *d != at && *d != x.d));
                    let (seq, d) = (body.dims.size(x.at), body.dims.size(x.d));
                    let (heads, kv_heads) = (heads(node.args[0], x.at), heads(node.args[1], x.keys));
                    Shape::Attention {
                        heads,
                        kv_heads,
                        seq,
                        d,
                        causal: x.scoring.ordered().is_some(),
                        backward: kernel.family == Family::AttentionGrad,
                    }
                }
                _ => bytes(),
            },
            None => bytes(),
        }
    }

    fn text(&self) -> String {
        match self {
            Shape::Product { count, m, n, k, a_transposed, b_transposed } => {
                let times = if *count > 1 { format!("{count} x ") } else { String::new() };
                let layout = [a_transposed, b_transposed].map(|t| if *t { "T" } else { "N" }).concat();
                format!("{times}{m} x {n} x {k} {layout}")
            }
            Shape::Attention { heads, kv_heads, seq, d, causal, backward } => {
                let (what, mask) = (if *backward { "gradients of attention" } else { "attention" }, if *causal { "causal " } else { "" });
                format!("{mask}{what}, {heads} heads of {d} ({kv_heads} of keys), {seq} positions")
            }
            Shape::Bytes { what } => what.clone(),
        }
    }
}

/// Kernels of one shape in one model, their launches of one kind together.
#[derive(Serialize, Deserialize)]
pub struct Timed {
    model: String,
    shape: Shape,
    kernels: u64,
    /// None without a card.
    seconds: Option<f64>,
    /// As `mcc dump --costs` does it; none if it cannot be said of one of the kernels.
    predicted: Option<f64>,
    /// The card for which it is.
    card: String,
    work: Work,
    /// PyTorch's, or those of a copy of as many bytes.
    reference: Option<f64>,
}

impl Timed {
    /// What this many seconds make of it.
    fn rate(&self, seconds: f64) -> String {
        match self.shape {
            Shape::Bytes { .. } => format!("{:.0} GB/s", self.work.bytes as f64 / seconds / 1e9),
            Shape::Product { .. } | Shape::Attention { .. } => format!("{:.1} TFLOP/s", self.work.flops as f64 / seconds / 1e12),
        }
    }
}

#[derive(Serialize)]
struct TimedStep {
    gpt: Gpt,
    parameters: u64,
    seconds: f64,
    tokens_per_s: f64,
    /// Share of the card's peak in bf16, if that is known.
    mfu: Option<f64>,
    reference: Option<f64>,
}

#[derive(Default, Serialize)]
pub struct Benchmarks {
    /// Why no times were taken.
    unmeasured: Option<&'static str>,
    /// Why there is no PyTorch to compare with.
    torch: Option<String>,
    kernels: Vec<Timed>,
    step: Option<TimedStep>,
    /// What could not be timed, and why.
    failed: Vec<(String, String)>,
}

#[derive(Serialize)]
struct BenchRequest<'a> {
    shapes: Vec<&'a Shape>,
    gpt: Gpt,
}

/// Seconds; none of what PyTorch cannot do.
#[derive(Deserialize)]
struct TorchTimes {
    shapes: Vec<Option<f64>>,
    /// Bytes read and written a second.
    copy: f64,
    gpt: Option<f64>,
}

/// What is timed kernel by kernel, and the GPT whose step is.
fn cases(check: &Check) -> (&'static [(&'static str, &'static str)], Gpt) {
    if check.unmeasured().is_none() || predicts(check) { (&KERNELS, GPT) } else { (&SMALL, TINY) }
}

/// Whether times are predicted, as there is no card.
fn predicts(check: &Check) -> bool {
    check.gpu.is_none() && !check.args.quick
}

/// The kernels of one model.
pub fn of_case(check: &Check, number: usize) -> anyhow::Result<Vec<Timed>> {
    let (cases, Gpt { batch, .. }) = cases(check);
    let (model, flags) = cases.get(number).ok_or_else(|| anyhow!("{} models are timed", cases.len()))?;
    let flags = format!("--dtype bf16 {flags} --micro-batch-size {batch} --global-batch-size {batch}");
    let artifact = artifact::read(&check.compile(model, &flags, &check.target)?, &AcceptedArtifacts::Anyones)?;
    let launches: BTreeMap<u32, Option<f64>> = if predicts(check) {
        launches(&artifact.job, 0).into_keys().map(|id| (id.0, None)).collect()
    } else {
        let mut task = Instrumentation::Time { launches: BTreeMap::new() };
        step(check, &artifact, &mut task).with_context(|| format!("{model} {flags}"))?;
        let Instrumentation::Time { launches } = task else { return Err(anyhow!("kernels were checked, not timed")) };
        launches.into_iter().map(|(id, seconds)| (id, Some(seconds))).collect()
    };
    let card = check.gpu.as_ref().and_then(|g| Card::named(&g.name)).unwrap_or_else(|| usual(&check.target));
    let mut predictor = Predictor::new(card);
    let mut shapes: BTreeMap<Shape, Timed> = BTreeMap::new();
    for (id, seconds) in launches {
        let kernel = &artifact.job.kernels[id as usize];
        let shape = Shape::of(kernel);
        if !is_narrow(kernel) && !matches!(shape, Shape::Bytes { .. }) {
            continue;
        }
        let none = Timed {
            model: (*model).into(),
            shape: shape.clone(),
            kernels: 0,
            seconds: seconds.map(|_| 0.0),
            predicted: Some(0.0),
            card: card.name.into(),
            work: Work { flops: 0, bytes: 0 },
            reference: None,
        };
        let timed = shapes.entry(shape).or_insert(none);
        let (work, entry) = (Work::of(kernel), &artifact.kernels[id as usize]);
        let predicted = entry.launch.as_ref().and_then(|launch| predictor.predict(kernel, &entry.name, artifact.ptx(entry), launch).ok());
        timed.predicted = timed.predicted.zip(predicted).map(|(sum, p)| sum + p.cost.seconds);
        timed.kernels += 1;
        timed.seconds = timed.seconds.zip(seconds).map(|(a, b)| a + b);
        timed.work = Work { flops: timed.work.flops + work.flops, bytes: timed.work.bytes + work.bytes };
    }
    Ok(shapes.into_values().collect())
}

pub fn run(check: &Check) -> anyhow::Result<Benchmarks> {
    let unmeasured = check.unmeasured();
    let (models, _) = cases(check);
    let gpt = if unmeasured.is_none() { GPT } else { TINY };
    let mut out = Benchmarks { unmeasured, ..Benchmarks::default() };
    for (k, (model, flags)) in models.iter().enumerate() {
        match check.case::<Vec<Timed>>("times", k) {
            Ok(timed) => out.kernels.extend(timed),
            Err(e) => out.failed.push((format!("kernels of {model} {flags}"), format!("{e:#}"))),
        }
    }
    match timed_step(check, gpt) {
        Ok(step) => out.step = Some(step),
        Err(e) => out.failed.push(("a step".into(), format!("{e:#}"))),
    }
    if unmeasured.is_some() {
        return Ok(out);
    }
    let shapes: Vec<&Shape> = out.kernels.iter().map(|k| &k.shape).collect();
    match torch(&BenchRequest { shapes, gpt }) {
        Ok(answered) => {
            for (timed, seconds) in out.kernels.iter_mut().zip(answered.shapes) {
                timed.reference = match &timed.shape {
                    Shape::Bytes { .. } => Some(timed.work.bytes as f64 / answered.copy),
                    // The reference is the time of one kernel, and several may share the shape.
                    Shape::Product { .. } => seconds.map(|s| s * timed.kernels as f64),
                    Shape::Attention { .. } => seconds,
                };
            }
            if let Some(step) = &mut out.step {
                step.reference = answered.gpt;
            }
        }
        Err(e) => out.torch = Some(format!("{e:#}")),
    }
    Ok(out)
}

fn torch(asked: &BenchRequest) -> anyhow::Result<TorchTimes> {
    let mut child = Command::new("python3")
        .args(["-c", TORCH])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("python3 does not start")?;
    child.stdin.take().ok_or_else(|| anyhow!("python3 reads nothing"))?.write_all(&serde_json::to_vec(asked)?)?;
    let ran = child.wait_with_output()?;
    if !ran.status.success() {
        let said = String::from_utf8_lossy(&ran.stderr);
        return Err(anyhow!("{}", said.trim().lines().last().unwrap_or("PyTorch ended").to_owned()));
    }
    serde_json::from_slice(&ran.stdout).context("PyTorch's answer")
}

/// The step of a whole model, by the metrics of a run: the median of its last steps.
fn timed_step(check: &Check, gpt: Gpt) -> anyhow::Result<TimedStep> {
    let Gpt { vocab, hidden, heads, layers, seq, batch } = gpt;
    let sizes = format!("-D vocab={vocab} -D hidden={hidden} -D heads={heads} -D layers={layers} -D seq={seq}");
    let artifact = check.compile("gpt2", &format!("--dtype bf16 {sizes} --micro-batch-size {batch} --global-batch-size {batch}"), &check.target)?;
    let (metrics, steps) = (check.work.join("metrics.jsonl"), if check.unmeasured().is_none() { 12 } else { 2 });
    let device = check.device.name();
    check.mcc(&format!("run {} --device {device} --data text.txt --steps {steps} --force --metrics {}", artifact.display(), metrics.display()))?;
    let lines = std::fs::read_to_string(&metrics)?;
    let times = lines.lines().map(|l| Ok(serde_json::from_str::<serde_json::Value>(l)?["step_ms"].as_f64().unwrap_or(f64::NAN)));
    let mut times: Vec<f64> = times.collect::<anyhow::Result<_>>()?;
    let mut last = times.split_off(times.len() / 2);
    last.sort_by(f64::total_cmp);
    let seconds = last.get(last.len() / 2).copied().ok_or_else(|| anyhow!("no step was run"))? / 1e3;
    let mfu = check.gpu.as_ref().and_then(Described::peak).map(|peak| gpt.flops() / seconds / peak);
    Ok(TimedStep { gpt, parameters: gpt.parameters(), seconds, tokens_per_s: (batch * seq) as f64 / seconds, mfu, reference: None })
}

fn milliseconds(seconds: Option<f64>) -> String {
    seconds.map_or("-".into(), |s| format!("{:.4}", s * 1e3))
}

impl Table for Benchmarks {
    fn table(&self) -> String {
        if let Some(why) = self.unmeasured {
            let kernels: u64 = self.kernels.iter().map(|k| k.kernels).sum();
            let failed: String = self.failed.iter().map(|(what, why)| format!("\nWRONG: {what}: {why}\n")).collect();
            let head = format!("Not measured: {why}. ");
            if self.kernels.iter().all(|k| k.seconds.is_some()) {
                return format!("## Benchmarks\n\n{head}{kernels} kernels and a step were run once, to see that this can be.\n{failed}");
            }
            let rows = self.kernels.iter().map(|k| {
                let rate = k.predicted.map_or("-".into(), |seconds| k.rate(seconds));
                vec![k.model.clone(), k.shape.text(), k.kernels.to_string(), milliseconds(k.predicted), rate]
            });
            let table = markdown("Benchmarks", &["model", "bf16 kernels", "number", "predicted, ms", "rate"], rows);
            let card = self.kernels.first().map_or("a card", |k| &k.card);
            return format!("{table}\n{head}Predicted for {card}. A step was run once, to see that this can be.\n{failed}");
        }
        let ratio = |reference: Option<f64>, seconds: f64| reference.map_or("-".into(), |r| format!("{:.0} %", 100.0 * r / seconds));
        let rows = self.kernels.iter().map(|k| {
            let seconds = k.seconds.unwrap_or(f64::NAN);
            vec![
                k.model.clone(),
                k.shape.text(),
                k.kernels.to_string(),
                milliseconds(k.seconds),
                milliseconds(k.predicted),
                k.rate(seconds),
                milliseconds(k.reference),
                ratio(k.reference, seconds),
            ]
        });
        let columns = ["model", "bf16 kernels", "number", "ms", "predicted, ms", "rate", "PyTorch or a copy, ms", "of its speed"];
        let mut out = markdown("Benchmarks", &columns, rows);
        if let Some(s) = &self.step {
            let mfu = s.mfu.map_or("unknown, as the card's peak is".into(), |m| format!("{:.1} %", 100.0 * m));
            out += &format!(
                "\nA step of a GPT-2 of {:.2} B parameters, {} tokens: {:.1} ms, {:.0} tokens/s, MFU {mfu}; of `torch.compile`'s speed: {}.\n",
                s.parameters as f64 / 1e9,
                s.gpt.batch * s.gpt.seq,
                s.seconds * 1e3,
                s.tokens_per_s,
                ratio(s.reference, s.seconds)
            );
        }
        for (what, why) in &self.failed {
            out += &format!("\nWRONG: {what}: {why}\n");
        }
        match &self.torch {
            Some(why) => out + &format!("\nWithout PyTorch to compare with: {why}.\n"),
            None => out,
        }
    }

    fn wrong(&self) -> usize {
        self.failed.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_timed_gpt_has_1_7_billion_parameters() {
        let billions = GPT.parameters() as f64 / 1e9;
        assert!((1.65..1.75).contains(&billions), "{billions}");
    }
}
