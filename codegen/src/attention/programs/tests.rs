//! Attention with random programs of scores: masks, biases, windows, documents, soft caps, sizes and groups in
//! any mix.

use crate::target::Target;
use crate::testing::{KernelDraft, RandomNumbers, emulate, random_inputs, run, seeds};
use ir::dim::Dim;
use ir::graph::Value;
use ir::kernel::{Family, Kernel};
use ir::op::{Attention, AttentionGrad, Binary, Compare, DType, Op, Real, Scoring, Unary};
use std::collections::{BTreeMap, BTreeSet};

/// What a further operand holds.
#[derive(Clone, Copy)]
enum Fill {
    /// 0, 1, ..
    Positions,
    /// Numbers that never decrease, each repeated for a while.
    Documents,
    Bools,
    /// Bools that stay the same for long stretches.
    There,
    /// A number of keys.
    Lengths,
    Floats,
    /// Small positive numbers.
    Slopes,
    /// Any 32 bits.
    Bits,
}

/// A problem in the making.
struct Draft {
    scoring: Scoring,
    operands: Vec<(DType, Vec<Dim>, Fill)>,
    /// Features of the problem, for the count of pairs.
    features: BTreeSet<&'static str>,
    batch: Dim,
    kv: Dim,
    group: Dim,
    at: Dim,
    keys: Dim,
}

impl Draft {
    fn operand(&mut self, dtype: DType, dims: &[Dim], fill: Fill) -> u32 {
        self.operands.push((dtype, dims.to_vec(), fill));
        self.scoring.step(Op::Input(self.operands.len() as u32), dtype, &[])
    }

    fn bool(&mut self, op: Op, args: &[u32]) -> u32 {
        self.scoring.step(op, DType::Bool, args)
    }

    fn f32(&mut self, op: Op, args: &[u32]) -> u32 {
        self.scoring.step(op, DType::F32, args)
    }

    fn int(&mut self, op: Op, args: &[u32]) -> u32 {
        self.scoring.step(op, DType::I32, args)
    }

    /// The positions of queries and of keys, as operands that are added only once.
    fn positions(&mut self) -> [u32; 2] {
        let place = |d: &Draft, dim: Dim| d.operands.iter().position(|o| o.1 == [dim] && matches!(o.2, Fill::Positions));
        [self.at, self.keys].map(|dim| match place(self, dim) {
            Some(k) => self.scoring.step(Op::Input(k as u32 + 1), DType::I32, &[]),
            None => self.operand(DType::I32, &[dim], Fill::Positions),
        })
    }

    /// One condition of visibility.
    fn condition(&mut self, which: u64, random: &mut RandomNumbers) -> u32 {
        let (at, keys, batch) = (self.at, self.keys, self.batch);
        let feature = ["causal", "window", "documents", "prefix", "padding", "lengths", "chunks", "pairs"][which as usize];
        self.features.insert(feature);
        match feature {
            "causal" => {
                let [q, k] = self.positions();
                self.bool(Op::Compare(Compare::Ge), &[q, k])
            }
            "window" => {
                let [q, k] = self.positions();
                let (back, size) = (self.int(Op::Binary(Binary::Sub), &[q, k]), random.below(60) + 1);
                let size = self.int(Op::Const(Real(size as f64)), &[]);
                self.bool(Op::Compare(Compare::Lt), &[back, size])
            }
            "documents" => {
                let [q, k] = [at, keys].map(|d| self.operand(DType::I32, &[batch, d], Fill::Documents));
                self.bool(Op::Compare(Compare::Eq), &[q, k])
            }
            "prefix" => {
                let [q, k] = self.positions();
                let prefix = self.int(Op::Const(Real(random.below(40) as f64)), &[]);
                let (before, early) = (self.bool(Op::Compare(Compare::Le), &[k, q]), self.bool(Op::Compare(Compare::Lt), &[k, prefix]));
                self.bool(Op::Binary(Binary::Or), &[before, early])
            }
            "padding" => {
                let side = if random.below(4) == 0 { at } else { keys };
                let there = self.operand(DType::Bool, &[batch, side], Fill::There);
                if random.below(2) == 0 { there } else { self.bool(Op::Unary(Unary::Not), &[there]) }
            }
            "lengths" => {
                let [_, k] = self.positions();
                let length = self.operand(DType::I32, &[batch], Fill::Lengths);
                self.bool(Op::Compare(Compare::Lt), &[k, length])
            }
            "chunks" => {
                let sides = self.positions();
                let size = self.int(Op::Const(Real(random.below(30) as f64 + 3.0)), &[]);
                let [q, k] = sides.map(|x| self.int(Op::Binary(Binary::Div), &[x, size]));
                self.bool(Op::Compare(Compare::Eq), &[q, k])
            }
            _ => self.operand(DType::Bool, &[at, keys], Fill::Bools),
        }
    }

    /// A change of the score.
    fn change(&mut self, which: u64, score: u32, random: &mut RandomNumbers) -> u32 {
        let (at, keys, batch, kv, group) = (self.at, self.keys, self.batch, self.kv, self.group);
        let feature = ["cap", "alibi", "bias of keys", "bias of pairs", "factor of queries"][which as usize];
        self.features.insert(feature);
        match feature {
            "cap" => {
                let cap = self.f32(Op::Const(Real(0.5 + random.below(8) as f64)), &[]);
                let part = self.f32(Op::Binary(Binary::Div), &[score, cap]);
                let bent = self.f32(Op::Unary(Unary::Tanh), &[part]);
                self.f32(Op::Binary(Binary::Mul), &[bent, cap])
            }
            "alibi" => {
                let [q, k] = self.positions();
                let back = self.int(Op::Binary(Binary::Sub), &[k, q]);
                let far = self.f32(Op::Cast, &[back]);
                let slope = self.operand(DType::F32, &[kv, group], Fill::Slopes);
                let bias = self.f32(Op::Binary(Binary::Mul), &[slope, far]);
                self.f32(Op::Add, &[score, bias])
            }
            "bias of keys" => {
                let bias = self.operand(DType::Bf16, &[batch, keys], Fill::Floats);
                let bias = self.f32(Op::Cast, &[bias]);
                self.f32(Op::Add, &[score, bias])
            }
            "bias of pairs" => {
                let bias = self.operand(DType::F32, &[kv, at, keys], Fill::Floats);
                self.f32(Op::Add, &[score, bias])
            }
            _ => {
                let factor = self.operand(DType::F32, &[batch, at], Fill::Slopes);
                self.f32(Op::Binary(Binary::Mul), &[score, factor])
            }
        }
    }
}

impl Draft {
    /// A weight of probabilities: dropout, or a value of each query or key.
    fn weight(&mut self, which: u64, random: &mut RandomNumbers) -> u32 {
        let (at, keys, batch, kv, group) = (self.at, self.keys, self.batch, self.kv, self.group);
        self.features.insert("weights");
        match which {
            0 => self.operand(DType::F32, &[batch, at], Fill::Floats),
            1 => self.operand(DType::F32, &[kv, keys], Fill::Floats),
            _ => {
                self.features.insert("drops");
                let row = self.operand(DType::I32, &[batch, kv, group, at], Fill::Bits);
                let key = self.positions()[1];
                let bits = self.int(Op::Binary(Binary::Mix), &[row, key]);
                let rate = 0.1 + 0.2 * random.below(5) as f64;
                let limit = self.int(Op::Const(Real((rate * 2f64.powi(32) - 2f64.powi(31)).floor())), &[]);
                let kept = self.bool(Op::Compare(Compare::Ge), &[bits, limit]);
                let [some, none] = [1.0 / (1.0 - rate), 0.0].map(|x| self.f32(Op::Const(Real(x)), &[]));
                self.f32(Op::Select, &[kept, some, none])
            }
        }
    }
}

/// A problem: its forward and backward kernels, that of the gradient of a bias if there is one, and the operands of
/// the latter; the first three and the last ones are the forward kernel's.
struct Problem {
    forward: Kernel,
    backward: Kernel,
    bias: Option<Kernel>,
    inputs: Vec<Vec<f64>>,
    features: BTreeSet<&'static str>,
    dtype: DType,
}

fn problem(seed: u64, [d, values]: [u64; 2], dtype: DType) -> Problem {
    let mut random = RandomNumbers::new(seed);
    let mut make = KernelDraft::default();
    let size = |random: &mut RandomNumbers, most: u64| random.below(most) + 1;
    let [batch, kv, group] = ["batch", "kv", "group"].map(|name| make.dim(name, size(&mut random, 2)));
    let d = make.dim("d", d);
    let values = if make.body.dims.size(d) == values { d } else { make.dim("values", values) };
    let queries = size(&mut random, 150);
    let same = random.below(2) == 0;
    let (at, keys) = (make.dim("at", queries), make.dim("keys", if same { queries } else { size(&mut random, 150) }));
    let mut draft = Draft { scoring: Scoring::PLAIN, operands: vec![], features: BTreeSet::new(), batch, kv, group, at, keys };
    for _ in 0..random.below(3) {
        let which = random.below(5);
        let before = draft.scoring.score.unwrap_or_else(|| draft.scoring.step(Op::Input(0), DType::F32, &[]));
        draft.scoring.score = Some(draft.change(which, before, &mut random));
    }
    for _ in 0..random.below(3) {
        let which = random.below(8);
        let more = draft.condition(which, &mut random);
        let seen = draft.scoring.seen;
        draft.scoring.seen = Some(seen.map_or(more, |seen| draft.bool(Op::Binary(Binary::And), &[seen, more])));
    }
    // Half of the problems have weights, and half of these are dropout.
    if let which @ 0..4 = random.below(8) {
        draft.scoring.weight = Some(draft.weight(which, &mut random));
    }
    let Draft { scoring, operands, mut features, .. } = draft;
    if values != d {
        features.insert("values of their own");
    }
    if make.body.dims.size(group) > 1 {
        features.insert("groups");
    }
    let (q_dims, k_dims) = (vec![batch, at, kv, group, d], vec![batch, keys, kv, d]);
    let (out_dims, v_dims) = (vec![batch, at, kv, group, values], vec![batch, keys, kv, values]);
    let attention = Attention { at, keys, d, values, scale: Real(0.3), scoring };
    let further = |make: &mut KernelDraft| operands.iter().map(|(dtype, dims, _)| make.input(*dtype, dims)).collect::<Vec<Value>>();

    let mut first = KernelDraft::default();
    first.body = make.body.clone();
    let [q, k, v] = [&q_dims, &k_dims, &v_dims].map(|dims| first.input(dtype, dims));
    let more = further(&mut first);
    let out = first.op(Op::Attention(attention.clone()), &[&[q, k, v], &more[..]].concat());
    let lse = first.op(Op::AttentionLse(attention.without_values()), &[&[q, k], &more[..]].concat());
    let forward = first.kernel(Family::Attention, &[out, lse]);

    let [q, k, v] = [&q_dims, &k_dims, &v_dims].map(|dims| make.input(dtype, dims));
    let [lse, delta] = [0, 1].map(|_| make.input(DType::F32, &q_dims[..4]));
    let dout = make.input(dtype, &out_dims);
    let more = further(&mut make);
    let bias = attention.scoring.bias().map(|k| more[k]).filter(|v| [at, keys].iter().all(|d| make.body[*v].ty.has(*d)));
    let backward_of = |mut make: KernelDraft, gradients: &[(AttentionGrad, Value)]| {
        let args = [&[q, k, v, lse, delta, dout], &more[..]].concat();
        let one = |(which, of): &(AttentionGrad, Value)| {
            let ty = make.body[*of].ty.clone();
            make.op_as(Op::AttentionGrad(attention.clone(), *which), &args, ty)
        };
        let outputs: Vec<Value> = gradients.iter().map(one).collect();
        make.kernel(Family::AttentionGrad, &outputs)
    };
    let bias = bias.map(|bias| backward_of(make.clone(), &[(AttentionGrad::Bias, bias)]));
    if bias.is_some() {
        features.insert("bias that trains");
    }
    let backward = backward_of(make, &[(AttentionGrad::Q, q), (AttentionGrad::K, k), (AttentionGrad::V, v)]);

    let mut inputs = random_inputs(&backward, seed, 4);
    for ((input, operand), (dtype, _, fill)) in inputs[6..].iter_mut().zip(&backward.inputs[6..]).zip(&operands) {
        let along = backward.body.dims.size(*operand.ty.dims.last().expect("operands have dims"));
        let (mut document, mut there) = (0, true);
        for (i, x) in (0..).zip(input.iter_mut()) {
            document = if i % along == 0 { 0 } else { document + u64::from(random.below(12) == 0) };
            there ^= random.below(40) == 0;
            *x = match fill {
                Fill::Positions => (i % along) as f64,
                Fill::Documents => document as f64,
                Fill::Bools => random.below(4).min(1) as f64,
                Fill::There => f64::from(u8::from(there)),
                Fill::Lengths => random.below(150) as f64,
                Fill::Floats => dtype.round(2.0 * random.unit()),
                Fill::Bits => f64::from(ir::random::mix(i ^ seed) as i32),
                Fill::Slopes => dtype.round(0.05 + random.unit().abs() / 4.0),
            };
        }
    }
    let of_forward = [&inputs[..3], &inputs[6..]].concat();
    inputs[3] = forward.run(&of_forward, &[]).swap_remove(1);
    Problem { forward, backward, bias, inputs, features, dtype }
}

/// Runs both kernels of a problem and compares the results with the evaluator's.
fn check(seed: u64, problem: &Problem, run: impl Fn(&Kernel, &[Vec<f64>]) -> Vec<Vec<f64>>) {
    let tolerance = if problem.dtype == DType::F32 { 2e-5 } else { 1.5e-2 };
    let of_forward = [&problem.inputs[..3], &problem.inputs[6..]].concat();
    let backward = [Some(&problem.backward), problem.bias.as_ref()].into_iter().flatten().map(|k| (k, &problem.inputs, 3.0 * tolerance));
    for (kernel, inputs, tolerance) in [(&problem.forward, &of_forward, tolerance)].into_iter().chain(backward) {
        kernel.verify().expect("a well-formed test");
        for (number, (want, got)) in kernel.run(inputs, &[]).iter().zip(run(kernel, inputs)).enumerate() {
            for (at, (w, g)) in want.iter().zip(got).enumerate() {
                let close = (g - w).abs() <= tolerance * (1.0 + w.abs()) || g == *w;
                assert!(close, "seed {seed} ({:?}) output {number} element {at}: {g}, not {w}", problem.features);
            }
        }
    }
}

#[test]
fn any_program_of_scores_agrees_on_cpus() {
    let host = Target::host().expect("a supported machine");
    let mut pairs: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for seed in seeds(ATTENTION_PROGRAMS) {
        let problem = problem(seed, [5 + seed % 40, if seed % 3 == 0 { 3 + seed % 34 } else { 5 + seed % 40 }], DType::F32);
        check(seed, &problem, |kernel, inputs| run(kernel, &host, inputs, &[], 0.0));
        for a in &problem.features {
            problem.features.iter().filter(|b| a < *b).for_each(|b| *pairs.entry((a, b)).or_default() += 1);
        }
    }
    println!("pairs of features: {pairs:?}");
    assert!(pairs.len() > 70 || std::env::var_os("KERNELS").is_some(), "few pairs of features: {}", pairs.len());
}

/// Programs in one run. `make test-long-kernels` has 600.
const ATTENTION_PROGRAMS: u64 = 40;

/// Every pair of sizes in both dtypes of 16 bits on each of two generations of GPUs, a program of its own for each;
/// with `KERNELS` (`make test-long-kernels`) every program on both.
#[test]
fn any_program_of_scores_agrees_on_gpus() {
    let sizes = [[64, 64], [128, 128], [20, 20], [80, 80], [96, 96], [64, 64], [12, 40], [160, 160], [192, 128], [72, 104], [256, 256], [192, 192]];
    let all = std::env::var_os("KERNELS").is_some();
    let (mut forms, mut biases) = (BTreeSet::new(), BTreeMap::<(&str, bool), usize>::new());
    for (seed, d) in (1000..1048).zip(sizes.into_iter().cycle()) {
        let dtype = if d[0] == 20 || d[0] == 12 { DType::F32 } else { [DType::Bf16, DType::F16][seed as usize / 12 % 2] };
        let generations = ["sm_80", "sm_90a"];
        let gpus = match dtype {
            DType::F32 => &generations[..1],
            _ if all => &generations[..],
            // The same sizes and dtype recur after 24 programs, and then get the other GPU.
            _ => std::slice::from_ref(&generations[(seed + seed / 24) as usize % 2]),
        };
        for gpu in gpus {
            let problem = problem(seed, d, dtype);
            forms.insert((d, dtype, *gpu));
            *biases.entry((gpu, dtype == DType::F32)).or_default() += usize::from(problem.bias.is_some());
            check(seed, &problem, |kernel, inputs| emulate(kernel, &Target::gpu(gpu), inputs, &[], 0.0));
        }
    }
    // Ten of the sizes are for 16-bit floats, and one of them is listed twice.
    assert_eq!(forms.len(), 9 * 2 * 2 + 2);
    println!("biases that train: {biases:?}");
    assert!(biases.values().all(|n| *n >= 1) && biases.len() == 3, "few biases that train: {biases:?}");
}
