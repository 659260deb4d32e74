//! What `mcc run` reads and writes.

use super::flags::Flag;
use super::launch::Launcher;
use super::plan::{CommandFlag, Plan};
use super::text::{JOINED, Text};
use super::traits::Positions;
use data::blend::Blend;
use data::split::Split;

/// Flags of data sets, which are the same in mcc.
const SHARED: [&str; 2] = ["data-path", "data-args-path"];
const OWN: [&str; 4] = ["train-data-path", "valid-data-path", "test-data-path", "per-split-data-args-path"];

/// What there is to be said of flags of data sets where there are none.
const ABOUT_SETS: [&str; 2] = ["split", "data-cache-path"];

/// What there is to be said of validation data sets.
const OF_VALIDATION: [&str; 3] = ["multiple-validation-sets", "validation-set-names", "full-validation"];

/// Where the script says nothing.
const SEED: &str = "1234";
const INTERVAL: &str = "1000";
const BATCHES: &str = "100";

impl Plan<'_> {
    /// Training and held-out data, and steps between evaluations.
    pub fn data(&mut self) {
        let has_inputs = self.text.programs != ["pretrain_gpt.py", "finetune_gpt.py", "pretrain_gpt_core.py"];
        if has_inputs {
            for name in SHARED.iter().chain(&OWN) {
                self.drop_flag(name, "the text reads its inputs as they are, an array each: `DATA`");
            }
        }
        if let Some(flag) = self.switch("mock-data") {
            for name in SHARED.iter().chain(&OWN) {
                self.drop_flag(name, "`--mock-data` counts");
            }
            self.leave(&flag, "`DATA` names a file: any text has tokens, with `-D vocab=256`");
        }
        let evaluates = self.flags.get("eval-iters").and_then(|f| f.values.first()).and_then(Text::whole) != Some("0");
        if !evaluates {
            for name in ["eval-iters", "eval-interval", "valid-data-path", "test-data-path"].iter().chain(&OF_VALIDATION) {
                self.drop_flag(name, "`--eval-iters 0` says that nothing is evaluated");
            }
        }
        let is_of_sets = self.sets();
        if !is_of_sets {
            let what = match has_inputs {
                true => "INPUT=FILE.npy of the text's inputs, which Megatron-LM makes of its data step by step",
                false => "training data: the script names none",
            };
            let data = self.shell.needed("DATA", what, self.launch.line);
            self.run("--data", data);
            for name in ABOUT_SETS.iter().chain(&OWN) {
                self.drop_flag(name, "it is about data sets, and the script names none of training");
            }
        }
        if evaluates {
            self.evaluation(is_of_sets);
        }
        self.validation(is_of_sets);
        self.documents(is_of_sets);
        if self.flags.get("dataloader-type").and_then(|f| f.values.first()).and_then(Text::whole).is_some_and(|kind| kind != "single")
            && let Some(flag) = self.flags.take("dataloader-type")
        {
            self.leave_otherwise(&flag, "samples come in the order of `single`");
        }
    }

    /// How validation data sets are evaluated.
    fn validation(&mut self, is_of_sets: bool) {
        if !is_of_sets {
            for name in OF_VALIDATION {
                self.drop_flag(name, "it is about data sets, and the script names none of training");
            }
            return;
        }
        for name in ["multiple-validation-sets", "full-validation"] {
            if self.switch(name).is_some() {
                self.run(&format!("--{name}"), None);
            }
        }
        if let Some(flag) = self.flags.take("validation-set-names") {
            self.run.push(CommandFlag { flag: format!("--{}", flag.name), values: flag.values });
        }
    }

    /// Documents that share a sequence. The texts keep them apart in all ways or in none.
    fn documents(&mut self, is_of_sets: bool) {
        let [masks, packs, positions, loss] =
            ["reset-attention-mask", "dataloader-inter-document-masking", "reset-position-ids", "eod-mask-loss"].map(|name| self.switch(name));
        let has_setting = self.text.has("packed");
        if !has_setting || masks.is_none() && packs.is_none() {
            let why = match has_setting {
                true => "the text does so where attention keeps to documents too: `-D packed=true`".into(),
                false => format!("models/{} has no setting `packed`: change the text", self.text.file),
            };
            for flag in [masks, packs, positions, loss].into_iter().flatten() {
                self.leave_otherwise(&flag, &why);
            }
            return;
        }
        let line = masks.as_ref().or(packs.as_ref()).map_or(0, |f| f.line);
        self.compile("-D packed", Text::known("true", line));
        let typed: Vec<&str> = [&masks, &packs, &positions, &loss].into_iter().flatten().map(|f| f.typed.as_str()).collect();
        let borders = match is_of_sets {
            true => "documents end where the data set says, and `separator` is no token",
            false => "documents end behind the token `separator`, 0 if `-D` says no other",
        };
        let says = format!("-D packed=true: {}; {borders}", typed.join(" "));
        if is_of_sets {
            self.compile("-D separator", Text::known("-1", line));
        }
        self.computed.push(says);
        if masks.is_some() && self.flags.has("no-create-attention-mask-in-dataloader") {
            self.differs.push(
                "`--no-create-attention-mask-in-dataloader` keeps `--reset-attention-mask` from doing anything in the script: documents see each other there, not here".into(),
            );
        }
        if positions.is_none() && packs.is_none() && self.text.traits.positions == Positions::Learned {
            self.differs.push("positions begin anew with each document, as with `--reset-position-ids`".into());
        }
        if loss.is_none() {
            self.differs.push("what follows a document's end is no label, as with `--eod-mask-loss`".into());
        }
    }

    /// Data sets, with the flags that they have in the script. Gives whether there are any.
    fn sets(&mut self) -> bool {
        if SHARED.iter().any(|name| self.flags.has(name)) {
            for name in OWN {
                self.drop_flag(name, &format!("`--{}` counts", if self.flags.has(SHARED[0]) { SHARED[0] } else { SHARED[1] }));
            }
            if self.flags.has(SHARED[0]) {
                self.drop_flag(SHARED[1], "`--data-path` counts");
            }
        } else if !["train-data-path", "per-split-data-args-path"].iter().any(|name| self.flags.has(name)) {
            return false;
        } else {
            self.drop_flag("split", "each part of the run has data sets of its own");
        }
        for name in SHARED.iter().chain(&OWN) {
            let Some(flag) = self.flags.take(name) else { continue };
            self.blend(&flag);
        }
        if let Some((flag, value)) = self.valued("split") {
            let value = self.weights(&flag, value);
            self.run("--split", value);
        }
        if let Some((_, value)) = self.valued("data-cache-path") {
            self.run("--data-cache-path", value);
        }
        true
    }

    /// Whether the line names data sets.
    fn reads_sets(&self) -> bool {
        self.run.iter().any(|flag| SHARED.iter().chain(&OWN).any(|name| flag.flag.trim_start_matches('-') == *name))
    }

    /// A flag of data sets, as it is.
    fn blend(&mut self, flag: &Flag) {
        if flag.values.is_empty() {
            self.errors.push(format!("{}: `{}` has no value", self.shell.place(flag.line), flag.typed));
            return;
        }
        let known: Option<Vec<String>> = flag.values.iter().map(|v| v.whole().map(|v| v.replace(JOINED, ""))).collect();
        if let Some(Err(e)) = known.filter(|_| flag.name.ends_with("data-path")).map(|words| Blend::parse(&words)) {
            self.errors.push(format!("{}: `{}`: {e}", self.shell.place(flag.line), self.shown(flag)));
        }
        self.run.push(CommandFlag { flag: format!("--{}", flag.name), values: flag.values.clone() });
    }

    /// The numbers of a split, which is all that Megatron-LM reads of one: quotes may be left of a string.
    fn weights(&mut self, flag: &Flag, value: Text) -> Text {
        let Some(known) = value.whole() else { return value };
        let numbers: Vec<&str> = known.split(|c: char| c != '.' && !c.is_ascii_digit()).filter(|n| !n.is_empty()).collect();
        let split = numbers.join(",");
        if let Err(e) = Split::parse(&split) {
            self.errors.push(format!("{}: `{}`: {e}", self.shell.place(flag.line), self.shown(flag)));
        }
        Text::known(split, flag.line)
    }

    /// Held-out losses: of data sets, or of a file that the user names.
    fn evaluation(&mut self, is_of_sets: bool) {
        for (name, default) in [("eval-interval", INTERVAL), ("eval-iters", BATCHES)] {
            let value = match self.valued(name) {
                Some((_, value)) => value,
                None => {
                    if is_of_sets {
                        self.defaults.push(format!("--{name} {default}"));
                    }
                    Text::known(default, 0)
                }
            };
            let flag = CommandFlag { flag: format!("--{name}"), values: vec![value] };
            if is_of_sets { self.run.push(flag) } else { self.held_out.push(flag) }
        }
    }

    /// How long a run is, and what it says.
    pub fn steps(&mut self, steps: Option<u64>) {
        match steps {
            Some(steps) => self.run("--steps", Text::known(steps.to_string(), 0)),
            None if self.reads_sets() => {
                let steps = self.shell.needed("STEPS", "how many steps are trained: the script has no `--train-iters`", self.launch.line);
                self.run("--steps", steps);
            }
            None => {}
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
            // The order of samples depends on the seed, so Megatron-LM's default is taken.
            None if !goes_on && self.reads_sets() => {
                self.run("--seed", Text::known(SEED, 0));
                self.defaults.push(format!("--seed {SEED}"));
            }
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
