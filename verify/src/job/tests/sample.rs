//! A small job by hand: two stages, two ranks each, two microbatches, 1F1B. Stage 0 multiplies data by its parameter
//! and sends the product, stage 1 multiplies by its own; the loss is the sum. SGD with momentum.

use ir::build::Builder;
use ir::dim::{Base, Dim, DimInfo, IndexMap, Linear, Order};
use ir::graph::{Body, Init, Origin, Phase, Type, Value};
use ir::kernel::{Family, Kernel, Operand, Output};
use ir::mesh::{Mesh, SubAxis};
use ir::model::Train;
use ir::op::{Channel, Collective, DType, Op, Real, Reduce, Scalar};
use ir::program::{
    Action, Arena, BodyId, BodyKind, Buffer, BufferAddress, BufferId, Call, CallSchedule, Command, Content, Extent, Group, GroupId, InputEntry, Job,
    KernelId, ParamEntry, Program, ProgramBody, Slots, Space, Stage, Stash, Stream,
};

/// Elements of a rank's part.
pub const N: u64 = 4;

const MICROBATCH: SubAxis = SubAxis(0);
const DP: SubAxis = SubAxis(2);

pub const MUL: KernelId = KernelId(0);
pub const MUL_ADD: KernelId = KernelId(1);
pub const SUM: KernelId = KernelId(2);
pub const NORM: KernelId = KernelId(3);
pub const UPDATE: KernelId = KernelId(4);

#[derive(Clone, Copy, PartialEq)]
enum Grid {
    N,
    Point,
}

#[derive(Clone, Copy, PartialEq)]
enum Store {
    Write,
    Add,
}

/// Over operands `[n]`, then scalars; `n` is the grid or a loop within its one point.
fn kernel(inputs: usize, scalars: usize, grid: Grid, store: Store, build: impl FnOnce(&mut Builder, Dim, &[Value]) -> Vec<Value>) -> Kernel {
    let mut body = Body::default();
    let n = body.dims.add(DimInfo::new("n", N));
    let mut b = Builder { body: &mut body, origin: Origin::new(Phase::Forward) };
    let ty = Type::new(DType::F32, [n]);
    let mut values: Vec<Value> = (0..inputs).map(|i| b.typed(Op::Input(i as u32), &[], ty.clone())).collect();
    values.extend((0..scalars).map(|i| b.typed(Op::Scalar(Scalar::Slot(i as u32)), &[], Type::scalar(DType::F32))));
    let results = build(&mut b, n, &values);
    Kernel {
        on: Space::Device,
        family: Family::Loops {
            grid: match grid {
                Grid::N => vec![n],
                Grid::Point => vec![],
            },
        },
        inputs: (0..inputs).map(|_| Operand { strides: vec![1], ty: ty.clone(), unaligned: false }).collect(),
        scalars: vec![DType::F32; scalars],
        outputs: results
            .into_iter()
            .map(|value| Output { value, strides: vec![1; body.dims_of(value).len()], accumulate: store == Store::Add })
            .collect(),
        body,
    }
}

fn kernels() -> Vec<Kernel> {
    vec![
        kernel(2, 0, Grid::N, Store::Write, |b, _, v| vec![b.mul(v[0], v[1])]),
        kernel(2, 0, Grid::N, Store::Add, |b, _, v| vec![b.mul(v[0], v[1])]),
        kernel(1, 0, Grid::Point, Store::Add, |b, n, v| vec![b.sum(v[0], &[n])]),
        kernel(1, 0, Grid::Point, Store::Write, |b, n, v| {
            let square = b.mul(v[0], v[0]);
            vec![b.sum(square, &[n])]
        }),
        kernel(3, 1, Grid::N, Store::Write, |b, _, v| {
            let state = b.add(&[v[1], v[2]]);
            let change = b.mul(state, v[3]);
            vec![b.sub(v[0], change), state]
        }),
    ]
}

/// The first operand times the sum of the second.
pub fn product_with_sum() -> Kernel {
    kernel(2, 0, Grid::Point, Store::Write, |b, n, v| {
        let sum = b.sum(v[1], &[n]);
        vec![b.mul(v[0], sum)]
    })
}

/// Builds a program; buffers go by name.
#[derive(Default)]
struct Building {
    buffers: Vec<Buffer>,
    sizes: [u64; Arena::ALL.len()],
    bodies: Vec<ProgramBody>,
}

impl Building {
    fn buffer(&mut self, name: &str, arena: Arena, size: u64, content: Content) {
        let offset = self.sizes[arena as usize];
        self.sizes[arena as usize] += 64;
        let dims = if size == 1 { vec![] } else { vec![("n".to_string(), size)] };
        self.buffers.push(Buffer { name: name.into(), dtype: DType::F32, dims, arena, offset, content, origin: None });
    }

    fn id(&self, name: &str) -> BufferId {
        BufferId(self.buffers.iter().position(|b| b.name == name).expect("declared") as u32)
    }

    fn body(&mut self, name: &str, kind: BodyKind, actions: Vec<Action>) {
        let commands = actions
            .into_iter()
            .map(|action| Command { stream: Stream::Compute, action, predicate: None, origin: Origin::new(Phase::Forward), reason: None })
            .collect();
        self.bodies.push(ProgramBody { name: name.into(), kind, commands, cuts: vec![] });
    }

    fn at(&self, name: &str) -> BufferAddress {
        BufferAddress::start(self.id(name))
    }

    fn launch(&self, kernel: KernelId, args: &[&str]) -> Action {
        let scalars = if kernel == UPDATE { vec![Scalar::LearningRate] } else { vec![] };
        Action::Launch { kernel, args: args.iter().map(|a| self.at(a)).collect(), scalars }
    }

    fn collective(&self, kind: Collective, group: u32, count: u64, src: &str, dst: &str) -> Action {
        Action::Collective { kind, group: GroupId(group), dtype: DType::F32, count, src: self.at(src), dst: self.at(dst) }
    }

    fn send(&self, hops: i64, src: &str) -> Action {
        Action::Send { hops, channel: Channel(0), dtype: DType::F32, count: N, src: self.at(src) }
    }

    fn recv(&self, hops: i64, dst: &str) -> Action {
        Action::Recv { hops, channel: Channel(0), dtype: DType::F32, count: N, dst: self.at(dst) }
    }

    fn fill(&self, buffer: &str) -> Action {
        Action::Fill { buffer: self.id(buffer), value: Real(0.0) }
    }

    fn load(&self, dst: &str) -> Action {
        Action::Load { input: 0, dst: self.id(dst), index: vec![part(vec![(MICROBATCH, 2 * N), (DP, N)])] }
    }
}

fn part(base: Linear) -> IndexMap {
    IndexMap { parts: vec![(N, 1)], base: Base::Coords(base) }
}

fn program(stage: u64) -> Program {
    let sum = Collective::AllReduce(Reduce::Sum);
    let mut b = Building::default();
    let whole = vec![IndexMap::whole(N)];
    b.buffer("w", Arena::Persistent, N, Content::Param { slot: 0, index: whole.clone() });
    b.buffer("v", Arena::Persistent, N, Content::State { slot: 0, state: 0, index: whole });
    for (name, size) in [("dw", N), ("g", N), ("loss", 1), ("eval_loss", 1)] {
        b.buffer(name, Arena::Persistent, size, Content::Accumulator);
    }
    b.buffer("x", Arena::Stash, N, Content::Activation);
    for (name, size) in [("y", N), ("dy", N), ("gs", N / 2), ("n", 1), ("norm", 1), ("total", 1), ("ex", N)] {
        b.buffer(name, Arena::Temporary, size, Content::Activation);
    }
    b.body("zero", BodyKind::Prologue, vec![b.fill("dw"), b.fill("loss")]);
    let input = |b: &Building, x: &str| if stage == 0 { b.load(x) } else { b.recv(-1, x) };
    let (last, back) = if stage == 0 {
        (b.send(1, "y"), vec![b.recv(1, "dy"), b.launch(MUL_ADD, &["x", "dy", "dw"]), b.launch(SUM, &["dy", "loss"])])
    } else {
        (b.launch(SUM, &["y", "loss"]), vec![b.launch(MUL, &["w", "w", "dy"]), b.send(-1, "dy"), b.launch(MUL_ADD, &["x", "w", "dw"])])
    };
    b.body("forward", BodyKind::Forward(0), vec![input(&b, "x"), b.launch(MUL, &["x", "w", "y"]), last]);
    b.body("backward", BodyKind::Backward(0), back);
    let report = |report: u32, b: &Building| Action::Report { report, src: b.at(if report == 0 { "total" } else { "norm" }) };
    b.body(
        "reduce",
        BodyKind::Reduce,
        vec![
            b.collective(Collective::ReduceScatter(Reduce::Sum), 0, N / 2, "dw", "gs"),
            b.collective(Collective::AllGather, 0, N / 2, "gs", "g"),
            b.launch(NORM, &["g", "n"]),
            b.collective(sum, 1, 1, "n", "norm"),
            report(1, &b),
            b.collective(sum, 2, 1, "loss", "total"),
            report(0, &b),
        ],
    );
    b.body("update", BodyKind::Update, vec![b.launch(UPDATE, &["w", "v", "g", "w", "v"])]);
    b.body("eval_zero", BodyKind::Prologue, vec![b.fill("eval_loss")]);
    let mut forward = vec![input(&b, "ex"), b.launch(MUL, &["ex", "w", "y"]), b.launch(SUM, &["y", "eval_loss"])];
    if stage == 0 {
        forward.push(b.send(1, "y"));
    }
    b.body("eval_forward", BodyKind::Forward(0), forward);
    b.body("eval_reduce", BodyKind::Reduce, vec![b.collective(sum, 2, 1, "eval_loss", "total"), report(0, &b)]);
    Program {
        buffers: b.buffers,
        arena_bytes: b.sizes,
        copied: Default::default(),
        buckets: vec![],
        stashes: vec![Stash { bytes: b.sizes[1], ..Stash::default() }],
        groups: vec![
            Group { subs: vec![DP], stages: None },
            Group { subs: vec![], stages: Some(vec![0, 1]) },
            Group { subs: vec![DP], stages: Some(vec![0, 1]) },
        ],
        bodies: b.bodies,
    }
}

fn stage(stage: u32) -> Stage {
    let calls = |list: &[(u32, u32)]| list.iter().map(|(body, microbatch)| Call::whole(BodyId(*body), *microbatch)).collect();
    let train = if stage == 0 { [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)] } else { [(0, 0), (1, 0), (2, 0), (1, 1), (2, 1), (3, 0)] };
    let schedule = CallSchedule {
        // `ex` of an evaluation lies where the stash begins.
        slots: vec![Slots { count: if stage == 0 { 2 } else { 1 }, at: 6 * 64 }],
        train: calls(&train),
        update: calls(&[(4, 0)]),
        eval: calls(&[(5, 0), (6, 0), (6, 1), (7, 0)]),
        sends: Default::default(),
    };
    Stage { program: stage, params: vec![stage], schedule }
}

pub fn job() -> Job {
    let extent = |size| vec![Extent { name: "n".into(), size, padded: size, order: Order::Plain }];
    Job {
        model: "sample".into(),
        sources: vec![],
        settings: vec![],
        mesh: Mesh::new(2, 2, 2, 1, 1),
        train: Train::default(),
        global_batch: 4 * N,
        microbatches: 2,
        in_flight: 1,
        params: ["w0", "w1"].map(|name| ParamEntry { name: name.into(), dims: extent(N), init: Init::Const(Real(1.0)) }).into(),
        inputs: vec![InputEntry { name: "x".into(), dtype: DType::F32, dims: extent(4 * N), default: None, takes: None }],
        tables: vec![],
        reports: vec!["loss".into(), "grad_norm".into()],
        kernels: kernels(),
        programs: vec![program(0), program(1)],
        stages: vec![stage(0), stage(1)],
    }
}
