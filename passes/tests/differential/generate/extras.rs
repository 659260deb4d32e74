//! What texts have beside a stream and its layers: metrics of inputs, rows that meet across the batch, more losses
//! and outputs, running sums, `argmax`, states.
//!
//! Dice of their own draw all this, so that what it stands beside stays as it is.

use super::{BatchNeeds, Rng, Writer};
use ir::random::mix;

/// The random generator of extra features, and the chosen ones.
pub struct Extras {
    dice: Rng,
    pub whole: BatchNeeds,
}

impl Extras {
    pub fn new(seed: u64) -> Extras {
        Extras { dice: Rng(mix(!seed ^ 6)), whole: BatchNeeds::default() }
    }
}

/// An input's value as the text has it, and its dims beside the batch.
type Value = (String, Vec<&'static str>);

impl Writer {
    /// Has `write` draw from the random generator of extra features.
    pub(super) fn extra<T>(&mut self, write: impl FnOnce(&mut Writer) -> T) -> T {
        std::mem::swap(&mut self.dice, &mut self.extras.dice);
        let out = write(self);
        std::mem::swap(&mut self.dice, &mut self.extras.dice);
        out
    }

    fn microbatches(&self) -> u64 {
        self.case.global_batch / (self.case.dp * self.case.micro_batch)
    }

    /// Whether to write a feature that several microbatches rule out, mostly if there is only one.
    fn whole_batch(&mut self, percent: u64) -> bool {
        let percent = if self.microbatches() == 1 { percent } else { 1 + percent / 20 };
        self.dice.chance(percent)
    }

    fn of_whole_batch(&mut self, percent: u64) -> bool {
        let meets = self.whole_batch(percent);
        self.extras.whole.meets |= meets;
        meets
    }

    /// Metrics and states of data alone.
    pub(super) fn beside_entry(&mut self) {
        if self.dice.chance(30) {
            self.line("input measured: [batch];");
        }
        if self.dice.chance(20) {
            let at = self.at();
            self.line(format!("input marked: bool[{at}];"));
        }
        if self.dice.chance(40) {
            for k in 0..1 + self.dice.below(2) {
                let metric = self.of_data();
                self.line(format!("metric of_data{k} = {metric};"));
            }
        }
        if self.dice.chance(12) {
            let (value, _) = self.data();
            let next = if self.exact() { "minimum(seen + " } else { "0.5 * (seen + " };
            let end = if self.exact() { ", 9)" } else { ")" };
            self.line("state seen: [] = 0;");
            self.line(format!("update seen = {next}sum({value}){end};"));
            let use_of = self.dice.pick2("metric so_far = seen;", "x = real(x * (1 + abs(seen)));");
            self.line(if self.exact() { "metric so_far = seen;" } else { use_of });
        }
    }

    /// An input as floats.
    fn data(&mut self) -> Value {
        let at: Vec<&'static str> = if self.sequences() { vec!["seq"] } else { vec![] };
        let mut all: Vec<Value> = vec![];
        let mut known = |declared: &str, value: &str, dims: Vec<&'static str>| {
            if self.text.contains(declared) {
                all.push((value.into(), dims));
            }
        };
        known("input tokens", "f32(tokens)", at.clone());
        known("input feats", "feats", [at.clone(), vec!["features"]].concat());
        known("input weight", "weight", at.clone());
        known("input measured", "measured", vec![]);
        known("input marked", "f32(marked)", at);
        let k = self.dice.below(all.len() as u64) as usize;
        all.swap_remove(k)
    }

    fn of_data(&mut self) -> String {
        let (e, dims) = self.data();
        let whole = if self.exact() { "sum" } else { self.dice.pick2("sum", "mean") };
        if self.of_whole_batch(30) {
            return match self.dice.below(4) {
                0 => format!("max({e})"),
                1 => format!("{whole}({e}) + max({e})"),
                2 => format!("{whole}(cumsum({e}, over: batch))"),
                _ => format!("{whole}(f32(argmax({e}, over: batch)))"),
            };
        }
        let over = dims.first().copied();
        match (self.dice.below(8), over) {
            (0, Some(d)) => format!("{whole}(max({e}, over: {d}))"),
            (1, Some(d)) => format!("{whole}({e}) + {whole}(max({e}, over: {d}))"),
            (2, Some(d)) => format!("{whole}(f32(argmax({e}, over: {d})))"),
            (3, Some(d)) => format!("{whole}(cumsum({e}, over: {d}))"),
            (4, _) if !self.exact() => format!("sum({e}) / (1 + sum(abs({e})))"),
            (5, _) if !self.exact() => format!("sqrt(mean({e} * {e}))"),
            (6, _) => format!("sum(abs(sum({e}, over: batch)))"),
            (7, _) => format!("{whole}(f32({e} > 0)) + {whole}({e})"),
            _ => format!("{whole}({e})"),
        }
    }

    /// Writes a function from the stream to the stream for some layers; returns its name.
    pub(super) fn extra_block(&mut self) -> Option<&'static str> {
        if !self.dice.chance(40) {
            return None;
        }
        self.line("fn beside(x) {");
        let anywhere: &[fn(&mut Writer)] = &[Self::ranked, Self::brightest, Self::centred, Self::codebook, Self::scaled_by_state];
        let over_seq: &[fn(&mut Writer)] = &[Self::running_in_heads, Self::foremost, Self::hard_attention, Self::before_and_after];
        let n = anywhere.len() + if self.sequences() { over_seq.len() } else { 0 };
        if self.whole_batch(25) {
            self.across();
        } else {
            let k = self.dice.below(n as u64) as usize;
            anywhere.get(k).unwrap_or_else(|| &over_seq[k - anywhere.len()])(self);
        }
        self.line("}");
        Some("beside")
    }

    /// Running sums over dims that axes may split.
    fn ranked(&mut self) {
        match self.dice.below(4) {
            0 => self.line("return cumsum(x, over: hidden);"),
            1 => self.line("return linear(cumsum(linear(x, hidden, ffn) as a, over: ffn), ffn, hidden) as b;"),
            2 => {
                self.line("dim mirror = hidden;");
                self.line("return view(cumsum(view(x, hidden -> mirror), over: mirror), mirror -> hidden) - x;");
            }
            _ => {
                self.line("let h = cumsum(linear(x, hidden, [kv, group]) as a, over: kv);");
                self.line("return linear(h, [kv, group], hidden) as b;");
            }
        }
    }

    /// A function of the greatest element of a row.
    fn brightest(&mut self) {
        match self.dice.below(4) {
            0 => self.line("return x + where(one_hot(argmax(x, over: hidden), hidden), x, 0);"),
            1 => {
                self.line("let h = linear(x, hidden, ffn) as a;");
                self.line("let y = where(one_hot(argmax(h, over: ffn), ffn), h, 0);");
                self.line("return linear(y, ffn, hidden) as b;");
            }
            2 => {
                self.line("param row: [hidden] ~ normal(0.02);");
                self.line("return x * row[hidden: argmax(x, over: hidden)];");
            }
            _ => self.line("return x + x[hidden: argmax(stop_gradient(abs(x)), over: hidden)];"),
        }
    }

    /// A state that follows a mean of the stream.
    fn centred(&mut self) {
        let at = self.at();
        self.line("state centre: [hidden] = 0;");
        let next = match self.exact() {
            true => self.dice.pick2("minimum(maximum(sum(x, over: [AT]), -1), 1)", "centre + sign(sum(x, over: [AT]))"),
            false => self.dice.pick(&[
                "0.75 * centre + 0.25 * mean(x, over: [AT])",
                "sqrt(0.5 * centre ^ 2 + 0.5 * mean(x * x, over: [AT]))",
                "centre + tanh(sum(x, over: [AT]))",
            ]),
        };
        self.line(format!("update centre = {};", next.replace("AT", at)));
        let back = self.dice.pick2("return x - centre;", "return x * stop_gradient(centre);");
        self.line(back);
    }

    /// Rows of a state, chosen by the stream, which move towards the tokens that chose them.
    fn codebook(&mut self) {
        let at = self.at();
        self.line("state codes: [classes, hidden] = 0;");
        self.line("let pick = argmax(stop_gradient(dot(x, codes, over: hidden)), over: classes);");
        self.line("let code = codes[classes: pick];");
        let moved = format!("dot(f32(one_hot(pick, classes)), stop_gradient(x - code), over: [{at}])");
        self.line(match self.exact() {
            true => format!("update codes = codes + sign({moved});"),
            false => format!("update codes = codes + 0.25 * {moved};"),
        });
        let back = self.dice.pick(&["x + code", "x + stop_gradient(code - x)", "code - x"]);
        self.line(format!("return {back};"));
    }

    /// A number that is kept from step to step, and one that counts steps.
    fn scaled_by_state(&mut self) {
        self.line("state level: [] = 1;");
        self.line("state steps: [] = 0;");
        self.line("update steps = steps + 1;");
        if self.exact() {
            self.line("update level = maximum(level, minimum(sum(x), 2));");
            self.line("return x * minimum(maximum(level, -1), 1);");
        } else {
            let what = self.dice.pick2("mean(x * x)", "mean(max(x, over: hidden))");
            self.line(format!("update level = level + ({what} - level) / (1 + abs(steps));"));
            self.line("return x * rsqrt(1 + level * level);");
        }
    }

    /// Running sums over positions of what heads hold, as linear attention has them.
    fn running_in_heads(&mut self) {
        self.line("let k = linear(x, hidden, [kv, head_dim]) as k;");
        self.line("let v = linear(x, hidden, kv) as v;");
        let small = if self.exact() { "minimum(maximum(k * expand(v, head_dim), -1), 1)" } else { "k * expand(v, head_dim)" };
        self.line(format!("let s = cumsum({small}, over: seq);"));
        self.line("return linear(s, [kv, head_dim], hidden) as o;");
    }

    /// The greatest position along the sequence, per channel or by one channel.
    fn foremost(&mut self) {
        if !self.distinct {
            return self.ranked();
        }
        self.line("dim places = seq;");
        self.line("let y = view(x, seq -> places);");
        let best = self.dice.pick2("argmax(stop_gradient(x), over: seq)", "argmax(stop_gradient(x[hidden: 0]), over: seq)");
        self.line(format!("let best = {best};"));
        self.line("return x - y[places: best];");
    }

    /// Each position takes the one that fits it best.
    fn hard_attention(&mut self) {
        if !self.distinct {
            return self.brightest();
        }
        self.line("dim keys = seq;");
        self.line("let q = linear(x, hidden, head_dim) as q;");
        self.line("let k = view(linear(x, hidden, head_dim) as k, seq -> keys);");
        self.line("let best = argmax(stop_gradient(dot(q, k, over: head_dim)), over: keys);");
        self.line("return view(x, seq -> keys)[keys: best];");
    }

    /// Sums of all before and all behind a position.
    fn before_and_after(&mut self) {
        self.line("let before = cumsum(x, over: seq);");
        self.line("let behind = sum(x, over: seq) - before;");
        let back = self.dice.pick2("before - behind", "before + act(behind)");
        self.line(format!("return {back};"));
    }

    /// Rows of the batch read each other.
    fn across(&mut self) {
        let at = self.at();
        if self.dice.chance(30) {
            self.extras.whole.sums = true;
            let mean = if self.exact() { "minimum(maximum(sum(x, over: [AT]), -1), 1)" } else { "mean(x, over: [AT])" };
            self.line(format!("let middle = {};", mean.replace("AT", at)));
            let back = if self.exact() { "x - middle" } else { "(x - middle) * rsqrt(1 + middle * middle)" };
            self.line(format!("return {back};"));
            return;
        }
        self.extras.whole.meets = true;
        match self.dice.below(if self.distinct { 8 } else { 6 }) {
            0 => self.line("return x - x[batch: 0];"),
            1 => self.line("return cumsum(x, over: batch);"),
            2 => {
                self.line("dim rows = batch;");
                self.line("let s = dot(x, view(x, batch -> rows), over: hidden);");
                let weight = if self.exact() { "minimum(maximum(s, -1), 1)" } else { "softmax(s, over: rows)" };
                self.line(format!("return dot({weight}, view(x, batch -> rows), over: rows);"));
            }
            3 if self.case.global_batch == 1 => self.line("return x - stop_gradient(x[batch: 0]);"),
            3 => {
                self.line("dim one = 1, others = batch - 1;");
                self.line("return concat(slice(x, batch -> one, at: batch - 1), slice(x, batch -> others), [one, others] -> batch);");
            }
            4 => {
                self.line("dim rows = batch;");
                self.line("return x + view(x, batch -> rows)[rows: batch - 1 - index(batch)];");
            }
            5 => {
                self.line(format!("state before: [{at}, hidden] = 0;"));
                self.line("update before = x;");
                self.line("return x - before;");
            }
            6 => self.line("return x - max(x, over: batch);"),
            _ => {
                self.line("dim rows = batch;");
                self.line("return x + view(x, batch -> rows)[rows: argmax(stop_gradient(x), over: batch)];");
            }
        }
    }

    /// Losses, metrics, outputs and states at the end.
    pub(super) fn beside_head(&mut self) {
        if self.dice.chance(30) {
            for _ in 0..1 + self.dice.below(2) {
                self.second_loss();
            }
        }
        if self.of_whole_batch(25) {
            self.contrast();
        }
        if self.dice.chance(30) {
            self.metric_of_stream();
        }
        if self.dice.chance(15) {
            self.state_of_end();
        }
        if self.dice.chance(30) {
            let all = ["x", "logits", "guess", "pooled", "tokens", "feats", "kept0", "side", "scores"];
            let there: Vec<&str> = all.into_iter().filter(|name| self.is_declared(name)).collect();
            let some: Vec<&str> = there.into_iter().filter(|_| self.dice.chance(60)).collect();
            if let [first, rest @ ..] = some.as_slice() {
                self.line(format!("output {first};"));
                if !rest.is_empty() {
                    self.line(format!("output {};", rest.join(", ")));
                }
            }
        }
    }

    fn is_declared(&self, name: &str) -> bool {
        ["let", "input"].iter().any(|word| [" ", ":"].iter().any(|end| self.text.contains(&format!("\n  {word} {name}{end}"))))
    }

    /// Another loss, of the stream or of a head of its own.
    fn second_loss(&mut self) {
        let at = self.at();
        // Losses of the same name share a report.
        let name = self.dice.pick(&["second", "second", "fit", "third"]);
        let loss = if self.exact() {
            self.dice.pick(&[
                "sum(side)",
                "sum(cumsum(minimum(maximum(side, -1), 1), over: classes))",
                "sum(max(side, over: classes))",
                "sum(where(one_hot(argmax(side, over: classes), classes), side, 0))",
                "sum(x * x)",
            ])
        } else {
            let earth = "mean((cumsum(softmax(side, over: classes), over: classes) - cumsum(softmax(ranks, over: classes), over: classes)) ^ 2)";
            let loss = self.dice.pick(&[
                "0.5 * mean(side * side)",
                "mean(log_sum_exp(side, classes))",
                "mean(cross_entropy(side, argmax(stop_gradient(side), over: classes), classes))",
                "0.1 * mean(abs(cumsum(x, over: hidden)))",
                "mean(max(side, over: classes))",
                "sum(tanh(side) * 0.25)",
                earth,
            ]);
            if loss == earth && !self.text.contains("input ranks") {
                self.line(format!("input ranks: [{at}, classes];"));
            }
            loss
        };
        if loss.contains("side") && !self.is_declared("side") {
            self.line("let side = linear(x, hidden, classes) as side;");
        }
        self.line(format!("loss {name} = {loss};"));
    }

    /// Each row of the batch against all others.
    fn contrast(&mut self) {
        self.line("dim others = batch;");
        let row = if self.sequences() { self.dice.pick2("sum(x, over: seq)", "x[seq: 0]") } else { "x" };
        self.line(format!("let row = {row};"));
        if self.text.contains("input measured") && self.dice.chance(30) {
            self.line("let rival = expand(measured, hidden);");
        } else if self.dice.chance(40) {
            self.line("dim mirror = hidden;");
            self.line("let rival = view(linear(row, hidden, mirror) as rival, mirror -> hidden);");
        } else {
            self.line("let rival = row;");
        }
        self.line("let scores = dot(row, view(rival, batch -> others), over: hidden);");
        let loss = match self.exact() {
            true => self.dice.pick(&["sum(scores)", "sum(where(one_hot(index(batch), others), scores, 0))", "sum(maximum(scores, 0))"]),
            false => self.dice.pick(&[
                "mean(cross_entropy(scores, index(batch), others))",
                "token_loss(scores, index(batch), over: others)",
                "0.1 * mean(where(one_hot(index(batch), others), 0, scores) ^ 2)",
                "mean(log_sum_exp(scores, batch)) + mean(log_sum_exp(scores, others))",
            ]),
        };
        self.line(format!("loss contrast = {loss};"));
        if self.dice.chance(40) {
            self.line("metric found = mean(f32(argmax(scores, over: others) == index(batch)));");
        }
    }

    fn metric_of_stream(&mut self) {
        let metric = match self.exact() {
            true if self.dice.chance(15) => "abs(sum(x))",
            true => self.dice.pick(&[
                "sum(max(x, over: hidden))",
                "sum(cumsum(x, over: hidden))",
                "sum(f32(argmax(x, over: hidden)))",
                "sum(x * x) + sum(x)",
                "sum(f32(x > 0))",
            ]),
            false if self.dice.chance(20) => self.dice.pick2("exp(-mean(x * x))", "sum(x) / (1 + sum(abs(x)))"),
            false => self.dice.pick(&[
                "mean(max(x, over: hidden))",
                "mean(cumsum(x, over: hidden))",
                "mean(f32(argmax(x, over: hidden)))",
                "mean(x * x) + sum(x)",
                "mean(f32(x > 0))",
                "0.5 * sum(tanh(x)) - mean(x)",
            ]),
        };
        self.line(format!("metric of_stream = {metric};"));
    }

    /// States of weights, of a loss, of another state.
    fn state_of_end(&mut self) {
        let weights = self.text.contains("\n  param wte");
        match self.dice.below(6) {
            0 if weights => {
                self.line("state slow: [vocab, hidden] = 0;");
                let next = if self.exact() { "wte - slow" } else { "0.75 * slow + 0.25 * wte" };
                self.line(format!("update slow = {next};"));
                self.line("metric far = sum(abs(wte - slow));");
            }
            1 => {
                let of = if self.exact() { "minimum(maximum(sum(x), -1), 1)" } else { "mean(x * x)" };
                self.line("state last: [] = 0;");
                self.line(format!("update last = {of};"));
                self.line("loss steady = sum(x) * last;");
            }
            2 if weights => {
                let of = if self.exact() { "maximum(sum(wte), sum(x))" } else { "mean(wte * wte) * mean(x * x) + 0.5 * both" };
                self.line("state both: [] = 0;");
                self.line(format!("update both = {of};"));
                self.line("metric of_both = both;");
            }
            3 if weights && !self.exact() => self.line("metric size_of_weights = sqrt(sum(wte * wte)) / (1 + max(abs(wte)));"),
            4 => {
                self.line("state one_ago: [hidden] = 0;");
                self.line("state two_ago: [hidden] = 0;");
                let at = self.at();
                self.line(format!("update one_ago = sum(x, over: [{at}]);"));
                self.line("update two_ago = one_ago;");
                self.line("metric turned = sum(two_ago * one_ago);");
            }
            _ => {
                // This state is never updated.
                self.line("state fixed: [hidden] = 1;");
                self.line("metric projected = sum(x * fixed);");
            }
        }
    }
}
