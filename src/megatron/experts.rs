//! Experts: how tokens choose them, how they are balanced, and which layers have them.

use super::flags::Flag;
use super::plan::{Plan, Sizes, typed};
use super::text::Text;

impl Plan<'_> {
    /// Experts beside their number and width.
    pub fn experts(&mut self, sizes: &Sizes) {
        let Some(kind) = self
            .valued("moe-router-load-balancing-type")
            .map(|(flag, value)| (Some(flag), value))
            .or_else(|| self.text.traits.has_experts.then(|| (None, Text::known("aux_loss", 0))))
        else {
            return;
        };
        let (flag, kind) = kind;
        let coefficient = self.valued("moe-aux-loss-coeff");
        let frequency = self.valued("moe-layer-freq");
        if self.text.has("balanced") {
            let value = coefficient.as_ref().and_then(|(flag, value)| self.real(&flag.clone(), &value.clone())).unwrap_or(0.0);
            let is_balanced = kind.whole().is_some_and(|k| k.ends_with("aux_loss")) && value != 0.0;
            self.compile("-D balanced", Text::known(is_balanced.to_string(), 0));
            let top_k =
                self.compile.iter().find(|p| p.flag == "-D top_k").and_then(|p| p.values.first()).and_then(|v| v.whole()?.parse::<f64>().ok());
            if let (true, Some(layers), Some(top_k)) = (is_balanced, sizes.layers, top_k) {
                // Megatron-LM adds a loss for every layer and divides it by top_k.
                self.compile("-D aux_coef", Text::known(typed(value * layers as f64 / top_k), 0));
                let per_sequence = kind.whole() != Some("global_aux_loss");
                self.compile("-D aux_per_sequence", Text::known(per_sequence.to_string(), 0));
                self.differs.push(format!(
                    "Megatron-LM has a balance loss in each of {layers} layers, the text one of means over all layers: aux_coef is the script's coefficient times {layers} layers, by {top_k} choices"
                ));
                if kind.whole() == Some("aux_loss") && sizes.micro_batch != Some(1) {
                    self.differs.push("Megatron-LM balances the tokens of a microbatch, the text those of a sequence (`-D aux_per_sequence=false`: of the whole batch)".into());
                }
            }
            if !is_balanced && let Some(flag) = &flag {
                self.leave(flag, "without an auxiliary loss the text is `-D balanced=false`");
            }
        } else {
            let file = self.text.file;
            for flag in flag.into_iter().chain(coefficient.map(|(flag, _)| flag)) {
                self.leave(&flag, format!("models/{file} has no balance loss: models/mixtral.mdl shows how to write one"));
            }
        }
        self.router();
        self.dense_layers(frequency);
    }

    /// How tokens choose experts.
    fn router(&mut self) {
        let is_sigmoid = self.text.traits.has_latent;
        let score = self.valued("moe-router-score-function");
        let is_other = score.as_ref().map_or(is_sigmoid, |(_, v)| v.whole() != Some(if is_sigmoid { "sigmoid" } else { "softmax" }));
        if is_other {
            let ours = if is_sigmoid { "a sigmoid" } else { "a softmax" };
            self.differs.push(format!("the script's router has another score function, models/{} {ours}", self.text.file));
        }
        if let Some((flag, _)) = score {
            self.leave(&flag, "it is a part of the text's function `moe`");
        }
        let has_bias = self.switch("moe-router-enable-expert-bias");
        let rate = self.valued("moe-router-bias-update-rate");
        match (has_bias, rate) {
            (Some(flag), rate) => self.set("bias_rate", rate.map_or_else(|| Text::known("1e-3", flag.line), |(_, value)| value), &flag),
            (None, Some((flag, _))) => self.leave(&flag, "it counts with `--moe-router-enable-expert-bias` alone"),
            (None, None) => {}
        }
        if let Some(flag) = self.switch("moe-router-pre-softmax") {
            self.leave(&flag, "it is a part of the text's function `moe`");
            if !is_sigmoid {
                self.differs.push("the script's router weighs chosen experts by their share of all, the text by their share of the chosen".into());
            }
        }
    }

    /// Layers without experts: `[0]*3+[1]*58` is three at the beginning.
    fn dense_layers(&mut self, frequency: Option<(Flag, Text)>) {
        let pattern = frequency.as_ref().map_or(Some("1"), |(_, value)| value.whole());
        let dense = pattern.and_then(leading_zeros);
        match (dense, frequency) {
            (Some(n), frequency) if self.text.has("first_dense") => {
                self.compile("-D first_dense", Text::known(n.to_string(), frequency.map_or(0, |(flag, _)| flag.line)));
            }
            (Some(0), Some((flag, _))) => self.leave(&flag, "all layers of the text have experts"),
            (_, Some((flag, _))) => {
                self.leave(&flag, "which layers have experts is in the text: models/deepseek_v3.mdl has `first_dense` layers without");
                self.differs.push(format!("`{}` leaves layers of the script's model without experts", self.shown(&flag)));
            }
            (_, None) => {}
        }
    }
}

/// How many zeros a pattern of layers begins with, if only ones come after them: `1`, `([0]*3+[1]*58)`.
fn leading_zeros(pattern: &str) -> Option<u64> {
    if pattern == "1" {
        return Some(0);
    }
    let mut zeros = 0u64;
    let mut has_ones = false;
    for part in pattern.trim_matches(['(', ')']).split('+') {
        let (list, times) = part.split_once('*').map_or(Some((part, 1)), |(list, n)| Some((list, n.trim().parse::<u64>().ok()?)))?;
        let list = list.trim().strip_prefix('[')?.strip_suffix(']')?;
        for layer in list.split(',').map(str::trim) {
            match (layer, has_ones) {
                ("0", false) => zeros = zeros.checked_add(times)?,
                ("1", _) => has_ones = true,
                _ => return None,
            }
        }
    }
    Some(zeros)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_of_layers_are_read() {
        let zeros = ["1", "([0]*3+[1]*58)", "[0]*1+[1]*26", "[0,0,1,1]", "[1]*4"].map(leading_zeros);
        assert_eq!(zeros, [Some(0), Some(3), Some(1), Some(2), Some(0)]);
        assert_eq!(["2", "[1]*3+[0]*2", "[0]*x", "0"].map(leading_zeros), [None; 4]);
    }
}
