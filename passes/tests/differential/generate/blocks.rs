//! The blocks of random models: functions from the stream to the stream.

use super::{Writer, is_steered};

impl Writer {
    /// Writes a function of a random kind; returns its name.
    pub fn block(&mut self) -> String {
        let name = format!("block{}", self.blocks);
        self.blocks += 1;
        self.before = self.text.len();
        self.line(format!("fn {name}(x) {{"));
        let kinds: &[fn(&mut Writer)] = &[Self::feed, Self::gated, Self::wide, Self::joined, Self::scaled, Self::table, Self::experts, Self::experts];
        let over_seq: &[fn(&mut Writer)] = &[
            Self::attention,
            Self::attention,
            Self::products,
            Self::mixing,
            Self::running,
            Self::shifted,
            Self::halves,
            Self::looked_up,
            Self::peaks,
        ];
        let n = kinds.len() as u64 + if self.sequences() { over_seq.len() as u64 } else { 0 };
        let k = self.dice.below(n) as usize;
        match kinds.get(k) {
            _ if self.blocks == 1 && is_steered(self.case.seed) => self.attention(),
            Some(write) => write(self),
            None => over_seq[k - kinds.len()](self),
        }
        self.line("}");
        name
    }

    /// Two linear maps with an activation.
    fn feed(&mut self) {
        let bias = self.dice.chance(50);
        self.line(format!("let h = act(linear(x, hidden, ffn, bias: {bias}) as up);"));
        self.line(format!("return linear(h, ffn, hidden, bias: {bias}) as down;"));
    }

    fn gated(&mut self) {
        self.line("let g = act(linear(x, hidden, ffn) as gate);");
        self.line("return linear(g * linear(x, hidden, ffn) as up, ffn, hidden) as down;");
    }

    /// Two maps one after the other, through a dim of its own that tp may split and one that it splits too.
    fn wide(&mut self) {
        self.line("dim mixed = ffn;");
        self.line("let h = linear(x, hidden, ffn) as a;");
        self.line("let m = act(linear(h, ffn, mixed, bias: true) as b);");
        let back = self.dice.pick2("linear(m, mixed, hidden) as c", "linear(view(m, mixed -> ffn) + h, ffn, hidden) as c");
        self.line(format!("return {back};"));
    }

    /// Two branches side by side in one dim.
    fn joined(&mut self) {
        self.line("dim both = 2 * hidden, other = hidden;");
        self.line("let h = concat(x, act(linear(x, hidden, other) as side), [hidden, other] -> both);");
        self.line("return linear(h, both, hidden) as back;");
    }

    fn scaled(&mut self) {
        self.line("param s: [hidden] ~ normal(0.02);");
        self.line("param t: [] ~ normal(0.02);");
        let y = self.dice.pick(&["x * s + t * x", "where(x > 0, x * s, x * t)", "maximum(x * s, x * t)", "stop_gradient(x) * s - x * t"]);
        self.line(format!("return {y};"));
    }

    /// A row of a small parameter, chosen by the values.
    fn table(&mut self) {
        self.line("param rows: [classes, hidden] ~ normal(0.02);");
        self.line("let best = argmax(dot(x, rows, over: hidden), over: classes);");
        self.line("return x + rows[classes: best];");
    }

    /// Experts behind a router of any kind: dropless or with a capacity, with a shared expert, with losses and a state of its own.
    fn experts(&mut self) {
        let at = self.at();
        self.line("let logits = linear(x, hidden, experts) as router;");
        let router = if self.exact() { self.dice.pick(&["clamped", "state"]) } else { self.dice.pick(&["before", "before", "after", "state"]) };
        match router {
            "clamped" => {
                self.line("let score, chosen = top_k(logits, over: experts, k: top);");
                self.line("let weight = minimum(maximum(score, -1), 1);");
            }
            "before" => {
                self.line("let prob = softmax(logits, over: experts);");
                self.line("let score, chosen = top_k(prob, over: experts, k: top);");
                self.line("let weight = score / sum(score, over: top);");
                if self.sequences() && self.dice.chance(40) {
                    self.line("let work = mean(load(chosen, top, experts), over: seq);");
                    self.line("loss balance = 0.5 * mean(balance(work, mean(prob, over: seq), experts));");
                }
            }
            "after" => {
                self.line("let score, chosen = top_k(logits, over: experts, k: top);");
                self.line("let weight = softmax(score, over: top);");
                if self.dice.chance(40) {
                    self.line("loss size_of_logits = z_loss(logits, experts);");
                }
            }
            _ => {
                self.line("state bias: [experts] = 0;");
                let score = if self.exact() { "minimum(maximum(logits, -1), 1)" } else { "sigmoid(logits)" };
                self.line(format!("let score = {score};"));
                self.line("let _, chosen = top_k(stop_gradient(score + bias), over: experts, k: top);");
                self.line("let weight = score[experts: chosen];");
                self.line(format!("let work = sum(load(chosen, top, experts), over: [{at}]);"));
                self.line("update bias = bias + sign(sum(work) - experts * work);");
            }
        }
        // Experts may have a capacity, counted over the batch or per sequence. Over the batch, one microbatch must
        // have all.
        let whole = self.case.global_batch == self.case.dp * self.case.micro_batch;
        let counted = if whole && self.dice.chance(50) { at } else { "seq" };
        let limited = (self.sequences() || counted == "batch") && self.dice.chance(40);
        let capacity = if limited { format!(", capacity: {}, counted: [{counted}]", 1 + self.dice.below(4)) } else { String::new() };
        let act = if self.exact() { ", act: \"relu\"" } else { "" };
        self.line(format!("let y = experts_mlp(x, chosen, weight, [{at}], top, experts, hidden, expert_ffn{act}{capacity}) as experts;"));
        let shared = self.dice.chance(30);
        self.line(if shared { "return y + linear(act(linear(x, hidden, ffn) as up), ffn, hidden) as shared;" } else { "return y;" });
    }

    /// Attention with grouped queries, in any of its forms.
    fn attention(&mut self) {
        if self.exact() {
            return self.products();
        }
        let bias = self.dice.chance(30);
        self.line("dim keys = seq;");
        self.line(format!("let q = linear(x, hidden, [kv, group, head_dim], bias: {bias}) as q;"));
        self.line(format!("let k = linear(x, hidden, [kv, head_dim], bias: {bias}) as k;"));
        self.line(format!("let v = linear(x, hidden, [kv, head_dim], bias: {bias}) as v;"));
        if self.dice.chance(30) {
            self.line("q = rms_norm(q, over: head_dim) as q_norm;");
            self.line("k = rms_norm(k, over: head_dim) as k_norm;");
        }
        if self.dice.chance(40) {
            self.line("q = rope(q, head_dim, index(seq), 100.0);");
            self.line("k = rope(k, head_dim, index(seq), 100.0);");
        }
        let how = self.dice.pick(&[
            "",
            ", mask: causal(seq, keys)",
            ", mask: causal(seq, keys)",
            ", mask: causal(seq, keys) and within(seq, keys, 2)",
            ", bias: b",
        ]);
        if how == ", bias: b" {
            self.line("param b: [seq, keys] ~ normal(0.02);");
        }
        self.line(format!("let y = attention(q, view(k, seq -> keys), view(v, seq -> keys), head_dim, keys{how});"));
        self.line(format!("return linear(y, [kv, group, head_dim], hidden, bias: {bias}) as o;"));
    }

    /// Attention without softmax: sums of products.
    fn products(&mut self) {
        self.line("dim keys = seq;");
        self.line("let q = linear(x, hidden, [kv, group, head_dim]) as q;");
        self.line("let k = view(linear(x, hidden, [kv, head_dim]) as k, seq -> keys);");
        self.line("let v = view(linear(x, hidden, [kv, head_dim]) as v, seq -> keys);");
        let s = self.dice.pick2("dot(q, k, over: head_dim)", "where(causal(seq, keys), dot(q, k, over: head_dim), 0)");
        self.line(format!("let s = {s};"));
        if self.exact() {
            self.line("s = minimum(maximum(s, -1), 1);");
        }
        self.line("return linear(dot(s, v, over: keys), [kv, group, head_dim], hidden) as o;");
    }

    /// A learned mixture of positions.
    fn mixing(&mut self) {
        self.line("dim keys = seq;");
        self.line("param mix: [keys, seq] ~ normal(0.02);");
        self.line("return dot(view(act(x), seq -> keys), mix, over: keys);");
    }

    fn running(&mut self) {
        let x = self.dice.pick2("x", "linear(x, hidden, ffn) as a");
        self.line(format!("let h = cumsum({x}, over: seq);"));
        self.line(if x == "x" { "return h;" } else { "return linear(h, ffn, hidden) as b;" });
    }

    /// Every position reads the one before.
    fn shifted(&mut self) {
        self.line("dim one = 1, rest = seq - 1;");
        self.line("param first: [one, hidden] ~ normal(0.02);");
        self.line("let before = concat(expand(first, batch), slice(x, seq -> rest), [one, rest] -> seq);");
        self.line("return act(before) * x;");
    }

    /// Sums over a part of a split dim.
    fn halves(&mut self) {
        self.line("dim one = 1, places = seq;");
        self.line("let y = view(x, seq -> [one, places]);");
        self.line("let total = sum(y, over: one);");
        // The factor of three keeps every position nonzero, also in a sum with `x`, as a norm of zeros magnifies
        // rounding.
        let first = if self.exact() { "x[seq: 0]" } else { "3 * x[seq: 0]" };
        self.line(format!("return view(total, places -> seq) - {first};"));
    }

    /// Rows of the stream itself, by an input's indices.
    fn looked_up(&mut self) {
        let name = format!("source{}", self.blocks);
        self.text.insert_str(self.before, &format!("  input {name}: i32[batch, seq];\n"));
        self.ranges.insert(name.clone(), crate::harness::Range { below: self.sizes.seq, ignored: false });
        self.distinct &= self.exact();
        self.line("dim keys = seq;");
        self.line(format!("return view(x, seq -> keys)[keys: {name}];"));
    }

    fn peaks(&mut self) {
        let over_seq = if self.distinct { "x - max(x, over: seq)" } else { "x - sum(x, over: seq)" };
        let y = self.dice.pick(&[
            over_seq,
            "x * max(x, over: hidden)",
            "x + stop_gradient(sum(x, over: seq))",
            "x - expand(max(x, over: hidden), hidden)",
        ]);
        self.line(format!("return {y};"));
    }
}
