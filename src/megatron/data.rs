//! What `mcc run` reads and writes.

use super::flags::Flag;
use super::launch::Launcher;
use super::plan::{Part, Plan, Sizes};
use super::text::Text;

/// Below so many tokens Megatron-LM writes them in 16 bits.
const NARROW: u64 = 65_500;

impl Plan<'_> {
    pub fn data(&mut self, sizes: &Sizes) {
        let has_inputs = self.text.programs != ["pretrain_gpt.py", "finetune_gpt.py", "pretrain_gpt_core.py"];
        if has_inputs {
            for name in ["data-path", "train-data-path", "valid-data-path"] {
                self.drop_flag(name, "the text reads its inputs as they are, an array each: `DATA`");
            }
        }
        if self.flags.has("data-path") {
            self.drop_flag("train-data-path", "`--data-path` counts");
        }
        if self.flags.get("eval-iters").and_then(|f| f.values.first()).and_then(Text::whole) == Some("0") {
            for name in ["eval-iters", "eval-interval", "valid-data-path"] {
                self.drop_flag(name, "`--eval-iters 0` says that nothing is evaluated");
            }
        } else {
            self.evaluation();
        }
        let training = self.prefix("data-path").or_else(|| self.prefix("train-data-path"));
        let is_mock = self.switch("mock-data");
        if let Some(flag) = &is_mock {
            self.leave(flag, "`DATA` names a file: any text has tokens, with `-D vocab=256`");
        }
        let is_bin = training.is_some() && !has_inputs;
        match training {
            Some(prefix) if !has_inputs => self.run("--data", prefix),
            _ => {
                let what = match has_inputs {
                    true => "INPUT=FILE.npy of the text's inputs, which Megatron-LM makes of its data step by step",
                    false => "training data: the script names none, or several with weights",
                };
                let data = self.shell.needed("DATA", what, self.launch.line);
                self.run("--data", data);
            }
        }
        if is_bin {
            let dtype = match sizes.vocab {
                Some(vocab) => Text::known(if vocab < NARROW { "uint16" } else { "int32" }, 0),
                None => self.shell.needed(
                    "DATA_DTYPE",
                    "`uint16` if there are fewer than 65500 tokens, else `int32`, as Megatron-LM writes them",
                    self.launch.line,
                ),
            };
            self.run("--data-dtype", dtype);
        }
        self.drop_flag("split", "training and held-out data are files of their own: `VALID_DATA` of the lines names the latter");
        for name in ["data-cache-path", "test-data-path"] {
            self.drop_flag(
                name,
                "the line reads a file in order: with `mcc run --data-path` in place of `--data` it would read data sets as Megatron-LM does",
            );
        }
    }

    /// Held-out losses.
    fn evaluation(&mut self) {
        let interval = self.valued("eval-interval").map_or_else(|| Text::known("1000", 0), |(_, value)| value);
        let batches = self.valued("eval-iters").map_or_else(|| Text::known("100", 0), |(_, value)| value);
        let data = self.prefix("valid-data-path");
        let all = [("--valid-data", data), ("--eval-interval", Some(interval)), ("--eval-iters", Some(batches))];
        self.held_out.extend(all.into_iter().filter(|(_, v)| v.is_some()).map(|(flag, value)| Part { flag: flag.into(), value }));
    }

    /// The tokens of a data set by its prefix. Several with weights are named.
    fn prefix(&mut self, name: &str) -> Option<Text> {
        let flag = self.flags.take(name)?;
        match flag.values.as_slice() {
            [one] => {
                let mut file = one.clone();
                file.push_known(".bin");
                Some(file)
            }
            [weight, one] if weight.whole().is_some_and(|w| w.parse::<f64>().is_ok()) => {
                let mut file = one.clone();
                file.push_known(".bin");
                Some(file)
            }
            _ => {
                let shares = self.mixture(&flag);
                let file = if name == "valid-data-path" { "VALID_DATA" } else { "DATA" };
                self.leave(&flag, format!("`mcc run --data-path` in place of `--data` takes it as it is; or mix the sets into one file of tokens{shares}, and name it in `{file}`"));
                None
            }
        }
    }

    /// What each of several data sets is of all, where all weights are known: `0.3 a 0.7 b`. Without weights each is
    /// read as often as it is long.
    fn mixture(&self, flag: &Flag) -> String {
        let weights: Vec<Option<f64>> = flag.values.chunks(2).map(|pair| pair[0].whole()?.parse().ok().filter(|w: &f64| *w >= 0.0)).collect();
        let Some(weights) = weights.into_iter().collect::<Option<Vec<f64>>>().filter(|_| flag.values.len().is_multiple_of(2)) else {
            return String::new();
        };
        let all: f64 = weights.iter().sum();
        let share = |(pair, weight): (&[Text], &f64)| format!("{:.3} of its sequences from {}", weight / all, self.shell.shown(&pair[1]));
        let shares: Vec<String> = flag.values.chunks(2).zip(&weights).map(share).collect();
        if all > 0.0 { format!(", {}", shares.join(", ")) } else { String::new() }
    }

    /// How long a run is, and what it says.
    pub fn steps(&mut self, steps: Option<u64>) {
        if let Some(steps) = steps {
            self.run("--steps", Text::known(steps.to_string(), 0));
        }
        if !self.flags.has("profile") {
            for name in ["profile-step-start", "profile-step-end"] {
                self.drop_flag(name, "it counts with `--profile` alone");
            }
        }
        let start = self.number("profile-step-start").map(|(_, n)| n);
        let end = self.number("profile-step-end").map(|(_, n)| n);
        if self.switch("profile").is_some() {
            self.run("--profile", None);
            let n = end.unwrap_or(12).saturating_sub(start.unwrap_or(10)).max(1);
            self.run("--profile-steps", Text::known(n.to_string(), 0));
        }
        match self.valued("log-interval") {
            Some((_, value)) => self.run("--log-interval", value),
            None => {
                self.run("--log-interval", Text::known("100", 0));
                self.defaults.push("--log-interval 100".into());
            }
        }
    }

    pub fn checkpoints(&mut self) {
        let save = self.valued("save");
        let load = self.valued("load");
        let seed = self.valued("seed");
        let only_weights = ["finetune", "no-load-optim", "no-load-rng"].map(|name| self.switch(name));
        let is_fresh = only_weights[0].is_some();
        let mut goes_on = false;
        let is_same = save.is_some() && save.as_ref().map(|(_, v)| v.pieces()) == load.as_ref().map(|(_, v)| v.pieces());
        match (&save, &load) {
            (Some((_, save)), Some(_)) if is_same => {
                self.run("--save", save.clone());
                self.run("--resume", Text::known("auto", 0));
            }
            (save, load) => {
                if let Some((_, value)) = save {
                    self.run("--save", value.clone());
                }
                match load {
                    Some((_, value)) if is_fresh => self.run("--init", value.clone()),
                    Some((_, value)) => {
                        goes_on = true;
                        self.run("--load", value.clone());
                    }
                    None => {}
                }
                if load.is_some() {
                    self.differs.push("`--load` reads mcc's checkpoints: `mcc import hf` makes weights of a Hugging Face directory, for `mcc run --init`; Megatron-LM's own files are not read".into());
                }
            }
        }
        for flag in only_weights.into_iter().flatten() {
            let why = match (is_fresh && load.is_some() && !is_same, is_same) {
                (true, _) => "`--init` reads weights alone",
                (false, true) => {
                    "a run that goes on has its optimizer states and its place in the data; `mcc run --init CHECKPOINT` begins with weights alone"
                }
                (false, false) => "`--load` reads all of a checkpoint; `mcc run --init CHECKPOINT` begins with its weights alone",
            };
            self.leave(&flag, why);
        }
        if let Some((flag, value)) = self.valued("save-interval") {
            if save.is_some() {
                self.run("--save-interval", value);
            } else {
                self.leave(&flag, "no checkpoints are written without `--save`");
            }
        }
        match seed {
            Some((flag, _)) if goes_on => self.leave(&flag, "a run that goes on has the seed that it began with"),
            Some((_, value)) => self.run("--seed", value),
            None => {}
        }
    }

    /// How ranks find each other.
    pub fn waits(&mut self) {
        let is_gpu = self.choices.target.starts_with("sm_");
        let backend = self.valued("distributed-backend");
        if is_gpu {
            let wants_host = backend.as_ref().is_some_and(|(_, v)| v.whole() == Some("gloo"));
            self.run("--exchanges", Text::known(if wants_host { "host" } else { "nccl" }, 0));
        } else if let Some((flag, _)) = backend {
            self.leave(
                &flag,
                "on CPUs ranks exchange through memory; for GPUs import with `--target sm_90a` or `sm_80`, and the line has `--exchanges nccl`",
            );
        }
        if let Some((flag, minutes)) = self.number("distributed-timeout-minutes") {
            if self.starts.is_empty() {
                self.leave(&flag, "ranks of one machine do not wait to meet");
            } else {
                self.run("--rendezvous-timeout", Text::known(minutes.saturating_mul(60).max(1).to_string(), flag.line));
            }
        }
        if self.launch.launcher() == Launcher::Mpi {
            let place =
                self.shell.needed("RENDEZVOUS", "HOST:PORT of the first rank's machine, where ranks meet: mpirun does not say it", self.launch.line);
            self.run("--rendezvous", place);
        }
    }
}
