//! The invariants of all verifiers: a number, a name and a sentence for each, said once.

/// The table as an enumeration: `number Name "what holds"`.
macro_rules! invariants {
    ($($number:literal $name:ident $holds:literal)*) => {
        /// What holds of every module that a pass leaves. Violated, it is a bug of the pass before.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Invariant {
            $(#[doc = $holds] $name = $number,)*
        }

        impl Invariant {
            /// All of them, by number.
            pub const ALL: &[Invariant] = &[$(Invariant::$name,)*];

            /// What holds, in one sentence.
            pub fn holds(self) -> &'static str {
                match self {
                    $(Invariant::$name => $holds,)*
                }
            }

            /// `ReadBeforeWrite`.
            fn camel(self) -> &'static str {
                match self {
                    $(Invariant::$name => stringify!($name),)*
                }
            }
        }
    };
}

impl Invariant {
    /// `304`.
    pub fn number(self) -> u16 {
        self as u16
    }

    /// `read_before_write`.
    pub fn name(self) -> String {
        let mut out = String::new();
        for c in self.camel().chars() {
            if c.is_uppercase() && !out.is_empty() {
                out.push('_');
            }
            out.extend(c.to_lowercase());
        }
        out
    }

    /// The group to which it belongs.
    pub fn group(self) -> &'static Group {
        GROUPS.iter().rev().find(|g| g.first <= self.number()).expect("invariant: the first group begins before all numbers")
    }
}

impl std::fmt::Display for Invariant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "V{}", self.number())
    }
}

/// Invariants that one verifier checks, from its first number on.
pub struct Group {
    /// Number of its first invariant; the others come before the first of the next group.
    pub first: u16,
    /// What they are about: a heading of the page of invariants.
    pub title: &'static str,
    /// Where it is checked, below `verify/src`.
    pub file: &'static str,
}

/// All groups, by number.
pub const GROUPS: &[Group] = &[
    Group { first: 100, title: "Logical graphs", file: "graph.rs" },
    Group { first: 130, title: "What graphs of all levels name", file: "references.rs" },
    Group { first: 150, title: "Graphs compute what their text says", file: "meaning/claims.rs" },
    Group { first: 200, title: "Sharded graphs", file: "sharded.rs" },
    Group { first: 300, title: "Local graphs by themselves", file: "partition/local.rs" },
    Group { first: 310, title: "What stages exchange", file: "partition/exchanges.rs" },
    Group { first: 320, title: "Local graphs compute the sharded graph", file: "partition/stage.rs" },
    Group { first: 340, title: "Rings of attention", file: "partition/ring.rs" },
    Group { first: 350, title: "Values between stages", file: "partition/stages.rs" },
    Group { first: 360, title: "What a stage holds, updates and reports", file: "partition/ends.rs" },
    Group { first: 400, title: "Classes of rewritten graphs", file: "equivalence/mod.rs" },
    Group { first: 410, title: "Steps of rewritten graphs", file: "equivalence/run.rs" },
    Group { first: 430, title: "Buckets", file: "equivalence/pieces.rs" },
    Group { first: 440, title: "What rewritten graphs leave", file: "equivalence/outcome.rs" },
    Group { first: 500, title: "Programs compute their local graphs", file: "lowering/program.rs" },
    Group { first: 530, title: "Jobs describe their graphs", file: "lowering/described.rs" },
    Group { first: 600, title: "Jobs as a whole", file: "job/mod.rs" },
    Group { first: 620, title: "Operands of commands", file: "job/access.rs" },
    Group { first: 640, title: "Buffers at rest", file: "job/persistent.rs" },
    Group { first: 660, title: "One call of a body", file: "job/body.rs" },
    Group { first: 700, title: "Calls of a program", file: "job/order.rs" },
    Group { first: 720, title: "What passes from call to call", file: "job/order.rs" },
    Group { first: 740, title: "Reports", file: "job/order.rs" },
    Group { first: 800, title: "Streams and events", file: "job/races.rs" },
    Group { first: 900, title: "Ranks together", file: "job/exchange.rs" },
    Group { first: 920, title: "Replicas", file: "job/replicas.rs" },
];

invariants! {
    101 NodeType "Every node has the type that its op gives it, from operands that come before it."
    102 LogicalOp "No op of a lower level, as a reshard or a collective, is in a logical graph."
    103 PhaseOrder "Phases only look back: the forward pass uses nothing of the backward pass, and that nothing of the update."
    104 ScalarLoss "A loss is a scalar."
    105 GradientDims "A gradient has the dims of its parameter."
    106 OneGradient "A parameter has one gradient at most."
    107 OneUpdate "After `optimize`, every parameter that has a gradient has one update."
    108 UpdatePhase "New parameters and states are values of the update phase."

    131 GraphsOfLevel "Below the logical level, the graphs of a step and of an evaluation are sharded."
    132 AxisSizes "The mesh of a graph has no empty axis, less than 2^32 ranks and microbatches, and as many axes in its stages."
    133 GraphNames "What a graph names exists: parameters, inputs, tables, digits of dims, and values of the sharded graph."
    134 GraphSizes "Dims and index maps have an element at least, and less than 2^54, as values and buckets have."
    135 StageOfGraph "A local graph belongs to one stage or more, each with a parameter for each of its slots."
    136 OperandCount "A node has as many operands as its op takes."

    150 SameNames "A graph has the dims, parameters, inputs and reports of its text."
    151 SameValues "Losses, metrics and outputs have the values that the text gives them."
    152 Gradient "Along a random direction the text's loss grows as the gradients say, and what trains alone has one."
    153 Norm "The norm of a step is that of all its gradients, each parameter's once and without the loss scale."
    154 Renewed "New parameters and states are what plain formulas of clipping and of the optimizer, or the text, make of them."
    155 CleanPadding "The padding of parameters and states stays zero."
    156 UnroundedSum "A sum of 16-bit values that is wanted in f32 is not rounded before its end."
    157 EvaluatesStep "An evaluation has the values of the step with random drops at their mean."
    158 IndexWithin "Whatever inputs hold of what they may, no index made of one of their numbers leaves its table."

    201 ShardedNodeType "Every node of a sharded graph has the type that its op gives it."
    202 StoredInOrder "An op that goes by the order of a dim has one that is stored in plain order."
    203 OrderOfOriginal "A dim that is a copy of another one is stored as that is, in an order that fits its size."
    204 SplitDim "A value that is split has the dim, the sub-axis is one of the dim's digits, and the digits divide it."
    205 OpRow "The shardings of an op's operands and result are a row of the op's table, on every sub-axis."
    206 WholeSource "A source, as a parameter or an input, is not a partial sum."
    207 ReshardSubAxes "A reshard changes the sharding on its own sub-axes alone."
    208 ReshardRow "A reshard leads from one sharding to another by a row of the table of reshards."
    209 OneReduction "What a reshard reduces is not a partial sum and a partial maximum at once: they do not commute."
    210 MicrobatchesApart "No reshard exchanges parts between microbatches."
    211 RestingPlace "A new parameter or state is sharded as the old one."
    212 ReportEverywhere "What a step reports is whole on every rank."
    213 RowHolds "The rows of an op's table that a graph uses hold on numbers: the op of the parts, joined, is the op of the whole."

    301 LocalTables "The tables beside a local graph have one entry for each node."
    302 LocalNodeType "Every node of a local graph has the type that its op gives it."
    303 NoReshard "No reshard is left in a local graph."
    304 ChunkOrder "A node uses none of a later chunk."
    305 OwnMicrobatch "What runs per microbatch uses of other chunks what passes before it left, and sums of the prologue."
    306 LocalSharding "A local node has the sharding of the value that it holds."
    307 LocalShape "A local node has the dims of the value that it holds, each as large as the sharding says."

    311 PeerStage "What a stage sends or receives goes to or comes from a stage that exists."
    312 MessageMeaning "The n-th message that a stage sends on a channel holds what the other one takes it for."
    313 MessageSent "What a stage receives on a channel, another one sends."
    314 SumMeaning "Stages that sum together sum the same values in the same order."

    320 AccumulatedValue "What is accumulated over microbatches holds a value of the sharded graph."
    321 HeldType "A local node has the element type, the number of dims and the sharding of the value that it holds."
    322 Accumulation "A value is accumulated exactly where its sharding says that it is a sum over microbatches."
    323 HeldPart "A local node holds the part of its value that the sharding says, element by element."
    324 ReshardSteps "Views, slices and collectives lead from a reshard's operand to its result."
    325 SumBehind "A sum over microbatches is accumulated before it is used by what runs once."
    326 OnceForAll "What runs once does not depend on a microbatch."
    327 MicrobatchSum "What is accumulated over microbatches is a sum."
    328 DimPart "A local dim has the size, the order and the indices of its part of the dim."
    329 DimNames "A dim of an op is one local dim in its result and all operands."
    330 OperandPart "The operands of a local op hold the parts of the operands of the op."
    331 SameOp "A local node is the op of its value, along the local dims."
    332 MaskedTerm "A mask keeps a replicated value on one rank and is zero on the others, so that their sum is the value."
    333 ExpertRoom "Where a group of experts has not room for all rows that there can be, a limit stops the step."

    340 RingStep "Each node of a ring is a step of the lemma: a block of attention, a merge, a shift or a sum."
    341 RingMerge "Two parts of attention are merged by the exponentials of their own log-sum-exps."
    342 RingBounds "Exponents of a merge are bounded below, and what divides is greater than zero."
    343 RingBlocks "A ring has the parts of all blocks of keys, each once."
    344 RingHome "The gradient of a block of keys is added to gradients of that block, and ends where the block is."
    345 RingOperands "A step of a ring is the op, with keys, values and positions of one block."

    350 StageSumForm "A sum over stages is an all-reduce of a sum, over no ranks of a stage, that runs once."
    351 StageSumTerm "What a stage adds to a sum over stages is the sum, or terms of it, each once."
    352 StageSumComplete "The stages of a sum add all of its terms, each once."
    353 SentValue "What a stage sends is a value, or several one after the other."
    354 MessagePieces "A message is cut into values one after the other, with nothing between and nothing left."

    360 UsedParameter "A stage holds the parameters that its graph uses."
    361 ParameterPart "A stage holds the part of a parameter that the sharding says."
    362 UpdatesOfStage "A stage updates its parameters that have an update, each once."
    363 StatesOfUpdate "An update has the states of its parameter."
    364 NewValue "An update holds the new value of its parameter, or of its state."
    365 ReportNumbers "A stage reports what the graph reports."
    366 ReportedValue "A report holds the value that the graph reports."

    401 ClassesCover "Classes cover all stages, each once."
    402 ClassAlike "The graphs of all stages of a class are one, up to names."
    403 EvaluatedParameters "An evaluation uses parameters that the step has too."
    404 SameLayout "A graph has the mesh, the parameters and the buckets that it had, and those of training and evaluation agree."
    405 OneHome "A bucket holds parameters that exist, each in one place."
    406 SlotPart "A parameter's slot is the part that it was, with the states that it had."
    407 OneType "Whatever reads or renews a parameter takes it to be of one element type."

    410 AllMeet "All stages of a sum over stages come to it."
    411 RewrittenOnce "What runs once in a rewritten graph does not depend on a microbatch."
    412 StageSum "A collective over stages is a sum, of the stages that take part in it."
    413 StagesAlike "What stages give to a sum has one size, and the same parts."
    414 DigitView "A view or slice of a rewritten graph is a map of digits."
    415 OpOnPieces "An op of values in pieces is one that pieces go through: along one dim, element by element, or on each rank by itself."
    416 JoinedOperands "Operands of a concatenation have the dims of its result, and are not parts of buckets."
    417 KnownSum "What is summed is known, and the same on all ranks that have it."
    418 UpdatedOnce "A parameter is updated once."

    430 BucketExists "A slot beyond those of parameters is that of a bucket."
    431 BucketAlone "A parameter that lies in a bucket is read from there."
    432 BucketPart "A value of a bucket is all of it, or a rank's own equal part of its states."
    433 BucketOwners "All states of a bucket are parts of the same ranks."
    434 BucketPieces "The pieces of a bucket lie apart, within it, each as large as its parameter."
    435 BucketUpdate "A bucket holds parameters that are updated, in the parts and with the states that they have."
    436 BucketAligned "Operands that are parts of buckets are parts of the same ranks and of the same size."

    440 SameReports "A rewritten graph reports what it reported."
    441 SameChannels "A rewritten graph sends on the channels on which it sent, as many values."
    442 SameLimits "A rewritten graph holds to limits what it held to them."
    443 SameReport "A report of a rewritten graph has the value that it had."
    444 SameMessage "What a rewritten graph sends is what it sent."
    445 SameUpdates "A rewritten graph updates the parameters that it updated, and every bucket."
    446 SameParameter "A new parameter, with its states, is what it was."
    447 SameBucket "A new bucket, with its states, holds what its parameters were to be."

    501 ProgramSlot "A parameter of a local graph has a slot in the program."
    502 ProgramTable "A table of a local graph is one of the job's."
    503 LoweredView "A view of a local graph is a map of digits."
    504 ReadValue "Every operand of a command reads one value, whole."
    505 KernelMeaning "Every node of a kernel is one that terms can say."
    506 AddedSum "What a command adds to holds a sum."
    507 Reported "A program reports what its graph reports."
    508 ReportValue "A report of a program has the value of its graph."
    509 LimitValues "A program holds to limits what its graph does."
    510 SentChannels "A program sends on the channels of its graph, as many values."
    511 SentValues "What a program sends is what its graph sends, in that order."
    512 MetStages "A program exchanges with the stages with which its graph does, as many values."
    513 MetValues "What a program exchanges with other stages is what its graph does, in that order."
    514 RestValue "A parameter or state of a program is one value after a step."
    515 FinalValue "A parameter or state of a program is, after a step, what its graph says."
    516 MayBeLeftOut "What a bool may leave out is a launch, a copy or a collective."
    517 ReadIfMade "What a bool may leave out is read only by what the same bool leaves out, unless it adds to a sum."
    518 LeftOutByAll "The members of a collective that a bool may leave out have the same bool."

    530 DescribedSettings "A job has the model, settings, optimizer, mesh and batch of its module."
    531 DescribedParameters "A job describes the parameters of its graph: names, sizes, orders of storage, initial values."
    532 DescribedInputs "A job describes the inputs of its graph: names, types, sizes, defaults, and what they may hold."
    533 DescribedTables "A job has the tables of the step, in its order."
    534 DescribedReports "A job names what its graphs report, and an evaluation reports what a step does."
    535 DescribedStages "A stage runs the program of its class, with the parameters that it has there."

    601 MeshSize "A job's mesh has no empty axis, as many as bits tell apart, and no more ranks than numbers."
    602 MeshFits "A job has the stages and the microbatches of its mesh."
    603 ChannelRoom "A channel takes at least one message."
    604 InputRange "Of inputs of integers it is said what they may hold, as intervals in order and apart; of others nothing."
    605 KernelSound "A kernel keeps its own invariants."
    606 StageProgram "A stage runs a program that exists."
    607 ProgramRuns "A program is run by a stage."
    608 GroupAxes "The axes of a group tell ranks of a stage apart, each once."
    609 GroupStages "The stages of a group exist, in order, this one among them."
    610 ParameterPlaced "Every parameter is on some stage."
    611 RankPlaces "Coordinates and stage of a rank, and the members of its groups, are those that arithmetic on ranks gives."

    620 NamedThing "What a command or buffer names exists."
    621 PlaceCount "A launch passes as many places as its kernel has operands."
    622 ScalarType "A launch passes as many scalars as its kernel has, of their types."
    623 RandomSeed "A kernel that draws random numbers is passed the seed and the step."
    624 OperandType "A command takes a buffer to be of the element type that it has."
    625 CoordinateAxis "A place depends on coordinates of axes that exist."
    626 OperandRange "What a command reaches of a buffer lies within it, at all coordinates."
    627 OperandPieces "An operand lies in no more pieces than a verifier looks at."
    628 WriteInjective "A command writes no element twice."
    629 WriteFixed "Where a command writes depends on no coordinate, except a rank's own part of a parameter."
    630 OperandsApart "What a command writes overlaps nothing else that it touches, except an operand point by point."
    631 ReductionType "A reduction fits its element type."
    632 WorkingMemory "The operands of a command lie in the memory that it works on."
    633 OperandAligned "What a kernel takes to be aligned is so, at all coordinates."
    634 DiskBlocks "A copy to or from a disk begins and ends at its blocks, or where its buffer does."

    640 StashDivision "Stashes divide the stash arena of their memory, at multiples of the alignment."
    641 ArenaSize "An arena is no larger than a device can address."
    642 BufferInArena "A buffer lies within its arena."
    643 BufferAligned "A buffer begins at a multiple of the alignment."
    644 BufferInStash "A buffer of the stash lies in one stash."
    645 LastingApart "Buffers that outlive a call lie apart."
    646 HeldLasts "Parameters, states and tables lie in an arena that lives over steps."
    647 SlotFilled "A slot that a program names has a parameter on each of its stages."
    648 SlotHeld "Every parameter of a stage is in a buffer."
    649 HeldOnce "A parameter, copy or state is in one buffer."
    650 PiecesInBucket "The pieces of a bucket lie in it one after the other."
    651 BucketAxes "A bucket is split over axes over which its parameters are not."
    652 BucketWhole "The weights of a bucket are all there."
    653 IndexShape "A buffer has an index map for each dim of what it holds, of the buffer's own size."
    654 StoredSize "A dim is no larger than its padding, and an order of storage fits it."
    655 SplitAxes "What a buffer holds is split over axes that exist, that may split it, each once."
    656 PartsCover "The parts of all ranks make up the whole, each element once."

    660 ReadBeforeWrite "A call reads no temporary buffer before it has written that."
    661 ReadWhole "What a call reads of a buffer that it writes, it has written all of."
    662 WrittenOnce "A call writes an element of a buffer once."
    663 OwnPartWritten "A part of a buffer that depends on coordinates is written where all of it was there before."
    664 HeldAdded "Nothing is added to parameters, states and tables."
    665 AddedAfterFill "What a call adds to was filled before."
    666 AddedBeforeRead "A call adds to nothing that it has read."
    667 AddedOnce "A call adds to an element of a buffer once, or again, but something else, to all elements of an earlier addition."
    668 WrittenWhole "A call that writes a buffer that outlives it writes all of it."
    669 AddedWhole "A call that adds to a buffer adds to all of it."
    670 TemporaryApart "Temporary buffers in use at the same command lie apart, those of calls side by side too."

    700 StashSlots "A schedule has slots for each stash: at least one, at most one for each microbatch."
    701 StashAligned "A stash begins at a multiple of the alignment."
    702 TemporarySize "Temporary memory is no larger than a device can address."
    703 CallExists "A call names a body and a microbatch that exist."
    704 BodyCalled "A body is called."
    705 CallPhase "A body is called in the phases of its kind."
    706 CalledOnce "A body is called once for a microbatch."
    707 PassOrder "A backward pass follows the forward pass of its microbatch, and weight gradients that."
    708 CallCount "A body is called once for each microbatch, or once where microbatches make no difference."
    709 StashAdded "Nothing is added to what is stashed."
    710 StashWriter "One body alone writes a buffer of the stash."
    711 StashWritten "What a call reads from a stash, a call for the same microbatch has written."
    712 StashOwner "A slot of a stash belongs to a microbatch until that is done with it."
    713 StashFromTemporary "No temporary buffer in use lies in a stash in use."
    714 StashesApart "Stashes in use at the same time lie apart."
    715 BodyCut "A pass may be cut into parts, between its commands and in order; no other body is."
    716 PartsInOrder "A microbatch goes through a body part by part; its other bodies, and other microbatches of this one, come before or after."

    720 StatesRenewed "Where an optimizer keeps states, a step renews them and their parameter."
    721 HeldInUpdate "Parameters and states change in an update alone, and tables never."
    722 ChangedOnce "A parameter or state changes once in a step."
    723 MadeOnce "A buffer that belongs to no microbatch is written by one call of a step."
    724 ReplacedOnce "A buffer that belongs to no microbatch is changed in place by one call of a step."
    725 SumFilled "A sum is set by one call before others add to it."
    726 SumFromZero "A sum begins at zero."
    727 SumComplete "A sum is read after its last addition."
    728 MadeBeforeRead "A buffer that outlives a call is read after it was written in the same step."
    729 SumOfSomething "A sum that is read is one to which something is added."

    740 ReportedOnce "A report is issued once, and not in an update."
    741 ReportDue "A step issues all reports, and an evaluation the loss."
    742 ReportsAgree "The evaluations of all stages issue the same reports."

    801 OwnStream "What is no communication is on the compute stream, or on the stream of its kind."
    802 OneStream "What goes to one group, channel, event or disk goes through one stream."
    803 NoRace "Of two commands that touch the same bytes, one of them writing, one is ordered after the other."

    901 MessageType "A message is received as the elements that it was sent as."
    902 MessageMicrobatch "A message is received for the microbatch for which it was sent."
    903 MessagePeer "A message goes to, or comes from, another stage that exists."
    904 MessageReceived "No phase leaves a message behind."
    905 MembersAgree "All members of a group issue the same collectives in the same order."
    906 NoDeadlock "No rank waits forever."
    907 SendTurns "Where sends have turns, each has one, and those of a channel go out in the order of issue."
    908 SendIssued "No send goes out before it is issued, or after what is to come later."
    909 SendGroup "What a send is at once with is a receive."
    910 NoSerialDeadlock "No rank waits forever where exchanges are done one by one, without buffers."

    920 ReportAlike "A report is the same on all ranks."
    921 CopiesAlike "Copies of a parameter or state stay the same."
    922 JoinedOnce "What was reduced along an axis is not reduced along it again."
    923 PartsGathered "Parts of a parameter that ranks renew are gathered."
}

/// Invariants that no text of a module can break, and why: whoever reads a text refuses it first, or reads what is
/// sound.
pub const BEYOND_TEXTS: &[(Invariant, &str)] = &[
    (Invariant::RowHolds, "a text has no rows of its own: those of mcc's table either hold or do not"),
    (Invariant::LocalTables, "a text says all of a node in the node's own line"),
    (Invariant::RankPlaces, "a text says along which axes ranks meet; who that is follows"),
    (Invariant::StageProgram, "a text names the bodies that a stage calls, and these are looked up in the stage's program"),
];
