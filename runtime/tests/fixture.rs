//! A linear model `loss = sum((x w - t)^2) / batch` trained with momentum, as a job built by hand: `batch` is split by microbatches
//! and dp, `ins` (3, padded to an even size) by tp; the product and its gradient are stage 0, the loss is the last stage.
//!
//! All numbers are small integers over powers of two, so results are exact.

use ir::dim::{Base, Dim, DimInfo, Dims, IndexMap, Linear};
use ir::graph::{Body, Init, Origin, Phase, Type};
use ir::kernel::{Family, Kernel, Operand, Output, dense};
use ir::mesh::{Axis, Mesh};
use ir::model::Train;
use ir::op::{Binary, DType, Op, Real, Reduce, Scalar, Unary};
use ir::program::*;
use runtime::host::Tensor;
use std::collections::BTreeMap;

pub const BATCH: u64 = 8;
pub const INS: u64 = 3;

pub struct Split {
    pub microbatches: u64,
    pub pp: u64,
    pub dp: u64,
    pub tp: u64,
}

/// Builds a body of f32 values.
struct Build {
    body: Body,
    inputs: Vec<Operand>,
}

impl Build {
    fn new() -> Build {
        Build { body: Body { dims: Dims::default(), nodes: vec![] }, inputs: vec![] }
    }

    fn dim(&mut self, name: &str, size: u64) -> Dim {
        self.body.dims.add(DimInfo::new(name, size))
    }

    fn node(&mut self, op: Op, args: &[ir::graph::Value], dims: &[Dim]) -> ir::graph::Value {
        let mut origin = Origin::new(Phase::Forward);
        origin.scope = "linear".into();
        self.body.push(op, args, Type::new(DType::F32, dims), origin)
    }

    fn input(&mut self, dims: &[Dim]) -> ir::graph::Value {
        let ty = Type::new(DType::F32, dims);
        self.inputs.push(Operand { strides: dense(&self.body.dims, &ty), ty });
        self.node(Op::Input(self.inputs.len() as u32 - 1), &[], dims)
    }

    fn kernel(self, family: Family, scalars: Vec<DType>, outputs: &[(ir::graph::Value, bool)]) -> Kernel {
        let outputs = outputs
            .iter()
            .map(|&(value, accumulate)| Output { value, strides: dense(&self.body.dims, &self.body[value].ty), accumulate })
            .collect();
        let kernel = Kernel { family, body: self.body, inputs: self.inputs, scalars, outputs };
        kernel.verify().expect("the fixture's kernels are sound");
        kernel
    }
}

/// `x [b, i], w [i] -> y [b]`.
fn product(b: u64, i: u64) -> Kernel {
    let mut k = Build::new();
    let (b, i) = (k.dim("batch", b), k.dim("ins", i));
    let (x, w) = (k.input(&[b, i]), k.input(&[i]));
    let y = k.node(Op::Dot { over: vec![i] }, &[x, w], &[b]);
    k.kernel(Family::Gemm, vec![], &[(y, false)])
}

/// `y [b], t [b] -> d [b], loss []` (accumulated): the error times 2 / batch, and the sum of its squares / batch.
fn loss(b: u64) -> Kernel {
    let mut k = Build::new();
    let b = k.dim("batch", b);
    let (y, t) = (k.input(&[b]), k.input(&[b]));
    let e = k.node(Op::Binary(Binary::Sub), &[y, t], &[b]);
    let two = k.node(Op::Const(Real(2.0 / BATCH as f64)), &[], &[]);
    let one = k.node(Op::Const(Real(1.0 / BATCH as f64)), &[], &[]);
    let d = k.node(Op::Binary(Binary::Mul), &[e, two], &[b]);
    let square = k.node(Op::Binary(Binary::Mul), &[e, e], &[b]);
    let sum = k.node(Op::Reduce { kind: Reduce::Sum, over: vec![b] }, &[square], &[]);
    let loss = k.node(Op::Binary(Binary::Mul), &[sum, one], &[]);
    k.kernel(Family::Loops { grid: vec![] }, vec![], &[(d, false), (loss, true)])
}

/// `x [b, i], d [b] -> g [i]` (accumulated).
fn gradient(b: u64, i: u64) -> Kernel {
    let mut k = Build::new();
    let (b, i) = (k.dim("batch", b), k.dim("ins", i));
    let (x, d) = (k.input(&[b, i]), k.input(&[b]));
    let g = k.node(Op::Dot { over: vec![b] }, &[x, d], &[i]);
    k.kernel(Family::Gemm, vec![], &[(g, true)])
}

/// `g [i] -> sum of squares []`.
fn squares(i: u64) -> Kernel {
    let mut k = Build::new();
    let i = k.dim("ins", i);
    let g = k.input(&[i]);
    let square = k.node(Op::Binary(Binary::Mul), &[g, g], &[i]);
    let sum = k.node(Op::Reduce { kind: Reduce::Sum, over: vec![i] }, &[square], &[]);
    k.kernel(Family::Loops { grid: vec![] }, vec![], &[(sum, false)])
}

fn root() -> Kernel {
    let mut k = Build::new();
    let x = k.input(&[]);
    let y = k.node(Op::Unary(Unary::Sqrt), &[x], &[]);
    k.kernel(Family::Loops { grid: vec![] }, vec![], &[(y, false)])
}

/// `w, v, g [i], rate -> w - rate * (v / 2 + g), v / 2 + g`.
fn update(i: u64) -> Kernel {
    let mut k = Build::new();
    let i = k.dim("ins", i);
    let (w, v, g) = (k.input(&[i]), k.input(&[i]), k.input(&[i]));
    let rate = k.node(Op::Scalar(Scalar::Slot(0)), &[], &[]);
    let half = k.node(Op::Const(Real(0.5)), &[], &[]);
    let old = k.node(Op::Binary(Binary::Mul), &[v, half], &[i]);
    let new = k.node(Op::Add, &[old, g], &[i]);
    let step = k.node(Op::Binary(Binary::Mul), &[new, rate], &[i]);
    let w = k.node(Op::Binary(Binary::Sub), &[w, step], &[i]);
    k.kernel(Family::Loops { grid: vec![i] }, vec![DType::F32], &[(w, false), (new, false)])
}

/// Part of a whole dim along some axes, outermost first, and what is left of it.
fn block(mesh: &Mesh, size: u64, axes: &[Axis]) -> (IndexMap, u64) {
    let mut len = size;
    let mut form: Linear = vec![];
    for u in axes.iter().flat_map(|a| mesh.of(*a)) {
        len /= mesh[u].size;
        form.push((u, len));
    }
    (IndexMap { parts: vec![(len, 1)], base: if form.is_empty() { Base::Zero } else { Base::Coords(form) } }, len)
}

struct Layout {
    buffers: Vec<Buffer>,
    arena_bytes: [u64; 3],
}

impl Layout {
    fn add(&mut self, name: &str, dims: &[(&str, u64)], arena: Arena, content: Content) -> BufferId {
        let dims: Vec<(String, u64)> = dims.iter().map(|d| (d.0.to_owned(), d.1)).collect();
        let offset = self.arena_bytes[arena as usize];
        let buffer = Buffer { name: name.into(), dtype: DType::F32, dims, arena, offset, content, origin: None };
        self.arena_bytes[arena as usize] += buffer.bytes().next_multiple_of(64);
        self.buffers.push(buffer);
        BufferId(self.buffers.len() as u32 - 1)
    }
}

fn command(action: Action) -> Command {
    let mut origin = Origin::new(Phase::Forward);
    origin.scope = "linear".into();
    Command { stream: Stream::Compute, action, origin, reason: None }
}

fn launch(kernel: u32, args: &[BufferId], scalars: Vec<Scalar>) -> Command {
    command(Action::Launch { kernel: KernelId(kernel), args: args.iter().map(|b| Place::start(*b)).collect(), scalars })
}

fn all_reduce(group: u32, count: u64, buffer: BufferId) -> Command {
    let place = Place::start(buffer);
    command(Action::Collective {
        kind: Collective::AllReduce(Reduce::Sum),
        group: GroupId(group),
        dtype: DType::F32,
        count,
        src: place.clone(),
        dst: place,
    })
}

/// The program of a stage, all of it or one end of two.
fn program(mesh: &Mesh, microbatches: u64, first: bool, last: bool) -> Program {
    let (rows, b) = block(mesh, BATCH, &[Axis::Microbatch, Axis::Dp]);
    let (columns, i) = block(mesh, INS + 1, &[Axis::Tp]);
    let mut l = Layout { buffers: vec![], arena_bytes: [0; 3] };
    let (index, batch, ins) = (vec![columns.clone()], ("batch", b), ("ins", i));
    let w = l.add("w", &[ins], Arena::Persistent, Content::Param { slot: 0, index: index.clone() });
    let v = l.add("v", &[ins], Arena::Persistent, Content::State { slot: 0, state: 0, index });
    let g = l.add("grad w", &[ins], Arena::Persistent, Content::Accumulator);
    let sum = l.add("loss", &[], Arena::Persistent, Content::Accumulator);
    let norm = l.add("norm", &[], Arena::Persistent, Content::Accumulator);
    let x = l.add("x", &[batch, ins], Arena::Stash, Content::Activation);
    let y = l.add("y", &[batch], Arena::Stash, Content::Activation);
    let d = l.add("d", &[batch], Arena::Stash, Content::Activation);
    let t = l.add("t", &[batch], Arena::Temporary, Content::Activation);
    let mut groups: Vec<Group> = vec![
        Group { subs: mesh.of(Axis::Tp).collect(), stages: None },
        Group { subs: mesh.of(Axis::Dp).collect(), stages: None },
        Group { subs: vec![], stages: Some(vec![0, 1]) },
    ];
    groups.truncate(if first && last { 2 } else { 3 });
    let place = Place::start;
    let send = |hops, src| command(Action::Send { hops, dtype: DType::F32, count: b, src: place(src) });
    let recv = |hops, dst| command(Action::Recv { hops, dtype: DType::F32, count: b, dst: place(dst) });
    let zero = |buffer| command(Action::Fill { buffer, value: Real(0.0) });

    let prologue = vec![zero(g), zero(sum), zero(norm)];
    let (mut forward, mut backward) = (vec![], vec![]);
    if first {
        forward.push(command(Action::Load { input: 0, dst: x, index: vec![rows.clone(), columns] }));
        forward.push(launch(0, &[x, w, y], vec![]));
        forward.push(all_reduce(0, b, y));
    }
    match (first, last) {
        (true, false) => {
            forward.push(send(1, y));
            backward.push(recv(1, d));
        }
        (false, true) => {
            forward.push(recv(-1, y));
        }
        (true, true) | (false, false) => {}
    }
    if last {
        forward.push(command(Action::Load { input: 1, dst: t, index: vec![rows] }));
        forward.push(launch(1, &[y, t, d, sum], vec![]));
    }
    if last && !first {
        backward.push(send(-1, d));
    }
    if first {
        backward.push(launch(2, &[x, d, g], vec![]));
    }
    let mut reports = vec![all_reduce(1, 1, sum), all_reduce(1, i, g)];
    if first {
        reports.push(launch(3, &[g, norm], vec![]));
        reports.push(all_reduce(0, 1, norm));
    }
    if groups.len() == 3 {
        reports.extend([all_reduce(2, 1, sum), all_reduce(2, 1, norm)]);
    }
    reports.push(launch(4, &[norm, norm], vec![]));
    let report = |report, src| command(Action::Report { report, src: place(src) });
    reports.extend([report(0, sum), report(1, norm)]);
    let evaluated = {
        let mut list = vec![all_reduce(1, 1, sum)];
        if groups.len() == 3 {
            list.push(all_reduce(2, 1, sum));
        }
        list.push(report(0, sum));
        list
    };
    // The last stage holds a copy of `w` when there are two: its gradient is the first's.
    let mut update = vec![];
    if groups.len() == 3 {
        update.push(all_reduce(2, i, g));
    }
    update.push(launch(5, &[w, v, g, w, v], vec![Scalar::LearningRate]));

    let body = |name: &str, kind, commands| ir::program::Body { name: name.into(), kind, commands };
    let bodies = vec![
        body("prologue", BodyKind::Prologue, prologue),
        body("forward", BodyKind::Forward, forward),
        body("backward", BodyKind::Backward, backward),
        body("reduce", BodyKind::Reduce, reports),
        body("update", BodyKind::Update, update),
        body("evaluate", BodyKind::Reduce, evaluated),
    ];
    let call = |body, microbatch| Call { body: BodyId(body), microbatch };
    let all = |body| (0..microbatches as u32).map(move |m| call(body, m));
    Program {
        buffers: l.buffers,
        arena_bytes: l.arena_bytes,
        slots: microbatches as u32,
        groups,
        bodies,
        train: [call(0, 0)].into_iter().chain(all(1)).chain(all(2)).chain([call(3, 0)]).collect(),
        update: vec![call(4, 0)],
        eval: [call(0, 0)].into_iter().chain(all(1)).chain([call(5, 0)]).collect(),
    }
}

pub fn job(split: &Split) -> Job {
    let mesh = Mesh::new(split.microbatches, split.pp, split.dp, 1, split.tp);
    let (b, i) = (BATCH / split.microbatches / split.dp, (INS + 1) / split.tp);
    let batch = Extent { name: "batch".into(), size: BATCH, padded: BATCH };
    let ins = Extent { name: "ins".into(), size: INS, padded: INS + 1 };
    let input = |name: &str, dims: Vec<Extent>| InputEntry { name: name.into(), dtype: DType::F32, dims, default: None, limit: None };
    let programs: Vec<Program> = match split.pp {
        1 => vec![program(&mesh, split.microbatches, true, true)],
        _ => vec![program(&mesh, split.microbatches, true, false), program(&mesh, split.microbatches, false, true)],
    };
    Job {
        model: "linear".into(),
        settings: vec![],
        train: Train::default(),
        global_batch: BATCH,
        microbatches: split.microbatches,
        params: vec![ParamEntry { name: "w".into(), dims: vec![ins.clone()], init: Init::Normal(Real(1.0)) }],
        inputs: vec![input("x", vec![batch.clone(), ins]), input("t", vec![batch])],
        tables: vec![],
        reports: vec!["loss".into(), "grad_norm".into()],
        kernels: vec![product(b, i), loss(b), gradient(b, i), squares(i), root(), update(i)],
        stages: (0..programs.len() as u32).map(|program| Stage { program, params: vec![0] }).collect(),
        programs,
        mesh,
    }
}

pub fn params() -> BTreeMap<String, Tensor> {
    [("w".to_owned(), Tensor { sizes: vec![INS], data: vec![1.0, -2.0, 3.0] })].into()
}

pub fn inputs() -> BTreeMap<String, Tensor> {
    let x = (0..BATCH * INS).map(|k| (k * 7 % 11) as f64 - 5.0).collect();
    let t = (0..BATCH).map(|k| (k * 5 % 7) as f64 - 3.0).collect();
    [("x".to_owned(), Tensor { sizes: vec![BATCH, INS], data: x }), ("t".to_owned(), Tensor { sizes: vec![BATCH], data: t })].into()
}

/// Loss, gradient norm, new parameter and state of a step from these parameters and zero state.
pub fn expected(rate: f64) -> (f64, f64, Vec<f64>, Vec<f64>) {
    let (params, inputs) = (params(), inputs());
    let (w, x, t) = (&params["w"].data, &inputs["x"].data, &inputs["t"].data);
    let (mut loss, mut g) = (0.0, vec![0.0; INS as usize]);
    for (row, t) in x.chunks(INS as usize).zip(t) {
        let e = row.iter().zip(w).map(|(x, w)| x * w).sum::<f64>() - t;
        loss += e * e / BATCH as f64;
        g.iter_mut().zip(row).for_each(|(g, x)| *g += x * e * 2.0 / BATCH as f64);
    }
    let norm = g.iter().map(|g| g * g).sum::<f64>().sqrt();
    (loss, norm, w.iter().zip(&g).map(|(w, g)| w - rate * g).collect(), g)
}
