//! Ranks: how many the script starts, and along which axes.

use super::flags::Flag;
use super::launch::Launcher;
use super::plan::{Plan, Sizes};
use super::shell::LineNote;
use super::text::Text;

impl Plan<'_> {
    /// Axes of the mesh. Data-parallel ranks are what the others leave of all.
    pub fn mesh(&mut self, sizes: &mut Sizes) {
        let axis = |plan: &mut Self, names: &[&str], flag: &str| {
            let found = names.iter().find_map(|name| plan.number(name));
            let Some((given, n)) = found else { return 1 };
            plan.compile(flag, Text::known(n.to_string(), given.line));
            n.max(1)
        };
        sizes.tp = axis(self, &["tensor-model-parallel-size", "model-parallel-size"], "--tp");
        sizes.pp = axis(self, &["pipeline-model-parallel-size"], "--pp");
        sizes.cp = axis(self, &["context-parallel-size"], "--cp");
        let ranks = self.ranks();
        let others = sizes.tp.saturating_mul(sizes.pp).saturating_mul(sizes.cp);
        match ranks {
            Some(ranks) if ranks.is_multiple_of(others) && ranks > 0 => {
                sizes.dp = Some(ranks / others);
                self.computed.push(format!("--dp {}: the script starts {}, and tp x pp x cp are {others}", ranks / others, counted(ranks, "rank")));
                self.compile("--dp", Text::known((ranks / others).to_string(), self.launch.line));
            }
            Some(ranks) => self.errors.push(format!(
                "{}: the script starts {}, and tp x pp x cp are {others}, which does not divide them, so that Megatron-LM would refuse it too: `--set NAME=N`, with the variable that says how many machines there are, gives another number",
                self.shell.place(self.launch.line),
                counted(ranks, "rank")
            )),
            None => {
                let dp = self.shell.needed("DP", "data-parallel ranks: the script does not say how many ranks it starts", self.launch.line);
                sizes.dp = dp.whole().and_then(|n| n.parse().ok());
                self.compile("--dp", dp);
            }
        }
        self.experts_axis();
        self.shares(sizes);
        if let Some(flag) = self.switch("sequence-parallel") {
            match sizes.tp {
                1 => self.leave(&flag, "it does nothing on one tensor-parallel rank, where Megatron-LM turns it off too"),
                _ => self.compile("--sp", None),
            }
        }
        if let Some(flag) = self.switch("tp-comm-overlap") {
            match sizes.tp {
                1 => self.leave(&flag, "it does nothing on one tensor-parallel rank"),
                _ => self.compile("--tp-comm-overlap", None),
            }
        }
        if let Some(flag) = self.switch("overlap-moe-expert-parallel-comm") {
            match self.text.traits.has_experts {
                true => self.compile("--overlap-moe-expert-parallel-comm", None),
                false => self.leave(&flag, "the model has no experts"),
            }
        }
        if let Some((flag, value)) = self.valued("cp-comm-type") {
            let ours = value.whole().map(|v| if v == "allgather" { "all_gather" } else { v }.to_string());
            match ours {
                _ if sizes.cp == 1 => self.leave(&flag, "it does nothing on one context-parallel rank"),
                Some(way) => self.compile("--cp-comm-type", Text::known(way, flag.line)),
                None => self.compile("--cp-comm-type", value),
            }
        }
        for name in ["overlap-grad-reduce", "overlap-param-gather", "overlap-p2p-communication", "no-overlap-p2p-communication"] {
            self.drop_flag(name, "communication is on streams of its own unless `--overlap off` says otherwise; numbers are the same");
        }
    }

    fn experts_axis(&mut self) {
        for (name, flag) in [("expert-model-parallel-size", "--ep"), ("expert-tensor-parallel-size", "--etp")] {
            if let Some((given, value)) = self.valued(name) {
                if self.text.traits.has_experts {
                    self.compile(flag, value);
                } else {
                    self.leave(&given, "the model has no experts");
                }
            }
        }
    }

    /// What data-parallel ranks share out.
    fn shares(&mut self, sizes: &Sizes) {
        let optimizer = self.switch("use-distributed-optimizer");
        let whole = ["use-megatron-fsdp", "use-custom-fsdp", "use-torch-fsdp2"].iter().find_map(|name| self.switch(name));
        let strategy = self.valued("data-parallel-sharding-strategy");
        let level = match (&whole, strategy.as_ref().and_then(|(_, value)| value.whole())) {
            (Some(_), Some("no_shard")) => 0,
            (Some(_), Some("optim")) => 1,
            (Some(_), Some("optim_grads")) => 2,
            (Some(_), _) => 3,
            (None, _) => u8::from(optimizer.is_some()),
        };
        if whole.is_none()
            && let Some((flag, _)) = &strategy
        {
            self.leave(flag, "it counts with `--use-megatron-fsdp` alone");
        }
        let Some(flag) = whole.clone().or(optimizer.clone()) else { return };
        if sizes.dp.is_some_and(|dp| dp * sizes.cp == 1) {
            for flag in std::iter::once(&flag).chain(strategy.as_ref().filter(|_| whole.is_some()).map(|(flag, _)| flag)) {
                self.leave(flag, "there is one data-parallel rank, which has nobody to share with");
            }
        } else {
            self.compile("--zero", Text::known(level.to_string(), flag.line));
            let strategy = strategy.as_ref().map_or(String::new(), |(flag, _)| format!(" {}", self.shown(flag)));
            self.computed.push(format!("--zero {level}: {}{strategy}", flag.typed));
        }
        if let (Some(_), Some(flag)) = (&whole, &optimizer) {
            self.leave(flag, "`--zero` says it with the flag of FSDP");
        }
    }

    /// Ranks that the launcher starts, if it can be known. Its options are named where mcc starts the ranks itself.
    fn ranks(&mut self) -> Option<u64> {
        let option = |plan: &Self, names: &[&str]| {
            let of_batch = plan.batch.iter().rev().find(|(name, _)| names.contains(&name.as_str())).map(|(_, value)| value.clone());
            plan.launch.option(names).or(of_batch)
        };
        let number = |text: Option<Text>| text.and_then(|t| t.whole()?.parse::<u64>().ok());
        let nodes = ["-N", "--nodes"];
        let launcher = self.launch.launcher();
        let (machines, ranks) = match launcher {
            Launcher::Nobody => (Some(1), Some(1)),
            Launcher::Torchrun => {
                let machines = match self.launch.option(&["--nnodes"]) {
                    Some(text) => number(Some(text)),
                    None => Some(1),
                };
                let each = self.launch.option(&["--nproc-per-node", "--nproc"]);
                let each = if each.is_some() { number(each) } else { Some(1) };
                (machines, machines.zip(each).and_then(|(m, e)| m.checked_mul(e)))
            }
            Launcher::Slurm => {
                let machines = number(option(self, &nodes));
                let each = number(option(self, &["--ntasks-per-node"]));
                let all = number(option(self, &["-n", "--ntasks"]));
                (machines, all.or_else(|| machines.zip(each).and_then(|(m, e)| m.checked_mul(e))))
            }
            Launcher::Mpi => (None, number(option(self, &["-n", "-np", "--np"]))),
        };
        let is_alone = machines == Some(1) && launcher != Launcher::Nobody;
        if is_alone {
            let words: Vec<String> = self.launch.before.iter().map(|w| self.shell.shown(w)).collect();
            let text = format!("{}: on one machine `mcc run` starts every rank itself", words.join(" "));
            self.left.push(LineNote { line: self.launch.line, text });
        } else if launcher != Launcher::Nobody {
            self.starts = self.launch.words();
        }
        ranks
    }

    /// Which layers a stage holds, and in which order it computes.
    pub fn pipeline(&mut self, sizes: &Sizes) {
        let of_layers = self.number("num-layers-per-virtual-pipeline-stage");
        let of_stages = self.number("num-virtual-stages-per-pipeline-rank");
        let vpp = match (&of_layers, &of_stages, sizes.layers) {
            (Some((flag, n)), _, Some(layers)) => {
                let stage = layers / sizes.pp;
                if *n == 0 || !stage.is_multiple_of(*n) {
                    self.errors.push(format!(
                        "{}: `{}`: a pipeline stage has {stage} layers, which are no multiple of it",
                        self.shell.place(flag.line),
                        self.shown(flag)
                    ));
                    None
                } else {
                    Some(stage / n)
                }
            }
            (_, Some((_, n)), _) => Some(*n),
            _ => None,
        };
        let given = of_layers.or(of_stages).map(|(flag, _)| flag);
        match (vpp, &given) {
            (Some(vpp), Some(flag)) if sizes.pp > 1 => {
                self.compile("--vpp", Text::known(vpp.to_string(), flag.line));
                self.computed.push(format!("--vpp {vpp}: {}", self.shown(flag)));
            }
            (_, Some(flag)) if sizes.pp == 1 => self.leave(flag, "there is one pipeline stage"),
            _ => {}
        }
        let first = self.number("decoder-first-pipeline-num-layers");
        let last = self.number("decoder-last-pipeline-num-layers");
        let own: Vec<Flag> = first.iter().chain(&last).map(|(flag, _)| flag.clone()).collect();
        let layers = uneven(sizes, first.map(|(_, n)| n), last.map(|(_, n)| n)).filter(|_| vpp.is_none() && !own.is_empty());
        if let Some(layers) = layers {
            own.iter().for_each(|flag| self.computed.push(format!("--pipeline-layers {layers}: {}", self.shown(flag))));
            self.compile("--pipeline-layers", Text::known(layers, own[0].line));
        } else {
            own.iter().for_each(|flag| self.leave_otherwise(flag, "`--pipeline-layers N,N,..` says the layers of every virtual stage"));
        }
        for (name, ours) in [
            ("pipeline-model-parallel-layout", "--pipeline-layout"),
            ("account-for-embedding-in-pipeline-split", "--account-for-embedding-in-pipeline-split"),
            ("account-for-loss-in-pipeline-split", "--account-for-loss-in-pipeline-split"),
            ("microbatch-group-size-per-virtual-pipeline-stage", "--microbatch-group-size-per-virtual-pipeline-stage"),
        ] {
            let Some(flag) = self.flags.take(name) else { continue };
            if sizes.pp == 1 {
                self.leave(&flag, "there is one pipeline stage");
            } else {
                self.compile(ours, flag.values.first().cloned());
            }
        }
    }
}

fn counted(n: u64, what: &str) -> String {
    if n == 1 { format!("1 {what}") } else { format!("{n} {what}s") }
}

/// Layers of all stages where the first or the last has its own number: `7,8,8,7`.
fn uneven(sizes: &Sizes, first: Option<u64>, last: Option<u64>) -> Option<String> {
    let own = u64::from(first.is_some()) + u64::from(last.is_some());
    let (rest, stages) = (sizes.layers?.checked_sub(first.unwrap_or(0))?.checked_sub(last.unwrap_or(0))?, sizes.pp.checked_sub(own)?);
    if stages > 4096 || (stages == 0 && rest > 0) || (stages > 0 && !rest.is_multiple_of(stages)) {
        return None;
    }
    let middle = (0..stages).map(|_| rest / stages);
    let all: Vec<String> = first.into_iter().chain(middle).chain(last).map(|n| n.to_string()).collect();
    Some(all.join(","))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_and_last_stages_have_their_own_layers() {
        let sizes = Sizes { layers: Some(30), pp: 4, ..Sizes::default() };
        assert_eq!(uneven(&sizes, Some(7), Some(7)), Some("7,8,8,7".into()));
        assert_eq!(uneven(&sizes, Some(6), None), Some("6,8,8,8".into()));
        assert_eq!(uneven(&sizes, Some(7), None), None);
        assert_eq!(uneven(&sizes, Some(40), None), None);
    }
}
