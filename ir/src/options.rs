//! How a model is split and run: what the command line says, as data.

use crate::pipeline::Schedule;
use crate::tiles::Generation;
use serde::{Deserialize, Serialize};

/// How a model is split and run.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Ranks of data parallelism.
    pub dp: u64,
    /// Ranks of context parallelism.
    pub cp: u64,
    /// Ranks of tensor parallelism.
    pub tp: u64,
    /// Pipeline stages.
    pub pp: u64,
    /// Ranks over which experts are split; a part of dp x cp x tp.
    pub ep: u64,
    /// Ranks over which each expert is split; none: tp.
    pub etp: Option<u64>,
    /// Whether tensor-parallel ranks split the sequence, where they split nothing else.
    pub sp: SequenceParallel,
    /// How attention gets at the keys of other context-parallel ranks.
    pub cp_comm: CpComm,
    /// What data-parallel ranks share out among themselves.
    pub zero: Zero,
    /// Copies of what `zero` shares out: the ranks of data parallelism are so many groups, each of which has all of it
    /// (hybrid sharding, HSDP; Zhao et al. 2023). A divisor of `dp`.
    pub replicas: u64,
    /// Sequences per microbatch and data-parallel rank.
    pub micro_batch: u64,
    /// Sequences per step, over all microbatches and ranks.
    pub global_batch: u64,
    /// In which order pipeline stages run passes.
    pub schedule: Schedule,
    /// Virtual stages of a stage; none: as many as the schedule needs, or one.
    pub vpp: Option<u64>,
    /// Microbatches in a group, of an interleaved schedule; none: as many as stages.
    pub group: Option<u64>,
    /// How layers are cut into virtual stages.
    pub layout: Cuts,
    /// Vocabularies are padded to a multiple of this times the axes that split them.
    pub pad_vocab_to: u64,
    /// Whether communication has streams of its own.
    pub overlap: Overlap,
    /// Whether a forward pass and the backward pass after it, of another microbatch, run side by side.
    pub pass_pairs: bool,
    /// What the order of commands is to save.
    pub memory_order: MemoryOrder,
    /// Whether a rank's exchanges are to follow each other one by one, without buffers: NCCL asks for that.
    pub serial_exchanges: bool,
    /// Whether optimizers run on the host, and where their states are.
    pub offload: Offload,
    /// Where parameters rest, beside an optimizer on the host.
    pub param_offload: ParamOffload,
    /// Which activations wait on the host for the backward pass.
    pub activation_offload: ActivationOffload,
    /// Whether products of f32 factors are multiplied as tf32.
    pub tf32: bool,
    /// Which products are split along what they sum over.
    pub split_k: SplitK,
    /// Whether products and tensor-parallel collectives go in chunks, side by side.
    pub tp_overlap: TpOverlap,
    /// Into how many chunks of tokens logits are cut, at most; none: as many as keep them small.
    pub logits_chunks: Option<u64>,
    /// What the backward pass computes again, beside what is cheap.
    pub recompute: Recompute,
    /// How rows of the ops' tables are chosen.
    pub rows: RowChoice,
    /// Elements with which a bucket of gradients or parameters is full; none: by the number of data-parallel ranks.
    pub bucket_size: Option<u64>,
    /// How many rows of experts there is room for.
    pub moe_buffer: MoeBuffer,
    /// In how many passes, each with that room, rows of experts are computed at most.
    pub moe_passes: u64,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            dp: 1,
            cp: 1,
            tp: 1,
            pp: 1,
            ep: 1,
            etp: None,
            sp: SequenceParallel::Off,
            cp_comm: CpComm::Ring,
            zero: Zero::None,
            replicas: 1,
            micro_batch: 1,
            global_batch: 1,
            schedule: Schedule::OneFOneB,
            vpp: None,
            group: None,
            layout: Cuts::Even { embedding: Counts::AsNothing, loss: Counts::AsNothing },
            pad_vocab_to: 1,
            overlap: Overlap::On,
            pass_pairs: false,
            memory_order: MemoryOrder::Time,
            serial_exchanges: false,
            offload: Offload::Off,
            param_offload: ParamOffload::Off,
            activation_offload: ActivationOffload::Off,
            tf32: false,
            split_k: SplitK::Off,
            tp_overlap: TpOverlap::Off,
            logits_chunks: None,
            recompute: Recompute::None,
            rows: RowChoice::Rules,
            bucket_size: None,
            moe_buffer: MoeBuffer::Whole,
            moe_passes: MOE_PASSES,
        }
    }
}

impl Options {
    /// Whether passes run in pairs: streams of communication are to be beside compute.
    pub fn pairs_passes(&self) -> bool {
        self.pass_pairs && self.overlap == Overlap::On
    }
}

/// Options by their names, of those that messages speak of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum OptionName {
    /// Of [`Options::dp`].
    Dp,
    /// Of [`Options::cp`].
    Cp,
    /// Of [`Options::tp`].
    Tp,
    /// Of [`Options::pp`].
    Pp,
    /// Of [`Options::ep`].
    Ep,
    /// Of [`Options::etp`].
    Etp,
    /// Of [`Options::replicas`].
    Replicas,
    /// Of [`Options::logits_chunks`].
    LogitsChunks,
    /// Of [`Options::cp_comm`].
    CpComm,
    /// Of [`Options::micro_batch`].
    MicroBatch,
    /// Of [`Options::global_batch`].
    GlobalBatch,
    /// Of [`Options::vpp`].
    Vpp,
    /// Of [`Options::group`].
    Group,
    /// Of [`Options::pad_vocab_to`].
    PadVocabTo,
    /// Of [`Options::moe_buffer`].
    MoeBuffer,
    /// Of [`Options::moe_passes`].
    MoePasses,
    /// Of [`Train::clip`](crate::model::Train::clip).
    Clip,
    /// Of [`Options::pass_pairs`].
    PassPairs,
}

impl OptionName {
    /// Every name, in the order of declaration.
    pub const ALL: [OptionName; 18] = [
        OptionName::Dp,
        OptionName::Cp,
        OptionName::Tp,
        OptionName::Pp,
        OptionName::Ep,
        OptionName::Etp,
        OptionName::Replicas,
        OptionName::LogitsChunks,
        OptionName::CpComm,
        OptionName::MicroBatch,
        OptionName::GlobalBatch,
        OptionName::Vpp,
        OptionName::Group,
        OptionName::PadVocabTo,
        OptionName::MoeBuffer,
        OptionName::MoePasses,
        OptionName::Clip,
        OptionName::PassPairs,
    ];

    /// As in [`Options`] or [`Train`](crate::model::Train), and in the text of a module.
    pub fn name(self) -> &'static str {
        match self {
            OptionName::Dp => "dp",
            OptionName::Cp => "cp",
            OptionName::Tp => "tp",
            OptionName::Pp => "pp",
            OptionName::Ep => "ep",
            OptionName::Etp => "etp",
            OptionName::Replicas => "replicas",
            OptionName::LogitsChunks => "logits_chunks",
            OptionName::CpComm => "cp_comm",
            OptionName::MicroBatch => "micro_batch",
            OptionName::GlobalBatch => "global_batch",
            OptionName::Vpp => "vpp",
            OptionName::Group => "group",
            OptionName::PadVocabTo => "pad_vocab_to",
            OptionName::MoeBuffer => "moe_buffer",
            OptionName::MoePasses => "moe_passes",
            OptionName::Clip => "clip",
            OptionName::PassPairs => "pass_pairs",
        }
    }
}

/// Whether sequence parallelism (tp's second tier) is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SequenceParallel {
    /// The plan's dims of `sp` are another tier of tp.
    On,
    /// Values without a dim that tp splits are whole on all of its ranks.
    Off,
}

/// How attention gets at the keys of other context-parallel ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum CpComm {
    /// Keys and values go round the ranks, which compute with those of one rank while those of the next are under way (ring attention).
    #[default]
    Ring,
    /// All-gather of keys and values; reduce-scatter of their gradients.
    AllGather,
    /// All-to-all between positions and heads (DeepSpeed Ulysses).
    AllToAll,
    /// All-to-all over the inner sub-axes, as far as they fit the heads; a ring over the others, the outermost at least.
    AllToAllAndRing,
}

impl CpComm {
    /// Every way, the default first.
    pub const ALL: [CpComm; 4] = [CpComm::Ring, CpComm::AllGather, CpComm::AllToAll, CpComm::AllToAllAndRing];

    /// As in the text of a module.
    pub fn name(self) -> &'static str {
        match self {
            CpComm::Ring => "ring",
            CpComm::AllGather => "all_gather",
            CpComm::AllToAll => "all_to_all",
            CpComm::AllToAllAndRing => "all_to_all_and_ring",
        }
    }
}

/// What data-parallel ranks share out among themselves instead of each having all of it (Rajbhandari et al. 2020); each level
/// includes those before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Zero {
    /// Each rank has all states, gradients and parameters.
    #[default]
    None,
    /// ZeRO-1.
    States,
    /// ZeRO-2: gradients too, which are summed where they rest in every microbatch.
    Gradients,
    /// ZeRO-3: parameters too, which are gathered in every pass of a microbatch.
    Params,
}

impl Zero {
    /// Every level, each with what those before share out.
    pub const ALL: [Zero; 4] = [Zero::None, Zero::States, Zero::Gradients, Zero::Params];
}

/// How layers are cut into virtual stages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cuts {
    /// As even as possible, of layers and, if they are to count as such, the embedding and the loss.
    Even {
        /// How what comes before all layers counts.
        embedding: Counts,
        /// How what comes after all layers counts.
        loss: Counts,
    },
    /// The number of layers on each virtual stage.
    Sizes(Vec<u32>),
    /// Megatron's text form: [`parse`].
    Text(String),
    /// So that the virtual stage with the most arithmetic has as little as possible.
    Balanced,
}

/// What counts as a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counts {
    /// It takes up no share of a stage.
    AsNothing,
    /// It takes up as much of a stage as a layer.
    AsLayer,
}

/// What the backward pass computes again, beside what is cheap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Recompute {
    /// Nothing beside what is cheap.
    #[default]
    None,
    /// What is inside of the functions that the plan's `recompute` names; by default the attention core.
    Selective,
    /// All of a unit but the values that enter it: units of so many layers, which begin anew on every stage.
    Uniform(u32),
    /// As `Uniform(1)`, the first so many layers of every stage only.
    Block(u32),
}

/// How rows of the ops' tables are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowChoice {
    /// By the rules of this module.
    Rules,
    /// At random among the sound ones, by seed: whatever the algebra allows must compute the same.
    Random(u64),
}

/// Passes that rows of experts are computed in at most, unless something else is asked for. Of 256 experts on 64
/// ranks, 8 a token, those of [`MOE_ROOM`] are 26.
pub const MOE_PASSES: u64 = 32;

/// More passes would be more kernels and exchanges than are worth it.
pub const MOST_MOE_PASSES: u64 = 64;

/// The room for rows of experts unless something else is asked for, in shares of a balanced router: the capacity
/// factor with which Switch Transformers were trained, which drop what is beyond it.
pub const MOE_ROOM: f64 = 1.25;

/// How many rows of experts there is room for, in a pass.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum MoeBuffer {
    /// [`MOE_ROOM`] times a rank's share if all experts get equally many, and more where all passes together would
    /// not have room for all that there can be, whatever is chosen.
    #[default]
    Whole,
    /// So many times a rank's share if all experts get equally many; more than all passes have room for stops the run.
    Factor(f64),
}

/// Whether products run beside the tensor-parallel collectives that they wait for or cause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TpOverlap {
    /// A product begins when all of its operand is there, and is reduced when it is done.
    #[default]
    Off,
    /// Products and their collectives in at most so many chunks of equally many rows.
    Pipeline {
        /// At most; fewer where so many do not divide the rows.
        chunks: u64,
    },
}

/// Which products are made in segments of what they sum over (K), whose results are then added up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SplitK {
    /// No product is split.
    #[default]
    Off,
    /// Those with so few tiles that a GPU of this generation is faster so.
    For(Generation),
    /// All, into at most so many segments: for tests of what is computed.
    Into(u64),
}

/// Where optimizers run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Offload {
    /// On the device, with states in its memory.
    #[default]
    Off,
    /// On the host, with states in its memory.
    Optimizer,
    /// On the host, with states on a disk.
    Disk,
}

/// Where what passes read of parameters rests: each pass copies it to the device before it uses it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ParamOffload {
    /// On the device.
    #[default]
    Off,
    /// In the host's memory.
    Host,
    /// On a disk of the host.
    Disk,
}

/// Which of the activations that a forward pass leaves for its backward pass wait on the host, in its memory: of the
/// first so many layers of every stage, or without a number of all layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ActivationOffload {
    /// None: all stay in the device's memory.
    #[default]
    Off,
    /// All that layers keep.
    Layers(Option<u32>),
    /// Those that are marked in the graph ([`Origin::offloaded`](crate::graph::Origin::offloaded)).
    Marked(Option<u32>),
}

/// What the order of commands is to save.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MemoryOrder {
    /// Communication is under way beside compute; that may take a little more memory.
    #[default]
    Time,
    /// As few bytes are in use at a time as is known.
    Memory,
}

/// Whether communication runs beside compute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Overlap {
    /// All commands on one stream.
    Off,
    /// Communication on streams of its own.
    #[default]
    On,
}
