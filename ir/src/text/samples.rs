//! Small values of every level, for the tests.

use crate::diag::{Source, Span};
use crate::dim::{Base, Dim, DimInfo, IndexMap, Order};
use crate::graph::{Body, Graph, Init, Input, InputDefault, Origin, Param, Phase, Report, Table, Type, Update, Value};
use crate::kernel::{Family, Kernel, Operand, Output};
use crate::local::{Chunk, Local, LocalParam, LocalUpdate};
use crate::mesh::{Axis, Mesh, SubAxis};
use crate::model::{Decay, LearningRateSchedule, LossScale, Optimizer, Plan, PlanEntry, Train};
use crate::module::{GlobalGraph, Graphs, JobLevel, Module};
use crate::op::{Attention, AttentionGrad, Binary, Channel, Collective, Compare, DType, Op, Real, Reduce, Reshard, Routing, Scalar, Scoring, Unary};
use crate::options::{
    ActivationOffload, Counts, CpComm, Cuts, MemoryOrder, MoeBuffer, Offload, Options, Overlap, ParamOffload, Recompute, RowChoice, SequenceParallel,
    SplitK, TpOverlap, Zero,
};
use crate::pipeline::{Layout, Pass, PassKind, PassOrder, Pipeline, Schedule, StagePlacement};
use crate::program::{
    Action, Arena, BodyId, BodyKind, Bucket, Buffer, BufferAddress, BufferId, Call, CallSchedule, Command, Content, Extent, Group, GroupId,
    InputEntry, Interval, Job, KernelId, ParamEntry, ParamRole, Piece, Program, SendTurn, Slots, Space, Stage, Stash, Stream, TableEntry,
};
use crate::reason::{AvoidedBy, Reason};
use crate::sharded::{Placement, Sharded, Sharding};
use crate::tiles::Generation;

pub fn origin(phase: Phase, scope: &str) -> Origin {
    Origin { layer: Some(3), scope: scope.into(), span: Some(Span { file: 0, line: 23, col: 11, len: 6 }), ..Origin::new(phase) }
}

/// `y = x w`, its loss, gradient and update.
pub fn graph() -> Graph {
    let mut body = Body::default();
    let batch = body.dims.add(DimInfo::new("batch", 4));
    let hidden = body.dims.add(DimInfo::new("hidden", 8));
    let out = body.dims.add(DimInfo { copy_of: Some(hidden), ..DimInfo::new("hidden", 8) });
    let x_ty = Type::new(DType::F32, [batch, hidden]);
    let w_ty = Type::new(DType::F32, [hidden, out]);
    let plain = Origin::new(Phase::Forward);
    let x = body.push(Op::Input(0), [], x_ty.clone(), plain.clone());
    let w = body.push(Op::Param(0), [], w_ty.clone(), plain.clone());
    let y = body.push(Op::dot(vec![hidden]), [x, w], Type::new(DType::F32, [batch, out]), origin(Phase::Forward, "layers.3.proj"));
    let loss = body.push(Op::Reduce { kind: Reduce::Sum, over: vec![batch, out] }, [y], Type::scalar(DType::F32), plain);
    let dw = body.push(
        Op::Reduce { kind: Reduce::Sum, over: vec![batch] },
        [x],
        Type::new(DType::F32, [hidden]),
        origin(Phase::Backward, "layers.3.proj"),
    );
    let new = body.push(Op::Binary(Binary::Sub), [w, dw], w_ty.clone(), origin(Phase::Update, ""));
    Graph {
        name: "tiny".into(),
        body,
        params: vec![Param {
            name: "layers.3.proj.w".into(),
            ty: w_ty,
            init: Init::Normal(Real(0.02)),
            decay: true,
            lr_scale: Real(2.0),
            frozen: false,
            adam: true,
            state: false,
            layer: Some(3),
            span: Some(Span { file: 0, line: 2, col: 3, len: 1 }),
        }],
        inputs: vec![Input { name: "x".into(), ty: x_ty, default: Some(InputDefault::Prev(0, -1)), any: true, span: None }],
        tables: vec![Table { name: "rope sin".into(), ty: Type::new(DType::F32, [batch]), data: vec![0.1, -0.0, f64::INFINITY, 1e-300] }],
        batch: Some(batch),
        layers: 4,
        losses: vec![Report { name: "loss".into(), value: loss }],
        metrics: vec![Report { name: "sum of y".into(), value: loss }],
        outputs: vec![Report { name: "y".into(), value: y }],
        grads: vec![(0, dw)],
        loss: Some(loss),
        grad_norm: Some(loss),
        updates: vec![Update { param: 0, grad: Some(dw), new, states: vec![w, dw] }, Update { param: 0, grad: None, new, states: vec![] }],
    }
}

/// A program with a step of each kind.
fn every_step() -> Scoring {
    let mut s = Scoring::causal(Some(7));
    let product = s.step(Op::Input(0), DType::F32, &[]);
    let half = s.step(Op::Input(3), DType::Bf16, &[]);
    let bias = s.step(Op::Cast, DType::F32, &[half]);
    let bent = s.step(Op::Unary(Unary::Tanh), DType::F32, &[product]);
    let low = s.step(Op::Const(Real(f64::NEG_INFINITY)), DType::F32, &[]);
    let sum = s.step(Op::Add, DType::F32, &[bent, bias, low]);
    let kept = s.step(Op::StopGradient, DType::F32, &[sum]);
    let seen = s.seen.expect("invariant: a causal mask");
    s.score = Some(s.step(Op::Select, DType::F32, &[seen, kept, product]));
    s.weight = Some(s.step(Op::Input(4), DType::F32, &[]));
    s
}

/// Every op with its fields set, in no meaningful order; types do not fit.
pub fn every_op() -> Vec<Op> {
    let (a, b, c) = (Dim(0), Dim(1), Dim(2));
    let attention = Attention { at: a, keys: b, d: c, values: a, scale: Real(0.125), scoring: every_step() };
    let mut ops = vec![
        Op::Input(7),
        Op::Param(1),
        Op::State(1, 2),
        Op::Table(3),
        Op::Const(Real(-0.1)),
        Op::Const(Real(f64::NAN)),
        Op::Const(Real(f64::from_bits(f64::NAN.to_bits() + 1))),
        Op::Const(Real(f64::NEG_INFINITY)),
        Op::Iota(b),
        Op::Uniform { key: u64::MAX },
        Op::Scalar(Scalar::LearningRate),
        Op::Scalar(Scalar::LossScale),
        Op::Scalar(Scalar::Step),
        Op::Scalar(Scalar::Seed),
        Op::Scalar(Scalar::BiasCorrection(Real(0.999))),
        Op::Scalar(Scalar::Linear(vec![])),
        Op::Scalar(Scalar::Linear(vec![(SubAxis(0), 32), (SubAxis(1), 0)])),
        Op::Scalar(Scalar::Slot(4)),
        Op::Select,
        Op::Add,
        Op::Cast,
        Op::StopGradient,
        Op::Cut,
        Op::Expand,
        Op::View { from: vec![a, b], to: vec![] },
        Op::Slice { from: a, to: None, at: 3 },
        Op::Slice { from: a, to: Some(b), at: 3 },
        Op::Pad { from: None, to: b, at: 0 },
        Op::Pad { from: Some(a), to: b, at: 1 },
        Op::Concat { from: vec![a, b], to: c },
        Op::Shard { from: a, to: b, index: IndexMap { parts: vec![(4, 16), (8, 1)], base: Base::Coords(vec![(SubAxis(1), 32)]) } },
        Op::Shard { from: a, to: b, index: IndexMap { parts: vec![], base: Base::Slot(2) } },
        Op::Shard { from: a, to: b, index: IndexMap { parts: vec![(1, 1)], base: Base::Coords(vec![]) } },
        Op::Recv { hops: -2, channel: Channel(3) },
        Op::Send { hops: 1, channel: Channel(0) },
        Op::Limit { most: 96 },
        Op::dot(vec![a, b]),
        Op::Dot { over: vec![a], tf32: true },
        Op::grouped_dot(a, b, vec![b, c]),
        Op::GroupedDot { rows: a, experts: b, over: vec![a], tf32: true },
        Op::ArgMax { over: a },
        Op::Cumsum { over: a, reverse: false },
        Op::Cumsum { over: a, reverse: true },
        Op::Gather { dim: a },
        Op::Scatter { dim: a },
        Op::Dispatch(Routing { experts: a, choice: b }),
        Op::Combine(Routing { experts: b, choice: c }),
        Op::Attention(attention.clone()),
        Op::AttentionLse(Attention { values: c, scoring: Scoring::PLAIN, ..attention.clone() }),
    ];
    ops.extend(Unary::ALL.iter().map(|u| Op::Unary(*u)));
    ops.extend(Binary::ALL.iter().map(|u| Op::Binary(*u)));
    ops.extend(Compare::ALL.iter().map(|u| Op::Compare(*u)));
    ops.extend(Reduce::ALL.iter().map(|kind| Op::Reduce { kind: *kind, over: vec![c] }));
    ops.extend(Reshard::ALL.iter().map(|kind| Op::Reshard { kind: *kind, subs: vec![SubAxis(2), SubAxis(0)] }));
    ops.extend(AttentionGrad::ALL.iter().map(|which| Op::AttentionGrad(attention.clone(), *which)));
    for r in Reduce::ALL {
        ops.push(Op::Collective { kind: Collective::AllReduce(*r), subs: vec![SubAxis(0)], stages: Some(vec![0, 3]), part: None });
        ops.push(Op::Collective { kind: Collective::ReduceScatter(*r), subs: vec![SubAxis(1), SubAxis(2)], stages: None, part: Some(c) });
    }
    ops.push(Op::Collective { kind: Collective::AllGather, subs: vec![], stages: None, part: Some(c) });
    ops.push(Op::Collective { kind: Collective::Shift, subs: vec![SubAxis(1)], stages: None, part: None });
    ops.push(Op::Collective { kind: Collective::AllToAll, subs: vec![SubAxis(2)], stages: Some(vec![]), part: Some(c) });
    ops
}

/// A body with [`every_op`] and dims that are hard to name.
pub fn odd_body() -> Body {
    let mut body = Body::default();
    for name in ["seq/tp", "", "a \"quoted\"\n#1 name", "sum", "sum", "none", "\u{7f}é"] {
        body.dims.add(DimInfo::new(name, 6));
    }
    // One dim is a copy of a later dim, another is a part of a padded dim.
    body.dims.list[0].copy_of = Some(Dim(4));
    body.dims.list[3] = DimInfo {
        logical: 11,
        whole: true,
        global: 12,
        index: IndexMap { parts: vec![(2, 3), (3, 1)], base: Base::Coords(vec![(SubAxis(0), 6)]) },
        order: Order::ZigZag { pairs: 3, chunk: 2 },
        ..body.dims.list[3].clone()
    };
    for (i, op) in every_op().into_iter().enumerate() {
        let args: Vec<Value> = (0..i.min(i % 4) as u32).map(Value).collect();
        let dtype = [DType::F32, DType::Bf16, DType::F16, DType::I32, DType::Bool][i % 5];
        let scope = ["", "layer", "because", "a.b.0", "@", "two words", "in", "recomputed", "offloaded"][i % 9];
        let mut origin = origin([Phase::Forward, Phase::Backward, Phase::Update][i % 3], scope);
        if i % 2 == 0 {
            (origin.layer, origin.span) = (None, None);
        }
        origin.within = (i % 5 < 2).then(|| "attention".into());
        origin.offloaded = i % 3 == 0;
        origin.recomputed = i % 7 < 3;
        body.push(op, args, Type::new(dtype, (0..i as u32 % 7).map(Dim).collect::<Vec<_>>()), origin);
    }
    body
}

pub fn mesh() -> Mesh {
    Mesh::new(2, 1, 2, 1, 4)
}

/// [`graph`] with a reshard, split over [`mesh`] (mb, dp, tp.0, tp.1).
pub fn sharded() -> Sharded {
    let mut graph = graph();
    let (batch, out) = (Dim(0), Dim(2));
    let y = Value(2);
    let ty = graph.body[y].ty.clone();
    let whole = graph.body.push(Op::Reshard { kind: Reshard::AllGather, subs: vec![SubAxis(2)] }, [y], ty, origin(Phase::Forward, "layers.3.proj"));
    graph.outputs[0].value = whole;
    let mut shardings = vec![Sharding::replicated(&mesh()); graph.body.nodes.len()];
    let r = Placement::Replicated;
    shardings[0] = Sharding(vec![Placement::Split(batch), Placement::Split(batch), r, r]);
    shardings[2] = Sharding(vec![Placement::Split(batch), Placement::Split(batch), Placement::Split(out), r]);
    shardings[3] = Sharding(vec![Placement::SUM, Placement::SUM, Placement::Partial(crate::sharded::Partial::Max), Placement::Split(out)]);
    let mut reasons = vec![None; graph.body.nodes.len()];
    reasons[whole.index()] =
        Some(Reason::avoided("the output \"y\" is asked for whole", AvoidedBy::Unlisted { axis: Axis::Tp, dim: "odd \"name\"".into() }));
    let digits = vec![vec![SubAxis(0), SubAxis(1)], vec![], vec![SubAxis(2)]];
    Sharded { graph, mesh: mesh(), digits, shardings, reasons }
}

/// One rank's part of [`sharded`].
pub fn local() -> Local {
    let mut body = Body::default();
    let base = Base::Coords(vec![(SubAxis(0), 2), (SubAxis(1), 1)]);
    let batch = body.dims.add(DimInfo { global: 4, logical: 4, index: IndexMap { parts: vec![(1, 1)], base }, ..DimInfo::new("batch/mb*dp", 1) });
    let hidden = body.dims.add(DimInfo::new("hidden", 8));
    let part = body.dims.add(DimInfo::new("part", 2));
    let plain = Origin::new(Phase::Forward);
    let x = body.push(Op::Input(0), [], Type::new(DType::F32, [batch, hidden]), plain.clone());
    let p = body.push(Op::Param(0), [], Type::new(DType::F32, [hidden]), plain.clone());
    let gather = Op::Collective { kind: Collective::AllGather, subs: vec![SubAxis(2)], stages: None, part: Some(part) };
    let all = body.push(gather, [p], Type::new(DType::F32, [part, hidden]), plain);
    let sum =
        body.push(Op::Reduce { kind: Reduce::Sum, over: vec![batch] }, [x], Type::new(DType::F32, [hidden]), origin(Phase::Backward, "layers.3"));
    let reduce = Op::Collective { kind: Collective::AllReduce(Reduce::Sum), subs: vec![SubAxis(1)], stages: None, part: None };
    let total = body.push(reduce, [sum], Type::new(DType::F32, [hidden]), origin(Phase::Backward, "layers.3"));
    let r = Placement::Replicated;
    Local {
        mesh: mesh(),
        stages: vec![(0, vec![0, 2]), (1, vec![1, 3])],
        body,
        params: vec![LocalParam { index: vec![IndexMap::whole(8)], states: 2 }],
        buckets: buckets(),
        copied: [0].into(),
        host: [p, total].into(),
        chunks: vec![Chunk::Forward(0), Chunk::Forward(0), Chunk::Forward(1), Chunk::Backward(1), Chunk::Reduce],
        accumulate: vec![false, false, false, true, false],
        source: vec![
            None,
            None,
            Some((all, Sharding(vec![r, r, r, r]))),
            Some((sum, Sharding(vec![Placement::SUM, Placement::Split(batch), r, r]))),
            None,
        ],
        reasons: vec![None, None, Some("w is needed whole".into()), None, Some("the gradient of w is a sum over dp".into())],
        reports: vec![(1, total)],
        updates: vec![LocalUpdate { slot: 0, new: total, states: vec![p, total] }],
    }
}

pub fn kernel() -> Kernel {
    let mut body = Body::default();
    let (i, j) = (body.dims.add(DimInfo::new("i", 4)), body.dims.add(DimInfo::new("j", 8)));
    let ty = Type::new(DType::Bf16, [i, j]);
    let x = body.push(Op::Input(0), [], ty.clone(), origin(Phase::Forward, "layers.0.norm"));
    let y = body.push(Op::Unary(Unary::Exp), [x], ty.clone(), origin(Phase::Forward, "layers.0.norm"));
    Kernel {
        on: Space::Host,
        family: Family::Loops { grid: vec![i] },
        body,
        inputs: vec![Operand { ty, strides: vec![16, 1], unaligned: true }],
        scalars: vec![DType::I32, DType::F32],
        outputs: vec![Output { value: y, strides: vec![8, 1], accumulate: true }],
    }
}

fn buckets() -> Vec<Bucket> {
    let index = vec![IndexMap { parts: vec![(2, 1)], base: Base::Coords(vec![(SubAxis(1), 2)]) }, IndexMap::whole(8)];
    vec![
        Bucket { size: 128, holds: ParamRole::Copies, pieces: vec![Piece { slot: 0, at: 64, index }] },
        Bucket { size: 0, holds: ParamRole::Weights, pieces: vec![] },
    ]
}

pub fn program() -> Program {
    let buffer = |name: &str, arena, offset, content| Buffer {
        name: name.into(),
        dtype: DType::F32,
        dims: vec![("batch/dp".into(), 2), ("hidden".into(), 8)],
        arena,
        offset,
        content,
        origin: None,
    };
    let index = vec![IndexMap { parts: vec![(2, 1)], base: Base::Coords(vec![(SubAxis(1), 2)]) }, IndexMap::whole(8)];
    let (x, w) = (BufferId(1), BufferId(0));
    let command = |action| {
        let origin = origin(Phase::Forward, "layers.3.proj");
        Command { stream: Stream::Compute, action, predicate: None, origin, reason: None }
    };
    let shifted = BufferAddress { buffer: x, offset: 16, coords: vec![(SubAxis(2), 64), (SubAxis(3), 32)] };
    let body = |name: &str, kind, commands| crate::program::ProgramBody { name: name.into(), kind, commands, cuts: vec![] };
    let on = |space| Stash { space, bytes: 64 };
    Program {
        buffers: vec![
            buffer("layers.3.w", Arena::Persistent, 0, Content::Param { slot: 0, index: index.clone() }),
            Buffer { origin: Some(origin(Phase::Forward, "x")), ..buffer("x", Arena::Stash, 64, Content::Activation) },
            buffer("x", Arena::Temporary, 0, Content::Accumulator),
            buffer("train.%7-m", Arena::Persistent, 64, Content::State { slot: 0, state: 1, index: index.clone() }),
            buffer("layers.3.w.state0", Arena::Host, 0, Content::State { slot: 0, state: 0, index: index.clone() }),
            buffer("staged", Arena::Staging, 64, Content::Activation),
            buffer("rope table", Arena::Persistent, 128, Content::Table { table: 2, index: vec![] }),
            buffer("kept", Arena::HostStash, 0, Content::Activation),
            buffer("layers.3.w.state2", Arena::Disk, 4096, Content::State { slot: 0, state: 2, index: index.clone() }),
        ],
        arena_bytes: [192, 128, 64, 0, 64, 128, 8192],
        stashes: vec![on(Space::Device), on(Space::Host), on(Space::Device)],
        groups: vec![Group { subs: vec![SubAxis(2), SubAxis(3)], stages: None }, Group { subs: vec![], stages: Some(vec![0, 1]) }],
        copied: [1, 3].into(),
        buckets: buckets(),
        bodies: vec![
            body(
                "forward",
                BodyKind::Forward(0),
                vec![
                    command(Action::Load { input: 0, dst: x, index }),
                    command(Action::Launch {
                        kernel: KernelId(0),
                        args: vec![BufferAddress::start(w), shifted.clone()],
                        scalars: vec![Scalar::Seed, Scalar::Linear(vec![(SubAxis(1), 8)])],
                    }),
                    command(Action::Record { event: 0 }),
                    Command {
                        stream: Stream::Tensor,
                        reason: Some(Reason::avoided("proj needs its operand whole", AvoidedBy::NoSequenceParallelism)),
                        ..command(Action::Collective {
                            kind: Collective::AllReduce(Reduce::Sum),
                            group: GroupId(0),
                            dtype: DType::Bf16,
                            count: 4096,
                            src: BufferAddress::start(x),
                            dst: shifted.clone(),
                        })
                    },
                    command(Action::Wait { event: 0 }),
                ],
            ),
            crate::program::ProgramBody {
                cuts: vec![2, 3],
                ..body(
                    "backward",
                    BodyKind::Backward(1),
                    vec![
                        command(Action::Recv { hops: -1, channel: Channel(2), dtype: DType::F32, count: 8, dst: BufferAddress::start(x) }),
                        command(Action::Send { hops: 1, channel: Channel(0), dtype: DType::F32, count: 8, src: BufferAddress::start(BufferId(2)) }),
                        command(Action::Fill { buffer: BufferId(4), value: Real(-0.5) }),
                        command(Action::Report { report: 1, src: shifted.clone() }),
                        command(Action::Limit { src: shifted.clone(), most: 96 }),
                        Command {
                            stream: Stream::ToHost,
                            predicate: Some(shifted.clone()),
                            ..command(Action::Copy { dtype: DType::F32, count: 16, src: shifted.clone(), dst: BufferAddress::start(BufferId(5)) })
                        },
                    ],
                )
            },
            body("reduce", BodyKind::Reduce, vec![]),
            body(
                "reduce",
                BodyKind::Update,
                vec![Command {
                    stream: Stream::FromDisk,
                    ..command(Action::Copy {
                        dtype: DType::F32,
                        count: 16,
                        src: BufferAddress::start(BufferId(8)),
                        dst: BufferAddress::start(BufferId(5)),
                    })
                }],
            ),
            body("", BodyKind::Prologue, vec![]),
        ],
    }
}

pub fn schedule() -> CallSchedule {
    let calls = |list: &[(u32, u32)]| list.iter().map(|&(body, microbatch)| Call::whole(BodyId(body), microbatch)).collect::<Vec<_>>();
    CallSchedule {
        slots: vec![Slots { count: 2, at: 64 }, Slots { count: 1, at: 192 }],
        train: [
            calls(&[(4, 0), (0, 0), (0, 1), (0, 2), (1, 0), (0, 3), (1, 1)]),
            [(2, 0), (3, 0), (3, 1), (2, 1), (2, 2), (3, 2)].map(|(microbatch, part)| Call { body: BodyId(1), microbatch, part }).to_vec(),
            calls(&[(2, 0)]),
        ]
        .concat(),
        update: calls(&[(3, 0), (3, 0)]),
        eval: calls(&[(0, u32::MAX), (0, 0)]),
        sends: [
            vec![SendTurn { send: 1, after: 0, grouped: false }, SendTurn { send: 0, after: 2, grouped: true }],
            vec![],
            vec![SendTurn { send: 0, after: 7, grouped: false }],
        ],
    }
}

pub fn job() -> Job {
    let dims = vec![
        Extent { name: "vocab".into(), size: 50257, padded: 50304, order: Order::Plain },
        Extent { name: "hidden".into(), size: 8, padded: 8, order: Order::Plain },
    ];
    Job {
        model: "tiny".into(),
        sources: vec![Source { name: "models/tiny \"1\".mdl".into(), text: "model tiny(batch) {\n}\n".into() }],
        settings: vec![("batch".into(), "4".into()), ("path".into(), "a \"b\"\tc".into())],
        mesh: mesh(),
        train: Train {
            optimizer: Optimizer::Sgd { momentum: Real(0.9) },
            schedule: LearningRateSchedule {
                decay: Decay::MinusSqrt,
                peak: Real(1e-3),
                min: Real(1e-5),
                warmup: 10,
                steps: 100,
                falling: Some(20),
                constant: 5,
            },
            weight_decay: Real(0.1),
            clip: Some(Real(1.0)),
            loss_scale: Some(LossScale::FP16),
        },
        global_batch: 4,
        microbatches: 2,
        in_flight: 3,
        params: vec![ParamEntry { name: "layers.3.w".into(), dims: dims.clone(), init: Init::Const(Real(1.0)) }],
        inputs: vec![InputEntry {
            name: "tokens".into(),
            dtype: DType::I32,
            dims: dims.clone(),
            default: Some(InputDefault::Documents(0, 50256)),
            takes: Some(vec![Interval { least: -100, most: -100 }, Interval { least: 0, most: 50256 }]),
        }],
        tables: vec![TableEntry { name: "rope".into(), dtype: DType::F32, dims, data: vec![0.5, 1.0 / 3.0] }],
        reports: vec!["loss".into(), "grad_norm".into()],
        kernels: vec![kernel(), Kernel { family: Family::Scatter, ..kernel() }],
        programs: vec![program(), program()],
        stages: vec![
            Stage { program: 0, params: vec![0], schedule: schedule() },
            Stage { program: 1, params: vec![], schedule: CallSchedule::default() },
        ],
    }
}

/// Options in pairs of which every field, and every variant of it, is another one than by default somewhere.
pub fn options() -> Vec<Options> {
    let all = Options {
        dp: 2,
        cp: 4,
        tp: 8,
        pp: 3,
        ep: 2,
        etp: Some(1),
        sp: SequenceParallel::On,
        cp_comm: CpComm::AllToAllAndRing,
        zero: Zero::Params,
        replicas: 2,
        micro_batch: 5,
        global_batch: 40,
        schedule: Schedule::Given(order()),
        vpp: Some(2),
        group: Some(4),
        layout: Cuts::Even { embedding: Counts::AsNothing, loss: Counts::AsLayer },
        pad_vocab_to: 128,
        overlap: Overlap::Off,
        pass_pairs: true,
        memory_order: MemoryOrder::Memory,
        serial_exchanges: true,
        offload: Offload::Optimizer,
        param_offload: ParamOffload::Disk,
        activation_offload: ActivationOffload::Marked(Some(2)),
        tf32: true,
        split_k: SplitK::For(Generation::Sm90a),
        tp_overlap: TpOverlap::Pipeline { chunks: 4 },
        recompute: Recompute::Uniform(2),
        rows: RowChoice::Random(7),
        bucket_size: Some(1 << 20),
        logits_chunks: Some(8),
        moe_buffer: MoeBuffer::Factor(1.25),
        moe_passes: 3,
    };
    let with = |change: fn(&mut Options)| {
        let mut options = all.clone();
        change(&mut options);
        options
    };
    vec![
        with(|o| (o.cp_comm, o.zero, o.schedule, o.recompute) = (CpComm::AllGather, Zero::States, Schedule::GPipe, Recompute::Selective)),
        with(|o| (o.cp_comm, o.zero, o.schedule, o.recompute) = (CpComm::AllToAll, Zero::Gradients, Schedule::ZbH1, Recompute::Block(3))),
        with(|o| (o.layout, o.schedule) = (Cuts::Sizes(vec![1, 2, 0]), Schedule::ZbV)),
        with(|o| o.schedule = Schedule::DualPipeV),
        with(|o| o.layout = Cuts::Text("Et*2|t \"L\"".into())),
        with(|o| (o.layout, o.activation_offload) = (Cuts::Balanced, ActivationOffload::Layers(None))),
        with(|o| (o.offload, o.param_offload) = (Offload::Disk, ParamOffload::Host)),
        with(|o| o.layout = Cuts::Even { embedding: Counts::AsLayer, loss: Counts::AsNothing }),
        all,
    ]
}

fn order() -> PassOrder {
    let pass = |kind, chunk, microbatch| Pass { kind, chunk, microbatch };
    let passes = vec![pass(PassKind::Forward, 0, 0), pass(PassKind::Backward, 1, 12), pass(PassKind::Weight, 0, 3)];
    PassOrder { placement: StagePlacement::V, stages: vec![passes, vec![]] }
}

/// A module with something in every place.
pub fn module() -> Module {
    let layout = Layout { stages: 2, chunks: 2, placement: StagePlacement::V, embedding: 0, loss: 3, of_layer: vec![0, 1, 1, 3] };
    let entry = |axis: &str, tiers: &[&[&str]], span| PlanEntry {
        axis: axis.into(),
        tiers: tiers.iter().map(|names| names.iter().map(|n| n.to_string()).collect()).collect(),
        span,
    };
    let job = job();
    let graphs = Graphs { model: Some(graph()), whole: GlobalGraph::Sharded(sharded()), stages: vec![local(), local()], locals: vec![local()] };
    Module {
        settings: job.settings.clone(),
        asks_training: true,
        train: job.train,
        plan: Plan {
            entries: vec![
                entry("tp", &[&["heads", "odd name"], &[]], Some(Span { file: 0, line: 4, col: 2, len: 9 })),
                entry("attention.cp", &[], None),
            ],
        },
        options: options().pop().expect("there are some"),
        mesh: mesh(),
        pipeline: Pipeline { layout, order: order() },
        takes: vec![None, Some(vec![Interval { least: 0, most: 255 }]), Some(vec![])],
        training: graphs.clone(),
        evaluation: Graphs { stages: vec![], ..graphs },
        job: Some(job),
        settled: JobLevel::Memory,
    }
}
