//! Attention: its heads, positions and windows.

use super::flags::Flag;
use super::plan::Plan;
use super::text::Text;

impl Plan<'_> {
    /// Heads of keys and values: those of queries, unless they are grouped.
    pub fn key_heads(&mut self, heads: Option<Text>) {
        let grouped = self.switch("group-query-attention");
        let groups = self.valued("num-query-groups");
        match (grouped, groups) {
            (Some(flag), groups) => {
                let value = groups.map_or_else(|| Text::known("1", flag.line), |(_, value)| value);
                self.set("kv_heads", value, &flag);
            }
            (None, groups) => {
                if let Some((flag, _)) = groups {
                    self.leave(&flag, "it counts with `--group-query-attention` alone");
                }
                if let Some(heads) = heads.filter(|_| self.text.has("kv_heads")) {
                    self.compile("-D kv_heads", heads);
                }
            }
        }
        if let Some((flag, value)) = self.valued("kv-channels") {
            if self.text.traits.has_latent {
                self.leave(&flag, "the sizes of latent attention say it");
            } else {
                self.set("head_dim", value, &flag);
            }
        }
        for (name, setting) in [("add-qkv-bias", "qkv_bias"), ("qk-layernorm", "qk_norm")] {
            let Some(flag) = self.switch(name) else { continue };
            match setting {
                "qkv_bias" if self.text.traits.has_biases => self.leave(&flag, "all linear layers of the text have biases"),
                "qk_norm" if self.text.traits.has_latent => self.leave(&flag, "the text normalises its latents, which is the same"),
                _ if self.text.has(setting) => self.compile(&format!("-D {setting}"), Text::known("true", flag.line)),
                _ => {
                    self.leave(&flag, format!("models/{} has no setting `{setting}`", self.text.file));
                    self.differs.push(format!("`{}` of the script's model is not in models/{}", flag.typed, self.text.file));
                }
            }
        }
    }

    /// YaRN as latent attention has it: `--rotary-scaling-factor`, and by how much queries, keys and scores are
    /// larger. The other numbers are not flags of Megatron-LM's: 32 and 1 turns within 4,096 positions, as in the
    /// text.
    fn yarn(&mut self) {
        let number = |given: &Option<(Flag, Text)>, usual: f64| match given {
            Some((_, value)) => value.whole().and_then(|v| v.parse::<f64>().ok()),
            None => Some(usual),
        };
        let factor = self.valued("rotary-scaling-factor");
        let [mscale, all] = ["mscale", "mscale-all-dim"].map(|name| self.valued(name));
        let numbers = (number(&factor, 1.0), number(&mscale, 1.0), number(&all, 0.0));
        match factor {
            Some((flag, value)) if numbers.0.is_none_or(|x| x > 1.0) => {
                self.set("rope_factor", value, &flag);
                self.set_default("rope_original", "4096", "--original-max-position-embeddings");
            }
            factor => {
                let why = "frequencies are scaled by a `--rotary-scaling-factor` above 1 alone";
                [factor, mscale, all].into_iter().flatten().for_each(|(flag, _)| self.leave(&flag, why));
                return;
            }
        }
        let gain = |factor: f64, mscale: f64| if factor > 1.0 { 0.1 * mscale * factor.ln() + 1.0 } else { 1.0 };
        match numbers {
            (_, Some(mscale), Some(all)) if mscale == all => {}
            (Some(factor), Some(mscale), Some(all)) => {
                let scale = gain(factor, mscale) / gain(factor, all);
                self.computed.push(format!("-D yarn_scale={scale}: what `--mscale {mscale}` and `--mscale-all-dim {all}` make of the factor"));
                self.compile("-D yarn_scale", Text::known(format!("{scale:?}"), 0));
            }
            _ => self
                .differs
                .push("by how much queries and keys are larger (`--mscale`, `--mscale-all-dim`) is not computed: `-D yarn_scale=..`".into()),
        }
        if let Some((flag, _)) = &mscale {
            self.leave(flag, "`-D yarn_scale` has it");
        }
        if let Some((flag, value)) = all {
            self.set("mscale_all", value, &flag);
        }
    }

    /// How positions turn heads, and how far they see.
    pub fn positions(&mut self) {
        if let Some((flag, value)) = self.valued("rotary-percent") {
            match value.whole().and_then(|v| v.parse::<f64>().ok()) {
                _ if self.text.has("rotary_factor") => self.set("rotary_factor", value, &flag),
                Some(1.0) => self.leave(&flag, "the text turns whole heads"),
                _ => {
                    self.leave(&flag, "the text turns whole heads; models/nemotron.mdl turns a part");
                    self.differs.push(format!("`{}` turns a part of each head, models/{} all of it", self.shown(&flag), self.text.file));
                }
            }
        } else {
            self.set_default("rotary_factor", "1.0", "--rotary-percent");
        }
        let kind = self.valued("rope-type");
        let is_plain = kind.as_ref().map_or(!self.text.traits.has_latent, |(_, value)| value.whole() == Some("rope"));
        if let Some((flag, _)) = kind {
            self.leave(&flag, "frequencies are in the text");
        }
        match (is_plain, self.text.has("mscale_all")) {
            (true, _) => {}
            (false, true) => self.yarn(),
            (false, false) => {
                self.differs.push(format!("the script scales frequencies by YaRN, these lines do not: settings of models/{} would", self.text.file))
            }
        }
        let factor = self.valued("rope-scaling-factor");
        match (self.switch("use-rope-scaling"), factor) {
            (Some(flag), _) if self.text.traits.has_latent => self.leave(&flag, "latent attention scales frequencies by YaRN alone"),
            (Some(flag), factor) => {
                self.set("rope_factor", factor.map_or_else(|| Text::known("8.0", flag.line), |(_, value)| value), &flag);
            }
            (None, Some((flag, _))) => self.leave(&flag, "it counts with `--use-rope-scaling` alone"),
            (None, None) => {}
        }
        if let Some((flag, value)) = self.valued("window-size") {
            // The first number counts the keys to the left, without the query's own.
            let left = value.whole().map(|v| v.trim_matches(['(', ')']).split(',').next().unwrap_or("").trim().to_string());
            match left.and_then(|l| l.parse::<u64>().ok()) {
                Some(left) => {
                    self.computed.push(format!("-D window={}: {}, and the query's own", left.saturating_add(1), self.shown(&flag)));
                    self.set("window", Text::known(left.saturating_add(1).to_string(), flag.line), &flag);
                }
                None => self.leave(&flag, "it is not understood: `-D window=N` counts the keys that a query sees, with its own"),
            }
        }
        if let Some((flag, value)) = self.valued("window-attn-skip-freq") {
            match value.whole() {
                Some("2") if self.text.has("window_every") => self.set("window_every", value, &flag),
                _ => self.leave(&flag, "`-D window_every=N` gives a window to every N-th layer and to no other"),
            }
        }
    }
}
