//! Instructions after decoding: registers are numbers, labels are places, what is not known has been refused.

/// A register of 32 bits (also of 16 and 8).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct W(pub u16);

/// A register of 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct D(pub u16);

/// A predicate register.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct P(pub u16);

/// A register that an instruction writes, of any size; `Sink` is `_`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reg {
    W(W),
    D(D),
    Sink,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Special {
    /// `%tid`, `%ntid`, `%ctaid`, `%nctaid`, by direction.
    Tid(usize),
    Ntid(usize),
    Ctaid(usize),
    Nctaid(usize),
    Lane,
    Warp,
    /// A mask of the lanes that compare so with this one: equal, up to, before, from or after.
    Mask(LaneMask),
    Clock,
    /// A constant of this launch: the bytes of dynamic shared memory.
    DynamicShared,
    /// `%clusterid`, `%nclusterid`, `%cluster_ctaid`, `%cluster_nctaid`, by direction.
    Cluster(usize),
    Clusters(usize),
    ClusterCtaid(usize),
    ClusterNctaid(usize),
    /// The number of the block in its cluster.
    Rank,
    /// The number of blocks of a cluster.
    Ranks,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LaneMask {
    Eq,
    Le,
    Lt,
    Ge,
    Gt,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Sw {
    Reg(W),
    Imm(u32),
    Special(Special),
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Sd {
    Reg(D),
    Imm(u64),
    /// A 32-bit register, extended with zeros.
    Low(W),
    Clock,
}

/// A source of any size.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Src {
    W(Sw),
    D(Sd),
}

/// A predicate, possibly negated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Sp {
    Reg(P, bool),
    Const(bool),
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Address {
    pub base: Sd,
    pub offset: i64,
}

/// What an access is to others' (PTX ISA, section 8.4): whether it is strong, and makes known what went before it, or
/// learns what others made known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Order {
    pub strong: bool,
    pub release: bool,
    pub acquire: bool,
}

/// For whom an arrival or a wait orders memory: threads of the block, or of all blocks of the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryScope {
    Block,
    Cluster,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    /// Any of the others, by the window of the address.
    Generic,
    Global,
    /// Shared memory of the block.
    Shared,
    /// Shared memory of any block of the cluster.
    Cluster,
    Local,
    /// A kernel's parameters; constant memory.
    Param,
}

/// How the bits of an operand are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ty {
    U8,
    S8,
    U16,
    S16,
    U32,
    S32,
    U64,
    S64,
    F16,
    Bf16,
    F32,
    F64,
}

impl Ty {
    pub fn bytes(self) -> u32 {
        match self {
            Ty::U8 | Ty::S8 => 1,
            Ty::U16 | Ty::S16 | Ty::F16 | Ty::Bf16 => 2,
            Ty::U32 | Ty::S32 | Ty::F32 => 4,
            Ty::U64 | Ty::S64 | Ty::F64 => 8,
        }
    }

    pub fn is_signed(self) -> bool {
        matches!(self, Ty::S8 | Ty::S16 | Ty::S32 | Ty::S64)
    }

    pub fn is_float(self) -> bool {
        matches!(self, Ty::F16 | Ty::Bf16 | Ty::F32 | Ty::F64)
    }
}

/// Integer functions of two operands, of 16, 32 or 64 bits. Division by zero gives all ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Int2 {
    Add,
    Sub,
    MulLo,
    MulHi,
    Div,
    Rem,
    Min,
    Max,
    /// At least 0.
    MinRelu,
    MaxRelu,
    And,
    Or,
    Xor,
    Shl,
    Shr,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Int1 {
    Neg,
    Not,
    Abs,
    /// Counts: of ones, of leading zeros; both into 32 bits.
    Popc,
    Clz,
    Brev,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Float1 {
    Neg,
    Abs,
    Sqrt,
    Rcp,
    Rsqrt,
    Ex2,
    Lg2,
    Sin,
    Cos,
    Tanh,
    /// The nearest number of tf32, ties away from zero. Of f32 alone.
    Tf32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Float2 {
    Add,
    Sub,
    Mul,
    Div,
    Min,
    Max,
    /// NaN if either is.
    MinNan,
    MaxNan,
    /// The second with the sign of the first.
    CopySign,
}

/// Modifiers of float arithmetic: subnormal numbers as zero; results in [0, 1].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mode {
    pub flush: bool,
    pub saturate: bool,
    /// Of inverses, quotients and roots: whether they are rounded to nearest, not approximated.
    pub exact: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cmp {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    /// Of floats: true if ordered, or if not.
    Num,
    Nan,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logic {
    And,
    Or,
    Xor,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Round {
    /// To nearest, ties to even; towards zero; down; up.
    Nearest,
    Zero,
    Down,
    Up,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Atomic {
    Add,
    Min,
    Max,
    And,
    Or,
    Xor,
    Exch,
    Cas,
    Inc,
    Dec,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shuffle {
    Up,
    Down,
    Butterfly,
    Index,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vote {
    All,
    Any,
    Uniform,
    Ballot,
}

/// How often an mbarrier expects an arrival, or how many bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arrive {
    Count(Sw),
    /// One arrival, and as many more bytes.
    Expect(Sw),
    /// Bytes alone.
    ExpectOnly(Sw),
}

/// Operand types of matrix instructions; sums are f32, or f16 where said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    F16,
    Bf16,
    Tf32,
}

/// The A operand of `wgmma`.
#[derive(Clone, Debug, PartialEq)]
pub enum MatrixA {
    Descriptor(Sd),
    Registers(Box<[W]>),
}

#[derive(Clone, Debug, PartialEq)]
pub struct Wgmma {
    pub n: u32,
    pub element: Element,
    pub accumulators: Box<[W]>,
    pub a: MatrixA,
    pub b: Sd,
    /// Whether the accumulators' old values count.
    pub scale_d: Sp,
    pub negate: [bool; 2],
    /// Whether A, B are stored with M, N innermost.
    pub transpose: [bool; 2],
}

/// The coordinates of a box of a tensor, innermost first.
pub type Coordinates = Box<[Sw]>;

#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    Nop,
    /// Of memory, for other blocks too.
    Fence,
    /// `setmaxnreg`: registers of a thread from here on, and whether they are more than before.
    Registers(u32, bool),
    MovW(W, Sw),
    MovD(D, Sd),
    MovP(P, Sp),
    /// `{..}` into one register, lowest first, of 16 or 32 bits each, and back.
    Pack(Reg, Box<[Sw]>, u32),
    Unpack(Box<[Reg]>, Src, u32),
    IntW(Int2, Ty, W, Sw, Sw),
    IntD(Int2, Ty, D, Sd, Sd),
    ShiftD(Int2, Ty, D, Sd, Sw),
    Int1W(Int1, Ty, W, Sw),
    Int1D(Int1, Ty, D, Sd),
    /// Counts of 64-bit operands.
    CountD(Int1, W, Sd),
    /// `a * b (+ c)` into twice the bits.
    WideD(Ty, D, Sw, Sw, Option<Sd>),
    WideW(Ty, W, Sw, Sw, Option<Sw>),
    MadW(Ty, W, Sw, Sw, Sw),
    MadD(D, Sd, Sd, Sd),
    /// Funnel shift: left or right, of `hi:lo`; clamped or wrapped.
    Funnel {
        left: bool,
        wrap: bool,
        d: W,
        lo: Sw,
        hi: Sw,
        by: Sw,
    },
    ExtractW(Ty, W, Sw, Sw, Sw),
    ExtractD(Ty, D, Sd, Sw, Sw),
    /// `bfi`: a into b at position, of length.
    InsertW(W, Sw, Sw, Sw, Sw),
    InsertD(D, Sd, Sd, Sw, Sw),
    Prmt(W, Sw, Sw, Sw),
    Lop3(W, Sw, Sw, Sw, u8),
    F1(Float1, Mode, W, Sw),
    F2(Float2, Mode, W, Sw, Sw),
    Fma(Mode, W, Sw, Sw, Sw),
    /// Of f16, bf16: one or two in a register.
    H1(Float1, Element, u32, W, Sw),
    H2(Float2, Element, u32, W, Sw, Sw),
    HFma(Element, u32, W, Sw, Sw, Sw),
    D1(Float1, D, Sd),
    D2(Float2, D, Sd, Sd),
    DFma(D, Sd, Sd, Sd),
    SetP {
        cmp: Cmp,
        ty: Ty,
        /// Whether a float comparison is true of NaN.
        unordered: bool,
        d: Option<P>,
        inverse: Option<P>,
        a: Src,
        b: Src,
        and: Option<(Logic, Sp)>,
    },
    SelW(W, Sw, Sw, Sp),
    SelD(D, Sd, Sd, Sp),
    LogicP(Logic, P, Sp, Sp),
    Convert {
        from: Ty,
        to: Ty,
        round: Round,
        /// Float to float of one type, rounded to an integer.
        integral: bool,
        mode: Mode,
        d: Reg,
        a: Src,
    },
    /// Two floats to two of 16 bits: high, low.
    ConvertPair {
        to: Element,
        relu: bool,
        d: W,
        high: Sw,
        low: Sw,
    },
    /// `mapa`: the address that a place in shared memory has in another block of the cluster, of a space.
    MapRank(Space, Reg, Src, Sw),
    /// Between generic and other addresses.
    ToGeneric(Space, Reg, Src),
    FromGeneric(Space, Reg, Src),
    Load {
        space: Space,
        order: Order,
        ty: Ty,
        d: Box<[Reg]>,
        a: Address,
    },
    Store {
        space: Space,
        order: Order,
        ty: Ty,
        s: Box<[Src]>,
        a: Address,
    },
    Atom {
        op: Atomic,
        order: Order,
        space: Space,
        ty: Ty,
        d: Reg,
        a: Address,
        b: Src,
        c: Option<Src>,
    },
    Shfl {
        kind: Shuffle,
        d: W,
        p: Option<P>,
        a: Sw,
        b: Sw,
        c: Sw,
        members: Sw,
    },
    Vote {
        kind: Vote,
        d: Reg,
        p: Option<P>,
        a: Sp,
        members: Sw,
    },
    Redux {
        op: Atomic,
        ty: Ty,
        d: W,
        a: Sw,
        members: Sw,
    },
    ActiveMask(W),
    Elect(Reg, P, Sw),
    Bra {
        to: u32,
    },
    Exit,
    /// `bar`, `barrier`: number, threads (all of the block if absent), and whether it waits.
    Bar {
        id: Sw,
        threads: Option<Sw>,
        wait: bool,
        aligned: bool,
    },
    SyncWarp(Sw),
    /// `barrier.cluster.arrive`: whether it makes known what went before.
    ClusterArrive {
        release: bool,
    },
    ClusterWait,
    /// `fence.proxy.async`.
    FenceProxy,
    /// `fence.mbarrier_init`.
    FenceBarriers,
    Trap,
    CpAsync {
        bytes: u32,
        d: Address,
        s: Address,
        /// Bytes that are read; the others are zero.
        read: Option<Sw>,
    },
    CpCommit,
    /// All groups but the newest so many; all copies if absent.
    CpWait(Option<u32>),
    CpArrive {
        a: Address,
        count: bool,
    },
    BarrierInit(Address, Sw),
    BarrierInval(Address),
    BarrierArrive {
        a: Address,
        what: Arrive,
        state: Option<D>,
        scope: MemoryScope,
    },
    /// Waits for the end of a phase: by parity, or by the state that an arrival gave.
    BarrierTest {
        d: P,
        a: Address,
        phase: Src,
        parity: bool,
        /// Whether it may suspend the thread.
        suspend: bool,
        scope: MemoryScope,
    },
    TensorLoad {
        d: Address,
        map: Address,
        at: Coordinates,
        barrier: Address,
        /// A bit for each block of the cluster that gets a copy; the block of the address alone if absent.
        ranks: Option<Sw>,
    },
    TensorStore {
        map: Address,
        at: Coordinates,
        s: Address,
    },
    BulkLoad {
        d: Address,
        s: Address,
        bytes: Sw,
        barrier: Address,
        /// As of a tensor copy.
        ranks: Option<Sw>,
    },
    BulkStore {
        d: Address,
        s: Address,
        bytes: Sw,
    },
    BulkCommit,
    BulkWait {
        left: u32,
        read: bool,
    },
    LdMatrix {
        d: Box<[W]>,
        a: Address,
        transpose: bool,
    },
    StMatrix {
        a: Address,
        s: Box<[Sw]>,
        transpose: bool,
    },
    /// `mma.sync` of m16n8, k of 8 or 16.
    Mma {
        element: Element,
        k: u32,
        d: [W; 4],
        a: Box<[Sw]>,
        b: Box<[Sw]>,
        c: [Sw; 4],
    },
    Wgmma(Box<Wgmma>),
    WgmmaFence,
    WgmmaCommit,
    WgmmaWait(u32),
}

/// An instruction and the predicate that guards it.
#[derive(Clone, Debug, PartialEq)]
pub struct Inst {
    pub guard: Option<(P, bool)>,
    pub op: Op,
    /// Whether it writes a register that some `wgmma` reads or accumulates into.
    pub feeds_wgmma: bool,
}
