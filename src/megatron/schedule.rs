//! Batches, precision, memory, and the optimizer with its learning rate.

use super::plan::{Plan, Sizes, typed};
use super::text::Text;

/// Warm-up, stable, decay: the style of a rate that falls at the end alone.
const WSD: &str = "WSD";

/// What becomes of a learning rate behind its warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LrDecay {
    Constant,
    Falls,
    /// In so many last steps.
    FallsLate(u64),
}

impl Plan<'_> {
    pub fn batches(&mut self, sizes: &mut Sizes) {
        if let Some((flag, n)) = self.number("micro-batch-size").or_else(|| self.number("batch-size")) {
            sizes.micro_batch = Some(n);
            self.compile("--micro-batch-size", Text::known(n.to_string(), flag.line));
        }
        match self.number("global-batch-size") {
            Some((flag, n)) => {
                sizes.global_batch = Some(n);
                self.compile("--global-batch-size", Text::known(n.to_string(), flag.line));
            }
            None => {
                sizes.global_batch = sizes.micro_batch.zip(sizes.dp).and_then(|(m, dp)| m.checked_mul(dp));
                if let Some(n) = sizes.global_batch {
                    self.compile("--global-batch-size", Text::known(n.to_string(), 0));
                    self.defaults.push(format!("--global-batch-size {n} (microbatch x data-parallel ranks)"));
                }
            }
        }
        if let (Some(micro), Some(global), Some(dp)) = (sizes.micro_batch, sizes.global_batch, sizes.dp)
            && !global.is_multiple_of(micro.saturating_mul(dp).max(1))
        {
            self.errors.push(format!("the global batch of {global} is no multiple of microbatch x data-parallel ranks, {micro} x {dp}"));
        }
        for name in ["rampup-batch-size", "step-batch-size-schedule"] {
            if let Some(flag) = self.flags.take(name) {
                self.leave_otherwise(&flag, "a compiled step has one batch size: compile each, and go on with `--load DIR --allow-changed batch`");
            }
        }
    }

    pub fn precision(&mut self) {
        for dtype in ["bf16", "fp16"] {
            if let Some(flag) = self.switch(dtype) {
                self.compile("--dtype", Text::known(dtype, flag.line));
            }
        }
        if let Some(flag) = self.switch("recompute-activations").or_else(|| self.switch("checkpoint-activations")) {
            if self.flags.has("recompute-granularity") {
                self.leave(&flag, "`--recompute-granularity` says more");
            } else {
                self.compile("--recompute", Text::known("selective", flag.line));
            }
        }
        if let Some((_, value)) = self.valued("recompute-granularity") {
            self.compile("--recompute", value);
        }
        self.recompute_modules();
    }

    /// Megatron's names of modules, as functions and calls of mcc's texts are called.
    fn recompute_modules(&mut self) {
        let Some(flag) = self.flags.take("recompute-modules") else { return };
        let named = |module: &str| match module {
            "core_attn" => Some("attention"),
            "layernorm" => Some("norm"),
            "mlp" => Some("mlp"),
            "moe" => Some("moe"),
            "shared_experts" => Some("shared"),
            "mla_up_proj" => Some("mla_up_proj"),
            _ => None,
        };
        let names: Option<Vec<&str>> = flag.values.iter().map(|v| v.whole().and_then(named)).collect();
        match names {
            Some(names) if names == ["attention"] => self.leave(&flag, "`--recompute selective` computes attention's core again"),
            Some(names) => self.compile("--recompute-modules", Text::known(names.join(","), flag.line)),
            None => self.leave(&flag, "`--recompute-modules` takes names of functions and calls of the text"),
        }
    }

    /// The optimizer and the learning rate. The result is the number of steps.
    pub fn schedule(&mut self, sizes: &Sizes) -> Option<u64> {
        self.optimizer();
        let batch = sizes.global_batch;
        for (counts, others) in [
            ("train-iters", &["train-samples"] as &[&str]),
            ("lr-decay-iters", &["lr-decay-samples"]),
            ("lr-wsd-decay-iters", &["lr-wsd-decay-samples"]),
            ("lr-warmup-fraction", &["lr-warmup-iters", "lr-warmup-samples"]),
            ("lr-warmup-iters", &["lr-warmup-samples"]),
        ] {
            if self.flags.has(counts) {
                others.iter().for_each(|name| self.drop_flag(name, &format!("`--{counts}` counts")));
            }
        }
        let falls = ["lr-decay-iters", "lr-decay-samples"].iter().find_map(|name| self.flags.get(name).cloned());
        let by_samples = self.in_steps("train-samples", batch).map(|s| s.floor() as u64);
        let steps = self.number("train-iters").map(|(_, n)| n).or(by_samples);
        let decay_samples = self.in_steps("lr-decay-samples", batch).map(|s| s.round() as u64);
        let decay = self.number("lr-decay-iters").map(|(_, n)| n).or(decay_samples);
        let end = decay.or(steps);
        let style = self.decay_style(batch);
        let is_constant = style == LrDecay::Constant;
        if let Some(flag) = falls.filter(|_| is_constant) {
            self.leave(&flag, "a constant rate does not fall");
        }
        let warmup_samples = self.in_steps("lr-warmup-samples", batch).map(|s| s.round() as u64);
        let warmup_iters = self.number("lr-warmup-iters").map(|(_, n)| n);
        if end.is_none()
            && let Some(flag) = self.flags.take("lr-warmup-fraction")
        {
            self.leave_otherwise(&flag, "how many steps that is follows from `--train-iters`, which the script does not have");
        }
        let fraction = self.valued("lr-warmup-fraction").and_then(|(flag, value)| self.real(&flag, &value));
        let warmup = match (fraction, end) {
            (Some(share), Some(end)) => {
                self.computed.push(format!("--lr-warmup-fraction {}: of the {end} steps in which the rate falls", typed(share)));
                (share * end as f64).round() as u64
            }
            _ => warmup_iters.or(warmup_samples).unwrap_or(0),
        };
        self.compile("--lr-warmup-iters", Text::known(warmup.to_string(), 0));
        let lowest = self.valued("min-lr");
        match (is_constant, lowest) {
            (true, Some((flag, _))) => self.leave(&flag, "a constant rate does not fall"),
            (false, Some((_, value))) => self.compile("--min-lr", value),
            (false, None) => {
                self.compile("--min-lr", Text::known("0", 0));
                self.defaults.push("--min-lr 0".into());
            }
            (true, None) => {}
        }
        if let Some(end) = end.filter(|_| !is_constant) {
            if end <= warmup {
                self.errors.push(format!("the learning rate has fallen after {end} steps, and {warmup} still raise it"));
            } else if let LrDecay::FallsLate(last) = style
                && last > end - warmup
            {
                self.errors.push(format!("the learning rate falls in the last {last} of {end} steps, and the first {warmup} still raise it"));
            }
            self.compile("--lr-decay-iters", Text::known(end.to_string(), 0));
        }
        steps
    }

    /// How the rate falls, and its flags.
    fn decay_style(&mut self, batch: Option<u64>) -> LrDecay {
        let asked = self.valued("lr-decay-style");
        let value = asked.as_ref().map_or(Some("linear"), |(_, value)| value.whole());
        let known = value.and_then(|value| ["constant", "linear", "cosine", "inverse-square-root", WSD].into_iter().find(|name| *name == value));
        match &asked {
            None => self.defaults.push("--lr-decay-style linear".into()),
            Some((flag, _)) if known.is_none() => {
                self.leave_otherwise(
                    flag,
                    "mcc has `constant`, `linear`, `cosine`, `inverse-square-root` and `WSD`; the line has `constant`, which falls at no step",
                );
            }
            Some(_) => {}
        }
        let name = known.unwrap_or("constant");
        self.compile("--lr-decay-style", Text::known(name, 0));
        if name != WSD {
            for name in ["lr-wsd-decay-iters", "lr-wsd-decay-samples", "lr-wsd-decay-style"] {
                self.drop_flag(name, "it counts with `--lr-decay-style WSD` alone");
            }
            return if name == "constant" { LrDecay::Constant } else { LrDecay::Falls };
        }
        self.with_default("lr-wsd-decay-style", "exponential");
        let samples = self.in_steps("lr-wsd-decay-samples", batch).map(|s| s.round() as u64);
        match self.number("lr-wsd-decay-iters").map(|(_, n)| n).or(samples) {
            Some(last) => {
                self.compile("--lr-wsd-decay-iters", Text::known(last.to_string(), 0));
                LrDecay::FallsLate(last)
            }
            None => {
                self.errors.push("`--lr-decay-style WSD` needs `--lr-wsd-decay-iters`, the last steps, in which the rate falls".into());
                LrDecay::Falls
            }
        }
    }

    /// Takes a flag that counts samples.
    fn in_steps(&mut self, name: &str, batch: Option<u64>) -> Option<f64> {
        let (flag, n) = self.number(name)?;
        match batch {
            Some(batch) if batch > 0 => {
                let steps = n as f64 / batch as f64;
                self.computed.push(format!("{}: {} steps of {batch} samples", self.shown(&flag), typed(steps)));
                Some(steps)
            }
            _ => {
                self.leave(&flag, "how many steps these are follows from the global batch, which is not known");
                None
            }
        }
    }

    fn optimizer(&mut self) {
        const ADAM: [(&str, &str); 3] = [("adam-beta1", "0.9"), ("adam-beta2", "0.999"), ("adam-eps", "1e-8")];
        const SGD: [(&str, &str); 1] = [("sgd-momentum", "0.9")];
        const MUON: [(&str, &str); 4] =
            [("muon-momentum", "0.9"), ("muon-scale-mode", "spectral"), ("muon-extra-scale-factor", "1.0"), ("muon-num-ns-steps", "5")];
        let kind = self.valued("optimizer");
        let ours = match kind.as_ref().map(|(_, value)| value.whole()) {
            None | Some(Some("adam")) => "adamw",
            Some(Some("sgd")) => "sgd",
            Some(Some("muon" | "dist_muon")) => "muon",
            Some(_) => {
                if let Some((flag, _)) = &kind {
                    self.leave_otherwise(flag, "mcc has AdamW, SGD, Lion and Muon; the line has AdamW");
                }
                "adamw"
            }
        };
        self.compile("--optimizer", Text::known(ours, 0));
        let own = match ours {
            "sgd" => SGD.to_vec(),
            "muon" => [MUON.as_slice(), &ADAM].concat(),
            _ => ADAM.to_vec(),
        };
        for (name, default) in own.iter().chain(&[("weight-decay", "0.01"), ("clip-grad", "1.0")]) {
            self.with_default(name, default);
        }
        if ours == "muon" {
            let nesterov = self.switch("muon-use-nesterov").or_else(|| self.switch("muon-nesterov"));
            self.compile("--muon-nesterov", Text::known(if nesterov.is_some() { "on" } else { "off" }, nesterov.map_or(0, |f| f.line)));
            for (name, why) in [
                ("muon-tp-mode", "a matrix is orthogonalized as a whole, whatever ranks hold of it"),
                ("muon-fp32-matmul-prec", "its products are in f32, with `--tf32` in tf32"),
                ("muon-no-split-qkv", "queries, keys and values are matrices of their own in the text"),
            ] {
                if let Some(flag) = self.flags.take(name) {
                    self.leave_otherwise(&flag, why);
                }
            }
        }
        if let Some((_, value)) = self.valued("lr") {
            self.compile("--lr", value);
        }
        for name in ADAM.iter().chain(&SGD).chain(&MUON).map(|own| own.0).chain(["muon-use-nesterov", "muon-nesterov"]) {
            self.drop_flag(name, "it belongs to another optimizer");
        }
        for name in ["start-weight-decay", "end-weight-decay"] {
            self.drop_flag(name, "weight decay is the same in all steps");
        }
        if let Some((flag, value)) = self.valued("weight-decay-incr-style") {
            self.leave(&flag, if value.whole() == Some("constant") { "it is so always" } else { "weight decay is the same in all steps" });
        }
        if let Some((flag, value)) = self.valued("init-method-std") {
            let theirs = value.whole().and_then(|v| v.parse::<f64>().ok());
            let ours = self.text.std.parse::<f64>().ok();
            match (theirs, ours) {
                (Some(theirs), Some(ours)) if theirs == ours => self.leave(&flag, "it is the text's"),
                (_, Some(ours)) => {
                    self.leave_otherwise(&flag, format!("weights are drawn as the text says, `~ normal({})`: change it there", typed(ours)));
                }
                (_, None) => self.leave_otherwise(&flag, "weights are drawn as the text says: change it there"),
            }
        }
    }

    /// A flag of mcc's own name, with Megatron-LM's default where the script is silent.
    fn with_default(&mut self, name: &str, default: &str) {
        let flag = format!("--{name}");
        match self.valued(name) {
            Some((_, value)) => self.compile(&flag, value),
            None => {
                self.compile(&flag, Text::known(default, 0));
                self.defaults.push(format!("{flag} {default}"));
            }
        }
    }
}
