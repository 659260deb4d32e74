//! What a rank holds in memory: bytes by kind, and by line of the model text.
//!
//! Everything is planned before a rank starts: the persistent arena, and the temporary one, in which the stashes lie
//! with a slot for every microbatch in flight. That is about as large as the command needs that needs most, for
//! temporary buffers in use and for all that is stashed meanwhile: of a step, or of an evaluation. So the peak is a
//! sum, and its owners are buffers. What a rank takes beside its arenas is for its device to say
//! ([`Footprint::and`]).

use crate::commands::best_fit::{ALIGN, LiveRange, fullest};
use crate::commands::liveness::ArenaLiveness;
use ir::diag::{Diagnostic, Sources, Span};
use ir::program::{Action, Arena, BLOCK, Buffer, BufferId, CallSchedule, Content, Job, Program, ProgramPhase, Space, Stage};
use std::collections::{BTreeMap, BTreeSet};

/// What bytes are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MemoryCategory {
    /// With their copies in 16 bits or in the device's memory.
    Parameters,
    /// Accumulators of gradients, and other f32 values that are made once a step.
    Gradients,
    /// With the weights, where parameters are copies.
    Optimizer,
    /// Constant arrays of the job, as those of rotary embeddings.
    Tables,
    /// Kept from the forward to the backward pass, for every microbatch in flight.
    Activations,
    /// To and from other stages, where they have slots of their own.
    Messages,
    /// Within one call, and what a plan of offsets leaves free.
    Temporary,
    /// What exchanges with other ranks, or with a disk, go through.
    Exchanges,
    /// Of the kernels, for each thread that runs them.
    Scratch,
    /// What a card's driver takes for a process: its context, the kernels' code, captured graphs.
    Context,
}

impl MemoryCategory {
    /// All kinds, in the order in which reports list them.
    pub const ALL: [MemoryCategory; 10] = [
        MemoryCategory::Parameters,
        MemoryCategory::Gradients,
        MemoryCategory::Optimizer,
        MemoryCategory::Tables,
        MemoryCategory::Activations,
        MemoryCategory::Messages,
        MemoryCategory::Temporary,
        MemoryCategory::Exchanges,
        MemoryCategory::Scratch,
        MemoryCategory::Context,
    ];

    /// As reports call it.
    pub fn name(self) -> &'static str {
        match self {
            MemoryCategory::Parameters => "parameters",
            MemoryCategory::Gradients => "gradients",
            MemoryCategory::Optimizer => "optimizer",
            MemoryCategory::Tables => "tables",
            MemoryCategory::Activations => "activations",
            MemoryCategory::Messages => "messages",
            MemoryCategory::Temporary => "temporary",
            MemoryCategory::Exchanges => "exchanges",
            MemoryCategory::Scratch => "scratch of a thread",
            MemoryCategory::Context => "context",
        }
    }

    pub(super) fn of(program: &Program, messages: &[bool], buffer: &Buffer) -> MemoryCategory {
        match (buffer.arena, &buffer.content) {
            (Arena::Stash | Arena::HostStash, _) if program.stash(buffer).is_some_and(|(k, _)| messages[k]) => MemoryCategory::Messages,
            (Arena::Stash | Arena::HostStash, _) => MemoryCategory::Activations,
            (Arena::Temporary | Arena::Staging, _) => MemoryCategory::Temporary,
            (Arena::Persistent | Arena::Host | Arena::Disk, Content::Param { .. }) => MemoryCategory::Parameters,
            // Sums are f32, so values that are computed once per step in 16 bits are copies of parameters and a few
            // statistics of data.
            (Arena::Persistent | Arena::Host | Arena::Disk, Content::Accumulator | Content::Activation) if buffer.dtype.is_half() => {
                MemoryCategory::Parameters
            }
            (Arena::Persistent | Arena::Host | Arena::Disk, Content::State { .. }) => {
                ir::fault!("report.memory.states", MemoryCategory::Parameters, MemoryCategory::Optimizer)
            }
            (Arena::Persistent | Arena::Host | Arena::Disk, Content::Table { .. }) => MemoryCategory::Tables,
            (Arena::Persistent | Arena::Host | Arena::Disk, Content::Accumulator | Content::Activation) => MemoryCategory::Gradients,
        }
    }
}

/// Which stashes hold nothing but messages.
pub(super) fn of_messages(program: &Program) -> Vec<bool> {
    let commands = program.bodies.iter().flat_map(|b| &b.commands).map(|c| &c.action);
    let messages: BTreeSet<BufferId> =
        commands.filter(|a| matches!(a, Action::Send { .. } | Action::Recv { .. })).flat_map(Action::buffers).collect();
    let mut out = vec![true; program.stashes.len()];
    for (k, buffer) in program.buffers.iter().enumerate().filter(|(_, b)| b.arena.is_stash()) {
        if let Some((stash, _)) = program.stash(buffer) {
            out[stash] = ir::fault!("report.memory.messages", true, out[stash]) && messages.contains(&BufferId(k as u32));
        }
    }
    out
}

/// The command of a rank at which most bytes of temporary buffers and stashes of a memory are in use.
struct Peak {
    /// Stashes that are in use.
    stashed: Vec<usize>,
    temporary: BTreeSet<BufferId>,
    /// The phase, the body and the command.
    at: (ProgramPhase, usize, usize),
}

impl Peak {
    fn of(program: &Program, schedule: &CallSchedule, space: Space) -> Peak {
        let lives = ArenaLiveness::of_stage(program, schedule, space);
        let (_, moment) = fullest(lives.temporary.values().chain(&lives.stashes));
        let moment = ir::fault!("report.peak.moment", 0, moment);
        let alive = |need: &LiveRange| need.spans.iter().any(|(from, to)| (*from..=*to).contains(&moment));
        Peak {
            stashed: (0..lives.stashes.len()).filter(|k| alive(&lives.stashes[*k])).collect(),
            temporary: lives.temporary.iter().filter(|(_, need)| alive(need)).map(|(id, _)| *id).collect(),
            at: lives.at(moment),
        }
    }
}

/// The bytes of a rank of one stage, by kind: of its device's memory, unless it says otherwise.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// Bytes in the device's memory.
    pub bytes: BTreeMap<MemoryCategory, u64>,
    /// Of the host's memory, by kind.
    pub host: BTreeMap<MemoryCategory, u64>,
    /// Of its disk, by kind.
    pub disk: BTreeMap<MemoryCategory, u64>,
    /// Slots of the stashes of activations at the peak, if all have as many; else 1.
    pub slots: u64,
    /// Its device is the host's CPU, so that all is in the host's memory.
    pub is_on_cpu: bool,
}

/// Most bytes that a rank may have in each memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget(pub [u64; Space::ALL.len()]);

impl Budget {
    /// Bytes allowed in one memory; `u64::MAX` where it has no limit.
    pub fn of(self, space: Space) -> u64 {
        self.0[space as usize]
    }

    /// The first memory of which ranks of some stage take more.
    pub fn exceeded(self, all: &Footprints) -> Option<Space> {
        Space::ALL.into_iter().find(|space| all.most_of(*space).1.of_space(*space) > self.of(*space))
    }
}

impl Footprint {
    /// Of the ranks of a pipeline stage. Its total is what the arenas hold.
    pub fn of(job: &Job, stage: usize) -> Footprint {
        let Stage { program, schedule, .. } = &job.stages[stage];
        let program = &job.programs[*program as usize];
        let messages = of_messages(program);
        let peaks = Space::ALL.map(|space| Peak::of(program, schedule, space));
        let of_activations: Vec<u32> =
            peaks[Space::Device as usize].stashed.iter().filter(|k| !messages[**k]).map(|k| schedule.slots[*k].count).collect();
        let slots = of_activations.first().filter(|n| of_activations.iter().all(|m| m == *n)).map_or(1, |n| u64::from(*n));
        let arenas = schedule.arena_bytes(program);
        let lasting = |arena: Arena, align: u64| {
            let mut bytes: BTreeMap<MemoryCategory, u64> = BTreeMap::new();
            for b in program.buffers.iter().filter(|b| b.arena == arena) {
                *bytes.entry(MemoryCategory::of(program, &messages, b)).or_default() +=
                    ir::fault!("report.memory.aligned", b.bytes(), b.bytes().next_multiple_of(align));
            }
            bytes
        };
        let [bytes, host] = Space::ALL.map(|space| {
            let mut bytes = lasting(space.lasting(), ALIGN);
            let mut temporary = arenas[ir::fault!("report.memory.staging", space.lasting(), space.temporary()) as usize];
            for k in &peaks[space as usize].stashed {
                let stash = program.stashes[*k].bytes * u64::from(ir::fault!("report.memory.slots", 1, schedule.slots[*k].count));
                *bytes.entry(if messages[*k] { MemoryCategory::Messages } else { MemoryCategory::Activations }).or_default() += stash;
                temporary -= stash;
            }
            bytes.insert(MemoryCategory::Temporary, temporary);
            bytes
        });
        Footprint { bytes, host, disk: lasting(Arena::Disk, BLOCK), slots, is_on_cpu: false }
    }

    /// With what a rank takes beside its arenas.
    pub fn and(mut self, kind: MemoryCategory, bytes: u64) -> Footprint {
        *self.bytes.entry(kind).or_default() += bytes;
        self
    }

    /// Bytes in the device's memory, of all kinds.
    pub fn total(&self) -> u64 {
        self.bytes.values().sum()
    }

    /// Of the host's memory.
    pub fn on_host(&self) -> u64 {
        self.host.values().sum()
    }

    /// Of one of its memories.
    pub fn of_space(&self, space: Space) -> u64 {
        match space {
            Space::Device => self.total(),
            Space::Host if self.is_on_cpu => self.total().saturating_add(self.on_host()),
            Space::Host => self.on_host(),
        }
    }

    /// Of its disk.
    pub fn on_disk(&self) -> u64 {
        self.disk.values().sum()
    }
}

/// The footprints of all stages, from the one of each.
pub struct Footprints(Vec<Footprint>);

impl Footprints {
    /// `of` says what a rank of a stage takes.
    pub fn new(job: &Job, of: Measure<'_>) -> Footprints {
        Footprints((0..job.stages.len()).map(|stage| of(job, stage)).collect())
    }

    /// The first stage whose ranks hold most.
    pub fn most(&self) -> (usize, &Footprint) {
        self.most_by(|f| ir::fault!("report.memory.most", 0, f.total()))
    }

    /// As [`Footprints::most`], in one of their memories.
    pub fn most_of(&self, space: Space) -> (usize, &Footprint) {
        self.most_by(|f| f.of_space(space))
    }

    /// The first stage of whose ranks a number is greatest.
    pub fn most_by(&self, of: impl Fn(&Footprint) -> u64) -> (usize, &Footprint) {
        let all = self.0.iter().enumerate();
        all.max_by_key(|(k, f)| (of(f), std::cmp::Reverse(*k))).expect("invariant: a job has stages")
    }

    /// The first stage whose ranks hold least.
    pub fn least(&self) -> (usize, &Footprint) {
        self.0.iter().enumerate().min_by_key(|(_, f)| f.total()).expect("invariant: a job has stages")
    }
}

/// What a rank of a stage takes: [`Footprint::of`], or that and more.
pub type Measure<'a> = &'a (dyn Fn(&Job, usize) -> Footprint + Sync);

/// Bytes that a line of the model text is answerable for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LineMemory {
    /// What the buffers are for.
    pub kind: MemoryCategory,
    /// A place on the line; `None` for buffers that come from no line.
    pub span: Option<Span>,
    /// Bytes at the peak, counting all slots of a stash.
    pub bytes: u64,
    /// Number of buffers; one with several slots counts once.
    pub buffers: u64,
}

/// Who holds the peak of a stage's ranks in their device's memory: persistent buffers, and at the command that needs
/// most, what is stashed meanwhile, in all its slots, and the temporary buffers in use; by kind and line, largest
/// first.
pub fn owners(job: &Job, stage: usize) -> Vec<LineMemory> {
    owners_in(job, stage, Space::Device)
}

/// As [`owners`], of a memory.
fn owners_in(job: &Job, stage: usize, space: Space) -> Vec<LineMemory> {
    let Stage { program, schedule, .. } = &job.stages[stage];
    let program = &job.programs[*program as usize];
    let messages = of_messages(program);
    let peak = Peak::of(program, schedule, space);
    let mut found: BTreeMap<(MemoryCategory, Option<(u16, u32)>), LineMemory> = BTreeMap::new();
    for (k, b) in program.buffers.iter().enumerate().filter(|(_, b)| b.arena.space() == Some(space)) {
        let (kind, span) = (MemoryCategory::of(program, &messages, b), b.origin.as_ref().and_then(|o| o.span));
        let copies = match b.arena {
            Arena::Stash | Arena::HostStash => match program.stash(b) {
                Some((stash, _)) if ir::fault!("report.owners.peak", true, peak.stashed.contains(&stash)) => u64::from(schedule.slots[stash].count),
                _ => continue,
            },
            Arena::Temporary | Arena::Staging if !peak.temporary.contains(&BufferId(k as u32)) => continue,
            Arena::Persistent | Arena::Temporary | Arena::Host | Arena::Staging | Arena::Disk => 1,
        };
        let owner = found.entry((kind, span.map(|s| (s.file, s.line)))).or_insert(LineMemory { kind, span, bytes: 0, buffers: 0 });
        owner.bytes += b.bytes().next_multiple_of(ALIGN) * copies;
        owner.buffers += 1;
    }
    let mut out: Vec<LineMemory> = found.into_values().collect();
    out.sort_by_key(|o| std::cmp::Reverse(o.bytes));
    out
}

/// When the ranks of a stage hold most: the phase, the body and the command of its program.
pub fn instant(job: &Job, stage: usize) -> (ProgramPhase, usize, usize) {
    let Stage { program, schedule, .. } = &job.stages[stage];
    Peak::of(&job.programs[*program as usize], schedule, Space::Device).at
}

/// E0640: a rank would hold more than the budget in one of its memories. Names the largest owners by line. What would
/// fit is for those to add who know how options are spelled.
pub fn over_budget(job: &Job, all: &Footprints, sources: &Sources, space: Space, budget: Budget) -> Diagnostic {
    let (stage, footprint) = all.most_of(space);
    let whose = if job.stages.len() == 1 { "a rank".to_string() } else { format!("a rank of pipeline stage {stage}") };
    let (needs, budget) = (footprint.of_space(space), size(budget.of(space)));
    let of = if space == Space::Host { " of the host's memory" } else { "" };
    let mut d = Diagnostic::error("E0640", format!("{whose} needs {}{of}, which is more than its budget of {budget}", size(needs)));
    let spaces = if space == Space::Host && footprint.is_on_cpu { &Space::ALL[..] } else { &[space] };
    let mut named: Vec<LineMemory> = spaces.iter().flat_map(|space| owners_in(job, stage, *space)).collect();
    named.sort_by_key(|o| std::cmp::Reverse(o.bytes));
    for o in named.iter().filter(|o| o.span.is_some_and(|s| usize::from(s.file) < sources.files.len())).take(LABELS) {
        let Some(span) = o.span else { continue };
        let slots = match o.kind {
            MemoryCategory::Activations if footprint.slots > 1 && space == Space::Device => {
                format!(" = {} microbatches in flight x {}", footprint.slots, size(o.bytes / footprint.slots))
            }
            _ => String::new(),
        };
        d = d.label(span, format!("{}: {}{slots}", o.kind.name(), size(o.bytes)));
    }
    let parts = |bytes: &BTreeMap<MemoryCategory, u64>, of: &str| -> Vec<String> {
        bytes.iter().filter(|p| *p.1 > 0).map(|(k, b)| format!("{} {}{of}", k.name(), size(*b))).collect()
    };
    let parts = match space {
        Space::Device => parts(&footprint.bytes, ""),
        Space::Host if footprint.is_on_cpu => [parts(&footprint.bytes, ""), parts(&footprint.host, " on the host")].concat(),
        Space::Host => parts(&footprint.host, ""),
    };
    d.note(format!("{} = {}", size(needs), parts.join(" + ")))
}

/// Owners that an error names.
const LABELS: usize = 6;

/// `1.50 GiB`.
pub fn size(bytes: u64) -> String {
    let (mut x, mut unit) = (bytes as f64, "B");
    for next in ["KiB", "MiB", "GiB", "TiB"] {
        if x < 1024.0 {
            break;
        }
        (x, unit) = (x / 1024.0, next);
    }
    if unit == "B" { format!("{bytes} B") } else { format!("{x:.2} {unit}") }
}
