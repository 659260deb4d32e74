//! A pipeline as data: for every stage the order of its passes, and on which stage each layer is.
//!
//! A stage holds one or several virtual stages, each a run of layers. A microbatch goes forward through all virtual stages and backward
//! through them in the other direction; some schedules compute the gradients of parameters in passes of their own, which fill gaps. A
//! schedule that a generator made and one that was typed are the same thing, and pass the same check
//! ([`PassOrder::check`]).

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// Which generator makes the order of passes, or the order itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Schedule {
    /// All forwards, then all backwards (Huang et al. 2019).
    GPipe,
    /// One forward, one backward, after a warm-up; with several virtual stages on a stage, interleaved (Narayanan et al. 2021).
    OneFOneB,
    /// 1F1B, of whose backward passes the gradients of parameters are put off to fill gaps, with no more memory (Qi et al. 2023).
    ZbH1,
    /// Two virtual stages on each stage, laid down and up again, and backward passes in two; no gaps where all passes
    /// take equally long (Qi et al. 2023 and 2024).
    ZbV,
    /// Two virtual stages on each stage, laid down and up again; where all is under way, each forward pass has a
    /// backward pass of another microbatch beside it (DeepSeek-AI 2025, `dualpipe/dualpipev.py`).
    DualPipeV,
    /// The order itself, as a file says it.
    Given(PassOrder),
}

/// What a pass computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum PassKind {
    /// Activations.
    Forward,
    /// Gradients of activations; those of parameters too, unless the schedule has passes for them.
    Backward,
    /// Gradients of parameters.
    Weight,
}

/// A pass of one microbatch through one of a stage's virtual stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Pass {
    /// What it computes.
    pub kind: PassKind,
    /// Among the stage's virtual stages, in the order of the forward pass.
    pub chunk: u32,
    /// From 0, within the step.
    pub microbatch: u32,
}

impl Pass {
    /// Reads `F0.3`.
    pub fn parse(word: &str) -> Option<Pass> {
        let kind = match word.chars().next()? {
            'F' => PassKind::Forward,
            'B' => PassKind::Backward,
            'W' => PassKind::Weight,
            _ => return None,
        };
        let (chunk, microbatch) = word[1..].split_once('.')?;
        let number = |s: &str| s.parse::<u32>().ok().filter(|_| s.bytes().all(|b| b.is_ascii_digit()));
        Some(Pass { kind, chunk: number(chunk).filter(|c| *c < MOST_CHUNKS)?, microbatch: number(microbatch)? })
    }
}

/// `F0.3`: the kind, the virtual stage, the microbatch.
impl fmt::Display for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            PassKind::Forward => 'F',
            PassKind::Backward => 'B',
            PassKind::Weight => 'W',
        };
        write!(f, "{kind}{}.{}", self.chunk, self.microbatch)
    }
}

/// On which stage each virtual stage is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StagePlacement {
    /// Virtual stage g on stage `g mod p`, as its number `g div p`.
    Interleaved,
    /// The first p on the stages in order, the next p in the opposite order: the first and the last are on the first stage.
    V,
}

impl StagePlacement {
    /// The stage of a virtual stage, of `stages`, and its number there.
    pub fn place(self, virtual_stage: u32, stages: u32) -> (u32, u32) {
        let (along, chunk) = (virtual_stage % stages, virtual_stage / stages);
        match self {
            StagePlacement::Interleaved => (along, chunk),
            StagePlacement::V if chunk % 2 == 1 => crate::fault!("pipeline.place.v", (along, chunk), (stages - 1 - along, chunk)),
            StagePlacement::V => (along, chunk),
        }
    }
}

/// The passes of all stages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PassOrder {
    /// On which stage each virtual stage is.
    pub placement: StagePlacement,
    /// Per stage, its passes in the order in which it runs them.
    pub stages: Vec<Vec<Pass>>,
}

/// Why an order of passes is none.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum ScheduleError {
    #[error("line {line}: {what}")]
    Line { line: usize, what: String },
    /// `index` counts from 1, as people do.
    #[error("stage {stage}, pass {index} ({pass}): {what}")]
    Pass { stage: u32, index: usize, pass: Pass, what: String },
    #[error("{0}")]
    Whole(String),
}

/// A number for every pass through so many virtual stages.
struct Numbers {
    virtual_stages: u32,
    microbatches: u32,
}

impl Numbers {
    fn of(&self, kind: PassKind, virtual_stage: u32, microbatch: u32) -> usize {
        ((kind as u32 * self.virtual_stages + virtual_stage) as usize) * self.microbatches as usize + microbatch as usize
    }

    /// How many there are.
    fn count(&self) -> usize {
        self.of(PassKind::Weight, self.virtual_stages, 0)
    }

    /// What a pass through a virtual stage needs and is not done yet: of a kind, at a virtual stage.
    fn lacks(&self, done: &[bool], g: u32, pass: &Pass) -> Option<(PassKind, u32)> {
        let needs = match pass.kind {
            PassKind::Forward => [g.checked_sub(1).map(|before| (PassKind::Forward, before)), None],
            PassKind::Backward => [Some((PassKind::Forward, g)), (g + 1 < self.virtual_stages).then_some((PassKind::Backward, g + 1))],
            PassKind::Weight => [Some((PassKind::Backward, g)), None],
        };
        needs.into_iter().flatten().find(|(kind, g)| !done[self.of(*kind, *g, pass.microbatch)])
    }
}

impl PassOrder {
    /// Virtual stages on each stage.
    pub fn chunks(&self) -> u32 {
        self.stages.iter().flatten().map(|p| p.chunk + 1).max().unwrap_or(1)
    }

    /// Whether gradients of parameters have passes of their own.
    pub fn splits_backward(&self) -> bool {
        self.stages.iter().flatten().any(|p| p.kind == PassKind::Weight)
    }

    /// Checks that every stage has every pass once, and that they can be run in this order: a pass follows those that it needs, on
    /// its stage and on others, and messages arrive in the order in which they are sent.
    ///
    /// # Errors
    /// A pass that is missing, repeated, unknown or never has what it needs.
    pub fn check(&self, microbatches: u32) -> Result<(), ScheduleError> {
        let (stages, chunks, numbers) = (self.stages.len() as u32, self.chunks(), self.numbers(microbatches));
        let kinds = if self.splits_backward() {
            &[PassKind::Forward, PassKind::Backward, PassKind::Weight][..]
        } else {
            &[PassKind::Forward, PassKind::Backward]
        };
        let virtual_stage = self.virtual_stages();
        let mut seen = vec![false; numbers.count()];
        for (s, passes) in self.stages.iter().enumerate() {
            for (k, pass) in passes.iter().enumerate() {
                let error = |what: String| Err(ScheduleError::Pass { stage: s as u32, index: k + 1, pass: *pass, what });
                if pass.microbatch >= microbatches {
                    return error(format!("there are {microbatches} microbatches, from 0"));
                }
                if std::mem::replace(&mut seen[numbers.of(pass.kind, virtual_stage[s][pass.chunk as usize], pass.microbatch)], true) {
                    return error("it is there twice".into());
                }
            }
            for kind in kinds {
                let mut all = (0..chunks).flat_map(|chunk| (0..microbatches).map(move |microbatch| Pass { kind: *kind, chunk, microbatch }));
                if let Some(pass) = all.find(|p| !seen[numbers.of(p.kind, virtual_stage[s][p.chunk as usize], p.microbatch)]) {
                    return Err(ScheduleError::Whole(format!("stage {s} has no pass {pass}")));
                }
            }
        }
        let mut done = vec![false; seen.len()];
        let mut at = vec![0; self.stages.len()];
        let lacks = |done: &[bool], stage: usize, pass: &Pass| numbers.lacks(done, virtual_stage[stage][pass.chunk as usize], pass);
        let mut moved = true;
        while std::mem::take(&mut moved) {
            for (s, passes) in self.stages.iter().enumerate() {
                while let Some(pass) = passes.get(at[s]).filter(|p| lacks(&done, s, p).is_none()) {
                    done[numbers.of(pass.kind, virtual_stage[s][pass.chunk as usize], pass.microbatch)] = true;
                    at[s] += 1;
                    moved = true;
                }
            }
        }
        let stuck = |(s, passes): (usize, &Vec<Pass>)| {
            let pass = *passes.get(at[s])?;
            Some((s, pass, lacks(&done, s, &pass)?))
        };
        let Some((s, pass, (kind, g))) = self.stages.iter().enumerate().find_map(stuck) else { return self.check_messages() };
        let (on, chunk) = self.placement.place(g, stages);
        let needed = Pass { kind, chunk, microbatch: pass.microbatch };
        let what = format!("it needs {needed} of stage {on}, which cannot come before it");
        Err(ScheduleError::Pass { stage: s as u32, index: at[s] + 1, pass, what })
    }

    fn numbers(&self, microbatches: u32) -> Numbers {
        Numbers { virtual_stages: self.stages.len() as u32 * self.chunks(), microbatches }
    }

    /// By stage and its own number, each virtual stage's.
    fn virtual_stages(&self) -> Vec<Vec<u32>> {
        let (stages, chunks) = (self.stages.len() as u32, self.chunks());
        let mut out = vec![vec![0; chunks as usize]; stages as usize];
        for g in 0..stages * chunks {
            let (s, c) = self.placement.place(g, stages);
            out[s as usize][c as usize] = g;
        }
        out
    }

    /// By stage, the forward passes that run in a pair with the backward pass behind them, of another microbatch, and
    /// that: what either sends may leave when both have ended, and neither begins before both have what they need.
    ///
    /// All stages are played so, each waiting for both passes of a pair. Where all of them wait, a pair is none: that
    /// of the first stage whose forward pass could go alone. The order can be run ([`PassOrder::check`]).
    pub fn pairs(&self) -> Vec<BTreeMap<Pass, Pass>> {
        let microbatches = self.stages.iter().flatten().map(|p| p.microbatch + 1).max().unwrap_or(0);
        let virtual_stage = self.virtual_stages();
        let numbers = self.numbers(microbatches);
        let mut done = vec![false; numbers.count()];
        let mut at = vec![0; self.stages.len()];
        let mut pairs = vec![BTreeMap::new(); self.stages.len()];
        let mut apart: Option<usize> = None;
        loop {
            let mut moved = false;
            for (s, passes) in self.stages.iter().enumerate() {
                loop {
                    let left = &passes[at[s]..];
                    let two = is_pair(left) && apart != Some(s);
                    let next = &left[..if two { 2 } else { left.len().min(1) }];
                    let g = |pass: &Pass| virtual_stage[s][pass.chunk as usize];
                    let needs = &next[..next.len().min(crate::fault!("pipeline.pairs.first", 1, 2))];
                    if needs.is_empty() || needs.iter().any(|pass| numbers.lacks(&done, g(pass), pass).is_some()) {
                        break;
                    }
                    for pass in next {
                        done[numbers.of(pass.kind, g(pass), pass.microbatch)] = true;
                    }
                    if two {
                        pairs[s].insert(next[0], next[1]);
                    }
                    at[s] += next.len();
                    (moved, apart) = (true, None);
                }
            }
            if !moved {
                let could = |(s, passes): (usize, &Vec<Pass>)| {
                    let pass = passes.get(at[s])?;
                    let alone = numbers.lacks(&done, virtual_stage[s][pass.chunk as usize], pass).is_none();
                    alone.then_some(s)
                };
                apart = self.stages.iter().enumerate().find_map(could);
                if apart.is_none() {
                    return pairs;
                }
            }
        }
    }

    /// Checks that microbatches go to the next virtual stage in the order in which they come from the one before, where that is on
    /// another stage: messages do not overtake each other.
    fn check_messages(&self) -> Result<(), ScheduleError> {
        let stages = self.stages.len() as u32;
        let last = stages * self.chunks() - 1;
        for g in 0..last {
            let (up, down) = (self.placement.place(g, stages), self.placement.place(g + 1, stages));
            for (kind, from, to) in [(PassKind::Forward, up, down), (PassKind::Backward, down, up)] {
                let of = |place: (u32, u32)| {
                    let passes = self.stages[place.0 as usize].iter().enumerate();
                    passes.filter(move |(_, p)| (p.kind, p.chunk) == (kind, place.1))
                };
                let mut pairs = of(from).zip(of(to)).filter(|_| from.0 != to.0);
                if let Some(((_, sent), (k, pass))) = pairs.find(|((_, a), (_, b))| a.microbatch != b.microbatch) {
                    let what = format!("stage {} runs {sent} before the pass that this one follows, and messages do not overtake each other", from.0);
                    return Err(ScheduleError::Pass { stage: to.0, index: k + 1, pass: *pass, what });
                }
            }
        }
        Ok(())
    }

    /// The text that [`PassOrder::parse`] reads: `placement v`, if so, then a line per stage, `0: F0.0 F0.1 B0.0 ...`.
    pub fn text(&self) -> String {
        let mut out = String::new();
        if self.placement == StagePlacement::V {
            out.push_str("placement v\n");
        }
        for (s, passes) in self.stages.iter().enumerate() {
            let words: Vec<String> = passes.iter().map(|p| format!(" {p}")).collect();
            out.push_str(&format!("{s}:{}\n", words.concat()));
        }
        out
    }

    /// Reads a schedule; `#` begins a comment.
    ///
    /// # Errors
    /// The first line that is none. What the passes are is for [`PassOrder::check`].
    pub fn parse(text: &str) -> Result<PassOrder, ScheduleError> {
        let mut order = PassOrder { placement: StagePlacement::Interleaved, stages: vec![] };
        for (k, line) in text.lines().enumerate() {
            let error = |what: String| ScheduleError::Line { line: k + 1, what };
            let line = line.split('#').next().unwrap_or_default().trim();
            if line.is_empty() {
                continue;
            }
            if let Some(placement) = line.strip_prefix("placement ") {
                order.placement = match placement.trim() {
                    "v" => StagePlacement::V,
                    "interleaved" => StagePlacement::Interleaved,
                    other => return Err(error(format!("`{other}` is no placement: `interleaved` and `v` are"))),
                };
                continue;
            }
            let stage = order.stages.len();
            let (number, passes) = line.split_once(':').ok_or_else(|| error(format!("expected `{stage}: F0.0 ...`, the passes of stage {stage}")))?;
            if number.trim().parse() != Ok(stage) {
                return Err(error(format!("expected stage {stage}, found `{}`", number.trim())));
            }
            let read = |word: &str| Pass::parse(word).ok_or_else(|| error(format!("`{word}` is no pass: `F0.3`, `B0.3` and `W0.3` are")));
            order.stages.push(passes.split_whitespace().map(read).collect::<Result<_, _>>()?);
        }
        if order.stages.is_empty() {
            return Err(ScheduleError::Whole("it has no line `0: F0.0 ...`".into()));
        }
        Ok(order)
    }
}

/// Whether passes begin with a forward pass and a backward pass of another microbatch: neither needs the other.
fn is_pair(passes: &[Pass]) -> bool {
    matches!(passes, [f, b, ..] if (f.kind, b.kind) == (PassKind::Forward, PassKind::Backward) && f.microbatch != b.microbatch)
}

/// The most virtual stages on a stage.
pub const MOST_CHUNKS: u32 = 1 << 10;

/// What a virtual stage holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VirtualStage {
    /// How many layers, which follow those of the virtual stage before.
    pub layers: u32,
    /// Whether it has what comes before all layers.
    pub embedding: bool,
    /// Whether it has what comes after all layers.
    pub loss: bool,
}

/// Which virtual stage holds each layer, and which stage each virtual stage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Pipeline stages.
    pub stages: u32,
    /// Virtual stages of a stage.
    pub chunks: u32,
    /// On which stage each virtual stage is.
    pub placement: StagePlacement,
    /// The virtual stage of what comes before all layers.
    pub embedding: u32,
    /// The virtual stage of what comes after all layers.
    pub loss: u32,
    /// Virtual stage by layer.
    pub of_layer: Vec<u32>,
}

impl Layout {
    /// What each virtual stage holds. Unless a part has the embedding or the loss, it is with the first or the last layer.
    pub fn from_parts(parts: &[VirtualStage], stages: u32, placement: StagePlacement) -> Layout {
        let of_layer: Vec<u32> = parts.iter().enumerate().flat_map(|(g, p)| std::iter::repeat_n(g as u32, p.layers as usize)).collect();
        let with = |has: fn(&VirtualStage) -> bool, layer: Option<&u32>| parts.iter().position(has).map(|g| g as u32).or(layer.copied());
        let embedding = with(|p| p.embedding, of_layer.first()).unwrap_or(0);
        let loss = with(|p| p.loss, of_layer.last()).unwrap_or(parts.len() as u32 - 1);
        Layout { stages, chunks: parts.len() as u32 / stages, placement, embedding, loss, of_layer }
    }

    /// The number of virtual stages, over all stages.
    pub fn virtual_stages(&self) -> u32 {
        self.stages * self.chunks
    }

    /// The stage of a virtual stage.
    pub fn stage(&self, virtual_stage: u32) -> u32 {
        self.placement.place(virtual_stage, self.stages).0
    }

    /// The number of a virtual stage on its stage.
    pub fn chunk(&self, virtual_stage: u32) -> u32 {
        self.placement.place(virtual_stage, self.stages).1
    }
}

/// When gradients of parameters are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightGradients {
    /// With those of activations.
    InBackward,
    /// In chunks of their own.
    Apart,
}

/// Where layers are, and when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pipeline {
    /// On which stage each layer is.
    pub layout: Layout,
    /// The passes of each stage, in the order in which it runs them.
    pub order: PassOrder,
}

impl Pipeline {
    /// When gradients of parameters are computed.
    pub fn weights(&self) -> WeightGradients {
        if self.order.splits_backward() { WeightGradients::Apart } else { WeightGradients::InBackward }
    }
}
