//! What a script comes to: flags of `mcc compile` and `mcc run`, and what is left out of them, each with its
//! reason.

use super::flags::{Flag, Flags};
use super::launch::Launch;
use super::shell::{LineNote, Origin, Shell};
use super::text::Text;
use super::texts::ModelText;

/// A flag of a command of mcc.
#[derive(Clone, Debug)]
pub struct CommandFlag {
    /// `--tp`, or `-D layers`, whose value is written behind `=`.
    pub flag: String,
    pub values: Vec<Text>,
}

/// A choice of the user's that the script does not say.
#[derive(Clone, Copy, Debug)]
pub struct Choices<'a> {
    /// What kernels are for, as `--target` has it.
    pub target: &'a str,
}

pub struct Plan<'a> {
    pub shell: &'a mut Shell,
    pub flags: Flags,
    pub launch: &'a Launch,
    pub batch: &'a [(String, Text)],
    pub choices: Choices<'a>,
    pub text: &'static ModelText,
    pub compile: Vec<CommandFlag>,
    pub run: Vec<CommandFlag>,
    /// Steps between held-out losses and their batches, where the user has data for them.
    pub held_out: Vec<CommandFlag>,
    /// What comes of several flags, or of other units.
    pub computed: Vec<String>,
    /// What comes from Megatron-LM's defaults.
    pub defaults: Vec<String>,
    /// What is trained otherwise than by the script.
    pub differs: Vec<String>,
    pub left: Vec<LineNote>,
    /// Unknowns that may stand for flags.
    pub unseen: Vec<usize>,
    /// Flags of which nothing is known.
    pub strangers: Vec<String>,
    pub errors: Vec<String>,
    /// The words by which launchers on several machines start a run.
    pub starts: Vec<Text>,
}

/// What is computed from several flags, where it is known.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sizes {
    pub layers: Option<u64>,
    pub tp: u64,
    pub pp: u64,
    pub cp: u64,
    pub dp: Option<u64>,
    pub micro_batch: Option<u64>,
    pub global_batch: Option<u64>,
}

impl<'a> Plan<'a> {
    pub fn new(
        shell: &'a mut Shell,
        flags: Flags,
        launch: &'a Launch,
        batch: &'a [(String, Text)],
        choices: Choices<'a>,
        text: &'static ModelText,
    ) -> Plan<'a> {
        Plan {
            shell,
            flags,
            launch,
            batch,
            choices,
            text,
            compile: vec![],
            run: vec![],
            held_out: vec![],
            computed: vec![],
            defaults: vec![],
            differs: vec![],
            left: vec![],
            unseen: vec![],
            strangers: vec![],
            errors: vec![],
            starts: vec![],
        }
    }

    /// Follows all flags, in an order in which each finds what it depends on.
    pub fn make(&mut self) {
        let mut sizes = Sizes::default();
        self.mesh(&mut sizes);
        self.model(&mut sizes);
        self.pipeline(&sizes);
        self.batches(&mut sizes);
        self.precision();
        let steps = self.schedule(&sizes);
        self.data();
        self.steps(steps);
        self.checkpoints();
        self.waits();
        self.rest();
        self.sizes_are_there();
        self.left.sort_by_key(|note| note.line);
    }

    /// Without its sizes a model is the text's own, and not the script's.
    fn sizes_are_there(&mut self) {
        let has = |name: &str| self.compile.iter().any(|p| p.flag == format!("-D {name}"));
        let wanted = [
            ("--num-layers", ["layers", "encoder_layers"]),
            ("--hidden-size", ["hidden"; 2]),
            ("--num-attention-heads", ["heads"; 2]),
            ("--seq-length", ["seq", "source"]),
        ];
        let missing: Vec<&str> = wanted.iter().filter(|(_, names)| !names.iter().any(|n| has(n))).map(|(flag, _)| *flag).collect();
        if missing.is_empty() {
            return;
        }
        let hidden: Vec<String> = self.unseen.iter().map(|u| self.way_to_say(*u)).collect();
        let way = if hidden.is_empty() { "a checkpoint's own sizes are read by `mcc import hf`".into() } else { hidden.join(", ") };
        self.errors.push(format!("{}: the training has no {}: {way}", self.shell.place(self.launch.line), missing.join(", ")));
    }

    pub fn compile(&mut self, flag: &str, value: impl Into<Option<Text>>) {
        self.compile.push(CommandFlag { flag: flag.into(), values: value.into().into_iter().collect() });
    }

    pub fn run(&mut self, flag: &str, value: impl Into<Option<Text>>) {
        self.run.push(CommandFlag { flag: flag.into(), values: value.into().into_iter().collect() });
    }

    /// Sets a setting, if the text has it; otherwise says that it does not.
    pub fn set(&mut self, name: &str, value: Text, flag: &Flag) {
        if self.text.has(name) {
            self.compile(&format!("-D {name}"), value);
        } else {
            self.leave(flag, format!("models/{} has no setting `{name}`: change the text", self.text.file));
        }
    }

    /// Sets a setting that the text has to what Megatron-LM takes where a script is silent.
    pub fn set_default(&mut self, name: &str, value: &str, flag: &str) {
        if self.text.has(name) {
            self.compile(&format!("-D {name}"), Text::known(value, 0));
            self.defaults.push(format!("{flag} {value}"));
        }
    }

    /// Names a flag that is in no line.
    pub fn leave(&mut self, flag: &Flag, why: impl std::fmt::Display) {
        let text = format!("{}: {why}", self.shown(flag));
        self.left.push(LineNote { line: flag.line, text });
    }

    /// The same of a flag without which another training comes of it.
    pub fn leave_otherwise(&mut self, flag: &Flag, why: impl std::fmt::Display) {
        self.differs.push(format!("`{}`: {why}", self.shown(flag)));
        self.leave(flag, why);
    }

    /// Takes a flag and names it as left out.
    pub fn drop_flag(&mut self, name: &str, why: &str) {
        if let Some(flag) = self.flags.take(name) {
            self.leave(&flag, why);
        }
    }

    /// `--split 949,50,1`.
    pub fn shown(&self, flag: &Flag) -> String {
        let values: Vec<String> = flag.values.iter().map(|v| self.shell.shown(v)).collect();
        if values.is_empty() { flag.typed.clone() } else { format!("{} {}", flag.typed, values.join(" ")) }
    }

    /// Takes a flag with one value. Further words are named; a flag without a value is an error.
    pub fn valued(&mut self, name: &str) -> Option<(Flag, Text)> {
        let mut flag = self.flags.take(name)?;
        if flag.values.is_empty() {
            self.errors.push(format!("{}: `{}` has no value", self.shell.place(flag.line), flag.typed));
            return None;
        }
        self.flags.strays.extend(flag.values.drain(1..));
        let value = flag.values[0].clone();
        Some((flag, value))
    }

    /// Takes a flag without a value. Words behind it are named.
    pub fn switch(&mut self, name: &str) -> Option<Flag> {
        let mut flag = self.flags.take(name)?;
        self.flags.strays.append(&mut flag.values);
        Some(flag)
    }

    /// Takes the value of a flag that is computed with.
    pub fn number(&mut self, name: &str) -> Option<(Flag, u64)> {
        let (flag, value) = self.valued(name)?;
        let number = self.count(&flag, &value)?;
        Some((flag, number))
    }

    /// A value as a whole number. What is none, or not known, is an error.
    pub fn count(&mut self, flag: &Flag, value: &Text) -> Option<u64> {
        let number = self.real(flag, value)?;
        let is_whole = number.fract() == 0.0 && (0.0..9e15).contains(&number);
        if !is_whole {
            self.errors.push(format!("{}: `{}` should be a whole number", self.shell.place(flag.line), self.shown(flag)));
        }
        is_whole.then_some(number as u64)
    }

    pub fn real(&mut self, flag: &Flag, value: &Text) -> Option<f64> {
        match value.whole() {
            Some(text) => {
                let number = text.parse().ok().filter(|x: &f64| x.is_finite());
                if number.is_none() {
                    self.errors.push(format!("{}: `{}` should be a number", self.shell.place(flag.line), self.shown(flag)));
                }
                number
            }
            None => {
                let ways: Vec<String> = value.unknowns().map(|u| self.way_to_say(u)).collect();
                self.errors.push(format!(
                    "{}: `{}` decides what is compiled, and its value is not known: {}",
                    self.shell.place(flag.line),
                    self.shown(flag),
                    ways.join(", ")
                ));
                None
            }
        }
    }

    /// `` `--set 1=..` gives it``.
    fn way_to_say(&self, unknown: usize) -> String {
        let unknown = &self.shell.unknowns[unknown];
        let name = match &unknown.origin {
            Origin::Argument(k) => k.to_string(),
            Origin::Environment | Origin::Command(_) | Origin::Needed(_) => unknown.name.clone(),
        };
        format!("`--set {name}=..` gives it")
    }
}

/// A number as it is typed: `0.1`, `1e-5`.
pub fn typed(number: f64) -> String {
    if number != 0.0 && number.abs() < 1e-3 { format!("{number:e}") } else { number.to_string() }
}
